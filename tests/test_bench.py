"""Measuring: methods, times, what is told of them; the questions of Spec-Bench."""

from __future__ import annotations

import copy
import functools
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from rich.console import Console
from transformers import CompileConfig

import zoo
from benchmark_script import script
from command_line import run
from hf_specdec import SpeculativeGenerationMixin, bench
from hf_specdec.bench import machine, methods, timing
from hf_specdec.bench.questions import read_questions
from hf_specdec.cli import bench as command
from hf_specdec.errors import InvalidConfigError
from hf_specdec.generation.loading import encode_chat
from hf_specdec.generation.state import state_of

Patch = pytest.MonkeyPatch
Captured = pytest.CaptureFixture[str]
QUESTIONS = [
    bench.Question("1", "qa", ("w05 w06 w07 w05 w06", "w08 w09")),
    bench.Question("2", "rag", ("w10 w11 w12 w10 w11", "w13")),
]


@pytest.fixture
def places(tmp_path: Path) -> dict[str, Path]:
    """A saved tiny model, another with fewer words, and two questions of two turns."""
    found = {name: tmp_path / name for name in ("model", "other", "prompts", "out.json", "plot.png")}
    zoo.build("llama").save_pretrained(found["model"])
    zoo.chat_tokenizer().save_pretrained(found["model"])
    found["other"].mkdir()
    for path in found["model"].iterdir():
        text = path.read_bytes()
        (found["other"] / path.name).write_bytes(text.replace(b"w77", b"v77") if path.suffix == ".json" else text)
    found["prompts"].write_text("\n".join(
        json.dumps({"question_id": q.question_id, "category": q.category, "turns": q.turns}) for q in QUESTIONS
    ))  # fmt: skip
    return found


def made(method: str = "plain", question: str = "1", **fields: Any) -> bench.Measurement:
    """A measurement of 11 tokens in 2 s, the first one after 1 s."""
    values: dict[str, Any] = {
        "question_id": question, "category": "qa", "method": method, "num_tokens": 11, "seconds": [2.0],
        "ids_equal": True, "first_difference": None, "top_two_gap": None, "tau": 1.0, "first_token_seconds": [1.0],
    }  # fmt: skip
    return bench.Measurement(**{**values, **fields})


# ------------------------------------------------------------------------------------------------- transformers' own


@pytest.mark.slow
def test_an_assistant_is_measured_by_both_who_draft_with_it(places: dict[str, Path], monkeypatch: Patch) -> None:
    assert run(monkeypatch, "bench", "--model", places["model"], "--prompts", places["prompts"],
               "--assistant", places["model"],
               "--methods", "transformers_assisted,draft_model", "--max-new-tokens", 12, "--json",
               places["out.json"]) == 0  # fmt: skip
    rows = {
        (row["question_id"], row["method"]): row for row in json.loads(places["out.json"].read_text())["measurements"]
    }
    assert len(rows) == 6
    assert all(row["ids_equal"] and row["num_tokens"] == 12 for row in rows.values())
    assert rows["1", "draft_model"]["tau"] > 3  # its own model as the assistant: always right


@pytest.mark.slow
def test_an_assistant_with_another_tokenizer_drafts_over_shared_tokens(
    places: dict[str, Path], monkeypatch: Patch
) -> None:
    assert run(monkeypatch, "bench", "--model", places["model"], "--prompts", places["prompts"],
               "--assistant", places["other"],
               "--methods", "draft_model", "--max-new-tokens", 12, "--json", places["out.json"]) == 0  # fmt: skip
    rows = [row for row in json.loads(places["out.json"].read_text())["measurements"] if row["method"] != "plain"]
    assert len(rows) == 2
    assert all(row["ids_equal"] and row["tau"] > 2 for row in rows)


def test_the_cost_of_a_forward_is_public(llama: Any) -> None:
    found = bench.verify_seconds(llama, [1, 8], context=16)
    assert list(found) == [1, 8]
    assert min(found.values()) > 0
    wrong: list[tuple[list[int], dict[str, int]]] = [([], {}), ([0], {}), ([1], {"context": 0}), ([1], {"rows": 0})]
    for sizes, options in wrong:
        with pytest.raises(InvalidConfigError, match="must be"):
            bench.verify_seconds(llama, sizes, **options)


