"""Pictures are drawn of what a trace tells; coloured text is the text; slider, live streamer and race."""

from __future__ import annotations

import base64
import html
import io
import itertools
import re
import sys
import types
from pathlib import Path
from typing import Any

import matplotlib
import pytest
import torch
from matplotlib import pyplot
from PIL import Image

import drafters
from hf_specdec import InvalidConfigError, viz
from hf_specdec.reporting.palette import DRAFTER_COLORS, SMALL_TEXT, THEMES, Theme, drafter_colors
from hf_specdec.reporting.stats import SpeculationStats, TracedRow, TracedStep
from hf_specdec.viz import tree_plots
from models import prompts

matplotlib.use("Agg")
Patch = pytest.MonkeyPatch
Captured = pytest.CaptureFixture[str]


class Letters:
    """A tokenizer of bytes: letters of several bytes come in several tokens."""

    def decode(self, tokens: list[int], **_: Any) -> str:
        return bytes(tokens).decode(errors="replace")


def traced(text: str, sizes: list[int]) -> list[TracedStep]:
    """Steps that gave so many bytes each; the prompt gave the first."""
    left, steps = list(text.encode()), []
    root = left.pop(0)
    for size in sizes:
        emitted, left = left[:size], left[size:]
        nodes = [root, *emitted[:-1], 120]
        parents = [-1, *range(len(nodes) - 1)]
        row = TracedRow(nodes, parents, [1.0] * len(nodes), [1.0] * len(nodes), nodes, ["eagle"] * len(nodes),
                        list(range(size)), emitted)  # fmt: skip
        steps.append(TracedStep([row], 0.1 * len(steps), 0.01, 0.05, 0.001))
        root = emitted[-1]
    assert not left
    return steps


@pytest.mark.parametrize("sizes", [[3, 1, 4, 2], [1] * 10, [10]])
@pytest.mark.parametrize("text", ["ab <c> &\nde", "aé ü€ 12"])
def test_coloured_text_is_the_text(text: str, sizes: list[int]) -> None:
    sizes = [*sizes, len(text.encode()) - 1 - sum(sizes)]
    steps = traced(text, [size for size in sizes if size])
    found = viz.colored_text(steps, Letters())
    assert "".join(piece.text for piece in found.pieces) == text
    assert re.sub("\x1b\\[[0-9;]*m", "", str(found)) == text
    assert html.unescape(re.sub("<[^>]*>", "", found._repr_html_())) == text
    colored = sum(piece.num_tokens > 1 for piece in found.pieces)
    assert found._repr_html_().count("<span") == colored
    assert (str(found) != text) == (colored > 0)


def test_half_a_letter_waits_for_the_rest_or_is_shown_at_the_end() -> None:
    steps = traced("aé", [1, 1])
    pieces = viz.colored_text(steps, Letters()).pieces
    assert [(piece.text, piece.num_tokens) for piece in pieces] == [("a", 1), ("é", 1)]
    pieces = viz.colored_text(steps[:1], Letters()).pieces
    assert [(piece.text, piece.step) for piece in pieces] == [("a", 0), ("�", 1)]


class BytesApart(Letters):
    """Every byte of an incomplete letter is shown apart, as by tokenizers that fall back to bytes."""

    def decode(self, tokens: list[int], **_: Any) -> str:
        text = super().decode(tokens)
        left = len(tokens) - len(text.rstrip("�").encode())
        return text.rstrip("�") + "�" * left


def test_text_after_a_letter_of_many_tokens_is_kept() -> None:
    found = viz.colored_text(traced("a🙂bcd", [1, 1, 1, 1, 2, 1]), BytesApart())
    assert [(piece.text, piece.step) for piece in found.pieces] == [("a", 0), ("🙂", 4), ("bc", 5), ("d", 6)]
    assert 'title="step 5: 2 tokens"' in found._repr_html_()


