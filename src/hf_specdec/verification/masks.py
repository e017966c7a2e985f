"""Attention masks and position ids of a tree forward.

A node attends to the committed tokens of its row, its ancestors and itself; sliding-window and chunked layers attend
to fewer. transformers measures windows in *slots*: a node counts as being in the slot that it would have in plain
generation (root slot plus depth), not in the slot that it is written to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from hf_specdec.transformers_private import attention_name
from hf_specdec.trees.tree import TokenTree
from hf_specdec.verification.window import PromptPadding

LayerKind = Literal["full", "sliding", "chunked"]
"""Earlier slots that a layer attends to: all, the last ones within a window, or those of the same chunk."""
Masks = Tensor | dict[str, Tensor]
"""Mask `[B, 1, N, S]` of all layers, or one such mask per layer type."""

LAYER_KINDS: Mapping[str, LayerKind] = {
    "full_attention": "full",
    "sliding_attention": "sliding",
    "chunked_attention": "chunked",
}
"""transformers' layer types that attend to plain keys and values."""


@dataclass(frozen=True, slots=True)
class MaskLayout:
    """Masks that a model needs: layer type, kind, and size of the window or chunk in slots (0 for full attention)."""

    layers: tuple[tuple[str, LayerKind, int], ...]
    additive: bool  # eager attention adds the mask to the scores; sdpa takes a bool mask (True: attend)

    @classmethod
    def of(cls, text_config: Any) -> MaskLayout:
        """Read the layout from a text configuration, like transformers' `create_masks_for_generate`."""
        sizes = {
            "full": 0,
            "sliding": getattr(text_config, "sliding_window", None) or 0,
            "chunked": getattr(text_config, "attention_chunk_size", None) or 0,
        }
        types = sorted(set(getattr(text_config, "layer_types", None) or ()))
        if not types:
            types = ["sliding_attention" if sizes["sliding"] else
                     "chunked_attention" if sizes["chunked"] else "full_attention"]  # fmt: skip
        additive = attention_name(text_config) == "eager"
        return cls(tuple((name, LAYER_KINDS[name], sizes[LAYER_KINDS[name]]) for name in types), additive)


@dataclass(frozen=True, slots=True)
class Positions:
    """Position ids as in plain generation: tokens after the prompt count up from its last position.

    The prompt's ids have any shape that ends in `[B or 1, P]`: multimodal models have leading rotary sections.
    """

    last: Tensor  # [..., B or 1] position of the prompt's last slot
    num_slots: int  # slots of the prompt, including padding

    @classmethod
    def of(cls, prompt_ids: Tensor | None, num_slots: int, device: torch.device) -> Positions:
        """Create from the prompt's position ids; if they are None, positions are slot indices.

        Args:
            prompt_ids: `[..., B or 1, P]`, or None.
            num_slots: Slots of the prompt, including padding.
            device: Device of the positions if `prompt_ids` is None.
        """
        if prompt_ids is None:
            return cls(torch.tensor([num_slots - 1], dtype=torch.long, device=device), num_slots)
        return cls(prompt_ids[..., -1], num_slots)

    def of_nodes(self, depths: Tensor, lengths: Tensor, ceiling: int | None = None) -> Tensor:
        """Return the positions `[..., B, N]` of nodes.

        Args:
            depths: `[B or 1, N]` depth of each node.
            lengths: `[B]` committed slots of each row.
            ceiling: Largest position, which only rows that have ended would exceed; None: no limit.

        Example: a prompt of 5 slots, 2 of them padding, ends at position 2; depths [0, 1, 1, 2] give [3, 4, 4, 5].
        """
        grown = lengths[:, None] - self.num_slots + 1
        positions = self.last.to(depths.device)[..., None] + grown + depths
        return positions if ceiling is None else positions.clamp(max=ceiling)


@dataclass(frozen=True, slots=True)
class TreeInputs:
    """Inputs from which masks and positions of a tree forward are computed."""

    tree: TokenTree
    lengths: Tensor  # [B] committed tokens of each row
    start: int  # length of the longest row
    padding: PromptPadding | None
    positions: Positions
    layout: MaskLayout
    dtype: torch.dtype  # of additive masks
    all_seen: bool  # whether the tree is a single node that attends to every slot
    ceiling: int | None = None  # see `Positions.of_nodes`


