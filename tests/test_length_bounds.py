"""Drafts near lengths at which a model's forward changes or ends; caches and positions that the model itself changes.

`tests/fuzz_lengths.py` tries every such mechanism of transformers with random lengths and options.
"""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import DynamicCache, LlamaConfig, Phi3Config
from transformers.models.phi3.modeling_phi3 import Phi3ForCausalLM

import zoo
from hf_specdec import Budget, Draft, Drafter, DraftSession, SpeculativeGenerationMixin
from hf_specdec.errors import UnsupportedGenerationError, UnsupportedModelError
from hf_specdec.trees.draft import PLAIN_STEP
from hf_specdec.trees.tree import TokenTree
from hf_specdec.verification import probe
from hf_specdec.verification.masks import UNBOUNDED, LengthBounds
from hf_specdec.verification.model import CACHE_FIELD

KEPT_FILE = probe._kept_file  # before `conftest.py` replaces it
LIMIT = 64
READS_AGAIN = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.23"), reason="plain generate() of Phi-3 loses its cache there"
)
LONGROPE = {
    "rope_type": "longrope", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": LIMIT,
    "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
}  # fmt: skip
SIZES: dict[str, Any] = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip


def with_varied_tokens(model: Any) -> Any:
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.15)
    return model.eval()


@pytest.fixture
def phi3() -> Any:
    rope = {**LONGROPE, "partial_rotary_factor": 1.0}
    limits = {"max_position_embeddings": 256, "original_max_position_embeddings": LIMIT, "rope_parameters": rope}
    return with_varied_tokens(Phi3ForCausalLM(Phi3Config(**SIZES, **limits, sliding_window=None)))


def prompt(length: int, rows: int = 1) -> torch.Tensor:
    return torch.randint(3, 99, (rows, length), generator=torch.Generator().manual_seed(length))


# ------------------------------------------------------------------------------------------------- bounds


def test_bounds_are_read_from_the_configuration() -> None:
    assert LengthBounds.of(LlamaConfig(max_position_embeddings=64)) == LengthBounds((64,), frozenset())
    longrope = LlamaConfig(max_position_embeddings=256, rope_parameters=LONGROPE)
    assert LengthBounds.of(longrope) == LengthBounds((64, 256), frozenset({64}), None)
    dynamic = LlamaConfig(max_position_embeddings=64, rope_parameters={"rope_type": "dynamic", "factor": 2.0})
    assert LengthBounds.of(dynamic) == LengthBounds((64,), frozenset({64}), 64)


def test_reach() -> None:
    assert LengthBounds((64, 128), frozenset()).reach([60, 64]) == 3
    assert LengthBounds((64, 128), frozenset()).reach([63]) == 0
    assert LengthBounds((64,), frozenset()).reach([64, 300]) == UNBOUNDED
    assert LengthBounds((64,), frozenset({64})).reach([64]) == 0
    assert LengthBounds((64,), frozenset({64}), 64).reach([90]) == 0


def test_budgets_near_a_bound() -> None:
    budget = Budget(16, 5, 4)
    assert budget.no_deeper(2) == Budget(16, 2, 4)
    assert budget.no_deeper(9, 3) == Budget(3, 5, 4)
    assert budget.no_deeper(0) == budget.no_deeper(2, 1) == PLAIN_STEP


def test_no_forward_is_deeper_than_the_tokens_left(llama: Any) -> None:
    stats = llama.generate(
        prompt(3).repeat(1, 8), max_new_tokens=5, do_sample=False, return_dict_in_generate=True,
        speculative={"method": "token_recycling", "trace": True},
    ).speculation  # fmt: skip
    left = 4
    for step, accepted in zip(stats.trace, stats.accepted_per_step[0], strict=True):
        depths = [0]
        for parent in step.rows[0].parents[1:]:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        assert max(depths) <= left - 1
        left -= accepted
    assert left == 0


# ------------------------------------------------------------------------------------------------- caches


@pytest.mark.parametrize("method", ["prompt_lookup", "auto"])
@pytest.mark.parametrize(
    "length", [40, pytest.param(60, marks=READS_AGAIN), pytest.param(64, marks=READS_AGAIN), 65, 100]
)
def test_phi3_reads_its_text_again(phi3: Any, length: int, method: str) -> None:
    ids = prompt(length, rows=2)
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    options["attention_mask"][1, :5] = 0
    plain = copy.deepcopy(phi3).generate(ids, **options)
    model = SpeculativeGenerationMixin.attach(phi3)
    output = model.generate(ids, **options, speculative=method, return_dict_in_generate=True)
    assert torch.equal(output.sequences, plain)
    assert output[CACHE_FIELD].get_seq_length() == length + 19


