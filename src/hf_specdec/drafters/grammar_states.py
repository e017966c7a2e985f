"""Grammars of logits processors that constrain the answer: what a grammar forces, and which tokens it allows.

`grammar_states` copies the state of a processor of xgrammar, llguidance or outlines for each row, so that drafts never
change the processor. The libraries are not imported: processors are recognised by the name of their class.
"""

from __future__ import annotations

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
"""Where the forced text is not known, tokens are forced if the grammar allows at most this many."""
MAX_ROLLBACK = 128
"""States that a guide of outlines keeps; no tree is this deep."""
WORDS = re.compile(rb" +(?= )| ?[^ ]+| +")
"""Parts of a text that are tokenised separately: no token reaches into the next one."""


class GrammarState(Protocol):
    """A grammar after some tokens, to walk a tree of drafts with."""

    def forced(self) -> list[int]:
        """Return the tokens that must follow, as the model writes them; the last may be one that begins like it."""

    def accept(self, token: int) -> bool:
        """Advance by a token; return False, without a change, if the grammar forbids it."""

    def rollback(self, count: int) -> None:
        """Undo the last `count` accepted tokens."""


class _XGrammarState:
    """State of an `xgrammar.GrammarMatcher`; `words` of int32 hold the bit mask of allowed tokens."""

    def __init__(self, matcher: Any, encode: Callable[[bytes], list[int]], words: int) -> None:
        self._matcher, self._encode = matcher, encode
        self._mask = torch.zeros(1, words, dtype=torch.int32)

    def forced(self) -> list[int]:
        if self._matcher.is_terminated():
            return []
        text = self._matcher.find_jump_forward_string()
        if text or not self._matcher.is_completed():
            return self._encode(text.encode())
        self._matcher.fill_next_token_bitmask(self._mask)
        return last_of_few(self._mask[0])

    def accept(self, token: int) -> bool:
        return not self._matcher.is_terminated() and bool(self._matcher.accept_token(token))

    def rollback(self, count: int) -> None:
        self._matcher.rollback(count)


class _LLGuidanceState:
    """State of an `llguidance.LLMatcher`, which stops before the EOS token and does not count it."""

    def __init__(self, matcher: Any, tokenizer: Any) -> None:
        self._matcher, self._tokenizer, self._ended = matcher, tokenizer, 0

    def forced(self) -> list[int]:
        if self._matcher.is_stopped():
            return [] if self._ended else [self._tokenizer.eos_token]
        tokens: list[int] = self._tokenizer.tokenize_bytes(self._matcher.compute_ff_bytes()[:MAX_FORCED])
        return tokens

    def accept(self, token: int) -> bool:
        if self._matcher.is_stopped():
            ends = not self._ended and token == self._tokenizer.eos_token
            self._ended |= ends
            return ends
        return bool(self._matcher.try_consume_tokens([token]))

    def rollback(self, count: int) -> None:
        self._matcher.rollback(count - self._ended if count else 0)
        self._ended &= not count


class _OutlinesState:
    """State of an `outlines_core.Guide`, which knows tokens but no text; `words` as for `_XGrammarState`."""

    def __init__(self, guide: Any, words: int) -> None:
        self._guide, self._mask = guide, torch.zeros(words, dtype=torch.int32)

    def forced(self) -> list[int]:
        self._guide.write_mask_into(self._mask.data_ptr(), self._mask.numel(), self._mask.element_size())
        return last_of_few(self._mask)

    def accept(self, token: int) -> bool:
        if not self._guide.accepts_tokens([token]):
            return False
        self._guide.advance(token, return_tokens=False)
        return True

    def rollback(self, count: int) -> None:
        self._guide.rollback_state(count)


def last_of_few(mask: Tensor) -> list[int]:
    """Return the highest token of a bit mask `[words]` of int32 if it has at most `FEW`: usually the longest token."""
    words = mask.nonzero()[:, 0].tolist()
    if not 0 < len(words) <= FEW:
        return []
    tokens = [32 * word + bit for word in words for bit in range(32) if int(mask[word]) >> bit & 1]
    return tokens[-1:] if len(tokens) <= FEW else []


class Vocabulary:
    """Byte-pair encoding by the bytes of the tokens alone, without a tokenizer: the pair with the lowest id is merged.

    Ids are in the order of merges in the vocabularies of GPT-2, Llama, Qwen and others, so this is their tokenisation
    except for the words that a tokenizer splits before.

    Args:
        tokens: The bytes of each token, by id.
    """

    def __init__(self, tokens: Iterable[bytes]) -> None:
        self._ids = {token: number for number, token in enumerate(tokens)}

    def encode(self, text: bytes) -> list[int]:
        """Return the tokens of a text, up to a byte that is no token."""
        tokens = list[int]()
        for word in WORDS.findall(text[:MAX_FORCED]):
            parts = [word[place : place + 1] for place in range(len(word))]
            while len(parts) > 1:
                ids = [self._ids.get(left + right, len(self._ids)) for left, right in pairwise(parts)]
                best = min(ids)
                if best == len(self._ids):
                    break
                place = ids.index(best)
                parts[place : place + 2] = [parts[place] + parts[place + 1]]
            for part in parts:
                if part not in self._ids:
                    return tokens
                tokens.append(self._ids[part])
        return tokens


def _of_xgrammar(
    matchers: Sequence[Any], info: Any, vocabularies: dict[int, Vocabulary]
) -> list[GrammarState]:  # fmt: skip
    size = info.vocab_size
    if size not in vocabularies:  # takes most of a second
        vocabularies[size] = Vocabulary(info.decoded_vocab)
    return [_XGrammarState(matcher.fork(), vocabularies[size].encode, -(-size // 32)) for matcher in matchers]


_Reader = Callable[[Any, dict[int, Vocabulary]], list[GrammarState]]
READERS: dict[str, _Reader] = {
    "xgrammar.contrib.hf.LogitsProcessor": lambda one, known: _of_xgrammar(
        one.matchers, one.compiled_grammars[0].tokenizer_info, known
    ),
    "outlines.backends.xgrammar.XGrammarLogitsProcessor": lambda one, known: _of_xgrammar(
        one._matchers, one.compiled_grammar.tokenizer_info, known
    ),
    "outlines.backends.llguidance.LLGuidanceLogitsProcessor": lambda one, _: [
        _LLGuidanceState(matcher.deep_copy(), one.llg_tokenizer) for matcher in one.ll_matchers
    ],
    "outlines.backends.outlines_core.OutlinesCoreLogitsProcessor": lambda one, _: [
        _OutlinesState(type(guide)(one.index, MAX_ROLLBACK), one._bitmasks[0].numel()) for guide in one._guides
    ],
}
"""For each class of processors: how to copy its states, one per row, after its first call."""


def find_grammar(processors: Iterable[Any]) -> tuple[Any, _Reader] | None:
    """Return the first processor with a grammar that can be followed, and its reader; None if there is none."""
    for processor in processors:
        for kind in type(processor).__mro__:
            reader = READERS.get(f"{kind.__module__}.{kind.__qualname__}")
            library = sys.modules.get("xgrammar")
            if reader is not None and (library is None or hasattr(library.GrammarMatcher, "is_completed")):
                return processor, reader
    return None
