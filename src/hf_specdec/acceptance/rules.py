"""Which drafted tokens are kept: one function per rule, one signature for all.

A rule sees the tree, the target's logits at its nodes and the transcript it continues; never a model, a cache or
a drafter. `greedy` and `rejection` are lossless; `typical` and `nucleus` change what is generated. Where nobody on
the host looks at the text, a step is decided on the device and the host reads it once. See
docs/acceptance.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import TopPLogitsWarper

from hf_specdec.acceptance.paths import Acceptance, Cut, HostTree, cut_paths, keep_paths, settle, walk
from hf_specdec.acceptance.row_ends import RowEnds
from hf_specdec.acceptance.transcript import Transcript
from hf_specdec.errors import UnsupportedGenerationError
from hf_specdec.trees.tree import ROOT_PARENT, TokenTree, chosen_path

AcceptanceRule = Callable[[TokenTree, Tensor, Transcript], Acceptance]
"""`rule(tree, logits [B, N, V], transcript)`; what it emits is recorded in the transcript."""


# ----------------------------------------------------------------------------------------------- lossless rules


def greedy(tree: TokenTree, logits: Tensor, transcript: Transcript) -> Acceptance:
    """Keep the longest path whose every token is the target's argmax after its parent.

    Equal to plain greedy decoding token for token. On an accelerator every transfer to the host costs, so all nodes
    are decided at once there; on the CPU every row of V logits costs, so only the nodes of the path are looked at.
    Processors that read the text need the walk anyway: each is called on the exact prefix.
    """
    if not transcript.decides_on(logits.device):
        return follow(tree, logits, transcript)
    decide = descend if transcript.processes_scores else match_at_once
    return decide(tree, logits, transcript)


def rejection(tree: TokenTree, logits: Tensor, transcript: Transcript) -> Acceptance:
    """Lossless sampling: every emitted token has the target's processed distribution given its exact prefix.

    A deterministic tree: draw from that distribution at each node, descend while the draw is drafted. This equals
    the rejection rule of SpecInfer and EAGLE-2 (a drafted x is a point mass, accepted with probability p(x)), with
    one draw per emitted token. A sampled tree (`draft_probs`): see `try_siblings`.
    """
    if tree.draft_probs is not None:
        return try_siblings(tree, logits, transcript)
    return (descend if transcript.decides_on(logits.device) else follow)(tree, logits, transcript)


def decides_on_device(rule: AcceptanceRule, transcript: Transcript, device: torch.device) -> bool:
    """Whether every step of a deterministic draft is decided on the device, without the host."""
    on_device = rule in (greedy, rejection) or getattr(rule, "decides_on_device", False)
    return bool(on_device) and transcript.decides_on(device)


def match_at_once(tree: TokenTree, logits: Tensor, transcript: Transcript) -> Acceptance:
    """The argmax at every node, and the longest path that agrees with it, on the device."""
    account = transcript.account_on(logits.device)
    # the maximum's place is argmax, but faster
    return settle(match(tree, logits.max(-1).indices, account.remaining, account.eos, account.ends), transcript)


def match(tree: TokenTree, choices: Tensor, remaining: Tensor, eos: Tensor | None, ends: RowEnds) -> Cut:
    """Keep the longest path of each row whose tokens are what was chosen after their parents.

    Args:
        tree: The tree.
        choices: `[B, N]` the target's choice after each node.
        remaining, eos, ends: See `DeviceAccount`.
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


def descend(tree: TokenTree, logits: Tensor, transcript: Transcript) -> Acceptance:
    """Walk all rows down their trees together on the device: choose the token after a node, go to its child.

    Every row goes as deep as the tree may be; what was drawn behind the end of all paths is undone.
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
    acceptance = settle(cut, transcript)
    draws.keep(max(acceptance.counts))
    return acceptance


def follow(tree: TokenTree, logits: Tensor, transcript: Transcript) -> Acceptance:
    """Walk each row's path on the host: the transcript chooses the token after a node, descend where it is a child."""

    def decide(_rows: Sequence[int], _nodes: Sequence[int], scores: Tensor) -> list[int]:
        return transcript.draw(scores).tolist()

    return walk(tree, logits, transcript, decide)


