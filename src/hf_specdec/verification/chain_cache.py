"""The cache of models that can verify a chain but no branches: transformers' own, with a way back.

For recurrent states, short convolutions, alibi and whatever else knows a token by its slot. Rows go in lockstep, so a
chain is to the model what plain generation is, only several tokens at once. Attention layers are cut back to what was
accepted; a recurrent state cannot be cut, it is restored from before the chain and the accepted tokens are run again.
The counterpart for trees is `cache.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import Cache, DynamicCache


class ChainCache(DynamicCache):
    """A dynamic cache that forgets the end of a rejected chain.

    Args:
        config: The text decoder's.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.lengths: list[int] = []  # committed tokens of each row, all equal; empty before the first commit
        self._can_cut = not any(hasattr(layer, "recurrent_states") for layer in self.layers)
        self._snapshot: list[dict[str, Any]] = []
        self._recorded = [layer for layer in self.layers if self._can_cut and hasattr(layer, "sliding_window")]

    @property
    def start(self) -> int:
        """The slot at which the next chain begins."""
        return max(self.lengths, default=0)

    @property
    def needs_replay(self) -> bool:
        """Whether a partly accepted chain costs a second forward."""
        return not self._can_cut

    def snapshot(self, whole: bool = False) -> None:
        """Remember the state before a chain. Keys and values are never written in place, so keeping them is free.

        Args:
            whole: For `rollback`, also where the layers could be cut back.
        """
        if not whole:
            for layer in self._recorded:
                layer.activate_past_recording()
        if whole or not self._can_cut:
            self._snapshot = [_copy(vars(layer)) for layer in self.layers]

    def commit_all(self, batch_size: int, num_tokens: int) -> None:
        """Keep everything that was appended, in every row: a prompt of that many tokens, and what was put before."""
        attention = [int(layer.get_seq_length()) for layer in self.layers if hasattr(layer, "get_seq_length")]
        self.lengths = [max([num_tokens, *attention])] * batch_size

    def rollback(self) -> None:
        """Put every layer back as it was at the last whole snapshot; some have grown since, others not."""
        for layer, state in zip(self.layers, self._snapshot, strict=True):
            vars(layer).clear()
            vars(layer).update(state)
        self._snapshot = []

    def keep(self, paths: Sequence[Sequence[int]], num_nodes: int) -> int:
        """Keep the first nodes of the chain of the last forward, the same number in every row.

        Args:
            paths: Per row the kept nodes, of one length.
            num_nodes: Nodes of the chain.

        Returns:
            How many of them must be run again before they are in the cache.
        """
        kept = len(paths[0])
        self.lengths = [self.start + kept] * len(paths)
        if self._can_cut:
            for layer in self.layers:
                if getattr(layer, "is_initialized", False):
                    layer.crop(kept - num_nodes)
            return 0
        if kept == num_nodes:
            return 0
        self.rollback()
        return kept

    def hand_back(self, config: Any) -> Cache:
        """The committed tokens as a plain dynamic cache, with which `generate()` can go on."""
        for layer in self._recorded:
            layer.record_past = False
        cache = DynamicCache(config=config)
        cache.layers = self.layers
        return cache


def _copy(state: Any) -> Any:
    """A copy of a layer's attributes in which the states that are written in place are copies, too."""
    return {
        name: {index: part.clone() if isinstance(part, Tensor) else part for index, part in value.items()}
        if isinstance(value, dict)
        else value
        for name, value in state.items()
    }
