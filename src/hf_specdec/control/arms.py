"""Choose between drafting and plain decoding by the tokens per second that each has really reached.

A two-armed bandit, in addition to the cost model: what the model leaves out (querying, bookkeeping, other load) counts
here. Steps are grouped into stretches of one arm. While plain decoding wins, drafting is tried again after pauses that
double; while drafting wins by little, plain decoding is tried now and then.
"""

from __future__ import annotations

from typing import Literal

from hf_specdec.control.constants import (
    ARM_MARGIN,
    ARM_SMOOTHING,
    CLEAR_GAIN,
    MAX_PLAIN_STEPS,
    MAX_SURPRISE,
    PLAIN_TRIAL_STEPS,
    RETRIAL_STEPS,
    STRETCH_STEPS,
)

Arm = Literal["drafting", "plain"]


class ArmGains:
    """What is known about both arms at one batch size and in one execution mode, kept across calls.

    *Gain*: tokens per second, relative to those of plain steps as the cost model expects them. The relation makes
    stretches comparable although texts grow and rows leave.

    Attributes:
        gains: Moving average of each arm's gain; at first, plain decoding has 1 and drafting is unknown.
        pause: Plain steps of the next stretch of plain decoding.
        plain_steps: Plain steps left until drafting is tried again; 0 during a stretch of drafting.
        since_plain: Drafting steps since a stretch of plain decoding.
    """

    def __init__(self) -> None:
        self.gains: dict[Arm, float | None] = {"drafting": None, "plain": 1.0}
        self.pause, self.plain_steps, self.since_plain = STRETCH_STEPS, 0, 0
        self._stretches: dict[Arm, int] = {"drafting": 0, "plain": 1}

    def learn(self, arm: Arm, gain: float) -> None:
        """Add a stretch to the average gain of an arm: the arithmetic mean at first, then a moving average.

        Gains below 1 / `MAX_SURPRISE` count as that: other load has slowed the stretch down.
        """
        known, gain = self.gains[arm], max(gain, 1 / MAX_SURPRISE)
        self._stretches[arm] += 1
        weight = max(ARM_SMOOTHING, 1 / self._stretches[arm])
        self.gains[arm] = gain if known is None else known + weight * (gain - known)

    def advantage(self) -> float:
        """Return the gain of drafting relative to that of plain decoding; 1 if it is unknown."""
        drafting, plain = self.gains["drafting"], self.gains["plain"]
        return 1.0 if drafting is None or not plain else drafting / plain


class Arms:
    """The arm of each step of one generation.

    Args:
        known: What earlier calls have learned; updated.
    """

    def __init__(self, known: ArmGains) -> None:
        self._known = known
        self._steps = 0  # of this stretch
        self._progress = self._seconds = 0.0  # of this stretch

    @property
    def arm(self) -> Arm:
        """The arm of the next step."""
        return "plain" if self._known.plain_steps else "drafting"

    def observe(self, tokens: float, seconds: float, plain_seconds: float) -> None:
        """Count a step of the current arm; at the end of a stretch, choose the next arm.

        Args:
            tokens: Tokens emitted per row that took part.
            seconds: Duration of the step, drafting included.
            plain_seconds: Expected duration of a plain step of the same rows.
        """
        known, arm = self._known, self.arm
        self._progress += tokens * plain_seconds
        self._seconds += seconds
        self._steps += 1
        if arm == "plain":
            known.plain_steps = max(known.plain_steps - 1, 0)  # another thread may share what is known
            if known.plain_steps:
                return
            known.pause, known.since_plain = min(2 * known.pause, MAX_PLAIN_STEPS), 0
        else:
            known.since_plain += 1
            if self._steps < (RETRIAL_STEPS if known.pause > STRETCH_STEPS else STRETCH_STEPS):
                return
        if self._seconds:
            known.learn(arm, self._progress / self._seconds)
        self._steps, self._progress, self._seconds = 0, 0.0, 0.0
        if arm == "drafting":
            known.plain_steps = self._next_plain_steps()

    def _next_plain_steps(self) -> int:
        """Return how many plain steps follow a stretch of drafting."""
        known, advantage = self._known, self._known.advantage()
        if advantage < 1 - ARM_MARGIN:
            return known.pause
        known.pause = STRETCH_STEPS
        return STRETCH_STEPS if advantage < CLEAR_GAIN and known.since_plain >= PLAIN_TRIAL_STEPS else 0
