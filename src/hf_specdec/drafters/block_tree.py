"""Grow a tree from the outputs of one block: every depth has one distribution, which a Markov head may correct.

Without a Markov head, all nodes of a depth have the same children (`trees/growth.py`). With one, the children of a
node get the logits of their depth plus the correction for the node's token, so branches depend on their path. The
correction costs one product of size rank x draft vocabulary per node with children.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from hf_specdec.cpu.growing import PackedMarkov, grow_corrected
from hf_specdec.cpu.operations import can_search
from hf_specdec.heads.compiled_block import WrappedBlockHead
from hf_specdec.heads.dflash import DFlashHead
from hf_specdec.trees.draft import Budget, Draft
from hf_specdec.trees.growth import (
    Level,
    StaticLevels,
    TreeShape,
    children_of_likeliest,
    grow_dynamic,
    grow_static,
    likeliest_nodes,
    scored,
)
from hf_specdec.trees.tree import ROOT_PARENT, TokenTree


@dataclass(frozen=True)
class BlockOutputs:
    """The outputs of a block behind the roots, from which a tree is grown."""

    head: DFlashHead | WrappedBlockHead
    roots: Tensor  # [B]
    slots: Tensor  # [B, S, Dh] outputs of the block, on the head's device; the tree is grown on that of the roots
    lm_head: nn.Module | None  # the target's, if the head shares it
    hot_token_ids: Tensor | None  # [Vd] target ids of the draft vocabulary; None if it is the target's

    @property
    def hidden(self) -> Tensor:
        """The outputs `[B, D, Dh]` that predict the tokens of each depth: without the root's, if it predicts none."""
        return self.slots if self.head.config.sample_from_anchor else self.slots[:, 1:]

    @cached_property
    def logits(self) -> Tensor:
        """Logits `[B, D, Vd]` of each depth, without corrections."""
        return self.head.score(self.hidden, self.lm_head)

    @property
    def packed_markov(self) -> PackedMarkov | None:
        """The Markov head's weights for the CPU kernel; None if it cannot grow the tree."""
        packed, on_cpu = self.head.packed_markov, self.roots.device.type == "cpu"
        if packed is None or not on_cpu or packed.outputs.dtype != self.logits.dtype or not can_search(self.logits):
            return None
        return packed

    def children(self, tokens: Tensor, state: Tensor, depth: int, top_k: int) -> Level:
        """Return the `top_k` best children of K nodes.

        Args:
            tokens: `[B, K]` the nodes' tokens.
            state: `[B, K, r]` the Markov head's state before these tokens; unused without such a head.
            depth: Depth of the nodes, 0 for the root.
            top_k: Children per node.
        """
        logits, count, device = self.logits[:, depth, None], tokens.shape[1], self.roots.device
        if self.head.config.markov_rank:
            hidden = self.hidden[:, depth, None].expand(-1, count, -1)
            numbers, state = self.head.markov_head.mix(tokens.to(logits.device), hidden, state)
            logits = logits + self.head.markov_head.markov_w2(numbers)
        level = scored(state, logits, top_k, self.hot_token_ids)
        return Level(
            state, level.log_probs.to(device).expand(-1, count, -1), level.tokens.to(device).expand(-1, count, -1)
        )

    def start(self) -> Tensor:
        """Return the Markov head's state `[B, 1, r]` before the root; empty, r = 0, without such a head."""
        if self.head.config.markov_rank:
            return self.head.start_state(self.roots[:, None].to(self.slots.device), self.slots[:, :1])
        return self.slots[:, :1, :0]

    def confident_depths(self, threshold: float) -> Tensor:
        """Return how many tokens `[B]` of each row's greedy chain precede the first one below a confidence.

        Source: DSpark's `confidence_threshold`.
        """
        token, state, confident = self.roots[:, None], self.start(), []
        for depth in range(self.hidden.shape[1]):
            logit = self.head.confidence(self.hidden[:, depth, None], token.to(self.hidden.device))
            confident.append((logit.float().sigmoid() >= threshold).to(token.device))
            level = self.children(token, state, depth, 1)
            token, state = level.tokens[:, :, 0], level.features
        return torch.cat(confident, dim=-1).int().cumprod(-1).sum(-1)


def grow_block(outputs: BlockOutputs, shape: TreeShape, confidence_threshold: float = 0.0) -> Draft:
    """Grow a tree from the outputs of one block.

    Args:
        outputs: The outputs.
        shape: Shape of the tree.
        confidence_threshold: Drop all nodes deeper than the greedy chain's tokens before the first one whose predicted
            probability of being accepted is below this; 0 keeps all. Dropped nodes become padding.
    """
    draft = _grow(outputs, shape)
    if confidence_threshold <= 0:
        return draft
    depths = outputs.confident_depths(confidence_threshold)
    dropped = draft.tree.depths() > depths[:, None]
    assert draft.log_probs is not None
    tree = replace(draft.tree, parents=torch.where(dropped, ROOT_PARENT, draft.tree.parents))
    return replace(draft, tree=tree, log_probs=torch.where(dropped, 0.0, draft.log_probs))


def _grow(outputs: BlockOutputs, shape: TreeShape) -> Draft:
    roots, top_k, head = outputs.roots, shape.top_k, outputs.head
    if isinstance(shape, Budget) and not head.config.markov_rank:
        best = scored(outputs.hidden, outputs.logits, top_k, outputs.hot_token_ids)
        rule = children_of_likeliest if head.config.all_children else likeliest_nodes
        return rule(roots, best.log_probs.to(roots.device), best.tokens.to(roots.device), shape)
    if isinstance(shape, Budget) and (markov := outputs.packed_markov) is not None:
        return _grow_by_kernel(outputs, shape, markov)

    def expand(tokens: Tensor, above: Level, parent_index: Tensor, seen: Tensor, depth: int) -> Level:
        index = parent_index[:, :, None].expand(-1, -1, above.features.shape[-1]).to(above.features.device)
        return outputs.children(tokens, above.features.gather(1, index), depth, top_k)

    root = outputs.children(roots[:, None], outputs.start(), 0, top_k)
    if isinstance(shape, StaticLevels):
        return grow_static(roots, root, expand, shape)
    return grow_dynamic(roots, root, expand, shape)


def _grow_by_kernel(outputs: BlockOutputs, budget: Budget, markov: PackedMarkov) -> Draft:
    """Return the same as `grow_dynamic` with the children of `BlockOutputs.children`, except for rounding."""
    sizes = budget.num_nodes, budget.num_steps, budget.top_k
    tokens, parents, log_probs = grow_corrected(
        markov, outputs.roots, outputs.hidden, outputs.logits, outputs.start(), outputs.hot_token_ids, sizes,
        budget.min_level_probability,
    )  # fmt: skip
    return Draft(TokenTree(tokens, parents, max_depth=budget.num_steps), log_probs)
