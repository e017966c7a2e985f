"""Read training data: conversations, prompts and captured answers from local files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hf_specdec.errors import InvalidConfigError
from hf_specdec.records import open_regular, read_lines, read_list, read_records, shortened

MOST_TOKENS = 2**31
"""Token ids are below it: they are stored in 32 bits."""

ROWS_AT_ONCE = 256
"""Of a parquet file."""

Row = dict[str, Any]


def read_rows(source: str | Path, *, split: str = "train") -> Iterator[tuple[str, Row]]:
    """Rows of a JSON-lines file (`.gz` too), a text file (a prompt per line), a parquet or JSON file, a directory that
    `distill` wrote, or a `datasets` name; each with its place, for errors.

    Raises:
        InvalidConfigError: Nothing of that kind, a damaged file, or the `datasets` package is missing.
    """
    path = existing(source)
    if path is not None and path.is_file() and path.suffix == ".txt":
        yield from ((f"{path}, line {number}", {"prompt": line.strip()}) for number, line in read_lines(path))
    elif path is not None and ".jsonl" in path.suffixes and not path.is_dir():
        yield from ((f"{path}, line {number}", row) for number, row in read_records(path))
    elif path is not None and path.suffix == ".json" and not path.is_dir():
        yield from ((f"{path}, {place}", row) for place, row in read_list(path))
    else:
        package = datasets_package(f"Reading {str(source)!r}")
        try:
            yield from _rows_of_dataset(source, path, split, *package)
        except InvalidConfigError:
            raise
        except Exception as error:  # datasets raises a dozen kinds for one thing: it is not there or not readable
            first, *_ = (*str(error).strip().splitlines(), type(error).__name__)
            raise InvalidConfigError(
                f"{str(source)!r} cannot be read as a dataset: {first:.300}",
                "Give a .jsonl, .parquet or .txt file, a directory written by `hf-specdec distill`, or a Hub id.",
            ) from error


def _rows_of_dataset(
    source: str | Path, path: Path | None, split: str, datasets: Any, parquet: Any
) -> Iterator[tuple[str, Row]]:
    files = []
    if path is not None:
        files = sorted(path.glob("data/part-*.parquet")) if path.is_dir() else [path]
    for file in files:  # datasets would copy them to its cache first
        open_regular(file).close()
        number = 0
        for batch in parquet.ParquetFile(file).iter_batches(batch_size=ROWS_AT_ONCE):
            for row in batch.to_pylist():
                number += 1
                yield f"{file}, row {number}", row
    if not files:
        rows = datasets.load_dataset(str(source), split=split)
        yield from ((f"{source}, row {number}", row) for number, row in enumerate(rows, start=1))


def existing(source: str | Path) -> Path | None:
    """The file or directory of that name; None where there is none."""
    try:
        return Path(source) if Path(source).exists() else None
    except (OSError, ValueError):  # too long, or with a NUL byte
        return None


def datasets_package(why: str) -> tuple[Any, Any]:
    """The packages `datasets` and `pyarrow.parquet`.

    Raises:
        InvalidConfigError: They are missing.
    """
    try:
        import datasets  # an optional dependency
        from pyarrow import parquet
    except ImportError as error:
        raise InvalidConfigError(
            f"{why} needs the package datasets.", "pip install 'hf-specdec[training]'."
        ) from error
    return datasets, parquet


def tokens_of(row: Row, name: str, place: str) -> tuple[int, ...]:
    """A field of token ids.

    Raises:
        InvalidConfigError: It holds something else.
    """
    values = row[name]
    if not isinstance(values, list):
        raise InvalidConfigError(f"{place}: `{name}` must be a list of token ids, got {shortened(values)}.")
    for value in values:
        if type(value) is not int or not 0 <= value < MOST_TOKENS:
            raise InvalidConfigError(
                f"{place}: `{name}` must hold token ids, integers from 0 to {MOST_TOKENS - 1}, got {shortened(value)}."
            )
    return tuple(values)


def mask_of(row: Row, name: str, place: str) -> tuple[bool, ...]:
    """A field of true and false, or 1 and 0.

    Raises:
        InvalidConfigError: It holds something else.
    """
    values = row[name]
    if not isinstance(values, list) or any(type(value) not in (int, bool) or value not in (0, 1) for value in values):
        raise InvalidConfigError(f"{place}: `{name}` must be a list of true and false, got {shortened(values)}.")
    return tuple(map(bool, values))


def turns_of(row: Row, name: str, role: str, content: str, place: str) -> list[tuple[str, str]]:
    """Who says what: a field of objects with a role and a text.

    Args:
        row: The row.
        name: Of the field.
        role, content: Names within its objects.
        place: Of the row.

    Raises:
        InvalidConfigError: It holds something else.
    """
    values = row[name]
    if isinstance(values, list) and all(
        isinstance(turn, dict) and isinstance(turn.get(role), str) and isinstance(turn.get(content), str)
        for turn in values
    ):
        return [(turn[role], text_of(turn[content], place)) for turn in values]
    raise InvalidConfigError(
        f"{place}: `{name}` must be a list of objects with the texts {role} and {content}, got {shortened(values)}."
    )


def text_of(value: str, place: str) -> str:
    """A text that a tokenizer can read.

    Raises:
        InvalidConfigError: It holds halves of characters (lone surrogates), which are no text.
    """
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidConfigError(f"{place} holds half a character, which is not text: {error.reason}.") from error
    return value
