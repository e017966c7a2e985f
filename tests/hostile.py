"""Checkpoints that lie, are broken or attack; run as a process of its own so that a crash is seen as one.

    python hostile.py --count 400 --seed 0

Prints a JSON object: how many of each kind, what was not a clear error of ours, whether code ran, megabytes gained.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import pickle
import random
import resource
import struct
import sys
import tempfile
import time
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from hf_specdec import SpeculativeDecodingError, SpeculativeGenerationMixin, load_head
from hf_specdec.checkpoints.hub import inspect_head
from hf_specdec.errors import CheckpointFormatError, DrafterMismatchError
from hostile_kinds import HARMLESS_ENDS, MORE_MUTATIONS, any_field, any_native_field
from layouts import Example, V, all_examples

MARKER = "code-ran"
NO_NUMBERS: list[Any] = [-1, 0, -(2**40), 2**40, 2**63, 2**70, "x", [], {}, [1], {"a": 1}, 1.5, 7]
Mutation = Callable[[Example, Path, random.Random], None]


class Attack:
    """What a pickle with code looks like."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


# ----------------------------------------------------------------------------------------------- configurations


def bad_size(example: Example, folder: Path, rng: random.Random) -> None:
    config = json.loads(json.dumps(example.config))
    layer = config.get("transformer_layer_config", config)
    name = rng.choice(["hidden_size", "intermediate_size", "num_attention_heads"])
    layer[name] = rng.choice([value for value in NO_NUMBERS if value != layer[name]])
    replace(example, config=config).write(folder)


