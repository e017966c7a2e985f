"""Heads of strangers and unlucky machines: what a file may say, what it may be, and what a failure leaves behind."""

from __future__ import annotations

import inspect
import io
import json
import math
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel

import layouts
import zoo
from hf_specdec import (
    AutoSpeculativeModelForCausalLM,
    CheckpointFormatError,
    Eagle3Config,
    EagleConfig,
    EagleHead,
    InvalidConfigError,
    MedusaConfig,
    MedusaHeads,
    cli,
    export_head,
    load_head,
)
from hf_specdec.checkpoints.files import NotTensorsError, TorchFile, shard_names
from hf_specdec.drafters.history import AnswerHistory
from hf_specdec.drafters.token_recycling import TokenRecyclingDrafter
from hf_specdec.heads.schema import EAGLE, EAGLE3, MEDUSA, ROTARY, THIRD_PARTY_LAYER, checked
from hf_specdec.records import read_json
from hf_specdec.training import Conversation, capture_features
from trained import CLI

EXAMPLES = layouts.all_examples()
OF_EACH_LAYOUT = {example.layout: name for name, example in EXAMPLES.items()}


@pytest.fixture
def head(tmp_path: Path) -> Path:
    """A saved head of the tiny Llama."""
    config = EagleConfig.for_target(zoo.build("llama").config, base_model_name_or_path="org/model")
    EagleHead(config).save_pretrained(tmp_path / "head")
    return tmp_path / "head"


def edit(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


# ------------------------------------------------------------------------------------------------- configurations


@pytest.mark.parametrize("name", OF_EACH_LAYOUT.values())
def test_no_field_but_ours_gets_to_transformers(name: str, tmp_path: Path) -> None:
    """A kernel of another repository, in every layout, at the top and nested; and fields that cost memory."""
    folder = EXAMPLES[name].write(tmp_path / "theirs")
    nested = json.loads((folder / "config.json").read_text()).get("transformer_layer_config")
    strange = {
        **dict.fromkeys(("attn_implementation", "_attn_implementation", "experts_implementation"), "org/kernel"),
        "num_labels": 10**7,
        "auto_map": {"AutoModel": "x.Y"},
    }
    edit(folder, **strange, **({"transformer_layer_config": {**nested, **strange}} if nested else {}))
    loaded = load_head(folder)
    assert "org/kernel" not in json.dumps(loaded.config.to_dict())
    export_head(loaded, tmp_path / "ours")
    edit(tmp_path / "ours", **strange)
    for config in (
        loaded.config,
        load_head(tmp_path / "ours").config,
        AutoConfig.from_pretrained(tmp_path / "ours"),
        AutoModel.from_pretrained(tmp_path / "ours").config,
    ):
        assert config._attn_implementation != "org/kernel"
        assert len(config.id2label) == 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_draft_tokens": 10**9}, "`num_draft_tokens` must be an integer from 1 to 4096"),
        ({"num_steps": 100_000}, "`num_steps` must be an integer from 1 to 64"),
        ({"num_steps": 64, "top_k": 1000}, "more than 1048576 candidates"),
        ({"tree": [[0] * depth for depth in range(1, 1200)]}, "at most 64 deep"),
        ({"tree": [[0, 0]]}, "every path's parent in the list"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1e6}}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1e308}}, "attention_factor"),
        ({"rms_norm_eps": -5}, "`rms_norm_eps` must be a number from 1e-15 to 1, got -5"),
        ({"hidden_size": "32"}, "`hidden_size` must be an integer"),
        ({"hidden_size": True}, "`hidden_size` must be an integer"),
        ({"hidden_size": 32.0}, "`hidden_size` must be an integer"),
        ({"bias": "false"}, "`bias` must be true or false, got 'false'"),
        ({"bias": 0}, "`bias` must be true or false, got 0"),
        ({"num_key_value_heads": 3}, "must divide `num_attention_heads` 4"),
        ({"head_dim": 7}, "`head_dim` must be even"),
        ({"vocab_size": -1}, "`vocab_size` must be an integer from 1"),
        ({"recipe": {"a": {"b": 1}}}, "`recipe` must be an object with at most 100"),
        ({"base_model_name_or_path": "x" * 501}, "at most 500 characters"),
        ({"base_model_name_or_path": ["org/model"]}, "must be text"),
    ],
)
def test_a_field_has_a_type_and_a_range(head: Path, fields: dict[str, Any], message: str) -> None:
    edit(head, **fields)
    with pytest.raises(CheckpointFormatError, match=message):
        load_head(head)
    with pytest.raises(InvalidConfigError, match=message):
        AutoConfig.from_pretrained(head)


