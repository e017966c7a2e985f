"""Attention of tree nodes over a key-value cache whose lengths only the device knows, without masks.

With masks, a graph attends to a fixed number of slots. Here a node's visible keys follow from its row's length, its
slot and one 64-bit word, in which bit j is set if the node sees the j-th appended entry. Triton kernels read them, so
that one graph serves all lengths, and layers with windows read no more than the window. Graphs use them if Triton is
installed and a trial run is correct; otherwise they attend with masks.

On other devices the operation computes the same with torch's operations, in float32 or wider, over the whole memory.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hf_specdec.cpu.library import check_switch
from hf_specdec.trees.tree import TokenTree
from hf_specdec.verification.masks import LayerKind, MaskLayout, restricted
from hf_specdec.verification.memory import KeyValueBuffer
from hf_specdec.verification.recurrence import Branches
from hf_specdec.verification.tree_attention import (
    SHORTEST_PART,
    AttentionContext,
    calls_kernel_directly,
    is_correct,
    multiprocessors,
    trial_numbers,
)

MOST_APPENDED = 64
"""Maximum number of entries that a forward, and those before it since the last commit, may append: bits of a word."""
WAVES = 2
"""Thread blocks per multiprocessor that the keys are split for."""
MERGED_ROWS = 4
"""Rows per thread block of the kernel that merges the parts."""
TILES = ((256, 64, 64), (512, 32, 32))
"""Maximum bytes of a key, and the rows and keys of a tile; two tiles fit in 100 KiB of shared memory."""
LAUNCH = {"num_warps": 4, "num_stages": 2, "enable_fp_fusion": True}
"""Compiler options of Triton."""
PROBE_SLOTS = 600
"""Slots of the memory in the trial run: several parts, and no multiple of a tile."""
WIDEST_TILE = (16, 16)
"""Rows and keys of a tile for longer keys; a product needs at least 16 of both."""


@dataclass(frozen=True, slots=True)
class VisibleKeys:
    """The keys of a cache's memory that each query of a forward sees: B rows, T queries, S slots.

    A query sees the row's committed slots within its window or chunk, and the appended entries of its word.
    """

    lengths: Tensor  # [B] committed slots
    first: Tensor  # slot of the first entry appended since the last commit, in all rows; the others follow
    places: Tensor  # [B, T] slot of each query in plain generation, at least the row's length
    words: Tensor  # [B, T] int64: bit j is set if the query sees the j-th appended entry
    valid: Tensor  # [B, S] bool, False at padding of the prompt
    left: Tensor  # [B] slot at which the row's first chunk begins
    count: int  # appended entries, at most `MOST_APPENDED`
    window: int = 0  # slots that a query sees, its own included; 0: all
    chunk: int = 0  # size of the chunks that do not see each other; 0: no chunks
    fixed: bool = False  # whether the keys are split at the same places in every forward, so that sums do not change

    def to(self, device: torch.device) -> VisibleKeys:
        """Return these keys on a device."""
        names = "lengths", "first", "places", "words", "valid", "left"
        return replace(self, **{name: getattr(self, name).to(device) for name in names})

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None, softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Compute the attention `[B, T, H, Dv]`, contiguous, of `[B, H, T, D]` to the memory `[B, G, S, *]`.

        Args:
            query, key, value: Queries, and the memory of a layer; the appended entries are in it.
            scale: Factor of the scores; None: `D ** -0.5`.
            softcap: Bound of the scores, which become `softcap * tanh(score / softcap)`; None: no bound.
            sinks: `[H]` scores of keys without values, one per head.
        """
        _define_operation()
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        given = query, key, value, self.lengths, self.first, self.places, self.words, self.valid, self.left
        sizes = self.count, self.window, self.chunk, self.fixed
        return torch.ops.hf_specdec.device_attention.default(*given, *sizes, scale, softcap or 0.0, sinks)


Mask = Tensor | VisibleKeys
"""Which keys queries see: a bool mask `[B, 1, T, S]` over those that a cache returns, or what describes them."""


def words_of(seen: Tensor) -> Tensor:
    """Return words `[...]` of bool `[..., A]`; see `VisibleKeys`.

    Example: [True, False, True] gives 5.
    """
    bits = torch.arange(seen.shape[-1], dtype=torch.long, device=seen.device)
    return (seen.long() << bits).sum(-1)


def visible_in_tree(
    layout: MaskLayout,
    ancestors: Tensor,
    lengths: Tensor,
    slots: Tensor,
    valid: Tensor,
    left: Tensor,
    *,
    fixed: bool = False,
) -> dict[str, VisibleKeys]:
    """Return what the nodes of a tree see, by layer type; see `masks.bucket_masks`, which has the same arguments."""
    places = lengths[:, None] + ancestors.sum(-1) - 1
    seen = restricted(layout, ancestors.expand(len(lengths), -1, -1), places, places, left)
    common = VisibleKeys(lengths, slots[0], places, places, valid, left, len(slots), fixed=fixed)
    return {
        name: replace(
            common,
            words=words_of(seen[name][:, 0]),
            window=size if kind == "sliding" else 0,
            chunk=size if kind == "chunked" else 0,
        )
        for name, kind, size in layout.layers
    }


