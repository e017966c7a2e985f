"""The training commands on a tiny saved model, from invented prompts to a head that drafts."""

from __future__ import annotations

import importlib.util
import json
import re
import resource
import signal
import subprocess
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

import zoo
from command_line import error_line, run
from hf_specdec import (
    AutoSpeculativeModelForCausalLM,
    DFlashConfig,
    DFlashHead,
    Eagle3Head,
    EagleConfig,
    EagleHead,
    InvalidConfigError,
    MedusaConfig,
    MedusaHeads,
    SpeculativeGenerationMixin,
    cli,
    load_head,
)
from hf_specdec.cli.parameters import OBJECT_EXAMPLES
from hf_specdec.cli.training_run import choose_mask_token
from hf_specdec.training import (
    Conversation,
    DFlashTrainingConfig,
    EagleTrainingConfig,
    FeatureStore,
    MedusaTrainingConfig,
    capture_features,
    read_conversations,
)
from launched import launch
from trained import CLI

Patch = pytest.MonkeyPatch
Captured = pytest.CaptureFixture[str]


@pytest.fixture
def talks(tmp_path: Path) -> Path:
    path = tmp_path / "talks.jsonl"
    given = [([5, 6, 7], [8, 9]), ([10, 11], [12, 13, 14, 15, 16]), ([20], [21, 22])]
    rows = [{"prompt_ids": prompt, "response_ids": answer} for prompt, answer in given * 8]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.mark.slow
def test_from_nothing_to_a_head_that_drafts(saved: Path, tmp_path: Path, monkeypatch: Patch, capsys: Captured) -> None:
    """The whole way: distill --invent, train eagle on captured features, tree, generate."""
    assert run(monkeypatch, "distill", "--model", saved, "--invent", 6, "--output", tmp_path / "data", "--json",
               "--max-new-tokens", 16, "--temperature", 0, "--dtype", "float32") == 0  # fmt: skip
    told = json.loads(capsys.readouterr().out)
    assert told["conversations"] == 6
    assert told["answer_tokens"] > 6
    train = ["--model", saved, "--data", tmp_path / "data", "--max-steps", 12, "--batch-size", 2, "--dtype", "float32"]
    assert run(monkeypatch, "train", "eagle", *train, "--features", tmp_path / "features", "--draft-vocab-size", 50,
               "--aligned-steps", 2, "--output", tmp_path / "head", "--json") == 0  # fmt: skip
    captured = capsys.readouterr()
    told = json.loads(captured.out.strip().splitlines()[-1])
    assert 1 <= told["predicted_tau"] <= 3
    assert "GB of features" in captured.err
    assert (tmp_path / "head" / "training.png").stat().st_size > 1000
    assert isinstance(load_head(tmp_path / "head"), Eagle3Head)
    assert run(monkeypatch, "tree", "--model", saved, "--drafter", tmp_path / "head", "--data", tmp_path / "data",
               "--output", tmp_path / "tree", "--max-nodes", 8, "--top-k", 4, "--plot", tmp_path / "tree.png",
               "--dtype", "float32") == 0  # fmt: skip
    assert "expected tau" in capsys.readouterr().out
    assert (tmp_path / "tree.png").exists()
    config = load_head(tmp_path / "tree").config
    assert config.num_draft_tokens == len(config.tree) + 1
    check_answers(saved, tmp_path / "tree")


