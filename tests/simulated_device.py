"""A second device on a CPU build of torch: `sim` computes in host memory, and behaves as an accelerator would.

* No operation takes tensors of both devices, scalars and indices aside.
* What makes the host wait is noted down with the place in the package it came from: reads of the device in `reads`,
  copies to it from memory that is not pinned, which CUDA waits for as well, in `uploads`.
* `launches` counts what is started on the device outside of graphs, by place; a replay is one launch.
* A `Graph` captures the operations of a block and replays them on the same memory without the block's Python, as a
  CUDA graph does; while it captures, reading the device and copying from the host raise, as do random numbers in
  other threads, and the capture may be invalidated (`invalidate`). `poison` overwrites the memory that a graph
  allocated, as another graph of its pool may.
* In a block of `use_stream`, operations wait only for those of the same stream, and for what events, and reads of the
  device, order before them: `races` notes down whatever touches memory that another stream may still write or read.
* Of several values that `index_put_` writes to one place, the first stays: on a device any may.

What it cannot do: it says nothing about speed, and attention kernels are the CPU's. After the idea of
`../shared/tools/simulated_device.py`.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend("sim")
SIM = torch.device("sim:0")
_module: Any = torch.get_device_module("sim")
_module.get_device_properties = lambda _device=None: SimpleNamespace(total_memory=2**30)

Clock = dict[int, int]
"""How many operations of each stream are known to be over."""


def merge(clock: Clock, other: Clock) -> None:
    for number, count in other.items():
        clock[number] = max(clock.get(number, 0), count)


class Stream:
    """A queue of the device. The default one is not followed: it orders itself with all others."""

    _numbers = itertools.count()

    def __init__(self) -> None:
        self.number, self.clock = next(self._numbers), Clock()

    def wait_event(self, event: Event) -> None:
        merge(self.clock, event.clock)


class _Current(threading.local):
    stream: Stream | None = None


DEFAULT = Stream()
_current = _Current()
_over = Clock()  # what the host has waited for
_uses: dict[int, tuple[StorageWeakRef, Clock, Clock]] = {}
"""Of each storage, the last write and the last reads by stream; the reference keeps its number from being reused."""
races: list[tuple[str, str]] = []
"""Operation and place of all uses of memory that another stream may still write, or read while this one writes it."""
recorded: set[tuple[int, int]] = set()
"""Storage and stream of each `record_stream`."""


@contextmanager
def use_stream(stream: Stream) -> Iterator[None]:
    """Launch this thread's operations on the stream."""
    _current.stream = stream
    try:
        yield
    finally:
        _current.stream = None


def note_use(name: str, read: Iterable[Tensor], written: Iterable[Tensor]) -> None:
    """An operation of the current stream touches memory."""
    stream = current_stream()
    count = stream.clock[stream.number] = stream.clock.get(stream.number, 0) + 1
    for tensors, writes in ((read, False), (written, True)):
        for tensor in tensors:
            storage = tensor.untyped_storage()
            _, last_write, last_reads = _uses.setdefault(
                storage._cdata, (StorageWeakRef(storage), Clock(), Clock())
            )  # fmt: skip
            for before in (last_write, last_reads) if writes else (last_write,):
                if any(at > max(stream.clock.get(other, 0), _over.get(other, 0)) for other, at in before.items()):
                    races.append((name, place_of_call()))
            if writes:
                last_write.clear()
            (last_write if writes else last_reads)[stream.number] = count


def synchronize(_device: Any = None) -> None:
    """The host waits for all streams."""
    for _, last_write, last_reads in _uses.values():
        merge(_over, last_write)
        merge(_over, last_reads)


class Event:
    """A mark in the device's queue; the host waits for what was launched before it, once."""

    _waited_until: ClassVar[float] = 0.0

    def __init__(self, enable_timing: bool = False) -> None:
        self._recorded_at = 0.0
        self.clock = Clock()

    def record(self, stream: Stream | None = None) -> None:
        self._recorded_at = time.perf_counter()
        self.clock = dict((stream or current_stream()).clock)

    def synchronize(self) -> None:
        if self._recorded_at > Event._waited_until:
            note_read("synchronize", self.clock)
            Event._waited_until = self._recorded_at

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        return 1000 * (end._recorded_at - self._recorded_at)


def current_stream(_device: Any = None) -> Stream:
    return _current.stream or DEFAULT


class Generator:
    """The CPU's generator, whose state cannot be touched while another thread captures."""

    def __getattr__(self, name: str) -> Any:
        check_generator()
        return getattr(torch.default_generator, name)


_module.Event, _module.Stream, _module.current_stream, _module.synchronize = Event, Stream, current_stream, synchronize
_module.default_generators, _module.stream = [Generator()], use_stream
_module.get_rng_state = lambda _device=None: torch.get_rng_state()
_module.set_rng_state = lambda state, _device=None: torch.set_rng_state(state)

