"""Translate between the tokenizers of target and assistant: the tokens that they share, and text of one in the other.

Tokens are compared by the bytes that they stand for, because tokenizers spell them differently: byte-level BPE writes
a space as "Ġ" and each other byte as one character, SentencePiece writes a space as "▁" and some bytes as "<0xE2>".
Drafting over the shared tokens is "token-level intersection" in Timor et al., "Accelerating LLM Inference with
Lossless Speculative Decoding Algorithms for Heterogeneous Vocabularies" (https://arxiv.org/abs/2502.05202).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hf_specdec.host_sync import upload
from hf_specdec.verification.memory import persistent_tensors

KEPT_TRANSLATIONS = 4
"""Maximum number of translations kept between calls, one per pair of tokenizers (about 50 MB for 260,000 tokens)."""

SENTENCEPIECE_SPACE, BYTE_LEVEL_SPACE = "▁", "Ġ"
SENTENCEPIECE_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """The tokens of a tokenizer that a model knows."""

    texts: Mapping[int, bytes]  # what ordinary tokens stand for, best spelling of each text first
    special: Mapping[int, str]  # spelling of special tokens
    eos: int | None
    bos: int | None
    begins_with_bos: bool  # whether the tokenizer puts it before every text

    @classmethod
    def of(cls, tokenizer: Any, size: int) -> _Vocabulary:
        """Return the vocabulary of a tokenizer; `size` is the number of ids that its model knows."""
        spelling = {index: token for token, index in tokenizer.get_vocab().items() if index < size}
        added = {index: token for index, token in tokenizer.added_tokens_decoder.items() if index < size}
        special = {index: str(token) for index, token in added.items() if token.special}
        special |= {index: spelling.get(index, "") for index in tokenizer.all_special_ids if index < size}
        ordinary = {index: token for index, token in sorted(spelling.items()) if index not in special}
        if any(SENTENCEPIECE_SPACE in token for index, token in ordinary.items() if index not in added):
            texts = _sentencepiece_texts(ordinary)
        elif any(BYTE_LEVEL_SPACE in token for index, token in ordinary.items() if index not in added):
            texts = _byte_level_texts(ordinary, added)
        else:
            texts = {index: token.encode() for index, token in ordinary.items()}
        eos, bos = (index if index in special else None for index in (tokenizer.eos_token_id, tokenizer.bos_token_id))
        begins = bos is not None and list(tokenizer.encode("", add_special_tokens=True))[:1] == [bos]
        return cls(texts, special, eos, bos, begins)


def _sentencepiece_texts(tokens: Mapping[int, str]) -> dict[int, bytes]:
    """Return the bytes of SentencePiece tokens; single bytes (`<0x0A>`) last, because a tokenizer uses them last."""
    byte_tokens = {index: match for index, token in tokens.items() if (match := SENTENCEPIECE_BYTE.fullmatch(token))}
    texts = {
        index: token.replace(SENTENCEPIECE_SPACE, " ").encode()
        for index, token in tokens.items()
        if index not in byte_tokens
    }
    return texts | {index: bytes([int(match[1], 16)]) for index, match in byte_tokens.items()}


def _byte_level_texts(tokens: Mapping[int, str], added: Iterable[int]) -> dict[int, bytes]:
    """Return the bytes of byte-level BPE tokens; tokens added later are spelled as plain text."""
    table, literal = byte_of_character(), set(added)
    texts = {}
    for index, token in tokens.items():
        known = [table.get(character) for character in token]
        is_literal = index in literal or None in known
        texts[index] = token.encode() if is_literal else bytes(byte for byte in known if byte is not None)
    return texts


@functools.cache
def byte_of_character() -> dict[str, int]:
    """Return the byte for each of the 256 characters of byte-level BPE (GPT-2's `bytes_to_unicode`, inverted)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + rank): byte for rank, byte in enumerate(others)}


@dataclass(frozen=True, slots=True)
class TokenTranslation:
    """Frozen tables between two tokenizers, and the spelling of all other tokens of the target, found on first use.

    Attributes:
        shared: `[S, 2]` ids of the shared tokens in the target and in the assistant, one to one, on the CPU: ordinary
            tokens with the same text, the end-of-sequence tokens, other special tokens with the same spelling.
        share: Fraction of the target's tokens that are shared.
    """

    shared: Tensor
    share: float
    _target: _Vocabulary
    _assistant: _Vocabulary
    _assistant_tokenizer: Any
    _ids: Mapping[bytes, int]  # the assistant's token for a text
    _longest: int  # bytes in the longest of these texts
    _read: dict[int, tuple[int, ...]] = field(default_factory=dict)  # assistant ids by target id, found so far

    @classmethod
    def between(cls, target: _Vocabulary, assistant: _Vocabulary, assistant_tokenizer: Any) -> TokenTranslation:
        """Find the shared tokens of two vocabularies; the assistant's tokenizer spells all others."""
        target_ids, assistant_ids = _by_text(target.texts), _by_text(assistant.texts)
        shared = {index: assistant_ids[text] for text, index in target_ids.items() if text in assistant_ids}
        shared |= _shared_specials(target, assistant)
        read: dict[int, tuple[int, ...]] = {index: (other,) for index, other in shared.items()}
        for index, text in target.texts.items():  # further spellings of a shared text
            if index not in read and text in assistant_ids:
                read[index] = (assistant_ids[text],)
        with persistent_tensors():
            pairs = torch.tensor(sorted(shared.items()), dtype=torch.long, device="cpu").view(-1, 2)
        return cls(
            shared=pairs,
            share=len(shared) / max(len(target.texts) + len(target.special), 1),
            _target=target,
            _assistant=assistant,
            _assistant_tokenizer=assistant_tokenizer,
            _ids=assistant_ids,
            _longest=max(map(len, assistant_ids), default=0),
            _read=read,
        )

    def translated(self, tokens: Iterable[int]) -> list[int]:
        """Return the assistant's tokens for some of the target's: each shared one as it is, others by their text.

        Ids without a token, such as padding rows of an embedding, are left out.
        """
        return [other for token in tokens for other in self._of_token(token)]

    def translated_prompt(self, tokens: Sequence[int]) -> list[int]:
        """Return the assistant's tokens for a prompt, at least one, beginning as the assistant's tokenizer does."""
        known, given = self._assistant, self._target
        begins = tokens and tokens[0] == given.bos and (given.begins_with_bos or known.begins_with_bos)
        read = self.translated(tokens[1:] if begins else tokens)
        if known.bos is not None and known.begins_with_bos:
            return [known.bos, *read]
        if read:
            return read
        begin = next((index for index in (known.bos, known.eos) if index is not None), 0)
        return [begin]

    def prompts(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Translate prompts `[R, P]` with a mask, 0 at padding, which is on the left; reads them on the host."""
        pairs = zip(ids.tolist(), mask.tolist(), strict=True)
        texts = [[token for token, real in zip(row, valid, strict=True) if real] for row, valid in pairs]
        translated = [self.translated_prompt(text) for text in texts]
        width = max(map(len, translated))
        tokens = [[0] * (width - len(row)) + row for row in translated]
        valid = [[0] * (width - len(row)) + [1] * len(row) for row in translated]
        return upload(tokens, torch.long, ids.device), upload(valid, torch.long, ids.device)

    def emitted(self, tokens: Tensor, on_host: Sequence[Sequence[int]] | None) -> tuple[Tensor, list[int]]:
        """Translate emitted tokens `[R, P]`, padded with -1; return them as `[R, Q]` and their number in each row.

        `on_host` are the same without padding; None for the roots of a session (P = 1), which are read.
        """
        rows = [self.translated(row) for row in (tokens.tolist() if on_host is None else on_host)]
        width = max(map(len, rows))
        padded = [row + [-1] * (width - len(row)) for row in rows]
        return upload(padded, torch.long, tokens.device), list(map(len, rows))

    def _of_token(self, token: int) -> tuple[int, ...]:
        read = self._read.get(token)
        if read is None:
            text = self._target.texts.get(token)
            if text is None:
                text = self._target.special.get(token, "").encode()
            read = self._read[token] = tuple(self._spelled(text))
        return read

    def _spelled(self, text: bytes) -> list[int]:
        """Return the assistant's tokens for a text.

        Its tokenizer decides unless it changes the text (by a space before it, or by normalising it) or the text is
        not valid UTF-8; then the longest matching tokens are used, and bytes without a token are left out.
        """
        texts = self._assistant.texts
        try:
            ids = list(self._assistant_tokenizer.encode(text.decode(), add_special_tokens=False))
        except UnicodeDecodeError:  # a part of a character
            ids = []
        if ids and b"".join(texts.get(index, b"") for index in ids) == text:
            return ids
        found, begin = [], 0
        while begin < len(text):
            ends = range(min(len(text), begin + self._longest), begin, -1)
            end = next((end for end in ends if text[begin:end] in self._ids), None)
            if end is None:
                begin += 1
                continue
            found.append(self._ids[text[begin:end]])
            begin = end
        return found


def _by_text(texts: Mapping[int, bytes]) -> dict[bytes, int]:
    """Return the first token for each text that is not empty."""
    ids: dict[bytes, int] = {}
    for index, text in texts.items():
        if text:
            ids.setdefault(text, index)
    return ids


def _shared_specials(target: _Vocabulary, assistant: _Vocabulary) -> dict[int, int]:
    """Return pairs of special tokens with the same role: both end the text, or neither does and they look the same."""
    named = {spelling: index for index, spelling in assistant.special.items() if index != assistant.eos}
    pairs = {
        index: named[spelling]
        for index, spelling in target.special.items()
        if index != target.eos and spelling in named
    }
    if target.eos is not None and assistant.eos is not None:
        pairs[target.eos] = assistant.eos
    return pairs


def translation_between(
    tokenizer: Any, assistant_tokenizer: Any, num_tokens: int, num_assistant_tokens: int
) -> TokenTranslation | None:
    """Return the translation from a target's tokenizer to an assistant's, made once per pair of tokenizers.

    None if the assistant knows all tokens of the target's tokenizer by the same ids. The numbers are those of the ids
    in the target's vocabulary, and of those that the assistant both embeds and predicts.
    """
    sizes = len(tokenizer), len(assistant_tokenizer)  # tokens may be added later
    return _translation(tokenizer, assistant_tokenizer, num_tokens, num_assistant_tokens, sizes)


@functools.lru_cache(maxsize=KEPT_TRANSLATIONS)
def _translation(
    tokenizer: Any, assistant_tokenizer: Any, num_tokens: int, num_assistant_tokens: int, _sizes: tuple[int, int]
) -> TokenTranslation | None:
    known = assistant_tokenizer.get_vocab()
    wanted = tokenizer.get_vocab().items()
    if all(known.get(token) == index < num_assistant_tokens for token, index in wanted if index < num_tokens):
        return None
    target, assistant = (
        _Vocabulary.of(tokenizer, num_tokens),
        _Vocabulary.of(assistant_tokenizer, num_assistant_tokens),
    )
    return TokenTranslation.between(target, assistant, assistant_tokenizer)
