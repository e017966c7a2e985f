"""A draft layer as device graphs: reading what was committed, and growing a whole tree, each recorded once per shape.

As in `verification/graphs.py` what crosses a graph's boundary lies in buffers that stay, and the layer's cache in
memory that is kept from call to call; another call at the same moment drafts without graphs. A tree is one graph: all
its levels with their masks and positions, and the choice of its nodes.
"""

from __future__ import annotations

from torch import Tensor, nn
from transformers import Cache

from hf_specdec.config import Choice
from hf_specdec.heads.captured_shapes import Advance, Advanced, Advancing, Growing, Growth, Layer, LayerForms, Reading
from hf_specdec.heads.compiled import LayerInOtherForm
from hf_specdec.trees.draft import Budget, Draft
from hf_specdec.trees.growth import Plan, StaticLevels
from hf_specdec.trees.tree import TokenTree
from hf_specdec.verification.cache import TreeCache
from hf_specdec.verification.graph_backends import GraphBackend
from hf_specdec.verification.graphs import WIDTHS, Captures, KeptMemory, width_for
from hf_specdec.verification.memory import bucket_of


class GraphDraftLayer(LayerInOtherForm):
    """A draft layer that reads, and grows trees, by graphs; everything else is its own.

    Args:
        inner: The layer.
        lm_head: The target's, cut down to the draft vocabulary, where the layer shares it.
        backend: Of its device.
    """

    def __init__(self, inner: Layer, lm_head: nn.Module | None, backend: GraphBackend) -> None:
        super().__init__(inner)
        self._inner, self._lm_head = inner, lm_head
        window, size = inner.config.sliding_window, inner.config.hidden_size
        self._forms = LayerForms(inner, lm_head, inner.hot_token_ids, window, size)
        self._memory = KeptMemory()
        self._readings, self._growths = Captures(backend, "The draft layer"), Captures(backend, "Its trees")
        self._steps = Captures(backend, "Its steps")
        self._static: dict[tuple[Choice, ...], int] = {}  # a number for every static tree

    def fuse(self, features: Tensor) -> Tensor:
        """See `DraftLayer`."""
        return self._inner.fuse(features)

    def recorded(self) -> list[tuple[int, ...]]:
        """The keys of everything that is a graph by now."""
        return [key for recordings in (self._steps, self._readings, self._growths) for key in recordings.recorded()]

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
            key, self._memory.moves, lambda: Reading(key, self._inner, layer, token_embeddings, hidden)
        )
        assert isinstance(shape, Reading)
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
        rows, start = len(growing.roots), cache.start
        num_nodes, num_steps, num_entries, number = self._sizes(plan)
        cache.store.make_room(start + num_entries)
        bucket = min(bucket_of(start + num_entries), cache.capacity)
        key = rows, num_nodes, bucket, num_steps, plan.top_k, number
        (layer,) = cache.layers
        shape = self._growths.shape(
            key,
            self._memory.moves,
            lambda: Growth(self._forms, plan, layer, embedding, growing, (num_entries, bucket)),
        )
        assert isinstance(shape, Growth)
        shape.fill(growing, start)
        log_probs, tokens, parents = (output.clone() for output in self._growths.run(shape))
        return Draft(TokenTree(tokens, parents, max_depth=num_steps), log_probs)

    def advance(self, step: Advancing, plan: Plan, cache: TreeCache, embedding: nn.Module) -> Advanced | None:
        """Read what a step keeps and grow the next tree, both in one graph; the host need not know what is kept.

        The cache's lengths are exact on the device afterwards; on the host they count all P nodes as kept, see
        `TreeCache.commit_unread`.

        Args:
            step: What is kept.
            plan, cache, embedding: See `grow`.

        Returns:
            The draft; None if this must be done without a graph.
        """
        (rows, num_states, _), width = step.states.shape, step.path.shape[1]
        stops = isinstance(plan, Budget) and plan.least > 0
        elsewhere = step.roots.device != self.device or not self._memory.owns(cache)
        (layer,) = cache.layers
        if stops or elsewhere or not layer.is_initialized or max(num_states, width) > WIDTHS[-1]:
            return None
        num_states, width, start = width_for(num_states), width_for(width), cache.start
        num_nodes, num_steps, num_entries, number = self._sizes(plan)
        cache.store.make_room(start + width + num_entries)
        bucket = min(bucket_of(start + width + num_entries), cache.capacity)
        key = rows, num_nodes, bucket, num_steps, plan.top_k, number, num_states, width
        shape = self._steps.shape(
            key,
            self._memory.moves,
            lambda: Advance(self._forms, plan, layer, embedding, step, (*key[-2:], num_entries, bucket)),
        )
        assert isinstance(shape, Advance)
        lengths = cache.lengths_on(self.device, rows)
        shape.fill(step, lengths)
        integers, log_probs, last = self._steps.run(shape)
        integers = integers.clone()
        cache.append_unread(width, integers[:, -1])
        tree = TokenTree(integers[:, :num_nodes], integers[:, num_nodes:-1], max_depth=num_steps)
        return Advanced(Draft(tree, log_probs.clone()), last)

    def _sizes(self, plan: Plan) -> tuple[int, int, int, int]:
        """Nodes, levels and appended entries of a tree, and the number of a static one."""
        if not isinstance(plan, StaticLevels):
            return plan.num_nodes, plan.num_steps, plan.top_k * (plan.num_steps - 1), 0
        number = self._static.setdefault(plan.choices, len(self._static)) + 1
        return 1 + len(plan.choices), len(plan.steps), plan.num_entries, number
