"""Plots of token trees, root on the left: a static tree, and the tree of a step or, with a slider, of all steps.

A step's tree is drawn in boxes. Its axes fill the figure, and one unit is one point, so that edges meet the boxes.
"""

from __future__ import annotations

import base64
import html
import importlib.util
import io
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hf_specdec.reporting.palette import PALETTE, SMALL_TEXT, Colors, Theme, drafter_colors, drawing
from hf_specdec.reporting.stats import TracedRow, TracedStep
from hf_specdec.trees.tree import ROOT_PARENT
from hf_specdec.validation import Choice
from hf_specdec.viz.live import has_kernel
from hf_specdec.viz.plots import require_steps
from hf_specdec.viz.text import colored_text, token_label

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_Node = TypeVar("_Node", bound=Hashable)

POINTS_PER_INCH = 72.0
TARGET = -1
"""Key, among node indices, of an additional plotted node: the token that the target chose after the accepted path."""
TOKEN_TEXT = 9.0
"""Size of a token's text, in points."""
BOX_HEIGHT, ROW_HEIGHT, PADDING, GAP = 25.0, 32.0, 6.0, 34.0
"""Height of a node's box, distance of two leaves, space beside a box's text, and between two levels, in points."""
HEADER, FOOTER, NARROWEST = 44.0, 24.0, 430.0
"""Height of the lines above and below a step's tree, and its minimum width, in points."""
LEGEND_SPACING = 14.0
"""Space between two entries of a step's legend, in points."""
LONGEST = 16
"""Characters of a token's text in a box."""
FILLED = 0.16
"""Opacity of the colour inside the root and accepted nodes."""


def plot_tree(
    choices: Sequence[Choice], acceptance: Mapping[Choice, float] | None = None, *, theme: Theme = "light"
) -> Axes:
    """Plot a static tree, with thicker lines to nodes that are more likely to be accepted.

    Args:
        choices: Path of each drafted node, as ranks from the root on: `(0, 2)` is the third-best child of the root's
            best child. The parent of every node must be included.
        acceptance: Acceptance probability of each path, 0 if missing; None draws equal lines.
        theme: `"light"` or `"dark"`.

    Raises:
        ValueError: Not paths, or the parent of a node is missing.
    """
    if not isinstance(choices, list | tuple) or not all(
        isinstance(path, list | tuple) and all(isinstance(rank, int) for rank in path) for path in choices
    ):
        raise ValueError(
            f"Paths are needed, such as [(0,), (0, 0)], got a {type(choices).__name__}. For a step of a trace: "
            f"plot_step(model.last_speculation.trace[0])."
        )
    paths = [tuple(path) for path in choices]
    for path in paths:
        if len(path) > 1 and path[:-1] not in paths:
            raise ValueError(f"The node {path} has no parent: add {path[:-1]}.")
    children: dict[Choice, list[Choice]] = {}
    for path in sorted(paths):
        children.setdefault(path[:-1], []).append(path)
    heights, leaves = _heights((), children)
    with drawing(theme) as (pyplot, colors):
        axes: Axes = pyplot.figure(figsize=(7, max(2.0, 0.22 * leaves + 0.9))).gca()
        for path, height in heights.items():
            if path:
                weight = 1.0 if acceptance is None else max(acceptance.get(path, 0.0), 0.02)
                ends = [len(path) - 1, len(path)], [heights[path[:-1]], height]
                axes.plot(*ends, color=colors.data[0], linewidth=0.5 + 4 * weight, alpha=0.3 + 0.7 * weight, zorder=1)
                axes.text(len(path), height, str(path[-1]), fontsize=SMALL_TEXT, ha="center", va="center_baseline")
        places = [len(path) for path in heights], list(heights.values())
        # room for a rank of two digits
        axes.scatter(*places, s=150.0, color=colors.background, edgecolors=colors.data[0], zorder=2)
        axes.set_xlabel("depth")
        axes.locator_params(axis="x", integer=True, min_n_ticks=1)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        axes.margins(0.05, 0.6 / max(leaves, 2))
        axes.set_title(f"{len(paths) + 1} nodes, {max(map(len, paths), default=0)} deep; numbers are ranks")
    return axes


