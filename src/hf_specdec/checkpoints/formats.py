"""Create a head from a checkpoint's config and tensors, as described by the table in `layouts.py`.

Sizes come from the tensors where possible, the rest from the config. The head is created on the meta device and
compared with the file before any memory is allocated, so a wrong config cannot exhaust memory.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from hf_specdec.checkpoints.files import TensorFiles, listed
from hf_specdec.checkpoints.layouts import LAYER_FIELDS, LAYOUTS, UNREAD_FAMILIES, WHOLE_MODELS, Layout, Names, lookup
from hf_specdec.errors import CheckpointFormatError, HeadTensorsError, InvalidConfigError, SpeculativeDecodingError
from hf_specdec.heads.base import NATIVE_LAYOUT
from hf_specdec.heads.eagle import EagleConfig, EagleHead
from hf_specdec.heads.eagle3 import PAPER_LAYERS, Eagle3Config, Eagle3Head
from hf_specdec.heads.medusa import MedusaConfig, MedusaHeads
from hf_specdec.heads.mtp import MtpConfig, MtpHead
from hf_specdec.heads.schema import THIRD_PARTY_LAYER, checked, shown
from hf_specdec.records import Fields

Head = EagleHead | Eagle3Head | MtpHead | MedusaHeads
HeadConfig = EagleConfig | Eagle3Config | MtpConfig | MedusaConfig

HEADS: dict[type[Any], type[Head]] = {
    EagleConfig: EagleHead,
    Eagle3Config: Eagle3Head,
    MtpConfig: MtpHead,
    MedusaConfig: MedusaHeads,
}
"""Head classes by config class."""

LAYER_FAMILIES = {"llama": LlamaConfig, "qwen3": Qwen3Config}
"""Config classes of draft layers by the model_type of a nested layer config."""

Shapes = Mapping[str, tuple[int, ...]]


def find_layout(fields: Fields, names: Names, where: str) -> Layout:
    """Return the layout of a checkpoint.

    Raises:
        CheckpointFormatError: The layout is unknown, or its heads are not supported.
    """
    for family, matches in UNREAD_FAMILIES:
        if matches(fields):
            raise CheckpointFormatError(
                f"{where} is {family}, which is not supported.", f"Supported layouts: {_known()}."
            )
    for layout in LAYOUTS:
        if layout.matches(fields, names):
            return layout
    kinds = {key: fields[key] for key in ("model_type", "architectures", "speculators_model_type") if key in fields}
    raise CheckpointFormatError(
        f"{where} is not a head in a known layout: its config has {str(kinds)[:200]}, its tensors are "
        f"{listed(sorted(names))}.",
        f"Supported layouts: {_known()}.",
    )


def read_head(fields: Fields, files: TensorFiles, where: str) -> Head:
    """Create a head from a checkpoint.

    Args:
        fields: Its `config.json`.
        files: Its tensors.
        where: Name of the checkpoint, for error messages.

    Returns:
        The head, in the smallest dtype that represents all its tensors, with `layout` set.

    Raises:
        CheckpointFormatError: The layout is unknown, the config is invalid, or tensors have invalid dtypes or values.
        HeadTensorsError: Tensors are missing, unknown, or have wrong shapes.
    """
    layout = find_layout(fields, frozenset(files.shapes), where)
    file_names, unread = _names_of(layout, files, where)
    shapes = {ours: files.shapes[name] for ours, name in file_names.items()}
    head = _empty_head(layout, fields, shapes, where)
    _check_shapes(head, shapes, file_names, where)
    stored = files.read(file_names.values())
    tensors = {ours: _copy_checked(ours, stored[name], where) for ours, name in file_names.items()}
    floats = [tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()]
    dtype = functools.reduce(torch.promote_types, floats)
    tensors = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    head.load_state_dict(tensors, assign=True)
    if hasattr(head, "rotary_emb"):  # its buffers are computed, not loaded
        head.rotary_emb = _rotary(head.config, where)
    head.config.dtype = dtype
    head.layout = layout.name
    _check_hot_tokens(head, where)
    if "t2d" in unread:
        _check_mask(head, files.read(["t2d"])["t2d"], where)
    if layout.name in WHOLE_MODELS:
        head.config.base_model_name_or_path = where
    return head.eval()


# ----------------------------------------------------------------------------------------------- configuration


def _empty_head(layout: Layout, fields: Fields, shapes: Shapes, where: str) -> Head:
    """Create the head of a config on the meta device."""
    try:
        if layout.name == NATIVE_LAYOUT:
            config = layout.config_class.from_dict(fields)
        else:
            settings = _settings(layout, fields, shapes)
            config = layout.config_class(**checked(settings, layout.config_class.rules))
        counted = [getattr(config, name, 1) for name in ("medusa_num_heads", "medusa_num_layers")]
        if max(*counted, len(getattr(config, "eagle_aux_hidden_state_layer_ids", None) or ())) > len(shapes):
            raise CheckpointFormatError("its config has more layers or heads than there are tensors.")
        with torch.device("meta"):
            return HEADS[layout.config_class](config)
    except InvalidConfigError as error:
        raise CheckpointFormatError(f"{where} (layout {layout.name}): its config is invalid: {error}") from error
    except SpeculativeDecodingError as error:
        raise CheckpointFormatError(f"{where} (layout {layout.name}): {error}") from error
    except Exception as error:  # transformers' validation and torch raise many types
        reason = " ".join(str(error).split())[:300]
        raise CheckpointFormatError(
            f"{where} (layout {layout.name}): its config is invalid: {type(error).__name__}: {reason}."
        ) from error


def _settings(layout: Layout, fields: Fields, shapes: Shapes) -> dict[str, Any]:
    """Return the fields of our config, from the checkpoint's config and tensors."""
    for path, wanted in layout.expected.items():
        found = lookup(fields, path, wanted)
        if found != wanted:
            raise CheckpointFormatError(f"`{path}` is {shown(found)}; only {wanted!r} is supported.")
    given = {ours: lookup(fields, path) for ours, path in layout.fields.items()}
    settings = {**layout.fixed, **{name: value for name, value in given.items() if value is not None}}
    if layout.config_class is MedusaConfig:
        return {**settings, **_medusa_sizes(settings, shapes)}
    prefix = "midlayer." if layout.config_class is Eagle3Config else "layers.0."
    layer = _draft_layer(layout, fields, shapes, prefix)
    if layout.config_class is EagleConfig:
        return {"bias": True, **layer, **settings}
    if layout.config_class is MtpConfig:
        return {"bias": "eh_proj.bias" in shapes, **layer, **settings}
    return {**layer, **settings, **_eagle3_inputs(layout, fields, {**layer, **settings}, shapes)}


