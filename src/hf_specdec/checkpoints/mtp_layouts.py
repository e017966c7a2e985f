"""The layouts of MTP modules: those of speculators, and the `mtp.*` tensors in a target's own checkpoint.

transformers ignores these tensors when it loads Qwen3-Next and Qwen3.5.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from huggingface_hub import errors as hub_errors
from huggingface_hub import hf_hub_download
from transformers import PreTrainedModel

from hf_specdec.checkpoints.draft_layers import (
    VERIFIER,
    is_partly_rotated,
    layer_fields,
    speculators_layer,
    text_positions,
)
from hf_specdec.checkpoints.files import MAX_INDEX_BYTES, TensorFiles, shard_names
from hf_specdec.checkpoints.layout import ROTARY_BUFFER, Layout, Shapes, assembled
from hf_specdec.errors import (
    CheckpointFormatError,
    DrafterMismatchError,
    InvalidConfigError,
    UnsupportedModelError,
    listed,
    translated,
)
from hf_specdec.heads.layer_mtp import (
    LAYER_TYPES,
    SPECULATORS_NAMES,
    TENSOR_NAMES,
    LayerMtpConfig,
    LayerMtpHead,
    experts_joined,
    renamed,
)
from hf_specdec.heads.mtp import MtpHead
from hf_specdec.heads.schema import LAYER_MTP, TEXT, checked
from hf_specdec.records import Fields, read_json
from hf_specdec.transformers_private import commit_hash, model_name, unexpected_keys
from hf_specdec.verification.memory import persistent_tensors
from hf_specdec.verification.model import text_config

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"

OTHER_WAYS = "Load an MTP module that was trained for it (model.load_drafter(...)), or choose another method."

# ----------------------------------------------------------------------------------------------- speculators


def _settings(layout: Layout, fields: Fields, known: Fields, shapes: Shapes) -> Fields:
    return {"bias": "eh_proj.bias" in shapes, **layer_fields(layout, fields, shapes), **known}


def _layer_settings(layout: Layout, fields: Fields, known: Fields, shapes: Shapes) -> Fields:
    """Return the arguments of `LayerMtpConfig`: the checked fields of the target's layer, and its name."""
    layer, target = fields[layout.layer_config], known.get("base_model_name_or_path")
    if target is not None and not TEXT.holds(target):
        raise CheckpointFormatError(f"the verifier's name_or_path must be {TEXT.expected}.")
    rope = layer.get("rope_parameters", layer.get("rope_scaling"))
    given = {**layer, "rope_parameters": text_positions(rope) if isinstance(rope, dict) else rope}
    chosen = {name: value for name, value in checked(given, LAYER_MTP).items() if value is not None}
    settings: Fields = {"layer": {**chosen, "model_type": layer["model_type"]}, "base_model_name_or_path": target}
    made = LayerMtpConfig(**settings).layer_config()
    if made.head_dim * made.rope_parameters.get("partial_rotary_factor", 1.0) < 2:
        raise InvalidConfigError("`partial_rotary_factor` leaves no dimensions to rotate.")
    return settings


def _refusals(head: MtpHead) -> Mapping[str, bool]:
    config = head.config
    return {
        "the format has no draft vocabulary": config.draft_vocab_size is not None,
        "the format uses the target's embedding, but this module has its own": config.own_embedding,
        "the format needs Qwen3's layer, with norms of queries and keys (train with qk_norm=True)": not config.qk_norm,
        "`input_proj` and the MLP have no bias": config.bias or config.mlp_bias,
        "biases of query, key and value require one of the output projection": config.qkv_bias
        and not config.attention_bias,
        "the format has no sliding window": config.sliding_window is not None,
        "the format rotates all dimensions of a head": is_partly_rotated(config),
    }


_SPECULATORS = Layout(
    name="speculators-mtp",
    head_class=MtpHead,
    writers="speculators (vLLM), MTP",
    marks={"speculators_model_type": "mtp"},
    settings_of=_settings,
    fields={"base_model_name_or_path": VERIFIER},
    expected={"num_nextn_predict_layers": 1},
    renames=(
        ("mtp_layers.0.token_layernorm.", "enorm."),
        ("mtp_layers.0.hidden_layernorm.", "hnorm."),
        ("mtp_layers.0.input_proj.", "eh_proj."),
        ("mtp_layers.0.final_layernorm.", "norm."),
        ("mtp_layers.0.", "layers.0."),
    ),
    unread=(ROTARY_BUFFER, r"lm_head\.weight", r"verifier_lm_head\.weight"),
    layer_config="transformer_layer_config",
    of_verifier=True,
    format="speculators-mtp",
    refusals=_refusals,
    config_of=lambda head: {**speculators_layer(head, "mtp", "MTPDraftModel"), "num_nextn_predict_layers": 1},
    readers=lambda head: "speculators: `MTPDraftModel.from_pretrained(HERE)`, with the target named in its config.",
    holds=("num_steps",),
)
_SPECULATORS_LAYERS = tuple(
    Layout(
        name=_SPECULATORS.name,
        head_class=LayerMtpHead,
        writers=_SPECULATORS.writers,
        marks={**_SPECULATORS.marks, "transformer_layer_config.model_type": kind},
        settings_of=_layer_settings,
        fields=_SPECULATORS.fields,
        expected=_SPECULATORS.expected,
        renames=tuple((f"mtp_layers.0.{old}", f"module.{new}") for old, new in SPECULATORS_NAMES.items()),
        unread=(r"(verifier_)?lm_head\.weight", r"embed_tokens\.weight"),
        complete=lambda fields, tensors: experts_joined(tensors),
        layer_config=_SPECULATORS.layer_config,
    )
    for kind in LAYER_TYPES
)

