"""How often drafted edges of a class come true: counted on everything that is committed, kept with the model.

An edge belongs to a class (its source, the length of the match or the confidence, its rank). At every committed
position each source tells what it would have drafted there, whether or not it was asked to draft; the target's token
shows which of it was right. So a class is known well after a few hundred tokens, and nothing is drafted just to learn
(full information, as in HedgeSpec, https://arxiv.org/abs/2510.20064).
"""

from __future__ import annotations

from collections.abc import Hashable

PRIOR_WEIGHT = 8.0
"""A class that was never seen is what its source says, with the weight of so many edges."""
FORGETTING = 0.998
"""What is left of a count when its class is seen again: texts change."""


class Calibration:
    """Trials and hits by class of edge."""

    def __init__(self) -> None:
        self._counts: dict[Hashable, tuple[float, float]] = {}

    def probability(self, kind: Hashable, prior: float) -> float:
        """How likely an edge of the class is the target's choice, where the node above it was.

        Args:
            kind: The class.
            prior: What its source says.

        Example: 92 hits in 100 trials with a prior of 0.5 are (92 + 4) / (100 + 8), about 0.89.
        """
        trials, hits = self._counts.get(kind, (0.0, 0.0))
        return (hits + PRIOR_WEIGHT * prior) / (trials + PRIOR_WEIGHT)

    def count(self, kind: Hashable, hit: bool) -> None:
        """One edge of the class, and whether it was the target's choice."""
        trials, hits = self._counts.get(kind, (0.0, 0.0))
        self._counts[kind] = (FORGETTING * trials + 1, FORGETTING * hits + hit)

    def table(self) -> dict[Hashable, tuple[float, float]]:
        """Trials, with what was forgotten taken off, and the share of hits, by class."""
        return {kind: (trials, hits / trials) for kind, (trials, hits) in self._counts.items()}
