"""Options and steps that all `train` commands share: directories, arguments, data and the held-out part of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_specdec.cli.options import check_writable_directory, finite
from hf_specdec.cli.runs import load_conversations, print_note, training_package
from hf_specdec.errors import InvalidConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TrainingArguments

    from hf_specdec.training import Conversation
    from hf_specdec.training.features import TrainingData

Features = Annotated[
    Path | None,
    typer.Option(
        help="Directory to store the target's features in, computed once. Default: compute them in every step."
    ),
]
MaxLength = Annotated[int, typer.Option(min=8, help="Maximum tokens per conversation; longer ones are truncated.")]
Epochs = Annotated[float, typer.Option(min=1e-6, callback=finite, help="Passes over the data.")]
MaxSteps = Annotated[int | None, typer.Option(min=-1, help="Optimiser steps; overrides --epochs.")]
Batch = Annotated[int, typer.Option(min=1, help="Conversations per process and forward.")]
Accumulate = Annotated[int, typer.Option(min=1, help="Forwards per optimiser step (gradient accumulation).")]
Rate = Annotated[float, typer.Option(min=0.0, callback=finite, help="Peak learning rate.")]
Vocabulary = Annotated[
    int | None, typer.Option(min=1, help="Draft only the given number of most frequent tokens. Default: all tokens.")
]
More = Annotated[
    Path | None,
    typer.Option("--arguments", help="JSON file with more transformers TrainingArguments (bf16, fsdp, ...)."),
]
Fields = Annotated[
    Path | None,
    typer.Option(help="JSON file with more fields of the head's config (fc_norm, intermediate_size, ...)."),
]
Recipe = Annotated[
    Path | None,
    typer.Option(help="JSON file with fields of the training recipe (step_decay, soft_tokens, noise, ...)."),
]
Initial = Annotated[str | None, typer.Option(help="Path or Hub id of a head to continue training.")]
Seen = Annotated[
    float | None,
    typer.Option(min=0.0, max=1.0, callback=finite,
                 help="Drop conversations whose answers repeat others, or themselves, by more than this fraction."),
]  # fmt: skip
BaseName = Annotated[
    str | None,
    typer.Option(help="Hub id of the target to store in the head, if --model is a path."),
]

HELD_OUT_EVERY, MAX_HELD_OUT = 20, 64
"""By default, one in 20 conversations is held out for evaluation, but no more than 64."""


class TrainingRun:
    """Directories and training arguments of a `train` command; raises `InvalidConfigError` if one cannot be used.

    Args:
        output: Directory for the head, checkpoints and log.
        features: Directory for captured features; None computes them in every step.
        more: `TrainingArguments` that override `fields`.
        **fields: `TrainingArguments`, `seed` included.
    """

    def __init__(self, output: Path, features: Path | None, more: dict[str, Any], **fields: Any) -> None:
        check_writable_directory(output, "--output")
        check_writable_directory(features, "--features")
        if (output / "config.json").exists() and not (output / "run.json").exists():
            raise InvalidConfigError(
                f"--output {output} holds a head or model that was not trained by this command.",
                "Give another directory.",
            )
        self._output, self._features, self._more, self._fields = output, features, more, fields
        self.arguments(held_out=True)  # raises if an argument is invalid

    def arguments(self, subfolder: str = "", *, held_out: bool = False) -> TrainingArguments:
        """Set the random seed and return the Trainer's arguments; checkpoints go to a subfolder of the output."""
        from transformers import set_seed

        set_seed(self._fields["seed"])
        arguments: TrainingArguments = training_package().head_arguments(
            self._output / subfolder, self._more, held_out=held_out, **self._fields
        )
        return arguments

    def data(
        self,
        target: PreTrainedModel,
        conversations: list[Conversation],
        evaluation: list[Conversation],
        layers: tuple[int, ...],
    ) -> tuple[TrainingData, TrainingData | None]:
        """Return the data for training and for evaluation (or None): conversations, or features captured from them."""
        if self._features is None:
            return conversations, evaluation or None
        training = training_package()
        size = training.feature_bytes(target, [*conversations, *evaluation], layers)
        print_note(f"{size / 1e9:.2f} GB of features will be stored in {self._features}")
        stored = training.capture_features(target, conversations, self._features, layers=layers, progress=True)
        if not evaluation:
            return stored, None
        return stored, training.capture_features(target, evaluation, self._features / "held-out", layers=layers)


def split_conversations(
    data: list[str], model: str | None, max_length: int, held_out: int | None, drop_seen: float | None
) -> tuple[list[Conversation], list[Conversation]]:
    """Read conversations; return those for training (no near-duplicates if `drop_seen` is set) and those held out.

    Raises:
        InvalidConfigError: No conversations can be read, or `held_out` or `drop_seen` leaves none for training.
    """
    conversations = load_conversations(data, model, max_length)
    count = min(len(conversations) // HELD_OUT_EVERY, MAX_HELD_OUT) if held_out is None else held_out
    kept, evaluation = training_package().hold_out(conversations, count)
    if not kept:
        raise InvalidConfigError(f"--held-out {count} leaves none of {len(conversations)} conversations to train on.")
    if drop_seen is not None:
        before, kept = len(kept), training_package().drop_near_duplicates(kept, drop_seen, evaluation)
        if not kept:
            raise InvalidConfigError(
                f"--drop-seen {drop_seen} leaves none of {before} conversations to train on.",
                "Give a larger fraction, or conversations whose answers repeat less.",
            )
        print_note(f"Dropped {before - len(kept)} of {before} conversations: over {drop_seen:.0%} repeated elsewhere.")
    return kept, evaluation


def check_start(initial_head: str | None, random_start: bool) -> None:
    """Raise `InvalidConfigError` if a run is to start from a trained head and from random weights."""
    if initial_head is not None and random_start:
        raise InvalidConfigError("--random-start cannot be combined with --initial-head.", "Drop one of them.")