def plot_step(step: TracedStep, tokenizer: Any = None, *, row: int = 0, theme: Theme = "light") -> Axes:
    """Plot the tree of a step, with accepted nodes filled, and lines coloured by drafter.

    A line is thicker if the drafter gave the token a higher probability (if known). Below each drafted token are its
    probabilities according to drafter (if known) and target. The dark box holds the token that the target chose after
    the accepted path: a correction, or a bonus token if that path ends at a leaf. A row that had ended has none.

    Args:
        step: A step of a generation (an item of `model.last_speculation.trace`).
        tokenizer: Decodes the tokens to show; None shows their ids.
        row: Index of the sequence in the batch.
        theme: `"light"` or `"dark"`.

    Raises:
        ValueError: Not a step of a trace.
    """
    from matplotlib import legend_handler

    if not hasattr(step, "rows"):
        raise ValueError(f"One step is needed, such as model.last_speculation.trace[0], got a {type(step).__name__}.")
    traced = step.rows[row]
    nodes = [node for node, parent in enumerate(traced.parents) if node == 0 or parent != ROOT_PARENT]
    parents = {node: traced.parents[node] for node in nodes[1:]}
    if traced.path:
        parents[TARGET] = traced.path[-1]
    boxes, width, height = _boxes(traced, parents, tokenizer)
    sources = list(dict.fromkeys(traced.sources[node] for node in nodes[1:]))
    with drawing(theme) as (pyplot, colors):
        colored = drafter_colors(sources, colors)
        legend = _legend(traced, sources, colored, colors)
        handle = (2.0 + 0.8) * TOKEN_TEXT  # with the space after it; matplotlib's default, in units of the font size
        widths = (_text_width(label, TOKEN_TEXT) + handle + LEGEND_SPACING for label in legend)
        width = max(width, sum(widths) + 2 * PADDING)
        size = width / POINTS_PER_INCH, (height + HEADER + FOOTER) / POINTS_PER_INCH
        axes: Axes = pyplot.figure(figsize=size).add_axes((0, 0, 1, 1))
        axes.set_xlim(0, width)
        axes.set_ylim(-FOOTER, height + HEADER)
        axes.set_axis_off()
        for node, parent in parents.items():
            known = traced.draft_probs is not None and node != TARGET
            confidence = traced.draft_probs[node] if known and traced.draft_probs else 0.2
            kept = node == TARGET or node in traced.path
            before, box = boxes[parent], boxes[node]
            start = before.left + before.width
            # level up to the end of the parent's level, so that the line crosses no other box
            places = [start, max(start, box.left - GAP), box.left], [before.middle, before.middle, box.middle]
            axes.plot(*places, linestyle="--" if node == TARGET else "-",
                      color=colors.ink if node == TARGET else colored[traced.sources[node]],
                      linewidth=0.8 + 3.2 * confidence, alpha=1.0 if kept else 0.6, solid_capstyle="butt")  # fmt: skip
        for node, box in boxes.items():
            color = colored[traced.sources[node]] if node in parents and node != TARGET else colors.ink
            _draw_node(axes, traced, node, box, color, colors)
        axes.legend(legend.values(), legend.keys(), loc="upper left", ncols=len(legend), borderaxespad=0.0,
                    bbox_to_anchor=(PADDING, height + HEADER - 18), bbox_transform=axes.transData, borderpad=0.0,
                    columnspacing=LEGEND_SPACING / TOKEN_TEXT, fontsize=TOKEN_TEXT,
                    handler_map={tuple: legend_handler.HandlerTuple(ndivide=None, pad=0.2)})  # fmt: skip
        title = f"{traced.num_drafted} drafted, {max(len(traced.emitted) - 1, 0)} accepted"
        axes.text(PADDING, height + HEADER - 4, title, fontsize=11, fontweight="bold", va="top")
        if traced.num_drafted:
            by = "the model" if traced.draft_probs is None else "the drafter / by the model"
            axes.text(PADDING, 4 - FOOTER, f"numbers: probability by {by}", fontsize=SMALL_TEXT, color=colors.muted)
    return axes


