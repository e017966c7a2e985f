"""Compiled and captured forwards of an attached model and its drafters, kept for as long as they are valid.

A program of the model is checked against the model's own forward before it is used.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from hf_specdec.acceptance.accepted import Accepted
from hf_specdec.config import ExecutionMode
from hf_specdec.cpu.library import are_kernels_ready
from hf_specdec.drafters.base import Drafter
from hf_specdec.fusion.fused import FUSING_DEVICES
from hf_specdec.generation.state import KeptProgram, state_of
from hf_specdec.trees.tree import TokenTree
from hf_specdec.verification.captured import CapturedGreedy, GraphForward
from hf_specdec.verification.graph_backends import GRAPH_BACKENDS
from hf_specdec.verification.memory import persistent_tensors
from hf_specdec.verification.model import execution_device, text_config
from hf_specdec.verification.probe import MAX_TOLERANCE, TargetFacts, exact_distance
from hf_specdec.verification.programs import CaptureError, has_kernels, supports_kernels, without_autocast
from hf_specdec.verification.runners import CompiledForward, ModelForward, Runner, WeightsVersion
from hf_specdec.verification.trials import allowed_distance, first_inputs, is_random, rounds_inputs

logger = logging.getLogger(__name__)

MAX_SHARE = 0.2
"""Share of the seconds of all calls so far, this one included, that making a program with CPU kernels may take."""
SAVED_SHARE = 0.4
"""Share of the seconds of a call that the kernels save (at least; 0.5 to 0.65 with 135M and 0.5B)."""
COMPILED_FROM_SECONDS = 2.0
"""Seconds of calls from which the kernels are compiled in the background."""
TRACED_LAYER_SECONDS = 0.09
"""Seconds to trace and rewrite a decoder layer (24 and 30 layers in 2 to 3 s on two server cores)."""
TRIAL_STEPS = 10
"""Plain steps that testing a program costs: a prompt of 26 tokens, trees of 14 and 4, each twice."""

TEST_TREES = ((-1, 0, 0, 1, 2, 2, 3), (-1, 0))
"""Parents of the trees that both forwards verify in turn; after each, its root and first child are kept."""
TEST_PROMPT_LENGTH = 13
"""Number of prompt tokens before the trees; the second of two rows starts with two padding tokens."""

COMPILING = threading.Lock()
"""Lock held while a program (a compiled or captured forward) is looked up or built: other threads wait."""


def current_program(
    model: PreTrainedModel, facts: TargetFacts, layers: frozenset[int], mode: ExecutionMode, *, requested: bool = True,
    required: bool = False,
) -> Runner | None:  # fmt: skip
    """Return the compiled or captured verify forward, created if none exists for the current weights.

    It returns the hidden states of at least these layers, which this call's drafter reads. None if the model cannot be
    compiled or captured: its own forward is used then. This is logged once, as a warning if the user requested this
    mode or without graphs on a GPU. After a failure that does not last, such as too little memory, the next call tries
    again.

    Raises:
        CaptureError: A program is `required`, and there is none.
    """
    state, built_from = state_of(model), (facts.fingerprint, WeightsVersion.of(model))
    with COMPILING:
        if state.drop_outdated(built_from):
            name = type(model).__name__
            logger.info("%s has changed since its forward was compiled; the program is dropped.", name)
        known = state.programs.get(mode)
        if known is not None and (known.runner is None or layers <= known.layers):
            if required and known.runner is None:
                raise CaptureError(known.reason)
            return known.runner
        layers |= {layer for drafter in state.drafters.values() for layer in drafter.needs.feature_layers}
        name, begin = type(model).__name__, time.perf_counter()
        if mode == "inductor":
            logger.info("Compiling the forward of %s; this takes up to a minute, once per process.", name)
        try:
            with without_autocast(execution_device(model)):
                runner = make_runner(model, facts, layers, mode)
            if mode != "cuda_graph":
                seconds = time.perf_counter() - begin
                logger.info("Made a program of the forward of %s (%s) in %.0f s.", name, mode, seconds)
        except CaptureError as error:
            how = "captured" if mode == "cuda_graph" else "compiled"
            if error.is_lasting:
                state.programs[mode] = KeptProgram(built_from, layers, None, str(error))
            if required:
                raise
            # without graphs a GPU idles
            level = logging.WARNING if requested or mode == "cuda_graph" else logging.INFO
            logger.log(level, "%s is not %s: %s. Its own forward is used.", name, how, error)
            return None
        state.programs[mode] = KeptProgram(built_from, layers, runner)
        return runner


def kernels_pay(model: PreTrainedModel, new_tokens: int, *, waits: bool = False) -> bool:
    """Whether to use the CPU kernels, and to make a program with them if there is none.

    Making one takes some seconds, which are estimated from the measured seconds of eager steps. It is made once the
    call itself is expected to save them, or once they are at most `MAX_SHARE` of the seconds of all calls; never in a
    first call, of which nothing is known. The kernels themselves are compiled once per machine, in the background:
    until they are ready, calls go on without them, unless the caller `waits`. The call makes at most `new_tokens`.
    """
    state, device = state_of(model), execution_device(model)
    if not supports_kernels(device, model.dtype):
        return False
    if state.kernels_have_paid or waits:
        state.kernels_have_paid = has_kernels(device, model.dtype)
        return state.kernels_have_paid
    if state.eager_forwards == 0:
        return False
    step = state.eager_step_seconds / state.eager_forwards
    expected = step * min(new_tokens, state.eager_forwards / state.eager_calls)
    making = TRACED_LAYER_SECONDS * text_config(model).num_hidden_layers + TRIAL_STEPS * step
    is_small = making <= max(SAVED_SHARE * expected, MAX_SHARE * (state.eager_seconds + expected))
    if state.eager_seconds + expected >= COMPILED_FROM_SECONDS and are_kernels_ready() and is_small:
        state.kernels_have_paid = has_kernels(device, model.dtype)
    return state.kernels_have_paid


def release_programs(model: Any) -> None:
    """Release all compiled and captured forwards of a model, and the memory kept for them."""
    state = state_of(model)
    with COMPILING:
        state.programs.clear()
        state.spare_programs.clear()
        state.compiled.clear()
        state.rule = None


def captured_rule(model: PreTrainedModel) -> CapturedGreedy:
    """Return the greedy acceptance rule as captured graphs; create it if the model has none."""
    state, device = state_of(model), execution_device(model)
    with COMPILING:
        if state.rule is None:
            state.rule = CapturedGreedy(GRAPH_BACKENDS[device.type](device))
        return state.rule


def compiled_drafter(model: PreTrainedModel, drafter: Drafter, mode: ExecutionMode) -> Drafter:
    """Return the bound drafter with compiled or captured forwards, built if none exist for the current weights.

    Call `current_program` first, which drops drafters compiled for earlier weights. Parts that cannot be compiled are
    kept unchanged; this is logged once.
    """
    if any(weight.is_meta for weight in model.parameters()):
        return drafter  # offloaded: accelerate would load the fake weights of a trace into the modules that both share
    return drafter.with_parts(lambda part: _compiled_part(model, part, mode))


def _compiled_part(model: PreTrainedModel, drafter: Drafter, mode: ExecutionMode) -> Drafter:
    kept = state_of(model).compiled.setdefault(drafter, {})
    built_from = WeightsVersion.of(*(value for value in vars(drafter).values() if isinstance(value, nn.Module)))
    with COMPILING:
        known = kept.get(mode)
        if known is None or known[0] != built_from:
            try:
                with persistent_tensors(), without_autocast(execution_device(model)):
                    other = drafter.compiled(model, mode)
                    if mode == "kernels":
                        other = other.with_program(functools.partial(make_runner, layers=frozenset(), mode=mode))
            except CaptureError as error:
                logger.warning("%r is not compiled: %s. Its own forward is used.", drafter, error)
                if not error.is_lasting:
                    return drafter
                other = drafter
            known = kept[mode] = built_from, None if other is drafter else other  # a value must not keep its key alive
        return known[1] or drafter


# ------------------------------------------------------------------------------------------- making a program


@torch.no_grad()
def make_runner(model: PreTrainedModel, facts: TargetFacts, layers: frozenset[int], mode: ExecutionMode) -> Runner:
    """Return a compiled or captured verify forward of a model, after checking its outputs against the model's.

    The mode "inductor" compiles the forward, "kernels" runs its traced operations with the CPU kernels, "cuda_graph"
    runs them with fused operations on `FUSING_DEVICES`, or if that fails the model's own forward. Each is captured if
    the device has a graph backend.
    """
    if reason := unsupported_reason(model, facts, mode):
        raise CaptureError(reason)
    device, order = execution_device(model), sorted(layers)
    if mode == "cuda_graph" and device.type in FUSING_DEVICES and _is_compileable(model):
        try:
            return _captured(model, facts, CompiledForward(model, order, mode))
        except CaptureError as error:
            logger.info("The small operations of %s are not fused: %s.", type(model).__name__, error)
    inner: Runner = ModelForward(model, order) if mode == "cuda_graph" else CompiledForward(model, order, mode)
    return _captured(model, facts, inner)


def _captured(model: PreTrainedModel, facts: TargetFacts, inner: Runner) -> Runner:
    """Return a checked runner: the forward as graphs, without masks if that works, if the device has graphs."""
    device = execution_device(model)
    if device.type not in GRAPH_BACKENDS:
        _check(model, facts, inner)
        return inner
    captured = GraphForward(inner, GRAPH_BACKENDS[device.type](device))
    try:
        _check(model, facts, captured)
    except CaptureError as error:
        if captured.has_masks:
            raise
        logger.info("Graphs of %s attend with masks: without them, %s.", type(model).__name__, error)
        captured = GraphForward(inner, GRAPH_BACKENDS[device.type](device), has_masks=True)
        _check(model, facts, captured)
    captured.free()  # the memory was that of the check, of more rows and fewer slots than most calls have
    return captured


def _is_compileable(model: PreTrainedModel) -> bool:
    """Whether transformers marks the model's quantisation, if it has one, as one that can be compiled."""
    quantizer = getattr(model, "hf_quantizer", None)
    return quantizer is None or bool(quantizer.is_compileable)


