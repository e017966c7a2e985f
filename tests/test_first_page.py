"""The README's race and chart, and the tables of their rows, say what the raw rows say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import mean as mean_of
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmark_script import script
from hf_specdec import bench

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGE = (ROOT / "docs" / "benchmarks" / "results.md").read_text()
first_page: Any = script("first_page")
RESULTS = json.loads((ROOT / "benchmarks" / "results" / "first_page_cpu_bf16.json").read_text())
FIRST_CALLS = json.loads((ROOT / "benchmarks" / "results" / "first_calls_cpu_bf16.json").read_text())
RACE = json.loads((ROOT / "benchmarks" / "results" / "race_cpu_bf16.json").read_text())


def test_the_table_by_category_is_computed_from_its_rows() -> None:
    written = PAGE[PAGE.index("| Spec-Bench category |") :].splitlines()[2:]
    assert written[: written.index("")] == first_page.table(RESULTS)


def test_the_sentences_of_the_readme_agree_with_the_rows() -> None:
    overall = {row["method"]: row for row in RESULTS["summary"] if row["category"] == "all"}
    rows, count = first_page.rows_of(RESULTS), overall["plain"]["questions"]
    of_question = {(row["question_id"], row["method"]): bench.Measurement(**row) for row in RESULTS["measurements"]}
    parted = {method: count - row["ids_equal"] for method, row in overall.items()}
    text = " ".join(README.split())
    drafting = [number for method, number in parted.items() if method.startswith("auto")]
    assert f"{min(drafting)} to {max(drafting)} of these {count} answers differ from plain" in text
    assert f"as {parted['transformers_prompt_lookup']} of {count} do with transformers' own lookup" in text
    worst = {method: f"{cell[0]:.2f}x" for method, cell in rows["worst"].items()}
    told = f"`auto` gave {worst['auto_no_head']} plain without head and kernels, {worst['auto+none']} with the head, "
    assert f"{told}{worst['auto_no_head+kernels']} with the kernels and {worst['auto+kernels']} with both" in text
    slower = {method: sum(of_question[question, method].tokens_per_second < plain.tokens_per_second
                          for (question, name), plain in of_question.items() if name == "plain")
              for method in ("auto_no_head", "auto+none", "auto_no_head+kernels", "auto+kernels")}  # fmt: skip
    assert list(slower.values())[2:] == [0, 0]
    told = f"with kernels off, {slower['auto_no_head']} of {count} questions were slower than plain without the head, "
    assert f"{told}{slower['auto+none']} with it" in text
    assert f"the CPU kernels of this package alone give {rows['mean']['nothing+kernels'][0]:.1f}x." in text
    for method, range_of in (
        ("auto_no_head+kernels", "answers {:.0f} to {:.0f} times faster on two CPU cores"),
        ("auto_no_head", "Without the kernels it answers {:.1f} to {:.1f} times faster."),
    ):
        by_category = [cells[method][0] for category, cells in rows.items() if category not in ("mean", "worst")]
        assert range_of.format(min(by_category), max(by_category)) in text
    gains = {category: cells["auto+kernels"][0] / cells["auto_no_head+kernels"][0] - 1
             for category, cells in rows.items()}  # fmt: skip
    assert abs(gains["mean"]) < 0.02
    assert f"{gains['math_reasoning']:.0%}".replace("%", " % more on mathematics") in PAGE
    losses = sorted(round(-100 * gains[category]) for category in ("summarization", "rag", "qa"))
    assert f"{losses[0]} to {losses[-1]} % less on summarization, rag and qa" in PAGE
    eager = {category: cells["auto+none"][0] > cells["auto_no_head"][0] for category, cells in rows.items()}
    assert [category for category, gains_head in eager.items() if not gains_head and category != "worst"] == [
        "summarization", "rag",
    ]  # fmt: skip
    for kind, sentence in (("decode_tokens_per_second", "is {:.2f} times as fast as llama.cpp"),
                           ("tokens_per_second", "{:.2f} times with prompts")):  # fmt: skip
        ratios = [getattr(of_question[question, "auto+kernels"], kind) / getattr(row, kind)
                  for (question, method), row in of_question.items() if method == "llama_cpp"]  # fmt: skip
        assert sentence.format(mean_of(ratios)) in PAGE


def test_the_figures_of_the_other_machine_agree_with_the_rows() -> None:
    rows = json.loads((ROOT / "benchmarks" / "results" / "kernels_peers_cpu_bf16.json").read_text())["summary"]
    means = {row["method"]: row["speed_up_mean"] for row in rows if row["category"] == "all"}
    for page in (README, (ROOT / "docs" / "index.md").read_text()):
        text = f"on two cores of an AMD EPYC, llama.cpp reached {means['llama_cpp']:.2f}x, and `auto` with head and "
        assert f"{text}kernels {means['auto+kernels']:.2f}x" in " ".join(page.split())


def test_alternative_texts_of_the_pictures_have_their_figures() -> None:
    seconds = {method: f"{run['seconds']:.1f} s" for method, run in RACE["runs"].items()}
    means = {method: f"{cell[0]:.2f}x" for method, cell in first_page.rows_of(RESULTS)["mean"].items()}
    chart = (
        f"transformers' lookup {means['transformers_prompt_lookup']}, llama.cpp without drafts {means['llama_cpp']}; "
        f"auto, kernels off: {means['auto_no_head']}, with a head {means['auto+none']}; CPU kernels alone "
        f"{means['nothing+kernels']}; auto with them {means['auto_no_head+kernels']}, "
        f"with a head {means['auto+kernels']}"
    )
    for page in (README, (ROOT / "docs" / "index.md").read_text()):
        text = page.replace("&quot;", '"')
        assert f'plain generate() takes {seconds["plain"]}, speculative="auto" {seconds["auto"]}' in text
        assert chart in text


def test_the_table_of_the_results_is_computed_from_the_rows() -> None:
    page = (ROOT / "docs" / "benchmarks" / "results.md").read_text()
    measured = {(row["question_id"], row["method"]): bench.Measurement(**row) for row in RESULTS["measurements"]}
    overall = {row["method"]: row for row in RESULTS["summary"] if row["category"] == "all"}
    for method, name in first_page.SHOWN.items():
        if method == "plain":
            continue
        ratios = [row.decode_tokens_per_second / measured[question, "plain"].decode_tokens_per_second
                  for (question, its_method), row in measured.items() if its_method == method]  # fmt: skip
        row = overall[method]
        tau = "" if method in ("transformers_prompt_lookup", "llama_cpp") else f"{row['tau']:.2f} "
        differ = f"{len(ratios) - row['ids_equal']} of {len(ratios)}"
        assert f"| {name} | {mean_of(ratios):.2f}x | {tau}| {differ} |" in page


def test_times_of_first_calls_are_medians_of_their_rows() -> None:
    page = (ROOT / "docs" / "benchmarks" / "results.md").read_text()
    found = first_page.first_seconds(FIRST_CALLS)
    for question, seconds in found.items():
        assert re.search(rf"\| {question}.* \| {seconds['plain']:.2f} \| {seconds['auto']:.2f} \|", page), question
    example = found["the README's example"]
    assert f"takes {example['plain']:.2f} s for these 38 tokens, this call {example['auto']:.2f} s" in README


def test_the_table_of_real_text_on_the_gpu_is_computed_from_its_rows() -> None:
    page = (ROOT / "docs" / "benchmarks" / "results.md").read_text().split("### Real text on the GPU")[1]
    runs = json.loads((ROOT / "benchmarks" / "results" / "gpu_h100.json").read_text())["runs"]
    rows = {(row["question_id"], row["method"]): row for run in runs for row in run["rows"] if row["item"] == "text"}
    speeds = {key: row["num_tokens"] / row["seconds"][0] for key, row in rows.items()}
    methods = ("transformers_prompt_lookup", "nothing", "auto_no_head", "auto", "auto+none", "eagle")
    for question in dict.fromkeys(question for question, _ in rows):
        cells = [f"{rows[question, 'plain']['seconds'][0]:.2f}"]
        for method in methods:
            tau = rows[question, method]["tau"]
            shown = f"{speeds[question, method] / speeds[question, 'plain']:.2f}x"
            cells.append(shown if method in methods[:2] else f"{shown} ({tau:.2f})")
        assert re.search(rf"^\| {question} \(\w+\) \| {re.escape(' | '.join(cells))} \|$", page, re.MULTILINE), cells
    assert len(re.findall(r"^\| \d", page, re.MULTILINE)) == len(rows) / 7 == 4


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("kind", ["", "-narrow"])
def test_the_race_shows_both_answers_in_real_time(kind: str, theme: str) -> None:
    picture, layout = ROOT / "docs" / f"race{kind}-{theme}.svg", first_page.LAYOUTS[kind]
    assert picture.stat().st_size < 10**6
    assert picture.read_text() == first_page.Race(RACE, first_page.THEMES[theme], layout).svg() + "\n"
    root = ElementTree.parse(picture).getroot()
    durations = {animation.get("dur") for animation in root.iter("{http://www.w3.org/2000/svg}animate")}
    longest = max(run["seconds"] for run in RACE["runs"].values())
    assert durations == {f"{longest + first_page.PAUSE:.2f}s"}
    for run in RACE["runs"].values():
        assert run["seconds"] in sorted(RACE["seconds_of_all_runs"]["plain"] + RACE["seconds_of_all_runs"]["auto"])


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("kind", ["", "-narrow"])
def test_the_chart_is_drawn_from_the_rows(kind: str, theme: str, tmp_path: Path) -> None:
    assert sorted(method for group in first_page.CHART for method in group) == sorted(first_page.SHOWN)
    first_page.chart(RESULTS, first_page.THEMES[theme], tmp_path / "chart.svg", is_narrow=bool(kind))
    drawn, shipped = (
        path.read_text() for path in (tmp_path / "chart.svg", ROOT / "docs" / f"speed{kind}-{theme}.svg")
    )
    for method, (speed_up, _) in first_page.rows_of(RESULTS)["mean"].items():
        assert f"{speed_up:.2f}x" in drawn, method
        assert f"{speed_up:.2f}x" in shipped, method
        assert first_page.SHOWN[method] in shipped.replace("&#x27;", "'"), method
