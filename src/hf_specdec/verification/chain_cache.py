"""The cache of models that can verify only chains: transformers' dynamic cache with rollback.

It supports recurrent states, short convolutions, alibi and other layers that depend on the order of slots. All rows
have the same length, so verifying a chain is plain decoding with several tokens per forward. Attention layers are
cropped to the accepted tokens. A recurrent state cannot be cropped: in a model that has one, all layers are restored
to their state before the chain and the accepted tokens are run again, unless the whole chain was accepted. The
counterpart for trees is `cache.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import Cache, DynamicCache

from hf_specdec.verification.length_bounds import UNBOUNDED


class ChainCache(DynamicCache):
    """Dynamic cache that can discard the rejected end of a chain.

    Args:
        config: Configuration of the text decoder.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.lengths: list[int] = []  # committed tokens of each row, all equal; empty before the first commit
        self._can_cut = not any(hasattr(layer, "recurrent_states") for layer in self.layers)
        self._snapshot: list[dict[str, Any]] = []
        self._sliding = [layer for layer in self.layers if self._can_cut and hasattr(layer, "sliding_window")]

    @property
    def start(self) -> int:
        """Number of committed tokens of each row, which is the index of the next chain's first token."""
        return max(self.lengths, default=0)

    @property
    def num_written(self) -> int:
        """Number of tokens that every attention layer has seen; unbounded if all layers are recurrent."""
        attention = [layer for layer in self.layers if hasattr(layer, "keys") and hasattr(layer, "get_seq_length")]
        counts = [int(layer.get_seq_length()) for layer in attention]
        return min(counts, default=UNBOUNDED)

    @property
    def needs_replay(self) -> bool:
        """Whether a partly accepted chain needs a second forward."""
        return not self._can_cut

    def snapshot(self, whole: bool = False) -> None:
        """Prepare to undo the next chain.

        Unless `whole`, sliding-window layers start to keep the tokens that leave the window, for cropping. With
        `whole`, or if the model has recurrent states, the state of all layers is saved for `rollback`. Only recurrent
        states are copied, because keys and values are not overwritten in place.

        Args:
            whole: Save all layers even if they can be cropped.
        """
        if not whole:
            for layer in self._sliding:
                layer.activate_past_recording()
        if whole or not self._can_cut:
            self._snapshot = [_copy(vars(layer)) for layer in self.layers]

    def commit_all(self, batch_size: int, num_tokens: int) -> None:
        """Keep everything appended in every row: a prompt of `num_tokens`, and any virtual tokens before it."""
        attention = [int(layer.get_seq_length()) for layer in self.layers if hasattr(layer, "get_seq_length")]
        self.lengths = [max([num_tokens, *attention])] * batch_size

    def rollback(self) -> None:
        """Restore every layer to the last saved snapshot, which is then discarded; `lengths` is not changed."""
        for layer, state in zip(self.layers, self._snapshot, strict=True):
            vars(layer).clear()
            vars(layer).update(state)
        self._snapshot = []

    def keep(self, paths: Sequence[Sequence[int]], num_nodes: int) -> int:
        """Keep the first nodes of the last forward's chain, the same number in every row; discard the others.

        Args:
            paths: Kept nodes of each row; all rows have the same number.
            num_nodes: Nodes of the chain.

        Returns:
            Number of kept nodes that must be run again to enter the cache; 0 if all kept nodes are in it.
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
        """Return the committed tokens as a `DynamicCache` with the same layers; plain `generate()` can continue it."""
        for layer in self._sliding:
            layer.record_past = False
        cache = DynamicCache(config=config)
        cache.layers = self.layers
        return cache


def _copy(state: Any) -> Any:
    """Copy a layer's attributes, and the tensors in its dicts, which it overwrites in place."""
    return {
        name: {index: part.clone() if isinstance(part, Tensor) else part for index, part in value.items()}
        if isinstance(value, dict)
        else value
        for name, value in state.items()
    }
