"""Position ids, attention masks and length bounds of a forward.

A node attends to the committed tokens of its row, its ancestors and itself; sliding-window and chunked layers attend
to fewer. transformers measures windows in *slots*: a node counts as being in the slot that it would have in plain
generation (root slot plus depth), not in the slot that it is written to.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from hf_specdec.transformers_private import attention_name
from hf_specdec.trees.tree import TokenTree
from hf_specdec.verification.features import PromptPadding
from hf_specdec.verification.recurrence import Branches

LayerKind = Literal["full", "sliding", "chunked"]
"""Earlier slots that a layer attends to: all, the last ones within a window, or those of the same chunk."""
Masks = Tensor | dict[str, Tensor]
"""Mask `[B, 1, N, S]` of all layers, or one such mask per layer type."""

LAYER_KINDS: Mapping[str, tuple[str, LayerKind]] = {
    "full_attention": ("full_attention", "full"),
    "sliding_attention": ("sliding_attention", "sliding"),
    "chunked_attention": ("chunked_attention", "chunked"),
    "hybrid": ("full_attention", "full"),
    "hybrid_sliding": ("sliding_attention", "sliding"),
}
"""transformers' layer types that attend to plain keys and values: the name of their mask, and what they attend to."""
RECURRENT_MASKS = ("linear_attention", "conv")
"""Names of the masks of recurrent layers, which hide padding: there is none in a tree."""


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
            kind = next((kind for kind in ("sliding", "chunked") if sizes[kind]), "full")
            types = [f"{kind}_attention"]
        found = dict(LAYER_KINDS[name] for name in types if name in LAYER_KINDS)
        layers = tuple((name, kind, sizes[kind]) for name, kind in found.items())
        return cls(layers, additive=attention_name(text_config) == "eager")


