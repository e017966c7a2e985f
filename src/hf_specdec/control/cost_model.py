"""The cost model: a step is as wide as pays by expected tokens per second, and plain where nothing pays.

It tells what a step costs (`Budget.costs`); how likely the nodes are, the drafter knows, and it drafts as many as pay.
The same objective as TurboSpec's goodput (https://arxiv.org/abs/2406.14066), node by node.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from hf_specdec.control.costs import StepCosts
from hf_specdec.trees.draft import Budget
from hf_specdec.verification.step import Step, StepSeconds


class CostModelController:
    """Every step within the drafter's limits, at known costs.

    Args:
        limits: The drafter's largest tree.
        costs: What a step takes; kept for the next calls by whoever made it.
    """

    def __init__(self, limits: Budget, costs: StepCosts) -> None:
        self._limits, self._costs = limits, costs
        self._widths = list[int]()
        self._tokens = self._lost = self._seconds = 0.0

    def next(self) -> Budget:
        """See `Controller`."""
        costs = self._costs.table()
        return replace(self._limits, num_nodes=min(self._limits.num_nodes, len(costs)), costs=costs)

    def observe(self, step: Step, seconds: StepSeconds) -> None:
        """Correct the costs by what the step took."""
        width, plain = step.draft.tree.num_nodes, self._costs.plain
        if seconds.usual:
            self._costs.observe(width, seconds.verify + seconds.rest)
        going = [count for count in step.acceptance.counts if count]
        taken, per_row = seconds.draft + seconds.verify + seconds.rest, sum(going) / max(len(going), 1)
        self._widths.append(width)
        self._tokens += per_row
        self._seconds += taken
        self._lost += max(0.0, taken - per_row * plain)

    def report(self) -> dict[str, Any]:
        """Widths of the steps, what they brought over plain steps, and the time of those that brought less."""
        plain, widths = self._costs.plain, Counter(self._widths)
        return {
            "controller": "cost_model", "widths": dict(sorted(widths.items())), "width_by_step": list(self._widths),
            "plain_steps": widths[1] / len(self._widths) if self._widths else 0.0,
            "plain_step_seconds": plain,
            "gain": self._tokens * plain / self._seconds if self._seconds else 1.0,
            "seconds_lost": self._lost,
        }  # fmt: skip
