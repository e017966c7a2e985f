"""Edges of several sources merged into one tree: the likeliest nodes first, as many as pay.

A source tells, node by node, what may follow. Equal tokens under one node are one node with the larger probability;
the tree takes the nodes of the largest path probability, which is the best tree of its size: a node is never likelier
than its parent, so parents come first.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from math import exp
from typing import Any, NamedTuple

from hf_specdec.trees.tree import ROOT_PARENT

LEAST_PROBABILITY = 0.01
"""Of a node that is worth a thought."""
SLOWEST = 4
"""Of the power mean over rows: 1 is the harmonic mean, more is nearer to the slowest row."""
LEAST_GAIN = 1.1
"""Progress per second over that of a plain step that a draft for several rows must promise."""
CONFIDENCE_STEPS = 3.0
"""Classes of a confidence per factor of e."""
LEAST_CONFIDENCE = 12
"""The class of all lower confidences."""


class Candidate(NamedTuple):
    """What a source thinks may follow a node."""

    token: int
    kind: Hashable  # the class under which it is counted whether this comes true
    prior: float  # how likely its source takes it to be


class Candidates(ABC):
    """What one source would draft for one row, edge by edge.

    A place is what the source knows of a node: the root's is `start`.
    """

    start: Any

    @abstractmethod
    def after(self, place: Any) -> Sequence[Candidate]:
        """What may follow the node at a place, the likeliest first; each token once."""

    @abstractmethod
    def follow(self, place: Any, token: int) -> Any:
        """The place after a token; None where the source knows nothing of what comes then."""


class CachedCandidates(Candidates):
    """A source that is asked once about every place: trees are merged several times in a step.

    Args:
        source: Whose places can be keys; nothing it knows changes meanwhile.
    """

    def __init__(self, source: Candidates) -> None:
        self._source, self.start = source, source.start
        self._told: dict[Any, Sequence[Candidate]] = {}

    def after(self, place: Any) -> Sequence[Candidate]:
        """What the source said, or says."""
        told = self._told.get(place)
        if told is None:
            told = self._told[place] = self._source.after(place)
        return told

    def follow(self, place: Any, token: int) -> Any:
        """The source's."""
        return self._source.follow(place, token)


class DraftedCandidates(Candidates):
    """A tree that a session has drafted, as a source.

    Args:
        name: Of the source.
        tokens, parents: Of one row's nodes.
        log_probs: Confidence of each edge; None where the drafter tells none.
        buckets: Its drafter's own classes; None where it has none.

    Attributes:
        depth: Of its deepest node.
    """

    start = 0

    def __init__(
        self, name: str, tokens: Sequence[int], parents: Sequence[int], log_probs: Sequence[float] | None,
        buckets: Sequence[int] | None,
    ) -> None:  # fmt: skip
        self.depth = 0
        depths = [0] * len(tokens)
        self._below: dict[int, list[Candidate]] = {}
        self._nodes: dict[tuple[int, int], int] = {}
        for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            if parent == ROOT_PARENT or (parent, token) in self._nodes:
                continue
            siblings = self._below.setdefault(parent, [])
            self._nodes[parent, token] = node
            depths[node] = depths[parent] + 1
            self.depth = max(self.depth, depths[node])
            rank, log_prob = len(siblings), None if log_probs is None else log_probs[node]
            kind: Hashable = (name, min(rank, 3), None if log_prob is None else confidence_class(log_prob))
            if buckets is not None:
                kind = (name, buckets[node])
            prior = exp(log_prob) if log_prob is not None else 0.5 ** (rank + 1)
            siblings.append(Candidate(token, kind, prior))

    def after(self, place: int) -> Sequence[Candidate]:
        """The node's children in their order."""
        return self._below.get(place, ())

    def follow(self, place: int, token: int) -> int | None:
        """The child of that token."""
        return self._nodes.get((place, token))


def confidence_class(log_prob: float) -> int:
    """The class of a confidence: three per factor of e, up to a twelfth.

    Example: probabilities 1, 0.6 and 0.1 are of the classes 0, 1 and 6.
    """
    return min(int(-log_prob * CONFIDENCE_STEPS), LEAST_CONFIDENCE)


Probability = Callable[[Hashable, float], float]
"""`probability(kind, prior)`, see `calibration.Calibration`."""


class Child(NamedTuple):
    """What may follow a node when all sources are heard."""

    token: int
    probability: float
    source: int = 0  # the number of the one that was surest


def merge_children(sources: Sequence[Candidates], places: Sequence[Any], probability: Probability) -> list[Child]:
    """The candidates of all sources after one node, the likeliest first, each token once.

    A token's probability is the largest that a source gives it. Sources that name different tokens cannot both be
    right: what one of them is sure of leaves that much less to the others, and all together no more than one.

    Args:
        sources: The sources.
        places: What each knows of the node; None where it knows nothing.
        probability: Of an edge of a class.
    """
    best: dict[int, tuple[float, int]] = {}
    for index, (source, place) in enumerate(zip(sources, places, strict=True)):
        if place is not None:
            for token, kind, prior in source.after(place):
                value = probability(kind, prior)
                if value > best.get(token, (0.0, 0))[0]:
                    best[token] = value, index
    children, taken, left = list[Child](), [0.0] * len(sources), 1.0
    for token, (value, index) in sorted(best.items(), key=lambda item: -item[1][0]):
        elsewhere = 1.0 - left - taken[index]
        value = min(value * (1.0 - elsewhere), left)
        taken[index] += value
        left -= value
        children.append(Child(token, value, index))
    return children


