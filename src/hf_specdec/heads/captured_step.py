"""The buffers of an accepted step, and what all graphs that read one have in common."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_specdec.heads.layer import AcceptedStep
from hf_specdec.verification.cache import TreeLayer
from hf_specdec.verification.graphs import CapturableStep
from hf_specdec.verification.memory import persistent_tensors


class CapturedStep(CapturableStep):
    """Base class of graphs that append the accepted path of a step to a cache, and draft behind it.

    Args:
        states: Example of the target's hidden states `[B, N, layers * D]`.
        num_states: Nodes of the step.
        width: Length of its paths.
        bucket: Number of cache slots that attention reads.
    """

    def __init__(self, states: Tensor, num_states: int, width: int, bucket: int) -> None:
        super().__init__()
        self._padding: object = object()  # of the step last filled; at first none
        rows, device = len(states), states.device
        with persistent_tensors():
            self._states = torch.zeros(rows, num_states, states.shape[-1], dtype=states.dtype, device=device)
            self._path, self._tokens = torch.zeros(2, rows, width, dtype=torch.long, device=device).unbind()
            self._roots, self._lengths, self._padded = torch.zeros(3, rows, dtype=torch.long, device=device).unbind()
            self._slots = torch.zeros(width, dtype=torch.long, device=device)
            self._valid = torch.ones(rows, bucket, dtype=torch.bool, device=device)

    def fill(self, step: AcceptedStep, states: Tensor, lengths: Tensor) -> None:
        """Copy a step into the buffers; the padding is copied once per call, during which it is constant.

        Args:
            step: The step.
            states: `[B, N, layers * D]` the step's features.
            lengths: `[B]` number of entries of each row before the step.
        """
        num_states, width = states.shape[1], step.path.shape[1]
        self._states[:, :num_states] = states
        self._path[:, :width] = step.path
        if width < self._path.shape[1]:
            self._path[:, width:] = -1
        self._tokens[:, :width] = step.tokens
        self._roots.copy_(step.roots)
        self._lengths.copy_(lengths)
        if self._padding is not step.padding:
            self._padding = step.padding
            self._valid.fill_(True)
            self._padded.zero_()
            if step.padding is not None:
                self._valid[:, : step.padding.valid.shape[1]] = step.padding.valid
                self._padded.copy_(step.padding.counts)

    def _place(self, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Choose the slots to append to; return which of them hold accepted entries, and their indices in the row.

        Args:
            counts: `[B]` accepted entries of each row.

        Returns:
            `[B, P]` bool, and `[B, P]` index within the row, including padding.
        """
        offsets = torch.arange(len(self._slots), dtype=torch.long, device=counts.device)
        self._slots.copy_(self._lengths.amax() + offsets)
        real = offsets < counts[:, None]
        return real, self._lengths[:, None] + (real.cumsum(-1) - 1).clamp(min=0)

    def _accepted_states(self) -> Tensor:
        """Return the target's hidden states `[B, P, layers * D]` at the accepted nodes."""
        index = self._path.clamp(min=0)[:, :, None].expand(-1, -1, self._states.shape[-1])
        return self._states.gather(1, index)

    def _commit(self, layers: Sequence[TreeLayer], counts: Tensor) -> tuple[Tensor, Tensor]:
        """Move the appended entries next to those before them; return the new lengths and which slots hold entries.

        Args:
            layers: The layers of the cache.
            counts: `[B]` accepted entries of each row.

        Returns:
            `[B]`, and `[B, bucket]` bool, False for padding and for slots beyond a row's length.
        """
        lengths, rows = self._lengths, len(self._lengths)
        if rows > 1:  # a single row has no gaps to close
            offsets = torch.arange(len(self._slots), dtype=torch.long, device=lengths.device)
            targets = lengths[:, None] + offsets
            sources = torch.where(offsets < counts[:, None], self._slots, targets)
            row = torch.arange(rows, dtype=torch.long, device=lengths.device)[:, None]
            for layer in layers:
                for states in (layer.keys.transpose(1, 2), layer.values.transpose(1, 2)):
                    states[row, targets] = states[row, sources]
        grown = lengths + counts
        slots = torch.arange(self._valid.shape[1], dtype=torch.long, device=grown.device)
        return grown, (slots < grown[:, None]) & self._valid
