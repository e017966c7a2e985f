"""Memory of a static key-value cache: one buffer for all layers of the same shape.

Buffers are reallocated (rarely) as the text grows, so memory follows the actual length, not `max_new_tokens`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hf_specdec.errors import CacheCapacityError

logger = logging.getLogger(__name__)

ANSWER_SLOTS = 1024
"""Slots allocated for an answer before its length is known."""
CAPACITY_TIER = 64
"""Capacities of growing caches are rounded up to a multiple of this many slots."""
FIRST_KEPT_SLOTS = 8192
"""Minimum slots of memory kept between calls, for one row (a quarter of them for several), unless they exceed what may
be kept: every later reallocation invalidates all captures."""
MAX_KEPT_ROWS = 8
"""Rows of a batch above which memory is freed at the end of the call: 16 rows of 1,024 tokens take 2 GB for an 8B
model."""
SHORTEST_BUCKET = 256
"""Slots that the shortest captured graphs attend to."""


def bucket_of(length: int) -> int:
    """Round a length up to the slots that a captured graph attends to: 256, 384, 512, 768, 1024, 1536, ...

    Example: 512 for 512, 768 for 513.
    """
    size = SHORTEST_BUCKET
    while size < length:
        if size + size // 2 >= length:
            return size + size // 2
        size *= 2
    return size


def kept_rows(batch_size: int) -> int:
    """Round a batch size up to a power of two, so that kept memory is rarely reallocated for another one."""
    return 1 << max(batch_size - 1, 0).bit_length()


@contextmanager
def persistent_tensors() -> Iterator[None]:
    """Create tensors in this block that later calls can modify.

    Tensors created in `torch.inference_mode()` cannot be modified outside it, so everything that outlives a call must
    be created in such a block.
    """
    with torch.inference_mode(False), torch.no_grad():  # leaving inference mode alone would enable gradients
        yield


# ----------------------------------------------------------------------------------------------- one-time work


class _Notes(threading.local):
    count = 0


_notes = _Notes()


def note_one_time_work() -> None:
    """Mark the current step of this thread as containing work that is done once rather than in every step.

    Capturing a graph, compiling and growing a cache are such work: a step with it must not be used as the cost of a
    step. Code that measures steps compares `one_time_work` before and after.
    """
    _notes.count += 1


def one_time_work() -> int:
    """Return how often this thread has done one-time work."""
    return _notes.count


# ----------------------------------------------------------------------------------------------- layouts and buffers


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """Shape, device and dtypes of one layer's keys and values, without batch size and length; `==` ignores dtypes."""

    num_heads: int
    key_dim: int
    value_dim: int
    device: torch.device
    # of keys and values, measured by the probe; not compared, because autocast changes them
    dtypes: tuple[torch.dtype, torch.dtype] | None = field(default=None, compare=False)

    @classmethod
    def of(cls, keys: Tensor, values: Tensor) -> LayerLayout:
        """Return the layout of keys `[B, H, T, Dk]` and values `[B, H, T, Dv]`."""
        return cls(keys.shape[1], keys.shape[-1], values.shape[-1], keys.device, (keys.dtype, values.dtype))


CacheLayout = Sequence[LayerLayout | None]
"""One entry per layer of the model; None for a layer that shares another layer's keys and values."""


class Share:
    """One layer's keys `[B, H, S, Dk]` and values `[B, H, S, Dv]`: views, updated when the buffer is reallocated."""

    __slots__ = ("keys", "values")

    keys: Tensor
    values: Tensor


