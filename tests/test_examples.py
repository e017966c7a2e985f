"""The scripts in `examples/`, on tiny models: their answers are those of plain `generate()`."""

from __future__ import annotations

import copy
import json
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
    Idefics3VisionConfig,
)

import zoo
from benchmark_script import EXAMPLES, plain_answers, plain_turns, script
from benchmark_script import run_example as run
from conftest import SHIPPED_HEAD
from drafters import random_head
from hf_specdec import (
    Eagle3Config,
    Eagle3Head,
    EagleConfig,
    EagleHead,
    SpeculativeGenerationMixin,
    export_head,
    load_head,
)
from hf_specdec.generation.loading import encode_chat
from run_notebooks import code_lines

SPEED, TAU = r"{}: \d+ tokens, \d+\.\d s, \d+\.\d tokens/s, tau {}", r"\d\.\d\d"
"""What a `LiveStreamer` shows of a run: its name and tau are to be filled in."""

Patch = pytest.MonkeyPatch
Captured = pytest.CaptureFixture[str]


def test_a_file_is_answered_and_an_interrupted_run_goes_on(
    saved: Path, tmp_path: Path, monkeypatch: Patch, capsys: Captured
) -> None:
    prompts = ["w05 w06", "w07 w08 w09", "w10", "w11 w12 w13 w14", "w15"]
    (tmp_path / "in.jsonl").write_text("\n".join(json.dumps({"prompt": text, "id": text[1:3]}) for text in prompts))
    tokenizer = AutoTokenizer.from_pretrained(saved)
    tokenizer.pad_token = None  # as many tokenizers are: a batch is padded all the same
    tokenizer.save_pretrained(saved)
    files = [tmp_path / "in.jsonl", tmp_path / "out.jsonl"]
    command = [*files, "--model", saved, "--batch-size", 2, "--max-new-tokens", 9]
    run("answer_file", monkeypatch, *command)
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    assert [json.loads(line)["answer"] for line in lines] == plain_answers(saved, prompts, 9)
    assert [json.loads(line)["id"] for line in lines] == ["05", "07", "10", "11", "15"]
    assert capsys.readouterr().out.splitlines()[0] == "0 of 5 were answered before"
    (tmp_path / "out.jsonl").write_text("\n".join(lines[:2]) + "\n" + lines[2][:30])  # interrupted in the third
    run("answer_file", monkeypatch, *command)
    assert [json.loads(line)["answer"] for line in (tmp_path / "out.jsonl").read_text().splitlines()] == [
        json.loads(line)["answer"] for line in lines
    ]
    first, second = capsys.readouterr().out.splitlines()[:2]
    assert first == "2 of 5 were answered before"
    assert second.startswith("4 of 5, tau ")
    (tmp_path / "in.jsonl").write_text(
        "".join(json.dumps({"prompt": text}) + "\n" for text in [*prompts[::-1], "w20"])
    )
    answers = (tmp_path / "out.jsonl").read_text()
    with pytest.raises(SystemExit, match="2"):
        run("answer_file", monkeypatch, *command)
    assert "answers other prompts: give another file for the answers" in capsys.readouterr().err
    assert (tmp_path / "out.jsonl").read_text() == answers


LONGER = {"reference"}
"""The whole algorithm on a page."""


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_a_script_shows_its_essence(path: Path) -> None:
    """Without docstrings, comments, imports and options it is at most 60 lines."""
    lines = [line.strip() for line in code_lines(path.read_text())]
    essence = [
        line for line in lines if not line.startswith(("import ", "from ", "parser.", "parser = ", "options = "))
    ]
    assert (len(essence) > 60) == (path.stem in LONGER), essence


def adapter_and_head(saved: Path, folder: Path) -> list[Any]:
    """Arguments with an adapter and a head, both with random weights."""
    peft = pytest.importorskip("peft")
    model = AutoModelForCausalLM.from_pretrained(saved)
    EagleHead(EagleConfig.for_target(model.config)).save_pretrained(folder / "head")
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    adapted.save_pretrained(folder / "adapter")
    return ["--adapter", folder / "adapter", "--drafter", folder / "head"]