class DeviceContext(AttentionContext):
    """Context of a forward whose layers attend without masks.

    The model gets masks without columns: a layer that would use one, instead of calling transformers' attention
    function with it, raises an error.
    """

    def __init__(self, keys: Mapping[str, VisibleKeys], branches: Branches | None = None) -> None:
        shapes = {name: (len(kept.places), 1, kept.places.shape[1], 0) for name, kept in keys.items()}
        super().__init__(
            {
                name: torch.empty(shape, dtype=torch.bool, device=keys[name].places.device)
                for name, shape in shapes.items()
            },
            branches=branches,
        )
        self._keys = keys

    def attend(self, kind: str, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        """See `VisibleKeys.attend`."""
        return self._keys[kind].attend(query, key, value, scaling)


# ----------------------------------------------------------------------------------------------- the operation


@functools.cache
def _define_operation() -> torch.library.Library:
    """Define the custom operation, once per process; it exists as long as the returned library, which is cached."""

    def attend(query: Tensor, key: Tensor, value: Tensor, *given: Any) -> Tensor:
        *fields, scale, softcap, sinks = given
        inputs = query, key, value, VisibleKeys(*fields), scale, softcap, sinks
        if calls_kernel_directly(query.device):
            return attend_in_parts(*inputs, multiprocessors(query.device))
        return attend_exactly(*inputs)

    library = torch.library.Library("hf_specdec", "FRAGMENT")
    library.define(
        "device_attention(Tensor query, Tensor key, Tensor value, Tensor lengths, Tensor first, Tensor places, "
        "Tensor words, Tensor valid, Tensor left, int count, int window, int chunk, bool fixed, float scale, "
        "float softcap, Tensor? sinks) -> Tensor"
    )
    library.impl("device_attention", attend, "CompositeExplicitAutograd")
    library.impl(
        "device_attention",
        lambda query, _key, value, *_: query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3]),
        "Meta",
    )
    return library


