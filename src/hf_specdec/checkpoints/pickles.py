"""Tensors out of torch's files, read as data: no pickle is ever executed.

The instructions of the pickle are walked by a small machine that knows dictionaries with text keys, lists, numbers
and what torch writes for a tensor; anything else is refused by name. Storages are read from where the archive says
they lie, through the one descriptor that everything else was read through. Both of torch's formats, the archive and
the one before it.
"""

from __future__ import annotations

import io
import math
import pickletools
import struct
import weakref
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

import torch
from torch import Tensor

MAX_PICKLE_BYTES = 2**22
"""Of the instructions: some hundred bytes per tensor, five per entry of a list of tokens."""

MAX_INSTRUCTIONS = 600_000

MAX_SHARING = 4
"""How many times larger than their storages tensors may be together: repeated blocks of a head share one."""

STORAGES = {
    "FloatStorage": torch.float32, "DoubleStorage": torch.float64, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
}  # fmt: skip
"""Names of typed storages in pickles; what else there is (complex, quantised, fp8) no head is made of."""


class NotTensorsError(ValueError):
    """A file that is broken, or holds something else than tensors, lists and numbers; the message tells what."""


@dataclass(frozen=True, slots=True)
class Storage:
    """Where a tensor's values lie."""

    key: str
    dtype: torch.dtype
    numel: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor that is known and not read yet."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Global:
    """A name that the pickle would import."""

    name: str


