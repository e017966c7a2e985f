"""What `train dflash` starts from: the head, its tokens and recipe, and weights copied from the target."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hf_specdec import training
from hf_specdec.cli.new_heads import choose_mask_token, head_to_train, new_head, set_draft_vocabulary
from hf_specdec.cli.runs import print_note
from hf_specdec.generation.loading import load_tokenizer
from hf_specdec.heads.dflash import DFlashConfig, DFlashHead
from hf_specdec.training.objectives import check_full_attention
from hf_specdec.verification.features import LAST

if TYPE_CHECKING:
    from hf_specdec.training import Conversation


def block_recipe(fields: dict[str, Any], anchors: int | None) -> training.DFlashTrainingConfig:
    """Return the recipe with the fields of `--recipe` and the value of `--anchors`, if given."""
    changes = {} if anchors is None else {"anchors": anchors}
    return training.DFlashTrainingConfig().changed(**{**fields, **changes})


def choose_tokens(head: DFlashHead, conversations: list[Conversation], model: str | None, chosen: bool) -> None:
    """Set the draft vocabulary of a new head and, unless the user has chosen it, the mask token."""
    set_draft_vocabulary(head, conversations)
    if not chosen:
        head.config.mask_token_id = choose_mask_token(load_tokenizer(model), conversations, head.config.vocab_size)


def block_head(initial_head: str | None, model: str | None, fields: dict[str, Any], name: str | None) -> DFlashHead:
    """Create the block head to train, with the given fields, or load the initial one; see `head_to_train`."""

    def create(target_config: Any) -> DFlashHead:
        return new_head(DFlashHead, DFlashConfig.for_target(target_config, **fields), target_config)

    head: DFlashHead = head_to_train(initial_head, DFlashHead, "a block head", create, model, name)
    check_full_attention(head)
    return head


def layers_of(head: DFlashHead) -> tuple[int, ...]:
    """Return the layers to capture: those that the head reads, each once, and at the end that of the labels."""
    return *dict.fromkeys(layer for layer in head.feature_layers if layer != LAST), LAST


def start_block(head: DFlashHead, target: Any) -> None:
    """Copy weights of the target into a block head, let its first layer read the last token, and print this."""
    misfits = training.start_block_from_target(head, target)
    if not misfits:
        training.start_first_layer(head, target)
    random = f"random weights: the target's {', '.join(misfits)} do not fit"
    print_note(f"The head starts from {random if misfits else 'the last layers and the final norm of the target'}.")
