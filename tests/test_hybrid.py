"""Merged drafts: the best tree of every size, calibration that finds the truth, the sense to ask, widen and stop."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import drafters
import zoo
from hf_specdec import DrafterMismatchError, InvalidConfigError, SpeculativeConfig, SpeculativeGenerationMixin
from hf_specdec.control.costs import StepCosts
from hf_specdec.drafters import asking, calibration, hybrid
from hf_specdec.drafters.asking import Asking
from hf_specdec.drafters.calibration import Calibration
from hf_specdec.drafters.candidates import (
    Candidate,
    Candidates,
    DraftedCandidates,
    Merged,
    best_width,
    merge,
    merge_children,
)
from hf_specdec.drafters.hybrid import Experience, HybridDrafter
from hf_specdec.drafters.medusa import MedusaDrafter
from hf_specdec.drafters.prompt_lookup import PromptLookupDrafter
from models import prompts

Path = tuple[int, ...]


class Table(Candidates):
    """A source that knows the probability of every path."""

    start: Path = ()

    def __init__(self, edges: Mapping[Path, float]) -> None:
        self.edges = dict(edges)

    def after(self, place: Path) -> Sequence[Candidate]:
        below = [path for path in self.edges if path[:-1] == place and len(path) == len(place) + 1]
        return [Candidate(path[-1], path, self.edges[path]) for path in sorted(below, key=lambda p: -self.edges[p])]

    def follow(self, place: Path, token: int) -> Path | None:
        longer = (*place, token)
        return longer if any(path[: len(longer)] == longer for path in self.edges) else None


def as_told(_kind: Hashable, prior: float) -> float:
    return prior


def whole(sources: Sequence[Candidates], **limits: int) -> Merged:
    sizes = {"num_nodes": 99, "num_steps": 9, "top_k": 9, **limits}
    return merge(7, sources, as_told, **sizes)


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
    depth_first = dict(enumerate(zip(tree.parents, tree.values, strict=True)))
    for node, (parent, value) in depth_first.items():
        assert parent < node
        if node:
            assert value <= tree.values[parent] + 1e-12
            assert value == pytest.approx(tree.values[parent] * tree.edges[node])
    for size in range(1, min(len(tree.values), 7)):
        best = 0.0
        for nodes in combinations(range(1, len(tree.values)), size):
            if all(tree.parents[node] in (0, *nodes) for node in nodes):
                best = max(best, sum(tree.values[node] for node in nodes))
        cut = merge(7, made, as_told, num_nodes=size + 1, num_steps=9, top_k=9)
        assert sum(cut.values[1:]) == pytest.approx(best)
        assert cut.tokens == tree.tokens[: size + 1]


def test_equal_tokens_are_one_node_and_others_share_what_is_left() -> None:
    sure, guess = Table({(1,): 0.8, (2,): 0.1}), Table({(1,): 0.5, (3,): 0.5, (4,): 0.3})
    children = merge_children([sure, guess], [(), ()], as_told)
    assert [child.token for child in children] == [1, 3, 4, 2]
    first, second, third, fourth = (child.probability for child in children)
    assert first == 0.8  # the larger of the two
    assert second == pytest.approx(0.5 * (1 - 0.8))  # the second source believes in 3 only where the first is wrong
    assert third == pytest.approx(0.3 * (1 - 0.8))
    assert fourth == pytest.approx(min(0.1 * (1 - second - third), 1 - first - second - third))
    assert first + second + third + fourth <= 1
    assert merge_children([sure, guess], [(), None], as_told)[1].token == 2  # only who knows the place is asked


def test_limits_of_a_merged_tree() -> None:
    chain = {(1,) * depth: 0.9 for depth in range(1, 6)}
    source = Table({**chain, (2,): 0.05})
    assert whole([source], num_steps=2).tokens == [7, 1, 1, 2]
    assert whole([source], top_k=1).tokens == [7, 1, 1, 1, 1, 1]
    assert whole([source], num_nodes=3).parents == [-1, 0, 1]
    assert whole([Table({(1,): 0.005})]).tokens == [7]  # not worth a thought


def test_a_drafted_tree_as_a_source() -> None:
    drafted = DraftedCandidates("head", [7, 1, 2, 3, 9], [-1, 0, 0, 1, -1], [0.0, -0.2, -2.0, -0.1, 0.0], None)
    assert [candidate.token for candidate in drafted.after(0)] == [1, 2]
    assert [candidate.kind for candidate in drafted.after(0)] == [("head", 0, 0), ("head", 1, 6)]
    assert drafted.after(1)[0].prior == pytest.approx(0.905, abs=1e-3)
    assert drafted.follow(0, 1) == 1
    assert drafted.follow(0, 3) is None
    assert drafted.after(3) == ()
    assert drafted.depth == 2
    told = DraftedCandidates("head", [7, 1, 2], [-1, 0, 0], None, [0, 5, 6])
    assert [(c.kind, c.prior) for c in told.after(0)] == [(("head", 5), 0.5), (("head", 6), 0.25)]


# ------------------------------------------------------------------------------------------------- calibration


@pytest.mark.parametrize("accuracy", [0.05, 0.4, 0.93])
def test_calibration_finds_the_accuracy_of_a_source(accuracy: float) -> None:
    """Whatever the source says of itself; and it follows a source that changes."""
    counted, draw = Calibration(), torch.Generator().manual_seed(0)
    for prior in (0.1, 0.9):
        assert counted.probability("new", prior) == prior
    for _ in range(3000):
        counted.count("a", bool(torch.rand((), generator=draw) < accuracy))
    for prior in (0.1, 0.9):
        assert counted.probability("a", prior) == pytest.approx(accuracy, abs=0.05)
    for _ in range(3000):
        counted.count("a", bool(torch.rand((), generator=draw) < 1 - accuracy))
    assert counted.probability("a", 0.5) == pytest.approx(1 - accuracy, abs=0.05)
    trials, share = counted.table()["a"]
    assert trials == pytest.approx(1 / (1 - calibration.FORGETTING), rel=0.01)
    assert share == pytest.approx(1 - accuracy, abs=0.05)


def test_a_tree_is_as_wide_as_pays() -> None:
    """Against every width, for one row and for rows that share one."""
    rows = [Merged([], [], [1.0, 0.9, 0.5, 0.2, 0.1], []), Merged([], [], [1.0, 0.3], [])]
    costs = (1.0, 1.1, 1.5, 1.6, 3.0, 9.0)
    for chosen in ([rows[0]], [rows[1]], rows):
        for spent in (0.0, 0.5):
            for trust in (1.0, 0.2):
                best = best_width(chosen, costs, spent, trust)
                rates = {}
                for width in range(1, 6):
                    each = [1 + trust * sum(row.values[1:width]) for row in chosen]
                    slow = (sum(tokens**-4 for tokens in each) / len(each)) ** (-1 / 4)
                    rates[width] = len(each) * slow / (costs[width - 1] + spent)
                assert best.rate == pytest.approx(max(rates.values()))
                assert best.num_nodes <= max(len(row.values) for row in chosen)
    assert best_width([rows[1]], (1.0, 1.4), 0.0).num_nodes == 1
    copying, stuck = Merged([], [], [1.0] * 9, []), Merged([], [], [1.0], [])
    assert best_width([copying], tuple(range(10, 19)), 0.0).num_nodes == 9
    # a batch is done when its slowest row is: rows that copy do not make the others wait
    assert best_width([copying, stuck, stuck], tuple(range(10, 19)), 0.0).num_nodes <= 2


# ------------------------------------------------------------------------------------------------- asking


def steps(source: Asking, gains: Mapping[int, float], count: int, price: float = 0.1) -> Counter[int]:
    """For how many levels a head is asked that brings so many tokens at a price per level; 1.5 come without it."""
    asked: Counter[int] = Counter()
    for _ in range(count):
        without = hybrid.Width(4, 1.5, 1.5, 1.0)
        option = source.choose(without, 1)
        asked[option.num_steps if option else 0] += 1
        if option is not None:
            depth = option.num_steps
            # what was told of it is twice what comes: it is judged by what comes
            option.learn(
                without,
                hybrid.Width(8, 1.5 + 2 * gains[depth], 1.5 + 2 * gains[depth], 1.0 + price * depth),
                gains[depth],
                1,
            )
    return asked


def test_a_source_is_asked_for_as_much_as_pays() -> None:
    assert [option.num_steps for option in Asking(6).options] == [1, 2, 4, 6]
    assert [option.num_steps for option in Asking(1).options] == [1]
    assert [option.num_steps for option in Asking(6, stops_itself=True).options] == [6]
    best = steps(Asking(4), {1: 0.4, 2: 0.9, 4: 1.0}, count=400)  # 1.9/1.1, 2.4/1.2, 2.5/1.4 against 1.5
    assert best[2] > 370
    never = Asking(4)
    assert steps(never, {1: 0.1, 2: 0.1, 4: 0.1}, count=2000)[0] > 1900  # the first ones, and rests that double
    assert all(option.rest == asking.LONGEST_REST for option in never.options)
    # and it comes back when it pays again: what was counted is forgotten by and by, so it takes a few tries
    assert steps(never, {1: 3.0, 2: 3.0, 4: 3.0}, count=2000)[0] < 600


# ------------------------------------------------------------------------------------------------- with a model


@pytest.fixture
def llama() -> Any:
    return SpeculativeGenerationMixin.attach(copy.deepcopy(zoo.build("llama")))


def priced(monkeypatch: pytest.MonkeyPatch, seconds: Mapping[int, float]) -> None:
    """A machine of which it is known what steps cost, and where real steps teach nothing else."""
    monkeypatch.setattr(StepCosts, "measure", classmethod(lambda cls, *_, **__: cls(seconds)))
    monkeypatch.setattr(StepCosts, "observe", lambda *_: None)


def answers(model: Any, speculative: Any, batch_size: int = 1, count: int = 24, **options: Any) -> Any:
    ids, mask = prompts(batch_size)
    torch.manual_seed(3)
    options = {"attention_mask": mask, "max_new_tokens": count, "do_sample": False, **options}
    return model.generate(ids, speculative=speculative, **options)


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("options", [{}, {"do_sample": True, "top_k": 8}], ids=["greedy", "sampled"])
def test_auto_gives_the_plain_answer(llama: Any, batch_size: int, options: dict[str, Any]) -> None:
    """With what is loaded, costs measured on this machine; sampled rows of a batch draw in another order."""
    llama.add_drafter(drafters.EagleDrafter(drafters.random_head(llama)))
    llama.add_drafter(MedusaDrafter(drafters.random_heads(llama)))
    plain = answers(llama, None, batch_size, **options)
    for _ in range(2):  # experience changes the speed alone
        found = answers(llama, "auto", batch_size, **options)
        assert (batch_size > 1 and options) or torch.equal(plain, found)
    stats = llama.last_speculation
    assert stats.method == "hybrid"
    assert stats.control["controller"] == "cost_model"
    assert stats.control["heard"] == ["prompt_lookup", "token_recycling"]
    assert set(stats.control["asked"]) == {"eagle", "medusa"}
    # the last step of a call is not told, and one for a last token drafts nothing
    assert sum(stats.control["widths"].values()) == stats.num_target_forwards - 1


@pytest.mark.parametrize("batch_size", [1, 2])
def test_where_nothing_pays_steps_are_plain(llama: Any, monkeypatch: pytest.MonkeyPatch, batch_size: int) -> None:
    priced(monkeypatch, {1: 1.0, 2: 50.0, 64: 900.0})
    llama.add_drafter(drafters.EagleDrafter(drafters.random_head(llama)))
    assert torch.equal(answers(llama, None, batch_size), answers(llama, "auto", batch_size))
    stats = llama.last_speculation
    assert stats.control["plain_steps"] == 1.0
    assert stats.num_drafted_tokens == 0
    assert stats.control["widths"] == {1: stats.num_target_forwards - 1}


def test_where_width_is_free_trees_are_wide(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    priced(monkeypatch, {1: 1.0, 64: 1.001})
    llama.add_drafter(drafters.EagleDrafter(drafters.random_head(llama)))
    assert torch.equal(answers(llama, None), answers(llama, "auto"))
    widths = llama.last_speculation.control["widths"]
    assert sum(width * count for width, count in widths.items()) > 8 * sum(widths.values())
    answers(llama, {"method": "auto", "num_draft_tokens": 5, "num_steps": 2, "top_k": 1})
    assert max(llama.last_speculation.control["widths"]) <= 3


def test_drafting_comes_back_when_the_text_repeats_itself(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain steps go on learning: an answer that begins to go in circles is drafted again."""
    priced(monkeypatch, {1: 1.0, 2: 1.5, 64: 3.0})
    ids = torch.randint(3, zoo.VOCAB_SIZE, (1, 30), generator=torch.Generator().manual_seed(5))
    plain = llama.generate(ids, max_new_tokens=120, do_sample=False)
    turned = plain[0, 30:].tolist()
    assert len(set(turned[60:])) < 40  # it does
    found = llama.generate(
        ids, max_new_tokens=120, do_sample=False, speculative={"method": "hybrid", "methods": ["ngram"]}
    )
    assert torch.equal(plain, found)
    accepted = llama.last_speculation.accepted_per_step[0]
    assert accepted[:2] == [1, 1]
    assert llama.last_speculation.control["plain_steps"] > 0
    assert max(accepted) > 8


