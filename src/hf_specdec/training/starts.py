"""Initialise a head from weights of its target, which helps most with little training data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_specdec.heads.dflash import DFlashHead
from hf_specdec.heads.eagle3 import Eagle3Head
from hf_specdec.heads.head import linear_weight
from hf_specdec.training.feature_store import target_features
from hf_specdec.validation import check_type
from hf_specdec.verification.model import execution_device, find_backbone, text_config


@torch.no_grad()
def start_from_target(head: Eagle3Head, model: PreTrainedModel) -> tuple[str, ...]:
    """Initialise an EAGLE-3 head in place from weights of the target, which helps most with little training data.

    `fc` becomes the identity on the last of the features that the head reads, plus 0.3 times its old weights. Unless
    it is shared, the lm_head (restricted to the draft vocabulary) is copied, as are the final norm and the
    second-to-last layer's attention (into the half of the input that reads hidden states), MLP and norms.

    Either all parts are copied or none: with only some, the head learned more slowly than from random weights, with
    all of them faster (SmolLM2 and Gemma 3, first 20 steps): a trained lm_head on a random layer makes confident
    errors. Biases of the attention that the head lacks are left out, because the formats of EAGLE-3 heads have none:
    a head of Qwen2.5-Coder-0.5B learned faster with its attention than without, too.

    Args:
        head: A new head with its draft vocabulary set.
        model: The target.

    Returns:
        Names of the parts that do not fit (`fc`, `lm_head`, `MLP`, `attention`), in which case the head is unchanged;
        empty on success.
    """
    check_type("head", head, Eagle3Head, "For a block head: start_block_from_target.")
    before = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    backbone, layers = find_backbone(model)
    theirs, own = layers[max(len(layers) - 2, 0)], head.midlayer
    attention = getattr(theirs, "self_attn", None)
    normed = [name for name in ("q_norm", "k_norm") if hasattr(attention, name)]
    fits = {"fc": head.target_hidden_size == head.config.hidden_size}
    if fits["fc"]:
        _start_fc(head.fc.weight, head.fc.in_features // head.fc.out_features - 1)
    fits["lm_head"] = head.shares_lm_head
    if not head.shares_lm_head:
        rows = head.rows_of(model.get_output_embeddings())
        fits["lm_head"] = rows.shape == head.lm_head.weight.shape
        if fits["lm_head"]:
            head.lm_head.weight.copy_(rows)
    fits["lm_head"] = fits["lm_head"] and copy_norm(head.norm, getattr(backbone, "norm", None))
    fits["MLP"] = _copy_mlp(own.mlp, own.post_attention_layernorm, head.config.hidden_act, theirs, model)
    fits["attention"] = (
        bool(normed) == head.config.qk_norm
        and copy_linears(own.self_attn, attention, ("q_proj", "k_proj", "v_proj", "o_proj"), drops_bias=True)
        and all(copy_norm(getattr(own.self_attn, name), getattr(attention, name)) for name in normed)
        and copy_norm(own.hidden_norm, getattr(theirs, "input_layernorm", None))
    )
    misfits = tuple(name for name, fit in fits.items() if not fit)
    if misfits:
        head.load_state_dict(before)
    return misfits


@torch.no_grad()
def start_block_from_target(head: DFlashHead, model: PreTrainedModel) -> tuple[str, ...]:
    """Initialise a block head in place from the target's last layers and final norm.

    `fc` becomes the identity on the feature nearest to the input of the first copied layer, plus 0.3 times its old
    weights. All layers of the head read one context, so the weights of each copied input norm are multiplied into the
    projections that follow it, and the norm itself becomes neutral.

    Args:
        head: A new head.
        model: The target.

    Returns:
        Names of the parts that do not fit (`layers`, `norm`), in which case the head is unchanged; empty on success.
    """
    check_type("head", head, DFlashHead, "For an EAGLE-3 head: start_from_target.")
    before = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    backbone, layers = find_backbone(model)
    first, numbers = len(layers) - len(head.layers), head.feature_layers
    _start_fc(head.fc.weight, min(range(len(numbers)), key=lambda index: abs(numbers[index] - first)))
    misfits = []
    if not all(_copy_block_layer(own, layers[max(first + n, 0)], model) for n, own in enumerate(head.layers)):
        misfits.append("layers")
    if not copy_norm(head.norm, getattr(backbone, "norm", None)):
        misfits.append("norm")
    if misfits:
        head.load_state_dict(before)
    return tuple(misfits)


def _start_fc(weight: Tensor, number: int) -> None:
    """Set the weights of `fc` to the identity on one of the features that it reads, plus 0.3 times the old ones."""
    size = len(weight)
    weight.mul_(0.3)
    weight[:, number * size : (number + 1) * size] += torch.eye(size, dtype=weight.dtype, device=weight.device)


def _copy_mlp(own: nn.Module, own_norm: nn.Module, act: str, theirs: nn.Module, model: PreTrainedModel) -> bool:
    config = text_config(model)
    norm = getattr(theirs, "pre_feedforward_layernorm", None) or getattr(theirs, "post_attention_layernorm", None)
    return (
        act in (getattr(config, "hidden_act", None), getattr(config, "hidden_activation", None))
        and copy_linears(own, getattr(theirs, "mlp", None), ("gate_proj", "up_proj", "down_proj"))
        and copy_norm(own_norm, norm)
    )


def _copy_block_layer(own: Any, theirs: nn.Module, model: PreTrainedModel) -> bool:
    attention: Any = getattr(theirs, "self_attn", None)
    if not (
        _copy_mlp(own.mlp, own.post_attention_layernorm, own.mlp.config.hidden_act, theirs, model)
        and copy_linears(own.self_attn, attention, ("q_proj", "o_proj"))
        and copy_linears(own.self_attn, attention, ("k_proj", "v_proj"), own.self_attn.head_dim)
        and copy_norm(own.input_layernorm, getattr(theirs, "input_layernorm", None))
    ):
        return False
    scale: Tensor = own.input_layernorm.weight.clone()
    own.input_layernorm.weight.fill_(1.0)
    for name in ("q_proj", "k_proj", "v_proj"):
        getattr(own.self_attn, name).weight.mul_(scale)
    for name in ("q", "k") if own.self_attn.qk_norm else ():
        norm, source = getattr(own.self_attn, f"{name}_norm"), getattr(attention, f"{name}_norm", None)
        if source is None:  # as large as without a norm, for inputs of independent entries
            norm.weight.fill_(float(getattr(own.self_attn, f"{name}_proj").weight.norm(dim=-1).square().mean().sqrt()))
        elif not copy_norm(norm, source):
            return False
    return True


def copy_linears(
    own: nn.Module, theirs: nn.Module | None, names: Sequence[str], head_dim: int = 0, *, drops_bias: bool = False
) -> bool:
    """Copy linear layers by name. If a layer of the head has more input columns, only the last ones are overwritten.

    The additional columns read the token embedding. If `head_dim` is given, the layers are key and value projections:
    if the head has more key heads than the target, each is copied several times. `drops_bias`: leave out biases that
    the head lacks. Returns whether all were copied: False if a layer is missing, has another size, or only one of the
    two has a bias; those before it are then copied.
    """
    for name in names:
        target, source = getattr(own, name), getattr(theirs, name, None)
        size = getattr(source, "in_features", None)
        bias = None if drops_bias and target.bias is None else getattr(source, "bias", None)
        if source is None or size is None or (bias is not None) != (target.bias is not None):
            return False
        weight, columns = linear_weight(source, size), target.weight[:, -size:]
        copies = len(columns) // len(weight)
        if head_dim and copies > 1:
            weight = weight.unflatten(0, (-1, head_dim)).repeat_interleave(copies, 0).flatten(0, 1)
            bias = None if bias is None else bias.unflatten(0, (-1, head_dim)).repeat_interleave(copies, 0).flatten()
        if columns.shape != weight.shape:
            return False
        columns.copy_(weight)
        if bias is not None:
            target.bias.copy_(bias)
    return True


def copy_norm(own: nn.Module, theirs: nn.Module | None) -> bool:
    """Set the weight of an RMSNorm so that it computes the same as the target's norm; return whether it then does.

    The weight is measured on random inputs, because norms store it differently (Gemma: `1 + weight`).
    """
    weight: Tensor = own.weight  # type: ignore[assignment]
    parameter = getattr(theirs, "weight", None)
    if theirs is None or not isinstance(parameter, Tensor) or parameter.shape != weight.shape:
        return False
    first, second = torch.randn(2, 4, len(weight), dtype=weight.dtype, device=weight.device).unbind()
    weight.fill_(1.0)
    weight.copy_((theirs(first.to(parameter)).to(weight) / own(first)).median(dim=0).values)
    return torch.allclose(theirs(second.to(parameter)).to(weight), own(second), atol=0.05, rtol=0.05)


# ---------------------------------------------------------------------------------- the first layer of a block head
#
# The attention weights copied from the target do not fit a block, whose context has another form than the target's own
# inputs: a head that starts with them first has to learn where to attend. Here some heads of the first layer start by
# attending to the last token of the context and passing on its features, the others by attending to the block's root
# and passing on its embedding. After this layer a slot holds both, like the input of an EAGLE layer
# (https://arxiv.org/abs/2401.15077), so a block sees at once what an EAGLE head is given. All weights are trained
# further.

SAMPLE_ROWS = 24
"""Number of random texts from which directions are estimated."""

SAMPLE_LENGTH = 256
"""Tokens of each."""

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
    frequencies = head.rotary_emb.inv_freq.cpu()
    useful = (frequencies >= FREQUENCIES[0]) & (frequencies <= FREQUENCIES[1])
    if not useful.any():
        useful[:1] = True
    direction = torch.zeros(head.config.head_dim, dtype=torch.float32, device="cpu")
    direction[: len(frequencies)] = useful.float()  # the first of the two dimensions that rotate together
    direction = (direction / direction.norm()).to(sample.context)
    attention, size = layer.self_attn, head.config.head_dim
    repeats = head.config.num_attention_heads // groups
    # the last `at_root` key heads see the root, the others the end of the context
    near = _fitted((sample.context, 1.0), (sample.tokens, -1.0), (sample.mask[None], -1.0))
    root = _fitted((sample.tokens, 1.0), (sample.context, -1.0), (sample.mask[None], -1.0))
    seen = _fitted((sample.tokens, 1.0), (sample.mask[None], 1.0))
    strength = (SHARPNESS / size**0.5) ** 0.5
    scale = FIRMNESS if attention.qk_norm else strength * size**0.5
    queries, keys = [seen] * (repeats * groups), [near] * (groups - at_root) + [root] * at_root
    for projection, functions in ((attention.q_proj, queries), (attention.k_proj, keys)):
        weight = torch.stack([torch.outer(direction, function) for function in functions]).flatten(0, 1)
        projection.weight.mul_(NOISE).add_(scale * weight)
    if attention.qk_norm:
        attention.q_norm.weight.fill_(strength)
        attention.k_norm.weight.fill_(strength)
    # a slot receives the components of what it sees, in their size before the norm
    context = _components(sample.context, (groups - at_root) * size)
    embeddings = _components(sample.tokens - sample.tokens.mean(0), at_root * size)
    attention.v_proj.weight.copy_(torch.cat([context, embeddings]))
    outputs = torch.cat([sample.size * context, sample.entry * embeddings]).unflatten(0, (groups, size))
    attention.o_proj.weight.copy_(outputs.repeat_interleave(repeats, 0).flatten(0, 1).T / repeats)
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        bias = getattr(attention, name).bias
        if bias is not None:
            bias.zero_()


def _read_sample(head: DFlashHead, model: PreTrainedModel) -> _Sample:
    """Read embeddings and random texts over the draft vocabulary."""
    device, hot = execution_device(model), head.hot_token_ids
    known = torch.arange(head.config.vocab_size, dtype=torch.long, device="cpu") if hot is None else hot.cpu()
    ids = known[torch.randint(len(known), (SAMPLE_ROWS, SAMPLE_LENGTH), dtype=torch.long, device="cpu")].to(device)
    lengths = torch.full((SAMPLE_ROWS,), SAMPLE_LENGTH, dtype=torch.long, device=device)
    weight = head.fc.weight
    parts = [  # without the first tokens of a text, whose features are far from all others
        head.fc(target_features(model, row[None], length[None], head.feature_layers)[0, 4:].to(weight))
        for row, length in zip(ids, lengths, strict=True)
    ]
    fused = torch.cat(parts).float()
    sizes = fused.square().mean(-1).sqrt()
    some = known[:: max(len(known) // 16_384, 1)].to(device)
    tokens = head.embedding_for(model)(torch.cat([some, some.new_tensor([head.config.mask_token_id])])).to(fused)
    tokens = tokens / tokens.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-6)
    context = head.hidden_norm(fused.to(weight)).float()
    return _Sample(context, tokens[:-1], tokens[-1], float(sizes.median()), float(fused.abs().median()))


def _fitted(*wanted: tuple[Tensor, float]) -> Tensor:
    """Return the linear function `[D]` that is nearest to the values wanted of rows `[N, D]`; sets weigh alike."""
    like = wanted[0][0]
    square = 0.01 * len(wanted) * torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)
    right = torch.zeros_like(like[0])
    for rows, value in wanted:
        square = square + rows.T @ rows / len(rows)
        right = right + value * rows.mean(0)
    return torch.linalg.solve(square, right)


def _components(rows: Tensor, count: int) -> Tensor:
    """Return the first `count` principal components `[count, D]` of rows `[N, D]`, zeros beyond the D-th."""
    vectors = torch.linalg.eigh(rows.T @ rows).eigenvectors.T.flip(0)[:count]
    return torch.cat([vectors, vectors.new_zeros(count - len(vectors), rows.shape[1])])
