"""Controller that learns what steps cost by their width (nodes per row), for drafters that choose the width."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from hf_specdec.control.costs import StepCosts
from hf_specdec.control.merge_policy import StepCostFunction
from hf_specdec.trees.draft import Budget
from hf_specdec.verification.step import Step, StepSeconds


class CostModelController:
    """Controller that leaves the width of each tree to the drafter, which gets the step costs learned here.

    Args:
        limits: The drafter's largest tree.
        costs: The costs of a step; updated, and kept by the caller for later calls.
    """

    def __init__(self, limits: Budget, costs: StepCosts) -> None:
        self._limits, self._costs = limits, costs
        self._share = 1.0  # rows that take part in the next step, as a fraction of the batch
        self.step_costs: StepCostFunction | None = lambda: costs.table(self._share)
        self._widths = list[int]()
        self._tokens = self._lost = self._seconds = 0.0

    def next(self) -> Budget:
        """Return the limits, with at most as many nodes as the widest tree whose cost was measured."""
        return replace(self._limits, num_nodes=min(self._limits.num_nodes, self._costs.max_width))

    def observe(self, step: Step, seconds: StepSeconds) -> None:
        """Count the step; correct the costs by its time without drafting, unless that contains one-time work."""
        width, plain = step.draft.tree.num_nodes, self._costs.plain
        self._share = seconds.active_share
        if seconds.usual:
            self._costs.observe(width, seconds.verify + seconds.rest, self._share)
        active = [count for count in step.acceptance.counts if count]
        taken, per_row = seconds.draft + seconds.verify + seconds.rest, sum(active) / max(len(active), 1)
        self._widths.append(width)
        self._tokens += per_row
        self._seconds += taken
        self._lost += max(0.0, taken - per_row * plain)

    def report(self) -> dict[str, Any]:
        """Return the widths of all steps, the fraction and cost of plain steps, `gain` and `seconds_lost`.

        `gain` is the speed-up over plain steps; 1.0 if there were no steps. `seconds_lost` adds up the time by which
        steps took longer than plain steps for the same tokens would have.
        """
        plain, widths = self._costs.plain, Counter(self._widths)
        return {
            "controller": "cost_model", "widths": dict(sorted(widths.items())), "width_by_step": list(self._widths),
            "plain_steps": widths[1] / len(self._widths) if self._widths else 0.0,
            "plain_step_seconds": plain,
            "gain": self._tokens * plain / self._seconds if self._seconds else 1.0,
            "seconds_lost": self._lost,
        }  # fmt: skip
