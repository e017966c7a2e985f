"""Heads on disk: a round trip, and every way a directory can be no head."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import zoo
from hf_specdec import (
    AutoSpeculativeModelForCausalLM,
    CheckpointFormatError,
    Eagle3Config,
    Eagle3Head,
    EagleConfig,
    EagleHead,
    InvalidConfigError,
    MedusaConfig,
    MedusaHeads,
    SpeculativeGenerationMixin,
    load_head,
)
from hf_specdec.drafters.checked import TRIAL_TOKENS, try_drafter
from hf_specdec.generation import auto
from reference import OracleDrafter


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
        (lambda t: t.update(d2t=torch.zeros(8, dtype=torch.long) - 1), "distinct target ids"),
        (lambda t: t.update(d2t=torch.arange(8) * 100), "distinct target ids"),
        (lambda t: t.update(d2t=-torch.arange(8)), "distinct target ids"),
    ],
)
def test_every_tensor_is_accounted_for(folder: Path, change: Any, message: str) -> None:
    edit_tensors(folder, change)
    with pytest.raises(CheckpointFormatError, match=message):
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


@pytest.mark.slow
def test_hostile_checkpoints() -> None:
    """Four hundred broken and attacking checkpoints, in a process of their own: a clear error each, no code run."""
    script = Path(__file__).parent / "hostile.py"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, script, "--count", "400"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout)
    assert sum(report["kinds"].values()) == 400
    assert len(report["kinds"]) == 24
    assert report["wrong"] == []
    assert report["code_ran"] is False
    assert report["megabytes_gained"] < 200


def test_a_name_that_is_neither_directory_nor_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointFormatError, match="not a local directory"):
        load_head("nobody/nothing")
    with pytest.raises(CheckpointFormatError, match="not a local directory"):
        load_head("not a repository name")


def test_counts_are_not_believed(folder: Path) -> None:
    """A loop as long as a configuration says would not end."""
    heads = MedusaHeads(MedusaConfig(32, 96))
    heads.save_pretrained(folder / "medusa")
    three = Eagle3Head(Eagle3Config.for_target(zoo.build("llama").config, fc_norm=True))
    three.save_pretrained(folder / "three")
    for name, fields, message in (
        ("medusa", {"medusa_num_heads": 10**12}, "from 1 to 128"),
        ("medusa", {"medusa_num_layers": 10**12}, "from 1 to 128"),
        ("medusa", {"medusa_num_heads": 100}, "more layers or heads than"),
        ("three", {"eagle_aux_hidden_state_layer_ids": list(range(10**5))}, "a list of 1 to 128"),
        ("three", {"eagle_aux_hidden_state_layer_ids": list(range(100))}, "more layers or heads than"),
    ):
        shutil.copytree(folder / name, folder / "copy", dirs_exist_ok=True)
        edit_config(folder / "copy", **fields)
        with pytest.raises(CheckpointFormatError, match=message):
            load_head(folder / "copy")


def test_frequent_tokens_become_the_draft_vocabulary(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """FR-Spec's lists hold absolute ids, most frequent first."""
    model = SpeculativeGenerationMixin.attach(zoo.build("llama"))
    path = tmp_path_factory.mktemp("fr") / "freq_8.pt"
    head = EagleHead(EagleConfig.for_target(model.config))
    head.save_pretrained(folder / "whole")
    torch.save([40, 3, 17, 90, 5, 33], path)
    loaded = load_head(folder / "whole", hot_tokens=path)
    assert loaded.hot_token_ids.tolist() == [3, 5, 17, 33, 40, 90]
    torch.save(torch.tensor([40, 3, 17, 90, 5, 33]), path)
    assert load_head(folder / "whole", hot_tokens=path).hot_token_ids.tolist() == [3, 5, 17, 33, 40, 90]
    loaded.save_pretrained(folder / "hot")
    assert load_head(folder / "hot").hot_token_ids.tolist() == [3, 5, 17, 33, 40, 90]
    drafter = model.load_drafter(folder / "whole", hot_tokens=path)
    ids = torch.arange(4, 11)[None]
    plain = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12)
    drafted = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, speculative="eagle")
    assert torch.equal(drafted, plain)
    assert drafter.head.config.draft_vocab_size == 6
    SpeculativeGenerationMixin.detach(model)
    for content, error in (([1, 1], CheckpointFormatError), ([], CheckpointFormatError), ([-1], CheckpointFormatError),
                           (["a"], CheckpointFormatError), ({"a": 1}, CheckpointFormatError),
                           (torch.tensor([[1, 2]]), CheckpointFormatError),
                           ([1, 96], InvalidConfigError)):  # fmt: skip
        torch.save(content, path)
        with pytest.raises(error):
            load_head(folder / "whole", hot_tokens=path)
    own = Eagle3Head(Eagle3Config.for_target(model.config, draft_vocab_size=8))
    for wrong in (torch.arange(89, 97), torch.arange(8) - 1, torch.arange(8).flip(0), torch.arange(7), torch.zeros(8)):
        with pytest.raises(InvalidConfigError, match=r"ids from 0 to 95|is 8, got 7"):
            own.set_hot_token_ids(wrong)
    own.set_hot_token_ids(torch.arange(8))
    own.save_pretrained(folder / "three")
    with pytest.raises(InvalidConfigError, match="its own lm_head"):
        load_head(folder / "three", hot_tokens=torch.arange(4))