@dataclass(frozen=True, slots=True)
class Positions:
    """Position ids as in plain generation: tokens after the prompt count up from its last position."""

    last: Tensor  # [..., B or 1] position of the prompt's last slot; multimodal models have leading rotary sections
    num_slots: int  # slots of the prompt, including padding

    @classmethod
    def of(cls, prompt_ids: Tensor | None, num_slots: int, device: torch.device) -> Positions:
        """Create from the prompt's position ids `[..., B or 1, P]`; if they are None, positions are slot indices."""
        if prompt_ids is None:
            return cls(torch.tensor([num_slots - 1], dtype=torch.long, device=device), num_slots)
        return cls(prompt_ids[..., -1], num_slots)

    def of_rows(self, index: Tensor) -> Positions:
        """Return the positions of some rows `[R]`."""
        if self.last.shape[-1] == 1:
            return self
        return replace(self, last=self.last.index_select(-1, index.to(self.last.device)))

    def of_nodes(self, depths: Tensor, lengths: Tensor, ceiling: int | None = None) -> Tensor:
        """Return the positions `[..., B, N]` of nodes at depths `[B or 1, N]`, after `[B]` committed slots.

        Only rows that have ended would exceed the `ceiling`.

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
    width: int = 0  # see `Target.width`
    is_recurrent: bool = False  # whether the model has recurrent layers

    def masks_and_positions(self, known: int = 0) -> tuple[Masks, Tensor]:
        """Return masks `[B, 1, N, S]` and position ids `[..., B, N]` of all nodes but the first `known`.

        Those nodes are not run again, only attended to.
        """
        ancestors = self.tree.ancestor_mask()
        masks = tree_masks(self.layout, ancestors, self.lengths, self.start, self.padding, self.dtype)
        if isinstance(masks, Tensor):
            masks = masks[:, :, known:]
        else:
            masks = {name: mask[:, :, known:] for name, mask in masks.items()}
        depths = ancestors[:, known:].sum(-1) - 1
        return masks, self.positions.of_nodes(depths, self.lengths, self.ceiling)

    def branches(self, known: int = 0) -> Branches | None:
        """Return the tree for recurrent layers; None if there are none."""
        return Branches.of(self.tree, known) if self.is_recurrent else None

    def order(self) -> Tensor | None:
        """Return the logical order of the nodes, `[B, 2 + N]`, see `operations.attend`; None: that of slots."""
        if self.all_seen:
            return None
        lengths = self.lengths[:, None]
        first = torch.zeros_like(lengths) if self.padding is None else self.padding.left[:, None]
        depths = (self.tree.ancestor_mask().sum(-1) - 1).expand(len(lengths), -1)
        return torch.cat([first, lengths, depths], dim=-1)


def committed_slots(lengths: Tensor, num_slots: int, padding: PromptPadding | None) -> Tensor:
    """Return a bool mask `[B, num_slots]` of the slots that hold a committed token."""
    slots = torch.arange(num_slots, device=lengths.device)
    committed = slots < lengths[:, None]
    if padding is not None:
        committed[:, : padding.valid.shape[1]] &= padding.valid
    return committed


def tree_masks(
    layout: MaskLayout, ancestors: Tensor, lengths: Tensor, start: int, padding: PromptPadding | None,
    dtype: torch.dtype,
) -> Masks:  # fmt: skip
    """Build the masks `[B, 1, N, start + N]` of one verify forward: bool (True: attend), or additive if so configured.

    `ancestors` is from `TokenTree.ancestor_mask`, `start` the largest of the `lengths`, where the tree is written; the
    dtype is that of additive masks.

    Example: with 2 committed tokens, a root and one child have the rows 1110 and 1111.
    """
    rows, num_nodes = len(lengths), ancestors.shape[-1]
    committed = committed_slots(lengths, start, padding)[:, None].expand(-1, num_nodes, -1)
    seen = torch.cat([committed, ancestors.expand(rows, -1, -1)], dim=-1)  # [B, N, start + N]
    queries = lengths[:, None] + ancestors.sum(-1) - 1
    keys = torch.cat([torch.arange(start, device=queries.device).expand(rows, -1), queries], dim=-1)
    masks = restricted(layout, seen, queries, keys, None if padding is None else padding.left)
    if layout.additive:
        lowest = torch.finfo(dtype).min
        masks = {name: torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, lowest) for name, mask in masks.items()}
    return next(iter(masks.values())) if len(masks) == 1 else masks


def chain_masks(layout: MaskLayout, begin: int, count: int, padding: PromptPadding | None) -> dict[str, Tensor]:
    """Build bool masks `[B or 1, 1, N, begin + N]` of a prompt's next N = `count` slots, by layer type.

    Layer types in which a token sees all tokens before it are missing, if padding is at the left only.
    """
    device = torch.device("cpu") if padding is None else padding.valid.device
    slots = torch.arange(begin + count, device=device)
    queries, keys, left = slots[None, begin:], slots[None], None
    seen = keys[:, None] <= queries[:, :, None]
    is_simple = True
    if padding is not None:
        valid, left = padding.valid[:, : begin + count], padding.left
        seen = seen & valid[:, None]
        is_simple = torch.equal(valid, slots >= left[:, None])
    masks = restricted(layout, seen, queries, keys, left)
    return {
        name: masks[name]
        for name, kind, size in layout.layers
        if not is_simple or (kind != "full" and begin + count > size)
    }


def bucket_masks(
    layout: MaskLayout, ancestors: Tensor, lengths: Tensor, slots: Tensor, valid: Tensor, left: Tensor
) -> dict[str, Tensor]:
    """Build bool masks `[B, 1, N, S]` by layer type over a fixed number of slots, without reading the device.

    The nodes are written to `slots` `[N]`; `valid` `[B, S]` is False at the prompt's padding, of which `left` `[B]`
    slots come before each row's first token. Further arguments as for `tree_masks`.
    """
    rows, num_slots = valid.shape
    indices = torch.arange(num_slots, device=lengths.device)
    committed = ((indices < lengths[:, None]) & valid)[:, None].expand(-1, ancestors.shape[-1], -1)
    queries = lengths[:, None] + ancestors.sum(-1) - 1
    keys = indices.expand(rows, -1).index_copy(1, slots, queries)
    return restricted(layout, committed.index_copy(2, slots, ancestors), queries, keys, left)


def restricted(
    layout: MaskLayout, seen: Tensor, queries: Tensor, keys: Tensor, left: Tensor | None
) -> dict[str, Tensor]:
    """Restrict a full mask `[B, N, S]` to each layer type's window or chunk; `left` is None if no row is padded.

    `queries` `[B, N]` and `keys` `[B, S]` are slots in plain generation.
    """
    queries, keys = queries[:, :, None], keys[:, None]
    masks = {}
    for name, kind, size in layout.layers:
        mask = seen
        if kind == "sliding":
            mask = seen & (queries - keys < size)
        elif kind == "chunked":
            first = 0 if left is None else left[:, None, None]
            mask = seen & ((queries - first) // size == (keys - first) // size)
        masks[name] = mask[:, None]
    return masks


# ----------------------------------------------------------------------------------------------- length bounds

TABLES = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_target_positions")
"""Configuration fields with the size of a position table. A field that belongs to no table costs one short draft."""
UNBOUNDED = 2**31
"""Depth of a draft if no bound is ahead."""
MAX_OFFSET = 64
"""Maximum difference between a token's position and its slot; PaliGemma counts positions from 1."""


