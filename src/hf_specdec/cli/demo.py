"""Run the comparison of plain and speculative decoding that `hf-specdec demo` shows, and report it as plain lines."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from hf_specdec.cli.answers import dtype_of
from hf_specdec.cli.status import working
from hf_specdec.generation.loading import encode
from hf_specdec.generation.state import state_of
from hf_specdec.reporting.stats import SpeculationStats, shown_tau
from hf_specdec.reporting.step_streamer import StepStreamer, TimedPiece

WARM_UP_TOKENS = 8
"""Tokens that both methods decode before the timed calls, so that one-time work is not timed."""


COMPILED = 'The speculative run also used faster code for each forward (compile="auto"); plain generate() does not.'


class Answer(StepStreamer):
    """Streamer that keeps an answer with a clock that can be read while it runs; `write` gets each piece of text."""

    def __init__(self, tokenizer: Any, write: Callable[[str], None] = lambda _: None) -> None:
        super().__init__(tokenizer)
        self.write = write
        self.is_started = False
        self.end_time: float | None = None  # None before the answer is complete

    def start(self) -> None:
        """Start the clock."""
        super().start()
        self.is_started = True

    def add(self, piece: TimedPiece) -> None:
        """Write the text of a piece."""
        self.write(piece.text)

    def end(self) -> None:
        """Stop the clock."""
        super().end()
        self.end_time = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds since the start; of the whole call if it has ended."""
        if not self.is_started:
            return 0.0
        return (time.perf_counter() if self.end_time is None else self.end_time) - self.begin


@dataclass(frozen=True, slots=True)
class DemoResult:
    """Answer, speeds and statistics of plain and speculative decoding on one prompt."""

    method: str  # as requested
    text: str  # the speculative answer
    pieces: tuple[str, ...]  # that answer without its first token, one piece per verify forward
    ids_equal: bool  # whether both answers have the same token ids
    plain_tokens_per_second: float
    speculative_tokens_per_second: float
    speculation: SpeculationStats
    is_compiled: bool  # whether the speculative call ran a compiled or captured forward; plain generate() does not

    @property
    def speed_up(self) -> float:
        """Ratio of the tokens per second of speculative to plain decoding."""
        return self.speculative_tokens_per_second / self.plain_tokens_per_second

    def to_dict(self) -> dict[str, Any]:
        """Return the speed-up and all fields except `pieces` as JSON-serialisable values."""
        return {
            "method": self.method,
            "text": self.text,
            "ids_equal": self.ids_equal,
            "plain_tokens_per_second": self.plain_tokens_per_second,
            "speculative_tokens_per_second": self.speculative_tokens_per_second,
            "speed_up": self.speed_up,
            "speculation": self.speculation.to_dict(),
            "is_compiled": self.is_compiled,
        }


def prepare(model: Any, tokenizer: Any, prompt: str, *, method: str, max_new_tokens: int, shown: bool) -> None:
    """Do the one-time work of both methods, such as compilation, and decode a few tokens with each.

    Args:
        model: A model with `SpeculativeGenerationMixin`.
        tokenizer: Its tokenizer.
        prompt: The prompt.
        method: Method of the speculative call.
        max_new_tokens: Maximum number of tokens of the timed answers.
        shown: Show on stderr what is being done.
    """
    inputs = encode(tokenizer, prompt, model.device)
    with working("Preparing, once per process: fast kernels, time per step", shown=shown):
        model.warmup(method, prompt_length=inputs["input_ids"].shape[1])
    with working("Warming up both methods", shown=shown):
        for speculative in (None, method):
            few = min(WARM_UP_TOKENS, max_new_tokens)
            model.generate(**inputs, max_new_tokens=few, do_sample=False, speculative=speculative)


