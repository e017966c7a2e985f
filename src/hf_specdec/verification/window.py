"""The tokens of a text that a draft head attends to: the first few and the last ones (`draft_window`).

All other tokens are dropped: their hidden states are not kept while the prompt is read, and their entries leave the
head's cache. The rest moves together, so that slot and position differ; `PromptPadding.counts` is the difference.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hf_specdec.errors import UnsupportedGenerationError

SINKS = 4
"""First tokens of each text that stay visible: attention without them degrades, as in StreamingLLM
(https://arxiv.org/abs/2309.17453)."""


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
