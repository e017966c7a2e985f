"""Steps of `hf-specdec bench` that need the models or the measurements: the assistant, the printed table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from hf_specdec import bench as benchmark
from hf_specdec.bench.methods import ASSISTED
from hf_specdec.cli.answers import ASSISTANT_METHOD
from hf_specdec.cli.options import FORWARDS
from hf_specdec.drafters.draft_model import DraftModelDrafter
from hf_specdec.errors import InvalidConfigError
from hf_specdec.generation.loading import load_target, load_tokenizer
from hf_specdec.reporting.stats import shown_tau

FILE_WIDTH = 120
"""Width of the printed table in characters if stdout is a file or a pipe."""


def check_assistant(assistant: str, model: str | None, methods: Sequence[str]) -> None:
    """Check, before any weights are loaded, that a method uses the assistant model and that it fits the target.

    Raises:
        InvalidConfigError: No method uses the assistant, or its vocabulary differs from the target's.
        CheckpointFormatError: The assistant or the target does not exist, or has no tokenizer.
    """
    users = {ASSISTED, ASSISTANT_METHOD}
    if not users & set(methods):
        raise InvalidConfigError(
            f"No method uses the assistant {assistant!r}.", f"Add one of {', '.join(sorted(users))} to --methods."
        )
    if load_tokenizer(assistant).get_vocab() != load_tokenizer(model).get_vocab():
        raise InvalidConfigError(
            f"The vocabulary of the assistant {assistant!r} differs from the model's.",
            "Give an assistant with the same tokenizer.",
        )


def with_assistant(model: Any, assistant: str, dtype: str) -> dict[str, Any]:
    """Load the assistant model, add it to the target as a drafter, and return the `settings` of `measure`."""
    loaded, _ = load_target(assistant, dtype)
    loaded = loaded.to(model.device)
    model.add_drafter(DraftModelDrafter(loaded))
    return {ASSISTED: loaded}


def measured(
    model: Any, tokenizer: Any, questions: Sequence[benchmark.Question], methods: Sequence[str], **options: Any
) -> list[benchmark.Measurement]:
    """Measure methods, with a progress bar on stderr; `options` are those of `hf_specdec.bench.measure`."""
    rows = []
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("prompts", total=len(questions) * len({"plain", *methods}))
        for row in benchmark.measure(model, tokenizer, questions, methods, **options):
            rows.append(row)
            progress.advance(task)
    return rows


def show(summary: Sequence[dict[str, Any]], rows: Sequence[benchmark.Measurement], dtype: str) -> None:
    """Print the summary as a table on stdout, and warm-up times and warnings on stderr."""
    table = Table(title=f"weights in {dtype}")
    for name in ("category", "method", "tokens/s", "decode", "x plain", "p20-p80", "first, s", "tau", "equal"):
        table.add_column(name, overflow="fold")
    for line in summary:
        table.add_row(
            line["category"], line["method"], f"{line['tokens_per_second']:.1f}",
            _shown(line["decode_tokens_per_second"], 1), f"{line['speed_up']:.2f}",
            f"{line['speed_up_p20']:.2f}-{line['speed_up_p80']:.2f}", _shown(line["time_to_first_token"], 3),
            shown_tau(line["tau"]), f"{line['ids_equal']}/{line['questions']}",
        )  # fmt: skip
    console = Console()
    (console if console.is_terminal else Console(width=FILE_WIDTH)).print(table)
    for sentence in (*forwards_used(rows), *equality_note(summary, dtype)):
        typer.echo(sentence)
    warm_up = {row.method: row.warm_up_seconds for row in rows}
    typer.echo("warm-up, s: " + ", ".join(f"{name} {took:.1f}" for name, took in warm_up.items()), err=True)
    for warning in benchmark.warnings_of(rows):
        typer.echo(f"warning: {warning}", err=True)


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
