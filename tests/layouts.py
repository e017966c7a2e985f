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
    tokens: Tensor  # [1, T + 2] the tokens after the features', and two drafted


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
        torch.randint(0, V, (1, length + 2), generator=draw),
    )


# ----------------------------------------------------------------------------------------------- plain parts


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def frequencies(config: Config, size: int) -> Tensor:
    base, size = config.get("rope_theta", 10000.0), int(size * config.get("partial_rotary_factor", 1.0))
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


def rotate(x: Tensor, inverse: Tensor, first: int = 0) -> Tensor:
    """`[1, heads, T, d]`, positions first .. first+T-1."""
    angles = (first + torch.arange(x.shape[2], dtype=torch.float64))[:, None] * inverse
    cos, sin = angles.cos().float(), angles.sin().float()
    turned, kept = x[..., : 2 * len(inverse)], x[..., 2 * len(inverse) :]
    first, second = turned.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, kept], dim=-1)


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


def three_steps(
    run: Callable[[Tensor, Tensor], Tensor],
    score: Callable[[Tensor], Tensor],
    hidden: Tensor,
    tokens: Tensor,
    recycle: Callable[[Tensor], Tensor] | None = None,
) -> list[Tensor]:
    """Draft three tokens; what is recycled shows from the third on."""
    logits = []
    for step in range(3):
        outputs = run(tokens[:, : hidden.shape[1]], hidden)
        logits.append(score(outputs if step == 0 else outputs[:, -1:]))
        last = outputs[:, -1:]
        hidden = torch.cat([hidden, last if recycle is None else recycle(last)], 1)
    return logits


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

    return three_steps(run, score, target.features, target.tokens)


def canonical(tensors: Tensors) -> Tensors:
    """EAGLE-3 tensors under one set of names: `layers.0...`, `fc_norm.0`, ... without prefixes."""
    named = {}
    for name, tensor in tensors.items():
        name = name.removeprefix("model.")
        if name.startswith("midlayer."):
            rest = name.removeprefix("midlayer.")
            name = f"layers.{rest}" if rest[0].isdigit() else f"layers.0.{rest}"
        for index, part in enumerate(("low", "mid", "high")):
            name = name.replace(f"aux_norm_{part}.", f"fc_norm.{index}.")
        name = name.replace("encoder.output_norm_enc.", "hidden_norm.").replace("encoder.fc.", "fc.")
        named[name] = tensor
    return named


def draft_eagle3(example: Example, target: Target) -> list[Tensor]:
    """EAGLE-3 of every family."""
    tensors, config = canonical(example.tensors), example.config
    nested = config.get("eagle_config") or {}
    inner = config.get("transformer_layer_config", config)
    eps, size = inner.get("rms_norm_eps", 1e-6), len(tensors["norm.weight"])
    table = tensors.get("embed_tokens.weight", target.embedding)
    window = inner.get("sliding_window") if "sliding_attention" in inner.get("layer_types", []) else None
    count = 1 + max(int(name.split(".")[1]) for name in tensors if name.startswith("layers."))
    writer = config["architectures"][0] if "mask_hidden" in tensors else ""
    if writer in ("PEagleDraftModel", "LlamaEagle3DraftModel"):  # SpecForge's and NeMo's classes have no windows
        window = None
    if writer == "PEagleDraftModel":  # nor scaled rotary positions, in SpecForge's
        inner = without(inner, "rope_scaling")

    def normed(x: Tensor, name: str) -> Tensor:
        return rms(x, tensors[f"{name}.weight"], eps)

    def fuse(features: Tensor) -> Tensor:
        if config.get("fc_norm") or config.get("use_aux_norm"):
            parts = sum(name.startswith("fc_norm.") for name in tensors)
            features = torch.cat([normed(c, f"fc_norm.{i}") for i, c in enumerate(features.chunk(parts, -1))], -1)
        if nested.get("norm_before_fc") or config.get("norm_before_fc"):
            features = normed(features, "input_norm")
        return linear(features, tensors, "fc")

    def wide(embedded: Tensor, hidden: Tensor, layer: str) -> Tensor:
        read = normed(hidden, f"{layer}hidden_norm")
        both = torch.cat([normed(embedded, f"{layer}input_layernorm"), read], -1)
        x = read if config.get("norm_before_residual") else hidden
        x = x + attend(both, tensors, f"{layer}self_attn.", inner, window)
        return x + mlp(normed(x, f"{layer}post_attention_layernorm"), tensors, f"{layer}mlp.")

    def ordinary(x: Tensor, layer: str) -> Tensor:
        norm = "input_layernorm" if f"{layer}input_layernorm.weight" in tensors else "hidden_norm"
        x = x + attend(normed(x, f"{layer}{norm}"), tensors, f"{layer}self_attn.", inner, window)
        return x + mlp(normed(x, f"{layer}post_attention_layernorm"), tensors, f"{layer}mlp.")

    def run(tokens: Tensor, hidden: Tensor) -> Tensor:
        x = wide(table[tokens], hidden, "layers.0.")
        for index in range(1, count):
            layer = f"layers.{index}."
            if tensors[f"{layer}self_attn.q_proj.weight"].shape[1] == 2 * size:
                x = wide(table[tokens], x, layer)
            else:
                x = ordinary(x, layer)
        return x

    def score(x: Tensor) -> Tensor:
        rows = tensors.get("lm_head.weight", table if config.get("tie_word_embeddings") else target.lm_head)
        logits = normed(x, "norm") @ rows.T * config.get("logit_scale", 1.0)
        return in_order(logits, tensors)

    if "mask_hidden" in tensors:  # P-EAGLE: two mask tokens behind the text, in one forward
        mask = next(config[name] for name in ("mask_token_id", "pard_token", "ptd_token_id") if name in config)
        features = torch.cat([target.features, tensors["mask_hidden"].expand(1, 2, -1)], 1)
        tokens = torch.cat([target.tokens[:, :-2], torch.full((1, 2), mask)], 1)
        return list(score(run(tokens, fuse(features))).split([target.features.shape[1], 1, 1], 1))
    recycles_normed = config.get("norm_output") or nested.get("return_hidden_post_norm")
    recycle = (lambda x: normed(x, "norm")) if recycles_normed else None
    return three_steps(run, score, fuse(target.features), target.tokens, recycle)


