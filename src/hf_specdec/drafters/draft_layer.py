"""The interface between draft layers (EAGLE heads, MTP modules) and drafting sessions, and the entries they read."""

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
    """Predicts the target's next feature from the previous feature and a token; implemented by `BaseDraftLayer`."""

    config: Any  # `sliding_window`, and the defaults of the tree
    shares_lm_head: bool

    @property
    def device(self) -> torch.device:
        """Device of the layer."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Layers of the target whose hidden states the layer reads."""

    @property
    def hot_token_ids(self) -> Tensor | None:
        """Target ids of the draft vocabulary `[Vd]`; None means the whole vocabulary."""

    def embedding_for(self, model: PreTrainedModel) -> nn.Module:
        """Return the module that embeds token ids for the layer."""

    def fuse(self, features: Tensor) -> Tensor:
        """Map the target's features `[..., layers * D]` to hidden states for `read`."""

    def read(
        self, token_embeddings: Tensor, hidden: Tensor, position_ids: Tensor, cache: Cache, mask: Tensor | None
    ) -> Tensor:
        """Append T entries to the cache and return their features `[B, T, D]`, see `EagleFamilyHead.read`."""

    def score(self, hidden: Tensor, lm_head: nn.Module | None) -> Tensor:
        """Return logits `[..., Vd]` of features `[..., D]`."""

    def new_cache(self, reserve: int) -> TreeCache:
        """Return a cache for one call, see `BaseDraftLayer`."""

    def release(self, cache: Cache) -> None:
        """Release a cache whose call has ended."""

    def grow(self, start: TreeStart, tree_shape: TreeShape, cache: TreeCache, embedding: nn.Module) -> Draft | None:
        """Grow a whole tree in one call; None if the layer does not support it, see `BaseDraftLayer`."""

    def advance(
        self, step: AcceptedStep, tree_shape: TreeShape, cache: TreeCache, embedding: nn.Module
    ) -> AdvancedDraft | None:
        """Read a step and grow the next tree in one call; None if not supported, see `BaseDraftLayer`."""


@dataclass(frozen=True, slots=True)
class Entries:
    """Committed tokens that a draft layer has not read yet."""

    features: Tensor  # [B, T, layers * D] the target's features of each token but the last
    tokens: Tensor  # [B, T] the token after each of them
    path: Tensor  # [B, T] indices of the valid entries, in order; -1 beyond
    nodes: Sequence[Sequence[int]] | None  # `path` on the host, unpadded; None if the host has not read the step yet

    @property
    def counts(self) -> list[int]:
        """Number of valid entries of each row; requires `nodes`."""
        assert self.nodes is not None
        return [len(row) for row in self.nodes]

    @classmethod
    def joined(cls, parts: Sequence[Entries]) -> Entries:
        """Concatenate the entries of several steps."""
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
