"""What a run is set up with: its process group, training arguments and, if it resumes, its own checkpoints."""

from __future__ import annotations

import hashlib
import json
import logging
import typing
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env
from accelerate.utils.constants import FSDP_MODEL_NAME
from torch.distributed.checkpoint.filesystem import FileSystemReader
from transformers import TrainerState, TrainingArguments

from hf_specdec.errors import CheckpointFormatError, InvalidConfigError, sentence
from hf_specdec.records import Fields, read_json, shortened
from hf_specdec.validation import is_integer, is_number

logger = logging.getLogger(__name__)

PROCESS_TIMEOUT = timedelta(days=7)
"""Maximum time that processes wait for each other; one of them may have much more work left than the others."""


def processes() -> PartialState:
    """Return rank, device and number of processes; the first call joins the group (gloo without an accelerator)."""
    return PartialState(cpu=not torch.accelerator.is_available(), timeout=PROCESS_TIMEOUT)


def requests_fsdp(arguments: TrainingArguments) -> bool:
    """Return whether FSDP is requested, by the training arguments or by `accelerate launch --use_fsdp`."""
    return bool(arguments.fsdp) or parse_flag_from_env("ACCELERATE_USE_FSDP")


def check_processes(arguments: TrainingArguments) -> None:
    """Raise `InvalidConfigError` if FSDP is requested and there is only one process."""
    if arguments.fsdp and processes().num_processes == 1:
        raise InvalidConfigError(
            "`fsdp` shards over several processes, but there is only one.",
            "Run `accelerate launch --multi_gpu --num_processes 2 -m hf_specdec ...`, or omit fsdp.",
        )


# --------------------------------------------------------------------------------------------------------- arguments

POSITIVE = ("num_train_epochs", "logging_steps", "save_steps", "eval_steps", "per_device_train_batch_size",
            "per_device_eval_batch_size", "gradient_accumulation_steps")  # fmt: skip
"""Arguments that must be greater than 0."""

WARM_UP = 0.03
"""Fraction of the run, at its start, during which the learning rate rises."""


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
        "max_grad_norm": 0.5, "logging_steps": 10, "save_steps": 100, "save_total_limit": 2,
        "report_to": "none", "disable_tqdm": False, "train_sampling_strategy": "group_by_length",
        "ddp_find_unused_parameters": False,
        "ddp_timeout": int(PROCESS_TIMEOUT.total_seconds()), "use_cpu": not torch.accelerator.is_available(),
        **fields, **more,
    }  # fmt: skip
    if held_out:
        saved = given.get("save_strategy", "steps")
        measured = {
            "eval_strategy": "epoch" if saved == "epoch" else "steps",
            "eval_steps": given["save_steps"],
            "per_device_eval_batch_size": given.get("per_device_train_batch_size", 8),
            "load_best_model_at_end": saved != "no",
            "metric_for_best_model": "tau",
        }
        given = {**measured, **given}
    hints = typing.get_type_hints(TrainingArguments)
    for name, value in given.items():
        kinds = set(typing.get_args(hints.get(name))) or {hints.get(name)}
        if kinds <= {int, float, bool, type(None)}:
            maximum = 2**32 - 1 if name in ("seed", "data_seed") else 10**9  # the largest seed of numpy
            limits = -1 if name in ("max_steps", "local_rank") else 0, maximum  # -1 has a meaning there
            check_number(f"The training argument `{name}`", value, kinds, limits, nonzero=name in POSITIVE)
        if name in ("accelerator_config", "fsdp_config", "deepspeed"):
            if not isinstance(value, str | dict | None):  # transformers would open an integer as a file descriptor
                raise InvalidConfigError(
                    f"The training argument `{name}` must be the path of a JSON file or an object, "
                    f"got {shortened(value)}."
                )
            if isinstance(value, str) and not value.lstrip().startswith("{"):  # transformers reads text and file
                read_json(Path(value))
    try:
        arguments = TrainingArguments(**given)
    except Exception as error:  # transformers validates only some arguments; others raise exceptions of any class
        raise InvalidConfigError(sentence(f"The training arguments are invalid: {error!s:.400}")) from error
    check_processes(arguments)
    return arguments


def check_number(what: str, value: Any, kinds: set[Any], limits: tuple[int, int], *, nonzero: bool = False) -> None:
    """Raise `InvalidConfigError` unless a value is of one of the types and within limits; bools are no numbers."""
    if (value is None and type(None) in kinds) or (isinstance(value, bool) and bool in kinds):
        return
    least, most = limits
    is_numeric = bool(kinds & {int, float})
    fits = is_number(value) if float in kinds else is_integer(value)
    if is_numeric and fits and least <= value <= most and (value != 0 or not nonzero):
        return
    expected = "a number" if float in kinds else "an integer" if int in kinds else "true or false"
    if is_numeric:
        expected += f" above 0 and at most {most}" if nonzero else f" from {least} to {most}"
    raise InvalidConfigError(f"{what} must be {expected}, got {shortened(value)}.")


# ---------------------------------------------------------------------------------------------------------- resuming

MAX_STATE_BYTES = 32 * 2**20
"""Maximum size of a state file in bytes; fits a log of 100,000 lines or an index of a million conversations."""

RUN_NAME = "run.json"
"""Name of the file in the output directory that holds the `run_facts` of the run."""

IGNORED_FIELDS = ("recipe", "tau", "trained_length", "dtype", "transformers_version", "_name_or_path",
                  "architectures", "base_model_name_or_path")  # fmt: skip
"""Fields of a head's config that `run_facts` leaves out; they may differ when a run resumes."""


