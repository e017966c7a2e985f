"""Help in narrow terminals: lines instead of tables, whose columns would cut names and words."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import typer
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from hf_specdec.validation import nearest

TABLE_WIDTH = 120
"""Columns from which options are shown in a table."""

VALUE_NAMES = {int: "N", float: "X", str: "TEXT", Path: "PATH"}
"""What help calls an option's value, by type."""


def is_wide() -> bool:
    """Whether the terminal has enough columns for tables."""
    return shutil.get_terminal_size().columns >= TABLE_WIDTH


def without_needless_types(params: list[Any]) -> list[Any]:
    """Return the parameters of a command, after hiding the types of flags (`<bool>`) and of arguments (`<str>`)."""
    for param in params:
        if getattr(param, "is_flag", False) or param.param_type_name == "argument":
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
        """Return the parameters; flags and arguments show no type."""
        return without_needless_types(super().get_params(ctx))

    def format_help(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]
        """Write the help, as a table or as lines."""
        if is_wide():
            super().format_help(ctx, formatter)
        else:
            super(TyperCommand, self).format_help(ctx, formatter)

    def collect_usage_pieces(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        """Return the parts of the usage line; names of arguments without the braces that typer adds."""
        return [piece.strip("{}") for piece in super().collect_usage_pieces(ctx)]

    def format_epilog(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]
        """Write the examples, each in one line so that it can be copied."""
        write_examples(self.epilog, formatter)


def write_examples(epilog: str | None, formatter: Any) -> None:
    """Write an epilog: a title and examples, divided by empty lines; each in one line, so that it can be copied."""
    if not epilog:
        return
    title, *examples = Text.from_markup(epilog).plain.split("\n\n")
    last = f"\n{examples.pop()}" if examples and examples[-1].startswith(DOCUMENTATION) else ""
    lines = [f"{title}:" if examples else title, *(f"  {example.strip()}" for example in examples), last]
    formatter.write("\n" + "\n".join(lines).rstrip("\n") + "\n")


DOCUMENTATION = "Docs: "
"""Start of the last line of a command's help."""

PAGES = "https://github.com/hf-specdec/hf-specdec/blob/main/docs/"


def epilog_of(examples: Sequence[str], page: str) -> str:
    """Return the end of a command's help: its examples and the address of a page of `docs/`."""
    title = "Example" if len(examples) == 1 else "Examples"
    return "\n\n".join([f"[bold]{title}[/bold]", *(f"  {line}" for line in examples), f"{DOCUMENTATION}{PAGES}{page}"])


class Group(TyperGroup):
    """A command with subcommands. If the user gives an unknown one, the error message lists those that exist."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "suggest_commands": False})  # `resolve_command` does

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Parse the arguments; without any, print the help and exit with code 2."""
        if not args and not ctx.resilient_parsing:  # resilient: the shell only asks for completions
            typer.echo(ctx.get_help())
            ctx.exit(2)
        return super().parse_args(ctx, args)

    def format_help(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]
        """Write the help, as tables or as lines."""
        if is_wide():
            super().format_help(ctx, formatter)
            return
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        panels: dict[str, list[tuple[str, str]]] = {}
        for name, command in self.commands.items():
            panel = getattr(command, "rich_help_panel", None) or "Commands"
            panels.setdefault(panel, []).append((name, " ".join((command.help or "").split())))
        for title, rows in panels.items():
            with formatter.section(title):
                formatter.write_dl(rows)
        with formatter.section("Options"):
            formatter.write_dl([row for param in self.get_params(ctx) if (row := param.get_help_record(ctx))])
        write_examples(self.epilog, formatter)

    def get_params(self, ctx: typer.Context) -> list[Any]:  # type: ignore[override]
        """Return the parameters; flags and arguments show no type."""
        return without_needless_types(super().get_params(ctx))

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Return the name of the subcommand that the arguments begin with, the subcommand, and the other arguments."""
        try:
            return super().resolve_command(ctx, args)
        except typer.TyperException as error:
            if not args[0].startswith("-"):
                near = nearest(args[0], self.commands)
                meant = "" if near is None else f" Did you mean {near!r}?"
                error.message += f"{meant} Commands: {', '.join(self.commands)}."
            raise
