"""What an accident leaves behind: kill -9, SIGTERM, a full disk, a limit, two at once, for every command that writes.

    python tests/faults.py [--rounds 6]     by hand; prints a table

After each accident whatever is there is loaded: it must be the old thing, the new one, or nothing that loads. Then the
command is run again undisturbed and must end well, with nothing half made left behind.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import zoo
from hf_specdec import EagleConfig, EagleHead, load_head
from hf_specdec.errors import CheckpointFormatError, InvalidConfigError
from hf_specdec.training import FeatureStore, read_conversations

CLI = [sys.executable, "-W", "ignore", "-m", "hf_specdec"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
SAVE = """
import sys, torch
from hf_specdec import load_head
head = load_head(sys.argv[1])
for parameter in head.parameters():
    torch.nn.init.normal_(parameter)
head.save_pretrained(sys.argv[2])
"""


def prepare(folder: Path) -> None:
    """A model, a head, answers, prompts."""
    model = zoo.build("llama")
    model.save_pretrained(folder / "model")
    zoo.chat_tokenizer().save_pretrained(folder / "model")
    torch.manual_seed(0)
    EagleHead(EagleConfig.for_target(model.config, base_model_name_or_path="org/old")).save_pretrained(folder / "head")
    rows = [
        {"prompt_ids": [3 + i, 4 + i], "response_ids": [(7 * i + j) % 80 + 5 for j in range(8)]} for i in range(24)
    ]
    (folder / "talks.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": f"w{i:02} w05"}) for i in range(10, 40)))
    (folder / "more.json").write_text(json.dumps({"save_steps": 5}))


def commands(folder: Path, out: Path) -> dict[str, list[str]]:
    """What writes, by name."""
    model, data = ["--model", str(folder / "model")], ["--data", str(folder / "talks.jsonl")]
    train = ["train", "eagle", *model, *data, "--output", str(out), "--max-steps", "40", "--batch-size", "2",
             "--arguments", str(folder / "more.json")]  # fmt: skip
    return {
        "distill": [*CLI, "distill", *model, "--prompts", str(folder / "prompts.jsonl"), "--output", str(out),
                    "--max-new-tokens", "60", "--batch-size", "1"],
        "train": [*CLI, *train],
        "capture": [*CLI, *train[:-6], "--max-steps", "1", "--features", str(out / "features")],
        "tree": [*CLI, "tree", *model, *data, "--drafter", str(folder / "head"), "--output", str(out),
                 "--top-k", "90"],
        "convert": [*CLI, "convert", str(folder / "head"), str(out), "--format", "eagle"],
        "save": [sys.executable, "-W", "ignore", "-c", SAVE, str(folder / "head"), str(out)],
    }  # fmt: skip


def what_is_left(name: str, out: Path) -> str:
    """Whether it is whole, nothing that loads, or what is wrong."""
    try:
        if name == "distill":
            found = len(read_conversations(out))
            return "whole" if found == 30 else f"{found} whole answers of 30"
        if name == "capture":
            return "whole" if len(FeatureStore(out / "features")) == 24 else "SHORT"
        head = load_head(out)
        return "whole" if all(bool(p.isfinite().all()) for p in head.parameters()) else "BROKEN"
    except (CheckpointFormatError, InvalidConfigError):
        return "nothing that loads"


def killed(with_signal: int) -> Callable[[list[str], float], None]:
    """An accident: the process dies after some seconds."""

    def accident(command: list[str], seconds: float) -> None:
        running = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            running.wait(seconds)
        except subprocess.TimeoutExpired:
            running.send_signal(with_signal)
            running.wait()

    return accident


def limited(size: int) -> Callable[[list[str], float], None]:
    """An accident: no file may grow larger."""

    def accident(command: list[str], _: float) -> None:
        done = subprocess.run(
            command, env=ENVIRONMENT, capture_output=True, text=True, check=False,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size)),
        )  # fmt: skip
        if "-m" in command and done.returncode == 2:
            assert "Traceback" not in done.stderr, done.stderr[-1500:]

    return accident


def twice(command: list[str], _: float) -> None:
    """An accident: two at once."""
    both = [subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            for _ in range(2)]  # fmt: skip
    for process in both:
        _, errors = process.communicate()
        assert "Traceback" not in errors or "-c" in command, errors[-1500:]


def undisturbed(command: list[str]) -> float:
    begin = time.monotonic()
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-1500:]
    return time.monotonic() - begin


def main() -> None:
    """Every command through every accident."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--only", nargs="*", help="these commands")
    arguments = parser.parse_args()
    rounds = arguments.rounds
    rng = random.Random(0)
    accidents: dict[str, Any] = {
        "kill -9": killed(signal.SIGKILL), "SIGTERM": killed(signal.SIGTERM), "a limit of 2 kB": limited(2000),
        "a limit of 20 kB": limited(20_000), "two at once": twice,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        for kind in arguments.only or commands(folder, folder):
            out = folder / "whole"
            seconds = undisturbed(commands(folder, out)[kind])
            assert what_is_left(kind, out) == "whole"
            shutil.rmtree(out)
            for told, accident in accidents.items():
                left: Counter[str] = Counter()
                for number in range(rounds if "kill" in told or told == "SIGTERM" else 1):
                    out = folder / f"out{number}"
                    accident(commands(folder, out)[kind], rng.uniform(0.5, 1.05) * seconds)
                    left[what_is_left(kind, out)] += 1
                    if kind in ("convert", "tree") and out.exists():  # they write over no head
                        shutil.rmtree(out)
                    undisturbed(commands(folder, out)[kind])
                    assert what_is_left(kind, out) == "whole", (kind, told)
                    assert not list(folder.rglob("*.partial")), (kind, told)
                    shutil.rmtree(out)
                shown = ", ".join(
                    f"{text} ({count})" if rounds > 1 and count > 1 else text for text, count in left.items()
                )
                print(f"| {kind} | {told} | {shown} | ends well |", flush=True)


if __name__ == "__main__":
    main()
