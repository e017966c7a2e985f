"""Caches of transformers that a caller passes to `generate()`: which ones are supported, and whether they fit."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Cache, DynamicCache, StaticCache

from hf_specdec.errors import UnsupportedGenerationError
from hf_specdec.verification.memory import CacheLayout, LayerLayout, layer_layout
from hf_specdec.verification.model import CACHE_FIELD

ADOPTED_LAYERS = frozenset({"DynamicLayer", "DynamicSlidingWindowLayer", "StaticLayer", "DummyLayer"})
"""transformers' layer classes that hold plain keys and values, or (`DummyLayer`) share those of another layer."""

WRITTEN_LAYERS = frozenset({"StaticSlidingWindowLayer"})
"""transformers' layer classes that can be filled in `TreeCache.hand_back`, but not read: they hold a moving window."""


def seen_tokens(cache: Any) -> int:
    """Return the number of tokens in a transformers cache.

    Raises:
        UnsupportedGenerationError: Neither exactly a `DynamicCache` nor a `StaticCache`, or offloaded, or with layers
            of classes that are not in `ADOPTED_LAYERS`, or with a filled layer of `WRITTEN_LAYERS`.
    """
    if type(cache) not in (DynamicCache, StaticCache):
        raise UnsupportedGenerationError(
            f"With `speculative`, `{CACHE_FIELD}` must be a DynamicCache or StaticCache, got {type(cache).__name__}.",
            f"Pass such a cache, or omit `speculative` or `{CACHE_FIELD}`.",
        )
    unsupported = {type(layer).__name__ for layer in cache.layers} - ADOPTED_LAYERS
    length = 0 if unsupported - WRITTEN_LAYERS else int(cache.get_seq_length())
    if not length:
        unsupported -= WRITTEN_LAYERS
    if unsupported or cache.offloading:
        raise UnsupportedGenerationError(
            f"`speculative` cannot read a {type(cache).__name__} that "
            f"{'has layers of ' + ', '.join(sorted(unsupported)) if unsupported else 'is offloaded'}.",
            f"Omit `speculative` or `{CACHE_FIELD}`; most models can continue a DynamicCache that is not offloaded.",
        )
    return length


def filled_layers(cache: Cache) -> dict[int, Any]:
    """Return the layers that have keys and values, by index; a `DummyLayer` never has any."""
    return {index: layer for index, layer in enumerate(cache.layers) if getattr(layer, "keys", None) is not None}


def check_fits(cache: Cache, layout: CacheLayout, rows: int) -> None:
    """Check that a transformers cache matches the model's cache layout and the batch size.

    Args:
        cache: A cache that `seen_tokens` accepts.
        layout: The model's cache layout, as measured by the probe.
        rows: Batch size of the call, after `num_return_sequences`.

    Raises:
        UnsupportedGenerationError: Layers, rows, shapes, devices, dtypes (unless under autocast) or lengths differ.
    """
    filled = filled_layers(cache)
    expected = {index: entry for index, entry in enumerate(layout) if entry is not None}
    length, in_layer = seen_tokens(cache), dict[int, int]()
    if isinstance(cache, DynamicCache):  # a static layer keeps its length on the device
        in_layer = {index: layer.get_seq_length() for index, layer in filled.items()}
        length = max([length, *in_layer.values()])
    if length and filled.keys() != expected.keys():
        _refuse(f"has {len(filled)} filled layers, the model fills {len(expected)}", "Pass a cache of this model.")
    for index in filled.keys() & expected.keys():
        layer, entry = filled[index], expected[index]
        if len(layer.keys) != rows:
            _refuse(f"has {len(layer.keys)} rows, the prompt has {rows}", "Pass one prompt per row of the cache.")
        found = layer_layout(layer.keys, layer.values)
        if found != entry:
            _refuse(f"has {_shape(found)} in layer {index}, the model has {_shape(entry)}", "Pass a matching cache.")
        if found.dtypes != entry.dtypes and not torch.is_autocast_enabled(entry.device.type):
            _refuse(f"holds {_dtypes(found)}, the model computes {_dtypes(entry)}", "Pass a cache of this model.")
        window = getattr(layer, "sliding_window", None) or length + 1
        if in_layer.get(index, length) < length or layer.keys.shape[2] < min(length, window - 1):
            _refuse(
                f"has {layer.keys.shape[2]} of {length} tokens in layer {index}",
                "Fill or crop all layers to the same length.",
            )


def _refuse(reason: str, hint: str) -> None:
    raise UnsupportedGenerationError(f"The cache passed as `{CACHE_FIELD}` {reason}.", hint)


def _dtypes(entry: LayerLayout) -> str:
    return " and ".join(dict.fromkeys(map(str, entry.dtypes or ())))


def _shape(entry: LayerLayout) -> str:
    return f"{entry.num_heads} heads of {entry.key_dim} and {entry.value_dim} channels on {entry.device}"


def layer_windows(config: object) -> list[int | None]:
    """Return each layer's sliding window in transformers' own cache; None for layers that keep all tokens."""
    return [getattr(layer, "sliding_window", None) for layer in DynamicCache(config=config).layers]
