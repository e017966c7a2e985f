"""Sessions that can draft before the host has read the previous step, see `acceptance/pipelining.py`."""

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
    """Base of sessions that need only tensors on the device to draft.

    After `launch`, the next `propose` returns the launched draft if its budget is the same.

    Args:
        roots: `[B]` first emitted tokens.
    """

    can_launch = True

    def __init__(self, roots: Tensor) -> None:
        self._roots = roots
        self._launched: tuple[Budget, Draft] | None = None
        self._is_unread = False  # whether the host has not read the step of the launched draft

    @abstractmethod
    def _draft(self, budget: Budget) -> Draft:
        """Draft after all steps passed to `_follow`."""

    @abstractmethod
    def _follow(self, step: Step | UnreadStep) -> None:
        """Take in the accepted tokens of a step."""

    def _settle(self, acceptance: Acceptance) -> None:
        """Correct the state on the host after it has read the last `UnreadStep`."""

    def launch(self, step: UnreadStep, budget: Budget) -> Sequence[Tensor]:
        """See `DraftSession`; the host needs no tensors of the draft."""
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
    """Return the features of a step's nodes; they exist if the drafter's `needs` include features."""
    if step.verification.features is None:
        raise ValueError("This session needs the target's features in every step, got none.")
    return step.verification.features
