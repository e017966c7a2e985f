"""`SpeculationState`, which `attach` adds to a model, and functions that update it after changes to the model.

It is one object in the model's `__dict__`; no parameter, buffer or module is added.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from transformers import PreTrainedModel

from hf_specdec.checkpoints.adapters import AdapterFiles, check_adapter
from hf_specdec.control.costs import StepCosts
from hf_specdec.control.learned_stats import LearnedStats
from hf_specdec.drafters.answer_history import AnswerHistory
from hf_specdec.drafters.base import Drafter
from hf_specdec.drafters.checked import check_drafter
from hf_specdec.reporting.stats import SpeculationStats
from hf_specdec.verification.captured_greedy import CapturedGreedy
from hf_specdec.verification.compiling import make_runner
from hf_specdec.verification.fingerprint import Fingerprint
from hf_specdec.verification.graph_backends import GRAPH_BACKENDS
from hf_specdec.verification.memory import persistent_tensors
from hf_specdec.verification.model import execution_device, num_embedded_tokens
from hf_specdec.verification.probe import TargetFacts, check_features, inspect_target
from hf_specdec.verification.programs import CaptureError, ExecutionMode, has_kernels, without_autocast
from hf_specdec.verification.runners import Runner, WeightsVersion

STATE = "_speculation"
"""Name of the only entry that this package adds to a model's `__dict__`."""

KEPT_FACTS = 4
"""Maximum number of cached probe results: a model that switches between adapters or modes is probed once for each."""

KEPT_COSTS = 16
"""Maximum number of cached cost tables (one per model state, batch size and execution mode)."""

logger = logging.getLogger(__name__)


SWAP = threading.Lock()
"""Lock held while a model's original class is restored, and while a generation registers that it runs."""


PAYS_FROM_BYTES = 20 * 10**9
"""Bytes of weights read by eager decoding (2 to 5 s on two cores) from which a program with CPU kernels pays."""

COMPILING = threading.Lock()
"""Lock held while a program (a compiled or captured forward) is looked up or built: other threads wait."""


@dataclass(frozen=True, slots=True)
class KeptProgram:
    """A compiled or captured verify forward, with the model state that it was built from."""

    built_from: tuple[Fingerprint, WeightsVersion]
    layers: frozenset[int]  # whose hidden states it returns
    runner: Runner | None  # None: not possible for this model

    def is_outdated(self, built_from: tuple[Fingerprint, WeightsVersion]) -> bool:
        """Whether the model has changed since, except for writes to weights that the program reads in place."""
        (known, weights), (now, current) = self.built_from, built_from
        if self.runner is not None and not self.runner.copies_weights:
            return known != now or weights.addresses != current.addresses
        return self.built_from != built_from

    def serves(self, layers: frozenset[int]) -> bool:
        """Whether the program returns these hidden states; also True if none is possible, to avoid another attempt."""
        return self.runner is None or layers <= self.layers


class SpeculationState:
    """Everything that this package keeps for one model between calls: drafters, probe results, costs, programs, ..."""

    def __init__(self) -> None:
        self.drafters: dict[str, Drafter] = {}
        self.made: dict[str, Drafter] = {}  # drafters without a loaded head, by method, created on first use
        # state of the model that each drafter was last bound to
        self.bound: WeakKeyDictionary[Drafter, Fingerprint] = WeakKeyDictionary()
        self.facts: list[TargetFacts] = []  # results of probing the model, latest first
        self.learned = LearnedStats()  # statistics of merged drafting
        # by model state, batch size and execution mode, latest first
        self.costs: list[tuple[tuple[Fingerprint, int, str], StepCosts]] = []
        self.programs: dict[ExecutionMode, KeptProgram] = {}
        self.eager_bytes = 0  # see `kernels_pay`
        self.rule: CapturedGreedy | None = None  # greedy acceptance as graphs; None until first used
        # compiled drafters (None: nothing to compile), with the weights that they were built from
        self.compiled: WeakKeyDictionary[Drafter, dict[ExecutionMode, tuple[WeightsVersion, Drafter | None]]] = (
            WeakKeyDictionary()
        )
        self.last: SpeculationStats | None = None
        self.history: AnswerHistory | None = None  # created when first used
        self._threads: Counter[int] = Counter()  # running generations by thread

    def running(self) -> ExitStack:
        """Register a generation of this thread; return a context manager that ends the registration."""
        thread = threading.get_ident()
        self._threads[thread] += 1
        stack = ExitStack()
        stack.callback(self._threads.subtract, (thread,))
        return stack

    def is_running_elsewhere(self) -> bool:
        """Whether another living thread is generating."""
        alive = {thread.ident for thread in threading.enumerate()} - {threading.get_ident()}
        return any(count > 0 and thread in alive for thread, count in self._threads.items())

    def state_dict(self) -> Any:
        """Return a copy of what merged drafting and the drafters have learned from calls."""
        drafters = {**self.made, **self.drafters}
        return self.learned.state_dict(), {name: drafter.state_dict() for name, drafter in drafters.items()}

    def load_state_dict(self, state: Any) -> None:
        """Restore a copy made by `state_dict`; drafters added since are reset."""
        of_merging, of_drafters = state
        self.learned.load_state_dict(of_merging)
        for name, drafter in {**self.made, **self.drafters}.items():
            drafter.load_state_dict(of_drafters.get(name))

    def __getstate__(self) -> dict[str, Any]:
        """Copy or pickle only drafters and the last statistics: the copied model has not been probed."""
        return {"drafters": self.drafters, "made": {}, "facts": [], "last": self.last,
                "learned": LearnedStats(), "costs": [], "programs": {}, "rule": None, "eager_bytes": 0,
                "history": None}  # fmt: skip

    def __setstate__(self, values: dict[str, Any]) -> None:
        self.__dict__.update(values, _threads=Counter(), bound=WeakKeyDictionary(), compiled=WeakKeyDictionary())