@READS_AGAIN
def test_a_cache_handed_in_is_left_as_plain_leaves_it(phi3: Any) -> None:
    ids = prompt(70)
    answers = []
    for speculative in (None, "prompt_lookup"):
        model = SpeculativeGenerationMixin.attach(copy.deepcopy(phi3))
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(ids[:, :60], use_cache=True, **{CACHE_FIELD: cache})
        text = model.generate(ids, max_new_tokens=9, do_sample=False, speculative=speculative, **{CACHE_FIELD: cache})
        answers.append((text.tolist(), cache.get_seq_length()))
    assert answers[0] == answers[1]


class _LosesCache(Phi3ForCausalLM):
    """As Phi-4-multimodal, and Phi-3 before transformers 5.23: drops the cache, but reads one token only."""

    def prepare_inputs_for_generation(self, input_ids: Any, **kwargs: Any) -> Any:
        cache = kwargs.get(CACHE_FIELD)
        if cache and input_ids.shape[1] > LIMIT and cache.get_seq_length() <= LIMIT:
            del kwargs[CACHE_FIELD]
        return super(Phi3ForCausalLM, self).prepare_inputs_for_generation(input_ids, **kwargs)


def test_a_text_that_plain_decoding_loses_is_refused_before_any_work(phi3: Any) -> None:
    phi3.__class__ = _LosesCache
    model = SpeculativeGenerationMixin.attach(phi3)
    forwards: list[int] = []
    model.model.embed_tokens.register_forward_pre_hook(lambda _, inputs: forwards.append(inputs[0].shape[1]))
    with pytest.raises(UnsupportedGenerationError, match="drops its cache once the text exceeds 64 tokens"):
        model.generate(prompt(60), max_new_tokens=20, speculative="prompt_lookup")
    assert max(forwards, default=0) < 60  # the hook made the model be probed again
    ids = model.generate(prompt(60), max_new_tokens=4, speculative="prompt_lookup", do_sample=False)
    assert ids.shape == (1, 64)


class _IgnoresCache(type(zoo.build("llama"))):  # type: ignore[misc]
    """Ignores the cache beyond 20 tokens."""

    @functools.wraps(type(zoo.build("llama")).forward)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get(CACHE_FIELD)
        if cache is not None and cache.get_seq_length() + kwargs["input_ids"].shape[1] > 20:
            kwargs[CACHE_FIELD] = copy.deepcopy(cache)
        return super().forward(*args, **kwargs)


def test_a_cache_that_is_not_written_is_never_counted() -> None:
    model = copy.deepcopy(zoo.build("llama"))
    model.__class__ = _IgnoresCache
    SpeculativeGenerationMixin.attach(model)
    with pytest.raises(UnsupportedModelError, match="drops or ignores the cache for a text of this length"):
        model.generate(prompt(16).clamp(max=90), max_new_tokens=20, speculative="prompt_lookup")


# ------------------------------------------------------------------------------------------------- positions


class _CountsFromOne(type(zoo.build("llama"))):  # type: ignore[misc]
    """Adds 1 to positions, as PaliGemma does."""

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        inputs = super().prepare_inputs_for_generation(*args, **kwargs)
        inputs["position_ids"] = inputs["position_ids"] + 1
        return inputs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_positions_that_the_model_shifts(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model = copy.deepcopy(zoo.build("llama")).to(dtype)
    model.__class__ = _CountsFromOne
    SpeculativeGenerationMixin.attach(model)
    ids = prompt(6).repeat(2, 3)
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True}
    plain, output = (model.generate(ids, **options, speculative=how) for how in (None, "prompt_lookup"))
    for ours, theirs in zip(output[CACHE_FIELD].layers[:1], plain[CACHE_FIELD].layers, strict=False):
        torch.testing.assert_close(ours.keys[:, :, :18], theirs.keys[:, :, :18])
        if torch.equal(plain.sequences, output.sequences):
            torch.testing.assert_close(ours.keys, theirs.keys, rtol=0.02, atol=0.02)
    if dtype == torch.float32:
        assert torch.equal(plain.sequences, output.sequences)
    # the probe sees drafts that stand one position too early, in the keys if not in the logits
    monkeypatch.setattr(probe.Target, "supports_trees", False, raising=False)
    monkeypatch.setattr(probe.TreeTarget, "supports_trees", False)
    assert not probe.inspect_target(model).supports_trees


