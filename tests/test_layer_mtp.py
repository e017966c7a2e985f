"""MTP modules that transformers drops: read from the target's own files, compared with a reference, drafted with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import errors as hub_errors
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import layer_mtp
from hf_specdec import (
    CheckpointFormatError,
    DrafterMismatchError,
    HeadTensorsError,
    SpeculativeGenerationMixin,
    load_head,
)
from hf_specdec.checkpoints import mtp_layouts as checkpoint_files
from hf_specdec.drafters.mtp import MtpDrafter
from hf_specdec.errors import UnsupportedModelError
from layer_mtp import loaded


@torch.no_grad()
def three_steps(head: Any, model: Any, tokens: Tensor, hidden: Tensor) -> list[Tensor]:
    logits = []
    for step in range(3):
        read = tokens[None, : len(hidden)]
        output = head(model.get_input_embeddings()(read), hidden[None], torch.arange(len(hidden))[None])[0]
        logits.append(head.score(output if step == 0 else output[-1:], model.get_output_embeddings()))
        hidden = torch.cat([hidden, output[-1:]])
    return logits


def assert_as_reference(head: Any, model: Any, tensors: dict[str, Tensor]) -> None:
    draw = torch.Generator().manual_seed(2)
    tokens, hidden = torch.randint(2, 96, (9,), generator=draw), torch.randn(7, 32, generator=draw)
    theirs = layer_mtp.reference(tensors, model.config, model, tokens, hidden)
    for ours, expected in zip(three_steps(head, model, tokens, hidden), theirs, strict=True):
        torch.testing.assert_close(ours, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("kind", layer_mtp.KINDS)
@pytest.mark.parametrize("shards", [False, True])
def test_reads_the_tensors_that_transformers_drops(kind: str, shards: bool, tmp_path: Path) -> None:
    tensors = layer_mtp.save(kind, tmp_path, hybrid=True, shards=shards)
    model = loaded(tmp_path)
    assert not any("mtp" in name for name in model.state_dict())
    drafter: Any = MtpDrafter.native(model)
    assert_as_reference(drafter.head, model, tensors)


def test_experts_stored_as_one_tensor(tmp_path: Path) -> None:
    single = layer_mtp.save("qwen3_next", tmp_path / "single")
    drafter: Any = MtpDrafter.native(loaded(tmp_path / "single"))
    joined = {name: t for name, t in single.items() if ".experts." not in name}
    state = drafter.head.state_dict()
    for part in ("gate_up_proj", "down_proj"):
        joined[f"mtp.layers.0.mlp.experts.{part}"] = state[f"module.mtp_block.mlp.experts.{part}"]
    stored = {
        n: t
        for n, t in load_file(tmp_path / "single" / "model.safetensors").items()
        if ".experts." not in n or "mtp" not in n
    }
    save_file({**stored, **joined}, tmp_path / "single" / "model.safetensors", metadata={"format": "pt"})
    model = loaded(tmp_path / "single")
    again: Any = MtpDrafter.native(model)
    assert_as_reference(again.head, model, single)


@pytest.mark.slow
@pytest.mark.parametrize("kind", layer_mtp.KINDS)
def test_drafts_chains_and_trees_in_batches(kind: str, tmp_path: Path) -> None:
    layer_mtp.save(kind, tmp_path)
    model = loaded(tmp_path)
    ids = torch.randint(2, 96, (3, 9), generator=torch.Generator().manual_seed(4))
    mask = torch.ones_like(ids)
    mask[0, :4] = mask[2, :1] = 0
    plain = model.generate(ids, attention_mask=mask, max_new_tokens=24, do_sample=False)
    for how in ({}, {"top_k": 2, "num_draft_tokens": 10}, {"num_steps": 5}, {"tree": [(0,), (1,), (0, 0), (1, 0)]}):
        output = model.generate(
            ids, attention_mask=mask, max_new_tokens=24, do_sample=False, return_dict_in_generate=True,
            speculative={"method": "mtp", **how},
        )  # fmt: skip
        assert torch.equal(output.sequences, plain)
        assert max(len(row) for row in output.speculation.accepted_per_step) > 2
    one = model.generate(ids[1:2], max_new_tokens=24, do_sample=False, speculative="mtp")
    assert torch.equal(one, plain[1:2])
    assert torch.equal(
        model.generate(ids, attention_mask=mask, max_new_tokens=24, do_sample=False, speculative="auto"), plain
    )


def test_a_target_with_linear_attention_verifies_chains(tmp_path: Path) -> None:
    layer_mtp.save("qwen3_next", tmp_path, hybrid=True)
    model = loaded(tmp_path)
    ids = torch.randint(2, 96, (2, 8), generator=torch.Generator().manual_seed(4))
    plain = model.generate(ids, max_new_tokens=16, do_sample=False)
    assert torch.equal(model.generate(ids, max_new_tokens=16, do_sample=False, speculative="mtp"), plain)


@pytest.mark.parametrize("kind", layer_mtp.KINDS)
def test_the_same_module_as_speculators_stores_it(kind: str, tmp_path: Path) -> None:
    layer_mtp.save(kind, tmp_path / "target")
    tensors = layer_mtp.speculators_checkpoint(kind, tmp_path / "head")
    head: Any = load_head(tmp_path / "head")
    assert (head.layout, head.config.base_model_name_or_path) == ("speculators-mtp", "org/verifier")
    model = loaded(tmp_path / "target")
    assert_as_reference(head, model, tensors)
    model.load_drafter(tmp_path / "head")
    ids = torch.randint(2, 96, (2, 8), generator=torch.Generator().manual_seed(4))
    plain = model.generate(ids, max_new_tokens=12, do_sample=False)
    assert torch.equal(model.generate(ids, max_new_tokens=12, do_sample=False, speculative="mtp"), plain)
    with pytest.raises(CheckpointFormatError, match="cannot be saved"):
        head.save_pretrained(tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda t: {k: v for k, v in t.items() if k != "mtp.norm.weight"}, HeadTensorsError,
         "missing tensors: post_norm.weight"),
        (lambda t: {**t, "mtp.extra.weight": torch.zeros(2)}, HeadTensorsError, "unknown tensors: mtp.extra.weight"),
        (lambda t: {**t, "mtp.fc.weight": torch.zeros(32, 32)}, HeadTensorsError, "wrong shapes: mtp.fc.weight"),
        (lambda t: {**t, "mtp.layers.1.input_layernorm.weight": torch.zeros(32)}, UnsupportedModelError,
         "several MTP layers"),
        (lambda t: {k: v for k, v in t.items() if not k.startswith("mtp.")}, DrafterMismatchError,
         "has no MTP module"),
        (lambda t: {**t, "mtp.fc.weight": t["mtp.fc.weight"].to(torch.float8_e4m3fn)}, CheckpointFormatError,
         "mtp.fc.weight is torch.float8"),
    ],
)  # fmt: skip
def test_modules_that_cannot_be_read(change: Any, error: Any, message: str, tmp_path: Path) -> None:
    layer_mtp.save("qwen3_5_text", tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    model = loaded(tmp_path)
    ids = torch.arange(3, 9)[None]
    with pytest.raises(error, match=message):
        model.generate(ids, max_new_tokens=4, speculative="mtp")


def test_a_model_that_was_not_loaded(tmp_path: Path) -> None:
    config = layer_mtp.config_of("qwen3_5_text", hybrid=False)
    model = SpeculativeGenerationMixin.attach(AutoModelForCausalLM.from_config(config))
    with pytest.raises(DrafterMismatchError, match="was not loaded from a checkpoint"):
        model.generate(torch.arange(3, 9)[None], max_new_tokens=4, speculative="mtp")


def test_a_config_that_counts_no_modules(tmp_path: Path) -> None:
    layer_mtp.save("qwen3_5_text", tmp_path)
    model = loaded(tmp_path)
    model.config.mtp_num_hidden_layers = 0
    with pytest.raises(DrafterMismatchError, match="mtp_num_hidden_layers is 0"):
        model.generate(torch.arange(3, 9)[None], max_new_tokens=4, speculative="mtp")


def test_a_config_cannot_swap_the_inputs(tmp_path: Path) -> None:
    tensors = layer_mtp.speculators_checkpoint("qwen3_next", tmp_path / "head")
    layer_mtp.save("qwen3_next", tmp_path / "target")
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    config["transformer_layer_config"]["mtp_hidden_states_first"] = True
    (tmp_path / "head" / "config.json").write_text(json.dumps(config))
    assert_as_reference(load_head(tmp_path / "head"), loaded(tmp_path / "target"), tensors)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_parameters": {"partial_rotary_factor": 1e9}}, "rope_parameters"),
        ({"rope_parameters": {"rope_theta": "x"}}, "rope_parameters"),
        ({"head_dim": 2**40}, "head_dim"),
        ({"num_experts": 10**9}, "num_experts"),
        ({"hidden_act": "org/kernel"}, "hidden_act"),
        ({"vocab_size": None}, "config is invalid|wrong shapes"),
    ],
)
def test_untrusted_layer_configs(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    layer_mtp.speculators_checkpoint("qwen3_next", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["transformer_layer_config"] |= change
    (tmp_path / "config.json").write_text(json.dumps(config))
    if change == {"vocab_size": None}:
        load_head(tmp_path)  # the default; checked against the target
        return
    with pytest.raises((CheckpointFormatError, HeadTensorsError), match=message):
        load_head(tmp_path)


@pytest.mark.parametrize("value", ["x", [1], {"verifier": "x"}, {"verifier": {"name_or_path": 7}}])
def test_untrusted_verifiers(value: Any, tmp_path: Path) -> None:
    layer_mtp.speculators_checkpoint("qwen3_5_text", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "speculators_config": value}))
    if value == {"verifier": {"name_or_path": 7}}:
        with pytest.raises(CheckpointFormatError, match="name_or_path must be"):
            load_head(tmp_path)
    else:
        assert load_head(tmp_path).config.base_model_name_or_path is None


def test_files_of_the_hub_come_from_the_cache_and_errors_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = tmp_path / "model.safetensors"

    def download(name: str, file: str, *, local_files_only: bool = False, **kwargs: Any) -> str:
        if file == "cached":
            assert local_files_only
            return str(cached)
        if local_files_only:
            raise hub_errors.LocalEntryNotFoundError("not cached")
        if file == "absent":
            raise hub_errors.EntryNotFoundError("404")
        if file == "refused":
            raise OSError("disk full")
        return str(cached)

    monkeypatch.setattr("hf_specdec.checkpoints.mtp_layouts.hf_hub_download", download)
    find = checkpoint_files._find
    assert find("org/model", "cached", None) == find("org/model", "online", None) == cached
    assert find("org/model", "absent", None) is None
    with pytest.raises(DrafterMismatchError, match=r"refused of org/model, .* cannot be read: disk full"):
        find("org/model", "refused", None)


def test_an_index_that_names_other_places(tmp_path: Path) -> None:
    layer_mtp.save("qwen3_5_text", tmp_path, shards=True)
    model = loaded(tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    index["weight_map"]["mtp.fc.weight"] = "../model.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointFormatError, match="expected a weight file in its directory"):
        model.generate(torch.arange(3, 9)[None], max_new_tokens=4, speculative="mtp")
