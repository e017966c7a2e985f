"""What people put around a model, or do to it: adapters, offloading, compilation, quantisation, parallel processes."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import (
    AutoModelForCausalLM,
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    SiglipVisionConfig,
)
from transformers.integrations.peft import MIN_PEFT_VERSION

import drafters
import generative
import zoo
from drafters import random_head
from hf_specdec import SpeculativeGenerationMixin, UnsupportedGenerationError
from hf_specdec.cpu.operations import INT8, INT8_ROUNDED, grouped_form, linear
from hf_specdec.cpu.quantized import stored_weight
from hf_specdec.drafters.eagle import EagleDrafter
from models import prompts

METHODS = ("sometimes", "token_recycling", "eagle", "medusa", "dflash")
"""A drafter per way to reach the target: its answers, its logits, features of the head's kinds."""


def fresh() -> Any:
    """A tiny Llama of one's own."""
    return copy.deepcopy(zoo.build("llama"))


def with_head(model: Any) -> Any:
    """Attached, with a random EAGLE head over a reduced vocabulary."""
    SpeculativeGenerationMixin.attach(model)
    model.add_drafter(EagleDrafter(random_head(model, draft_vocab_size=32)))
    return model


def assert_equal(
    wrapped: Any, model: Any = None, batch_sizes: tuple[int, ...] = (1, 3), methods: Any = METHODS,
    compile: Any = "auto", **inputs: Any
) -> None:  # fmt: skip
    """Plain and speculative answers of the wrapper; drafters are registered on the model inside."""
    model = wrapped if model is None else model
    for batch_size in batch_sizes:
        ids, mask = prompts(batch_size)
        options = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 10, "do_sample": False, **inputs}
        plain = wrapped.generate(**options)
        for name in methods:
            row = drafters.BY_NAME[name]
            config = row.add(model, plain[:, ids.shape[1] :]) | {"compile": compile}
            assert torch.equal(plain, wrapped.generate(**options, speculative=config)), (name, batch_size)


# ------------------------------------------------------------------------------------------------- adapters


def adapted(**fields: Any) -> Any:
    """A LoRA that changes the answers."""
    return pytest.importorskip("peft").LoraConfig(
        task_type="CAUSAL_LM", r=4, lora_alpha=64, init_lora_weights=False, **fields
    )


def compatible_peft() -> Any:
    """The peft package; skips the test if it is older than this transformers can work with."""
    peft = pytest.importorskip("peft")
    if Version(peft.__version__) < Version(MIN_PEFT_VERSION):
        pytest.skip(f"transformers {transformers.__version__} needs peft >= {MIN_PEFT_VERSION}")
    return peft


@pytest.mark.slow
def test_lora_active_disabled_several_and_merged() -> None:
    peft = pytest.importorskip("peft")
    wrapped = SpeculativeGenerationMixin.attach(peft.get_peft_model(fresh(), adapted(target_modules=["q_proj"])))
    base = with_head(wrapped.get_base_model())
    assert_equal(wrapped, base)
    with wrapped.disable_adapter():
        assert_equal(wrapped, base)
    wrapped.add_adapter("second", adapted(target_modules=["up_proj"]))
    wrapped.set_adapter("second")
    assert_equal(wrapped, base)
    merged = wrapped.merge_and_unload()
    assert isinstance(merged, SpeculativeGenerationMixin)
    assert_equal(merged)


@pytest.mark.slow
def test_an_adapter_around_or_inside_an_attached_model() -> None:
    peft = compatible_peft()
    model = with_head(fresh())
    assert_equal(peft.get_peft_model(model, adapted(target_modules=["q_proj"])), model)
    inside = with_head(fresh())
    inside.add_adapter(adapted(target_modules=["down_proj"]))
    assert_equal(inside)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Position ids are not supported:UserWarning")
def test_prompt_tuning_puts_virtual_tokens_in_front() -> None:
    peft = compatible_peft()
    for config in (
        peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5),
        peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=5, encoder_hidden_size=16),
    ):
        wrapped = SpeculativeGenerationMixin.attach(peft.get_peft_model(fresh(), config))
        assert_equal(wrapped, with_head(wrapped.get_base_model()))


