"""The command that measures: `hf-specdec bench`."""

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
from hf_specdec.bench.methods import ASSISTED, COMPILE
from hf_specdec.cli.generation import ASSISTANT_METHOD, dtype_of, head_for
from hf_specdec.cli.options import Head, Model, NewTokens, Precision, need_package, writable_file
from hf_specdec.drafters.draft_model import DraftModelDrafter
from hf_specdec.errors import InvalidConfigError
from hf_specdec.generation.loading import load_model, load_target, load_tokenizer
from hf_specdec.reporting.stats import shown_tau

METHODS_HELP = (
    "Comma-separated; plain is always measured. What `speculative=` takes, compiled as NAME+compile, and of "
    "transformers' own: "
    "transformers_prompt_lookup (prompt_lookup_num_tokens=10), transformers_assisted (needs --assistant), "
    "plain_static_compiled (static cache, compiled forward; what is compiled before the timing is told apart)."
)
ALL_TURNS_HELP = (
    "Ask every turn of a question, not the first alone. As in Spec-Bench's own harness, each method goes on with its "
    "own answers, and tokens and seconds are summed over a question's turns."
)

FILE_WIDTH = 120
"""Columns of what is printed into a file or a pipe."""


def bench(
    prompts: Annotated[Path, typer.Option(help="JSON lines: question_id, category, turns.")],
    model: Model = None,
    drafter: Head = None,
    assistant: Annotated[
        str | None, typer.Option(help="Path or Hub id of a smaller model with the same tokenizer.")
    ] = None,
    methods: Annotated[str, typer.Option(help=METHODS_HELP)] = "plain,prompt_lookup",
    max_new_tokens: NewTokens = 128,
    all_turns: Annotated[bool, typer.Option("--all-turns", help=ALL_TURNS_HELP)] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Timed repetitions.")] = 1,
    limit: Annotated[int | None, typer.Option(min=1, help="Questions at most.")] = None,
    per_category: Annotated[int | None, typer.Option(min=1, help="Questions of each category at most.")] = None,
    dtype: Precision = "auto",
    output: Annotated[Path | None, typer.Option("--json", help="Write every measurement to this file.")] = None,
    picture: Annotated[
        Path | None, typer.Option("--plot", help="Draw the ratio to plain per category and method. Needs matplotlib.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Put the plot in the place of another file.")] = False,
) -> None:
    """Measure methods against plain generate(), interleaved per prompt.

    Shown are medians over a category's questions: tokens/s of the whole call and, behind the first token, of decoding;
    the ratio to plain's with its 20th and 80th percentile; seconds to the first token; the mean of tau.
    """
    writable_file(output, "--json")
    _check_picture(picture, force)
    names = [name.strip() for name in methods.split(",") if name.strip()]
    benchmark.check_methods(names, assistant=assistant is not None)
    questions = benchmark.read_questions(prompts, limit=limit, per_category=per_category)
    ours = [name.removesuffix(COMPILE) for name in names if name not in benchmark.PEERS]
    head = head_for(ours, model, drafter, assistant=assistant is not None)
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
    """See that the plot can be drawn, and where it is wanted.

    Raises:
        InvalidConfigError: matplotlib is not installed, or the file cannot be written, is there, or is of no kind that
            is drawn.
    """
    if path is None:
        return
    need_package("matplotlib", "--plot", "bench")
    writable_file(path, "--plot")
    if path.suffix not in PICTURE_FORMATS:
        raise InvalidConfigError(
            f"--plot {path} has no ending of a picture.", f"Let it end in one of {', '.join(PICTURE_FORMATS)}."
        )
    if path.exists() and not force:
        raise InvalidConfigError(f"--plot {path} is there already.", "Give another name, or --force.")


def _check_assistant(assistant: str, model: str | None, methods: Sequence[str]) -> None:
    """See that an assistant is of use, and reads the same tokens, before any weights are loaded.

    Raises:
        InvalidConfigError: No method drafts with it, or its tokenizer has another vocabulary.
        CheckpointFormatError: There is no such model, or it has no tokenizer.
    """
    users = {ASSISTED, ASSISTANT_METHOD}
    if not users & set(methods):
        raise InvalidConfigError(
            f"No method drafts with the assistant {assistant!r}.", f"Name one of {', '.join(sorted(users))}."
        )
    if load_tokenizer(assistant).get_vocab() != load_tokenizer(model).get_vocab():
        raise InvalidConfigError(
            f"The tokenizer of the assistant {assistant!r} has another vocabulary than the model's.",
            "Give a model with the same tokenizer.",
        )


def _with_assistant(model: Any, assistant: str, dtype: str) -> dict[str, Any]:
    """Load the assistant and hand it to our method; what `measure` is to give to transformers'."""
    loaded, _ = load_target(assistant, dtype)
    loaded = loaded.to(model.device)
    model.add_drafter(DraftModelDrafter(loaded))
    return {ASSISTED: loaded}


def _show(summary: Sequence[dict[str, Any]], rows: Sequence[benchmark.Measurement], dtype: str) -> None:
    """The table on standard output; below it, on standard error, what makes figures doubtful."""
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
    warm_up = {row.method: row.warm_up_seconds for row in rows}
    typer.echo("before the timing, s: " + ", ".join(f"{name} {took:.1f}" for name, took in warm_up.items()), err=True)
    for warning in benchmark.warnings_of(rows):
        typer.echo(f"warning: {warning}", err=True)


def _shown(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