def test_what_is_merged_is_chosen(llama: Any) -> None:
    answers(llama, "hybrid")
    assert llama.last_speculation.control["heard"] == ["prompt_lookup", "token_recycling"]
    answers(llama, {"method": "hybrid", "methods": ["token_recycling"], "adaptive": False, "num_draft_tokens": 6})
    control = llama.last_speculation.control
    assert (control["controller"], control["num_nodes"], control["heard"]) == ("fixed", 6, ["token_recycling"])
    for methods, error, message in (
        (["eagle"], DrafterMismatchError, "needs a head"),
        (["auto"], InvalidConfigError, "single methods"),
        (["nothing"], InvalidConfigError, "no method or drafter 'nothing'"),
    ):
        with pytest.raises(error, match=message):
            answers(llama, {"method": "hybrid", "methods": methods})
    with pytest.raises(InvalidConfigError, match="follows from its parts"):
        answers(llama, {"method": "hybrid", "tree": [(0,)]})
    with pytest.raises(InvalidConfigError, match="None where `method` is not 'hybrid'"):
        SpeculativeConfig("eagle", methods=("eagle",))
    with pytest.raises(InvalidConfigError, match="list of different method names"):
        SpeculativeConfig("hybrid", methods=("eagle", "eagle"))
    with pytest.raises(InvalidConfigError, match="at least one part"):
        HybridDrafter({})


