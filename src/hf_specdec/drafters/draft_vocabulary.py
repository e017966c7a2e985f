"""`DraftVocabulary`: the tokens that an assistant may draft, as tables on its device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_specdec.drafters.assistant import num_known_tokens
from hf_specdec.drafters.token_translation import TokenTranslation
from hf_specdec.verification.model import text_config


@dataclass(frozen=True, slots=True)
class DraftVocabulary:
    """The S tokens that an assistant may draft for a target, and how they map to the ids of both models.

    With the target's tokenizer, these are the ids below S, which are the same in both models. With another one, they
    are the shared tokens of a translation.

    Attributes:
        size: S.
        width: V, the size of the target's logits.
    """

    size: int
    width: int
    translation: TokenTranslation | None
    _target_ids: Tensor | None = None  # [S]
    _assistant_ids: Tensor | None = None  # [S]
    _assistant_id_of: Tensor | None = None  # [V] assistant ids of the shared tokens, 0 elsewhere

    @classmethod
    def of(
        cls, target: PreTrainedModel, assistant: PreTrainedModel, translation: TokenTranslation | None,
        device: torch.device,
    ) -> DraftVocabulary:  # fmt: skip
        """Create the tables of a target and an assistant.

        Args:
            target, assistant: The models.
            translation: Between their tokenizers; None if the assistant has the target's tokenizer.
            device: The assistant's device.
        """
        num_tokens, width = target_sizes(target)
        if translation is None:
            return cls(min(num_tokens, num_known_tokens(assistant)), width, None)
        target_ids, assistant_ids = translation.shared.to(device).unbind(-1)
        table = torch.zeros(width, dtype=torch.long, device=device).scatter(0, target_ids, assistant_ids)
        return cls(len(target_ids), width, translation, target_ids, assistant_ids, table)

    def narrowed(self, logits: Tensor) -> Tensor:
        """Select the logits `[..., S]` of this vocabulary's tokens from the assistant's logits `[..., Va]`."""
        if self._assistant_ids is None:
            return logits[..., : self.size]
        return logits.index_select(-1, self._assistant_ids)

    def target_tokens(self, index: Tensor) -> Tensor:
        """Return the target's ids of tokens given by their index in this vocabulary, in the same shape."""
        return index if self._target_ids is None else self._target_ids[index]

    def assistant_tokens(self, tokens: Tensor) -> Tensor:
        """Return the assistant's ids of drafted tokens, which are the target's ids, in the same shape."""
        return tokens if self._assistant_id_of is None else self._assistant_id_of[tokens]

    def without(self, logits: Tensor, assistant_token: int) -> Tensor:
        """Return logits `[..., S]` with -inf at one of the assistant's tokens."""
        ids = self._assistant_ids
        if ids is None:
            ids = torch.arange(self.size, device=logits.device)
        return torch.where(ids == assistant_token, -torch.inf, logits)

    def num_without(self, assistant_token: int) -> int:
        """Return the number of these tokens without one of the assistant's, which need not be one of them."""
        if self.translation is None:
            return self.size - (assistant_token < self.size)
        return self.size - int((self.translation.shared[:, 1] == assistant_token).sum())

    def spread(self, probs: Tensor) -> Tensor:
        """Return probabilities `[..., V]` over the target's ids, 0 at all other tokens, of those `[..., S]` here."""
        if self._target_ids is None:
            return nn.functional.pad(probs, (0, self.width - self.size))
        spread = probs.new_zeros(*probs.shape[:-1], self.width)
        return spread.index_copy(-1, self._target_ids, probs)


def target_sizes(target: PreTrainedModel) -> tuple[int, int]:
    """Return the number of ids that a target can emit, and the size V of its logits, which may be larger."""
    vocab_size = int(text_config(target).vocab_size)
    width = int(getattr(target.get_output_embeddings(), "out_features", vocab_size))
    return min(vocab_size, width), width
