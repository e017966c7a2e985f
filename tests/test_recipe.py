"""The recipe of the shipped heads, and heads found on the Hub."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from datasets import load_dataset

from benchmark_script import run_script, script
from hf_specdec.checkpoints import hub
from hf_specdec.checkpoints.hub import PublishedHead, find_heads
from hf_specdec.cli import heads as command
from hf_specdec.errors import CheckpointFormatError, InvalidConfigError
from hf_specdec.generation.loading import load_tokenizer
from hf_specdec.training import read_conversations, read_prompts

RECIPE = Path(__file__).parents[1] / "heads" / "recipe"
SHIPPED = RECIPE.parent / "data" / "answers.parquet"


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Twelve paragraphs of two English sources and one German."""
    rows = [
        {"source": source, "licence": "ours", "language": language,
         "text": f"{first} number {number} stands beside the river of this land. {second} people of the town see it."}
        for source, language, first, second in (
            ("guide", "en", "The old stone house", "Most"), ("novel", "en", "A yellow wooden boat", "Many"),
            ("buch", "de", "Das alte Haus am Ufer", "Viele der"))
        for number in range(12)
    ]  # fmt: skip
    path = tmp_path / "texts.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_programming_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_script("make_prompts", RECIPE, monkeypatch, tmp_path / "all.jsonl", "--kinds", "programs", "--scale", 0.1)
    rows = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    assert len({row["turns"][0] for row in rows}) == 120
    assert {row["source"] for row in rows} == {"coding"}
    answers = SHIPPED.with_name("qwen2.5-coder-0.5b-instruct.parquet")
    conversations = read_conversations(answers)
    assert sum(sum(one.loss_mask) for one in conversations) == 197_069


def test_prompts_of_every_kind_and_none_of_a_benchmark(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "more.jsonl").write_text(json.dumps({"source": "mine", "prompt": "How many legs has a table?"}))
    module = run_script("make_prompts", RECIPE, monkeypatch, tmp_path / "all.jsonl", "--texts", texts, "--scale", 0.2,
                    "--add", tmp_path / "more.jsonl")  # fmt: skip
    rows = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    kinds = {row["source"] for row in rows}
    origins = {"guide": "The old stone house", "novel": "A yellow wooden boat", "buch": "Das alte Haus am Ufer"}
    assert {kind.split("/")[0] for kind in kinds} == {
        "mine", "writing", "explaining", "comparing", "roleplay", "coding", "listing", "math", "question",
        "translation", "rewriting", "summary", "rag", "extraction"}  # fmt: skip
    for row in rows:  # a text's origin is in the source
        assert [name for name, words in origins.items() if words in row["turns"][0]] in (
            [], row["source"].split("/")[1:]), row  # fmt: skip
    assert {"summary/guide", "rag/novel", "translation/buch", "translation"} <= kinds
    said = [row["turns"][0] for row in rows]
    assert len(set(said)) == len(said)
    assert not any("{" in text for text in said)
    summaries = [text for text in said if text.startswith("Summarize: ")]
    assert {"stone" in text for text in summaries} == {True, False}  # of both books
    assert [prompt.turns[0] for prompt in read_prompts(tmp_path / "all.jsonl")] == said
    # a benchmark: one short question as it is, and eight words of a long prompt
    question, longer = next(text for text in said if len(module.words_of(text)) < 8), max(said, key=len)
    inside = " ".join(module.words_of(longer)[5:13])
    held_out = tmp_path / "benchmark.jsonl"
    held_out.write_text("\n".join(json.dumps({"turns": [text]}) for text in (question, f"Look: {inside}!")))
    run_script("make_prompts", RECIPE, monkeypatch, tmp_path / "less.jsonl", "--texts", texts, "--scale", 0.2,
           "--add", tmp_path / "more.jsonl", "--avoid", held_out)  # fmt: skip
    kept = [json.loads(line)["turns"][0] for line in (tmp_path / "less.jsonl").read_text().splitlines()]
    assert question not in kept
    assert longer not in kept
    assert set(kept) < set(said)
    assert f"{len(said) - len(kept)} left out because they overlap a benchmark" in capsys.readouterr().out


