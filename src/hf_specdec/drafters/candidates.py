"""Merge the candidates of several sources into one tree, the likeliest nodes first.

For each node, a source lists candidate next tokens. If several sources list the same token after a node, it becomes
one child with the largest of their probabilities. Nodes are added by falling path probability, so the first n nodes
are the best tree of n nodes. A node is never likelier than its parent, so parents come first.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp
from typing import Any, NamedTuple

from hf_specdec.control.policy import UNKNOWN, StopRule, Trust, trust_class
from hf_specdec.drafters.base import Candidate, Candidates
from hf_specdec.trees.draft import Budget
from hf_specdec.trees.tree import ROOT_PARENT

MIN_PATH_PROBABILITY = 0.01
"""Nodes with a lower estimated path probability are left out of a merged tree."""


class CachedCandidates(Candidates):
    """A source that caches the candidates of another one for one step, in which trees may be merged several times.

    The places of the other source are hashable, and it does not change during the step.
    """

    def __init__(self, source: Candidates) -> None:
        self._source, self.start, self.restricts = source, source.start, source.restricts
        self._cache: dict[Any, Sequence[Candidate]] = {}

    def after(self, place: Any) -> Sequence[Candidate]:
        """Return the source's candidates at a place, which it computes only once."""
        known = self._cache.get(place)
        if known is None:
            known = self._cache[place] = self._source.after(place)
        return known

    def follow(self, place: Any, token: int) -> Any:
        """Return the source's place after a token."""
        return self._source.follow(place, token)


class DraftedCandidates(Candidates):
    """One row of a drafted tree as a source of candidates; places are node indices, `depth` is that of the deepest.

    Padding is ignored, and so is a child whose token an earlier child of the same node has, with its descendants.
    Without log-probabilities, the children of a node are assumed to have the probabilities 1/2, 1/4, ... in the order
    drafted.
    """

    start = 0

    def __init__(self, tokens: Sequence[int], parents: Sequence[int], log_probs: Sequence[float] | None) -> None:
        self.depth = 0
        depths = [0] * len(tokens)
        self._children: dict[int, list[Candidate]] = {}
        self._nodes: dict[tuple[int, int], int] = {}
        for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            if parent == ROOT_PARENT or (parent, token) in self._nodes:
                continue
            siblings = self._children.setdefault(parent, [])
            self._nodes[parent, token] = node
            depths[node] = depths[parent] + 1
            self.depth = max(self.depth, depths[node])
            probability = 0.5 ** (len(siblings) + 1) if log_probs is None else exp(log_probs[node])
            siblings.append(Candidate(token, probability))

    def after(self, place: int) -> Sequence[Candidate]:
        """Return the node's children in the order drafted."""
        return self._children.get(place, ())

    def follow(self, place: int, token: int) -> int | None:
        """Return the node's child with this token; None if it has none."""
        return self._nodes.get((place, token))


class Child(NamedTuple):
    """A child of a node after merging all sources."""

    token: int
    probability: float
    source: int = 0  # index of the source that gave it the largest probability


def merge_children(sources: Sequence[Candidates], places: Sequence[Any], trusts: Sequence[Trust]) -> list[Child]:
    """Merge the candidates of all sources after one node, the likeliest first, each token once.

    A token gets the largest probability that any source gives it, times the trust in that source, at most 1. Sources
    that list different tokens cannot both be right, so tokens of one source reduce the probabilities of the others'
    less likely tokens. The sum is at most 1. `places` are each source's at the node; None if it has no candidates
    there. What a source that `restricts` cannot follow is left out first.
    """
    best: dict[int, tuple[float, int]] = {}
    for index, (source, place, trust) in enumerate(zip(sources, places, trusts, strict=True)):
        if place is not None:
            for token, probability in source.after(place):
                trusted = min(trust[trust_class(probability)] * probability, 1.0)
                if trusted > best.get(token, (0.0, 0))[0]:
                    best[token] = trusted, index
    for source, place in zip(sources, places, strict=True):
        if source.restricts and place is not None:
            best = {token: found for token, found in best.items() if source.follow(place, token) is not None}
    children, claimed, left = list[Child](), [0.0] * len(sources), 1.0
    for token, (probability, index) in sorted(best.items(), key=lambda item: -item[1][0]):
        probability = min(probability * (left + claimed[index]), left)  # the others have claimed the rest
        claimed[index] += probability
        left -= probability
        children.append(Child(token, probability, index))
    return children


@dataclass(frozen=True, slots=True)
class MergedTree:
    """One row's nodes, root first, by falling path probability: the first n are the best tree of n nodes."""

    tokens: list[int]
    parents: list[int]
    path_probs: list[float]  # 1 for the root
    edge_probs: list[float]  # probability of each node given its parent; 1 for the root
    sources: list[int] = field(default_factory=list)  # index of each node's source; 0 for the root


def merge_sources(
    root: int, sources: Sequence[Candidates], budget: Budget, trusts: Sequence[Trust] | None = None,
    stop_rule: StopRule | None = None,
) -> MergedTree:  # fmt: skip
    """Return the likeliest tree of all sources' candidates, without nodes below `MIN_PATH_PROBABILITY`.

    Args:
        root, sources: Of this row.
        budget: Maximum size of the tree.
        trusts: Factors for each source's probabilities; None means 1 for all sources.
        stop_rule: A new `StopRule`, updated here, that may end the growth early; None lets the tree grow to the
            budget's nodes.
    """
    tokens, parents, path_probs, edge_probs, depths, named = [root], [ROOT_PARENT], [1.0], [1.0], [0], [0]
    # (negative path probability, insertion order, parent, child, the parent's places)
    heap: list[tuple[float, int, int, Child, tuple[Any, ...]]] = []
    num_found, trusts = 0, trusts or [UNKNOWN] * len(sources)

    def open_node(node: int, places: tuple[Any, ...]) -> None:
        nonlocal num_found
        if depths[node] == budget.num_steps:
            return
        for child in merge_children(sources, places, trusts)[: budget.top_k]:
            path_prob = path_probs[node] * child.probability
            if path_prob < MIN_PATH_PROBABILITY:
                break
            heapq.heappush(heap, (-path_prob, num_found, node, child, places))
            num_found += 1

    open_node(0, tuple(source.start for source in sources))
    while heap and len(tokens) < budget.num_nodes:
        if stop_rule is not None:
            if not stop_rule.may_pay(-heap[0][0]):
                break
            stop_rule.add(-heap[0][0])
        negative, _, parent, child, places = heapq.heappop(heap)
        tokens.append(child.token)
        parents.append(parent)
        path_probs.append(-negative)
        edge_probs.append(child.probability)
        named.append(child.source)
        depths.append(depths[parent] + 1)
        after = (
            None if place is None else source.follow(place, child.token)
            for source, place in zip(sources, places, strict=True)
        )
        open_node(len(tokens) - 1, tuple(after))
    return MergedTree(tokens, parents, path_probs, edge_probs, named)
