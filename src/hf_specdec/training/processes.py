"""The process group that `accelerate launch` or `torchrun` started."""

from __future__ import annotations

from datetime import timedelta

import torch
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env
from transformers import TrainingArguments

PROCESS_TIMEOUT = timedelta(days=7)
"""Maximum time that processes wait for each other; one of them may have much more work left than the others."""


def processes() -> PartialState:
    """Return rank, device and number of processes; the first call joins the group (gloo without an accelerator)."""
    return PartialState(cpu=not torch.accelerator.is_available(), timeout=PROCESS_TIMEOUT)


def requests_fsdp(arguments: TrainingArguments) -> bool:
    """Return whether FSDP is requested, by the training arguments or by `accelerate launch --use_fsdp`."""
    return bool(arguments.fsdp) or parse_flag_from_env("ACCELERATE_USE_FSDP")
