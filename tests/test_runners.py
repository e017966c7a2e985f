"""Compiled verification: the same answers from one program for all sizes, dropped with the weights it was made of.

Most tests use programs of CPU kernels. Inductor takes ten seconds and more per model; its tests, except for one, run
the traced operations directly.
"""

from __future__ import annotations

import copy
import gc
import logging
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import drafters
import zoo
from hf_specdec import Eagle3Head, SpeculativeGenerationMixin
from hf_specdec.cpu import library
from hf_specdec.generation import model_programs, state
from hf_specdec.heads.stages import traced_stages
from hf_specdec.verification import programs, runners, target
from hf_specdec.verification.runners import CompiledForward
from models import prompts
from torch_modes import MODES

COMPILED = {"method": "eagle", "compile": "kernels", "num_draft_tokens": 6}
BY_INDUCTOR = {**COMPILED, "compile": "inductor"}


def speculative_model(name: str = "llama", model: Any = None) -> Any:
    model = SpeculativeGenerationMixin.attach(copy.deepcopy(zoo.build(name)) if model is None else model)
    model.load_drafter(drafters.random_head(model, version=3))
    return model


def without_inductor(graph: Any, _inputs: Any, options: Any) -> Any:
    """Replace inductor: run the traced operations directly. Weights are packed only without kernels."""
    assert options == ({} if library.load_or_none() else programs.PACKING_OPTIONS)
    return graph.forward


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(library.VARIABLE, "none")
    library._loaded.clear()
    yield
    library._loaded.clear()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._inductor, "compile", without_inductor)


@pytest.fixture(scope="module")
def compiled() -> Any:
    """A model whose forward has been traced."""
    model = speculative_model()
    model.warmup(COMPILED)
    assert model._speculation.programs["kernels"].runner is not None
    return model


@pytest.mark.slow
def test_inductor_gives_plain_answers() -> None:
    model = speculative_model(model=zoo.shallow("llama", 2))
    with torch.inference_mode():  # a program made there serves calls outside it
        model.warmup(BY_INDUCTOR)
    assert model._speculation.programs["inductor"].runner is not None
    sampled = {"do_sample": True, "temperature": 0.8}
    fresh = speculative_model(model=zoo.shallow("llama", 2))
    assert answers(fresh, 1, BY_INDUCTOR, **sampled) == answers(model, 1, None, **sampled)
    for rows in (1, 3):
        for config in (BY_INDUCTOR, {"method": "auto", "compile": "inductor"}):
            assert answers(model, rows, config) == answers(model, rows, None)
            for mode in ("inference", "bfloat16", "gradients", "meta"):
                ids_and_mask = prompts(rows)
                with MODES[mode]():
                    assert answers(model, rows, config, ids_and_mask) == answers(model, rows, None, ids_and_mask)


def answers(model: Any, rows: int, speculative: Any, given_prompts: Any = None, **options: Any) -> Any:
    ids, mask = prompts(rows) if given_prompts is None else given_prompts
    torch.manual_seed(7)
    given = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, **options}
    return model.generate(ids, speculative=speculative, **given).tolist()


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("method", ["eagle", "prompt_lookup", "auto", "lookahead"])
def test_answers_are_plain_ones(compiled: Any, rows: int, method: str) -> None:
    assert answers(compiled, rows, {"method": method, "compile": "kernels"}) == answers(compiled, rows, None)
    answers(compiled, 1, {"method": method, "compile": "none"})
    assert compiled.last_speculation.forwards == "eager"
    answers(compiled, 1, {"method": method, "compile": "kernels"})
    assert compiled.last_speculation.forwards == "kernels"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3_text", "qwen2_moe", "phi", "olmo2", "gpt_oss", "deepseek_v3"])
def test_architectures_answer_plainly_compiled_or_not(name: str, caplog: pytest.LogCaptureFixture) -> None:
    model = speculative_model(name)
    with caplog.at_level(logging.WARNING):
        assert answers(model, 3, COMPILED) == answers(model, 3, None)
    runner = model._speculation.programs["kernels"].runner
    assert (runner is None) == any("is not compiled" in record.message for record in caplog.records)
    assert name not in ("gemma3_text", "phi", "olmo2") or runner is not None


