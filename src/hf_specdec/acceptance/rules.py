"""Acceptance rules: functions with one signature that decide which drafted tokens are kept.

A rule gets the tree, the target's logits at its nodes and the transcript, but no model, cache or drafter. `greedy`,
`rejection` and `block` are lossless; `typical` and `nucleus` change the output. On an accelerator, `greedy` and
`rejection` decide a step on the device, and the host reads only the result, if nothing on the host reads the text and
the draft is deterministic. See docs/cache.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import TopPLogitsWarper

from hf_specdec.acceptance.accepted import Accepted, RowEnds
from hf_specdec.acceptance.paths import HostTree, by_scores, cut_paths, keep_paths, settle, walk
from hf_specdec.acceptance.transcript import Transcript
from hf_specdec.cpu.operations import best_tokens, can_search
from hf_specdec.errors import UnsupportedGenerationError
from hf_specdec.randomness import draw, draw_uniform
from hf_specdec.trees.tree import ROOT_PARENT, TokenTree, chosen_path

AcceptanceRule = Callable[[TokenTree, Tensor, Transcript], Accepted]
"""`rule(tree, logits [B, N, V], transcript)`: returns the kept paths and appends their tokens to the transcript."""


# ----------------------------------------------------------------------------------------------- lossless rules


def greedy(tree: TokenTree, logits: Tensor, transcript: Transcript) -> Accepted:
    """Keep the longest path on which every token is the target's argmax after its parent.

    The output is the same as that of plain greedy decoding. On an accelerator transfers to the host are expensive, so
    tokens are chosen on the device. On the CPU each row of V logits is expensive, so only nodes on the path are
    evaluated (`follow`); without processors and kept scores, a loaded CPU kernel reads the logits of all nodes in less
    time. Logits processors that read the text are called with the exact prefix, so they always need a walk on the
    host, as do stopping criteria other than EOS and length, and kept scores.
    """
    if not transcript.decides_on(logits.device):
        if transcript.processes_scores or transcript.keeps_scores or not can_search(logits):
            return follow(tree, logits, transcript)
        best = best_tokens(logits, 1, with_log_probs=False)[1][..., 0].tolist()  # the kernel reads all in less time
        return walk(tree, transcript, lambda nodes: [row[node or 0] for row, node in zip(best, nodes, strict=True)])
    decide = descend if transcript.processes_scores else match_at_once
    return decide(tree, logits, transcript)


def rejection(tree: TokenTree, logits: Tensor, transcript: Transcript) -> Accepted:
    """Sample losslessly: every emitted token follows the target's processed distribution given its prefix.

    In a deterministic tree, draw from that distribution at each node and descend as long as the drawn token is a
    child. This equals the rejection rule of SpecInfer and EAGLE-2 (a drafted x is a point mass, accepted with
    probability p(x)), with one draw per emitted token. For a sampled tree (`draft_probs`), see `try_siblings`.
    """
    if tree.draft_probs is not None:
        return try_siblings(tree, logits, transcript)
    return (descend if transcript.decides_on(logits.device) else follow)(tree, logits, transcript)


def decides_on_device(rule: AcceptanceRule, transcript: Transcript, device: torch.device) -> bool:
    """Return whether the rule decides steps on the device; valid for drafts without `draft_probs`."""
    on_device = rule in (greedy, rejection) or getattr(rule, "decides_on_device", False)
    return bool(on_device) and transcript.decides_on(device)


def match_at_once(tree: TokenTree, logits: Tensor, transcript: Transcript) -> Accepted:
    """Apply `match` with the argmax at every node as the target's choice, and read the result."""
    account, choices = transcript.account_on(logits.device), logits.max(-1).indices  # faster than argmax
    return settle(*match(tree, choices, account.remaining, account.eos, account.ends), transcript)


def match(
    tree: TokenTree, choices: Tensor, remaining: Tensor, eos: Tensor | None, ends: RowEnds
) -> tuple[Accepted, Tensor, Tensor]:
    """Keep each row's longest path on which every token is the target's choice after its parent, up to the row's end.

    In finished rows, the pad token replaces the target's choices `[B, N]`. The result is that of `cut_paths`; further
    arguments: see `DeviceAccount`.
    """
    choices = torch.where((remaining == 0)[:, None], ends.pad_token_id, choices)
    ancestors = tree.ancestor_mask()
    parents = tree.parents.expand(tree.tokens.shape)
    matched = (tree.tokens == choices.gather(1, parents.clamp(min=0))) & (parents != ROOT_PARENT)
    matched |= torch.arange(tree.num_nodes, device=matched.device) == 0
    accepted = ~(ancestors & ~matched[:, None, :]).any(-1)  # [B, N]
    deepest = torch.where(accepted, ancestors.sum(-1), 0).argmax(-1)
    on_path = ancestors.expand(len(deepest), -1, -1).gather(
        1, deepest[:, None, None].expand(-1, 1, tree.num_nodes)
    )[:, 0]  # fmt: skip
    path = chosen_path(tree, on_path)
    return cut_paths(tree, path, choices.gather(1, path.clamp(min=0)), remaining, eos, lockstep=ends.lockstep)


