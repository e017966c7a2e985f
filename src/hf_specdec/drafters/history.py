"""Draft what followed the text's last tokens in earlier answers: the history of a model, and its drafter.

A history holds answers by name, bounded and storable. It runs on the host, without training. Sources: SuffixDecoding
(https://arxiv.org/abs/2411.04975) for lookup over earlier answers, DAS (https://arxiv.org/abs/2511.13841) for one
history per prompt in rollouts. Unlike their suffix trees, an automaton per name holds the answers
(`prompt_lookup.py`), and the least recently used answers are dropped.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import logging
import threading
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_specdec.atomic import write_text
from hf_specdec.config import MAX_HISTORY_NAME, PER_PROMPT, SpeculativeConfig
from hf_specdec.drafters.base import Candidate, Candidates, CandidateSession, DraftContext, DraftTarget
from hf_specdec.drafters.prompt_lookup import (
    MATCH_CLASSES,
    MAX_CONTINUATIONS,
    NO_MATCH,
    ONLY_ACCEPTANCE,
    SHORTER_FACTOR,
    START,
    Match,
    SuffixAutomaton,
    TextDrafter,
    TextSession,
)
from hf_specdec.drafters.registry import HISTORY
from hf_specdec.errors import CheckpointFormatError, InvalidConfigError
from hf_specdec.records import (
    MAX_OBJECT_BYTES,
    checked_path,
    open_regular,
    read_lines_backwards,
    record_of,
    shortened,
)
from hf_specdec.trees.draft import Budget
from hf_specdec.validation import is_integer, require_integer
from hf_specdec.verification.step import Step

logger = logging.getLogger(__name__)

MAX_TOKENS = 65_536
"""Default bound of a history, in tokens of all names together: about 50 MB, or 500 answers of 128 tokens."""
CONTEXT_TOKENS = 16
"""Tokens of the prompt's end that are stored before each answer, so that its first tokens can be found."""
KEPT_SHARE = 0.75
"""Fraction of the bound that is kept when answers are dropped: the automata of names that lose answers are rebuilt,
which takes about 5 microseconds per token, so this happens rarely."""

SHARED = "shared"
NAMED = "named:"
OF_PROMPT = "prompt:"
"""Key of the history for all calls, and first characters of the keys of named ones and of those of one prompt."""
FORMAT, VERSION = "hf_specdec.history", 1
"""First line of a stored history."""

PRIOR_WEIGHT = 8.0
"""Occurrences from which on the counts of a match weigh more than the acceptance rate of matches of its length."""
MAX_FOLLOWING = 256
"""Matches followed by more different tokens than this are skipped: each is unlikely, and counting them takes long."""
USED_MATCH = 4
"""Tokens of a match from which on its answer counts as used, see `AnswerHistory`."""


@dataclass(slots=True)
class _Answers:
    """The answers of one key in order, and their automaton."""

    texts: OrderedDict[int, tuple[int, ...]] = field(default_factory=OrderedDict)  # by number of the answer
    automaton: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    starts: list[int] = field(default_factory=list)  # where each of `numbers` begins in the automaton's text
    numbers: list[int] = field(default_factory=list)

    def append(self, number: int, text: tuple[int, ...]) -> None:
        """Append a text, with a separator that never matches before the next one."""
        self.texts[number] = text
        self.starts.append(self.automaton.num_tokens)
        self.numbers.append(number)
        self.automaton.extend([*text, -1 - number])


