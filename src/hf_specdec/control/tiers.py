"""Tiers: the drafted depth follows a moving average of accepted drafts, as in SGLang.

Source: SGLang's adaptive speculative decoding (`adaptive_spec_params.py`, https://github.com/sgl-project/sglang).
    After a warm-up the average picks one of a few depths every few steps, with hysteresis against oscillation.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from hf_specdec.config import AdaptiveConfig
from hf_specdec.control.merge_policy import StepCostFunction
from hf_specdec.errors import InvalidConfigError
from hf_specdec.trees.draft import Budget
from hf_specdec.verification.step import Step, StepSeconds

MARGIN = 0.5
"""In accepted drafts (SGLang's value). The tier below is chosen if the average is this far below that tier's depth,
the tier above if the average is at most this far below the current depth; hysteresis shifts both."""


class TierController:
    """Switches between the depths of `candidate_steps`; trees shrink with the depth.

    Args:
        config: The policy.
        limits: The drafter's largest tree, used by the deepest tier.

    Raises:
        InvalidConfigError: No tier is within the limits.
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
        self._average = float(max(self._depth - 1, 0))
        self._batches, self._used = 0, Counter[int]()

    @property
    def _depth(self) -> int:
        return self.tiers[self._index].num_steps

    def next(self) -> Budget:
        """Return the budget of the current tier."""
        return self.tiers[self._index]

    def observe(self, step: Step, seconds: StepSeconds) -> None:
        """Update the average of accepted drafts per row; choose a tier every `update_interval` steps."""
        accepted = [count - 1 for count in step.acceptance.counts if count]
        if not accepted:
            return
        self._used[self._depth] += 1
        weight = self._config.ema_alpha
        self._average += weight * (sum(accepted) / len(accepted) - self._average)
        self._batches += 1
        since = self._batches - self._config.warmup_batches
        if since >= 0 and since % self._config.update_interval == 0:
            self._decide()

    def _decide(self) -> None:
        """Move down while the average is below the tier below, otherwise up while it fills the current tier."""
        before, average = self._index, self._average
        down, up = self._config.down_hysteresis - MARGIN, self._config.up_hysteresis - MARGIN
        while self._index and average <= self.tiers[self._index - 1].num_steps + down:
            self._index -= 1
        if self._index == before:
            while self._index + 1 < len(self.tiers) and average > self._depth + up:
                self._index += 1

    def report(self) -> dict[str, Any]:
        """Return the steps by tier, the current tier and the average of accepted drafts."""
        return {
            "controller": "tiers", "candidate_steps": [tier.num_steps for tier in self.tiers], "tier": self._depth,
            "steps_by_tier": dict(sorted(self._used.items())), "average_accepted": self._average,
        }  # fmt: skip


def tier_budget(num_steps: int, limits: Budget) -> Budget:
    """Return the budget of a depth, with as many nodes per level as the largest tree has.

    Example: of limits (16, 5, 4) the tier of 2 steps is (7, 2, 4): three nodes per level and the root.
    """
    per_level = -(-(limits.num_nodes - 1) // limits.num_steps)
    return Budget(min(limits.num_nodes, 1 + per_level * num_steps), num_steps, limits.top_k)
