"""Control: SGLang's tiers against their published rule, costs that real steps keep true."""

from __future__ import annotations

import copy
import itertools
import json
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import drafters
import zoo
from hf_specdec import InvalidConfigError, SpeculativeConfig, SpeculativeGenerationMixin
from hf_specdec.config import AdaptiveConfig
from hf_specdec.control import costs
from hf_specdec.control.controller import CostModelController, TierController, tier_budget
from hf_specdec.control.costs import ArmGains, Arms, StepCosts
from hf_specdec.control.policy import best_width
from hf_specdec.generation import call, state
from hf_specdec.trees.draft import Budget
from hf_specdec.verification.probe import inspect_target
from hf_specdec.verification.step import StepSeconds
from models import prompts
from reference import OracleDrafter


def step(*counts: int, width: int = 1, seconds: StepSeconds | None = None) -> Any:
    """A step that kept so many nodes in each row."""
    draft = SimpleNamespace(tree=SimpleNamespace(num_nodes=width))
    acceptance = SimpleNamespace(counts=list(counts))
    return SimpleNamespace(draft=draft, acceptance=acceptance, seconds=seconds or StepSeconds())


def depths(config: AdaptiveConfig, accepted: Sequence[int]) -> list[int]:
    controller, found = TierController(config, Budget(29, 7, 4)), list[int]()
    for count in accepted:
        found.append(controller.next().num_steps)
        controller.observe(step(count + 1))
    return found


EAGER, SLOW = AdaptiveConfig(down_hysteresis=1.0, up_hysteresis=1.0), AdaptiveConfig(up_hysteresis=0.6)
TIERS = (
    (AdaptiveConfig(), [3] * 30, [3] * 10 + [7] * 20),  # warm-up of ten; 3 accepted of 3 is above 2.5
    (AdaptiveConfig(), [0] * 30, [3] * 10 + [1] * 20),
    (AdaptiveConfig(), [2] * 40, [3] * 40),  # 2 of 3: neither above 2.5 nor below 0.25
    (AdaptiveConfig(), [6] * 20 + [1] * 60, [7, 3]),  # 1 is below 3 - 0.75, not below 1 - 0.75
    (AdaptiveConfig(), [0] * 20 + [1] * 40, [1, 3]),  # from the lowest tier upwards: 1 is above 0.5
    (AdaptiveConfig(), [7] * 40, [7, 7]),  # there is nothing above the highest
    (AdaptiveConfig(ema_alpha=1.0, up_hysteresis=-0.5), [2] * 40, [3] * 40),  # 2 is not above 3 - 1
    (SLOW, [3] * 40, [3] * 40),  # 3 is not above 3 - 0.5 + 0.6
    (EAGER, [1] * 40, [1, 1]),  # 1 is below 1 - 0.5 + 1.0, and not above it
)


@pytest.mark.parametrize(("config", "accepted", "wanted"), TIERS)
def test_tiers_follow_the_average(config: AdaptiveConfig, accepted: list[int], wanted: list[int]) -> None:
    """Every step, or the one before the last change of what is accepted and the last."""
    found = depths(config, accepted)
    assert (found if len(wanted) > 2 else [found[19], found[-1]]) == wanted


def test_tiers_of_rows_that_go_on_and_their_sizes() -> None:
    controller = TierController(AdaptiveConfig(warmup_batches=1, update_interval=1, ema_alpha=1.0), Budget(8, 7, 1))
    controller.observe(step(8, 0, 6))  # a row has ended
    controller.observe(step(0, 0))
    assert controller.report()["average_accepted"] == 6
    assert controller.report()["steps_by_tier"] == {3: 1}
    assert tier_budget(2, Budget(16, 5, 4)) == Budget(7, 2, 4)
    assert tier_budget(3, Budget(8, 7, 1)) == Budget(4, 3, 1)
    with pytest.raises(InvalidConfigError, match="All of candidate_steps"):
        TierController(AdaptiveConfig(candidate_steps=(5, 7)), Budget(8, 4, 2))


@pytest.fixture
def llama() -> Any:
    return SpeculativeGenerationMixin.attach(copy.deepcopy(zoo.build("llama")))


