"""Prompt lookup: what followed the last time the text ended like this? Training-free, on the host.

Source: Saxena, "Prompt Lookup Decoding" (https://github.com/apoorvumang/prompt-lookup-decoding); here the match is the
longest one (`suffix_automaton.py`), several continuations form one tree, shorter matches follow where longer ones had
no other continuation, and the tree grows with the length of the match: a long match is a copy in progress, a short one
an accident.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from hf_specdec.config import SpeculativeConfig
from hf_specdec.drafters.base import CandidateSession, DraftContext, Drafter
from hf_specdec.drafters.candidates import Candidate, Candidates, Merged, merge
from hf_specdec.drafters.suffix_automaton import START, SuffixAutomaton
from hf_specdec.errors import DrafterMismatchError, InvalidConfigError
from hf_specdec.host_sync import read
from hf_specdec.trees.draft import Budget, Draft
from hf_specdec.trees.tree import stack_trees
from hf_specdec.verification.model import num_embedded_tokens
from hf_specdec.verification.step import Step
from hf_specdec.verification.target import Target

DEFAULT_NUM_NODES = 32
"""Nodes of all rows together: a forward over a batch costs what its tokens cost."""
LEAST_NUM_NODES = 4
DEFAULT_NUM_CONTINUATIONS = 2
NODES_PER_MATCHED_TOKEN = 3
"""Nodes granted per token of the match; 2 to 6 do equally well on greedy answers of a small model."""

CANDIDATES = 4
"""Continuations of a node that are thought of."""
MATCH_CLASSES = (0, 1, 2, 4, 8, 16)
"""The longest match of each class but the last."""
ONLY = (0.0, 0.33, 0.55, 0.73, 0.79, 0.87, 0.95)
"""How often the only continuation of a match comes true, by class: answers of SmolLM2-135M to Spec-Bench questions."""
SEVERAL = (0.15, 0.12, 0.08, 0.06)
"""The same of a continuation among several, by rank."""
SHORTER = 0.25
"""What is left of it where a longer match was continued in another way."""


class PromptLookupDrafter(Drafter):
    """Drafts continuations found in the prompt and in the output so far. Takes any model.

    Config fields: `num_draft_tokens` caps the tree (default 32, shared by the rows of a batch), `num_steps` the length
    of a continuation (default: the tree's size), `top_k` the number of continuations (default 2). `tree` means nothing
    to it.

    Args:
        corpus: Texts as token ids that are looked up beside prompt and output, for example earlier answers.
    """

    method = "prompt_lookup"

    def __init__(self, corpus: Iterable[Iterable[int]] | None = None) -> None:
        self._corpus = None if corpus is None else SuffixAutomaton.of_corpus(_token_ids(corpus))

    def bind(self, model: PreTrainedModel) -> None:
        """Check that the corpus is of tokens that the model has.

        Raises:
            DrafterMismatchError: It holds others: another tokenizer made it.
        """
        largest = -1 if self._corpus is None else max(self._corpus.following[START], default=-1)
        vocab_size = num_embedded_tokens(model)
        if largest >= vocab_size:
            raise DrafterMismatchError(
                f"The corpus holds token {largest}, the vocabulary of {type(model).__name__} has {vocab_size} tokens.",
                "Tokenize the corpus with this model's tokenizer.",
            )

    def limits(self, config: SpeculativeConfig) -> Budget:
        """The caps; a tree is smaller where the match is short, and is the root alone where there is none."""
        if config.tree is not None:
            raise InvalidConfigError(
                f"The tree of 'prompt_lookup' follows from the matches it finds, got tree={config.tree!r}.",
                "Set num_draft_tokens, num_steps or top_k instead.",
            )
        num_nodes = config.num_draft_tokens or DEFAULT_NUM_NODES
        return Budget(num_nodes, config.num_steps or num_nodes, config.top_k or DEFAULT_NUM_CONTINUATIONS)

    def start(self, target: Target, context: DraftContext, config: SpeculativeConfig) -> CandidateSession:
        """Index the prompt of every row."""
        shared = max(LEAST_NUM_NODES, DEFAULT_NUM_NODES // len(context.roots))
        return _PromptLookupSession(context, config.num_draft_tokens or shared, self._corpus)


def _token_ids(corpus: Iterable[Iterable[int]]) -> Iterator[list[int]]:
    """The texts of a corpus.

    Raises:
        InvalidConfigError: They are not lists of token ids.
    """
    try:
        for text in corpus:
            ids = list(map(operator.index, text))
            if min(ids, default=0) < 0:
                raise TypeError("a token id is not negative")
            yield ids
    except TypeError as error:
        raise InvalidConfigError(
            f"`corpus` must be texts as lists of token ids: {error}.", "Tokenize each text on its own."
        ) from error


class _PromptLookupSession(CandidateSession):
    def __init__(self, context: DraftContext, num_nodes: int, corpus: SuffixAutomaton | None) -> None:
        self._device, self._num_nodes = context.roots.device, num_nodes
        valid = (
            torch.ones_like(context.input_ids, dtype=torch.bool) if context.padding is None else context.padding.valid
        )
        rows, kept, roots = read(context.input_ids, valid, context.roots[:, None])
        self._roots = [root for (root,) in roots]
        self._texts = [
            RepeatedText([*(token for token, keep in zip(row, real, strict=True) if keep), root], corpus)
            for row, real, root in zip(rows, kept, self._roots, strict=True)
        ]

    @property
    def candidates(self) -> Sequence[Candidates]:
        return self._texts

    def propose(self, budget: Budget) -> Draft:
        trees = [self._row_tree(row, budget) for row in range(len(self._texts))]
        return Draft(stack_trees([(tree.tokens, tree.parents) for tree in trees], self._device))

    def observe(self, step: Step) -> None:
        for row, tokens in enumerate(step.acceptance.emitted):
            if tokens:
                self._texts[row].extend(tokens)
                self._roots[row] = tokens[-1]

    def _row_tree(self, row: int, budget: Budget) -> Merged:
        text = self._texts[row]
        size = min(self._num_nodes, budget.num_nodes, 1 + NODES_PER_MATCHED_TOKEN * text.longest_match)
        return merge(
            self._roots[row], [text], _as_told, num_nodes=size, num_steps=budget.num_steps, top_k=budget.top_k
        )


def _as_told(_kind: Hashable, prior: float) -> float:
    return prior


class Match(NamedTuple):
    """Where the end of a text occurs in an automaton."""

    state: int
    length: int


Place = tuple[Match, Match | None]
"""The match in the text itself, and in a corpus."""


class RepeatedText(Candidates):
    """A row's text as a source: what followed its end where it occurred before, here or in a corpus.

    Args:
        tokens: The text so far.
        corpus: Other texts.

    Example: in [1, 2, 3, 1, 2] the end [1, 2] occurred before, so token 3 is what may follow.
    """

    def __init__(self, tokens: Iterable[int], corpus: SuffixAutomaton | None = None) -> None:
        self._text, self._corpus = SuffixAutomaton(), corpus
        self._in_corpus: Match | None = None if corpus is None else Match(START, 0)
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens."""
        for token in tokens:
            self._text.extend([token])
            self._in_corpus = self._follow_corpus(self._in_corpus, token)

    @property
    def start(self) -> Place:
        """The matches of the text's end."""
        return Match(*self._text.matched), self._in_corpus

    @property
    def longest_match(self) -> int:
        """Tokens of the longest match of the text's end."""
        return max(match.length for match in self.start if match is not None)

    def after(self, place: Place) -> Sequence[Candidate]:
        """Continuations of the longest match, then of its ends, each token once; the text comes before the corpus."""
        found: dict[int, Candidate] = {}
        for source, match in zip((self._text, self._corpus), place, strict=True):
            if match is not None and source is not None:
                self._continue(source, match, found)
        return sorted(found.values(), key=lambda candidate: -candidate.prior)

    def follow(self, place: Place, token: int) -> Place:
        """The matches one token further."""
        here, in_corpus = place
        return Match(*self._text.follow(here.state, here.length, token)), self._follow_corpus(in_corpus, token)

    def _continue(self, source: SuffixAutomaton, match: Match, found: dict[int, Candidate]) -> None:
        state, length = match
        told, name = 0, "prompt_lookup" if source is self._text else "corpus"
        while state > START and told < CANDIDATES:
            continuations = source.continuations(state)[:CANDIDATES]
            only, shorter = len(continuations) == 1, told > 0
            match_class = sum(length > longest for longest in MATCH_CLASSES)
            for rank, (token, _) in enumerate(continuations):
                prior = (ONLY[match_class] if only else SEVERAL[rank]) * (SHORTER if shorter else 1.0)
                candidate = Candidate(token, (name, match_class, only, rank, shorter), prior)
                if token not in found:
                    found[token] = candidate
                    told += 1
            state = source.link[state]
            length = source.length[state]

    def _follow_corpus(self, match: Match | None, token: int) -> Match | None:
        if self._corpus is None or match is None:
            return None
        return Match(*self._corpus.follow(match.state, match.length, token))
