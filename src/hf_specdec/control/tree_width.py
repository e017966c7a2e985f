"""Choose how many nodes of a merged tree to verify: the width with the most expected progress per second.

The *path probability* of a node is the probability that it is accepted: the product of the probabilities on its path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hf_specdec.control.constants import MIN_BATCH_GAIN, SLOW_ROW_POWER


@dataclass(frozen=True, slots=True)
class Width:
    """A number of nodes per row, and what a step that verifies them is expected to yield and to take."""

    num_nodes: int  # root included
    tokens: float  # expected, summed over rows
    progress: float  # expected tokens, with more weight on rows that gain few, see `best_width`
    seconds: float  # of the step, drafting included

    @property
    def rate(self) -> float:
        """Expected progress per second."""
        return self.progress / self.seconds


class StopRule:
    """Rule that decides, while one row's tree grows, whether a larger tree could still be faster.

    Nodes are added in order of falling path probability. Growth stops once a larger tree would not be faster even if
    all further nodes were as likely as the next one.

    Args:
        costs: Seconds of a step that verifies 1, 2, ... nodes.
        draft_seconds: Seconds of drafting.
    """

    def __init__(self, costs: Sequence[float], draft_seconds: float) -> None:
        self._seconds = [cost + draft_seconds for cost in costs]
        self._width, self._tokens = 1, 1.0
        self._best_rate = 1.0 / self._seconds[0]

    def add(self, probability: float) -> None:
        """Count one more node with this path probability."""
        self._width += 1
        self._tokens += probability
        self._best_rate = max(self._best_rate, self._tokens / self._seconds[self._width - 1])

    def may_pay(self, probability: float) -> bool:
        """Whether some larger tree beats the best one so far, if every further node has this path probability."""
        tokens = self._tokens
        for seconds in self._seconds[self._width :]:
            tokens += probability
            if tokens > self._best_rate * seconds:
                return True
        return False


def best_width(rows: Sequence[Sequence[float]], costs: Sequence[float], draft_seconds: float) -> Width:
    """Return the width with the most expected progress per second.

    For one row, progress is 1 + the sum of the drafted nodes' path probabilities; divided by the seconds, this is the
    goodput of TurboSpec (https://arxiv.org/abs/2406.14066), here optimised node by node. For several rows, progress is
    the number of rows times a power mean of their expected tokens that is close to the smallest: a batch ends with its
    slowest row. With several rows, drafting must be more than `MIN_BATCH_GAIN` times as fast as a plain step.

    Args:
        rows: Path probabilities of each active row's nodes, root first, in falling order. All rows are verified at one
            width.
        costs: Seconds of a step that verifies 1, 2, ... nodes per row.
        draft_seconds: Seconds of drafting.
    """
    count, expected = len(rows), [1.0] * len(rows)
    best = Width(1, float(count), float(count), costs[0] + draft_seconds)
    for width in range(2, 1 + min(len(costs), max(map(len, rows)))):
        for index, row in enumerate(rows):
            if len(row) >= width:
                expected[index] += row[width - 1]
        mean = (sum(tokens**-SLOW_ROW_POWER for tokens in expected) / count) ** (-1 / SLOW_ROW_POWER)
        wider = Width(width, sum(expected), count * mean, costs[width - 1] + draft_seconds)
        required = MIN_BATCH_GAIN if count > 1 and best.num_nodes == 1 else 1.0
        if wider.rate > required * best.rate:
            best = wider
    return best
