"""Base of sessions that can draft before the host has read the previous step, see `acceptance/accepted.py`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from torch import Tensor

from hf_specdec.acceptance.accepted import Accepted
from hf_specdec.drafters.base import DraftSession
from hf_specdec.trees.draft import Budget, Draft
from hf_specdec.verification.features import Features
from hf_specdec.verification.step import Step


class LaunchingSession(DraftSession):
    """A session that drafts from tensors on the device alone, without values on the host.

    After `launch`, `propose` returns the launched draft if its budget is the same, until the next step is observed.

    Args:
        roots: `[B]` first emitted tokens.
    """

    can_launch = True

    def __init__(self, roots: Tensor) -> None:
        self._roots = roots
        self._launched: tuple[Budget, Draft] | None = None
        self._is_unread = False  # whether `launch` got a step that `observe` has not got yet

    @abstractmethod
    def _draft(self, budget: Budget) -> Draft:
        """Draft the next tree. Called only after `_follow` was called with every step so far."""

    @abstractmethod
    def _follow(self, step: Step) -> None:
        """Update the state with the accepted tokens of a step, without waiting for the device if it is unread."""

    def _settle(self, acceptance: Accepted) -> None:
        """Update the host's part of the state for a step that `launch` got, after the host has read it."""

    def launch(self, step: Step, budget: Budget) -> Sequence[Tensor]:
        """Update the state with the step and draft the next tree; return no tensors, because the host needs none."""
        self._follow(step)
        self._roots = step.acceptance.next_token
        self._note_launched(budget, self._draft(budget))
        return ()

    def _note_launched(self, budget: Budget, draft: Draft) -> None:
        self._launched, self._is_unread = (budget, draft), True

    def propose(self, budget: Budget) -> Draft:
        """Return the launched draft if it was made with this budget, otherwise a new one; roots alone if plain."""
        if budget.is_plain:
            return Draft.plain(self._roots)
        if self._launched is not None and self._launched[0] == budget:
            return self._launched[1]
        return self._draft(budget)

    def observe(self, step: Step) -> None:
        """Update the state with the step; if `launch` already did, complete the state on the host."""
        if self._is_unread:
            self._is_unread = False
            self._settle(step.acceptance)
            return
        self._launched = None
        self._follow(step)
        self._roots = step.acceptance.next_token


def features_of(step: Step) -> Features:
    """Return the features of a step's nodes."""
    if step.verification.features is None:
        raise ValueError("This session needs the target's features in every step, got none.")
    return step.verification.features
