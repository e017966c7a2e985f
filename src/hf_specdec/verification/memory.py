"""The memory of a static key-value cache: one buffer for all layers of one shape, moved to a larger one as texts grow.

A text that outgrows the buffer is moved, seldom: an answer that could be long costs what it becomes. Knows nothing of
what is in it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hf_specdec.errors import CacheCapacityError
from hf_specdec.verification.one_time import note_one_time_work

logger = logging.getLogger(__name__)

RESERVED_SLOTS = 1024
"""Slots that are allocated for an answer before it is known how long it will be."""
CAPACITY_TIER = 64
"""Caches that grow have a multiple of this many slots."""
FIRST_KEPT_SLOTS = 2048
"""Slots of memory that is kept from call to call, at least, where there is as much: each move drops every graph."""
SHORTEST_BUCKET = 256
"""Slots that the shortest graphs attend to."""


def bucket_of(length: int) -> int:
    """The slots that a graph for so many attends to: 256, 384, 512, 768, 1024, 1536, ...

    Example: 512 for 512, 768 for 513.
    """
    size = SHORTEST_BUCKET
    while size < length:
        if size + size // 2 >= length:
            return size + size // 2
        size *= 2
    return size


def kept_rows(batch_size: int) -> int:
    """Rows of memory that is kept: the next power of two, so that another batch size seldom moves it.

    Example: 4 for 3.
    """
    return 1 << max(batch_size - 1, 0).bit_length()


@contextmanager
def persistent_tensors() -> Iterator[None]:
    """Make tensors in this block that later calls may write to.

    A tensor made in `torch.inference_mode()` cannot be changed outside it, so whatever outlives a call is made in such
    a block, also if its caller is in that mode.
    """
    with torch.inference_mode(False), torch.no_grad():  # leaving the mode alone would switch gradients on
        yield


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """Shape and place of one layer's keys and values, without batch and length."""

    num_heads: int
    key_dim: int
    value_dim: int
    device: torch.device
    # of keys and values, as the probe saw them; autocast changes them
    dtypes: tuple[torch.dtype, torch.dtype] | None = field(default=None, compare=False)


CacheLayout = tuple[LayerLayout | None, ...]
"""One entry per layer of the model; None where the layer shares another layer's keys and values."""


class Share:
    """One layer's keys `[B, H, S, Dk]` and values `[B, H, S, Dv]`: views of a buffer, renewed where it moves."""

    __slots__ = ("keys", "values")

    keys: Tensor
    values: Tensor


