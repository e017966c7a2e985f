"""Fusing on the CPU, for tests: "graphs" are plain calls there."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

import zoo
from hf_specdec import SpeculativeGenerationMixin
from hf_specdec.cpu import operations
from hf_specdec.fusion.fused import FUSING_DEVICES
from hf_specdec.generation import model_programs
from hf_specdec.generation.state import current_facts
from hf_specdec.trees.tree import TokenTree
from hf_specdec.verification import programs
from hf_specdec.verification.captured import GraphForward
from hf_specdec.verification.graph_backends import GRAPH_BACKENDS, GraphBackend
from hf_specdec.verification.runners import ModelForward
from hf_specdec.verification.trials import first_inputs
from models import prompts


class RunsAgain(GraphBackend):
    """A replay is the function itself."""

    total_bytes = 2**30

    def _capture(self, run: Callable[[], None]) -> Callable[[], None]:
        return run


@contextmanager
def fusing() -> Iterator[list[Counter[str]]]:
    """Forwards are fused and "captured" on the CPU; yields what was put in, program by program."""
    noted: list[Counter[str]] = []
    own = programs.fuse_operations

    def fuse(*arguments: Any) -> Counter[str]:
        noted.append(own(*arguments))
        return noted[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "fuse_operations", fuse)
        patch.setattr(operations, "can_attend", lambda *_: False)  # attention as in the model's own forward
        patch.setitem(GRAPH_BACKENDS, "cpu", RunsAgain)
        FUSING_DEVICES.add("cpu")
        try:
            yield noted
        finally:
            FUSING_DEVICES.remove("cpu")


def attached(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """A model of two layers."""
    return SpeculativeGenerationMixin.attach(copy.deepcopy(zoo.shallow(name, 2)).to(dtype))


@torch.no_grad()
def runners_of(model: Any) -> tuple[Any, Any]:
    """The model's own forward and the one that is chosen for graphs, both captured."""
    chosen = model_programs.make_runner(model, current_facts(model), frozenset({1}), "cuda_graph")
    return GraphForward(ModelForward(model, [1]), GRAPH_BACKENDS["cpu"](model.device)), chosen


@torch.no_grad()
def verified(model: Any, runner: Any, rows: int, parents: list[int]) -> list[torch.Tensor]:
    """Logits, and hidden states after layer 1, of a tree after rows of text."""
    tree = TokenTree(torch.arange(rows * len(parents)).view(rows, -1) % 90, torch.tensor(parents))
    target: Any = current_facts(model).new_target(model, 64, len(parents), runner=runner)
    ids, mask = prompts(rows)
    with target.tapped([1]):
        target.prefill(ids, GenerationConfig(), first_inputs(model, mask, target.cache))
        found = target.verify(tree)
    return [found.logits, found.features.of([1])]
