"""The API reference: it defines the names that its texts refer to, and its examples run."""

from __future__ import annotations

import inspect
import pydoc
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from hf_specdec import Eagle3Head, EagleHead, MtpHead
from hf_specdec.drafters import registry
from hf_specdec.training import EagleTrainingConfig

PAGES = sorted((Path(__file__).parents[1] / "docs" / "reference").glob("*.md"))


def entries(page: str) -> list[str]:
    return re.findall(r"^::: (\S+)$", page, flags=re.MULTILINE)


def located(entry: str) -> Any:
    """Return what an entry names: a function may hide a module of its name."""
    module, _, name = entry.rpartition(".")
    return getattr(sys.modules[module], name) if module in sys.modules else pydoc.locate(entry)


def examples(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)


def test_a_text_refers_only_to_names_that_the_reference_has() -> None:
    objects: dict[str, Any] = {}
    for page in PAGES:
        objects |= {entry: located(entry) for entry in entries(page.read_text())}
    assert None not in objects.values()
    known = {entry.rsplit(".", 1)[1] for entry in objects}
    known |= {name for found in objects.values() if inspect.isclass(found) for name in vars(found)}
    for entry, found in objects.items():
        text = inspect.getdoc(found) or ""
        for name in re.findall(r"\b[Ss]ee `([\w.]+)[`(]", text):
            assert name.rsplit(".", 1)[-1] in known, f"{entry} refers to {name}"


def test_the_training_defaults_are_those_in_the_text() -> None:
    text = inspect.getdoc(EagleTrainingConfig.for_head) or ""
    for name, kind in (("EAGLE-1 and 2", EagleHead), ("EAGLE-3", Eagle3Head), ("MTP", MtpHead)):
        defaults = EagleTrainingConfig.for_head(kind.__new__(kind))
        (line,) = re.findall(rf"^\* {name}: (.*)$", text, flags=re.MULTILINE)
        stated = {field: float(value) for field, value in re.findall(r"`(\w+)` ([\d.]*\d)", line)}
        assert len(stated) == 5
        assert stated == {field: getattr(defaults, field) for field in stated}


@pytest.mark.parametrize("page", [page for page in PAGES if page.stem != "command_line"], ids=lambda page: page.stem)
def test_every_page_has_an_example_whose_imports_exist(page: Path) -> None:
    found = examples(page.read_text())
    assert found
    for code in found:
        compile(code, str(page), "exec")
        for imported in re.findall(r"^from hf_specdec.* import (?:\([^)]*\)|.+)", code, flags=re.MULTILINE):
            exec(imported, {})


@pytest.mark.parametrize(
    "title", ["Generating", "Statistics", "Drafters", pytest.param("Plots", marks=pytest.mark.slow)]
)
def test_examples_run(title: str, sure_llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_METHODS", dict(registry.methods()))
    (text,) = (path.read_text() for path in PAGES if path.stem == "generating")
    if title == "Generating":
        text = text.split("\n## Statistics and traces\n")[0]
    else:
        text = re.split(r"\n## (?=Statistics|Drafters\n|Plots|Errors)", text.split(f"\n## {title}")[-1])[0]
    inputs = {"input_ids": torch.tensor([[5, 6, 7, 5, 6, 7, 5, 6]])}
    sure_llama.generation_config.max_new_tokens = 12
    scope: dict[str, Any] = {"model": sure_llama, "inputs": inputs, "tokenizer": zoo.chat_tokenizer()}
    for code in examples(text):
        if "trainer_state.json" not in code and "org/head" not in code:  # of a training run, and on the Hub
            exec(code, scope)
    assert scope["ids"].shape[1] > inputs["input_ids"].shape[1]
