"""Grow trees: dynamic ones by probability, static ones of a given shape, and trees of chains with common prefixes.

A drafter provides an `Expand` function, which scores the children of nodes. Sources: EAGLE
(https://arxiv.org/abs/2401.15077) for static trees, EAGLE-2 (https://arxiv.org/abs/2406.16858) for dynamic trees,
Medusa (https://arxiv.org/abs/2401.10774) for choosing the likeliest ranks.

A block drafter scores all depths in one forward, so its distribution at a depth is the same after every path, and the
probability of a node is the product along its path. Two rules choose the nodes: the likeliest nodes
(`likeliest_nodes`), or all children of the likeliest parents (`children_of_likeliest`, as in JetSpec's `accum_logp`,
https://github.com/hao-ai-lab/JetSpec).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_specdec.cpu.operations import best_tokens, can_search
from hf_specdec.trees.draft import Budget, Draft
from hf_specdec.trees.tree import ROOT_PARENT, TokenTree
from hf_specdec.validation import Choice

BLOCK = 128
"""Tokens per block of the vocabulary in `best_children` on the CPU."""
Accuracies = tuple[tuple[float, ...], ...]
"""`[depth][rank]`: probability that the child of this rank is the target's choice if all its ancestors are; depth 0
are the children of the root."""


@dataclass(frozen=True, slots=True)
class Level:
    """The draft model's output at the expanded nodes of one depth."""

    features: Tensor  # [B, K, D] of the nodes, input for expanding their children
    log_probs: Tensor  # [B, K, W] of each node's W best children
    tokens: Tensor  # [B, K, W] ids of these children in the target's vocabulary


Expand = Callable[[Tensor, Level, Tensor, Tensor, int], Level]
"""`expand(tokens [B, K], level above, parent_index [B, K], seen [B, K, expanded], depth)` returns a `Level`.

`parent_index` is the index of each node's parent in the level above. `seen` is True at the nodes expanded so far that
a node attends to: its ancestors and itself. `depth` is the depth of the nodes, 1 for children of the root.
"""


def scored(features: Tensor, logits: Tensor, top_k: int, hot_token_ids: Tensor | None) -> Level:
    """Return the `Level` of K nodes with their `top_k` best children.

    `features` are `[B, K, D]`, `logits` `[B, K, Vd]` over the draft vocabulary, whose target ids are `hot_token_ids`.
    """
    log_probs, ids = best_children(logits, top_k)
    return Level(features, log_probs, ids if hot_token_ids is None else hot_token_ids.to(ids.device)[ids])


