"""What an acceptance rule hands over, and the ways down a tree that the rules share.

On the device a path is chosen for all rows at once and the host reads it (`settle`); on the host rows are walked a
token at a time (`walk`), or whole paths are recorded (`keep_paths`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_specdec.acceptance.pipelining import Decision, Transfer
from hf_specdec.acceptance.row_ends import cut_rows
from hf_specdec.acceptance.transcript import Transcript
from hf_specdec.host_sync import read, upload
from hf_specdec.trees.tree import ROOT_PARENT, TokenTree


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The kept path of each row. `tokens[b, i]` is what the target chose after node `path[b, i]`.

    A row that has ended keeps nothing, its path and tokens are -1; in lockstep it emits padding.
    """

    path: Tensor  # [B, P] long, node indices from the root, -1 beyond the path
    tokens: Tensor  # [B, P] long, tokens emitted by this step: accepted ones, then correction or bonus; -1 beyond
    next_token: Tensor  # [B] long, the last emitted token: the next root
    nodes: tuple[tuple[int, ...], ...]  # the path on the host, without padding
    emitted: tuple[tuple[int, ...], ...]  # the tokens on the host, without padding
    num_drafted: tuple[int, ...]  # nodes of each row's tree on the host, roots and padding not counted
    launched: tuple[list[list[int]], ...] | None = None  # rows of what `Launch` returned; None if nothing was launched

    @property
    def num_kept(self) -> Tensor:
        """`[B]` nodes kept in each row, root included; as many tokens were emitted."""
        return (self.path >= 0).sum(-1)

    @property
    def num_accepted(self) -> Tensor:
        """`[B]` drafted tokens kept in each row."""
        return (self.num_kept - 1).clamp(min=0)

    @property
    def counts(self) -> list[int]:
        """`num_kept` on the host."""
        return [len(tokens) for tokens in self.emitted]

    @classmethod
    def of(cls, host: HostTree, paths: Sequence[Sequence[int]], emitted: Sequence[Sequence[int]]) -> Acceptance:
        """From host lists: the nodes and the tokens of each row, of equal lengths."""
        width = max(1, *map(len, paths))

        def padded(rows: Sequence[Sequence[int]]) -> list[list[int]]:
            return [[*row, *[-1] * (width - len(row))] for row in rows]

        following = [tokens[-1] if tokens else root for tokens, root in zip(emitted, host.roots, strict=True)]
        path, tokens = upload([padded(paths), padded(emitted)], torch.long, host.device)
        return cls(
            path=path,
            tokens=tokens,
            next_token=upload(following, torch.long, host.device),
            nodes=tuple(map(tuple, paths)),
            emitted=tuple(map(tuple, emitted)),
            num_drafted=host.num_drafted,
        )


@dataclass(frozen=True, slots=True)
class Cut:
    """Chosen paths, cut where rows end; all on the device."""

    decision: Decision
    num_drafted: Tensor  # [B] nodes of each row's tree but the root and its padding
    remaining: Tensor  # [B] tokens that each row may still emit


def cut_paths(
    tree: TokenTree, path: Tensor, tokens: Tensor, remaining: Tensor, eos: Tensor | None, *, lockstep: bool
) -> Cut:
    """Cut paths `[B, P]` and the tokens after their nodes where rows end, see `transcript.cut_rows`."""
    kept, remaining = cut_rows(tokens, (path >= 0).sum(-1), remaining, eos, lockstep=lockstep)
    inside = torch.arange(path.shape[1], device=path.device) < kept[:, None]
    path, tokens = torch.where(inside, path, -1), torch.where(inside, tokens, -1)
    last = tokens.gather(1, (kept - 1).clamp(min=0)[:, None])[:, 0]
    next_token = torch.where(kept > 0, last, tree.tokens[:, 0])
    return Cut(Decision(path, tokens, next_token), tree.num_drafted, remaining)


def settle(cut: Cut, transcript: Transcript) -> Acceptance:
    """Read in one transfer what a step keeps, and record it.

    The next draft is launched before the read, see `acceptance/pipelining.py`.
    """
    decision, launch = cut.decision, transcript.launch
    path, tokens = decision.path, decision.tokens
    transcript.account_on(path.device).remaining = cut.remaining
    transfer = Transfer(path, tokens, cut.num_drafted[:, None])
    also = None if launch is None else launch(decision)
    nodes, chosen, drafted, *launched = transfer.finish(also or ())
    counts = [sum(node >= 0 for node in row) for row in nodes]
    emitted = tuple(tuple(row[:count]) for row, count in zip(chosen, counts, strict=True))
    transcript.record_all(emitted)
    return Acceptance(
        path=path,
        tokens=tokens,
        next_token=decision.next_token,
        nodes=tuple(tuple(row[:count]) for row, count in zip(nodes, counts, strict=True)),
        emitted=emitted,
        num_drafted=tuple(count for (count,) in drafted),
        launched=None if also is None else tuple(launched),
    )


