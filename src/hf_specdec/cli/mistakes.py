"""What is printed if a command line is wrong: what, why, and what to give instead, instead of typer's messages."""

from __future__ import annotations

import re
from typing import Any

import typer

from hf_specdec.errors import printable, sentence
from hf_specdec.validation import nearest

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


EXAMPLES = {"--json": "results.json", "--plot": "plot.png", "--model": "org/model", "--drafter": "org/head",
            "--prompts": "prompts.jsonl", "--data": "data", "--output": "head", "--method": "auto",
            "--methods": "plain,auto", "--prompt": "'Why is the sky blue?'"}  # fmt: skip
"""A valid value of options that are easily given without one; `--json` takes a value in `bench` only."""

SIMILAR = 0.7
"""Similarity from which an option is proposed instead of an unknown one; below, they are rarely what was meant."""


def in_words(error: typer.TyperException) -> str:
    """Return what is wrong with a command line, and what to give instead."""
    message, context = error.format_message(), getattr(error, "ctx", None)
    for pattern, words in PYDANTIC_WORDS:
        message = re.sub(pattern, words, message)
    if re.search(r"must be (at least|at most|an integer|a number)\b[^,]*$", message):
        message += _given(error)
    without_value = re.fullmatch(r"Option '(\S+)' requires an argument\.?", message)
    if without_value:
        name = without_value[1]
        return f"{name} needs a value{f', such as {name} {EXAMPLES[name]}' if name in EXAMPLES else ''}."
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
    if message.startswith("Missing option"):
        options = [param for param in context.command.params if param.param_type_name == "option"]
        missing = [option.opts[0] for option in options if option.required and option.name not in context.params]
        several = f"Missing options {', '.join(map(repr, missing))}"
        return f"{sentence(several if len(missing) > 1 else message)} {see}"
    return sentence(message)


def _given(error: typer.TyperException) -> str:
    """Return the refused value, as the end of a message; nothing if pydantic, which typer uses, does not name it."""
    errors = getattr(error.__cause__, "errors", None)
    return f", got {printable(str(errors()[0]['input']))}" if callable(errors) else ""


def _no_such_option(error: Any, context: typer.Context) -> str:
    """Describe an unknown option: name the most similar one, or the argument that it stands for."""
    name, params = error.option_name, context.command.params
    known = [option for param in params for option in param.opts if option.startswith("--")]
    near = nearest(name, known, cutoff=SIMILAR)
    arguments = [piece.strip("[]") for piece in context.command.collect_usage_pieces(context)]
    if name.lstrip("-").upper() in arguments:
        return f"There is no option {name}: it is an argument. {context.get_usage()}."
    meant = "" if near is None else f"Did you mean {near}? "
    return f"There is no option {name}. {meant}See {context.command_path} --help."
