"""Hidden states and attentions of the emitted tokens, in the shapes of plain `generate()`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_specdec.acceptance.paths import Acceptance
from hf_specdec.verification.cache import layer_windows
from hf_specdec.verification.target import Verification


class LayerOutputs:
    """Collector of hidden states and attentions, one entry per emitted token.

    The entry of the first token is the prompt's; that of any other token is the tree node's after which it was chosen.

    Args:
        config: Config of the text decoder; gives each layer's sliding window.
        hidden_states, attentions: Whether to collect them.
    """

    def __init__(self, config: Any, *, hidden_states: bool, attentions: bool) -> None:
        self._windows = layer_windows(config) if attentions else []
        self._collects_hidden, self._collects_attentions = hidden_states, attentions
        self._hidden: list[tuple[Tensor, ...]] = []
        self._attentions: list[tuple[Tensor | None, ...]] = []

    @property
    def hidden_states(self) -> tuple[tuple[Tensor, ...], ...] | None:
        """Per token and layer: `[B, P, D]` for the first token, `[B, 1, D]` for all others. None if not collected."""
        return tuple(self._hidden) if self._collects_hidden else None

    @property
    def attentions(self) -> tuple[tuple[Tensor | None, ...], ...] | None:
        """Per token and layer: `[B, H, P, slots]` for the first token, `[B, H, 1, slots]` for all others.

        Slots are those of the text up to this token, as in plain `generate()`. None if not collected; an entry is None
        if the layer returns no weights.
        """
        return tuple(self._attentions) if self._collects_attentions else None

    def add_prompt(self, prefill: Verification) -> None:
        """Add the outputs of the prompt as the entry of the first token; nothing if they were not requested."""
        if prefill.hidden_states is not None:
            self._hidden.append(prefill.hidden_states)
        if prefill.attentions is not None:
            self._attentions.append(
                tuple(self._within(layer, weights) for layer, weights in enumerate(prefill.attentions))
            )

    def add(self, verification: Verification, acceptance: Acceptance, start: int) -> None:
        """Add the entries of one step's tokens.

        Args:
            verification: Result of the tree's verify forward.
            acceptance: Kept paths, which have the same length in all rows (lockstep).
            start: Cache slot of the root, before the step is committed.
        """
        if verification.hidden_states is None and verification.attentions is None:
            return
        rows = torch.arange(len(acceptance.nodes), device=acceptance.path.device)
        for place in range(max(acceptance.counts)):
            nodes = acceptance.path[:, place]
            if verification.hidden_states is not None:
                self._hidden.append(
                    # [..., B, N, D]: Gemma 3n's states have a leading dimension
                    tuple(states[..., rows, nodes, :][..., None, :] for states in verification.hidden_states)
                )
            if verification.attentions is not None:
                slots = torch.tensor(
                    [[*range(start), *(start + node for node in path[: place + 1])] for path in acceptance.nodes],
                    dtype=torch.long,
                    device=rows.device,
                )
                self._attentions.append(
                    tuple(
                        None if weights is None else self._within(layer, _columns(weights[rows, :, nodes], slots))
                        for layer, weights in enumerate(verification.attentions)
                    )
                )

    def _within(self, layer: int, weights: Tensor | None) -> Tensor | None:
        """Cut weights `[B, H, N, slots]` of a sliding-window layer to the columns that transformers' cache would hold.

        Unchanged: other layers, None, and square weights (a whole prompt).
        """
        window = self._windows[layer] if layer < len(self._windows) else None
        if weights is None or window is None or weights.shape[-1] == weights.shape[-2]:
            return weights
        return weights[..., -(window - 1 + weights.shape[-2]) :]


def _columns(weights: Tensor, slots: Tensor) -> Tensor:
    """Gather the slots `[B, L]` of weights `[B, H, S]` into `[B, H, 1, L]`."""
    indices = slots.to(weights.device)[:, None].expand(-1, weights.shape[1], -1)
    return weights.gather(-1, indices)[:, :, None]
