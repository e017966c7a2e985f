"""Tiny Qwen3-Next and Qwen3.5 checkpoints with `mtp.*` tensors, and what vLLM computes with them, in plain PyTorch."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from hf_specdec import SpeculativeGenerationMixin

KINDS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
           "shared_expert_intermediate_size": 24}  # fmt: skip


def config_of(kind: str, hybrid: bool) -> Any:
    types = ["linear_attention", "full_attention"] * 2 if hybrid else ["full_attention"] * 4
    more = {} if kind == "qwen3_5_text" else EXPERTS
    return CONFIG_MAPPING[kind](**SIZES, **more, layer_types=types, tie_word_embeddings=False)


def save(
    kind: str, folder: Path, hybrid: bool = False, shards: bool = False, fused: bool = False
) -> dict[str, Tensor]:
    """Write a target with an MTP module as its authors publish it; return the module's tensors."""
    config = config_of(kind, hybrid)
    torch.manual_seed(sum(map(ord, kind)))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(0.5 if "o_proj" in name or "down_proj" in name else 3)
        model.get_input_embeddings().weight.mul_(3)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    tensors = module_tensors(kind, config, fused)
    stored = {**load_file(folder / "model.safetensors"), **tensors}
    if not shards:
        save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
        return tensors
    (folder / "model.safetensors").unlink()
    mapping = {}
    for number in range(3):
        part = {name: stored[name] for name in sorted(stored)[number::3]}
        name = f"model-{number + 1:05}-of-00003.safetensors"
        save_file(part, folder / name, metadata={"format": "pt"})
        mapping.update(dict.fromkeys(part, name))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": mapping}))
    return tensors


def loaded(folder: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return SpeculativeGenerationMixin.attach(model.eval())


def module_tensors(kind: str, config: Any, fused: bool = False) -> dict[str, Tensor]:
    """Random tensors under the published names. Norms are stored as their distance from 1."""
    hidden, heads, groups, size = 32, 4, 2, 16
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, 2 * hidden),
        **{f"{name}.weight": (hidden,) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm",
                                                    "layers.0.input_layernorm", "layers.0.post_attention_layernorm")},
        "layers.0.self_attn.q_proj.weight": (2 * heads * size, hidden),  # queries and gates
        "layers.0.self_attn.k_proj.weight": (groups * size, hidden),
        "layers.0.self_attn.v_proj.weight": (groups * size, hidden),
        "layers.0.self_attn.o_proj.weight": (hidden, heads * size),
        "layers.0.self_attn.q_norm.weight": (size,),
        "layers.0.self_attn.k_norm.weight": (size,),
    }  # fmt: skip
    mlp = "layers.0.mlp."
    if kind == "qwen3_5_text":
        shapes |= _mlp(mlp, 48)
    else:
        shapes |= {f"{mlp}gate.weight": (4, hidden), f"{mlp}shared_expert_gate.weight": (1, hidden),
                   **_mlp(f"{mlp}shared_expert.", 24)}  # fmt: skip
        if fused:
            shapes |= {f"{mlp}experts.gate_up_proj": (4, 48, hidden), f"{mlp}experts.down_proj": (4, hidden, 24)}
        else:
            for expert in range(4):
                shapes |= _mlp(f"{mlp}experts.{expert}.", 24)
    draw = torch.Generator().manual_seed(11)
    return {
        f"mtp.{name}": torch.randn(shape, generator=draw) * (0.2 if len(shape) == 1 else 1.2 / math.sqrt(shape[-1]))
        for name, shape in shapes.items()
    }


def _mlp(prefix: str, inner: int) -> dict[str, tuple[int, ...]]:
    return {f"{prefix}gate_proj.weight": (inner, 32), f"{prefix}up_proj.weight": (inner, 32),
            f"{prefix}down_proj.weight": (32, inner)}  # fmt: skip


