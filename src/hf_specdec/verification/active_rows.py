"""The rows of a batch that are still computed: finished rows leave the cache, and forwards get smaller.

Drafts, logits and features keep one entry per row of the batch; a target selects the active rows before its forward
and fills the others with zeros afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_specdec.acceptance.pipelining import Acceptance
from hf_specdec.trees.tree import TokenTree
from hf_specdec.verification.features import Features
from hf_specdec.verification.masks import Positions
from hf_specdec.verification.window import PromptPadding


@dataclass(frozen=True, slots=True)
class ActiveRows:
    """Rows of a batch that a cache still holds."""

    rows: tuple[int, ...]  # row of the batch by row of the cache
    num_rows: int  # of the batch
    index: Tensor  # `rows` as a tensor [R], on the device of the tokens
    padding: PromptPadding | None  # of these rows
    positions: Positions  # of these rows

    @classmethod
    def of(
        cls,
        rows: Sequence[int],
        num_rows: int,
        padding: PromptPadding | None,
        positions: Positions,
        device: torch.device,
    ) -> ActiveRows:
        """Select rows of a batch, given the padding and the positions of the whole batch."""
        index = torch.tensor(rows, dtype=torch.long, device=device)
        last = (
            positions.last
            if positions.last.shape[-1] == 1
            else positions.last.index_select(-1, index.to(positions.last.device))
        )
        return cls(
            tuple(rows), num_rows, index, None if padding is None else padding.of_rows(index),
            replace(positions, last=last),
        )  # fmt: skip

    def of_tree(self, tree: TokenTree) -> TokenTree:
        """Return the trees of these rows."""
        index = self.index
        return replace(
            tree,
            tokens=tree.tokens[index],
            parents=tree.parents[index] if tree.parents.dim() == 2 and len(tree.parents) > 1 else tree.parents,
            draft_probs=None if tree.draft_probs is None else tree.draft_probs[index],
        )

    def of_acceptance(self, acceptance: Acceptance) -> tuple[Tensor, list[tuple[int, ...]]]:
        """Return the kept paths of these rows, on the device and on the host."""
        return acceptance.path[self.index], [acceptance.nodes[row] for row in self.rows]

    def in_batch(self, states: Tensor) -> Tensor:
        """Return `[B, ...]` with the given `[R, ...]` in these rows and zeros in the others."""
        whole = states.new_zeros(self.num_rows, *states.shape[1:])
        return whole.index_copy_(0, self.index.to(states.device), states)

    def features_in_batch(self, features: Features | None) -> Features | None:
        """Return features with one entry per row of the batch, see `in_batch`."""
        if features is None:
            return None
        return Features({layer: self.in_batch(states) for layer, states in features.states.items()})


def drop_order(count: int, active: Sequence[int]) -> list[int]:
    """Return the rows of a cache to keep, so that few of them move: gaps are filled with the last rows.

    Args:
        count: Rows of the cache.
        active: Rows to keep, ascending.

    Example: of 6 rows, keeping 0, 2, 3 and 5 gives [0, 5, 2, 3]: only row 5 moves.
    """
    size, kept = len(active), set(active)
    last = iter(row for row in range(count - 1, size - 1, -1) if row in kept)
    return [row if row in kept else next(last) for row in range(size)]
