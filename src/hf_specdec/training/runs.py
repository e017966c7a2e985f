"""A training run in its directory: what it is made of, and whether another one may go on there."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import TrainingArguments

from hf_specdec.errors import InvalidConfigError
from hf_specdec.training.processes import processes

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


def check_same_run(folder: Path, facts: dict[str, Any]) -> None:
    """Refuse to go on from the checkpoints of a directory that belong to a run of other facts.

    Raises:
        InvalidConfigError: Naming what differs.
    """
    path = folder / RUN_NAME
    if last_checkpoint(folder) is None or not path.exists():
        return
    before = json.loads(path.read_text())
    differing = [
        f"{part}.{name} was {known.get(name)!r}, is {now.get(name)!r}"
        for part, now in facts.items()
        for known in [before.get(part, {})]
        for name in sorted({*known, *now})
        if known.get(name) != now.get(name)
    ]
    if differing:
        raise InvalidConfigError(
            f"The checkpoints in {folder} belong to another run: {'; '.join(differing[:4])}"
            f"{f'; and {len(differing) - 4} more' if len(differing) > 4 else ''}.",
            "Give another output directory, or delete that one.",
        )


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


def last_checkpoint(folder: Path) -> str | None:
    """The newest whole checkpoint; one that a killed run left half written is passed over.

    The Trainer writes `trainer_state.json` last, so a checkpoint that has it has everything.
    """
    whole = []
    for checkpoint in folder.glob("checkpoint-*"):
        try:
            json.loads((checkpoint / "trainer_state.json").read_text())
        except (OSError, ValueError):
            continue
        whole.append(checkpoint)
    return str(max(whole, key=lambda path: int(path.name.rsplit("-", 1)[1]))) if whole else None
