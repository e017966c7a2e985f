"""Parts of the commands that load models and answer prompts: the draft head, a chat, the summary of an answer."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import typer
from transformers import TextStreamer

from hf_specdec.checkpoints.hub import load_head
from hf_specdec.cli.inputs import ASSISTANT_METHOD
from hf_specdec.cli.published import shipped_heads
from hf_specdec.cli.status import working
from hf_specdec.config import COMBINED
from hf_specdec.drafters.registry import method_named
from hf_specdec.drafters.registry import methods as known_methods
from hf_specdec.errors import DrafterMismatchError
from hf_specdec.generation.loading import default_head, encode, encode_chat
from hf_specdec.heads.base import DraftHead
from hf_specdec.reporting.stats import SpeculationStats, shown_tau
from hf_specdec.viz.text import colored_text


class Streamed(TextStreamer):
    """Streamer that prints an answer to stdout, and closes what was shown until then before its first text."""

    def __init__(self, tokenizer: Any, waiting: ExitStack) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._waiting = waiting

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Print a piece of the answer."""
        if text or stream_end:
            self._waiting.close()
        super().on_finalized_text(text, stream_end)


def answer(
    model: Any, tokenizer: Any, prompt: str, options: dict[str, Any], head: str | None, *, colors: bool, as_json: bool
) -> None:  # fmt: skip
    """Answer a prompt: stream the text to stdout and print a summary on stderr, or print one JSON object.

    Args:
        model: The target.
        tokenizer: Its tokenizer.
        prompt: The prompt.
        options: Arguments of `generate()`.
        head: Path or Hub id of the head that drafts; None if there is none.
        colors: Print the text at the end, coloured by decoding step.
        as_json: Print a JSON object instead of text.
    """
    inputs = encode(tokenizer, prompt, model.device)
    begin = time.perf_counter()
    with ExitStack() as waiting:
        waiting.enter_context(working("Generating", shown=colors))
        streamer = None if as_json or colors else Streamed(tokenizer, waiting)
        ids = model.generate(**inputs, streamer=streamer, **options)[0, inputs["input_ids"].shape[1] :]
    seconds = time.perf_counter() - begin
    stats, method = _statistics(model, options)
    if as_json:
        text = tokenizer.decode(ids, skip_special_tokens=True)
        typer.echo(json.dumps({"text": text, "token_ids": ids.tolist(), "dtype": dtype_of(model), "head": head,
                               "speculation": None if stats is None else stats.to_dict()}))  # fmt: skip
        return
    if colors and stats is not None:
        typer.echo(str(colored_text(stats.trace, tokenizer)), color=True)
    typer.echo(summary(len(ids), seconds, method, stats, dtype_of(model), head), err=True)


def _statistics(model: Any, options: dict[str, Any]) -> tuple[SpeculationStats | None, str]:
    """Return the statistics of the last call, None if it was plain, and the method that was asked for."""
    speculative = options["speculative"]
    return (None, "plain") if speculative is None else (model.last_speculation, speculative["method"])


def summary(
    num_tokens: int, seconds: float, method: str, stats: SpeculationStats | None, dtype: str, head: str | None
) -> str:
    """Return one line on a call of `generate()`: tokens, seconds, tokens/s, tau, method, head, dtype.

    Args:
        num_tokens: Tokens of the answer.
        seconds: Time of the whole call, preparation such as compilation included.
        method: The method that the user asked for.
        stats: Statistics of the call; None if it was plain.
        dtype: Dtype of the weights.
        head: Path or Hub id of the head that drafts; None if there is none.
    """
    speed = num_tokens / seconds
    tau = "" if stats is None else f"tau {shown_tau(stats.mean_accepted_length)}, "
    drafter = "" if head is None else f"head {short_name(head)}, "
    return f"[{num_tokens} tokens, {seconds:.1f} s, {speed:.1f} tokens/s, {tau}method {method}, {drafter}{dtype}]"


