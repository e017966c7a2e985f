"""How much the next step may draft."""

from __future__ import annotations

from typing import Any, Protocol

from hf_specdec.trees.draft import Budget
from hf_specdec.verification.step import Step, StepSeconds


class Controller(Protocol):
    """Decides the budget of every step of one generation."""

    def next(self) -> Budget:
        """The budget of the next step, within the drafter's limits; one node is a plain step."""

    def observe(self, step: Step, seconds: StepSeconds) -> None:
        """Learn from a step and what it took."""

    def report(self) -> dict[str, Any]:
        """What it decided, as plain values for the statistics."""


class FixedController:
    """The same budget in every step.

    Args:
        budget: Of every step.
    """

    def __init__(self, budget: Budget) -> None:
        self.budget = budget

    def next(self) -> Budget:
        """See `Controller`."""
        return self.budget

    def observe(self, step: Step, seconds: StepSeconds) -> None:
        """Nothing to learn."""

    def report(self) -> dict[str, Any]:
        """The budget."""
        limits = {name: getattr(self.budget, name) for name in ("num_nodes", "num_steps", "top_k")}
        return {"controller": "fixed", **limits}
