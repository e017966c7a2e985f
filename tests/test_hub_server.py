"""Heads on a Hub: a real HTTP server on loopback that speaks its protocol."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import layouts
import zoo
from hf_specdec import EagleConfig, EagleHead
from hub_server import Hub, Repository

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def ask(mode: str, url: str, cache: Path) -> dict[str, Any]:
    environment = {**os.environ, "HF_ENDPOINT": url, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1",
                   "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_OFFLINE": "0" if mode == "online" else "1",
                   "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}  # fmt: skip
    done = subprocess.run(
        [sys.executable, HERE / "hub_client.py", mode], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    outcomes: dict[str, Any] = json.loads(done.stdout)
    return outcomes


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The server after a session with it, and what came of that session, online and then offline."""
    folder = tmp_path_factory.mktemp("hub")
    model = zoo.build("llama")
    model.save_pretrained(folder / "target")
    head = EagleHead(EagleConfig.for_target(model.config, base_model_name_or_path="org/target"))
    head.save_pretrained(folder / "eagle")
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.mul_(2)
    head.save_pretrained(folder / "doubled")
    eagle, doubled = files_of(folder / "eagle"), files_of(folder / "doubled")
    published = layouts.all_examples()["eagle3 in shards of pickles"].write(folder / "published")
    pickles = files_of(published)
    with Hub() as server:
        for name in ("eagle", "private", "breaks-off", "wrong-hash"):
            server.repositories[f"org/{name}"] = Repository()
            server.repositories[f"org/{name}"].commit(eagle)
        server.repositories["org/eagle"].commit(doubled, "doubled")
        server.repositories["org/private"].private = True
        server.repositories["org/breaks-off"].breaks_off = "model.safetensors"
        server.repositories["org/wrong-hash"].wrong_hash = "model.safetensors"
        for name, files in {
            "target": files_of(folder / "target"),
            "published": pickles,
            "no-weights": {"config.json": eagle["config.json"]},
            "no-config": {"model.safetensors": eagle["model.safetensors"]},
            "no-shard": {file: content for file, content in pickles.items() if "00002-of" not in file},
            "orphan": {**eagle, "config.json": eagle["config.json"].replace(b"org/target", b"org/missing")},
            "carded": {"README.md": b"written by hand"},
        }.items():
            server.repositories[f"org/{name}"] = Repository()
            server.repositories[f"org/{name}"].commit(files)
        online = ask("online", server.url, folder / "cache")
        yield server, online, ask("offline", server.url, folder / "cache")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attempt", "outcome"),
    [
        ("by id", "hf-specdec"),
        ("pickled", "eagle3"),
        ("by branch", 2.0),
        ("by commit", True),
        ("private, with a token", "hf-specdec"),
        ("push", ["CommitInfo", "hf-specdec"]),
        ("push while saving", "hf-specdec"),
        ("push again", "hf-specdec"),
        ("custom_generate", ["org/mine"]),
        ("target and head", ["eagle"]),
    ],
)
def test_works(hub: Any, attempt: str, outcome: Any) -> None:
    assert hub[1][attempt] == outcome


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        ("no such branch", "CheckpointFormatError: No head was found at 'org/eagle'"),
        ("private", "CheckpointFormatError: No head was found at 'org/private'"),
        ("no such repository", "CheckpointFormatError: No head was found at 'org/nothing'"),
        ("no weights", "CheckpointFormatError: There are no weights in org/no-weights"),
        ("no config", "CheckpointFormatError: There is no config.json in 'org/no-config'"),
        ("a shard is missing", "pytorch_model-00002-of-00003.bin, which does not exist"),
        ("breaks off", "CheckpointFormatError: No head was found at 'org/breaks-off'"),
        ("wrong hash", "differs from the file on the Hub"),
        (
            "a head without its target",
            "CheckpointFormatError: The model 'org/missing', which the head org/orphan names",
        ),
        ("push without a token", "401"),
    ],
)
def test_fails_with_a_reason(hub: Any, attempt: str, message: str) -> None:
    assert message in hub[1][attempt]


def test_offline_from_the_cache(hub: Any) -> None:
    assert hub[2]["by id"] == "hf-specdec"
    assert hub[2]["pickled"] == "eagle3"
    assert "No head was found at 'org/nothing'" in hub[2]["never loaded"]


def test_a_pushed_repository_is_complete(hub: Any) -> None:
    repository = hub[0].repositories["org/mine"]
    files = repository.commits[repository.branches["main"]]
    assert {"config.json", "model.safetensors", "README.md", "custom_generate/generate.py"} <= files.keys()
    card = files["README.md"].decode()
    assert card.startswith("---\n")
    for line in ("library_name: hf-specdec", "base_model: org/target", "- speculative-decoding", "| all | 2.5 |",
                 'custom_generate="org/mine"'):  # fmt: skip
        assert line in card
    assert len(hub[1]["push in shards"]) > 1
    carded = hub[0].repositories["org/carded"]
    assert carded.commits[carded.branches["main"]]["README.md"] == b"written by hand"
