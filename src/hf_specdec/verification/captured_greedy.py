"""Greedy acceptance as a captured graph: one launch instead of about sixty small kernels."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from hf_specdec.acceptance.paths import Cut, settle
from hf_specdec.acceptance.pipelining import Acceptance, Decision
from hf_specdec.acceptance.row_ends import DeviceAccount, RowEnds
from hf_specdec.acceptance.rules import greedy, match
from hf_specdec.acceptance.transcript import Transcript
from hf_specdec.trees.tree import ROOT_PARENT, TokenTree
from hf_specdec.verification.graph_backends import GraphBackend
from hf_specdec.verification.graphs import CAPTURED_WIDTHS, CapturableStep, Captures, width_for
from hf_specdec.verification.memory import persistent_tensors


class CapturedGreedy:
    """Greedy acceptance (`rules.greedy`), captured as a graph for each batch size and tree width.

    All threads use the same buffers, one after another.

    Args:
        backend: Graph backend of the device that holds the logits.
    """

    decides_on_device = True

    def __init__(self, backend: GraphBackend) -> None:
        self._lock = threading.Lock()
        self._captures = Captures(backend, "Acceptance")
        self._ends: dict[RowEnds, int] = {}  # an index for each, used in shape keys

    def __call__(self, tree: TokenTree, logits: Tensor, transcript: Transcript) -> Acceptance:
        """Return the accepted paths, see `rules.greedy`, for logits `[B, N, V]`.

        No graph is used if the host must choose or keep scores (see `Transcript.decides_on`), if scores are processed
        or if the tree is wider than any captured width.
        """
        rows, num_nodes = tree.tokens.shape
        on_device = transcript.decides_on(logits.device) and not transcript.processes_scores
        if not on_device or num_nodes > CAPTURED_WIDTHS[-1]:
            return greedy(tree, logits, transcript)
        account, width = transcript.account_on(logits.device), width_for(num_nodes)
        with self._lock:
            key = rows, width, self._ends.setdefault(account.ends, len(self._ends))
            step = self._captures.step_for(key, 0, lambda: _Match(rows, width, account))
            assert isinstance(step, _Match)
            step.fill(tree, logits.max(-1).indices, account.remaining)
            (packed,) = self._captures.run(step)
            packed = packed.clone()  # the next run of this size overwrites the outputs
        return settle(_unpacked(packed, tree.depth_bound + 1), transcript)


class _Match(CapturableStep):
    """Step that finds the accepted path of each tree, for one batch size and tree width.

    Args:
        rows, width: Batch size and number of nodes.
        account: Conditions that end rows.
    """

    def __init__(self, rows: int, width: int, account: DeviceAccount) -> None:
        super().__init__()
        self._ends, self._num_nodes = account.ends, width
        with persistent_tensors():
            buffers = torch.zeros(3, rows, width, dtype=torch.long, device=account.device)
            self._tokens, self._parents, self._choices = buffers.unbind()
            self._remaining = torch.zeros(rows, dtype=torch.long, device=account.device)
            self._eos = None if account.eos is None else account.eos.clone()

    def fill(self, tree: TokenTree, choices: Tensor, remaining: Tensor) -> None:
        """Copy the inputs of a step into the buffers.

        Args:
            tree: The verified tree, with N nodes.
            choices: `[B, N]` the target's token after each node.
            remaining: `[B]` number of tokens that each row may still emit.
        """
        num_nodes = tree.num_nodes
        self._tokens[:, :num_nodes] = tree.tokens
        self._parents[:, :num_nodes] = tree.parents
        if num_nodes < self._num_nodes:
            self._parents[:, num_nodes:] = ROOT_PARENT
        self._num_nodes = num_nodes
        self._choices[:, :num_nodes] = choices
        self._remaining.copy_(remaining)

    def compute(self) -> Sequence[Tensor]:
        """Return `[B, 3 + 2 * width]`: next token, number of drafted tokens, remaining tokens, path and its tokens."""
        tree = TokenTree(self._tokens, self._parents)
        cut = match(tree, self._choices, self._remaining, self._eos, self._ends)
        columns = [tensor[:, None] for tensor in (cut.decision.next_token, cut.num_drafted, cut.remaining)]
        return [torch.cat([*columns, cut.decision.path, cut.decision.tokens], dim=-1)]


def _unpacked(packed: Tensor, path_length: int) -> Cut:
    """Unpack the output `[B, 3 + 2 * width]` of `_Match`; paths and tokens are cut to `path_length` columns."""
    width = (packed.shape[1] - 3) // 2
    path, tokens = packed[:, 3 : 3 + path_length], packed[:, 3 + width : 3 + width + path_length]
    return Cut(Decision(path, tokens, packed[:, 0]), packed[:, 1], packed[:, 2])