def test_every_field_of_our_configurations_has_a_rule() -> None:
    for own, rules in (
        (EagleConfig.__annotations__, EAGLE),
        ({**EagleConfig.__annotations__, **Eagle3Config.__annotations__}, EAGLE3),
        (list(inspect.signature(MedusaConfig).parameters)[:-1], MEDUSA),
    ):
        assert set(own) - {"rules"} <= set(rules)
    assert checked({"bias": True, "unknown": 1, "sliding_window": None}, EAGLE) == {
        "bias": True, "sliding_window": None,
    }  # fmt: skip


def test_a_tree_has_at_most_a_million_candidates() -> None:
    assert checked({"num_steps": 64, "top_k": 129}, EAGLE)
    for fields in ({"num_steps": 2, "top_k": 1024}, {"num_steps": 64, "top_k": 130}):
        with pytest.raises(InvalidConfigError, match="more than 1048576 candidates"):
            checked(fields, EAGLE)
    assert checked({"top_k": 1024}, EAGLE) == {"top_k": 1024}


def test_huge_values_are_no_weights(head: Path) -> None:
    tensors = load_file(head / "model.safetensors")
    for value in (float("inf"), float("nan"), -1e30, 7e4):
        changed = {name: tensor.clone() for name, tensor in tensors.items()}
        changed["fc.weight"][0, 0] = value
        save_file(changed, head / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(CheckpointFormatError, match="not finite, or larger than 65504"):
            load_head(head)


# ------------------------------------------------------------------------------------------------- trust


def test_trust_in_a_head_is_none_in_the_target_that_it_names(head: Path) -> None:
    with pytest.raises(InvalidConfigError, match=r"would run code from org/model.*names.*drafter="):
        AutoSpeculativeModelForCausalLM.from_pretrained(head, trust_remote_code=True)


@pytest.mark.parametrize("nested", [False, True])
def test_a_target_whose_config_asks_for_kernels_is_refused(tmp_path: Path, nested: bool) -> None:
    zoo.build("llama").save_pretrained(tmp_path)
    kernel = {"_attn_implementation": "org/kernel"}
    edit(tmp_path, **({"text_config": kernel} if nested else kernel))
    with pytest.raises(CheckpointFormatError, match="loads code from another repository"):
        AutoSpeculativeModelForCausalLM.from_pretrained(tmp_path)


def test_what_a_terminal_would_obey_is_escaped(
    head: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(head, base_model_name_or_path="\x1b[2Jorg/\u202emodel\x07")

    def inspected(*options: str) -> int:
        monkeypatch.setattr(sys, "argv", ["hf-specdec", "inspect", str(head), *options])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return int(ended.value.code or 0)

    assert inspected() == inspected("--json") == 0
    edit(head, hidden_act="\x1b]0;title\x07")
    assert inspected() == 2
    streams = capsys.readouterr()
    shown = streams.out + streams.err
    assert not set("\x1b\x07\u202e") & set(shown)
    assert "\\x1b[2Jorg" in shown


# ------------------------------------------------------------------------------------------------- kinds of files


def test_files_are_regular_and_inside_their_directory(head: Path, tmp_path: Path) -> None:
    weights = head / "model.safetensors"
    outside = tmp_path / "outside"
    shutil.move(weights, outside)
    weights.symlink_to(outside)
    with pytest.raises(CheckpointFormatError, match="a link to a file outside its directory"):
        load_head(head)
    weights.unlink()
    os.mkfifo(weights)
    with pytest.raises(CheckpointFormatError, match="is not a regular file"):
        load_head(head)
    weights.unlink()
    (head / "inside").mkdir()
    shutil.move(outside, head / "inside" / "weights")
    weights.symlink_to("inside/weights")
    assert load_head(head).layout == "hf-specdec"
    shutil.copytree(head, tmp_path / "other")
    for subfolder in ("../other", str(tmp_path / "other"), "inside/../../other"):
        with pytest.raises(CheckpointFormatError, match="is outside"):
            load_head(head, subfolder=subfolder)
    with pytest.raises(CheckpointFormatError, match="is outside the repository"):
        load_head("org/head", subfolder="../other")


def test_a_file_is_read_up_to_its_most_bytes(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"a": 1}')
    assert read_json(path, 8) == {"a": 1}
    with pytest.raises(InvalidConfigError, match="larger than 7 bytes"):
        read_json(path, 7)
    for size, read, error in (
        (4 * 2**20, read_json, InvalidConfigError),
        (64 * 2**20, shard_names, CheckpointFormatError),
    ):
        os.truncate(path, size + 1)
        with pytest.raises(error, match=f"larger than {size} bytes"):
            read(path)


def test_the_hubs_cache_may_link_to_its_blobs(head: Path, tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--org--head" / "snapshots" / "abc", tmp_path / "models--org--head" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in head.iterdir():
        shutil.copy(file, blobs / f"hash-of-{file.name}")
        (snapshot / file.name).symlink_to(f"../../blobs/hash-of-{file.name}")
    assert load_head(snapshot).layout == "hf-specdec"


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_list_of_tokens_is_a_regular_file(head: Path, tmp_path: Path, kind: str) -> None:
    path = Path("/dev/zero")
    if kind == "pipe":
        path = tmp_path / "freq.pt"
        os.mkfifo(path)
    with pytest.raises(CheckpointFormatError, match="not a regular file"):
        load_head(head, hot_tokens=path)


# ------------------------------------------------------------------------------------------------- torch's files


@pytest.mark.parametrize("archive", [True, False])
@pytest.mark.parametrize("protocol", [2, 4])
def test_tensors_are_read_as_torch_reads_them(archive: bool, protocol: int, tmp_path: Path) -> None:
    shared = torch.randn(12)
    tensors = {
        "whole": shared, "part": shared[3:9].view(2, 3), "scalar": torch.tensor(3.0), "none": torch.zeros(0, 4),
        "parameter": torch.nn.Parameter(torch.randn(2, 2)), "ids": torch.arange(5), "bits": torch.ones(3).bool(),
        "half": torch.randn(4).half(), "brain": torch.randn(4).bfloat16(), "double": torch.randn(2).double(),
        "bytes": torch.arange(3, dtype=torch.uint8), "one": torch.randn(4, 1).expand(4, 1),
    }  # fmt: skip
    path = tmp_path / "file.pt"
    for content in (tensors, torch.nn.Linear(3, 2).state_dict(), [3, 1, 2], torch.arange(4)):
        torch.save(content, path, _use_new_zipfile_serialization=archive, pickle_protocol=protocol)
        read = TorchFile(path.open("rb"))
        if isinstance(content, dict):
            assert list(read.content) == list(content)
            for name, tensor in content.items():
                assert torch.equal(read.read(read.content[name]), tensor)
                assert read.read(read.content[name]).dtype == tensor.dtype
        elif isinstance(content, list):
            assert read.content == content
        else:
            assert torch.equal(read.read(read.content), content)


def test_many_tensors_of_one_storage_are_not_many_times_its_memory(tmp_path: Path) -> None:
    """Blocks that are tied are fine; two thousand views of four megabytes would be eight gigabytes."""
    block = torch.randn(1000, 1000)
    torch.save({str(i): block for i in range(4)}, tmp_path / "tied.pt")
    assert len(TorchFile((tmp_path / "tied.pt").open("rb")).content) == 4
    torch.save({str(i): block for i in range(2000)}, tmp_path / "many.pt")
    with pytest.raises(NotTensorsError, match="more than 4 times its own size"):
        TorchFile((tmp_path / "many.pt").open("rb"))


STORAGE, NUMEL = object(), 6


class View:
    """Pickled as torch pickles a tensor: an offset, a shape and strides in a storage of six numbers."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __reduce__(self) -> Any:
        return torch._utils._rebuild_tensor_v2, (STORAGE, *self.arguments, False, OrderedDict())


class ViewPickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        return ("storage", torch.FloatStorage, "0", "cpu", NUMEL) if value is STORAGE else None


def write_views(path: Path, *views: View) -> None:
    """An archive as torch writes it."""
    stream = io.BytesIO()
    ViewPickler(stream, protocol=2).dump({str(number): view for number, view in enumerate(views)})
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/data.pkl", stream.getvalue())
        archive.writestr("x/data/0", torch.arange(float(NUMEL)).numpy().tobytes())


@pytest.mark.parametrize(
    ("offset", "shape", "strides", "message"),
    [
        (0, (2, 3), (3, 1), None),
        (5, (1,), (1,), None),
        (0, (1, 6), (77, 1), None),  # of a single entry the stride says nothing
        (0, (0, 5), (9, 9), None),  # nor does any of no entries
        (6, (0,), (1,), None),
        (0, (1,) * 8, (1,) * 8, None),
        (0, (1,) * 9, (1,) * 9, "invalid arguments"),
        (1, (2, 3), (3, 1), "exceeds its storage"),
        (7, (0,), (1,), "exceeds its storage"),
        (-1, (1,), (1,), "invalid arguments"),
        (0, (2, 3), (1, 2), "not contiguous"),
        (0, (2, 3), (3,), "broken"),
        (0, (2,), (1, 1), "broken"),
        (0, (2, True), (1, 1), "invalid arguments"),
    ],
)
def test_a_tensor_is_plain_and_inside_its_storage(
    offset: int, shape: tuple[int, ...], strides: tuple[int, ...], message: str | None, tmp_path: Path
) -> None:
    write_views(tmp_path / "file.pt", View(offset, shape, strides))
    if message:
        with pytest.raises(NotTensorsError, match=message):
            TorchFile((tmp_path / "file.pt").open("rb"))
        return
    read = TorchFile((tmp_path / "file.pt").open("rb"))
    wanted = torch.arange(6.0)[offset : offset + math.prod(shape)].view(shape)
    assert torch.equal(read.read(read.content["0"]), wanted)


def test_a_file_swapped_while_it_is_read_changes_nothing(tmp_path: Path) -> None:
    heads = MedusaHeads(MedusaConfig(32, 64))
    export_head(heads, tmp_path / "head", format="medusa")
    path = tmp_path / "head" / "medusa_lm_head.pt"
    read = TorchFile(path.open("rb"))
    torch.save({"other": torch.zeros(3)}, tmp_path / "swapped")
    (tmp_path / "swapped").replace(path)
    assert torch.equal(read.read(read.content["0.0.linear.weight"]), heads.state_dict()["heads.0.0.linear.weight"])


# ------------------------------------------------------------------------------------------------- whole files


def test_saving_fewer_shards_takes_the_others_away(tmp_path: Path) -> None:
    large = EagleHead(EagleConfig.for_target(zoo.build("llama").config))
    large.save_pretrained(tmp_path, max_shard_size="8KB")
    assert len(list(tmp_path.glob("model-*"))) > 1
    (tmp_path / "README.md").write_text("mine")
    (tmp_path / "notes.txt").write_text("mine, too")
    large.save_pretrained(tmp_path)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["README.md", "config.json", "model.safetensors", "notes.txt"]
    assert (tmp_path / "README.md").read_text() == "mine"
    load_head(tmp_path)


def limited(size: int) -> None:
    """No file of this process may grow larger: as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
@pytest.mark.parametrize("saver", ["head", "export", "table", "features", "history"])
def test_a_full_disk_is_an_error_of_the_package(saver: str, tmp_path: Path) -> None:
    """Out of every saver, with nothing left behind; in a process whose files may not grow beyond 1,500 bytes."""
    model = zoo.build("llama")
    head, table, history = EagleHead(EagleConfig.for_target(model.config)), TokenRecyclingDrafter(), AnswerHistory()
    table.bind(model)
    history.add(range(2000))
    folder = tmp_path / "out"
    save = {
        "head": lambda: head.save_pretrained(folder), "table": lambda: table.save(folder),
        "export": lambda: export_head(head, folder, "eagle"),
        "features": lambda: capture_features(model, [Conversation.of([3] * 200, [4])], folder),
        "history": lambda: history.save(folder),
    }[saver]  # fmt: skip
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        limited(1500)
        try:
            save()
        except InvalidConfigError as error:
            os._exit(0 if "cannot be written" in str(error) and not list(tmp_path.rglob("*.partial")) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


TRAIN = ["train", "eagle", "--data", "TALKS", "--output", "OUT", "--model", "MODEL", "--max-steps", "2"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "size", "leaves_output"),
    [
        (["convert", "HEAD", "OUT", "--format", "eagle"], 4000, False),
        pytest.param(["convert", "HEAD", "OUT"], 4000, False, marks=pytest.mark.slow),
        pytest.param(["distill", "--invent", "4", "--output", "OUT", "--model", "MODEL", "--max-new-tokens", "40"],
                     1000, True, marks=pytest.mark.slow),
        (TRAIN, 20_000, True),
        pytest.param([*TRAIN, "--features", "FEATURES"], 1500, True, marks=pytest.mark.slow),
        pytest.param(
            ["tree", "--drafter", "HEAD", "--data", "TALKS", "--output", "OUT", "--model", "MODEL", "--top-k", "90"],
            4000, False,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["bench", "--prompts", "PROMPTS", "--model", "MODEL", "--json", "OUT", "--max-new-tokens", "4"],
            300, False,
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_a_full_disk_is_one_line_and_leaves_nothing_half(
    saved: Path, tmp_path: Path, command: list[str], size: int, leaves_output: bool
) -> None:
    EagleHead(EagleConfig.for_target(zoo.build("llama").config)).save_pretrained(tmp_path / "head")
    rows = [
        {"prompt_ids": [3 + i, 4 + i], "response_ids": [(7 * i + j) % 80 + 5 for j in range(8)]} for i in range(24)
    ]
    (tmp_path / "talks.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "prompts.jsonl").write_text('{"question_id": 1, "category": "qa", "turns": ["w05"]}')
    places = {"HEAD": "head", "OUT": "out", "MODEL": "model", "TALKS": "talks.jsonl", "FEATURES": "features",
              "PROMPTS": "prompts.jsonl"}  # fmt: skip
    arguments = [str(tmp_path / places[part]) if part in places else part for part in command]
    done = subprocess.run(
        [*CLI, *arguments], capture_output=True, text=True, check=False, preexec_fn=lambda: limited(size),
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache")},
    )  # fmt: skip
    assert done.returncode == 2, done.stderr[-2000:]
    assert "Traceback" not in done.stderr
    said = done.stderr.strip().splitlines()[-1]
    assert said.startswith("hf-specdec: A file could not be") or "cannot be written" in said
    assert not list(tmp_path.rglob("*.partial"))
    assert leaves_output or not (tmp_path / "out").exists()
    if (tmp_path / "out" / "config.json").exists():
        load_head(tmp_path / "out")


@pytest.mark.slow
def test_two_at_once_are_one_and_a_refusal(saved: Path, tmp_path: Path) -> None:
    """The second `distill` says that the first is at work; killed, the first no longer is."""
    prompts = "\n".join(json.dumps({"prompt": f"w{i:02} w05"}) for i in range(10, 40))
    (tmp_path / "prompts.jsonl").write_text(prompts)
    command = [*CLI, "distill", "--model", str(saved), "--prompts", str(tmp_path / "prompts.jsonl"), "--output",
               str(tmp_path / "out"), "--max-new-tokens", "60", "--batch-size", "1", "--temperature", "0"]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    first = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    deadline = time.monotonic() + 120
    while not (tmp_path / "out" / ".distill.lock").exists() and first.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    first.send_signal(signal.SIGSTOP)
    second = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert second.returncode == 2
    assert "Another process uses" in second.stderr
    first.send_signal(signal.SIGKILL)
    first.wait()
    third = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False, env=environment)
    assert third.returncode == 0, third.stderr[-2000:]
    assert json.loads(third.stdout)["conversations"] == 30
    assert not list((tmp_path / "out").rglob("*.partial"))
    assert not (tmp_path / "out" / ".distill.lock").exists()


WIDE, WORDS, LONG = 2**18, 2**24, 2**31 - 1
INTEGERS = {
    "vocab_size": (1, WORDS), "hidden_size": (1, WIDE), "intermediate_size": (1, 4 * WIDE),
    "num_hidden_layers": (1, 1), "num_attention_heads": (1, 4096), "num_key_value_heads": (1, 4096),
    "head_dim": (2, WIDE), "max_position_embeddings": (1, LONG), "num_draft_tokens": (1, 4096),
    "pad_token_id": (0, WORDS),
    "bos_token_id": (0, WORDS), "eos_token_id": (0, WORDS), "sliding_window": (1, LONG),
    "draft_vocab_size": (1, WORDS), "num_steps": (1, 64), "top_k": (1, 1024), "target_hidden_size": (1, WIDE),
}  # fmt: skip
MEDUSAS = {"hidden_size": (1, WIDE), "vocab_size": (1, WORDS), "medusa_num_heads": (1, 128),
           "medusa_num_layers": (1, 128), "draft_vocab_size": (1, WORDS)}  # fmt: skip
NUMBERS = {
    "rope_theta": (1e-3, 1e12), "factor": (1e-3, 1e6), "low_freq_factor": (1e-3, 1e6), "high_freq_factor": (1e-3, 1e6),
    "attention_factor": (1e-3, 1e3), "beta_fast": (1e-3, 1e6), "beta_slow": (1e-3, 1e6), "mscale": (0, 1e3),
    "mscale_all_dim": (0, 1e3), "partial_rotary_factor": (1e-3, 1),
}  # fmt: skip


def test_the_bounds_of_a_field_are_in_and_what_is_beyond_is_not() -> None:
    for rules, bounds in (
        (EAGLE, {"num_hidden_layers": (1, 1)}),
        (EAGLE3, {**INTEGERS, "num_hidden_layers": (1, 128)}),
        (MEDUSA, MEDUSAS),
        (THIRD_PARTY_LAYER, {"sliding_window": (1, LONG)}),
        (ROTARY, {"original_max_position_embeddings": (1, LONG)}),
    ):
        for name, (least, most) in bounds.items():
            for value, held in ((least, True), (most, True), (least - 1, False), (most + 1, False)):
                assert rules[name].holds(value) is held, (name, value)
    layer = {"initializer_range": (0, 10), "rms_norm_eps": (1e-15, 1)}
    for rules, bounds in (
        (ROTARY, NUMBERS),
        (EAGLE, layer),
        (THIRD_PARTY_LAYER, {"rope_theta": NUMBERS["rope_theta"]}),
    ):
        for name, (least, most) in bounds.items():
            assert rules[name].holds(least)
            assert rules[name].holds(most)
            assert not rules[name].holds(math.nextafter(least, -math.inf))
            assert not rules[name].holds(math.nextafter(most, math.inf))


def test_lists_trees_and_facts_have_a_longest() -> None:
    chain = [[0] * depth for depth in range(1, 65)]
    paths = [[rank, *more] for rank in range(1024) for more in ([], [0], [1], [2])]
    for rules, name, fits, does_not in (
        (EAGLE, "tree", "dynamic", "static"),
        (EAGLE, "tree", chain, [*chain, [0] * 65]),
        (EAGLE, "tree", [[1023]], [[1024]]),
        (EAGLE, "tree", paths[:-1], paths),
        (EAGLE, "tree", None, (0,)),
        (EAGLE, "eos_token_id", [0] * 100, [0] * 101),
        (EAGLE, "eos_token_id", [2**24], [2**24 + 1]),
        (EAGLE3, "eagle_aux_hidden_state_layer_ids", [0] * 128, [0] * 129),
        (EAGLE3, "eagle_aux_hidden_state_layer_ids", [2**16], []),
        (EAGLE3, "eagle_aux_hidden_state_layer_ids", [0], [2**16 + 1]),
        (THIRD_PARTY_LAYER, "layer_types", ["full_attention"], ["full_attention"] * 2),
        (EAGLE, "recipe", {str(n): n for n in range(100)}, {str(n): n for n in range(101)}),
        (EAGLE, "recipe", {"a": [1, None, "b", 2.5, True]}, {"a": [[1]]}),
        (EAGLE, "recipe", {"a": [0] * 100}, {"a": [0] * 101}),
        (EAGLE, "recipe", {"a": 1, "b": "x" * 500}, {"a": 1, "b": "x" * 501}),
        (EAGLE, "recipe", {"a": 1, "x" * 500: 1}, {"a": 1, "x" * 501: 1}),
        (EAGLE, "base_model_name_or_path", "x" * 500, 7),
        (EAGLE, "rope_parameters", {"rope_type": "yarn", "factor": None}, {"rope_type": "linear", "kind": 1}),
    ):
        assert rules[name].holds(fits), (name, fits)
        assert not rules[name].holds(does_not), (name, does_not)
