"""Steps of `hf-specdec bench` that need the models or the measurements: the assistant, the printed table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from hf_specdec import bench as benchmark
from hf_specdec.bench.methods import ASSISTED, SHOWN_SUFFIXES, split_method
from hf_specdec.cli.inputs import ASSISTANT_METHOD
from hf_specdec.cli.options import FORWARDS
from hf_specdec.cli.status import say
from hf_specdec.drafters.draft_model import DraftModelDrafter
from hf_specdec.errors import InvalidConfigError
from hf_specdec.generation.loading import load_target, load_tokenizer
from hf_specdec.reporting.stats import shown_tau
from hf_specdec.validation import nearest

MAX_WIDTH = 10_000
"""Columns in which every table fits."""

FILE_WIDTH = 120
"""Width of the printed table in characters if stdout is a file or a pipe."""


def read_methods(text: str) -> list[str]:
    """Return the names in the value of `--methods`.

    Raises:
        InvalidConfigError: A suffix is unknown, or added to a method of transformers.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        base, mode = split_method(name)
        if base in benchmark.PEERS and mode is not None:
            raise InvalidConfigError(
                f"{name}: {base} is a method of transformers, which `compile` does not change.", f"Give {base}."
            )
        if mode is None and "+" in name:
            given = name[name.index("+") :]
            near = nearest(given, SHOWN_SUFFIXES)
            meant = "" if near is None else f"Did you mean {near}? "
            raise InvalidConfigError(
                f"{name} has the unknown suffix {given}.", f"{meant}Suffixes: {', '.join(SHOWN_SUFFIXES)}."
            )
    return names


def check_assistant(assistant: str, model: str | None, names: Sequence[str]) -> None:
    """Check, before any weights are loaded, that a method uses the assistant model and that it fits the target.

    Raises:
        InvalidConfigError: No method uses the assistant, or its vocabulary differs from the target's and transformers
            is to draft with it.
        CheckpointFormatError: The assistant or the target does not exist, or has no tokenizer.
    """
    users = {ASSISTED, ASSISTANT_METHOD}
    if not users & set(names):
        raise InvalidConfigError(
            f"No method uses the assistant {assistant!r}.", f"Add one of {', '.join(sorted(users))} to --methods."
        )
    same = load_tokenizer(assistant).get_vocab() == load_tokenizer(model).get_vocab()
    if ASSISTED in names and not same:
        raise InvalidConfigError(
            f"The vocabulary of the assistant {assistant!r} differs from the model's, and {ASSISTED!r} is measured "
            "with the same vocabulary only.",
            f"Give {ASSISTANT_METHOD!r} alone, or an assistant with the same tokenizer.",
        )


def with_assistant(model: Any, tokenizer: Any, assistant: str, dtype: str) -> dict[str, Any]:
    """Load the assistant model, add it to the target as a drafter, and return the `settings` of `measure`.

    Raises:
        DrafterMismatchError: The two vocabularies share too little to draft.
    """
    loaded, own = load_target(assistant, dtype)
    loaded = loaded.to(model.device)
    same = own.get_vocab() == tokenizer.get_vocab()
    tokenizers = {} if same else {"tokenizer": tokenizer, "assistant_tokenizer": own}
    model.add_drafter(DraftModelDrafter(loaded, **tokenizers))
    return {ASSISTED: loaded}


def measured(
    model: Any, tokenizer: Any, questions: Sequence[benchmark.Question], names: Sequence[str], **options: Any
) -> list[benchmark.Measurement]:
    """Measure methods, with a progress bar on stderr; `options` are those of `hf_specdec.bench.measure`."""
    rows = []
    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("answers", total=len(questions) * len({"plain", *names}))
        for row in benchmark.measure(model, tokenizer, questions, names, **options):
            rows.append(row)
            progress.advance(task)
    return rows


