"""Which drafted tokens are kept: one function per rule, one signature for all.

A rule sees the tree, the target's logits at its nodes and the transcript it continues; never a model, a cache or
a drafter. `greedy` and `rejection` are lossless; `typical` and `nucleus` change what is generated. Before:
`target.py`. After: `cache.commit`. See docs/acceptance.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import TopPLogitsWarper

from hf_specdec.errors import UnsupportedGenerationError
from hf_specdec.transcript import Transcript
from hf_specdec.tree import ROOT_PARENT, TokenTree, chosen_path


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The kept path of each row. `tokens[b, i]` is what the target says after node `path[b, i]`.

    A row that has ended keeps nothing, its path and tokens are -1; unless rows are in step, where it says padding.
    """

    path: Tensor  # [B, P] long, node indices from the root, -1 beyond the path
    tokens: Tensor  # [B, P] long, tokens emitted by this step: accepted ones, then correction or bonus
    num_accepted: Tensor  # [B] long, drafted tokens kept
    next_token: Tensor  # [B] long, the last emitted token: the next root
    nodes: tuple[tuple[int, ...], ...]  # the path on the host, without padding
    emitted: tuple[tuple[int, ...], ...]  # the tokens on the host, without padding

    @property
    def counts(self) -> list[int]:
        """Nodes kept in each row, root included; as many tokens were emitted."""
        return [len(tokens) for tokens in self.emitted]

    @classmethod
    def of(cls, tree: TokenTree, paths: Sequence[Sequence[int]], emitted: Sequence[Sequence[int]]) -> Acceptance:
        """From host lists: the nodes and the tokens of each row, of equal lengths."""
        device, width = tree.tokens.device, max(1, *map(len, paths))

        def padded(rows: Sequence[Sequence[int]]) -> Tensor:
            return torch.tensor([[*row, *[-1] * (width - len(row))] for row in rows], device=device)

        roots = tree.tokens[:, 0].tolist()
        following = [tokens[-1] if tokens else root for tokens, root in zip(emitted, roots, strict=True)]
        return cls(
            path=padded(paths),
            tokens=padded(emitted),
            num_accepted=torch.tensor([max(len(path) - 1, 0) for path in paths], device=device),
            next_token=torch.tensor(following, device=device),
            nodes=tuple(map(tuple, paths)),
            emitted=tuple(map(tuple, emitted)),
        )


AcceptanceRule = Callable[[TokenTree, Tensor, Transcript], Acceptance]
"""`rule(tree, logits [B, N, V], transcript)`; what it emits is recorded in the transcript."""


# ----------------------------------------------------------------------------------------------- lossless rules


def greedy(tree: TokenTree, logits: Tensor, transcript: Transcript) -> Acceptance:
    """Keep the longest path whose every token is the target's argmax after its parent.

    Equal to plain greedy decoding token for token. On an accelerator every transfer to the host costs, so all nodes
    are decided at once there; on the CPU every row of V logits costs, so only the nodes of the path are looked at.
    Processors need the walk anyway: each is called on the exact prefix.
    """
    if logits.device.type == "cpu" or not transcript.is_prefix_free:
        return follow(tree, logits, transcript)
    return greedy_at_once(tree, logits, transcript)


def greedy_at_once(tree: TokenTree, logits: Tensor, transcript: Transcript) -> Acceptance:
    """`greedy` for a choice that depends on a node's logits alone: on the device, with one transfer to the host."""
    choices = logits.argmax(-1)  # [B, N]
    ancestors = tree.ancestor_mask()
    parents = tree.parents.expand(tree.tokens.shape)
    matched = (tree.tokens == choices.gather(1, parents.clamp(min=0))) & (parents != ROOT_PARENT)
    matched[:, 0] = True
    accepted = ~(ancestors & ~matched[:, None, :]).any(-1)  # [B, N]
    deepest = torch.where(accepted, ancestors.sum(-1), 0).argmax(-1)
    rows = torch.arange(len(deepest), device=deepest.device)
    on_path = ancestors.expand(len(deepest), -1, -1)[rows, deepest]
    path = chosen_path(tree, on_path)
    tokens = choices.gather(1, path.clamp(min=0))
    # the one host synchronisation of a step: nodes and tokens together
    paths, emitted = torch.stack([path, tokens]).tolist()
    kept_paths, kept_tokens = [], []
    for row, finished in enumerate(transcript.finished):
        length = 0 if finished else sum(node >= 0 for node in paths[row])
        kept = next((i + 1 for i in range(length) if transcript.record(row, emitted[row][i])), length)
        kept_paths.append(paths[row][:kept])
        kept_tokens.append(emitted[row][:kept])
    return Acceptance.of(tree, kept_paths, kept_tokens)


