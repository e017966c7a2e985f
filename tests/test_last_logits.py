"""Last-logits drafting: the runners-up of the last token, and nothing where they are not known."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_specdec import SpeculativeConfig
from hf_specdec.acceptance.accepted import Accepted
from hf_specdec.drafters.base import DraftContext
from hf_specdec.drafters.experimental.last_logits import LastLogitsDrafter
from hf_specdec.trees.draft import PLAIN_STEP, Budget, Draft
from hf_specdec.trees.tree import TokenTree

PROBS = torch.tensor([0.02, 0.5, 0.2, 0.08, 0.1, 0.04, 0.03, 0.015, 0.01, 0.005])


def session(num_roots: int = 1) -> Any:
    context = DraftContext(torch.tensor([[3]] * num_roots), None, torch.tensor([5] * num_roots))
    return LastLogitsDrafter().start(None, context, SpeculativeConfig("last_logits"))  # type: ignore[arg-type]


def step(logits: torch.Tensor, path: list[list[int]], roots: list[int]) -> Any:
    """What a session hears after a tree `[B, 3]` was verified."""
    tree = TokenTree(torch.full((len(path), 3), 5), torch.tensor([-1, 0, 1]))
    emitted = tuple((root,) for root in roots)
    kept = torch.tensor(path)
    acceptance = Accepted(kept, kept, torch.tensor(roots), emitted, emitted, (2,) * len(path))
    return SimpleNamespace(draft=Draft(tree), verification=SimpleNamespace(logits=logits), acceptance=acceptance)


@pytest.mark.parametrize("path", [[0, -1], [0, 1]])
def test_the_runners_up_of_the_last_kept_node_are_drafted_without_the_root(path: list[int]) -> None:
    drafting = session()
    assert drafting.propose(Budget(5, 1, 4)).tree.num_nodes == 1  # nothing is known yet
    assert drafting.candidates[0].after(True) == []
    logits = torch.zeros(1, 3, 10)
    logits[0, sum(node >= 0 for node in path) - 1] = PROBS.log()
    drafting.observe(step(logits, [path], [1]))
    draft = drafting.propose(Budget(5, 1, 4))
    draft.tree.validate()
    assert draft.tree.tokens.tolist() == [[1, 2, 4, 3, 5]]
    assert draft.tree.parents.tolist() == [-1, 0, 0, 0, 0]
    assert draft.log_probs is not None
    torch.testing.assert_close(draft.log_probs[0].exp(), torch.tensor([1.0, 0.2, 0.1, 0.08, 0.04]))
    assert drafting.propose(Budget(5, 1, 1)).tree.tokens.tolist() == [[1, 2]]
    assert drafting.propose(Budget(3, 1, 4)).tree.tokens.tolist() == [[1, 2, 4]]
    assert drafting.propose(PLAIN_STEP).tree.num_nodes == 1
    found = drafting.candidates[0].after(drafting.candidates[0].start)
    assert [candidate.token for candidate in found] == [2, 4, 3, 5, 6, 0, 7, 8]
    assert found[0].probability == pytest.approx(0.2 * 0.2)
    assert drafting.candidates[0].follow(True, 2) is None


def test_rows_have_runners_up_of_their_own_and_ended_rows_do_no_harm() -> None:
    drafting = session(2)
    logits = torch.stack([PROBS.log(), PROBS.flip(0).log()])[:, None].expand(2, 3, 10)
    drafting.observe(step(logits, [[0, -1], [-1, -1]], [2, 8]))
    assert drafting.propose(Budget(3, 1, 2)).tree.tokens.tolist() == [[2, 1, 4], [8, 7, 5]]


def test_a_vocabulary_smaller_than_the_tree_drafts_nothing() -> None:
    drafting = session()
    drafting.observe(step(torch.zeros(1, 3, 6), [[0, -1]], [1]))
    assert drafting.candidates[0].after(True) == []
    assert drafting.propose(Budget(9, 1, 8)).tree.num_nodes == 1
