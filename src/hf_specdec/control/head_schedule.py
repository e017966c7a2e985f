"""Whether to ask a head for its draft, and for how many levels: by what asking has brought so far.

A head costs a forward per level. What it brings depends on what is drafted without it: beside a long match there is
little left to add.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hf_specdec.drafters.candidates import Width

SMOOTHING = 0.05
"""Weight of the newest step in a moving average."""
QUICKER = 0.3
"""Weight of a time below the average: what disturbs, and what is done for the first time, takes longer."""
FIRST_ASKED = 3
"""Steps in which an option is tried in any case, to learn what it costs."""
SHORTEST_REST, LONGEST_REST = 8, 256
"""Steps after which an option is tried although it does not pay; the rest doubles every time that it does not."""
TRIAL_SHARE = 0.02
"""Fraction of the time that trials may take while no option pays; it ends the doubling. With 1 % a head that became
useful again was noticed after several hundred steps, with 3 % a useless head cost 4 % (`tests/test_policy.py`)."""
STALE_WEIGHT = 0.4
"""Largest weight of the first step after a rest: what was learned before it is of another text."""
PRIOR_GAIN, PRIOR_STEPS = 0.8, 4
"""Tokens that a head is thought to add where nothing is drafted without it, with the weight of so many steps."""
HOPED_GAIN = 1.5
"""Tokens per row that a head adds where it does well."""
COUNTED_TOKENS = 8.0
"""Expected tokens from which on a head is thought to add none."""


@dataclass(slots=True)
class QueryStats:
    """What asking for so many levels has brought: tokens per row, at further seconds, by what was expected without."""

    num_steps: int
    gains: dict[int, tuple[int, float]] = field(default_factory=dict)  # (times, moving average of tokens per row)
    seconds: float = 0.0  # of a step that asks, more than of one that does not
    asked: int = 0
    waited: int = 0  # steps since it was asked
    rest: int = SHORTEST_REST
    trials: int = FIRST_ASKED
    stale: int = 0  # steps before the current trial in which it was not asked

    def is_due(self, without: Width, rows: int, share: float) -> bool:
        """Whether to try it although it does not pay, or not best.

        The first trials need the hope that it could pay. Later ones come after a rest: what it seemed to cost may
        have been other load, and what it brought may have been another text.

        Args:
            without: What is expected without asking.
            rows: That go on.
            share: Fraction of the time that its trials may take at least; 0 lets the rest double to `LONGEST_REST`.
        """
        if self.asked < self.trials and self._rate(without, rows, HOPED_GAIN) > without.rate:
            return True
        longest = self.seconds / (share * without.seconds) if share else LONGEST_REST
        return self.waited > min(self.rest, max(longest, SHORTEST_REST))

    def rate(self, without: Width, rows: int) -> float:
        """Progress per second that asking is expected to bring."""
        expected = without.tokens / rows
        _, gain = self.gains.get(_kind(expected), (0, _prior(expected)))
        return self._rate(without, rows, gain)

    def _rate(self, without: Width, rows: int, gain: float) -> float:
        progress = without.progress * (without.tokens + rows * gain) / without.tokens
        return progress / (without.seconds + self.seconds)

    def learn(self, without: Width, with_it: Width, gained: float, rows: int) -> None:
        """It was asked: what came of it.

        Args:
            without, with_it: What was expected.
            gained: Tokens of all rows that came beyond what was expected without it.
            rows: That go on.
        """
        expected, self.asked = without.tokens / rows, self.asked + 1
        times, gain = self.gains.get(_kind(expected), (0, _prior(expected)))
        stale = min(1 - (1 - SMOOTHING) ** self.stale, STALE_WEIGHT)
        weight = max(SMOOTHING, 1 / (times + 1 + PRIOR_STEPS), stale)
        self.gains[_kind(expected)] = (times + 1, gain + weight * (gained / rows - gain))
        self.seconds = _toward(self.seconds, with_it.seconds - without.seconds, max(SMOOTHING, 1 / self.asked))


def _toward(known: float, seen: float, weight: float) -> float:
    """A moving average of times; what takes less than half of it shows that it was none of its own."""
    if seen < known / 2:
        return seen
    return known + (max(weight, QUICKER) if seen < known else weight) * (seen - known)


def _kind(expected: float) -> int:
    """Expected tokens in halves, from `COUNTED_TOKENS` on one class."""
    return int(2 * min(expected, COUNTED_TOKENS))


def _prior(expected: float) -> float:
    return PRIOR_GAIN * max(0.0, 1 - (expected - 1) / COUNTED_TOKENS)


class HeadSchedule:
    """Whether to ask a source, and for how many levels.

    What pays is asked; what does not is tried again after a rest that doubles every time that it still does not.

    Args:
        num_steps: The source's depth.
        stops_itself: Whether it stops where a level promises too little (`Budget.least`): then it is asked for all its
            levels, else for 1, 2, 4, ... of them, whichever has paid best.
    """

    def __init__(self, num_steps: int, *, stops_itself: bool = False) -> None:
        depths = {1 << power for power in range(num_steps.bit_length())} | {num_steps}
        self.options = [QueryStats(depth) for depth in sorted(depths)] if not stops_itself else [QueryStats(num_steps)]
        self.level_seconds = 0.0  # what a level takes, a moving average

    def inherit(self, known: HeadSchedule) -> None:
        """Expect for a row what was learned with batches of another size; what a step takes is to be learned anew."""
        for option, other in zip(self.options, known.options, strict=False):
            if option.num_steps == other.num_steps:
                option.gains, option.trials = dict(other.gains), 1

    def time_levels(self, levels: int, seconds: float) -> None:
        """What it took to draft so many levels."""
        taken = seconds / max(levels, 1)
        self.level_seconds = _toward(self.level_seconds, taken, SMOOTHING) if self.level_seconds else taken

    def choose(self, without: Width, rows: int) -> QueryStats | None:
        """The option for this step; None where asking does not pay.

        Args:
            without: What is expected without asking.
            rows: That go on.
        """
        for option in self.options:
            option.waited += 1
        best = max(self.options, key=lambda option: option.rate(without, rows))
        paying = best if best.rate(without, rows) > without.rate else None
        # if one option pays, only the depth is in question, and that can wait
        share = TRIAL_SHARE / len(self.options) if paying is None else 0.0
        others = (option for option in self.options if option is not paying)
        due = next((option for option in others if option.is_due(without, rows, share)), None)
        if due is not None and due.asked >= due.trials:
            due.rest *= 2
        chosen = due or paying
        if chosen is not None:
            chosen.stale, chosen.waited = chosen.waited, 0
            if chosen is paying:
                chosen.rest = SHORTEST_REST
        return chosen