def try_siblings(tree: TokenTree, logits: Tensor, transcript: Transcript) -> Acceptance:
    """Lossless rejection of drafts that were sampled: `draft_probs[b, n]` is what n's children were drawn from.

    The children of a node, drawn without replacement in the order of their nodes, are tried in that order. Child x
    is kept with probability min(1, p(x) / q(x)); after a rejection p becomes the normalised max(p - q, 0), and q
    loses x. If none is kept, the token is drawn from what is left of p. A chain has one child per node: Leviathan et
    al. (https://arxiv.org/abs/2211.17192); siblings: SpecInfer (https://arxiv.org/abs/2305.09781), EAGLE.
    """
    draft_probs, host = tree.draft_probs, HostTree(tree)
    assert draft_probs is not None

    def decide_one(row: int, node: int, scores: Tensor) -> int:
        target = scores.softmax(-1)
        draft = draft_probs[row, node].to(target.device, torch.float32).clone()
        for token, _child in host.below[row].get(node, {}).items():
            if draft[token] <= 0:
                continue  # a token its own distribution excludes was not drawn from it; leaving it out costs nothing
            if torch.rand((), dtype=torch.float32, device=target.device) * draft[token] < target[token]:
                return token
            target = _normalised((target - draft).clamp(min=0), target)
            draft[token] = 0
            draft = _normalised(draft, draft)
        return int(torch.multinomial(target, num_samples=1))

    def decide(rows: Sequence[int], nodes: Sequence[int], scores: Tensor) -> list[int]:
        return [decide_one(row, node, row_scores) for row, node, row_scores in zip(rows, nodes, scores, strict=True)]

    return walk(tree, logits, transcript, decide, host)


def block(tree: TokenTree, logits: Tensor, transcript: Transcript) -> Acceptance:
    """Lossless verification of a sampled chain as one block, which never keeps less than token by token on average.

    Source: Sun et al., "Block Verification Accelerates Speculative Decoding" (https://arxiv.org/abs/2403.10444),
    algorithm 2. With ratio w_i = min(1, w_(i-1) p(x_i) / q(x_i)) the block is cut after the largest i with
    u_i <= h_i, h_i = r_i / (r_i + 1 - w_i), r_i = sum of max(w_i p - q, 0) at node i, and h = w at the last. After a
    cut the token is drawn from the normalised max(w_i p - q, 0).

    Raises:
        UnsupportedGenerationError: The tree branches, or was not sampled.
    """
    host = HostTree(tree)
    widths = [len(children) for row in host.below for children in row.values()]  # none in a plain step
    if max(widths, default=0) > 1 or (widths and tree.draft_probs is None):
        raise UnsupportedGenerationError(
            'acceptance="block" takes sampled chains: drafts with `draft_probs`, one child per node.',
            'Use acceptance="auto", which is as exact.',
        )

    def cut(row: int) -> list[tuple[int, int]]:
        return _cut_block(tree, logits[row], transcript, row, host.below[row])

    return keep_paths(tree, logits, transcript, cut, host)


def _cut_block(
    tree: TokenTree, logits: Tensor, transcript: Transcript, row: int, below: dict[int, dict[int, int]]
) -> list[tuple[int, int]]:
    """The kept nodes of one chain, each with the token after it."""
    nodes, tokens = [0], list[int]()
    while below.get(nodes[-1]):
        token, child = next(iter(below[nodes[-1]].items()))
        nodes.append(child)
        tokens.append(token)
    weight, cut, rest = 1.0, 0, None
    for depth, node in enumerate(nodes):
        target = transcript.row_scores(row, logits[node], tokens[:depth]).softmax(-1)
        if depth == len(nodes) - 1:
            keep, left = weight, target
        else:
            assert tree.draft_probs is not None
            draft = tree.draft_probs[row, node].to(target.device, torch.float32)
            left = (weight * target - draft).clamp(min=0)
            mass = float(left.sum())
            keep = mass / (mass + 1 - weight) if mass + 1 - weight > 0 else 1.0
            left = _normalised(left, target)
        if depth == 0 or float(torch.rand((), dtype=torch.float32, device="cpu")) < keep:
            cut, rest = depth, left
        if depth < len(nodes) - 1:
            token = tokens[depth]
            weight = min(1.0, weight * float(target[token]) / max(float(draft[token]), 1e-30))
    assert rest is not None
    following = [*tokens[:cut], int(torch.multinomial(rest, num_samples=1))]
    return list(zip(nodes[: cut + 1], following, strict=True))


