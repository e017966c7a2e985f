"""What attaching adds to a model, and how it is kept true while the model changes.

One object in the model's `__dict__`, no parameter, buffer or module. Called by: `generation/mixin.py` and `plan.py`.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from contextlib import ExitStack
from typing import Any
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from hf_specdec.control.costs import StepCosts
from hf_specdec.drafters.base import Drafter
from hf_specdec.drafters.hybrid import Experience
from hf_specdec.stats import SpeculationStats
from hf_specdec.target.fingerprint import Fingerprint
from hf_specdec.target.probe import TargetFacts, check_features, inspect_target

STATE = "_speculation"
"""The one entry this package keeps in a model's `__dict__`."""

KEPT_FACTS = 4
"""Findings of the probe that are kept: a model that goes back and forth (adapters, modes) is probed once for each."""

KEPT_COSTS = 16
"""Batch sizes, times models, of which it is kept what a step costs."""

logger = logging.getLogger(__name__)


SWAP = threading.Lock()
"""Held while a model's class is swapped back, and while a generation announces that it begins."""


class SpeculationState:
    """A model's drafters, what the probe found, who generates with it, and the last call's statistics."""

    def __init__(self) -> None:
        self.drafters: dict[str, Drafter] = {}
        self.made: dict[str, Drafter] = {}  # training-free drafters, made when their method was first asked for
        # the model that each drafter was last bound to
        self.bound: WeakKeyDictionary[Drafter, Fingerprint] = WeakKeyDictionary()
        self.facts: list[TargetFacts] = []  # latest first
        self.experience = Experience()  # of merged drafts
        self.costs: list[tuple[Fingerprint, int, StepCosts]] = []  # by model and rows, latest first
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

    def __getstate__(self) -> dict[str, Any]:
        """A copy is another model: nothing was found out about it yet."""
        return {"drafters": self.drafters, "made": {}, "facts": [], "last": self.last,
                "experience": Experience(), "costs": []}  # fmt: skip

    def __setstate__(self, values: dict[str, Any]) -> None:
        self.__dict__.update(values, _threads=Counter(), bound=WeakKeyDictionary())


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
    if state.facts:
        changed = ", ".join(state.facts[0].fingerprint.differences(now))
        logger.info("%s has changed since it was probed (%s): probing it again", type(model).__name__, changed)
    facts = inspect_target(model)
    state.facts = [facts, *state.facts][:KEPT_FACTS]
    return facts


def register(model: PreTrainedModel, drafter: Drafter, name: str) -> None:
    """Bind a drafter to the model and keep it under a name.

    Raises:
        DrafterMismatchError: It was made for another model.
        UnsupportedModelError: The model shows no hidden states to a drafter that reads them.
    """
    state, now = state_of(model), Fingerprint.of(model)
    for part in drafter.parts:
        _bind(model, part, now)
    state.drafters[name] = drafter


def keep_bound(model: PreTrainedModel, drafter: Drafter, now: Fingerprint) -> None:
    """Bind a drafter to a model that is not made as it was when the drafter was bound last.

    Raises:
        DrafterMismatchError: It no longer fits: the vocabulary was resized, layers were taken out, ...
    """
    bound = state_of(model).bound
    for part in drafter.parts:
        if bound.get(part) != now:
            _bind(model, part, now)


def current_costs(model: PreTrainedModel, facts: TargetFacts, *, rows: int, widest: int, context: int) -> StepCosts:
    """What a step over so many rows costs, measured where it is not known yet.

    Args:
        model: An attached model.
        facts: What the probe found.
        rows: Of the batch.
        widest: Nodes of the largest tree.
        context: Tokens of the prompt.
    """
    state = state_of(model)
    for fingerprint, known_rows, costs in state.costs:
        if (fingerprint, known_rows) == (facts.fingerprint, rows) and costs.covers(widest, rows):
            return costs
    costs = StepCosts.measure(model, facts, rows=rows, widest=widest, context=context)
    state.costs = [(facts.fingerprint, rows, costs), *state.costs][:KEPT_COSTS]
    return costs


def _bind(model: PreTrainedModel, drafter: Drafter, now: Fingerprint) -> None:
    drafter.bind(model)
    check_features(model, drafter.needs.feature_layers)
    state_of(model).bound[drafter] = now
