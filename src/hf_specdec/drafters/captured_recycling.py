"""Token recycling as a captured device graph, which learns from a step and drafts the next tree in one launch."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from hf_specdec.drafters.recycled_tokens import RecycledTokens, learn, recycle
from hf_specdec.trees.draft import Budget, Draft
from hf_specdec.trees.tree import ROOT_PARENT, TokenTree
from hf_specdec.verification.graph_backends import GraphBackend
from hf_specdec.verification.graphs import CAPTURED_WIDTHS, CapturableStep, Captures, width_for
from hf_specdec.verification.memory import persistent_tensors
from hf_specdec.verification.step import Step


class CapturedRecycling:
    """Graphs that update a table from a step and draft from it, one for each size of step and draft.

    The graphs' buffers are shared by all threads, so one thread runs at a time.

    Args:
        backend: The graph backend of the table's device.
    """

    def __init__(self, backend: GraphBackend) -> None:
        self._captures, self._turn = Captures(backend, "Token recycling"), threading.Lock()

    def advance(
        self, table: RecycledTokens, step: Step, previous: Tensor, budget: Budget
    ) -> tuple[Draft, Tensor] | None:
        """Learn from a step and draft the next tree.

        Args:
            table: The table to update, then read.
            step: The step, whose accepted tokens are known only on the device.
            previous: `[B]` tokens before the step's roots; -1 if unknown.
            budget: Budget of the draft, as returned by `growth.growable`.

        Returns:
            The draft and the tokens `[B]` before its roots; None, with the table unchanged, if the step's tree has
            more nodes than the largest captured size.
        """
        (rows, num_nodes), length = step.draft.tree.tokens.shape, step.acceptance.path.shape[1]
        if num_nodes > CAPTURED_WIDTHS[-1]:
            return None
        width, length = width_for(num_nodes), width_for(length)
        log_probs, ids = table.candidates(step.verification.logits)
        with self._turn:
            key = rows, budget.num_nodes, width, length, budget.num_steps, budget.top_k
            captured = self._captures.step_for(key, id(table), lambda: _Recycling(table, budget, rows, width, length))
            assert isinstance(captured, _Recycling)
            captured.fill(step, log_probs, ids, previous)
            # the next run of this size overwrites the outputs
            integers, edges = (output.clone() for output in self._captures.run(captured))
        size = (integers.shape[1] - 1) // 2
        tree = TokenTree(integers[:, :size], integers[:, size:-1], max_depth=budget.num_steps)
        return Draft(tree, edges), integers[:, -1]


class _Recycling(CapturableStep):
    """The computation for one size of step and one budget, and its buffers.

    Args:
        table: The table to update, then read; a captured graph holds its address.
        budget: Budget of the draft.
        rows, width, length: Batch size, padded number of nodes, and padded length of the path.
    """

    def __init__(self, table: RecycledTokens, budget: Budget, rows: int, width: int, length: int) -> None:
        super().__init__()
        self._table, self._budget, self._num_nodes = table, budget, width
        device, candidates = table.keys.device, table.ids[0].shape[1]
        with persistent_tensors():
            self._tokens, self._parents = torch.zeros(2, rows, width, dtype=torch.long, device=device).unbind()
            self._path = torch.zeros(rows, length, dtype=torch.long, device=device)
            self._roots, self._previous = torch.zeros(2, rows, dtype=torch.long, device=device).unbind()
            self._ids = torch.zeros(rows, width, candidates, dtype=torch.long, device=device)
            self._log_probs = torch.zeros(rows, width, candidates, dtype=torch.float32, device=device)

    def fill(self, step: Step, log_probs: Tensor, ids: Tensor, previous: Tensor) -> None:
        """Copy a step into the buffers, padded with nodes and path entries that `learn` ignores."""
        tree, kept = step.draft.tree, step.acceptance
        num_nodes, length = tree.num_nodes, kept.path.shape[1]
        self._tokens[:, :num_nodes] = tree.tokens
        self._parents[:, :num_nodes] = tree.parents
        if num_nodes < self._num_nodes:
            self._parents[:, num_nodes:] = ROOT_PARENT
        self._num_nodes = num_nodes
        self._path[:, :length] = kept.path
        if length < self._path.shape[1]:
            self._path[:, length:] = -1
        self._ids[:, :num_nodes] = ids
        self._log_probs[:, :num_nodes] = log_probs
        self._roots.copy_(kept.next_token)
        self._previous.copy_(previous)

    def compute(self) -> Sequence[Tensor]:
        """Update the table and draft a tree of N nodes.

        Returns:
            `[B, 2 * N + 1]` tokens, parents and the token before the root; `[B, N]` log-probabilities.
        """
        tree = TokenTree(self._tokens, self._parents)
        previous = learn(self._table, tree, self._log_probs, self._ids, self._path, self._previous)
        draft = recycle(self._table, previous, self._roots, self._budget)
        assert draft.log_probs is not None
        parents = draft.tree.parents.expand(draft.tree.tokens.shape)
        return [torch.cat([draft.tree.tokens, parents, previous[:, None]], dim=-1), draft.log_probs]
