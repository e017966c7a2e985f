"""Create training data for draft heads and train them with transformers' Trainer.

This package does not import the decoding loop.
"""

from hf_specdec.training.arguments import head_arguments
from hf_specdec.training.conversations import (
    Conversation,
    drop_near_duplicates,
    hold_out,
    most_frequent_tokens,
    read_conversations,
)
from hf_specdec.training.dflash import DFlashTrainingConfig, train_dflash
from hf_specdec.training.distill import DistillConfig, distill, invented_prompts
from hf_specdec.training.eagle import EagleTrainingConfig, train_eagle
from hf_specdec.training.features import FeatureStore, capture_features, feature_bytes, openings
from hf_specdec.training.first_layer import start_first_layer
from hf_specdec.training.from_target import start_block_from_target, start_from_target
from hf_specdec.training.measures import predicted_tau
from hf_specdec.training.medusa import MedusaTrainingConfig, train_medusa
from hf_specdec.training.medusa2 import Medusa2TrainingConfig, train_medusa2
from hf_specdec.training.prompts import Prompt, read_prompts
from hf_specdec.training.runs import check_same_run, run_facts
from hf_specdec.training.servers import ServerTeacher
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