def test_a_tokenizer_that_changes_its_last_letters_loses_none() -> None:
    class Spaces(Letters):
        def decode(self, tokens: list[int], **_: Any) -> str:
            return super().decode(tokens).replace(" .", ".")

    pieces = viz.colored_text(traced("a .bc", [1, 1, 2]), Spaces()).pieces
    assert "".join(piece.text for piece in pieces) == "a.bc"
    assert pieces[-1].text == "bc"


def texts(axes: Any) -> str:
    return " ".join(text.get_text() for text in [*axes.texts, axes.title, axes._right_title])


@pytest.fixture
def stats(llama: Any) -> SpeculationStats:
    ids, _ = prompts(1)
    config = {**drafters.BY_NAME["eagle3"].add(llama), "trace": True, "num_steps": 3, "num_draft_tokens": 9}
    llama.generate(ids, max_new_tokens=30, do_sample=False, speculative=config)
    found: SpeculationStats = llama.last_speculation
    return found


def pictures(stats: SpeculationStats, **theme: Any) -> dict[str, Any]:
    log = [{"step": step, "loss": 1 / step, "top1_accuracy_1": 0.5} for step in range(1, 4)]
    return {
        "step": viz.plot_step(stats.trace[1], **theme), "widths": viz.plot_widths(stats.trace, **theme),
        "timeline": viz.plot_timeline(stats.trace, **theme), "stats": stats.plot(**theme),
        "acceptance": viz.plot_acceptance({"eagle": stats, "again": stats}, **theme),
        "costs": viz.plot_costs({"eager": (0.02, 0.03), "compiled": (0.01, 0.012)}, **theme),
        "tree": viz.plot_tree([(0,), (1,), (11,), (0, 0), (0, 1)], {(0,): 0.9, (0, 0): 0.5}, **theme),
        "run": viz.plot_run([*log, {"step": 3, "eval_tau": 2.0}], **theme)[0],
    }  # fmt: skip


