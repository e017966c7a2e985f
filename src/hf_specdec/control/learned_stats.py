"""Statistics that merged drafting learns with a model and keeps across calls; they affect only the speed."""

from __future__ import annotations

import copy
from typing import Any

from hf_specdec.control.constants import FADED_HITS, INITIAL_TRUST, TRUST_MEMORY, TRUST_WEIGHT
from hf_specdec.control.head_schedule import HeadSchedule


class LearnedStats:
    """What merged drafting has learned: a schedule for each head, and how often each source is right.

    A *source* is one of the merged drafters. Its *hits* are the positions at which it proposed the emitted token.

    Attributes:
        schedules: Schedule of each head, by name and batch size.
    """

    def __init__(self) -> None:
        self.schedules: dict[tuple[str, int], HeadSchedule] = {}
        self._hits: dict[str, tuple[float, float]] = {}  # expected and actual hits by source; old ones fade

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of everything learned."""
        return copy.deepcopy(vars(self))

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Restore a copy made by `state_dict`, in place; None resets."""
        vars(self).update(copy.deepcopy(state) if state is not None else vars(LearnedStats()))

    def fade(self) -> None:
        """Reduce the weight of gains and hits, because the target's weights have changed; costs stay."""
        self._hits = {
            name: (FADED_HITS * expected, FADED_HITS * hits) for name, (expected, hits) in self._hits.items()
        }
        for schedule in self.schedules.values():
            schedule.fade()

    def schedule(self, name: str, batch_size: int, num_steps: int, *, stops_itself: bool) -> HeadSchedule:
        """Return the schedule of a head, created if there is none for this batch size and depth.

        A new schedule starts with the gains of the head's schedule for another batch size or depth, if any; see
        `HeadSchedule.inherit`.

        Args:
            name: Name of the head's drafter.
            batch_size: Rows of the batch.
            num_steps, stops_itself: See `HeadSchedule`.
        """
        known = self.schedules.get((name, batch_size))
        if known is None or known.deepest.num_steps != num_steps:
            known = HeadSchedule(num_steps, stops_itself=stops_itself)
            others = [schedule for (other, _), schedule in self.schedules.items() if other == name]
            if others:
                known.inherit(others[-1])
            self.schedules[name, batch_size] = known
        return known

    def trust(self, source: str) -> float:
        """Return the factor for a source's probabilities: the ratio of its hits to its expected hits, smoothed."""
        expected, hits = self._hits.get(source, (0.0, 0.0))
        return (hits + TRUST_WEIGHT * INITIAL_TRUST) / (expected + TRUST_WEIGHT)

    def count(self, source: str, expected: float, hit: bool) -> None:
        """Count one emitted position at which a source had candidates.

        Args:
            source: Name of the source.
            expected: Summed probability of its candidates there.
            hit: Whether the emitted token was one of them.
        """
        before = self._hits.get(source, (0.0, 0.0))
        self._hits[source] = (TRUST_MEMORY * before[0] + expected, TRUST_MEMORY * before[1] + hit)
