"""Text files of strangers, read without trusting them: JSON objects, and records line by line.

Nothing here waits for a pipe, reads from a device, or holds more than one line at a time.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from hf_specdec.errors import InvalidConfigError, SpeculativeDecodingError

MAX_OBJECT_BYTES = 4 * 2**20
"""A configuration is a page of text."""

MAX_LINE_BYTES = 16 * 2**20
"""A conversation of a million tokens, in JSON, takes about half of that."""

MAX_LIST_BYTES = 32 * 2**20
"""Of a file that is one list; it is held as a whole, which takes twenty times as much."""

MAX_EXPANSION = 200
"""Bytes per compressed byte; text compresses by 3 to 10, and a hundredfold where every row is the same."""

SMALL_BYTES = 16 * 2**20
"""A compressed file may expand to this size whatever its own is."""

MAX_EMPTY_LINES = 10_000
"""In a row."""

Fields = dict[str, Any]
Refusal = type[SpeculativeDecodingError]


def open_regular(path: Path, error: Refusal = InvalidConfigError) -> IO[bytes]:
    """Open a regular file for reading: a pipe would block, a device never ends.

    Args:
        path: The file.
        error: What to raise.

    Raises:
        SpeculativeDecodingError: Of the class `error`; it cannot be opened, or is not a regular file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except (OSError, ValueError) as failure:  # ValueError: a NUL byte in the name
        raise error(f"{str(path)!r} cannot be read: {failure}.") from failure
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise error(f"{path} is not a regular file.", "Expected a file of data.")
    return os.fdopen(descriptor, "rb")


def read_object(path: Path, max_bytes: int = MAX_OBJECT_BYTES, error: Refusal = InvalidConfigError) -> Fields:
    """Read a file that holds one JSON object.

    Args:
        path: The file.
        max_bytes: The most that is read.
        error: What to raise.

    Raises:
        SpeculativeDecodingError: Of the class `error`; no such file, too long, not JSON, or not an object.
    """
    try:
        with open_regular(path, error) as file:
            text = file.read(max_bytes + 1)
        if len(text) > max_bytes:
            raise error(f"{path} has more than {max_bytes} bytes, which is the most that is read.")
        fields: Any = json.loads(text, parse_constant=_finite, parse_float=_finite)
    except (OSError, ValueError, RecursionError) as failure:
        if isinstance(failure, SpeculativeDecodingError):
            raise
        raise error(f"{path} cannot be read: {failure}.", "Expected a JSON object.") from failure
    if not isinstance(fields, dict):
        raise error(f"{path} holds a {type(fields).__name__}, expected a JSON object.")
    return fields


def read_records(path: Path) -> Iterator[tuple[int, Fields]]:
    """Read a JSON-lines file, `.gz` or not: the number of each line, from 1, and its object; empty lines are skipped.

    Raises:
        InvalidConfigError: A line that is not a JSON object, with its number; or see `read_lines`.
    """
    for number, line in read_lines(path):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as failure:
            reason = "it is nested too deeply" if isinstance(failure, RecursionError) else str(failure)
            raise InvalidConfigError(f"{path}, line {number} is not JSON: {reason}.") from failure
        if not isinstance(row, dict):
            raise InvalidConfigError(f"{path}, line {number} holds a {type(row).__name__}, expected a JSON object.")
        yield number, row


def read_list(path: Path) -> Iterator[tuple[str, Fields]]:
    """Read a JSON file that holds a list of objects, or an object per line: the place of each, and the object.

    Raises:
        InvalidConfigError: It holds something else, or more than `MAX_LIST_BYTES`.
    """
    with open_regular(path) as file:
        is_list = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["
        file.seek(0)
        text = file.read(MAX_LIST_BYTES + 1) if is_list else b""
    if not is_list:
        yield from ((f"line {number}", row) for number, row in read_records(path))
        return
    if len(text) > MAX_LIST_BYTES:
        raise InvalidConfigError(
            f"{path} has more than {MAX_LIST_BYTES} bytes, the most for one list.", "Write an object per line: .jsonl."
        )
    try:
        rows = json.loads(text.decode("utf-8-sig"))
    except (ValueError, RecursionError) as failure:
        reason = "it is nested too deeply" if isinstance(failure, RecursionError) else str(failure)
        raise InvalidConfigError(f"{path} is not JSON: {reason}.") from failure
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise InvalidConfigError(f"{path}, row {number} is a {type(row).__name__}, expected a JSON object.")
        yield f"row {number}", row


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Read a UTF-8 text file, `.gz` or not: the number of each line, from 1, and its text; empty lines are skipped.

    Raises:
        InvalidConfigError: Not a regular file, not gzip, not UTF-8 text, a line beyond `MAX_LINE_BYTES`, a small file
            that expands to an enormous one, or one of empty lines.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        most = max(SMALL_BYTES, MAX_EXPANSION * size)
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
                    "Save the file as UTF-8: iconv -f UTF-16 -t UTF-8, say.",
                ) from failure
            except (OSError, EOFError, zlib.error) as failure:
                raise InvalidConfigError(f"{place} cannot be read: {failure}.") from failure
            if len(line) > MAX_LINE_BYTES:
                raise InvalidConfigError(f"{place} has more than {MAX_LINE_BYTES} bytes, which is the most.")
            if lines is not file and lines.tell() > most:
                raise InvalidConfigError(
                    f"{path} expands to more than {MAX_EXPANSION} times its size, which no text does.",
                    "Unpack it yourself if you trust it.",
                )
            if "\0" in text:
                raise InvalidConfigError(f"{place} holds a NUL byte, which is not text.", "Save the file as UTF-8.")
            if text.strip():
                last_text = number
                yield number, text
            elif number - last_text > MAX_EMPTY_LINES:
                raise InvalidConfigError(f"{place} and {MAX_EMPTY_LINES} lines before it are empty.")


def shortened(value: Any) -> str:
    """The beginning of a value, for an error."""
    if isinstance(value, list):
        value = value[:4]
    try:
        told = repr(value)
    except (RecursionError, ValueError):  # nested too deeply, or an integer of thousands of digits
        told = f"a {type(value).__name__}"
    return told if len(told) <= 80 else f"{told[:80]}..."


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:40]} is not a finite number")
    return number
