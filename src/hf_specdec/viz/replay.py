"""Recorded runs side by side, replayed in real time by CSS: no kernel and no JavaScript are needed."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

from hf_specdec.reporting.palette import PALETTE
from hf_specdec.viz.live import LiveStreamer

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
        colors = [PALETTE[number % len(PALETTE)] for number in range(len(self.runs))]
        heads = "".join(f'<th style="{CELL}">{html.escape(run.name)}</th>' for run in self.runs)
        bars = "".join(
            f'<td style="{CELL}"><i style="width:{100 * run.seconds / longest:.0f}%;background:{color};'
            f'animation-duration:{run.seconds / self.speed:.2f}s"></i>{self._end(run)}</td>'
            for run, color in zip(self.runs, colors, strict=True)
        )
        texts = "".join(
            f'<td style="{CELL};white-space:pre-wrap">{self._text(run, color)}</td>'
            for run, color in zip(self.runs, colors, strict=True)
        )
        rows = f"<tr>{heads}</tr><tr>{bars}</tr><tr>{texts}</tr>"
        pace = "in real time" if self.speed == 1 else f"at {self.speed:g} times the recorded speed"
        return (f'{STYLE}<details open class="specdec-race"><summary>Replayed {pace}; close and open to see it '
                f"again</summary><table>{rows}</table></details>")  # fmt: skip

    def _end(self, run: LiveStreamer) -> str:
        label = f"{run.seconds:.1f} s, {run.tokens_per_second:.1f} tokens/s, {run.tau:.2f} tokens per forward"
        return f'<b class="end" style="animation-delay:{run.seconds / self.speed:.2f}s">{label}</b>'

    def _text(self, run: LiveStreamer, color: str) -> str:
        return "".join(
            f'<span style="animation-delay:{piece.seconds / self.speed:.2f}s'
            + (f";border-bottom:2px solid {color}" if piece.num_tokens > 1 else "")
            + f'">{html.escape(piece.text)}</span>'
            for piece in run.pieces
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
        raise ValueError(
            f"race() needs finished runs and a positive speed, got {_described(runs)} and speed={speed}. "
            "First pass each streamer to generate()."
        )
    return Race(runs, speed)


def _described(runs: Sequence[LiveStreamer]) -> str:
    return ", ".join(f"{run.name or 'a run'} with {run.num_tokens} tokens" for run in runs) or "no runs"