class KeyValueBuffer:
    """Keys `[n, B, H, S, Dk]` and values `[n, B, H, S, Dv]` of n layers of one shape.

    Memory that is kept from call to call has as many rows as the largest batch asked for, and shows the first B.
    """

    def __init__(
        self, num_layers: int, capacity: int, key_states: Tensor, value_states: Tensor, *, rows: int | None = None,
        clears: bool = False,
    ) -> None:  # fmt: skip
        self._clears, self.layout, self._rows = clears, layer_layout(key_states, value_states), len(key_states)
        sizes = num_layers, rows or self._rows, capacity
        self._memory = tuple(_allocate(like, *sizes, clears=clears) for like in (key_states, value_states))
        self.shares = [Share() for _ in range(num_layers)]
        self.num_taken = 0
        self._renew()

    @property
    def is_full(self) -> bool:
        """Whether every layer of the buffer has been handed out."""
        return self.num_taken == len(self.shares)

    @property
    def keys(self) -> Tensor:
        """`[n, B, H, S, Dk]`."""
        return self._memory[0][:, : self._rows]

    @property
    def values(self) -> Tensor:
        """`[n, B, H, S, Dv]`."""
        return self._memory[1][:, : self._rows]

    @property
    def dtype(self) -> torch.dtype:
        """Of the keys."""
        return self._memory[0].dtype

    def has_rows(self, rows: int) -> bool:
        """Whether it can show so many."""
        return rows <= self._memory[0].shape[1] if self._clears else rows == self._rows

    def take(self, rows: int) -> Share:
        """The next free layer's share, of so many rows."""
        if rows != self._rows:
            self._rows = rows
            self._renew()
        self.num_taken += 1
        return self.shares[self.num_taken - 1]

    def resize(self, capacity: int) -> None:
        """Move everything to larger memory, or smaller; where there is none, all stays as it is."""
        moved = []
        for states in self._memory:
            num_layers, rows = states.shape[:2]
            other = _allocate(states[0], num_layers, rows, capacity, clears=self._clears)
            kept = min(states.shape[3], capacity)
            other[:, :, :, :kept] = states[:, :, :, :kept]
            moved.append(other)
        self._memory = tuple(moved)
        self._renew()

    def reopen(self) -> None:
        """Hand its layers out again; what was in it is wiped, for it may have held what is no number."""
        self.num_taken = 0
        for states in self._memory:
            states.zero_()

    def close(self) -> None:
        """Let go of the memory, whoever still knows a layer's share."""
        for share in self.shares:
            del share.keys, share.values
        self._memory = ()

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copy slots within their rows, all layers at once; the gather makes a copy, so ranges may overlap.

        Args:
            sources, targets: `[B, P]` slots; those that stay where they are are copied onto themselves.
        """
        rows = torch.arange(sources.shape[0], device=sources.device)[:, None]
        for states in (self.keys, self.values):
            # advanced indices around a slice: the indexed result is [B, P, n, H, D] on both sides
            states[:, rows, :, targets] = states[:, rows, :, sources]

    def _renew(self) -> None:
        for share, keys, values in zip(self.shares, self.keys, self.values, strict=True):
            share.keys, share.values = keys, values


def _allocate(like: Tensor, num_layers: int, batch: int, capacity: int, *, clears: bool) -> Tensor:
    """Memory for `[num_layers, B, H, capacity, D]`, like one layer's `[*, H, *, D]`; zeros where it is cleared.

    Raises:
        CacheCapacityError: There is not as much.
    """
    _, heads, _, dim = like.shape
    try:
        if not clears:
            return like.new_empty(num_layers, batch, heads, capacity, dim)
        with persistent_tensors():
            return like.new_zeros(num_layers, batch, heads, capacity, dim)
    except (RuntimeError, MemoryError) as error:
        size = num_layers * batch * heads * capacity * dim * like.itemsize
        raise CacheCapacityError(
            f"A key-value cache of {capacity} slots for {batch} rows does not fit the memory of {like.device}: the "
            f"keys (or values) of {num_layers} layers alone take {size / 1e9:.1f} GB.",
            "Shorten the prompt or max_new_tokens, or give fewer rows.",
        ) from error


class KeyValueStore:
    """The buffers of one cache: layers of one layout share one; what does not fit its layout gets one of its own.

    It knows none of the layers that draw on it, so that nothing but the cache keeps its memory alive.

    Args:
        layout: One entry per layer.
        capacity: Slots per row that are known to be needed at most.
        reserve: Slots that are kept ready behind the text while it grows; None allocates all of `capacity` at once,
            and no more.
        clears: Whether slots that nobody has written hold zeros: whoever reads them behind a mask needs numbers there.

    Attributes:
        moves: How often its memory became another.
    """

    def __init__(
        self, layout: Sequence[LayerLayout | None], capacity: int, reserve: int | None, *, clears: bool = False
    ) -> None:
        self.layout, self.limit, self.reserve, self._clears = tuple(layout), capacity, reserve, clears
        self.capacity = capacity if reserve is None else 0
        self._needed = self.capacity  # for the call that asked last
        self.moves = 0
        self.buffers: list[KeyValueBuffer] = []

    def reopen(self, capacity: int, reserve: int) -> None:
        """Hand everything out again, to another cache; its memory stays where it is."""
        self.limit, self.reserve = capacity, reserve
        for buffer in self.buffers:
            buffer.reopen()

    def allocate(self, layout: LayerLayout | None, key_states: Tensor, value_states: Tensor) -> Share:
        """One layer's share of the buffer for its layout."""
        rows = len(key_states)
        if self.buffers and (  # of a larger batch, or in another precision
            self.buffers[0].dtype != key_states.dtype or not all(buffer.has_rows(rows) for buffer in self.buffers)
        ):
            self._close()
        actual = layer_layout(key_states, value_states)
        shared = self.layout.count(actual) if layout == actual else 1
        try:
            self.make_room(key_states.shape[-2])
            for buffer in self.buffers:
                if buffer.layout == actual and len(buffer.shares) == shared and not buffer.is_full:
                    return buffer.take(rows)
            buffer = self._new_buffer(shared, key_states, value_states)
        except CacheCapacityError:
            self._close()  # a shorter call may fit: nothing of this one's sizes stays
            raise
        self.buffers.append(buffer)
        return buffer.take(rows)

    def _new_buffer(self, num_layers: int, key_states: Tensor, value_states: Tensor) -> KeyValueBuffer:
        if not self._clears:
            return KeyValueBuffer(num_layers, self.capacity, key_states, value_states)
        rows = kept_rows(len(key_states))
        try:
            return KeyValueBuffer(num_layers, self.capacity, key_states, value_states, rows=rows, clears=True)
        except CacheCapacityError:  # nothing is left for later calls: as much as this one needs
            self._move(min(self._needed, self.capacity))
            return KeyValueBuffer(num_layers, self.capacity, key_states, value_states, clears=True)

    def _close(self) -> None:
        if not self._clears:
            return  # of one call, which ends
        for buffer in self.buffers:
            buffer.close()
        self.buffers, self.capacity = [], 0
        self.moves += 1

    def make_room(self, needed: int) -> None:
        """Have at least so many slots.

        Raises:
            CacheCapacityError: More than there may be, or than there is memory for.
        """
        if needed <= self.capacity:
            return
        if self.reserve is None:
            raise CacheCapacityError(
                f"The key-value cache has {self.capacity} slots, this forward needs {needed}.",
                "Raise SpeculativeConfig.max_cache_length or leave it None.",
            )
        # half of what there is and more, so that a text of any length is moved a few times only
        ahead = needed + max(self.reserve, self.capacity // 2)
        grown = -(-ahead // CAPACITY_TIER) * CAPACITY_TIER
        if needed <= self.limit:
            grown = min(grown, self.limit)
        note_one_time_work()
        self._needed = grown
        if self._clears:  # later calls may need more: one move for all of them, where there is memory for it
            try:
                self._move(bucket_of(max(ahead, FIRST_KEPT_SLOTS)))
                return
            except CacheCapacityError:
                logger.info("There is no memory to keep more than %d slots of a key-value cache.", grown)
        self._move(grown)

    def _move(self, capacity: int) -> None:
        self.moves += bool(self.buffers)  # at once: where there is no memory for all, some have moved
        for buffer in self.buffers:
            buffer.resize(capacity)
        self.capacity = capacity


def layer_layout(key_states: Tensor, value_states: Tensor) -> LayerLayout:
    """The layout of keys `[B, H, T, Dk]` and values `[B, H, T, Dv]`."""
    return LayerLayout(
        key_states.shape[1],
        key_states.shape[-1],
        value_states.shape[-1],
        key_states.device,
        (key_states.dtype, value_states.dtype),
    )