class KeyValueBuffer:
    """Keys `[n, B, H, S, Dk]` and values `[n, B, H, S, Dv]` of n layers of the same shape.

    `states`, keys and values `[B, H, T, *]` of a layer, determine shapes and dtypes; of the allocated `rows` the
    first B are used.
    """

    def __init__(
        self, num_layers: int, capacity: int, states: tuple[Tensor, Tensor], rows: int, *, is_persistent: bool
    ) -> None:
        self._is_persistent, self._rows, self.layout = is_persistent, len(states[0]), LayerLayout.of(*states)
        sizes = num_layers, rows, capacity
        self._memory = tuple(_allocate(like, *sizes, is_persistent=is_persistent) for like in states)
        self.shares = [Share() for _ in range(num_layers)]
        self.num_taken = 0
        self._update_shares()

    @property
    def keys(self) -> Tensor:
        """Keys `[n, B, H, S, Dk]`."""
        return self._memory[0][:, : self._rows]

    @property
    def values(self) -> Tensor:
        """Values `[n, B, H, S, Dv]`."""
        return self._memory[1][:, : self._rows]

    @property
    def num_rows(self) -> int:
        """Allocated rows."""
        return self._memory[0].shape[1]

    def can_serve(self, rows: int, dtype: torch.dtype) -> bool:
        """Whether the memory has this dtype, and as many rows as needed."""
        has_rows = rows <= self.num_rows if self._is_persistent else rows == self._rows
        return has_rows and self._memory[0].dtype == dtype

    def take(self, rows: int) -> Share:
        """Return the memory of the next free layer, and use the first `rows` rows of all layers."""
        if rows != self._rows:
            self._rows = rows
            self._update_shares()
        self.num_taken += 1
        return self.shares[self.num_taken - 1]

    def keep_rows(self, rows: Sequence[int], length: int) -> None:
        """Copy the first `length` slots of `rows[i]` to row i and use only these rows; `rows[i]` is i or larger."""
        for target, source in enumerate(rows):
            if source != target:
                for states in self._memory:
                    states[:, target, :, :length] = states[:, source, :, :length]
        self._rows = len(rows)
        self._update_shares()

    def resize(self, capacity: int) -> None:
        """Reallocate with another capacity and copy the slots that fit; without enough memory nothing changes."""
        moved = []
        for states in self._memory:
            num_layers, rows = states.shape[:2]
            other = _allocate(states[0], num_layers, rows, capacity, is_persistent=self._is_persistent)
            kept = min(states.shape[3], capacity)
            other[:, :, :, :kept] = states[:, :, :, :kept]
            moved.append(other)
        self._memory = tuple(moved)
        self._update_shares()

    @property
    def num_bytes(self) -> int:
        """Size of the memory."""
        return sum(states.nbytes for states in self._memory)

    def reopen(self) -> None:
        """Make all layers available again, and zero the memory: masked slots must not hold NaN."""
        self.num_taken = 0
        for states in self._memory:
            if states.device.type != "cpu":  # the memory must not go to its first stream while this one uses it
                states.record_stream(torch.get_device_module(states.device).current_stream(states.device))
            states.zero_()

    def close(self) -> None:
        """Free the memory, even if shares are still referenced."""
        for share in self.shares:
            del share.keys, share.values
        self._memory = ()

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copy slots `[B, P]` within their rows, in all layers at once; sources and targets may overlap."""
        sources, targets = (slots.to(self.keys.device) for slots in (sources, targets))
        rows = torch.arange(sources.shape[0], device=sources.device)[:, None]
        for states in (self.keys, self.values):
            # advanced indices on both sides of a slice make [B, P, n, H, D]; the right side is copied before the
            # assignment, so that overlapping ranges are safe
            states[:, rows, :, targets] = states[:, rows, :, sources]

    def _update_shares(self) -> None:
        for share, keys, values in zip(self.shares, self.keys, self.values, strict=True):
            share.keys, share.values = keys, values


def _allocate(like: Tensor, num_layers: int, batch: int, capacity: int, *, is_persistent: bool) -> Tensor:
    """Allocate `[num_layers, B, H, capacity, D]` for layers like `[*, H, *, D]`; zeroed if `is_persistent`."""
    _, heads, _, dim = like.shape
    try:
        if not is_persistent:
            return like.new_empty(num_layers, batch, heads, capacity, dim)
        with persistent_tensors():
            return like.new_zeros(num_layers, batch, heads, capacity, dim)
    except (RuntimeError, MemoryError) as error:
        size = num_layers * batch * heads * capacity * dim * like.itemsize
        raise CacheCapacityError(
            f"A key-value cache of {capacity} slots for {batch} rows does not fit in the memory of {like.device}: the "
            f"keys (or values) of {num_layers} layers alone need {size / 1e9:.1f} GB.",
            "Use a shorter prompt, a smaller max_new_tokens or fewer rows.",
        ) from error


class KeyValueStore:
    """Buffers of one cache: one per layout, and a separate one for each layer that does not match its layout.

    It holds no reference to the cache or its layers, so memory kept for later calls does not keep them alive.

    Args:
        layout: One entry per layer.
        capacity: Expected maximum number of slots per row.
        reserve: See `TreeCache`.
        kept_bytes: Maximum size of memory that is kept between calls, see `end_call`; its unwritten slots hold
            zeros, because graphs also attend to masked slots, where NaN would spread. None: memory of one call.

    Attributes:
        moves: Number of times that existing buffers were reallocated or freed, which invalidates captured graphs.
    """

    def __init__(
        self, layout: CacheLayout, capacity: int, reserve: int | None, *, kept_bytes: float | None = None
    ) -> None:
        self.layout, self.limit, self.reserve, self._kept_bytes = tuple(layout), capacity, reserve, kept_bytes
        self.capacity = capacity if reserve is None else 0
        self._needed = self.capacity  # slots needed by the current call, without those for later calls
        self._first_kept = 0  # slots of the first buffers, if they are kept
        self.moves = 0
        self.buffers: list[KeyValueBuffer] = []

    def reopen(self, capacity: int, reserve: int) -> None:
        """Zero all memory and make it available to another cache, whose arguments these are, without reallocating."""
        self.limit, self.reserve = capacity, reserve
        for buffer in self.buffers:
            buffer.reopen()

    def end_call(self, other_bytes: int = 0) -> bool:
        """Free memory with too many rows, or too large together with other bytes, to be kept; return whether."""
        size = sum(buffer.num_bytes for buffer in self.buffers) + other_bytes
        too_many = any(buffer.num_rows > MAX_KEPT_ROWS for buffer in self.buffers)
        if too_many or size > (self._kept_bytes or 0):
            self.close()
        return too_many or size > (self._kept_bytes or 0)

    def allocate(self, layout: LayerLayout | None, key_states: Tensor, value_states: Tensor) -> Share:
        """Return memory for the first keys and values `[B, H, T, *]` of a layer.

        If they match its expected layout, it is in the buffer that all layers of this layout share. Kept memory is
        freed first if it has another dtype or too few rows, and also if the allocation fails.
        """
        rows = len(key_states)
        if not all(buffer.can_serve(rows, key_states.dtype) for buffer in self.buffers):
            self.close()
        actual = LayerLayout.of(key_states, value_states)
        shared = self.layout.count(actual) if layout == actual else 1
        if self._kept_bytes is not None and not self.buffers:
            layers = [entry or actual for entry in self.layout]
            widths = sum(entry.num_heads * (entry.key_dim + entry.value_dim) for entry in layers)
            slot_bytes = self._num_rows(rows) * widths * key_states.itemsize
            self._first_kept = FIRST_KEPT_SLOTS if rows == 1 else FIRST_KEPT_SLOTS // 4
            while self._first_kept * slot_bytes > self._kept_bytes:
                self._first_kept //= 2
        try:
            self.make_room(key_states.shape[-2])
            for buffer in self.buffers:
                if buffer.layout == actual and len(buffer.shares) == shared and buffer.num_taken < shared:
                    return buffer.take(rows)
            buffer = self._new_buffer(shared, (key_states, value_states))
        except CacheCapacityError:
            self.close()  # a shorter call may still fit
            raise
        self.buffers.append(buffer)
        return buffer.take(rows)

    def _num_rows(self, rows: int) -> int:
        """Return how many rows to allocate."""
        return rows if self._kept_bytes is None or rows > MAX_KEPT_ROWS else kept_rows(rows)

    def _new_buffer(self, num_layers: int, states: tuple[Tensor, Tensor]) -> KeyValueBuffer:
        rows, keeps = len(states[0]), self._kept_bytes is not None
        try:
            return KeyValueBuffer(num_layers, self.capacity, states, self._num_rows(rows), is_persistent=keeps)
        except CacheCapacityError:  # allocate only what this call needs, without slots and rows for later calls
            if not keeps:
                raise
            self._move(min(self._needed, self.capacity))
            return KeyValueBuffer(num_layers, self.capacity, states, rows, is_persistent=True)

    def close(self) -> None:
        """Free the memory if it is kept between calls."""
        if self._kept_bytes is None:
            return  # the memory belongs to one call and is freed with its cache
        for buffer in self.buffers:
            buffer.close()
        self.buffers, self.capacity = [], 0
        self.moves += 1

    def make_room(self, needed: int) -> None:
        """Ensure a capacity of at least `needed` slots."""
        if needed <= self.capacity:
            return
        if self.reserve is None:
            raise CacheCapacityError(
                f"The key-value cache has {self.capacity} slots, this forward needs {needed}.",
                "Increase SpeculativeConfig.max_cache_length, or leave it None.",
            )
        # growing by at least half keeps the number of reallocations small for texts of any length
        ahead = needed + max(self.reserve, self.capacity // 2)
        grown = -(-ahead // CAPACITY_TIER) * CAPACITY_TIER
        if needed <= self.limit:
            grown = min(grown, self.limit)
        if not torch.compiler.is_dynamo_compiling():
            note_one_time_work()
        self._needed = grown
        if self._kept_bytes is not None:  # allocate for later calls, too, if there is enough memory
            try:
                self._move(bucket_of(max(ahead, self._first_kept)))
                return
            except CacheCapacityError:
                logger.info("Not enough memory to keep more than %d slots of the key-value cache.", grown)
        self._move(grown)

    def _move(self, capacity: int) -> None:
        self.moves += bool(self.buffers)  # counted first: if a later buffer fails, earlier ones have already moved
        for buffer in self.buffers:
            buffer.resize(capacity)
        self.capacity = capacity
