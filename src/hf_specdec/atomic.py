"""Files that appear whole or not at all: made beside their place, then moved; and one process at a time."""

from __future__ import annotations

import glob
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

    What processes that live no more have left there is cleared.

    Args:
        path: The file; its directory is made where it is missing.

    Raises:
        InvalidConfigError: Nothing can be written there: before the block, or at its end.
    """
    with _writing(path):
        if path.is_dir():
            raise InvalidConfigError(f"{path} is a directory.", "Give the name of a file.")
        path.parent.mkdir(parents=True, exist_ok=True)
        clear_partials(path.parent, f".{path.name}.")
        partial = path.with_name(f".{path.name}.{os.getpid()}{PARTIAL}")
        partial.touch()
    try:
        with _writing(path):
            yield partial
            partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Raises an `InvalidConfigError` where the operating system, or a name, does not let anything be written."""
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the name
        if isinstance(error, OSError) or "null" in str(error):
            raise InvalidConfigError(f"{str(path)!r} cannot be written: {error}.", "Give another place.") from error
        raise


def write_text(path: Path, text: str) -> None:
    """Write a text file; another one of that name is replaced when the new one is whole."""
    with whole_file(path) as partial:
        partial.write_text(text)


@contextmanager
def staging_directory(folder: Path) -> Iterator[Path]:
    """A new directory on the same disk as `folder`, gone afterwards with whatever is left in it.

    What processes that live no more have left there is cleared.

    Args:
        folder: Where files are to appear; its parent is made where it is missing.

    Raises:
        InvalidConfigError: Nothing can be written there.
    """
    with _writing(folder):
        folder = folder.absolute()
        if folder.exists() and not folder.is_dir():
            raise InvalidConfigError(f"{folder} is a file.", "Give a directory.")
        folder.parent.mkdir(parents=True, exist_ok=True)
        prefix, suffix = f".{folder.name}.", f".{os.getpid()}{PARTIAL}"
        clear_partials(folder.parent, prefix)
        made = tempfile.TemporaryDirectory(dir=folder.parent, prefix=prefix, suffix=suffix)
    with made as name:
        yield Path(name)


def clear_partials(folder: Path, prefix: str = ".") -> None:
    """Remove what dead processes have left unfinished in a directory.

    Args:
        folder: The directory.
        prefix: Of the names.
    """
    for left in folder.glob(f"{glob.escape(prefix)}*{PARTIAL}"):
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
    clear_partials(folder, f".{first}.")
    held = folder / f".{first}.{os.getpid()}{PARTIAL}"  # what says that a save was broken off here
    if (folder / first).exists():
        (folder / first).replace(held)
    new = sorted(path.relative_to(made) for path in made.rglob("*") if path.is_file())
    for pattern in stale:
        for path in folder.glob(pattern):
            if path.relative_to(folder) not in new:
                path.unlink()
    for name in sorted(new, key=lambda name: name == Path(first)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).replace(folder / name)
    held.unlink(missing_ok=True)


def is_broken_off(folder: Path, first: str) -> bool:
    """Whether `move_into` was interrupted in a directory, so that what is there belongs to two saves.

    Args:
        folder, first: Of `move_into`.
    """
    return not (folder / first).exists() and any(folder.glob(f".{glob.escape(first)}.*{PARTIAL}"))


@contextmanager
def directory_lock(folder: Path, work: str) -> Iterator[None]:
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
