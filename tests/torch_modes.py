"""Every mode that PyTorch has and that a caller may be in."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)
        vars(torch._GLOBAL_DEVICE_CONTEXT).clear()  # torch 2.9's get_default_device() takes None for a device


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Only operations that give equal results, and NaN in all memory that was not written to."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "plain": contextlib.nullcontext,
    "inference": torch.inference_mode,
    "gradients": torch.enable_grad,
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "float16": lambda: default_dtype(torch.float16),
    "float64": lambda: default_dtype(torch.float64),
    "meta": lambda: default_device("meta"),  # what forgets to name its device gets no values at all
    "deterministic": deterministic,
}
