"""The questions that the benchmarks use can be made from Spec-Bench's file, and a missing file is a clear error."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmark_script import script
from hf_specdec.bench.questions import read_questions

ROOT = Path(__file__).parents[1]
spec_bench: Any = script("spec_bench")


def test_the_development_half_has_the_questions_with_odd_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"question_id": number, "category": "qa", "turns": [f"Was ist {number} €?"]} for number in range(81, 87)]
    source, output = tmp_path / "question.jsonl", tmp_path / "half.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(spec_bench, "SHA256", hashlib.sha256(source.read_bytes()).hexdigest())
    spec_bench.main([str(source), str(output)])
    assert output.read_text() == "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows[::2])
    assert [question.turns for question in read_questions(output)] == [tuple(row["turns"]) for row in rows[::2]]


@pytest.mark.parametrize("content", [None, "404: Not Found"])
def test_another_file_is_refused(content: str | None, tmp_path: Path) -> None:
    source, output = tmp_path / "question.jsonl", tmp_path / "half.jsonl"
    if content is not None:
        source.write_text(content)
    with pytest.raises(SystemExit, match="download"):
        spec_bench.main([str(source), str(output)])
    assert not output.exists()


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_bench_without_questions_fails_with_one_sentence(tmp_path: Path) -> None:
    command = ["make", "-s", "-C", str(ROOT), "bench", f"PROMPTS={tmp_path}/none.jsonl", f"VENV={tmp_path}/venv"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert f"There is no file {tmp_path}/none.jsonl" in done.stderr
    assert "benchmarks/spec_bench.py" in done.stderr
    assert not list(tmp_path.iterdir())  # before any work