@dataclass(frozen=True, slots=True)
class _Box:
    """Place of a node in a plot, in points, and its text."""

    left: float
    middle: float  # y coordinate
    width: float
    text: str


def _boxes(row: TracedRow, parents: Mapping[int, int], tokenizer: Any) -> tuple[dict[int, _Box], float, float]:
    """Return each node's box, and width and height of the whole; a level is as wide as its widest box."""
    children: dict[int, list[int]] = {}
    depths = {0: 0}
    for node, parent in parents.items():
        children.setdefault(parent, []).append(node)
    texts = {node: token_label(tokenizer, row.emitted[-1] if node == TARGET else row.tokens[node], LONGEST)
             for node in (0, *parents)}  # fmt: skip
    heights, leaves = _heights(0, children)
    for node in heights:  # parents come after their children
        chain = [node]
        while chain[-1]:
            chain.append(parents[chain[-1]])
        depths[node] = len(chain) - 1
    widths = {node: max(_text_width(text, TOKEN_TEXT, bold=True),
                        _text_width(_probabilities(row, node), SMALL_TEXT)) + 2 * PADDING
              for node, text in texts.items()}  # fmt: skip
    lefts = [PADDING]
    for depth in range(max(depths.values()) + 1):
        lefts.append(lefts[-1] + GAP + max(widths[node] for node in depths if depths[node] == depth))
    boxes = {node: _Box(lefts[depths[node]], (heights[node] + leaves + 0.5) * ROW_HEIGHT, widths[node], texts[node])
             for node in texts}  # fmt: skip
    return boxes, max(lefts[-1] - GAP + PADDING, NARROWEST), leaves * ROW_HEIGHT


def _text_width(text: str, size: float, *, bold: bool = False) -> float:
    """Return the width of a text in points."""
    from matplotlib import font_manager, textpath

    if not text:
        return 0.0
    font = font_manager.FontProperties(weight="bold" if bold else "normal", size=size)
    return float(textpath.TextPath((0, 0), text, prop=font).get_extents().x1)


def _probabilities(row: TracedRow, node: int) -> str:
    """Return the probabilities of a drafted node, by its drafter (if known) and by the target."""
    if node in (0, TARGET):
        return ""
    draft_prob = "" if row.draft_probs is None else f"{row.draft_probs[node]:.2f} / "
    return f"{draft_prob}{row.target_probs[node]:.2f}"


def _draw_node(axes: Axes, row: TracedRow, node: int, box: _Box, color: str, colors: Colors) -> None:
    """Draw a node of a step's tree: a box with the token, and probabilities below it; accepted nodes are filled."""
    from matplotlib import patches

    kept, chosen, numbers = node in row.path, node == TARGET, _probabilities(row, node)
    corner, style = (box.left, box.middle - BOX_HEIGHT / 2), "round,pad=0,rounding_size=4"
    for face, edge, alpha in (
        (colors.ink if chosen else colors.background, "none", 1.0), (color if kept else "none", "none", FILLED),
        ("none", color, 1.0 if kept or chosen else 0.6),
    ):  # fmt: skip
        axes.add_patch(patches.FancyBboxPatch(
            corner, box.width, BOX_HEIGHT, style, facecolor=face, edgecolor=edge, alpha=alpha,
            linewidth=1.6 if kept else 0.9, zorder=3,
        ))  # fmt: skip
    written = colors.background if chosen else colors.ink if kept else colors.muted
    middle = box.left + box.width / 2
    axes.text(middle, box.middle + (6.5 if numbers else 0.0), box.text, fontsize=TOKEN_TEXT, color=written, zorder=4,
              fontweight="bold" if kept or chosen else "normal", ha="center", va="center_baseline")  # fmt: skip
    if numbers:
        axes.text(middle, box.middle - 6.0, numbers, fontsize=SMALL_TEXT, color=written, zorder=4,
                  ha="center", va="center_baseline")  # fmt: skip


