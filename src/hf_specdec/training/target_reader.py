"""Access to the parts of the frozen target that training reads."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_specdec.verification.model import lm_head_rows


class TargetReader:
    """Access to the frozen target's embedding and lm_head; not an `nn.Module`, so they are neither trained nor saved.

    Args:
        target: The target.
        hot_token_ids: `[Vd]` token ids of the head's draft vocabulary; None if it is the whole vocabulary.
        embedding: Token embedding to use; None for the target's.
    """

    def __init__(
        self, target: PreTrainedModel, hot_token_ids: Tensor | None, embedding: nn.Module | None = None
    ) -> None:
        self._embedding = embedding or target.get_input_embeddings()
        self.rows = lm_head_rows(target, hot_token_ids)
        self._lm_head = target.get_output_embeddings()
        self._hot_token_ids = hot_token_ids
        self.dtype = target.dtype

    def logits(self, features: Tensor) -> Tensor:
        """Return the target's float32 logits `[M, Vd]` over the draft vocabulary, differentiable in `features`.

        Args:
            features: `[M, D]` hidden states after the final norm.
        """
        logits: Tensor = self.rows(features.to(self.dtype))
        return logits.float()

    def embed(self, input_ids: Tensor) -> Tensor:
        """Embed token ids `[B, T]` as `[B, T, D]`."""
        embeddings: Tensor = self._embedding(input_ids)
        return embeddings

    @torch.no_grad()
    def correct(self, draft_logits: Tensor, features: Tensor, following: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
        """Compare drafted tokens and the text with the target's greedy choice from its full vocabulary.

        Args:
            draft_logits: `[M, Vd]` the head's logits.
            features: `[M, D]` hidden states after the final norm, from which the target predicts the same tokens.
            following: `[M]` the text's token at these places.
            ranks: R, number of top drafted tokens to compare.

        Returns:
            `[M, R]`: whether the r-th best drafted token is the greedy choice. `[M]`: whether the text's token is.
        """
        best = draft_logits.topk(ranks, dim=-1).indices
        if self._hot_token_ids is not None:
            best = self._hot_token_ids.to(best.device)[best]
        chosen: Tensor = self._lm_head(features.to(self.dtype)).argmax(-1)
        return best == chosen[:, None], following == chosen
