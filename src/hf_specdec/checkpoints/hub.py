"""Load a head from a directory or the Hub, whole or not at all; and let transformers' Auto classes know our own.

Which layout it is in is not asked: `checkpoints/layouts.py` finds out.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import errors as hub_errors
from huggingface_hub import hf_hub_download
from torch import Tensor
from transformers import AutoConfig, AutoModel

from hf_specdec.atomic import is_broken_off
from hf_specdec.checkpoints.files import TensorFiles, read_frequent_tokens, read_json, shard_names
from hf_specdec.checkpoints.formats import HEADS, Head, read_head
from hf_specdec.errors import CheckpointFormatError
from hf_specdec.records import Fields
from hf_specdec.verification.memory import persistent_tensors

CONFIG_NAME = "config.json"
INDEX_SUFFIX = ".index.json"

MEDUSA_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
"""What the configuration of Medusa heads without a model has beside it."""

WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""Tried in this order; pickles last."""

for _config_class, _head_class in HEADS.items():  # what AutoConfig and AutoModel are for; it changes nothing else
    AutoConfig.register(_config_class.model_type, _config_class, exist_ok=True)
    AutoModel.register(_config_class, _head_class, exist_ok=True)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A head's files, found and opened."""

    where: str
    fields: Fields
    files: TensorFiles


@persistent_tensors()
def load_head(
    repo_or_path: str | Path, *, revision: str | None = None, token: str | bool | None = None, subfolder: str = "",
    cache_dir: str | Path | None = None, force_download: bool = False, local_files_only: bool = False,
    dtype: torch.dtype | None = None, device: torch.device | str | None = None,
    hot_tokens: Tensor | str | Path | None = None,
) -> Head:  # fmt: skip
    """Read a head in any layout of `checkpoints/layouts.py`; `head.layout` names the one it was.

    Args:
        repo_or_path: A local directory or a Hub id.
        revision: Branch, tag or commit on the Hub.
        token: Hub token; None uses the stored one.
        subfolder: Of the directory or the repository.
        cache_dir, force_download, local_files_only: As everywhere in transformers.
        dtype: To convert the weights to; None leaves them as they are stored.
        device: To put them on; None is the CPU.
        hot_tokens: Draft over these target ids only: ids `[n]`, or an FR-Spec list, `freq_*.pt`. For heads that share
            the target's lm_head.

    Raises:
        CheckpointFormatError: No such repository or directory, no known layout, a broken file.
        HeadTensorsError: Tensors that are missing, unknown or of another shape.
        InvalidConfigError: Hot tokens that the head cannot take.
    """
    checkpoint = open_checkpoint(
        repo_or_path, subfolder=subfolder, revision=revision, token=token, cache_dir=cache_dir,
        force_download=force_download, local_files_only=local_files_only,
    )  # fmt: skip
    head = read_head(checkpoint.fields, checkpoint.files, checkpoint.where)
    head.name_or_path = checkpoint.where
    if hot_tokens is not None:
        ids = hot_tokens if isinstance(hot_tokens, Tensor) else read_frequent_tokens(Path(hot_tokens))
        head.use_hot_tokens(ids)
    head.to(device=device, dtype=dtype)
    return head


def open_checkpoint(repo_or_path: str | Path, *, subfolder: str = "", **download: Any) -> Checkpoint:
    """Find a head's configuration and weights, and read everything but the weights' values.

    Args:
        repo_or_path: A local directory or a Hub id.
        subfolder: Of either.
        **download: Arguments of `huggingface_hub.hf_hub_download`.

    Raises:
        CheckpointFormatError: No such repository, directory or file, or a broken one.
    """
    folder = Path(repo_or_path)
    source = _Folder(folder, subfolder) if folder.is_dir() else _Repository(str(repo_or_path), subfolder, download)
    config = source.find(CONFIG_NAME)
    if config is None and folder.is_dir() and is_broken_off(folder / subfolder, CONFIG_NAME):
        raise CheckpointFormatError(
            f"A save into {folder / subfolder} was broken off: files of two heads may be there.",
            "Save the head there again.",
        )
    if config is None:
        raise CheckpointFormatError(
            f"There is no {CONFIG_NAME} in {source.name}; a head needs one.",
            "Give a directory with config.json and weights, or a Hub id.",
        )
    fields = read_json(config)
    names = (*MEDUSA_FILES, *WEIGHT_FILES) if any(key.startswith("medusa") for key in fields) else WEIGHT_FILES
    for name in names:
        found = source.find(name)
        if found is None:
            continue
        shards = [found]
        if name.endswith(INDEX_SUFFIX):
            shards = [source.need(shard, found) for shard in shard_names(found)]
        return Checkpoint(source.name, fields, TensorFiles(shards))
    raise CheckpointFormatError(f"There are no weights in {source.name}; looked for {', '.join(names)}.")


