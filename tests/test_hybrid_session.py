"""Merged drafts at work: what a session hears, asks, learns and tells, and what `auto` does with a model."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from math import log
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import drafters
import zoo
from benchmark_script import script
from hf_specdec import DrafterMismatchError, InvalidConfigError, SpeculativeConfig, SpeculativeGenerationMixin
from hf_specdec.control import costs
from hf_specdec.control.costs import StepCosts
from hf_specdec.control.policy import FIRST_LEVELS, LearnedStats
from hf_specdec.drafters import hybrid
from hf_specdec.drafters.base import Candidates, CandidateSession, DraftContext, DraftSession
from hf_specdec.drafters.hybrid import HybridDrafter, MergedSource, _HybridSession
from hf_specdec.drafters.medusa import MedusaDrafter
from hf_specdec.drafters.token_recycling import TokenRecyclingDrafter
from hf_specdec.trees.draft import Budget, Draft
from hf_specdec.trees.tree import TokenTree
from models import prompts
from policy import Table


class Told(CandidateSession):
    """A free source that says the same in every step."""

    def __init__(self, *tables: Table) -> None:
        self.tables, self.heard = tables, list[Any]()

    @property
    def candidates(self) -> Sequence[Candidates]:
        return self.tables

    def propose(self, budget: Budget) -> Draft:
        raise AssertionError("a free source is asked edge by edge")

    def observe(self, step: Any) -> None:
        self.heard.append(step)


class Head(DraftSession):
    """A source that drafts one node after the root, or two in a row, and remembers what it was asked for."""

    def __init__(self, roots: Sequence[int]) -> None:
        self.roots, self.asked, self.heard, self.now = roots, list[Budget](), list[Any](), 0.0

    def propose(self, budget: Budget) -> Draft:
        self.asked.append(budget)
        self.now += 0.5
        tokens = torch.tensor([[root, 3, 4] for root in self.roots])
        return Draft(
            TokenTree(tokens, torch.tensor([-1, 0, 1])), torch.tensor([[0.0, -0.5, -99999.0]]).expand(len(tokens), 3)
        )

    def observe(self, step: Any) -> None:
        self.heard.append(step)


def merging(
    roots: Sequence[int], costs: tuple[float, ...] | None = None, **parts: DraftSession
) -> tuple[_HybridSession, LearnedStats]:
    sources = [MergedSource(name, part, Budget(32, 6, 4)) for name, part in parts.items()]
    step_costs = None if costs is None else lambda: costs
    learned = LearnedStats()
    context = DraftContext(torch.zeros(len(roots), 1), None, torch.tensor(roots), step_costs=step_costs)
    return _HybridSession(sources, learned, context), learned


def emitted(*rows: tuple[int, ...]) -> Any:
    last = torch.tensor([row[-1] if row else 0 for row in rows])
    counts = list(map(len, rows))
    return SimpleNamespace(acceptance=SimpleNamespace(emitted=rows, counts=counts, next_token=last, launched=None))


def test_rows_of_a_merged_draft_are_padded_and_ended_ones_draft_nothing() -> None:
    session, _ = merging([7, 8], free=Told(Table({(1,): 0.8, (1, 2): 0.5}), Table({(5,): 0.25})))
    draft = session.propose(Budget(3, 4, 2))
    assert draft.tree.tokens.tolist() == [[7, 1, 2], [8, 5, 8]]
    assert draft.tree.parents.tolist() == [[-1, 0, 1], [-1, 0, -1]]
    assert draft.log_probs is not None
    torch.testing.assert_close(draft.log_probs, torch.tensor([[0.0, log(0.8), log(0.5)], [0.0, log(0.25), 0.0]]))
    session.observe(emitted((1, 9), ()))
    draft = session.propose(Budget(3, 4, 2))
    assert draft.tree.tokens[:, 0].tolist() == [9, 8]
    assert draft.num_drafted.tolist() == [2, 0]
    session.observe(emitted((), ()))
    assert session.propose(Budget(3, 4, 2)).tree.num_nodes == 1


def test_expected_and_accepted_drafts_are_counted() -> None:
    tables = Table({(1,): 0.8, (2,): 0.1, (1, 2): 0.5, (1, 2, 3): 0.5}), Table({(4,): 0.3})
    session, learned = merging([7, 7], free=Told(*tables))
    expected = 0.8 + 0.1 + 0.4 + 0.2 + 0.3
    session.propose(Budget(9, 4, 4))
    session.observe(emitted((1, 2, 9, 1), (5,)))
    report = session.report()
    assert (report["free_sources"], report["queries"]) == (["free"], {})
    assert (report["expected_drafts"], report["accepted_drafts"]) == (pytest.approx(expected), 3)
    # per position and row: 0.8 and a hit, and 0.1; 0.5 and a hit; 0.5 and a miss; then 0.3 and a miss
    classes = [[0.0, 0.0] for _ in range(4)]  # below 0.3, 0.6, 0.85 and above
    for position in (((2, 0.8, 1), (0, 0.1, 0)), ((1, 0.5, 1),), ((1, 0.5, 0),), ((1, 0.3, 0),)):
        classes = [[0.99 * total, 0.99 * hits] for total, hits in classes]
        for index, promised, hit in position:
            classes[index][0] += promised
            classes[index][1] += hit
    sums = [sum(column) for column in zip(*classes, strict=True)]
    others = [(sums[1] - hits + 1) / (sums[0] - total + 1) for total, hits in classes]
    usual = [(hits + guess) / (total + 1) for (total, hits), guess in zip(classes, others, strict=True)]
    assert max(learned.trust("free")) < max(usual)  # 2 hits of 2.5 expected in this text
    learned.begin_text()
    assert learned.trust("free") == pytest.approx(usual)
    assert learned.trust("other") == (1, 1, 1, 1)


def test_a_source_that_is_wrong_in_this_text_loses_trust_until_the_next_one() -> None:
    learned = LearnedStats()
    for _ in range(100):
        learned.count("lookup", [(1, 0.5)], 1)
        learned.count("lookup", [(1, 0.5)], 2)
    learned.begin_text()
    usual = learned.trust("lookup")
    for _ in range(10):
        learned.count("lookup", [(1, 0.5)], 2)  # ten misses where five hits were expected
    assert max(learned.trust("lookup")) < 0.2
    learned.begin_text()
    assert min(learned.trust("lookup")) > 0.8 * min(usual)
    for _ in range(10):
        learned.count("lookup", [(1, 0.5)], 1)  # more hits than expected add nothing: wide trees would follow
    assert max(learned.trust("lookup")) < 1.1


def test_what_a_head_has_learned_stays_known_to_the_end_of_an_answer() -> None:
    """A budget gets shallower when few tokens are left: that is no other head."""
    session, learned = merging([7], (1.0,) * 8, head=Head([7]))
    for depth in (6, 5, 2):
        session.propose(Budget(8, depth, 4))
        session.observe(emitted((1,)))
    assert [schedule.deepest.num_steps for schedule in learned.schedules.values()] == [6]


def test_long_repetitions_that_are_wrong_lose_trust_alone() -> None:
    """Tokens of high probability that are wrong after every second one, among many that are as likely as promised."""
    learned = LearnedStats()
    for number in range(40):
        learned.count("lookup", [(1, 0.5)], 1 if number % 2 else 9)
        if number % 8 < 2:
            learned.count("lookup", [(1, 0.95)], 1 if number % 2 else 9)
    _, ordinary, _, likely = learned.trust("lookup")
    assert ordinary == pytest.approx(1, abs=0.1)
    assert likely < 0.65


def test_a_head_is_asked_for_as_many_levels_as_the_budget_has() -> None:
    head = Head([7, 8])
    session, _ = merging([7, 8], free=Told(Table({(1,): 0.1}), Table({})), head=head)
    draft = session.propose(Budget(3, 4, 2))
    assert head.asked == [Budget(32, 4, 4)]
    assert head.asked[0].min_level_probability == 0.0
    assert draft.tree.tokens[:, 1].tolist() == [3, 3]
    assert draft.log_probs is not None
    assert draft.log_probs[:, 1].tolist() == pytest.approx([-0.5, -0.5], abs=1e-5)
    assert draft.num_drafted.tolist() == [2, 1]  # what is as good as impossible is left out
    session.observe(emitted((3,), (8,)))
    session.propose(Budget(3, 4, 1))
    assert head.asked[1] == Budget(7, 4, 1)  # a chain
    assert session.report()["queries"] == {"head": 2}
    assert session.report()["query_seconds"]["head"] > 0


def test_what_asking_costs_is_part_of_a_step_but_for_the_first_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first query reads the prompt: its time does not count. A node of 0.35 pays at 1.4 once 0.5 are spent."""
    free, head = Told(Table({})), Head([7])
    monkeypatch.setattr(hybrid, "time", SimpleNamespace(perf_counter=lambda: head.now))
    (session, learned), budget = merging([7], (1.0, 1.4, 3.0), free=free, head=head), Budget(3, 6, 4)
    learned.count("head", [(1, 0.8)], 2)  # its 0.6 is worth 0.34
    assert session.propose(budget).tree.num_nodes == 1
    assert session._policy.queries == []
    session.observe(first := emitted((3,)))
    assert session.propose(budget).tree.tokens.tolist() == [[3, 3]]
    ((worth, without, with_it),) = session._policy.queries
    assert (without.num_nodes, without.seconds, with_it.num_nodes) == (1, 1.0, 2)
    assert with_it.seconds == pytest.approx(1.4 + 0.5)
    assert worth.num_queries == 0
    session.observe(second := emitted((3, 9)))
    assert (worth.num_queries, worth.seconds) == (1, pytest.approx(0.9))
    assert session._policy.queries == []
    assert free.heard == head.heard == [first, second]
    session.propose(budget)
    assert [asked.num_steps for asked in head.asked] == [FIRST_LEVELS, FIRST_LEVELS, 6]
    # the seconds of a level at the rate of plain steps
    assert [asked.min_level_probability for asked in head.asked] == [0.0, 0.0, pytest.approx(0.25)]
    assert session.report()["query_seconds"] == {"head": 1.5}
    assert session.report()["accepted_drafts"] == 1