def best_children(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and ids `[..., count]` of the likeliest tokens by logits `[..., V]`, best first.

    `log_softmax` is one pass on every device, while `logsumexp` takes several. On the CPU, `topk` is slow for large
    vocabularies, so only the blocks with the `count` largest maxima are searched; the CPU kernel does both at once.
    """
    if can_search(logits):
        return best_tokens(logits, count)
    log_probs = logits.log_softmax(-1, dtype=torch.float32)
    size = log_probs.shape[-1]
    if log_probs.device.type != "cpu" or size % BLOCK or size < 4 * BLOCK * count:
        values, ids = log_probs.topk(count, dim=-1)
        return values.clamp(max=0), ids
    blocks = log_probs.unflatten(-1, (-1, BLOCK))
    best_blocks = blocks.amax(-1).topk(count, dim=-1).indices
    candidates = blocks.gather(-2, best_blocks[..., None].expand(*best_blocks.shape, BLOCK)).flatten(-2)
    values, index = candidates.topk(count, dim=-1)
    # rounding must not make a log-probability positive: no child may score above its parent
    return values.clamp(max=0), best_blocks.gather(-1, index // BLOCK) * BLOCK + index % BLOCK


# ----------------------------------------------------------------------------------------------- dynamic trees


def grow_dynamic(roots: Tensor, root: Level, expand: Expand, budget: Budget, expanded: int | None = None) -> Draft:
    """Grow a tree as EAGLE-2 does: expand the k best nodes of each level, then keep the best nodes of all levels.

    The score of a node is its cumulative log-probability. A child's score never exceeds its parent's and ties go to
    the earlier node, so the parent of a kept node is always kept.

    Args:
        roots: `[B]` root tokens.
        root: The root's children, at least `top_k` of them; log-probabilities are at most 0.
        expand: Scores the children of nodes.
        budget: At most `num_steps` levels (see also `Budget.min_level_probability`); the `num_nodes` best nodes are
            kept, or all if there are fewer.
        expanded: k, the maximum number of nodes that are expanded per level; None for `budget.top_k`.
    """
    width, batch_size = budget.top_k, len(roots)
    most = expanded or width
    rows = torch.arange(batch_size, device=roots.device)[:, None]
    scores, edges, tokens = [root.log_probs[:, 0, :width]], [root.log_probs[:, 0, :width]], [root.tokens[:, 0, :width]]
    parents = [torch.full_like(tokens[0], ROOT_PARENT)]
    count, first = min(most, width), width
    frontier = torch.arange(count, device=rows.device).expand(batch_size, -1)  # indices of the candidates to expand
    level, parent_index = root, torch.zeros_like(frontier)
    frontier_tokens, frontier_scores = tokens[0][:, :count], scores[0][:, :count]
    seen = torch.zeros(batch_size, count, 0, dtype=torch.bool, device=rows.device)
    for depth in range(1, budget.num_steps):
        if 0 < budget.min_level_probability > float(frontier_scores.amax(-1).exp().sum()):
            break
        own = torch.eye(count, dtype=torch.bool, device=rows.device).expand(batch_size, -1, -1)
        seen = torch.cat([seen, own], dim=-1)
        level = expand(frontier_tokens, level, parent_index, seen, depth)
        children = level.log_probs[:, :, :width] + frontier_scores[:, :, None]  # [B, count, width]
        scores.append(children.flatten(1))
        edges.append(level.log_probs[:, :, :width].flatten(1))
        tokens.append(level.tokens[:, :, :width].flatten(1))
        parents.append(frontier[:, :, None].expand(-1, -1, width).flatten(1))
        count = min(most, count * width)
        frontier_scores, best = scores[-1].topk(count, dim=-1)
        frontier, parent_index = first + best, best // width
        first += scores[-1].shape[1]
        frontier_tokens = tokens[-1].gather(1, best)
        seen = seen.gather(1, parent_index[:, :, None].expand(-1, -1, seen.shape[2]))
    return _keep_best(roots, budget, *(torch.cat(grown, -1) for grown in (scores, edges, tokens, parents)))


def growable(budget: Budget) -> Budget:
    """Return the budget with `num_nodes` reduced to the most nodes that a dynamic tree within it can have."""
    candidates = budget.top_k + (budget.num_steps - 1) * budget.top_k**2
    return replace(budget, num_nodes=min(budget.num_nodes, 1 + candidates))


def _keep_best(roots: Tensor, budget: Budget, scores: Tensor, edges: Tensor, tokens: Tensor, parents: Tensor) -> Draft:
    """Return a draft of the roots and the best `num_nodes - 1` of M candidates `[B, M]`, in order of growth."""
    rows = torch.arange(scores.shape[0], device=scores.device)[:, None]
    kept = _best(scores, min(budget.num_nodes - 1, scores.shape[1]))
    # index[c + 1] is the node of candidate c; candidate -1 is the root, node 0
    index = torch.zeros(scores.shape[0], scores.shape[1] + 1, dtype=torch.long, device=scores.device)
    nodes = torch.arange(1, kept.shape[1] + 1, device=scores.device).expand_as(kept)
    index = index.scatter(1, kept + 1, nodes)
    tree = TokenTree(
        tokens=torch.cat([roots[:, None], tokens.gather(1, kept)], dim=-1),
        parents=torch.cat([torch.full_like(rows, ROOT_PARENT), index.gather(1, parents.gather(1, kept) + 1)], dim=-1),
        max_depth=budget.num_steps,
    )
    return Draft(tree, pad(edges.gather(1, kept), (1, 0)))


def _best(scores: Tensor, count: int) -> Tensor:
    """Return the indices `[B, count]`, ascending, of the best of M candidates `[B, M]`; ties go to the first."""
    if scores.device.type == "cpu":  # one sort is fastest there
        return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count].sort(dim=-1).values
    return _best_of_ties(scores, count)


def _best_of_ties(scores: Tensor, count: int) -> Tensor:
    """Implement `_best` without a stable sort, which some backends (MPS) lack.

    Only candidates that tie with the last kept one are ordered by index, which `float32` represents exactly.
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

    parents: Tensor  # [K] index of each node's parent among the expanded nodes of the level above
    ranks: Tensor  # [K] rank of each node among the parent's children
    expanded: Tensor  # [E] indices of this level's nodes with children


@dataclass(frozen=True, slots=True)
class StaticLevels:
    """The shape of a static tree, as index tensors for each level."""

    choices: tuple[Choice, ...]
    node_parents: Tensor  # [N] parents of all nodes
    steps: tuple[StaticStep, ...]
    top_k: int  # children needed per node: the largest rank + 1

    @classmethod
    def of(cls, choices: Sequence[Choice], device: torch.device) -> StaticLevels:
        """Create the levels from the paths of a tree, which must be sorted as by `config.validate_choices`."""

        def indices(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.long, device=device)

        steps = []
        expanded: list[Choice] = [()]
        for depth in range(1, max(map(len, choices)) + 1):
            level = [path for path in choices if len(path) == depth]
            inner = [path for path in level if any(longer[:-1] == path for longer in choices)]
            parents, ranks = [expanded.index(path[:-1]) for path in level], [path[-1] for path in level]
            steps.append(StaticStep(indices(parents), indices(ranks), indices([level.index(path) for path in inner])))
            expanded = inner
        return cls(tuple(choices), indices(choice_parents(choices)), tuple(steps), choices_budget(choices).top_k)

    @property
    def num_entries(self) -> int:
        """Number of expanded nodes below the root; a draft layer appends one cache entry for each."""
        return sum(len(step.expanded) for step in self.steps)


def grow_static(roots: Tensor, root: Level, expand: Expand, levels: StaticLevels) -> Draft:
    """Grow a static tree as EAGLE-1 does: the shape gives the rank of each node among its parent's children.

    `root` has at least `levels.top_k` children; further arguments as for `grow_dynamic`.
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
    """Return the parents of all nodes of the static tree with these paths, root first.

    Example: [(0,), (1,), (0, 0)] gives [-1, 0, 0, 1].
    """
    index = {(): 0} | {path: node for node, path in enumerate(choices, start=1)}
    return [ROOT_PARENT, *(index[path[:-1]] for path in choices)]


def choices_within(choices: Sequence[Choice], budget: Budget) -> list[Choice]:
    """Return the first paths of a static tree that fit a budget; parents must precede their children.

    Example: [(0,), (1,), (0, 2), (0, 3)] within 4 nodes, 2 steps, 1 child is [(0,), (0, 2)].
    """
    kept: dict[Choice, int] = {(): 0}  # number of kept children of each
    for path in choices:
        parent = path[:-1]
        if len(path) <= budget.num_steps and kept.get(parent, budget.top_k) < budget.top_k:
            kept[parent] += 1
            kept[path] = 0
    return list(kept)[1 : budget.num_nodes]


def choices_budget(choices: Sequence[Choice]) -> Budget:
    """Return the smallest budget for the static tree with these paths; its `top_k` is the largest rank + 1."""
    deepest, widest = max(map(len, choices), default=0), max((max(path) for path in choices), default=0)
    return Budget(len(choices) + 1, deepest, widest + 1)


TreeShape = Budget | StaticLevels
"""Shape of a tree to grow: dynamic within a budget, or static."""


def grow(roots: Tensor, root: Level, expand: Expand, shape: TreeShape, *, expands_all: bool = False) -> Draft:
    """Grow a tree with `grow_static` or `grow_dynamic`; `expands_all`: every node that could be kept."""
    if isinstance(shape, StaticLevels):
        return grow_static(roots, root, expand, shape)
    return grow_dynamic(roots, root, expand, shape, max(shape.num_nodes - 1, 1) if expands_all else None)


# ----------------------------------------------------------------------------------------------- likeliest ranks


def node_acceptance(path: Sequence[int], accuracies: Accuracies) -> float:
    """Return the probability that the node at a path of ranks is accepted: the product of its nodes' accuracies.

    As Medusa does, this assumes that an accuracy depends only on depth and rank.
    """
    return prod(accuracies[depth][rank] for depth, rank in enumerate(path))


def likeliest_choices(accuracies: Accuracies, num_nodes: int) -> list[Choice]:
    """Return the paths most likely to be accepted, best first, parents before children (Medusa, section 2.3.3).

    The tree has `num_nodes` nodes, or fewer if all other candidates have accuracy 0, or if there are none.

    Example: accuracies [[0.6, 0.2], [0.5, 0.1]] and 4 nodes give [(0,), (0, 0), (1,)]: 0.6, 0.3, 0.2.
    """
    ranks = range(len(accuracies[0]))
    # ties go to the shallower node, then to the path with the lower ranks
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
    """A tree on the host, built by adding chains of tokens; chains with a common prefix share its nodes."""

    def __init__(self, root: int) -> None:
        self.tokens, self.parents = [root], [ROOT_PARENT]  # of each node, root first
        self._children: dict[tuple[int, int], int] = {}

    def add(self, chain: Iterable[int], num_nodes: int, node: int = 0) -> int:
        """Add a chain below a node until the tree has `num_nodes` nodes; return the last node reached."""
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


# ----------------------------------------------------------------------------------------------- products of depths


def reachable(budget: Budget) -> Budget:
    """Return the budget with `num_nodes` reduced to the size of a tree in which every node has `top_k` children."""
    size, level = 1, 1
    for _ in range(budget.num_steps):
        level *= budget.top_k
        size += level
        if size >= budget.num_nodes:
            return budget
    return replace(budget, num_nodes=size)


def likeliest_nodes(roots: Tensor, log_probs: Tensor, tokens: Tensor, shape: TreeShape) -> Draft:
    """Return the tree of the likeliest nodes; ties go to the shallower node, then to the lower ranks.

    A static shape determines the nodes, whatever their probability.

    Args:
        roots: `[B]` root tokens.
        log_probs, tokens: `[B, D, W]` the W best tokens at each depth, best first; log-probabilities are at most 0.
        shape: Size or shape of the tree; its depth and width must not exceed D and W.
    """
    scores = log_probs.float()

    def level(depth: int, count: int) -> Level:
        """Return the children of `count` nodes at a depth."""
        children = (values[:, depth, None].expand(-1, count, -1) for values in (scores, tokens))
        return Level(scores[:, :0], *children)

    def expand(frontier: Tensor, _above: Level, _parents: Tensor, _seen: Tensor, depth: int) -> Level:
        return level(depth, frontier.shape[1])

    return grow(roots, level(0, 1), expand, shape, expands_all=True)


def children_of_likeliest(roots: Tensor, log_probs: Tensor, tokens: Tensor, budget: Budget) -> Draft:
    """Return JetSpec's tree: the likeliest nodes get all `top_k` children, the last of them only as many as fit.

    Nodes are ordered parent by parent, the likeliest first. Arguments as for `likeliest_nodes`.
    """
    steps, width, drafted = budget.num_steps, budget.top_k, budget.num_nodes - 1
    log_probs, tokens = log_probs[:, :steps, :width].float(), tokens[:, :steps, :width]
    count = -(-drafted // width)  # number of parents, root included
    places = torch.arange(steps * width, device=roots.device).view(steps, width)
    inner = Draft.plain(torch.full_like(roots, -width))  # the parents; their tokens are places
    if count > 1 and steps > 1:
        most = reachable(Budget(count, steps - 1, width))
        inner = likeliest_nodes(torch.full_like(roots, -width), log_probs, places.expand_as(tokens), most)
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
    tokens = torch.cat([roots[:, None], tokens.flatten(1).gather(1, columns)], dim=-1)
    parents = nodes.repeat_interleave(width, dim=1)[:, :drafted]
    tree = TokenTree(tokens, pad(parents, (1, 0), value=ROOT_PARENT), max_depth=steps)
    return Draft(tree, pad(log_probs.flatten(1).gather(1, columns), (1, 0)))