@pytest.mark.slow
def test_one_program_serves_all_sizes(compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No compilation over 100 calls of varying lengths, widths and batches."""
    program = compiled._speculation.programs["kernels"]
    monkeypatch.setattr(programs, "make_fx", None)  # would fail
    for call in range(100):
        ids = torch.arange(1, 2 + call % 37)[None].repeat(1 + call % 3, 1) % zoo.VOCAB_SIZE
        config = {**COMPILED, "num_draft_tokens": 2 + call % 5}
        compiled.generate(ids, max_new_tokens=2 + call % 4, do_sample=False, speculative=config)
    assert compiled._speculation.programs["kernels"] is program


@pytest.mark.slow
def test_compiling_draws_no_random_number() -> None:
    """The first sampled answer of a seed, for which everything is compiled, is the plain one."""
    model = speculative_model()
    options = {"do_sample": True, "temperature": 0.8, "top_k": 20}
    for method in ("eagle", "auto"):
        assert answers(model, 1, {"method": method, "compile": "kernels"}, **options) == answers(
            model, 1, None, **options
        )


def test_the_program_runs_every_step_and_gives_the_head_its_features(
    compiled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[tuple[int, ...]] = []
    call = CompiledForward.__call__

    def count(self: CompiledForward, tokens: Any, *args: Any, **options: Any) -> Any:
        runs.append(tuple(tokens.shape))
        return call(self, tokens, *args, **options)

    monkeypatch.setattr(CompiledForward, "__call__", count)
    config = {**COMPILED, "num_draft_tokens": 30, "top_k": 8}
    answers(compiled, 1, config)
    stats = compiled.last_speculation
    assert len(runs) == 1 + len(stats.accepted_per_step[0])  # the prompt, and the steps
    assert stats.mean_accepted_length > 1
    count = len(runs)
    answers(compiled, 1, {**config, "compile": "none"})
    assert compiled.last_speculation.accepted_per_step == stats.accepted_per_step  # the same drafts
    assert len(runs) == count


@pytest.mark.slow
def test_a_written_weight_needs_no_other_program() -> None:
    model = speculative_model()
    first = answers(model, 1, COMPILED)
    program = model._speculation.programs["kernels"].runner
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight.flip(0))
    assert answers(model, 1, COMPILED) == answers(model, 1, None) != first
    assert model._speculation.programs["kernels"].runner is program


@pytest.mark.slow
def test_a_moved_weight_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    model = speculative_model()
    first = answers(model, 1, COMPILED)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().flip(0))
    with caplog.at_level(logging.INFO):
        assert answers(model, 1, COMPILED) == answers(model, 1, None) != first
    assert any("the program is dropped" in record.message for record in caplog.records)


@pytest.mark.slow
@pytest.mark.usefixtures("quick", "no_kernels")
def test_a_written_weight_that_was_packed_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    model = speculative_model()
    first = answers(model, 1, BY_INDUCTOR)
    assert model._speculation.programs["inductor"].runner.copies_weights
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight.flip(0))
    with caplog.at_level(logging.INFO):
        assert answers(model, 1, BY_INDUCTOR) == answers(model, 1, None) != first
    assert any("the program is dropped" in record.message for record in caplog.records)


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("rows", [1, 3])
def test_inductor_compiles_the_traced_operations(rows: int) -> None:
    model = speculative_model()
    assert answers(model, rows, BY_INDUCTOR) == answers(model, rows, None)
    assert model._speculation.programs["inductor"].runner is not None


@pytest.mark.slow
def test_what_cannot_be_compiled_is_told_once_and_runs(caplog: pytest.LogCaptureFixture) -> None:
    model = speculative_model()
    handle = model.model.layers[0].register_forward_hook(lambda *_args: None)
    with caplog.at_level(logging.WARNING):
        assert answers(model, 1, COMPILED) == answers(model, 1, None)
        answers(model, 1, COMPILED)
    handle.remove()
    told = [record.message for record in caplog.records if "is not compiled" in record.message]
    assert told == ["LlamaForCausalLM is not compiled: it has forward hooks, which a compiled forward would not call. "
                    "Its own forward is used."]  # fmt: skip


@pytest.mark.parametrize("part", ["model.layers.0", "model.layers.1.mlp"])
def test_what_is_compiled_already_is_neither_compiled_nor_captured_again(part: str) -> None:
    """By `module.compile()` or by a compiled forward: it could compile in the middle of a capture."""
    model = speculative_model()
    facts = model._speculation.facts[0]
    assert not model_programs.unsupported_reason(model, facts, "kernels")
    module = model.get_submodule(part)
    module.compile()
    assert model_programs.unsupported_reason(model, facts, "kernels") == f"{part} is already compiled by torch.compile"
    module._compiled_call_impl = None
    assert not model_programs.unsupported_reason(model, facts, "kernels")
    module.forward = torch.compile(module.forward)
    assert model_programs.unsupported_reason(model, facts, "kernels") == f"{part} is already compiled by torch.compile"


class ReadsTheHost(nn.Module):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden if float(hidden.sum()) > -1e9 else -hidden


class CountsItsCalls(nn.Module):
    calls = 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return hidden * (1 if self.calls < 5 else 2)


@pytest.mark.parametrize(("module", "reason"), [
    (ReadsTheHost(), "it cannot be traced"), (CountsItsCalls(), "it differs from the model's own forward"),
])  # fmt: skip
def test_a_program_that_would_be_wrong_is_not_used(module: nn.Module, reason: str) -> None:
    model = copy.deepcopy(zoo.build("llama"))
    facts = compiling_facts(model)
    model.model.norm = nn.Sequential(model.model.norm, module)
    with pytest.raises(programs.CaptureError, match=reason):
        model_programs.make_runner(model, facts, frozenset(), "kernels")


def compiling_facts(model: Any) -> Any:
    return state.current_facts(SpeculativeGenerationMixin.attach(model))  # a copy of an attached model has none yet


def test_warmup_leaves_nothing_to_the_first_call(compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"method": "auto", "compile": "kernels"}
    compiled.warmup(config, batch_size=2, prompt_length=20)

    def fail(*_args: object, **_options: object) -> None:
        raise AssertionError

    monkeypatch.setattr(model_programs, "make_runner", fail)
    monkeypatch.setattr(state.StepCosts, "expected", fail)
    compiled.generate(torch.ones(2, 5, dtype=torch.long), max_new_tokens=4, do_sample=False, speculative=config)


def test_what_a_program_does_not_give_comes_from_the_model(
    compiled: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Hidden states that were asked for, and another arithmetic around the call."""
    ids, mask = prompts(1)
    options = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False}
    program = compiled._speculation.programs["kernels"]
    monkeypatch.setattr(CompiledForward, "__call__", None)
    asked = {"output_hidden_states": True, "return_dict_in_generate": True}
    with caplog.at_level(logging.INFO):
        found = compiled.generate(ids, speculative=COMPILED, **options, **asked)
    told = [record.message for record in caplog.records if "is not used" in record.message]
    assert told == ["The compiled or captured forward of LlamaForCausalLM is not used (outputs of every layer)."]
    assert torch.equal(found.sequences, compiled.generate(ids, **options))
    assert len(found.hidden_states) == 4
    with torch.autocast("cpu", torch.bfloat16):
        compiled.generate(ids, speculative=COMPILED, **options)
    assert compiled._speculation.programs["kernels"] is program