def unsupported_reason(model: PreTrainedModel, facts: TargetFacts, mode: ExecutionMode) -> str:
    """Return why the forward cannot be compiled or captured, or an empty string if no reason is known.

    The products of any quantisation may be captured: a capture is checked operation by operation and by its replay.
    """
    if not facts.supports_trees:
        return f"it verifies chains only: {facts.chain_only_reason}"
    if facts.unpacked_reason:
        return facts.unpacked_reason
    if facts.fingerprint.hooks:
        return "it has forward hooks, which a compiled forward would not call"
    if facts.uses_autocast and model.dtype in (torch.float32, torch.float64):
        return "its forward enters autocast, which casts the weights"
    device = execution_device(model)
    if any(module.training for module in model.modules()):
        with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type):
            if is_random(model):
                return "its forward is random in train mode (dropout)"
    devices = {parameter.device for parameter in model.parameters()}
    if devices != {device}:
        return f"its weights are on {', '.join(sorted(map(str, devices)))}, not all on the device it runs on"
    if mode == "inductor" and not _is_compileable(model):
        return "its quantisation cannot be compiled, according to transformers"
    for name, module in model.named_modules():  # any call of a compiled module may compile again, and read the device
        forward = getattr(module.forward, "__func__", module.forward)
        if module._compiled_call_impl is not None or hasattr(forward, "_torchdynamo_orig_callable"):
            return f"{name or 'it'} is already compiled by torch.compile"
    return ""


