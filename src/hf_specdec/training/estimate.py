"""What a run will take, told before it starts: time by a rehearsal of two batches, memory while they run, disk."""

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
"""Per trained parameter and checkpoint: the weight and two moments in float32."""

GRADIENT_BYTES = 12
"""Per trained parameter in memory, besides the weight: its gradient and the two moments."""


@dataclass(frozen=True, slots=True)
class RunEstimate:
    """A run before it starts."""

    num_steps: int  # optimiser steps that are left
    seconds_per_step: float
    memory_bytes: int  # of the process, or of its accelerator
    disk_bytes: int  # of checkpoints

    def __str__(self) -> str:
        hours, minutes = divmod(math.ceil(self.num_steps * self.seconds_per_step / 60), 60)
        duration = f"{hours} h {minutes:02} min" if hours else f"{minutes} min"
        return (
            f"{self.num_steps} steps of {self.seconds_per_step:.2g} s: about {duration}; "
            f"{self.memory_bytes / 1e9:.1f} GB of memory, {self.disk_bytes / 1e9:.2f} GB of disk for checkpoints."
        )


def estimate_run(
    rehearse: Callable[[Sequence[int]], Tensor],
    trained: nn.Module,
    lengths: Sequence[int],
    arguments: TrainingArguments,
    num_done: int,
) -> RunEstimate:
    """Rehearse a batch of middle length and the longest one, and reckon what all of them take.

    Args:
        rehearse: Computes the loss of a batch, given the numbers of its conversations.
        trained: What has the parameters that are trained; their gradients are cleared.
        lengths: Tokens of each conversation.
        arguments: Of the run.
        num_done: Optimiser steps that were done before an interrupt.
    """
    batch = arguments.per_device_train_batch_size
    order = sorted(range(len(lengths)), key=lambda number: lengths[number])
    middle = max((len(order) - batch) // 2, 0)
    memory, points = 0, []
    for numbers in (order[middle : middle + batch], order[middle : middle + batch], order[-batch:]):  # first: warm-up
        begin = time.perf_counter()
        loss = rehearse(numbers)
        memory = max(memory, memory_in_use(loss.device))  # what backward reads is all there now
        if loss.requires_grad:
            loss.backward()
        float(loss.detach())  # an accelerator is asynchronous
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
    """Optimiser steps of a whole run."""
    if arguments.max_steps > 0:
        return arguments.max_steps
    per_epoch = math.ceil(num_conversations / (arguments.per_device_train_batch_size * arguments.world_size))
    updates = max(math.ceil(per_epoch / arguments.gradient_accumulation_steps), 1)
    return math.ceil(arguments.num_train_epochs * updates)


def memory_in_use(device: torch.device) -> int:
    """Bytes of this process, or of its accelerator."""
    module = None if device.type == "cpu" else torch.get_device_module(device)
    for name in ("memory_allocated", "current_allocated_memory"):  # the latter is Apple's
        if hasattr(module, name):
            return int(getattr(module, name)())
    return int(psutil.Process().memory_info().rss)