def test_the_page_is_true(compiled: Any) -> None:
    page = (Path(__file__).parents[1] / "docs" / "compile.md").read_text()
    ids, mask = prompts(1)
    scope = {"model": compiled, "inputs": {"input_ids": ids, "attention_mask": mask}}
    for example, method in (("compile", "hybrid"), ("kernels alone", "plain")):
        exec(page.split(f"<!-- {example} -->", 1)[1].split("```python\n", 1)[1].split("```", 1)[0], scope)
        assert compiled.last_speculation.method == method
    assert compiled.last_speculation.num_drafted_tokens == 0
    assert compiled.last_speculation.forwards == "kernels"


@pytest.fixture
def cheap_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program is made in the second call: whatever it takes is little beside a call."""
    library.load_library()
    monkeypatch.setattr(model_programs, "COMPILED_FROM_SECONDS", 0.0)
    monkeypatch.setattr(model_programs, "MAX_SHARE", 1e9)


@pytest.mark.slow
def test_auto_makes_a_program_once_it_takes_a_small_share_of_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares are estimated from measured steps; a first call has none."""
    library.load_library()
    monkeypatch.setattr(model_programs, "COMPILED_FROM_SECONDS", 0.0)
    model = speculative_model()
    state = model._speculation
    assert not model_programs.kernels_pay(model, 10**9)
    assert answers(model, 1, "auto") == answers(model, 1, None)
    assert not state.programs
    assert 0 < state.eager_step_seconds < state.eager_seconds
    step, forwards = state.eager_step_seconds / state.eager_forwards, state.eager_forwards
    making = model_programs.TRACED_LAYER_SECONDS * 4 + model_programs.TRIAL_STEPS * step
    monkeypatch.setattr(state, "eager_seconds", 0.9 * making / model_programs.MAX_SHARE - forwards * step)
    assert not model_programs.kernels_pay(model, 100)
    monkeypatch.setattr(state, "eager_calls", forwards * step / making)  # answers so long that this call saves it
    assert not model_programs.kernels_pay(model, int(0.3 * making / step))
    assert model_programs.kernels_pay(model, int(0.5 * making / step / model_programs.SAVED_SHARE) * 2 + 2)
    state.kernels_have_paid = False
    monkeypatch.setattr(state, "eager_calls", 1)
    monkeypatch.setattr(state, "eager_seconds", 2 * making / model_programs.MAX_SHARE)
    assert answers(model, 1, {"method": "auto", "compile": "none"}) == answers(model, 1, None)
    assert not state.programs
    known = state.eager_seconds
    assert answers(model, 1, "auto") == answers(model, 1, None)
    assert isinstance(state.programs["kernels"].runner, CompiledForward)
    assert state.eager_seconds == known