def rejection(tree: TokenTree, logits: Tensor, transcript: Transcript) -> Acceptance:
    """Lossless sampling: every emitted token has the target's processed distribution given its exact prefix.

    A deterministic tree: draw from that distribution at each node, descend while the draw is drafted. This equals
    the rejection rule of SpecInfer and EAGLE-2 (a drafted x is a point mass, accepted with probability p(x)), with
    one draw per emitted token. A sampled tree (`draft_probs`): see `try_siblings`.
    """
    return follow(tree, logits, transcript) if tree.draft_probs is None else try_siblings(tree, logits, transcript)


def follow(tree: TokenTree, logits: Tensor, transcript: Transcript) -> Acceptance:
    """Walk each row's path: the transcript chooses the token after a node; descend where it is a child."""

    def decide(_rows: Sequence[int], _nodes: Sequence[int], scores: Tensor) -> list[int]:
        return transcript.draw(scores).tolist()

    return _walk(tree, logits, transcript, decide)


def try_siblings(tree: TokenTree, logits: Tensor, transcript: Transcript) -> Acceptance:
    """Lossless rejection of drafts that were sampled: `draft_probs[b, n]` is what n's children were drawn from.

    The children of a node, drawn without replacement in the order of their nodes, are tried in that order. Child x
    is kept with probability min(1, p(x) / q(x)); after a rejection p becomes the normalised max(p - q, 0), and q
    loses x. If none is kept, the token is drawn from what is left of p. A chain has one child per node: Leviathan et
    al. (https://arxiv.org/abs/2211.17192); siblings: SpecInfer (https://arxiv.org/abs/2305.09781), EAGLE.
    """
    draft_probs = tree.draft_probs
    assert draft_probs is not None
    below = _children(tree)

    def decide_one(row: int, node: int, scores: Tensor) -> int:
        target = scores.softmax(-1)
        draft = draft_probs[row, node].to(target.device, torch.float32).clone()
        for token, _child in below[row].get(node, {}).items():
            if draft[token] <= 0:
                continue  # a token its own distribution excludes was not drawn from it; leaving it out costs nothing
            if torch.rand((), device=target.device) * draft[token] < target[token]:
                return token
            target = _normalised((target - draft).clamp(min=0), target)
            draft[token] = 0
            draft = _normalised(draft, draft)
        return int(torch.multinomial(target, num_samples=1))

    def decide(rows: Sequence[int], nodes: Sequence[int], scores: Tensor) -> list[int]:
        return [decide_one(row, node, row_scores) for row, node, row_scores in zip(rows, nodes, scores, strict=True)]

    return _walk(tree, logits, transcript, decide)


def block(tree: TokenTree, logits: Tensor, transcript: Transcript) -> Acceptance:
    """Lossless verification of a sampled chain as one block, which never keeps less than token by token on average.

    Source: Sun et al., "Block Verification Accelerates Speculative Decoding" (https://arxiv.org/abs/2403.10444),
    algorithm 2. With ratio w_i = min(1, w_(i-1) p(x_i) / q(x_i)) the block is cut after the largest i with
    u_i <= h_i, h_i = r_i / (r_i + 1 - w_i), r_i = sum of max(w_i p - q, 0) at node i, and h = w at the last. After a
    cut the token is drawn from the normalised max(w_i p - q, 0).

    Raises:
        UnsupportedGenerationError: The tree branches, or was not sampled.
    """
    below = _children(tree)
    if tree.draft_probs is None or any(len(children) > 1 for row in below for children in row.values()):
        raise UnsupportedGenerationError(
            'acceptance="block" takes sampled chains: drafts with `draft_probs`, one child per node.',
            'Use acceptance="auto", which is as exact.',
        )
    return _keep(tree, logits, transcript, lambda row: _cut_block(tree, logits[row], transcript, row, below[row]))


def _cut_block(
    tree: TokenTree, logits: Tensor, transcript: Transcript, row: int, below: dict[int, dict[int, int]]
) -> list[tuple[int, int]]:
    """The kept nodes of one chain, each with the token after it."""
    assert tree.draft_probs is not None
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
            draft = tree.draft_probs[row, node].to(target.device, torch.float32)
            left = (weight * target - draft).clamp(min=0)
            mass = float(left.sum())
            keep = mass / (mass + 1 - weight) if mass + 1 - weight > 0 else 1.0
            left = _normalised(left, target)
        if depth == 0 or float(torch.rand(())) < keep:
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
        return warper(torch.empty(1, 0, dtype=torch.long), scores[None].clone())[0].isfinite()

    return _keep_allowed(tree, logits, transcript, in_nucleus)


