"""The tables, sentences and pictures of README and docs say what the raw rows say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import fmean, median
from statistics import mean as mean_of
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmark_script import script
from hf_specdec import bench

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "benchmarks" / "results.md").read_text()
LIMITS = " ".join((ROOT / "docs" / "limits.md").read_text().split())
BLOCK_HEAD = (ROOT / "heads" / "smollm2-135m-instruct-dflash" / "README.md").read_text()
CATEGORIES = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag")


def rows_of(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / name).read_text())


@pytest.mark.parametrize("name", ["first_page_cpu_bf16", "race_cpu", "first_calls_cpu_bf16", "batches_cpu_bf16",
                                  "blocks_cpu_bf16", "blocks_unseen_cpu_bf16", "auto_heads_cpu_bf16",
                                  "long_texts_cpu_bf16", "lossy_cpu_bf16", "forwards_cpu_bf16", "quantized_cpu",
                                  "five_steps_cpu", "adapt_cpu", "quantized_avx2_cpu", "random_7b_cpu",
                                  "waiting_requests_cpu"])  # fmt: skip
def test_rows_have_a_commit_and_a_machine(name: str) -> None:
    rows = rows_of(f"{name}.json")
    assert re.match(r"[0-9a-f]{40}", rows["environment"]["commit"])
    assert {"device", "cores", "torch", "transformers", "date"} <= {**rows, **rows["environment"]}.keys()


def test_batches() -> None:
    sizes = {row["batch_size"]: row for row in rows_of("batches_cpu_bf16.json")["sizes"]}
    for size, row in sizes.items():
        found = row["auto+kernels"]
        cells = [f"{size} ({row['batches']})", f"{row['plain_tokens_per_second']:.1f}"]
        cells += [f"{row[name]['ratio']:.2f}x" for name in ("auto", "plain+kernels", "auto+kernels")]
        cells.append(f"{min(found['ratio_per_batch']):.2f}x to {max(found['ratio_per_batch']):.2f}x")
        speeds = (row[name]["tokens_per_second"] for name in ("auto+kernels", "plain+kernels"))
        cells.append(f"{median(one / other for one, other in zip(*speeds, strict=True)):.2f}x")
        assert f"| {' | '.join(cells)} |" in PAGE
    for name in ("auto", "auto+kernels", "plain+kernels"):
        eight, sixteen = (f"{sizes[size][name]['ratio']:.2f}x" for size in (8, 16))
        assert f"{eight} and {sixteen}" in LIMITS


def test_block_heads() -> None:
    ours = ("chat", "qa", "mt_bench", "translation", "summarization", "rag")  # "mt_bench" are the ones called math
    blocks = rows_of("blocks_cpu_bf16.json")["rows"]
    for rows, categories in ((blocks, CATEGORIES), (rows_of("blocks_unseen_cpu_bf16.json")["rows"], ours)):
        for row in rows:
            cells = ["EAGLE-3" if row["method"] == "eagle" else "**block head**", str(row["nodes"]),
                     "eager" if row["compile"] == "none" else row["compile"]]  # fmt: skip
            cells += [f"{row['tau'][category]:.2f}" for category in categories]
            assert f"| {' | '.join(cells)} | {row['tau_all']:.2f} | {row['milliseconds']:.1f} |" in BLOCK_HEAD
    shares = [
        found["block"][what] / found["eagle"][what]
        for what in ("milliseconds", "tau_all")
        for found in (
            {row["method"]: row for row in blocks if (row["compile"], row["nodes"]) == (form, 16)}
            for form in ("none", "kernels")
        )
    ]
    told = (
        "needs {:.2f} of EAGLE-3's drafting time eagerly and {:.2f} with the kernels, and has {:.2f} and {:.2f} of its"
    )
    assert told.format(*shares) in PAGE
    names = {"eagle": "`eagle`", "before: eagle": "**`dflash`**", "auto": "`auto` with the EAGLE-3 head",
             "before: auto": "**`auto` with the block head**"}  # fmt: skip
    summary = {(row["method"], row["category"]): row for row in rows_of("auto_heads_cpu_bf16.json")["summary"]}
    for method, name in names.items():
        for suffix, forwards in (("", "eager"), (", compiled", "kernels")):
            means = [summary[method + suffix, category]["speed_up_mean"] for category in CATEGORIES]
            overall = summary[method + suffix, "all"]
            cells = [f"{mean:.2f}x" for mean in (*means, fmean(means), overall["speed_up_worst"])]
            assert f"| {name} | {forwards} | {' | '.join(cells)} | {overall['tau']:.2f} |" in BLOCK_HEAD
    speed = {name: fmean(summary[name, category]["speed_up_mean"] for category in CATEGORIES) for name, _ in summary}
    ratios = [
        speed[f"before: {method}{suffix}"] / speed[f"{method}{suffix}"]
        for method in ("eagle", "auto")
        for suffix in ("", ", compiled")
    ]
    assert "at {:.2f} of `eagle`'s speed eagerly, and at {:.2f} with the kernels.".format(*ratios[:2]) in PAGE
    assert "at {:.2f} and {:.2f} of the speed with the EAGLE-3 head.".format(*ratios[2:]) in PAGE


def test_long_texts() -> None:
    rows, page = rows_of("long_texts_cpu_bf16.json")["rows"], PAGE.split("## Long texts")[1].split("\n## ")[0]
    windows = ("all", 1536, 384)
    lengths = list(dict.fromkeys(row["length"] for row in rows))
    for length in lengths:
        found = [[row for row in rows if (row["length"], row["window"]) == (length, window)] for window in windows]
        cells = [f"{length:,} ({len(found[0])})", *(f"{fmean(row['tau'] for row in part):.2f}" for part in found)]
        cells += [f"{median(row['milliseconds'] for row in part):.1f}" for part in found]
        assert f"| {' | '.join(cells)} |" in page
    assert len(re.findall(r"^\| \d", page, re.MULTILINE)) == len(lengths) == 4
    first, windowed = (f"{median(row['first_draft_seconds'] for row in part):.2f}" for part in found[:2])
    assert f"{first} s without a window and {windowed} s with 1,536 tokens" in page


def test_what_the_head_of_the_five_steps_gained() -> None:
    page = (ROOT / "docs" / "five_steps.md").read_text()
    runs = {run["mode"]: run["rows"] for run in rows_of("five_steps_cpu.json")["runs"]}
    for mode, name in (("plain", "plain steps"), ("auto", "`auto`"), ("head", "`auto` with the head")):
        cells = [name]
        for part in ("code", "coding", "spec_bench"):
            both = [pair for pair in zip(runs[mode], runs["plain"], strict=True) if pair[0]["set"] == part]
            assert all(row["ids"] == plain["ids"] for row, plain in both)
            ratios = [plain["seconds"] / row["seconds"] for row, plain in both]
            cells.append(f"{median(row['tokens'] / row['seconds'] for row, _ in both):.1f}")
            cells.append(f"{median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f})")
            cells.append(f"{fmean(row['tau'] for row, _ in both):.2f}")
        assert f"| {' | '.join(cells)} |" in page
    gains = {
        name: median(auto["seconds"] / row["seconds"] for row, auto in zip(runs["head"], runs["auto"], strict=True)
                     if row["set"] == name) - 1 for name in ("code", "coding", "spec_bench")
    }  # fmt: skip
    means = {
        name: fmean(auto["seconds"] / row["seconds"] for row, auto in zip(runs["head"], runs["auto"], strict=True)
                    if row["set"] == name) - 1 for name in gains
    }  # fmt: skip
    assert "(means: {:.0f} %, {:.0f} % and {:.0f} % more)".format(*(100 * gain for gain in means.values())) in page
    adds, more, takes = (f"{100 * abs(gain):.0f} %" for gain in gains.values())
    assert gains["spec_bench"] < 0 < gains["coding"]
    assert (
        f"the head adds {adds} to what `auto` gains on code without it, {more} on coding and math, and takes {takes}"
        in page
    )


def test_a_head_that_goes_on_learning() -> None:
    page, rows = (ROOT / "docs" / "training.md").read_text(), rows_of("adapt_cpu.json")["rows"]
    for original, adapted in zip(rows[:4], rows[4:], strict=True):
        cells = [
            original["round"],
            *(f"{row[name]}" for row in (original, adapted) for name in ("tokens_per_second", "tau")),
        ]
        assert f"| {' | '.join(map(str, cells))} | {adapted['training_seconds'] or 'none: the same head'}" in page


def test_rollouts_of_a_trainer() -> None:
    text = " ".join((ROOT / "docs" / "rollouts.md").read_text().split())
    for rollouts in rows_of("grpo_cpu_fp32.json")["rollouts"].values():
        later = rollouts[2:]
        plain, drafted = (median(row[f"{name}_seconds"] for row in later) for name in ("plain", "speculative"))
        assert re.search(rf"{plain:.2f} s (plainly )?and {drafted:.2f} s[^(]*\([^)]*{plain / drafted:.2f}x\)", text)


def test_the_race_of_quantised_weights() -> None:
    """Tokens per second, ratios to llama.cpp without drafts by question, changed answers, the peak of memory."""
    page, laptop = ((ROOT / "docs" / name).read_text() for name in ("quantized.md", "laptop.md"))
    result = rows_of("quantized_cpu.json")
    assert re.match(r"[0-9a-f]{40}", result["environment"]["commit"])

    def speeds(run: Any, name: str) -> dict[int, float]:
        return {row["index"]: row["tokens"] / row["seconds"] for row in run["rows"] if row["set"] == name}

    (peer,) = (run for run in result["runs"] if (run["form"], run["mode"]) == ("llama.cpp", "plain"))
    for run in result["runs"]:
        cells = [run["form"], run["mode"]]
        for name in ("coding", "spec_bench"):
            own, others = speeds(run, name), speeds(peer, name)
            ratios = [own[index] / others[index] for index in own]
            cells += [f"{median(own.values()):.1f}", f"{median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f})"]
        plain = next(one for one in result["runs"] if (one["form"], one["mode"]) == (run["form"], "plain"))
        changed = sum(row["ids"] != other["ids"] for row, other in zip(run["rows"], plain["rows"], strict=True))
        cells.append("" if run is plain else f"{changed} of {len(plain['rows'])}")
        peak = f"{run['memory']['end']['peak'] / 1024:.1f}"
        assert f"| {' | '.join(cells)} | {peak} |" in page
        if run["form"] != "llama.cpp" or run is plain:
            rows = [row for row in run["rows"] if row["set"] == "coding"]
            after = median((row["tokens"] - 1) / (row["seconds"] - row["prompt_seconds"]) for row in rows)
            parts = f"{median(row['prompt_seconds'] for row in rows):.2f} | {after:.1f}"
            assert f"| {cells[2]} | {cells[4]} | {peak} GiB | {parts} |" in laptop


def test_the_race_with_avx2() -> None:
    laptop = (ROOT / "docs" / "laptop.md").read_text().split("| AVX2 |")[1]
    runs = {(run["form"], run["mode"]): run for run in rows_of("quantized_avx2_cpu.json")["runs"]}
    for run in runs.values():
        of_set = {name: [row for row in run["rows"] if row["set"] == name] for name in ("coding", "spec_bench")}
        cells = [f"{median(row['tokens'] / row['seconds'] for row in rows):.1f}" for rows in of_set.values()]
        rows = of_set["coding"]
        after = median((row["tokens"] - 1) / (row["seconds"] - row["prompt_seconds"]) for row in rows)
        cells += [
            f"{run['memory']['end']['peak'] / 1024:.1f} GiB",
            f"{median(row['prompt_seconds'] for row in rows):.2f}",
        ]
        assert f"| {' | '.join(cells)} | {after:.1f} |" in laptop

    def ratios(other: tuple[str, str], name: str, times: str) -> str:
        pairs = zip(runs["gguf-rounded", "auto"]["rows"], runs[other]["rows"], strict=True)
        speeds = [[row["tokens"] / row["seconds"] for row in pair] for pair in pairs if pair[0]["set"] == name]
        found = [own / others for own, others in speeds]
        return f"{median(found):.2f}{times} on {{}} ({min(found):.2f}{times} to {max(found):.2f}{times})"

    for name, shown in (("coding", "coding"), ("spec_bench", "the others")):
        drafting, plain = (runs["gguf-rounded", mode]["rows"] for mode in ("assistant", "plain"))
        found = [
            one["seconds"] / two["seconds"] for one, two in zip(plain, drafting, strict=True) if one["set"] == name
        ]
        assert f"{median(found):.2f}x ({min(found):.2f}x to {max(found):.2f}x)" in laptop
        assert ratios(("gguf-rounded", "plain"), name, "x").format(shown) in laptop
        told = ratios(("llama.cpp", "plain"), name, "").format(shown)
        assert (
            told.replace(" on ", " times on ").replace("times on coding", "times llama.cpp's speed on coding")
            in laptop
        )
    pairs = zip(runs["gguf-rounded", "plain"]["rows"], runs["llama.cpp", "plain"]["rows"], strict=True)
    different = [own["ids"] != other["ids"] for own, other in pairs]
    choosing = (ROOT / "docs" / "choosing.md").read_text()
    assert f"changed {sum(different)} of {len(different)} greedy answers somewhere with AVX2" in choosing
    whole = " ".join((ROOT / "docs" / "laptop.md").read_text().split())
    assert f"({sum(different)} of {len(different)} questions)" in whole
    changed = zip(runs["gguf-rounded", "auto"]["rows"], runs["gguf-rounded", "plain"]["rows"], strict=True)
    assert all(row["ids"] == plain["ids"] for row, plain in changed)


def test_what_drafts_add() -> None:
    """The medians of single questions, of both sets, as the README tells them."""
    for file, name in (("quantized_cpu.json", "AVX-512"), ("quantized_avx2_cpu.json", "AVX2")):
        runs = {(run["form"], run["mode"]): run["rows"] for run in rows_of(file)["runs"]}
        pairs = list(zip(runs["gguf-rounded", "plain"], runs["gguf-rounded", "auto"], strict=True))
        few, many = sorted(
            median(plain["seconds"] / auto["seconds"] for plain, auto in pairs if plain["set"] == kind)
            for kind in ("coding", "spec_bench")
        )
        assert f"[{100 * few - 100:.0f} to {100 * many - 100:.0f} % with {name}](" in README


def test_a_7b() -> None:
    laptop = (ROOT / "docs" / "laptop.md").read_text().split("| 7B |")[1]
    for run in rows_of("random_7b_cpu.json")["runs"]:
        rows = [row for row in run["rows"] if row["set"] == "coding"]
        after = median((row["tokens"] - 1) / (row["seconds"] - row["prompt_seconds"]) for row in rows)
        name = "llama.cpp" if run["form"] == "llama.cpp" else "this package, plain steps"
        name += ", AVX2" if run["instructions"] == "avx2" else ""
        prompt = f"{median(row['prompt_seconds'] for row in rows):.2f}"
        assert f"| {name} | {run['memory']['end']['peak'] / 1024:.1f} GiB | {prompt} | {after:.1f} |" in laptop


def test_waiting_requests() -> None:
    servers = (ROOT / "docs" / "servers.md").read_text()
    rows = rows_of("waiting_requests_cpu.json")["rows"]
    for plain, auto in zip(rows[::2], rows[1::2], strict=True):
        cells = (f"{row['tokens'] / row['seconds']:.1f} | {row['mean_wait']:.0f}" for row in (plain, auto))
        assert f"| {plain['way']} | {' | '.join(cells)} |" in servers


def test_lossy_acceptance() -> None:
    page = (ROOT / "docs" / "benchmarks" / "history.md").read_text()
    for row in rows_of("lossy_cpu_bf16.json")["rules"]:
        assert re.search(rf"\| {row['tau']:.2f} \| {row['mean_log_probability_per_token']:.2f} \|", page), row


# ---------------------------------------------------------------------------------------------------------- first page


README = (ROOT / "README.md").read_text()
first_page: Any = script("first_page")
RESULTS = json.loads((ROOT / "benchmarks" / "results" / "first_page_cpu_bf16.json").read_text())
FIRST_CALLS = json.loads((ROOT / "benchmarks" / "results" / "first_calls_cpu_bf16.json").read_text())
LAPTOP = json.loads((ROOT / "benchmarks" / "results" / "quantized_cpu.json").read_text())
RACE = json.loads((ROOT / "benchmarks" / "results" / "race_cpu.json").read_text())


def test_the_table_by_category_is_computed_from_its_rows() -> None:
    written = PAGE[PAGE.index("| Spec-Bench category |") :].splitlines()[2:]
    assert written[: written.index("")] == first_page.table(RESULTS)


def test_the_sentences_about_limits_agree_with_the_rows() -> None:
    overall = {row["method"]: row for row in RESULTS["summary"] if row["category"] == "all"}
    rows, count = first_page.rows_of(RESULTS), overall["plain"]["questions"]
    of_question = {(row["question_id"], row["method"]): bench.Measurement(**row) for row in RESULTS["measurements"]}
    parted = {method: count - row["ids_equal"] for method, row in overall.items()}
    text = LIMITS
    drafting = [number for method, number in parted.items() if method.startswith("auto")]
    assert f"answers to [{count} questions]" in text
    assert f"{min(drafting)} to {max(drafting)} differ from plain `generate()`'s; " in text
    assert f"; {parted['transformers_prompt_lookup']} with transformers' own lookup" in text
    worst = {method: f"{cell[0]:.2f}x" for method, cell in rows["worst"].items()}
    slower = {method: sum(of_question[question, method].tokens_per_second < plain.tokens_per_second
                          for (question, name), plain in of_question.items() if name == "plain")
              for method in ("auto_no_head", "auto+none", "auto_no_head+kernels", "auto+kernels")}  # fmt: skip
    assert list(slower.values())[2:] == [0, 0]
    assert f"kernels off | {worst['auto_no_head']} | {slower['auto_no_head']} of {count} |" in text
    assert f"its head | {worst['auto+none']} | {slower['auto+none']} of {count} |" in text
    assert f"with both | {worst['auto_no_head+kernels']}; {worst['auto+kernels']} | none |" in text
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


def test_alternative_texts_of_the_pictures_have_their_figures() -> None:
    race = "; ".join(f"{first_page.LANES[lane]}: {run['seconds']:.1f} s" for lane, run in RACE["runs"].items())
    small, large = first_page.rows_of(RESULTS)["mean"], first_page.laptop_means(LAPTOP)
    assert f"| {' | '.join(f'{large[key]:.2f}x' for key in first_page.LAPTOP)} |" in PAGE
    most = [max(large[key] for key in first_page.LAPTOP), max(small[method][0] for method in first_page.CHART)]
    told = "1.5B in 4 bits up to {:.2f}x, 135M up to {:.2f}x".format(*most)
    assert f'alt="{race}"' in README
    assert f'alt="Speed-ups over plain generate(): {told}; table linked below"' in README


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
def test_the_race_shows_the_answers_in_real_time(kind: str, theme: str) -> None:
    picture, layout = ROOT / "docs" / f"race{kind}-{theme}.svg", first_page.LAYOUTS[kind]
    assert picture.stat().st_size < 10**6
    assert picture.read_text() == first_page.Race(RACE, first_page.THEMES[theme], layout).svg() + "\n"
    root = ElementTree.parse(picture).getroot()
    durations = {animation.get("dur") for animation in root.iter("{http://www.w3.org/2000/svg}animate")}
    longest = max(run["seconds"] for run in RACE["runs"].values())
    assert durations == {f"{longest + first_page.PAUSE:.2f}s"}
    for lane, run in RACE["runs"].items():
        assert (
            median(RACE["seconds_of_all_runs"][lane])
            == run["seconds"]
            == pytest.approx(run["pieces"][-1][0], abs=1e-3)
        )


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("kind", ["", "-narrow"])
def test_the_chart_is_drawn_from_the_rows(kind: str, theme: str, tmp_path: Path) -> None:
    first_page.chart(RESULTS, LAPTOP, first_page.THEMES[theme], tmp_path / "chart.svg", is_narrow=bool(kind))
    drawn, shipped = (
        path.read_text() for path in (tmp_path / "chart.svg", ROOT / "docs" / f"speed{kind}-{theme}.svg")
    )
    small, large = first_page.rows_of(RESULTS)["mean"], first_page.laptop_means(LAPTOP)
    bars = [(name, large[key]) for key, (name, _) in first_page.LAPTOP.items()]
    bars += [(first_page.SHOWN[method], small[method][0]) for method in first_page.CHART]
    for name, speed_up in bars:
        assert f"{speed_up:.2f}x" in drawn, name
        assert f"{speed_up:.2f}x" in shipped, name
        assert name in shipped.replace("&#x27;", "'"), name
