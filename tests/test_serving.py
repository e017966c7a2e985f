"""`examples/serve.py`: a bad request, or a client that leaves a stream, ends its own request and no other."""

from __future__ import annotations

import copy
import http.client
import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import GenerationConfig

from benchmark_script import EXAMPLES, plain_answers, script
from hf_specdec.cpu.operations import BLOCKS, PACKED
from hf_specdec.cpu.quantized import packed_forms
from hf_specdec.generation.packaged import PACKAGE
from zoo import END, build, chat_tokenizer

for package in ("fastapi", "uvicorn", "openai"):
    pytest.importorskip(package)

ASKED, LENGTH = "w05 w06", 12
LONGEST = 100_000
"""Limit of the server in tokens: as many take minutes."""


class Server:
    """Sends requests to the example, which runs in a process of its own."""

    def __init__(self, model: Path, port: int) -> None:
        self.model, self.port = str(model), port

    def open(self, stream: bool = False, **changes: Any) -> http.client.HTTPConnection:
        """Send a request and do not wait for the answer; `generation={...}` are fields of its `generation_config`."""
        if "generation" in changes:
            changes["generation_config"] = json.dumps(changes.pop("generation"))
        body = {"model": self.model, "messages": [{"role": "user", "content": ASKED}], "max_tokens": LENGTH,
                "temperature": 0, "stream": stream, **changes}  # fmt: skip
        connection = http.client.HTTPConnection("localhost", self.port, timeout=30)
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        return connection

    def ask(self, **changes: Any) -> tuple[int, str]:
        """The status and the body of an answer."""
        connection = self.open(**changes)
        response = connection.getresponse()
        text = response.read().decode()
        connection.close()
        return response.status, text

    def text(self, stream: bool = False) -> str:
        """What the model says to a good request."""
        status, body = self.ask(stream=stream)
        assert status == 200, body
        if not stream:
            return str(json.loads(body)["choices"][0]["message"]["content"])
        chunks = [json.loads(line.removeprefix("data: ")) for line in body.splitlines() if line]
        return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, str]]:
    """The server, and what it says to a good request."""
    folder = tmp_path_factory.mktemp("model")
    model = copy.deepcopy(build("llama"))
    model.generation_config.eos_token_id, model.config.max_position_embeddings = END, 2 * LONGEST
    model.save_pretrained(folder)
    chat_tokenizer().save_pretrained(folder)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-W", "ignore", EXAMPLES / "serve.py", "--model", folder, "--port", str(port),
               "--max-new-tokens", str(LONGEST)]  # fmt: skip
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_CACHE": str(folder / "none")}
    log = folder.with_suffix(".log")
    with (
        log.open("wb") as output,
        subprocess.Popen(command, env=environment, stdout=output, stderr=output) as process,
    ):
        try:
            wait_for(port, process, log)
            yield Server(folder, port), plain_answers(folder, [ASKED], LENGTH)[0]
        finally:
            process.kill()


