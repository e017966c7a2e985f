"""Load a PARD assistant for a target, from a directory or the Hub."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from hf_specdec.checkpoints.hub import Checkpoint, open_checkpoint, read_config
from hf_specdec.checkpoints.pard import assistant_refusal, check_numbers, is_assistant_config, needs_features
from hf_specdec.checkpoints.target_config import first_sentence, refuse_foreign_kernels
from hf_specdec.checkpoints.tensors import copy_checked
from hf_specdec.drafters.pard import PardDrafter
from hf_specdec.errors import CheckpointFormatError, HeadTensorsError, InvalidConfigError, listed
from hf_specdec.records import Fields
from hf_specdec.verification.memory import persistent_tensors
from hf_specdec.verification.model import execution_device

PLACE_OPTIONS = ("revision", "token", "subfolder", "cache_dir", "local_files_only", "force_download")
"""Arguments of `from_pretrained` that say where a file is."""

MAX_BUFFER_BYTES = 2**30
"""Maximum size in bytes of the tables that an assistant computes, such as causal masks and positions."""


def assistant_config(source: str | Path, options: Mapping[str, Any]) -> Fields | None:
    """Return the config of a PARD assistant; None if the source is something else, such as a head.

    Args:
        source: A directory or a Hub id.
        options: Arguments of `from_pretrained`, without those that are None.

    Raises:
        CheckpointFormatError: There is no `config.json`, or it cannot be read; or it is that of a PARD-2 assistant.
    """
    fields = read_config(source, **{name: options[name] for name in PLACE_OPTIONS if name in options})
    if not is_assistant_config(fields):
        return None
    if needs_features(fields):
        raise assistant_refusal(fields, str(source))
    return fields


@persistent_tensors()
def assistant_drafter(
    model: PreTrainedModel, source: str | Path, fields: Fields, options: Mapping[str, Any]
) -> PardDrafter:
    """Load a PARD assistant, by default in the target's dtype and on its device, and return its drafter.

    Args:
        model: The target.
        source: A directory or a Hub id.
        fields: The assistant's config.
        options: Arguments of `AutoModelForCausalLM.from_pretrained`, and `device`. With `trust_remote_code=True` and
            code in the repository, transformers reads the files; otherwise this package does, as those of a head.

    Raises:
        CheckpointFormatError: The model cannot be loaded, is quantised, or its config loads kernels from another
            repository; or see `open_checkpoint`.
        HeadTensorsError: The files do not hold the tensors that the config describes.
        InvalidConfigError: `hot_tokens` is given, which only heads have.
    """
    if "hot_tokens" in options:
        raise InvalidConfigError(f"{source} is a PARD assistant, which has no `hot_tokens`.", "Leave them out.")
    if "attn_implementation" not in options:
        refuse_foreign_kernels(dict(fields), str(source))
    arguments = {"dtype": model.dtype, "trust_remote_code": False, **options}
    device = arguments.pop("device", None)
    places = {name: arguments[name] for name in PLACE_OPTIONS if name in arguments}
    checkpoint = open_checkpoint(source, **places)
    try:
        if arguments["trust_remote_code"] and "auto_map" in fields:
            assistant = AutoModelForCausalLM.from_pretrained(source, **arguments)
        else:
            others = arguments.keys() - {*PLACE_OPTIONS, "trust_remote_code"}
            assistant = _read(checkpoint, {name: arguments[name] for name in others})
    except CheckpointFormatError:
        raise
    except Exception as error:  # broken weights raise many types of error
        raise CheckpointFormatError(
            f"The PARD assistant {str(source)!r} cannot be loaded: {first_sentence(error)}",
            "Use the directory or Hub id of a causal language model.",
        ) from error
    if "device_map" not in arguments:
        assistant = assistant.to(execution_device(model) if device is None else device)
    return PardDrafter(assistant.eval())


def _read(checkpoint: Checkpoint, options: Mapping[str, Any]) -> PreTrainedModel:
    """Create an assistant from its config and tensors, after comparing their sizes; transformers opens no file.

    Args:
        checkpoint: Its config and files.
        options: Arguments of `from_pretrained` that concern neither places nor trust.

    Raises:
        CheckpointFormatError, HeadTensorsError: See `assistant_drafter`.
    """
    where, files = checkpoint.where, checkpoint.files
    fields = {name: value for name, value in checkpoint.fields.items() if name != "auto_map"}
    check_numbers("", fields, len(files.shapes), where)
    if fields.get("quantization_config"):
        raise CheckpointFormatError(
            f"{where} is a quantised assistant, which is not read.",
            "Load it yourself, and pass it to generate() as assistant_model=.",
        )
    config = CONFIG_MAPPING[fields["model_type"]].from_dict(fields)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    needed = sum(parameter.numel() for parameter in empty.parameters())
    stored = sum(torch.Size(shape).numel() for shape in files.shapes.values())
    tables = sum(buffer.nbytes for buffer in empty.buffers())
    if needed > stored or tables > MAX_BUFFER_BYTES:
        raise HeadTensorsError(
            f"{where}: its config describes {needed:,} weights and {tables:,} bytes of tables; its files hold "
            f"{stored:,} weights, and at most {MAX_BUFFER_BYTES:,} bytes of tables are computed."
        )
    state = {name: copy_checked(name, tensor, where) for name, tensor in files.read(files.shapes).items()}
    assistant: PreTrainedModel
    assistant, report = type(empty).from_pretrained(
        None,
        config=config,
        state_dict=state,
        **{**options, "output_loading_info": True, "ignore_mismatched_sizes": True},
    )
    missing = sorted({*report["missing_keys"], *(str(names[0]) for names in report["mismatched_keys"])})
    if missing:
        raise HeadTensorsError(f"{where}: tensors are missing or have wrong shapes: {listed(missing)}.")
    assistant.name_or_path = assistant.config.name_or_path = where
    return assistant
