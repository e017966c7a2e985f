"""The command `hf-specdec train dflash`, also for use under `accelerate launch`.

All options are checked before the target model is loaded.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from hf_specdec.cli.inputs import check_places
from hf_specdec.cli.options import HeldOut, Json, Model, Seed, TrainingPrecision, read_object
from hf_specdec.cli.status import importing
from hf_specdec.cli.training_options import (
    Accumulate,
    BaseName,
    Batch,
    BlockFields,
    BlockRecipe,
    Data,
    Epochs,
    Features,
    Initial,
    MaxLength,
    MaxSteps,
    More,
    Output,
    Rate,
    Seen,
    Vocabulary,
    check_new_head_fields,
    check_start,
)

NumLayers = Annotated[int | None, typer.Option(min=1, max=64, help="Layers of the head. Default: 2.")]
BlockSize = Annotated[
    int | None, typer.Option(min=2, max=64, help="Slots of a block, the last emitted token included. Default: 8.")
]
MarkovRank = Annotated[
    int | None, typer.Option(min=0, help="Rank of the head that reads the previous token (DSpark). Default: 0, none.")
]
Confidence = Annotated[
    bool, typer.Option("--confidence", help="Also predict how likely each token is accepted (DSpark).")
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
    confidence: Confidence = False,
    mask_token_id: MaskToken = None,
    anchors: Anchors = None,
    recipe: BlockRecipe = None,
    initial_head: Initial = None,
    random_start: Annotated[
        bool, typer.Option("--random-start", help="Start from random weights instead of the target's.")
    ] = False,
    draft_vocab_size: Vocabulary = None,
    head_fields: BlockFields = None,
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
    dtype: TrainingPrecision = "bfloat16",
    as_json: Json = False,
) -> None:
    """Train a block head, which drafts a whole block of tokens in one forward (DFlash, JetSpec, DSpark)."""
    given = {"num_hidden_layers": num_layers, "block_size": block_size, "mask_token_id": mask_token_id,
             "draft_vocab_size": draft_vocab_size, **_variant(causal, markov_rank, confidence)}  # fmt: skip
    fields = check_new_head_fields({**given, **read_object(head_fields, "--head-fields")}, initial_head)
    settings, further = read_object(recipe, "--recipe"), read_object(more, "--arguments")
    check_start(initial_head, random_start)
    check_places(model, initial_head, data)
    with importing(shown=not as_json):
        from hf_specdec import training
        from hf_specdec.cli.block_starts import block_head, block_recipe, choose_tokens, layers_of, start_block
        from hf_specdec.cli.runs import finish_training, load_training_target
        from hf_specdec.cli.training_setup import TrainingRun, check_run, split_conversations
    run = TrainingRun(output, features, further, num_train_epochs=epochs,
              max_steps=-1 if max_steps is None else max_steps, per_device_train_batch_size=batch_size,
              gradient_accumulation_steps=accumulate, learning_rate=learning_rate, seed=seed)  # fmt: skip
    head = block_head(initial_head, model, fields, base_model_name)
    conversations, evaluation = split_conversations(data, model, max_length, held_out, drop_seen)
    if initial_head is None:
        choose_tokens(head, conversations, model, chosen="mask_token_id" in fields)
    config = block_recipe(settings, anchors)
    check_run(output, head, config, conversations)
    target, _ = load_training_target(model, dtype, shown=not as_json)
    if initial_head is None and not random_start:
        start_block(head, target)
    arguments, stored, measured = run.prepare(target, conversations, evaluation, layers_of(head))
    head = training.train_dflash(target, head, stored, arguments, config, resume=True, held_out=measured)
    finish_training(target, head, output, measured, as_json)


def _variant(causal: bool, markov_rank: int | None, confidence: bool) -> dict[str, Any]:
    """Return the config fields of a variant; a head with a Markov head drafts from the root's slot, as DSpark does."""
    return {
        "causal": causal or None,
        "markov_rank": markov_rank,
        "sample_from_anchor": bool(markov_rank) or None,
        "confidence_head": confidence or None,
        "confidence_with_markov": (confidence and bool(markov_rank)) or None,
    }