def run_facts(head: Any, recipe: Any, lengths: Iterable[int]) -> dict[str, Any]:
    """Return JSON values that identify a run by its head, settings and data.

    Args:
        head: The head to train.
        recipe: The objective's settings, a dataclass.
        lengths: Lengths of the conversations in tokens, in any order.
    """
    ordered = sorted(lengths)
    facts = {
        "head": {name: value for name, value in head.config.to_dict().items() if name not in IGNORED_FIELDS},
        "settings": asdict(recipe),
        "data": {"conversations": len(ordered), "tokens": sum(ordered),
                 "lengths": hashlib.sha256(repr(ordered).encode()).hexdigest()[:16]},
    }  # fmt: skip
    return json.loads(json.dumps(facts))


def read_state(path: Path, folder: Path) -> Fields:
    """Read a JSON file that a run needs to resume; an error suggests deleting `folder`."""
    try:
        return read_json(path, MAX_STATE_BYTES)
    except InvalidConfigError as error:
        raise InvalidConfigError(str(error), f"Delete {folder} to start over, or give another directory.") from error


def check_same_run(folder: Path, facts: dict[str, Any]) -> None:
    """Check that the checkpoints in a directory belong to the run with these facts (see `run_facts`).

    The error names up to four differences. Nothing is checked if the directory has no complete checkpoint or no file
    `run.json`.
    """
    path = folder / RUN_NAME
    if last_checkpoint(folder) is None or not path.exists():
        return
    stored = read_state(path, folder)
    before = {part: value if isinstance(value := stored.get(part), dict) else {} for part in facts}
    kinds = [each["head"].get("model_type") for each in (before, facts)]
    if kinds[0] != kinds[1]:
        names = [str(kind).removeprefix("hf_specdec_") for kind in kinds]
        raise InvalidConfigError(
            f"The checkpoints in {folder} are of a head for {shortened(names[0])}, this run trains one for "
            f"{shortened(names[1])}.",
            "Give another output directory, or delete that one.",
        )
    differing = [
        f"{part}.{name} was {shortened(before[part].get(name))}, is {shortened(now.get(name))}"
        for part, now in facts.items()
        for name in sorted({*before[part], *now})
        if before[part].get(name) != now.get(name)
    ]
    if differing:
        raise InvalidConfigError(
            f"The checkpoints in {folder} belong to another run: {'; '.join(differing[:4])}"
            f"{f'; and {len(differing) - 4} more' if len(differing) > 4 else ''}.",
            "Give another output directory, or delete that one.",
        )


@contextmanager
def reading(checkpoint: str | None) -> Iterator[None]:
    """Convert any exception of a block that reads a checkpoint: torch, pickle and safetensors raise many classes."""
    try:
        yield
    except Exception as error:
        raise CheckpointFormatError(
            f"{checkpoint} cannot be read: {type(error).__name__}: {error}.",
            "Delete it to resume from the previous checkpoint or, if there is none, to start over.",
        ) from error


def fsdp_tensor_names(checkpoint: Path) -> frozenset[str] | None:
    """Return the names of the tensors in a model checkpoint that FSDP wrote, without loading them.

    None if the files of neither a full nor a sharded state dict exist, as with `LOCAL_STATE_DICT`, whose files hold
    flattened parameters without the names of the tensors.
    """
    full, sharded = checkpoint / f"{FSDP_MODEL_NAME}.bin", checkpoint / f"{FSDP_MODEL_NAME}_0"
    if full.exists():
        return frozenset(torch.load(full, map_location="meta", weights_only=True))
    if sharded.exists():
        stored = FileSystemReader(sharded).read_metadata().state_dict_metadata
        return frozenset(name.removeprefix("model.") for name in stored)
    return None


def last_checkpoint(folder: Path) -> str | None:
    """Return the path of the usable checkpoint with the highest step, or None; logs a warning for each skipped one.

    The Trainer writes `trainer_state.json` last, so a checkpoint with this file is complete.
    """
    for checkpoint in sorted(folder.glob("checkpoint-*"), key=_step_of, reverse=True):
        fault = _fault_of(checkpoint)
        if fault is None:
            return str(checkpoint)
        logger.warning("Skipping %s: %s", checkpoint, fault)
    return None


def _step_of(checkpoint: Path) -> int:
    number = checkpoint.name.rsplit("-", 1)[1]
    return int(number) if number.isascii() and number.isdecimal() and len(number) < 19 else -1


def _fault_of(checkpoint: Path) -> str | None:
    """Return why training cannot resume from a checkpoint, or None if it can."""
    path = checkpoint / "trainer_state.json"
    if not path.exists():
        return "it is incomplete."
    try:
        state = TrainerState(**read_json(path, MAX_STATE_BYTES))
    except InvalidConfigError as error:
        return str(error)
    except Exception as error:  # transformers validates only some fields; others raise exceptions of any class
        return f"{path.name} is damaged: {error}."
    rows, best = state.log_history, state.best_model_checkpoint
    numbers = (state.epoch, state.max_steps, state.num_train_epochs, state.total_flos)
    numbers += tuple(value for value in (state.best_metric, state.train_batch_size) if value is not None)
    sound = (
        state.global_step == _step_of(checkpoint)
        and isinstance(rows, list)
        and all(isinstance(row, dict) for row in rows)
        and all(is_number(value) and 0 <= value < 1e30 for value in numbers)
        and (best is None or (isinstance(best, str) and Path(best).name.startswith("checkpoint-")))
    )
    return None if sound else f"{path.name} has missing or invalid fields."
