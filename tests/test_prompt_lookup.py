"""Suffix matching against brute force, and the trees that come of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_specdec import SpeculativeConfig
from hf_specdec.drafters.base import DraftContext
from hf_specdec.drafters.prompt_lookup import (
    MATCH_CLASSES,
    NO_MATCH,
    ONLY_ACCEPTANCE,
    SEVERAL_ACCEPTANCE,
    SHORTER_FACTOR,
    PromptLookupDrafter,
    RepeatedText,
    SuffixAutomaton,
)
from hf_specdec.verification.features import PromptPadding


def ends(tokens: list[int]) -> list[tuple[int, int]]:
    """Every earlier place the text's end occurred at: (position that follows, length)."""
    found = []
    for position in range(1, len(tokens)):
        length = 0
        while length < position and tokens[position - 1 - length] == tokens[-1 - length]:
            length += 1
        if length:
            found.append((position, length))
    return found


@settings(max_examples=300)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.lists(st.integers(1, 5), max_size=5))
def test_matches_equal_brute_force(tokens: list[int], cuts: list[int]) -> None:
    """The text arrives in pieces of any size; what follows the longest match comes latest first."""
    begin = max(1, len(tokens) - sum(cuts))
    automaton = SuffixAutomaton(tokens[:begin])
    for cut in cuts:
        automaton.extend(tokens[begin : begin + cut])
        begin += cut
    automaton.extend(tokens[begin:])
    found = ends(tokens)
    longest = max((length for _, length in found), default=0)
    state, length = automaton.matched
    assert length == longest
    latest = {tokens[position]: position for position, length in sorted(found) if length >= longest}
    if longest:
        order = sorted(latest, key=lambda token: -latest[token])
        assert [token for token, _ in automaton.continuations(state)] == order
    assert len(automaton.length) <= max(2, 2 * len(tokens))


@settings(max_examples=200)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.lists(st.integers(0, 4), max_size=10))
def test_following_equals_brute_force(tokens: list[int], other: list[int]) -> None:
    """The longest end of another text that occurs in this one, token by token."""
    automaton, match = SuffixAutomaton(tokens), NO_MATCH
    text = "".join(map(str, tokens))
    for count, token in enumerate(other, start=1):
        match = automaton.follow(match, token)
        read = "".join(map(str, other[:count]))
        assert match.length == max(size for size in range(count + 1) if read[count - size :] in text)


@settings(max_examples=50)
@given(st.lists(st.integers(0, 2), max_size=20))
def test_pieces_that_end_at_the_same_places_are_one_state(tokens: list[int]) -> None:
    places: dict[tuple[int, ...], list[int]] = {}
    for end in range(len(tokens) + 1):
        for begin in range(end + 1):
            places.setdefault(tuple(tokens[begin:end]), []).append(end)
    assert len(SuffixAutomaton(tokens).length) == len(set(map(tuple, places.values())))


def test_matches_do_not_cross_the_texts_of_a_corpus() -> None:
    corpus = SuffixAutomaton.of_corpus([[1, 2, 3], [4, 5]])
    match = corpus.follow(corpus.follow(NO_MATCH, 2), 3)
    assert match.length == 2
    assert corpus.continuations(match.state) == []  # the end of a text is no token
    assert corpus.follow(match, 4).length == 1


def test_a_corpus_is_looked_up_beside_the_text() -> None:
    text = RepeatedText([8, 9, 1, 2], SuffixAutomaton.of_corpus([[5, 1, 2, 3, 4]]))
    assert [candidate.token for candidate in text.after(text.start)] == [3]
    assert RepeatedText([1, 2], SuffixAutomaton.of_corpus([[5, 1, 2, 3, 4]])).longest_match == 2
    place = text.follow(text.start, 3)
    assert [candidate.token for candidate in text.after(place)] == [4]
    text.extend([7, 1, 2])  # now the text itself continues
    assert {candidate.token for candidate in text.after(text.start)} == {7, 3}


def test_shorter_matches_follow_longer_ones() -> None:
    # [2, 3] was followed by 4, the end [3] of it also by 6
    text = RepeatedText([3, 6, 0, 2, 3, 4, 5, 2, 3])
    first, second = text.after(text.start)
    assert (first.token, second.token) == (4, 6)
    assert first.probability > second.probability


