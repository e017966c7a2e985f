"""Help of commands in narrow terminals: without a table, whose columns would cut names and words."""

from __future__ import annotations

import shutil
from typing import Any

import typer
from rich.text import Text
from typer.core import TyperCommand

TABLE_WIDTH = 120
"""Columns from which options are shown in a table."""


class Command(TyperCommand):
    """A command whose help has no table if the terminal has fewer than `TABLE_WIDTH` columns."""

    def format_help(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]
        """Write the help, as a table or as lines."""
        if shutil.get_terminal_size().columns >= TABLE_WIDTH:
            super().format_help(ctx, formatter)
        else:
            super(TyperCommand, self).format_help(ctx, formatter)

    def format_epilog(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]
        """Write the examples, each in one line so that it can be copied."""
        if not self.epilog:
            return
        title, *examples = Text.from_markup(self.epilog).plain.split("\n\n")
        lines = [f"{title}:", *(f"  {example.strip()}" for example in examples)]
        formatter.write("\n" + "".join(f"{line}\n" for line in lines))
