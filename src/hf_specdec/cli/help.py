"""Help in narrow terminals, as lines instead of tables that would cut names; words for a wrong command line."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import typer
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from hf_specdec.errors import printable, sentence
from hf_specdec.validation import nearest

TABLE_WIDTH = 120
"""Columns from which options are shown in a table."""

VALUE_NAMES = {int: "N", float: "X", str: "TEXT", Path: "PATH"}
"""What help calls an option's value, by type."""

DOCUMENTATION = "Docs: "
"""Start of the last line of a command's help."""

PAGES = "https://github.com/hf-specdec/hf-specdec/blob/main/docs/"


def _is_wide() -> bool:
    return shutil.get_terminal_size().columns >= TABLE_WIDTH


def _without_needless_types(params: list[Any]) -> list[Any]:
    """Return the parameters of a command, after hiding the types of flags (`<bool>`) and of arguments (`<str>`)."""
    for param in params:
        if getattr(param, "is_flag", False) or param.param_type_name == "argument":
            param.display_type_rich = lambda **_: None
    return params


def _write_epilog(epilog: str | None, formatter: Any) -> None:
    """Write a title, examples, each in one line so that it can be copied, and the page of the docs."""
    if not epilog:
        return
    title, *examples = Text.from_markup(epilog).plain.split("\n\n")
    last = f"\n{examples.pop()}" if examples and examples[-1].startswith(DOCUMENTATION) else ""
    lines = [f"{title}:" if examples else title, *(f"  {example.strip()}" for example in examples), last]
    formatter.write("\n" + "\n".join(lines).rstrip("\n") + "\n")


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
        return _without_needless_types(super().get_params(ctx))

    def format_help(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]
        """Write the help, as a table or as lines."""
        if _is_wide():
            super().format_help(ctx, formatter)
        else:
            super(TyperCommand, self).format_help(ctx, formatter)

    def collect_usage_pieces(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        """Return the parts of the usage line; names of arguments without the braces that typer adds."""
        return [piece.strip("{}") for piece in super().collect_usage_pieces(ctx)]

    def format_epilog(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]
        """Write the examples."""
        _write_epilog(self.epilog, formatter)


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
        if _is_wide():
            super().format_help(ctx, formatter)
            return
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        panels: dict[str, list[tuple[str, str]]] = {}
        for name, command in self.commands.items():
            panel = getattr(command, "rich_help_panel", None) or "Commands"
            summary = (command.help or "").split("\n\n")[0]
            panels.setdefault(panel, []).append((name, " ".join(summary.split())))
        for title, rows in panels.items():
            with formatter.section(title):
                formatter.write_dl(rows)
        with formatter.section("Options"):
            formatter.write_dl([row for param in self.get_params(ctx) if (row := param.get_help_record(ctx))])
        _write_epilog(self.epilog, formatter)

    def get_params(self, ctx: typer.Context) -> list[Any]:  # type: ignore[override]
        """Return the parameters; flags and arguments show no type."""
        return _without_needless_types(super().get_params(ctx))

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


def epilog_of(examples: Sequence[str], page: str) -> str:
    """Return the end of a command's help: its examples and the address of a page of `docs/`."""
    title = "Example" if len(examples) == 1 else "Examples"
    return "\n\n".join([f"[bold]{title}[/bold]", *(f"  {line}" for line in examples), f"{DOCUMENTATION}{PAGES}{page}"])


# ------------------------------------------------------------------------------------------------- wrong command lines

PYDANTIC_WORDS = (
    (r"Value error, ", ""),
    (r"Input should be greater than or equal to ", "must be at least "),
    (r"Input should be less than or equal to ", "must be at most "),
    (r"Input should be a valid (integer|number).*", r"must be a \1"),
    (r"\bmust be a integer", "must be an integer"),
)
"""Patterns in pydantic's messages, with which typer describes an invalid value, and what is shown instead."""

OPTION_VALUES = {"--json": "results.json", "--plot": "plot.png", "--model": "org/model", "--drafter": "org/head",
          "--prompts": "prompts.jsonl", "--data": "data", "--output": "head", "--method": "auto",
          "--methods": "plain,auto", "--prompt": "'Why is the sky blue?'"}  # fmt: skip
"""A valid value of options that are easily given without one; `--json` takes a value in `bench` only."""


def in_words(error: typer.TyperException) -> str:
    """Return what is wrong with a command line, and what to give instead."""
    message, context = error.format_message(), getattr(error, "ctx", None)
    for pattern, words in PYDANTIC_WORDS:
        message = re.sub(pattern, words, message)
    refused = getattr(error.__cause__, "errors", None)  # pydantic's, which know the value
    if callable(refused) and re.search(r"must be (at least|at most|an integer|a number)\b[^,]*$", message):
        message += f", got {printable(str(refused()[0]['input']))}"
    without_value = re.fullmatch(r"Option '(\S+)' requires an argument\.?", message)
    if without_value:
        name = without_value[1]
        return f"{name} needs a value{f', such as {name} {OPTION_VALUES[name]}' if name in OPTION_VALUES else ''}."
    if context is None or not message:
        return message and sentence(message)
    see = f"See {context.command_path} --help."
    if hasattr(error, "possibilities"):
        return printable(_no_such_option(error, context))
    extra = re.fullmatch(r"Got unexpected extra arguments?(?:\(s\))? \((.*)\)", message, flags=re.DOTALL)
    if extra:
        hint = f"{context.get_usage()}."
        if context.command.name == "generate":
            hint = "Put the prompt in quotes: hf-specdec generate 'Why is the sky blue?'"
        return printable(f"The argument {extra[1]!r} is one too many. {hint}")
    if message.startswith("Missing argument"):
        return f"{sentence(message)} {context.get_usage()}."
    if message.startswith("Missing option"):
        options = [param for param in context.command.params if param.param_type_name == "option"]
        missing = [option.opts[0] for option in options if option.required and option.name not in context.params]
        several = f"Missing options {', '.join(map(repr, missing))}"
        return f"{sentence(several if len(missing) > 1 else message)} {see}"
    return sentence(message)


def _no_such_option(error: Any, context: typer.Context) -> str:
    """Describe an unknown option: name the most similar one, or the argument that it stands for."""
    name, params = error.option_name, context.command.params
    known = [option for param in params for option in param.opts if option.startswith("--")]
    near = nearest(name, known, cutoff=0.7)  # less similar ones are rarely what was meant
    arguments = [piece.strip("[]") for piece in context.command.collect_usage_pieces(context)]
    if name.lstrip("-").upper() in arguments:
        return f"There is no option {name}: it is an argument. {context.get_usage()}."
    meant = "" if near is None else f"Did you mean {near}? "
    return f"There is no option {name}. {meant}See {context.command_path} --help."
