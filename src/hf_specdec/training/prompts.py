"""Prompts for `distill`: read from a file or with the package `datasets`, or to be invented by the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_specdec.errors import InvalidConfigError
from hf_specdec.records import existing_path, shortened
from hf_specdec.training.data import Row, read_rows, text_of, turns_of

MARK = "USER-TURN-8d1f"
"""Placeholder for the user's text, to find its position in the output of the chat template."""


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


def check_prompts(prompts: Sequence[Prompt | str], tokenizer: Any, num_turns: int) -> None:
    """Check, before the model is loaded, that there are prompts and that the tokenizer can encode what is asked for.

    Args:
        prompts: The prompts of `distill`.
        tokenizer: The target's tokenizer.
        num_turns: User turns per conversation.

    Raises:
        InvalidConfigError: No prompts, or one text instead of a list; several turns without a chat template; or the
            model is to invent prompts, but the tokenizer has no token to begin one with, or its chat template changes
            the user's text.
    """
    if isinstance(prompts, str):
        raise InvalidConfigError(
            "`prompts` must be a list of prompts, got one text.", "Pass [text], or read_prompts(path) for a file."
        )
    if not prompts:
        raise InvalidConfigError("No prompts were given.", "Give prompts, or invented_prompts(n).")
    if num_turns > 1 and not tokenizer.chat_template:
        raise InvalidConfigError(
            f"num_turns={num_turns} needs a chat template, but this tokenizer has none.", "Use num_turns=1."
        )
    invents = any(isinstance(prompt, Prompt) and len(prompt.turns) < num_turns for prompt in prompts)
    if invents and not encode_turn(tokenizer, [], None):
        raise InvalidConfigError(
            "This tokenizer has no chat template and no token that begins or ends a text, so the model cannot invent "
            "prompts.",
            "Give prompts.",
        )


def encode_turn(tokenizer: Any, messages: Sequence[dict[str, str]], user_text: str | None) -> list[int]:
    """Return the token ids of a prompt.

    Without a chat template these are `user_text`, or if it is None, the beginning token or else the end token.

    Args:
        tokenizer: Tokenizer with or without a chat template.
        messages: Earlier messages of the conversation; ignored without a chat template.
        user_text: The user's next turn; None ends the prompt at the start of that turn, so that the model invents it.

    Raises:
        InvalidConfigError: The model is to invent a turn, but the chat template changes the user's text.
    """
    if not tokenizer.chat_template:
        begin = [token for token in (tokenizer.bos_token_id, tokenizer.eos_token_id) if token is not None][:1]
        return list(tokenizer(user_text)["input_ids"]) if user_text is not None else begin
    turn = {"role": "user", "content": MARK if user_text is None else user_text}
    if user_text is not None:
        encoded = tokenizer.apply_chat_template([*messages, turn], add_generation_prompt=True, return_dict=True)
        return list(encoded["input_ids"])
    text = tokenizer.apply_chat_template([*messages, turn], tokenize=False)
    if MARK not in text:
        raise InvalidConfigError(
            "This chat template changes the user's text, so the model cannot invent user turns.",
            "Give prompts.",
        )
    return list(tokenizer(text[: text.index(MARK)], add_special_tokens=False)["input_ids"])
