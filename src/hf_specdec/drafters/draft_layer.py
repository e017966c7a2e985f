"""What a draft layer is to its drafter, and the text that it has yet to read.

EAGLE heads and MTP modules are draft layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel


class DraftLayer(Protocol):
    """What drafts level by level: it predicts the target's next feature from the last one and a token."""

    config: Any  # `sliding_window`, and what a tree's shape may come from
    shares_lm_head: bool

    @property
    def device(self) -> torch.device:
        """Where it runs."""

    @property
    def dtype(self) -> torch.dtype:
        """Of its weights."""

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The target's hidden states that it reads."""

    @property
    def hot_token_ids(self) -> Tensor | None:
        """Target ids of its draft vocabulary `[Vd]`; None is all of V."""

    def embedding_for(self, model: PreTrainedModel) -> nn.Module:
        """From token ids to what it reads of them."""

    def fuse(self, features: Tensor) -> Tensor:
        """The target's features `[..., layers * D]` as it reads them."""

    def read(
        self, token_embeddings: Tensor, hidden: Tensor, position_ids: Tensor, cache: Cache, mask: Tensor | None
    ) -> Tensor:
        """Features `[B, T, D]` of T new entries, see `EagleFamilyHead.read`."""

    def score(self, hidden: Tensor, lm_head: nn.Module | None) -> Tensor:
        """Logits `[..., Vd]`."""


@dataclass(frozen=True, slots=True)
class Entries:
    """Committed text that a draft layer has not read yet."""

    features: Tensor  # [B, T, layers * D] the target's, of each token but the last
    tokens: Tensor  # [B, T] the tokens after them
    path: Tensor  # [B, T] which of the T entries are real, in order; -1 beyond
    nodes: Sequence[Sequence[int]] | None  # the same on the host; None if the host has not read the step yet

    @property
    def counts(self) -> list[int]:
        """Entries of each row; the host must have read the step that they come from."""
        assert self.nodes is not None
        return [len(row) for row in self.nodes]

    @classmethod
    def joined(cls, parts: Sequence[Entries]) -> Entries:
        """Join the entries of several steps."""
        if len(parts) == 1:
            return parts[0]
        offsets = [sum(part.tokens.shape[1] for part in parts[:index]) for index in range(len(parts))]
        moved = [
            torch.where(part.path >= 0, part.path + offset, -1) for part, offset in zip(parts, offsets, strict=True)
        ]
        path, last = torch.cat(moved, dim=-1), offsets[-1] + parts[-1].tokens.shape[1]
        path = torch.where(path >= 0, path, last).sort(dim=-1).values
        return cls(
            torch.cat([part.features for part in parts], dim=1),
            torch.cat([part.tokens for part in parts], dim=1),
            torch.where(path == last, -1, path),
            None
            if any(part.nodes is None for part in parts)
            else [
                [
                    offset + node
                    for part, offset in zip(parts, offsets, strict=True)
                    for node in (part.nodes or ())[row]
                ]
                for row in range(len(path))
            ],
        )
