"""Checks on the configuration of a target model before transformers loads it."""

from __future__ import annotations

from typing import Any

from hf_specdec.errors import CheckpointFormatError

WHAT_TO_GIVE = "Give a model's directory or its Hub id."


def refuse_foreign_kernels(fields: dict[str, Any], where: str) -> None:
    """See that a model's configuration does not have transformers fetch code of a repository that nobody named.

    Args:
        fields: Its `config.json`.
        where: What to call it.

    Raises:
        CheckpointFormatError: Some attention or expert implementation in it is a repository of kernels.
    """
    for name, value in fields.items():
        if isinstance(value, dict):
            refuse_foreign_kernels(value, where)
        elif name.endswith(("attn_implementation", "experts_implementation")) and "/" in str(value):
            raise CheckpointFormatError(
                f"The config of {where} asks for code of another repository: {name} is {value!r}.",
                "If you trust it, load the model yourself, with attn_implementation=..., and attach it.",
            )


def first_line(error: Exception) -> str:
    """What an error says, in one sentence: up to the first end of one behind the first 20 characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    end = text.find(". ", 20)
    return text if end < 0 else text[: end + 1]
