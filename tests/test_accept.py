"""Acceptance rules: worked cases, the device path against the walk, and exact enumeration of the sampled output."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    EosTokenCriteria,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
)

from hf_specdec.acceptance.accepted import Accepted
from hf_specdec.acceptance.rules import (
    AcceptanceRule,
    block,
    descend,
    follow,
    greedy,
    match_at_once,
    nucleus,
    rejection,
    typical,
)
from hf_specdec.acceptance.transcript import Transcript
from hf_specdec.cpu import library
from hf_specdec.errors import UnsupportedGenerationError
from hf_specdec.trees.tree import TokenTree

VOCAB = 5
Rows = tuple[tuple[int, ...], ...]


def transcript(
    rows: int = 1, *, do_sample: bool = False, max_length: int = 100, eos: list[int] | None = None,
    lockstep: bool = False,
) -> Transcript:  # fmt: skip
    """A transcript of prompt [4, 3] whose root 0 has been emitted in every row."""
    criteria = StoppingCriteriaList([MaxLengthCriteria(max_length)])
    if eos:
        criteria.append(EosTokenCriteria(eos))
    text = Transcript(
        torch.tensor([[4, 3]] * rows), LogitsProcessorList(), criteria,
        max_length=max_length, do_sample=do_sample, lockstep=lockstep,
    )  # fmt: skip
    for row in range(rows):
        text.record(row, 0)
    return text


def says(*tokens: int) -> torch.Tensor:
    """Logits `[1, N, V]` whose argmax at node i is tokens[i]."""
    return torch.nn.functional.one_hot(torch.tensor([tokens]), VOCAB).float() * 9


def by_kernel(tree: TokenTree, logits: torch.Tensor, text: Transcript) -> Accepted:
    """Apply `greedy` with the CPU kernels loaded, which find all choices at once."""
    library.load_or_none()
    return greedy(tree, logits, text)


GREEDY_RULES = (follow, by_kernel, match_at_once, descend)


#   0 ─ 1 ─ 3        tokens of the nodes: root 0, then 1 and 2 below it, 3 below 1
#     └ 2
TREE = TokenTree(torch.tensor([[0, 1, 2, 3]]), torch.tensor([-1, 0, 0, 1]))


@pytest.mark.parametrize("rule", GREEDY_RULES)
@pytest.mark.parametrize(
    ("target", "path", "emitted"),
    [
        ((4, 0, 0, 0), [0], (4,)),  # nothing accepted: a correction
        ((1, 4, 0, 0), [0, 1], (1, 4)),  # one accepted, then a correction
        ((1, 3, 0, 2), [0, 1, 3], (1, 3, 2)),  # everything accepted: a bonus
        ((2, 3, 4, 0), [0, 2], (2, 4)),  # the second child
    ],
)
def test_worked_cases(
    target: tuple[int, ...], path: list[int], emitted: tuple[int, ...], rule: AcceptanceRule
) -> None:
    text = transcript()
    acceptance = rule(TREE, says(*target), text)
    assert acceptance.nodes == (tuple(path),)
    assert acceptance.emitted == (emitted,)
    for tensor, row in ((acceptance.path, path), (acceptance.tokens, emitted)):
        assert tensor[0, : len(row)].tolist() == list(row)
        assert (tensor[0, len(row) :] == -1).all()
    assert acceptance.num_drafted == (3,)
    assert acceptance.num_accepted.tolist() == [len(path) - 1]
    assert acceptance.next_token.tolist() == [emitted[-1]]
    assert text.new_tokens == [[0, *emitted]]


@pytest.mark.parametrize("rule", GREEDY_RULES)
def test_a_row_ends_inside_an_accepted_run(rule: AcceptanceRule) -> None:
    text = transcript(eos=[1])
    acceptance = rule(TREE, says(1, 3, 0, 2), text)
    assert acceptance.emitted == ((1,),)
    assert acceptance.nodes == ((0,),)
    assert text.finished == [True]
    after = rule(TREE, says(1, 3, 0, 2), text)
    assert after.emitted == ((),)
    assert after.counts == [0]
    assert (after.path == -1).all()
    assert after.next_token.tolist() == [0]  # its root: padding in the trees to come
    text = transcript(max_length=5)  # prompt 2, root 1: two more fit
    assert rule(TREE, says(1, 3, 0, 2), text).emitted == ((1, 3),)
    assert text.finished == [True]


@pytest.mark.parametrize("rule", GREEDY_RULES)
def test_token_zero_is_a_token(rule: AcceptanceRule) -> None:
    """Peers pad paths with id 0 and accept it where the target says 0."""
    text = transcript()
    tree = TokenTree(torch.tensor([[3, 0]]), torch.tensor([-1, 0]))
    assert rule(tree, says(0, 0), text).emitted == ((0, 0),)
    padded = TokenTree(torch.tensor([[3, 0]]), torch.tensor([-1, -1]))
    assert rule(padded, says(0, 0), transcript()).emitted == ((0,),)


def test_ties_fall_to_the_first_token_as_in_plain_generate() -> None:
    logits = torch.zeros(1, 4, VOCAB, dtype=torch.bfloat16)
    logits[..., 2:] = 1
    for rule in GREEDY_RULES:
        assert rule(TREE, logits, transcript()).emitted == ((2, 2),)


@st.composite
def trees_with_logits(draw: st.DrawFn) -> tuple[TokenTree, torch.Tensor]:
    rows, size = draw(st.integers(1, 3)), draw(st.integers(1, 12))
    parents, tokens = [], []
    for _ in range(rows):
        seen: set[tuple[int, int]] = set()
        row_parents, row_tokens = [-1], [0]
        for node in range(1, size):
            parent, token = draw(st.integers(-1, node - 1)), draw(st.integers(0, VOCAB - 1))
            parent = -1 if (parent, token) in seen else parent  # a duplicate becomes padding
            seen.add((parent, token))
            row_parents.append(parent)
            row_tokens.append(token)
        parents.append(row_parents)
        tokens.append(row_tokens)
    choices = [[draw(st.integers(0, VOCAB - 1)) for _ in range(size)] for _ in range(rows)]
    logits = torch.nn.functional.one_hot(torch.tensor(choices), VOCAB).float()
    return TokenTree(torch.tensor(tokens), torch.tensor(parents)), logits


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(trees_with_logits())
def test_the_device_path_equals_the_walk(case: tuple[TokenTree, torch.Tensor]) -> None:
    """Ragged and in lockstep, with rows that end on the way, over two steps."""
    tree, logits = case
    rows = len(tree.tokens)
    for lockstep in (False, True):
        texts = [transcript(rows, eos=[1], max_length=6, lockstep=lockstep) for _ in GREEDY_RULES]
        for _ in range(2):
            tree = tree.with_repeated(0, texts[0].padded(tree.tokens.device)) if lockstep else tree
            slow, *fast = [rule(tree, logits, text) for rule, text in zip(GREEDY_RULES, texts, strict=True)]
            for acceptance in fast:
                assert same_or_shorter(acceptance.emitted, slow.emitted, exactly=not lockstep)
                assert same_or_shorter(acceptance.nodes, slow.nodes, exactly=not lockstep)
                assert acceptance.num_drafted == slow.num_drafted
                assert acceptance.num_accepted.tolist() == [max(len(row) - 1, 0) for row in acceptance.nodes]
            if lockstep:
                break  # the walk may have gone further by a token
            assert all(text.finished == texts[0].finished for text in texts)
            if all(texts[0].finished):
                break


def same_or_shorter(ours: Rows, theirs: Rows, *, exactly: bool) -> bool:
    """In lockstep the walk goes on by one token where a row's last token was drafted, and pads there."""
    missing = 0 if exactly else 1
    return all(
        mine == whole[: len(mine)] and len(whole) - len(mine) in (0, missing)
        for mine, whole in zip(ours, theirs, strict=True)
    )


