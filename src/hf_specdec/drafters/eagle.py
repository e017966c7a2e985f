"""EAGLE drafting: grow a tree level by level with a draft layer; a dynamic tree keeps its most likely nodes.

Sources: EAGLE (https://arxiv.org/abs/2401.15077) for static trees, EAGLE-2 (https://arxiv.org/abs/2406.16858) for
dynamic trees. MTP modules draft in the same way (`drafters/mtp.py`). P-EAGLE (https://arxiv.org/abs/2602.01469) heads
draft all levels in one forward, so the distribution at a depth does not depend on the tokens above it.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from hf_specdec.config import ExecutionMode, SpeculativeConfig
from hf_specdec.cpu.quantized import packed_like
from hf_specdec.drafters.base import HOW_TO_LOAD, DraftContext, Drafter, DraftSession, DraftTarget, Needs
from hf_specdec.drafters.feature_session import (
    Committed,
    DraftGraphs,
    DraftPlan,
    Entries,
    FeatureSession,
    HeadFunctions,
    HeadProgram,
    LayerLimits,
)
from hf_specdec.drafters.registry import register
from hf_specdec.errors import DrafterMismatchError, InvalidConfigError
from hf_specdec.heads.eagle import EagleHead
from hf_specdec.heads.eagle3 import Eagle3Head
from hf_specdec.heads.head import EagleFamilyHead, bind_head
from hf_specdec.heads.stages import Stages, captured_stages, stages_of, traced_stages
from hf_specdec.trees.draft import Budget, Draft
from hf_specdec.trees.growth import (
    Level,
    StaticLevels,
    choices_budget,
    grow,
    growable,
    likeliest_nodes,
    reachable,
    scored,
)
from hf_specdec.validation import Choice, check_type, validate_choices
from hf_specdec.verification.cache import TreeCache
from hf_specdec.verification.device_attention import Mask
from hf_specdec.verification.features import PromptPadding, Window, token_positions
from hf_specdec.verification.graph_backends import GRAPH_BACKENDS
from hf_specdec.verification.model import lm_head_rows

DEFAULT_CHOICES: tuple[Choice, ...] = (
    (0,), (1,), (2,), (3,),
    (0, 0), (0, 1), (0, 2), (1, 0), (2, 0),
    (0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0),
    (0, 0, 0, 0), (0, 0, 0, 1),
)  # fmt: skip
"""Tree for `tree="static"` if the head's config contains none: wide at the top, and deepest below the best child."""


