"""The command `hf-specdec train` with its subcommands."""

from __future__ import annotations

from hf_specdec.cli.block_training import dflash
from hf_specdec.cli.layout import Command
from hf_specdec.cli.training import EXAMPLE, train

train.command(cls=Command, epilog=EXAMPLE.replace("KIND", "dflash") + " --draft-vocab-size 8192 --markov-rank 32")(
    dflash
)
