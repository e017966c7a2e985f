"""What the settings of all objectives share: how much of an answer is learned, and other values by name."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

from hf_specdec.errors import InvalidConfigError

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
        if self.answer_tokens < 0:
            raise InvalidConfigError(f"`answer_tokens` must be >= 0 (0: all), got {self.answer_tokens}.")

    def changed(self: AnyRecipe, **fields: Any) -> AnyRecipe:
        """The same recipe with other values.

        Raises:
            InvalidConfigError: Fields that it has not, or values that mean nothing.
        """
        known = asdict(self)
        wrong = [name for name in fields if name not in known]
        if wrong:
            raise InvalidConfigError(
                f"The recipe {type(self).__name__} has no {', '.join(wrong)}.", f"It has {', '.join(known)}."
            )
        for name, value in fields.items():
            expected = (float, int) if type(known[name]) is float else (type(known[name]),)
            if type(value) not in expected:
                raise InvalidConfigError(f"`{name}` of a recipe is {known[name]!r} or the like, got {value!r}.")
        return replace(self, **fields)
