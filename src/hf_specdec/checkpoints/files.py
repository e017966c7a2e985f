"""Read the files of an untrusted checkpoint: JSON, safetensors, and `torch.save` files.

No code of a checkpoint is run, only regular files are opened (no named pipes or device files), and memory use is
limited by the size of the files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hf_specdec.checkpoints.pickles import NotTensorsError, StoredTensor, TorchFile
from hf_specdec.errors import CheckpointFormatError, listed
from hf_specdec.records import MAX_OBJECT_BYTES, Fields, open_regular, read_object

MAX_INDEX_BYTES = 64 * 2**20
"""Maximum size in bytes of an index, which has one line per tensor."""

PICKLED = (".pt", ".bin")
"""Suffixes of files written by `torch.save`."""


def read_json(path: Path, max_bytes: int = MAX_OBJECT_BYTES) -> Fields:
    """Return the JSON object in a file.

    Raises:
        CheckpointFormatError: The file cannot be read, is too long, or does not hold a JSON object.
    """
    return read_object(path, max_bytes, CheckpointFormatError)


class _SafeTensors:
    """A safetensors file, opened once: replacing it between check and read has no effect."""

    def __init__(self, file: Path) -> None:
        open_regular(file, CheckpointFormatError).close()
        self._opened = safe_open(file, framework="pt")
        self.shapes = {name: tuple(self._opened.get_slice(name).get_shape()) for name in self._opened.keys()}  # noqa: SIM118

    def read(self, name: str) -> Tensor:
        """Return the values of a tensor."""
        tensor: Tensor = self._opened.get_tensor(name)
        return tensor


class _Pickled:
    """A `torch.save` file of tensors by name; the constructor raises `NotTensorsError` for any other content."""

    def __init__(self, file: Path) -> None:
        self._file = TorchFile(open_regular(file, CheckpointFormatError))
        content = self._file.content
        if not isinstance(content, dict) or not content:
            raise NotTensorsError(f"it holds a {type(content).__name__}, expected tensors by name")
        others = [name for name, value in content.items() if not isinstance(value, StoredTensor)]
        if others:
            raise NotTensorsError(f"it holds entries that are not tensors: {listed(others)}")
        self._tensors: dict[str, StoredTensor] = content
        self.shapes = {name: tensor.shape for name, tensor in content.items()}

    def read(self, name: str) -> Tensor:
        """Return the values of a tensor."""
        return self._file.read(self._tensors[name])


class TensorFiles:
    """The tensors of a checkpoint: the constructor reads names and shapes, `read` the values.

    Args:
        files: All files of the checkpoint, `.safetensors`, `.pt` or `.bin`.

    Raises:
        CheckpointFormatError: A file cannot be read, is broken or holds anything but tensors, or two files hold
            tensors of the same name.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = tuple(files)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._file_of: dict[str, Path] = {}
        self._opened: dict[Path, _SafeTensors | _Pickled] = {}
        for file in files:
            with _readable(file):
                self._opened[file] = _Pickled(file) if file.suffix in PICKLED else _SafeTensors(file)
            shapes = self._opened[file].shapes
            twice = sorted(shapes.keys() & self.shapes.keys())
            if twice:
                raise CheckpointFormatError(f"{file} holds tensors that are also in another file: {listed(twice)}.")
            self.shapes.update(shapes)
            self._file_of.update(dict.fromkeys(shapes, file))

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return the values of tensors by name.

        Raises:
            CheckpointFormatError: A file is broken.
        """
        return {name: self._read_one(name) for name in names}

    def _read_one(self, name: str) -> Tensor:
        file = self._file_of[name]
        with _readable(file):
            return self._opened[file].read(name)


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    """Convert the errors that readers raise for a broken file to `CheckpointFormatError`."""
    try:
        yield
    except NotTensorsError as error:
        raise CheckpointFormatError(
            f"{file} cannot be read as tensors: {error}.",
            "Pickles with anything but tensors are not read; ask the author for safetensors.",
        ) from error
    except (OSError, SafetensorError, RuntimeError, ValueError) as error:
        raise CheckpointFormatError(f"{file} cannot be read: {error}.") from error


def shard_names(index: Path) -> list[str]:
    """Return the distinct names of the weight files in an index (`*.index.json`), in its order.

    Raises:
        CheckpointFormatError: The index is invalid, or names a file in another directory or of another type.
    """
    mapping = read_json(index, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(mapping, dict) or not mapping:
        raise CheckpointFormatError(f"{index} has no weight_map.", "Expected file names by tensor name.")
    for name in mapping.values():
        plain = isinstance(name, str) and Path(name).name == name and "\\" not in name and "\0" not in name
        if not plain or Path(name).suffix not in (".safetensors", *PICKLED):
            raise CheckpointFormatError(f"{index} names {str(name)[:120]!r}; expected a weight file in its directory.")
    return list(dict.fromkeys(mapping.values()))


def read_frequent_tokens(file: Path) -> Tensor:
    """Read a `freq_*.pt` file of FR-Spec (https://github.com/thunlp/FR-Spec).

    Returns:
        `[n]` int64 target ids, most frequent first.

    Raises:
        CheckpointFormatError: The file cannot be read, or does not hold a list or vector of distinct token ids.
    """
    with _readable(file):
        opened = TorchFile(open_regular(file, CheckpointFormatError))
        content = opened.content
        if isinstance(content, StoredTensor) and len(content.shape) == 1:
            content = opened.read(content).tolist()
    if not isinstance(content, list) or not content or not all(type(token) is int and token >= 0 for token in content):
        raise CheckpointFormatError(f"{file} does not hold a list of token ids.")
    if len(set(content)) != len(content):
        raise CheckpointFormatError(f"{file} holds a token id twice.")
    return torch.tensor(content, device="cpu")
