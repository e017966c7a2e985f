"""What `train medusa` and `train eagle` start from: new or initial heads, and weights copied from the target."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_specdec import training
from hf_specdec.cli.new_heads import head_to_train, new_head
from hf_specdec.cli.runs import is_main, print_note
from hf_specdec.cli.training_setup import TrainingRun
from hf_specdec.heads.eagle import EagleConfig, EagleHead
from hf_specdec.heads.eagle3 import Eagle3Config, Eagle3Head
from hf_specdec.heads.medusa import MedusaConfig, MedusaHeads
from hf_specdec.verification.features import LAST

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_specdec.training import Conversation


def medusa_heads(
    initial_head: str | None, model: str | None, fields: dict[str, Any], name: str | None, path: str | None
) -> MedusaHeads:
    """Create the Medusa heads to train, with the given fields, or load the initial ones; see `head_to_train`."""

    def create(target_config: Any) -> MedusaHeads:
        return new_head(MedusaHeads, MedusaConfig.for_target(target_config, **fields), target_config)

    heads: MedusaHeads = head_to_train(initial_head, MedusaHeads, "Medusa heads", create, model, name, path)
    return heads


def train_jointly(
    run: TrainingRun, target: PreTrainedModel, tokenizer: Any, heads: MedusaHeads, conversations: list[Conversation],
    folder: Path,
) -> None:  # fmt: skip
    """Train heads and an adapter of the target (Medusa-2); save the target with merged adapter, and the tokenizer."""
    adapted = training.train_medusa2(
        target, heads, conversations, run.arguments(), heads_arguments=run.arguments("heads"), resume=True
    )
    if is_main():
        adapted.merge_and_unload().save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def eagle_head(
    initial_head: str | None, version: int, model: str | None, fields: dict[str, Any], name: str | None
) -> EagleHead | Eagle3Head:
    """Create the EAGLE head to train, or load the initial one, see `head_to_train`.

    Args:
        initial_head, model, name: See `head_to_train`.
        version: Version of a new head, 1 or 3.
        fields: Config fields of a new head.
    """

    def create(target_config: Any) -> EagleHead | Eagle3Head:
        if version == 1:
            config = EagleConfig.for_target(target_config, **{"bias": False, **fields})
            return new_head(EagleHead, config, target_config)
        return new_head(Eagle3Head, Eagle3Config.for_target(target_config, **fields), target_config)

    kinds = EagleHead | Eagle3Head
    head: EagleHead | Eagle3Head = head_to_train(initial_head, kinds, "an EAGLE head", create, model, name)
    return head


def eagle_layers(head: EagleHead | Eagle3Head) -> tuple[int, ...]:
    """Return the layers to capture: those that the head reads, and that of the labels, each once."""
    return tuple(dict.fromkeys((*head.feature_layers, LAST)))


def start_eagle(head: EagleHead | Eagle3Head, target: PreTrainedModel) -> None:
    """Copy weights of the target into an EAGLE-3 head and print which; an EAGLE-1 head keeps its random weights."""
    if not isinstance(head, Eagle3Head):
        return
    misfits = training.start_from_target(head, target)
    random = f"random weights: the target's {', '.join(misfits)} do not fit"
    copied = "the target's lm_head, final norm and second-to-last layer"
    print_note(f"The head starts from {random if misfits else copied}.")
