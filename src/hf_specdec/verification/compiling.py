"""Put a model's verify forward into another form, and see that it answers as the model does before it is used."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from hf_specdec.acceptance.paths import Acceptance
from hf_specdec.trees.tree import TokenTree
from hf_specdec.verification.graph_backends import GRAPH_BACKENDS
from hf_specdec.verification.graph_forward import GraphForward
from hf_specdec.verification.model import cache_argument, execution_device, text_config
from hf_specdec.verification.probe import EXACT, MOST_ROUNDED, TargetFacts
from hf_specdec.verification.runners import CaptureError, CompiledForward, ExecutionMode, ModelForward, Runner

CHECKED_TREES = ((-1, 0, 0, 1, 2, 2, 3), (-1,), (-1, 0))
"""Parents of the trees that are verified one after the other in both forms; of each the root and a child are kept."""
CHECKED_PROMPT = 13
"""Tokens of the prompt before them, two of them padding in the second of two rows."""


@torch.no_grad()
def make_runner(model: PreTrainedModel, facts: TargetFacts, layers: frozenset[int], form: ExecutionMode) -> Runner:
    """The model's verify forward in another form.

    Args:
        model: The target; it is left as it is.
        facts: What the probe found.
        layers: Whose hidden states will be wanted.
        form: "compile", a program of inductor's, or "cuda_graph", graphs of the model's own forward. On a device that
            records graphs a program is recorded, too.

    Raises:
        CaptureError: The model's forward cannot take this form, or answers differently in it.
    """
    if reason := why_not(model, facts):
        raise CaptureError(reason)
    device, order = execution_device(model), sorted(layers)
    runner: Runner = CompiledForward.of(model, order) if form == "compile" else ModelForward(model, order)
    if device.type in GRAPH_BACKENDS:
        runner = GraphForward(runner, GRAPH_BACKENDS[device.type](device))
    try:
        for rows in (1, 2):
            _check(model, facts, runner, rows)
    except CaptureError:
        raise
    except Exception as error:  # of any kind: it comes out of a model's own code, or there is no memory for both
        raise CaptureError(f"it fails in this form ({type(error).__name__}: {error})") from error
    return runner


def why_not(model: PreTrainedModel, facts: TargetFacts) -> str:
    """What is known to rule out a program before anything is tried; empty where nothing is."""
    if not facts.supports_trees:
        return f"it verifies chains only: {facts.chain_only_reason}"
    if not facts.uses_packed_attention:
        return "its layers do not take an attention function by name"
    if facts.fingerprint.hooks:
        return "it has forward hooks, which a program would not call"
    if model.training:
        return "it is in train mode"
    devices = {parameter.device for parameter in model.parameters()}
    if devices != {execution_device(model)}:
        return f"its weights lie on {', '.join(sorted(map(str, devices)))}"
    if getattr(model, "hf_quantizer", None) is not None and not model.hf_quantizer.is_compileable:
        return "transformers calls its quantisation not compileable"
    compiled = next((name or "it" for name, module in model.named_modules() if _is_compiled(module)), None)
    if compiled is not None:
        return f"{compiled} is compiled by torch.compile already"
    return ""


def _is_compiled(module: nn.Module) -> bool:
    """Whether a module runs by torch.compile: it may compile, and read the device, at any call."""
    forward = getattr(module.forward, "__func__", module.forward)
    return module._compiled_call_impl is not None or hasattr(forward, "_torchdynamo_orig_callable")


def _check(model: PreTrainedModel, facts: TargetFacts, program: Runner, rows: int) -> None:
    """Verify the same trees both ways, behind texts of several lengths.

    Raises:
        CaptureError: The answers differ by more than rounding.
    """
    tolerance = EXACT if model.dtype in (torch.float32, torch.float64) else MOST_ROUNDED
    found = [_verified(model, facts, runner, rows, program.layers) for runner in (None, program)]
    for plain, compiled in zip(*found, strict=True):
        distance = (compiled - plain).norm(dim=-1) / plain.norm(dim=-1).clamp(min=1e-6)
        if not float(distance.median()) <= tolerance:
            raise CaptureError(f"it differs from the model's own forward by {float(distance.median()):.1e}")


def _verified(
    model: PreTrainedModel, facts: TargetFacts, runner: Runner | None, rows: int, layers: frozenset[int]
) -> list[Tensor]:
    """Logits `[B, N, V]` of the trees, and hidden states `[B, N, len(layers) * D]` where any are wanted."""
    device, vocab_size = execution_device(model), int(text_config(model).vocab_size)
    widest = max(map(len, CHECKED_TREES))
    target = facts.new_target(model, CHECKED_PROMPT + widest + 2 * len(CHECKED_TREES), widest, runner=runner)
    tokens = ((torch.arange(rows * (CHECKED_PROMPT + widest), device=device) * 7 + 3) % vocab_size).view(rows, -1)
    prompt = tokens[:, :CHECKED_PROMPT]
    mask = torch.ones_like(prompt)
    mask[1:, :2] = 0
    inputs: dict[str, Any] = {"attention_mask": mask, "use_cache": True, cache_argument(model): target.cache}
    inputs["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    found: list[Tensor] = []
    with target.tapped(sorted(layers)), model._optimize_model_for_decode():
        target.prefill(prompt, GenerationConfig(), inputs)
        for parents in CHECKED_TREES:
            nodes = tokens[:, CHECKED_PROMPT : CHECKED_PROMPT + len(parents)]
            tree = TokenTree(nodes, torch.tensor(parents, dtype=torch.long, device=device))
            verification = target.verify(tree)
            found.append(verification.logits.float())
            if verification.features is not None:
                found.append(verification.features.of(sorted(layers)).float())
            kept = min(2, len(parents))
            path = torch.arange(kept, device=device).expand(rows, -1)
            host = (tuple(range(kept)),) * rows
            drafted = (len(parents) - 1,) * rows
            target.commit(tree, Acceptance(path, nodes[:, :kept], nodes[:, kept - 1], host, host, drafted))
    return found
