"""Block drafting: one forward of a head drafts all levels of a tree, without a sequence of draft forwards.

Sources: DFlash (https://github.com/z-lab/dflash) for the block, JetSpec (https://github.com/hao-ai-lab/JetSpec) for
trees from one block, DSpark (https://github.com/deepseek-ai/DeepSpec) for the Markov and confidence heads.

Every depth of a block has one distribution, which a Markov head may correct. Without one, all nodes of a depth have
the same children, unless a head scores pairs of candidates (DFlash2): then they have the same candidates, with other
probabilities. With a Markov head, the children of a node get the logits of their depth plus the
correction for the node's token, so branches depend on their path. The correction costs one product of size rank x
draft vocabulary per node with children.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from hf_specdec.config import SpeculativeConfig
from hf_specdec.cpu.growing import PackedMarkov, grow_corrected
from hf_specdec.cpu.operations import can_search
from hf_specdec.drafters.base import HOW_TO_LOAD, Drafter
from hf_specdec.drafters.eagle import LayerDrafter
from hf_specdec.drafters.feature_session import Committed, DraftPlan, Entries, HeadFunctions, LayerLimits
from hf_specdec.drafters.registry import register
from hf_specdec.errors import InvalidConfigError
from hf_specdec.heads.dflash import DFlashHead, block_views
from hf_specdec.heads.stages import Stages
from hf_specdec.trees.draft import Budget, Draft
from hf_specdec.trees.growth import (
    Level,
    StaticLevels,
    TreeShape,
    best_children,
    children_of_likeliest,
    grow,
    growable,
    likeliest_nodes,
    reachable,
    scored,
)
from hf_specdec.trees.tree import ROOT_PARENT, TokenTree
from hf_specdec.validation import check_type
from hf_specdec.verification.cache import TreeCache
from hf_specdec.verification.features import PromptPadding, token_positions


@register("dflash", heads=(DFlashHead,))
class DFlashDrafter(LayerDrafter):
    """Drafts with a block head: DFlash, JetSpec, DSpark.

    Config fields: `tree` (`"dynamic"`, `"static"` or choices), `num_steps`, `top_k`, `num_draft_tokens`. Defaults come
    from the head's config; without them, the tree is dynamic with 16 nodes, `top_k` 4 and as many steps as a trained
    block drafts. With fewer steps the block has fewer slots. A chain is `top_k` 1.

    Args:
        head: The head. It is put in eval mode and its parameters are frozen; `bind` moves and casts it.
        confidence_threshold: Drop drafted tokens behind the first one whose predicted probability of being accepted
            is below this, 0 to 1; 0 keeps all. Needs a confidence head (DSpark).

    Raises:
        InvalidConfigError: A threshold outside 0 to 1, or a head without a confidence head.
    """

    method = "dflash"
    head: DFlashHead

    def __init__(self, head: DFlashHead, confidence_threshold: float = 0.0) -> None:
        check_type("head", head, DFlashHead, HOW_TO_LOAD)
        if not 0 <= confidence_threshold <= 1:
            raise InvalidConfigError(f"`confidence_threshold` must be from 0 to 1, got {confidence_threshold}.")
        if confidence_threshold and not head.config.confidence_head:
            raise InvalidConfigError(
                f"`confidence_threshold` must be 0, got {confidence_threshold}: this head has no confidence head.",
                "Leave it out.",
            )
        self.head = head.eval().requires_grad_(False)
        self.confidence_threshold = confidence_threshold

    @property
    def defaults(self) -> Budget:  # type: ignore[override]
        """The sizes of a tree as deep as a block of the trained size."""
        return replace(Drafter.defaults, num_steps=self.head.config.max_depth)

    def largest(self, budget: Budget) -> Budget:
        """See `LayerDrafter.largest`; all children of a node are candidates, unless a Markov head scores them."""
        return growable(budget) if self.head.config.markov_rank else reachable(budget)

    def tree_limits(self, config: SpeculativeConfig) -> LayerLimits:
        """See `LayerDrafter.tree_limits`; no tree is deeper than a block of the trained size."""
        limits, deepest = super().tree_limits(config), self.head.config.max_depth
        if limits.budget.num_steps > deepest:
            raise InvalidConfigError(
                f"A block of {self.head.config.block_size} slots drafts at most {deepest} tokens, got "
                f"num_steps={limits.budget.num_steps}.",
                f"Set num_steps to {deepest} or less.",
            )
        if 0 < self.head.config.num_candidates < limits.budget.top_k:
            raise InvalidConfigError(
                f"This head has {self.head.config.num_candidates} candidates per depth, got top_k="
                f"{limits.budget.top_k}.",
                "Set top_k to that or less.",
            )
        return limits

    def functions(self, model: PreTrainedModel) -> HeadFunctions:
        """See `LayerDrafter`."""
        embedding = self.head.embedding_for(model)
        return BlockFunctions(self.head, self._stages(model), embedding, self.confidence_threshold)


@dataclass(frozen=True, slots=True)
class BlockFunctions(HeadFunctions):
    """What a block head computes: context from features, and one block behind it, of which a tree is made."""

    head: DFlashHead
    stages: Stages
    embedding: nn.Module
    threshold: float  # see `DFlashDrafter`

    def plan(self, budget: Budget, levels: StaticLevels | None, largest: Budget) -> DraftPlan:
        """See `HeadFunctions`; the block has the slots of the largest tree, or of this one if the head is causal.

        The outputs of a causal block do not depend on later slots.
        """
        config = self.head.config
        ends = config.causal and not config.lilicorr_candidate_topk  # LiLiCorr's transformer is not causal
        depth = min(budget.num_steps, largest.num_steps) if ends else largest.num_steps
        return DraftPlan(reachable(budget) if levels is None else levels, depth + (not config.sample_from_anchor))

    def read_prompt(self, prompt: Entries, padding: PromptPadding | None, cache: TreeCache) -> Tensor:
        """See `HeadFunctions`."""
        positions = torch.arange(prompt.path.shape[1], dtype=torch.long, device=prompt.path.device)
        positions = positions.expand(prompt.path.shape) if padding is None else token_positions(padding)
        self._append(prompt.features, positions, cache)
        return self._last(prompt.features[:, -1:])

    def read(self, committed: Committed, features: Tensor, tokens: Tensor, valid: Tensor) -> Tensor:
        """See `HeadFunctions`; block heads read no tokens, and only LiLiCorr's need the last entry's context."""
        positions = committed.first_positions + (valid.cumsum(-1) - 1).clamp(min=0)
        self._append(features, positions, committed.slots.cache(0, features.shape[1]))
        last = torch.where(valid, torch.arange(valid.shape[1], device=valid.device), 0).amax(-1)[:, None, None]
        return self._last(features.gather(1, last.expand(-1, -1, features.shape[-1]).to(features.device)))

    def _append(self, features: Tensor, positions: Tensor, cache: Cache) -> None:
        device = self.head.device
        states = self.stages.fuse(features.to(device, self.head.dtype), positions.to(device))
        for layer in range(len(states) // 2):
            cache.update(states[2 * layer], states[2 * layer + 1], layer)

    def _last(self, features: Tensor) -> Tensor:
        """Return the context `[B, 1, D]` of entries with these features if the head needs it, else `[B, 1, 0]`."""
        if not self.head.config.lilicorr_candidate_topk:
            return features[:, :, :0]
        return self.head.fuse(features.to(self.head.device, self.head.dtype)).to(features.device)

    def draft(self, committed: Committed, roots: Tensor, last: Tensor, plan: DraftPlan) -> Draft:
        """See `HeadFunctions`."""
        head, device, size = self.head, self.head.device, plan.num_entries
        numbers = torch.arange(size, dtype=torch.long, device=roots.device)
        tokens = torch.where(numbers == 0, roots[:, None], head.config.mask_token_id)
        views = block_views(head, committed.lengths, size)
        masks = {window: committed.mask(*view).to(device) for window, view in views.items()}
        outputs = self.stages.read(
            self.embedding(tokens).to(device, head.dtype),
            (committed.first_positions + numbers).to(device),
            committed.slots.cache(0, size),
            [masks[window] for window in head.layer_windows],
        )
        block = BlockOutputs(head, self.stages, roots, outputs, self.embedding, last[:, 0])
        return grow_block(block, plan.shape, self.threshold)


@dataclass(frozen=True)
class BlockOutputs:
    """The outputs of a block behind the roots, from which a tree is grown."""

    head: DFlashHead
    stages: Stages
    roots: Tensor  # [B]
    slots: Tensor  # [B, S, Dh] outputs of the block, on the head's device; the tree is grown on that of the roots
    embedding: Callable[[Tensor], Tensor]  # of tokens, as in the block
    context: Tensor  # [B, Dh] of the token before the root; [B, 0] if the head does not need it

    @property
    def hidden(self) -> Tensor:
        """The outputs `[B, D, Dh]` that predict the tokens of each depth: without the root's, if it predicts none."""
        return self.slots if self.head.config.sample_from_anchor else self.slots[:, 1:]

    @cached_property
    def logits(self) -> Tensor:
        """Logits `[B, D, Vd]` of each depth, without corrections."""
        return self.stages.score(self.hidden)

    @cached_property
    def lattice(self) -> tuple[Tensor, Tensor]:
        """The candidates `[B, D, C]` of each depth, and their log-probabilities `[B, D, C, C]` after each one above.

        At depth 0, all rows are those after the root.
        """
        log_probs, candidates = best_children(self.logits, self.head.config.num_candidates)
        if self.head.config.selector_rank:
            roots = self.roots.to(candidates.device)
            scores = self.head.candidate_selector(roots, candidates, log_probs, self.hidden)
        else:
            scores = self.head.lilicorr(self._embed(candidates), log_probs, self.hidden, self.context.to(self.hidden))
        return candidates, scores.log_softmax(-1, dtype=torch.float32).clamp(max=0)

    @property
    def packed_markov(self) -> PackedMarkov | None:
        """The Markov head's weights for the CPU kernel; None if it cannot grow the tree."""
        packed, on_cpu = self.stages.markov, self.roots.device.type == "cpu"
        if packed is None or not on_cpu or packed.outputs.dtype != self.logits.dtype or not can_search(self.logits):
            return None
        return packed

    def _embed(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens.to(self.roots.device)).to(self.slots)

    def children(self, tokens: Tensor, state: Tensor, depth: int, top_k: int) -> Level:
        """Return the `top_k` best children of K nodes at a depth, 0 for the root, given their tokens `[B, K]`.

        `state` `[B, K, state size]` is the Markov head's before these tokens; unused without such a head.
        """
        count, device = tokens.shape[1], self.roots.device
        if self.head.config.num_candidates:
            candidates, log_probs = self.lattice
            above = candidates[:, max(depth - 1, 0), None] == tokens.to(candidates.device)[:, :, None]
            rows = log_probs[:, depth].gather(1, above.int().argmax(-1, keepdim=True).expand(-1, -1, above.shape[-1]))
            values, index = rows.topk(top_k, dim=-1)
            return Level(
                state, values.to(device), candidates[:, depth, None].expand_as(rows).gather(-1, index).to(device)
            )
        logits = self.logits[:, depth, None]
        if self.head.config.markov_rank:
            hidden = self.hidden[:, depth, None].expand(-1, count, -1)
            numbers, state = self.head.markov_head.mix(tokens.to(logits.device), hidden, state, self._embed)
            if depth or not self.head.config.gru_hidden_dim:
                logits = logits + self.head.markov_head.markov_w2(numbers)
        level = scored(state, logits, top_k, self.head.hot_token_ids)
        return Level(
            state, level.log_probs.to(device).expand(-1, count, -1), level.tokens.to(device).expand(-1, count, -1)
        )

    def start(self) -> Tensor:
        """Return the Markov head's state `[B, 1, state size]` before the root; of size 0 without such a head."""
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

    With a threshold above 0, all nodes deeper than the greedy chain's tokens before the first one whose predicted
    probability of being accepted is below it are dropped: they become padding.
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
    pairs = bool(head.config.num_candidates)
    if isinstance(shape, Budget) and not (head.config.markov_rank or pairs):
        best = scored(outputs.hidden, outputs.logits, top_k, outputs.head.hot_token_ids)
        rule = children_of_likeliest if head.config.all_children else likeliest_nodes
        return rule(roots, best.log_probs.to(roots.device), best.tokens.to(roots.device), shape)
    if isinstance(shape, Budget) and (markov := outputs.packed_markov) is not None:
        # the same as below, except for rounding
        sizes = shape.num_nodes, shape.num_steps, top_k
        tokens, parents, log_probs = grow_corrected(
            markov, roots, outputs.hidden, outputs.logits, outputs.start(), head.hot_token_ids, sizes,
            shape.min_level_probability,
        )  # fmt: skip
        return Draft(TokenTree(tokens, parents, max_depth=shape.num_steps), log_probs)

    def expand(tokens: Tensor, above: Level, parent_index: Tensor, seen: Tensor, depth: int) -> Level:
        index = parent_index[:, :, None].expand(-1, -1, above.features.shape[-1]).to(above.features.device)
        return outputs.children(tokens, above.features.gather(1, index), depth, top_k)

    root = outputs.children(roots[:, None], outputs.start(), 0, top_k)
    return grow(roots, root, expand, shape, expands_all=pairs)  # pairs are scored already
