"""Decide whether to query a draft head, and to which depth, from the gains and costs of earlier queries.

A head usually costs one forward per level. Its gain is the number of tokens that it adds to a step. If another source
has found a long match in the prompt, a head adds little; so gains are averaged separately for each class of the number
of tokens expected without the head.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hf_specdec.control.constants import (
    FADED_QUERIES,
    FASTER_SMOOTHING,
    FIRST_TRIALS,
    HEAD_SMOOTHING,
    MAX_PAUSE,
    MIN_PAUSE,
    PRIOR_GAIN,
    SATURATED_TOKENS,
    STALE_WEIGHT,
    TRIAL_SHARE,
)
from hf_specdec.control.tree_width import Width


@dataclass(slots=True)
class QueryStats:
    """Measured gain and cost of querying a head to one depth, and when to try this depth again."""

    num_steps: int
    gains: dict[int, tuple[int, float]] = field(default_factory=dict)  # by `_gain_class`: (queries, mean tokens a row)
    seconds: float = 0.0  # moving average of the time that a query adds to a step
    num_queries: int = 0
    waited: int = 0  # steps since the last query
    pause: int = MIN_PAUSE  # steps to wait before the next trial
    trials: int = FIRST_TRIALS  # number of first queries, made to measure gain and cost
    stale: int = 0  # steps from the previous query to the latest one

    def is_due(self, without: Width, rows: int, share: float) -> bool:
        """Whether to try this depth although it is not expected to be the fastest choice.

        The first trials are made if a good head could pay. Later ones follow a pause: the cost may have been measured
        under other load, and the gain on another kind of text.

        Args:
            without: The best width without the head.
            rows: Active rows.
            share: Fraction of the time that trials may take, which limits the pause; 0: `MAX_PAUSE` limits it.
        """
        if self.num_queries < self.trials and self._rate(without, rows, PRIOR_GAIN) > without.rate:
            return True
        longest = self.seconds / (share * without.seconds) if share else MAX_PAUSE
        return self.waited > min(self.pause, max(longest, MIN_PAUSE))

    def fade(self) -> None:
        """Give new queries more weight against the known gains, and let them come earlier; keep the cost."""
        self.gains = {place: (min(queries, FADED_QUERIES), gain) for place, (queries, gain) in self.gains.items()}
        self.pause = max(MIN_PAUSE, self.pause // 2)

    def rate(self, without: Width, rows: int) -> float:
        """Return the expected progress (see `Width`) per second of a step that queries the head to this depth."""
        expected = without.tokens / rows
        _, gain = self.gains.get(_gain_class(expected), (0, _prior_gain(expected)))
        return self._rate(without, rows, gain)

    def _rate(self, without: Width, rows: int, gain: float) -> float:
        progress = without.progress * (without.tokens + rows * gain) / without.tokens
        return progress / (without.seconds + self.seconds)

    def learn(self, without: Width, with_it: Width, gained: float, rows: int) -> None:
        """Update gain and cost after a step with a query.

        Args:
            without, with_it: The best widths without and with the head's draft.
            gained: Emitted tokens of all rows beyond those expected without the head; may be negative.
            rows: Active rows.
        """
        expected, self.num_queries = without.tokens / rows, self.num_queries + 1
        queries, gain = self.gains.get(_gain_class(expected), (0, _prior_gain(expected)))
        stale = min(1 - (1 - HEAD_SMOOTHING) ** self.stale, STALE_WEIGHT)
        weight = max(HEAD_SMOOTHING, 1 / (queries + 2), stale)
        self.gains[_gain_class(expected)] = (queries + 1, gain + weight * (gained / rows - gain))
        seconds = with_it.seconds - without.seconds
        self.seconds = _average_time(self.seconds, seconds, max(HEAD_SMOOTHING, 1 / self.num_queries))


def _average_time(average: float, seconds: float, weight: float) -> float:
    """Return a moving average of times, updated by one measurement.

    A measurement below half the average replaces it: the average was inflated by other load.
    """
    if seconds < average / 2:
        return seconds
    return average + (max(weight, FASTER_SMOOTHING) if seconds < average else weight) * (seconds - average)


def _gain_class(expected: float) -> int:
    """Return the class of an expected number of tokens per row: 2 in [1.0, 1.5), 3 in [1.5, 2.0), ..., 16 from 8.0."""
    return int(2 * min(expected, SATURATED_TOKENS))


def _prior_gain(expected: float) -> float:
    return PRIOR_GAIN * max(0.0, 1 - (expected - 1) / SATURATED_TOKENS)


class HeadSchedule:
    """Schedule that decides in every step whether to query a head, and to which depth.

    The depth with the most expected progress per second is queried if that exceeds the rate without a query. Other
    depths are tried a few times at first, and again after pauses that double with each trial until the depth pays.

    Args:
        num_steps: The head's depth.
        stops_itself: Whether the head stops at unlikely levels (`Budget.min_level_probability`): then the full depth
            is the only option, otherwise 1, 2, 4, ... levels and the full depth are.
    """

    def __init__(self, num_steps: int, *, stops_itself: bool = False) -> None:
        depths = {1 << power for power in range(num_steps.bit_length())} | {num_steps}
        self.options = [QueryStats(depth) for depth in sorted(depths)] if not stops_itself else [QueryStats(num_steps)]
        self.level_seconds = 0.0  # moving average of drafting one level; 0.0: not measured yet

    @property
    def deepest(self) -> QueryStats:
        """The statistics of the full depth."""
        return self.options[-1]

    def inherit(self, other: HeadSchedule) -> None:
        """Copy the gains learned at another batch size; costs are measured again, in one first trial per depth."""
        for option, known in zip(self.options, other.options, strict=False):
            if option.num_steps == known.num_steps:
                option.gains, option.trials = dict(known.gains), 1

    def fade(self) -> None:
        """Reduce the weight of the known gains, because the target's weights have changed."""
        for option in self.options:
            option.fade()

    def time_levels(self, levels: int, seconds: float) -> None:
        """Update the average time per level, given the seconds of a draft of this many levels."""
        per_level = seconds / max(levels, 1)
        known = self.level_seconds
        self.level_seconds = _average_time(known, per_level, HEAD_SMOOTHING) if known else per_level

    def choose(self, without: Width, rows: int) -> QueryStats | None:
        """Choose the depth to query in this step, and update waiting times and pauses; call at most once per step.

        Args:
            without: The best width without the head.
            rows: Active rows.

        Returns:
            The statistics of that depth; None: do not query.
        """
        for option in self.options:
            option.waited += 1
        best = max(self.options, key=lambda option: option.rate(without, rows))
        paying = best if best.rate(without, rows) > without.rate else None
        # if some depth pays, trials can only find a better depth, so they are rare
        share = TRIAL_SHARE / len(self.options) if paying is None else 0.0
        others = (option for option in self.options if option is not paying)
        due = next((option for option in others if option.is_due(without, rows, share)), None)
        if due is not None and due.num_queries >= due.trials:
            due.pause *= 2
        chosen = due or paying
        if chosen is not None:
            chosen.stale, chosen.waited = chosen.waited, 0
            if chosen is paying:
                chosen.pause = MIN_PAUSE
        return chosen
