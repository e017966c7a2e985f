"""Colours and matplotlib style of all plots, readable on light and dark pages; matplotlib is imported when used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

PALETTE = ("#3D8FD9", "#E08A1E", "#2CA089", "#D6568C", "#8E7CC3", "#9A9A2E")
"""Colours of data, distinct with red-green colour blindness; contrast of at least 2.5 to white and 4 to black."""
INK = "#808080"
"""Colour of text and axes."""


@contextmanager
def plot_style() -> Iterator[None]:
    """Context manager that applies the package's style to plots made in its block."""
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
        # the first figure makes a notebook's backend interactive; rc_context would undo that and hide later figures
        was_interactive = is_interactive()
    interactive(was_interactive)


@contextmanager
def drawing() -> Iterator[Any]:
    """Context manager that yields `matplotlib.pyplot` and applies the package's style in its block.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib import pyplot

    with plot_style():
        yield pyplot


def save_plot(axes: Axes | Sequence[Axes], path: str | Path) -> None:
    """Save the figure that contains the given axes to a file, and close the figure."""
    with drawing() as pyplot:
        first: Any = axes if hasattr(axes, "figure") else axes[0]
        first.figure.savefig(path, dpi=120, bbox_inches="tight")
        pyplot.close(first.figure)
