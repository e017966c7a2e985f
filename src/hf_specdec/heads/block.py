"""Base class of block heads, and the masks with which a block attends to the committed tokens and to itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hf_specdec.heads.layer import AcceptedStep
from hf_specdec.trees.draft import Draft
from hf_specdec.trees.growth import TreeShape
from hf_specdec.verification.cache import TreeCache
from hf_specdec.verification.window import PromptPadding


class BaseBlockHead:
    """Base class of block heads; its methods return None, so that the session runs the block and grows the tree."""

    def draft(
        self, roots: Tensor, padding: PromptPadding | None, shape: TreeShape, size: int, cache: TreeCache,
        embedding: nn.Module,
    ) -> Draft | None:  # fmt: skip
        """Draft a tree behind the committed tokens; only captured heads do.

        Args:
            roots: `[B]`.
            padding: Padding of the tokens in the cache; None without padding.
            shape: Shape of the tree.
            size: Slots of the block.
            cache: Cache from `new_cache`.
            embedding: Token embedding.

        Returns:
            The draft, or None if the session must make it.
        """
        return None

    def draft_behind(
        self, step: AcceptedStep, shape: TreeShape, size: int, cache: TreeCache, embedding: nn.Module
    ) -> Draft | None:
        """Read the accepted path of a step and draft behind it, without copying the path to the host.

        Afterwards the cache's lengths are exact on the device only, see `TreeCache.append_unread`.

        Args:
            step: The step.
            shape, size, cache, embedding: See `draft`.

        Returns:
            The draft, or None if the session must read the step and draft.
        """
        return None


def block_masks(head: Any, visible: Tensor, lengths: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
    """Return for each layer which committed slots and which slots of the block a block behind them sees.

    Args:
        head: A block head, or an object with its `config` and `layer_windows`.
        visible: `[B, L]` bool, committed slots that hold tokens of the row.
        lengths: `[B]` committed slots of each row, padding included.
        size: Slots S of the block.

    Returns:
        For each layer `[B, S, L]` and `[S, S]` bool.
    """
    slots = torch.arange(size, dtype=torch.long, device=lengths.device)
    behind = slots[:, None] - slots
    masks: dict[int | None, tuple[Tensor, Tensor]] = {}
    for window in head.layer_windows:
        if window in masks:
            continue
        causal = head.config.causal if window is None else head.config.sliding_causal
        block = behind >= 0 if causal else torch.ones_like(behind, dtype=torch.bool)
        seen = visible[:, None].expand(-1, size, -1)
        if window is not None:
            columns = torch.arange(visible.shape[1], dtype=torch.long, device=lengths.device)
            distance = lengths[:, None, None] + slots[:, None] - columns
            if head.config.window_from_anchor:
                seen = seen & (distance[:, :1] <= window)
            else:
                seen, block = seen & (distance < window), block & (behind.abs() < window)
        masks[window] = seen, block
    return [masks[window] for window in head.layer_windows]