@pytest.mark.slow
@pytest.mark.usefixtures("cheap_programs")
@pytest.mark.parametrize("begin", ["two calls", "warmup"])
def test_short_calls_after_the_program_was_made_use_it(begin: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They alone would not pay for it."""
    model = speculative_model()
    ids, mask = prompts(1)
    options = {"attention_mask": mask, "do_sample": False, "speculative": "auto"}
    if begin == "warmup":
        model.warmup("auto")
    else:
        for _ in range(2):
            model.generate(ids, max_new_tokens=8, **options)
    monkeypatch.setattr(model_programs, "MAX_SHARE", 0.0)
    runner = model._speculation.programs["kernels"].runner
    calls = []
    monkeypatch.setattr(type(runner), "__call__", lambda *_, **__: calls.append(1) or pytest.fail("called"))
    with pytest.raises(pytest.fail.Exception):
        model.generate(ids, max_new_tokens=4, **options)
    assert calls


@pytest.mark.usefixtures("no_kernels")
def test_auto_without_kernels_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_programs, "COMPILED_FROM_SECONDS", 0.0)
    monkeypatch.setattr(model_programs, "MAX_SHARE", 1e9)
    model = speculative_model()
    for _ in range(2):
        assert answers(model, 1, "auto") == answers(model, 1, None)
    assert not model._speculation.programs


@pytest.mark.slow
def test_two_threads_share_one_program(compiled: Any) -> None:
    found: dict[int, Any] = {}
    wanted = [answers(compiled, rows, None) for rows in (1, 3)]

    def run(index: int) -> None:
        found[index] = [answers(compiled, (1, 3)[index % 2], COMPILED) for _ in range(3)]

    threads = [threading.Thread(target=run, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(found[index] == [wanted[index % 2]] * 3 for index in range(4))


@pytest.mark.slow
def test_a_program_goes_with_the_model_it_was_made_of() -> None:
    model = speculative_model()
    model.warmup(COMPILED)
    program = weakref.ref(model._speculation.programs["kernels"].runner)
    SpeculativeGenerationMixin.detach(model)
    gc.collect()
    assert program() is None


def test_tables_that_a_forward_writes_to_are_no_weights() -> None:
    """Rotary scaling by length rewrites its table in every forward; a program of it stays."""
    module = nn.Module()
    module.register_buffer("table", torch.ones(3), persistent=False)
    module.register_buffer("scale", torch.ones(3))
    before = runners.WeightsVersion.of(module)
    module.get_buffer("table").copy_(torch.zeros(3))
    assert runners.WeightsVersion.of(module) == before
    module.get_buffer("scale").copy_(torch.zeros(3))
    assert runners.WeightsVersion.of(module) != before
    scaled = runners.WeightsVersion.of(module)
    module.register_buffer("table", torch.ones(3), persistent=False)
    assert runners.WeightsVersion.of(module) != scaled


class ReadsTwice(Eagle3Head):
    """A head whose `read` is more than its forward: a program of the forward would draft something else."""

    def read(self, token_embeddings: Any, hidden: Any, position_ids: Any, cache: Any, mask: Any) -> Any:
        return super().read(token_embeddings, hidden, position_ids, cache, mask) * 2


@pytest.mark.slow
def test_a_head_that_reads_in_another_way_is_not_compiled(caplog: pytest.LogCaptureFixture) -> None:
    model = speculative_model()
    head = ReadsTwice(model.drafters["eagle"].head.config).eval()
    head.load_state_dict(model.drafters["eagle"].head.state_dict())
    with pytest.raises(programs.CaptureError, match="ReadsTwice overrides `read`"):
        traced_stages(head, None, "kernels")
    drafter = model.add_drafter(drafters.EagleDrafter(head), "eagle")
    with caplog.at_level(logging.WARNING):
        assert answers(model, 1, COMPILED) == answers(model, 1, None)
    assert any("EagleDrafter(ReadsTwice of this process) is not compiled" in row.message for row in caplog.records)
    assert drafter.program is None


@pytest.mark.slow
def test_a_program_of_inductor_reads_the_weights_where_they_are() -> None:
    layer, inputs = nn.Linear(5, 3, bias=False), torch.randn(2, 5)
    with torch.no_grad():
        run = programs.make_program(lambda given: [layer(given).relu()], inputs, mode="inductor")
        for _ in range(2):
            torch.testing.assert_close(run(inputs)[0], layer(inputs).relu())
            layer.weight.neg_()


@pytest.mark.parametrize(
    ("on_gpu", "groups", "bound", "gathered"),
    [
        (False, True, 99, set()),
        (True, False, 0, {1, 5}),  # grouped products would wait for the device
        (True, True, 2, {1}),  # each token has 2 experts
        (True, True, 9, {1}),
        (True, True, 10, {1, 5}),
    ],
)
def test_experts_of_wide_trees_are_not_gathered(
    on_gpu: bool, groups: bool, bound: int, gathered: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = SpeculativeGenerationMixin.attach(copy.deepcopy(zoo.build("qwen3_moe")))
    ids, mask = prompts(1)
    inputs = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    plain = model.generate(ids, **inputs)
    used: dict[int, str] = {}
    experts, products = model.model.layers[-1].mlp.experts, target.expert_products

    @contextmanager
    def products_on_gpu(model: Any, num_tokens: int) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(target, "execution_device", lambda _model: torch.device("cuda"))
            with products(model, num_tokens):
                yield

    for nodes in (5, 1):
        settings = {"method": "token_recycling", "num_draft_tokens": nodes, "compile": "none"}
        with monkeypatch.context() as patch:
            if on_gpu:
                patch.setattr(target, "expert_products", products_on_gpu)
            patch.setattr(target, "groups_on_device", lambda _weight: groups)
            patch.setattr(target, "MAX_GATHERED_EXPERTS", bound)
            patch.setattr(experts, "forward", lambda hidden, *args: (
                used.update({len(hidden): model.config._experts_implementation}),
                type(experts).forward(experts, hidden, *args),
            )[1], raising=False)  # fmt: skip
            assert model.generate(ids, **inputs, speculative=settings).tolist() == plain.tolist()
    assert {nodes for nodes in (1, 5) if used[nodes] == "batched_mm"} == gathered
    assert used[ids.shape[1]] == model.config._experts_implementation == "grouped_mm"
