"""What `captured.py` captures of a draft layer: reading entries, growing a tree, and both after a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import Cache

from hf_specdec.heads.base import EagleFamilyHead
from hf_specdec.heads.compiled import CompiledDraftLayer
from hf_specdec.trees.draft import Draft
from hf_specdec.trees.growth import Level, Plan, grow, scored
from hf_specdec.verification.cache import TreeLayer
from hf_specdec.verification.graphs import BucketLayer, Shape
from hf_specdec.verification.masks import PromptPadding
from hf_specdec.verification.memory import persistent_tensors

Layer = EagleFamilyHead | CompiledDraftLayer


@dataclass(frozen=True, slots=True)
class LayerForms:
    """What is captured of a draft layer."""

    inner: Layer
    lm_head: nn.Module | None  # the target's, if the layer shares it
    hot_token_ids: Tensor | None
    window: int | None  # entries that an entry sees
    hidden_size: int

    def score(self, features: Tensor, top_k: int) -> Level:
        """The best children of K nodes by their features `[B, K, D]`."""
        return scored(features, self.inner.score(features, self.lm_head), top_k, self.hot_token_ids)


@dataclass(frozen=True, slots=True)
class Advancing:
    """A step that the layer has yet to read, before the next tree grows."""

    states: Tensor  # [B, N, layers * D] the target's hidden states at the step's nodes
    path: Tensor  # [B, P] kept nodes, -1 beyond
    tokens: Tensor  # [B, P] tokens after them
    roots: Tensor  # [B] the last of them
    padding: PromptPadding | None  # of the layer's entries


@dataclass(frozen=True, slots=True)
class Advanced:
    """What `GraphDraftLayer.advance` leaves."""

    draft: Draft
    last: Tensor  # [B, 1, D] the layer's features of each row's last entry; valid until the next step


@dataclass(frozen=True, slots=True)
class Growing:
    """What a tree grows from."""

    roots: Tensor  # [B]
    last: Tensor  # [B, 1, D] the layer's features of each row's last entry
    positions: Tensor  # [B, 1] of the entries behind it
    lengths: Tensor  # [B] entries of each row, padding included
    committed: Tensor  # [B, start] bool, which of them are no padding


class Growth(Shape):
    """A tree of one shape, grown behind a bucket of slots.

    Args:
        layer: Whose trees.
        plan: How it grows.
        cached: The layer's cache.
        embedding: Of tokens.
        growing: What it grows from, as an example of sizes.
        sizes: Entries that it appends, and slots of the bucket.
    """

    def __init__(
        self, layer: LayerForms, plan: Plan, cached: TreeLayer, embedding: nn.Module, growing: Growing,
        sizes: tuple[int, int],
    ) -> None:  # fmt: skip
        super().__init__()
        self._layer, (num_entries, bucket) = layer, sizes
        self._plan, self._embedding = plan, embedding
        self._cached, self._bucket = cached, bucket
        with persistent_tensors():
            self._roots, self._last, self._positions, self._lengths = (
                torch.zeros_like(given) for given in (growing.roots, growing.last, growing.positions, growing.lengths)
            )
            self._slots = torch.zeros(num_entries, dtype=torch.long, device=self._roots.device)
            self._committed = torch.zeros(len(self._roots), bucket, dtype=torch.bool, device=self._roots.device)

    def fill(self, growing: Growing, start: int) -> None:
        """Give it what to grow from; entries are appended from slot `start` on."""
        self._roots.copy_(growing.roots)
        self._last.copy_(growing.last)
        self._positions.copy_(growing.positions)
        self._lengths.copy_(growing.lengths)
        self._slots.copy_(torch.arange(start, start + len(self._slots), device=self._slots.device))
        self._committed.zero_()[:, :start] = growing.committed

    def take(self, growing: Growing, first: Tensor) -> None:
        """Like `fill`, within a graph: the first slot `[]` is known to the device alone."""
        for buffer, given in (
            (self._roots, growing.roots), (self._last, growing.last), (self._positions, growing.positions),
            (self._lengths, growing.lengths), (self._committed, growing.committed),
        ):  # fmt: skip
            buffer.copy_(given)
        self._slots.copy_(first + torch.arange(len(self._slots), device=self._slots.device))

    def compute(self) -> Sequence[Tensor]:
        """See `Shape`."""
        draft = grow(self._roots, self._score(self._last), self._expand, self._plan)
        assert draft.log_probs is not None
        return [draft.log_probs, draft.tree.tokens, draft.tree.parents.expand(draft.tree.tokens.shape)]

    def _expand(self, tokens: Tensor, above: Level, parent_index: Tensor, seen: Tensor, depth: int) -> Level:
        """See `growth.Expand`."""
        num_nodes, appended = seen.shape[1:]
        index = parent_index[:, :, None].expand(-1, -1, above.features.shape[-1])
        committed = self._committed
        if self._layer.window is not None:  # it is longer than a tree is deep
            behind = self._lengths[:, None] + (depth - 1) - torch.arange(self._bucket, device=committed.device)
            committed = committed & (behind < self._layer.window)
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
        return self._layer.score(features, self._plan.top_k)


class Advance(Shape):
    """Reading a step of some size, and growing a tree of one shape behind it.

    Args:
        layer, plan, cached, embedding: See `Growth`.
        step: An example.
        sizes: Nodes of the step, nodes of its paths, entries of the tree, and slots of the bucket.
    """

    def __init__(
        self, layer: LayerForms, plan: Plan, cached: TreeLayer, embedding: nn.Module, step: Advancing,
        sizes: tuple[int, int, int, int],
    ) -> None:  # fmt: skip
        super().__init__()
        num_states, width, num_entries, bucket = sizes
        self._layer, self._embedding = layer, embedding
        self._cached, self._padding, rows, device = cached, object(), len(step.roots), step.roots.device
        with persistent_tensors():
            self._states = torch.zeros(rows, num_states, step.states.shape[-1], dtype=step.states.dtype, device=device)
            self._path, self._tokens = torch.zeros(2, rows, width, dtype=torch.long, device=device).unbind()
            self._roots, self._lengths, self._padded = torch.zeros(3, rows, dtype=torch.long, device=device).unbind()
            self._slots = torch.zeros(width, dtype=torch.long, device=device)
            self._valid = torch.ones(rows, bucket, dtype=torch.bool, device=device)
            last = torch.zeros(rows, 1, layer.hidden_size, dtype=self._layer.inner.dtype, device=device)
        example = Growing(self._roots, last, self._lengths[:, None], self._lengths, self._valid)
        self._growth = Growth(layer, plan, cached, embedding, example, (num_entries, bucket))

    def fill(self, step: Advancing, lengths: Tensor) -> None:
        """Give it a step behind so many entries; the padding is copied once per call."""
        num_states, width = step.states.shape[1], step.path.shape[1]
        self._states[:, :num_states] = step.states
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

    def compute(self) -> Sequence[Tensor]:
        """See `Shape`."""
        counts, lengths, rows = (self._path >= 0).sum(-1), self._lengths, len(self._roots)
        output = self._read(counts)
        places = torch.arange(len(self._slots), device=lengths.device)
        if rows > 1:  # behind a single row entries stand where they stay
            targets = lengths[:, None] + places
            sources = torch.where(places < counts[:, None], self._slots, targets)
            for states in (self._cached.keys.transpose(1, 2), self._cached.values.transpose(1, 2)):
                row = torch.arange(rows, device=lengths.device)[:, None]
                states[row, targets] = states[row, sources]
        last = (counts - 1).clamp(min=0)[:, None, None].expand(-1, -1, output.shape[-1])
        grown = lengths + counts
        committed = (torch.arange(self._valid.shape[1], device=grown.device) < grown[:, None]) & self._valid
        first = self._slots[-1] + 1
        growing = Growing(self._roots, output.gather(1, last), (grown - self._padded)[:, None], grown, committed)
        self._growth.take(growing, first)
        log_probs, tokens, parents = self._growth.compute()
        return [torch.cat([tokens, parents, grown[:, None]], dim=-1), log_probs, growing.last]

    def _read(self, counts: Tensor) -> Tensor:
        """The layer's features `[B, P, D]` of the step's entries, which are appended."""
        lengths, width, bucket = self._lengths, len(self._slots), self._valid.shape[1]
        places, slots = torch.arange(width, device=lengths.device), torch.arange(bucket, device=lengths.device)
        self._slots.copy_(lengths.amax() + places)
        real = places < counts[:, None]
        entries = lengths[:, None] + (real.cumsum(-1) - 1).clamp(min=0)  # slots of a text without gaps
        behind = places[:, None] - places
        visible = (behind >= 0) & real[:, None] | (behind == 0)
        committed = ((slots < lengths[:, None]) & self._valid)[:, None]
        if self._layer.window is not None:
            visible = visible & (entries[:, :, None] - entries[:, None] < self._layer.window)
            committed = committed & (entries[:, :, None] - slots < self._layer.window)
        mask = committed.expand(-1, width, -1).index_copy(2, self._slots, visible)[:, None]
        index = self._path.clamp(min=0)[:, :, None].expand(-1, -1, self._states.shape[-1])
        return self._layer.inner.read(
            self._embedding(self._tokens.clamp(min=0)).to(self._layer.inner.dtype),
            self._layer.inner.fuse(self._states.gather(1, index).to(self._layer.inner.dtype)),
            entries - self._padded[:, None],
            Cache(layers=[BucketLayer(self._cached, self._slots, bucket)]),
            mask,
        )


class Reading(Shape):
    """So many entries of so many rows read behind a bucket of slots."""

    def __init__(
        self, key: tuple[int, int, int], inner: Layer, layer: TreeLayer, token_embeddings: Tensor, hidden: Tensor
    ) -> None:
        super().__init__()
        rows, width, bucket = key
        self._inner, self._width, device = inner, width, hidden.device
        with persistent_tensors():
            self._embeddings, self._hidden = (
                torch.zeros(rows, width, given.shape[-1], dtype=given.dtype, device=device)
                for given in (token_embeddings, hidden)
            )
            self._positions = torch.zeros(rows, width, dtype=torch.long, device=device)
            self._slots = torch.zeros(width, dtype=torch.long, device=device)
            self._mask = torch.zeros(rows, 1, width, bucket, dtype=torch.bool, device=device)
        self._cache = Cache(layers=[BucketLayer(layer, self._slots, bucket)])

    def fill(self, embeddings: Tensor, hidden: Tensor, positions: Tensor, mask: Tensor, begin: int) -> None:
        """Give it entries `[B, T, ...]`, appended from slot `begin` on, and their mask `[B, 1, T, begin + T]`."""
        size = positions.shape[1]
        for buffer, given in (
            (self._embeddings, embeddings), (self._hidden, hidden), (self._positions, positions),
        ):  # fmt: skip
            buffer[:, :size] = given
        self._slots.copy_(torch.arange(begin, begin + self._width, device=hidden.device))
        self._mask.zero_()[:, :, :size, : mask.shape[-1]] = mask
        self._mask[:, :, size:, 0] = True  # padding sees something: nothing would be no number

    def compute(self) -> Sequence[Tensor]:
        """See `Shape`."""
        return [self._inner.read(self._embeddings, self._hidden, self._positions, self._cache, self._mask)]
