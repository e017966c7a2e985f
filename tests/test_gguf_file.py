"""`load_gguf` loads what transformers' own loading does, and keeps quantised matrices packed."""

from __future__ import annotations

import logging
import struct
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from command_line import error_line, run
from hf_specdec import (
    CheckpointFormatError,
    InvalidConfigError,
    SpeculativeDecodingError,
    UnsupportedModelError,
    load_gguf,
)
from hf_specdec.cpu.library import NoKernelsError
from hf_specdec.cpu.quantized import PackedWeight
from hf_specdec.generation import gguf_file
from hf_specdec.generation.loading import load_target, load_tokenizer
from hf_specdec.training.teachers import ModelTeacher

gguf = pytest.importorskip("gguf")

HIDDEN, HEADS, KV_HEADS, HEAD_SIZE, VOCABULARY, LAYERS = 512, 4, 2, 128, 288, 2
ROWS = {"attn_q": HEADS * HEAD_SIZE, "attn_k": KV_HEADS * HEAD_SIZE, "attn_v": KV_HEADS * HEAD_SIZE,
        "attn_output": HIDDEN, "ffn_gate": HIDDEN, "ffn_up": HIDDEN, "ffn_down": HIDDEN}  # fmt: skip
KINDS = "Q4_K", "Q6_K", "Q8_0", "Q4_0", "Q5_0"


