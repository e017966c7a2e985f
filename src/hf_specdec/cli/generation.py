"""The commands that generate: `hf-specdec demo | generate | bench`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers import TextStreamer

from hf_specdec import bench as benchmark
from hf_specdec import demo as demonstration
from hf_specdec.atomic import write_text
from hf_specdec.checkpoints.hub import load_head
from hf_specdec.cli.options import Head, Json, Model, NewTokens, Precision, Seed, finite, writable_file
from hf_specdec.drafters.registry import method_named
from hf_specdec.drafters.registry import methods as known_methods
from hf_specdec.errors import DrafterMismatchError, InvalidConfigError
from hf_specdec.heads.base import DraftHead
from hf_specdec.loading import default_head, encode, load_model
from hf_specdec.stats import shown_tau


def demo(
    model: Model = None,
    drafter: Head = None,
    prompt: Annotated[str, typer.Option(help="What to ask.")] = demonstration.PROMPT,
    method: Annotated[str, typer.Option(help="What to pass as `speculative=`.")] = "auto",
    max_new_tokens: NewTokens = 128,
    dtype: Precision = "float32",
    as_json: Json = False,
) -> None:
    """Answer one prompt plainly and speculatively, and show speed, tau and equality."""
    _check_prompt(prompt)
    head = _head_for([method], model, drafter)
    console = Console()
    lm, tokenizer = load_model(model, head, dtype)
    streamer = None if as_json else TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    if not as_json:
        console.print(f"[bold]{prompt}[/bold]")
    result = demonstration.run(lm, tokenizer, prompt, method=method, max_new_tokens=max_new_tokens, streamer=streamer)
    if as_json:
        typer.echo(json.dumps({**result.to_dict(), "dtype": _dtype_of(lm)}))
    else:
        demonstration.report(result, console)
        console.print(f"weights in {_dtype_of(lm)}", highlight=False)


def generate(
    prompt: Annotated[str, typer.Argument(help="What to ask; '-' reads standard input.")],
    model: Model = None,
    drafter: Head = None,
    method: Annotated[str, typer.Option(help="What to pass as `speculative=`, or 'plain'.")] = "auto",
    max_new_tokens: NewTokens = 256,
    dtype: Precision = "auto",
    temperature: Annotated[float, typer.Option(min=0.0, callback=finite, help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(min=0, help="Sample among the k best tokens; 0 is all.")] = 0,
    top_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, callback=finite, help="Nucleus to sample from; 1 is all.")
    ] = 1.0,
    seed: Seed = 0,
    num_steps: Annotated[int | None, typer.Option(min=1, help="Drafted depth.")] = None,
    num_draft_tokens: Annotated[int | None, typer.Option(min=1, help="Nodes per tree, root included.")] = None,
    as_json: Json = False,
) -> None:
    """Answer a prompt, streamed as it comes."""
    if prompt == "-":
        prompt = sys.stdin.read()
    _check_prompt(prompt)
    head = _head_for([method], model, drafter)
    lm, tokenizer = load_model(model, head, dtype)
    inputs = encode(tokenizer, prompt, lm.device)
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": top_k, "top_p": top_p}
    speculative = None
    if method != "plain":
        speculative = {"method": method, "num_steps": num_steps, "num_draft_tokens": num_draft_tokens}
    torch.manual_seed(seed)
    streamer = None if as_json else TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    ids = lm.generate(**inputs, max_new_tokens=max_new_tokens, streamer=streamer, speculative=speculative, **sampling)[
        0, inputs["input_ids"].shape[1] :
    ]
    stats = None if speculative is None else lm.last_speculation
    if as_json:
        text = tokenizer.decode(ids, skip_special_tokens=True)
        typer.echo(json.dumps({"text": text, "token_ids": ids.tolist(), "dtype": _dtype_of(lm),
                               "speculation": None if stats is None else stats.to_dict()}))  # fmt: skip
    elif stats is not None:
        typer.echo(f"{stats!r}, weights in {_dtype_of(lm)}", err=True)


def bench(
    prompts: Annotated[Path, typer.Option(help="JSON lines: question_id, category, turns.")],
    model: Model = None,
    drafter: Head = None,
    methods: Annotated[str, typer.Option(help="Comma-separated; plain is always measured.")] = "plain,prompt_lookup",
    max_new_tokens: NewTokens = 128,
    rounds: Annotated[int, typer.Option(min=1, help="Timed repetitions.")] = 1,
    limit: Annotated[int | None, typer.Option(min=1, help="Questions at most.")] = None,
    per_category: Annotated[int | None, typer.Option(min=1, help="Questions of each category at most.")] = None,
    dtype: Precision = "auto",
    output: Annotated[Path | None, typer.Option("--json", help="Write every measurement to this file.")] = None,
) -> None:
    """Measure methods against plain generate(), interleaved per prompt."""
    writable_file(output, "--json")
    names = [name.strip() for name in methods.split(",") if name.strip()]
    questions = benchmark.read_questions(prompts, limit=limit, per_category=per_category)
    head = _head_for([name for name in names if name not in benchmark.PEERS], model, drafter)
    lm, tokenizer = load_model(model, head, dtype)
    rows: list[benchmark.Measurement] = []
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("prompts", total=len(questions) * len({"plain", *names}))
        for row in benchmark.measure(lm, tokenizer, questions, names, max_new_tokens=max_new_tokens, rounds=rounds):
            rows.append(row)
            progress.advance(task)
    summary = benchmark.summarise(rows)
    table = Table("category", "method", "tokens/s", "x plain", "tau", "equal", title=f"weights in {_dtype_of(lm)}")
    for line in summary:
        table.add_row(line["category"], line["method"], f"{line['tokens_per_second']:.1f}", f"{line['speed_up']:.2f}",
                      shown_tau(line["tau"]), f"{line['ids_equal']}/{line['questions']}")  # fmt: skip
    Console().print(table)
    if output is not None:
        document = {"environment": benchmark.environment(lm), "summary": summary,
                    "measurements": [asdict(row) for row in rows]}  # fmt: skip
        write_text(output, json.dumps(document, indent=1))


def _check_prompt(prompt: str) -> None:
    if not prompt.strip():
        raise InvalidConfigError("The prompt is empty.")


def _head_for(methods: list[str], model: str | None, drafter: str | None) -> DraftHead | None:
    """The head to load on the model; before a model is loaded, see that every method can be had with it.

    Raises:
        InvalidConfigError: There is no such method.
        DrafterMismatchError: A method needs another head than is given.
        CheckpointFormatError: The head cannot be read.
    """
    wanted = [method_named(method) for method in methods if method != "plain"]
    rows, place = known_methods(), drafter or default_head(model)
    head = None if place is None else load_head(place)
    for method in wanted:
        if method in rows and rows[method].part:
            raise DrafterMismatchError(
                f"The method {method!r} needs {rows[method].part}, which this command does not take.",
                "Call model.generate(...) from Python.",
            )
        if method in rows and rows[method].requires and (head is None or head.method != method):
            given = "none is given" if head is None else f"{place} is one for {head.method!r}"
            raise DrafterMismatchError(
                f"The method {method!r} needs a head of its own, and {given}.", "Give one: --drafter PATH_OR_HUB_ID."
            )
    return head


def _dtype_of(model: Any) -> str:
    return str(model.dtype).removeprefix("torch.")
