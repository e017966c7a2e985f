"""The static key-value cache, which holds committed tokens and one tree under verification.

Operations: *append* (transformers' layers call `update`), *commit* (keep one path per row), *rollback*. Committed
tokens of row b occupy slots `0 .. lengths[b]-1`; a tree is appended at slot `start = max(lengths)` in every row, so
that appending is one contiguous copy even if rows have accepted different numbers of tokens. Every layer holds the
full length, including sliding-window layers: their window is in the mask (`masks.py`). Recurrent layers hold a state
per row instead, see `recurrent_layer.py`. See docs/cache.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, StaticCache
from transformers.cache_utils import CacheLayerMixin

from hf_specdec.errors import UnsupportedGenerationError
from hf_specdec.host_sync import upload
from hf_specdec.verification.features import PromptPadding
from hf_specdec.verification.masks import UNBOUNDED, Positions
from hf_specdec.verification.memory import CacheLayout, KeyValueBuffer, KeyValueStore, LayerLayout, Share
from hf_specdec.verification.model import CACHE_FIELD
from hf_specdec.verification.recurrent_layer import (
    NONE_RECURRENT,
    RECURRENT_LAYERS,
    RecurrentLayer,
    RecurrentLayout,
    RecurrentState,
    state_shapes,
)


@dataclass(frozen=True, slots=True)
class ActiveRows:
    """The rows of a batch that are still computed: finished rows leave the cache, and forwards get smaller.

    Drafts, logits and features keep one entry per row of the batch; a target selects the active rows before its
    forward and fills the others with zeros afterwards.
    """

    rows: tuple[int, ...]  # row of the batch by row of the cache
    num_rows: int  # of the batch
    index: Tensor  # `rows` as a tensor [R], on the device of the tokens
    padding: PromptPadding | None  # of these rows
    positions: Positions  # of these rows

    def in_batch(self, states: Tensor) -> Tensor:
        """Return `[B, ...]` with the given `[R, ...]` in these rows and zeros in the others."""
        whole = states.new_zeros(self.num_rows, *states.shape[1:])
        return whole.index_copy_(0, self.index.to(states.device), states)


def drop_order(count: int, active: Sequence[int]) -> list[int]:
    """Return the rows of a cache of `count` rows to keep, so that few move: gaps are filled with the last rows.

    Example: of 6 rows, keeping 0, 2, 3 and 5 gives [0, 5, 2, 3]: only row 5 moves.
    """
    size, kept = len(active), set(active)
    last = iter(row for row in range(count - 1, size - 1, -1) if row in kept)
    return [row if row in kept else next(last) for row in range(size)]


class TreeLayer(CacheLayerMixin):
    """One layer's view of the cache's buffer, with the interface that transformers' attention expects.

    The expected layout is None if it is unknown, or if the layer stores no keys and values.
    """

    def __init__(self, store: KeyValueStore, layout: LayerLayout | None) -> None:
        self.store, self.layout = store, layout
        self.window: int | None = None  # set during prefill, see `TreeCache.begin_prompt`
        self.share: Share | None = None  # allocated by the first forward
        self.end = 0  # slots written, committed or not
        self.is_initialized = False

    @property
    def is_sliding(self) -> bool:
        """Whether transformers builds a sliding-window mask for this layer during prefill."""
        return self.window is not None

    @property
    def keys(self) -> Tensor:
        """Keys `[B, H, capacity, Dk]`, including slots that are not written yet."""
        assert self.share is not None
        return self.share.keys

    @property
    def values(self) -> Tensor:
        """Values `[B, H, capacity, Dv]`, including slots that are not written yet."""
        assert self.share is not None
        return self.share.values

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate memory for keys and values like the given `[B, H, T, D]`, see `KeyValueStore.allocate`."""
        self.share = self.store.allocate(self.layout, key_states, value_states)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append keys and values `[B, H, T, D]` and return views `[B, H, end, D]` of all slots written so far.

        During prefill, a sliding-window layer returns only the slots that the new tokens can see, as in transformers.
        """
        first = self._first_seen
        keys, values, begin = self.reserve(key_states, value_states)
        keys[:, :, begin : self.end] = key_states
        values[:, :, begin : self.end] = value_states
        return keys[:, :, first : self.end], values[:, :, first : self.end]

    def reserve(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor, int]:
        """Make room for keys and values `[B, H, T, D]` that the caller writes; see `reserve_slots`."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return self.reserve_slots(key_states.shape[-2])

    def reserve_slots(self, count: int) -> tuple[Tensor, Tensor, int]:
        """Count `count` more slots as written, and return all keys and values, and the slot at which they begin."""
        begin, self.end = self.end, self.end + count
        self.store.make_room(self.end)
        return self.keys, self.values, begin

    @property
    def _first_seen(self) -> int:
        return 0 if self.window is None else max(self.end - self.window + 1, 0)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return key length and offset of the masks that transformers builds during prefill."""
        return self.end - self._first_seen + query_length, self._first_seen

    def get_seq_length(self) -> int:
        """Return the number of slots written so far."""
        return self.end

    def get_max_length(self) -> int:
        """Return the expected maximum number of slots, which a growing cache can exceed."""
        return self.store.limit

    get_max_cache_shape = get_max_length  # transformers 5.17 calls this one


class HybridLayer(RecurrentLayer, TreeLayer):
    """Layer with keys and values as well as recurrent states (Falcon-H1, Zamba, Inkling)."""

    is_initialized = False

    def __init__(self, store: KeyValueStore, layout: LayerLayout | None, state: RecurrentState) -> None:
        TreeLayer.__init__(self, store, layout)
        RecurrentLayer.__init__(self, state)

    def lazy_initialization(self, *keys_and_values: Any, **states: Any) -> None:
        """Allocate memory for keys and values, or for states."""
        if keys_and_values:
            TreeLayer.lazy_initialization(self, *keys_and_values)
        else:
            RecurrentLayer.lazy_initialization(self, **states)


class FixedLayer(CacheLayerMixin):
    """Base of cache layers inside programs and graphs, where memory and masks are given and no length is limited."""

    is_sliding = False
    is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the memory exists, or none is needed."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return key length and offset of a mask; unused, because the masks are passed to the forward."""
        return query_length, 0

    def get_max_length(self) -> int:
        """Return -1: no limit."""
        return -1

    get_max_cache_shape = get_max_length  # transformers 5.17 calls this one


