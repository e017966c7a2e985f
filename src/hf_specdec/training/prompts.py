"""Prompts for `distill`: read from a file or with the package `datasets`, or to be invented by the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_specdec.errors import InvalidConfigError
from hf_specdec.records import existing_path, shortened
from hf_specdec.training.data import Message, Row, messages_of, read_each, rendered, system_of, text_of

MARK = "USER-TURN-8d1f"
"""Placeholder for the user's text, to find its position in the output of the chat template."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """User turns of one conversation, possibly none; the model invents those that are missing.

    Args:
        turns: Messages of the user, in order.
        source: Where the prompt comes from, such as a file name; stored with the answers.
        system: System message before the first turn; empty for none.
    """

    turns: tuple[str, ...]
    source: str
    system: str = ""


INVENTED = "invented"
"""`Prompt.source` of prompts that the model invents."""


def read_prompts(source: str | Path, *, split: str = "train", limit: int | None = None) -> list[Prompt]:
    """Read prompts from a file or a dataset.

    Rows that cannot be read are skipped and logged, unless they are more than 1 % of the source.

    Args:
        source: A directory written by `distill`, a file (.jsonl, .jsonl.gz, .json, .parquet, .txt) or the name of a
            dataset on the Hub. Rows have `turns`, `messages`, `conversations` (ShareGPT), `instruction`
            (with or without `input`), `prompt` or `text`, of which the first is used; of a conversation
            only the user's turns and a system message before them are used. A row's `system` is such a message, and
            its `source` replaces the file or dataset name as `Prompt.source`.
        split: Split to load if `source` is a `datasets` name.
        limit: Read at most this many prompts.

    Raises:
        InvalidConfigError: The source cannot be read, or too many rows: they have no prompt, an empty turn, tools, or
            invalid Unicode.
    """
    path = existing_path(source)
    name = path.name if path is not None else str(source)
    return read_each(source, lambda row, place: prompt_of(row, place, name), split=split, limit=limit)


def prompt_of(row: Row, place: str, name: str) -> Prompt:
    """Return the prompt in a row, see `read_prompts`.

    Args:
        row: The row.
        place: Location of the row.
        name: `Prompt.source` of a row without `source`.

    Raises:
        InvalidConfigError: The row has no prompt that can be asked as text.
    """
    messages = [] if row.get("turns") else messages_of(row, place)
    later = [message["role"] for message in messages[1:]]
    if row.get("tools") or "tool" in later or "system" in later or any("tool_calls" in each for each in messages):
        raise InvalidConfigError(
            f"{place} has tools or a later system message, which prompts cannot have.", "Leave such rows out."
        )
    if messages:
        system = messages[0]["content"] if messages[0]["role"] == "system" else ""
        turns: Sequence[Any] | None = [each["content"] for each in messages if each["role"] == "user"]
    else:
        system, turns = system_of(row, place), _turns(row)
    if not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise InvalidConfigError(
            f"{place} has no prompt: {shortened(row)}.",
            "Expected one of prompt, turns, messages, conversations, instruction, text.",
        )
    given = row.get("source")
    origin = given if isinstance(given, str) and given else name
    return Prompt(tuple(text_of(turn, place) for turn in turns), text_of(origin, place), system)


def _turns(row: Row) -> Sequence[Any] | None:
    if row.get("turns"):
        return row["turns"] if isinstance(row["turns"], list) else None
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
        InvalidConfigError: No prompts, or one text instead of a list; several turns or a system message without a chat
            template; or the model is to invent prompts, but the tokenizer has no token to begin one with, or its chat
            template changes the user's text.
    """
    if isinstance(prompts, str):
        raise InvalidConfigError(
            "`prompts` must be a list of prompts, got one text.", "Pass [text], or read_prompts(path) for a file."
        )
    if not prompts:
        raise InvalidConfigError("No prompts were given.", "Give prompts, or invented_prompts(n).")
    if not tokenizer.chat_template and any(isinstance(prompt, Prompt) and prompt.system for prompt in prompts):
        raise InvalidConfigError("Prompts with a system message need a chat template, but this tokenizer has none.")
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


def encode_turn(tokenizer: Any, messages: Sequence[Message], user_text: str | None) -> list[int]:
    """Return the token ids of a prompt.

    Without a chat template these are `user_text`, or if it is None, the beginning token or else the end token.

    Args:
        tokenizer: Tokenizer with or without a chat template.
        messages: Earlier messages of the conversation; ignored without a chat template.
        user_text: The user's next turn; None ends the prompt at the start of that turn, so that the model invents it.

    Raises:
        InvalidConfigError: The chat template rejects the messages; or the model is to invent a turn, but the chat
            template changes the user's text.
    """
    if not tokenizer.chat_template:
        begin = [token for token in (tokenizer.bos_token_id, tokenizer.eos_token_id) if token is not None][:1]
        return list(tokenizer(user_text)["input_ids"]) if user_text is not None else begin
    turn = {"role": "user", "content": MARK if user_text is None else user_text}
    text = rendered(tokenizer, [*messages, turn], answer_next=user_text is not None)
    if user_text is None and MARK not in text:
        raise InvalidConfigError(
            "This chat template changes the user's text, so the model cannot invent user turns.",
            "Give prompts.",
        )
    known = text if user_text is not None else text[: text.index(MARK)]
    return list(tokenizer(known, add_special_tokens=False)["input_ids"])