@pytest.mark.slow
def test_every_picture_of_a_generation(stats: SpeculationStats, tmp_path: Path) -> None:
    drawn = pictures(stats)
    tree = drawn["step"]
    (row,) = stats.trace[1].rows
    assert all(str(token) in texts(tree) for token in [*row.tokens, row.emitted[-1]])
    assert f"{row.num_drafted} drafted, {len(row.emitted) - 1} accepted" in texts(tree)
    assert tree.get_legend().get_texts()[0].get_text() == "eagle"
    heights = [bar.get_height() for bar in drawn["widths"].containers[0]]
    assert heights == [step.rows[0].num_drafted for step in stats.trace]
    for name, axes in drawn.items():
        assert name == "step" or axes.figure.get_figwidth() <= 9, "text of a wider one shrinks on a page"
        viz.save_plot(axes, tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").stat().st_size > 2000
        assert matplotlib.image.imread(tmp_path / f"{name}.png")[..., 3].min() == 1.0  # opaque
    assert matplotlib.rcParams["text.color"] == "black"  # the style of other pictures does not change
    with pytest.raises(InvalidConfigError, match="'light', 'dark'"):
        viz.plot_widths(stats.trace, theme="blue")  # type: ignore[arg-type]


def contrast(first: Any, second: Any) -> float:
    """As WCAG defines it."""

    def luminance(color: Any) -> float:
        channels = matplotlib.colors.to_rgb(color)
        linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    darker, lighter = sorted((luminance(first), luminance(second)))
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("theme", THEMES)
def test_text_is_large_and_dark_enough(stats: SpeculationStats, theme: Theme) -> None:
    colors = THEMES[theme]
    assert min(contrast(color, colors.background) for color in (colors.ink, colors.muted)) >= 4.5
    assert min(contrast(color, colors.background) for color in colors.data) >= 3
    for name, axes in pictures(stats, theme=theme).items():
        axes.figure.canvas.draw()
        assert matplotlib.colors.to_hex(axes.figure.get_facecolor()) == colors.background.lower()
        seen = [text for text in axes.figure.findobj(matplotlib.text.Text) if text.get_text().strip()]
        assert len(seen) > 3, name
        assert min(text.get_fontsize() for text in seen if text.get_visible()) >= SMALL_TEXT, name
        matplotlib.pyplot.close(axes.figure)


def test_edges_of_a_step_meet_the_borders_of_boxes(stats: SpeculationStats) -> None:
    for step in stats.trace[:3]:
        axes = viz.plot_step(step)
        boxes = [patch for patch in axes.patches if patch.get_alpha() is not None]
        left, right = (
            {(box.get_x() + share * box.get_width(), box.get_y() + box.get_height() / 2) for box in boxes}
            for share in (0, 1)
        )
        assert len(axes.lines) == step.rows[0].num_drafted + 1
        for line in axes.lines:
            first, *_, last = zip(*line.get_data(), strict=True)
            assert first in right
            assert last in left
        matplotlib.pyplot.close(axes.figure)


def test_a_step_that_drafted_nothing_and_a_row_that_has_ended() -> None:
    plain = TracedRow([5], [-1], None, [1.0], [7], ["eagle"], [0], [7])
    ended = TracedRow([5, 6], [-1, 0], None, [1.0, 0.5], [7, 8], ["a", "a"], [], [])
    for row, count in ((plain, 0), (ended, 1)):
        assert f"{count} drafted, 0 accepted" in texts(viz.plot_step(TracedStep([row], 0.0, 0.0, 0.1, 0.0)))


SOURCES = ("eagle", "prompt_lookup", "token_recycling")


def drafted(number: int, *, num_accepted: int = 0) -> TracedStep:
    """A step whose first nodes are a chain, by the sources in turn, of which the first ones were accepted."""
    nodes, path = [5, *range(10, 10 + number)], list(range(num_accepted + 1))
    sources = ["eagle", *(SOURCES[place % len(SOURCES)] for place in range(number))]
    row = TracedRow(nodes, [-1, *range(number)], [0.5] * len(nodes), [0.5] * len(nodes), nodes, sources, path,
                    [*nodes[1 : num_accepted + 1], 99])  # fmt: skip
    return TracedStep([row], 0.0, 0.01, 0.05, 0.001)


def tick_labels(axes: Any, letter: str) -> list[str]:
    """Labels within the axes."""
    axes.figure.canvas.draw()
    first, last = sorted(getattr(axes, f"get_{letter}lim")())
    ticks = zip(getattr(axes, f"get_{letter}ticks")(), getattr(axes, f"get_{letter}ticklabels")(), strict=True)
    return [label.get_text() for place, label in ticks if first <= place <= last]


@pytest.mark.parametrize("count", [1, 5, 30])
def test_widths_show_no_step_that_was_not_done(count: int) -> None:
    assert tick_labels(viz.plot_widths([drafted(0)] * 3), "y") == ["1", "0", "1"]
    axes = viz.plot_widths([drafted(3 * number % 11) for number in range(count)])
    assert axes.get_xlim() == pytest.approx((0.3, count + 0.7))
    axes.figure.canvas.draw()
    inches = axes.get_window_extent().width / axes.figure.dpi / (count + 0.4)
    assert inches <= 1 or count < 5  # the figure is narrower if there are few steps
    legend, title = axes.get_legend().get_window_extent(), axes.set_title("poem, sampled")
    assert legend.x1 <= axes.figure.bbox.x1
    others = (title, axes.xaxis.label, *axes.get_xticklabels())
    assert not any(legend.overlaps(other.get_window_extent()) for other in others)
    matplotlib.pyplot.close(axes.figure)


@pytest.mark.parametrize(
    ("plot", "given", "message"),
    [
        (viz.plot_timeline, [], "The trace has no steps"),
        (viz.plot_widths, [], "The trace has no steps"),
        (viz.plot_widths, drafted(1), "A trace is needed, .* got a TracedStep"),
        (viz.plot_timeline, None, "A trace is needed, .* got a NoneType"),
        (viz.step_through, ["text"], "A trace is needed, .* got a list"),
        (viz.plot_step, [drafted(1)], r"such as model.last_speculation.trace\[0\], got a list"),
        (viz.plot_tree, [drafted(1)], r"Paths are needed, such as \[\(0,\), \(0, 0\)\], got a list"),
        (viz.plot_tree, SpeculationStats("eagle", 4, 9, 20, [[2]]), "Paths are needed, .* plot_step"),
        (viz.plot_tree, [(0,), (1, 0)], r"The node \(1, 0\) has no parent: add \(1,\)"),
        (viz.step_through, [], '"trace": True'),
        (lambda runs: viz.race(*runs), [], "needs finished runs"),
        (viz.plot_acceptance, [drafted(1)], "Statistics by name are needed, such as {'auto': .*}, got a list"),
    ],
)
def test_what_is_not_what_a_plot_shows_is_refused(plot: Any, given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plot(given)


@pytest.mark.parametrize("depth", [3, 16, 40])
def test_labels_of_acceptance_overlap_neither_each_other_nor_bars(depth: int) -> None:
    stats = SpeculationStats("eagle", 4, 9, 20, [[depth + 1]])
    axes = viz.plot_acceptance(dict.fromkeys(SOURCES, stats))
    assert tick_labels(axes, "x")
    boxes = [label.get_window_extent() for label in axes.get_xticklabels()]
    assert all(left.x1 + 4 < right.x0 for left, right in itertools.pairwise(boxes))
    assert axes.get_legend().get_window_extent().y0 >= axes.get_window_extent().y1  # every bar is full here
    matplotlib.pyplot.close(axes.figure)


def with_sources(*sources: str) -> TracedStep:
    """A step with a chain of nodes by these drafters."""
    step = drafted(len(sources))
    step.rows[0].sources[1:] = sources
    return step


@pytest.mark.parametrize("theme", THEMES)
def test_a_drafter_has_one_colour_in_all_plots(theme: Theme) -> None:
    """Whatever is drawn beside it, and wherever it stands in the tree."""
    steps = [with_sources("token_recycling", "prompt_lookup", "eagle"), with_sources("prompt_lookup"), drafted(3)]
    stats = dict.fromkeys(("prompt_lookup", "eagle"), SpeculationStats("", 4, 9, 20, [[3]]))
    plots = [viz.plot_acceptance(stats, theme=theme), *(viz.plot_step(step, theme=theme) for step in steps),
             *(viz.plot_widths([step], theme=theme) for step in steps)]  # fmt: skip
    seen: dict[str, set[str]] = {}
    for axes in plots:
        legend = axes.get_legend()
        for handle, text in zip(legend.legend_handles, legend.get_texts(), strict=True):
            name = text.get_text().split(":")[0]
            if name in SOURCES:
                color = handle.get_color() if hasattr(handle, "get_color") else handle.get_facecolor()
                seen.setdefault(name, set()).add(matplotlib.colors.to_hex(color).upper())
        matplotlib.pyplot.close(axes.figure)
    assert seen == {name: {THEMES[theme].data[number]} for number, name in enumerate(SOURCES)}


def test_drafters_of_one_plot_differ() -> None:
    colors = THEMES["light"]
    names = {**DRAFTER_COLORS, "template": 0, "mtp": 0}
    for found in itertools.combinations(names, len(colors.data)):
        assert len(set(drafter_colors(found, colors).values())) == len(colors.data), found
    assert set(drafter_colors(names, colors)) == set(names)  # more than there are colours: some repeat


def test_the_table_of_a_notebook() -> None:
    stats = SpeculationStats("<eagle>", 4, 9, 20, [[3, 1, 2, 2]], prefill_seconds=0.1, verify_seconds=0.3,
                             total_seconds=0.5)  # fmt: skip
    shown = stats._repr_html_()
    assert "&lt;eagle&gt;" in shown
    assert "75%" in shown
    assert "25%" in shown
    assert "verify 0.30 s" in shown
    assert "9 in 4 target forwards" in shown
    assert "-" in SpeculationStats()._repr_html_()
    deep = SpeculationStats("auto", 3, 24, 25, [[12, 11, 1]])._repr_html_()
    assert deep.count(">67%<") == 8
    assert "..." in deep
    assert "..." not in shown


# ------------------------------------------------------------------------------------------ slider, stream and race

STEPS = [3, 1, 2, 1]


def steps() -> Any:
    return traced("ab <c>&d", STEPS)


@pytest.fixture
def kernel(monkeypatch: Patch) -> list[Any]:
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


def test_without_a_kernel_several_steps_are_one_picture(tmp_path: Any, monkeypatch: Patch) -> None:
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


def test_the_number_of_a_step_touches_no_other_text(monkeypatch: Patch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(pyplot, "close", lambda _: None)
        tree_plots._image(steps()[0], 1, 19, Letters(), 0)
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
    texts = [tree_plots._text_until(steps(), number, Letters(), 0) for number in range(1, len(STEPS) + 1)]
    assert texts[0].index("a") < texts[0].index("<span")  # the prefill's token, then that of the step
    assert ">b &lt;</span>" in texts[0]
    assert "c</span>" in texts[1]
    assert [text.count("<span") for text in texts] == [1] * len(STEPS)
    images = [tree_plots._image(step, number, 4, None, 0) for number, step in enumerate(steps(), 1)]
    box = tree_plots._box(images, texts)
    (play, slider), stack = box.children[0].children, box.children[1]
    assert (slider.min, slider.max, slider.value) == (1, 4, 1) == (play.min, play.max, play.value)
    assert [page.children[1].value for page in stack.children[1:]] == images
    assert stack.selected_index == slider.value
    shown = viz.StepThrough(images[0], box)._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in shown
    assert base64.b64decode(shown["image/png"]) == images[0]  # for pages that show no widgets


def test_earlier_ipywidgets_change_the_page_in_the_kernel(monkeypatch: Patch) -> None:
    monkeypatch.delattr("ipywidgets.Stack")
    (_, slider), (text, image) = (part.children for part in tree_plots._box([b"1", b"2"], ["one", "two"]).children)
    assert (text.value, image.value) == ("one", b"1")
    slider.value = 2
    assert (text.value, image.value) == ("two", b"2")


def test_live_numbers_are_those_of_the_call(llama: Any, capsys: Captured) -> None:
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


def test_a_notebook_is_updated_in_place(kernel: list[Any], monkeypatch: Patch) -> None:
    monkeypatch.setattr("hf_specdec.viz.live.REFRESH_SECONDS", 0.0)
    streamer = streamed("aé <b>", [1, 1, 1, 3], "race")
    assert [piece.text for piece in streamer.pieces] == ["a", "", "é", " <b"]  # half a letter waits for the rest
    assert len(kernel) == 6  # displayed, four steps, the end
    assert "tau 1.67" in kernel[-1]
    assert 'title="step 3: 3 tokens"> &lt;b</span>' in kernel[-1]


def test_a_notebook_is_not_updated_for_every_token(kernel: list[Any], monkeypatch: Patch) -> None:
    monkeypatch.setattr("hf_specdec.viz.live.REFRESH_SECONDS", 1e9)
    streamed("abcdef", [1] * 6)
    assert len(kernel) == 2
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


def test_the_example_of_the_docs_runs(llama: Any, capsys: Captured) -> None:
    page = (Path(__file__).parents[1] / "docs" / "performance.md").read_text()
    code = page[page.index("## Live") :].split("```python\n", 1)[1].split("```", 1)[0]
    tokenizer = types.SimpleNamespace(decode=lambda tokens, **_: " ".join(map(str, tokens)))
    scope: dict[str, Any] = {"model": llama, "inputs": {"input_ids": prompts(1)[0]}, "tokenizer": tokenizer}
    exec(code, scope)
    assert [run.num_tokens for run in scope["runs"]] == [64, 64]
    assert capsys.readouterr().out.count("tau") == 2
