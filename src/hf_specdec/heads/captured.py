"""A draft layer as device graphs: reading new entries, and scoring them, each recorded once per shape.

As in `target/graphs.py` what crosses a graph's boundary lies in buffers that stay, and the layer's cache in memory
that is kept from call to call; another call at the same moment reads without graphs. Growing the tree between two
readings is a dozen small operations, which are not recorded. Called by: `drafters/eagle.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import Cache

from hf_specdec.heads.base import EagleFamilyHead
from hf_specdec.heads.compiled import CompiledDraftLayer, LayerInOtherForm
from hf_specdec.target.cache import TreeCache, TreeLayer
from hf_specdec.target.graphs import WIDTHS, BucketLayer, KeptMemory, Recorder, Recordings, Shape, bucket_of, width_for

Layer = EagleFamilyHead | CompiledDraftLayer


class GraphDraftLayer(LayerInOtherForm):
    """A draft layer that reads and scores by graphs; everything else is its own.

    Args:
        inner: The layer.
        lm_head: The target's, cut down to the draft vocabulary, where the layer shares it.
        recorder: Of its device.
    """

    def __init__(self, inner: Layer, lm_head: nn.Module | None, recorder: Recorder) -> None:
        super().__init__(inner)
        self._inner, self._lm_head = inner, lm_head
        self._memory, self._scoring = KeptMemory(), threading.Lock()
        self._readings, self._scorings = Recordings(recorder, "The draft layer"), Recordings(recorder, "Its scoring")

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
        rows, num_entries, _ = hidden.shape
        if num_entries > WIDTHS[-1] or not self._scoring.acquire(blocking=False):  # another call is at it
            return self._inner.score(hidden, self._lm_head)
        try:
            key = rows, width_for(num_entries)
            shape = self._scorings.shape(key, 0, lambda: _Scoring(key, self._inner, self._lm_head, hidden))
            assert isinstance(shape, _Scoring)
            shape.fill(hidden)
            (logits,) = self._scorings.run(shape)
            return logits[:, :num_entries].clone()
        finally:
            self._scoring.release()


class _Reading(Shape):
    """So many entries of so many rows read behind a bucket of slots."""

    def __init__(
        self, key: tuple[int, int, int], inner: Layer, layer: TreeLayer, token_embeddings: Tensor, hidden: Tensor
    ) -> None:
        super().__init__()
        rows, width, bucket = key
        self._inner, self._width, device = inner, width, hidden.device
        with torch.inference_mode(False):  # such buffers could not be written to outside of it
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


class _Scoring(Shape):
    """So many entries of so many rows scored."""

    def __init__(self, key: tuple[int, int], inner: Layer, lm_head: nn.Module | None, hidden: Tensor) -> None:
        super().__init__()
        self._inner, self._lm_head = inner, lm_head
        with torch.inference_mode(False):
            self._hidden = torch.zeros(*key, hidden.shape[-1], dtype=hidden.dtype, device=hidden.device)

    def fill(self, hidden: Tensor) -> None:
        """Give it features `[B, T, D]`."""
        self._hidden[:, : hidden.shape[1]] = hidden

    def compute(self) -> Sequence[Tensor]:
        """See `Shape`."""
        return [self._inner.score(self._hidden, self._lm_head)]
