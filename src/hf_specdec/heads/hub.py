"""Load a head from a directory or the Hub, whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import errors as hub_errors
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open

from hf_specdec.errors import CheckpointFormatError, SpeculativeDecodingError
from hf_specdec.heads.eagle import EagleConfig, EagleHead
from hf_specdec.heads.eagle3 import Eagle3Config, Eagle3Head
from hf_specdec.heads.medusa import MedusaConfig, MedusaHeads

WEIGHTS_NAME = "model.safetensors"

Head = EagleHead | Eagle3Head | MedusaHeads
HEADS: dict[str, tuple[type[EagleConfig | MedusaConfig], type[Head]]] = {
    EagleConfig.model_type: (EagleConfig, EagleHead),
    Eagle3Config.model_type: (Eagle3Config, Eagle3Head),
    MedusaConfig.model_type: (MedusaConfig, MedusaHeads),
}
"""Configuration and class by the `model_type` of a head's config."""


def load_head(
    repo_or_path: str | Path, *, revision: str | None = None, token: str | bool | None = None, **kwargs: Any
) -> Head:
    """Read a head in this package's own layout (safetensors and `config.json`).

    Args:
        repo_or_path: A local directory or a Hub id.
        revision: Branch, tag or commit on the Hub.
        token: Hub token; None uses the stored one.
        **kwargs: Further arguments of `huggingface_hub.snapshot_download`, e.g. `cache_dir`.

    Returns:
        The head, in the dtype it was stored in.

    Raises:
        CheckpointFormatError: No such repository or directory, no known layout, a broken file, missing or unknown
            tensors or tensors of another shape.
    """
    folder = _fetch(repo_or_path, {**kwargs, "revision": revision, "token": token})
    config = _read_config(folder)
    tensors = _read_tensors(folder / WEIGHTS_NAME)
    try:
        head = HEADS[config.model_type][1](config)
    except SpeculativeDecodingError:
        raise
    except (TypeError, ValueError, KeyError, ZeroDivisionError, RuntimeError) as error:
        raise CheckpointFormatError(f"{folder / 'config.json'} describes no head: {error}.") from error
    wanted = head.state_dict()
    missing, unknown = sorted(wanted.keys() - tensors.keys()), sorted(tensors.keys() - wanted.keys())
    shapes = [
        f"{name} {tuple(tensors[name].shape)} instead of {tuple(wanted[name].shape)}"
        for name in sorted(wanted.keys() & tensors.keys())
        if tensors[name].shape != wanted[name].shape
    ]
    problems = [
        f"{kind}: {', '.join(names)}"
        for kind, names in (("missing tensors", missing), ("unknown tensors", unknown), ("wrong shapes", shapes))
        if names
    ]
    if problems:
        raise CheckpointFormatError(f"{folder / WEIGHTS_NAME} does not fit its config. {'; '.join(problems)}.")
    head.to(next(tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()))
    head.load_state_dict(tensors)
    _check_hot_tokens(head, folder)
    return head.eval()


def _fetch(repo_or_path: str | Path, download: dict[str, Any]) -> Path:
    folder = Path(repo_or_path)
    if folder.is_dir():
        return folder
    try:
        patterns = ["config.json", WEIGHTS_NAME]
        return Path(snapshot_download(str(repo_or_path), allow_patterns=patterns, **download))
    except (hub_errors.HfHubHTTPError, hub_errors.HFValidationError, hub_errors.LocalEntryNotFoundError, OSError) as e:
        raise CheckpointFormatError(
            f"There is no head at {str(repo_or_path)!r}: it is no local directory, and the Hub says: {e}",
            "Give a directory with config.json and model.safetensors, or a Hub id.",
        ) from e


def _read_config(folder: Path) -> EagleConfig | MedusaConfig:
    path = folder / "config.json"
    try:
        fields: Any = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointFormatError(f"{path} cannot be read: {error}.", "A head needs a config.json.") from error
    kind = fields.get("model_type") if isinstance(fields, dict) else None
    if kind not in HEADS:
        raise CheckpointFormatError(
            f"{path} has model_type {kind!r}, expected {' or '.join(map(repr, HEADS))}.",
            "This version reads heads saved by hf_specdec; other published layouts are not read yet.",
        )
    try:
        config: EagleConfig | MedusaConfig = HEADS[kind][0].from_dict(fields)
        return config
    except Exception as error:  # transformers' validation raises classes of its own
        raise CheckpointFormatError(f"{path} describes no head: {error}.") from error


def _read_tensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a dict)
    except (OSError, SafetensorError) as error:
        raise CheckpointFormatError(f"{path} cannot be read: {error}.") from error


def _check_hot_tokens(head: Head, folder: Path) -> None:
    ids = head.hot_token_ids
    if ids is None:
        return
    if bool((ids[1:] <= ids[:-1]).any()) or int(ids[0]) < 0 or int(ids[-1]) >= head.config.vocab_size:
        raise CheckpointFormatError(
            f"{folder / WEIGHTS_NAME}: d2t must give ascending target ids below {head.config.vocab_size}."
        )
