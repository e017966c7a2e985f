"""Distillation on the tiny Llama: what is asked, answered and written; interrupts; several processes."""

from __future__ import annotations

import copy
import importlib
import json
import subprocess
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

from hf_specdec import InvalidConfigError
from hf_specdec.training import (
    Conversation,
    DistillConfig,
    Prompt,
    distill,
    invented_prompts,
    read_conversations,
    read_prompts,
)
from hf_specdec.training.teachers import ModelTeacher
from launched import launch
from trained import CLI, PROMPTS, rows_of
from zoo import ASSISTANT, END, USER, chat_tokenizer

SMALL = DistillConfig(max_new_tokens=12, batch_size=2, batches_per_part=1, temperatures=(0.0, 0.7), seed=5)


def test_answers_are_what_generate_says(talker: Any, tmp_path: Path) -> None:
    """Greedy rows equal generate() on the prompt alone; the mask marks them; provenance is there."""
    tokenizer = chat_tokenizer()
    given = [Prompt((text,), "here") for text in PROMPTS]
    assert distill(talker, tokenizer, given, tmp_path / "out", SMALL, progress=False) == tmp_path / "out"
    rows = rows_of(tmp_path / "out")
    assert [row["number"] for row in rows] == list(range(9))
    assert {(row["source"], row["model"]) for row in rows} == {("here", talker.config._name_or_path)}
    for row, text in zip(rows, PROMPTS, strict=True):
        prompt = [USER, *(int(word[1:]) for word in text.split()), END, ASSISTANT]
        assert row["input_ids"][: len(prompt)] == prompt
        assert row["loss_mask"] == [False] * len(prompt) + [True] * (len(row["input_ids"]) - len(prompt))
        assert row["messages"][0] == {"role": "user", "content": text}
        assert row["temperature"] == pytest.approx(0.0 if row["number"] % 2 == 0 else 0.7)
        answer = row["input_ids"][len(prompt) :]
        assert row["finish_reason"] == ("stop" if answer[-1] == END else "length")
        assert END not in answer[:-1]
        if row["temperature"] == 0:
            ids = torch.tensor([prompt])
            alone = talker.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False,
                                    pad_token_id=0)  # fmt: skip
            assert answer == alone[0, len(prompt) :].tolist()
    talks = read_conversations(tmp_path / "out")
    assert sum(map(len, (talk.input_ids for talk in talks))) == sum(len(row["input_ids"]) for row in rows)


