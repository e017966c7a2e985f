"""Compiled and captured forwards of an attached model and its drafters, kept for as long as they are valid."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from hf_specdec.cpu.background import are_kernels_ready
from hf_specdec.drafters.base import Drafter
from hf_specdec.generation.state import KeptProgram, state_of
from hf_specdec.verification.captured_greedy import CapturedGreedy
from hf_specdec.verification.compiling import make_runner
from hf_specdec.verification.graph_backends import GRAPH_BACKENDS
from hf_specdec.verification.memory import persistent_tensors
from hf_specdec.verification.model import execution_device
from hf_specdec.verification.probe import TargetFacts
from hf_specdec.verification.programs import (
    CaptureError,
    ExecutionMode,
    has_kernels,
    supports_kernels,
    without_autocast,
)
from hf_specdec.verification.runners import Runner, WeightsVersion

logger = logging.getLogger(__name__)

PAYS_FROM_BYTES = 20 * 10**9
"""Bytes of weights read by eager forwards (in 2 to 5 s on two cores) from which a program with CPU kernels pays."""

WAITS_FROM_BYTES = 3 * PAYS_FROM_BYTES
"""Bytes from which a call waits for the compiler: while generation keeps all cores busy, the compiler gets no time."""

EXPECTED_FORWARDS = 0.25
"""Forwards per requested token: drafts are accepted, and answers end before the maximum number of new tokens."""

COMPILING = threading.Lock()
"""Lock held while a program (a compiled or captured forward) is looked up or built: other threads wait."""


def current_program(
    model: PreTrainedModel, facts: TargetFacts, layers: frozenset[int], mode: ExecutionMode, *, requested: bool = True
) -> Runner | None:
    """Return the compiled or captured verify forward, created if none exists for the current weights.

    Args:
        model: An attached model.
        facts: The result of the probe.
        layers: Layers whose hidden states this call's drafter reads.
        mode: See `make_runner`.
        requested: Whether the user asked for this mode. A failure is logged as a warning if so or if the mode is
            `"cuda_graph"`, otherwise as info.

    Returns:
        None if the model cannot be compiled or captured, which is logged once; its own forward is used then. After a
        failure that does not last, such as too little memory, the next call tries again.
    """
    state, built_from = state_of(model), (facts.fingerprint, WeightsVersion.of(model))
    with COMPILING:
        if state.drop_outdated(built_from):
            name = type(model).__name__
            logger.info("%s has changed since its forward was compiled; the program is dropped.", name)
        known = state.programs.get(mode)
        if known is not None and known.serves(layers):
            return known.runner
        layers |= {layer for drafter in state.drafters.values() for layer in drafter.needs.feature_layers}
        try:
            runner = _build(model, facts, layers, mode)
        except CaptureError as error:
            name, how = type(model).__name__, "captured" if mode == "cuda_graph" else "compiled"
            level = (
                logging.WARNING if requested or mode == "cuda_graph" else logging.INFO
            )  # without graphs a GPU idles
            logger.log(level, "%s is not %s: %s. Its own forward is used.", name, how, error)
            if not error.is_lasting:
                return None
            runner = None
        state.programs[mode] = KeptProgram(built_from, layers, runner)
        return runner


def kernels_pay(model: PreTrainedModel, new_tokens: int, *, waits: bool = False) -> bool:
    """Whether a program with the CPU kernels saves more time in this and later calls than it takes to make.

    An eager forward reads all weights, at a few gigabytes per second; making a program takes a few seconds. So it pays
    once the forwards of earlier calls, and those expected of this one, read `PAYS_FROM_BYTES`. The kernels themselves
    are compiled once per machine, in the background: until they are ready, calls go on without them, up to
    `WAITS_FROM_BYTES`.

    Args:
        model: An attached model.
        new_tokens: Maximum number of new tokens of this call.
        waits: Whether the caller wants the kernels now, and waits for a compiler.
    """
    state, device = state_of(model), execution_device(model)
    if not supports_kernels(device, model.dtype):
        return False
    if state.kernels_have_paid:
        return has_kernels(device, model.dtype)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    read = weights * (state.eager_forwards + EXPECTED_FORWARDS * new_tokens)
    may_wait = waits or read >= WAITS_FROM_BYTES
    if (waits or read >= PAYS_FROM_BYTES) and (may_wait or are_kernels_ready()):
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
    """Return the drafter with compiled or captured forwards, built if none exist for the current weights.

    Args:
        model: An attached model. Call `current_program` first, which drops drafters compiled for earlier weights.
        drafter: A bound drafter. Parts that cannot be compiled are kept unchanged; this is logged once.
        mode: See `make_runner`.
    """
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
            except CaptureError as error:
                logger.warning("%r is not compiled: %s. Its own forward is used.", drafter, error)
                if not error.is_lasting:
                    return drafter
                other = drafter
            known = kept[mode] = built_from, None if other is drafter else other  # a value must not keep its key alive
        return known[1] or drafter


def _build(model: PreTrainedModel, facts: TargetFacts, layers: frozenset[int], mode: ExecutionMode) -> Runner:
    name, begin = type(model).__name__, time.perf_counter()
    if mode == "inductor":
        logger.info("Compiling the forward of %s; this takes up to a minute, once per process.", name)
    with without_autocast(execution_device(model)):
        runner = make_runner(model, facts, layers, mode)
    if mode != "cuda_graph":
        logger.info("Made a program of the forward of %s (%s) in %.0f s.", name, mode, time.perf_counter() - begin)
    return runner
