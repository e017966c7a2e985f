"""Measure how accurate a head is at each depth: its first drafted token, its second, and so on.

Tau is the mean number of tokens per target forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True, slots=True)
class Counts:
    """Numbers of correct drafted tokens at each of K depths, of a batch or summed over batches and processes."""

    right: Tensor  # [K, R] positions at which the r-th best drafted token is the target's greedy choice
    counted: Tensor  # [K] positions at which that was measured
    accepted: Tensor  # [K] those of `chains` whose best drafted token is the greedy choice here and at earlier depths
    chains: Tensor  # [K] measured positions at which the text is the greedy choice at all earlier depths

    @classmethod
    def of(cls, packed: Tensor) -> Counts:
        """Create the counts from a tensor `[K, 3 + R]` returned by `packed`, or from a sum of such tensors."""
        return cls(packed[:, 3:], packed[:, 0], packed[:, 1], packed[:, 2])

    def packed(self) -> Tensor:
        """Return the counts as one tensor `[K, 3 + R]`."""
        return torch.cat([torch.stack([self.counted, self.accepted, self.chains], dim=1), self.right], dim=1)

    @property
    def accuracies(self) -> tuple[tuple[float, ...], ...]:
        """For each of K depths, the fractions of positions at which the r-th best of R drafted tokens is correct.

        They are 0.0 at a depth at which nothing was measured.
        """
        return tuple(map(tuple, (self.right.double() / self.counted[:, None].clamp(min=1)).tolist()))

    @property
    def acceptance(self) -> list[float]:
        """For each depth, the fraction of `chains` whose best drafted tokens are all correct down to this depth.

        It is 0.0 at a depth without chains.
        """
        shares: list[float] = (self.accepted.double() / self.chains.clamp(min=1)).tolist()
        return shares


@dataclass(frozen=True, slots=True)
class HeadLoss:
    """Loss and counts of one batch."""

    loss: Tensor  # scalar, weighted sum of means over positions
    counts: Counts | None = None  # None if nothing was measured


class Tally:
    """Accumulator for the counts of one batch, which is measured depth by depth.

    Args:
        places: Bool tensor with one element per position; its values are not used.
    """

    def __init__(self, places: Tensor) -> None:
        self._right = torch.ones_like(places)  # all tokens drafted so far are correct
        self._greedy = torch.ones_like(places)  # the text so far is the target's greedy choice
        self._rows: list[Tensor] = []

    def add(self, known: Tensor, correct: Tensor, follows: Tensor) -> None:
        """Add the measurements of the next depth.

        Args:
            known: Bool tensor shaped like `places`, True at the M positions to count.
            correct: `[M, R]` whether the r-th best drafted token is the target's greedy choice.
            follows: `[M]` whether the text's token is that choice; if not, later depths are not in `chains`.
        """
        here = torch.zeros_like(known)
        self._right = self._right & here.masked_scatter(known, correct[:, 0])
        chains = known & self._greedy
        self._rows.append(torch.stack([known.sum(), (chains & self._right).sum(), chains.sum(), *correct.sum(0)]))
        self._greedy = chains & here.masked_scatter(known, follows)

    def move_on(self) -> None:
        """Shift all chains one position to the right, for heads that continue at t a chain they drafted at t - 1."""
        self._right, self._greedy = (pad(places[:, :-1], (1, 0)) for places in (self._right, self._greedy))

    def counts(self) -> Counts | None:
        """Return the counts, or None if nothing was counted."""
        return Counts.of(torch.stack(self._rows)) if self._rows else None


def predicted_tau(accuracies: Sequence[float]) -> float:
    """Return the tau that greedy chains would have if their tokens were correct independently of each other.

    Args:
        accuracies: Fraction of correct tokens at each depth.

    Example: accuracies 0.5, 0.4 give 1 + 0.5 + 0.5 * 0.4 = 1.7.
    """
    return 1.0 + sum(accumulate(accuracies, mul))