def check_answers(model_path: Path, head: Path) -> Any:
    """Load a head with `load_drafter`, compare answers with plain ones, and return the head read again."""
    model: Any = SpeculativeGenerationMixin.attach(AutoModelForCausalLM.from_pretrained(model_path))
    drafter = model.load_drafter(head)
    ids = torch.tensor([[5, 6, 7], [10, 11, 12]])
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(ids, **options)
    for speculative in (drafter.method, "auto"):
        assert torch.equal(plain, model.generate(ids, speculative=speculative, **options))
    return load_head(head)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "kind", "fields"),
    [
        ("medusa --num-heads 2", MedusaHeads, {}),
        ("medusa --num-heads 2 --own-lm-head --draft-vocab-size 40", MedusaHeads, {}),
        ("medusa --num-heads 2 --joint", MedusaHeads, {"base_model_name_or_path": "./model"}),
        ("eagle --version 1", EagleHead, {}),
        ('eagle --head-fields {"fc_norm":true,"norm_output":true}', Eagle3Head, {"norm_output": True}),
        ("dflash", DFlashHead, {"block_size": 8, "num_hidden_layers": 2, "causal": False, "markov_rank": 0,
                                "mask_token_id": 95, "sample_from_anchor": False, "num_target_layers": 4}),
        ("dflash --causal --mask-token-id 50 --block-size 3", DFlashHead, {"causal": True, "mask_token_id": 50}),
        ('dflash --markov-rank 2 --head-fields {"markov_head_type":"rnn"}', DFlashHead,
         {"markov_head_type": "rnn", "sample_from_anchor": True, "confidence_head": False}),
        ("dflash --confidence --random-start", DFlashHead,
         {"confidence_head": True, "confidence_with_markov": False, "sample_from_anchor": False}),
        ('dflash --features NEW --head-fields {"aux_hidden_state_layer_ids":[-1,2,2],"qk_norm":false}', DFlashHead,
         {"aux_hidden_state_layer_ids": [-1, 2, 2], "qk_norm": False}),
    ],
)  # fmt: skip
def test_every_kind_of_head(
    saved: Path, talks: Path, tmp_path: Path, monkeypatch: Patch, capsys: Captured, command: str, kind: type,
    fields: dict[str, Any],
) -> None:  # fmt: skip
    more, given = tmp_path / "more.json", files_of(command, tmp_path, {"NEW": tmp_path / "features"})
    more.write_text(json.dumps({"logging_steps": 1, "gradient_accumulation_steps": 2}))
    assert run(monkeypatch, "train", *given, "--model", saved, "--data", talks, "--output", tmp_path / "head",
               "--max-steps", 3, "--batch-size", 2, "--dtype", "float32", "--arguments", more) == 0  # fmt: skip
    streams = capsys.readouterr()
    assert "predicted_tau" in streams.out
    copied = ("eagle" in given and "--version" not in given) or ("dflash" in given and "--random-start" not in given)
    assert ("The head starts from" in streams.err) == copied
    target = tmp_path / "head" / "model" if "--joint" in given else saved
    head = check_answers(target, tmp_path / "head")
    assert isinstance(head, kind)
    assert {name: getattr(head.config, name) for name in fields} == fields
    if "--joint" in given:
        again = AutoSpeculativeModelForCausalLM.from_pretrained(tmp_path / "head")
        assert torch.equal(again.lm_head.weight, AutoModelForCausalLM.from_pretrained(target).lm_head.weight)
        assert again.drafters


def files_of(command: str, folder: Path, names: dict[str, Path]) -> list[str]:
    """The words of a command, with a file in the place of a recipe, and paths in the place of names."""
    words = []
    for word in command.split():
        if word.startswith("{") and words[-1] == "--recipe":
            (folder / "object.json").write_text(word)
            word = str(folder / "object.json")
        words.append(str(names.get(word, word)))
    return words


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_a_head_goes_on_with_the_openings_of_answers(
    saved: Path, talks: Path, tmp_path: Path, monkeypatch: Patch, kind: str
) -> None:
    """A second run from the head of the first, on features that were captured for that one, stopped and resumed."""
    common = ["--model", saved, "--data", talks, "--features", tmp_path / "features", "--batch-size", 2]
    (tmp_path / "recipe.json").write_text(json.dumps({"answer_tokens": 2}))
    (tmp_path / "save.json").write_text(json.dumps({"save_steps": 2}))
    assert run(monkeypatch, "train", kind, *common, "--output", tmp_path / "first", "--max-steps", 2) == 0
    captured = {path: path.stat().st_mtime_ns for path in (tmp_path / "features").rglob("*.safetensors")}
    second = ["train", kind, *common, "--output", tmp_path / "second", "--initial-head", tmp_path / "first",
              "--recipe", tmp_path / "recipe.json", "--arguments", tmp_path / "save.json"]  # fmt: skip
    assert run(monkeypatch, *second, "--max-steps", 2) == 0
    assert captured == {path: path.stat().st_mtime_ns for path in (tmp_path / "features").rglob("*.safetensors")}
    before, after = (load_head(tmp_path / name) for name in ("first", "second"))
    assert after.config.recipe["answer tokens"] == 2
    assert any(not torch.equal(*pair) for pair in zip(before.parameters(), after.parameters(), strict=True))
    whole, cut = (json.loads((tmp_path / name / "run.json").read_text())["data"] for name in ("first", "second"))
    assert cut["conversations"] == whole["conversations"]
    assert cut["tokens"] < whole["tokens"]
    assert run(monkeypatch, *second, "--max-steps", 4) == 0  # the same run goes on


