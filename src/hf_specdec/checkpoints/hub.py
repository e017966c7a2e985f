"""Heads in a directory or on the Hub: find, open, load and inspect them, in any layout of `checkpoints/formats.py`.

Importing this module registers our heads with transformers' `AutoConfig` and `AutoModel`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi
from huggingface_hub.utils._validators import validate_repo_id
from torch import Tensor
from transformers import AutoConfig, AutoModel, PreTrainedModel

from hf_specdec.checkpoints.files import TensorFiles, read_frequent_tokens, shard_names
from hf_specdec.checkpoints.formats import HEADS, LAYOUTS, Head, read_head
from hf_specdec.checkpoints.layout import lookup
from hf_specdec.checkpoints.sources import Folder, open_source
from hf_specdec.errors import CheckpointFormatError, DrafterMismatchError, InvalidConfigError, translated
from hf_specdec.records import Fields, read_json
from hf_specdec.verification.features import LAST
from hf_specdec.verification.memory import persistent_tensors

QUANTISATION_NAME = "hf_quant_config.json"

MEDUSA_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
"""Weights of Medusa heads that are stored without their target."""

WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""Weight files in order of preference; pickles last."""

for _head_class in HEADS:
    AutoConfig.register(_head_class.config_class.model_type, _head_class.config_class, exist_ok=True)
    AutoModel.register(_head_class.config_class, _head_class, exist_ok=True)


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """The adapter of a target, found beside a head."""

    where: str  # directory or repository of the head, for error messages
    weights: Path  # the adapter's safetensors file


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The config and the opened weight files of a head."""

    where: str
    fields: Fields
    files: TensorFiles
    adapter: AdapterFiles | None = None  # the target's, which the head needs; None if there is none


@persistent_tensors()
def load_head(
    repo_or_path: str | Path, *, revision: str | None = None, token: str | bool | None = None, subfolder: str = "",
    cache_dir: str | Path | None = None, force_download: bool = False, local_files_only: bool = False,
    dtype: torch.dtype | None = None, device: torch.device | str | None = None,
    hot_tokens: Tensor | str | Path | None = None,
) -> Head:  # fmt: skip
    """Load a head from files in any published layout: EAGLE, Medusa, DFlash, MTP, speculators, SpecForge, ...

    The layout is recognised by configuration and tensor names.

    Args:
        repo_or_path: A local directory or a Hub id.
        revision: Branch, tag or commit on the Hub.
        token: Hub token; None for the stored one.
        subfolder: Subfolder of the directory or repository.
        cache_dir, force_download, local_files_only: As in transformers.
        dtype: Dtype of the weights; None for the stored one.
        device: Device of the weights; None for the CPU.
        hot_tokens: Restrict drafts to these target ids `[n]`, or to an FR-Spec list (path of a `freq_*.pt`); only for
            heads that share the target's lm_head.

    Returns:
        The head, in eval mode; `head.layout` names the layout that was found.

    Raises:
        CheckpointFormatError: The head does not exist, has an unknown or unsupported layout, or a file is broken.
        HeadTensorsError: Tensors are missing, unknown, or have wrong shapes.
        InvalidConfigError: The hot tokens are invalid, or the head does not support them.

    Example:
        ```python
        head = load_head("org/head", dtype=torch.bfloat16)
        model.load_drafter(head)
        ```
    """
    download = {"revision": revision, "token": token, "cache_dir": cache_dir, "force_download": force_download,
                "local_files_only": local_files_only}  # fmt: skip
    return head_in(open_source(repo_or_path, subfolder, download), dtype, device, hot_tokens)


@persistent_tensors()
def head_in(
    source: Folder, dtype: torch.dtype | None = None, device: torch.device | str | None = None,
    hot_tokens: Tensor | str | Path | None = None,
) -> Head:  # fmt: skip
    """Load the head in an opened directory or repository; see `load_head`."""
    checkpoint = checkpoint_in(source)
    head = read_head(checkpoint.fields, checkpoint.files, checkpoint.where)
    head.name_or_path = checkpoint.where
    head.adapter = checkpoint.adapter
    if hot_tokens is not None:
        head.use_hot_tokens(hot_tokens if isinstance(hot_tokens, Tensor) else read_frequent_tokens(Path(hot_tokens)))
    head.to(device=device, dtype=dtype)
    return head


def checkpoint_in(source: Folder) -> Checkpoint:
    """Find the files of a head or assistant, and read everything but the values of the weights."""
    fields = source.fields
    quantised = source.find(QUANTISATION_NAME)
    if quantised is not None and lookup(
        read_json(quantised, error=CheckpointFormatError), "quantization.quant_algo|quant_algo"
    ):
        raise CheckpointFormatError(
            f"{source.name} is a quantised head ({QUANTISATION_NAME}), which is not supported.",
            "Use the original weights.",
        )
    names = (*MEDUSA_FILES, *WEIGHT_FILES) if any(key.startswith("medusa") for key in fields) else WEIGHT_FILES
    found = next((path for name in names if (path := source.find(name)) is not None), None)
    if found is None:
        raise CheckpointFormatError(f"There are no weights in {source.name}; looked for {', '.join(names)}.")
    shards = [found]
    if found.name.endswith(".index.json"):
        shards = []
        for name in shard_names(found):
            shard = source.find(name)
            if shard is None:
                raise CheckpointFormatError(f"{found} names {name}, which does not exist.")
            shards.append(shard)
    adapter = None
    if source.find("adapter_config.json") is not None:
        weights = source.find("adapter_model.safetensors")
        if weights is None:
            raise CheckpointFormatError(
                f"{source.name} holds an adapter_config.json, so the head belongs to an adapted target, but there is "
                "no adapter_model.safetensors.",
                "Download or save the adapter's weights next to it.",
            )
        adapter = AdapterFiles(source.name, weights)
    return Checkpoint(source.name, fields, TensorFiles(shards), adapter)


# ----------------------------------------------------------------------------------------------- adapted targets

PEFT_PREFIX = "base_model.model."


def check_target_adapter(model: PreTrainedModel, adapter: AdapterFiles) -> None:
    """Check that the adapter with which a head was trained is loaded, active and equal to the stored one.

    Source: the export of `eagle_base_lora` in ModelOpt (`modelopt/torch/export/plugins/hf_spec_export.py`), in peft's
    format.
    """
    stored = TensorFiles([adapter.weights])
    names = sorted(stored.shapes)
    if not names:
        raise CheckpointFormatError(f"{adapter.weights} holds no tensors.")
    loaded = dict(_loaded(model))
    values = stored.read(names)
    absent = []
    for name, value in values.items():
        found = loaded.get(name.removeprefix(PEFT_PREFIX))
        fits = found is not None and found.shape == value.shape and not found.is_meta
        if found is None or not fits or not torch.equal(found.detach().cpu(), value.to(found.dtype)):
            absent.append(name)
    if absent:
        state = "it is not loaded" if len(absent) == len(names) else f"{len(absent)} of its tensors differ"
        raise DrafterMismatchError(
            f"The head {adapter.where} was trained together with an adapter of its target, and {state} or not "
            f"active in this {type(model).__name__}.",
            f"First load it, without merging: model.load_adapter({str(adapter.weights.parent)!r}).",
        )


def _loaded(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield name and value of the parameters of active adapters; names as in peft's files, without `PEFT_PREFIX`."""
    for path, module in model.named_modules():
        if getattr(module, "disable_adapters", True):
            continue
        active = set(module.active_adapters)
        for name, parameter in module.named_parameters():
            match = re.fullmatch(r"(lora_[AB]|lora_embedding_[AB]|lora_magnitude_vector)\.([^.]+)(\.weight)?", name)
            if match and match[2] in active:
                suffix = "" if match[1] == "lora_magnitude_vector" else match[3] or ""
                yield f"{path}.{match[1]}{suffix}".removeprefix(PEFT_PREFIX), parameter


