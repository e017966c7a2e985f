"""Answers of a server that speaks OpenAI's protocol (vLLM, SGLang): for targets that are too large to distil here.

A prompt is sent as token ids, so the server reads what this tokenizer wrote. An answer comes back as ids where the
server tells them (vLLM's `return_token_ids`), or as text, which is encoded again behind its prompt; ids that do not
agree with what the server has counted are given up, never guessed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from hf_specdec.errors import InvalidConfigError
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
        api_key: For servers that ask for one; None is the environment's `OPENAI_API_KEY`.

    Raises:
        InvalidConfigError: The package `openai` is missing, nobody answers at `url`, or the model is not there.
    """

    def __init__(
        self, url: str, tokenizer: Any, model: str | None = None, *, num_requests: int = 32, timeout: float = 600.0,
        api_key: str | None = None,
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
        self._errors, self._url, self._tokenizer = openai.OpenAIError, url, tokenizer
        self._client = openai.OpenAI(base_url=url, api_key=key, timeout=timeout)
        self._num_requests = num_requests
        self.end_ids = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
        self.name = self._find(model)

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
        reply = self._ask(prompt, 0.0, 1, 0)
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

        def answer(index: int) -> list[int] | None:
            seed = seed_of(f"{label}/{index}") % SEEDS
            return self._ids_of(prompts[index], self._ask(prompts[index], temperature, max_new_tokens, seed))

        with ThreadPoolExecutor(self._num_requests) as pool:
            said = list(pool.map(answer, range(len(prompts))))
        self.num_lost += said.count(None)
        return said

    def _ask(self, prompt: list[int], temperature: float, max_new_tokens: int, seed: int) -> Completion:
        try:
            return self._client.completions.create(
                model=self.name, prompt=prompt, max_tokens=max_new_tokens, temperature=temperature, top_p=1.0,
                seed=seed, extra_body={"return_token_ids": True, "skip_special_tokens": False, "top_k": -1},
            )  # fmt: skip
        except self._errors as error:
            raise self._unanswered(error) from error

    def _ids_of(self, prompt: list[int], reply: Completion) -> list[int] | None:
        """An answer's ids, with the end token where it ended; None where the server counted others."""
        choice, ids = reply.choices[0], _told_ids(reply)
        if ids is None:
            ids = self._encode_behind(prompt, choice.text)
        if ids is None:
            return None
        ended = choice.finish_reason == "stop"
        if ended and ids[-1:] != self.end_ids:
            ids = [*ids, *self.end_ids]
        counted = reply.usage.completion_tokens if reply.usage else None
        return ids if counted in (len(ids), len(ids) - ended) else None  # some count the end token, some do not

    def _encode_behind(self, prompt: list[int], text: str) -> list[int] | None:
        """The ids of a text where it stands behind a prompt; None where the prompt itself would be read otherwise."""
        before = self._tokenizer.decode(prompt, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        ids = list(self._tokenizer(before + text, add_special_tokens=False)["input_ids"])
        return ids[len(prompt) :] if ids[: len(prompt)] == prompt else None


def _told_ids(reply: Completion) -> list[int] | None:
    """An answer's ids where the server tells them."""
    told = (reply.choices[0].model_extra or {}).get("token_ids")
    return list(told) if told is not None else None
