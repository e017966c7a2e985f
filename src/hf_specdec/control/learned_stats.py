"""Statistics that merged drafting learns with a model and keeps across calls; they affect only the speed."""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from hf_specdec.control.constants import FADED_HITS, INITIAL_TRUST, TRUST_CLASSES, TRUST_MEMORY, TRUST_WEIGHT
from hf_specdec.control.head_schedule import HeadSchedule

Trust = tuple[float, ...]
"""Factors for a source's probabilities, by class, see `trust_class`."""
UNKNOWN: Trust = (INITIAL_TRUST,) * (len(TRUST_CLASSES) + 1)
"""Trust in a source that was never observed."""


def trust_class(probability: float) -> int:
    """Return the index of a probability's class in a `Trust`."""
    return bisect_right(TRUST_CLASSES, probability)


class LearnedStats:
    """What merged drafting has learned: a schedule for each head, and how often each source is right.

    A *source* is one of the merged drafters. Its *hits* are the positions at which it proposed the emitted token. They
    are counted by class of the probability that the source gave the token.

    Attributes:
        schedules: Schedule of each head, by name and batch size.
    """

    def __init__(self) -> None:
        self.schedules: dict[tuple[str, int], HeadSchedule] = {}
        # by source: expected and actual hits of each class; old ones fade
        self._hits: dict[str, list[tuple[float, float]]] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of everything learned."""
        return copy.deepcopy(vars(self))

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Restore a copy made by `state_dict`, in place; None resets."""
        vars(self).update(copy.deepcopy(state) if state is not None else vars(LearnedStats()))

    def fade(self) -> None:
        """Reduce the weight of gains and hits, because the target's weights have changed; costs stay."""
        self._hits = {
            name: [(FADED_HITS * expected, FADED_HITS * hits) for expected, hits in classes]
            for name, classes in self._hits.items()
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

    def trust(self, source: str) -> Trust:
        """Return the factors for a source's probabilities: the ratios of its hits to its expected hits, smoothed.

        The guess for a class comes from the other classes.
        """
        classes = self._hits.get(source)
        if classes is None:
            return UNKNOWN
        total, found = sum(expected for expected, _ in classes), sum(hits for _, hits in classes)
        guesses = [_ratio(total - expected, found - hits, INITIAL_TRUST) for expected, hits in classes]
        return tuple(_ratio(*counts, guess) for counts, guess in zip(classes, guesses, strict=True))

    def count(self, source: str, candidates: Sequence[tuple[int, float]], emitted: int) -> None:
        """Count one emitted position at which a source had candidates.

        Args:
            source: Name of the source.
            candidates: Token and probability of each of its candidates there.
            emitted: The emitted token.
        """
        before = self._hits.get(source) or [(0.0, 0.0)] * len(UNKNOWN)
        classes = [(TRUST_MEMORY * expected, TRUST_MEMORY * hits) for expected, hits in before]
        for token, probability in candidates:
            index = trust_class(probability)
            expected, hits = classes[index]
            classes[index] = expected + probability, hits + (token == emitted)
        self._hits[source] = classes


def _ratio(expected: float, hits: float, guess: float) -> float:
    return (hits + TRUST_WEIGHT * guess) / (expected + TRUST_WEIGHT)
