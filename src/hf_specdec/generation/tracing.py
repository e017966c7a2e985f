"""Record a decoding step on the host, for plots (`SpeculativeConfig(trace=True)`)."""

from __future__ import annotations

import torch

from hf_specdec.host_sync import read
from hf_specdec.reporting.stats import TracedRow, TracedStep
from hf_specdec.trees.tree import ROOT_PARENT
from hf_specdec.verification.step import Step, StepSeconds


def trace_step(step: Step, method: str, begin: float, seconds: StepSeconds) -> TracedStep:
    """Return a step's trees, probabilities and emitted tokens, copied to the host in several transfers.

    Calls without a trace avoid these transfers.

    Args:
        step: The step.
        method: Name of its drafter; used as the source of nodes without one.
        begin: Seconds from the start of the decoding loop (after the prefill) to the start of the step.
        seconds: Duration of the step's stages.
    """
    draft, logits, acceptance = step.draft, step.verification.logits, step.acceptance
    tokens, parents = draft.tree.tokens, draft.tree.parents.expand(draft.tree.tokens.shape)
    best = logits.max(-1).indices.to(tokens.device)
    log_probs = logits.log_softmax(-1, dtype=torch.float32).to(tokens.device)
    row_indices = torch.arange(len(tokens), device=tokens.device)[:, None]
    node_log_probs = log_probs[row_indices, parents.clamp(min=0), tokens].where(parents != ROOT_PARENT, 0.0)
    all_tokens, all_parents, choices = read(tokens, parents, best)
    target_probs = node_log_probs.exp().tolist()
    draft_probs = None if draft.log_probs is None else draft.log_probs.exp().tolist()
    rows = []
    for row, row_tokens in enumerate(all_tokens):
        sources = draft.sources[row] if draft.sources is not None else ()
        rows.append(
            TracedRow(
                tokens=row_tokens,
                parents=all_parents[row],
                draft_probs=None if draft_probs is None else draft_probs[row],
                target_probs=target_probs[row],
                choices=choices[row],
                sources=[*sources, *[method] * (len(row_tokens) - len(sources))],
                path=list(acceptance.nodes[row]),
                emitted=list(acceptance.emitted[row]),
            )
        )
    return TracedStep(rows, begin, seconds.draft, seconds.verify, seconds.rest)
