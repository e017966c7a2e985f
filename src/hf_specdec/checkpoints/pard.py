"""Recognise PARD assistants by their configs: language models that predict several tokens at mask tokens.

Source: PARD (https://github.com/AMD-AGI/PARD). Files are those of any causal language model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hf_specdec.checkpoints.layouts import is_head_config
from hf_specdec.checkpoints.refusals import ARCHITECTURES
from hf_specdec.errors import CheckpointFormatError
from hf_specdec.heads.schema import MAX_POSITIONS, MAX_WIDTH, shown

MASK_FIELDS = ("pard_token", "ptd_token_id")
"""Config fields with the id of the mask token: PARD's, and another name that vLLM reads."""

PARD_2 = (
    "a PARD-2 assistant, which reads hidden states of the target through the target_proj in its warp_model.bin, a "
    "pickle; this is not supported"
)
"""Description of a PARD-2 assistant for error messages."""
PARD_2_HINT = (
    'Use a PARD assistant, or assistant_model= with speculative="draft_model", which drafts token by token and needs '
    "no hidden states."
)
"""What to do instead of loading a PARD-2 assistant."""


def mask_token_in(fields: Mapping[str, Any]) -> Any:
    """Return the mask token that a config names, unchecked; None if it names none.

    Args:
        fields: The config's fields.
    """
    return next((fields[name] for name in MASK_FIELDS if fields.get(name) is not None), None)


def needs_features(fields: Mapping[str, Any]) -> bool:
    """Whether a config is that of a PARD-2 assistant, which reads hidden states of the target."""
    return fields.get("spd_type") == "pard2" or bool(fields.get("pard2"))


def drafts_in_parallel(fields: Mapping[str, Any]) -> bool:
    """Whether a causal language model with this config is a PARD assistant (not PARD-2)."""
    return mask_token_in(fields) is not None and not needs_features(fields)


def is_assistant_config(fields: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is that of a PARD or PARD-2 assistant, and not of a head with a mask token (P-EAGLE)."""
    architectures = fields.get("architectures")
    known_head = isinstance(architectures, list) and any(name in ARCHITECTURES for name in map(str, architectures))
    if is_head_config(dict(fields)) or known_head or "dflash_config" in fields:
        return False
    if fields.get("pard_token") is None and fields.get("parallel_drafting"):  # as in configs of P-EAGLE heads
        return False
    return mask_token_in(fields) is not None or needs_features(fields)


MAX_PARTS = 512
"""Maximum of a number that counts parts of a model, such as layers, heads or experts, if its files hold fewer tensors:
parts are created one by one."""

PARTS, WIDTHS = (
    re.compile(r"(layer|head|expert|block|depth|group|types)(?!.*(size|dim)$)"),
    re.compile(r"dim$|(?<!vocab)_size$"),
)
"""Names of config fields with such numbers, and with sizes of a layer (not `vocab_size`)."""


def check_numbers(name: str, value: Any, num_tensors: int, where: str) -> None:
    """Check that a field of an assistant's config has no number that is too large to create a model.

    Args:
        name: The field.
        value: Its value; the fields of an object and the entries of a list are checked, too.
        num_tensors: Number of tensors in the assistant's files.
        where: Name of the assistant, for the error message.

    Raises:
        CheckpointFormatError: A number is too large.
    """
    if isinstance(value, dict):
        for inner, entry in value.items():
            check_numbers(inner, entry, num_tensors, where)
    elif isinstance(value, list):
        for entry in value:
            check_numbers(name, entry, num_tensors, where)
    elif isinstance(value, int):
        parts = max(num_tensors, MAX_PARTS)
        largest = parts if PARTS.search(name) else 4 * MAX_WIDTH if WIDTHS.search(name) else MAX_POSITIONS
        if abs(value) > largest:
            raise CheckpointFormatError(f"{where}: `{name}` is {shown(value)}, expected at most {largest}.")


def assistant_refusal(fields: Mapping[str, Any], where: str) -> CheckpointFormatError:
    """Return the error for an assistant where a head is expected.

    Args:
        fields: Its config.
        where: Its name.
    """
    if needs_features(fields):
        return CheckpointFormatError(f"{where} is {PARD_2}.", PARD_2_HINT)
    return CheckpointFormatError(
        f"{where} is a PARD assistant, a whole language model and not a head.",
        "Load it with model.load_drafter(path_or_hub_id), or pass it to generate() as assistant_model=.",
    )
