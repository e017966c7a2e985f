"""Pictures are drawn of what a trace tells; coloured text is the text."""

from __future__ import annotations

import html
import itertools
import re
from pathlib import Path
from typing import Any

import matplotlib
import pytest

import drafters
from hf_specdec import InvalidConfigError, viz
from hf_specdec.reporting.palette import DRAFTER_COLORS, PALETTE, SMALL_TEXT, THEMES, Theme, drafter_colors
from hf_specdec.reporting.stats import SpeculationStats, TracedRow, TracedStep
from models import prompts

matplotlib.use("Agg")


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


def test_half_a_letter_waits_for_the_rest() -> None:
    pieces = viz.colored_text(traced("aé", [1, 1]), Letters()).pieces
    assert [(piece.text, piece.num_tokens) for piece in pieces] == [("a", 1), ("é", 1)]


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


def test_half_a_letter_at_the_end_is_shown() -> None:
    steps = traced("aé", [1, 1])[:1]
    assert [(piece.text, piece.step) for piece in viz.colored_text(steps, Letters()).pieces] == [("a", 0), ("�", 1)]


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


def luminance(color: Any) -> float:
    channels = matplotlib.colors.to_rgb(color)
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(first: Any, second: Any) -> float:
    """As WCAG defines it."""
    darker, lighter = sorted((luminance(first), luminance(second)))
    return (lighter + 0.05) / (darker + 0.05)


def over(color: Any, below: tuple[float, ...], alpha: float) -> tuple[float, ...]:
    """A transparent colour in front of another."""
    return tuple(alpha * a + (1 - alpha) * b for a, b in zip(matplotlib.colors.to_rgb(color), below, strict=True))


