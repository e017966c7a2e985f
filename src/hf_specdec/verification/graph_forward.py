"""A verify forward that is captured as a device graph for each shape, see `graphs.py`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import Cache

from hf_specdec.trees.tree import ROOT_PARENT, TokenTree
from hf_specdec.verification.attention import AttentionContext
from hf_specdec.verification.cache import TreeCache, TreeLayer
from hf_specdec.verification.graph_backends import GraphBackend
from hf_specdec.verification.graphs import (
    CAPTURED_WIDTHS,
    BucketLayer,
    CapturableStep,
    Captures,
    KeptMemory,
    width_for,
)
from hf_specdec.verification.length_bounds import UNBOUNDED
from hf_specdec.verification.masks import Positions, TreeInputs, bucket_masks
from hf_specdec.verification.memory import CacheLayout, bucket_of, kept_rows, persistent_tensors
from hf_specdec.verification.runners import Runner
from hf_specdec.verification.window import PromptPadding


class GraphForward(Runner):
    """Runner that captures a verify forward once per shape and replays it.

    Only one `generate()` call at a time uses the captured memory. Concurrent calls get a separate cache and run
    without graphs.

    Args:
        inner: The forward to capture.
        backend: Graph backend of the model's device.
    """

    def __init__(self, inner: Runner, backend: GraphBackend) -> None:
        self._inner, self.layers, self.copies_weights = inner, inner.layers, inner.copies_weights
        self._memory, self._captures = KeptMemory(), Captures(backend, "The forward")

    def captured_keys(self) -> list[tuple[int, ...]]:
        """Return batch size, width and bucket of each captured shape."""
        return self._captures.captured_keys()

    def new_cache(self, layout: CacheLayout, capacity: int, reserve: int | None) -> TreeCache:
        """See `KeptMemory.new_cache`."""
        return self._memory.new_cache(layout, capacity, reserve)

    def release(self, cache: Cache) -> None:
        """See `KeptMemory.release`."""
        self._memory.release(cache)

    def num_rows(self, active: int) -> int:
        """Return a power of two: every number of rows needs captures."""
        return kept_rows(active)

    def can_run(self, num_nodes: int, cache: Cache) -> bool:
        """Whether the cache is the one that graphs write to and a captured width is large enough."""
        return self._memory.owns(cache) and num_nodes <= CAPTURED_WIDTHS[-1]

    def __call__(
        self, tokens: Tensor, positions: Tensor, forward: AttentionContext, cache: Cache
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Run the inner forward without a graph, because graphs compute masks and positions themselves."""
        return self._inner(tokens, positions, forward, cache)

    def verify(self, inputs: TreeInputs, cache: Cache) -> tuple[Tensor, dict[int, Tensor]]:
        """See `Runner`; the returned tensors are copies."""
        assert isinstance(cache, TreeCache)
        (rows, num_nodes), start = inputs.tree.tokens.shape, inputs.start
        width = width_for(num_nodes)
        cache.store.make_room(start + width)
        key = rows, width, min(bucket_of(start + width), cache.capacity)
        step = self._captures.step_for(
            key, self._memory.moves, lambda: _Verification(key, self._inner, cache.layers, inputs)
        )
        assert isinstance(step, _Verification)
        step.fill(inputs)
        # the next run of this size overwrites the outputs
        logits, *states = (output[:, :num_nodes].clone() for output in self._captures.run(step))
        for layer in cache.layers:
            if layer.is_initialized:
                layer.end = start + num_nodes
        return logits, dict(zip(step.layers, states, strict=True))


class _Verification(CapturableStep):
    """Step that runs a verify forward with its masks and positions, for one batch size, width and bucket.

    Args:
        key: Batch size, width and bucket.
        inner: The forward.
        layers: Layers of the cache that the forward appends to.
        inputs: Example inputs, for mask layout and device.
    """

    def __init__(
        self, key: tuple[int, int, int], inner: Runner, layers: Sequence[TreeLayer], inputs: TreeInputs
    ) -> None:
        super().__init__()
        rows, width, bucket = key
        self._inner, self._layout, device = inner, inputs.layout, inputs.lengths.device
        self.layers: list[int] = []  # layers of the returned hidden states, in the order of the outputs
        self._num_nodes = width  # of the tree in the buffers
        # padding, positions and ceiling in the buffers
        self._constants: tuple[object, object, int | None] = (None, None, None)
        with persistent_tensors():
            self._tokens, self._parents = torch.zeros(2, rows, width, dtype=torch.long, device=device).unbind()
            self._lengths, self._left, self._offsets = torch.zeros(3, rows, dtype=torch.long, device=device).unbind()
            self._ceiling = torch.full((), UNBOUNDED, dtype=torch.long, device=device)
            self._slots = torch.zeros(width, dtype=torch.long, device=device)
            self._valid = torch.ones(rows, bucket, dtype=torch.bool, device=device)
        self._cache = Cache(layers=[BucketLayer(layer, self._slots, bucket) for layer in layers])

    def fill(self, inputs: TreeInputs) -> None:
        """Copy a tree into the buffers, and padding and positions only if they are not those of the last tree."""
        num_nodes = inputs.tree.num_nodes
        self._tokens[:, :num_nodes] = inputs.tree.tokens
        self._parents[:, :num_nodes] = inputs.tree.parents
        if num_nodes < self._num_nodes:
            self._parents[:, num_nodes:] = ROOT_PARENT
        self._num_nodes = num_nodes
        self._lengths.copy_(inputs.lengths)
        padding, positions, ceiling = self._constants
        if padding is not inputs.padding or positions is not inputs.positions:
            self._fill_constants(inputs.padding, inputs.positions)
        if ceiling != inputs.ceiling:
            self._ceiling.fill_(UNBOUNDED if inputs.ceiling is None else inputs.ceiling)
        self._constants = inputs.padding, inputs.positions, inputs.ceiling

    def _fill_constants(self, padding: PromptPadding | None, positions: Positions) -> None:
        self._valid.fill_(True)
        self._left.zero_()
        if padding is not None:
            self._valid[:, : padding.valid.shape[1]] = padding.valid
            self._left.copy_(padding.left)
        self._offsets.copy_(positions.last + 1 - positions.num_slots)

    def compute(self) -> Sequence[Tensor]:
        """Return the logits `[B, width, V]` and hidden states `[B, width, D]`; append to the cache."""
        width, lengths = self._tokens.shape[1], self._lengths
        self._slots.copy_(lengths.amax() + torch.arange(width, device=lengths.device))
        ancestors = TokenTree(self._tokens, self._parents).ancestor_mask()
        masks = bucket_masks(self._layout, ancestors, lengths, self._slots, self._valid, self._left)
        positions = ((self._offsets + lengths)[:, None] + ancestors.sum(-1) - 1).clamp(max=self._ceiling)
        logits, states = self._inner(self._tokens, positions, AttentionContext(masks), self._cache)
        self.layers = list(states)
        return [logits, *states.values()]
