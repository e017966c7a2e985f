"""Generated text coloured by decoding step, as HTML for notebooks or with ANSI colour codes for terminals."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile
from typing import Any

from hf_specdec.reporting.palette import PALETTE
from hf_specdec.reporting.stats import TracedStep


def token_label(tokenizer: Any, token: int, longest: int = 12) -> str:
    """Return a token's text as a plot label or, without a tokenizer, its id.

    Whitespace is made visible, "$" is escaped for matplotlib, and texts are cut to `longest` characters.
    """
    if tokenizer is None:
        return str(token)
    text = str(tokenizer.decode([token])).replace(" ", "␣").replace("\n", "⏎").replace("\t", "⇥").replace("$", r"\$")
    return text if len(text) <= longest else text[: longest - 1] + "…"


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that one step, or the prefill, added to a sequence."""

    text: str  # empty if the step ended within a character
    num_tokens: int  # emitted by the step
    step: int  # counted from 1; 0 for the prefill
    seconds: float = 0.0  # from the start of a stream to the end of the step


@dataclass(frozen=True, slots=True)
class ColoredText:
    """Text in pieces; notebooks show it in colour, and `str()` always contains ANSI colour codes.

    There is one piece per step that added text. Pieces of one token are not coloured: plain decoding also emits one
    token per step.
    """

    pieces: tuple[Piece, ...]

    def colors(self) -> Iterator[tuple[Piece, str | None]]:
        """Yield each piece with its colour; None for pieces of one token."""
        number = 0
        for piece in self.pieces:
            several = piece.num_tokens > 1
            yield piece, PALETTE[number % len(PALETTE)] if several else None
            number += several

    def __str__(self) -> str:
        parts = []
        for piece, color in self.colors():
            text = piece.text
            if color is not None:
                red, green, blue = (int(color[place : place + 2], 16) for place in (1, 3, 5))
                # end the colour before a line break: some terminals would fill the rest of the line
                text = "\n".join(f"\x1b[38;2;{red};{green};{blue}m{line}\x1b[0m" for line in text.split("\n"))
            parts.append(text)
        return "".join(parts)

    def _repr_html_(self) -> str:
        parts = []
        for piece, color in self.colors():
            text = html.escape(piece.text)
            if color is not None:
                style = f"background:{color}40;border-bottom:2px solid {color};border-radius:2px"
                text = f'<span style="{style}" title="step {piece.step}: {piece.num_tokens} tokens">{text}</span>'
            parts.append(text)
        return f'<div style="white-space:pre-wrap;line-height:1.7">{"".join(parts)}</div>'


def colored_text(trace: Sequence[TracedStep], tokenizer: Any, *, row: int = 0) -> ColoredText:
    """Return the text of a generation, coloured by step.

    Args:
        trace: Steps of a generation (`model.last_speculation.trace`).
        tokenizer: The model's tokenizer; special tokens are left out.
        row: Index of the sequence in the batch.
    """

    def decode(tokens: Sequence[int]) -> str:
        return str(tokenizer.decode(tokens, skip_special_tokens=True))

    steps = [step.rows[row] for step in trace]
    tokens = list(steps[0].tokens[:1]) if steps else []  # the first step's root was emitted by the prefill
    counts = [len(tokens), *(len(step.emitted) for step in steps)]
    tokens += [token for step in steps for token in step.emitted]
    text, begin, pieces = decode(tokens), 0, []
    for step, (count, end) in enumerate(zip(counts, accumulate(counts), strict=True)):
        # Decode from the start: the text of a token depends on the tokens before it. It agrees with the whole text up
        # to a character within which the tokens end: that belongs to the step that completes it.
        decoded, first = decode(tokens[:end]), begin
        if decoded.startswith(text[:begin]):
            pairs = zip(decoded[begin:], text[begin:], strict=False)
            begin += sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        pieces.append(Piece(text[first:begin], count, step))
    return ColoredText(tuple(piece for piece in pieces if piece.text))
