"""The static key-value cache: one preallocated buffer for all layers, in which a tree is tried and its path kept.

A text that outgrows the buffer is moved to a larger one, seldom: an answer that could be long costs what it becomes.

Three verbs: *append* (transformers' layers call `update`), *commit* (keep one path per row), *reset*. Committed
tokens of row b sit in slots `0 .. lengths[b]-1`; a tree is appended at slot `start = max(lengths)` for every row,
so that appending is one contiguous copy even where rows have accepted different numbers of tokens. Every layer
holds the full length, sliding-window layers too: their window is in the mask (`masks.py`).

The only file that knows transformers' caches. Called by: `target/target.py`, the EAGLE drafter. See docs/cache.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, StaticCache
from transformers.cache_utils import CacheLayerMixin

from hf_specdec.errors import CacheCapacityError, UnsupportedGenerationError

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

    def __init__(self, num_layers: int, capacity: int, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = (_allocate(num_layers, like, capacity) for like in (key_states, value_states))
        self.shares: list[Share] = []

    @property
    def is_full(self) -> bool:
        """Whether every layer of the buffer has been handed out."""
        return len(self.shares) == self.keys.shape[0]

    def take(self) -> Share:
        """The next free layer's share."""
        self.shares.append(Share())
        self._renew()
        return self.shares[-1]

    def grow(self, capacity: int) -> None:
        """Move everything to larger memory."""
        for name in ("keys", "values"):
            states: Tensor = getattr(self, name)
            moved = _allocate(states.shape[0], states[0], capacity)
            moved[:, :, :, : states.shape[3]] = states
            setattr(self, name, moved)
        self._renew()

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
        for share, keys, values in zip(self.shares, self.keys, self.values, strict=False):
            share.keys, share.values = keys, values


def _allocate(num_layers: int, like: Tensor, capacity: int) -> Tensor:
    """Memory for `[num_layers, B, H, capacity, D]`, from one layer's `[B, H, *, D]`.

    Raises:
        CacheCapacityError: There is not as much.
    """
    batch, heads, _, dim = like.shape
    try:
        return like.new_empty(num_layers, batch, heads, capacity, dim)
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
    """

    def __init__(self, layout: Sequence[LayerLayout | None], capacity: int, reserve: int | None) -> None:
        self.layout, self.limit, self.reserve = tuple(layout), capacity, reserve
        self.capacity = capacity if reserve is None else 0
        self.buffers: list[KeyValueBuffer] = []
        self._open: dict[LayerLayout, KeyValueBuffer] = {}

    def allocate(self, layout: LayerLayout | None, key_states: Tensor, value_states: Tensor) -> Share:
        """One layer's share of the buffer for its layout."""
        self.make_room(key_states.shape[-2])
        actual = layer_layout(key_states, value_states)
        buffer = self._open.get(actual)
        if layout != actual or buffer is None or buffer.is_full:
            shared = self.layout.count(actual) if layout == actual else 1
            buffer = KeyValueBuffer(shared, self.capacity, key_states, value_states)
            self.buffers.append(buffer)
            if layout == actual:
                self._open[actual] = buffer
        return buffer.take()

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
        for buffer in self.buffers:
            buffer.grow(grown)
        self.capacity = grown


