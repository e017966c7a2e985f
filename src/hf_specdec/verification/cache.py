"""The static key-value cache: preallocated memory (`memory.py`), in which a tree is tried and its path kept.

Three verbs: *append* (transformers' layers call `update`), *commit* (keep one path per row), *reset*. Committed
tokens of row b sit in slots `0 .. lengths[b]-1`; a tree is appended at slot `start = max(lengths)` for every row,
so that appending is one contiguous copy even where rows have accepted different numbers of tokens. Every layer
holds the full length, sliding-window layers too: their window is in the mask (`masks.py`).

The only file that knows transformers' caches. See docs/cache.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, StaticCache
from transformers.cache_utils import CacheLayerMixin

from hf_specdec.errors import UnsupportedGenerationError
from hf_specdec.verification.memory import CacheLayout, KeyValueBuffer, KeyValueStore, LayerLayout, Share, layer_layout
from hf_specdec.verification.model import CACHE_FIELD


class TreeLayer(CacheLayerMixin):
    """One layer's view of the cache's buffer, in the shape transformers' attention expects."""

    def __init__(self, store: KeyValueStore, layout: LayerLayout | None) -> None:
        self.store, self.layout = store, layout
        self.window: int | None = None  # while a prompt is read, see `TreeCache.begin_prompt`
        self.share: Share | None = None  # of the store, from the first forward on
        self.end = 0  # slots written, committed or not
        self.is_initialized = False

    @property
    def is_sliding(self) -> bool:
        """Whether transformers' own masks (at prefill) are those of a window."""
        return self.window is not None

    @property
    def keys(self) -> Tensor:
        """`[B, H, capacity, Dk]`."""
        return self._taken.keys

    @property
    def values(self) -> Tensor:
        """`[B, H, capacity, Dv]`."""
        return self._taken.values

    @property
    def _taken(self) -> Share:
        assert self.share is not None
        return self.share

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take this layer's share of the buffer at the first forward, which knows batch size and dtype."""
        self.share = self.store.allocate(self.layout, key_states, value_states)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append T tokens and return everything written so far: `[B, H, end, D]` views of the buffer.

        While a prompt is read, a layer with a window returns what transformers' own would: the window and T tokens.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        begin, first, self.end = self.end, self._first_seen, self.end + key_states.shape[-2]
        self.store.make_room(self.end)
        keys, values = self._taken.keys, self._taken.values
        keys[:, :, begin : self.end] = key_states
        values[:, :, begin : self.end] = value_states
        return keys[:, :, first : self.end], values[:, :, first : self.end]

    @property
    def _first_seen(self) -> int:
        return 0 if self.window is None else max(self.end - self.window + 1, 0)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Key length and offset that transformers' own masks (at prefill) must have."""
        return self.end - self._first_seen + query_length, self._first_seen

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
        store: Memory of former calls, reopened for these sizes; None takes new memory.
    """

    def __init__(
        self, layout: Sequence[LayerLayout | None], capacity: int, reserve: int | None = None,
        store: KeyValueStore | None = None,
    ) -> None:  # fmt: skip
        self.store = KeyValueStore(layout, capacity, reserve) if store is None else store
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
            self._lengths = torch.tensor(self.lengths or [0] * batch_size, dtype=torch.long, device=device)
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

    def commit_unread(self, path: Tensor) -> None:
        """Keep one path per row, like `commit`, before the host has read how long the paths are.

        The lengths on the device are exact at once; `lengths` and `start` count all P columns as kept until
        `correct_lengths` is called.

        Args:
            path: See `commit`.
        """
        start, device_lengths = self.start, self.lengths_on(path.device, len(path))
        targets = device_lengths[:, None] + torch.arange(path.shape[1], device=path.device)
        sources = torch.where(path >= 0, start + path, targets)
        for buffer in self.buffers:
            buffer.move(sources.to(buffer.keys.device), targets.to(buffer.keys.device))
        self.append_unread(path.shape[1], device_lengths + (path >= 0).sum(-1))

    def append_unread(self, num_slots: int, lengths: Tensor) -> None:
        """Note that at most so many tokens were committed in every row, and on the device how many there are `[B]`."""
        self.lengths = [length + num_slots for length in self.lengths or [0] * len(lengths)]
        self._lengths = lengths
        self._rewind()

    def correct_lengths(self, lengths: Sequence[int]) -> None:
        """Set the exact number of committed tokens of each row after `commit_unread`."""
        self.lengths = list(lengths)
        self._rewind()

    def begin_prompt(self, windows: Sequence[int | None]) -> None:
        """Until `commit_all`, return from each layer what transformers' own cache would.

        Some models build full causal masks over caches with windows: a prompt in chunks, or after a handed-in cache,
        depends on what the cache has dropped.

        Args:
            windows: Of each layer, see `layer_windows`.
        """
        for layer, window in zip(self.layers, windows, strict=False):
            layer.window = window

    def commit_all(self, batch_size: int, num_tokens: int) -> None:
        """Keep everything that was appended, in every row: a prompt of that many tokens, and what was put before."""
        self.begin_prompt([None] * len(self.layers))
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


def measured_layout(cache: TreeCache) -> CacheLayout:
    """The layout of a cache that has been through a forward."""
    return tuple(layer_layout(layer.keys, layer.values) if layer.is_initialized else None for layer in cache.layers)


ADOPTED_LAYERS = frozenset({"DynamicLayer", "DynamicSlidingWindowLayer", "StaticLayer", "DummyLayer"})
"""transformers' layers that hold plain keys and values, or (a dummy) share another layer's."""


def seen_tokens(cache: Any) -> int:
    """Tokens that a cache of transformers' holds.

    Raises:
        UnsupportedGenerationError: It is no cache, is offloaded or quantised, or holds more than keys and values.
    """
    known = type(cache) in (DynamicCache, StaticCache)
    strange = {type(layer).__name__ for layer in cache.layers} - ADOPTED_LAYERS if known else set()
    if not known or strange or cache.offloading:
        raise UnsupportedGenerationError(
            f"`speculative` continues a DynamicCache, or a StaticCache without sliding windows, as `{CACHE_FIELD}`; "
            f"got {type(cache).__name__}{' of ' + ', '.join(sorted(strange)) if strange else ''}"
            f"{', offloaded' if known and cache.offloading else ''}.",
            "Pass such a cache, or drop one of the two.",
        )
    return int(cache.get_seq_length())


def check_fits(cache: Cache, layout: CacheLayout, rows: int) -> None:
    """Compare a cache of transformers' with the one that the model fills.

    Args:
        cache: Passed `seen_tokens`.
        layout: What the probe measured.
        rows: Prompts of the call, each as often as it is answered.

    Raises:
        UnsupportedGenerationError: Another model filled it, or it was filled for other prompts.
    """
    held = {index: layer for index, layer in enumerate(cache.layers) if getattr(layer, "is_initialized", False)}
    wanted = {index: entry for index, entry in enumerate(layout) if entry is not None}
    length, in_layer = seen_tokens(cache), dict[int, int]()
    if isinstance(cache, DynamicCache):  # a static layer keeps the number on its device
        in_layer = {index: layer.get_seq_length() for index, layer in held.items()}
        length = max([length, *in_layer.values()])
    if length and held.keys() != wanted.keys():
        _refuse(
            f"has {len(held)} filled layers, the model fills {len(wanted)}", "Pass a cache that this model filled."
        )
    for index in held.keys() & wanted.keys():
        layer, entry = held[index], wanted[index]
        if len(layer.keys) != rows:
            _refuse(
                f"has {len(layer.keys)} rows, the prompt has {rows}", "Give as many prompts as the cache has rows."
            )
        found = layer_layout(layer.keys, layer.values)
        if found != entry:
            _refuse(f"holds in layer {index} {_shape(found)}, the model {_shape(entry)}", "Pass one that fits it.")
        if found.dtypes != entry.dtypes and not torch.is_autocast_enabled(entry.device.type):
            _refuse(f"holds {_types(found)}, the model computes {_types(entry)}", "Pass one that this model filled.")
        window = getattr(layer, "sliding_window", None) or length + 1
        if in_layer.get(index, length) < length or layer.keys.shape[2] < min(length, window - 1):
            _refuse(f"has {layer.keys.shape[2]} of {length} tokens in layer {index}", "Fill or cut all layers alike.")


def _refuse(what: str, hint: str) -> None:
    raise UnsupportedGenerationError(f"The cache handed in as `{CACHE_FIELD}` {what}.", hint)


def _types(entry: LayerLayout) -> str:
    return " and ".join(dict.fromkeys(map(str, entry.dtypes or ())))


def _shape(entry: LayerLayout) -> str:
    return f"{entry.num_heads} heads of {entry.key_dim} and {entry.value_dim} channels on {entry.device}"


def layer_windows(config: object) -> list[int | None]:
    """Per layer, how many slots its keys reach back in transformers' own cache; None is all of them."""
    return [getattr(layer, "sliding_window", None) for layer in DynamicCache(config=config).layers]