class TreeCache(Cache):
    """Static key-value cache of the target, and of drafters that need one.

    Size in bytes: `sum over layers of B * capacity * H * (Dk + Dv) * bytes(dtype)`.

    Args:
        layout: One entry per layer, from `probe.inspect_target`; layers with equal layouts share one buffer. A layer
            whose first keys do not match its layout gets a separate buffer.
        capacity: Expected maximum number of slots per row.
        reserve: Minimum number of free slots that each reallocation adds as the text grows; capped at `capacity` until
            the text exceeds it. None allocates `capacity` slots with the first forward and never grows.
        store: Memory kept from earlier calls, already reopened for these sizes; None allocates new memory.
        recurrent: Layers with recurrent states.
        states: Their memory, if it is kept between calls and reopened for this one.
    """

    def __init__(
        self, layout: CacheLayout, capacity: int, reserve: int | None = None, store: KeyValueStore | None = None,
        recurrent: RecurrentLayout = NONE_RECURRENT,
        states: Mapping[int, RecurrentState] | None = None,
    ) -> None:  # fmt: skip
        self.store = KeyValueStore(layout, capacity, reserve) if store is None else store
        self.states = states or {index: RecurrentState(number) for index, (number, _) in recurrent.items()}
        layers = list[Any]()
        for index, entry in enumerate(layout):
            if index not in recurrent:
                layers.append(TreeLayer(self.store, entry))
            elif recurrent[index][1]:
                layers.append(HybridLayer(self.store, entry, self.states[index]))
            else:
                layers.append(RecurrentLayer(self.states[index]))
        super().__init__(layers=layers)
        self._attention = [layer for layer in layers if isinstance(layer, TreeLayer)]
        self.lengths: list[int] = []  # committed tokens of each row; empty before the first commit
        self._lengths: Tensor | None = None  # the same on the device last passed to `lengths_on`
        self._adopted: Cache | None = None
        self.active: ActiveRows | None = None  # None: all rows of the batch

    @property
    def capacity(self) -> int:
        """Number of allocated slots per row."""
        return self.store.capacity

    @property
    def buffers(self) -> list[KeyValueBuffer]:
        """Key-value buffers; each holds one or more layers."""
        return self.store.buffers

    @property
    def start(self) -> int:
        """Slot at which the next tree is appended."""
        return max(self.lengths, default=0)

    @property
    def num_written(self) -> int:
        """Number of slots that every layer in use has written, committed or not; unbounded if none has slots."""
        if self.states and not any(any(state.has_previous.values()) for state in self.states.values()):
            return 0
        ends = (layer.end for layer in self._attention if layer.is_initialized)
        return min(ends, default=0 if self._attention else UNBOUNDED)

    def lengths_on(self, device: torch.device, batch_size: int) -> Tensor:
        """Return the number of committed tokens of each row, `[B]` on `device`, cached there; 0 before the prompt."""
        if self._lengths is None or self._lengths.device != device or len(self._lengths) != batch_size:
            self._lengths = upload(self.lengths or [0] * batch_size, torch.long, device)
        return self._lengths

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep one path per row of the nodes appended since the last commit, in place; discard the rest.

        A path holds nodes counted from `start`, in order.

        Example: with 5 committed tokens, path [0, 2] moves slots 5 and 7 to 5 and 6; the row then has 7 tokens.
        """
        start, lengths = self.start, self.lengths or [0] * len(paths)
        moved = [
            index
            for kept, length in zip(paths, lengths, strict=True)
            for index, node in enumerate(kept)
            if start + node != length + index
        ]  # nodes before the first moved one are already in place in every row
        if moved:
            columns = range(min(moved), max(map(len, paths)))
            targets = [[length + index for index in columns] for length in lengths]
            sources = [
                [start + kept[index] if index < len(kept) else length + index for index in columns]
                for kept, length in zip(paths, lengths, strict=True)
            ]
            for buffer in self.buffers:
                buffer.move(*upload([sources, targets], torch.long, buffer.keys.device))
        if self.states and any(paths):
            width = max(map(len, paths))
            padded = [[*kept, *[-1] * (width - len(kept))] for kept in paths]
            used = (state for state in self.states.values() if any(state.has_previous.values()))
            self._commit_states(upload(padded, torch.long, next(used).device))
        self._commit_lengths([length + len(kept) for length, kept in zip(lengths, paths, strict=True)], None)

    def commit_unread(self, path: Tensor) -> None:
        """Keep one path per row, like `commit`, before the host has read the paths; see `append_unread`.

        The path `[B, P]` is on the device, with -1 after its end.
        """
        lengths = self.lengths_on(path.device, len(path))
        targets = lengths[:, None] + torch.arange(path.shape[1], device=path.device)
        sources = torch.where(path >= 0, self.start + path, targets)
        for buffer in self.buffers:
            buffer.move(sources, targets)
        self._commit_states(path)
        self.append_unread(path.shape[1], lengths + (path >= 0).sum(-1))

    def _commit_states(self, path: Tensor) -> None:
        for state in self.states.values():
            if any(state.has_previous.values()):
                state.commit(path)

    def append_unread(self, num_slots: int, lengths: Tensor) -> None:
        """Commit up to `num_slots` appended tokens per row; only the device knows the exact new `lengths` `[B]`.

        Until `correct_lengths` is called, `lengths` and `start` count all of them.
        """
        self._commit_lengths([length + num_slots for length in self.lengths or [0] * len(lengths)], lengths)

    def correct_lengths(self, lengths: Sequence[int]) -> None:
        """Set the exact number of committed tokens of each row after `commit_unread` or `append_unread`."""
        self.lengths = list(lengths)
        self.rollback()

    def _commit_lengths(self, lengths: list[int], on_device: Tensor | None) -> None:
        """Set the committed lengths of all rows on the host and, if known, on the device; discard all other slots."""
        self.lengths, self._lengths = lengths, on_device
        self.rollback()

    def keep_rows(self, active: ActiveRows, rows: Sequence[int]) -> None:
        """Drop all rows but some, in place: the memory of row `rows[i]`, which is i or larger, moves to row i.

        `active` are the rows of the batch that they stand for, in the same order.
        """
        device = active.index.device
        lengths = self.lengths_on(device, len(self.lengths))
        for buffer in self.buffers:
            buffer.keep_rows(rows, self.start)
        for state in self.states.values():
            state.keep_rows(rows)
        kept = lengths[torch.tensor(rows, dtype=torch.long, device=device)]
        self._commit_lengths([self.lengths[row] for row in rows], kept)
        self.active = active

    def keep(self, slots: Tensor) -> None:
        """Move the committed tokens in `[B, K]` ascending slots to the first K slots, in place; discard all others."""
        rows, count = slots.shape
        targets = torch.arange(count, dtype=torch.long, device=slots.device).expand_as(slots)
        for buffer in self.buffers:
            buffer.move(slots, targets)
        self._commit_lengths([count] * rows, torch.full((rows,), count, dtype=torch.long, device=slots.device))

    def begin_prompt(self, windows: Sequence[int | None]) -> None:
        """Make each layer return the same keys as transformers' own cache until `commit_all`, see `layer_windows`.

        Some models build full causal masks over caches with windows. A prefill in chunks or after an adopted cache
        then depends on which tokens the cache has dropped.
        """
        for layer, window in zip(self.layers, windows, strict=False):
            if isinstance(layer, TreeLayer):
                layer.window = window

    def commit_all(self, batch_size: int, num_tokens: int) -> None:
        """Commit everything appended, in every row: the slots that layers count, or `num_tokens` if none has slots."""
        self.begin_prompt([None] * len(self.layers))
        length = max((layer.end for layer in self._attention), default=self.start + num_tokens)
        self.lengths, self._lengths = [length] * batch_size, None

    def rollback(self) -> None:
        """Discard everything appended since the last commit."""
        for layer in self._attention:
            if layer.is_initialized:
                layer.end = self.start

    def adopt(self, cache: Cache) -> None:
        """Copy the tokens of a transformers cache, see `seen_tokens`; it is not modified until `hand_back`."""
        self._adopted = cache
        self._copy(cache)

    def replace(self, cache: Cache) -> None:
        """Replace all tokens by those of a transformers cache; those beyond the committed ones are not committed.

        A cache passed by the user gets the tokens committed so far, and no more, as in plain `generate()`.
        """
        if self._adopted is not None:
            self.hand_back(None)
        committed, self._adopted = self.lengths, None
        self._commit_lengths([], None)
        self._copy(cache)
        self.lengths = committed

    def _copy(self, cache: Cache) -> None:
        length = seen_tokens(cache)
        for index in self.states:
            self.layers[index].adopt(cache.layers[index])
        for index, source in filled_layers(cache).items() if length else ():
            layer: TreeLayer = self.layers[index]
            keys, values = source.keys[:, :, :length], source.values[:, :, :length]
            if not layer.is_initialized:
                layer.lazy_initialization(keys, values)
            layer.reserve_slots(length)
            first = length - keys.shape[2]  # a sliding layer holds only its window; masks hide the slots before
            for states, copied in ((layer.keys, keys), (layer.values, values)):
                states[:, :, :first] = 0
                states[:, :, first:length] = copied
            self.lengths, self._lengths = [length] * keys.shape[0], None

    def hand_back(self, config: object) -> Cache:
        """Return the committed tokens as a transformers cache: the adopted one, or a new `DynamicCache`.

        All rows must have the same length. Plain `generate()` can continue from the result.
        """
        cache = DynamicCache(config=config) if self._adopted is None else self._adopted
        known = seen_tokens(cache)
        for index, layer in enumerate(self.layers):
            if isinstance(layer, RecurrentLayer):
                layer.hand_back(cache.layers[index])
            if layer.is_initialized:
                cache.update(layer.keys[:, :, known : self.start], layer.values[:, :, known : self.start], index)
        return cache


def measured_layout(cache: TreeCache) -> CacheLayout:
    """Return the layout of a cache after a forward; None for layers that stored no keys and values."""
    return tuple(LayerLayout.of(layer.keys, layer.values) if layer.is_initialized else None for layer in cache.layers)


# ----------------------------------------------------------------------------------------------- transformers' caches

ADOPTED_LAYERS = frozenset({
    "DynamicLayer", "DynamicSlidingWindowLayer", "StaticLayer", "DummyLayer", *RECURRENT_LAYERS,
})  # fmt: skip
"""transformers' layer classes that hold plain keys and values or recurrent states, or share those of others."""

