"""One step of the loop as everybody hears of it afterwards: sessions, the controller, statistics, outputs."""

from __future__ import annotations

from dataclasses import dataclass

from hf_specdec.acceptance.paths import Acceptance
from hf_specdec.acceptance.pipelining import Decision
from hf_specdec.trees.draft import Draft
from hf_specdec.verification.target import Verification


@dataclass(frozen=True, slots=True)
class Step:
    """What was verified, what the target made of it, and what was kept."""

    draft: Draft  # as verified: a chain where the target takes no branches
    verification: Verification
    acceptance: Acceptance


@dataclass(frozen=True, slots=True)
class UnreadStep:
    """A step that was decided on the device and that the host has not read yet; fields as in `Step`."""

    draft: Draft
    verification: Verification
    acceptance: Decision


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Wall-clock seconds of one step on the host."""

    draft: float
    verify: float
    rest: float  # accepting, committing, telling
    usual: bool = True  # no graph was recorded, no program compiled, no memory moved: such a step tells no costs
