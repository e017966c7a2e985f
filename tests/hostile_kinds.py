"""More attacks for `hostile.py`: every field of every layout with anything, pickles by instruction, archives that say
two things, files that are no files.

Those of `hostile.py` must end in an error. Those here may also make a head, where what they changed means something:
then it must be one that drafts.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import struct
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hf_specdec import export_head, load_head
from layouts import Example

# ----------------------------------------------------------------------------------------------- any field, any value

FIELDS = (
    "num_labels", "attn_implementation", "_attn_implementation", "experts_implementation", "partial_rotary_factor",
    "rope_parameters", "rope_scaling", "rope_theta", "rms_norm_eps", "hidden_act", "num_steps", "top_k", "dtype",
    "num_draft_tokens", "tree", "recipe", "tau", "num_hidden_layers", "head_dim", "num_key_value_heads", "bias",
    "vocab_size", "draft_vocab_size", "sliding_window", "norm_output", "fc_norm", "id2label", "auto_map",
    "torch_dtype", "quantization_config", "medusa_num_heads", "medusa_num_layers", "shared_lm_head",
    "target_hidden_size",
    "eagle_aux_hidden_state_layer_ids", "base_model_name_or_path", "max_position_embeddings", "attention_dropout",
    "own_embedding", "layernorms", "qk_norm", "architectures", "transformers_version", "model_type", "use_cache",
    "output_hidden_states", "return_dict", "problem_type", "tie_word_embeddings", "eos_token_id", "pad_token_id",
)  # fmt: skip


WORDS = ("", "false", "true", "1", "1e9", "org/kernel", "../x", "\x1b[31mred\x1b]0;title\x07", "x" * 10**5, "silu",
         "gelu", "float32", "llama", "dynamic", "\u202eevil", "a\nb", "NaN", "cuda")  # fmt: skip


def anything(rng: random.Random, depth: int = 0) -> Any:
    """Some JSON value, likely a mean one."""
    kind = rng.randrange(9 if depth < 3 else 7)
    if kind == 0:
        return rng.choice([0, -1, 1, 2, 3, 7, 64, 10**3, 10**5, 10**7, 10**9, 2**31, 2**63, -(2**40), 10**30])
    if kind == 1:
        return rng.choice([0.0, -5.0, 1e-300, 1e308, 1e6, 0.5, 1.5, -1e300, 3.0])
    if kind == 2:
        return rng.choice([True, False, None])
    if kind in (3, 4):
        return rng.choice(WORDS)
    if kind == 5:
        return {"rope_type": rng.choice(["default", "linear", "yarn", "llama3", "longrope", 3]),
                rng.choice(["factor", "attention_factor", "partial_rotary_factor", "rope_theta", "beta_fast"]):
                rng.choice([2.0, 1e308, -1, 0, "2", None, 1e6])}  # fmt: skip
    if kind == 6:
        return [[rank] * rng.choice([1, 2, 5, 1199]) for rank in range(rng.choice([1, 3, 40]))]
    if kind == 7:
        return [anything(rng, depth + 1) for _ in range(rng.randrange(5))]
    return {rng.choice(FIELDS): anything(rng, depth + 1) for _ in range(rng.randrange(4))}


def any_field(example: Example, folder: Path, rng: random.Random) -> None:
    """In the layout of others."""
    config = json.loads(json.dumps(example.config))
    for _ in range(rng.choice([1, 1, 2, 3])):
        place = config
        while nested := [value for value in place.values() if isinstance(value, dict)]:
            if rng.random() < 0.5:
                break
            place = rng.choice(nested)
        place[rng.choice([*place, *FIELDS])] = anything(rng)
    replace(example, config=config).write(folder)


def any_native_field(example: Example, folder: Path, rng: random.Random) -> None:
    """In our own layout."""
    export_head(load_head(example.write(folder.parent / "theirs")), folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for _ in range(rng.choice([1, 1, 2, 3])):
        config[rng.choice([*config, *FIELDS])] = anything(rng)
    path.write_text(json.dumps(config))


# ----------------------------------------------------------------------------------------------- pickles


def pickle_name(example: Example) -> str:
    return "medusa_lm_head.pt" if "medusa" in example.file else "pytorch_model.bin"


def parts_of(example: Example) -> dict[str, bytes]:
    """The parts of torch's archive of an example."""
    stream = io.BytesIO()
    torch.save(example.tensors, stream)
    with zipfile.ZipFile(stream) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def write_parts(example: Example, folder: Path, parts: dict[str, bytes], **options: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(example.config))
    path = folder / pickle_name(example)
    with zipfile.ZipFile(path, "w", options.get("compression", zipfile.ZIP_STORED)) as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
    return path