# ------------------------------------------------------------------------------------------------- with a model


@pytest.fixture
def llama() -> Any:
    return SpeculativeGenerationMixin.attach(copy.deepcopy(zoo.build("llama")))


def priced(monkeypatch: pytest.MonkeyPatch, seconds: Mapping[int, float]) -> None:
    """A machine of which it is known what steps cost, and where real steps teach nothing else."""
    monkeypatch.setattr(StepCosts, "expected", classmethod(lambda cls, *_, **__: cls(seconds)))
    monkeypatch.setattr(StepCosts, "observe", lambda *_: None)
    monkeypatch.setattr(StepCosts, "_current", lambda self: self._given)  # also costs that no machine has


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
    assert stats.control["free_sources"] == ["prompt_lookup", "token_recycling"]
    assert set(stats.control["queries"]) == {"eagle", "medusa"}
    # the last step of a call is not told, and one for a last token drafts nothing
    assert sum(stats.control["widths"].values()) == stats.num_target_forwards - 1


@pytest.mark.parametrize("name", ["switching"])
def test_what_the_benchmark_switches_off_answers_plainly(llama: Any, name: str) -> None:
    llama.add_drafter(drafters.EagleDrafter(drafters.random_head(llama)))
    script("auto").add_drafters(llama)
    assert torch.equal(answers(llama, None), answers(llama, name))
    assert llama.last_speculation.num_drafted_tokens > 0