def _legend(row: TracedRow, sources: Sequence[str], colored: Mapping[str, str], colors: Colors) -> dict[str, Any]:
    """Return the legend's handles by label; the boxes of root and accepted nodes look as in the tree."""
    from matplotlib import lines, patches

    def box(color: str) -> Any:
        return patches.Patch(facecolor=(color, FILLED) if row.path else "none", edgecolor=color)

    entries: dict[str, Any] = {source: lines.Line2D([], [], color=colored[source], linewidth=3) for source in sources}
    entries["root"] = box(colors.ink)
    accepted = dict.fromkeys(row.sources[node] for node in row.path[1:])
    if accepted:
        entries["accepted"] = tuple(box(colored[source]) for source in accepted)
    if row.path:
        entries["the model's own token"] = patches.Patch(facecolor=colors.ink)
    return entries


def _heights(root: _Node, children: Mapping[_Node, Sequence[_Node]]) -> tuple[dict[_Node, float], int]:
    """Return the y coordinate of each node, and the number of leaves.

    Leaves are at -1, -2, ...; a parent is at the mean of its children.
    """
    heights: dict[_Node, float] = {}
    leaves = 0

    def place(node: _Node) -> float:
        nonlocal leaves
        below = [place(child) for child in children.get(node, ())]
        if not below:
            leaves += 1
        heights[node] = sum(below) / len(below) if below else float(-leaves)
        return heights[node]

    place(root)
    return heights, leaves


@dataclass(frozen=True, slots=True)
class StepThrough:
    """Trees of a generation: in a notebook a slider and a play button, elsewhere a picture of several steps.

    The slider needs ipywidgets and a running kernel. The picture is always part of the output, for pages that show no
    widgets, such as GitHub's.
    """

    png: bytes  # several steps below each other
    box: Any = field(default=None, repr=False)  # the ipywidgets box with slider and images; None without

    def save(self, path: str | Path) -> None:
        """Save the picture as PNG."""
        Path(path).write_bytes(self.png)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        picture = {"image/png": base64.b64encode(self.png).decode(), "text/plain": repr(self)}
        return picture if self.box is None else {**self.box._repr_mimebundle_(), **picture}

    def __repr__(self) -> str:
        return f"StepThrough({'slider' if self.box is not None else 'picture'})"


def step_through(
    trace: Sequence[TracedStep], tokenizer: Any = None, *, row: int = 0, num_static: int = 3
) -> StepThrough:
    """Show the tree of every step (`plot_step`) with a slider, and the text that the step added.

    All steps are drawn first, about 0.1 s each, so that the slider needs no kernel later; of a long generation, pass a
    part such as `trace[:40]`. Without ipywidgets or outside a notebook, the first steps are drawn as one picture.

    Args:
        trace: Steps of a generation (`model.last_speculation.trace`).
        tokenizer: Decodes the tokens to show; None shows their ids and no text.
        row: Index of the sequence in the batch.
        num_static: Number of steps in the static picture.

    Raises:
        ValueError: The trace is empty: the call had no `speculative={"method": ..., "trace": True}`, or no steps.
    """
    require_steps(trace)
    interactive = importlib.util.find_spec("ipywidgets") is not None and has_kernel()
    images = [_image(step, number, len(trace), tokenizer, row)
              for number, step in enumerate(trace if interactive else trace[:num_static], start=1)]  # fmt: skip
    texts = [_text_until(trace, step, tokenizer, row) if interactive else "" for step in range(1, len(images) + 1)]
    return StepThrough(_stack(images[:num_static]), _box(images, texts) if interactive else None)