class LayerDrafter(Drafter):
    """Base of the drafters that draft from features: with an EAGLE head, MTP modules or a block head.

    `program` is the compiled or captured form of the head; None: its own methods run.
    """

    head: Any
    program: HeadProgram | None = None
    has_window = True

    def __repr__(self) -> str:
        return f"{type(self).__name__}({type(self.head).__name__} of {self.head.name_or_path or 'this process'})"

    def bind(self, model: PreTrainedModel) -> None:
        """Do the same as `bind_head`, and drop the head's embedding if it equals the model's."""
        head, size = self.head, self.head.config.hidden_size
        bind_head(head, model)
        head.share_embedding(model)
        width = getattr(head.embedding_for(model), "embedding_dim", size)
        if width != size:
            raise DrafterMismatchError(
                f"{type(model).__name__} has token embeddings of size {width}, this head needs {size}.",
                "Use a head that includes a token embedding.",
            )
        self.needs = replace(self.needs, feature_layers=head.feature_layers)

    def feature_window(self, config: SpeculativeConfig) -> Window | None:
        """Return the window of the call, or else the length of the texts that the layer was trained on, if known."""
        last = config.draft_window or getattr(self.head.config, "trained_length", None)
        return None if last is None else Window(last)

    @property
    def copies_target_weights(self) -> bool:
        """Whether a compiled layer holds rows or a packed copy of the target's lm_head, see `lm_head_rows`."""
        copies = self.program is not None and self.program.stages.copies_weights
        return bool(self.head.shares_lm_head and (self.head.hot_token_ids is not None or copies))

    def tree_limits(self, config: SpeculativeConfig) -> LayerLimits:
        """Return the largest tree for this config; fields that are None come from the head's config or the defaults.

        A static tree determines all sizes; `top_k` of the config is then ignored.
        """
        own = self.head.config
        tree = config.tree or own.tree
        if tree == "static":
            tree = DEFAULT_CHOICES if isinstance(own.tree, str) else own.tree
        if tree == "dynamic":
            budget = Budget(
                config.num_draft_tokens or own.num_draft_tokens or self.defaults.num_nodes,
                config.num_steps or own.num_steps or self.defaults.num_steps,
                config.top_k or own.top_k or self.defaults.top_k,
            )
            limits = LayerLimits(self.largest(budget), None, self.feature_window(config))
        else:
            choices = tuple(validate_choices(tree))
            limits = LayerLimits(choices_budget(choices), choices, self.feature_window(config))
            for name, wanted, actual in (
                ("num_draft_tokens", config.num_draft_tokens, limits.budget.num_nodes),
                ("num_steps", config.num_steps, limits.budget.num_steps),
            ):
                if wanted not in (None, actual):
                    raise InvalidConfigError(
                        f"The static tree has {name}={actual}, got {name}={wanted}.", f"Leave {name} None."
                    )
        vocabulary = own.draft_vocab_size or own.vocab_size
        if limits.budget.top_k > vocabulary:
            raise InvalidConfigError(
                f"`top_k` {limits.budget.top_k} exceeds the draft vocabulary of {vocabulary} tokens."
            )
        return limits

    def largest(self, budget: Budget) -> Budget:
        """Return the budget with `num_nodes` reduced to the most nodes that a dynamic tree within it can have."""
        return growable(budget)

    def limits(self, config: SpeculativeConfig) -> Budget:
        """Return the budget of the largest tree, see `tree_limits`."""
        return self.tree_limits(config).budget

    def start(self, target: DraftTarget, context: DraftContext, config: SpeculativeConfig) -> DraftSession:
        """Start a session; it reads the prompt in its first `propose`."""
        return self._session(target.model, context, self.tree_limits(config))

    def _session(self, model: PreTrainedModel, context: DraftContext, limits: LayerLimits) -> DraftSession:
        graphs = None if self.program is None else self.program.graphs
        return FeatureSession(self.functions(model), self.head, graphs, context, limits)

    def functions(self, model: PreTrainedModel) -> HeadFunctions:
        """Return what the head computes for a target."""
        return LayerFunctions.of(self.head, self._stages(model), model)

    def _stages(self, model: PreTrainedModel) -> Stages:
        return stages_of(self.head, self._lm_head(model)) if self.program is None else self.program.stages

    def _lm_head(self, model: PreTrainedModel) -> nn.Module | None:
        return lm_head_rows(model, self.head.hot_token_ids) if self.head.shares_lm_head else None

    def compiled(self, model: PreTrainedModel, mode: ExecutionMode) -> LayerDrafter:
        """See `Drafter.compiled`; if the device has graphs, one graph reads a step and drafts a whole tree.

        The kernels read copies in blocks if the target's weights are packed, see `packed_like`: they do not follow
        changes of the head.
        """
        other, device, head, lm_head = copy.copy(self), self.head.device, self.head, self._lm_head(model)
        if mode == "kernels":
            head, lm_head = packed_like(head, model), packed_like(lm_head, model)
        stages = captured_stages(head, lm_head) if mode == "cuda_graph" else traced_stages(head, lm_head, mode)
        backend = GRAPH_BACKENDS.get(device.type)
        other.program = HeadProgram(stages, None if backend is None else DraftGraphs(backend(device)))
        return other


