"""What commands share that answer prompts: loading a model and its head, an answer with its summary, a chat."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import typer
from transformers import TextStreamer

from hf_specdec.checkpoints.hub import load_head
from hf_specdec.cli.heads import shipped_heads
from hf_specdec.cli.parameters import ASSISTANT_METHOD
from hf_specdec.cli.status import working
from hf_specdec.config import COMBINED
from hf_specdec.drafters.registry import method_named
from hf_specdec.drafters.registry import methods as known_methods
from hf_specdec.errors import DrafterMismatchError
from hf_specdec.generation.loading import default_head, encode_chat, load_model
from hf_specdec.heads.head import DraftHead
from hf_specdec.reporting.stats import shown_tau
from hf_specdec.viz.text import colored_text


def head_for(
    methods: list[str], model: str | None, drafter: str | None, *, assistant: bool = False, shown: bool = True
) -> tuple[DraftHead | None, str | None]:
    """Load the draft head for a model and check, before the model is loaded, that all methods have what they need.

    Without a `drafter` it is the model's default head, if it has one: for the packaged model (None) the shipped head
    for the only method that needs one. Returns the head and its path or Hub id, or None and None.
    """
    wanted = [name for name in (method_named(method, ("plain",)) for method in methods) if name != "plain"]
    known = known_methods()
    needing = {method for method in wanted if method in known and known[method].requires}
    source = drafter or default_head(model)
    if source is not None and not drafter and len(needing) == 1:
        source = shipped_heads().get(needing.pop(), source)
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
    return head, source


def loaded_with_head(
    methods: list[str],
    model: str | None,
    drafter: str | None,
    dtype: str,
    *,
    shown: bool,
    round_activations: bool = False,
) -> tuple[Any, Any, str | None]:
    """Load model, tokenizer and head; return the path or Hub id of the head, None if no method drafts with it."""
    head, source = head_for(methods, model, drafter, shown=shown)
    with working("Loading the model", shown=shown):
        lm, tokenizer = load_model(model, head, dtype, round_activations=round_activations)
    is_used = head is not None and any(method in (head.method, *COMBINED) for method in methods)
    return lm, tokenizer, source if is_used else None


def short_name(place: str) -> str:
    """Return the name of a directory without its path; a Hub id unchanged."""
    return Path(place).resolve().name if Path(place).is_dir() else place


def dtype_of(model: Any) -> str:
    """Return the name of a model's dtype, without the prefix `torch.`."""
    return str(model.dtype).removeprefix("torch.")


class _Streamed(TextStreamer):
    """Streamer that prints an answer to stdout, and closes what was shown until then before its first text."""

    def __init__(self, tokenizer: Any, waiting: ExitStack) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._waiting = waiting

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Print a piece of the answer."""
        if text or stream_end:
            self._waiting.close()
        super().on_finalized_text(text, stream_end)


def _answered(
    model: Any, tokenizer: Any, texts: list[str], options: dict[str, Any], head: str | None, *, streamed: bool = True,
    shown: bool = False,
) -> tuple[Any, str]:  # fmt: skip
    """Answer a conversation; return the new ids, and a line with tokens, seconds, tau, method, head and dtype."""
    inputs = encode_chat(tokenizer, texts, model.device)
    begin = time.perf_counter()
    with ExitStack() as waiting:
        waiting.enter_context(working("Generating", shown=shown))
        streamer = _Streamed(tokenizer, waiting) if streamed else None
        ids = model.generate(**inputs, streamer=streamer, **options)[0, inputs["input_ids"].shape[1] :]
    seconds = time.perf_counter() - begin
    tau, method = "", "plain"
    if options["speculative"] is not None:
        tau = f"tau {shown_tau(model.last_speculation.mean_accepted_length)}, "
        method = options["speculative"]["method"]
    drafter = "" if head is None else f"head {short_name(head)}, "
    speed = f"{seconds:.1f} s, {len(ids) / seconds:.1f} tokens/s"
    return ids, f"[{len(ids)} tokens, {speed}, {tau}method {method}, {drafter}{dtype_of(model)}]"


def answer(
    model: Any, tokenizer: Any, prompt: str, options: dict[str, Any], head: str | None, *, colors: bool, as_json: bool
) -> None:
    """Answer a prompt: stream the text to stdout and print a summary on stderr, or print one JSON object."""
    is_streamed = not as_json and not colors
    ids, summary = _answered(model, tokenizer, [prompt], options, head, streamed=is_streamed, shown=colors)
    stats = None if options["speculative"] is None else model.last_speculation
    if as_json:
        text = tokenizer.decode(ids, skip_special_tokens=True)
        found = {"text": text, "token_ids": ids.tolist(), "dtype": dtype_of(model), "head": head}
        typer.echo(json.dumps({**found, "speculation": None if stats is None else stats.to_dict()}))
        return
    if colors:
        assert stats is not None, "refused together with the method plain"
        typer.echo(str(colored_text(stats.trace, tokenizer)), color=True)
    typer.echo(summary, err=True)


def converse(model: Any, tokenizer: Any, first: str | None, options: dict[str, Any], head: str | None) -> None:
    """Answer messages from stdin as one conversation until the input ends; arguments as for `answer`.

    Answers are streamed to stdout; after each answer, a summary is printed on stderr. If `first`, the first message,
    is None, it is read from stdin, too.
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
        ids, summary = _answered(model, tokenizer, [*messages, message], options, head)
        messages += [message, tokenizer.decode(ids, skip_special_tokens=True).strip()]
        typer.echo(summary, err=True)
