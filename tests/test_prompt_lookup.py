"""Suffix matching against brute force, and the trees that come of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_specdec import InvalidConfigError, SpeculativeConfig
from hf_specdec.drafters.base import DraftContext
from hf_specdec.drafters.prompt_lookup import PromptLookupDrafter, SuffixIndex


def brute_force(tokens: list[int]) -> list[tuple[int, int]]:
    """Every earlier place the text's end occurred at: (position that follows, length), longest then latest first.

    Where a pair occurred before, places that match a single token are left out.
    """
    found = []
    for position in range(1, len(tokens)):
        length = 0
        while length < position and tokens[position - 1 - length] == tokens[-1 - length]:
            length += 1
        if length:
            found.append((length, position))
    if any(length > 1 for length, _ in found):
        found = [(length, position) for length, position in found if length > 1]
    matches: list[tuple[int, int]] = []
    for length, position in sorted(found, reverse=True):
        if tokens[position] not in [tokens[other] for other, _ in matches]:
            matches.append((position, length))
    return matches


@settings(max_examples=300)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.lists(st.integers(1, 5), max_size=5))
def test_matches_equal_brute_force(tokens: list[int], cuts: list[int]) -> None:
    """The text arrives in pieces of any size."""
    begin = max(1, len(tokens) - sum(cuts))
    index = SuffixIndex(tokens[:begin])
    for cut in cuts:
        index.extend(tokens[begin : begin + cut])
        begin += cut
    index.extend(tokens[begin:])
    assert index.tokens == tokens
    assert index.longest_matches(10) == brute_force(tokens)


def propose(ids: list[int], root: int, **fields: Any) -> tuple[list[int], list[int]]:
    context = DraftContext(torch.tensor([ids]), None, torch.tensor([root]))
    drafter, config = PromptLookupDrafter(), SpeculativeConfig("prompt_lookup", **fields)
    tree = drafter.start(None, context, config).propose(drafter.limits(config)).tree  # type: ignore[arg-type]
    tree.validate()
    return tree.tokens[0].tolist(), tree.parents.tolist()[0]


def test_without_a_match_the_root_stands_alone() -> None:
    assert propose([1, 2, 3], 4) == ([4], [-1])


def test_a_match_is_continued() -> None:
    # the end [2, 3] stood before 4, 5
    assert propose([1, 2, 3, 4, 5, 9, 2], 3) == ([3, 4, 5, 9, 2, 3], [-1, 0, 1, 2, 3, 4])


def test_two_continuations_form_one_tree_latest_first() -> None:
    tokens, parents = propose([2, 3, 4, 6, 2, 3, 7, 8, 2], 3, num_draft_tokens=5)
    assert tokens[1] == 7
    assert tokens[parents.index(0, parents.index(0) + 1)] == 4
    assert len(tokens) == 5


def test_fields_limit_the_tree() -> None:
    ids = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2]
    assert len(propose(ids, 3, num_steps=2)[0]) == 3
    assert len(propose(ids, 3, num_draft_tokens=4)[0]) == 4
    assert len(propose(ids, 3, num_draft_tokens=1)[0]) == 1


def test_a_tree_field_means_nothing_here() -> None:
    with pytest.raises(InvalidConfigError, match="follows from the matches"):
        PromptLookupDrafter().limits(SpeculativeConfig("prompt_lookup", tree=[(0,)]))
