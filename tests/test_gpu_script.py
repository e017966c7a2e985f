"""`benchmarks/gpu.py`: items end alone, no row is lost, a missing GPU is no error, and every item's code has run.

Items run at tiny sizes on the simulated device, in a process of their own, and on the CPU what that device cannot do.
What only CUDA has (events of its profiler, free memory) is made up for them.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType
from torch.utils import backend_registration

from benchmark_script import BENCHMARKS, script
from runs_again import RunsAgain

NO_GPU = pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator: run the script")
SIZES = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
SMALL = {
    "gpu_items": {"COPIED_BYTES": 64, "ARCHITECTURES": ("llama", "falcon")},
    "gpu_attention": {
        "NODES": (1, 8), "CONTEXTS": (16, 40), "HEADS": {"query": 4, "shared": 2, "dim": 16},
        "LAYERS": 2, "FORWARDS": 2, "GROUPS": 1, "FEWER_LAYERS": (1, 2), "ARCHITECTURES": ("llama", "falcon"),
    },
    "gpu_steps": {
        "CONTEXT": 16, "NEW_TOKENS": 14, "TAUS": (3.0,), "ORACLE_NODES": 8, "DRAFT_VOCABULARY": 96,
        "FIRST_STEP": 1, "STEPS": 4, "FEWER_LAYERS": 1, "AUTO_CALLS": 2, "AUTO_TOKENS": 20,
        "TREE": {"num_draft_tokens": 4, "num_steps": 2, "top_k": 2},
        "GROWING": ((10, 8), (40, 10)), "ROWS": (1, 4, 1), "LENGTHS": (10, 20), "COUNT": 8, "NUM_CALLS": 4,
    },
}  # fmt: skip
"""Numbers of the items' modules, in the place of an 8B's."""


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def options_for(path: Path, device: str, **others: Any) -> argparse.Namespace:
    return argparse.Namespace(**{"json": path, "device": device, "sizes": SIZES, "part": None, "run": None, **others})


def stub_device(module: Any, patch: pytest.MonkeyPatch) -> None:
    """Give a device's module what `torch.cuda` has besides."""
    for name, value in (
        ("get_device_name", lambda: "a stand-in"), ("get_device_capability", lambda: (9, 0)),
        ("get_device_properties", lambda _index: SimpleNamespace(total_memory=2**30)), ("empty_cache", lambda: None),
        ("mem_get_info", lambda _device: (2**29, 2**30)), ("memory_allocated", lambda _device: 2**20),
    ):  # fmt: skip
        patch.setattr(module, name, value, raising=False)


@pytest.fixture
def items(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The items' modules as `gpu.py` imports them, with small numbers."""
    return small_items(monkeypatch)


def small_items(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    patch.syspath_prepend(str(BENCHMARKS))
    for name in ("gpu_items", "gpu_attention", "gpu_steps", "oracle"):
        patch.delitem(sys.modules, name, raising=False)
    modules = {name: importlib.import_module(name) for name in SMALL}
    for name, values in SMALL.items():
        for key, value in values.items():
            assert type(getattr(modules[name], key)) is type(value), key
            patch.setattr(modules[name], key, value)
    return modules


# ------------------------------------------------------------------------------------------------- the driver


@NO_GPU
def test_without_a_gpu_every_item_says_why_it_measured_nothing(tmp_path: Path) -> None:
    """In an empty directory, in a process of its own, without the package's installation."""
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "gpu.py"), "--json", str(tmp_path / "new" / "gpu.jsonl")],
        cwd=tmp_path, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert time.monotonic() - begin < 60
    found = rows(tmp_path / "new" / "gpu.jsonl")
    items = script("gpu_items").ITEMS
    assert [row["item"] for row in found] == [item.name for item in items]
    for row in found:
        assert row["kind"] == "end"
        assert row["status"] == "not measured"
        assert row["reason"].startswith("this machine has no cuda device (torch ")
    for item in items:
        assert f"{item.name}: not measured: this machine has no cuda" in done.stdout
        for bar in item.bars:
            assert f"  not measured  {bar.name} (wanted {bar.wanted}): this machine has no cuda" in done.stdout


