"""The process group that `accelerate launch` or `torchrun` started."""

from __future__ import annotations

from datetime import timedelta

import torch
from accelerate import PartialState

PROCESS_TIMEOUT = timedelta(days=7)
"""How long processes wait for each other: one of them may have much more work left than the others."""


def processes() -> PartialState:
    """Return rank, device and number of processes; the first call joins the group, with gloo if on the CPU."""
    return PartialState(cpu=not torch.accelerator.is_available(), timeout=PROCESS_TIMEOUT)
