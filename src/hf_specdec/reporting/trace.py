"""What one step drafted, what the target said to it and what was kept, on the host: kept on request, for pictures."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TracedRow:
    """One row of one step; lists go over the nodes of its tree, the root first. A row that has ended emits nothing."""

    tokens: list[int]
    parents: list[int]  # -1 of the root, and of nodes that only pad the row
    draft_probs: list[float] | None  # what the drafter gave each node, given its parent; 1 of the root. None: not told
    target_probs: list[float]  # what the target gives it there, before any processor; 1 of the root
    choices: list[int]  # the target's likeliest token after each node, before any processor
    sources: list[str]  # whose idea each node is
    path: list[int]  # the nodes that were kept, from the root
    emitted: list[int]  # the tokens after them: those that were accepted, then the correction or the bonus

    @property
    def num_drafted(self) -> int:
        """Nodes, neither the root nor padding counted."""
        return sum(parent >= 0 for parent in self.parents)


@dataclass(frozen=True, slots=True)
class TracedStep:
    """One step of a generation, and when it was."""

    rows: list[TracedRow]
    begin: float  # seconds since the prompt was read
    draft_seconds: float
    verify_seconds: float
    rest_seconds: float  # accepting, committing, telling
