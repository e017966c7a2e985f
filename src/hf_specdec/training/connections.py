"""Requests to an OpenAI-compatible server, through the package `openai`, limited in time and size.

`openai` sends, retries and authenticates. It reads bodies of any size, and its timeouts start again with every byte,
so both limits are set here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from hf_specdec.errors import InvalidConfigError
from hf_specdec.training.completions import MAX_SHOWN, REFUSALS, SHORT, AnswerError

if TYPE_CHECKING:
    from openai import AsyncOpenAI

Result = TypeVar("Result")

MAX_BODY_BYTES = 8 * 2**20
"""Largest body that is read. An answer of 100,000 tokens, with its text and the ids of prompt and answer, takes 2 MB;
32 of these bodies at once take 256 MB."""

MAX_ERROR_BYTES = 4096
"""Bytes that are read of an error's body; only its message is shown."""

CONNECT_SECONDS = 10.0
"""A server that does not take a connection for so long is down."""

WHERE = "Give the root of its OpenAI-compatible interface, such as http://localhost:8000/v1."


class Connection:
    """A server's address, and the limits of every request to it.

    Args:
        url: Root of the protocol, such as `http://localhost:8000/v1`.
        api_key: Sent as a bearer token.
        timeout: Seconds from the first attempt of a request to the last byte of its answer, retries included.
        num_requests: Requests in flight at once.

    Raises:
        InvalidConfigError: The package `openai` is missing, or `url` is not an address of a web server.
    """

    def __init__(self, url: str, api_key: str, timeout: float, num_requests: int) -> None:
        try:
            import openai  # an optional dependency, used in this file alone
            from anyio.from_thread import start_blocking_portal  # openai depends on it
        except ImportError as error:
            raise InvalidConfigError(
                "Distilling from a server needs the package openai.", "pip install 'hf-specdec[training]'."
            ) from error
        _check_url(url)
        if not (api_key.isascii() and api_key.isprintable()):
            raise InvalidConfigError("The API key has characters that HTTP cannot send.", "Was it copied as a whole?")
        self.url, self._timeout, self._num_requests = url, timeout, num_requests
        self._portal = start_blocking_portal  # an event loop in a thread: notebooks run one in theirs
        self._status_error, self._timeouts = openai.APIStatusError, (TimeoutError, openai.APITimeoutError)

        class Bounded(openai.DefaultAsyncHttpxClient):
            """Reads every body as a whole, up to the limit, before `openai` sees the response."""

            async def send(self, request: Any, **options: Any) -> Any:
                return await _bounded(await super().send(request, **{**options, "stream": True}))

        def client() -> AsyncOpenAI:
            return openai.AsyncOpenAI(
                base_url=url,
                api_key=api_key,
                timeout=openai.Timeout(timeout, connect=min(CONNECT_SECONDS, timeout)),
                default_headers={"Accept-Encoding": "identity"},  # a compressed body can be small and endless
                http_client=Bounded(follow_redirects=False),  # prompts go to this address and no other
            )

        self._client = client

    def models(self, read: Callable[[bytes], Result]) -> Result:
        """Ask for the list of models.

        Args:
            read: Reads the body; may raise `AnswerError`.

        Raises:
            AnswerError: No answer, or none that `read` takes.
        """

        async def ask(client: AsyncOpenAI) -> list[Result | AnswerError]:
            return [await self._answered(client.models.with_raw_response.list, {}, read)]

        return _or_raise(self._run(ask)[0])

    def complete(
        self, requests: Sequence[Mapping[str, Any]], read: Callable[[bytes], Result]
    ) -> list[Result | AnswerError]:
        """Send requests for completions, `num_requests` at once.

        Args:
            requests: Arguments of `completions.create`.
            read: Reads a body; may raise `AnswerError`.

        Returns:
            What `read` made of each answer, or why there is none.
        """

        async def ask(client: AsyncOpenAI) -> list[Result | AnswerError]:
            free = asyncio.Semaphore(self._num_requests)

            async def one(request: Mapping[str, Any]) -> Result | AnswerError:
                async with free:
                    return await self._answered(client.completions.with_raw_response.create, request, read)

            return await asyncio.gather(*map(one, requests))

        return self._run(ask) if requests else []

    def _run(self, ask: Callable[[AsyncOpenAI], Any]) -> Any:
        async def with_client() -> Any:
            try:
                made = self._client()
            except Exception as error:  # the HTTP library reads addresses more strictly, and has its own error for it
                raise _not_an_address(self.url) from error
            async with made as client:
                return await ask(client)

        with self._portal() as portal:
            return portal.call(with_client)

    async def _answered(
        self, send: Callable[..., Any], request: Mapping[str, Any], read: Callable[[bytes], Result]
    ) -> Result | AnswerError:
        try:
            async with asyncio.timeout(self._timeout):
                response = await send(**request)
        except Exception as error:  # of openai, of the HTTP library that it has changed, and of theirs
            return self._failure(error)
        try:
            if response.status_code != 200:
                raise AnswerError(f"HTTP {response.status_code}", repr(response.content))
            return read(response.content)
        except AnswerError as error:
            return error

    def _failure(self, error: Exception) -> AnswerError:
        """Why a request has no answer, in a few words that can be counted."""
        for cause in (error, error.__cause__):
            if isinstance(cause, AnswerError):  # from `_bounded`; versions of openai before 3 wrap it
                return cause
        if isinstance(error, self._timeouts):
            return AnswerError(f"no whole answer within {self._timeout:g} s", is_answer=False)
        if isinstance(error, self._status_error):
            status = error.status_code
            return AnswerError(f"HTTP {status}", _message(error.body), is_answer=status in REFUSALS)
        cause = error.__cause__ or error
        return AnswerError(f"no connection ({type(cause).__name__})", str(cause), is_answer=False)


def _or_raise(answer: Result | AnswerError) -> Result:
    if isinstance(answer, AnswerError):
        raise answer
    return answer


def _check_url(url: str) -> None:
    """Refuse what is not an address of a web server.

    Raises:
        InvalidConfigError: No http or https, no host, a bad port, or characters that are in no address.
    """
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # an open bracket, a port that is no number
        valid = False
    if not valid or not url.isprintable() or " " in url:
        raise _not_an_address(url)


def _not_an_address(url: str) -> InvalidConfigError:
    return InvalidConfigError(f"{url[:MAX_SHOWN]!r} is not the address of a server.", WHERE)


async def _bounded(response: Any) -> Any:
    """A response of the same class whose body has been read, with the headers that are needed.

    Raises:
        AnswerError: The body of an answer is larger than `MAX_BODY_BYTES`.
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
                raise AnswerError(f"more than {MAX_BODY_BYTES // 2**20} MiB")
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
    """The message in the body of an error, or the body."""
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message", error) if isinstance(error, dict) else error
    return message if isinstance(message, str) else SHORT.repr(message)
