"""The computations that `captured.py` captures: reading entries, growing a tree, and both in one graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import Cache

from hf_specdec.heads.base import EagleFamilyHead
from hf_specdec.heads.captured_step import CapturedStep
from hf_specdec.heads.compiled import CompiledDraftLayer
from hf_specdec.trees.growth import Level, TreeShape, grow, scored
from hf_specdec.verification.cache import TreeLayer
from hf_specdec.verification.graphs import BucketLayer, CapturableStep
from hf_specdec.verification.memory import persistent_tensors

InnerLayer = EagleFamilyHead | CompiledDraftLayer


@dataclass(frozen=True, slots=True)
class CapturedLayer:
    """A draft layer and the settings that its captured computations use."""

    inner: InnerLayer
    lm_head: nn.Module | None  # the target's, if the layer shares it
    hot_token_ids: Tensor | None  # [Vd] target ids of the draft vocabulary; None if it is the target's
    window: int | None  # number of entries that an entry sees, itself included; None for all
    hidden_size: int

    def score(self, features: Tensor, top_k: int) -> Level:
        """Return the `top_k` best children of each of K nodes with features `[B, K, D]`."""
        return scored(features, self.inner.score(features, self.lm_head), top_k, self.hot_token_ids)


@dataclass(frozen=True, slots=True)
class GrowthInputs:
    """Inputs of `Growth`: the tree's root in each row, and the entries before it."""

    roots: Tensor  # [B]
    last: Tensor  # [B, 1, D] the layer's features of each row's last entry
    positions: Tensor  # [B, 1] position of the next entry
    lengths: Tensor  # [B] entries of each row, including padding
    committed: Tensor  # [B, start] bool, False for padding and for slots beyond a row's length


class Growth(CapturableStep):
    """Growth of a tree of fixed shape, as one captured graph.

    Args:
        layer: The draft layer.
        tree_shape: Shape of the tree.
        cached: The layer of the draft layer's cache.
        embedding: Token embedding.
        inputs: Example inputs, for sizes and dtypes.
        sizes: Number of appended entries, and number of cache slots that attention reads (the bucket).
    """

    def __init__(
        self, layer: CapturedLayer, tree_shape: TreeShape, cached: TreeLayer, embedding: nn.Module,
        inputs: GrowthInputs, sizes: tuple[int, int],
    ) -> None:  # fmt: skip
        super().__init__()
        self._layer, (num_entries, bucket) = layer, sizes
        self._tree_shape, self._embedding = tree_shape, embedding
        self._cached, self._bucket = cached, bucket
        with persistent_tensors():
            self._roots, self._last, self._positions, self._lengths = (
                torch.zeros_like(tensor) for tensor in (inputs.roots, inputs.last, inputs.positions, inputs.lengths)
            )
            self._slots = torch.zeros(num_entries, dtype=torch.long, device=self._roots.device)
            self._committed = torch.zeros(len(self._roots), bucket, dtype=torch.bool, device=self._roots.device)

    def fill(self, inputs: GrowthInputs, start: int) -> None:
        """Copy the inputs into the buffers; entries are appended from slot `start` on."""
        self._roots.copy_(inputs.roots)
        self._last.copy_(inputs.last)
        self._positions.copy_(inputs.positions)
        self._lengths.copy_(inputs.lengths)
        self._slots.copy_(torch.arange(start, start + len(self._slots), device=self._slots.device))
        self._committed.zero_()[:, :start] = inputs.committed

    def fill_on_device(self, inputs: GrowthInputs, start: Tensor) -> None:
        """Do the same as `fill` inside a graph, where `start` is on the device and `committed` covers the bucket."""
        for buffer, tensor in (
            (self._roots, inputs.roots), (self._last, inputs.last), (self._positions, inputs.positions),
            (self._lengths, inputs.lengths), (self._committed, inputs.committed),
        ):  # fmt: skip
            buffer.copy_(tensor)
        self._slots.copy_(start + torch.arange(len(self._slots), device=self._slots.device))

    def compute(self) -> Sequence[Tensor]:
        """Return log-probabilities, tokens and parents of the tree's nodes, `[B, N]` each."""
        draft = grow(self._roots, self._score(self._last), self._expand, self._tree_shape)
        assert draft.log_probs is not None
        return [draft.log_probs, draft.tree.tokens, draft.tree.parents.expand(draft.tree.tokens.shape)]

    def _expand(self, tokens: Tensor, above: Level, parent_index: Tensor, seen: Tensor, depth: int) -> Level:
        """See `growth.Expand`."""
        num_nodes, appended = seen.shape[1:]
        index = parent_index[:, :, None].expand(-1, -1, above.features.shape[-1])
        committed = self._committed
        if self._layer.window is not None:  # windows are longer than trees are deep, so they hide no ancestors
            distance = self._lengths[:, None] + (depth - 1) - torch.arange(self._bucket, device=committed.device)
            committed = committed & (distance < self._layer.window)
        mask = committed[:, None].expand(-1, num_nodes, -1).index_copy(2, self._slots[:appended], seen)[:, None]
        slots = self._slots[appended - num_nodes : appended]
        return self._score(
            self._layer.inner.read(
                self._embedding(tokens).to(self._layer.inner.dtype),
                above.features.gather(1, index),
                (self._positions + (depth - 1)).expand(-1, num_nodes),
                Cache(layers=[BucketLayer(self._cached, slots, self._bucket)]),
                mask,
            )
        )

    def _score(self, features: Tensor) -> Level:
        return self._layer.score(features, self._tree_shape.top_k)


