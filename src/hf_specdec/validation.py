"""Checks of user-given settings, shared by all configs: tables of rules, names and the paths of a static tree."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self, TypeVar

from hf_specdec.errors import InvalidConfigError
from hf_specdec.records import shortened

_ConfigClass = TypeVar("_ConfigClass", bound="ConfigFields")

Choice = tuple[int, ...]
"""Path of a static tree: ranks of the nodes below the root."""

MAX_NODES, MAX_STEPS, MAX_TOP_K = 4096, 64, 1024
"""Limits for stored heads: nodes and depth of a tree, children per node. In `SpeculativeConfig`, each of the three is
at most `MAX_NODES`."""

MAX_SLOTS = 2**48
"""Limit of `max_cache_length` in slots, larger than any device's memory."""

MAX_RANK = 2**31
"""Exclusive limit of a rank in a tree path, larger than any vocabulary."""

MAX_TIERS, MAX_WAIT = 64, 10**9
"""Limits of `AdaptiveConfig`: number of `candidate_steps`; `update_interval` and `warmup_batches`."""


def validate_choices(choices: Iterable[Any]) -> list[Choice]:
    """Validate the paths of a static tree and sort them level by level.

    A path is a tuple of ranks: `(0, 2)` is the third-best child of the root's best child (the notation of Medusa's
    `medusa_choices` and of vLLM's `speculative_token_tree`).

    Returns:
        The paths sorted by depth, then by rank.

    Raises:
        InvalidConfigError: No paths or more than `MAX_NODES`, an entry that is not a non-empty list or tuple, a rank
            that is not an integer from 0 to `MAX_RANK - 1`, a duplicate path, or a path whose parent is missing.
    """
    paths: list[Choice] = []
    for choice in choices:
        if len(paths) >= MAX_NODES:
            raise InvalidConfigError(f"A tree has at most {MAX_NODES} paths, got more.")
        if not isinstance(choice, list | tuple) or not choice:
            raise InvalidConfigError(
                f"A tree is a list of non-empty paths such as [(0,), (0, 0), (1,)], got the entry {shortened(choice)}."
            )
        if any(not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < MAX_RANK for rank in choice):
            raise InvalidConfigError(
                f"The ranks of a tree path must be integers from 0 to {MAX_RANK - 1}, got {shortened(choice)}."
            )
        paths.append(tuple(choice))
    if not paths:
        raise InvalidConfigError("A tree needs at least one path, got an empty list.")
    known = set(paths)
    if len(known) != len(paths):
        repeated = next(path for path in paths if paths.count(path) > 1)
        raise InvalidConfigError(f"The tree path {repeated} occurs twice.", "List each path once.")
    for path in paths:
        if len(path) > 1 and path[:-1] not in known:
            raise InvalidConfigError(f"The tree path {path} has no parent.", f"Add {path[:-1]} to the list.")
    return sorted(paths, key=lambda path: (len(path), path))


@dataclass(frozen=True, slots=True)
class Rule:
    """The allowed values of a field or an argument."""

    expected: str  # description for error messages
    holds: Callable[[Any], bool]

    def check(self, name: str, value: Any) -> None:
        """Raise `InvalidConfigError` unless the value is allowed."""
        if not self.holds(value):
            raise InvalidConfigError(f"`{name}` must be {self.expected}, got {shortened(value)}.")


