"""Estimate time, memory and disk space of a training run before it starts, by running two of its batches."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil
import torch
from torch import Tensor, nn
from transformers import TrainingArguments

ADAM_BYTES = 12
"""Bytes per trained parameter in a checkpoint: the weight and Adam's two moments in float32."""

GRADIENT_BYTES = 12
"""Bytes per trained parameter in memory, in addition to the weight: gradient and Adam's two moments in float32."""


@dataclass(frozen=True, slots=True)
class RunEstimate:
    """Estimated cost of a training run."""

    num_steps: int  # optimiser steps that remain to be done
    seconds_per_step: float
    memory_bytes: int  # memory of the accelerator, or of the process on a CPU
    disk_bytes: int  # for the checkpoints kept at the same time

    def __str__(self) -> str:
        seconds = self.num_steps * self.seconds_per_step
        hours, minutes = divmod(math.ceil(seconds / 60), 60)
        duration = f"{hours} h {minutes:02} min" if hours else f"{minutes} min"
        if seconds < 60:
            duration = f"{math.ceil(seconds)} s"
        steps = "1 step" if self.num_steps == 1 else f"{self.num_steps} steps"
        return (
            f"{steps} of {self.seconds_per_step:.2g} s: about {duration}; "
            f"{self.memory_bytes / 1e9:.1f} GB of memory, {self.disk_bytes / 1e9:.2f} GB of disk for checkpoints."
        )


def estimate_run(
    rehearse: Callable[[Sequence[int]], Tensor],
    trained: nn.Module,
    lengths: Sequence[int],
    arguments: TrainingArguments,
    num_done: int,
) -> RunEstimate:
    """Estimate a run by timing two batches, of median length and of the longest conversations.

    Time is assumed to be linear in the length of the longest conversation of a batch. No parameter is changed.

    Args:
        rehearse: Returns the loss of a batch, given the indices of its conversations.
        trained: Module with the trained parameters; their gradients are cleared.
        lengths: Number of tokens of each conversation.
        arguments: Training arguments of the run.
        num_done: Optimiser steps already done, if the run resumes.
    """
    batch = arguments.per_device_train_batch_size
    order = sorted(range(len(lengths)), key=lambda number: lengths[number])
    middle = max((len(order) - batch) // 2, 0)
    memory, points = 0, []
    for numbers in (order[middle : middle + batch], order[middle : middle + batch], order[-batch:]):  # first: warm-up
        begin = time.perf_counter()
        loss = rehearse(numbers)
        memory = max(memory, memory_in_use(loss.device))  # all activations are in memory now
        if loss.requires_grad:
            loss.backward()
        float(loss.detach())  # waits for the accelerator
        points.append((max(lengths[number] for number in numbers), time.perf_counter() - begin))
        trained.zero_grad(set_to_none=True)
    (_, (short, fast), (long, slow)) = points
    slope = max(slow - fast, 0.0) / (long - short) if long > short else 0.0
    seconds = max(fast + slope * (sum(lengths) / len(lengths) - short), 0.0)
    num_parameters = sum(parameter.numel() for parameter in trained.parameters() if parameter.requires_grad)
    steps = num_steps_of(arguments, len(lengths))
    kept = min((arguments.save_total_limit or steps) + 1, max(math.ceil(steps / max(arguments.save_steps, 1)), 1))
    saved = 0 if arguments.save_strategy == "no" else kept * ADAM_BYTES * num_parameters
    return RunEstimate(
        max(steps - num_done, 0), seconds * arguments.gradient_accumulation_steps,
        memory + GRADIENT_BYTES * num_parameters, saved,
    )  # fmt: skip


def num_steps_of(arguments: TrainingArguments, num_conversations: int) -> int:
    """Return the number of optimiser steps of a whole run."""
    if arguments.max_steps > 0:
        return arguments.max_steps
    per_epoch = math.ceil(num_conversations / (arguments.per_device_train_batch_size * arguments.world_size))
    updates = max(math.ceil(per_epoch / arguments.gradient_accumulation_steps), 1)
    return math.ceil(arguments.num_train_epochs * updates)


def memory_in_use(device: torch.device) -> int:
    """Return the number of bytes that torch has allocated on `device`, or the process's resident memory on a CPU.

    The latter is also returned for devices whose allocations torch does not report.
    """
    module = None if device.type == "cpu" else torch.get_device_module(device)
    for name in ("memory_allocated", "current_allocated_memory"):  # the second is MPS's name
        if hasattr(module, name):
            return int(getattr(module, name)())
    return int(psutil.Process().memory_info().rss)
