"""What attaching adds to a model, and how it is kept true while the model changes.

One object in the model's `__dict__`, no parameter, buffer or module.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from transformers import PreTrainedModel

from hf_specdec.control.costs import StepCosts
from hf_specdec.drafters.base import Drafter
from hf_specdec.drafters.foreign import check_drafter
from hf_specdec.drafters.hybrid import HybridDrafter, LearnedStats
from hf_specdec.reporting.stats import SpeculationStats
from hf_specdec.verification.captured_greedy import CapturedGreedy
from hf_specdec.verification.compiling import make_runner
from hf_specdec.verification.features import canonical
from hf_specdec.verification.fingerprint import Fingerprint
from hf_specdec.verification.graph_backends import GRAPH_BACKENDS
from hf_specdec.verification.memory import persistent_tensors
from hf_specdec.verification.model import execution_device, text_config
from hf_specdec.verification.probe import TargetFacts, check_features, inspect_target
from hf_specdec.verification.runners import CaptureError, ExecutionMode, Runner, WeightsVersion

STATE = "_speculation"
"""The one entry this package keeps in a model's `__dict__`."""

KEPT_FACTS = 4
"""Findings of the probe that are kept: a model that goes back and forth (adapters, modes) is probed once for each."""

KEPT_COSTS = 16
"""Batch sizes, times models, of which it is kept what a step costs."""

logger = logging.getLogger(__name__)


SWAP = threading.Lock()
"""Held while a model's class is swapped back, and while a generation announces that it begins."""


COMPILING = threading.Lock()
"""Held while a program is looked for or made: one thread makes it, the others wait for it."""


@dataclass(frozen=True, slots=True)
class KeptProgram:
    """A model's verify forward in another form, or that it takes none, and what it was made of."""

    made_of: tuple[Fingerprint, WeightsVersion]
    layers: frozenset[int]
    runner: Runner | None

    def serves(self, layers: frozenset[int]) -> bool:
        """Whether it gives these hidden states, or there is none."""
        return self.runner is None or layers <= self.layers


class SpeculationState:
    """A model's drafters, what the probe found, who generates with it, and the last call's statistics."""

    def __init__(self) -> None:
        self.drafters: dict[str, Drafter] = {}
        self.made: dict[str, Drafter] = {}  # training-free drafters, made when their method was first asked for
        # the model that each drafter was last bound to
        self.bound: WeakKeyDictionary[Drafter, Fingerprint] = WeakKeyDictionary()
        self.facts: list[TargetFacts] = []  # latest first
        self.experience = LearnedStats()  # of merged drafts
        # by model, rows and what runs it, latest first
        self.costs: list[tuple[tuple[Fingerprint, int, str], StepCosts]] = []
        self.programs: dict[ExecutionMode, KeptProgram] = {}
        self.rule: CapturedGreedy | None = None  # of models whose forward is captured
        # drafters whose forwards are programs, and what these were made of
        self.compiled: WeakKeyDictionary[Drafter, dict[ExecutionMode, tuple[WeightsVersion, Drafter | None]]] = (
            WeakKeyDictionary()
        )
        self.last: SpeculationStats | None = None
        self._threads: Counter[int] = Counter()  # generations under way, by thread

    def running(self) -> ExitStack:
        """Note down that this thread generates, from now until the block ends."""
        thread = threading.get_ident()
        self._threads[thread] += 1
        stack = ExitStack()
        stack.callback(self._threads.subtract, (thread,))
        return stack

    def is_running_elsewhere(self) -> bool:
        """Whether another thread that lives is generating."""
        alive = {thread.ident for thread in threading.enumerate()} - {threading.get_ident()}
        return any(count > 0 and thread in alive for thread, count in self._threads.items())

    def state_dict(self) -> Any:
        """A copy of what drafters have learned with the model."""
        drafters = {**self.made, **self.drafters}
        return self.experience.state_dict(), {name: drafter.state_dict() for name, drafter in drafters.items()}

    def load_state_dict(self, state: Any) -> None:
        """Have all drafters know what they knew when a copy was made; those that came later know nothing."""
        experience, learned = state
        self.experience.load_state_dict(experience)
        for name, drafter in {**self.made, **self.drafters}.items():
            drafter.load_state_dict(learned.get(name))

    def __getstate__(self) -> dict[str, Any]:
        """A copy is another model: nothing was found out about it yet."""
        return {"drafters": self.drafters, "made": {}, "facts": [], "last": self.last,
                "experience": LearnedStats(), "costs": [], "programs": {}, "rule": None}  # fmt: skip

    def __setstate__(self, values: dict[str, Any]) -> None:
        self.__dict__.update(values, _threads=Counter(), bound=WeakKeyDictionary(), compiled=WeakKeyDictionary())


def state_of(model: Any) -> SpeculationState:
    """The model's own, made where there is none yet."""
    state: SpeculationState = model.__dict__.setdefault(STATE, SpeculationState())
    return state


def current_facts(model: PreTrainedModel) -> TargetFacts:
    """What the probe found, anew where the model is not made as it was.

    Raises:
        UnsupportedModelError: As it is now, it cannot verify drafted tokens.
    """
    state, now = state_of(model), Fingerprint.of(model)
    for facts in state.facts:
        if facts.fingerprint == now:
            return facts
    state.programs.clear()
    state.compiled.clear()
    if state.facts:
        changed = ", ".join(state.facts[0].fingerprint.differences(now))
        logger.info("%s has changed since it was probed (%s): probing it again", type(model).__name__, changed)
    facts = inspect_target(model)
    state.facts = [facts, *state.facts][:KEPT_FACTS]
    return facts