@pytest.fixture
def no_model(monkeypatch: Patch) -> None:
    """Whoever loads the weights of a target has begun to work."""

    def load_target(*_: Any, **__: Any) -> Any:
        raise AssertionError("a target was loaded")

    monkeypatch.setattr("hf_specdec.cli.training_run.load_target", load_target)


def without(monkeypatch: Patch, package: str) -> None:
    """As if a package were not installed."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == package else find_spec(name))


MISTAKES = r"""
eagle --draft-vocab-size 97 | from 1 to the target's 96 tokens, got 97
eagle --head-fields {"fc_norms":true} | has no field 'fc_norms'. Did you mean 'fc_norm'
eagle --head-fields {"num_attention_heads":3,"num_key_value_heads":2} | must divide
eagle --head-fields {"hidden_size":4096,"head_dim":128} | needs a target with hidden_size 4096
eagle --head-fields {"tree":[[0,0]]} | `tree` must be
eagle --head-fields {"head_dim":262144,"num_attention_heads":4096,"num_key_value_heads":4096} | of memory is free
eagle --arguments {"bf16":true,"fsdp":"full_shard"} | there is only one
eagle --arguments {"learningrate":1} | training arguments are invalid
eagle --arguments TALKS | Expected a JSON object such as {"bf16": true}.
eagle --arguments {"bf16":yes} | it is not JSON: Expecting value: line 1 column 9 (char 8). Expected a JSON object
eagle --seed 4294967296 | seed
eagle --learning-rate nan | learning-rate
eagle --max-steps 0 | '--max-steps': must be at least 1
eagle --version 7 | '--version': must be 1 or 3, got 7
eagle --version 2 | EAGLE-2
eagle --aligned-steps 65 | must be at most 64
eagle --recipe {"aligned_steps":65} | must be an integer from 1 to 64, got 65
eagle --features OTHER | is not empty and holds no captured features
eagle --features TALKS/below | is a file
eagle --output OTHER | holds README.md, which was not trained by this command
eagle --output TALKS | is a file
eagle --output MODEL | was not trained by this command
eagle --model /nowhere | '/nowhere' cannot be loaded: there is no such directory.
eagle --data /nowhere.jsonl | does not exist
eagle --initial-head STRANGER | needs a target with vocab_size 64
eagle --initial-head MODEL | not a head in a known layout
eagle --initial-head STRANGER --draft-vocab-size 40 | draft_vocab_size would be ignored
eagle --initial-head STRANGER --random-start | Drop one of them
medusa --num-heads 65 | must be at most 64
medusa --head-fields {"num_head":3} | Did you mean 'medusa_num_heads'
medusa --initial-head STRANGER | must be Medusa heads, got EagleHead
medusa --initial-head STRANGER --num-heads 2 | medusa_num_heads would be ignored
medusa --recipe {"soft_tokens":true} | has no field 'soft_tokens'
medusa --recipe {"soft_labels":false} --joint | --joint cannot be combined
medusa --held-out 3 --joint | --joint cannot be combined
medusa --joint --output OTHER | holds model, where --joint saves the target
dflash --initial-head BLOCK --markov-rank 4 | markov_rank, sample_from_anchor would be ignored
dflash --initial-head BLOCK --causal --confidence | causal, confidence_head would be ignored
dflash --initial-head STRANGER | must be a block head, got EagleHead
dflash --mask-token-id 96 | `mask_token_id` 96 is outside the vocabulary of 96
dflash --block-size 65 | block-size
dflash --anchors 0 | anchors
dflash --head-fields {"blocksize":4} | Did you mean 'block_size'
dflash --head-fields {"aux_hidden_state_layer_ids":[1,5]} | hidden states 0 to 4, the head reads [1, 5]
dflash --head-fields {"sliding_window":4,"layer_types":["sliding_attention","sliding_attention"]} | has a sliding
"""
"""Arguments of `train`, and a part of what is said of them; the object of a recipe stands for a file with it."""


@pytest.mark.parametrize("mistake", MISTAKES.strip().splitlines())
def test_training_refuses_before_it_loads_the_target(
    mistake: str, saved: Path, talks: Path, tmp_path: Path, monkeypatch: Patch, capsys: Captured, no_model: None
) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4}
    EagleHead(EagleConfig(vocab_size=64, **sizes)).save_pretrained(tmp_path / "stranger")
    if "BLOCK" in mistake:
        config = DFlashConfig(vocab_size=96, aux_hidden_state_layer_ids=[1], head_dim=8, **sizes)
        DFlashHead(config).save_pretrained(tmp_path / "block")
    other = tmp_path / "other"
    (other / "model").mkdir(parents=True)
    (other / "README.md").write_text("mine")
    names = {"MODEL": saved, "TALKS": talks, "TALKS/below": talks / "below", "STRANGER": tmp_path / "stranger",
             "OTHER": other, "BLOCK": tmp_path / "block"}  # fmt: skip
    arguments, message = mistake.split(" | ")
    given = files_of(arguments, tmp_path, names)
    for option, value in (("--model", saved), ("--data", talks), ("--output", tmp_path / "out")):
        given += [] if option in given else [option, str(value)]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert run(monkeypatch, "train", *given) == 2
    line = error_line(capsys.readouterr().err)
    assert line.startswith("hf-specdec: ")
    assert message in line
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # kB: nothing large was made
    assert not (tmp_path / "out").exists()
    assert (other / "README.md").read_text() == "mine"


@pytest.mark.parametrize(
    ("kind", "config", "recipe"),
    [
        ("medusa", MedusaConfig, MedusaTrainingConfig),
        ("eagle", EagleConfig, EagleTrainingConfig),
        ("dflash", DFlashConfig, DFlashTrainingConfig),
    ],
)
def test_the_help_of_a_kind_names_its_own_fields(kind: str, config: Any, recipe: Any) -> None:
    shown = CliRunner().invoke(cli.app, ["train", kind, "--help"], env={"COLUMNS": "80"}).output
    options = {part.split()[0]: " ".join(part.split()) for part in re.split(r"\n  (?=--)", shown)}
    for option, known in (("--head-fields", vars(config())), ("--recipe", asdict(recipe()))):
        example = OBJECT_EXAMPLES[option]
        named = re.search(r"\((.*?)(, \.\.\.)?\)", options[option])[1].split(", ")  # type: ignore[index]
        assert len(named) >= 2
        assert {*named, *json.loads(example)} <= known.keys()


@pytest.mark.parametrize("name", ["run.json", "trainer_state.json"])
def test_state_of_another_program_is_not_written_over(
    saved: Path, talks: Path, tmp_path: Path, monkeypatch: Patch, capsys: Captured,
    no_model: None, name: str,
) -> None:  # fmt: skip
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text('{"mine": 1}')
    for kind in ("eagle", "medusa"):
        assert run(monkeypatch, "train", kind, "--model", saved, "--data", talks, "--output", tmp_path / "out") == 2
        assert f"holds a {name} that was not written by this command" in error_line(capsys.readouterr().err)
    assert [(path.name, path.read_text()) for path in (tmp_path / "out").iterdir()] == [(name, '{"mine": 1}')]


def test_dropping_every_conversation_is_refused_before_the_target_is_loaded(
    saved: Path, tmp_path: Path, monkeypatch: Patch, capsys: Captured, no_model: None
) -> None:
    talk = Conversation.of([5], [8, 9] * 8)  # repeats itself
    row = json.dumps({"input_ids": talk.input_ids, "loss_mask": talk.loss_mask})
    (tmp_path / "talks.jsonl").write_text(f"{row}\n{row}")
    for kind in ("eagle", "medusa"):
        assert run(monkeypatch, "train", kind, "--model", saved, "--data", tmp_path / "talks.jsonl", "--output",
                   tmp_path / "out", "--drop-seen", 0.1) == 2  # fmt: skip
        assert "--drop-seen 0.1 leaves none of 2 conversations" in capsys.readouterr().err
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("package", "command"),
    [
        ("datasets", ["distill", "--invent", "3", "--output", "OUT"]),
        ("peft", ["train", "medusa", "--joint", "--data", "TALKS", "--output", "OUT"]),
        ("matplotlib", ["tree", "--drafter", "HEAD", "--data", "TALKS", "--output", "OUT", "--plot", "OUT.png"]),
    ],
)
def test_a_missing_package_is_told_first(
    saved: Path, talks: Path, tmp_path: Path, monkeypatch: Patch, capsys: Captured,
    no_model: None, package: str, command: list[str],
) -> None:  # fmt: skip
    without(monkeypatch, package)
    names = {"TALKS": talks, "OUT": tmp_path / "out", "OUT.png": tmp_path / "out.png"}
    assert run(monkeypatch, *[names.get(a, a) for a in command], "--model", saved) == 2
    assert f"needs the package {package}. Run: pip install 'hf-specdec[training]'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_without_matplotlib_a_run_ends_without_its_picture(
    saved: Path, talks: Path, tmp_path: Path, monkeypatch: Patch, capsys: Captured
) -> None:
    """The head is there, the log is a table, and the head names no path of this machine but says so."""
    without(monkeypatch, "matplotlib")
    more = tmp_path / "more.json"
    more.write_text(json.dumps({"logging_steps": 1}))
    assert run(monkeypatch, "train", "medusa", "--data", talks, "--model", saved, "--output", tmp_path / "head",
               "--max-steps", 2, "--num-heads", 1, "--arguments", more) == 0  # fmt: skip
    streams = capsys.readouterr()
    assert "training.png was not drawn" in streams.err
    assert "--base-model-name" in streams.err
    rows = [
        line.split() for line in (streams.out + streams.err).splitlines() if "loss" in line or line[:9].strip() == "1"
    ]
    assert rows[0][:4] == ["step", "loss", "gradient", "rate"]
    assert len(rows[0]) >= 6
    assert "{'" not in streams.out + streams.err
    assert not (tmp_path / "head" / "training.png").exists()
    for text in ((tmp_path / "head" / name).read_text() for name in ("config.json", "README.md")):
        assert str(tmp_path) not in text
    assert load_head(tmp_path / "head").config.base_model_name_or_path is None


@pytest.mark.slow
def test_a_run_of_other_settings_is_refused_before_the_target_is_loaded(
    saved: Path, talks: Path, tmp_path: Path, monkeypatch: Patch, capsys: Captured
) -> None:
    more = tmp_path / "more.json"
    more.write_text(json.dumps({"save_steps": 2}))
    command = ["train", "eagle", "--data", talks, "--model", saved, "--output", tmp_path / "head", "--max-steps", 1,
               "--arguments", more, "--base-model-name", "org/target"]  # fmt: skip
    assert run(monkeypatch, *command) == 0
    assert load_head(tmp_path / "head").config.base_model_name_or_path == "org/target"
    assert "The head starts from the target's lm_head" in capsys.readouterr().err
    monkeypatch.setattr("hf_specdec.cli.training_run.load_target", None)
    assert run(monkeypatch, *command, "--aligned-steps", 2) == 2
    assert "settings.aligned_steps was 4, is 2" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_is_told_before_while_and_after(
    saved: Path, talks: Path, tmp_path: Path, monkeypatch: Patch, capsys: Captured
) -> None:
    """Time, memory and disk; greedy chains on what is held out; the best head; what it is expected to bring here."""
    rows = [{"prompt_ids": [5, 6, number], "response_ids": [8, 9, number, 11, 12, 13]} for number in range(30, 54)]
    talks.write_text("\n".join(map(json.dumps, rows)))
    recipe, more = tmp_path / "recipe.json", tmp_path / "more.json"
    recipe.write_text(json.dumps({"step_decay": 0.5, "soft_tokens": False}))
    more.write_text(json.dumps({"save_steps": 2, "logging_steps": 1}))
    command = ["train", "eagle", "--data", talks, "--model", saved, "--output", tmp_path / "head", "--max-steps", 4,
               "--recipe", recipe, "--arguments", more, "--held-out", 3, "--drop-seen", 1.0, "--json",
               "--features", tmp_path / "features", "--dtype", "float32"]  # fmt: skip
    assert run(monkeypatch, *command) == 0
    streams = capsys.readouterr()
    told = json.loads(streams.out.strip().splitlines()[-1])
    assert told["held_out_tau"] == pytest.approx(1 + sum(told[f"held_out_accepted_{depth}"] for depth in range(1, 6)))
    assert "4 steps of" in streams.err
    assert "GB of disk for checkpoints" in streams.err
    assert streams.err.count("held out, step") == 2
    assert "Dropped 0 of 21 conversations" in streams.err
    assert "Estimate for this device" in streams.err or "speed-up could not be estimated" in streams.err
    head = load_head(tmp_path / "head")
    assert head.config.recipe["step decay"] == 0.5
    assert head.config.tau == {"greedy chains on held-out conversations": round(told["held_out_tau"], 2)}
    card = (tmp_path / "head" / "README.md").read_text()
    assert "(training.png)" in card
    assert "greedy chains on held-out conversations" in card
    assert len(FeatureStore(tmp_path / "features" / "held-out")) == 3
    wrong_steps = tmp_path / "wrong.json"
    wrong_steps.write_text(json.dumps({"eval_steps": 70}))
    for wrong, message in (
        (["--held-out", 24], "--held-out 24 leaves none of 24 conversations to train on"),
        (["--arguments", wrong_steps], "multiple"),
    ):
        command = ["train", "eagle", "--data", talks, "--model", saved, "--output", tmp_path / "other", *wrong]
        assert run(monkeypatch, *command) == 2
        assert message in capsys.readouterr().err
    medusa = ["train", "medusa", "--data", talks, "--model", saved, "--output", tmp_path / "other", "--held-out", 3]
    assert run(monkeypatch, *medusa, "--max-steps", 2, "--json", "--dtype", "float32") == 0
    assert json.loads(capsys.readouterr().out.strip().splitlines()[-1])["held_out_tau"] >= 1


def test_a_tree_is_written_into_the_heads_directory_or_a_new_one(
    saved: Path, talks: Path, tmp_path: Path, monkeypatch: Patch, capsys: Captured,
    no_model: None,
) -> None:  # fmt: skip
    for name in ("head", "other"):
        EagleHead(EagleConfig.for_target(AutoConfig.from_pretrained(saved))).save_pretrained(tmp_path / name)
    command = ["tree", "--drafter", tmp_path / "head", "--data", talks, "--model", saved]
    assert run(monkeypatch, *command, "--output", tmp_path / "other") == 2
    assert (
        "already holds README.md, config.json, model.safetensors, which would be overwritten"
        in capsys.readouterr().err
    )
    monkeypatch.undo()
    assert run(monkeypatch, *command, "--output", tmp_path / "head", "--dtype", "float32", "--top-k", 96) == 0
    assert isinstance(load_head(tmp_path / "head").config.tree, list)


# ------------------------------------------------------------------------------------------------------ block heads


@pytest.mark.slow
def test_from_conversations_to_a_head_that_drafts(
    saved: Path, talks: Path, tmp_path: Path, monkeypatch: Patch, capsys: Captured
) -> None:
    """DSpark's parts on captured features, with held-out conversations; then a second run continues from it."""
    rows = [{"prompt_ids": [5, 6, number], "response_ids": [8, 9, number, 11, 12, 13]} for number in range(30, 54)]
    talks.write_text("\n".join(map(json.dumps, rows)))
    more, recipe = tmp_path / "more.json", tmp_path / "recipe.json"
    more.write_text(json.dumps({"logging_steps": 1, "save_steps": 2}))
    recipe.write_text(json.dumps({"answer_tokens": 3, "slot_decay": 2.0, "soft_weight": 0.5}))
    common = ["train", "dflash", "--model", saved, "--data", talks, "--features", tmp_path / "features",
              "--batch-size", 4, "--dtype", "float32", "--arguments", more, "--held-out", 3, "--json"]  # fmt: skip
    assert run(monkeypatch, *common, "--output", tmp_path / "first", "--max-steps", 4, "--block-size", 4,
               "--num-layers", 1, "--markov-rank", 4, "--confidence", "--draft-vocab-size", 60, "--anchors", 3,
               "--base-model-name", "org/target") == 0  # fmt: skip
    streams = capsys.readouterr()
    told = json.loads(streams.out.strip().splitlines()[-1])
    assert told["held_out_tau"] == pytest.approx(1 + sum(told[f"held_out_accepted_{depth}"] for depth in range(1, 5)))
    assert "The head starts from the last layers and the final norm of the target" in streams.err
    assert "GB of features" in streams.err
    assert (tmp_path / "first" / "training.png").stat().st_size > 1000
    assert len(FeatureStore(tmp_path / "features")) == 21
    head = check_answers(saved, tmp_path / "first")
    config = head.config
    assert (config.block_size, config.num_hidden_layers, config.draft_vocab_size) == (4, 1, 60)
    assert (config.markov_rank, config.sample_from_anchor, config.max_depth) == (4, True, 4)
    assert config.confidence_head
    assert config.confidence_with_markov
    assert not config.causal
    assert config.base_model_name_or_path == "org/target"
    assert config.recipe["anchors"] == 3
    assert config.mask_token_id == 95  # the last token that no conversation contains
    captured = {path: path.stat().st_mtime_ns for path in (tmp_path / "features").rglob("*.safetensors")}
    assert run(monkeypatch, *common, "--output", tmp_path / "second", "--max-steps", 2, "--initial-head",
               tmp_path / "first", "--recipe", recipe) == 0  # fmt: skip
    assert "The head starts from" not in capsys.readouterr().err
    assert captured == {path: path.stat().st_mtime_ns for path in (tmp_path / "features").rglob("*.safetensors")}
    after = check_answers(saved, tmp_path / "second")
    assert after.config.recipe["answer tokens"] == 3
    assert after.config.mask_token_id == 95
    assert any(not torch.equal(*pair) for pair in zip(head.parameters(), after.parameters(), strict=True))
    more.write_text(json.dumps({"save_steps": 2}))
    monkeypatch.setattr("hf_specdec.cli.training_run.load_target", None)
    assert run(monkeypatch, *common, "--output", tmp_path / "second", "--initial-head", tmp_path / "first") == 2
    assert "settings.answer_tokens was 3, is 0" in capsys.readouterr().err