@pytest.mark.parametrize(
    ("length", "prior"),
    [(1, 0.33), (2, 0.55), (3, 0.73), (4, 0.73), (5, 0.79), (8, 0.79), (9, 0.87), (16, 0.87), (17, 0.95)],
)
def test_the_longer_the_match_the_surer_its_only_continuation(length: int, prior: float) -> None:
    body = list(range(10, 10 + length))
    text = RepeatedText([*body, 5, 6, *body])
    assert text.longest_match == length
    (candidate,) = text.after(text.start)
    assert (candidate.token, candidate.probability) == (5, prior)


def test_several_continuations_are_less_sure_and_no_more_than_four() -> None:
    text = RepeatedText([token for after in (3, 4, 5, 6, 7) for token in (1, 2, after)] + [0, 2, 9, 1, 2])
    found = text.after(text.start)
    assert found == [(7, 0.15), (6, 0.12), (5, 0.08), (4, 0.06)]
    shorter = RepeatedText([3, 6, 0, 2, 3, 4, 5, 2, 3])
    assert [candidate.probability for candidate in shorter.after(shorter.start)] == [0.55, 0.25 * 0.12]


def propose(ids: list[int], root: int, **fields: Any) -> tuple[list[int], list[int]]:
    context = DraftContext(torch.tensor([ids]), None, torch.tensor([root]))
    drafter, config = PromptLookupDrafter(), SpeculativeConfig("prompt_lookup", **fields)
    tree = drafter.start(None, context, config).propose(drafter.limits(config)).tree  # type: ignore[arg-type]
    tree.validate()
    return tree.tokens[0].tolist(), tree.parents.tolist()[0]


def test_without_a_match_the_root_stands_alone() -> None:
    assert propose([1, 2, 3], 4) == ([4], [-1])


def test_a_match_is_continued() -> None:
    # the end [2, 3] stood before 4, 5, 9 and, once more, 2, 3: it goes round
    assert propose([1, 2, 3, 4, 5, 9, 2], 3) == ([3, 4, 5, 9, 2, 3, 4], [-1, 0, 1, 2, 3, 4, 5])


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


@pytest.mark.parametrize(("rows", "nodes"), [(1, 32), (2, 16), (8, 4), (20, 4)])
def test_rows_of_a_batch_share_the_nodes(rows: int, nodes: int) -> None:
    text, drafter, config = list(range(3, 30)) * 2, PromptLookupDrafter(), SpeculativeConfig("prompt_lookup")
    context = DraftContext(torch.tensor([text] * rows), None, torch.tensor([3] * rows))
    tree = drafter.start(None, context, config).propose(drafter.limits(config)).tree  # type: ignore[arg-type]
    assert tree.tokens.shape == (rows, nodes)
    assert tree.tokens[-1].tolist() == (text + text)[:nodes]


def test_padding_is_no_text_and_rows_that_ended_learn_nothing() -> None:
    ids, mask = torch.tensor([[9, 4, 1, 2], [9, 4, 1, 9]]), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    context = DraftContext(ids, PromptPadding.of(mask), torch.tensor([9, 4]))
    drafter, config = PromptLookupDrafter(), SpeculativeConfig("prompt_lookup")
    session = drafter.start(None, context, config)  # type: ignore[arg-type]
    budget = drafter.limits(config)
    tree = session.propose(budget).tree
    assert tree.num_drafted.tolist() == [0, 6]
    session.observe(SimpleNamespace(acceptance=SimpleNamespace(emitted=((1, 2), ()))))  # type: ignore[arg-type]
    assert session.propose(budget).tree.tokens[:, :2].tolist() == [[2, 9], [4, 1]]


@settings(max_examples=300)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=40))
def test_each_continuation_is_trusted_by_its_own_match(tokens: list[int]) -> None:
    """A shorter end that was continued in another way is worth what its own length is worth, not the longest one's."""
    found = RepeatedText(tokens)
    longest: dict[int, int] = {}  # of the ends that were followed by each token
    for position, length in ends(tokens):
        longest[tokens[position]] = max(length, longest.get(tokens[position], 0))
    for token, probability in found.after(found.start):
        factor = SHORTER_FACTOR if longest[token] < max(longest.values()) else 1.0
        match_class = sum(longest[token] > bound for bound in MATCH_CLASSES)
        assert probability in [factor * value for value in (ONLY_ACCEPTANCE[match_class], *SEVERAL_ACCEPTANCE)], token
