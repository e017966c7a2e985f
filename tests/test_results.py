"""The tables of docs/benchmarks/results.md and the sentences that quote them say what the raw rows say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "benchmarks" / "results.md").read_text()
BLOCK_HEAD = (ROOT / "heads" / "smollm2-135m-instruct-dflash" / "README.md").read_text()
CATEGORIES = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag")


def rows_of(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / name).read_text())


@pytest.mark.parametrize("name", ["first_page", "race", "first_calls", "batches", "blocks", "blocks_unseen",
                                  "blocks_growing", "blocks_recurrent", "auto_heads", "long_texts", "lossy",
                                  "forwards"])  # fmt: skip
def test_rows_have_a_commit_and_a_machine(name: str) -> None:
    rows = rows_of(f"{name}_cpu_bf16.json")
    assert re.match(r"[0-9a-f]{40}", rows["environment"]["commit"])
    assert {"device", "cores", "torch", "transformers", "date"} <= {**rows, **rows["environment"]}.keys()


def test_batches() -> None:
    readme = " ".join((ROOT / "README.md").read_text().split())
    sizes = {row["batch_size"]: row for row in rows_of("batches_cpu_bf16.json")["sizes"]}
    for size, row in sizes.items():
        cells = [f"{size} ({row['batches']})", f"{row['plain_tokens_per_second']:.1f}"]
        for name in ("auto", "auto+kernels"):
            found = row[name]
            if name == "auto+kernels":
                cells.append(f"{row['nothing+kernels']['ratio']:.2f}x")
            ratios = found["ratio_per_batch"]
            cells += [f"{found['ratio']:.2f}x", f"{min(ratios):.2f}x to {max(ratios):.2f}x", f"{found['tau']:.2f}"]
        speeds = (row[name]["tokens_per_second"] for name in ("auto+kernels", "nothing+kernels"))
        cells.append(f"{median(one / other for one, other in zip(*speeds, strict=True)):.2f}x")
        assert f"| {' | '.join(cells)} |" in PAGE
    for name in ("auto", "auto+kernels", "nothing+kernels"):
        eight, sixteen = (f"{sizes[size][name]['ratio']:.2f}x" for size in (8, 16))
        assert f"{eight} and {sixteen}" in readme


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
    before = [row["tau_all"] for row in rows_of("blocks_growing_cpu_bf16.json")["rows"] if row["method"] == "block"]
    assert "had tau {:.2f} and {:.2f} on these questions".format(*before) in PAGE
    names = {"eagle": "`eagle`", "before: eagle": "**`dflash`**", "auto": "`auto` with the EAGLE-3 head",
             "before: auto": "**`auto` with the block head**"}  # fmt: skip
    summary = {(row["method"], row["category"]): row for row in rows_of("auto_heads_cpu_bf16.json")["summary"]}
    for method, name in names.items():
        for suffix, forwards in (("", "eager"), (", compiled", "kernels")):
            means = [summary[method + suffix, category]["speed_up_mean"] for category in CATEGORIES]
            overall = summary[method + suffix, "all"]
            cells = [f"{mean:.2f}x" for mean in (*means, fmean(means), overall["speed_up_worst"])]
            for page, shown in ((BLOCK_HEAD, cells), (PAGE, cells[-2:])):
                assert f"| {name} | {forwards} | {' | '.join(shown)} | {overall['tau']:.2f} |" in page
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
    kinds = list(dict.fromkeys((row["length"], row["window"]) for row in rows))
    for length, window in kinds:
        found = [row for row in rows if (row["length"], row["window"]) == (length, window)]
        times = ("first_draft_seconds", "prefill_seconds", "plain_first_token_seconds")
        cells = [f"{length:,} ({len(found)})", str(window), f"{fmean(row['tau'] for row in found):.2f}",
                 f"{median(row['milliseconds'] for row in found):.1f}",
                 *(f"{median(row[name] for row in found):.2f}" for name in times)]  # fmt: skip
        assert f"| {' | '.join(cells)} |" in page
    assert len(re.findall(r"^\| \d", page, re.MULTILINE)) == len(kinds) == 12


def test_rollouts_of_a_trainer() -> None:
    text = " ".join((ROOT / "docs" / "trainers.md").read_text().split())
    for rollouts in rows_of("grpo_cpu_fp32.json")["rollouts"].values():
        later = rollouts[2:]
        plain, drafted = (median(row[f"{name}_seconds"] for row in later) for name in ("plain", "speculative"))
        assert re.search(rf"{plain:.2f} s (plainly )?and {drafted:.2f} s[^(]*\([^)]*{plain / drafted:.2f}x\)", text)


def test_lossy_acceptance() -> None:
    page = (ROOT / "docs" / "benchmarks" / "history.md").read_text()
    for row in rows_of("lossy_cpu_bf16.json")["rules"]:
        assert re.search(rf"\| {row['tau']:.2f} \| {row['mean_log_probability_per_token']:.2f} \|", page), row
