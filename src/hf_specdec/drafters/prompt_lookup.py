"""Prompt lookup: what followed the last time the text ended like this? Training-free, on the host.

Source: Saxena, "Prompt Lookup Decoding" (https://github.com/apoorvumang/prompt-lookup-decoding); here the suffix
match is the longest one, the latest occurrence comes first, several continuations form one tree, and the tree grows
with the length of the match: a long match is a copy in progress, a short one an accident.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise

import torch

from hf_specdec.config import SpeculativeConfig
from hf_specdec.draft import Budget, Draft
from hf_specdec.drafters.base import DraftContext, Drafter, DraftSession
from hf_specdec.errors import InvalidConfigError
from hf_specdec.host_sync import read
from hf_specdec.step import Step
from hf_specdec.target.target import Target
from hf_specdec.tree import stack_trees
from hf_specdec.tree_growth import merge_chains

DEFAULT_NUM_NODES = 32
"""Nodes of all rows together: a forward over a batch costs what its tokens cost."""
LEAST_NUM_NODES = 4
DEFAULT_NUM_CONTINUATIONS = 2
NODES_PER_MATCHED_TOKEN = 3
"""Nodes granted per token of the match; 2 to 6 do equally well on greedy answers of a small model."""
LONGEST_COUNTED_MATCH = 64


class PromptLookupDrafter(Drafter):
    """Drafts continuations found in the prompt and in the output so far. Takes any model.

    Config fields: `num_draft_tokens` caps the tree (default 32, shared by the rows of a batch), `num_steps` the length
    of a continuation (default: the tree's size), `top_k` the number of continuations (default 2). `tree` means nothing
    to it.
    """

    method = "prompt_lookup"

    def limits(self, config: SpeculativeConfig) -> Budget:
        """The caps; a tree is smaller where the match is short, and is the root alone where there is none."""
        if config.tree is not None:
            raise InvalidConfigError(
                f"The tree of 'prompt_lookup' follows from the matches it finds, got tree={config.tree!r}.",
                "Set num_draft_tokens, num_steps or top_k instead.",
            )
        num_nodes = config.num_draft_tokens or DEFAULT_NUM_NODES
        return Budget(num_nodes, config.num_steps or num_nodes, config.top_k or DEFAULT_NUM_CONTINUATIONS)

    def start(self, target: Target, context: DraftContext, config: SpeculativeConfig) -> DraftSession:
        """Index the prompt of every row."""
        shared = max(LEAST_NUM_NODES, DEFAULT_NUM_NODES // len(context.roots))
        return _PromptLookupSession(context, config.num_draft_tokens or shared)


class _PromptLookupSession(DraftSession):
    def __init__(self, context: DraftContext, num_nodes: int) -> None:
        self._device, self._num_nodes = context.roots.device, num_nodes
        valid = (
            torch.ones_like(context.input_ids, dtype=torch.bool) if context.padding is None else context.padding.valid
        )
        rows, kept, roots = read(context.input_ids, valid, context.roots[:, None])
        self._texts = [
            SuffixIndex([*(token for token, keep in zip(row, real, strict=True) if keep), root])
            for row, real, (root,) in zip(rows, kept, roots, strict=True)
        ]

    def propose(self, budget: Budget) -> Draft:
        return Draft(stack_trees([self._row_tree(text, budget) for text in self._texts], self._device))

    def observe(self, step: Step) -> None:
        for text, tokens in zip(self._texts, step.acceptance.emitted, strict=True):
            text.extend(tokens)

    def _row_tree(self, text: SuffixIndex, budget: Budget) -> tuple[list[int], list[int]]:
        matches = text.longest_matches(budget.top_k)
        longest = matches[0][1] if matches else 0
        size = min(self._num_nodes, budget.num_nodes, 1 + NODES_PER_MATCHED_TOKEN * longest)
        chains = (text.tokens[end : end + budget.num_steps] for end, _ in matches)
        return merge_chains(text.tokens[-1], _share(chains, len(matches), size - 1), size)


def _share(chains: Iterator[list[int]], num_chains: int, budget: int) -> Iterator[list[int]]:
    """The first chain may take three quarters of the nodes where others follow, the others what is left."""
    for index, chain in enumerate(chains):
        yield chain[: budget * 3 // 4] if index == 0 and num_chains > 1 else chain


class SuffixIndex:
    """A growing text that finds where its own end occurred before.

    Example: in [1, 2, 3, 1, 2] the end [1, 2] occurred before position 2, so token 3 is what may follow.
    """

    def __init__(self, tokens: list[int]) -> None:
        self.tokens: list[int] = []
        self._after_token: defaultdict[int, list[int]] = defaultdict(list)
        self._after_pair: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        self.extend(tokens)

    def extend(self, tokens: list[int] | tuple[int, ...]) -> None:
        """Append tokens."""
        begin = len(self.tokens)
        self.tokens.extend(tokens)
        # position p is indexed under the tokens before it, as soon as it is known what stands there
        for position in range(max(begin, 1), len(self.tokens)):
            self._after_token[self.tokens[position - 1]].append(position)
        for position, pair in enumerate(pairwise(self.tokens[max(begin - 2, 0) : -1]), start=max(begin, 2)):
            self._after_pair[pair].append(position)

    def longest_matches(self, limit: int) -> list[tuple[int, int]]:
        """Where the longest suffixes of the text ended before.

        Returns:
            At most `limit` pairs (position that follows, matched tokens): longest first, then latest first, each
            with another following token.
        """
        tokens = self.tokens
        positions = self._after_pair.get((tokens[-2], tokens[-1]), []) if len(tokens) > 1 else []
        positions = positions or self._after_token.get(tokens[-1], [])
        found = sorted(((self._match_length(position), position) for position in positions), reverse=True)
        matches: list[tuple[int, int]] = []
        for length, position in found:
            if all(tokens[position] != tokens[other] for other, _ in matches):
                matches.append((position, length))
                if len(matches) == limit:
                    break
        return matches

    def _match_length(self, position: int) -> int:
        tokens, length = self.tokens, 1
        limit = min(position, LONGEST_COUNTED_MATCH)
        while length < limit and tokens[position - 1 - length] == tokens[-1 - length]:
            length += 1
        return length
