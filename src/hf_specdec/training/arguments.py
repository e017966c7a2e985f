"""transformers' training arguments for a head, from the few that a command line asks for."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from hf_specdec.errors import InvalidConfigError
from hf_specdec.records import read_object, shortened
from hf_specdec.training.processes import PATIENCE, processes
from hf_specdec.training.runs import check_processes

LARGEST = 10**9
"""No training argument means anything beyond it."""

LAST_SEED = 2**32 - 1
"""numpy takes no larger one."""

MAY_BE_NEGATIVE = {"max_steps": -1, "local_rank": -1}
"""Where transformers has a meaning for -1."""

POSITIVE = ("num_train_epochs", "logging_steps", "save_steps", "eval_steps", "per_device_train_batch_size",
            "per_device_eval_batch_size", "gradient_accumulation_steps")  # fmt: skip

NAMES_OF_FILES = ("accelerator_config", "fsdp_config", "deepspeed")
"""They may name a file of JSON, which transformers reads."""

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
        InvalidConfigError: Arguments that transformers refuses, or that mean nothing; FSDP in a single process.
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
    _check_values(given)
    try:
        arguments = TrainingArguments(**given)
    except Exception as error:  # transformers checks a few of them, and fails in many ways at others
        raise InvalidConfigError(f"The training arguments cannot be used: {error!s:.400}.") from error
    check_processes(arguments)
    return arguments


def _check_values(given: Mapping[str, Any]) -> None:
    """See that numbers are numbers, and that named files are files; transformers takes whatever it is given.

    Raises:
        InvalidConfigError: Naming the first argument that is something else.
    """
    hints = typing.get_type_hints(TrainingArguments)
    for name, value in given.items():
        kinds = set(typing.get_args(hints.get(name))) or {hints.get(name)}
        if kinds <= {int, float, bool, type(None)}:
            _check_number(name, value, kinds)
        if name not in NAMES_OF_FILES:
            continue
        if not isinstance(value, str | dict | None):  # transformers would open, and close, the file of that number
            raise InvalidConfigError(
                f"The training argument `{name}` must be a file or an object, got {shortened(value)}."
            )
        if isinstance(value, str) and not value.lstrip().startswith("{"):
            read_object(Path(value))


def _check_number(name: str, value: Any, kinds: set[Any]) -> None:
    if (value is None and type(None) in kinds) or (isinstance(value, bool) and bool in kinds):
        return
    least = MAY_BE_NEGATIVE.get(name, 0)
    most = LAST_SEED if name in ("seed", "data_seed") else LARGEST
    number = isinstance(value, int | float if float in kinds else int) and not isinstance(value, bool)
    if kinds & {int, float} and number and least <= value <= most and (value > 0 or name not in POSITIVE):
        return
    what = "a number" if float in kinds else "an integer" if int in kinds else "true or false"
    told = f", above 0 and up to {most}" if name in POSITIVE else f" from {least} to {most}"
    raise InvalidConfigError(
        f"The training argument `{name}` must be {what}{told if kinds & {int, float} else ''}, got {shortened(value)}."
    )