@pytest.mark.parametrize("end", [None, EOFError, KeyboardInterrupt], ids=["an empty line", "Ctrl-D", "Ctrl-C"])
def test_a_chat_on_one_cache(
    end: type[BaseException] | None, saved: Path, monkeypatch: Patch, capsys: Captured
) -> None:
    said = iter(["w05 w06", "w07 w08"])

    def answer(_: str) -> str:
        text = next(said, "")
        if not text and end is not None:
            raise end
        return text

    monkeypatch.setattr("builtins.input", answer)
    run("chat", monkeypatch, "--model", saved, "--max-new-tokens", 9)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert [line.startswith("    [tau ") for line in lines] == [False, True, False, True]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(saved), AutoTokenizer.from_pretrained(saved)
    first = plain_answers(saved, ["w05 w06"], 9)[0]
    assert lines[0].strip() == first
    inputs = encode_chat(tokenizer, ["w05 w06", first, "w07 w08"], model.device)
    ids = model.generate(**inputs, max_new_tokens=9, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert lines[2].strip() == tokenizer.decode(ids, skip_special_tokens=True).strip()


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")  # PEFT's
def test_an_adapter_and_a_head(saved: Path, tmp_path: Path, monkeypatch: Patch, capsys: Captured) -> None:
    peft = pytest.importorskip("peft")
    run("adapter_and_head", monkeypatch, "w05 w06 w07", "--model", saved, *adapter_and_head(saved, tmp_path),
        "--max-new-tokens", 8)  # fmt: skip
    text = capsys.readouterr().out
    assert "with the adapter: tau 1." in text
    assert "without: tau 1." in text
    answer = text.splitlines()[0].strip()
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(saved), tmp_path / "adapter")
    tokenizer = AutoTokenizer.from_pretrained(saved)
    inputs = encode_chat(tokenizer, ["w05 w06 w07"], model.device)
    ids = model.generate(**inputs, max_new_tokens=8, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert answer == tokenizer.decode(ids, skip_special_tokens=True).strip()


def test_a_pipeline(saved: Path, monkeypatch: Patch, capsys: Captured) -> None:
    run("text_pipeline", monkeypatch, "w05 w06", "w07 w08 w09", "--model", saved, "--max-new-tokens", 9)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert [line.strip() for line in lines[::2]] == plain_answers(saved, ["w05 w06", "w07 w08 w09"], 9)
    assert all(line.startswith("    [tau ") for line in lines[1::2])


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["eagle3", "speculators"])
def test_a_published_head(layout: str, saved: Path, tmp_path: Path, monkeypatch: Patch, capsys: Captured) -> None:
    """The layouts of the two heads that the script names; EAGLE's own stores no layers, but reads 2, L/2 and L-3."""
    config = copy.deepcopy(zoo.build("llama").config)
    config.num_hidden_layers = 8
    model = AutoModelForCausalLM.from_config(config)
    model.generation_config.eos_token_id = None
    model.save_pretrained(saved)
    head = Eagle3Head(Eagle3Config.for_target(config))
    export_head(head, tmp_path / "head", format=layout)
    assert load_head(tmp_path / "head").layout == ("eagle3" if layout == "eagle3" else "speculators-eagle3")
    run("published_head", monkeypatch, "w05 w06", "--model", saved, "--head", tmp_path / "head",
        "--max-new-tokens", 24)  # fmt: skip
    text, plain, again, auto, forwards = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert re.fullmatch("forwards by: (eager|kernels)", forwards)
    assert text == again == plain_answers(saved, ["w05 w06"], 24)[0]
    assert re.fullmatch(SPEED.format("plain", r"1\.00"), plain)
    assert re.fullmatch(SPEED.format("auto", TAU), auto)


