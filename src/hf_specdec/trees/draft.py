"""`Budget` and `Draft`: the input and the output of a drafter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from hf_specdec.trees.tree import ROOT_PARENT, TokenTree, stack_trees


@dataclass(frozen=True, slots=True)
class Budget:
    """Maximum size of the tree that one step drafts.

    A drafter's `limits` are also a budget: the maximum for all steps of a call.

    Args:
        num_nodes: Nodes of the tree, root included; 1 is a plain step, which verifies the root alone.
        num_steps: Depth below the root; 0 in a plain step.
        top_k: Children per node; 1 gives a chain.
        min_level_probability: Stop growing if the path probability of each row's likeliest node to expand, summed over
            rows, falls below this; 0: never. Checking it reads the device, so it is set only on the CPU.
    """

    num_nodes: int
    num_steps: int
    top_k: int
    min_level_probability: float = field(default=0.0, compare=False, repr=False)

    @property
    def is_plain(self) -> bool:
        """Whether nothing is drafted."""
        return self.num_nodes == 1

    def within(self, limits: Budget) -> Budget:
        """Return the budget with each size reduced to that of `limits`; `min_level_probability` is unchanged.

        Example: (32, 4, 2) within (8, 6, 6) is (8, 4, 2).
        """
        return replace(
            self,
            num_nodes=min(self.num_nodes, limits.num_nodes),
            num_steps=min(self.num_steps, limits.num_steps),
            top_k=min(self.top_k, limits.top_k),
        )

    def no_deeper(self, num_steps: int, num_nodes: int | None = None) -> Budget:
        """Return the budget with at most `num_steps` steps and `num_nodes` nodes; `PLAIN_STEP` if no draft is left."""
        nodes = self.num_nodes if num_nodes is None else min(self.num_nodes, num_nodes)
        if num_steps < 1 or nodes < 2:
            return PLAIN_STEP
        return replace(self, num_nodes=nodes, num_steps=min(self.num_steps, num_steps))

    @property
    def chain(self) -> Budget:
        """The budget with `top_k` 1: a chain of at most the same depth and number of nodes."""
        return replace(self, num_nodes=min(self.num_nodes, self.num_steps + 1), top_k=1)


PLAIN_STEP = Budget(num_nodes=1, num_steps=0, top_k=1)
"""A step that verifies the root alone: plain decoding."""


StepCostFunction = Callable[[], tuple[float, ...]]
"""Function that returns the seconds of a step that verifies 1, 2, ... nodes per row, drafting excluded."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A drafted tree, with the probability and the drafter of each node if known.

    Args:
        tree: The drafted tokens and their parents.
        log_probs: `[B, N]`, log-probability that the drafter gives each node given its parent; None: unknown.
        sources: `sources[row][node]`, name of the drafter of each node; None: the session's drafter.
    """

    tree: TokenTree
    log_probs: Tensor | None = None
    sources: tuple[tuple[str, ...], ...] | None = None

    @classmethod
    def plain(cls, roots: Tensor) -> Draft:
        """Create a draft of the roots `[B]` alone; verifying it is one step of plain decoding."""
        return cls(TokenTree(roots[:, None], torch.full_like(roots[:1], ROOT_PARENT), max_depth=0))

    @classmethod
    def from_rows(cls, rows: Sequence[tuple[list[int], list[int]]], device: torch.device) -> Draft:
        """Create a draft from tokens and parents of each row's tree, root first; smaller trees are padded."""
        return cls(stack_trees(rows, device))

    @property
    def num_drafted(self) -> Tensor:
        """`[B]` long, number of nodes in each row, without root and padding."""
        return self.tree.num_drafted

    def with_repeated(self, token: int, rows: Tensor) -> Draft:
        """Return the draft with `TokenTree.with_repeated` applied to its tree."""
        return replace(self, tree=self.tree.with_repeated(token, rows))
