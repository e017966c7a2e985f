"""A draft layer as device graphs: reading what was committed, and growing a whole tree, each recorded once per shape.

As in `target/graphs.py` what crosses a graph's boundary lies in buffers that stay, and the layer's cache in memory
that is kept from call to call; another call at the same moment drafts without graphs. A tree is one graph: all its
levels with their masks and positions, and the choice of its nodes. Called by: `drafters/eagle.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import Cache

from hf_specdec.config import Choice
from hf_specdec.draft import Budget, Draft
from hf_specdec.heads.base import EagleFamilyHead
from hf_specdec.heads.compiled import CompiledDraftLayer, LayerInOtherForm
from hf_specdec.target.cache import TreeCache, TreeLayer
from hf_specdec.target.graphs import WIDTHS, BucketLayer, KeptMemory, Recordings, Shape, width_for
from hf_specdec.target.memory import bucket_of, persistent_tensors
from hf_specdec.target.recorders import Recorder
from hf_specdec.tree import TokenTree
from hf_specdec.tree_growth import Level, Plan, StaticLevels, grow, scored

Layer = EagleFamilyHead | CompiledDraftLayer


@dataclass(frozen=True, slots=True)
class Growing:
    """What a tree grows from."""

    roots: Tensor  # [B]
    last: Tensor  # [B, 1, D] the layer's features of each row's last entry
    positions: Tensor  # [B, 1] of the entries behind it
    lengths: Tensor  # [B] entries of each row, padding included
    committed: Tensor  # [B, start] bool, which of them are no padding


class GraphDraftLayer(LayerInOtherForm):
    """A draft layer that reads, and grows trees, by graphs; everything else is its own.

    Args:
        inner: The layer.
        lm_head: The target's, cut down to the draft vocabulary, where the layer shares it.
        recorder: Of its device.
    """

    def __init__(self, inner: Layer, lm_head: nn.Module | None, recorder: Recorder) -> None:
        super().__init__(inner)
        self._inner, self._lm_head = inner, lm_head
        self._memory = KeptMemory()
        self._readings, self._growths = Recordings(recorder, "The draft layer"), Recordings(recorder, "Its trees")
        self._static: dict[tuple[Choice, ...], int] = {}  # a number for every static tree

    def fuse(self, features: Tensor) -> Tensor:
        """See `DraftLayer`."""
        return self._inner.fuse(features)

    def recorded(self) -> list[tuple[int, ...]]:
        """Rows, width and bucket of the readings that are graphs by now."""
        return self._readings.recorded()

    def new_cache(self, reserve: int) -> TreeCache:
        """See `KeptMemory`."""
        return self._memory.new_cache((None,), 0, reserve)

    def release(self, cache: Cache) -> None:
        """See `KeptMemory`."""
        self._memory.release(cache)

    def read(
        self, token_embeddings: Tensor, hidden: Tensor, position_ids: Tensor, cache: Cache, mask: Tensor | None
    ) -> Tensor:
        """See `EagleFamilyHead.read`; prompts, and what is wider than any graph, are read by the layer itself."""
        rows, num_entries, _ = token_embeddings.shape
        if mask is None or num_entries > WIDTHS[-1] or not self._memory.owns(cache):
            return self._inner.read(token_embeddings, hidden, position_ids, cache, mask)
        assert isinstance(cache, TreeCache)
        (layer,) = cache.layers
        if not layer.is_initialized:  # the first entries ever: they decide what memory there is
            return self._inner.read(token_embeddings, hidden, position_ids, cache, mask)
        begin, width = layer.end, width_for(num_entries)
        cache.store.make_room(begin + width)
        key = rows, width, min(bucket_of(begin + width), cache.capacity)
        shape = self._readings.shape(
            key, self._memory.moves, lambda: _Reading(key, self._inner, layer, token_embeddings, hidden)
        )
        assert isinstance(shape, _Reading)
        shape.fill(token_embeddings, hidden, position_ids, mask, begin)
        (output,) = self._readings.run(shape)
        layer.end = begin + num_entries
        return output[:, :num_entries].clone()

    def score(self, hidden: Tensor, lm_head: nn.Module | None = None) -> Tensor:
        """See `DraftLayer`; the lm_head is the one that it was made with."""
        return self._inner.score(hidden, self._lm_head)

    def grow(self, growing: Growing, plan: Plan, cache: TreeCache, embedding: nn.Module) -> Draft | None:
        """Grow a tree behind a cache that ends with the last committed entry, and leave that as it is.

        Args:
            growing: What from.
            plan: Its shape; one that stops where levels promise too little reads the device.
            cache: The layer's.
            embedding: Of tokens, as the layer reads them.

        Returns:
            The draft; None where it has to grow without a graph.
        """
        stops = isinstance(plan, Budget) and plan.least > 0
        if stops or not self._memory.owns(cache) or growing.roots.device != self.device:
            return None
        rows, start, number = len(growing.roots), cache.start, 0
        if isinstance(plan, StaticLevels):
            number = self._static.setdefault(plan.choices, len(self._static)) + 1
            num_nodes, num_steps, num_entries = 1 + len(plan.choices), len(plan.steps), plan.num_entries
        else:
            num_nodes, num_steps = plan.num_nodes, plan.num_steps
            num_entries = plan.top_k * (num_steps - 1)
        cache.store.make_room(start + num_entries)
        bucket = min(bucket_of(start + num_entries), cache.capacity)
        key = rows, num_nodes, bucket, num_steps, plan.top_k, number
        (layer,) = cache.layers
        shape = self._growths.shape(
            key, self._memory.moves, lambda: _Growth(self, plan, layer, embedding, growing, (num_entries, bucket))
        )
        assert isinstance(shape, _Growth)
        shape.fill(growing, start)
        log_probs, tokens, parents = (output.clone() for output in self._growths.run(shape))
        return Draft(TokenTree(tokens, parents, max_depth=num_steps), log_probs)

    def forms(self) -> tuple[Layer, nn.Module | None]:
        """The layer that is recorded, and the lm_head that it was made with."""
        return self._inner, self._lm_head


class _Growth(Shape):
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
        self, layer: GraphDraftLayer, plan: Plan, cached: TreeLayer, embedding: nn.Module, growing: Growing,
        sizes: tuple[int, int],
    ) -> None:  # fmt: skip
        super().__init__()
        (self._inner, self._lm_head), (num_entries, bucket) = layer.forms(), sizes
        self._hot_token_ids, self._window = layer.hot_token_ids, layer.config.sliding_window
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

    def compute(self) -> Sequence[Tensor]:
        """See `Shape`."""
        draft = grow(self._roots, self._score(self._last), self._expand, self._plan)
        assert draft.log_probs is not None
        return [draft.log_probs, draft.tree.tokens, draft.tree.parents.expand(draft.tree.tokens.shape)]

    def _expand(self, tokens: Tensor, above: Level, parent_index: Tensor, seen: Tensor, depth: int) -> Level:
        """See `tree_growth.Expand`."""
        num_nodes, appended = seen.shape[1:]
        index = parent_index[:, :, None].expand(-1, -1, above.features.shape[-1])
        committed = self._committed
        if self._window is not None:  # it is longer than a tree is deep
            behind = self._lengths[:, None] + (depth - 1) - torch.arange(self._bucket, device=committed.device)
            committed = committed & (behind < self._window)
        mask = committed[:, None].expand(-1, num_nodes, -1).index_copy(2, self._slots[:appended], seen)[:, None]
        slots = self._slots[appended - num_nodes : appended]
        return self._score(
            self._inner.read(
                self._embedding(tokens).to(self._inner.dtype),
                above.features.gather(1, index),
                (self._positions + (depth - 1)).expand(-1, num_nodes),
                Cache(layers=[BucketLayer(self._cached, slots, self._bucket)]),
                mask,
            )
        )

    def _score(self, features: Tensor) -> Level:
        return scored(features, self._inner.score(features, self._lm_head), self._plan.top_k, self._hot_token_ids)


class _Reading(Shape):
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
