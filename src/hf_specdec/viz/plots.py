"""Plots of accepted tokens, of the traced steps of a generation, of a training run, and of the cost of steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hf_specdec.reporting.palette import SMALL_TEXT, Theme, drafter_colors, drawing
from hf_specdec.reporting.stats import SpeculationStats, TracedStep

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STAGES = ("draft", "verify", "rest")
STEP_INCHES, WIDTHS_INCHES = 0.75, (6.0, 9.0)
"""Width of a step in `plot_widths`, and the minimum and maximum width of its figure, in inches."""


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
        # two digits take 2.5 % of the width
        narrowest, last = 0.025 * 1000 * trace[-1].begin, -1.0
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
            axes.legend(ncols=4, loc="upper left", bbox_to_anchor=(0, -0.2), columnspacing=1.2,
                        handlelength=1.5)  # fmt: skip
    return axes


PANEL_INCHES = 3.0
"""Width and height of a panel of `plot_run`; three of them fit a page of text, where a wider figure would shrink."""


def plot_run(log_history: Sequence[Mapping[str, Any]], *, theme: Theme = "light") -> Sequence[Axes]:
    """Plot loss, top-1 accuracy by draft depth, and tau on held-out data against the steps of a training run.

    Tau is the mean number of tokens emitted per target forward.

    Args:
        log_history: The list `log_history` in the Trainer's `trainer_state.json`.
        theme: `"light"` or `"dark"`.

    Returns:
        Two matplotlib axes, or three if tau was measured on held-out data.
    """
    rows = [row for row in log_history if "loss" in row]
    measured = [(row["step"], float(row["eval_tau"])) for row in log_history if "eval_tau" in row]
    with drawing(theme) as (pyplot, _):
        count = 2 + bool(measured)
        figure, (left, right, *more) = pyplot.subplots(1, count, figsize=(PANEL_INCHES * count, PANEL_INCHES))
        _plot_smoothed(left, [(row["step"], float(row["loss"])) for row in rows])
        left.set_ylabel("loss")
        names = sorted({name for row in rows for name in row if name.startswith("top1_accuracy_")})
        for name in names:
            points = [(row["step"], float(row[name])) for row in rows if name in row]
            _plot_smoothed(right, points, label=f"depth {name.rsplit('_', 1)[1]}")
        right.set_ylabel("top-1 accuracy")
        if names:
            right.legend()
        for axes in more:
            axes.plot(*zip(*measured, strict=True), marker=".")
            axes.set_ylabel("tau of greedy chains, held out")
        all_axes: Sequence[Axes] = (left, right, *more)
        for axes in all_axes:
            axes.set_xlabel("step")
            axes.locator_params(axis="x", integer=True, min_n_ticks=1)
        figure.tight_layout()
    return all_axes


def _plot_smoothed(axes: Axes, points: Sequence[tuple[int, float]], label: str | None = None) -> None:
    """Plot the centred moving average of a curve and, faintly, the curve; only the curve if it has under 60 points."""
    reach, values = len(points) // 30 // 2, [value for _, value in points]
    around = [values[max(place - reach, 0) : place + reach + 1] for place in range(len(values))]
    steps, means = [step for step, _ in points], [sum(part) / len(part) for part in around]
    (line,) = axes.plot(steps, means, label=label)
    if reach:
        axes.plot(steps, values, color=line.get_color(), alpha=0.2, linewidth=0.8, zorder=1)


def plot_costs(costs: Mapping[str, Sequence[float]], *, theme: Theme = "light") -> Axes:
    """Plot the duration of a step in milliseconds by the number of verified nodes.

    Args:
        costs: By name of the curve: the seconds of a step that verifies 1, 2, ... nodes.
        theme: `"light"` or `"dark"`.

    Raises:
        ValueError: Not a dict.
    """
    if not isinstance(costs, Mapping):
        raise ValueError(
            f"Seconds by name are needed, such as {{'auto': [0.02, 0.03]}}, got a {type(costs).__name__}."
        )
    with drawing(theme) as (pyplot, _):
        axes: Axes = pyplot.figure(figsize=(6, 3.2)).gca()
        for name, seconds in costs.items():
            axes.plot(range(1, len(seconds) + 1), [1000 * second for second in seconds], label=name)
        axes.set_xlabel("nodes verified in one step")
        axes.set_ylabel("milliseconds")
        axes.locator_params(axis="x", integer=True, min_n_ticks=1)
        axes.set_ylim(bottom=0)
        axes.legend()
    return axes