def blocks(random: np.random.Generator, kind: str, rows: int, size: int) -> Any:
    """Return a quantised matrix; blocks of K-quants, which gguf-py cannot make, are random, with small scales."""
    if not kind.endswith("_K"):
        return gguf.quantize(random.standard_normal((rows, size), np.float32) / 16, gguf.GGMLQuantizationType[kind])
    values, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    made = random.integers(0, 256, (rows, size // values, num_bytes), np.uint8)
    scales = (random.random((rows, size // values, 2)) / 1000).astype(np.float16).view(np.uint8)
    made[..., slice(0, 4) if kind == "Q4_K" else slice(-2, None)] = scales[..., : 4 if kind == "Q4_K" else 2]
    return made.reshape(rows, -1)


def tensors_of(architecture: str, *, tied: bool, kinds: tuple[str, ...]) -> dict[str, tuple[str, Any]]:
    """Return the tensors of a tiny model, each with its type."""
    random, num_matrices, found = np.random.default_rng(0), 0, dict[str, tuple[str, Any]]()

    def matrix(name: str, rows: int) -> None:
        nonlocal num_matrices
        kind = kinds[num_matrices % len(kinds)]
        num_matrices += 1
        found[f"{name}.weight"] = kind, blocks(random, kind, rows, HIDDEN)

    def vector(name: str, size: int) -> None:
        found[name] = "F32", random.standard_normal(size, np.float32)

    matrix("token_embd", VOCABULARY)
    vector("output_norm.weight", HIDDEN)
    if not tied:
        matrix("output", VOCABULARY)
    for layer in (f"blk.{number}" for number in range(LAYERS)):
        for name, rows in ROWS.items():
            matrix(f"{layer}.{name}", rows)
            if architecture == "qwen2" and name in ("attn_q", "attn_k", "attn_v"):
                vector(f"{layer}.{name}.bias", rows)
        norms = ["attn_norm", "ffn_norm", *(["post_attention_norm", "post_ffw_norm"] * (architecture == "gemma3"))]
        for name in norms:
            vector(f"{layer}.{name}.weight", HIDDEN)
        if architecture in ("qwen3", "gemma3"):
            vector(f"{layer}.attn_q_norm.weight", HEAD_SIZE)
            vector(f"{layer}.attn_k_norm.weight", HEAD_SIZE)
    return found


def write(
    path: Path, architecture: str, tensors: dict[str, tuple[str, Any]], fields: dict[str, int] | None = None
) -> Path:
    """Write a GGUF file with a byte-level tokenizer."""
    writer = gguf.GGUFWriter(path, architecture)
    sizes = {
        "context_length": 64, "embedding_length": HIDDEN, "block_count": LAYERS, "feed_forward_length": HIDDEN,
        "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS, "attention.key_length": HEAD_SIZE,
        "attention.value_length": HEAD_SIZE, "attention.sliding_window": 32,
        **({"rope.dimension_count": HEAD_SIZE} if architecture == "llama" else {}),
    }  # fmt: skip
    for key, value in sizes.items():
        writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_float32(f"{architecture}.rope.freq_base", 10000.0)
    for key, value in (fields or {}).items():
        writer.add_uint16(key, value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    characters = [chr(byte if 33 <= byte < 127 else 256 + byte) for byte in range(256)]
    writer.add_token_list([*characters, "ab", "cd", *(f"<{number}>" for number in range(VOCABULARY - 258))])
    writer.add_token_types([1] * 258 + [3] * (VOCABULARY - 258))
    writer.add_token_merges(["a b", "c d"])
    writer.add_eos_token_id(VOCABULARY - 1)
    writer.add_pad_token_id(VOCABULARY - 2)
    for name, (kind, content) in tensors.items():
        writer.add_tensor(name, content, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def make(path: Path, architecture: str = "llama", *, tied: bool = True, kinds: tuple[str, ...] = KINDS) -> Path:
    return write(path / "tiny.gguf", architecture, tensors_of(architecture, tied=tied, kinds=kinds))


def values_of(parameter: Any) -> torch.Tensor:
    return parameter.dequantize() if isinstance(parameter, PackedWeight) else parameter


def assert_equal(loaded: Any, expected: Any) -> None:
    ours, theirs = loaded.state_dict(), expected.state_dict()
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name].dtype == value.dtype
        torch.testing.assert_close(values_of(ours[name]), value, rtol=0, atol=0, msg=name)
    buffers = dict(loaded.named_buffers())
    for name, value in expected.named_buffers():
        torch.testing.assert_close(buffers[name], value, rtol=0, atol=0)


CASES = [("llama", True), ("llama", False), ("qwen2", True), ("qwen2", False), ("qwen3", True), ("gemma3", True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("architecture", "tied"), CASES)
def test_every_parameter_is_that_of_transformers(
    tmp_path: Path, architecture: str, tied: bool, dtype: torch.dtype
) -> None:
    path = make(tmp_path, architecture, tied=tied)
    loaded = load_gguf(path, dtype=dtype)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=dtype)
    assert_equal(loaded, expected)
    packed = [name for name, value in loaded.named_parameters() if isinstance(value, PackedWeight)]
    assert len(packed) == 7 * LAYERS + (1 if tied else 2)
    assert (loaded.lm_head.weight is loaded.get_input_embeddings().weight) == tied
    assert loaded.generation_config.to_dict() == expected.generation_config.to_dict()
    same = expected.config.to_diff_dict() | loaded.config.to_diff_dict()
    assert {name for name in same if same[name] != expected.config.to_diff_dict()[name]} <= {"_name_or_path"}
    assert loaded.name_or_path == str(path)
    assert not loaded.training
    assert not any(parameter.requires_grad for parameter in loaded.parameters())


def test_the_model_computes(tmp_path: Path) -> None:
    path = make(tmp_path)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    ids = torch.tensor([[1, 2, 3, 4]])
    with torch.no_grad():
        torch.testing.assert_close(load_gguf(path)(ids).logits, expected(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["Q4_1", "F16", "BF16", "F32"])
def test_other_kinds_are_unpacked_with_a_warning_for_quantised_ones(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    path = make(tmp_path, kinds=(kind, "Q8_0"))
    loaded = load_gguf(str(path))
    assert_equal(loaded, AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32))
    assert isinstance(loaded.model.layers[0].self_attn.q_proj.weight, PackedWeight)
    assert not isinstance(loaded.get_input_embeddings().weight, PackedWeight)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    expected = f"8 of the 15 quantised matrices in {path} cannot stay packed (Q4_1); unpacked they need 0.01 GB."
    assert warnings == ([expected] if kind == "Q4_1" else [])


def test_frequency_divisors_are_applied(tmp_path: Path) -> None:
    plain = load_gguf(make(tmp_path)).model.rotary_emb.inv_freq
    divisors = np.linspace(1, 8, HEAD_SIZE // 2, dtype=np.float32)
    tensors = tensors_of("llama", tied=True, kinds=KINDS) | {gguf_file.FREQUENCY_DIVISORS: ("F32", divisors)}
    loaded = load_gguf(write(tmp_path / "scaled.gguf", "llama", tensors))
    for frequencies in (loaded.model.rotary_emb.inv_freq, loaded.model.rotary_emb.original_inv_freq):
        torch.testing.assert_close(frequencies, plain / torch.from_numpy(divisors))


# ----------------------------------------------------------------------------------------------- errors


def changed(name: str, tensor: tuple[str, Any] | None) -> dict[str, tuple[str, Any]]:
    tensors = tensors_of("llama", tied=True, kinds=KINDS)
    if tensor is None:
        del tensors[name]
    else:
        tensors[name] = tensor
    return tensors


ROW = "F32", np.ones(HIDDEN, np.float32)
BROKEN: dict[str, tuple[str, dict[str, tuple[str, Any]], dict[str, int]]] = {
    "one of several files": ("llama", changed("output_norm.weight", ROW), {"split.count": 2}),
    "no tensors for parameters of LlamaForCausalLM: model.layers.1.self_attn.q_proj.weight": (
        "llama", changed("blk.1.attn_q.weight", None), {},
    ),
    "no tensors for parameters of LlamaForCausalLM: lm_head.weight": ("llama", changed("token_embd.weight", None), {}),
    "LlamaForCausalLM has no parameters for: blk.0.other.weight": ("llama", changed("blk.0.other.weight", ROW), {}),
    "LlamaForCausalLM has no parameters for: rope_freqs.weight": ("llama", changed("rope_freqs.weight", ROW), {}),
    "mixture of experts: blk.0.ffn_up_exps.weight": (
        "llama", changed("blk.0.ffn_up_exps.weight", ("F32", np.ones((2, 2, 2), np.float32))), {},
    ),
    r"output_norm.weight .* has the shape \(7,\), but LlamaForCausalLM needs \(512,\)": (
        "llama", changed("output_norm.weight", ("F32", np.ones(7, np.float32))), {},
    ),
    "GGUF model with architecture clip is not supported": ("clip", changed("output_norm.weight", ROW), {}),
    "does not know the architecture 'qwen35'": ("qwen35", changed("output_norm.weight", ROW), {}),
}  # fmt: skip
"""Files that cannot be loaded, by a part of the message: architecture, tensors and more metadata."""


@pytest.mark.parametrize("message", BROKEN)
def test_what_cannot_be_loaded_is_refused_before_a_tensor_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, message: str
) -> None:
    monkeypatch.setattr(np, "fromfile", None)
    architecture, tensors, fields = BROKEN[message]
    with pytest.raises(SpeculativeDecodingError, match=message) as failure:
        load_gguf(write(tmp_path / "broken.gguf", architecture, tensors, fields))
    assert failure.value.hint


def test_rounded_answers_are_those_of_another_target(tmp_path: Path) -> None:
    """An interrupted `distill` goes on only with a target that is multiplied in the same way."""
    path = make(tmp_path)
    exact, rounded = (
        ModelTeacher(load_target(str(path), torch.float32, round_activations=rounds)[0], 1).facts()
        for rounds in (False, True)
    )
    assert exact.pop("packed") != rounded.pop("packed")
    assert exact == rounded


def test_broken_files_and_wrong_dtypes(tmp_path: Path) -> None:
    path = make(tmp_path)
    with pytest.raises(InvalidConfigError, match="float16"):
        load_gguf(path, dtype=torch.float16)
    with pytest.raises(CheckpointFormatError, match="No such file"):
        load_gguf(tmp_path / "none.gguf")
    content = path.read_bytes()
    path.write_bytes(content[:-1000])
    with pytest.raises(CheckpointFormatError, match=r"is incomplete: it has .* Download it again"):
        load_gguf(path)
    for broken in (b"", content[:30], content[:1000], b"GGML" + content[4:],
                   content[:4] + struct.pack(">I", 3) + content[8:]):  # fmt: skip
        path.write_bytes(broken)
        with pytest.raises(CheckpointFormatError):
            load_gguf(path)


def test_without_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Any:
        raise NoKernelsError("no C++ compiler was found")

    monkeypatch.setattr(gguf_file, "load_library", refuse)
    with pytest.raises(UnsupportedModelError, match=r"and no C\+\+ compiler was found. Unpack the file instead"):
        load_gguf(make(tmp_path))


# ----------------------------------------------------------------------------------------------- commands


@pytest.mark.slow
def test_answers_and_heads_of_a_rounded_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All commands of training multiply as they are told."""
    path, loaded = make(tmp_path, "qwen2"), list[bool]()

    def load(*args: Any, round_activations: bool, **kwargs: Any) -> Any:
        loaded.append(round_activations)
        return load_gguf(*args, round_activations=round_activations, **kwargs)

    monkeypatch.setattr("hf_specdec.generation.loading.load_gguf", load)
    (tmp_path / "prompts.txt").write_text("hello hello\nhello\n")
    target = ["--model", path, "--round-activations"]
    answers, head = ["--data", tmp_path / "answers"], tmp_path / "head"
    assert run(monkeypatch, "distill", *target, "--prompts", tmp_path / "prompts.txt", "--output", answers[1],
               "--temperature", 0, "--max-new-tokens", 8) == 0  # fmt: skip
    assert run(monkeypatch, "train", "eagle", *target, *answers, "--output", head, "--max-steps", 1) == 0
    assert run(monkeypatch, "tree", *target, *answers, "--drafter", head, "--output", head, "--max-nodes", 4) == 0
    assert loaded == [True] * 3


def test_commands_take_a_gguf_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make(tmp_path, "qwen2")
    options = ["--model", path, "--max-new-tokens", 8]
    assert run(monkeypatch, "generate", "hello hello", *options) == 0
    plain = capsys.readouterr().out
    assert run(monkeypatch, "generate", "hello hello", *options, "--method", "prompt_lookup") == 0
    assert capsys.readouterr().out == plain
    assert run(monkeypatch, "generate", "hello", "--model", path, "--dtype", "float16") == 2
    assert "Use float32 or bfloat16" in error_line(capsys.readouterr().err)
    assert run(monkeypatch, "generate", "hello", "--model", tmp_path / "none.gguf") == 2
    assert "none.gguf" in error_line(capsys.readouterr().err)
    assert {load_target(str(path), "auto", round_activations=rounds)[0].dtype for rounds in (False, True)} == {
        torch.float32,
        torch.bfloat16,
    }
    blob = path.rename(tmp_path / "sha256-0a1b")  # Ollama's files have no suffix
    options[1] = blob
    assert run(monkeypatch, "generate", "hello hello", *options) == 0
    assert capsys.readouterr().out == plain


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3"])
def test_the_tokenizer_is_that_of_transformers(tmp_path: Path, architecture: str) -> None:
    """Ours is found by the config, without the slow reader; llama, without a class in the mapping, needs it."""
    path = make(tmp_path, architecture)
    expected = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    with mock.patch.object(gguf, "GGUFReader", wraps=gguf.GGUFReader) as reader:
        found = load_tokenizer(str(path))
    assert type(found) is type(expected)
    assert found.backend_tokenizer.to_str() == expected.backend_tokenizer.to_str()
    assert found.special_tokens_map == expected.special_tokens_map
    whole = [call for call in reader.call_args_list if Path(call.args[0]) == path]
    assert bool(whole) == (architecture == "llama")
