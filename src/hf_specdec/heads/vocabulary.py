"""The hot-token vocabulary that a head may draft over: fewer tokens, a smaller lm_head.

Source: FR-Spec (https://arxiv.org/abs/2502.14856); stored as EAGLE-3 checkpoints store it, as offsets.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hf_specdec.errors import InvalidConfigError


class HotTokens:
    """Mixin of a head whose config has `draft_vocab_size`: target id = draft id + `d2t[draft id]`.

    Attributes:
        shares_lm_head: Whether the target's lm_head scores what the head predicts; else it has its own.
    """

    config: Any
    d2t: Tensor
    shares_lm_head: bool

    def _make_hot_tokens(self) -> None:
        """The buffer, where the head has a vocabulary of its own; called by the head's `__init__`.

        Raises:
            InvalidConfigError: It is larger than the target's.
        """
        size, whole = self.config.draft_vocab_size, self.config.vocab_size
        if size is not None and (size < 1 or (whole is not None and size > whole)):
            raise InvalidConfigError(
                f"`draft_vocab_size` must be from 1 to the target's {whole} tokens, got {size}.",
                "Leave it None to draft over all of them.",
            )
        if size is not None:
            offsets = torch.zeros(self.config.draft_vocab_size, dtype=torch.long)
            self.register_buffer("d2t", offsets)  # type: ignore[attr-defined]

    @property
    def hot_token_ids(self) -> Tensor | None:
        """Target ids of the draft vocabulary `[Vd]`, ascending; None where the head drafts over all of V."""
        if self.config.draft_vocab_size is None:
            return None
        return torch.arange(self.config.draft_vocab_size, device=self.d2t.device) + self.d2t

    def set_hot_token_ids(self, token_ids: Tensor) -> None:
        """Store the draft vocabulary.

        Args:
            token_ids: `[Vd]` distinct target ids in ascending order.
        """
        self.d2t = token_ids.to(self.d2t) - torch.arange(len(token_ids), device=self.d2t.device)

    def use_hot_tokens(self, token_ids: Tensor) -> None:
        """Draft over these tokens only, with a head that scores by the target's lm_head.

        Args:
            token_ids: Target ids in any order (FR-Spec's lists are by frequency).

        Raises:
            InvalidConfigError: Ids twice or beyond the vocabulary, or a head with an lm_head of its own.
        """
        if not self.shares_lm_head:
            raise InvalidConfigError(
                "This head has an lm_head of its own, whose rows are its draft vocabulary.",
                "Hot tokens can be given to heads that share the target's lm_head.",
            )
        ids = token_ids.to(torch.long).flatten().sort().values
        size = self.config.vocab_size or 2**31  # unknown until the head meets its target
        if not len(ids) or int(ids[0]) < 0 or int(ids[-1]) >= size or bool((ids[1:] == ids[:-1]).any()):
            raise InvalidConfigError(f"Hot tokens are distinct ids from 0 to {size - 1}, at least one.")
        self.config.draft_vocab_size = len(ids)
        self._make_hot_tokens()
        self.set_hot_token_ids(ids)

    def rows_of(self, lm_head: nn.Module) -> Tensor:
        """`[Vd, D]` what a linear map from features to V logits has for the draft vocabulary, quantised or not."""
        rows, ids = linear_weight(lm_head, self.config.hidden_size), self.hot_token_ids
        return rows if ids is None else rows[ids.to(rows.device)]


@torch.no_grad()
def linear_weight(layer: nn.Module, in_features: int) -> Tensor:
    """The matrix `[out, in]` of a linear layer, quantised or not, without its bias."""
    weight = getattr(layer, "weight", None)
    if type(layer) is nn.Linear and type(weight) is nn.Parameter and weight.is_floating_point():
        return weight.detach()
    # whatever it is made of, its answer to the unit vectors is its matrix
    example = next(layer.parameters())
    dtype = example.dtype if example.is_floating_point() else torch.float32
    units = torch.eye(in_features, dtype=dtype, device=example.device)
    answers: Tensor = layer(units) - layer(torch.zeros_like(units[:1]))
    return answers.T
