"""Data, states, recipes, tiers and tables that are damaged, endless or hostile; a process of its own, with a clock.

    PYTHONPATH=tests python -W ignore tests/hostile_files.py --count 4000 --seed 0

Prints a JSON object: how many files were read, how many were refused, what was not an outcome of the project's own,
the slowest case in seconds, and the memory gained in megabytes.
"""

from __future__ import annotations

import argparse
import gzip
import json
import logging
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from datasets.utils.logging import disable_progress_bar
from pyarrow import parquet
from safetensors.torch import save_file

import zoo
from hf_specdec import AdaptiveConfig, SpeculativeConfig, SpeculativeDecodingError
from hf_specdec.bench import read_questions
from hf_specdec.drafters.token_recycling import TokenRecyclingDrafter
from hf_specdec.records import read_json
from hf_specdec.training import (
    DistillConfig,
    EagleTrainingConfig,
    FeatureStore,
    Medusa2TrainingConfig,
    MedusaTrainingConfig,
    capture_features,
    check_same_run,
    distill,
    head_arguments,
    read_conversations,
    read_prompts,
)
from hf_specdec.training.data import Conversation, check_tokens
from hf_specdec.training.feature_store import collate
from hf_specdec.training.run_setup import last_checkpoint
from hf_specdec.training.teachers import Teacher

LONGEST = 20
"""Seconds after which a case is a hang."""

VERBOSE = bool(os.environ.get("VERBOSE"))
"""Name every case before it: a crash of a C library says nothing else."""

STRANGE: list[Any] = [
    None, True, False, 0, 1, -1, 2**31, 2**63, 2**64, 2**70, -(2**70), 1e308, 1e999, float("nan"), -0.0, 0.5, "", "x",
    "5", "\ud800", "\x00", "/dev/zero", "../..", "nan", "x" * 10**5, [], [1], [None], ["x"], [[1]], [-1], [2**70],
    [True], [1.0], {}, {"a": 1}, {"role": "user"}, [{"role": "assistant", "content": None}], [{}], [10**6] * 9,
    int("9" * 4000),
]  # fmt: skip
"""Values that stand where others are expected."""

ROWS: list[dict[str, Any]] = [
    {"input_ids": [3, 4, 5, 6], "loss_mask": [False, False, True, True]},
    {"prompt_ids": [3, 4], "response_ids": [5, 6]},
    {"messages": [{"role": "user", "content": "w05"}, {"role": "assistant", "content": "w06 w07"}]},
]
PROMPTS: list[dict[str, Any]] = [
    {"prompt": "w05 w06"}, {"turns": ["w05", "w06"]}, {"text": "w07"}, {"instruction": "w05", "input": "w06"},
    {"messages": [{"role": "user", "content": "w05"}]}, {"conversations": [{"from": "human", "value": "w05"}]},
]  # fmt: skip
QUESTIONS: list[dict[str, Any]] = [{"question_id": 1, "category": "qa", "turns": ["w05", "w06"]}]
TIERS = {"candidate_steps": [1, 3, 7], "ema_alpha": 0.2, "update_interval": 5, "warmup_batches": 10}
RECIPE = {"feature_weight": 1.0, "token_weight": 0.1, "noise": 0.2, "aligned_steps": 3, "step_decay": 0.8}
MEDUSA = {"head_decay": 0.8, "answer_tokens": 128, "soft_labels": True}
ARGUMENTS: dict[str, Any] = {
    "bf16": False, "max_steps": 5, "save_steps": 5, "seed": 1, "learning_rate": 1e-3, "num_train_epochs": 1,
    "per_device_train_batch_size": 2, "lr_scheduler_type": "linear", "accelerator_config": None, "warmup_steps": 0,
    "gradient_accumulation_steps": 1, "optim": "adamw_torch", "report_to": "none", "logging_steps": 1,
}  # fmt: skip
SPECULATIVE: dict[str, Any] = {
    "method": "auto", "num_steps": 3, "top_k": 2, "num_draft_tokens": 8, "tree": [[0], [0, 0], [1]],
    "acceptance": "greedy", "adaptive": TIERS, "compile": "none", "max_cache_length": 128, "methods": None,
    "posterior_threshold": 0.1,
}  # fmt: skip
DISTILLED = DistillConfig(max_new_tokens=2, temperatures=(0.0,), batch_size=2, batches_per_part=1)