def test_the_mask_token_occurs_in_no_conversation() -> None:
    tokenizer, every = zoo.chat_tokenizer(), list(range(96))
    assert choose_mask_token(tokenizer, [Conversation.of([5], [6, 7])], 100) == 99  # a row that no text uses
    assert choose_mask_token(tokenizer, [Conversation.of([5], [6, 99, 98])], 100) == 97
    assert choose_mask_token(tokenizer, [Conversation.of([95], [94, 93])], 96) == 91  # not the end of an answer
    tokenizer.add_special_tokens({"additional_special_tokens": ["w40", "w41"]})
    assert choose_mask_token(tokenizer, [Conversation.of([5], [6])], 96) == 41
    assert choose_mask_token(tokenizer, [Conversation.of([41], [6])], 96) == 40
    left = Conversation.of([], [token for token in every if token != 7])
    assert choose_mask_token(tokenizer, [left], 96) == 7
    with pytest.raises(InvalidConfigError, match=r"All tokens occur in the data.*--mask-token-id"):
        choose_mask_token(tokenizer, [Conversation.of([], every)], 96)


# ------------------------------------------------------------------------------------------------------ processes


def train_command(saved: Path, talks: Path, output: Path, more: Path) -> list[str]:
    options = ["--model", saved, "--data", talks, "--output", output, "--max-steps", 30, "--dtype", "float32",
               "--batch-size", 2, "--arguments", more, "--held-out", 0]  # fmt: skip
    return ["train", "eagle", *map(str, options)]


