"""`Graphed`: functions of tensors captured as device graphs, once per shape, and replayed with a single launch.

Small forwards on an accelerator are limited by the host, which launches about a thousand kernels one by one; a graph
launches them all at once. A graph contains addresses, so its function works on buffers that never move: a verify
forward reads tokens, parents and lengths, writes logits and hidden states, and appends to a cache whose memory later
calls reuse. Nothing else that a graph allocates may be read afterwards, because graphs share memory and are
replayed in any order. Widths are rounded up to `CAPTURED_WIDTHS`. Lengths are read on the device if its kernels can
(`device_attention.py`), and otherwise rounded up to buckets (`memory.bucket_of`), with masks that hide the padding.
Graphs are captured by `verification/graph_backends.py`.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from hf_specdec.verification.cache import FixedLayer, TreeCache
from hf_specdec.verification.graph_backends import CapturableOnly, GraphBackend, NotCapturableError
from hf_specdec.verification.memory import (
    CacheLayout,
    KeyValueStore,
    Share,
    bucket_of,
    kept_rows,
    note_one_time_work,
    persistent_tensors,
)
from hf_specdec.verification.recurrent_layer import NONE_RECURRENT, RecurrentLayer, RecurrentLayout, RecurrentState

logger = logging.getLogger(__name__)

CAPTURED_WIDTHS = (1, 8, 16, 32, 64)
"""Nodes per row of captured forwards. A tree is padded to the next width, trees above the last run without a graph.
Few, because every width is a graph, and on a GPU a step takes about as long for 2 or 4 nodes as for 8. Steps with few
operations (acceptance, what drafters learn from a step) have the last width alone."""
EXACT_WIDTH = 8
"""Width of every forward of an exact call: as many rows, and so the same kernels, in plain steps and with drafts."""
MOST_PADDED = max(wider - width for width, wider in pairwise(CAPTURED_WIDTHS)) - 1
"""Maximum number of padding nodes of a tree, which also occupy cache slots."""
CAPTURE_AFTER = 2
"""Runs of a shape before it is captured, because shapes that occur only once or twice are not worth a capture."""
RETRY_AFTER = 500
"""Runs of a shape to wait, in addition to `CAPTURE_AFTER`, after its capture ran out of memory."""
MAX_FAILURES = 3
"""Failed captures of a shape after which it runs without a graph. One failure may have come from outside: freed
memory, another thread, or the user's own code can invalidate a capture."""
KEPT_SHAPES, KEPT_BYTES, FEWEST_KEPT = 512, 256 * 2**20, 8
"""Shapes kept per kind of step, and bytes of their buffers; the least recently used is dropped. However large, the
`FEWEST_KEPT` used last are kept: a shape that is always dropped would never be captured."""
DEVICE_SHARE = 0.05
"""Share of the device's memory that a cache may keep between calls."""
REPLAY_TOLERANCE = 0.02
"""Maximum relative distance between the results of the first replay and of the run without a graph."""
Key = tuple[Hashable, ...]
Outputs = weakref.WeakValueDictionary[tuple[torch.dtype, int], Tensor]


class KeptMemory:
    """Cache memory that later calls reuse; only one cache at a time may use it.

    Args:
        backend: Graph backend of the device.
    """

    def __init__(self, backend: GraphBackend) -> None:
        self._backend = backend
        self._store: KeyValueStore | None = None
        self._states: dict[int, RecurrentState] = {}
        self._lease: weakref.ref[TreeCache] | None = None  # the cache that uses the memory

    @property
    def moves(self) -> int:
        """Times that the memory was reallocated or freed, which invalidates all captures; -1 before any cache."""
        return -1 if self._store is None else self._store.moves + sum(state.moves for state in self._states.values())

    def new_cache(
        self, layout: CacheLayout, capacity: int, reserve: int | None, recurrent: RecurrentLayout = NONE_RECURRENT
    ) -> TreeCache:
        """Return a cache that uses this memory, or a separate one if the memory is in use or `reserve` is None."""
        with self._backend.exclusive():
            if reserve is None or (self._lease is not None and self._lease() is not None):
                return TreeCache(layout, capacity, reserve, recurrent=recurrent)
            capacity += MOST_PADDED
            if self._store is None:
                kept_bytes = DEVICE_SHARE * self._backend.total_bytes
                self._store = KeyValueStore(layout, capacity, reserve, kept_bytes=kept_bytes)
            self._store.reopen(capacity, reserve)
            for index, (number, _) in recurrent.items():
                self._states.setdefault(index, RecurrentState(number, kept_rows)).reopen()
            cache = TreeCache(
                layout, capacity, reserve, store=self._store, recurrent=recurrent, states=self._states
            )  # fmt: skip
            self._lease = weakref.ref(cache)
            return cache

    def free(self) -> None:
        """Free the memory, which no cache may be using; the next cache allocates as much as it needs."""
        with self._backend.exclusive():
            if self._store is not None:
                self._store.close()
                self._close_states()

    def _close_states(self) -> None:
        for state in self._states.values():
            state.close()

    def owns(self, cache: Cache) -> bool:
        """Whether a cache uses this memory."""
        return self._lease is not None and self._lease() is cache

    def release(self, cache: Cache) -> None:
        """Make the memory available again if `cache` uses it, even if that object is still referenced."""
        with self._backend.exclusive():
            if self.owns(cache):
                assert self._store is not None
                if self._store.end_call(sum(state.num_bytes for state in self._states.values())):
                    self._close_states()
                self._lease = None