def token_ids(tensors: Tensors) -> Tensor | None:
    """The target's token of each row of lm_head."""
    if "token_map" in tensors:
        return tensors["token_map"]
    if "d2t" not in tensors:
        return None
    offsets, rows = tensors["d2t"], torch.arange(len(tensors["d2t"]))
    are_ids = torch.equal(offsets, rows) and (len(rows) == V or int(tensors["t2d"][: len(rows)].sum()) == len(rows))
    return rows if are_ids else rows + offsets


def in_order(logits: Tensor, tensors: Tensors) -> Tensor:
    """Logits in the order of the target's tokens, which is ours."""
    ids = token_ids(tensors)
    return logits if ids is None else logits[..., ids.argsort()]


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

    return three_steps(run, lambda x: x @ target.lm_head.T, target.features, target.tokens)


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


def draft_vllm_medusa(example: Example, target: Target) -> list[Tensor]:
    """As vLLM computes its Medusa heads."""
    tensors, config = {n.removeprefix("medusa_heads."): t for n, t in example.tensors.items()}, example.config
    is_cut = config.get("truncated_vocab_size", config["vocab_size"]) < config["vocab_size"]
    logits = []
    for head in range(config["num_heads"]):
        x = target.features
        for layer in range(config["num_hidden_layers"]):
            x = x + torch.nn.functional.silu(linear(x, tensors, f"blocks.{head}.layers.{layer}"))
        rows = tensors["lm_head.weight"] if config.get("original_lm_head") else tensors[f"lm_heads.{head}.weight"]
        if is_cut and len(rows) > len(tensors["token_map"]):
            rows = rows[tensors["token_map"]]
        scores = x @ rows.T * config.get("logit_scale", 1.0)
        logits.append(in_order(scores, tensors) if is_cut else scores)
    return [torch.stack(logits)]


# ----------------------------------------------------------------------------------------------- blocks


