"""Merged drafts: the best tree of every size, calibration that finds the truth, the sense to ask, widen and stop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_specdec.control import policy
from hf_specdec.control.policy import (
    MIN_BATCH_GAIN,
    UNKNOWN,
    HeadSchedule,
    LearnedStats,
    Opening,
    StopRule,
    Width,
    best_width,
)
from hf_specdec.drafters.base import Candidate, Candidates
from hf_specdec.drafters.candidates import DraftedCandidates, MergedTree, merge_children, merge_sources
from hf_specdec.drafters.hybrid import HybridDrafter
from hf_specdec.drafters.prompt_lookup import PromptLookupDrafter
from hf_specdec.drafters.token_recycling import RecycledTokens, TokenRecyclingDrafter
from hf_specdec.trees.draft import Budget
from policy import Path, Table


class Counted(Table):
    """The same; it keeps the places it was asked about."""

    def __init__(self, edges: Mapping[Path, float]) -> None:
        super().__init__(edges)
        self.heard: list[Path] = []

    def after(self, place: Path) -> Sequence[Candidate]:
        self.heard.append(place)
        return super().after(place)


def whole(sources: Sequence[Candidates], **limits: int) -> MergedTree:
    sizes = {"num_nodes": 99, "num_steps": 9, "top_k": 9, **limits}
    return merge_sources(7, sources, Budget(**sizes))


@st.composite
def sources(draw: st.DrawFn) -> list[Table]:
    """One or two sources over trees three levels deep, two tokens wide."""
    made = []
    for _ in range(draw(st.integers(1, 2))):
        edges: dict[Path, float] = {}
        for depth in (1, 2, 3):
            for index in range(2**depth):
                path = tuple((index >> bit) & 1 for bit in range(depth))
                if (depth == 1 or path[:-1] in edges) and draw(st.booleans()):
                    edges[path] = draw(st.integers(1, 10)) / 20
        made.append(Table(edges))
    return made


@settings(max_examples=60, deadline=None)
@given(sources())
def test_merged_trees_are_the_best_of_their_size(made: list[Table]) -> None:
    """Against every subtree there is, size by size."""
    tree = whole(made)
    depth_first = dict(enumerate(zip(tree.parents, tree.path_probs, strict=True)))
    for node, (parent, value) in depth_first.items():
        assert parent < node
        if node:
            assert value <= tree.path_probs[parent] + 1e-12
            assert value == pytest.approx(tree.path_probs[parent] * tree.edge_probs[node])
    for size in range(1, min(len(tree.path_probs), 7)):
        best = 0.0
        for nodes in combinations(range(1, len(tree.path_probs)), size):
            if all(tree.parents[node] in (0, *nodes) for node in nodes):
                best = max(best, sum(tree.path_probs[node] for node in nodes))
        cut = merge_sources(7, made, Budget(size + 1, 9, 9))
        assert sum(cut.path_probs[1:]) == pytest.approx(best)
        assert cut.tokens == tree.tokens[: size + 1]


def test_equal_tokens_are_one_node_and_others_share_what_is_left() -> None:
    sure, guess = Table({(1,): 0.8, (2,): 0.1}), Table({(1,): 0.5, (3,): 0.5, (4,): 0.3})
    children = merge_children([sure, guess], [(), ()], [UNKNOWN, UNKNOWN])
    assert [child.token for child in children] == [1, 3, 4, 2]
    first, second, third, fourth = (child.probability for child in children)
    assert first == 0.8  # the larger of the two
    assert second == pytest.approx(0.5 * (1 - 0.8))  # the second source believes in 3 only where the first is wrong
    assert third == pytest.approx(0.3 * (1 - 0.8))
    assert fourth == pytest.approx(min(0.1 * (1 - second - third), 1 - first - second - third))
    assert first + second + third + fourth <= 1
    assert (
        merge_children([sure, guess], [(), None], [UNKNOWN, UNKNOWN])[1].token == 2
    )  # only who knows the place is asked


def test_of_two_sources_that_are_certain_the_first_is_named() -> None:
    """Trust may raise both above 1, which is the most that counts."""
    sources = [Table({(1,): 0.9}), Table({(1,): 0.95})]
    (child,) = merge_children(sources, [(), ()], [(1.2,) * len(UNKNOWN), (1.3,) * len(UNKNOWN)])
    assert child == (1, 1.0, 0)


def test_limits_of_a_merged_tree() -> None:
    chain = {(1,) * depth: 0.9 for depth in range(1, 6)}
    source = Table({**chain, (2,): 0.05})
    assert whole([source], num_steps=2).tokens == [7, 1, 1, 2]
    assert whole([source], top_k=1).tokens == [7, 1, 1, 1, 1, 1]
    assert whole([source], num_nodes=3).parents == [-1, 0, 1]
    assert whole([Table({(1,): 0.005})]).tokens == [7]  # not worth a thought


def test_a_drafted_tree_as_a_source() -> None:
    drafted = DraftedCandidates([7, 1, 2, 3, 9], [-1, 0, 0, 1, -1], [0.0, -0.2, -2.0, -0.1, 0.0])
    assert [candidate.token for candidate in drafted.after(0)] == [1, 2]
    assert drafted.after(1)[0].probability == pytest.approx(0.905, abs=1e-3)
    assert drafted.follow(0, 1) == 1
    assert drafted.follow(0, 3) is None
    assert drafted.after(3) == ()
    assert drafted.depth == 2
    assert drafted.after(drafted.start) == drafted.after(0)
    unsure = DraftedCandidates([7, 1, 2], [-1, 0, 0], None)
    assert unsure.after(0) == [Candidate(1, 0.5), Candidate(2, 0.25)]


def test_equally_likely_nodes_come_in_the_order_of_their_source() -> None:
    source = Table({(5,): 0.5, (3,): 0.5, (5, 4): 0.5, (3, 9): 0.5})
    assert whole([source]).tokens == [7, 5, 3, 4, 9]
    assert whole([Table({(1,): 0.01})]).tokens == [7, 1]  # just worth a thought


# ------------------------------------------------------------------------------------------------- widths


def test_a_tree_is_as_wide_as_pays() -> None:
    """Against every width, for one row and for rows that share one."""
    rows = [[1.0, 0.9, 0.5, 0.2, 0.1], [1.0, 0.3]]
    costs = (1.0, 1.1, 1.5, 1.6, 3.0, 9.0)
    for chosen in ([rows[0]], [rows[1]], rows):
        for spent in (0.0, 0.5):
            best = best_width(chosen, costs, spent)
            rates = {}
            for width in range(1, 6):
                each = [1 + sum(row[1:width]) for row in chosen]
                slow = (sum(tokens**-4 for tokens in each) / len(each)) ** (-1 / 4)
                rates[width] = len(each) * slow / (costs[width - 1] + spent)
            pays = len(chosen) == 1 or max(rates.values()) > MIN_BATCH_GAIN * rates[1]
            assert best.rate == pytest.approx(max(rates.values()) if pays else rates[1])
            assert best.num_nodes <= max(map(len, chosen))
    assert best_width([rows[1]], (1.0, 1.4), 0.0).num_nodes == 1
    assert best_width([[1.0, 1.0]], (1.0, 2.0), 0.0).num_nodes == 1  # what brings no more is left
    assert best_width(rows, (1.0, 1.0), 0.0).num_nodes == 2  # no wider than what is known to cost so much
    # the longer tree determines the width, the shorter one is padded
    assert best_width(rows[::-1], (1.0,) * 9, 0.0).num_nodes == 5
    copying, stuck = [1.0] * 9, [1.0]
    assert best_width([copying], tuple(range(10, 19)), 0.0).num_nodes == 9
    # of several rows a draft must promise more than a little
    gains_a_little = [1.0, 0.7]
    assert best_width([gains_a_little], (1.0, 1.6), 0.0).num_nodes == 2
    assert best_width([gains_a_little] * 2, (1.0, 1.6), 0.0).num_nodes == 1
    assert best_width([gains_a_little] * 2, (1.0, 1.5), 0.0).num_nodes == 2
    # a batch is done when its slowest row is: rows that copy do not make the others wait
    assert best_width([copying, stuck, stuck], tuple(range(10, 19)), 0.0).num_nodes <= 2


@settings(deadline=None, max_examples=200)
@given(
    made=sources(), spent=st.floats(0.0, 2.0),
    steps=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=12),
)  # fmt: skip
def test_a_tree_that_stops_growing_is_as_fast_as_one_that_does_not(
    made: list[Table], spent: float, steps: list[float]
) -> None:
    """And equal up to there, whatever the costs."""
    costs = [1.0 + sum(steps[:width]) for width in range(len(steps) + 1)]
    grown = merge_sources(7, made, Budget(len(costs), 9, 9))
    rule = StopRule(costs, spent)
    stopped = merge_sources(7, made, Budget(len(costs), 9, 9), stop_rule=rule)
    width, found = (best_width([tree.path_probs], costs, spent) for tree in (grown, stopped))
    assert found.rate == pytest.approx(width.rate)
    assert stopped.tokens == grown.tokens[: len(stopped.tokens)]


def test_where_no_node_pays_only_the_root_is_heard() -> None:
    source = Counted({(1,): 0.5, (1, 2): 0.5, (1, 2, 3): 0.5})
    tree = merge_sources(7, [source], Budget(4, 9, 9), stop_rule=StopRule([1.0, 2.0, 3.0, 4.0], 0.0))
    assert tree.tokens == [7]
    assert source.heard == [()]
    # a dear second node may be worth it for what comes after it
    leap = merge_sources(7, [source], Budget(4, 9, 9), stop_rule=StopRule([1.0, 1.6, 1.6, 1.6], 0.0))
    assert leap.tokens == [7, 1, 2, 3]


# ------------------------------------------------------------------------------------------------- asking


def steps(source: HeadSchedule, gains: Mapping[int, float], count: int, price: float = 0.1) -> Counter[int]:
    """For how many levels a head is asked that brings so many tokens at a price per level; 1.5 come without it."""
    asked: Counter[int] = Counter()
    for _ in range(count):
        without = Width(4, 1.5, 1.5, 1.0)
        option = source.choose(without, 1)
        asked[option.num_steps if option else 0] += 1
        if option is not None:
            depth = option.num_steps
            # what was told of it is twice what comes: it is judged by what comes
            option.learn(
                without,
                Width(8, 1.5 + 2 * gains[depth], 1.5 + 2 * gains[depth], 1.0 + price * depth),
                gains[depth],
                1,
            )
    return asked


def test_a_source_is_asked_for_as_much_as_pays() -> None:
    assert [option.num_steps for option in HeadSchedule(6).options] == [1, 2, 4, 6]
    assert [option.num_steps for option in HeadSchedule(1).options] == [1]
    assert [option.num_steps for option in HeadSchedule(6, full_depth_only=True).options] == [6]
    best = steps(HeadSchedule(4), {1: 0.4, 2: 0.9, 4: 1.0}, count=400)  # 1.9/1.1, 2.4/1.2, 2.5/1.4 against 1.5
    assert best[2] > 370
    never = HeadSchedule(4)
    asked = steps(never, {1: 0.1, 2: 0.1, 4: 0.1}, count=2000)
    first = policy.FIRST_TRIALS * (0.1 + 0.2 + 0.4)
    assert sum(0.1 * depth * count for depth, count in asked.items()) < 1.2 * policy.TRIAL_SHARE * 2000 + first
    # and it comes back when it pays again: after a rest, what was counted before it weighs less
    assert steps(never, {1: 3.0, 2: 3.0, 4: 3.0}, count=100)[0] < 50


def test_a_head_that_seemed_slow_once_is_asked_again() -> None:
    """The first times were somebody else's doing: after the longest rest it is tried, and is known to be quick."""
    source = HeadSchedule(4, full_depth_only=True)
    (option,) = source.options
    for _ in range(3):
        option.learn(Width(1, 1.5, 1.5, 1.0), Width(8, 2.5, 2.5, 51.0), 1.0, 1)
    source.time_levels(4, 40.0)
    asked = steps(source, {4: 1.5}, count=2000)
    assert asked[4] > 600
    assert option.seconds == pytest.approx(0.4, rel=0.05)
    source.time_levels(4, 0.4)
    assert source.level_seconds == pytest.approx(0.1, rel=0.1)