@dataclass(frozen=True, slots=True)
class LayerFunctions(HeadFunctions):
    """What a draft layer computes: it reads entries, and grows a tree level by level with its own outputs."""

    head: Any
    stages: Stages
    embedding: nn.Module
    hot_token_ids: Tensor | None  # [Vd] target ids of the draft vocabulary; None if it is the target's
    window: int | None  # number of entries that an entry sees, itself included; longer than trees are deep
    device: torch.device
    dtype: torch.dtype

    @classmethod
    def of(cls, head: Any, stages: Stages, model: PreTrainedModel) -> LayerFunctions:
        """Return the functions of a head and a target."""
        window, embedding = head.config.sliding_window, head.embedding_for(model)
        return cls(head, stages, embedding, head.hot_token_ids, window, head.device, head.dtype)

    def plan(self, budget: Budget, levels: StaticLevels | None, largest: Budget) -> DraftPlan:
        """See `HeadFunctions`; an entry is appended for every expanded node below the root."""
        if levels is not None:
            return DraftPlan(levels, levels.num_entries)
        budget = growable(budget)
        return DraftPlan(budget, budget.top_k * max(budget.num_steps - 1, 0))

    def read_prompt(self, prompt: Entries, padding: PromptPadding | None, cache: TreeCache) -> Tensor:
        """See `HeadFunctions`; attention is causal, padding sees only itself."""
        (rows, width), device = prompt.tokens.shape, prompt.tokens.device
        entries, mask = torch.arange(width, dtype=torch.long, device=device), None
        distance = entries[:, None] - entries
        if padding is not None or (self.window is not None and width > self.window):
            mask = (distance >= 0)[None].expand(rows, -1, -1)
            if padding is not None:  # a fully masked row would give NaN
                mask = mask & padding.valid[:, None] | (distance == 0)
            if self.window is not None:
                mask = mask & (distance < self.window)
            mask = mask[:, None]
        positions = entries.expand(rows, -1) if padding is None else token_positions(padding)
        return self._run(prompt.tokens, self._fuse(prompt.features), positions, cache, mask)[:, -1:]

    def read(self, committed: Committed, features: Tensor, tokens: Tensor, valid: Tensor) -> Tensor:
        """See `HeadFunctions`."""
        width = tokens.shape[1]
        columns = torch.arange(width, dtype=torch.long, device=tokens.device)
        after = (valid.cumsum(-1) - 1).clamp(min=0)
        places = committed.lengths[:, None] + after
        distance = columns[:, None] - columns
        visible = (distance >= 0) & valid[:, None] | (distance == 0)
        if self.window is not None:
            visible = visible & (places[:, :, None] - places[:, None] < self.window)
        mask = committed.mask(places, visible, self.window)
        cache = committed.slots.cache(0, width)
        outputs = self._run(tokens, self._fuse(features), committed.first_positions + after, cache, mask)
        last = torch.where(valid, columns, 0).amax(-1)[:, None, None]
        return outputs.gather(1, last.expand(-1, -1, outputs.shape[-1]))

    def draft(self, committed: Committed, roots: Tensor, last: Tensor, plan: DraftPlan) -> Draft:
        """See `HeadFunctions`."""
        slots, lengths, first = committed.slots, committed.lengths, committed.first_positions
        top_k = plan.shape.top_k

        def expand(tokens: Tensor, above: Level, parent_index: Tensor, seen: Tensor, depth: int) -> Level:
            count, appended = seen.shape[1:]
            places = (lengths[:, None] + (depth - 1)).expand(-1, count)
            mask = committed.mask(places, seen, self.window)
            index = parent_index[:, :, None].expand(-1, -1, above.features.shape[-1])
            hidden, cache = above.features.gather(1, index), slots.cache(appended - count, count)
            positions = (first + (depth - 1)).expand(-1, count)
            return self.score(self._run(tokens, hidden, positions, cache, mask), top_k)

        return grow(roots, self.score(last, top_k), expand, plan.shape)

    def score(self, features: Tensor, top_k: int) -> Level:
        """Return the `top_k` likeliest children of K nodes with features `[B, K, D]`."""
        logits = self.stages.score(features.to(self.device, self.dtype)).to(features.device)
        return scored(features, logits, top_k, self.hot_token_ids)

    def _fuse(self, features: Tensor) -> Tensor:
        return self.stages.fuse(features.to(self.device, self.dtype))

    def _run(self, tokens: Tensor, hidden: Tensor, positions: Tensor, cache: Cache, mask: Mask | None) -> Tensor:
        """Run the layer over T new entries and return its outputs `[B, T, D]`, on the device of the tokens."""
        outputs = self.stages.read(
            self.embedding(tokens).to(self.device, self.dtype),
            hidden.to(self.device, self.dtype),
            positions.to(self.device),
            cache,
            None if mask is None else mask.to(self.device),
        )
        return outputs.to(tokens.device)


