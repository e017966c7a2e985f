"""Exceptions of this package."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager


class SpeculativeDecodingError(Exception):
    """Base class of the errors defined by this package.

    Args:
        message: What was expected and what was found.
        hint: How to fix it; appended to the message.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(printable(f"{message} {hint}".rstrip()))
        self.hint = hint


def printable(text: str) -> str:
    """Return the text with unprintable characters, such as those of terminal colour codes, escaped; keep line breaks.

    Example: ESC (character 27) becomes the four characters `\\x1b`.
    """
    return "".join(
        char if char.isprintable() or char == "\n" else char.encode("unicode_escape").decode() for char in text
    )


def sentence(text: str) -> str:
    """Return the text with a full stop at its end, unless it ends with a punctuation mark."""
    text = text.rstrip()
    return text if text.endswith((".", "!", "?")) else f"{text}."


def first_sentence(error: BaseException) -> str:
    """Return an error's message up to its first ". " after 20 characters, or the whole message; newlines removed.

    It ends with a full stop, so that another sentence can follow.
    """
    text = " ".join(str(error).split()) or type(error).__name__
    end = text.find(". ", 20)
    return sentence(text if end < 0 else text[: end + 1])


@contextmanager
def translated(
    error: type[SpeculativeDecodingError], message: str, hint: str | Callable[[Exception], str] = "",
    kinds: tuple[type[Exception], ...] = (Exception,),
) -> Iterator[None]:  # fmt: skip
    """Convert the errors of other libraries, which differ by version, to one of ours; ours pass unchanged.

    The first sentence of the other error is appended to the message. `hint` may be a function of that error.
    """
    try:
        yield
    except SpeculativeDecodingError:
        raise
    except kinds as failure:
        way = hint if isinstance(hint, str) else hint(failure)
        raise error(f"{message}: {sentence(first_sentence(failure)[:300])}", way) from failure


def listed(names: Sequence[str], at_most: int = 8) -> str:
    """Return names as a text for an error message: at most `at_most` of them, each cut after 120 characters.

    Example: `listed(["a", "b", "c"], 2)` is "a, b and 1 more".
    """
    shown = ", ".join(name[:120] for name in names[:at_most])
    return shown if len(names) <= at_most else f"{shown} and {len(names) - at_most} more"


class UnsupportedModelError(SpeculativeDecodingError):
    """Raised if the model does not support speculation (encoder-decoder, no usable KV cache, ...) or a feature."""


class UnsupportedGenerationError(SpeculativeDecodingError):
    """Raised if a `generate()` option cannot be combined with `speculative=`; if possible before decoding begins."""


class DrafterMismatchError(SpeculativeDecodingError):
    """Raised if a drafter does not fit the target model (sizes, vocabulary, ...), is invalid or is not loaded."""


class CheckpointFormatError(SpeculativeDecodingError):
    """Raised if a head or model cannot be loaded: missing or broken files, an unknown layout, an invalid config."""


class HeadTensorsError(CheckpointFormatError, DrafterMismatchError):
    """Raised if the files of a head can be read, but its tensors do not match its config."""


class InvalidConfigError(SpeculativeDecodingError, ValueError):
    """Raised if an argument, a config or an input file has an invalid value or an unknown field."""


class CacheCapacityError(SpeculativeDecodingError):
    """Raised if the KV cache has too few slots for prompt, answer and one tree, or does not fit in memory."""
