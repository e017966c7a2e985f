"""Random numbers on a device, and the lock that keeps captures of graphs apart from them.

While a graph is captured, the device's generator belongs to the capture: torch refuses draws, and reads of its state,
in all other threads ("Offset increment outside graph capture").
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

CAPTURING = threading.RLock()
"""Lock held while a graph is captured, and while this package uses a generator."""


def draw(probs: Tensor) -> Tensor:
    """Draw an index `[..., 1]` for each distribution `[..., V]`."""
    with CAPTURING:
        return torch.multinomial(probs, num_samples=1)


def draw_uniform(device: torch.device) -> Tensor:
    """Draw a float32 number in [0, 1)."""
    with CAPTURING:
        return torch.rand((), dtype=torch.float32, device=device)
