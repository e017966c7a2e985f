"""`Transcript`: the text of each row, and the choice of its next token as in transformers' `_sample`.

Tokens are drawn by the same calls as there: processors on the exact prefix, float32 softmax, `torch.multinomial` with
the global generator. In lockstep, an acceptance rule that draws once per emitted token (`rejection` of a deterministic
draft) also keeps the order of draws, so the same seed gives the same tokens as in plain `generate()`. Independent of
trees, models and caches.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import EosTokenCriteria, LogitsProcessorList, MaxLengthCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from hf_specdec.acceptance.accepted import DeviceAccount, Launch, RowEnds
from hf_specdec.acceptance.processors import ignores_text, of_row
from hf_specdec.host_sync import read
from hf_specdec.randomness import CAPTURING, draw

RESERVED_TOKENS = 1024
"""Initial size of the text buffer, in tokens after the prompt; it grows if answers are longer."""


class Transcript:
    """The tokens of each row so far, with the processors and criteria that choose the next token and end rows.

    Rows are either *ragged*: each grows by the tokens accepted in it, or in *lockstep*: all rows always have the same
    length, and processors and criteria get the text of all rows `[B, L]`, exactly as in plain generate.

    Args:
        input_ids: `[B, P]` prompt, padding included.
        logits_processor: Processes the logits of each token, given the exact prefix (no text if all ignore it).
        stopping_criteria: Checked after every token, so that a row may end in the middle of an accepted path.
        max_length: Maximum length of a row, prompt included; a `MaxLengthCriteria` has priority.
        do_sample: Sample instead of taking the argmax.
        lockstep: Keep all rows at the same length; implied by a single row.
        keep_scores, keep_logits: Keep the processed scores or raw logits of every column; requires lockstep.
        pad_token_id: Emitted by finished rows in lockstep if a criterion has an EOS token; also pads `sequences`.

    Attributes:
        num_generated: Tokens of each row, without padding after its end.
        launch: Called by the acceptance rule before its next read from the device.
        scores, logits: `[B, V]` per column, if kept.
    """

    def __init__(
        self, input_ids: Tensor, logits_processor: LogitsProcessorList, stopping_criteria: StoppingCriteriaList, *,
        max_length: int, do_sample: bool, lockstep: bool = False, keep_scores: bool = False, keep_logits: bool = False,
        pad_token_id: int = 0,
    ) -> None:  # fmt: skip
        rows, self.prompt_length = input_ids.shape
        self._prompt = input_ids
        self._processor = logits_processor
        self._row_processors = [of_row(logits_processor, row) for row in range(rows)]
        self._keep_scores = keep_scores
        self._keep_logits = keep_logits
        self.do_sample = do_sample
        self.pad_token_id = pad_token_id
        self.lockstep = lockstep or rows == 1
        # EOS tokens and maximum length are checked as integers on the host; all other criteria are called
        eos = (rule.eos_token_id for rule in stopping_criteria if type(rule) is EosTokenCriteria)
        lengths = (rule.max_length for rule in stopping_criteria if type(rule) is MaxLengthCriteria)
        self._eos_ids = {token for tokens in eos for token in tokens.tolist()}
        self._max_length = min(lengths, default=max_length)
        self._criteria = StoppingCriteriaList(
            rule for rule in stopping_criteria if type(rule) not in (EosTokenCriteria, MaxLengthCriteria)
        )
        # plain generate pads finished rows only if some criterion has an EOS token
        self._pads_finished = any(hasattr(rule, "eos_token_id") for rule in stopping_criteria)
        self._reads_text = bool(self._criteria) or any(not ignores_text(rule) for rule in logits_processor)
        if self._reads_text:
            capacity = min(max(max_length, self.prompt_length + 1), self.prompt_length + RESERVED_TOKENS)
            self._ids = input_ids.new_zeros(rows, capacity)
            self._ids[:, : self.prompt_length] = input_ids
        self._account: DeviceAccount | None = None
        self.new_tokens: list[list[int]] = [[] for _ in range(rows)]
        self.finished = [False] * rows
        self.num_generated = [0] * rows
        self.launch: Launch | None = None
        self.scores: list[Tensor] = []
        self.logits: list[Tensor] = []
        self._num_streamed = 0

    def decides_on(self, device: torch.device) -> bool:
        """Return whether tokens are chosen on this device: nothing on the host reads the text, and no scores are kept.

        False if draws could not be undone, and on the CPU, on which evaluating only the path's nodes is faster.
        """
        drawn = not self.do_sample or generator_of(device) is not None
        return device.type != "cpu" and drawn and not (self.keeps_scores or self._reads_text)

    @property
    def processes_scores(self) -> bool:
        """Whether the choice at a node may differ from the argmax of its logits: sampling, or logits processors."""
        return self.do_sample or len(self._processor) > 0

    @property
    def keeps_scores(self) -> bool:
        """Whether scores or logits are kept."""
        return self._keep_scores or self._keep_logits

    @property
    def num_remaining(self) -> int:
        """Tokens that the shortest unfinished row may still emit; 0 or less if all rows are finished."""
        lengths = (len(self.new_tokens[row]) for row in self.active_rows)
        return self._max_length - self.prompt_length - min(lengths, default=self._max_length)

    @property
    def active_rows(self) -> list[int]:
        """Rows that have not ended."""
        return [row for row, done in enumerate(self.finished) if not done]

    @property
    def padded_rows(self) -> list[int]:
        """Finished rows that emit padding in lockstep; empty if no criterion has an EOS token."""
        return [row for row, done in enumerate(self.finished) if done and self._pads_finished]

    def padded(self, device: torch.device) -> Tensor:
        """Return as `[B]` bool on a device which rows get the pad token; no transfer if tokens are chosen there.

        These are the `padded_rows`. If tokens are chosen on the device, they are all rows that have ended: the same,
        except that `padded_rows` is empty without an EOS criterion.
        """
        if self._account is not None and self._account.device == device:
            return self._account.remaining == 0
        rows = self.padded_rows
        return torch.tensor([row in rows for row in range(len(self.finished))], dtype=torch.bool, device=device)

    def begin(self, logits: Tensor) -> Tensor:
        """Choose and record the first token of all rows, in one batched call as in plain generate; return them `[B]`.

        The logits `[B, V]` are those of the prompt's last position.
        """
        tokens = self.draw(self.column_scores(logits))
        (rows,) = read(tokens[:, None])
        if self.lockstep:
            self.record_column([token for (token,) in rows])
        else:
            for row, (token,) in enumerate(rows):
                self.record(row, token)
        if self.decides_on(tokens.device):
            self.account_on(tokens.device)
        return tokens

    # ------------------------------------------------------------------------------------------- scores

    def column_scores(self, logits: Tensor) -> Tensor:
        """Return (and keep, if requested) the processed scores `[B, V]` of the next tokens, given raw logits `[B, V]`.

        All rows must have the same length.
        """
        logits = self._in_float(logits)
        scores: Tensor = self._processor(self._text(self.prompt_length + len(self.new_tokens[0])), logits)
        if self._keep_scores:
            self.scores.append(scores)
        if self._keep_logits:
            self.logits.append(logits)
        return scores

    def row_scores(self, row: int, logits: Tensor, path: Sequence[int] = ()) -> Tensor:
        """Return the processed scores `[V]` of a row's next token, given the logits `[V]` at the end of its text.

        The tokens of a path are appended to the row's text for this call only.
        """
        ids = self._text(self.prompt_length + len(self.new_tokens[row]))[row : row + 1]
        if path and self._reads_text:
            ids = torch.cat([ids, torch.tensor([list(path)], dtype=ids.dtype, device=ids.device)], dim=-1)
        scores: Tensor = self._row_processors[row](ids, self._in_float(logits[None]))
        return scores[0]

    def scores_at(self, logits: Tensor) -> Tensor:
        """Return processed scores `[B, V]` of one node per row; requires processors that ignore the text."""
        scores: Tensor = self._processor(self._text(0), self._in_float(logits))
        return scores

    def draw(self, scores: Tensor) -> Tensor:
        """Choose tokens `[R]` by processed scores `[R, V]`: sample, or take the argmax if `do_sample` is False."""
        if self.do_sample:
            return draw(nn.functional.softmax(scores, dim=-1)).squeeze(1)
        return torch.argmax(scores, dim=-1)

    def draws(self, device: torch.device) -> Draws:
        """Return a `Draws` for one step on this device."""
        return Draws(self, generator_of(device) if self.do_sample else None)

    def _in_float(self, logits: Tensor) -> Tensor:
        return logits.to(copy=True, dtype=torch.float32, device=self._prompt.device)

    def _text(self, length: int) -> Tensor:
        """Return the tokens `[B, length]` of all rows; no columns if nothing reads them."""
        return self._ids[:, :length] if self._reads_text else self._prompt[:, :0]

    # ------------------------------------------------------------------------------------------- tokens

    def account_on(self, device: torch.device) -> DeviceAccount:
        """Return the account of remaining tokens on a device; callers must update it before they call `record_all`."""
        if self._account is None or self._account.device != device:
            left = [
                0 if done else self._max_length - self.prompt_length - len(tokens)
                for tokens, done in zip(self.new_tokens, self.finished, strict=True)
            ]
            lockstep = self.lockstep and len(self.finished) > 1
            ends = RowEnds(tuple(sorted(self._eos_ids)), self.pad_token_id, lockstep)
            self._account = DeviceAccount(left, ends, device)
        return self._account

    def record_all(self, emitted: Sequence[Sequence[int]]) -> None:
        """Append each row's emitted tokens, which the device has already cut where the row ends."""
        for row, tokens in enumerate(emitted):
            for token in tokens:
                self._append(row, token)

    def record(self, row: int, token: int) -> bool:
        """Append a token to one row; return whether the row is finished."""
        self._account = None
        length = self._append(row, token)
        if self._criteria:
            # called even if the row is already finished: some criteria count their calls
            self.finished[row] |= bool(self._criteria(self._ids[row : row + 1, :length], self._scores_so_far()).all())
        return self.finished[row]

    def record_column(self, tokens: Sequence[int]) -> list[int]:
        """Append one token to every row, padding to the rows that plain generate pads; return the appended tokens."""
        self._account = None
        padded = self.padded_rows
        column = [self.pad_token_id if row in padded else token for row, token in enumerate(tokens)]
        length = max(self._append(row, token) for row, token in enumerate(column))
        if self._criteria:
            ended = self._criteria(self._ids[:, :length], self._scores_so_far()).tolist()
            self.finished = [done or end for done, end in zip(self.finished, ended, strict=True)]
        return column

    def _append(self, row: int, token: int) -> int:
        """Append a token, check EOS tokens and maximum length, and return the row's new length."""
        tokens = self.new_tokens[row]
        length = self.prompt_length + len(tokens) + 1
        if self._reads_text:
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
        """Stream new columns that all unfinished rows have reached, one `put([B])` each; finished rows are padded.

        If the streamer has a method `end_step`, it is called after the columns of each step and of the prefill.
        """
        if streamer is None:
            return
        lengths = [len(self.new_tokens[row]) for row in self.active_rows]
        reached = min(lengths) if lengths else max(map(len, self.new_tokens))
        for column in range(self._num_streamed, reached):
            tokens = [row[column] if column < len(row) else self.pad_token_id for row in self.new_tokens]
            streamer.put(torch.tensor(tokens, dtype=torch.long, device="cpu"))  # as in plain generate
        self._num_streamed = max(self._num_streamed, reached)
        end_step = getattr(streamer, "end_step", None)
        if end_step is not None:
            end_step()

    def sequences(self) -> Tensor:
        """Return prompts and answers `[B, P + T]`; shorter rows are padded."""
        width = max(map(len, self.new_tokens))
        rows = [[*tokens, *[self.pad_token_id] * (width - len(tokens))] for tokens in self.new_tokens]
        answers = torch.tensor(rows, dtype=self._prompt.dtype, device=self._prompt.device)
        return torch.cat([self._prompt, answers], dim=-1)


class Draws:
    """The draws of one step, made column by column before it is known how many columns are emitted.

    `keep` then resets the generator (None if nothing is sampled), as if other columns had not been drawn.
    """

    def __init__(self, transcript: Transcript, generator: torch.Generator | None) -> None:
        self._transcript = transcript
        self._generator = generator
        self._states: list[Tensor] = []

    def next(self, scores: Tensor) -> Tensor:
        """Choose tokens `[B]` from processed scores `[B, V]`."""
        if self._generator is not None:
            with CAPTURING:
                self._states.append(self._generator.get_state())
        return self._transcript.draw(scores)

    def keep(self, count: int) -> None:
        """Undo all draws after the first `count`, without waiting for the device: generator states are on the host."""
        if self._generator is not None and count < len(self._states):
            with CAPTURING:
                self._generator.set_state(self._states[count])


def generator_of(device: torch.device) -> torch.Generator | None:
    """Return the global generator of a device; None if its backend does not expose it."""
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    if generators := getattr(module, "default_generators", None):  # one per device
        generator: torch.Generator = generators[module.current_device() if device.index is None else device.index]
        return generator
    default = getattr(module, f"_get_default_{device.type}_generator", None)  # single-device backends, e.g. MPS
    return None if default is None else default()
