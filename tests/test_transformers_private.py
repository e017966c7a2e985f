"""The private names of transformers that this package uses exist and mean what we think."""

from __future__ import annotations

import copy
import inspect
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from transformers import (
    CONFIG_MAPPING,
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    PrefixConstrainedLogitsProcessor,
    PreTrainedModel,
    Trainer,
    cache_utils,
)

import drafters
import zoo
from hf_specdec import SpeculativeGenerationMixin
from hf_specdec import transformers_private as private
from hf_specdec.generation.call import GGUF_ROWS
from hf_specdec.verification.recurrent_layer import RECURRENT_LAYERS, REPLACEMENTS
from models import prompts

SOURCE = Path(private.__file__).parent


@pytest.mark.parametrize("name", private.EXTENDED_METHODS)
def test_the_extended_methods_of_generate_exist(name: str) -> None:
    assert callable(getattr(GenerationMixin, name))


@pytest.mark.parametrize("name", private.TRAINER_METHODS)
def test_the_methods_of_the_trainer_exist(name: str) -> None:
    assert callable(getattr(Trainer, name))


def test_the_signatures_of_the_extended_methods() -> None:
    """The hooks are called with these arguments, by position or by name."""
    expected = {
        "_prepare_generation_config": ["self", "generation_config", "kwargs"],
        "_validate_generation_mode": ["self", "generation_mode", "generation_config", "generation_mode_kwargs"],
        "_validate_generated_length": ["self", "generation_config", "input_ids_length", "has_default_max_length"],
        "_prepare_cache_for_generation": ["self", "generation_config", "model_kwargs", "generation_mode", "batch_size",
                                          "max_cache_length"],
        "_sample": ["self", "input_ids", "logits_processor", "stopping_criteria", "generation_config", "synced_gpus",
                    "streamer", "model_kwargs"],
    }  # fmt: skip
    for name, parameters in expected.items():
        assert list(inspect.signature(getattr(GenerationMixin, name)).parameters) == parameters, name


def test_the_functions_of_recurrent_layers() -> None:
    """Trees replace them by these names, and are called with the first arguments by position, or all by name."""
    expected = {
        ("lfm2", "causal_conv1d_fn"): ["hidden_states", "weight", "bias", "activation"],
        ("qwen3_next", "torch_chunk_gated_delta_rule"): [
            "query",
            "key",
            "value",
            "g",
            "beta",
            "chunk_size",
            "initial_state",
            "output_final_state",
            "use_qk_l2norm_in_kernel",
        ],
        ("kimi_linear", "chunk_kimi_delta_attention"): ["query", "key", "value", "g", "beta"],
        ("mamba2", "mamba2_chunk_scan"): ["hidden_states", "dt", "A", "B", "C", "chunk_size", "D", "dt_bias"],
        ("mamba", "mamba_selective_scan"): ["hidden_states", "dt", "A", "B", "C", "D", "z", "delta_bias"],
    }
    assert {function for _, function in expected} == set(REPLACEMENTS)
    for (name, function), parameters in expected.items():
        if name not in CONFIG_MAPPING:  # in older transformers
            continue
        module = sys.modules[type(zoo.build(name)).__module__]
        found = list(inspect.signature(getattr(module, function)).parameters)
        assert found[: len(parameters)] == parameters, (function, found)
    assert {type(layer).__name__ for layer in DynamicCache(config=zoo.build("falcon_h1").config).layers} == {
        "LinearAttentionAndFullAttentionLayer"
    }
    assert RECURRENT_LAYERS.keys() <= vars(cache_utils).keys()


