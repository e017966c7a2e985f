"""`TokenTree`, the tree of drafted tokens, and the terms used in this package.

**Invariant: between steps the cache holds exactly the L committed tokens of each row; the root token is chosen
but its keys are not cached yet.**

* *root*: node 0, the last chosen token, already emitted. All other nodes are *drafted*.
* *path*: nodes from the root downwards. *Accepted*: drafted nodes on the path that the target agrees with.
* *correction*: the target's token after a rejection; *bonus*: its token after a fully accepted path.
  Either is the next root.
* *committed*: tokens that stay in the cache.

Letters: B rows, N nodes, P path length, L committed length, V vocabulary size, D hidden size, K nodes of a level.
Independent of models and caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_specdec.host_sync import upload

ROOT_PARENT = -1
"""Parent of the root, and of nodes that pad a row and are on no path."""


@dataclass(frozen=True, slots=True)
class TokenTree:
    """Candidate continuations of the root, one tree per row. Parents precede their children.

    Example: root A with children B and C, and B with child D: `tokens [[A, B, C, D]]`, `parents [-1, 0, 0, 1]`.

    Args:
        tokens: `[B, N]` long, the token ids; column 0 is the root.
        parents: `[N]` or `[B, N]` long, the index of each parent; -1 at the root and at padding.
        draft_probs: `[B, N, V]` distribution from which the children of each node were drawn, without replacement;
            None for a deterministic draft.
        max_depth: Upper bound of the depth, known on the host; None: N - 1.
    """

    tokens: Tensor
    parents: Tensor
    draft_probs: Tensor | None = None
    max_depth: int | None = None

    @property
    def num_nodes(self) -> int:
        """The number of nodes of each row (N), root and padding included."""
        return self.tokens.shape[1]

    @property
    def depth_bound(self) -> int:
        """An upper bound of the depth that is known without reading the device."""
        return self.num_nodes - 1 if self.max_depth is None else min(self.max_depth, self.num_nodes - 1)

    @property
    def num_drafted(self) -> Tensor:
        """`[B]` long, number of nodes in each row, without root and padding."""
        return (self.parents.expand(self.tokens.shape) != ROOT_PARENT).sum(-1)

    def ancestor_mask(self) -> Tensor:
        """Return `[B or 1, N, N]` bool: entry (i, j) is True if j is i or an ancestor of i.

        Example: parents [-1, 0, 0, 1] give rows 1000, 1100, 1010, 1101.
        """
        parents = self.parents if self.parents.dim() == 2 else self.parents[None]
        nodes = torch.arange(self.num_nodes, device=parents.device)
        reach = (parents[:, :, None] == nodes) | (nodes[:, None] == nodes)
        # repeated squaring: after k rounds all ancestors within 2^k generations are marked
        for _ in range(max(self.depth_bound - 1, 0).bit_length()):
            steps = reach.float()
            reach = steps @ steps > 0
        return reach

    def depths(self) -> Tensor:
        """Return `[B or 1, N]` long: depth of each node, 0 for the root and padding."""
        return self.ancestor_mask().sum(-1) - 1

    def of_rows(self, index: Tensor) -> TokenTree:
        """Return the trees of some rows `[R]`."""
        return replace(
            self,
            tokens=self.tokens[index],
            parents=self.parents[index] if self.parents.dim() == 2 and len(self.parents) > 1 else self.parents,
            draft_probs=None if self.draft_probs is None else self.draft_probs[index],
        )

    def with_repeated(self, token: int, rows: Tensor) -> TokenTree:
        """Return the tree with the drafts of rows (bool `[B]`) replaced by a chain of one token, e.g. padding.

        The chain is as deep as the tree may be; further nodes are on no path.

        Example: row [A, B, C] with parents [-1, 0, 0] and token P becomes [A, P, P] with parents [-1, 0, 1].
        """
        nodes = torch.arange(self.num_nodes, device=self.tokens.device)
        drafted = rows[:, None] & (nodes > 0)
        return TokenTree(
            torch.where(drafted, token, self.tokens),
            torch.where(rows[:, None], torch.where(nodes <= self.depth_bound, nodes - 1, ROOT_PARENT), self.parents),
            self.draft_probs,
            max_depth=self.max_depth,
        )

    def no_deeper(self, num_steps: int) -> TokenTree:
        """Return the tree with all nodes below a depth on no path.

        Example: parents [-1, 0, 1, 2] with 2 steps become [-1, 0, 1, -1].
        """
        parents = torch.where(self.depths() > num_steps, ROOT_PARENT, self.parents)
        return replace(self, parents=parents, max_depth=min(num_steps, self.depth_bound))

    def first_children(self) -> TokenTree:
        """Return the chain of first children, padded to `depth_bound + 1` nodes, for targets that verify chains only.

        Example: tokens [A, B, C, D] with parents [-1, 0, 0, 1] and `max_depth` 2 become [A, B, D] with parents
        [-1, 0, 1].
        """
        parents = self.parents.expand(self.tokens.shape)
        node = torch.zeros_like(self.tokens[:, 0])
        nodes, valid = [node], [torch.ones_like(node, dtype=torch.bool)]
        for _ in range(self.depth_bound):
            children = (parents == node[:, None]) & valid[-1][:, None]
            node = children.int().argmax(-1)
            nodes.append(node)
            valid.append(children.any(-1))
        chain = torch.stack(nodes, dim=-1)
        links = torch.arange(ROOT_PARENT, len(nodes) - 1, device=chain.device)
        rows = torch.arange(len(chain), device=chain.device)[:, None]
        return TokenTree(
            self.tokens.gather(1, chain),
            torch.where(torch.stack(valid, dim=-1), links, ROOT_PARENT),
            None if self.draft_probs is None else self.draft_probs[rows, chain],
            max_depth=self.depth_bound,
        )

    def validate(self) -> None:
        """Raise ValueError if shapes or parents are wrong. Only for tests: it reads the device."""
        batch, nodes = self.tokens.shape
        parents = self.parents if self.parents.dim() == 2 else self.parents[None]
        if parents.shape not in ((1, nodes), (batch, nodes)):
            raise ValueError(f"parents must be [{nodes}] or [{batch}, {nodes}], got {tuple(self.parents.shape)}")
        if not (parents[:, 0] == ROOT_PARENT).all():
            raise ValueError("node 0 must be the root (parent -1)")
        if not ((parents >= ROOT_PARENT) & (parents < torch.arange(nodes, device=parents.device).clamp(min=0))).all():
            raise ValueError("parents must precede their children")
        if self.draft_probs is not None and self.draft_probs.shape[:2] != self.tokens.shape:
            raise ValueError(f"draft_probs must be [B, N, V], got {tuple(self.draft_probs.shape)}")


def stack_trees(rows: Sequence[tuple[list[int], list[int]]], device: torch.device) -> TokenTree:
    """Stack one tree per row; smaller trees are padded to the largest with nodes that are on no path.

    Args:
        rows: Tokens and parents of each row, root first.
        device: Device of the tree, to which it is copied in one transfer.
    """
    width = max(len(tokens) for tokens, _ in rows)
    padded, deepest = [], 0
    for tokens, parents in rows:
        missing, depths = width - len(tokens), list[int]()
        padded.append([tokens + tokens[:1] * missing, parents + [ROOT_PARENT] * missing])
        for parent in parents:
            depths.append(0 if parent == ROOT_PARENT else depths[parent] + 1)
        deepest = max(deepest, *depths)
    both = upload(padded, torch.long, device)
    return TokenTree(both[:, 0], both[:, 1], max_depth=deepest)


def chosen_path(tree: TokenTree, on_path: Tensor) -> Tensor:
    """Return the nodes `[B, P]` of one root-to-node path per row, bool `[B, N]`, in order of depth, padded with -1.

    P is one more than the tree's `depth_bound`.

    Example: on_path 1101 with parents [-1, 0, 0, 1] and `max_depth` 2 gives [0, 1, 3]: indices ascend along a path.
    """
    nodes = torch.arange(tree.num_nodes, device=on_path.device)
    order = torch.where(on_path, nodes, tree.num_nodes).sort(dim=-1).values[:, : tree.depth_bound + 1]
    return torch.where(order == tree.num_nodes, -1, order)
