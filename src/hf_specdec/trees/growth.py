"""How trees come to be: grown level by level, filled into given ranks, or merged from chains.

Whoever can score the children of a node grows a tree here; what scores them (`Expand`) is the drafter's. Sources:
EAGLE (https://arxiv.org/abs/2401.15077) for static trees, EAGLE-2 (https://arxiv.org/abs/2406.16858) for the dynamic
one, Medusa (https://arxiv.org/abs/2401.10774) for the likeliest ranks.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from hf_specdec.config import Choice
from hf_specdec.trees.draft import Budget, Draft
from hf_specdec.trees.tree import ROOT_PARENT, TokenTree

BLOCK = 128
"""Tokens whose maximum is taken first where the best of many are sought on the CPU."""
Accuracies = tuple[tuple[float, ...], ...]
"""`[depth][rank]`: how often that candidate is the target's choice, where everything above it was."""


@dataclass(frozen=True, slots=True)
class Level:
    """Drafted nodes of one depth that may be expanded, as the draft model left them."""

    features: Tensor  # [B, K, D] what it knows of the nodes
    log_probs: Tensor  # [B, K, W] of the W best children
    tokens: Tensor  # [B, K, W] target ids of the children


Expand = Callable[[Tensor, Level, Tensor, Tensor, int], Level]
"""`expand(tokens [B, K], level above, parent_index [B, K], seen [B, K, appended], depth)`: the nodes' own level.

`parent_index` is each node's parent in the level above, `seen` (bool) which of the nodes expanded so far it sees,
`depth` that of the nodes; children of the root have 1.
"""


def scored(features: Tensor, logits: Tensor, top_k: int, hot_token_ids: Tensor | None) -> Level:
    """The level of K nodes with features `[B, K, D]` and logits `[B, K, Vd]` over a draft vocabulary, or all of V."""
    log_probs, ids = best_children(logits, top_k)
    return Level(features, log_probs, ids if hot_token_ids is None else hot_token_ids.to(ids.device)[ids])