@pytest.mark.parametrize(("how", "batch_size"), [("object", 1), ("dict", 1), ("file", 3), ("default", 3)])
def test_tiers_by_object_dict_or_file(llama: Any, tmp_path: Path, how: str, batch_size: int) -> None:
    fields = {"candidate_steps": [1, 2, 6], "warmup_batches": 2, "update_interval": 1}
    (tmp_path / "tiers.json").write_text(json.dumps(fields))
    adaptive = {
        "object": AdaptiveConfig.from_dict(fields), "dict": fields, "file": str(tmp_path / "tiers.json"),
        "default": True,
    }[how]  # fmt: skip
    ids, mask = prompts(batch_size)
    options = {"attention_mask": mask, "max_new_tokens": 30, "do_sample": False}
    plain = llama.generate(ids, **options)
    llama.add_drafter(OracleDrafter(plain[:, ids.shape[1] :], "always", zoo.VOCAB_SIZE))
    llama.add_drafter(drafters.EagleDrafter(drafters.random_head(llama)))
    for method in ("oracle", "eagle", "prompt_lookup"):
        config = SpeculativeConfig(method, adaptive=adaptive)
        assert torch.equal(plain, llama.generate(ids, speculative=config, **options))
        control = llama.last_speculation.control
        assert control["controller"] == "tiers"
        assert set(control["candidate_steps"]) <= ({1, 2, 6} if how != "default" else {1, 3, 7})
        assert SpeculativeConfig.from_dict(config.to_dict()) == config
        if method == "eagle":  # random weights are never right
            assert control["tier"] == (1 if how != "default" else control["tier"])
        if method == "oracle" and how != "default":
            assert control["tier"] == max(control["candidate_steps"])


def test_files_that_are_not_a_policy(tmp_path: Path) -> None:
    for text, message in (("[1]", "holds a list"), ("{", "JSON file"), ('{"steps": 3}', "Did you mean")):
        (tmp_path / "tiers.json").write_text(text)
        with pytest.raises(InvalidConfigError, match=message):
            SpeculativeConfig("eagle", adaptive=str(tmp_path / "tiers.json"))
    with pytest.raises(InvalidConfigError, match="No such file"):
        SpeculativeConfig("eagle", adaptive=str(tmp_path / "missing.json"))


# ------------------------------------------------------------------------------------------------- costs


def test_costs_between_widths_lie_on_a_line() -> None:
    known = StepCosts({1: 1.0, 2: 2.0, 4: 1.0, 8: 2.0})
    assert known.table() == (1.0, 2.0, 1.5, 1.0, 1.25, 1.5, 1.75, 2.0)
    assert known.covers(8, rows=1)
    assert not known.covers(9, rows=1)
    assert known.covers(64, rows=64)  # so wide trees are not measured for so many rows


def test_costs_of_another_batch_size_are_those_of_as_many_nodes() -> None:
    one = StepCosts({1: 2.0, 2: 2.5, 4: 3.5, 8: 5.5})
    four = StepCosts.expected(torch.device("cpu"), rows=4, widest=4, known=(1, one))
    assert not four.is_plain_known
    assert four.table() == (3.5, 5.5, 7.5, 9.5)
    four.observe(1, 7.0)  # its first step sets the level
    assert four.table() == pytest.approx((7.0, 11.0, 15.0, 19.0), rel=0.01)  # wider ones are assumed to be cheaper
    back = StepCosts.expected(torch.device("cpu"), rows=1, widest=8, known=(4, four))
    assert back.table()[3] == pytest.approx(7.0)


def test_nodes_up_to_the_width_that_a_tree_is_padded_to_cost_nothing() -> None:
    """A graph of 8 nodes takes as long for a tree of 3, so trees may as well fill it."""
    padded = StepCosts({1: 1.0, 8: 1.2, 16: 2.0}, is_padded=True)
    assert padded.table() == (1.0, *[1.2] * 7, *[2.0] * 8)
    padded.observe(3, 0.6)
    assert padded.table()[2:8] == pytest.approx([padded.table()[1]] * 6)
    assert padded.table()[1] < 1.2
    assert best_width([[1.0] + [0.1] * 15], padded.table(), 0.0).num_nodes == 8


