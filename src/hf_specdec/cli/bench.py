"""The command `hf-specdec bench`, which measures decoding methods on a file of questions."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from hf_specdec.atomic import write_text
from hf_specdec.cli.parameters import (
    ASSISTANT_METHOD,
    FORWARDS,
    METHOD_NAMES,
    METHODS,
    HeadOption,
    ModelOption,
    NewTokens,
    Precision,
    check_method_names,
    check_picture,
    check_places,
    check_writable_file,
)
from hf_specdec.cli.status import importing, say, working
from hf_specdec.errors import InvalidConfigError
from hf_specdec.records import QUESTION_ROW, open_regular, read_records
from hf_specdec.reporting.stats import shown_tau

if TYPE_CHECKING:
    from hf_specdec.bench import Measurement, Question

METHODS_HELP = (
    f"Comma-separated names; plain is always measured. Of this package: draft_model (needs --assistant), {METHODS}. "
    "Append +kernels, +inductor, +cuda_graph or +none for that value of `compile` (plain is transformers' generate(), "
    "plain+kernels this package's). From transformers: "
    "transformers_prompt_lookup (prompt_lookup_num_tokens=10), transformers_assisted (needs --assistant), "
    "plain_static_compiled (static cache, forward compiled before the timing)."
)
OTHER_METHODS = ("plain", "transformers_prompt_lookup", "transformers_assisted", "plain_static_compiled",
                 ASSISTANT_METHOD)  # fmt: skip
"""What can be measured in addition to `METHOD_NAMES`: methods of transformers (`bench.PEERS`), and the assistant's."""

ALL_TURNS_HELP = (
    "Answer all turns of a question instead of the first. As in Spec-Bench, each method continues its own answers; "
    "tokens and seconds are summed over the turns."
)
PROMPTS_HELP = (
    f'JSON Lines file with rows such as {QUESTION_ROW}, or with prompts as for distill, such as {{"prompt": "..."}}. '
    "Default: the three prompts of doctor."
)


def bench(
    prompts: Annotated[Path | None, typer.Option(help=PROMPTS_HELP)] = None,
    model: ModelOption = None,
    drafter: HeadOption = None,
    assistant: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Path or Hub id of a smaller model. With another tokenizer, only draft_model drafts with it.",
        ),
    ] = None,
    methods: Annotated[str, typer.Option(metavar="NAMES", help=METHODS_HELP)] = "plain,prompt_lookup",
    max_new_tokens: NewTokens = 128,
    all_turns: Annotated[bool, typer.Option("--all-turns", help=ALL_TURNS_HELP)] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Timed repetitions per question.")] = 1,
    limit: Annotated[int | None, typer.Option(min=1, help="Maximum number of questions.")] = None,
    per_category: Annotated[int | None, typer.Option(min=1, help="Maximum number of questions per category.")] = None,
    dtype: Precision = "auto",
    output: Annotated[Path | None, typer.Option("--json", help="Write all measurements to this JSON file.")] = None,
    picture: Annotated[
        Path | None, typer.Option("--plot", help="Write a plot of the speed-ups to this file. Needs matplotlib.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite existing --json and --plot files.")] = False,
) -> None:
    """Measure methods against plain generate(), interleaved per question.

    The table shows medians over the questions of a category: tokens/s of the
    whole call, tokens/s after the first token (decode), the speed-up over plain
    with its 20th and 80th percentile, and seconds to the first token. Tau, the
    tokens per forward of the model, is a mean.
    """
    check_writable_file(output, "--json", force=force)
    check_picture(picture, "bench", force=force)
    if picture is not None and output is not None and picture.resolve() == output.resolve():
        raise InvalidConfigError(f"--json and --plot are both {output}.", "Give two files.")
    names = [name.strip() for name in methods.split(",") if name.strip()]
    if not names:
        known = ", ".join((*OTHER_METHODS, *METHOD_NAMES))
        raise InvalidConfigError("--methods names no method.", f"Available: {known}.")
    has_assistant = assistant is not None
    check_method_names((name.partition("+")[0] for name in names), OTHER_METHODS, assistant=has_assistant)
    if prompts is not None:
        open_regular(prompts).close()
    for place in (model, assistant):
        check_places(place, drafter)
    with importing():
        from hf_specdec import bench as benchmark
        from hf_specdec.bench.methods import ASSISTED, split_method
        from hf_specdec.cli.answers import dtype_of, head_for
        from hf_specdec.drafters.draft_model import DraftModelDrafter
        from hf_specdec.generation.loading import load_model, load_target

    benchmark.check_methods(names, assistant=has_assistant)
    questions = _questions(prompts, limit, per_category)
    own_methods = [split_method(name)[0] for name in names if name not in benchmark.PEERS]
    head, source = head_for(own_methods, model, drafter, assistant=has_assistant)
    if assistant is not None:
        _check_assistant(assistant, model, names)
    with working("Loading the model"):
        lm, tokenizer = load_model(model, head, dtype)
    settings: dict[str, Any] = {}
    if assistant is not None:
        loaded, own = load_target(assistant, dtype)
        settings[ASSISTED] = loaded.to(lm.device)
        same = own.get_vocab() == tokenizer.get_vocab()
        tokenizers = {} if same else {"tokenizer": tokenizer, "assistant_tokenizer": own}
        lm.add_drafter(DraftModelDrafter(settings[ASSISTED], **tokenizers))
    rows = []
    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("answers", total=len(questions) * len({"plain", *names}))
        limits: dict[str, Any] = {"max_new_tokens": max_new_tokens, "rounds": rounds, "all_turns": all_turns}
        for row in benchmark.measure(lm, tokenizer, questions, names, settings=settings, **limits):
            rows.append(row)
            progress.advance(task)
    summary = benchmark.summarise(rows)
    console = Console()
    if not console.is_terminal:  # a file or a pipe
        console = Console(width=120)
    console.print(table_of(summary, f"weights in {dtype_of(lm)}", console))
    if source is not None:
        say(f"head: {source}")
    for sentence in notes_of(summary, rows, dtype_of(lm)):
        say(sentence)
    warm_up = {row.method: row.warm_up_seconds for row in rows}
    say("warm-up, s: " + ", ".join(f"{name} {took:.1f}" for name, took in warm_up.items()), err=True)
    for warning in benchmark.warnings_of(rows):
        say(f"warning: {warning}", err=True)
    if output is not None:
        document = {"environment": benchmark.environment(lm), "head": source, "summary": summary}
        document["measurements"] = [asdict(row) for row in rows]
        write_text(output, json.dumps(document, indent=1))
    if picture is not None:
        benchmark.plot(summary, picture)


