"""What the host and the device tell each other while a call generates: the one place where a step waits.

A transfer to the host makes it wait until everything queued before it has run, so a step makes one, of everything
that the host has to know: the kept path and the emitted tokens. A transfer to the device does not wait, from pinned
memory. Called by: `accept.py`, and by what makes trees on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

UNPINNED = ("cpu", "mps", "meta")
"""Devices that share the host's memory, or have none: nothing is won by pinning."""


def read(*tensors: Tensor) -> list[list[list[int]]]:
    """Several integer tensors `[B, *]` in one transfer, each as one list per row.

    Example: tensors `[[1, 2]]` and `[[3]]` give `[[[1, 2]], [[3]]]`.
    """
    widths = [tensor.shape[1] for tensor in tensors]
    rows = torch.cat(tensors, dim=1).tolist()
    ends = [sum(widths[: index + 1]) for index in range(len(widths))]
    return [[row[end - width : end] for row in rows] for width, end in zip(widths, ends, strict=True)]


def upload(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Nested lists as a tensor on the device; the host goes on at once.

    `torch.tensor(values, device=...)` waits for everything that is queued there.
    """
    made = torch.tensor(values, dtype=dtype, device="cpu")
    if device.type in UNPINNED:
        return made.to(device)
    return made.pin_memory().to(device, non_blocking=True)
