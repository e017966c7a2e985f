"""Servers whose answers are malformed: counted and skipped in the work, refused before it."""

from __future__ import annotations

import asyncio
import resource
import signal
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from hf_specdec import InvalidConfigError
from hf_specdec.training import ServerTeacher
from hostile_servers import (
    ADDRESSES,
    MAX_NEW_TOKENS,
    TABLE,
    TIMEOUT,
    completion,
    model_lists,
    of,
    prompt_of,
    serving,
    silent,
)
from zoo import chat_tokenizer

pytest.importorskip("openai")
GOOD = [5]
"""The valid answer of that server."""

WHOLE = ("completion_tokens 0", "text ''", "another end than the last")
"""Well-formed answers that contradict themselves: one of them says nothing about the next."""


def megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def refusals(attempts: Iterable[Callable[[], Any]]) -> list[str]:
    """What each attempt is refused with; all at once, each within the time limit on a busy machine."""

    def refusal(attempt: Callable[[], Any]) -> str:
        begin = time.perf_counter()
        with pytest.raises(InvalidConfigError) as refused:
            attempt()
        assert time.perf_counter() - begin < 5 * TIMEOUT
        return str(refused.value)

    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(refusal, attempts))


@pytest.mark.slow
def test_a_malformed_answer_is_counted_and_the_others_are_kept() -> None:
    replies = [reply for _, reply in TABLE]
    assert len(replies) > 300
    numbers = sorted([*range(len(replies)), *[len(replies)] * 40], key=lambda number: number * 7919 % 401)
    before = megabytes()
    with serving(replies) as (server, url):
        teacher = ServerTeacher(f"{url}/v1", chat_tokenizer(), timeout=TIMEOUT, num_requests=96)
        said = teacher.generate([prompt_of(number) for number in numbers], 0.0, MAX_NEW_TOKENS, "label")
    for number, answer in zip(numbers, said, strict=True):
        assert answer == (GOOD if number == len(replies) else None), TABLE[number][0]
    assert teacher.num_lost == len(replies)
    assert len(teacher.lost) > 30
    assert set(server.asked) == set(numbers)
    assert megabytes() - before < 900


@pytest.mark.slow
def test_a_server_without_a_valid_answer_is_refused_before_the_work() -> None:
    """Every fifth answer of the table, by `check`: the error names the address and shows what came."""
    with serving([reply for _, reply in TABLE]) as (_, url):
        teacher = ServerTeacher(f"{url}/v1", chat_tokenizer(), timeout=TIMEOUT)
        numbers = [number for number, (name, _) in enumerate(TABLE) if number % 5 == 0 and name not in WHOLE]
        for text in refusals(lambda number=number: teacher.check(prompt_of(number)) for number in numbers):
            assert url in text
        teacher.check(prompt_of(len(TABLE)))
    assert teacher.num_lost == 0


@pytest.mark.slow
def test_a_list_of_models_that_names_none_is_refused() -> None:
    cases = model_lists()
    with serving([reply for _, reply in cases]) as (_, url):
        texts = refusals(
            lambda number=number: ServerTeacher(f"{url}/{number}/v1", chat_tokenizer(), timeout=TIMEOUT)
            for number in range(len(cases))
        )
    for number, text in enumerate(texts):
        assert f"{url}/{number}/v1" in text, cases[number][0]
        assert len(text) < 600
        assert text.isprintable()
    shown = dict(zip([name for name, _ in cases], texts, strict=True))
    assert "model-0, model-1, model-2, model-3, model-4 and 4995 more" in "".join(texts)
    assert "HTTP 401: no key" in shown["models: status 401"]
    assert "redirected to http://127.0.0.1:9/" in shown["models: status 307"]


@pytest.mark.slow
def test_what_is_no_address_of_a_server_is_refused() -> None:
    for address, text in zip(
        ADDRESSES,
        refusals(
            lambda address=address: ServerTeacher(address, chat_tokenizer(), timeout=TIMEOUT) for address in ADDRESSES
        ),
        strict=True,
    ):
        assert "http://localhost:8000/v1" in text, address


def test_settings_that_cannot_be_sent_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving([]) as (_, url):
        for key in ("a\nb", "schlüssel", "a\x00"):
            with pytest.raises(InvalidConfigError, match="API key"):
                ServerTeacher(f"{url}/v1", chat_tokenizer(), api_key=key)
        for timeout in (0, -1.0, float("nan")):
            with pytest.raises(InvalidConfigError, match="`timeout` must be > 0"):
                ServerTeacher(f"{url}/v1", chat_tokenizer(), timeout=timeout)
        monkeypatch.setenv("OPENAI_API_KEY", "a\rb")
        with pytest.raises(InvalidConfigError, match="API key"):
            ServerTeacher(f"{url}/v1", chat_tokenizer())


@pytest.mark.slow
def test_a_failure_that_passes_is_asked_again() -> None:
    """The client tries three times, within the time of one answer."""
    replies: list[Any] = [of({}, 503), of({}, 429, "Retry-After: 1000000")]
    with serving(replies) as (server, url):
        teacher = ServerTeacher(f"{url}/v1", chat_tokenizer(), timeout=10)
        send = server.replies[0]

        def recover(connection: Any) -> None:
            connection.sendall(send if server.asked[0] < 3 else of(completion()))

        server.replies[0] = recover
        assert teacher.generate([prompt_of(0), prompt_of(1)], 0.0, MAX_NEW_TOKENS, "label") == [GOOD, None]
        assert server.asked[0] == 3
    assert teacher.lost == {"HTTP 429": 1}


def test_a_notebook_runs_an_event_loop_already() -> None:
    async def cell() -> list[list[int] | None]:
        with serving([]) as (_, url):
            return ServerTeacher(f"{url}/v1", chat_tokenizer()).generate([prompt_of(0)], 0.0, MAX_NEW_TOKENS, "label")

    assert asyncio.run(cell()) == [GOOD]


def test_an_interrupt_does_not_wait_for_answers() -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    begin = time.perf_counter()
    try:
        with serving([silent]) as (_, url):
            teacher = ServerTeacher(f"{url}/v1", chat_tokenizer())
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            with pytest.raises(KeyboardInterrupt):
                teacher.generate([prompt_of(0)] * 3, 0.0, MAX_NEW_TOKENS, "label")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert time.perf_counter() - begin < 3
