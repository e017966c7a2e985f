"""A block head compiled by inductor: its context, its block and its scores. See `heads/compiled.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from hf_specdec.config import ExecutionMode
from hf_specdec.cpu.growing import PackedMarkov
from hf_specdec.heads.attention import attend_over
from hf_specdec.heads.block import BaseBlockHead
from hf_specdec.heads.compiled import (
    LAYER_EXAMPLE_SHAPE,
    WrappedLayer,
    attention,
    attention_operation,
    check_close,
    example_numbers,
)
from hf_specdec.heads.dflash import DFlashHead
from hf_specdec.verification.programs import Program, make_program


class WrappedBlockHead(BaseBlockHead, WrappedLayer):
    """Base of block heads that run some operations of another one in compiled or captured form.

    Args:
        head: The other head.
    """

    _layer: Any
    packed_markov: PackedMarkov | None = None

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """See `DFlashHead.layer_windows`."""
        windows: tuple[int | None, ...] = self._layer.layer_windows
        return windows

    @property
    def markov_head(self) -> Any:
        """The head's Markov head."""
        return self._layer.markov_head

    def append_context(self, features: Tensor, position_ids: Tensor, cache: Cache) -> None:
        """See `DFlashHead.append_context`."""
        self._layer.append_context(features, position_ids, cache)

    def read(self, token_embeddings: Tensor, position_ids: Tensor, cache: Cache, masks: Sequence[Tensor]) -> Tensor:
        """See `DFlashHead.read`."""
        outputs: Tensor = self._layer.read(token_embeddings, position_ids, cache, masks)
        return outputs

    def score(self, hidden: Tensor, lm_head: nn.Module | None = None) -> Tensor:
        """See `DFlashHead.score`."""
        logits: Tensor = self._layer.score(hidden, lm_head)
        return logits

    def start_state(self, roots: Tensor, first: Tensor) -> Tensor:
        """See `DFlashHead.start_state`."""
        state: Tensor = self._layer.start_state(roots, first)
        return state

    def confidence(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """See `DFlashHead.confidence`."""
        logits: Tensor = self._layer.confidence(hidden, tokens)
        return logits


class CompiledBlockHead(WrappedBlockHead):
    """A block head with compiled `append_context`, `read` and `score`.

    Args:
        head: The head.
        context: Compiled function from features and positions to the keys and values of all layers, in turn.
        read: Compiled function from embeddings and positions of a block to its outputs.
        score: Compiled function from outputs to logits.
    """

    def __init__(self, head: DFlashHead, context: Program, read: Program, score: Program) -> None:
        super().__init__(head)
        self._head, self._context, self._read, self._score = head, context, read, score
        self.copies_weights = score.copies_weights
        if head.config.markov_rank and head.device.type == "cpu":
            self.packed_markov = PackedMarkov.of(head.markov_head)

    @classmethod
    def of(cls, head: DFlashHead, lm_head: nn.Module | None, mode: ExecutionMode) -> CompiledBlockHead:
        """Trace and compile a head, which takes about ten seconds.

        Args:
            head: The head; it is not modified.
            lm_head: The target's lm_head, restricted to the draft vocabulary, if the head shares it.
            mode: See `make_program`.

        Raises:
            CaptureError: The head cannot be compiled, or its outputs differ when compiled.
        """
        operation, device, dtype = attention_operation(), head.device, head.dtype
        hidden = example_numbers(head.config.hidden_size).to(device, dtype)
        features = example_numbers(head.config.hidden_size * len(head.feature_layers)).to(device, dtype)
        positions = torch.arange(LAYER_EXAMPLE_SHAPE[1], dtype=torch.long, device=device)
        positions = positions.expand(LAYER_EXAMPLE_SHAPE).contiguous()

        def context(inputs: Tensor, places: Tensor) -> list[Tensor]:
            return [states for pair in head.context_states(head.fuse(inputs), places) for states in pair]

        compiled = cls(
            head,
            make_program(context, features, positions, mode=mode),
            make_program(lambda e, p: [head(e, p, operation)], hidden, positions, mode=mode),
            make_program(lambda h: [head.score(h, lm_head)], hidden, mode=mode),
        )
        compiled._check(hidden, positions, features, lm_head)
        return compiled

    def _check(self, hidden: Tensor, positions: Tensor, features: Tensor, lm_head: nn.Module | None) -> None:
        """Raise `CaptureError` if the outputs differ from the head's by more than the tolerance of the dtype."""
        rows, size = LAYER_EXAMPLE_SHAPE
        mask = torch.ones(rows, 1, size, 2 * size, dtype=torch.bool, device=hidden.device)
        outputs = []
        with torch.no_grad():
            for head in (self._head, self):
                cache = head.new_cache(size)
                head.append_context(features, positions, cache)
                read = head.read(hidden, positions + size, cache, [mask] * len(self._head.layers))
                outputs.append((read, head.score(hidden, lm_head)))
        for expected, actual in zip(*outputs, strict=True):
            check_close(actual, expected)

    def append_context(self, features: Tensor, position_ids: Tensor, cache: Cache) -> None:
        """See `DFlashHead.append_context`."""
        states = self._context(features.contiguous(), position_ids.contiguous())
        for number in range(len(states) // 2):
            cache.update(states[2 * number], states[2 * number + 1], number)

    def read(self, token_embeddings: Tensor, position_ids: Tensor, cache: Cache, masks: Sequence[Tensor]) -> Tensor:
        """See `DFlashHead.read`."""
        with attention(attend_over(cache, masks)):
            return self._read(token_embeddings.contiguous(), position_ids.contiguous())[0]

    def score(self, hidden: Tensor, lm_head: nn.Module | None = None) -> Tensor:
        """See `DFlashHead.score`; ignores `lm_head` and uses the one passed to `of`."""
        return self._score(hidden.contiguous())[0]