@pytest.mark.slow
def test_structured_output(small_model_path: Path, monkeypatch: Patch, capsys: Captured) -> None:
    """A grammar's processor remembers: it is called once per token, in order, and the answer is of its schema."""
    pytest.importorskip("xgrammar")
    question = "Describe a cat as JSON with its name, its colours and how many legs it has."
    module = run("structured_output", monkeypatch, question, "--model", small_model_path, "--drafter", SHIPPED_HEAD)
    text = capsys.readouterr().out
    found = json.loads(text.splitlines()[0])
    assert set(found) == set(module.SCHEMA["required"])
    assert "the same ids: True" in text


TASK = """
task: going_on
dataset_path: json
dataset_kwargs: {data_files: {test: QUESTIONS}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["w09 w09 w09"], do_sample: false, max_gen_toks: 20}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""


@pytest.mark.filterwarnings("ignore")  # the harness's own
def test_an_evaluation(saved: Path, tmp_path: Path, monkeypatch: Patch, capsys: Captured) -> None:
    """The harness stops by criteria of its own; its answers and scores are those without speculation."""
    pytest.importorskip("lm_eval")
    questions = [f"w{n:02} w{n + 1:02} w{n:02}" for n in range(5, 9)]
    rows = [{"question": text, "answer": plain_answers(saved, [text], 20)[0]} for text in questions]
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "task.yaml").write_text(TASK.replace("QUESTIONS", str(tmp_path / "q.jsonl")))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    run("evaluate", monkeypatch, "--model", saved, "--tasks", "going_on", "--include-path", tmp_path)
    first, second, last = [
        line for line in capsys.readouterr().out.splitlines() if " exact_match " in line or "equal" in line
    ]
    assert first.startswith("plain: ")
    assert second.startswith("auto: ")
    assert first.split(",")[0].split()[-1] == second.split(",")[0].split()[-1]
    assert last == "equal answers: 4 of 4"


@pytest.mark.slow
def test_from_prompts_to_a_head(saved: Path, tmp_path: Path, monkeypatch: Patch, capsys: Captured) -> None:
    """And again, which finds everything done."""
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": f"w0{n} w1{n}"}) for n in range(8)))
    for _ in range(2):
        run("distil_train_publish", monkeypatch, "--model", saved, "--prompts", tmp_path / "prompts.jsonl",
            "--work", tmp_path / "work", "--epochs", 4, "--max-new-tokens", 24, "--draft-vocab-size", 40)  # fmt: skip
        lines = capsys.readouterr().out.splitlines()
        assert re.fullmatch(r"a static tree of \d+ nodes: expected tau \d\.\d\d, .*x plain decoding here", lines[0])
        assert lines[1].endswith(f'use it with model.load_drafter("{tmp_path / "work" / "head"}")')
    head = load_head(tmp_path / "work" / "head")
    assert head.config.draft_vocab_size == 40
    assert head.config.base_model_name_or_path == str(saved)
    assert "EAGLE-3 head" in (tmp_path / "work" / "head" / "README.md").read_text()
    exported = load_head(tmp_path / "work" / "vllm")
    assert exported.layout == "speculators-eagle3"
    assert exported.config.draft_vocab_size == 40


@pytest.mark.slow
def test_a_head_goes_on_learning_from_recent_answers(
    saved: Path, tmp_path: Path, monkeypatch: Patch, capsys: Captured
) -> None:
    """The second round's head has learned from the first; the answers of both heads are plain ones."""
    prompts = [f"w0{n} w1{n}" for n in range(6)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": text}) for text in prompts))
    target = AutoModelForCausalLM.from_pretrained(saved)
    random_head(target).save_pretrained(tmp_path / "head")
    run("adapt_head", monkeypatch, "--model", saved, "--drafter", tmp_path / "head", "--prompts",
        tmp_path / "prompts.jsonl", "--work", tmp_path / "work", "--rounds", 2, "--max-new-tokens", 12)  # fmt: skip
    lines = capsys.readouterr().out.splitlines()
    of_round = r"round {}, {}: tau \d\.\d\d, [\d.]+ tokens/s"
    expected = [of_round.format(1, "original"), of_round.format(2, "original"), of_round.format(1, "adapted"),
                r"trained on 3 answers, \d+ s in all", of_round.format(2, "adapted")]  # fmt: skip
    assert len(lines) == len(expected)
    assert all(re.fullmatch(pattern, line) for pattern, line in zip(expected, lines, strict=True)), lines
    captured = json.loads((tmp_path / "work" / "1" / "features" / "features.json").read_text())
    assert len(captured["lengths"]) == 3


# ------------------------------------------------------------------------------------------------- kinds of models


@pytest.fixture
def idefics3(tmp_path: Path) -> Path:
    """A tiny Idefics3, the class of the default model, with its processor: an image is four tokens `<image>`."""
    vision = Idefics3VisionConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
                                  image_size=16, patch_size=4)  # fmt: skip
    tokenizer = zoo.chat_tokenizer()
    special = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
    tokenizer.add_special_tokens({"extra_special_tokens": special})
    text = copy.deepcopy(zoo.build("llama").config)
    text.vocab_size = len(tokenizer)
    torch.manual_seed(0)
    config = Idefics3Config(vision_config=vision, text_config=text, scale_factor=2,
                            image_token_id=tokenizer.convert_tokens_to_ids("<image>"))  # fmt: skip
    zoo.decisive(Idefics3ForConditionalGeneration(config)).save_pretrained(tmp_path / "idefics3")
    part = "{{ '<image>' if part.type == 'image' else part.text }} "
    template = f"{{% for m in messages %}}w90 {{% for part in m.content %}}{part}{{% endfor %}}w92 {{% endfor %}}w91 "
    sizes = {"size": {"longest_edge": 16}, "max_image_size": {"longest_edge": 16}}
    try:
        images = Idefics3ImageProcessorPil(**sizes, do_image_splitting=False)
    except ImportError:  # transformers 5.17
        pytest.skip(f"the processor of transformers {transformers.__version__} needs torchvision")
    Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=template).save_pretrained(
        tmp_path / "idefics3"
    )
    return tmp_path / "idefics3"


