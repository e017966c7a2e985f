"""The published layouts of block heads, and the reading of config fields that only block heads have.

Sources: z-lab/dflash (`dflash/model.py`), hao-ai-lab/JetSpec (`jetspec/models/draft_head.py`), deepseek-ai/DeepSpec
(`deepspec/modeling/dspark`), speculators 0.9 (`speculators/models/dflash` and `dspark`), vLLM (`qwen3_dflash.py`) for
fields of the config that change masks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hf_specdec.checkpoints.layouts import ROTARY, Layout, Names, lookup
from hf_specdec.checkpoints.tensors import Shapes
from hf_specdec.errors import CheckpointFormatError, listed
from hf_specdec.heads.dflash import FULL, SLIDING, DFlashConfig
from hf_specdec.heads.schema import THIRD_PARTY_LAYER, shown
from hf_specdec.records import Fields
from hf_specdec.verification.features import LAST

VERIFIER = "speculators_config.verifier.name_or_path"

ZLAB = Layout(
    "dflash",
    DFlashConfig,
    lambda fields, names: "dflash_config" in fields,
    "DFlash (z-lab), ModelOpt, NeMo Automodel",
    fields={
        "block_size": "block_size|dflash_config.block_size",
        "mask_token_id": "dflash_config.mask_token_id|mask_token_id",
        "all_children": "dflash_config.all_children",
        "num_target_layers": "num_target_layers",
        "base_model_name_or_path": "base_model_name_or_path",
    },
    expected={
        "is_neox_style": True,
        "dflash_config.attention_sink_bias": False,
        "add_swa_attention_sink_bias": False,
        "logit_scale": 1,
    },
    renames=((r"model\.(.*)", r"\1"),),
    unread=(ROTARY, "t2d"),
    layer_ids=(("dflash_config.target_layer_ids", (1,)), ("target_layer_ids", (1,))),
)
JETSPEC = replace(
    ZLAB,
    name="jetspec",
    matches=lambda fields, names: lookup(fields, "dflash_config.causal_head") is not None,  # false, too
    writers="JetSpec",
    fixed={"all_children": True},
)
DEEPSPEC = Layout(
    "deepspec",
    DFlashConfig,
    lambda fields, names: fields.get("architectures") == ["Qwen3DSparkModel"],
    "DeepSpec (DSpark, and DFlash trained with it)",
    fields={
        "block_size": "block_size",
        "mask_token_id": "mask_token_id",
        "markov_rank": "markov_rank",
        "markov_head_type": "markov_head_type",
        "confidence_head": "enable_confidence_head",
        "confidence_with_markov": "confidence_head_with_markov",
        "num_target_layers": "num_target_layers",
        "base_model_name_or_path": "base_model_name_or_path",
    },
    fixed={"sample_from_anchor": True},
    unread=(ROTARY,),
    layer_ids=(("target_layer_ids", (1,)),),
)
SPECULATORS_DFLASH = Layout(
    "speculators-dflash",
    DFlashConfig,
    lambda fields, names: fields.get("speculators_model_type") == "dflash",
    "speculators (vLLM), DFlash",
    fields={
        "block_size": "block_size",
        "mask_token_id": "mask_token_id",
        "sample_from_anchor": "sample_from_anchor",
        "base_model_name_or_path": VERIFIER,
    },
    unread=(ROTARY, "t2d", r"verifier_lm_head\.weight", r"verifier_norm\.weight"),
    layer_config="transformer_layer_config",
    layer_ids=(("aux_hidden_state_layer_ids", (0,)),),
)
SPECULATORS_DSPARK = replace(
    SPECULATORS_DFLASH,
    name="speculators-dspark",
    matches=lambda fields, names: fields.get("speculators_model_type") == "dspark",
    writers="speculators (vLLM), DSpark",
    fields={**DEEPSPEC.fields, **SPECULATORS_DFLASH.fields},
    fixed={
        "sample_from_anchor": True, "markov_rank": 256, "confidence_head": True, "confidence_with_markov": True,
    },
)  # fmt: skip

BLOCK_LAYOUTS = (SPECULATORS_DFLASH, SPECULATORS_DSPARK, DEEPSPEC, JETSPEC, ZLAB)
"""All layouts of block heads; the first that matches is used."""


def _is_block(names: Names) -> bool:
    return any(re.fullmatch(r"(model\.)?hidden_norm\.weight", name) for name in names)


def relative_of(fields: Fields, names: Names) -> str | None:
    """Return a description of a relative of DFlash whose layers or selection of tokens differ; None for others."""
    kind = lookup(fields, "dflash_config.projector_type")
    if kind == "domino" or any("prefix_gru." in name for name in names):
        return "a Domino drafter, whose recurrent network reads the tokens chosen so far"
    if any("_conv.base_kernel" in name or name.startswith("candidate_selector.") for name in names):
        return "a DFlash2 drafter, whose layers have convolutions over the block and which selects candidates itself"
    if any(name.endswith("mix_l") or "readout" in name for name in names) and _is_block(names):
        return "an XPress drafter, which refines the block's logits in several passes"
    if kind not in (None, "dflash") and "dflash_config" in fields:
        return f"a DFlash drafter with the projector_type {shown(kind)}"
    if fields.get("architectures") == ["Gemma4DSparkModel"]:
        return "a DSpark drafter with layers of Gemma 4"
    return None


LAYER_TENSOR = (
    r"layers\.(\d{1,4})\.((input|post_attention)_layernorm\.weight|self_attn\.([qkvo]_proj\.(weight|bias)|"
    r"[qk]_norm\.weight)|mlp\.(gate|up|down)_proj\.(weight|bias))"
)
BLOCK_TENSOR = (
    r"fc\.(weight|bias)|(hidden_norm|norm|embed_tokens|lm_head)\.weight|d2t|confidence_head\.proj\.(weight|bias)|"
    r"markov_head\.(markov_w[12]\.weight|(gate|joint)_proj\.(weight|bias))"
)


def without_windows(layout: Layout, fields: Fields) -> Fields:
    """Return a config without the fields about sliding windows, which `block_fields` reads layer by layer."""
    names = ("layer_types", "sliding_window", "use_sliding_window")
    if not layout.layer_config or not isinstance(fields.get(layout.layer_config), dict):
        return {name: value for name, value in fields.items() if name not in names}
    layer = {name: value for name, value in fields[layout.layer_config].items() if name not in names}
    return {**fields, layout.layer_config: layer}


def check_block_tensors(shapes: Shapes) -> None:
    """Check the names of a block head's tensors before its sizes are computed from them.

    Args:
        shapes: Shapes of the tensors, by our names.

    Raises:
        CheckpointFormatError: A tensor is not one of a block head's, a layer or its query projection is missing, or
            `fc` is not a matrix.
    """
    unknown = sorted(name for name in shapes if not re.fullmatch(f"{LAYER_TENSOR}|{BLOCK_TENSOR}", name))
    if unknown:
        raise CheckpointFormatError(
            f"it has the unknown tensors {listed(unknown)}.", "Heads with these tensors are not supported."
        )
    numbers = _layer_numbers(shapes)
    if numbers != set(range(len(numbers))) or not numbers:
        raise CheckpointFormatError(f"It has tensors of the layers {sorted(numbers)[:20]}; a layer is missing.")
    for name in ("fc.weight", "layers.0.self_attn.q_proj.weight"):
        if len(shapes.get(name, ())) != 2:
            raise CheckpointFormatError(f"{name} is missing, or not a matrix.")


def _layer_numbers(shapes: Shapes) -> set[int]:
    return {int(name.split(".")[1]) for name in shapes if name.startswith("layers.")}


def block_fields(layout: Layout, fields: Fields, settings: Mapping[str, Any], shapes: Shapes) -> dict[str, Any]:
    """Return the config fields that only block heads have, by our names.

    Args:
        layout: The layout.
        fields: The checkpoint's config.
        settings: Fields of our config that are known already.
        shapes: Shapes of the tensors, by our names, after `check_block_tensors`.

    Raises:
        CheckpointFormatError: The config is invalid, or contradicts the tensors.
    """
    for name in ("block_size", "mask_token_id"):
        if name not in settings:
            raise CheckpointFormatError(f"its config has no `{name}`.")
    layer: Any = fields[layout.layer_config] if layout.layer_config else fields
    count = len(_layer_numbers(shapes))
    if layer.get("num_hidden_layers", count) != count:
        raise CheckpointFormatError(
            f"`num_hidden_layers` is {shown(layer['num_hidden_layers'])}, but there are tensors of {count} layers."
        )
    found = {
        "bias": "fc.bias" in shapes,
        "num_hidden_layers": count,
        "aux_hidden_state_layer_ids": _layer_ids(layout, fields, shapes, count),
        "own_lm_head": "lm_head.weight" in shapes,
        **_directions(layout, fields),
        **_windows(fields, layer, count),
    }
    if settings.get("confidence_head", False) is False:  # speculators' default for the other field is true
        found["confidence_with_markov"] = False
    return found


def _layer_ids(layout: Layout, fields: Fields, shapes: Shapes, num_layers: int) -> list[int] | None:
    size, width = shapes["fc.weight"]
    for path, (offset,) in layout.layer_ids:
        ids = lookup(fields, path)
        if ids is None:
            continue
        if not isinstance(ids, list) or not ids or not all(type(number) is int and number >= -1 for number in ids):
            raise CheckpointFormatError(f"`{path}` is {shown(ids)}, expected a list of layer indices.")
        if len(ids) * size != width:
            raise CheckpointFormatError(f"fc.weight has {width} columns for {len(ids)} layers of size {size}.")
        # z-lab's code reads the last hidden state of transformers, which is after the final norm; JetSpec's does not
        last = fields.get("num_target_layers") if layout.name == ZLAB.name else None
        return [LAST if number + offset == last else number + offset for number in ids]
    if num_layers * size != width or layout.layer_config:
        raise CheckpointFormatError(
            f"fc.weight has {width} columns, and the config does not name the target's layers."
        )
    return None


def _directions(layout: Layout, fields: Fields) -> dict[str, Any]:
    """Return whether a slot sees later ones, in layers with full attention and with a sliding window."""
    if layout.layer_config:
        both_ways = _flag(fields, "sliding_window_non_causal")
        return {"causal": False, "sliding_causal": not both_ways, "window_from_anchor": True}
    names = ("dflash_config.causal_head", "is_causal", "dflash_config.causal")  # JetSpec's; vLLM's, in its order
    given = [value for value in (_flag(fields, name) for name in names) if value is not None]
    return {"causal": given[0], "sliding_causal": given[0]} if given else {}


def _windows(fields: Fields, layer: Fields, num_layers: int) -> dict[str, Any]:
    """Return the kind of attention of each layer and the sliding window.

    Args:
        fields: The checkpoint's config.
        layer: The config of its layers.
        num_layers: Number of layers.
    """
    types, window = layer.get("layer_types"), layer.get("sliding_window")
    if types is not None and not (isinstance(types, list) and all(kind in (FULL, SLIDING) for kind in types)):
        raise CheckpointFormatError(f"`layer_types` is {shown(types)}, expected a list of {FULL} and {SLIDING}.")
    if _flag(layer, "use_sliding_window") is False:
        window = None
    window = lookup(fields, "dflash_config.swa_window_size", window)  # vLLM's name
    if _flag(fields, "dflash_config.use_swa") and SLIDING not in (types or []):
        types = [SLIDING] * num_layers
        if window is None:
            raise CheckpointFormatError("`use_swa` is true, but the config has no `swa_window_size`.")
    if window is None or types is None or SLIDING not in types:
        return {"layer_types": None, "sliding_window": None}
    THIRD_PARTY_LAYER["sliding_window"].check("sliding_window", window)
    if len(types) != num_layers:
        raise CheckpointFormatError(f"`layer_types` is {shown(types)} for {num_layers} layers.")
    return {"layer_types": types, "sliding_window": window}


def _flag(fields: Fields, path: str) -> bool | None:
    """Return a field that must be true, false or missing."""
    value = lookup(fields, path)
    if not isinstance(value, bool | None):
        raise CheckpointFormatError(f"`{path}` is {shown(value)}, expected true or false.")
    return value
