"""Prompt lookup: draft what followed earlier occurrences of the text's last tokens. Runs on the host, no training.

Source: Saxena, "Prompt Lookup Decoding" (https://github.com/apoorvumang/prompt-lookup-decoding). Differences: the
longest match is used, found by a suffix automaton (Blumer et al., "The smallest automaton recognizing the subwords of
a text", 1985; used for drafting by SAM Decoding, https://arxiv.org/abs/2411.10666); several continuations form one
tree; shorter matches add further ones; a longer match gives a larger tree, because it usually means that text is being
copied; short ones are often chance.
"""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.config import SpeculativeConfig
from hf_specdec.drafters.base import (
    SIZES,
    Candidate,
    Candidates,
    CandidateSession,
    DraftContext,
    Drafter,
    DraftTarget,
)
from hf_specdec.drafters.candidates import merge_sources
from hf_specdec.drafters.registry import register
from hf_specdec.errors import DrafterMismatchError, InvalidConfigError
from hf_specdec.trees.draft import Budget, Draft
from hf_specdec.verification.model import num_embedded_tokens
from hf_specdec.verification.step import Step

MIN_NUM_NODES = 4
"""Minimum of the default nodes per row, reached at batch size 8."""
NODES_PER_MATCHED_TOKEN = 3
"""Nodes drafted per token of the match; 2 to 6 perform equally well on greedy answers of a small model."""
MAX_CONTINUATIONS = 4
"""Continuations considered per match; shorter matches are added only until this many are found in a text."""
MATCH_CLASSES = (0, 1, 2, 4, 8, 16)
"""Largest match length of each class; longer matches form one more class."""
ONLY_ACCEPTANCE = (0.0, 0.33, 0.55, 0.73, 0.79, 0.87, 0.95)
"""Accepted rate of a match's only continuation, by class (SmolLM2-135M, answers to Spec-Bench questions)."""
SEVERAL_ACCEPTANCE: tuple[float, ...] = (0.15, 0.12, 0.08, 0.06)
"""Accepted rate of each of several continuations of a match, latest first (same measurement)."""
SHORTER_FACTOR = 0.25
"""Factor on these rates for tokens that followed a suffix of the match, but not the match itself."""


class TextDrafter(Drafter):
    """Base of drafters of continuations that are found in texts."""

    accepts = SIZES
    tree_from = "the matches found"

    def limits(self, config: SpeculativeConfig) -> Budget:
        """Return the largest tree; short matches give smaller trees, and no match gives the root alone."""
        num_nodes = config.num_draft_tokens or self.defaults.num_nodes
        return Budget(num_nodes, config.num_steps or num_nodes, config.top_k or self.defaults.top_k)


