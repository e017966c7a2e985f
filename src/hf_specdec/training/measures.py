"""Accuracy of a head by depth: counts of a batch, their sums, and the tau that they predict."""

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
    """Counts over positions and K depths; additive over batches and processes."""

    right: Tensor  # [K, R] positions where the r-th best drafted token is the target's greedy choice
    counted: Tensor  # [K] all positions
    accepted: Tensor  # [K] positions where the best drafted token of this and all earlier depths is the greedy choice
    chains: Tensor  # [K] positions counted for `accepted`: the text is the greedy choice at all earlier depths

    @classmethod
    def of(cls, packed: Tensor) -> Counts:
        """Return the counts from a tensor made by `packed`."""
        return cls(packed[:, 3:], packed[:, 0], packed[:, 1], packed[:, 2])

    def packed(self) -> Tensor:
        """Return the counts as one tensor `[K, 3 + R]`."""
        return torch.cat([torch.stack([self.counted, self.accepted, self.chains], dim=1), self.right], dim=1)

    @property
    def accuracies(self) -> tuple[tuple[float, ...], ...]:
        """Fraction of positions where the r-th best token of each depth is correct."""
        return tuple(map(tuple, (self.right.double() / self.counted[:, None].clamp(min=1)).tolist()))

    @property
    def acceptance(self) -> list[float]:
        """Fraction of greedy chains that are accepted to each depth."""
        shares: list[float] = (self.accepted.double() / self.chains.clamp(min=1)).tolist()
        return shares


@dataclass(frozen=True, slots=True)
class HeadLoss:
    """Loss and counts of one batch."""

    loss: Tensor  # scalar, mean over positions
    counts: Counts | None = None  # None if nothing was measured


class Tally:
    """Accumulates the counts of a batch, depth by depth.

    Args:
        places: Bool tensor of the positions where drafting can begin; only its shape and device are used.
        ranks: R, number of top drafted tokens to count; 0 counts nothing.
    """

    def __init__(self, places: Tensor, ranks: int) -> None:
        self.ranks = ranks
        self._right = torch.ones_like(places)  # all tokens drafted so far are correct
        self._greedy = torch.ones_like(places)  # the text so far is the target's greedy choice
        self._rows: list[Tensor] = []

    def add(self, known: Tensor, correct: Tensor, follows: Tensor) -> None:
        """Count the next depth.

        Args:
            known: Bool tensor shaped like `places`: the M positions where the target's greedy choice is known.
            correct: `[M, R]` whether the r-th best drafted token is that choice.
            follows: `[M]` whether the text's token is that choice; otherwise the chain is not counted further.
        """
        here = torch.zeros_like(known)
        self._right = self._right & here.masked_scatter(known, correct[:, 0])
        chains = known & self._greedy
        self._rows.append(torch.stack([known.sum(), (chains & self._right).sum(), chains.sum(), *correct.sum(0)]))
        self._greedy = chains & here.masked_scatter(known, follows)

    def move_on(self) -> None:
        """Shift positions one to the right, for heads whose chain drafted at t - 1 continues at t."""
        self._right, self._greedy = (pad(places[:, :-1], (1, 0)) for places in (self._right, self._greedy))

    def counts(self) -> Counts | None:
        """Return the counts, or None if nothing was counted."""
        return Counts.of(torch.stack(self._rows)) if self._rows else None


def predicted_tau(accuracies: Sequence[float]) -> float:
    """Return the tokens per target forward of a greedy chain, if depths were accepted independently.

    Example: accuracies 0.5, 0.4 give 1 + 0.5 + 0.5 * 0.4 = 1.7.
    """
    return 1.0 + sum(accumulate(accuracies, mul))
