"""Target that verifies chains with transformers' own cache, masks and positions."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from hf_specdec.acceptance.pipelining import Acceptance
from hf_specdec.errors import UnsupportedGenerationError
from hf_specdec.trees.draft import Draft
from hf_specdec.trees.tree import TokenTree
from hf_specdec.verification.chain_cache import ChainCache
from hf_specdec.verification.model import CACHE_FIELD, cache_argument
from hf_specdec.verification.target import Target


class ChainTarget(Target):
    """Target for models that can verify only chains: several steps of plain decoding in one forward.

    Args:
        model, outputs: See `Target`.
        cache: Cache of this generation.
    """

    supports_trees, lockstep = False, True
    cache: ChainCache

    def __init__(
        self, model: PreTrainedModel, cache: ChainCache, outputs: Mapping[str, bool] = MappingProxyType({})
    ) -> None:
        super().__init__(model, outputs)
        self.cache, self.needs_replay = cache, cache.needs_replay
        self._takes_positions = "position_ids" in inspect.signature(model.forward).parameters

    @property
    def capacity(self) -> int | None:
        """None, because transformers' cache grows with every token."""
        return None

    def adopt(self, cache: Cache) -> None:
        """Raise `UnsupportedGenerationError`, because states other than keys and values cannot be copied reliably."""
        raise UnsupportedGenerationError(
            f"This model verifies only chains, so `speculative` cannot continue a cache passed as `{CACHE_FIELD}`.",
            f"Omit `{CACHE_FIELD}`; the whole prompt is then processed.",
        )

    def admit(self, draft: Draft) -> Draft:
        """Reduce the draft to a chain by following first children; drop log-probabilities and sources."""
        if draft.tree.num_nodes == 1:
            return draft
        return replace(draft, tree=draft.tree.first_children(), log_probs=None, sources=None)

    def commit(self, tree: TokenTree, acceptance: Acceptance) -> None:
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
        """Run several steps of plain decoding in one forward, with transformers' own masks and positions.

        Args:
            tokens: `[B, N]`.
            known: Number of nodes already appended since the last commit.
        """
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
