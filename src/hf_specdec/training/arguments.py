"""transformers' training arguments for a head, from the few that a command line asks for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from hf_specdec.errors import InvalidConfigError
from hf_specdec.training.processes import PATIENCE, processes
from hf_specdec.training.runs import check_processes

WARM_UP = 0.03
"""Share of a run in which the learning rate rises."""


SAVED_EVERY = 100
"""Optimiser steps between two checkpoints, and between two measurements on what is held out."""


def head_arguments(
    output: Path, more: Mapping[str, Any], *, held_out: bool = False, **fields: Any
) -> TrainingArguments:
    """Arguments for the Trainer.

    Args:
        output: Where checkpoints and log go.
        more: Further arguments; they win.
        held_out: Measure on held-out conversations before every checkpoint, keep the best one, and end with it.
        **fields: Of `TrainingArguments`.

    Raises:
        InvalidConfigError: Arguments that transformers refuses, or FSDP in a single process.
    """
    processes()  # before transformers starts them with a patience of its own
    given: dict[str, Any] = {
        "output_dir": str(output), "lr_scheduler_type": "cosine", "warmup_steps": WARM_UP, "adam_beta2": 0.95,
        "max_grad_norm": 0.5, "logging_steps": 10, "save_steps": SAVED_EVERY, "save_total_limit": 2,
        "report_to": "none", "disable_tqdm": False, "train_sampling_strategy": "group_by_length",
        "ddp_find_unused_parameters": False,
        "ddp_timeout": int(PATIENCE.total_seconds()), "use_cpu": not torch.accelerator.is_available(),
        **fields, **more,
    }  # fmt: skip
    if held_out:
        saved = given.get("save_strategy", "steps")
        measured = {"eval_strategy": "epoch" if saved == "epoch" else "steps", "eval_steps": given["save_steps"],
                    "per_device_eval_batch_size": given.get("per_device_train_batch_size", 8),
                    "load_best_model_at_end": saved != "no", "metric_for_best_model": "tau"}  # fmt: skip
        given = {**measured, **given}
    try:
        arguments = TrainingArguments(**given)
    except (AssertionError, ImportError, RuntimeError, TypeError, ValueError) as error:
        raise InvalidConfigError(f"The training arguments cannot be used: {error}.") from error
    check_processes(arguments)
    return arguments