MISTAKES = """
--methods transformers_assisted | needs an assistant model, and none is given. Give a smaller one
--methods prompt_lookup --assistant model | No method uses the assistant
--methods transformers_assisted --assistant other | differs from the model's
--methods transformers_assisted --assistant /nowhere | there is no such directory. Give
--plot there.png | there.png already exists. Give another name or --force
--plot plot.txt | has an unknown suffix
--plot /nowhere/plot.png | does not exist
--prompts system.jsonl | system.jsonl, line 2 has a system message
"""


@pytest.mark.parametrize("mistake", MISTAKES.strip().splitlines())
def test_what_cannot_be_measured_is_refused_before_a_model_is_loaded(
    mistake: str, places: dict[str, Path], tmp_path: Path, monkeypatch: Patch, capsys: Captured
) -> None:
    monkeypatch.setattr("hf_specdec.generation.loading.load_model", None)
    monkeypatch.chdir(tmp_path)
    Path("there.png").touch()
    Path("system.jsonl").write_text('{"prompt": "w05"}\n{"prompt": "w05", "system": "w06"}')
    arguments, message = mistake.split(" | ")
    given = ["--model", places["model"], "--prompts", places["prompts"], *arguments.split()]
    assert run(monkeypatch, "bench", *given) == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_force_overwrites_the_measurements_of_an_earlier_run(
    places: dict[str, Path], monkeypatch: Patch, capsys: Captured
) -> None:
    places["out.json"].write_text("old")
    given = ("--model", places["model"], "--prompts", places["prompts"], "--methods", "prompt_lookup+none,auto",
               "--max-new-tokens", 4, "--limit", 1, "--json", places["out.json"])  # fmt: skip
    assert run(monkeypatch, "bench", *given) == 2
    assert places["out.json"].read_text() == "old"
    capsys.readouterr()
    assert run(monkeypatch, "bench", *given, "--force") == 0
    used = {row["method"]: row["forwards"] for row in json.loads(places["out.json"].read_text())["measurements"]}
    assert (used["plain"], used["prompt_lookup+none"]) == ("", "eager")
    told = "With CPU kernels: auto. Their speed-ups include" in " ".join(capsys.readouterr().out.split())
    assert told == (used["auto"] == "kernels")


def test_notes_name_compiled_forwards_and_ids_that_differ_in_half_precision() -> None:
    rows = [made("plain", "1"), made("auto", "1", forwards="kernels"), made("eagle", "1", forwards="cuda_graph"),
            made("auto+none", "1", forwards="eager")]  # fmt: skip
    equal, differing = ({"ids_equal": number, "questions": 1} for number in (1, 0))
    first, second, third = command.notes_of([equal, differing], rows, "bfloat16")
    assert first.startswith("With CPU kernels: auto. ")
    assert second.startswith("With captured graphs: eagle. ")
    assert third.endswith("--dtype float32 compares exactly.")
    assert command.notes_of([equal, differing], rows[:1], "float32") == []
    assert command.notes_of([equal], rows[:1], "bfloat16") == []


def eager(model: Any) -> CompileConfig:
    """Traced by torch's compiler, run by the usual kernels: quick to make."""
    config = CompileConfig(backend="eager", mode=None)
    config._compile_all_devices = True
    return config


@pytest.mark.slow
def test_the_compiled_baseline_is_compiled_before_it_is_timed(monkeypatch: Patch) -> None:
    monkeypatch.setattr(methods, "_compile_config", eager)
    model = SpeculativeGenerationMixin.attach(copy.deepcopy(zoo.build("llama")))
    graphs = methods.compiled_graphs()
    rows = list(bench.measure(model, zoo.chat_tokenizer(), QUESTIONS, [methods.COMPILED], max_new_tokens=10, rounds=2,
                              all_turns=True))  # fmt: skip
    compiled = [row for row in rows if row.method == methods.COMPILED]
    assert methods.compiled_graphs() > graphs
    assert model._compiled_call is not None
    if not torch.__version__.startswith("2.9."):  # compiles a little more in the rounds, as its rows say
        assert [row.compiled_in_rounds for row in compiled] == [0, 0]
    assert all(row.ids_equal for row in compiled)
    assert compiled[0].warm_up_seconds > max(compiled[0].seconds)