@dataclass(frozen=True, slots=True)
class LengthBounds:
    """Positions at which a model's forward changes or ends: no draft reaches across one of them.

    A verify forward runs drafted tokens ahead of the text. In most models this changes nothing for the tokens before
    them. In some it does: position tables end, longrope changes the frequencies of the whole forward once its largest
    position reaches a limit, dynamic NTK changes them with every token, Phi-3 reads the whole text again, and Llama 4
    scales queries by cache slots instead of positions. The configuration contains all of these limits. A draft
    therefore ends before the next one, until the text itself has reached it. docs/limits.md lists the mechanisms.

    Args:
        ends: First position beyond each bound, ascending.
        switches: Those of `ends` at which the forward of all rows changes once the longest one gets there, or at which
            the model's own `generate()` reads the text again. The rows of a batch must then be as long as in plain
            decoding, and the step of the token at the bound is a plain one.
        changes_from: Position from which the forward changes with every token (dynamic NTK); None: never.
        counts_slots: Whether the forward counts a node's slot instead of its depth (Llama 4), so that no node of a
            tree may stand in a slot beyond a bound.
    """

    ends: tuple[int, ...]
    switches: frozenset[int]
    changes_from: int | None = None
    counts_slots: bool = False

    @classmethod
    def of(cls, config: Any) -> LengthBounds:
        """Read the bounds from a text configuration."""
        tables = {getattr(config, name, None) for name in TABLES}
        switches = {getattr(config, "original_max_position_embeddings", None)}  # Phi-3, with any frequencies
        changes_from = None
        for rope in _ropes(vars(config)):
            kind = str(rope["rope_type"])
            if kind == "longrope":
                switches.add(rope.get("original_max_position_embeddings"))
            elif "dynamic" in kind:
                changes_from = getattr(config, "max_position_embeddings", None)
                switches.add(changes_from)
        scale = getattr(config, "floor_scale", None) if getattr(config, "attn_temperature_tuning", False) else None
        if scale:
            switches.update(range(scale - 1, max(filter(None, tables), default=0), scale))
        found = {value for value in switches if isinstance(value, int)}
        ends = sorted({value for value in tables if isinstance(value, int) and value > 0} | found)
        return cls(tuple(ends), frozenset(found), changes_from, counts_slots=bool(scale))

    def within(self, num_slots: int) -> LengthBounds:
        """Return the bounds that a text of `num_slots` slots can reach."""
        ends = tuple(end for end in self.ends if end < num_slots + MAX_OFFSET)
        changes_from = self.changes_from if self.changes_from in ends else None
        return replace(self, ends=ends, switches=self.switches.intersection(ends), changes_from=changes_from)

    def reach(self, positions: Iterable[int]) -> int:
        """Return the depth of the deepest draft that crosses no bound, given the positions of its roots.

        Example: with bounds 64 and 128, positions 60 and 64 give 3: position 63 is the last one before 64.
        """
        reach = UNBOUNDED
        for position in positions:
            if position in self.switches or (self.changes_from is not None and position >= self.changes_from):
                return 0
            reach = min([reach, *(end - 1 - position for end in self.ends if end > position)])
        return reach


def _ropes(values: Mapping[Any, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the rotary parameters in a configuration; some models have one set for each type of layer."""
    for value in values.values():
        if isinstance(value, Mapping):
            if "rope_type" in value:
                yield value
            yield from _ropes(value)
