"""Generate answers with an OpenAI-compatible server (vLLM, SGLang), for targets too large to run in this process.

Prompts are sent as token ids. Answers come back as ids if the server sends them (vLLM's `return_token_ids`), otherwise
as text, which is encoded after its prompt. An answer is dropped, and counted by reason, if its request failed, if it
is malformed or does not match the server's token counts, or if its token ids or its end token are uncertain.
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
from hf_specdec.training.completions import AnswerError, AnswerLimits, Completion, read_completion, read_model_names
from hf_specdec.training.connections import URL_HINT, Connection
from hf_specdec.training.teachers import Teacher, seed_of

logger = logging.getLogger(__name__)

SEED_LIMIT = 2**31
"""Exclusive upper bound of the seeds that servers accept."""

MAX_LISTED = 5
"""Maximum number of model names listed in an error message."""

# reasons for which answers are dropped, in addition to those in `completions.py` and `connections.py`
OTHER_PROMPT = "server's prompt token count differs from the prompt"
OTHER_COUNT = "length differs from the server's token count"
UNKNOWN_END = "unknown end token"
OTHER_END = "end token is not the last token"
OTHER_IDS = "text cannot be encoded after its prompt"


class ServerTeacher(Teacher):
    """Teacher that lets a model on an OpenAI-compatible server answer the prompts.

    Args:
        url: Base URL of the API, such as `http://localhost:8000/v1`.
        tokenizer: The target's tokenizer.
        model: The model's name on the server; None if the server has only one.
        num_requests: Maximum number of concurrent requests.
        timeout: Seconds per request from the first attempt to the last byte of the response, retries included.
        seeded: Send a seed with sampled requests. vLLM 0.32 on a CPU fails if a request has a seed and its prompt is
            prefilled in chunks.
        api_key: API key; None uses the environment variable `OPENAI_API_KEY`.
        end_ids: Ids of the tokens that end an answer, as in the model's generation config; None uses the tokenizer's.
            Other end tokens that the server sends are added.

    Raises:
        InvalidConfigError: The package `openai` is missing, an argument is invalid, the server does not answer, it
            does not have the model, or it has not exactly one and `model` is None.

    Example:
        ```python
        teacher = ServerTeacher("http://localhost:8000/v1", tokenizer)
        distill(teacher, tokenizer, read_prompts("prompts.jsonl"), "data")
        ```
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
        self._max_token_length = max(map(len, vocabulary)) + 1  # some tokenizers add a space before a word
        default = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
        self.end_ids = list(end_ids or default)
        self._count_offsets: Counter[int] = Counter()  # server's count minus received ids, over all ended answers
        self._served = self._find(model)
        self.name = portable_name(self._served) or Path(self._served).name
        self._probe: list[int] = []  # a prompt that was answered, sent again if a later call fails

    def _find(self, wanted: str | None) -> str:
        try:
            names = self._connection.models(read_model_names)
        except AnswerError as error:
            raise self._error("does not answer", error, URL_HINT) from error
        if (wanted is None and len(names) != 1) or (wanted is not None and wanted not in names):
            listed = ", ".join(names[:MAX_LISTED]) or "no model"
            more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
            problem = "no model was named" if wanted is None else f"there is no {wanted!r}"
            raise InvalidConfigError(
                f"The server at {self._connection.url} has {listed}{more}, and {problem}.", "Name one of its models."
            )
        return names[0] if wanted is None else wanted

    def _error(self, what: str, error: AnswerError, hint: str) -> InvalidConfigError:
        return InvalidConfigError(f"The server at {self._connection.url} {what}: {str(error).rstrip('.')}.", hint)

    def facts(self) -> dict[str, Any]:
        """Return the model's name, and placeholders for dtype and weights, which are unknown here."""
        return {"model": self.name, "dtype": "of the server", "weights": "of the server"}

    def check(self, prompt: list[int]) -> None:
        """Check that the server answers, reads exactly the tokens sent, and that its answers' ids can be recovered.

        The prompt is sent, and after success kept, so that `generate` can repeat the check.

        Raises:
            InvalidConfigError: The answer is invalid; the server counts another number of prompt tokens (it adds one,
                or uses another tokenizer); or it sends only text, and encoding the decoded prompt gives other ids.
        """
        (reply,) = self._replies([prompt], 0.0, 1, [None])
        if isinstance(reply, AnswerError):
            raise self._error("gives no valid answer", reply, URL_HINT) from reply
        if reply.num_prompt_tokens != len(prompt):
            raise InvalidConfigError(
                f"The server at {self._connection.url} counts {reply.num_prompt_tokens} prompt tokens, but "
                f"{len(prompt)} were sent.",
                "Use a server that accepts prompts as token ids and counts them, as vLLM and SGLang do.",
            )
        if reply.token_ids is None and self._encode_after(prompt, "") is None:
            raise InvalidConfigError(
                "This tokenizer does not encode a decoded prompt to the same ids, so the ids of an answer cannot be "
                "recovered from its text.",
                "Use a server that sends token ids (vLLM's return_token_ids).",
            )
        self._probe = list(prompt)

    def generate(
        self, prompts: Sequence[list[int]], temperature: float, max_new_tokens: int, label: str
    ) -> list[list[int] | None]:
        """See `Teacher.generate`. Unless `seeded=False`, sampled requests have a seed, which the server may ignore.

        Raises:
            InvalidConfigError: A request failed or no answer was valid, and repeating the last successful `check`
                fails too, so the server is down. Dropping the answers instead would drop all later ones as well.
        """
        seeds = [
            seed_of(f"{label}/{index}") % SEED_LIMIT if temperature and self._seeded else None
            for index in range(len(prompts))
        ]
        replies = self._replies(prompts, temperature, max_new_tokens, seeds)
        answers = self._ids_of(prompts, replies)
        lost = [answer for answer in answers if isinstance(answer, AnswerError)]
        if lost and (len(lost) == len(answers) or not all(error.is_answer for error in lost)):
            self._check_again(lost[0])
        for error in lost:
            if error.reason not in self.lost:
                logger.warning("Dropped an answer, the first for this reason: %s", error)
            self.lost[error.reason] += 1
        return [None if isinstance(answer, AnswerError) else answer for answer in answers]

    def _check_again(self, first: AnswerError) -> None:
        """Repeat the last successful `check`, if there was one, after the answers of a call were lost.

        Args:
            first: The first failure of the call, for the error message.

        Raises:
            InvalidConfigError: The check fails now.
        """
        if not self._probe:
            return
        try:
            self.check(self._probe)
        except InvalidConfigError as error:
            raise InvalidConfigError(
                f"{error} It answered before; first failure: {str(first).rstrip('.')}.",
                "Finished parts are kept. Start again with the same settings when the server is up.",
            ) from error

    def _replies(
        self, prompts: Sequence[list[int]], temperature: float, max_new_tokens: int, seeds: Sequence[int | None]
    ) -> list[Completion | AnswerError]:
        limits = AnswerLimits(max_new_tokens, self._vocab_size, self._max_token_length)
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
        return self._connection.complete(requests, lambda body: read_completion(body, limits))

    def _ids_of(
        self, prompts: Sequence[list[int]], replies: Sequence[Completion | AnswerError]
    ) -> list[list[int] | AnswerError]:
        """Return the ids of each answer, including the end token, or the reason to drop it."""
        found = [self._raw_ids(prompt, reply) for prompt, reply in zip(prompts, replies, strict=True)]
        for ids, reply in zip(found, replies, strict=True):
            if not isinstance(ids, AnswerError) and isinstance(reply, Completion) and reply.ended:
                self._count_offsets[reply.num_tokens - len(ids)] += 1
        offset = max((0, 1), key=lambda value: self._count_offsets[value])  # 1: counts an unsent end token
        return [
            self._with_end(ids, reply, offset)
            if not isinstance(ids, AnswerError) and isinstance(reply, Completion)
            else ids
            for ids, reply in zip(found, replies, strict=True)
        ]

    def _raw_ids(self, prompt: list[int], reply: Completion | AnswerError) -> list[int] | AnswerError:
        """Return the token ids that the server sent or those of its text; an error if the answer is to be dropped."""
        if isinstance(reply, AnswerError):
            return reply
        if reply.num_prompt_tokens != len(prompt):
            return AnswerError(OTHER_PROMPT, f"{reply.num_prompt_tokens}, not {len(prompt)}")
        if reply.token_ids is not None:
            return list(reply.token_ids)
        ids = self._encode_after(prompt, reply.text)
        return AnswerError(OTHER_IDS, repr(reply.text)) if ids is None else ids

    def _with_end(self, ids: list[int], reply: Completion, offset: int) -> list[int] | AnswerError:
        """Append the end token if it is missing; return an error if it is unknown, not last, or the length is wrong.

        If the server sends ids and stops at a token that is not in `end_ids`, the token is added to `end_ids`.

        Args:
            ids: Token ids of the answer.
            reply: What the server sent.
            offset: 1 if the server counts an end token that it does not send, else 0.
        """
        if reply.num_tokens != len(ids) + (offset if reply.ended else 0):
            return AnswerError(OTHER_COUNT, f"{reply.num_tokens}, not {len(ids)}")
        if not reply.ended or ids[-1:] in [[end] for end in self.end_ids]:
            return ids
        if reply.token_ids is not None:
            if reply.matched_stop not in (None, ids[-1]):
                return AnswerError(OTHER_END, str(reply.matched_stop))
            self.end_ids = [*self.end_ids, ids[-1]]  # an end token that only the server knew
            return ids
        end = reply.matched_stop
        if end is None and len(self.end_ids) == 1:
            (end,) = self.end_ids
        return AnswerError(UNKNOWN_END, f"one of {self.end_ids}") if end is None else [*ids, end]

    def _encode_after(self, prompt: list[int], text: str) -> list[int] | None:
        """Encode the text that follows a prompt; None if encoding both together changes the ids of the prompt."""
        before = self._tokenizer.decode(prompt, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        ids = list(self._tokenizer(before + text, add_special_tokens=False)["input_ids"])
        return ids[len(prompt) :] if ids[: len(prompt)] == prompt else None
