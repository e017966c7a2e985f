"""Pictures are drawn of what a trace tells; coloured text is the text."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

import matplotlib
import pytest

import drafters
from hf_specdec import viz
from hf_specdec.reporting.palette import INK, PALETTE
from hf_specdec.reporting.stats import SpeculationStats
from hf_specdec.reporting.trace import TracedRow, TracedStep
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


def test_every_picture_of_a_generation(llama: Any, tmp_path: Path) -> None:
    ids, _ = prompts(1)
    config = {**drafters.BY_NAME["eagle3"].add(llama), "trace": True, "num_steps": 3, "num_draft_tokens": 9}
    llama.generate(ids, max_new_tokens=30, do_sample=False, speculative=config)
    stats = llama.last_speculation
    tree = viz.plot_step(stats.trace[1])
    (row,) = stats.trace[1].rows
    assert all(str(token) in texts(tree) for token in [*row.tokens, row.emitted[-1]])
    assert f"{row.num_drafted} drafted, {len(row.emitted) - 1} accepted" in texts(tree)
    assert tree.get_legend().get_texts()[0].get_text() == "eagle"
    widths = viz.plot_widths(stats.trace)
    heights = [bar.get_height() for bar in widths.containers[0]]
    assert heights == [step.rows[0].num_drafted for step in stats.trace]
    drawn = {
        "tree": tree, "widths": widths, "timeline": viz.plot_timeline(stats.trace), "stats": stats.plot(),
        "acceptance": viz.plot_acceptance({"eagle": stats, "again": stats}),
        "costs": viz.plot_costs({"eager": (0.02, 0.03), "compiled": (0.01, 0.012)}),
    }  # fmt: skip
    for name, axes in drawn.items():
        assert axes.figure.get_facecolor()[3] == 0.0  # no background: a dark page stays dark
        viz.save_plot(axes, tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").stat().st_size > 2000
    assert matplotlib.rcParams["text.color"] != INK  # nobody else's pictures change


def test_a_step_that_drafted_nothing_and_a_row_that_has_ended() -> None:
    plain = TracedRow([5], [-1], None, [1.0], [7], ["eagle"], [0], [7])
    assert "0 drafted, 0 accepted" in texts(viz.plot_step(TracedStep([plain], 0.0, 0.0, 0.1, 0.0)))
    ended = TracedRow([5, 6], [-1, 0], None, [1.0, 0.5], [7, 8], ["a", "a"], [], [])
    assert "1 drafted, 0 accepted" in texts(viz.plot_step(TracedStep([ended], 0.0, 0.0, 0.1, 0.0)))
    assert viz.plot_widths([]).get_xlabel() == "step"


def luminance(color: str) -> float:
    channels = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("color", [INK, *PALETTE])
def test_colours_are_seen_on_white_and_on_black(color: str) -> None:
    """Contrast as WCAG counts it."""
    assert 1.05 / (luminance(color) + 0.05) > 2.5
    assert (luminance(color) + 0.05) / 0.05 > 4.0


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
