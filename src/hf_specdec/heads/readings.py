"""The possible interpretations (*readings*) of EAGLE-3 files that do not say exactly which hidden states a head reads.

Writers differ in three ways that leave no trace in the files: whether a layer id is the index of a layer (it then
means `hidden_states[id + 1]`) or an index of `hidden_states`; whether the state after the last layer is taken before
or after the final norm; and, for heads that SpecForge wrote between its pull requests 568 and 879, whether the next
draft step reads the head's normalized output (`norm_output`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from hf_specdec.errors import DrafterMismatchError, InvalidConfigError
from hf_specdec.verification.features import LAST


@dataclass(frozen=True, slots=True)
class Reading:
    """One reading of a head's files.

    Attributes:
        norm_output: Whether the next draft step reads the head's normalized output.
        layer_offset: What is added to the stored layer ids to get numbers of layers: 1 if an id is the index of a
            layer, 0 if it counts layers.
        final_norm: Whether the state after the last layer is taken after the target's final norm.
    """

    norm_output: bool = False
    layer_offset: int = 0
    final_norm: bool = False

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in asdict(self).items())


@dataclass(frozen=True, slots=True)
class Ambiguity:
    """The possible readings of a head's files."""

    layer_ids: tuple[int, ...] | None  # ascending, as stored; None for the paper's layers
    layer_offsets: tuple[int, ...] = (0,)  # possible values, the most common one first
    norm_output: tuple[bool, ...] = (False,)  # possible values, the documented one first
    final_norm: tuple[bool, ...] = (False, True)  # possible values if the last layer is read, the usual one first

    def readings(self, target_config: Any) -> tuple[Reading, ...]:
        """Return all readings that are possible for a target; the first is used unless a trial compares them."""
        depth, offsets = target_config.num_hidden_layers, self.layer_offsets
        if str(getattr(target_config, "model_type", "")).startswith("gpt_oss"):  # 0 first: SGLang does not add 1
            offsets = tuple(sorted(offsets))
        ids = self.layer_ids or ()
        found = [
            Reading(norm_output, offset, final_norm)
            for norm_output in self.norm_output
            for offset in offsets
            if not ids or (ids[0] + offset >= 0 and ids[-1] + offset <= depth)
            for final_norm in (self.final_norm if ids and ids[-1] + offset == depth else (False,))
        ]
        if not found:
            raise DrafterMismatchError(
                f"The head reads the layers {list(ids)}, the target has only {depth}.",
                "Use it with the model that it was trained for.",
            )
        return tuple(found)

    def chosen(self, target_config: Any, given: Mapping[str, Any]) -> tuple[Reading, ...]:
        """Return the readings with the fields that a user has given, even if the files suggest other values."""
        if self.layer_ids is None and given.keys() & {"layer_offset", "final_norm"}:
            raise InvalidConfigError(
                "`reading` sets `layer_offset` or `final_norm`, but the files of this head name no layers.",
                "Leave them out.",
            )
        forced = replace(
            self,
            layer_offsets=(given["layer_offset"],) if "layer_offset" in given else self.layer_offsets,
            norm_output=(given["norm_output"],) if "norm_output" in given else self.norm_output,
        )
        found = forced.readings(target_config)
        last, depth = (self.layer_ids or (0,))[-1], target_config.num_hidden_layers
        if given.get("final_norm") and all(last + reading.layer_offset != depth for reading in found):
            raise InvalidConfigError("`reading` sets `final_norm`, but this head does not read the last layer.")
        return tuple(dict.fromkeys(replace(reading, **given) for reading in found))

    @property
    def open_fields(self) -> list[str]:
        """Fields of `Reading` with several possible values; without `final_norm`, which depends on the target."""
        values = {"norm_output": self.norm_output, "layer_offset": self.layer_offsets}
        return [name for name, possible in values.items() if len(possible) > 1]

    def layers(self, reading: Reading, depth: int) -> list[int] | None:
        """Return the numbers of the hidden states to read in a target with `depth` layers; None for the paper's."""
        if self.layer_ids is None:
            return None
        numbers = [number + reading.layer_offset for number in self.layer_ids]
        return [LAST if reading.final_norm and number == depth else number for number in numbers]


_POSSIBLE: Mapping[str, tuple[Any, ...]] = {
    "norm_output": (False, True), "layer_offset": (0, 1), "final_norm": (False, True),
}  # fmt: skip
"""Valid values of a `Reading`'s fields."""


def checked_reading(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return some fields of a `Reading` as a dictionary, after checking names and values."""
    if not isinstance(given, Mapping):
        raise InvalidConfigError(
            f"`reading` must be a dictionary, got {type(given).__name__}.", f"Possible values: {dict(_POSSIBLE)}."
        )
    for name, value in given.items():
        if name not in _POSSIBLE or type(value) is not type(_POSSIBLE[name][0]) or value not in _POSSIBLE[name]:
            raise InvalidConfigError(
                f"`reading` has the invalid entry {name!r}: {value!r}.", f"Possible values: {dict(_POSSIBLE)}."
            )
    return dict(given)