def exact_distribution(root_logits: dict[tuple[int, ...], torch.Tensor], length: int) -> dict[tuple[int, ...], float]:
    """Probability of every continuation under one-token-at-a-time sampling."""
    return {
        tokens: float(
            torch.stack([root_logits[tokens[:i]].double().softmax(-1)[tokens[i]] for i in range(length)]).prod()
        )
        for tokens in itertools.product(range(VOCAB), repeat=length)
    }


def sampled_pairs(bias: float, draws: int) -> tuple[Counter[tuple[int, ...]], dict[tuple[int, ...], float]]:
    """Two emitted tokens, sampled through a tree again and again, and their exact distribution.

    Args:
        bias: Probability of cheating: a drafted child is taken whatever the target says (a planted bug).
    """
    torch.manual_seed(0)
    logits = {prefix: torch.randn(VOCAB) for n in range(2) for prefix in itertools.product(range(VOCAB), repeat=n)}
    at_nodes = torch.stack([logits[()], logits[(1,)], logits[(2,)], torch.zeros(VOCAB)])[None]
    counts: Counter[tuple[int, ...]] = Counter()
    for _ in range(draws):
        text = transcript(do_sample=True)
        rejection(TREE, at_nodes, text)
        tokens = text.new_tokens[0][1:]
        if bias and torch.rand(()) < bias:
            tokens = [1, *tokens[1:]]
        while len(tokens) < 2:
            tokens.append(int(torch.multinomial(logits[tuple(tokens)].softmax(-1), 1)))
        counts[tuple(tokens[:2])] += 1
    return counts, exact_distribution(logits, 2)


