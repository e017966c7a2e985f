"""The hidden states of a target's forwards, kept by hooks for whoever reads them: drafters, teachers, training.

Called by: `target/target.py`, training. Feeds: the drafters.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_specdec.errors import DrafterMismatchError
from hf_specdec.target.model import find_backbone

LAST = -1
"""Index of the last hidden state, behind the final norm: what lm_head reads."""


class FeatureTap:
    """Context manager: keeps hidden states of this thread's forwards, then unhooks itself.

    Two threads may generate on one model, so a hook ignores the forwards of any thread but its own.

    Args:
        model: The target.
        layers: Which hidden states, counted as transformers' `hidden_states`: 0 is the embedding, i the output of
            decoder layer i-1, and `LAST` (also the number of layers) the last one behind the final norm.

    Raises:
        DrafterMismatchError: The target has no such layer.
    """

    def __init__(self, model: PreTrainedModel, layers: Sequence[int] = (LAST,)) -> None:
        self._backbone, self._modules = find_backbone(model)
        depth = len(self._modules)
        if any(not LAST <= layer <= depth for layer in layers):
            raise DrafterMismatchError(
                f"{type(model).__name__} has hidden states 0 to {depth}, the head reads {list(layers)}.",
                "It was trained for a deeper model.",
            )
        self._layers = [LAST if layer == depth else layer for layer in layers]
        self._thread = threading.get_ident()
        self.clear()

    def __enter__(self) -> FeatureTap:
        self._handles = [self._hook(layer) for layer in dict.fromkeys(self._layers)]
        return self

    def __exit__(self, *exc: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _hook(self, layer: int) -> Any:
        def keep_input(_module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
            self._keep(layer, inputs[0] if inputs else named["hidden_states"])

        def keep_output(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if not isinstance(output, Tensor):
                output = output[0] if isinstance(output, tuple) else output.last_hidden_state
            self._keep(layer, output)

        if layer == 0:
            return self._modules[0].register_forward_pre_hook(keep_input, with_kwargs=True)
        module = self._backbone if layer == LAST else self._modules[layer - 1]
        return module.register_forward_hook(keep_output)

    def _keep(self, layer: int, hidden: Tensor) -> None:
        if threading.get_ident() == self._thread:
            self._kept[layer].append(hidden)

    def clear(self) -> None:
        """Forget what was kept: the forwards of others, such as a guidance processor's."""
        self._kept: dict[int, list[Tensor]] = {layer: [] for layer in self._layers}

    def take(self) -> Tensor:
        """`[B, T, len(layers) * D]` features since the last call (of several forwards where a prompt came in chunks).

        The hidden states stand side by side in the order of `layers`, on the device of the last.
        """
        whole = {layer: kept[0] if len(kept) == 1 else torch.cat(kept, dim=1) for layer, kept in self._kept.items()}
        self.clear()
        if len(self._layers) == 1:
            return whole[self._layers[0]]
        device = whole[self._layers[-1]].device
        return torch.cat([whole[layer].to(device) for layer in self._layers], dim=-1)
