"""Attach the mixin to a loaded model by replacing the model's class with a subclass, and undo that."""

from __future__ import annotations

import functools
from typing import Any

from hf_specdec.errors import UnsupportedModelError
from hf_specdec.generation.state import STATE, SWAP, SpeculationState, state_of
from hf_specdec.verification.probe import gate, inspect_target


def swap_in(model: Any, mixin: type) -> None:
    """Check that a model supports speculation, then give it the mixin and a `SpeculationState`.

    Raises:
        UnsupportedModelError: See `inspect_target`. The model is not changed.
    """
    state = SpeculationState()
    base: Any = type(model)
    gate(model)
    state.facts = [inspect_target(model)]
    try:
        model.__dict__[STATE] = state
        model.__class__ = speculative_class(mixin, base)
    except BaseException:  # including KeyboardInterrupt
        model.__class__ = base
        model.__dict__.pop(STATE, None)
        raise


def swap_out(model: Any, mixin: type) -> None:
    """Restore the model's class and remove its state.

    Raises:
        UnsupportedModelError: The model was not attached but its class inherits from the mixin, or another thread is
            generating with it.
    """
    name = type(model).__name__
    base: Any = type(model).__bases__[-1]
    if issubclass(base, mixin) or type(model) is not speculative_class(mixin, base):
        raise UnsupportedModelError(f"The mixin is a base class of {name}.", "Only attach() can be undone.")
    with SWAP:
        if state_of(model).is_running_elsewhere():
            raise UnsupportedModelError(f"Another thread is generating with this {name}.", "Wait for it, then detach.")
        model.__class__ = base
        model.__dict__.pop(STATE, None)


@functools.cache
def speculative_class(mixin: type, base: type) -> type:
    """Return the subclass of mixin and model class, created once per pair.

    It has the model class's name, module and docstring: transformers and pipelines read the class name.
    """
    return type(
        base.__name__,
        (mixin, base),
        {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__,
         "__reduce_ex__": _reduce},
    )  # fmt: skip


def _reduce(self: Any, protocol: int) -> tuple[Any, ...]:
    """Implement `__reduce_ex__` with mixin, model class and attributes: pickle cannot import a `speculative_class`."""
    return _new_attached, type(self).__bases__, self.__dict__


def _new_attached(mixin: type, base: type) -> Any:
    cls: Any = speculative_class(mixin, base)
    return cls.__new__(cls)
