"""Create a head from a checkpoint's config and tensors, as described by the table in `layouts.py`.

Sizes come from the tensors where possible, the rest from the config. The head is created on the meta device and
compared with the file before any memory is allocated, so a wrong config cannot exhaust memory.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import torch

from hf_specdec.checkpoints.block_layouts import (
    BLOCK_LAYOUTS,
    block_fields,
    check_block_tensors,
    relative_of,
    without_windows,
)
from hf_specdec.checkpoints.draft_layers import ambiguity_of, eagle3_fields, layer_fields, medusa_fields
from hf_specdec.checkpoints.files import TensorFiles
from hf_specdec.checkpoints.layer_mtp import speculators_layer_mtp
from hf_specdec.checkpoints.layouts import LAYOUTS, WHOLE_MODELS, Layout, Names, lookup
from hf_specdec.checkpoints.pard import assistant_refusal, is_assistant_config
from hf_specdec.checkpoints.refusals import unsupported_kind
from hf_specdec.checkpoints.tensors import (
    VOCABULARIES,
    Shapes,
    check_shapes,
    completed,
    copy_checked,
    in_one_dtype,
    in_vocabulary_order,
    names_of,
)
from hf_specdec.errors import CheckpointFormatError, InvalidConfigError, SpeculativeDecodingError, listed
from hf_specdec.heads.base import NATIVE_LAYOUT
from hf_specdec.heads.dflash import DFlashConfig, DFlashHead
from hf_specdec.heads.eagle import EagleConfig, EagleHead
from hf_specdec.heads.eagle3 import Eagle3Config, Eagle3Head
from hf_specdec.heads.layer_mtp import LAYER_TYPES, LayerMtpHead
from hf_specdec.heads.medusa import MedusaConfig, MedusaHeads
from hf_specdec.heads.mtp import MtpConfig, MtpHead
from hf_specdec.heads.rotary import DraftRotaryEmbedding
from hf_specdec.heads.schema import checked, shown
from hf_specdec.records import Fields

Head = EagleHead | Eagle3Head | MtpHead | LayerMtpHead | MedusaHeads | DFlashHead
HeadConfig = EagleConfig | Eagle3Config | MtpConfig | MedusaConfig | DFlashConfig

ALL_LAYOUTS = (*BLOCK_LAYOUTS, *LAYOUTS)
"""All layouts that can be read; the first that matches is used."""

HEADS: dict[type[Any], type[Head]] = {
    EagleConfig: EagleHead,
    Eagle3Config: Eagle3Head,
    MtpConfig: MtpHead,
    MedusaConfig: MedusaHeads,
    DFlashConfig: DFlashHead,
}
"""Head classes by config class."""


def find_layout(fields: Fields, names: Names, where: str) -> Layout:
    """Return the layout of a checkpoint.

    Args:
        fields: Its config.
        names: Names of its tensors.
        where: Its name, for error messages.

    Raises:
        CheckpointFormatError: The layout is unknown, or its heads are not supported.
    """
    kind = relative_of(fields, names) or unsupported_kind(fields, names)
    if kind is not None:
        raise CheckpointFormatError(f"{where} is {kind}, which is not supported.", f"Supported layouts: {_known()}.")
    if is_assistant_config(fields):
        raise assistant_refusal(fields, where)
    for layout in ALL_LAYOUTS:
        if layout.matches(fields, names):
            return layout
    if (model := _whole_model(fields, names)) is not None:
        raise CheckpointFormatError(
            f"{where} is a whole model ({model}), not a head in a known layout.",
            "To draft with it, pass it as assistant_model= to generate(); or give a head.",
        )
    kinds = {key: fields[key] for key in ("model_type", "architectures", "speculators_model_type") if key in fields}
    raise CheckpointFormatError(
        f"{where} is not a head in a known layout: its config has {str(kinds)[:200]}, its tensors are "
        f"{listed(sorted(names))}.",
        f"Supported layouts: {_known()}.",
    )


def _whole_model(fields: Fields, names: Names) -> str | None:
    """Return the class name of a whole causal LM, which has all layers that its config counts; None for others."""
    classes, count = fields.get("architectures"), fields.get("num_hidden_layers")
    named = [name for name in classes if str(name).endswith("ForCausalLM")] if isinstance(classes, list) else []
    layers = {found[1] for name in names if (found := re.match(r"(?:[a-z]\w*\.)+(\d+)\.", name))}
    return shown(named[0]) if named and count == len(layers) and len(layers) > 1 else None


def read_head(fields: Fields, files: TensorFiles, where: str) -> Head:
    """Create a head from a checkpoint.

    Args:
        fields: Its `config.json`.
        files: Its tensors.
        where: Name of the checkpoint, for error messages.

    Returns:
        The head on the CPU, in eval mode and in the smallest dtype that represents all its tensors. `layout` is set,
        and `ambiguity` if the files of an EAGLE-3 head are from elsewhere.

    Raises:
        CheckpointFormatError: The layout is unknown, the config is invalid, or tensors have invalid dtypes or values.
        HeadTensorsError: Tensors are missing, unknown, or have wrong shapes.
    """
    layout = find_layout(fields, frozenset(files.shapes), where)
    if layout.config_class is MtpConfig and lookup(fields, "transformer_layer_config.model_type") in LAYER_TYPES:
        return speculators_layer_mtp(fields, files, where)
    file_names, unread = names_of(layout, files.shapes, where)
    head = _planned(layout, fields, {ours: files.shapes[name] for ours, name in file_names.items()}, file_names, where)
    stored = files.read(file_names.values())
    tensors = {ours: copy_checked(ours, stored[name], where) for ours, name in file_names.items()}
    whole = completed(layout, fields, tensors)
    added = {name: copy_checked(name, whole[name], where) for name in whole.keys() - tensors.keys()}
    tensors, dtype = in_one_dtype({name: added.get(name, tensor) for name, tensor in whole.items()})
    masks = files.read(name for name in unread if name.endswith("t2d")).values()
    if "d2t" in tensors:
        tensors = in_vocabulary_order(tensors, next(iter(masks), None), head.config.vocab_size, where)
    head.load_state_dict(tensors, assign=True)
    if hasattr(head, "rotary_emb"):  # its buffers are computed, not loaded
        head.rotary_emb = _rotary(head.config, where)
    head.config.dtype = dtype
    head.layout = layout.name
    if layout.config_class is Eagle3Config and layout.name != NATIVE_LAYOUT:
        head.ambiguity = ambiguity_of(layout, fields)
    if layout.name in WHOLE_MODELS:
        head.config.base_model_name_or_path = where
    return head.eval()


# ----------------------------------------------------------------------------------------------- configuration


def _planned(layout: Layout, fields: Fields, shapes: Shapes, file_names: Mapping[str, str], where: str) -> Head:
    """Return a head on the meta device, after comparing its tensor names and shapes with those of the files.

    Args:
        layout, fields, where: See `read_head`.
        shapes: Shapes of the tensors in the files, by our names.
        file_names: Names in the files, by our names.

    Raises:
        CheckpointFormatError, HeadTensorsError: See `read_head`.
    """
    try:
        stored = {name: torch.empty(shape, dtype=_meta_dtype(name), device="meta") for name, shape in shapes.items()}
        shapes = {name: tuple(tensor.shape) for name, tensor in completed(layout, fields, stored).items()}
        head = _empty_head(layout, fields, shapes)
    except InvalidConfigError as error:
        raise CheckpointFormatError(f"{where} (layout {layout.name}): its config is invalid: {error}") from error
    except SpeculativeDecodingError as error:
        raise CheckpointFormatError(f"{where} (layout {layout.name}): {error}") from error
    except Exception as error:  # transformers' validation and torch raise many types
        reason = " ".join(str(error).split())[:300]
        raise CheckpointFormatError(
            f"{where} (layout {layout.name}): its config is invalid: {type(error).__name__}: {reason}."
        ) from error
    check_shapes(head, shapes, file_names, where)
    return head


def _meta_dtype(name: str) -> torch.dtype:
    return torch.long if name in VOCABULARIES else torch.float32


def _empty_head(layout: Layout, fields: Fields, shapes: Shapes) -> Head:
    """Return a head on the meta device, according to the config and the shapes of the tensors."""
    if layout.name == NATIVE_LAYOUT:
        config = layout.config_class.from_dict(fields)
    else:
        settings = _settings(layout, fields, shapes)
        config = layout.config_class(**checked(settings, layout.config_class.rules))
    counted = [getattr(config, name, 1) for name in ("medusa_num_heads", "medusa_num_layers", "num_hidden_layers")]
    if max(*counted, len(getattr(config, "eagle_aux_hidden_state_layer_ids", None) or ())) > len(shapes):
        raise CheckpointFormatError("its config has more layers or heads than there are tensors.")
    with torch.device("meta"):
        return HEADS[layout.config_class](config)


def _settings(layout: Layout, fields: Fields, shapes: Shapes) -> dict[str, Any]:
    """Return the fields of our config, from the checkpoint's config and the shapes of its tensors by our names."""
    for path, wanted in layout.expected.items():
        found = lookup(fields, path, wanted)
        if found != wanted:
            raise CheckpointFormatError(f"`{path}` is {shown(found)}; only {wanted!r} is supported.")
    given = {ours: lookup(fields, path) for ours, path in layout.fields.items()}
    settings = {**layout.fixed, **{name: value for name, value in given.items() if value is not None}}
    if layout.config_class is MedusaConfig:
        return {**settings, **medusa_fields(settings, shapes)}
    if layout.config_class is DFlashConfig:
        check_block_tensors(shapes)
        settings = {**layer_fields(layout, without_windows(layout, fields), shapes), **settings}
        return {**settings, **block_fields(layout, fields, settings, shapes)}
    layer = layer_fields(layout, fields, shapes)
    if layout.config_class is EagleConfig:
        return {"bias": True, **layer, **settings}
    if layout.config_class is MtpConfig:
        return {"bias": "eh_proj.bias" in shapes, **layer, **settings}
    return {**layer, **settings, **eagle3_fields(layout, fields, {**layer, **settings}, shapes)}


# ----------------------------------------------------------------------------------------------- tensors


def _rotary(config: Any, where: str) -> DraftRotaryEmbedding:
    """Return the rotary embedding on the CPU; its frequencies are computed, because checkpoints do not store them."""
    try:
        with torch.device("cpu"):
            rotary = DraftRotaryEmbedding(config)
    except Exception as error:  # see _empty_head
        raise CheckpointFormatError(f"{where}: its config has invalid rotary positions: {error}.") from error
    frequencies, scaling = rotary.inv_freq, rotary.attention_scaling
    if not bool(frequencies.isfinite().all()) or not isinstance(scaling, int | float) or not math.isfinite(scaling):
        raise CheckpointFormatError(f"{where}: rope_parameters {config.rope_parameters} give no finite frequencies.")
    return rotary


def _known() -> str:
    return ", ".join(dict.fromkeys(layout.name for layout in ALL_LAYOUTS))
