"""Drafting from the target's features: EAGLE heads, MTP modules and block heads.

Entry t of a head's cache belongs to the target's feature of token x[t]; an EAGLE head combines it with the embedding
of x[t+1]. Entries made from the target's features are committed; those appended while a tree grows are rolled back.

What a kind of head computes are functions of tensors (`HeadFunctions`): read new entries, and draft behind them. The
session calls them as they are, or captured as device graphs, alone or both in one graph (`DraftGraphs`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from hf_specdec.acceptance.accepted import Accepted
from hf_specdec.drafters.base import DraftContext
from hf_specdec.drafters.launching import LaunchingSession, features_of
from hf_specdec.heads.stages import Stages
from hf_specdec.trees.draft import Budget, Draft
from hf_specdec.trees.growth import StaticLevels, TreeShape, choices_within
from hf_specdec.trees.tree import TokenTree
from hf_specdec.validation import Choice
from hf_specdec.verification import device_attention
from hf_specdec.verification.cache import TreeCache
from hf_specdec.verification.device_attention import MOST_APPENDED, Mask, VisibleKeys, words_of
from hf_specdec.verification.features import PromptPadding, Window, shifted_padding
from hf_specdec.verification.graph_backends import GraphBackend
from hf_specdec.verification.graphs import (
    CAPTURED_WIDTHS,
    Appended,
    Bucket,
    BucketSlots,
    Graphed,
    Input,
    KeptMemory,
    Key,
    Slots,
    width_for,
)
from hf_specdec.verification.masks import committed_slots
from hf_specdec.verification.step import Step

RESERVED_SLOTS = 512
"""Free slots kept after the text in a head's cache."""


@dataclass(frozen=True, slots=True)
class LayerLimits:
    """The largest tree that is drafted in one generation, and the tokens that the head sees."""

    budget: Budget
    choices: tuple[Choice, ...] | None  # the paths of a static tree; None: the tree is dynamic
    window: Window | None = None  # tokens that the head attends to; None: all


@dataclass(frozen=True, slots=True)
class Entries:
    """Committed text that a draft layer has not read yet; an entry combines a feature with the token after it."""

    features: Tensor  # [B, T, layers * D] the target's features at T tokens
    tokens: Tensor  # [B, T] the token after each of these
    path: Tensor  # [B, T] indices of the valid entries, in order; -1 beyond
    nodes: Sequence[Sequence[int]] | None  # `path` on the host, unpadded; None if the host has not read the step yet

    @property
    def counts(self) -> list[int]:
        """Number of valid entries in each row; `nodes` must not be None."""
        assert self.nodes is not None
        return [len(row) for row in self.nodes]

    @property
    def valid(self) -> Tensor:
        """`[B, T]` bool, True at the valid entries."""
        indices = torch.arange(self.tokens.shape[1], dtype=torch.long, device=self.path.device)
        return (self.path[:, :, None] == indices).any(1)

    @classmethod
    def joined(cls, parts: Sequence[Entries]) -> Entries:
        """Concatenate the entries of several steps along T."""
        if len(parts) == 1:
            return parts[0]
        offsets = [sum(part.tokens.shape[1] for part in parts[:index]) for index in range(len(parts))]
        moved = [
            torch.where(part.path >= 0, part.path + offset, -1) for part, offset in zip(parts, offsets, strict=True)
        ]
        path, width = torch.cat(moved, dim=-1), offsets[-1] + parts[-1].tokens.shape[1]
        path = torch.where(path >= 0, path, width).sort(dim=-1).values
        nodes = None
        if all(part.nodes is not None for part in parts):
            nodes = [
                [offset + n for part, offset in zip(parts, offsets, strict=True) for n in (part.nodes or ())[row]]
                for row in range(len(path))
            ]
        return cls(
            torch.cat([part.features for part in parts], dim=1),
            torch.cat([part.tokens for part in parts], dim=1),
            torch.where(path == width, -1, path),
            nodes,
        )


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """A tree to draft, and the number of cache entries that drafting it appends."""

    shape: TreeShape
    num_entries: int

    @property
    def key(self) -> tuple[Hashable, ...]:
        """Plans with equal keys share a graph."""
        return self.shape.choices if isinstance(self.shape, StaticLevels) else self.shape, self.num_entries

    @property
    def max_depth(self) -> int:
        """Depth of the tree."""
        return len(self.shape.steps) if isinstance(self.shape, StaticLevels) else self.shape.num_steps

    @property
    def stops_early(self) -> bool:
        """Whether the host decides at each level if to go on."""
        return isinstance(self.shape, Budget) and self.shape.min_level_probability > 0


