"""The colours and the look of every picture: one palette, on no background, readable on light pages and on dark ones.

matplotlib is an optional dependency.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

PALETTE = ("#3D8FD9", "#E08A1E", "#2CA089", "#D6568C", "#8E7CC3", "#9A9A2E")
"""Told apart by people who see red and green alike; three to one against white and against black."""
INK = "#808080"
"""Of text and lines."""


@contextmanager
def plot_style() -> Iterator[None]:
    """What matplotlib draws inside looks like this."""
    from matplotlib import interactive, is_interactive, rc_context, rcsetup

    settings = {
        "figure.facecolor": "none", "axes.facecolor": "none", "savefig.facecolor": "none", "legend.frameon": False,
        "axes.spines.top": False, "axes.spines.right": False, "axes.prop_cycle": rcsetup.cycler(color=PALETTE),
        "font.size": 9.0, "axes.titlesize": 10.0,
        **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "axes.titlecolor", "xtick.color",
                         "ytick.color", "legend.labelcolor"), INK),
    }  # fmt: skip
    with rc_context(settings):
        yield
        # with its first figure a notebook's backend turns this on, and shows no later one where it is off again
        shows_at_once = is_interactive()
    interactive(shows_at_once)


@contextmanager
def drawing() -> Iterator[Any]:
    """`matplotlib.pyplot`, with this look for what is drawn inside.

    Raises:
        ImportError: matplotlib is not there.
    """
    from matplotlib import pyplot

    with plot_style():
        yield pyplot


def save_plot(axes: Axes | Sequence[Axes], path: str | Path) -> None:
    """Write the figure of some axes to a file, without a background, and forget it."""
    with drawing() as pyplot:
        first: Any = axes if hasattr(axes, "figure") else axes[0]
        first.figure.savefig(path, dpi=120, bbox_inches="tight")
        pyplot.close(first.figure)
