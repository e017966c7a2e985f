"""Tiny random models of many architectures, built offline: windows of 8 slots, so that a short text crosses them."""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB_SIZE = 96
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

EQUAL: dict[str, dict[str, Any]] = {
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
"""Architectures whose speculative output must equal plain generate's."""

REFUSED: dict[str, dict[str, Any]] = {
    "bloom": {"n_layer": 2, "n_head": 4},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2},
    "falcon_alibi": {"alibi": True},
    "gpt_neo": {"num_layers": 4, "attention_types": [[["global", "local"], 2]], "num_heads": 4, "window_size": WINDOW},
    "mamba": {"state_size": 4, "num_hidden_layers": 2},
    "mamba2": {"state_size": 4, "num_heads": 8, "head_dim": 8, "n_groups": 1, "num_hidden_layers": 2},
    "recurrent_gemma": {"lru_width": 32, "attention_window_size": WINDOW},
    "jamba": {"num_experts": 2, "mamba_d_state": 4, "use_mamba_kernels": False},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
}
"""Architectures that must be refused: alibi, own position biases, recurrent state, short convolutions."""


@functools.cache
def build(name: str) -> PreTrainedModel:
    """The tiny model of one architecture, float32, in eval mode; the same weights in every test."""
    fields = {**_SIZES, **{**EQUAL, **REFUSED}[name]}
    if name.startswith("falcon"):
        del fields["head_dim"]  # a read-only property there
    torch.manual_seed(sum(map(ord, name)))
    config = AutoConfig.for_model(name.removesuffix("_alibi"), **fields)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():  # the default initialisation is so small that every logit is a near tie
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    return model
