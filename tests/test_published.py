"""Published heads are found by name and base model; nothing is claimed about files that were not read."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from hf_specdec.checkpoints import hub
from hf_specdec.checkpoints.hub import PublishedHead, find_heads
from hf_specdec.cli import heads as command
from hf_specdec.errors import CheckpointFormatError, InvalidConfigError

TARGET = "org/Model-8B"


class Hub:
    """A Hub with a few repositories; `HfApi` of this process."""

    endpoint = "https://hub.test"
    tagged: ClassVar = {"yuhuili/EAGLE3-Model-8B": 900, "org/Model-8B-GGUF": 9000, "other/medusa-for-it": 5}
    named: ClassVar = {"yuhuili/EAGLE3-Model-8B": 900, "z-lab/Model-8B-DFlash": 1200, "amd/PARD-Model-8B": None}

    def list_models(self, *, limit: int, sort: str, filter: str = "", search: str = "") -> list[Any]:
        assert (limit, sort) == (hub.MAX_FOUND, "downloads")
        found = {f"base_model:{TARGET}": self.tagged}.get(filter, {}) | {"Model-8B": self.named}.get(search, {})
        return [SimpleNamespace(id=name, downloads=downloads) for name, downloads in found.items()]


class NoHub(Hub):
    def list_models(self, **_options: Any) -> list[Any]:
        raise RuntimeError("Connection refused")


def test_heads_are_found_by_tag_and_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "HfApi", Hub)
    assert find_heads(TARGET) == [
        PublishedHead("z-lab/Model-8B-DFlash", "dflash", 1200), PublishedHead("yuhuili/EAGLE3-Model-8B", "eagle", 900),
        PublishedHead("other/medusa-for-it", "medusa", 5), PublishedHead("amd/PARD-Model-8B", "pard", 0),
    ]  # fmt: skip
    assert find_heads("org/another") == []


@pytest.mark.parametrize("target", ["", "a/b/c", "org/..", "/home/me/model"])
def test_invalid_ids(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "HfApi", NoHub)  # refused before anything is sent
    with pytest.raises(InvalidConfigError, match="is not a Hub id"):
        find_heads(target)


def test_without_a_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "HfApi", NoHub)
    with pytest.raises(CheckpointFormatError, match=r"hub\.test cannot be searched: Connection refused"):
        find_heads(TARGET)


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    monkeypatch.setattr(hub, "HfApi", Hub)
    command.find(TARGET)
    told = capsys.readouterr().out
    assert "z-lab/Model-8B-DFlash" in told
    assert "hf-specdec inspect z-lab/Model-8B-DFlash" in told.replace("\n", " ")
    command.find(TARGET, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert (found["model"], found["heads"][0]["method"]) == (TARGET, "dflash")
    command.find("org/another")
    assert "Train one" in capsys.readouterr().out
    command.find()
    told = capsys.readouterr().out
    assert "smollm2-135m-instruct-eagle3" in told
    assert "hf-specdec generate --method eagle 'Why" in told
    command.find(as_json=True)
    ours = {head["path"]: head["method"] for head in json.loads(capsys.readouterr().out)["heads"]}
    folder = command.SHIPPED_HEAD.parent
    assert set(ours) == set(map(str, folder.glob("smollm2-*")))
    assert ours[str(folder / "smollm2-135m-instruct-dflash")] == "dflash"
    monkeypatch.setattr(command, "SHIPPED_HEAD", tmp_path / "heads" / "smollm2-135m-instruct-eagle3")
    command.find()
    assert "git clone --depth 1 https://github.com/hf-specdec" in capsys.readouterr().out
