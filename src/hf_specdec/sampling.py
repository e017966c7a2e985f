"""The text of each row, and the one way its next token is chosen: as transformers' `_sample` does it.

Exactly one draw per emitted token, through the same calls in the same order (processors on the exact prefix,
float32 softmax, `torch.multinomial` from the global generator), so that a seed gives plain `generate()`'s tokens.
Knows no tree, model or cache. Used by: `accept.py` (asks for tokens), `decode.py` (starts and ends).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import EosTokenCriteria, LogitsProcessorList, MaxLengthCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer


class Transcript:
    """Tokens so far, row by row, with what chooses the next one and what ends a row.

    Args:
        input_ids: `[B, P]` prompt, padding included.
        logits_processor: Called once per token with the row's exact prefix, in order.
        stopping_criteria: Checked after every token, so a row ends inside an accepted run where plain would.
        max_length: Tokens a row may have, prompt included.
        do_sample: Draw, or take the argmax.
        keep_logits: Keep processed scores and raw logits of every token.
    """

    def __init__(
        self,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        *,
        max_length: int,
        do_sample: bool,
        keep_logits: bool = False,
    ) -> None:
        batch_size, self.prompt_length = input_ids.shape
        self._ids = input_ids.new_zeros(batch_size, max(max_length, self.prompt_length + 1))
        self._ids[:, : self.prompt_length] = input_ids
        self._processor, self._do_sample, self._keep_logits = logits_processor, do_sample, keep_logits
        # the two criteria that every call has are integers on the host; any other is asked in full
        self._eos_ids = {
            token
            for rule in stopping_criteria
            if type(rule) is EosTokenCriteria
            for token in rule.eos_token_id.tolist()
        }
        self._max_length = min(
            (rule.max_length for rule in stopping_criteria if type(rule) is MaxLengthCriteria), default=max_length
        )
        self._criteria = StoppingCriteriaList(
            rule for rule in stopping_criteria if type(rule) not in (EosTokenCriteria, MaxLengthCriteria)
        )
        self._has_eos = any(hasattr(rule, "eos_token_id") for rule in stopping_criteria)
        self.new_tokens: list[list[int]] = [[] for _ in range(batch_size)]
        self.finished = [False] * batch_size
        self.scores: list[list[Tensor]] = [[] for _ in range(batch_size)]
        self.logits: list[list[Tensor]] = [[] for _ in range(batch_size)]
        self._num_streamed = 0

    @property
    def is_prefix_free(self) -> bool:
        """Whether the choice at a node depends on its logits alone: then all nodes are decided at once."""
        return not self._do_sample and len(self._processor) == 0 and not self._keep_logits

    @property
    def num_remaining(self) -> int:
        """Tokens that the longest way to go still needs at most."""
        lengths = [len(tokens) for tokens, done in zip(self.new_tokens, self.finished, strict=True) if not done]
        return self._max_length - self.prompt_length - min(lengths, default=self._max_length)

    def begin(self, logits: Tensor) -> Tensor:
        """Choose the first token of every row in one batched call, as plain generate does.

        Args:
            logits: `[B, V]` of the prompt's last position.

        Returns:
            `[B]` the first roots.
        """
        tokens = self._choose(self._ids[:, : self.prompt_length], logits, range(len(self.finished)))
        for row, token in enumerate(tokens.tolist()):
            self.record(row, token)
        return tokens

    def choose(self, row: int, logits: Tensor) -> int:
        """Choose and record the row's next token.

        Args:
            row: The row.
            logits: `[V]` at the row's last token.
        """
        length = self.prompt_length + len(self.new_tokens[row])
        token = int(self._choose(self._ids[row : row + 1, :length], logits[None], [row]))
        self.record(row, token)
        return token

    def record(self, row: int, token: int) -> bool:
        """Append a token to a row and see whether the row ends with it."""
        tokens = self.new_tokens[row]
        length = self.prompt_length + len(tokens) + 1
        self._ids[row, length - 1] = token
        tokens.append(token)
        finished = token in self._eos_ids or length >= self._max_length
        if self._criteria:
            scores = tuple(self.scores[row]) if self._keep_logits else None
            # every criterion is asked, also after an earlier one said stop: some count their calls
            finished |= bool(self._criteria(self._ids[row : row + 1, :length], scores).all())
        self.finished[row] = finished
        return finished

    def stream(self, streamer: BaseStreamer | None, pad_token_id: int) -> None:
        """Hand over every column that all rows have reached: `put([B])` per token, finished rows padded."""
        if streamer is None:
            return
        if all(self.finished):
            reached = max(map(len, self.new_tokens))
        else:
            reached = min(len(tokens) for tokens, done in zip(self.new_tokens, self.finished, strict=True) if not done)
        for column in range(self._num_streamed, reached):
            streamer.put(
                torch.tensor([tokens[column] if column < len(tokens) else pad_token_id for tokens in self.new_tokens])
            )
        self._num_streamed = max(self._num_streamed, reached)

    def sequences(self, pad_token_id: int) -> Tensor:
        """`[B, P + T]` prompt and answers; shorter rows are padded."""
        width = max(map(len, self.new_tokens))
        sequences = self._ids[:, : self.prompt_length + width].clone()
        for row, tokens in enumerate(self.new_tokens):
            sequences[row, self.prompt_length + len(tokens) :] = pad_token_id
        return sequences

    def _choose(self, ids: Tensor, logits: Tensor, rows: Sequence[int]) -> Tensor:
        """The lines of `_sample` between forward and append: `[R, L]` ids and `[R, V]` logits to `[R]` tokens."""
        logits = logits.to(copy=True, dtype=torch.float32, device=ids.device)
        scores = self._processor(ids, logits)
        if self._keep_logits:
            for index, row in enumerate(rows):
                self.scores[row].append(scores[index : index + 1])
                self.logits[row].append(logits[index : index + 1])
        if self._do_sample:
            return torch.multinomial(nn.functional.softmax(scores, dim=-1), num_samples=1).squeeze(1)
        return torch.argmax(scores, dim=-1)
