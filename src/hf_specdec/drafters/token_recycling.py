"""Token recycling: store the target's best candidates after each token and draft them when the token recurs.

Source: Luo et al., "Turning Trash into Treasure" (https://arxiv.org/abs/2408.08696). The best candidates at every
verified node are stored in a table, even if the node is rejected. Differences: candidates keep their probabilities,
so the tree grows along likely paths and every node has a confidence; the last two tokens are looked up before the last
one alone (as in STAND, https://arxiv.org/abs/2506.04708); nothing is drafted after unknown tokens; entries of the
accepted path are written last. Everything stays on the device.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from dataclasses import replace
from math import exp, log
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.atomic import whole_file
from hf_specdec.config import ExecutionMode, SpeculativeConfig
from hf_specdec.drafters.base import (
    SIZES,
    Candidate,
    Candidates,
    CandidateSession,
    DraftContext,
    Drafter,
    DraftSession,
    DraftTarget,
    Needs,
)
from hf_specdec.drafters.launching import LaunchingSession
from hf_specdec.drafters.registry import register
from hf_specdec.errors import CheckpointFormatError, InvalidConfigError
from hf_specdec.records import checked_path, open_regular
from hf_specdec.trees.draft import Budget, Draft
from hf_specdec.trees.growth import Level, best_children, grow_dynamic, growable
from hf_specdec.trees.tree import ROOT_PARENT, TokenTree
from hf_specdec.validation import MAX_TOP_K, require_integer
from hf_specdec.verification.graph_backends import GRAPH_BACKENDS
from hf_specdec.verification.graphs import CAPTURED_WIDTHS, Graphed, Input
from hf_specdec.verification.memory import persistent_tensors
from hf_specdec.verification.model import execution_device, num_embedded_tokens
from hf_specdec.verification.step import Step

WIDTH = 8
"""Default number of candidates stored per token and per pair."""
PAIRS = 2**16
"""Default number of hash slots for pairs of tokens; a new pair overwrites the pair in its slot."""
MAX_PAIRS = 2**24
"""Maximum of `pairs`, for which the table takes about 1.7 GB with 8 candidates per slot."""
MAX_HEADER_BYTES = 64 * 1024
"""Maximum size of the safetensors header of a saved table, which lists only five tensors."""
MIN_LOG_PROB = -4.0
"""Candidates with lower log-probabilities are not merged with those of other drafters."""
PAIR_TRUST, TOKEN_TRUST = 0.8, 0.3
"""Ratio of acceptance rate to stored probability of candidates after a pair, and of those after a single token."""

MERGED_TOP_K = 4
"""Number of an entry's candidates that are merged with those of other drafters."""
HASH_MULTIPLIER = 1_000_003
"""A prime that distributes the pairs over the hash slots."""
FADING = 0.95
"""Factor for all stored probabilities when the target's weights change: an entry that is not written again loses half
in 14 updates. Updates of a trainer are small; after a large one, the trust in the source falls within one answer."""
NO_PAIR, UNKNOWN_PAIR = -1, -2
"""Keys of an empty slot, and of a token whose predecessor is unknown; they differ, so that they never match."""