def chi_square(counts: Counter[tuple[int, ...]], exact: dict[tuple[int, ...], float]) -> float:
    total = sum(counts.values())
    return sum((counts[key] - total * p) ** 2 / (total * p) for key, p in exact.items())


CRITICAL = 51.2
"""Chi-square, 24 degrees of freedom (5 x 5 pairs), p = 0.001."""


@pytest.mark.slow
def test_rejection_samples_the_targets_distribution() -> None:
    """The same check with 3 % of cheated acceptances must fail, or it proves nothing."""
    assert chi_square(*sampled_pairs(0.0, 30_000)) < CRITICAL < chi_square(*sampled_pairs(0.03, 30_000))


def test_rejection_draws_once_per_emitted_token() -> None:
    logits = torch.randn(1, 4, VOCAB, generator=torch.Generator().manual_seed(3))
    for seed in range(20):
        torch.manual_seed(seed)
        emitted = rejection(TREE, logits, transcript(do_sample=True)).emitted[0]
        after = torch.rand(())
        torch.manual_seed(seed)
        for _ in emitted:
            torch.multinomial(torch.ones(1, VOCAB), 1)
        assert torch.equal(after, torch.rand(()))


# ------------------------------------------------------------------------------------------------- rules for samples


def test_a_sampled_child_equal_to_its_target_is_always_kept() -> None:
    """P = q: the ratio is 1, and after a rejection there would be no mass left to draw from."""
    logits = torch.randn(1, 4, VOCAB, generator=torch.Generator().manual_seed(3))
    tree = TokenTree(TREE.tokens, TREE.parents, logits.softmax(-1))
    for seed in range(50):
        torch.manual_seed(seed)
        assert rejection(tree, logits, transcript(do_sample=True)).nodes[0][:2] == (0, 1)


def test_a_child_that_its_own_distribution_excludes_is_not_preferred() -> None:
    """Node 1 has a token that q never draws: it may still be what is drawn from p in the end, one time in five."""
    logits = torch.zeros(1, 4, VOCAB)
    draft = torch.zeros(1, 4, VOCAB)
    draft[..., 2] = 1
    tree = TokenTree(TREE.tokens, TREE.parents, draft)
    torch.manual_seed(0)
    taken = sum(rejection(tree, logits, transcript(do_sample=True)).nodes[0][:2] == (0, 1) for _ in range(1000))
    assert 150 < taken < 250


