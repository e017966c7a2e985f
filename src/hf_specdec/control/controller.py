"""`Controller`, the protocol for deciding the budget of every step of one generation, and `FixedController`."""

from __future__ import annotations

from typing import Any, Protocol

from hf_specdec.control.merge_policy import StepCostFunction
from hf_specdec.trees.draft import Budget
from hf_specdec.verification.step import Step, StepSeconds


class Controller(Protocol):
    """Protocol of the object that decides the budget of every step.

    Attributes:
        step_costs: Function that returns the costs of a step, for drafters that need them; None: unknown.
    """

    step_costs: StepCostFunction | None

    def next(self) -> Budget:
        """Return the budget of the next step, within the drafter's limits; one node is a plain step."""

    def observe(self, step: Step, seconds: StepSeconds) -> None:
        """Learn from a step and its duration."""

    def report(self) -> dict[str, Any]:
        """Return a summary of its decisions as JSON-serialisable values, for `SpeculationStats.control`."""


class FixedController:
    """Controller with the same budget in every step.

    Args:
        budget: The budget.
    """

    step_costs: StepCostFunction | None = None

    def __init__(self, budget: Budget) -> None:
        self.budget = budget

    def next(self) -> Budget:
        """Return the fixed budget."""
        return self.budget

    def observe(self, step: Step, seconds: StepSeconds) -> None:
        """Ignore the step."""

    def report(self) -> dict[str, Any]:
        """Return the controller's name ("fixed") and the three sizes of the budget."""
        limits = {name: getattr(self.budget, name) for name in ("num_nodes", "num_steps", "top_k")}
        return {"controller": "fixed", **limits}
