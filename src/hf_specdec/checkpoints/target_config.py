"""Checks on a target model's config before transformers loads the model."""

from __future__ import annotations

from typing import Any

from hf_specdec.errors import CheckpointFormatError, sentence

EXPECTED_MODEL = "Give a model's directory or its Hub id."

CONNECT = "Connect to the Hub, or give the directory of a downloaded model."
"""What to do if a model's Hub id is given, but the Hub cannot be reached."""


def refuse_foreign_kernels(fields: dict[str, Any], where: str) -> None:
    """Raise if a config makes transformers download kernels from a repository that the user did not name.

    Args:
        fields: The model's `config.json`.
        where: Name of the model, for the error message.

    Raises:
        CheckpointFormatError: An attention or expert implementation is the name of a repository.
    """
    for name, value in fields.items():
        if isinstance(value, dict):
            refuse_foreign_kernels(value, where)
        elif name.endswith(("attn_implementation", "experts_implementation")) and "/" in str(value):
            raise CheckpointFormatError(
                f"The config of {where} loads code from another repository: {name} is {value!r}.",
                "If you trust it, load the model yourself with attn_implementation=... and attach it.",
            )


def first_sentence(error: Exception) -> str:
    """Return an error's message up to its first ". " after 20 characters, or the whole message; newlines removed.

    It ends with a full stop, so that another sentence can follow.
    """
    text = " ".join(str(error).split()) or type(error).__name__
    end = text.find(". ", 20)
    return sentence(text if end < 0 else text[: end + 1])
