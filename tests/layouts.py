"""Published checkpoints in miniature, written as their authors write them, and what their authors compute with them.

Nothing of the package is used here: the forward passes are plain PyTorch over the stored tensors, by the names and
the configuration keys of each layout.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

V, H, INNER, HEADS, GROUPS = 64, 32, 48, 4, 2
VD = 24  # draft vocabulary

Config = dict[str, Any]
Tensors = dict[str, Tensor]


@dataclass
class Example:
    """One checkpoint and its reference."""

    layout: str
    config: Config
    tensors: Tensors
    draft: Callable[[Example, Target], list[Tensor]]  # logits over the draft vocabulary, step by step
    file: str = "model.safetensors"
    shards: int = 1
    target_size: int = H

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        if self.shards == 1:
            save(self.tensors, folder / self.file)
            return folder
        stem, suffix = self.file.rsplit(".", 1)
        mapping = {}
        for shard in range(self.shards):
            name = f"{stem}-{shard + 1:05}-of-{self.shards:05}.{suffix}"
            part = {key: self.tensors[key] for key in sorted(self.tensors)[shard :: self.shards]}
            save(part, folder / name)
            mapping.update(dict.fromkeys(part, name))
        (folder / f"{self.file}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": mapping}))
        return folder


@dataclass
class Target:
    """What a head needs of its target."""

    embedding: Tensor  # [V, H]
    lm_head: Tensor  # [V, Ht]
    features: Tensor  # [1, T, layers * Ht]
    tokens: Tensor  # [1, T + 1] the tokens after the features', and one drafted


def save(tensors: Tensors, path: Path) -> None:
    if path.suffix == ".safetensors":
        save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, path)
    else:
        torch.save(tensors, path)


def target_for(layers: int, size: int = H, length: int = 7) -> Target:
    draw = torch.Generator().manual_seed(3)
    return Target(
        torch.randn(V, H, generator=draw),
        torch.randn(V, size, generator=draw),
        torch.randn(1, length, layers * size, generator=draw),
        torch.randint(0, V, (1, length + 1), generator=draw),
    )


# ----------------------------------------------------------------------------------------------- plain parts


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def frequencies(config: Config, size: int) -> Tensor:
    base = config.get("rope_theta", 10000.0)
    inverse = torch.tensor([base ** (-2 * i / size) for i in range(size // 2)], dtype=torch.float64)
    scaling = config.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "linear":
        return inverse / scaling["factor"]
    if kind == "llama3":
        slow, fast = scaling["low_freq_factor"], scaling["high_freq_factor"]
        old = scaling["original_max_position_embeddings"]
        scaled = []
        for f in inverse.tolist():
            turns = old * f / (2 * math.pi)
            share = min(max((turns - slow) / (fast - slow), 0.0), 1.0)
            scaled.append((1 - share) * f / scaling["factor"] + share * f)
        return torch.tensor(scaled, dtype=torch.float64)
    assert kind == "default"
    return inverse


def rotate(x: Tensor, inverse: Tensor) -> Tensor:
    """`[1, heads, T, d]`, positions 0 .. T-1."""
    angles = torch.arange(x.shape[2], dtype=torch.float64)[:, None] * inverse
    cos, sin = angles.cos().float(), angles.sin().float()
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def linear(x: Tensor, tensors: Tensors, name: str) -> Tensor:
    y = x @ tensors[f"{name}.weight"].T
    return y + tensors[f"{name}.bias"] if f"{name}.bias" in tensors else y


def attend(x: Tensor, tensors: Tensors, prefix: str, config: Config, window: int | None = None) -> Tensor:
    heads, groups = config["num_attention_heads"], config.get("num_key_value_heads", config["num_attention_heads"])
    size = config.get("head_dim") or config["hidden_size"] // heads

    def split(name: str, count: int) -> Tensor:
        return linear(x, tensors, f"{prefix}{name}").reshape(1, -1, count, size).transpose(1, 2)

    query, key, value = split("q_proj", heads), split("k_proj", groups), split("v_proj", groups)
    if f"{prefix}q_norm.weight" in tensors:
        eps = config.get("rms_norm_eps", 1e-6)
        query, key = (
            rms(query, tensors[f"{prefix}q_norm.weight"], eps),
            rms(key, tensors[f"{prefix}k_norm.weight"], eps),
        )
    inverse = frequencies(config, size)
    query, key = rotate(query, inverse), rotate(key, inverse)
    key, value = (t.repeat_interleave(heads // groups, dim=1) for t in (key, value))
    behind = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
    hidden = (behind < 0) | (behind >= (window or x.shape[1]))
    scores = (query @ key.transpose(-1, -2) / math.sqrt(size)).masked_fill(hidden, -math.inf)
    mixed = (scores.softmax(-1) @ value).transpose(1, 2).reshape(1, x.shape[1], -1)
    return linear(mixed, tensors, f"{prefix}o_proj")


def mlp(x: Tensor, tensors: Tensors, prefix: str) -> Tensor:
    gate, up = linear(x, tensors, f"{prefix}gate_proj"), linear(x, tensors, f"{prefix}up_proj")
    return linear(torch.nn.functional.silu(gate) * up, tensors, f"{prefix}down_proj")


# ----------------------------------------------------------------------------------------------- references


def draft_eagle(example: Example, target: Target) -> list[Tensor]:
    """EAGLE-1, also as legacy speculators store it: fc, one layer without an input norm, the target's lm_head."""
    tensors, config = example.tensors, example.config
    legacy = config.get("speculators_model_type") == "eagle"
    fc, layer = ("fusion_fc", "transformer.") if legacy else ("fc", "layers.0.")
    inner = config["transformer_layer_config"] if legacy else config
    eps, normed = inner.get("rms_norm_eps", 1e-6), config.get("layernorms", False)
    table = tensors.get("embed_tokens.weight", target.embedding)

    def run(tokens: Tensor, features: Tensor) -> Tensor:
        embedded = table[tokens]
        if normed:
            embedded = rms(embedded, tensors["embedding_layernorm.weight"], eps)
        x = linear(torch.cat([embedded, features], -1), tensors, fc)
        y = rms(x, tensors[f"{layer}input_layernorm.weight"], eps) if normed else x
        x = x + attend(y, tensors, f"{layer}self_attn.", inner)
        return x + mlp(rms(x, tensors[f"{layer}post_attention_layernorm.weight"], eps), tensors, f"{layer}mlp.")

    def score(x: Tensor) -> Tensor:
        return (rms(x, tensors["pre_lm_head_layernorm.weight"], eps) if normed else x) @ target.lm_head.T

    length = target.features.shape[1]
    first = run(target.tokens[:, :length], target.features)
    second = run(target.tokens, torch.cat([target.features, first[:, -1:]], 1))
    return [score(first), score(second[:, -1:])]


