"""The registry of drafting methods: their names, their requirements and the factories of their drafters.

The methods of this package register themselves: `@register("name", ...)` stands above each drafter's class. A package
adds methods with `register_drafter`, or with an entry point of the group `hf_specdec.methods` that refers to a
`Method`.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import TypeVar

from torch import nn
from transformers import PreTrainedModel

from hf_specdec import drafters
from hf_specdec.config import AUTO, COMBINED, ENTRY_POINTS, HYBRID, PLAIN
from hf_specdec.drafters.base import Drafter
from hf_specdec.errors import DrafterMismatchError, InvalidConfigError
from hf_specdec.validation import unknown_method

DrafterClass = TypeVar("DrafterClass", bound=type[Drafter])


@dataclass(frozen=True, slots=True)
class Method:
    """One drafting method, as `register_drafter` adds it.

    Args:
        name: Name of the method.
        make: Returns its drafter. Called with a loaded head if `heads` is not empty, otherwise without arguments.
        aliases: Further names.
        heads: Classes of heads that it drafts with; empty if it needs no trained head.
        part: Another part that its drafter needs, such as "an assistant model".
        how_given: How a user provides that part, as an imperative sentence.
        native: Makes a drafter of the model's own modules, without a head.
    """

    name: str
    make: Callable[..., Drafter]
    aliases: tuple[str, ...] = ()
    heads: tuple[type[nn.Module], ...] = ()
    part: str = ""
    how_given: str = ""
    native: Callable[[PreTrainedModel], Drafter] | None = None

    @property
    def requires(self) -> str | None:
        """What the user must do first, as an imperative sentence; None if nothing."""
        if self.heads and self.native is None:
            return "call model.load_drafter(path_or_hub_id)"
        return self.how_given or None


_METHODS: dict[str, Method] = {}

HISTORY = "history"
"""Name of the part of merged drafters that drafts from earlier answers, if the config sets `history`."""

RESERVED = (*COMBINED, PLAIN)
"""Values of `method` that are in no registry."""

GRAMMAR = "grammar"
"""Method that drafts what a logits processor's grammar forces; merged drafters use it in calls that have one."""

FREE = ("prompt_lookup", "token_recycling", GRAMMAR)
"""Methods that `"auto"` and `"hybrid"` merge with the loaded drafters, because they cost almost nothing."""


def register(
    name: str, *, aliases: Sequence[str] = (), heads: Sequence[type[nn.Module]] = (), part: str = "",
    how_given: str = "",
) -> Callable[[DrafterClass], DrafterClass]:  # fmt: skip
    """Return a class decorator that adds a drafter as a method, see `register_drafter`, and sets its `method`.

    A static method `native` of the class makes a drafter of the model's own modules if no head is loaded.
    """

    def add(drafter: DrafterClass) -> DrafterClass:
        drafter.method = name
        native = getattr(drafter, "native", None)
        _add(Method(name, drafter, tuple(aliases), tuple(heads), part, how_given, native))
        return drafter

    return add


def register_drafter(
    name: str, make: Callable[..., Drafter], *, aliases: Sequence[str] = (),
    heads: Sequence[type[nn.Module]] = (), part: str = "", how_given: str = "",
    native: Callable[[PreTrainedModel], Drafter] | None = None,
) -> Method:  # fmt: skip
    """Add a drafting method, so that `speculative=name` finds it.

    Args:
        name: Name of the method.
        make: Returns its drafter. Called with a loaded head if `heads` names its class, otherwise without arguments.
        aliases: Further names.
        heads: Classes of draft heads that it drafts with.
        part: Another part that it needs, for error messages, such as "an assistant model".
        how_given: How a user provides that part, as an imperative sentence.
        native: Makes a drafter of the model's own modules if no head is loaded.

    Returns:
        The method.

    Raises:
        InvalidConfigError: `make` cannot be called, a name is `"auto"`, `"hybrid"`, `"plain"` or another method's, or
            a head belongs to another method.
    """
    if not callable(make):
        kind = type(make).__name__
        raise InvalidConfigError(
            f"`make` must be a class or a function that returns a drafter, got a {kind}.",
            f"Pass {kind}, or add this drafter to a model with model.add_drafter(...).",
        )
    _import_own_methods()
    return _add(Method(name, make, tuple(aliases), tuple(heads), part, how_given, native))


def _add(method: Method) -> Method:
    for name in (method.name, *method.aliases):
        if name in RESERVED or any(name in (row.name, *row.aliases) for row in _METHODS.values()):
            raise _taken(name)
    for head in method.heads:
        if any(head in row.heads for row in _METHODS.values()):
            raise InvalidConfigError(f"Another method drafts with {head.__name__}.", "Use a subclass of it.")
    _METHODS[method.name] = method
    return method


def _taken(name: str) -> InvalidConfigError:
    return InvalidConfigError(f"There is already a method {name!r}.", "Choose another name.")


def methods() -> Mapping[str, Method]:
    """Return every method by name, including those that installed packages add."""
    _import_own_methods()
    _load_entry_points()
    return dict(_METHODS)


@functools.cache
def _import_own_methods() -> None:
    """Import all modules of `hf_specdec.drafters`, whose classes then register themselves."""
    for module in pkgutil.walk_packages(drafters.__path__, f"{drafters.__name__}."):
        importlib.import_module(module.name)


@functools.cache
def _load_entry_points() -> None:
    for entry in entry_points(group=ENTRY_POINTS):
        method = entry.load()
        if not isinstance(method, Method):
            raise InvalidConfigError(
                f"The entry point {entry.name!r} of {ENTRY_POINTS} is a {type(method).__name__}, not a Method.",
                "It must refer to a hf_specdec.drafters.registry.Method.",
            )
        _add(method)


def check_drafter_name(name: str, own: Collection[str]) -> None:
    """Refuse a drafter's name that would hide a method with other drafts.

    A drafter may have the names and aliases of its `own` methods.
    """
    rows = methods()
    method = next((row.name for row in rows.values() if name in row.aliases), name)
    if method in (AUTO, PLAIN) or (method not in own and method in (HYBRID, *rows)):
        raise _taken(name)


def method_named(name: str, registered: Iterable[str] = ()) -> str:
    """Resolve an alias to its method; return other names (of methods, drafters, `"auto"`, ...) as they are."""
    rows = methods()
    aliases = {alias: row.name for row in rows.values() for alias in row.aliases}
    method = aliases.get(name, name)
    available = {*RESERVED, *rows, *registered}
    if method in available:
        return method
    raise unknown_method(name, sorted(available))


def drafter_of(head: nn.Module) -> Drafter:
    """Create a drafter for a loaded head."""
    for method in methods().values():
        if type(head) in method.heads:
            return method.make(head)
    raise DrafterMismatchError(
        f"No method drafts with a {type(head).__name__}.", "Register one with hf_specdec.register_drafter(...)."
    )
