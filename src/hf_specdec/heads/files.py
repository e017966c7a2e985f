"""A checkpoint's files, read without trusting them: configurations, safetensors, and pickles of tensors only.

Nothing here runs code of a checkpoint, follows a path out of its folder, or allocates more than the files hold.
Next: `heads/layouts.py` says what was found, `heads/formats.py` makes a head of it.
"""

from __future__ import annotations

import json
import math
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hf_specdec.errors import CheckpointFormatError

MAX_CONFIG_BYTES = 4 * 2**20
"""A configuration is a page of text."""

MAX_INDEX_BYTES = 64 * 2**20
"""An index has a line per tensor."""

PICKLED = (".pt", ".bin")

Fields = dict[str, Any]


def read_json(path: Path, max_bytes: int = MAX_CONFIG_BYTES) -> Fields:
    """A JSON object.

    Raises:
        CheckpointFormatError: No such file, too long, no JSON, or no object.
    """
    try:
        size = path.stat().st_size
        if size > max_bytes:
            raise CheckpointFormatError(f"{path} has {size} bytes, expected at most {max_bytes}.")
        fields: Any = json.loads(path.read_bytes(), parse_constant=_finite, parse_float=_finite)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointFormatError(f"{path} cannot be read: {error}.", "Expected a JSON object.") from error
    if not isinstance(fields, dict):
        raise CheckpointFormatError(f"{path} holds a {type(fields).__name__}, expected a JSON object.")
    return fields


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:40]} is no finite number")
    return number


class TensorFiles:
    """The tensors of a checkpoint: names and shapes at once, values when they are asked for.

    Args:
        files: All files of the checkpoint, `.safetensors`, `.pt` or `.bin`.

    Raises:
        CheckpointFormatError: A file that is broken, holds anything but tensors, or a tensor that another file has.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = tuple(files)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._file_of: dict[str, Path] = {}
        self._unpickled: dict[Path, dict[str, Tensor]] = {}
        for file in files:
            if file.suffix in PICKLED:
                self._unpickled[file] = _unpickle(file)
                shapes = {name: tuple(tensor.shape) for name, tensor in self._unpickled[file].items()}
            else:
                shapes = _header(file)
            twice = sorted(shapes.keys() & self.shapes.keys())
            if twice:
                raise CheckpointFormatError(f"{file} holds tensors that another file has as well: {listed(twice)}.")
            self.shapes.update(shapes)
            self._file_of.update(dict.fromkeys(shapes, file))

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """These tensors.

        Raises:
            CheckpointFormatError: A broken file.
        """
        return {name: self._read_one(name) for name in names}

    def _read_one(self, name: str) -> Tensor:
        file = self._file_of[name]
        if file in self._unpickled:
            return self._unpickled[file][name]
        try:
            with safe_open(file, framework="pt") as opened:
                tensor: Tensor = opened.get_tensor(name)
                return tensor
        except (OSError, SafetensorError, RuntimeError, ValueError) as error:
            raise CheckpointFormatError(f"{file}: {name} cannot be read: {error}.") from error


def shard_names(index: Path) -> list[str]:
    """The files that an index names, each of them beside it.

    Raises:
        CheckpointFormatError: No index, or a name that is not a plain file name.
    """
    mapping = read_json(index, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(mapping, dict) or not mapping:
        raise CheckpointFormatError(f"{index} has no weight_map.", "Expected tensor names and the files they are in.")
    for name in mapping.values():
        plain = isinstance(name, str) and Path(name).name == name and "\\" not in name and "\0" not in name
        if not plain or Path(name).suffix not in (".safetensors", *PICKLED):
            raise CheckpointFormatError(f"{index} names {str(name)[:120]!r} as a file; expected one beside it.")
    return list(dict.fromkeys(mapping.values()))


def listed(names: Sequence[str], at_most: int = 8) -> str:
    """Names for an error message, cut short.

    Example: `listed(["a", "b", "c"], 2)` is "a, b and 1 more".
    """
    shown = ", ".join(name[:120] for name in names[:at_most])
    return shown if len(names) <= at_most else f"{shown} and {len(names) - at_most} more"


def _header(file: Path) -> dict[str, tuple[int, ...]]:
    try:
        with safe_open(file, framework="pt") as opened:
            return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, RuntimeError, ValueError) as error:
        raise CheckpointFormatError(f"{file} cannot be read: {error}.") from error


def _unpickle(file: Path) -> dict[str, Tensor]:
    """The tensors of a file that torch wrote; the unpickler knows tensors and containers, and calls nothing else."""
    content = _load_tensors_only(file)
    if not isinstance(content, dict) or not content:
        raise CheckpointFormatError(f"{file} holds a {type(content).__name__}, expected tensors by name.")
    for name, tensor in content.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise CheckpointFormatError(f"{file} holds {type(tensor).__name__} at {name!r}, expected tensors by name.")
        plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
        # a stride of 0 repeats one value: such a tensor is larger than its file
        if not plain or tensor.is_meta or tensor.is_quantized or not tensor.is_contiguous():
            raise CheckpointFormatError(f"{file}: {name} is not a plain tensor.")
    return {name: tensor.detach() for name, tensor in content.items()}


def _load_tensors_only(file: Path) -> Any:
    try:
        zipped = zipfile.is_zipfile(file)
        if zipped:
            with zipfile.ZipFile(file) as archive:
                if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                    raise ValueError("its parts are compressed, which torch never does")
        return torch.load(file, map_location="cpu", weights_only=True, mmap=zipped)
    except Exception as error:  # what a broken pickle makes the unpickler raise is anything
        raise CheckpointFormatError(
            f"{file} cannot be read as tensors alone: {str(error)[:300]}.",
            "Pickles that hold anything else are not read; ask its author for safetensors.",
        ) from error


def read_frequent_tokens(file: Path) -> Tensor:
    """FR-Spec's list of frequent tokens, `freq_*.pt`: target ids, most frequent first.

    Source: https://github.com/thunlp/FR-Spec.

    Returns:
        `[n]` int64.

    Raises:
        CheckpointFormatError: Not a list of token ids.
    """
    content = _load_tensors_only(file)
    if isinstance(content, Tensor) and content.dim() == 1 and not content.is_floating_point():
        content = content.tolist()
    if not isinstance(content, list) or not content or not all(type(token) is int and token >= 0 for token in content):
        raise CheckpointFormatError(f"{file} holds no list of token ids.")
    if len(set(content)) != len(content):
        raise CheckpointFormatError(f"{file} lists a token id twice.")
    return torch.tensor(content)