def draft_eagle3(example: Example, target: Target) -> list[Tensor]:
    """EAGLE-3 of every family."""
    tensors, config = example.tensors, example.config
    ours = config.get("speculators_model_type") == "eagle3"
    layer = "midlayer." if "midlayer.hidden_norm.weight" in tensors else "layers.0."
    inner = config["transformer_layer_config"] if ours else config
    eps = inner.get("rms_norm_eps", 1e-6)
    table = tensors.get("embed_tokens.weight", target.embedding)
    window = inner.get("sliding_window") if inner.get("layer_types") == ["sliding_attention"] else None

    def fuse(features: Tensor) -> Tensor:
        if config.get("fc_norm"):
            count = sum(name.startswith("fc_norm.") for name in tensors)
            chunks = features.chunk(count, -1)
            features = torch.cat([rms(c, tensors[f"fc_norm.{i}.weight"], eps) for i, c in enumerate(chunks)], -1)
        if config.get("norm_before_fc"):
            features = rms(features, tensors["input_norm.weight"], eps)
        return linear(features, tensors, "fc")

    def run(tokens: Tensor, hidden: Tensor) -> Tensor:
        normed = rms(hidden, tensors[f"{layer}hidden_norm.weight"], eps)
        both = torch.cat([rms(table[tokens], tensors[f"{layer}input_layernorm.weight"], eps), normed], -1)
        x = normed if config.get("norm_before_residual") else hidden
        x = x + attend(both, tensors, f"{layer}self_attn.", inner, window)
        return x + mlp(rms(x, tensors[f"{layer}post_attention_layernorm.weight"], eps), tensors, f"{layer}mlp.")

    def score(x: Tensor) -> Tensor:
        return rms(x, tensors["norm.weight"], eps) @ tensors["lm_head.weight"].T

    length = target.features.shape[1]
    fused = fuse(target.features)
    first = run(target.tokens[:, :length], fused)
    recycled = rms(first[:, -1:], tensors["norm.weight"], eps) if ours and config.get("norm_output") else first[:, -1:]
    second = run(target.tokens, torch.cat([fused, recycled], 1))
    return [score(first), score(second[:, -1:])]


