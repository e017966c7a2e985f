"""Pictures: a draft tree, a training run. They need matplotlib (`pip install hf-specdec[training]`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_specdec.config import Choice

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_tree(choices: Sequence[Choice], acceptance: Mapping[Choice, float] | None = None) -> Axes:
    """A static tree from left to right; the likelier a node is to be accepted, the heavier its line.

    Args:
        choices: The paths of the drafted nodes; parents are among them.
        acceptance: Probability that a node is accepted, by its path.

    Returns:
        The matplotlib axes.
    """
    from matplotlib import pyplot  # an optional dependency

    children: dict[Choice, list[Choice]] = {}
    for path in sorted(choices):
        children.setdefault(path[:-1], []).append(path)
    heights: dict[Choice, float] = {}
    leaves = 0

    def place(path: Choice) -> float:
        nonlocal leaves
        below = [place(child) for child in children.get(path, [])]
        if not below:
            leaves += 1
        heights[path] = sum(below) / len(below) if below else float(-leaves)
        return heights[path]

    place(())
    axes: Axes = pyplot.figure(figsize=(7, max(2.0, 0.2 * leaves))).gca()
    for path, height in heights.items():
        if path:
            weight = 1.0 if acceptance is None else max(acceptance.get(path, 0.0), 0.02)
            ends = [len(path) - 1, len(path)], [heights[path[:-1]], height]
            axes.plot(*ends, color="tab:blue", linewidth=0.5 + 4 * weight, alpha=0.3 + 0.7 * weight)
            axes.text(len(path) + 0.03, height, str(path[-1]), fontsize=7, va="center")
    axes.set_xlabel("depth")
    axes.set_yticks([])
    axes.set_title(f"{len(choices) + 1} nodes, {max(map(len, choices), default=0)} deep; numbers are ranks")
    return axes


def plot_run(log_history: Sequence[Mapping[str, Any]]) -> Sequence[Axes]:
    """Loss, the accuracy of every drafted depth, and tau on what is held out, over the steps of a training run.

    Args:
        log_history: Of `trainer_state.json`.

    Returns:
        The matplotlib axes: two, or three where something was held out.
    """
    from matplotlib import pyplot  # an optional dependency

    rows = [row for row in log_history if "loss" in row]
    measured = [(row["step"], float(row["eval_tau"])) for row in log_history if "eval_tau" in row]
    figure, (left, right, *more) = pyplot.subplots(1, 2 + bool(measured), figsize=(10 + 5 * bool(measured), 3.5))
    steps = [row["step"] for row in rows]
    left.plot(steps, [float(row["loss"]) for row in rows])
    left.set_ylabel("loss")
    names = sorted({name for row in rows for name in row if name.startswith("top1_accuracy_")})
    for name in names:
        seen = [(row["step"], float(row[name])) for row in rows if name in row]
        right.plot(*zip(*seen, strict=True), label=f"depth {name.rsplit('_', 1)[1]}")
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


def save_plot(axes: Axes | Sequence[Axes], path: str | Path) -> None:
    """Write the figure of some axes to a file and forget it."""
    from matplotlib import pyplot  # an optional dependency

    first: Any = axes[0] if isinstance(axes, Sequence) else axes
    first.figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(first.figure)
