"""How much may be drafted, and what was: `Budget` and `Draft`, the hand-overs around a drafter."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from hf_specdec.trees.tree import ROOT_PARENT, TokenTree


@dataclass(frozen=True, slots=True)
class Budget:
    """The most that one step may draft. Its limits are a drafter's largest tree, over all steps of a call.

    Args:
        num_nodes: Nodes of the tree, root included; 1 is a plain step, which verifies the root alone.
        num_steps: Depth below the root; 0 in a plain step.
        top_k: Children of a node; 1 asks for a chain.
        costs: Seconds of a step that verifies 1, 2, ... nodes per row, drafting not counted; None: not known. Whoever
            knows how likely its nodes are drafts as many as pay.
        least: What a level must promise: whoever grows a tree level by level stops where the best candidates of all
            rows are together less likely. Looking is a read of the device, so this is for drafting on the host's.
    """

    num_nodes: int
    num_steps: int
    top_k: int
    costs: tuple[float, ...] | None = field(default=None, compare=False, repr=False)
    least: float = field(default=0.0, compare=False, repr=False)

    @property
    def is_plain(self) -> bool:
        """Whether nothing is drafted."""
        return self.num_nodes == 1

    def within(self, limits: Budget) -> Budget:
        """The smaller of the two in every respect.

        Example: (32, 4, 2) within (8, 6, 6) is (8, 4, 2).
        """
        return replace(
            self,
            num_nodes=min(self.num_nodes, limits.num_nodes),
            num_steps=min(self.num_steps, limits.num_steps),
            top_k=min(self.top_k, limits.top_k),
        )

    @property
    def chain(self) -> Budget:
        """As deep, without branches."""
        return replace(self, num_nodes=min(self.num_nodes, self.num_steps + 1), top_k=1)


PLAIN_STEP = Budget(num_nodes=1, num_steps=0, top_k=1)
"""One token of plain decoding."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A drafted tree, and how sure its drafter is of it."""

    tree: TokenTree
    log_probs: Tensor | None = None  # [B, N] of each node given its parent, uncalibrated; None: not told
    bucket: Tensor | None = None  # [B, N] long, calibration class of each node; None: one class
    sources: tuple[tuple[str, ...], ...] | None = None  # whose idea each node of each row is; None: its drafter's

    @classmethod
    def plain(cls, roots: Tensor) -> Draft:
        """Nothing drafted: verifying the roots `[B]` alone is one step of plain decoding."""
        return cls(TokenTree(roots[:, None], torch.full_like(roots[:1], ROOT_PARENT), max_depth=0))

    @property
    def num_drafted(self) -> Tensor:
        """`[B]` drafted nodes of each row: neither the root nor what pads the row."""
        return self.tree.num_drafted

    def with_repeated(self, token: int, rows: Tensor) -> Draft:
        """The same draft, where some rows repeat one token, see `TokenTree.with_repeated`."""
        return replace(self, tree=self.tree.with_repeated(token, rows))
