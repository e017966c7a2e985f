"""What the commands share: options, and the checks that come before any work."""

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


def finite(value: Any) -> Any:
    """A number that a bound can judge: neither infinite nor not a number.

    Raises:
        BadParameter: It is one of the two.
    """
    for number in value if isinstance(value, list) else [value]:
        if isinstance(number, float) and not math.isfinite(number):
            raise typer.BadParameter(f"expected a finite number, got {number}")
    return value


Model = Annotated[str | None, typer.Option(help="Path or Hub id; default: the packaged SmolLM2-135M-Instruct.")]
Head = Annotated[str | None, typer.Option("--drafter", help="Path or Hub id of a draft head.")]
Precision = Annotated[
    Dtype,
    typer.Option(help="Of the target's weights; 'auto' is the checkpoint's own. Ids are guaranteed equal in float32."),
]
NewTokens = Annotated[int, typer.Option(min=1, help="Length of the answer at most.")]
Seed = Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Of all draws.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


def need_package(name: str, purpose: str, extra: str) -> None:
    """Have an optional package before anything is done with it.

    Args:
        name: Of the module.
        purpose: What it is needed for, the beginning of a sentence.
        extra: Of this package, which brings it.

    Raises:
        InvalidConfigError: It is not installed.
    """
    if importlib.util.find_spec(name) is None:
        raise InvalidConfigError(f"{purpose} needs the package {name}.", f"pip install 'hf-specdec[{extra}]'")


def writable_file(path: Path | None, option: str) -> None:
    """See that a file can be written where a long work will want to.

    Raises:
        InvalidConfigError: It is a directory, its directory is not there, or nothing may be written there.
    """
    if path is None:
        return
    folder = path.parent
    if path.is_dir() or not folder.is_dir():
        what = "is a directory" if path.is_dir() else f"is in a directory that does not exist: {folder}"
        raise InvalidConfigError(f"{option} {path} {what}.", "Give a file in a directory that is there.")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise InvalidConfigError(f"{option} {path} cannot be written.", "Give a file where you may write.")


def writable_directory(path: Path | None, option: str) -> None:
    """See that a directory can be made, or written to, where a long work will want to; it is not made here.

    Raises:
        InvalidConfigError: It is a file, stands below one, or nothing may be written there.
    """
    if path is None:
        return
    there = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    if not there.is_dir():
        raise InvalidConfigError(f"{option} {path}: {there} is a file.", "Give a directory.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise InvalidConfigError(f"{option} {path}: nothing may be written in {there}.", "Give another directory.")


def read_object(path: Path | None, option: str) -> dict[str, Any]:
    """The JSON object in a file; an empty one without a file.

    Raises:
        InvalidConfigError: The file cannot be read, or holds something else.
    """
    if path is None:
        return {}
    try:
        return records.read_object(path)
    except InvalidConfigError as error:
        raise InvalidConfigError(f"{option}: {error}", 'Expected something like {"bf16": true}.') from error
