"""The scripts for a GPU: rehearsed on the CPU, part by part; no row is lost, and published figures are rows."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType

from benchmark_script import BENCHMARKS, script
from hf_specdec.verification.graph_backends import GRAPH_BACKENDS


def rehearsed(name: str, folder: Path, *parts: str) -> list[dict[str, Any]]:
    """The rows of a script's parts, each of which must end without an error."""
    module, file, known = script(name), folder / "rows.jsonl", dict(GRAPH_BACKENDS)
    assert module.main(module.PARTS, "", ["--tiny", "--json", str(file), "--parts", *parts]) == 0
    assert known == GRAPH_BACKENDS
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["part"] for row in rows if "seconds" in row] == list(parts)
    return rows


@pytest.mark.slow
def test_forwards(tmp_path: Path) -> None:
    with torch.compiler.set_stance("force_eager"):  # compiling takes long, and nothing is timed
        rows = rehearsed("gpu_forwards", tmp_path, "environment", "static", "forms", "experts", "architectures")
    assert [row["form"] for row in rows if row["part"] == "static" and "form" in row] == [*["static"] * 3, "eager"]
    for part, forms, widths in (
        ("forms", ("eager", "cuda_graph", "inductor"), ["1", "8", "32"]),
        ("experts", ("grouped_mm", "batched_mm"), ["1", "2", "4", "8", "32"]),
    ):
        found = [row for row in rows if row["part"] == part and "ms" in row]
        assert [(row["round"], row["form"]) for row in found] == [(n, form) for n in range(-1, 3) for form in forms]
        assert all(list(row["ms"]) == widths for row in found)
    assert [row["equal"] for row in rows if "architecture" in row] == [True] * 4


@pytest.mark.slow
def test_answers(tmp_path: Path) -> None:
    with torch.compiler.set_stance("force_eager"):
        rows = rehearsed("gpu_answers", tmp_path, "wide", "mends", "float32")
    answers = [row for row in rows if row["part"] == "wide" and "question" in row]
    assert {row["round"] for row in answers} == {-1, 0}
    assert {row["method"] for row in answers} >= {"plain", "static", "captured", "eagle", "auto", "eagle+inductor"}
    assert all(row["equal"] for row in answers)
    assert any(row["capture_seconds"] for row in answers if row["round"] < 0)
    assert not any(row["capture_seconds"] for row in answers if row["round"] >= 0 and row["method"] == "captured")
    assert len({row["without"] for row in rows if row["part"] == "mends" and "tau" in row}) == 3
    assert {row["precision"] for row in rows if row["part"] == "float32" and row.get("equal")} == {"highest", "high"}
    assert [row["passed"] for row in rows if "bar" in row and row["value"] >= row["at_least"]] in (
        [],
        [True],
        [True] * 2,
    )


@pytest.mark.slow
def test_training(tmp_path: Path) -> None:
    rows = rehearsed("gpu_training", tmp_path, "train")
    assert (tmp_path / "trained-head" / "model.safetensors").exists()
    assert set(rows[-2]["mean_tau"]) == {"shipped", "trained"}


@torch.no_grad()
def test_a_widened_model_writes_the_same_text_and_its_head_drafts_the_same(tmp_path: Path) -> None:
    kit_module = script("gpu_kit")
    with (tmp_path / "rows").open("w") as file, pytest.MonkeyPatch.context() as patch:
        for device, backend in GRAPH_BACKENDS.items():
            patch.setitem(GRAPH_BACKENDS, device, backend)
        patch.setitem(GRAPH_BACKENDS, "cpu", None)  # a kit sets it
        kit = kit_module.Kit(file, tiny=True)
    small, small_head = kit.smollm()
    large, head = kit.widened(small, small_head)
    assert sum(weight.numel() for weight in large.parameters()) > 3 * sum(w.numel() for w in small.parameters())
    assert large.config.num_hidden_layers > small.config.num_hidden_layers
    ids = torch.arange(3, 40)[None]
    torch.testing.assert_close(large(ids).logits, small(ids).logits, atol=1e-5, rtol=1e-4)
    found = []
    for model, drafter in ((small, small_head), (large, head)):
        states = model(ids, output_hidden_states=True).hidden_states
        features = drafter.fuse(torch.cat([states[layer] for layer in drafter.feature_layers], dim=-1))
        found.append(drafter.draft_logits(features[:, -1:], 5, None))
    assert found[0].std() > 0.1
    torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=1e-4)


def test_a_part_that_fails_leaves_a_row_and_the_next_one_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kit, file = script("gpu_kit"), tmp_path / "rows.jsonl"

    def fails(kit: Any) -> None:
        kit.row(value=1)
        raise ValueError("no such thing")

    parts = {"fails": fails, "fine": lambda kit: kit.bar("two", 2.0, at_most=3.0)}
    command = ["--tiny", "--json", str(file)]
    assert kit.main(parts, "", command) == 1
    first, failed, bar, _ = map(json.loads, file.read_text().splitlines())
    assert first == {"part": "fails", "value": 1}
    assert "ValueError: no such thing" in failed["failed"]
    assert bar["passed"]
    for arguments, message in ((command, "rows.jsonl exists"), (["--json", "x"], "no CUDA device")):
        if torch.cuda.is_available() and "CUDA" in message:
            continue
        with pytest.raises(SystemExit):
            kit.main(parts, "", arguments)
        assert message in capsys.readouterr().err
    late = tmp_path / "late.jsonl"
    assert kit.main(parts, "", ["--tiny", "--json", str(late), "--seconds", "0"]) == 0
    assert [json.loads(line)["not_run"] for line in late.read_text().splitlines()] == ["fails", "fine"]


