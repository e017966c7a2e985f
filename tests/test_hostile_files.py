"""Files that others wrote, or that an interrupt left: read, or refused with the project's own errors, soon."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("datasets")

from hf_specdec import AdaptiveConfig, InvalidConfigError, SpeculativeConfig
from hf_specdec.bench import read_questions
from hf_specdec.drafters.token_recycling import TokenRecyclingDrafter
from hf_specdec.errors import CheckpointFormatError
from hf_specdec.training import head_arguments, read_conversations, read_prompts

SCRIPT = Path(__file__).parent / "hostile_files.py"
TALK = {"input_ids": [3, 4, 5], "loss_mask": [False, True, True]}


@pytest.mark.slow
def test_whatever_a_file_holds_it_is_read_or_refused() -> None:
    """Every content and place for every reader, and some hundreds at random: by a process of its own, for a C library
    may crash.
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(SCRIPT), "--count", "300", "--seed", "7"], capture_output=True, text=True,
        check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout)
    assert told["wrong"] == []
    assert told["outcomes"]["refused"] > 700
    assert told["outcomes"]["read"] > 50
    assert told["slowest_seconds"] < 5, told["slowest"]
    assert told["megabytes"] < 1000


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"input_ids": [3, "4"], "loss_mask": [0, 1]}', "line 2: `input_ids` must hold token ids"),
        ('{"input_ids": [3, -1], "loss_mask": [0, 1]}', "line 2: `input_ids` must hold token ids"),
        ('{"input_ids": [3, 4], "loss_mask": [0, 2]}', "line 2: `loss_mask` must be a list of true and false"),
        ('{"input_ids": [3, 4], "loss_mask": [1]}', "line 2: A conversation needs one loss mask entry per token"),
        ('{"input_ids": [3', "line 2 is not JSON"),
        ("[3]", "line 2 holds a list"),
        ('{"x": 1}', "line 2 is not a conversation"),
        ("[" * 10**5, "line 2 is not JSON: it is nested too deeply"),
    ],
)
def test_an_error_in_data_names_the_line(tmp_path: Path, row: str, message: str) -> None:
    for name, write in (("a.jsonl", lambda data: data), ("b.jsonl.gz", gzip.compress)):
        (tmp_path / name).write_bytes(write(f"{json.dumps(TALK)}\n{row}\n".encode()))
        with pytest.raises(InvalidConfigError) as refused:
            read_conversations(tmp_path / name)
        assert f"{tmp_path / name}, {message}" in str(refused.value)


def test_other_encodings_are_named(tmp_path: Path) -> None:
    for text, encoding, said in (
        ("wie schön\n", "utf-16", "is not UTF-8"), ("well\n", "utf-16-le", "NUL byte"),
        ("wie schön\n", "latin-1", "is not UTF-8"),
    ):  # fmt: skip
        (tmp_path / "prompts.txt").write_bytes(text.encode(encoding))
        for read in (read_prompts, read_questions):
            with pytest.raises(InvalidConfigError, match=said):
                read(tmp_path / "prompts.txt")
    (tmp_path / "prompts.txt").write_bytes("wie schön\n".encode("utf-8-sig"))
    assert read_prompts(tmp_path / "prompts.txt")[0].turns == ("wie schön",)


def test_a_json_list_and_lines_are_read_alike(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text(json.dumps([TALK, TALK], indent=1))
    (tmp_path / "lines.json").write_text(f"{json.dumps(TALK)}\n{json.dumps(TALK)}\n")
    assert read_conversations(tmp_path / "list.json") == read_conversations(tmp_path / "lines.json")
    assert len(read_conversations(tmp_path / "list.json")) == 2


def test_rows_without_an_answer_teach_nothing(tmp_path: Path) -> None:
    rows = [TALK, {"input_ids": [3, 4], "loss_mask": [False, False]}, {"input_ids": [], "loss_mask": []}]
    (tmp_path / "talks.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert len(read_conversations(tmp_path / "talks.jsonl")) == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_steps", "x"), ("num_train_epochs", [1]), ("per_device_train_batch_size", -4), ("seed", -1),
        ("seed", 2**70), ("gradient_accumulation_steps", 0), ("learning_rate", "nan"), ("learning_rate", float("nan")),
        ("logging_steps", -3), ("save_steps", 0), ("bf16", "yes"), ("accelerator_config", 1), ("fsdp_config", True),
        ("accelerator_config", "/dev/zero"), ("deepspeed", "/dev/zero"), ("fsdp_config", "nowhere.json"),
    ],
)  # fmt: skip
def test_training_arguments_that_mean_nothing(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(InvalidConfigError):
        head_arguments(tmp_path, {name: value}, use_cpu=True)


def test_training_arguments_that_mean_something(tmp_path: Path) -> None:
    values = {"max_steps": -1, "num_train_epochs": 1, "seed": 2**32 - 1, "learning_rate": 1, "warmup_steps": 0.1,
              "data_seed": None, "tf32": None}  # fmt: skip
    made = head_arguments(tmp_path, values, use_cpu=True)
    assert all(getattr(made, name) == value for name, value in values.items())


def test_tiers_and_trees_are_bounded() -> None:
    for steps in ([10**6], [2**70], list(range(1, 10**6)), [1, 2.0], [0], []):
        with pytest.raises(InvalidConfigError, match="up to 64 ascending depths from 1 to 4096"):
            AdaptiveConfig(candidate_steps=tuple(steps))
    for name in ("num_steps", "top_k", "num_draft_tokens", "max_cache_length"):
        with pytest.raises(InvalidConfigError, match=f"`{name}` must be an integer from 1 to"):
            SpeculativeConfig(**{name: 2**70})
    with pytest.raises(InvalidConfigError, match="at most 4096 paths"):
        SpeculativeConfig(tree=tuple((rank,) for rank in range(10**5)))
    with pytest.raises(InvalidConfigError, match="finite number"):
        AdaptiveConfig(up_hysteresis=float("nan"))


def test_a_table_is_measured_before_it_is_read(tmp_path: Path, llama: Any) -> None:
    drafter = TokenRecyclingDrafter(width=4, pairs=16)
    drafter.bind(llama)
    drafter.save(tmp_path / "table")
    drafter.load(tmp_path / "table")
    names = json.dumps(
        {f"t{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(10**4)}
    ).encode()
    (tmp_path / "names").write_bytes(len(names).to_bytes(8, "little") + names)
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "names", tmp_path / "pipe", tmp_path, Path("/dev/zero"), tmp_path / "nowhere"):
        with pytest.raises(CheckpointFormatError):
            drafter.load(path)
    for path in (tmp_path, Path("/proc/table"), Path("a\0b"), tmp_path / "table" / "below"):
        with pytest.raises(InvalidConfigError):
            drafter.save(path)
    for fields in ({"width": 2**70}, {"pairs": 2**70}):
        with pytest.raises(InvalidConfigError, match="must be an integer from"):
            TokenRecyclingDrafter(**fields)
