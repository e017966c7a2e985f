"""Draft what followed the text's last tokens in earlier answers. Runs on the host, no training."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterable, Sequence

from torch import Tensor

from hf_specdec.config import SpeculativeConfig
from hf_specdec.drafters.answer_history import CONTEXT_TOKENS, AnswerHistory, history_keys
from hf_specdec.drafters.base import Candidate, Candidates, CandidateSession, DraftContext, Drafter, DraftTarget
from hf_specdec.drafters.candidates import merge
from hf_specdec.drafters.prompt_lookup import (
    DEFAULT_NUM_NODES,
    MATCH_CLASSES,
    MAX_CANDIDATES,
    ONLY_ACCEPTANCE,
    SHORTER_FACTOR,
    Match,
)
from hf_specdec.drafters.suffix_automaton import START, SuffixAutomaton
from hf_specdec.errors import InvalidConfigError
from hf_specdec.host_sync import read
from hf_specdec.trees.draft import Budget, Draft
from hf_specdec.verification.step import Step
from hf_specdec.verification.window import PromptPadding

PRIOR_WEIGHT = 8.0
"""Occurrences from which on the counts of a match weigh more than the acceptance rate of matches of its length."""

MAX_FOLLOWING = 256
"""Matches followed by more different tokens than this are skipped: each is unlikely, and counting them takes long."""

USED_MATCH = 4
"""Tokens of a match from which on its answer counts as used, see `AnswerHistory`."""


class HistoryDrafter(Drafter):
    """Drafts continuations found in earlier answers, with probabilities from their counts.

    Part of `"auto"` and `"hybrid"` if the config sets `history`. Fields: `num_draft_tokens` (default 32), `num_steps`
    (default: the tree's size) and `top_k` (4).

    Args:
        history: The answers; the caller adds new ones.
        of: As `history` in `SpeculativeConfig`: which answers a row may see.
    """

    method = "history"

    def __init__(self, history: AnswerHistory, of: bool | str | Sequence[str]) -> None:
        self._history, self._of = history, of

    def limits(self, config: SpeculativeConfig) -> Budget:
        """Return the largest tree.

        Raises:
            InvalidConfigError: `tree` is set.
        """
        if config.tree is not None:
            raise InvalidConfigError(
                f"The tree of a history depends on the matches found, got tree={config.tree!r}.", "Drop `tree`."
            )
        num_nodes = config.num_draft_tokens or DEFAULT_NUM_NODES
        return Budget(num_nodes, config.num_steps or num_nodes, config.top_k or MAX_CANDIDATES)

    def start(self, target: DraftTarget, context: DraftContext, config: SpeculativeConfig) -> CandidateSession:
        """Start a session, which searches the answers of each row's key."""
        return _HistorySession(self._history, self._of, context)


class _HistorySession(CandidateSession):
    def __init__(self, history: AnswerHistory, of: bool | str | Sequence[str], context: DraftContext) -> None:
        self._history, self._device = history, context.roots.device
        prompts = unpadded_prompts(context.input_ids, context.padding)
        roots = [root for (root,) in read(context.roots[:, None])[0]]
        self._keys, self._roots = history_keys(of, prompts), roots
        self._texts = [
            AnswerMatches(history.find(key), (*prompt[-CONTEXT_TOKENS:], root))
            for key, prompt, root in zip(self._keys, prompts, roots, strict=True)
        ]

    @property
    def candidates(self) -> Sequence[Candidates]:
        return self._texts

    def propose(self, budget: Budget) -> Draft:
        trees = [
            merge(root, [text], num_nodes=budget.num_nodes, num_steps=budget.num_steps, top_k=budget.top_k)
            for root, text in zip(self._roots, self._texts, strict=True)
        ]
        return Draft.from_rows([(tree.tokens, tree.parents) for tree in trees], self._device)

    def observe(self, step: Step) -> None:
        for row, tokens in enumerate(step.acceptance.emitted):
            text = self._texts[row]
            if tokens and text.automaton is not None:
                text.extend(tokens)
                if text.start.length >= USED_MATCH:
                    self._history.use(self._keys[row], text.automaton, text.start.state)
            if tokens:
                self._roots[row] = tokens[-1]


def unpadded_prompts(input_ids: Tensor, padding: PromptPadding | None) -> list[list[int]]:
    """Return each row's prompt without padding, on the host.

    Args:
        input_ids: `[B, P]`.
        padding: Padding of these columns.
    """
    if padding is None:
        (rows,) = read(input_ids)
        return rows
    rows, masks = read(input_ids, padding.valid)
    return [
        [token for token, keep in zip(row, mask, strict=True) if keep] for row, mask in zip(rows, masks, strict=True)
    ]


class AnswerMatches(Candidates):
    """One row's text as a source of candidates: what followed its last tokens in earlier answers.

    Args:
        automaton: Automaton of the answers, which may grow; None if there are none.
        tokens: The end of the text so far.
    """

    start: Match

    def __init__(self, automaton: SuffixAutomaton | None, tokens: Iterable[int]) -> None:
        self.automaton, self.start = automaton, Match(START, 0)
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the text."""
        for token in tokens:
            self.start = self.follow(self.start, token) or self.start

    def follow(self, place: Match, token: int) -> Match | None:
        """Return the longest match after one more token; None without answers."""
        if self.automaton is None:
            return None
        return Match(*self.automaton.follow(place.state, place.length, token))

    def after(self, place: Match) -> Sequence[Candidate]:
        """Return the tokens that followed the match or its suffixes, each once, most likely first.

        A token that followed c of n occurrences has the probability c / n, less if the match is short and n is small.
        """
        automaton, (state, length) = self.automaton, place
        found, factor = dict[int, Candidate](), 1.0
        while automaton is not None and state > START and len(found) < MAX_CANDIDATES:
            total = automaton.count[state]
            rate = ONLY_ACCEPTANCE[bisect_left(MATCH_CLASSES, length)]
            reliability = (total + PRIOR_WEIGHT * rate) / (total + PRIOR_WEIGHT)
            followed = list(automaton.following[state].items())  # at once: another thread may add an answer
            if len(followed) > MAX_FOLLOWING:
                break
            counted = [(automaton.count[after], token) for token, after in followed]
            for count, token in heapq.nlargest(MAX_CANDIDATES, counted):
                if token >= 0 and token not in found and total:
                    found[token] = Candidate(token, factor * reliability * min(count / total, 1.0))
            state = automaton.link[state]
            length, factor = automaton.length[state], SHORTER_FACTOR
        return sorted(found.values(), key=lambda candidate: -candidate.probability)
