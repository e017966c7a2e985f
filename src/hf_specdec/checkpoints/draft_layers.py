"""Layer configs of EAGLE heads, MTP modules and block heads: read from a checkpoint, and written.

Tensors take precedence over the config, which is often a copy of the target's.

Sources: the model code of vLLM (`llama_eagle3.py`), SGLang (`llama_eagle3.py`), TensorRT-LLM
(`modeling_speculative.py`), speculators, ModelOpt, SpecForge, NeMo Automodel and DeepSpec.
"""

from __future__ import annotations

import re
from typing import Any

from transformers import LlamaConfig, Qwen3Config

from hf_specdec.checkpoints.layout import Layout, Shapes, lookup
from hf_specdec.errors import CheckpointFormatError
from hf_specdec.heads.eagle import EagleHead
from hf_specdec.heads.eagle3 import Eagle3Head
from hf_specdec.heads.schema import THIRD_PARTY_LAYER, checked
from hf_specdec.records import Fields, shortened

LAYER_FAMILIES = {"llama": LlamaConfig, "qwen3": Qwen3Config}
"""Config classes of draft layers, by the `model_type` of a layer config inside the checkpoint's config."""

LAYER_FIELDS = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
                "hidden_act", "rms_norm_eps", "max_position_embeddings", "mlp_bias")  # fmt: skip
"""Fields that a Llama or Qwen3 config and ours have in common. `mlp_bias` is among them only to be checked."""

VERIFIER = "speculators_config.verifier.name_or_path"
"""Path of the target's name in the configs of speculators."""

PLAIN_THETA = 10000.0
"""Rotary base that EAGLE's classes for scaled rotary positions use, regardless of the config."""


def layer_fields(layout: Layout, fields: Fields, shapes: Shapes, *, windows: bool = True) -> Fields:
    """Return the config fields that heads with draft layers have in common, by our names.

    Given are the checkpoint's config and the shapes of its tensors by our names. `windows` says whether to read the
    sliding window; block heads have one per layer.
    """
    nested = bool(layout.layer_config)
    layer: Any = lookup(fields, layout.layer_config) if nested else fields
    if not isinstance(layer, dict):
        raise CheckpointFormatError(f"`{layout.layer_config}` is {type(layer).__name__}, expected an object.")
    kind = layer.get("model_type", "llama" if layout.head_class is EagleHead else "qwen3") if nested else "llama"
    if kind not in LAYER_FAMILIES:
        raise CheckpointFormatError(
            f"The draft layer has model_type {shortened(kind)}, expected {' or '.join(LAYER_FAMILIES)}."
        )
    config = LAYER_FAMILIES[kind](num_hidden_layers=1, **_checked_layer(layout, layer, windows and nested))
    found = {name: getattr(config, name) for name in LAYER_FIELDS if hasattr(config, name)}
    rope = {name: value for name, value in config.rope_parameters.items() if name != "type"}  # old name of rope_type
    if isinstance(layer.get("partial_rotary_factor"), int | float):
        rope.setdefault("partial_rotary_factor", layer["partial_rotary_factor"])

    first = "midlayer." if layout.head_class is Eagle3Head else "layers.0."
    heads, rows = found["num_attention_heads"], shapes.get(f"{first}self_attn.q_proj.weight", (0,))[0]
    if heads < 1 or rows % heads:
        raise CheckpointFormatError(f"{first}self_attn.q_proj has {rows} rows for {heads} attention heads.")
    gate = shapes.get(f"{first}mlp.gate_proj.weight")
    # a nested config describes the draft layer; at the top level these fields are often copied from the target
    own = layer if nested else {}
    found |= {
        "rope_parameters": rope,
        "head_dim": rows // heads,
        "intermediate_size": gate[0] if gate else found["intermediate_size"],  # Llama 4 has two sizes in its config
        "attention_bias": bool(own.get("attention_bias")) or f"{first}self_attn.o_proj.bias" in shapes,
        "qkv_bias": f"{first}self_attn.q_proj.bias" in shapes,
        "mlp_bias": bool(own.get("mlp_bias")) or f"{first}mlp.gate_proj.bias" in shapes,
        "qk_norm": kind == "qwen3" or f"{first}self_attn.q_norm.weight" in shapes,
        "own_embedding": "embed_tokens.weight" in shapes,
        "draft_vocab_size": shapes["d2t"][0] if shapes.get("d2t") else None,
        "sliding_window": None,
    }
    if windows and nested:
        types = getattr(config, "layer_types", None) or [None]
        found["sliding_window"] = config.sliding_window if types[0] == "sliding_attention" else None
    elif windows and layer.get("sliding_window") is not None:
        count = len({name.split(".")[1] for name in shapes if name.startswith("layers.")} | {"0"})
        if layer.get("layer_types") == ["sliding_attention"] * count:  # a copy of the target's has more entries
            THIRD_PARTY_LAYER["sliding_window"].check("sliding_window", layer["sliding_window"])
            found["sliding_window"] = layer["sliding_window"]
    return found