FAKE_ITEMS = """
import os, time
from gpu_items import Bar, Item, Kit, NoDevice, NotMeasured

SMALL = (Bar("small", at_most=3.0), Bar("large", at_least=3.0), Bar("unknown", at_most=1))
def fine(kit): kit.row(value=1); kit.bar("small", 2.0); kit.bar("large", 4.0); kit.bar("unknown", None, "nobody knows")
def missed(kit): kit.bar("small", 4.0)
def raises(kit): kit.row(value=2); raise ValueError("no such thing")
def hangs(kit): kit.row(value=3); time.sleep(60)
def dies(kit): kit.row(value=4); os._exit(139)
def absent(kit): raise NotMeasured("no reason to")

ITEMS = tuple(Item(run.__name__, run, seconds, bars=SMALL) for run, seconds in
              ((raises, 30), (hangs, 4), (dies, 30), (absent, 30), (missed, 30), (fine, 30)))
"""


def test_an_item_that_fails_hangs_or_dies_ends_alone(tmp_path: Path) -> None:
    for name in ("gpu.py", "gpu_items.py", "gpu_rows.py"):
        (tmp_path / name).write_text((BENCHMARKS / name).read_text())
    (tmp_path / "fake_items.py").write_text(FAKE_ITEMS)
    driver = (tmp_path / "gpu.py").read_text()
    (tmp_path / "gpu.py").write_text(driver.replace("from gpu_items import ITEMS", "from fake_items import ITEMS"))
    command = [sys.executable, "gpu.py", "--json", "out.jsonl"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    found = rows(tmp_path / "out.jsonl")
    ends = {row["item"]: row for row in found if row["kind"] == "end"}
    assert {name: row["status"] for name, row in ends.items()} == {
        "raises": "failed", "hangs": "stopped", "dies": "failed", "absent": "not measured", "missed": "measured",
        "fine": "measured",
    }  # fmt: skip
    assert "ValueError: no such thing" in ends["raises"]["reason"]
    assert ends["hangs"]["reason"] == "stopped at its limit of 4 s after 1 rows"
    assert ends["dies"]["reason"] == "exit status 139"
    assert [row["value"] for row in found if row["kind"] == "row"] == [2, 3, 4, 1]  # what was written stays
    for line in (
        "FAIL  small: 4 (wanted at most 3)", "pass  small: 2 (wanted at most 3)", "pass  large: 4 (wanted at least 3)",
        "not measured  unknown (wanted at most 1): nobody knows",
        "not measured  large (wanted at least 3): the item did not measure it",
        "not measured  small (wanted at most 3): stopped at its limit of 4 s after 1 rows",
        "not measured  small (wanted at most 3): no reason to",
    ):  # fmt: skip
        assert line in done.stdout, line
    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert again.returncode == 2
    assert "out.jsonl exists" in again.stderr


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
    readme = " ".join((root / "README.md").read_text().split())
    graphs_alone, tau_3 = (steps["cuda_graph", tau]["tokens_per_second"] / speed for tau in (1.0, 3.0))
    tokens = f"{steps['cuda_graph', 3.0]['tau']:.1f} tokens"
    assert f"CUDA graphs alone make an 8B model of random weights {graphs_alone:.1f} times as fast" in readme
    assert f"costs nothing and gives {tokens} per forward, it is {tau_3:.1f} times as fast" in readme
    eager, captured = [row for row in found if row["item"] == "eagle"]
    assert f"| {eager['ms_per_step']:.1f} | | {captured['ms_per_step']:.1f} | | |" in page
    times = {row["nodes"]: row["captured_ms"] for row in found if row.get("context") == 512}
    assert "{:.1f}, {:.1f}, {:.1f} and {:.1f} ms for 1, 8, 32 and 64".format(*times.values()) in page


# ------------------------------------------------------------------------------------------------- on the CPU


class InTurn:
    """In the place of a pool of threads, where a second thread would not know the device."""

    map = staticmethod(map)

    def __init__(self, _threads: int) -> None:
        pass

    def __enter__(self) -> InTurn:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def on_cpu(items: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    from hf_specdec.verification import graph_backends

    stub_device(torch.cpu, monkeypatch)
    monkeypatch.setitem(graph_backends.GRAPH_BACKENDS, "cpu", RunsAgain)
    return items


def measured(items: dict[str, Any], name: str, path: Path, device: str = "cpu") -> list[dict[str, Any]]:
    """The rows of an item that is run in this process; its end is the last."""
    item = next(item for item in items["gpu_items"].ITEMS if item.name == name)
    assert item.run(options_for(path, device, run=name)) == 0
    found = rows(path)
    assert found[-1]["status"] == "measured", found[-1]
    assert {row["bar"] for row in found if row["kind"] == "bar"} == {bar.name for bar in item.bars}
    return found


@pytest.mark.parametrize("name", ["auto", "calls", "endurance"])
def test_items_of_many_calls(on_cpu: dict[str, Any], tmp_path: Path, name: str) -> None:
    """Threads know the CPU only, and many calls take long on the simulated device."""
    found = measured(on_cpu, name, tmp_path / "rows.jsonl")
    bars = {row["bar"]: row["value"] for row in found if row["kind"] == "bar"}
    if name == "endurance":
        assert bars == {"MiB that 100 calls keep": 0.0, "answers that differ from plain": 0}
        assert next(row for row in found if row.get("threads") == 2)["different"] == 0
        return
    if name == "auto":
        calls = [row for row in found if "queried_at" in row]
        assert sum(row["control"]["queries"]["eagle"] for row in calls) == sum(len(row["queried_at"]) for row in calls)
        assert all(row["captured_at"] for row in calls[:1])
        assert bars["steps from a capture to the next query of the head"] >= 1
        return
    calls = [row for row in found if "captured" in row]
    assert [(row["rows"], row["prompt"]) for row in calls] == [(r, p) for r in (1, 4, 1) for p in (10, 40)]
    captured = [f"{what} {tuple(key)}" for row in calls for what, key in row["captured"]]
    assert captured
    assert bars == {"shapes captured twice": len({key for key in captured if captured.count(key) > 1})}


def test_kernels_of_attention_agree_with_the_reference(on_cpu: dict[str, Any], tmp_path: Path) -> None:
    """The CPU has some of them, and says of the others that it has not."""
    found = [row for row in measured(on_cpu, "attention", tmp_path / "rows.jsonl") if row["kind"] == "row"]
    assert {(row["kernel"], row["keys"], row["nodes"]) for row in found} == {
        (kernel, keys, nodes) for kernel in ("hf_specdec", "flash", "efficient", "cudnn", "math")
        for keys in (16, 40) for nodes in (1, 8)
    }  # fmt: skip
    assert all(row["error"] < 0.01 for row in found if "fixed_us" in row)
    assert {row["kernel"] for row in found if "refused" in row} >= {"cudnn", "efficient"}
    assert {row["kernel"] for row in found if "fixed_us" in row} >= {"hf_specdec", "math"}


def event(name: str, begin: float, end: float, *, on_device: bool = False) -> Any:
    place = SimpleNamespace(start=begin, end=end)
    return SimpleNamespace(name=name, device_type=DeviceType.CUDA if on_device else DeviceType.CPU, time_range=place)


def test_what_a_profiler_saw_is_counted_by_hand(items: dict[str, Any]) -> None:
    """Four steps in 1000 microseconds, 800 without a profiler; what lies outside of the window does not count."""
    gpu_steps = items["gpu_steps"]
    events = [
        event("cudaDeviceSynchronize", 0, 5), event(gpu_steps.WINDOW, 10, 1010), event("aten::mm", 11, 20),
        event(gpu_steps.WINDOW, 10, 1010, on_device=True), event("before", 1, 9, on_device=True),
        *(event(name, 100 + number, 101 + number) for number, name in enumerate(
            ["cudaLaunchKernel"] * 6 + ["cudaLaunchKernelExC"] * 2 + ["cudaGraphLaunch"] * 8
            + ["cudaStreamSynchronize"] * 4 + ["cudaMemcpy", "cudaMemcpyAsync", "cudaEventQuery"])),
        event("gemm", 200, 500, on_device=True), event("Memcpy DtoH", 600, 700, on_device=True),
    ]  # fmt: skip
    found = gpu_steps.counted(events, 800e-6)
    wanted = {
        "launches_per_step": 2.0, "graphs_per_step": 2.0, "copies_per_step": 0.25, "reads_per_step": 1.25,
        "device_operations_per_step": 0.5, "device_ms_per_step": 0.1, "ms_per_step": 0.2,
        "profiled_ms_per_step": 0.25, "idle": 0.5, "idle_beside_the_profiler": 0.6,
    }  # fmt: skip
    assert found.pop("waits") == {"cudaStreamSynchronize": 1.0, "cudaMemcpy": 0.25}
    assert found == pytest.approx(wanted)


def test_what_inductor_takes_is_extrapolated_and_a_refusal_is_a_row(
    on_cpu: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hf_specdec.generation import model_programs
    from hf_specdec.verification.runners import ModelForward

    def refuse(*_: Any) -> None:
        raise model_programs.CaptureError("no compiler")

    monkeypatch.setattr(model_programs, "CompiledForward", refuse)
    *_, refused, _ = measured(on_cpu, "inductor", tmp_path / "refused.jsonl")
    assert (refused["form"], refused["refused"]) == ("inductor", "no compiler")
    monkeypatch.setattr(model_programs, "CompiledForward", lambda model, layers, _mode: ModelForward(model, layers))
    *each, graphs, program, _ = measured(on_cpu, "inductor", tmp_path / "rows.jsonl")
    few, more = (row["seconds"] for row in each if row["form"] == "inductor")
    assert program["per_layer"]["seconds"] == pytest.approx(more - few)
    assert program["extrapolated_to_32_layers"]["seconds"] == pytest.approx(more + 30 * (more - few))
    assert graphs["form"] == "cuda_graph"


A_SUITE = """
import pytest

@pytest.mark.parametrize("number", range(3))
def test_fine(number): pass
def test_wrong(): assert False, "for a reason"
@pytest.mark.skip(reason="none")
def test_skipped(): pass
"""


def test_the_gpu_tests_are_counted_as_they_end(
    on_cpu: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_gpu.py").write_text(A_SUITE)
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\naddopts = "-q"\n')  # as ours
    monkeypatch.setattr(on_cpu["gpu_items"], "ROOT", tmp_path)
    monkeypatch.setattr(on_cpu["gpu_items"], "TESTS_PER_ROW", 2)
    found = measured(on_cpu, "tests", tmp_path / "rows.jsonl")
    so_far, failed, summary = [row for row in found if row["kind"] == "row"]
    assert so_far["so_far"]["PASSED"] == 2
    assert "test_wrong" in failed["failed"]
    assert summary["count"] == {"PASSED": 3, "FAILED": 1, "SKIPPED": 1, "ERROR": 0}
    assert "1 failed, 3 passed, 1 skipped" in summary["summary"]
    assert [row["value"] for row in found if row["kind"] == "bar"] == [1]
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    item = next(item for item in on_cpu["gpu_items"].ITEMS if item.name == "tests")
    item.run(options_for(tmp_path / "rows.jsonl", "cpu"))
    assert rows(tmp_path / "rows.jsonl")[-1]["reason"] == "pytest is not installed"


def test_answers_to_texts_are_timed_and_compared(
    on_cpu: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from peers import NothingDrafter

    import drafters
    import zoo
    from hf_specdec import SpeculativeGenerationMixin, bench

    text = importlib.import_module("gpu_text")

    def packaged(kit: Any) -> tuple[Any, Any, list[Any]]:
        model = SpeculativeGenerationMixin.attach(zoo.build("llama").to(kit.device))
        drafters.BY_NAME["eagle"].add(model)
        model.add_drafter(NothingDrafter())
        return model, zoo.chat_tokenizer(), [bench.Question(str(n), "chat", (f"w1{n} w20 w1{n}",)) for n in range(3)]

    for name, value in (("packaged", packaged), ("NEW_TOKENS", 8)):
        monkeypatch.setattr(text, name, value)
    monkeypatch.setattr(text, "METHODS", [*text.METHODS[:1], "auto"])
    found = measured(on_cpu, "text", tmp_path / "rows.jsonl")
    rows = [row for row in found if row["kind"] == "row"]
    assert {(row["question_id"], row["method"]) for row in rows if "seconds" in row} == {
        (str(n), method) for n in range(3) for method in ("plain", "transformers_prompt_lookup", "auto")
    }
    (summary,) = [row for row in rows if row.get("method") == "auto" and "times_plain" in row]
    assert 0 < summary["worst"] <= summary["times_plain"]
    assert [row["equal"] for row in rows if "float32" in row] == [True] * len(text.EXACT)
    assert [row["captured"] != [] for row in rows if row.get("program") == "cuda_graph"] == [True]
    assert text.timed(text_kit(on_cpu, tmp_path), *packaged(text_kit(on_cpu, tmp_path)), ["auto"], 0)["auto"]


def text_kit(items: dict[str, Any], folder: Path) -> Any:
    return items["gpu_items"].Kit("text", options_for(folder / "others.jsonl", "cpu"))


# ------------------------------------------------------------------------------------------- on the simulated device


@pytest.mark.exhaustive
def test_every_item_runs_on_the_simulated_device(tmp_path: Path) -> None:
    """A tensor on the wrong device, a name that is none, a bar that is forgotten."""
    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip(f"torch {torch.__version__} cannot have a device that is written in Python")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, str(tmp_path)], capture_output=True, text=True, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = {path.stem: rows(path) for path in tmp_path.glob("*.jsonl")}
    bars = {(name, row["bar"]): row for name, lines in found.items() for row in lines if row["kind"] == "bar"}
    for name, bar in (
        ("verify", "distance of a replay from the eager forward, times that of SDPA's math kernel"),
        ("oracle", "answers that differ from plain"),
        ("capture", "architectures that are wrong, or fail"),
        ("capture", "captures that work after one that failed"),
    ):
        assert bars[name, bar]["passed"], bars[name, bar]
    assert bars["eagle", "reads per step"]["reason"] == "torch's profiler shows nothing of this device"
    after = next(row for row in found["capture"] if row.get("part") == "after a failure" and row["kind"] == "row")
    assert after["refused"]
    assert "reads the device while a graph is captured" in after["failed_with"]
    assert any("cannot be captured" in row["text"] for row in found["capture"] if row["kind"] == "warning")


ON_THE_CPU = ("auto", "calls", "endurance", "text", "tests", "inductor", "static")
"""Items whose tests run there."""


def on_simulated_device(folder: Path) -> None:
    """Every item in this process, each into a file of its own."""
    import simulated_device
    from hf_specdec import SpeculativeGenerationMixin
    from hf_specdec.verification import graph_backends, memory
    from simulated_device import Graph, move, simulation

    class SimGraphBackend(RunsAgain):
        def _capture(self, run: Any) -> Any:
            graph = Graph()
            with graph.capture():
                run()
            return graph.replay

    with pytest.MonkeyPatch.context() as patch, simulation():
        items = small_items(patch)
        gpu_items, gpu_attention, gpu = items["gpu_items"], items["gpu_attention"], script("gpu")
        from oracle import make_sure

        llama, tiny = gpu_items.Kit.llama, gpu_items.tiny
        on_host = gpu_items.Kit("", options_for(folder / "none", "cpu"))
        patch.setattr(gpu_items.Kit, "llama", lambda _kit, **changes: move(llama(on_host, **changes)))
        patch.setattr(gpu_items.Kit, "sure_llama", lambda _kit, **changes: SpeculativeGenerationMixin.attach(
            move(make_sure(llama(on_host, **changes)))))  # fmt: skip
        patch.setattr(gpu_items, "tiny", lambda name, _device: move(tiny(name, torch.device("cpu"))))
        patch.setattr(gpu_attention, "ThreadPoolExecutor", InTurn)
        patch.setattr(subprocess, "run", lambda command, **_: SimpleNamespace(
            returncode=gpu.main(command[2:]), stdout=""))  # fmt: skip
        patch.setitem(graph_backends.GRAPH_BACKENDS, "sim", SimGraphBackend)
        patch.setattr(memory, "SHORTEST_BUCKET", 16)
        patch.setattr(memory, "FIRST_KEPT_SLOTS", 16)
        patch.setattr(simulated_device, "place_of_call", str)  # nobody asks where
        stub_device(torch.get_device_module("sim"), patch)
        for item in gpu_items.ITEMS:
            if item.name not in ON_THE_CPU:
                begin = time.monotonic()
                measured(items, item.name, folder / f"{item.name}.jsonl", "sim")
                print(item.name, f"{time.monotonic() - begin:.1f} s", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    on_simulated_device(Path(sys.argv[1]))
