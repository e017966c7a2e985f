"""Recognise PARD assistants by their configs: language models that predict several tokens at mask tokens.

Source: PARD (https://github.com/AMD-AGI/PARD). Files are those of any causal language model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_specdec.checkpoints.layouts import is_head_config
from hf_specdec.checkpoints.refusals import ARCHITECTURES
from hf_specdec.errors import CheckpointFormatError

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
