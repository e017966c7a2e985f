"""Query heads (see `hybrid.py`) for drafts: now, or launched with the previous step to save a read of the device."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_specdec.acceptance.accepted import Stopwatch
from hf_specdec.control.policy import QueryStats
from hf_specdec.drafters.base import DraftSession
from hf_specdec.drafters.candidates import DraftedCandidates
from hf_specdec.host_sync import read
from hf_specdec.trees.draft import Budget, Draft
from hf_specdec.verification.memory import one_time_work
from hf_specdec.verification.step import Step

LOG_PROB_UNIT = 2.0**-20
"""Log-probabilities are sent to the host as integer multiples of this, in the same transfer as the tokens."""


@dataclass(slots=True)
class Source:
    """One part of a hybrid drafter in one generation: its session, its limits, and its queries so far."""

    name: str
    session: DraftSession
    limits: Budget
    num_queries: int = 0
    query_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Answer:
    """A head's draft for one step, as candidates to merge."""

    stats: QueryStats  # statistics of the depth that was queried
    candidates: list[DraftedCandidates]  # per row
    seconds: float  # to draft it and read it; device time, without reading, if launched with the last step
    usual: bool  # whether its time is typical: not a first draft, and nothing was captured or compiled


@dataclass(frozen=True, slots=True)
class _UnreadAnswer:
    """A launched draft that the host has not read yet."""

    source: Source
    stats: QueryStats
    draft: Draft
    num_tensors: int
    usual: bool
    stopwatch: Stopwatch


class Queries:
    """Makes heads draft in one generation: now (`query`), or with the previous step (`launch`, `receive`, `launched`).

    Args:
        device: Device of the drafts.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._unread: list[_UnreadAnswer] = []  # launched in this step
        self._answers: dict[str, Answer] = {}  # launched with the last step, by source

    def query(self, source: Source, stats: QueryStats, budget: Budget, min_level_probability: float) -> Answer:
        """Make a head draft now, read its tree and return it with the time taken.

        Args:
            source: The head.
            stats: Statistics of the depth to draft.
            budget: Budget of the merged tree; if its `top_k` is 1, the head drafts a chain.
            min_level_probability: See `Budget`.
        """
        begin, before = time.perf_counter(), one_time_work()
        draft = source.session.propose(_head_budget(source, stats, budget, min_level_probability))
        candidates = _candidates(draft, read(*_as_integers(draft)))
        usual = source.num_queries > 0 and one_time_work() == before  # the first draft reads the prompt
        return Answer(stats, candidates, time.perf_counter() - begin, usual)

    def launch(self, source: Source, stats: QueryStats, budget: Budget, step: Step) -> list[Tensor]:
        """Launch a head's draft for the next step; return the tensors for the host to read together with this step."""
        before, limits, stopwatch = one_time_work(), _head_budget(source, stats, budget), Stopwatch(self._device)
        with stopwatch:
            source.session.launch(step, limits)
            draft = source.session.propose(limits)
        tensors = _as_integers(draft)
        usual = source.num_queries > 0 and one_time_work() == before
        self._unread.append(_UnreadAnswer(source, stats, draft, len(tensors), usual, stopwatch))
        return tensors

    def receive(self, lists: Sequence[list[list[int]]]) -> None:
        """Store the drafts launched in this step as answers, given their values on the host; drop older answers."""
        unread, self._unread, remaining = self._unread, [], iter(lists)
        self._answers = {
            answer.source.name: Answer(
                answer.stats,
                _candidates(answer.draft, [next(remaining) for _ in range(answer.num_tensors)]),
                answer.stopwatch.take(),
                answer.usual,
            )
            for answer in unread
        }

    def launched(self, source: Source) -> Answer | None:
        """Return the answer of a head that was launched with the last step; None if it was not."""
        return self._answers.get(source.name)


def _head_budget(source: Source, stats: QueryStats, budget: Budget, min_level_probability: float = 0.0) -> Budget:
    limits = source.limits.chain if budget.top_k == 1 else source.limits
    return replace(limits, num_steps=stats.num_steps, min_level_probability=min_level_probability)


def _as_integers(draft: Draft) -> list[Tensor]:
    """Return tokens, parents and (if known) rounded log-probabilities as integers `[B, N]`, for one transfer."""
    tensors = [draft.tree.tokens, draft.tree.parents.expand(draft.tree.tokens.shape)]
    if draft.log_probs is not None:
        tensors.append((draft.log_probs.clamp(min=-100.0, max=0.0) / LOG_PROB_UNIT).round().long())
    return tensors


def _candidates(draft: Draft, lists: Sequence[list[list[int]]]) -> list[DraftedCandidates]:
    """Return each row's tree as candidates, from the values of `_as_integers` on the host."""
    tokens, parents, *others = lists
    log_probs = [[LOG_PROB_UNIT * units for units in row] for row in others[0]] if others else [None] * len(tokens)
    return [DraftedCandidates(*row) for row in zip(tokens, parents, log_probs, strict=True)]
