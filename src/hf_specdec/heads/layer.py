"""Base class of draft layers, and the inputs and outputs of `grow` and `advance`, which only captured layers run."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from transformers import Cache

from hf_specdec.trees.draft import Draft
from hf_specdec.trees.growth import TreeShape
from hf_specdec.verification.cache import TreeCache
from hf_specdec.verification.features import Features
from hf_specdec.verification.window import PromptPadding


@dataclass(frozen=True, slots=True)
class TreeStart:
    """Inputs of `BaseDraftLayer.grow`: the root in each row, and the entries before it."""

    roots: Tensor  # [B]
    last: Tensor  # [B, 1, D] the layer's features of each row's last committed entry
    padding: PromptPadding | None  # of the entries in the layer's cache; None if there is none


@dataclass(frozen=True, slots=True)
class AcceptedStep:
    """A verified step whose accepted path the layer has not read yet."""

    features: Features  # the target's hidden states at the step's nodes
    path: Tensor  # [B, P] accepted nodes of the step, -1 after the end of a row's path
    tokens: Tensor  # [B, P] the token after each of them
    roots: Tensor  # [B] the last of these tokens
    padding: PromptPadding | None  # of the entries in the layer's cache


@dataclass(frozen=True, slots=True)
class AdvancedDraft:
    """Result of `BaseDraftLayer.advance`."""

    draft: Draft
    last: Tensor  # [B, 1, D] the layer's features of each row's last entry; valid until the next step


class BaseDraftLayer:
    """Base class of draft layers; its `grow` and `advance` return None, so that the session drafts level by level.

    Attributes:
        copies_weights: Whether it computes with copies of weights, see `Program`.
    """

    copies_weights = False

    def new_cache(self, reserve: int) -> TreeCache:
        """Return a cache with one layer for one call; it keeps `reserve` free slots after the text."""
        return TreeCache([None], capacity=0, reserve=reserve)

    def release(self, cache: Cache) -> None:
        """Release a cache whose call has ended; here nothing to do."""

    def grow(self, start: TreeStart, tree_shape: TreeShape, cache: TreeCache, embedding: nn.Module) -> Draft | None:
        """Grow a tree after the committed entries of the cache; the tree's own entries are dropped again.

        Args:
            start: The roots and the last committed entries.
            tree_shape: Size of the tree.
            cache: Cache from `new_cache`.
            embedding: Token embedding, see `embedding_for`.

        Returns:
            The draft, or None if the session must grow the tree.
        """
        return None

    def advance(
        self, step: AcceptedStep, tree_shape: TreeShape, cache: TreeCache, embedding: nn.Module
    ) -> AdvancedDraft | None:
        """Read the accepted path of a step and grow the next tree, without copying the path to the host.

        Afterwards the cache's lengths are exact on the device only, see `TreeCache.append_unread`.

        Args:
            step: The step.
            tree_shape, cache, embedding: See `grow`.

        Returns:
            The draft, or None if the session must read the step and grow the tree.
        """
        return None
