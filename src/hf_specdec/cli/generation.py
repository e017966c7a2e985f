"""The commands `hf-specdec demo` and `hf-specdec generate`."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from hf_specdec.cli.inputs import check_methods, check_places
from hf_specdec.cli.options import (
    MAX_TEMPERATURE,
    METHODS,
    MIN_TEMPERATURE,
    Head,
    Json,
    Model,
    NewTokens,
    Precision,
    Seed,
    finite,
    temperature_in_range,
)
from hf_specdec.cli.status import importing, working
from hf_specdec.errors import InvalidConfigError
from hf_specdec.validation import MAX_NODES

PROMPT = (
    "Correct the grammar and spelling of this paragraph:\n\n"
    "The sun is the star at the center of the solar sistem. It are about 150 million kilometers away from the Earth. "
    "Its light take about eight minutes to reach us. Eight planets travel around the sun. The largest of them is "
    "Jupiter, and the smalest is Mercury. Without the sun, there would be no life on Earth."
)
"""Prompt of `hf-specdec demo`."""

Temperature = Annotated[
    float,
    typer.Option(
        callback=temperature_in_range,
        help=f"Sampling temperature: 0 is greedy, else from {MIN_TEMPERATURE:.5f} to {MAX_TEMPERATURE}.",
    ),
]
TopK = Annotated[
    int | None, typer.Option(min=0, help="Sample from the k most likely tokens; 0, the default, means all.")
]
TopP = Annotated[
    float | None,
    typer.Option(
        min=0.0, max=1.0, callback=finite, help="Nucleus sampling threshold; 1, the default, means all tokens."
    ),
]
Steps = Annotated[int | None, typer.Option(min=1, max=MAX_NODES, help="Drafted tokens per path (depth of the tree).")]
Nodes = Annotated[int | None, typer.Option(min=1, max=MAX_NODES, help="Nodes verified per step, root included.")]


def demo(
    model: Model = None,
    drafter: Head = None,
    prompt: Annotated[str, typer.Option(help="Prompt to answer.", show_default="a paragraph to correct")] = PROMPT,
    method: Annotated[str, typer.Option(metavar="METHOD", help=f"Method: {METHODS}.")] = "auto",
    max_new_tokens: NewTokens = 128,
    dtype: Precision = "float32",
    as_json: Json = False,
) -> None:
    """Compare plain and speculative decoding on one prompt: speed, tokens per forward (tau), equal token ids."""
    _check_prompt(prompt)
    if method == "plain":
        raise typer.BadParameter(
            "it is always compared with plain decoding. Choose another method.", param_hint="--method"
        )
    check_methods([method])
    check_places(model, drafter)
    with importing(shown=not as_json):
        from hf_specdec.cli import demo as demonstration
        from hf_specdec.cli.answers import dtype_of, head_for, source_of
        from hf_specdec.cli.race import show_race
        from hf_specdec.generation.loading import load_model

    console = Console(highlight=False)
    head = head_for([method], model, drafter, shown=not as_json)
    with working("Loading the model", shown=not as_json):
        lm, tokenizer = load_model(model, head, dtype)
    if not as_json:
        console.print(Text(prompt, style="bold"))
        console.print()
    settings: dict[str, Any] = {"method": method, "max_new_tokens": max_new_tokens}
    source = source_of(head, model, drafter, method)
    demonstration.prepare(lm, tokenizer, prompt, **settings, shown=not as_json)
    if as_json:
        result = demonstration.run(lm, tokenizer, prompt, **settings)
        typer.echo(json.dumps({**result.to_dict(), "dtype": dtype_of(lm), "head": source}))
    elif console.is_terminal:
        given = [word for name, value in (("--model", model), ("--drafter", drafter)) if value
                 for word in (name, value)]  # fmt: skip
        show_race(lm, tokenizer, prompt, settings, source, given, console)
    else:
        demonstration.show_lines(lm, tokenizer, prompt, settings, source, console)


def generate(
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="Prompt; '-' reads it from standard input.")
    ] = None,
    model: Model = None,
    drafter: Head = None,
    method: Annotated[str, typer.Option(metavar="METHOD", help=f"Method: plain, {METHODS}.")] = "auto",
    max_new_tokens: NewTokens = 256,
    dtype: Precision = "auto",
    temperature: Temperature = 0.0,
    top_k: TopK = None,
    top_p: TopP = None,
    seed: Seed = 0,
    num_steps: Steps = None,
    num_draft_tokens: Nodes = None,
    interactive: Annotated[bool, typer.Option("--interactive", help="Chat until the input ends.")] = False,
    colors: Annotated[
        bool, typer.Option("--colors", help="Colour the text by decoding step (disables streaming).")
    ] = False,
    as_json: Json = False,
) -> None:
    """Answer a prompt and stream the answer, or chat."""
    _check_output_options(method, interactive=interactive, colors=colors, as_json=as_json)
    if temperature == 0:
        _check_unused({"--top-k": top_k, "--top-p": top_p}, "without sampling", "Add --temperature, such as 0.7.")
    if method == "plain":
        sizes = {"--num-steps": num_steps, "--num-draft-tokens": num_draft_tokens}
        _check_unused(sizes, "with --method plain", "Give another --method, such as auto.")
    check_methods([method], ["plain"])
    prompt = _read_prompt(prompt, interactive)
    check_places(model, drafter)
    with importing(shown=not as_json):
        import torch

        from hf_specdec.cli.answers import answer, converse, head_for, source_of
        from hf_specdec.generation.loading import load_model

    head = head_for([method], model, drafter, shown=not as_json)
    with working("Loading the model", shown=not as_json):
        lm, tokenizer = load_model(model, head, dtype)
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": False, "speculative": None}
    if temperature > 0:
        nucleus = 1.0 if top_p is None else top_p
        options |= {"do_sample": True, "temperature": temperature, "top_k": top_k or 0, "top_p": nucleus}
    if method != "plain":
        options["speculative"] = {"method": method, "num_steps": num_steps, "num_draft_tokens": num_draft_tokens,
                                  "trace": colors}  # fmt: skip
    source = source_of(head, model, drafter, method)
    torch.manual_seed(seed)
    if interactive:
        converse(lm, tokenizer, prompt, options, source)
        return
    answer(lm, tokenizer, prompt or "", options, source, colors=colors, as_json=as_json)


def _check_output_options(method: str, *, interactive: bool, colors: bool, as_json: bool) -> None:
    given = {"--colors": colors, "--interactive": interactive, "--json": as_json, "--method plain": method == "plain"}
    for first, second in (("--interactive", "--json"), *(("--colors", name) for name in list(given)[1:])):
        if given[first] and given[second]:
            raise InvalidConfigError(f"{first} cannot be combined with {second}.", "Drop one of them.")


def _check_unused(given: dict[str, Any], when: str, hint: str) -> None:
    """Raise `InvalidConfigError` if an option is given (not None) that has no effect."""
    for name, value in given.items():
        if value is not None:
            raise InvalidConfigError(f"{name} has no effect {when}.", hint)


def _read_prompt(prompt: str | None, interactive: bool) -> str | None:
    """Return the prompt, read from standard input if it is "-"; None if a chat is to begin without one.

    Raises:
        InvalidConfigError: The prompt is missing or empty.
    """
    if prompt is None and not interactive:
        raise InvalidConfigError("No prompt was given.", "Give one, '-' to read standard input, or --interactive.")
    if prompt == "-" and not interactive:
        prompt = sys.stdin.read()
    if prompt is not None:
        _check_prompt(prompt)
    return prompt


def _check_prompt(prompt: str) -> None:
    if not prompt.strip():
        raise InvalidConfigError("The prompt is empty.")
