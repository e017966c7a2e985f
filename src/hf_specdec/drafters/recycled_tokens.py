"""The table of recycled tokens: what followed a token, and a pair of tokens; learning from steps, and drafting."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from hf_specdec.trees.draft import Budget, Draft
from hf_specdec.trees.growth import Level, best_children, grow_dynamic
from hf_specdec.trees.tree import ROOT_PARENT, TokenTree
from hf_specdec.verification.memory import persistent_tensors

HEARD = 4
"""Candidates of a row that are merged with those of other drafters."""
MIXER = 1_000_003
"""A prime by which pairs are spread over their places."""
NO_PAIR, UNKNOWN_PAIR = -1, -2
"""Keys of a place that holds none, and of a token of which it is not known what stands before it; never equal."""


class RecycledTokens:
    """The best candidates after a token, and after a pair of tokens, with their log-probabilities.

    Bytes: `(V + pairs) * width * 12 + pairs * 8`, on the target's device.

    Args:
        vocab_size: V.
        width: Candidates per row.
        pairs: Places for pairs.
        device: Where it is kept.
    """

    def __init__(self, vocab_size: int, width: int, pairs: int, device: torch.device) -> None:
        self.vocab_size, self.pairs, width = vocab_size, pairs, min(width, vocab_size)
        # a last row of each table takes what is not to be written
        sizes = (vocab_size + 1, pairs + 1)
        with persistent_tensors():
            self.ids = [torch.zeros(size, width, dtype=torch.long, device=device) for size in sizes]
            self.log_probs = [
                torch.full((size, width), -torch.inf, dtype=torch.float32, device=device) for size in sizes
            ]
            self.keys = torch.full((pairs + 1,), NO_PAIR, dtype=torch.long, device=device)

    def clone(self) -> RecycledTokens:
        """Return a copy that later calls may write to."""
        with persistent_tensors():
            return copy.deepcopy(self)

    def tensors(self) -> dict[str, Tensor]:
        """All of it, by name."""
        return {
            "ids": self.ids[0], "log_probs": self.log_probs[0], "pair_ids": self.ids[1],
            "pair_log_probs": self.log_probs[1], "pair_keys": self.keys,
        }  # fmt: skip

    def look_up(self, previous: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """What follows tokens `[B, K]` that come after others `[B, K]` (-1: not known what stands before).

        Returns:
            Log-probabilities `[B, K, W]`, -inf where nothing is known, and ids.
        """
        key, place = self._place(previous, tokens)
        known = (self.keys[place] == key)[..., None]
        log_probs = torch.where(known, self.log_probs[1][place], self.log_probs[0][tokens])
        return log_probs, torch.where(known, self.ids[1][place], self.ids[0][tokens])

    def row(self, previous: int, token: int) -> tuple[list[float], list[int], bool]:
        """What follows one token on the host: log-probabilities, ids, and whether the pair was known."""
        place = (previous * MIXER + token) % self.pairs
        # by way of numpy, which reads one row of a table in a fifth of the time
        paired = previous >= 0 and int(self.keys.numpy()[place]) == previous * self.vocab_size + token
        table, row = (1, place) if paired else (0, token)
        log_probs, ids = self.log_probs[table].numpy(), self.ids[table].numpy()
        return log_probs[row, :HEARD].tolist(), ids[row, :HEARD].tolist(), paired

    def candidates(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities and ids `[..., W]` of the best tokens by raw logits `[..., V]`."""
        log_probs, ids = best_children(logits[..., : self.vocab_size], self.ids[0].shape[1])
        return log_probs.to(self.keys.device), ids.to(self.keys.device)

    def write(self, previous: Tensor, tokens: Tensor, log_probs: Tensor, ids: Tensor, kept: Tensor) -> None:
        """Keep what follows tokens that come after others.

        Args:
            previous, tokens: `[B, K]`; -1 where it is not known what stands before.
            log_probs, ids: `[B, K, W]`, see `candidates`.
            kept: `[B, K]` bool, what is to be written.
        """
        key, place = self._place(previous, tokens)
        paired = kept & (previous >= 0)
        place = torch.where(paired, place, self.pairs)
        for table, rows in enumerate((torch.where(kept, tokens, self.vocab_size), place)):
            self.ids[table][rows], self.log_probs[table][rows] = ids, log_probs
        self.keys[place] = torch.where(paired, key, NO_PAIR)

    def _place(self, previous: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The number of a pair, and where it is kept; a pair without a first token is none."""
        key = torch.where(previous >= 0, previous * self.vocab_size + tokens, UNKNOWN_PAIR)
        return key, (previous * MIXER + tokens) % self.pairs


def learn(
    table: RecycledTokens, tree: TokenTree, log_probs: Tensor, ids: Tensor, path: Tensor, previous: Tensor
) -> Tensor:
    """Write what the target thought of at every node of a step; the tokens `[B]` before the next roots.

    Args:
        table: Written to.
        tree: What was verified.
        log_probs, ids: `[B, N, W]`, see `RecycledTokens.candidates`.
        path: `[B, P]` kept nodes, -1 beyond.
        previous: `[B]` tokens before the roots.
    """
    parents = tree.parents.expand(tree.tokens.shape)
    before = tree.tokens.gather(1, parents.clamp(min=0))
    before = torch.cat([previous[:, None], before[:, 1:]], dim=-1)
    num_kept = (path >= 0).sum(-1)
    going = num_kept > 0
    nodes = going[:, None] & ((parents != ROOT_PARENT) | (torch.arange(tree.num_nodes, device=going.device) == 0))
    table.write(before, tree.tokens, log_probs, ids, nodes)
    # once more what the text has become: of equal keys the last one written stays
    kept_nodes = path.clamp(min=0)
    columns = kept_nodes[:, :, None].expand(-1, -1, ids.shape[-1])
    kept = log_probs.gather(1, columns), ids.gather(1, columns)
    table.write(before.gather(1, kept_nodes), tree.tokens.gather(1, kept_nodes), *kept, path >= 0)
    last = (num_kept - 1).clamp(min=0)[:, None]
    before_root = tree.tokens.gather(1, kept_nodes.gather(1, last))[:, 0]
    return torch.where(going, before_root, previous)


def recycle(table: RecycledTokens, previous: Tensor, roots: Tensor, budget: Budget) -> Draft:
    """Grow a tree of what the table knows.

    Args:
        table: Read.
        previous: `[B]` tokens before the roots.
        roots: `[B]`.
        budget: See `growth.growable`.
    """

    def follow(before: Tensor, tokens: Tensor) -> Level:
        log_probs, ids = table.look_up(before, tokens)
        return Level(tokens[..., None], log_probs, ids)

    def expand(tokens: Tensor, above: Level, parent_index: Tensor, seen: Tensor, depth: int) -> Level:
        return follow(above.features[..., 0].gather(1, parent_index), tokens)

    root = follow(previous[:, None], roots[:, None])
    return known_nodes(grow_dynamic(roots, root, expand, budget))


def known_nodes(draft: Draft) -> Draft:
    """A draft whose unknown candidates are padding; on the CPU, where looking costs nothing, they are left out."""
    assert draft.log_probs is not None
    tree, unknown = draft.tree, draft.log_probs == -torch.inf
    known = ~(tree.ancestor_mask() & unknown[:, None]).any(-1)  # nor is anything known of what hangs on an unknown one
    width = tree.num_nodes
    if known.device.type == "cpu":
        width = int(known.sum(-1).max())
    # the best come first only by score: known nodes are moved to the front, in their order
    order = torch.where(known, 0, 1).sort(dim=-1, stable=True).indices
    place = torch.zeros_like(order).scatter(
        1, order, torch.arange(order.shape[1], device=order.device).expand_as(order)
    )
    parents = tree.parents.gather(1, order)
    moved = torch.where(parents == ROOT_PARENT, ROOT_PARENT, place.gather(1, parents.clamp(min=0)))
    moved = torch.where(known.gather(1, order), moved, ROOT_PARENT)
    tokens = torch.where(known, tree.tokens, tree.tokens[:, :1]).gather(1, order)
    return Draft(
        TokenTree(tokens[:, :width], moved[:, :width], max_depth=tree.max_depth),
        draft.log_probs.gather(1, order)[:, :width],
    )
