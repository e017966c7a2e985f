"""The process group that `accelerate launch` or `torchrun` started."""

from __future__ import annotations

from datetime import timedelta

import torch
from accelerate import PartialState

PROCESS_TIMEOUT = timedelta(days=7)
"""How long processes wait for each other; one of them may still be working on a long part."""


def processes() -> PartialState:
    """Return rank, device and number of processes; without an accelerator the group uses gloo."""
    return PartialState(cpu=not torch.accelerator.is_available(), timeout=PROCESS_TIMEOUT)