def test_what_a_profiler_saw_is_counted_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = script("gpu_answers")

    def event(name: str, begin: float, end: float, *, on_device: bool = False) -> Any:
        kind = DeviceType.CUDA if on_device else DeviceType.CPU
        return SimpleNamespace(name=name, device_type=kind, time_range=SimpleNamespace(start=begin, end=end))

    def profiled(answered: int) -> Any:
        names = ["cudaLaunchKernelExC", "cudaLaunchKernel", "cudaGraphLaunch", "aten::mm"] * answered
        events = [event(name, 0, 1) for name in names] + [event("gemm", 0, 500, on_device=True)] * answered
        return nullcontext(SimpleNamespace(events=lambda: events))

    runs, rows = iter([profiled(2), profiled(6)]), []
    monkeypatch.setattr(torch.profiler, "profile", lambda **_: next(runs))
    monkeypatch.setattr(answers, "answer", lambda *_: None)
    model = SimpleNamespace(last_speculation=SimpleNamespace(num_target_forwards=4))
    answers.profile(SimpleNamespace(row=lambda **values: rows.append(values)), model, {}, 9, {})
    assert rows == [{
        "steps": 4, "calls_per_step": {"cudaLaunchKernel": 2.0, "cudaGraphLaunch": 1.0},
        "device_ms_per_step": 0.5, "slowest_ms_per_step": {"gemm": 0.5},
    }]  # fmt: skip


def test_the_published_figures_of_a_gpu_are_those_of_the_rows() -> None:
    root = BENCHMARKS.parent
    page = (root / "docs" / "benchmarks" / "results.md").read_text()
    page = " ".join(page[page.index("## On a GPU") :].split())
    recorded = json.loads((BENCHMARKS / "results" / "gpu_h100.json").read_text())
    found = [row for row in recorded["runs"][0]["rows"] if row["kind"] == "row"]
    plain = next(row for row in found if row.get("method") == "plain")
    speed = plain["tokens_per_second"]
    assert f"| plain `generate()` | {plain['milliseconds_per_token']:.1f} | {speed:.0f} |" in page
    steps = {(row["form"], row["wanted_tau"]): row for row in found if row.get("method") == "oracle"}
    for tau in (1.0, 3.0, 4.5):
        eager, graphs = steps["none", tau], steps["cuda_graph", tau]
        cells = [
            f"oracle, tau {graphs['tau']:.1f}", f"{eager['milliseconds_per_step']:.1f}",
            f"{eager['tokens_per_second']:.0f}", f"{graphs['milliseconds_per_step']:.1f}",
            f"{graphs['tokens_per_second']:.0f}", f"{graphs['tokens_per_second'] / speed:.1f}x",
        ]  # fmt: skip
        assert f"| {' | '.join(cells)} |" in page
    guide = " ".join((root / "docs" / "gpu.md").read_text().split())
    eager, captured = [row for row in found if row["item"] == "eagle"]
    graphs, with_head = steps["cuda_graph", 1.0], captured["ms_per_step"]
    gain, scaled = graphs["tokens_per_second"] / speed, 16 * with_head / graphs["milliseconds_per_step"]
    wrong, added = graphs["milliseconds_per_step"], with_head - 5  # an H100 reads these weights in 5 ms
    for cells in (
        f"{plain['milliseconds_per_token']:.1f} ms; Python takes most of it | at least 16 ms; ",
        f"{graphs['milliseconds_per_step']:.1f} ms, so {gain:.1f}x | at least 16 ms: at 50 tokens/s no more than "
        f"{1000 / 50 / 16:.2f}x",
        f"{with_head:.1f} ms | {scaled:.0f} ms ({with_head:.1f} / {wrong:.1f} of the line above) "
        f"to {16 + added:.0f} ms ({added:.0f} ms more than reading the weights, as on the "
        "H100): at 50 tokens/s and 2.5 tokens per step, "
        f"{1000 / 50 * 2.5 / (16 + added):.1f}x to {1000 / 50 * 2.5 / scaled:.1f}x",
    ):
        assert f" | {cells}" in guide
    without, token = eager["ms_per_step"], plain["milliseconds_per_token"]
    told = f"with a head then took {without:.0f} ms and a plain token {token:.0f} ms"
    assert f"{told}, so a tau below {without / token:.1f}" in guide
    assert f"| {eager['ms_per_step']:.1f} | | {captured['ms_per_step']:.1f} | | |" in page
    times = {row["nodes"]: row["captured_ms"] for row in found if row.get("context") == 512}
    assert "{:.1f}, {:.1f}, {:.1f} and {:.1f} ms for 1, 8, 32 and 64".format(*times.values()) in page
