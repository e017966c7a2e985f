"""The adapter of a target for which a head was trained, as ModelOpt stores it beside co-trained heads.

Source: the export of `eagle_base_lora` in ModelOpt (`modelopt/torch/export/plugins/hf_spec_export.py`), in peft's
format.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.checkpoints.files import TensorFiles
from hf_specdec.errors import CheckpointFormatError, DrafterMismatchError

ADAPTER_CONFIG_NAME = "adapter_config.json"
ADAPTER_WEIGHTS_NAME = "adapter_model.safetensors"

PEFT_PREFIX = "base_model.model."


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """The adapter of a target, found beside a head."""

    where: str  # directory or repository of the head, for error messages
    weights: Path  # the adapter's safetensors file


def check_adapter(model: PreTrainedModel, adapter: AdapterFiles) -> None:
    """Check that an adapter is loaded into a model and active, and that its weights equal the stored ones.

    Raises:
        DrafterMismatchError: The adapter is not loaded, not active or merged, or another one is loaded.
        CheckpointFormatError: The adapter's file is broken or has no tensors.
    """
    stored = TensorFiles([adapter.weights])
    names = sorted(stored.shapes)
    if not names:
        raise CheckpointFormatError(f"{adapter.weights} holds no tensors.")
    loaded = dict(_loaded(model))
    values = stored.read(names)
    absent = [name for name in names if not _equal(loaded.get(name.removeprefix(PEFT_PREFIX)), values[name])]
    if absent:
        state = "it is not loaded" if len(absent) == len(names) else f"{len(absent)} of its tensors differ"
        raise DrafterMismatchError(
            f"The head {adapter.where} was trained together with an adapter of its target, and {state} or not "
            f"active in this {type(model).__name__}.",
            f"First load it, without merging: model.load_adapter({str(adapter.weights.parent)!r}).",
        )


def _loaded(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield name and value of the parameters of active adapters; names as in peft's files, without `PEFT_PREFIX`."""
    for path, module in model.named_modules():
        if getattr(module, "disable_adapters", True):
            continue
        active = set(module.active_adapters)
        for name, parameter in module.named_parameters():
            match = re.fullmatch(r"(lora_[AB]|lora_embedding_[AB]|lora_magnitude_vector)\.([^.]+)(\.weight)?", name)
            if match and match[2] in active:
                suffix = "" if match[1] == "lora_magnitude_vector" else match[3] or ""
                yield f"{path}.{match[1]}{suffix}".removeprefix(PEFT_PREFIX), parameter


def _equal(loaded: Tensor | None, stored: Tensor) -> bool:
    if loaded is None or loaded.shape != stored.shape or loaded.is_meta:
        return False
    return torch.equal(loaded.detach().cpu(), stored.to(loaded.dtype))
