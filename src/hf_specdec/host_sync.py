"""Transfers between host and device during decoding.

Reading from the device blocks the host until all queued work has run, so a step that is decided on the device reads
its result once: the accepted path and the emitted tokens. Uploading from pinned memory does not block.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

REUSES_PINNED = ("mps",)
"""Backends that may reuse pinned memory before an asynchronous copy from it has run, which corrupts the copy.

MPS did so until August 2026 (https://github.com/pytorch/pytorch/pull/193819). Copies to these backends are made
synchronously, which costs little because host and device share their memory."""


def read(*tensors: Tensor) -> list[list[list[int]]]:
    """Read several integer tensors `[B, *]` in one transfer; return each as a list of rows.

    Example: the tensors `[[1, 2]]` and `[[3]]` give `[[[1, 2]], [[3]]]`.
    """
    if all(tensor.device.type == "cpu" for tensor in tensors):  # no transfer to save
        return [tensor.tolist() for tensor in tensors]
    return split_columns(torch.cat(tensors, dim=1).tolist(), tensors)


def split_columns(rows: list[list[int]], tensors: Sequence[Tensor]) -> list[list[list[int]]]:
    """Undo `torch.cat(tensors, dim=1)`: given the rows of the result, return the rows of each tensor `[B, *]`."""
    widths = [tensor.shape[1] for tensor in tensors]
    ends = [sum(widths[: index + 1]) for index in range(len(widths))]
    return [[row[end - width : end] for row in rows] for width, end in zip(widths, ends, strict=True)]


def upload(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Create a tensor on the device from nested lists, if possible without blocking the host.

    `torch.tensor(values, device=...)` would wait for all work queued on the device.
    """
    tensor = torch.tensor(values, dtype=dtype, device="cpu")
    if not can_pin(device.type):
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


@functools.cache
def can_pin(device_type: str) -> bool:
    """Whether asynchronous copies from pinned host memory to this type of device work; tested once per type."""
    sample = torch.zeros(1, dtype=torch.uint8, device="cpu")
    if device_type in (sample.device.type, *REUSES_PINNED):
        return False
    try:
        return sample.pin_memory().device == sample.device
    except RuntimeError:  # no such backend, or one without pinned memory
        return False