def test_generation() -> None:
    model = zoo.build("llama")
    assert private.has_unfinished(model, False, False, torch.device("cpu"))
    assert not private.has_unfinished(model, True, False, torch.device("cpu"))
    config = GenerationConfig(pad_token_id=7)
    model._prepare_special_tokens(config, device=torch.device("cpu"))
    assert private.pad_token_id(config) == 7
    for derived in (True, False):
        private.set_derived(config, derived)
        assert private.is_derived(config) == derived
    inputs = model.prepare_inputs_for_generation(torch.ones(1, 3, dtype=torch.long), use_cache=True)
    outputs = model(torch.ones(1, 3, dtype=torch.long), use_cache=True)
    ids = torch.ones(1, 3, dtype=torch.long)
    prefilled = private.prefill(model, ids, GenerationConfig(), {"use_cache": True})
    assert torch.equal(prefilled.logits[:, -1], outputs.logits[:, -1])
    compiling = transformers.CompileConfig()
    private.compile_on_all_devices(compiling)
    assert compiling._compile_all_devices is True
    mask = {"attention_mask": torch.ones(1, 3, dtype=torch.long)}
    assert private.updated_kwargs(model, outputs, mask | {"use_cache": True})["attention_mask"].shape == (1, 4)
    assert inputs is not None
    allowed: Any = lambda row, ids: [row]  # noqa: E731
    assert private.allowed_tokens_of(PrefixConstrainedLogitsProcessor(allowed, num_beams=1)) is allowed


def test_models_and_configs() -> None:
    model = zoo.build("llama")
    assert private.supports_dynamic_cache(model)
    assert private.supports_logits_to_keep(model)
    assert not private.is_stateful(model)
    assert private.is_stateful(zoo.build("mamba"))
    assert hasattr(PreTrainedModel, "_keys_to_ignore_on_load_unexpected")
    assert not private.unexpected_keys(model)
    linear = torch.nn.Linear(2, 2)
    assert private.dispatch_hook(linear) is None
    add_hook_to_module(linear, AlignDevicesHook(execution_device="cpu"))
    assert private.dispatch_hook(linear).execution_device == "cpu"
    assert private.original_forward(linear).__func__ is torch.nn.Linear.forward
    # transformers checks the mark before it installs its hooks
    assert "_output_capturing_hooks_installed" in Path(transformers.utils.output_capturing.__file__).read_text()
    config = model.config
    before = private.attention_name(config)
    assert before == "sdpa"
    private.set_attention_name(config, "eager")
    assert private.attention_name(config) == "eager"
    private.set_attention_name(config, before)
    assert private.experts_name(config) == "eager"
    experts = zoo.build("qwen3_moe")
    assert private.experts_name(experts.config) == experts.get_experts_implementation()[""] == "grouped_mm"
    private.set_experts_name(experts.config, "batched_mm")
    assert experts.get_experts_implementation()[""] == "batched_mm"
    private.set_experts_name(experts.config, "grouped_mm")
    name = private.model_name(config)
    private.set_model_name(config, "org/model")
    assert private.model_name(config) == config.name_or_path == "org/model"
    private.set_model_name(config, name)


def test_packed_gguf_weights_are_multiplied_as_they_are_for_a_few_rows() -> None:
    kernels = pytest.importorskip("transformers.integrations.gguf.kernels")  # since 5.23
    assert kernels.MAX_GEMV_ROWS == GGUF_ROWS
    assert "self.packed_modules = " in inspect.getsource(transformers.quantizers.quantizer_gguf)


@pytest.mark.parametrize(("options", "rows", "most"), [
    ({}, 1, GGUF_ROWS), ({}, 2, 16), ({"num_draft_tokens": 10}, 1, 10),
])  # fmt: skip
def test_a_tree_for_packed_gguf_weights_has_few_nodes(options: dict[str, int], rows: int, most: int) -> None:
    model: Any = SpeculativeGenerationMixin.attach(copy.deepcopy(zoo.build("llama")))
    drafters.BY_NAME["eagle3"].add(model)
    model.hf_quantizer = SimpleNamespace(packed_modules={"lm_head.weight": model.lm_head}, is_compileable=True)
    ids, mask = prompts(rows)
    model.generate(ids, attention_mask=mask, max_new_tokens=8, speculative={"method": "eagle", **options})
    assert model.last_speculation.control["num_nodes"] == most


def test_no_other_file_uses_a_private_name_of_transformers() -> None:
    text = Path(private.__file__).read_text()
    names = set(re.findall(r"\._([a-z_]+)", text)) | set(re.findall(r'"_([a-z_]+)"', text))
    names -= {name.removeprefix("_") for name in (*private.EXTENDED_METHODS, *private.TRAINER_METHODS)}
    for path in SOURCE.rglob("*.py"):
        if path.name != "transformers_private.py":
            used = [name for name in names if re.search(rf"\._{name}\b|attr\([^)]*\"_{name}\"", path.read_text())]
            assert not used, f"{path.name}: {used}"
