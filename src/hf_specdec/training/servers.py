"""Answers of a server that speaks OpenAI's protocol (vLLM, SGLang), for targets that are too large to distil here.

A prompt is sent as token ids, so the server reads what this tokenizer wrote. An answer comes back as ids if the
server sends them (vLLM's `return_token_ids`), or as text, which is encoded again behind its prompt. An answer is given
up, and counted by the reason, if it is malformed, if its ids do not agree with the number of tokens that the server
counted, or if it is not known how it ends.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_specdec.errors import InvalidConfigError
from hf_specdec.heads.base import portable_name
from hf_specdec.training.completions import AnswerError, Asked, Completion, read_completion, read_model_names
from hf_specdec.training.connections import WHERE, Connection
from hf_specdec.training.teachers import Teacher, seed_of

logger = logging.getLogger(__name__)

SEEDS = 2**31
"""Servers take seeds below this."""

MAX_LISTED = 5
"""Model names that a message lists."""

OTHER_PROMPT = "another number of prompt tokens than were sent"
OTHER_COUNT = "another number of tokens than the server counted"
UNKNOWN_END = "unknown end token"
OTHER_END = "an end token that is not the last token"
OTHER_IDS = "the text does not encode behind its prompt"


class ServerTeacher(Teacher):
    """A target that a server runs.

    Args:
        url: Root of the protocol, such as `http://localhost:8000/v1`.
        tokenizer: The target's.
        model: The model's name on the server; None if the server has one only.
        num_requests: Requests in flight at once.
        timeout: Seconds that one answer may take, from the first attempt to the last byte.
        seeded: Whether sampled requests carry seeds. vLLM 0.32 on a CPU ends with an error at the first one whose
            prompt it reads in pieces.
        api_key: For servers that require one; None is the environment's `OPENAI_API_KEY`.
        end_ids: Tokens that end an answer, as in the model's generation config; None is the tokenizer's.

    Raises:
        InvalidConfigError: The package `openai` is missing, `url` is not an address, no server answers there, or it
            does not have the model.
    """

    def __init__(
        self, url: str, tokenizer: Any, model: str | None = None, *, num_requests: int = 32, timeout: float = 600.0,
        seeded: bool = True, api_key: str | None = None, end_ids: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        for name, value in (("num_requests", num_requests), ("timeout", timeout)):
            if not value > 0:
                raise InvalidConfigError(f"`{name}` must be > 0, got {value}.")
        key = api_key or os.environ.get("OPENAI_API_KEY") or "none"
        self._tokenizer, self._seeded = tokenizer, seeded
        self._connection = Connection(url, key, timeout, num_requests)
        vocabulary = tokenizer.get_vocab()
        self._vocab_size = max(vocabulary.values()) + 1
        self._max_token_length = max(map(len, vocabulary)) + 1  # some tokenizers put a space before a word
        own = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
        self.end_ids = list(end_ids or own)
        self._counted_beyond: Counter[int] = Counter()  # how often an ended answer counted 0 or 1 more than its ids
        self._served = self._find(model)
        self.name = portable_name(self._served) or Path(self._served).name
        self._probe: list[int] = []  # a prompt that was answered: asked again if a later call goes wrong

    def _find(self, wanted: str | None) -> str:
        try:
            names = self._connection.models(read_model_names)
        except AnswerError as error:
            raise self._refusal("does not answer", error, WHERE) from error
        if (wanted is None and len(names) != 1) or (wanted is not None and wanted not in names):
            listed = ", ".join(names[:MAX_LISTED]) or "no model"
            more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
            asked = "no model was named" if wanted is None else f"there is no {wanted!r}"
            raise InvalidConfigError(f"The server at {self._connection.url} has {listed}{more}, and {asked}.",
                                     "Name one.")  # fmt: skip
        return names[0] if wanted is None else wanted

    def _refusal(self, what: str, error: AnswerError, hint: str) -> InvalidConfigError:
        return InvalidConfigError(f"The server at {self._connection.url} {what}: {str(error).rstrip('.')}.", hint)

    def facts(self) -> dict[str, Any]:
        """The model's name; the weights are not visible."""
        return {"model": self.name, "dtype": "of the server", "weights": "of the server"}

    def check(self, prompt: list[int]) -> None:
        """Check that the server answers, reads the tokens that were sent, and that text encodes to its own ids.

        Raises:
            InvalidConfigError: The answer is not valid, the server reads another number of tokens (it adds one, or
                has another tokenizer), or the prompt, decoded, does not encode to its own ids.
        """
        (reply,) = self._replies([prompt], 0.0, 1, [None])
        if isinstance(reply, AnswerError):
            raise self._refusal("gives no valid answer", reply, WHERE) from reply
        if reply.num_prompt_tokens != len(prompt):
            raise InvalidConfigError(
                f"The server at {self._connection.url} reads {reply.num_prompt_tokens} tokens where {len(prompt)} "
                "were sent.",
                "It has to take prompts as token ids and to count them: vLLM's and SGLang's /v1/completions do.",
            )
        if reply.token_ids is None and self._encode_behind(prompt, "") is None:
            raise InvalidConfigError(
                "A prompt of this tokenizer, decoded and encoded again, has other ids, so the ids of an answer cannot "
                "be known from its text.",
                "Use a server that sends them (vLLM's return_token_ids).",
            )
        self._probe = list(prompt)

    def generate(
        self, prompts: Sequence[list[int]], temperature: float, max_new_tokens: int, label: str
    ) -> list[list[int] | None]:
        """See `Teacher.generate`. Sampled requests carry seeds; the server may ignore them.

        Raises:
            InvalidConfigError: Requests failed, or no answer was valid, and neither is the answer to the prompt of
                `check`: the server has gone. Counting these prompts as lost would lose all that follow.
        """
        seeds = [
            seed_of(f"{label}/{index}") % SEEDS if temperature and self._seeded else None
            for index in range(len(prompts))
        ]
        replies = self._replies(prompts, temperature, max_new_tokens, seeds)
        said = self._ids_of(prompts, replies)
        lost = [answer for answer in said if isinstance(answer, AnswerError)]
        if lost and (len(lost) == len(said) or not all(error.is_answer for error in lost)):
            self._check_again(lost[0])
        for error in lost:
            if error.reason not in self.lost:
                logger.warning("An answer was given up, the first for this reason: %s", error)
            self.lost[error.reason] += 1
        return [None if isinstance(answer, AnswerError) else answer for answer in said]

    def _check_again(self, first: AnswerError) -> None:
        """Check that the server still answers the prompt that it could answer before."""
        if not self._probe:
            return
        try:
            self.check(self._probe)
        except InvalidConfigError as error:
            raise InvalidConfigError(
                f"{error} It answered before; the first answer that was lost: {first}.",
                "Finished parts are kept: start again with the same settings when the server is up.",
            ) from error

    def _replies(
        self, prompts: Sequence[list[int]], temperature: float, max_new_tokens: int, seeds: Sequence[int | None]
    ) -> list[Completion | AnswerError]:
        asked = Asked(max_new_tokens, self._vocab_size, self._max_token_length)
        requests = [
            {
                "model": self._served, "prompt": prompt, "max_tokens": max_new_tokens, "temperature": temperature,
                "top_p": 1.0, "seed": seed,
                "extra_body": {
                    "return_token_ids": True, "skip_special_tokens": False, "top_k": -1, "min_p": 0.0
                },
            }
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]  # fmt: skip
        return self._connection.complete(requests, lambda body: read_completion(body, asked))

    def _ids_of(
        self, prompts: Sequence[list[int]], replies: Sequence[Completion | AnswerError]
    ) -> list[list[int] | AnswerError]:
        """Answers' ids, with the end token of those that ended."""
        found = [self._raw_ids(prompt, reply) for prompt, reply in zip(prompts, replies, strict=True)]
        for ids, reply in zip(found, replies, strict=True):
            if not isinstance(ids, AnswerError) and isinstance(reply, Completion) and reply.ended:
                self._counted_beyond[reply.num_tokens - len(ids)] += 1
        beyond = max((0, 1), key=lambda number: self._counted_beyond[number])  # as this server counts
        return [
            self._completed(ids, reply, beyond)
            if not isinstance(ids, AnswerError) and isinstance(reply, Completion)
            else ids
            for ids, reply in zip(found, replies, strict=True)
        ]

    def _raw_ids(self, prompt: list[int], reply: Completion | AnswerError) -> list[int] | AnswerError:
        """An answer's ids as the server sent them, or as its text encodes."""
        if isinstance(reply, AnswerError):
            return reply
        if reply.num_prompt_tokens != len(prompt):
            return AnswerError(OTHER_PROMPT, f"{reply.num_prompt_tokens}, not {len(prompt)}")
        if reply.token_ids is not None:
            return list(reply.token_ids)
        ids = self._encode_behind(prompt, reply.text)
        return AnswerError(OTHER_IDS, repr(reply.text)) if ids is None else ids

    def _completed(self, ids: list[int], reply: Completion, beyond: int) -> list[int] | AnswerError:
        """An answer with its end, if the server has counted as many tokens."""
        if reply.num_tokens != len(ids) + (beyond if reply.ended else 0):
            return AnswerError(OTHER_COUNT, f"{reply.num_tokens}, not {len(ids)}")
        if not reply.ended or ids[-1:] in [[end] for end in self.end_ids]:
            return ids
        if reply.token_ids is not None:
            if reply.matched_stop not in (None, ids[-1]):
                return AnswerError(OTHER_END, str(reply.matched_stop))
            self.end_ids = [*self.end_ids, ids[-1]]  # the model's own, which the tokenizer did not name
            return ids
        end = reply.matched_stop
        if end is None and len(self.end_ids) == 1:
            (end,) = self.end_ids
        return AnswerError(UNKNOWN_END, f"one of {self.end_ids}") if end is None else [*ids, end]

    def _encode_behind(self, prompt: list[int], text: str) -> list[int] | None:
        """The ids of a text behind a prompt; None if the prompt itself would be read in another way."""
        before = self._tokenizer.decode(prompt, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        ids = list(self._tokenizer(before + text, add_special_tokens=False)["input_ids"])
        return ids[len(prompt) :] if ids[: len(prompt)] == prompt else None
