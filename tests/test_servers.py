"""Distilling from a server: a small one of our own speaks OpenAI's protocol for a tiny model."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from command_line import run
from hf_specdec import InvalidConfigError
from hf_specdec.training import DistillConfig, ServerTeacher, distill, invented_prompts
from trained import PROMPTS, rows_of
from zoo import END, chat_tokenizer

pytest.importorskip("openai")
CONFIG = DistillConfig(max_new_tokens=40, batch_size=4, batches_per_part=1, temperatures=(0.0,))


class Refusal(Exception):
    """The server answers 400."""


class Outage(Exception):
    """The server answers 503."""


class Served:
    """What the server does; a test bends one of these.

    Attributes:
        names: Of its models.
        tells_ids: Whether it tells token ids, as vLLM does on request.
        adds: Tokens that it reads besides those that were sent.
        miscounts: Answers of which every n-th is counted one token too long.
        counts_end: Whether the end token counts as a part of the answer.
    """

    def __init__(self, model: Any) -> None:
        self.model, self.names, self.requests = model, ["tiny"], []
        self.tells_ids, self.adds, self.miscounts, self.counts_end = False, 0, 0, True
        self._lock, self.tokenizer = threading.Lock(), chat_tokenizer()

    def complete(self, request: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            self.requests.append(request)
            torch.manual_seed(request.get("seed") or 0)
            ids = torch.tensor([request["prompt"]])
            how = {"do_sample": True, "temperature": request["temperature"], "top_k": 0}
            output = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=request["max_tokens"], pad_token_id=0,
                **(how if request["temperature"] else {"do_sample": False}),
            )  # fmt: skip
            number = len(self.requests)
        answer = output[0, ids.shape[1] :].tolist()
        ended = answer[-1] == END
        told = answer[: len(answer) - ended]
        counted = len(told) + (ended and self.counts_end) + bool(self.miscounts and number % self.miscounts == 0)
        choice = {"index": 0, "text": "".join(f" w{token:02}" for token in told), "logprobs": None,
                  "finish_reason": "stop" if ended else "length"}  # fmt: skip
        return {
            "id": "1", "object": "text_completion", "created": 0, "model": "tiny",
            "choices": [{**choice, **({"token_ids": answer} if self.tells_ids else {})}],
            "usage": {"prompt_tokens": ids.shape[1] + self.adds, "completion_tokens": counted,
                      "total_tokens": ids.shape[1] + self.adds + counted},
        }  # fmt: skip


@contextmanager
def serving(served: Served) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            models = [{"id": name, "object": "model", "created": 0, "owned_by": "us"} for name in served.names]
            self._reply({"object": "list", "data": models})

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            try:
                self._reply(served.complete(request))
            except Refusal:
                self._reply({"error": {"message": "too long", "type": "BadRequestError"}}, 400)
            except Outage:
                self._reply({"error": {"message": "loading", "type": "ServiceUnavailable"}}, 503)

        def _reply(self, body: dict[str, Any], status: int = 200) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def talker(talker: Any) -> Any:
    """One that ends some greedy answers, too."""
    with torch.no_grad():
        talker.lm_head.weight[END] = talker.lm_head.weight.mean(0) + 0.5
    return talker


@pytest.mark.slow
@pytest.mark.parametrize("tells_ids", [False, True])
@pytest.mark.parametrize("counts_end", [False, True])
def test_a_servers_answers_are_the_models(talker: Any, tmp_path: Path, tells_ids: bool, counts_end: bool) -> None:
    """The same rows as from the model itself, whatever the server tells and counts."""
    tokenizer, served = chat_tokenizer(), Served(talker)
    served.tells_ids, served.counts_end = tells_ids, counts_end or tells_ids
    distill(talker, tokenizer, PROMPTS, tmp_path / "here", CONFIG, progress=False)
    with serving(served) as url:
        teacher = ServerTeacher(url, tokenizer, num_requests=3)
        distill(teacher, tokenizer, PROMPTS, tmp_path / "there", CONFIG, progress=False)
    assert teacher.num_lost == 0
    expected = [{**row, "model": "tiny"} for row in rows_of(tmp_path / "here")]
    assert any(row["finish_reason"] == "stop" for row in expected)
    assert rows_of(tmp_path / "there") == expected
    sent = {key: served.requests[-1][key] for key in ("temperature", "top_p", "top_k", "max_tokens", "model")}
    assert sent == {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "max_tokens": 40, "model": "tiny"}


@pytest.mark.slow
def test_turns_are_invented_and_an_interrupted_run_goes_on(talker: Any, tmp_path: Path) -> None:
    tokenizer, served = chat_tokenizer(), Served(talker)
    config = DistillConfig(max_new_tokens=60, num_turns=2, batch_size=2, batches_per_part=1, temperatures=(0.9, 0.0))
    given = [*PROMPTS, *invented_prompts(3)]
    with serving(served) as url:
        teacher = ServerTeacher(url, tokenizer)
        distill(teacher, tokenizer, given, tmp_path / "out", config, progress=False)
        rows = rows_of(tmp_path / "out")
        assert {len(row["messages"]) for row in rows} >= {2, 4}
        sampled = [request for request in served.requests if request["temperature"]]
        assert len({request["seed"] for request in sampled}) == len(sampled)
        assert not any(request["seed"] for request in served.requests if not request["temperature"])
        unseeded = ServerTeacher(url, tokenizer, seeded=False)
        unseeded.generate([[5, 6]], 0.9, 4, "label")
        assert served.requests.pop()["seed"] is None
        (tmp_path / "out" / "data" / "part-00001.parquet").unlink()
        before = len(served.requests)
        distill(teacher, tokenizer, given, tmp_path / "out", config, progress=False)
        assert rows_of(tmp_path / "out") == rows
        assert 1 < len(served.requests) - before < before


@pytest.mark.slow
def test_parts_of_which_nothing_is_left(talker: Any, tmp_path: Path) -> None:
    """They are not asked for again, and the dataset can be read."""
    served, tokenizer = Served(talker), chat_tokenizer()
    with serving(served) as url:
        teacher = ServerTeacher(url, tokenizer, num_requests=1)
        served.miscounts = 1
        lost: list[int] = []

        def complete(request: dict[str, Any], original: Any = served.complete) -> dict[str, Any]:
            served.miscounts = int(0 < len(served.requests) < 5)  # the first part's answers, behind the check
            return original(request)

        served.complete = complete  # type: ignore[method-assign]
        distill(teacher, tokenizer, PROMPTS, tmp_path / "out", CONFIG, progress=False)
        lost.append(teacher.num_lost)
        asked = len(served.requests)
        distill(teacher, tokenizer, PROMPTS, tmp_path / "out", CONFIG, progress=False)
    assert teacher.num_lost == lost[0] == 4
    assert asked == 1 + 4 + 1 + len(PROMPTS) - 4  # a part without one answer: does the server still answer?
    assert len(served.requests) == asked + 1
    assert len(rows_of(tmp_path / "out")) == len(PROMPTS) - 4


@pytest.mark.slow
def test_a_server_that_goes_away_ends_the_run_and_loses_nothing(talker: Any, tmp_path: Path) -> None:
    """What was not answered is answered by the next run, and the dataset is that of a run without the outage."""
    served, tokenizer = Served(talker), chat_tokenizer()
    original, down = served.complete, [6]  # the check and the first part are answered, and one more

    def complete(request: dict[str, Any]) -> dict[str, Any]:
        if len(served.requests) >= down[0]:
            raise Outage
        return original(request)

    served.complete = complete  # type: ignore[method-assign]
    with serving(served) as url:
        teacher = ServerTeacher(url, tokenizer, num_requests=4)
        with pytest.raises(InvalidConfigError, match=r"503: loading.* It answered before.*Start again") as refused:
            distill(teacher, tokenizer, PROMPTS, tmp_path / "out", CONFIG, progress=False)
        assert url in str(refused.value)
        assert len(rows_of(tmp_path / "out")) == CONFIG.batch_size
        down[0] = 10**6
        distill(ServerTeacher(url, tokenizer), tokenizer, PROMPTS, tmp_path / "out", CONFIG, progress=False)
        distill(ServerTeacher(url, tokenizer), tokenizer, PROMPTS, tmp_path / "whole", CONFIG, progress=False)
    assert rows_of(tmp_path / "out") == rows_of(tmp_path / "whole")


@pytest.mark.slow
def test_what_a_server_cannot_do_is_said_before_the_work(talker: Any, tmp_path: Path) -> None:
    served, tokenizer = Served(talker), chat_tokenizer()
    with serving(served) as url:
        teacher = ServerTeacher(url, tokenizer, "tiny")
        served.adds = 1
        with pytest.raises(InvalidConfigError, match="counts 6 prompt tokens, but 5 were sent"):
            distill(teacher, tokenizer, PROMPTS, tmp_path / "out", CONFIG)
        assert len(served.requests) == 1
        assert not (tmp_path / "out").exists()
        served.adds = 0
        unwritable = [3, 1, 4]  # the unknown token has no text of its own
        with pytest.raises(InvalidConfigError, match="cannot be recovered from its text"):
            ServerTeacher(url, Forgetful(tokenizer)).check(unwritable)
        served.tells_ids = True
        ServerTeacher(url, Forgetful(tokenizer)).check(unwritable)
        with pytest.raises(InvalidConfigError, match="has tiny, and there is no 'other'"):
            ServerTeacher(url, tokenizer, "other")
        served.names = ["tiny", "large"]
        with pytest.raises(InvalidConfigError, match="has tiny, large, and no model was named"):
            ServerTeacher(url, tokenizer)
        with pytest.raises(InvalidConfigError, match="num_requests"):
            ServerTeacher(url, tokenizer, num_requests=0)


class Forgetful:
    """A tokenizer whose texts do not say where their tokens end."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, text: str, **options: Any) -> Any:
        return self._tokenizer(text[1:], **options)


