"""The interface of draft layers (EAGLE heads, MTP modules) to drafting sessions, and the tokens that they read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from hf_specdec.heads.layer import AcceptedStep, AdvancedDraft, TreeStart
from hf_specdec.trees.draft import Draft
from hf_specdec.trees.growth import TreeShape
from hf_specdec.verification.cache import TreeCache


class DraftLayer(Protocol):
    """A layer that predicts the target's next feature (hidden state) from the previous feature and a token.

    `BaseDraftLayer` has default implementations of the last four methods.
    """

    config: Any  # has `sliding_window`, and the default sizes of the tree
    copies_weights: bool  # see `BaseDraftLayer`
    shares_lm_head: bool  # whether `score` uses the lm_head of the target; otherwise the layer has one

    @property
    def device(self) -> torch.device:
        """Device of the layer."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Numbers of the target's hidden states that the layer reads, see `Needs.feature_layers`."""

    @property
    def hot_token_ids(self) -> Tensor | None:
        """Target ids `[Vd]` of the tokens that the layer can predict; None: the whole vocabulary."""

    def embedding_for(self, model: PreTrainedModel) -> nn.Module:
        """Return the module that embeds token ids for the layer."""

    def fuse(self, features: Tensor) -> Tensor:
        """Map the target's features `[..., layers * D]` to hidden states for `read`."""

    def read(
        self, token_embeddings: Tensor, hidden: Tensor, position_ids: Tensor, cache: Cache, mask: Tensor | None
    ) -> Tensor:
        """Run the layer on T new entries, append them to its cache and return their features `[B, T, D]`.

        Args:
            token_embeddings, hidden: `[B, T, D]` token embedding and previous feature (from `fuse` or `read`) of each
                entry.
            position_ids: `[B, T]`.
            cache: Cache from `new_cache`.
            mask: `[B, 1, T, S]` bool over all S cached entries, True where an entry attends; None: causal, for an
                empty cache.
        """

    def score(self, hidden: Tensor, lm_head: nn.Module | None) -> Tensor:
        """Return the logits `[..., Vd]` of the tokens after features `[..., D]`.

        Args:
            hidden: The features.
            lm_head: The target's lm_head, only the rows of `hot_token_ids`; None unless `shares_lm_head`.
        """

    def new_cache(self, reserve: int) -> TreeCache:
        """Return a cache for one generation, with `reserve` free slots after the text."""

    def release(self, cache: Cache) -> None:
        """Release the cache of a generation that has ended."""

    def grow(self, start: TreeStart, tree_shape: TreeShape, cache: TreeCache, embedding: nn.Module) -> Draft | None:
        """Grow a tree after the cached entries; return None if the session must grow it level by level."""

    def advance(
        self, step: AcceptedStep, tree_shape: TreeShape, cache: TreeCache, embedding: nn.Module
    ) -> AdvancedDraft | None:
        """Read a step's accepted tokens and grow the next tree; return None if the session must do it."""


@dataclass(frozen=True, slots=True)
class Entries:
    """Committed text that a draft layer has not read yet; an entry combines a feature with the token after it."""

    features: Tensor  # [B, T, layers * D] the target's features at T tokens
    tokens: Tensor  # [B, T] the token after each of these
    path: Tensor  # [B, T] indices of the valid entries, in order; -1 beyond
    nodes: Sequence[Sequence[int]] | None  # `path` on the host, unpadded; None if the host has not read the step yet

    @property
    def counts(self) -> list[int]:
        """Number of valid entries in each row; `nodes` must not be None."""
        assert self.nodes is not None
        return [len(row) for row in self.nodes]

    @classmethod
    def joined(cls, parts: Sequence[Entries]) -> Entries:
        """Concatenate the entries of several steps along T."""
        if len(parts) == 1:
            return parts[0]
        offsets = [sum(part.tokens.shape[1] for part in parts[:index]) for index in range(len(parts))]
        moved = [
            torch.where(part.path >= 0, part.path + offset, -1) for part, offset in zip(parts, offsets, strict=True)
        ]
        path, width = torch.cat(moved, dim=-1), offsets[-1] + parts[-1].tokens.shape[1]
        path = torch.where(path >= 0, path, width).sort(dim=-1).values
        nodes = None
        if all(part.nodes is not None for part in parts):
            nodes = [
                [offset + n for part, offset in zip(parts, offsets, strict=True) for n in (part.nodes or ())[row]]
                for row in range(len(path))
            ]
        return cls(
            torch.cat([part.features for part in parts], dim=1),
            torch.cat([part.tokens for part in parts], dim=1),
            torch.where(path == width, -1, path),
            nodes,
        )