def _questions(path: Path | None, limit: int | None, per_category: int | None) -> list[Question]:
    """Return the questions of a file, whose rows may also be prompts; without a file, those of `doctor`.

    A prompt's id is its line number; all prompts are in the category `all`.
    """
    from hf_specdec.bench.diagnosis import QUESTIONS
    from hf_specdec.bench.questions import Question, chosen, read_questions
    from hf_specdec.bench.summary import ALL

    if path is None:
        say("No --prompts: measuring on the three prompts of hf-specdec doctor.", err=True)
        return chosen(QUESTIONS, limit=limit, per_category=per_category)
    unknown = (0, {"question_id": None})  # an empty file, or one that is not of lines: `read_questions` says so
    _, first = next(read_records(path), unknown) if ".jsonl" in path.suffixes else unknown
    if {"question_id", "category"} & first.keys():
        return read_questions(path, limit=limit, per_category=per_category)
    from hf_specdec.training.data import prompt_of

    prompts = [(str(number), prompt_of(row, f"{path}, line {number}", "")) for number, row in read_records(path)]
    if systems := [number for number, prompt in prompts if prompt.system]:
        raise InvalidConfigError(
            f"{path}, line {systems[0]} has a system message, with which `bench` cannot ask.", "Leave it out."
        )
    questions = [Question(number, ALL, prompt.turns) for number, prompt in prompts]
    return chosen(questions, limit=limit, per_category=per_category)


def _check_assistant(assistant: str, model: str | None, names: Sequence[str]) -> None:
    """Check, before any weights are loaded, that a method uses the assistant model and that it fits the target."""
    from hf_specdec.bench.methods import ASSISTED
    from hf_specdec.generation.loading import load_tokenizer

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


MAX_WIDTH = 10_000
"""Columns in which every table fits."""


def notes_of(summary: Sequence[dict[str, Any]], rows: Sequence[Measurement], dtype: str) -> list[str]:
    """Return what a reader of the table must know: methods with compiled forwards; ids that differ by rounding."""
    notes = []
    for kind, forwards in FORWARDS.items():
        names = dict.fromkeys(row.method for row in rows if row.forwards == kind)
        if names:
            notes.append(
                f"With {forwards}: {', '.join(names)}. Their speed-ups include what these forwards gain; plain runs "
                "eagerly. Append +none to a method to measure drafting alone."
            )
    if dtype != "float32" and any(line["ids_equal"] != line["questions"] for line in summary):
        notes.append(
            f"With weights in {dtype}, token ids may differ from plain decoding after a near-tie between two tokens. "
            "--dtype float32 compares exactly."
        )
    return notes


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "category": lambda line: line["category"],
    "method": lambda line: line["method"],
    "tokens/s": lambda line: f"{line['tokens_per_second']:.1f}",
    "decode": lambda line: _number(line["decode_tokens_per_second"], 1),
    "x plain": lambda line: f"{line['speed_up']:.2f}",
    "p20-p80": lambda line: f"{line['speed_up_p20']:.2f}-{line['speed_up_p80']:.2f}",
    "first, s": lambda line: _number(line["time_to_first_token"], 3),
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
    names, left = list(COLUMNS), list(LEAST_NEEDED)
    unlimited = console.options.update(width=MAX_WIDTH)
    table = _table(summary, names, title)
    while console.measure(table, options=unlimited).maximum > console.width:
        if "category" in names:
            names.remove("category")
        elif left:
            names.remove(left.pop(0))
        else:
            break
        table = _table(summary, names, title)
    return table


def _table(summary: Sequence[dict[str, Any]], names: Sequence[str], title: str) -> Table:
    """Return a table of some columns: with borders, or without them and without the column of categories."""
    has_borders = "category" in names
    table = Table(title=title) if has_borders else Table(title=title, box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for name in names:
        table.add_column(name, no_wrap=True, justify="left" if name in ("category", "method") else "right")
    category = None
    for line in summary:
        if not has_borders and line["category"] != category:
            category = line["category"]
            table.add_row(Text(f"{category}:", style="bold"))
        table.add_row(*(COLUMNS[name](line) for name in names))
    return table
