"""Plots of the log of a head's training run, and of how long decoding steps take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hf_specdec.reporting.palette import Theme, drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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


SMOOTHING_WINDOWS = 30
"""Points of a curve divided by points in the window of its moving average, approximately: the window is odd."""


def _plot_smoothed(axes: Axes, points: Sequence[tuple[int, float]], label: str | None = None) -> None:
    """Plot the centred moving average of a curve and, faintly, the curve; only the curve if it has under 60 points."""
    reach, values = len(points) // SMOOTHING_WINDOWS // 2, [value for _, value in points]
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

    Returns:
        The matplotlib axes.

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
