"""Lossless speculative decoding for Hugging Face transformers: `attach` adds `speculative=` to `model.generate()`.

Example:
    from transformers import AutoModelForCausalLM
    from hf_specdec import SpeculativeGenerationMixin

    model = SpeculativeGenerationMixin.attach(AutoModelForCausalLM.from_pretrained("org/model"))
    ids = model.generate(**inputs, speculative="auto")
    print(model.last_speculation)

    model.load_drafter("org/head")  # optional: a trained draft head, which "auto" then uses as well

`help(hf_specdec.SpeculativeConfig)` lists all methods and settings.
Guides and reference: https://github.com/hf-specdec/hf-specdec
"""

# All names are imported when they are first used (PEP 562), because torch and transformers take seconds to import.

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_specdec.checkpoints.export import export_head
    from hf_specdec.checkpoints.hub import load_head
    from hf_specdec.config import AdaptiveConfig, SpeculativeConfig
    from hf_specdec.drafters.base import Drafter, DraftSession, Needs
    from hf_specdec.drafters.history import AnswerHistory
    from hf_specdec.drafters.registry import register_drafter
    from hf_specdec.errors import (
        CacheCapacityError,
        CheckpointFormatError,
        DrafterMismatchError,
        HeadTensorsError,
        InvalidConfigError,
        SpeculativeDecodingError,
        UnsupportedGenerationError,
        UnsupportedModelError,
    )
    from hf_specdec.generation.auto import AutoSpeculativeModelForCausalLM
    from hf_specdec.generation.gguf_file import load_gguf
    from hf_specdec.generation.loading import model_and_head, packaged_model
    from hf_specdec.generation.mixin import SpeculativeGenerationMixin
    from hf_specdec.heads.dflash import DFlashConfig, DFlashHead
    from hf_specdec.heads.eagle import EagleConfig, EagleHead
    from hf_specdec.heads.eagle3 import Eagle3Config, Eagle3Head
    from hf_specdec.heads.medusa import MedusaConfig, MedusaHeads
    from hf_specdec.heads.mtp import MtpConfig, MtpHead
    from hf_specdec.reporting.stats import SpeculationStats
    from hf_specdec.trees.draft import Budget, Draft

__all__ = [
    "AdaptiveConfig",
    "AnswerHistory",
    "AutoSpeculativeModelForCausalLM",
    "Budget",
    "CacheCapacityError",
    "CheckpointFormatError",
    "DFlashConfig",
    "DFlashHead",
    "Draft",
    "DraftSession",
    "Drafter",
    "DrafterMismatchError",
    "Eagle3Config",
    "Eagle3Head",
    "EagleConfig",
    "EagleHead",
    "HeadTensorsError",
    "InvalidConfigError",
    "MedusaConfig",
    "MedusaHeads",
    "MtpConfig",
    "MtpHead",
    "Needs",
    "SpeculationStats",
    "SpeculativeConfig",
    "SpeculativeDecodingError",
    "SpeculativeGenerationMixin",
    "UnsupportedGenerationError",
    "UnsupportedModelError",
    "export_head",
    "load_gguf",
    "load_head",
    "model_and_head",
    "packaged_model",
    "register_drafter",
]

_MODULES = {
    "hf_specdec.checkpoints.export": ("export_head",),
    "hf_specdec.checkpoints.hub": ("load_head",),
    "hf_specdec.config": ("AdaptiveConfig", "SpeculativeConfig"),
    "hf_specdec.drafters.history": ("AnswerHistory",),
    "hf_specdec.drafters.base": ("Drafter", "DraftSession", "Needs"),
    "hf_specdec.drafters.registry": ("register_drafter",),
    "hf_specdec.errors": (
        "CacheCapacityError",
        "CheckpointFormatError",
        "DrafterMismatchError",
        "HeadTensorsError",
        "InvalidConfigError",
        "SpeculativeDecodingError",
        "UnsupportedGenerationError",
        "UnsupportedModelError",
    ),
    "hf_specdec.generation.auto": ("AutoSpeculativeModelForCausalLM",),
    "hf_specdec.generation.gguf_file": ("load_gguf",),
    "hf_specdec.generation.loading": ("model_and_head", "packaged_model"),
    "hf_specdec.generation.mixin": ("SpeculativeGenerationMixin",),
    "hf_specdec.heads.dflash": ("DFlashConfig", "DFlashHead"),
    "hf_specdec.heads.eagle": ("EagleConfig", "EagleHead"),
    "hf_specdec.heads.eagle3": ("Eagle3Config", "Eagle3Head"),
    "hf_specdec.heads.medusa": ("MedusaConfig", "MedusaHeads"),
    "hf_specdec.heads.mtp": ("MtpConfig", "MtpHead"),
    "hf_specdec.reporting.stats": ("SpeculationStats",),
    "hf_specdec.trees.draft": ("Budget", "Draft"),
}
"""The names that each module defines."""

if not TYPE_CHECKING:  # a type checker would take any name for one of this package

    def __getattr__(name: str) -> Any:
        """Import one of the names in `__all__`; the first also registers the heads with transformers' auto classes."""
        module = next((module for module, names in _MODULES.items() if name in names), None)
        if module is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if module != "hf_specdec.errors":
            importlib.import_module("hf_specdec.checkpoints.hub")
        value = globals()[name] = getattr(importlib.import_module(module), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
