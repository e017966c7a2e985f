"""A model in training: its weights change between calls, and trainers switch modes, hooks and adapters around them."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from drafters import random_head
from hf_specdec import SpeculativeGenerationMixin
from hf_specdec.control.policy import LearnedStats
from hf_specdec.drafters.eagle import EagleDrafter
from hf_specdec.generation import model_programs, state
from hf_specdec.generation.state import state_of
from hf_specdec.verification.fingerprint import Fingerprint
from hf_specdec.verification.runners import WeightsVersion
from hf_specdec.verification.target import Target
from reference import OracleDrafter, OracleSession

IDS = torch.randint(3, zoo.VOCAB_SIZE, (1, 20), generator=torch.Generator().manual_seed(5))
GREEDY: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False, "attention_mask": torch.ones_like(IDS)}
KERNELS = {"method": "auto", "compile": "kernels"}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """One entry per program of a target."""
    seen: list[Any] = []
    make = model_programs.make_runner
    monkeypatch.setattr(
        model_programs, "make_runner", lambda model, *args: (seen.append(model), make(model, *args))[1]
    )
    return seen


def train(model: Any, steps: int = 1, rate: float = 1e-2) -> None:
    """Steps of an optimizer over every parameter that is trained, in train mode; the model stays in it."""
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate)
    for _ in range(steps):
        optimizer.zero_grad()
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()


def roll_out(model: Any, speculative: Any = "auto", seed: int = 0, **options: Any) -> list[int]:
    torch.manual_seed(seed)
    sampled = {"max_new_tokens": 20, "do_sample": True, "pad_token_id": 0, **options}
    return model.generate(input_ids=IDS, speculative=speculative, **sampled)[0].tolist()


def assert_same(model: Any, speculative: Any = "auto") -> list[int]:
    """Plain and speculative rollouts of a seed are the same."""
    plain = roll_out(model, None)
    assert roll_out(model, speculative) == plain
    return plain


def with_lora(model: Any, **fields: Any) -> Any:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=64, init_lora_weights=False,
                             target_modules=["q_proj", "up_proj"], **fields)  # fmt: skip
    return SpeculativeGenerationMixin.attach(peft.get_peft_model(model, config))


# ------------------------------------------------------------------------------------------------- no second probe


@pytest.mark.parametrize("lora", [False, True])
def test_updates_need_no_probe_and_the_check_is_short(model: Any, lora: bool, probes: list[Any]) -> None:
    wrapped = with_lora(model) if lora else model
    wrapped.train()
    roll_out(wrapped)
    probes.clear()
    begin = time.perf_counter()
    for _ in range(3):
        train(wrapped)
        assert_same(wrapped)
    seconds = (time.perf_counter() - begin) / 6
    assert not probes
    begin = time.perf_counter()
    for _ in range(10):
        Fingerprint.of(model)
        WeightsVersion.of(model)
    assert (time.perf_counter() - begin) / 10 < 0.05 * seconds


@pytest.mark.slow
def test_modes_and_adapters_are_probed_once_each(model: Any, probes: list[Any]) -> None:
    """Train and eval, with and without the adapter, merged or not, in turn."""
    wrapped = with_lora(model)
    probes.clear()
    for _ in range(3):
        for mode in (True, False):
            wrapped.train(mode)
            assert_same(wrapped)
            with wrapped.disable_adapter():
                assert_same(wrapped)
        wrapped.merge_adapter()
        assert_same(wrapped)
        wrapped.unmerge_adapter()
        train(wrapped)
    assert len(probes) <= 5


def checkpoint(model: Any, enabled: bool) -> None:
    (model.gradient_checkpointing_enable if enabled else model.gradient_checkpointing_disable)()


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing:FutureWarning")
def test_checkpointing_that_is_switched_off_for_rollouts(model: Any, probes: list[Any]) -> None:
    """As `unwrap_model_for_generation` does; hooks that require gradients are registered again each time."""
    wrapped = with_lora(model)
    wrapped.enable_input_require_grads()
    probes.clear()
    for _ in range(3):
        checkpoint(wrapped, True)
        wrapped.enable_input_require_grads()
        train(wrapped)
        checkpoint(wrapped, False)
        assert_same(wrapped)
    assert len(probes) == 1


def test_hooks_of_others_are_still_changes(model: Any) -> None:
    def make_inputs_require_grads(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        return output * 2

    before = Fingerprint.of(model)
    model.get_input_embeddings().register_forward_hook(make_inputs_require_grads)
    assert Fingerprint.of(model).differences(before) == ["hooks"]


# ------------------------------------------------------------------------------------------------- mixed precision


def mixed_precision(model: Any) -> Any:
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(True)  # of other tests in this process
    return accelerate.Accelerator(mixed_precision="bf16", cpu=True).prepare_model(model)


def test_a_forward_in_autocast_is_compared_with_its_own_rounding(model: Any, made: list[Any]) -> None:
    prepared = mixed_precision(model)
    assert prepared is model
    assert model.dtype == torch.float32
    for update in range(2):
        train(model)
        begin = model.generate(IDS, **GREEDY)[:, : IDS.shape[1] + 2]
        found = model.generate(IDS, speculative=KERNELS, **GREEDY)
        assert torch.equal(found[:, : begin.shape[1]], begin), update
    assert state_of(model).facts[0].uses_autocast
    assert len(made) == 1, "that there is no program is remembered over updates"
    assert state_of(model).programs["kernels"].runner is None


# ------------------------------------------------------------------------------------------------- programs


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True])
def test_a_program_takes_new_weights_and_serves_train_mode(model: Any, lora: bool, made: list[Any]) -> None:
    wrapped = with_lora(model) if lora else model
    wrapped.train()
    answers = set()
    for _ in range(3):
        answers.add(tuple(assert_same(wrapped, KERNELS)))
        assert state_of(model).programs["kernels"].runner is not None
        train(wrapped)
    assert len(answers) == 3
    assert len(made) == 1


@pytest.mark.slow
def test_programs_of_other_modes_are_kept(model: Any, made: list[Any]) -> None:
    """Rollouts in train mode, evaluation, and a merged adapter: one program each."""
    wrapped = with_lora(model)
    for _ in range(2):
        for mode in (True, False):
            wrapped.train(mode)
            assert_same(wrapped, KERNELS)
            assert state_of(model).programs["kernels"].runner is not None
        wrapped.merge_adapter()
        merged = assert_same(wrapped, KERNELS)
        wrapped.unmerge_adapter()
        assert assert_same(wrapped, KERNELS) == pytest.approx(merged)
        train(wrapped)
    assert len(made) == 3
    model.release_memory()
    assert not state_of(model).programs
    assert not state_of(model).spare_programs


@pytest.mark.slow
def test_a_program_of_other_weights_is_not_kept(model: Any, made: list[Any]) -> None:
    roll_out(model, KERNELS)
    model.double()
    assert_same(model, {"method": "auto", "compile": "none"})
    assert not state_of(model).spare_programs
    model.float()
    assert_same(model, KERNELS)
    assert len(made) == 2


def test_dropout_in_train_mode_is_not_compiled(caplog: pytest.LogCaptureFixture, made: list[Any]) -> None:
    model = SpeculativeGenerationMixin.attach(copy.deepcopy(zoo.build("llama")))
    wrapped = with_lora(model, lora_dropout=0.5)
    wrapped.train()
    generator = torch.get_rng_state()
    model_programs.current_program(model, state.current_facts(model), frozenset(), "kernels")
    assert torch.equal(generator, torch.get_rng_state())
    assert "random in train mode" in caplog.text
    train(wrapped)
    roll_out(wrapped, KERNELS)
    assert len(made) == 1


@pytest.mark.slow
@pytest.mark.parametrize("reduced", [False, True])
def test_a_compiled_head_is_made_again_only_if_it_copies_rows(model: Any, reduced: bool) -> None:
    head = random_head(model, draft_vocab_size=32 if reduced else None)
    model.add_drafter(EagleDrafter(head))
    config, kept = {"method": "eagle", "compile": "kernels"}, []
    model.train()
    for _ in range(2):
        assert_same(model, config)
        ((_, compiled),) = state_of(model).compiled[model.drafters["eagle"]].values()
        kept.append(compiled)
        train(model)
    assert (kept[0] is kept[1]) == (not reduced)


# ------------------------------------------------------------------------------------------------- what was learned


def test_what_was_learned_fades_once_per_update(model: Any) -> None:
    for _ in range(2):
        roll_out(model)
    learned, table = state_of(model).learned, state_of(model).made["token_recycling"].table
    assert learned._hits
    before = [table.log_probs[0].clone(), state_of(model).costs[0], dict(learned._hits)]
    train(model)
    version = WeightsVersion.of(model)
    for _ in range(2):
        state_of(model).fade_if_weights_changed(version)
    assert learned._hits == {
        name: [(expected / 2, hits / 2) for expected, hits in classes] for name, classes in before[2].items()
    }
    faded = table.log_probs[0]
    assert torch.equal(faded.isinf(), before[0].isinf()), "no entry is erased"
    known = ~faded.isinf()
    assert torch.allclose(faded[known].exp(), 0.95 * before[0][known].exp())
    assert state_of(model).costs[0] is before[1]


def test_without_an_update_nothing_fades(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor by modes, adapters that are switched off, or a backward pass alone."""
    wrapped = with_lora(model)
    roll_out(wrapped)
    monkeypatch.setattr(LearnedStats, "fade", None)  # would fail
    with wrapped.disable_adapter():
        roll_out(wrapped)
    wrapped.train()
    wrapped(input_ids=IDS, labels=IDS).loss.backward()
    roll_out(wrapped)
    wrapped.eval()
    roll_out(wrapped)


