"""What forwards hand to drafters and training: hidden states captured by hooks, padding, windows of draft heads."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_specdec.errors import DrafterMismatchError, UnsupportedGenerationError
from hf_specdec.verification.model import find_backbone

LAST = -1
"""Index of the last hidden state, after the final norm: the input of lm_head."""
SINKS = 4
"""First tokens of each text that stay visible: attention without them degrades, as in StreamingLLM
(https://arxiv.org/abs/2309.17453)."""


@dataclass(frozen=True, slots=True)
class PromptPadding:
    """Padding of a batch of prompts; in a draft head's cache, also the tokens that its window has dropped.

    Args:
        valid: `[B, P]` bool, True for tokens.
        counts: `[B]` slot minus position of the tokens after the prompt: padding slots, less dropped tokens.
        left: `[B]` padding slots before the first token.
    """

    valid: Tensor
    counts: Tensor
    left: Tensor

    @classmethod
    def of(cls, attention_mask: Tensor | None) -> PromptPadding | None:
        """Create from a prompt's attention mask `[B, P]`; return None without a mask or without padding in it."""
        if attention_mask is None or bool((attention_mask != 0).all()):
            return None
        return cls.where(attention_mask != 0)

    @classmethod
    def where(cls, valid: Tensor) -> PromptPadding:
        """Create from bool `[B, P]`, True for tokens."""
        left = valid.int().argmax(-1) if valid.shape[1] else valid.sum(-1)
        return cls(valid, (~valid).sum(-1), left)

    def of_rows(self, index: Tensor) -> PromptPadding:
        """Return the padding of some rows `[R]`."""
        return PromptPadding(self.valid[index], self.counts[index], self.left[index])

    def last(self, num_slots: int) -> PromptPadding:
        """Return the padding in the last `num_slots` slots of the prompt."""
        return self.where(self.valid[:, self.valid.shape[1] - num_slots :])

    def extended_to(self, num_slots: int) -> PromptPadding:
        """Return the padding with slots of tokens prepended until there are `num_slots`; refuse a longer mask.

        Prompt tuning puts virtual tokens before the prompt, which the attention mask does not cover.
        """
        more = num_slots - self.valid.shape[1]
        if more < 0:
            raise UnsupportedGenerationError(
                f"`attention_mask` covers {self.valid.shape[1]} tokens, but cache and prompt have {num_slots}.",
                "Pass a mask that covers the cached and the new tokens.",
            )
        return self if more == 0 else self.where(nn.functional.pad(self.valid, (more, 0), value=True))


@dataclass(frozen=True, slots=True)
class Window:
    """The tokens of a text that a draft head attends to: the first four and the last ones (`draft_window`).

    All other tokens are dropped: their hidden states are not kept while the prompt is read, and their entries leave
    the head's cache. The rest moves together, so that slot and position differ by `PromptPadding.counts`.

    Args:
        last: Number of last tokens, at least 1.
    """

    last: int

    @property
    def size(self) -> int:
        """Slots kept per row when others are dropped: the first four tokens and the last `last`."""
        return SINKS + self.last

    @property
    def spare(self) -> int:
        """Slots by which the longest row may exceed `size` before its oldest tokens are dropped."""
        return max(self.last // 2, 1)

    def choose(self, valid: Tensor) -> tuple[Tensor, Tensor]:
        """Choose the slots `[B, size]`, ascending, of the first `SINKS` and the last `last` tokens of each row.

        `valid` is bool `[B, L]`, True for tokens, with L at least `size`. Also returns bool, False where a row has too
        few tokens: at its left.

        Example: with 4 sinks and `last` 2, a row of 8 tokens gives the slots 0, 1, 2, 3, 6, 7.
        """
        slots = valid.to(torch.int8).sort(dim=-1, descending=True, stable=True).indices  # tokens first, in order
        counts = valid.sum(-1, keepdim=True)
        columns = torch.arange(self.size, dtype=torch.long, device=valid.device)
        missing = (self.size - counts).clamp(min=0)
        number = torch.where(columns < SINKS, columns - missing, counts - self.size + columns)
        return slots.gather(1, number.clamp(min=0)), number >= 0


def shifted_padding(valid: Tensor, totals: Tensor) -> PromptPadding:
    """Return the padding of slots chosen by `Window.choose`, whose `counts` are negative in rows that lost tokens.

    `valid` `[B, K]` is from there; `totals` `[B]` are the tokens of each row, dropped ones included.
    """
    return PromptPadding(valid, valid.shape[1] - totals, (~valid).sum(-1))


def token_positions(padding: PromptPadding) -> Tensor:
    """Return the position `[B, P]` of the token in each slot, 0 for padding; dropped tokens came after the sinks."""
    dropped = (~padding.valid).sum(-1) - padding.counts
    columns = torch.arange(padding.valid.shape[1], dtype=torch.long, device=padding.valid.device)
    behind = torch.where(columns >= SINKS, dropped[:, None], 0)
    return (padding.valid.cumsum(-1) - 1).clamp(min=0) + behind


class ChosenStates:
    """Hidden states of a prompt at the slots within a window only, collected chunk by chunk.

    Args:
        window: The window.
        valid: `[B, P]` bool, True for the prompt's tokens.
        first_width: Slots of the prompt's first forward: P, or fewer if it is read in chunks.
    """

    def __init__(self, window: Window, valid: Tensor, first_width: int) -> None:
        self.slots, self.valid = window.choose(valid)
        self.num_slots, self.first_width = valid.shape[1], first_width
        self.states: dict[int, Tensor] = {}  # [B, K, D] by layer
        self._read: dict[int, int] = {}  # slots read so far, by layer

    def add(self, layer: int, hidden: Tensor) -> None:
        """Keep what is needed of the hidden states `[B, T, D]` of a layer at the next T slots."""
        begin, width = self._read.get(layer, 0), hidden.shape[1]
        self._read[layer] = begin + width
        local = self.slots.to(hidden.device) - begin
        found = hidden.gather(1, local.clamp(0, width - 1)[:, :, None].expand(-1, -1, hidden.shape[-1]))
        before = self.states.get(layer)
        inside = ((local >= 0) & (local < width))[:, :, None]
        self.states[layer] = found if before is None else torch.where(inside, found, before)


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
            self._keep(layer, states[layer])

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
