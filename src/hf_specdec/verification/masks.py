"""Tree and cache state to attention masks and position ids: who may see whom, in the form the model wants.

A node sees the committed tokens of its row, its ancestors and itself; sliding-window and chunked layers see less.
transformers counts windows in *slots*; a node's slot is the one it would have in a plain generation, root slot
plus depth, not the one it happens to be written to. Knows no model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hf_specdec.errors import UnsupportedGenerationError
from hf_specdec.trees.tree import TokenTree

LayerKind = Literal["full", "sliding", "chunked"]
Masks = Tensor | dict[str, Tensor]

LAYER_KINDS: Mapping[str, LayerKind] = {
    "full_attention": "full",
    "sliding_attention": "sliding",
    "chunked_attention": "chunked",
}
"""The layer types of transformers' configurations that attend to plain keys and values."""


@dataclass(frozen=True, slots=True)
class MaskLayout:
    """The masks one model needs: per layer type a kind and its size (window or chunk, in slots)."""

    layers: tuple[tuple[str, LayerKind, int], ...]
    additive: bool  # eager attention adds the mask to the scores; sdpa takes a bool mask, True = attend

    @classmethod
    def of(cls, text_config: Any) -> MaskLayout:
        """The rule of transformers' `create_masks_for_generate`."""
        sizes = {
            "full": 0,
            "sliding": getattr(text_config, "sliding_window", None) or 0,
            "chunked": getattr(text_config, "attention_chunk_size", None) or 0,
        }
        types = sorted(set(getattr(text_config, "layer_types", None) or ()))
        if not types:
            types = ["sliding_attention" if sizes["sliding"] else
                     "chunked_attention" if sizes["chunked"] else "full_attention"]  # fmt: skip
        additive = text_config._attn_implementation == "eager"
        return cls(tuple((name, LAYER_KINDS[name], sizes[LAYER_KINDS[name]]) for name in types), additive)


@dataclass(frozen=True, slots=True)
class PromptPadding:
    """Where the prompt of each row is padding; None where nowhere."""

    valid: Tensor  # [B, P] bool, True for tokens
    counts: Tensor  # [B] padded slots
    left: Tensor  # [B] padded slots before the first token

    @classmethod
    def of(cls, attention_mask: Tensor | None) -> PromptPadding | None:
        """From the 2D mask `[B, P]` of a prompt; None for None and for a mask without zeros."""
        if attention_mask is None or bool((attention_mask != 0).all()):
            return None
        return cls.where(attention_mask != 0)

    @classmethod
    def where(cls, valid: Tensor) -> PromptPadding:
        """From `[B, P]` bool, True for tokens."""
        left = valid.int().argmax(-1) if valid.shape[1] else valid.sum(-1)
        return cls(valid, (~valid).sum(-1), left)

    def last(self, num_slots: int) -> PromptPadding:
        """Of the last slots of the prompt only."""
        return self.where(self.valid[:, self.valid.shape[1] - num_slots :])

    def behind(self, num_slots: int) -> PromptPadding:
        """For a prompt of more slots: those before are tokens (virtual ones, which no mask knows).

        Raises:
            UnsupportedGenerationError: The mask covers more slots than there are.
        """
        more = num_slots - self.valid.shape[1]
        if more < 0:
            raise UnsupportedGenerationError(
                f"`attention_mask` covers {self.valid.shape[1]} tokens; cache and prompt have {num_slots}.",
                "Give a mask of the cached and the new tokens.",
            )
        return self if more == 0 else self.where(nn.functional.pad(self.valid, (more, 0), value=True))


@dataclass(frozen=True, slots=True)
class Positions:
    """The position ids a plain generation would give: one more than the prompt's last for every token after it.

    A prompt's ids come in any shape that ends in `[B or 1, P]`; rotary sections of multimodal models stand before.
    """

    last: Tensor  # [..., B or 1] position of the prompt's last slot
    num_slots: int  # slots of the prompt, padding included

    @classmethod
    def of(cls, prompt_ids: Tensor | None, num_slots: int, device: torch.device) -> Positions:
        """From the prompt's position ids; without any they are the slots."""
        if prompt_ids is None:
            return cls(torch.tensor([num_slots - 1], dtype=torch.long, device=device), num_slots)
        return cls(prompt_ids[..., -1], num_slots)

    def of_nodes(self, depths: Tensor, lengths: Tensor) -> Tensor:
        """`[..., B, N]` positions of nodes.

        Args:
            depths: `[B or 1, N]` depth of each node.
            lengths: `[B]` committed slots of each row.

        Example: a prompt of 5 slots, 2 of them padding, ends at position 2; depths [0, 1, 1, 2] give [3, 4, 4, 5].
        """
        grown = lengths[:, None] - self.num_slots + 1
        return self.last.to(depths.device)[..., None] + grown + depths


