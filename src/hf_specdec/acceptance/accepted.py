"""`Accepted`, the tokens that a step keeps: where rows end, and how the host reads them.

On an accelerator, an acceptance rule decides on the device which tokens are kept. A session that can draft from an
unread `Accepted` launches its next draft at once (`DraftSession.launch`). The device then drafts while the host reads
the tokens (see `Transfer`), records and streams them. If generation ends with this step, the draft is discarded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_specdec.host_sync import can_pin, read, split_columns, upload


@dataclass(frozen=True, slots=True)
class Accepted:
    """The kept path of each row of a step and the tokens that it emits.

    `tokens[b, i]` is the token chosen after node `path[b, i]`. A finished row keeps nothing (its path and tokens are
    -1), except in lockstep: there it goes on like the others, with padding as its tokens if an EOS token is defined.

    Args:
        path: `[B, P]` long, node indices from the root, -1 beyond the path.
        tokens: `[B, P]` long, emitted tokens: accepted ones, then the correction or bonus token; -1 beyond.
        next_token: `[B]` long, the next root: the last emitted token, or the old root if none.
        nodes: The path on the host, without padding. Like all that follows, empty until the host has read the step.
        emitted: The tokens on the host, without padding.
        num_drafted: Nodes of each row's tree on the host, without root and padding.
        launched: The tensors of `Launch` as rows on the host, if any.
    """

    path: Tensor
    tokens: Tensor
    next_token: Tensor
    nodes: tuple[tuple[int, ...], ...] = ()
    emitted: tuple[tuple[int, ...], ...] = ()
    num_drafted: tuple[int, ...] = ()
    launched: tuple[list[list[int]], ...] | None = None

    @property
    def is_read(self) -> bool:
        """Whether the host has read it."""
        return bool(self.nodes)

    @property
    def num_kept(self) -> Tensor:
        """`[B]` nodes kept in each row, root included; equals the number of emitted tokens."""
        return (self.path >= 0).sum(-1)

    @property
    def num_accepted(self) -> Tensor:
        """`[B]` drafted tokens kept in each row."""
        return (self.num_kept - 1).clamp(min=0)

    @property
    def counts(self) -> list[int]:
        """The number of nodes kept in each row as integers on the host, equal to `num_kept`."""
        return [len(tokens) for tokens in self.emitted]

    @classmethod
    def from_rows(
        cls, paths: Sequence[Sequence[int]], emitted: Sequence[Sequence[int]], roots: Sequence[int],
        num_drafted: Sequence[int], device: torch.device,
    ) -> Accepted:  # fmt: skip
        """Upload each row's nodes and emitted tokens, which have equal lengths, given root and size of its tree."""
        width = max(1, *map(len, paths))
        padded = [[[*row, *[-1] * (width - len(row))] for row in rows] for rows in (paths, emitted)]
        path, tokens = upload(padded, torch.long, device)
        next_tokens = [row[-1] if row else root for row, root in zip(emitted, roots, strict=True)]
        next_token = upload(next_tokens, torch.long, device)
        return cls(path, tokens, next_token, tuple(map(tuple, paths)), tuple(map(tuple, emitted)), tuple(num_drafted))


Launch = Callable[[Accepted], Sequence[Tensor]]
"""Launches the next draft; returns integer tensors `[B, *]` that the host reads together with the step."""


# ----------------------------------------------------------------------------------------------- where rows end


@dataclass(frozen=True, slots=True)
class RowEnds:
    """The conditions for the end of a row that are checked on the device, and how a finished row continues."""

    eos_ids: tuple[int, ...]  # tokens that end a row
    pad_token_id: int  # emitted by finished rows in lockstep
    lockstep: bool  # all rows emit as many tokens as the unfinished row with the fewest


class DeviceAccount:
    """The number of tokens that each row may still emit (0 if it has ended), on the device that chooses tokens."""

    def __init__(self, remaining: Sequence[int], ends: RowEnds, device: torch.device) -> None:
        self.device, self.ends = device, ends
        self.remaining = torch.tensor(remaining, dtype=torch.long, device=device)
        self.eos = torch.tensor(ends.eos_ids, dtype=torch.long, device=device) if ends.eos_ids else None


def cut_rows(
    tokens: Tensor, lengths: Tensor, remaining: Tensor, eos: Tensor | None, *, lockstep: bool
) -> tuple[Tensor, Tensor]:
    """Cut chosen tokens `[B, P]` where rows end; return `[B]` numbers that rows emit, and that they may emit then.

    Args:
        tokens, lengths: Chosen tokens, and `[B]` their number in each row.
        remaining, eos: See `DeviceAccount`; `[B]`, and `[E]` or None.
        lockstep: See `RowEnds`.
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


# ----------------------------------------------------------------------------------------------- reading the device


class Transfer:
    """A copy of integer tensors `[B, *]` to the host.

    On devices with events and pinned memory, the copy starts at once, and `finish` waits only for it unless it reads
    more tensors. On other devices `finish` reads the tensors, which waits for all work launched before.

    Args:
        *tensors: What to copy.
        joined: The tensors side by side, if they are; None: they are concatenated.
    """

    def __init__(self, *tensors: Tensor, joined: Tensor | None = None) -> None:
        self._tensors, device = tensors, tensors[0].device
        self._event: Any = None
        event_type = event_class(device)
        if event_type is not None and can_pin(device.type):
            packed = torch.cat(tensors, dim=1) if joined is None else joined
            self._copied = torch.empty(packed.shape, dtype=packed.dtype, device="cpu").pin_memory()
            self._copied.copy_(packed, non_blocking=True)
            self._event = event_type()
            self._event.record()

    def finish(self, extra: Sequence[Tensor] = ()) -> list[list[list[int]]]:
        """Wait for the copy and return each tensor, the extra ones last, as one list per row.

        Reading extra tensors, launched after the copy started, waits for all launched work.
        """
        if self._event is None:
            return read(*self._tensors, *extra)
        more = read(*extra) if extra else []
        if not extra:
            self._event.synchronize()
        return [*split_columns(self._copied.tolist(), self._tensors), *more]


class Stopwatch:
    """Context manager that measures the device time of the work launched in its block; `take` returns it.

    On a device without events, it measures the host time of the block.
    """

    def __init__(self, device: torch.device) -> None:
        self._event_type = event_class(device)
        self._marks: list[tuple[Any, Any]] = []

    def __enter__(self) -> Stopwatch:
        self._begin = self._mark()
        return self

    def __exit__(self, *_: object) -> None:
        self._marks.append((self._begin, self._mark()))

    def _mark(self) -> Any:
        if self._event_type is None:
            return time.perf_counter()
        event = self._event_type(enable_timing=True)
        event.record()
        return event

    def take(self) -> float:
        """Return the total seconds of all blocks since the last call of `take`, and forget these blocks.

        Blocks whose work is still running count as 0.0: their work overlaps with the host's.
        """
        marks, self._marks = self._marks, []
        if self._event_type is None:
            return float(sum(end - begin for begin, end in marks))
        return float(sum(begin.elapsed_time(end) / 1000 for begin, end in marks if end.query()))


def event_class(device: torch.device) -> Any:
    """Return the event class of a device; None if it has no events."""
    return None if device.type == "cpu" else getattr(torch.get_device_module(device), "Event", None)
