"""The draft vocabulary: a head may draft frequent ("hot") tokens only, with a smaller lm_head.

Source: FR-Spec (https://arxiv.org/abs/2502.14856). Stored as offsets, as in EAGLE-3 checkpoints.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hf_specdec.errors import InvalidConfigError


class HotTokens:
    """Mixin for heads whose config has `draft_vocab_size`: target id = draft id + `d2t[draft id]`.

    Attributes:
        shares_lm_head: Whether the head uses the target's lm_head; otherwise it has its own.
    """

    config: Any
    d2t: Tensor
    shares_lm_head: bool

    def _make_hot_tokens(self) -> None:
        """Create the buffer `d2t` `[Vd]`, zeros, if the head has a draft vocabulary."""
        size, whole = self.config.draft_vocab_size, self.config.vocab_size
        if size is None:
            return
        if size < 1 or (whole is not None and size > whole):
            raise InvalidConfigError(
                f"`draft_vocab_size` must be from 1 to the target's {whole} tokens, got {size}.",
                "Use None for the whole vocabulary.",
            )
        offsets = torch.zeros(size, dtype=torch.long)
        self.register_buffer("d2t", offsets)  # type: ignore[attr-defined]

    @property
    def hot_token_ids(self) -> Tensor | None:
        """Ascending target ids `[Vd]` of the draft vocabulary; None if it is the target's whole vocabulary."""
        if self.config.draft_vocab_size is None:
            return None
        return torch.arange(self.config.draft_vocab_size, device=self.d2t.device) + self.d2t

    def set_hot_token_ids(self, token_ids: Tensor) -> None:
        """Set the draft vocabulary, given distinct target ids `[Vd]` in ascending order."""
        ids = self._checked(token_ids)
        if len(ids) != self.config.draft_vocab_size:
            raise InvalidConfigError(
                f"The head's `draft_vocab_size` is {self.config.draft_vocab_size}, got {len(ids)} hot tokens.",
                "Give as many, or create the head with another `draft_vocab_size`.",
            )
        self.d2t = ids.to(self.d2t) - torch.arange(len(ids), device=self.d2t.device)

    def _checked(self, ids: Tensor) -> Tensor:
        size = self.config.vocab_size or 2**31  # unknown until the head is loaded for a target
        if not len(ids) or int(ids[0]) < 0 or int(ids[-1]) >= size or bool((ids[1:] <= ids[:-1]).any()):
            raise InvalidConfigError(f"Hot tokens must be one or more distinct, ascending ids from 0 to {size - 1}.")
        return ids

    def use_hot_tokens(self, token_ids: Tensor) -> None:
        """Restrict a head that shares the target's lm_head to these tokens, and set the config's `draft_vocab_size`.

        Args:
            token_ids: Target ids in any order.
        """
        if not self.shares_lm_head:
            raise InvalidConfigError(
                "This head has its own lm_head, which determines its draft vocabulary.",
                "Hot tokens can be set only for heads that share the target's lm_head.",
            )
        ids = self._checked(token_ids.to(torch.long).flatten().sort().values)
        self.config.draft_vocab_size = len(ids)
        self._make_hot_tokens()
        self.set_hot_token_ids(ids)

    def rows_of(self, lm_head: nn.Module) -> Tensor:
        """Return the rows `[Vd, D]` of a (possibly quantised) lm_head for the draft vocabulary."""
        rows, ids = linear_weight(lm_head, self.config.hidden_size), self.hot_token_ids
        return rows if ids is None else rows[ids.to(rows.device)]


@torch.no_grad()
def linear_weight(layer: nn.Module, in_features: int) -> Tensor:
    """Return the weight `[out, in]` of a linear layer, which may be quantised."""
    weight = getattr(layer, "weight", None)
    if type(layer) is nn.Linear and type(weight) is nn.Parameter and weight.is_floating_point():
        return weight.detach()
    # works for any quantisation: the outputs for the unit vectors are the columns of the weight, plus the bias
    example = next(layer.parameters())
    dtype = example.dtype if example.is_floating_point() else torch.float32
    units = torch.eye(in_features, dtype=dtype, device=example.device)
    columns: Tensor = layer(units) - layer(torch.zeros_like(units[:1]))
    return columns.T
