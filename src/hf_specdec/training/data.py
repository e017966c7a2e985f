"""Read rows of training data from local files or with the package `datasets`, and check their fields."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from hf_specdec.errors import InvalidConfigError, listed, sentence
from hf_specdec.records import existing_path, open_regular, read_lines, read_list, read_records, shortened

logger = logging.getLogger(__name__)
T = TypeVar("T")

TOKEN_ID_LIMIT = 2**31
"""Exclusive upper bound of token ids, which are stored in 32 bits."""

ROWS_AT_ONCE = 256
"""Rows of a parquet file read at a time."""

MAX_SKIPPED_SHARE = 0.01
"""Largest share of a source's rows that is skipped because they cannot be read."""

ROWS_BEFORE_GIVING_UP = 1000
"""Number of rows as whose share errors count at least, until the end of the source: reading stops at the eleventh."""

Row = dict[str, Any]
"""Values of a row by field name."""

Message = dict[str, Any]
"""A message as chat templates take it: `role`, `content` and possibly other fields, such as `tool_calls`."""

ROLES = {
    "system": "system", "developer": "developer", "tool": "tool", "user": "user", "human": "user",
    "assistant": "assistant", "gpt": "assistant", "model": "assistant",
}  # fmt: skip
"""Roles of chat templates by the names in data; ShareGPT has `human` and `gpt`, Gemini and Gemma have `model`."""

NOT_READ = ("functions", "documents", "images", "image", "videos", "audios", "chat_template_kwargs")
"""Fields of a row that belong to its messages and are not supported."""


def read_each(
    source: str | Path, read: Callable[[Row, str], T], *, split: str = "train", limit: int | None = None
) -> list[T]:
    """Return what a function reads from each row of a source; rows that it refuses are skipped and logged.

    Args:
        source, split: See `read_rows`.
        read: Called with a row and its location; raises `InvalidConfigError` for a row that cannot be read.
        limit: Read at most this many rows.

    Raises:
        InvalidConfigError: More than `MAX_SKIPPED_SHARE` of the rows cannot be read, or see `read_rows`.
    """
    found: list[T] = []
    failed: list[str] = []  # errors, each with the location of its row

    def check(rows: int) -> None:
        if len(failed) > MAX_SKIPPED_SHARE * rows:
            raise InvalidConfigError(
                failed[0], f"Up to {MAX_SKIPPED_SHARE:.0%} of the rows are skipped; {len(failed)} cannot be read."
            )

    def skip(error: InvalidConfigError) -> None:
        failed.append(str(error))
        check(max(len(found) + len(failed), ROWS_BEFORE_GIVING_UP))

    for place, row in read_rows(source, split=split, refuse=skip):
        if limit is not None and len(found) == limit:
            break
        try:
            found.append(read(row, place))
        except InvalidConfigError as error:
            skip(error if str(error).startswith(place) else InvalidConfigError(f"{place}: {error}"))
    check(len(found) + len(failed))
    if failed:
        logger.warning("%d of %d rows are skipped: %s", len(failed), len(found) + len(failed), listed(failed))
    return found


def read_rows(
    source: str | Path, *, split: str = "train", refuse: Callable[[InvalidConfigError], None] | None = None
) -> Iterator[tuple[str, Row]]:
    """Yield pairs of a row's location (file and line or row number, for error messages) and the row.

    Args:
        source: A `.jsonl`, `.jsonl.gz`, `.json`, parquet or `.txt` file (one prompt per line), a directory written by
            `distill`, or a name or directory for `datasets.load_dataset`. Empty lines are skipped.
        split: Split to load with `datasets.load_dataset`.
        refuse: Called with the error of a row of a JSON file that is not an object, which is then skipped; None
            raises it.

    Raises:
        InvalidConfigError: The source does not exist, is damaged or has rows that are not objects, or the `datasets`
            package is needed but missing; raised during iteration.
    """
    path = existing_path(source)
    options = {} if refuse is None else {"refuse": refuse}
    if path is not None and path.is_file() and path.suffix == ".txt":
        yield from ((f"{path}, line {number}", {"prompt": line.strip()}) for number, line in read_lines(path))
    elif path is not None and ".jsonl" in path.suffixes and not path.is_dir():
        yield from ((f"{path}, line {number}", row) for number, row in read_records(path, **options))
    elif path is not None and path.suffix == ".json" and not path.is_dir():
        yield from ((f"{path}, {place}", row) for place, row in read_list(path, **options))
    else:
        package = datasets_package(f"Reading {str(source)!r}")
        try:
            yield from _rows_of_dataset(source, path, split, *package)
        except InvalidConfigError:
            raise
        except Exception as error:  # datasets raises many unrelated classes for a missing or unreadable source
            first, *_ = (*str(error).strip().splitlines(), type(error).__name__)
            absent = " is not a file or directory, and it" if path is None else ""
            raise InvalidConfigError(
                f"{str(source)!r}{absent} cannot be read as a dataset: {sentence(first[:300])}",
                "Give a .jsonl, .parquet or .txt file, a directory written by `hf-specdec distill`, or a Hub id.",
            ) from error


