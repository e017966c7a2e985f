"""A verify forward of which every shape becomes a graph, see `graphs.py`.

Called by: `target/tree_target.py`, as a `Runner`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import Cache

from hf_specdec.target.attention import TreeForward
from hf_specdec.target.cache import TreeCache, TreeLayer
from hf_specdec.target.graphs import (
    WIDTHS,
    BucketLayer,
    KeptMemory,
    Recordings,
    Shape,
    width_for,
)
from hf_specdec.target.memory import CacheLayout, bucket_of, persistent_tensors
from hf_specdec.target.recorders import Recorder
from hf_specdec.target.runners import Runner


class GraphForward(Runner):
    """A verify forward of which every shape becomes a graph.

    One call of `generate()` at a time has its cache; another one at the same moment gets a cache of its own, and runs
    without graphs.

    Args:
        inner: What is recorded.
        recorder: Of the model's device.
    """

    def __init__(self, inner: Runner, recorder: Recorder) -> None:
        self._inner, self.layers = inner, inner.layers
        self._memory, self._recordings = KeptMemory(), Recordings(recorder, "The forward")

    def recorded(self) -> list[tuple[int, ...]]:
        """Rows, width and bucket of the shapes that are graphs by now."""
        return self._recordings.recorded()

    def new_cache(self, layout: CacheLayout, capacity: int, reserve: int | None) -> TreeCache:
        """See `KeptMemory`."""
        return self._memory.new_cache(layout, capacity, reserve)

    def release(self, cache: Cache) -> None:
        """See `KeptMemory`."""
        self._memory.release(cache)

    def takes(self, num_nodes: int, cache: Cache) -> bool:
        """Whether the cache is the one that graphs write to, and the tree not too wide."""
        return self._memory.owns(cache) and num_nodes <= WIDTHS[-1]

    def __call__(
        self, tokens: Tensor, positions: Tensor, forward: TreeForward, cache: Cache
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """See `Runner`; what it returns is the caller's."""
        assert isinstance(cache, TreeCache)
        (rows, num_nodes), start = tokens.shape, cache.start
        width = width_for(num_nodes)
        cache.store.make_room(start + width)
        key = rows, width, min(bucket_of(start + width), cache.capacity)
        shape = self._recordings.shape(
            key, self._memory.moves, lambda: _Verification(key, self._inner, cache.layers, forward, tokens.device)
        )
        assert isinstance(shape, _Verification)
        shape.fill(tokens, positions, forward, start)
        logits, *states = (output[:, :num_nodes].clone() for output in self._recordings.run(shape))
        for layer in cache.layers:
            if layer.is_initialized:
                layer.end = start + num_nodes
        return logits, dict(zip(shape.layers, states, strict=True))


class _Verification(Shape):
    """A verify forward over a number of rows, nodes and slots.

    Args:
        key: Rows, width and bucket.
        inner: What computes it.
        layers: Of the cache whose memory it writes to.
        forward: Whose layer types have masks.
        device: Of the tokens.
    """

    def __init__(
        self, key: tuple[int, int, int], inner: Runner, layers: Sequence[TreeLayer], forward: TreeForward,
        device: torch.device,
    ) -> None:  # fmt: skip
        super().__init__()
        rows, width, bucket = key
        self._inner, self._width = inner, width
        self.layers: list[int] = []  # whose hidden states it gives, in the order of its outputs
        with persistent_tensors():
            self._tokens, self._positions = torch.zeros(2, rows, width, dtype=torch.long, device=device).unbind()
            self._slots = torch.zeros(width, dtype=torch.long, device=device)
            self._masks = {
                kind: torch.zeros(rows, 1, width, bucket, dtype=torch.bool, device=device) for kind in forward.masks
            }
        self._cache = Cache(layers=[BucketLayer(layer, self._slots, bucket) for layer in layers])

    def fill(self, tokens: Tensor, positions: Tensor, forward: TreeForward, start: int) -> None:
        """Give it a tree: `[B, N]` tokens and positions, and masks `[B, 1, N, start + N]`."""
        num_nodes = tokens.shape[1]
        self._tokens[:, :num_nodes] = tokens
        self._positions[:, :num_nodes] = positions
        self._slots.copy_(torch.arange(start, start + self._width, device=tokens.device))
        for kind, mask in forward.masks.items():
            buffer = self._masks[kind].zero_()
            buffer[:, :, :num_nodes, : start + num_nodes] = mask
            buffer[:, :, num_nodes:, 0] = True  # padding sees something: nothing would be no number

    def compute(self) -> Sequence[Tensor]:
        """See `Shape`."""
        logits, states = self._inner(self._tokens, self._positions, TreeForward(self._masks), self._cache)
        self.layers = list(states)
        return [logits, *states.values()]
