"""Base of sessions that keep a cache of the committed tokens' features: EAGLE heads, MTP modules and block heads."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_specdec.acceptance.pipelining import Acceptance, Decision
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
from hf_specdec.verification.window import PromptPadding, Window, shifted_padding

RESERVED_SLOTS = 512
"""Free slots kept after the text in the draft layer's cache."""


@dataclass(frozen=True, slots=True)
class LayerLimits:
    """The largest tree that is drafted in one generation, and the tokens that the head sees."""

    budget: Budget
    choices: tuple[Choice, ...] | None  # the paths of a static tree; None: the tree is dynamic
    window: Window | None = None  # tokens that the head attends to; None: all


class FeatureSession(LaunchingSession):
    """A session that reads the target's features of the committed tokens into a cache, once per token.

    With a window W (`LayerLimits.window`), only the first `SINKS` and the last W tokens of a longer prompt are read.
    When the longest row of the cache then exceeds `SINKS + W` slots by more than `Window.spare`, every row keeps its
    first `SINKS` and its last W tokens; this is done between two steps. A new entry attends to all entries that the
    cache holds. Keys keep the rotation of their true position, and new entries continue to count from there.

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
        self._device, self._dtype = head.device, head.dtype  # torch searches the parameters each time
        self._embedding = head.embedding_for(model)
        self._lm_head: nn.Module | None = lm_head_rows(model, head.hot_token_ids) if head.shares_lm_head else None
        self._hot_token_ids = head.hot_token_ids
        self._cache = head.new_cache(RESERVED_SLOTS)
        self._static: dict[Budget, StaticLevels] = {}
        self._pending: list[Entries] = []
        self._known_lengths: list[int] = []  # cached tokens before the step that the host has not read
        self._is_padded = context.padding is not None
        self._prompt: Entries | None
        self._prompt, self._padding = prompt_entries(context, head.feature_layers, limits.window)

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

    def observe(self, step: Step) -> None:
        """See `LaunchingSession.observe`. With a window, two more things keep the memory bounded.

        If more than `window.spare` entries are pending, they are read, because `hybrid` may not query the head for a
        long time. If the cache exceeds the window by more than `window.spare`, the tokens outside of it are dropped.
        """
        super().observe(step)
        window = self._limits.window
        if window is None:
            return
        if sum(part.tokens.shape[1] for part in self._pending) > window.spare:
            self._read_unread()
        if self._cache.start > window.size + window.spare:
            self._drop_old(window)

    def _drop_old(self, window: Window) -> None:
        """Keep only the tokens within the window in every row of the cache, without reading the device."""
        device = self._roots.device
        lengths = self._cache.lengths_on(device, len(self._roots))
        slots, valid = window.choose(committed_slots(lengths, self._cache.start, self._padding))
        totals = lengths if self._padding is None else lengths - self._padding.counts
        self._cache.keep(slots)
        self._padding = shifted_padding(valid, totals)

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


def prompt_entries(
    context: DraftContext, layers: Sequence[int], window: Window | None
) -> tuple[Entries, PromptPadding | None]:
    """Return a prompt's entries within a window, and their padding.

    Tokens in a cache passed by the user have no features, virtual tokens (prompt tuning) have no ids: both are left
    out. Without token ids (`inputs_embeds`), the entries have only the root's.

    Args:
        context: The prompt, with features.
        layers: Numbers of the hidden states to read.
        window: The window, or None.
    """
    assert context.features is not None
    features, chosen, padding = context.features.of(layers), context.features.chosen, context.padding
    tokens = torch.cat([context.input_ids[:, 1:], context.roots[:, None]], dim=-1)
    rows, device, has_ids = len(tokens), tokens.device, context.input_ids.shape[1] > 0
    if chosen is None:
        width = min(features.shape[1], tokens.shape[1]) if has_ids else features.shape[1]
        features, tokens = features[:, -width:], tokens[:, -width:]
        padding = None if padding is None else padding.last(width)
        valid = torch.ones(rows, width, dtype=torch.bool, device=device) if padding is None else padding.valid
        slots = torch.arange(width, dtype=torch.long, device=device).expand(rows, -1)
    else:  # `Target.prefill` has kept only a part, perhaps for another drafter
        width, valid, slots = chosen.num_slots, chosen.valid, chosen.slots
    is_cut = window is not None and len(slots[0]) > window.size
    if window is not None and is_cut:
        index, kept = window.choose(valid)
        features = features.gather(1, index.to(features.device)[:, :, None].expand(-1, -1, features.shape[-1]))
        slots, valid = slots.gather(1, index), kept
    if chosen is not None or is_cut:
        tokens = tokens.gather(1, slots) if has_ids else tokens
        counts = 0 if padding is None else padding.counts
        totals = torch.full((rows,), width, dtype=torch.long, device=device) - counts
        padding = shifted_padding(valid, totals)
    num = slots.shape[1]
    path = torch.arange(num, dtype=torch.long, device=device).expand(rows, -1)
    return Entries(features, tokens, path, [range(num)] * rows), padding
