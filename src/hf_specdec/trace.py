"""What one step drafted, what the target said to it and what was kept, on the host: kept on request, for pictures.

Called by: `decode.py`, where a call asks for it (`SpeculativeConfig(trace=True)`). Feeds: `viz/`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_specdec.host_sync import read
from hf_specdec.step import Step, StepSeconds
from hf_specdec.tree import ROOT_PARENT


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
        return sum(parent != ROOT_PARENT for parent in self.parents)


@dataclass(frozen=True, slots=True)
class TracedStep:
    """One step of a generation, and when it was."""

    rows: list[TracedRow]
    begin: float  # seconds since the prompt was read
    draft_seconds: float
    verify_seconds: float
    rest_seconds: float  # accepting, committing, telling

    @classmethod
    def of(cls, step: Step, method: str, begin: float, seconds: StepSeconds) -> TracedStep:
        """Read what a step left on the device: several transfers, which a call without a trace does not make.

        Args:
            step: The step.
            method: The name of its drafter.
            begin: Seconds since the prompt was read.
            seconds: What it took.
        """
        draft, logits, acceptance = step.draft, step.verification.logits, step.acceptance
        tokens, parents = draft.tree.tokens, draft.tree.parents.expand(draft.tree.tokens.shape)
        best = logits.max(-1).indices.to(tokens.device)
        says = logits.log_softmax(-1, dtype=torch.float32).to(tokens.device)
        rows_of = torch.arange(len(tokens), device=tokens.device)[:, None]
        of_nodes = says[rows_of, parents.clamp(min=0), tokens].where(parents != ROOT_PARENT, 0.0)
        all_tokens, all_parents, choices = read(tokens, parents, best)
        target_probs = of_nodes.exp().tolist()
        drafted = None if draft.log_probs is None else draft.log_probs.exp().tolist()
        rows = []
        for row, row_tokens in enumerate(all_tokens):
            named = draft.sources[row] if draft.sources is not None else ()
            rows.append(
                TracedRow(
                    row_tokens, all_parents[row], None if drafted is None else drafted[row], target_probs[row],
                    choices[row], [*named, *[method] * (len(row_tokens) - len(named))], list(acceptance.nodes[row]),
                    list(acceptance.emitted[row]),
                )
            )  # fmt: skip
        return cls(rows, begin, seconds.draft, seconds.verify, seconds.rest)
