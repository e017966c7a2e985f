"""`benchmarks/gpu.py` where there is no GPU: what can run runs on a tiny model, the rest is told to be missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import zoo
from benchmark_script import script

SIZES = ["96", "32", "64", "2", "4", "2", "512", "10000"]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator: run the script itself")
def test_a_report_has_figures_or_says_that_it_has_none(tmp_path: Path) -> None:
    zoo.build("llama").save_pretrained(tmp_path / "model")
    zoo.chat_tokenizer().save_pretrained(tmp_path / "model")
    script("gpu").main([
        "--small-model", str(tmp_path / "model"), "--llama-sizes", *SIZES, "--taus", "1", "3", "--nodes", "2", "8",
        "--batches", "1", "2", "--max-new-tokens", "24", "--json", str(tmp_path / "gpu.json"),
        "--parts", "capture", "small", "oracle", "memory",
    ])  # fmt: skip
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert report["capture"] == report["memory"] == "not measured: cpu records no graphs"
    assert report["reads"] == "not measured"  # it was not asked for
    assert report["small"]["auto, none"]["tau"] >= 1
    assert not any("cuda_graph" in name for name in report["small"])
    rows = report["oracle"]["rows"]
    assert [row["method"] for row in rows].count("plain") == 2
    drafted = [row for row in rows if row["method"] == "oracle, none"]
    assert len(drafted) == 2 * 3  # no tree of two nodes has a tau of three
    assert all(row["tau"] == pytest.approx(row["wanted_tau"], rel=0.2) for row in drafted)
    assert report["oracle"]["roofline_seconds_per_forward"] > 0


def test_the_capture_matrix_builds_what_it_names() -> None:
    gpu = script("gpu")
    for name in gpu.ARCHITECTURES:
        assert gpu.tiny(name, torch.device("cpu")).config.num_hidden_layers == 2, name
