"""The one place where a step waits for the device.

A transfer to the host makes it wait until everything queued before it has run, so a step makes one, of everything
that the host has to know: the kept path and the emitted tokens. Called by: `accept.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def read(*tensors: Tensor) -> list[list[list[int]]]:
    """Several integer tensors `[B, *]` in one transfer, each as one list per row.

    Example: tensors `[[1, 2]]` and `[[3]]` give `[[[1, 2]], [[3]]]`.
    """
    widths = [tensor.shape[1] for tensor in tensors]
    rows = torch.cat(tensors, dim=1).tolist()
    ends = [sum(widths[: index + 1]) for index in range(len(widths))]
    return [[row[end - width : end] for row in rows] for width, end in zip(widths, ends, strict=True)]
