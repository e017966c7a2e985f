"""Attention for tree verification that does not copy keys and values.

transformers' `sdpa` repeats keys and values for every query head of a group, and converts a bool mask to an additive
one in every layer. Here the query heads that share keys are packed into the rows of one attention over the cache
(`verification/kernels.py`), and the additive mask is built once per forward. The function is registered with
transformers under the name `NAME`, which a model's configuration has only while one of our forwards runs; any other
forward that reads the name gets transformers' `sdpa`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from hf_specdec.transformers_private import attention_name, set_attention_name
from hf_specdec.verification.kernels import attend, packed_mask

NAME = "hf_specdec"
"""Name of the attention function in transformers' registry."""
REPLACED = "sdpa"
"""The only attention implementation that is replaced: its mask format and its rounding are known."""
UNSUPPORTED_ARGUMENTS = ("softcap", "s_aux", "position_bias")
"""Arguments that change the result of attention; a layer that passes one gets transformers' function."""


Attend = Callable[[str, Tensor, Tensor, Tensor, float | None], Tensor]
"""Function of layer type, query, key, value and scale; see `AttentionContext.attend`."""


class AttentionContext:
    """Masks shared by the attention layers of one forward.

    Args:
        masks: The masks passed to the model, by layer type: bool `[B, 1, N, S]`, True for visible keys.
        all_seen: Layer types whose mask is True everywhere.
        attend: Called by the layers instead of `self.attend`; used to trace a forward for compilation.
    """

    def __init__(
        self, masks: Mapping[str, Tensor], all_seen: frozenset[str] = frozenset(), attend: Attend | None = None
    ) -> None:
        self.masks, self._all_seen = masks, all_seen
        self._attend = attend
        self._packed: dict[tuple[str, int, torch.dtype, int], Tensor | None] = {}

    def kind(self, mask: Tensor | None) -> str | None:
        """Return the layer type that this mask object belongs to, or None if it is not one of `masks`."""
        return next((name for name, known in self.masks.items() if known is mask), None)

    def mask(self, kind: str) -> Tensor | None:
        """Return the bool mask `[B, 1, N, S]` of a layer type; None if all keys are visible."""
        return None if kind in self._all_seen else self.masks[kind]

    def packed(self, kind: str, groups: int, dtype: torch.dtype, num_splits: int = 1) -> Tensor | None:
        """Return the additive mask of a layer type, built once per forward.

        Args:
            kind: Layer type.
            groups: Query heads per key head.
            dtype: Dtype of the queries.
            num_splits: Number of parts that the keys are split into.

        Returns:
            See `packed_mask`; None if all keys are visible and no mask is needed.
        """
        key = kind, groups, dtype, num_splits
        if key not in self._packed:
            self._packed[key] = packed_mask(self.masks[kind], *key[1:], all_seen=kind in self._all_seen)
        return self._packed[key]

    def dispatch(self, kind: str, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        """Return the result of `attend`, or of the function that was passed to replace it."""
        return (self._attend or self.attend)(kind, query, key, value, scaling)

    def attend(self, kind: str, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        """Attend with queries `[B, H, N, D]` to keys and values `[B, Hkv, S, *]`; return `[B, N, H, Dv]`.

        Args:
            kind: Layer type, which selects the mask.
            query, key, value: See above; Hkv divides H.
            scaling: Scale of the scores; None means `D ** -0.5`.
        """
        masks = functools.partial(self.packed, kind, query.shape[1] // key.shape[1], query.dtype)
        return attend(query, key, value, masks, scaling)


_CONTEXT: ContextVar[AttentionContext | None] = ContextVar("attention_context", default=None)


def tree_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float = 0.0,
    scaling: float | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Compute a layer's attention, with transformers' interface.

    Calls transformers' `sdpa` outside of `attending`, for masks that are not in the context, with dropout, and if one
    of `UNSUPPORTED_ARGUMENTS` is given.

    Returns:
        Outputs `[B, N, H, Dv]` for queries `[B, H, N, D]`, and None for the attention weights.
    """
    context = None if torch.compiler.is_compiling() else _CONTEXT.get()
    kind = None if context is None else context.kind(attention_mask)
    unsupported = dropout or any(kwargs.get(name) is not None for name in UNSUPPORTED_ARGUMENTS)
    if context is None or kind is None or unsupported:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    return context.dispatch(kind, query, key, value, scaling), None


@functools.cache
def register() -> None:
    """Register the attention function and its mask format (that of `sdpa`) with transformers, once per process."""
    AttentionInterface.register(NAME, tree_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def implementation(config: Any) -> str:
    """Return the attention implementation that the user set, even while `attending` has replaced it."""
    name = attention_name(config)
    return REPLACED if name == NAME else name


@contextmanager
def attending(config: Any, context: AttentionContext | None) -> Iterator[None]:
    """Use this file's attention in one forward of this thread.

    `NAME` is written to the text configuration, and `REPLACED` is written back afterwards. If several threads are in
    this block, a layer may read either name; both give the same results, except for rounding.

    Args:
        config: The model's text configuration; nothing changes if its attention is not `REPLACED`.
        context: Masks of the forward; None changes nothing.
    """
    if context is None or implementation(config) != REPLACED:
        yield
        return
    register()
    token = _CONTEXT.set(context)
    set_attention_name(config, NAME)
    try:
        yield
    finally:
        set_attention_name(config, REPLACED)
        _CONTEXT.reset(token)
