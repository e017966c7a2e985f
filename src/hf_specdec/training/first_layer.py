"""Initialise the attention of a block head's first layer, so that a block sees at once what an EAGLE head is given.

The attention weights copied from the target do not fit a block, whose context has another form than the target's own
inputs: a head that starts with them first has to learn where to attend. Here some heads of the first layer start by
attending to the last token of the context and passing on its features, the others by attending to the block's root and
passing on its embedding. After this layer a slot holds both, like the input of an EAGLE layer
(https://arxiv.org/abs/2401.15077). All weights are trained further.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.heads.dflash import DFlashHead
from hf_specdec.training.features import features_of
from hf_specdec.validation import check_type
from hf_specdec.verification.model import execution_device

SAMPLE_ROWS, SAMPLE_LENGTH, FIRST_TOKENS = 24, 256, 4
"""Random texts from which directions are estimated; features of the first tokens of a text are far from all others."""

MOST_TOKENS = 16_384
"""Number of token embeddings, evenly spaced, from which directions are estimated."""

RIDGE = 0.01
"""Strength of the regularisation of the least-squares problems, relative to the number of equations."""

FREQUENCIES = 0.003, 0.5
"""Rotary frequencies, in radians per position, on which a score must depend to fall with the distance of a token."""

SHARPNESS = 48.0
"""Score (before the softmax) that a token at distance 0 would get."""

FIRMNESS = 50.0
"""Length of queries and keys before their norms: only their signs matter, which the first steps should not change."""

NOISE = 0.02
"""Part of the old query and key weights that is kept, so that heads with the same task differ."""


@dataclass(frozen=True, slots=True)
class _Sample:
    """What the first layer reads. All rows have a root mean square of 1."""

    context: Tensor  # [N, D] entries of the context
    tokens: Tensor  # [M, D] embeddings of tokens
    mask: Tensor  # [D] embedding of the mask token
    size: float  # median root mean square of context entries before their norm
    entry: float  # median absolute value of an entry of these


@torch.no_grad()
def start_first_layer(head: DFlashHead, model: PreTrainedModel) -> None:
    """Set the attention of a block head's first layer to pass on the last context token's features and the root.

    All queries and keys are multiples of one vector. Their factors, of which norms keep only the sign, are linear
    functions fitted to separate roots, masks and context; rotary positions make the scores fall with the distance.
    Values are the principal components of the context, and of the embeddings. A quarter of the key heads, at least
    one, attends to the root; none if there is only one key head.

    Args:
        head: A new head, after `start_block_from_target`.
        model: The target. It reads `SAMPLE_ROWS` random texts of `SAMPLE_LENGTH` tokens.

    Raises:
        InvalidConfigError: The head is not a block head.
    """
    check_type("head", head, DFlashHead, "For an EAGLE-3 head: start_from_target.")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        sample = _read_sample(head, model)
    layer: Any = head.layers[0]
    groups = head.config.num_key_value_heads
    at_root = 0 if groups == 1 else max(groups // 4, 1)
    layer.input_layernorm.weight.fill_(1.0)
    _look(layer.self_attn, sample, _direction(head).to(sample.context), at_root)
    _pass_on(layer.self_attn, sample, at_root)
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        bias = getattr(layer.self_attn, name).bias
        if bias is not None:
            bias.zero_()


def _look(attention: Any, sample: _Sample, direction: Tensor, at_root: int) -> None:
    """Set queries and keys so that the last `at_root` key heads see the root, the others the end of the context."""
    size = attention.head_dim
    groups, heads = (len(each.weight) // size for each in (attention.k_proj, attention.q_proj))
    near = _fit((sample.context, 1.0), (sample.tokens, -1.0), (sample.mask[None], -1.0))
    root = _fit((sample.tokens, 1.0), (sample.context, -1.0), (sample.mask[None], -1.0))
    queries = _fit((sample.tokens, 1.0), (sample.mask[None], 1.0))
    strength = (SHARPNESS / size**0.5) ** 0.5
    scale = FIRMNESS if attention.qk_norm else strength * size**0.5
    for projection, functions in (
        (attention.q_proj, [queries] * heads), (attention.k_proj, [near] * (groups - at_root) + [root] * at_root)
    ):  # fmt: skip
        weight = torch.stack([torch.outer(direction, function) for function in functions]).flatten(0, 1)
        projection.weight.mul_(NOISE).add_(scale * weight)
    if attention.qk_norm:
        attention.q_norm.weight.fill_(strength)
        attention.k_norm.weight.fill_(strength)


def _pass_on(attention: Any, sample: _Sample, at_root: int) -> None:
    """Set values and outputs so that a slot receives the components of what it sees, in their size before the norm."""
    size = attention.head_dim
    groups, heads = (len(each.weight) // size for each in (attention.k_proj, attention.q_proj))
    context = _components(sample.context, (groups - at_root) * size)
    embeddings = _components(sample.tokens - sample.tokens.mean(0), at_root * size)
    attention.v_proj.weight.copy_(torch.cat([context, embeddings]))
    outputs = torch.cat([sample.size * context, sample.entry * embeddings]).unflatten(0, (groups, size))
    repeats = heads // groups
    attention.o_proj.weight.copy_(outputs.repeat_interleave(repeats, 0).flatten(0, 1).T / repeats)


def _read_sample(head: DFlashHead, model: PreTrainedModel) -> _Sample:
    """Read embeddings and random texts over the draft vocabulary."""
    device, hot = execution_device(model), head.hot_token_ids
    known = torch.arange(head.config.vocab_size, dtype=torch.long, device="cpu") if hot is None else hot.cpu()
    ids = known[torch.randint(len(known), (SAMPLE_ROWS, SAMPLE_LENGTH), dtype=torch.long, device="cpu")].to(device)
    lengths = torch.full((SAMPLE_ROWS,), SAMPLE_LENGTH, dtype=torch.long, device=device)
    weight = head.fc.weight
    parts = [
        head.fc(features_of(model, row[None], length[None], head.feature_layers)[0, FIRST_TOKENS:].to(weight))
        for row, length in zip(ids, lengths, strict=True)
    ]
    fused = torch.cat(parts).float()
    sizes = fused.square().mean(-1).sqrt()
    embedding = head.embedding_for(model)
    some = known[:: max(len(known) // MOST_TOKENS, 1)].to(device)
    tokens = embedding(torch.cat([some, some.new_tensor([head.config.mask_token_id])])).to(fused)
    tokens = tokens / tokens.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-6)
    context = head.hidden_norm(fused.to(weight)).float()
    return _Sample(context, tokens[:-1], tokens[-1], float(sizes.median()), float(fused.abs().median()))


def _fit(*wanted: tuple[Tensor, float]) -> Tensor:
    """Return the linear function `[D]` that is nearest to the values wanted of rows `[N, D]`; sets weigh alike."""
    like = wanted[0][0]
    square = RIDGE * len(wanted) * torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)
    right = torch.zeros_like(like[0])
    for rows, value in wanted:
        square = square + rows.T @ rows / len(rows)
        right = right + value * rows.mean(0)
    return torch.linalg.solve(square, right)


def _direction(head: DFlashHead) -> Tensor:
    """Return the unit vector `[d]` of all queries and keys, in the dimensions with useful rotary `FREQUENCIES`."""
    frequencies = head.rotary_emb.inv_freq.cpu()
    useful = (frequencies >= FREQUENCIES[0]) & (frequencies <= FREQUENCIES[1])
    if not useful.any():
        useful[:1] = True
    direction = torch.zeros(head.config.head_dim, dtype=torch.float32, device="cpu")
    direction[: len(frequencies)] = useful.float()  # the first of the two dimensions that rotate together
    return direction / direction.norm()


def _components(rows: Tensor, count: int) -> Tensor:
    """Return the first `count` principal components `[count, D]` of rows `[N, D]`, zeros beyond the D-th."""
    vectors = torch.linalg.eigh(rows.T @ rows).eigenvectors.T.flip(0)[:count]
    return torch.cat([vectors, vectors.new_zeros(count - len(vectors), rows.shape[1])])