@register("prompt_lookup", aliases=("ngram",))
class PromptLookupDrafter(TextDrafter):
    """Drafts continuations found in the prompt and the output so far. Works with any model.

    Config fields: `num_draft_tokens` limits the tree (default 32, shared by the rows of a batch, because the cost of a
    forward depends on the tokens of the whole batch), `num_steps` the length of a continuation (default: the tree's
    size), `top_k` the continuations of a node (default 2). `tree` is rejected.

    Args:
        corpus: Further texts to search, as token ids, for example earlier answers.

    Raises:
        InvalidConfigError: `corpus` is not an iterable of texts of non-negative token ids.
    """

    defaults = Budget(32, 32, 2)

    def __init__(self, corpus: Iterable[Iterable[int]] | None = None) -> None:
        self._corpus = None if corpus is None else SuffixAutomaton.of_corpus(_token_ids(corpus))

    def bind(self, model: PreTrainedModel) -> None:
        """Check that all tokens of the corpus are in the model's vocabulary."""
        largest = -1 if self._corpus is None else max(self._corpus.following[START], default=-1)
        vocab_size = num_embedded_tokens(model)
        if largest >= vocab_size:
            raise DrafterMismatchError(
                f"The corpus contains token {largest}, but {type(model).__name__} has only {vocab_size} tokens.",
                "Tokenize the corpus with this model's tokenizer.",
            )

    def start(self, target: DraftTarget, context: DraftContext, config: SpeculativeConfig) -> CandidateSession:
        """Start a session, which indexes the prompt of every row."""
        shared = max(MIN_NUM_NODES, self.defaults.num_nodes // len(context.roots))
        return _PromptLookupSession(context, config.num_draft_tokens or shared, self._corpus)


def _token_ids(corpus: Iterable[Iterable[int]]) -> Iterator[list[int]]:
    """Yield each text of a corpus as a list of ints, checked."""
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


class TextSession(CandidateSession):
    """A session whose sources, one per row, grow with the rows' texts: `extend` appends the emitted tokens.

    `roots` `[B]` are the first emitted tokens, on the device of the drafts; `on_host` the same as integers.
    """

    def __init__(self, texts: Sequence[Any], roots: Tensor, on_host: Sequence[int]) -> None:
        self._texts, self._roots, self._device = texts, list(on_host), roots.device

    @property
    def candidates(self) -> Sequence[Candidates]:
        """The texts."""
        return self._texts

    def propose(self, budget: Budget) -> Draft:
        """Draft the likeliest continuations of each text."""
        trees = [
            merge_sources(root, [text], self._limited(text, budget))
            for root, text in zip(self._roots, self._texts, strict=True)
        ]
        return Draft.from_rows([(tree.tokens, tree.parents) for tree in trees], self._device)

    def _limited(self, text: Any, budget: Budget) -> Budget:
        """Return the budget of a row's tree."""
        return budget

    def observe(self, step: Step) -> None:
        """Append the emitted tokens to the texts."""
        for row, tokens in enumerate(step.acceptance.emitted):
            if tokens:
                self._texts[row].extend(tokens)
                self._roots[row] = tokens[-1]


class _PromptLookupSession(TextSession):
    def __init__(self, context: DraftContext, num_nodes: int, corpus: SuffixAutomaton | None) -> None:
        texts, self._num_nodes = context.texts(), num_nodes
        super().__init__([RepeatedText(text, corpus) for text in texts], context.roots, [text[-1] for text in texts])

    def _limited(self, text: RepeatedText, budget: Budget) -> Budget:
        num_nodes = min(self._num_nodes, budget.num_nodes, 1 + NODES_PER_MATCHED_TOKEN * text.longest_match)
        return replace(budget, num_nodes=num_nodes)


class Match(NamedTuple):
    """An occurrence of a text's last tokens: a state of the searched text's automaton, and the number of tokens."""

    state: int
    length: int


class RepeatedText(Candidates):
    """One row's text as a source of candidates: what followed earlier occurrences of its last tokens.

    A place is the match in the text itself and that in the corpus, the automaton of further texts.

    Example: [1, 2, 3, 1, 2] ends in [1, 2], which was followed by 3 before, so 3 is a candidate.
    """

    def __init__(self, tokens: Iterable[int], corpus: SuffixAutomaton | None = None) -> None:
        self._text, self._corpus = SuffixAutomaton(), corpus
        self._in_corpus = NO_MATCH
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the text."""
        for token in tokens:
            self._text.extend([token])
            if self._corpus is not None:
                self._in_corpus = self._corpus.follow(self._in_corpus, token)

    @property
    def start(self) -> tuple[Match, Match]:
        """The longest earlier occurrence of the text's last tokens in the text, and the longest in the corpus."""
        return self._text.matched, self._in_corpus

    @property
    def longest_match(self) -> int:
        """Number of tokens of the longer match in `start`."""
        return max(match.length for match in self.start)

    def after(self, place: tuple[Match, Match]) -> Sequence[Candidate]:
        """Return the tokens that followed the matches or their suffixes, each once, most likely first."""
        found: dict[int, Candidate] = {}
        for source, match in zip((self._text, self._corpus), place, strict=True):
            if source is not None:
                _add_continuations(source, match, found)
        return sorted(found.values(), key=lambda candidate: -candidate.probability)

    def follow(self, place: tuple[Match, Match], token: int) -> tuple[Match, Match]:
        """Return the longest matches after one more token; does not change the text."""
        here, in_corpus = place
        if self._corpus is not None:
            in_corpus = self._corpus.follow(in_corpus, token)
        return self._text.follow(here, token), in_corpus


def _add_continuations(source: SuffixAutomaton, match: Match, found: dict[int, Candidate]) -> None:
    """Add the tokens that followed a match, then those that followed ever shorter suffixes of it, to `found`."""
    (state, length), added = match, 0
    while state > START and added < MAX_CONTINUATIONS:
        continuations = source.continuations(state)[:MAX_CONTINUATIONS]
        rates = SEVERAL_ACCEPTANCE
        if len(continuations) == 1:
            rates = (ONLY_ACCEPTANCE[bisect_left(MATCH_CLASSES, length)],)
        factor = SHORTER_FACTOR if added else 1.0
        for rank, (token, _) in enumerate(continuations):
            if token not in found:
                found[token] = Candidate(token, rates[rank] * factor)
                added += 1
        state = source.link[state]
        length = source.length[state]


START = 0
"""State of the empty text; every match starts here."""
NO_STATE = -1
NO_MATCH = Match(START, 0)


class SuffixAutomaton:
    """Finds the longest suffix of a growing text that occurred before, and what followed it.

    A state represents substrings that end at the same positions. The longest suffix of them that also ends elsewhere
    belongs to another state, to which the *suffix link* of the state points. The link of the state of the whole text
    thus gives the longest suffix that occurred before. There are at most two states per token, of about 400 bytes
    each, and appending a token takes amortized constant time.

    Args:
        tokens: The text so far.

    Attributes:
        following: Per state: dict from each token that follows its substrings to the state after that token.
        link: Per state: its suffix link, `NO_STATE` for `START`.
        length: Per state: length of its longest substring.
        latest: Per state: number of tokens up to the end of its latest occurrence.
        count: Per state: how often its substrings occur. Both leave out occurrences more than `REFRESHED` suffix links
            away from the end of the text.
        last: State of the whole text.
        num_tokens: Length of the text.
    """

    REFRESHED = 64
    """Maximum number of states updated (`latest`, `count`) per appended token, which bounds the cost of appending."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.following: list[dict[int, int]] = [{}]
        self.link, self.length, self.latest, self.count = [NO_STATE], [0], [0], [0]
        self.last, self.num_tokens = START, 0
        self.extend(tokens)

    @classmethod
    def of_corpus(cls, documents: Iterable[Iterable[int]]) -> SuffixAutomaton:
        """Build the automaton of several texts; no match crosses from one into the next."""
        automaton = cls()
        for separator, document in enumerate(documents, start=1):
            automaton.extend(document)
            automaton.extend([-separator])  # a different negative number each time, so that it never matches
        return automaton

    @property
    def matched(self) -> Match:
        """The text's longest suffix that occurred before; `NO_MATCH` if there is none."""
        state = max(self.link[self.last], START)
        return Match(state, self.length[state])

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the text."""
        for token in tokens:
            self._append(token)

    def follow(self, match: Match, token: int) -> Match:
        """Return the longest suffix of a match and one more token that occurs in the text, or `NO_MATCH`."""
        state, length = match
        while state > START and token not in self.following[state]:
            state = self.link[state]
            length = self.length[state]
        if token in self.following[state]:
            return Match(self.following[state][token], length + 1)
        return NO_MATCH

    def continuations(self, state: int) -> list[tuple[int, int]]:
        """Return the tokens that followed a state's substrings and the states after them, latest occurrence first."""
        found = [(token, after) for token, after in self.following[state].items() if token >= 0]
        if len(found) > 1:
            found.sort(key=lambda pair: self.latest[pair[1]], reverse=True)
        return found

    def _append(self, token: int) -> None:
        following, link, length = self.following, self.link, self.length
        self.num_tokens += 1
        new, state = self._add_state({}, length[self.last] + 1, NO_STATE), self.last
        while state != NO_STATE and token not in following[state]:
            following[state][token] = new
            state = link[state]
        if state == NO_STATE:
            link[new] = START
        else:
            known = following[state][token]
            if length[known] == length[state] + 1:
                link[new] = known
            else:  # only the shorter substrings of `known` now also end here: split them off into a new state
                shorter = self._add_state(dict(following[known]), length[state] + 1, link[known])
                self.latest[shorter], self.count[shorter] = self.latest[known], self.count[known]
                while state != NO_STATE and following[state].get(token) == known:
                    following[state][token] = shorter
                    state = link[state]
                link[known] = link[new] = shorter
        self.last = new
        for _ in range(self.REFRESHED):
            if new <= START:
                break
            self.latest[new] = self.num_tokens
            self.count[new] += 1
            new = link[new]

    def _add_state(self, following: dict[int, int], length: int, link: int) -> int:
        self.following.append(following)
        self.length.append(length)
        self.link.append(link)
        self.latest.append(self.num_tokens)
        self.count.append(0)
        return len(self.length) - 1
