"""Draft the text that a grammar forces: if it leaves no choice, the next tokens are known without any model.

Source of the idea: jump-forward decoding (SGLang, https://arxiv.org/abs/2312.07104), which writes forced text into the
answer. Here it is only drafted, so the answer keeps the tokens that the model chooses for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from hf_specdec.config import SpeculativeConfig
from hf_specdec.drafters.base import Candidate, Candidates, CandidateSession, DraftContext, DraftTarget
from hf_specdec.drafters.grammar_states import GrammarState, Vocabulary, find_grammar
from hf_specdec.drafters.prompt_lookup import TextDrafter, TextSession
from hf_specdec.drafters.registry import GRAMMAR, register
from hf_specdec.host_sync import read
from hf_specdec.trees.draft import Budget

FORCED, LAST, OTHER = 0.98, 0.8, 0.1
"""Probabilities of a forced token, of the one expected where forced text ends, and of the forced text's own end if
another is expected: the model's token may reach into the text that follows."""


@register(GRAMMAR)
class GrammarDrafter(TextDrafter):
    """Drafts what the grammar of a logits processor forces; merged with other drafters, it removes what that forbids.

    Part of `"auto"`. The processor is one of xgrammar (0.1.33 or newer) or one of outlines, with any of its backends
    (outlines_core, llguidance, xgrammar). Config fields: `num_draft_tokens` (default 32), `num_steps` (default: the
    tree's size) and `top_k` (2).
    """

    tree_from = "the grammar"
    defaults = Budget(32, 32, 2)

    def __init__(self) -> None:
        self._vocabularies: dict[int, Vocabulary] = {}
        self._usual: dict[int, int] = {}  # where forced text ends: the last token of it -> what the model wrote

    def state_dict(self) -> Any:
        """Return a copy of the tokens that the model wrote at the ends of forced texts."""
        return dict(self._usual)

    def load_state_dict(self, state: Any) -> None:
        """Restore these tokens; None forgets them."""
        self._usual.clear()
        self._usual.update(state or {})

    def start(self, target: DraftTarget, context: DraftContext, config: SpeculativeConfig) -> CandidateSession:
        """Start a session, which copies the state of the processor for every row."""
        roots = [root for (root,) in read(context.roots[:, None])[0]]
        copies = find_grammar(context.processors)
        states = [None] * len(roots) if copies is None else copies(self._vocabularies)
        texts = [GrammarText(state, self._usual) for state in states]
        for text, root in zip(texts, roots, strict=True):
            text.extend([root])
        return TextSession(texts, context.roots, roots)


Path = tuple[int, ...]


class GrammarText(Candidates):
    """One row's grammar as a source of candidates. A place is the path of tokens after the text.

    Args:
        state: The grammar after the text, which only this object advances; None: nothing is known.
        usual: For the last token of a forced text: the token that the model wrote there last. Updated here.
    """

    restricts = True

    def __init__(self, state: GrammarState | None, usual: dict[int, int]) -> None:
        self._state, self._usual = state, usual
        self._at: Path = ()  # where the state is
        self._forced: dict[Path, Sequence[int]] = {}  # of the places visited since the text grew

    @property
    def start(self) -> Path | None:
        """The end of the text; None if its grammar is not known."""
        return None if self._state is None else ()

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the text; a token that the grammar forbids ends what is known."""
        path: Path = ()
        for token in tokens:
            forced = self._forced.get(path, ())
            if len(forced) == 1:
                self._usual[forced[0]] = token
            path = (*path, token)
        if self._state is not None and not self._reach(path):
            self._state = None
        self._at, self._forced = (), {}

    def after(self, place: Path) -> Sequence[Candidate]:
        """Return the forced token, or both that are likely where the forced text ends."""
        if place not in self._forced:
            assert self._state is not None
            self._reach(place)
            tokens = self._forced[place] = self._state.forced()
            for count in range(1, len(tokens)):
                self._forced[*place, *tokens[:count]] = tokens[count:]
        forced = self._forced[place]
        if len(forced) != 1:
            return [Candidate(token, FORCED) for token in forced[:1]]
        usual = self._usual.get(forced[0], forced[0])
        return [Candidate(usual, LAST)] + [Candidate(token, OTHER) for token in forced if token != usual]

    def follow(self, place: Path, token: int) -> Path | None:
        """Return the place after a token; None if the grammar forbids it."""
        path = (*place, token)
        return path if self._reach(path) else None

    def _reach(self, path: Path) -> bool:
        """Move the state to the end of a path, or as far as the grammar allows; return whether it allows all of it."""
        assert self._state is not None
        shared = 0
        while shared < min(len(path), len(self._at)) and path[shared] == self._at[shared]:
            shared += 1
        if shared < len(self._at):
            self._state.rollback(len(self._at) - shared)
        for count in range(shared, len(path)):
            if not self._state.accept(path[count]):
                self._at = path[:count]
                return False
        self._at = path
        return True
