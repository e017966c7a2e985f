"""Options shared by the commands, and checks made before any work starts."""

from __future__ import annotations

import importlib.util
import math
import os
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from hf_specdec import records
from hf_specdec.errors import InvalidConfigError

Dtype = Literal["auto", "float32", "bfloat16", "float16"]


FORWARDS = {"kernels": "CPU kernels", "inductor": "inductor's programs", "cuda_graph": "captured graphs"}
"""Values of `SpeculationStats.forwards`, except `"eager"`, in words."""


def finite(value: Any) -> Any:
    """Return an option's value if it is finite (a callback of options, because typer's range check accepts NaN).

    Raises:
        BadParameter: The value, or a number in the list, is infinite or NaN.
    """
    for number in value if isinstance(value, list) else [value]:
        if isinstance(number, float) and not math.isfinite(number):
            raise typer.BadParameter(f"expected a finite number, got {number}")
    return value


def positive(value: float) -> float:
    """Return an option's value if it is finite and above 0 (a callback of options; typer's ranges include their ends).

    Raises:
        BadParameter: The value is infinite, NaN, 0 or negative.
    """
    if finite(value) <= 0:
        raise typer.BadParameter(f"must be above 0, got {value:g}")
    return value


MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-5, 1000
"""Limits of temperatures above 0: below, scores may become infinite; above, all tokens are about equally likely."""


def temperature_in_range(value: Any) -> Any:
    """Return a temperature, or a list of them, if each is 0 or within the limits (a callback of options).

    Raises:
        BadParameter: A temperature is out of the limits.
    """
    for number in finite(value) if isinstance(value, list) else [finite(value)]:
        if number and not MIN_TEMPERATURE <= number <= MAX_TEMPERATURE:
            raise typer.BadParameter(
                f"must be 0 (greedy) or from {MIN_TEMPERATURE:.5f} to {MAX_TEMPERATURE}, got {number}"
            )
    return value


Model = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL", help="Path or Hub id of the target model. Default: the packaged SmolLM2-135M-Instruct."
    ),
]
Head = Annotated[
    str | None,
    typer.Option(
        "--drafter", metavar="HEAD",
        help="Path or Hub id of a draft head for the model. Default: for the packaged model the shipped head of the "
        "method, if hf-specdec runs from a clone; otherwise none.",
    ),
]  # fmt: skip
_PRECISION_HELP = "Dtype of the weights; 'auto' is the checkpoint's."
Precision = Annotated[
    Dtype, typer.Option(help=f"{_PRECISION_HELP} Identical token ids are guaranteed in float32 only.")
]
TrainingPrecision = Annotated[Dtype, typer.Option(help=_PRECISION_HELP)]
METHOD_NAMES = ("auto", "hybrid", "eagle", "dflash", "mtp", "medusa", "prompt_lookup", "token_recycling", "lookahead",
                "early_exit", "last_logits")  # fmt: skip
"""Values of `--method`: those that need no second model; see docs/choosing.md."""

NUM_EXPERIMENTAL = 3
"""How many of them, the last ones, are experimental."""

METHODS = f"{', '.join(METHOD_NAMES[:-NUM_EXPERIMENTAL])}; experimental: {', '.join(METHOD_NAMES[-NUM_EXPERIMENTAL:])}"
"""The same in words, for help."""
NewTokens = Annotated[int, typer.Option(min=1, help="Maximum number of generated tokens.")]
Seed = Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Random seed.")]
HeldOut = Annotated[
    int | None,
    typer.Option(min=0, help="Conversations held out for evaluation. Default: 5%, at most 64."),
]
NormOutput = Annotated[
    bool | None,
    typer.Option(
        "--norm-output",
        help="EAGLE-3.1: the next draft step reads the head's normalised output. Of other engines, only those that "
        "support EAGLE-3.1 can load the head.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


def require_package(name: str, purpose: str, extra: str) -> None:
    """Check that an optional package is installed.

    Args:
        name: Name of the package.
        purpose: Option or feature that needs it, for the error message.
        extra: Extra of hf-specdec that installs it.

    Raises:
        InvalidConfigError: The package is not installed.
    """
    if importlib.util.find_spec(name) is None:
        raise InvalidConfigError(f"{purpose} needs the package {name}.", f"Run: pip install 'hf-specdec[{extra}]'")


def check_writable_file(path: Path | None, option: str, *, force: bool) -> None:
    """Check that the file given for an option can be written later; None, for no file, is accepted.

    Args:
        path: The file.
        option: Name of the option, for the error message.
        force: Whether an existing file may be overwritten.

    Raises:
        InvalidConfigError: The path is a directory, its directory does not exist, permission is missing, or the file
            exists and `force` is false.
    """
    if path is None:
        return
    folder = path.parent
    if path.is_dir() or not folder.is_dir():
        what = "is a directory" if path.is_dir() else f"is in a directory that does not exist: {folder}"
        raise InvalidConfigError(f"{option} {path} {what}.", "Give a file in an existing directory.")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise InvalidConfigError(f"{option} {path} cannot be written.", "Check its permissions or give another file.")
    if path.exists() and not force:
        raise InvalidConfigError(f"{option} {path} already exists.", "Give another name or --force.")


PICTURE_FORMATS = (".png", ".svg", ".pdf")


def check_picture(path: Path | None, extra: str, *, force: bool) -> None:
    """Check that a plot can be drawn and written to the file given for `--plot`; None means that no plot is wanted.

    Args:
        path: The file.
        extra: Extra of hf-specdec that installs matplotlib.
        force: Whether an existing file may be overwritten.

    Raises:
        InvalidConfigError: matplotlib is not installed; or the file has an unknown suffix, cannot be written, or
            exists and `force` is false.
    """
    if path is None:
        return
    require_package("matplotlib", "--plot", extra)
    check_writable_file(path, "--plot", force=force)
    if path.suffix not in PICTURE_FORMATS:
        raise InvalidConfigError(f"--plot {path} has an unknown suffix.", f"Use one of {', '.join(PICTURE_FORMATS)}.")


def check_writable_directory(path: Path | None, option: str) -> None:
    """Check that the directory given for an option can be created or written to; None is accepted.

    Raises:
        InvalidConfigError: The path or a parent of it is a file, or permission is missing.
    """
    if path is None:
        return
    existing = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    if not existing.is_dir():
        what = "is a file" if existing == path else f"cannot be created, because {existing} is a file"
        raise InvalidConfigError(f"{option} {path} {what}.", "Give a directory.")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise InvalidConfigError(f"{option} {path}: {existing} is not writable.", "Give another directory.")


OBJECT_EXAMPLES = {
    "--arguments": '{"bf16": true}', "--recipe": '{"answer_tokens": 64}', "--head-fields": '{"num_draft_tokens": 8}',
}  # fmt: skip
"""A valid object for each option that takes a JSON file; the fields are those of every kind of head."""


def read_object(path: Path | None, option: str) -> dict[str, Any]:
    """Read a JSON object from the file given for an option; {} if the path is None.

    Raises:
        InvalidConfigError: The file cannot be read or is not a JSON object.
    """
    if path is None:
        return {}
    try:
        return records.read_json(path)
    except InvalidConfigError as error:
        reason = str(error).removesuffix(" Expected a JSON object.")
        raise InvalidConfigError(
            f"{option}: {reason}", f"Expected a JSON object such as {OBJECT_EXAMPLES[option]}."
        ) from error
