"""A training run in its directory: what it is made of, and whether another one may go on there."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import TrainerState, TrainingArguments

from hf_specdec.errors import CheckpointFormatError, InvalidConfigError
from hf_specdec.records import Fields, read_object, shortened
from hf_specdec.training.processes import processes

logger = logging.getLogger(__name__)

MAX_STATE_BYTES = 32 * 2**20
"""A log of a hundred thousand lines, an index of a million conversations."""

LARGEST = 1e30
"""Floating-point operations of a run are fewer."""

RUN_NAME = "run.json"
"""Beside the checkpoints: what their run trains, and on what."""

NOT_OF_A_RUN = ("recipe", "tau", "dtype", "transformers_version", "_name_or_path", "architectures",
                "base_model_name_or_path")  # fmt: skip


def run_facts(head: Any, recipe: Any, lengths: Iterable[int]) -> dict[str, Any]:
    """What a run is: its head, its settings, its data; plain values, whose order says nothing.

    Args:
        head: The head.
        recipe: The objective's settings, a dataclass.
        lengths: Tokens of the conversations, in any order.
    """
    ordered = sorted(lengths)
    facts = {
        "head": {name: value for name, value in head.config.to_dict().items() if name not in NOT_OF_A_RUN},
        "settings": asdict(recipe),
        "data": {"conversations": len(ordered), "tokens": sum(ordered),
                 "lengths": hashlib.sha256(repr(ordered).encode()).hexdigest()[:16]},
    }  # fmt: skip
    plain: dict[str, Any] = json.loads(json.dumps(facts))
    return plain


def read_state(path: Path, folder: Path) -> Fields:
    """Read what an interrupted work has written down of itself.

    Args:
        path: The file.
        folder: What to delete to start anew.

    Raises:
        InvalidConfigError: It cannot be read.
    """
    try:
        return read_object(path, MAX_STATE_BYTES)
    except InvalidConfigError as error:
        raise InvalidConfigError(str(error), f"Delete {folder} to start anew, or give another directory.") from error


def check_same_run(folder: Path, facts: dict[str, Any]) -> None:
    """Refuse to go on from the checkpoints of a directory that belong to a run of other facts.

    Raises:
        InvalidConfigError: Naming what differs.
    """
    path = folder / RUN_NAME
    if last_checkpoint(folder) is None or not path.exists():
        return
    before = read_state(path, folder)
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
    """See that there is more than one process to shard over.

    Raises:
        InvalidConfigError: FSDP in a single process.
    """
    if arguments.fsdp and processes().num_processes == 1:
        raise InvalidConfigError(
            "`fsdp` shards over processes, and this is a single one.",
            "Start several: accelerate launch --multi_gpu --num_processes 2 -m hf_specdec ...; or leave fsdp out.",
        )


@contextmanager
def reading(checkpoint: str | None) -> Iterator[None]:
    """Around whatever reads a file of a checkpoint.

    Raises:
        CheckpointFormatError: It fails; torch, pickle and safetensors have a dozen classes for that.
    """
    try:
        yield
    except Exception as error:
        raise CheckpointFormatError(
            f"{checkpoint} cannot be read: {type(error).__name__}: {error}.",
            "Delete it: the run goes on from the checkpoint before, or starts anew.",
        ) from error


def last_checkpoint(folder: Path) -> str | None:
    """The newest whole checkpoint; one that a killed run left half written is passed over, with a warning.

    The Trainer writes `trainer_state.json` last, so a checkpoint that has it has everything.
    """
    for checkpoint in sorted(folder.glob("checkpoint-*"), key=_step_of, reverse=True):
        fault = _fault_of(checkpoint)
        if fault is None:
            return str(checkpoint)
        logger.warning("%s is passed over: %s", checkpoint, fault)
    return None


def _step_of(checkpoint: Path) -> int:
    number = checkpoint.name.rsplit("-", 1)[1]
    return int(number) if number.isascii() and number.isdecimal() and len(number) < 19 else -1


def _fault_of(checkpoint: Path) -> str | None:
    """What the state of a checkpoint lacks to go on from; None if nothing."""
    path = checkpoint / "trainer_state.json"
    if not path.exists():
        return "it was not written to its end."
    try:
        fields = read_object(path, MAX_STATE_BYTES)
        state = TrainerState(**fields)
    except InvalidConfigError as error:
        return str(error)
    except Exception as error:  # transformers checks a few fields, and fails in many ways at others
        return f"{path.name} is damaged: {error}."
    rows, best = state.log_history, state.best_model_checkpoint
    sound = (
        state.global_step == _step_of(checkpoint)
        and isinstance(rows, list) and all(isinstance(row, dict) for row in rows)
        and all(_is_number(getattr(state, name)) for name in ("epoch", "max_steps", "num_train_epochs", "total_flos"))
        and all(value is None or _is_number(value) for value in (state.best_metric, state.train_batch_size))
        and (best is None or (isinstance(best, str) and Path(best).name.startswith("checkpoint-")))
    )  # fmt: skip
    return None if sound else f"{path.name} does not tell where the run stood."


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < LARGEST
