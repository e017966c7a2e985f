"""Attention during verification, without copies of keys and values: queries that share them are packed into rows.

transformers' `sdpa` repeats keys and values for every query head of a group and turns a bool mask into an additive
one in every layer. Here the queries of a group are rows of one attention over keys and values as they lie in the
cache (`verification/kernels.py`), and the additive mask is made once per forward. The function is registered under
another name, which a configuration has only while a forward of ours runs; any other forward that meets the name gets
transformers' `sdpa`.
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

from hf_specdec.verification.kernels import attend, packed_mask

NAME = "hf_specdec"
"""Of the attention function, in transformers' registry."""
REPLACED = "sdpa"
"""The only attention function that is replaced: its masks and its numbers are known."""
BESIDES = ("softcap", "s_aux", "position_bias")
"""Arguments of attention layers that change what is computed; layers that give one get transformers' function."""


Attend = Callable[[str, Tensor, Tensor, Tensor, float | None], Tensor]
"""Layer type, query, key, value and scale to the attention's output, see `AttentionContext.attend`."""


class AttentionContext:
    """What the attention layers of one forward have in common.

    Args:
        masks: By layer type, as the model gets them: bool `[B, 1, N, S]`, True for keys that are seen.
        all_seen: Layer types of which every mask entry is True.
        attend: What its layers call instead of `attend`: a forward that is recorded.
    """

    def __init__(
        self, masks: Mapping[str, Tensor], all_seen: frozenset[str] = frozenset(), attend: Attend | None = None
    ) -> None:
        self.masks, self._all_seen = masks, all_seen
        self._attend = attend
        self._packed: dict[tuple[str, int, torch.dtype, int], Tensor | None] = {}

    def kind(self, mask: Tensor | None) -> str | None:
        """The layer type whose mask this is; None where it is another, or a part of one."""
        return next((name for name, known in self.masks.items() if known is mask), None)

    def packed(self, kind: str, groups: int, dtype: torch.dtype, num_splits: int = 1) -> Tensor | None:
        """The additive mask of a layer type, made once; None if nothing is hidden.

        Args:
            kind: The layer type.
            groups: Query heads per head of keys.
            dtype: Of the queries.
            num_splits: Parts that the keys are split into.

        Returns:
            `[B, 1, groups * N, S]`, see `packed_mask`.
        """
        key = kind, groups, dtype, num_splits
        if key not in self._packed:
            self._packed[key] = packed_mask(self.masks[kind], *key[1:], all_seen=kind in self._all_seen)
        return self._packed[key]

    def layer_attends(self, kind: str, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        """What a layer calls: `attend`, or what was given in its place."""
        return (self._attend or self.attend)(kind, query, key, value, scaling)

    def attend(self, kind: str, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        """`[B, N, H, Dv]` from queries `[B, H, N, D]` and the keys and values `[B, Hkv, S, D]` of their groups."""
        masks = functools.partial(self.packed, kind, query.shape[1] // key.shape[1], query.dtype)
        return attend(query, key, value, masks, scaling)


_FORWARD: ContextVar[AttentionContext | None] = ContextVar("tree_forward", default=None)


def tree_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float = 0.0,
    scaling: float | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """As transformers' attention functions: `[B, H, N, D]` queries to `[B, N, H, Dv]`."""
    forward = _FORWARD.get()
    kind = None if forward is None else forward.kind(attention_mask)
    if forward is None or kind is None or dropout or any(kwargs.get(name) is not None for name in BESIDES):
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    return forward.layer_attends(kind, query, key, value, scaling), None


@functools.cache
def register() -> None:
    """Make the function known to transformers, once in a process."""
    AttentionInterface.register(NAME, tree_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def implementation(config: Any) -> str:
    """The attention of a text configuration as its owner set it, whoever is inside a forward at this moment."""
    name: str = config._attn_implementation
    return REPLACED if name == NAME else name


@contextmanager
def attending(config: Any, forward: AttentionContext | None) -> Iterator[None]:
    """Let the layers of a text configuration attend without copies for one forward of this thread; None leaves them.

    The name is written to the configuration for the moment, and the only value it can have replaced is written back:
    with several threads inside, a layer may find either name, and both compute the same.
    """
    if forward is None or implementation(config) != REPLACED:
        yield
        return
    register()
    token = _FORWARD.set(forward)
    config._attn_implementation_internal = NAME
    try:
        yield
    finally:
        config._attn_implementation_internal = REPLACED
        _FORWARD.reset(token)
