"""Greedy acceptance as a captured graph: one launch instead of about sixty small kernels."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hf_specdec.acceptance.accepted import Accepted
from hf_specdec.acceptance.paths import settle
from hf_specdec.acceptance.rules import greedy, match
from hf_specdec.acceptance.transcript import Transcript
from hf_specdec.trees.tree import ROOT_PARENT, TokenTree
from hf_specdec.verification.graph_backends import GraphBackend
from hf_specdec.verification.graphs import CAPTURED_WIDTHS, Graphed, Input, width_for


class CapturedGreedy:
    """Greedy acceptance (`rules.greedy`), captured as a graph for each batch size and tree width.

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
        account, width = transcript.account_on(logits.device), width_for(num_nodes)
        ends, eos = account.ends, account.eos

        def accept(tokens: Tensor, parents: Tensor, choices: Tensor, remaining: Tensor) -> Sequence[Tensor]:
            kept, num_drafted, remaining = match(TokenTree(tokens, parents), choices, remaining, eos, ends)
            return [kept.path, kept.tokens, kept.next_token, num_drafted, remaining]

        path, tokens, next_token, num_drafted, remaining = self._graphed(
            (rows, width, ends),
            accept,
            Input(tree.tokens, width),
            Input(tree.parents.expand(rows, -1), width, ROOT_PARENT),
            Input(logits.max(-1).indices, width),
            Input(account.remaining),
        )
        longest = tree.depth_bound + 1
        unread = Accepted(path[:, :longest], tokens[:, :longest], next_token)
        return settle(unread, num_drafted, remaining, transcript)
