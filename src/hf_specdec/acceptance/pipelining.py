"""Launch the next draft before the host reads the result of a step, so that the device does not wait for the host.

On an accelerator, an acceptance rule decides on the device which tokens are kept (`Decision`). A session that can
draft from this decision launches its next draft at once (`DraftSession.launch`). The device then drafts while the host
reads the tokens (see `Transfer`), records and streams them. If generation ends with this step, the draft is discarded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_specdec.host_sync import can_pin, read, split_columns


@dataclass(frozen=True, slots=True)
class Decision:
    """The kept path of each row, decided on the device and not yet read by the host.

    Args:
        path: `[B, P]` long, node indices from the root, -1 beyond the path.
        tokens: `[B, P]` long, emitted tokens: accepted ones, then the correction or bonus token; -1 beyond.
        next_token: `[B]` long, the next root: the last emitted token, or the old root if none.
    """

    path: Tensor
    tokens: Tensor
    next_token: Tensor

    @property
    def num_kept(self) -> Tensor:
        """`[B]` nodes kept in each row, root included."""
        return (self.path >= 0).sum(-1)


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Result of one step: the kept path of each row and the tokens that it emits.

    `tokens[b, i]` is the token chosen after node `path[b, i]`. A finished row keeps nothing (its path and tokens are
    -1), except in lockstep: there it goes on like the others, with padding as its tokens if an EOS token is defined.

    Args:
        path: `[B, P]` long, node indices from the root, -1 beyond the path.
        tokens: `[B, P]` long, emitted tokens: accepted ones, then the correction or bonus token; -1 beyond.
        next_token: `[B]` long, the next root: the last emitted token, or the old root if none.
        nodes: The path on the host, without padding.
        emitted: The tokens on the host, without padding.
        num_drafted: Nodes of each row's tree on the host, without root and padding.
        launched: The tensors of `Launch` as rows on the host, if any.
    """

    path: Tensor
    tokens: Tensor
    next_token: Tensor
    nodes: tuple[tuple[int, ...], ...]
    emitted: tuple[tuple[int, ...], ...]
    num_drafted: tuple[int, ...]
    launched: tuple[list[list[int]], ...] | None = None

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


Launch = Callable[[Decision], Sequence[Tensor]]
"""Launches the next draft; returns integer tensors `[B, *]` that the host reads together with the step."""


class Transfer:
    """A copy of integer tensors `[B, *]` to the host.

    On devices with events and pinned memory, the copy starts at once, and `finish` waits only for it unless it reads
    more tensors. On other devices `finish` reads the tensors, which waits for all work launched before.
    """

    def __init__(self, *tensors: Tensor) -> None:
        self._tensors, device = tensors, tensors[0].device
        self._event: Any = None
        event_type = event_class(device)
        if event_type is not None and can_pin(device.type):
            packed = torch.cat(tensors, dim=1)
            self._copied = torch.empty(packed.shape, dtype=packed.dtype, device="cpu").pin_memory()
            self._copied.copy_(packed, non_blocking=True)
            self._event = event_type()
            self._event.record()

    def finish(self, extra: Sequence[Tensor] = ()) -> list[list[list[int]]]:
        """Wait for the copy and return each tensor, the extra ones last, as one list per row.

        Args:
            extra: More tensors to read, launched after the copy started; reading them waits for all launched work.
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

    Args:
        device: Device that runs the work.
    """

    def __init__(self, device: torch.device) -> None:
        event_type = event_class(device)
        self._new_mark: Callable[[], Any] = time.perf_counter
        if event_type is not None:
            self._new_mark = lambda: _timing_event(event_type)
        self._marks: list[tuple[Any, Any]] = []

    def __enter__(self) -> Stopwatch:
        self._begin = self._new_mark()
        return self

    def __exit__(self, *_: object) -> None:
        self._marks.append((self._begin, self._new_mark()))

    def take(self) -> float:
        """Return the total seconds of all blocks since the last call of `take`, and forget these blocks.

        Blocks whose work is still running count as 0.0: their work overlaps with the host's.
        """
        marks, self._marks = self._marks, []
        return sum(_between(begin, end) for begin, end in marks)


def event_class(device: torch.device) -> Any:
    """Return the event class of a device; None if it has no events."""
    return None if device.type == "cpu" else getattr(torch.get_device_module(device), "Event", None)


def _between(begin: Any, end: Any) -> float:
    if isinstance(begin, float):
        return float(end - begin)
    return float(begin.elapsed_time(end) / 1000) if end.query() else 0.0


def _timing_event(event_type: Any) -> Any:
    """Create an event with a time stamp and record it in the current stream."""
    event = event_type(enable_timing=True)
    event.record()
    return event
