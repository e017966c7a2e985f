"""Streamers that show an answer while it is generated or record it by decoding step, and a replay of recorded runs.

The replay moves by CSS: no kernel and no JavaScript are needed.
"""

from __future__ import annotations

import html
import sys
import time
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from hf_specdec.reporting.palette import PALETTE
from hf_specdec.reporting.stats import shown_tau
from hf_specdec.viz.text import ColoredText, Piece


def has_kernel() -> bool:
    """Whether this process is a Jupyter kernel, so that outputs can be updated and widgets shown."""
    # IPython is imported already if this is a kernel
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return getattr(shell, "kernel", None) is not None


class StepStreamer(BaseStreamer):
    """Streamer that keeps the text of one sequence in pieces, one per decoding step, with their times.

    Works with and without `speculative=`; in plain decoding every token is a step. Subclasses override `add`.

    Args:
        tokenizer: The model's tokenizer; special tokens are left out.

    Attributes:
        pieces: The text by step; the first piece is the prefill's token.
        begin: Time at which the clock started (`time.perf_counter`): when the streamer was made, or at `start()`.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.pieces: list[Piece] = []
        self.begin = time.perf_counter()
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._text = ""
        self._num_pending = 0  # tokens of the current step
        self._has_prompt = self._ends_steps = False

    def start(self) -> None:
        """Start the clock again."""
        self.begin = time.perf_counter()

    def add(self, piece: Piece) -> None:
        """Called with each piece after it was added to `pieces`; subclasses show it there."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all pieces, including the one that the prefill emits."""
        return sum(piece.num_tokens for piece in self.pieces)

    @property
    def seconds(self) -> float:
        """Seconds from the start to the last piece."""
        return self.pieces[-1].seconds if self.pieces else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second so far, prompt processing included."""
        return self.num_tokens / self.seconds if self.pieces else 0.0

    @property
    def tau(self) -> float:
        """Tokens per forward so far, without the prefill and its token; 0.0 before the first step."""
        steps = len(self.pieces) - 1
        return (self.num_tokens - self.pieces[0].num_tokens) / steps if steps > 0 else 0.0

    def put(self, value: Tensor) -> None:
        """Take the prompt's ids `[1, P]` (the first call) or one new token `[1]`.

        Raises:
            ValueError: The batch has several rows.
        """
        if value.shape[0] > 1:
            name = type(self).__name__
            raise ValueError(f"{name} takes one sequence, got a batch of {value.shape[0]}: generate one by one.")
        if not self._has_prompt:
            self._has_prompt = True
            return
        self._tokens.extend(value.flatten().tolist())
        self._num_pending += value.numel()
        if not self._ends_steps:  # the prefill's token, or plain decoding, which calls no `end_step`
            self._end_piece()

    def end_step(self) -> None:
        """Close a step; called after each step of speculative decoding."""
        self._ends_steps = True
        if self._num_pending:
            self._end_piece()

    def end(self) -> None:
        """Add what the tokenizer could not decode to whole characters to the last piece."""
        rest = self._decoded()[len(self._text) :]
        if rest and self.pieces:
            self.pieces[-1] = replace(self.pieces[-1], text=self.pieces[-1].text + rest)
            self.add(replace(self.pieces[-1], text=rest, num_tokens=0))

    def _end_piece(self) -> None:
        # a character may have several tokens: until its last one arrives, it decodes to U+FFFD
        text = self._decoded().rstrip("\ufffd")
        seconds = time.perf_counter() - self.begin
        piece = Piece(text[len(self._text) :], self._num_pending, len(self.pieces), seconds)
        self._text, self._num_pending = text, 0
        self.pieces.append(piece)
        self.add(piece)

    def _decoded(self) -> str:
        return str(self._tokenizer.decode(self._tokens, skip_special_tokens=True))


REFRESH_SECONDS = 0.1
"""Minimum seconds between two updates of a notebook's output: an update costs about a millisecond."""


