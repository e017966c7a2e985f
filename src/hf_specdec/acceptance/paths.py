"""The tree traversals that the acceptance rules share.

On the device, the paths of all rows are chosen at once and the host reads the result (`settle`). On the host, rows
are walked token by token (`walk`), or whole paths are chosen and then recorded (`keep_paths`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hf_specdec.acceptance.accepted import Accepted, Transfer, cut_rows
from hf_specdec.acceptance.transcript import Transcript
from hf_specdec.host_sync import read
from hf_specdec.trees.tree import ROOT_PARENT, TokenTree


def cut_paths(
    tree: TokenTree, path: Tensor, tokens: Tensor, remaining: Tensor, eos: Tensor | None, *, lockstep: bool
) -> tuple[Accepted, Tensor, Tensor]:
    """Cut paths `[B, P]` and the tokens `[B, P]` chosen after their nodes where rows end, see `cut_rows`.

    Also returns `[B]` nodes of each row's tree (without root and padding), and `[B]` tokens that it may still emit.
    """
    kept, remaining = cut_rows(tokens, (path >= 0).sum(-1), remaining, eos, lockstep=lockstep)
    inside = torch.arange(path.shape[1], device=path.device) < kept[:, None]
    path, tokens = torch.where(inside, path, -1), torch.where(inside, tokens, -1)
    last = tokens.gather(1, (kept - 1).clamp(min=0)[:, None])[:, 0]
    next_token = torch.where(kept > 0, last, tree.tokens[:, 0])
    return Accepted(path, tokens, next_token), tree.num_drafted, remaining


def settle(
    unread: Accepted, num_drafted: Tensor, remaining: Tensor, transcript: Transcript, transfer: Transfer | None = None
) -> Accepted:
    """Read the result of `cut_paths`, append its tokens to the transcript and update the account of remaining tokens.

    `transfer` is that of path, tokens and `num_drafted` if it has started, with any padding at the end of the first
    two. If the transcript has a `launch`, the next draft is launched before the read, see `acceptance/accepted.py`.
    """
    transcript.account_on(unread.path.device).remaining = remaining
    transfer = transfer or Transfer(unread.path, unread.tokens, num_drafted[:, None])
    extra = None if transcript.launch is None else transcript.launch(unread)
    nodes, chosen, drafted, *launched = transfer.finish(extra or ())
    counts = [sum(node >= 0 for node in row) for row in nodes]
    emitted = tuple(tuple(row[:count]) for row, count in zip(chosen, counts, strict=True))
    transcript.record_all(emitted)
    return replace(
        unread,
        nodes=tuple(tuple(row[:count]) for row, count in zip(nodes, counts, strict=True)),
        emitted=emitted,
        num_drafted=tuple(count for (count,) in drafted),
        launched=None if extra is None else tuple(launched),
    )


class HostTree:
    """A copy of a tree on the host, read in one transfer.

    Attributes:
        children: For each row: node -> token -> child, children in node order; of equal tokens only the first. Nodes
            without children are missing.
        roots: Root token of each row.
        num_drafted: Number of nodes of each row, without root and padding.
    """

    def __init__(self, tree: TokenTree) -> None:
        self.device = tree.tokens.device
        rows, parents = read(tree.tokens, tree.parents.expand(tree.tokens.shape))
        self.roots = [row[0] for row in rows]
        self.num_drafted = tuple(sum(parent != ROOT_PARENT for parent in row) for row in parents)
        self.children: list[dict[int, dict[int, int]]] = []
        for row_parents, row_tokens in zip(parents, rows, strict=True):
            children: dict[int, dict[int, int]] = {}
            for child, (parent, token) in enumerate(zip(row_parents, row_tokens, strict=True)):
                if parent != ROOT_PARENT:
                    children.setdefault(parent, {}).setdefault(token, child)
            self.children.append(children)


Choose = Callable[[Sequence[int | None]], list[int]]
"""Function of each row's node, None in rows whose walk has ended, that returns the next token of every row."""


