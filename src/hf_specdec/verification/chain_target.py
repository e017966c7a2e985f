"""Verified of chains, with transformers' own cache, masks and positions: the counterpart of `TreeTarget`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel

from hf_specdec.acceptance.accepted import Accepted
from hf_specdec.errors import UnsupportedGenerationError
from hf_specdec.trees.tree import TokenTree
from hf_specdec.verification.masks import UNBOUNDED
from hf_specdec.verification.model import CACHE_FIELD, cache_argument, takes_positions
from hf_specdec.verification.target import Target


class ChainCache(DynamicCache):
    """transformers' dynamic cache, which can also discard the rejected end of a chain.

    It supports recurrent states, short convolutions, alibi and other layers that depend on the order of slots. All
    rows have the same length. Attention layers are cropped to the accepted tokens. A recurrent state cannot be
    cropped: in a model that has one, all layers are restored to their state before the chain and the accepted tokens
    are run again, unless the whole chain was accepted.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.lengths: list[int] = []  # committed tokens of each row, all equal; empty before the first commit
        # whether a partly accepted chain needs a second forward
        self.needs_replay = any(hasattr(layer, "recurrent_states") for layer in self.layers)
        self._snapshot: list[dict[str, Any]] = []
        self._sliding = (
            [] if self.needs_replay else [layer for layer in self.layers if hasattr(layer, "sliding_window")]
        )

    @property
    def start(self) -> int:
        """Number of committed tokens of each row, which is the index of the next chain's first token."""
        return max(self.lengths, default=0)

    @property
    def num_written(self) -> int:
        """Number of tokens that every attention layer has seen; unbounded if all layers are recurrent."""
        attention = [layer for layer in self.layers if hasattr(layer, "keys") and hasattr(layer, "get_seq_length")]
        return min((int(layer.get_seq_length()) for layer in attention), default=UNBOUNDED)

    def snapshot(self, whole: bool = False) -> None:
        """Prepare to undo the next chain.

        Unless `whole`, sliding-window layers start to keep the tokens that leave the window, for cropping. With
        `whole`, or if the model has recurrent states, the state of all layers is saved for `rollback`. Only tensors in
        dicts (recurrent states) are copied, because keys and values are not overwritten in place.
        """
        if not whole:
            for layer in self._sliding:
                layer.activate_past_recording()
        if whole or self.needs_replay:
            self._snapshot = [dict(vars(layer)) for layer in self.layers]
            for state in self._snapshot:
                for name, parts in state.items():
                    if isinstance(parts, dict):
                        copied = {
                            key: part.clone() if isinstance(part, Tensor) else part for key, part in parts.items()
                        }
                        state[name] = copied

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
        """Keep the first of the `num_nodes` nodes of a chain, the same number in every row; discard the others.

        Returns the number of kept nodes that must be run again to enter the cache; 0 if all kept nodes are in it.
        """
        kept = len(paths[0])
        self.lengths = [self.start + kept] * len(paths)
        if not self.needs_replay:
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


class ChainTarget(Target):
    """Target for models that can verify only chains: several steps of plain decoding in one forward."""

    supports_trees, lockstep = False, True
    cache: ChainCache

    def __init__(
        self, model: PreTrainedModel, cache: ChainCache, outputs: Mapping[str, bool] = MappingProxyType({})
    ) -> None:
        super().__init__(model, outputs)
        self.cache, self.needs_replay = cache, cache.needs_replay
        self._takes_positions = takes_positions(model)

    def adopt(self, cache: Cache) -> None:
        """Raise `UnsupportedGenerationError`, because states other than keys and values cannot be copied reliably."""
        raise UnsupportedGenerationError(
            f"This model verifies only chains, so `speculative` cannot continue a cache passed as `{CACHE_FIELD}`.",
            f"Omit `{CACHE_FIELD}`; the whole prompt is then processed.",
        )

    def commit(self, tree: TokenTree, acceptance: Accepted) -> None:
        """Crop the cache to the kept nodes; if this is needed but impossible, restore it and run them again."""
        lengths = self.cache.lengths
        again = self.cache.keep(acceptance.nodes, tree.num_nodes)
        if again:
            grown, self.cache.lengths = self.cache.lengths, lengths
            self._forward(tree.tokens[:, :again])
            self.cache.lengths = grown

    def rollback(self, num_nodes: int) -> None:
        """See `Target`."""
        self.cache.keep([[]] * max(self.num_rows, 1), num_nodes)

    def equalize_row_lengths(self, new_tokens: Sequence[Sequence[int]], pad_token_id: int) -> None:
        """Do nothing: all rows always have the same length."""

    def _run(self, tree: TokenTree, known: int = 0) -> Any:
        if not known:
            self.cache.snapshot(whole=self.is_draft_view)
        return self._forward(tree.tokens[:, known:], known)

    def _forward(self, tokens: Tensor, known: int = 0) -> Any:
        """Run `[B, N]` tokens after `known` nodes as several steps of plain decoding in one forward."""
        num_nodes, cache, mask = tokens.shape[1], self.cache, None
        start = cache.start + known
        if self.padding is not None:
            more = start + num_nodes - self.padding.valid.shape[1]
            mask = nn.functional.pad(self.padding.valid, (0, more), value=True).long()
        inputs = self._step_inputs(tokens)
        if self._takes_positions:
            depths = torch.arange(num_nodes, device=tokens.device)[None]
            lengths = torch.full((len(tokens),), start, dtype=torch.long, device=tokens.device)
            inputs["position_ids"] = self.positions.of_nodes(depths, lengths)
        inputs[cache_argument(self.model)] = cache
        prepared = self.model.prepare_inputs_for_generation(tokens, attention_mask=mask, use_cache=True, **inputs)
        prepared.pop("logits_to_keep", None)  # some models set it to 1, but every node's logits are needed
        outputs = self.model(**prepared, return_dict=True)
        self._check_written(start + num_nodes)
        return outputs