def test_a_prompt_is_read_for_a_head_once_queries_would_have_paid_for_it() -> None:
    head, without = HeadSchedule(4, full_depth_only=True), Width(4, 1.5, 1.5, 1.0)
    for _ in range(20):
        head.options[0].learn(without, Width(8, 3.0, 3.0, 1.2), 1.5, 1)
    head.time_opening(100, 20.0)
    assert head.opening_seconds == pytest.approx(0.2)
    # a query saves 0.4 s of a step: twice the tokens in 1.2 times the seconds
    for seconds, tokens_left, expected in ((3.0, 1000, 0), (9.9, 1000, 16), (9.9, 30, None)):
        opening = Opening(seconds)
        steps_waited = next((step for step in range(60) if head.choose(without, 1, opening, tokens_left)), None)
        assert steps_waited == expected


def test_what_was_learned_with_one_row_is_expected_of_more() -> None:
    alone, batch = HeadSchedule(4, full_depth_only=True), HeadSchedule(4, full_depth_only=True)
    without = Width(4, 1.5, 1.5, 1.0)
    for _ in range(50):
        alone.options[0].learn(without, Width(8, 1.6, 1.6, 1.4), 0.1, 1)
    batch.inherit(alone)
    of_eight = Width(4, 12.0, 12.0, 1.0)
    (option,) = batch.options
    assert batch.choose(of_eight, 8) is option  # once, for what it costs is not known
    option.learn(of_eight, Width(8, 12.8, 12.8, 1.4), 0.8, 8)
    assert batch.choose(of_eight, 8) is None


