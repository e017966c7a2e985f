"""Read rows of training data from local files or with the package `datasets`, and check their fields."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hf_specdec.errors import InvalidConfigError, sentence
from hf_specdec.records import existing_path, open_regular, read_lines, read_list, read_records, shortened

TOKEN_ID_LIMIT = 2**31
"""Exclusive upper bound of token ids, which are stored in 32 bits."""

ROWS_AT_ONCE = 256
"""Rows of a parquet file read at a time."""

Row = dict[str, Any]
"""Values of a row by field name."""


def read_rows(source: str | Path, *, split: str = "train") -> Iterator[tuple[str, Row]]:
    """Yield pairs of a row's location (file and line or row number, for error messages) and the row.

    Args:
        source: A `.jsonl`, `.jsonl.gz`, `.json`, parquet or `.txt` file (one prompt per line), a directory written by
            `distill`, or a name or directory for `datasets.load_dataset`. Empty lines are skipped.
        split: Split to load with `datasets.load_dataset`.

    Raises:
        InvalidConfigError: The source does not exist, is damaged or has rows that are not objects, or the `datasets`
            package is needed but missing; raised during iteration.
    """
    path = existing_path(source)
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
                yield f"{file}, row {number}", row
    if not files:
        rows = datasets.load_dataset(str(source), split=split)
        yield from ((f"{source}, row {number}", row) for number, row in enumerate(rows, start=1))


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


def turns_of(row: Row, name: str, role: str, content: str, place: str) -> list[tuple[str, str]]:
    """Return the (role, text) pairs of a field that holds the turns of a conversation.

    Args:
        row: The row.
        name: Name of the field, a list of objects.
        role, content: Keys of the role and the text in these objects.
        place: Location of the row.

    Raises:
        InvalidConfigError: The field does not hold such objects, or a text is not valid Unicode.
    """
    values = row[name]
    if isinstance(values, list) and all(
        isinstance(turn, dict) and isinstance(turn.get(role), str) and isinstance(turn.get(content), str)
        for turn in values
    ):
        return [(turn[role], text_of(turn[content], place)) for turn in values]
    raise InvalidConfigError(
        f"{place}: `{name}` must be a list of objects with the strings {role} and {content}, got {shortened(values)}."
    )


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
