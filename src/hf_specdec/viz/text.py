"""Generated text coloured by decoding step, as HTML for notebooks or with ANSI colour codes for terminals."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hf_specdec.reporting.palette import PALETTE
from hf_specdec.reporting.trace import TracedStep

RESET = "\x1b[0m"


def shown(tokenizer: Any, token: int, longest: int = 12) -> str:
    """Return a token's text (visible whitespace, at most `longest` characters) or, without a tokenizer, its id."""
    if tokenizer is None:
        return str(token)
    text = str(tokenizer.decode([token])).replace(" ", "␣").replace("\n", "⏎").replace("\t", "⇥").replace("$", r"\$")
    return text if len(text) <= longest else text[: longest - 1] + "…"


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that one step added, and the number of tokens that the step emitted."""

    text: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class ColoredText:
    """Text in one piece per step; notebooks show it in colour, and `str()` always contains ANSI colour codes.

    Pieces of one token are not coloured: plain decoding also emits one token per step.
    """

    pieces: tuple[Piece, ...]

    def __str__(self) -> str:
        parts, number = [], 0
        for piece in self.pieces:
            if piece.num_tokens > 1:
                red, green, blue = (int(PALETTE[number % len(PALETTE)][place : place + 2], 16) for place in (1, 3, 5))
                # end the colour before a line break: some terminals would fill the rest of the line
                lines = [f"\x1b[38;2;{red};{green};{blue}m{line}{RESET}" for line in piece.text.split("\n")]
                parts.append("\n".join(lines))
                number += 1
            else:
                parts.append(piece.text)
        return "".join(parts)

    def _repr_html_(self) -> str:
        parts, number = [], 0
        for step, piece in enumerate(self.pieces):
            text = html.escape(piece.text)
            if piece.num_tokens > 1:
                color = PALETTE[number % len(PALETTE)]
                style = f"background:{color}40;border-bottom:2px solid {color};border-radius:2px"
                text = f'<span style="{style}" title="step {step}: {piece.num_tokens} tokens">{text}</span>'
                number += 1
            parts.append(text)
        return f'<div style="white-space:pre-wrap;line-height:1.7">{"".join(parts)}</div>'


def colored_text(trace: Sequence[TracedStep], tokenizer: Any, *, row: int = 0) -> ColoredText:
    """Return the text of a generation, coloured by step.

    Args:
        trace: Steps of a generation (`model.last_speculation.trace`).
        tokenizer: The model's tokenizer; special tokens are left out.
        row: Index of the sequence in the batch.
    """
    steps = [step.rows[row] for step in trace]
    tokens = steps[0].tokens[:1] if steps else []  # the first step's root was emitted by the prefill
    pieces, text = [Piece("", 0)], ""
    for emitted in (tokens, *(step.emitted for step in steps)):
        if emitted is not tokens:
            tokens = [*tokens, *emitted]
        # decode the whole text: the text of a token depends on the tokens before it
        longer = str(tokenizer.decode(tokens, skip_special_tokens=True))
        if longer.endswith("�"):  # an incomplete character: it belongs to the step that completes it
            longer = longer[:-1]
        new = longer[len(text) :] if longer.startswith(text) else ""
        pieces.append(Piece(new, len(emitted)))
        text = longer if longer.startswith(text) else text
    return ColoredText(tuple(piece for piece in pieces if piece.text))