class AnswerHistory:
    """Earlier answers of one model, as token ids, by key. Safe to use from several threads.

    Args:
        max_tokens: Bound of the tokens stored, at least 1; if it is exceeded, the least recently used answers are
            dropped. An answer counts as used when a draft follows it.
        vocab_size: Number of the model's tokens; None accepts all ids.

    Raises:
        InvalidConfigError: `max_tokens` is not an integer >= 1.
    """

    def __init__(self, max_tokens: int = MAX_TOKENS, vocab_size: int | None = None) -> None:
        require_integer("max_tokens", max_tokens, 1)
        self.max_tokens, self._vocab_size = max_tokens, vocab_size
        self._lock = threading.RLock()
        self.clear()

    def __repr__(self) -> str:
        return f"AnswerHistory({len(self)} answers, {self.num_tokens} of {self.max_tokens} tokens)"

    def __len__(self) -> int:
        """Return the number of stored answers."""
        return len(self._used)

    @property
    def num_tokens(self) -> int:
        """Tokens stored, including those of the prompts' ends."""
        return self._num_tokens

    @property
    def names(self) -> list[str]:
        """Names given by callers that have answers; without the history of all calls and those of prompts."""
        with self._lock:
            return sorted(key.removeprefix(NAMED) for key in self._answers if key.startswith(NAMED))

    def clear(self, name: str | None = None) -> None:
        """Drop all answers, or those of one name.

        Args:
            name: A name in `names`; None drops all answers.

        Raises:
            InvalidConfigError: The name has no answers.
        """
        with self._lock:
            if name is None:
                self._answers: dict[str, _Answers] = {}
                self._used: OrderedDict[int, str] = OrderedDict()  # key of each answer, least recently used first
                self._num_tokens = self._next_number = 0
                return
            key = f"{NAMED}{name}"
            if key not in self._answers:
                raise InvalidConfigError(f"No history is called {name!r}.", f"Names: {self.names or 'none'}.")
            for number in list(self._answers[key].texts):
                self._drop(number)
            del self._answers[key]

    def add(self, tokens: Sequence[int], key: str = SHARED, context: Sequence[int] = ()) -> None:
        """Store an answer; one that exceeds the bound alone is shortened to its last tokens.

        Args:
            tokens: Token ids of the answer; nothing is stored if there are none.
            key: See `history_keys`.
            context: Token ids of the prompt; the last `CONTEXT_TOKENS` are stored, too.
        """
        text = (*context[-CONTEXT_TOKENS:], *tokens)[-self.max_tokens :]
        if not tokens:
            return
        with self._lock:
            if self._num_tokens + len(text) > self.max_tokens:
                self._make_room(len(text))
            number, self._next_number = self._next_number, self._next_number + 1
            self._answers.setdefault(key, _Answers()).append(number, text)
            self._used[number] = key
            self._num_tokens += len(text)

    def find(self, key: str) -> SuffixAutomaton | None:
        """Return the automaton of a key's answers, to which later answers are appended; None if there are none."""
        answers = self._answers.get(key)
        return None if answers is None else answers.automaton

    def use(self, key: str, automaton: SuffixAutomaton, state: int) -> None:
        """Note that a draft followed the latest occurrence of a state's substrings, see `max_tokens`.

        Nothing is noted if the automaton (from `find`) has been replaced since.
        """
        with self._lock:
            answers = self._answers.get(key)
            if answers is None or answers.automaton is not automaton:
                return
            number = answers.numbers[bisect_right(answers.starts, automaton.latest[state] - 1) - 1]
            if number in self._used:
                self._used.move_to_end(number)

    # ------------------------------------------------------------------------------------------- files

    def save(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Write all answers to a file of JSON lines, least recently used first.

        Args:
            path: The file.
            overwrite: Whether an existing file may be replaced.

        Raises:
            InvalidConfigError: The file exists and `overwrite` is False, or it cannot be written.
        """
        path = checked_path(path)
        if path.exists() and not overwrite:
            raise InvalidConfigError(f"{path} exists.", "Give another path, or overwrite=True.")
        with self._lock:
            lines: list[Any] = [{"format": FORMAT, "version": VERSION, "vocab_size": self._vocab_size}]
            lines += [{"key": key, "tokens": self._answers[key].texts[number]} for number, key in self._used.items()]
        write_text(path, "".join(json.dumps(line) + "\n" for line in lines))

    def load(self, path: str | Path) -> None:
        """Add the most recently used answers of a file written by `save`, as many as fit into `max_tokens`.

        The file is read from its end, and no further than these answers; all of them are checked before one is added.

        Args:
            path: The file.

        Raises:
            CheckpointFormatError: The file is not a stored history, or belongs to a model with another vocabulary.
            InvalidConfigError: The file cannot be read.
        """
        found: list[tuple[str, list[int]]] = []
        path = checked_path(path)
        with open_regular(path) as file:
            first = file.readline(MAX_OBJECT_BYTES)
            self._check_header(path, record_of(first, f"{path}, line 1") if first else {})
            num_tokens = 0
            for number, line in enumerate(read_lines_backwards(path, file, file.tell())):
                if not line.strip():
                    continue
                place = f"Line {number} from the end of {path}"
                key, tokens = self._checked(place, record_of(line, place))
                num_tokens += len(tokens)
                if found and num_tokens > self.max_tokens:
                    break
                found.append((key, tokens))
        for key, tokens in reversed(found):
            self.add(tokens, key)

    def _check_header(self, path: str | Path, header: dict[str, Any]) -> None:
        if header.get("format") != FORMAT or header.get("version") != VERSION:
            raise CheckpointFormatError(
                f"{path} is not a stored history of version {VERSION}: it begins with {shortened(header)}.",
                "Give a file written by AnswerHistory.save.",
            )
        if self._vocab_size is not None and header.get("vocab_size") not in (None, self._vocab_size):
            raise CheckpointFormatError(
                f"{path} was written with a model of {shortened(header['vocab_size'])} tokens, this one has "
                f"{self._vocab_size}.",
                "Load it with the model that wrote it.",
            )

    def _checked(self, place: str, row: dict[str, Any]) -> tuple[str, list[int]]:
        key, tokens, limit = row.get("key"), row.get("tokens"), self._vocab_size or 2**31
        if not isinstance(key, str) or not (
            key == SHARED or (key.startswith((NAMED, OF_PROMPT)) and len(key) <= len(NAMED) + MAX_HISTORY_NAME)
        ):
            raise CheckpointFormatError(
                f"{place} has the key {shortened(key)}.",
                f"Expected {SHARED!r}, {NAMED}... or {OF_PROMPT}...",
            )
        if not isinstance(tokens, list) or not all(is_integer(token) and 0 <= token < limit for token in tokens):
            raise CheckpointFormatError(
                f"{place} has no list of token ids below {limit}: {shortened(tokens)}.",
                "The file is damaged, or belongs to another model.",
            )
        return key, tokens

    # ------------------------------------------------------------------------------------------- dropping answers

    def _make_room(self, size: int) -> None:
        """Drop the least recently used answers until `size` tokens fit and `KEPT_SHARE` of the bound is left."""
        allowed, shrunk = max(min(int(KEPT_SHARE * self.max_tokens), self.max_tokens - size), 0), set[str]()
        while self._num_tokens > allowed:
            shrunk.add(self._drop(next(iter(self._used))))
        for key in shrunk:
            texts = self._answers.pop(key).texts
            if texts:
                answers = self._answers[key] = _Answers()
                for number, text in texts.items():
                    answers.append(number, text)
        logger.debug("Answers of %d histories were dropped; %d tokens are left.", len(shrunk), self._num_tokens)

    def _drop(self, number: int) -> str:
        """Forget the text of an answer and return its key; the automaton still has it."""
        key = self._used.pop(number)
        self._num_tokens -= len(self._answers[key].texts.pop(number))
        return key


def history_keys(history: bool | str | Sequence[str], prompts: Sequence[Sequence[int]]) -> list[str]:
    """Return the key of each row's history, given as in `SpeculativeConfig`, and the prompts without padding.

    A tuple has one name per row, or per prompt if several rows are sampled for each.
    """
    if history == PER_PROMPT:
        texts = (",".join(map(str, prompt)) for prompt in prompts)
        return [OF_PROMPT + hashlib.sha256(text.encode()).hexdigest()[:32] for text in texts]
    if isinstance(history, tuple):
        repeats = max(len(prompts) // len(history), 1)
        return [NAMED + name for name in history for _ in range(repeats)]
    return [SHARED if history is True else NAMED + str(history)] * len(prompts)


class HistoryDrafter(TextDrafter):
    """Drafts continuations found in earlier answers, with probabilities from their counts.

    Part of `"auto"` and `"hybrid"` if the config sets `history`. Fields: `num_draft_tokens` (default 32), `num_steps`
    (default: the tree's size) and `top_k` (4).

    Args:
        history: The answers; the caller adds new ones.
        of: As `history` in `SpeculativeConfig`: which answers a row may see.
    """

    method = HISTORY
    defaults = Budget(32, 32, MAX_CONTINUATIONS)

    def __init__(self, history: AnswerHistory, of: bool | str | Sequence[str]) -> None:
        self._history, self._of = history, of

    def start(self, target: DraftTarget, context: DraftContext, config: SpeculativeConfig) -> CandidateSession:
        """Start a session, which searches the answers of each row's key."""
        return _HistorySession(self._history, self._of, context)


class _HistorySession(TextSession):
    def __init__(self, history: AnswerHistory, of: bool | str | Sequence[str], context: DraftContext) -> None:
        texts, self._history = context.texts(), history
        self._keys = history_keys(of, [text[:-1] for text in texts])
        found = [
            AnswerMatches(history.find(key), text[-CONTEXT_TOKENS - 1 :])
            for key, text in zip(self._keys, texts, strict=True)
        ]
        super().__init__(found, context.roots, [text[-1] for text in texts])

    def observe(self, step: Step) -> None:
        super().observe(step)
        for key, text, tokens in zip(self._keys, self._texts, step.acceptance.emitted, strict=True):
            if tokens and text.automaton is not None and text.start.length >= USED_MATCH:
                self._history.use(key, text.automaton, text.start.state)


class AnswerMatches(Candidates):
    """One row's text as a source of candidates: what followed its last tokens in earlier answers.

    The automaton of the answers may grow; None if there are none. `tokens` are the end of the text so far.
    """

    start: Match

    def __init__(self, automaton: SuffixAutomaton | None, tokens: Iterable[int]) -> None:
        self.automaton, self.start = automaton, NO_MATCH
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the text."""
        for token in tokens:
            self.start = self.follow(self.start, token)

    def follow(self, place: Match, token: int) -> Match:
        """Return the longest match after one more token."""
        return NO_MATCH if self.automaton is None else self.automaton.follow(place, token)

    def after(self, place: Match) -> Sequence[Candidate]:
        """Return the tokens that followed the match or its suffixes, each once, most likely first.

        A token that followed c of n occurrences has the probability c / n, less if the match is short and n is small.
        """
        automaton, (state, length) = self.automaton, place
        found, factor = dict[int, Candidate](), 1.0
        while automaton is not None and state > START and len(found) < MAX_CONTINUATIONS:
            total = automaton.count[state]
            rate = ONLY_ACCEPTANCE[bisect_left(MATCH_CLASSES, length)]
            reliability = (total + PRIOR_WEIGHT * rate) / (total + PRIOR_WEIGHT)
            followed = list(automaton.following[state].items())  # at once: another thread may add an answer
            if len(followed) > MAX_FOLLOWING:
                break
            counted = [(automaton.count[after], token) for token, after in followed]
            for count, token in heapq.nlargest(MAX_CONTINUATIONS, counted):
                if token >= 0 and token not in found and total:
                    found[token] = Candidate(token, factor * reliability * min(count / total, 1.0))
            state = automaton.link[state]
            length, factor = automaton.length[state], SHORTER_FACTOR
        return sorted(found.values(), key=lambda candidate: -candidate.probability)