def test_prefix_tuning_is_refused() -> None:
    peft = pytest.importorskip("peft")
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)
    wrapped = SpeculativeGenerationMixin.attach(peft.get_peft_model(fresh(), config))
    ids, mask = prompts(1)
    with pytest.raises(UnsupportedGenerationError, match="prefix tuning"):
        wrapped.generate(input_ids=ids, attention_mask=mask, max_new_tokens=4, speculative="prompt_lookup")


@pytest.mark.parametrize("name", ["adapter_names", "alora_offsets"])
def test_adapters_by_row_are_refused_by_name(name: str) -> None:
    peft = pytest.importorskip("peft")
    ids, mask = prompts(2)
    fields = {} if name == "adapter_names" else {"alora_invocation_tokens": ids[0, -2:].tolist()}
    wrapped = peft.get_peft_model(fresh(), adapted(target_modules=["q_proj"], **fields))
    wrapped.add_adapter("second", adapted(target_modules=["up_proj"]))
    base = with_head(SpeculativeGenerationMixin.attach(wrapped.eval()).get_base_model())
    call = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 4, "do_sample": False}
    by_row = {"adapter_names": ["default", "second"]} if name == "adapter_names" else {}
    plain = wrapped.generate(**call, **by_row)
    with pytest.raises(UnsupportedGenerationError, match=name):
        wrapped.generate(**call, **by_row, speculative="eagle")
    assert torch.equal(plain, wrapped.generate(**call, **by_row))
    wrapped.set_adapter("second")  # nothing of the refused call is left
    assert_equal(wrapped, base, methods=("eagle",))