class TreeLayer(CacheLayerMixin):
    """One layer's view of the cache's buffer, in the shape transformers' attention expects."""

    is_sliding = False

    def __init__(self, store: KeyValueStore, layout: LayerLayout | None) -> None:
        self.store = store
        self.layout = layout
        self.end = 0  # slots written, committed or not
        self.is_initialized = False

    @property
    def keys(self) -> Tensor:
        """`[B, H, capacity, Dk]`."""
        return self._share.keys

    @property
    def values(self) -> Tensor:
        """`[B, H, capacity, Dv]`."""
        return self._share.values

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take this layer's share of the buffer at the first forward, which knows batch size and dtype."""
        self._share = self.store.allocate(self.layout, key_states, value_states)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append T tokens and return everything written so far: `[B, H, end, D]` views of the buffer."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        begin, self.end = self.end, self.end + key_states.shape[-2]
        self.store.make_room(self.end)
        keys, values = self._share.keys, self._share.values
        keys[:, :, begin : self.end] = key_states
        values[:, :, begin : self.end] = value_states
        return keys[:, :, : self.end], values[:, :, : self.end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Key length and offset that transformers' own masks (at prefill) must have."""
        return self.end + query_length, 0

    def get_seq_length(self) -> int:
        """Slots written so far."""
        return self.end

    def get_max_length(self) -> int:
        """Slots there may be."""
        return self.store.limit

    def get_max_cache_shape(self) -> int:
        """The name transformers 5.17 has for `get_max_length`."""
        return self.store.limit


class TreeCache(Cache):
    """The target's key-value cache during speculation, and the drafter's.

    Bytes: `sum over layers of B * capacity * H * (Dk + Dv) * bytes(dtype)`, see `num_bytes`.

    Args:
        layout: One entry per layer, from `probe.inspect_target`; layers of one layout share one buffer. A layer
            whose first keys do not fit its layout gets a buffer of its own.
        capacity: Slots per row that will be needed at most.
        reserve: Slots kept ready behind the text: the buffers are moved to larger ones as it grows, also beyond
            `capacity`. None allocates all of `capacity` with the first forward, and no more ever.
    """

    def __init__(self, layout: Sequence[LayerLayout | None], capacity: int, reserve: int | None = None) -> None:
        self.store = KeyValueStore(layout, capacity, reserve)
        super().__init__(layers=[TreeLayer(self.store, entry) for entry in layout])
        self.lengths: list[int] = []  # committed tokens of each row; empty before the first commit
        self._lengths: Tensor | None = None  # the same on the device that last asked
        self._adopted: Cache | None = None

    @property
    def capacity(self) -> int:
        """Slots per row that are allocated."""
        return self.store.capacity

    @property
    def buffers(self) -> list[KeyValueBuffer]:
        """The buffers of all layers."""
        return self.store.buffers

    @property
    def start(self) -> int:
        """The slot at which the next tree is appended."""
        return max(self.lengths, default=0)

    @property
    def num_bytes(self) -> int:
        """Bytes allocated for keys and values."""
        return sum(states.nbytes for buffer in self.buffers for states in (buffer.keys, buffer.values))

    def lengths_on(self, device: torch.device, batch_size: int) -> Tensor:
        """`[B]` committed tokens of each row; kept on the device, so that a step uploads nothing."""
        if self._lengths is None or self._lengths.device != device or len(self._lengths) != batch_size:
            self._lengths = torch.tensor(self.lengths or [0] * batch_size, device=device)
        return self._lengths

    def commit(self, path: Tensor, nodes: Sequence[Sequence[int]]) -> None:
        """Keep one path per row of what was appended since the last commit, in place; forget the rest.

        Args:
            path: `[B, P]` appended nodes that are kept, in order, counted from `start`; -1 beyond a row's path.
            nodes: The same on the host, without padding.

        Example: with 5 committed tokens, path [0, 2] moves slots 5 and 7 to 5 and 6; the row then has 7 tokens.
        """
        start, lengths = self.start, self.lengths or [0] * len(nodes)
        device_lengths = self.lengths_on(path.device, len(nodes))
        moved = [
            place
            for kept, length in zip(nodes, lengths, strict=True)
            for place, node in enumerate(kept)
            if start + node != length + place
        ]
        if moved:  # what stands before the first of them stays where it is in every row
            first = min(moved)
            targets = device_lengths[:, None] + torch.arange(first, path.shape[1], device=path.device)
            sources = torch.where(path[:, first:] >= 0, start + path[:, first:], targets)
            for buffer in self.buffers:
                buffer.move(sources.to(buffer.keys.device), targets.to(buffer.keys.device))
        self.lengths = [length + len(kept) for length, kept in zip(lengths, nodes, strict=True)]
        self._lengths = device_lengths + (path >= 0).sum(-1)
        self._rewind()

    def commit_all(self, batch_size: int, num_tokens: int) -> None:
        """Keep everything that was appended, in every row: a prompt of that many tokens, and what was put before."""
        end = max(layer.end for layer in self.layers)
        self.lengths, self._lengths = [end] * batch_size, None

    def rollback(self) -> None:
        """Forget everything appended since the last commit."""
        self._rewind()

    def reset(self) -> None:
        """Forget everything; the buffers stay."""
        self.lengths, self._lengths = [], None
        self._rewind()

    def adopt(self, cache: Cache) -> None:
        """Continue a cache of transformers': copy what it holds; it is written to in `hand_back` only.

        Raises:
            UnsupportedGenerationError: Its layers are not plain keys and values.
        """
        length = seen_tokens(cache)
        self._adopted = cache
        if length == 0:
            return
        for mine, given in zip(self.layers, cache.layers, strict=False):
            if getattr(given, "is_initialized", False):
                keys, values = given.keys[:, :, :length], given.values[:, :, :length]
                mine.lazy_initialization(keys, values)
                first = length - keys.shape[2]  # a sliding layer holds its window only; no mask shows what was before
                for states, source in ((mine.keys, keys), (mine.values, values)):
                    states[:, :, :first] = 0
                    states[:, :, first:length] = source
                mine.end = length
                self.lengths, self._lengths = [length] * keys.shape[0], None

    def hand_back(self, config: object) -> Cache:
        """The committed tokens as transformers' own cache: the adopted one, or a new dynamic one.

        All rows must have one length. Going on with plain `generate()` is possible.
        """
        cache = DynamicCache(config=config) if self._adopted is None else self._adopted
        known = seen_tokens(cache)
        for index, layer in enumerate(self.layers):
            if layer.is_initialized:
                cache.update(layer.keys[:, :, known : self.start], layer.values[:, :, known : self.start], index)
        return cache

    def _rewind(self) -> None:
        for layer in self.layers:
            if layer.is_initialized:
                layer.end = self.start


def layer_layout(key_states: Tensor, value_states: Tensor) -> LayerLayout:
    """The layout of keys `[B, H, T, Dk]` and values `[B, H, T, Dv]`."""
    return LayerLayout(key_states.shape[1], key_states.shape[-1], value_states.shape[-1], key_states.device)


def measured_layout(cache: TreeCache) -> CacheLayout:
    """The layout of a cache that has been through a forward."""
    return tuple(layer_layout(layer.keys, layer.values) if layer.is_initialized else None for layer in cache.layers)


ADOPTED_LAYERS = frozenset({"DynamicLayer", "DynamicSlidingWindowLayer", "StaticLayer", "DummyLayer"})
"""transformers' layers that hold plain keys and values, or (a dummy) share another layer's."""


def seen_tokens(cache: Cache) -> int:
    """Tokens that a cache of transformers' holds.

    Raises:
        UnsupportedGenerationError: It is offloaded, quantised, or holds something else than keys and values.
    """
    strange = {type(layer).__name__ for layer in cache.layers} - ADOPTED_LAYERS
    if type(cache) not in (DynamicCache, StaticCache) or strange or cache.offloading:
        raise UnsupportedGenerationError(
            f"`speculative` continues a DynamicCache, or a StaticCache without sliding windows, as `past_key_values`; "
            f"got a {type(cache).__name__}"
            f"{' of ' + ', '.join(sorted(strange)) if strange else ''}{', offloaded' if cache.offloading else ''}.",
            "Pass such a cache, or drop one of the two.",
        )
    return int(cache.get_seq_length())


def layer_windows(config: object) -> list[int | None]:
    """Per layer, how many slots its keys reach back in transformers' own cache; None is all of them."""
    return [getattr(layer, "sliding_window", None) for layer in DynamicCache(config=config).layers]