def test_conversations_that_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("--kinds", "conversations", "--turns", 2, "--scale", 0.1)
    run_script("make_prompts", RECIPE, monkeypatch, tmp_path / "two.jsonl", *options)
    rows = [json.loads(line) for line in (tmp_path / "two.jsonl").read_text().splitlines()]
    assert {len(row["turns"]) for row in rows} == {2}
    assert not any("{" in turn for row in rows for turn in row["turns"])


def test_answers_are_packed_once_and_without_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"source": "a", "temperature": 0.0, "prompt": "said", "prompt_ids": [5, 6], "response_ids": [7, 8, 9]},
        {"source": "b", "temperature": 0.7, "input_ids": [1, 2, 3], "loss_mask": [False, True, True], "messages": []},
        {"source": "b", "temperature": 1.0, "input_ids": [1, 2, 4], "loss_mask": [False, True, True]},
    ]  # fmt: skip
    (tmp_path / "one.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "two.jsonl").write_text(json.dumps(rows[0]))
    out = tmp_path / "packed" / "answers.parquet"
    run_script("pack_answers", RECIPE, monkeypatch, out, tmp_path / "one.jsonl", tmp_path / "two.jsonl")
    assert "| all |  | 2 | 5 | 8 |" in capsys.readouterr().out
    table = load_dataset("parquet", data_files=str(out), split="train")
    assert set(table.column_names) == {"source", "licence", "temperature", "input_ids", "loss_mask"}
    assert [talk.input_ids for talk in read_conversations(out)] == [(5, 6, 7, 8, 9), (1, 2, 3)]


def test_only_what_can_be_shipped_is_packed_to_be_shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = ["writing", "rag/answers", "gsm8k-train", "translation", "translation/debian-handbook",
               "summary/anarchism", "wiki-passage", "rag/other", "mine", "self-instruct-user"]  # fmt: skip
    rows = [
        {"source": source, "temperature": 0.0, "prompt_ids": [number, *[5] * long], "response_ids": [7]}
        for number, (source, long) in enumerate([*((source, 50) for source in sources), ("self-instruct-seed", 100)])
    ]
    (tmp_path / "all.jsonl").write_text("\n".join(map(json.dumps, rows)))
    module = run_script(
        "pack_answers", RECIPE, monkeypatch, tmp_path / "out.parquet", tmp_path / "all.jsonl", "--ship"
    )
    table = load_dataset("parquet", data_files=str(tmp_path / "out.parquet"), split="train")
    assert table["source"] == [*sources[:4], "self-instruct-user"]
    assert set(table["licence"]) == set(module.SHIPPED)


@pytest.mark.slow
@pytest.mark.skipif(not SHIPPED.exists(), reason="the answers are not in the source distribution")
def test_the_shipped_texts_are_ours(small_model_path: Path, tmp_path: Path) -> None:
    """Licences as the script gives them; sentences and passages come from word lists or from answers in the file."""
    pack, make = script("pack_answers", RECIPE), script("make_prompts", RECIPE)
    tokenizer, german = load_tokenizer(str(small_model_path)), make.LISTS["german"]
    built = {f"Translate German to English: {subject} {verb.format(o=o)}{end}." for subject in german["subjects"]
             for verb in german["verbs"] for o in german["objects"] for end in german["ends"]}  # fmt: skip
    rows = load_dataset("parquet", data_files=str(SHIPPED), split="train", cache_dir=str(tmp_path)).to_list()
    texts = tokenizer.batch_decode([row["input_ids"] for row in rows])
    answers = [" ".join(answer.removesuffix("<|im_end|>").split())
               for row, text in zip(rows, texts, strict=True) if "/" not in row["source"]
               for answer in re.findall(r"<\|im_start\|>assistant\n(.*?)(?:<\|im_end\|>|$)", text, re.S)]  # fmt: skip
    known = {run for answer in answers for run in runs_of(make.words_of(answer))}
    for row, text in zip(rows, texts, strict=True):
        assert pack.can_ship(row)
        assert row["licence"] == pack.LICENCES[row["source"].split("/")[-1]]
        prompt = text.split("<|im_start|>user\n")[1].split("<|im_end|>")[0]
        if row["source"] == "translation":
            assert prompt in built
        elif row["source"] in ("translation/answers", "rewriting/answers"):
            assert any(prompt.split(": ", 1)[1] in answer for answer in answers), prompt
        elif "/" in row["source"]:
            runs = runs_of(make.words_of(prompt))
            assert sum(run in known for run in runs) >= 0.8 * len(runs), prompt


def runs_of(words: list[str]) -> list[tuple[str, ...]]:
    return [tuple(words[start : start + 8]) for start in range(len(words) - 7)]


def test_openings_are_cut_and_chosen_at_random(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = [(2, 9), (3, 4), (2, 3), (9, 8), (1, 8), (2, 5)]  # of prompt and answer
    rows = [
        {"source": "a", "temperature": 0.0, "prompt_ids": [1] * prompt, "response_ids": [*range(10, 10 + answer)]}
        for prompt, answer in lengths
    ]
    (tmp_path / "one.jsonl").write_text("\n".join(map(json.dumps, rows)))
    answers, out = tmp_path / "answers.parquet", tmp_path / "openings.parquet"
    run_script("pack_answers", RECIPE, monkeypatch, answers, tmp_path / "one.jsonl")
    sizes = ("--answer-tokens", 5, "--shortest", 4, "--longest", 8)
    run_script("pack_openings", RECIPE, monkeypatch, out, answers, *sizes)
    assert "4 of 6 conversations, 19 answer tokens" in capsys.readouterr().out
    kept = read_conversations(out)
    assert [talk.input_ids for talk in kept] == [
        (1, 1, 10, 11, 12, 13, 14), (1, 1, 1, 10, 11, 12, 13), (1, 10, 11, 12, 13, 14), (1, 1, 10, 11, 12, 13, 14),
    ]  # fmt: skip
    assert [sum(talk.loss_mask) for talk in kept] == [5, 4, 5, 5]
    chosen = []
    for seed in (0, 0, 1, 2):
        run_script("pack_openings", RECIPE, monkeypatch, out, answers, *sizes, "--count", 2, "--seed", seed)
        chosen.append([talk.input_ids for talk in read_conversations(out)])
    assert chosen[0] == chosen[1]
    assert any(chosen[0] != other for other in chosen[2:])


def test_paragraphs_are_prose() -> None:
    module = script("fetch_texts", RECIPE)
    long = "A sentence that is long enough to be kept as a paragraph of its own, surely."
    html = f"<body><h1>Title</h1><p>{long}</p><p>Short.</p><pre><p>{long} x</p></pre>" \
           f'<div class="para">{long[:-1]} <em>indeed</em>.</div></body>'  # fmt: skip
    assert module.paragraphs_of(html) == [long, f"{long[:-1]} indeed."]


# ----------------------------------------------------------------------------------------------------------- published


TARGET = "org/Model-8B"


class Hub:
    """A Hub with a few repositories; `HfApi` of this process."""

    endpoint = "https://hub.test"
    tagged: ClassVar = {"yuhuili/EAGLE3-Model-8B": 900, "org/Model-8B-GGUF": 9000, "other/medusa-for-it": 5,
                        "org/Model-8B-LiLiCorr": 4, "org/Domino-for-it": 3,
                        "meta/Muse-Glimmer-30B-assistant": 2}  # fmt: skip
    named: ClassVar = {"yuhuili/EAGLE3-Model-8B": 900, "z-lab/Model-8B-DFlash": 1200, "amd/PARD-Model-8B": None,
                       "aws/Model-8B-P-EAGLE": 4, "x/EAGLE4-Model-8B": 3, "y/uno-Model-8B": 2, "z/Model-8B-NVFP4": 50,
                       "z/Model-8B-DFlash-NVFP4": 1, "org/Model-8B-it-assistant": 2}  # fmt: skip

    def list_models(self, *, limit: int, sort: str, filter: str = "", search: str = "") -> list[Any]:
        assert (limit, sort) == (200, "downloads")
        found = {f"base_model:{TARGET}": self.tagged}.get(filter, {}) | {"Model-8B": self.named}.get(search, {})
        return [SimpleNamespace(id=name, downloads=downloads) for name, downloads in found.items()]


class NoHub(Hub):
    def list_models(self, **_options: Any) -> list[Any]:
        raise RuntimeError("Connection refused")


def test_heads_are_found_by_tag_and_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "HfApi", Hub)
    assert find_heads(TARGET) == [
        PublishedHead("z-lab/Model-8B-DFlash", "dflash", 1200), PublishedHead("yuhuili/EAGLE3-Model-8B", "eagle", 900),
        PublishedHead("other/medusa-for-it", "medusa", 5), PublishedHead("aws/Model-8B-P-EAGLE", "eagle", 4),
        PublishedHead("org/Model-8B-LiLiCorr", "dflash", 4), PublishedHead("org/Domino-for-it", "dflash", 3),
        PublishedHead("x/EAGLE4-Model-8B", "eagle4", 3, is_read=False),
        PublishedHead("meta/Muse-Glimmer-30B-assistant", "dflash", 2),
        PublishedHead("org/Model-8B-it-assistant", "draft_model", 2),
        PublishedHead("y/uno-Model-8B", "uno", 2, is_read=False),
        PublishedHead("z/Model-8B-DFlash-NVFP4", "nvfp4", 1, is_read=False),
        PublishedHead("amd/PARD-Model-8B", "pard", 0),
    ]  # fmt: skip
    assert find_heads("org/another") == []


@pytest.mark.parametrize("target", ["", "a/b/c", "org/..", "/home/me/model"])
def test_invalid_ids(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "HfApi", NoHub)  # refused before anything is sent
    with pytest.raises(InvalidConfigError, match="is not a Hub id"):
        find_heads(target)


def test_without_a_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "HfApi", NoHub)
    with pytest.raises(CheckpointFormatError, match=r"hub\.test cannot be searched: Connection refused"):
        find_heads(TARGET)


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    monkeypatch.setattr(hub, "HfApi", Hub)
    command.find(TARGET)
    told = capsys.readouterr().out
    assert "z-lab/Model-8B-DFlash" in told
    assert "eagle4, which is not supported" in told
    assert "hf-specdec inspect z-lab/Model-8B-DFlash" in told.replace("\n", " ")
    command.find(TARGET, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert (found["model"], found["heads"][0]["method"]) == (TARGET, "dflash")
    command.find("org/another")
    assert "Train one" in capsys.readouterr().out
    command.find()
    told = capsys.readouterr().out
    assert "smollm2-135m-instruct-eagle3" in told
    assert "hf-specdec generate --method eagle 'Why" in told
    command.find(as_json=True)
    ours = {head["path"]: head["method"] for head in json.loads(capsys.readouterr().out)["heads"]}
    folder = command.SHIPPED_HEAD.parent
    assert set(ours) == set(map(str, folder.glob("smollm2-*")))
    assert ours[str(folder / "smollm2-135m-instruct-dflash")] == "dflash"
    monkeypatch.setattr(command, "SHIPPED_HEAD", tmp_path / "heads" / "smollm2-135m-instruct-eagle3")
    command.find()
    assert "git clone --depth 1 https://github.com/hf-specdec" in capsys.readouterr().out
