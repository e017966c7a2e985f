"""Load heads from a directory or the Hub, in any layout of `checkpoints/layouts.py`.

Importing this module registers our heads with transformers' `AutoConfig` and `AutoModel`.
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

from hf_specdec.atomic import was_interrupted
from hf_specdec.checkpoints.adapters import ADAPTER_CONFIG_NAME, ADAPTER_WEIGHTS_NAME, AdapterFiles
from hf_specdec.checkpoints.files import TensorFiles, read_frequent_tokens, read_json, shard_names
from hf_specdec.checkpoints.formats import HEADS, Head, read_head
from hf_specdec.checkpoints.layouts import lookup
from hf_specdec.checkpoints.sources import EXPECTED_HEAD, head_directory, is_connection_error
from hf_specdec.checkpoints.target_config import first_sentence
from hf_specdec.errors import CheckpointFormatError, sentence
from hf_specdec.records import Fields, path_of
from hf_specdec.verification.memory import persistent_tensors

CONFIG_NAME = "config.json"
QUANTISATION_NAME = "hf_quant_config.json"
INDEX_SUFFIX = ".index.json"

MEDUSA_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
"""Weights of Medusa heads that are stored without their target."""

WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""Weight files in order of preference; pickles last."""

for _config_class, _head_class in HEADS.items():
    AutoConfig.register(_config_class.model_type, _config_class, exist_ok=True)
    AutoModel.register(_config_class, _head_class, exist_ok=True)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The config and the opened weight files of a head."""

    where: str
    fields: Fields
    files: TensorFiles
    adapter: AdapterFiles | None = None  # the target's, which the head needs; None if there is none


@persistent_tensors()
def load_head(
    repo_or_path: str | Path, *, revision: str | None = None, token: str | bool | None = None, subfolder: str = "",
    cache_dir: str | Path | None = None, force_download: bool = False, local_files_only: bool = False,
    dtype: torch.dtype | None = None, device: torch.device | str | None = None,
    hot_tokens: Tensor | str | Path | None = None,
) -> Head:  # fmt: skip
    """Load a head from files in any published layout: EAGLE, Medusa, DFlash, MTP, speculators, SpecForge, ...

    The layout is recognised by configuration and tensor names.

    Args:
        repo_or_path: A local directory or a Hub id.
        revision: Branch, tag or commit on the Hub.
        token: Hub token; None for the stored one.
        subfolder: Subfolder of the directory or repository.
        cache_dir, force_download, local_files_only: As in transformers.
        dtype: Dtype of the weights; None for the stored one.
        device: Device of the weights; None for the CPU.
        hot_tokens: Restrict drafts to these target ids `[n]`, or to an FR-Spec list (path of a `freq_*.pt`); only for
            heads that share the target's lm_head.

    Returns:
        The head, in eval mode; `head.layout` names the layout that was found.

    Raises:
        CheckpointFormatError: The head does not exist, has an unknown or unsupported layout, or a file is broken.
        HeadTensorsError: Tensors are missing, unknown, or have wrong shapes.
        InvalidConfigError: The hot tokens are invalid, or the head does not support them.

    Example:
        ```python
        head = load_head("org/head", dtype=torch.bfloat16)
        model.load_drafter(head)
        ```
    """
    checkpoint = open_checkpoint(
        repo_or_path, subfolder=subfolder, revision=revision, token=token, cache_dir=cache_dir,
        force_download=force_download, local_files_only=local_files_only,
    )  # fmt: skip
    head = read_head(checkpoint.fields, checkpoint.files, checkpoint.where)
    head.name_or_path, head.adapter = checkpoint.where, checkpoint.adapter
    if hot_tokens is not None:
        ids = hot_tokens if isinstance(hot_tokens, Tensor) else read_frequent_tokens(Path(hot_tokens))
        head.use_hot_tokens(ids)
    head.to(device=device, dtype=dtype)
    return head


def open_checkpoint(repo_or_path: str | Path, *, subfolder: str = "", **download: Any) -> Checkpoint:
    """Find the files of a head, and read everything but the values of the weights.

    Args:
        repo_or_path: A local directory or a Hub id.
        subfolder: Subfolder of the directory or repository.
        **download: Arguments of `huggingface_hub.hf_hub_download`.

    Raises:
        CheckpointFormatError: A repository, directory or file does not exist or is broken, the head is quantised, or
            saving it was interrupted.
    """
    source = _source(repo_or_path, subfolder, download)
    fields = source.fields()
    quantised = source.find(QUANTISATION_NAME)
    if quantised is not None and lookup(read_json(quantised), "quantization.quant_algo|quant_algo"):
        raise CheckpointFormatError(
            f"{source.name} is a quantised head ({QUANTISATION_NAME}), which is not supported.",
            "Use the original weights.",
        )
    names = (*MEDUSA_FILES, *WEIGHT_FILES) if any(key.startswith("medusa") for key in fields) else WEIGHT_FILES
    for name in names:
        found = source.find(name)
        if found is None:
            continue
        shards = [found]
        if name.endswith(INDEX_SUFFIX):
            shards = [source.need(shard, found) for shard in shard_names(found)]
        return Checkpoint(source.name, fields, TensorFiles(shards), _adapter_in(source))
    raise CheckpointFormatError(f"There are no weights in {source.name}; looked for {', '.join(names)}.")


def read_config(repo_or_path: str | Path, *, subfolder: str = "", **download: Any) -> Fields:
    """Return the fields of a `config.json`; no other file is opened or downloaded.

    Args:
        repo_or_path: A local directory or a Hub id.
        subfolder: Subfolder of the directory or repository.
        **download: Arguments of `huggingface_hub.hf_hub_download`.

    Raises:
        CheckpointFormatError: The repository, directory or file does not exist or is broken, or a path is a file.
    """
    return _source(repo_or_path, subfolder, download).fields()


def _source(repo_or_path: str | Path, subfolder: str, download: dict[str, Any]) -> _Folder:
    if not isinstance(repo_or_path, str | Path):
        raise CheckpointFormatError(
            f"`repo_or_path` must be a local directory or a Hub id, got {type(repo_or_path).__name__}.", EXPECTED_HEAD
        )
    folder = head_directory(repo_or_path)
    return _Repository(str(repo_or_path), subfolder, download) if folder is None else _Folder(folder, subfolder)


def _adapter_in(source: _Folder) -> AdapterFiles | None:
    """Return the target's adapter beside a head; None if there is none.

    Raises:
        CheckpointFormatError: There is an adapter's config, but no weights.
    """
    config = source.find(ADAPTER_CONFIG_NAME)
    if config is None:
        return None
    weights = source.find(ADAPTER_WEIGHTS_NAME)
    if weights is None:
        raise CheckpointFormatError(
            f"{source.name} holds an {ADAPTER_CONFIG_NAME}, so the head belongs to an adapted target, but there is no "
            f"{ADAPTER_WEIGHTS_NAME}.",
            "Download or save the adapter's weights next to it.",
        )
    return AdapterFiles(source.name, weights)


class _Folder:
    """A local directory; only regular files, and links to files inside it, are read."""

    def __init__(self, folder: Path, subfolder: str) -> None:
        self.name, self._folder = str(folder), path_of(folder / subfolder, CheckpointFormatError)
        if not _is_inside(self._folder, folder):
            raise CheckpointFormatError(
                f"The subfolder {subfolder!r} is outside {folder}.", "Use the path of the subfolder instead."
            )

    def find(self, name: str) -> Path | None:
        """Return the path of a file; None if it does not exist.

        Raises:
            CheckpointFormatError: It is not a regular file, or a link to another directory.
        """
        path = self._folder / name
        if not os.path.lexists(path):
            return None
        if not path.is_file():
            raise CheckpointFormatError(f"{path} is not a regular file.")
        if not _is_inside(path, self._folder):
            raise CheckpointFormatError(f"{path} is a link to a file outside its directory.", "Copy the file there.")
        return path

    def fields(self) -> Fields:
        """Return the fields of `config.json`; raise `CheckpointFormatError` if it does not exist or is broken."""
        config = self.find(CONFIG_NAME)
        if config is not None:
            return read_json(config)
        if self._was_interrupted:
            raise CheckpointFormatError(
                f"Saving a head in {self._folder} was interrupted: it may hold files of two heads.",
                "Save the head again.",
            )
        raise CheckpointFormatError(
            f"There is no {CONFIG_NAME} in {self.name!r}.",
            EXPECTED_HEAD,
        )

    @property
    def _was_interrupted(self) -> bool:
        return was_interrupted(self._folder, CONFIG_NAME)

    def need(self, name: str, index: Path) -> Path:
        """Return the path of a file in an index; raise `CheckpointFormatError` if it does not exist."""
        found = self.find(name)
        if found is None:
            raise CheckpointFormatError(f"{index} names {name}, which does not exist.")
        return found


def _is_inside(path: Path, folder: Path) -> bool:
    """Whether a path, with links resolved, is in a folder or, for a snapshot in the Hub's cache, among its blobs."""
    real, home = path.resolve(), folder.resolve()
    in_cache = real.parent.name == "blobs" and real.parent.parent in home.parents
    return real == home or home in real.parents or in_cache


