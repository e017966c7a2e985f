"""Grammars of logits processors that constrain an answer: the tokens that they force, and those that they allow.

The states of a processor of xgrammar, llguidance or outlines are copied, so that drafts never change the processor's.
The libraries are not imported: processors are recognised by the names of their classes.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

MAX_FORCED = 512
"""Maximum bytes of forced text that are tokenised at once."""
FEW = 16
"""A token is guessed where the grammar allows at most this many tokens and its forced text is not known."""
MAX_ROLLBACK = 128
"""Tokens that a guide of outlines can undo; no tree is this deep."""
WORDS = re.compile(rb" +(?= )| ?[^ ]+| +")
"""Parts of a text across whose ends no token reaches."""


class GrammarState(Protocol):
    """The state of a grammar after some tokens of one row."""

    def forced(self) -> list[int]:
        """Return the tokens of the text that must follow; the last may stand for one that continues beyond it."""

    def accept(self, token: int) -> bool:
        """Advance by a token; return False and change nothing if the grammar forbids it."""

    def rollback(self, count: int) -> None:
        """Undo the last `count` >= 1 accepted tokens."""


class _XGrammarState:
    """State of an `xgrammar.GrammarMatcher`. Its token masks have `words` integers of 32 bits."""

    def __init__(self, matcher: Any, encode: Callable[[bytes], list[int]], words: int) -> None:
        self._matcher, self._encode = matcher, encode
        self._mask = torch.zeros(1, words, dtype=torch.int32, device="cpu")
        self.rollback = matcher.rollback

    def forced(self) -> list[int]:
        if self._matcher.is_terminated():
            return []
        text = self._matcher.find_jump_forward_string()
        if text or not self._matcher.is_completed():
            return self._encode(text.encode())
        self._matcher.fill_next_token_bitmask(self._mask)  # perhaps only EOS tokens are left
        return last_of_few(self._mask[0])

    def accept(self, token: int) -> bool:
        return not self._matcher.is_terminated() and bool(self._matcher.accept_token(token))


class _LLGuidanceState:
    """State of an `llguidance.LLMatcher`, which stops before the EOS token and does not take it."""

    def __init__(self, matcher: Any, tokenizer: Any) -> None:
        self._matcher, self._tokenizer, self._ended = matcher, tokenizer, False

    def forced(self) -> list[int]:
        if self._matcher.is_stopped():
            return [] if self._ended else [self._tokenizer.eos_token]
        tokens: list[int] = self._tokenizer.tokenize_bytes(self._matcher.compute_ff_bytes()[:MAX_FORCED])
        return tokens

    def accept(self, token: int) -> bool:
        if not self._matcher.is_stopped():
            return bool(self._matcher.try_consume_tokens([token]))
        if self._ended or token != self._tokenizer.eos_token:
            return False
        self._ended = True
        return True

    def rollback(self, count: int) -> None:
        self._matcher.rollback(count - self._ended)
        self._ended = False


class _OutlinesState:
    """State of an `outlines_core.Guide`, which knows tokens but not their text; `words` as for `_XGrammarState`."""

    def __init__(self, guide: Any, words: int) -> None:
        self._guide, self._mask = guide, torch.zeros(words, dtype=torch.int32, device="cpu")
        self.rollback = guide.rollback_state

    def forced(self) -> list[int]:
        self._guide.write_mask_into(self._mask.data_ptr(), self._mask.numel(), self._mask.element_size())
        return last_of_few(self._mask)

    def accept(self, token: int) -> bool:
        if not self._guide.accepts_tokens([token]):
            return False
        self._guide.advance(token, return_tokens=False)
        return True


def last_of_few(mask: Tensor) -> list[int]:
    """Return the highest token of a mask `[words]` of 32 tokens each, usually the longest; none if it has many."""
    words = mask.nonzero()[:, 0].tolist()
    if len(words) > FEW:
        return []
    tokens = [32 * word + bit for word in words for bit in range(32) if int(mask[word]) >> bit & 1]
    return tokens[-1:] if len(tokens) <= FEW else []


class Vocabulary:
    """A byte-pair encoder that needs only the bytes of the tokens: it merges the pair with the lowest id first.

    The ids of byte-level vocabularies (GPT-2, Llama 3, Qwen, ...) are in the order of their merges.

    Args:
        tokens: The bytes of each token, by id.
    """

    def __init__(self, tokens: Iterable[bytes]) -> None:
        self._ids = {token: number for number, token in enumerate(tokens)}

    def encode(self, text: bytes) -> list[int]:
        """Return the tokens of a text, up to the first byte without a token and at most `MAX_FORCED` bytes."""
        tokens, none = list[int](), len(self._ids)
        for word in WORDS.findall(text[:MAX_FORCED]):
            parts = [word[place : place + 1] for place in range(len(word))]
            while len(parts) > 1:
                ids = [self._ids.get(left + right, none) for left, right in pairwise(parts)]
                if min(ids) == none:
                    break
                place = ids.index(min(ids))
                parts[place : place + 2] = [parts[place] + parts[place + 1]]
            for part in parts:
                if part not in self._ids:
                    return tokens
                tokens.append(self._ids[part])
        return tokens


_Vocabularies = dict[int, Vocabulary]
_Copy = Callable[[Any, _Vocabularies], Sequence[GrammarState]]


def _of_xgrammar(matchers: Sequence[Any], grammar: Any, known: _Vocabularies) -> Sequence[GrammarState]:
    size = grammar.tokenizer_info.vocab_size
    if size not in known:  # takes half a second for 150,000 tokens
        known[size] = Vocabulary(grammar.tokenizer_info.decoded_vocab)
    return [_XGrammarState(matcher.fork(), known[size].encode, -(-size // 32)) for matcher in matchers]


COPIES: dict[str, _Copy] = {
    "xgrammar.contrib.hf.LogitsProcessor": lambda processor, known: _of_xgrammar(
        processor.matchers, processor.compiled_grammars[0], known
    ),
    "outlines.backends.xgrammar.XGrammarLogitsProcessor": lambda processor, known: _of_xgrammar(
        processor._matchers, processor.compiled_grammar, known
    ),
    "outlines.backends.llguidance.LLGuidanceLogitsProcessor": lambda processor, _: [
        _LLGuidanceState(matcher.deep_copy(), processor.llg_tokenizer) for matcher in processor.ll_matchers
    ],
    "outlines.backends.outlines_core.OutlinesCoreLogitsProcessor": lambda processor, _: [
        _OutlinesState(type(guide)(processor.index, MAX_ROLLBACK), mask.numel())
        for guide, mask in zip(processor._guides, processor._bitmasks, strict=True)
    ],
}
"""By class of processors: returns a copy of its state for each row, after its first call. The second argument are the
vocabularies made so far, by size."""


def find_grammar(processors: Iterable[Any]) -> Callable[[_Vocabularies], Sequence[GrammarState]] | None:
    """Return what copies the states of the first processor with a known grammar (`COPIES`); None if there is none."""
    xgrammar = sys.modules.get("xgrammar")
    if xgrammar is not None and not hasattr(xgrammar.GrammarMatcher, "is_completed"):
        return None  # before 0.1.33
    for processor in processors:
        for kind in type(processor).__mro__:
            copy = COPIES.get(f"{kind.__module__}.{kind.__qualname__}")
            if copy is not None:
                return functools.partial(copy, processor)
    return None
