"""Controller that learns what steps cost by their width (nodes per row), for drafters that choose the width."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from typing import Any

from hf_specdec.control.arms import Arm, Arms
from hf_specdec.control.costs import StepCosts
from hf_specdec.control.merge_policy import StepCostFunction
from hf_specdec.trees.draft import PLAIN_STEP, Budget
from hf_specdec.verification.step import Step, StepSeconds


class CostModelController:
    """Controller that leaves the width of each tree to the drafter, which gets the step costs learned here.

    Whether to draft at all is decided by `Arms`, from the speed that drafting and plain decoding have reached.

    Args:
        limits: The drafter's largest tree.
        costs: The costs of a step; updated, and kept by the caller for later calls.
    """

    def __init__(self, limits: Budget, costs: StepCosts) -> None:
        self._limits, self._costs, self._arms = limits, costs, Arms(costs.arms)
        self._share = 1.0  # rows that take part in the next step, as a fraction of the batch
        self.step_costs: StepCostFunction | None = lambda: costs.table(self._share)
        self._widths = list[int]()
        self._lost = 0.0
        # by arm: tokens per row that took part, tokens of all rows, seconds
        self._tokens, self._emitted, self._seconds = (defaultdict[Arm, float](float) for _ in range(3))

    def next(self) -> Budget:
        """Return a plain step, or the limits with at most as many nodes as `StepCosts.widest_trial`.

        Without a timed plain step, steps are plain until one is timed: the second, because the first contains
        one-time work.
        """
        if self._arms.arm == "plain" or not self._costs.is_plain_known:
            return PLAIN_STEP
        return replace(self._limits, num_nodes=min(self._limits.num_nodes, self._costs.widest_trial))

    def observe(self, step: Step, seconds: StepSeconds) -> None:
        """Count the step; correct the costs by its time without drafting, unless that contains one-time work.

        The first step of all counts as such, because torch prepares its products.
        """
        width, share = step.draft.tree.num_nodes, seconds.active_share
        is_reference = not self._costs.is_plain_known
        arm: Arm = "plain" if is_reference else self._arms.arm
        plain = self._costs.plain_seconds(share)
        self._share = share
        is_usual = seconds.usual and not (is_reference and not self._widths)
        if is_usual:
            self._costs.observe(width, seconds.verify + seconds.rest, share)
        active = [count for count in step.acceptance.counts if count]
        taken, per_row = seconds.draft + seconds.verify + seconds.rest, sum(active) / max(len(active), 1)
        self._widths.append(width)
        self._tokens[arm] += per_row
        self._emitted[arm] += sum(active)
        self._seconds[arm] += taken
        if is_reference:  # one of the first steps, see `next`; what plain steps take is not known yet
            return
        self._lost += max(0.0, taken - per_row * plain)
        if is_usual:
            self._arms.observe(per_row, taken, plain)

    def report(self) -> dict[str, Any]:
        """Return the widths of all steps, the fraction and cost of plain steps, and how both arms did.

        `gain` is the speed-up over plain steps; 1.0 if there were no steps, or if no plain step was timed yet: then
        `plain_step_seconds` is None. `seconds_lost` adds up the time by which steps took longer than plain steps for
        the same tokens would have. `tokens_per_second` has an entry for `"drafting"` and one for `"plain"`, of all
        rows together; None for an arm without steps.
        """
        plain = self._costs.plain if self._costs.is_plain_known else None
        widths = Counter(self._widths)
        seconds, tokens = sum(self._seconds.values()), sum(self._tokens.values())
        arms: tuple[Arm, ...] = ("drafting", "plain")
        return {
            "controller": "cost_model", "widths": dict(sorted(widths.items())), "width_by_step": list(self._widths),
            "plain_steps": widths[1] / len(self._widths) if self._widths else 0.0,
            "plain_step_seconds": plain,
            "gain": tokens * plain / seconds if seconds and plain else 1.0,
            "seconds_lost": self._lost,
            "tokens_per_second": {
                arm: self._emitted[arm] / self._seconds[arm] if self._seconds[arm] else None for arm in arms
            },
        }  # fmt: skip
