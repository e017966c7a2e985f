"""Servers whose answers are malformed, endless or hostile."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from zoo import VOCAB_SIZE

TIMEOUT = 4.0
"""Seconds that an answer may take here."""

MAX_NEW_TOKENS = 4

DIGITS = range(5, 85)
"""Tokens that spell the number of a reply in a prompt."""

Reply = bytes | Callable[[socket.socket], None]
"""What goes over the wire instead of a response, or what writes it."""


def completion(num_prompt_tokens: int = 2, **changes: Any) -> dict[str, Any]:
    """A valid answer of one token, and what differs from it: `choice__text=...` changes a field of the choice."""
    choice = {"index": 0, "text": " w05", "logprobs": None, "finish_reason": "length"}
    usage = {"prompt_tokens": num_prompt_tokens, "completion_tokens": 1, "total_tokens": num_prompt_tokens + 1}
    made: dict[str, Any] = {"id": "1", "object": "text_completion", "created": 0, "model": "tiny", "choices": [choice],
                            "usage": usage}  # fmt: skip
    places = {"choice": choice, "usage": usage}
    for name, value in changes.items():
        place, _, field = name.rpartition("__")
        target = places.get(place, made)
        if value is DROP:
            target.pop(field, None)
        else:
            target[field] = value
    return made


DROP = object()


def response(body: bytes, status: int = 200, *headers: str, length: int | None = None) -> bytes:
    lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(body) if length is None else length}", *headers]
    if not any(line.lower().startswith("content-type") for line in headers):
        lines.append("Content-Type: application/json")
    return ("\r\n".join(lines) + "\r\nConnection: close\r\n\r\n").encode("latin-1") + body


def of(value: Any, status: int = 200, *headers: str) -> bytes:
    return response(json.dumps(value).encode(), status, *headers)


def chunked(*lines: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"".join(lines)


def endless(start: bytes, again: bytes, pause: float = 0.0) -> Reply:
    """Bytes for ever, or until the other side has had enough."""

    def write(connection: socket.socket) -> None:
        connection.sendall(start)
        until = time.monotonic() + 60
        while time.monotonic() < until:
            connection.sendall(again)
            time.sleep(pause)

    return write


def silent(connection: socket.socket) -> None:
    connection.settimeout(60)
    connection.recv(1)


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")


# ------------------------------------------------------------------------------------------------------ the table

NO_NUMBERS: list[Any] = ["1", True, False, None, -1, 1.0, 1.5, [], [1], {}, {"a": 1}, 2**31, 2**70, -(2**70), "", "x"]
NO_IDS: list[Any] = [-1, VOCAB_SIZE, 2**31, 2**64, 2**70, -(2**70), "5", "", None, True, False, 5.0, [5], [], {}]
OK_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
GOOD = json.dumps(completion()).encode()
MODELS = {"object": "list", "data": [{"id": "tiny", "object": "model", "created": 0, "owned_by": "us"}]}


def bodies() -> Iterator[tuple[str, Any]]:
    """JSON of another shape."""
    for value in (None, [], {}, 7, "x", "", True, 1.5, [completion()], {"error": "x"}, {"choices": [{}]}):
        yield f"body {value!r:.30}", value
    for value in (None, [], {}, 7, "x", True, [None], [7], ["x"], [[]], [{}], [[{}]], [[completion()]], {"0": {}},
                  DROP, [completion()["choices"][0]] * 2, [{}] * 1000):  # fmt: skip
        yield f"choices {value!r:.30}", completion(choices=value)
    for value in (None, [], {}, 7, "x", True, [{}], DROP):
        yield f"usage {value!r:.30}", completion(usage=value)
    for value in [*NO_NUMBERS, DROP]:
        yield f"completion_tokens {value!r:.30}", completion(usage__completion_tokens=value)
        yield f"prompt_tokens {value!r:.30}", completion(usage__prompt_tokens=value)
    for value in (0, 2, 3, 4, 5, 2**30):
        yield f"completion_tokens {value}", completion(usage__completion_tokens=value)
    for value in (0, 1, 3, 2**30):
        yield f"prompt_tokens {value}", completion(usage__prompt_tokens=value)
    for value in (None, "", "abort", "error", "content_filter", "tool_calls", "STOP", 0, 1, True, [], ["stop"], {},
                  {"type": "stop"}, 1.5, DROP):  # fmt: skip
        yield f"finish_reason {value!r:.30}", completion(choice__finish_reason=value)
    for value in (None, 7, True, [], ["w05"], {}, 1.5, DROP, "\ud800", " w05" * 100, " w05" * 10**6, "x" * 10**6, "",
                  " w05 w06", "\x00" * 50):  # fmt: skip
        yield f"text {value!r:.30}", completion(choice__text=value)
    for value in ("x", 7, True, {}, 1.5, {"0": 5}, [5, 6], [5] * 5, [5] * 10**6):
        yield f"token_ids {value!r:.30}", completion(choice__token_ids=value)
    for value in NO_IDS:
        yield f"token_ids [{value!r:.30}]", completion(choice__token_ids=[value])
        yield f"token_ids [5, {value!r:.30}]", completion(choice__token_ids=[5, value], usage__completion_tokens=2)
    for value in (-1, VOCAB_SIZE, 2**70, True, 1.5, [92], {}):
        for name in ("stop_reason", "matched_stop"):
            changes = {f"choice__{name}": value, "choice__finish_reason": "stop"}
            yield f"{name} {value!r:.30}", completion(**changes)
    yield (
        "another end than the last",
        completion(choice__token_ids=[5], choice__finish_reason="stop", choice__stop_reason=7),
    )


def nested(depth: int) -> bytes:
    return b'{"choices": ' + b"[" * depth + b"]" * depth + b"}"


def raw() -> Iterator[tuple[str, Reply]]:
    """Bytes that are no JSON, no HTTP, or not all there."""
    for name, body in {
        "nothing": b"", "space": b"  \n", "html": b"<!DOCTYPE html><html><body>502 Bad Gateway</body></html>",
        "half": GOOD[: len(GOOD) // 2], "twice": GOOD * 2, "NaN": b"NaN", "Infinity": b"-Infinity",
        "single quotes": b"{'choices': []}", "server-sent events": b"data: " + GOOD + b"\n\n", "zeros": b"\0" * 1000,
        "no UTF-8": b'{"choices": "\xff\xfe\xfd"}', "latin": '{"é": 1}'.encode("latin-1"), "gzip": b"\x1f\x8b\x08\0",
        "deep": nested(100_000), "deep, and parsed": nested(900), "deep objects": b'{"a":' * 50_000,
        "endless number": b'{"choices": ' + b"9" * 5000 + b"}", "long number": b'{"usage": ' + b"9" * 4000 + b"}",
        "a megabyte of text": b'"' + b"x" * 2**20 + b'"', "UTF-16 by halves": GOOD.decode().encode("utf-16")[:-1],
        "many lists": b'{"choices": [' + b"[]," * 10**6 + b"[]]}", "python": b"None", "comment": b"// " + GOOD,
    }.items():  # fmt: skip
        yield f"body: {name}", response(body)
    yield "too large", response(GOOD + b" " * (9 * 2**20))
    yield "compressed, though not asked for", response(b"\x1f\x8b\x08\0junk", 200, "Content-Encoding: gzip")
    yield "longer than announced", response(GOOD, length=len(GOOD) - 9)
    yield "shorter than announced", response(GOOD, length=len(GOOD) + 9)
    yield "announced as huge", response(GOOD, length=2**62)
    yield "announced as negative", response(GOOD, length=-1)
    yield "closed at once", b""
    yield "reset", reset
    yield "no HTTP", b"hello\r\n\r\n"
    yield "another protocol", b"SSH-2.0-OpenSSH_9.6\r\n"
    yield "HTTP/9", b"HTTP/9.9 200 OK\r\n\r\n"
    yield "a status of text", b"HTTP/1.1 abc OK\r\n\r\n"
    yield "headers only", OK_HEAD
    yield "a header of garbage", b"HTTP/1.1 200 OK\r\n\xff\xfe: x\r\n: y\r\n\r\n"
    yield "a header of 1 MB", b"HTTP/1.1 200 OK\r\nX: " + b"x" * 2**20 + b"\r\n\r\n"
    yield "10,000 headers", b"HTTP/1.1 200 OK\r\n" + b"X: x\r\n" * 10_000 + b"\r\n" + GOOD[:9]
    yield "a bad chunk", chunked(b"zz\r\n{}\r\n")
    yield "a negative chunk", chunked(b"-5\r\n{}\r\n")
    yield "half a chunk", chunked(b"ff\r\n{}")
    yield "a huge chunk", chunked(b"ffffffffffffffff\r\n{}")
    yield "both lengths", chunked(b"").replace(b"\r\n\r\n", b"\r\nContent-Length: 5\r\n\r\nxx")
    yield "charset", response(b"", 200, "Content-Type: application/json; charset=hex")


def unending() -> Iterator[tuple[str, Reply]]:
    """What never comes to an end: the time and the size of an answer are limited."""
    yield "silence", silent
    yield "headers and silence", endless(OK_HEAD, b"", 1.0)
    yield "a body without end", endless(OK_HEAD + b"\r\n", b"[" * 65536)
    yield "an object without end", endless(OK_HEAD + b"\r\n{", b'"a": 1, ' * 1000)
    yield "a slow body", endless(OK_HEAD + b"\r\n", b" ", 0.1)
    yield "slow headers", endless(b"HTTP/1.1 200 OK\r\nX: ", b"x", 0.1)
    yield "headers without end", endless(b"HTTP/1.1 200 OK\r\n", b"X: x\r\n", 0.01)
    yield "chunks without end", endless(chunked(), b"5\r\n     \r\n")
    yield "chunk extensions", endless(chunked(b"5;"), b"x" * 1000)
    yield "trailers", endless(chunked(b"0\r\n"), b"X: x\r\n")
    yield "processing", endless(b"", b"HTTP/1.1 102 Processing\r\n\r\n", 0.01)
    yield "an error without end", endless(b"HTTP/1.1 400 Bad\r\n\r\n", b"x" * 65536)
    yield "a failure without end", endless(b"HTTP/1.1 500 Bad\r\n\r\n", b"x" * 65536)


WAITS = ("1000000", "-5", "0", "1e308", "inf", "nan", "9" * 5000, "Wed, 21 Oct 2099 07:28:00 GMT", "x", "",
         "Wed, 99 Foo 99999 99:99:99", "0.0001", "-inf", "1_000", "٣")  # fmt: skip


def statuses() -> Iterator[tuple[str, Reply]]:
    """Errors, redirects, and what servers ask for with them."""
    for status in (201, 204, 206, 300, 304, 400, 401, 402, 403, 404, 405, 408, 409, 410, 413, 418, 422, 429, 451, 500,
                   501, 502, 503, 504, 511, 599, 600, 799, 999):  # fmt: skip
        yield f"status {status}", of({"error": {"message": "no"}}, status)
    for body in (b"", b"<html>", b"null", b"[]", b"7", b'"x"', b'{"error": null}', b'{"error": [1]}', b"\xff\xfe",
                 b'{"error": {"message": 7, "code": [], "param": {}, "type": 1}}', nested(900),
                 b"x" * 10**5):  # fmt: skip
        yield f"status 400 with {body!r:.30}", response(body, 400)
    for charset in ("hex", "idna", "utf-16", "punycode", "rot13", "\xff"):
        yield f"status 400 in {charset!r}", response(b"abc\xff", 400, f"Content-Type: text/html; charset={charset}")
    for status in (429, 503):
        for wait in WAITS:
            line = f"Retry-After: {wait}".encode().decode("latin-1")
            yield f"status {status}, again in {wait:.20}", of({}, status, line)
    yield "again in milliseconds", of({}, 503, "Retry-After-Ms: 1e300")
    yield "again by all means", of({}, 400, "X-Should-Retry: true")
    for place in ("/nowhere", "http://127.0.0.1:9/", "http://[", "file:///etc/passwd", "javascript:1", "", "http://",
                  "//", "http://x\x00y/", "http://127.0.0.1:99999/", "ftp://x/", "/" + "x" * 9999, "."):  # fmt: skip
        for status in (301, 307):
            yield f"status {status} to {place!r:.30}", of({}, status, f"Location: {place}")
    for cookie in ("a=b; Expires=Foo", "=", "a=" + "x" * 9999, "a=b; Domain=\xff; Max-Age=9e99", "a=b; Version=x"):
        yield f"status 400 and a cookie {cookie!r:.20}", of({}, 400, f"Set-Cookie: {cookie}")


def malformed() -> list[tuple[str, Reply]]:
    """Every answer of the table: its name, and what the server sends."""
    made = [(name, of(value)) for name, value in bodies()]
    return [*made, *raw(), *unending(), *statuses()]


def model_lists() -> list[tuple[str, Reply]]:
    """Answers of `/v1/models` of which none names one model."""
    values: list[Any] = [None, [], {}, 7, "x", {"data": None}, {"data": {}}, {"data": []}, {"data": "x"},
                         {"data": 7}, {"data": [None]}, {"data": ["tiny"]}, {"data": [{}]}, {"data": [[]]},
                         {"object": "list"}]  # fmt: skip
    strange = (None, 7, True, [], {}, "", "x" * 501, "\x00", "\ud800", "\x1b[2J", "a\nb", 2**70)
    values += [{"data": [{"id": name}]} for name in strange]
    values.append({"data": [{"id": f"model-{number}"} for number in range(5000)]})
    values.append({"data": [{"id": "tiny"}, {"id": 7}]})
    made = [(f"models {value!r:.40}", of(value)) for value in values]
    others = [case for case in raw() if case[0] in ("body: html", "body: deep", "too large", "reset", "no HTTP")]
    return [*made, *others, ("models: status 401", of({"error": {"message": "no key"}}, 401)), ("silence", silent),
            ("models: status 307", of({}, 307, "Location: http://127.0.0.1:9/")),
            ("models: endless", endless(OK_HEAD + b"\r\n", b"[" * 65536))]  # fmt: skip


ADDRESSES = (
    "", " ", "localhost", "localhost:8000", "//localhost", "http://", "http:///v1", "http://[", "http://[::1",
    "http://]", "http://a\x00b/v1", "http://a b/", "file:///etc/passwd", "ftp://localhost", "javascript:alert(1)",
    "http://localhost:99999", "http://localhost:x", "http://localhost:-1", "http://localhost:0", "/v1", "..",
    "http://a\nb", "http://\x1b[2J", "http://.", "http://" + "a" * 300, "http://xn--a/", "http://\ud800/",
    "http://é\u202e/", "http://[::1]extra/", "http://a:b:c/", "http://%00/", "http://127.0.0.1:9/v1",
)  # fmt: skip


# ------------------------------------------------------------------------------------------------------ the server


def prompt_of(number: int) -> list[int]:
    """Two tokens that ask for a reply."""
    return [DIGITS[digit] for digit in divmod(number, len(DIGITS))]


def number_of(prompt: list[int]) -> int:
    return DIGITS.index(prompt[0]) * len(DIGITS) + DIGITS.index(prompt[1])


class Hostile(ThreadingHTTPServer):
    """Sends reply n to the prompt that asks for it, and for the list of models reply n to the path `/n/v1/models`."""

    daemon_threads = True
    request_queue_size = 512

    def __init__(self, replies: list[Reply]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.replies = replies
        self.asked: Counter[int] = Counter()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """The other side closes in the middle: that is what is tested."""


class _Handler(BaseHTTPRequestHandler):
    server: Hostile

    def do_GET(self) -> None:
        number = self.path.split("/")[1]
        self._send(self.server.replies[int(number)] if number.isdecimal() else of(MODELS))

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        number = number_of(request["prompt"])
        self.server.asked[number] += 1
        usable = number >= len(self.server.replies)
        self._send(of(completion(len(request["prompt"]))) if usable else self.server.replies[number])

    def _send(self, reply: Reply) -> None:
        self.close_connection = True
        if callable(reply):
            reply(self.connection)
        else:
            self.connection.sendall(reply)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def serving(replies: list[Reply]) -> Iterator[tuple[Hostile, str]]:
    """A server that sends these, and a valid answer for any higher number."""
    with Hostile(replies) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server, f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


TABLE = malformed()
