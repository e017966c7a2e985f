"""Block heads in the code of their authors: drafts, trees, accepted tokens and answers of heads that it saved.

python -m venv /tmp/speculators && /tmp/speculators/bin/pip install torch==2.13.0 speculators
git clone https://github.com/z-lab/dflash /tmp/orig/dflash
git clone https://github.com/hao-ai-lab/JetSpec /tmp/orig/jetspec
git clone https://github.com/deepseek-ai/DeepSpec /tmp/orig/deepspec
SPECULATORS_PYTHON=/tmp/speculators/bin/python BLOCK_REPOSITORIES=/tmp/orig make test

The scripts in `tests/engines` run in the first environment, whose transformers all four support; see
`block_engines.py` for the comparison. Each script trains its heads for a few steps, so that some drafts are accepted.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import zoo
from block_engines import attached, compare_drafts, compare_speculators
from test_engines import PYTHON, run_script

REPOSITORIES = os.environ.get("BLOCK_REPOSITORIES")
NEEDED = PYTHON is None or REPOSITORIES is None
REASON = "SPECULATORS_PYTHON and BLOCK_REPOSITORIES name no Python with speculators and no checkouts"


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


@pytest.mark.slow
@pytest.mark.skipif(NEEDED, reason=REASON)
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


@pytest.mark.slow
@pytest.mark.skipif(NEEDED, reason=REASON)
def test_heads_of_speculators_compute_the_same(tmp_path: Path) -> None:
    folder = made_target(tmp_path / "target")
    run_script("speculators_blocks.py", folder, tmp_path / "out")
    target = attached(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    with torch.no_grad():
        assert compare_speculators(tmp_path / "out", target) == 18
