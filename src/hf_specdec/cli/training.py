"""The training commands: `hf-specdec train medusa | train eagle`, also under `accelerate launch`.

Everything that can be refused is refused before the target is loaded; the packages of training are imported by these
commands alone.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer

from hf_specdec import records, viz
from hf_specdec.checkpoints.formats import Head
from hf_specdec.cli.new_heads import name_target, new_head, of_a_new_head, read_head, set_vocabulary
from hf_specdec.cli.options import (
    Json,
    Model,
    Precision,
    Seed,
    finite,
    need_package,
    read_object,
    writable_directory,
)
from hf_specdec.cli.runs import (
    Data,
    Output,
    conversations_of,
    is_main,
    note,
    target_of,
    tell,
    training_package,
    wait_for_all,
)
from hf_specdec.errors import InvalidConfigError, SpeculativeDecodingError
from hf_specdec.generation.loading import load_config
from hf_specdec.heads.card import RUN_PICTURE
from hf_specdec.heads.eagle import EagleConfig, EagleHead
from hf_specdec.heads.eagle3 import Eagle3Config, Eagle3Head
from hf_specdec.heads.medusa import MedusaConfig, MedusaHeads
from hf_specdec.verification.features import LAST

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TrainingArguments

    from hf_specdec.training import Conversation
    from hf_specdec.training.trainer import TrainingData

MAX_LOG_BYTES = 256 * 2**20
"""Of the log of a run, which this process has written."""

Features = Annotated[
    Path | None, typer.Option(help="Capture the target's features here once; else they are made in every step.")
]
MaxLength = Annotated[int, typer.Option(min=8, help="Longer conversations are cut.")]
Epochs = Annotated[float, typer.Option(min=1e-6, callback=finite, help="Passes over the data.")]
MaxSteps = Annotated[int | None, typer.Option(min=-1, help="Optimiser steps, in the place of epochs.")]
Batch = Annotated[int, typer.Option(min=1, help="Conversations per process and forward.")]
Accumulate = Annotated[int, typer.Option(min=1, help="Forwards per optimiser step.")]
Rate = Annotated[float, typer.Option(min=0.0, callback=finite, help="Highest learning rate.")]
Vocabulary = Annotated[
    int | None, typer.Option(min=1, help="Draft over so many of the most frequent tokens; default: all.")
]
More = Annotated[
    Path | None,
    typer.Option("--arguments", help="JSON file of further transformers TrainingArguments (bf16, fsdp, ...)."),
]
HeldOut = Annotated[
    int | None,
    typer.Option(min=0, help="Conversations to measure on, not to train on; default: a twentieth, at most 64."),
]
Fields = Annotated[
    Path | None,
    typer.Option(help="JSON file of further fields of the head's config (fc_norm, intermediate_size, ...)."),
]
Recipe = Annotated[
    Path | None,
    typer.Option(help="JSON file of further fields of the recipe (step_decay, soft_tokens, noise, ...)."),
]
Initial = Annotated[str | None, typer.Option(help="Go on from this head.")]
Seen = Annotated[
    float | None,
    typer.Option(min=0.0, max=1.0, callback=finite,
                 help="Leave conversations out of which more than this share is said in others."),
]  # fmt: skip
BaseName = Annotated[
    str | None,
    typer.Option(help="Name of the target to write down in the head, where --model is a path: its Hub id."),
]

SHARE_HELD_OUT, MOST_HELD_OUT = 20, 64
"""One conversation of so many is held out, and so many of them at most."""

EXAMPLE = (
    "[bold]Example[/bold]\n\n  hf-specdec train KIND --model org/model --data data --output head --features features"
)

train = typer.Typer(help="Train a draft head for a model from its own answers.", no_args_is_help=True)


@train.command(epilog=EXAMPLE.replace("KIND", "medusa"))
def medusa(
    data: Data,
    output: Output,
    model: Model = None,
    base_model_name: BaseName = None,
    num_heads: Annotated[int | None, typer.Option(min=1, max=64, help="Tokens drafted ahead; default: 4.")] = None,
    num_layers: Annotated[int | None, typer.Option(min=1, max=64, help="Residual blocks each; default: 1.")] = None,
    own_lm_head: Annotated[bool, typer.Option("--own-lm-head", help="An lm_head per head, not the target's.")] = False,
    joint: Annotated[bool, typer.Option(help="Medusa-2: train an adapter of the target, too, and merge it.")] = False,
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
    """Train Medusa heads (Medusa-1: the target is frozen; with --joint Medusa-2)."""
    if joint:
        need_package("peft", "Medusa-2", "training")
        if held_out or recipe is not None:
            raise InvalidConfigError("--held-out and --recipe are of heads on a frozen target, --joint trains it.",
                                     "Leave one of them out.")  # fmt: skip
        held_out = 0
    told = {"medusa_num_heads": num_heads, "medusa_num_layers": num_layers, "draft_vocab_size": draft_vocab_size,
            "shared_lm_head": False if own_lm_head else None, **read_object(head_fields, "--head-fields")}  # fmt: skip
    fields = of_a_new_head(told, initial_head)
    run = _Run(output, features, read_object(more, "--arguments"), num_train_epochs=epochs,
               max_steps=max_steps or -1, per_device_train_batch_size=batch_size,
               gradient_accumulation_steps=accumulate, learning_rate=learning_rate, seed=seed)  # fmt: skip
    target_config = load_config(model)
    if initial_head is None:
        heads = new_head(MedusaHeads, MedusaConfig.for_target(target_config, **fields), target_config)
    else:
        heads = read_head(initial_head, MedusaHeads, "Medusa heads")
    heads.check_sizes(target_config.get_text_config(decoder=True))
    name_target(heads.config, base_model_name, path="./model" if joint else None)
    talks, apart = _talks(data, model, max_length, held_out, drop_seen)
    training = training_package()
    config = training.MedusaTrainingConfig().changed(**read_object(recipe, "--recipe"))
    if not joint:
        lengths = _lengths(training.openings(talks, config.answer_tokens))
        training.check_same_run(output, training.run_facts(heads, config, lengths))
    if initial_head is None:
        set_vocabulary(heads, talks)
    target, tokenizer = target_of(model, dtype)
    if initial_head is None:
        heads.start_from(target.get_output_embeddings())
    if joint:
        adapted = training.train_medusa2(
            target, heads, talks, run.arguments(), heads_arguments=run.arguments("heads"), resume=True
        )
        if is_main():
            adapted.merge_and_unload().save_pretrained(output / "model")
            tokenizer.save_pretrained(output / "model")
    else:
        stored, measured = run.data(target, talks, apart, (LAST,))
        arguments = run.arguments(held_out=bool(apart))
        heads = training.train_medusa(target, heads, stored, arguments, config, resume=True, held_out=measured)
    _finish(heads, output, as_json)
    if apart:
        _tell_speed(target, heads, measured)
    wait_for_all()


@train.command(epilog=EXAMPLE.replace("KIND", "eagle") + " --draft-vocab-size 8192")
def eagle(
    data: Data,
    output: Output,
    model: Model = None,
    base_model_name: BaseName = None,
    version: Annotated[int, typer.Option(min=1, max=3, help="1 (also drafts EAGLE-2's trees) or 3.")] = 3,
    aligned_steps: Annotated[int | None, typer.Option(min=1, help="Drafted levels per step of training.")] = None,
    recipe: Recipe = None,
    initial_head: Initial = None,
    random_start: Annotated[bool, typer.Option(help="Begin with random weights, not with the target's.")] = False,
    draft_vocab_size: Vocabulary = None,
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
    """Train an EAGLE head: version 1, or version 3 with an lm_head of its own."""
    if version == 2:
        raise InvalidConfigError("EAGLE-2 is EAGLE-1's weights with another tree.", "Use --version 1.")
    told = {"draft_vocab_size": draft_vocab_size, **read_object(head_fields, "--head-fields")}
    fields = of_a_new_head(told, initial_head)
    if initial_head is not None and random_start:
        raise InvalidConfigError("--random-start is of a new head, not of --initial-head.", "Leave one of them out.")
    run = _Run(output, features, read_object(more, "--arguments"), num_train_epochs=epochs,
               max_steps=max_steps or -1, per_device_train_batch_size=batch_size,
               gradient_accumulation_steps=accumulate, learning_rate=learning_rate, seed=seed)  # fmt: skip
    target_config = load_config(model)
    head: EagleHead | Eagle3Head
    if initial_head is not None:
        head = read_head(initial_head, EagleHead | Eagle3Head, "an EAGLE head")
    elif version == 1:
        head = new_head(EagleHead, EagleConfig.for_target(target_config, **{"bias": False, **fields}), target_config)
    else:
        head = new_head(Eagle3Head, Eagle3Config.for_target(target_config, **fields), target_config)
    head.check_sizes(target_config.get_text_config(decoder=True))
    name_target(head.config, base_model_name)
    talks, apart = _talks(data, model, max_length, held_out, drop_seen)
    if initial_head is None:
        set_vocabulary(head, talks)
    training = training_package()
    steps = {} if aligned_steps is None else {"aligned_steps": aligned_steps}
    config = training.EagleTrainingConfig.for_head(head).changed(**{**read_object(recipe, "--recipe"), **steps})
    training.check_same_run(
        output, training.run_facts(head, config, _lengths(training.openings(talks, config.answer_tokens)))
    )
    target, _ = target_of(model, dtype)
    if initial_head is None and not random_start and isinstance(head, Eagle3Head):
        misfits = training.start_from_target(head, target)
        reason = f"at random: of the target's parts {', '.join(misfits)} would not fit"
        parts = "from the target's lm_head, final norm and last layer but one"
        note(f"The head starts {reason if misfits else parts}.")
    stored, measured = run.data(target, talks, apart, tuple(dict.fromkeys((*head.feature_layers, LAST))))
    arguments = run.arguments(held_out=bool(apart))
    head = training.train_eagle(target, head, stored, arguments, config, resume=True, held_out=measured)
    _finish(head, output, as_json)
    if apart:
        _tell_speed(target, head, measured)
    wait_for_all()


# ----------------------------------------------------------------------------------------------------- what they share


class _Run:
    """Where a run writes and how it is made; its directories and arguments are checked when it is created."""

    def __init__(self, output: Path, features: Path | None, more: dict[str, Any], **fields: Any) -> None:
        writable_directory(output, "--output")
        writable_directory(features, "--features")
        if (output / "config.json").exists() and not (output / "run.json").exists():
            raise InvalidConfigError(
                f"--output {output} holds a head or a model that no training run here has made.",
                "Give another directory.",
            )
        self._output, self._features, self._more, self._fields = output, features, more, fields
        self.arguments(held_out=True)  # whatever transformers refuses is refused here

    def arguments(self, below: str = "", *, held_out: bool = False) -> TrainingArguments:
        """For the Trainer, with its checkpoints in a directory below the output."""
        from transformers import set_seed

        set_seed(self._fields["seed"])
        arguments: TrainingArguments = training_package().head_arguments(
            self._output / below, self._more, held_out=held_out, **self._fields
        )
        return arguments

    def data(
        self, target: PreTrainedModel, talks: list[Conversation], apart: list[Conversation], layers: tuple[int, ...]
    ) -> tuple[TrainingData, TrainingData | None]:
        """What to train on, and what to measure on: captured features, or conversations."""
        if self._features is None:
            return talks, apart or None
        training = training_package()
        size = training.feature_bytes(target, [*talks, *apart], layers)
        note(f"{size / 1e9:.2f} GB of features in {self._features}")
        stored = training.capture_features(target, talks, self._features, layers=layers, progress=True)
        if not apart:
            return stored, None
        return stored, training.capture_features(target, apart, self._features / "held-out", layers=layers)


def _talks(
    data: list[str], model: str | None, max_length: int, held_out: int | None, drop_seen: float | None
) -> tuple[list[Conversation], list[Conversation]]:
    """Conversations to train on, and those held out; the latter do not depend on what is left out of the others.

    Raises:
        InvalidConfigError: There are none, or all would be held out.
    """
    talks = conversations_of(data, model, max_length)
    count = min(len(talks) // SHARE_HELD_OUT, MOST_HELD_OUT) if held_out is None else held_out
    kept, apart = training_package().hold_out(talks, count)
    if not kept:
        raise InvalidConfigError(f"--held-out {count} of {len(talks)} conversations leaves none to train on.")
    if drop_seen is not None:
        before, kept = len(kept), training_package().drop_near_duplicates(kept, drop_seen, apart)
        note(f"{before - len(kept)} of {before} conversations are left out: more than {drop_seen:.0%} is in others.")
    return kept, apart


def _lengths(talks: Sequence[Conversation]) -> list[int]:
    return [len(talk.input_ids) for talk in talks]


def _finish(head: Head, output: Path, as_json: bool) -> None:
    """Store the head with the picture and the figures of its run."""
    if not is_main():
        return
    log = records.read_object(output / "trainer_state.json", MAX_LOG_BYTES)["log_history"]
    rows = [row for row in log if "predicted_tau" in row]
    if rows and importlib.util.find_spec("matplotlib") is None:
        note(f"{RUN_PICTURE} was not drawn: pip install matplotlib.")
    elif rows:
        viz.save_plot(viz.plot_run(log), output / RUN_PICTURE)
    last = {name: rows[-1][name] for name in rows[-1] if name.startswith(("top1", "predicted"))} if rows else {}
    step = (head.config.recipe or {}).get("weights of step")
    measured: dict[str, Any] = next((row for row in log if "eval_tau" in row and row["step"] == step), {})
    found = {f"held_out_{name[5:]}": measured[name] for name in measured if name.startswith(("eval_tau", "eval_acc"))}
    head.to(torch.bfloat16).save_pretrained(output)
    if head.config.base_model_name_or_path is None:
        note("The head does not name its target, for --model is a path of this machine: --base-model-name does.")
    tell({"output": str(output), **last, **found}, as_json)


def _tell_speed(target: PreTrainedModel, head: Head, measured: TrainingData | None) -> None:
    """What the head is expected to bring on this device, by what is held out; for people."""
    if not is_main():
        return
    head = head.to(target.device, target.dtype)
    try:
        found = training_package().find_tree(target, head, measured, max_nodes=32)
    except SpeculativeDecodingError as error:
        note(f"Its speed cannot be told: {error}")
        return
    note(
        f"On this device a static tree of {found.num_nodes} nodes is expected to accept "
        f"{found.expected_tau[found.num_nodes]:.2f} tokens per forward, {found.expected_speed_up:.2f}x plain "
        "decoding; `hf-specdec bench` measures it."
    )
