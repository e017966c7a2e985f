"""Suffix automaton: finds the longest suffix of a growing text that occurred before, and what followed it.

Source: Blumer et al., "The smallest automaton recognizing the subwords of a text" (1985); used for drafting by SAM
Decoding (https://arxiv.org/abs/2411.10666). A state represents substrings that end at the same positions. The longest
suffix of them that also ends elsewhere belongs to another state, to which the *suffix link* of the state points. The
link of the state of the whole text thus gives the longest suffix that occurred before. Appending a token takes
amortized constant time.
"""

from __future__ import annotations

from collections.abc import Iterable

START = 0
"""State of the empty text; every match starts here."""
NO_STATE = -1


class SuffixAutomaton:
    """The suffix automaton of a token sequence: at most two states per token, about 400 bytes each.

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
    def matched(self) -> tuple[int, int]:
        """State and length of the text's longest suffix that occurred before; (`START`, 0) if there is none."""
        state = max(self.link[self.last], START)
        return state, self.length[state]

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the text."""
        for token in tokens:
            self._append(token)

    def follow(self, state: int, length: int, token: int) -> tuple[int, int]:
        """Extend a match by a token; return state and length of its longest suffix that occurs in the text.

        Returns (`START`, 0) if there is none.
        """
        while state > START and token not in self.following[state]:
            state = self.link[state]
            length = self.length[state]
        if token in self.following[state]:
            return self.following[state][token], length + 1
        return START, 0

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