@dataclass(frozen=True, slots=True)
class Input:
    """An argument of a captured function.

    Args:
        value: A tensor, which is copied into a buffer, or an integer, which becomes a tensor without dimensions.
        width: Columns (dimension 1) of the buffer; None: as many as the tensor has.
        fill: Value of the columns that the tensor does not have.
        is_constant: Copy the tensor only if it is not the object that was copied last.
    """

    value: Tensor | int
    width: int | None = None
    fill: int = 0
    is_constant: bool = False


class Graphed:
    """A function of tensors that runs as a captured graph: one for each key, captured after `CAPTURE_AFTER` runs.

    All threads use the same buffers, one after another, also on the device (`GraphBackend.exclusive`).

    Args:
        backend: Graph backend of the device.
        name: Name of the function in log messages.

    Attributes:
        num_captures: Graphs captured so far.
    """

    def __init__(self, backend: GraphBackend, name: str) -> None:
        self._backend, self._name = backend, name
        self._shapes: dict[Key, _Shape] = {}  # least recently used first
        # by dtype and number of elements; shapes of equal results share a buffer
        self._outputs: Outputs = weakref.WeakValueDictionary()
        self._moves = -1  # moves of the cache memory when the graphs were captured
        self._is_capturable, self.num_captures = True, 0
        self._streams: set[Any] = set()  # on which it has run

    def captured_keys(self) -> list[Key]:
        """Return the keys of the captured shapes."""
        return [key for key, shape in self._shapes.items() if shape.replay is not None]

    def __call__(
        self, key: Key, function: Callable[..., Sequence[Tensor]], *inputs: Input, moves: int = 0,
        at_once: bool = False,
    ) -> list[Tensor]:  # fmt: skip
        """Return the function's results for some inputs, as copies.

        Args:
            key: Whatever distinguishes graphs: sizes of the buffers, and all else that the function depends on.
            function: Computes the results from the inputs' buffers. That of a key's first call serves all later ones,
                so it must hold nothing that belongs to a call. The call that captures it runs it several times with
                the same inputs, so if it also writes elsewhere, repeating it must write the same.
            *inputs: The inputs.
            moves: `moves` of the cache memory that the function uses; if it changed, all graphs are dropped.
            at_once: Whether to capture without waiting for `CAPTURE_AFTER` runs.
        """
        with self._backend.exclusive() as stream:
            if self._moves != moves:
                self._shapes.clear()
                self._moves = moves
            shape = self._shapes.pop(key, None)
            if shape is None:
                while len(self._shapes) >= KEPT_SHAPES or self._is_full():
                    del self._shapes[next(iter(self._shapes))]
                shape = _Shape(function, inputs, self._outputs)
            self._shapes[key] = shape
            shape.fill(inputs)
            if at_once and shape.times >= 0:  # negative: memory was full
                shape.times = CAPTURE_AFTER
            self._run(shape)
            self._streams.add(stream)
            if len(self._streams) > 1:  # once freed, the memory must not go to its first stream before others are done
                for tensor in shape.tensors():
                    tensor.record_stream(stream)
            return shape.results()

    def _is_full(self) -> bool:
        """Whether the shapes have too large buffers; outputs are shared."""
        tensors = {id(tensor): tensor.nbytes for shape in self._shapes.values() for tensor in shape.tensors()}
        return len(self._shapes) >= FEWEST_KEPT and sum(tensors.values()) > KEPT_BYTES

    def _run(self, shape: _Shape) -> None:
        shape.times += 1
        if shape.replay is not None:
            shape.replay()
            return
        may_capture = self._is_capturable and shape.failures < MAX_FAILURES
        if shape.times == 1 or (may_capture and shape.times > 0):
            note_one_time_work()  # a run without a graph takes 10 to 30 times as long as the replays to come
        shape.run()
        if shape.times > CAPTURE_AFTER and may_capture:
            try:
                shape.replay = self._capture(shape)
                self.num_captures += 1
            except Exception as error:  # model code and drivers raise various types
                self._note_failure(shape, error)
                shape.run()

    def _note_failure(self, shape: _Shape, error: Exception) -> None:
        """Log a failed capture, which is retried up to `MAX_FAILURES` times, or without end if memory was full.

        After a `NotCapturableError`, which is the function's own, no shape is captured any more.
        """
        if isinstance(error, torch.OutOfMemoryError):
            shape.times = -RETRY_AFTER
            logger.info("%s is not captured yet, because memory is full: %s", self._name, error)
            return
        self._is_capturable = not isinstance(error, NotCapturableError)
        shape.times, shape.failures = 0, shape.failures + 1
        reason = f"{type(error).__name__}: {error}"
        if self._is_capturable and shape.failures < MAX_FAILURES:
            logger.info("%s could not be captured as a graph (%s); this is tried again.", self._name, reason)
            return
        scope = "This shape" if self._is_capturable else "It"
        logger.warning("%s cannot be captured as a graph (%s). %s runs without a graph.", self._name, reason, scope)

    def _capture(self, shape: _Shape) -> Callable[[], None]:
        if not self.num_captures:  # what a function does is the same for all shapes
            with CapturableOnly():
                shape.run()
        replay = self._backend.capture(shape.run)
        expected = [packed.to(torch.float32, copy=True) for packed in shape.packed.values()]
        for packed in shape.packed.values():
            packed.zero_()
        replay()
        for packed, right in zip(shape.packed.values(), expected, strict=True):
            apart = torch.where(packed == right, 0, packed.float() - right)  # equal infinities are equal
            distance = apart.norm() / right.nan_to_num(posinf=0, neginf=0).norm().clamp(min=1e-6)
            if not float(distance) <= REPLAY_TOLERANCE:
                raise RuntimeError(f"its replay differs from the run without a graph by {float(distance):.1e}")
        return replay


