"""Where heads and models are: a directory or the Hub, and which directories may be written to. Needs no torch."""

from __future__ import annotations

import functools
import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import errors as hub_errors
from huggingface_hub import hf_hub_download

from hf_specdec.atomic import was_interrupted
from hf_specdec.errors import CheckpointFormatError, InvalidConfigError, listed, translated
from hf_specdec.records import Fields, checked_path, existing_path, read_json

CONFIG_NAME = "config.json"
ADAPTER_NAME = "adapter_config.json"

EXPECTED_HEAD = "Use a directory with config.json and weights, or a Hub id."
EXPECTED_MODEL = "Give a model's directory, its Hub id or a GGUF file."
CONNECT = "Connect to the Hub, or give the directory of a downloaded model."
"""What to do if a model's Hub id is given, but the Hub cannot be reached."""


def head_directory(name: str | Path) -> Path | None:
    """Return the directory of a head, with `~` expanded; None if the name may be a Hub id."""
    folder = _directory(name, "head", EXPECTED_HEAD)
    if folder is None and "/" not in str(name):  # the Hub has no heads without an owner
        raise CheckpointFormatError(
            f"No head was found at {str(name)!r}: it is not a local directory, and a Hub id has the form owner/name."
        )
    return folder


def model_directory(name: str) -> Path | None:
    """Return the directory or GGUF file of a model, with `~` expanded; None if the name may be a Hub id."""
    if is_gguf(name):
        return _gguf_file(name)
    folder = _directory(name, "model", EXPECTED_MODEL)
    if folder is not None and not (folder / CONFIG_NAME).is_file():
        raise CheckpointFormatError(
            f"The model {name!r} cannot be loaded: the directory holds no config.json.", EXPECTED_MODEL
        )
    return folder


def is_gguf(source: str | Path) -> bool:
    """Whether a name is that of a GGUF file, by its suffix or, as Ollama's have none, by its first bytes."""
    path = os.path.expanduser(source)
    if str(source).lower().endswith(".gguf"):
        return not os.path.isdir(path)
    if not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        return file.read(4) == b"GGUF"


def _gguf_file(name: str) -> Path:
    path = checked_path(os.path.expanduser(name), CheckpointFormatError)
    if not path.is_file():
        raise CheckpointFormatError(f"The model {name!r} cannot be loaded: the file does not exist.", EXPECTED_MODEL)
    return path


def _directory(name: str | Path, what: str, expected: str) -> Path | None:
    path = existing_path(os.path.expanduser(name), f"The {what}", expected, CheckpointFormatError)
    if path is not None and not path.is_dir():
        raise CheckpointFormatError(f"The {what} {str(name)!r} is a file.", expected)
    return path


def is_connection_error(error: BaseException | None) -> bool:
    """Whether an error, or one that caused it, is that the Hub cannot be reached and a file is not in the cache."""
    while error is not None:
        if isinstance(error, hub_errors.LocalEntryNotFoundError | hub_errors.OfflineModeIsEnabled):
            return True
        error = error.__cause__ or error.__context__
    return False


# ----------------------------------------------------------------------------------------------- reading


def open_source(name: str | Path, subfolder: str, download: dict[str, Any]) -> Folder:
    """Return the files of a head or assistant in a subfolder of a local directory or Hub repository.

    `download` are arguments of `huggingface_hub.hf_hub_download`.
    """
    if not isinstance(name, str | Path):
        raise CheckpointFormatError(
            f"`repo_or_path` must be a local directory or a Hub id, got {type(name).__name__}.", EXPECTED_HEAD
        )
    folder = head_directory(name)
    return _Repository(str(name), subfolder, download) if folder is None else Folder(folder, subfolder)


class Folder:
    """A local directory; only regular files, and links to files inside it, are read."""

    def __init__(self, folder: Path, subfolder: str) -> None:
        self.name = str(folder)
        self._folder = checked_path(folder / subfolder, CheckpointFormatError) if subfolder else folder
        if not _is_inside(self._folder, folder):
            raise CheckpointFormatError(
                f"The subfolder {subfolder!r} is outside {folder}.", "Use the path of the subfolder instead."
            )

    def find(self, name: str) -> Path | None:
        """Return the path of a file, None if it does not exist; refuse pipes and links to other directories."""
        path = self._folder / name
        if not os.path.lexists(path):
            return None
        if not path.is_file():
            raise CheckpointFormatError(f"{path} is not a regular file.")
        if not _is_inside(path, self._folder):
            raise CheckpointFormatError(f"{path} is a link to a file outside its directory.", "Copy the file there.")
        return path

    @functools.cached_property
    def fields(self) -> Fields:
        """The fields of `config.json`; raises `CheckpointFormatError` if it does not exist or is broken."""
        config = self.find(CONFIG_NAME)
        if config is not None:
            return read_json(config, error=CheckpointFormatError)
        if not isinstance(self, _Repository) and was_interrupted(self._folder, CONFIG_NAME):
            raise CheckpointFormatError(
                f"Saving a head in {self.name} was interrupted: it may hold files of two heads.",
                "Save the head again.",
            )
        adapter = self.find(ADAPTER_NAME)
        if adapter is not None:
            is_uno = any(name.startswith("uno_") for name in read_json(adapter, error=CheckpointFormatError))
            kind = "a UNO drafter, which runs the whole target with an adapter to draft" if is_uno else "an adapter"
            raise CheckpointFormatError(
                f"{self.name} is {kind} ({ADAPTER_NAME}), not a head.", "Use a head of the target instead."
            )
        raise CheckpointFormatError(f"There is no {CONFIG_NAME} in {self.name!r}.", EXPECTED_HEAD)