def test_a_node_costs_no_more_in_a_wide_step_than_in_a_narrow_one() -> None:
    """Width 2 was measured beside other work, and so was width 8; two steps of width 4 take 4 seconds."""
    known = StepCosts({1: 1.0, 2: 20.0, 4: 2.0, 8: 30.0})
    assert known.table() == (1.0, 2.0, 2.0, 2.0, 2.5, 3.0, 3.5, 4.0)
    known.observe(8, 3.0)  # a little faster than the cap: a usual correction, from 4 seconds on
    assert 3.0 <= known.table()[7] < 4.0


def test_a_width_that_is_tried_again_is_not_assumed_cheaper_than_a_narrower_one() -> None:
    """Else, once in a few hundred steps, a tree of 16 nodes took eight plain steps where two already cost too much."""
    known = StepCosts({1: 1.0, 2: 1.4, 4: 2.2, 8: 4.0, 16: 8.0})
    for _ in range(1000):
        known.observe(1, 1.0)
        known.observe(2, 1.4)
    assert known.table()[15] >= known.table()[1] == pytest.approx(1.4)
    for _ in range(500):
        known.observe(1, 1.0)
    assert known.table()[15] < 4.0  # more slowly than a cheaper width, but it is tried again


def test_a_step_far_below_its_cost_corrects_it_fully() -> None:
    known = StepCosts({1: 1.0, 2: 1.9, 4: 3.6, 8: 7.0})
    for _ in range(20):  # more than the first steps, which always count fully
        known.observe(4, 3.6)
    known.observe(4, 1.2)
    assert known.table()[3] == pytest.approx(1.2)
    assert known.table()[0] == pytest.approx(1.0, rel=0.2)  # other widths change little


def test_real_steps_correct_the_costs() -> None:
    """What every step takes besides is found, and a width that is dearer than measured; a hiccup changes little."""
    known = StepCosts({1: 1.0, 8: 2.0, 64: 8.0})
    for _ in range(200):
        known.observe(1, 1.2)
        known.observe(8, 2.2)
        known.observe(64, 8.2)
    table = known.table()
    assert table[0] == pytest.approx(1.2, rel=0.03)
    assert table[7] == pytest.approx(2.2, rel=0.03)
    assert table[63] == pytest.approx(8.2, rel=0.03)
    for _ in range(200):
        known.observe(1, 1.2)
        known.observe(8, 3.0)
    assert known.table()[7] == pytest.approx(3.0, rel=0.1)
    assert known.table()[0] == pytest.approx(1.2, rel=0.1)
    before = known.table()[7]
    known.observe(8, 500.0)
    assert known.table()[7] < 1.6 * before
    known.observe(65, 1.0)  # wider than anything that was measured
    assert len(known.table()) == 64


def truth(width: int) -> float:
    """An eager step of a processor on which trees cost more than expected."""
    return 0.050 + 0.006 * width


def test_costs_are_learned_from_the_first_steps() -> None:
    """Whatever a step takes, after one of each of two widths the costs in between and beyond are near the truth."""
    known = StepCosts.expected(torch.device("cpu"), rows=1, widest=64)
    assert not known.is_plain_known
    known.observe(1, truth(1))
    assert known.is_plain_known
    assert known.plain == truth(1)
    assert known.table()[15] == pytest.approx(
        truth(1) * (1 + 0.06 * 15), rel=0.01
    )  # so far only the ratio is expected
    for _ in range(3):
        known.observe(16, truth(16))
    table = known.table()
    assert known.plain == pytest.approx(truth(1), rel=0.01)
    assert table[15] == pytest.approx(truth(16), rel=0.1)
    for width in (2, 4, 8, 32, 64):
        assert table[width - 1] == pytest.approx(truth(width), rel=0.25), width
    for width in (2, 4, 8, 32, 64):
        for _ in range(3):
            known.observe(width, truth(width))
        assert known.table()[width - 1] == pytest.approx(truth(width), rel=0.1), width


def test_the_first_step_of_a_size_teaches_nothing() -> None:
    """It takes twice as long as later ones of this size; drafting would be given up if it counted."""
    known = StepCosts.expected(torch.device("cpu"), rows=1, widest=64)
    controller = CostModelController(Budget(8, 7, 1), known)
    seen = []
    for number in range(12):
        budget = controller.next()
        seen.append(budget.num_nodes)
        width = 1 if budget.is_plain else 8
        slow = 2.0 if seen.count(seen[-1]) == 1 else 1.0
        seconds = StepSeconds(verify=slow * truth(width))
        controller.observe(step(1 if width == 1 else 3, width=width, seconds=seconds))
        assert known.is_plain_known == (number > 0)
    assert seen == [1, 1] + [8] * 10
    assert known.plain == pytest.approx(truth(1), rel=0.01)
    assert known.table()[7] == pytest.approx(truth(8), rel=0.05)