def walk(tree: TokenTree, transcript: Transcript, choose: Choose, host: HostTree | None = None) -> Accepted:
    """Walk down from the roots: at each node choose the next token, record it, and go to the child with that token.

    All rows advance by one level before any goes deeper, so that tokens are drawn in the same order as in
    `rules.descend`. A row's walk ends when the row is finished or the node has no such child; in lockstep, the first
    row without such a child ends the walk of all rows. `host` is the tree, if the rule has already read it.
    """
    host = host or HostTree(tree)
    rows = range(len(host.roots))
    paths: list[list[int]] = [[] for _ in rows]
    emitted: list[list[int]] = [[] for _ in rows]
    nodes: list[int | None] = [None if done and not transcript.lockstep else 0 for done in transcript.finished]
    ready = all if transcript.lockstep else any
    while not all(transcript.finished) and ready(node is not None for node in nodes):
        column = choose(nodes)
        if transcript.lockstep:
            column = transcript.record_column(column)
        for row, node, token in zip(rows, nodes, column, strict=True):
            if node is not None:
                if not transcript.lockstep:
                    transcript.record(row, token)
                paths[row].append(node)
                emitted[row].append(token)
                ended = transcript.finished[row] and not transcript.lockstep
                nodes[row] = None if ended else host.children[row].get(node, {}).get(token)
    return Accepted.from_rows(paths, emitted, host.roots, host.num_drafted, host.device)


def by_scores(
    logits: Tensor, transcript: Transcript, decide: Callable[[Sequence[int], Sequence[int], Tensor], list[int]]
) -> Choose:
    """Return a function that chooses tokens by the processed scores of logits `[B, N, V]`.

    `decide` chooses one token per row, given the indices of all rows, their nodes and scores `[B, V]`. Without
    lockstep, tokens are also drawn for rows whose walk has ended, and discarded: so random numbers are used in the
    same order as in `rules.descend`.
    """

    def choose(nodes: Sequence[int | None]) -> list[int]:
        rows, current = range(len(nodes)), [node or 0 for node in nodes]
        if transcript.lockstep:
            return decide(rows, current, transcript.column_scores(logits[list(rows), current]))
        running = [row for row in rows if nodes[row] is not None]
        scores = {row: transcript.row_scores(row, logits[row, current[row]]) for row in running}
        idle = torch.zeros_like(scores[running[0]])
        return decide(rows, current, torch.stack([scores.get(row, idle) for row in rows]))

    return choose


def keep_paths(
    tree: TokenTree, logits: Tensor, transcript: Transcript, choose: Callable[[int], list[tuple[int, int]]],
    host: HostTree,
) -> Accepted:  # fmt: skip
    """Record the chosen paths, each until its row ends; in lockstep, all paths are cut to the shortest one.

    `choose` returns the path of a row: pairs of a node and the token after it. It is not called for finished rows,
    except for those in lockstep that are not padded.
    """
    rows = range(len(transcript.finished))
    kept: list[list[tuple[int, int]]] = [[] for _ in rows]
    if not transcript.lockstep:
        for row in rows:
            pairs = iter(() if transcript.finished[row] else choose(row))
            while not transcript.finished[row] and (pair := next(pairs, None)):
                kept[row].append(pair)
                transcript.record(row, pair[1])
    elif not all(transcript.finished):
        # the tree of a padded row is a chain, see `with_repeated`
        padding = [(node, transcript.pad_token_id) for node in range(tree.num_nodes)]
        chosen = [padding if row in transcript.padded_rows else choose(row) for row in rows]
        for column in zip(*chosen, strict=False):
            nodes = [node for node, _ in column]
            transcript.column_scores(logits[list(rows), nodes])
            tokens = transcript.record_column([token for _, token in column])
            for row, node, token in zip(rows, nodes, tokens, strict=True):
                kept[row].append((node, token))
            if all(transcript.finished):
                break
    paths, emitted = ([[pair[part] for pair in pairs] for pairs in kept] for part in (0, 1))
    return Accepted.from_rows(paths, emitted, host.roots, host.num_drafted, host.device)