@dataclass(frozen=True)
class Committed:
    """The committed entries of a head's cache, and the slots behind them to which new entries are appended."""

    slots: Slots
    lengths: Tensor  # [B] entries of each row, including padding
    padding: PromptPadding | None

    @property
    def first_positions(self) -> Tensor:
        """Position `[B, 1]` of the first entry behind them."""
        return (self.lengths if self.padding is None else self.lengths - self.padding.counts)[:, None]

    @cached_property
    def entries(self) -> Tensor:
        """`[B, size]` bool, the slots that hold an entry; the padding of a prompt comes with its entries."""
        size = self.slots.size
        return committed_slots(self.lengths, size, self.padding if size else None)

    def mask(self, places: Tensor, visible: Tensor, window: int | None) -> Mask:
        """Return which entries new ones at `places` `[B, T]` of their rows see.

        Bool `visible` `[B or none, T, A]`: which of the A entries appended since the last commit they see.
        """
        if isinstance(self.slots, BucketSlots) and not self.slots.has_masks:
            assert self.padding is not None
            words = words_of(visible).expand(places.shape)
            fields = self.slots.free[0], places, words, self.padding.valid, self.padding.left, visible.shape[-1]
            return VisibleKeys(self.lengths, *fields, window=window or 0)
        seen = self.entries[:, None].expand(-1, places.shape[1], -1)
        if window is not None:
            columns = torch.arange(self.slots.size, dtype=torch.long, device=places.device)
            seen = seen & (places[:, :, None] - columns < window)
        return self.slots.mask(seen, visible)


class HeadFunctions(ABC):
    """What a kind of head computes, as functions of tensors. They hold nothing of a call and never read the device."""

    @abstractmethod
    def plan(self, budget: Budget, levels: StaticLevels | None, largest: Budget) -> DraftPlan:
        """Return the plan of a tree: that of `levels` if it is static, else within `budget`.

        `largest` is the budget of the largest tree of the call.
        """

    @abstractmethod
    def read_prompt(self, prompt: Entries, padding: PromptPadding | None, cache: TreeCache) -> Tensor:
        """Append a prompt's entries to an empty cache; `padding` is that of the entries. Returns as `read`."""

    @abstractmethod
    def read(self, committed: Committed, features: Tensor, tokens: Tensor, valid: Tensor) -> Tensor:
        """Append the entries of accepted tokens; return the head's features `[B, 1, D]` of each row's last one.

        Args:
            committed: The entries so far.
            features: `[B, T, layers * D]` the target's features.
            tokens: `[B, T]` the token after each.
            valid: `[B, T]` bool, False where a row has no entry.
        """

    @abstractmethod
    def draft(self, committed: Committed, roots: Tensor, last: Tensor, plan: DraftPlan) -> Draft:
        """Draft a tree behind the committed entries; its own entries are appended for the caller to roll back.

        `last` `[B, 1, D]` comes from `read`.
        """


class DraftGraphs:
    """A head's functions as graphs, and the cache memory that they use. Concurrent calls draft without graphs.

    Args:
        backend: Graph backend of the head's device.
    """

    def __init__(self, backend: GraphBackend) -> None:
        self.memory = KeptMemory(backend)
        self.reads, self.drafts = Graphed(backend, "The draft layer"), Graphed(backend, "Tree growth")
        self.steps = Graphed(backend, "The drafting step")

    def captured_keys(self) -> list[Key]:
        """Return the keys of all captured shapes."""
        return [key for graphed in (self.reads, self.drafts, self.steps) for key in graphed.captured_keys()]


@dataclass(frozen=True, slots=True)
class HeadProgram:
    """How a drafter's head runs in compiled or captured form."""

    stages: Stages
    graphs: DraftGraphs | None  # None if the device has none


