"""Read the tensors of an untrusted checkpoint: safetensors, and files of `torch.save` as data.

No code of a checkpoint is run, only regular files are opened (no named pipes or device files), each once (replacing it
between check and read has no effect), and memory use is limited by the size of the files.

`torch.load(weights_only=True)`, which huggingface_hub's `load_torch_model` and `load_state_dict_from_file` call, is
not safe enough for untrusted files. It expands compressed archives (torch 2.13: 195 KB become 200 MB), allocates what
a pickle requests (`bytearray(2 * 10**9)` takes 2 GB), accepts any number of tensors in one storage, and cannot read
pickle protocol 4. Its mmap opens the path a second time, when the file may have been replaced. Before torch 2.10 a
file could corrupt memory (CVE-2026-24747).
"""

from __future__ import annotations

import io
import math
import pickle
import re
import struct
import weakref
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, ClassVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.serialization import MAGIC_NUMBER, PROTOCOL_VERSION

from hf_specdec.errors import CheckpointFormatError, listed
from hf_specdec.records import open_regular, read_json

MAX_INDEX_BYTES = 64 * 2**20
"""Maximum size in bytes of an index, which has one line per tensor."""

PICKLED = (".pt", ".bin")
"""Suffixes of files written by `torch.save`."""


def _opened(file: Path) -> tuple[dict[str, tuple[int, ...]], Callable[[str], Tensor]]:
    """Open a file; return the shapes of its tensors by name, and a function that reads the values of one."""
    if file.suffix not in PICKLED:
        open_regular(file, CheckpointFormatError).close()
        safe = safe_open(file, framework="pt")
        return {name: tuple(safe.get_slice(name).get_shape()) for name in safe.keys()}, safe.get_tensor  # noqa: SIM118
    pickled = TorchFile(open_regular(file, CheckpointFormatError))
    content = pickled.content
    if not isinstance(content, dict) or not content:
        raise NotTensorsError(f"it holds a {type(content).__name__}, expected tensors by name")
    others = [name for name, value in content.items() if not isinstance(value, StoredTensor)]
    if others:
        raise NotTensorsError(f"it holds entries that are not tensors: {listed(others)}")
    return {name: tensor.shape for name, tensor in content.items()}, lambda name: pickled.read(content[name])


class TensorFiles:
    """The tensors in all `.safetensors`, `.pt` or `.bin` files of a checkpoint.

    The constructor reads names and shapes, `read` the values.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = tuple(files)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._reader_of: dict[str, tuple[Path, Callable[[str], Tensor]]] = {}
        for file in files:
            with _readable(file):
                shapes, read = _opened(file)
            twice = sorted(shapes.keys() & self.shapes.keys())
            if twice:
                raise CheckpointFormatError(f"{file} holds tensors that are also in another file: {listed(twice)}.")
            self.shapes.update(shapes)
            self._reader_of.update(dict.fromkeys(shapes, (file, read)))

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return the values of tensors by name."""
        found = {}
        for name in names:
            file, read = self._reader_of[name]
            with _readable(file):
                found[name] = read(name)
        return found


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

    Refuses files in other directories and of other types.
    """
    mapping = read_json(index, MAX_INDEX_BYTES, CheckpointFormatError).get("weight_map")
    if not isinstance(mapping, dict) or not mapping:
        raise CheckpointFormatError(f"{index} has no weight_map.", "Expected file names by tensor name.")
    for name in mapping.values():
        plain = isinstance(name, str) and Path(name).name == name and "\\" not in name and "\0" not in name
        if not plain or Path(name).suffix not in (".safetensors", *PICKLED):
            raise CheckpointFormatError(f"{index} names {str(name)[:120]!r}; expected a weight file in its directory.")
    return list(dict.fromkeys(mapping.values()))


def read_frequent_tokens(file: Path) -> Tensor:
    """Return the target ids `[n]`, most frequent first, in a `freq_*.pt` file of FR-Spec.

    Source: https://github.com/thunlp/FR-Spec
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


# ----------------------------------------------------------------------------------------------- torch.save

MAX_PICKLE_BYTES = 2**21
"""Maximum size of a pickle (about 100 bytes per tensor, 5 per token id); parsing takes up to 3 s and 200 MB."""

MAX_SHARING = 4
"""Maximum size of all tensors, as a multiple of the file size; tied blocks of a head share a storage."""

MAX_DIMENSIONS, MAX_INTEGER = 8, 2**63


class NotTensorsError(ValueError):
    """Raised for a file that is broken or holds anything but tensors, lists and numbers."""


@dataclass(frozen=True, slots=True)
class Storage:
    """A block of values in the file."""

    key: str
    dtype: torch.dtype
    numel: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A contiguous tensor whose values have not been read yet."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]


