"""Help of commands in narrow terminals: without a table, whose columns would cut names and words."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, get_args

import typer
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

TABLE_WIDTH = 120
"""Columns from which options are shown in a table."""

VALUE_NAMES = {int: "N", float: "X", str: "TEXT", Path: "PATH"}
"""What help calls an option's value, by type."""


def without_type_of_flags(params: list[Any]) -> list[Any]:
    """Return the parameters of a command, after hiding the type, `<bool>`, of those that are flags."""
    for param in params:
        if getattr(param, "is_flag", False):
            param.display_type_rich = lambda **_: None
    return params


class Command(TyperCommand):
    """A command whose help has no table if the terminal has fewer than `TABLE_WIDTH` columns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        params: Any = self.params
        for param in params:
            described = param.type_descriptor
            if param.metavar is None and not getattr(param, "is_flag", False) and not described.is_choice:
                kind = get_args(described.annotation)[0] if described.is_list else described.annotation
                param.metavar = VALUE_NAMES.get(kind)

    def get_params(self, ctx: typer.Context) -> list[Any]:  # type: ignore[override]
        """Return the parameters; tables show no type of flags, which take no value."""
        return without_type_of_flags(super().get_params(ctx))

    def format_help(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]
        """Write the help, as a table or as lines."""
        if shutil.get_terminal_size().columns >= TABLE_WIDTH:
            super().format_help(ctx, formatter)
        else:
            super(TyperCommand, self).format_help(ctx, formatter)

    def collect_usage_pieces(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        """Return the parts of the usage line; names of arguments without the braces that typer adds."""
        return [piece.strip("{}") for piece in super().collect_usage_pieces(ctx)]

    def format_epilog(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]
        """Write the examples, each in one line so that it can be copied."""
        if not self.epilog:
            return
        title, *examples = Text.from_markup(self.epilog).plain.split("\n\n")
        lines = [f"{title}:", *(f"  {example.strip()}" for example in examples)]
        formatter.write("\n" + "".join(f"{line}\n" for line in lines))


class Group(TyperGroup):
    """A command with subcommands. If the user gives an unknown one, the error message lists those that exist."""

    def get_params(self, ctx: typer.Context) -> list[Any]:  # type: ignore[override]
        """Return the parameters; tables show no type of flags, which take no value."""
        return without_type_of_flags(super().get_params(ctx))

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Return the name of the subcommand that the arguments begin with, the subcommand, and the other arguments."""
        try:
            return super().resolve_command(ctx, args)
        except typer.TyperException as error:
            if not args[0].startswith("-"):
                error.message += f" Commands: {', '.join(self.commands)}."
            raise
