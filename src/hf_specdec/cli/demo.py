"""Run the comparison of plain and speculative decoding that `hf-specdec demo` shows, and report it as plain lines."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from hf_specdec.cli.status import working
from hf_specdec.generation.loading import encode
from hf_specdec.generation.state import state_of
from hf_specdec.reporting.stats import SpeculationStats, shown_tau

PROMPT = (
    "Correct the grammar and spelling of this paragraph:\n\n"
    "The sun is the star at the center of the solar sistem. It are about 150 million kilometers away from the Earth. "
    "Its light take about eight minutes to reach us. Eight planets travel around the sun. The largest of them is "
    "Jupiter, and the smalest is Mercury. Without the sun, there would be no life on Earth."
)

WARM_UP_TOKENS = 8
"""Tokens that both methods decode before the timed calls, so that one-time work is not timed."""


COMPILED = 'The speculative run also used faster code for each forward (compile="auto"); plain generate() does not.'


@dataclass(slots=True)
class Answer(BaseStreamer):
    """Streamer that keeps an answer in pieces, one per step, with its clock; `write` gets each piece of text."""

    tokenizer: Any
    write: Callable[[str], None] = lambda _: None
    pieces: list[tuple[str, int]] = field(default_factory=list)  # text and number of tokens of each step
    begin: float | None = None  # of the call of generate(); None before it
    end_time: float | None = None  # None before the answer is complete
    ids: list[int] = field(default_factory=list)
    _num_shown: int = 0  # tokens in `pieces`
    _length: int = 0  # characters in `pieces`
    _by_step: bool = False  # whether `end_step` is called; plain generate() does not call it
    _is_prompt: bool = True

    def start(self) -> None:
        """Start the clock."""
        self.begin = time.perf_counter()

    def put(self, value: Tensor) -> None:
        """Take the next token; the first call has the prompt."""
        if self._is_prompt:
            self._is_prompt = False
            return
        self.ids += value.flatten().tolist()
        if not self._by_step:
            self._add()

    def end_step(self) -> None:
        """Make one piece of the tokens since the last call."""
        self._by_step = True
        self._add()

    def end(self) -> None:
        """Stop the clock."""
        self._add(is_last=True)
        self.end_time = time.perf_counter()

    def _add(self, *, is_last: bool = False) -> None:
        """Add the text of new tokens; half a character waits for the rest."""
        text = self.tokenizer.decode(self.ids, skip_special_tokens=True)
        new = text[self._length :]
        if new and (is_last or not new.endswith("�")):
            self.pieces.append((new, len(self.ids) - self._num_shown))
            self._num_shown, self._length = len(self.ids), len(text)
            self.write(new)

    @property
    def seconds(self) -> float:
        """Seconds since the start; of the whole call if it has ended."""
        if self.begin is None:
            return 0.0
        return (time.perf_counter() if self.end_time is None else self.end_time) - self.begin

    @property
    def tokens_per_second(self) -> float:
        """Tokens so far per second; 0 before the first."""
        return len(self.ids) / self.seconds if self.ids else 0.0


@dataclass(frozen=True, slots=True)
class DemoResult:
    """Answer, speeds and statistics of plain and speculative decoding on one prompt."""

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
        speculation=stats,
        is_compiled=any(program.runner is not None for program in state_of(model).programs.values()),
    )


def report(result: DemoResult, console: Console) -> None:
    """Print speeds, tau, whether the token ids are equal, and the steps with the most tokens, without colours."""
    stats = result.speculation
    table = Table("", "tokens/s", "tokens per forward (tau)")
    table.add_row("plain generate()", f"{result.plain_tokens_per_second:.1f}", "1.00")
    table.add_row(
        f"speculative={stats.method!r}", f"{result.speculative_tokens_per_second:.1f}",
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
