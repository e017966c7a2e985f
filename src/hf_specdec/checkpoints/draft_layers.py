"""Config fields of EAGLE heads and MTP modules, from a checkpoint's config and the shapes of its tensors.

Tensors take precedence over the config, which is often a copy of the target's.

Sources: the model code of vLLM (`llama_eagle3.py`), SGLang (`llama_eagle3.py`), TensorRT-LLM
(`modeling_speculative.py`), speculators, ModelOpt, SpecForge, NeMo Automodel and DeepSpec.
"""

from __future__ import annotations

import re
from typing import Any

from transformers import LlamaConfig, Qwen3Config

from hf_specdec.checkpoints.layouts import Layout, lookup
from hf_specdec.checkpoints.tensors import Shapes
from hf_specdec.errors import CheckpointFormatError
from hf_specdec.heads.eagle import EagleConfig
from hf_specdec.heads.eagle3 import PAPER_LAYERS, Eagle3Config
from hf_specdec.heads.readings import Ambiguity
from hf_specdec.heads.schema import MAX_VOCABULARY, THIRD_PARTY_LAYER, checked, shown
from hf_specdec.records import Fields

LAYER_FAMILIES = {"llama": LlamaConfig, "qwen3": Qwen3Config}
"""Config classes of draft layers, by the `model_type` of a layer config inside the checkpoint's config."""

LAYER_FIELDS = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
                "hidden_act", "rms_norm_eps", "max_position_embeddings", "mlp_bias")  # fmt: skip
"""Fields that a Llama or Qwen3 config and ours have in common. `mlp_bias` is among them only to be checked:
`_from_config` replaces its value."""

ROPE_FIELDS = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")

MAX_LAYERS = 64
"""Maximum number of hidden states that a head reads; published heads read three to five."""


def layer_fields(layout: Layout, fields: Fields, shapes: Shapes) -> dict[str, Any]:
    """Return the config fields that EAGLE heads, EAGLE-3 heads and MTP modules have in common, by our names.

    Args:
        layout: The layout.
        fields: The checkpoint's config.
        shapes: Shapes of the tensors, by our names.

    Raises:
        CheckpointFormatError, InvalidConfigError: The config is invalid, or contradicts the tensors.
    """
    layer: Any = lookup(fields, layout.layer_config) if layout.layer_config else fields
    if not isinstance(layer, dict):
        raise CheckpointFormatError(f"`{layout.layer_config}` is {type(layer).__name__}, expected an object.")
    config = _family(layout, layer)(num_hidden_layers=1, **_checked_layer(layout, layer))
    given = _from_config(layout, layer, config)
    # tensors win
    return {**given, **_from_tensors(layout, given, shapes), "sliding_window": _window(layout, layer, config, shapes)}


def _from_config(layout: Layout, layer: Fields, config: Any) -> dict[str, Any]:
    """Return the fields that the config determines, unless tensors show something else.

    Args:
        layout: The layout.
        layer: The draft layer's config as in the file.
        config: The same as an instance of transformers' config class, which adds defaults.
    """
    found = {name: getattr(config, name) for name in LAYER_FIELDS if hasattr(config, name)}
    rope = {name: value for name, value in config.rope_parameters.items() if name != "type"}  # old name of rope_type
    if isinstance(layer.get("partial_rotary_factor"), int | float):
        rope.setdefault("partial_rotary_factor", layer["partial_rotary_factor"])
    # a nested config describes the draft layer; at the top level these fields are often copied from the target
    own = layer if layout.layer_config else {}
    return {
        **found,
        "rope_parameters": rope,
        "attention_bias": bool(own.get("attention_bias")),
        "mlp_bias": bool(own.get("mlp_bias")),
        "qk_norm": isinstance(config, Qwen3Config),
    }


