"""Write files atomically (to a temporary file, then renamed), lock directories, and find the cache directory."""

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
from safetensors import SafetensorError

from hf_specdec.errors import InvalidConfigError, SpeculativeDecodingError

PARTIAL = ".partial"
"""Suffix of the names of unfinished files and directories, which contain the id of the writing process, such as
`.name.1234.partial`."""


def cache_directory() -> Path:
    """Return the package's cache directory, created if missing: `$XDG_CACHE_HOME/hf-specdec` or `~/.cache/hf-specdec`.

    A relative `$XDG_CACHE_HOME` is ignored, as the XDG specification demands. Raises OSError if it cannot be created,
    RuntimeError if the home directory is unknown.
    """
    home = os.environ.get("XDG_CACHE_HOME", "")
    folder = (Path(home) if os.path.isabs(home) else Path.home() / ".cache") / "hf-specdec"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield the path of an empty temporary file, which replaces `path` if the block ends without an error.

    Creates its directory. Removes temporary files that dead processes left for the same path. If the file cannot be
    written, an `InvalidConfigError` is raised, before the block if possible; it replaces the errors of the block that
    a full disk causes: OSError, SafetensorError, and torch's RuntimeError.
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
    """Convert errors of writing, also of a name with a NUL byte, to an `InvalidConfigError` that names `path`."""
    try:
        yield
    except SpeculativeDecodingError:
        raise
    except (OSError, SafetensorError, RuntimeError, ValueError) as error:
        others = TORCH_WRITER if isinstance(error, RuntimeError) else "null"  # ValueError: a NUL byte in the name
        if not isinstance(error, OSError | SafetensorError) and others not in str(error):
            raise
        raise InvalidConfigError(f"{str(path)!r} cannot be written: {error}.", "Give another path.") from error


TORCH_WRITER = "inline_container.cc"
"""C++ file that torch names in the RuntimeErrors that it raises if a file cannot be written."""


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically, replacing any existing one."""
    with whole_file(path) as partial:
        partial.write_text(text)


@contextmanager
def staging_directory(folder: Path) -> Iterator[Path]:
    """Yield a temporary directory next to `folder` (on the same disk), and delete it after the block.

    Creates the parent of `folder`. Removes temporary directories that dead processes left for the same folder. Errors
    are those of `whole_file`.
    """
    with _writing(folder):
        folder = folder.absolute()
        if folder.exists() and not folder.is_dir():
            raise InvalidConfigError(f"{folder} is a file.", "Give a directory.")
        folder.parent.mkdir(parents=True, exist_ok=True)
        prefix, suffix = f".{folder.name}.", f".{os.getpid()}{PARTIAL}"
        clear_partials(folder.parent, prefix)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=prefix, suffix=suffix) as name:
            yield Path(name)


def clear_partials(folder: Path, prefix: str = ".") -> None:
    """Remove unfinished files and directories of dead processes, with names that begin with `prefix`."""
    for left in folder.glob(f"{glob.escape(prefix)}*{PARTIAL}"):
        process = left.name.removesuffix(PARTIAL).rsplit(".", 1)[-1]
        if not process.isdigit() or psutil.pid_exists(int(process)):
            continue
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)


def move_into(source: Path, folder: Path, first: str, stale: tuple[str, ...] = ()) -> None:
    """Move files into a directory such that an interruption never leaves a loadable mixture of old and new files.

    `source`, on the same disk, holds the finished files. Nothing can be loaded without `first`, such as `config.json`,
    which is moved away first and written last; all get its permissions (safetensors' files are private). Old files
    that match a glob pattern of `stale` would be read together with the new ones: those that are not replaced are
    deleted. All others stay.
    """
    folder.mkdir(parents=True, exist_ok=True)
    clear_partials(folder, f".{first}.")
    backup = folder / f".{first}.{os.getpid()}{PARTIAL}"  # while it exists, the save is incomplete
    if (folder / first).exists():
        (folder / first).replace(backup)
    new = sorted(path.relative_to(source) for path in source.rglob("*") if path.is_file())
    for pattern in stale:
        for path in folder.glob(pattern):
            if path.relative_to(folder) not in new:
                path.unlink()
    for name in sorted(new, key=lambda name: name == Path(first)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).chmod((source / first).stat().st_mode)
        (source / name).replace(folder / name)
    backup.unlink(missing_ok=True)


def was_interrupted(folder: Path, first: str) -> bool:
    """Whether the last `move_into` was interrupted, so that the directory may mix old and new files."""
    return not (folder / first).exists() and any(folder.glob(f".{glob.escape(first)}.*{PARTIAL}"))


@contextmanager
def directory_lock(folder: Path, work: str) -> Iterator[None]:
    """Lock a directory, created if missing, during the block; the system releases the lock if the process dies.

    `work`, the name of the work, is part of the lock file's name and of the error if another process holds the lock.
    """
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    path = folder / f".{work}.lock"
    lock = FileLock(path, blocking=False)
    try:
        lock.acquire()
    except Timeout:
        raise InvalidConfigError(
            f"Another process uses {folder} ({work}).", "Wait until it ends, or give another directory."
        ) from None
    try:
        yield
    finally:
        if os.name != "nt":  # Windows cannot remove an open file
            path.unlink(missing_ok=True)
        lock.release()