class HostTree:
    """A tree as the host walks it, read in one transfer.

    Attributes:
        below: Per row and node: its children by token, in the order of their nodes; of equal ones the first.
        roots: `B` root tokens.
        num_drafted: Nodes of each row, root and padding not counted.
    """

    def __init__(self, tree: TokenTree) -> None:
        self.device = tree.tokens.device
        rows, parents = read(tree.tokens, tree.parents.expand(tree.tokens.shape))
        self.roots = [row[0] for row in rows]
        self.num_drafted = tuple(sum(parent != ROOT_PARENT for parent in row) for row in parents)
        self.below: list[dict[int, dict[int, int]]] = []
        for row_parents, row_tokens in zip(parents, rows, strict=True):
            children: dict[int, dict[int, int]] = {}
            for child, (parent, token) in enumerate(zip(row_parents, row_tokens, strict=True)):
                if parent != ROOT_PARENT:
                    children.setdefault(parent, {}).setdefault(token, child)
            self.below.append(children)


def walk(
    tree: TokenTree,
    logits: Tensor,
    transcript: Transcript,
    decide: Callable[[Sequence[int], Sequence[int], Tensor], list[int]],
    host: HostTree | None = None,
) -> Acceptance:
    """Descend from the roots: at each node decide the next token, record it, and go to the child that drafted it.

    All rows take a step down before any takes the next, so that draws come in the order of `descend`.

    Args:
        tree: The tree.
        logits: `[B, N, V]` at its nodes.
        transcript: Continued.
        decide: Rows, their nodes and processed scores `[R, V]` to tokens.
        host: The tree, where the rule has read it already.
    """
    host = host or HostTree(tree)
    everyone = range(len(host.roots))
    paths: list[list[int]] = [[] for _ in everyone]
    emitted: list[list[int]] = [[] for _ in everyone]
    nodes: list[int | None] = [None if done and not transcript.lockstep else 0 for done in transcript.finished]
    ready = all if transcript.lockstep else any
    while not all(transcript.finished) and ready(node is not None for node in nodes):
        at = [0 if node is None else node for node in nodes]
        if transcript.lockstep:
            drawn = decide(everyone, at, transcript.column_scores(logits[list(everyone), at]))
            column = transcript.record_column(drawn)
        else:
            column = _ragged_column(nodes, logits, transcript, decide)
        for row, node, token in zip(everyone, nodes, column, strict=True):
            if node is not None:
                paths[row].append(node)
                emitted[row].append(token)
                ended = transcript.finished[row] and not transcript.lockstep
                nodes[row] = None if ended else host.below[row].get(node, {}).get(token)
    return Acceptance.of(host, paths, emitted)


def _ragged_column(
    nodes: Sequence[int | None], logits: Tensor, transcript: Transcript,
    decide: Callable[[Sequence[int], Sequence[int], Tensor], list[int]],
) -> list[int]:  # fmt: skip
    """Decide and record a token of every row that is still on its path; the others draw, too, and nobody looks."""
    rows = [row for row, node in enumerate(nodes) if node is not None]
    scores = {row: transcript.row_scores(row, logits[row, nodes[row]]) for row in rows}
    idle = torch.zeros_like(next(iter(scores.values())))
    shown = torch.stack([scores.get(row, idle) for row in range(len(nodes))])
    column = decide(range(len(nodes)), [node or 0 for node in nodes], shown)
    for row in rows:
        transcript.record(row, column[row])
    return column


def keep_paths(
    tree: TokenTree,
    logits: Tensor,
    transcript: Transcript,
    choose: Callable[[int], list[tuple[int, int]]],
    host: HostTree,
) -> Acceptance:
    """Record whole chosen paths up to where their row ends; rows in lockstep are cut to the shortest path.

    Args:
        tree: The tree.
        logits: `[B, N, V]` at its nodes.
        transcript: Continued.
        choose: A row to its path: pairs of a node and the token after it.
        host: The tree as it was read.
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
        padding = [(node, transcript.pad_token_id) for node in range(tree.num_nodes)]  # a padded row's tree is a chain
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
    return Acceptance.of(host, paths, emitted)
