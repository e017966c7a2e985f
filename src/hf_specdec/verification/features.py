"""The hidden states of a target's forwards, kept by hooks for whoever reads them: drafters, teachers, training."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_specdec.errors import DrafterMismatchError
from hf_specdec.verification.model import find_backbone

LAST = -1
"""Index of the last hidden state, behind the final norm: what lm_head reads."""


@dataclass(frozen=True, slots=True)
class Features:
    """Hidden states of one forward by layer, so that several readers share one tap.

    Layers are counted as transformers' `hidden_states`: 0 is the embedding, i the output of decoder layer i-1, and
    `LAST` (also the number of layers) the last one behind the final norm.
    """

    states: Mapping[int, Tensor]  # [B, T, D] by layer
    depth: int  # number of decoder layers

    def of(self, layers: Sequence[int]) -> Tensor:
        """`[B, T, len(layers) * D]`: the hidden states side by side in this order, on the device of the last."""
        chosen = [self.states[canonical(layer, self.depth)] for layer in layers]
        if len(chosen) == 1:
            return chosen[0]
        return torch.cat([states.to(chosen[-1].device) for states in chosen], dim=-1)


def canonical(layer: int, depth: int) -> int:
    """The one number of a layer that has two."""
    return LAST if layer == depth else layer


class FeatureTap:
    """Context manager: keeps hidden states of this thread's forwards, then unhooks itself.

    Two threads may generate on one model, so a hook ignores the forwards of any thread but its own.

    Args:
        model: The target.
        layers: Which hidden states, see `Features`.

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
        self._layers, self._depth = {canonical(layer, depth) for layer in layers}, depth
        self._thread = threading.get_ident()
        self.clear()

    def __enter__(self) -> FeatureTap:
        self._handles = [self._hook(layer) for layer in self._layers]
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

    @property
    def layers(self) -> frozenset[int]:
        """Whose hidden states are kept."""
        return frozenset(self._layers)

    def keep(self, states: Mapping[int, Tensor]) -> None:
        """Keep hidden states of a forward that calls no hooks; those of other layers are left out."""
        for layer in self._layers:
            self._kept[layer].append(states[layer])

    def _keep(self, layer: int, hidden: Tensor) -> None:
        if threading.get_ident() == self._thread:
            self._kept[layer].append(hidden)

    def clear(self) -> None:
        """Forget what was kept: forwards that are not this generation's, such as a guidance processor's."""
        self._kept: dict[int, list[Tensor]] = {layer: [] for layer in self._layers}

    def shapes(self) -> dict[int, list[tuple[int, ...]]]:
        """What was kept so far, by layer; several where a prompt came in chunks."""
        return {layer: [tuple(states.shape) for states in kept] for layer, kept in self._kept.items()}

    def take(self) -> Features:
        """Features since the last call (of several forwards where a prompt came in chunks)."""
        whole = {layer: kept[0] if len(kept) == 1 else torch.cat(kept, dim=1) for layer, kept in self._kept.items()}
        self.clear()
        return Features(whole, self._depth)
