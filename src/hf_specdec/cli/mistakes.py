"""What is printed if a command line is wrong: what, why, and what to give instead, instead of typer's messages."""

from __future__ import annotations

import re
from typing import Any

import typer

from hf_specdec.errors import printable, sentence

PYDANTIC_WORDS = (
    (r"Value error, ", ""),
    (r"Input should be greater than or equal to ", "must be at least "),
    (r"Input should be less than or equal to ", "must be at most "),
    (r"Input should be a valid (integer|number).*", r"must be a \1"),
    (r"\bmust be a integer", "must be an integer"),
)
"""Patterns in pydantic's messages, with which typer describes an invalid value, and what is shown instead."""

QUOTED_PROMPT = "Put the prompt in quotes: hf-specdec generate 'Why is the sky blue?'"
"""What to do about further words after the prompt of `hf-specdec generate`."""


def in_words(error: typer.TyperException) -> str:
    """Return what is wrong with a command line, and what to give instead."""
    message, context = error.format_message(), getattr(error, "ctx", None)
    for pattern, words in PYDANTIC_WORDS:
        message = re.sub(pattern, words, message)
    if context is None or not message:
        return message and sentence(message)
    see = f"See {context.command_path} --help."
    if hasattr(error, "possibilities"):
        return printable(_no_such_option(error, context))
    extra = re.fullmatch(r"Got unexpected extra arguments?(?:\(s\))? \((.*)\)", message, flags=re.DOTALL)
    if extra:
        hint = QUOTED_PROMPT if context.command.name == "generate" else f"{context.get_usage()}."
        return printable(f"The argument {extra[1]!r} is one too many. {hint}")
    if message.startswith("Missing argument"):
        return f"{sentence(message)} {context.get_usage()}."
    return f"{sentence(message)} {see}" if message.startswith("Missing option") else sentence(message)


def _no_such_option(error: Any, context: typer.Context) -> str:
    """Describe an unknown option: name the most similar one, or the argument that it stands for."""
    name, near = error.option_name, [option for option in error.possibilities or () if option != "--help"]
    arguments = [piece.strip("[]") for piece in context.command.collect_usage_pieces(context)]
    if name.lstrip("-").upper() in arguments:
        return f"There is no option {name}: it is an argument. {context.get_usage()}."
    meant = f"Did you mean {near[0]}? " if near else ""
    return f"There is no option {name}. {meant}See {context.command_path} --help."
