"""The command `hf-specdec train dflash`, also for use under `accelerate launch`.

All options are checked before the target model is loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_specdec.cli.new_heads import (
    check_new_head_fields,
    choose_mask_token,
    load_initial_head,
    name_target,
    new_head,
    set_draft_vocabulary,
)
from hf_specdec.cli.options import HeldOut, Json, Model, Precision, Seed, read_object
from hf_specdec.cli.runs import Data, Output, finish_training, load_training_target, print_note, training_package
from hf_specdec.cli.training_options import (
    Accumulate,
    BaseName,
    Batch,
    Epochs,
    Features,
    Fields,
    Initial,
    MaxLength,
    MaxSteps,
    More,
    Rate,
    Recipe,
    Seen,
    TrainingRun,
    Vocabulary,
    check_start,
    split_conversations,
)
from hf_specdec.generation.loading import load_config, load_tokenizer
from hf_specdec.heads.dflash import DFlashConfig, DFlashHead
from hf_specdec.verification.features import LAST

if TYPE_CHECKING:
    from hf_specdec.training import Conversation, DFlashTrainingConfig

NumLayers = Annotated[int | None, typer.Option(min=1, max=64, help="Layers of the head. Default: 2.")]
BlockSize = Annotated[
    int | None, typer.Option(min=2, max=64, help="Slots of a block, the last emitted token included. Default: 8.")
]
MarkovRank = Annotated[
    int | None, typer.Option(min=0, help="Rank of the head that reads the previous token (DSpark). Default: 0, none.")
]
MaskToken = Annotated[
    int | None,
    typer.Option(min=0, help="Token that stands for tokens to predict. Default: one that the data do not contain."),
]
Anchors = Annotated[int | None, typer.Option(min=1, help="Blocks per conversation and step. Default: 64.")]


def dflash(
    data: Data,
    output: Output,
    model: Model = None,
    base_model_name: BaseName = None,
    num_layers: NumLayers = None,
    block_size: BlockSize = None,
    causal: Annotated[bool, typer.Option("--causal", help="Slots see only earlier slots (JetSpec).")] = False,
    markov_rank: MarkovRank = None,
    confidence: Annotated[
        bool, typer.Option("--confidence", help="Also predict how likely each token is accepted (DSpark).")
    ] = False,
    mask_token_id: MaskToken = None,
    anchors: Anchors = None,
    recipe: Recipe = None,
    initial_head: Initial = None,
    random_start: Annotated[bool, typer.Option(help="Start from random weights instead of the target's.")] = False,
    draft_vocab_size: Vocabulary = None,
    head_fields: Fields = None,
    features: Features = None,
    max_length: MaxLength = 2048,
    epochs: Epochs = 2,
    max_steps: MaxSteps = None,
    batch_size: Batch = 4,
    accumulate: Accumulate = 1,
    learning_rate: Rate = 6e-4,
    held_out: HeldOut = None,
    drop_seen: Seen = None,
    seed: Seed = 0,
    more: More = None,
    dtype: Precision = "bfloat16",
    as_json: Json = False,
) -> None:
    """Train a block head, which drafts a whole block of tokens in one forward (DFlash, JetSpec, DSpark)."""
    given = {"num_hidden_layers": num_layers, "block_size": block_size, "mask_token_id": mask_token_id,
             "draft_vocab_size": draft_vocab_size, **_variant(causal, markov_rank, confidence)}  # fmt: skip
    fields = check_new_head_fields({**given, **read_object(head_fields, "--head-fields")}, initial_head)
    check_start(initial_head, random_start)
    run = TrainingRun(output, features, read_object(more, "--arguments"), num_train_epochs=epochs,
              max_steps=max_steps or -1, per_device_train_batch_size=batch_size,
              gradient_accumulation_steps=accumulate, learning_rate=learning_rate, seed=seed)  # fmt: skip
    target_config = load_config(model)
    head = _block_head(initial_head, target_config, fields)
    head.check_sizes(target_config.get_text_config(decoder=True))
    name_target(head.config, base_model_name)
    conversations, evaluation = split_conversations(data, model, max_length, held_out, drop_seen)
    if initial_head is None:
        _choose_tokens(head, conversations, model, chosen="mask_token_id" in fields)
    training, config = training_package(), _recipe(recipe, anchors)
    lengths = [len(one.input_ids) for one in training.openings(conversations, config.answer_tokens)]
    training.check_same_run(output, training.run_facts(head, config, lengths))
    target, _ = load_training_target(model, dtype)
    if initial_head is None and not random_start:
        _start_from_target(head, target)
    stored, measured = run.data(target, conversations, evaluation, _layers_of(head))
    arguments = run.arguments(held_out=bool(evaluation))
    head = training.train_dflash(target, head, stored, arguments, config, resume=True, held_out=measured)
    finish_training(target, head, output, measured, as_json)


def _recipe(path: Path | None, anchors: int | None) -> DFlashTrainingConfig:
    changes = {} if anchors is None else {"anchors": anchors}
    config: DFlashTrainingConfig = (
        training_package().DFlashTrainingConfig().changed(**{**read_object(path, "--recipe"), **changes})
    )
    return config


def _variant(causal: bool, markov_rank: int | None, confidence: bool) -> dict[str, Any]:
    """Return the config fields of a variant; a head with a Markov head drafts from the root's slot, as DSpark does."""
    return {
        "causal": causal or None,
        "markov_rank": markov_rank,
        "sample_from_anchor": bool(markov_rank) or None,
        "confidence_head": confidence or None,
        "confidence_with_markov": (confidence and bool(markov_rank)) or None,
    }


def _choose_tokens(head: DFlashHead, conversations: list[Conversation], model: str | None, chosen: bool) -> None:
    """Set the draft vocabulary of a new head and, unless the user has chosen it, the mask token."""
    set_draft_vocabulary(head, conversations)
    if not chosen:
        head.config.mask_token_id = choose_mask_token(load_tokenizer(model), conversations, head.config.vocab_size)


def _block_head(initial_head: str | None, target_config: Any, fields: dict[str, Any]) -> DFlashHead:
    head: DFlashHead
    if initial_head is None:
        head = new_head(DFlashHead, DFlashConfig.for_target(target_config, **fields), target_config)
    else:
        head = load_initial_head(initial_head, DFlashHead, "a block head")
    training_package().dflash.check_full_attention(head)
    return head


def _layers_of(head: DFlashHead) -> tuple[int, ...]:
    """Return the layers to capture: those that the head reads, each once, and at the end that of the labels."""
    return *dict.fromkeys(layer for layer in head.feature_layers if layer != LAST), LAST


def _start_from_target(head: DFlashHead, target: Any) -> None:
    misfits = training_package().start_block_from_target(head, target)
    random = f"random weights: the target's {', '.join(misfits)} do not fit"
    print_note(f"The head starts from {random if misfits else 'the last layers and the final norm of the target'}.")