class Echo(Teacher):
    """A target that answers at once."""

    name = "echo"

    def check(self, prompt: Any) -> None:
        """Anything can be said to it."""

    def facts(self) -> dict[str, Any]:
        """See `Teacher`."""
        return {"weights": "none"}

    def generate(self, prompts: Any, *_: Any) -> list[list[int] | None]:
        """See `Teacher`."""
        return [[6, 7] for _ in prompts]

    def ended(self, answer: Any) -> bool:
        """See `Teacher`."""
        return True


class Workshop:
    """Whole things to damage, made once, and what reads each of them.

    Args:
        folder: Where to make them.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.whole = folder, folder / "whole"
        self.whole.mkdir()
        self.tokenizer = zoo.chat_tokenizer()
        model = zoo.build("llama")
        self.vocab_size = model.config.vocab_size
        self.drafter = TokenRecyclingDrafter(width=4, pairs=16)
        self.drafter.bind(model)
        self.drafter.save(self.whole / "table")
        talks = [Conversation.of([3, 4], [5 + number, 6]) for number in range(6)]
        capture_features(model, talks, self.whole / "features", batch_size=2)
        distill(Echo(), self.tokenizer, ["w05", "w06", "w07"], self.whole / "distilled", DISTILLED, progress=False)
        run = self.whole / "run" / "checkpoint-5"
        run.mkdir(parents=True)
        state = {"epoch": 1.0, "global_step": 5, "max_steps": 9, "num_train_epochs": 2, "log_history": [{}],
                 "best_model_checkpoint": None, "train_batch_size": 2, "best_metric": 1.5}  # fmt: skip
        (run / "trainer_state.json").write_text(json.dumps(state))
        self.facts = {"head": {"hidden_size": 8}, "settings": dict(RECIPE), "data": {"conversations": 3}}
        (self.whole / "run" / "run.json").write_text(json.dumps(self.facts))

    # -------------------------------------------------------------------------------------------------- what reads

    def talks(self, path: Path) -> None:
        """Conversations, as the training commands take them."""
        check_tokens(read_conversations(path, tokenizer=self.tokenizer), self.vocab_size)

    def distilled(self, folder: Path) -> None:
        """A directory that `distill` goes on in."""
        distill(Echo(), self.tokenizer, ["w05", "w06", "w07"], folder, DISTILLED, progress=False)
        self.talks(folder)

    def features(self, folder: Path) -> None:
        """Captured features, all of them."""
        for answer_tokens in (0, 1):
            store = FeatureStore(folder, answer_tokens)
            for number in range(len(store)):
                collate([store[number]], self.vocab_size)

    def run(self, folder: Path) -> None:
        """A run to go on with. A checkpoint that is damaged is passed over, and a warning says so."""
        last_checkpoint(folder)
        check_same_run(folder, self.facts)

    def recipe(self, path: Path) -> None:
        """Settings of every objective."""
        fields = read_json(path)
        for kind in (EagleTrainingConfig, MedusaTrainingConfig):
            known = {name: value for name, value in fields.items() if name in kind.__dataclass_fields__}
            kind().changed(**(known or fields))
        rate = fields.get("step_decay", fields.get("head_decay", 0.8))
        Medusa2TrainingConfig(head_decay=rate)

    def arguments(self, path: Path) -> None:
        """Arguments for the Trainer."""
        head_arguments(self.folder / "nowhere", read_json(path), use_cpu=True)

    def tiers(self, path: Path) -> None:
        """A policy, from its file."""
        AdaptiveConfig.from_file(path)

    def speculative(self, path: Path) -> None:
        """What a service would pass on of a request."""
        SpeculativeConfig.from_dict(read_json(path)).to_dict()

    def table(self, path: Path) -> None:
        """Recycled tokens."""
        self.drafter.load(path)


# ---------------------------------------------------------------------------------------------------- what is damaged


def changed(value: Any, rng: random.Random) -> Any:
    """The same JSON with a strange value somewhere, or without something."""
    value = json.loads(json.dumps(value))
    place = value
    while True:
        keys: list[Any] = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            return value
        key = rng.choice(keys)
        if isinstance(place[key], dict | list) and place[key] and rng.random() < 0.6:
            place = place[key]
            continue
        kind = rng.randrange(8)
        if kind == 0:
            del place[key]
        elif kind == 1 and isinstance(place, dict):
            place[rng.choice(["self", "x", "output_dir", "__class__", "", "cls", "a" * 10**5])] = rng.choice(STRANGE)
        else:
            place[key] = rng.choice(STRANGE)
        return value


def dumped(value: Any) -> bytes:
    """JSON, halves of characters included."""
    try:
        return json.dumps(value).encode()
    except ValueError:  # integers of thousands of digits are not written, but may be read
        return b'{"prompt": ' + b"9" * 6000 + b"}"


def bytes_changed(data: bytes, rng: random.Random) -> bytes:
    """Some bytes changed, cut out, put in, or the rest cut off."""
    changing = bytearray(data)
    for _ in range(rng.randrange(1, 6)):
        at = rng.randrange(len(changing) + 1)
        kind = rng.randrange(4)
        if kind == 0 and at < len(changing):
            changing[at] = rng.randrange(256)
        elif kind == 1:
            del changing[at : at + rng.randrange(1, 40)]
        elif kind == 2:
            changing[at:at] = rng.randbytes(rng.randrange(1, 20))
        else:
            del changing[at:]
    return bytes(changing)


WHOLE_FILES: dict[str, Callable[[], bytes]] = {
    "nothing": lambda: b"", "a newline": lambda: b"\n", "zeros": lambda: b"\0" * 10**5, "null": lambda: b"null",
    "NaN": lambda: b'{"ema_alpha": NaN, "noise": Infinity}', "a list": lambda: b"[1, 2]", "a number": lambda: b"7",
    "UTF-16": lambda: '{"prompt": "w05"}\n'.encode("utf-16"), "UTF-16-LE": lambda: "w05\n".encode("utf-16-le"),
    "UTF-32": lambda: '{"prompt": "w05"}\n'.encode("utf-32"), "latin": lambda: '{"prompt": "é"}'.encode("latin-1"),
    "a BOM": lambda: b"\xef\xbb\xbf" + b'{"prompt": "w05"}', "two BOMs": lambda: b"\xef\xbb\xbf" * 2 + b"{}",
    "deep": lambda: b"[" * 10**5 + b"]" * 10**5, "deep objects": lambda: b'{"a":' * 10**5, "a gzip": lambda: GZIPPED,
    "deep and whole": lambda: b'{"prompt": ' + b"[" * 900 + b"]" * 900 + b"}", "digits": lambda: b"9" * 10**5,
    "a line of 17 MB": lambda: b'{"prompt": "' + b"x" * 17 * 2**20 + b'"}', "binary": lambda: bytes(range(256)) * 9,
    "a million empty lines": lambda: b"\n" * 10**6, "carriage returns": lambda: b"\r" * 10**6,
    "many names": lambda: dumped({f"name{number}": number for number in range(10**5)}),
    "parquet": lambda: PARQUET, "half a parquet": lambda: PARQUET[:40], "parquet's frame": lambda: b"PAR1" * 4,
    "safetensors with a long header": lambda: (2**40).to_bytes(8, "little") + b"{}",
    "safetensors with names": lambda: _header({f"t{n}": _tensor(0) for n in range(10**5)}),
    "equal keys": lambda: b'{"noise": 1, "noise": "x"}', "a comment": lambda: b"// x\n{}", "html": lambda: b"<html>",
}  # fmt: skip
"""Contents that any file may have."""


def _tensor(size: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [size], "data_offsets": [0, 0]}


def _header(fields: dict[str, Any]) -> bytes:
    text = json.dumps(fields).encode()
    return len(text).to_bytes(8, "little") + text


def _parquet(rows: list[dict[str, Any]]) -> bytes:
    sink = pa.BufferOutputStream()
    parquet.write_table(pa.Table.from_pylist(rows), sink)
    written: bytes = sink.getvalue().to_pybytes()
    return written


GZIPPED = gzip.compress(b'{"prompt": "w05"}\n')
PARQUET = _parquet(ROWS[:1])
SQUEEZED: dict[str, Callable[[], bytes]] = {
    "no gzip": lambda: b'{"prompt": "w05"}\n', "half a gzip": lambda: GZIPPED[:-9], "two gzips": lambda: GZIPPED * 2,
    "a gzip and more": lambda: GZIPPED + b"x" * 99, "a bad checksum": lambda: GZIPPED[:-5] + b"xxxxx",
    "zeros": lambda: gzip.compress(b"\0" * 2**28, 9), "newlines": lambda: gzip.compress(b"\n" * 2**26, 9),
    "one line": lambda: gzip.compress(b'"' + b"x" * 2**26, 9),
    "prompts": lambda: gzip.compress(b'{"text":1}\n' * 10**6),
    "gzips": lambda: gzip.compress(gzip.compress(b"x")), "nothing": lambda: b"", "header": lambda: b"\x1f\x8b\x08",
}  # fmt: skip
"""Contents of a `.gz`."""

PLACES = ("missing", "directory", "pipe", "/dev/zero", "/dev/null", "link", "loop", "long", "NUL", "surrogate")


def place_of(kind: str, folder: Path) -> Path:
    """A path that is no regular file; the file systems' own strangers."""
    path = folder / "place.jsonl"
    if kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind in ("link", "loop"):
        path.symlink_to("/dev/zero" if kind == "link" else path)
    elif kind.startswith("/"):
        return Path(kind)
    elif kind == "long":
        return folder / ("x" * 300)
    elif kind in ("NUL", "surrogate"):
        return Path({"NUL": "a\0b", "surrogate": "\ud800"}[kind])
    return path