@pytest.mark.slow
def test_a_head_for_the_old_weights_is_left_out(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head that always knew the answer is queried in every step; after new weights, in fewer and fewer."""
    # forwards of 2 ms at any width and queries of 1 ms: the speed of this machine must not decide
    clock = SimpleNamespace(now=0.0)

    def taking(seconds: float, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            clock.now += seconds
            return method(*arguments)

        return timed

    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(Target, "verify", taking(0.002, Target.verify))
    monkeypatch.setattr(OracleSession, "propose", taking(0.001, OracleSession.propose))
    options = {"max_new_tokens": 200, "do_sample": False, "pad_token_id": 0}
    answers = model.generate(IDS, **options)[:, IDS.shape[1] :]
    model.add_drafter(OracleDrafter(answers, "always", zoo.VOCAB_SIZE))
    config = {"method": "hybrid", "methods": ["oracle"]}

    def share_of_queries() -> float:
        plain = model.generate(IDS, **options)
        assert torch.equal(model.generate(IDS, speculative=config, **options), plain)
        stats = model.last_speculation
        return stats.control["queries"]["oracle"] / stats.num_target_forwards

    for _ in range(2):
        before = share_of_queries()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(parameter.flip(0))
    after = [share_of_queries() for _ in range(3)]
    assert before > 0.9
    assert 0.3 > after[0] > after[1] >= after[2], after


def test_a_copy_for_reference_learns_by_itself(model: Any) -> None:
    """The reference model of a trainer: attached as well, probed by itself, and unaffected by updates."""
    roll_out(model)
    reference = copy.deepcopy(model)
    plain = assert_same(reference)
    train(model)
    assert_same(model)
    assert state_of(reference).weights == WeightsVersion.of(reference)
    assert assert_same(reference) == plain
