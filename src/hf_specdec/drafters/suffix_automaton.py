"""A growing text in which the longest repeated end, and what followed it, is found at once.

Source: Blumer et al., "The smallest automaton recognizing the subwords of a text" (1985); used for drafting by SAM
Decoding (https://arxiv.org/abs/2411.10666). A state stands for texts that end at the same places. Adding a token takes
constant time on average, and the suffix link of the last state is the longest end of the text that occurred before.
"""

from __future__ import annotations

from collections.abc import Iterable

START = 0
"""The state of the empty text, from which every match begins."""
NO_STATE = -1


class SuffixAutomaton:
    """The suffix automaton of a token sequence.

    At most two states per token, about 400 bytes each.

    Args:
        tokens: The text so far.

    Attributes:
        following: Per state: the state that each next token leads to.
        link: Per state: that of its longest end which also occurs elsewhere.
        length: Per state: tokens of its longest text.
        latest: Per state: how many tokens stood before the end of its latest occurrence; of the states of shorter
            ends the one before, where they are more than `REFRESHED`.
    """

    REFRESHED = 64

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.following: list[dict[int, int]] = [{}]
        self.link, self.length, self.latest = [NO_STATE], [0], [0]
        self.last, self.num_tokens = START, 0
        self.extend(tokens)

    @classmethod
    def of_corpus(cls, documents: Iterable[Iterable[int]]) -> SuffixAutomaton:
        """Of many texts; a match never runs from one into the next."""
        automaton = cls()
        for separator, document in enumerate(documents, start=1):
            automaton.extend(document)
            automaton.extend([-separator])  # no token, and none twice
        return automaton

    @property
    def matched(self) -> tuple[int, int]:
        """The state and the length of the longest end of the text that occurred before; (0, 0) where none did."""
        state = max(self.link[self.last], START)
        return state, self.length[state]

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens."""
        for token in tokens:
            self._append(token)

    def follow(self, state: int, length: int, token: int) -> tuple[int, int]:
        """The longest end of a matched text and one more token that occurs here, as a state and a length."""
        while state > START and token not in self.following[state]:
            state = self.link[state]
            length = self.length[state]
        if token in self.following[state]:
            return self.following[state][token], length + 1
        return START, 0

    def continuations(self, state: int) -> list[tuple[int, int]]:
        """What followed a state's text: pairs of a token and the state after it, the latest occurrence first."""
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
            else:  # its longer texts did not end here: they keep the state, the shorter ones get one of their own
                shorter = self._add_state(dict(following[known]), length[state] + 1, link[known])
                self.latest[shorter] = self.latest[known]
                while state != NO_STATE and following[state].get(token) == known:
                    following[state][token] = shorter
                    state = link[state]
                link[known] = link[new] = shorter
        self.last = new
        for _ in range(self.REFRESHED):
            if new <= START:
                break
            self.latest[new] = self.num_tokens
            new = link[new]

    def _add_state(self, following: dict[int, int], length: int, link: int) -> int:
        self.following.append(following)
        self.length.append(length)
        self.link.append(link)
        self.latest.append(self.num_tokens)
        return len(self.length) - 1