class _Folder:
    """A local directory: regular files inside it, and nothing that a link leads to elsewhere."""

    def __init__(self, folder: Path, subfolder: str) -> None:
        self.name, self._folder = str(folder), folder / subfolder
        if not _is_inside(self._folder, folder):
            raise CheckpointFormatError(f"The subfolder {subfolder!r} leads out of {folder}.", "Give that directory.")

    def find(self, name: str) -> Path | None:
        """A file of it, where it is there.

        Raises:
            CheckpointFormatError: It is a pipe, a device, a directory, or a link to somewhere else.
        """
        path = self._folder / name
        if not os.path.lexists(path):
            return None
        if not path.is_file():
            raise CheckpointFormatError(f"{path} is not a regular file.", "Expected a file of data.")
        if not _is_inside(path, self._folder):
            raise CheckpointFormatError(f"{path} is a link that leads out of its directory.", "Copy the file there.")
        return path

    def need(self, name: str, index: Path) -> Path:
        """A file that an index names."""
        found = self.find(name)
        if found is None:
            raise CheckpointFormatError(f"{index} names {name}, which is not there.")
        return found


def _is_inside(path: Path, folder: Path) -> bool:
    """Whether a path ends up in a folder; the Hub's cache links from its snapshots to its own blobs, which is fine."""
    real, home = path.resolve(), folder.resolve()
    in_cache = real.parent.name == "blobs" and real.parent.parent in home.parents
    return real == home or home in real.parents or in_cache


class _Repository(_Folder):
    """A repository of the Hub; what is taken from it is of one commit."""

    def __init__(self, repo_id: str, subfolder: str, download: dict[str, Any]) -> None:
        if subfolder.startswith("/") or ".." in Path(subfolder).parts:
            raise CheckpointFormatError(f"The subfolder {subfolder!r} leads out of the repository {repo_id}.")
        self.name = repo_id
        self._download = {**download, "subfolder": subfolder or None}

    def find(self, name: str) -> Path | None:
        """Download a file, or take it from the cache.

        Raises:
            CheckpointFormatError: No such repository or revision, no access, no connection, or damage on the way.
        """
        try:
            path = Path(hf_hub_download(self.name, name, **self._download))
        except hub_errors.LocalEntryNotFoundError as error:
            offline = isinstance(error.__cause__, hub_errors.OfflineModeIsEnabled)
            if name != CONFIG_NAME and (offline or self._download.get("local_files_only")):
                return None  # the cache does not tell "not downloaded" from "not there"
            raise self._refusal(name, error) from error
        except hub_errors.EntryNotFoundError:
            return None
        except Exception as error:  # the client's own classes, and those of an HTTP library that it has changed
            raise self._refusal(name, error) from error
        _check_hash(path)
        snapshot = path.parents[len(Path(self._download["subfolder"] or "").parts)]
        if snapshot.parent.name == "snapshots":
            self._download["revision"] = snapshot.name
        return path

    def _refusal(self, name: str, error: Exception) -> CheckpointFormatError:
        return CheckpointFormatError(
            f"There is no head at {self.name!r}: it is not a local directory, and the Hub says of {name}: "
            f"{' '.join(str(error).split())[:300]}",
            "Give a directory with config.json and weights, or a Hub id; private ones need a token.",
        )


def _check_hash(path: Path) -> None:
    """Compare a file of the cache with the hash that the Hub gave for it, which is the name of its blob."""
    blob = path.resolve()
    if blob.parent.name != "blobs":
        return
    size = blob.stat().st_size
    if len(blob.name) == SHA256_DIGITS:
        actual = hashlib.sha256()
    elif len(blob.name) == GIT_DIGITS:
        actual = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    else:
        return
    with blob.open("rb") as file:
        while chunk := file.read(CHUNK):
            actual.update(chunk)
    if actual.hexdigest() != blob.name:
        raise CheckpointFormatError(
            f"{path} is not what the Hub says it is: its hash is {actual.hexdigest()}, expected {blob.name}.",
            f"Delete {blob} and load it again.",
        )


SHA256_DIGITS, GIT_DIGITS = 64, 40
"""Of a large file, and of one that git stores itself."""

CHUNK = 2**20
