"""The interface of drafters: `Drafter.start` returns a session, which drafts a tree for each step of one generation.

A drafter holds weights and settings and is shared by all generations (and threads) of a model. A session holds the
state of one generation. To write your own, see docs/drafters.md.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.config import SpeculativeConfig
from hf_specdec.drafters.candidates import Candidates
from hf_specdec.errors import DrafterMismatchError
from hf_specdec.heads.base import DraftHead
from hf_specdec.trees.draft import Budget, Draft, StepCostFunction
from hf_specdec.verification.features import Features
from hf_specdec.verification.masks import PromptPadding, Window
from hf_specdec.verification.model import execution_device, text_config
from hf_specdec.verification.programs import ExecutionMode
from hf_specdec.verification.step import Step
from hf_specdec.verification.target import Target


@dataclass(frozen=True, slots=True)
class Needs:
    """The inputs that a drafter needs in addition to the emitted tokens.

    Args:
        feature_layers: Numbers of the target's hidden states that it reads, as in transformers' `hidden_states`; -1 is
            the last one, after the final norm.
        prompt_logits: Whether it reads the logits `[B, P, V]` of all prompt positions.
        step_costs: Whether it reads the seconds of a step by the number of nodes verified per row, to choose
            this number itself.
        token_ids: Whether it reads the token ids of the prompt. Calls with `inputs_embeds` alone are then refused.
    """

    feature_layers: tuple[int, ...] = ()
    prompt_logits: bool = False
    step_costs: bool = False
    token_ids: bool = False


@dataclass(frozen=True, slots=True)
class DraftContext:
    """Inputs of a new session, which starts after the target has read the prompt and emitted one token per row.

    Args:
        input_ids: `[B, P]`, padding included; P = 0 if the prompt was given as embeddings, which happens only without
            `needs.token_ids`.
        padding: The padding of the prompt; None if there is none.
        roots: `[B]`, the emitted tokens, which are the roots of the first trees.
        features: Features of the prompt, without tokens whose keys the user passed, or of the part within
            `Drafter.feature_window`; None if not needed.
        logits: Logits `[B, P, V]` of the prompt; None if not needed or if the prompt was read in chunks.
        launches: Whether `DraftSession.launch` is called in every step.
        step_costs: Measured seconds of a step by its number of nodes; None if not needed or unknown.
    """

    input_ids: Tensor
    padding: PromptPadding | None
    roots: Tensor
    features: Features | None = None
    logits: Tensor | None = None
    launches: bool = False
    step_costs: StepCostFunction | None = None


class DraftSession(ABC):
    """State of a drafter in one generation, which drafts the tree of each step.

    Attributes:
        can_launch: Default False. Whether `propose` can return the next draft right after `launch`, before `observe`.
            `hybrid` then drafts before the host reads the step.
        has_candidates: Default False. Whether `candidates` is defined, which lists possible next tokens at almost no
            cost.
    """

    can_launch: bool = False
    has_candidates: bool = False

    @abstractmethod
    def propose(self, budget: Budget) -> Draft:
        """Draft the tree of the next step. Its roots are the last emitted tokens.

        Args:
            budget: Maximum size of the tree; it does not exceed the drafter's limits.
        """

    @abstractmethod
    def observe(self, step: Step) -> None:
        """Update the state after a step, whose verified tree may come from another drafter."""

    def skim(self, step: Step) -> None:
        """Update the state after a step that `hybrid` decided to be plain without a query; by default, `observe` it.

        While plain decoding wins, learning costs time and gains little, so a session may learn less here.
        """
        self.observe(step)

    def launch(self, step: Step, budget: Budget) -> Sequence[Tensor]:
        """Launch the next draft on the device before the host reads the step; the default launches nothing.

        Called only if the accepted tokens are chosen on the device, as on accelerators. After the host
        has read the step, `observe` gets it; then `propose` may be called, possibly with another budget. If
        `can_launch`, `hybrid` calls `propose` before `observe` as well, with the budget of `launch`.

        Args:
            step: The step, whose accepted tokens are known only on the device.
            budget: The likely budget of the next `propose`.

        Returns:
            Integer tensors `[B, *]` that the host needs; `observe` gets their values in `Accepted.launched`.
        """
        return ()

    @property
    def candidates(self) -> Sequence[Candidates]:
        """One source of possible next tokens per row, which `hybrid` merges. Defined only if `has_candidates`."""
        raise NotImplementedError(f"{type(self).__name__} sets has_candidates but does not define candidates.")

    def close(self) -> None:  # noqa: B027  (most sessions hold nothing)
        """Release the memory of the session; called when the generation ends, also after an error."""

    def report(self) -> dict[str, Any]:
        """Return figures about the session for `stats.control`, as plain Python values; the default is none."""
        return {}


class CandidateSession(DraftSession):
    """A session that can list the candidates after any node of a row, on the host and at almost no cost."""

    has_candidates = True

    @property
    @abstractmethod
    def candidates(self) -> Sequence[Candidates]:
        """See `DraftSession.candidates`."""


HOW_TO_LOAD = 'Load it: model.load_drafter("path or Hub id"), or load_head("path or Hub id").'
"""Advice in errors about a drafter that was given a path instead of a head."""


class Drafter(ABC):
    """Base of all drafters, which draft trees of candidate tokens for the target to verify.

    Attributes:
        method: The method name, as in `speculative="eagle"`.
        needs: The inputs that it needs in addition to the emitted tokens.
        has_window: Default False. Whether `SpeculativeConfig.draft_window` applies to it.
        samples: Default False. Whether it samples its drafts (`TokenTree.draft_probs`), as `acceptance="block"` needs.
            Drafters outside this package need not set it.
    """

    method: str
    needs: Needs = Needs()
    has_window: bool = False
    samples: bool = False

    @property
    def copies_target_weights(self) -> bool:
        """Whether it holds copies of the target's weights, so that a compiled drafter is made again when they change.

        True unless a subclass knows better.
        """
        return True

    @property
    def parts(self) -> tuple[Drafter, ...]:
        """The drafters that this one combines; only the drafter itself if it combines none."""
        return (self,)

    def with_parts(self, change: Callable[[Drafter], Drafter]) -> Drafter:
        """Return the drafter with each part replaced by `change(part)`."""
        return change(self)

    @property
    def is_combined(self) -> bool:
        """Whether it combines other drafters."""
        return self.parts != (self,)

    @abstractmethod
    def limits(self, config: SpeculativeConfig) -> Budget:
        """Return the size of its largest tree under this config; caches are sized for it, and no budget exceeds it.

        Raises:
            InvalidConfigError: Fields that contradict each other or do not apply to this drafter.
        """

    def feature_window(self, config: SpeculativeConfig) -> Window | None:
        """Return the part of the prompt whose features it reads, if it needs features; None, the default, for all."""
        return None

    @abstractmethod
    def start(self, target: Target, context: DraftContext, config: SpeculativeConfig) -> DraftSession:
        """Return a session for one generation.

        Args:
            target: The target, through which a drafter of the target's own layers runs them.
            context: The prompt, the first roots, and what `needs` names.
            config: The config of the call.
        """

    def compiled(self, model: PreTrainedModel, mode: ExecutionMode) -> Drafter:
        """Return a copy whose forwards are compiled or captured; the drafter itself if it has nothing to compile.

        Args:
            model: The target that the drafter is bound to.
            mode: How the target runs: as compiled Inductor programs, as captured graphs or with the CPU kernels.

        Raises:
            CaptureError: Its forwards cannot be compiled or captured.
        """
        return self

    def state_dict(self) -> Any:
        """Return a copy of what the drafter has learned, for `load_state_dict`; None if it learns nothing."""
        return None

    def load_state_dict(self, state: Any) -> None:  # noqa: B027  (most drafters learn nothing)
        """Restore what the drafter had learned when `state_dict` was called.

        Args:
            state: Result of `state_dict`, which is not modified; None resets the drafter to its initial state.
        """

    def fade(self) -> None:  # noqa: B027  (most drafters learn nothing)
        """Reduce the weight of what was learned, because the target's weights have changed; it is not erased.

        Called at the start of the first call after the change. The parts of a combined drafter are called separately.
        """

    def bind(self, model: PreTrainedModel) -> None:  # noqa: B027  (most drafters fit every target)
        """Check that the drafter fits the model, then move and cast its weights to match.

        Raises:
            DrafterMismatchError: It was made for another model.
            UnsupportedModelError: The method does not work with this model.
        """


def bind_head(head: DraftHead, model: PreTrainedModel) -> None:
    """Check that a head fits the target, then move it to the lm_head's device and cast it to the target's dtype.

    If the lm_head is offloaded, the head is moved to the device on which the target runs.

    Raises:
        DrafterMismatchError: Hidden size, vocabulary, number of layers or input size of the lm_head do not match, the
            head's weights are on the meta device, or the target has no lm_head.
    """
    head.check_sizes(text_config(model))
    if any(parameter.is_meta for parameter in head.parameters()):
        raise DrafterMismatchError(
            f"The weights of this {type(head).__name__} are on the meta device: they have no values.",
            "Load or create it on a real device; torch.set_default_device('meta') moves new modules there.",
        )
    lm_head = model.get_output_embeddings()
    if lm_head is None:
        raise DrafterMismatchError(f"{type(model).__name__} has no lm_head for this {type(head).__name__}.")
    size = head.config.hidden_size
    read = getattr(lm_head, "in_features", size)
    if head.shares_lm_head and read != size:
        raise DrafterMismatchError(
            f"The lm_head of {type(model).__name__} takes {read} inputs, this head produces {size}.",
            "Use a head with its own lm_head.",
        )
    device = next((parameter.device for parameter in lm_head.parameters()), model.device)
    head.to(device=execution_device(model) if device.type == "meta" else device, dtype=model.dtype)
