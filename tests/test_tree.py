"""The tree's derived facts against recursive definitions, and the notation of choice lists."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_specdec.cpu import library
from hf_specdec.errors import InvalidConfigError
from hf_specdec.trees import growth
from hf_specdec.trees.draft import Budget
from hf_specdec.trees.growth import BLOCK, Level, PrefixTree, best_children, grow_dynamic
from hf_specdec.trees.tree import TokenTree, chosen_path, stack_trees
from hf_specdec.validation import validate_choices
from reference import path_to_root


@st.composite
def random_parents(draw: st.DrawFn) -> list[int]:
    size = draw(st.integers(1, 40))
    return [-1, *(draw(st.integers(-1, node - 1)) for node in range(1, size))]


def tree_of(parents: list[int]) -> TokenTree:
    return TokenTree(torch.arange(len(parents))[None], torch.tensor(parents))


@given(random_parents())
def test_ancestors_and_depths_equal_the_walk_to_the_root(parents: list[int]) -> None:
    tree = tree_of(parents)
    tree.validate()
    mask, depths = tree.ancestor_mask()[0], tree.depths()[0]
    for node in range(len(parents)):
        path = path_to_root(parents, node)
        assert mask[node].nonzero().flatten().tolist() == sorted(path)
        assert depths[node] == len(path) - 1


@given(random_parents(), st.data())
def test_chosen_path_is_the_walk_in_order(parents: list[int], data: st.DataObject) -> None:
    tree = tree_of(parents)
    node = data.draw(st.integers(0, len(parents) - 1))
    path = chosen_path(tree, tree.ancestor_mask()[:, node])[0]
    assert path[path >= 0].tolist() == path_to_root(parents, node)
    assert (path[(path >= 0).sum() :] == -1).all()


def test_paths_are_added_below_any_node() -> None:
    tree = PrefixTree(5)
    assert tree.add([7, 8], 4) == 2
    assert tree.add([9, 6], 4, node=1) == 3  # one node fits, the other does not
    assert tree.add([7, 9], 4) == 3  # both are there
    assert (tree.tokens, tree.parents) == ([5, 7, 8, 9], [-1, 0, 1, 1])


def test_rows_of_different_sizes_are_padded_with_nodes_on_no_path() -> None:
    tree = stack_trees([([5, 6], [-1, 0]), ([7], [-1])], torch.device("cpu"))
    tree.validate()
    assert tree.tokens.tolist() == [[5, 6], [7, 7]]
    assert tree.parents.tolist() == [[-1, 0], [-1, -1]]
    assert tree.max_depth == tree.depth_bound == 1
    for max_depth, bound in ((None, 1), (9, 1), (0, 0)):
        assert TokenTree(tree.tokens, tree.parents, max_depth=max_depth).depth_bound == bound
    assert tree.num_drafted.tolist() == [1, 0]
    assert tree.ancestor_mask()[1].int().tolist() == [[1, 0], [0, 1]]


def test_validate_names_what_is_wrong() -> None:
    for parents, probs, message in (
        ([-1], None, "parents must be"), ([0, 0, 0], None, "node 0"), ([-1, 2, 0], None, "precede"),
        ([-1, -2, 0], None, "precede"), ([-1, 0, 0], torch.ones(1, 4, 5), "draft_probs"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            TokenTree(torch.tensor([[1, 2, 3]]), torch.tensor(parents), probs).validate()


@pytest.mark.parametrize("choices", [[], [(0,), (0,)], [(0, 0)], [(0,), ()], [(-1,)], [(0.5,)], [(True,)], [3]])
def test_malformed_choice_lists_are_refused(choices: list[object]) -> None:
    assert validate_choices([[0, 0], [1], [0]]) == [(0,), (1,), (0, 0)]  # sorted by level
    with pytest.raises(InvalidConfigError):
        validate_choices(choices)


@pytest.mark.parametrize(
    ("tokens", "parents", "chain", "links"),
    [
        ([5, 6, 7, 8], [-1, 0, 0, 1], [5, 6, 8], [-1, 0, 1]),
        ([5, 6, 7, 8], [-1, 0, 0, 2], [5, 6], [-1, 0]),  # the first child has none
        ([5, 6, 7], [-1, -1, 0], [5, 7], [-1, 0]),  # padding before the child
        ([5, 6], [-1, -1], [5], [-1]),
        ([5], [-1], [5], [-1]),
        ([5, 6, 7, 8], [-1, 0, 1, 2], [5, 6, 7, 8], [-1, 0, 1, 2]),
    ],
)
def test_the_chain_of_first_children(
    tokens: list[int], parents: list[int], chain: list[int], links: list[int]
) -> None:
    tree = TokenTree(torch.tensor([tokens]), torch.tensor(parents))
    deepest = int(tree.depths().max())
    for cut in (tree.first_children(), TokenTree(tree.tokens, tree.parents, max_depth=deepest).first_children()):
        cut.validate()
        assert cut.tokens[0, : len(chain)].tolist() == chain
        assert cut.parents.tolist() == [[*links, *[-1] * (cut.num_nodes - len(links))]]
    assert cut.num_nodes == deepest + 1


def test_first_chains_of_a_batch_are_padded_and_keep_their_probabilities() -> None:
    tokens, parents = torch.tensor([[5, 6, 7, 8], [1, 2, 3, 4]]), torch.tensor([[-1, 0, 0, 1], [-1, 0, 0, -1]])
    probs = torch.arange(8.0).view(2, 4, 1)
    cut = TokenTree(tokens, parents, probs, max_depth=2).first_children()
    assert cut.tokens.tolist() == [[5, 6, 8], [1, 2, 1]]
    assert cut.parents.tolist() == [[-1, 0, 1], [-1, 0, -1]]
    assert cut.draft_probs is not None
    assert cut.draft_probs.flatten().tolist() == [0, 1, 3, 4, 5, 4]
    cut.validate()


def test_growth_stops_where_a_level_promises_too_little() -> None:
    """Growth stops at `Budget.min_level_probability`; the levels grown before are kept."""
    depths: list[int] = []

    def expand(
        tokens: torch.Tensor, above: Level, parent_index: torch.Tensor, seen: torch.Tensor, depth: int
    ) -> Level:
        depths.append(depth)
        return level(*tokens.shape)

    def level(rows: int, nodes: int) -> Level:
        log_probs = torch.tensor([0.5, 0.25]).log().expand(rows, nodes, 2)
        return Level(torch.zeros(rows, nodes, 1), log_probs, torch.arange(2).expand(rows, nodes, 2))

    roots = torch.tensor([7, 8])
    for least, wanted in ((0.0, [1, 2, 3]), (0.9, [1]), (0.4, [1, 2]), (1.1, [])):
        depths.clear()
        draft = grow_dynamic(roots, level(2, 1), expand, Budget(7, 4, 2, min_level_probability=least))
        draft.tree.validate()
        assert depths == wanted  # two rows: 1.0, 0.5 and 0.25 above levels 2, 3 and 4
        assert int(draft.tree.depths().max()) == min(len(wanted) + 1, 3)


def test_a_batch_may_have_more_rows_than_candidates() -> None:
    def expand(*_: object) -> Level:
        raise AssertionError("a tree of one level expands nothing")

    root = Level(
        torch.zeros(3, 1, 1), torch.tensor([[[-0.5]], [[-1.0]], [[-2.0]]]), torch.tensor([[[1]], [[2]], [[3]]])
    )
    draft = grow_dynamic(torch.tensor([7, 8, 9]), root, expand, Budget(2, 1, 1))
    assert draft.tree.tokens.tolist() == [[7, 1], [8, 2], [9, 3]]
    assert draft.tree.parents.tolist() == [[-1, 0]] * 3
    assert draft.log_probs is not None
    assert draft.log_probs.tolist() == [[0.0, -0.5], [0.0, -1.0], [0.0, -2.0]]


@pytest.mark.parametrize("kernel", [False, True])
@pytest.mark.parametrize("size", [50, 40 * BLOCK, 40 * BLOCK + 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_best_children_of_many(
    size: int, dtype: torch.dtype, kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By blocks or at once: the same probabilities, and ids that have them, ties and impossible tokens included."""
    if kernel and library.load_or_none() is None:
        pytest.skip("this machine cannot use the CPU kernels")
    monkeypatch.setattr(growth, "can_search", lambda _logits: kernel)
    logits = torch.randn(2, 3, size, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[0, 0, :20] = 6.0  # more ties in one block than children
    logits[0, 1, 5:] = -torch.inf
    every = logits.float().log_softmax(-1)
    values, ids = best_children(logits, 8)
    assert torch.allclose(values, every.topk(8, dim=-1).values)
    # the kernel adds probabilities in another order
    assert torch.allclose(every.gather(-1, ids), values) if kernel else torch.equal(every.gather(-1, ids), values)
    assert all(len(set(row)) == 8 for row in ids.flatten(0, 1).tolist())