def draft_mtp(example: Example, target: Target) -> list[Tensor]:
    """MTP as speculators stores it: both inputs normed, one layer of Qwen3's, normed again; that is what goes on."""
    tensors, config, layer = example.tensors, example.config["transformer_layer_config"], "mtp_layers.0."
    eps = config.get("rms_norm_eps", 1e-6)

    def normed(x: Tensor, name: str) -> Tensor:
        return rms(x, tensors[f"{layer}{name}.weight"], eps)

    def run(tokens: Tensor, hidden: Tensor) -> Tensor:
        both = [normed(target.embedding[tokens], "token_layernorm"), normed(hidden, "hidden_layernorm")]
        x = linear(torch.cat(both, -1), tensors, f"{layer}input_proj")
        x = x + attend(normed(x, "input_layernorm"), tensors, f"{layer}self_attn.", config)
        x = x + mlp(normed(x, "post_attention_layernorm"), tensors, f"{layer}mlp.")
        return normed(x, "final_layernorm")

    length = target.features.shape[1]
    first = run(target.tokens[:, :length], target.features)
    second = run(target.tokens, torch.cat([target.features, first[:, -1:]], 1))
    return [first @ target.lm_head.T, second[:, -1:] @ target.lm_head.T]


def draft_medusa(example: Example, target: Target) -> list[Tensor]:
    """Every head on every feature."""
    tensors = {
        name.removeprefix("medusa_head.").removeprefix("medusa_heads."): t for name, t in example.tensors.items()
    }
    logits = []
    for head in sorted({name.split(".")[0] for name in tensors if name[0].isdigit()}):
        x, block = target.features, 0
        while f"{head}.{block}.linear.weight" in tensors:
            x = x + torch.nn.functional.silu(linear(x, tensors, f"{head}.{block}.linear"))
            block += 1
        logits.append(x @ tensors.get(f"{head}.{block}.weight", target.lm_head).T)
    return [torch.stack(logits)]


# ----------------------------------------------------------------------------------------------- examples


def shapes_of_layer(prefix: str, width: int, size: int = H, head_dim: int = H // HEADS) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}self_attn.q_proj.weight": (HEADS * head_dim, width),
        f"{prefix}self_attn.k_proj.weight": (GROUPS * head_dim, width),
        f"{prefix}self_attn.v_proj.weight": (GROUPS * head_dim, width),
        f"{prefix}self_attn.o_proj.weight": (size, HEADS * head_dim),
        f"{prefix}mlp.gate_proj.weight": (INNER, size),
        f"{prefix}mlp.up_proj.weight": (INNER, size),
        f"{prefix}mlp.down_proj.weight": (size, INNER),
        f"{prefix}post_attention_layernorm.weight": (size,),
    }


def eagle3_shapes(prefix: str = "midlayer.", rows: int = VD, layers: int = 3, read: int = H, head_dim: int = 8) -> Any:
    return {
        "fc.weight": (H, layers * read),
        **shapes_of_layer(prefix, 2 * H, head_dim=head_dim),
        f"{prefix}hidden_norm.weight": (H,),
        f"{prefix}input_layernorm.weight": (H,),
        "norm.weight": (H,),
        "lm_head.weight": (rows, H),
    }


def random_tensors(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> Tensors:
    draw = torch.Generator().manual_seed(seed)
    return {
        name: torch.rand(shape, generator=draw) + 0.5 if len(shape) == 1 and "norm" in name
        else torch.randn(shape, generator=draw) / math.sqrt(shape[-1])
        for name, shape in shapes.items()
    }  # fmt: skip


def vocabulary(both: bool = True) -> Tensors:
    ids = torch.randperm(V, generator=torch.Generator().manual_seed(1))[:VD].sort().values
    mask = torch.zeros(V, dtype=torch.bool)
    mask[ids] = True
    return {"d2t": ids - torch.arange(VD), **({"t2d": mask} if both else {})}


def llama_fields(**fields: Any) -> Config:
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1, "hidden_size": H,
            "intermediate_size": INNER, "num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "vocab_size": V,
            "hidden_act": "silu", "rms_norm_eps": 1e-5, "max_position_embeddings": 128, "torch_dtype": "float16",
            **fields}  # fmt: skip


def without(config: Config, *names: str) -> Config:
    return {name: value for name, value in config.items() if name not in names}


