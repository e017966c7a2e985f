"""The protocol of a drafter: `start` a session for one generation, which can `propose` and `observe`.

A drafter holds weights and settings and is shared by all generations (and threads) of a model; a session holds
everything that belongs to one call and is dropped with it. To write your own, see docs/drafters.md.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.accept import Acceptance
from hf_specdec.config import SpeculativeConfig
from hf_specdec.errors import DrafterMismatchError
from hf_specdec.heads.base import DraftHead
from hf_specdec.target.masks import PromptPadding
from hf_specdec.target.model import execution_device, text_config
from hf_specdec.target.target import Verification
from hf_specdec.tree import TokenTree


@dataclass(frozen=True, slots=True)
class Prompt:
    """Everything that is known when a session starts: the prompt is committed, the first roots are chosen."""

    input_ids: Tensor  # [B, P] padding included; P = 0 where the prompt came as embeddings
    padding: PromptPadding | None
    roots: Tensor  # [B] first emitted tokens
    features: Tensor | None  # [B, P, layers * D] the hidden states that the drafter reads


class DraftSession(ABC):
    """One generation's drafting."""

    @abstractmethod
    def propose(self) -> TokenTree:
        """The next tree, its roots the last emitted tokens; at most `Drafter.num_nodes` nodes."""

    @abstractmethod
    def observe(self, acceptance: Acceptance, verification: Verification) -> None:
        """Learn what became of the last proposal: emitted tokens, kept path, logits and features of its nodes."""


class Drafter(ABC):
    """Proposes trees of candidate tokens.

    Attributes:
        method: The method name it answers to.
        feature_layers: Which of the target's hidden states it reads, counted as transformers' `hidden_states`; -1 is
            the last, behind the final norm. They come side by side, in `Prompt.features` and `Verification.features`.
    """

    method: str
    feature_layers: tuple[int, ...] = ()

    @abstractmethod
    def num_nodes(self, config: SpeculativeConfig) -> int:
        """Nodes of its largest tree under this config, root included.

        Raises:
            InvalidConfigError: Fields that contradict each other or mean nothing to this drafter.
        """

    @abstractmethod
    def start(self, model: PreTrainedModel, prompt: Prompt, config: SpeculativeConfig) -> DraftSession:
        """A session for one generation."""

    def check_target(self, model: PreTrainedModel) -> None:  # noqa: B027  (most drafters fit every target)
        """Raise `DrafterMismatchError` where this drafter was made for another model."""


def fit_head(head: DraftHead, model: PreTrainedModel) -> None:
    """Compare a head's sizes with the target's, then move it next to the target's lm_head.

    Raises:
        DrafterMismatchError: Another hidden size or vocabulary, too few layers, or a target without lm_head.
    """
    head.check_sizes(text_config(model))
    lm_head = model.get_output_embeddings()
    if lm_head is None:
        raise DrafterMismatchError(f"{type(model).__name__} has no lm_head for this {type(head).__name__}.")
    device = next((parameter.device for parameter in lm_head.parameters()), model.device)
    head.to(device=execution_device(model) if device.type == "meta" else device, dtype=model.dtype)