def _from_tensors(layout: Layout, given: Fields, shapes: Shapes) -> dict[str, Any]:
    """Return the fields that the tensors determine; biases and norms exist if the config or a tensor says so.

    Args:
        layout: The layout.
        given: Result of `_from_config`.
        shapes: Shapes of the tensors, by our names.

    Raises:
        CheckpointFormatError: The query projection does not fit the number of attention heads.
    """
    prefix = "midlayer." if layout.config_class is Eagle3Config else "layers.0."
    heads, rows = given["num_attention_heads"], shapes.get(f"{prefix}self_attn.q_proj.weight", (0,))[0]
    if heads < 1 or rows % heads:
        raise CheckpointFormatError(f"{prefix}self_attn.q_proj has {rows} rows for {heads} attention heads.")
    gate = shapes.get(f"{prefix}mlp.gate_proj.weight")
    return {
        "head_dim": rows // heads,
        "intermediate_size": gate[0] if gate else given["intermediate_size"],  # Llama 4 has two sizes in its config
        "attention_bias": given["attention_bias"] or f"{prefix}self_attn.o_proj.bias" in shapes,
        "qkv_bias": f"{prefix}self_attn.q_proj.bias" in shapes,
        "mlp_bias": given["mlp_bias"] or f"{prefix}mlp.gate_proj.bias" in shapes,
        "qk_norm": given["qk_norm"] or f"{prefix}self_attn.q_norm.weight" in shapes,
        "own_embedding": "embed_tokens.weight" in shapes,
        "draft_vocab_size": shapes["d2t"][0] if shapes.get("d2t") else None,
    }


def _window(layout: Layout, layer: Fields, config: Any, shapes: Shapes) -> int | None:
    """Return the sliding window of the draft layers; None if they attend to all positions."""
    if layout.layer_config:
        types = getattr(config, "layer_types", None) or [None]
        return config.sliding_window if types[0] == "sliding_attention" else None
    count = _layers_of(shapes)["num_hidden_layers"] if layout.config_class is Eagle3Config else 1
    types, window = layer.get("layer_types"), layer.get("sliding_window")
    if types != ["sliding_attention"] * count or window is None:  # a copy of the target's has more entries
        return None
    THIRD_PARTY_LAYER["sliding_window"].check("sliding_window", window)
    return int(window)


def _family(layout: Layout, layer: Fields) -> Any:
    if not layout.layer_config:
        return LlamaConfig
    kind = layer.get("model_type", "llama" if layout.config_class is EagleConfig else "qwen3")
    if kind not in LAYER_FAMILIES:
        raise CheckpointFormatError(
            f"The draft layer has model_type {shown(kind)}, expected {' or '.join(LAYER_FAMILIES)}."
        )
    return LAYER_FAMILIES[kind]


def _checked_layer(layout: Layout, layer: Fields) -> dict[str, Any]:
    """Return the checked fields of a layer config, as arguments of transformers' config class."""
    # at the top level these describe the target, see `_window`
    windows = ("layer_types", "sliding_window", "use_sliding_window") if layout.layer_config else ()
    wanted = {name: layer[name] for name in (*LAYER_FIELDS, *ROPE_FIELDS, *windows) if layer.get(name) is not None}
    if "hidden_act" not in wanted and layer.get("hidden_activation") is not None:  # Gemma's name
        wanted["hidden_act"] = layer["hidden_activation"]
    types = wanted.get("layer_types")
    if isinstance(types, list) and types:
        if not layout.of_verifier and any(kind != types[0] for kind in types):
            raise CheckpointFormatError(f"`layer_types` is {shown(types)}; all draft layers must have the same type.")
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


# ----------------------------------------------------------------------------------------------- EAGLE-3


