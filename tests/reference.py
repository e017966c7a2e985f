"""Slow and obvious counterparts of what the package does fast, and a drafter that knows the answer."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel

import zoo
from hf_specdec.config import SpeculativeConfig
from hf_specdec.drafters.base import DraftContext, Drafter, DraftSession
from hf_specdec.heads.attention import Attend, attend_causally
from hf_specdec.trees.draft import Budget, Draft
from hf_specdec.trees.tree import stack_trees
from hf_specdec.verification.model import lm_head_rows
from hf_specdec.verification.step import Step
from hf_specdec.verification.target import Target

IDS = torch.randint(3, zoo.VOCAB_SIZE, (3, 14), generator=torch.Generator().manual_seed(1))
MASK = torch.ones_like(IDS)
for _row, _padding in ((1, 4), (2, 9)):
    IDS[_row, :_padding] = 0
    MASK[_row, :_padding] = 0
"""Prompts of three rows, two of them left-padded."""


def window_of(size: int | None) -> Attend:
    """What the drafter's mask does, over a whole sequence."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        length = torch.arange(query.shape[2])
        behind = length[:, None] - length
        mask = (behind >= 0) & (behind < (size or len(length)))
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)

    return attend if size else attend_causally


def path_to_root(parents: Sequence[int], node: int) -> list[int]:
    """Nodes from the root to a node."""
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]