@pytest.mark.slow
def test_a_killed_training_goes_on_with_the_same_losses(saved: Path, talks: Path, tmp_path: Path) -> None:
    """Kill -9 after a checkpoint of the second epoch, run again: every logged loss and the weights are those of an
    undisturbed run.
    """
    more = tmp_path / "more.json"
    more.write_text(json.dumps({"logging_steps": 1, "save_steps": 5}))
    whole = [*CLI, *train_command(saved, talks, tmp_path / "whole", more)]
    subprocess.run(whole, capture_output=True, check=True)
    cut = [*CLI, *train_command(saved, talks, tmp_path / "cut", more)]
    running = subprocess.Popen(cut, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not list((tmp_path / "cut").glob("checkpoint-15/trainer_state.json")) and running.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    running.send_signal(signal.SIGKILL)
    assert running.wait() == -signal.SIGKILL, "it was killed before its end"
    assert not (tmp_path / "cut" / "model.safetensors").exists()
    subprocess.run(cut, capture_output=True, check=True)
    logs = [
        [row["loss"] for row in json.loads((tmp_path / name / "trainer_state.json").read_text())["log_history"]
         if "loss" in row] for name in ("whole", "cut")
    ]  # fmt: skip
    assert len(logs[0]) == 30
    assert logs[0] == logs[1]
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("whole", "cut")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.slow
def test_two_processes_train_one_head(saved: Path, tmp_path: Path) -> None:
    """`accelerate launch` over gloo: half the batch each, the weights of one process with the whole batch.

    Answers of one length: the mean of the processes' means is then the mean of the batch.
    """
    more, talks = tmp_path / "more.json", tmp_path / "talks.jsonl"
    rows = [
        {"prompt_ids": [3 + i, 4 + i], "response_ids": [(7 * i + j) % 80 + 5 for j in range(8)]} for i in range(24)
    ]
    talks.write_text("\n".join(map(json.dumps, rows)))
    settings = {"learning_rate": 3e-3, "warmup_steps": 0, "save_steps": 10, "save_total_limit": 3,
                "train_sampling_strategy": "sequential"}  # fmt: skip
    for name, processes in (("one", 1), ("two", 2)):
        more.write_text(json.dumps({**settings, "per_device_train_batch_size": 4 // processes}))
        told = launch(*train_command(saved, talks, tmp_path / name, more), processes=processes)
        assert told.count(f"of {processes}") == processes
    one, two = (load_file(tmp_path / name / "checkpoint-30" / "model.safetensors") for name in ("one", "two"))
    for name in one:
        torch.testing.assert_close(one[name], two[name], atol=1e-4, rtol=1e-3)
    before = load_file(tmp_path / "two" / "checkpoint-10" / "model.safetensors")
    assert (two["head.fc.weight"] - before["head.fc.weight"]).abs().max() > 0.005, "equal weights mean something"
    assert isinstance(load_head(tmp_path / "two"), Eagle3Head)


@pytest.mark.slow
def test_two_processes_share_the_capturing(saved: Path, talks: Path, tmp_path: Path) -> None:
    """Each writes its part of the files, both wait for the last, and the features are those of one process."""
    more, folder = tmp_path / "more.json", tmp_path / "features"
    more.write_text("{}")
    command = [*train_command(saved, talks, tmp_path / "head", more), "--features", str(folder)]
    told = launch(*command, "--max-steps", "1")
    assert told.count("of 2") == 2
    model: Any = AutoModelForCausalLM.from_pretrained(saved)
    layers = tuple(json.loads((folder / "features.json").read_text())["layers"])
    alone = capture_features(model, read_conversations(talks), tmp_path / "alone", layers=layers)
    together = FeatureStore(folder)
    assert len(together) == len(alone) == 24
    command = train_command(saved, talks, tmp_path / "measured", more)
    told = launch(*command, "--max-steps", "1", "--held-out", "2")
    assert told.count("held_out_tau") == 1  # told once, and both end well
    for one, other in zip(alone, together, strict=True):
        assert torch.equal(one["input_ids"], other["input_ids"])
        torch.testing.assert_close(one["features"], other["features"])
