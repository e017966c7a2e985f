"""Greedy acceptance as a device graph: one launch instead of some sixty small ones."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from hf_specdec.acceptance.paths import Acceptance, Cut, settle
from hf_specdec.acceptance.pipelining import Decision
from hf_specdec.acceptance.row_ends import DeviceAccount, RowEnds
from hf_specdec.acceptance.rules import greedy, match
from hf_specdec.acceptance.transcript import Transcript
from hf_specdec.trees.tree import ROOT_PARENT, TokenTree
from hf_specdec.verification.graph_backends import GraphBackend
from hf_specdec.verification.graphs import WIDTHS, Captures, Shape, width_for
from hf_specdec.verification.memory import persistent_tensors


class CapturedGreedy:
    """`rules.greedy`, captured for each number of rows and nodes.

    Threads take turns: their steps go through the same buffers.

    Args:
        backend: Of the device that decides.
    """

    decides_on_device = True

    def __init__(self, backend: GraphBackend) -> None:
        self._turn = threading.Lock()
        self._captures = Captures(backend, "Acceptance")
        self._ends: dict[RowEnds, int] = {}  # a number for each, as part of a key

    def __call__(self, tree: TokenTree, logits: Tensor, transcript: Transcript) -> Acceptance:
        """See `rules.greedy`; processed scores, and trees wider than any graph, are decided without one."""
        rows, num_nodes = tree.tokens.shape
        on_device = transcript.decides_on(logits.device) and not transcript.processes_scores
        if not on_device or num_nodes > WIDTHS[-1]:
            return greedy(tree, logits, transcript)
        account, width = transcript.account_on(logits.device), width_for(num_nodes)
        with self._turn:
            key = rows, width, self._ends.setdefault(account.ends, len(self._ends))
            shape = self._captures.shape(key, 0, lambda: _Match(rows, width, account))
            assert isinstance(shape, _Match)
            shape.fill(tree, logits.max(-1).indices, account.remaining)
            (packed,) = self._captures.run(shape)
            packed = packed.clone()
        return settle(_unpacked(packed, tree.depth_bound + 1), transcript)


class _Match(Shape):
    """What a number of rows keep of trees of a number of nodes.

    Args:
        rows, width: Of the trees.
        account: What ends rows.
    """

    def __init__(self, rows: int, width: int, account: DeviceAccount) -> None:
        super().__init__()
        self._ends, self._num_nodes = account.ends, width
        with persistent_tensors():
            size = torch.zeros(3, rows, width, dtype=torch.long, device=account.device)
            self._tokens, self._parents, self._choices = size.unbind()
            self._remaining = torch.zeros(rows, dtype=torch.long, device=account.device)
            self._eos = None if account.eos is None else account.eos.clone()

    def fill(self, tree: TokenTree, choices: Tensor, remaining: Tensor) -> None:
        """Give it a tree and the target's choices after its nodes."""
        num_nodes = tree.num_nodes
        self._tokens[:, :num_nodes] = tree.tokens
        self._parents[:, :num_nodes] = tree.parents
        if num_nodes < self._num_nodes:
            self._parents[:, num_nodes:] = ROOT_PARENT
        self._num_nodes = num_nodes
        self._choices[:, :num_nodes] = choices
        self._remaining.copy_(remaining)

    def compute(self) -> Sequence[Tensor]:
        """See `Shape`."""
        tree = TokenTree(self._tokens, self._parents)
        cut = match(tree, self._choices, self._remaining, self._eos, self._ends)
        single = [cut.decision.next_token, cut.num_drafted, cut.remaining]
        columns = [tensor[:, None] for tensor in single]
        return [torch.cat([*columns, cut.decision.path, cut.decision.tokens], dim=-1)]


def _unpacked(packed: Tensor, path_length: int) -> Cut:
    """What `_Match` packs, its paths no longer than a tree is deep."""
    width = (packed.shape[1] - 3) // 2
    path, tokens = packed[:, 3 : 3 + path_length], packed[:, 3 + width : 3 + width + path_length]
    return Cut(Decision(path, tokens, packed[:, 0]), packed[:, 1], packed[:, 2])