Case = tuple[str, Path, Callable[[Path], None]]


def table(shop: Workshop, folder: Path) -> Iterator[Case]:
    """Every content and every place, for every reader; each is made when its turn comes."""
    readers: dict[str, tuple[str, Callable[[Path], None]]] = {
        "talks": (".jsonl", shop.talks), "prompts": (".jsonl", _prompts), "texts": (".txt", _prompts),
        "questions": (".jsonl", _questions), "tiers": (".json", shop.tiers), "recipe": (".json", shop.recipe),
        "arguments": (".json", shop.arguments), "speculative": (".json", shop.speculative),
        "table": ("", shop.table), "parquet": (".parquet", shop.talks), "json": (".json", shop.talks),
    }  # fmt: skip
    for name, (suffix, reader) in readers.items():
        for what, make in WHOLE_FILES.items():
            path = _fresh(folder) / f"file{suffix}"
            path.write_bytes(make())
            yield f"{name}: {what}", path, reader
        for place in PLACES:
            yield f"{name}: {place}", place_of(place, _fresh(folder)), reader
    for name in ("talks", "prompts", "questions"):
        for what, make in SQUEEZED.items():
            path = _fresh(folder) / "file.jsonl.gz"
            path.write_bytes(make())
            yield f"{name}.gz: {what}", path, readers[name][1]
    for name, files in _states(shop).items():
        for file in files:
            for what, make in [*WHOLE_FILES.items(), *((place, None) for place in PLACES[:7])]:
                copy = _fresh(folder) / name
                shutil.copytree(shop.whole / name, copy)
                (copy / file).unlink()
                if make is not None:
                    (copy / file).write_bytes(make())
                elif what != "missing":
                    (copy / file).symlink_to(place_of(what, _fresh(folder)))
                yield f"{name}/{file}: {what}", copy, getattr(shop, name)
    yield from _wrong_features(shop, folder)


