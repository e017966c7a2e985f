"""Validate the response bodies of OpenAI-compatible servers. HTTP is handled in `connections.py`."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard, cast

from hf_specdec.errors import SpeculativeDecodingError

MAX_NAME = 500
"""Maximum length of a model name in characters; paths and Hub ids are shorter."""

MAX_SHOWN = 120
"""Maximum number of characters of a server's response in an error message."""

SHORT_REPR = reprlib.Repr()
"""Formatter that shows only the beginning of large or deeply nested values."""
SHORT_REPR.maxstring = SHORT_REPR.maxother = MAX_SHOWN

REFUSALS = (400, 413, 422)
"""HTTP error statuses that concern one prompt (malformed, too large, longer than the context), not the server."""


class AnswerError(SpeculativeDecodingError):
    """Raised or returned if a request to a server failed or its answer cannot be used.

    Args:
        reason: Short category; dropped answers are counted per reason.
        detail: What was wrong, such as the value that the server sent; shortened to one line.
        is_answer: True if the server sent an unusable answer or rejected the prompt (`REFUSALS`); False if the request
            failed: timeout, no connection or another HTTP error.
    """

    def __init__(self, reason: str, detail: str = "", *, is_answer: bool = True) -> None:
        super().__init__(f"{reason}: {one_line(detail)}" if detail else reason)
        self.reason, self.is_answer = reason, is_answer


@dataclass(frozen=True, slots=True)
class AnswerLimits:
    """Limits that an answer must not exceed.

    Attributes:
        max_new_tokens: Requested maximum number of tokens.
        vocab_size: Exclusive upper bound of token ids.
        max_token_length: Length of the longest token in characters. Text longer than `max_new_tokens` such tokens is
            rejected, to bound the cost of encoding it.
    """

    max_new_tokens: int
    vocab_size: int
    max_token_length: int


@dataclass(frozen=True, slots=True)
class Completion:
    """A validated answer of a server to one prompt.

    Attributes:
        token_ids: Token ids; None if the server sent none, only text. vLLM sends ids with `return_token_ids`.
        text: Text, empty if the server sent only token ids.
        num_prompt_tokens: The server's count of prompt tokens.
        num_tokens: The server's count of generated tokens; some servers exclude the end token.
        finish_reason: `"stop"` if the model ended the answer, `"length"` if it reached the limit.
        matched_stop: The end token, if the server names it (vLLM: `stop_reason`, SGLang: `matched_stop`).
    """

    token_ids: tuple[int, ...] | None
    text: str
    num_prompt_tokens: int
    num_tokens: int
    finish_reason: Literal["stop", "length"]
    matched_stop: int | None

    @property
    def ended(self) -> bool:
        """Whether the model ended the answer."""
        return self.finish_reason == "stop"


def read_completion(body: bytes, limits: AnswerLimits) -> Completion:
    """Parse and validate a response body of `/v1/completions`.

    Raises:
        AnswerError: The body is not a JSON object, or a field that is used has a wrong type, is invalid or exceeds
            `limits`.
    """
    fields = _object(body)
    choices = fields.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise _invalid("`choices` is not a list of one object", choices)
    choice, usage = choices[0], fields.get("usage")
    if not isinstance(usage, dict):
        raise _invalid("`usage` is not an object", usage)
    finish_reason = choice.get("finish_reason")
    if finish_reason not in ("stop", "length"):
        raise _invalid("`finish_reason` is neither stop nor length", finish_reason)
    num_tokens = _count(usage, "completion_tokens")
    if num_tokens > limits.max_new_tokens:
        raise AnswerError("more tokens than requested", str(num_tokens))
    token_ids = _token_ids(choice.get("token_ids"), limits)
    return Completion(
        token_ids,
        _text(choice.get("text"), limits, optional=token_ids is not None),
        _count(usage, "prompt_tokens"),
        num_tokens,
        cast(Literal["stop", "length"], finish_reason),
        _matched_stop(choice, limits),
    )


def read_model_names(body: bytes) -> list[str]:
    """Parse a response body of `/v1/models` and return the distinct model names.

    Raises:
        AnswerError: The body is not a JSON object with a list `data`, or an entry of it has no printable `id` of 1 to
            `MAX_NAME` characters.
    """
    models = _object(body).get("data")
    if not isinstance(models, list):
        raise _invalid("`data` is not a list of models", models)
    for model in models:
        name = model.get("id") if isinstance(model, dict) else None
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or not name.isprintable():
            raise AnswerError(
                f"a model's `id` is not a printable name of at most {MAX_NAME} characters", SHORT_REPR.repr(model)
            )
    return list(dict.fromkeys(model["id"] for model in models))


def one_line(text: str) -> str:
    """Shorten text to one line of at most `MAX_SHOWN` characters."""
    line = " ".join(text[: 2 * MAX_SHOWN].split())
    return line if len(line) <= MAX_SHOWN else line[: MAX_SHOWN - 3] + "..."


def _invalid(reason: str, value: Any) -> AnswerError:
    return AnswerError(reason, SHORT_REPR.repr(value))


def _object(body: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:  # ValueError: also invalid UTF-8 and huge integers
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


def _token_ids(value: Any, limits: AnswerLimits) -> tuple[int, ...] | None:
    """Return validated token ids; None if they are missing or empty, in which case the text is used."""
    if value is None or value == []:
        return None
    if not isinstance(value, list):
        raise _invalid("`token_ids` is not a list", value)
    if len(value) > limits.max_new_tokens:
        raise AnswerError("more tokens than requested", str(len(value)))
    invalid = [token for token in value if not _is_int(token, limits.vocab_size)]
    if invalid:
        raise _invalid("`token_ids` are not ids of the tokenizer's vocabulary", invalid)
    return tuple(value)


def _text(value: Any, limits: AnswerLimits, *, optional: bool) -> str:
    if value is None and optional:
        return ""
    if not isinstance(value, str):
        raise _invalid("`text` is not a string", value)
    if len(value) > limits.max_new_tokens * limits.max_token_length:
        raise _invalid("longer text than the requested tokens can produce", value)
    try:
        value.encode()
    except UnicodeEncodeError as error:  # a lone surrogate, which JSON can express but tokenizers reject
        raise _invalid("`text` is not Unicode", value) from error
    return value


def _matched_stop(choice: Mapping[str, Any], limits: AnswerLimits) -> int | None:
    """Return the id of the end token; None if the server does not give one.

    A string is ignored: it names a stop string or a reason, not a token id.

    Raises:
        AnswerError: The value is neither null, a string nor a token id of the vocabulary.
    """
    for name in ("stop_reason", "matched_stop"):
        value = choice.get(name)
        if _is_int(value, limits.vocab_size):
            return value
        if value is not None and not isinstance(value, str):
            raise _invalid(f"`{name}` is not a token of the tokenizer's vocabulary", value)
    return None
