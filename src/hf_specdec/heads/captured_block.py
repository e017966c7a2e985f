"""A block head whose drafts are captured as device graphs: the block and its tree, or these and the step before them.

As in `heads/captured.py`, inputs and outputs are buffers that never move, and the cache uses memory that later calls
reuse; concurrent calls draft without graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from hf_specdec.heads.block import block_masks
from hf_specdec.heads.captured_step import CapturedStep
from hf_specdec.heads.compiled_block import CompiledBlockHead, WrappedBlockHead
from hf_specdec.heads.dflash import DFlashHead
from hf_specdec.heads.layer import AcceptedStep
from hf_specdec.trees.draft import Budget, Draft
from hf_specdec.trees.growth import StaticLevels, TreeShape
from hf_specdec.trees.tree import TokenTree
from hf_specdec.verification.cache import TreeCache
from hf_specdec.verification.graph_backends import GraphBackend
from hf_specdec.verification.graphs import (
    CAPTURED_WIDTHS,
    BucketLayer,
    CapturableStep,
    Captures,
    KeptMemory,
    width_for,
)
from hf_specdec.verification.masks import committed_slots
from hf_specdec.verification.memory import bucket_of, persistent_tensors
from hf_specdec.verification.window import PromptPadding

InnerHead = DFlashHead | CompiledBlockHead
GrowTree = Callable[[Tensor, Tensor, TreeShape], Draft]
"""`grow(roots [B], outputs [B, S, D], shape)` returns the tree of a block, see `drafters/block_tree.py`."""


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """Head, tree and sizes of a captured draft."""

    head: InnerHead
    grow: GrowTree
    embedding: nn.Module
    shape: TreeShape
    size: int  # slots of the block
    bucket: int  # number of cache slots that attention reads


class BlockGrowth(CapturableStep):
    """A block behind the committed tokens and its tree, as one captured graph.

    Args:
        plan: The draft.
        layers: The layers of the cache.
        rows: Batch size.
    """

    def __init__(self, plan: BlockPlan, layers: Sequence[Any], rows: int) -> None:
        super().__init__()
        self._plan, self._layers, device = plan, layers, plan.head.device
        with persistent_tensors():
            self._roots, self._positions, self._lengths = torch.zeros(
                3, rows, dtype=torch.long, device=device
            ).unbind()
            self._slots = torch.zeros(plan.size, dtype=torch.long, device=device)
            self._committed = torch.zeros(rows, plan.bucket, dtype=torch.bool, device=device)

    def fill(self, roots: Tensor, positions: Tensor, lengths: Tensor, committed: Tensor, start: int) -> None:
        """Copy the inputs into the buffers; the block is appended from slot `start` on.

        Args:
            roots, positions, lengths: `[B]` root, its position, and committed slots of each row.
            committed: `[B, start]` bool, False for padding and for slots beyond a row's length.
            start: First slot of the block.
        """
        for buffer, tensor in ((self._roots, roots), (self._positions, positions), (self._lengths, lengths)):
            buffer.copy_(tensor)
        self._slots.copy_(torch.arange(start, start + len(self._slots), dtype=torch.long, device=roots.device))
        self._committed.zero_()[:, :start] = committed

    def fill_on_device(
        self, roots: Tensor, positions: Tensor, lengths: Tensor, committed: Tensor, start: Tensor
    ) -> None:
        """Do the same as `fill` inside a graph, where `start` is on the device and `committed` covers the bucket."""
        for buffer, tensor in (
            (self._roots, roots), (self._positions, positions), (self._lengths, lengths), (self._committed, committed)
        ):  # fmt: skip
            buffer.copy_(tensor)
        self._slots.copy_(start + torch.arange(len(self._slots), dtype=torch.long, device=roots.device))

    def compute(self) -> Sequence[Tensor]:
        """Return log-probabilities, tokens and parents of the tree's nodes, `[B, N]` each."""
        plan, device = self._plan, self._roots.device
        numbers = torch.arange(plan.size, dtype=torch.long, device=device)
        tokens = torch.where(numbers == 0, self._roots[:, None], plan.head.config.mask_token_id)
        masks = []
        for seen, block in block_masks(plan.head, self._committed, self._lengths, plan.size):
            masks.append(seen.index_copy(2, self._slots, block.expand(len(seen), -1, -1))[:, None])
        outputs = plan.head.read(
            plan.embedding(tokens).to(plan.head.dtype),
            self._positions[:, None] + numbers,
            Cache(layers=[BucketLayer(layer, self._slots, plan.bucket) for layer in self._layers]),
            masks,
        )
        draft = plan.grow(self._roots, outputs, plan.shape)
        assert draft.log_probs is not None
        return [draft.log_probs, draft.tree.tokens, draft.tree.parents.expand(draft.tree.tokens.shape)]


class BlockAdvance(CapturedStep):
    """Reading of a step's accepted path, and the block and tree behind it, as one captured graph.

    Args:
        plan: The draft.
        layers: The layers of the cache.
        states: Example of the target's hidden states `[B, N, layers * D]`.
        sizes: Nodes of the step and length of its paths.
    """

    def __init__(self, plan: BlockPlan, layers: Sequence[Any], states: Tensor, sizes: tuple[int, int]) -> None:
        super().__init__(states, *sizes, plan.bucket)
        self._plan, self._layers = plan, layers
        self._growth = BlockGrowth(plan, layers, len(states))

    def compute(self) -> Sequence[Tensor]:
        """Return two results of reading the path and growing the tree.

        Returns:
            `[B, 2N + 1]` tokens and parents of the tree's N nodes, and each row's new length; `[B, N]`
            log-probabilities of the nodes.
        """
        counts = (self._path >= 0).sum(-1)
        _, entries = self._place(counts)
        cache = Cache(layers=[BucketLayer(layer, self._slots, self._plan.bucket) for layer in self._layers])
        features = self._accepted_states().to(self._plan.head.dtype)
        self._plan.head.append_context(features, entries - self._padded[:, None], cache)
        grown, committed = self._commit(self._layers, counts)
        self._growth.fill_on_device(self._roots, grown - self._padded, grown, committed, self._slots[-1] + 1)
        log_probs, tokens, parents = self._growth.compute()
        return [torch.cat([tokens, parents, grown[:, None]], dim=-1), log_probs]


