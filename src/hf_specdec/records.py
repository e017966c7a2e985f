"""Read untrusted text files: JSON objects and lists, JSON lines and plain lines.

Pipes and devices are refused, and the size of everything that is held in memory is limited.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import stat
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from hf_specdec.errors import InvalidConfigError, SpeculativeDecodingError

MAX_OBJECT_BYTES = 4 * 2**20
"""Maximum size of a JSON object in bytes; configurations are far smaller."""

MAX_LINE_BYTES = 16 * 2**20
"""Maximum length of a line in bytes, twice that of a conversation of a million tokens in JSON."""

MAX_LIST_BYTES = 32 * 2**20
"""Maximum size in bytes of a file with one JSON list, which needs about twenty times as much memory when parsed."""

MAX_EXPANSION = 200
"""Maximum ratio of decompressed to compressed size; text reaches 3 to 10, identical rows about 100."""

DATA_SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".parquet", ".txt")
"""Ends of the names of files that hold rows of data."""

MAX_EMPTY_LINES = 10_000
"""Maximum number of consecutive empty lines."""

QUESTION_ROW = '{"question_id": 1, "category": "qa", "turns": ["Why is the sky blue?"]}'
"""A line of a file of questions, as help and errors show it."""

Fields = dict[str, Any]
ErrorClass = type[SpeculativeDecodingError]


def checked_path(value: Any, error: ErrorClass = InvalidConfigError) -> Path:
    """Return the name of a file or directory, which need not exist, as a path; refuse values that cannot be one."""
    try:
        path = Path(value)
        path.exists()
    except (TypeError, OSError, ValueError) as failure:
        raise error(f"{shortened(value)} is not a file or directory: {_reason(failure)}.", "Give a path.") from failure
    return path


def existing_path(
    source: str | Path, what: str = "", hint: str = "", error: ErrorClass = InvalidConfigError
) -> Path | None:
    """Return the path that a name of data, a head or a model refers to; None if it may be a name on the Hub.

    Refuses, with `error` and `hint`, a name at which nothing exists and which cannot be one on the Hub: a path in
    another directory, or a file of data by its suffix. The message begins with `what`, such as "The head".
    """
    path = checked_path(source, error)
    if path.exists():
        return path
    text = str(source)
    if path.is_absolute() or text.startswith((".", "~")) or text.count("/") > 1 or text.endswith(DATA_SUFFIXES):
        missing = (
            f"{what} {text!r} cannot be loaded: there is no such directory." if what else f"{text!r} does not exist."
        )
        raise error(missing, hint)
    return None


def open_regular(path: Path, error: ErrorClass = InvalidConfigError) -> IO[bytes]:
    """Open a file for reading, refusing pipes, which may block, and devices, which may be endless, with `error`."""
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except (OSError, ValueError) as failure:  # ValueError: a NUL byte in the name
        raise error(f"{str(path)!r} cannot be read: {_reason(failure)}.") from failure
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise error(f"{path} is not a regular file.", "Give a file.")
    return os.fdopen(descriptor, "rb")


def read_json(path: Path, max_bytes: int = MAX_OBJECT_BYTES, error: ErrorClass = InvalidConfigError) -> Fields:
    """Read a file with one JSON object of finite numbers and at most `max_bytes` bytes; else raise `error`."""
    try:
        with open_regular(path, error) as file:
            text = file.read(max_bytes + 1)
        if len(text) > max_bytes:
            raise error(f"{path} is larger than {max_bytes} bytes, the limit for this file.")
        fields: Any = json.loads(text, parse_constant=_finite, parse_float=_finite)
    except (OSError, ValueError, RecursionError) as failure:
        if isinstance(failure, SpeculativeDecodingError):
            raise
        raise error(f"{path} cannot be read: {_reason(failure)}.", "Expected a JSON object.") from failure
    if not isinstance(fields, dict):
        raise error(f"{path} holds a {type(fields).__name__}, not a JSON object.")
    return fields


def _refuse(error: InvalidConfigError) -> None:
    raise error


def record_of(line: str | bytes, place: str) -> Fields:
    """Return the JSON object in a line; the error for any other line names `place`."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as failure:
        is_text = isinstance(failure, json.JSONDecodeError) and not failure.pos
        reason = f"it begins with {shortened(line.strip()[:40])}" if is_text else _reason(failure)
        raise InvalidConfigError(f"{place} is not JSON: {reason}.") from failure
    if not isinstance(row, dict):
        raise InvalidConfigError(f"{place} holds a {type(row).__name__}, not a JSON object.")
    return row


