"""The command `hf-specdec train` with its subcommands."""

from __future__ import annotations

from collections.abc import Callable

import typer

from hf_specdec.cli.block_training import dflash
from hf_specdec.cli.layout import Command, Group, epilog_of
from hf_specdec.cli.training import eagle, medusa

TRAIN = "hf-specdec train {} --model org/model --data data --output head --features features"

EXAMPLES: dict[Callable[..., None], str] = {
    eagle: f"{TRAIN.format('eagle')} --draft-vocab-size 8192",
    dflash: f"{TRAIN.format('dflash')} --draft-vocab-size 8192 --markov-rank 32",
    medusa: TRAIN.format("medusa"),
}
"""The subcommands in the order of the help, and an example of each."""

PAGE = "training.md"

train = typer.Typer(
    cls=Group, help="Train a draft head for a model on the model's own answers.",
    add_completion=False, rich_markup_mode="rich",
    epilog=epilog_of((
        "hf-specdec distill --model org/model --prompts prompts.jsonl --output data",
        "hf-specdec train eagle --model org/model --data data --output head",
    ), PAGE),
)  # fmt: skip

for _command, _example in EXAMPLES.items():
    train.command(cls=Command, epilog=epilog_of((_example,), PAGE))(_command)