def test_a_forward_that_transformers_does_not_compile_is_refused(monkeypatch: Patch) -> None:
    monkeypatch.setattr(methods, "_compile_config", eager)
    model = SpeculativeGenerationMixin.attach(copy.deepcopy(zoo.build("llama")))
    model.hf_device_map = {"model": "cpu", "lm_head": "disk"}
    with pytest.raises(InvalidConfigError, match="does not compile the forward of this LlamaForCausalLM"):
        list(bench.measure(model, zoo.chat_tokenizer(), QUESTIONS, [methods.COMPILED], max_new_tokens=4))


@pytest.mark.slow
def test_the_compiled_baseline_with_the_compiler_of_a_measurement() -> None:
    model = SpeculativeGenerationMixin.attach(zoo.shallow("llama", 1))
    rows = list(bench.measure(model, zoo.chat_tokenizer(), QUESTIONS, [methods.COMPILED], max_new_tokens=10))
    assert all(row.ids_equal and not row.compiled_in_rounds for row in rows)


# ------------------------------------------------------------------------------------------------- conversations


@pytest.mark.slow
@pytest.mark.parametrize("template", [zoo.TEMPLATE, None])
def test_every_method_goes_on_with_its_own_answers(llama: Any, template: str | None) -> None:
    tokenizer, question = zoo.chat_tokenizer(template), QUESTIONS[0]
    rows = list(bench.measure(llama, tokenizer, [question], ["prompt_lookup"], max_new_tokens=8, all_turns=True))
    caller = timing._Caller(llama, tokenizer, 8, lambda: None)
    caller.options["plain"] = {}
    first = caller.answer(caller.encode(question.turns[:1]), "plain").ids
    texts = [question.turns[0], tokenizer.decode(first, skip_special_tokens=True), question.turns[1]]
    inputs = encode_chat(tokenizer, texts, llama.device)
    if template:
        assert tokenizer.decode(inputs["input_ids"][0]).startswith("w90 w05 w06 w07 w05 w06 w92 w91 ")
    seen = timing._Round()
    for turn in question.turns:
        caller.take_turn(seen, turn, "plain")
    assert torch.equal(seen.prompts[1]["input_ids"], inputs["input_ids"])
    assert [(row.method, row.num_tokens, row.turns, row.ids_equal) for row in rows] == [
        ("plain", 16, 2, True),
        ("prompt_lookup", 16, 2, True),
    ]
    assert all(len(row.seconds) == 1 and row.stages for row in rows[1:])


@pytest.mark.slow
def test_no_method_learns_from_the_answers_of_another_one_or_of_another_round(llama: Any) -> None:
    """Tau is that of a model which saw these questions only, by this method; and the user's drafters learn nothing."""
    model = SpeculativeGenerationMixin.attach(copy.deepcopy(llama))
    tokenizer, settings = zoo.chat_tokenizer(), {"again": "token_recycling"}
    methods = ["token_recycling", "again"]
    rows = list(bench.measure(
        model, tokenizer, QUESTIONS, methods, max_new_tokens=24, rounds=2, settings=settings
    ))  # fmt: skip
    taus = {(row.method, row.question_id): row.tau for row in rows}
    fresh = SpeculativeGenerationMixin.attach(copy.deepcopy(llama))
    alone = []
    for question in (*QUESTIONS, QUESTIONS[0]):
        inputs = encode_chat(tokenizer, question.turns[:1], model.device)
        fresh.generate(**inputs, max_new_tokens=24, do_sample=False, speculative="token_recycling")
        alone.append(fresh.last_speculation.mean_accepted_length)
    for method in methods:
        assert [taus[method, question.question_id] for question in QUESTIONS] == alone[:2]
    assert alone[2] > alone[0]  # what a second round would have known
    drafter = state_of(model).made["token_recycling"]
    assert not bool((drafter.table.ids[0] != drafter.table.ids[0][0, 0]).any())  # nothing was learned for good