@dataclass(frozen=True, slots=True)
class Merged:
    """A row's nodes, root first, by falling probability of their paths: the first n are the best tree of n nodes."""

    tokens: list[int]
    parents: list[int]
    values: list[float]  # probability of the path to each node; 1 of the root
    edges: list[float]  # of each node given its parent; 1 of the root
    sources: list[int] = field(default_factory=list)  # who was surest of each node; 0 of the root


class StopRule:
    """Whether a row's tree may still get faster by further nodes, while it grows: hearing sources takes time, too.

    The tree's nodes come by falling probability. So if it would not be faster though all that are to come were as
    likely as the next one, it is the best tree already.

    Args:
        costs: Seconds of a step that verifies 1, 2, ... nodes.
        spent: Seconds that drafting takes.
        trust: Of what was expected so far, how much came true.
    """

    def __init__(self, costs: Sequence[float], spent: float, trust: float = 1.0) -> None:
        self._seconds, self._trust = [cost + spent for cost in costs], trust
        self._width, self._tokens = 1, 1.0
        self._rate = 1.0 / self._seconds[0]

    def take(self, probability: float) -> None:
        """One more node."""
        self._width += 1
        self._tokens += self._trust * probability
        self._rate = max(self._rate, self._tokens / self._seconds[self._width - 1])

    def pays(self, probability: float) -> bool:
        """Whether some wider tree is faster than the best one so far, if every further node is that likely."""
        tokens = self._tokens
        for seconds in self._seconds[self._width :]:
            tokens += self._trust * probability
            if tokens > self._rate * seconds:
                return True
        return False


def merge(
    root: int, sources: Sequence[Candidates], probability: Probability, *, num_nodes: int, num_steps: int, top_k: int,
    prospect: StopRule | None = None,
) -> Merged:  # fmt: skip
    """The likeliest tree that the sources' edges make.

    Args:
        root: The root token.
        sources: Whom to ask.
        probability: Of an edge of a class.
        num_nodes, num_steps, top_k: The most nodes (root included), levels below the root, children of a node.
        prospect: New, for this tree: it ends where no further node can pay. None goes on to the most nodes.
    """
    tokens, parents, values, edges, depths, named = [root], [ROOT_PARENT], [1.0], [1.0], [0], [0]
    # (minus the path's probability, order of being found, parent, its child, the parent's places)
    heap: list[tuple[float, int, int, Child, tuple[Any, ...]]] = []
    found = 0

    def open_node(node: int, places: tuple[Any, ...]) -> None:
        nonlocal found
        if depths[node] == num_steps:
            return
        for child in merge_children(sources, places, probability)[:top_k]:
            value = values[node] * child.probability
            if value < LEAST_PROBABILITY:
                break
            heapq.heappush(heap, (-value, found, node, child, places))
            found += 1

    open_node(0, tuple(source.start for source in sources))
    while heap and len(tokens) < num_nodes:
        if prospect is not None:
            if not prospect.pays(-heap[0][0]):
                break
            prospect.take(-heap[0][0])
        value, _, parent, child, places = heapq.heappop(heap)
        tokens.append(child.token)
        parents.append(parent)
        values.append(-value)
        edges.append(child.probability)
        named.append(child.source)
        depths.append(depths[parent] + 1)
        after = (
            None if place is None else source.follow(place, child.token)
            for source, place in zip(sources, places, strict=True)
        )
        open_node(len(tokens) - 1, tuple(after))
    return Merged(tokens, parents, values, edges, named)


@dataclass(frozen=True, slots=True)
class Width:
    """How many nodes to verify, and what that is expected to bring."""

    num_nodes: int  # root included
    tokens: float  # expected of all rows
    progress: float  # the same where rows that advance little count for more
    seconds: float

    @property
    def rate(self) -> float:
        """Expected progress per second."""
        return self.progress / self.seconds


def best_width(rows: Sequence[Merged], costs: Sequence[float], spent: float, trust: float = 1.0) -> Width:
    """The width of most expected progress per second; of one row: `(1 + sum of the nodes' probabilities) / seconds`.

    A batch is done when its slowest row is: what the others gain beyond that is not gained. Progress is the number of
    rows times a mean of their expected tokens in which small ones weigh most (`SLOWEST`).

    Args:
        rows: The trees of the rows that go on; all are verified at one width.
        costs: Seconds of a step that verifies 1, 2, ... nodes per row.
        spent: Seconds that drafting takes.
        trust: Of what was expected so far, how much came true.
    """
    count, expected = len(rows), [1.0] * len(rows)
    best = Width(1, float(count), float(count), costs[0] + spent)
    for width in range(2, 1 + min(len(costs), max(len(row.values) for row in rows))):
        for index, row in enumerate(rows):
            if len(row.values) >= width:
                expected[index] += trust * row.values[width - 1]
        mean = (sum(tokens**-SLOWEST for tokens in expected) / count) ** (-1 / SLOWEST)
        wider = Width(width, sum(expected), count * mean, costs[width - 1] + spent)
        # rows differ, and the slowest decides: of several rows a draft must promise more than the promise may be off
        least = LEAST_GAIN if count > 1 and best.num_nodes == 1 else 1.0
        if wider.rate > least * best.rate:
            best = wider
    return best
