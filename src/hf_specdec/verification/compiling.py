"""Compile or capture a model's verify forward, and check its outputs against the model's before it is used."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel

from hf_specdec.acceptance.accepted import Accepted
from hf_specdec.config import ExecutionMode
from hf_specdec.transformers_private import decode_optimizations
from hf_specdec.trees.tree import TokenTree
from hf_specdec.verification.captured import GraphForward
from hf_specdec.verification.graph_backends import GRAPH_BACKENDS
from hf_specdec.verification.model import execution_device, text_config
from hf_specdec.verification.probe import EXACT, MAX_TOLERANCE, TargetFacts
from hf_specdec.verification.programs import CaptureError
from hf_specdec.verification.runners import CompiledForward, ModelForward, Runner
from hf_specdec.verification.trials import first_inputs, is_random

TEST_TREES = ((-1, 0, 0, 1, 2, 2, 3), (-1, 0))
"""Parents of the trees that both forwards verify in turn; after each, its root and first child are kept."""
TEST_PROMPT_LENGTH = 13
"""Number of prompt tokens before the trees; the second of two rows starts with two padding tokens."""


@torch.no_grad()
def make_runner(model: PreTrainedModel, facts: TargetFacts, layers: frozenset[int], mode: ExecutionMode) -> Runner:
    """Return a compiled or captured verify forward of a model, after checking its outputs against the model's.

    Args:
        model: The target; it is not modified.
        facts: Result of probing the target.
        layers: Layers whose hidden states the runner returns.
        mode: "inductor" compiles the forward, "kernels" runs its traced operations with the CPU kernels, "cuda_graph"
            uses the model's own forward. Each is captured if the device has a graph backend.
    """
    if reason := unsupported_reason(model, facts):
        raise CaptureError(reason)
    device, order = execution_device(model), sorted(layers)
    runner: Runner = ModelForward(model, order) if mode == "cuda_graph" else CompiledForward.of(model, order, mode)
    if device.type in GRAPH_BACKENDS:
        runner = GraphForward(runner, GRAPH_BACKENDS[device.type](device))
    try:
        _check(model, facts, runner)
    except CaptureError:
        raise
    except Exception as error:  # model code raises various types, and memory may not suffice for both forwards
        raise CaptureError(f"checking it against the model failed ({type(error).__name__}: {error})") from error
    return runner


def unsupported_reason(model: PreTrainedModel, facts: TargetFacts) -> str:
    """Return why the forward can be neither compiled nor captured, or an empty string if no reason is known."""
    if not facts.supports_trees:
        return f"it verifies chains only: {facts.chain_only_reason}"
    if facts.unpacked_reason:
        return facts.unpacked_reason
    if facts.fingerprint.hooks:
        return "it has forward hooks, which a compiled forward would not call"
    if facts.uses_autocast and model.dtype in (torch.float32, torch.float64):
        return "its forward enters autocast, which casts the weights"
    if any(module.training for module in model.modules()) and _is_random(model):
        return "its forward is random in train mode (dropout)"
    devices = {parameter.device for parameter in model.parameters()}
    if devices != {execution_device(model)}:
        return f"its weights are on {', '.join(sorted(map(str, devices)))}, not all on the device it runs on"
    if getattr(model, "hf_quantizer", None) is not None and not model.hf_quantizer.is_compileable:
        return "its quantisation cannot be compiled, according to transformers"
    compiled = next((name or "it" for name, module in model.named_modules() if _is_compiled(module)), None)
    if compiled is not None:
        return f"{compiled} is already compiled by torch.compile"
    return ""


def _is_random(model: PreTrainedModel) -> bool:
    """Whether dropout or the like is active; random number generators are restored."""
    device = execution_device(model)
    with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type):
        return is_random(model)


def _is_compiled(module: nn.Module) -> bool:
    """Whether a module is compiled by torch.compile, so that any call may compile again and read from the device."""
    forward = getattr(module.forward, "__func__", module.forward)
    return module._compiled_call_impl is not None or hasattr(forward, "_torchdynamo_orig_callable")


def _check(model: PreTrainedModel, facts: TargetFacts, runner: Runner) -> None:
    """Check that the runner's outputs match those of the model's own forward, for `TEST_TREES` after a prompt."""
    tolerance = EXACT if model.dtype in (torch.float32, torch.float64) else MAX_TOLERANCE
    device, vocab_size, rows = execution_device(model), int(text_config(model).vocab_size), 2
    widest = max(map(len, TEST_TREES))
    size = TEST_PROMPT_LENGTH + widest
    target: Any = facts.new_target(model, size + 2 * len(TEST_TREES), widest, runner=runner)
    tokens = ((torch.arange(rows * size, device=device) * 7 + 3) % vocab_size).view(rows, size)
    prompt = tokens[:, :TEST_PROMPT_LENGTH]
    mask = torch.ones_like(prompt)
    mask[1:, :2] = 0
    order = sorted(runner.layers)
    with target.tapped(order), decode_optimizations(model):
        target.prefill(prompt, GenerationConfig(), first_inputs(model, mask, target.cache))
        for parents in TEST_TREES:
            nodes = tokens[:, TEST_PROMPT_LENGTH : TEST_PROMPT_LENGTH + len(parents)]
            tree = TokenTree(nodes, torch.tensor(parents, dtype=torch.long, device=device))
            outputs = []
            for used in (None, runner):
                target.runner = used
                verification = target.verify(tree)
                states = () if verification.features is None else (verification.features.of(order).float(),)
                outputs.append((verification.logits.float(), *states))
                if used is None:
                    target.rollback(len(parents))
            for expected, actual in zip(*outputs, strict=True):
                distance = (actual - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-6)
                if not float(distance.median()) <= tolerance:
                    raise CaptureError(f"it differs from the model's own forward by {float(distance.median()):.1e}")
            path = torch.arange(2, device=device).expand(rows, -1)
            host, drafted = ((0, 1),) * rows, (len(parents) - 1,) * rows
            target.commit(tree, Accepted(path, nodes[:, :2], nodes[:, 1], host, host, drafted))