class TorchFile:
    """A file that torch wrote: its content with `StoredTensor` in the place of tensors, values on request.

    Args:
        file: Opened for reading; closed with this object.

    Raises:
        NotTensorsError: See there.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        weakref.finalize(self, file.close)
        self._size = file.seek(0, io.SEEK_END)
        file.seek(0)
        self._places: dict[str, tuple[int, int]] = {}  # of storages: offset and bytes in the file
        self._storages: dict[str, Tensor] = {}
        self._seen: dict[str, Storage] = {}
        try:
            if file.read(4) == b"PK\x03\x04":
                self.content = self._read_archive()
            else:
                self.content = self._read_legacy()
        except (zipfile.BadZipFile, NotImplementedError, struct.error, EOFError, UnicodeDecodeError) as error:
            raise NotTensorsError(f"it is broken ({str(error)[:200]})") from error
        self._check_sizes()

    def read(self, stored: StoredTensor) -> Tensor:
        """The values, a view of their storage.

        Raises:
            NotTensorsError: The file is shorter than it was.
        """
        storage = stored.storage
        if storage.key not in self._storages:
            offset, size = self._places[storage.key]
            self._file.seek(offset)
            content = bytearray(self._file.read(size))
            if len(content) != size:
                raise NotTensorsError("it ends before its tensors do")
            empty = torch.empty(0, dtype=storage.dtype, device="cpu")
            self._storages[storage.key] = torch.frombuffer(content, dtype=storage.dtype) if size else empty
        numel = math.prod(stored.shape)
        return self._storages[storage.key][stored.offset : stored.offset + numel].view(stored.shape)

    # ------------------------------------------------------------------------------------------- the two formats

    def _read_archive(self) -> Any:
        """The archive of torch 1.6 and later: a pickle, and a file per storage, none of them compressed."""
        places = {}
        with zipfile.ZipFile(self._file) as archive:
            end = 0
            for entry in sorted(archive.infolist(), key=lambda entry: entry.header_offset):
                begin = self._begin_of(entry)
                if entry.header_offset < end or begin + entry.file_size > self._size:
                    raise NotTensorsError(f"its part {entry.filename!r} overlaps another or lies outside")
                end = begin + entry.file_size
                places[entry.filename] = (begin, entry.file_size)
            if len(places) != len(archive.infolist()):
                raise NotTensorsError("two of its parts have one name")
        roots = [
            name.removesuffix("data.pkl") for name in places if name.endswith("/data.pkl") and name.count("/") == 1
        ]
        if len(roots) != 1:
            raise NotTensorsError("it holds no data.pkl, which torch writes")
        order = self._part(places.get(f"{roots[0]}byteorder", (0, 0)))
        if order not in (b"", b"little"):
            raise NotTensorsError(f"its byte order is {order!r}")
        self._places = {
            name.removeprefix(f"{roots[0]}data/"): place
            for name, place in places.items()
            if name.startswith(f"{roots[0]}data/")
        }
        return self._walk(io.BytesIO(self._part(places[f"{roots[0]}data.pkl"])))

    def _begin_of(self, entry: zipfile.ZipInfo) -> int:
        """Where a part's bytes begin, by its own header, which must say what the directory says."""
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size or entry.flag_bits & 1:
            raise NotTensorsError(f"its part {entry.filename!r} is compressed or encrypted, which torch never does")
        self._file.seek(entry.header_offset)
        header = self._file.read(30)
        signature, _, flags, method, *_, name_length, extra_length = struct.unpack("<4s5H3L2H", header)
        name = self._file.read(name_length).decode("utf-8")
        if signature != b"PK\x03\x04" or method != zipfile.ZIP_STORED or flags & 1 or name != entry.filename:
            raise NotTensorsError(f"its directory does not describe its part {entry.filename!r}")
        return entry.header_offset + len(header) + name_length + extra_length

    def _part(self, place: tuple[int, int]) -> bytes:
        """The bytes of a small part."""
        offset, size = place
        if size > MAX_PICKLE_BYTES:
            raise NotTensorsError(f"its instructions have {size} bytes, at most {MAX_PICKLE_BYTES} are read")
        self._file.seek(offset)
        return self._file.read(size)

    def _read_legacy(self) -> Any:
        """The format before torch 1.6: five pickles, then the storages, each behind its number of values."""
        self._file.seek(0)
        stream = io.BytesIO(self._file.read(MAX_PICKLE_BYTES))
        magic, version, system = (self._walk(stream) for _ in range(3))
        if magic != LEGACY_MAGIC or version != LEGACY_VERSION or not isinstance(system, dict):
            raise NotTensorsError("torch did not write it")
        if system.get("little_endian") is not True:
            raise NotTensorsError("its byte order is not little")
        content, keys = self._walk(stream), self._walk(stream)
        if not isinstance(keys, list) or sorted(map(str, keys)) != sorted(self._seen) or len(keys) != len(self._seen):
            raise NotTensorsError("it does not say which storages it holds")
        offset = stream.tell()
        for key in keys:
            storage = self._seen[key]
            self._file.seek(offset)
            (numel,) = struct.unpack("<q", self._file.read(8))
            if numel != storage.numel:
                raise NotTensorsError(f"its storage {key!r} has {numel} values, {storage.numel} are spoken of")
            self._places[key] = (offset + 8, numel * storage.dtype.itemsize)
            offset += 8 + numel * storage.dtype.itemsize
        return content

    def _check_sizes(self) -> None:
        """Every storage lies in the file as it is spoken of, and tensors are not many times what they share."""
        for key, storage in self._seen.items():
            offset, size = self._places.get(key, (0, -1))
            if size != storage.numel * storage.dtype.itemsize or offset + size > self._size:
                raise NotTensorsError(f"its storage {key!r} of {storage.numel} values is not in the file")
        tensors = [value for value in _values(self.content) if isinstance(value, StoredTensor)]
        total = sum(math.prod(tensor.shape) * tensor.storage.dtype.itemsize for tensor in tensors)
        if total > MAX_SHARING * self._size:
            raise NotTensorsError(
                f"its tensors are {total} bytes in a file of {self._size}; at most {MAX_SHARING} times may be shared"
            )

    # ------------------------------------------------------------------------------------------- the pickle

    def _walk(self, stream: io.BytesIO) -> Any:
        """What a pickle would make, without making it."""
        machine = _Machine(self._seen)
        try:
            for count, (opcode, argument, _) in enumerate(pickletools.genops(stream)):
                if count > MAX_INSTRUCTIONS:
                    raise NotTensorsError(f"its pickle has more than {MAX_INSTRUCTIONS} instructions")
                machine.step(opcode.name, argument)
            return machine.result()
        except NotTensorsError:
            raise
        except (ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError) as error:
            raise NotTensorsError(f"its pickle is broken ({type(error).__name__}: {str(error)[:200]})") from error


