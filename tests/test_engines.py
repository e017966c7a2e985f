"""Heads in the code of others: logits of exported heads; drafts, trees and answers of heads that their authors saved.

python -m venv /tmp/speculators && /tmp/speculators/bin/pip install torch==2.13.0 speculators
git clone https://github.com/z-lab/dflash /tmp/orig/dflash
git clone https://github.com/hao-ai-lab/JetSpec /tmp/orig/jetspec
git clone https://github.com/deepseek-ai/DeepSpec /tmp/orig/deepspec
SPECULATORS_PYTHON=/tmp/speculators/bin/python BLOCK_REPOSITORIES=/tmp/orig make test

The scripts in `tests/engines` run in the first environment, whose transformers all four support; see
`block_engines.py` for blocks. Each script trains its heads for a few steps, so that some drafts are accepted.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import zoo
from block_engines import PYTHON, attached, compare_drafts, compare_speculators, run_script
from hf_specdec import Eagle3Config, Eagle3Head, export_head, load_head
from hf_specdec.heads.attention import AlignedAttention
from reference import window_of

REPOSITORIES = os.environ.get("BLOCK_REPOSITORIES")
VARIANTS: list[dict[str, Any]] = [
    {},
    {"norm_before_residual": True, "fc_norm": True, "norm_output": True},
    {"norm_before_residual": True, "norm_before_fc": True, "attention_bias": True},
    {"qk_norm": True, "sliding_window": 5},
    {"num_hidden_layers": 2, "norm_before_residual": True, "norm_output": True},
]


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PYTHON is None, reason="SPECULATORS_PYTHON names no Python with speculators"),
]


@pytest.mark.parametrize("fields", VARIANTS, ids=str)
def test_speculators_computes_the_same(fields: dict[str, Any], tmp_path: Path) -> None:
    model = zoo.build("llama")
    model.save_pretrained(tmp_path / "target")
    torch.manual_seed(0)
    config = Eagle3Config.for_target(model.config, draft_vocab_size=24, eagle_aux_hidden_state_layer_ids=[0, 1, 2],
                                     base_model_name_or_path=str(tmp_path / "target"), **fields)  # fmt: skip
    head = Eagle3Head(config).eval()
    head.set_hot_token_ids(torch.arange(0, 96, 4))
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    export_head(head, tmp_path / "head", format="speculators")
    embedding = model.get_input_embeddings().weight.detach()
    features, ids = torch.randn(1, 12, 96), torch.randint(0, zoo.VOCAB_SIZE, (1, 12))
    save_file(
        {"embedding": embedding.clone(), "features": features, "input_ids": ids}, tmp_path / "inputs.safetensors"
    )
    files = (tmp_path / name for name in ("head", "inputs.safetensors", "output.safetensors"))
    run_script("speculators_logits.py", *files)
    with torch.no_grad():
        hidden = head(embedding[ids], head.fuse(features), torch.arange(12)[None], window_of(config.sliding_window))
        torch.testing.assert_close(
            head.score(hidden), load_file(tmp_path / "output.safetensors")["logits_0"], atol=1e-4, rtol=0
        )


def test_heads_that_speculators_saves_compute_the_same(tmp_path: Path) -> None:
    """Forty-eight variants, saved by its own classes, three steps deep."""
    zoo.build("llama").save_pretrained(tmp_path / "target")
    run_script("speculators_heads.py", tmp_path / "target", tmp_path / "out")
    compared = compare_with_speculators(tmp_path / "out")
    assert compared == 48


@torch.no_grad()
def compare_with_speculators(folder: Path) -> int:
    """The number of heads whose logits are those of speculators; at step j, its entry t is ours t + j."""
    given, variants = load_file(folder / "inputs.safetensors"), json.loads((folder / "heads.json").read_text())
    tokens, length = given["input_ids"], given["input_ids"].shape[1]
    positions = torch.arange(length)[None]
    for number, variant in enumerate(variants):
        head = load_head(folder / str(number))
        assert head.layout == "speculators-eagle3"
        assert head.config.num_hidden_layers == variant[-1]
        theirs = load_file(folder / f"{number}.safetensors")
        hidden, attend = head.fuse(given["features"]), AlignedAttention(head.config.num_hidden_layers)
        for step in range(3):
            output = head(given["embedding"][tokens], hidden, positions, attend)
            expected = theirs[f"logits_{step}"][:, : length - step]
            torch.testing.assert_close(head.score(output)[:, step:], expected, atol=2e-4, rtol=1e-4, msg=str(variant))
            hidden = torch.cat([hidden[:, :1], output[:, :-1]], dim=1)
    return len(variants)


@torch.no_grad()
def test_mtp_modules_that_speculators_saves_compute_the_same(tmp_path: Path) -> None:
    zoo.build("llama").save_pretrained(tmp_path / "target")
    run_script("speculators_mtp.py", tmp_path / "target", tmp_path / "out")
    for kind in ("qwen3", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"):
        head, given = load_head(tmp_path / "out" / kind), load_file(tmp_path / "out" / f"{kind}.safetensors")
        expected = given["logits"]
        width = expected.shape[1]
        embeddings = given["embedding"][given["tokens"][:, 1 : 1 + width]]
        output = head(embeddings, given["hidden"][:, :width], torch.arange(width)[None])
        logits = head.score(output, lambda hidden, rows=given["lm_head"]: hidden @ rows.T)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4, msg=kind)


def made_target(folder: Path) -> Path:
    """Save a tiny Qwen3 with four layers, whose answers do not repeat one token."""
    torch.manual_seed(0)
    config = zoo.build("qwen3").config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    return folder


@pytest.mark.skipif(REPOSITORIES is None, reason="BLOCK_REPOSITORIES names no checkouts")
@pytest.mark.parametrize(
    ("script", "repository", "whole_context", "count"),
    [
        ("dflash_heads.py", "dflash", False, 9),
        ("jetspec_heads.py", "jetspec", True, 6),
        ("dspark_heads.py", "deepspec", False, 8),
    ],
)
def test_heads_of_the_authors_draft_the_same(
    script: str, repository: str, whole_context: bool, count: int, tmp_path: Path
) -> None:
    folder = made_target(tmp_path / "target")
    run_script(script, Path(str(REPOSITORIES)) / repository, folder, tmp_path / "out")
    target = attached(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    with torch.no_grad():
        assert compare_drafts(tmp_path / "out", target, whole_context=whole_context) == count


def test_heads_of_speculators_compute_the_same(tmp_path: Path) -> None:
    folder = made_target(tmp_path / "target")
    run_script("speculators_blocks.py", folder, tmp_path / "out")
    target = attached(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    with torch.no_grad():
        assert compare_speculators(tmp_path / "out", target) == 18