def _checked_layer(layout: Layout, layer: Fields, windows: bool) -> Fields:
    """Return the checked fields of a layer config, as arguments of transformers' config class."""
    names = [*LAYER_FIELDS, "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"]
    if windows:  # at the top level they describe the target
        names += ["layer_types", "sliding_window", "use_sliding_window"]
    wanted = {name: layer[name] for name in names if layer.get(name) is not None}
    if "hidden_act" not in wanted and layer.get("hidden_activation") is not None:  # Gemma's name
        wanted["hidden_act"] = layer["hidden_activation"]
    types = wanted.get("layer_types")
    if isinstance(types, list) and types:
        if not layout.of_verifier and any(kind != types[0] for kind in types):
            raise CheckpointFormatError(
                f"`layer_types` is {shortened(types)}; all draft layers must have the same type."
            )
        wanted["layer_types"] = types[:1]  # the caller makes a config of one layer
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(wanted.get(name), dict):
            wanted[name] = text_positions(wanted[name])
    given = checked(wanted, THIRD_PARTY_LAYER)
    given.pop("partial_rotary_factor", None)  # added to `rope_parameters` by the caller
    return given


def text_positions(rope: Fields) -> Fields:
    """Return rotary settings for text: those of vision-language models without their three-axis positions.

    The axes have equal positions in text, so ordinary rotary positions give the same result. Other settings are
    returned unchanged.
    """
    kind = rope.get("rope_type", rope.get("type"))
    if kind != "mrope" and "mrope_section" not in rope:
        return rope
    plain = {name: value for name, value in rope.items() if not name.startswith("mrope") and name != "type"}
    return {**plain, "rope_type": "default" if kind in ("mrope", None) else kind}


def layer_numbers(shapes: Shapes, first: int) -> int:
    """Return how many layers the tensors `layers.N.*` have; refuse numbers that are not `first`, `first` + 1, ..."""
    numbers = {int(name.split(".")[1]) for name in shapes if re.match(r"layers\.\d+\.", name)}
    if numbers != set(range(first, first + len(numbers))):
        raise CheckpointFormatError(f"It has tensors of the layers {sorted(numbers)[:20]}; a layer is missing.")
    return len(numbers)


# ----------------------------------------------------------------------------------------------- writing


def layer_config(head: Any) -> Fields:
    """Return the Llama config of the draft layers, with rotary fields that old and new transformers versions read."""
    config = head.config
    rope = dict(config.rope_parameters)
    theta, kind = rope.pop("rope_theta", PLAIN_THETA), rope.pop("rope_type", "default")
    partial = rope.pop("partial_rotary_factor", None)
    fields = {
        name: getattr(config, name)
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
                     "head_dim", "hidden_act", "rms_norm_eps", "max_position_embeddings", "attention_bias",
                     "mlp_bias", "initializer_range", "bos_token_id", "eos_token_id", "pad_token_id")
    }  # fmt: skip
    scaling = None if kind == "default" else {"type": kind, "rope_type": kind, **rope}
    if partial not in (None, 1):
        fields["partial_rotary_factor"] = partial
    return {**fields, "model_type": "llama", "num_hidden_layers": config.num_hidden_layers,
            "tie_word_embeddings": False, "rope_theta": theta, "rope_scaling": scaling, "use_cache": True}  # fmt: skip


def is_partly_rotated(config: Any) -> bool:
    """Whether only some dimensions of every attention head are rotated."""
    return config.rope_parameters.get("partial_rotary_factor", 1) not in (None, 1)


def speculators_fields(head: Any, kind: str, architecture: str, layer: Fields, num_tokens: int) -> Fields:
    """Return the fields that all speculators configs have in common.

    Its names for method and class are `kind` and `architecture`; `layer` is the config of the draft layers, and
    `num_tokens` are drafted per step.
    """
    proposal = {"proposal_type": "greedy", "speculative_tokens": num_tokens, "verifier_accept_k": 1,
                "accept_tolerance": 0.0}  # fmt: skip
    return {
        "architectures": [architecture],
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",  # that the written layouts follow
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": head.config.base_model_name_or_path, "architectures": []},
        },
        "transformer_layer_config": layer,
        "tie_word_embeddings": False,
    }


def speculators_layer(head: Any, kind: str, architecture: str) -> Fields:
    """Return the speculators config of an EAGLE-3 head or MTP module, without the fields that only one of them has."""
    config, layer = head.config, layer_config(head)
    if config.qk_norm:
        layer = {**layer, "model_type": "qwen3"}
    if config.sliding_window is not None:
        layer = {**layer, "layer_types": ["sliding_attention"] * config.num_hidden_layers,
                 "sliding_window": config.sliding_window, "use_sliding_window": True,
                 "max_window_layers": 0}  # fmt: skip
    return speculators_fields(head, kind, architecture, layer, config.num_steps or 3)
