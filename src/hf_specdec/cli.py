"""The command line: `hf-specdec demo | generate | bench`, and what `cli_heads.py` and `cli_training.py` add.

A user's mistake is one line on stderr and exit code 2.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import transformers
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers import TextStreamer

from hf_specdec import bench as benchmark
from hf_specdec import cli_heads, cli_training
from hf_specdec import demo as demonstration
from hf_specdec.errors import InvalidConfigError, SpeculativeDecodingError

app = typer.Typer(
    help="Lossless speculative decoding for Hugging Face transformers.",
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
)  # fmt: skip

Dtype = Literal["float32", "bfloat16", "float16"]
Model = Annotated[str | None, typer.Option(help="Path or Hub id; default: the packaged SmolLM2-135M-Instruct.")]
Head = Annotated[str | None, typer.Option("--drafter", help="Path or Hub id of a draft head.")]
Precision = Annotated[Dtype, typer.Option(help="Of the weights. Ids are guaranteed equal in float32.")]
NewTokens = Annotated[int, typer.Option(min=1, help="Length of the answer at most.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


@app.command()
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
    console = Console()
    lm, tokenizer = demonstration.load_model(model, drafter, getattr(torch, dtype))
    streamer = None if as_json else TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    if not as_json:
        console.print(f"[bold]{prompt}[/bold]")
    result = demonstration.run(lm, tokenizer, prompt, method=method, max_new_tokens=max_new_tokens, streamer=streamer)
    if as_json:
        typer.echo(json.dumps(result.to_dict()))
    else:
        demonstration.report(result, console)


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="What to ask; '-' reads standard input.")],
    model: Model = None,
    drafter: Head = None,
    method: Annotated[str, typer.Option(help="What to pass as `speculative=`, or 'plain'.")] = "auto",
    max_new_tokens: NewTokens = 256,
    dtype: Precision = "float32",
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(min=0, help="Sample among the k best tokens; 0 is all.")] = 0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Nucleus to sample from; 1 is all.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
    num_steps: Annotated[int | None, typer.Option(min=1, help="Drafted depth.")] = None,
    num_draft_tokens: Annotated[int | None, typer.Option(min=1, help="Nodes per tree, root included.")] = None,
    as_json: Json = False,
) -> None:
    """Answer a prompt, streamed as it comes."""
    if prompt == "-":
        prompt = sys.stdin.read()
    if not prompt.strip():
        raise InvalidConfigError("The prompt is empty.")
    lm, tokenizer = demonstration.load_model(model, drafter, getattr(torch, dtype))
    inputs = demonstration.encode(tokenizer, prompt, lm.device)
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
        typer.echo(json.dumps({"text": text, "token_ids": ids.tolist(),
                               "speculation": None if stats is None else stats.to_dict()}))  # fmt: skip
    elif stats is not None:
        typer.echo(repr(stats), err=True)


@app.command()
def bench(
    prompts: Annotated[Path, typer.Option(help="JSON lines: question_id, category, turns.")],
    model: Model = None,
    drafter: Head = None,
    methods: Annotated[str, typer.Option(help="Comma-separated; plain is always measured.")] = "plain,prompt_lookup",
    max_new_tokens: NewTokens = 128,
    rounds: Annotated[int, typer.Option(min=1, help="Timed repetitions.")] = 1,
    limit: Annotated[int | None, typer.Option(min=1, help="Questions at most.")] = None,
    per_category: Annotated[int | None, typer.Option(min=1, help="Questions of each category at most.")] = None,
    dtype: Precision = "bfloat16",
    output: Annotated[Path | None, typer.Option("--json", help="Write every measurement to this file.")] = None,
) -> None:
    """Measure methods against plain generate(), interleaved per prompt."""
    questions = benchmark.read_questions(prompts, limit=limit, per_category=per_category)
    lm, tokenizer = demonstration.load_model(model, drafter, getattr(torch, dtype))
    names = [name.strip() for name in methods.split(",") if name.strip()]
    rows: list[benchmark.Measurement] = []
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("prompts", total=len(questions) * len({"plain", *names}))
        for row in benchmark.measure(lm, tokenizer, questions, names, max_new_tokens=max_new_tokens, rounds=rounds):
            rows.append(row)
            progress.advance(task)
    summary = benchmark.summarise(rows)
    table = Table("category", "method", "tokens/s", "x plain", "tau", "equal")
    for line in summary:
        table.add_row(line["category"], line["method"], f"{line['tokens_per_second']:.1f}", f"{line['speed_up']:.2f}",
                      f"{line['tau']:.2f}", f"{line['ids_equal']}/{line['questions']}")  # fmt: skip
    Console().print(table)
    if output is not None:
        document = {"environment": benchmark.environment(lm), "summary": summary,
                    "measurements": [asdict(row) for row in rows]}  # fmt: skip
        output.write_text(json.dumps(document, indent=1))


app.command()(cli_heads.inspect)
app.command()(cli_heads.convert)
app.command()(cli_training.distill)
app.command()(cli_training.tree)
app.add_typer(cli_training.train, name="train")


def main() -> None:
    """Entry point of the console script."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        sys.exit(app(standalone_mode=False) or 0)
    except SpeculativeDecodingError as error:
        _fail(str(error))
    except typer.BadParameter as error:
        _fail(error.format_message())
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(130)
    except typer.TyperException as error:
        _fail(str(error))


def _fail(message: str) -> None:
    typer.echo(f"hf-specdec: {' '.join(message.split())}", err=True)
    sys.exit(2)
