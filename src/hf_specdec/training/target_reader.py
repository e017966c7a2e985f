"""What training reads of the frozen target."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_specdec.verification.model import lm_head_rows


class TargetReader:
    """What training reads of the frozen target: embedding and lm_head. No module, so nobody trains or saves it.

    Args:
        target: The target.
        hot_token_ids: `[Vd]` the head's draft vocabulary; None is the target's whole one.
        embedding: What heads read tokens by; None is the target's.
    """

    def __init__(
        self, target: PreTrainedModel, hot_token_ids: Tensor | None, embedding: nn.Module | None = None
    ) -> None:
        self._embedding = embedding or target.get_input_embeddings()
        self.rows = lm_head_rows(target, hot_token_ids)
        self._whole = target.get_output_embeddings()
        self._hot_token_ids = hot_token_ids
        self.dtype = target.dtype

    def logits(self, features: Tensor) -> Tensor:
        """Float32 logits `[M, Vd]` of post-final-norm features `[M, D]`; gradients pass through."""
        logits: Tensor = self.rows(features.to(self.dtype))
        return logits.float()

    def embed(self, input_ids: Tensor) -> Tensor:
        """`[B, T]` token ids to embeddings `[B, T, D]`."""
        embeddings: Tensor = self._embedding(input_ids)
        return embeddings

    @torch.no_grad()
    def correct(self, draft_logits: Tensor, features: Tensor, following: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
        """Compare drafted tokens, and the text, with the target's greedy choice in its whole vocabulary.

        Args:
            draft_logits: `[M, Vd]`.
            features: `[M, D]` post-final-norm features at the same places.
            following: `[M]` what the text says there.
            ranks: R.

        Returns:
            `[M, R]`: whether the r-th best drafted token is the choice. `[M]`: whether the text is.
        """
        best = draft_logits.topk(ranks, dim=-1).indices
        if self._hot_token_ids is not None:
            best = self._hot_token_ids.to(best.device)[best]
        chosen: Tensor = self._whole(features.to(self.dtype)).argmax(-1)
        return best == chosen[:, None], following == chosen
