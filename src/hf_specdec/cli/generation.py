"""The commands `hf-specdec demo` and `hf-specdec generate`."""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.text import Text
from transformers import TextStreamer

from hf_specdec.checkpoints.hub import load_head
from hf_specdec.cli import demo as demonstration
from hf_specdec.cli.demo import Answer
from hf_specdec.cli.options import Head, Json, Model, NewTokens, Precision, Seed, finite
from hf_specdec.cli.race import Race, conclude
from hf_specdec.cli.status import working
from hf_specdec.drafters.registry import method_named
from hf_specdec.drafters.registry import methods as known_methods
from hf_specdec.errors import DrafterMismatchError, InvalidConfigError
from hf_specdec.generation.loading import default_head, encode, encode_chat, load_model
from hf_specdec.heads.base import DraftHead
from hf_specdec.reporting.stats import SpeculationStats, shown_tau
from hf_specdec.viz.text import colored_text

ASSISTANT_METHOD = "draft_model"
"""Method that drafts with a smaller model, the assistant; `hf-specdec bench` is the only command that supports it."""

Temperature = Annotated[float, typer.Option(min=0.0, callback=finite, help="Sampling temperature; 0 is greedy.")]
TopK = Annotated[
    int | None, typer.Option(min=0, help="Sample from the k most likely tokens; 0, the default, means all.")
]
TopP = Annotated[
    float | None,
    typer.Option(
        min=0.0, max=1.0, callback=finite, help="Nucleus sampling threshold; 1, the default, means all tokens."
    ),
]
Steps = Annotated[int | None, typer.Option(min=1, help="Drafted tokens per path (depth of the tree).")]
Nodes = Annotated[int | None, typer.Option(min=1, help="Nodes verified per step, root included.")]


def demo(
    model: Model = None,
    drafter: Head = None,
    prompt: Annotated[
        str, typer.Option(help="Prompt to answer.", show_default="a paragraph to correct")
    ] = demonstration.PROMPT,
    method: Annotated[str, typer.Option(help="Method, such as auto, eagle or prompt_lookup.")] = "auto",
    max_new_tokens: NewTokens = 128,
    dtype: Precision = "float32",
    as_json: Json = False,
) -> None:
    """Compare plain and speculative decoding on one prompt: speed, tau and equality of the token ids."""
    _check_prompt(prompt)
    head = head_for([method], model, drafter)
    console = Console(highlight=False)
    with working("Loading the model", shown=not as_json):
        lm, tokenizer = load_model(model, head, dtype)
    if not as_json:
        console.print(Text(prompt, style="bold"))
        console.print()
    settings: dict[str, Any] = {"method": method, "max_new_tokens": max_new_tokens}
    demonstration.prepare(lm, tokenizer, prompt, **settings, shown=not as_json)
    if as_json:
        result = demonstration.run(lm, tokenizer, prompt, **settings)
        typer.echo(json.dumps({**result.to_dict(), "dtype": dtype_of(lm)}))
        return
    if not console.is_terminal:
        plain, speculative = Answer(tokenizer), Answer(tokenizer, write=partial(typer.echo, nl=False))
        result = demonstration.run(lm, tokenizer, prompt, **settings, plain=plain, speculative=speculative)
        typer.echo()
        demonstration.report(result, console)
        console.print(f"weights in {dtype_of(lm)}")
        return
    answers = Answer(tokenizer), Answer(tokenizer)
    with Race(console, *answers, method).live():
        result = demonstration.run(lm, tokenizer, prompt, **settings, plain=answers[0], speculative=answers[1])
    given = [word for name, value in (("--model", model), ("--drafter", drafter)) if value for word in (name, value)]
    conclude(result, answers, dtype_of(lm), given, console)


def generate(
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="Prompt; '-' reads it from standard input.")
    ] = None,
    model: Model = None,
    drafter: Head = None,
    method: Annotated[str, typer.Option(help="Method, such as auto, eagle or prompt_lookup, or plain.")] = "auto",
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
    prompt = _read_prompt(prompt, interactive)
    head = head_for([method], model, drafter)
    with working("Loading the model", shown=not as_json):
        lm, tokenizer = load_model(model, head, dtype)
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": False, "speculative": None}
    if temperature > 0:
        nucleus = 1.0 if top_p is None else top_p
        options |= {"do_sample": True, "temperature": temperature, "top_k": top_k or 0, "top_p": nucleus}
    if method != "plain":
        options["speculative"] = {"method": method, "num_steps": num_steps, "num_draft_tokens": num_draft_tokens,
                                  "trace": colors}  # fmt: skip
    torch.manual_seed(seed)
    if interactive:
        _converse(lm, tokenizer, prompt, options)
        return
    inputs = encode(tokenizer, prompt or "", lm.device)
    streamer = None if as_json or colors else TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    begin = time.perf_counter()
    with working("Generating", shown=colors):
        ids = lm.generate(**inputs, streamer=streamer, **options)[0, inputs["input_ids"].shape[1] :]
    seconds = time.perf_counter() - begin
    stats = None if method == "plain" else lm.last_speculation
    if as_json:
        text = tokenizer.decode(ids, skip_special_tokens=True)
        typer.echo(json.dumps({"text": text, "token_ids": ids.tolist(), "dtype": dtype_of(lm),
                               "speculation": None if stats is None else stats.to_dict()}))  # fmt: skip
        return
    if colors and stats is not None:
        typer.echo(str(colored_text(stats.trace, tokenizer)), color=True)
    typer.echo(summary(len(ids), seconds, method, stats, dtype_of(lm)), err=True)


