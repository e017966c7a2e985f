"""Generate answers with an OpenAI-compatible server (vLLM, SGLang), for targets too large to run in this process.

Prompts are sent as token ids. Answers come back as ids if the server sends them (vLLM's `return_token_ids`), otherwise
as text, which is encoded after its prompt. An answer is dropped, and counted by reason, if its request failed, if it
is malformed or does not match the server's token counts, or if its token ids or its end token are uncertain.

The package `openai` sends, retries and authenticates. It reads bodies of any size and restarts its timeout with every
byte, so both limits are enforced here.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import reprlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from hf_specdec.errors import InvalidConfigError, SpeculativeDecodingError, listed
from hf_specdec.heads.head import portable_name
from hf_specdec.training.teachers import Teacher, seed_of
from hf_specdec.validation import is_integer

if TYPE_CHECKING:
    from openai import AsyncOpenAI

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 8 * 2**20
"""Maximum response body in bytes. An answer of 100,000 tokens, with its text and the ids of prompt and answer, takes
2 MB; 32 maximal bodies (the default number of concurrent requests) take 256 MiB of memory."""

MAX_ERROR_BYTES = 4096
"""Maximum number of bytes kept of an error response, of which only the message is shown."""

COUNT_LIMIT = 2**31
"""Exclusive upper bound of the token counts that a server sends, and of the seeds that it accepts."""

MAX_MODEL_NAME = 500
"""Maximum length of a model name in characters; paths and Hub ids are shorter."""

MAX_SHOWN = 120
"""Maximum number of characters of a server's response in an error message."""

SHORT_REPR = reprlib.Repr()
"""Formatter that shows only the beginning of large or deeply nested values."""
SHORT_REPR.maxstring = SHORT_REPR.maxother = MAX_SHOWN

REFUSALS = (400, 413, 422)
"""HTTP error statuses that concern one prompt (malformed, too large, longer than the context), not the server."""

URL_HINT = "Give the base URL of an OpenAI-compatible server, such as http://localhost:8000/v1."


