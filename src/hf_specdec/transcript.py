"""The text of each row, and the one way its next token is chosen: as transformers' `_sample` does it.

Exactly one draw per emitted token, through the same calls in the same order (processors on the exact prefix,
float32 softmax, `torch.multinomial` from the global generator), so that a seed gives plain `generate()`'s tokens.
Knows no tree, model or cache. Used by: `accept.py` (asks for tokens), `decode.py` (starts and ends).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    EosTokenCriteria,
    LogitsProcessorList,
    MaxLengthCriteria,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

RESERVED_TOKENS = 1024
"""Room for answers before it is known how long they will be; it doubles where they are longer."""


class Transcript:
    """Tokens so far, row by row, with what chooses the next one and what ends a row.

    Rows may be *ragged*, each as long as its accepted drafts made it, or *in step*: then all rows are always of one
    length, and processors and criteria see whole columns `[B, L]` exactly as plain generate shows them.

    Args:
        input_ids: `[B, P]` prompt, padding included.
        logits_processor: Called once per token with the exact prefix, in order.
        stopping_criteria: Checked after every token, so a row ends inside an accepted run where plain would.
        max_length: Tokens a row may have, prompt included.
        do_sample: Draw, or take the argmax.
        in_step: Keep rows at one length. A single row always is.
        keep_scores, keep_logits: Keep processed scores, raw logits of every column; needs rows in step.
        pad_token_id: What a finished row says where an EOS token ends rows.
    """

    def __init__(
        self,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        *,
        max_length: int,
        do_sample: bool,
        in_step: bool = False,
        keep_scores: bool = False,
        keep_logits: bool = False,
        pad_token_id: int = 0,
    ) -> None:
        batch_size, self.prompt_length = input_ids.shape
        self._ids = input_ids.new_zeros(
            batch_size, min(max(max_length, self.prompt_length + 1), self.prompt_length + RESERVED_TOKENS)
        )
        self._ids[:, : self.prompt_length] = input_ids
        self._processor, self._keep_scores, self._keep_logits = logits_processor, keep_scores, keep_logits
        self._row_processors = [of_row(logits_processor, row) for row in range(batch_size)]
        self.do_sample, self.pad_token_id = do_sample, pad_token_id
        self.in_step = in_step or batch_size == 1
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
        # plain generate pads finished rows only where some criterion knows an EOS token
        self._pads_finished = any(hasattr(rule, "eos_token_id") for rule in stopping_criteria)
        self.new_tokens: list[list[int]] = [[] for _ in range(batch_size)]
        self.finished = [False] * batch_size
        self.num_generated = [0] * batch_size  # tokens of each row up to the one that finished it
        self.scores: list[Tensor] = []  # [B, V] per column
        self.logits: list[Tensor] = []
        self._num_streamed = 0

    @property
    def is_prefix_free(self) -> bool:
        """Whether the choice at a node depends on its logits alone: then all nodes are decided at once."""
        one_by_one = self.in_step and len(self.finished) > 1
        kept = self._keep_scores or self._keep_logits
        return not (self.do_sample or one_by_one or kept or len(self._processor))

    @property
    def num_remaining(self) -> int:
        """Tokens that the longest way to go still needs at most."""
        lengths = [len(tokens) for tokens, done in zip(self.new_tokens, self.finished, strict=True) if not done]
        return self._max_length - self.prompt_length - min(lengths, default=self._max_length)

    @property
    def padded_rows(self) -> list[int]:
        """Rows that say nothing but padding any more, as long as the others go on in step."""
        return [row for row, done in enumerate(self.finished) if done and self._pads_finished]

    def begin(self, logits: Tensor) -> Tensor:
        """Choose the first token of every row in one batched call, as plain generate does.

        Args:
            logits: `[B, V]` of the prompt's last position.

        Returns:
            `[B]` the first roots.
        """
        tokens = self.draw(self.column_scores(logits))
        if self.in_step:
            self.record_column(tokens.tolist())
        else:
            for row, token in enumerate(tokens.tolist()):
                self.record(row, token)
        return tokens

    # ------------------------------------------------------------------------------------------- scores

    def column_scores(self, logits: Tensor) -> Tensor:
        """Processed scores of the next token of all rows, which are of one length: `[B, V]` to `[B, V]`."""
        length = self.prompt_length + len(self.new_tokens[0])
        logits = self._in_float(logits)
        scores: Tensor = self._processor(self._ids[:, :length], logits)
        if self._keep_scores:
            self.scores.append(scores)
        if self._keep_logits:
            self.logits.append(logits)
        return scores

    def row_scores(self, row: int, logits: Tensor, path: Sequence[int] = ()) -> Tensor:
        """Processed scores `[V]` of a row's next token.

        Args:
            row: The row.
            logits: `[V]` at the row's last token, or at the end of the path.
            path: Tokens that are assumed to follow the row's text; they are not recorded.
        """
        length = self.prompt_length + len(self.new_tokens[row])
        ids = self._ids[row : row + 1, :length]
        if path:
            ids = torch.cat([ids, torch.tensor([list(path)], dtype=ids.dtype, device=ids.device)], dim=-1)
        scores: Tensor = self._row_processors[row](ids, self._in_float(logits[None]))
        return scores[0]

    def draw(self, scores: Tensor) -> Tensor:
        """Tokens `[R]` from processed scores `[R, V]`: one draw per row, or the argmax."""
        if self.do_sample:
            return torch.multinomial(nn.functional.softmax(scores, dim=-1), num_samples=1).squeeze(1)
        return torch.argmax(scores, dim=-1)

    def _in_float(self, logits: Tensor) -> Tensor:
        return logits.to(copy=True, dtype=torch.float32, device=self._ids.device)

    # ------------------------------------------------------------------------------------------- tokens

    def record(self, row: int, token: int) -> bool:
        """Append a token to one row and see whether the row ends with it."""
        length = self._append(row, token)
        if self._criteria:
            # every criterion is asked, also after an earlier one said stop: some count their calls
            self.finished[row] |= bool(self._criteria(self._ids[row : row + 1, :length], self._scores_so_far()).all())
        return self.finished[row]

    def record_column(self, tokens: Sequence[int]) -> list[int]:
        """Append one token to every row, padding where plain generate pads; returns what was appended."""
        padded = self.padded_rows
        column = [self.pad_token_id if row in padded else token for row, token in enumerate(tokens)]
        length = max(self._append(row, token) for row, token in enumerate(column))
        if self._criteria:
            ended = self._criteria(self._ids[:, :length], self._scores_so_far()).tolist()
            self.finished = [done or end for done, end in zip(self.finished, ended, strict=True)]
        return column

    def _append(self, row: int, token: int) -> int:
        """Write the token, apply EOS and length; returns the row's new length."""
        tokens = self.new_tokens[row]
        length = self.prompt_length + len(tokens) + 1
        if length > self._ids.shape[1]:
            self._ids = nn.functional.pad(self._ids, (0, length))
        self._ids[row, length - 1] = token
        tokens.append(token)
        if not self.finished[row]:
            self.num_generated[row] += 1
            self.finished[row] = token in self._eos_ids or length >= self._max_length
        return length

    def _scores_so_far(self) -> tuple[Tensor, ...] | None:
        return tuple(self.scores) if self._keep_scores else None

    def stream(self, streamer: BaseStreamer | None) -> None:
        """Hand over every column that all rows have reached: `put([B])` per token, finished rows padded."""
        if streamer is None:
            return
        if all(self.finished):
            reached = max(map(len, self.new_tokens))
        else:
            reached = min(len(tokens) for tokens, done in zip(self.new_tokens, self.finished, strict=True) if not done)
        for column in range(self._num_streamed, reached):
            streamer.put(
                torch.tensor(
                    [tokens[column] if column < len(tokens) else self.pad_token_id for tokens in self.new_tokens]
                )
            )
        self._num_streamed = max(self._num_streamed, reached)

    def sequences(self) -> Tensor:
        """`[B, P + T]` prompt and answers; shorter rows are padded."""
        width = max(map(len, self.new_tokens))
        sequences = self._ids[:, : self.prompt_length + width].clone()
        for row, tokens in enumerate(self.new_tokens):
            sequences[row, self.prompt_length + len(tokens) :] = self.pad_token_id
        return sequences


def of_row(processors: LogitsProcessorList, row: int) -> LogitsProcessorList:
    """The processors for a call with one row of the batch: those that know rows by number are told which it is."""

    def own(processor: Any) -> Any:
        if type(processor) is PrefixConstrainedLogitsProcessor:
            allowed = processor._prefix_allowed_tokens_fn
            return PrefixConstrainedLogitsProcessor(lambda _row, ids: allowed(row, ids), num_beams=1)
        if isinstance(getattr(processor, "prompt_ignore_length", None), Tensor):
            return RepetitionPenaltyLogitsProcessor(processor.penalty, processor.prompt_ignore_length[row : row + 1])
        return processor

    return LogitsProcessorList(map(own, processors))
