"""Scripts of `benchmarks/`, `examples/` and `heads/recipe/` as modules, or run; plain answers; code of pages."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_specdec.generation.loading import encode_chat

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
EXAMPLES = BENCHMARKS.parent / "examples"


def script(name: str, folder: Path = BENCHMARKS) -> ModuleType:
    """The module of a script, run as an import runs it.

    Args:
        name: Its path below the folder, without the ending.
        folder: Where it lies.
    """
    spec = importlib.util.spec_from_file_location(f"{folder.name}_{Path(name).name}", folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    if str(folder) not in sys.path:  # a script may import its neighbours
        sys.path.append(str(folder))
    spec.loader.exec_module(module)
    return module


def run_script(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *arguments: Any) -> Any:
    """Run the main function of a script, and return its module."""
    module = script(name, folder)
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    module.main()
    return module


def run_example(name: str, monkeypatch: pytest.MonkeyPatch, *arguments: Any) -> Any:
    """Run a script of `examples/`, and return its module."""
    return run_script(name, EXAMPLES, monkeypatch, *arguments)


def plain_answers(saved: Path, texts: list[str], count: int) -> list[str]:
    """What a model alone says to each text, as its user's only turn."""
    return [plain_turns(saved, [text], count)[0] for text in texts]


def plain_turns(saved: Path, texts: list[str], count: int) -> list[str]:
    """What a model alone says in a conversation."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(saved), AutoTokenizer.from_pretrained(saved)
    turns: list[str] = []
    for text in texts:
        inputs = encode_chat(tokenizer, [*turns, text], model.device)
        ids = model.generate(**inputs, max_new_tokens=count, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        turns += [text, tokenizer.decode(ids, skip_special_tokens=True).strip()]
    return turns[1::2]


def code_block(text: str, after: str) -> str:
    """The first block of Python behind a text of a page."""
    return text[text.index(after) :].split("```python\n", 1)[1].split("```", 1)[0]
