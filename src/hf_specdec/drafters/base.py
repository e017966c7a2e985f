"""The protocol of a drafter: `start` a session for one generation, which can `propose` and `observe`.

A drafter holds weights and settings and is shared by all generations (and threads) of a model; a session holds
everything that belongs to one call and is dropped with it. To write your own, see docs/drafters.md.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.config import SpeculativeConfig
from hf_specdec.drafters.candidates import Candidates
from hf_specdec.errors import DrafterMismatchError
from hf_specdec.heads.base import DraftHead
from hf_specdec.trees.draft import Budget, Draft
from hf_specdec.verification.features import Features
from hf_specdec.verification.masks import PromptPadding
from hf_specdec.verification.model import execution_device, text_config
from hf_specdec.verification.runners import ExecutionMode
from hf_specdec.verification.step import Step, UnreadStep
from hf_specdec.verification.target import Target


@dataclass(frozen=True, slots=True)
class Needs:
    """What a drafter reads of the target's forwards.

    Args:
        feature_layers: Hidden states, counted as transformers' `hidden_states`; -1 is the last, behind the final norm.
        prompt_logits: The logits of all positions of the prompt: `B * P * V` numbers.
    """

    feature_layers: tuple[int, ...] = ()
    prompt_logits: bool = False


@dataclass(frozen=True, slots=True)
class DraftContext:
    """Everything that is known when a session starts: the prompt is committed, the first roots are chosen."""

    input_ids: Tensor  # [B, P] padding included; P = 0 where the prompt came as embeddings
    padding: PromptPadding | None
    roots: Tensor  # [B] first emitted tokens
    features: Features | None = None  # of all P positions; None where the drafter needs none
    logits: Tensor | None = None  # [B, P, V]; None where the drafter needs none, or the prompt came in chunks
    launches: bool = False  # whether `DraftSession.launch` is called in every step


class DraftSession(ABC):
    """One generation's drafting.

    Attributes:
        can_launch: Whether `launch` makes the next draft.
    """

    can_launch = False

    @abstractmethod
    def propose(self, budget: Budget) -> Draft:
        """The next tree, its roots the last emitted tokens, within a budget that is within the drafter's limits."""

    @abstractmethod
    def observe(self, step: Step) -> None:
        """Learn from a step: any tree, this session's own or not, and what became of it."""

    def launch(self, step: UnreadStep, budget: Budget) -> Sequence[Tensor]:
        """Launch the next draft on the device before the host reads the step; the default launches nothing.

        Called only on devices that decide steps themselves, see `acceptance/pipelining.py`. `observe` is called with
        the step afterwards, and then `propose`, which may be given another budget, or not be called at all.

        Args:
            step: What was verified and what is kept of it.
            budget: What the next `propose` is likely to be given.

        Returns:
            Integer tensors `[B, *]` that the host needs of the draft; they come back in `Acceptance.launched`.
        """
        return ()

    def close(self) -> None:  # noqa: B027  (most keep nothing)
        """The generation has ended, in whatever way: memory that outlives it is free for the next one."""

    def report(self) -> dict[str, Any]:
        """What it did, as plain values for the statistics; nothing where nothing is worth telling."""
        return {}


class CandidateSession(DraftSession):
    """Drafting that can be asked edge by edge on the host, at no cost to speak of: `hybrid` merges it as it grows."""

    @property
    @abstractmethod
    def candidates(self) -> Sequence[Candidates]:
        """What each row may go on with, as of the last step."""


class Drafter(ABC):
    """Proposes trees of candidate tokens.

    Attributes:
        method: The method name it answers to.
        needs: What it reads of the target.
    """

    method: str
    needs: Needs = Needs()

    @property
    def parts(self) -> tuple[Drafter, ...]:
        """The drafters that it drafts with, where it is made of others."""
        return (self,)

    @abstractmethod
    def limits(self, config: SpeculativeConfig) -> Budget:
        """Its largest tree under this config: what cache and buffers are sized by, and what no budget exceeds.

        Raises:
            InvalidConfigError: Fields that contradict each other or mean nothing to this drafter.
        """

    @abstractmethod
    def start(self, target: Target, context: DraftContext, config: SpeculativeConfig) -> DraftSession:
        """A session for one generation."""

    def compiled(self, model: PreTrainedModel, form: ExecutionMode) -> Drafter:
        """The same drafter with its forwards in another form; itself where it has none.

        Args:
            model: The target that it is bound to.
            form: Programs or graphs.

        Raises:
            CaptureError: They cannot take it.
        """
        return self

    def state_dict(self) -> Any:
        """A copy of what it has learned in its calls, for `recall`; None where it learns nothing."""
        return None

    def load_state_dict(self, state: Any) -> None:  # noqa: B027  (most learn nothing)
        """Know what it knew when a copy was made, and nothing else.

        Args:
            memory: What `memory()` gave; it is not changed later. None is what a new drafter knows.
        """

    def bind(self, model: PreTrainedModel) -> None:  # noqa: B027  (most drafters fit every target)
        """Get ready for a model: check that it is the right one, move and cast weights.

        Raises:
            DrafterMismatchError: This drafter was made for another model.
        """


def bind_head(head: DraftHead, model: PreTrainedModel) -> None:
    """Compare a head's sizes with the target's, then move it next to the target's lm_head.

    Raises:
        DrafterMismatchError: Another hidden size or vocabulary, too few layers, or a target without lm_head.
    """
    head.check_sizes(text_config(model))
    if any(parameter.is_meta for parameter in head.parameters()):
        raise DrafterMismatchError(
            f"The weights of this {type(head).__name__} are on the meta device: they have no values.",
            "Load or make it on a real device; torch.set_default_device('meta') puts new modules there.",
        )
    lm_head = model.get_output_embeddings()
    if lm_head is None:
        raise DrafterMismatchError(f"{type(model).__name__} has no lm_head for this {type(head).__name__}.")
    size = head.config.hidden_size
    read = getattr(lm_head, "in_features", size)
    if head.shares_lm_head and read != size:
        raise DrafterMismatchError(
            f"The lm_head of {type(model).__name__} reads {read} numbers, this head gives it {size}.",
            "A head with an lm_head of its own fits such a model.",
        )
    device = next((parameter.device for parameter in lm_head.parameters()), model.device)
    head.to(device=execution_device(model) if device.type == "meta" else device, dtype=model.dtype)