def _wrong_features(shop: Workshop, folder: Path) -> Iterator[Case]:
    """Captured features of other kinds and shapes, and of tokens that no target has."""
    ids, mask, seen = torch.tensor([3, 4, 5]), torch.tensor([False, True, True]), torch.zeros(3, 8)
    for what, tensors in {
        "float ids": (ids.float(), mask, seen), "negative ids": (ids - 9, mask, seen),
        "no features": (ids, mask, None),
        "large ids": (ids + 10**6, mask, seen), "a float mask": (ids, mask.float(), seen),
        "short": (ids[:2], mask, seen),
        "whole features": (ids, mask, seen.long()), "flat features": (ids, mask, seen[:, 0]),
    }.items():  # fmt: skip
        copy = _fresh(folder) / "features"
        shutil.copytree(shop.whole / "features", copy)
        named = zip(("input_ids", "loss_mask", "features"), tensors, strict=True)
        rows = {f"{row}.{name}": held for name, held in named if held is not None for row in range(2)}
        save_file({name: held.clone() for name, held in rows.items()}, copy / "part-00001.safetensors")
        yield f"features: {what}", copy, shop.features


def _states(shop: Workshop) -> dict[str, list[str]]:
    """What an interrupted work may have left damaged: folders and the files in them."""
    return {
        "distilled": [".distill.json", "data/part-00001.parquet"],
        "features": ["features.json", "part-00001.safetensors"],
        "run": ["run.json", "checkpoint-5/trainer_state.json"],
    }  # fmt: skip


