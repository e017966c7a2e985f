"""Step through the trees of a traced generation with a slider, or look at a picture of several steps."""

from __future__ import annotations

import base64
import html
import importlib.util
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_specdec.reporting.palette import PALETTE, drawing
from hf_specdec.reporting.trace import TracedStep
from hf_specdec.viz.kernel import has_kernel
from hf_specdec.viz.steps import require_steps
from hf_specdec.viz.text import colored_text
from hf_specdec.viz.trees import PADDING, plot_step

DPI = 100
NUM_COLORS = 64
"""Colours per image: a trace has tens of images, which are stored in the notebook."""
PLAY_MILLISECONDS = 1500
"""Time per step while playing."""


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
        axes.figure.savefig(content, format="png", dpi=DPI, bbox_inches="tight")
        pyplot.close(axes.figure)
    return _compressed(content.getvalue())


def _compressed(png: bytes) -> bytes:
    from PIL import Image

    content = io.BytesIO()
    with Image.open(io.BytesIO(png)) as image:
        reduced = image.convert("RGBA").quantize(NUM_COLORS, method=Image.Quantize.FASTOCTREE)
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
    play = ipywidgets.Play(value=1, min=1, max=len(images), interval=PLAY_MILLISECONDS)
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