@register("token_recycling")
class TokenRecyclingDrafter(Drafter):
    """Drafts from a table of the tokens that the target found most likely after each token. Works with any model.

    The table is kept between calls; it affects the speed, never the output. Config fields: `num_draft_tokens` (default
    8), `num_steps` (4), `top_k` (4, at most `width`). `tree` is rejected.

    Args:
        width: Candidates stored per token and per pair, 1 to 1024.
        pairs: Hash slots for pairs of tokens, 1 to 2**24.
        reads_prompt: Also learn from the prompt, which requires the logits of all its positions.

    Raises:
        InvalidConfigError: `width` or `pairs` is not an integer in its range.
    """

    accepts = SIZES
    tree_from = "what it has learned"
    defaults = Budget(8, 4, 4)

    def __init__(self, *, width: int = WIDTH, pairs: int = PAIRS, reads_prompt: bool = False) -> None:
        require_integer("width", width, 1, MAX_TOP_K)
        require_integer("pairs", pairs, 1, MAX_PAIRS)
        self._width, self._pairs = width, pairs
        self.needs = Needs(prompt_logits=reads_prompt)
        self._kept: list[RecycledTokens | None] = [None]  # a list, to be shared with captured copies
        self._program: Graphed | None = None

    @property
    def table(self) -> RecycledTokens | None:
        """The learned table; None before the drafter is bound to a model."""
        return self._kept[0]

    @table.setter
    def table(self, table: RecycledTokens | None) -> None:
        self._kept[0] = table

    def limits(self, config: SpeculativeConfig) -> Budget:
        """Return the size of the largest tree; trees are smaller while the table has few entries.

        Raises:
            InvalidConfigError: `top_k` exceeds the stored candidates.
        """
        limits = super().limits(config)
        if config.top_k is None:
            limits = replace(limits, top_k=min(limits.top_k, self._width))
        if limits.top_k > self._width:
            raise InvalidConfigError(
                f"`top_k` {limits.top_k} exceeds the {self._width} candidates stored per token.",
                "Add a TokenRecyclingDrafter with a larger `width` to the model.",
            )
        return growable(limits)

    def bind(self, model: PreTrainedModel) -> None:
        """Create an empty table, which replaces one for another vocabulary size or device; keep a table that fits."""
        size, device = num_embedded_tokens(model), execution_device(model)
        if self.table is None or self.table.vocab_size != size or self.table.keys.device != device:
            self.table = RecycledTokens(size, self._width, self._pairs, device)

    def reset(self) -> None:
        """Replace the table by an empty one; no effect before the drafter is bound to a model."""
        if self.table is not None:
            keys = self.table.keys
            self.table = RecycledTokens(self.table.vocab_size, self._width, self._pairs, keys.device)

    @property
    def copies_target_weights(self) -> bool:
        """False: it reads only the target's logits."""
        return False

    def fade(self) -> None:
        """Reduce the probabilities in the table."""
        if self.table is not None:
            self.table.fade()

    def state_dict(self) -> RecycledTokens | None:
        """Return a copy of the table; None before the drafter is bound to a model."""
        return None if self.table is None else self.table.clone()

    def load_state_dict(self, state: RecycledTokens | None) -> None:
        """Restore a table from `state_dict`; None clears the table."""
        if state is None:
            self.reset()
        else:
            self.table = state.clone()

    def save(self, path: str | Path) -> None:
        """Save the table as safetensors.

        Raises:
            InvalidConfigError: The drafter was never bound to a model, or the file cannot be written.
        """
        with whole_file(checked_path(path)) as partial:
            save_file({name: tensor.cpu() for name, tensor in self._learned().tensors().items()}, partial)

    def load(self, path: str | Path) -> None:
        """Overwrite the table with one written by `save`.

        Raises:
            InvalidConfigError: The drafter was never bound to a model.
            CheckpointFormatError: The file cannot be read, is not such a table, has other sizes or contains invalid
                values. The table is then unchanged.
        """
        mine = self._learned().tensors()
        with open_regular(checked_path(path, CheckpointFormatError), CheckpointFormatError) as file:
            header = os.fstat(file.fileno()).st_size - sum(tensor.nbytes for tensor in mine.values())
        if not 0 < header <= MAX_HEADER_BYTES:  # checked before parsing: a header could hold millions of names
            raise CheckpointFormatError(
                f"{path} is not a token-recycling table for this vocabulary, `width` and `pairs`: its size differs."
            )
        try:
            with safe_open(path, framework="pt") as stored:
                found = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        except Exception as error:  # safetensors raises many types for damaged files
            raise CheckpointFormatError(f"{path} is not a token-recycling table: {error}.") from error
        layout = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in mine.items()}
        if {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in found.items()} != layout:
            raise CheckpointFormatError(
                f"{path} is not a token-recycling table for this vocabulary, `width` and `pairs`.",
                f"Expected tensors {layout}.",
            )
        ids = (found["ids"], found["pair_ids"])
        if any(bool(((tensor < 0) | (tensor >= self._learned().vocab_size)).any()) for tensor in ids):
            raise CheckpointFormatError(f"{path} contains token ids outside this model's vocabulary.")
        if not all(bool((found[name] <= 0).all()) for name in ("log_probs", "pair_log_probs")):  # also False for NaN
            raise CheckpointFormatError(f"{path} contains values that are not log-probabilities.")
        for name, tensor in mine.items():
            tensor.copy_(found[name])

    def _learned(self) -> RecycledTokens:
        if self.table is None:
            raise InvalidConfigError(
                "This TokenRecyclingDrafter is not bound to a model.", "Call model.add_drafter(drafter) first."
            )
        return self.table

    def start(self, target: DraftTarget, context: DraftContext, config: SpeculativeConfig) -> DraftSession:
        """Start a session, which first learns from the prompt's logits if the context has them."""
        table = self._learned()
        on_host = table.keys.device.type == "cpu"
        return (_HostRecyclingSession if on_host else _RecyclingSession)(table, context, self._program)

    def compiled(self, model: PreTrainedModel, mode: ExecutionMode) -> TokenRecyclingDrafter:
        """Return a copy that shares the table and runs as device graphs; the drafter itself if the device has none."""
        device = execution_device(model)
        if device.type not in GRAPH_BACKENDS:
            return self
        other = copy.copy(self)
        other._program = Graphed(GRAPH_BACKENDS[device.type](device), "Token recycling")
        return other


