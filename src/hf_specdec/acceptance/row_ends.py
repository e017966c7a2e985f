"""Where rows end, decided on the device: by an EOS token, or by their length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowEnds:
    """What ends a row, as far as the device knows, and what follows its end."""

    eos_ids: tuple[int, ...]  # tokens that end a row
    pad_token_id: int
    lockstep: bool  # rows of a batch emit as many tokens as the row that emits least


class DeviceAccount:
    """What is left of each row, kept on the device that chooses its tokens.

    Args:
        remaining: Tokens that each row may still emit; 0 if it has ended.
        ends: What ends a row.
        device: Where it is kept.
    """

    def __init__(self, remaining: Sequence[int], ends: RowEnds, device: torch.device) -> None:
        self.device, self.ends = device, ends
        self.remaining = torch.tensor(remaining, dtype=torch.long, device=device)
        self.eos = torch.tensor(ends.eos_ids, dtype=torch.long, device=device) if ends.eos_ids else None


def cut_rows(
    tokens: Tensor, lengths: Tensor, remaining: Tensor, eos: Tensor | None, *, lockstep: bool
) -> tuple[Tensor, Tensor]:
    """Cut chosen tokens where rows end.

    Args:
        tokens: `[B, P]`.
        lengths: `[B]` how many of them were chosen.
        remaining: `[B]` how many each row may still emit.
        eos: `[E]` tokens that end a row; None if none does.
        lockstep: See `RowEnds`.

    Returns:
        `[B]` how many of its tokens each row emits, and `[B]` how many it may emit after them.
    """
    width = tokens.shape[1]
    places = torch.arange(width, device=tokens.device)
    kept = torch.minimum(lengths, remaining)
    ends = torch.zeros_like(tokens, dtype=torch.bool)
    if eos is not None:
        ends = (tokens[:, :, None] == eos).any(-1)
        kept = torch.minimum(kept, torch.where(ends, places, width).amin(-1) + 1)
    if lockstep:
        going = remaining > 0
        kept = torch.where(going, kept, width).amin().expand(len(kept))
        remaining = torch.where(going, remaining - kept, 0)
    else:
        remaining = remaining - kept
    ended = (ends & (places < kept[:, None])).any(-1)
    return kept, torch.where(ended, 0, remaining)
