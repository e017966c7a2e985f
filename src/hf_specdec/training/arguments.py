"""Build and check transformers' `TrainingArguments` for a head."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from hf_specdec.errors import InvalidConfigError
from hf_specdec.records import read_json, shortened
from hf_specdec.training.processes import PROCESS_TIMEOUT, processes
from hf_specdec.training.runs import check_processes

MAX_VALUE = 10**9
"""Largest value accepted for numeric training arguments other than seeds."""

MAX_SEED = 2**32 - 1
"""Largest seed that numpy accepts."""

MAY_BE_NEGATIVE = {"max_steps": -1, "local_rank": -1}
"""Minimum of the arguments for which -1 has a meaning in transformers; the minimum of all others is 0."""

POSITIVE = ("num_train_epochs", "logging_steps", "save_steps", "eval_steps", "per_device_train_batch_size",
            "per_device_eval_batch_size", "gradient_accumulation_steps")  # fmt: skip
"""Arguments that must be greater than 0."""

JSON_ARGUMENTS = ("accelerator_config", "fsdp_config", "deepspeed")
"""Arguments given as an object, as JSON text or as the path of a JSON file; transformers reads text and file."""

WARM_UP = 0.03
"""Fraction of the run, at its start, during which the learning rate rises."""

SAVE_STEPS = 100
"""Default number of optimiser steps between checkpoints, and between evaluations on held-out conversations."""


def head_arguments(
    output: Path, more: Mapping[str, Any], *, held_out: bool = False, **fields: Any
) -> TrainingArguments:
    """Build `TrainingArguments` with defaults for training a head.

    Under `accelerate launch` or `torchrun`, it also joins the process group.

    Args:
        output: Directory for checkpoints and the log.
        more: Further `TrainingArguments`; they override `fields`.
        held_out: Evaluate on held-out conversations before every checkpoint, and load the checkpoint with the highest
            tau at the end. With `save_strategy="no"`, evaluate every `save_steps` steps and load none. `fields` and
            `more` override this.
        **fields: `TrainingArguments` that override the defaults.

    Raises:
        InvalidConfigError: An argument is invalid or out of range, its JSON file cannot be read, or FSDP is requested
            with a single process.
    """
    processes()  # first: transformers would create the process group with its own settings
    given: dict[str, Any] = {
        "output_dir": str(output), "lr_scheduler_type": "cosine", "warmup_steps": WARM_UP, "adam_beta2": 0.95,
        "max_grad_norm": 0.5, "logging_steps": 10, "save_steps": SAVE_STEPS, "save_total_limit": 2,
        "report_to": "none", "disable_tqdm": False, "train_sampling_strategy": "group_by_length",
        "ddp_find_unused_parameters": False,
        "ddp_timeout": int(PROCESS_TIMEOUT.total_seconds()), "use_cpu": not torch.accelerator.is_available(),
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
    except Exception as error:  # transformers validates only some arguments; others raise exceptions of any class
        raise InvalidConfigError(f"The training arguments are invalid: {error!s:.400}.") from error
    check_processes(arguments)
    return arguments


def _check_values(given: Mapping[str, Any]) -> None:
    """Check types and ranges of numbers and booleans, and that JSON files hold an object; transformers does not.

    Raises:
        InvalidConfigError: An argument is invalid; the message names the first one, or the file that cannot be read.
    """
    hints = typing.get_type_hints(TrainingArguments)
    for name, value in given.items():
        kinds = set(typing.get_args(hints.get(name))) or {hints.get(name)}
        if kinds <= {int, float, bool, type(None)}:
            _check_number(name, value, kinds)
        if name not in JSON_ARGUMENTS:
            continue
        if not isinstance(value, str | dict | None):  # transformers would open an integer as a file descriptor
            raise InvalidConfigError(
                f"The training argument `{name}` must be the path of a JSON file or an object, got {shortened(value)}."
            )
        if isinstance(value, str) and not value.lstrip().startswith("{"):
            read_json(Path(value))


def _check_number(name: str, value: Any, kinds: set[Any]) -> None:
    if (value is None and type(None) in kinds) or (isinstance(value, bool) and bool in kinds):
        return
    minimum = MAY_BE_NEGATIVE.get(name, 0)
    maximum = MAX_SEED if name in ("seed", "data_seed") else MAX_VALUE
    number = isinstance(value, int | float if float in kinds else int) and not isinstance(value, bool)
    if kinds & {int, float} and number and minimum <= value <= maximum and (value > 0 or name not in POSITIVE):
        return
    what = "a number" if float in kinds else "an integer" if int in kinds else "true or false"
    if kinds & {int, float}:
        what += f" above 0 and at most {maximum}" if name in POSITIVE else f" from {minimum} to {maximum}"
    raise InvalidConfigError(f"The training argument `{name}` must be {what}, got {shortened(value)}.")