def run(
    model: Any, tokenizer: Any, prompt: str, *, method: str, max_new_tokens: int,
    plain: Answer | None = None, speculative: Answer | None = None,
) -> DemoResult:  # fmt: skip
    """Answer a prompt by greedy decoding, first plainly, then speculatively; compare token ids and speeds.

    The calls run one after the other, because they would slow each other down at the same time.

    Args:
        model: A model with `SpeculativeGenerationMixin`; call `prepare` first.
        tokenizer: Its tokenizer.
        prompt: The prompt.
        method: Method of the speculative call.
        max_new_tokens: Maximum number of tokens of each answer.
        plain: Streamer of the plain answer. Give both streamers or none, so that both times include the same work.
        speculative: Streamer of the speculative answer.
    """
    inputs = encode(tokenizer, prompt, model.device)
    length = inputs["input_ids"].shape[1]

    def timed(streamer: Answer | None, **options: Any) -> tuple[Tensor, float]:
        if streamer is not None:
            streamer.start()
        begin = time.perf_counter()
        ids = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False, streamer=streamer, **options)
        answer = ids[0, length:]
        return answer, len(answer) / (time.perf_counter() - begin)

    plain_ids, plain_speed = timed(plain, speculative=None)
    speculative_ids, speculative_speed = timed(speculative, speculative=method)
    stats: SpeculationStats = model.last_speculation
    ends = [1, *(1 + sum(stats.accepted_per_step[0][: i + 1]) for i in range(stats.num_target_forwards))]
    return DemoResult(
        text=tokenizer.decode(speculative_ids, skip_special_tokens=True),
        pieces=tuple(tokenizer.decode(speculative_ids[a:b]) for a, b in pairwise(ends)),
        ids_equal=torch.equal(plain_ids, speculative_ids),
        plain_tokens_per_second=plain_speed,
        speculative_tokens_per_second=speculative_speed,
        method=method,
        speculation=stats,
        is_compiled=any(program.runner is not None for program in state_of(model).programs.values()),
    )


def show_lines(
    model: Any, tokenizer: Any, prompt: str, settings: Mapping[str, Any], head: str | None, console: Console
) -> None:
    """Run the comparison, print the speculative answer as it grows, then the report; for files and pipes.

    Args:
        model: A model with `SpeculativeGenerationMixin`; call `prepare` first.
        tokenizer: Its tokenizer.
        prompt: The prompt.
        settings: Further arguments of `run`.
        head: Path or Hub id of the head that drafts; None if there is none.
        console: Where to print the report.
    """
    plain, speculative = Answer(tokenizer), Answer(tokenizer, write=partial(typer.echo, nl=False))
    result = run(model, tokenizer, prompt, **settings, plain=plain, speculative=speculative)
    typer.echo()
    report(result, console)
    console.print(f"weights in {dtype_of(model)}, head: {head or 'none'}", markup=False, soft_wrap=True)


def report(result: DemoResult, console: Console) -> None:
    """Print speeds, tau, whether the token ids are equal, and the steps with the most tokens, without colours."""
    stats = result.speculation
    table = Table("", "tokens/s", "tokens per forward (tau)")
    table.add_row("plain generate()", f"{result.plain_tokens_per_second:.1f}", "1.00")
    table.add_row(
        f"speculative={result.method!r}", f"{result.speculative_tokens_per_second:.1f}",
        shown_tau(stats.mean_accepted_length),
    )  # fmt: skip
    console.print(table)
    console.print(f"speed-up: {result.speed_up:.2f}x   tau: {shown_tau(stats.mean_accepted_length)}", highlight=False)
    console.print(f"token ids equal: {'yes' if result.ids_equal else 'no'}")
    best = sorted(zip(stats.accepted_per_step[0], result.pieces, strict=True), key=lambda step: -step[0])[:5]
    console.print("steps with the most tokens (tokens per target forward, text):", highlight=False)
    for count, piece in best:
        console.print(f"  {count}  {piece!r}", markup=False, highlight=False)
    if result.is_compiled:
        console.print(COMPILED, highlight=False)
