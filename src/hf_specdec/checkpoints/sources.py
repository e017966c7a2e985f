"""Where heads and models are loaded from: distinguish directories from Hub ids, and recognise connection errors."""

from __future__ import annotations

import os
from pathlib import Path

from huggingface_hub import errors as hub_errors

from hf_specdec.checkpoints.target_config import EXPECTED_MODEL
from hf_specdec.errors import CheckpointFormatError

EXPECTED_HEAD = "Use a directory with config.json and weights, or a Hub id."


def local_directory(name: str | Path, what: str, expected: str) -> Path | None:
    """Return the directory that a name refers to, with `~` expanded; None if the name may be a Hub id.

    Args:
        name: Path or Hub id, as given by the user.
        what: "model" or "head", for the error message.
        expected: What to give instead, as a sentence.

    Raises:
        CheckpointFormatError: The path is a file; or the directory does not exist, and the name cannot be a Hub id,
            because it is absolute, begins with `.` or `~`, or has more than one `/`.
    """
    text = str(name)
    path = os.path.expanduser(text)
    if os.path.isdir(path):
        return Path(path)
    if os.path.exists(path):
        raise CheckpointFormatError(f"The {what} {text!r} is a file.", expected)
    if text.startswith((".", "~")) or os.path.isabs(text) or text.count("/") > 1:
        raise CheckpointFormatError(f"The {what} {text!r} cannot be loaded: there is no such directory.", expected)
    return None


def head_directory(name: str | Path) -> Path | None:
    """Return the directory of a head; None if the name may be a Hub id.

    Raises:
        CheckpointFormatError: See `local_directory`; or the name is neither a directory nor can it be a Hub id.
    """
    folder = local_directory(name, "head", EXPECTED_HEAD)
    if folder is None and "/" not in str(name):  # the Hub has no heads without an owner
        raise CheckpointFormatError(
            f"No head was found at {str(name)!r}: it is not a local directory, and a Hub id has the form owner/name."
        )
    return folder


def model_directory(name: str) -> Path | None:
    """Return the directory of a model; None if the name may be a Hub id.

    Raises:
        CheckpointFormatError: See `local_directory`; or the directory holds no `config.json`.
    """
    folder = local_directory(name, "model", EXPECTED_MODEL)
    if folder is not None and not (folder / "config.json").is_file():
        raise CheckpointFormatError(
            f"The model {name!r} cannot be loaded: the directory holds no config.json.", EXPECTED_MODEL
        )
    return folder


def is_connection_error(error: BaseException | None) -> bool:
    """Whether an error, or one that caused it, is that the Hub cannot be reached and a file is not in the cache."""
    while error is not None:
        if isinstance(error, hub_errors.LocalEntryNotFoundError | hub_errors.OfflineModeIsEnabled):
            return True
        error = error.__cause__ or error.__context__
    return False
