"""The commands `hf-specdec train medusa` and `hf-specdec train eagle`, also for use under `accelerate launch`.

All options are checked before the target model is loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_specdec.cli.layout import Command, Group
from hf_specdec.cli.new_heads import (
    check_new_head_fields,
    load_initial_head,
    name_target,
    new_head,
    set_draft_vocabulary,
)
from hf_specdec.cli.options import (
    HeldOut,
    Json,
    Model,
    NormOutput,
    Precision,
    Seed,
    read_object,
    require_package,
)
from hf_specdec.cli.runs import (
    Data,
    Output,
    finish_training,
    is_main,
    load_training_target,
    print_note,
    training_package,
)
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
from hf_specdec.errors import InvalidConfigError
from hf_specdec.generation.loading import load_config
from hf_specdec.heads.eagle import EagleConfig, EagleHead
from hf_specdec.heads.eagle3 import Eagle3Config, Eagle3Head
from hf_specdec.heads.medusa import MedusaConfig, MedusaHeads
from hf_specdec.verification.features import LAST

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_specdec.training import Conversation

Heads = Annotated[int | None, typer.Option(min=1, max=64, help="Number of heads; each drafts one token. Default: 4.")]
Layers = Annotated[int | None, typer.Option(min=1, max=64, help="Residual blocks per head. Default: 1.")]

EXAMPLE = (
    "[bold]Example[/bold]\n\n  hf-specdec train KIND --model org/model --data data --output head --features features"
)

train = typer.Typer(
    cls=Group, help="Train a draft head for a model on the model's own answers.", no_args_is_help=True,
    add_completion=False, rich_markup_mode="rich",
)  # fmt: skip


@train.command(cls=Command, epilog=EXAMPLE.replace("KIND", "medusa"))
def medusa(
    data: Data,
    output: Output,
    model: Model = None,
    base_model_name: BaseName = None,
    num_heads: Heads = None,
    num_layers: Layers = None,
    own_lm_head: Annotated[bool, typer.Option("--own-lm-head", help="Train an lm_head per head.")] = False,
    joint: Annotated[bool, typer.Option(help="Medusa-2: also train an adapter of the target and merge it.")] = False,
    recipe: Recipe = None,
    initial_head: Initial = None,
    draft_vocab_size: Vocabulary = None,
    head_fields: Fields = None,
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
    dtype: Precision = "bfloat16",
    as_json: Json = False,
) -> None:
    """Train Medusa heads on a frozen target (Medusa-1), or with --joint together with it (Medusa-2)."""
    if joint:
        _check_joint(held_out, recipe)
        held_out = 0
    given = {"medusa_num_heads": num_heads, "medusa_num_layers": num_layers, "draft_vocab_size": draft_vocab_size,
             "shared_lm_head": False if own_lm_head else None}  # fmt: skip
    fields = check_new_head_fields({**given, **read_object(head_fields, "--head-fields")}, initial_head)
    run = TrainingRun(output, features, read_object(more, "--arguments"), num_train_epochs=epochs,
               max_steps=max_steps or -1, per_device_train_batch_size=batch_size,
               gradient_accumulation_steps=accumulate, learning_rate=learning_rate, seed=seed)  # fmt: skip
    target_config = load_config(model)
    heads = _medusa_heads(initial_head, target_config, fields)
    heads.check_sizes(target_config.get_text_config(decoder=True))
    name_target(heads.config, base_model_name, path="./model" if joint else None)
    conversations, evaluation = split_conversations(data, model, max_length, held_out, drop_seen)
    training = training_package()
    config = training.MedusaTrainingConfig().changed(**read_object(recipe, "--recipe"))
    if not joint:
        lengths = [len(one.input_ids) for one in training.openings(conversations, config.answer_tokens)]
        training.check_same_run(output, training.run_facts(heads, config, lengths))
    if initial_head is None:
        set_draft_vocabulary(heads, conversations)
    target, tokenizer = load_training_target(model, dtype)
    if initial_head is None:
        heads.start_from(target.get_output_embeddings())
    if joint:
        _train_jointly(run, target, tokenizer, heads, conversations, output / "model")
        measured = None
    else:
        stored, measured = run.data(target, conversations, evaluation, (LAST,))
        arguments = run.arguments(held_out=bool(evaluation))
        heads = training.train_medusa(target, heads, stored, arguments, config, resume=True, held_out=measured)
    finish_training(target, heads, output, measured, as_json)


def _check_joint(held_out: int | None, recipe: Path | None) -> None:
    require_package("peft", "Medusa-2", "training")
    if held_out or recipe is not None:
        raise InvalidConfigError("--joint cannot be combined with --held-out or --recipe.", "Drop one of them.")


def _medusa_heads(initial_head: str | None, target_config: Any, fields: dict[str, Any]) -> MedusaHeads:
    if initial_head is None:
        return new_head(MedusaHeads, MedusaConfig.for_target(target_config, **fields), target_config)
    heads: MedusaHeads = load_initial_head(initial_head, MedusaHeads, "Medusa heads")
    return heads


def _train_jointly(
    run: TrainingRun, target: PreTrainedModel, tokenizer: Any, heads: MedusaHeads, conversations: list[Conversation],
    folder: Path,
) -> None:  # fmt: skip
    """Train heads and an adapter of the target (Medusa-2); save the target with merged adapter, and the tokenizer."""
    adapted = training_package().train_medusa2(
        target, heads, conversations, run.arguments(), heads_arguments=run.arguments("heads"), resume=True
    )
    if is_main():
        adapted.merge_and_unload().save_pretrained(folder)
        tokenizer.save_pretrained(folder)


@train.command(cls=Command, epilog=EXAMPLE.replace("KIND", "eagle") + " --draft-vocab-size 8192")
def eagle(
    data: Data,
    output: Output,
    model: Model = None,
    base_model_name: BaseName = None,
    version: Annotated[
        int, typer.Option(min=1, max=3, help="EAGLE version: 1 (its heads also draft EAGLE-2 trees) or 3.")
    ] = 3,
    aligned_steps: Annotated[int | None, typer.Option(min=1, help="Draft depth simulated in training.")] = None,
    recipe: Recipe = None,
    initial_head: Initial = None,
    random_start: Annotated[bool, typer.Option(help="Start from random weights instead of the target's.")] = False,
    draft_vocab_size: Vocabulary = None,
    norm_output: NormOutput = None,
    head_fields: Fields = None,
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
    dtype: Precision = "bfloat16",
    as_json: Json = False,
) -> None:
    """Train an EAGLE head: version 1, which uses the target's lm_head, or version 3, which has its own."""
    if version == 2:
        raise InvalidConfigError("EAGLE-2 uses EAGLE-1 heads with dynamic trees.", "Use --version 1.")
    given = {"draft_vocab_size": draft_vocab_size, "norm_output": norm_output}
    fields = check_new_head_fields({**given, **read_object(head_fields, "--head-fields")}, initial_head)
    check_start(initial_head, random_start)
    run = TrainingRun(output, features, read_object(more, "--arguments"), num_train_epochs=epochs,
               max_steps=max_steps or -1, per_device_train_batch_size=batch_size,
               gradient_accumulation_steps=accumulate, learning_rate=learning_rate, seed=seed)  # fmt: skip
    target_config = load_config(model)
    head = _eagle_head(initial_head, version, target_config, fields)
    head.check_sizes(target_config.get_text_config(decoder=True))
    name_target(head.config, base_model_name)
    conversations, evaluation = split_conversations(data, model, max_length, held_out, drop_seen)
    if initial_head is None:
        set_draft_vocabulary(head, conversations)
    training = training_package()
    steps = {} if aligned_steps is None else {"aligned_steps": aligned_steps}
    config = training.EagleTrainingConfig.for_head(head).changed(**{**read_object(recipe, "--recipe"), **steps})
    lengths = [len(one.input_ids) for one in training.openings(conversations, config.answer_tokens)]
    training.check_same_run(output, training.run_facts(head, config, lengths))
    target, _ = load_training_target(model, dtype)
    if initial_head is None and not random_start and isinstance(head, Eagle3Head):
        _start_from_target(head, target)
    stored, measured = run.data(target, conversations, evaluation, tuple(dict.fromkeys((*head.feature_layers, LAST))))
    arguments = run.arguments(held_out=bool(evaluation))
    head = training.train_eagle(target, head, stored, arguments, config, resume=True, held_out=measured)
    finish_training(target, head, output, measured, as_json)


def _eagle_head(
    initial_head: str | None, version: int, target_config: Any, fields: dict[str, Any]
) -> EagleHead | Eagle3Head:
    if initial_head is not None:
        head: EagleHead | Eagle3Head = load_initial_head(initial_head, EagleHead | Eagle3Head, "an EAGLE head")
        return head
    if version == 1:
        config = EagleConfig.for_target(target_config, **{"bias": False, **fields})
        return new_head(EagleHead, config, target_config)
    return new_head(Eagle3Head, Eagle3Config.for_target(target_config, **fields), target_config)


def _start_from_target(head: Eagle3Head, target: PreTrainedModel) -> None:
    misfits = training_package().start_from_target(head, target)
    random = f"random weights: the target's {', '.join(misfits)} do not fit"
    copied = "the target's lm_head, final norm and second-to-last layer"
    print_note(f"The head starts from {random if misfits else copied}.")