@pytest.mark.slow
def test_an_image_and_a_question(idefics3: Path, tmp_path: Path, monkeypatch: Patch, capsys: Captured) -> None:
    """The answer depends on the picture, and is the same with speculation."""
    answers = []
    for color in ("red", "blue"):
        Image.new("RGB", (20, 30), color).save(tmp_path / "picture.png")
        run(
            "vision", monkeypatch, tmp_path / "picture.png", "w05 w06 w07", "--model", idefics3, "--max-new-tokens", 24
        )
        text, plain, again, auto, same = [line.strip() for line in capsys.readouterr().out.splitlines()]
        assert re.fullmatch(SPEED.format("plain", r"1\.00"), plain)
        assert re.fullmatch(SPEED.format("auto", TAU), auto)
        assert same == "the same ids: True"
        assert text == again
        assert len(text.split()) > 12
        answers.append(text)
    assert answers[0] != answers[1]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the quantisers' own
@pytest.mark.parametrize("backend", ["quanto", "torchao"])
def test_a_quantised_target(backend: str, saved: Path, monkeypatch: Patch, capsys: Captured) -> None:
    """int8 weights: smaller, another answer than that of the model itself, and the same with speculation."""
    pytest.importorskip({"quanto": "optimum.quanto", "torchao": "torchao.quantization"}[backend])
    model = AutoModelForCausalLM.from_pretrained(saved)
    EagleHead(EagleConfig.for_target(model.config)).save_pretrained(saved.parent / "head")
    run("quantized", monkeypatch, "w05 w06 w07", "--model", saved, "--drafter", saved.parent / "head",
        "--backend", backend, "--max-new-tokens", 24)  # fmt: skip
    lines = capsys.readouterr().out.splitlines()
    less, full = map(float, re.fullmatch(r"weights: ([\d.]+) MiB instead of ([\d.]+) MiB", lines[0]).groups())
    assert less < full
    assert re.fullmatch(SPEED.format("plain", r"1\.00"), lines[2])
    assert re.fullmatch(SPEED.format("auto", TAU), lines[4])
    assert lines[1] == lines[3] != ""
    assert lines[5] == "the same ids: True"


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [0, 7])
def test_a_long_document(chunk: int, saved: Path, tmp_path: Path, monkeypatch: Patch, capsys: Captured) -> None:
    (tmp_path / "document.txt").write_text(" ".join(f"w{5 + n % 60}" for n in range(90)))
    model = AutoModelForCausalLM.from_pretrained(saved)
    EagleHead(EagleConfig.for_target(model.config)).save_pretrained(tmp_path / "head")
    run("long_document", monkeypatch, tmp_path / "document.txt", "w05 w06", "--model", saved, "--drafter",
        tmp_path / "head", "--chunk", chunk, "--draft-window", 16, "--max-new-tokens", 24)  # fmt: skip
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "document.txt: 95 tokens"  # with the question and the template
    first = r" +first token after \d+\.\d\d s"
    patterns = [SPEED.format("plain", r"1\.00"), first, SPEED.format("auto", TAU), first]
    assert all(re.fullmatch(*pair) for pair in zip(patterns, [*lines[2:4], *lines[5:7]], strict=True)), lines
    assert lines[7] == "the same ids: True"
    peak, weights = map(int, re.fullmatch(r"peak memory: (\d+) MiB, of which (\d+) MiB are .*", lines[8]).groups())
    assert peak > weights
    text = (tmp_path / "document.txt").read_text()
    assert lines[1].strip() == lines[4].strip() == plain_answers(saved, [f"w05 w06\n\n{text}"], 24)[0]