def at_random(shop: Workshop, folder: Path, rng: random.Random) -> Case:
    """A valid file with values changed, or with bytes changed."""
    name, suffix, rows, reader = rng.choice([
        ("talks", ".jsonl", ROWS, shop.talks), ("prompts", ".jsonl", PROMPTS, _prompts),
        ("questions", ".jsonl", QUESTIONS, _questions), ("tiers", ".json", [TIERS], shop.tiers),
        ("recipe", ".json", [RECIPE, MEDUSA], shop.recipe), ("arguments", ".json", [ARGUMENTS], shop.arguments),
        ("speculative", ".json", [SPECULATIVE], shop.speculative), ("state", "", [], None), ("table", "", [], None),
        ("talks.gz", ".jsonl.gz", ROWS, shop.talks), ("parquet", ".parquet", ROWS, shop.talks),
    ])  # fmt: skip
    fresh = _fresh(folder)
    if reader is None:
        return _damaged_state(shop, fresh, name, rng)
    path = fresh / f"file{suffix}"
    row = changed(rng.choice(rows), rng)
    if suffix == ".parquet":
        try:
            path.write_bytes(_parquet([row, rng.choice(rows)]))
        except (pa.ArrowException, OverflowError, UnicodeEncodeError):  # not every row can be written
            path.write_bytes(bytes_changed(PARQUET, rng))
    else:
        lines = [dumped(row)] if suffix == ".json" else [dumped(rng.choice(rows)), dumped(row)]
        data = b"\n".join(lines)
        data = bytes_changed(data, rng) if rng.random() < 0.3 else data
        path.write_bytes(gzip.compress(data) if suffix.endswith(".gz") else data)
        if suffix.endswith(".gz") and rng.random() < 0.3:
            path.write_bytes(bytes_changed(path.read_bytes(), rng))
    return f"{name}: {row!r:.200}", path, reader


def _damaged_state(shop: Workshop, fresh: Path, name: str, rng: random.Random) -> Case:
    if name == "table":
        path = fresh / "table"
        path.write_bytes(bytes_changed((shop.whole / "table").read_bytes(), rng))
        return "table: bytes", path, shop.table
    name, file = rng.choice([(name, file) for name, files in _states(shop).items() for file in files])
    copy = fresh / name
    shutil.copytree(shop.whole / name, copy)
    data = (copy / file).read_bytes()
    told = "bytes"
    if file.endswith("json") and rng.random() < 0.7:
        fields = changed(json.loads(data), rng)
        (copy / file).write_bytes(dumped(fields))
        told = f"{fields!r:.300}"
    else:
        (copy / file).write_bytes(bytes_changed(data, rng))
    return f"{name}/{file}: {told}", copy, getattr(shop, name)


def _prompts(path: Path) -> None:
    read_prompts(path)


def _questions(path: Path) -> None:
    read_questions(path)


def _fresh(folder: Path) -> Path:
    return Path(tempfile.mkdtemp(dir=folder))


# ------------------------------------------------------------------------------------------------------- the judgement


class Hang(BaseException):
    """A case that did not end."""


@contextmanager
def limited() -> Iterator[None]:
    """Raises `Hang` where the block takes too long."""

    def ring(*_: Any) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(LONGEST)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def outcome(path: Path, reader: Callable[[Path], None]) -> str:
    """`"read"`, `"refused"`, or what else it was."""
    try:
        with limited():
            reader(path)
    except SpeculativeDecodingError as error:
        text = str(error)
        return "refused" if len(text) < 2000 else f"an error of {len(text)} characters: {text[:200]}"
    except Hang:
        return "hangs"
    except BaseException as error:  # whatever it is, it is what is looked for
        return f"{type(error).__name__}: {error!s:.200}"
    return "read"


def check_all(count: int, seed: int, every: int = 1) -> dict[str, Any]:
    """Give the table (each n-th case of it) and `count` random files to their readers."""
    rng, outcomes, wrong = random.Random(seed), Counter[str](), []
    slowest = (0.0, "")
    disable_progress_bar()
    logging.disable(logging.ERROR)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["HF_DATASETS_CACHE"] = str(folder / "cache")
        shop = Workshop(folder)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        cases = (case for number, case in enumerate(table(shop, folder)) if number % every == seed % every)
        randoms = (at_random(shop, folder, rng) for _ in range(count))
        for told, path, reader in (case for several in (cases, randoms) for case in several):
            begin = time.perf_counter()
            if VERBOSE:
                print(f"{told:.150}", file=sys.stderr, flush=True)
            result = outcome(path, reader)
            slowest = max(slowest, (time.perf_counter() - begin, told))
            outcomes[result if result in ("read", "refused") else "wrong"] += 1
            if result not in ("read", "refused"):
                wrong.append(f"{told} -> {result}")
            if path.is_relative_to(folder) and not path.is_relative_to(shop.whole):
                shutil.rmtree(path.parent, ignore_errors=True)
        gained = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return {"outcomes": dict(outcomes), "wrong": wrong, "slowest_seconds": round(slowest[0], 2), "slowest": slowest[1],
            "megabytes": round(gained)}  # fmt: skip


def main() -> None:
    """By hand."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=int, default=1, help="Each n-th case of the table.")
    arguments = parser.parse_args()
    print(json.dumps(check_all(arguments.count, arguments.seed, arguments.every), indent=1))


if __name__ == "__main__":
    main()