class _DeepDrafter(Drafter):
    """Drafts a chain of four tokens whatever the budget is."""

    method = "deep"

    def limits(self, config: Any) -> Budget:
        return Budget(5, 4, 1)

    def start(self, target: Any, context: Any, config: Any) -> Any:
        return _DeepSession(context.roots)


class _DeepSession(DraftSession):
    def __init__(self, roots: torch.Tensor) -> None:
        self.roots = roots

    def propose(self, budget: Budget) -> Draft:
        tokens = torch.cat([self.roots[:, None], torch.full((len(self.roots), 4), 5)], dim=1)
        tree = TokenTree(tokens, torch.arange(-1, 4))
        return Draft(tree)

    def observe(self, step: Any) -> None:
        self.roots = step.acceptance.next_token


@pytest.mark.parametrize("method", ["prompt_lookup", "auto", "deep"])
@pytest.mark.parametrize("rows", [1, 2])
def test_drafts_end_with_the_table_of_positions(rows: int, method: str) -> None:
    model = copy.deepcopy(zoo.build("gpt2"))
    table = model.config.n_positions
    ids = prompt(4, rows).repeat(1, table // 4)[:, : table - 8]
    options: dict[str, Any] = {"max_new_tokens": 9, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    plain = model.generate(ids, **options)
    SpeculativeGenerationMixin.attach(model).add_drafter(_DeepDrafter())
    assert torch.equal(plain, model.generate(ids, **options, speculative=method))


# ------------------------------------------------------------------------------------------------- kept verdicts


@pytest.mark.parametrize("name", ["llama", "falcon", "qwen3_next"])
def test_a_verdict_is_kept_for_models_alike(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_kept_file", KEPT_FILE)
    monkeypatch.setattr(probe.constants, "HF_HOME", str(tmp_path))
    model = copy.deepcopy(zoo.build(name))
    forwards: list[int] = []
    first = probe.inspect_target(model)
    (file,) = (tmp_path / "hf-specdec" / "verdicts").iterdir()
    other = copy.deepcopy(model)
    monkeypatch.setattr(probe, "run_plainly", lambda *_: forwards.append(1))
    second = probe.inspect_target(other)
    assert not forwards
    assert (second.cache_layout, second.chain_only_reason, second.unpacked_reason) == (
        first.cache_layout, first.chain_only_reason, first.unpacked_reason,
    )  # fmt: skip
    monkeypatch.undo()
    monkeypatch.setattr(probe, "_kept_file", KEPT_FILE)
    monkeypatch.setattr(probe.constants, "HF_HOME", str(tmp_path))
    file.write_text(file.read_text()[:20])
    assert probe.inspect_target(other).cache_layout == first.cache_layout
    assert json.loads(file.read_text())["chain_only_reason"] == first.chain_only_reason


def test_no_verdict_is_kept_if_more_than_the_configuration_decides() -> None:
    model = copy.deepcopy(zoo.build("llama"))
    assert KEPT_FILE(model, probe.Fingerprint.of(model)) != KEPT_FILE(
        model.to(torch.float16), probe.Fingerprint.of(model)
    )
    hook = model.model.register_forward_hook(lambda *_: None)
    assert KEPT_FILE(model, probe.Fingerprint.of(model)) is None
    hook.remove()
    model.forward = model.forward
    assert KEPT_FILE(model, probe.Fingerprint.of(model)) is None
    del model.forward
    model.lm_head = torch.nn.Sequential(model.lm_head, _Own())
    assert KEPT_FILE(model, probe.Fingerprint.of(model)) is None


class _Own(torch.nn.Module):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs


# ------------------------------------------------------------------------------------------------- outputs


@pytest.mark.parametrize("rows", [1, 4])
def test_hidden_states_with_a_leading_dimension(rows: int) -> None:
    model = SpeculativeGenerationMixin.attach(copy.deepcopy(zoo.build("gemma3n_text")))
    ids = prompt(5, rows).repeat(1, 3) % zoo.VOCAB_SIZE
    options: dict[str, Any] = {
        "max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, "output_hidden_states": True,
        "attention_mask": torch.ones_like(ids),
    }  # fmt: skip
    plain, output = (model.generate(ids, **options, speculative=how).hidden_states for how in (None, "prompt_lookup"))
    for ours, theirs in zip(output, plain, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert one.shape == other.shape
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
