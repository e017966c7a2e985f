"""Records of decoding steps, for plots (`SpeculativeConfig(trace=True)`)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TracedRow:
    """One row of one step. Lists have one entry per tree node, the root first. A row that has ended emits nothing."""

    tokens: list[int]
    parents: list[int]  # -1 for the root and for padding
    draft_probs: list[float] | None  # by the drafter, given the parent; 1 for the root. None if unknown
    target_probs: list[float]  # by the target, before logits processors; 1 for the root
    choices: list[int]  # the target's most likely token after each node, before logits processors
    sources: list[str]  # name of the drafter of each node
    path: list[int]  # accepted nodes, from the root
    emitted: list[int]  # accepted drafted tokens, then the correction or bonus token

    @property
    def num_drafted(self) -> int:
        """Number of drafted nodes, without root and padding."""
        return sum(parent >= 0 for parent in self.parents)


@dataclass(frozen=True, slots=True)
class TracedStep:
    """One step of a generation, with its times."""

    rows: list[TracedRow]
    begin: float  # seconds after the prefill
    draft_seconds: float
    verify_seconds: float
    rest_seconds: float  # accepting, committing, streaming