class _Shape:
    """A function with the buffers of its inputs and outputs, which never move.

    Attributes:
        packed: The results, flattened and joined by dtype, so that those of a dtype leave in one copy.
        times, replay, failures: Runs since the last attempt to capture it, its graph, and failed captures.
    """

    def __init__(self, function: Callable[..., Sequence[Tensor]], inputs: Sequence[Input], outputs: Outputs) -> None:
        self._function, self._outputs = function, outputs
        self._last: list[object] = [None] * len(inputs)
        self._widths = [0] * len(inputs)  # columns filled last
        self._sizes: list[tuple[torch.dtype, torch.Size]] = []
        self.packed: dict[torch.dtype, Tensor] = {}
        self.times = self.failures = 0
        self.replay: Callable[[], None] | None = None
        device = next(value.device for value in (given.value for given in inputs) if isinstance(value, Tensor))
        self._buffers: list[Tensor] = []
        # inputs of one dtype that are a row, or have no padding, lie side by side: one launch fills all of them
        self._joined: list[tuple[Tensor, dict[int, Tensor]]] = []  # what pads each of them, by index
        groups: dict[torch.dtype, dict[int, Tensor]] = {}
        with persistent_tensors():
            for index, given in enumerate(inputs):
                buffer = torch.zeros((), dtype=torch.long, device=device)
                if isinstance(given.value, Tensor):
                    sizes = list(given.value.shape)
                    if given.width is not None:
                        sizes[1] = given.width
                    buffer = torch.full(sizes, given.fill, dtype=given.value.dtype, device=device)
                    is_whole = given.width is None or len(buffer) == 1
                    if is_whole and not given.is_constant:
                        groups.setdefault(buffer.dtype, {})[index] = buffer.flatten()
                self._buffers.append(buffer)
            for pads in groups.values():
                if len(pads) == 1:
                    continue
                joined = torch.cat([*pads.values()])
                for index, part in zip(pads, joined.split([pad.numel() for pad in pads.values()]), strict=True):
                    self._buffers[index] = part.view(self._buffers[index].shape)
                self._joined.append((joined, pads))

    def tensors(self) -> list[Tensor]:
        """Return all buffers."""
        pads = (pad for _, pads in self._joined for pad in pads.values())
        return [*self._buffers, *pads, *self.packed.values()]

    def fill(self, inputs: Sequence[Input]) -> None:
        """Copy the inputs into the buffers."""
        filled = set[int]()
        for joined, pads in self._joined:
            parts = list[Tensor]()
            for index, pad in pads.items():
                value: Any = inputs[index].value
                parts += [value.to(joined.device).flatten(), pad[value.numel() :]]
            torch.cat(parts, out=joined)
            filled.update(pads)
        for index, (given, buffer) in enumerate(zip(inputs, self._buffers, strict=True)):
            value = given.value
            if index in filled:
                continue
            if isinstance(value, int):
                if self._last[index] != value:
                    buffer.fill_(value)
                self._last[index] = value
                continue
            if given.is_constant:
                if self._last[index] is value:
                    continue
                self._last[index] = value
            if given.width is None:
                buffer.copy_(value)
                continue
            columns = value.shape[1]
            buffer[:, :columns] = value
            if columns < self._widths[index]:
                buffer[:, columns:] = given.fill
            self._widths[index] = columns

    def run(self) -> None:
        """Compute the results from the buffers; this is what is captured."""
        results = self._function(*self._buffers)
        self._sizes = [(result.dtype, result.shape) for result in results]
        for dtype in dict.fromkeys(dtype for dtype, _ in self._sizes):
            same = [result for result in results if result.dtype == dtype]
            counts = [result.numel() for result in same]
            if dtype not in self.packed:
                key = dtype, sum(counts)
                packed = self._outputs.get(key)
                if packed is None:
                    with persistent_tensors():
                        packed = self._outputs[key] = same[0].new_empty(sum(counts))
                self.packed[dtype] = packed
            for part, result in zip(self.packed[dtype].split(counts), same, strict=True):
                part.view(result.shape).copy_(result)

    def results(self) -> list[Tensor]:
        """Return copies of the results; the next run of the same sizes overwrites the outputs."""
        copies = {dtype: packed.clone() for dtype, packed in self.packed.items()}
        taken, results = dict.fromkeys(copies, 0), []
        for dtype, size in self._sizes:
            begin, count = taken[dtype], size.numel()
            results.append(copies[dtype][begin : begin + count].view(size))
            taken[dtype] = begin + count
        return results