def _draft_layer(layout: Layout, fields: Fields, shapes: Shapes, prefix: str) -> dict[str, Any]:
    """Return the fields of the draft layer, from a Llama or Qwen3 config; tensors take precedence over it."""
    layer: Any = lookup(fields, layout.layer_config) if layout.layer_config else fields
    if not isinstance(layer, dict):
        raise CheckpointFormatError(f"`{layout.layer_config}` is {type(layer).__name__}, expected an object.")
    family: Any = LlamaConfig
    if layout.layer_config:
        kind = layer.get("model_type", "llama" if layout.config_class is EagleConfig else "qwen3")
        if kind not in LAYER_FAMILIES:
            raise CheckpointFormatError(
                f"The draft layer has model_type {shown(kind)}, expected {' or '.join(LAYER_FAMILIES)}."
            )
        family = LAYER_FAMILIES[kind]
    rotary = ("rope_theta", "rope_scaling", "rope_parameters")
    windows = ("layer_types", "sliding_window", "use_sliding_window") if layout.layer_config else ()
    wanted = {name: layer[name] for name in (*LAYER_FIELDS, *rotary, *windows) if layer.get(name) is not None}
    if layout.of_verifier and isinstance(wanted.get("layer_types"), list):
        wanted["layer_types"] = wanted["layer_types"][:1]
    given = checked(wanted, THIRD_PARTY_LAYER)
    config = family(num_hidden_layers=1, **given)
    found = {name: getattr(config, name) for name in LAYER_FIELDS if hasattr(config, name)}
    heads = found["num_attention_heads"]
    rows = shapes.get(f"{prefix}self_attn.q_proj.weight", (0,))[0]
    if heads < 1 or rows % heads:
        raise CheckpointFormatError(f"{prefix}self_attn.q_proj has {rows} rows for {heads} attention heads.")
    types = getattr(config, "layer_types", None) or [None]
    # a nested config describes the draft layer; at the top level these fields are often copied from the target
    own = layer if layout.layer_config else {}
    return {
        **found,
        "head_dim": rows // heads,
        "rope_parameters": {name: value for name, value in config.rope_parameters.items() if name != "type"},
        "attention_bias": bool(own.get("attention_bias")) or f"{prefix}self_attn.o_proj.bias" in shapes,
        "qkv_bias": f"{prefix}self_attn.q_proj.bias" in shapes,
        "mlp_bias": bool(own.get("mlp_bias")) or f"{prefix}mlp.gate_proj.bias" in shapes,
        "qk_norm": family is Qwen3Config or f"{prefix}self_attn.q_norm.weight" in shapes,
        "own_embedding": "embed_tokens.weight" in shapes,
        "sliding_window": config.sliding_window if types[0] == "sliding_attention" else None,
        "draft_vocab_size": shapes["d2t"][0] if shapes.get("d2t") else None,
    }