@dataclass(frozen=True, slots=True)
class TreeInputs:
    """A tree behind committed text: what masks and positions of its forward are made of."""

    tree: TokenTree
    lengths: Tensor  # [B] committed tokens of each row
    start: int  # the longest row's length
    padding: PromptPadding | None
    positions: Positions
    layout: MaskLayout
    dtype: torch.dtype  # of additive masks
    all_seen: bool  # a single node that sees every slot


def committed_slots(lengths: Tensor, start: int, padding: PromptPadding | None) -> Tensor:
    """`[B, start]` bool: the slots that hold a committed token of the row.

    Args:
        lengths: `[B]` committed tokens of each row.
        start: The longest row's length.
        padding: The prompt's padding.

    Example: lengths [2, 3] give rows 110 and 111.
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
    """The masks of one verify forward: `[B, 1, N, start + N]` per layer type.

    Args:
        layout: What the model needs.
        ancestors: `[B or 1, N, N]` bool, from `TokenTree.ancestor_mask`.
        lengths: `[B]` committed tokens of each row.
        start: The longest row's length.
        padding: The prompt's padding.
        dtype: Of additive masks.

    Returns:
        One tensor where all layers are of one type, else a dict keyed by layer type.

    Example: 2 committed tokens, root with one child: rows 1110 and 1111.
    """
    firsts = lengths[:, None]  # [B, 1]
    slots = torch.arange(start, device=ancestors.device)
    committed = committed_slots(lengths, start, padding)
    depths = ancestors.sum(-1) - 1
    queries = (firsts + depths)[:, :, None]  # [B, N, 1] the slots of a plain generation
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

    def in_form(mask: Tensor) -> Tensor:
        mask = mask[:, None]
        if not layout.additive:
            return mask
        return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)

    masks = {name: in_form(restrict(kind, size)) for name, kind, size in layout.layers}
    return masks if len(masks) > 1 else next(iter(masks.values()))


def bucket_masks(
    layout: MaskLayout, ancestors: Tensor, lengths: Tensor, slots: Tensor, valid: Tensor, left: Tensor
) -> dict[str, Tensor]:
    """The bool masks `[B, 1, N, S]` by layer type of a tree over a fixed number of slots; made on the device alone.

    Args:
        layout: What the model needs.
        ancestors: `[B, N, N]` bool, from `TokenTree.ancestor_mask`.
        lengths: `[B]` committed tokens of each row.
        slots: `[N]` where the tree's nodes are written.
        valid: `[B, S]` bool, False at the prompt's padding.
        left: `[B]` padded slots before each row's first token.
    """
    rows, num_slots = valid.shape
    num_nodes = ancestors.shape[-1]
    places = torch.arange(num_slots, device=lengths.device)
    committed = (places < lengths[:, None]) & valid
    full = committed[:, None].expand(-1, num_nodes, -1).index_copy(2, slots, ancestors)
    queries = lengths[:, None] + ancestors.sum(-1) - 1  # [B, N] the slots of a plain generation
    keys = places.expand(rows, -1).index_copy(1, slots, queries)[:, None]  # [B, 1, S]

    def restrict(kind: LayerKind, size: int) -> Tensor:
        if kind == "full":
            return full
        if kind == "sliding":
            return full & (queries[:, :, None] - keys < size)
        first = left[:, None, None]
        return full & ((queries[:, :, None] - first) // size == (keys - first) // size)

    return {name: restrict(kind, size)[:, None] for name, kind, size in layout.layers}


def last_queries(masks: Masks, known: int) -> Masks:
    """The same `[B, 1, N, S]` without the rows of the first nodes, which run no more; their columns stay."""
    if isinstance(masks, Tensor):
        return masks[:, :, known:]
    return {name: mask[:, :, known:] for name, mask in masks.items()}
