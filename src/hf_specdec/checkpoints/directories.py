"""Which directories a head may be written to, without deleting or replacing anything else; needs no torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from hf_specdec.errors import InvalidConfigError, listed

HEAD_FILES = re.compile(
    r"config\.json|.+\.(safetensors|bin|pt)(\.index\.json)?|README\.md|[\w-]+\.png|custom_generate(/generate\.py)?"
)
"""Names of a head's files; a directory with any other file is never replaced."""

CODE = "custom_generate"
"""Directory of a head with code for transformers' `custom_generate`."""


def check_new_head(folder: Path, *, replace: bool) -> None:
    """Refuse to overwrite a head (unless `replace` is true), or files that are not a head's.

    Raises:
        InvalidConfigError: The directory is not empty (without `replace`), or holds other files than a head's.
    """
    existing = sorted(_names(folder)) if folder.is_dir() else []
    unknown = [name for name in existing if not HEAD_FILES.fullmatch(name)]
    if existing and not replace:
        raise InvalidConfigError(
            f"{folder} is not empty: it holds {listed(unknown or existing)}.",
            "Choose a new directory." if unknown else "Choose a new directory, or use replace=True.",
        )
    if unknown:
        raise InvalidConfigError(f"{folder} holds {listed(unknown)}, not a head's files.", "Choose another directory.")


def _names(folder: Path) -> Iterator[str]:
    """Yield the names in a directory; directories end with a slash, except `custom_generate`, of which all is named.

    Only these two levels are read: other directories are not a head's, and may be large.
    """
    for path in folder.iterdir():
        if path.name == CODE and path.is_dir():
            yield CODE
            yield from (f"{CODE}/{name}" for name in _names(path))
        else:
            yield f"{path.name}/" if path.is_dir() else path.name


WRITTEN = re.compile(r"config\.json|model.*\.safetensors(\.index\.json)?|README\.md|training\.png|custom_generate")
"""Names of the files and directories that saving a trained head writes."""


def overwritten(folder: Path) -> list[str]:
    """Return the names in a directory, sorted, that saving a trained head there could overwrite."""
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    return [name for name in names if WRITTEN.fullmatch(name)]