def descend(tree: TokenTree, logits: Tensor, transcript: Transcript) -> Accepted:
    """Walk down all rows together on the device: choose the token after a node and go to the child with that token.

    The walk always covers the whole depth of the tree, because stopping early would need a transfer to the host.
    Draws beyond the longest kept path are undone. Requires that `transcript.decides_on` the logits' device.
    """
    ended = transcript.padded(logits.device)
    parents, rows = tree.parents.expand(tree.tokens.shape), torch.arange(len(ended), device=logits.device)
    node, on_path = torch.zeros_like(rows), torch.ones_like(ended)
    draws, path, tokens = transcript.draws(logits.device), [], []
    for _ in range(tree.depth_bound + 1):
        chosen = draws.next(transcript.scores_at(logits[rows, node]))
        chosen = torch.where(ended, transcript.pad_token_id, chosen)
        path.append(torch.where(on_path, node, -1))
        tokens.append(chosen)
        children = (parents == node[:, None]) & (tree.tokens == chosen[:, None])
        on_path = on_path & children.any(-1)
        node = children.int().argmax(-1)
    account = transcript.account_on(logits.device)
    both = torch.stack(path, dim=-1), torch.stack(tokens, dim=-1)
    cut = cut_paths(tree, *both, account.remaining, account.eos, lockstep=account.ends.lockstep)
    acceptance = settle(*cut, transcript)
    draws.keep(max(acceptance.counts))
    return acceptance


def follow(tree: TokenTree, logits: Tensor, transcript: Transcript) -> Accepted:
    """Walk down each row on the host: choose the token after a node and go to the child with that token, if any."""

    def decide(_rows: Sequence[int], _nodes: Sequence[int], scores: Tensor) -> list[int]:
        return transcript.draw(scores).tolist()

    return walk(tree, transcript, by_scores(logits, transcript, decide))


def try_siblings(tree: TokenTree, logits: Tensor, transcript: Transcript) -> Accepted:
    """Sample losslessly from a sampled tree, in which the children of node n were drawn from q = `draft_probs[b, n]`.

    p is the target's processed distribution after node n. The children of a node are tried in the order of their
    nodes, in which they were drawn without replacement. Child x is accepted with probability min(1, p(x) / q(x));
    after a rejection p becomes the normalised max(p - q, 0) and x is removed from q. If all are rejected, the token is
    drawn from the last p. Children with q(x) = 0 are skipped. Sources: Leviathan et al.
    (https://arxiv.org/abs/2211.17192) for chains, SpecInfer (https://arxiv.org/abs/2305.09781) and EAGLE for siblings.
    """
    draft_probs, host = tree.draft_probs, HostTree(tree)
    assert draft_probs is not None

    def decide_one(row: int, node: int, scores: Tensor) -> int:
        target = scores.softmax(-1)
        draft = draft_probs[row, node].to(target.device, torch.float32).clone()
        for token, _child in host.children[row].get(node, {}).items():
            if draft[token] <= 0:
                continue  # not drawn from q: skipping it keeps the rule lossless
            if draw_uniform(target.device) * draft[token] < target[token]:
                return token
            target = _normalised((target - draft).clamp(min=0), target)
            draft[token] = 0
            draft = _normalised(draft, draft)
        return int(draw(target))

    def decide(rows: Sequence[int], nodes: Sequence[int], scores: Tensor) -> list[int]:
        return [decide_one(row, node, row_scores) for row, node, row_scores in zip(rows, nodes, scores, strict=True)]

    return walk(tree, transcript, by_scores(logits, transcript, decide), host)


def block(tree: TokenTree, logits: Tensor, transcript: Transcript) -> Accepted:
    """Verify sampled chains losslessly as blocks; on average this accepts at least as many tokens as `rejection`.

    Source: Sun et al., "Block Verification Accelerates Speculative Decoding" (https://arxiv.org/abs/2403.10444),
    algorithm 2. Let x_i be the token of node i, and p and q the target's and the draft's distributions after a node.
    Let w_0 = 1, w_i = min(1, w_(i-1) p(x_i) / q(x_i)), r_i = the sum of max(w_i p - q, 0) at node i, and
    h_i = r_i / (r_i + 1 - w_i), but h_i = w_i at the last node. Nodes up to the largest i with u_i < h_i are kept (the
    root always), u_i uniform in [0, 1). The token after them is drawn from the normalised max(w_i p - q, 0), or from p
    after the last node.
    """
    host = HostTree(tree)
    widths = [len(children) for row in host.children for children in row.values()]  # empty in a plain step
    if max(widths, default=0) > 1 or (widths and tree.draft_probs is None):
        raise UnsupportedGenerationError(
            'acceptance="block" supports only sampled chains: drafts with `draft_probs` and one child per node.',
            'Use acceptance="auto", which is also lossless.',
        )

    def cut(row: int) -> list[tuple[int, int]]:
        return _cut_block(tree, logits[row], transcript, row, host.children[row])

    return keep_paths(tree, logits, transcript, cut, host)


