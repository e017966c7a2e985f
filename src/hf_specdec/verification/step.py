"""`Step`, the record of one decoding step, for draft sessions, the controller, statistics and outputs."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from hf_specdec.acceptance.accepted import Accepted
from hf_specdec.trees.draft import Draft
from hf_specdec.verification.features import Features


@dataclass(frozen=True, slots=True)
class Verified:
    """Outputs of one target forward at the N nodes of a tree, or at the last position of a prompt (N = 1).

    Args:
        logits: `[B, N, V]` in the model's dtype; for a prompt, of all P positions if requested.
        features: Features of the N nodes, or of a prompt's positions; None if no layer is tapped.
        hidden_states: `[B, N or P, D]` per layer; None unless requested.
        attentions: `[B, H, N or P, slots]` per layer; None unless requested.
    """

    logits: Tensor
    features: Features | None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor | None, ...] | None = None


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
