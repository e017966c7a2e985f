"""Find on the device where rows end: at an EOS token or at the maximum length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowEnds:
    """The conditions for the end of a row that are checked on the device, and how a finished row continues."""

    eos_ids: tuple[int, ...]  # tokens that end a row
    pad_token_id: int  # emitted by finished rows in lockstep
    lockstep: bool  # all rows emit as many tokens as the unfinished row with the fewest


class DeviceAccount:
    """The number of tokens that each row may still emit, on the device that chooses tokens.

    Args:
        remaining: Tokens that each row may still emit; 0 if it has ended.
        ends: Conditions that end a row.
        device: Device of the tensors.
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
        tokens: `[B, P]` chosen tokens.
        lengths: `[B]` number of chosen tokens in each row.
        remaining: `[B]` number of tokens that each row may still emit.
        eos: `[E]` EOS tokens; None if there are none.
        lockstep: See `RowEnds`.

    Returns:
        `[B]` number of tokens that each row emits, and `[B]` number that it may emit after them, 0 if it has ended.
    """
    width = tokens.shape[1]
    positions = torch.arange(width, device=tokens.device)
    kept = torch.minimum(lengths, remaining)
    ends = torch.zeros_like(tokens, dtype=torch.bool)
    if eos is not None:
        ends = (tokens[:, :, None] == eos).any(-1)
        kept = torch.minimum(kept, torch.where(ends, positions, width).amin(-1) + 1)
    if lockstep:
        active = remaining > 0
        kept = torch.where(active, kept, width).amin().expand(len(kept))
        remaining = torch.where(active, remaining - kept, 0)
    else:
        remaining = remaining - kept
    ended = (ends & (positions < kept[:, None])).any(-1)
    return kept, torch.where(ended, 0, remaining)