def _keep_allowed(
    tree: TokenTree, logits: Tensor, transcript: Transcript, allowed: Callable[[Tensor], Tensor]
) -> Acceptance:
    """Keep the longest path of allowed drafts; of equally long ones the likeliest."""
    below = _children(tree)

    def best_path(row: int) -> list[tuple[int, int]]:
        # (depth, log-likelihood, nodes, tokens, scores) of paths that may go on
        root = transcript.row_scores(row, logits[row, 0])
        best = (0, 0.0, [0], list[int](), root)
        frontier = [best]
        while frontier:
            depth, likelihood, nodes, tokens, scores = frontier.pop()
            log_probs, may = scores.log_softmax(-1), allowed(scores)
            for token, child in below[row].get(nodes[-1], {}).items():
                if bool(may[token]):
                    path = [*tokens, token]
                    after = transcript.row_scores(row, logits[row, child], path)
                    longer = (depth + 1, likelihood + float(log_probs[token]), [*nodes, child], path, after)
                    frontier.append(longer)
                    best = max(best, longer, key=lambda candidate: candidate[:2])
        _, _, nodes, tokens, scores = best
        return list(zip(nodes, [*tokens, int(transcript.draw(scores[None]))], strict=True))

    return _keep(tree, logits, transcript, best_path)


# ----------------------------------------------------------------------------------------------- walking the tree


def _children(tree: TokenTree) -> list[dict[int, dict[int, int]]]:
    """Per row and node: its children by token, in the order of their nodes; of equal ones the first."""
    parents, tokens = tree.parents.expand(tree.tokens.shape).tolist(), tree.tokens.tolist()
    below: list[dict[int, dict[int, int]]] = []
    for row_parents, row_tokens in zip(parents, tokens, strict=True):
        children: dict[int, dict[int, int]] = {}
        for child, (parent, token) in enumerate(zip(row_parents, row_tokens, strict=True)):
            if parent != ROOT_PARENT:
                children.setdefault(parent, {}).setdefault(token, child)
        below.append(children)
    return below


def _walk(
    tree: TokenTree,
    logits: Tensor,
    transcript: Transcript,
    decide: Callable[[Sequence[int], Sequence[int], Tensor], list[int]],
) -> Acceptance:
    """Descend from the roots: at each node decide the next token, record it, and go to the child that drafted it.

    Args:
        tree: The tree.
        logits: `[B, N, V]` at its nodes.
        transcript: Continued.
        decide: Rows, their nodes and processed scores `[R, V]` to tokens.
    """
    below = _children(tree)
    everyone = range(len(below))
    paths: list[list[int]] = [[] for _ in everyone]
    emitted: list[list[int]] = [[] for _ in everyone]
    if not transcript.in_step:
        for row in everyone:
            node: int | None = None if transcript.finished[row] else 0
            while node is not None:
                (token,) = decide([row], [node], transcript.row_scores(row, logits[row, node])[None])
                paths[row].append(node)
                emitted[row].append(token)
                node = None if transcript.record(row, token) else below[row].get(node, {}).get(token)
        return Acceptance.of(tree, paths, emitted)
    nodes: list[int | None] = [0 for _ in everyone]
    while not all(transcript.finished) and None not in nodes:
        at = [node for node in nodes if node is not None]
        drawn = decide(everyone, at, transcript.column_scores(logits[list(everyone), at]))
        column = transcript.record_column(drawn)
        for row, node, token in zip(everyone, at, column, strict=True):
            paths[row].append(node)
            emitted[row].append(token)
            nodes[row] = below[row].get(node, {}).get(token)
    return Acceptance.of(tree, paths, emitted)


def _keep(
    tree: TokenTree, logits: Tensor, transcript: Transcript, choose: Callable[[int], list[tuple[int, int]]]
) -> Acceptance:
    """Record whole chosen paths up to where their row ends; rows in step are cut to the shortest path.

    Args:
        tree: The tree.
        logits: `[B, N, V]` at its nodes.
        transcript: Continued.
        choose: A row to its path: pairs of a node and the token after it.
    """
    rows = range(len(transcript.finished))
    kept: list[list[tuple[int, int]]] = [[] for _ in rows]
    if not transcript.in_step:
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
    return Acceptance.of(tree, paths, emitted)