# ------------------------------------------------------------------------------------------------- where weights lie


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:You are calling .generate.. with the `input_ids` being on a device:UserWarning")
def test_offloaded_to_cpu_and_disk(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    for offload in (accelerate.cpu_offload, lambda m, **kw: accelerate.disk_offload(m, str(tmp_path / "off"), **kw)):
        model = fresh()
        offload(model, execution_device=torch.device("cpu"))
        assert_equal(with_head(model))
        assert_equal(model, methods=("eagle", "dflash"), compile="kernels")


@pytest.mark.slow
def test_a_device_map_with_layers_on_disk(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    fresh().save_pretrained(tmp_path / "model")
    places = {
        "model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "disk",
        **{f"model.layers.{i}": "disk" if i in (1, 2) else "cpu" for i in range(4)},
    }  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=places, offload_folder=str(tmp_path / "offloaded")
    )
    model.generation_config = zoo.build("llama").generation_config
    assert_equal(with_head(model))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", ["torch.compile", "model.compile", "forward"])
def test_compiled(how: str) -> None:
    model = with_head(zoo.shallow("llama", 1))
    wrapped = model
    try:
        if how == "torch.compile":
            wrapped = torch.compile(model, backend="eager")
        elif how == "model.compile":
            model.compile(backend="eager")
        else:
            model.forward = torch.compile(model.forward, backend="aot_eager")
        assert_equal(wrapped, model, (2,), ("sometimes",), max_new_tokens=8)
    finally:
        torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", [pytest.param("prompt_lookup", marks=pytest.mark.slow), "eagle3"])
def test_a_compiled_forward_is_compiled_for_few_shapes(method: str) -> None:
    model, graphs, ids = zoo.shallow("llama", 3), list[Any](), torch.arange(3, 12)[None]
    answers = {count: model.generate(ids, max_new_tokens=count, do_sample=False) for count in (30, 50)}

    def keep(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    try:
        model.forward = torch.compile(model.forward, backend=keep)
        SpeculativeGenerationMixin.attach(model)
        config, answer = drafters.BY_NAME[method].add(model, answers[30][:, 9:]), None
        for count, new in ((30, 5), (30, 0), (50, 3), (50, 0)):  # a prompt, one token, trees; then another capacity
            before = len(graphs) if answer is not None else 0
            answer = model.generate(ids, max_new_tokens=count, do_sample=False, speculative=config)
            assert torch.equal(answer, answers[count])
            assert len(graphs) - before <= new
    finally:
        torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("library", "config", "forms"),
    [
        ("optimum.quanto", "int8", {INT8}),
        ("optimum.quanto", "int4", {grouped_form(size, rounded=False, halves=True) for size in (32, 64)}),
        ("torchao.quantization", "Int8WeightOnlyConfig", {INT8}),
        ("torchao.quantization", "Int8DynamicActivationInt8WeightConfig", {INT8_ROUNDED}),
        ("torchao.quantization", "IntxWeightOnlyConfig", {grouped_form(16, rounded=False, halves=False)}),
        (
            "torchao.quantization",
            "Int8DynamicActivationIntxWeightConfig",
            {grouped_form(16, rounded=True, halves=False)},
        ),
    ],
)
def test_quantised(library: str, config: str, forms: set[int], tmp_path: Path) -> None:
    """Also with the CPU kernels, which read the numbers as they are; exact then, whether rows are rounded or not."""
    quantization = pytest.importorskip(library)
    fresh().save_pretrained(tmp_path)
    if library == "optimum.quanto":
        given: Any = transformers.QuantoConfig(weights=config)
    else:
        granularity = "weight_granularity" if config.startswith("Int8Dynamic") else "granularity"
        groups = {"weight_dtype": torch.int4, granularity: quantization.PerGroup(16)} if "Intx" in config else {}
        given = transformers.TorchAoConfig(getattr(quantization, config)(**groups))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=given)
    model.generation_config = zoo.build("llama").generation_config
    stored = [one for one in map(stored_weight, model.parameters()) if one is not None]
    assert len(stored) == 7 * model.config.num_hidden_layers
    rounds = config.startswith("Int8Dynamic")
    assert {one.form for one in stored} == forms
    model = with_head(model)
    if not rounds:  # otherwise the smallest differences can become larger ones
        assert_equal(model)
    ids, options = prompts(1)[0], {"max_new_tokens": 20, "do_sample": False}
    plain = {"method": "plain", "compile": "kernels"}
    wanted = model.generate(ids, speculative=plain, **options)
    assert rounds or torch.equal(wanted, model.generate(ids, **options))
    for method in ("prompt_lookup", "eagle"):
        config_of_call = {"method": method, "compile": "kernels", "exact": True}
        assert torch.equal(model.generate(ids, speculative=config_of_call, **options), wanted)
    assert model._speculation.programs["kernels"].runner.reads_prompts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mapping", ["SYMMETRIC", "ASYMMETRIC"])
@pytest.mark.parametrize("size", [32, 96, None])
def test_products_of_torchao_weights_in_groups(dtype: torch.dtype, mapping: str, size: int | None) -> None:
    """Those of torchao's own linear, which rounds rows and, in bfloat16, dequantised weights; scales are its own."""
    ao = pytest.importorskip("torchao.quantization")
    x, granularity = torch.randn(9, 192).to(dtype), ao.PerAxis(0) if size is None else ao.PerGroup(size)
    x[3], x[4] = 0, x[4].abs()
    options = {"weight_dtype": torch.int4, "weight_granularity": granularity}
    configs = (
        ao.IntxWeightOnlyConfig(torch.int4, granularity, ao.MappingType[mapping]),
        ao.Int8DynamicActivationIntxWeightConfig(**options, weight_mapping_type=ao.MappingType[mapping]),
    )
    for rounded, config in zip((False, True), configs, strict=True):
        layer = torch.nn.Linear(192, 50).to(dtype)
        ao.quantize_(layer, config)
        stored = stored_weight(layer.weight)
        assert stored is not None
        assert stored.numbers.data_ptr() == layer.weight.qdata.data_ptr()
        assert stored.form == grouped_form(64 if size is None else 32, rounded, halves=False)
        found = linear(x, [stored.numbers], [layer.bias], scales=[stored.scale], form=stored.form)
        torch.testing.assert_close(found, layer(x), atol=2e-5 if dtype == torch.float32 else 2e-2, rtol=1e-2)
    ao.quantize_(layer := torch.nn.Linear(192, 50), ao.IntxWeightOnlyConfig(torch.int4, ao.PerGroup(8)))
    assert stored_weight(layer.weight) is None


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tensor", "synced"])
def test_two_processes(kind: str, tmp_path: Path) -> None:
    """Tensor parallelism over gloo, and `synced_gpus` with answers of different lengths."""
    zoo.build("llama").save_pretrained(tmp_path)
    worker = Path(__file__).with_name("parallel_worker.py")
    port = {"tensor": "29611", "synced": "29612"}[kind]
    launch = ["-W", "ignore", "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", port]
    command = [sys.executable, *launch, str(worker), kind, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("rank done") == 2


# ------------------------------------------------------------------------------------------------- other ways in


# ------------------------------------------------------------------------------------------------- images

_TEXT = {name: value for name, value in zoo._SIZES.items() if name != "layer_types"}
_VISION = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
           "image_size": 16, "patch_size": 8}  # fmt: skip