def _rows_of_dataset(
    source: str | Path, path: Path | None, split: str, datasets: Any, parquet: Any
) -> Iterator[tuple[str, Row]]:
    files = []
    if path is not None:
        files = sorted(path.glob("data/part-*.parquet")) if path.is_dir() else [path]
    for file in files:  # read directly: datasets would copy them to its cache first
        open_regular(file).close()
        number = 0
        for batch in parquet.ParquetFile(file).iter_batches(batch_size=ROWS_AT_ONCE):
            for row in batch.to_pylist():
                number += 1
                yield f"{file}, row {number}", _without_nulls(row)
    if not files:
        rows = datasets.load_dataset(str(source), split=split)
        yield from ((f"{source}, row {number}", _without_nulls(row)) for number, row in enumerate(rows, start=1))


def _without_nulls(value: Any) -> Any:
    """Remove the null fields of objects: in Arrow every object of a column has the fields of all of them."""
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    if isinstance(value, list) and value and isinstance(value[0], dict | list):
        return [_without_nulls(each) for each in value]
    return value


def datasets_package(why: str) -> tuple[Any, Any]:
    """Import and return the modules `datasets` and `pyarrow.parquet`.

    Args:
        why: Start of the error message, such as "Reading 'data.parquet'".

    Raises:
        InvalidConfigError: One of them cannot be imported.
    """
    try:
        import datasets  # an optional dependency
        from pyarrow import parquet
    except ImportError as error:
        raise InvalidConfigError(
            f"{why} needs the package datasets.", "Run `pip install 'hf-specdec[training]'`."
        ) from error
    return datasets, parquet


def tokens_of(row: Row, name: str, place: str) -> tuple[int, ...]:
    """Return the token ids in a field of a row.

    Raises:
        InvalidConfigError: The field does not hold a list of token ids.
    """
    values = row[name]
    if not isinstance(values, list):
        raise InvalidConfigError(f"{place}: `{name}` must be a list of token ids, got {shortened(values)}.")
    for value in values:
        if type(value) is not int or not 0 <= value < TOKEN_ID_LIMIT:
            raise InvalidConfigError(
                f"{place}: `{name}` must hold token ids, integers from 0 to {TOKEN_ID_LIMIT - 1}, "
                f"got {shortened(value)}."
            )
    return tuple(values)


def mask_of(row: Row, name: str, place: str) -> tuple[bool, ...]:
    """Return the booleans in a field of a row; they may be written as 1 and 0.

    Raises:
        InvalidConfigError: The field does not hold a list of booleans.
    """
    values = row[name]
    if not isinstance(values, list) or any(type(value) not in (int, bool) or value not in (0, 1) for value in values):
        raise InvalidConfigError(f"{place}: `{name}` must be a list of true and false, got {shortened(values)}.")
    return tuple(map(bool, values))


