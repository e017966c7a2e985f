"""Prompts to distil: from a file, from a `datasets` name, or none at all, where the model invents them.

Feeds: `training/distill.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_specdec.errors import InvalidConfigError
from hf_specdec.training.conversations import load_rows


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the user says in one conversation; turns that are missing are the model's to invent."""

    turns: tuple[str, ...]
    source: str  # where it comes from


INVENTED = "invented"
"""Source of a prompt that the model makes up."""


def read_prompts(source: str | Path, *, split: str = "train", limit: int | None = None) -> list[Prompt]:
    """Prompts of a file or of a dataset.

    Args:
        source: A text file (one prompt per line), a JSON-lines file, or anything `datasets.load_dataset` takes. Rows
            have `prompt`, `turns`, `messages`, `conversations` (ShareGPT), `instruction` (with `input`) or `text`;
            of conversations the user's turns are taken. A row's own `source` is kept.
        split: Of a dataset.
        limit: At most so many, the first ones.

    Raises:
        InvalidConfigError: A source that is none of that, or a row without a prompt.
    """
    path = Path(source)
    name = path.name if path.exists() else str(source)
    rows: Iterable[Any]
    if path.suffix == ".txt" and path.is_file():
        rows = [{"prompt": line} for line in path.read_text().splitlines() if line.strip()]
    else:
        rows = load_rows(source, split=split)
    prompts: list[Prompt] = []
    for number, row in enumerate(rows, start=1):
        if limit is not None and len(prompts) == limit:
            break
        turns = _turns(row) if isinstance(row, dict) else None
        if not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
            raise InvalidConfigError(
                f"{source}, row {number} holds no prompt: {json.dumps(row, default=str)[:80]}.",
                "Expected one of prompt, turns, messages, conversations, instruction, text.",
            )
        prompts.append(Prompt(tuple(turns), str(row.get("source") or name)))
    return prompts


def _turns(row: dict[str, Any]) -> Sequence[str] | None:
    if row.get("turns"):
        return [str(turn) for turn in row["turns"]]
    for key, role, content in (("messages", "role", "content"), ("conversations", "from", "value")):
        if row.get(key):
            return [turn[content] for turn in row[key] if turn.get(role) in ("user", "human")]
    if row.get("instruction"):
        return ["\n\n".join(part for part in (row["instruction"], row.get("input")) if part)]
    text = row.get("prompt") or row.get("text")
    return [text] if text else None