def _cut_block(
    tree: TokenTree, logits: Tensor, transcript: Transcript, row: int, children: dict[int, dict[int, int]]
) -> list[tuple[int, int]]:
    """Apply block verification to one row's chain; return the kept nodes, each with the token that follows it."""
    nodes, tokens = [0], list[int]()
    while children.get(nodes[-1]):
        token, child = next(iter(children[nodes[-1]].items()))
        nodes.append(child)
        tokens.append(token)
    weight, cut, final = 1.0, 0, None
    for depth, node in enumerate(nodes):
        target = transcript.row_scores(row, logits[node], tokens[:depth]).softmax(-1)
        if depth == len(nodes) - 1:
            keep, residual = weight, target
        else:
            assert tree.draft_probs is not None
            draft = tree.draft_probs[row, node].to(target.device, torch.float32)
            residual = (weight * target - draft).clamp(min=0)
            mass = float(residual.sum())
            keep = mass / (mass + 1 - weight) if mass + 1 - weight > 0 else 1.0
            residual = _normalised(residual, target)
        if depth == 0 or float(draw_uniform(torch.device("cpu"))) < keep:
            cut, final = depth, residual
        if depth < len(nodes) - 1:
            token = tokens[depth]
            weight = min(1.0, weight * float(target[token]) / max(float(draft[token]), 1e-30))
    assert final is not None
    following = [*tokens[:cut], int(draw(final))]
    return list(zip(nodes[: cut + 1], following, strict=True))


def _normalised(mass: Tensor, fallback: Tensor) -> Tensor:
    """Scale non-negative float32 mass to sum 1; return the fallback if rounding left no mass."""
    total = mass.sum()
    return mass / total if total > 0 else fallback


# ----------------------------------------------------------------------------------------------- lossy rules


def typical(
    tree: TokenTree, logits: Tensor, transcript: Transcript, *, threshold: float = 0.09, alpha: float = 0.3
) -> Accepted:
    """Keep drafted tokens x with p(x) > min(threshold, alpha * exp(-H(p))). Not lossless.

    p is the target's processed distribution and H(p) its entropy. Source: Medusa (https://arxiv.org/abs/2401.10774),
    section 2.3.1, which names the parameters epsilon and delta. The longest path of such tokens is kept; ties go to
    the likelier path. The token after it is sampled, or the argmax if `do_sample` is False.
    """

    def is_typical(scores: Tensor) -> Tensor:
        probs = scores.softmax(-1)
        entropy = -(probs * probs.clamp(min=1e-20).log()).sum()
        return probs > torch.minimum(torch.full_like(entropy, threshold), alpha * torch.exp(-entropy))

    return _keep_allowed(tree, logits, transcript, is_typical)


def nucleus(tree: TokenTree, logits: Tensor, transcript: Transcript, *, top_p: float = 0.8) -> Accepted:
    """Keep drafted tokens in the nucleus, the smallest set of tokens with probability >= `top_p`. Not lossless.

    Source: Holtzman et al. (https://arxiv.org/abs/1904.09751). If the call samples with `top_p`, its warpers have
    already removed the tokens outside the nucleus, so pass 1.0. Paths and the token after them are chosen as in
    `typical`.
    """
    warper = TopPLogitsWarper(top_p)

    def in_nucleus(scores: Tensor) -> Tensor:
        return warper(torch.empty(1, 0, dtype=torch.long, device=scores.device), scores[None].clone())[0].isfinite()

    return _keep_allowed(tree, logits, transcript, in_nucleus)


def _keep_allowed(
    tree: TokenTree, logits: Tensor, transcript: Transcript, allowed: Callable[[Tensor], Tensor]
) -> Accepted:
    """Keep each row's longest path of allowed tokens (ties go to the likelier path), then draw the token after it.

    `allowed` returns which tokens may be kept, `[V]` bool, given the processed scores `[V]` at their parent.
    """
    host = HostTree(tree)

    def best_path(row: int) -> list[tuple[int, int]]:
        # a path: (depth, log-likelihood, nodes, tokens, scores at the end)
        root = transcript.row_scores(row, logits[row, 0])
        best = (0, 0.0, [0], list[int](), root)
        frontier = [best]
        while frontier:
            depth, likelihood, nodes, tokens, scores = frontier.pop()
            log_probs, is_allowed = scores.log_softmax(-1), allowed(scores)
            for token, child in host.children[row].get(nodes[-1], {}).items():
                if bool(is_allowed[token]):
                    path = [*tokens, token]
                    after = transcript.row_scores(row, logits[row, child], path)
                    longer = (depth + 1, likelihood + float(log_probs[token]), [*nodes, child], path, after)
                    frontier.append(longer)
                    best = max(best, longer, key=lambda candidate: candidate[:2])
        _, _, nodes, tokens, scores = best
        return list(zip(nodes, [*tokens, int(transcript.draw(scores[None]))], strict=True))

    return keep_paths(tree, logits, transcript, best_path, host)
