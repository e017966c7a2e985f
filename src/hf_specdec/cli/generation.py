"""The commands that generate: `hf-specdec demo | generate`."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from transformers import TextStreamer

from hf_specdec.checkpoints.hub import load_head
from hf_specdec.cli import demo as demonstration
from hf_specdec.cli.options import Head, Json, Model, NewTokens, Precision, Seed, finite
from hf_specdec.drafters.registry import method_named
from hf_specdec.drafters.registry import methods as known_methods
from hf_specdec.errors import DrafterMismatchError, InvalidConfigError
from hf_specdec.generation.loading import default_head, encode, encode_chat, load_model
from hf_specdec.heads.base import DraftHead
from hf_specdec.viz.text import colored_text

ASSISTANT_METHOD = "draft_model"
"""The method that drafts with an assistant model, which `hf-specdec bench` takes."""


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
    head = head_for([method], model, drafter)
    console = Console()
    lm, tokenizer = load_model(model, head, dtype)
    streamer = None if as_json else TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    if not as_json:
        console.print(f"[bold]{prompt}[/bold]")
    result = demonstration.run(lm, tokenizer, prompt, method=method, max_new_tokens=max_new_tokens, streamer=streamer)
    if as_json:
        typer.echo(json.dumps({**result.to_dict(), "dtype": dtype_of(lm)}))
    else:
        demonstration.report(result, console)
        console.print(f"weights in {dtype_of(lm)}", highlight=False)


def generate(
    prompt: Annotated[str | None, typer.Argument(help="What to ask; '-' reads standard input.")] = None,
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
    interactive: Annotated[bool, typer.Option("--interactive", help="Go on asking, until the input ends.")] = False,
    colors: Annotated[
        bool, typer.Option("--colors", help="Not streamed: in a colour per step that gave several tokens.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Answer a prompt, streamed as it comes; or have a conversation."""
    _check_shown(method, interactive=interactive, colors=colors, as_json=as_json)
    if prompt == "-" and not interactive:
        prompt = sys.stdin.read()
    if prompt is not None or not interactive:
        _check_prompt(prompt or "")
    head = head_for([method], model, drafter)
    lm, tokenizer = load_model(model, head, dtype)
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": False, "speculative": None}
    if temperature > 0:
        options |= {"do_sample": True, "temperature": temperature, "top_k": top_k, "top_p": top_p}
    if method != "plain":
        options["speculative"] = {"method": method, "num_steps": num_steps, "num_draft_tokens": num_draft_tokens,
                                  "trace": colors}  # fmt: skip
    torch.manual_seed(seed)
    if interactive:
        _converse(lm, tokenizer, prompt, options)
        return
    inputs = encode(tokenizer, prompt or "", lm.device)
    streamer = None if as_json or colors else TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    ids = lm.generate(**inputs, streamer=streamer, **options)[0, inputs["input_ids"].shape[1] :]
    stats = None if method == "plain" else lm.last_speculation
    if as_json:
        text = tokenizer.decode(ids, skip_special_tokens=True)
        typer.echo(json.dumps({"text": text, "token_ids": ids.tolist(), "dtype": dtype_of(lm),
                               "speculation": None if stats is None else stats.to_dict()}))  # fmt: skip
    elif stats is not None:
        if colors:
            typer.echo(str(colored_text(stats.trace, tokenizer)), color=True)
        typer.echo(f"{stats!r}, weights in {dtype_of(lm)}", err=True)


def _converse(model: Any, tokenizer: Any, first: str | None, options: dict[str, Any]) -> None:
    """Ask, answer and go on, until the input ends; behind every answer how it was made, on stderr."""
    texts: list[str] = []
    while True:
        if first is None:
            try:
                said = input("> ")
            except EOFError:
                return
        else:
            said, first = first, None
        if not said.strip():
            continue
        inputs = encode_chat(tokenizer, [*texts, said], model.device)
        streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        ids = model.generate(**inputs, streamer=streamer, **options)[0, inputs["input_ids"].shape[1] :]
        texts += [said, tokenizer.decode(ids, skip_special_tokens=True).strip()]
        if options["speculative"] is not None:
            typer.echo(repr(model.last_speculation), err=True)


def _check_shown(method: str, *, interactive: bool, colors: bool, as_json: bool) -> None:
    if interactive and as_json:
        raise InvalidConfigError("A conversation is not one JSON object.", "Leave out --interactive or --json.")
    if colors and (interactive or as_json or method == "plain"):
        raise InvalidConfigError(
            "--colors shows one answer in the steps that drafting took.", "Leave out --interactive, --json, plain."
        )


def _check_prompt(prompt: str) -> None:
    if not prompt.strip():
        raise InvalidConfigError("The prompt is empty.")


def head_for(
    methods: list[str], model: str | None, drafter: str | None, *, assistant: bool = False
) -> DraftHead | None:
    """The head to load on the model; before a model is loaded, see that every method can be had with it.

    Args:
        methods: What `speculative=` is to take, or `"plain"`.
        model: As for `load_model`.
        drafter: Path or Hub id of the head; None is the one that comes with the model, if any.
        assistant: Whether there is an assistant model to draft with.

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
            if assistant and method == ASSISTANT_METHOD:
                continue
            takes = "hf-specdec bench takes one: --assistant PATH_OR_HUB_ID." if method == ASSISTANT_METHOD else ""
            raise DrafterMismatchError(
                f"The method {method!r} needs {rows[method].part}, and none is given.",
                takes or "Call model.generate(...) from Python.",
            )
        if method in rows and rows[method].requires and (head is None or head.method != method):
            given = "none is given" if head is None else f"{place} is one for {head.method!r}"
            raise DrafterMismatchError(
                f"The method {method!r} needs a head of its own, and {given}.", "Give one: --drafter PATH_OR_HUB_ID."
            )
    return head


def dtype_of(model: Any) -> str:
    """The name of a model's precision, without torch's prefix."""
    return str(model.dtype).removeprefix("torch.")
