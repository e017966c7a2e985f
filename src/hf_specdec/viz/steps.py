"""Plots of how many drafted tokens generations accepted, and of the traced steps of one generation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from hf_specdec.reporting.palette import INK, PALETTE, drawing
from hf_specdec.reporting.stats import SpeculationStats
from hf_specdec.reporting.trace import TracedStep

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STAGES = ("draft", "verify", "rest")


def plot_acceptance(stats: Mapping[str, SpeculationStats]) -> Axes:
    """Plot bars of the share of steps that accepted at least 1, 2, ... drafted tokens; the shares sum to tau - 1.

    Args:
        stats: Statistics of generations (`model.last_speculation`), by name for the legend.

    Returns:
        The matplotlib axes.
    """
    with drawing() as pyplot:
        axes: Axes = pyplot.figure(figsize=(6, 3)).gca()
        width = 0.8 / max(len(stats), 1)
        for number, (name, one) in enumerate(stats.items()):
            shares = one.acceptance_by_depth
            places = [depth + (number - (len(stats) - 1) / 2) * width for depth in range(1, len(shares) + 1)]
            axes.bar(places, shares, width, label=f"{name}: tau {one.mean_accepted_length:.2f}")
        axes.set_xlabel("drafted tokens")
        axes.set_ylabel("share of steps that accepted them")
        axes.set_xticks(range(1, 1 + max((len(one.acceptance_by_depth) for one in stats.values()), default=0)))
        axes.set_ylim(0, 1)
        axes.legend()
    return axes


def plot_timeline(trace: Sequence[TracedStep]) -> Axes:
    """Plot when each step drafted, verified, and accepted and committed ("rest").

    The number above a step is how many tokens it emitted in the first row of the batch.

    Args:
        trace: Steps of a generation (`model.last_speculation.trace`). On an accelerator, the work of a stage may
            finish during a later stage.

    Returns:
        The matplotlib axes.
    """
    with drawing() as pyplot:
        axes: Axes = pyplot.figure(figsize=(9, 2.2)).gca()
        for lane, stage in enumerate(STAGES):
            spans = []
            for step in trace:
                begin = step.begin + sum(getattr(step, f"{before}_seconds") for before in STAGES[:lane])
                spans.append((1000 * begin, 1000 * getattr(step, f"{stage}_seconds")))
            axes.broken_barh(spans, (len(STAGES) - lane - 0.9, 0.8), color=PALETTE[lane], label=stage)
        for step in trace:
            axes.annotate(str(len(step.rows[0].emitted)), (1000 * step.begin, len(STAGES) + 0.05), fontsize=7)
        axes.set_yticks([len(STAGES) - lane - 0.5 for lane in range(len(STAGES))], STAGES)
        axes.set_ylim(0, len(STAGES) + 0.5)
        axes.set_xlabel("milliseconds after the prefill; numbers are tokens emitted by a step")
    return axes


def plot_widths(trace: Sequence[TracedStep], *, row: int = 0) -> Axes:
    """Plot for each step the number of drafted nodes, by drafter (upwards), and of accepted nodes (downwards).

    Args:
        trace: Steps of a generation (`model.last_speculation.trace`).
        row: Index of the sequence in the batch.

    Returns:
        The matplotlib axes.
    """
    rows = [step.rows[row] for step in trace]
    counts = [Counter(name for name, parent in zip(one.sources, one.parents, strict=True) if parent >= 0)
              for one in rows]  # fmt: skip
    places = range(1, len(rows) + 1)
    with drawing() as pyplot:
        axes: Axes = pyplot.figure(figsize=(9, 2.6)).gca()
        bottom = [0] * len(rows)
        for number, name in enumerate(sorted({name for count in counts for name in count})):
            heights = [count[name] for count in counts]
            axes.bar(places, heights, 0.85, bottom, color=PALETTE[number % len(PALETTE)], label=name)
            bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
        axes.bar(places, [min(1 - len(one.emitted), 0) for one in rows], 0.85, color=INK, label="accepted")
        axes.axhline(0, color=INK, linewidth=0.8)
        axes.yaxis.set_major_formatter(lambda value, _place: f"{abs(value):g}")
        axes.set_xlim(0.3, max(len(rows), 12) + 0.7)
        axes.locator_params(axis="both", integer=True)
        axes.set_xlabel("step")
        axes.set_ylabel("tokens")
        axes.legend(ncols=4, loc="lower left", bbox_to_anchor=(0, 1))
    return axes