@dataclass(frozen=True, slots=True)
class ParallelFunctions(LayerFunctions):
    """What a P-EAGLE head computes: it reads entries as an EAGLE-3 head, and drafts with mask tokens behind them.

    The last entry predicts the children of the root, the n-th mask token the nodes of depth n + 1. A mask token sees
    all entries and the mask tokens before it.
    """

    def plan(self, budget: Budget, levels: StaticLevels | None, largest: Budget) -> DraftPlan:
        """See `HeadFunctions`; an entry is appended for every mask token."""
        plan = DraftPlan(reachable(budget) if levels is None else levels, 0)
        return replace(plan, num_entries=max(plan.max_depth - 1, 0))

    def draft(self, committed: Committed, roots: Tensor, last: Tensor, plan: DraftPlan) -> Draft:
        """See `HeadFunctions`."""
        outputs, (rows, count) = last, (len(roots), plan.num_entries)
        if count:
            numbers = torch.arange(count, dtype=torch.long, device=roots.device)
            mask = committed.mask(committed.lengths[:, None] + numbers, numbers[:, None] >= numbers, self.window)
            masked = self._run(
                roots.new_full((rows, count), self.head.config.mask_token_id),
                self._fuse(self.head.mask_hidden).expand(rows, count, -1),
                committed.first_positions + numbers,
                committed.slots.cache(0, count),
                mask,
            )
            outputs = torch.cat([last, masked], dim=1)
        best = self.score(outputs, plan.shape.top_k)
        return likeliest_nodes(roots, best.log_probs, best.tokens, plan.shape)


@register("eagle", heads=(EagleHead, Eagle3Head))
class EagleDrafter(LayerDrafter):
    """Drafts with a head of EAGLE-1 or 2, which shares the target's embedding and lm_head, or of EAGLE-3.

    Config fields: `tree` (`"dynamic"`, `"static"` or choices), `num_steps`, `top_k`, `num_draft_tokens`. Defaults come
    from the head's config; without them, the tree is dynamic with 4 steps, `top_k` 4 and 16 nodes.

    Args:
        head: The head. It is put in eval mode and its parameters are frozen; `bind` moves and casts it.
    """

    method = "eagle"
    needs = Needs(token_ids=True)
    head: EagleFamilyHead

    def __init__(self, head: EagleFamilyHead) -> None:
        check_type("head", head, EagleFamilyHead, HOW_TO_LOAD)
        self.head = head.eval().requires_grad_(False)

    @property
    def drafts_in_parallel(self) -> bool:
        """Whether the head drafts all levels of a tree in one forward (P-EAGLE)."""
        return getattr(self.head.config, "mask_token_id", None) is not None

    def largest(self, budget: Budget) -> Budget:
        """See `LayerDrafter.largest`; for P-EAGLE, all children of a node are candidates."""
        return reachable(budget) if self.drafts_in_parallel else super().largest(budget)

    def functions(self, model: PreTrainedModel) -> HeadFunctions:
        """See `LayerDrafter`."""
        kind = ParallelFunctions if self.drafts_in_parallel else LayerFunctions
        return kind.of(self.head, self._stages(model), model)