@pytest.mark.parametrize("batch_size", [1, 2])
def test_where_nothing_pays_steps_are_plain(llama: Any, monkeypatch: pytest.MonkeyPatch, batch_size: int) -> None:
    priced(monkeypatch, {1: 1.0, 2: 50.0, 64: 900.0})
    llama.add_drafter(drafters.EagleDrafter(drafters.random_head(llama)))
    assert torch.equal(answers(llama, None, batch_size), answers(llama, "auto", batch_size))
    stats = llama.last_speculation
    assert stats.control["plain_steps"] == 1.0
    assert stats.num_drafted_tokens == 0
    assert stats.control["widths"] == {1: stats.num_target_forwards - 1}


def test_sources_rest_while_nothing_pays(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Querying takes far more than its share of a step of a microsecond: plain decoding wins, and pauses double."""
    heard: list[int] = []
    merge = hybrid._HybridSession._merge

    def count(self: Any, *args: Any) -> Any:
        heard.append(1)
        return merge(self, *args)

    monkeypatch.setattr(hybrid._HybridSession, "_merge", count)
    priced(monkeypatch, {1: 1e-6, 2: 1.0, 64: 2.0})
    assert torch.equal(answers(llama, None, 2, count=40), answers(llama, "auto", 2, count=40))
    stats = llama.last_speculation
    assert stats.control["plain_steps"] == 1.0
    stretch = costs.STRETCH_STEPS
    assert stats.num_target_forwards - 1 > 4 * stretch
    assert 1 <= len(heard) <= 2 * stretch  # of 5: two stretches of drafting, with pauses of one and of two between


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
    assert llama.last_speculation.control["free_sources"] == ["prompt_lookup", "token_recycling"]
    answers(llama, {"method": "hybrid", "methods": ["token_recycling"], "adaptive": False, "num_draft_tokens": 6})
    control = llama.last_speculation.control
    assert (control["controller"], control["num_nodes"], control["free_sources"]) == ("fixed", 6, ["token_recycling"])
    for methods, error, message in (
        (["eagle"], DrafterMismatchError, "needs a head"),
        (["auto"], InvalidConfigError, "single methods"),
        (["nothing"], InvalidConfigError, "Unknown method or drafter 'nothing'"),
    ):
        with pytest.raises(error, match=message):
            answers(llama, {"method": "hybrid", "methods": methods})
    with pytest.raises(InvalidConfigError, match="None unless `method` is 'hybrid'"):
        SpeculativeConfig("eagle", methods=("eagle",))
    with pytest.raises(InvalidConfigError, match="list of different method names"):
        SpeculativeConfig("hybrid", methods=("eagle", "eagle"))
    with pytest.raises(InvalidConfigError, match="at least one part"):
        HybridDrafter({})


def test_several_heads_of_one_kind_are_told_apart(llama: Any) -> None:
    for seed in (0, 1):
        llama.add_drafter(drafters.EagleDrafter(drafters.random_head(llama, seed)), f"head {seed}")
    assert torch.equal(answers(llama, None, 2), answers(llama, {"method": "hybrid", "adaptive": False}, 2))
    assert set(llama.last_speculation.control["queries"]) == {"head 0", "head 1"}


def test_a_static_tree_is_a_source_like_any_other(llama: Any) -> None:
    head = drafters.random_head(llama, tree=drafters.CHOICES)
    llama.add_drafter(drafters.EagleDrafter(head))
    assert torch.equal(answers(llama, None), answers(llama, {"method": "hybrid", "adaptive": False}))
    assert llama.last_speculation.control["queries"]["eagle"] > 3


def test_experience_and_costs_stay_with_the_model(llama: Any, caplog: pytest.LogCaptureFixture) -> None:
    state = llama.__dict__["_speculation"]
    for _ in range(2):
        answers(llama, "auto")
    ((_, costs),) = state.costs
    assert costs.is_plain_known
    eagerly = {"method": "auto", "compile": "none"}
    with caplog.at_level("INFO", logger="hf_specdec.control.costs"):
        llama.warmup(eagerly)  # knows what real steps took
        assert not caplog.records
        for _ in range(2):
            llama.warmup(eagerly, batch_size=3)
    (record,) = caplog.records
    assert record.message.startswith("A step of LlamaForCausalLM with batch size 3")
    assert [known for _, known in state.costs][1] is costs
    name, new = "token_recycling", LearnedStats()
    assert state.learned.trust(name) != new.trust(name)
    another = copy.deepcopy(llama)
    assert another.__dict__["_speculation"].learned.trust(name) == new.trust(name)
    assert another.__dict__["_speculation"].costs == []
    drafter = HybridDrafter({name: TokenRecyclingDrafter()}, learned := LearnedStats())
    llama.add_drafter(drafter, "mine")  # one of the user's own has its own
    answers(llama, "mine")
    assert learned.trust(name) != new.trust(name)
