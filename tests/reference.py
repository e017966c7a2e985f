"""Slow and obvious counterparts of what the package does fast, and a drafter that knows the answer."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel

from hf_specdec.config import SpeculativeConfig
from hf_specdec.drafters.base import DraftContext, Drafter, DraftSession
from hf_specdec.heads.attention import Attend, attend_causally
from hf_specdec.trees.draft import Budget, Draft
from hf_specdec.trees.tree import stack_trees
from hf_specdec.verification.step import Step
from hf_specdec.verification.target import Target


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
        return _OracleSession(self, context)


class _OracleSession(DraftSession):
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
