"""What a head gets right, depth by depth: counted on a batch, added up over many, told as an accepted length."""

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
    """Places of a batch and what was drafted there; sums, so that batches and processes add up."""

    right: Tensor  # [K, R] how often the r-th best token of each depth is the target's greedy choice
    counted: Tensor  # [K] out of so many
    accepted: Tensor  # [K] how often the best tokens of all depths up to it are
    chains: Tensor  # [K] out of so many: where the text is the target's greedy choice all along

    @classmethod
    def of(cls, packed: Tensor) -> Counts:
        """From `packed()`."""
        return cls(packed[:, 3:], packed[:, 0], packed[:, 1], packed[:, 2])

    def packed(self) -> Tensor:
        """`[K, 3 + R]`: all of it as one tensor."""
        return torch.cat([torch.stack([self.counted, self.accepted, self.chains], dim=1), self.right], dim=1)

    @property
    def accuracies(self) -> tuple[tuple[float, ...], ...]:
        """How often the r-th best token of each depth is right."""
        return tuple(map(tuple, (self.right.double() / self.counted[:, None].clamp(min=1)).tolist()))

    @property
    def acceptance(self) -> list[float]:
        """How often a greedy chain gets so far, by depth."""
        shares: list[float] = (self.accepted.double() / self.chains.clamp(min=1)).tolist()
        return shares


@dataclass(frozen=True, slots=True)
class HeadLoss:
    """What one batch gives."""

    loss: Tensor  # scalar, a mean over the places of the batch
    counts: Counts | None = None  # where it was asked to measure


class Tally:
    """Counts of a batch while its depths are gone through.

    Args:
        places: `[...]` bool, of any shape: where drafting may begin.
        ranks: R; 0 counts nothing.
    """

    def __init__(self, places: Tensor, ranks: int) -> None:
        self.ranks = ranks
        self._right = torch.ones_like(places)  # whether all that was drafted here so far is right
        self._greedy = torch.ones_like(places)  # whether the text here is what the target would have said greedily
        self._rows: list[Tensor] = []

    def add(self, known: Tensor, correct: Tensor, follows: Tensor) -> None:
        """The next depth.

        Args:
            known: Places like `places`: where the target's choice is known.
            correct: `[M, R]` at these.
            follows: `[M]` whether the text goes on with that choice; a greedy chain ends where it does not.
        """
        here = torch.zeros_like(known)
        self._right = self._right & here.masked_scatter(known, correct[:, 0])
        chains = known & self._greedy
        self._rows.append(torch.stack([known.sum(), (chains & self._right).sum(), chains.sum(), *correct.sum(0)]))
        self._greedy = chains & here.masked_scatter(known, follows)

    def move_on(self) -> None:
        """Where the next depth's places are one to the right: what was drafted at t - 1 goes on at t."""
        self._right, self._greedy = (pad(places[:, :-1], (1, 0)) for places in (self._right, self._greedy))

    def counts(self) -> Counts | None:
        """None where nothing was to be counted."""
        return Counts.of(torch.stack(self._rows)) if self._rows else None


def predicted_tau(accuracies: Sequence[float]) -> float:
    """Tokens per target forward of a greedy chain, as if its depths were accepted independently.

    Example: accuracies 0.5, 0.4 give 1 + 0.5 + 0.5 * 0.4 = 1.7.
    """
    return 1.0 + sum(accumulate(accuracies, mul))