WAITING = frozenset({
    "_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2", "unique_dim",
    "unique_consecutive", "bincount", "repeat_interleave",
})  # fmt: skip
"""Operations whose result, or the size of it, the host has to know before it goes on."""
COPYING = frozenset({"copy_", "_copy_from", "_to_copy"})

made_of_others: dict[str, Callable[..., Any]] = {}
"""Operations of the package that are no kernels of the device, and the functions that they call."""
reads: list[tuple[str, str]] = []
"""Operation and place of everything that made the host wait for a result."""
uploads: list[tuple[str, str]] = []
"""Operation and place of every copy to the device that made the host wait."""
attention_shapes: set[tuple[Any, ...]] = set()
"""Sizes and strides of every attention so far: cuDNN would have built, and kept, a plan for each."""
launches: list[tuple[str, str]] = []
"""Operation and place of everything that was started outside of graphs, replays included."""


class WeakTensorSet:
    """Tensors by identity, which it does not keep alive."""

    def __init__(self) -> None:
        self._known: dict[int, weakref.ref[Tensor]] = {}

    def add(self, tensor: Tensor) -> None:
        self._known[id(tensor)] = weakref.ref(tensor)

    def __contains__(self, tensor: object) -> bool:
        known = self._known.get(id(tensor))
        return known is not None and known() is tensor


VIEWS = frozenset({
    "view", "_unsafe_view", "expand", "transpose", "permute", "select", "slice", "unsqueeze", "squeeze", "as_strided",
    "alias", "detach", "unbind", "split", "split_with_sizes", "t", "diagonal", "_reshape_alias", "lift_fresh",
    "unsafe_split", "chunk", "reshape",
})  # fmt: skip
"""Operations that start nothing."""
RANDOM = frozenset({"multinomial", "rand", "randn", "uniform_", "normal_", "exponential_", "bernoulli_"})
_capturing: list[Graph] = []  # of all threads
_pinned: WeakTensorSet = WeakTensorSet()


def place_of_call() -> str:
    """The innermost file and function of the package that is running."""
    frame = sys._getframe(1)
    while frame is not None:
        if "hf_specdec/" in frame.f_code.co_filename:
            return f"{frame.f_code.co_filename.rsplit('hf_specdec/', 1)[1]}:{frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "elsewhere"


def captures_here() -> list[Graph]:
    """The graphs that this thread captures."""
    return [graph for graph in _capturing if graph.thread == threading.get_ident()]


def check_generator() -> None:
    """Torch up to 2.11 refuses to draw, or to give a generator's state, while another thread captures."""
    if _capturing and not captures_here():
        raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")


def invalidate(*_of_collector: Any) -> None:
    """What this thread captures becomes invalid: it ends in an error, as do further operations. See `gc.callbacks`."""
    for graph in captures_here():
        graph.is_valid = False


def note_read(name: str, clock: Clock | None = None) -> None:
    """The host waits here for the device, or for the operations of a clock."""
    if captures_here():
        raise RuntimeError(f"{name} reads the device while a graph is captured")
    merge(_over, current_stream().clock if clock is None else clock)
    reads.append((name, place_of_call()))


def note_upload(name: str, *, pinned: bool = False) -> None:
    """The host gives something to the device here, which cannot be captured."""
    if captures_here():
        raise RuntimeError(f"{name} copies from the host while a graph is captured")
    launches.append((name, place_of_call()))
    if not pinned:
        uploads.append((name, place_of_call()))


def note_launch(name: str) -> None:
    """Something is started on the device here."""
    if not captures_here() and name not in VIEWS:
        launches.append((name, place_of_call()))


