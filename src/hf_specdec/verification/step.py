"""Records of one decoding step, for draft sessions, the controller, statistics and outputs."""

from __future__ import annotations

from dataclasses import dataclass

from hf_specdec.acceptance.paths import Acceptance
from hf_specdec.acceptance.pipelining import Decision
from hf_specdec.trees.draft import Draft
from hf_specdec.verification.target import Verification


@dataclass(frozen=True, slots=True)
class Step:
    """Draft, verification and acceptance of one step.

    Args:
        draft: The draft as verified: a chain if the target does not support trees.
        verification: The target's logits and features at the nodes of the draft.
        acceptance: The kept path and the emitted tokens.
    """

    draft: Draft
    verification: Verification
    acceptance: Acceptance


@dataclass(frozen=True, slots=True)
class UnreadStep:
    """A `Step` whose accepted paths were chosen on the device and have not been read by the host."""

    draft: Draft
    verification: Verification
    acceptance: Decision


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Wall-clock seconds of one step, measured on the host; those of a launched draft are measured on the device."""

    draft: float  # including the launch of the next draft and the session's update after the step
    verify: float  # the target's forward
    rest: float  # acceptance and commit
    active_share: float = 1.0  # rows that the forward computed, as a fraction of the batch
    usual: bool = True  # False if the step included one-time work: graph capture, compilation or reallocation
