"""The attention of a draft layer and its rotary positions, with four ways to attend.

Inference reads keys from a cache; training runs the same layer several times over one sequence. Both use the same
projections and pass a different function `attend(query, key, value) -> output`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import Cache
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from hf_specdec.errors import InvalidConfigError
from hf_specdec.verification import tree_attention
from hf_specdec.verification.device_attention import Mask, VisibleKeys
from hf_specdec.verification.tree_attention import append_and_attend

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""`attend(query [B, H, T, d], key [B, G, T, d], value [B, G, T, d]) -> [B, H, T, d]`; T new entries, G divides H."""

QUERY_BLOCK = 256
"""Number of queries per checkpointed block in `AlignedAttention`; limits the memory of the scores."""

MAX_PACKED_QUERIES = 512
"""Maximum number of new entries T for which the query heads of a key head are packed into one attention.

For more, keys and values are repeated per query head, which takes less memory than a packed mask."""


class DraftRotaryEmbedding(LlamaRotaryEmbedding):
    """Llama's rotary embedding, which also honours `partial_rotary_factor` for the type `default`.

    Source: Su et al., "RoFormer" (https://arxiv.org/abs/2104.09864); partial rotation as in transformers (Phi, GLM,
    Qwen3-Next).
    """

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

    `rotary` are cosines and sines `[B, T, r]`.
    """
    size = rotary[0].shape[-1]
    if size == query.shape[-1]:
        return apply_rotary_pos_emb(query, key, *rotary)
    turned = apply_rotary_pos_emb(query[..., :size], key[..., :size], *rotary)
    return torch.cat([turned[0], query[..., size:]], dim=-1), torch.cat([turned[1], key[..., size:]], dim=-1)


class DraftAttention(nn.Module):
    """Grouped-query attention with rotary positions; tensor names match Llama and Qwen3.

    Sliding windows are not applied here, but in the masks that callers pass to `attend_over`.

    Args:
        config: Provides `hidden_size`, `num_attention_heads`, `num_key_value_heads`, `head_dim`, `attention_bias`
            (bias of all four projections) and `qk_norm` (norms of queries and keys).
        input_size: Width of the input; 2D in EAGLE-3.
        bias: Add a bias to the query, key and value projections even if `attention_bias` is False.
    """

    def __init__(self, config: Any, input_size: int, bias: bool = False) -> None:
        super().__init__()
        if min(config.num_attention_heads, config.num_key_value_heads, config.head_dim) < 1 or (
            config.num_attention_heads % config.num_key_value_heads
        ):
            raise InvalidConfigError(
                f"num_attention_heads, num_key_value_heads and head_dim must be at least 1, and the first a multiple "
                f"of the second, got {config.num_attention_heads}, {config.num_key_value_heads}, {config.head_dim}."
            )
        if config.sliding_window is not None and config.sliding_window < 1:
            raise InvalidConfigError(f"sliding_window must be None or at least 1, got {config.sliding_window}.")
        self.head_dim = config.head_dim
        bias = bias or config.attention_bias
        queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(input_size, queries, bias=bias)
        self.k_proj = nn.Linear(input_size, keys, bias=bias)
        self.v_proj = nn.Linear(input_size, keys, bias=bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=config.attention_bias)
        if config.qk_norm:
            self.q_norm = LlamaRMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = LlamaRMSNorm(config.head_dim, config.rms_norm_eps)
        self.qk_norm = config.qk_norm

    def forward(self, hidden: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """Return the attention output `[B, T, D]` of inputs `[B, T, input_size]`; `rotary` as for `rotate`."""
        query, key, value = (self._split(proj(hidden)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        if self.qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = rotate(query, key, rotary)
        return self.o_proj(attend(query, key, value).transpose(1, 2).flatten(2))

    def keys_and_values(self, hidden: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the keys and values `[B, G, T, d]` of entries without queries; arguments as for `forward`."""
        key, value = self._split(self.k_proj(hidden)), self._split(self.v_proj(hidden))
        if self.qk_norm:
            key = self.k_norm(key)
        return rotate(key, key, rotary)[1], value

    def _split(self, projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


def attend_causally(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return causal attention: every entry sees itself and the entries before it. Shapes: see `Attend`."""
    return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def attend_over(cache: Cache, mask: Mask | Sequence[Mask] | None) -> Attend:
    """Return a function that appends the new entries to a cache and attends to all of its entries.

    Use one function per forward: its i-th call uses layer i of the cache, for the i-th layer of the draft model.

    Args:
        cache: Any transformers cache, with one layer per draft layer.
        mask: `[B, 1, T, S]` bool, True for visible entries, where S counts the cache's entries including the T new
            ones; or the visible keys, over the memory of a graph; or one of them per layer. None means causal
            attention, and requires an empty cache.
    """
    layers, masks = itertools.count(), mask

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        layer = next(layers)
        mask = masks if masks is None or isinstance(masks, Tensor | VisibleKeys) else masks[layer]
        if isinstance(mask, VisibleKeys):
            return mask.attend(query, *cache.update(key, value, layer)).transpose(1, 2)
        if mask is not None:
            output = append_and_attend(cache, layer, query, key, value, mask, None)
            if output is not None:
                return output.transpose(1, 2)
        keys, values = cache.update(key, value, layer)
        if mask is None:
            return attend_causally(query, keys, values)
        if not tree_attention.calls_kernel_directly(query.device):
            return scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)
        return _attend_packed(query, keys, values, mask)

    return attend


def _attend_packed(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Return the attention of `attend_packed`, with the arguments of `Attend` and a mask `[B, 1, T, S]`.

    With a mask and `enable_gqa`, SDPA would use cuDNN's kernel or materialize all scores.
    """
    groups = query.shape[1] // key.shape[1]
    if query.shape[2] > MAX_PACKED_QUERIES and groups > 1:
        key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
        groups = 1
    masks = functools.partial(tree_attention.packed_mask, mask, groups, query.dtype)
    return tree_attention.attend_packed(query, key, value, masks, None).transpose(1, 2)


class AlignedAttention:
    """Attention for multi-step training, where each entry sees exactly the entries it would see while drafting.

    The layer runs k times over T entries. Step 0 is causal. Entry t of step j corresponds to a node j levels below the
    last committed entry t-j, so it sees the entries of step 0 up to t-j, entry t-j+i of each step i from 1 to
    j-1, and itself: a causal triangle and j diagonals. Scores exist for one block of queries at a time, also in the
    backward pass.

    Sources: the training-time test of EAGLE-3 (https://arxiv.org/abs/2503.01840) and HASS
    (https://arxiv.org/abs/2408.15766).

    Args:
        num_layers: Number of draft layers, which call it in turn in every step.

    Example: T = 3, step 1: visible entries of step 0 and step 1, by query: 000|100, 100|010, 110|001.
    """

    def __init__(self, num_layers: int = 1) -> None:
        self._entries: list[tuple[list[Tensor], list[Tensor]]] = [([], []) for _ in range(num_layers)]
        self._calls = itertools.count()

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the attention of the calling layer in its next step; keep its keys and values for later steps.

        Shapes are those of `Attend`.
        """
        groups = query.shape[1] // key.shape[1]
        keys, values = self._entries[next(self._calls) % len(self._entries)]
        step = len(keys)
        keys.append(key.repeat_interleave(groups, dim=1))
        values.append(value.repeat_interleave(groups, dim=1))
        if step == 0:
            return scaled_dot_product_attention(query, keys[0], values[0], is_causal=True)
        kept = tuple(keys), tuple(values)
        blocks = [
            checkpoint(_attend_block, query, begin, *kept, use_reentrant=False)
            for begin in range(0, query.shape[2], QUERY_BLOCK)
        ]
        return torch.cat(blocks, dim=2)


def _attend_block(query: Tensor, begin: int, keys: tuple[Tensor, ...], values: tuple[Tensor, ...]) -> Tensor:
    """Return the attention `[B, H, block, d]` of the queries `begin : begin + QUERY_BLOCK` in the latest step.

    `query` `[B, H, T, d]` has all queries of that step; `keys` and `values` `[B, H, T, d]` are those of each step.
    """
    step, length = len(keys) - 1, query.shape[2]
    end = min(begin + QUERY_BLOCK, length)
    query = query[:, :, begin:end] * query.shape[-1] ** -0.5
    entries = torch.arange(length, device=query.device)
    distance = entries[begin:end, None] - entries[:end]  # from each key of step 0 to each query
    triangle = (query @ keys[0][:, :, :end].transpose(-1, -2)).masked_fill(distance < step, -torch.inf)
    # index of the one entry of step i that each query sees; negative: no such entry
    seen = [entries[begin:end] - (step - i) for i in range(1, step + 1)]
    diagonals = torch.stack([
        (query * keys[i][:, :, index.clamp(min=0)]).sum(-1).masked_fill(index < 0, -torch.inf)
        for i, index in enumerate(seen, start=1)
    ], dim=-1)  # fmt: skip
    weights = torch.cat([triangle, diagonals], dim=-1).float().softmax(-1).to(query.dtype)
    output = weights[..., :end] @ values[0][:, :, :end]
    for i, index in enumerate(seen, start=1):
        output = output + weights[..., end + i - 1, None] * values[i][:, :, index.clamp(min=0)]
    return output


class AnchoredAttention:
    """Attention for training on many blocks at once: a slot sees the context before its block, and its own block.

    Args:
        context: Keys and values `[B, G, T, d]` of the context, for each layer; they call it in turn.
        anchors: `[B, A]` index of each block's first token; its slots see the context before this index.
        block_size: Slots S of each block.
        causal: Whether a slot sees only itself and earlier slots of its block.
    """

    def __init__(
        self, context: Sequence[tuple[Tensor, Tensor]], anchors: Tensor, block_size: int, causal: bool
    ) -> None:
        self._context, self._calls, self._block_size = list(context), itertools.count(), block_size
        length, device = context[0][0].shape[2], anchors.device
        self._hidden = torch.arange(length, device=device) >= anchors[:, :, None]  # [B, A, T]
        later = torch.ones(block_size, block_size, dtype=torch.bool, device=device).triu(1)
        self._later = later if causal else torch.zeros_like(later)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the attention of the calling layer. Shapes: see `Attend`, with T = A * S slots, block by block."""
        keys, values = self._context[next(self._calls) % len(self._context)]
        step = max(QUERY_BLOCK // self._block_size, 1)
        parts, count = [], self._hidden.shape[1]
        for begin in range(0, count, step):
            blocks = slice(begin, min(begin + step, count))
            inputs = query, key, value, keys, values, self._hidden, self._later, blocks
            parts.append(
                _attend_blocks(*inputs) if count <= step else checkpoint(_attend_blocks, *inputs, use_reentrant=False)
            )
        return torch.cat(parts, dim=2)


def _attend_blocks(
    query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, hidden: Tensor, later: Tensor,
    blocks: slice,
) -> Tensor:  # fmt: skip
    """Return the attention `[B, H, blocks * S, d]` of some blocks; `query`, `key` and `value` are of all slots.

    Args:
        keys, values: `[B, G, T, d]` of the context.
        hidden: `[B, A, T]` bool, the context that each block does not see.
        later: `[S, S]` bool, the slots of its block that each slot does not see.
    """
    size, groups = len(later), query.shape[1] // key.shape[1]
    query, key, value = (states.unflatten(2, (-1, size))[:, :, blocks] for states in (query, key, value))
    query = query.unflatten(1, (-1, groups)) * query.shape[-1] ** -0.5  # [B, G, groups, A, S, d]
    shape = query.shape
    outside = (query.flatten(2, 4) @ keys.transpose(-1, -2)).view(*shape[:5], -1)
    outside = outside.masked_fill(hidden[:, None, None, blocks, None], -torch.inf)
    inside = (query @ key[:, :, None].transpose(-1, -2)).masked_fill(later, -torch.inf)
    weights = torch.cat([outside, inside], dim=-1).float().softmax(-1).to(query.dtype)
    length = keys.shape[2]
    output = (weights[..., :length].flatten(2, 4) @ values).view(shape)
    output = output + weights[..., length:] @ value[:, :, None]
    return output.flatten(3, 4).flatten(1, 2)
