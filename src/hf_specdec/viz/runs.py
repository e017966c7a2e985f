"""What a training run has learned, and what the steps of a machine cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hf_specdec.reporting.palette import drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_run(log_history: Sequence[Mapping[str, Any]]) -> Sequence[Axes]:
    """Loss, the accuracy of every drafted depth, and tau on what is held out, over the steps of a training run.

    Args:
        log_history: Of `trainer_state.json`.

    Returns:
        The matplotlib axes: two, or three where something was held out.
    """
    rows = [row for row in log_history if "loss" in row]
    measured = [(row["step"], float(row["eval_tau"])) for row in log_history if "eval_tau" in row]
    with drawing() as pyplot:
        figure, (left, right, *more) = pyplot.subplots(1, 2 + bool(measured), figsize=(10 + 5 * bool(measured), 3.5))
        _smoothed(left, [(row["step"], float(row["loss"])) for row in rows])
        left.set_ylabel("loss")
        names = sorted({name for row in rows for name in row if name.startswith("top1_accuracy_")})
        for name in names:
            seen = [(row["step"], float(row[name])) for row in rows if name in row]
            _smoothed(right, seen, label=f"depth {name.rsplit('_', 1)[1]}")
        right.set_ylabel("top-1 accuracy")
        if names:
            right.legend()
        for axes in more:
            axes.plot(*zip(*measured, strict=True), marker=".")
            axes.set_ylabel("tau of greedy chains, held out")
        drawn: Sequence[Axes] = (left, right, *more)
        for axes in drawn:
            axes.set_xlabel("step")
        figure.tight_layout()
    return drawn


SMOOTHED = 30
"""Parts of a run over which what differs from batch to batch is averaged."""


def _smoothed(axes: Axes, points: Sequence[tuple[int, float]], label: str | None = None) -> None:
    """A line through means of what is around each step, and what they are means of, faintly."""
    reach, values = len(points) // SMOOTHED // 2, [value for _, value in points]
    around = [values[max(place - reach, 0) : place + reach + 1] for place in range(len(values))]
    steps, means = [step for step, _ in points], [sum(part) / len(part) for part in around]
    (line,) = axes.plot(steps, means, label=label)
    if reach:
        axes.plot(steps, values, color=line.get_color(), alpha=0.2, linewidth=0.8, zorder=1)


def plot_costs(costs: Mapping[str, Sequence[float]]) -> Axes:
    """What a step costs by the number of nodes that it verifies, in steps of plain decoding.

    Args:
        costs: By name (a model, a device, compiled or not): seconds of a step that verifies 1, 2, ... nodes.

    Returns:
        The matplotlib axes.
    """
    with drawing() as pyplot:
        axes: Axes = pyplot.figure(figsize=(6, 3.2)).gca()
        for name, seconds in costs.items():
            axes.plot(range(1, len(seconds) + 1), [1000 * second for second in seconds], label=name)
        axes.set_xlabel("nodes verified in one step")
        axes.set_ylabel("milliseconds")
        axes.set_ylim(bottom=0)
        axes.legend()
    return axes
