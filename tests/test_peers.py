"""`benchmarks/peers.py` with a worker that is no engine: the protocol, interleaved runs, peers that are not there."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import zoo
from benchmark_script import BENCHMARKS, script
from hf_specdec import bench

peers = script("peers")

WORKER = """
import sys, time
sys.path.insert(0, {workers!r})
from protocol import FirstToken, serve

def load(settings):
    if settings["fails"] == "at once":
        raise OSError("no such model")
    print("a library prints what it likes")
    first = FirstToken()
    def answer(prompt_ids, max_new_tokens):
        if settings["fails"] == "later":
            raise ValueError("the prompt is too long")
        first.begin()
        time.sleep(0.01)
        first.seen()
        return settings["ids"][:max_new_tokens], first.seconds, 2.5
    return answer

serve(load, ["pip"])
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment with this Python and one worker, and another one that was never made."""
    environment = peers.Environment(("pip",))
    monkeypatch.setattr(peers, "PLACE", tmp_path)
    monkeypatch.setattr(peers, "WORKERS", tmp_path)
    monkeypatch.setattr(peers, "ENVIRONMENTS", {"fake": environment, "absent": environment})
    monkeypatch.setattr(peers, "METHODS", {
        "fake": ("fake", {"fails": None, "ids": [5, 6, 7, 8, 9, 10]}), "broken": ("fake", {"fails": "at once"}),
        "breaking": ("fake", {"fails": "later"}), "absent": ("absent", {}),
    })  # fmt: skip
    (tmp_path / "fake" / "bin").mkdir(parents=True)
    python = tmp_path / "fake" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (tmp_path / "fake" / "made.json").write_text(json.dumps(peers.asdict(environment)))
    (tmp_path / "fake_worker.py").write_text(WORKER.format(workers=str(BENCHMARKS / "workers")))
    return tmp_path


def options(**values: Any) -> Any:
    given = {"model": "m", "dtype": "float32", "threads": 1, "context": 64, "gguf": None, "drafter": None}
    return SimpleNamespace(**{**given, **values})


def started(model: Any, *names: str) -> tuple[dict[str, Any], dict[str, Any]]:
    workers: dict[str, Any] = {}
    told: dict[str, Any] = {}
    peers.start(names, model, options(), workers, told)
    return workers, told


@pytest.mark.slow
def test_a_run_is_interleaved_and_goes_on_where_it_stopped(
    place: Path, model: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "prompts.jsonl").write_text("\n".join(
        json.dumps({"question_id": i, "category": "qa", "turns": ["w05 w06 w07"]}) for i in range(2)
    ))  # fmt: skip
    workers, told = started(model, "fake", "broken", "absent")
    assert told["fake"]["versions"].keys() == {"pip"}
    assert told["broken"]["missing"].startswith("OSError: no such model; see ")
    assert told["absent"] == {"missing": "its environment does not exist: python benchmarks/peers.py --make absent"}
    asked = options(prompts=place / "prompts.jsonl", json=place / "out.json", max_new_tokens=6,
                    methods="prompt_lookup", rounds=1)  # fmt: skip
    try:
        assert workers["fake"].processes[0].status() == "stopped"  # also while another one computes
        for per_category in (1, 2):
            peers.run(
                model, zoo.chat_tokenizer(), workers, told, options(**{**vars(asked), "per_category": per_category})
            )
    finally:
        workers["fake"].close()
    document = json.loads((place / "out.json").read_text())
    rows = [row for row in document["measurements"] if row["method"] == "fake"]
    assert [row["question_id"] for row in rows] == ["0", "1"]
    assert [row["method"] for row in document["measurements"][:3]] == ["plain", "prompt_lookup", "fake"]
    for row in rows:
        assert (row["num_tokens"], row["tau"], row["ids_equal"]) == (6, 2.5, False)
        assert 0.01 <= row["first_token_seconds"][0] <= row["seconds"][0]
    assert document["peers"] == told
    assert {"commit", "device"} <= set(document["environment"])
    assert "| fake | " in capsys.readouterr().out


def test_a_worker_that_fails_is_told_with_its_words(
    place: Path, model: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    workers, _ = started(model, "breaking", "fake")
    peers.smoke(model, zoo.chat_tokenizer(), workers)
    shown = capsys.readouterr().out
    assert "breaking: no answer: ValueError: the prompt is too long; see " in shown
    assert "fake: 'w05 w06 w07 w08 w09 w10'\n  6 tokens" in shown
    process = workers["fake"].processes[0]
    for worker in workers.values():
        worker.close()
    assert not process.is_running()
    assert (place / "fake.log").read_text() == "a library prints what it likes\n"


def test_a_stopped_worker_uses_no_time(place: Path, model: Any) -> None:
    workers, _ = started(model, "fake")
    try:
        reply = workers["fake"].ask([1, 2], 3)
        assert reply == bench.Reply([5, 6, 7], reply.seconds, reply.first_token_seconds, 2.5)
        before = [process.cpu_times()[:2] for process in workers["fake"].processes]
        time.sleep(0.1)
        assert [process.cpu_times()[:2] for process in workers["fake"].processes] == before
    finally:
        workers["fake"].close()


def test_an_environment_that_cannot_be_made_is_told_with_the_reason(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = "Collecting pip\nERROR: No matching distribution found for pip\nhint: look again\n"
    steps: list[list[str]] = []

    def run(step: list[str], **_: Any) -> Any:
        steps.append(step)
        return SimpleNamespace(returncode=len(steps) - 1, stdout=said)

    monkeypatch.setattr(peers.subprocess, "run", run)
    assert peers.main(["--make", "all"]) == 1
    shown = capsys.readouterr().out
    assert "fake: created, pip" in shown  # it was there
    assert "absent: its environment cannot be created: ERROR: No matching distribution found for pip" in shown
    assert [step[1:3] for step in steps] == [["-m", "venv"], ["-m", "pip"]]


@pytest.mark.parametrize(
    ("row", "values", "message"),
    [
        (("llama_cpp", {}), {}, "its weights are a bf16 GGUF, and --dtype is float32"),
        (("llama_cpp", {}), {"dtype": "bfloat16"}, "needs this model's weights as a bf16 GGUF: --gguf"),
        (("vllm", {"steps": 3}), {}, "needs an EAGLE-3 head: --drafter"),
    ],
)
def test_what_a_worker_lacks(
    place: Path, model: Any, monkeypatch: pytest.MonkeyPatch, row: Any, values: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(peers, "METHODS", {"peer": row})
    with pytest.raises(peers.PeerError, match=message):
        peers.settings_for("peer", model, options(**values))