class FeatureSession(LaunchingSession):
    """A session that reads the target's features of the committed tokens into a cache, once per token.

    With a window W (`LayerLimits.window`), only the first `SINKS` and the last W tokens of a longer prompt are read.
    When the longest row of the cache then exceeds `SINKS + W` slots by more than `Window.spare`, every row keeps its
    first `SINKS` and its last W tokens; this is done between two steps. A new entry attends to all entries that the
    cache holds. Keys keep the rotation of their true position, and new entries continue to count from there.

    `graphs` are the functions as graphs, or None; `context` must include the target's features of the prompt.
    """

    def __init__(
        self, functions: HeadFunctions, head: Any, graphs: DraftGraphs | None, context: DraftContext,
        limits: LayerLimits,
    ) -> None:  # fmt: skip
        if context.features is None:
            raise ValueError(
                f"A session of {type(head).__name__} needs the target's features of the prompt, got none."
            )
        super().__init__(context.roots)
        self._functions, self._limits, self._feature_layers = functions, limits, head.feature_layers
        self._needs_masks: bool = head.needs_masks
        self._cache: TreeCache = head.new_cache(RESERVED_SLOTS)
        self._graphs = graphs if head.device == context.roots.device else None
        if self._graphs is not None:
            self._cache = self._graphs.memory.new_cache((None,) * len(self._cache.layers), 0, RESERVED_SLOTS)
        self._static: dict[Budget, StaticLevels] = {}
        self._pending: list[Entries] = []
        self._known_lengths: list[int] = []  # cached tokens before the step that the host has not read
        self._last: Tensor | None = None  # see `HeadFunctions.read`
        self._is_padded = context.padding is not None
        self._prompt: Entries | None
        self._prompt, self._padding = prompt_entries(context, head.feature_layers, limits.window)
        self._constants: tuple[object, tuple[Tensor, Tensor] | None] = (None, None)
        self._indices = context.roots.new_empty(0)  # 0, 1, 2, ...

    def _follow(self, step: Step) -> None:
        kept, states = step.acceptance, features_of(step).of(self._feature_layers)
        if kept.is_read:
            nodes: list[range] | None = [range(count) for count in kept.counts]
        else:
            nodes, unread = None, [*([] if self._prompt is None else [self._prompt]), *self._pending]
            lengths = self._cache.lengths or [0] * len(kept.path)
            for part in unread:
                lengths = [length + count for length, count in zip(lengths, part.counts, strict=True)]
            self._known_lengths = lengths
        width = kept.path.shape[1]
        if len(self._indices) < width:
            self._indices = torch.arange(2 * width, dtype=torch.long, device=kept.path.device)
        path = torch.where(kept.path < 0, kept.path, self._indices[:width])
        self._pending.append(Entries(_at_path(states, kept.path), kept.tokens.clamp(min=0), path, nodes))

    def _settle(self, acceptance: Accepted) -> None:
        known = zip(self._known_lengths, acceptance.counts, strict=True)
        self._cache.correct_lengths([length + count for length, count in known])

    def observe(self, step: Step) -> None:
        """See `LaunchingSession.observe`. With a window, two more things keep the memory bounded.

        If more than `window.spare` entries are pending, they are read, because `hybrid` may not query the head for a
        long time. If the cache exceeds the window by more than `window.spare`, the tokens outside of it are dropped.
        """
        super().observe(step)
        window = self._limits.window
        if window is None:
            return
        if sum(part.tokens.shape[1] for part in self._pending) > window.spare:
            self._read_unread()
        if self._cache.start > window.size + window.spare:  # keep the tokens within it, without reading the device
            lengths = self._lengths
            slots, valid = window.choose(committed_slots(lengths, self._cache.start, self._padding))
            totals = lengths if self._padding is None else lengths - self._padding.counts
            self._cache.keep(slots)
            self._padding = shifted_padding(valid, totals)

    def close(self) -> None:
        """Release the cache."""
        if self._graphs is not None:
            self._graphs.memory.release(self._cache)

    @property
    def _lengths(self) -> Tensor:
        return self._cache.lengths_on(self._roots.device, len(self._roots))

    def _read_unread(self) -> None:
        if self._prompt is not None:
            prompt, self._prompt = self._prompt, None
            self._last = self._functions.read_prompt(prompt, self._padding, self._cache)
            self._commit(prompt)
        if self._pending:
            entries, self._pending = Entries.joined(self._pending), []
            self._last = self._read(entries)
            self._commit(entries)

    def _commit(self, entries: Entries) -> None:
        if entries.nodes is None:
            self._cache.commit_unread(entries.path)
        else:
            self._cache.commit(entries.nodes)

    def _plan(self, budget: Budget) -> DraftPlan:
        levels, choices = None, self._limits.choices
        budget = budget.within(self._limits.budget)
        if choices is not None:
            levels = self._static.get(budget) or StaticLevels.of(choices_within(choices, budget), self._roots.device)
            self._static[budget] = levels
        return self._functions.plan(budget, levels, self._limits.budget)

    # ---------------------------------------------------------------------------------------------- read and draft

    def _read(self, entries: Entries) -> Tensor:
        (rows, width), graphs, functions = entries.tokens.shape, self._graphs, self._functions
        inputs = entries.features, entries.tokens, entries.valid
        if graphs is None or width > CAPTURED_WIDTHS[-1] or not self._has_memory:
            return functions.read(self._committed(), *inputs)
        width = CAPTURED_WIDTHS[-1]
        bucket = self._bucket(width, 0)

        def read(features: Tensor, tokens: Tensor, valid: Tensor, *committed: Tensor) -> Sequence[Tensor]:
            return [functions.read(_captured(bucket, *committed), features, tokens, valid)]

        padded = (Input(tensor, width) for tensor in inputs)
        key = rows, width, *bucket.key
        (last,) = graphs.reads(key, read, *padded, *self._inputs_of(bucket), moves=graphs.memory.moves)
        return last

    def _draft(self, budget: Budget) -> Draft:
        self._read_unread()
        assert self._last is not None
        graphs, functions, plan, rows = self._graphs, self._functions, self._plan(budget), len(self._roots)
        if graphs is None or plan.stops_early or not self._has_memory:
            draft = functions.draft(self._committed(), self._roots, self._last, plan)
            self._cache.rollback()
            return draft
        bucket = self._bucket(0, plan.num_entries)

        def grow(roots: Tensor, last: Tensor, *committed: Tensor) -> Sequence[Tensor]:
            return _outputs(functions.draft(_captured(bucket, *committed), roots, last, plan))

        inputs = Input(self._roots), Input(self._last), *self._inputs_of(bucket)
        results = graphs.drafts((rows, *bucket.key, *plan.key), grow, *inputs, moves=graphs.memory.moves)
        return _drafted(results, plan)

    def launch(self, step: Step, budget: Budget) -> Sequence[Tensor]:
        """See `LaunchingSession.launch`; with graphs, one graph reads the step and drafts."""
        graphs, functions, plan, kept = self._graphs, self._functions, self._plan(budget), step.acceptance
        rows, num_states = len(kept.path), CAPTURED_WIDTHS[-1]
        # nodes of the path: a merged tree may be deeper than the head's own; entries of one row cost next to nothing
        width = num_states if rows == 1 else width_for(plan.max_depth + 1)
        if (
            graphs is None
            or self._prompt is not None
            or self._pending
            or plan.stops_early
            or step.draft.tree.num_nodes > num_states
            or kept.path.shape[1] > width
            or not self._has_memory
        ):
            return super().launch(step, budget)
        bucket = self._bucket(width, plan.num_entries)
        layers = [features_of(step).of([layer]) for layer in self._feature_layers]
        num_layers = len(layers)

        def advance(path: Tensor, tokens: Tensor, roots: Tensor, *others: Tensor) -> Sequence[Tensor]:
            before, accepted = _captured(bucket, *others[num_layers:]), path >= 0
            features = torch.cat([_at_path(states, path) for states in others[:num_layers]], dim=-1)
            last = functions.read(before, features, tokens.clamp(min=0), accepted)
            assert isinstance(before.slots, BucketSlots)
            before.slots.compact(before.lengths, accepted)
            lengths = before.lengths + accepted.sum(-1)
            after = Committed(bucket.behind(lengths), lengths, before.padding)
            outputs = _outputs(functions.draft(after, roots, last, plan))
            # one copy takes the features and the log-probabilities along; the conversion is exact
            wide = torch.promote_types(last.dtype, outputs[-1].dtype)
            return [*outputs, lengths, last.to(wide)]

        lengths = list(self._cache.lengths)
        *results, grown, last = graphs.steps(
            (rows, num_states, width, *bucket.key, *plan.key),
            advance,
            Input(kept.path, width, -1),
            Input(kept.tokens, width),
            Input(kept.next_token),
            *(Input(states, num_states) for states in layers),
            *self._inputs_of(bucket),
            moves=graphs.memory.moves,
        )
        self._cache.append_unread(width, grown)
        self._known_lengths, self._roots, self._last = lengths, kept.next_token, last
        self._note_launched(budget, _drafted(results, plan))
        return ()

    @property
    def _has_memory(self) -> bool:
        """Whether graphs can use the cache: it is the one with the kept memory, which the first forward allocates."""
        assert self._graphs is not None
        return self._graphs.memory.owns(self._cache) and self._cache.layers[0].is_initialized

    def _bucket(self, num_read: int, num_drafted: int) -> Bucket:
        """Make room for entries that are read, and those of a draft; return where a graph appends them."""
        self._cache.store.make_room(self._cache.start + num_read + num_drafted)
        has_masks = (
            self._needs_masks
            or max(num_read, num_drafted) > MOST_APPENDED
            or not device_attention.needs_no_masks(self._cache.buffers, ("full", "sliding"))
        )
        return Bucket(self._cache, num_read + num_drafted, has_masks=has_masks)

    def _committed(self) -> Committed:
        return Committed(Appended(self._cache), self._lengths, self._padding)

    def _inputs_of(self, bucket: Bucket) -> Sequence[Input]:
        """Return the inputs for `_captured`; the padding rarely changes."""
        padding, constants = self._constants
        if constants is None or padding is not self._padding:
            lengths, given = self._lengths, self._padding
            nothing = lengths.new_ones(len(lengths), 0, dtype=torch.bool), torch.zeros_like(lengths)
            constants = nothing if given is None else (given.valid, given.counts)
            self._constants = given, constants
        valid, counts = constants
        return (
            Input(self._lengths), Input(valid, bucket.size, fill=True, is_constant=True),
            Input(counts, is_constant=True),
        )  # fmt: skip


