"""The parts of a model that speculation reaches for, whatever its architecture calls them."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.generation.utils import GenerateDecoderOnlyOutput

from hf_specdec.errors import UnsupportedModelError


def text_config(model: PreTrainedModel) -> Any:
    """The configuration of the text decoder, also of a multimodal model."""
    return model.config.get_text_config(decoder=True)


def num_embedded_tokens(model: PreTrainedModel) -> int:
    """Token ids that the model embeds; some embed more than their configuration counts."""
    embedded = getattr(model.get_input_embeddings(), "num_embeddings", 0)
    return max(int(text_config(model).vocab_size), int(embedded or 0))


def execution_device(model: PreTrainedModel) -> torch.device:
    """Where the model's forwards take their inputs; an offloaded model's weights lie nowhere, its hook tells."""
    if model.device.type != "meta":
        return model.device
    return torch.device(getattr(getattr(model, "_hf_hook", None), "execution_device", None) or "cpu")


CACHE_FIELD = next(name for name in ("cache", "past_key_values") if name in GenerateDecoderOnlyOutput.__annotations__)
"""Name of the cache in the output of `generate()`: `cache` since transformers 5.24, `past_key_values` before."""
CACHE_ARGUMENTS = (CACHE_FIELD, "past_key_values", "cache_params")
"""Names under which a forward can take its cache: as above, and that of state-space models before 5.24. What Flaubert
and XLM call `cache` before 5.24 is something else."""


def cache_argument(model: PreTrainedModel) -> str:
    """Return the name under which the model's forward takes its cache; empty if it takes none."""
    parameters = inspect.signature(model.forward).parameters
    return next((name for name in CACHE_ARGUMENTS if name in parameters), "")


def find_backbone(model: PreTrainedModel) -> tuple[nn.Module, nn.ModuleList]:
    """The module that holds the decoder layers and the final norm, whose output is what lm_head reads; the layers.

    `base_model` and `get_decoder()` return the whole model for some architectures, so the parent of the first
    list of `num_hidden_layers` modules is taken, under `get_decoder()` first (a vision tower comes later).

    Raises:
        UnsupportedModelError: No such list.
    """
    num_layers = text_config(model).num_hidden_layers
    for root in (model.get_decoder(), model):
        for module in root.modules() if root is not None else ():
            for child in module.children():
                if isinstance(child, nn.ModuleList) and len(child) == num_layers:
                    return module, child
    raise UnsupportedModelError(
        f"{type(model).__name__} has no list of {num_layers} decoder layers to take features from."
    )


def lm_head_rows(model: PreTrainedModel, token_ids: Tensor | None) -> nn.Module:
    """The target's lm_head, cut down to some tokens where it is a plain linear layer.

    Args:
        model: The target.
        token_ids: `[Vd]` target ids, or None for all.

    Returns:
        A module from features `[..., D]` to logits `[..., Vd]`. A quantised or otherwise unusual lm_head is run
        whole and its logits are selected: same numbers, no saving.
    """
    lm_head = model.get_output_embeddings()
    if token_ids is None:
        return lm_head
    # hooks move weights in and out (offloading) or put shards together (tensor parallelism): only they know how
    hooked = lm_head._forward_hooks or lm_head._forward_pre_hooks or hasattr(lm_head, "_hf_hook")
    if hooked or type(lm_head) is not nn.Linear or type(lm_head.weight) is not nn.Parameter:
        return _SelectedLogits(lm_head, token_ids)
    if not lm_head.weight.is_floating_point() or lm_head.weight.shape[0] != lm_head.out_features:
        return _SelectedLogits(lm_head, token_ids)
    rows = nn.Linear(lm_head.in_features, len(token_ids), bias=lm_head.bias is not None, device="meta")
    token_ids = token_ids.to(lm_head.weight.device)
    rows.weight = nn.Parameter(lm_head.weight.detach()[token_ids], requires_grad=False)
    if lm_head.bias is not None:
        rows.bias = nn.Parameter(lm_head.bias.detach()[token_ids], requires_grad=False)
    return rows


class _SelectedLogits(nn.Module):
    def __init__(self, lm_head: nn.Module, token_ids: Tensor) -> None:
        super().__init__()
        self.lm_head, self.token_ids = lm_head, token_ids

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(hidden)
        return logits.index_select(-1, self.token_ids.to(logits.device))