class LiveStreamer(StepStreamer):
    """Streamer that shows the answer while it is generated, and tokens per second and tau so far.

    In a notebook, the output is updated in place, and text that arrived in one step shares a colour. Elsewhere the
    text is written to stdout as it arrives, followed by a line with the final numbers. Works with and without
    `speculative=`, for one sequence. The clock starts when the streamer is made, so make it in the call:
    `model.generate(**inputs, streamer=LiveStreamer(tokenizer), speculative="auto")`.

    Args:
        tokenizer: The model's tokenizer; special tokens are not shown.
        name: Label of the run; "" for none.
    """

    def __init__(self, tokenizer: Any, name: str = "") -> None:
        super().__init__(tokenizer)
        self.name = name
        self._shown = time.perf_counter()
        self._display: Any = None
        if has_kernel():
            self._display = sys.modules["IPython"].display.display(self, display_id=True)

    @property
    def summary(self) -> str:
        """Name, tokens, seconds, speed and tau so far, as one line."""
        label = f"{self.name}: " if self.name else ""
        speed = f"{self.seconds:.1f} s, {self.tokens_per_second:.1f} tokens/s"
        return f"{label}{self.num_tokens} tokens, {speed}, tau {shown_tau(self.tau)}"

    def add(self, piece: Piece) -> None:
        """Show a piece, in a notebook at most every 0.1 s."""
        if self._display is None:
            sys.stdout.write(piece.text)
            sys.stdout.flush()
        elif time.perf_counter() - self._shown >= REFRESH_SECONDS:
            self._show()

    def end(self) -> None:
        """Show the final text and numbers."""
        super().end()
        self._show()
        if self._display is None:
            sys.stdout.write(f"\n{self.summary}\n")

    def _show(self) -> None:
        if self._display is not None:
            self._display.update(self)
            self._shown = time.perf_counter()

    def __repr__(self) -> str:
        return f"{self._text}\n{self.summary}"

    def _repr_html_(self) -> str:
        text = ColoredText(tuple(piece for piece in self.pieces if piece.text))
        return f"{text._repr_html_()}<p><b>{html.escape(self.summary)}</b></p>"


STYLE = """<style>
@keyframes specdec-appear {from {opacity: 0}}
@keyframes specdec-grow {from {width: 0}}
.specdec-race span, .specdec-race b.end {animation: specdec-appear 1ms backwards}
.specdec-race i {display: block; height: 0.5em; border-radius: 2px; animation: specdec-grow linear backwards}
@media (prefers-reduced-motion: reduce) {.specdec-race * {animation: none !important}}
</style>"""
"""Only this sheet hides text before its time: a page that removes it shows the final state."""

CELL = "text-align:left;vertical-align:top;width:50%;line-height:1.6"
"""Style of the table's cells; notebooks align them to the right otherwise."""


@dataclass(frozen=True, slots=True)
class Race:
    """Finished runs to compare; notebooks replay them side by side, `str()` lists their numbers."""

    runs: tuple[LiveStreamer, ...]
    speed: float = 1.0

    def __str__(self) -> str:
        return "\n".join(run.summary for run in self.runs)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        longest = max(run.seconds for run in self.runs)
        heads, bars, texts = "", "", ""
        for number, run in enumerate(self.runs):
            color, seconds = PALETTE[number % len(PALETTE)], run.seconds / self.speed
            label = f"{run.seconds:.1f} s, {run.tokens_per_second:.1f} tokens/s, {run.tau:.2f} tokens per forward"
            pieces = "".join(
                f'<span style="animation-delay:{piece.seconds / self.speed:.2f}s'
                + (f";border-bottom:2px solid {color}" if piece.num_tokens > 1 else "")
                + f'">{html.escape(piece.text)}</span>'
                for piece in run.pieces
            )
            heads += f'<th style="{CELL}">{html.escape(run.name)}</th>'
            bars += (
                f'<td style="{CELL}"><i style="width:{100 * run.seconds / longest:.0f}%;background:{color};'
                f'animation-duration:{seconds:.2f}s"></i><b class="end" style="animation-delay:{seconds:.2f}s">{label}'
                "</b></td>"
            )
            texts += f'<td style="{CELL};white-space:pre-wrap">{pieces}</td>'
        pace = "in real time" if self.speed == 1 else f"at {self.speed:g} times the recorded speed"
        return (
            f'{STYLE}<details open class="specdec-race"><summary>Replayed {pace}; close and open to see it again'
            f"</summary><table><tr>{heads}</tr><tr>{bars}</tr><tr>{texts}</tr></table></details>"
        )


def race(*runs: LiveStreamer, speed: float = 1.0) -> Race:
    """Replay finished runs side by side; text that arrived in one step with other tokens is underlined.

    Args:
        *runs: Streamers of finished calls, each with a name.
        speed: Factor on the recorded speed.

    Raises:
        ValueError: No runs, a run without text, or a `speed` that is not positive.
    """
    if not runs or not all(run.pieces for run in runs) or speed <= 0:
        given = ", ".join(f"{run.name or 'a run'} with {run.num_tokens} tokens" for run in runs) or "no runs"
        raise ValueError(
            f"race() needs finished runs and a positive speed, got {given} and speed={speed}. "
            "First pass each streamer to generate()."
        )
    return Race(runs, speed)