def _captured(bucket: Bucket, lengths: Tensor, valid: Tensor, counts: Tensor) -> Committed:
    return Committed(bucket.behind(lengths), lengths, PromptPadding(valid, counts, counts))


def _at_path(states: Tensor, path: Tensor) -> Tensor:
    """Return the hidden states `[B, P, D]` at the nodes of paths `[B, P]`; arbitrary beyond a path."""
    index = path.clamp(min=0).to(states.device)[:, :, None].expand(-1, -1, states.shape[-1])
    return states.gather(1, index)


def _outputs(draft: Draft) -> list[Tensor]:
    assert draft.log_probs is not None
    return [draft.tree.tokens, draft.tree.parents.expand(draft.tree.tokens.shape), draft.log_probs]


def _drafted(outputs: Sequence[Tensor], plan: DraftPlan) -> Draft:
    tokens, parents, log_probs = outputs
    return Draft(TokenTree(tokens, parents, max_depth=plan.max_depth), log_probs)


def prompt_entries(
    context: DraftContext, layers: Sequence[int], window: Window | None
) -> tuple[Entries, PromptPadding | None]:
    """Return a prompt's entries within a window, and their padding; `layers` are the hidden states to read.

    Tokens in a cache passed by the user have no features, virtual tokens (prompt tuning) have no ids: both are left
    out. Without token ids (`inputs_embeds`), the entries have only the root's.
    """
    assert context.features is not None
    features, chosen, padding = context.features.of(layers), context.features.chosen, context.padding
    tokens = torch.cat([context.input_ids[:, 1:], context.roots[:, None]], dim=-1)
    rows, device, has_ids = len(tokens), tokens.device, context.input_ids.shape[1] > 0
    if chosen is None:
        width = min(features.shape[1], tokens.shape[1]) if has_ids else features.shape[1]
        features, tokens = features[:, -width:], tokens[:, -width:]
        padding = None if padding is None else padding.last(width)
        valid = torch.ones(rows, width, dtype=torch.bool, device=device) if padding is None else padding.valid
        slots = torch.arange(width, dtype=torch.long, device=device).expand(rows, -1)
    else:  # `Target.prefill` has kept only a part, perhaps for another drafter
        width, valid, slots = chosen.num_slots, chosen.valid, chosen.slots
    is_cut = window is not None and len(slots[0]) > window.size
    if window is not None and is_cut:
        index, kept = window.choose(valid)
        features = features.gather(1, index.to(features.device)[:, :, None].expand(-1, -1, features.shape[-1]))
        slots, valid = slots.gather(1, index), kept
    if chosen is not None or is_cut:
        tokens = tokens.gather(1, slots) if has_ids else tokens
        counts = 0 if padding is None else padding.counts
        totals = torch.full((rows,), width, dtype=torch.long, device=device) - counts
        padding = shifted_padding(valid, totals)
    num = slots.shape[1]
    path = torch.arange(num, dtype=torch.long, device=device).expand(rows, -1)
    return Entries(features, tokens, path, [range(num)] * rows), padding
