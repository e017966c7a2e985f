"""Rotary positions of draft layers, which may rotate only the first dimensions of a head.

Source: Su et al., "RoFormer" (https://arxiv.org/abs/2104.09864); partial rotation as in transformers'
`partial_rotary_factor` (Phi, GLM, Qwen3-Next).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from hf_specdec.errors import InvalidConfigError


class DraftRotaryEmbedding(LlamaRotaryEmbedding):
    """Llama's rotary embedding, which also honours `partial_rotary_factor` for the type `default`."""

    def __init__(self, config: Any) -> None:
        size = rotated_size(config)
        if size < 2 or size % 2:
            raise InvalidConfigError(
                f"`partial_rotary_factor` rotates {size} of {config.head_dim} dimensions; it must be an even number."
            )
        super().__init__(config)

    @staticmethod
    def compute_default_rope_parameters(config: Any, device: Any = None, **_: Any) -> tuple[Tensor, float]:
        """Return the frequencies `[rotated dimensions / 2]` and the scaling of sines and cosines, which is 1."""
        size = rotated_size(config)
        exponents = torch.arange(0, size, 2, dtype=torch.float, device=device) / size
        return 1.0 / (config.rope_parameters["rope_theta"] ** exponents), 1.0


def rotated_size(config: Any) -> int:
    """Return how many dimensions of each head are rotated."""
    return int(config.head_dim * (config.rope_parameters.get("partial_rotary_factor") or 1.0))


def rotate(query: Tensor, key: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return queries `[B, H, T, d]` and keys `[B, G, T, d]` with their first r dimensions rotated.

    Args:
        query, key: The vectors.
        rotary: Cosines and sines `[B, T, r]`, where r <= d is the number of rotated dimensions.
    """
    size = rotary[0].shape[-1]
    if size == query.shape[-1]:
        turned: tuple[Tensor, Tensor] = apply_rotary_pos_emb(query, key, *rotary)
        return turned
    turned = apply_rotary_pos_emb(query[..., :size], key[..., :size], *rotary)
    return torch.cat([turned[0], query[..., size:]], dim=-1), torch.cat([turned[1], key[..., size:]], dim=-1)