def test_a_chat_page_streams_the_steps_of_two_turns(saved: Path) -> None:
    """Texts are plain `generate()`'s, colours and speeds those of the steps; the page's history is read again."""
    page, tokenizer = script("chat_page", EXAMPLES), AutoTokenizer.from_pretrained(saved)
    model = SpeculativeGenerationMixin.attach(AutoModelForCausalLM.from_pretrained(saved))
    messages, turns = list[dict[str, str]](), ["w05 w06", "w07 w08"]
    for speculative, turn, expected in zip(
        ("prompt_lookup", None), turns, plain_turns(saved, turns, 40), strict=True
    ):  # fmt: skip
        messages.append({"role": "user", "content": turn})
        options = {"speculative": speculative, "do_sample": False, "max_new_tokens": 40}
        *shown, html = page.stream_html(model, tokenizer, messages, **options)
        answer = page.plain_text({"role": "assistant", "content": [{"type": "text", "text": html}]})
        assert answer.strip() == expected
        tau, count = re.search(r" tokens/s, (\d\.\d\d) tokens per forward, (\d+) tokens", html).groups()
        assert len(shown) > 1
        assert (float(tau) > 1) == (speculative is not None) == ("<span title" in html or "<span style" in html)
        assert int(count) > len(answer.split()) - 1
        messages.append({"role": "assistant", "content": answer})
    assert page.plain_text({"role": "user", "content": [{"type": "text", "text": "<b>"}]}) == "<b>"


def test_a_chat_page_says_why_an_answer_failed(saved: Path) -> None:
    page, tokenizer = script("chat_page", EXAMPLES), AutoTokenizer.from_pretrained(saved)
    model = SpeculativeGenerationMixin.attach(AutoModelForCausalLM.from_pretrained(saved))
    with pytest.raises(ValueError, match="max_new_tokens"):
        list(page.stream_html(model, tokenizer, [{"role": "user", "content": "w05"}], max_new_tokens=-1))


def test_a_chat_page_whose_reader_stops_generates_no_longer(saved: Path) -> None:
    page, tokenizer = script("chat_page", EXAMPLES), AutoTokenizer.from_pretrained(saved)
    model = SpeculativeGenerationMixin.attach(AutoModelForCausalLM.from_pretrained(saved))
    before = threading.active_count()
    stream = page.stream_html(model, tokenizer, [{"role": "user", "content": "w05"}], do_sample=False,
                              min_new_tokens=10**6, max_new_tokens=10**6)  # fmt: skip
    next(stream)
    assert threading.active_count() == before + 1
    stream.close()
    for _ in range(100):
        time.sleep(0.1)
        if threading.active_count() == before:
            return
    raise AssertionError("The thread still generates.")