class SimTensor(Tensor):
    """A tensor of the simulated device around a tensor of the CPU; views share their memory."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    raw: Tensor

    @staticmethod
    def __new__(cls, raw: Tensor) -> SimTensor:
        with torch.inference_mode(raw.is_inference()):  # a view made in that mode is as its tensor is
            made: SimTensor = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
                cls, raw.shape, strides=raw.stride(), storage_offset=raw.storage_offset(), dtype=raw.dtype, device=SIM
            )
        made.raw = raw
        return made

    def __init__(self, raw: Tensor) -> None:
        pass

    def tolist(self) -> Any:
        note_read("tolist")
        return self.raw.tolist()

    def record_stream(self, stream: Stream) -> None:  # type: ignore[override]
        recorded.add((self.raw.untyped_storage()._cdata, stream.number))

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.is_inference_mode_enabled():  # there, operations that are made of others arrive whole
            parts = op.decompose(*args, **(kwargs or {}))
            if parts is not NotImplemented:
                return parts
        if op.name() in made_of_others:
            with Uploads():  # which does not see what it calls itself
                return made_of_others[op.name()](*args)
        return _run(op, *args, **(kwargs or {}))


def _run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """One operation that has a simulated tensor, or the simulated device, among its arguments."""
    name = op._schema.name.removeprefix("aten::")
    leaves, spec = tree_flatten((args, kwargs))
    foreign = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not isinstance(leaf, SimTensor) and leaf.dim()]
    device = kwargs.get("device")
    down = name in COPYING and (
        (device is not None and torch.device(device).type == "cpu")
        or (name == "copy_" and not isinstance(args[0], SimTensor))
    )
    if foreign and name not in COPYING:
        if not name.startswith("index") or any(leaf.dtype not in (torch.long, torch.bool) for leaf in foreign):
            raise RuntimeError(
                f"{name}: tensors of sim:0 and of the CPU, of shapes {[leaf.shape for leaf in foreign]}"
            )
        note_upload(f"{name} by indices on the host")
    by_mask = name.startswith("index") and any(
        isinstance(leaf, Tensor) and leaf.dtype == torch.bool for leaf in tree_flatten(args[1])[0]
    )
    waits_later = name == "copy_" and args[0] in _pinned and (kwargs.get("non_blocking") or args[2:] == (True,))
    if down and waits_later:
        note_launch(name)
    elif down or by_mask or name in WAITING:
        note_read(name)
    elif foreign:
        note_upload(name, pinned=all(leaf in _pinned for leaf in foreign))
    else:
        note_launch(name)
    owners = {id(leaf.raw): leaf for leaf in leaves if isinstance(leaf, SimTensor)}
    raw_args, raw_kwargs = tree_unflatten([leaf.raw if isinstance(leaf, SimTensor) else leaf for leaf in leaves], spec)
    if device is not None:
        raw_kwargs["device"] = torch.device("cpu")
    if name in RANDOM:
        check_generator()
    if name == "index_put_" and len(raw_args) == 3 and len(raw_args[1]) == 1 and raw_args[1][0].dtype == torch.long:
        op = _put_in_reverse
    out = op(*raw_args, **raw_kwargs)
    if _current.stream is not None and not captures_here():
        note_use(name, *touched(op, raw_args, raw_kwargs, out))
    if down:
        return args[0] if name == "copy_" else out
    for graph in captures_here():
        graph.append(op, raw_args, raw_kwargs, out)

    def owned(value: Any) -> Any:
        """In-place operations return what they were given, others something new."""
        if not isinstance(value, Tensor):
            return value
        return owners[id(value)] if id(value) in owners else SimTensor(value)

    return tree_map(owned, out)


def tensors_in(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor)]


def touched(op: Any, args: Any, kwargs: Any, out: Any) -> tuple[list[Tensor], list[Tensor]]:
    """What an operation reads and writes; nothing in the case of a view."""
    schema = getattr(op, "_schema", None)
    if schema is not None and schema.name.removeprefix("aten::") in VIEWS:
        return [], []
    return tensors_in((args, kwargs)), tensors_in(out)


def _put_in_reverse(tensor: Tensor, indices: list[Tensor], values: Tensor) -> Tensor:
    """`index_put_` that writes the first of several values last."""
    (places,) = indices
    values = values.expand(places.shape + tensor.shape[1:]).flatten(0, places.dim() - 1)
    return tensor.index_put_((places.flatten().flip(0),), values.flip(0))


_fallback = torch.library.Library("_", "IMPL")
_fallback.fallback(_run, "PrivateUse1")
_aten = torch.library.Library("aten", "IMPL")


def _factory(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def made(*args: Any, dtype: Any = None, device: Any = None, **kwargs: Any) -> Tensor:
        kept = {name: value for name, value in kwargs.items() if name not in ("layout", "pin_memory", "memory_format")}
        if make.__name__ in RANDOM:
            check_generator()
        raw = make(*args, dtype=dtype, device="cpu", **kept)
        if make not in (torch.empty, torch.empty_strided):
            note_launch(make.__name__)
            if _current.stream is not None and not captures_here():
                note_use(make.__name__, (), [raw])
        for graph in captures_here():
            graph.append(make, args, {"dtype": dtype, **kept}, raw)
        return SimTensor(raw)

    return made


for _names, _make in (
    (("empty.memory_format",), torch.empty), (("empty_strided",), torch.empty_strided), (("full",), torch.full),
    (("arange", "arange.start", "arange.start_step"), torch.arange), (("zeros",), torch.zeros),
    (("ones",), torch.ones), (("eye", "eye.m"), torch.eye), (("rand",), torch.rand), (("randn",), torch.randn),
    (("linspace",), torch.linspace), (("scalar_tensor",), torch.scalar_tensor),
):  # fmt: skip
    for _name in _names:
        _aten.impl(_name, _factory(_make), "PrivateUse1")


class Uploads(TorchFunctionMode):
    """What torch makes on the host and copies: `torch.tensor(..., device="sim")`, `.to("sim")`, indices in lists."""

    made_of_data: ClassVar[tuple[Any, ...]] = (torch.tensor, torch.as_tensor, torch.asarray)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function in self.made_of_data and _is_sim(kwargs.get("device")):
            if isinstance(args[0], SimTensor):
                return args[0]
            note_upload(function.__name__)
            return SimTensor(function(*args, **{**kwargs, "device": "cpu"}))
        if function is Tensor.to and not isinstance(args[0], SimTensor):
            wanted = kwargs.get("device", args[1] if len(args) > 1 else None)
            if isinstance(wanted, SimTensor) or _is_sim(wanted):
                note_upload("to", pinned=args[0] in _pinned and bool(kwargs.pop("non_blocking", False)))
                kwargs.pop("device", None)
                given, rest = args[0].detach(), [arg for arg in args[2:] if isinstance(arg, torch.dtype)]
                return SimTensor(given.to(*rest, **kwargs) if rest or kwargs else given.clone())
        if function is nn.functional.scaled_dot_product_attention and isinstance(args[0], SimTensor):
            attention_shapes.add(tuple((tensor.shape, tensor.stride()) for tensor in args[:3]))
        if function is Tensor.pin_memory:
            _pinned.add(args[0])
            return args[0]
        if function in (Tensor.__getitem__, Tensor.__setitem__) and isinstance(args[0], SimTensor):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            args = (args[0], tuple(map(self._index, index)), *args[2:])
        return function(*args, **kwargs)

    @staticmethod
    def _index(part: Any) -> Any:
        if not isinstance(part, list | range):
            return part
        note_upload("indices in a list")
        return SimTensor(torch.tensor(list(part)))


def _is_sim(device: Any) -> bool:
    return isinstance(device, str | torch.device) and torch.device(device).type == "sim"


@contextmanager
def simulation() -> Iterator[None]:
    """The device can be used inside; nothing is noted down at first."""
    for noted in (reads, uploads, launches, attention_shapes, races, recorded, _uses, _over):
        noted.clear()
    with Uploads():
        yield


def move(module: nn.Module) -> nn.Module:
    """Put a module's parameters and buffers on the device, in place; what is shared stays shared."""
    moved: dict[int, SimTensor] = {}
    for part in module.modules():
        for name, value in part._parameters.items():
            if value is not None and not isinstance(value, SimTensor):
                there = moved.setdefault(id(value), SimTensor(value.detach()))
                part._parameters[name] = nn.Parameter(there, requires_grad=False)
        for name, buffer in part._buffers.items():
            if buffer is not None and not isinstance(buffer, SimTensor):
                part._buffers[name] = moved.setdefault(id(buffer), SimTensor(buffer))
    return module