class Advance(CapturedStep):
    """Reading of a step's accepted path and growth of a tree of fixed shape, as one captured graph.

    Args:
        layer, tree_shape, cached, embedding: See `Growth`.
        states: Example of the target's hidden states `[B, N, layers * D]`.
        sizes: Nodes of the step, length of its paths, entries that the tree appends, and slots in the bucket.
    """

    def __init__(
        self, layer: CapturedLayer, tree_shape: TreeShape, cached: TreeLayer, embedding: nn.Module, states: Tensor,
        sizes: tuple[int, int, int, int],
    ) -> None:  # fmt: skip
        num_states, width, num_entries, bucket = sizes
        super().__init__(states, num_states, width, bucket)
        self._layer, self._embedding, self._cached = layer, embedding, cached
        with persistent_tensors():
            last = torch.zeros(len(states), 1, layer.hidden_size, dtype=layer.inner.dtype, device=states.device)
        example = GrowthInputs(self._roots, last, self._lengths[:, None], self._lengths, self._valid)
        self._growth = Growth(layer, tree_shape, cached, embedding, example, (num_entries, bucket))

    def compute(self) -> Sequence[Tensor]:
        """Return three results of reading the path and growing the tree.

        Returns:
            `[B, 2N + 1]` tokens and parents of the tree's N nodes, and each row's new length; `[B, N]`
            log-probabilities of the nodes; `[B, 1, D]` features of each row's last entry.
        """
        counts = (self._path >= 0).sum(-1)
        output = self._read(counts)
        grown, committed = self._commit([self._cached], counts)
        last = (counts - 1).clamp(min=0)[:, None, None].expand(-1, -1, output.shape[-1])
        inputs = GrowthInputs(self._roots, output.gather(1, last), (grown - self._padded)[:, None], grown, committed)
        self._growth.fill_on_device(inputs, self._slots[-1] + 1)
        log_probs, tokens, parents = self._growth.compute()
        return [torch.cat([tokens, parents, grown[:, None]], dim=-1), log_probs, inputs.last]

    def _read(self, counts: Tensor) -> Tensor:
        """Append `counts` `[B]` accepted entries per row; return the features `[B, P, D]`, padding included."""
        real, entries = self._place(counts)
        lengths, width, bucket = self._lengths, len(self._slots), self._valid.shape[1]
        offsets, slots = torch.arange(width, device=lengths.device), torch.arange(bucket, device=lengths.device)
        distance = offsets[:, None] - offsets
        visible = (distance >= 0) & real[:, None] | (distance == 0)
        committed = ((slots < lengths[:, None]) & self._valid)[:, None]
        if self._layer.window is not None:
            visible = visible & (entries[:, :, None] - entries[:, None] < self._layer.window)
            committed = committed & (entries[:, :, None] - slots < self._layer.window)
        mask = committed.expand(-1, width, -1).index_copy(2, self._slots, visible)[:, None]
        return self._layer.inner.read(
            self._embedding(self._tokens.clamp(min=0)).to(self._layer.inner.dtype),
            self._layer.inner.fuse(self._accepted_states().to(self._layer.inner.dtype)),
            entries - self._padded[:, None],
            Cache(layers=[BucketLayer(self._cached, self._slots, bucket)]),
            mask,
        )


class EntryRead(CapturableStep):
    """A forward over new entries, captured for one batch size, width and bucket.

    Args:
        key: Batch size, width and bucket.
        inner: The draft layer.
        layer: The layer of its cache.
        token_embeddings, hidden: Example inputs, for sizes and dtypes.
    """

    def __init__(
        self, key: tuple[int, int, int], inner: InnerLayer, layer: TreeLayer, token_embeddings: Tensor, hidden: Tensor
    ) -> None:
        super().__init__()
        rows, width, bucket = key
        self._inner, self._width, device = inner, width, hidden.device
        with persistent_tensors():
            self._embeddings, self._hidden = (
                torch.zeros(rows, width, tensor.shape[-1], dtype=tensor.dtype, device=device)
                for tensor in (token_embeddings, hidden)
            )
            self._positions = torch.zeros(rows, width, dtype=torch.long, device=device)
            self._slots = torch.zeros(width, dtype=torch.long, device=device)
            self._mask = torch.zeros(rows, 1, width, bucket, dtype=torch.bool, device=device)
        self._cache = Cache(layers=[BucketLayer(layer, self._slots, bucket)])

    def fill(self, embeddings: Tensor, hidden: Tensor, positions: Tensor, mask: Tensor, begin: int) -> None:
        """Copy T entries `[B, T, ...]`, appended from slot `begin` on, and their mask `[B, 1, T, begin + T]`."""
        size = positions.shape[1]
        self._embeddings[:, :size] = embeddings
        self._hidden[:, :size] = hidden
        self._positions[:, :size] = positions
        self._slots.copy_(torch.arange(begin, begin + self._width, device=hidden.device))
        self._mask.zero_()[:, :, :size, : mask.shape[-1]] = mask
        self._mask[:, :, size:, 0] = True  # padding rows attend to slot 0; a fully masked row would give NaN

    def compute(self) -> Sequence[Tensor]:
        """Return the features `[B, width, D]` of the entries, padding included."""
        return [self._inner.read(self._embeddings, self._hidden, self._positions, self._cache, self._mask)]