def test_what_was_learned_is_recalled_by_all_who_share_it() -> None:
    """Memories are copies: what is learned later is in neither, and other forms of a drafter know the same."""
    recycling = TokenRecyclingDrafter(width=2, pairs=3)
    recycling.table = RecycledTokens(5, 2, 3, torch.device("cpu"))
    hybrid = HybridDrafter({"token_recycling": recycling, "prompt_lookup": PromptLookupDrafter()})
    other = hybrid.with_parts(lambda part: part)
    before, empty = hybrid.state_dict(), recycling.table.ids[0].clone()
    hybrid.learned.count("head", [(3, 0.9)], 4)
    recycling.table.ids[0][3] = 4
    after, trust, learned = hybrid.state_dict(), hybrid.learned.trust("head"), recycling.table.ids[0].clone()
    hybrid.load_state_dict(before)
    assert other.learned.trust("head") == LearnedStats().trust("head") > trust
    assert torch.equal(recycling.table.ids[0], empty)
    hybrid.load_state_dict(after)
    assert other.learned.trust("head") == trust
    assert torch.equal(recycling.table.ids[0], learned)
    hybrid.load_state_dict(None)
    assert other.learned.trust("head") == LearnedStats().trust("head")
    assert torch.equal(recycling.table.ids[0], empty)


def test_after_a_long_rest_one_trial_says_more_than_many_old_ones() -> None:
    """What was learned before a rest is of another text: the first step after it counts for `STALE_WEIGHT`."""
    without, with_it = Width(1, 1.0, 1.0, 1.0), Width(8, 3.0, 3.0, 1.5)
    known = HeadSchedule(1)
    for _ in range(200):
        known.options[0].learn(without, with_it, 0.0, 1)
    for rested in (False, True):
        asked = HeadSchedule(1)
        asked.inherit(known)
        option = asked.options[0]
        option.num_queries, option.trials, option.seconds, option.waited = 200, 0, 0.5, 500
        assert not rested or asked.choose(without, 1) is option
        option.learn(without, with_it, 1.0, 1)
        ((_, gain),) = option.gains.values()
        assert gain == pytest.approx(policy.STALE_WEIGHT if rested else policy.HEAD_SMOOTHING, abs=0.01)
