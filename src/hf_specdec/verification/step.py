"""`Step`, the record of one decoding step, for draft sessions, the controller, statistics and outputs."""

from __future__ import annotations

from dataclasses import dataclass, field

from hf_specdec.acceptance.accepted import Accepted
from hf_specdec.trees.draft import Draft
from hf_specdec.verification.target import Verified


@dataclass(slots=True)
class StepSeconds:
    """Wall-clock seconds of one step, measured on the host; those of a launched draft are measured on the device.

    Args:
        draft: Drafting, including the launch of the next draft and the session's update after the step.
        verify: The target's forward.
        rest: Acceptance and commit.
        active_share: Rows that the forward computed, as a fraction of the batch.
        usual: False if the step included one-time work: graph capture, compilation or reallocation.
    """

    draft: float = 0.0
    verify: float = 0.0
    rest: float = 0.0
    active_share: float = 1.0
    usual: bool = True


@dataclass(frozen=True, slots=True)
class Step:
    """Draft, verification and acceptance of one step.

    Args:
        draft: The draft as verified: a chain if the target does not support trees.
        verification: The target's logits and features at the nodes of the draft.
        acceptance: The kept path and the emitted tokens; on the device alone in `DraftSession.launch`, which is called
            before the host reads them.
        seconds: How long the step took, for the controller.
    """

    draft: Draft
    verification: Verified
    acceptance: Accepted
    seconds: StepSeconds = field(default_factory=StepSeconds)