def test_expected_costs_count_all_rows_and_limit_the_first_trees() -> None:
    known = StepCosts.expected(torch.device("cpu"), rows=8, widest=64)
    assert known.max_width == 16
    assert known.table()[15] / known.plain == pytest.approx((1 + 0.06 * 127) / (1 + 0.06 * 7))
    device = StepCosts.expected(torch.device("meta"), rows=1, widest=64)
    assert device.table()[63] / device.plain == pytest.approx(1.315)
    assert device.widest_trial == 64  # where nodes are cheap, any tree may be tried
    known, widths = StepCosts.expected(torch.device("cpu"), rows=1, widest=64), []
    for _ in range(6):
        widths.append(known.widest_trial)
        known.observe(known.widest_trial, 1.0)
    assert widths == [8, 16, 32, 64, 64, 64]


def test_a_first_call_runs_no_forward_but_its_steps(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, mask = prompts(1)
    options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    calls = []
    monkeypatch.setattr(state, "measure_costs", None)
    llama.model.layers[0].register_forward_pre_hook(lambda *_: calls.append(1))
    call.current_facts(llama)  # probes the model with the hook
    calls.clear()
    llama.generate(ids, speculative="auto", **options)
    stats = llama.last_speculation
    assert len(calls) == 1 + stats.num_target_forwards
    assert stats.control["width_by_step"][:2] == [1, 1]  # with the second, all others are compared


def test_costs_are_measured_by_rows(llama: Any) -> None:
    facts = inspect_target(llama)
    for rows, widest in ((1, 12), (3, 64), (64, 64)):
        known = StepCosts.measure(llama, facts, rows=rows, widest=widest, context=20)
        most = max(costs.MAX_MEASURED_NODES // rows, costs.MIN_MEASURED_WIDTH)
        assert len(known.table()) == known.max_width == min(widest, most)
        assert all(seconds > 0 for seconds in known.table())


def test_processes_that_generate_together_do_not_decide_by_the_clock(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call, "is_distributed", lambda: True)
    ids, mask = prompts(1)
    options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    assert torch.equal(llama.generate(ids, **options), llama.generate(ids, speculative="auto", **options))
    assert llama.last_speculation.control["controller"] == "fixed"


def test_the_cost_model_reports_what_steps_brought() -> None:
    """Tokens per row that goes on, against plain steps of half a second; only steps that brought less have lost."""
    told: list[tuple[int, float]] = []
    known = SimpleNamespace(
        plain=0.5, widest_trial=3, table=lambda _share: (0.5, 1.5, 2.5), arms=ArmGains(), is_plain_known=True,
        plain_seconds=lambda _share: 0.5,
        observe=lambda *step: told.append(step),
    )  # fmt: skip
    controller = CostModelController(Budget(8, 4, 2), known)  # type: ignore[arg-type]
    assert controller.report()["gain"] == 1.0
    assert controller.report()["plain_steps"] == 0.0
    assert controller.next().num_nodes == 3  # no wider than what was measured
    assert controller.step_costs() == (0.5, 1.5, 2.5)
    assert CostModelController(Budget(2, 4, 2), known).next() == Budget(2, 4, 2)  # type: ignore[arg-type]
    for width, counts, seconds in (
        (3, [3, 0, 1], StepSeconds(0.25, 2.0, 0.5)),  # two tokens per row in 2.75 seconds
        (3, [4], StepSeconds(0.5, 0.5, 0.5)),  # four in one and a half
        (1, [1], StepSeconds(0.0, 1.0, 0.25)),
        (1, [0], StepSeconds(0.0, 0.5, 0.0)),  # nobody went on
    ):
        controller.observe(step(*counts, width=width, seconds=seconds))
    assert told == [(3, 2.5, 1.0), (3, 1.0, 1.0), (1, 1.25, 1.0), (1, 0.5, 1.0)]  # without drafting
    report = controller.report()
    assert report["width_by_step"] == [3, 3, 1, 1]
    assert (report["widths"], report["plain_steps"]) == ({1: 2, 3: 2}, 0.5)
    assert report["gain"] == 7 * 0.5 / 6
    assert report["seconds_lost"] == 1.75 + 0.75 + 0.5
    assert report["tokens_per_second"] == {"drafting": 9 / 6, "plain": None}


def test_a_time_on_a_device_ends_when_the_device_has_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launching takes a millisecond whatever the width; what counts is the wait for the result."""
    clock, queued = [0.0], [0.0]

    def launch(size: int) -> None:
        clock[0] += 0.001
        queued[0] = size / 10

    def wait(_device: torch.device) -> None:
        clock[0] += queued[0]
        queued[0] = 0.0

    monkeypatch.setattr(torch, "get_device_module", lambda _device: SimpleNamespace(synchronize=wait))
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    found = costs._seconds_by_size(launch, [1, 4, 16], torch.device("cuda"))
    assert found == pytest.approx({1: 0.101, 4: 0.401, 16: 1.601})


def test_a_size_that_takes_long_is_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the round that warms up; the others are timed in the rounds after it."""
    clock, sizes = [0.0], list[int]()

    def forward(size: int) -> None:
        sizes.append(size)
        clock[0] += size / 10 + (0.05 if len(sizes) <= 3 else 0.0)  # the first round is slower

    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    found = costs._seconds_by_size(forward, [1, 4, 16], torch.device("cpu"), rounds=2, pick=min, enough=1.0)
    assert found == pytest.approx({1: 0.1, 4: 0.4, 16: 1.65})
    assert sizes == [1, 4, 16, 1, 4, 1, 4]


def run_arms(arms: Arms, drafting: float, steps: int, plain: float = 1.0) -> list[str]:
    """The arms of so many steps, if drafting takes `drafting` seconds per token and a plain step `plain`."""
    seen = []
    for _ in range(steps):
        seen.append(arms.arm)
        arms.observe(1.0, drafting if arms.arm == "drafting" else plain, 1.0)
    return seen


def test_drafting_that_loses_is_tried_again_after_pauses_that_double() -> None:
    stretch = costs.STRETCH_STEPS
    seen = run_arms(Arms(ArmGains()), 1.3, 6 * stretch + 8 + 16 + 32 + 64 + 64)
    pauses = [len(list(group)) for arm, group in itertools.groupby(seen) if arm == "plain"]
    assert pauses[:5] == [8, 16, 32, 64, 64]
    assert seen[:stretch] == ["drafting"] * stretch
    gains = ArmGains()
    run_arms(Arms(gains), 1.3, 100)
    seen = [arm for _ in range(30) for arm in run_arms(Arms(gains), 1.3, 20)]  # calls shorter than the longest pause
    assert 0.04 < seen.count("drafting") / len(seen) < 0.16


def test_drafting_that_wins_again_goes_on() -> None:
    gains = ArmGains()
    arms = Arms(gains)
    run_arms(arms, 1.5, 400)
    seen = run_arms(arms, 0.5, 600)
    assert seen[-200:] == ["drafting"] * 200


def test_calls_in_several_threads_do_not_decode_plainly_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two calls share what is known; both have read that a plain step is left, then both count it."""
    gains = ArmGains()
    gains.plain_steps = 1
    with monkeypatch.context() as patch:
        patch.setattr(Arms, "arm", "plain")
        for arms in (Arms(gains), Arms(gains)):
            arms.observe(1.0, 1.0, 1.0)
    assert gains.plain_steps == 0
    assert Arms(gains).arm == "drafting"


def test_costs_of_fewer_rows() -> None:
    costs = StepCosts({1: 4.0, 2: 5.0, 4: 7.0, 8: 11.0})
    assert costs.table() == (4, 5, 6, 7, 8, 9, 10, 11)
    assert costs.table(0.5) == (3.5, 4, 4.5, 5, 5.5, 6, 6.5, 7)
    assert (costs.plain_seconds(0.25), costs.plain_seconds(1.0)) == (3.25, 4.0)
    costs.observe(8, 14.0, 0.5)  # as wide as 4 nodes of all rows: twice what was expected
    assert costs.table()[3] > 7
    assert StepCosts({1: 4.0}).table(0.5) == (4.0,)
