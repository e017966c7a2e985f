"""Prompts for `distill`: read from a file or with the package `datasets`, or to be invented by the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_specdec.errors import InvalidConfigError
from hf_specdec.records import shortened
from hf_specdec.training.data import Row, existing_path, read_rows, text_of, turns_of


@dataclass(frozen=True, slots=True)
class Prompt:
    """User turns of one conversation, possibly none; the model invents those that are missing.

    Args:
        turns: Messages of the user, in order.
        source: Where the prompt comes from, such as a file name; stored with the answers.
    """

    turns: tuple[str, ...]
    source: str


INVENTED = "invented"
"""`Prompt.source` of prompts that the model invents."""


def read_prompts(source: str | Path, *, split: str = "train", limit: int | None = None) -> list[Prompt]:
    """Read prompts from a file or a dataset.

    Args:
        source: A directory written by `distill`, a file (.jsonl, .jsonl.gz, .json, .parquet, .txt) or the name of a
            dataset on the Hub. Rows have `turns`, `messages`, `conversations` (ShareGPT), `instruction`
            (with or without `input`), `prompt` or `text`, of which the first is used; of a conversation
            only the user's turns are used. A row's `source` replaces the file or dataset name as `Prompt.source`.
        split: Split to load if `source` is a `datasets` name.
        limit: Read at most this many prompts.

    Raises:
        InvalidConfigError: The source cannot be read, or a row has no prompt, an empty turn or invalid Unicode.
    """
    path = existing_path(source)
    name = path.name if path is not None else str(source)
    prompts: list[Prompt] = []
    for place, row in read_rows(source, split=split):
        if limit is not None and len(prompts) == limit:
            break
        turns = _turns(row, place)
        if not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
            raise InvalidConfigError(
                f"{place} has no prompt: {shortened(row)}.",
                "Expected one of prompt, turns, messages, conversations, instruction, text.",
            )
        given = row.get("source")
        origin = given if isinstance(given, str) and given else name
        prompts.append(Prompt(tuple(text_of(turn, place) for turn in turns), text_of(origin, place)))
    return prompts


def _turns(row: Row, place: str) -> Sequence[Any] | None:
    if row.get("turns"):
        return row["turns"] if isinstance(row["turns"], list) else None
    for key, role, content in (("messages", "role", "content"), ("conversations", "from", "value")):
        if row.get(key):
            return [text for speaker, text in turns_of(row, key, role, content, place) if speaker in ("user", "human")]
    instruction = row.get("instruction")
    values = (instruction, row.get("input")) if instruction else (row.get("prompt") or row.get("text"),)
    parts = [value for value in values if value]
    texts = [part for part in parts if isinstance(part, str)]
    return ["\n\n".join(texts)] if parts and texts == parts else None
