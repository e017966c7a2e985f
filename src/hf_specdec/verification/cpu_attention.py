"""Attention over a `TreeCache` with the CPU kernel, which appends the new keys and values itself."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import Cache

from hf_specdec.cpu import operations
from hf_specdec.verification.cache import TreeCache, TreeLayer


def append_and_attend(
    cache: Cache, layer: int, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None
) -> Tensor | None:
    """Append to a layer of a cache and attend to it; return `[B, N, H, Dv]`.

    Args:
        cache: Any cache.
        layer: Index of the layer.
        query: `[B, H, N, D]`.
        key, value: `[B, G, N, *]` of the new nodes.
        mask: bool `[B or 1, 1, N, S]`, True for visible slots, over all slots including the new ones; None if all are
            visible.
        scale: Scale of the scores; None means `D ** -0.5`.

    Returns:
        None, with the cache unchanged, if the kernel does not support these inputs or is not loaded.
    """
    if not isinstance(cache, TreeCache) or not operations.can_attend(query, key, value):
        return None
    entry = cache.layers[layer]
    if not _supports(entry, query.dtype):
        return None
    keys, values, begin = entry.reserve(key, value)
    return operations.attend(query, key, value, keys, values, begin, mask, scale)


def append_and_attend_joined(
    cache: Cache, layer: int, joined: Tensor, cos: Tensor, sin: Tensor, shared: int, mask: Tensor | None,
    scale: float | None,
) -> Tensor | None:  # fmt: skip
    """Like `append_and_attend`, for queries, keys and values side by side, see `operations.attend_joined`.

    Also returns None if the cache's layer has no memory yet.
    """
    if not isinstance(cache, TreeCache) or not operations.can_attend(joined, cos, sin):
        return None
    entry = cache.layers[layer]
    if not entry.is_initialized or not _supports(entry, joined.dtype):
        return None
    keys, values, begin = entry.reserve_slots(joined.shape[1])
    return operations.attend_joined(joined, cos, sin, shared, keys, values, begin, mask, scale)


def _supports(entry: TreeLayer, dtype: torch.dtype) -> bool:
    """Whether the kernel can use the memory of a layer; another dtype occurs under autocast."""
    return entry.window is None and (not entry.is_initialized or entry.keys.dtype == entry.values.dtype == dtype)