class GraphBlockHead(WrappedBlockHead):
    """A block head that drafts by replaying captured graphs, one per shape of the inputs and size of the block.

    Args:
        inner: The head to capture.
        grow: Grows the tree of a block.
        backend: Graph backend of the head's device.
    """

    def __init__(self, inner: InnerHead, grow: GrowTree, backend: GraphBackend) -> None:
        super().__init__(inner)
        self._inner, self._grow, self._memory = inner, grow, KeptMemory()
        self._growths, self._steps = Captures(backend, "The block head"), Captures(backend, "The drafting step")
        self._static: dict[Any, int] = {}  # index of each static tree seen, for shape keys

    def captured_keys(self) -> list[tuple[int, ...]]:
        """Return the keys of all captured shapes."""
        return [key for captures in (self._steps, self._growths) for key in captures.captured_keys()]

    def new_cache(self, reserve: int) -> TreeCache:
        """See `DFlashHead`; the cache reuses the memory of earlier calls, unless another call is using it."""
        return self._memory.new_cache((None,) * self.config.num_hidden_layers, 0, reserve)

    def release(self, cache: Cache) -> None:
        """See `DFlashHead`; makes the memory available to later calls."""
        self._memory.release(cache)

    def draft(
        self, roots: Tensor, padding: PromptPadding | None, shape: TreeShape, size: int, cache: TreeCache,
        embedding: nn.Module,
    ) -> Draft | None:  # fmt: skip
        """See `BaseBlockHead`; None for a `Budget` that stops early, or an empty cache or one without kept memory."""
        if not self._drafts(shape, roots, cache):
            return None
        rows, begin = len(roots), cache.start
        cache.store.make_room(begin + size)
        plan = self._plan(shape, size, begin + size, cache, embedding)
        key = self._key(plan, rows)
        step = self._growths.step_for(key, self._memory.moves, lambda: BlockGrowth(plan, cache.layers, rows))
        assert isinstance(step, BlockGrowth)
        lengths = cache.lengths_on(self.device, rows)
        first = lengths if padding is None else lengths - padding.counts
        step.fill(roots, first, lengths, committed_slots(lengths, begin, padding), begin)
        log_probs, tokens, parents = (output.clone() for output in self._growths.run(step))
        return Draft(TokenTree(tokens, parents, max_depth=_depth(shape)), log_probs)

    def draft_behind(
        self, step: AcceptedStep, shape: TreeShape, size: int, cache: TreeCache, embedding: nn.Module
    ) -> Draft | None:
        """See `BaseBlockHead`; None in the cases of `draft`, or if the step is wider than any captured width."""
        if not self._drafts(shape, step.roots, cache):
            return None
        states = step.features.of(self.feature_layers)
        rows, num_states, width = len(states), states.shape[1], step.path.shape[1]
        if max(num_states, width) > CAPTURED_WIDTHS[-1]:
            return None
        num_states, width, begin = width_for(num_states), width_for(width), cache.start
        cache.store.make_room(begin + width + size)
        plan = self._plan(shape, size, begin + width + size, cache, embedding)
        key = *self._key(plan, rows), num_states, width
        sizes = num_states, width
        moves = self._memory.moves
        captured = self._steps.step_for(key, moves, lambda: BlockAdvance(plan, cache.layers, states, sizes))
        assert isinstance(captured, BlockAdvance)
        captured.fill(step, states, cache.lengths_on(self.device, rows))
        integers, log_probs = (output.clone() for output in self._steps.run(captured))
        cache.append_unread(width, integers[:, -1])
        nodes = log_probs.shape[1]
        tree = TokenTree(integers[:, :nodes], integers[:, nodes:-1], max_depth=_depth(shape))
        return Draft(tree, log_probs)

    def _drafts(self, shape: TreeShape, roots: Tensor, cache: TreeCache) -> bool:
        """Whether a graph can draft this tree."""
        # whether to stop at an unlikely level is decided on the host, which a graph cannot do
        stops_early = isinstance(shape, Budget) and shape.min_level_probability > 0
        ready = self._memory.owns(cache) and cache.layers[0].is_initialized
        return ready and not stops_early and roots.device == self.device

    def _plan(self, shape: TreeShape, size: int, end: int, cache: TreeCache, embedding: nn.Module) -> BlockPlan:
        return BlockPlan(self._inner, self._grow, embedding, shape, size, min(bucket_of(end), cache.capacity))

    def _key(self, plan: BlockPlan, rows: int) -> tuple[int, ...]:
        """Return what distinguishes shapes: rows, nodes, bucket, steps, children, block size and static tree."""
        shape = plan.shape
        if isinstance(shape, StaticLevels):
            number = self._static.setdefault(shape.choices, len(self._static)) + 1
            sizes = (1 + len(shape.choices), len(shape.steps), shape.top_k, number)
        else:
            sizes = (shape.num_nodes, shape.num_steps, shape.top_k, 0)
        return rows, sizes[0], plan.bucket, *sizes[1:], plan.size


def _depth(shape: TreeShape) -> int:
    return len(shape.steps) if isinstance(shape, StaticLevels) else shape.num_steps
