"""What people do to a model between two calls: what was found out about it is found out again, or it is refused."""

from __future__ import annotations

import copy
import itertools
import logging
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig, LogitsProcessor, LogitsProcessorList

import zoo
from drafters import random_head
from hf_specdec import (
    CacheCapacityError,
    DrafterMismatchError,
    SpeculativeConfig,
    SpeculativeGenerationMixin,
    UnsupportedGenerationError,
    UnsupportedModelError,
)
from hf_specdec.drafters.eagle import EagleDrafter
from hf_specdec.generation import call
from hf_specdec.verification.features import FeatureTap
from hf_specdec.verification.fingerprint import Fingerprint
from hf_specdec.verification.model import CACHE_FIELD
from hf_specdec.verification.probe import inspect_target
from hf_specdec.verification.trials import IN_TRIAL

IDS = torch.randint(3, zoo.VOCAB_SIZE, (1, 20), generator=torch.Generator().manual_seed(5))
GREEDY: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False, "attention_mask": torch.ones_like(IDS)}


class ScaledByTheLoudest(nn.Module):
    """A layer whose input is scaled by the largest value of the whole batch, as per-tensor quantisation does."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.inner(hidden / hidden.abs().max())


def scale_by_hook(_module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return (inputs[0] / inputs[0].abs().max(),)


def wrap_a_layer(model: Any) -> None:
    model.model.layers[1].mlp.down_proj = ScaledByTheLoudest(model.model.layers[1].mlp.down_proj)


def hook_a_layer(model: Any) -> None:
    model.model.layers[1].mlp.down_proj.register_forward_pre_hook(scale_by_hook)


def replace_a_forward(model: Any) -> None:
    layer = model.model.layers[1].mlp.down_proj
    plain = layer.forward
    layer.forward = lambda hidden: plain(hidden / hidden.abs().max())


def quantise(model: Any) -> Any:
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.parametrize("change", [quantise, wrap_a_layer, hook_a_layer, replace_a_forward])
def test_a_forward_that_mixes_tokens_is_refused_also_after_attaching(model: Any, change: Callable[[Any], Any]) -> None:
    assert torch.equal(model.generate(IDS, **GREEDY), model.generate(IDS, speculative="prompt_lookup", **GREEDY))
    changed = change(model) or model
    with pytest.raises(UnsupportedModelError, match="differ from plain"):
        changed.generate(IDS, speculative="prompt_lookup", **GREEDY)
    assert changed.generate(IDS, **GREEDY).shape == (1, 36)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.double(),
        lambda model: model.train(),
        lambda model: model.model.layers[2].mlp.train(),
        lambda model: setattr(model.model.layers[0], "mlp", copy.deepcopy(model.model.layers[0].mlp)),
        lambda model: model.lm_head.register_forward_hook(lambda *_: None),
        lambda model: model.set_attn_implementation("eager"),
        lambda model: setattr(model.config, "layer_types", ["full_attention"] * 4),
        lambda model: setattr(model.lm_head, "forward", model.lm_head.forward),
        lambda model: torch.nn.utils.parametrizations.weight_norm(model.lm_head),
    ],
)
def test_a_change_is_probed_once_and_said(
    model: Any, change: Callable[[Any], Any], probes: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    model.generate(IDS, speculative="prompt_lookup", **GREEDY)
    assert not probes, "the probe of attach() is good for the first call"
    change(model)
    with caplog.at_level(logging.INFO, "hf_specdec"):
        for _ in range(2):
            plain = model.generate(IDS, **GREEDY)
            assert torch.equal(plain, model.generate(IDS, speculative="prompt_lookup", **GREEDY))
    assert len(probes) == 1
    assert [record.name for record in caplog.records] == ["hf_specdec.generation.state"]
    assert "probing again" in caplog.text


def test_what_changes_nothing_is_not_probed(model: Any, probes: list[Any]) -> None:
    """New weights, hidden states as outputs (transformers leaves hooks for them), and a generation under way."""
    with torch.no_grad():
        model.lm_head.weight.add_(0.01)
    options = {"return_dict_in_generate": True, "output_hidden_states": True}
    model.generate(IDS, speculative="prompt_lookup", **GREEDY, **options)
    with FeatureTap(model):
        model.generate(IDS, speculative="prompt_lookup", **GREEDY)
    assert not probes


def test_a_copy_is_probed_as_a_model_of_its_own(model: Any, probes: list[Any]) -> None:
    twin = copy.deepcopy(model)
    wrap_a_layer(twin)
    with pytest.raises(UnsupportedModelError):
        twin.generate(IDS, speculative="prompt_lookup", **GREEDY)
    assert probes == [twin]
    assert model.generate(IDS, speculative="prompt_lookup", **GREEDY).shape == (1, 36)


def test_a_new_module_in_an_old_ones_place_in_memory_is_noticed(model: Any) -> None:
    """`id()` may be given again; 200 tries make it likely that it is."""
    numbers = set()
    for _ in range(200):
        before, number = Fingerprint.of(model), id(model.lm_head)
        model.lm_head = None
        model.lm_head = nn.Linear(32, zoo.VOCAB_SIZE, bias=False).eval()
        numbers.add(id(model.lm_head) == number)
        assert Fingerprint.of(model).differences(before) == ["modules"]
    assert True in numbers, "no id was given twice: the test shows nothing"


def test_probing_costs_few_forwards_and_no_random_numbers(model: Any) -> None:
    calls = []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    generator = torch.get_rng_state()
    for dtype in (torch.float32, torch.bfloat16):
        model.to(dtype)
        calls.clear()
        inspect_target(model)
        # plain generate(): the prompt and two steps; the prompt again; the tree. Without instructions for bfloat16
        # torch rounds one row otherwise than several: six more forwards show how much
        assert len(calls) in ((5,) if dtype == torch.float32 else (5, 11))
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5
    model.float().train()
    inspect_target(model)
    assert torch.equal(generator, torch.get_rng_state())
    assert model.training
    assert model.model.layers[0].training


def test_gradient_checkpointing_in_train_mode_is_refused_before_any_work(model: Any, probes: list[Any]) -> None:
    model.train()
    plain = model.generate(IDS, **GREEDY)
    assert torch.equal(plain, model.generate(IDS, speculative="prompt_lookup", **GREEDY))
    model.gradient_checkpointing_enable()
    probes.clear()
    with pytest.raises(UnsupportedGenerationError, match=r"Gradient checkpointing.*model.eval\(\)"):
        model.generate(IDS, speculative="prompt_lookup", **GREEDY)
    assert not probes
    model.eval()
    assert torch.equal(plain, model.generate(IDS, speculative="prompt_lookup", **GREEDY))
    SpeculativeGenerationMixin.detach(model.train())
    SpeculativeGenerationMixin.attach(model)
    with pytest.raises(UnsupportedGenerationError, match="Gradient checkpointing"):
        model.generate(IDS, speculative="prompt_lookup", **GREEDY)


def test_a_resized_vocabulary_is_a_mismatch_not_a_crash(model: Any) -> None:
    model.add_drafter(EagleDrafter(random_head(model)))
    assert torch.equal(model.generate(IDS, **GREEDY), model.generate(IDS, speculative="eagle", **GREEDY))
    model.resize_token_embeddings(zoo.VOCAB_SIZE + 8)
    with pytest.raises(DrafterMismatchError, match="vocab_size 96"):
        model.generate(IDS, speculative="eagle", **GREEDY)


def test_a_head_follows_its_model_to_another_dtype(model: Any) -> None:
    head = random_head(model)
    model.add_drafter(EagleDrafter(head))
    model.double()
    model.generate(IDS, speculative="eagle", **GREEDY)
    assert head.dtype == torch.float64


# ------------------------------------------------------------------------------------------------- long answers


@pytest.mark.parametrize("method", ["prompt_lookup", "eagle"])
def test_an_answer_that_could_be_long_costs_what_it_becomes(model: Any, method: str) -> None:
    model.add_drafter(EagleDrafter(random_head(model)))
    plain = model.generate(IDS, **GREEDY)
    end = {**GREEDY, "eos_token_id": int(plain[0, 26]), "max_new_tokens": 10_000_000}
    assert torch.equal(model.generate(IDS, **end), model.generate(IDS, speculative=method, **end))


@pytest.mark.slow
def test_a_text_outgrows_its_cache_unseen(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of their own pace, with padding, through several moves of target's and drafter's caches."""
    monkeypatch.setattr(call, "ANSWER_SLOTS", 10)
    monkeypatch.setattr("hf_specdec.verification.memory.CAPACITY_TIER", 4)
    monkeypatch.setattr("hf_specdec.drafters.feature_session.RESERVED_SLOTS", 3)
    monkeypatch.setattr("hf_specdec.acceptance.transcript.RESERVED_TOKENS", 5)
    model.add_drafter(EagleDrafter(random_head(model)))
    mask = torch.ones(3, 20, dtype=torch.long)
    ids = torch.cat([IDS, IDS.flip(-1), IDS + 1]).clone()
    mask[1, :6] = ids[1, :6] = 0
    options = {"attention_mask": mask, "max_new_tokens": 120, "do_sample": False, "return_dict_in_generate": True}
    plain = model.generate(ids, **options)
    for method in ("prompt_lookup", "eagle"):
        ours = model.generate(ids, speculative=method, **options)
        assert torch.equal(plain.sequences, ours.sequences)
        for wanted, got in zip(plain[CACHE_FIELD].layers, ours[CACHE_FIELD].layers, strict=True):
            torch.testing.assert_close(got.keys[0], wanted.keys[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3_text", "bamba", "nemotron_h", "lfm2"])
def test_half_precision_verifies_what_float32_does(name: str, dtype: torch.dtype) -> None:
    """Some of these keep one position's logits unless told otherwise, some round a lot."""
    exact = inspect_target(zoo.build(name))
    half = inspect_target(copy.deepcopy(zoo.build(name)).to(dtype))
    assert half.supports_trees == exact.supports_trees
    assert half.chain_only_reason == exact.chain_only_reason


def test_too_large_a_cache_is_said_with_slots_and_bytes(model: Any) -> None:
    with pytest.raises(CacheCapacityError, match=r"40000000000000 slots for 1 rows.*GB"):
        model.generate(IDS, speculative={"method": "prompt_lookup", "max_cache_length": 40_000_000_000_000}, **GREEDY)


# ------------------------------------------------------------------------------------------------- stored defaults


def test_false_is_none(model: Any) -> None:
    plain = model.generate(IDS, **GREEDY)
    model.generation_config.speculative = "prompt_lookup"
    assert torch.equal(plain, model.generate(IDS, speculative=False, **GREEDY))
    assert model.last_speculation is None
    model.generate(IDS, **GREEDY)
    assert model.last_speculation is not None


@pytest.mark.parametrize(
    "stored", ["prompt_lookup", {"method": "prompt_lookup"}, SpeculativeConfig("prompt_lookup", tree=None)]
)
def test_a_stored_default_survives_saving(model: Any, tmp_path: Path, stored: Any) -> None:
    model.generation_config = GenerationConfig.from_model_config(model.config)
    model.generation_config.speculative = stored
    model.save_pretrained(tmp_path)
    assert model.generation_config.speculative is stored
    assert model.generation_config._from_model_config
    again: Any = SpeculativeGenerationMixin.attach(AutoModelForCausalLM.from_pretrained(tmp_path))
    again.generate(IDS, **GREEDY)
    assert again.last_speculation.method == "prompt_lookup"
    del model.generation_config.speculative
    model.save_pretrained(tmp_path)
    assert "speculative" not in (tmp_path / "generation_config.json").read_text()


# ------------------------------------------------------------------------------------------------- interrupts, threads


class Interrupts:
    """Raises KeyboardInterrupt at the n-th line that this package runs, as Ctrl-C may."""

    def __init__(self, line: int) -> None:
        self.left, self.raised = line, False

    def __enter__(self) -> Interrupts:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: Any, event: str, argument: Any) -> Any:
        if "hf_specdec" not in frame.f_code.co_filename:
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                self.raised = True
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._trace


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_an_interrupted_attach_is_whole_or_not_at_all(dropout: float) -> None:
    """At many lines: the class, the state and the modes are all old, or all new."""
    model: Any = zoo.shallow("llama", 2).train()
    model.model.layers[1].eval()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = dropout
    plain, keys = type(model), set(model.__dict__)
    modes = [module.training for module in model.modules()]
    for line in itertools.count(1, 7):
        try:
            with Interrupts(line) as interrupts:
                SpeculativeGenerationMixin.attach(model)
        except KeyboardInterrupt:
            pass
        assert [module.training for module in model.modules()] == modes, line
        assert not IN_TRIAL.get(), line  # otherwise later calls in this thread would be plain
        if type(model) is plain:
            assert set(model.__dict__) == keys, line
        else:
            assert model._speculation.facts, line
            SpeculativeGenerationMixin.detach(model)
        if not interrupts.raised:
            break
    assert line > 300


def test_detaching_waits_for_nobody_and_breaks_nothing(model: Any) -> None:
    """Refused while another thread generates; before and after, whoever generates has whole answers."""
    plain = model.generate(IDS, **GREEDY)
    begun, go_on = threading.Event(), threading.Event()
    answers: list[torch.Tensor] = []

    class Waits(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            begun.set()
            go_on.wait(20)
            return scores

    def work() -> None:
        options = {"speculative": "prompt_lookup", "logits_processor": LogitsProcessorList([Waits()])}
        answers.append(model.generate(IDS, **options, **GREEDY))

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait(20)
    with pytest.raises(UnsupportedModelError, match="Another thread is generating"):
        SpeculativeGenerationMixin.detach(model)
    go_on.set()
    thread.join()
    assert torch.equal(answers[0], plain)
    SpeculativeGenerationMixin.detach(model)
    assert torch.equal(model.generate(IDS, **GREEDY), plain)


@pytest.mark.slow
def test_attaching_while_others_generate_plainly() -> None:
    """Threads that generate without speculation all the time, a model that is attached and detached all the time."""
    model: Any = copy.deepcopy(zoo.build("llama"))
    plain, stop = model.generate(IDS, **GREEDY), threading.Event()
    failures: list[BaseException] = []

    def work() -> None:
        while not stop.is_set():
            try:
                assert torch.equal(model.generate(IDS, **GREEDY), plain)
            except BaseException as error:
                failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(2):
        SpeculativeGenerationMixin.attach(model)
        assert torch.equal(model.generate(IDS, speculative="prompt_lookup", **GREEDY), plain)
        for _ in range(1000):
            try:
                SpeculativeGenerationMixin.detach(model)
                break
            except UnsupportedModelError:
                time.sleep(0.002)
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize("field", ["sliding_window", "attention_chunk_size", "layer_types"])
def test_every_field_that_masks_follow_is_noticed(field: str) -> None:
    """A window or chunk that is set to another size makes other masks."""
    model = zoo.build("llama4_text")
    before, value = Fingerprint.of(model), getattr(model.config, field, None)
    changed = list(value)[::-1] if isinstance(value, list) else (value or 8) * 2
    try:
        setattr(model.config, field, changed)
        assert Fingerprint.of(model).differences(before) == ["config"]
    finally:
        setattr(model.config, field, value)
    assert Fingerprint.of(model) == before


def test_a_chunk_of_another_size_is_verified_by_its_own_masks() -> None:
    """The model reads `attention_chunk_size` at every call; ours must not be from before the change."""
    model = SpeculativeGenerationMixin.attach(copy.deepcopy(zoo.build("llama4_text")))
    for size in (8, 5, 16):
        model.config.attention_chunk_size = size
        plain = model.generate(IDS, **GREEDY)
        assert torch.equal(plain, model.generate(IDS, speculative="prompt_lookup", **GREEDY)), size


def test_another_adapter_is_another_model(model: Any) -> None:
    """From one active adapter to another, as from one merged one to another: both are true, and not the same."""
    layer = model.get_submodule("model.layers.0.mlp")
    for name, values in (("_active_adapter", (["first"], ["second"])), ("merged_adapters", (["first"], ["second"]))):
        found = []
        for value in values:
            setattr(layer, name, value)
            found.append(Fingerprint.of(model))
            delattr(layer, name)
        assert found[0].differences(found[1]) == ["modes"]


def test_hooks_of_other_calls_come_and_go_meanwhile() -> None:
    """As in a server: one thread begins a call while a drafter's taps in others are added and removed."""
    model, is_over = copy.deepcopy(zoo.build("llama")), threading.Event()

    def tapped() -> None:
        while not is_over.is_set():
            handles = [layer.register_forward_hook(print) for layer in model.model.layers for _ in range(3)]
            for handle in handles:
                handle.remove()

    other, interval = threading.Thread(target=tapped), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    other.start()
    try:
        for _ in range(500):
            Fingerprint.of(model)
    finally:
        sys.setswitchinterval(interval)
        is_over.set()
        other.join()
