"""The commands `hf-specdec train medusa` and `hf-specdec train eagle`, also for use under `accelerate launch`.

All options are checked before the target model is loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hf_specdec.cli.inputs import check_places
from hf_specdec.cli.options import (
    HeldOut,
    Json,
    Model,
    NormOutput,
    Seed,
    TrainingPrecision,
    read_object,
    require_package,
)
from hf_specdec.cli.status import importing
from hf_specdec.cli.training_options import (
    Accumulate,
    BaseName,
    Batch,
    Data,
    EagleFields,
    EagleRecipe,
    Epochs,
    Features,
    Initial,
    MaxLength,
    MaxSteps,
    MedusaFields,
    MedusaRecipe,
    More,
    Output,
    Rate,
    Seen,
    Vocabulary,
    check_new_head_fields,
    check_start,
)
from hf_specdec.errors import InvalidConfigError
from hf_specdec.validation import MAX_STEPS

Heads = Annotated[int | None, typer.Option(min=1, max=64, help="Number of heads; each drafts one token. Default: 4.")]
Layers = Annotated[int | None, typer.Option(min=1, max=64, help="Residual blocks per head. Default: 1.")]
SAVED_MODEL = "model"
"""Subfolder of the output directory to which `--joint` saves the target."""

AlignedSteps = Annotated[
    int | None,
    typer.Option(min=1, max=MAX_STEPS, help="Draft depth simulated in training. Default: 4 (3 with --version 1)."),
]


def _existing_version(version: int) -> int:
    """Return the version if heads of it can be trained (a callback of the option).

    Raises:
        BadParameter: The version is unknown.
    """
    if version == 2:
        raise typer.BadParameter("EAGLE-2 uses EAGLE-1 heads with dynamic trees. Use --version 1.")
    if version not in (1, 3):
        raise typer.BadParameter(f"must be 1 or 3, got {version}")
    return version


Version = Annotated[
    int,
    typer.Option(
        metavar="1|3", callback=_existing_version,
        help="EAGLE version: 1 (its heads also draft EAGLE-2 trees) or 3.",
    ),
]  # fmt: skip


def medusa(
    data: Data,
    output: Output,
    model: Model = None,
    base_model_name: BaseName = None,
    num_heads: Heads = None,
    num_layers: Layers = None,
    own_lm_head: Annotated[bool, typer.Option("--own-lm-head", help="Train an lm_head per head.")] = False,
    joint: Annotated[
        bool, typer.Option("--joint", help="Medusa-2: also train an adapter of the target and merge it.")
    ] = False,
    recipe: MedusaRecipe = None,
    initial_head: Initial = None,
    draft_vocab_size: Vocabulary = None,
    head_fields: MedusaFields = None,
    features: Features = None,
    max_length: MaxLength = 2048,
    epochs: Epochs = 2,
    max_steps: MaxSteps = None,
    batch_size: Batch = 8,
    accumulate: Accumulate = 1,
    learning_rate: Rate = 1e-3,
    held_out: HeldOut = None,
    drop_seen: Seen = None,
    seed: Seed = 0,
    more: More = None,
    dtype: TrainingPrecision = "bfloat16",
    as_json: Json = False,
) -> None:
    """Train Medusa heads on a frozen target (Medusa-1), or with --joint together with it (Medusa-2)."""
    held_out = _check_joint(held_out, recipe, output) if joint else held_out
    given = {"medusa_num_heads": num_heads, "medusa_num_layers": num_layers, "draft_vocab_size": draft_vocab_size,
             "shared_lm_head": False if own_lm_head else None}  # fmt: skip
    fields = check_new_head_fields({**given, **read_object(head_fields, "--head-fields")}, initial_head)
    settings, further = read_object(recipe, "--recipe"), read_object(more, "--arguments")
    check_places(model, initial_head, data)
    with importing(shown=not as_json):
        from hf_specdec import training
        from hf_specdec.cli.head_starts import medusa_heads, train_jointly
        from hf_specdec.cli.new_heads import set_draft_vocabulary
        from hf_specdec.cli.runs import finish_training, load_training_target
        from hf_specdec.cli.training_setup import TrainingRun, check_run, split_conversations
    run = TrainingRun(output, features, further, num_train_epochs=epochs,
               max_steps=-1 if max_steps is None else max_steps, per_device_train_batch_size=batch_size,
               gradient_accumulation_steps=accumulate, learning_rate=learning_rate, seed=seed)  # fmt: skip
    heads = medusa_heads(initial_head, model, fields, base_model_name, path=f"./{SAVED_MODEL}" if joint else None)
    conversations, evaluation = split_conversations(data, model, max_length, held_out, drop_seen)
    config = training.MedusaTrainingConfig().changed(**settings)
    if not joint:
        check_run(output, heads, config, conversations)
    target, tokenizer = load_training_target(model, dtype, shown=not as_json)
    if initial_head is None:
        set_draft_vocabulary(heads, conversations)
        heads.start_from(target.get_output_embeddings())
    if joint:
        train_jointly(run, target, tokenizer, heads, conversations, output / SAVED_MODEL)
        return finish_training(target, heads, output, None, as_json)
    arguments, stored, measured = run.prepare(target, conversations, evaluation, (training.LAST,))
    heads = training.train_medusa(target, heads, stored, arguments, config, resume=True, held_out=measured)
    finish_training(target, heads, output, measured, as_json)


def _check_joint(held_out: int | None, recipe: Path | None, output: Path) -> int:
    """Check that Medusa-2 is installed, gets no options that it ignores, and overwrites no other model.

    Returns:
        The number of conversations held out, 0.
    """
    require_package("peft", "Medusa-2", "training")
    if held_out or recipe is not None:
        raise InvalidConfigError("--joint cannot be combined with --held-out or --recipe.", "Drop one of them.")
    if (output / SAVED_MODEL).exists() and not (output / "run.json").exists():
        raise InvalidConfigError(
            f"--output {output} holds {SAVED_MODEL}, where --joint saves the target.", "Give another directory."
        )
    return 0


def eagle(
    data: Data,
    output: Output,
    model: Model = None,
    base_model_name: BaseName = None,
    version: Version = 3,
    aligned_steps: AlignedSteps = None,
    recipe: EagleRecipe = None,
    initial_head: Initial = None,
    random_start: Annotated[
        bool, typer.Option("--random-start", help="Start from random weights instead of the target's.")
    ] = False,
    draft_vocab_size: Vocabulary = None,
    norm_output: NormOutput = None,
    head_fields: EagleFields = None,
    features: Features = None,
    max_length: MaxLength = 2048,
    epochs: Epochs = 2,
    max_steps: MaxSteps = None,
    batch_size: Batch = 8,
    accumulate: Accumulate = 1,
    learning_rate: Rate = 3e-4,
    held_out: HeldOut = None,
    drop_seen: Seen = None,
    seed: Seed = 0,
    more: More = None,
    dtype: TrainingPrecision = "bfloat16",
    as_json: Json = False,
) -> None:
    """Train an EAGLE head: version 1, which uses the target's lm_head, or version 3, which has its own."""
    given = {"draft_vocab_size": draft_vocab_size, "norm_output": norm_output}
    fields = check_new_head_fields({**given, **read_object(head_fields, "--head-fields")}, initial_head)
    settings, further = read_object(recipe, "--recipe"), read_object(more, "--arguments")
    check_start(initial_head, random_start)
    check_places(model, initial_head, data)
    with importing(shown=not as_json):
        from hf_specdec import training
        from hf_specdec.cli.head_starts import eagle_head, eagle_layers, start_eagle
        from hf_specdec.cli.new_heads import set_draft_vocabulary
        from hf_specdec.cli.runs import finish_training, load_training_target
        from hf_specdec.cli.training_setup import TrainingRun, check_run, split_conversations
    run = TrainingRun(output, features, further, num_train_epochs=epochs,
               max_steps=-1 if max_steps is None else max_steps, per_device_train_batch_size=batch_size,
               gradient_accumulation_steps=accumulate, learning_rate=learning_rate, seed=seed)  # fmt: skip
    head = eagle_head(initial_head, version, model, fields, base_model_name)
    conversations, evaluation = split_conversations(data, model, max_length, held_out, drop_seen)
    if initial_head is None:
        set_draft_vocabulary(head, conversations)
    steps = {} if aligned_steps is None else {"aligned_steps": aligned_steps}
    config = training.EagleTrainingConfig.for_head(head).changed(**{**settings, **steps})
    check_run(output, head, config, conversations)
    target, _ = load_training_target(model, dtype, shown=not as_json)
    if initial_head is None and not random_start:
        start_eagle(head, target)
    arguments, stored, measured = run.prepare(target, conversations, evaluation, eagle_layers(head))
    head = training.train_eagle(target, head, stored, arguments, config, resume=True, held_out=measured)
    finish_training(target, head, output, measured, as_json)
