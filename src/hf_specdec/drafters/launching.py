"""Sessions whose drafts can be launched before the host has read the step before, see `acceptance/pipelining.py`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from torch import Tensor

from hf_specdec.acceptance.paths import Acceptance
from hf_specdec.drafters.base import DraftSession
from hf_specdec.trees.draft import Budget, Draft
from hf_specdec.verification.features import Features
from hf_specdec.verification.step import Step, UnreadStep


class LaunchingSession(DraftSession):
    """A session that drafts from tensors on the device alone.

    A launched draft is what the next `propose` returns if it is given the same budget.

    Args:
        roots: `[B]` first emitted tokens.
    """

    can_launch = True

    def __init__(self, roots: Tensor) -> None:
        self._roots = roots
        self._launched: tuple[Budget, Draft] | None = None
        self._is_unread = False  # a draft was launched, and the host has not read its step yet

    @abstractmethod
    def _draft(self, budget: Budget) -> Draft:
        """Draft behind everything that was followed."""

    @abstractmethod
    def _follow(self, step: Step | UnreadStep) -> None:
        """Take in what a step keeps."""

    def _settle(self, acceptance: Acceptance) -> None:
        """Correct what the host knows, now that it has read the last `UnreadStep`."""

    def launch(self, step: UnreadStep, budget: Budget) -> Sequence[Tensor]:
        """Draft for the next step; the host needs none of it."""
        self._follow(step)
        self._roots = step.acceptance.next_token
        self._note_launched(budget, self._draft(budget))
        return ()

    def _note_launched(self, budget: Budget, draft: Draft) -> None:
        self._launched, self._is_unread = (budget, draft), True

    def propose(self, budget: Budget) -> Draft:
        """See `DraftSession`."""
        if budget.is_plain:
            return Draft.plain(self._roots)
        if self._launched is not None and self._launched[0] == budget:
            return self._launched[1]
        return self._draft(budget)

    def observe(self, step: Step) -> None:
        """See `DraftSession`."""
        if self._is_unread:
            self._is_unread = False
            self._settle(step.acceptance)
            return
        self._launched = None
        self._follow(step)
        self._roots = step.acceptance.next_token


def features_of(step: Step | UnreadStep) -> Features:
    """The features of a step's nodes, which the session's drafter asked for."""
    if step.verification.features is None:
        raise ValueError("this session needs the features of every verification")
    return step.verification.features
