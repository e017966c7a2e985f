"""A streamer that shows text while it is generated, coloured by step, with live speed and tau."""

from __future__ import annotations

import html
import sys
import time
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from hf_specdec.reporting.stats import shown_tau
from hf_specdec.viz.kernel import notebook_display
from hf_specdec.viz.text import ColoredText, Piece

REFRESH_SECONDS = 0.1
"""Minimum seconds between two updates of a notebook's output: an update costs about a millisecond."""


@dataclass(frozen=True, slots=True)
class TimedPiece:
    """Text that one step, or the prefill, added to an answer."""

    text: str
    num_tokens: int
    seconds: float  # from the start of the stream to the end of the step


class LiveStreamer(BaseStreamer):
    """Streamer that shows the answer while it is generated, and tokens per second and tau so far.

    In a notebook, the output is updated in place, and text that arrived in one step shares a colour. Elsewhere the
    text is written to stdout as it arrives, followed by a line with the final numbers. Works with and without
    `speculative=`, for one sequence. The clock starts when the streamer is made, so make it in the call:
    `model.generate(**inputs, streamer=LiveStreamer(tokenizer), speculative="auto")`.

    Args:
        tokenizer: The model's tokenizer; special tokens are not shown.
        name: Label of the run; "" for none.

    Attributes:
        pieces: The text by step, each with its time; the first piece is the prefill's token.
    """

    def __init__(self, tokenizer: Any, name: str = "") -> None:
        self.name, self.pieces = name, list[TimedPiece]()
        self._tokenizer, self._tokens, self._text = tokenizer, list[int](), ""
        self._pending = 0  # tokens of the current step
        self._has_prompt = self._ends_steps = False
        self._begin = self._shown = time.perf_counter()
        self._display: Any = notebook_display(self)

    @property
    def num_tokens(self) -> int:
        """Tokens so far, including the one that the prefill emits."""
        return sum(piece.num_tokens for piece in self.pieces)

    @property
    def seconds(self) -> float:
        """Seconds from the start to the last token."""
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

    @property
    def summary(self) -> str:
        """Name, tokens, seconds, speed and tau so far, as one line."""
        label = f"{self.name}: " if self.name else ""
        return (f"{label}{self.num_tokens} tokens, {self.seconds:.1f} s, {self.tokens_per_second:.1f} tokens/s, "
                f"tau {shown_tau(self.tau)}")  # fmt: skip

    def put(self, value: Tensor) -> None:
        """Take the prompt's ids `[1, P]` (the first call) or one new token `[1]`.

        Raises:
            ValueError: The batch has several rows.
        """
        if value.shape[0] > 1:
            raise ValueError(f"LiveStreamer shows one sequence, got a batch of {value.shape[0]}: generate one by one.")
        if not self._has_prompt:
            self._has_prompt = True
            return
        self._tokens.extend(value.flatten().tolist())
        self._pending += value.numel()
        if not self._ends_steps:  # the prefill's token, or plain decoding, in which every token is a step
            self._add_piece()

    def end_step(self) -> None:
        """Close a step, whose tokens share a colour; called after each step of speculative decoding."""
        self._ends_steps = True
        if self._pending:
            self._add_piece()

    def end(self) -> None:
        """Show the final text and numbers."""
        self._show()
        if self._display is None:
            sys.stdout.write(f"\n{self.summary}\n")

    def _add_piece(self) -> None:
        # a letter may have several tokens: until its last one arrives, it decodes to U+FFFD
        text = str(self._tokenizer.decode(self._tokens, skip_special_tokens=True)).rstrip("\ufffd")
        new, self._text = text[len(self._text) :], text
        self.pieces.append(TimedPiece(new, self._pending, time.perf_counter() - self._begin))
        self._pending = 0
        if self._display is None:
            sys.stdout.write(new)
            sys.stdout.flush()
        elif time.perf_counter() - self._shown >= REFRESH_SECONDS:
            self._show()

    def _show(self) -> None:
        if self._display is not None:
            self._display.update(self)
            self._shown = time.perf_counter()

    def __repr__(self) -> str:
        return f"{self._text}\n{self.summary}"

    def _repr_html_(self) -> str:
        pieces = tuple(Piece(one.text, one.num_tokens, step) for step, one in enumerate(self.pieces) if one.text)
        return f"{ColoredText(pieces)._repr_html_()}<p><b>{html.escape(self.summary)}</b></p>"
