"""The commands `hf-specdec demo` and `hf-specdec generate`."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from hf_specdec.cli.parameters import (
    MAX_TEMPERATURE,
    METHODS,
    MIN_TEMPERATURE,
    HeadOption,
    Json,
    ModelOption,
    NewTokens,
    Precision,
    RoundActivations,
    Seed,
    check_method_names,
    check_places,
    finite,
    temperature_in_range,
)
from hf_specdec.cli.status import importing
from hf_specdec.errors import InvalidConfigError
from hf_specdec.validation import MAX_NODES

PROMPT = (
    "Correct the grammar and spelling of this paragraph:\n\n"
    "The sun is the star at the center of the solar sistem. It are about 150 million kilometers away from the Earth. "
    "Its light take about eight minutes to reach us. Eight planets travel around the sun. The largest of them is "
    "Jupiter, and the smalest is Mercury. Without the sun, there would be no life on Earth."
)
"""Prompt of `hf-specdec demo`."""


def demo(
    model: ModelOption = None,
    drafter: HeadOption = None,
    prompt: Annotated[str, typer.Option(help="Prompt to answer.", show_default="a paragraph to correct")] = PROMPT,
    method: Annotated[str, typer.Option(metavar="METHOD", help=f"Method: {METHODS}.")] = "auto",
    max_new_tokens: NewTokens = 128,
    dtype: Precision = "float32",
    as_json: Json = False,
) -> None:
    """Compare plain and speculative decoding on one prompt: speed, tokens per forward (tau), equal token ids."""
    if not prompt.strip():
        raise InvalidConfigError("The prompt is empty.")
    if method == "plain":
        raise typer.BadParameter(
            "it is always compared with plain decoding. Choose another method.", param_hint="--method"
        )
    check_method_names([method])
    check_places(model, drafter)
    with importing(shown=not as_json):
        from hf_specdec.cli import demo as demonstration
        from hf_specdec.cli.answers import dtype_of, loaded_with_head

    lm, tokenizer, source = loaded_with_head([method], model, drafter, dtype, shown=not as_json)
    console = Console(highlight=False)
    if not as_json:
        console.print(Text(prompt, style="bold"))
        console.print()
    demonstration.prepare(lm, tokenizer, prompt, method, max_new_tokens, shown=not as_json)
    if as_json:
        result = demonstration.run(lm, tokenizer, prompt, method, max_new_tokens)
        typer.echo(json.dumps({**result.to_dict(), "dtype": dtype_of(lm), "head": source}))
    elif console.is_terminal:
        pairs = ((name, value) for name, value in (("--model", model), ("--drafter", drafter)) if value)
        given = [word for pair in pairs for word in pair]
        demonstration.show_race(lm, tokenizer, prompt, method, max_new_tokens, source, given, console)
    else:
        demonstration.show_lines(lm, tokenizer, prompt, method, max_new_tokens, source, console)


def generate(
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="Prompt; '-' reads it from standard input.")
    ] = None,
    model: ModelOption = None,
    drafter: HeadOption = None,
    method: Annotated[str, typer.Option(metavar="METHOD", help=f"Method: plain, {METHODS}.")] = "auto",
    max_new_tokens: NewTokens = 256,
    dtype: Precision = "auto",
    temperature: Annotated[
        float,
        typer.Option(
            callback=temperature_in_range,
            help=f"Sampling temperature: 0 is greedy, else from {MIN_TEMPERATURE:.5f} to {MAX_TEMPERATURE}.",
        ),
    ] = 0.0,
    top_k: Annotated[
        int | None, typer.Option(min=0, help="Sample from the k most likely tokens; 0, the default, means all.")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            min=0.0, max=1.0, callback=finite, help="Nucleus sampling threshold; 1, the default, means all tokens."
        ),
    ] = None,
    seed: Seed = 0,
    num_steps: Annotated[
        int | None, typer.Option(min=1, max=MAX_NODES, help="Drafted tokens per path (depth of the tree).")
    ] = None,
    num_draft_tokens: Annotated[
        int | None, typer.Option(min=1, max=MAX_NODES, help="Nodes verified per step, root included.")
    ] = None,
    interactive: Annotated[bool, typer.Option("--interactive", help="Chat until the input ends.")] = False,
    colors: Annotated[
        bool, typer.Option("--colors", help="Colour the text by decoding step (disables streaming).")
    ] = False,
    round_activations: RoundActivations = False,
    as_json: Json = False,
) -> None:
    """Answer a prompt and stream the answer, or chat."""
    if interactive and as_json:
        raise InvalidConfigError("--interactive cannot be combined with --json.", "Drop one of them.")
    for given, other in ((interactive, "--interactive"), (as_json, "--json"), (method == "plain", "--method plain")):
        if colors and given:
            raise InvalidConfigError(f"--colors cannot be combined with {other}.", "Drop one of them.")
    if temperature == 0:
        _check_unused({"--top-k": top_k, "--top-p": top_p}, "without sampling", "Add --temperature, such as 0.7.")
    if method == "plain":
        unused = {"--num-steps": num_steps, "--num-draft-tokens": num_draft_tokens}
        _check_unused(unused, "with --method plain", "Give another --method, such as auto.")
    check_method_names([method], ["plain"])
    if not interactive:
        if prompt is None:
            raise InvalidConfigError("No prompt was given.", "Give one, '-' to read standard input, or --interactive.")
        prompt = sys.stdin.read() if prompt == "-" else prompt
    if prompt is not None and not prompt.strip():
        raise InvalidConfigError("The prompt is empty.")
    check_places(model, drafter, round_activations=round_activations)
    with importing(shown=not as_json):
        import torch

        from hf_specdec.cli.answers import answer, converse, loaded_with_head

    lm, tokenizer, source = loaded_with_head(
        [method], model, drafter, dtype, shown=not as_json, round_activations=round_activations
    )
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": False, "speculative": None}
    if temperature > 0:
        nucleus = 1.0 if top_p is None else top_p
        options |= {"do_sample": True, "temperature": temperature, "top_k": top_k or 0, "top_p": nucleus}
    if method != "plain":
        sizes = {"num_steps": num_steps, "num_draft_tokens": num_draft_tokens}
        options["speculative"] = {"method": method, **sizes, "trace": colors}
    torch.manual_seed(seed)
    if interactive:
        converse(lm, tokenizer, prompt, options, source)
    else:
        answer(lm, tokenizer, prompt or "", options, source, colors=colors, as_json=as_json)


def _check_unused(given: dict[str, Any], when: str, hint: str) -> None:
    """Raise `InvalidConfigError` if an option is given (not None) that has no effect."""
    for name, value in given.items():
        if value is not None:
            raise InvalidConfigError(f"{name} has no effect {when}.", hint)
