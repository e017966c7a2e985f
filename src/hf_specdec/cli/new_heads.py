"""The head that a training command begins with: a new one that fits target and machine, or one that is there."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, TypeVar

import psutil
import torch

from hf_specdec.checkpoints.formats import Head
from hf_specdec.checkpoints.hub import load_head
from hf_specdec.cli.runs import training_package
from hf_specdec.errors import InvalidConfigError
from hf_specdec.heads.base import portable_name
from hf_specdec.heads.eagle import EagleHead
from hf_specdec.heads.eagle3 import Eagle3Head
from hf_specdec.heads.medusa import MedusaHeads

if TYPE_CHECKING:
    from hf_specdec.training import Conversation

NewHead = TypeVar("NewHead", MedusaHeads, EagleHead, Eagle3Head)


def of_a_new_head(fields: dict[str, Any], initial_head: str | None) -> dict[str, Any]:
    """What was told of a head that is to be made.

    Raises:
        InvalidConfigError: There is one already.
    """
    told = {name: value for name, value in fields.items() if value is not None}
    if told and initial_head is not None:
        raise InvalidConfigError(
            f"--initial-head {initial_head} is what its config says; {', '.join(told)} would be ignored.",
            "Leave those options out, or train a new head.",
        )
    return told


def new_head(kind: type[NewHead], config: Any, target_config: Any) -> NewHead:
    """A head whose sizes are the target's, and for which there is room; both are checked without a byte of it.

    Raises:
        DrafterMismatchError: It does not fit the target.
        InvalidConfigError: It needs more memory than there is.
    """
    with torch.device("meta"):
        planned = kind(copy.deepcopy(config))
    planned.check_sizes(target_config.get_text_config(decoder=True))
    needed, free = sum(weight.nbytes for weight in planned.parameters()), psutil.virtual_memory().available
    if needed > free:
        raise InvalidConfigError(
            f"The head would have {needed / 1e9:.1f} GB of weights, this machine has {free / 1e9:.1f} GB free.",
            "Give smaller fields in --head-fields, or a --draft-vocab-size.",
        )
    return kind(config)


def read_head(place: str, kind: Any, name: str) -> Any:
    """A head to go on from.

    Args:
        place: Directory or Hub id.
        kind: Its class, or several.
        name: Of that, for the error.

    Raises:
        InvalidConfigError: It is of another class.
    """
    loaded = load_head(place)
    if not isinstance(loaded, kind):
        raise InvalidConfigError(f"{place} is not {name} but {type(loaded).__name__}.")
    return loaded.float()


def name_target(config: Any, name: str | None, path: str | None = None) -> None:
    """Write down which model a head is for, never where it lies on this machine.

    Args:
        config: The head's.
        name: What --base-model-name says.
        path: Relative to the head, where the model is saved beside it.
    """
    config.base_model_name_or_path = name or path or portable_name(config.base_model_name_or_path)


def set_vocabulary(head: Head, talks: list[Conversation]) -> None:
    """Give it the most frequent tokens, where it drafts over some only."""
    size = head.config.draft_vocab_size
    if size is not None:
        head.set_hot_token_ids(training_package().most_frequent_tokens(talks, size))
