"""The live display of `hf-specdec demo` in a terminal: plain and speculative decoding side by side."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from hf_specdec.cli.answers import dtype_of, short_name
from hf_specdec.cli.demo import COMPILED, Answer, DemoResult, run
from hf_specdec.reporting.palette import PALETTE
from hf_specdec.reporting.stats import shown_tau
from hf_specdec.reporting.step_streamer import TimedPiece

WIDEST, NARROWEST = 120, 64
"""Columns of the whole display; in a terminal with fewer than `NARROWEST`, one panel stands above the other."""
FRAMES_PER_SECOND = 10
BORDERS = 4
"""Columns of a panel's borders and padding."""


class Race:
    """Two panels, one per answer: text, clock and tokens per second."""

    def __init__(self, console: Console, plain: Answer, speculative: Answer, method: str) -> None:
        self._console = console
        self._answers = {"plain generate()": plain, f'speculative="{method}"': speculative}
        self._width = min(console.width, WIDEST)
        self._rows = 2  # lines of text of the longest answer so far: panels grow together

    def live(self) -> Live:
        """Return the context manager that draws the panels while its block runs, and leaves the last picture."""
        return Live(
            get_renderable=self.render, console=self._console, refresh_per_second=FRAMES_PER_SECOND,
            vertical_overflow="crop",
        )  # fmt: skip

    def render(self) -> RenderableType:
        """Return the panels as they are now."""
        is_wide = self._width >= NARROWEST
        inside = (self._width // 2 if is_wide else self._width) - BORDERS
        colored = (False, True)
        texts = [colored_pieces(answer.pieces, colored=color) for answer, color in zip(
            self._answers.values(), colored, strict=True)]  # fmt: skip
        lines = [text.wrap(self._console, inside) for text in texts]
        ended = all(answer.end_time is not None for answer in self._answers.values())
        most = max(self._console.height - 8, 4) if is_wide else max(self._console.height // 2 - 5, 3)
        self._rows = max(self._rows, *map(len, lines))
        rows = self._rows if ended else min(self._rows, most)
        panels = [
            Panel(
                Text("\n").join(lines_of[-rows:]) if answer.pieces else Text(waiting(answer), style="dim"),
                title=f"[bold]{name}[/bold]", title_align="left", subtitle=clock(answer), subtitle_align="left",
                height=rows + 2, border_style="green" if answer.end_time is not None else "blue"
                if answer.is_started else "dim",
            )
            for (name, answer), lines_of in zip(self._answers.items(), lines, strict=True)
        ]  # fmt: skip
        if not is_wide:
            return Group(*panels)
        grid = Table.grid()
        for _ in panels:
            grid.add_column(width=self._width // 2)
        grid.add_row(*panels)
        return grid


def waiting(answer: Answer) -> str:
    """Return the text of a panel without tokens."""
    return "reading the prompt" if answer.is_started else "runs after the other, to have the machine to itself"


def clock(answer: Answer) -> str:
    """Return time, tokens and tokens per second of an answer."""
    if not answer.is_started:
        return "waiting"
    return f"{answer.seconds:.1f} s · {answer.num_tokens} tokens · {answer.tokens_per_second:.1f} tokens/s"


def colored_pieces(pieces: Sequence[TimedPiece], *, colored: bool) -> Text:
    """Return pieces of text as one text; each piece of several tokens gets the next colour."""
    text, number = Text(), 0
    for piece in list(pieces):
        several = colored and piece.num_tokens > 1
        text.append(piece.text, style=PALETTE[number % len(PALETTE)] if several else None)
        number += several
    text.rstrip()
    return text


def show_race(
    model: Any, tokenizer: Any, prompt: str, settings: Mapping[str, Any], head: str | None, given: Sequence[str],
    console: Console,
) -> None:  # fmt: skip
    """Run the comparison, draw both answers while they grow, and print what it shows.

    Args:
        model: A model with `SpeculativeGenerationMixin`; call `prepare` first.
        tokenizer: Its tokenizer.
        prompt: The prompt.
        settings: `method` and `max_new_tokens` of `run`.
        head: See `conclude`.
        given: See `conclude`.
        console: The terminal.
    """
    answers = Answer(tokenizer), Answer(tokenizer)
    with Race(console, *answers, settings["method"]).live():
        result = run(model, tokenizer, prompt, **settings, plain=answers[0], speculative=answers[1])
    conclude(result, answers, dtype_of(model), head, given, console)


def conclude(
    result: DemoResult, answers: Sequence[Answer], dtype: str, head: str | None, given: Sequence[str], console: Console
) -> None:
    """Print what the comparison shows, and three commands to try next.

    Args:
        result: The comparison.
        answers: The plain and the speculative answer.
        dtype: Dtype of the weights.
        head: Path or Hub id of the head that drafts; None if there is none.
        given: Options of the command that select model and head, for the commands to try.
        console: Where to print.
    """
    stats, (plain, speculative) = result.speculation, answers
    ratio, width = result.speed_up, min(console.width, WIDEST)
    faster = f"[bold green]{ratio:.1f}x as fast[/]" if ratio >= 1 else f"[bold yellow]slower here: {ratio:.2f}x[/]"
    same = "the same token ids" if result.ids_equal else f"[yellow]different token ids[/] (a near-tie in {dtype})"
    lines = [
        f"\n{faster}: {plain.seconds:.1f} s plain, {speculative.seconds:.1f} s speculative; {same}.",
        f"Text in one colour came from one forward of the model: {stats.num_target_forwards} forwards, "
        f"{shown_tau(stats.mean_accepted_length)} tokens each (tau). Plain decoding needs one forward per token.",
        f"{COMPILED if result.is_compiled else ''} Weights in {dtype}; preparation is not timed.".strip(),
        f"Draft head: {escape(short_name(head)) if head else 'none'}.",
        "\n[bold]Try next[/bold]",
    ]
    for line in lines:
        console.print(line, highlight=False, width=width)
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