def _normalised(mass: Tensor, fallback: Tensor) -> Tensor:
    """A distribution from non-negative float32 mass; where rounding left none, the fallback."""
    total = mass.sum()
    return mass / total if total > 0 else fallback


# ----------------------------------------------------------------------------------------------- rules that change it


def typical(
    tree: TokenTree, logits: Tensor, transcript: Transcript, *, threshold: float = 0.09, alpha: float = 0.3
) -> Acceptance:
    """Keep drafted tokens that are likely enough: p(x) > min(threshold, alpha * exp(-H(p))). Not lossless.

    Medusa (https://arxiv.org/abs/2401.10774), section 2.3.1, where the two are epsilon and delta. The longest path of
    such tokens is kept, ties go to the likelier one. The token after it is drawn, or is the argmax when not sampling.
    """

    def is_typical(scores: Tensor) -> Tensor:
        probs = scores.softmax(-1)
        entropy = -(probs * probs.clamp(min=1e-20).log()).sum()
        return probs > torch.minimum(torch.full_like(entropy, threshold), alpha * torch.exp(-entropy))

    return _keep_allowed(tree, logits, transcript, is_typical)


def nucleus(tree: TokenTree, logits: Tensor, transcript: Transcript, *, top_p: float = 0.8) -> Acceptance:
    """Keep drafted tokens that lie in the nucleus, the smallest set of mass `top_p`. Not lossless.

    The nucleus is of Holtzman et al. (https://arxiv.org/abs/1904.09751); where the warpers of the call have already
    cut it out (`do_sample=True, top_p=...`), it is what they left. Paths and the token after as in `typical`.
    """
    warper = TopPLogitsWarper(top_p)

    def in_nucleus(scores: Tensor) -> Tensor:
        return warper(torch.empty(1, 0, dtype=torch.long, device=scores.device), scores[None].clone())[0].isfinite()

    return _keep_allowed(tree, logits, transcript, in_nucleus)


def _keep_allowed(
    tree: TokenTree, logits: Tensor, transcript: Transcript, allowed: Callable[[Tensor], Tensor]
) -> Acceptance:
    """Keep the longest path of allowed drafts; of equally long ones the likeliest."""
    host = HostTree(tree)

    def best_path(row: int) -> list[tuple[int, int]]:
        # (depth, log-likelihood, nodes, tokens, scores) of paths that may go on
        root = transcript.row_scores(row, logits[row, 0])
        best = (0, 0.0, [0], list[int](), root)
        frontier = [best]
        while frontier:
            depth, likelihood, nodes, tokens, scores = frontier.pop()
            log_probs, may = scores.log_softmax(-1), allowed(scores)
            for token, child in host.below[row].get(nodes[-1], {}).items():
                if bool(may[token]):
                    path = [*tokens, token]
                    after = transcript.row_scores(row, logits[row, child], path)
                    longer = (depth + 1, likelihood + float(log_probs[token]), [*nodes, child], path, after)
                    frontier.append(longer)
                    best = max(best, longer, key=lambda candidate: candidate[:2])
        _, _, nodes, tokens, scores = best
        return list(zip(nodes, [*tokens, int(transcript.draw(scores[None]))], strict=True))

    return keep_paths(tree, logits, transcript, best_path, host)
