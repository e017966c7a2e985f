"""Access a model's configuration, cache, layers and lm_head independently of its architecture."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.generation.utils import GenerateDecoderOnlyOutput

from hf_specdec.errors import UnsupportedModelError
from hf_specdec.transformers_private import dispatch_hook


def text_config(model: PreTrainedModel) -> Any:
    """Return the configuration of the text decoder, also for multimodal models."""
    return model.config.get_text_config(decoder=True)


def num_embedded_tokens(model: PreTrainedModel) -> int:
    """Return the number of token ids that the model embeds, which can exceed its configured vocabulary size."""
    embedded = getattr(model.get_input_embeddings(), "num_embeddings", 0)
    return max(int(text_config(model).vocab_size), int(embedded or 0))


def execution_device(model: PreTrainedModel) -> torch.device:
    """Return the device for model inputs; for an offloaded model, the execution device of its accelerate hook."""
    if model.device.type != "meta":
        return model.device
    return torch.device(getattr(dispatch_hook(model), "execution_device", None) or "cpu")


CACHE_FIELD = next(name for name in ("cache", "past_key_values") if name in GenerateDecoderOnlyOutput.__annotations__)
"""Name of the cache in the output of `generate()`: `cache` since transformers 5.24, `past_key_values` before."""
CACHE_ARGUMENTS = (CACHE_FIELD, "past_key_values", "cache_params")
"""Possible names of a forward's cache argument; `cache_params` is that of state-space models before transformers 5.24.

`cache` is included only since 5.24: before, the argument `cache` of Flaubert and XLM is something else."""


def cache_argument(model: PreTrainedModel) -> str:
    """Return the name of the forward's cache argument; empty if it has none."""
    parameters = inspect.signature(model.forward).parameters
    return next((name for name in CACHE_ARGUMENTS if name in parameters), "")


def takes_positions(model: PreTrainedModel) -> bool:
    """Whether the forward takes position ids; purely recurrent models do not."""
    return "position_ids" in inspect.signature(model.forward).parameters


def find_backbone(model: PreTrainedModel) -> tuple[nn.Module, nn.ModuleList]:
    """Return the module that holds decoder layers and final norm (lm_head reads its output), and the layers.

    This is the parent of the first list of `num_hidden_layers` modules, searched in `get_decoder()` first, to skip
    vision towers. `base_model` and `get_decoder()` alone are not enough: some architectures return the whole model.
    """
    num_layers = text_config(model).num_hidden_layers
    for root in (model.get_decoder(), model):
        for module in root.modules() if root is not None else ():
            for child in module.children():
                if isinstance(child, nn.ModuleList) and len(child) == num_layers:
                    return module, child
    raise UnsupportedModelError(
        f"{type(model).__name__} has no list of {num_layers} decoder layers to read hidden states from."
    )


def lm_head_rows(model: PreTrainedModel, token_ids: Tensor | None) -> nn.Module:
    """Return a module from features `[..., D]` to the logits `[..., Vd]` of some tokens `[Vd]`; None: of all.

    It computes only these rows of the lm_head if that is a plain linear layer, unpacked if they are a GGUF file's
    blocks; otherwise (quantised in another way, offloaded, sharded, ...) it computes all logits and selects from them.
    """
    lm_head = model.get_output_embeddings()
    if token_ids is None:
        return lm_head
    # hooks load offloaded weights or gather shards (tensor parallelism), so the weights cannot be read directly
    hooked = lm_head._forward_hooks or lm_head._forward_pre_hooks or dispatch_hook(lm_head) is not None
    weight = lm_head.weight if type(lm_head) is nn.Linear and not hooked else None
    known = type(weight) is nn.Parameter or hasattr(weight, "rows")  # `PackedWeight.rows`
    if weight is None or not known or not weight.is_floating_point() or len(weight) != lm_head.out_features:
        return _SelectedLogits(lm_head, token_ids)
    rows = nn.Linear(lm_head.in_features, len(token_ids), bias=lm_head.bias is not None, device="meta")
    token_ids = token_ids.to(weight.device)
    rows.weight = nn.Parameter(weight.detach()[token_ids], requires_grad=False)
    if lm_head.bias is not None:
        rows.bias = nn.Parameter(lm_head.bias.detach()[token_ids], requires_grad=False)
    return rows


class _SelectedLogits(nn.Module):
    """An lm_head whose logits are computed for all tokens and then selected: `[..., D]` to `[..., Vd]`."""

    def __init__(self, lm_head: nn.Module, token_ids: Tensor) -> None:
        super().__init__()
        self.lm_head, self.token_ids = lm_head, token_ids

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(hidden)
        return logits.index_select(-1, self.token_ids.to(logits.device))
