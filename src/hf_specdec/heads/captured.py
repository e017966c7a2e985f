"""A draft layer whose work is captured as device graphs, one per shape of the inputs.

There are graphs for a forward over new entries ("reading" them), for growing a whole tree, and for both together.

As in `verification/graphs.py`, inputs and outputs are buffers that never move, and the layer's cache uses memory that
later calls reuse; concurrent calls draft without graphs. The graph of a tree contains all levels with their masks and
positions, and the selection of nodes.
"""

from __future__ import annotations

from torch import Tensor, nn
from transformers import Cache

from hf_specdec.heads.captured_shapes import Advance, CapturedLayer, EntryRead, Growth, GrowthInputs, InnerLayer
from hf_specdec.heads.compiled import WrappedLayer
from hf_specdec.heads.layer import AcceptedStep, AdvancedDraft, TreeStart
from hf_specdec.trees.draft import Budget, Draft
from hf_specdec.trees.growth import StaticLevels, TreeShape
from hf_specdec.trees.tree import TokenTree
from hf_specdec.validation import Choice
from hf_specdec.verification.cache import TreeCache
from hf_specdec.verification.graph_backends import GraphBackend
from hf_specdec.verification.graphs import CAPTURED_WIDTHS, Captures, KeptMemory, width_for
from hf_specdec.verification.masks import committed_slots
from hf_specdec.verification.memory import bucket_of


