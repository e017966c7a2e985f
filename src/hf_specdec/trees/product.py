"""Trees from one distribution per depth: the probability of a node is the product along its path.

A block drafter scores all depths in one forward, so its distribution at a depth is the same after every path. Two
rules choose the nodes: the likeliest nodes, or all children of the likeliest parents (JetSpec,
https://github.com/hao-ai-lab/JetSpec, `accum_logp`).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from hf_specdec.trees.draft import Budget, Draft
from hf_specdec.trees.growth import Level, grow_dynamic
from hf_specdec.trees.tree import ROOT_PARENT, TokenTree


def reachable(budget: Budget) -> Budget:
    """Return the budget with `num_nodes` reduced to the size of a tree in which every node has `top_k` children."""
    size, level = 1, 1
    for _ in range(budget.num_steps):
        level *= budget.top_k
        size += level
        if size >= budget.num_nodes:
            return budget
    return replace(budget, num_nodes=size)


def likeliest_nodes(roots: Tensor, log_probs: Tensor, tokens: Tensor, budget: Budget) -> Draft:
    """Return the tree of the likeliest nodes; ties go to the shallower node, then to the lower ranks.

    Args:
        roots: `[B]` root tokens.
        log_probs: `[B, D, W]` of the W best tokens at each depth, best first and at most 0.
        tokens: `[B, D, W]` these tokens.
        budget: Size of the tree; its depth and width must not exceed D and W.
    """
    scores = log_probs.float()

    def level(depth: int, count: int) -> Level:
        """Return the children of `count` nodes at a depth."""
        return Level(
            scores[:, depth, :, None][:, :0],
            scores[:, depth, None].expand(-1, count, -1),
            tokens[:, depth, None].expand(-1, count, -1),
        )

    def expand(frontier: Tensor, _above: Level, _parents: Tensor, _seen: Tensor, depth: int) -> Level:
        return level(depth, frontier.shape[1])

    return grow_dynamic(roots, level(0, 1), expand, budget, expanded=max(budget.num_nodes - 1, 1))


def children_of_likeliest(roots: Tensor, log_probs: Tensor, tokens: Tensor, budget: Budget) -> Draft:
    """Return JetSpec's tree: the likeliest nodes get all `top_k` children, the last of them only as many as fit.

    Nodes are in the order in which JetSpec adds them: parent by parent, the likeliest parent first. Arguments as for
    `likeliest_nodes`.
    """
    steps, width, drafted = budget.num_steps, budget.top_k, budget.num_nodes - 1
    log_probs, tokens = log_probs[:, :steps, :width].float(), tokens[:, :steps, :width]
    count = -(-drafted // width)  # number of parents, root included
    places = torch.arange(steps * width, device=roots.device).view(steps, width)
    inner = likeliest_nodes(
        torch.full_like(roots, -width), log_probs, places.expand_as(tokens),
        reachable(Budget(count, max(steps - 1, 1), width)),
    ) if count > 1 and steps > 1 else Draft.plain(torch.full_like(roots, -width))  # fmt: skip
    parents, places = inner.tree.parents.expand_as(inner.tree.tokens), inner.tree.tokens
    # adding from the root down, a node is never likelier than its parent, and a stable sort keeps the parent first
    edges = torch.zeros_like(places, dtype=torch.float32) if inner.log_probs is None else inner.log_probs
    scores = edges
    for _ in range(inner.tree.depth_bound):
        scores = edges + torch.where(parents >= 0, scores.gather(1, parents.clamp(min=0)), 0.0)
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    place_in_order = order.argsort(dim=-1)
    # the child of the parent at place p in this order, at rank r, is node 1 + p * width + r
    above = place_in_order.gather(1, parents.clamp(min=0))
    nodes = torch.where(parents >= 0, 1 + above * width + places % width, 0).gather(1, order)
    depths = (places // width + 1).gather(1, order)
    columns = (depths[:, :, None] * width + torch.arange(width, device=roots.device)).flatten(1)[:, :drafted]
    tree = TokenTree(
        torch.cat([roots[:, None], tokens.flatten(1).gather(1, columns)], dim=-1),
        torch.cat([
            torch.full_like(roots[:, None], ROOT_PARENT), nodes.repeat_interleave(width, dim=1)[:, :drafted]
        ], dim=-1),
        max_depth=steps,
    )  # fmt: skip
    return Draft(tree, torch.nn.functional.pad(log_probs.flatten(1).gather(1, columns), (1, 0)))
