"""The command line on a tiny saved model: exit codes, one-line errors, JSON."""

from __future__ import annotations

import importlib.metadata
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from rich.console import Console
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

import zoo
from command_line import error_line, run
from conftest import SHIPPED_HEAD
from hf_specdec import EagleConfig, EagleHead, cli, load_head
from hf_specdec.bench import PEERS
from hf_specdec.bench.methods import SHOWN_SUFFIXES, SUFFIXES
from hf_specdec.checkpoints.sources import check_new_head
from hf_specdec.cli import demo
from hf_specdec.cli.answers import head_for
from hf_specdec.cli.bench import METHODS_HELP, OTHER_METHODS
from hf_specdec.cli.help import PAGES
from hf_specdec.cli.parameters import ALIASES, ASSISTANT_METHOD, EXPERIMENTAL, FROM_PYTHON, METHOD_NAMES, METHODS
from hf_specdec.cli.status import working
from hf_specdec.config import COMPILE_ALIASES
from hf_specdec.drafters import registry
from hf_specdec.errors import InvalidConfigError
from hf_specdec.reporting.palette import PALETTE

Patch = pytest.MonkeyPatch
Captured = pytest.CaptureFixture[str]
KINDS = ("medusa", "eagle", "dflash")
COMMAND_NAMES = list(typer.main.get_command(cli.app).commands)  # type: ignore[attr-defined]


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


