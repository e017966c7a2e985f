"""The comparison of plain and speculative decoding that `hf-specdec demo` shows: a race in a terminal, else lines."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from torch import Tensor

from hf_specdec.bench.machine import OtherProcesses, is_disturbed
from hf_specdec.cli.answers import dtype_of, short_name
from hf_specdec.cli.status import working
from hf_specdec.generation.loading import encode
from hf_specdec.generation.state import state_of
from hf_specdec.reporting.stats import SpeculationStats, shown_tau
from hf_specdec.viz.live import StepStreamer
from hf_specdec.viz.text import ColoredText, Piece

COMPILED_NOTE = (
    'The speculative run also used faster code for each forward (compile="auto"); plain generate() does not.'
)

WIDEST, NARROWEST = 120, 64
"""Columns of the whole race; in a terminal with fewer than `NARROWEST`, one panel stands above the other."""


class TimedAnswer(StepStreamer):
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

    def add(self, piece: Piece) -> None:
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

    @property
    def clock(self) -> str:
        """Time, tokens and tokens per second so far."""
        if not self.is_started:
            return "waiting"
        return f"{self.seconds:.1f} s · {self.num_tokens} tokens · {self.tokens_per_second:.1f} tokens/s"

    def text(self, *, colored: bool) -> Text:
        """Return the text so far; if it is to be coloured, each piece of several tokens gets the next colour."""
        if not self.pieces:
            waits = "reading the prompt" if self.is_started else "runs after the other, to have the machine to itself"
            return Text(waits, style="dim")
        text = Text()
        for piece, color in ColoredText(tuple(self.pieces)).colors():
            text.append(piece.text, style=color if colored else None)
        text.rstrip()
        return text


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
    others_cores: float  # that other processes used meanwhile, if they disturbed the calls

    @property
    def speed_up(self) -> float:
        """Ratio of the tokens per second of speculative to plain decoding."""
        return self.speculative_tokens_per_second / self.plain_tokens_per_second

    @property
    def disturbance(self) -> str:
        """What other processes did to these times; empty if they did nothing."""
        used = f"Other processes used {self.others_cores:.1f} cores meanwhile"
        return f"{used}: these times say little. Run it again when they are done." if self.others_cores else ""

    def to_dict(self) -> dict[str, Any]:
        """Return the speed-up and all fields except `pieces` as JSON-serialisable values."""
        values = {**asdict(self), "speed_up": self.speed_up, "speculation": self.speculation.to_dict()}
        del values["pieces"]
        return values


def prepare(model: Any, tokenizer: Any, prompt: str, method: str, max_new_tokens: int, *, shown: bool) -> None:
    """Do the one-time work of both methods, such as compilation, and decode a few tokens with each."""
    inputs = encode(tokenizer, prompt, model.device)
    with working("Preparing, once per process: fast kernels, time per step", shown=shown):
        model.warmup(method, prompt_length=inputs["input_ids"].shape[1])
    with working("Warming up both methods", shown=shown):
        for speculative in (None, method):
            few = min(8, max_new_tokens)
            model.generate(**inputs, max_new_tokens=few, do_sample=False, speculative=speculative)


def run(
    model: Any, tokenizer: Any, prompt: str, method: str, max_new_tokens: int,
    plain: TimedAnswer | None = None, speculative: TimedAnswer | None = None,
) -> DemoResult:  # fmt: skip
    """Answer a prompt by greedy decoding, first plainly, then speculatively; compare token ids and speeds.

    The calls run one after the other, because they would slow each other down at the same time. Give both streamers
    or none, so that both times include the same work.
    """
    inputs = encode(tokenizer, prompt, model.device)
    length, others, start = inputs["input_ids"].shape[1], OtherProcesses(), time.perf_counter()

    def timed(streamer: TimedAnswer | None, **options: Any) -> tuple[Tensor, float]:
        if streamer is not None:
            streamer.start()
        begin = time.perf_counter()
        ids = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False, streamer=streamer, **options)
        answer = ids[0, length:]
        return answer, len(answer) / (time.perf_counter() - begin)

    plain_ids, plain_speed = timed(plain, speculative=None)
    speculative_ids, speculative_speed = timed(speculative, speculative=method)
    cores, stats = others.cores(), model.last_speculation
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
        others_cores=cores or 0.0 if is_disturbed(cores, time.perf_counter() - start) else 0.0,
    )


def show_lines(
    model: Any, tokenizer: Any, prompt: str, method: str, max_new_tokens: int, head: str | None, console: Console
) -> None:
    """Run the comparison, print the speculative answer as it grows, then the report; for files and pipes."""
    plain, speculative = TimedAnswer(tokenizer), TimedAnswer(tokenizer, write=partial(typer.echo, nl=False))
    result = run(model, tokenizer, prompt, method, max_new_tokens, plain, speculative)
    typer.echo()
    stats, tau = result.speculation, shown_tau(result.speculation.mean_accepted_length)
    table = Table("", "tokens/s", "tokens per forward (tau)")
    table.add_row("plain generate()", f"{result.plain_tokens_per_second:.1f}", "1.00")
    table.add_row(f"speculative={method!r}", f"{result.speculative_tokens_per_second:.1f}", tau)
    console.print(table)
    console.print(f"speed-up: {result.speed_up:.2f}x   tau: {tau}", highlight=False)
    console.print(f"token ids equal: {'yes' if result.ids_equal else 'no'}")
    best = sorted(zip(stats.accepted_per_step[0], result.pieces, strict=True), key=lambda step: -step[0])[:5]
    console.print("steps with the most tokens (tokens per target forward, text):", highlight=False)
    for count, piece in best:
        console.print(f"  {count}  {piece!r}", markup=False, highlight=False)
    if result.is_compiled:
        console.print(COMPILED_NOTE, highlight=False)
    if result.disturbance:
        console.print(result.disturbance, highlight=False)
    console.print(f"weights in {dtype_of(model)}, head: {head or 'none'}", markup=False, soft_wrap=True)


class RacePanels:
    """Two panels, one per answer: text, clock and tokens per second."""

    def __init__(self, console: Console, plain: TimedAnswer, speculative: TimedAnswer, method: str) -> None:
        self._console = console
        self._answers = {"plain generate()": plain, f'speculative="{method}"': speculative}
        self._width = min(console.width, WIDEST)
        self._rows = 2  # lines of text of the longest answer so far: panels grow together

    def render(self) -> RenderableType:
        """Return the panels as they are now."""
        is_wide = self._width >= NARROWEST
        inside = (self._width // 2 if is_wide else self._width) - 4  # borders and padding
        plain, speculative = self._answers.values()
        texts = plain.text(colored=False), speculative.text(colored=True)
        lines = [text.wrap(self._console, inside) for text in texts]
        ended = all(answer.end_time is not None for answer in self._answers.values())
        most = max(self._console.height - 8, 4) if is_wide else max(self._console.height // 2 - 5, 3)
        self._rows = max(self._rows, *(len(lines_of) for lines_of in lines))
        rows = self._rows if ended else min(self._rows, most)
        panels = []
        for (name, answer), lines_of in zip(self._answers.items(), lines, strict=True):
            border = "green" if answer.end_time is not None else "blue" if answer.is_started else "dim"
            panels.append(Panel(
                Text("\n").join(lines_of[-rows:]), title=f"[bold]{name}[/bold]", title_align="left",
                subtitle=answer.clock, subtitle_align="left", height=rows + 2, border_style=border,
            ))  # fmt: skip
        if not is_wide:
            return Group(*panels)
        grid = Table.grid()
        for _ in panels:
            grid.add_column(width=self._width // 2)
        grid.add_row(*panels)
        return grid


def show_race(
    model: Any, tokenizer: Any, prompt: str, method: str, max_new_tokens: int, head: str | None, given: Sequence[str],
    console: Console,
) -> None:  # fmt: skip
    """Run the comparison, draw both answers while they grow, and print what it shows and what to try next."""
    plain, speculative = TimedAnswer(tokenizer), TimedAnswer(tokenizer)
    panels = RacePanels(console, plain, speculative, method)
    drawn: dict[str, Any] = {"refresh_per_second": 10, "vertical_overflow": "crop"}
    with Live(get_renderable=panels.render, console=console, **drawn):
        result = run(model, tokenizer, prompt, method, max_new_tokens, plain, speculative)
    stats, ratio, dtype = result.speculation, result.speed_up, dtype_of(model)
    faster = f"[bold green]{ratio:.1f}x as fast[/]" if ratio >= 1 else f"[bold yellow]slower here: {ratio:.2f}x[/]"
    same = "the same token ids" if result.ids_equal else f"[yellow]different token ids[/] (a near-tie in {dtype})"
    for line in (
        f"\n{faster}: {plain.seconds:.1f} s plain, {speculative.seconds:.1f} s speculative; {same}.",
        f"Text in one colour came from one forward of the model: {stats.num_target_forwards} forwards, "
        f"{shown_tau(stats.mean_accepted_length)} tokens each (tau). Plain decoding needs one forward per token.",
        f"{COMPILED_NOTE if result.is_compiled else ''} Weights in {dtype}; preparation is not timed.".strip(),
        f"Draft head: {escape(short_name(head)) if head else 'none'}.",
        *([f"[yellow]{result.disturbance}[/]"] if result.disturbance else []),
        "\n[bold]Try next[/bold]",
    ):
        console.print(line, highlight=False, width=min(console.width, WIDEST))
    options = "".join(f" {shlex.quote(word)}" for word in given)
    positional = options.replace(" --model ", " ", 1)  # `doctor` takes the model as an argument
    commands = (
        (f"hf-specdec generate --interactive{options}", "chat with the model"),
        (f"hf-specdec generate --colors 'Why is the sky blue?'{options}", "new text, step by step"),
        (f"hf-specdec doctor{positional}", "what is fastest here"),
    )
    longest = max(len(command) for command, _ in commands)
    for command, purpose in commands:
        console.print(f"  [cyan]{command.ljust(longest)}[/cyan]  {purpose}", highlight=False, soft_wrap=True)