@pytest.mark.parametrize(
    ("drawn", "kept"), [([0.39], 1), ([0.41, 0.32], 2), ([0.41, 0.34], None)], ids=["first", "second", "neither"]
)
def test_siblings_are_tried_one_after_the_other(
    drawn: list[float], kept: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Node 1 is kept two times in five; then p is [1, 0, 1, 2, 2] / 6, q [1, 0, 5, 2, 2] / 10: 1 in 3."""
    target, draft = torch.tensor([0.1, 0.2, 0.3, 0.2, 0.2]), torch.tensor([0.05, 0.5, 0.25, 0.1, 0.1])
    draws, rest = iter(drawn), list[torch.Tensor]()
    monkeypatch.setattr(torch, "rand", lambda *_, **__: torch.tensor(next(draws)))
    monkeypatch.setattr(torch, "multinomial", lambda probs, num_samples: rest.append(probs) or torch.tensor(4))
    tree = TokenTree(TREE.tokens[:, :3], TREE.parents[:3], draft.expand(1, 3, -1))
    acceptance = rejection(tree, target.log().expand(1, 3, -1), transcript(do_sample=True))
    assert acceptance.nodes == ((0,) if kept is None else (0, kept),)
    assert acceptance.emitted[0][0] == (kept or 4)
    left = torch.tensor([1, 0, 0, 2, 2]) / 5 if kept is None else target
    torch.testing.assert_close(rest, [left])
    assert next(draws, None) is None


@pytest.mark.parametrize("rule", [rejection, block])
def test_what_the_target_excludes_is_not_kept_whatever_is_drawn(
    rule: AcceptanceRule, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = torch.zeros(1, 2, VOCAB)
    logits[0, 0, 1] = -torch.inf
    tree = TokenTree(torch.tensor([[0, 1]]), torch.tensor([-1, 0]), torch.full((1, 2, VOCAB), 1 / VOCAB))
    monkeypatch.setattr(torch, "rand", lambda *_, **__: torch.zeros(()))
    for _ in range(20):
        acceptance = rule(tree, logits, transcript(do_sample=True))
        assert acceptance.nodes == ((0,),)
        assert acceptance.emitted[0][0] != 1


def test_a_block_takes_sampled_chains_only() -> None:
    with pytest.raises(UnsupportedGenerationError, match="sampled chains"):
        block(TREE, says(1, 3, 0, 2), transcript(do_sample=True))
    with pytest.raises(UnsupportedGenerationError, match="sampled chains"):
        block(TokenTree(TREE.tokens, TREE.parents, torch.full((1, 4, VOCAB), 0.2)), says(1, 3, 0, 2), transcript())


# ------------------------------------------------------------------------------------------------- lossy rules


def from_probs(*rows: list[float]) -> torch.Tensor:
    """Logits `[1, N, V]` of given distributions."""
    return torch.tensor([rows]).clamp(min=1e-9).log()


FLAT = [0.2] * 5
#                        root says 0 or 1 or 2 ...    node 1              node 2                    node 3
UNSURE = from_probs([0.5, 0.15, 0.25, 0.05, 0.05], [0.0, 0.0, 0.0, 1.0, 0.0], [0.96, 0.01, 0.01, 0.01, 0.01], FLAT)


BELOW = TokenTree(torch.tensor([[0, 2, 0, 1]]), torch.tensor([-1, 0, 1, 1]))
LOSSY = (
    # H(root) = 1.27 nats: the bar is min(0.09, 0.3 * exp(-1.27) = 0.084); 1 (0.15) and 2 (0.25) are both above it
    (TREE, typical, {}, (0, 1, 3)),  # deeper than node 2, although that is likelier
    (TREE, typical, {"threshold": 0.2, "alpha": 1.0}, (0, 2)),  # bar 0.2
    (TREE, typical, {"threshold": 0.3, "alpha": 1.0}, (0,)),  # bar exp(-H) = 0.28
    # 0.6 * exp(-H) is 0.17 at the root: 2 (0.25) is above it, 1 (0.15) is not; at node 2 (H = 0.22) it is 0.48
    (TREE, typical, {"threshold": 0.9, "alpha": 0.6}, (0, 2)),
    (BELOW, typical, {"threshold": 0.9, "alpha": 0.6}, (0, 1, 2)),  # 0.96, not 0.01
    (BELOW, typical, {"threshold": 0.99, "alpha": 1.25}, (0,)),  # 0.35
    (TokenTree(torch.tensor([[0, 1, 2]]), torch.tensor([-1, 0, 0])), typical, {}, (0, 2)),  # ties go to the likelier
    (TREE, nucleus, {"top_p": 0.95}, (0, 1, 3)),
    (TREE, nucleus, {"top_p": 0.7}, (0, 2)),  # {0, 2}
    (TREE, nucleus, {"top_p": 0.4}, (0,)),  # {0}
)


@pytest.mark.parametrize(("tree", "rule", "options", "nodes"), LOSSY)
def test_lossy_rules_keep_the_longest_path_of_likely_enough_drafts(
    tree: TokenTree, rule: Any, options: dict[str, float], nodes: tuple[int, ...]
) -> None:
    text = transcript()
    logits = UNSURE[:, [0, 2, 1, 3]] if tree is BELOW else UNSURE[:, : tree.num_nodes]
    acceptance = rule(tree, logits, text, **options)
    assert acceptance.nodes == (nodes,)
    assert text.new_tokens[0][: len(nodes)] == tree.tokens[0, list(nodes)].tolist()


def test_typical_draws_the_token_after_the_path_when_sampling() -> None:
    tokens = set()
    for seed in range(40):
        torch.manual_seed(seed)
        tokens.add(typical(TREE, UNSURE, transcript(do_sample=True)).emitted[0][2])
    assert tokens == set(range(VOCAB))  # FLAT, not its argmax


@pytest.mark.parametrize("rule", [typical, nucleus])
def test_lossy_rules_end_rows_like_the_others(rule: AcceptanceRule) -> None:
    text = transcript(eos=[1])
    assert rule(TREE, UNSURE, text).emitted == ((1,),)
    assert text.finished == [True]
    assert rule(TREE, UNSURE, text).emitted == ((),)


@pytest.mark.parametrize("rule", [typical, nucleus])
def test_lossy_rules_in_a_batch(rule: AcceptanceRule) -> None:
    tree = TokenTree(TREE.tokens.repeat(2, 1), TREE.parents)
    logits = torch.cat([UNSURE, says(0, 0, 0, 0)])
    assert rule(tree, logits, transcript(2)).nodes == ((0, 1, 3), (0,))
    together = Transcript(torch.tensor([[4, 3]] * 2), LogitsProcessorList(), StoppingCriteriaList(), max_length=100,
                         do_sample=False, lockstep=True, keep_scores=True)  # fmt: skip
    together.record_column([0, 0])
    assert rule(tree, logits, together).nodes == ((0,), (0,))
    assert [scores.shape for scores in together.scores] == [(2, VOCAB)]


# ------------------------------------------------------------------------------------------------- lockstep


def test_rows_in_lockstep_go_as_far_as_the_slowest() -> None:
    tree = TokenTree(TREE.tokens.repeat(2, 1), TREE.parents)
    text = Transcript(torch.tensor([[4, 3]] * 2), LogitsProcessorList(), StoppingCriteriaList(), max_length=100,
                      do_sample=False, lockstep=True)  # fmt: skip
    text.record_column([0, 0])
    acceptance = greedy(tree, torch.cat([says(1, 3, 0, 2), says(2, 3, 4, 0)]), text)
    assert acceptance.nodes == ((0, 1), (0, 2))
    assert acceptance.emitted == ((1, 3), (2, 4))


def test_a_finished_row_in_lockstep_emits_padding_until_the_others_end() -> None:
    tree = TokenTree(TREE.tokens.repeat(2, 1), TREE.parents)
    text = Transcript(torch.tensor([[4, 3]] * 2), LogitsProcessorList(),
                      StoppingCriteriaList([EosTokenCriteria([1])]), max_length=100, do_sample=False, lockstep=True,
                      pad_token_id=4)  # fmt: skip
    text.record_column([1, 0])
    tree = tree.with_repeated(text.pad_token_id, text.padded(tree.tokens.device))
    assert tree.tokens.tolist() == [[0, 4, 4, 4], [0, 1, 2, 3]]
    assert tree.parents.tolist() == [[-1, 0, 1, 2], [-1, 0, 0, 1]]
    acceptance = greedy(tree, torch.cat([says(1, 1, 1, 1), says(2, 3, 3, 0)]), text)
    assert acceptance.emitted == ((4, 4), (2, 3))
    assert text.new_tokens == [[1, 4, 4], [0, 2, 3]]
    assert text.num_generated == [1, 3]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("lockstep", [False, True])
def test_the_host_draws_what_the_device_draws(seed: int, lockstep: bool) -> None:
    """Both take all rows one level deeper at a time. A row that has left its tree still takes its turn: without it,
    the draws of all rows behind it would be others.
    """
    generator = torch.Generator().manual_seed(seed)
    rows, size = 4, 9
    parents = torch.tensor([[-1, 0, 0, 1, 1, 2, 3, 3, 6]] * rows)
    tokens = torch.randint(VOCAB, (rows, size), generator=generator)
    for row in range(rows):  # no two children of one parent are alike
        for node in range(1, size):
            taken = {int(tokens[row, other]) for other in range(1, node) if parents[row, other] == parents[row, node]}
            while int(tokens[row, node]) in taken:
                tokens[row, node] = (tokens[row, node] + 1) % VOCAB
    tree = TokenTree(tokens, parents, max_depth=4)
    logits = torch.randn(rows, size, VOCAB, generator=generator)
    # rows leave at different depths: the target is sure of the drafted way as far as the row's number
    for row in range(rows):
        for node, child in ((0, 1), (1, 3), (3, 6))[:row]:
            logits[row, node, tokens[row, child]] += 30
    found = []
    for rule in (follow, descend):
        torch.manual_seed(seed)
        text = transcript(rows, do_sample=True, lockstep=lockstep)
        acceptance = rule(tree, logits, text)
        found.append((acceptance.emitted, torch.rand(3).tolist()))  # and both leave the generator at the same place
    assert found[0] == found[1]
    assert lockstep or len({len(row) for row in found[0][0]}) > 1


class Watching(LogitsProcessor):
    """Keeps every text that it was shown."""

    def __init__(self) -> None:
        self.shown: list[list[int]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.shown.append(input_ids[0].tolist())
        return scores


@pytest.mark.parametrize("rule", [greedy, rejection, block, typical, nucleus])
def test_processors_see_the_exact_text_before_each_node(rule: AcceptanceRule) -> None:
    """Prompt [4, 3], root 0, chain 1, 2: before the nodes it is [4, 3, 0], [4, 3, 0, 1] and [4, 3, 0, 1, 2]."""
    chain = TokenTree(torch.tensor([[0, 1, 2]]), torch.tensor([-1, 0, 1]), torch.full((1, 3, VOCAB), 0.2))
    if rule is greedy:
        chain = TokenTree(chain.tokens, chain.parents)
    watching = Watching()
    text = Transcript(
        torch.tensor([[4, 3]]), LogitsProcessorList([watching]), StoppingCriteriaList([MaxLengthCriteria(100)]),
        max_length=100, do_sample=rule is not greedy,
    )  # fmt: skip
    text.record(0, 0)
    torch.manual_seed(0)
    rule(chain, says(1, 2, 3), text)
    wanted = [[4, 3, 0], [4, 3, 0, 1], [4, 3, 0, 1, 2]]
    once = rule in (greedy, rejection)  # the others look at paths before they emit one
    assert watching.shown == wanted if once else sorted(map(list, set(map(tuple, watching.shown)))) == wanted
