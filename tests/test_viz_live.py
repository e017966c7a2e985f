"""The slider through a trace, its static picture, the live streamer and the race."""

from __future__ import annotations

import base64
import importlib.util
import io
import sys
import types
from pathlib import Path
from typing import Any

import matplotlib
import pytest
import torch
from matplotlib import pyplot
from PIL import Image

from hf_specdec import viz
from hf_specdec.viz import tree_plots as stepper
from models import prompts
from test_viz import Letters, traced

matplotlib.use("Agg")
STEPS = [3, 1, 2, 1]


def steps() -> Any:
    return traced("ab <c>&d", STEPS)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A process that looks like a kernel; returns what was displayed and each update of it."""
    shown: list[Any] = []

    class Handle:
        def update(self, value: Any) -> None:
            shown.append(value._repr_html_())

    def display(value: Any, *, display_id: bool) -> Handle:
        assert display_id
        shown.append(value._repr_html_())
        return Handle()

    fake = types.SimpleNamespace(get_ipython=lambda: types.SimpleNamespace(kernel=object()),
                                 display=types.SimpleNamespace(display=display))  # fmt: skip
    monkeypatch.setitem(sys.modules, "IPython", fake)
    return shown


def size(png: bytes) -> tuple[int, int]:
    return Image.open(io.BytesIO(png)).size


def test_without_a_kernel_several_steps_are_one_picture(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    open_figures = pyplot.get_fignums()  # of other tests
    one, three = (viz.step_through(steps(), Letters(), num_static=number) for number in (1, 3))
    assert one.box is None
    assert size(three.png)[1] > 2 * size(one.png)[1]
    shown = three._repr_mimebundle_()
    assert base64.b64decode(shown["image/png"]) == three.png
    assert shown["text/plain"] == "StepThrough(picture)"
    assert set(shown) == {"image/png", "text/plain"}
    three.save(tmp_path / "steps.png")
    assert (tmp_path / "steps.png").read_bytes() == three.png
    assert pyplot.get_fignums() == open_figures  # a notebook would show open figures as well


def test_the_number_of_a_step_touches_no_other_text(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(pyplot, "close", lambda _: None)
        stepper._image(steps()[0], 1, 19, Letters(), 0)
    figure = pyplot.gcf()
    figure.canvas.draw()
    boxes = {text.get_text(): text.get_window_extent() for text in figure.findobj(matplotlib.text.Text)
             if text.get_text()}  # fmt: skip
    number = boxes.pop("step 1 of 19")
    assert boxes
    assert not [text for text, box in boxes.items() if box.overlaps(number)]
    assert figure.bbox.x0 <= number.x0 < number.x1 <= figure.bbox.x1
    pyplot.close(figure)


def test_a_notebook_gets_a_slider_with_a_page_per_step() -> None:
    """In a real kernel, see test_notebooks.py."""
    texts = [stepper._text_until(steps(), number, Letters(), 0) for number in range(1, len(STEPS) + 1)]
    assert texts[0].index("a") < texts[0].index("<span")  # the prefill's token, then that of the step
    assert ">b &lt;</span>" in texts[0]
    assert "c</span>" in texts[1]
    assert [text.count("<span") for text in texts] == [1] * len(STEPS)
    images = [stepper._image(step, number, 4, None, 0) for number, step in enumerate(steps(), 1)]
    box = stepper._box(images, texts)
    (play, slider), stack = box.children[0].children, box.children[1]
    assert (slider.min, slider.max, slider.value) == (1, 4, 1) == (play.min, play.max, play.value)
    assert [page.children[1].value for page in stack.children[1:]] == images
    assert stack.selected_index == slider.value
    shown = viz.StepThrough(images[0], box)._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in shown
    assert base64.b64decode(shown["image/png"]) == images[0]  # for pages that show no widgets


def test_earlier_ipywidgets_change_the_page_in_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("ipywidgets.Stack")
    (_, slider), (text, image) = (part.children for part in stepper._box([b"1", b"2"], ["one", "two"]).children)
    assert (text.value, image.value) == ("one", b"1")
    slider.value = 2
    assert (text.value, image.value) == ("two", b"2")


def test_a_kernel_without_ipywidgets_gets_the_picture(kernel: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ipywidgets" else find(name))
    assert viz.step_through(steps()).box is None


def test_no_trace_is_refused() -> None:
    with pytest.raises(ValueError, match='"trace": True'):
        viz.step_through([])


def test_live_numbers_are_those_of_the_call(llama: Any, capsys: pytest.CaptureFixture[str]) -> None:
    ids, _ = prompts(1)
    tokenizer = types.SimpleNamespace(decode=lambda tokens, **_: "".join(f" {token}" for token in tokens))
    runs = []
    for speculative in (None, "prompt_lookup"):
        streamer = viz.LiveStreamer(tokenizer, str(speculative))
        out = llama.generate(ids, max_new_tokens=30, do_sample=False, speculative=speculative, streamer=streamer)
        text = tokenizer.decode(out[0, ids.shape[1] :].tolist())
        assert "".join(piece.text for piece in streamer.pieces) == text
        written = capsys.readouterr().out
        assert written == f"{text}\n{streamer.summary}\n"
        assert f"{speculative}: 30 tokens" in written
        runs.append(streamer)
    plain, lookup = runs
    stats = llama.last_speculation
    assert plain.tau == 1.0
    assert len(plain.pieces) == 30
    assert lookup.tau == stats.mean_accepted_length > 1.0
    assert [piece.num_tokens for piece in lookup.pieces] == [1, *stats.accepted_per_step[0]]
    assert lookup.seconds >= stats.total_seconds * 0.9
    assert [piece.seconds for piece in lookup.pieces] == sorted(piece.seconds for piece in lookup.pieces)


def streamed(text: str, sizes: list[int], name: str = "") -> viz.LiveStreamer:
    streamer, left = viz.LiveStreamer(Letters(), name), list(text.encode())
    streamer.put(torch.zeros(1, 4, dtype=torch.long))
    for count in sizes:
        for _ in range(count):
            streamer.put(torch.tensor([left.pop(0)]))
        streamer.end_step()
    streamer.end()
    return streamer


def test_a_notebook_is_updated_in_place(kernel: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_specdec.viz.live.REFRESH_SECONDS", 0.0)
    streamer = streamed("aé <b>", [1, 1, 1, 3], "race")
    assert [piece.text for piece in streamer.pieces] == ["a", "", "é", " <b"]  # half a letter waits for the rest
    assert len(kernel) == 6  # displayed, four steps, the end
    assert "tau 1.67" in kernel[-1]
    assert 'title="step 3: 3 tokens"> &lt;b</span>' in kernel[-1]


def test_a_notebook_is_not_updated_for_every_token(kernel: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_specdec.viz.live.REFRESH_SECONDS", 1e9)
    streamed("abcdef", [1] * 6)
    assert len(kernel) == 2


def test_a_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="batch of 2"):
        viz.LiveStreamer(Letters()).put(torch.zeros(2, 3, dtype=torch.long))


def test_a_race_is_replayed_by_css_and_readable_without() -> None:
    runs = streamed("a <b> c", [1] * 7, "plain"), streamed("a <b> c", [1, 4, 2], "auto")
    race = viz.race(*runs, speed=2.0)
    page = race._repr_html_()
    assert page.count("<th ") == 2
    assert page.count("<span") == 7 + 3
    assert f"animation-delay:{runs[1].pieces[-1].seconds / 2:.2f}s;border-bottom" in page
    assert "opacity" not in page.split("</style>")[1]  # without the sheet nothing is hidden
    assert "3.00 tokens per forward" in page
    assert "<b>" not in page.replace("<b class", "")  # escaped
    assert str(race) == f"{runs[0].summary}\n{runs[1].summary}"


@pytest.mark.parametrize("arguments", [{}, {"speed": 0.0}, {"unfinished": True}])
def test_a_race_needs_finished_runs(arguments: dict[str, Any]) -> None:
    runs = [] if not arguments else [streamed("ab", [1, 1])]
    if arguments.pop("unfinished", False):
        runs.append(viz.LiveStreamer(Letters(), "late"))
    with pytest.raises(ValueError, match="needs finished runs"):
        viz.race(*runs, **arguments)


def test_the_example_of_the_docs_runs(llama: Any, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[1] / "docs" / "pictures.md").read_text()
    code = page[page.index("## Live") :].split("```python\n", 1)[1].split("```", 1)[0]
    tokenizer = types.SimpleNamespace(decode=lambda tokens, **_: " ".join(map(str, tokens)))
    scope: dict[str, Any] = {"model": llama, "inputs": {"input_ids": prompts(1)[0]}, "tokenizer": tokenizer}
    exec(code, scope)
    assert [run.num_tokens for run in scope["runs"]] == [64, 64]
    assert capsys.readouterr().out.count("tau") == 2