def attend_exactly(
    query: Tensor, key: Tensor, value: Tensor, visible: VisibleKeys, scale: float, softcap: float, sinks: Tensor | None
) -> Tensor:
    """Compute `VisibleKeys.attend` with torch's operations, in float32 or wider."""
    wide, (batch, _, nodes, _), slots = torch.promote_types(query.dtype, torch.float32), query.shape, key.shape[2]
    indices = torch.arange(slots, dtype=torch.long, device=query.device)
    entries = torch.arange(visible.count, dtype=torch.long, device=query.device)
    places, left = visible.places[:, :, None], visible.left[:, None, None]
    seen = ((indices < visible.lengths[:, None]) & visible.valid[:, :slots])[:, None].expand(-1, nodes, -1)
    if visible.window:
        seen = seen & (places - indices < visible.window)
    if visible.chunk:
        seen = seen & ((places - left) // visible.chunk == (indices - left) // visible.chunk)
    seen = seen.index_copy(2, visible.first + entries, (visible.words[:, :, None] >> entries) & 1 != 0)
    queries = query.to(wide).unflatten(1, (key.shape[1], -1))  # [B, G, groups, T, D]
    scores = queries @ key.to(wide)[:, :, None].transpose(-1, -2) * scale
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
    if sinks is not None:
        added = sinks.to(wide).view(key.shape[1], -1, 1, 1).expand(batch, -1, -1, nodes, -1)
        scores = torch.cat([scores, added], dim=-1)
    output = scores.softmax(-1)[..., :slots] @ value.to(wide)[:, :, None]
    return output.flatten(1, 2).transpose(1, 2).to(query.dtype).contiguous()


@functools.cache
def _kernels() -> Any:
    """Return the module of the kernels; importing it imports Triton."""
    return importlib.import_module("hf_specdec.verification.triton_attention")


def attend_in_parts(
    query: Tensor, key: Tensor, value: Tensor, visible: VisibleKeys, scale: float, softcap: float,
    sinks: Tensor | None, processors: int,
) -> Tensor:  # fmt: skip
    """Compute `VisibleKeys.attend` with the kernels, in parts for a number of multiprocessors; it reads no lengths."""
    (batch, query_heads, nodes, key_dim), (_, heads, slots, value_dim) = query.shape, value.shape
    groups, device = query_heads // heads, query.device
    channels, value_channels = (1 << max(size - 1, 15).bit_length() for size in (key_dim, value_dim))
    most_rows, block_keys = next((tile for size, *tile in TILES if channels * key.itemsize <= size), WIDEST_TILE)
    rows = groups * nodes
    block_rows = min(max(16, 1 << (rows - 1).bit_length()), most_rows)
    tiles = -(-rows // block_rows)
    parts = max(min(WAVES * processors // (tiles * batch * heads), slots // SHORTEST_PART), 1)
    if visible.fixed:  # all of the shortest length
        parts = -(-slots // SHORTEST_PART)
    query = query if query.stride(-1) == 1 else query.contiguous()
    places, words = visible.places.contiguous(), visible.words.contiguous()
    outputs = torch.empty(parts, batch * heads, rows, value_dim, dtype=torch.float32, device=device)
    sums = torch.empty(parts, batch * heads, rows, dtype=torch.float32, device=device)
    merged = torch.empty(batch, nodes, query_heads, value_dim, dtype=query.dtype, device=device)
    sizes = heads, groups, nodes, visible.count, parts
    common = {
        "VALUE_DIM": value_dim, "BLOCK_N": block_keys, "BLOCK_V": value_channels,
        "SHORTEST": max(SHORTEST_PART // block_keys, 1), "WINDOW": visible.window, "CHUNK": visible.chunk,
        "FIXED": visible.fixed,
    }  # fmt: skip
    with torch.accelerator.device_index(device.index):  # Triton launches on the current device
        _kernels().attend_to_parts[tiles, batch * heads, parts](
            query, key, value, visible.lengths, visible.first, places, words, visible.valid.view(torch.uint8),
            visible.left, outputs, sums, *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
            visible.valid.stride(0), scale, softcap, *sizes, KEY_DIM=key_dim, BLOCK_M=block_rows, BLOCK_D=channels,
            CAPPED=softcap > 0, **common, **LAUNCH,
        )  # fmt: skip
        _kernels().merge_parts[-(-rows // MERGED_ROWS), batch * heads](
            outputs, sums, visible.lengths, visible.left, sums if sinks is None else sinks, merged, *sizes,
            BLOCK_M=MERGED_ROWS, SUNK=sinks is not None, **common, **LAUNCH,
        )  # fmt: skip
    return merged


# ----------------------------------------------------------------------------------------------- choosing the kernels


def needs_no_masks(buffers: Sequence[KeyValueBuffer], kinds: Iterable[LayerKind]) -> bool:
    """Whether graphs can attend to this memory without masks, in layers of some kinds.

    Each kind is tried once per device, dtype and head sizes, see `is_correct`.
    """
    return all(
        calls_kernel_directly(buffer.keys.device)
        and buffer.keys.dtype == buffer.values.dtype
        and not torch.is_autocast_enabled(buffer.keys.device.type)
        and _works(buffer.keys.device, buffer.keys.dtype, buffer.keys.shape[-1], buffer.values.shape[-1], kind)
        for buffer in buffers
        for kind in kinds
    )


@functools.cache
def _works(device: torch.device, dtype: torch.dtype, key_dim: int, value_dim: int, kind: LayerKind) -> bool:
    def trial() -> float:
        check_switch()
        return kernel_error(device, dtype, key_dim, value_dim, kind)

    sizes = f"dtype {dtype} and head sizes {key_dim} and {value_dim} on {device}"
    return is_correct("the Triton kernel", trial, dtype, f"Graphs attend with masks in {kind} layers, for {sizes}")


@torch.no_grad()
def kernel_error(device: torch.device, dtype: torch.dtype, key_dim: int, value_dim: int, kind: LayerKind) -> float:
    """Return the largest absolute error of the operation on a device, against float32 on the host.

    Two rows of different lengths, with a hole in the prompt of one, and trees of three levels; several parts.
    """
    numbers = functools.partial(trial_numbers, dtype=dtype)
    parents = torch.tensor([[-1, 0, 0, 1, 2, 2], [-1, 0, 1, 2, 3, -1]], dtype=torch.long, device="cpu")
    lengths = torch.tensor([PROBE_SLOTS - 7, PROBE_SLOTS // 2], dtype=torch.long, device="cpu")
    valid = torch.arange(2 * PROBE_SLOTS, dtype=torch.long, device="cpu").view(2, -1) % 64 > 4
    left = torch.tensor([5, 0], dtype=torch.long, device="cpu")
    layout = MaskLayout((("", kind, 0 if kind == "full" else 100),), additive=False)
    slots = lengths.amax() + torch.arange(6, dtype=torch.long, device="cpu")
    visible = visible_in_tree(layout, TokenTree(parents, parents).ancestor_mask(), lengths, slots, valid, left)[""]
    query, key = numbers(0, 2, 4, 6, key_dim), numbers(1, 2, 2, PROBE_SLOTS, key_dim)
    value = numbers(2, 2, 2, PROBE_SLOTS, value_dim)
    expected = attend_exactly(query.float(), key.float(), value.float(), visible, key_dim**-0.5, 0.0, None)
    found = visible.to(device).attend(query.to(device), key.to(device), value.to(device))
    return float((found.cpu().float() - expected).abs().max().nan_to_num(torch.inf))