def test_the_first_difference_is_told_in_its_turn() -> None:
    def answers(*turns: list[int]) -> Any:
        return SimpleNamespace(answers=[SimpleNamespace(ids=torch.tensor(ids)) for ids in turns])

    plain = answers([1, 2, 3], [4, 5, 6])
    assert timing._first_difference(plain, answers([1, 2, 3], [4, 5, 6])) is None
    assert timing._first_difference(plain, answers([1, 2, 3], [4, 9, 9])) == (1, 1)
    assert timing._first_difference(plain, answers([1, 2], [9])) == (0, 2)


# ------------------------------------------------------------------------------------------------- time


@pytest.mark.parametrize("method", ["plain", "prompt_lookup", "transformers_prompt_lookup"])
def test_the_first_token_is_timed_behind_the_prompts_forward(llama: Any, monkeypatch: Patch, method: str) -> None:
    forward = type(llama).forward
    forwards: list[int] = []

    @functools.wraps(forward)
    def slow(self: Any, *args: Any, **kwargs: Any) -> Any:
        forwards.append(1)
        time.sleep(0.05 if len(forwards) == 1 else 0.02)
        return forward(self, *args, **kwargs)

    caller = timing._Caller(llama, zoo.chat_tokenizer(), 6, lambda: None)
    caller.options[method] = methods.call_options(method, None, llama, 0)
    monkeypatch.setattr(type(llama), "forward", slow)
    caller.answer(caller.encode(["w05 w06"]), method)  # what is made for the first call
    forwards.clear()
    answer = caller.answer(caller.encode(["w05 w06"]), method)
    assert len(answer.ids) == 6
    assert 0.05 <= answer.first_token_seconds < 0.07 + 0.02
    assert answer.seconds >= answer.first_token_seconds + 0.02


def test_decoding_is_what_follows_the_first_token() -> None:
    row = made(seconds=[2.0, 3.0, 9.0], first_token_seconds=[1.0, 1.0, 1.0])
    assert row.tokens_per_second == pytest.approx(11 / 3)
    assert row.decode_tokens_per_second == pytest.approx(10 / 2)
    assert made(turns=2).time_to_first_token == 0.5
    assert made(num_tokens=1).decode_tokens_per_second is None
    assert made(first_token_seconds=[]).time_to_first_token is None


