"""Tiny models whose forward depends on the length of the text, one for each way in which it does, with small limits.

`LIMITED` names the architecture of `zoo.py`, what is changed in its configuration, and the lengths at which something
happens: other frequencies, a dropped cache, the end of a table of positions, another temperature, a full block.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import zoo

LIMIT = 64


@dataclass(frozen=True)
class Limited:
    """One model.

    Args:
        architecture: Its name in `zoo.py`.
        changes: Fields of its configuration.
        limits: Lengths at which its forward changes.
        ends: Whether plain `generate()` raises an error beyond the last limit.
    """

    architecture: str
    changes: dict[str, Any] = field(default_factory=dict)
    limits: tuple[int, ...] = (LIMIT,)
    ends: bool = False


def _longrope(pairs: int = 4, limit: int = LIMIT, **fields: Any) -> dict[str, Any]:
    return {
        "rope_type": "longrope", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": limit,
        "short_factor": [1.0] * pairs, "long_factor": [4.0] * pairs, **fields,
    }  # fmt: skip


_DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
_PHI3 = {"max_position_embeddings": 256, "original_max_position_embeddings": LIMIT, "sliding_window": None}
_EXPERTS = {"num_experts": 2, "num_local_experts": 2, "n_routed_experts": 2}
"""Both are chosen for every token: rounding cannot send a token to another one."""
_TABLE = {"max_position_embeddings": LIMIT}


def _table(architecture: str, **changes: Any) -> Limited:
    return Limited(architecture, changes or _TABLE, ends=True)


LIMITED: dict[str, Limited] = {
    # frequencies that follow the largest position of the forward
    "longrope": Limited("llama", {"max_position_embeddings": 256, "rope_parameters": _longrope()}),
    "longrope, another limit in every kind of layer": Limited(
        "gemma3_text",
        {"max_position_embeddings": 256,
         "rope_parameters": {"sliding_attention": _longrope(limit=48), "full_attention": _longrope()}},
        limits=(48, LIMIT),
    ),
    "longrope in a hybrid": Limited(
        "qwen3_next",
        {**_EXPERTS, "max_position_embeddings": 256, "rope_parameters": _longrope(1, partial_rotary_factor=0.25)},
    ),
    "dynamic": Limited("llama", {"max_position_embeddings": LIMIT, "rope_parameters": _DYNAMIC}),
    "dynamic in a hybrid": Limited("lfm2", {"max_position_embeddings": LIMIT, "rope_parameters": _DYNAMIC}),
    "dynamic, with alpha": Limited(
        "hunyuan_v1_dense",
        {"max_position_embeddings": LIMIT, "rope_parameters": {**_DYNAMIC, "alpha": 1000.0}},
    ),
    # a cache that the model drops when the text crosses the limit
    "phi3": Limited("phi3", {**_PHI3, "rope_parameters": _longrope(partial_rotary_factor=1.0)}),
    "phi3, one set of frequencies": Limited("phi3", _PHI3),
    "phimoe": Limited(
        "phimoe",
        {**_EXPERTS, "max_position_embeddings": 256, "sliding_window": None,
         "rope_parameters": _longrope(short_mscale=1.0, long_mscale=1.3)},
    ),
    "phi4_multimodal": Limited(
        "phi4_multimodal", {**_PHI3, "rope_parameters": _longrope(partial_rotary_factor=1.0)}
    ),
    # tables of positions
    "gpt2": _table("gpt2", n_positions=LIMIT, max_position_embeddings=LIMIT),
    "gpt_bigcode": _table("gpt_bigcode", n_positions=LIMIT, max_position_embeddings=LIMIT),
    "gpt_neo": _table("gpt_neo"),
    "gptj": _table("gptj", n_positions=LIMIT, max_position_embeddings=LIMIT),
    "codegen": _table("codegen", n_positions=LIMIT, max_position_embeddings=LIMIT),
    "ctrl": _table("ctrl", n_positions=LIMIT, max_position_embeddings=LIMIT),
    "opt": _table("opt"),
    "biogpt": _table("biogpt"),
    "mpt": _table("mpt", max_seq_len=LIMIT),
    "bert": _table("bert"),
    "camembert": _table("camembert"),
    "megatron-bert": _table("megatron-bert"),
    "marian": _table("marian"),
    "blenderbot": _table("blenderbot"),
    "roformer": _table("roformer"),
    "xglm": Limited("xglm", _TABLE),  # its table grows
    # temperatures that follow positions, or slots of the cache
    "llama4_text": Limited(
        "llama4_text",
        {"attn_temperature_tuning": True, "floor_scale": 32, "attn_scale": 1.0, "attention_chunk_size": 40,
         "no_rope_layers": [1, 0, 1, 0], "num_local_experts": 1},
        limits=(32, 40, LIMIT),
    ),
    "ministral3": Limited(
        "ministral3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 1.0,
                             "original_max_position_embeddings": 32}},
        limits=(32, LIMIT),
    ),
    "inkling2_text": Limited(
        "inkling2_text", {**_EXPERTS, "log_scaling_n_floor": 32, "log_scaling_alpha": 1.0}, limits=(32, LIMIT)
    ),
    # attention to some of the earlier tokens
    "mistral": Limited("mistral", {"sliding_window": 32}, limits=(32,)),
    "doge": Limited("doge", {"keep_window_size": 32}, limits=(32,)),
    "deepseek_v32": Limited("deepseek_v32", {**_EXPERTS, "index_topk": 32}, limits=(32,)),
    "qwen4_exp_text": Limited(
        "qwen4_exp_text", {**_EXPERTS, "indexer_budget": 16, "indexer_compress_ratio": 4}, limits=(16, 32)
    ),
    "minimax_m3_vl_text": Limited(
        "minimax_m3_vl_text",
        {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2, "index_block_size": 8, "index_topk_blocks": 2,
         "index_n_heads": 2, "index_head_dim": 8, "mlp_layer_types": ["dense"] * 4},
        limits=(16, 32),
    ),
}  # fmt: skip
"""Every kind of limit in transformers' causal language models."""


@functools.cache
def build(name: str) -> Any:
    """The model of that name, float32, in eval mode, with weights whose best token varies."""
    limited = LIMITED[name]
    torch.manual_seed(0)
    config = zoo.config_of(limited.architecture, limited.changes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.15)
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    return model


def grown(model: Any) -> list[int]:
    """The lengths that the model's frequencies were made for, which the next call starts from."""
    return [
        int(value)
        for module in model.modules()
        for name, value in vars(module).items()
        if name.endswith("max_seq_len_cached")
    ]