class TorchFile:
    """The content of a `torch.save` file, with `StoredTensor` objects instead of tensors.

    Both formats are read, the archive and the one before torch 1.6, through the one open file: replacing the file on
    disk between check and read has no effect. It is closed when this object is deleted.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        weakref.finalize(self, file.close)
        self._file_size = file.seek(0, io.SEEK_END)
        self._declared: dict[str, Storage] = {}  # by the pickle
        self._stored_bytes: dict[str, int] = {}  # in the file, by storage key
        self._read_storage: Callable[[str], bytes]
        self._values: dict[str, Tensor] = {}
        with _faults_as_errors():
            self.content = self._open_archive() if _read_at(file, 0, 4) == b"PK\x03\x04" else self._open_legacy()
            self._check_sizes()

    def read(self, tensor: StoredTensor) -> Tensor:
        """Return the values of a tensor, as a view of its storage; raise `NotTensorsError` if it cannot be read."""
        key, dtype, end = tensor.storage.key, tensor.storage.dtype, tensor.offset + math.prod(tensor.shape)
        with _faults_as_errors():
            if key not in self._values:
                data, empty = bytearray(self._read_storage(key)), torch.empty(0, dtype=dtype, device="cpu")
                self._values[key] = torch.frombuffer(data, dtype=dtype) if data else empty
            return self._values[key][tensor.offset : end].view(tensor.shape)

    def _open_archive(self) -> Any:
        """Read the pickle of an archive; `zipfile` compares local headers with the directory and checks CRCs.

        Raises:
            NotTensorsError: Two entries have the same name (a scanner may have checked the other one), an entry is
                compressed (zip bomb), the entries overlap (each is read in full) or exceed the file, there is not
                exactly one pickle, it is too long, or the byte order is not little-endian.
        """
        archive = zipfile.ZipFile(self._file)
        sizes = {entry.filename: entry.file_size for entry in archive.infolist()}
        if len(sizes) != len(archive.infolist()):
            raise NotTensorsError("two of its entries have the same name")
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
            raise NotTensorsError("it is compressed, which torch.save never does")
        if sum(sizes.values()) > self._file_size:
            raise NotTensorsError("its entries overlap or exceed the file")
        pickles = [name for name in sizes if re.fullmatch(r"[^/]+/data\.pkl", name)]
        if len(pickles) != 1 or sizes[pickles[0]] > MAX_PICKLE_BYTES:
            raise NotTensorsError(f"expected one data.pkl of at most {MAX_PICKLE_BYTES} bytes")
        root = pickles[0].removesuffix("data.pkl")
        if f"{root}byteorder" in sizes and archive.read(f"{root}byteorder") != b"little":
            raise NotTensorsError("its byte order is not little-endian")
        self._read_storage = lambda key: archive.read(f"{root}data/{key}")
        self._stored_bytes = {name.removeprefix(f"{root}data/"): size for name, size in sizes.items()}
        return _Unpickler(io.BytesIO(archive.read(pickles[0])), self._declared).load()

    def _open_legacy(self) -> Any:
        """Read the format before torch 1.6: five pickles, then each storage, preceded by its number of values."""
        stream = io.BytesIO(_read_at(self._file, 0, MAX_PICKLE_BYTES))
        magic, version, system, content, keys = (_Unpickler(stream, self._declared).load() for _ in range(5))
        if magic != MAGIC_NUMBER or version != PROTOCOL_VERSION or system["little_endian"] is not True:
            raise NotTensorsError("it was not written by torch.save on a little-endian machine")
        file, end, places = self._file, stream.tell(), {}
        for key in keys:
            (numel,) = struct.unpack("<q", _read_at(file, end, 8))
            if type(key) is not str or numel != self._declared[key].numel:  # a negative number would make them overlap
                raise NotTensorsError("its storages differ from those that its pickle declares")
            size = self._stored_bytes[key] = numel * self._declared[key].dtype.itemsize
            places[key] = (end + 8, size)
            end += 8 + size
        if end > self._file_size:
            raise NotTensorsError("it ends before its tensors do")
        self._read_storage = lambda key: _read_at(file, *places[key])
        return content

    def _check_sizes(self) -> None:
        """Refuse storages of another size than declared (out-of-bounds reads), and tensors beyond `MAX_SHARING`."""
        for key, storage in self._declared.items():
            if self._stored_bytes.get(key) != storage.numel * storage.dtype.itemsize:
                raise NotTensorsError(f"it does not hold the {storage.numel} values of storage {key!r}")
        values = self.content.values() if isinstance(self.content, dict) else ()
        tensors = [value for value in values if isinstance(value, StoredTensor)]
        total = sum(math.prod(tensor.shape) * tensor.storage.dtype.itemsize for tensor in tensors)
        if total > MAX_SHARING * self._file_size:
            raise NotTensorsError(f"its tensors have {total} bytes, more than {MAX_SHARING} times its own size")


def _read_at(file: IO[bytes], offset: int, size: int) -> bytes:
    file.seek(offset)
    return file.read(size)


@contextmanager
def _faults_as_errors() -> Iterator[None]:
    """Convert every exception, such as those of `zipfile`, `pickle` and torch, to `NotTensorsError`."""
    try:
        yield
    except NotTensorsError:
        raise
    except Exception as error:  # BadZipFile, EOFError, struct.error, IndexError, RecursionError, ...
        raise NotTensorsError(f"it is broken ({type(error).__name__}: {str(error)[:200]})") from error


class _Names(dict[str, Any]):
    """A dictionary with text keys only: hashing a deeply nested tuple would overflow the C stack."""

    def __setitem__(self, key: str, value: Any) -> None:
        if type(key) is not str:
            raise NotTensorsError(f"it has a key of type {type(key).__name__}, expected tensors by name")
        super().__setitem__(key, value)


def _rebuild_tensor(storage: Any, offset: Any, shape: Any, strides: Any, *_ignored: Any) -> StoredTensor:
    """Return a `StoredTensor`, where `torch._utils._rebuild_tensor_v2` would create the tensor.

    Raises:
        NotTensorsError: The arguments have wrong types, invalid sizes or many dimensions (multiplying thousands of
            long integers takes hours), the tensor is not contiguous (a stride of 0 expands one value to any size), or
            it exceeds its storage.
    """
    sizes = (offset, *shape, *strides)
    valid = isinstance(storage, Storage) and len(shape) <= MAX_DIMENSIONS
    if not valid or any(type(size) is not int or not 0 <= size < MAX_INTEGER for size in sizes):
        raise NotTensorsError("its pickle creates a tensor from invalid arguments")
    steps = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    contiguous = all(stride == step or n == 1 for n, stride, step in zip(shape, strides, steps, strict=True))
    if not contiguous and math.prod(shape):
        raise NotTensorsError(f"a tensor of shape {shape} is not contiguous, its strides are {strides}")
    if offset + math.prod(shape) > storage.numel:
        raise NotTensorsError(f"a tensor of shape {shape} exceeds its storage of {storage.numel} values")
    return StoredTensor(storage, offset, tuple(shape))


GLOBALS: dict[str, Any] = {
    "collections.OrderedDict": lambda: _Names(),  # without arguments, in which any keys could be passed
    "torch._utils._rebuild_tensor_v2": _rebuild_tensor,
    "torch._utils._rebuild_parameter": lambda tensor, *_ignored: tensor,
    "torch.FloatStorage": torch.float32, "torch.DoubleStorage": torch.float64, "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16, "torch.LongStorage": torch.int64, "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16, "torch.CharStorage": torch.int8, "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
}  # fmt: skip
"""Names (functions and classes) that a pickle may import, and their replacements, which have no side effects."""

INSTRUCTIONS = (
    "PROTO", "FRAME", "MARK", "STOP", "BINPUT", "LONG_BINPUT", "MEMOIZE", "BINGET", "LONG_BINGET", "GLOBAL",
    "STACK_GLOBAL", "REDUCE", "BINPERSID", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_TUPLE", "EMPTY_LIST",
    "APPEND", "APPENDS", "SETITEM", "SETITEMS", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1",
    "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE",
)  # fmt: skip
"""Pickle instructions that tensors need; others, such as BYTEARRAY8, allocate any size that they claim."""


class _Unpickler(pickle._Unpickler):
    """Python's unpickler, restricted to `INSTRUCTIONS` and `GLOBALS`.

    `pickle.Unpickler`, written in C, cannot be restricted to instructions and may allocate 64 GB for one LONG_BINPUT.
    The storages that the pickle refers to are added to `declared`, by key.
    """

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        **{code: pickle._Unpickler.dispatch[code] for code in (getattr(pickle, name)[0] for name in INSTRUCTIONS)},
        pickle.EMPTY_DICT[0]: lambda self: self.append(_Names()),
        # drop the state, e.g. the module versions of a state dict: setting it could change functions of this module
        pickle.BUILD[0]: lambda self: self.stack.pop(),
    }

    def __init__(self, file: IO[bytes], declared: dict[str, Storage]) -> None:
        super().__init__(file)
        self._declared = declared

    def find_class(self, module: str, name: str) -> Any:
        """Return the replacement of a global; raise `NotTensorsError` for others, which could run any code."""
        path = f"{module}.{name}"
        if path not in GLOBALS:
            raise NotTensorsError(f"its pickle imports {path[:120]}, which tensors do not need")
        return GLOBALS[path]

    def persistent_load(self, pid: Any) -> Storage:
        """Return a storage; raise `NotTensorsError` for a view, or if it is declared with two types or sizes."""
        kind, dtype, key, _location, numel, *view = pid
        valid = kind == "storage" and isinstance(dtype, torch.dtype) and type(key) is str and view in ([], [None])
        if not valid or type(numel) is not int or not 0 <= numel < MAX_INTEGER:
            raise NotTensorsError("its pickle refers to a storage of an unsupported type")
        storage = Storage(key, dtype, numel)
        if self._declared.setdefault(key, storage) != storage:
            raise NotTensorsError(f"its storage {key!r} is declared with different types or sizes")
        return storage
