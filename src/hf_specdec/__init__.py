"""Lossless speculative decoding for Hugging Face transformers: `model.generate(..., speculative="eagle")`."""

from hf_specdec.checkpoints.export import export_head
from hf_specdec.checkpoints.hub import load_head
from hf_specdec.config import AdaptiveConfig, SpeculativeConfig
from hf_specdec.drafters.answer_history import AnswerHistory
from hf_specdec.drafters.base import Drafter, DraftSession, Needs
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
    "register_drafter",
]