def state_of(model: Any) -> SpeculationState:
    """Return the model's `SpeculationState`; add one if it has none."""
    state: SpeculationState = model.__dict__.setdefault(STATE, SpeculationState())
    return state


def answer_history(model: PreTrainedModel) -> AnswerHistory:
    """Return the history of the model's answers; create an empty one if it has none."""
    state = state_of(model)
    if state.history is None:
        state.history = AnswerHistory(vocab_size=num_embedded_tokens(model))
    return state.history


def current_facts(model: PreTrainedModel) -> TargetFacts:
    """Return the probe's result for the model in its current state.

    If none is cached, drop all compiled programs and probe the model.

    Raises:
        UnsupportedModelError: In its current state the model cannot verify drafted tokens.
    """
    state, now = state_of(model), Fingerprint.of(model)
    for facts in state.facts:
        if facts.fingerprint == now:
            return facts
    state.programs.clear()
    state.compiled.clear()
    if state.facts:
        changed = ", ".join(state.facts[0].fingerprint.differences(now))
        logger.info("%s has changed since it was probed (%s); probing again.", type(model).__name__, changed)
    facts = inspect_target(model)
    state.facts = [facts, *state.facts][:KEPT_FACTS]
    return facts


def add_drafter(model: PreTrainedModel, drafter: Drafter, name: str | None) -> None:
    """Bind a drafter to the model and register it by name (None: that of its method), replacing any of that name.

    Raises:
        DrafterMismatchError: The drafter was made for another model, or is invalid.
        UnsupportedModelError: The model gives no access to the hidden states that the drafter needs.
    """
    check_drafter(drafter)
    state, now = state_of(model), Fingerprint.of(model)
    for part in drafter.parts:
        _bind(model, part, now)
    state.drafters[name or drafter.method] = drafter


def rebind_if_changed(model: PreTrainedModel, drafter: Drafter, now: Fingerprint) -> None:
    """Bind each part of a drafter that was not last bound to the model in its current state.

    Args:
        model: An attached model.
        drafter: Any drafter; registration is not required.
        now: Fingerprint of the model's current state.

    Raises:
        DrafterMismatchError: The drafter does not fit, for example after a resized vocabulary or removed layers.
        UnsupportedModelError: The model gives no access to the hidden states that the drafter needs.
    """
    bound = state_of(model).bound
    for part in drafter.parts:
        if bound.get(part) != now:
            _bind(model, part, now)


def current_costs(
    model: PreTrainedModel, facts: TargetFacts, *, rows: int, widest: int, context: int, runner: Runner | None = None
) -> StepCosts:
    """Return the costs of a step by its width (nodes per row); measure them if unknown.

    Args:
        model: An attached model.
        facts: The result of the probe.
        rows: Batch size.
        widest: Nodes of the largest tree.
        context: Tokens of the prompt.
        runner: Compiled or captured forward; None: the model's own.
    """
    state = state_of(model)
    mode = next((mode for mode, kept in state.programs.items() if kept.runner is runner is not None), "none")
    key = facts.fingerprint, rows, mode
    for known, costs in state.costs:
        if known == key and costs.covers(widest, rows):
            return costs
    costs = StepCosts.measure(model, facts, rows=rows, widest=widest, context=context, runner=runner)
    state.costs = [(key, costs), *state.costs][:KEPT_COSTS]
    return costs


