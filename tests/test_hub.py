"""Heads on disk: a round trip, and every way a directory can be no head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import zoo
from hf_specdec import (
    AutoSpeculativeModelForCausalLM,
    CheckpointFormatError,
    EagleConfig,
    EagleHead,
    load_head,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    head = EagleHead(EagleConfig.for_target(zoo.build("llama").config, draft_vocab_size=8, bias=True))
    head.set_hot_token_ids(torch.arange(0, 80, 10))
    head.to(torch.bfloat16).save_pretrained(tmp_path)
    return tmp_path


def edit_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def edit_tensors(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_round_trip(folder: Path) -> None:
    head = load_head(folder)
    saved = load_file(folder / "model.safetensors")
    assert head.dtype == torch.bfloat16
    assert head.hot_token_ids is not None
    assert head.hot_token_ids.tolist() == list(range(0, 80, 10))
    assert head.state_dict().keys() == saved.keys()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in head.state_dict().items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("fc.weight"), "missing tensors: fc.weight"),
        (lambda t: t.update(stray=torch.zeros(2)), "unknown tensors: stray"),
        (lambda t: t.update({"fc.bias": torch.zeros(3)}), r"wrong shapes: fc.bias \(3,\) instead of \(32,\)"),
        (lambda t: t.update(d2t=torch.zeros(8, dtype=torch.long) - 1), "ascending target ids"),
        (lambda t: t.update(d2t=torch.arange(8) * 100), "ascending target ids"),
        (lambda t: t.update(d2t=-torch.arange(8)), "ascending target ids"),
    ],
)
def test_every_tensor_is_accounted_for(folder: Path, change: Any, message: str) -> None:
    edit_tensors(folder, change)
    with pytest.raises(CheckpointFormatError, match=message):
        load_head(folder)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"model_type": "llama", "num_hidden_layers": 2}, CheckpointFormatError, "num_hidden_layers"),
        ({"hidden_size": 64}, CheckpointFormatError, "wrong shapes"),
        ({"hidden_size": "big"}, CheckpointFormatError, "describes no head"),
        ({"num_attention_heads": 0}, CheckpointFormatError, "num_attention_heads"),
        ({"hidden_act": "nonsense"}, CheckpointFormatError, "describes no head"),
        ({"model_type": "hf_specdec_eagle3"}, CheckpointFormatError, "missing tensors"),
    ],
)
def test_configs_that_describe_no_head(folder: Path, fields: dict[str, Any], error: Any, message: str) -> None:
    edit_config(folder, **fields)
    with pytest.raises(error, match=message):
        load_head(folder)


def test_broken_files(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(CheckpointFormatError, match="cannot be read"):
        load_head(folder)
    (folder / "config.json").write_text("[1, 2")
    with pytest.raises(CheckpointFormatError, match="cannot be read"):
        load_head(folder)
    (folder / "config.json").write_text("[1, 2]")
    with pytest.raises(CheckpointFormatError, match="holds a list"):
        load_head(folder)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointFormatError, match=r"config\.json"):
        load_head(folder)


def test_a_name_that_is_neither_directory_nor_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointFormatError, match="no local directory"):
        load_head("nobody/nothing")
    with pytest.raises(CheckpointFormatError, match="no local directory"):
        load_head("not a repository name")


def test_a_target_and_its_head_in_one_call(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    target = tmp_path_factory.mktemp("target")
    zoo.build("llama").save_pretrained(target)
    model = AutoSpeculativeModelForCausalLM.from_pretrained(target, drafter=folder)
    assert list(model.drafters) == ["eagle"]
    edit_config(folder, base_model_name_or_path=str(target))
    assert list(AutoSpeculativeModelForCausalLM.from_pretrained(folder, dtype=torch.float32).drafters) == ["eagle"]
    assert AutoSpeculativeModelForCausalLM.from_pretrained(target).drafters == {}
    edit_config(folder, base_model_name_or_path=None)
    with pytest.raises(CheckpointFormatError, match="names no target"):
        AutoSpeculativeModelForCausalLM.from_pretrained(folder)
    with pytest.raises(TypeError, match="from_pretrained"):
        AutoSpeculativeModelForCausalLM()
