"""Initialise a head from weights of its target, which helps most with little training data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_specdec.heads.dflash import DFlashHead
from hf_specdec.heads.eagle3 import Eagle3Head
from hf_specdec.heads.vocabulary import linear_weight
from hf_specdec.validation import check_type
from hf_specdec.verification.model import find_backbone, text_config


@torch.no_grad()
def start_from_target(head: Eagle3Head, model: PreTrainedModel) -> tuple[str, ...]:
    """Initialise an EAGLE-3 head in place from weights of the target, which helps most with little training data.

    `fc` becomes the identity on the last of the features that the head reads, plus 0.3 times its old weights. Unless
    it is shared, the lm_head (restricted to the draft vocabulary) is copied, as are the final norm and the
    second-to-last layer's attention (into the half of the input that reads hidden states), MLP and norms.

    Either all parts are copied or none: with only some, the head learned more slowly than from random weights, with
    all of them faster (SmolLM2 and Gemma 3, first 20 steps): a trained lm_head on a random layer makes confident
    errors.

    Args:
        head: A new head with its draft vocabulary set.
        model: The target.

    Returns:
        Names of the parts that do not fit (`fc`, `lm_head`, `MLP`, `attention`), in which case the head is unchanged;
        empty on success.
    """
    check_type("head", head, Eagle3Head, "For a block head: start_block_from_target.")
    before = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    parts = {"fc": _init_fc, "lm_head": _copy_lm_head, "MLP": _copy_mlp, "attention": _copy_attention}
    misfits = tuple(name for name, copy in parts.items() if not copy(head, model))
    if misfits:
        head.load_state_dict(before)
    return misfits


def _init_fc(head: Eagle3Head, model: PreTrainedModel) -> bool:
    size = head.config.hidden_size
    if head.target_hidden_size != size:
        return False
    head.fc.weight.mul_(0.3)
    head.fc.weight[:, -size:] += torch.eye(size, dtype=head.fc.weight.dtype, device=head.fc.weight.device)
    return True


def _copy_lm_head(head: Eagle3Head, model: PreTrainedModel) -> bool:
    backbone, _ = find_backbone(model)
    if not head.shares_lm_head:
        rows = head.rows_of(model.get_output_embeddings())
        if rows.shape != head.lm_head.weight.shape:
            return False
        head.lm_head.weight.copy_(rows)
    return copy_norm(head.norm, getattr(backbone, "norm", None))


def _copy_mlp(head: Eagle3Head, model: PreTrainedModel) -> bool:
    layer, own, config = _second_to_last_layer(model), head.midlayer, text_config(model)
    norm = getattr(layer, "pre_feedforward_layernorm", None) or getattr(layer, "post_attention_layernorm", None)
    return (
        head.config.hidden_act in (getattr(config, "hidden_act", None), getattr(config, "hidden_activation", None))
        and copy_linears(own.mlp, getattr(layer, "mlp", None), ("gate_proj", "up_proj", "down_proj"))
        and copy_norm(own.post_attention_layernorm, norm)
    )


def _copy_attention(head: Eagle3Head, model: PreTrainedModel) -> bool:
    layer, own = _second_to_last_layer(model), head.midlayer
    theirs = getattr(layer, "self_attn", None)
    normed = [name for name in ("q_norm", "k_norm") if hasattr(theirs, name)]
    return (
        bool(normed) == head.config.qk_norm
        and copy_linears(own.self_attn, theirs, ("q_proj", "k_proj", "v_proj", "o_proj"))
        and all(copy_norm(getattr(own.self_attn, name), getattr(theirs, name)) for name in normed)
        and copy_norm(own.hidden_norm, getattr(layer, "input_layernorm", None))
    )


def _second_to_last_layer(model: PreTrainedModel) -> nn.Module:
    _, layers = find_backbone(model)
    return layers[max(len(layers) - 2, 0)]


def copy_linears(own: nn.Module, theirs: nn.Module | None, names: Sequence[str]) -> bool:
    """Copy linear layers by name. If a layer of the head has more input columns, only the last ones are overwritten.

    The additional columns read the token embedding.

    Returns:
        Whether all were copied. False if a layer is missing, has another size, or only one of the two has a bias; the
        layers before it have then been copied.
    """
    for name in names:
        target, source = getattr(own, name), getattr(theirs, name, None)
        size = getattr(source, "in_features", None)
        if source is None or size is None or (getattr(source, "bias", None) is not None) != (target.bias is not None):
            return False
        weight, columns = linear_weight(source, size), target.weight[:, -size:]
        if columns.shape != weight.shape:
            return False
        columns.copy_(weight)
        if target.bias is not None:
            target.bias.copy_(source.bias)
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
        Names of the parts that do not fit (`fc`, `norm`, `layers`), in which case the head is unchanged; empty on
        success.
    """
    check_type("head", head, DFlashHead, "For an EAGLE-3 head: start_from_target.")
    before = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    _, layers = find_backbone(model)
    count, depth = len(head.layers), len(layers)
    sources = [layers[max(depth - count + number, 0)] for number in range(count)]
    misfits = []
    if not _init_context(head, depth - count):
        misfits.append("fc")
    if not all(_copy_block_layer(own, theirs, model) for own, theirs in zip(head.layers, sources, strict=True)):
        misfits.append("layers")
    if not copy_norm(head.norm, getattr(find_backbone(model)[0], "norm", None)):
        misfits.append("norm")
    if misfits:
        head.load_state_dict(before)
    return tuple(misfits)


def _init_context(head: DFlashHead, layer: int) -> bool:
    size, numbers = head.config.hidden_size, head.feature_layers
    nearest = min(range(len(numbers)), key=lambda index: abs(numbers[index] - layer))
    head.fc.weight.mul_(0.3)
    columns = head.fc.weight[:, nearest * size : (nearest + 1) * size]
    columns += torch.eye(size, dtype=columns.dtype, device=columns.device)
    return True


def _copy_block_layer(own: Any, theirs: nn.Module, model: PreTrainedModel) -> bool:
    config, attention = text_config(model), getattr(theirs, "self_attn", None)
    act = (getattr(config, "hidden_act", None), getattr(config, "hidden_activation", None))
    norm = getattr(theirs, "pre_feedforward_layernorm", None) or getattr(theirs, "post_attention_layernorm", None)
    if not (
        own.mlp.config.hidden_act in act
        and copy_linears(own.mlp, getattr(theirs, "mlp", None), ("gate_proj", "up_proj", "down_proj"))
        and copy_norm(own.post_attention_layernorm, norm)
        and copy_linears(own.self_attn, attention, ("q_proj", "o_proj"))
        and _copy_groups(own.self_attn, attention, ("k_proj", "v_proj"))
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


def _copy_groups(own: Any, theirs: Any, names: Sequence[str]) -> bool:
    """Copy key and value projections; if the head has more key heads than the target, each is copied several times."""
    for name in names:
        target, source = getattr(own, name), getattr(theirs, name, None)
        if source is None or (source.bias is not None) != (target.bias is not None):
            return False
        weight = linear_weight(source, target.in_features)
        copies, rest = divmod(len(target.weight), len(weight))
        if rest or not copies:
            return False
        for mine, rows in ((target.weight, weight), (target.bias, source.bias)):
            if mine is not None:
                heads = rows.unflatten(0, (-1, own.head_dim))
                mine.copy_(heads.repeat_interleave(copies, dim=0).flatten(0, 1))
    return True