@pytest.mark.slow
def test_how_an_answer_ends(talker: Any) -> None:
    """Told ids are believed; behind a text stands the end that is told, or the only one that there is."""
    tokenizer, served = chat_tokenizer(), Served(talker)
    ended: dict[str, Any] = {"index": 0, "text": " w05 w06", "logprobs": None, "finish_reason": "stop"}
    made: dict[str, Any] = {}

    def complete(request: dict[str, Any]) -> dict[str, Any]:
        served.requests.append(request)
        usage = {"prompt_tokens": 2, "completion_tokens": made["counted"], "total_tokens": 9}
        return {"id": "1", "object": "text_completion", "created": 0, "model": "x", "choices": [made["choice"]],
                "usage": usage}  # fmt: skip

    served.complete = complete  # type: ignore[method-assign]
    served.names = ["/home/somebody/models/tiny"]
    with serving(served) as url:
        for choice, counted, end_ids, wanted in (
            ({**ended, "token_ids": [5, 6, 77]}, 3, None, [5, 6, 77]),  # an end that the tokenizer does not name
            (ended, 3, None, [5, 6, END]),
            (ended, 2, None, [5, 6, END]),
            (ended, 4, None, None),
            (ended, 3, [77, 78], None),  # which one?
            ({**ended, "matched_stop": 78}, 3, [77, 78], [5, 6, 78]),
            ({**ended, "stop_reason": 77}, 2, [77, 78], [5, 6, 77]),
            ({**ended, "finish_reason": "length"}, 2, None, [5, 6]),
            ({**ended, "finish_reason": "length"}, 3, None, None),
        ):
            made.update(choice=choice, counted=counted)
            teacher = ServerTeacher(url, tokenizer, end_ids=end_ids)
            (answer,) = teacher.generate([[5, 6]], 0.0, 4, "label")
            assert answer == wanted, (choice, counted)
            if answer is not None:
                assert teacher.ended(answer) == (choice["finish_reason"] == "stop")
        assert teacher.name == "tiny"
        assert served.requests[-1]["model"] == "/home/somebody/models/tiny"


@pytest.mark.slow
def test_the_command(
    talker: Any, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights are never loaded where a server has them; a wrong address is one line."""
    monkeypatch.setattr("hf_specdec.cli.training_run.load_target", None)
    command = ["distill", "--model", saved, "--invent", 4, "--max-new-tokens", 8, "--temperature", 0, "--json"]
    with serving(Served(talker)) as url:
        assert run(monkeypatch, *command, "--output", tmp_path / "out", "--server", url) == 0
        result = json.loads(capsys.readouterr().out)
        assert result["conversations"] > 0
        assert result["dropped"] == {}
    assert {row["model"] for row in rows_of(tmp_path / "out")} == {"tiny"}
    assert run(monkeypatch, *command, "--output", tmp_path / "two", "--server", "http://127.0.0.1:9/v1") == 2
    assert "does not answer" in capsys.readouterr().err
    assert run(monkeypatch, *command, "--output", tmp_path / "two", "--server-model", "tiny") == 2
    assert "Give --server URL" in capsys.readouterr().err
    assert not (tmp_path / "two").exists()
