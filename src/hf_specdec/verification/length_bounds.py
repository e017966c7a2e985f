"""Positions at which a model's forward changes or ends: no draft reaches across one of them.

A verify forward runs drafted tokens ahead of the text. In most models this changes nothing for the tokens before them.
In some it does: position tables end, longrope changes the frequencies of the whole forward once its largest position
reaches a limit, dynamic NTK changes them with every token, Phi-3 reads the whole text again, and Llama 4 scales
queries by cache slots instead of positions. The configuration contains all of these limits. A draft therefore ends
before the next one, until the text itself has reached it. docs/limits.md lists the mechanisms and their models.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

TABLES = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_target_positions")
"""Configuration fields with the size of a position table. A field that belongs to no table costs one short draft."""
UNBOUNDED = 2**31
"""Depth of a draft if no bound is ahead."""
MAX_OFFSET = 64
"""Maximum difference between a token's position and its slot; PaliGemma counts positions from 1."""


@dataclass(frozen=True, slots=True)
class LengthBounds:
    """The bounds of one model.

    Args:
        ends: First position beyond each bound, ascending.
        switches: Those of `ends` at which the forward of all rows changes once the longest one gets there, or at which
            the model's own `generate()` reads the text again. The rows of a batch must then be as long as in plain
            decoding, and the step of the token at the bound is a plain one.
        changes_from: Position from which the forward changes with every token (dynamic NTK); None: never.
        counts_slots: Whether the forward counts a node's slot instead of its depth (Llama 4), so that no node of a
            tree may stand in a slot beyond a bound.
    """

    ends: tuple[int, ...]
    switches: frozenset[int]
    changes_from: int | None = None
    counts_slots: bool = False

    @classmethod
    def of(cls, config: Any) -> LengthBounds:
        """Read the bounds from a text configuration."""
        tables = {getattr(config, name, None) for name in TABLES}
        switches = {getattr(config, "original_max_position_embeddings", None)}  # Phi-3, with any frequencies
        changes_from = None
        for rope in _ropes(vars(config)):
            kind = str(rope["rope_type"])
            if kind == "longrope":
                switches.add(rope.get("original_max_position_embeddings"))
            elif "dynamic" in kind:
                changes_from = getattr(config, "max_position_embeddings", None)
                switches.add(changes_from)
        scale = getattr(config, "floor_scale", None) if getattr(config, "attn_temperature_tuning", False) else None
        if scale:
            switches.update(range(scale - 1, max(filter(None, tables), default=0), scale))
        found = {value for value in switches if isinstance(value, int)}
        ends = sorted({value for value in tables if isinstance(value, int) and value > 0} | found)
        return cls(tuple(ends), frozenset(found), changes_from, counts_slots=bool(scale))

    def within(self, num_slots: int) -> LengthBounds:
        """Return the bounds that a text of `num_slots` slots can reach."""
        last = num_slots + MAX_OFFSET
        ends = tuple(end for end in self.ends if end < last)
        changes_from = self.changes_from if self.changes_from in ends else None
        return replace(self, ends=ends, switches=self.switches.intersection(ends), changes_from=changes_from)

    def reach(self, positions: Iterable[int]) -> int:
        """Return the depth of the deepest draft that crosses no bound, given the positions of its roots.

        Example: with bounds 64 and 128, positions 60 and 64 give 3: position 63 is the last one before 64.
        """
        reach = UNBOUNDED
        for position in positions:
            if position in self.switches or (self.changes_from is not None and position >= self.changes_from):
                return 0
            reach = min([reach, *(end - 1 - position for end in self.ends if end > position)])
        return reach


def _ropes(values: Mapping[Any, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the rotary parameters in a configuration; some models have one set for each type of layer."""
    for value in values.values():
        if isinstance(value, Mapping):
            if "rope_type" in value:
                yield value
            yield from _ropes(value)
