"""Where this process stands among those that `accelerate launch` or `torchrun` started."""

from __future__ import annotations

from datetime import timedelta

import torch
from accelerate import PartialState

PATIENCE = timedelta(days=7)
"""How long processes wait for each other: one may be a part of a long work behind."""


def processes() -> PartialState:
    """Rank, number and device of this process; without an accelerator several of them talk over gloo."""
    return PartialState(cpu=not torch.accelerator.is_available(), timeout=PATIENCE)
