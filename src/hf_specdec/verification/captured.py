"""A verify forward and greedy acceptance as device graphs, captured for each shape, see `graphs.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import Cache

from hf_specdec.acceptance.accepted import Accepted, Transfer
from hf_specdec.acceptance.paths import settle
from hf_specdec.acceptance.rules import greedy, match
from hf_specdec.acceptance.transcript import Transcript
from hf_specdec.trees.tree import ROOT_PARENT, TokenTree
from hf_specdec.verification import device_attention
from hf_specdec.verification.cache import TreeCache
from hf_specdec.verification.device_attention import DeviceContext, visible_in_tree
from hf_specdec.verification.graph_backends import GraphBackend
from hf_specdec.verification.graphs import CAPTURED_WIDTHS, Bucket, Graphed, Input, KeptMemory, Key, width_for
from hf_specdec.verification.masks import UNBOUNDED, MaskLayout, TreeInputs, bucket_masks
from hf_specdec.verification.memory import kept_rows
from hf_specdec.verification.recurrence import Branches
from hf_specdec.verification.runners import Runner
from hf_specdec.verification.tree_attention import AttentionContext


class GraphForward(KeptMemory, Runner):
    """Runner that captures a verify forward once per shape and replays it.

    Only one `generate()` call at a time uses the memory kept for graphs. Concurrent calls get a separate cache and run
    without graphs.

    Args:
        inner: The forward to capture.
        backend: Graph backend of the model's device.
        has_masks: Whether layers attend with masks although the device has kernels that need none.

    Attributes:
        has_masks: Whether they did so in the last forward.
    """

    widths, grows = CAPTURED_WIDTHS, False

    def __init__(self, inner: Runner, backend: GraphBackend, *, has_masks: bool = False) -> None:
        super().__init__(backend)
        self._keeps_masks = self.has_masks = has_masks
        self._inner, self.layers, self.copies_weights = inner, inner.layers, inner.copies_weights
        self._graphed = Graphed(backend, "The forward")
        # the padding and positions of the current call, and what `_rows` makes of them
        self._constants: tuple[object, object, tuple[Tensor, Tensor, Tensor] | None] = (None, None, None)

    def captured_keys(self) -> list[Key]:
        """Return batch size, width, with masks bucket, and in exact calls "exact", of each captured shape."""
        return self._graphed.captured_keys()

    @property
    def inexact(self) -> str:  # type: ignore[override]
        """See `Runner`: the number of masked slots changes as the text grows, and with it the attention's kernels."""
        return "graphs of it attend with masks (the log says why)" if self.has_masks else self._inner.inexact

    def num_rows(self, active: int) -> int:
        """Return a power of two: every number of rows needs captures."""
        return kept_rows(active)

    def can_run(self, num_nodes: int, cache: Cache) -> bool:
        """Whether the cache is the one that graphs write to and a captured width is large enough."""
        return self.owns(cache) and num_nodes <= CAPTURED_WIDTHS[-1]

    def __call__(
        self, tokens: Tensor, positions: Tensor, forward: AttentionContext, cache: Cache
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Run the inner forward without a graph, because graphs compute masks and positions themselves."""
        return self._inner(tokens, positions, forward, cache)

    def verify(self, inputs: TreeInputs, cache: Cache, known: int = 0) -> tuple[Tensor, dict[int, Tensor]]:
        """See `Runner`; the returned tensors are copies, and all nodes must be new."""
        assert isinstance(cache, TreeCache)
        assert not known
        num_nodes, kinds = inputs.tree.num_nodes, [kind for _, kind, _ in inputs.layout.layers]
        width = max(width_for(num_nodes), inputs.width)
        cache.store.make_room(inputs.start + width)
        self.has_masks = self._keeps_masks or not device_attention.needs_no_masks(cache.buffers, kinds)
        captures = self._graphed.num_captures
        logits, *states = self._run(inputs, cache, width)
        if self._graphed.num_captures != captures and not inputs.width:
            self._capture_others(inputs, cache)
            logits, *states = self._run(inputs, cache, width)  # again, because others have written to the same slots
        for layer in cache.layers:
            if layer.is_initialized:
                layer.end = inputs.start + num_nodes
        states = [state[:, :num_nodes] for state in states]
        return logits[:, :num_nodes], dict(zip(sorted(self.layers), states, strict=True))

    def _capture_others(self, inputs: TreeInputs, cache: TreeCache) -> None:
        """Capture the remaining widths once three are: then a method varies them, and will need these as well."""
        rows, fitting = len(inputs.tree.tokens), [w for w in CAPTURED_WIDTHS if inputs.start + w <= cache.capacity]
        keys = {w: (rows, w, *Bucket(cache, w, has_masks=self.has_masks).key) for w in fitting}
        missing = [w for w in fitting if keys[w] not in self._graphed.captured_keys()]
        if len(missing) <= len(CAPTURED_WIDTHS) - 3:
            for width in reversed(missing):
                self._run(inputs, cache, width, at_once=True)

    def _run(self, inputs: TreeInputs, cache: TreeCache, width: int, *, at_once: bool = False) -> list[Tensor]:
        """Run the first nodes of a tree, padded to a width."""
        rows, bucket = len(inputs.tree.tokens), Bucket(cache, width, has_masks=self.has_masks)
        padding, positions, constants = self._constants
        if constants is None or padding is not inputs.padding or positions is not inputs.positions:
            constants = _rows(inputs)
            self._constants = inputs.padding, inputs.positions, constants
        valid, left, offsets = constants
        return self._graphed(
            (rows, width, *bucket.key, *(("exact",) if inputs.width else ())),
            self._function(inputs.layout, bucket, fixed=inputs.width > 0),
            Input(inputs.tree.tokens[:, :width], width),
            Input(inputs.tree.parents.expand(rows, -1)[:, :width], width, ROOT_PARENT),
            Input(inputs.lengths),
            Input(valid, bucket.size, fill=True, is_constant=True),
            Input(left, is_constant=True),
            Input(offsets, is_constant=True),
            Input(UNBOUNDED if inputs.ceiling is None else inputs.ceiling),
            moves=self.moves,
            at_once=at_once,
        )

    def _function(self, layout: MaskLayout, bucket: Bucket, *, fixed: bool) -> Callable[..., Sequence[Tensor]]:
        """Return the function to capture: the inner forward, with positions and what its layers attend to.

        `fixed`: see `VisibleKeys`.
        """
        inner = self._inner

        def verify(
            tokens: Tensor, parents: Tensor, lengths: Tensor, valid: Tensor, left: Tensor, offsets: Tensor,
            ceiling: Tensor,
        ) -> Sequence[Tensor]:  # fmt: skip
            slots, tree = bucket.behind(lengths), TokenTree(tokens, parents)
            ancestors = tree.ancestor_mask()
            branches = Branches(parents, ancestors) if bucket.states else None
            seen = layout, ancestors, lengths, slots.free, valid, left
            context = (
                AttentionContext(bucket_masks(*seen), branches=branches)
                if slots.has_masks
                else DeviceContext(visible_in_tree(*seen, fixed=fixed), branches)
            )
            positions = ((offsets + lengths)[:, None] + ancestors.sum(-1) - 1).clamp(max=ceiling)
            logits, states = inner(tokens, positions, context, slots.cache(0, tokens.shape[1]))
            return [logits, *(states[layer] for layer in sorted(inner.layers))]

        return verify


def _rows(inputs: TreeInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Return each row's constants of a call: valid prompt slots, padding at the left, position of the first slot."""
    padding, lengths = inputs.padding, inputs.lengths
    offsets = (inputs.positions.last + 1 - inputs.positions.num_slots).expand_as(lengths)
    if padding is None:
        return lengths.new_ones(len(lengths), 0, dtype=torch.bool), torch.zeros_like(lengths), offsets
    return padding.valid, padding.left, offsets


class CapturedGreedy:
    """Greedy acceptance (`rules.greedy`) in one launch instead of about sixty small kernels.

    Args:
        backend: Graph backend of the device that holds the logits.
    """

    decides_on_device = True

    def __init__(self, backend: GraphBackend) -> None:
        self._graphed = Graphed(backend, "Acceptance")

    def __call__(self, tree: TokenTree, logits: Tensor, transcript: Transcript) -> Accepted:
        """Return the accepted paths, see `rules.greedy`, for logits `[B, N, V]`.

        No graph is used if the host must choose or keep scores (see `Transcript.decides_on`), if scores are processed
        or if the tree is wider than any captured width.
        """
        rows, num_nodes = tree.tokens.shape
        on_device = transcript.decides_on(logits.device) and not transcript.processes_scores
        if not on_device or num_nodes > CAPTURED_WIDTHS[-1]:
            return greedy(tree, logits, transcript)
        account, width = transcript.account_on(logits.device), CAPTURED_WIDTHS[-1]  # of any width: one graph
        ends, eos = account.ends, account.eos

        def accept(tokens: Tensor, parents: Tensor, choices: Tensor, remaining: Tensor) -> Sequence[Tensor]:
            kept, num_drafted, remaining = match(TokenTree(tokens, parents), choices, remaining, eos, ends)
            report = torch.cat([kept.path, kept.tokens, num_drafted[:, None]], dim=-1)
            return [report, kept.next_token, remaining]

        report, next_token, remaining = self._graphed(
            (rows, width, ends),
            accept,
            Input(tree.tokens, width),
            Input(tree.parents.expand(rows, -1), width, ROOT_PARENT),
            Input(logits.max(-1).indices, width),
            Input(account.remaining),
        )
        path, tokens, num_drafted = report.split([width, width, 1], dim=1)
        transfer, longest = Transfer(path, tokens, num_drafted, joined=report), tree.depth_bound + 1
        unread = Accepted(path[:, :longest], tokens[:, :longest], next_token)
        return settle(unread, num_drafted[:, 0], remaining, transcript, transfer)