def bad_rope(example: Example, folder: Path, rng: random.Random) -> None:
    config = json.loads(json.dumps(example.config))
    layer = config.get("transformer_layer_config", config)
    layer.pop("rope_scaling", None)
    if rng.random() < 0.5:
        layer["rope_theta"] = rng.choice([-3.0, "x", [], {"a": 1}, -1e300])
    else:
        layer["rope_scaling"] = rng.choice(
            [{"rope_type": "nonsense"}, {"rope_type": "yarn", "factor": "x"}, {"type": "linear", "factor": 0.0},
             {"rope_type": "llama3", "factor": 8.0}, {"rope_type": "linear", "factor": "big"}, "x", 7,
             {"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0], "long_factor": "x"}]
        )  # fmt: skip
    replace(example, config=config).write(folder)


def bad_layer_ids(example: Example, folder: Path, rng: random.Random) -> None:
    ids = rng.choice([[-9, 2, 3], [2, 2, 3], [1.5, 2, 3], "low", {}, [[1], [2]], [True, 2, 3], list(range(10**5)), []])
    path = {"eagle_aux_hidden_state_layer_ids": ids}
    ours = "speculators_model_type" in example.config
    config = {**example.config, **(path if ours else {"eagle_config": path})}
    replace(example, config=config).write(folder)


def config_text(example: Example, folder: Path, rng: random.Random) -> None:
    example.write(folder)
    path = folder / "config.json"
    text = path.read_text()
    path.write_bytes(
        rng.choice(
            [
                text[: rng.randrange(1, len(text) - 1)].encode(),
                b"",
                b"[1, 2]",
                b"7",
                b'"head"',
                b"null",
                b"[" * 100_000,
                b'{"a":' * 50_000,
                b"\xff\xfe" + text.encode(),
                b"\x00" * 100,
                text.encode() + b"}",
                b'{"hidden_size": ' + b"9" * 6000 + b"}",
                b'{"hidden_size": NaN}',
                b'{"hidden_size": 1e999}',
            ]
        )
    )


def config_of_100_mb(example: Example, folder: Path, rng: random.Random) -> None:
    example.write(folder)
    with (folder / "config.json").open("wb") as file:
        file.write(b'{"padding": "')
        for _ in range(100):
            file.write(b"x" * 10**6)
        file.write(b'"}')


def no_file(example: Example, folder: Path, rng: random.Random) -> None:
    example.write(folder)
    victims = sorted(folder.iterdir())
    victim = rng.choice(victims)
    victim.unlink()
    if rng.random() < 0.5:
        victim.mkdir()


# ----------------------------------------------------------------------------------------------- tensors


def with_tensors(example: Example, folder: Path, **changed: Any) -> None:
    replace(example, tensors={**example.tensors, **changed}).write(folder)


def a_weight(example: Example, rng: random.Random) -> str:
    """A tensor that is loaded."""
    others = ("lm_head", "embed_", "model.embed_", *(["model."] if "model.embed_tokens.weight" in example.tensors and
                                                     "model.fc.weight" not in example.tensors else []))  # fmt: skip
    loaded = [name for name, tensor in example.tensors.items()
              if tensor.is_floating_point() and not name.startswith(others)]  # fmt: skip
    return rng.choice(sorted(loaded))


def not_finite(example: Example, folder: Path, rng: random.Random) -> None:
    name = a_weight(example, rng)
    tensor = example.tensors[name].clone()
    tensor.view(-1)[rng.randrange(tensor.numel())] = rng.choice([float("nan"), float("inf"), -float("inf")])
    with_tensors(example, folder, **{name: tensor})


def wrong_dtype(example: Example, folder: Path, rng: random.Random) -> None:
    name = a_weight(example, rng)
    dtype = rng.choice([torch.int8, torch.int64, torch.bool, torch.uint8, torch.complex64, torch.float8_e4m3fn])
    with_tensors(example, folder, **{name: example.tensors[name].to(dtype)})


def wrong_shape(example: Example, folder: Path, rng: random.Random) -> None:
    name = a_weight(example, rng)
    tensor = example.tensors[name]
    shapes = [tensor[:-1], tensor[None], torch.cat([tensor, tensor]), tensor.reshape(-1)[0], tensor[:0]]
    with_tensors(example, folder, **{name: rng.choice(shapes)})


def missing_tensor(example: Example, folder: Path, rng: random.Random) -> None:
    name = a_weight(example, rng)
    replace(example, tensors={key: value for key, value in example.tensors.items() if key != name}).write(folder)


def strange_name(example: Example, folder: Path, rng: random.Random) -> None:
    name = rng.choice(
        ["x" * 10**5, "é\u202e.weight", "layers.99999999999.weight", "[red]bold", "a\nb", "..", " ", "%s%n"]
    )
    with_tensors(example, folder, **{name: torch.zeros(2)})


def bad_vocabulary(example: Example, folder: Path, rng: random.Random) -> None:
    if "d2t" not in example.tensors:
        return not_finite(example, folder, rng)
    d2t = example.tensors["d2t"]
    changed = rng.choice(
        [d2t.flip(0) + 5, d2t - 100, d2t + 10**6, d2t.float(), d2t[:-1], torch.full_like(d2t, 2**62), d2t.bool(),
         torch.zeros(0, dtype=torch.long), d2t[None], -torch.arange(len(d2t)) * 2]
    )  # fmt: skip
    return with_tensors(example, folder, d2t=changed)


def bad_mask(example: Example, folder: Path, rng: random.Random) -> None:
    if "t2d" not in example.tensors or not example.tensors["d2t"].any() or example.tensors["t2d"].all():
        return wrong_dtype(example, folder, rng)
    mask = example.tensors["t2d"]
    return with_tensors(example, folder, t2d=rng.choice([~mask, mask.roll(1), mask[:-1], torch.zeros_like(mask)]))


# ----------------------------------------------------------------------------------------------- safetensors


def safetensors_of(example: Example, folder: Path) -> Path:
    """One whole safetensors file, whatever the example has."""
    name = "medusa_lm_head.safetensors" if "medusa" in example.file else "model.safetensors"
    replace(example, file=name, shards=1).write(folder)
    return folder / name


def broken_safetensors(example: Example, folder: Path, rng: random.Random) -> None:
    path = safetensors_of(example, folder)
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    kind = rng.randrange(9)
    if kind == 0:
        path.write_bytes(content[: rng.randrange(0, len(content) - 1)])
    elif kind == 1:
        path.write_bytes(
            struct.pack("<Q", rng.choice([2**60, 2**63 - 1, 2**64 - 1, 10**9, 0, 1, length - 1])) + content[8:]
        )
    elif kind == 2:
        path.write_bytes(content[:8] + bytes(rng.randrange(256) for _ in range(length)) + data)
    elif kind == 3:
        path.write_bytes(content + b"tail")
    else:
        name = rng.choice([key for key in header if key != "__metadata__"])
        entry = header[name]
        if kind == 4:
            entry["shape"] = rng.choice([[2**40, 2**40], [-1], [10**12], [2**63], "x", [1.5]])
        elif kind == 5:
            entry["data_offsets"] = rng.choice([[0, 2**60], [-8, 0], [8, 0], [0, 1], [], "x"])
        elif kind == 6:
            entry["dtype"] = rng.choice(["F999", "", 7, "O"])
        elif kind == 7:
            del entry["data_offsets"]
        else:
            header[name] = [entry]
        text = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + data)


# ----------------------------------------------------------------------------------------------- pickles


def pickle_of(example: Example, folder: Path) -> Path:
    name = "medusa_lm_head.pt" if "medusa" in example.file else "pytorch_model.bin"
    replace(example, file=name, shards=1).write(folder)
    return folder / name


def pickled_code(example: Example, folder: Path, rng: random.Random) -> None:
    path = pickle_of(example, folder)
    attack = Attack(folder.parent / MARKER)
    kind = rng.randrange(4)
    if kind == 0:
        path.write_bytes(pickle.dumps({"fc.weight": attack}))
    elif kind == 1:
        torch.save({**example.tensors, "extra": attack}, path)
    elif kind == 2:
        torch.save({**example.tensors, "extra": attack}, path, _use_new_zipfile_serialization=False)
    else:
        torch.save(attack, path)


def broken_pickle(example: Example, folder: Path, rng: random.Random) -> None:
    path = pickle_of(example, folder)
    content = path.read_bytes()
    name = a_weight(example, rng)
    wide = torch.zeros(1).expand(example.tensors[name].shape)
    kind = rng.randrange(9)
    if kind == 0:
        path.write_bytes(content[: rng.randrange(0, len(content) // 2)])
    elif kind == 1:
        path.write_bytes(bytes(rng.randrange(256) for _ in range(500)))
    elif kind == 2:
        torch.save(
            rng.choice([[1, 2], 7, "x", None, {}, torch.zeros(2), {"a": {"b": torch.zeros(2)}}, {1: torch.zeros(2)}]),
            path,
        )
    elif kind == 3:
        torch.save({**example.tensors, name: wide}, path)  # a stride of 0
    elif kind == 4:
        torch.save({**example.tensors, name: torch.zeros(1).expand(10**6, 10**6)}, path)
    elif kind == 5:
        torch.save({**example.tensors, name: torch.eye(3).to_sparse()}, path)
    elif kind == 6:
        torch.save({**example.tensors, name: torch.zeros(3, device="meta")}, path)
    elif kind == 7:  # a gigabyte of zeros, compressed
        with (
            zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive,
            archive.open("archive/data.pkl", "w") as file,
        ):
            for _ in range(200):
                file.write(b"\0" * 10**6)
    else:
        path.write_bytes(content.replace(b"ctorch._utils\n_rebuild_tensor_v2", b"cposix\nsystem", 1)[: len(content)])


# ----------------------------------------------------------------------------------------------- shards


def bad_index(example: Example, folder: Path, rng: random.Random) -> None:
    replace(example, file="model.safetensors", shards=2).write(folder)
    for name in ("medusa_lm_head.safetensors", "medusa_lm_head.pt"):
        (folder / name).unlink(missing_ok=True)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    names = sorted(index["weight_map"])
    outside = folder.parent / "outside.safetensors"
    wrong = rng.choice(
        ["../outside.safetensors", str(outside), "..", ".", "", "a/b.safetensors", "..\\outside.safetensors",
         "missing.safetensors", "config.json", 7, None, ["x"], "x\0.safetensors", "/etc/passwd"]
    )  # fmt: skip
    if not outside.exists():
        (folder / "model-00001-of-00002.safetensors").replace(outside)
    kind = rng.randrange(3)
    if kind == 0:
        index["weight_map"][rng.choice(names)] = wrong
    elif kind == 1:
        index["weight_map"] = dict.fromkeys(names, wrong)
    else:
        index = rng.choice(
            [{}, {"weight_map": []}, {"weight_map": {}}, {"weight_map": "x"}, [], {"weight_map": {"a": {}}}]
        )
    path.write_text(json.dumps(index))


EAGLES_ONLY = (bad_size, bad_rope, bad_layer_ids)
MUTATIONS: list[Mutation] = [
    bad_size, bad_rope, bad_layer_ids, config_text, no_file, not_finite, wrong_dtype, wrong_shape, missing_tensor,
    strange_name, bad_vocabulary, bad_mask, broken_safetensors, pickled_code, broken_pickle, bad_index,
    *MORE_MUTATIONS, any_field, any_native_field,
]  # fmt: skip


def attempt(mutation: Mutation, example: Example, folder: Path, rng: random.Random) -> str:
    """Empty for a clear error of ours, or a head that drafts where it may be one; else what it was."""
    mutation(example, folder, rng)
    begin = time.monotonic()
    try:
        head = load_head(folder)
        inspect_head(folder)
        if mutation in HARMLESS_ENDS:
            drafts(head)
    except SpeculativeDecodingError as error:
        text = str(error)
        if not isinstance(error, CheckpointFormatError | DrafterMismatchError):
            return f"{type(error).__name__}: {text}"
        if not 20 < len(text) < 3000:
            return f"an error of {len(text)} characters"
        if not text.replace("\n", "").isprintable():
            return "an error that a terminal would obey"
    except BaseException as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
    else:
        if mutation not in HARMLESS_ENDS:
            return f"loaded as {head.layout}"
    return "slow" if time.monotonic() - begin > 5 else ""


@functools.cache
def target(size: int, vocabulary: int) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": vocabulary, "hidden_size": size, "intermediate_size": 24, "num_hidden_layers": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(**sizes, **heads, bos_token_id=None, eos_token_id=None)
    return SpeculativeGenerationMixin.attach(LlamaForCausalLM(config).eval())


def drafts(head: Any) -> None:
    """Generate with a head on a model of its sizes, and see that the answer is the model's."""
    size = getattr(head.config, "target_hidden_size", None) or head.config.hidden_size
    model = target(size, head.config.vocab_size or V)
    ids = torch.arange(6)[None] % model.config.vocab_size
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    model.load_drafter(head, name="stranger")
    answer = model.generate(ids, speculative="stranger", **options)
    assert torch.equal(answer, model.generate(ids, **options)), "another answer"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    examples = all_examples()
    eagles = sorted(name for name, example in examples.items() if "medusa" not in example.layout)
    threes = sorted(name for name, example in examples.items() if "eagle3" in name)
    rng = random.Random(arguments.seed)
    kinds: Counter[str] = Counter()
    wrong, code_ran, before = [], False, 0
    with tempfile.TemporaryDirectory() as folder:
        for number in range(arguments.count):
            mutation = MUTATIONS[number % len(MUTATIONS)] if number else config_of_100_mb
            names = threes if mutation is bad_layer_ids else eagles if mutation in EAGLES_ONLY else sorted(examples)
            name = rng.choice(names)
            kinds[mutation.__name__] += 1
            outcome = attempt(mutation, examples[name], Path(folder) / str(number) / "head", rng)
            if outcome:
                wrong.append([number, mutation.__name__, name, outcome])
            code_ran = code_ran or (Path(folder) / str(number) / MARKER).exists()
            if number == 20:
                before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    gained = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024
    sys.stdout.write(json.dumps({"kinds": kinds, "wrong": wrong, "code_ran": code_ran, "megabytes_gained": gained}))


if __name__ == "__main__":
    main()
