"""The session of a draft layer, which reads the committed tokens, then grows a tree after them.

Entry t of the layer's cache combines the target's feature of token x[t] with the embedding of x[t+1]. Entries made
from the target's features are committed; entries appended while a tree grows are rolled back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_specdec.acceptance.paths import Acceptance
from hf_specdec.acceptance.pipelining import Decision
from hf_specdec.config import Choice
from hf_specdec.drafters.base import DraftContext
from hf_specdec.drafters.draft_layer import DraftLayer, Entries
from hf_specdec.drafters.launching import LaunchingSession, features_of
from hf_specdec.heads.layer import AcceptedStep, TreeStart
from hf_specdec.trees.draft import Budget, Draft
from hf_specdec.trees.growth import Level, StaticLevels, TreeShape, choices_within, grow, growable, scored
from hf_specdec.verification.features import Features
from hf_specdec.verification.masks import committed_slots
from hf_specdec.verification.model import lm_head_rows
from hf_specdec.verification.step import Step, UnreadStep

RESERVED_SLOTS = 512
"""Free slots kept after the text in the draft layer's cache."""


@dataclass(frozen=True, slots=True)
class LayerLimits:
    """The largest tree that is drafted in one generation."""

    budget: Budget
    choices: tuple[Choice, ...] | None  # the paths of a static tree; None: the tree is dynamic


