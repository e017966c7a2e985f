"""Load a head, or a PARD or Gemma 4 assistant, for a target, and decide how an ambiguous head is read."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from hf_specdec.checkpoints.formats import (
    SHARING_ASSISTANTS,
    assistant_kind,
    assistant_refusal,
    is_assistant_config,
    needs_features,
)
from hf_specdec.checkpoints.hub import Checkpoint, check_target_adapter, checkpoint_in, head_in, load_head
from hf_specdec.checkpoints.layout import copy_checked
from hf_specdec.checkpoints.sources import Folder, open_source, refuse_foreign_kernels
from hf_specdec.drafters.base import Drafter
from hf_specdec.drafters.gemma4_assistant import Gemma4AssistantDrafter
from hf_specdec.drafters.pard import PardDrafter
from hf_specdec.drafters.registry import check_drafter_name, drafter_of, methods
from hf_specdec.errors import CheckpointFormatError, HeadTensorsError, InvalidConfigError, listed, translated
from hf_specdec.generation.reading_trial import choose_reading
from hf_specdec.heads.head import DraftHead
from hf_specdec.heads.readings import checked_reading
from hf_specdec.heads.schema import MAX_POSITIONS, MAX_WIDTH
from hf_specdec.records import Fields, shortened
from hf_specdec.validation import check_known
from hf_specdec.verification.memory import persistent_tensors
from hf_specdec.verification.model import execution_device, text_config

OWN_OPTIONS = ("name", "verify", "reading")
"""Options of `load_drafter` that are not options of `load_head`."""

PLACE_OPTIONS = ("revision", "token", "subfolder", "cache_dir", "local_files_only", "force_download")
"""Arguments of `from_pretrained` that say where a file is."""

MAX_BUFFER_BYTES = 2**30
"""Maximum size in bytes of the tables that an assistant computes, such as causal masks and positions."""

MAX_MODEL_PARTS = 512
"""Maximum of a number that counts parts of a model, such as layers, heads or experts, if its files hold fewer tensors:
parts are created one by one."""

PARTS, WIDTHS = (
    re.compile(r"(layer|head|expert|block|depth|group|types)(?!.*(size|dim)$)"),
    re.compile(r"dim$|(?<!vocab)_size$"),
)
"""Names of config fields with such numbers, and with sizes of a layer (not `vocab_size`)."""


def head_drafter(
    model: PreTrainedModel, source: str | Path | DraftHead, reading: Mapping[str, Any] | None, tries_readings: bool,
    options: Mapping[str, Any], name: str | None = None,
) -> Drafter:  # fmt: skip
    """Load a head, choose its reading if its files allow several (*ambiguous*), and return its drafter.

    If the files are those of an assistant, return its drafter instead.

    A loaded head whose reading has already been chosen keeps it unless `reading`, fields of a `Reading`, is given. The
    drafter is bound to the target only if several readings are tried, see `choose_reading`; unless `tries_readings`,
    the first one (the documented one) is used. The options are those of `load_head`, or of `_assistant`.
    """
    if not isinstance(source, str | Path | DraftHead):
        raise CheckpointFormatError(
            f"`repo_or_path` must be a local directory, a Hub id or a loaded head, got {type(source).__name__}.",
            "A whole model is passed to generate() as `assistant_model=`.",
        )
    if name is not None:
        of_assistants = {PardDrafter.method, Gemma4AssistantDrafter.method}
        check_drafter_name(name, of_assistants | {row.name for row in methods().values() if row.heads})
    wanted = {} if not reading else checked_reading(reading)
    given = {option: value for option, value in options.items() if value is not None}
    if isinstance(source, DraftHead):
        if given:
            raise InvalidConfigError(
                f"{', '.join(sorted(given))} are options for loading a head, but this {type(source).__name__} is "
                "already loaded.",
                "Leave them out, or pass its path or Hub id.",
            )
        head: Any = source
    else:
        files = opened(source, given)
        fields = assistant_config(files)
        if fields is not None:
            if wanted:
                kind = assistant_kind(fields)
                raise InvalidConfigError(f"`reading` is given, but {source} is a {kind}.", "Leave it out.")
            drafts = Gemma4AssistantDrafter if fields.get("model_type") in SHARING_ASSISTANTS else PardDrafter
            return drafts(_assistant(model, files, fields, given))
        known = [*OWN_OPTIONS, *list(inspect.signature(load_head).parameters)[1:]]
        check_known("load_drafter", given, known, kind="option")
        head = head_in(files, **{option: value for option, value in given.items() if option not in PLACE_OPTIONS})
    if head.adapter is not None:  # before the trial; binding checks it again
        check_target_adapter(model, head.adapter)
    drafter = drafter_of(head)
    check_drafter_name(name or drafter.method, (drafter.method,))  # before the trial
    if head.ambiguity is None:
        if wanted:
            raise InvalidConfigError(
                f"`reading` is given, but a {type(head).__name__} in the layout {head.layout} has only one reading.",
                "Leave it out.",
            )
        return drafter
    config = text_config(model)
    if head.reading is not None and not wanted:
        return drafter
    readings = head.ambiguity.chosen(config, wanted)
    head.read_as(readings[0], config)
    if len(readings) > 1 and tries_readings:
        try:
            with persistent_tensors():
                drafter.bind(model)
            head.read_as(choose_reading(model, head, readings), config)
        except BaseException:
            head.read_as(readings[0], config)
            head.reading = None  # not chosen: the next call tries again
            raise
    return drafter


def opened(source: str | Path, options: Mapping[str, Any]) -> Folder:
    """Return the files at a directory or Hub id; `options` as of `load_head`, without those that are None."""
    places = {name: options[name] for name in PLACE_OPTIONS if name in options}
    return open_source(source, places.pop("subfolder", ""), places)


# ----------------------------------------------------------------------------------------------- assistants


def assistant_config(files: Folder) -> Fields | None:
    """Return the config of an assistant; None if the files are something else, such as a head; refuse PARD-2."""
    fields = files.fields
    if not is_assistant_config(fields):
        return None
    if needs_features(fields):
        raise assistant_refusal(fields, files.name)
    return fields


@persistent_tensors()
def _assistant(model: PreTrainedModel, files: Folder, fields: Fields, options: Mapping[str, Any]) -> PreTrainedModel:
    """Load an assistant, by default in the target's dtype and on its device.

    `options` are arguments of `AutoModelForCausalLM.from_pretrained`, and `device`. With `trust_remote_code=True` and
    code in the repository, transformers reads the files; otherwise this package does, as those of a head.
    """
    kind = assistant_kind(fields)
    if "hot_tokens" in options:
        raise InvalidConfigError(f"{files.name} is a {kind}, which has no `hot_tokens`.", "Leave them out.")
    if "attn_implementation" not in options:
        refuse_foreign_kernels(fields, files.name)
    arguments = {"dtype": model.dtype, "trust_remote_code": False, **options}
    device = arguments.pop("device", None)
    checkpoint = checkpoint_in(files)
    problem, hint = f"The {kind} {files.name!r} cannot be loaded", "Use the files of a causal language model."
    if fields.get("model_type") in SHARING_ASSISTANTS:
        hint = "Install transformers 5.24 or later: 5.23 cannot create these assistants."
    with translated(CheckpointFormatError, problem, hint):
        if arguments["trust_remote_code"] and "auto_map" in fields:
            assistant = AutoModelForCausalLM.from_pretrained(files.name, **arguments)
        else:
            others = arguments.keys() - {*PLACE_OPTIONS, "trust_remote_code"}
            assistant = _read_assistant(checkpoint, {name: arguments[name] for name in others})
    if "device_map" not in arguments:
        assistant = assistant.to(execution_device(model) if device is None else device)
    return assistant.eval()


def _read_assistant(checkpoint: Checkpoint, options: Mapping[str, Any]) -> Any:
    """Create an assistant from its config and tensors, after comparing their sizes; transformers opens no file."""
    where, files = checkpoint.where, checkpoint.files
    fields = {name: value for name, value in checkpoint.fields.items() if name != "auto_map"}
    _check_sizes("", fields, len(files.shapes), where)
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
    integers = {name for name, buffer in empty.named_buffers() if not buffer.is_floating_point()}
    state = {
        name: tensor.clone() if name in integers else copy_checked(name, tensor, where)
        for name, tensor in files.read(files.shapes).items()
    }
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


def _check_sizes(name: str, value: Any, num_tensors: int, where: str) -> None:
    """Check that a field of an assistant's config holds no number that is too large to create a model."""
    if isinstance(value, dict):
        for inner, entry in value.items():
            _check_sizes(inner, entry, num_tensors, where)
    elif isinstance(value, list):
        for entry in value:
            _check_sizes(name, entry, num_tensors, where)
    elif isinstance(value, int):
        parts = max(num_tensors, MAX_MODEL_PARTS)
        largest = parts if PARTS.search(name) else 4 * MAX_WIDTH if WIDTHS.search(name) else MAX_POSITIONS
        if abs(value) > largest:
            raise CheckpointFormatError(f"{where}: `{name}` is {shortened(value)}, expected at most {largest}.")
