"""`SpeculationState`, which `attach` adds to a model, and functions that update it after changes to the model.

It is one object in the model's `__dict__`; no parameter, buffer or module is added.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from contextlib import ExitStack
from math import log2
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from hf_specdec.checkpoints.hub import AdapterFiles, check_target_adapter
from hf_specdec.config import ExecutionMode
from hf_specdec.control.costs import StepCosts
from hf_specdec.control.policy import LearnedStats
from hf_specdec.cpu.library import release_threads
from hf_specdec.drafters.base import Drafter
from hf_specdec.drafters.checked import check_drafter
from hf_specdec.drafters.history import AnswerHistory
from hf_specdec.drafters.registry import check_drafter_name
from hf_specdec.reporting.stats import SpeculationStats
from hf_specdec.verification.captured import CapturedGreedy
from hf_specdec.verification.fingerprint import Fingerprint
from hf_specdec.verification.memory import persistent_tensors
from hf_specdec.verification.model import execution_device, num_embedded_tokens
from hf_specdec.verification.probe import TargetFacts, check_features, inspect_target
from hf_specdec.verification.runners import CompiledForward, Runner, WeightsVersion

STATE = "_speculation"
"""Name of the only entry that this package adds to a model's `__dict__`."""

KEPT_FACTS = 8
"""Maximum number of cached probe results, and of programs that are set aside.

A model that switches between modes or adapters is probed once for each: a trainer alternates between train and eval
mode, with and without gradient checkpointing or an adapter."""

KEPT_COSTS = 16
"""Maximum number of cached cost tables (one per model state, batch size and execution mode)."""

logger = logging.getLogger(__name__)


SWAP = threading.Lock()
"""Lock held while a model's original class is restored, and while a generation registers that it runs."""


ModelState = tuple[Fingerprint, WeightsVersion]
CostsKey = tuple[Fingerprint, int, str]
"""Model, batch size and execution mode; each combination has its own costs."""


class KeptProgram(NamedTuple):
    """A compiled or captured verify forward, with the model state that it was built from."""

    built_from: ModelState
    layers: frozenset[int]  # whose hidden states it returns
    runner: Runner | None  # None: not possible for this model
    reason: str = ""  # why not, as a clause


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
        self.costs: list[tuple[CostsKey, StepCosts]] = []
        self.programs: dict[ExecutionMode, KeptProgram] = {}
        self.spare_programs: list[tuple[ExecutionMode, KeptProgram]] = []  # for other modes of the model, latest first
        # what programs and compiled drafters were last compared with
        self.compared: ModelState | None = None
        self.weights: WeightsVersion | None = None  # of the last call
        # calls without a program, see `kernels_pay`: their number, seconds, forwards and seconds in forwards
        self.eager_calls, self.eager_seconds, self.eager_forwards, self.eager_step_seconds = 0, 0.0, 0, 0.0
        self.kernels_have_paid = False  # once True, later calls use them, however short they are
        self.rule: CapturedGreedy | None = None  # greedy acceptance as graphs; None until first used
        # compiled drafters (None: nothing to compile), with the weights that they were built from
        self.compiled: WeakKeyDictionary[Drafter, dict[ExecutionMode, tuple[WeightsVersion, Drafter | None]]] = (
            WeakKeyDictionary()
        )
        self.has_noted_batching = False
        self.last: SpeculationStats | None = None
        self.history: AnswerHistory | None = None  # created when first used
        self._threads: Counter[int] = Counter()  # running generations by thread

    def running(self) -> ExitStack:
        """Register a generation of this thread at once; return a context manager that ends the registration."""
        thread, stack = threading.get_ident(), ExitStack()
        self._threads[thread] += 1
        stack.callback(self._threads.subtract, (thread,))
        stack.callback(release_threads)
        return stack

    def is_running_elsewhere(self) -> bool:
        """Whether another living thread is generating."""
        alive = {thread.ident for thread in threading.enumerate()} - {threading.get_ident()}
        return any(count > 0 and thread in alive for thread, count in self._threads.items())

    def drop_outdated(self, now: ModelState) -> bool:
        """Drop programs and compiled drafters of another state of the model; return whether a program was dropped.

        Programs that read weights in place stay valid if weights are written to. Outdated programs that hold no memory
        are set aside: they serve again once the model returns to its earlier mode.
        """
        if self.compared == now:
            return False
        known = [*self.programs.items(), *self.spare_programs]
        self.programs, self.spare_programs, dropped = {}, [], False
        for mode, kept in known:
            copies = kept.runner is not None and kept.runner.copies_weights
            holds_memory = copies or type(kept.runner) is not CompiledForward
            if kept.built_from == now or not (copies or _is_moved(kept.built_from, now)):
                self.programs.setdefault(mode, kept)
            elif not holds_memory and kept.built_from[1].addresses == now[1].addresses:
                self.spare_programs = [*self.spare_programs, (mode, kept)][:KEPT_FACTS]
            else:
                dropped = True
        if self.compared is None or _is_moved(self.compared, now):
            self.compiled.clear()
        for drafters in self.compiled.values():
            for mode, (_, drafter) in list(drafters.items()):
                if drafter is not None and drafter.copies_target_weights:
                    del drafters[mode]
        self.compared = now
        return dropped

    def fade_if_weights_changed(self, now: WeightsVersion) -> None:
        """Reduce the weight of what was learned if weights have changed since the last call; the costs stay."""
        if self.weights is not None and self.weights != now:
            self.learned.fade()
            drafters = [*self.made.values(), *self.drafters.values()]
            for learning in {*drafters, *(part for drafter in drafters for part in drafter.parts)}:
                learning.fade()
        self.weights = now

    def note_call(self, stats: SpeculationStats | None, *, is_eager: bool) -> None:
        """Keep a call's statistics; count its seconds if the model's own modules ran its forwards."""
        self.last = stats
        if stats is not None and is_eager and stats.num_target_forwards:
            self.eager_calls += 1
            self.eager_seconds += stats.total_seconds
            self.eager_forwards += stats.num_target_forwards
            self.eager_step_seconds += stats.verify_seconds

    def keep_costs(self, key: CostsKey, costs: StepCosts) -> None:
        """Keep costs as the latest, instead of narrower ones of the same key."""
        others = [entry for entry in self.costs if entry[0] != key or entry[1].max_width > costs.max_width]
        self.costs = [(key, costs), *others][:KEPT_COSTS]

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
        return {"drafters": self.drafters, "last": self.last}

    def __setstate__(self, values: dict[str, Any]) -> None:
        SpeculationState.__init__(self)
        self.__dict__.update(values)


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
    """Return the probe's result for the model in its current state; probe it if none is cached."""
    state, now = state_of(model), Fingerprint.of(model)
    for facts in state.facts:
        if facts.fingerprint == now:
            state.facts = [facts, *(other for other in state.facts if other is not facts)]
            return facts
    state.drop_outdated((now, WeightsVersion.of(model)))
    if state.facts:
        changed = ", ".join(state.facts[0].fingerprint.differences(now))
        logger.info("%s has changed since it was probed (%s); probing again.", type(model).__name__, changed)
    facts = inspect_target(model)
    state.facts = [facts, *state.facts][:KEPT_FACTS]
    return facts


