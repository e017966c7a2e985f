"""The command `hf-specdec bench`, which measures decoding methods on a file of questions."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hf_specdec.atomic import write_text
from hf_specdec.cli.inputs import ASSISTANT_METHOD, TRANSFORMERS_METHODS, check_methods, check_places
from hf_specdec.cli.options import (
    METHOD_NAMES,
    METHODS,
    Head,
    Model,
    NewTokens,
    Precision,
    check_picture,
    check_writable_file,
)
from hf_specdec.cli.status import importing, say, working
from hf_specdec.errors import InvalidConfigError
from hf_specdec.records import QUESTION_ROW, open_regular, read_records

if TYPE_CHECKING:
    from hf_specdec.bench import Question

METHODS_HELP = (
    f"Comma-separated names; plain is always measured. Of this package: draft_model (needs --assistant), {METHODS}. "
    "Append +kernels, +inductor, +cuda_graph or +none for that value of `compile`. From transformers: "
    "transformers_prompt_lookup (prompt_lookup_num_tokens=10), transformers_assisted (needs --assistant), "
    "plain_static_compiled (static cache, forward compiled before the timing)."
)
OTHER_METHODS = (*TRANSFORMERS_METHODS, ASSISTANT_METHOD)
ALL_TURNS_HELP = (
    "Answer all turns of a question instead of the first. As in Spec-Bench, each method continues its own answers; "
    "tokens and seconds are summed over the turns."
)

PROMPTS_HELP = (
    f'JSON Lines file with rows such as {QUESTION_ROW}, or with prompts as for distill, such as {{"prompt": "..."}}. '
    "Default: the three prompts of doctor."
)

Assistant = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        help="Path or Hub id of a smaller model. With another tokenizer, only draft_model drafts with it.",
    ),
]


def bench(
    prompts: Annotated[Path | None, typer.Option(help=PROMPTS_HELP)] = None,
    model: Model = None,
    drafter: Head = None,
    assistant: Assistant = None,
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
    _check_outputs(output, picture, force=force)
    _check_names(methods, assistant)
    if prompts is not None:
        open_regular(prompts).close()
    for place in (model, assistant):
        check_places(place, drafter)
    with importing():
        from hf_specdec import bench as benchmark
        from hf_specdec.bench.methods import split_method
        from hf_specdec.cli.answers import dtype_of, head_for, source_of
        from hf_specdec.cli.benching import check_assistant, measured, read_methods, show, with_assistant
        from hf_specdec.generation.loading import load_model

    names = read_methods(methods)
    benchmark.check_methods(names, assistant=assistant is not None)
    questions = _questions(prompts, limit, per_category)
    own_methods = [split_method(name)[0] for name in names if name not in benchmark.PEERS]
    head = head_for(own_methods, model, drafter, assistant=assistant is not None)
    if assistant is not None:
        check_assistant(assistant, model, names)
    with working("Loading the model"):
        lm, tokenizer = load_model(model, head, dtype)
    settings = {} if assistant is None else with_assistant(lm, tokenizer, assistant, dtype)
    rows = measured(lm, tokenizer, questions, names, max_new_tokens=max_new_tokens, rounds=rounds, settings=settings,
                    all_turns=all_turns)  # fmt: skip
    summary = benchmark.summarise(rows)
    source = source_of(head, model, drafter)
    show(summary, rows, dtype_of(lm), source)
    if output is not None:
        document = {"environment": benchmark.environment(lm), "head": source, "summary": summary,
                    "measurements": [asdict(row) for row in rows]}  # fmt: skip
        write_text(output, json.dumps(document, indent=1))
    if picture is not None:
        benchmark.plot(summary, picture)


def _questions(path: Path | None, limit: int | None, per_category: int | None) -> list[Question]:
    """Return the questions of a file, whose rows may also be prompts; without a file, those of `doctor`.

    A prompt's id is its line number; all prompts are in the category `all`.

    Raises:
        InvalidConfigError: The file cannot be read, or a row is neither a question nor a prompt.
    """
    from hf_specdec.bench.diagnosis import QUESTIONS
    from hf_specdec.bench.questions import Question, chosen, read_questions
    from hf_specdec.bench.report import ALL

    if path is None:
        say("No --prompts: measuring on the three prompts of hf-specdec doctor.", err=True)
        return chosen(QUESTIONS, limit=limit, per_category=per_category)
    if not _has_prompts(path):
        return read_questions(path, limit=limit, per_category=per_category)
    from hf_specdec.training.data import prompt_of

    prompts = [(str(number), prompt_of(row, f"{path}, line {number}", "")) for number, row in read_records(path)]
    if systems := [number for number, prompt in prompts if prompt.system]:
        raise InvalidConfigError(
            f"{path}, line {systems[0]} has a system message, with which `bench` cannot ask.", "Leave it out."
        )
    questions = [Question(number, ALL, prompt.turns) for number, prompt in prompts]
    return chosen(questions, limit=limit, per_category=per_category)


def _has_prompts(path: Path) -> bool:
    """Whether the first row of a `.jsonl` or `.jsonl.gz` file has no field that only questions have."""
    if ".jsonl" not in path.suffixes:
        return False
    _, first = next(read_records(path), (0, {"question_id": None}))  # an empty file: `read_questions` says so
    return not {"question_id", "category"} & first.keys()


def _check_outputs(output: Path | None, picture: Path | None, *, force: bool) -> None:
    """Check that the files of `--json` and `--plot` can be written.

    Raises:
        InvalidConfigError: One cannot, see `check_writable_file` and `check_picture`; or both are the same.
    """
    check_writable_file(output, "--json", force=force)
    check_picture(picture, "bench", force=force)
    if picture is not None and output is not None and picture.resolve() == output.resolve():
        raise InvalidConfigError(f"--json and --plot are both {output}.", "Give two files.")


def _check_names(methods: str, assistant: str | None) -> None:
    """Check the value of `--methods`, except suffixes, which `read_methods` checks.

    Raises:
        InvalidConfigError: It names no method, or an unknown one.
        DrafterMismatchError: A method needs an assistant model that is not given.
    """
    names = [name.strip() for name in methods.split(",") if name.strip()]
    if not names:
        known = ", ".join((*OTHER_METHODS, *METHOD_NAMES))
        raise InvalidConfigError("--methods names no method.", f"Available: {known}.")
    check_methods((name.partition("+")[0] for name in names), OTHER_METHODS, assistant=assistant is not None)