def _eagle3_inputs(layout: Layout, fields: Fields, settings: Fields, shapes: Shapes) -> dict[str, Any]:
    """Return the layers that an EAGLE-3 head reads and the hidden size of its target."""
    ids, offset = settings.get("eagle_aux_hidden_state_layer_ids"), layout.layer_offset
    if ids is None:
        ids, offset = fields.get("eagle_aux_hidden_state_layer_ids"), 0
    if ids is not None:
        if not isinstance(ids, list) or not all(type(layer) is int for layer in ids) or not 0 < len(ids) <= MAX_LAYERS:
            raise CheckpointFormatError(
                f"`eagle_aux_hidden_state_layer_ids` is {str(ids)[:80]}, expected 1 to {MAX_LAYERS} layer indices."
            )
        ids = sorted(layer + offset for layer in ids)
    count, shape = len(ids or PAPER_LAYERS), shapes.get("fc.weight", (0, 0))
    size = settings.get("target_hidden_size") or (shape[-1] // count)
    if len(shape) != 2 or size * count != shape[-1]:
        raise CheckpointFormatError(f"fc.weight has shape {shape}, but the head reads {count} layers of {size}.")
    rows = shapes.get("lm_head.weight", (0,))[0]
    if "d2t" not in shapes and rows != settings["vocab_size"]:
        raise CheckpointFormatError(
            f"lm_head has {rows} rows for {settings['vocab_size']} tokens, and there is no d2t to map them."
        )
    return {"eagle_aux_hidden_state_layer_ids": ids, "target_hidden_size": None if size == shape[0] else size}


MAX_LAYERS = 64
"""Maximum number of hidden states that a head reads; published heads read three to five."""


def _medusa_sizes(settings: Fields, shapes: Shapes) -> dict[str, Any]:
    """Return the sizes of Medusa heads from the tensors; published configs have a wrong number of heads."""
    blocks = [name.split(".") for name in shapes if name.endswith(".linear.weight")]
    scores = [shape for name, shape in shapes.items() if re.fullmatch(r"heads\.\d+\.\d+\.weight", name)]
    block = shapes.get("heads.0.0.linear.weight")
    if not block:
        raise CheckpointFormatError("the residual block heads.0.0.linear is missing.")
    return {
        "hidden_size": block[0],
        "vocab_size": scores[0][0] if scores else settings.get("vocab_size"),
        "medusa_num_heads": len({parts[1] for parts in blocks}),
        "medusa_num_layers": sum(parts[1] == "0" for parts in blocks),
        "shared_lm_head": not scores,
    }


# ----------------------------------------------------------------------------------------------- tensors


def _names_of(layout: Layout, files: TensorFiles, where: str) -> tuple[dict[str, str], set[str]]:
    """Return the names in the files by our tensor names, and the names in the files that are not loaded."""
    file_names: dict[str, str] = {}
    unread = set()
    for name in files.shapes:
        if any(re.fullmatch(pattern, name) for pattern in layout.unread):
            unread.add(name)
            continue
        ours = name
        for pattern, replacement in layout.renames:
            if re.fullmatch(pattern, name):
                ours = re.sub(pattern, replacement, name)
                break
        if ours in file_names:
            raise CheckpointFormatError(f"{where}: {file_names[ours]} and {name} both map to the tensor {ours}.")
        file_names[ours] = name
    return file_names, unread


def _check_shapes(head: Head, shapes: Shapes, file_names: Mapping[str, str], where: str) -> None:
    wanted = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}
    problems = {
        "missing tensors": sorted(wanted.keys() - shapes.keys()),
        "unknown tensors": sorted(file_names[name] for name in shapes.keys() - wanted.keys()),
        "wrong shapes": [
            f"{file_names[name]} {shapes[name]} instead of {wanted[name]}"
            for name in sorted(wanted.keys() & shapes.keys())
            if shapes[name] != wanted[name]
        ],
    }
    text = "; ".join(f"{kind}: {listed(names)}" for kind, names in problems.items() if names)
    if text:
        raise HeadTensorsError(f"{where}: the tensors do not match the config. {text}.")


INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _copy_checked(name: str, tensor: Tensor, where: str) -> Tensor:
    """Copy a tensor out of its file, after checking its dtype and values."""
    wanted = INTEGERS if name == "d2t" else FLOATS
    if tensor.dtype not in wanted:
        raise CheckpointFormatError(
            f"{where}: {name} is {tensor.dtype}, expected one of {', '.join(map(str, wanted))}.",
            "" if name == "d2t" else "Quantised heads are not supported, use the original weights.",
        )
    if name == "d2t":
        return tensor.to(torch.long)
    largest = tensor.abs().max() if tensor.numel() else tensor.new_zeros(())
    if not bool(largest <= LARGEST_WEIGHT):  # false for NaN as well
        raise CheckpointFormatError(
            f"{where}: {name} has values that are not finite, or larger than {LARGEST_WEIGHT:g} (maximum of float16)."
        )
    return tensor.clone()


LARGEST_WEIGHT = torch.finfo(torch.float16).max
"""Maximum absolute value of a weight: a head is converted to its target's dtype, which may be float16."""


def _rotary(config: Any, where: str) -> LlamaRotaryEmbedding:
    """Create the rotary embedding, whose frequencies are not stored in checkpoints."""
    try:
        with torch.device("cpu"):
            rotary = LlamaRotaryEmbedding(config)
    except Exception as error:  # see _empty_head
        raise CheckpointFormatError(f"{where}: its config has invalid rotary positions: {error}.") from error
    frequencies, scaling = rotary.inv_freq, rotary.attention_scaling
    if not bool(frequencies.isfinite().all()) or not isinstance(scaling, int | float) or not math.isfinite(scaling):
        raise CheckpointFormatError(f"{where}: rope_parameters {config.rope_parameters} give no finite frequencies.")
    return rotary


def _check_hot_tokens(head: Head, where: str) -> None:
    ids, size = head.hot_token_ids, head.config.vocab_size
    if ids is not None and (bool((ids[1:] <= ids[:-1]).any()) or int(ids[0]) < 0 or int(ids[-1]) >= size):
        raise CheckpointFormatError(f"{where}: d2t must yield ascending target ids below {size}.")


def _check_mask(head: Head, mask: Tensor, where: str) -> None:
    """Check that `t2d`, the mask of the target's tokens in the draft vocabulary, agrees with `d2t`."""
    ids = head.hot_token_ids
    if ids is None or (bool(mask.all()) and not bool(head.d2t.any())):  # SpecForge leaves both buffers unset
        return
    if len(mask) != head.config.vocab_size or not torch.equal(mask.flatten().nonzero().flatten(), ids):
        raise CheckpointFormatError(f"{where}: t2d and d2t select different tokens.")


def _known() -> str:
    return ", ".join(dict.fromkeys(layout.name for layout in LAYOUTS))
