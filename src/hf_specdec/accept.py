"""Which drafted tokens are kept: one function per rule, one signature for all.

A rule sees the tree, the target's logits at its nodes and the transcript it continues; never a model, a cache or
a drafter. It decides at each node of the path which token the target says, and descends while that token is a
child. Before: `target.py`. After: `cache.commit`. See docs/acceptance.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_specdec.errors import UnsupportedGenerationError
from hf_specdec.sampling import Transcript
from hf_specdec.tree import ROOT_PARENT, TokenTree, chosen_path


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The kept path of each row. `tokens[b, i]` is what the target says after node `path[b, i]`.

    A finished row keeps nothing: its path and tokens are -1.
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
    """Lossless sampling: draw from the target's processed distribution at each node, descend while it is drafted.

    For a deterministic tree this equals the rejection rule of SpecInfer and EAGLE-2 (a drafted token x is a
    point mass, accepted with probability p(x)), with one draw per emitted token.

    Raises:
        UnsupportedGenerationError: The tree was sampled (`draft_probs`): its siblings need their own rule.
    """
    if tree.draft_probs is not None:
        raise UnsupportedGenerationError(
            "Rejection of sampled drafts is not supported yet.", "Use a deterministic drafter (draft_probs=None)."
        )
    return follow(tree, logits, transcript)


def follow(tree: TokenTree, logits: Tensor, transcript: Transcript) -> Acceptance:
    """Walk each row's path: the transcript chooses the token after a node; descend where it is a child."""
    parents = tree.parents.expand(tree.tokens.shape).tolist()
    drafted = tree.tokens.tolist()
    paths: list[list[int]] = []
    emitted: list[list[int]] = []
    for row, finished in enumerate(transcript.finished):
        path: list[int] = []
        tokens: list[int] = []
        node: int | None = None if finished else 0
        children = {
            (parent, token): child
            for child, (parent, token) in reversed(list(enumerate(zip(parents[row], drafted[row], strict=True))))
            if parent != ROOT_PARENT
        }
        while node is not None:
            token = transcript.choose(row, logits[row, node])
            path.append(node)
            tokens.append(token)
            node = None if transcript.finished[row] else children.get((node, token))
        paths.append(path)
        emitted.append(tokens)
    return Acceptance.of(tree, paths, emitted)


RULES: dict[str, AcceptanceRule] = {"greedy": greedy, "rejection": rejection}
"""The rules by name."""