def show(
    summary: Sequence[dict[str, Any]], rows: Sequence[benchmark.Measurement], dtype: str, head: str | None
) -> None:  # fmt: skip
    """Print the summary as a table on stdout, with the head's path or id if any; warm-up and warnings on stderr."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=FILE_WIDTH)
    console.print(table_of(summary, f"weights in {dtype}", console))
    if head is not None:
        say(f"head: {head}")
    for sentence in (*forwards_used(rows), *equality_note(summary, dtype)):
        say(sentence)
    warm_up = {row.method: row.warm_up_seconds for row in rows}
    say("warm-up, s: " + ", ".join(f"{name} {took:.1f}" for name, took in warm_up.items()), err=True)
    for warning in benchmark.warnings_of(rows):
        say(f"warning: {warning}", err=True)


COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "category": lambda line: line["category"],
    "method": lambda line: line["method"],
    "tokens/s": lambda line: f"{line['tokens_per_second']:.1f}",
    "decode": lambda line: _shown(line["decode_tokens_per_second"], 1),
    "x plain": lambda line: f"{line['speed_up']:.2f}",
    "p20-p80": lambda line: f"{line['speed_up_p20']:.2f}-{line['speed_up_p80']:.2f}",
    "first, s": lambda line: _shown(line["time_to_first_token"], 3),
    "tau": lambda line: shown_tau(line["tau"]),
    "equal": lambda line: f"{line['ids_equal']}/{line['questions']}",
}
"""Columns of the table, and what they show of a line of the summary."""

LEAST_NEEDED = ("decode", "first, s", "p20-p80", "equal")
"""Columns that are left out, in this order, if the terminal is too narrow for all."""


def table_of(summary: Sequence[dict[str, Any]], title: str, console: Console) -> Table:
    """Return the summary as a table in which no word or number is cut, if the console has enough columns.

    A narrow one has no borders, and a heading per category instead of a column; the last resort is to leave out the
    columns that are `LEAST_NEEDED`.
    """
    names = list(COLUMNS)
    table = _bordered(summary, names, title)
    left = list(LEAST_NEEDED)
    unlimited = console.options.update(width=MAX_WIDTH)
    while console.measure(table, options=unlimited).maximum > console.width:
        if "category" in names:
            names.remove("category")
        elif left:
            names.remove(left.pop(0))
        else:
            break
        table = _plain(summary, names, title)
    return table


def _bordered(summary: Sequence[dict[str, Any]], names: Sequence[str], title: str) -> Table:
    table = Table(title=title)
    _add_columns(table, names)
    for line in summary:
        table.add_row(*(COLUMNS[name](line) for name in names))
    return table


def _plain(summary: Sequence[dict[str, Any]], names: Sequence[str], title: str) -> Table:
    table = Table(title=title, box=None, padding=(0, 1, 0, 0), pad_edge=False)
    _add_columns(table, names)
    category = None
    for line in summary:
        if line["category"] != category:
            category = line["category"]
            table.add_row(Text(f"{category}:", style="bold"))
        table.add_row(*(COLUMNS[name](line) for name in names))
    return table


def _add_columns(table: Table, names: Sequence[str]) -> None:
    for name in names:
        table.add_column(name, no_wrap=True, justify="left" if name in ("category", "method") else "right")


def equality_note(summary: Sequence[dict[str, Any]], dtype: str) -> list[str]:
    """Return a sentence on token ids that differ from plain decoding in half precision; none if all are equal."""
    if dtype == "float32" or all(line["ids_equal"] == line["questions"] for line in summary):
        return []
    return [
        f"With weights in {dtype}, token ids may differ from plain decoding after a near-tie between two tokens. "
        "--dtype float32 compares exactly."
    ]


def forwards_used(rows: Sequence[benchmark.Measurement]) -> list[str]:
    """Return a sentence for each kind of compiled or captured forwards, which names the methods that used it."""
    kinds = {kind: list(dict.fromkeys(row.method for row in rows if row.forwards == kind)) for kind in FORWARDS}
    return [
        f"With {FORWARDS[kind]}: {', '.join(names)}. Their speed-ups include what these forwards gain; plain runs "
        "eagerly. Append +none to a method to measure drafting alone."
        for kind, names in kinds.items()
        if names
    ]


def _shown(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
