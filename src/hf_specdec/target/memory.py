"""The memory of a static key-value cache: one buffer for all layers of one shape, moved to a larger one as texts grow.

A text that outgrows the buffer is moved, seldom: an answer that could be long costs what it becomes. Knows nothing of
what is in it. Called by: `target/cache.py`; `target/graphs.py`, which keeps it from call to call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_specdec.errors import CacheCapacityError

RESERVED_SLOTS = 1024
"""Slots that are allocated for an answer before it is known how long it will be."""
CAPACITY_TIER = 64
"""Caches that grow have a multiple of this many slots."""


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """Shape and place of one layer's keys and values, without batch and length."""

    num_heads: int
    key_dim: int
    value_dim: int
    device: torch.device


CacheLayout = tuple[LayerLayout | None, ...]
"""One entry per layer of the model; None where the layer shares another layer's keys and values."""


class Share:
    """One layer's keys `[B, H, S, Dk]` and values `[B, H, S, Dv]`: views of a buffer, renewed where it moves."""

    __slots__ = ("keys", "values")

    keys: Tensor
    values: Tensor


class KeyValueBuffer:
    """Keys `[n, B, H, S, Dk]` and values `[n, B, H, S, Dv]` of n layers of one shape."""

    def __init__(
        self, num_layers: int, capacity: int, key_states: Tensor, value_states: Tensor, *, clears: bool = False
    ) -> None:
        self._clears, self.layout = clears, layer_layout(key_states, value_states)
        self.keys, self.values = (_allocate(num_layers, like, capacity, clears) for like in (key_states, value_states))
        self.shares = [Share() for _ in range(num_layers)]
        self.num_taken = 0
        self._renew()

    @property
    def is_full(self) -> bool:
        """Whether every layer of the buffer has been handed out."""
        return self.num_taken == len(self.shares)

    def fits(self, key_states: Tensor) -> bool:
        """Whether it was made for such keys."""
        return self.keys.dtype == key_states.dtype and self.keys.shape[1] == len(key_states)

    def take(self) -> Share:
        """The next free layer's share."""
        self.num_taken += 1
        return self.shares[self.num_taken - 1]

    def grow(self, capacity: int) -> None:
        """Move everything to larger memory; where there is none, all stays as it is."""
        moved = []
        for states in (self.keys, self.values):
            larger = _allocate(states.shape[0], states[0], capacity, self._clears)
            larger[:, :, :, : states.shape[3]] = states
            moved.append(larger)
        self.keys, self.values = moved
        self._renew()

    def reopen(self) -> None:
        """Hand its layers out again; what was in it is wiped, for it may have held what is no number."""
        self.num_taken = 0
        self.keys.zero_()
        self.values.zero_()

    def close(self) -> None:
        """Let go of the memory, whoever still knows a layer's share."""
        for share in self.shares:
            del share.keys, share.values

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


def _allocate(num_layers: int, like: Tensor, capacity: int, clears: bool) -> Tensor:
    """Memory for `[num_layers, B, H, capacity, D]`, from one layer's `[B, H, *, D]`; zeros where it is cleared.

    Raises:
        CacheCapacityError: There is not as much.
    """
    batch, heads, _, dim = like.shape
    try:
        if not clears:
            return like.new_empty(num_layers, batch, heads, capacity, dim)
        with torch.inference_mode(False):  # it stays for calls outside of it
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
        self.moves = 0
        self.buffers: list[KeyValueBuffer] = []

    def reopen(self, capacity: int, reserve: int) -> None:
        """Hand everything out again, to another cache; its memory stays where it is."""
        self.limit, self.reserve = capacity, reserve
        for buffer in self.buffers:
            buffer.reopen()

    def allocate(self, layout: LayerLayout | None, key_states: Tensor, value_states: Tensor) -> Share:
        """One layer's share of the buffer for its layout."""
        if self.buffers and not self.buffers[0].fits(key_states):  # of another batch, or in another precision
            self._close()
        actual = layer_layout(key_states, value_states)
        shared = self.layout.count(actual) if layout == actual else 1
        try:
            self.make_room(key_states.shape[-2])
            for buffer in self.buffers:
                if buffer.layout == actual and len(buffer.shares) == shared and not buffer.is_full:
                    return buffer.take()
            buffer = KeyValueBuffer(shared, self.capacity, key_states, value_states, clears=self._clears)
        except CacheCapacityError:
            self._close()  # a shorter call may fit: nothing of this one's sizes stays
            raise
        self.buffers.append(buffer)
        return buffer.take()

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
        self.moves += bool(self.buffers)  # at once: where there is no memory for all, some have moved
        for buffer in self.buffers:
            buffer.grow(grown)
        self.capacity = grown


def layer_layout(key_states: Tensor, value_states: Tensor) -> LayerLayout:
    """The layout of keys `[B, H, T, Dk]` and values `[B, H, T, Dv]`."""
    return LayerLayout(key_states.shape[1], key_states.shape[-1], value_states.shape[-1], key_states.device)
