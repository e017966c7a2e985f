"""Query a head for its draft: at once, or launched with the step before so that each step reads the device once."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_specdec.acceptance.pipelining import Stopwatch
from hf_specdec.control.head_schedule import QueryStats
from hf_specdec.drafters.base import CandidateSession, DraftSession
from hf_specdec.drafters.candidates import DraftedCandidates
from hf_specdec.host_sync import read
from hf_specdec.trees.draft import Budget, Draft
from hf_specdec.verification.one_time import one_time_work
from hf_specdec.verification.step import UnreadStep

FINE = 2.0**-20
"""Unit in which log-probabilities travel to the host, beside integers."""


@dataclass(slots=True)
class Source:
    """A part's session, and what it did in this generation."""

    name: str
    session: DraftSession
    limits: Budget
    asked: int = 0
    seconds: float = 0.0

    @property
    def is_free(self) -> bool:
        """Whether it is merged edge by edge, at almost no cost."""
        return isinstance(self.session, CandidateSession)


@dataclass(frozen=True, slots=True)
class Answer:
    """A head's draft as a source of one step."""

    worth: QueryStats
    found: list[DraftedCandidates]  # of each row
    seconds: float
    usual: bool  # whether its seconds are what such a draft usually costs


@dataclass(frozen=True, slots=True)
class _Unread:
    """A head's draft that was launched, and that the host has not read yet."""

    source: Source
    worth: QueryStats
    draft: Draft
    num_tensors: int
    usual: bool
    stopwatch: Stopwatch


class Queries:
    """The queries of one generation.

    Args:
        device: Where drafts are made.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._unread: list[_Unread] = []  # launched in this step
        self._answers: dict[str, Answer] = {}  # launched in the last step, by the source's name

    def ask(self, source: Source, worth: QueryStats, budget: Budget, least: float) -> Answer:
        """Let a head draft now, and read its tree.

        Args:
            source: The head.
            worth: How deep it drafts.
            budget: Of the step.
            least: See `Budget.least`.
        """
        begin, before = time.perf_counter(), one_time_work()
        draft = source.session.propose(_limits(source, worth, budget, least))
        found = _candidates_of(source.name, draft, read(*_as_integers(draft)))
        # the first draft includes reading the prompt, which is not what later ones cost
        usual = source.asked > 0 and one_time_work() == before
        return Answer(worth, found, time.perf_counter() - begin, usual)

    def launch(self, source: Source, worth: QueryStats, budget: Budget, step: UnreadStep) -> list[Tensor]:
        """Launch a head's draft for the next step; the tensors that the host must read of it."""
        before, limits, stopwatch = one_time_work(), _limits(source, worth, budget, 0.0), Stopwatch(self._device)
        with stopwatch:
            source.session.launch(step, limits)
            draft = source.session.propose(limits)
        tensors = _as_integers(draft)
        usual = source.asked > 0 and one_time_work() == before
        self._unread.append(_Unread(source, worth, draft, len(tensors), usual, stopwatch))
        return tensors

    def receive(self, lists: Sequence[list[list[int]]]) -> None:
        """Take what the host has read of the drafts launched in this step, and forget older ones."""
        unread, self._unread, remaining = self._unread, [], iter(lists)
        self._answers = {
            query.source.name: Answer(
                query.worth,
                _candidates_of(query.source.name, query.draft, [next(remaining) for _ in range(query.num_tensors)]),
                query.stopwatch.take(),
                query.usual,
            )
            for query in unread
        }

    def launched(self, source: Source) -> Answer | None:
        """A head's draft that was launched with the last step; None if it was not queried."""
        return self._answers.get(source.name)


def _limits(source: Source, worth: QueryStats, budget: Budget, least: float) -> Budget:
    limits = source.limits.chain if budget.top_k == 1 else source.limits
    return replace(limits, num_steps=worth.num_steps, least=least)


def _as_integers(draft: Draft) -> list[Tensor]:
    """A draft as integer tensors `[B, N]`, for one transfer."""
    tensors = [draft.tree.tokens, draft.tree.parents.expand(draft.tree.tokens.shape)]
    if draft.log_probs is not None:
        tensors.append((draft.log_probs.clamp(min=-100.0, max=0.0) / FINE).round().long())
    if draft.bucket is not None:
        tensors.append(draft.bucket)
    return tensors


def _candidates_of(name: str, draft: Draft, lists: Sequence[list[list[int]]]) -> list[DraftedCandidates]:
    """Every row's tree as a source, from what `_as_integers` gave and the host has read."""
    tokens, parents, *others = lists
    log_probs = [[FINE * units for units in row] for row in others.pop(0)] if draft.log_probs is not None else None
    buckets = others.pop(0) if draft.bucket is not None else None
    return [
        DraftedCandidates(
            name, tokens[row], parents[row], None if log_probs is None else log_probs[row],
            None if buckets is None else buckets[row],
        )
        for row in range(len(tokens))
    ]  # fmt: skip