def summary(num_tokens: int, seconds: float, method: str, stats: SpeculationStats | None, dtype: str) -> str:
    """Return one line on a call of `generate()`: tokens, seconds, tokens/s, tau, method and dtype of the weights.

    Args:
        num_tokens: Tokens of the answer.
        seconds: Time of the whole call, preparation such as compilation included.
        method: The method that the user asked for.
        stats: Statistics of the call; None if it was plain.
        dtype: Dtype of the weights.
    """
    speed = num_tokens / seconds
    tau = "" if stats is None else f"tau {shown_tau(stats.mean_accepted_length)}, "
    return f"[{num_tokens} tokens, {seconds:.1f} s, {speed:.1f} tokens/s, {tau}method {method}, {dtype}]"


def _converse(model: Any, tokenizer: Any, first: str | None, options: dict[str, Any]) -> None:
    """Answer messages from stdin as one conversation until the input ends.

    Answers are streamed to stdout; after each answer, a summary is printed on stderr.

    Args:
        model: The target.
        tokenizer: Its tokenizer.
        first: The first message; None reads it from stdin, too.
        options: Arguments of `generate()`.
    """
    messages: list[str] = []
    while True:
        if first is None:
            try:
                message = input("> ")
            except EOFError:
                return
        else:
            message, first = first, None
        if not message.strip():
            continue
        inputs = encode_chat(tokenizer, [*messages, message], model.device)
        streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        begin = time.perf_counter()
        ids = model.generate(**inputs, streamer=streamer, **options)[0, inputs["input_ids"].shape[1] :]
        seconds = time.perf_counter() - begin
        messages += [message, tokenizer.decode(ids, skip_special_tokens=True).strip()]
        speculative = options["speculative"]
        stats, method = (None, "plain") if speculative is None else (model.last_speculation, speculative["method"])
        typer.echo(summary(len(ids), seconds, method, stats, dtype_of(model)), err=True)


def _check_output_options(method: str, *, interactive: bool, colors: bool, as_json: bool) -> None:
    if interactive and as_json:
        raise InvalidConfigError("--interactive cannot be combined with --json.", "Drop one of them.")
    if colors and (interactive or as_json or method == "plain"):
        raise InvalidConfigError(
            "--colors cannot be combined with --interactive, --json or --method plain.", "Drop one of them."
        )


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


def head_for(
    methods: list[str], model: str | None, drafter: str | None, *, assistant: bool = False
) -> DraftHead | None:
    """Load the draft head for a model and check, before the model is loaded, that all methods have what they need.

    Args:
        methods: Values of `speculative=`, or `"plain"`.
        model: Path or Hub id of the model; None is the packaged model.
        drafter: Path or Hub id of the head; None is the model's default head, if it has one.
        assistant: Whether the user has given an assistant model.

    Returns:
        The head; None if none is given and the model has no default head.

    Raises:
        InvalidConfigError: A method does not exist.
        DrafterMismatchError: A method needs a head, or another part such as an assistant model, that is not given; or
            the head is made for another method.
        CheckpointFormatError: The head cannot be read.
    """
    wanted = [method_named(method) for method in methods if method != "plain"]
    known, source = known_methods(), drafter or default_head(model)
    head = None if source is None else load_head(source)
    for method in wanted:
        if method in known and known[method].part:
            if assistant and method == ASSISTANT_METHOD:
                continue
            bench = "Use hf-specdec bench with --assistant PATH_OR_HUB_ID." if method == ASSISTANT_METHOD else ""
            raise DrafterMismatchError(
                f"The method {method!r} needs {known[method].part}, but none is given.",
                bench or "Call model.generate(...) from Python.",
            )
        if method in known and known[method].requires and (head is None or head.method != method):
            given = "none is given" if head is None else f"{source} is a head for {head.method!r}"
            raise DrafterMismatchError(
                f"The method {method!r} needs a draft head, but {given}.", "Give one: --drafter PATH_OR_HUB_ID."
            )
    return head


def dtype_of(model: Any) -> str:
    """Return the name of a model's dtype, without the prefix `torch.`."""
    return str(model.dtype).removeprefix("torch.")