MTP_LAYOUTS = (*_SPECULATORS_LAYERS, _SPECULATORS)
"""All layouts of MTP modules; the first that matches is used."""

# ----------------------------------------------------------------------------------------------- a target's own


def drops_mtp(model: PreTrainedModel) -> bool:
    """Whether `target_mtp` is needed: transformers drops the MTP tensors of this model's checkpoints.

    False if transformers' own MTP code can read them, or if `LayerMtpHead` does not support the model's layers.
    """
    text = text_config(model)
    patterns = unexpected_keys(model) or ()
    ignored = any(re.match(pattern, "mtp.fc.weight") for pattern in patterns)
    return ignored and getattr(text, "num_mtp_layers", None) is None and text.model_type in LAYER_TYPES


@persistent_tensors()
def target_mtp(model: PreTrainedModel) -> LayerMtpHead:
    """Return the MTP module in a target's checkpoint: a local directory, or a repository (cached or downloaded)."""
    name, where = model_name(model.config), type(model).__name__
    if not name:
        raise DrafterMismatchError(
            f"This {where} was not loaded from a checkpoint, so its MTP module cannot be read.",
            f"Load it with from_pretrained(). {OTHER_WAYS}",
        )
    text = text_config(model)
    if getattr(text, "mtp_num_hidden_layers", 1) == 0:
        raise DrafterMismatchError(f"{where} has no MTP module: its mtp_num_hidden_layers is 0.", OTHER_WAYS)
    files = _target_files(name, commit_hash(model.config))
    stored = [theirs for theirs in files.shapes if theirs.startswith("mtp.")]
    if not stored:
        raise DrafterMismatchError(f"The checkpoint of {where}, {name}, has no MTP module (mtp.*).", OTHER_WAYS)
    if any(re.match(r"mtp\.layers\.[1-9]", theirs) for theirs in stored):
        raise UnsupportedModelError(f"The checkpoint {name} has several MTP layers; one is supported.", OTHER_WAYS)
    names = {renamed(theirs.removeprefix("mtp."), TENSOR_NAMES): theirs for theirs in stored}
    head = assembled(
        lambda shapes: LayerMtpHead(LayerMtpConfig(text.to_dict(), name)), names, files, name, experts_joined
    )
    head.name_or_path = name
    return head


def _target_files(name: str, revision: str | None) -> TensorFiles:
    """Open the safetensors files of a target's checkpoint that hold MTP tensors, or its only one."""
    whole = _find(name, WEIGHTS, revision)
    if whole is not None:
        return TensorFiles([whole])
    index = _find(name, INDEX, revision)
    if index is None:
        raise DrafterMismatchError(f"{name} has no safetensors to read its MTP module from.", OTHER_WAYS)
    shards, mapping = shard_names(index), read_json(index, MAX_INDEX_BYTES)["weight_map"]
    wanted = {mapping[stored] for stored in mapping if stored.startswith("mtp.")}
    found = {shard: _find(name, shard, revision) for shard in shards if shard in wanted}
    missing = [shard for shard, path in found.items() if path is None]
    if missing:
        raise DrafterMismatchError(
            f"{name} lacks {listed(missing)}, which its index names.", "Download it completely."
        )
    return TensorFiles([path for path in found.values() if path is not None])


def _find(name: str, file: str, revision: str | None) -> Path | None:
    """Return the path of a checkpoint's file, downloaded if it is not cached; None if it does not exist.

    Other than a head's, the files are trusted as far as transformers, which has read them, trusts them.
    """
    folder = Path(name)
    if folder.is_dir():
        return folder / file if (folder / file).is_file() else None
    try:
        return Path(hf_hub_download(name, file, revision=revision, local_files_only=True))
    except hub_errors.LocalEntryNotFoundError:
        pass  # not cached, or it does not exist
    problem = f"{file} of {name}, which may hold its MTP module, cannot be read"
    with translated(DrafterMismatchError, problem, OTHER_WAYS):
        try:
            return Path(hf_hub_download(name, file, revision=revision))
        except hub_errors.EntryNotFoundError:
            return None