def width_for(num_nodes: int) -> int:
    """Return the captured width that a tree of at most `CAPTURED_WIDTHS[-1]` nodes is padded to.

    Example: 16 for 9 to 16 nodes.
    """
    return next(width for width in CAPTURED_WIDTHS if width >= num_nodes)


class _BucketLayer(FixedLayer):
    """View of a cache layer inside a graph: writes to the slots `[width]`, reads a bucket of slots.

    The memory `share` is None for a layer that uses the keys of another one.
    """

    def __init__(self, share: Share | None, slots: Tensor, bucket: int) -> None:
        self._share, self._slots, self._bucket = share, slots, bucket

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values `[B, H, width, D]`; return those of the bucket, `[B, H, bucket, D]`."""
        assert self._share is not None
        keys, values = self._share.keys, self._share.values
        keys.index_copy_(2, self._slots, key_states)
        values.index_copy_(2, self._slots, value_states)
        return keys[:, :, : self._bucket], values[:, :, : self._bucket]

    def rotate_and_update(
        self, query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Like `update`, before rotary embedding; returns the rotated queries as well."""
        assert self._share is not None
        keys, values = self._share.keys, self._share.values
        query = torch.ops.hf_specdec_fused.rotate_and_append(query, key, value, cos, sin, keys, values, self._slots)
        return query, keys[:, :, : self._bucket], values[:, :, : self._bucket]

    def get_seq_length(self) -> Any:
        """Return the first slot, as a tensor on the device."""
        return self._slots[0]


