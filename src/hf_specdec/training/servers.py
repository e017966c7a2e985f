"""Answers of a server that speaks OpenAI's protocol (vLLM, SGLang): for targets that are too large to distil here.

A prompt is sent as token ids, so the server reads what this tokenizer wrote. An answer comes back as ids where the
server tells them (vLLM's `return_token_ids`), or as text, which is encoded again behind its prompt; what the server
has counted otherwise, and what ended in a way that is not told, is given up.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_specdec.errors import InvalidConfigError
from hf_specdec.heads.base import portable_name
from hf_specdec.training.voices import Voice, seed_of

if TYPE_CHECKING:
    from openai.types import Completion

SEEDS = 2**31
"""Servers take seeds below this."""


class ServerVoice(Voice):
    """A target that a server runs.

    Args:
        url: Of the protocol's root, such as `http://localhost:8000/v1`.
        tokenizer: The target's.
        model: What the server calls it; None is the only one that it has.
        num_requests: How many answers are under way at once.
        timeout: Seconds that one answer may take.
        seeded: Whether sampled requests carry seeds. vLLM 0.32 on a CPU ends with an error at the first one whose
            prompt it reads in pieces.
        api_key: For servers that ask for one; None is the environment's `OPENAI_API_KEY`.
        end_ids: Tokens that end an answer, as in the model's generation config; None is the tokenizer's.

    Raises:
        InvalidConfigError: The package `openai` is missing, nobody answers at `url`, or the model is not there.
    """

    def __init__(
        self, url: str, tokenizer: Any, model: str | None = None, *, num_requests: int = 32, timeout: float = 600.0,
        seeded: bool = True, api_key: str | None = None, end_ids: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        try:
            import openai  # an optional dependency, used in this file alone
        except ImportError as error:
            raise InvalidConfigError(
                "Distilling from a server needs the package openai.", "pip install 'hf-specdec[training]'."
            ) from error
        if num_requests < 1:
            raise InvalidConfigError(f"`num_requests` must be >= 1, got {num_requests}.")
        key = api_key or os.environ.get("OPENAI_API_KEY") or "none"
        self._errors, self._refused = openai.OpenAIError, openai.BadRequestError
        self._url, self._tokenizer = url, tokenizer
        self._client = openai.OpenAI(base_url=url, api_key=key, timeout=timeout)
        self._num_requests, self._seeded = num_requests, seeded
        own = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
        self.end_ids = list(end_ids or own)
        self._counted_beyond: Counter[int] = Counter()  # tokens that are counted beyond those of an ended answer
        self._served = self._find(model)
        self.name = portable_name(self._served) or Path(self._served).name

    def _find(self, wanted: str | None) -> str:
        try:
            names = [model.id for model in self._client.models.list()]
        except self._errors as error:
            raise self._unanswered(error) from error
        if (wanted is None and len(names) != 1) or (wanted is not None and wanted not in names):
            asked = "no model was named" if wanted is None else f"there is no {wanted!r}"
            raise InvalidConfigError(f"The server at {self._url} has {', '.join(names)}, and {asked}.", "Name one.")
        return names[0] if wanted is None else wanted

    def _unanswered(self, error: Exception) -> InvalidConfigError:
        reason = str(error).strip().splitlines()[0]
        return InvalidConfigError(
            f"The server at {self._url} does not answer: {reason}",
            "Give the root of its OpenAI-compatible interface, such as http://localhost:8000/v1.",
        )

    def facts(self) -> dict[str, Any]:
        """The model's name; weights are not seen."""
        return {"model": self.name, "dtype": "of the server", "weights": "of the server"}

    def check(self, prompt: list[int]) -> None:
        """See that the server reads as many tokens as were sent, and that text finds its way back to ids.

        Raises:
            InvalidConfigError: It reads another number (it adds a token, or has another tokenizer), it counts
                nothing, or the prompt, decoded, does not encode to its own ids.
        """
        try:
            reply = self._ask(prompt, 0.0, 1, None)
        except self._refused as error:
            raise self._unanswered(error) from error
        read = reply.usage.prompt_tokens if reply.usage else None
        if read != len(prompt):
            raise InvalidConfigError(
                f"The server reads {read} tokens where {len(prompt)} were sent.",
                "It has to take prompts as token ids and to count them: vLLM's and SGLang's /v1/completions do.",
            )
        if _told_ids(reply) is None and self._encode_behind(prompt, "") is None:
            raise InvalidConfigError(
                "A prompt of this tokenizer, decoded and encoded again, has other ids, so the ids of an answer cannot "
                "be known from its text.",
                "Use a server that tells them (vLLM's return_token_ids).",
            )

    def say(
        self, prompts: Sequence[list[int]], temperature: float, max_new_tokens: int, label: str
    ) -> list[list[int] | None]:
        """See `Voice.say`. Sampled requests carry seeds; whether equal seeds give equal answers is the server's."""

        def answer(index: int) -> Completion | None:
            seed = seed_of(f"{label}/{index}") % SEEDS if temperature and self._seeded else None
            try:
                return self._ask(prompts[index], temperature, max_new_tokens, seed)
            except self._refused:  # a prompt that the server has no room for, say
                return None

        with ThreadPoolExecutor(self._num_requests) as pool:
            replies = list(pool.map(answer, range(len(prompts))))
        said = self._ids_of(prompts, replies)
        self.num_lost += said.count(None)
        return said

    def _ask(self, prompt: list[int], temperature: float, max_new_tokens: int, seed: int | None) -> Completion:
        try:
            return self._client.completions.create(
                model=self._served, prompt=prompt, max_tokens=max_new_tokens, temperature=temperature, top_p=1.0,
                seed=seed,
                extra_body={"return_token_ids": True, "skip_special_tokens": False, "top_k": -1, "min_p": 0.0},
            )  # fmt: skip
        except self._refused:
            raise
        except self._errors as error:
            raise self._unanswered(error) from error

    def _ids_of(self, prompts: Sequence[list[int]], replies: Sequence[Completion | None]) -> list[list[int] | None]:
        """Answers' ids, with the end token where they ended; None where they are not known."""
        found = [
            None if reply is None else _told_ids(reply) or self._encode_behind(prompt, reply.choices[0].text)
            for prompt, reply in zip(prompts, replies, strict=True)
        ]
        for ids, reply in zip(found, replies, strict=True):
            if ids is not None and reply is not None and _ended(reply) and reply.usage:
                self._counted_beyond[reply.usage.completion_tokens - len(ids)] += 1
        beyond = max((0, 1), key=lambda number: self._counted_beyond[number])  # as this server counts
        return [
            None if ids is None or reply is None else self._completed(ids, reply, beyond)
            for ids, reply in zip(found, replies, strict=True)
        ]

    def _completed(self, ids: list[int], reply: Completion, beyond: int) -> list[int] | None:
        """An answer with its end, where the server has counted as many tokens."""
        if reply.usage is None or reply.usage.completion_tokens != len(ids) + (beyond if _ended(reply) else 0):
            return None
        if not _ended(reply) or ids[-1:] in [[end] for end in self.end_ids]:
            return ids
        if _told_ids(reply):
            self.end_ids = [*self.end_ids, ids[-1]]  # the model's own, which the tokenizer did not name
            return ids
        end = _matched(reply)
        if end is None and len(self.end_ids) == 1:
            (end,) = self.end_ids
        return None if end is None else [*ids, end]

    def _encode_behind(self, prompt: list[int], text: str) -> list[int] | None:
        """The ids of a text where it stands behind a prompt; None where the prompt itself would be read otherwise."""
        before = self._tokenizer.decode(prompt, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        ids = list(self._tokenizer(before + text, add_special_tokens=False)["input_ids"])
        return ids[len(prompt) :] if ids[: len(prompt)] == prompt else None


def _ended(reply: Completion) -> bool:
    """Whether the model came to an end by itself."""
    return reply.choices[0].finish_reason == "stop"


def _matched(reply: Completion) -> int | None:
    """The token that ended an answer, where the server tells it: vLLM's `stop_reason`, SGLang's `matched_stop`."""
    extra = reply.choices[0].model_extra or {}
    told = [extra.get(name) for name in ("stop_reason", "matched_stop")]
    return next((value for value in told if isinstance(value, int)), None)


def _told_ids(reply: Completion) -> list[int] | None:
    """An answer's ids where the server tells them."""
    told = (reply.choices[0].model_extra or {}).get("token_ids")
    return list(told) if told is not None else None
