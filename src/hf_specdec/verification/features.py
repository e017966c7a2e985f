"""Hidden states of the target's forwards, captured by hooks for drafters and training."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_specdec.errors import DrafterMismatchError
from hf_specdec.verification.masks import ChosenStates
from hf_specdec.verification.model import find_backbone

LAST = -1
"""Index of the last hidden state, after the final norm: the input of lm_head."""


@dataclass(frozen=True, slots=True)
class Features:
    """Hidden states of one forward by layer, which all drafters share.

    Layer 0 is the embedding, layer i the output of the first i decoder layers, and -1 the output of the final
    norm. The output of all decoder layers is taken before the final norm, unlike the last entry of transformers'
    `hidden_states`.

    Args:
        states: `[B, T, D]` by layer.
        chosen: Which T of a prompt's slots these are (`slots` `[B, T]`, and `valid`, False for padding); None: all.
    """

    states: Mapping[int, Tensor]
    chosen: ChosenStates | None = None

    def of(self, layers: Sequence[int]) -> Tensor:
        """Concatenate the hidden states of layers to `[B, T, len(layers) * D]`, on the device of the last one."""
        chosen = [self.states[layer] for layer in layers]
        if len(chosen) == 1:
            return chosen[0]
        return torch.cat([states.to(chosen[-1].device) for states in chosen], dim=-1)


class FeatureTap:
    """Context manager that captures hidden states of the forwards in the thread that created it.

    Hooks ignore forwards of other threads, because several threads may generate with one model.

    Args:
        model: The target.
        layers: Layers to capture, numbered as in `Features`.

    Raises:
        DrafterMismatchError: The target has no such layer.
        UnsupportedModelError: See `find_backbone`.
    """

    def __init__(self, model: PreTrainedModel, layers: Sequence[int] = (LAST,)) -> None:
        self._backbone, self._modules = find_backbone(model)
        depth = len(self._modules)
        if any(not LAST <= layer <= depth for layer in layers):
            raise DrafterMismatchError(
                f"{type(model).__name__} has hidden states 0 to {depth}, the head reads {list(layers)}.",
                "The head was trained for a deeper model.",
            )
        self._layers = set(layers)
        self._thread = threading.local()  # unlike `get_ident`, it does not interrupt what torch.compile compiles
        self._thread.is_own = True
        self._chosen: ChosenStates | None = None
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
        """Layers whose hidden states are captured."""
        return frozenset(self._layers)

    def keep(self, states: Mapping[int, Tensor]) -> None:
        """Store the hidden states `[B, T, D]` of a forward that calls no hooks; ignore layers not captured."""
        for layer in self._layers:
            self._kept[layer].append(states[layer])

    def _keep(self, layer: int, hidden: Tensor) -> None:
        if not hasattr(self._thread, "is_own"):
            return
        if self._chosen is not None and not self._chosen.states and hidden.shape[1] != self._chosen.first_width:
            self._chosen = None  # virtual tokens (prompt tuning) precede the prompt
        if self._chosen is None:
            self._kept[layer].append(hidden)
        else:
            self._chosen.add(layer, hidden)

    def choose(self, chosen: ChosenStates) -> None:
        """Until `take`, keep only the chosen slots of the next prompt; all slots if virtual tokens precede it."""
        self._chosen = chosen

    def clear(self) -> None:
        """Discard stored hidden states, such as those of additional forwards that a guidance processor has run."""
        self._kept: dict[int, list[Tensor]] = {layer: [] for layer in self._layers}

    def keep_last(self) -> None:
        """Keep only the hidden states of the last token, after a forward that has read the whole text again."""
        self._kept = {layer: [kept[-1][:, -1:]] for layer, kept in self._kept.items()}

    def shapes(self) -> dict[int, list[tuple[int, ...]]]:
        """Return the shapes of the stored hidden states by layer; several if the prompt was processed in chunks."""
        return {layer: [tuple(states.shape) for states in kept] for layer, kept in self._kept.items()}

    def take(self) -> Features:
        """Return the stored hidden states and discard them; those of several forwards (chunks) are concatenated."""
        chosen, self._chosen = self._chosen, None
        if chosen is not None:
            return Features(chosen.states, chosen)
        whole = {layer: kept[0] if len(kept) == 1 else torch.cat(kept, dim=1) for layer, kept in self._kept.items()}
        self.clear()
        return Features(whole)
