"""Records of decoding steps for plots, made if `SpeculativeConfig(trace=True)`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TracedRow:
    """Record of one sequence of the batch in one step.

    All lists except `path` and `emitted` have one entry per tree node, the root first. `emitted[i]` follows node
    `path[i]`. A sequence that has ended emits nothing, or padding if all rows must emit equally many tokens.

    Args:
        tokens: Token ids of the nodes.
        parents: Index of the parent of each node; -1 for the root and for padding.
        draft_probs: Probability of each node given its parent, by the drafter; 1 for the root. None if unknown.
        target_probs: The same by the target, before logits processors; 1 for root and padding.
        choices: The target's most likely token after each node, before logits processors.
        sources: Name of the drafter that proposed each node; of no meaning for root and padding.
        path: The root, then the accepted nodes.
        emitted: Accepted drafted tokens, then the correction or bonus token unless the row ended before it.
    """

    tokens: list[int]
    parents: list[int]
    draft_probs: list[float] | None
    target_probs: list[float]
    choices: list[int]
    sources: list[str]
    path: list[int]
    emitted: list[int]

    @property
    def num_drafted(self) -> int:
        """Number of drafted nodes, without root and padding."""
        return sum(parent >= 0 for parent in self.parents)


@dataclass(frozen=True, slots=True)
class TracedStep:
    """Record of one decoding step, with its start and durations.

    Args:
        rows: One record per sequence of the batch.
        begin: Seconds from the start of the decoding loop, after the prefill, to the step.
        draft_seconds: Duration of drafting, without the time that the drafter takes after the step to observe it.
        verify_seconds: Duration of the target's forward.
        rest_seconds: Duration of accepting and committing.
    """

    rows: list[TracedRow]
    begin: float
    draft_seconds: float
    verify_seconds: float
    rest_seconds: float