# ----------------------------------------------------------------------------------------------- reports

IN_CARD = ("recipe", "tau")
"""Config fields that the model card shows: how the head was trained, and what was measured."""

UNREPORTED = (
    "transformers_version", "architectures", "dtype", "_name_or_path", "model_type", "base_model_name_or_path",
    "vocab_size", "draft_vocab_size", "eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids",
)  # fmt: skip
"""Config fields that are left out of `HeadReport.config`: reported elsewhere, or irrelevant."""


@dataclass(frozen=True, slots=True)
class HeadReport:
    """Properties of a head that can be loaded."""

    where: str
    layout: str  # name in `checkpoints/formats.py`
    writers: str  # programs that write the layout
    method: str  # for `speculative=`
    head: str  # class name
    target: str | None  # according to its config
    parameters: int  # number of weights
    dtype: str
    files: dict[str, int]  # sizes in bytes by name
    vocabulary: int | None  # V of the target
    draft_vocabulary: int | None  # Vd
    layers_read: list[int] | None  # numbers of hidden states, see `Features`; None: the authors' default
    ambiguous: list[str]  # fields of `Reading` that the files leave open
    needs_adapter: bool  # whether the head was trained together with an adapter of its target
    config: dict[str, Any]  # fields with other values than the defaults of the class
    in_card: list[str]  # long fields of the config that are stored, but only shown in the model card

    def to_dict(self) -> dict[str, Any]:
        """Return a dictionary for JSON."""
        return asdict(self)


