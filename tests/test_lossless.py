"""Lossless rules: two emitted tokens against their exact distribution, on a vocabulary of four, by chi-square.

The drafts of sampled trees are drawn anew for every round, as a drafter would. With the same draws, one in a hundred
replaced by a fixed token (a draft taken whatever the target says) must fail, or the check proves nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
)

from hf_specdec.acceptance.rules import AcceptanceRule, block, rejection
from hf_specdec.acceptance.transcript import Transcript
from hf_specdec.trees.tree import TokenTree

VOCAB, ROWS, DRAWS = 4, 2_000, 40_000
WARPERS = LogitsProcessorList([TemperatureLogitsWarper(0.8)])
GENERATOR = torch.Generator().manual_seed(7)
PREFIXES = [prefix for n in range(4) for prefix in itertools.product(range(VOCAB), repeat=n)]
TARGET = {prefix: torch.randn(VOCAB, generator=GENERATOR) for prefix in PREFIXES}
DRAFT = {prefix: (TARGET[prefix] + torch.randn(VOCAB, generator=GENERATOR)).softmax(-1) for prefix in PREFIXES}
CRITICAL = 37.7
"""Chi-square, 15 degrees of freedom (4 x 4 pairs), p = 0.001."""
BIAS = 0.01


def target_probs(prefix: tuple[int, ...]) -> Tensor:
    """The warped distribution after a prefix, exactly."""
    return WARPERS(torch.zeros(1, 1, dtype=torch.long), TARGET[prefix][None]).double().softmax(-1)[0]


def rows_of(table: dict[tuple[int, ...], Tensor], tokens: Tensor) -> Tensor:
    """`[R, V]` entries for prefixes `[R, n]`."""
    return torch.stack([table[tuple(row)] for row in tokens.tolist()])


# each makes R trees: tokens [R, N] with root 0, parents [N], and the distributions the children were drawn from
NOTHING = torch.zeros(ROWS, 0, dtype=torch.long)


def deterministic_tree() -> TokenTree:
    """Children 1 and 2 of the root, 3 below 1."""
    return TokenTree(torch.tensor([[0, 1, 2, 3]] * ROWS), torch.tensor([-1, 0, 0, 1]))


def sampled_chain() -> TokenTree:
    """Two tokens, one after the other."""
    first = torch.multinomial(rows_of(DRAFT, NOTHING), 1)
    second = torch.multinomial(rows_of(DRAFT, first), 1)
    probs = [rows_of(DRAFT, NOTHING), rows_of(DRAFT, first), torch.full((ROWS, VOCAB), 1 / VOCAB)]
    tokens = torch.cat([torch.zeros(ROWS, 1, dtype=torch.long), first, second], dim=-1)
    return TokenTree(tokens, torch.tensor([-1, 0, 1]), torch.stack(probs, dim=1))


def sampled_tree() -> TokenTree:
    """Three children of the root drawn without replacement, two of the first child."""
    children = torch.multinomial(rows_of(DRAFT, NOTHING), 3)
    grandchildren = torch.multinomial(rows_of(DRAFT, children[:, :1]), 2)
    leaf = torch.full((ROWS, VOCAB), 1 / VOCAB)
    probs = [rows_of(DRAFT, NOTHING), rows_of(DRAFT, children[:, :1]), leaf, leaf, leaf, leaf]
    tokens = torch.cat([torch.zeros(ROWS, 1, dtype=torch.long), children, grandchildren], dim=-1)
    return TokenTree(tokens, torch.tensor([-1, 0, 0, 0, 1, 1]), torch.stack(probs, dim=1))


def node_logits(tree: TokenTree) -> Tensor:
    """`[R, N, V]` what the target says at each node."""
    parents, nodes = tree.parents.tolist(), []
    for node in range(tree.num_nodes):
        path = [node] if node else []
        while path and parents[path[0]] > 0:
            path.insert(0, parents[path[0]])
        nodes.append(rows_of(TARGET, tree.tokens[:, path]))
    return torch.stack(nodes, dim=1)


def chi_squares(rule: AcceptanceRule, make: Callable[[], TokenTree], *, lockstep: bool) -> tuple[float, float]:
    """Of the first two tokens emitted after the root: as they are, and with the planted bias."""
    torch.manual_seed(0)
    first, second = target_probs(()), torch.stack([target_probs((token,)) for token in range(VOCAB)])
    counts = {cheated: torch.zeros(VOCAB, VOCAB, dtype=torch.double) for cheated in (False, True)}
    criteria = StoppingCriteriaList([MaxLengthCriteria(100)])
    for _ in range(DRAWS // ROWS):
        tree = make()
        text = Transcript(torch.ones(ROWS, 2, dtype=torch.long), WARPERS, criteria, max_length=100, do_sample=True,
                          lockstep=lockstep)  # fmt: skip
        for row in range(ROWS):
            text.record(row, 0)
        rule(tree, node_logits(tree), text)
        emitted = torch.tensor([[*tokens[1:3], -1][:2] for tokens in text.new_tokens])
        for cheated, count in counts.items():
            pairs = emitted.clone()
            if cheated:
                pairs[torch.rand(ROWS) < BIAS] = torch.tensor([int(first.argmin()), -1])
            drawn = torch.multinomial(second[pairs[:, 0]], 1)[:, 0]
            pairs[:, 1] = torch.where(pairs[:, 1] < 0, drawn, pairs[:, 1])
            count.index_put_((pairs[:, 0], pairs[:, 1]), torch.ones(ROWS, dtype=torch.double), accumulate=True)
    expected = DRAWS * first[:, None] * second
    clean, biased = (float(((count - expected) ** 2 / expected).sum()) for count in counts.values())
    return clean, biased


CASES = [
    pytest.param(rejection, deterministic_tree, False, id="deterministic tree"),
    pytest.param(rejection, deterministic_tree, True, id="deterministic tree, rows in lockstep"),
    pytest.param(rejection, sampled_chain, False, id="sampled chain"),
    pytest.param(rejection, sampled_tree, False, id="sampled tree"),
    pytest.param(block, sampled_chain, False, id="block verification"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "make", "lockstep"), CASES)
def test_the_exact_distribution_and_a_bias_of_one_percent(
    rule: AcceptanceRule, make: Callable[[], TokenTree], lockstep: bool
) -> None:
    clean, biased = chi_squares(rule, make, lockstep=lockstep)
    assert clean < CRITICAL
    assert biased > CRITICAL


@pytest.mark.slow
def test_block_verification_keeps_at_least_as_much_as_token_by_token() -> None:
    kept = {}
    for rule in (rejection, block):
        torch.manual_seed(3)
        total = 0
        for _ in range(3):
            tree = sampled_chain()
            text = Transcript(torch.ones(ROWS, 2, dtype=torch.long), WARPERS, StoppingCriteriaList(), max_length=100,
                              do_sample=True)  # fmt: skip
            for row in range(ROWS):
                text.record(row, 0)
            total += sum(rule(tree, node_logits(tree), text).counts)
        kept[rule] = total / (3 * ROWS)
    assert kept[block] > kept[rejection] - 0.01, kept