def read_records(path: Path, refuse: Callable[[InvalidConfigError], None] = _refuse) -> Iterator[tuple[int, Fields]]:
    """Yield the line number, counted from 1, and the object of each non-empty line of a `.jsonl` or `.jsonl.gz` file.

    `refuse` is called with the error of a line that is not a JSON object; if it returns, the line is skipped.
    """
    for number, line in read_lines(path):
        try:
            row = record_of(line, f"{path}, line {number}")
        except InvalidConfigError as error:
            refuse(error)
        else:
            yield number, row


def read_list(path: Path, refuse: Callable[[InvalidConfigError], None] = _refuse) -> Iterator[tuple[str, Fields]]:
    """Yield location ("row 1" or "line 1") and value of each object in a file with a JSON list or one object per line.

    `refuse` is called with the error of a row that is not a JSON object; if it returns, the row is skipped.
    """
    with open_regular(path) as file:
        is_list = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["
        file.seek(0)
        text = file.read(MAX_LIST_BYTES + 1) if is_list else b""
    if not is_list:
        yield from ((f"line {number}", row) for number, row in read_records(path, refuse))
        return
    if len(text) > MAX_LIST_BYTES:
        raise InvalidConfigError(
            f"{path} is larger than {MAX_LIST_BYTES} bytes, the limit for a JSON list.",
            "Write one object per line (.jsonl).",
        )
    try:
        rows = json.loads(text.decode("utf-8-sig"))
    except (ValueError, RecursionError) as failure:
        raise InvalidConfigError(f"{path} is not JSON: {_reason(failure)}.") from failure
    for number, row in enumerate(rows, start=1):
        if isinstance(row, dict):
            yield f"row {number}", row
        else:
            refuse(InvalidConfigError(f"{path}, row {number} is a {type(row).__name__}, not a JSON object."))


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line number, counted from 1, and the text of each non-empty line of a UTF-8 file (or `.gz`)."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        max_size = max(16 * 2**20, MAX_EXPANSION * size)
        lines: Any = gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file
        number = last_text = 0
        while True:
            number += 1
            place = f"{path}, line {number}"
            try:
                line: bytes = lines.readline(MAX_LINE_BYTES + 1)
                if not line:
                    return
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as failure:
                raise InvalidConfigError(
                    f"{place} is not UTF-8 text: {failure.reason} at byte {failure.start + 1} of the line.",
                    "Save the file as UTF-8, for example with `iconv -f UTF-16 -t UTF-8`.",
                ) from failure
            except (OSError, EOFError, zlib.error) as failure:
                raise InvalidConfigError(f"{place} cannot be read: {_reason(failure)}.") from failure
            if len(line) > MAX_LINE_BYTES:
                raise InvalidConfigError(f"{place} is longer than {MAX_LINE_BYTES} bytes, the limit for a line.")
            if lines is not file and lines.tell() > max_size:
                raise InvalidConfigError(
                    f"{path} decompresses to more than {MAX_EXPANSION} times its size, which is unusual for text.",
                    "Decompress it yourself if you trust it.",
                )
            if "\0" in text:
                raise InvalidConfigError(f"{place} has a NUL byte: it is not text.", "Save the file as UTF-8.")
            if text.strip():
                last_text = number
                yield number, text
            elif number - last_text > MAX_EMPTY_LINES:
                raise InvalidConfigError(f"{place} and the {MAX_EMPTY_LINES} lines before it are empty.")


def read_lines_backwards(path: Path, file: IO[bytes], start: int) -> Iterator[bytes]:
    """Yield the lines of an open file from its last one back to the one at `start`, reading no more than needed."""
    position, rest = file.seek(0, os.SEEK_END), b""
    while position > start:
        size = min(2**20, position - start)
        position = file.seek(position - size)
        rest, *lines = (file.read(size) + rest).split(b"\n")
        yield from reversed(lines)
        if len(rest) > MAX_LINE_BYTES:
            raise InvalidConfigError(f"{path} has a line of more than {MAX_LINE_BYTES} bytes.")
    yield rest


def shortened(value: Any) -> str:
    """Return at most 80 characters of a value's repr (of a list: its first 4 entries), for error messages."""
    if isinstance(value, list):
        value = value[:4]
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested too deeply, or an integer of thousands of digits
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:80]}..."


def _reason(failure: Exception) -> str:
    """Return the reason of a failure, without the number and the path that an `OSError` adds."""
    if isinstance(failure, RecursionError):
        return "it is nested too deeply"
    return (isinstance(failure, OSError) and failure.strerror) or str(failure)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:40]} is not a finite number")
    return number
