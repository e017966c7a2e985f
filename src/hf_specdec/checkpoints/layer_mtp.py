"""Read MTP modules that are built from the target's layer: from the target's own checkpoint, or from speculators.

transformers ignores the `mtp.*` tensors of Qwen3-Next and Qwen3.5 when it loads these models.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import errors as hub_errors
from huggingface_hub import hf_hub_download
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.checkpoints.draft_layers import text_positions
from hf_specdec.checkpoints.files import MAX_INDEX_BYTES, TensorFiles, read_json, shard_names
from hf_specdec.checkpoints.layouts import lookup
from hf_specdec.checkpoints.tensors import check_shapes, copy_checked, in_one_dtype
from hf_specdec.errors import (
    CheckpointFormatError,
    DrafterMismatchError,
    HeadTensorsError,
    InvalidConfigError,
    UnsupportedModelError,
    listed,
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
from hf_specdec.heads.schema import LAYER_MTP, TEXT, checked
from hf_specdec.records import Fields
from hf_specdec.transformers_private import commit_hash, model_name, unexpected_keys
from hf_specdec.verification.memory import persistent_tensors
from hf_specdec.verification.model import text_config

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"

ALTERNATIVES = "Load an MTP module that was trained for it (model.load_drafter(...)), or choose another method."


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
    """Return the MTP module in a target's checkpoint: a local directory, or a repository (cached or downloaded).

    Raises:
        DrafterMismatchError: The model was not loaded from a checkpoint, or its checkpoint has no safetensors, no MTP
            module, or lacks a file.
        UnsupportedModelError: The checkpoint has several modules.
        HeadTensorsError: Tensors are missing, unknown, or have wrong shapes.
        CheckpointFormatError: The config is invalid, a file is broken, or tensors have invalid dtypes or values.
    """
    name, where = model_name(model.config), type(model).__name__
    if not name:
        raise DrafterMismatchError(
            f"This {where} was not loaded from a checkpoint, so its MTP module cannot be read.",
            f"Load it with from_pretrained(). {ALTERNATIVES}",
        )
    text = text_config(model)
    if getattr(text, "mtp_num_hidden_layers", 1) == 0:
        raise DrafterMismatchError(f"{where} has no MTP module: its mtp_num_hidden_layers is 0.", ALTERNATIVES)
    files = _target_files(name, commit_hash(model.config))
    names = {stored: stored.removeprefix("mtp.") for stored in files.shapes if stored.startswith("mtp.")}
    if not names:
        raise DrafterMismatchError(f"The checkpoint of {where}, {name}, has no MTP module (mtp.*).", ALTERNATIVES)
    if any(re.match(r"layers\.[1-9]", rest) for rest in names.values()):
        raise UnsupportedModelError(f"The checkpoint {name} has several MTP layers; one is supported.", ALTERNATIVES)
    ours = {stored: renamed(rest, TENSOR_NAMES) for stored, rest in names.items()}
    return _head(LayerMtpConfig(text.to_dict(), name), files, ours, name)


def speculators_layer_mtp(fields: Fields, files: TensorFiles, where: str) -> LayerMtpHead:
    """Return an MTP module that speculators (type `mtp`) stored for a target with one of `LAYER_TYPES`.

    Args:
        fields: The checkpoint's config.
        files: Its tensors.
        where: Its name, for error messages.

    Raises:
        HeadTensorsError, CheckpointFormatError: See `target_mtp`.
    """
    if fields.get("num_nextn_predict_layers", 1) != 1:
        raise CheckpointFormatError(f"{where}: `num_nextn_predict_layers` must be 1.")
    target = lookup(fields, "speculators_config.verifier.name_or_path")
    if target is not None and not TEXT.holds(target):
        raise CheckpointFormatError(f"{where}: the verifier's name_or_path must be {TEXT.expected}.")
    config = LayerMtpConfig(_checked_layer(fields["transformer_layer_config"], where), target)
    prefix = "mtp_layers.0."
    unread = ("lm_head.weight", "verifier_lm_head.weight", "embed_tokens.weight")
    names = {
        stored: renamed(stored.removeprefix(prefix), SPECULATORS_NAMES) if stored.startswith(prefix) else stored
        for stored in files.shapes
        if stored not in unread
    }
    head = _head(config, files, names, where)
    head.layout = "speculators-mtp"
    return head


def _checked_layer(layer: Fields, where: str) -> dict[str, Any]:
    """Return the fields of an untrusted layer config that define the module, after checking them."""
    rope = layer.get("rope_parameters", layer.get("rope_scaling"))
    given = {**layer, "rope_parameters": text_positions(rope) if isinstance(rope, dict) else rope}
    try:
        fields = {name: value for name, value in checked(given, LAYER_MTP).items() if value is not None}
    except InvalidConfigError as error:
        raise CheckpointFormatError(f"{where}: its config is invalid: {error}") from error
    return {**fields, "model_type": layer["model_type"]}


def _target_files(name: str, revision: str | None) -> TensorFiles:
    """Open the safetensors files of a target's checkpoint that hold MTP tensors, or its only one.

    Raises:
        DrafterMismatchError: The checkpoint has no safetensors, or a file is missing or cannot be downloaded.
    """
    whole = _find(name, WEIGHTS, revision)
    if whole is not None:
        return TensorFiles([whole])
    index = _find(name, INDEX, revision)
    if index is None:
        raise DrafterMismatchError(f"{name} has no safetensors to read its MTP module from.", ALTERNATIVES)
    shards, mapping = shard_names(index), read_json(index, MAX_INDEX_BYTES)["weight_map"]
    wanted = {mapping[stored] for stored in mapping if stored.startswith("mtp.")}
    found = [(shard, _find(name, shard, revision)) for shard in shards if shard in wanted]
    missing = [shard for shard, path in found if path is None]
    if missing:
        raise DrafterMismatchError(
            f"{name} lacks {listed(missing)}, which its index names.", "Download it completely."
        )
    return TensorFiles([path for _, path in found if path is not None])


def _find(name: str, file: str, revision: str | None) -> Path | None:
    """Return the path of a checkpoint's file, downloaded if it is not cached; None if it does not exist.

    Raises:
        DrafterMismatchError: The file cannot be downloaded.
    """
    folder = Path(name)
    if folder.is_dir():
        return folder / file if (folder / file).is_file() else None
    try:
        return Path(hf_hub_download(name, file, revision=revision, local_files_only=True))
    except hub_errors.LocalEntryNotFoundError:
        pass  # not cached, or it does not exist
    try:
        return Path(hf_hub_download(name, file, revision=revision))
    except hub_errors.EntryNotFoundError:
        return None
    except Exception as error:  # huggingface_hub's errors, or its HTTP library's, which depend on the version
        reason = " ".join(str(error).split())[:300]
        raise DrafterMismatchError(
            f"{file} of {name}, which may hold its MTP module, cannot be read: {reason}", ALTERNATIVES
        ) from error


def _head(config: LayerMtpConfig, files: TensorFiles, names: dict[str, str], where: str) -> LayerMtpHead:
    """Return a module with its tensors loaded, in eval mode on the CPU, after checking their names and shapes.

    Args:
        config: Its config.
        files: The files.
        names: Our tensor names by those in the files.
        where: Name of the checkpoint, for error messages.

    Raises:
        HeadTensorsError, CheckpointFormatError: See `target_mtp`.
    """
    head = _on_meta(config, where)
    try:
        stored = experts_joined({
            ours: torch.empty(files.shapes[name], dtype=torch.float32, device="meta") for name, ours in names.items()
        })  # fmt: skip
    except RuntimeError as error:  # a size that no tensor can have
        raise HeadTensorsError(f"{where}: a tensor has an impossible shape: {str(error)[:200]}") from error
    shapes = {name: tuple(tensor.shape) for name, tensor in stored.items()}
    check_shapes(head, shapes, {ours: name for name, ours in names.items()}, where)
    values = files.read(names)
    tensors: dict[str, Tensor] = {ours: copy_checked(name, values[name], where) for name, ours in names.items()}
    tensors, dtype = in_one_dtype(experts_joined(tensors))
    head.load_state_dict(tensors, assign=True)
    head.reset_rotary()
    if not bool(head.rotary_emb.inv_freq.isfinite().all()):
        raise CheckpointFormatError(f"{where}: rope_parameters give no finite frequencies.")
    head.config.dtype, head.name_or_path = dtype, where
    return head.eval()


def _on_meta(config: LayerMtpConfig, where: str) -> LayerMtpHead:
    try:
        layer = config.layer_config()
        if layer.head_dim * layer.rope_parameters.get("partial_rotary_factor", 1.0) < 2:
            raise InvalidConfigError("`partial_rotary_factor` leaves no dimensions to rotate.")
        with torch.device("meta"):
            return LayerMtpHead(config)
    except InvalidConfigError as error:
        raise CheckpointFormatError(f"{where}: {error}") from error
    except Exception as error:  # transformers' validation and torch raise many types
        reason = " ".join(str(error).split())[:300]
        raise CheckpointFormatError(f"{where}: its config is invalid: {type(error).__name__}: {reason}.") from error