def is_integer(value: Any) -> bool:
    """Whether a value is an integer; bools are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether a value is a finite number; bools are not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e300 < value < 1e300


def integer(least: int, most: int) -> Rule:
    """Return a rule that allows integers within bounds, both included."""
    return Rule(f"an integer from {least} to {most}", lambda value: is_integer(value) and least <= value <= most)


def number(least: float, most: float) -> Rule:
    """Return a rule that allows finite numbers within bounds, both included."""
    return Rule(f"a number from {least:g} to {most:g}", lambda value: is_number(value) and least <= value <= most)


def one_of(*choices: str) -> Rule:
    """Return a rule that allows one of several strings."""
    return Rule(f"one of {', '.join(map(repr, choices))}", lambda value: isinstance(value, str) and value in choices)


def optional(rule: Rule) -> Rule:
    """Return a rule that allows None in addition to what `rule` allows."""
    return Rule(f"{rule.expected}, or None", lambda value: value is None or rule.holds(value))


def list_of(rule: Rule, most: int) -> Rule:
    """Return a rule that allows lists of 1 to `most` entries, each allowed by `rule`."""
    return Rule(
        f"a list of 1 to {most} entries, each {rule.expected}",
        lambda value: isinstance(value, list) and 0 < len(value) <= most and all(map(rule.holds, value)),
    )


TRUTH = Rule("true or false", lambda value: isinstance(value, bool))


def check_values(values: Mapping[str, Any], rules: Mapping[str, Rule]) -> None:
    """Raise `InvalidConfigError` if a value is not allowed by the rule of its name."""
    for name, value in values.items():
        rules[name].check(name, value)


def require_integer(name: str, value: Any, least: int, most: int | None = None) -> None:
    """Raise `InvalidConfigError` unless an argument is an integer within bounds, both included."""
    above = Rule(f"an integer >= {least}", lambda value: is_integer(value) and value >= least)
    (above if most is None else integer(least, most)).check(name, value)


class ConfigFields:
    """Base class of the configs: frozen dataclasses, decorated with `named_fields`, that a dict can give as well.

    Attributes:
        rules: Allowed values by field name.
        aliases: Further names of fields in the constructor.
    """

    __slots__ = ()
    rules: ClassVar[Mapping[str, Rule]]
    aliases: ClassVar[Mapping[str, str]] = {}

    def check_fields(self) -> None:
        """Raise `InvalidConfigError` if the value of a field is not allowed."""
        check_values({name: getattr(self, name) for name in self.rules}, self.rules)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Create a config from a dict of its fields.

        Raises:
            InvalidConfigError: An unknown field (the message names the most similar one) or an invalid value.
        """
        return cls(**{str(name): value for name, value in values.items()})


def named_fields(cls: type[_ConfigClass]) -> type[_ConfigClass]:
    """Make the constructor of a config raise `InvalidConfigError` for unknown keywords, and take aliases of fields.

    An alias cannot be a dataclass field: `dataclasses.replace` would pass its old value along.
    """
    create: Any = cls.__init__
    names = [field.name for field in fields(cls)]  # type: ignore[arg-type]

    @functools.wraps(create)
    def create_from_known(self: Any, *args: Any, **kwargs: Any) -> None:
        check_known(cls.__name__, kwargs, [*names, *cls.aliases])
        given = {alias: kwargs.pop(alias, None) for alias in cls.aliases}
        create(self, *args, **kwargs)
        for alias, value in given.items():
            if value is None:
                continue
            name = cls.aliases[alias]
            cls.rules[name].check(alias, value)
            if getattr(self, name) not in (None, value):
                raise InvalidConfigError(
                    f"`{alias}` is another name of `{name}`, got {alias}={value} and {name}={getattr(self, name)}.",
                    "Give one of them.",
                )
            object.__setattr__(self, name, value)

    cls.__init__ = create_from_known  # type: ignore[method-assign]
    return cls


def check_known(owner: str, given: Iterable[Any], known: Sequence[str], kind: str = "field") -> None:
    """Check that all given names of fields, or of another kind, are known; an error suggests a similar known one."""
    for name in given:
        if name not in known:
            near = nearest(str(name)[:100], known, cutoff=0.4)
            question = "" if near is None else f"Did you mean {near!r}? "
            raise InvalidConfigError(
                f"{owner} has no {kind} {shortened(name)}.", f"{question}{kind.capitalize()}s: {', '.join(known)}."
            )


def check_type(name: str, value: Any, kinds: type | tuple[type, ...], remedy: str) -> None:
    """Raise `InvalidConfigError`, which says what to do instead, if an argument is an instance of no such class."""
    if not isinstance(value, kinds):
        named = " or ".join(kind.__name__ for kind in (kinds if isinstance(kinds, tuple) else (kinds,)))
        raise InvalidConfigError(f"`{name}` must be of type {named}, got {type(value).__name__}.", remedy)


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return the known name that was most probably meant by an unknown one; None if none is similar.

    It is the shortest of those that begin with `name`, otherwise the most similar; `cutoff` is the least similarity.
    """
    names = list(known)
    longer = [other for other in names if name and other.startswith(name)]
    return next(iter(sorted(longer, key=len) or difflib.get_close_matches(name, names, n=1, cutoff=cutoff)), None)


def unknown_method(name: str, names: Iterable[str]) -> InvalidConfigError:
    """Return the error for an unknown method or drafter; it lists the available names in their order."""
    names = list(names)
    near = nearest(name, names)
    meant = "" if near is None else f"Did you mean {near!r}? "
    return InvalidConfigError(
        f"Unknown method or drafter {name!r}.", f"{meant}Available: {', '.join(map(repr, names))}."
    )
