"""`StepStreamer`, the base of streamers that show or record an answer by decoding step."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from transformers.generation.streamers import BaseStreamer


@dataclass(frozen=True, slots=True)
class TimedPiece:
    """Text that one step, or the prefill, added to an answer.

    Args:
        text: The text; empty if the step ended within a character.
        num_tokens: Tokens that the step emitted.
        seconds: Time from the start of the stream to the end of the step.
    """

    text: str
    num_tokens: int
    seconds: float


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
        self.pieces, self.begin = list[TimedPiece](), time.perf_counter()
        self._tokenizer, self._tokens, self._text = tokenizer, list[int](), ""
        self._num_pending = 0  # tokens of the current step
        self._has_prompt = self._ends_steps = False

    def start(self) -> None:
        """Start the clock again."""
        self.begin = time.perf_counter()

    def add(self, piece: TimedPiece) -> None:
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
            self.add(TimedPiece(rest, 0, self.seconds))

    def _end_piece(self) -> None:
        # a character may have several tokens: until its last one arrives, it decodes to U+FFFD
        text = self._decoded().rstrip("\ufffd")
        piece = TimedPiece(text[len(self._text) :], self._num_pending, time.perf_counter() - self.begin)
        self._text, self._num_pending = text, 0
        self.pieces.append(piece)
        self.add(piece)

    def _decoded(self) -> str:
        return str(self._tokenizer.decode(self._tokens, skip_special_tokens=True))
