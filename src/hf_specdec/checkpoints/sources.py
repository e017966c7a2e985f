"""Where heads and models are loaded from: distinguish directories from Hub ids, and recognise connection errors."""

from __future__ import annotations

import os
from pathlib import Path

from huggingface_hub import errors as hub_errors

from hf_specdec.errors import CheckpointFormatError


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


def is_connection_error(error: BaseException | None) -> bool:
    """Whether an error, or one that caused it, is that the Hub cannot be reached and a file is not in the cache."""
    while error is not None:
        if isinstance(error, hub_errors.LocalEntryNotFoundError | hub_errors.OfflineModeIsEnabled):
            return True
        error = error.__cause__ or error.__context__
    return False
