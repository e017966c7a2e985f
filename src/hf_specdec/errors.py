"""Exceptions of this package. Every message states what was expected, what was found and how to fix it."""

from __future__ import annotations


class SpeculativeDecodingError(Exception):
    """Base class of all errors that this package raises.

    Args:
        message: What was expected and what was found.
        hint: How to fix it; appended to the message.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(printable(f"{message} {hint}".rstrip()))
        self.hint = hint


def printable(text: str) -> str:
    """Escape control characters, such as terminal colour codes; keep line breaks.

    Example: a red "x", `"\\x1b[31mx"`, is printed as `\\x1b[31mx`.
    """
    return "".join(
        char if char.isprintable() or char == "\n" else char.encode("unicode_escape").decode() for char in text
    )


class UnsupportedModelError(SpeculativeDecodingError):
    """The model does not support speculation (recurrent state, encoder-decoder, ...) or the requested operation."""


class UnsupportedGenerationError(SpeculativeDecodingError):
    """A `generate()` option that cannot be combined with `speculative=`; raised before decoding where possible."""


class DrafterMismatchError(SpeculativeDecodingError):
    """A drafter that does not fit the target model (sizes, vocabulary, layers, tensors), or that is not loaded."""


class CheckpointFormatError(SpeculativeDecodingError):
    """A head or model that cannot be loaded: missing or broken files, an unknown layout, an invalid config."""


class HeadTensorsError(CheckpointFormatError, DrafterMismatchError):
    """A head whose files can be read, but whose tensors do not match its config."""


class InvalidConfigError(SpeculativeDecodingError, ValueError):
    """An invalid value or an unknown field name."""


class CacheCapacityError(SpeculativeDecodingError):
    """The KV cache has too few slots for the prompt, the answer and one tree."""
