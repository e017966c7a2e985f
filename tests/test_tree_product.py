"""Trees of one distribution per depth, against an exhaustive search and JetSpec's own loop (`accum_logp`)."""

from __future__ import annotations

import heapq

import pytest
import torch
from torch import Tensor

from hf_specdec.trees.draft import Budget
from hf_specdec.trees.growth import children_of_likeliest, likeliest_nodes, reachable
from reference import paths_of

Path = tuple[int, ...]
RULES = (likeliest_nodes, children_of_likeliest)


def best_paths(log_probs: list[list[float]], num_nodes: int) -> list[tuple[float, int, Path]]:
    """The likeliest paths of ranks with score and depth; ties go to the shallower one, then to the lower ranks."""
    heap: list[tuple[float, int, Path]] = [(-value, 1, (rank,)) for rank, value in enumerate(log_probs[0])]
    heapq.heapify(heap)
    found: list[tuple[float, int, Path]] = []
    while heap and len(found) < num_nodes - 1:
        cost, depth, path = heapq.heappop(heap)
        found.append((-cost, depth, path))
        if depth < len(log_probs):
            for rank, value in enumerate(log_probs[depth]):
                heapq.heappush(heap, (cost - value, depth + 1, (*path, rank)))
    return found


def jetspec(
    root: int, tokens: list[list[int]], log_probs: list[list[float]], num_nodes: int
) -> tuple[list[int], list[int]]:
    """Tokens and parents of JetSpec's tree: pop the likeliest node, add all its children."""
    found, parents, depths, pushed = [root], [-1], [0], 0
    heap = [(0.0, 0, 0)]
    while heap and len(found) < num_nodes:
        cost, _, node = heapq.heappop(heap)
        depth = depths[node]
        if depth >= len(tokens):
            continue
        for rank in range(min(len(tokens[0]), num_nodes - len(found))):
            found.append(tokens[depth][rank])
            parents.append(node)
            depths.append(depth + 1)
            pushed += 1
            heapq.heappush(heap, (cost - log_probs[depth][rank], pushed, len(found) - 1))
    return found, parents


def random_inputs(generator: torch.Generator, rows: int = 2) -> tuple[Tensor, Tensor, Tensor, Budget]:
    """Roots, log-probabilities, tokens, and the budget of a tree of 2 to 39 nodes."""

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    depth, width, size = draw(1, 8), draw(1, 8), draw(2, 40)
    logits = torch.randn(rows, depth, 50, generator=generator) * 3
    log_probs, tokens = logits.log_softmax(-1).topk(width, dim=-1)
    return torch.arange(60, 60 + rows), log_probs, tokens, reachable(Budget(size, depth, width))


def test_the_likeliest_nodes_are_those_of_a_search() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(100):
        roots, log_probs, tokens, budget = random_inputs(generator)
        draft = likeliest_nodes(roots, log_probs, tokens, budget)
        draft.tree.validate()
        assert draft.tree.num_nodes == budget.num_nodes
        assert draft.tree.tokens[:, 0].tolist() == roots.tolist()
        assert draft.log_probs is not None
        for row in range(2):
            wanted = best_paths(log_probs[row].tolist(), budget.num_nodes)
            named = {tuple(int(tokens[row, d, r]) for d, r in enumerate(path)): path for _, _, path in wanted}
            found = paths_of(draft.tree, row)
            assert set(found) == set(named)
            for node, path in enumerate(found, start=1):  # the edge's own log-probability
                assert draft.log_probs[row, node] == log_probs[row, len(path) - 1, named[path][-1]]


