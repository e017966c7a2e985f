"""The session of a draft layer, which reads the committed tokens, then grows a tree after them.

Entry t of the layer's cache combines the target's feature of token x[t] with the embedding of x[t+1]. Entries made
from the target's features are committed; entries appended while a tree grows are rolled back.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.drafters.base import DraftContext
from hf_specdec.drafters.draft_layer import DraftLayer, Entries
from hf_specdec.drafters.feature_session import FeatureSession, LayerLimits
from hf_specdec.drafters.launching import features_of
from hf_specdec.heads.layer import AcceptedStep, TreeStart
from hf_specdec.trees.draft import Budget, Draft
from hf_specdec.trees.growth import Level, TreeShape, grow, growable, scored
from hf_specdec.verification.step import Step
from hf_specdec.verification.window import token_positions


class EagleSession(FeatureSession):
    """A session with one draft layer, whose cache holds the text and, temporarily, a growing tree.

    Args:
        head: The draft layer.
        model, context, limits: See `FeatureSession`.
    """

    def __init__(self, head: DraftLayer, model: PreTrainedModel, context: DraftContext, limits: LayerLimits) -> None:
        super().__init__(head, model, context, limits)
        self._window = head.config.sliding_window
        self._last: Tensor | None = None  # [B, 1, D] the layer's features of each row's last entry

    def _draft(self, budget: Budget) -> Draft:
        self._read_unread()
        assert self._last is not None
        return self._grow(self._last, self._tree_shape(budget))

    def _tree_shape(self, budget: Budget) -> TreeShape:
        """Return the tree to grow: the part of the static tree within the budget, or the budget of a dynamic tree."""
        budget = budget.within(self._limits.budget)
        if self._limits.choices is not None:
            return self._levels(budget)
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

    def launch(self, step: Step, budget: Budget) -> Sequence[Tensor]:
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

    # ------------------------------------------------------------------------------------------- the draft layer

    def _read_prompt(self, prompt: Entries) -> None:
        width, device = prompt.tokens.shape[1], prompt.tokens.device
        entries = torch.arange(width, device=device)
        positions, visible = entries[None], None
        distance = entries[:, None] - entries
        if self._padding is not None:
            positions = token_positions(self._padding)
        if self._padding is not None and self._is_padded:
            # padding sees only itself; a fully masked row would give NaN
            visible = (distance >= 0) & self._padding.valid[:, None] | (distance == 0)
        elif self._window is not None and width > self._window:
            visible = (distance >= 0)[None]
        if visible is not None and self._window is not None:
            visible = visible & (distance < self._window)
        features = self._run(prompt.tokens, self._fuse(prompt.features), positions, visible)
        self._commit(prompt)
        self._last = features[:, -1:]

    def _read_steps(self, entries: Entries) -> None:
        counts = (entries.path >= 0).sum(-1, keepdim=True)
        indices = torch.arange(entries.tokens.shape[1], device=entries.path.device)
        valid = (entries.path[:, :, None] == indices).any(1)  # [B, T]
        positions = self._first_positions(len(counts)) + (valid.cumsum(-1) - 1).clamp(min=0)
        distance = indices[:, None] - indices
        visible = (distance >= 0) & valid[:, None] | (distance == 0)
        if self._window is not None:
            visible = visible & (positions[:, :, None] - positions[:, None] < self._window)
        features = self._run(entries.tokens, self._fuse(entries.features), positions, visible)
        self._commit(entries)
        last = entries.path.gather(1, (counts - 1).clamp(min=0)).clamp(min=0)
        # arbitrary in rows without entries
        self._last = features.gather(1, last[:, :, None].expand(-1, -1, features.shape[-1]))

    def _fuse(self, features: Tensor) -> Tensor:
        return self._head.fuse(features.to(self._device, self._dtype))

    def _run(self, tokens: Tensor, features: Tensor, positions: Tensor, visible: Tensor | None) -> Tensor:
        """Run the layer over T new entries and return their features `[B, T, D]`.

        Args:
            tokens, features, positions: `[B, T]`, `[B, T, D]`, `[B or 1, T]`.
            visible: `[B or 1, T, appended]` bool: the entries appended since the last commit that each new entry
                attends to, in addition to the committed ones. None means causal attention (a prompt without padding).
        """
        output = self._head.read(
            self._embedding(tokens).to(self._device, self._dtype),
            features.to(self._device, self._dtype),
            positions.expand(len(tokens), -1).to(self._device),
            self._cache,
            self._mask(positions, visible, len(tokens)),
        )
        return output.to(tokens.device)

    def _mask(self, positions: Tensor, visible: Tensor | None, batch_size: int) -> Tensor | None:
        """Return the mask `[B, 1, T, S]` over committed and appended entries; arguments and None as in `_run`."""
        if visible is None:
            return None
        mask = visible.expand(batch_size, -1, -1)
        if self._cache.start:  # windows are longer than trees are deep, so they hide no ancestors
            mask = torch.cat([self._committed(positions, batch_size, self._window), mask], dim=-1)
        return mask[:, None].to(self._device)

    def _score(self, features: Tensor, top_k: int) -> Level:
        """Return the `Level` of K nodes with features `[B, K, D]`: the `top_k` likeliest children of each."""
        logits = self._head.score(features.to(self._device, self._dtype), self._lm_head).to(features.device)
        return scored(features, logits, top_k, self._hot_token_ids)

    def _expand(
        self, tokens: Tensor, above: Level, parent_index: Tensor, seen: Tensor, depth: int, top_k: int
    ) -> Level:
        """Run the layer on the nodes of one depth and return their children, see `growth.Expand`."""
        positions = (self._first_positions(len(tokens)) + (depth - 1)).expand(-1, tokens.shape[1])
        index = parent_index[:, :, None].expand(-1, -1, above.features.shape[-1])
        return self._score(self._run(tokens, above.features.gather(1, index), positions, seen), top_k)