def test_several_heads_of_one_kind_are_told_apart(llama: Any) -> None:
    for seed in (0, 1):
        llama.add_drafter(drafters.EagleDrafter(drafters.random_head(llama, seed)), f"head {seed}")
    assert torch.equal(answers(llama, None, 2), answers(llama, {"method": "hybrid", "adaptive": False}, 2))
    assert set(llama.last_speculation.control["asked"]) == {"head 0", "head 1"}


def test_a_static_tree_is_a_source_like_any_other(llama: Any) -> None:
    head = drafters.random_head(llama, tree=drafters.CHOICES)
    llama.add_drafter(drafters.EagleDrafter(head))
    assert torch.equal(answers(llama, None), answers(llama, {"method": "hybrid", "adaptive": False}))
    assert llama.last_speculation.control["asked"]["eagle"] > 3


def test_experience_and_costs_stay_with_the_model(llama: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="hf_specdec.control.costs"):
        for _ in range(2):
            answers(llama, "auto")
    assert [record.message.startswith("A step of LlamaForCausalLM over 1 rows") for record in caplog.records] == [True]
    state = llama.__dict__["_speculation"]
    assert state.experience.calibration.table()
    another = copy.deepcopy(llama)
    assert another.__dict__["_speculation"].experience.calibration.table() == {}
    assert another.__dict__["_speculation"].costs == []
    drafter = HybridDrafter({"ngram": PromptLookupDrafter()}, experience := Experience())
    llama.add_drafter(drafter, "mine")  # one of the user's own has its own
    answers(llama, "mine")
    assert experience.calibration.table()
