"""The README's race, chart and table say what the raw rows say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmark_script import script

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
first_page: Any = script("first_page")
RESULTS = json.loads((ROOT / "benchmarks" / "results" / "first_page_cpu_bf16.json").read_text())
FIRST_CALLS = json.loads((ROOT / "benchmarks" / "results" / "first_calls_cpu_bf16.json").read_text())
RACE = json.loads((ROOT / "benchmarks" / "results" / "race_cpu_bf16.json").read_text())


def test_the_table_of_the_readme_is_computed_from_its_rows() -> None:
    written = README[README.index("| Spec-Bench category |") :].splitlines()[2:]
    assert written[: written.index("")] == first_page.table(RESULTS)


def test_the_sentences_of_the_readme_agree_with_the_rows() -> None:
    overall = {row["method"]: row for row in RESULTS["summary"] if row["category"] == "all"}
    rows, count = first_page.rows_of(RESULTS), overall["plain"]["questions"]
    parted = {method: count - row["ids_equal"] for method, row in overall.items()}
    text = " ".join(README.split())
    assert f"{parted['auto+none']} of these {count} answers differ from plain" in text
    assert f"as {parted['transformers_prompt_lookup']} of {count} do with transformers' own lookup" in text
    for method, name in (("auto+none", "`auto` is"), ("auto+kernels", "CPU kernels")):
        speeds = f"{rows['mean'][method][0]:.2f}x", f"{rows['worst'][method][0]:.2f}x"
        assert re.search(f"{name} {speeds[0]}.{{,40}}{speeds[1]}", text), (method, speeds)
    gains = {mode: rows["mean"][f"auto+{mode}"][0] / rows["mean"][alone][0]
             for mode, alone in (("none", "auto_no_head"), ("kernels", "auto_no_head+kernels"))}  # fmt: skip
    mathematics = rows["math_reasoning"]["auto+kernels"][0] / rows["math_reasoning"]["auto_no_head+kernels"][0] - 1
    assert f"the head gains {gains['kernels'] - 1:.0%} on average on this machine".replace("%", " %") in text
    assert f"much on mathematics ({mathematics:.0%})".replace("%", " %") in text
    assert gains["kernels"] < 1.03 < gains["none"]
    for category in ("summarization", "rag"):  # "after long prompts it costs more than its drafts save"
        assert rows[category]["auto+kernels"] < rows[category]["auto_no_head+kernels"]
    assert f"kernels alone give {rows['mean']['nothing+kernels'][0]:.2f}x" in text


def test_times_of_first_calls_are_medians_of_their_rows() -> None:
    page = (ROOT / "docs" / "benchmarks" / "results.md").read_text()
    found = first_page.first_seconds(FIRST_CALLS)
    for question, seconds in found.items():
        assert re.search(rf"\| {question}.* \| {seconds['plain']:.2f} \| {seconds['auto']:.2f} \|", page), question
    example = found["the README's example"]
    assert f"takes {example['plain']:.2f} s for it, this call {example['auto']:.2f} s" in README


def test_rows_have_a_commit_and_a_machine() -> None:
    for recorded in (RESULTS, RACE, FIRST_CALLS):
        assert re.fullmatch(r"[0-9a-f]{40}", recorded["environment"]["commit"])
        assert {"device", "cores", "torch", "transformers", "date"} <= {**recorded, **recorded["environment"]}.keys()


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
def test_the_race_shows_both_answers_in_real_time(theme: str) -> None:
    picture = ROOT / "docs" / f"race-{theme}.svg"
    assert picture.stat().st_size < 10**6
    assert picture.read_text() == first_page.Race(RACE, first_page.THEMES[theme]).svg() + "\n"
    root = ElementTree.parse(picture).getroot()
    space = "{http://www.w3.org/2000/svg}"
    shown = ["".join(text.itertext()) for text in root.iter(f"{space}text") if text.get("opacity") is None]
    for run in RACE["runs"].values():
        answer = "".join(text for _, _, text in run["pieces"])
        assert "".join(shown).replace(" ", "").count("".join(answer.split())) >= 1
        assert any(line.startswith(f"{run['seconds']:.1f} s, ") for line in shown)  # also without animations
        assert run["seconds"] in sorted(RACE["seconds_of_all_runs"]["plain"] + RACE["seconds_of_all_runs"]["auto"])
    durations = {animation.get("dur") for animation in root.iter(f"{space}animate")}
    longest = max(run["seconds"] for run in RACE["runs"].values())
    assert durations == {f"{longest + first_page.PAUSE:.2f}s"}


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_chart_is_drawn_from_the_rows(theme: str, tmp_path: Path) -> None:
    first_page.chart(RESULTS, first_page.THEMES[theme], tmp_path / "chart.svg")
    drawn, shipped = (path.read_text() for path in (tmp_path / "chart.svg", ROOT / "docs" / f"speed-{theme}.svg"))
    for method, (speed_up, _) in first_page.rows_of(RESULTS)["mean"].items():
        assert f"{speed_up:.2f}x" in drawn, method
        assert f"{speed_up:.2f}x" in shipped, method
        assert first_page.SHOWN[method] in shipped.replace("&#x27;", "'"), method
