"""Plots of token trees, root on the left: a static tree, and the tree that a step drafted and verified."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from hf_specdec.reporting.palette import INK, PALETTE, drawing
from hf_specdec.reporting.trace import TracedRow, TracedStep
from hf_specdec.trees.tree import ROOT_PARENT
from hf_specdec.validation import Choice
from hf_specdec.viz.text import shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Node = TypeVar("Node", bound=Hashable)

INCHES_PER_LEVEL, INCHES_PER_LEAF = 1.5, 0.34
"""Width per level and height per leaf of the plot of a step's tree, in inches."""
LABEL = 0.6
"""Width of a node's label, as a fraction of the distance between two levels."""
TARGET = -1
"""Key, among node indices, of an additional plotted node: the token that the target chose after the accepted path."""


def plot_tree(choices: Sequence[Choice], acceptance: Mapping[Choice, float] | None = None) -> Axes:
    """Plot a static tree, with thicker lines to nodes that are more likely to be accepted.

    Args:
        choices: Path of each drafted node, as ranks from the root on: `(0, 2)` is the third-best child of the root's
            best child. The parent of every node must be included.
        acceptance: Acceptance probability of each path, 0 if missing; None draws equal lines.

    Returns:
        The matplotlib axes.
    """
    children: dict[Choice, list[Choice]] = {}
    for path in sorted(choices):
        children.setdefault(path[:-1], []).append(path)
    heights, leaves = _heights((), children)
    with drawing() as pyplot:
        axes: Axes = pyplot.figure(figsize=(7, max(2.0, 0.2 * leaves))).gca()
        for path, height in heights.items():
            if path:
                weight = 1.0 if acceptance is None else max(acceptance.get(path, 0.0), 0.02)
                ends = [len(path) - 1, len(path)], [heights[path[:-1]], height]
                axes.plot(*ends, color=PALETTE[0], linewidth=0.5 + 4 * weight, alpha=0.3 + 0.7 * weight)
                axes.text(len(path) + 0.03, height, str(path[-1]), fontsize=7, va="center")
        axes.set_xlabel("depth")
        axes.locator_params(axis="x", integer=True)
        axes.set_yticks([])
        axes.set_title(f"{len(choices) + 1} nodes, {max(map(len, choices), default=0)} deep; numbers are ranks")
    return axes


def plot_step(step: TracedStep, tokenizer: Any = None, *, row: int = 0) -> Axes:
    """Plot the tree of a step, with accepted nodes filled, and lines coloured by drafter.

    A line is thicker if the drafter gave the token a higher probability (if known). Below each drafted token are its
    probabilities according to drafter (if known) and target. The boxed token was chosen by the target after the
    accepted path: a correction, or a bonus token if that path ends at a leaf. A row that had ended has no box.

    Args:
        step: A step of a generation (an item of `model.last_speculation.trace`).
        tokenizer: Decodes the tokens to show; None shows their ids.
        row: Index of the sequence in the batch.

    Returns:
        The matplotlib axes.
    """
    traced = step.rows[row]
    nodes = [node for node, parent in enumerate(traced.parents) if node == 0 or parent != ROOT_PARENT]
    children: dict[int, list[int]] = {}
    depths = {0: 0}
    for node in nodes[1:]:
        children.setdefault(traced.parents[node], []).append(node)
        depths[node] = depths[traced.parents[node]] + 1
    if traced.path:
        children.setdefault(traced.path[-1], []).append(TARGET)
        depths[TARGET] = depths[traced.path[-1]] + 1
    heights, leaves = _heights(0, children)
    places = {node: (float(depths[node]), height) for node, height in heights.items()}
    sources = list(dict.fromkeys(traced.sources[node] for node in nodes[1:]))
    colors = {source: PALETTE[number % len(PALETTE)] for number, source in enumerate(sources)}
    deepest = max(depths.values())
    with drawing() as pyplot:
        size = 1.2 + INCHES_PER_LEVEL * deepest, 0.8 + INCHES_PER_LEAF * leaves
        axes: Axes = pyplot.figure(figsize=size).gca()
        for node in nodes:
            if node:
                confidence = 0.5 if traced.draft_probs is None else traced.draft_probs[node]
                axes.plot(*_edge(places[traced.parents[node]], places[node]), color=colors[traced.sources[node]],
                          linewidth=0.6 + 3.4 * confidence, alpha=0.95 if node in traced.path else 0.45)  # fmt: skip
            _draw_node(axes, traced, node, places[node], INK if node == 0 else colors[traced.sources[node]], tokenizer)
        if traced.path:
            axes.plot(*_edge(places[traced.path[-1]], places[TARGET]), color=INK, linewidth=1, linestyle="--")
            axes.annotate(shown(tokenizer, traced.emitted[-1]), places[TARGET], (4, 0), textcoords="offset points",
                          fontsize=8, fontweight="bold", va="center",
                          bbox={"boxstyle": "round,pad=0.25", "facecolor": "none", "edgecolor": INK})  # fmt: skip
        for source in sources:
            axes.plot([], [], color=colors[source], linewidth=3, label=source)
        if sources:
            axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=len(sources), borderaxespad=0.2)
        accepted = max(len(traced.emitted) - 1, 0)
        axes.set_title(f"{traced.num_drafted} drafted, {accepted} accepted", loc="right")
        axes.set_xlim(-0.1, deepest + LABEL)
        axes.set_ylim(min(heights.values()) - 0.6, max(heights.values()) + 0.6)
        axes.set_axis_off()
    return axes


def _edge(parent: tuple[float, float], child: tuple[float, float]) -> tuple[list[float], list[float]]:
    """Return the x and the y coordinates of the line from the end of the parent's label to the child."""
    return [parent[0] + LABEL, child[0]], [parent[1], child[1]]


def _draw_node(axes: Axes, row: TracedRow, node: int, place: tuple[float, float], color: str, tokenizer: Any) -> None:
    """Draw a node of a step's tree: a dot, filled if accepted, with the token above and probabilities below the line.

    The root has no probabilities.
    """
    kept = node in row.path
    axes.plot(*place, marker="o", markersize=5, color=color, fillstyle="full" if kept else "none")
    axes.annotate(shown(tokenizer, row.tokens[node]), place, (5, 1), textcoords="offset points", fontsize=8,
                  fontweight="bold" if kept else "normal", va="bottom")  # fmt: skip
    if node:
        draft_prob = "" if row.draft_probs is None else f"{row.draft_probs[node]:.2f} / "
        axes.annotate(f"{draft_prob}{row.target_probs[node]:.2f}", place, (5, -1), textcoords="offset points",
                      fontsize=6, va="top")  # fmt: skip


def _heights(root: Node, children: Mapping[Node, Sequence[Node]]) -> tuple[dict[Node, float], int]:
    """Return the y coordinate of each node, and the number of leaves.

    Leaves are at -1, -2, ...; a parent is at the mean of its children.
    """
    heights: dict[Node, float] = {}
    leaves = 0

    def place(node: Node) -> float:
        nonlocal leaves
        below = [place(child) for child in children.get(node, ())]
        if not below:
            leaves += 1
        heights[node] = sum(below) / len(below) if below else float(-leaves)
        return heights[node]

    place(root)
    return heights, leaves