class _HybridBucketLayer(RecurrentLayer, _BucketLayer):
    """Layer inside a graph with recurrent states as well."""

    def __init__(self, share: Share, slots: Tensor, bucket: int, state: RecurrentState) -> None:
        _BucketLayer.__init__(self, share, slots, bucket)
        RecurrentLayer.__init__(self, state)


class Appended:
    """Where new entries go outside of graphs: behind the committed ones of a cache, which is exactly as long."""

    def __init__(self, cache: TreeCache) -> None:
        self._cache = cache

    @property
    def size(self) -> int:
        """Slots before the new entries."""
        return self._cache.start

    def cache(self, before: int, count: int) -> Cache:
        """Return the cache for a forward over `count` entries, after `before` others since the last commit."""
        return self._cache

    def mask(self, committed: Tensor, seen: Tensor) -> Tensor:
        """Return the mask `[B, 1, T, S]` of T new entries over all slots.

        Bool `committed` `[B, T, size]` are the committed entries that each new one sees, `seen` `[B, T, A]` those of
        the A entries appended since the last commit, new ones included.
        """
        return torch.cat([committed, seen.expand(len(committed), -1, -1)], dim=-1)[:, None]


class Bucket:
    """A fixed number of slots that a graph attends to; new entries go behind the longest row.

    Args:
        cache: A cache whose memory exists, for `room` more entries; only its memory is kept.
        room: Maximum number of entries that one graph appends.
        has_masks: Whether masks hide slots. Without them a graph attends to the whole memory, see `VisibleKeys`.
    """

    def __init__(self, cache: TreeCache, room: int, *, has_masks: bool) -> None:
        self.shares: list[Share | None] = [getattr(layer, "share", None) for layer in cache.layers]
        self.states, self.has_masks, self._room = cache.states, has_masks, room
        self.size = min(bucket_of(cache.start + room), cache.capacity) if has_masks else cache.capacity

    @property
    def key(self) -> Key:
        """Key of the graphs over this memory."""
        return (self.size,) if self.has_masks else ()

    def behind(self, lengths: Tensor) -> BucketSlots:
        """Return the slots behind rows with `lengths` `[B]` committed entries."""
        free = lengths.amax() + torch.arange(self._room, dtype=torch.long, device=lengths.device)
        return BucketSlots(self.shares, self.states, self.size, free, self.has_masks)


@dataclass(frozen=True, slots=True)
class BucketSlots:
    """Where new entries go inside a graph: to `free` `[room]` slots behind the longest row. See `Appended`."""

    shares: Sequence[Share | None]
    states: Mapping[int, RecurrentState]
    size: int
    free: Tensor
    has_masks: bool

    def cache(self, before: int, count: int) -> Cache:
        """See `Appended.cache`."""
        slots, layers = self.free[before : before + count], list[Any]()
        for index, share in enumerate(self.shares):
            if index not in self.states:
                layers.append(_BucketLayer(share, slots, self.size))
            elif share is None:
                layers.append(RecurrentLayer(self.states[index]))
            else:
                layers.append(_HybridBucketLayer(share, slots, self.size, self.states[index]))
        return Cache(layers=layers)

    def mask(self, committed: Tensor, seen: Tensor) -> Tensor:
        """See `Appended.mask`."""
        slots = self.free[: seen.shape[-1]]
        return committed.index_copy(2, slots, seen.expand(len(committed), -1, -1))[:, None]

    def compact(self, lengths: Tensor, accepted: Tensor) -> None:
        """Move the accepted `[B, P]` of P appended entries next to those before them; they come first in each row."""
        if len(lengths) == 1:
            return  # a single row has no gaps to close
        width = accepted.shape[1]
        targets = lengths[:, None] + torch.arange(width, dtype=torch.long, device=lengths.device)
        sources = torch.where(accepted, self.free[:width], targets)
        rows = torch.arange(len(lengths), dtype=torch.long, device=lengths.device)[:, None]
        for share in self.shares:
            assert share is not None
            for states in (share.keys.transpose(1, 2), share.values.transpose(1, 2)):
                states[rows, targets] = states[rows, sources]


Slots = Appended | BucketSlots