def inspect_head(repo_or_path: str | Path, *, subfolder: str = "", **download: Any) -> HeadReport:
    """Load a head and report its properties.

    Args:
        repo_or_path: A local directory or a Hub id.
        subfolder: Subfolder of the directory or repository.
        **download: Arguments of `huggingface_hub.hf_hub_download`: `revision`, `token`, ...
    """
    checkpoint = checkpoint_in(open_source(repo_or_path, subfolder, download))
    head = read_head(checkpoint.fields, checkpoint.files, checkpoint.where)
    config = head.config
    names = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids")
    layers = next((getattr(config, name) for name in names if hasattr(config, name)), [LAST])
    return HeadReport(
        where=checkpoint.where,
        layout=head.layout,
        writers=next(layout.writers for layout in LAYOUTS if layout.name == head.layout),
        method=head.method,
        head=type(head).__name__,
        target=config.base_model_name_or_path,
        parameters=sum(parameter.numel() for parameter in head.parameters()),
        dtype=str(head.dtype).removeprefix("torch."),
        files={file.name: file.stat().st_size for file in checkpoint.files.files},
        vocabulary=config.vocab_size or None,
        draft_vocabulary=config.draft_vocab_size,
        layers_read=layers,
        ambiguous=[] if head.ambiguity is None else head.ambiguity.open_fields,
        needs_adapter=checkpoint.adapter is not None,
        config={
            name: value
            for name, value in config.to_diff_dict().items()
            if name not in (*UNREPORTED, *IN_CARD) and value is not None
        },
        in_card=[name for name in IN_CARD if getattr(config, name, None) is not None],
    )


# ----------------------------------------------------------------------------------------------- published heads

METHOD_BY_WORD = {
    "eagle": "eagle", "hass": "eagle", "medusa": "medusa", "dflash": "dflash", "jetspec": "dflash", "dspark": "dflash",
    "lilicorr": "dflash", "domino": "dflash", "glimmer-30b-assistant": "dflash", "mtp": "mtp", "pard": "pard",
    "speculator": "eagle",
}  # fmt: skip
"""Method that a word in a repository's name stands for; the first that occurs counts."""


@dataclass(frozen=True, slots=True)
class PublishedHead:
    """A repository whose name says that it holds a draft head."""

    repo_id: str
    method: str  # value of `speculative=`; for "pard" the repository is passed as `assistant_model=`
    downloads: int  # in the last 30 days


def find_heads(target: str) -> list[PublishedHead]:
    """Return the draft heads on the Hub that are tagged with a base model or have its name in theirs.

    Files are not read: `hf-specdec inspect` and `load_drafter` check whether a head fits.

    Args:
        target: Hub id of the model, such as `"meta-llama/Llama-3.1-8B-Instruct"`.

    Returns:
        Heads, those with the most downloads first.
    """
    with translated(InvalidConfigError, f"{target!r} is not a Hub id", "Give the model's id, such as org/name."):
        validate_repo_id(target)
    api, name = HfApi(), target.rpartition("/")[2]
    way = "Try again with a connection to it, or search for heads in a browser."
    with translated(CheckpointFormatError, f"The Hub at {api.endpoint} cannot be searched", way):
        found = {
            model.id: model.downloads or 0
            for search in ({"filter": f"base_model:{target}"}, {"search": name})
            for model in api.list_models(**search, limit=200, sort="downloads")  # type: ignore[arg-type]
        }
    heads = []
    for repo_id, downloads in found.items():
        word = next((word for word in METHOD_BY_WORD if word in repo_id.lower()), None)
        if word is not None:
            heads.append(PublishedHead(repo_id, METHOD_BY_WORD[word], downloads))
    return sorted(heads, key=lambda head: (-head.downloads, head.repo_id))