def add_drafter(model: PreTrainedModel, drafter: Drafter, name: str | None) -> None:
    """Bind a drafter to the model and register it by name (None: that of its method), replacing any of that name."""
    check_drafter(drafter)
    name = name or drafter.method
    check_drafter_name(name, (drafter.method,))
    state, now = state_of(model), Fingerprint.of(model)
    for part in drafter.parts:
        _bind(model, part, now)
    state.drafters[name] = drafter


def rebind_if_changed(model: PreTrainedModel, drafter: Drafter, now: Fingerprint) -> None:
    """Bind each part of a drafter, registered or not, that was last bound to the model in another state."""
    bound = state_of(model).bound
    for part in drafter.parts:
        if bound.get(part) != now:
            _bind(model, part, now)


def current_costs(
    model: PreTrainedModel, facts: TargetFacts, *, rows: int, widest: int, runner: Runner | None = None
) -> StepCosts:
    """Return the costs of a step by its width (nodes per row): those known, or expected ones that steps correct.

    Costs are expected from those of the nearest batch size that is known. `widest` are the nodes of the largest tree.
    """
    state, key = state_of(model), _costs_key(model, facts, rows, runner)
    for known, costs in state.costs:
        if known == key and costs.covers(widest, rows):
            return costs
    others = [
        (known[1], costs)
        for known, costs in state.costs
        if (known[0], known[2]) == (key[0], key[2]) and known[1] != rows and costs.is_plain_known
    ]
    nearest = min(others, key=lambda entry: abs(log2(entry[0] / rows)), default=None)
    costs = StepCosts.expected(execution_device(model), rows=rows, widest=widest, known=nearest, runner=runner)
    state.keep_costs(key, costs)
    return costs


def measure_costs(
    model: PreTrainedModel, facts: TargetFacts, *, rows: int, widest: int, context: int, runner: Runner | None = None
) -> None:
    """Time steps of all widths, so that the first call need not learn their costs; not if a plain step was timed."""
    if not current_costs(model, facts, rows=rows, widest=widest, runner=runner).is_plain_known:
        costs = StepCosts.measure(model, facts, rows=rows, widest=widest, context=context, runner=runner)
        state_of(model).keep_costs(_costs_key(model, facts, rows, runner), costs)


def _costs_key(model: PreTrainedModel, facts: TargetFacts, rows: int, runner: Runner | None) -> CostsKey:
    programs = state_of(model).programs
    mode = next((mode for mode, kept in programs.items() if kept.runner is runner is not None), "none")
    return facts.fingerprint, rows, mode


def _is_moved(before: ModelState, now: ModelState) -> bool:
    """Whether a model has changed, except for writes to its weights."""
    return before[0] != now[0] or before[1].addresses != now[1].addresses


def _bind(model: PreTrainedModel, drafter: Drafter, now: Fingerprint) -> None:
    check_drafter(drafter)
    adapter = getattr(getattr(drafter, "head", None), "adapter", None)
    if isinstance(adapter, AdapterFiles):
        check_target_adapter(model, adapter)
    with persistent_tensors():
        drafter.bind(model)
    check_features(model, drafter.needs.feature_layers)
    state_of(model).bound[drafter] = now
