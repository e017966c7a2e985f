"""Keep the device busy while the host reads a step: the next draft is launched before the read, not after it.

On an accelerator an acceptance rule decides on the device which tokens are kept (`Decision`). A session that can draft
from that alone launches its next draft at once (`DraftSession.launch`), so the device grows the next tree while the
host waits for the tokens (and for no more than them, see `Transfer`), records and streams them. If the generation ends
with this step, the draft is discarded.
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
    """What a step keeps, decided on the device and not yet read by the host. Fields as in `Acceptance`."""

    path: Tensor  # [B, P] long, node indices from the root, -1 beyond the path
    tokens: Tensor  # [B, P] long, -1 beyond
    next_token: Tensor  # [B] long, the next root

    @property
    def num_kept(self) -> Tensor:
        """`[B]` nodes kept in each row, root included."""
        return (self.path >= 0).sum(-1)


Launch = Callable[[Decision], Sequence[Tensor]]
"""Launches the next draft; returns integer tensors `[B, *]` that the host reads in the same transfer as the step."""


class Transfer:
    """Integer tensors `[B, *]` on their way to the host.

    On a device with events and pinned memory the copy starts at once, and `finish` waits for the copy alone. Elsewhere
    `finish` reads the device, which waits for everything launched so far.
    """

    def __init__(self, *tensors: Tensor) -> None:
        self._tensors, device = tensors, tensors[0].device
        self._event: Any = None
        event = event_class(device)
        if event is not None and can_pin(device.type):
            packed = torch.cat(tensors, dim=1)
            self._copied = torch.empty(packed.shape, dtype=packed.dtype, device="cpu").pin_memory()
            self._copied.copy_(packed, non_blocking=True)
            self._event = event()
            self._event.record()

    def finish(self, also: Sequence[Tensor] = ()) -> list[list[list[int]]]:
        """Wait, and return each tensor as one list per row.

        Args:
            also: Tensors that were launched after the transfer began; waiting for them is waiting for everything.
        """
        if self._event is None:
            return read(*self._tensors, *also)
        more = read(*also) if also else []
        if not also:
            self._event.synchronize()
        return [*split_columns(self._copied.tolist(), self._tensors), *more]


class Stopwatch:
    """Seconds that launched work takes on its device, known once the host has waited for it.

    On a device without events it measures the seconds of launching.

    Args:
        device: Where the work runs.
    """

    def __init__(self, device: torch.device) -> None:
        event = event_class(device)
        self._new_mark: Callable[[], Any] = time.perf_counter
        if event is not None:
            self._new_mark = lambda: _recorded(event)
        self._marks: list[tuple[Any, Any]] = []

    def __enter__(self) -> Stopwatch:
        self._begin = self._new_mark()
        return self

    def __exit__(self, *_: object) -> None:
        self._marks.append((self._begin, self._new_mark()))

    def take(self) -> float:
        """Return the seconds of the blocks since the last call; what still runs overlaps with the host, and is 0.0."""
        marks, self._marks = self._marks, []
        return sum(_between(begin, end) for begin, end in marks)


def event_class(device: torch.device) -> Any:
    """The class of a device's events; None if it has none."""
    return None if device.type == "cpu" else getattr(torch.get_device_module(device), "Event", None)


def _between(begin: Any, end: Any) -> float:
    if isinstance(begin, float):
        return float(end - begin)
    return float(begin.elapsed_time(end) / 1000) if end.query() else 0.0


def _recorded(event: Any) -> Any:
    mark = event(enable_timing=True)
    mark.record()
    return mark