class EagleSession(LaunchingSession):
    """A session with one draft layer, whose cache holds the text and, temporarily, a growing tree.

    Args:
        head: The draft layer.
        model: The target.
        context: The prompt; must include the target's features.
        limits: The largest tree.

    Raises:
        ValueError: The context has no features.
    """

    def __init__(self, head: DraftLayer, model: PreTrainedModel, context: DraftContext, limits: LayerLimits) -> None:
        if context.features is None:
            raise ValueError("An EAGLE session needs the target's features of the prompt, got none.")
        super().__init__(context.roots)
        self._head, self._limits = head, limits
        self._embedding = head.embedding_for(model)
        self._window = head.config.sliding_window
        self._lm_head: nn.Module | None = lm_head_rows(model, head.hot_token_ids) if head.shares_lm_head else None
        self._hot_token_ids = head.hot_token_ids
        self._cache = head.new_cache(RESERVED_SLOTS)
        self._static: dict[Budget, StaticLevels] = {}
        # tokens in a cache passed by the user have no features, virtual tokens (prompt tuning) have no ids
        features = context.features.of(head.feature_layers)
        width, batch_size = min(features.shape[1], context.input_ids.shape[1]), len(context.roots)
        self._prompt: Entries | None = Entries(
            features[:, -width:],
            torch.cat([context.input_ids[:, 1:], context.roots[:, None]], dim=-1)[:, -width:],
            torch.arange(width, device=context.roots.device).expand(batch_size, -1),
            [range(width)] * batch_size,
        )
        self._pending: list[Entries] = []
        self._last: Tensor | None = None  # [B, 1, D] the layer's features of each row's last entry
        self._known_lengths: list[int] = []  # cached tokens before the step that the host has not read
        self._padding = None if context.padding is None else context.padding.last(width)

    def _draft(self, budget: Budget) -> Draft:
        return self._grow(self._read_committed(), self._tree_shape(budget))

    def _tree_shape(self, budget: Budget) -> TreeShape:
        """Return the tree to grow: the part of the static tree within the budget, or the budget of a dynamic tree."""
        budget = budget.within(self._limits.budget)
        if self._limits.choices is not None:
            return self._levels(self._limits.choices, budget)
        return growable(budget)

    def _grow(self, last: Tensor, tree_shape: TreeShape) -> Draft:
        """Grow a tree after the committed entries; `last` `[B, 1, D]` are the layer's features of the last ones."""
        start = TreeStart(self._roots, last, self._padding)
        draft = self._head.grow(start, tree_shape, self._cache, self._embedding)
        if draft is not None:
            return draft

        def expand(tokens: Tensor, above: Level, parent_index: Tensor, seen: Tensor, depth: int) -> Level:
            return self._expand(tokens, above, parent_index, seen, depth, tree_shape.top_k)

        draft = grow(self._roots, self._score(last, tree_shape.top_k), expand, tree_shape)
        self._cache.rollback()
        return draft

    def _levels(self, choices: Sequence[Choice], budget: Budget) -> StaticLevels:
        """Return the part of the static tree that fits the budget."""
        if budget not in self._static:
            self._static[budget] = StaticLevels.of(choices_within(choices, budget), self._roots.device)
        return self._static[budget]

    def launch(self, step: UnreadStep, budget: Budget) -> Sequence[Tensor]:
        """See `LaunchingSession.launch`; if the layer is captured, one graph reads the step and grows the tree."""
        if self._prompt is not None or self._pending:
            return super().launch(step, budget)
        kept, lengths = step.acceptance, list(self._cache.lengths)
        accepted = AcceptedStep(features_of(step), kept.path, kept.tokens, kept.next_token, self._padding)
        advanced = self._head.advance(accepted, self._tree_shape(budget), self._cache, self._embedding)
        if advanced is None:
            return super().launch(step, budget)
        self._known_lengths, self._roots, self._last = lengths, kept.next_token, advanced.last
        self._note_launched(budget, advanced.draft)
        return ()

    def _follow(self, step: Step | UnreadStep) -> None:
        kept, features = step.acceptance, features_of(step)
        if isinstance(kept, Acceptance):
            nodes: list[range] | None = [range(count) for count in kept.counts]
        else:
            nodes, unread = None, [*([] if self._prompt is None else [self._prompt]), *self._pending]
            lengths = self._cache.lengths or [0] * len(kept.path)
            for part in unread:
                lengths = [length + count for length, count in zip(lengths, part.counts, strict=True)]
            self._known_lengths = lengths
        self._pending.append(self._entries(kept, features, nodes))

    def _settle(self, acceptance: Acceptance) -> None:
        known = zip(self._known_lengths, acceptance.counts, strict=True)
        self._cache.correct_lengths([length + count for length, count in known])

    def _entries(
        self, kept: Decision | Acceptance, features: Features, nodes: Sequence[Sequence[int]] | None
    ) -> Entries:
        """Return the entries of a step's accepted path, for the layer to read later."""
        states = features.of(self._head.feature_layers)
        index = kept.path.clamp(min=0).to(states.device)[:, :, None].expand(-1, -1, states.shape[-1])
        path = torch.where(kept.path >= 0, torch.arange(kept.path.shape[1], device=kept.path.device), -1)
        return Entries(states.gather(1, index), kept.tokens.clamp(min=0), path, nodes)

    def close(self) -> None:
        """Release the layer's cache."""
        self._head.release(self._cache)

    # ------------------------------------------------------------------------------------------- the draft layer

    def _read_committed(self) -> Tensor:
        """Run the layer on all unread entries and return its features `[B, 1, D]` of each row's last entry."""
        if self._prompt is not None:
            self._last, self._prompt = self._read_prompt(self._prompt), None
        if self._pending:
            self._last, self._pending = self._read_steps(Entries.joined(self._pending)), []
        assert self._last is not None
        return self._last

    def _read_prompt(self, prompt: Entries) -> Tensor:
        """Run the layer on the prompt, commit its entries and return the features `[B, 1, D]` of the last one."""
        width, device = prompt.tokens.shape[1], prompt.tokens.device
        entries = torch.arange(width, device=device)
        positions, visible = entries[None], None
        distance = entries[:, None] - entries
        if self._padding is not None:  # padding sees only itself; a fully masked row would give NaN
            visible = (distance >= 0) & self._padding.valid[:, None] | (distance == 0)
            positions = (self._padding.valid.cumsum(-1) - 1).clamp(min=0)
        elif self._window is not None and width > self._window:
            visible = (distance >= 0)[None]
        if visible is not None and self._window is not None:
            visible = visible & (distance < self._window)
        features = self._run(prompt.tokens, self._fuse(prompt.features), positions, visible)
        assert prompt.nodes is not None
        self._cache.commit(prompt.path, prompt.nodes)
        return features[:, -1:]

    def _read_steps(self, entries: Entries) -> Tensor:
        """Run the layer on entries and commit them; return the features `[B, 1, D]` of each row's last one.

        They are arbitrary in rows without entries.
        """
        counts = (entries.path >= 0).sum(-1, keepdim=True)
        indices = torch.arange(entries.tokens.shape[1], device=entries.path.device)
        valid = (entries.path[:, :, None] == indices).any(1)  # [B, T]
        positions = self._first_positions(len(counts)) + (valid.cumsum(-1) - 1).clamp(min=0)
        distance = indices[:, None] - indices
        visible = (distance >= 0) & valid[:, None] | (distance == 0)
        if self._window is not None:
            visible = visible & (positions[:, :, None] - positions[:, None] < self._window)
        features = self._run(entries.tokens, self._fuse(entries.features), positions, visible)
        if entries.nodes is None:
            self._cache.commit_unread(entries.path)
        else:
            self._cache.commit(entries.path, entries.nodes)
        last = entries.path.gather(1, (counts - 1).clamp(min=0)).clamp(min=0)
        return features.gather(1, last[:, :, None].expand(-1, -1, features.shape[-1]))

    def _fuse(self, features: Tensor) -> Tensor:
        return self._head.fuse(features.to(self._head.device, self._head.dtype))

    def _run(self, tokens: Tensor, features: Tensor, positions: Tensor, visible: Tensor | None) -> Tensor:
        """Run the layer over T new entries and return their features `[B, T, D]`.

        Args:
            tokens, features, positions: `[B, T]`, `[B, T, D]`, `[B or 1, T]`.
            visible: `[B or 1, T, appended]` bool: the entries appended since the last commit that each new entry
                attends to, in addition to the committed ones. None means causal attention (a prompt without padding).
        """
        device = self._head.device
        output = self._head.read(
            self._embedding(tokens).to(device, self._head.dtype),
            features.to(device, self._head.dtype),
            positions.expand(len(tokens), -1).to(device),
            self._cache,
            self._mask(positions, visible, len(tokens)),
        )
        return output.to(tokens.device)

    def _mask(self, positions: Tensor, visible: Tensor | None, batch_size: int) -> Tensor | None:
        """Return the mask `[B, 1, T, S]` over committed and appended entries; arguments and None as in `_run`."""
        if visible is None:
            return None
        start, mask = self._cache.start, visible.expand(batch_size, -1, -1)
        if start:
            lengths = self._cache.lengths_on(visible.device, batch_size)
            committed = committed_slots(lengths, start, self._padding)[:, None].expand(-1, visible.shape[1], -1)
            if self._window is not None:  # windows are longer than trees are deep, so they hide no ancestors
                slots = positions if self._padding is None else positions + self._padding.counts[:, None]
                distance = slots[:, :, None] - torch.arange(start, device=slots.device)
                committed = committed & (distance < self._window)
            mask = torch.cat([committed, mask], dim=-1)
        return mask[:, None].to(self._head.device)

    def _score(self, features: Tensor, top_k: int) -> Level:
        """Return the `Level` of K nodes with features `[B, K, D]`: the `top_k` likeliest children of each."""
        logits = self._head.score(features.to(self._head.device, self._head.dtype), self._lm_head).to(features.device)
        return scored(features, logits, top_k, self._hot_token_ids)

    def _expand(
        self, tokens: Tensor, above: Level, parent_index: Tensor, seen: Tensor, depth: int, top_k: int
    ) -> Level:
        """Run the layer on the nodes of one depth and return their children, see `growth.Expand`."""
        positions = (self._first_positions(len(tokens)) + (depth - 1)).expand(-1, tokens.shape[1])
        index = parent_index[:, :, None].expand(-1, -1, above.features.shape[-1])
        return self._score(self._run(tokens, above.features.gather(1, index), positions, seen), top_k)

    def _first_positions(self, batch_size: int) -> Tensor:
        """Return the position `[B, 1]` of the first entry after the committed ones."""
        firsts = self._cache.lengths_on(self._roots.device, batch_size)[:, None]
        return firsts if self._padding is None else firsts - self._padding.counts[:, None]
