"""Records of decoding steps for plots, made if `SpeculativeConfig(trace=True)`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TracedRow:
    """Record of one sequence of the batch in one step.

    All lists except `path` and `emitted` have one entry per tree node, the root first. `emitted[i]` follows node
    `path[i]`. A sequence that has ended emits nothing, or padding if all rows must emit equally many tokens.
    """

    tokens: list[int]
    parents: list[int]  # -1 for the root and for padding
    draft_probs: list[float] | None  # by the drafter, given the parent; 1 for the root. None if unknown
    target_probs: list[float]  # by the target, before logits processors; 1 for root and padding
    choices: list[int]  # the target's most likely token after each node, before logits processors
    sources: list[str]  # name of the drafter that proposed each node; of no meaning for root and padding
    path: list[int]  # the root, then the accepted nodes
    emitted: list[int]  # accepted drafted tokens, then the correction or bonus token unless the row ended before it

    @property
    def num_drafted(self) -> int:
        """Number of drafted nodes, without root and padding."""
        return sum(parent >= 0 for parent in self.parents)


@dataclass(frozen=True, slots=True)
class TracedStep:
    """Record of one decoding step, with its start and durations."""

    rows: list[TracedRow]
    begin: float  # seconds from the start of the decoding loop, after the prefill, to the step
    draft_seconds: float  # without the time that the drafter takes after the step to observe it
    verify_seconds: float
    rest_seconds: float  # accepting and committing
