"""`benchmarks/gpu.py`: every item ends alone, no row is lost at a time limit, and a missing GPU is no error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmark_script import BENCHMARKS, script

NO_GPU = pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator: run the script")


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


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
    names = [item.name for item in script("gpu_items").ITEMS]
    assert [row["item"] for row in found] == names
    for row in found:
        assert row["kind"] == "end"
        assert row["status"] == "not measured"
        assert row["reason"].startswith("this machine has no cuda device (torch ")
    assert all(f"{name}: not measured: this machine has no cuda" in done.stdout for name in names)


FAKE_ITEMS = """
import os, time
from gpu_items import Item, Kit, NotMeasured

def fine(kit): kit.row(value=1); kit.bar("small", 2.0, at_most=3.0)
def missed(kit): kit.bar("small", 4.0, at_most=3.0)
def raises(kit): kit.row(value=2); raise ValueError("no such thing")
def hangs(kit): kit.row(value=3); time.sleep(60)
def dies(kit): kit.row(value=4); os._exit(139)
def absent(kit): raise NotMeasured("no reason to")

ITEMS = tuple(Item(run.__name__, run, seconds) for run, seconds in
              ((raises, 30), (hangs, 4), (dies, 30), (absent, 30), (missed, 30), (fine, 30)))
"""


def test_an_item_that_fails_hangs_or_dies_ends_alone(tmp_path: Path) -> None:
    for name in ("gpu.py", "gpu_items.py"):
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
    assert "FAIL  small: 4 (wanted at most 3)" in done.stdout
    assert "pass  small: 2 (wanted at most 3)" in done.stdout
    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert again.returncode == 2
    assert "out.jsonl exists" in again.stderr


def test_items_past_the_whole_time_are_not_begun(tmp_path: Path) -> None:
    gpu = script("gpu")
    path = tmp_path / "gpu.jsonl"
    path.touch()
    assert gpu.drive(list(gpu.known_items().values())[:2], path, 0.0, [])
    assert {row["reason"] for row in rows(path)} == {"the 0 minutes were over before its turn"}


def test_the_capture_matrix_builds_what_it_names() -> None:
    items = script("gpu_items")
    for name in items.ARCHITECTURES:
        assert items.tiny(name, torch.device("cpu")).config.num_hidden_layers == 2, name