def llava() -> Any:
    """Image tokens are replaced by features of a CLIP tower."""
    config = LlavaConfig(vision_config=CLIPVisionConfig(**_VISION), text_config=LlamaConfig(**_TEXT), image_token_id=3)
    return LlavaForConditionalGeneration(config), {"pixel_values": torch.randn(2, 3, 16, 16)}


def gemma3() -> Any:
    """Image tokens see each other both ways; windows of 8."""
    text = Gemma3TextConfig(**{**_TEXT, "sliding_window": zoo.WINDOW, "query_pre_attn_scalar": 8,
                               "layer_types": ["sliding_attention", "full_attention"] * 2})  # fmt: skip
    config = Gemma3Config(vision_config=SiglipVisionConfig(**_VISION), text_config=text, image_token_index=3,
                          mm_tokens_per_image=4, boi_token_index=4, eoi_token_index=94)  # fmt: skip
    return Gemma3ForConditionalGeneration(config), {"pixel_values": torch.randn(2, 3, 16, 16), "token_type_ids": True}


def qwen2_vl() -> Any:
    """Positions in three sections."""
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4}
    vision = {"depth": 2, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4,
              "spatial_merge_size": 2, "temporal_patch_size": 1}  # fmt: skip
    config = Qwen2VLConfig(text_config={**_TEXT, "rope_parameters": rope}, vision_config=vision, image_token_id=3,
                           video_token_id=4, vision_start_token_id=93, vision_end_token_id=94)  # fmt: skip
    images = {"pixel_values": torch.randn(32, 48), "image_grid_thw": torch.tensor([[1, 4, 4]] * 2),
              "mm_token_type_ids": True}  # fmt: skip
    return Qwen2VLForConditionalGeneration(config), images


@pytest.mark.slow
@pytest.mark.parametrize("make", [llava, gemma3, qwen2_vl])
@pytest.mark.parametrize("with_images", [False, True])
def test_vision_language_models(make: Any, with_images: bool) -> None:
    torch.manual_seed(0)
    model, images = make()
    model.eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)
    model.generation_config = zoo.build("llama").generation_config
    ids = torch.randint(5, 90, (2, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    ids[1, :3] = mask[1, :3] = 0
    inputs: dict[str, Any] = {}
    if with_images:
        ids[:, 4:8] = 3
        inputs = {name: (ids == 3).long() if value is True else value for name, value in images.items()}
    SpeculativeGenerationMixin.attach(model)
    assert_equal(model, input_ids=ids, attention_mask=mask, **inputs)


def test_images_behind_a_cross_attention_mask_are_refused_by_name() -> None:
    model, (ids, mask) = generative.build("MllamaForConditionalGeneration"), prompts(1)
    SpeculativeGenerationMixin.attach(model)
    images = {
        "pixel_values": torch.zeros(1, 1, 4, 3, 16, 16),
        "cross_attention_mask": torch.ones(1, ids.shape[1], 1, 4),
    }
    with pytest.raises(UnsupportedGenerationError, match="cross_attention_mask"):
        model.generate(ids, attention_mask=mask, max_new_tokens=4, **images, speculative="prompt_lookup")
    assert_equal(model, methods=("prompt_lookup",), batch_sizes=(1,))