def data_of(parts: dict[str, bytes]) -> str:
    return next(name for name in parts if name.endswith("/data.pkl"))


def changed_pickle(example: Example, folder: Path, rng: random.Random) -> None:
    """Bytes of the instructions changed, put in, taken out."""
    parts = parts_of(example)
    name = data_of(parts)
    content = bytearray(parts[name])
    for _ in range(rng.choice([1, 2, 8])):
        place = rng.randrange(len(content))
        how = rng.randrange(3)
        if how == 0:
            content[place] = rng.randrange(256)
        elif how == 1:
            content[place:place] = bytes([rng.randrange(256)])
        else:
            del content[place : place + rng.choice([1, 1, 5])]
    write_parts(example, folder, {**parts, name: bytes(content)})


def tensor_call(key: str, numel: int, size: int, kind: str = "FloatStorage") -> bytes:
    """Instructions for a vector out of a storage."""

    def text(word: str) -> bytes:
        return b"X" + struct.pack("<I", len(word)) + word.encode()

    def number(value: int) -> bytes:
        return b"\x8a\x08" + struct.pack("<q", value)

    storage = text("storage") + f"ctorch\n{kind}\n".encode() + text(key) + text("cpu") + number(numel) + b"tQ"
    hooks = b"ccollections\nOrderedDict\n)R"
    place = b"K\x00" + number(size) + b"\x85K\x01\x85\x89"
    return b"ctorch._utils\n_rebuild_tensor_v2\n((" + storage + place + hooks + b"tR"


def built_pickle(example: Example, folder: Path, rng: random.Random) -> None:
    """Attacks by instruction: memory, time, strange keys, calls."""
    parts = parts_of(example)
    name = data_of(parts)
    root = name.removesuffix("data.pkl")
    key = b"X\x01\x00\x00\x00a"
    large = b"\x8a\x08" + struct.pack("<q", 5 * 10**9)
    bodies = [
        b"\x80\x02}(" + key + b"c__builtin__\nbytearray\n" + large + b"\x85Ru.",
        b"\x80\x02}(" + key + b"ctorch\nFloatTensor\nM\x10\x27M\x10\x27\x86Ru.",
        b"\x80\x02}(" + key + b"cbuiltins\neval\nX\x03\x00\x00\x001+1\x85Ru.",
        b"\x80\x02}(" + b")" * 100_000 + b"\x85" * 100_000 + b"K\x01u.",
        b"\x80\x02}(" + b")" + b"\x85" * 500_000 + b"K\x01u.",
        b"\x80\x02}(K\x01K\x02u.",
        b"\x80\x02]q\x00h\x00a.",
        b"\x80\x02}q\x00(" + key + b"h\x00u.",
        b"\x80\x02" + b"]" * 700_000 + b".",
        b"\x80\x02}(" + key + b"\x8b\xff\xff\xff\x7f",
        b"\x80\x02}(" + key + b"\x8d" + struct.pack("<Q", 2**60),
        b"\x80\x02}(" + key + tensor_call("9", 2**40, 2**40) + b"u.",
        b"\x80\x02}(" + key + tensor_call("0", 2**62, 4) + b"u.",
        b"\x80\x02}(" + key + b"(ios\nsystem\nX\x02\x00\x00\x00id" + b"u.",
        b"\x80\x02}(" + key + b"cos\nsystem\nX\x02\x00\x00\x00id\x85\x81u.",
        b"\x80\x02}(" + key + b"\x82\x01u.",
        b"\x80\x02}(" + key + b"Pposix.system\nu.",
        b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f}.",
        b"", b".", b"\x80\x02", b"\x80\x02}", pickle.dumps({"a": 1.5}), pickle.dumps({"a": {"b": [1]}}),
        b"\x80\x02}(" + b"I" + b"9" * 100_000 + b"\nK\x01u.",
    ]  # fmt: skip
    if rng.random() < 0.15:  # many tensors that share one storage
        vector = tensor_call("0", 10**6, 10**6)
        names = [f"{i}.0.linear.weight".encode() for i in range(2500)]
        body = b"".join(b"X" + struct.pack("<I", len(word)) + word + vector for word in names)
        write_parts(example, folder, {name: b"\x80\x02}(" + body + b"u.", f"{root}data/0": bytes(4 * 10**6)})
        return
    write_parts(example, folder, {**parts, name: rng.choice(bodies)})