def best_children(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities and ids `[..., count]` of the likeliest tokens by logits `[..., V]`, best first.

    The logarithm of the sum is taken by way of `log_softmax`, one pass on any device where `logsumexp` takes several.
    On the CPU, whose `topk` looks at every token in turn, the best tokens are sought in the blocks of the best maxima.
    """
    log_probs = logits.log_softmax(-1, dtype=torch.float32)
    size = log_probs.shape[-1]
    if log_probs.device.type != "cpu" or size % BLOCK or size < 4 * BLOCK * count:
        values, ids = log_probs.topk(count, dim=-1)
        return values.clamp(max=0), ids
    blocks = log_probs.unflatten(-1, (-1, BLOCK))
    numbers = blocks.amax(-1).topk(count, dim=-1).indices
    found = blocks.gather(-2, numbers[..., None].expand(*numbers.shape, BLOCK)).flatten(-2)
    values, places = found.topk(count, dim=-1)
    # at most 0 also after rounding: no child may score above its parent
    return values.clamp(max=0), numbers.gather(-1, places // BLOCK) * BLOCK + places % BLOCK


# ----------------------------------------------------------------------------------------------- dynamic trees


def grow_dynamic(roots: Tensor, root: Level, expand: Expand, budget: Budget) -> Draft:
    """EAGLE-2: expand the top k nodes of each level by cumulative log-probability, then keep the best of all.

    A child's score never exceeds its parent's, and of equal ones the earlier is kept, so parents are always kept with
    their children.

    Args:
        roots: `[B]` root tokens.
        root: The root's children, at least `top_k` of them; log-probabilities are at most 0.
        expand: Scores the children of nodes.
        budget: `num_steps` levels at most, see `Budget.least`, `top_k` nodes expanded in each, `num_nodes` kept.
    """
    k, batch_size = budget.top_k, len(roots)
    rows = torch.arange(batch_size, device=roots.device)[:, None]
    scores, edges, tokens = [root.log_probs[:, 0, :k]], [root.log_probs[:, 0, :k]], [root.tokens[:, 0, :k]]
    parents = [torch.full_like(tokens[0], ROOT_PARENT)]
    frontier = torch.arange(k, device=rows.device).expand(batch_size, -1)  # candidates to expand
    level, parent_index = root, torch.zeros_like(frontier)
    frontier_tokens, frontier_scores = tokens[0], scores[0]
    seen = torch.zeros(batch_size, k, 0, dtype=torch.bool, device=rows.device)
    eye = torch.eye(k, dtype=torch.bool, device=rows.device).expand(batch_size, -1, -1)
    for depth in range(1, budget.num_steps):
        if budget.least and float(frontier_scores.amax(-1).exp().sum()) < budget.least:
            break
        seen = torch.cat([seen, eye], dim=-1)
        level = expand(frontier_tokens, level, parent_index, seen, depth)
        children = level.log_probs[:, :, :k] + frontier_scores[:, :, None]  # [B, k, k]
        first = k + (depth - 1) * k * k
        scores.append(children.flatten(1))
        edges.append(level.log_probs[:, :, :k].flatten(1))
        tokens.append(level.tokens[:, :, :k].flatten(1))
        parents.append(frontier[:, :, None].expand(-1, -1, k).flatten(1))
        frontier_scores, best = scores[-1].topk(k, dim=-1)
        frontier, parent_index = first + best, best // k
        frontier_tokens = tokens[-1].gather(1, best)
        seen = seen.gather(1, parent_index[:, :, None].expand(-1, -1, seen.shape[2]))
    grown = torch.cat(scores, -1), torch.cat(edges, -1), torch.cat(tokens, -1), torch.cat(parents, -1)
    return _keep_best(roots, *grown, budget)


def growable(budget: Budget) -> Budget:
    """The budget, with no more nodes than a dynamic tree of this depth and width has candidates."""
    candidates = budget.top_k + (budget.num_steps - 1) * budget.top_k**2
    return replace(budget, num_nodes=min(budget.num_nodes, 1 + candidates))


def _keep_best(roots: Tensor, scores: Tensor, edges: Tensor, tokens: Tensor, parents: Tensor, budget: Budget) -> Draft:
    """The best `num_nodes - 1` of M candidates `[B, M]`, in their order of growth, with parents renumbered."""
    rows = torch.arange(scores.shape[0], device=scores.device)[:, None]
    kept = _best(scores, min(budget.num_nodes - 1, scores.shape[1]))
    # place[c + 1] is the node of candidate c; candidate -1 is the root, node 0
    place = torch.zeros(scores.shape[0], scores.shape[1] + 1, dtype=torch.long, device=scores.device)
    nodes = torch.arange(1, kept.shape[1] + 1, device=scores.device).expand_as(kept)
    place = place.scatter(1, kept + 1, nodes)
    tree = TokenTree(
        tokens=torch.cat([roots[:, None], tokens.gather(1, kept)], dim=-1),
        parents=torch.cat([torch.full_like(rows, ROOT_PARENT), place.gather(1, parents.gather(1, kept) + 1)], dim=-1),
        max_depth=budget.num_steps,
    )
    return Draft(tree, torch.nn.functional.pad(edges.gather(1, kept), (1, 0)))


def _best(scores: Tensor, count: int) -> Tensor:
    """Find the best of M candidates `[B, M]`, of equal ones the first; their places `[B, count]`, ascending."""
    if scores.device.type == "cpu":  # there one sort is the fastest way
        return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count].sort(dim=-1).values
    return _best_of_ties(scores, count)


def _best_of_ties(scores: Tensor, count: int) -> Tensor:
    """`_best` for backends whose sort need not keep equal scores in order, although it is told to, as that of MPS.

    Only candidates that equal the last one kept compete by their places; `float32` holds those exactly.
    """
    size = scores.shape[1]
    last = scores.topk(max(count, 1), dim=-1).values[:, -1:]
    backwards = torch.arange(0, -size, -1, dtype=torch.float32, device=scores.device)
    keys = torch.where(scores > last, 1.0, torch.where(scores < last, -float(size), backwards))
    return keys.topk(count, dim=-1).indices.sort(dim=-1).values


# ----------------------------------------------------------------------------------------------- static trees


@dataclass(frozen=True, slots=True)
class StaticStep:
    """One level of a static tree."""

    parents: Tensor  # [K] which expanded node of the level above each node hangs on
    ranks: Tensor  # [K] which of its children
    expanded: Tensor  # [E] nodes of this level that have children


@dataclass(frozen=True, slots=True)
class StaticLevels:
    """A choice list as index tensors, level by level."""

    choices: tuple[Choice, ...]
    node_parents: Tensor  # [N] of the whole tree
    steps: tuple[StaticStep, ...]
    top_k: int  # children that are looked at: one more than the largest rank

    @classmethod
    def of(cls, choices: Sequence[Choice], device: torch.device) -> StaticLevels:
        """From choices sorted by depth."""
        steps = []
        expanded: list[Choice] = [()]
        for depth in range(1, max(map(len, choices)) + 1):
            level = [path for path in choices if len(path) == depth]
            inner = [path for path in level if any(longer[:-1] == path for longer in choices)]
            steps.append(
                StaticStep(
                    torch.tensor([expanded.index(path[:-1]) for path in level], dtype=torch.long, device=device),
                    torch.tensor([path[-1] for path in level], dtype=torch.long, device=device),
                    torch.tensor([level.index(path) for path in inner], dtype=torch.long, device=device),
                )
            )
            expanded = inner
        parents = torch.tensor(choice_parents(choices), dtype=torch.long, device=device)
        return cls(tuple(choices), parents, tuple(steps), limits_of(choices).top_k)

    @property
    def num_entries(self) -> int:
        """Nodes that are expanded below the root: what a draft layer reads."""
        return sum(len(step.expanded) for step in self.steps)


def grow_static(roots: Tensor, root: Level, expand: Expand, levels: StaticLevels) -> Draft:
    """EAGLE-1: the nodes are given as ranks; expand those that have children.

    Args:
        roots: `[B]` root tokens.
        root: The root's children, as many as the ranks ask for.
        expand: Scores the children of nodes.
        levels: The tree.
    """
    batch_size, level = len(roots), root
    tokens, edges = [roots[:, None]], [torch.zeros_like(root.log_probs[:, 0, :1])]
    seen = torch.zeros(batch_size, 1, 0, dtype=torch.bool, device=roots.device)
    for depth, step in enumerate(levels.steps, start=1):
        tokens.append(level.tokens[:, step.parents, step.ranks])
        edges.append(level.log_probs[:, step.parents, step.ranks])
        if len(step.expanded):
            own = torch.eye(len(step.expanded), dtype=torch.bool, device=seen.device).expand(batch_size, -1, -1)
            parent_index = step.parents[step.expanded]
            seen = torch.cat([seen[:, parent_index], own], dim=-1)
            level = expand(tokens[-1][:, step.expanded], level, parent_index.expand(batch_size, -1), seen, depth)
    tree = TokenTree(torch.cat(tokens, dim=-1), levels.node_parents, max_depth=len(levels.steps))
    return Draft(tree, torch.cat(edges, dim=-1))


def choice_parents(choices: Sequence[Choice]) -> list[int]:
    """Parents of the tree of sorted choices, root first.

    Example: [(0,), (1,), (0, 0)] gives [-1, 0, 0, 1].
    """
    index = {(): 0} | {path: node for node, path in enumerate(choices, start=1)}
    return [ROOT_PARENT, *(index[path[:-1]] for path in choices)]


def choices_within(choices: Sequence[Choice], budget: Budget) -> list[Choice]:
    """The first choices of a list that fit a budget; parents stand before their children, and so they do here.

    Example: [(0,), (1,), (0, 2), (0, 3)] within 4 nodes, 2 steps, 1 child is [(0,), (0, 2)].
    """
    kept: dict[Choice, int] = {(): 0}  # with the number of their children
    for path in choices:
        parent = path[:-1]
        if len(path) <= budget.num_steps and kept.get(parent, budget.top_k) < budget.top_k:
            kept[parent] += 1
            kept[path] = 0
    return list(kept)[1 : budget.num_nodes]


def limits_of(choices: Sequence[Choice]) -> Budget:
    """What a whole choice list takes."""
    deepest, widest = max(map(len, choices), default=0), max((max(path) for path in choices), default=0)
    return Budget(len(choices) + 1, deepest, widest + 1)


Plan = Budget | StaticLevels
"""How a tree grows: a dynamic one within a budget, or a static one."""


def grow(roots: Tensor, root: Level, expand: Expand, plan: Plan) -> Draft:
    """`grow_static` or `grow_dynamic`."""
    if isinstance(plan, StaticLevels):
        return grow_static(roots, root, expand, plan)
    return grow_dynamic(roots, root, expand, plan)


# ----------------------------------------------------------------------------------------------- likeliest ranks


def node_acceptance(path: Sequence[int], accuracies: Accuracies) -> float:
    """Probability that a node is accepted, as if ranks of different depths were independent (Medusa's paper does)."""
    return prod(accuracies[depth][rank] for depth, rank in enumerate(path))


def likeliest_choices(accuracies: Accuracies, num_nodes: int) -> list[Choice]:
    """The likeliest nodes, best first; parents come before their children. Medusa, section 2.3.3.

    Args:
        accuracies: `[depth][rank]`.
        num_nodes: Size of the tree, root included; fewer where no other candidate was ever right.

    Example: accuracies [[0.6, 0.2], [0.5, 0.1]] and 4 nodes give [(0,), (0, 0), (1,)]: 0.6, 0.3, 0.2.
    """
    ranks = range(len(accuracies[0]))
    # ties go to the shallower, then the lower rank
    heap: list[tuple[float, int, Choice]] = [(-accuracies[0][rank], 1, (rank,)) for rank in ranks]
    heapq.heapify(heap)
    grown: list[Choice] = []
    while heap and len(grown) < num_nodes - 1:
        gain, depth, path = heapq.heappop(heap)
        if not gain:
            break
        grown.append(path)
        if depth < len(accuracies):
            for rank in ranks:
                heapq.heappush(heap, (gain * accuracies[depth][rank], depth + 1, (*path, rank)))
    return grown


# ----------------------------------------------------------------------------------------------- chains


class PrefixTree:
    """A tree on the host to which paths from the root are added; paths that begin alike share nodes.

    Args:
        root: The root's token.

    Attributes:
        tokens, parents: Of each node, the root first.
    """

    def __init__(self, root: int) -> None:
        self.tokens, self.parents = [root], [ROOT_PARENT]
        self._children: dict[tuple[int, int], int] = {}

    def add(self, chain: Iterable[int], num_nodes: int, node: int = 0) -> int:
        """Add a path below a node, as far as the tree then has no more nodes than it may; returns its last node."""
        for token in chain:
            child = self._children.get((node, token))
            if child is None:
                if len(self.tokens) >= num_nodes:
                    break
                child = self._children[node, token] = len(self.tokens)
                self.tokens.append(token)
                self.parents.append(node)
            node = child
        return node
