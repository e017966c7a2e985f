"""The documented signature of `generate()`: transformers' parameters and ours, for `help(model.generate)`.

transformers' text is not repeated: it describes decoding loops and arguments that are refused with `speculative`.
"""

from __future__ import annotations

import enum
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

Method = TypeVar("Method", bound=Callable[..., Any])


class _Unset(enum.Enum):
    """Type of `STORED_DEFAULT`, which no other value has."""

    STORED_DEFAULT = "generation_config.speculative"

    def __repr__(self) -> str:
        return "<generation_config.speculative>"


STORED_DEFAULT: Any = _Unset.STORED_DEFAULT
"""Default of `speculative=`: the value stored in the generation config, or None if there is none."""


def extends(original: Callable[..., Any]) -> Callable[[Method], Method]:
    """Decorator for a method that passes its arguments on: show the original's parameters in its signature, too.

    The method's own keyword-only parameters follow those of the original. Its docstring is kept.

    Example: `f(self, *args, new=None, **kwargs)` that extends `f(self, old, **kwargs)` has the signature
    `(self, old, *, new=None, **kwargs)`.
    """

    def decorate(method: Method) -> Method:
        own = inspect.signature(method).parameters.values()
        added = [parameter for parameter in own if parameter.kind is parameter.KEYWORD_ONLY]
        names = {parameter.name for parameter in added}
        given = [p for p in inspect.signature(original).parameters.values() if p.name not in names]
        rest = [parameter for parameter in given if parameter.kind is parameter.VAR_KEYWORD]
        kept = [parameter for parameter in given if parameter not in rest]
        documented = inspect.signature(original).replace(parameters=[*kept, *added, *rest])
        kept_names = [name for name in functools.WRAPPER_ASSIGNMENTS if name != "__doc__"]
        functools.update_wrapper(method, original, assigned=kept_names, updated=())
        method.__signature__ = documented  # type: ignore[attr-defined]
        return method

    return decorate
