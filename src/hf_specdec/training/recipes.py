"""Base class for the settings of training objectives, and validation of numeric settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, TypeVar

from hf_specdec.errors import InvalidConfigError
from hf_specdec.records import shortened
from hf_specdec.validation import MAX_STEPS, check_known

LARGEST = 10**6
"""Largest absolute value of settings without a specific bound."""
MOST_TOKENS = 2**31
"""Upper bound of `answer_tokens` and of the settings of `distill` without a specific bound."""
MAX_DECAY = 2
"""Upper bound of decay factors; after the maximum of 64 steps, 2**64 is still a finite float32."""

AnyRecipe = TypeVar("AnyRecipe", bound="Recipe")


@dataclass(frozen=True, slots=True)
class Recipe:
    """Base class for the settings of an objective.

    Args:
        answer_tokens: Train and measure on the first N tokens of each answer only; 0 for all. Long answers tend to
            repeat themselves, which is easy to predict; their beginnings are not.
    """

    answer_tokens: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        check_numbers(self, {"answer_tokens": MOST_TOKENS, "aligned_steps": MAX_STEPS, "step_decay": MAX_DECAY,
                             "head_decay": MAX_DECAY})  # fmt: skip
        if self.answer_tokens < 0:
            raise InvalidConfigError(f"`answer_tokens` must be >= 0 (0: all), got {self.answer_tokens}.")

    def changed(self: AnyRecipe, /, **fields: Any) -> AnyRecipe:
        """Return a copy with new values of the given fields.

        Raises:
            InvalidConfigError: A field is unknown, or a value has the wrong type or is out of range.
        """
        known = asdict(self)
        check_known(f"The recipe {type(self).__name__}", fields, list(known))
        for name, value in fields.items():
            expected = (float, int) if type(known[name]) is float else (type(known[name]),)
            if type(value) not in expected:
                raise InvalidConfigError(
                    f"`{name}` of a recipe must be of type {expected[0].__name__}, got {shortened(value)}."
                )
        return replace(self, **fields)


def check_numbers(settings: Any, largest: Mapping[str, int] = MappingProxyType({}), otherwise: int = LARGEST) -> None:
    """Check that the numbers and booleans of a dataclass have the type of their defaults and are within bounds.

    Args:
        settings: Instance of the dataclass.
        largest: Largest absolute value by field name.
        otherwise: Largest absolute value of all other fields.

    Raises:
        InvalidConfigError: A value is invalid; the message names the first such field.
    """
    for setting in fields(settings):
        name, default, value = setting.name, setting.default, getattr(settings, setting.name)
        most = largest.get(name, otherwise)
        if isinstance(default, bool):
            valid, expected = isinstance(value, bool), "true or false"
        elif isinstance(default, int):
            valid = isinstance(value, int) and not isinstance(value, bool) and abs(value) <= most
            expected = f"an integer of at most {most}"
        elif isinstance(default, float):
            number = isinstance(value, int | float) and not isinstance(value, bool)
            valid = number and abs(value) <= most  # false for NaN
            expected = f"a finite number of at most {most}"
        else:
            continue
        if not valid:
            shown = str(value)[:40] if isinstance(value, float | str | bool | None) else shortened(value)
            raise InvalidConfigError(f"`{name}` must be {expected}, got {shown}.")
