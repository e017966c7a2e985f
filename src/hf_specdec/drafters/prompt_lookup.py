"""Prompt lookup: draft what followed earlier occurrences of the text's last tokens. Runs on the host, no training.

Source: Saxena, "Prompt Lookup Decoding" (https://github.com/apoorvumang/prompt-lookup-decoding). Differences: the
longest match is used (`suffix_automaton.py`); several continuations form one tree; shorter matches add further ones;
a longer match gives a larger tree, because it usually means that text is being copied; short ones are often chance.
"""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from hf_specdec.config import SpeculativeConfig
from hf_specdec.drafters.base import Candidate, Candidates, CandidateSession, DraftContext, Drafter, DraftTarget
from hf_specdec.drafters.candidates import MergedTree, merge
from hf_specdec.drafters.registry import register
from hf_specdec.drafters.suffix_automaton import START, SuffixAutomaton
from hf_specdec.errors import DrafterMismatchError, InvalidConfigError
from hf_specdec.host_sync import read
from hf_specdec.trees.draft import Budget, Draft
from hf_specdec.verification.model import num_embedded_tokens
from hf_specdec.verification.step import Step

DEFAULT_NUM_NODES = 32
"""Default nodes of all rows together, because the cost of a forward depends on the tokens of the whole batch."""
MIN_NUM_NODES = 4
"""Minimum of the default nodes per row, reached at batch size 8."""
DEFAULT_NUM_CONTINUATIONS = 2
NODES_PER_MATCHED_TOKEN = 3
"""Nodes drafted per token of the match; 2 to 6 perform equally well on greedy answers of a small model."""

MAX_CANDIDATES = 4
"""Continuations considered per match; shorter matches are added only until this many are found in a text."""
MATCH_CLASSES = (0, 1, 2, 4, 8, 16)
"""Largest match length of each class; longer matches form one more class."""
ONLY_ACCEPTANCE = (0.0, 0.33, 0.55, 0.73, 0.79, 0.87, 0.95)
"""Acceptance rate of a match's only continuation, by class (SmolLM2-135M, answers to Spec-Bench questions)."""
SEVERAL_ACCEPTANCE = (0.15, 0.12, 0.08, 0.06)
"""Acceptance rate of each of several continuations of a match, latest first (same measurement)."""
SHORTER_FACTOR = 0.25
"""Factor on these rates for tokens that followed a suffix of the match, but not the match itself."""


