"""Table of the best candidates after tokens and pairs of tokens, with functions to update it and draft from it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from math import log

import torch
from torch import Tensor

from hf_specdec.trees.draft import Budget, Draft
from hf_specdec.trees.growth import Level, best_children, grow_dynamic
from hf_specdec.trees.tree import ROOT_PARENT, TokenTree
from hf_specdec.verification.memory import persistent_tensors

MERGED_TOP_K = 4
"""Number of an entry's candidates that are merged with those of other drafters."""
HASH_MULTIPLIER = 1_000_003
"""A prime that distributes the pairs over the hash slots."""
FADING = 0.95
"""Factor for all stored probabilities when the target's weights change: an entry that is not written again loses half
in 14 updates. Updates of a trainer are small; after a large one, the trust in the source falls within one answer."""
NO_PAIR, UNKNOWN_PAIR = -1, -2
"""Keys of an empty slot, and of a token whose predecessor is unknown; they differ, so that they never match."""


class RecycledTokens:
    """Table of the best candidates after each token and after pairs of tokens, with their log-probabilities.

    Takes about `(V + pairs) * width * 12 + pairs * 8` bytes.

    Args:
        vocab_size: V.
        width: W, candidates per entry; at most V.
        pairs: Hash slots for pairs.
        device: Device of the tables.
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
        """Return the candidates after tokens `[B, K]` and their predecessors `previous` `[B, K]` (-1: unknown).

        The entry of the pair is used if there is one, otherwise the entry of the token alone.

        Returns:
            Log-probabilities `[B, K, W]`, -inf for missing candidates, and ids `[B, K, W]`.
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
        """Store the candidates after tokens, and after the pairs with their predecessors.

        Args:
            previous, tokens: `[B, K]`; `previous` is -1 if unknown.
            log_probs, ids: `[B, K, W]`, see `candidates`.
            kept: `[B, K]` bool; False entries are not written.
        """
        key, slot = self._hash(previous, tokens)
        paired = kept & (previous >= 0)
        slot = torch.where(paired, slot, self.pairs)
        for table, rows in enumerate((torch.where(kept, tokens, self.vocab_size), slot)):
            self.ids[table][rows], self.log_probs[table][rows] = ids, log_probs
        self.keys[slot] = torch.where(paired, key, NO_PAIR)

    def write_on_host(
        self, previous: Sequence[int], tokens: Sequence[int], log_probs: Tensor, ids: Tensor, rows: Sequence[int]
    ) -> None:
        """Do the same as `write` on the CPU: for so few entries, numpy takes a fraction of the time that torch takes.

        Args:
            previous, tokens: K tokens and their predecessors, -1 if unknown. Of equal ones, the last is stored.
            log_probs, ids: `[M, W]`.
            rows: Which of the M rows belongs to each of the K tokens.
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
    table.write(before, tree.tokens, log_probs, ids, nodes)
    # write the kept path again: it must win over other nodes with the same keys
    kept_nodes = path.clamp(min=0)
    columns = kept_nodes[:, :, None].expand(-1, -1, ids.shape[-1])
    kept = log_probs.gather(1, columns), ids.gather(1, columns)
    table.write(before.gather(1, kept_nodes), tree.tokens.gather(1, kept_nodes), *kept, path >= 0)
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
    """Draft a tree from the candidates in the table.

    Args:
        table: The table to read.
        previous, roots: `[B]` tokens before the roots (-1 if unknown), and the roots.
        budget: A budget as returned by `growth.growable`; `top_k` must not exceed W.
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