def committed_slots(lengths: Tensor, start: int, padding: PromptPadding | None) -> Tensor:
    """Return a bool mask `[B, start]` of the slots that hold a committed token.

    Args:
        lengths: `[B]` committed tokens of each row.
        start: Length of the longest row.
        padding: Padding of the prompt.

    Example: lengths [2, 3] and start 3, without padding, give rows 110 and 111.
    """
    slots = torch.arange(start, device=lengths.device)
    committed = slots < lengths[:, None]
    if padding is not None:
        committed[:, : padding.valid.shape[1]] &= padding.valid
    return committed


def tree_masks(
    layout: MaskLayout,
    ancestors: Tensor,
    lengths: Tensor,
    start: int,
    padding: PromptPadding | None,
    dtype: torch.dtype,
) -> Masks:
    """Build the masks `[B, 1, N, start + N]` of one verify forward: bool (True: attend), or additive if so configured.

    Args:
        layout: Masks that the model needs.
        ancestors: `[B or 1, N, N]` bool, from `TokenTree.ancestor_mask`.
        lengths: `[B]` committed tokens of each row.
        start: Length of the longest row.
        padding: Padding of the prompt.
        dtype: Dtype of additive masks.

    Returns:
        One tensor if all layers have the same type, else a dict keyed by layer type.

    Example: with 2 committed tokens, a root and one child have the rows 1110 and 1111.
    """
    firsts = lengths[:, None]  # [B, 1]
    slots = torch.arange(start, device=ancestors.device)
    committed = committed_slots(lengths, start, padding)
    depths = ancestors.sum(-1) - 1
    queries = (firsts + depths)[:, :, None]  # [B, N, 1] slots in plain generation
    keys = torch.cat([slots.expand(len(lengths), -1), queries[:, :, 0]], dim=-1)[:, None]  # [B, 1, start + N]
    num_nodes = ancestors.shape[-1]
    full = torch.cat(
        [
            committed[:, None].expand(-1, num_nodes, -1),
            ancestors.expand(len(lengths), -1, -1),
        ],
        dim=-1,
    )  # [B, N, start + N]
    left = torch.zeros_like(firsts[:, :, None]) if padding is None else padding.left[:, None, None]

    def restrict(kind: LayerKind, size: int) -> Tensor:
        if kind == "sliding":
            return full & (queries - keys < size)
        if kind == "chunked":
            return full & ((queries - left) // size == (keys - left) // size)
        return full

    def convert(mask: Tensor) -> Tensor:
        mask = mask[:, None]
        if not layout.additive:
            return mask
        return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)

    masks = {name: convert(restrict(kind, size)) for name, kind, size in layout.layers}
    return masks if len(masks) > 1 else next(iter(masks.values()))


def bucket_masks(
    layout: MaskLayout, ancestors: Tensor, lengths: Tensor, slots: Tensor, valid: Tensor, left: Tensor
) -> dict[str, Tensor]:
    """Build bool masks `[B, 1, N, S]` by layer type over a fixed number of slots, without reading the device.

    Args:
        layout: Masks that the model needs.
        ancestors: `[B, N, N]` bool, from `TokenTree.ancestor_mask`.
        lengths: `[B]` committed tokens of each row.
        slots: `[N]` slots that the tree's nodes are written to.
        valid: `[B, S]` bool, False at the prompt's padding.
        left: `[B]` padding slots before each row's first token.
    """
    rows, num_slots = valid.shape
    num_nodes = ancestors.shape[-1]
    indices = torch.arange(num_slots, device=lengths.device)
    committed = (indices < lengths[:, None]) & valid
    full = committed[:, None].expand(-1, num_nodes, -1).index_copy(2, slots, ancestors)
    queries = lengths[:, None] + ancestors.sum(-1) - 1  # [B, N] slots in plain generation
    keys = indices.expand(rows, -1).index_copy(1, slots, queries)[:, None]  # [B, 1, S]

    def restrict(kind: LayerKind, size: int) -> Tensor:
        if kind == "full":
            return full
        if kind == "sliding":
            return full & (queries[:, :, None] - keys < size)
        first = left[:, None, None]
        return full & ((queries[:, :, None] - first) // size == (keys - first) // size)

    return {name: restrict(kind, size)[:, None] for name, kind, size in layout.layers}


def last_queries(masks: Masks, known: int) -> Masks:
    """Drop the first `known` query rows of masks `[B, 1, N, S]`: those nodes are not run again, only attended to."""
    if isinstance(masks, Tensor):
        return masks[:, :, known:]
    return {name: mask[:, :, known:] for name, mask in masks.items()}