def messages_of(row: Row, place: str) -> list[Message]:
    """Return the messages of a row as chat templates take them; an empty list if it has none.

    They are those in `messages` (`role` and `content`) or ShareGPT's `conversations` (`from` and `value`), after the
    row's `system`, if it has one. All other fields of a message are kept, except empty ones. Content that is null is
    empty text, and arguments of tool calls that are JSON text are parsed: templates expect an object
    (https://huggingface.co/docs/transformers/chat_extras).

    Args:
        row: The row.
        place: Location of the row.

    Raises:
        InvalidConfigError: A message is not an object with a known role and text, or a user or assistant says nothing;
            a call's arguments are not JSON; the row has two system messages or a field of `NOT_READ`; or a text is not
            valid Unicode.
    """
    name = next((name for name in ("messages", "conversations") if row.get(name)), None)
    if name is None:
        return []
    unread = [field for field in NOT_READ if row.get(field)]
    if unread:
        raise InvalidConfigError(f"{place}: `{unread[0]}` beside `{name}` is not supported.", "Leave such rows out.")
    turns = row[name]
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise InvalidConfigError(f"{place}: `{name}` must be a list of objects, got {shortened(turns)}.")
    messages = [_message(turn, f"{place}: `{name}`") for turn in turns]
    system = system_of(row, place)
    if system and messages[0]["role"] == "system":
        raise InvalidConfigError(f"{place} has a `system`, and `{name}` begins with another.", "Keep one of them.")
    messages = [{"role": "system", "content": system}, *messages] if system else messages
    text_of(json.dumps(messages, ensure_ascii=False, default=str), place)
    return messages


def system_of(row: Row, place: str) -> str:
    """Return the system message in the field `system` of a row; empty if there is none.

    Raises:
        InvalidConfigError: It is not a text.
    """
    system = row.get("system") or ""
    if not isinstance(system, str):
        raise InvalidConfigError(f"{place}: `system` must be a text, got {shortened(system)}.")
    return text_of(system, place)


def _message(turn: Row, where: str) -> Message:
    given, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
    role = ROLES.get(given) if isinstance(given, str) else None
    if role is None or not isinstance(content, str | None):
        raise InvalidConfigError(
            f"{where} has a message with the role {shortened(given)} and the content {shortened(content)}.",
            f"Expected one of {', '.join(ROLES)}, and text.",
        )
    rest = {
        name: value
        for name, value in turn.items()
        if name not in ("role", "from", "content", "value") and value not in (None, "", [], {})
    }
    if "tool_calls" in rest:
        rest["tool_calls"] = _tool_calls(rest["tool_calls"], where)
    if role in ("user", "assistant") and not rest and not (content or "").strip():
        raise InvalidConfigError(f"{where} has an empty message of the {role}.", "Leave such rows out.")
    return {"role": role, "content": content or "", **rest}


def _tool_calls(calls: Any, where: str) -> list[Row]:
    parsed = []
    for call in calls if isinstance(calls, list) else [None]:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(call, dict) or not isinstance(function, dict):
            raise InvalidConfigError(f"{where} has `tool_calls` that are not a list of calls: {shortened(calls)}.")
        if isinstance(function.get("arguments"), str):
            function = {**function, "arguments": _parsed(function["arguments"], f"{where} has `arguments`")}
        parsed.append({**call, "function": function} if "function" in call else function)
    return parsed


def tools_of(row: Row, place: str) -> list[Row] | None:
    """Return the tools of a row for the chat template, also if they are JSON text; None if it has none.

    Raises:
        InvalidConfigError: They are not a list of objects.
    """
    tools = row.get("tools")
    if isinstance(tools, str) and tools.strip():
        tools = _parsed(tools, f"{place}: `tools`")
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise InvalidConfigError(f"{place}: `tools` must be a list of objects, got {shortened(tools)}.")
    return tools


def _parsed(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidConfigError(f"{what} that is not JSON: {shortened(text)}.") from error


def rendered(
    tokenizer: Any, messages: Sequence[Message], tools: Sequence[Row] | None = None, *, answer_next: bool
) -> str:
    """Return the text that a chat template makes of messages.

    Args:
        tokenizer: Tokenizer with a chat template.
        messages, tools: As the template takes them.
        answer_next: Whether the text ends where the assistant's answer begins.

    Raises:
        InvalidConfigError: The template rejects the messages.
    """
    try:
        text: str = tokenizer.apply_chat_template(
            list(messages), tools=tools, tokenize=False, add_generation_prompt=answer_next
        )
    except Exception as error:  # templates are third-party programs
        raise InvalidConfigError(f"The chat template rejects these messages: {sentence(str(error)[:300])}") from error
    return text


def text_of(value: str, place: str) -> str:
    """Check that a text is valid Unicode, and return it.

    Raises:
        InvalidConfigError: The text contains lone surrogates, which JSON can express but tokenizers reject.
    """
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidConfigError(f"{place} contains a lone surrogate, which is not text: {error.reason}.") from error
    return value
