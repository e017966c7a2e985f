"""The command `hf-specdec bench`, which measures decoding methods on a file of questions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from hf_specdec import bench as benchmark
from hf_specdec.atomic import write_text
from hf_specdec.bench.methods import ASSISTED, split_method
from hf_specdec.cli.generation import ASSISTANT_METHOD, dtype_of, head_for
from hf_specdec.cli.options import FORWARDS, Head, Model, NewTokens, Precision, check_writable_file, require_package
from hf_specdec.drafters.draft_model import DraftModelDrafter
from hf_specdec.errors import InvalidConfigError
from hf_specdec.generation.loading import load_model, load_target, load_tokenizer
from hf_specdec.reporting.stats import shown_tau

METHODS_HELP = (
    "Comma-separated names; plain is always measured. Any value of `speculative=`; append +kernels, +inductor or "
    "+none for that value of `compile`. From transformers: transformers_prompt_lookup (prompt_lookup_num_tokens=10), "
    "transformers_assisted (needs --assistant), plain_static_compiled (static cache, forward compiled before "
    "the timing)."
)
ALL_TURNS_HELP = (
    "Answer all turns of a question instead of the first. As in Spec-Bench, each method continues its own answers; "
    "tokens and seconds are summed over the turns."
)

FILE_WIDTH = 120
"""Width of the printed table in characters if stdout is a file or a pipe."""


def bench(
    prompts: Annotated[Path, typer.Option(help="JSON Lines file with question_id, category and turns.")],
    model: Model = None,
    drafter: Head = None,
    assistant: Annotated[
        str | None, typer.Option(help="Path or Hub id of a smaller model with the same tokenizer.")
    ] = None,
    methods: Annotated[str, typer.Option(help=METHODS_HELP)] = "plain,prompt_lookup",
    max_new_tokens: NewTokens = 128,
    all_turns: Annotated[bool, typer.Option("--all-turns", help=ALL_TURNS_HELP)] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Timed repetitions per question.")] = 1,
    limit: Annotated[int | None, typer.Option(min=1, help="Maximum number of questions.")] = None,
    per_category: Annotated[int | None, typer.Option(min=1, help="Maximum number of questions per category.")] = None,
    dtype: Precision = "auto",
    output: Annotated[Path | None, typer.Option("--json", help="Write all measurements to this file.")] = None,
    picture: Annotated[
        Path | None, typer.Option("--plot", help="Write a plot of the speed-ups to this file. Needs matplotlib.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite existing --json and --plot files.")] = False,
) -> None:
    """Measure methods against plain generate(), interleaved per question.

    The table shows medians over the questions of a category: tokens/s of the
    whole call, tokens/s after the first token (decode), the speed-up over plain
    with its 20th and 80th percentile, and seconds to the first token. Tau is a mean.
    """
    check_writable_file(output, "--json", force=force)
    _check_picture(picture, force)
    names = [name.strip() for name in methods.split(",") if name.strip()]
    benchmark.check_methods(names, assistant=assistant is not None)
    questions = benchmark.read_questions(prompts, limit=limit, per_category=per_category)
    own_methods = [split_method(name)[0] for name in names if name not in benchmark.PEERS]
    head = head_for(own_methods, model, drafter, assistant=assistant is not None)
    if assistant is not None:
        _check_assistant(assistant, model, names)
    lm, tokenizer = load_model(model, head, dtype)
    settings = {} if assistant is None else _with_assistant(lm, assistant, dtype)
    rows: list[benchmark.Measurement] = []
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("prompts", total=len(questions) * len({"plain", *names}))
        for row in benchmark.measure(
            lm, tokenizer, questions, names, max_new_tokens=max_new_tokens, rounds=rounds, settings=settings,
            all_turns=all_turns,
        ):  # fmt: skip
            rows.append(row)
            progress.advance(task)
    summary = benchmark.summarise(rows)
    _show(summary, rows, dtype_of(lm))
    if output is not None:
        document = {"environment": benchmark.environment(lm), "summary": summary,
                    "measurements": [asdict(row) for row in rows]}  # fmt: skip
        write_text(output, json.dumps(document, indent=1))
    if picture is not None:
        benchmark.plot(summary, picture)


PICTURE_FORMATS = (".png", ".svg", ".pdf")


def _check_picture(path: Path | None, force: bool) -> None:
    """Check that the plot can be drawn and written to `path`; None means that no plot is wanted.

    Raises:
        InvalidConfigError: matplotlib is not installed; or the file has an unknown suffix, cannot be written, or
            exists and `force` is false.
    """
    if path is None:
        return
    require_package("matplotlib", "--plot", "bench")
    check_writable_file(path, "--plot", force=force)
    if path.suffix not in PICTURE_FORMATS:
        raise InvalidConfigError(f"--plot {path} has an unknown suffix.", f"Use one of {', '.join(PICTURE_FORMATS)}.")


def _check_assistant(assistant: str, model: str | None, methods: Sequence[str]) -> None:
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


def _with_assistant(model: Any, assistant: str, dtype: str) -> dict[str, Any]:
    """Load the assistant model, add it to the target as a drafter, and return the `settings` of `measure`."""
    loaded, _ = load_target(assistant, dtype)
    loaded = loaded.to(model.device)
    model.add_drafter(DraftModelDrafter(loaded))
    return {ASSISTED: loaded}


def _show(summary: Sequence[dict[str, Any]], rows: Sequence[benchmark.Measurement], dtype: str) -> None:
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
    for sentence in _forwards_used(rows):
        typer.echo(sentence)
    warm_up = {row.method: row.warm_up_seconds for row in rows}
    typer.echo("warm-up, s: " + ", ".join(f"{name} {took:.1f}" for name, took in warm_up.items()), err=True)
    for warning in benchmark.warnings_of(rows):
        typer.echo(f"warning: {warning}", err=True)


def _forwards_used(rows: Sequence[benchmark.Measurement]) -> list[str]:
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