def test_others_cpu_time(tmp_path: Path, monkeypatch: Patch) -> None:
    stat, ticks, clock = tmp_path / "stat", os.sysconf("SC_CLK_TCK"), [100.0]
    monkeypatch.setattr(machine, "PROC_STAT", stat)
    monkeypatch.setattr(machine.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(machine.os, "times", lambda: (clock[0] - 100, 0.0, 0.0, 0.0, 0.0))

    def machine_at(seconds: float, user: float, idle: float, steal: float) -> None:
        clock[0] = 100 + seconds
        columns = [int(x * ticks) for x in (user, 0, 0, idle, 7, 0, 0, steal, 9)]
        stat.write_text(f"cpu  {' '.join(map(str, columns))}\ncpu0 1 2 3\n")

    machine_at(0, user=50, idle=1000, steal=0)
    others, workers = machine.OtherProcesses(), SimpleNamespace(cpu_times=lambda: (clock[0] - 100, 0.0, 0.0, 0.0))
    ours = machine.OtherProcesses([workers])  # type: ignore[list-item]
    machine_at(2, user=54.5, idle=1001, steal=0.5)  # 5 s of work in 2 s, 2 of them this process's
    assert others.cores() == pytest.approx(1.5)
    assert ours.cores() == pytest.approx(0.5)

    def ended() -> Any:
        raise psutil.NoSuchProcess(1)

    workers.cpu_times = ended
    assert ours.cores() is None
    stat.unlink()
    assert others.cores() is None
    assert machine.OtherProcesses().cores() is None


def test_a_disturbance_is_more_than_rounding() -> None:
    assert machine.is_disturbed(0.1, 1.0)
    assert not machine.is_disturbed(0.1, 0.2)
    assert not machine.is_disturbed(0.04, 100.0)
    assert not machine.is_disturbed(None, 1.0)
    quiet, busy = made(others_cores=[0.01]), made("eagle", seconds=[2.0, 2.0], others_cores=[0.02, 0.7])
    assert bench.warnings_of([quiet]) == []
    assert bench.warnings_of([quiet, busy]) == [
        "Other processes used more than 5% of a core during 1 of 3 timed calls (at most 0.70 cores): these "
        "measurements are unreliable."
    ]
    assert "(eagle)" in bench.warnings_of([quiet, made("eagle", compiled_in_rounds=1)])[0]


# ------------------------------------------------------------------------------------------------- what is told


def test_percentiles_by_hand() -> None:
    assert bench.percentile([4, 1, 2], 0.5) == 2
    assert bench.percentile([4, 1, 2], 0.75) == 3
    assert bench.percentile([7], 0.2) == 7


def test_the_summary_by_hand() -> None:
    rows = [made(question=str(i), seconds=[2.0]) for i in range(3)]
    rows += [made("eagle", str(i), seconds=[s], first_token_seconds=[f], tau=2.0)
             for i, (s, f) in enumerate([(2.0, 1.0), (1.0, 0.5), (0.5, 0.25)])]  # fmt: skip
    plain, eagle = bench.summarise(rows)[2:]
    assert (plain["category"], plain["tokens_per_second"], plain["speed_up"]) == ("all", 5.5, 1.0)
    assert (eagle["speed_up"], eagle["speed_up_p50"], eagle["speed_up_worst"]) == (2.0, 2.0, 1.0)
    assert (eagle["speed_up_p20"], eagle["speed_up_p80"]) == (pytest.approx(1.4), pytest.approx(3.2))
    assert (eagle["tokens_per_second_p50"], eagle["decode_tokens_per_second"]) == (11.0, 20.0)
    assert (eagle["decode_speed_up"], eagle["time_to_first_token"], eagle["tau"]) == (2.0, 0.5, 2.0)


@pytest.mark.parametrize(("columns", "shown"), [(120, 9), (80, 9), (60, 6), (20, 5)])
def test_the_table_cuts_no_word_and_no_number(columns: int, shown: int) -> None:
    """It has a heading per category in a narrow terminal, and fewer columns in a very narrow one."""
    names = ("plain", "transformers_prompt_lookup", "token_recycling+inductor")
    rows = [made(name, seconds=[0.01]) for name in names]
    console = Console(width=columns, file=io.StringIO(), force_terminal=False)
    table = command.table_of(bench.summarise(rows), "weights in bfloat16", console)
    lines = [[str(cell) for cell in column._cells] for column in table.columns]
    is_plain = columns < 120
    assert len(lines) == shown - is_plain
    assert ("category" in [column.header for column in table.columns]) != is_plain
    text = "".join(segment.text for segment in console.render(table, console.options.update(width=10_000)))
    assert "…" not in text
    if columns >= 60:
        assert max(len(line.rstrip()) for line in text.splitlines()) <= columns
    for name in names:
        assert re.search(rf"{re.escape(name)}\W", text)


def test_a_measurement_of_before_is_still_read() -> None:
    """What results/*.json hold: without the newer fields."""
    old = made().__class__("1", "qa", "plain", 10, [2.0], True, None, None, 1.0, {})
    assert bench.summarise([old])[0]["decode_tokens_per_second"] is None


@pytest.mark.slow
def test_every_figure_has_its_machine_beside_it(places: dict[str, Path], monkeypatch: Patch, capsys: Captured) -> None:
    places["plot.png"].write_text("an older one")
    assert run(monkeypatch, "bench", "--model", places["model"], "--prompts", places["prompts"],
               "--methods", "prompt_lookup",
               "--max-new-tokens", 6, "--rounds", 2, "--all-turns", "--json", places["out.json"], "--plot",
               places["plot.png"], "--force") == 0  # fmt: skip
    document = json.loads(places["out.json"].read_text())
    assert {"device", "threads", "torch", "transformers", "hf_specdec", "commit", "dtype"} <= set(
        document["environment"]
    )
    for row in document["measurements"]:
        assert (row["num_tokens"], row["turns"]) == (12, 2)
        assert len(row["first_token_seconds"]) == len(row["others_cores"]) == 2
        assert all(0 < first < whole for first, whole in zip(row["first_token_seconds"], row["seconds"], strict=True))
    assert places["plot.png"].read_bytes().startswith(b"\x89PNG")
    streams = capsys.readouterr()
    assert "p20-p80" in streams.out
    assert "warm-up, s: plain" in streams.err


def test_the_commit_is_that_of_a_checkout_or_none(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    assert machine.commit(tmp_path / "src") is None

    def git(*order: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", str(tmp_path), *who, *order], check=True, capture_output=True)

    git("init")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-m", "one")
    found = machine.commit(tmp_path / "src")
    assert found is not None
    assert len(found) == 40
    index = (tmp_path / ".git" / "index").read_bytes()
    os.utime(tmp_path / "file", (1, 1))
    assert machine.commit(tmp_path / "src") == found
    assert (tmp_path / ".git" / "index").read_bytes() == index  # git refreshes it otherwise, and locks it meanwhile
    (tmp_path / "file").write_text("2")
    assert machine.commit(tmp_path / "src") == f"{found}+changes"
    assert machine.commit(tmp_path) is None


def test_a_method_of_ours_is_asked_for_compiled(llama: Any) -> None:
    compiled = methods.call_options("eagle+inductor", None, None, 0)
    assert compiled == {"speculative": {"method": "eagle", "compile": "inductor"}}
    assert methods.call_options("eagle", None, None, 0) == {"speculative": "eagle"}
    with pytest.raises(InvalidConfigError, match=r"unknown suffix \+kernel\. Did you mean \+kernels\? Suffixes: "):
        methods.call_options("auto+kernel", None, SimpleNamespace(drafters={}), 0)
    with pytest.raises(InvalidConfigError, match="Unknown method or drafter 'prompt_lokup'"):
        next(bench.measure(llama, zoo.chat_tokenizer(), QUESTIONS, ["prompt_lokup"], max_new_tokens=4))


# ---------------------------------------------------------------------------------------------------------- spec bench


ROOT = Path(__file__).parents[1]
spec_bench: Any = script("spec_bench")


def test_the_development_half_has_the_questions_with_odd_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"question_id": number, "category": "qa", "turns": [f"Was ist {number} €?"]} for number in range(81, 87)]
    source, output = tmp_path / "question.jsonl", tmp_path / "half.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(spec_bench, "SHA256", hashlib.sha256(source.read_bytes()).hexdigest())
    spec_bench.main([str(source), str(output)])
    assert output.read_text() == "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows[::2])
    assert [question.turns for question in read_questions(output)] == [tuple(row["turns"]) for row in rows[::2]]


@pytest.mark.parametrize("content", [None, "404: Not Found"])
def test_another_file_is_refused(content: str | None, tmp_path: Path) -> None:
    source, output = tmp_path / "question.jsonl", tmp_path / "half.jsonl"
    if content is not None:
        source.write_text(content)
    with pytest.raises(SystemExit, match="download"):
        spec_bench.main([str(source), str(output)])
    assert not output.exists()


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_bench_without_questions_fails_with_one_sentence(tmp_path: Path) -> None:
    command = ["make", "-s", "-C", str(ROOT), "bench", f"PROMPTS={tmp_path}/none.jsonl", f"VENV={tmp_path}/venv"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert f"There is no file {tmp_path}/none.jsonl" in done.stderr
    assert "benchmarks/spec_bench.py" in done.stderr
    assert not list(tmp_path.iterdir())  # before any work
