"""Options that the `train` commands share: directories, arguments, data and the held-out part of it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from hf_specdec.cli.options import finite, positive
from hf_specdec.errors import InvalidConfigError

Output = Annotated[Path, typer.Option(help="Directory to write to. Run the same command again to resume.")]
Data = Annotated[
    list[str],
    typer.Option(
        metavar="SOURCE", help="Output directory of `distill`, a .jsonl file or a dataset name. Can be repeated."
    ),
]
Features = Annotated[
    Path | None,
    typer.Option(
        help="Directory to store the target's features in, computed once. Default: compute them in every step."
    ),
]
MaxLength = Annotated[int, typer.Option(min=8, help="Maximum tokens per conversation; longer ones are truncated.")]
Epochs = Annotated[float, typer.Option(callback=positive, help="Passes over the data; may be a fraction.")]
MaxSteps = Annotated[int | None, typer.Option(min=1, help="Optimiser steps; overrides --epochs.")]
Batch = Annotated[int, typer.Option(min=1, help="Conversations per process and forward.")]
Accumulate = Annotated[int, typer.Option(min=1, help="Forwards per optimiser step (gradient accumulation).")]
Rate = Annotated[float, typer.Option(callback=positive, help="Peak learning rate.")]
Vocabulary = Annotated[
    int | None, typer.Option(min=1, help="Draft only the given number of most frequent tokens. Default: all tokens.")
]
More = Annotated[
    Path | None,
    typer.Option("--arguments", help="JSON file with more transformers TrainingArguments (bf16, fsdp, ...)."),
]
FIELDS = "JSON file with more fields of the head's config"
MedusaFields = Annotated[Path | None, typer.Option(help=f"{FIELDS} (num_draft_tokens, tree, ...).")]
EagleFields = Annotated[Path | None, typer.Option(help=f"{FIELDS} (intermediate_size, num_steps, top_k, ...).")]
BlockFields = Annotated[
    Path | None, typer.Option(help=f"{FIELDS} (intermediate_size, own_lm_head, all_children, ...).")
]
RECIPE = "JSON file with fields of the training recipe"
MedusaRecipe = Annotated[Path | None, typer.Option(help=f"{RECIPE} (head_decay, soft_labels, answer_tokens).")]
EagleRecipe = Annotated[Path | None, typer.Option(help=f"{RECIPE} (step_decay, soft_tokens, noise, ...).")]
BlockRecipe = Annotated[Path | None, typer.Option(help=f"{RECIPE} (slot_decay, text_weight, soft_weight, ...).")]
Initial = Annotated[str | None, typer.Option(metavar="HEAD", help="Path or Hub id of a head to continue training.")]
Seen = Annotated[
    float | None,
    typer.Option(min=0.0, max=1.0, callback=finite,
                 help="Drop conversations whose answers repeat others, or themselves, by more than this fraction."),
]  # fmt: skip
BaseName = Annotated[
    str | None,
    typer.Option(metavar="ID", help="Hub id of the target to store in the head, if --model is a path."),
]


def check_start(initial_head: str | None, random_start: bool) -> None:
    """Raise `InvalidConfigError` if a run is to start from a trained head and from random weights."""
    if initial_head is not None and random_start:
        raise InvalidConfigError("--random-start cannot be combined with --initial-head.", "Drop one of them.")


def check_new_head_fields(fields: dict[str, Any], initial_head: str | None) -> dict[str, Any]:
    """Return the config fields that the user has set for a new head, that is, those that are not None.

    Raises:
        InvalidConfigError: A field is set, but training starts from `--initial-head`, which has its own config.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    if given and initial_head is not None:
        raise InvalidConfigError(
            f"--initial-head {initial_head} has its own config; {', '.join(given)} would be ignored.",
            "Drop these options, or train a new head.",
        )
    return given
