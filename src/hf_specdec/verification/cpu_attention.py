"""Attention over a `TreeCache` with the CPU kernel, which appends the new keys and values itself."""

from __future__ import annotations

from torch import Tensor
from transformers import Cache

from hf_specdec.cpu import operations
from hf_specdec.verification.cache import TreeCache


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
    if entry.window is not None:
        return None
    if entry.is_initialized and not entry.keys.dtype == entry.values.dtype == query.dtype:
        return None  # autocast
    keys, values, begin = entry.reserve(key, value)
    return operations.attend(query, key, value, keys, values, begin, mask, scale)
