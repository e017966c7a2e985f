"""Create or load the draft head that a `train` command starts from, and prepare its config."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import psutil
import torch

from hf_specdec import training
from hf_specdec.checkpoints.formats import Head
from hf_specdec.checkpoints.hub import load_head
from hf_specdec.errors import InvalidConfigError
from hf_specdec.generation.loading import load_config
from hf_specdec.heads.base import portable_name
from hf_specdec.heads.dflash import DFlashHead
from hf_specdec.heads.eagle import EagleHead
from hf_specdec.heads.eagle3 import Eagle3Head
from hf_specdec.heads.medusa import MedusaHeads

if TYPE_CHECKING:
    from hf_specdec.training import Conversation

NewHead = TypeVar("NewHead", MedusaHeads, EagleHead, Eagle3Head, DFlashHead)


def new_head(kind: type[NewHead], config: Any, target_config: Any) -> NewHead:
    """Create a head with random weights, after checking that it fits the target and the free main memory.

    Raises:
        DrafterMismatchError: The head does not fit the target.
        InvalidConfigError: The head needs more memory than is free.
    """
    with torch.device("meta"):
        planned = kind(copy.deepcopy(config))
    planned.check_sizes(target_config.get_text_config(decoder=True))
    needed, free = sum(weight.nbytes for weight in planned.parameters()), psutil.virtual_memory().available
    if needed > free:
        raise InvalidConfigError(
            f"The head needs {needed / 1e9:.1f} GB for its weights, but only {free / 1e9:.1f} GB of memory is free.",
            "Reduce sizes in --head-fields, or give a --draft-vocab-size.",
        )
    return kind(config)


def load_initial_head(source: str, kind: Any, name: str) -> Any:
    """Load a head to continue training from, in float32.

    Args:
        source: Directory or Hub id.
        kind: Expected class, or a union of classes.
        name: What `kind` is called in the error message, such as "an EAGLE head".

    Raises:
        InvalidConfigError: The head is not an instance of `kind`.
        CheckpointFormatError: The head cannot be read.
    """
    loaded = load_head(source)
    if not isinstance(loaded, kind):
        raise InvalidConfigError(f"--initial-head {source} must be {name}, got {type(loaded).__name__}.")
    return loaded.float()


def head_to_train(
    initial_head: str | None, kind: Any, kind_name: str, create: Callable[[Any], Any], model: str | None,
    name: str | None, path: str | None = None,
) -> Any:  # fmt: skip
    """Create the head to train, or load the initial one; store the target's name in its config.

    Args:
        initial_head: Path or Hub id of a head to continue training; None creates one.
        kind, kind_name: See `load_initial_head`.
        create: Creates a head, given the target's config, see `new_head`.
        model: Path or Hub id of the target; None is the packaged model.
        name: Value of `--base-model-name`.
        path: See `name_target`.

    Raises:
        DrafterMismatchError: The sizes differ from the target's.
        InvalidConfigError, CheckpointFormatError: See `new_head` and `load_initial_head`.
    """
    target_config = load_config(model)
    head = create(target_config) if initial_head is None else load_initial_head(initial_head, kind, kind_name)
    head.check_sizes(target_config.get_text_config(decoder=True))
    name_target(head.config, name, path)
    return head


def name_target(config: Any, name: str | None, path: str | None = None) -> None:
    """Store the target's name in a head's config: `name`, else `path`, else the current name, or None if it is local.

    Args:
        config: Config of the head.
        name: Value of `--base-model-name`.
        path: Path of the target relative to the head's directory, if the target is saved there.
    """
    config.base_model_name_or_path = name or path or portable_name(config.base_model_name_or_path)


def set_draft_vocabulary(head: Head, conversations: list[Conversation]) -> None:
    """If the head drafts only some of the target's tokens, choose the most frequent ones in the answers."""
    size = head.config.draft_vocab_size
    if size is not None:
        head.set_hot_token_ids(training.most_frequent_tokens(conversations, size))


def choose_mask_token(tokenizer: Any, conversations: list[Conversation], vocab_size: int) -> int:
    """Return a token to stand for the tokens that a block head predicts: one that never occurs in the conversations.

    Prefers rows of the embedding beyond the tokenizer's vocabulary, which no text uses, then added and special tokens,
    then any token.

    Args:
        tokenizer: The target's tokenizer.
        conversations: The training data.
        vocab_size: Rows of the target's embedding.

    Raises:
        InvalidConfigError: All tokens occur.
    """
    used = {token for one in conversations for token in one.input_ids}
    used |= {tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    beyond = range(vocab_size - 1, len(tokenizer) - 1, -1)
    added = sorted({*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}, reverse=True)
    for token in (*beyond, *added, *range(vocab_size - 1, -1, -1)):
        if token < vocab_size and token not in used:
            return int(token)
    raise InvalidConfigError(
        "All tokens occur in the data, so none is left to stand for tokens to predict.",
        "Name a token that texts rarely contain with --mask-token-id.",
    )