class GraphDraftLayer(WrappedLayer):
    """A draft layer that reads entries and grows trees by replaying captured graphs.

    Args:
        inner: The layer to capture.
        lm_head: The target's lm_head, restricted to the draft vocabulary, if the layer shares it; else None.
        backend: Graph backend of the layer's device.
    """

    def __init__(self, inner: InnerLayer, lm_head: nn.Module | None, backend: GraphBackend) -> None:
        super().__init__(inner)
        self._inner, self._lm_head = inner, lm_head
        window, size = inner.config.sliding_window, inner.config.hidden_size
        self._captured = CapturedLayer(inner, lm_head, inner.hot_token_ids, window, size)
        self._memory = KeptMemory()
        self._readings, self._growths = Captures(backend, "The draft layer"), Captures(backend, "Tree growth")
        self._steps = Captures(backend, "The drafting step")
        self._static: dict[tuple[Choice, ...], int] = {}  # index of each static tree seen, for shape keys

    def fuse(self, features: Tensor) -> Tensor:
        """See `DraftLayer`."""
        return self._inner.fuse(features)

    def captured_keys(self) -> list[tuple[int, ...]]:
        """Return the keys of all captured shapes."""
        return [key for captures in (self._steps, self._readings, self._growths) for key in captures.captured_keys()]

    def new_cache(self, reserve: int) -> TreeCache:
        """See `BaseDraftLayer`; the cache reuses the memory of earlier calls, unless another call is using it."""
        return self._memory.new_cache((None,), 0, reserve)

    def release(self, cache: Cache) -> None:
        """See `BaseDraftLayer`; makes the memory available to later calls."""
        self._memory.release(cache)

    def read(
        self, token_embeddings: Tensor, hidden: Tensor, position_ids: Tensor, cache: Cache, mask: Tensor | None
    ) -> Tensor:
        """See `EagleFamilyHead.read`.

        Prompts, the first forward of a cache, inputs wider than any captured width and caches without the kept memory
        run without a graph.
        """
        rows, num_entries, _ = token_embeddings.shape
        if mask is None or num_entries > CAPTURED_WIDTHS[-1] or not self._memory.owns(cache):
            return self._inner.read(token_embeddings, hidden, position_ids, cache, mask)
        assert isinstance(cache, TreeCache)
        (layer,) = cache.layers
        if not layer.is_initialized:  # the first forward allocates the memory
            return self._inner.read(token_embeddings, hidden, position_ids, cache, mask)
        begin, width = layer.end, width_for(num_entries)
        cache.store.make_room(begin + width)
        key = rows, width, min(bucket_of(begin + width), cache.capacity)
        step = self._readings.step_for(
            key, self._memory.moves, lambda: EntryRead(key, self._inner, layer, token_embeddings, hidden)
        )
        assert isinstance(step, EntryRead)
        step.fill(token_embeddings, hidden, position_ids, mask, begin)
        (output,) = self._readings.run(step)
        layer.end = begin + num_entries
        return output[:, :num_entries].clone()  # the next run of this size overwrites the outputs

    def score(self, hidden: Tensor, lm_head: nn.Module | None = None) -> Tensor:
        """See `DraftLayer`; ignores `lm_head` and uses the one passed to the constructor."""
        return self._inner.score(hidden, self._lm_head)

    def grow(self, start: TreeStart, tree_shape: TreeShape, cache: TreeCache, embedding: nn.Module) -> Draft | None:
        """See `BaseDraftLayer`; returns None for a `Budget` that stops early, or a cache without the kept memory."""
        if not self._grows(tree_shape, start.roots, cache):
            return None
        rows, begin = len(start.roots), cache.start
        num_nodes, num_steps, num_entries, number = self._sizes(tree_shape)
        lengths = cache.lengths_on(self.device, rows)
        first = lengths if start.padding is None else lengths - start.padding.counts
        committed = committed_slots(lengths, begin, start.padding)
        inputs = GrowthInputs(start.roots, start.last, first[:, None], lengths, committed)
        cache.store.make_room(begin + num_entries)
        bucket = min(bucket_of(begin + num_entries), cache.capacity)
        key = rows, num_nodes, bucket, num_steps, tree_shape.top_k, number
        (layer,) = cache.layers
        step = self._growths.step_for(
            key,
            self._memory.moves,
            lambda: Growth(self._captured, tree_shape, layer, embedding, inputs, (num_entries, bucket)),
        )
        assert isinstance(step, Growth)
        step.fill(inputs, begin)
        log_probs, tokens, parents = (output.clone() for output in self._growths.run(step))
        return Draft(TokenTree(tokens, parents, max_depth=num_steps), log_probs)

    def advance(
        self, step: AcceptedStep, tree_shape: TreeShape, cache: TreeCache, embedding: nn.Module
    ) -> AdvancedDraft | None:
        """See `BaseDraftLayer`; one graph reads the step and grows the tree.

        Returns None in the cases of `grow`, if the cache is empty, or if the step is wider than any captured width.
        """
        (layer,) = cache.layers
        if not layer.is_initialized or not self._grows(tree_shape, step.roots, cache):
            return None
        states = step.features.of(self.feature_layers)
        rows, num_states, width = len(states), states.shape[1], step.path.shape[1]
        if max(num_states, width) > CAPTURED_WIDTHS[-1]:
            return None
        num_states, width, begin = width_for(num_states), width_for(width), cache.start
        num_nodes, num_steps, num_entries, number = self._sizes(tree_shape)
        cache.store.make_room(begin + width + num_entries)
        bucket = min(bucket_of(begin + width + num_entries), cache.capacity)
        key = rows, num_nodes, bucket, num_steps, tree_shape.top_k, number, num_states, width
        sizes = num_states, width, num_entries, bucket
        captured = self._steps.step_for(
            key,
            self._memory.moves,
            lambda: Advance(self._captured, tree_shape, layer, embedding, states, sizes),
        )
        assert isinstance(captured, Advance)
        captured.fill(step, states, cache.lengths_on(self.device, rows))
        integers, log_probs, last = self._steps.run(captured)
        integers = integers.clone()
        cache.append_unread(width, integers[:, -1])
        tree = TokenTree(integers[:, :num_nodes], integers[:, num_nodes:-1], max_depth=num_steps)
        return AdvancedDraft(Draft(tree, log_probs.clone()), last)

    def _grows(self, tree_shape: TreeShape, roots: Tensor, cache: TreeCache) -> bool:
        """Whether a graph can grow this tree."""
        # whether to stop at an unlikely level is decided on the host, which a graph cannot do
        stops_early = isinstance(tree_shape, Budget) and tree_shape.min_level_probability > 0
        return not stops_early and roots.device == self.device and self._memory.owns(cache)

    def _sizes(self, tree_shape: TreeShape) -> tuple[int, int, int, int]:
        """Return the tree's nodes, levels and appended entries, and the index of a static tree (0 if dynamic)."""
        if not isinstance(tree_shape, StaticLevels):
            return tree_shape.num_nodes, tree_shape.num_steps, tree_shape.top_k * (tree_shape.num_steps - 1), 0
        number = self._static.setdefault(tree_shape.choices, len(self._static)) + 1
        return 1 + len(tree_shape.choices), len(tree_shape.steps), tree_shape.num_entries, number
