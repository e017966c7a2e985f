"""Colours and matplotlib style of all plots, in a light and a dark theme; matplotlib is imported when used."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hf_specdec.errors import InvalidConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

Theme = Literal["light", "dark"]

PALETTE = ("#3D8FD9", "#E08A1E", "#2CA089", "#D6568C", "#8E7CC3", "#9A9A2E")
"""Colours of text and bars on pages and terminals whose background is not known: HTML and ANSI output."""

SMALL_TEXT = 8.0
"""Size of the smallest text in a plot, in points."""


@dataclass(frozen=True, slots=True)
class Colors:
    """Colours of a theme. Text has a contrast of at least 4.5 to the background, data of at least 3 (WCAG)."""

    background: str
    ink: str  # text, axes and the target's own token
    muted: str  # less important text and lines
    data: tuple[str, ...]  # distinct with red-green colour blindness


THEMES: dict[Theme, Colors] = {
    "light": Colors(
        background="#FFFFFF", ink="#1F2328", muted="#59636E",
        data=("#1F6FBF", "#C25E00", "#14806B", "#B8326D", "#6B57B0", "#76761A"),
    ),
    "dark": Colors(
        background="#0D1117", ink="#E6EDF3", muted="#9198A1",
        data=("#58A6F0", "#F0A03C", "#3DBFA6", "#F078AC", "#AC9AE6", "#C2C24A"),
    ),
}  # fmt: skip


DRAFTER_COLORS = {"eagle": 0, "prompt_lookup": 1, "token_recycling": 2, "medusa": 3, "history": 4, "draft_model": 5}
"""Index of each drafter's colour in `Colors.data`, so that it is the same in all plots."""

COMMON_COLORS = 3
"""Other drafters get the first three colours last, because most trees of "auto" are merged from their drafters."""


def drafter_colors(names: Iterable[str], colors: Colors) -> dict[str, str]:
    """Return a colour for each drafter, or other label, of a plot: its own, or one that is free in this plot.

    Colours repeat if there are more names.
    """
    wanted = sorted(set(names))
    places = {name: DRAFTER_COLORS[name] for name in wanted if name in DRAFTER_COLORS}
    order = [*range(COMMON_COLORS, len(colors.data)), *range(COMMON_COLORS)]
    free = [place for place in order if place not in places.values()] or order
    others = [name for name in wanted if name not in places]
    places |= {name: free[number % len(free)] for number, name in enumerate(others)}
    return {name: colors.data[place] for name, place in places.items()}


def colors_of(theme: Theme) -> Colors:
    """Return the colours of a theme."""
    if theme not in THEMES:
        raise InvalidConfigError(f"Unknown theme {theme!r}.", f"Use one of {', '.join(map(repr, THEMES))}.")
    return THEMES[theme]


@contextmanager
def plot_style(theme: Theme = "light") -> Iterator[Colors]:
    """Context manager that applies the package's style to plots made in its block, and yields the theme's colours."""
    colors = colors_of(theme)
    from matplotlib import interactive, is_interactive, rc_context, rcsetup

    settings = {
        **dict.fromkeys(("figure.facecolor", "axes.facecolor"), colors.background),
        "savefig.facecolor": "auto", "legend.frameon": False,
        "axes.spines.top": False, "axes.spines.right": False, "axes.prop_cycle": rcsetup.cycler(color=colors.data),
        "font.size": 9.0, "axes.titlesize": 10.0,
        **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "axes.titlecolor", "xtick.color",
                         "ytick.color", "legend.labelcolor"), colors.ink),
    }  # fmt: skip
    with rc_context(settings):
        yield colors
        # the first figure makes a notebook's backend interactive; rc_context would undo that and hide later figures
        was_interactive = is_interactive()
    interactive(was_interactive)


@contextmanager
def drawing(theme: Theme = "light") -> Iterator[tuple[Any, Colors]]:
    """Context manager that yields `matplotlib.pyplot` and the theme's colours, and applies its style in its block."""
    colors_of(theme)
    from matplotlib import pyplot

    with plot_style(theme) as colors:
        yield pyplot, colors


def save_plot(axes: Axes | Sequence[Axes], path: str | Path) -> None:
    """Save the figure that contains the given axes to a file, and close the figure.

    Args:
        axes: What a function of `hf_specdec.viz` returned.
        path: File to write or replace; its suffix selects the format, PNG if it has none.
    """
    with drawing() as (pyplot, _):
        first: Any = axes if hasattr(axes, "figure") else axes[0]
        first.figure.savefig(path, dpi=120, bbox_inches="tight")
        pyplot.close(first.figure)
