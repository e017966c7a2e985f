"""The modes of torch that training needs, whatever those of its caller are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_specdec.errors import InvalidConfigError


@contextmanager
def training_modes() -> Iterator[None]:
    """Gradients, no inference mode, and new tensors on the host.

    The Trainer and its DataLoader draw their seeds and orders on the host; where `torch.set_default_device`
    names another device, torch refuses that.
    """
    on_host = torch.get_default_device().type == "cpu"
    with torch.inference_mode(False), torch.enable_grad(), nullcontext() if on_host else torch.device("cpu"):
        yield


def check_trainable(head: nn.Module, target: PreTrainedModel) -> None:
    """See that torch can differentiate through a head and what it reads of its target.

    Raises:
        InvalidConfigError: Weights that were made in inference mode.
    """
    for name, model in (("head", head), ("target", target)):
        if any(parameter.is_inference() for parameter in model.parameters()):
            raise InvalidConfigError(
                f"The {name}'s weights were made in `torch.inference_mode()`, which allows no gradients.",
                f"Load or make the {name} outside of that mode.",
            )
