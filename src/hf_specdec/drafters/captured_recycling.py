"""Token recycling as a captured device graph, which learns from a step and drafts the next tree in one launch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hf_specdec.drafters.recycled_tokens import RecycledTokens, learn, recycle
from hf_specdec.trees.draft import Budget, Draft
from hf_specdec.trees.tree import ROOT_PARENT, TokenTree
from hf_specdec.verification.graphs import CAPTURED_WIDTHS, Graphed, Input, width_for
from hf_specdec.verification.step import Step


def advance_captured(
    graphed: Graphed, table: RecycledTokens, step: Step, previous: Tensor, budget: Budget
) -> tuple[Draft, Tensor] | None:
    """Learn from a step and draft the next tree.

    Args:
        graphed: The graphs.
        table: The table to update, then read; graphs hold its address.
        step: The step, whose accepted tokens are known only on the device.
        previous: `[B]` tokens before the step's roots; -1 if unknown.
        budget: Budget of the draft, as returned by `growth.growable`.

    Returns:
        The draft and the tokens `[B]` before its roots; None, with the table unchanged, if the step's tree has
        more nodes than the largest captured size.
    """
    tree, kept = step.draft.tree, step.acceptance
    (rows, num_nodes), length = tree.tokens.shape, kept.path.shape[1]
    if num_nodes > CAPTURED_WIDTHS[-1]:
        return None
    width, length = width_for(num_nodes), width_for(length)
    log_probs, ids = table.candidates(step.verification.logits)

    def advance(
        tokens: Tensor, parents: Tensor, path: Tensor, roots: Tensor, previous: Tensor, ids: Tensor, log_probs: Tensor
    ) -> Sequence[Tensor]:
        previous = learn(table, TokenTree(tokens, parents), log_probs, ids, path, previous)
        draft = recycle(table, previous, roots, budget)
        assert draft.log_probs is not None
        return [draft.tree.tokens, draft.tree.parents.expand(draft.tree.tokens.shape), previous, draft.log_probs]

    # nodes and path entries that pad a step are ignored by `learn`
    drafted, parents, previous, edges = graphed(
        (rows, width, length, budget),
        advance,
        Input(tree.tokens, width),
        Input(tree.parents.expand(rows, -1), width, ROOT_PARENT),
        Input(kept.path, length, -1),
        Input(kept.next_token),
        Input(previous),
        Input(ids, width),
        Input(log_probs, width),
        moves=id(table),
    )
    return Draft(TokenTree(drafted, parents, max_depth=budget.num_steps), edges), previous
