"""Identify training runs and find their checkpoints, so that a run resumes only from its own checkpoints."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate.utils.constants import FSDP_MODEL_NAME
from torch.distributed.checkpoint.filesystem import FileSystemReader
from transformers import TrainerState, TrainingArguments

from hf_specdec.errors import CheckpointFormatError, InvalidConfigError
from hf_specdec.records import Fields, read_json, shortened
from hf_specdec.training.processes import processes

logger = logging.getLogger(__name__)

MAX_STATE_BYTES = 32 * 2**20
"""Maximum size of a state file in bytes; fits a log of 100,000 lines or an index of a million conversations."""

MAX_NUMBER = 1e30
"""Exclusive upper bound of the numbers in a state file; the largest is a run's count of floating-point operations."""

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
    plain: dict[str, Any] = json.loads(json.dumps(facts))
    return plain


def read_state(path: Path, folder: Path) -> Fields:
    """Read a JSON file that a run needs to resume.

    Args:
        path: The file.
        folder: Directory that the error message suggests deleting.

    Raises:
        InvalidConfigError: The file cannot be read, is larger than `MAX_STATE_BYTES` or holds no JSON object.
    """
    try:
        return read_json(path, MAX_STATE_BYTES)
    except InvalidConfigError as error:
        raise InvalidConfigError(str(error), f"Delete {folder} to start over, or give another directory.") from error


def check_same_run(folder: Path, facts: dict[str, Any]) -> None:
    """Check that the checkpoints in a directory belong to the run with these facts (see `run_facts`).

    Nothing is checked if the directory has no complete checkpoint or no file `run.json`.

    Raises:
        InvalidConfigError: They belong to another run (the message names up to four differences), or the file is
            damaged.
    """
    path = folder / RUN_NAME
    if last_checkpoint(folder) is None or not path.exists():
        return
    before = read_state(path, folder)
    kinds = [_fields(each.get("head")).get("model_type") for each in (before, facts)]
    if kinds[0] != kinds[1]:
        names = [str(kind).removeprefix("hf_specdec_") for kind in kinds]
        raise InvalidConfigError(
            f"The checkpoints in {folder} are of a head for {shortened(names[0])}, this run trains one for "
            f"{shortened(names[1])}.",
            "Give another output directory, or delete that one.",
        )
    differing = [
        f"{part}.{name} was {shortened(known.get(name))}, is {shortened(now.get(name))}"
        for part, now in facts.items()
        for known in [_fields(before.get(part))]
        for name in sorted({*known, *now})
        if known.get(name) != now.get(name)
    ]
    if differing:
        raise InvalidConfigError(
            f"The checkpoints in {folder} belong to another run: {'; '.join(differing[:4])}"
            f"{f'; and {len(differing) - 4} more' if len(differing) > 4 else ''}.",
            "Give another output directory, or delete that one.",
        )


def _fields(value: Any) -> Fields:
    return value if isinstance(value, dict) else {}


def check_processes(arguments: TrainingArguments) -> None:
    """Check that FSDP, if the arguments request it, has more than one process to shard over.

    Raises:
        InvalidConfigError: FSDP is requested and there is only one process.
    """
    if arguments.fsdp and processes().num_processes == 1:
        raise InvalidConfigError(
            "`fsdp` shards over several processes, but there is only one.",
            "Run `accelerate launch --multi_gpu --num_processes 2 -m hf_specdec ...`, or omit fsdp.",
        )


@contextmanager
def reading(checkpoint: str | None) -> Iterator[None]:
    """Context manager that converts any exception of its block, which reads a checkpoint, to one class.

    Torch, pickle and safetensors raise many classes.

    Raises:
        CheckpointFormatError: The block raised an exception.
    """
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
        fields = read_json(path, MAX_STATE_BYTES)
        state = TrainerState(**fields)
    except InvalidConfigError as error:
        return str(error)
    except Exception as error:  # transformers validates only some fields; others raise exceptions of any class
        return f"{path.name} is damaged: {error}."
    rows, best = state.log_history, state.best_model_checkpoint
    sound = (
        state.global_step == _step_of(checkpoint)
        and isinstance(rows, list) and all(isinstance(row, dict) for row in rows)
        and all(_is_number(getattr(state, name)) for name in ("epoch", "max_steps", "num_train_epochs", "total_flos"))
        and all(value is None or _is_number(value) for value in (state.best_metric, state.train_batch_size))
        and (best is None or (isinstance(best, str) and Path(best).name.startswith("checkpoint-")))
    )  # fmt: skip
    return None if sound else f"{path.name} has missing or invalid fields."


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < MAX_NUMBER