def old_format(example: Example, folder: Path, rng: random.Random) -> None:
    """Torch's format before 1.6, broken at random."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(example.config))
    stream = io.BytesIO()
    torch.save(example.tensors, stream, _use_new_zipfile_serialization=False)
    content = bytearray(stream.getvalue())
    for _ in range(rng.choice([1, 3, 20])):
        content[rng.randrange(min(len(content), 4000))] = rng.randrange(256)
    if rng.random() < 0.3:
        del content[rng.randrange(len(content)) :]
    (folder / pickle_name(example)).write_bytes(bytes(content))


# ----------------------------------------------------------------------------------------------- archives


def strange_archive(example: Example, folder: Path, rng: random.Random) -> None:
    """Archives whose directory says another thing than their parts, or two things."""
    parts = parts_of(example)
    kind = rng.randrange(8)
    if kind == 0:  # compressed
        write_parts(example, folder, {**parts, "archive/data/0": bytes(10**7)}, compression=zipfile.ZIP_DEFLATED)
        return
    if kind == 1:  # two roots
        write_parts(example, folder, {**parts, "other/data.pkl": parts[data_of(parts)]})
        return
    if kind == 2:
        write_parts(example, folder, {**parts, "archive/byteorder": b"big"})
        return
    path = write_parts(example, folder, parts)
    content = bytearray(path.read_bytes())
    end = content.rfind(b"PK\x05\x06")
    (directory,) = struct.unpack("<L", content[end + 16 : end + 20])
    if kind == 3:  # a second directory behind the first, of another archive
        other = io.BytesIO()
        with zipfile.ZipFile(other, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("archive/data.pkl", bytes(10**7))
        content += other.getvalue()
    elif kind == 4:  # an entry's own header says another name, size or method
        place = content.find(b"PK\x03\x04", rng.choice([0, 100]))
        content[place + rng.choice([8, 18, 22, 26, 30])] ^= rng.choice([1, 8, 255])
    elif kind == 5:  # the directory points elsewhere
        place = content.find(b"PK\x01\x02", directory)
        content[place + rng.choice([10, 20, 24, 28, 42, 43])] ^= rng.choice([1, 64, 255])
    elif kind == 6:  # cut
        del content[rng.randrange(len(content)) :]
    else:  # two entries of one name
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr(data_of(parts), b"\x80\x02}.")
        content = bytearray(path.read_bytes())
    path.write_bytes(bytes(content))


# ----------------------------------------------------------------------------------------------- files that are none


def strange_file(example: Example, folder: Path, rng: random.Random) -> None:
    """Pipes, devices, links, directories in the place of files."""
    example.write(folder)
    victim = rng.choice(sorted(folder.iterdir()))
    outside = folder.parent / "outside"
    victim.replace(outside)
    kind = rng.randrange(6)
    if kind == 0:
        os.mkfifo(victim)
    elif kind == 1:
        victim.symlink_to(outside)
    elif kind == 2:
        victim.symlink_to(rng.choice(["/dev/zero", "/dev/random", "/proc/self/mem", "/etc/passwd", "nowhere"]))
    elif kind == 3:
        victim.mkdir()
    elif kind == 4:
        victim.symlink_to(victim.name)
    else:
        os.link(outside, victim)  # a second name of a regular file is one


HARMLESS_ENDS = (any_field, any_native_field, changed_pickle, old_format, strange_archive, strange_file)
"""Kinds that may also leave a head as it was, or make another one."""

MORE_MUTATIONS = [any_field, any_native_field, changed_pickle, built_pickle, old_format, strange_archive, strange_file]
