"""A generation's drafting with a draft layer: read the committed text, then grow a tree behind it.

Entry t of the draft cache pairs the target's feature of x[t] with the embedding of x[t+1]. Entries from true features
are committed; entries made while a tree grows are forgotten with it.
"""

from __future__ import annotations

import functools
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
from hf_specdec.heads.captured import GraphDraftLayer
from hf_specdec.heads.captured_shapes import Advancing, Growing
from hf_specdec.trees.draft import Budget, Draft
from hf_specdec.trees.growth import (
    Level,
    Plan,
    StaticLevels,
    choices_within,
    grow,
    growable,
    scored,
)
from hf_specdec.verification.cache import TreeCache
from hf_specdec.verification.features import Features
from hf_specdec.verification.masks import committed_slots
from hf_specdec.verification.model import lm_head_rows
from hf_specdec.verification.step import Step, UnreadStep

RESERVED_SLOTS = 512
"""Slots kept ready behind the text in the draft layer's cache."""


@dataclass(frozen=True, slots=True)
class EagleTreeShape:
    """The largest tree of one generation: a static one (choices), or a dynamic one."""

    limits: Budget
    choices: tuple[Choice, ...] | None


class EagleSession(LaunchingSession):
    """One generation's drafting with one layer: its cache holds the text, and a tree while it grows."""

    def __init__(self, head: DraftLayer, model: PreTrainedModel, context: DraftContext, shape: EagleTreeShape) -> None:
        if context.features is None:
            raise ValueError("an EAGLE session needs the prompt's features")
        super().__init__(context.roots)
        self._head, self._shape = head, shape
        self._embedding = head.embedding_for(model)
        self._window = head.config.sliding_window
        self._lm_head: nn.Module | None = lm_head_rows(model, head.hot_token_ids) if head.shares_lm_head else None
        self._hot_token_ids = head.hot_token_ids
        new_cache = head.new_cache if isinstance(head, GraphDraftLayer) else functools.partial(TreeCache, [None], 0)
        self._cache = new_cache(RESERVED_SLOTS)
        self._static: dict[Budget, StaticLevels] = {}
        # a continued cache has no features of what it holds, and virtual tokens have no ids
        features = context.features.of(head.feature_layers)
        width, batch_size = min(features.shape[1], context.input_ids.shape[1]), len(context.roots)
        self._prompt: Entries | None = Entries(
            features[:, -width:],
            torch.cat([context.input_ids[:, 1:], context.roots[:, None]], dim=-1)[:, -width:],
            torch.arange(width, device=context.roots.device).expand(batch_size, -1),
            [range(width)] * batch_size,
        )
        self._pending: list[Entries] = []
        self._last: Tensor | None = None  # [B, 1, D] the layer's features of the last entry that was read
        self._known_lengths: list[int] = []  # of the cache, before a step that the host has not read
        self._padding = None if context.padding is None else context.padding.last(width)

    def _draft(self, budget: Budget) -> Draft:
        return self._grow(self._read_committed(), self._plan(budget))

    def _plan(self, budget: Budget) -> Plan:
        """How a tree within the budget grows."""
        budget = budget.within(self._shape.limits)
        if self._shape.choices is not None:
            return self._levels(self._shape.choices, budget)
        return growable(budget)

    def _grow(self, last: Tensor, plan: Plan) -> Draft:
        """Grow a tree behind the committed entries, the last of which has the features `[B, 1, D]`."""
        if isinstance(self._head, GraphDraftLayer):
            lengths = self._cache.lengths_on(self._roots.device, len(last))
            committed = committed_slots(lengths, self._cache.start, self._padding)
            growing = Growing(self._roots, last, self._first_positions(len(last)), lengths, committed)
            draft = self._head.grow(growing, plan, self._cache, self._embedding)
            if draft is not None:
                return draft

        def expand(tokens: Tensor, above: Level, parent_index: Tensor, seen: Tensor, depth: int) -> Level:
            return self._expand(tokens, above, parent_index, seen, depth, plan.top_k)

        draft = grow(self._roots, self._score(last, plan.top_k), expand, plan)
        self._cache.rollback()
        return draft

    def _levels(self, choices: Sequence[Choice], budget: Budget) -> StaticLevels:
        """The part of the static tree that fits a budget."""
        if budget not in self._static:
            self._static[budget] = StaticLevels.of(choices_within(choices, budget), self._roots.device)
        return self._static[budget]

    def launch(self, step: UnreadStep, budget: Budget) -> Sequence[Tensor]:
        """See `LaunchingSession`; a captured layer reads and grows in one graph."""
        if not isinstance(self._head, GraphDraftLayer) or self._prompt is not None or self._pending:
            return super().launch(step, budget)
        kept, lengths = step.acceptance, list(self._cache.lengths)
        states = features_of(step).of(self._head.feature_layers)
        advancing = Advancing(states, kept.path, kept.tokens, kept.next_token, self._padding)
        advanced = self._head.advance(advancing, self._plan(budget), self._cache, self._embedding)
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
        """What a step keeps, as entries that the layer has yet to read."""
        states = features.of(self._head.feature_layers)
        index = kept.path.clamp(min=0).to(states.device)[:, :, None].expand(-1, -1, states.shape[-1])
        places = torch.arange(kept.path.shape[1], device=kept.path.device)
        path = torch.where(kept.path >= 0, places, -1)
        return Entries(states.gather(1, index), kept.tokens.clamp(min=0), path, nodes)

    def close(self) -> None:
        """See `DraftSession`."""
        if isinstance(self._head, GraphDraftLayer):
            self._head.release(self._cache)

    # ------------------------------------------------------------------------------------------- the draft layer

    def _read_committed(self) -> Tensor:
        """Append the entries of what was committed, from true features; the last one's features `[B, 1, D]`."""
        if self._prompt is not None:
            self._last, self._prompt = self._read_prompt(self._prompt), None
        if self._pending:
            self._last, self._pending = self._read_steps(Entries.joined(self._pending)), []
        assert self._last is not None
        return self._last

    def _read_prompt(self, prompt: Entries) -> Tensor:
        """The layer's features `[B, 1, D]` of the prompt's last entry; all of it is appended."""
        width, device = prompt.tokens.shape[1], prompt.tokens.device
        entries = torch.arange(width, device=device)
        positions, visible = entries[None], None
        behind = entries[:, None] - entries
        if self._padding is not None:  # padding is not attended to
            visible = (behind >= 0) & self._padding.valid[:, None] | (behind == 0)
            positions = (self._padding.valid.cumsum(-1) - 1).clamp(min=0)
        elif self._window is not None and width > self._window:
            visible = (behind >= 0)[None]
        if visible is not None and self._window is not None:
            visible = visible & (behind < self._window)
        features = self._run(prompt.tokens, self._fuse(prompt.features), positions, visible)
        assert prompt.nodes is not None
        self._cache.commit(prompt.path, prompt.nodes)
        return features[:, -1:]

    def _read_steps(self, entries: Entries) -> Tensor:
        """The layer's features `[B, 1, D]` of each row's last entry; a row that got none keeps any."""
        counts = (entries.path >= 0).sum(-1, keepdim=True)
        places = torch.arange(entries.tokens.shape[1], device=entries.path.device)
        real = (entries.path[:, :, None] == places).any(1)  # [B, T]
        positions = self._first_positions(len(counts)) + (real.cumsum(-1) - 1).clamp(min=0)
        behind = places[:, None] - places
        visible = (behind >= 0) & real[:, None] | (behind == 0)
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
        """The head over T new entries.

        Args:
            tokens, features, positions: `[B, T]`, `[B, T, D]`, `[B or 1, T]`.
            visible: `[B or 1, T, appended]` bool, what each sees of the entries appended since the last commit; all
                see what is committed. None is plain causal, for a prompt without padding.
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
        """`[B, 1, T, S]` bool on the head's device: what is committed, and what is visible of the rest, see `_run`."""
        if visible is None:
            return None
        start, mask = self._cache.start, visible.expand(batch_size, -1, -1)
        if start:
            lengths = self._cache.lengths_on(visible.device, batch_size)
            committed = committed_slots(lengths, start, self._padding)[:, None].expand(-1, visible.shape[1], -1)
            if self._window is not None:  # it is longer than a tree is deep
                slots = positions if self._padding is None else positions + self._padding.counts[:, None]
                behind = slots[:, :, None] - torch.arange(start, device=slots.device)
                committed = committed & (behind < self._window)
            mask = torch.cat([committed, mask], dim=-1)
        return mask[:, None].to(self._head.device)

    def _score(self, features: Tensor, top_k: int) -> Level:
        """Score the children of K nodes by the target's own lm_head."""
        logits = self._head.score(features.to(self._head.device, self._head.dtype), self._lm_head).to(features.device)
        return scored(features, logits, top_k, self._hot_token_ids)

    def _expand(
        self, tokens: Tensor, above: Level, parent_index: Tensor, seen: Tensor, depth: int, top_k: int
    ) -> Level:
        """One level deeper, see `growth.Expand`."""
        positions = (self._first_positions(len(tokens)) + (depth - 1)).expand(-1, tokens.shape[1])
        index = parent_index[:, :, None].expand(-1, -1, above.features.shape[-1])
        return self._score(self._run(tokens, above.features.gather(1, index), positions, seen), top_k)

    def _first_positions(self, batch_size: int) -> Tensor:
        """`[B, 1]` position of the first entry after the committed ones."""
        firsts = self._cache.lengths_on(self._roots.device, batch_size)[:, None]
        return firsts if self._padding is None else firsts - self._padding.counts[:, None]