def reference(tensors: dict[str, Tensor], config: Any, model: Any, tokens: Tensor, hidden: Tensor) -> list[Tensor]:
    """Logits of three drafted steps.

    Args:
        tensors: Of the module, experts one by one.
        config: Of the target.
        model: The target, for its embedding and lm_head.
        tokens: `[T + 2]` the tokens after those of `hidden`, and two drafted ones.
        hidden: `[T, 32]` after the target's final norm.
    """
    t = {name.removeprefix("mtp."): tensor for name, tensor in tensors.items()}
    eps, rope = config.rms_norm_eps, config.rope_parameters
    rotated = int(16 * rope.get("partial_rotary_factor", 1.0))
    inverse = 1.0 / rope["rope_theta"] ** (torch.arange(0, rotated, 2) / rotated)

    def norm(x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (1 + t[f"{name}.weight"])

    def turn(x: Tensor) -> Tensor:  # [T, heads, 16]
        angles = torch.arange(len(x))[:, None, None] * inverse
        first, second = x[..., : rotated // 2], x[..., rotated // 2 : rotated]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin, x[..., rotated:]], -1)

    def attention(x: Tensor) -> Tensor:
        name = "layers.0.self_attn."
        query, gate = (x @ t[f"{name}q_proj.weight"].T).view(len(x), 4, 32).chunk(2, dim=-1)
        query = turn(norm(query, f"{name}q_norm"))
        key = turn(norm((x @ t[f"{name}k_proj.weight"].T).view(len(x), 2, 16), f"{name}k_norm")).repeat_interleave(
            2, 1
        )
        value = (x @ t[f"{name}v_proj.weight"].T).view(len(x), 2, 16).repeat_interleave(2, 1)
        scores = torch.einsum("qhd,khd->hqk", query, key) / 4
        scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -math.inf)
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).flatten(1) * gate.flatten(1).sigmoid()
        return mixed @ t[f"{name}o_proj.weight"].T

    def mlp(x: Tensor, prefix: str) -> Tensor:
        gated = torch.nn.functional.silu(x @ t[f"{prefix}gate_proj.weight"].T) * (x @ t[f"{prefix}up_proj.weight"].T)
        return gated @ t[f"{prefix}down_proj.weight"].T

    def experts(x: Tensor) -> Tensor:
        name = "layers.0.mlp."
        if f"{name}gate.weight" not in t:
            return mlp(x, name)
        weights, chosen = (x @ t[f"{name}gate.weight"].T).softmax(-1).topk(2, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        outputs = torch.stack([mlp(x, f"{name}experts.{expert}.") for expert in range(4)], dim=1)
        routed = (weights[..., None] * outputs.gather(1, chosen[..., None].expand(-1, -1, 32))).sum(1)
        return routed + (x @ t[f"{name}shared_expert_gate.weight"].T).sigmoid() * mlp(x, f"{name}shared_expert.")

    logits = []
    for step in range(3):
        embedded = model.get_input_embeddings()(tokens[: len(hidden)])
        both = [norm(embedded, "pre_fc_norm_embedding"), norm(hidden, "pre_fc_norm_hidden")]
        x = torch.cat(both, -1) @ t["fc.weight"].T
        x = x + attention(norm(x, "layers.0.input_layernorm"))
        x = norm(x + experts(norm(x, "layers.0.post_attention_layernorm")), "norm")
        logits.append(model.get_output_embeddings()(x if step == 0 else x[-1:]))
        hidden = torch.cat([hidden, x[-1:]])
    return logits


def speculators_checkpoint(kind: str, folder: Path) -> dict[str, Tensor]:
    """Write the module as speculators does; return its tensors under the published names."""
    config = config_of(kind, hybrid=True)
    tensors = module_tensors(kind, config)
    names = {"mtp.fc.": "input_proj.", "mtp.pre_fc_norm_embedding.": "token_layernorm.",
             "mtp.pre_fc_norm_hidden.": "hidden_layernorm.", "mtp.norm.": "final_layernorm.",
             "mtp.layers.0.": ""}  # fmt: skip
    stored = {}
    for name, tensor in copy.copy(tensors).items():
        old = next(old for old in names if name.startswith(old))
        stored[f"mtp_layers.0.{names[old]}{name.removeprefix(old)}"] = tensor
    folder.mkdir(parents=True, exist_ok=True)
    save_file(stored, folder / "model.safetensors")
    fields = {"speculators_model_type": "mtp", "num_nextn_predict_layers": 1, "architectures": ["MTPDraftModel"],
              "speculators_config": {"verifier": {"name_or_path": "org/verifier"}},
              "transformer_layer_config": config.to_dict()}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(fields))
    return tensors