def current_program(
    model: PreTrainedModel, facts: TargetFacts, layers: frozenset[int], mode: ExecutionMode, *, requested: bool = True
) -> Runner | None:
    """Return the compiled or captured verify forward, created if none exists for the current weights.

    Args:
        model: An attached model.
        facts: The result of the probe.
        layers: Layers whose hidden states this call's drafter reads.
        mode: See `make_runner`.
        requested: Whether the user asked for this mode; a failure is then logged as a warning, otherwise as info.

    Returns:
        None if the model cannot be compiled or captured, which is logged once; its own forward is used then.
    """
    state, built_from = state_of(model), (facts.fingerprint, WeightsVersion.of(model))
    with COMPILING:
        if any(kept.built_from != built_from for kept in state.programs.values()):
            state.compiled.clear()  # drafters may hold copies of rows of lm_head
            current = {name: kept for name, kept in state.programs.items() if not kept.is_outdated(built_from)}
            if len(current) < len(state.programs):
                name = type(model).__name__
                logger.info("%s has changed since its forward was compiled; the program is dropped.", name)
            state.programs = {name: replace(kept, built_from=built_from) for name, kept in current.items()}
        known = state.programs.get(mode)
        if known is not None and known.serves(layers):
            return known.runner
        layers |= {layer for drafter in state.drafters.values() for layer in drafter.needs.feature_layers}
        state.programs[mode] = KeptProgram(built_from, layers, _build(model, facts, layers, mode, requested))
        return state.programs[mode].runner


def kernels_pay(model: PreTrainedModel, new_tokens: int) -> bool:
    """Whether a program with the CPU kernels saves more time in this and earlier calls than it takes to make.

    Plain decoding reads all weights once per token, at a few gigabytes per second; making a program takes a few
    seconds. So it pays once the calls since the model was attached have requested tokens for which `PAYS_FROM_BYTES`
    of weights are read. Answers may end earlier; then these seconds are lost.

    Args:
        model: An attached model.
        new_tokens: Maximum number of new tokens of this call, which are added to those of earlier calls.
    """
    state, device = state_of(model), execution_device(model)
    if device.type != "cpu":
        return False
    if state.eager_bytes < PAYS_FROM_BYTES:
        weights = sum(parameter.nbytes for parameter in model.parameters())
        state.eager_bytes += weights * new_tokens
    return state.eager_bytes >= PAYS_FROM_BYTES and has_kernels(device, model.dtype)


def release_programs(model: Any) -> None:
    """Release all compiled and captured forwards of a model, and the memory kept for them."""
    state = state_of(model)
    with COMPILING:
        state.programs.clear()
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
                other = drafter
            known = kept[mode] = built_from, None if other is drafter else other  # a value must not keep its key alive
        return known[1] or drafter


def _build(
    model: PreTrainedModel, facts: TargetFacts, layers: frozenset[int], mode: ExecutionMode, requested: bool
) -> Runner | None:
    name, begin = type(model).__name__, time.perf_counter()
    if mode == "inductor":
        logger.info("Compiling the forward of %s; this takes up to a minute, once per process.", name)
    try:
        with without_autocast(execution_device(model)):
            runner = make_runner(model, facts, layers, mode)
    except CaptureError as error:
        how = "captured" if mode == "cuda_graph" else "compiled"
        level = logging.WARNING if requested else logging.INFO
        logger.log(level, "%s is not %s: %s. Its own forward is used.", name, how, error)
        return None
    if mode != "cuda_graph":
        logger.info("Made a program of the forward of %s (%s) in %.0f s.", name, mode, time.perf_counter() - begin)
    return runner


def _bind(model: PreTrainedModel, drafter: Drafter, now: Fingerprint) -> None:
    check_drafter(drafter)
    adapter = getattr(getattr(drafter, "head", None), "adapter", None)
    if isinstance(adapter, AdapterFiles):
        check_adapter(model, adapter)
    with persistent_tensors():
        drafter.bind(model)
    check_features(model, drafter.needs.feature_layers)
    state_of(model).bound[drafter] = now
