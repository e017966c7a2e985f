"""Create training data for draft heads and train them with transformers' Trainer.

This package does not import the decoding loop.
"""

from hf_specdec.training.block_objective import DFlashTrainingConfig, train_dflash
from hf_specdec.training.data import (
    Conversation,
    Prompt,
    drop_near_duplicates,
    hold_out,
    invented_prompts,
    most_frequent_tokens,
    read_conversations,
    read_prompts,
)
from hf_specdec.training.distillation import DistillConfig, distill
from hf_specdec.training.eagle_objective import EagleTrainingConfig, train_eagle
from hf_specdec.training.feature_store import FeatureStore, capture_features, feature_bytes, openings
from hf_specdec.training.medusa_objectives import (
    Medusa2TrainingConfig,
    MedusaTrainingConfig,
    train_medusa,
    train_medusa2,
)
from hf_specdec.training.objectives import predicted_tau
from hf_specdec.training.run_setup import check_same_run, head_arguments, run_facts
from hf_specdec.training.servers import ServerTeacher
from hf_specdec.training.starts import start_block_from_target, start_first_layer, start_from_target
from hf_specdec.training.tree_search import TreeSearch, find_tree, search_tree
from hf_specdec.verification.features import LAST

__all__ = [
    "LAST",
    "Conversation",
    "DFlashTrainingConfig",
    "DistillConfig",
    "EagleTrainingConfig",
    "FeatureStore",
    "Medusa2TrainingConfig",
    "MedusaTrainingConfig",
    "Prompt",
    "ServerTeacher",
    "TreeSearch",
    "capture_features",
    "check_same_run",
    "distill",
    "drop_near_duplicates",
    "feature_bytes",
    "find_tree",
    "head_arguments",
    "hold_out",
    "invented_prompts",
    "most_frequent_tokens",
    "openings",
    "predicted_tau",
    "read_conversations",
    "read_prompts",
    "run_facts",
    "search_tree",
    "start_block_from_target",
    "start_first_layer",
    "start_from_target",
    "train_dflash",
    "train_eagle",
    "train_medusa",
    "train_medusa2",
]
