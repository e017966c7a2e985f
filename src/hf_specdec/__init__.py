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
    "load_head",
    "model_and_head",
    "packaged_model",
    "register_drafter",
]

_MODULES = {
    "AdaptiveConfig": "hf_specdec.config",
    "AnswerHistory": "hf_specdec.drafters.history",
    "AutoSpeculativeModelForCausalLM": "hf_specdec.generation.auto",
    "Budget": "hf_specdec.trees.draft",
    "CacheCapacityError": "hf_specdec.errors",
    "CheckpointFormatError": "hf_specdec.errors",
    "DFlashConfig": "hf_specdec.heads.dflash",
    "DFlashHead": "hf_specdec.heads.dflash",
    "Draft": "hf_specdec.trees.draft",
    "DraftSession": "hf_specdec.drafters.base",
    "Drafter": "hf_specdec.drafters.base",
    "DrafterMismatchError": "hf_specdec.errors",
    "Eagle3Config": "hf_specdec.heads.eagle3",
    "Eagle3Head": "hf_specdec.heads.eagle3",
    "EagleConfig": "hf_specdec.heads.eagle",
    "EagleHead": "hf_specdec.heads.eagle",
    "HeadTensorsError": "hf_specdec.errors",
    "InvalidConfigError": "hf_specdec.errors",
    "MedusaConfig": "hf_specdec.heads.medusa",
    "MedusaHeads": "hf_specdec.heads.medusa",
    "MtpConfig": "hf_specdec.heads.mtp",
    "MtpHead": "hf_specdec.heads.mtp",
    "Needs": "hf_specdec.drafters.base",
    "SpeculationStats": "hf_specdec.reporting.stats",
    "SpeculativeConfig": "hf_specdec.config",
    "SpeculativeDecodingError": "hf_specdec.errors",
    "SpeculativeGenerationMixin": "hf_specdec.generation.mixin",
    "UnsupportedGenerationError": "hf_specdec.errors",
    "UnsupportedModelError": "hf_specdec.errors",
    "export_head": "hf_specdec.checkpoints.export",
    "load_head": "hf_specdec.checkpoints.hub",
    "model_and_head": "hf_specdec.generation.loading",
    "packaged_model": "hf_specdec.generation.loading",
    "register_drafter": "hf_specdec.drafters.registry",
}
"""Module that defines each name."""

if not TYPE_CHECKING:  # a type checker would take any name for one of this package

    def __getattr__(name: str) -> Any:
        """Import one of the names in `__all__`; the first also registers the heads with transformers' auto classes."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if not _MODULES[name].endswith(".errors"):
            importlib.import_module("hf_specdec.checkpoints.hub")
        value = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