def check_text(text: Any, figure: Any) -> None:
    """Size and contrast of a text to what is drawn behind its centre."""
    below = matplotlib.colors.to_rgb(figure.get_facecolor())
    box = text.get_window_extent()
    middle = ((box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2)
    for patch in sorted(figure.findobj(matplotlib.patches.Patch), key=lambda patch: patch.get_zorder()):
        face = patch.get_facecolor()
        if patch.get_visible() and face[3] and patch.get_window_extent().contains(*middle):
            below = over(face[:3], below, face[3])
    shown = over(text.get_color(), below, 1.0 if text.get_alpha() is None else text.get_alpha())
    assert contrast(shown, below) >= 4.5, text
    assert text.get_fontsize() >= SMALL_TEXT, text


@pytest.mark.parametrize("theme", THEMES)
def test_text_is_large_and_dark_enough_and_integers_are_integers(stats: SpeculationStats, theme: Theme) -> None:
    for name, axes in pictures(stats, theme=theme).items():
        figure = axes.figure
        figure.canvas.draw()
        assert matplotlib.colors.to_hex(figure.get_facecolor()) == THEMES[theme].background.lower()
        seen = [
            text for text in figure.findobj(matplotlib.text.Text) if text.get_visible() and text.get_text().strip()
        ]
        assert len(seen) > 3, name
        for text in seen:
            check_text(text, figure)
        # milliseconds, losses and shares are not integers
        counted = {"widths": "xy", "stats": "xy", "acceptance": "x", "costs": "x", "tree": "x", "run": "x"}
        for letter in counted.get(name, ""):
            labels = [label.get_text() for label in getattr(axes, f"get_{letter}ticklabels")()]
            assert all(re.fullmatch("[−-]?[0-9]+", label) for label in labels), (name, labels)
        matplotlib.pyplot.close(figure)
    assert all(contrast(color, THEMES[theme].background) >= 3 for color in THEMES[theme].data)


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
    assert "0 drafted, 0 accepted" in texts(viz.plot_step(TracedStep([plain], 0.0, 0.0, 0.1, 0.0)))
    ended = TracedRow([5, 6], [-1, 0], None, [1.0, 0.5], [7, 8], ["a", "a"], [], [])
    assert "1 drafted, 0 accepted" in texts(viz.plot_step(TracedStep([ended], 0.0, 0.0, 0.1, 0.0)))


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


@pytest.mark.parametrize("count", [1, 5, 9, 30])
def test_widths_show_no_step_that_was_not_done(count: int) -> None:
    axes = viz.plot_widths([drafted(3 * number % 11) for number in range(count)])
    assert axes.get_xlim() == pytest.approx((0.3, count + 0.7))
    axes.figure.canvas.draw()
    inches = axes.get_window_extent().width / axes.figure.dpi / (count + 0.4)
    assert inches <= 1 or count < 5  # the figure is narrower if there are few steps
    assert axes.get_legend().get_window_extent().x1 <= axes.figure.bbox.x1
    matplotlib.pyplot.close(axes.figure)


@pytest.mark.parametrize("side", ["left", "center", "right"])
def test_a_title_of_widths_does_not_overlap_the_legend(side: str) -> None:
    axes = viz.plot_widths([drafted(3)] * 2)
    title = axes.set_title("poem, sampled", loc=side)
    axes.figure.canvas.draw()
    legend = axes.get_legend().get_window_extent()
    others = (title, axes.xaxis.label, *axes.get_xticklabels())
    assert not any(legend.overlaps(other.get_window_extent()) for other in others)
    matplotlib.pyplot.close(axes.figure)


def test_widths_of_plain_steps_have_integer_labels() -> None:
    assert tick_labels(viz.plot_widths([drafted(0)] * 3), "y") == ["1", "0", "1"]


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
        (viz.plot_acceptance, [drafted(1)], "Statistics by name are needed, such as {'auto': .*}, got a list"),
    ],
)
def test_what_is_not_what_a_plot_shows_is_refused(plot: Any, given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plot(given)


@pytest.mark.parametrize("depth", [3, 15, 16, 18, 40])
def test_labels_of_acceptance_overlap_neither_each_other_nor_bars(depth: int) -> None:
    stats = SpeculationStats("eagle", 4, 9, 20, [[depth + 1]])
    axes = viz.plot_acceptance(dict.fromkeys(SOURCES, stats))
    assert tick_labels(axes, "x")
    boxes = [label.get_window_extent() for label in axes.get_xticklabels()]
    assert all(left.x1 + 4 < right.x0 for left, right in itertools.pairwise(boxes))
    assert axes.get_legend().get_window_extent().y0 >= axes.get_window_extent().y1  # every bar is full here
    assert axes.get_legend().get_window_extent().x1 <= axes.figure.bbox.x1
    matplotlib.pyplot.close(axes.figure)


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("num_accepted", [0, 1, 2])
def test_the_legend_of_a_step_has_the_colours_of_its_nodes(theme: Theme, num_accepted: int) -> None:
    axes = viz.plot_step(drafted(4, num_accepted=num_accepted), theme=theme)
    axes.figure.canvas.draw()
    legend, data = axes.get_legend(), THEMES[theme].data
    labels = [text.get_text() for text in legend.get_texts()]
    assert labels == [*SOURCES, "root", *["accepted"] * (num_accepted > 0), "the model's own token"]
    patches = legend.findobj(matplotlib.patches.Rectangle)  # its own frame is none
    edges = [matplotlib.colors.to_hex(patch.get_edgecolor()).upper() for patch in patches]
    assert edges[:-1] == [THEMES[theme].ink, *data[:num_accepted]]
    faces = {patch.get_facecolor() for patch in axes.patches if patch.get_facecolor()[3] not in (0.0, 1.0)}
    assert {patch.get_facecolor() for patch in patches[:-1]} == faces
    assert legend.get_window_extent().x1 <= axes.figure.bbox.x1  # however small the tree is
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
    for count in range(1, len(colors.data) + 1):
        for found in itertools.combinations(names, count):
            assert len(set(drafter_colors(found, colors).values())) == count, found
    assert set(drafter_colors(names, colors)) == set(names)  # more than there are colours: some repeat
    merged = drafter_colors(("template", "eagle", "prompt_lookup", "token_recycling"), colors)
    assert merged["template"] == drafter_colors(["template"], colors)["template"]


@pytest.mark.parametrize("color", PALETTE)
def test_colours_are_seen_on_white_and_on_black(color: str) -> None:
    assert contrast(color, "white") > 2.5
    assert contrast(color, "black") > 4.0


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
