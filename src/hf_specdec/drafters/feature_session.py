"""Base of sessions that keep a cache of the committed tokens' features: EAGLE heads, MTP modules and block heads."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_specdec.acceptance.paths import Acceptance
from hf_specdec.acceptance.pipelining import Decision
from hf_specdec.drafters.base import DraftContext
from hf_specdec.drafters.draft_layer import Entries
from hf_specdec.drafters.launching import LaunchingSession, features_of
from hf_specdec.trees.draft import Budget
from hf_specdec.trees.growth import StaticLevels, choices_within
from hf_specdec.validation import Choice
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


class FeatureSession(LaunchingSession):
    """A session that reads the target's features of all committed tokens into a cache, once per token.

    Args:
        head: The head or draft layer.
        model: The target.
        context: The prompt; must include the target's features.
        limits: The largest tree.

    Raises:
        ValueError: The context has no features.
    """

    def __init__(self, head: Any, model: PreTrainedModel, context: DraftContext, limits: LayerLimits) -> None:
        if context.features is None:
            raise ValueError(f"A {type(self).__name__} needs the target's features of the prompt, got none.")
        super().__init__(context.roots)
        self._head, self._limits = head, limits
        self._embedding = head.embedding_for(model)
        self._lm_head: nn.Module | None = lm_head_rows(model, head.hot_token_ids) if head.shares_lm_head else None
        self._hot_token_ids = head.hot_token_ids
        self._cache = head.new_cache(RESERVED_SLOTS)
        self._static: dict[Budget, StaticLevels] = {}
        # tokens in a cache passed by the user have no features, virtual tokens (prompt tuning) have no ids
        features = context.features.of(head.feature_layers)
        width, batch_size = features.shape[1], len(context.roots)
        tokens = torch.cat([context.input_ids[:, 1:], context.roots[:, None]], dim=-1)
        if context.input_ids.shape[1]:
            width = min(width, tokens.shape[1])
        self._prompt: Entries | None = Entries(
            features[:, -width:], tokens[:, -width:], torch.arange(width, device=tokens.device).expand(batch_size, -1),
            [range(width)] * batch_size,
        )  # fmt: skip
        self._pending: list[Entries] = []
        self._known_lengths: list[int] = []  # cached tokens before the step that the host has not read
        self._padding = None if context.padding is None else context.padding.last(width)

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
        """Return the entries of a step's accepted path, for the head to read later."""
        states = features.of(self._head.feature_layers)
        index = kept.path.clamp(min=0).to(states.device)[:, :, None].expand(-1, -1, states.shape[-1])
        path = torch.where(kept.path >= 0, torch.arange(kept.path.shape[1], device=kept.path.device), -1)
        return Entries(states.gather(1, index), kept.tokens.clamp(min=0), path, nodes)

    def close(self) -> None:
        """Release the cache."""
        self._head.release(self._cache)

    def _read_unread(self) -> None:
        """Read all entries that the head has not read yet into the cache."""
        if self._prompt is not None:
            prompt, self._prompt = self._prompt, None
            self._read_prompt(prompt)
        if self._pending:
            entries, self._pending = Entries.joined(self._pending), []
            self._read_steps(entries)

    @abstractmethod
    def _read_prompt(self, prompt: Entries) -> None:
        """Read and commit the prompt's entries, of which `_padding` are padding."""

    @abstractmethod
    def _read_steps(self, entries: Entries) -> None:
        """Read and commit the entries of accepted paths."""

    def _commit(self, entries: Entries) -> None:
        """Commit entries that were just appended to the cache."""
        if entries.nodes is None:
            self._cache.commit_unread(entries.path)
        else:
            self._cache.commit(entries.path, entries.nodes)

    def _levels(self, budget: Budget) -> StaticLevels:
        """Return the part of the static tree that fits the budget."""
        assert self._limits.choices is not None
        if budget not in self._static:
            self._static[budget] = StaticLevels.of(choices_within(self._limits.choices, budget), self._roots.device)
        return self._static[budget]

    def _committed(self, positions: Tensor, batch_size: int, window: int | None) -> Tensor:
        """Return which committed slots `[B, T, start]` entries at `positions` `[B or 1, T]` see, within a window."""
        start, device = self._cache.start, positions.device
        lengths = self._cache.lengths_on(device, batch_size)
        committed = committed_slots(lengths, start, self._padding)[:, None].expand(-1, positions.shape[1], -1)
        if window is not None:
            slots = positions if self._padding is None else positions + self._padding.counts[:, None]
            committed = committed & (slots[:, :, None] - torch.arange(start, device=device) < window)
        return committed

    def _first_positions(self, batch_size: int) -> Tensor:
        """Return the position `[B, 1]` of the first entry after the committed ones."""
        firsts = self._cache.lengths_on(self._roots.device, batch_size)[:, None]
        return firsts if self._padding is None else firsts - self._padding.counts[:, None]