def greedy_one_by_one(model: PreTrainedModel, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Greedy decoding without any cache: the whole text through the model for every token."""
    text = list(prompt)
    for _ in range(num_tokens):
        logits = model(input_ids=torch.tensor([text]), use_cache=False).logits
        text.append(int(logits[0, -1].float().argmax()))
    return text[len(prompt) :]


class OracleDrafter(Drafter):
    """Drafts the known answer, a wrong one, or at random either, as trees that differ from row to row.

    Args:
        answers: `[B, T]` the right continuation of each row.
        pattern: "never", "always" or "sometimes" right.
        vocab_size: Wrong tokens are drawn below it.
    """

    method = "oracle"

    def __init__(self, answers: Tensor, pattern: str, vocab_size: int, seed: int = 0) -> None:
        self.answers, self.pattern, self.vocab_size, self.seed = answers.tolist(), pattern, vocab_size, seed

    def limits(self, config: SpeculativeConfig) -> Budget:
        size = config.num_draft_tokens or 9
        return Budget(size, size, size)

    def start(self, target: Target, context: DraftContext, config: SpeculativeConfig) -> DraftSession:
        return OracleSession(self, context)


class OracleSession(DraftSession):
    def __init__(self, oracle: OracleDrafter, context: DraftContext) -> None:
        self.oracle, self.device = oracle, context.roots.device
        self.random = random.Random(oracle.seed)
        self.roots = context.roots.tolist()
        self.emitted = [1] * len(self.roots)

    def propose(self, budget: Budget) -> Draft:
        return Draft(stack_trees([self._tree(row, budget) for row in range(len(self.roots))], self.device))

    def observe(self, step: Step) -> None:
        for row, tokens in enumerate(step.acceptance.emitted):
            self.emitted[row] += len(tokens)
            self.roots[row] = tokens[-1] if tokens else self.roots[row]

    def _tree(self, row: int, budget: Budget) -> tuple[list[int], list[int]]:
        """A random tree in which the right child of a right node is there always, never or sometimes."""
        rng, answer = self.random, self.oracle.answers[row][self.emitted[row] :]
        tokens, parents, right_depth, depths, num_nodes = [self.roots[row]], [-1], {0: 0}, [0], budget.num_nodes
        used: set[tuple[int, int]] = set()
        for _ in range(rng.randint(2, num_nodes - 1) if num_nodes > 2 else num_nodes - 1):
            parent = rng.randrange(len(tokens)) if rng.random() < 0.4 else len(tokens) - 1
            depth = right_depth.get(parent)
            right = answer[depth] if depth is not None and depth < len(answer) else None
            be_right = {"never": False, "always": True, "sometimes": rng.random() < 0.6}[self.oracle.pattern]
            token = right if be_right and right is not None else rng.randrange(self.oracle.vocab_size)
            if (not be_right and token == right) or (parent, token) in used or depths[parent] == budget.num_steps:
                continue
            used.add((parent, token))
            if token == right and depth is not None:
                right_depth[len(tokens)] = depth + 1
            tokens.append(token)
            parents.append(parent)
            depths.append(depths[parent] + 1)
        return tokens, parents


class Recorder:
    """Wraps a drafter's sessions: keeps every proposed tree with the texts it was proposed for."""

    def __init__(self, drafter: Any, ids: Tensor) -> None:
        self.trees: list[tuple[list[list[int]], Any]] = []
        self.drafts: list[Draft] = []
        self.budgets: list[Budget] = []
        start = drafter.start

        def recording_start(target: Any, context: Any, config: SpeculativeConfig) -> Any:
            session = start(target, context, config)
            texts = [
                [token for token, real in zip(row, mask, strict=True) if real]
                for row, mask in zip(ids.tolist(), (ids != 0).tolist(), strict=True)
            ]
            propose, observe = session.propose, session.observe
            for text, root in zip(texts, context.roots.tolist(), strict=True):
                text.append(root)

            def recording_propose(budget: Budget) -> Any:
                draft = propose(budget)
                self.trees.append(([list(text) for text in texts], draft.tree))
                self.drafts.append(draft)
                self.budgets.append(budget)
                return draft

            def recording_observe(step: Step) -> None:
                for text, tokens in zip(texts, step.acceptance.emitted, strict=True):
                    text.extend(tokens)
                observe(step)

            session.propose, session.observe = recording_propose, recording_observe
            return session

        drafter.start = recording_start


class SlowEagle:
    """The head by definition: true features of a text, then its own, all recomputed for every path."""

    def __init__(self, model: Any, head: Any, text: list[int]) -> None:
        self.model, self.head, self.text = model, head, text
        with torch.no_grad():
            states = model(
                input_ids=torch.tensor([text[:-1]]), use_cache=False, output_hidden_states=True
            ).hidden_states
            self.features = head.fuse(torch.cat([states[layer] for layer in head.feature_layers], dim=-1))[0]

    @torch.no_grad()
    def children(self, path: list[int]) -> Tensor:
        """`[Vd]` log-probabilities of what follows the text and the drafted path, of which P-EAGLE sees the length."""
        mask, features = getattr(self.head.config, "mask_token_id", None), self.features
        if mask is not None:
            hidden = self.head.fuse(self.head.mask_hidden)[0].expand(len(path), -1)
            path, features = [mask] * len(path), torch.cat([features, hidden])
        tokens = [*self.text[1:], *path]
        embeddings = self.head.embedding_for(self.model)(torch.tensor([tokens]))
        attend = window_of(self.head.config.sliding_window)
        for length in range(len(self.text) - 1, len(tokens) + 1):
            positions = torch.arange(length)[None]
            predicted = self.head(embeddings[:, :length], features[None, :length], positions, attend)
            if mask is None and length < len(tokens):
                features = torch.cat([features, predicted[0, -1:]])
        lm_head = lm_head_rows(self.model, self.head.hot_token_ids) if self.head.shares_lm_head else None
        return self.head.score(predicted[0, -1], lm_head).log_softmax(-1)

    def best_children(self, path: list[int], k: int) -> list[tuple[float, int]]:
        scores, ids = self.children(path).topk(k)
        if self.head.hot_token_ids is not None:
            ids = self.head.hot_token_ids[ids]
        return list(zip(scores.tolist(), ids.tolist(), strict=True))


def slow_dynamic_tree(slow: SlowEagle, num_steps: int, k: int, num_nodes: int) -> set[tuple[int, ...]]:
    """EAGLE-2 in words: expand the k best of each level (all for P-EAGLE), then keep the best nodes of all."""
    config = getattr(getattr(slow, "head", None), "config", None)  # an MTP module has none
    most = k if getattr(config, "mask_token_id", None) is None else None
    candidates: list[tuple[float, tuple[int, ...]]] = []
    frontier: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for _ in range(num_steps):
        level = [
            (score + gain, (*path, token))
            for score, path in frontier
            for gain, token in slow.best_children(list(path), k)
        ]
        candidates += level
        frontier = sorted(level, reverse=True)[:most]
    return {path for _, path in sorted(candidates, reverse=True)[: num_nodes - 1]}


def paths_of(tree: Any, row: int) -> list[tuple[int, ...]]:
    """Token path of every drafted node of a row."""
    parents = tree.parents.expand(tree.tokens.shape)[row].tolist()
    paths: list[tuple[int, ...]] = [()]
    for node, token in enumerate(tree.tokens[row].tolist()[1:], start=1):
        paths.append((*paths[parents[node]], token))
    return paths[1:]