def test_ties_go_to_the_shallower_node() -> None:
    """Sums of a few round numbers, certain tokens among them: scores and depths are those of the search."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(60):
        roots, log_probs, tokens, budget = random_inputs(generator, rows=1)
        log_probs = -(torch.randint(0, 3, log_probs.shape, generator=generator) / 4).sort(dim=-1).values
        draft = likeliest_nodes(roots, log_probs, tokens, budget)
        draft.tree.validate()
        rank_of = [{int(token): rank for rank, token in enumerate(row)} for row in tokens[0]]
        found = []
        for path in paths_of(draft.tree, 0):
            scores = [float(log_probs[0, depth, rank_of[depth][token]]) for depth, token in enumerate(path)]
            found.append((sum(scores), len(path)))
        wanted = [(score, depth) for score, depth, _ in best_paths(log_probs[0].tolist(), budget.num_nodes)]
        assert sorted(found) == sorted(wanted)


def test_children_of_the_likeliest_are_jetspecs() -> None:
    """Node for node, in the same order."""
    generator = torch.Generator().manual_seed(2)
    for _ in range(150):
        roots, log_probs, tokens, budget = random_inputs(generator)
        draft = children_of_likeliest(roots, log_probs, tokens, budget)
        draft.tree.validate()
        for row, root in enumerate(roots.tolist()):
            wanted = jetspec(root, tokens[row].tolist(), log_probs[row].tolist(), budget.num_nodes)
            assert (draft.tree.tokens[row].tolist(), draft.tree.parents[row].tolist()) == wanted
            assert draft.log_probs is not None
            for node, path in enumerate(paths_of(draft.tree, row), start=1):
                rank = tokens[row, len(path) - 1].tolist().index(path[-1])
                assert draft.log_probs[row, node] == log_probs[row, len(path) - 1, rank]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("budget", "parents"),
    [
        (Budget(1, 3, 2), [-1]),  # a root alone
        (Budget(5, 4, 1), [-1, 0, 1, 2, 3]),  # a chain of the whole block
        (Budget(3, 4, 1), [-1, 0, 1]),
        (Budget(2, 1, 1), [-1, 0]),
        (Budget(4, 1, 3), [-1, 0, 0, 0]),  # depth 1
        (Budget(3, 1, 3), [-1, 0, 0]),
        (Budget(2, 4, 3), [-1, 0]),
    ],
)
def test_small_trees(rule: object, budget: Budget, parents: list[int]) -> None:
    log_probs, tokens = torch.randn(2, 4, 20).log_softmax(-1).topk(3, dim=-1)
    draft = rule(torch.tensor([7, 8]), log_probs, tokens, budget)  # type: ignore[operator]
    draft.tree.validate()
    assert draft.tree.parents.expand(2, -1).tolist() == [parents] * 2
    for row in range(2):
        chain = [int(tokens[row, depth, 0]) for depth in range(4)]
        if budget.top_k == 1:
            assert draft.tree.tokens[row].tolist() == [7 + row, *chain[: budget.num_nodes - 1]]
        else:
            assert draft.tree.tokens[row, 1:].tolist() == tokens[row, 0, : budget.num_nodes - 1].tolist()


@pytest.mark.parametrize(
    ("budget", "size"),
    [
        (Budget(16, 4, 4), 16),
        (Budget(100, 4, 1), 5),
        (Budget(5, 4, 1), 5),
        (Budget(100, 3, 2), 1 + 2 + 4 + 8),
        (Budget(15, 3, 2), 15),
        (Budget(9, 1, 8), 9),
        (Budget(10, 1, 8), 9),
        (Budget(1, 3, 2), 1),
        (Budget(512, 64, 64), 512),
    ],
)
def test_reachable(budget: Budget, size: int) -> None:
    assert reachable(budget) == Budget(size, budget.num_steps, budget.top_k)


@pytest.mark.parametrize("rule", RULES)
def test_a_whole_tree(rule: object) -> None:
    """As many nodes as the depths and the width allow: every path is there once."""
    log_probs, tokens = torch.randn(1, 3, 20).log_softmax(-1).topk(2, dim=-1)
    draft = rule(torch.tensor([7]), log_probs, tokens, reachable(Budget(400, 3, 2)))  # type: ignore[operator]
    draft.tree.validate()
    paths = paths_of(draft.tree, 0)
    assert len(set(paths)) == len(paths) == 14
