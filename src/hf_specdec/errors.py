"""The error tree. Each message tells what was expected, what came and what to do; nothing here knows torch."""

from __future__ import annotations


class SpeculativeDecodingError(Exception):
    """Base of every error this package raises on purpose.

    Args:
        message: What was expected and what came.
        hint: What to do about it; appended to the text.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(printable(f"{message} {hint}".rstrip()))
        self.hint = hint


def printable(text: str) -> str:
    """The text with everything escaped that a terminal would obey instead of showing it; line breaks stay.

    Example: a red "x", `"\\x1b[31mx"`, is shown as `\\x1b[31mx`.
    """
    return "".join(
        char if char.isprintable() or char == "\n" else char.encode("unicode_escape").decode() for char in text
    )


class UnsupportedModelError(SpeculativeDecodingError):
    """The target's forward cannot verify a tree of tokens (recurrent state, alibi, encoder-decoder, ...)."""


class UnsupportedGenerationError(SpeculativeDecodingError):
    """A `generate()` option that cannot be kept together with `speculative=`; raised before any work."""


class DrafterMismatchError(SpeculativeDecodingError):
    """A drafter that does not fit: sizes, vocabulary, layers, tensors, or not loaded at all."""


class CheckpointFormatError(SpeculativeDecodingError):
    """A head's files cannot be read: no known layout, a broken file, a config that describes no head."""


class HeadTensorsError(CheckpointFormatError, DrafterMismatchError):
    """A head's files can be read, but its tensors are not those of the head that its config describes."""


class InvalidConfigError(SpeculativeDecodingError, ValueError):
    """A configuration value or field name that is not valid."""


class CacheCapacityError(SpeculativeDecodingError):
    """The preallocated key-value cache has too few slots for the prompt, the answer and one tree."""