def test_a_teacher_is_identified_by_weights_of_all_its_depths(talker: Any) -> None:
    parameters = dict(talker.named_parameters())
    names = list(parameters)
    found = [ModelTeacher(talker, 1).facts()["weights"]]
    assert ModelTeacher(copy.deepcopy(talker), 1).facts()["weights"] == found[0]
    for name in {names[0], names[len(names) // 2], names[-1], "lm_head.weight"}:
        with torch.no_grad():
            parameters[name][-1] += 1
        found.append(ModelTeacher(talker, 1).facts()["weights"])
    assert len(found) > 3
    assert len(set(found)) == len(found)
    talker.lm_head.to("meta")  # as if it were offloaded
    assert ModelTeacher(talker, 1).facts()["weights"] not in found


@pytest.mark.slow
def test_turns_go_on_and_are_invented(talker: Any, tmp_path: Path) -> None:
    """Given turns first, then the model's own; every answer of a conversation is marked."""
    tokenizer = chat_tokenizer()
    given = [Prompt(("w05 w06", "w07"), "two"), Prompt(("w08 w09 w10",), "one"), *invented_prompts(4)]
    config = DistillConfig(max_new_tokens=20, num_turns=3, batch_size=2, batches_per_part=2, temperatures=(0.9,))
    distill(talker, tokenizer, given, tmp_path / "out", config, progress=False)
    rows = rows_of(tmp_path / "out")
    long = [row for row in rows if len(row["messages"]) >= 4]
    assert long, "some conversation has two turns"
    assert {row["source"] for row in rows} == {"two", "one", "invented"}
    for row in rows:
        roles = [message["role"] for message in row["messages"]]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        if row["source"] == "two" and len(roles) >= 4:
            assert [row["messages"][i]["content"] for i in (0, 2)] == ["w05 w06", "w07"]
        told = [
            END if token == END else token
            for token, said in zip(row["input_ids"], row["loss_mask"], strict=True)
            if said
        ]
        said = " ".join(message["content"] for message in row["messages"][1::2]).split()
        assert [f"w{token:02}" for token in told if token not in (0, 1, END)] == said
    again = tmp_path / "again"
    distill(talker, tokenizer, given, again, config, progress=False)
    assert rows_of(again) == rows


def test_a_turn_that_the_template_rewrites(talker: Any) -> None:
    """What the template reads otherwise is no answer any more."""
    module = importlib.import_module("hf_specdec.training.distillation")  # the function of that name hides it
    dialog = module._Dialog(0, "s", 0.0, ["a", "b"])
    dialog.add([1, 2], [3, 4, 5], "said", "stop")
    dialog.add([1, 2, 3, 9, 9], [6], "more", "stop")
    assert dialog.input_ids == [1, 2, 3, 9, 9, 6]
    assert dialog.loss_mask == [False, False, True, False, False, True]


def test_a_model_without_a_template_goes_on_with_texts(talker: Any, tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(None)
    distill(talker, tokenizer, ["w05 w06 w07", *invented_prompts(2)], tmp_path / "out", SMALL, progress=False)
    rows = rows_of(tmp_path / "out")
    assert rows[0]["input_ids"][:3] == [5, 6, 7]
    assert rows[0]["loss_mask"][:4] == [False, False, False, True]
    with pytest.raises(InvalidConfigError, match="needs a chat template"):
        distill(talker, tokenizer, ["w05"], tmp_path / "two", DistillConfig(num_turns=2))


def test_directories_of_other_work_are_refused(talker: Any, tmp_path: Path) -> None:
    tokenizer = chat_tokenizer()
    distill(talker, tokenizer, PROMPTS[:2], tmp_path / "out", SMALL, progress=False)
    with pytest.raises(InvalidConfigError, match="seed 5, now 6"):
        distill(talker, tokenizer, PROMPTS[:2], tmp_path / "out", replace(SMALL, seed=6))
    with pytest.raises(InvalidConfigError, match="prompts"):
        distill(talker, tokenizer, PROMPTS[:3], tmp_path / "out", SMALL)
    (tmp_path / "else" / "data").mkdir(parents=True)
    (tmp_path / "else" / "data" / "x.parquet").touch()
    with pytest.raises(InvalidConfigError, match="did not write"):
        distill(talker, tokenizer, PROMPTS[:2], tmp_path / "else", SMALL)
    distill(talker, tokenizer, PROMPTS, tmp_path / "some", replace(SMALL, max_prompt_tokens=6), progress=False)
    assert [row["number"] for row in rows_of(tmp_path / "some")] == [i for i in range(9) if 2 + i % 4 + 3 <= 6]
    with pytest.raises(InvalidConfigError, match="longer than max_prompt_tokens=2"):
        distill(talker, tokenizer, PROMPTS, tmp_path / "long", replace(SMALL, max_prompt_tokens=2))
    with pytest.raises(InvalidConfigError, match="No prompts were given"):
        distill(talker, tokenizer, [], tmp_path / "none", SMALL)
    for fields in ({"batch_size": 0}, {"temperatures": ()}, {"temperatures": (-1.0,)}):
        with pytest.raises(InvalidConfigError):
            DistillConfig(**fields)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------ sources


def test_prompts_of_every_kind(tmp_path: Path) -> None:
    rows = [
        {"prompt": "a", "source": "mine"}, {"turns": ["b", "c"]},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "d"}]},
        {"conversations": [{"from": "human", "value": "e"}, {"from": "gpt", "value": "x"}]},
        {"instruction": "f", "input": "g"}, {"text": "h"},
    ]  # fmt: skip
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    turns = [("a",), ("b", "c"), ("d",), ("e",), ("f\n\ng",), ("h",)]
    assert [prompt.turns for prompt in read_prompts(path)] == turns
    assert [prompt.source for prompt in read_prompts(path, limit=2)] == ["mine", "rows.jsonl"]
    (tmp_path / "lines.txt").write_text("one\n\ntwo\n")
    assert [prompt.turns for prompt in read_prompts(tmp_path / "lines.txt")] == [("one",), ("two",)]
    for text, message in (
        ('{"other": 1}', "line 1 has no prompt"),
        ("{", "is not JSON"),
        ("a text", "is not JSON: it begins with 'a text'."),
        ("[1]", "line 1 holds a list"),
    ):
        path.write_text(text)
        with pytest.raises(InvalidConfigError, match=message):
            read_prompts(path)
    with pytest.raises(InvalidConfigError, match="nowhere' does not exist"):
        read_prompts(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidConfigError, match=r"cannot be read as a dataset: .*\. Give a .jsonl"):
        read_prompts(tmp_path / "empty")