def _check(model: PreTrainedModel, facts: TargetFacts, runner: Runner) -> None:
    try:
        _compare(model, facts, runner)
    except CaptureError:
        raise
    except Exception as error:  # model code raises various types, and memory may not suffice for both forwards
        raise CaptureError(f"checking it against the model failed ({type(error).__name__}: {error})") from error


def _compare(model: PreTrainedModel, facts: TargetFacts, runner: Runner) -> None:
    """Check that the runner's outputs match those of the model's own forward, for `TEST_TREES` after a prompt."""
    exact = exact_distance(text_config(model))
    tolerance = allowed_distance(model.dtype, execution_device(model), exact, MAX_TOLERANCE)
    if rounds_inputs(model):
        tolerance = MAX_TOLERANCE
    device, vocab_size, rows = execution_device(model), int(text_config(model).vocab_size), 2
    widest = max(map(len, TEST_TREES))
    size = TEST_PROMPT_LENGTH + widest
    tokens = ((torch.arange(rows * size, device=device) * 7 + 3) % vocab_size).view(rows, size)
    prompt = tokens[:, :TEST_PROMPT_LENGTH]
    mask = torch.ones_like(prompt)
    mask[1:, :2] = 0
    order = sorted(runner.layers)

    def outputs_of(verification: Any) -> tuple[Tensor, ...]:
        states = () if verification.features is None else (verification.features.of(order).float(),)
        return verification.logits.float(), *states

    def check(found: Sequence[tuple[Tensor, ...]]) -> None:
        for expected, actual in zip(*found, strict=True):
            distance = (actual - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-6)
            if not float(distance.median()) <= tolerance:
                raise CaptureError(f"it differs from the model's own forward by {float(distance.median()):.1e}")

    def read(used: Runner | None) -> Any:
        target: Any = facts.new_target(model, size + 2 * len(TEST_TREES), widest, runner=runner)
        target.runner = used
        with target.tapped(order):
            return target, outputs_of(
                target.prefill(prompt, GenerationConfig(), first_inputs(model, mask, target.cache))
            )

    target, expected = read(None)
    with target.tapped(order):
        for parents in TEST_TREES:
            nodes = tokens[:, TEST_PROMPT_LENGTH : TEST_PROMPT_LENGTH + len(parents)]
            tree = TokenTree(nodes, torch.tensor(parents, dtype=torch.long, device=device))
            outputs = []
            for used in (None, runner):
                target.runner = used
                outputs.append(outputs_of(target.verify(tree)))
                if used is None:
                    target.rollback(len(parents))
            check(outputs)
            path = torch.arange(2, device=device).expand(rows, -1)
            host, drafted = ((0, 1),) * rows, (len(parents) - 1,) * rows
            target.commit(tree, Accepted(path, nodes[:, :2], nodes[:, 1], host, host, drafted))
    if runner.reads_prompts:
        check([expected, read(runner)[1]])
