"""Where this process stands among those that `accelerate launch` or `torchrun` started."""

from __future__ import annotations

import torch
from accelerate import PartialState


def processes() -> PartialState:
    """Rank, number and device of this process; without an accelerator several of them talk over gloo."""
    return PartialState(cpu=not torch.accelerator.is_available())