LEGACY_MAGIC, LEGACY_VERSION = 0x1950A86A20F9469CFC6C, 1001


def _values(content: Any) -> Iterator[Any]:
    """What a file holds, one level deep: a dictionary's values, a list's entries, or the one thing."""
    yield from content.values() if isinstance(content, dict) else content if isinstance(content, list) else [content]


class _Machine:
    """The instructions that tensors need, one method each; no other is known.

    Args:
        seen: Filled with the storages that are spoken of, by key.
    """

    def __init__(self, seen: dict[str, Storage]) -> None:
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self._seen = seen
        self._ended = False

    def step(self, name: str, argument: Any) -> None:
        """Do one instruction."""
        if name in PUSHES:
            self._stack.append(argument)
        elif name in CONSTANTS:
            self._stack.append(CONSTANTS[name]())
        elif name in INSTRUCTIONS:
            INSTRUCTIONS[name](self, argument)
        elif name not in ("PROTO", "FRAME"):
            raise NotTensorsError(f"its pickle has the instruction {name}, which tensors do not need")

    def result(self) -> Any:
        """What was made."""
        if not self._ended or len(self._stack) != 1:
            raise NotTensorsError("its pickle does not end")
        return self._stack[0]

    def _pop_mark(self) -> list[Any]:
        place = self._marks.pop()
        items = self._stack[place:]
        del self._stack[place:]
        return items

    def _mark(self, _: Any) -> None:
        self._marks.append(len(self._stack))

    def _stop(self, _: Any) -> None:
        self._ended = True

    def _memoize(self, index: int | None) -> None:
        self._memo[len(self._memo) if index is None else index] = self._stack[-1]

    def _recall(self, index: int) -> None:
        self._stack.append(self._memo[index])

    def _global(self, argument: str) -> None:
        self._stack.append(_allowed(argument.replace(" ", ".", 1)))

    def _stack_global(self, _: Any) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        self._stack.append(_allowed(f"{module}.{name}"))

    def _tuple(self, size: int | None) -> None:
        if size is None:
            items = self._pop_mark()
        else:
            items = self._stack[len(self._stack) - size :]
            del self._stack[len(self._stack) - size :]
        self._stack.append(tuple(items))

    def _append(self, _: Any) -> None:
        self._extend([self._stack.pop()])

    def _appends(self, _: Any) -> None:
        self._extend(self._pop_mark())

    def _extend(self, items: Sequence[Any]) -> None:
        target = self._stack[-1]
        if not isinstance(target, list):
            raise NotTensorsError("its pickle appends to something that is not a list")
        target.extend(items)

    def _set_item(self, _: Any) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._update([key, value])

    def _set_items(self, _: Any) -> None:
        self._update(self._pop_mark())

    def _update(self, items: Sequence[Any]) -> None:
        target = self._stack[-1]
        if not isinstance(target, dict):
            raise NotTensorsError("its pickle sets an item of something that is not a dictionary")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) is not str:
                raise NotTensorsError(f"it holds a key of type {type(key).__name__}, expected tensors by name")
            target[key] = value

    def _build(self, _: Any) -> None:
        state = self._stack.pop()  # of an OrderedDict: versions of modules, which nobody here asks for
        if not isinstance(state, dict) or not isinstance(self._stack[-1], dict):
            raise NotTensorsError("its pickle sets the state of an object")

    def _persistent(self, _: Any) -> None:
        kind, storage_type, key, _location, numel, *more = self._stack.pop()
        sound = kind == "storage" and isinstance(storage_type, _Global) and type(key) is str and more in ([], [None])
        dtype = STORAGES.get(storage_type.name.removeprefix("torch.")) if sound else None
        if dtype is None or type(numel) is not int or not 0 <= numel < 2**48:
            raise NotTensorsError("its pickle speaks of a storage that is none of a tensor's")
        storage = Storage(key, dtype, numel)
        if self._seen.setdefault(key, storage) != storage:
            raise NotTensorsError(f"its storage {key!r} is spoken of in two ways")
        self._stack.append(storage)

    def _reduce(self, _: Any) -> None:
        arguments, function = self._stack.pop(), self._stack.pop()
        if not isinstance(function, _Global) or not isinstance(arguments, tuple):
            raise NotTensorsError("its pickle calls something that is not a function")
        if function.name == "collections.OrderedDict" and arguments in ((), ([],)):
            self._stack.append({})
        elif function.name == "torch._utils._rebuild_tensor_v2":
            self._stack.append(_tensor(*arguments[:6]))
        elif function.name == "torch._utils._rebuild_parameter" and isinstance(arguments[0], StoredTensor):
            self._stack.append(arguments[0])
        else:
            raise NotTensorsError(f"its pickle calls {function.name} with something that makes no tensor")


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any, requires_grad: Any, hooks: Any) -> StoredTensor:
    """A plain tensor inside its storage."""
    sizes = (offset, *shape, *stride)
    if not isinstance(storage, Storage) or any(type(size) is not int or not 0 <= size < 2**48 for size in sizes):
        raise NotTensorsError("its pickle makes a tensor of something that is not a storage")
    plain = [math.prod(shape[place + 1 :]) for place in range(len(shape))]
    same = [step == wanted or size == 1 for size, step, wanted in zip(shape, stride, plain, strict=True)]
    if not all(same) and math.prod(shape):
        raise NotTensorsError(f"a tensor of {shape} is not a plain tensor: its strides are {stride}")
    if offset + math.prod(shape) > storage.numel or len(shape) > 8 or type(requires_grad) is not bool or hooks != {}:
        raise NotTensorsError(f"a tensor of {shape} lies outside its storage of {storage.numel} values")
    return StoredTensor(storage, offset, tuple(shape))


