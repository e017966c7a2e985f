"""Prompts to distil: from a file, from a `datasets` name, or none at all, where the model invents them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_specdec.errors import InvalidConfigError
from hf_specdec.records import shortened
from hf_specdec.training.data import Row, existing, read_rows, text_of, turns_of


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
    path = existing(source)
    name = path.name if path is not None else str(source)
    prompts: list[Prompt] = []
    for place, row in read_rows(source, split=split):
        if limit is not None and len(prompts) == limit:
            break
        turns = _turns(row, place)
        if not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
            raise InvalidConfigError(
                f"{place} holds no prompt: {shortened(row)}.",
                "Expected one of prompt, turns, messages, conversations, instruction, text.",
            )
        told = row.get("source")
        origin = told if isinstance(told, str) and told else name
        prompts.append(Prompt(tuple(text_of(turn, place) for turn in turns), text_of(origin, place)))
    return prompts


def _turns(row: Row, place: str) -> Sequence[Any] | None:
    if row.get("turns"):
        return row["turns"] if isinstance(row["turns"], list) else None
    for key, role, content in (("messages", "role", "content"), ("conversations", "from", "value")):
        if row.get(key):
            return [said for who, said in turns_of(row, key, role, content, place) if who in ("user", "human")]
    asked = row.get("instruction")
    parts = [
        part for part in ((asked, row.get("input")) if asked else (row.get("prompt") or row.get("text"),)) if part
    ]
    texts = [part for part in parts if isinstance(part, str)]
    return ["\n\n".join(texts)] if parts and texts == parts else None