def test_dtype_and_device(folder: Path) -> None:
    head = load_head(folder, dtype=torch.float32, device="cpu")
    assert head.dtype == torch.float32
    assert head.d2t.dtype == torch.long
    assert load_head(folder.parent, subfolder=folder.name).dtype == torch.bfloat16


@pytest.mark.slow
def test_a_drafter_on_trial(folder: Path, sure_llama: Any) -> None:
    """A random head guesses little of a model that is sure of itself, one that knows the answer all of it."""
    state = torch.random.get_rng_state()
    with pytest.warns(UserWarning, match="probably made for another model"):
        sure_llama.load_drafter(folder, verify=True)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert sure_llama.last_speculation is None
    with pytest.warns(UserWarning, match="predicted 0 of"):
        sure_llama.load_drafter(folder, verify=[torch.arange(3, 9)[None]])
    ids = torch.arange(3, 9)[None]
    answer = sure_llama.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=TRIAL_TOKENS)[:, 6:]
    sure_llama.add_drafter(OracleDrafter(answer, "always", zoo.VOCAB_SIZE))
    assert try_drafter(sure_llama, "oracle", [ids]) > 0.8


def test_a_target_and_its_head_in_one_call(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    target = tmp_path_factory.mktemp("target")
    zoo.build("llama").save_pretrained(target)
    model = AutoSpeculativeModelForCausalLM.from_pretrained(target, drafter=folder)
    assert list(model.drafters) == ["eagle"]
    shutil.copytree(target, folder / "model")
    edit_config(folder, base_model_name_or_path="./model")
    assert list(AutoSpeculativeModelForCausalLM.from_pretrained(folder, dtype=torch.float32).drafters) == ["eagle"]
    assert AutoSpeculativeModelForCausalLM.from_pretrained(target).drafters == {}
    edit_config(folder, base_model_name_or_path=None)
    with pytest.raises(CheckpointFormatError, match="names no target"):
        AutoSpeculativeModelForCausalLM.from_pretrained(folder)
    with pytest.raises(TypeError, match="from_pretrained"):
        AutoSpeculativeModelForCausalLM()


NOT_NAMES = (
    "..", ".", "../model", "/", "/dev/zero", "/dev/null", "/etc", "~", "~/model", "C:\\model", "a/b/c", "./", "./..",
    "./../model", "./a/../../model", ".//dev/zero", "./a\\..\\b", "./\x00", "http://localhost/model",
    "https://huggingface.co/org/model", "file:///etc", "hf://org/model", "org/model@main", "org//model", "/org/model",
    "org/", " ", " org/model", "org/mo del", "org/model\n", "\x00", "org/\x00", "\x1b[2J", "org/model.git", "a--b",
    "org/..", "org/model:x.gguf", "x" * 200, "\u0661/\ud800", 7, True, ["org/model"], {"name": "org/model"},
)  # fmt: skip


@pytest.mark.parametrize("name", NOT_NAMES, ids=lambda name: repr(name)[:24])
def test_a_head_names_a_target_by_its_hub_id_alone(folder: Path, name: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Anything else is refused before the weights, of the head as well, are read or anything is downloaded."""
    edit_config(folder, base_model_name_or_path=name)
    monkeypatch.setattr("hf_specdec.generation.auto.load_head", None)
    with pytest.raises(CheckpointFormatError) as refused:
        AutoSpeculativeModelForCausalLM.from_pretrained(folder)
    text = str(refused.value)
    assert f"The head {folder} names the target" in text
    assert f"Name the target: from_pretrained(target, drafter={str(folder)!r})" in text
    assert len(text) < 700


def test_a_directory_that_a_head_names_is_loaded_for_a_head_of_this_machine_alone(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its path, or by a name that is a Hub id elsewhere and a directory here. Who uploads a head names no path."""
    home = tmp_path_factory.mktemp("home")
    zoo.build("llama").save_pretrained(home / "org" / "model")
    (home / "org" / "empty").mkdir()
    monkeypatch.chdir(home)
    for name in (str(home / "org" / "model"), "org/model"):
        edit_config(folder, base_model_name_or_path=name)
        model = AutoSpeculativeModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        assert list(model.drafters) == ["eagle"]
        with pytest.raises(CheckpointFormatError, match="The head org/head names the target"):
            auto._check_target(name, "org/head", "")
    edit_config(folder, base_model_name_or_path=str(home / "org" / "empty"))
    with pytest.raises(CheckpointFormatError, match="neither a Hub id nor a directory with a model"):
        AutoSpeculativeModelForCausalLM.from_pretrained(folder)


def test_a_link_out_of_the_head_is_not_followed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    target = tmp_path_factory.mktemp("target")
    zoo.build("llama").save_pretrained(target)
    (folder / "model").symlink_to(target)
    edit_config(folder, base_model_name_or_path="./model")
    with pytest.raises(CheckpointFormatError, match=r"names the target '\./model'"):
        AutoSpeculativeModelForCausalLM.from_pretrained(folder)


def test_a_target_that_cannot_be_loaded(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What transformers raises is the cause of our error."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name in ("org/missing", "./missing"):
        edit_config(folder, base_model_name_or_path=name)
        with pytest.raises(
            CheckpointFormatError, match=r"which the head .* names, cannot be loaded.*drafter="
        ) as refused:
            AutoSpeculativeModelForCausalLM.from_pretrained(folder)
        assert isinstance(refused.value.__cause__, OSError | ValueError)
        assert f"{name.removeprefix('./')}'" in str(refused.value)
    (folder / "missing").mkdir()
    (folder / "missing" / "config.json").write_text('{"model_type": "nonsense"}')
    with pytest.raises(CheckpointFormatError, match="cannot be loaded") as refused:
        AutoSpeculativeModelForCausalLM.from_pretrained(folder)
    assert isinstance(refused.value.__cause__, ValueError)
    for named in ("org/missing", str(tmp_path / "nowhere"), "", "..", "http://localhost/x", "/dev/zero"):
        for drafter in (None, folder):
            with pytest.raises(CheckpointFormatError, match="cannot be loaded"):
                AutoSpeculativeModelForCausalLM.from_pretrained(named, drafter=drafter)


@pytest.mark.parametrize(
    ("fields", "message"), [({"uno_mask_token_id": 5}, "is a UNO drafter, .*the whole target"), ({}, "is an adapter")]
)
def test_an_adapter_is_no_head(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", **fields}))
    with pytest.raises(CheckpointFormatError, match=f"{message}.*adapter_config.json.*Use a head of the target"):
        load_head(tmp_path)
