"""Controllers, which decide the budget of every step of one generation: fixed, by tiers, or by the costs of steps."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from typing import Any, Protocol

from hf_specdec.config import AdaptiveConfig
from hf_specdec.control.costs import Arm, Arms, StepCosts
from hf_specdec.errors import InvalidConfigError
from hf_specdec.trees.draft import PLAIN_STEP, Budget, StepCostFunction
from hf_specdec.verification.step import Step


class Controller(Protocol):
    """Protocol of the object that decides the budget of every step.

    Attributes:
        step_costs: Function that returns the costs of a step, for drafters that need them; None: unknown.
    """

    step_costs: StepCostFunction | None

    def next(self) -> Budget:
        """Return the budget of the next step, within the drafter's limits; one node is a plain step."""

    def observe(self, step: Step) -> None:
        """Learn from a step."""

    def report(self) -> dict[str, Any]:
        """Return a summary of its decisions as JSON-serialisable values, for `SpeculationStats.control`."""


class FixedController:
    """Controller with the same budget in every step."""

    step_costs: StepCostFunction | None = None

    def __init__(self, budget: Budget) -> None:
        self.budget = budget

    def next(self) -> Budget:
        """Return the fixed budget."""
        return self.budget

    def observe(self, step: Step) -> None:
        """Ignore the step."""

    def report(self) -> dict[str, Any]:
        """Return the controller's name ("fixed") and the three sizes of the budget."""
        budget = self.budget
        sizes = {"num_nodes": budget.num_nodes, "num_steps": budget.num_steps, "top_k": budget.top_k}
        return {"controller": "fixed", **sizes}


class TierController:
    """Controller that switches between the depths of `candidate_steps` by a moving average of accepted tokens.

    It starts with the middle depth, or the higher of the two middle ones, and decides every few steps after a warm-up,
    with hysteresis against oscillation. Source: SGLang's adaptive speculative decoding (`adaptive_spec_params.py`,
    https://github.com/sgl-project/sglang).

    Args:
        config: The depths, and when to switch.
        limits: The drafter's largest tree; deeper candidates are ignored.
    """

    step_costs: StepCostFunction | None = None

    def __init__(self, config: AdaptiveConfig, limits: Budget) -> None:
        self._config = config
        self.tiers = [tier_budget(steps, limits) for steps in config.candidate_steps if steps <= limits.num_steps]
        if not self.tiers:
            raise InvalidConfigError(
                f"All of candidate_steps={config.candidate_steps} exceed the drafter's {limits.num_steps} steps.",
                "Give smaller depths, or increase num_steps.",
            )
        self._index = len(self.tiers) // 2
        self._average = float(max(self.next().num_steps - 1, 0))
        self._batches = 0
        self._used = Counter[int]()

    def next(self) -> Budget:
        """Return the budget of the current tier."""
        return self.tiers[self._index]

    def observe(self, step: Step) -> None:
        """Update the average of accepted drafted tokens per row, and choose a tier if a decision is due.

        Without hysteresis, the next lower tier is chosen if the average is at most its depth - 0.5 (SGLang's margin),
        the next higher one if the average exceeds the current depth - 0.5. Steps without active rows do not count.
        """
        config, accepted = self._config, [count - 1 for count in step.acceptance.counts if count]
        if not accepted:
            return
        self._used[self.next().num_steps] += 1
        self._average += config.ema_alpha * (sum(accepted) / len(accepted) - self._average)
        self._batches += 1
        since = self._batches - config.warmup_batches
        if since < 0 or since % config.update_interval:
            return
        before, average, depths = self._index, self._average, [tier.num_steps for tier in self.tiers]
        while self._index and average <= depths[self._index - 1] + config.down_hysteresis - 0.5:
            self._index -= 1
        if self._index == before:
            while self._index + 1 < len(depths) and average > depths[self._index] + config.up_hysteresis - 0.5:
                self._index += 1

    def report(self) -> dict[str, Any]:
        """Return the number of steps in each tier, the current tier and the average of accepted drafted tokens."""
        return {
            "controller": "tiers",
            "candidate_steps": [tier.num_steps for tier in self.tiers],
            "tier": self.next().num_steps,
            "steps_by_tier": dict(sorted(self._used.items())),
            "average_accepted": self._average,
        }


def tier_budget(num_steps: int, limits: Budget) -> Budget:
    """Return the budget of a depth, with as many nodes per level as the largest tree has on average (rounded up).

    Example: with limits (16, 5, 4) the budget of 2 steps is (7, 2, 4): three nodes per level and the root.
    """
    per_level = -(-(limits.num_nodes - 1) // limits.num_steps)
    return Budget(min(limits.num_nodes, 1 + per_level * num_steps), num_steps, limits.top_k)


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

    def observe(self, step: Step) -> None:
        """Count the step; correct the costs by its time without drafting, unless that contains one-time work.

        The first step of all counts as such, because torch prepares its products.
        """
        width, seconds = step.draft.tree.num_nodes, step.seconds
        is_reference = not self._costs.is_plain_known  # one of the first steps: what plain steps take is not known yet
        arm: Arm = "plain" if is_reference else self._arms.arm
        plain = self._costs.plain_seconds(seconds.active_share)
        is_usual = seconds.usual and not (is_reference and not self._widths)
        if is_usual:
            self._costs.observe(width, seconds.verify + seconds.rest, seconds.active_share)
        active = [count for count in step.acceptance.counts if count]
        taken, per_row = seconds.draft + seconds.verify + seconds.rest, sum(active) / max(len(active), 1)
        self._share = seconds.active_share
        self._widths.append(width)
        self._tokens[arm] += per_row
        self._emitted[arm] += sum(active)
        self._seconds[arm] += taken
        if not is_reference:
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
            "controller": "cost_model",
            "widths": dict(sorted(widths.items())),
            "width_by_step": list(self._widths),
            "plain_steps": widths[1] / len(self._widths) if self._widths else 0.0,
            "plain_step_seconds": plain,
            "gain": tokens * plain / seconds if seconds and plain else 1.0,
            "seconds_lost": self._lost,
            "tokens_per_second": {
                arm: self._emitted[arm] / self._seconds[arm] if self._seconds[arm] else None for arm in arms
            },
        }
