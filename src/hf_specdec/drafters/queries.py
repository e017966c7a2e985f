"""Query a head for its draft: immediately, or launched in the previous step so that a step reads the device once."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_specdec.acceptance.pipelining import Stopwatch
from hf_specdec.control.head_schedule import QueryStats
from hf_specdec.drafters.base import DraftSession
from hf_specdec.drafters.candidates import DraftedCandidates
from hf_specdec.host_sync import read
from hf_specdec.trees.draft import Budget, Draft
from hf_specdec.verification.one_time import one_time_work
from hf_specdec.verification.step import UnreadStep

LOG_PROB_UNIT = 2.0**-20
"""Log-probabilities are sent to the host as integer multiples of this, in the same transfer as the tokens."""


@dataclass(slots=True)
class Source:
    """A part's session and its use in this generation."""

    name: str
    session: DraftSession
    limits: Budget
    num_queries: int = 0
    query_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Answer:
    """A head's draft as a source of one step."""

    stats: QueryStats  # of the depth that was queried
    candidates: list[DraftedCandidates]  # per row
    seconds: float
    usual: bool  # False for a first draft and for one that captured or compiled something: its time is not typical


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
    """The queries of one generation.

    Args:
        device: Device of the drafts.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._unread: list[_UnreadAnswer] = []  # launched in this step
        self._answers: dict[str, Answer] = {}  # launched in the last step, by source

    def query(self, source: Source, stats: QueryStats, budget: Budget, min_level_probability: float) -> Answer:
        """Draft now and read the tree.

        Args:
            source: The head.
            stats: The depth to draft.
            budget: Budget of the step.
            min_level_probability: See `Budget`.
        """
        begin, before = time.perf_counter(), one_time_work()
        draft = source.session.propose(_head_budget(source, stats, budget, min_level_probability))
        candidates = _candidates(draft, read(*_as_integers(draft)))
        usual = source.num_queries > 0 and one_time_work() == before  # the first draft reads the prompt
        return Answer(stats, candidates, time.perf_counter() - begin, usual)

    def launch(self, source: Source, stats: QueryStats, budget: Budget, step: UnreadStep) -> list[Tensor]:
        """Launch a draft for the next step and return its tensors that the host must read."""
        before, limits, stopwatch = one_time_work(), _head_budget(source, stats, budget), Stopwatch(self._device)
        with stopwatch:
            source.session.launch(step, limits)
            draft = source.session.propose(limits)
        tensors = _as_integers(draft)
        usual = source.num_queries > 0 and one_time_work() == before
        self._unread.append(_UnreadAnswer(source, stats, draft, len(tensors), usual, stopwatch))
        return tensors

    def receive(self, lists: Sequence[list[list[int]]]) -> None:
        """Store the values of the drafts launched in this step, which the host has read; drop older answers."""
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
        """Return the draft that was launched with the last step; None if there was no query."""
        return self._answers.get(source.name)


def _head_budget(source: Source, stats: QueryStats, budget: Budget, min_level_probability: float = 0.0) -> Budget:
    limits = source.limits.chain if budget.top_k == 1 else source.limits
    return replace(limits, num_steps=stats.num_steps, min_level_probability=min_level_probability)


def _as_integers(draft: Draft) -> list[Tensor]:
    """Return a draft as integer tensors `[B, N]`, for one transfer."""
    tensors = [draft.tree.tokens, draft.tree.parents.expand(draft.tree.tokens.shape)]
    if draft.log_probs is not None:
        tensors.append((draft.log_probs.clamp(min=-100.0, max=0.0) / LOG_PROB_UNIT).round().long())
    return tensors


def _candidates(draft: Draft, lists: Sequence[list[list[int]]]) -> list[DraftedCandidates]:
    """Rebuild each row's tree as a source, from the values of `_as_integers` on the host."""
    tokens, parents, *others = lists
    log_probs = [[LOG_PROB_UNIT * units for units in row] for row in others[0]] if others else [None] * len(tokens)
    return [DraftedCandidates(*row) for row in zip(tokens, parents, log_probs, strict=True)]