def speculators_fields(kind: str, layer: Config, **fields: Any) -> Config:
    return {
        "architectures": [{"eagle3": "Eagle3Speculator", "mtp": "MTPDraftModel"}.get(kind, "EagleSpeculator")],
        "speculators_model_type": kind,
        "speculators_version": "0.5.0",
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5, "verifier_accept_k": 1}],
            "verifier": {"name_or_path": "org/verifier", "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": layer,
        **fields,
    }


def medusa_shapes(prefix: str = "", heads: int = 3, layers: int = 1, own: bool = True) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(heads):
        for block in range(layers):
            shapes[f"{prefix}{head}.{block}.linear.weight"] = (H, H)
            shapes[f"{prefix}{head}.{block}.linear.bias"] = (H,)
        if own:
            shapes[f"{prefix}{head}.{layers}.weight"] = (V, H)
    return shapes


def tie(tensors: Tensors) -> Tensors:
    """Medusa repeats one module per head: its blocks are the same."""
    return {name: tensors[name.replace(".1.linear", ".0.linear")] for name in tensors}


BASE = {"model.embed_tokens.weight": (V, H), "model.norm.weight": (H,), "lm_head.weight": (V, H)}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}  # fmt: skip
MEDUSA_CONFIG = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "org/base"}
MODELOPT = {"use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True,
            "use_mtp_layernorm": False}  # fmt: skip
BIASES = {f"layers.0.self_attn.{name}_proj.bias": (rows,) for name, rows in (("q", H), ("k", 16), ("v", 16), ("o", H))}
QKV_BIASES = {name: shape for name, shape in BIASES.items() if ".o_proj" not in name}
QWEN3_NORMS = {f"layers.0.self_attn.{name}_norm.weight": (8,) for name in "qk"}
FORGE = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": VD}


