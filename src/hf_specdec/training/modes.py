"""Set the torch modes that training needs, independently of the caller's modes, and check that weights fit them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_specdec.errors import InvalidConfigError


@contextmanager
def training_modes() -> Iterator[None]:
    """Context manager and decorator: gradients, no inference mode, new tensors on the CPU by default, no denormals.

    The Trainer and its DataLoader draw seeds and orders on the CPU, which torch refuses if `torch.set_default_device`
    names another device.
    """
    on_cpu = torch.get_default_device().type == "cpu"
    device = nullcontext() if on_cpu else torch.device("cpu")
    with torch.inference_mode(False), torch.enable_grad(), device, _denormals_flushed():
        yield


@contextmanager
def _denormals_flushed() -> Iterator[None]:
    """Context manager: in this thread of the CPU, denormal numbers (float32: below 1e-38) become 0.

    Sharp attention has such weights and gradients, and processors multiply them far more slowly than others. Worker
    threads keep their mode: train with one process per core (`accelerate launch`), not one process of several threads.
    """
    # torch has no function that returns the mode
    before = bool(torch.full((1,), 1e-40, dtype=torch.float32, device="cpu") * 0.5 == 0)
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


def check_trainable(head: nn.Module, target: PreTrainedModel) -> None:
    """Check that torch can compute gradients with the weights of head and target.

    Raises:
        InvalidConfigError: Weights were created in inference mode.
    """
    for name, model in (("head", head), ("target", target)):
        if any(parameter.is_inference() for parameter in model.parameters()):
            raise InvalidConfigError(
                f"The {name}'s weights were created in `torch.inference_mode()`, which allows no gradients.",
                f"Load or create the {name} outside that mode.",
            )
