"""The answer of a server, validated: what the rest of the package reads is a `Completion` or was given up.

It knows the body's format and nothing of HTTP.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard, cast

from hf_specdec.errors import SpeculativeDecodingError

MAX_NAME = 500
"""Longest model name in characters; a path or a Hub id is shorter."""

MAX_SHOWN = 120
"""Characters of a server's words that a message repeats."""

SHORT = reprlib.Repr()
"""Shows the beginning of large and deeply nested values."""
SHORT.maxstring = SHORT.maxother = MAX_SHOWN

REFUSALS = (400, 413, 422)
"""HTTP statuses that concern the one prompt: malformed, too large, or longer than the context."""


class AnswerError(SpeculativeDecodingError):
    """An answer that cannot be used.

    Args:
        reason: One of few, to count by.
        came: What the server sent; shown in one line and shortened.
        is_answer: False if the request failed, which says something about the server and nothing about the prompt.
    """

    def __init__(self, reason: str, came: str = "", *, is_answer: bool = True) -> None:
        super().__init__(f"{reason}: {one_line(came)}" if came else reason)
        self.reason, self.is_answer = reason, is_answer


@dataclass(frozen=True, slots=True)
class Asked:
    """What limits the answer to a request.

    Attributes:
        max_new_tokens: Tokens that were asked for.
        vocab_size: Token ids are below it.
        max_token_length: Characters of the longest token. Text of more characters than the tokens can spell is not
            encoded: that would take time and memory without limit.
    """

    max_new_tokens: int
    vocab_size: int
    max_token_length: int


@dataclass(frozen=True, slots=True)
class Completion:
    """One valid answer.

    Attributes:
        token_ids: If the server sends them, as vLLM does with `return_token_ids`.
        text: Empty if the server sends token ids only.
        num_prompt_tokens: Tokens that the server read.
        num_tokens: Tokens that the server generated, by its own count; some servers leave the end token out.
        finish_reason: Whether the model ended the answer or the limit did.
        matched_stop: The token that ended it, if the server names it: vLLM's `stop_reason`, SGLang's `matched_stop`.
    """

    token_ids: tuple[int, ...] | None
    text: str
    num_prompt_tokens: int
    num_tokens: int
    finish_reason: Literal["stop", "length"]
    matched_stop: int | None

    @property
    def ended(self) -> bool:
        """Whether the model came to an end by itself."""
        return self.finish_reason == "stop"


def read_completion(body: bytes, asked: Asked) -> Completion:
    """Read the body of a response of `/v1/completions`.

    Raises:
        AnswerError: It is no JSON, or any part that is used has another type or an impossible value.
    """
    fields = _object(body)
    choices = fields.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise _invalid("`choices` is not a list of one object", choices)
    choice, usage = choices[0], fields.get("usage")
    if not isinstance(usage, dict):
        raise _invalid("no usage", usage)
    finish_reason = choice.get("finish_reason")
    if finish_reason not in ("stop", "length"):
        raise _invalid("`finish_reason` is neither stop nor length", finish_reason)
    num_tokens = _count(usage, "completion_tokens")
    if num_tokens > asked.max_new_tokens:
        raise AnswerError("more tokens than were asked for", str(num_tokens))
    token_ids = _token_ids(choice.get("token_ids"), asked)
    return Completion(
        token_ids,
        _text(choice.get("text"), asked, optional=token_ids is not None),
        _count(usage, "prompt_tokens"),
        num_tokens,
        cast(Literal["stop", "length"], finish_reason),
        _matched_stop(choice, asked),
    )


def read_model_names(body: bytes) -> list[str]:
    """Read the body of a response of `/v1/models`: the names, each once.

    Raises:
        AnswerError: It is no JSON, or no list of objects with a printable `id`.
    """
    models = _object(body).get("data")
    if not isinstance(models, list):
        raise _invalid("`data` is not a list of models", models)
    for model in models:
        name = model.get("id") if isinstance(model, dict) else None
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or not name.isprintable():
            raise AnswerError(
                f"a model's `id` is not a printable name of at most {MAX_NAME} characters", SHORT.repr(model)
            )
    return list(dict.fromkeys(model["id"] for model in models))


def one_line(text: str) -> str:
    """The text in one line of at most `MAX_SHOWN` characters."""
    line = " ".join(text[: 2 * MAX_SHOWN].split())
    return line if len(line) <= MAX_SHOWN else line[: MAX_SHOWN - 3] + "..."


def _invalid(reason: str, value: Any) -> AnswerError:
    return AnswerError(reason, SHORT.repr(value))


def _object(body: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:  # ValueError also for bytes that are no text, and endless numbers
        raise _invalid("not JSON", body) from error
    if not isinstance(fields, dict):
        raise _invalid("not a JSON object", body)
    return fields


def _is_int(value: Any, limit: int) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < limit


def _count(usage: Mapping[str, Any], name: str) -> int:
    value = usage.get(name)
    if not _is_int(value, 2**31):
        raise _invalid(f"`{name}` is not a count", value)
    return value


def _token_ids(value: Any, asked: Asked) -> tuple[int, ...] | None:
    """The ids; an empty list says as little as none at all."""
    if value is None or value == []:
        return None
    if not isinstance(value, list):
        raise _invalid("`token_ids` is not a list", value)
    if len(value) > asked.max_new_tokens:
        raise AnswerError("more tokens than were asked for", str(len(value)))
    strange = [token for token in value if not _is_int(token, asked.vocab_size)]
    if strange:
        raise _invalid("`token_ids` are not ids of the tokenizer's vocabulary", strange)
    return tuple(value)


def _text(value: Any, asked: Asked, *, optional: bool) -> str:
    if value is None and optional:
        return ""
    if not isinstance(value, str):
        raise _invalid("`text` is not a string", value)
    if len(value) > asked.max_new_tokens * asked.max_token_length:
        raise _invalid("more text than the tokens that were asked for can spell", value)
    try:
        value.encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair, which JSON can write and no tokenizer reads
        raise _invalid("`text` is not Unicode", value) from error
    return value


def _matched_stop(choice: Mapping[str, Any], asked: Asked) -> int | None:
    """The end token; a string is a stop string, of which there are none in our requests."""
    for name in ("stop_reason", "matched_stop"):
        value = choice.get(name)
        if _is_int(value, asked.vocab_size):
            return value
        if value is not None and not isinstance(value, str):
            raise _invalid(f"`{name}` is not a token of the tokenizer's vocabulary", value)
    return None