WRITTEN_LAYERS = frozenset({"StaticSlidingWindowLayer"})
"""transformers' layer classes that can be filled in `TreeCache.hand_back`, but not read: they hold a moving window."""


def layer_windows(config: object) -> list[int | None]:
    """Return each layer's sliding window in transformers' own cache; None for layers that keep all tokens."""
    return [getattr(layer, "sliding_window", None) for layer in DynamicCache(config=config).layers]


def filled_layers(cache: Cache) -> dict[int, Any]:
    """Return the layers of a transformers cache that hold keys and values, by index; a `DummyLayer` never does."""
    return {index: layer for index, layer in enumerate(cache.layers) if getattr(layer, "keys", None) is not None}


def seen_tokens(cache: Any) -> int:
    """Return the number of tokens in a transformers cache that a caller passes to `generate()`.

    Refuses all but exact `DynamicCache` and `StaticCache` objects that are not offloaded, with layers of classes in
    `ADOPTED_LAYERS`, or empty ones in `WRITTEN_LAYERS`.
    """
    if type(cache) not in (DynamicCache, StaticCache):
        raise UnsupportedGenerationError(
            f"With `speculative`, `{CACHE_FIELD}` must be a DynamicCache or StaticCache, got {type(cache).__name__}.",
            f"Pass such a cache, or omit `speculative` or `{CACHE_FIELD}`.",
        )
    unsupported = {type(layer).__name__ for layer in cache.layers} - ADOPTED_LAYERS
    has_slots = any(isinstance(layer, CacheLayerMixin) for layer in cache.layers) or not cache.layers
    length = int(cache.get_seq_length()) if has_slots and not unsupported - WRITTEN_LAYERS else 0
    if not has_slots and any(any(getattr(layer, "has_previous_state", {}).values()) for layer in cache.layers):
        raise UnsupportedGenerationError(
            "`speculative` cannot continue a cache of recurrent states alone, which does not count its tokens.",
            f"Omit `{CACHE_FIELD}`; the whole prompt is then processed.",
        )
    if not length:
        unsupported -= WRITTEN_LAYERS
    if unsupported or cache.offloading:
        raise UnsupportedGenerationError(
            f"`speculative` cannot read a {type(cache).__name__} that "
            f"{'has layers of ' + ', '.join(sorted(unsupported)) if unsupported else 'is offloaded'}.",
            f"Omit `speculative` or `{CACHE_FIELD}`; most models can continue a DynamicCache that is not offloaded.",
        )
    return length