class AnswerError(SpeculativeDecodingError):
    """Raised or returned if a request to a server failed or its answer cannot be used.

    Dropped answers are counted per `reason`; `detail`, such as the value that the server sent, is shortened to a line.
    `is_answer` is False if the request failed (timeout, no connection, an HTTP error not in `REFUSALS`); otherwise the
    server sent an unusable answer or rejected the prompt.
    """

    def __init__(self, reason: str, detail: str = "", *, is_answer: bool = True) -> None:
        line = " ".join(detail[: 2 * MAX_SHOWN].split())
        line = line if len(line) <= MAX_SHOWN else line[: MAX_SHOWN - 3] + "..."
        super().__init__(f"{reason}: {line}" if detail else reason)
        self.reason, self.is_answer = reason, is_answer


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
        self._connection = _Connection(url, key, timeout, num_requests)
        vocabulary = tokenizer.get_vocab()
        self._vocab_size = max(vocabulary.values()) + 1
        self._max_token_length = max(map(len, vocabulary)) + 1  # some tokenizers add a space before a word
        default = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
        self.end_ids = list(end_ids or default)
        self._count_offsets: Counter[int] = Counter()  # server's count minus received ids, over all ended answers
        self._probe: list[int] = []  # a prompt that was answered, sent again if a later call fails
        (names,) = self._connection.send([{}], lambda client: client.models.with_raw_response.list, _read_model_names)
        if isinstance(names, AnswerError):
            raise self._error("does not answer", names, URL_HINT) from names
        if (model is None and len(names) != 1) or (model is not None and model not in names):
            problem = "no model was named" if model is None else f"there is no {model!r}"
            raise InvalidConfigError(
                f"The server at {url} has {listed(names, 5) or 'no model'}, and {problem}.", "Name one of its models."
            )
        self._served = model or names[0]
        self.name = portable_name(self._served) or Path(self._served).name

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
            seed_of(f"{label}/{index}") % COUNT_LIMIT if temperature and self._seeded else None
            for index in range(len(prompts))
        ]
        replies = self._replies(prompts, temperature, max_new_tokens, seeds)
        answers = self._ids_of(prompts, replies)
        lost = [answer for answer in answers if isinstance(answer, AnswerError)]
        if lost and self._probe and (len(lost) == len(answers) or not all(error.is_answer for error in lost)):
            try:
                self.check(self._probe)
            except InvalidConfigError as down:
                raise InvalidConfigError(
                    f"{down} It answered before; first failure: {str(lost[0]).rstrip('.')}.",
                    "Finished parts are kept. Start again with the same settings when the server is up.",
                ) from down
        for error in lost:
            if error.reason not in self.lost:
                logger.warning("Dropped an answer, the first for this reason: %s", error)
            self.lost[error.reason] += 1
        return [None if isinstance(answer, AnswerError) else answer for answer in answers]

    def _replies(
        self, prompts: Sequence[list[int]], temperature: float, max_new_tokens: int, seeds: Sequence[int | None]
    ) -> list[_Completion | AnswerError]:
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
        max_length = max_new_tokens * self._max_token_length
        return self._connection.send(
            requests,
            lambda client: client.completions.with_raw_response.create,
            lambda body: _read_completion(body, max_new_tokens, self._vocab_size, max_length),
        )

    def _ids_of(
        self, prompts: Sequence[list[int]], replies: Sequence[_Completion | AnswerError]
    ) -> list[list[int] | AnswerError]:
        """Return the ids of each answer, including the end token, or the reason to drop it."""
        found: list[list[int] | AnswerError] = []
        for prompt, reply in zip(prompts, replies, strict=True):
            if isinstance(reply, AnswerError):
                found.append(reply)
            elif reply.num_prompt_tokens != len(prompt):
                found.append(
                    AnswerError(
                        "server's prompt token count differs from the prompt",
                        f"{reply.num_prompt_tokens}, not {len(prompt)}",
                    )
                )
            else:
                ids = self._encode_after(prompt, reply.text) if reply.token_ids is None else reply.token_ids
                found.append(
                    AnswerError("text cannot be encoded after its prompt", repr(reply.text)) if ids is None else ids
                )
                if ids is not None and reply.ended:
                    self._count_offsets[reply.num_tokens - len(ids)] += 1
        offset = max((0, 1), key=lambda value: self._count_offsets[value])  # 1: counts an unsent end token
        return [
            ids if isinstance(ids, AnswerError) or isinstance(reply, AnswerError) else self._ended(ids, reply, offset)
            for ids, reply in zip(found, replies, strict=True)
        ]

    def _ended(self, ids: list[int], reply: _Completion, offset: int) -> list[int] | AnswerError:
        """Append the end token if it is missing; return an error if it is unknown, not last, or the length is wrong.

        If the server sends ids and stops at a token that is not in `end_ids`, the token is added to `end_ids`.
        `offset` is 1 if the server counts an end token that it does not send, else 0.
        """
        if reply.num_tokens != len(ids) + (offset if reply.ended else 0):
            return AnswerError("length differs from the server's token count", f"{reply.num_tokens}, not {len(ids)}")
        if not reply.ended or ids[-1:] in [[end] for end in self.end_ids]:
            return ids
        if reply.token_ids is not None:
            if reply.matched_stop not in (None, ids[-1]):
                return AnswerError("end token is not the last token", str(reply.matched_stop))
            self.end_ids = [*self.end_ids, ids[-1]]  # an end token that only the server knew
            return ids
        end = reply.matched_stop
        if end is None and len(self.end_ids) == 1:
            (end,) = self.end_ids
        return AnswerError("unknown end token", f"one of {self.end_ids}") if end is None else [*ids, end]

    def _encode_after(self, prompt: list[int], text: str) -> list[int] | None:
        """Encode the text that follows a prompt; None if encoding both together changes the ids of the prompt."""
        before = self._tokenizer.decode(prompt, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        ids = list(self._tokenizer(before + text, add_special_tokens=False)["input_ids"])
        return ids[len(prompt) :] if ids[: len(prompt)] == prompt else None


# ------------------------------------------------------------------------------------------------------- the protocol


@dataclass(frozen=True, slots=True)
class _Completion:
    """A validated answer of a server to one prompt."""

    token_ids: list[int] | None  # None if the server sent only text
    text: str  # empty if the server sent only token ids
    num_prompt_tokens: int  # as the server counts them
    num_tokens: int  # of the answer, as the server counts them; some servers exclude the end token
    ended: bool  # by the model, not by the limit
    matched_stop: int | None  # the end token, if the server names it (vLLM: `stop_reason`, SGLang: `matched_stop`)


def _require(valid: bool, reason: str, value: Any) -> None:
    if not valid:
        raise AnswerError(reason, SHORT_REPR.repr(value))


def _read_object(body: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:  # ValueError: also invalid UTF-8 and huge integers
        raise AnswerError("not JSON", SHORT_REPR.repr(body)) from error
    _require(isinstance(fields, dict), "not a JSON object", body)
    return fields


def _read_completion(body: bytes, max_new_tokens: int, vocab_size: int, max_length: int) -> _Completion:
    """Parse and validate a response body of `/v1/completions`; texts above `max_length` are too slow to encode."""

    def is_token(value: Any) -> bool:
        return is_integer(value) and 0 <= value < vocab_size

    fields = _read_object(body)
    choices: Any = fields.get("choices")
    usage: Any = fields.get("usage")
    one = isinstance(choices, list) and len(choices) == 1 and isinstance(choices[0], dict)
    _require(one, "`choices` is not a list of one object", choices)
    _require(isinstance(usage, dict), "`usage` is not an object", usage)
    choice = choices[0]
    reason, token_ids, text = choice.get("finish_reason"), choice.get("token_ids"), choice.get("text")
    _require(reason in ("stop", "length"), "`finish_reason` is neither stop nor length", reason)
    for name in ("completion_tokens", "prompt_tokens"):
        count = usage.get(name)
        _require(is_integer(count) and 0 <= count < COUNT_LIMIT, f"`{name}` is not a count", count)
    if token_ids == []:  # the text is used
        token_ids = None
    if token_ids is not None:
        _require(isinstance(token_ids, list), "`token_ids` is not a list", token_ids)
        text = "" if text is None else text
    num_tokens = max(usage["completion_tokens"], len(token_ids or []))
    _require(num_tokens <= max_new_tokens, "more tokens than requested", num_tokens)
    invalid = [token for token in token_ids or [] if not is_token(token)]
    _require(not invalid, "`token_ids` are not ids of the tokenizer's vocabulary", invalid)
    _require(isinstance(text, str), "`text` is not a string", text)
    _require(len(text) <= max_length, "longer text than the requested tokens can produce", text)
    try:
        text.encode()
    except UnicodeEncodeError as error:  # a lone surrogate, which JSON can express but tokenizers reject
        raise AnswerError("`text` is not Unicode", SHORT_REPR.repr(text)) from error
    matched_stop = None
    for name in ("stop_reason", "matched_stop"):
        value = choice.get(name)
        if is_token(value):
            matched_stop = value
            break
        known = value is None or isinstance(value, str)  # a string names a stop string or a reason
        _require(known, f"`{name}` is not a token of the tokenizer's vocabulary", value)
    return _Completion(
        token_ids, text, usage["prompt_tokens"], usage["completion_tokens"], reason == "stop", matched_stop
    )


def _read_model_names(body: bytes) -> list[str]:
    """Parse a response body of `/v1/models`."""
    models = _read_object(body).get("data")
    _require(isinstance(models, list), "`data` is not a list of models", models)
    names = []
    for model in models or []:
        name = model.get("id") if isinstance(model, dict) else None
        valid = isinstance(name, str) and 0 < len(name) <= MAX_MODEL_NAME and name.isprintable()
        _require(valid, f"a model's `id` is not a printable name of at most {MAX_MODEL_NAME} characters", model)
        names.append(str(name))
    return list(dict.fromkeys(names))


# ----------------------------------------------------------------------------------------------------- the connection


class _Connection:
    """Client for the models and completions endpoints of one server; see `ServerTeacher` for the arguments."""

    def __init__(self, url: str, api_key: str, timeout: float, num_requests: int) -> None:
        try:
            import openai  # an optional dependency, used only in this file
            from anyio.from_thread import start_blocking_portal  # openai depends on it
        except ImportError as error:
            raise InvalidConfigError(
                "Distilling from a server needs the package openai.", "Run `pip install 'hf-specdec[training]'`."
            ) from error
        try:
            parts = urlsplit(url)
            valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # unbalanced brackets, or a port that is not a number
            valid = False
        if not valid or not url.isprintable() or " " in url:
            raise _invalid_url(url)
        if not (api_key.isascii() and api_key.isprintable()):
            raise InvalidConfigError("The API key has characters that HTTP cannot send.", "Was it copied correctly?")
        self.url, self._timeout, self._num_requests = url, timeout, num_requests
        self._portal = start_blocking_portal  # an event loop in its own thread, since notebooks already run one
        self._status_error, self._timeouts = openai.APIStatusError, (TimeoutError, openai.APITimeoutError)

        class LimitedClient(openai.DefaultAsyncHttpxClient):
            """HTTP client that reads every response body with `_read_limited` before it returns the response."""

            async def send(self, request: Any, **options: Any) -> Any:
                return await _read_limited(await super().send(request, **{**options, "stream": True}))

        def client() -> AsyncOpenAI:
            return openai.AsyncOpenAI(
                base_url=url,
                api_key=api_key,
                timeout=openai.Timeout(timeout, connect=min(10.0, timeout)),
                default_headers={"Accept-Encoding": "identity"},  # a small compressed body can expand without limit
                http_client=LimitedClient(follow_redirects=False),  # prompts must go only to the given URL
            )

        self._client = client

    def send(
        self,
        requests: Sequence[Mapping[str, Any]],
        method: Callable[[AsyncOpenAI], Callable[..., Any]],
        read: Callable[[bytes], Any],
    ) -> list[Any]:
        """Call a method of the client with the arguments of each request, up to `num_requests` at a time.

        Returns what `read` makes of each response body, or an `AnswerError` if the request failed or `read` raised it.
        """

        async def request_all() -> list[Any]:
            try:
                client = self._client()
            except Exception as error:  # the HTTP library checks URLs more strictly and raises its own class
                raise _invalid_url(self.url) from error
            slots = asyncio.Semaphore(self._num_requests)

            async def request(arguments: Mapping[str, Any]) -> Any:
                async with slots:
                    return await self._request(method(client), arguments, read)

            async with client:
                return await asyncio.gather(*map(request, requests))

        if not requests:
            return []
        with self._portal() as portal:
            return portal.call(request_all)

    async def _request(
        self, send: Callable[..., Any], arguments: Mapping[str, Any], read: Callable[[bytes], Any]
    ) -> Any:
        try:
            async with asyncio.timeout(self._timeout):
                response = await send(**arguments)
        except Exception as error:  # openai, its HTTP library and their dependencies raise many classes
            return self._failure(error)
        try:
            if response.status_code != 200:
                raise AnswerError(f"HTTP {response.status_code}", repr(response.content))
            return read(response.content)
        except AnswerError as error:
            return error

    def _failure(self, error: Exception) -> AnswerError:
        """Convert the exception of a failed request to an `AnswerError`; equal failures get the same `reason`."""
        for cause in (error, error.__cause__):
            if isinstance(cause, AnswerError):  # from `_read_limited`; openai before version 3 wraps it
                return cause
        if isinstance(error, self._timeouts):
            return AnswerError(f"no complete answer within {self._timeout:g} s", is_answer=False)
        if isinstance(error, self._status_error):
            status, body = error.status_code, error.body  # the body's message, else its error object, else the body
            body = body.get("error", body) if isinstance(body, dict) else body
            message = body.get("message", body) if isinstance(body, dict) else body
            message = message if isinstance(message, str) else SHORT_REPR.repr(message)
            return AnswerError(f"HTTP {status}", message, is_answer=status in REFUSALS)
        cause = error.__cause__ or error
        return AnswerError(f"no connection ({type(cause).__name__})", str(cause), is_answer=False)


def _invalid_url(url: str) -> InvalidConfigError:
    return InvalidConfigError(f"{url[:MAX_SHOWN]!r} is not a valid server URL.", URL_HINT)


async def _read_limited(response: Any) -> Any:
    """Read the body of a streamed response, up to a limit, and return it as a new response of the same class.

    The new response has only the headers that `openai` needs. If the status is not 200, the body is cut at
    `MAX_ERROR_BYTES`; else a body larger than `MAX_BODY_BYTES` is an `AnswerError`. The address of a redirect is put
    before the body.
    """
    is_error, body = response.status_code != 200, bytearray()
    if "location" in response.headers:
        body += f"redirected to {response.headers['location']}, ".encode()
    try:
        async for chunk in response.aiter_raw():
            body += chunk
            if is_error and len(body) > MAX_ERROR_BYTES:
                break
            if len(body) > MAX_BODY_BYTES:
                raise AnswerError(f"response larger than {MAX_BODY_BYTES // 2**20} MiB")
    finally:
        await response.aclose()
    wait = response.headers.get("retry-after", "")
    headers = {"retry-after": wait} if wait.isascii() and wait.isdecimal() and len(wait) < 5 else {}
    return type(response)(
        response.status_code,
        headers={"content-type": "application/json", **headers},
        content=bytes(body[: MAX_ERROR_BYTES if is_error else None]),
        request=response.request,
    )