def register(model: PreTrainedModel, drafter: Drafter, name: str | None) -> None:
    """Bind a drafter to the model and keep it under a name; None is its method's.

    Raises:
        DrafterMismatchError: It was made for another model, or is not a drafter.
        UnsupportedModelError: The model shows no hidden states to a drafter that reads them.
    """
    check_drafter(drafter)
    state, now = state_of(model), Fingerprint.of(model)
    for part in drafter.parts:
        _bind(model, part, now)
    state.drafters[name or drafter.method] = drafter


def rebind_if_changed(model: PreTrainedModel, drafter: Drafter, now: Fingerprint) -> None:
    """Bind a drafter to a model that is not made as it was when the drafter was bound last.

    Raises:
        DrafterMismatchError: It no longer fits: the vocabulary was resized, layers were taken out, ...
    """
    bound = state_of(model).bound
    for part in drafter.parts:
        if bound.get(part) != now:
            _bind(model, part, now)


def current_costs(
    model: PreTrainedModel, facts: TargetFacts, *, rows: int, widest: int, context: int, runner: Runner | None = None
) -> StepCosts:
    """What a step over so many rows costs, measured where it is not known yet.

    Args:
        model: An attached model.
        facts: What the probe found.
        rows: Of the batch.
        widest: Nodes of the largest tree.
        context: Tokens of the prompt.
        runner: What runs its forward.
    """
    state = state_of(model)
    form = next((form for form, kept in state.programs.items() if kept.runner is runner is not None), "none")
    key = facts.fingerprint, rows, form
    for known, costs in state.costs:
        if known == key and costs.covers(widest, rows):
            return costs
    costs = StepCosts.measure(model, facts, rows=rows, widest=widest, context=context, runner=runner)
    state.costs = [(key, costs), *state.costs][:KEPT_COSTS]
    return costs


def current_program(
    model: PreTrainedModel, facts: TargetFacts, layers: frozenset[int], form: ExecutionMode, *, asked: bool = True
) -> Runner | None:
    """The model's verify forward in another form, made where there is none of these weights yet.

    Args:
        model: An attached model.
        facts: What the probe found.
        layers: Whose hidden states this call's drafter reads.
        form: See `make_runner`.
        asked: Whether the user named it: then it is a warning that the model cannot take it.

    Returns:
        None where it cannot, which is logged once: the model's own forward verifies then.
    """
    state, made_of = state_of(model), (facts.fingerprint, WeightsVersion.of(model))
    depth = int(text_config(model).num_hidden_layers)
    layers = frozenset(canonical(layer, depth) for layer in layers)
    with COMPILING:
        if any(kept.made_of != made_of for kept in state.programs.values()):
            logger.info("%s has changed since its forward was compiled: its program is dropped", type(model).__name__)
            state.programs.clear()
            state.compiled.clear()
        known = state.programs.get(form)
        if known is not None and known.serves(layers):
            return known.runner
        others = (layer for drafter in state.drafters.values() for layer in drafter.needs.feature_layers)
        layers |= {canonical(layer, depth) for layer in others}
        state.programs[form] = KeptProgram(made_of, layers, _made(model, facts, layers, form, asked))
        return state.programs[form].runner


def release_programs(model: Any) -> None:
    """Let go of every program and graph of a model, and of the memory that is kept for them."""
    state = state_of(model)
    with COMPILING:
        state.programs.clear()
        state.compiled.clear()
        state.rule = None


def captured_rule(model: PreTrainedModel) -> CapturedGreedy:
    """Greedy acceptance as graphs of the model's device, made if there is none yet."""
    state, device = state_of(model), execution_device(model)
    with COMPILING:
        if state.rule is None:
            state.rule = CapturedGreedy(GRAPH_BACKENDS[device.type](device))
        return state.rule


def compiled_drafter(model: PreTrainedModel, drafter: Drafter, form: ExecutionMode) -> Drafter:
    """The drafter with its own forwards in another form, made where there is none of these weights yet.

    Args:
        model: An attached model, whose own program is current.
        drafter: Bound to it. What cannot take the form, which is logged once, stays as it is.
        form: See `make_runner`.
    """
    if isinstance(drafter, HybridDrafter):
        return drafter.with_parts(lambda part: compiled_drafter(model, part, form))
    kept = state_of(model).compiled.setdefault(drafter, {})
    made_of = WeightsVersion.of(*(value for value in vars(drafter).values() if isinstance(value, nn.Module)))
    with COMPILING:
        known = kept.get(form)
        if known is None or known[0] != made_of:
            try:
                with persistent_tensors():
                    other = drafter.compiled(model, form)
            except CaptureError as error:
                logger.warning("%r is not compiled: %s. Its own forward drafts.", drafter, error)
                other = drafter
            known = kept[form] = made_of, None if other is drafter else other  # no value may hold its key alive
        return known[1] or drafter


def _made(
    model: PreTrainedModel, facts: TargetFacts, layers: frozenset[int], form: ExecutionMode, asked: bool
) -> Runner | None:
    name, begin = type(model).__name__, time.perf_counter()
    if form == "compile":
        logger.info("Compiling the forward of %s, once: this can take a minute", name)
    try:
        runner = make_runner(model, facts, layers, form)
    except CaptureError as error:
        how = "compiled" if form == "compile" else "captured"
        level = logging.WARNING if asked else logging.INFO
        logger.log(level, "%s is not %s: %s. Its own forward verifies the drafts.", name, how, error)
        return None
    if form == "compile":
        logger.info("Compiled the forward of %s in %.0f s", name, time.perf_counter() - begin)
    return runner


def _bind(model: PreTrainedModel, drafter: Drafter, now: Fingerprint) -> None:
    check_drafter(drafter)
    with persistent_tensors():
        drafter.bind(model)
    check_features(model, drafter.needs.feature_layers)
    state_of(model).bound[drafter] = now