def test_conversations_of_every_kind(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    talk = [{"role": "user", "content": "w05"}, {"role": "assistant", "content": "w06 w07"}]
    rows = [
        {"input_ids": [1, 2], "loss_mask": [0, 1]},
        {"prompt_ids": [3], "response_ids": [4, 5]},
        {"messages": talk},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    found = read_conversations(path, tokenizer=chat_tokenizer())
    assert found[:2] == [Conversation((1, 2), (False, True)), Conversation((3, 4, 5), (False, True, True))]
    assert found[2] == Conversation.of([USER, 5, END, ASSISTANT], [6, 7, END])
    with pytest.raises(InvalidConfigError, match="messages"):
        read_conversations(path)


SHOWS_ALL = (
    "{% for tool in tools or [] %}w80 {{ tool.name }} {% endfor %}"
    "{% for m in messages %}{{ {'user': 'w90', 'assistant': 'w91', 'system': 'w93', 'tool': 'w94'}[m.role] }} "
    "{% if m.reasoning_content %}w81 {{ m.reasoning_content }} {% endif %}{{ m.content }} "
    "{% for call in m.tool_calls or [] %}w82 {{ call.function.name }} {{ call.function.arguments.where }} {% endfor %}"
    "w92\n{% endfor %}{% if add_generation_prompt %}w91{% endif %}"
)
"""A chat template that shows tools, tool calls and reasoning."""
ASKED, CALL = {"role": "user", "content": "w05"}, {"function": {"name": "w07", "arguments": {"where": "w08"}}}
TEXT_CALL = {"function": {"name": "w07", "arguments": '{"where": "w08"}'}}
ANSWERED, CALLED = [91, 6, 92], [91, 82, 7, 8, 92]


@pytest.mark.parametrize(
    ("row", "whole", "ignoring"),
    [
        ({"messages": [ASKED, {"role": "model", "content": "w06"}]}, [90, 5, 92, *ANSWERED], None),
        ({"conversations": [{"from": "human", "value": "w05"}, {"from": "gpt", "value": "w06"}]},
         [90, 5, 92, *ANSWERED], None),
        ({"system": "w09", "messages": [ASKED, {"role": "assistant", "content": "w06"}]},
         [93, 9, 92, 90, 5, 92, *ANSWERED], None),
        ({"messages": [ASKED, {"role": "assistant", "content": "w06", "reasoning_content": "w08", "x": None}]},
         [90, 5, 92, 91, 81, 8, 6, 92], "reasoning_content"),
        ({"messages": [ASKED, {"role": "assistant", "content": "w06"}], "tools": [{"name": "w07"}]},
         [80, 7, 90, 5, 92, *ANSWERED], "tools"),
        ({"messages": [ASKED, {"role": "assistant", "content": "w06"}], "tools": '[{"name": "w07"}]'},
         [80, 7, 90, 5, 92, *ANSWERED], "tools"),
        *(({"messages": [ASKED, {"role": "assistant", **said, "tool_calls": [call]}]}, [90, 5, 92, *CALLED],
           "tool_calls") for said in ({"content": ""}, {"content": None}, {}) for call in (CALL, TEXT_CALL)),
    ],
)  # fmt: skip
def test_messages_reach_the_template_whole_or_are_refused(
    row: dict[str, Any], whole: list[int], ignoring: str | None, tmp_path: Path
) -> None:
    """Read alike by a template that shows all fields, and from parquet; refused by name by one that shows content."""
    path, wrapped = tmp_path / "rows.jsonl", tmp_path / "rows.parquet"
    path.write_text(json.dumps(row))
    datasets.Dataset.from_list([row]).to_parquet(wrapped)
    for source in (path, wrapped):
        (found,) = read_conversations(source, tokenizer=chat_tokenizer(SHOWS_ALL))
        assert found == Conversation(tuple(whole), tuple(place > whole.index(91) for place in range(len(whole))))
    if ignoring is not None:
        with pytest.raises(InvalidConfigError, match=f"line 1: The chat template .*`{ignoring}`"):
            read_conversations(path, tokenizer=chat_tokenizer())
    asks_with_tools = ignoring in ("tools", "tool_calls")
    with pytest.raises(InvalidConfigError, match="line 1 has tools") if asks_with_tools else nullcontext():
        assert read_prompts(path) == [Prompt(("w05",), "rows.jsonl", row.get("system", ""))]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"messages": [ASKED, {"role": "assistant", "content": ""}]}, "empty message of the assistant"),
        ({"conversations": [{"from": "human", "value": "w05"}, {"from": "gpt", "value": None}]}, "empty message"),
        ({"messages": [ASKED, {"role": "bot", "content": "w06"}]}, "role 'bot'"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "w05"}]}]}, "Expected one of .* text"),
        ({"messages": [{"role": "system", "content": "w06"}, ASKED], "system": "w07"}, "begins with another"),
        ({"messages": [ASKED], "images": ["a.png"]}, "`images` beside `messages`"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "lone surrogate"),
        ({"messages": [ASKED, {"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}]}, "not JSON"),
    ],
)
def test_rows_that_both_commands_refuse(fields: dict[str, Any], reason: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(fields))
    for read in (read_prompts, lambda path: read_conversations(path, tokenizer=chat_tokenizer(SHOWS_ALL))):
        with pytest.raises(InvalidConfigError, match=f"line 1.*{reason}"):
            read(tmp_path / "rows.jsonl")


def test_an_answer_that_the_template_shortens_is_refused(tmp_path: Path) -> None:
    template = SHOWS_ALL.replace("m.content", "m.content.split('w06')[-1]")
    talk = [ASKED, {"role": "assistant", "content": "w06 w07"}]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": talk}))
    with pytest.raises(InvalidConfigError, match="leaves out or changes `content` of an answer: 'w06 w07'"):
        read_conversations(tmp_path / "rows.jsonl", tokenizer=chat_tokenizer(template))


def test_what_ends_every_conversation_is_no_answer(tmp_path: Path) -> None:
    """As in Phi-3's template, which writes the end of text behind the last turn."""
    template = SHOWS_ALL.removesuffix("{% endif %}") + "{% else %}w95{% endif %}"
    talk = [ASKED, {"role": "assistant", "content": "w06"}] * 2
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": talk}))
    (found,) = read_conversations(tmp_path / "rows.jsonl", tokenizer=chat_tokenizer(template))
    assert found.input_ids == (90, 5, 92, *ANSWERED) * 2
    assert found.loss_mask == (False, False, False, False, True, True) * 2


def test_few_bad_rows_are_skipped_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "rows.jsonl"
    row = json.dumps({"messages": [ASKED, {"role": "assistant", "content": "w06"}]})
    bad = '{"messages": [{"role": "user", "content": ""}]}'
    for text in (bad, "{", "[1]"):
        for read in (read_prompts, lambda path: read_conversations(path, tokenizer=chat_tokenizer())):
            path.write_text("\n".join([*[row] * 50, text, *[row] * 49]))
            assert len(read(path)) == 99
            assert "1 of 100 rows are skipped: " in caplog.text
            assert "line 51" in caplog.text
            caplog.clear()
            path.write_text("\n".join([*[row] * 50, text, *[row] * 48]))
            with pytest.raises(InvalidConfigError, match=r"line 51.*Up to 1% of the rows are skipped; 1 "):
                read(path)
            path.write_text("\n".join([text] * 11 + [row] * 2000))
            with pytest.raises(InvalidConfigError, match="11 cannot be read"):
                read(path)


def test_prompts_with_a_system_message(talker: Any, tmp_path: Path) -> None:
    config = DistillConfig(max_new_tokens=4, temperatures=(0.0,))
    prompts = [Prompt(("w05",), "mine", "w09"), Prompt(("w05",), "mine")]
    tokenizer = chat_tokenizer(SHOWS_ALL)
    with_system, without = rows_of(distill(talker, tokenizer, prompts, tmp_path / "out", config, progress=False))
    assert with_system["input_ids"][:7] == [93, 9, 92, 90, 5, 92, 91]
    assert without["input_ids"][:4] == [90, 5, 92, 91]
    assert with_system["messages"][0] == {"role": "system", "content": "w09"}
    with pytest.raises(InvalidConfigError, match="need a chat template"):
        distill(talker, chat_tokenizer(None), prompts, tmp_path / "none", config)
    with pytest.raises(InvalidConfigError, match="The chat template rejects these messages"):
        distill(talker, chat_tokenizer("{{ raise_exception('no system') }}"), prompts, tmp_path / "no", config)


@pytest.mark.slow
def test_two_processes_write_the_same(saved: Path, tmp_path: Path) -> None:
    """An interrupted command is in `tests/faults.py`."""
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": text}) for text in PROMPTS))
    command = ["distill", "--model", saved, "--prompts", tmp_path / "prompts.jsonl", "--invent", 3, "--batch-size", 1,
               "--max-new-tokens", 40, "--temperature", 0, "--temperature", 0.8, "--dtype", "float32",
               "--json"]  # fmt: skip
    whole = subprocess.run([*CLI, *map(str, command), "--output", str(tmp_path / "whole")], capture_output=True,
                           text=True, check=True)  # fmt: skip
    wanted = rows_of(tmp_path / "whole")
    assert json.loads(whole.stdout)["conversations"] == len(wanted)
    both = launch(*map(str, command), "--output", str(tmp_path / "both"))
    assert both.count("of 2") == 2
    assert rows_of(tmp_path / "both") == wanted