@register("prompt_lookup", aliases=("ngram",))
class PromptLookupDrafter(Drafter):
    """Drafts continuations found in the prompt and the output so far. Works with any model.

    Config fields: `num_draft_tokens` limits the tree (default 32, shared by the rows of a batch), `num_steps` the
    length of a continuation (default: the tree's size), `top_k` the continuations of a node (default 2). `tree` is
    rejected.

    Args:
        corpus: Further texts to search, as token ids, for example earlier answers.

    Raises:
        InvalidConfigError: `corpus` is not an iterable of texts of non-negative token ids.
    """

    def __init__(self, corpus: Iterable[Iterable[int]] | None = None) -> None:
        self._corpus = None if corpus is None else SuffixAutomaton.of_corpus(_token_ids(corpus))

    def bind(self, model: PreTrainedModel) -> None:
        """Check that all tokens of the corpus are in the model's vocabulary.

        Raises:
            DrafterMismatchError: Some are not, so the corpus was made with another tokenizer.
        """
        largest = -1 if self._corpus is None else max(self._corpus.following[START], default=-1)
        vocab_size = num_embedded_tokens(model)
        if largest >= vocab_size:
            raise DrafterMismatchError(
                f"The corpus contains token {largest}, but {type(model).__name__} has only {vocab_size} tokens.",
                "Tokenize the corpus with this model's tokenizer.",
            )

    def limits(self, config: SpeculativeConfig) -> Budget:
        """Return the largest tree; short matches give smaller trees, and no match gives the root alone.

        Raises:
            InvalidConfigError: `tree` is set.
        """
        if config.tree is not None:
            raise InvalidConfigError(
                f"The tree of 'prompt_lookup' depends on the matches found, got tree={config.tree!r}.",
                "Set num_draft_tokens, num_steps or top_k instead.",
            )
        num_nodes = config.num_draft_tokens or DEFAULT_NUM_NODES
        return Budget(num_nodes, config.num_steps or num_nodes, config.top_k or DEFAULT_NUM_CONTINUATIONS)

    def start(self, target: DraftTarget, context: DraftContext, config: SpeculativeConfig) -> CandidateSession:
        """Start a session, which indexes the prompt of every row."""
        shared = max(MIN_NUM_NODES, DEFAULT_NUM_NODES // len(context.roots))
        return _PromptLookupSession(context, config.num_draft_tokens or shared, self._corpus)


def _token_ids(corpus: Iterable[Iterable[int]]) -> Iterator[list[int]]:
    """Yield each text of a corpus as a list of ints.

    Raises:
        InvalidConfigError: The corpus or a text is not iterable, or a token id is not an integer >= 0.
    """
    try:
        for text in corpus:
            ids = list(map(operator.index, text))
            if min(ids, default=0) < 0:
                raise TypeError("token ids must not be negative")
            yield ids
    except TypeError as error:
        raise InvalidConfigError(
            f"`corpus` must be a list of texts, each a list of token ids: {error}.", "Tokenize each text separately."
        ) from error


class _PromptLookupSession(CandidateSession):
    def __init__(self, context: DraftContext, num_nodes: int, corpus: SuffixAutomaton | None) -> None:
        self._device, self._num_nodes = context.roots.device, num_nodes
        valid = (
            torch.ones_like(context.input_ids, dtype=torch.bool) if context.padding is None else context.padding.valid
        )
        rows, masks, roots = read(context.input_ids, valid, context.roots[:, None])
        self._roots = [root for (root,) in roots]
        self._texts = [
            RepeatedText([*(token for token, keep in zip(row, mask, strict=True) if keep), root], corpus)
            for row, mask, root in zip(rows, masks, self._roots, strict=True)
        ]

    @property
    def candidates(self) -> Sequence[Candidates]:
        return self._texts

    def propose(self, budget: Budget) -> Draft:
        trees = [self._row_tree(row, budget) for row in range(len(self._texts))]
        return Draft.from_rows([(tree.tokens, tree.parents) for tree in trees], self._device)

    def observe(self, step: Step) -> None:
        for row, tokens in enumerate(step.acceptance.emitted):
            if tokens:
                self._texts[row].extend(tokens)
                self._roots[row] = tokens[-1]

    def _row_tree(self, row: int, budget: Budget) -> MergedTree:
        text = self._texts[row]
        size = min(self._num_nodes, budget.num_nodes, 1 + NODES_PER_MATCHED_TOKEN * text.longest_match)
        return merge(self._roots[row], [text], num_nodes=size, num_steps=budget.num_steps, top_k=budget.top_k)


class Match(NamedTuple):
    """An occurrence of a text's last tokens: a state of the searched text's automaton, and the number of tokens."""

    state: int
    length: int


Place = tuple[Match, Match | None]
"""The match in the text itself, and the match in the corpus (None without a corpus)."""


class RepeatedText(Candidates):
    """One row's text as a source of candidates: what followed earlier occurrences of its last tokens.

    Args:
        tokens: The text so far.
        corpus: Automaton of further texts to search; None if there are none.

    Example: [1, 2, 3, 1, 2] ends in [1, 2], which was followed by 3 before, so 3 is a candidate.
    """

    def __init__(self, tokens: Iterable[int], corpus: SuffixAutomaton | None = None) -> None:
        self._text, self._corpus = SuffixAutomaton(), corpus
        self._in_corpus: Match | None = None if corpus is None else Match(START, 0)
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the text."""
        for token in tokens:
            self._text.extend([token])
            self._in_corpus = self._follow_corpus(self._in_corpus, token)

    @property
    def start(self) -> Place:
        """The longest earlier occurrence of the text's last tokens in the text, and the longest in the corpus."""
        return Match(*self._text.matched), self._in_corpus

    @property
    def longest_match(self) -> int:
        """Number of tokens of the longer match in `start`."""
        return max(match.length for match in self.start if match is not None)

    def after(self, place: Place) -> Sequence[Candidate]:
        """Return the tokens that followed the matches or their suffixes, each once, most likely first."""
        found: dict[int, Candidate] = {}
        for source, match in zip((self._text, self._corpus), place, strict=True):
            if match is not None and source is not None and match.state > START:
                self._continue(source, match, found)
        return sorted(found.values(), key=lambda candidate: -candidate.probability)

    def follow(self, place: Place, token: int) -> Place:
        """Return the longest matches after one more token; does not change the text."""
        here, in_corpus = place
        return Match(*self._text.follow(here.state, here.length, token)), self._follow_corpus(in_corpus, token)

    def _continue(self, source: SuffixAutomaton, match: Match, found: dict[int, Candidate]) -> None:
        """Add the tokens that followed a match, then those that followed ever shorter suffixes of it, to `found`."""
        (state, length), added = match, 0
        while state > START and added < MAX_CANDIDATES:
            continuations = source.continuations(state)[:MAX_CANDIDATES]
            only, shorter = len(continuations) == 1, added > 0
            match_class = bisect_left(MATCH_CLASSES, length)
            for rank, (token, _) in enumerate(continuations):
                if token not in found:
                    probability = (ONLY_ACCEPTANCE[match_class] if only else SEVERAL_ACCEPTANCE[rank]) * (
                        SHORTER_FACTOR if shorter else 1.0
                    )
                    found[token] = Candidate(token, probability)
                    added += 1
            state = source.link[state]
            length = source.length[state]

    def _follow_corpus(self, match: Match | None, token: int) -> Match | None:
        if self._corpus is None or match is None:
            return None
        return Match(*self._corpus.follow(match.state, match.length, token))
