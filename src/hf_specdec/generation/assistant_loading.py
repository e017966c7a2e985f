"""Load a PARD assistant for a target, from a directory or the Hub."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_specdec.checkpoints.hub import read_config
from hf_specdec.checkpoints.pard import assistant_refusal, is_assistant_config, needs_features
from hf_specdec.checkpoints.target_config import first_sentence, refuse_foreign_kernels
from hf_specdec.drafters.pard import PardDrafter
from hf_specdec.errors import CheckpointFormatError, InvalidConfigError
from hf_specdec.records import Fields
from hf_specdec.verification.memory import persistent_tensors
from hf_specdec.verification.model import execution_device

PLACE_OPTIONS = ("revision", "token", "subfolder", "cache_dir", "local_files_only")
"""Arguments of `from_pretrained` that say where a file is."""


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
        options: Arguments of `AutoModelForCausalLM.from_pretrained`, and `device`. Code from the repository is run
            only with `trust_remote_code=True`.

    Raises:
        CheckpointFormatError: The model cannot be loaded, or its config loads kernels from another repository.
        InvalidConfigError: `hot_tokens` is given, which only heads have.
    """
    if "hot_tokens" in options:
        raise InvalidConfigError(f"{source} is a PARD assistant, which has no `hot_tokens`.", "Leave them out.")
    if "attn_implementation" not in options:
        refuse_foreign_kernels(dict(fields), str(source))
    arguments = {"dtype": model.dtype, "trust_remote_code": False, **options}
    device = arguments.pop("device", None)
    try:
        assistant = AutoModelForCausalLM.from_pretrained(source, **arguments)
    except Exception as error:  # broken weights raise many types of error
        raise CheckpointFormatError(
            f"The PARD assistant {str(source)!r} cannot be loaded: {first_sentence(error)}",
            "Use the directory or Hub id of a causal language model.",
        ) from error
    if "device_map" not in arguments:
        assistant = assistant.to(execution_device(model) if device is None else device)
    return PardDrafter(assistant.eval())