def all_examples() -> dict[str, Example]:
    eagle = {"fc.weight": (H, 2 * H), **shapes_of_layer("layers.0.", H)}
    eagle3 = eagle3_shapes()
    spec3 = eagle3_shapes("layers.0.")
    legacy = {
        name.replace("layers.0.", "transformer.").replace("fc.", "fusion_fc."): shape for name, shape in eagle.items()
    }
    hass = {**legacy, "fusion_fc.bias": (H,), "embedding_layernorm.weight": (H,), "pre_lm_head_layernorm.weight": (H,),
            "transformer.input_layernorm.weight": (H,)}  # fmt: skip
    words, embed = vocabulary(), {"embed_tokens.weight": (V, H)}
    layer = without(llama_fields(head_dim=8), "architectures", "torch_dtype")
    qwen = {**without(layer, "model_type"), "layer_types": ["sliding_attention"], "sliding_window": 4,
            "use_sliding_window": True, "max_window_layers": 0}  # fmt: skip
    verifier = {**layer, "model_type": "qwen3", "num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}
    mtp = {
        f"mtp_layers.0.{name}": shape
        for name, shape in {
            **shapes_of_layer("", H), "input_proj.weight": (H, 2 * H), "input_layernorm.weight": (H,),
            **{f"{kind}_layernorm.weight": (H,) for kind in ("token", "hidden", "final")},
            **{name.removeprefix("layers.0."): shape for name, shape in QWEN3_NORMS.items()},
        }.items()
    }  # fmt: skip
    return {
        "medusa v1.3, tied blocks, wrong count in the config": Example(
            "medusa", {**MEDUSA_CONFIG, "medusa_num_layers": 2}, tie(random_tensors(medusa_shapes(layers=2))),
            draft_medusa, "medusa_lm_head.pt"),
        "medusa of TGI": Example(
            "medusa", MEDUSA_CONFIG, random_tensors(medusa_shapes()), draft_medusa, "medusa_lm_head.safetensors"),
        "medusa version 2": Example(
            "medusa-v2", {**MEDUSA_CONFIG, "version": "2"}, random_tensors(medusa_shapes(own=False)), draft_medusa,
            "medusa_lm_head.safetensors"),
        "medusa 1.0": Example(
            "medusa-model", llama_fields(medusa_num_heads=3, medusa_num_layers=1, num_hidden_layers=2),
            random_tensors({**BASE, **medusa_shapes("medusa_head.")}), draft_medusa, shards=2),
        "medusa of ModelOpt": Example(
            "modelopt-medusa", llama_fields(medusa={"num_medusa_heads": 3, "num_medusa_layers": 1}),
            random_tensors({**BASE, **medusa_shapes("medusa_heads.")}), draft_medusa),
        "eagle, bias by default, own embedding": Example(
            "eagle", llama_fields(), random_tensors({**eagle, "fc.bias": (H,), **embed}), draft_eagle,
            "pytorch_model.bin"),
        "eagle of LLaMA-3": Example(
            "eagle", llama_fields(bias=False, rope_theta=500000.0), random_tensors(eagle), draft_eagle),
        "eagle of Qwen2, scaled": Example(
            "eagle", llama_fields(bias=True, qkv_bias=True, rope_scaling={"type": "linear", "factor": 4.0}),
            random_tensors({**eagle, "fc.bias": (H,), **QKV_BIASES}), draft_eagle),
        "eagle3, official": Example(
            "eagle3", without(llama_fields(draft_vocab_size=VD), "num_key_value_heads") | {"num_key_value_heads": 2},
            {**random_tensors(eagle3), **words}, draft_eagle3, "pytorch_model.bin"),
        "eagle3, whole vocabulary, another width": Example(
            "eagle3", llama_fields(draft_vocab_size=V, target_hidden_size=20),
            random_tensors({**eagle3_shapes(rows=V, read=20), **embed}), draft_eagle3, target_size=20),
        "eagle3 in shards of pickles": Example(
            "eagle3", llama_fields(draft_vocab_size=VD), {**random_tensors(eagle3), **words}, draft_eagle3,
            "pytorch_model.bin", shards=3),
        "eagle3 of ModelOpt": Example(
            "modelopt-eagle3",
            llama_fields(**FORGE, rope_theta=500000.0, rope_scaling=LLAMA3,
                         eagle_config={**MODELOPT, "eagle_aux_hidden_state_layer_ids": [1, 28, 15]}),
            {**random_tensors(eagle3), **vocabulary(both=False)}, draft_eagle3),
        "eagle3 of SpecForge, 3.1": Example(
            "specforge",
            llama_fields(**FORGE, head_dim=12, fc_norm=True, norm_output=True,
                         eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 3, 6, 9]}),
            {**random_tensors({**eagle3_shapes(layers=4, head_dim=12), **embed,
                               **{f"fc_norm.{i}.weight": (H,) for i in range(4)}}), **words}, draft_eagle3),
        "eagle3 of SpecForge, unmapped": Example(
            "specforge", llama_fields(**FORGE),
            {**random_tensors({**eagle3, **embed}), "d2t": torch.zeros(VD, dtype=torch.long),
             "t2d": torch.ones(V, dtype=torch.bool)}, draft_eagle3),
        "eagle3 for SGLang": Example(
            "sglang", llama_fields(**FORGE), {**random_tensors(eagle3), **words}, draft_eagle3),
        "speculators eagle3, converted": Example(
            "speculators-eagle3",
            speculators_fields("eagle3", layer, draft_vocab_size=VD, norm_before_residual=False,
                               eagle_aux_hidden_state_layer_ids=[2, 16, 29]),
            {**random_tensors(spec3), **words}, draft_eagle3),
        "speculators eagle3, every norm": Example(
            "speculators-eagle3",
            speculators_fields("eagle3", {**layer, "attention_bias": True}, draft_vocab_size=VD,
                               norm_before_residual=True, norm_before_fc=True, norm_output=True),
            {**random_tensors({**spec3, **BIASES, **embed, "input_norm.weight": (3 * H,)}), **words}, draft_eagle3),
        "speculators eagle3 of Qwen3, sliding": Example(
            "speculators-eagle3",
            speculators_fields("eagle3", qwen, draft_vocab_size=VD, norm_before_residual=True, fc_norm=True),
            {**random_tensors({**spec3, **QWEN3_NORMS, **{f"fc_norm.{i}.weight": (H,) for i in range(3)}}), **words},
            draft_eagle3),
        "speculators eagle": Example(
            "speculators-eagle", speculators_fields("eagle", layer, layernorms=False, fusion_bias=False),
            random_tensors(legacy), draft_eagle),
        "speculators mtp": Example(
            "speculators-mtp", speculators_fields("mtp", verifier, num_nextn_predict_layers=1),
            random_tensors(mtp), draft_mtp),
        "speculators HASS": Example(
            "speculators-eagle", speculators_fields("eagle", layer, layernorms=True, fusion_bias=True),
            random_tensors(hass), draft_eagle),
    }  # fmt: skip
