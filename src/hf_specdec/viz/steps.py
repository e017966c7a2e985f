"""Plots of how many drafted tokens generations accepted, and of the traced steps of one generation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hf_specdec.reporting.palette import SMALL_TEXT, Theme, drafter_colors, drawing
from hf_specdec.reporting.stats import SpeculationStats
from hf_specdec.reporting.trace import TracedStep

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STAGES = ("draft", "verify", "rest")
NUMBER_WIDTH = 0.025
"""Width of a number of two digits, as a fraction of the width of the timeline."""
STEP_INCHES, WIDTHS_INCHES = 0.75, (6.0, 9.0)
"""Width of a step in `plot_widths`, and the minimum and maximum width of its figure, in inches."""
LEGEND_PLACE = -0.2
"""Top of the legend of `plot_widths`, below the label of the x axis, as a fraction of the height of the plot."""


def require_steps(trace: Any) -> None:
    """Raise `ValueError` unless this is a trace with steps."""
    if not isinstance(trace, Sequence) or any(not hasattr(step, "rows") for step in trace):
        raise ValueError(f"A trace is needed, such as model.last_speculation.trace, got a {type(trace).__name__}.")
    if not trace:
        raise ValueError(
            'The trace has no steps. Call generate() with speculative={"method": ..., "trace": True} and more than '
            "one new token."
        )


def plot_acceptance(stats: Mapping[str, SpeculationStats], *, theme: Theme = "light") -> Axes:
    """Plot bars of the share of steps that accepted at least 1, 2, ... drafted tokens; the shares sum to tau - 1.

    Args:
        stats: Statistics of generations (`model.last_speculation`), by name for the legend.
        theme: `"light"` or `"dark"`.

    Returns:
        The matplotlib axes.

    Raises:
        ValueError: Not a mapping.
    """
    if not isinstance(stats, Mapping):
        raise ValueError(
            f"Statistics by name are needed, such as {{'auto': model.last_speculation}}, got a {type(stats).__name__}."
        )
    with drawing(theme) as (pyplot, colors):
        axes: Axes = pyplot.figure(figsize=(6, 3)).gca()
        colored = drafter_colors(stats, colors)
        width = 0.8 / max(len(stats), 1)
        for number, (name, one) in enumerate(stats.items()):
            shares = one.acceptance_by_depth
            places = [depth + (number - (len(stats) - 1) / 2) * width for depth in range(1, len(shares) + 1)]
            label = f"{name}: tau {one.mean_accepted_length:.2f}"
            axes.bar(places, shares, width, color=colored[name], label=label)
        axes.set_xlabel("N (drafted tokens)")
        axes.set_ylabel("share of steps that accepted ≥ N")
        axes.set_xlim(0.5, max([1, *(len(one.acceptance_by_depth) for one in stats.values())]) + 0.5)
        axes.set_ylim(0, 1)
        axes.locator_params(axis="x", integer=True, min_n_ticks=1)
        # above the plot: with many depths, bars fill the corner in which a legend would be
        axes.legend(ncols=2, loc="lower left", bbox_to_anchor=(0, 1))
    return axes


def plot_timeline(trace: Sequence[TracedStep], *, theme: Theme = "light") -> Axes:
    """Plot when each step drafted, verified, and accepted and committed ("rest").

    The number above a step is how many tokens it emitted in the first row of the batch; it is left out if it would
    overlap the number before it.

    Args:
        trace: Steps of a generation (`model.last_speculation.trace`). On an accelerator, the work of a stage may
            finish during a later stage.
        theme: `"light"` or `"dark"`.

    Returns:
        The matplotlib axes.

    Raises:
        ValueError: Not a trace, or one without steps.
    """
    require_steps(trace)
    with drawing(theme) as (pyplot, colors):
        axes: Axes = pyplot.figure(figsize=(9, 2.2)).gca()
        for lane, stage in enumerate(STAGES):
            spans = []
            for step in trace:
                begin = step.begin + sum(getattr(step, f"{before}_seconds") for before in STAGES[:lane])
                spans.append((1000 * begin, 1000 * getattr(step, f"{stage}_seconds")))
            axes.broken_barh(spans, (len(STAGES) - lane - 0.9, 0.8), color=colors.data[lane], label=stage)
        narrowest, last = NUMBER_WIDTH * 1000 * trace[-1].begin, -1.0
        for step in trace:
            begin = 1000 * step.begin
            if last < 0 or begin - last >= narrowest:
                axes.annotate(str(len(step.rows[0].emitted)), (begin, len(STAGES) + 0.05), fontsize=SMALL_TEXT)
                last = begin
        axes.set_yticks([len(STAGES) - lane - 0.5 for lane in range(len(STAGES))], STAGES)
        axes.set_ylim(0, len(STAGES) + 0.5)
        axes.set_xlabel("milliseconds after the prefill; numbers are tokens emitted by a step")
    return axes


def plot_widths(trace: Sequence[TracedStep], *, row: int = 0, theme: Theme = "light") -> Axes:
    """Plot for each step the number of drafted nodes, by drafter (upwards), and of accepted nodes (downwards).

    Args:
        trace: Steps of a generation (`model.last_speculation.trace`).
        row: Index of the sequence in the batch.
        theme: `"light"` or `"dark"`.

    Returns:
        The matplotlib axes.

    Raises:
        ValueError: Not a trace, or one without steps.
    """
    require_steps(trace)
    rows = [step.rows[row] for step in trace]
    counts = [Counter(name for name, parent in zip(one.sources, one.parents, strict=True) if parent >= 0)
              for one in rows]  # fmt: skip
    places = range(1, len(rows) + 1)
    with drawing(theme) as (pyplot, colors):
        narrowest, widest = WIDTHS_INCHES
        width = min(max(STEP_INCHES * len(rows), narrowest), widest)
        axes: Axes = pyplot.figure(figsize=(width, 2.6)).gca()
        bottom = [0] * len(rows)
        for name, color in drafter_colors((name for count in counts for name in count), colors).items():
            heights = [count[name] for count in counts]
            axes.bar(places, heights, 0.85, bottom, color=color, label=name)
            bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
        axes.bar(places, [min(1 - len(one.emitted), 0) for one in rows], 0.85, color=colors.muted, label="accepted")
        axes.axhline(0, color=colors.ink, linewidth=0.8)
        axes.yaxis.set_major_formatter(lambda value, _place: f"{abs(value):g}")
        axes.set_xlim(0.3, max(len(rows), 1) + 0.7)
        axes.set_ylim(min(axes.get_ylim()[0], -1), max(axes.get_ylim()[1], 1))  # also if nothing was drafted
        axes.locator_params(axis="both", integer=True, min_n_ticks=1)
        axes.set_xlabel("step")
        axes.set_ylabel("tokens")
        if rows:
            # below the plot: the space above belongs to a title
            axes.legend(ncols=4, loc="upper left", bbox_to_anchor=(0, LEGEND_PLACE), columnspacing=1.2,
                        handlelength=1.5)  # fmt: skip
    return axes