def wait_for(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + 120
    while time.monotonic() < until:
        assert process.poll() is None, log.read_text()[-2000:]
        try:
            socket.create_connection(("localhost", port)).close()
            return
        except OSError:
            time.sleep(0.1)
    raise AssertionError("The server did not start.")


BAD: dict[str, dict[str, Any]] = {
    "unknown method": {"generation": {"speculative": "nonsense"}},
    "unknown method of a dict": {"generation": {"speculative": {"method": "nonsense"}}},
    "a method without its head": {"generation": {"speculative": "eagle"}},
    "unknown field": {"generation": {"speculative": {"bogus": 1}}},
    "a field of another type": {"generation": {"speculative": {"num_steps": "3"}}},
    "a number": {"generation": {"speculative": 7}},
    "a list": {"generation": {"speculative": ["eagle"]}},
    "a tree without parents": {"generation": {"speculative": {"method": "prompt_lookup", "tree": [[0, 0]]}}},
    "a file of the server": {"generation": {"speculative": {"adaptive": "/dev/zero"}}},
    "a cache of the server": {"generation": {"speculative": {"max_cache_length": 10**9}}},
    "a mode that cannot be kept": {"generation": {"num_beams": 4}},
    "many answers": {"generation": {"num_return_sequences": 1000, "do_sample": True}},
    "no JSON": {"generation_config": "{"},
    "no object": {"generation_config": "[]"},
    "a config that is no string": {"generation_config": 7},
    "no tokens": {"max_tokens": 0},
    "fewer": {"max_tokens": -1},
    "length of text": {"max_tokens": "x"},
    "temperature of text": {"temperature": "hot"},
    "no list of messages": {"messages": 7},
    "no role": {"messages": [{}]},
    "content of a number": {"messages": [{"role": "user", "content": 7}]},
    "half a character": {"messages": [{"role": "user", "content": "\ud800"}]},
    "bias of a foreign token": {"logit_bias": {"500": 1.0}},
    "stop of a number": {"stop": 7},
    "seed": {"seed": 2**70},
    "another model": {"model": "org/other"},
    "unknown parameter": {"speculative": "eagle"},
}


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_good_requests_behind_bad_ones(served: tuple[Server, str], stream: bool) -> None:
    """Every kind is answered with a status and a reason, or an error in the stream; a good one follows."""
    server, expected = served
    for name, changes in BAD.items():
        status, body = server.ask(stream=stream, **changes)
        if stream and status == 200:
            assert body.splitlines()[-2].startswith('data: {"error": "'), (name, body)
        else:
            assert status in (400, 422), (name, status, body)
            reply = json.loads(body)
            assert len(reply["detail"] if "detail" in reply else reply["error"]["message"]) > 8, name
        assert server.text(stream=not stream) == expected, name


def test_bad_and_good_requests_at_once(served: tuple[Server, str]) -> None:
    server, expected = served
    with ThreadPoolExecutor(10) as pool:
        bad = [pool.submit(server.ask, **BAD[name]) for name in ("unknown method", "unknown field")]
        good = [pool.submit(server.text, number % 2 == 0) for number in range(6)]
        assert {future.result()[0] for future in bad} == {400}
        assert {future.result() for future in good} == {expected}


def test_no_answer_is_longer_than_the_limit() -> None:
    server = script("serve", EXAMPLES).SpeculativeServer
    limited = server.limited(SimpleNamespace(max_new_tokens=100), GenerationConfig)
    asked = [{"max_new_tokens": 10**9}, {"max_length": 10**9}, {}, {"max_new_tokens": 7}]
    assert [limited(**fields).max_new_tokens for fields in asked] == [100, 100, 100, 7]


@pytest.mark.slow
def test_a_gguf_file_stays_packed() -> None:
    """In the packaged file only the embedding is of a kind that can."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the packaged model is not installed")
    [file] = Path(spec.submodule_search_locations[0]).rglob("*.gguf")
    load = script("serve", EXAMPLES).packed_loader(lambda *given, **named: (given, named))
    model = load(None, f"{file.parent}@main", gguf_file=file.name)
    model_of_chat, tokenizer = script("chat", EXAMPLES).load(str(file), None)
    rounded = {"packed": [PACKED + 2 * list(BLOCKS).index("Q8_0") + 1]}
    assert packed_forms(model) == packed_forms(model_of_chat) == rounded
    assert tokenizer.decode(tokenizer("Hello there.").input_ids) == "Hello there."
    assert load(None, "org/model@main", tqdm_class=None) == ((None, "org/model@main"), {"tqdm_class": None})


def test_clients_that_leave_a_stream(served: tuple[Server, str]) -> None:
    """In the middle, and while they queue."""
    server, expected = served
    long = {"max_tokens": LONGEST, "generation": {"min_new_tokens": LONGEST}}
    begin = time.perf_counter()
    streaming = server.open(stream=True, **long)
    assert streaming.getresponse().read(2000)
    queued = server.open(stream=True, **long)
    time.sleep(0.3)
    for connection in (queued, streaming):
        connection.close()
    assert server.text() == expected
    assert time.perf_counter() - begin < 15


def test_a_client_finds_the_name_of_the_model(served: tuple[Server, str]) -> None:
    """The server has no Hub cache, which transformers would list."""
    server, _ = served
    connection = http.client.HTTPConnection("localhost", server.port, timeout=30)
    connection.request("GET", "/v1/models")
    response = connection.getresponse()
    listed = json.loads(response.read())
    connection.close()
    assert response.status == 200
    assert [(model["id"], model["object"]) for model in listed["data"]] == [(server.model, "model")]


def test_an_openai_client_reads_the_message(served: tuple[Server, str]) -> None:
    import openai

    server, _ = served
    with openai.OpenAI(base_url=f"http://localhost:{server.port}/v1", api_key="none", max_retries=0) as client:
        options: dict[str, Any] = {
            "model": server.model, "messages": [{"role": "user", "content": ASKED}],
            "extra_body": {"generation_config": json.dumps({"speculative": "nonsense"})},
        }  # fmt: skip
        with pytest.raises(openai.BadRequestError, match="Unknown method or drafter 'nonsense'"):
            client.chat.completions.create(**options)
        with pytest.raises(openai.APIError, match="An error occurred during streaming"):  # the event has the reason
            list(client.chat.completions.create(**options, stream=True))