def _allowed(name: str) -> _Global:
    if name not in GLOBALS:
        raise NotTensorsError(f"its pickle asks for {name[:120]}, which tensors do not need")
    return _Global(name)


GLOBALS = frozenset({
    "collections.OrderedDict", "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_parameter",
    *(f"torch.{name}" for name in STORAGES),
})  # fmt: skip

PUSHES = frozenset({
    "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE",
})  # fmt: skip
"""Instructions whose argument is the value."""

CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None, "NEWTRUE": lambda: True, "NEWFALSE": lambda: False, "EMPTY_DICT": dict, "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
}  # fmt: skip

INSTRUCTIONS: dict[str, Callable[[_Machine, Any], None]] = {
    "MARK": _Machine._mark, "STOP": _Machine._stop,
    "BINPUT": _Machine._memoize, "LONG_BINPUT": _Machine._memoize, "MEMOIZE": _Machine._memoize,
    "BINGET": _Machine._recall, "LONG_BINGET": _Machine._recall,
    "GLOBAL": _Machine._global, "STACK_GLOBAL": _Machine._stack_global,
    "TUPLE": lambda machine, _: machine._tuple(None), "TUPLE1": lambda machine, _: machine._tuple(1),
    "TUPLE2": lambda machine, _: machine._tuple(2), "TUPLE3": lambda machine, _: machine._tuple(3),
    "APPEND": _Machine._append, "APPENDS": _Machine._appends,
    "SETITEM": _Machine._set_item, "SETITEMS": _Machine._set_items, "BUILD": _Machine._build,
    "BINPERSID": _Machine._persistent, "REDUCE": _Machine._reduce,
}  # fmt: skip
