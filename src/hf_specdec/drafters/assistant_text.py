"""`AssistantText`: the text of a batch in an assistant's tokens, as the rows that an `AssistantReader` takes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_specdec.drafters.base import DraftContext
from hf_specdec.drafters.token_translation import TokenTranslation
from hf_specdec.host_sync import upload

PAD = 0
"""Token at padded positions of a prompt, which the assistant does not attend to."""


class AssistantText:
    """Translates prompts and emitted tokens; with the target's tokenizer, it only passes them on.

    Args:
        translation: To the assistant's tokens; None if the assistant has the target's tokenizer.
    """

    def __init__(self, translation: TokenTranslation | None) -> None:
        self._translation = translation

    def prompt(self, context: DraftContext, rows: slice) -> tuple[Tensor, Tensor]:
        """Return the prompts of some rows: ids `[R, P]` and mask `[R, P]` (long, 0 at padding, which is on the left).

        A translation reads them on the host, once per generation.
        """
        ids, padding = context.input_ids[rows], context.padding
        mask = torch.ones_like(ids) if padding is None else padding.valid[rows].to(ids)
        if self._translation is None:
            return ids, mask
        pairs = zip(ids.tolist(), mask.tolist(), strict=True)
        texts = [[token for token, real in zip(row, valid, strict=True) if real] for row, valid in pairs]
        translated = [self._translation.translated_prompt(text) for text in texts]
        width = max(map(len, translated))
        missing = [width - len(row) for row in translated]
        tokens = [[PAD] * count + row for count, row in zip(missing, translated, strict=True)]
        valid = [[0] * count + [1] * len(row) for count, row in zip(missing, translated, strict=True)]
        return upload(tokens, torch.long, ids.device), upload(valid, torch.long, ids.device)

    def emitted(self, tokens: Tensor, on_host: Sequence[Sequence[int]] | None) -> tuple[Tensor, list[int]]:
        """Return emitted tokens for the assistant, `[R, Q]` padded with -1, and their number in each row.

        Args:
            tokens: `[R, P]` of the target, padded with -1.
            on_host: The same on the host, without padding; None for the roots of a session (P = 1), which a
                translation reads.
        """
        if self._translation is None:
            return tokens, [1] * len(tokens) if on_host is None else [len(row) for row in on_host]
        rows = tokens.tolist() if on_host is None else on_host
        translated = [self._translation.translated(row) for row in rows]
        width = max(map(len, translated))
        padded = [row + [-1] * (width - len(row)) for row in translated]
        return upload(padded, torch.long, tokens.device), [len(row) for row in translated]