def eagle3_fields(layout: Layout, fields: Fields, settings: Fields, shapes: Shapes) -> dict[str, Any]:
    """Return the config fields that only EAGLE-3 heads have, by our names.

    Args:
        layout: The layout.
        fields: The checkpoint's config.
        settings: Fields of our config that are known already.
        shapes: Shapes of the tensors, by our names.

    Raises:
        CheckpointFormatError: The config is invalid, or contradicts the tensors.
    """
    ambiguity = ambiguity_of(layout, fields)
    ids = ambiguity.layer_ids
    count = len(ids) if ids else fields.get("num_aux_hidden_states") or len(PAPER_LAYERS)
    shape = shapes.get("fc.weight", (0, 0))
    if type(count) is not int or not 0 < count <= MAX_LAYERS:
        raise CheckpointFormatError(f"`num_aux_hidden_states` is {shown(count)}, expected 1 to {MAX_LAYERS}.")
    if ids is None and count != len(PAPER_LAYERS):
        raise CheckpointFormatError(f"The head reads {count} layers of the target, and its config does not name them.")
    size = settings.get("target_hidden_size") or (shape[-1] // count)
    if len(shape) != 2 or size * count != shape[-1]:
        names = "the config names none, so there must be" if ids is None else "the config names"
        raise CheckpointFormatError(
            f"fc.weight has shape {tuple(shape)}, which does not fit the target's layers that the head reads: {names} "
            f"{count}" + (f" of size {size}." if settings.get("target_hidden_size") else ".")
        )
    rows = shapes.get("lm_head.weight", (0,))[0]
    if "d2t" not in shapes and rows not in (0, settings["vocab_size"]):
        raise CheckpointFormatError(
            f"lm_head has {rows} rows for {settings['vocab_size']} tokens, without a d2t to map them."
        )
    return {
        "eagle_aux_hidden_state_layer_ids": [max(number + ambiguity.layer_offsets[0], 0) for number in ids]
        if ids
        else None,
        "norm_output": ambiguity.norm_output[0],
        "target_hidden_size": None if size == shape[0] else size,
        "own_lm_head": rows > 0,
        "tie_word_embeddings": rows == 0 and fields.get("tie_word_embeddings") is True,
        **_layers_of(shapes),
    }


def _layers_of(shapes: Shapes) -> dict[str, Any]:
    """Return number and kind of the layers according to the tensors; configs often have the target's number."""
    numbers = {int(name.split(".")[1]) for name in shapes if re.match(r"layers\.\d+\.", name)}
    if numbers != set(range(1, len(numbers) + 1)):
        raise CheckpointFormatError(f"It has tensors of the layers {sorted(numbers)[:20]}; a layer is missing.")
    wide = shapes.get("layers.1.self_attn.q_proj.weight", (0, 0))[-1] == 2 * shapes.get("fc.weight", (0, 0))[0]
    return {"num_hidden_layers": 1 + len(numbers), "embedding_in_every_layer": bool(numbers) and wide}


def ambiguity_of(layout: Layout, fields: Fields) -> Ambiguity:
    """Return what the config leaves open about the layers that a head reads and about `norm_output`.

    Raises:
        CheckpointFormatError: The layer ids are not a list of distinct layer indices, or `norm_output` is not a bool.
    """
    flags = [lookup(fields, path) for path in ("norm_output", "eagle_config.return_hidden_post_norm")]
    for flag in flags:
        if not isinstance(flag, bool | None):
            raise CheckpointFormatError(f"`norm_output` is {shown(flag)}, expected true or false.")
    normed = (True, False) if flags[0] and layout.unsure_of_norm_output else (any(flags),)
    for path, offsets in layout.layer_ids:
        ids = lookup(fields, path)
        if ids is None:
            continue
        if not isinstance(ids, list) or not 0 < len(ids) <= MAX_LAYERS or not all(map(_is_layer, ids)):
            raise CheckpointFormatError(f"`{path}` is {str(ids)[:80]}, expected 1 to {MAX_LAYERS} layer indices.")
        if len(set(ids)) != len(ids):
            raise CheckpointFormatError(f"`{path}` is {str(ids)[:80]}, expected distinct layers.")
        return Ambiguity(tuple(sorted(ids)), offsets, normed, layout.final_norm)
    return Ambiguity(None, norm_output=normed)


def _is_layer(value: Any) -> bool:
    return type(value) is int and -1 <= value <= MAX_VOCABULARY  # with offset 1, -1 is the embedding


def medusa_fields(settings: Fields, shapes: Shapes) -> dict[str, Any]:
    """Return the config fields of Medusa heads that follow from the tensors.

    The number of heads is counted, because it is wrong in published configs. `vocab_size` is taken from `settings` if
    no tensor shows it.

    Raises:
        CheckpointFormatError: The first residual block is missing.
    """
    blocks = [name.split(".") for name in shapes if name.endswith(".linear.weight")]
    scores = [shape for name, shape in shapes.items() if re.fullmatch(r"heads\.\d+\.\d+\.weight", name)]
    block = shapes.get("heads.0.0.linear.weight")
    if not block:
        raise CheckpointFormatError("the residual block heads.0.0.linear is missing.")
    words = shapes.get("d2t")
    return {
        "hidden_size": block[0],
        "vocab_size": scores[0][0] if scores and not words else settings.get("vocab_size"),
        "medusa_num_heads": len({parts[1] for parts in blocks}),
        "medusa_num_layers": sum(parts[1] == "0" for parts in blocks),
        "shared_lm_head": not scores,
        "draft_vocab_size": words[0] if words else None,
    }
