"""The command line on a tiny saved model: exit codes, one-line errors, JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import zoo
from hf_specdec import EagleConfig, EagleHead, cli


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama with a word-level tokenizer, and an untrained head beside it."""
    folder = tmp_path_factory.mktemp("model")
    model = zoo.build("llama")
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(zoo.VOCAB_SIZE)}, unk_token="w1"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", unk_token="w1").save_pretrained(folder)
    EagleHead(EagleConfig.for_target(model.config)).save_pretrained(folder / "head")
    return folder


def run(monkeypatch: pytest.MonkeyPatch, *arguments: Any) -> int:
    monkeypatch.setattr(sys, "argv", ["hf-specdec", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def test_demo_shows_speeds_tau_and_equality(
    model_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run(monkeypatch, "demo", "--model", model_path, "--drafter", model_path / "head", "--prompt", "w5 w6 w7",
               "--max-new-tokens", 20)  # fmt: skip
    text = capsys.readouterr().out
    assert code == 0
    for part in ("plain generate()", "speculative='eagle'", "tau", "ids equal: yes", "where the tree won"):
        assert part in text


def test_demo_json(model_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code = run(monkeypatch, "demo", "--model", model_path, "--prompt", "w5 w6 w7", "--json", "--max-new-tokens", 12)
    result = json.loads(capsys.readouterr().out)
    assert code == 0
    assert result["ids_equal"]
    assert result["speculation"]["method"] == "prompt_lookup"
    assert result["speculation"]["num_generated_tokens"] == 12


def test_generate_is_the_same_with_and_without_speculation(
    model_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for sampling in ([], ["--temperature", "0.8", "--top-p", "0.9", "--seed", "3"]):
        answers = []
        for method in ("plain", "prompt_lookup", "ngram"):
            assert run(monkeypatch, "generate", "w5 w6 w7", "--model", model_path, "--method", method, "--json",
                       "--max-new-tokens", 20, *sampling) == 0  # fmt: skip
            answers.append(json.loads(capsys.readouterr().out)["token_ids"])
        assert answers[0] == answers[1] == answers[2]


def test_generate_streams(
    model_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "generate", "w5 w6", "--model", model_path, "--max-new-tokens", 6) == 0
    streams = capsys.readouterr()
    assert len(streams.out.split()) == 6
    assert "tau" in streams.err


def test_bench_measures_and_writes(
    model_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(
        json.dumps({"question_id": i, "category": c, "turns": ["w5 w6 w7 w5 w6"]})
        for i, c in enumerate(["writing", "qa", "coding"])
    ))  # fmt: skip
    code = run(monkeypatch, "bench", "--model", model_path, "--prompts", prompts, "--dtype", "float32",
               "--methods", "transformers_prompt_lookup,prompt_lookup", "--max-new-tokens", 10, "--rounds", 2,
               "--json", tmp_path / "out.json")  # fmt: skip
    assert code == 0
    assert "mt_bench" in capsys.readouterr().out
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["environment"]["dtype"] == "float32"
    assert len(document["measurements"]) == 9
    assert all(row["ids_equal"] and len(row["seconds"]) == 2 for row in document["measurements"])
    overall = {row["method"]: row for row in document["summary"] if row["category"] == "all"}
    assert overall["plain"]["speed_up"] == 1.0
    assert overall["prompt_lookup"]["ids_equal"] == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "hello", "--model", "/nowhere"], "cannot be loaded"),
        (["generate", "w5", "--model", "MODEL", "--method", "eagel"], "no method or drafter"),
        (["generate", "w5", "--model", "MODEL", "--method", "eagle"], "needs a head"),
        (["generate", "w5", "--model", "MODEL", "--drafter", "/nowhere"], "no local directory"),
        (["generate", " ", "--model", "MODEL"], "prompt is empty"),
        (["generate", "w5", "--model", "MODEL", "--max-new-tokens", "0"], "max-new-tokens"),
        (["generate", "w5", "--dtype", "int4"], "dtype"),
        (["bench", "--model", "MODEL", "--prompts", "/nowhere.jsonl"], "cannot be read"),
        (["inspect", "/nowhere"], "no local directory"),
        (["inspect", "MODEL"], "no head in a known layout"),
        (["convert", "HEAD", "OUT", "--format", "medusa"], "is for MedusaHeads"),
        (["convert", "HEAD", "OUT", "--format", "gguf"], "format"),
        (["nonsense"], "nonsense"),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_code_2(
    model_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str],
    message: str,
) -> None:  # fmt: skip
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    places = {"MODEL": str(model_path), "HEAD": str(model_path / "head"), "OUT": str(model_path / "out")}
    code = run(monkeypatch, *[places.get(a, a) for a in arguments])
    streams = capsys.readouterr()
    assert code == 2
    assert message in streams.err
    assert len(streams.err.strip().splitlines()) == 1
    assert "Traceback" not in streams.err


def test_inspect_and_convert(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "convert", model_path / "head", tmp_path, "--format", "eagle", "--dtype", "float16",
               "--target", "org/target") == 0  # fmt: skip
    assert "hf-specdec -> eagle" in capsys.readouterr().err
    assert run(monkeypatch, "inspect", tmp_path, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["layout"], report["method"], report["dtype"]) == ("eagle", "eagle", "float16")
    assert (report["target"], report["layers_read"], report["draft_vocabulary"]) == ("org/target", [-1], None)
    assert report["files"] == {"model.safetensors": (tmp_path / "model.safetensors").stat().st_size}
    assert run(monkeypatch, "inspect", tmp_path) == 0
    shown = capsys.readouterr().out
    for words in ("EAGLE (versions 1 and 2)", "org/target", "float16", "behind the final norm"):
        assert words in shown


@pytest.mark.parametrize("command", ["demo", "generate", "bench"])
def test_every_command_has_help(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, command, "--help") == 0
    assert "--model" in capsys.readouterr().out