def block_attention(x: Tensor, context: Tensor, tensors: Tensors, prefix: str, config: Config, seen: Tensor) -> Tensor:
    """Attention of a block `[1, B, H]` to context `[1, T, H]` and block; `seen [B, T + B]`."""
    heads, groups, size = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    both = torch.cat([context, x], 1)

    def split(states: Tensor, name: str, count: int, norm: str = "") -> Tensor:
        parts = linear(states, tensors, f"{prefix}{name}").reshape(1, -1, count, size)
        parts = rms(parts, tensors[f"{prefix}{norm}.weight"], config["rms_norm_eps"]) if norm else parts
        return parts.transpose(1, 2)

    inverse = frequencies(config, size)
    query = rotate(split(x, "q_proj", heads, "q_norm"), inverse, context.shape[1])
    key, value = rotate(split(both, "k_proj", groups, "k_norm"), inverse), split(both, "v_proj", groups)
    key, value = (t.repeat_interleave(heads // groups, dim=1) for t in (key, value))
    scores = (query @ key.transpose(-1, -2) / math.sqrt(size)).masked_fill(~seen, -math.inf)
    return linear((scores.softmax(-1) @ value).transpose(1, 2).reshape(1, x.shape[1], -1), tensors, f"{prefix}o_proj")


def block_seen(config: Config, layer: int, start: int) -> Tensor:
    """Which of `start` context tokens and of its block each slot sees, `[B, start + B]`, by its writer's rules."""
    nested, inner = config.get("dflash_config", {}), config.get("transformer_layer_config", config)
    place = torch.arange(start + config["block_size"])
    behind = place[start:, None] - place
    everything = torch.ones_like(behind, dtype=torch.bool)
    slides = nested.get("use_swa") or inner["layer_types"][layer] == "sliding_attention"
    window = nested.get("swa_window_size", inner.get("sliding_window"))
    if "transformer_layer_config" in config:
        if not slides:
            return everything
        block = everything if config["sliding_window_non_causal"] else behind >= 0
        return torch.where(place < start, place >= start - window, block)
    if config["model_type"] == "muse_glimmer_assistant":
        return behind.abs() <= window if slides else everything
    seen = behind.abs() < window if slides else everything
    is_causal = nested.get("causal_head") or nested.get("causal") or (slides and "selector_rank" in nested)
    return seen & (behind >= 0) if is_causal else seen


def draft_block(example: Example, target: Target) -> list[Tensor]:
    """A block behind the features: its logits, those of the likeliest chain by the Markov head, and confidences."""
    tensors, config = canonical(example.tensors), example.config
    nested, inner = config.get("dflash_config", {}), config.get("transformer_layer_config", config)
    eps, count, size = inner["rms_norm_eps"], inner["num_hidden_layers"], config["block_size"]
    shifted = config.get(
        "sample_from_anchor",
        nested.get("shift_label") or config["architectures"][0] in ("Qwen3DSparkModel", "DSparkDraftModel"),
    )
    table, rows = (tensors.get(f"{name}.weight") for name in ("embed_tokens", "lm_head"))
    table, rows = target.embedding if table is None else table, target.lm_head if rows is None else rows
    start = target.features.shape[1]
    anchor = target.tokens[0, start - 1]
    block = torch.full((1, size), nested.get("mask_token_id", config.get("mask_token_id")))
    block[0, 0] = anchor
    context = rms(linear(target.features, tensors, "fc"), tensors["hidden_norm.weight"], eps)
    x = table[block] * nested.get("input_embedding_scale", 1.0)
    for layer in range(count):
        name, seen = f"layers.{layer}.", block_seen(config, layer, start)
        y = rms(x, tensors[f"{name}input_layernorm.weight"], eps)
        y, kernel = convolved(y, tensors, f"{name}attention_conv")
        y = block_attention(y, context, tensors, f"{name}self_attn.", inner, seen)
        x = x + convolved(y, tensors, f"{name}attention_conv", kernel)[0]
        y, kernel = convolved(
            rms(x, tensors[f"{name}post_attention_layernorm.weight"], eps), tensors, f"{name}mlp_conv"
        )
        x = x + convolved(mlp(y, tensors, f"{name}mlp."), tensors, f"{name}mlp_conv", kernel)[0]
    hidden = rms(x, tensors["norm.weight"], eps)[0]
    if "candidate_selector.hidden_projection.weight" in tensors:
        return selected(tensors, config, hidden[0 if shifted else 1 :], rows, int(anchor))
    if "lilicorr.slot_embedding" in tensors:
        return correlated(tensors, config, hidden[1:], rows, table, context[0, -1])
    if "prefix_gru.weight_ih_l0" in tensors:
        return fallen(tensors, hidden[0 if nested["shift_label"] else 1 :], rows, table, int(anchor))
    base, ids, previous, state = logits_of(hidden, rows, config), token_ids(tensors), anchor, torch.tensor(0.0)
    chain, sure = [], []
    for slot in range(size):
        correction, embedded, state = markov(tensors, config, previous, hidden[slot], state)
        logits = base[slot] + correction
        if slot == 0 and not shifted:  # it predicts nothing
            continue
        chain.append(in_order(logits, tensors))
        if "confidence_head.proj.weight" in tensors:
            read = torch.cat([hidden[slot], embedded]) if config["confidence_head_with_markov"] else hidden[slot]
            sure.append(linear(read[None], tensors, "confidence_head.proj")[0, 0])
        previous = logits.argmax() if ids is None else ids[logits.argmax()]
    first = 0 if shifted else 1
    return [in_order(base[first:], tensors), torch.stack(chain), torch.stack(sure) if sure else torch.zeros(0)]


def convolved(x: Tensor, tensors: Tensors, name: str, kernel: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """A convolution over a block `[1, B, H]`; `kernel [B, taps, H]`: that of the output, else of the input."""
    if f"{name}.base_kernel" not in tensors:
        return x, None
    base = tensors[f"{name}.base_kernel"]
    taps, slots = base.shape[1], x.shape[1]
    after = kernel
    if kernel is None:
        change = linear(x, tensors, f"{name}.kernel_projection").reshape(slots, 2, taps, -1)
        both = base + change.repeat_interleave(base.shape[2] // change.shape[3], dim=3)
        kernel, after = both[:, 0], both[:, 1]
    out = torch.zeros_like(x)
    for slot in range(slots):
        for tap in range(min(taps, slot + 1)):
            out[:, slot] += kernel[slot, tap] * x[:, slot - tap]
    return out, after


def logits_of(hidden: Tensor, rows: Tensor, config: Config) -> Tensor:
    """Logits with z-lab's factor and bound."""
    nested = config.get("dflash_config", config)
    base = hidden @ rows.T * nested.get("output_multiplier", 1.0)
    bound = nested.get("final_logit_softcapping")
    return (base / bound).tanh() * bound if bound else base


def selected(tensors: Tensors, config: Config, hidden: Tensor, rows: Tensor, anchor: int) -> list[Tensor]:
    """Logits of a block, and the log-probabilities of the candidates along the greedy path, the best first."""
    nested, base = config.get("dflash_config", config), logits_of(hidden, rows, config)
    name, chain, previous = "candidate_selector", list[Tensor](), anchor
    books = [next(t for n, t in tensors.items() if n.startswith(f"{name}.{kind}")) for kind in ("predec", "succes")]
    for slot, logits in enumerate(base):
        unary, words = logits.topk(nested["selector_top_k"])
        context = books[0][previous] * (tensors[f"{name}.hidden_projection.weight"] @ hidden[slot])
        scores = (unary + books[1][words] @ context).log_softmax(0)
        chain.append(scores.sort(descending=True).values)
        previous = int(words[scores.argmax()])
    return [base, torch.stack(chain), torch.zeros(0)]


def fallen(tensors: Tensors, hidden: Tensor, rows: Tensor, table: Tensor, token: int) -> list[Tensor]:
    """Logits of a block, and those of the greedy chain by Domino's GRU, which leaves the first token's as they are."""
    base, chain = hidden @ rows.T, list[Tensor]()
    state = torch.zeros(tensors["prefix_gru.weight_hh_l0"].shape[1])
    for slot, logits in enumerate(base):
        new = (tensors["prefix_gru.weight_ih_l0"] @ table[token]).chunk(3)
        old = (tensors["prefix_gru.weight_hh_l0"] @ state).chunk(3)
        reset, keep = (new[0] + old[0]).sigmoid(), (new[1] + old[1]).sigmoid()
        state = keep * state + (1 - keep) * (new[2] + reset * old[2]).tanh()
        if slot:
            inner = linear(torch.cat([hidden[slot], state]), tensors, "embed_proj.0")
            logits = logits + linear(torch.nn.functional.silu(inner), tensors, "embed_proj.2")
        chain.append(logits)
        token = int(logits.argmax())
    return [base, torch.stack(chain), torch.zeros(0)]


def correlated(
    tensors: Tensors, config: Config, hidden: Tensor, rows: Tensor, table: Tensor, context: Tensor
) -> list[Tensor]:
    """As `selected`, by LiLiCorr's transformer over the candidates."""
    nested, eps = config["dflash_config"], config["rms_norm_eps"]
    tensors = {name.removeprefix("lilicorr."): tensor for name, tensor in tensors.items()}
    base = hidden @ rows.T
    count, heads, block = nested["lilicorr_candidate_topk"], nested["lilicorr_num_heads"], config["block_size"]
    probs, words = base.log_softmax(-1).topk(count)
    states, slots = [], []

    def updown(x: Tensor, name: str) -> Tensor:
        return linear(torch.nn.functional.silu(linear(x, tensors, f"{name}.up_proj")), tensors, f"{name}.down_proj")

    for slot in range(len(base)):
        for rank in range(count):
            p = probs[slot, rank]
            known = torch.stack([p, p.exp(), p - probs[slot].max(), torch.tensor(rank / (count - 1)),
                                 torch.tensor(float(rank == 0))])  # fmt: skip
            known = (known - known.mean()) / (known.var(unbiased=False) + 1e-5).sqrt()
            known = known * tensors["feature_norm.weight"] + tensors["feature_norm.bias"]
            token = table[words[slot, rank]]
            state = linear(token, tensors, "token_proj") if "token_proj.weight" in tensors else token
            state = state + linear(hidden[slot], tensors, "pass_hidden_proj") + updown(known, "feature_mlp")
            states.append(state + tensors["slot_embedding"][0, 0, slot, 0] + tensors["rank_embedding"][0, 0, 0, rank])
            slots.append(slot)
    x, place = torch.stack(states), torch.tensor(slots)
    behind = place[:, None] - place
    bias = tensors["relative_slot_bias"][:, behind + block - 1] + tensors["same_slot_bias"][:, None, None] * (
        behind == 0
    )
    for layer in (f"layers.{number}" for number in range(nested["lilicorr_num_layers"])):
        y = rms(x, tensors[f"{layer}.attn_norm.weight"], eps)
        y = y @ tensors[f"{layer}.attn.in_proj_weight"].T + tensors[f"{layer}.attn.in_proj_bias"]
        q, k, v = (part.reshape(len(x), heads, -1).transpose(0, 1) for part in y.chunk(3, -1))
        y = ((q @ k.transpose(1, 2)) / math.sqrt(q.shape[-1]) + bias).softmax(-1) @ v
        x = x + linear(y.transpose(0, 1).reshape(len(x), -1), tensors, f"{layer}.attn.out_proj")
        x = x + updown(rms(x, tensors[f"{layer}.mlp_norm.weight"], eps), f"{layer}.mlp")
    x = rms(x, tensors["output_norm.weight"], eps)
    root = rms(linear(context, tensors, "context_proj"), tensors["anchor_norm.weight"], eps)
    mixed = torch.cat([x, root.expand_as(x), x * root], -1)
    mixed = torch.nn.functional.silu(linear(mixed, tensors, "factor_input_proj")).reshape(len(base), count, -1)

    def unit(y: Tensor) -> Tensor:
        return y / y.norm(dim=-1, keepdim=True).clamp(min=nested["lilicorr_vector_eps"])

    inwards, outwards = (unit(linear(mixed, tensors, f"{name}_head")) for name in ("in", "out"))
    at, chain = unit(linear(root, tensors, "anchor_out_head")), []
    for slot in range(len(base)):
        scores = (nested["lilicorr_logit_scale"] * inwards[slot] @ at).log_softmax(0)
        chain.append(scores.sort(descending=True).values)
        at = outwards[slot, scores.argmax()]
    return [base, torch.stack(chain), torch.zeros(0)]


def markov(
    tensors: Tensors, config: Config, previous: Tensor, hidden: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """What a Markov head adds to the logits, its embedding of the previous token, and its next state."""
    if "markov_head.markov_w1.weight" not in tensors:
        return torch.tensor(0.0), torch.zeros(0), state
    kind, embedded = config["markov_head_type"], tensors["markov_head.markov_w1.weight"][previous]
    out = embedded
    if kind == "gated":
        both = torch.cat([hidden, embedded])[None]
        out = embedded * linear(both, tensors, "markov_head.gate_proj")[0].sigmoid()
    if kind == "rnn":
        state = state.expand_as(embedded)
        read = torch.cat([state, embedded, hidden])[None]
        gate, new, out = linear(read, tensors, "markov_head.joint_proj")[0].chunk(3)
        state, out = gate.sigmoid() * state + (1 - gate.sigmoid()) * new.tanh(), out.tanh()
    return out @ tensors["markov_head.markov_w2.weight"].T, embedded, state


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


def vocabulary(both: bool = True, by_frequency: bool = False) -> Tensors:
    ids = torch.randperm(V, generator=torch.Generator().manual_seed(1))[:VD]
    ids = ids if by_frequency else ids.sort().values
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


HALF_ROTATED = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
ROTATED = {"rope_theta": 5e5, "rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": [1, 1, 2]}}
FC_NORMS = {f"fc_norm.{i}.weight": (H,) for i in range(3)}


def second_layer(norm: str = "input_layernorm", width: int = H, number: int = 1) -> dict[str, tuple[int, ...]]:
    prefix = f"layers.{number}."
    return {**shapes_of_layer(prefix, width), f"{prefix}{norm}.weight": (H,)}


def newer_examples() -> dict[str, Example]:
    """Layouts of 2026."""
    plain, layers0 = eagle3_shapes(), eagle3_shapes("layers.0.")
    frequent, words = vocabulary(by_frequency=True), vocabulary()
    embed = {"embed_tokens.weight": (V, H)}
    masked = {**embed, "mask_hidden": (1, 1, 3 * H)}
    whole = {name: shape for name, shape in eagle3_shapes(rows=V).items() if name != "lm_head.weight"}
    forge = {"architectures": ["LlamaForCausalLMEagle3"]}
    nemo = {
        f"model.{name}": shape for name, shape in {**layers0, **embed, **FC_NORMS}.items() if "lm_head" not in name
    }
    nemo |= {"lm_head.weight": (VD, H)}
    nemo_fields = llama_fields(architectures=["LlamaEagle3DraftModel"], num_hidden_layers=28, draft_vocab_size=VD,
                               target_hidden_size=H, fc_norm=True, parallel_drafting=False,
                               tie_word_embeddings=False)  # fmt: skip
    five = {**eagle3_shapes("layers.0.", rows=V, layers=5), **embed, **QWEN3_NORMS}
    deepspec = {**llama_fields(architectures=["Qwen3Eagle3Model"], target_layer_ids=[1, 3, 5, 7, 9], head_dim=8,
                               layer_types=["full_attention"] * 2, num_target_layers=12),
                "model_type": "qwen3"}  # fmt: skip
    deep2 = {
        **five, **second_layer("hidden_norm", 2 * H), "layers.1.input_layernorm.weight": (H,),
        **{name.replace("layers.0", "layers.1"): shape for name, shape in QWEN3_NORMS.items()},
    }  # fmt: skip
    megatron = {
        name.replace("layers.", "midlayer."): shape
        for name, shape in {**layers0, **second_layer("hidden_norm")}.items()
    }
    medusa = {f"blocks.{i}.layers.{j}.weight": (H, H) for i in range(2) for j in range(2)}
    medusa_fields = {"model_type": "medusa", "architectures": ["MedusaModel"], "hidden_size": H, "vocab_size": V,
                     "num_heads": 2, "num_hidden_layers": 2}  # fmt: skip
    token_map = torch.randperm(V, generator=torch.Generator().manual_seed(5))[:VD]
    layer = without(llama_fields(head_dim=8, num_hidden_layers=2), "architectures", "torch_dtype")
    return {
        "eagle3.1 of TensorRT-LLM": Example(
            "modelopt-eagle3", llama_fields(**FORGE, eagle_config={**MODELOPT, "return_hidden_post_norm": True}),
            {**random_tensors(plain), **vocabulary(both=False)}, draft_eagle3),
        "eagle3 of NVIDIA for gpt-oss": Example(
            "modelopt-eagle3", llama_fields(
                **forge, draft_vocab_size=None,
                eagle_config={**MODELOPT, "norm_before_fc": True, "eagle_aux_hidden_state_layer_ids": [2, 5, 8]}),
            random_tensors({**whole, "input_norm.weight": (3 * H,)}), draft_eagle3),
        "eagle3, norm_before_fc at the top": Example(
            "specforge", llama_fields(**FORGE, norm_before_fc=True),
            {**random_tensors({**plain, **embed, "input_norm.weight": (3 * H,)}), **words}, draft_eagle3),
        "eagle3 of ModelOpt, by frequency": Example(
            "modelopt-eagle3", llama_fields(**FORGE, eagle_config={**MODELOPT, "next_layer_regular": True}),
            {**random_tensors(layers0), **{"d2t": frequent["d2t"]}}, draft_eagle3),
        "eagle3 of NeMo": Example("nemo-eagle3", {**nemo_fields, "norm_output": False},
                                  {**random_tensors(nemo), **frequent}, draft_eagle3),
        "eagle3.1 of NeMo": Example("nemo-eagle3", {**nemo_fields, "norm_output": True},
                                    {**random_tensors(nemo), **frequent}, draft_eagle3),
        "eagle3 of NeMo, exported for vLLM": Example(
            "specforge", {**nemo_fields, **forge, "norm_output": False},
            {**random_tensors({n.removeprefix("model."): s for n, s in nemo.items()}), **frequent}, draft_eagle3),
        "eagle3, tied to its embedding": Example(
            "specforge", llama_fields(**forge, draft_vocab_size=V, tie_word_embeddings=True),
            random_tensors({**whole, **embed}), draft_eagle3),
        "eagle3 of AngelSlim": Example(
            "specforge", llama_fields(**FORGE, tie_word_embeddings=True),
            {**random_tensors({**plain, **embed}), **words}, draft_eagle3),
        "eagle3 of TorchSpec": Example(
            "sglang", llama_fields(**FORGE, use_aux_norm=True),
            {**random_tensors({**plain, **{f"aux_norm_{part}.weight": (H,) for part in ("low", "mid", "high")}}),
             **words}, draft_eagle3),
        "eagle3 of verl-SpeCo": Example(
            "specforge", llama_fields(**FORGE, eagle_aux_hidden_state_layer_ids=[1, 3, 5],
                                      eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}),
            {**random_tensors({**plain, **embed}), "d2t": torch.arange(VD), "t2d": torch.arange(V) < VD},
            draft_eagle3),
        "eagle3, d2t of the whole vocabulary": Example(
            "sglang", llama_fields(**forge, draft_vocab_size=V),
            {**random_tensors(eagle3_shapes(rows=V)), "d2t": torch.arange(V), "t2d": torch.ones(V, dtype=torch.bool)},
            draft_eagle3),
        "eagle3 for Llama 4, rotated in part": Example(
            "sglang", llama_fields(**FORGE, intermediate_size_mlp=INNER, partial_rotary_factor=0.5, logit_scale=0.5)
            | {"intermediate_size": 2 * INNER, "model_type": "llama4_text"},
            {**random_tensors(plain), **words}, draft_eagle3),
        "eagle3 for a vision-language target": Example(
            "sglang", llama_fields(**FORGE, **ROTATED, num_aux_hidden_states=3), {**random_tensors(plain), **words},
            draft_eagle3),
        "eagle3 of DeepSpec": Example("deepspec-eagle3", deepspec, random_tensors(five), draft_eagle3),
        "eagle3 of DeepSpec, two layers": Example("deepspec-eagle3", deepspec, random_tensors(deep2), draft_eagle3),
        "eagle3 of ModelOpt, two layers": Example(
            "modelopt-eagle3", llama_fields(**FORGE, eagle_config=MODELOPT) | {"num_hidden_layers": 2},
            {**random_tensors({**layers0, **second_layer()}), **vocabulary(both=False)}, draft_eagle3),
        "eagle3 of SGLang, three layers": Example(
            "sglang", llama_fields(**FORGE) | {"num_hidden_layers": 3},
            {**random_tensors({**layers0, **second_layer("hidden_norm"), **second_layer("hidden_norm", number=2)}),
             **words}, draft_eagle3),
        "eagle3 of Megatron, two layers": Example(
            "modelopt-eagle3", llama_fields(architectures=["LlamaForCausalLMEagle3Deep"], draft_vocab_size=V,
                                            eagle_config=MODELOPT),
            random_tensors({**megatron, "lm_head.weight": (V, H)}), draft_eagle3),
        "speculators eagle3, two layers": Example(
            "speculators-eagle3",
            speculators_fields("eagle3", layer, draft_vocab_size=VD, norm_before_residual=True, norm_output=True),
            {**random_tensors({**layers0, **second_layer()}), **words}, draft_eagle3),
        "speculators peagle": Example(
            "speculators-peagle",
            speculators_fields("peagle", layer, draft_vocab_size=VD, mask_token_id=V - 1, norm_before_residual=True,
                               norm_before_fc=True, norm_output=True),
            {**random_tensors({**layers0, **second_layer(), **masked, "input_norm.weight": (3 * H,)}), **words},
            draft_eagle3),
        "speculators peagle of Qwen3, sliding": Example(
            "speculators-peagle",
            speculators_fields("peagle", {**without(layer, "model_type"), "layer_types": ["sliding_attention"],
                                          "sliding_window": 4, "use_sliding_window": True, "max_window_layers": 0},
                               draft_vocab_size=VD, mask_token_id=3, fc_norm=True),
            {**random_tensors({**layers0, **QWEN3_NORMS, **masked, **FC_NORMS}), **words}, draft_eagle3),
        "peagle of SpecForge": Example(
            "specforge-peagle",
            llama_fields(architectures=["PEagleDraftModel"], draft_vocab_size=VD, mask_token_id=7, rope_theta=5e5,
                         norm_before_residual=True, rope_scaling=LLAMA3, layer_types=["sliding_attention"] * 2,
                         sliding_window=2),
            {**random_tensors({**layers0, **second_layer(), **masked}), "d2t": torch.zeros(VD, dtype=torch.long),
             "t2d": torch.ones(V, dtype=torch.bool)}, draft_eagle3),
        "peagle of NeMo": Example(
            "nemo-peagle", {**nemo_fields, "parallel_drafting": True, "num_depths": 4, "mask_token_id": 9,
                            "layer_types": ["sliding_attention"], "sliding_window": 2},
            {**random_tensors({**nemo, "mask_hidden": (1, 1, 3 * H)}), **frequent}, draft_eagle3),
        "peagle of NeMo, exported for vLLM": Example(
            "peagle", {**without(nemo_fields, "fc_norm"), **forge, "parallel_drafting": True, "pard_token": 9},
            {**random_tensors({**layers0, **masked}), **frequent}, draft_eagle3),
        "medusa of vLLM": Example(
            "vllm-medusa", medusa_fields,
            random_tensors({**medusa, **{f"lm_heads.{i}.weight": (V, H) for i in range(2)}}),
            draft_vllm_medusa),
        "medusa of vLLM, cut vocabulary": Example(
            "vllm-medusa", {**medusa_fields, "truncated_vocab_size": VD, "medusa_fc_bias": True, "logit_scale": 0.5},
            {**random_tensors({**medusa, **{n.replace("weight", "bias"): (H,) for n in medusa},
                               "lm_heads.0.weight": (V, H), "lm_heads.1.weight": (VD, H)}), "token_map": token_map},
            draft_vllm_medusa),
        "medusa of vLLM, one lm_head": Example(
            "vllm-medusa", {**medusa_fields, "original_lm_head": True},
            random_tensors({**{f"medusa_heads.{n}": s for n, s in medusa.items()}, "lm_head.weight": (V, H)}),
            draft_vllm_medusa),
    }  # fmt: skip


RANK = 6


def block_shapes(layers: int = 2, read: int = 2, bias: bool = False) -> dict[str, tuple[int, ...]]:
    """Tensors of a block head's layers; no embedding, no lm_head."""
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (H, read * H), "hidden_norm.weight": (H,), "norm.weight": (H,)}
    for number in range(layers):
        parts = {**shapes_of_layer("layers.0.", H), "layers.0.input_layernorm.weight": (H,), **QWEN3_NORMS}
        parts |= BIASES if bias else {}
        shapes |= {name.replace("layers.0.", f"layers.{number}."): shape for name, shape in parts.items()}
    return shapes


def markov_shapes(kind: str, rows: int = V, sure: int = RANK) -> dict[str, tuple[int, ...]]:
    """Tensors of a Markov head and a confidence head; `sure` is what the latter reads in addition."""
    shapes: dict[str, tuple[int, ...]] = {
        "markov_head.markov_w1.weight": (V, RANK), "markov_head.markov_w2.weight": (rows, RANK),
        "confidence_head.proj.weight": (1, H + sure), "confidence_head.proj.bias": (1,),
    }  # fmt: skip
    if kind == "gated":
        shapes |= {"markov_head.gate_proj.weight": (RANK, H + RANK), "markov_head.gate_proj.bias": (RANK,)}
    if kind == "rnn":
        shapes |= {
            "markov_head.joint_proj.weight": (3 * RANK, H + 2 * RANK),
            "markov_head.joint_proj.bias": (3 * RANK,),
        }
    return shapes


def dflash2_shapes(taps: int = 2, group: int = 8, weight: str = "") -> dict[str, tuple[int, ...]]:
    """Tensors of DFlash2's convolutions in two layers, and of its candidate selector."""
    shapes: dict[str, tuple[int, ...]] = {"candidate_selector.hidden_projection.weight": (RANK, H)}
    shapes |= {f"candidate_selector.{kind}_codebook{weight}": (V, RANK) for kind in ("predecessor", "successor")}
    for part in (f"layers.{layer}.{kind}_conv" for layer in range(2) for kind in ("attention", "mlp")):
        shapes |= {f"{part}.base_kernel": (2, taps, H), f"{part}.kernel_projection.weight": (2 * taps * H // group, H)}
    return shapes


def lilicorr_shapes(size: int, block: int = 5, count: int = 4, heads: int = 2) -> dict[str, tuple[int, ...]]:
    """Tensors of LiLiCorr's transformer, of one layer."""

    def updown(name: str, outer: int, inner: int) -> dict[str, tuple[int, ...]]:
        return {f"{name}.up_proj.weight": (inner, outer), f"{name}.up_proj.bias": (inner,),
                f"{name}.down_proj.weight": (size, inner), f"{name}.down_proj.bias": (size,)}  # fmt: skip

    linears = {"pass_hidden_proj": (size, H), "context_proj": (size, H), "layers.0.attn.out_proj": (size, size),
               "factor_input_proj": (size, 3 * size), "out_head": (6, size), "in_head": (6, size),
               "anchor_out_head": (6, size), **({} if size == H else {"token_proj": (size, H)})}  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {
        "feature_norm.weight": (5,), "feature_norm.bias": (5,), "slot_embedding": (1, 1, block - 1, 1, size),
        "rank_embedding": (1, 1, 1, count, size), "relative_slot_bias": (heads, 2 * block - 1),
        "same_slot_bias": (heads,), "layers.0.attn_norm.weight": (size,), "layers.0.mlp_norm.weight": (size,),
        "layers.0.attn.in_proj_weight": (3 * size, size), "layers.0.attn.in_proj_bias": (3 * size,),
        "output_norm.weight": (size,), "anchor_norm.weight": (size,),
        **updown("feature_mlp", 5, size), **updown("layers.0.mlp", size, 2 * size),
        **{f"{name}.weight": shape for name, shape in linears.items()},
        **{f"{name}.bias": shape[:1] for name, shape in linears.items()},
    }  # fmt: skip
    return {f"lilicorr.{name}": shape for name, shape in shapes.items()}


DOMINO = {"projector_type": "domino", "gru_hidden_dim": 5, "emb_dim": RANK, "pure_draft_prefix_len": 1}
LILICORR = {"lilicorr_enabled": True, "lilicorr_candidate_topk": 4, "lilicorr_hidden_size": 16,
            "lilicorr_num_layers": 1, "lilicorr_num_heads": 2, "lilicorr_mlp_ratio": 2.0, "lilicorr_factor_dim": 6,
            "lilicorr_vector_eps": 1e-6, "lilicorr_logit_scale": 7.0}  # fmt: skip
DFLASH2 = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": RANK, "selector_top_k": 5}
FULL, SLIDES = "full_attention", "sliding_attention"
SURE = {"enable_confidence_head": True, "confidence_head_with_markov": True, "markov_rank": RANK}


def block_fields(*types: str, window: int | None = None, **fields: Any) -> Config:
    """A Qwen3 config as transformers 5 saves it."""
    return {"model_type": "qwen3", "num_hidden_layers": len(types), "hidden_size": H, "intermediate_size": INNER,
            "num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "head_dim": 8, "vocab_size": V,
            "hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 128, "attention_bias": False,
            "layer_types": list(types), "sliding_window": window, "use_sliding_window": window is not None,
            "max_window_layers": 28, "rope_theta": 10000.0, "tie_word_embeddings": False,
            **fields}  # fmt: skip


def zlab_fields(*types: str, window: int | None = None, nested: Config | None = None, **fields: Any) -> Config:
    return {**block_fields(*types, window=window, architectures=["DFlashDraftModel"], block_size=5,
                           num_target_layers=32, auto_map={"AutoModel": "dflash.DFlashDraftModel"},
                           dflash_config={"mask_token_id": V - 1, "target_layer_ids": [1, 17], **(nested or {})}),
            **fields}  # fmt: skip


def deepspec_fields(**fields: Any) -> Config:
    return {**block_fields(FULL, architectures=["Qwen3DSparkModel"], block_size=4, mask_token_id=V - 1,
                           target_layer_ids=[-1, 17], num_anchors=4, num_target_layers=32, markov_rank=0,
                           enable_confidence_head=False),
            **fields}  # fmt: skip


def speculators_block_fields(kind: str, layer: Config, **fields: Any) -> Config:
    own = {"aux_hidden_state_layer_ids": [2, 18], "block_size": 4, "mask_token_id": V - 1, "draft_vocab_size": V,
           "sample_from_anchor": kind == "dspark", "sliding_window_non_causal": False, "target_hidden_size": None,
           "speculators_version": "0.9.0", "tie_word_embeddings": False}  # fmt: skip
    names = {"dflash": "DFlash", "dflash2": "DFlash2", "dspark": "DSpark"}
    made = {"architectures": [f"{names[kind]}DraftModel"], "auto_map": {"": f"config.{names[kind]}SpeculatorConfig"}}
    return {**speculators_fields(kind, layer, **own), **made, **fields}


def block_examples() -> dict[str, Example]:
    """Block heads: DFlash, JetSpec, DSpark."""
    two, words, frequent = block_shapes(), vocabulary(), vocabulary(by_frequency=True)
    rows, whole = {"lm_head.weight": (VD, H)}, {"embed_tokens.weight": (V, H), "lm_head.weight": (V, H)}
    one = {**block_shapes(1), **whole}
    mixed = {"window": 4, "nested": {"causal": False}}
    domino: dict[str, tuple[int, ...]] = {
        "prefix_gru.weight_ih_l0": (3 * 5, H), "prefix_gru.weight_hh_l0": (3 * 5, 5),
        "embed_proj.0.weight": (RANK, H + 5), "embed_proj.2.weight": (V, RANK),
    }  # fmt: skip
    nemo = {"architectures": ["Qwen3DFlashDraftModel"], "rope_scaling": LLAMA3, "attention_bias": True}
    kinds = {
        f"deepspec, {kind}": Example(
            "deepspec", deepspec_fields(**SURE, markov_head_type=kind),
            random_tensors({**one, **markov_shapes(kind)}), draft_block)
        for kind in ("vanilla", "gated", "rnn")
    }  # fmt: skip
    late = {"sample_from_anchor": False, "draft_vocab_size": VD, "markov_head_type": "rnn"}
    return {
        "dflash": Example("dflash", zlab_fields(FULL, FULL, rope_theta=5e5), random_tensors(two), draft_block),
        "dflash, windows": Example(
            "dflash", zlab_fields(SLIDES, FULL, **mixed), random_tensors(two), draft_block),
        "dflash, windows of every layer": Example(
            "dflash", zlab_fields(FULL, FULL, nested={"use_swa": True, "swa_window_size": 3}), random_tensors(two),
            draft_block),
        "dflash, scaled, with biases": Example(
            "dflash", zlab_fields(FULL, FULL, **nemo),
            {f"model.{name}": t for name, t in random_tensors(block_shapes(bias=True)).items()}, draft_block),
        "dflash, factors": Example(
            "dflash", zlab_fields(FULL, FULL, nested={
                "input_embedding_scale": 2.0, "output_multiplier": 0.5, "final_logit_softcapping": 3.0}),
            random_tensors(two), draft_block),
        "dflash of vLLM, cut vocabulary": Example(
            "dflash", zlab_fields(FULL, FULL, draft_vocab_size=VD),
            {**random_tensors({**two, **rows}), "d2t": frequent["d2t"]}, draft_block),
        "jetspec": Example(
            "jetspec", zlab_fields(FULL, FULL, nested={"causal_head": True}), random_tensors(two), draft_block),
        "jetspec, both ways": Example(
            "jetspec", zlab_fields(FULL, FULL, nested={"causal_head": False}), random_tensors(two), draft_block),
        "jetspec, windows": Example(
            "jetspec", zlab_fields(FULL, SLIDES, window=4, nested={"causal_head": True}), random_tensors(two),
            draft_block),
        "dflash2": Example(
            "dflash2", zlab_fields(FULL, FULL, architectures=["DFlash2DraftModel"], nested=DFLASH2),
            random_tensors({**two, **dflash2_shapes()}), draft_block),
        "dflash2, windows, factors": Example(
            "dflash2",
            zlab_fields(SLIDES, FULL, window=4, nested={
                **DFLASH2, "conv_kernel_size": 3, "conv_group_size": 16, "input_embedding_scale": 2.0,
                "output_multiplier": 0.5, "final_logit_softcapping": 3.0}),
            random_tensors({**two, **dflash2_shapes(3, 16, ".weight")}), draft_block),
        **{
            f"domino, {name}": Example(
                "domino", zlab_fields(FULL, FULL, nested={**DOMINO, "shift_label": shifted}),
                {f"model.{n}" if shifted else n: t for n, t in random_tensors({**two, **domino}).items()}, draft_block)
            for name, shifted in (("from the root", True), ("behind the root", False))
        },
        "lilicorr": Example(
            "lilicorr", zlab_fields(FULL, FULL, architectures=["LiLiCorrDraftModel"], nested=LILICORR),
            random_tensors({**two, **lilicorr_shapes(16)}), draft_block),
        "lilicorr, with convolutions": Example(
            "lilicorr",
            zlab_fields(FULL, FULL, nested={**LILICORR, "lilicorr_hidden_size": 0, "conv_kernel_size": 2,
                                            "conv_group_size": 8}),
            random_tensors({**two, **lilicorr_shapes(H),
                            **{n: s for n, s in dflash2_shapes().items() if "_conv." in n}}), draft_block),
        "speculators dflash2": Example(
            "speculators-dflash2",
            speculators_block_fields("dflash2", block_fields(SLIDES, FULL, window=4), **DFLASH2,
                                     sliding_window_non_causal=True),
            random_tensors({**two, **dflash2_shapes()}), draft_block),
        "muse-glimmer": Example(
            "muse-glimmer",
            {name: value for name, value in block_fields(
                SLIDES, FULL, window=4, architectures=["MuseGlimmerAssistantModel"], block_size=5,
                mask_token_id=V - 1, target_layer_ids=[0, 16]).items() if name != "vocab_size"}
            | {"model_type": "muse_glimmer_assistant"},
            {name.replace("hidden_norm", "encoder.output_norm_enc").replace("fc.", "encoder.fc."): tensor
             for name, tensor in random_tensors(two).items()}, draft_block),
        **kinds,
        "deepspec, plain": Example("deepspec", deepspec_fields(), random_tensors(one), draft_block),
        "deepspec, no markov": Example(
            "deepspec", deepspec_fields(enable_confidence_head=True, confidence_head_with_markov=False),
            random_tensors({**one, **{n: s for n, s in markov_shapes("", sure=0).items() if "confidence" in n}}),
            draft_block),
        "speculators dflash": Example(
            "speculators-dflash", speculators_block_fields("dflash", block_fields(FULL, FULL)), random_tensors(two),
            draft_block),
        "speculators dflash, windows, cut vocabulary": Example(
            "speculators-dflash",
            speculators_block_fields("dflash", block_fields(SLIDES, FULL, window=4), draft_vocab_size=VD,
                                     sample_from_anchor=True),
            {**random_tensors({**two, **rows}), **words}, draft_block),
        "speculators dflash, open windows": Example(
            "speculators-dflash",
            speculators_block_fields("dflash", block_fields(SLIDES, SLIDES, window=4), sliding_window_non_causal=True),
            random_tensors(two), draft_block),
        "speculators dspark": Example(
            "speculators-dspark",
            speculators_block_fields("dspark", block_fields(FULL, FULL), **SURE, markov_head_type="vanilla"),
            random_tensors({**two, **markov_shapes("vanilla")}), draft_block),
        "speculators dspark, rnn, cut vocabulary": Example(
            "speculators-dspark", speculators_block_fields("dspark", block_fields(FULL, FULL), **SURE, **late),
            {**random_tensors({**two, **rows, **markov_shapes("rnn", rows=VD)}), **words}, draft_block),
        "speculators dspark, unsure": Example(
            "speculators-dspark",
            speculators_block_fields("dspark", block_fields(FULL, FULL), **{**SURE, "enable_confidence_head": False},
                                     markov_head_type="gated"),
            random_tensors({**two, **{n: s for n, s in markov_shapes("gated").items() if "confidence" not in n}}),
            draft_block),
    }  # fmt: skip


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
        **newer_examples(),
        **block_examples(),
    }  # fmt: skip
