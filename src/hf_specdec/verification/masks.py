"""Attention masks and position ids of a tree forward.

A node attends to the committed tokens of its row, its ancestors and itself; sliding-window and chunked layers attend
to fewer. transformers measures windows in *slots*: a node counts as being in the slot that it would have in plain
generation (root slot plus depth), not in the slot that it is written to.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hf_specdec.errors import UnsupportedGenerationError
from hf_specdec.transformers_private import attention_name
from hf_specdec.trees.tree import TokenTree

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
class PromptPadding:
    """Padding of a batch of prompts; in a draft head's cache, also the tokens that its window has dropped.

    Args:
        valid: `[B, P]` bool, True for tokens.
        counts: `[B]` slot minus position of the tokens after the prompt: padding slots, less dropped tokens.
        left: `[B]` padding slots before the first token.
    """

    valid: Tensor
    counts: Tensor
    left: Tensor

    @classmethod
    def of(cls, attention_mask: Tensor | None) -> PromptPadding | None:
        """Create from a prompt's attention mask `[B, P]`; return None without a mask or without padding in it."""
        if attention_mask is None or bool((attention_mask != 0).all()):
            return None
        return cls.where(attention_mask != 0)

    @classmethod
    def where(cls, valid: Tensor) -> PromptPadding:
        """Create from bool `[B, P]`, True for tokens."""
        left = valid.int().argmax(-1) if valid.shape[1] else valid.sum(-1)
        return cls(valid, (~valid).sum(-1), left)

    def of_rows(self, index: Tensor) -> PromptPadding:
        """Return the padding of some rows `[R]`."""
        return PromptPadding(self.valid[index], self.counts[index], self.left[index])

    def last(self, num_slots: int) -> PromptPadding:
        """Return the padding in the last `num_slots` slots of the prompt."""
        return self.where(self.valid[:, self.valid.shape[1] - num_slots :])

    def extended_to(self, num_slots: int) -> PromptPadding:
        """Return the padding with slots of tokens prepended until there are `num_slots`.

        Prompt tuning puts virtual tokens before the prompt, which the attention mask does not cover.

        Raises:
            UnsupportedGenerationError: The mask covers more than `num_slots` slots.
        """
        more = num_slots - self.valid.shape[1]
        if more < 0:
            raise UnsupportedGenerationError(
                f"`attention_mask` covers {self.valid.shape[1]} tokens, but cache and prompt have {num_slots}.",
                "Pass a mask that covers the cached and the new tokens.",
            )
        return self if more == 0 else self.where(nn.functional.pad(self.valid, (more, 0), value=True))


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


TABLES = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_target_positions")
"""Configuration fields with the size of a position table. A field that belongs to no table costs one short draft."""
UNBOUNDED = 2**31
"""Depth of a draft if no bound is ahead."""
MAX_OFFSET = 64
"""Maximum difference between a token's position and its slot; PaliGemma counts positions from 1."""


@dataclass(frozen=True, slots=True)
class LengthBounds:
    """The bounds of one model.

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
        last = num_slots + MAX_OFFSET
        ends = tuple(end for end in self.ends if end < last)
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


SINKS = 4
"""First tokens of each text that stay visible: attention without them degrades, as in StreamingLLM
(https://arxiv.org/abs/2309.17453)."""


@dataclass(frozen=True, slots=True)
class Window:
    """Sizes of a window over the first four and the last tokens of a text.

    Args:
        last: Number of last tokens, at least 1.
    """

    last: int

    @property
    def size(self) -> int:
        """Slots kept per row when others are dropped: the first four tokens and the last `last`."""
        return SINKS + self.last

    @property
    def spare(self) -> int:
        """Slots by which the longest row may exceed `size` before its oldest tokens are dropped."""
        return max(self.last // 2, 1)

    def choose(self, valid: Tensor) -> tuple[Tensor, Tensor]:
        """Choose the slots of the first `SINKS` and the last `last` tokens of each row.

        Args:
            valid: `[B, L]` bool, True for tokens, with L at least `size`.

        Returns:
            `[B, size]` slots in ascending order, and bool, False where a row has too few tokens: at its left.

        Example: with 4 sinks and `last` 2, a row of 8 tokens gives the slots 0, 1, 2, 3, 6, 7.
        """
        slots = valid.to(torch.int8).sort(dim=-1, descending=True, stable=True).indices  # tokens first, in order
        counts = valid.sum(-1, keepdim=True)
        columns = torch.arange(self.size, dtype=torch.long, device=valid.device)
        missing = (self.size - counts).clamp(min=0)
        number = torch.where(columns < SINKS, columns - missing, counts - self.size + columns)
        return slots.gather(1, number.clamp(min=0)), number >= 0


def shifted_padding(valid: Tensor, totals: Tensor) -> PromptPadding:
    """Return the padding of chosen slots, whose `counts` are negative in rows that have lost tokens.

    Args:
        valid: `[B, K]` bool from `Window.choose`.
        totals: `[B]` tokens of each row, dropped ones included: the position of the next token.
    """
    return PromptPadding(valid, valid.shape[1] - totals, (~valid).sum(-1))


def token_positions(padding: PromptPadding) -> Tensor:
    """Return the position `[B, P]` of the token in each slot, 0 for padding; dropped tokens came after the sinks."""
    dropped = (~padding.valid).sum(-1) - padding.counts
    columns = torch.arange(padding.valid.shape[1], dtype=torch.long, device=padding.valid.device)
    behind = torch.where(columns >= SINKS, dropped[:, None], 0)
    return (padding.valid.cumsum(-1) - 1).clamp(min=0) + behind


class ChosenStates:
    """Hidden states of a prompt at chosen slots only, collected chunk by chunk.

    Args:
        window: The window.
        padding: Padding of the prompt, or None.
        batch_size, num_slots: B and P of the prompt.
        first_width: Slots of the prompt's first forward: P, or fewer if it is read in chunks.
        device: Device of the prompt.
    """

    def __init__(
        self, window: Window, padding: PromptPadding | None, batch_size: int, num_slots: int, first_width: int,
        device: torch.device,
    ) -> None:  # fmt: skip
        everything = torch.ones(batch_size, num_slots, dtype=torch.bool, device=device)
        self.slots, self.valid = window.choose(everything if padding is None else padding.valid)
        self.num_slots, self.first_width = num_slots, first_width
        self.states: dict[int, Tensor] = {}  # [B, K, D] by layer
        self._read: dict[int, int] = {}  # slots read so far, by layer

    def add(self, layer: int, hidden: Tensor) -> None:
        """Keep what is needed of the hidden states `[B, T, D]` of a layer at the next T slots."""
        begin, width = self._read.get(layer, 0), hidden.shape[1]
        self._read[layer] = begin + width
        local = self.slots.to(hidden.device) - begin
        found = hidden.gather(1, local.clamp(0, width - 1)[:, :, None].expand(-1, -1, hidden.shape[-1]))
        before = self.states.get(layer)
        inside = ((local >= 0) & (local < width))[:, :, None]
        self.states[layer] = found if before is None else torch.where(inside, found, before)
