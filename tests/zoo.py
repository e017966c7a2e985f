"""Tiny random models of every architecture in transformers' causal-LM mapping, built offline.

Windows and chunks are 8 slots, so that a short text crosses them.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCAB_SIZE = 96
IDS = torch.randint(3, VOCAB_SIZE, (1, 20), generator=torch.Generator().manual_seed(5))
GREEDY: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False, "attention_mask": torch.ones_like(IDS)}
"""A prompt, and the options of its plain answer."""
WINDOW = 8

_SIZES = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
_GPT_SIZES = {
    "vocab_size": VOCAB_SIZE, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 512, "n_inner": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_MLA = {
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 12,
    "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "moe_intermediate_size": 32, "n_shared_experts": 1, "head_dim": 4,
}  # fmt: skip

CORE: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "smollm3": {},
    "mistral": {"sliding_window": WINDOW},
    "mixtral": {"num_local_experts": 4, "sliding_window": WINDOW},
    "gemma": {},
    "gemma2": {"sliding_window": WINDOW, "query_pre_attn_scalar": 8},
    "gemma3_text": {"sliding_window": WINDOW, "query_pre_attn_scalar": 8,
                    "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]},
    "phi": {},
    "phi3": {"sliding_window": WINDOW},
    "gpt2": _GPT_SIZES,
    "gpt_neox": {},
    "gptj": {**_GPT_SIZES, "rotary_dim": 4},
    "codegen": {**_GPT_SIZES, "rotary_dim": 4},
    "gpt_bigcode": _GPT_SIZES,
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "falcon": {"alibi": False, "new_decoder_architecture": False, "multi_query": True},
    "xglm": {"d_model": 32, "num_layers": 4, "attention_heads": 4, "ffn_dim": 64},
    "biogpt": {},
    "qwen2_moe": {**_MOE, "shared_expert_intermediate_size": 32},
    "qwen3_moe": _MOE,
    "olmo": {},
    "olmo2": {},
    "olmo3": {"sliding_window": WINDOW},
    "granite": {},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "cohere": {},
    "cohere2": {"sliding_window": WINDOW},
    "llama4_text": {"attention_chunk_size": WINDOW, "num_local_experts": 2, "intermediate_size_mlp": 64,
                    "no_rope_layers": [1, 1, 1, 0], "attn_temperature_tuning": False},
    "starcoder2": {"sliding_window": WINDOW},
    "stablelm": {},
    "nemotron": {},
    "persimmon": {},
    "deepseek_v2": {**_MLA, "n_group": None, "topk_group": None, "topk_method": "greedy"},
    "deepseek_v3": _MLA,
    "glm": {},
    "glm4": {},
    "exaone4": {"sliding_window": WINDOW,
                "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]},
    "gpt_oss": {"sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
    "helium": {},
    "seed_oss": {},
}  # fmt: skip
"""Architectures with their particular traits switched on; every version of transformers has them."""

ANY_SIZES: dict[str, Any] = {
    **_SIZES, **_GPT_SIZES, **_MOE, **_MLA, "use_cache": True, "is_decoder": True, "is_encoder_decoder": False,
    "num_local_experts": 4, "moe_num_experts": 4, "moe_topk": 2, "moe_k": 2, "top_k_experts": 2,
    "shared_expert_intermediate_size": 32, "moe_layer_start_index": 1, "expert_ffn_hidden_size": 32,
    "ffn_hidden_size": 64, "intermediate_size_mlp": 64, "emb_dim": 32, "head_dim": 8, "num_key_value_heads": 2,
    "d_model": 32, "n_heads": 4, "n_layers": 4, "num_layers": 4, "attention_heads": 4, "ffn_dim": 64, "n_ctx": 512,
    "word_embed_proj_dim": 32, "dff": 64, "dim_model": 32, "dim_head": 8, "dim_ff": 64,
    "encoder_layers": 4, "decoder_layers": 4, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "decoder_start_token_id": 1,
    "sliding_window": WINDOW, "attention_chunk_size": WINDOW, "attention_window_size": WINDOW, "max_window_layers": 2,
    "query_pre_attn_scalar": 8, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB_SIZE,
    "num_kv_shared_layers": 0, "lru_width": 32,
    "state_size": 4, "ssm_state_size": 4, "mamba_d_state": 4, "mamba_expand": 2, "use_mamba_kernels": False,
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_num_heads": 8, "mamba_head_dim": 8,
    "n_groups": 1, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "linear_head_dim": 8, "linear_num_heads": 4, "chunk_size": 8, "mamba_chunk_size": 8,
}  # fmt: skip
"""Small values for every size that some configuration knows; each takes those it has."""

_MANY_HEADS = {"num_key_value_heads": 4, "head_dim": 4}
_MAMBA2 = {
    "num_heads": 8,
    "head_dim": 8,
    "n_groups": 1,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}  # of draft heads

OVERRIDES: dict[str, dict[str, Any]] = {
    **CORE,
    "falcon_alibi": {"alibi": True},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2},
    "bamba": {"attn_layer_indices": [1, 3]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
    },
    "falcon_h1": {"mamba_d_ssm": 64},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "num_heads": 4, "window_size": WINDOW},
    "mamba2": _MAMBA2,
    "nemotron_h": {"layers_block_type": ["mamba", "attention", "mlp", "mamba"]},
    "zamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "n_mamba_heads": 2},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2, "num_mem_blocks": 1, "hybrid_layer_ids": [1, 3]},
    "zaya": {"num_experts_per_tok": 1},
    "reformer": {"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [16, 32]},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "xmod": {"default_language": "en_XX", "languages": ["en_XX"]},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    **dict.fromkeys(
        (
            "axk1",
            "axk2",
            "bailing_hybrid",
            "deepseek_v32",
            "deepseek_v4",
            "dots3_note_text",
            "glm4_moe_lite",
            "glm_moe_dsa",
            "kimi_linear",
            "longcat_flash",
            "minicpm3",
            "youtu",
        ),
        _MANY_HEADS,
    ),
}
"""Where the generic values do not do: windows that are used, kinds of layers that are mixed, constraints."""

WITHOUT: dict[str, tuple[str, ...]] = {
    "bamba": ("layers_block_type", "layer_types"),
    "falcon_h1": ("layers_block_type", "layer_types"),
    "falcon_mamba": ("layer_types",),
    "nemotron_h": ("layer_types",),
    "zamba": ("layer_types", "layers_block_type"),
    "zamba2": ("layer_types",),
    "recurrent_gemma": ("layer_types", "layers_block_type"),
    "prophetnet": ("num_hidden_layers",),
    "xlnet": ("max_position_embeddings",),
}
"""Fields that a configuration has and does not let itself be given."""

ELSEWHERE = (
    "blt", "dots3_note", "gemma3n", "gemma4_assistant", "gemma4_unified_assistant", "musicgen", "musicgen_melody",
    "qwen4_exp",
)  # fmt: skip
"""Entries of the mapping that `generative.py` builds, by their class."""

NAMES = tuple(sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "falcon_alibi"} - set(ELSEWHERE)))
"""Every architecture of the mapping that is built; Falcon twice."""


def fields_of(config_class: type, overrides: dict[str, Any]) -> dict[str, Any]:
    """Small values for the fields that a configuration class has, for its parts as well."""
    default: Any = config_class()
    fields = {name: value for name, value in ANY_SIZES.items() if name in dir(default) or name in vars(default)}
    kinds = list(dict.fromkeys(getattr(default, "layer_types", None) or ()))
    if kinds:
        fields["layer_types"] = (kinds * 4)[:4]
    for name, part in (getattr(config_class, "sub_configs", None) or {}).items():
        value = getattr(default, name, None)
        if value is not None:
            fields[name] = {**fields_of(type(value), {}), "model_type": value.model_type}
        elif isinstance(part, type) and part.__name__ != "AutoConfig":
            fields[name] = fields_of(part, {})
    fields = {name: value for name, value in fields.items() if settable(config_class, name)}
    return {**fields, **overrides}


def settable(config_class: type, name: str) -> bool:
    attribute = getattr(config_class, name, None)
    return not isinstance(attribute, property) or attribute.fset is not None


def config_of(name: str, changes: dict[str, Any] | None = None) -> Any:
    """The configuration of the tiny model of one architecture, with other values for some fields."""
    config_class = CONFIG_MAPPING[name.removesuffix("_alibi")]
    fields = {**_SIZES, **CORE[name]} if name in CORE else fields_of(config_class, OVERRIDES.get(name, {}))
    for missing in WITHOUT.get(name, ("head_dim",) if name.startswith("falcon") else ()):
        fields.pop(missing, None)
    return config_class(**{**fields, **(changes or {})})


@functools.cache
def build(name: str) -> PreTrainedModel:
    """The tiny model of one architecture, float32, in eval mode; the same weights in every test."""
    torch.manual_seed(sum(map(ord, name)))
    return decisive(AutoModelForCausalLM.from_config(config_of(name), dtype=torch.float32).eval())


def shallow(name: str, num_layers: int) -> Any:
    """A new model like `build(name)` with only its last layers, for tests whose time grows with the layers."""
    config = copy.deepcopy(build(name).config)
    config.num_hidden_layers = num_layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[-num_layers:]
    torch.manual_seed(sum(map(ord, name)))
    return decisive(AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval())


def decisive(model: Any) -> Any:
    """The model with larger weights, and with no token that ends an answer."""
    with torch.no_grad():  # the default initialisation is so small that every logit is a near tie
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    return model


USER, ASSISTANT, END = 90, 91, 92
TEMPLATE = (
    "{% for m in messages %}{{ 'w90 ' if m.role == 'user' else 'w91 ' }}{{ m.content }} w92 {% endfor %}"
    "{% if add_generation_prompt %}w91 {% endif %}"
)


def chat_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """One word per token, w00 to w95, and a chat template of three of them."""
    words = Tokenizer(WordLevel({f"w{i:02}": i for i in range(VOCAB_SIZE)}, unk_token="w01"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w00", unk_token="w01", eos_token="w92")
    tokenizer.chat_template = template
    return tokenizer
