"""Send requests to an OpenAI-compatible server with limits on time and response size.

The package `openai` sends, retries and authenticates. It reads bodies of any size and restarts its timeout with every
byte, so both limits are enforced here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from hf_specdec.errors import InvalidConfigError
from hf_specdec.training.completions import MAX_SHOWN, REFUSALS, SHORT_REPR, AnswerError

if TYPE_CHECKING:
    from openai import AsyncOpenAI

Result = TypeVar("Result")

MAX_BODY_BYTES = 8 * 2**20
"""Maximum response body in bytes. An answer of 100,000 tokens, with its text and the ids of prompt and answer, takes
2 MB; 32 maximal bodies (the default number of concurrent requests) take 256 MiB of memory."""

MAX_ERROR_BYTES = 4096
"""Maximum number of bytes kept of an error response, of which only the message is shown."""

CONNECT_SECONDS = 10.0
"""Timeout in seconds of one attempt to connect; a request that allows less time uses its own timeout."""

URL_HINT = "Give the base URL of an OpenAI-compatible server, such as http://localhost:8000/v1."


class Connection:
    """Client for the models and completions endpoints of one server.

    Args:
        url: Base URL of the API, such as `http://localhost:8000/v1`.
        api_key: Sent as a bearer token.
        timeout: Seconds per request from the first attempt to the last byte of the response, retries included.
        num_requests: Maximum number of concurrent requests.

    Raises:
        InvalidConfigError: The package `openai` is missing, `url` is not an HTTP URL, or the key has characters
            that HTTP cannot send.
    """

    def __init__(self, url: str, api_key: str, timeout: float, num_requests: int) -> None:
        try:
            import openai  # an optional dependency, used only in this file
            from anyio.from_thread import start_blocking_portal  # openai depends on it
        except ImportError as error:
            raise InvalidConfigError(
                "Distilling from a server needs the package openai.", "Run `pip install 'hf-specdec[training]'`."
            ) from error
        _check_url(url)
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
                timeout=openai.Timeout(timeout, connect=min(CONNECT_SECONDS, timeout)),
                default_headers={"Accept-Encoding": "identity"},  # a small compressed body can expand without limit
                http_client=LimitedClient(follow_redirects=False),  # prompts must go only to the given URL
            )

        self._client = client

    def models(self, read: Callable[[bytes], Result]) -> Result:
        """Request the list of models and return what `read` returns for it.

        Args:
            read: Parses the response body; may raise `AnswerError`.

        Raises:
            AnswerError: The request failed, or `read` raised it.
            InvalidConfigError: The HTTP library rejects the URL.
        """

        async def request(client: AsyncOpenAI) -> Result | AnswerError:
            return await self._request(client.models.with_raw_response.list, {}, read)

        answer: Result | AnswerError = self._run(request)
        if isinstance(answer, AnswerError):
            raise answer
        return answer

    def complete(
        self, requests: Sequence[Mapping[str, Any]], read: Callable[[bytes], Result]
    ) -> list[Result | AnswerError]:
        """Request completions, up to `num_requests` at a time.

        Args:
            requests: Arguments of `completions.create` per request.
            read: Parses a response body; may raise `AnswerError`.

        Returns:
            For each request, in order, the result of `read`, or the error if the request failed or `read` raised it.

        Raises:
            InvalidConfigError: The HTTP library rejects the URL.
        """

        async def request_all(client: AsyncOpenAI) -> list[Result | AnswerError]:
            slots = asyncio.Semaphore(self._num_requests)

            async def request(arguments: Mapping[str, Any]) -> Result | AnswerError:
                async with slots:
                    return await self._request(client.completions.with_raw_response.create, arguments, read)

            return await asyncio.gather(*map(request, requests))

        return self._run(request_all) if requests else []

    def _run(self, work: Callable[[AsyncOpenAI], Any]) -> Any:
        async def with_client() -> Any:
            try:
                client = self._client()
            except Exception as error:  # the HTTP library checks URLs more strictly and raises its own class
                raise _invalid_url(self.url) from error
            async with client:
                return await work(client)

        with self._portal() as portal:
            return portal.call(with_client)

    async def _request(
        self, send: Callable[..., Any], arguments: Mapping[str, Any], read: Callable[[bytes], Result]
    ) -> Result | AnswerError:
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
            status = error.status_code
            return AnswerError(f"HTTP {status}", _message(error.body), is_answer=status in REFUSALS)
        cause = error.__cause__ or error
        return AnswerError(f"no connection ({type(cause).__name__})", str(cause), is_answer=False)


def _check_url(url: str) -> None:
    """Check that a server URL is valid.

    Raises:
        InvalidConfigError: The scheme is not http(s), the host is missing, or the port or a character is invalid.
    """
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # unbalanced brackets, or a port that is not a number
        valid = False
    if not valid or not url.isprintable() or " " in url:
        raise _invalid_url(url)


def _invalid_url(url: str) -> InvalidConfigError:
    return InvalidConfigError(f"{url[:MAX_SHOWN]!r} is not a valid server URL.", URL_HINT)


async def _read_limited(response: Any) -> Any:
    """Read the body of a streamed response, up to a limit, and return it as a new response of the same class.

    The new response has only the headers that `openai` needs. If the status is not 200, the body is cut at
    `MAX_ERROR_BYTES`. The address of a redirect is put before the body.

    Raises:
        AnswerError: The status is 200 and the body is larger than `MAX_BODY_BYTES`.
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


def _message(body: Any) -> str:
    """Return the message in the body of an error response; without one, its error object or the body as text."""
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message", error) if isinstance(error, dict) else error
    return message if isinstance(message, str) else SHORT_REPR.repr(message)
