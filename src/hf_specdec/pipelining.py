"""Keep the device busy while the host reads a step: the next draft is launched before the read, not after it.

On an accelerator an acceptance rule decides on the device which tokens are kept (`Decision`). A session that can draft
from that alone launches its next draft at once (`DraftSession.launch`), so the device grows the next tree while the
host waits for the tokens, records and streams them. If the generation ends with this step, the draft is discarded.
Called by: `decode.py`, which passes `launch` to the rule through the transcript; `acceptance.settle` calls it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


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


class Stopwatch:
    """Seconds that launched work takes on its device; known once the host has read something launched later.

    On a device without timing events it measures the seconds of launching.

    Args:
        device: Where the work runs.
    """

    def __init__(self, device: torch.device) -> None:
        event = None if device.type == "cpu" else getattr(torch.get_device_module(device), "Event", None)
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
        """Return the seconds of all blocks since the last call."""
        marks, self._marks = self._marks, []
        return sum(_between(begin, end) for begin, end in marks)


def _between(begin: Any, end: Any) -> float:
    return float(end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1000)


def _recorded(event: Any) -> Any:
    mark = event(enable_timing=True)
    mark.record()
    return mark