class RecycledTokens:
    """Table of the best W candidates after each token and after pairs of tokens, with their log-probabilities.

    With `pairs` hash slots for pairs, it takes about `(V + pairs) * W * 12 + pairs * 8` bytes.
    """

    def __init__(self, vocab_size: int, width: int, pairs: int, device: torch.device) -> None:
        self.vocab_size, self.pairs, width = vocab_size, pairs, min(width, vocab_size)
        # one table for tokens, one for pairs; the extra last entry of each receives masked writes
        sizes = (vocab_size + 1, pairs + 1)
        with persistent_tensors():
            self.ids = [torch.zeros(size, width, dtype=torch.long, device=device) for size in sizes]
            self.log_probs = [
                torch.full((size, width), -torch.inf, dtype=torch.float32, device=device) for size in sizes
            ]
            self.keys = torch.full((pairs + 1,), NO_PAIR, dtype=torch.long, device=device)

    def clone(self) -> RecycledTokens:
        """Return an independent copy."""
        with persistent_tensors():
            return copy.deepcopy(self)

    def fade(self) -> None:
        """Multiply all stored probabilities by `FADING`, in place."""
        for log_probs in self.log_probs:
            log_probs.add_(log(FADING))

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by the names used in files."""
        return {
            "ids": self.ids[0], "log_probs": self.log_probs[0], "pair_ids": self.ids[1],
            "pair_log_probs": self.log_probs[1], "pair_keys": self.keys,
        }  # fmt: skip

    def look_up(self, previous: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probabilities (-inf: missing) and ids `[B, K, W]` after tokens `[B, K]` and their predecessors.

        The entry of the pair is used if there is one, otherwise the entry of the token alone, as for a predecessor -1.
        """
        key, slot = self._hash(previous, tokens)
        known = (self.keys[slot] == key)[..., None]
        log_probs = torch.where(known, self.log_probs[1][slot], self.log_probs[0][tokens])
        return log_probs, torch.where(known, self.ids[1][slot], self.ids[0][tokens])

    def row(self, previous: int, token: int) -> tuple[list[float], list[int], bool]:
        """Look up a pair on the CPU; return `MERGED_TOP_K` log-probabilities and ids, and whether it is known."""
        slot = (previous * HASH_MULTIPLIER + token) % self.pairs
        # numpy reads a single entry in a fifth of the time that torch takes
        paired = previous >= 0 and int(self.keys.numpy()[slot]) == previous * self.vocab_size + token
        table, row = (1, slot) if paired else (0, token)
        log_probs, ids = self.log_probs[table].numpy(), self.ids[table].numpy()
        return log_probs[row, :MERGED_TOP_K].tolist(), ids[row, :MERGED_TOP_K].tolist(), paired

    def candidates(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and ids `[..., W]` of the best tokens of raw logits `[..., V]`."""
        log_probs, ids = best_children(logits[..., : self.vocab_size], self.ids[0].shape[1])
        return log_probs.to(self.keys.device), ids.to(self.keys.device)

    def write(self, previous: Tensor, tokens: Tensor, log_probs: Tensor, ids: Tensor, kept: Tensor) -> None:
        """Store the candidates after tokens, and after the pairs with their predecessors; of equal ones, the last.

        Args:
            previous, tokens: `[B, K]`; `previous` is -1 if unknown.
            log_probs, ids: `[B, K, W]`, see `candidates`.
            kept: `[B, K]` bool; False entries are not written.
        """
        key, slot = self._hash(previous, tokens)
        paired = kept & (previous >= 0)
        slot = torch.where(paired, slot, self.pairs)
        rows = [_last_of_equal(torch.where(kept, tokens, self.vocab_size), self.vocab_size)]
        rows.append(_last_of_equal(slot, self.pairs))
        for table, places in enumerate(rows):
            self.ids[table][places], self.log_probs[table][places] = ids, log_probs
        self.keys[rows[1]] = torch.where(paired, key, NO_PAIR)

    def write_on_host(
        self, previous: Sequence[int], tokens: Sequence[int], log_probs: Tensor, ids: Tensor, rows: Sequence[int]
    ) -> None:
        """Do the same as `write` on the CPU: for so few entries, numpy takes a fraction of the time that torch takes.

        `rows` contains, for each of the K tokens, its row in `log_probs` and `ids` `[M, W]`.
        """
        pairs = [place for place, before in enumerate(previous) if before >= 0]
        keys = [previous[place] * self.vocab_size + tokens[place] for place in pairs]
        slots = [(previous[place] * HASH_MULTIPLIER + tokens[place]) % self.pairs for place in pairs]
        for tables, values in ((self.ids, ids), (self.log_probs, log_probs)):
            chosen = values.numpy()[rows]
            tables[0].numpy()[tokens], tables[1].numpy()[slots] = chosen, chosen[pairs]
        self.keys.numpy()[slots] = keys

    def _hash(self, previous: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the key and the slot of each pair; the key of an unknown predecessor matches no slot."""
        key = torch.where(previous >= 0, previous * self.vocab_size + tokens, UNKNOWN_PAIR)
        return key, (previous * HASH_MULTIPLIER + tokens) % self.pairs


def _last_of_equal(rows: Tensor, spare: int) -> Tensor:
    """Replace all but the last of equal `rows` `[B, K]` by `spare`, the highest row.

    A device writes several values of one row in any order.
    """
    places = torch.arange(rows.numel(), device=rows.device)
    last = torch.zeros(spare + 1, dtype=torch.long, device=rows.device)
    last.scatter_reduce_(0, rows.flatten(), places, "amax")
    return torch.where(last[rows] == places.view(rows.shape), rows, spare)


def learn(
    table: RecycledTokens, tree: TokenTree, log_probs: Tensor, ids: Tensor, path: Tensor, previous: Tensor
) -> Tensor:
    """Store the target's candidates at every node of a verified tree, except in rows that kept nothing.

    Args:
        table: The table to update.
        tree: The verified tree.
        log_probs, ids: `[B, N, W]`, see `RecycledTokens.candidates`.
        path: `[B, P]` kept nodes, padded with -1.
        previous: `[B]` tokens before the roots; -1 if unknown.

    Returns:
        `[B]` tokens before the next roots; `previous` in rows that kept nothing.
    """
    parents = tree.parents.expand(tree.tokens.shape)
    before = tree.tokens.gather(1, parents.clamp(min=0))
    before = torch.cat([previous[:, None], before[:, 1:]], dim=-1)
    num_kept = (path >= 0).sum(-1)
    active = num_kept > 0
    nodes = active[:, None] & ((parents != ROOT_PARENT) | (torch.arange(tree.num_nodes, device=active.device) == 0))
    # the kept path comes last, for a second time: it must win over other nodes with the same keys
    kept_nodes = path.clamp(min=0)
    order = torch.cat([torch.arange(tree.num_nodes, device=path.device).expand(len(path), -1), kept_nodes], dim=1)
    columns = order[:, :, None].expand(-1, -1, ids.shape[-1])
    candidates = log_probs.gather(1, columns), ids.gather(1, columns)
    kept = torch.cat([nodes, path >= 0], dim=1)
    table.write(before.gather(1, order), tree.tokens.gather(1, order), *candidates, kept)
    last = (num_kept - 1).clamp(min=0)[:, None]
    before_root = tree.tokens.gather(1, kept_nodes.gather(1, last))[:, 0]
    return torch.where(active, before_root, previous)


def learn_on_host(
    table: RecycledTokens, tree: TokenTree, log_probs: Tensor, ids: Tensor, path: Tensor, previous: Tensor
) -> Tensor:
    """Do the same as `learn` on the CPU, where Python's lists take less time than many operations on small tensors."""
    last, entries = previous.tolist(), list[tuple[int, int, int]]()  # (token before, token, node of all rows)
    rows = zip(tree.tokens.tolist(), tree.parents.expand(tree.tokens.shape).tolist(), path.tolist(), strict=True)
    for row, (tokens, parents, padded) in enumerate(rows):
        kept = [node for node in padded if node >= 0]
        if not kept:
            continue
        drafted = [node for node, parent in enumerate(parents) if parent != ROOT_PARENT]
        first = row * tree.num_nodes
        # the kept path comes last: it must win over other nodes with the same keys
        for node in (0, *drafted, *kept):
            entries.append((tokens[parents[node]] if node else last[row], tokens[node], first + node))
        last[row] = tokens[kept[-1]]
    if entries:
        before, written, nodes = (list(column) for column in zip(*entries, strict=True))
        table.write_on_host(before, written, log_probs.flatten(0, 1), ids.flatten(0, 1), nodes)
    return torch.tensor(last, dtype=previous.dtype, device=previous.device)


def recycle(table: RecycledTokens, previous: Tensor, roots: Tensor, budget: Budget) -> Draft:
    """Draft a tree from the candidates in the table after pairs of tokens `[B]` (-1 if unknown) and roots `[B]`.

    The budget is one of `growth.growable`, whose `top_k` must not exceed W.
    """

    def follow(before: Tensor, tokens: Tensor) -> Level:
        log_probs, ids = table.look_up(before, tokens)
        return Level(tokens[..., None], log_probs, ids)

    def expand(tokens: Tensor, above: Level, parent_index: Tensor, seen: Tensor, depth: int) -> Level:
        return follow(above.features[..., 0].gather(1, parent_index), tokens)

    root = follow(previous[:, None], roots[:, None])
    return known_nodes(grow_dynamic(roots, root, expand, budget))


def known_nodes(draft: Draft) -> Draft:
    """Turn missing candidates (-inf) and their descendants into padding at the end; on the CPU, also trim it."""
    assert draft.log_probs is not None
    tree, unknown = draft.tree, draft.log_probs == -torch.inf
    known = ~(tree.ancestor_mask() & unknown[:, None]).any(-1)
    width = tree.num_nodes
    if known.device.type == "cpu":
        width = int(known.sum(-1).max())
    # nodes are in order of growth, so missing ones may precede known ones: move the known ones to the front
    order = torch.where(known, 0, 1).sort(dim=-1, stable=True).indices
    nodes = torch.arange(order.shape[1], device=order.device).expand_as(order)
    moved_to = torch.zeros_like(order).scatter(1, order, nodes)
    parents = tree.parents.gather(1, order)
    moved = torch.where(parents == ROOT_PARENT, ROOT_PARENT, moved_to.gather(1, parents.clamp(min=0)))
    moved = torch.where(known.gather(1, order), moved, ROOT_PARENT)
    tokens = torch.where(known, tree.tokens, tree.tokens[:, :1]).gather(1, order)
    return Draft(
        TokenTree(tokens[:, :width], moved[:, :width], max_depth=tree.max_depth),
        draft.log_probs.gather(1, order)[:, :width],
    )


class _RecyclingSession(LaunchingSession):
    _learn = staticmethod(learn)

    def __init__(self, table: RecycledTokens, context: DraftContext, program: Graphed | None = None) -> None:
        super().__init__(context.roots)
        self._table, self._program, ids = table, program, context.input_ids
        self._previous = ids[:, -1] if ids.shape[1] else torch.full_like(context.roots, -1)
        if context.logits is not None and ids.shape[1]:
            valid = torch.ones_like(ids, dtype=torch.bool) if context.padding is None else context.padding.valid
            before = torch.nn.functional.pad(torch.where(valid, ids, -1), (1, -1), value=-1)
            table.write(before, ids, *table.candidates(context.logits), valid)

    def launch(self, step: Step, budget: Budget) -> Sequence[Tensor]:
        """See `LaunchingSession.launch`; if captured, one graph learns from the step and drafts."""
        if budget.is_plain or not self._is_captured(step):
            return super().launch(step, budget)
        grown = growable(budget)
        tokens, parents, edges = self._advance(step, grown)
        self._roots = step.acceptance.next_token
        self._note_launched(budget, Draft(TokenTree(tokens, parents, max_depth=grown.num_steps), edges))
        return ()

    def _is_captured(self, step: Step) -> bool:
        return self._program is not None and step.draft.tree.num_nodes <= CAPTURED_WIDTHS[-1]

    def _advance(self, step: Step, grown: Budget | None) -> Sequence[Tensor]:
        """Learn from a step by a graph; return tokens, parents and log-probabilities of the next tree, if any."""
        table, tree, kept, width = self._table, step.draft.tree, step.acceptance, CAPTURED_WIDTHS[-1]
        log_probs, ids = table.candidates(step.verification.logits)

        def advance(
            tokens: Tensor, parents: Tensor, path: Tensor, roots: Tensor, previous: Tensor, ids: Tensor,
            log_probs: Tensor,
        ) -> Sequence[Tensor]:  # fmt: skip
            previous = learn(table, TokenTree(tokens, parents), log_probs, ids, path, previous)
            if grown is None:
                return [previous]
            draft = recycle(table, previous, roots, grown)
            assert draft.log_probs is not None
            return [previous, draft.tree.tokens, draft.tree.parents.expand(draft.tree.tokens.shape), draft.log_probs]

        # nodes and path entries that pad a step are ignored by `learn`; graphs hold the table's address
        assert self._program is not None
        self._previous, *drafted = self._program(
            (len(tree.tokens), grown),
            advance,
            Input(tree.tokens, width),
            Input(tree.parents.expand(tree.tokens.shape), width, ROOT_PARENT),
            Input(kept.path, width, -1),
            Input(kept.next_token),
            Input(self._previous),
            Input(ids, width),
            Input(log_probs, width),
            moves=id(table),
        )
        return drafted

    def _draft(self, budget: Budget) -> Draft:
        return recycle(self._table, self._previous, self._roots, growable(budget))

    def _follow(self, step: Step) -> None:
        if self._is_captured(step):
            self._advance(step, None)
            return
        candidates, kept = self._table.candidates(step.verification.logits), step.acceptance
        self._previous = self._learn(self._table, step.draft.tree, *candidates, kept.path, self._previous)


class _HostRecyclingSession(_RecyclingSession, CandidateSession):
    """Session with a table on the CPU, which can also list the candidates of each row."""

    _learn = staticmethod(learn_on_host)

    def skim(self, step: Step) -> None:
        """Remember the last two tokens of each row; the table stays as it is."""
        if max(step.acceptance.counts) != 1 or self._is_unread:
            self.observe(step)
            return
        self._previous = torch.where(step.acceptance.num_kept > 0, self._roots, self._previous)
        self._roots = step.acceptance.next_token

    @property
    def candidates(self) -> Sequence[Candidates]:
        pairs = zip(self._previous.tolist(), self._roots.tolist(), strict=True)
        return [_RecycledCandidates(self._table, previous, token) for previous, token in pairs]


class _RecycledCandidates(Candidates):
    """Candidates of one row from a table on the CPU; a place is a pair (previous token or -1, token)."""

    def __init__(self, table: RecycledTokens, previous: int, token: int) -> None:
        self._table, self.start = table, (previous, token)

    def after(self, place: tuple[int, int]) -> Sequence[Candidate]:
        log_probs, ids, paired = self._table.row(*place)
        trusted = PAIR_TRUST if paired else TOKEN_TRUST
        return [
            Candidate(token, trusted * exp(log_prob))
            for token, log_prob in zip(ids, log_probs, strict=True)
            if log_prob > MIN_LOG_PROB
        ]

    def follow(self, place: tuple[int, int], token: int) -> tuple[int, int]:
        return place[1], token
