"""The interface of drafters: `Drafter.start` returns a session, which drafts a tree for each step of one generation.

A drafter holds weights and settings and is shared by all generations (and threads) of a model. A session holds the
state of one generation. To write your own, see docs/drafters.md.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.config import ExecutionMode, SpeculativeConfig
from hf_specdec.host_sync import read
from hf_specdec.trees.draft import Budget, Draft, StepCostFunction
from hf_specdec.trees.tree import TokenTree
from hf_specdec.verification.features import Features, PromptPadding, Window
from hf_specdec.verification.step import Step


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
        padding: The padding of the prompt, also of embeddings; None if there is none.
        roots: `[B]`, the emitted tokens, which are the roots of the first trees.
        features: Features of the prompt, without tokens whose keys the user passed, or of the part within
            `Drafter.feature_window`; None if not needed.
        logits: Logits `[B, P, V]` of the prompt; None if not needed or if the prompt was read in chunks.
        launches: Whether `DraftSession.launch` is called in every step.
        step_costs: Returns the measured seconds of a step that verifies 1, 2, ... nodes per row, drafting excluded;
            None if not needed or unknown.
        tokens_left: At most how many tokens a row may still emit.
        processors: The call's logits processors, called once so far, for the roots.
    """

    input_ids: Tensor
    padding: PromptPadding | None
    roots: Tensor
    features: Features | None = None
    logits: Tensor | None = None
    launches: bool = False
    step_costs: StepCostFunction | None = None
    tokens_left: float = float("inf")
    processors: Sequence[Any] = ()

    def texts(self) -> list[list[int]]:
        """Return each row's prompt without padding, followed by its root, on the host; reads the device once."""
        padding = None if self.padding is None else self.padding.last(self.input_ids.shape[1])
        return unpadded(torch.cat([self.input_ids, self.roots[:, None]], dim=1), padding)


def unpadded(tokens: Tensor, padding: PromptPadding | None) -> list[list[int]]:
    """Return the rows of `[B, P + M]` on the host without the padding of their first P columns."""
    if padding is None:
        return read(tokens)[0]
    texts, masks = read(tokens, padding.valid)
    later = [True] * (tokens.shape[1] - padding.valid.shape[1])
    return [list(compress(text, mask + later)) for text, mask in zip(texts, masks, strict=True)]


class DraftTarget(Protocol):
    """What a drafter may use of the target, with which one that runs the target's own layers drafts."""

    model: PreTrainedModel
    supports_trees: bool
    """Whether a node may have more than one child."""
    lockstep: bool
    """Whether all rows must accept the same number of tokens in every step."""

    def with_model(self, model: PreTrainedModel, /) -> DraftTarget:
        """Return a copy that shares the cache and drafts with `model`, a part of the target."""

    def extend(self, tree: TokenTree, known: int, /) -> Tensor:
        """Append the nodes of a tree except the first `known`; return their logits `[B, N - known, V]`."""

    def forget(self) -> None:
        """Discard the nodes appended by `extend`; required before the next verification."""


class Candidate(NamedTuple):
    """A token that may follow a node, and its probability according to the source that lists it.

    Attributes:
        token: Token id.
        probability: From 0 to 1.
    """

    token: int
    probability: float


class Candidates(ABC):
    """One source of candidates for one row: lists the tokens that may follow each node of a tree.

    A *place* is the source's state at a node; `start` is its place at the root. If it `restricts` others, merged trees
    have no token that it cannot follow.
    """

    start: Any
    restricts: bool = False

    @abstractmethod
    def after(self, place: Any) -> Sequence[Candidate]:
        """Return the candidates after the node at a place, each token once; empty if there are none."""

    @abstractmethod
    def follow(self, place: Any, token: int) -> Any:
        """Return the place after a token. None if that node has no candidates, at it or below."""


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


HOW_TO_LOAD = 'Load it: model.load_drafter("path or Hub id"), or load_head("path or Hub id").'
"""Advice in errors about a drafter that was given a path instead of a head."""


TREE_FIELDS = ("tree", "num_steps", "top_k", "num_draft_tokens")
"""Fields of a config that say how a tree is drafted, see `Drafter.accepts`."""
SIZES = TREE_FIELDS[1:]


class Drafter(ABC):
    """Base of all drafters, which draft trees of candidate tokens for the target to verify.

    Attributes:
        method: The method name, as in `speculative="eagle"`.
        needs: The inputs that it needs in addition to the emitted tokens.
        accepts: The fields of a config that apply to it, of `tree`, `num_steps`, `top_k` and `num_draft_tokens`;
            `"tree=dynamic"` accepts a field with this value only. Others are refused before `limits` is called.
        tree_from: What its tree follows from, to explain the refusal of a field.
        defaults: The sizes of its tree that a config leaves None.
        has_window: Default False. Whether `SpeculativeConfig.draft_window` applies to it.
        samples: Default False. Whether it samples its drafts (`TokenTree.draft_probs`), as `acceptance="block"` needs.
            Drafters outside this package need not set it.
    """

    method: str
    needs: Needs = Needs()
    accepts: Collection[str] = TREE_FIELDS
    tree_from: str = ""
    defaults: Budget = Budget(16, 4, 4)
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

    def limits(self, config: SpeculativeConfig) -> Budget:
        """Return the size of its largest tree under this config; caches are sized for it, and no budget exceeds it.

        By default the sizes of the config, else those of `defaults`.

        Raises:
            InvalidConfigError: Fields that contradict each other.
        """
        default = self.defaults
        num_nodes, num_steps = config.num_draft_tokens or default.num_nodes, config.num_steps or default.num_steps
        return Budget(num_nodes, num_steps, config.top_k or default.top_k)

    def feature_window(self, config: SpeculativeConfig) -> Window | None:
        """Return the part of the prompt whose features it reads, if it needs features; None, the default, for all."""
        return None

    @abstractmethod
    def start(self, target: DraftTarget, context: DraftContext, config: SpeculativeConfig) -> DraftSession:
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

    def with_program(self, make: Callable[[PreTrainedModel, Any], Any]) -> Drafter:
        """Return a copy whose own language model runs as a program; the drafter itself if it has none.

        `make` returns a runner of a model with some `TargetFacts`, or raises `CaptureError`.
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
