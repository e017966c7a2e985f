"""Fused small operations: put in wherever a pattern is found, without changing a rounding step of the model.

Here, operations are their references and "graphs" are plain calls; `interpreted_fusion.py` has the Triton kernels, and
`graphs_on_simulated_device.py` real captures.
"""

from __future__ import annotations

import copy
import logging
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

import zoo
from hf_specdec import SpeculativeGenerationMixin
from hf_specdec.cpu import operations
from hf_specdec.fusion import fused
from hf_specdec.generation import model_programs
from hf_specdec.generation.state import current_facts
from hf_specdec.transformers_private import decode_optimizations
from hf_specdec.trees.tree import TokenTree
from hf_specdec.verification import programs
from hf_specdec.verification.captured import GraphForward
from hf_specdec.verification.graph_backends import GRAPH_BACKENDS
from hf_specdec.verification.runners import CompiledForward, ModelForward
from hf_specdec.verification.trials import first_inputs
from models import prompts

TESTS = Path(__file__).parent
LOOKUP = {"method": "prompt_lookup", "compile": "cuda_graph"}


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Counter[str]]]:
    """The CPU takes part: forwards are fused and "captured" there. What was put in, program by program."""
    noted: list[Counter[str]] = []
    own = programs.fuse_operations

    def fuse(*arguments: Any) -> Counter[str]:
        noted.append(own(*arguments))
        return noted[-1]

    monkeypatch.setattr(programs, "fuse_operations", fuse)
    monkeypatch.setattr(operations, "can_attend", lambda *_: False)  # attention as in the model's own forward
    monkeypatch.setitem(GRAPH_BACKENDS, "cpu", lambda _device: SimpleNamespace(capture=lambda run: run))
    fused.FUSING_DEVICES.add("cpu")
    yield noted
    fused.FUSING_DEVICES.remove("cpu")


def attached(name: str, dtype: torch.dtype = torch.float32) -> Any:
    return SpeculativeGenerationMixin.attach(copy.deepcopy(zoo.build(name)).to(dtype))


def verified(model: Any, runner: Any, tree: TokenTree) -> list[torch.Tensor]:
    """Logits and the hidden states after layer 1 for a tree after two rows of text, one of them padded."""
    rows, count = tree.tokens.shape
    target: Any = current_facts(model).new_target(model, 64, count, runner=runner)
    ids, mask = prompts(rows)
    with torch.no_grad(), target.tapped([1]), decode_optimizations(model):
        target.prefill(ids, GenerationConfig(), first_inputs(model, mask, target.cache))
        found = target.verify(tree)
    return [found.logits, found.features.of([1])]


def per_layer(norms: int, added: int, gates: int, rotated: int = 1, rotary: int = 0) -> dict[str, int]:
    return {"rms_norm": norms, "add_rms_norm": added, "gated": gates, "rotated_attention": rotated, "rotary": rotary}


PATTERNS: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    "llama": (per_layer(0, 2, 1), {"rms_norm": 1}),
    "qwen3": (per_layer(2, 2, 1), {"rms_norm": 1}),
    "gemma3_text": (per_layer(4, 2, 1), {"rms_norm": 1}),
    "granite": (per_layer(0, 2, 1), {"rms_norm": 1}),
    "qwen3_moe": (per_layer(2, 2, 1), {"rms_norm": 1}),
    "phi3": (per_layer(0, 2, 1, 0, 2), {"rms_norm": 1}),
    "glm": (per_layer(0, 2, 1, 0), {"rms_norm": 1}),
    "olmo2": (per_layer(4, 0, 1, 0), {"add_rms_norm": 1}),
    "phi": (per_layer(0, 0, 0, 0, 2), {}),
    "cohere": (per_layer(0, 0, 1, 0), {}),
}
"""Operations put in for each of 4 layers, and besides: the first norm has no addition before it."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", PATTERNS)
def test_patterns_are_found_and_no_rounding_step_changes(
    name: str, dtype: torch.dtype, found: list[Counter[str]]
) -> None:
    """Results are those of the model's own forward to the bit, for one node and for trees of any width."""
    model = attached(name, dtype)
    with torch.no_grad():
        fused_runner = model_programs.make_runner(model, current_facts(model), frozenset({1}), "cuda_graph")
    assert type(fused_runner._inner) is CompiledForward
    of_layers, besides = PATTERNS[name]
    assert found == [Counter({kind: 4 * count for kind, count in of_layers.items() if count}) + Counter(besides)]
    own = GraphForward(ModelForward(model, [1]), GRAPH_BACKENDS["cpu"](model.device))
    for rows, parents in ((2, [-1, 0, 0, 1, 2, 2, 3]), (1, [-1]), (3, [-1, 0, 1])):
        tokens = torch.arange(rows * len(parents)).view(rows, -1) % 90
        tree = TokenTree(tokens, torch.tensor(parents))
        for one, other in zip(*(verified(model, runner, tree) for runner in (own, fused_runner)), strict=True):
            assert torch.equal(one, other), (rows, parents)
