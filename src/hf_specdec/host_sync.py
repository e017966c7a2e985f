"""What the host and the device tell each other while a call generates: the one place where a step waits.

A transfer to the host makes it wait until everything queued before it has run, so a step makes one, of everything
that the host has to know: the kept path and the emitted tokens. A transfer to the device does not wait, from pinned
memory.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

REUSES_PINNED = ("mps",)
"""Backends that may give pinned memory to others before a copy from it has run, which changes what is copied.

MPS did so until August 2026 (https://github.com/pytorch/pytorch/pull/193819); a copy that is waited for is
right, and little is lost where the host and the device share their memory."""


def read(*tensors: Tensor) -> list[list[list[int]]]:
    """Several integer tensors `[B, *]` in one transfer, each as one list per row.

    Example: tensors `[[1, 2]]` and `[[3]]` give `[[[1, 2]], [[3]]]`.
    """
    return split_columns(torch.cat(tensors, dim=1).tolist(), tensors)


def split_columns(rows: list[list[int]], tensors: Sequence[Tensor]) -> list[list[list[int]]]:
    """Split rows of tensors `[B, *]` that were joined along their columns."""
    widths = [tensor.shape[1] for tensor in tensors]
    ends = [sum(widths[: index + 1]) for index in range(len(widths))]
    return [[row[end - width : end] for row in rows] for width, end in zip(widths, ends, strict=True)]


def upload(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Nested lists as a tensor on the device; the host goes on at once.

    `torch.tensor(values, device=...)` waits for everything that is queued there.
    """
    made = torch.tensor(values, dtype=dtype, device="cpu")
    if not can_pin(device.type):
        return made.to(device)
    return made.pin_memory().to(device, non_blocking=True)


@functools.cache
def can_pin(device_type: str) -> bool:
    """Whether host memory can be pinned for copies to such a device; tried once."""
    tried = torch.zeros(1, dtype=torch.uint8, device="cpu")
    if device_type in (tried.device.type, *REUSES_PINNED):
        return False
    try:
        return tried.pin_memory().device == tried.device
    except RuntimeError:  # no backend, or one without such memory
        return False