def check_fits(cache: Cache, layout: CacheLayout, states: Mapping[int, list[list[int]]], rows: int) -> None:
    """Refuse a cache whose layers, rows, shapes, devices, lengths, or dtypes (unless under autocast) do not fit.

    `states` are the model's `state_shapes`.
    """

    def refuse(reason: str, hint: str = "Pass a cache of this model.") -> None:
        raise UnsupportedGenerationError(f"The cache passed as `{CACHE_FIELD}` {reason}.", hint)

    def shape(entry: LayerLayout) -> str:
        return f"{entry.num_heads} heads of {entry.key_dim} and {entry.value_dim} channels on {entry.device}"

    def dtypes(entry: LayerLayout) -> str:
        return " and ".join(dict.fromkeys(map(str, entry.dtypes or ())))

    filled = filled_layers(cache)
    expected = {index: entry for index, entry in enumerate(layout) if entry is not None}
    length, in_layer = seen_tokens(cache), dict[int, int]()
    if isinstance(cache, DynamicCache):  # a static layer keeps its length on the device
        in_layer = {index: layer.get_seq_length() for index, layer in filled.items()}
        length = max([length, *in_layer.values()])
    shapes = state_shapes(cache)
    if shapes.keys() != states.keys():
        refuse(f"has recurrent states in {len(shapes)} layers, the model in {len(states)}")
    for index in shapes if length else ():
        state: Any = cache.layers[index]
        if shapes[index] != states[index]:
            refuse(f"has states of {shapes[index]} in layer {index}, the model of {states[index]}")
        held_rows = next((len(window) for window in state.conv_states.values() if window is not None), rows)
        if state.record_past or held_rows != rows:
            held = "records states of earlier tokens" if state.record_past else f"has {held_rows} rows"
            refuse(f"{held}, the prompt has {rows}", "Pass one prompt per row of a plain cache.")
    if length and filled.keys() != expected.keys():
        refuse(f"has {len(filled)} filled layers, the model fills {len(expected)}")
    for index in filled.keys() & expected.keys():
        layer, entry = filled[index], expected[index]
        if len(layer.keys) != rows:
            refuse(f"has {len(layer.keys)} rows, the prompt has {rows}", "Pass one prompt per row of the cache.")
        found = LayerLayout.of(layer.keys, layer.values)
        if found != entry:
            refuse(f"has {shape(found)} in layer {index}, the model has {shape(entry)}", "Pass a matching cache.")
        if found.dtypes != entry.dtypes and not torch.is_autocast_enabled(entry.device.type):
            refuse(f"holds {dtypes(found)}, the model computes {dtypes(entry)}")
        window, num_held = getattr(layer, "sliding_window", None) or length + 1, layer.keys.shape[2]
        if in_layer.get(index, length) < length or num_held < min(length, window - 1):
            reason = f"has {num_held} of {length} tokens in layer {index}"
            refuse(reason, "Fill or crop all layers to the same length.")
