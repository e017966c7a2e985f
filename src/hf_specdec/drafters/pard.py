"""PARD drafting: a small model, the assistant, drafts several tokens in one forward.

Source: PARD (https://arxiv.org/abs/2504.18583, https://github.com/AMD-AGI/PARD). The assistant is an ordinary language
model, fine-tuned to predict the next tokens at mask tokens that follow the text. Its config names the mask token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.checkpoints.formats import MASK_TOKEN_FIELDS, PARD_2, PARD_2_HINT, mask_token_in, needs_features
from hf_specdec.config import SpeculativeConfig
from hf_specdec.drafters.base import DraftContext, DraftSession, DraftTarget
from hf_specdec.drafters.draft_model import AssistantReader, DraftModelDrafter, DraftModelSession, num_embeddings
from hf_specdec.drafters.registry import register
from hf_specdec.errors import DrafterMismatchError, UnsupportedModelError
from hf_specdec.trees.draft import Budget, Draft
from hf_specdec.trees.growth import best_children, likeliest_nodes, reachable


@register(
    "pard",
    part="a PARD assistant model",
    how_given="pass assistant_model=, or call model.load_drafter(path_or_hub_id)",
)
class PardDrafter(DraftModelDrafter):
    """Drafts `num_steps` tokens per forward of an assistant, at mask tokens that follow the text.

    Config fields: `num_steps` (default 8, or `num_draft_tokens - 1` for a chain), `top_k` (default 1, a chain),
    `num_draft_tokens` (default: `num_steps + 1` for a chain, 16 for a tree), `tree` (None or `"dynamic"`). The
    predictions for a depth do not depend on the tokens above it, so a tree consists of the likeliest nodes by the
    product of their probabilities. The mask token is never drafted. No draft exceeds the assistant's
    `max_position_embeddings`.

    The output does not depend on the assistant, which is not modified and may be unattached.

    Args:
        assistant: A decoder-only transformers model whose config has `pard_token` (or `ptd_token_id`), on any device.
            It must be able to verify trees; PARD-2, which reads hidden states of the target, is not supported.
        tokenizer, assistant_tokenizer: See `DraftModelDrafter`.
    """

    # The depth is the number of tokens that assistants are trained to predict at once. PARD's own default is 12,
    # chosen for GPUs; a longer draft costs no more forwards, but more tokens in those of both models.
    defaults = Budget(num_nodes=16, num_steps=8, top_k=1)
    _growable = staticmethod(reachable)

    def __init__(self, assistant: PreTrainedModel, *, tokenizer: Any = None, assistant_tokenizer: Any = None) -> None:
        super().__init__(assistant, tokenizer=tokenizer, assistant_tokenizer=assistant_tokenizer)

    @property
    def mask_token(self) -> int:
        """Id of the mask token.

        Raises:
            DrafterMismatchError: The assistant's config names none, or one without an embedding.
        """
        token = mask_token_in(fields_of(self.assistant))
        if token is None:
            raise DrafterMismatchError(
                f"The config of this {type(self.assistant).__name__} names no mask token "
                f"({' or '.join(MASK_TOKEN_FIELDS)}), as those of models trained to draft in parallel do.",
                'Use speculative="draft_model", which drafts token by token with any model.',
            )
        size = num_embeddings(self.assistant)
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < size:
            raise DrafterMismatchError(
                f"The config of this {type(self.assistant).__name__} names the mask token {token!r:.80}, which is not "
                f"one of the {size} ids that the model embeds."
            )
        return token

    def bind(self, model: PreTrainedModel) -> None:
        """Check the assistant's vocabulary size and mask token, and that it can verify trees.

        Raises:
            DrafterMismatchError: The assistant is the target itself, has a smaller vocabulary or no mask token.
            UnsupportedModelError: The assistant needs features of the target (PARD-2), or cannot verify trees.
        """
        if needs_features(fields_of(self.assistant)):
            raise UnsupportedModelError(f"This {type(self.assistant).__name__} is {PARD_2}.", PARD_2_HINT)
        _ = self.mask_token
        super().bind(model)
        self._check_trees()

    def _check_trees(self) -> None:
        if not self.facts.supports_trees:
            raise UnsupportedModelError(
                f"{type(self.assistant).__name__} cannot draft in one forward, because mask tokens cannot be removed "
                f"from its cache again ({self.facts.chain_only_reason}).",
                'Use speculative="draft_model", which drafts token by token.',
            )

    def start(self, target: DraftTarget, context: DraftContext, config: SpeculativeConfig) -> DraftSession:
        """Start a session; its first `propose` reads the prompt."""
        self._check_trees()
        return _PardSession(self, target, context, self.limits(config))


def fields_of(assistant: Any) -> Mapping[str, Any]:
    """Return the fields of a model's config; none if it has no config."""
    return getattr(getattr(assistant, "config", None), "__dict__", {})


class _PardSession(DraftModelSession):
    def __init__(self, drafter: PardDrafter, target: DraftTarget, context: DraftContext, limits: Budget) -> None:
        super().__init__(drafter, target, context, limits)
        self._mask_token = drafter.mask_token
        num_tokens = self._vocabulary.num_without(self._mask_token)
        self._limits = replace(self._limits, top_k=min(self._limits.top_k, num_tokens))

    def _draft(self, reader: AssistantReader, roots: Tensor, budget: Budget) -> Draft:
        logits = self._vocabulary.narrowed(reader.read(budget.num_steps - 1, self._mask_token))
        log_probs, index = best_children(self._vocabulary.without(logits, self._mask_token), budget.top_k)
        return likeliest_nodes(roots, log_probs, self._vocabulary.target_tokens(index), budget)
