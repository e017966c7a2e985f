"""Choose the drafted depth from a few candidates (tiers) by a moving average of accepted tokens, as in SGLang.

Source: SGLang's adaptive speculative decoding (`adaptive_spec_params.py`, https://github.com/sgl-project/sglang).
    A decision is made every few steps after a warm-up, with hysteresis against oscillation.
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
"""Margin in accepted drafted tokens (SGLang's value). Without hysteresis, the next lower tier is chosen if the average
is at most its depth - `MARGIN`, the next higher tier if the average exceeds the current depth - `MARGIN`."""


class TierController:
    """Controller that switches between the depths of `candidate_steps`; each has a tree size, see `tier_budget`.

    It starts with the middle depth, or the higher of the two middle ones.

    Args:
        config: The depths, and when to switch.
        limits: The drafter's largest tree; deeper candidates are ignored.

    Raises:
        InvalidConfigError: All candidates are deeper than the limits.
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
        """Update the average of accepted drafted tokens per row, and choose a tier if a decision is due.

        Decisions are made after `warmup_batches` steps and then every `update_interval` steps; steps without active
        rows do not count.
        """
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
        """Move to lower tiers while the average is too low, otherwise to higher ones; see `MARGIN`."""
        before, average = self._index, self._average
        down, up = self._config.down_hysteresis - MARGIN, self._config.up_hysteresis - MARGIN
        while self._index and average <= self.tiers[self._index - 1].num_steps + down:
            self._index -= 1
        if self._index == before:
            while self._index + 1 < len(self.tiers) and average > self._depth + up:
                self._index += 1

    def report(self) -> dict[str, Any]:
        """Return the number of steps in each tier, the current tier and the average of accepted drafted tokens."""
        return {
            "controller": "tiers", "candidate_steps": [tier.num_steps for tier in self.tiers], "tier": self._depth,
            "steps_by_tier": dict(sorted(self._used.items())), "average_accepted": self._average,
        }  # fmt: skip


def tier_budget(num_steps: int, limits: Budget) -> Budget:
    """Return the budget of a depth, with as many nodes per level as the largest tree has on average (rounded up).

    Example: with limits (16, 5, 4) the budget of 2 steps is (7, 2, 4): three nodes per level and the root.
    """
    per_level = -(-(limits.num_nodes - 1) // limits.num_steps)
    return Budget(min(limits.num_nodes, 1 + per_level * num_steps), num_steps, limits.top_k)