class Graph:
    """Captures the operations of a block, and replays them on the same memory."""

    def __init__(self) -> None:
        self.tape: list[tuple[Any, Any, Any, Any]] = []
        self.thread, self.is_valid = threading.get_ident(), True
        self._made: set[int] = set()

    def append(self, *entry: Any) -> None:
        """Capture an operation."""
        self.tape.append(entry)
        if not self.is_valid:
            raise RuntimeError("operation failed due to a previous error during capture")

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Capture the block."""
        _capturing.append(self)
        try:
            yield
        finally:
            _capturing.remove(self)
        if not self.is_valid:
            raise RuntimeError("operation failed due to a previous error during capture")

    @torch.inference_mode()  # a device writes to memory, whatever mode it was taken in
    def replay(self) -> None:
        """Run what was captured, on what the inputs hold by now."""
        note_launch("graph")
        for op, args, kwargs, out in self.tape:
            if _current.stream is not None:
                note_use("replay", *touched(op, args, kwargs, out))
            for was, now in zip(tree_flatten(out)[0], tree_flatten(op(*args, **kwargs))[0], strict=True):
                if isinstance(was, Tensor) and was.data_ptr() != now.data_ptr():
                    was.copy_(now)

    @torch.inference_mode()
    def poison(self) -> None:
        """Overwrite all memory that the block took: it is anybody's between two replays."""
        known: set[int] = set()
        for _, args, kwargs, out in self.tape:
            given = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
            own = [leaf for leaf in tree_flatten(out)[0] if isinstance(leaf, Tensor)]
            places = {leaf.untyped_storage().data_ptr() for leaf in given}
            self._made |= {leaf.untyped_storage().data_ptr() for leaf in own} - places - known
            known |= places - self._made
            for leaf in own:
                if leaf.untyped_storage().data_ptr() in self._made:
                    leaf.fill_(float("nan") if leaf.is_floating_point() else 0)
