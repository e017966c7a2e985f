"""What the settings of all objectives share: how much of an answer is learned, and other values by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, TypeVar

from hf_specdec.config import MAX_STEPS, check_names
from hf_specdec.errors import InvalidConfigError
from hf_specdec.records import shortened

LARGEST = 10**6
"""No weight, share or number of steps of a recipe is larger."""
MOST_TOKENS = 2**31
"""Nobody's answer is longer."""
STEEPEST = 2
"""A weight relative to the one before: after 64 steps it is still a number."""

AnyRecipe = TypeVar("AnyRecipe", bound="Recipe")


@dataclass(frozen=True, slots=True)
class Recipe:
    """Settings of an objective.

    Args:
        answer_tokens: Learn from the first so many tokens of every answer, and measure on them; 0 is all. Long answers
            go round in themselves, which is easily foretold; how they begin is not.
    """

    answer_tokens: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        check_numbers(self, {"answer_tokens": MOST_TOKENS, "aligned_steps": MAX_STEPS, "step_decay": STEEPEST,
                             "head_decay": STEEPEST})  # fmt: skip
        if self.answer_tokens < 0:
            raise InvalidConfigError(f"`answer_tokens` must be >= 0 (0: all), got {self.answer_tokens}.")

    def changed(self: AnyRecipe, /, **fields: Any) -> AnyRecipe:
        """The same recipe with other values.

        Raises:
            InvalidConfigError: Fields that it has not, or values that mean nothing.
        """
        known = asdict(self)
        check_names(f"The recipe {type(self).__name__}", fields, list(known))
        for name, value in fields.items():
            expected = (float, int) if type(known[name]) is float else (type(known[name]),)
            if type(value) not in expected:
                raise InvalidConfigError(
                    f"`{name}` of a recipe is {known[name]!r} or the like, got {shortened(value)}."
                )
        return replace(self, **fields)


def check_numbers(settings: Any, largest: Mapping[str, int] = MappingProxyType({}), otherwise: int = LARGEST) -> None:
    """See that the numbers and switches of a dataclass are of the kind of their defaults, finite, and not too large.

    Args:
        settings: The dataclass.
        largest: Values, by field.
        otherwise: For all other fields.

    Raises:
        InvalidConfigError: Naming the first field that is something else.
    """
    for setting in fields(settings):
        name, like, value = setting.name, setting.default, getattr(settings, setting.name)
        most = largest.get(name, otherwise)
        if isinstance(like, bool):
            right, expected = isinstance(value, bool), "true or false"
        elif isinstance(like, int):
            right = isinstance(value, int) and not isinstance(value, bool) and abs(value) <= most
            expected = f"an integer of at most {most}"
        elif isinstance(like, float):
            number = isinstance(value, int | float) and not isinstance(value, bool)
            right = number and abs(value) <= most  # false for NaN
            expected = f"a finite number of at most {most}"
        else:
            continue
        if not right:
            shown = str(value)[:40] if isinstance(value, float | str | bool | None) else type(value).__name__
            raise InvalidConfigError(f"`{name}` must be {expected}, got {shown}.")
