"""Files that appear whole or not at all: made beside their place, then moved; and one process at a time."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from filelock import FileLock, Timeout

from hf_specdec.errors import InvalidConfigError

PARTIAL = ".partial"
"""Ends the names of what is not whole yet; before it stands the process that makes it."""


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A name beside a file to write to; it takes the file's place when the block ends without an error.

    Args:
        path: The file; its directory is made where it is missing.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}{PARTIAL}")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file; another one of that name is replaced when the new one is whole."""
    with whole_file(path) as partial:
        partial.write_text(text)


@contextmanager
def beside(folder: Path) -> Iterator[Path]:
    """A new directory on the same disk as `folder`, gone afterwards with whatever is left in it.

    What processes that live no more have left there is cleared.

    Args:
        folder: Where files are to appear; its parent is made where it is missing.
    """
    folder = folder.absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    clear_partials(folder.parent, f".{folder.name}.")
    prefix, suffix = f".{folder.name}.", f".{os.getpid()}{PARTIAL}"
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=prefix, suffix=suffix) as name:
        yield Path(name)


def clear_partials(folder: Path, prefix: str = ".") -> None:
    """Remove what dead processes have left unfinished in a directory.

    Args:
        folder: The directory.
        prefix: Of the names.
    """
    for left in folder.glob(f"{prefix}*{PARTIAL}"):
        process = left.name.removesuffix(PARTIAL).rsplit(".", 1)[-1]
        if not process.isdigit() or psutil.pid_exists(int(process)):
            continue
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)


def move_into(made: Path, folder: Path, first: str, stale: tuple[str, ...] = ()) -> None:
    """Move files to a directory, in the place of others, so that at no moment parts of two of them stand together.

    Args:
        made: A directory of whole files, on the same disk.
        folder: Where to; made where it is missing. What is in it and not replaced stays.
        first: The file without which nothing there loads: it goes away before, and comes last.
        stale: Patterns of files that would be read together with the new ones; what they match and is not replaced
            goes away.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / first).unlink(missing_ok=True)
    new = sorted(path.relative_to(made) for path in made.rglob("*") if path.is_file())
    for pattern in stale:
        for path in folder.glob(pattern):
            if path.relative_to(folder) not in new:
                path.unlink()
    for name in sorted(new, key=lambda name: name == Path(first)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).replace(folder / name)


@contextmanager
def alone(folder: Path, work: str) -> Iterator[None]:
    """Hold a directory while a long work goes on in it; the operating system lets go of it for a process that dies.

    Args:
        folder: Made where it is missing.
        work: What is done there, for the error.

    Raises:
        InvalidConfigError: Another process holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    place = folder / f".{work}.lock"
    lock = FileLock(place, blocking=False)
    try:
        lock.acquire()
    except Timeout:
        raise InvalidConfigError(
            f"Another process is at work in {folder} ({work}).", "Wait for its end, or give another directory."
        ) from None
    try:
        yield
    finally:
        if os.name != "nt":  # an open file cannot be removed there
            place.unlink(missing_ok=True)
        lock.release()