@pytest.mark.slow
def test_demo_shows_speeds_tau_and_equality(model_path: Path, monkeypatch: Patch, capsys: Captured) -> None:
    options = ["--model", model_path, "--drafter", model_path / "head", "--prompt", "w5 w6 w7"]
    assert run(monkeypatch, "demo", *options, "--max-new-tokens", 20) == 0
    text = capsys.readouterr().out
    for part in ("plain generate()", "speculative='auto'", "tau", "ids equal: yes", "steps with the most tokens",
                 f"weights in float32, head: {model_path / 'head'}\n"):  # fmt: skip
        assert part in text
    with monkeypatch.context() as patch:
        for disturbs in (False, True):
            patch.setattr(demo, "is_disturbed", lambda cores, seconds, disturbs=disturbs: disturbs)
            patch.setattr(demo.OtherProcesses, "cores", lambda _: 1.5)
            assert run(patch, "demo", *options, "--max-new-tokens", 4) == 0
            assert ("Other processes used 1.5 cores meanwhile" in capsys.readouterr().out) == disturbs
    assert run(monkeypatch, "demo", *options, "--max-new-tokens", 12, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["ids_equal"]
    assert result["speculation"]["method"] == "hybrid"
    assert result["speculation"]["num_generated_tokens"] == 12


@pytest.mark.parametrize("stream", [False, True])
def test_demo_times_both_answers_with_a_streamer_or_both_without(llama: Any, monkeypatch: Patch, stream: bool) -> None:
    generate, used = llama.generate, []

    def noted(**options: Any) -> Any:
        used.append(options.get("streamer"))
        return generate(**options)

    monkeypatch.setattr(llama, "generate", noted)
    tokenizer, written = zoo.chat_tokenizer(), list[str]()
    answers = {"plain": demo.TimedAnswer(tokenizer), "speculative": demo.TimedAnswer(tokenizer, write=written.append)}
    result = demo.run(llama, tokenizer, "w05 w06", "prompt_lookup", 12, **(answers if stream else {}))
    assert used == (list(answers.values()) if stream else [None, None])
    if not stream:
        return
    plain, speculative = answers.values()
    assert "".join(written) == result.text
    assert [piece.num_tokens for piece in plain.pieces] == [1] * 12
    assert [piece.num_tokens for piece in speculative.pieces] == [1, *result.speculation.accepted_per_step[0]]
    assert plain.num_tokens == speculative.num_tokens
    assert (plain.end_time or 0) <= speculative.begin  # one after the other
    assert 0 < plain.seconds < 60


@pytest.mark.slow
def test_demo_races_in_a_terminal(model_path: Path, monkeypatch: Patch, capsys: Captured) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("hf_specdec.cli.status.Progress.start", lambda _: None)
    head = model_path / "head"
    prompt = "w5 w6 w7 w5 w6 w7 w5 w6"
    assert run(monkeypatch, "demo", "--model", model_path, "--drafter", head, "--prompt", prompt,
               "--max-new-tokens", 20) == 0  # fmt: skip
    shown = re.sub("\x1b\\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().out)
    for part in ("plain generate()", 'speculative="auto"', "20 tokens · ", "the same token ids", "Weights in float32",
                 "Draft head: head.",
                 f"hf-specdec generate --interactive --model {model_path} --drafter {head}",
                 f"hf-specdec doctor {model_path} --drafter {head}"):  # fmt: skip
        assert part in shown
    assert re.search("as fast: |slower here: ", shown)


def drawn(race: demo.RacePanels, console: Console) -> tuple[str, ...]:
    with console.capture() as captured:
        console.print(race.render())
    return tuple(re.sub("\x1b\\[[0-9;]*m", "", captured.get()).splitlines())


def streamed(answer: demo.TimedAnswer, steps: list[list[int]]) -> None:
    answer.start()
    answer.put(torch.tensor([[5, 6]]))  # the prompt
    for step in steps:
        for token in step:
            answer.put(torch.tensor([token]))
        answer.end_step()


def test_the_race_shows_one_clock_at_a_time_and_colours_steps() -> None:
    tokenizer = zoo.chat_tokenizer()
    plain, speculative = demo.TimedAnswer(tokenizer), demo.TimedAnswer(tokenizer)
    console = Console(width=80, height=20, force_terminal=True, color_system="truecolor")
    race = demo.RacePanels(console, plain, speculative, "auto")
    assert "runs after the" in drawn(race, console)[1]
    plain.start()
    assert "reading the prompt" in drawn(race, console)[1]
    streamed(plain, [[5], [6], [7]])
    assert "3 tokens" in drawn(race, console)[-1]
    assert drawn(race, console)[-1].endswith("waiting ────────────────────────────╯")
    plain.end()
    streamed(speculative, [[5], [6, 7]])
    frozen = plain.seconds
    assert f"{frozen:.1f} s · 3 tokens" in drawn(race, console)[-1]
    texts = [answer.text(colored=color) for answer, color in ((plain, False), (speculative, True))]
    assert texts[0].plain == texts[1].plain == tokenizer.decode([5, 6, 7])
    assert [(str(span.style), texts[1].plain[span.start : span.end]) for span in texts[1].spans] == [
        (PALETTE[0], speculative.pieces[1].text)
    ]
    narrow = Console(width=40, height=24, force_terminal=True)
    assert len(drawn(demo.RacePanels(narrow, plain, speculative, "auto"), narrow)) == 8  # one above the other
    streamed(speculative, [[5 + number % 9] for number in range(300)])
    assert len(drawn(race, console)) <= console.height  # the text scrolls until it is complete
    speculative.end()
    assert len(drawn(race, console)) > console.height


@pytest.mark.slow
def test_generate_is_the_same_with_and_without_speculation(
    model_path: Path, monkeypatch: Patch, capsys: Captured
) -> None:
    for method, used in (("eagle", str(model_path / "head")), ("prompt_lookup", None)):
        assert run(monkeypatch, "generate", "w5", "--model", model_path, "--drafter", model_path / "head", "--method",
                   method, "--json", "--max-new-tokens", 2) == 0  # fmt: skip
        assert json.loads(capsys.readouterr().out)["head"] == used
    for sampling in ([], ["--temperature", "0.8", "--top-p", "0.9", "--seed", "3"]):
        answers = []
        for method in ("plain", "prompt_lookup", "ngram"):
            assert run(monkeypatch, "generate", "w5 w6 w7", "--model", model_path, "--method", method, "--json",
                       "--max-new-tokens", 20, *sampling) == 0  # fmt: skip
            answers.append(json.loads(capsys.readouterr().out)["token_ids"])
        assert answers[0] == answers[1] == answers[2]


def test_generate_streams(model_path: Path, monkeypatch: Patch, capsys: Captured) -> None:
    assert run(monkeypatch, "generate", "w5 w6", "--model", model_path, "--max-new-tokens", 6) == 0
    streams = capsys.readouterr()
    assert len(streams.out.split()) == 6
    speed = r"\[6 tokens, [0-9.]+ s, [0-9.]+ tokens/s, "
    assert re.fullmatch(r"Loading the model \.\.\.\n" + speed + r"tau [0-9.]+, method auto, float32]\n", streams.err)
    options = ["--model", model_path, "--method", "plain", "--max-new-tokens", 6]
    assert run(monkeypatch, "generate", "w5 w6", *options) == 0
    assert re.fullmatch(r"Loading the model \.\.\.\n" + speed + r"method plain, float32]\n", capsys.readouterr().err)


def test_generate_shows_its_steps_in_colours(model_path: Path, monkeypatch: Patch, capsys: Captured) -> None:
    options = ["--model", model_path, "--max-new-tokens", 40, "--dtype", "float32"]
    prompt = "w5 w6 w7 w5 w6 w7 w5 w6"
    assert run(monkeypatch, "generate", prompt, "--method", "plain", *options) == 0
    plain = capsys.readouterr().out
    assert run(monkeypatch, "generate", prompt, "--colors", *options) == 0
    streams = capsys.readouterr()
    assert re.sub("\x1b\\[[0-9;]*m", "", streams.out).split() == plain.split()
    assert "tau" in streams.err


@pytest.mark.slow
def test_bench_measures_and_writes(model_path: Path, monkeypatch: Patch, capsys: Captured, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(
        json.dumps({"question_id": i, "category": c, "turns": ["w5 w6 w7 w5 w6"]})
        for i, c in enumerate(["writing", "qa", "coding"])
    ))  # fmt: skip
    code = run(monkeypatch, "bench", "--model", model_path, "--prompts", prompts, "--dtype", "float32",
               "--methods", "transformers_prompt_lookup,prompt_lookup", "--max-new-tokens", 10, "--rounds", 2,
               "--json", tmp_path / "out.json", "--drafter", model_path / "head")  # fmt: skip
    assert code == 0
    assert f"head: {model_path}" in (text := capsys.readouterr().out)
    assert "mt_bench" in text
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["head"] == str(model_path / "head")
    assert document["environment"]["dtype"] == "float32"
    assert len(document["measurements"]) == 9
    assert all(row["ids_equal"] and len(row["seconds"]) == 2 for row in document["measurements"])
    overall = {row["method"]: row for row in document["summary"] if row["category"] == "all"}
    assert overall["plain"]["speed_up"] == 1.0
    assert overall["prompt_lookup"]["ids_equal"] == 3


MISTAKES = r"""
generate hello --model /nowhere | The model '/nowhere' cannot be loaded: there is no such directory.
generate w5 --model MODEL --method eagel | Did you mean 'eagle'? Available: 'plain', 'auto',
generate w5 --model NONE --method pard | no command can load. Use it from Python
generate w5 --model NONE --method draft_model | Use hf-specdec bench with --assistant
generate w5 --model MODEL --method medusa | needs a draft head, but none is given. Give one: --drafter
generate w5 --model MODEL --method medusa --drafter HEAD | is a head for 'eagle'. Give
generate w5 --model MODEL --drafter /nowhere | The head '/nowhere' cannot be loaded: there is no such directory.
generate w5 --drafter PROMPTS | prompts.jsonl' is a file. Use a directory with config.json
generate w5 --model PROMPTS | prompts.jsonl' is a file. Give a model's directory
generate w5 --model MODEL/head | it is a draft head. Give the model that it was trained for, and
generate w5 --model BARE | its directory has no tokenizer. Save it there
generate w5 --model EMPTY | holds no config.json
generate w5 --model org/none | Connect to the Hub, or give the directory of a downloaded model.
generate ' ' --model MODEL | prompt is empty
generate --model NONE | No prompt was given. Give one, '-' to read standard input, or --interactive
generate w5 --max-new-tokens 0 | '--max-new-tokens': must be at least 1, got 0.
generate w5 --top-p 2 | '--top-p': must be at most 1, got 2.
generate w5 --seed x | '--seed': must be an integer, got x.
generate w5 --temperature x | '--temperature': must be a number, got x.
generate w5 --temperature inf | finite
generate w5 --temperature 1e-300 | must be 0 (greedy) or from 0.00001 to
generate w5 --dtype int4 | '--dtype': 'int4' is not one of
generate w5 --model NONE --num-draft-tokens 5000 | must be at most 4096
generate w5 --model NONE --top-k 5 | --top-k has no effect without sampling. Add --temp
generate w5 --model NONE --method plain --num-steps 2 | --num-steps has no effect with --method plain
generate w5 --colors --json | --colors cannot be combined with --json. Drop one of them.
generate w5 --colors --method plain | --colors cannot be combined with --method plain
generate w5 --interactive --json | --interactive cannot be combined with --json
generate w5 --num-draft x | There is no option --num-draft. Did you mean --num-draft-tokens?
generate hello world | The argument 'world' is one too many. Put the prompt in quotes: hf-specdec
demo --model MODEL --method medusa | --drafter
demo --model MODEL --prompt '' | prompt is empty
demo --method plain | always compared with plain decoding. Choose another method.
demo --metod x | There is no option --metod. Did you mean --method? See hf-specdec demo --help.
doctor --model x | There is no option --model: it is an argument. Usage: hf-specdec doctor
bench --model NONE --prompts PROMPTS --methods prompt_lookup,foo | drafter 'foo'
bench --model NONE --prompts PROMPTS --json EMPTY/no/out.json | does not exist
bench --model NONE --prompts PROMPTS --json EMPTY | is a directory
bench --model NONE --prompts PROMPTS --json PROMPTS | already exists. Give another name
bench --prompts PROMPTS --json EMPTY/a.svg --plot EMPTY/a.svg | a.svg. Give two files.
bench --model MODEL --prompts EMPTY/none.jsonl | holds no questions
bench --model MODEL --prompts EMPTY/bad.jsonl | is not a question: it has no 'category'. Expected a line
bench --model MODEL --prompts EMPTY/other.jsonl | line 2 has no prompt: {'answer': 'w6'}.
bench --model MODEL --prompts /nowhere.jsonl | cannot be read: No such file or directory.
bench --model MODEL --prompts PROMPTS --methods ' ,' | no method. Available: plain, transformers_prompt_lookup,
bench --model MODEL --prompts PROMPTS --methods auto+kernel | Did you mean +kernels?
bench --model MODEL --prompts PROMPTS --methods plain_static_compiled+kernels | is a method of transformers
bench --json | --json needs a value, such as --json results.json.
bench --rounds | --rounds needs a value.
inspect /nowhere | The head '/nowhere' cannot be loaded: there is no such directory.
inspect MODEL | not a head in a known layout
inspect org/none | Connect to the Hub, or give the directory of a downloaded head.
inspect out1 | at 'out1': it is not a local directory, and a Hub id has the form owner/name.
inspect a b | The argument 'b' is one too many. Usage: hf-specdec inspect [OPTIONS] HEAD.
convert | Missing argument 'HEAD'. Usage: hf-specdec convert [OPTIONS] HEAD OUTPUT.
convert HEAD OUT --format medusa | this is EagleHead. Formats for heads of this kind: hf-specdec, eagle;
convert HEAD OUT --format gguf | format
convert HEAD HEAD --format eagle --force | directory of the head itself
convert HEAD MODEL --format eagle --force | not a head's files
convert HEAD PROMPTS/out | is a file
convert NONE EMPTY | is not empty: it holds bad.jsonl, none.jsonl, none.txt, other.jsonl. Choose a new directory.
convert NONE HEAD | Choose a new directory, or use --force.
distill --model MODEL --prompts EMPTY/no.txt --output OUT | no.txt' does not exist.
distill --output OUT --model MODEL | There are no prompts
distill --output OUT --model MODEL --prompts EMPTY/none.txt | holds no prompts. Give another fi
doctor MODEL --round-activations | for a target in a GGUF file. Give --model FILE.gguf
generate w5 --model MODEL --round-activations | for a target in a GGUF file. Give --model FILE.gguf
distill --output OUT --model MODEL --invent 1 --round-activations | for a target in a GGUF file. Give --model FILE.gguf
distill --output OUT --model MODEL --invent 1 --round-activations --server http://localhost:1 | runs here. Drop it
tree --drafter NONE --data NONE --output OUT --plot PROMPTS | already exists. Give
tree --drafter NONE --data NONE --output OUT --plot a.xyz | an unknown suffix
tree --drafter NONE --data NONE --output OUT --top-k 1025 | at most 1024
tree --drafter /nowhere --data PROMPTS --output OUT --model MODEL | '/nowhere' cannot be loaded
train eagle | Missing options '--data', '--output'. See hf-specdec train eagle --help.
train eagle --data x | Missing option '--output'. See hf-specdec train eagle --help.
train eagle --data x --output OUT --epochs 0 | must be above 0, got 0.
train eagle --xyzzy | There is no option --xyzzy. See hf-specdec train eagle --help.
train nonsense | No such command 'nonsense'. Commands: eagle, dflash, medusa.
gen | No such command 'gen'. Did you mean 'generate'? Commands: demo, generate,
nonsense | No such command 'nonsense'. Commands: demo, generate,
"""
"""A command line, and a part of what is said of it."""


@pytest.mark.parametrize("mistake", MISTAKES.strip().splitlines())
def test_a_users_mistake_is_one_line_and_exit_code_2(
    mistake: str, model_path: Path, tmp_path: Path, monkeypatch: Patch, capsys: Captured
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name in ("empty", "bare"):
        (tmp_path / name).mkdir()
    (tmp_path / "bare" / "config.json").write_text((model_path / "config.json").read_text())
    (tmp_path / "empty" / "none.txt").touch()
    other = '{"prompt": "w5"}\n{"answer": "w6"}'
    for name, text in (("none", " "), ("bad", '{"question_id": 1}'), ("other", other)):
        (tmp_path / "empty" / f"{name}.jsonl").write_text(text)
    (tmp_path / "prompts.jsonl").write_text('{"question_id": 1, "category": "qa", "turns": ["w5"]}')
    places = {"MODEL": model_path, "HEAD": model_path / "head", "OUT": model_path / "out", "EMPTY": tmp_path / "empty",
              "BARE": tmp_path / "bare", "PROMPTS": tmp_path / "prompts.jsonl", "NONE": tmp_path / "none"}  # fmt: skip
    command, message = mistake.split(" | ")
    words = [re.sub(r"^[A-Z]+(?=/|$)", lambda found: str(places[found[0]]), word) for word in shlex.split(command)]
    assert run(monkeypatch, *words) == 2
    line = error_line(capsys.readouterr().err)
    assert line.startswith("hf-specdec: ")
    assert message in line


def test_inspect_and_convert(model_path: Path, tmp_path: Path, monkeypatch: Patch, capsys: Captured) -> None:
    assert run(monkeypatch, "convert", model_path / "head", tmp_path, "--format", "eagle", "--dtype", "float16",
               "--target", "org/target") == 0  # fmt: skip
    assert "hf-specdec -> eagle" in capsys.readouterr().err
    assert run(monkeypatch, "convert", model_path / "head", tmp_path / "other", "--format", "eagle", "--json") == 0
    done = json.loads(capsys.readouterr().out)
    assert done == {"source": "hf-specdec", "layout": "eagle", "output": str(tmp_path / "other"), "not_stored": []}
    assert run(monkeypatch, "convert", model_path / "head", tmp_path / "with its target", "--format", "eagle",
               "--model", model_path) == 0  # fmt: skip
    assert "Loading the model" in capsys.readouterr().err
    assert run(monkeypatch, "inspect", tmp_path, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["layout"], report["method"], report["dtype"]) == ("eagle", "eagle", "float16")
    assert (report["target"], report["layers_read"], report["draft_vocabulary"]) == ("org/target", [-1], None)
    assert report["files"] == {"model.safetensors": (tmp_path / "model.safetensors").stat().st_size}
    assert run(monkeypatch, "inspect", tmp_path) == 0
    shown = capsys.readouterr().out
    for words in ("EAGLE (versions 1 and 2)", "org/target", "float16", "after the final norm"):
        assert words in shown
    head = load_head(model_path / "head")
    head.config.recipe = {"answer_tokens": 64}
    head.save_pretrained(tmp_path / "trained")
    assert "also stored" not in shown
    assert run(monkeypatch, "inspect", tmp_path / "trained") == 0
    assert re.search(r"also stored\s+recipe  \(see its README.md\)", capsys.readouterr().out)


def test_a_conversation_goes_on_with_what_was_said(model_path: Path, monkeypatch: Patch, capsys: Captured) -> None:
    """A prompt opens it where one is given; every answer is the one to all that came before; the end is no error."""
    said = iter(["w8 w9", "  ", "w10"])

    def read(mark: str) -> str:
        assert mark == "> "
        try:
            return next(said)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)
    options = ["--model", model_path, "--max-new-tokens", 6, "--dtype", "float32"]
    assert run(monkeypatch, "generate", "w5 w6 w7", "--interactive", *options) == 0
    streams = capsys.readouterr()
    answers = streams.out.strip().splitlines()
    assert len(answers) == streams.err.count("tokens/s") == 3
    text = "w5 w6 w7"
    for answer, more in zip(answers, ("w8 w9", "w10", ""), strict=True):
        assert run(monkeypatch, "generate", text, "--method", "plain", "--json", *options) == 0
        assert json.loads(capsys.readouterr().out)["text"].strip() == answer.strip()
        text = f"{text} {answer.strip()} {more}"


def test_the_help_names_every_method() -> None:
    named = set(re.findall(r"\w+", METHODS)) - {"experimental"}
    own = {name for name, method in registry.methods().items() if name not in ("draft_model", "pard", "grammar")}
    assert named - {"auto", "hybrid"} == own
    assert sorted(ALIASES) == sorted(alias for row in registry.methods().values() for alias in row.aliases)
    assert own | {ASSISTANT_METHOD, *FROM_PYTHON} == set(registry.methods())
    assert {*OTHER_METHODS} - {ASSISTANT_METHOD} == set(PEERS)
    for name in (*METHOD_NAMES, *OTHER_METHODS, *SHOWN_SUFFIXES):
        assert re.search(rf"(?<!\w){re.escape(name)}\b", METHODS_HELP), name
    modes = {COMPILE_ALIASES.get(mode, mode) for mode in SUFFIXES.values()}
    assert modes == {suffix[1:] for suffix in SHOWN_SUFFIXES}


@pytest.mark.parametrize("columns", [80, 120])
def test_help_cuts_nothing_and_ends_with_a_page_that_exists(columns: int) -> None:
    """An option or a word that does not fit would end in an ellipsis."""
    for command in ([], *([name] for name in COMMAND_NAMES), *(["train", kind] for kind in KINDS)):
        shown = CliRunner().invoke(cli.app, [*command, "-h"], env={"COLUMNS": str(columns)}).output
        assert "Usage" in shown
        assert not [words for words in ("…", "<bool>", "[bold]") if words in shown], command
        text = [line for line in shown.splitlines() if "  hf-specdec " not in line]  # examples are to be copied
        assert max(map(len, text)) <= columns
        if columns == 80:
            page = text[-1].removeprefix(f"Docs: {PAGES}")
            assert (Path(__file__).parents[1] / "docs" / page).is_file(), command


def test_the_experimental_methods_are_those_of_the_page() -> None:
    page = (Path(__file__).parents[1] / "docs" / "choosing.md").read_text()
    table = page.split("\nExperimental: ")[1].split("\n\n")[1]
    assert set(re.findall(r'^\| \[`"(\w+)"', table, re.MULTILINE)) == set(EXPERIMENTAL)


def test_without_a_head_the_shipped_one_of_the_method_is_read() -> None:
    for method, name in (("medusa", "medusa"), ("dflash", "dflash"), ("eagle", "eagle3"), ("auto", "eagle3")):
        head, source = head_for([method], None, None, shown=False)
        assert source == str(SHIPPED_HEAD.parent / f"smollm2-135m-instruct-{name}")
        assert head is not None
        assert head.method == ("eagle" if method == "auto" else method)


def test_bench_reads_prompts_as_distill_does(
    model_path: Path, monkeypatch: Patch, capsys: Captured, tmp_path: Path
) -> None:
    rows = [{"prompt": "w5 w6 w7"}, {"messages": [{"role": "user", "content": "w8 w9"}]}, {"turns": ["w5", "w6"]}]
    (tmp_path / "prompts.jsonl").write_text("\n\n".join(map(json.dumps, rows)))
    command = ["bench", "--model", model_path, "--methods", "prompt_lookup+none", "--max-new-tokens", 2]
    found = [*command, "--json", tmp_path / "out.json", "--limit", 2, "--prompts", tmp_path / "prompts.jsonl"]
    assert run(monkeypatch, *found) == 0
    document = json.loads((tmp_path / "out.json").read_text())
    assert [(row["question_id"], row["category"]) for row in document["measurements"][::2]] == [
        ("1", "all"), ("3", "all"),
    ]  # fmt: skip
    assert [row["method"] for row in document["summary"]] == ["plain", "prompt_lookup+none"]
    capsys.readouterr()
    assert run(monkeypatch, *command) == 0  # without a file
    streams = capsys.readouterr()
    assert "the three prompts of hf-specdec doctor" in streams.err
    assert all(name in streams.out for name in ("prose", "reasoning", "copying"))


@pytest.mark.slow
def test_help_and_mistakes_import_neither_torch_nor_transformers() -> None:
    """So they are shown at once."""
    code = """
import sys
from hf_specdec import cli
import typer
names = typer.main.get_command(cli.app).commands
commands = [[name] for name in names] + [["train", kind] for kind in ("medusa", "eagle", "dflash")]
mistakes = ["generate w --method foo", "generate w --model /no", "demo --drafter /no", "doctor /no", "inspect /no",
            "bench --prompts /no", "distill --prompts /no --output /tmp/no", "convert /no /tmp/no",
            "tree --drafter /no --data d --output /tmp/no", *(f"train {kind} --data /no --output /tmp/no"
            for kind in ("medusa", "eagle", "dflash"))]
helps = [["--help"], ["--version"], *([*each, "--help"] for each in commands)]
for arguments in (*helps, *([*each, "--typo"] for each in commands), *map(str.split, mistakes)):
    sys.argv[1:] = arguments
    try:
        cli.main()
    except SystemExit as ended:
        assert bool(ended.code) == (arguments not in helps), arguments
    assert not {"torch", "transformers"} & sys.modules.keys(), arguments
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "--max-new-tokens" in done.stdout
    assert done.stderr.count("There is no option --typo.") == len(COMMAND_NAMES) + 3
    assert done.stderr.count("'/no' cannot be ") + done.stderr.count("'/no' does not exist.") == 11


def test_progress_is_a_plain_line_if_stderr_is_no_terminal(monkeypatch: Patch, capsys: Captured) -> None:
    with working("Counting"):
        assert capsys.readouterr().err == "Counting ...\n"  # before the work
    with working("Counting", shown=False):
        pass
    monkeypatch.setenv("RANK", "1")  # the second process of a distributed run
    with working("Counting"):
        pass
    assert capsys.readouterr().err == ""


def test_ctrl_c_is_one_line_and_exit_code_130(monkeypatch: Patch, capsys: Captured) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hf_specdec.cli.doctor._kernels", interrupt)
    assert run(monkeypatch, "env") == 130
    assert error_line(capsys.readouterr().err.strip()) == "hf-specdec: interrupted."


def test_missing_permission_names_the_path(tmp_path: Path, monkeypatch: Patch, capsys: Captured) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied", "head/config.json")

    monkeypatch.setattr("hf_specdec.checkpoints.hub.inspect_head", refuse)
    assert run(monkeypatch, "inspect", tmp_path) == 2
    assert error_line(capsys.readouterr().err).startswith("hf-specdec: head/config.json cannot be read or written: ")


@pytest.mark.parametrize("as_json", [False, True])
def test_a_terminal_shows_what_is_awaited_until_the_first_text(
    as_json: bool, model_path: Path, monkeypatch: Patch, capsys: Captured
) -> None:
    """Also with --json; stdout has nothing but the answer."""
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("FORCE_COLOR", "1")
    options = ["--model", model_path, "--max-new-tokens", 6, "--method", "plain", *(["--json"] if as_json else [])]
    assert run(monkeypatch, "generate", "w5 w6", *options) == 0
    streams = capsys.readouterr()
    assert "Loading the model" in streams.err
    assert "Generating" in streams.err
    assert "\x1b" not in streams.out
    assert bool(json.loads(streams.out)["text"] if as_json else streams.out.strip())


def test_a_head_takes_the_place_of_another_whole(
    model_path: Path, tmp_path: Path, monkeypatch: Patch, capsys: Captured
) -> None:
    """Converted into a directory with another head: refused, or that one's card and pictures go as well."""
    head = EagleHead(EagleConfig.for_target(zoo.build("llama").config, num_steps=3, tree=[[0], [1]]))
    head.save_pretrained(tmp_path / "mine")
    old = tmp_path / "old"
    assert run(monkeypatch, "convert", model_path / "head", old, "--format", "eagle") == 0
    (old / "README.md").write_text("the card of another head")
    (old / "training.png").touch()
    assert run(monkeypatch, "convert", tmp_path / "mine", old, "--format", "eagle") == 2
    refusal = capsys.readouterr().err
    assert "is not empty: it holds README.md, config.json" in refusal
    assert "or use --force." in refusal
    assert (old / "README.md").read_text() == "the card of another head"
    assert run(monkeypatch, "convert", tmp_path / "mine", old, "--format", "eagle", "--force") == 0
    assert "not stored, because eagle does not support it: tree, num_steps" in capsys.readouterr().err
    assert sorted(path.name for path in old.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    card = (old / "README.md").read_text()
    assert "EaModel.from_pretrained" in card
    assert "converted by hf-specdec to the layout `eagle`" in card
    assert load_head(tmp_path / "mine").config.tree == [[0], [1]]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("name", ["x.safetensors/x", "custom_generate/other.py", "custom_generate/sub/generate.py"])
def test_only_the_files_of_a_head_are_replaced(name: str, tmp_path: Path) -> None:
    (tmp_path / "custom_generate").mkdir()
    for file in ("config.json", "custom_generate/generate.py"):
        (tmp_path / file).touch()
    check_new_head(tmp_path, replace=True)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    for replace in (False, True):
        with pytest.raises(InvalidConfigError, match="holds "):
            check_new_head(tmp_path, replace=replace)


def test_the_version(monkeypatch: Patch, capsys: Captured) -> None:
    for option in ("--version", "-V"):
        assert run(monkeypatch, option) == 0
        assert capsys.readouterr().out == f"hf-specdec {importlib.metadata.version('hf-specdec')}\n"


def test_a_command_without_arguments_shows_its_help_and_nothing_else(monkeypatch: Patch, capsys: Captured) -> None:
    for arguments in ([], ["train"]):
        assert run(monkeypatch, *arguments) == 2
        streams = capsys.readouterr()
        assert "Usage" in streams.out + streams.err
        assert "hf-specdec: " not in streams.err


@pytest.mark.slow
def test_generating_and_inspecting_import_nothing_of_training(model_path: Path) -> None:
    """Whoever has an old peft, or none, is not bothered by it."""
    code = (
        "import sys; from hf_specdec import cli; sys.argv[1:] = {arguments}\n"
        "try: cli.main()\nexcept SystemExit as ended: assert not ended.code\n"
        "bad = [n for n in ('hf_specdec.training', 'transformers.trainer', 'peft', 'datasets', 'matplotlib') "
        "if n in sys.modules]\nassert not bad, bad"
    )
    for arguments in (["inspect", f"{model_path}/head"],
                      ["generate", "w5", "--model", str(model_path), "--max-new-tokens", "3"]):  # fmt: skip
        command = [sys.executable, "-W", "ignore", "-c", code.format(arguments=arguments)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