def _is_inside(path: Path, folder: Path) -> bool:
    """Whether a path, with links resolved, is in a folder or, for a snapshot in the Hub's cache, among its blobs."""
    real, home = path.resolve(), folder.resolve()
    in_cache = real.parent.name == "blobs" and real.parent.parent in home.parents
    return real == home or home in real.parents or in_cache


class _Repository(Folder):
    """A repository on the Hub; all files are read from the same commit."""

    def __init__(self, repo_id: str, subfolder: str, download: dict[str, Any]) -> None:
        if subfolder.startswith("/") or ".." in Path(subfolder).parts:
            raise CheckpointFormatError(f"The subfolder {subfolder!r} is outside the repository {repo_id}.")
        self.name = repo_id
        self._download = {**download, "subfolder": subfolder or None}

    def find(self, name: str) -> Path | None:
        """Return the path of a file, downloaded if it is not cached; None if it does not exist.

        Offline, the result is also None for a file other than `config.json` that is not cached.
        """
        with translated(
            CheckpointFormatError,
            f"No head was found at {self.name!r}: no such directory, and {name} was not downloaded",
            "Use a directory with config.json and weights, or a Hub id; private repositories need a token.",
        ):
            try:
                path = Path(hf_hub_download(self.name, name, **self._download))
            except Exception as error:
                if isinstance(error, hub_errors.LocalEntryNotFoundError):
                    offline = isinstance(error.__cause__, hub_errors.OfflineModeIsEnabled)
                    if name != CONFIG_NAME and (offline or self._download.get("local_files_only")):
                        return None  # the cache cannot distinguish "not downloaded" from "does not exist"
                elif isinstance(error, hub_errors.EntryNotFoundError):
                    return None
                if not is_connection_error(error):
                    raise
                raise CheckpointFormatError(
                    f"No head was found at {self.name!r}: it is not a local directory, and the Hub cannot be reached.",
                    "Connect to the Hub, or give the directory of a downloaded head.",
                ) from error
        _check_hash(path)
        snapshot = path.parents[len(Path(self._download["subfolder"] or "").parts)]
        if snapshot.parent.name == "snapshots":
            self._download["revision"] = snapshot.name
        return path


def _check_hash(path: Path) -> None:
    """Compare a file in the Hub's cache with its hash on the Hub, which is the name of its blob."""
    blob = path.resolve()
    if blob.parent.name != "blobs":
        return
    if len(blob.name) == 64:  # a large file (LFS)
        actual = hashlib.sha256()
    elif len(blob.name) == 40:  # a file that is stored in git
        actual = hashlib.sha1(b"blob %d\0" % blob.stat().st_size, usedforsecurity=False)
    else:
        return
    with blob.open("rb") as file:
        while chunk := file.read(2**20):
            actual.update(chunk)
    if actual.hexdigest() != blob.name:
        raise CheckpointFormatError(
            f"{path} differs from the file on the Hub: its hash is {actual.hexdigest()}, expected {blob.name}.",
            f"Delete {blob} and load the head again.",
        )


def refuse_foreign_kernels(fields: Fields, where: str) -> None:
    """Raise if a model's config makes transformers download kernels from a repository that the user did not name."""
    for name, value in fields.items():
        if isinstance(value, dict):
            refuse_foreign_kernels(value, where)
        elif name.endswith(("attn_implementation", "experts_implementation")) and "/" in str(value):
            raise CheckpointFormatError(
                f"The config of {where} loads code from another repository: {name} is {value!r}.",
                "If you trust it, load the model yourself with attn_implementation=... and attach it.",
            )


# ----------------------------------------------------------------------------------------------- writing

HEAD_FILES = re.compile(
    r"config\.json|.+\.(safetensors|bin|pt)(\.index\.json)?|README\.md|[\w-]+\.png|custom_generate(/generate\.py)?"
)
"""Names of a head's files; a directory with any other file is never replaced."""

WRITTEN = re.compile(r"config\.json|model.*\.safetensors(\.index\.json)?|README\.md|training\.png|custom_generate")
"""Names of the files and directories that saving a trained head writes."""

CODE = "custom_generate"
"""Directory of a head with code for transformers' `custom_generate`."""


def check_new_head(folder: Path, *, replace: bool) -> None:
    """Refuse to overwrite a head (unless `replace` is true), or files that are not a head's."""
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


def overwritten(folder: Path) -> list[str]:
    """Return the names in a directory, sorted, that saving a trained head there could overwrite."""
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    return [name for name in names if WRITTEN.fullmatch(name)]