class _Repository(_Folder):
    """A repository on the Hub; all files are read from the same commit."""

    def __init__(self, repo_id: str, subfolder: str, download: dict[str, Any]) -> None:
        if subfolder.startswith("/") or ".." in Path(subfolder).parts:
            raise CheckpointFormatError(f"The subfolder {subfolder!r} is outside the repository {repo_id}.")
        self.name = repo_id
        self._download = {**download, "subfolder": subfolder or None}

    def find(self, name: str) -> Path | None:
        """Return the path of a file, downloaded if it is not cached; None if it does not exist.

        Offline, the result is also None for a file other than `config.json` that is not cached.

        Raises:
            CheckpointFormatError: There is no such repository or revision, no access or connection, or the file has
                another hash than on the Hub.
        """
        try:
            path = Path(hf_hub_download(self.name, name, **self._download))
        except hub_errors.LocalEntryNotFoundError as error:
            offline = isinstance(error.__cause__, hub_errors.OfflineModeIsEnabled)
            if name != CONFIG_NAME and (offline or self._download.get("local_files_only")):
                return None  # the cache cannot distinguish "not downloaded" from "does not exist"
            raise self._refusal(name, error) from error
        except hub_errors.EntryNotFoundError:
            return None
        except Exception as error:  # huggingface_hub's errors, or its HTTP library's, which depend on the version
            raise self._refusal(name, error) from error
        _check_hash(path)
        snapshot = path.parents[len(Path(self._download["subfolder"] or "").parts)]
        if snapshot.parent.name == "snapshots":
            self._download["revision"] = snapshot.name
        return path

    @property
    def _was_interrupted(self) -> bool:
        return False

    def _refusal(self, name: str, error: Exception) -> CheckpointFormatError:
        if is_connection_error(error):
            return CheckpointFormatError(
                f"No head was found at {self.name!r}: it is not a local directory, and the Hub cannot be reached.",
                "Connect to the Hub, or give the directory of a downloaded head.",
            )
        reason = sentence(first_sentence(error)[:300])
        return CheckpointFormatError(
            f"No head was found at {self.name!r}: no such directory, and {name} was not downloaded: {reason}",
            "Use a directory with config.json and weights, or a Hub id; private repositories need a token.",
        )


def _check_hash(path: Path) -> None:
    """Compare a file in the Hub's cache with its hash on the Hub, which is the name of its blob.

    Raises:
        CheckpointFormatError: The hashes differ.
    """
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
            f"{path} differs from the file on the Hub: its hash is {actual.hexdigest()}, expected {blob.name}.",
            f"Delete {blob} and load the head again.",
        )


SHA256_DIGITS, GIT_DIGITS = 64, 40
"""Hexadecimal digits of the hash of a large (LFS) file, and of a file that is stored in git."""

CHUNK = 2**20
"""Bytes read at once for hashing."""