def converse(model: Any, tokenizer: Any, first: str | None, options: dict[str, Any], head: str | None) -> None:
    """Answer messages from stdin as one conversation until the input ends.

    Answers are streamed to stdout; after each answer, a summary is printed on stderr.

    Args:
        model: The target.
        tokenizer: Its tokenizer.
        first: The first message; None reads it from stdin, too.
        options: Arguments of `generate()`.
        head: Path or Hub id of the head that drafts; None if there is none.
    """
    messages: list[str] = []
    while True:
        if first is None:
            try:
                message = input("> ")
            except EOFError:
                typer.echo()  # the shell's prompt would stand behind "> "
                return
        else:
            message, first = first, None
        if not message.strip():
            continue
        inputs = encode_chat(tokenizer, [*messages, message], model.device)
        begin = time.perf_counter()
        with ExitStack() as waiting:
            waiting.enter_context(working("Generating", shown=False))
            streamer = Streamed(tokenizer, waiting)
            ids = model.generate(**inputs, streamer=streamer, **options)[0, inputs["input_ids"].shape[1] :]
        seconds = time.perf_counter() - begin
        messages += [message, tokenizer.decode(ids, skip_special_tokens=True).strip()]
        stats, method = _statistics(model, options)
        typer.echo(summary(len(ids), seconds, method, stats, dtype_of(model), head), err=True)


def head_for(
    methods: list[str], model: str | None, drafter: str | None, *, assistant: bool = False, shown: bool = True
) -> DraftHead | None:
    """Load the draft head for a model and check, before the model is loaded, that all methods have what they need.

    Args:
        methods: Values of `speculative=`, or `"plain"`.
        model: Path or Hub id of the model; None is the packaged model.
        drafter: Path or Hub id of the head; None is the model's default head, if it has one: for the packaged model
            the shipped head for the only method that needs one.
        assistant: Whether the user has given an assistant model.
        shown: See `working`.

    Returns:
        The head; None if none is given and the model has no default head.

    Raises:
        InvalidConfigError: A method does not exist.
        DrafterMismatchError: A method needs a head, or another part such as an assistant model, that is not given; or
            the head is made for another method.
        CheckpointFormatError: The head cannot be read.
    """
    wanted = [name for name in (method_named(method, ("plain",)) for method in methods) if name != "plain"]
    known = known_methods()
    needing = {method for method in wanted if method in known and known[method].requires}
    source = drafter or _default_head(model, needing.pop() if len(needing) == 1 else None)
    with nullcontext() if source is None else working(f"Reading the head {source}", shown=shown):
        head = None if source is None else load_head(source)
    for method in wanted:
        if method in known and known[method].part:
            if assistant and method == ASSISTANT_METHOD:
                continue
            raise DrafterMismatchError(
                f"The method {method!r} needs {known[method].part}, but none is given.",
                "Call model.generate(...) from Python.",
            )
        if method in known and known[method].requires and (head is None or head.method != method):
            given = "none is given" if head is None else f"{str(source)!r} is a head for {head.method!r}"
            raise DrafterMismatchError(
                f"The method {method!r} needs a draft head, but {given}.", "Give one: --drafter PATH_OR_HUB_ID."
            )
    return head


def source_of(
    head: DraftHead | None, model: str | None, drafter: str | None, method: str | None = None
) -> str | None:  # fmt: skip
    """Return the path or Hub id of the head that `head_for` loaded; None if it loaded none.

    Args:
        head: The head.
        model: See `head_for`.
        drafter: See `head_for`.
        method: Return None too if this method does not draft with the head.
    """
    if head is None or method not in (None, head.method, *COMBINED):
        return None
    return drafter or _default_head(model, head.method)


def _default_head(model: str | None, method: str | None) -> str | None:
    """Return the path of a model's default head: the shipped head for the method, otherwise the usual one."""
    usual = default_head(model)
    return usual if usual is None else shipped_heads().get(method or "", usual)


def short_name(place: str) -> str:
    """Return the name of a directory without its path; a Hub id as it is."""
    return Path(place).resolve().name if Path(place).is_dir() else place


def dtype_of(model: Any) -> str:
    """Return the name of a model's dtype, without the prefix `torch.`."""
    return str(model.dtype).removeprefix("torch.")
