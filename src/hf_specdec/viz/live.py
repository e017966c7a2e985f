"""A streamer that shows text while it is generated, coloured by step, with live speed and tau."""

from __future__ import annotations

import html
import sys
import time
from typing import Any

from hf_specdec.reporting.stats import shown_tau
from hf_specdec.reporting.step_streamer import StepStreamer, TimedPiece
from hf_specdec.viz.kernel import notebook_display
from hf_specdec.viz.text import ColoredText, Piece

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
        self.name, self._shown = name, time.perf_counter()
        self._display: Any = notebook_display(self)

    @property
    def summary(self) -> str:
        """Name, tokens, seconds, speed and tau so far, as one line."""
        label = f"{self.name}: " if self.name else ""
        return (f"{label}{self.num_tokens} tokens, {self.seconds:.1f} s, {self.tokens_per_second:.1f} tokens/s, "
                f"tau {shown_tau(self.tau)}")  # fmt: skip

    def add(self, piece: TimedPiece) -> None:
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
        pieces = tuple(Piece(one.text, one.num_tokens, step) for step, one in enumerate(self.pieces) if one.text)
        return f"{ColoredText(pieces)._repr_html_()}<p><b>{html.escape(self.summary)}</b></p>"