def _image(step: TracedStep, number: int, total: int, tokenizer: Any, row: int) -> bytes:
    """Return the plot of a step as PNG bytes."""
    axes: Any = plot_step(step, tokenizer, row=row)
    content = io.BytesIO()
    with drawing() as (pyplot, _):
        # in the line of the title, because the footer is on the left; one unit of the axes is one point
        axes.text(axes.get_xlim()[1] - PADDING, axes.get_ylim()[1] - 4, f"step {number} of {total}", ha="right",
                  va="top")  # fmt: skip
        axes.figure.savefig(content, format="png", dpi=100, bbox_inches="tight")
        pyplot.close(axes.figure)
    return _compressed(content.getvalue())


def _compressed(png: bytes) -> bytes:
    from PIL import Image

    content = io.BytesIO()
    with Image.open(io.BytesIO(png)) as image:
        # few colours: a trace has tens of images, which are stored in the notebook
        reduced = image.convert("RGBA").quantize(64, method=Image.Quantize.FASTOCTREE)
        reduced.save(content, format="PNG", optimize=True)
    return content.getvalue()


def _stack(pngs: Sequence[bytes]) -> bytes:
    """Return one image with the given ones below each other, on the background of the first."""
    from PIL import Image

    images = [Image.open(io.BytesIO(png)).convert("RGBA") for png in pngs]
    size = max(image.width for image in images), sum(image.height for image in images)
    whole, top = Image.new("RGBA", size, images[0].getpixel((0, 0))), 0
    for image in images:
        whole.paste(image, (0, top))
        top += image.height
    content = io.BytesIO()
    whole.save(content, format="PNG")
    return _compressed(content.getvalue())


def _text_until(trace: Sequence[TracedStep], step: int, tokenizer: Any, row: int) -> str:
    """Return the text up to a step (counted from 1) as HTML, with the text of that step highlighted."""
    if tokenizer is None:
        return ""
    style = f"background:{PALETTE[0]}40;border-bottom:2px solid {PALETTE[0]};border-radius:2px"
    parts = [
        f'<span style="{style}">{html.escape(piece.text)}</span>' if piece.step == step else html.escape(piece.text)
        for piece in colored_text(trace, tokenizer, row=row).pieces
        if piece.step <= step
    ]
    return f'<div style="white-space:pre-wrap;line-height:1.7">{"".join(parts)}</div>'


def _box(images: Sequence[bytes], texts: Sequence[str]) -> Any:
    """Return widgets: play button and slider, and the text and image of the step that they select.

    With ipywidgets 8 they are linked in the browser, so that they also work in a saved page; earlier versions, which
    Colab has, need the kernel.
    """
    import ipywidgets

    def page(number: int) -> Any:
        image = ipywidgets.Image(value=images[number], format="png", layout={"max_width": "100%", "height": "auto"})
        return ipywidgets.VBox([ipywidgets.HTML(texts[number]), image])

    slider = ipywidgets.IntSlider(value=1, min=1, max=len(images), description="step")
    play = ipywidgets.Play(value=1, min=1, max=len(images), interval=1500)
    ipywidgets.jslink((play, "value"), (slider, "value"))
    if hasattr(ipywidgets, "Stack"):
        # page 0 is never shown: steps are counted from 1
        shown = ipywidgets.Stack([ipywidgets.HTML(), *map(page, range(len(images)))], selected_index=1)
        ipywidgets.jslink((slider, "value"), (shown, "selected_index"))
    else:
        shown = page(0)

        def show(change: Any) -> None:
            text, image = shown.children
            text.value, image.value = texts[change["new"] - 1], images[change["new"] - 1]

        slider.observe(show, "value")
    return ipywidgets.VBox([ipywidgets.HBox([play, slider]), shown])
