"""Last-logits drafting: draft the runners-up of the last emitted token as candidates for the token after it.

Experimental because the gain is small: 1.07x the speed of plain decoding on average over 12 questions, and slower on 5
of them (docs/benchmarks/history.md).

Source: Liu et al., "LogitSpec" (https://arxiv.org/abs/2507.01449): the logits that chose the root often give the token
after it a high rank. Their best tokens except the root, the *runners-up*, become its children; drafters merged with
this one can extend them. The only computation is a `topk`; nothing is learned, and the host reads nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp

import torch
from torch import Tensor

from hf_specdec.config import SpeculativeConfig
from hf_specdec.drafters.base import (
    Candidate,
    Candidates,
    CandidateSession,
    DraftContext,
    Drafter,
    DraftSession,
    DraftTarget,
)
from hf_specdec.drafters.registry import register
from hf_specdec.trees.draft import Budget, Draft
from hf_specdec.trees.tree import ROOT_PARENT, TokenTree
from hf_specdec.verification.step import Step

RUNNERS_UP = 8
"""Number of runners-up that are merged with the candidates of other drafters."""
TRUST = 0.2
"""Ratio of a runner-up's acceptance rate as the root's child to its probability in the logits that chose the root."""


@register("last_logits")
class LastLogitsDrafter(Drafter):
    """Drafts the runners-up of the last emitted token as the token after it. Works with any model.

    Experimental (1.07x, see docs/methods/experimental.md). Config fields: `top_k` (default 4) or `num_draft_tokens`,
    which includes the root; the tree has one level.
    """

    accepts = ("top_k", "num_draft_tokens", "num_steps=1")
    tree_from = "the logits of one token; merged with other drafters (methods=['last_logits', ...]) it can be deeper"
    defaults = Budget(5, 1, 4)

    def limits(self, config: SpeculativeConfig) -> Budget:
        """Return the size of a tree of the root and its children."""
        num_nodes = config.num_draft_tokens or (config.top_k or self.defaults.top_k) + 1
        top_k = max(min(config.top_k or num_nodes, num_nodes - 1), 1)
        return Budget(min(num_nodes, top_k + 1), 1, top_k)

    def start(self, target: DraftTarget, context: DraftContext, config: SpeculativeConfig) -> DraftSession:
        """Start a session; its first step drafts nothing because the prompt's logits are not kept."""
        on_host = context.roots.device.type == "cpu"
        return (_HostLastLogitsSession if on_host else _LastLogitsSession)(context.roots)


class _LastLogitsSession(DraftSession):
    def __init__(self, roots: Tensor) -> None:
        self._roots = roots
        self._logits: Tensor | None = None  # [B, V] from which the roots were chosen; None in the first step

    def _runners_up(self, count: int) -> tuple[Tensor, Tensor] | None:
        """Return log-probabilities and ids `[B, count]` of the best tokens except the roots.

        None in the first step, or if the vocabulary has no more than `count` tokens.
        """
        if self._logits is None or self._logits.shape[-1] <= count:
            return None
        ids = self._logits.scatter(1, self._roots[:, None], -torch.inf).topk(count, dim=-1).indices
        return self._logits.log_softmax(-1, dtype=torch.float32).gather(-1, ids), ids

    def propose(self, budget: Budget) -> Draft:
        found = None if budget.is_plain else self._runners_up(min(budget.num_nodes - 1, budget.top_k))
        if found is None:
            return Draft.plain(self._roots)
        log_probs, ids = found
        parents = torch.full((1 + ids.shape[1],), 0, dtype=torch.long, device=ids.device)
        parents[0] = ROOT_PARENT
        tree = TokenTree(torch.cat([self._roots[:, None], ids], dim=-1), parents, max_depth=1)
        return Draft(tree, torch.nn.functional.pad(log_probs, (1, 0)))

    def observe(self, step: Step) -> None:
        acceptance, logits = step.acceptance, step.verification.logits
        last = (acceptance.num_kept - 1).clamp(min=0)[:, None]
        node = acceptance.path.clamp(min=0).gather(1, last)
        self._roots = acceptance.next_token
        self._logits = logits.gather(1, node[:, :, None].to(logits.device).expand(-1, -1, logits.shape[-1]))[:, 0]
        self._logits = self._logits.to(self._roots.device)


class _HostLastLogitsSession(_LastLogitsSession, CandidateSession):
    """Session for a target on the CPU, which can also list the candidates of each row."""

    def __init__(self, roots: Tensor) -> None:
        super().__init__(roots)
        self._candidates = [_RunnersUp([], []) for _ in roots]

    @property
    def candidates(self) -> Sequence[Candidates]:
        return self._candidates

    def observe(self, step: Step) -> None:
        super().observe(step)
        found = self._runners_up(RUNNERS_UP)
        if found is not None:
            self._candidates = list(map(_RunnersUp, found[0].tolist(), found[1].tolist()))


class _RunnersUp(Candidates):
    """One row's runners-up, most likely first, as candidates after the root; after a runner-up there are none."""

    start = True

    def __init__(self, log_probs: Sequence[float], ids: Sequence[int]) -> None:
        self._found = [Candidate(token, TRUST * exp(log_prob)) for log_prob, token in zip(log_probs, ids, strict=True)]

    def after(self, place: bool) -> Sequence[Candidate]:
        return self._found

    def follow(self, place: bool, token: int) -> None:
        return
