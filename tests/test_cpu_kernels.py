"""The CPU kernels: right on every instruction set of this processor, built once, refused clearly, found in graphs."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import platform
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import gelu, silu
from torch.nn.functional import linear as product

from hf_specdec.cpu import library, operations
from hf_specdec.cpu.library import INSTRUCTION_SETS, VARIABLE, NoKernelsError, choose_instruction_set
from hf_specdec.cpu.operations import GELU_TANH, SILU, attend, best_tokens, linear, rms_norm, rotary
from hf_specdec.cpu.rewrite import RecordProducts, call_functions, lift_weights, use_kernels
from hf_specdec.verification.programs import CaptureError, make_program

FEATURES = library.processor_features()
AVAILABLE = [one.name for one in INSTRUCTION_SETS if one.machine == platform.machine() and one.features <= FEATURES]
ROWS, GATES = (1, 2, 3, 5, 6, 7, 8, 13, 32), {SILU: silu, GELU_TANH: lambda gate: gelu(gate, approximate="tanh")}
both_dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])


def forget() -> None:
    library.forget_library()
    operations.functions_for.cache_clear()


@pytest.fixture(scope="module", params=[*((name, 3) for name in AVAILABLE), *((name, 1) for name in AVAILABLE[:1])])
def instructions(request: pytest.FixtureRequest) -> Iterator[None]:
    """One instruction set, whose kernels all operations use, and a number of threads."""
    name, threads = request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, name)
        forget()
        chosen, loaded = library.load_library()
        assert (chosen.name, Path(loaded._name).name.startswith(f"kernels-{name}-")) == (name, True)
        used = (operations.functions_for(torch.float32).multiply, loaded.multiply_32)
        assert len({ctypes.cast(one, ctypes.c_void_p).value for one in used}) == 1
        torch.set_num_threads(threads)
        yield
        torch.set_num_threads(1)
    forget()


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing loaded, an empty cache, and a quick compiler: it copies the kernels that this machine has."""
    forget()
    monkeypatch.delenv(VARIABLE, raising=False)
    ready = library.load_library()[1]._name
    copy = f'while [ $# -gt 1 ]; do [ "$1" = -o ] && exec cp {ready} "$2"; shift; done'
    monkeypatch.setenv("CXX", script(tmp_path / "copy", copy))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    forget()
    yield
    forget()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def random(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, dtype=torch.float32, device="cpu") * scale).to(dtype)


def assert_right(found: Tensor, *exact: Tensor) -> None:
    """Within 1e-5 of one of the float64 results; in bfloat16 as near as its rounding, so never farther than torch."""
    excess = []
    for one in exact:
        slack = 1e-5 * (one.abs() + one.pow(2).mean().sqrt())
        rounding = 0 if found.dtype == torch.float32 else (one.to(found.dtype).double() - one).abs()
        excess.append((found.double() - one).abs() - rounding - slack)
    assert found.shape == exact[0].shape
    assert bool((torch.stack(excess).amin(0) <= 0).all())


def exact_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return product(x.double(), weight.double(), None if bias is None else bias.double())


@pytest.mark.usefixtures("instructions")
@both_dtypes
def test_products_are_exact(dtype: torch.dtype) -> None:
    for rows in ROWS:
        for k in (1, 33, 37, 64, 576):
            x, sizes = random(rows, k, dtype=dtype), (5, 8, 96, 3, 130)
            weights = [random(n, k, dtype=dtype, scale=k**-0.5) for n in sizes]
            biases = [None if n in (3, 96) else random(n, dtype=dtype) for n in sizes]
            exact = list(map(exact_product, [x] * 5, weights, biases))
            assert_right(linear(x, weights, biases), torch.cat(exact, -1))
            for weight, bias, one in zip(weights, biases, exact, strict=True):
                assert_right(linear(x, [weight], [bias]), one)
                assert_right(linear(x, [weight], [None]), exact_product(x, weight, None))


@pytest.mark.usefixtures("instructions")
@both_dtypes
@pytest.mark.parametrize("activation", GATES)
def test_gated_products_are_exact(dtype: torch.dtype, activation: int) -> None:
    for rows in ROWS:
        for k, n in ((33, 5), (64, 8), (37, 96), (576, 130)):
            x, weights = random(rows, k, dtype=dtype), [random(n, k, dtype=dtype, scale=k**-0.5) for _ in range(2)]
            bias = random(n, dtype=dtype)
            for biases in ([None, None], [bias, None], [None, bias], [bias, bias.flip(0)]):
                gate, other = map(exact_product, [x, x], weights, biases)
                assert_right(linear(x, weights, biases, activation), GATES[activation](gate) * other)


@pytest.mark.usefixtures("instructions")
@both_dtypes
@pytest.mark.parametrize("activation", GATES)
@pytest.mark.parametrize("sign", [-1, 1])
def test_gates_far_from_zero_are_closed_or_open(dtype: torch.dtype, activation: int, sign: int) -> None:
    # BUG: silu(-90) is -90, silu(-89) and silu(inf) are NaN, gelu(-11) is -11: `exponential` in vectors.h overflows
    values = [float("inf") if sign > 0 else 4e4, 1e4, 300, 200, 100, 90, 89, 88.5, 50, 20, 11, 10, 5]
    x, one = torch.tensor(values, dtype=dtype, device="cpu")[:, None] * sign, random(6, 1, dtype=dtype) * 0 + 1
    found = linear(x, [one, one / 2], [None, None], activation)
    torch.testing.assert_close(found, (GATES[activation](x.double()) * 0.5).expand(-1, 6).to(dtype))


@pytest.mark.usefixtures("instructions")
@both_dtypes
def test_products_of_other_shapes(dtype: torch.dtype) -> None:
    weights, biases = [random(10, 20, dtype=dtype) for _ in range(2)], [random(10, dtype=dtype), None]
    whole = random(4, 3, 40, dtype=dtype)
    for x in (whole[..., :20], whole[..., ::2], whole.mT[:20].mT, whole.transpose(0, 1)[..., 20:], whole[0, 0, :20]):
        assert_right(linear(x, weights[:1], biases[:1]), exact_product(x, weights[0], biases[0]))
    for x in (whole[:0, :, :20], whole[:, :0, :20], random(3, 11, 20, dtype=dtype)):  # none; more than MAX_ROWS
        first, second = map(product, [x, x], weights, biases)
        assert torch.equal(linear(x, weights[:1], biases[:1]), first)
        assert torch.equal(linear(x, weights, biases), torch.cat([first, second], -1))
        for activation, gate in GATES.items():
            assert torch.equal(linear(x, weights, biases, activation), gate(first) * second)


@pytest.mark.usefixtures("instructions")
@both_dtypes
def test_norms_are_exact(dtype: torch.dtype) -> None:
    for k in (1, 7, 33, 64, 130, 576):
        for weight in (random(k), random(k, dtype=dtype)):
            for x in (random(5, k, dtype=dtype), random(3, 2, k, dtype=dtype).mT.clone().mT, random(0, k, dtype=dtype)):
                normal = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 0.01).sqrt()
                assert_right(rms_norm(x, weight, 0.01, False), normal * weight.double())
                exact = [(normal * (1 + nearly)).to(dtype).double() for nearly in (-1e-6, 1e-6)]  # near ties
                assert_right(rms_norm(x, weight, 0.01, True), *(one * weight.double() for one in exact))


@pytest.mark.usefixtures("instructions")
@both_dtypes
@pytest.mark.parametrize("dim", [2, 6, 10, 34, 64, 100])
def test_rotary_embeddings_are_exact(dtype: torch.dtype, dim: int) -> None:
    whole = random(2, 5, 3, 2 * dim, dtype=dtype)
    for x in (whole[..., :dim].transpose(1, 2), whole[..., ::2].permute(0, 2, 1, 3), random(2, 3, 5, dim, dtype=dtype)):
        low, high = x.double().chunk(2, -1)
        for rows in (1, 2):
            cos, sin = random(rows, 5, dim, dtype=dtype), random(rows, dim, 5, dtype=dtype).mT
            turned = torch.cat([-high, low], -1) * sin.double()[:, None]
            assert_right(rotary(x, cos, sin), x.double() * cos.double()[:, None] + turned)


def attend_exactly(query: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scale: float) -> Tensor:
    """With zeros for rows that see nothing."""
    keys, values = (one.double().repeat_interleave(query.shape[1] // one.shape[1], 1) for one in (keys, values))
    scores = (query.double() @ keys.mT * scale).masked_fill(~seen, -float("inf"))
    return (scores.softmax(-1).nan_to_num(0.0) @ values).transpose(1, 2)


@pytest.mark.usefixtures("instructions")
@both_dtypes
@pytest.mark.parametrize(("heads", "shared"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("dims", [(8, 8), (20, 21), (64, 80), (80, 64)])
def test_attention_is_exact_and_writes_only_its_slots(
    dtype: torch.dtype, heads: int, shared: int, dims: tuple[int, int]
) -> None:
    for length, kind in ((n, kind) for n in (1, 2, 127, 128, 129, 300) for kind in ("all", "rows", "shared", "strided")):
        nodes = min(length, 5)
        begin, window = length - nodes, (slice(1, 3), slice(None), slice(length - nodes, length))
        query = random(2, nodes, heads, dims[0], dtype=dtype).transpose(1, 2)
        key = random(2, nodes, shared, dims[0] + 3, dtype=dtype)[..., 3:].transpose(1, 2)
        value = random(2, shared, nodes, dims[1], dtype=dtype)
        stored = [random(4, shared, length + 2, dim, dtype=dtype) for dim in dims]
        wanted = [one.clone() for one in stored]
        wanted[0][window], wanted[1][window] = key, value
        seen = torch.rand(2, 1, nodes, length, dtype=torch.float32, device="cpu") < 0.6
        seen[0, 0, 0, :128] = seen[1, 0, -1, 128:] = False  # nothing in a chunk, or nothing at all
        mask = {"all": None, "shared": seen[:1], "rows": seen, "strided": seen.mT.contiguous().mT}[kind]
        scale = 0.3 if kind == "all" else None
        found = attend(query, key, value, stored[0][1:3], stored[1][1:3], begin, mask, scale)
        assert all(map(torch.equal, stored, wanted))
        keys, values = (one[1:3, :, :length] for one in wanted)
        visible = torch.ones_like(seen) if mask is None else mask
        assert_right(found, attend_exactly(query, keys, values, visible, scale or dims[0] ** -0.5))


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("broken", ["query", "key", "value"])
def test_attention_shows_nan(broken: str) -> None:
    # BUG: zeros for a query or key that is NaN (attention.h: `sum > 0 ? ... : 0`, and the maximum skips NaN)
    given = {name: random(1, 2, 1, 8) for name in ("query", "key", "value")}
    given[broken][0, 0] = float("nan")
    found = attend(**given, keys=random(1, 2, 9, 8), values=random(1, 2, 9, 8), begin=4, mask=None, scale=None)
    assert found.isnan().all(-1).tolist() == [[[True, False]]]


@pytest.mark.usefixtures("instructions")
@both_dtypes
@pytest.mark.parametrize("lowest", [-1000.0, -float("inf")])
def test_the_likeliest_tokens(dtype: torch.dtype, lowest: float) -> None:
    # BUG: a logit of -inf makes all log-probabilities NaN (`exponential` of -inf)
    for size in (3, 64, 65, 1000):
        logits = random(2, 3, size * 2, dtype=dtype).round(decimals=1)[..., size:]  # with ties
        logits[..., 0] = lowest
        order = logits.double().sort(dim=-1, descending=True, stable=True).indices
        for count in {1, 3, min(size, 20)}:
            log_probs, ids = best_tokens(logits, count)
            assert torch.equal(ids, order[..., :count])
            torch.testing.assert_close(log_probs.double(), logits.double().log_softmax(-1).gather(-1, ids), atol=1e-5, rtol=1e-5)


# ----------------------------------------------------------------------------------------------- builds


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What loads log, without the announcement of a compilation."""
    with caplog.at_level(logging.INFO, "hf_specdec"):
        for _ in range(3):
            library.load_or_none()
    return [record.getMessage() for record in caplog.records if not record.getMessage().startswith("Compiling ")]


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(("variables", "reason"), [
    ({VARIABLE: "sse9"}, f"{VARIABLE} is 'sse9', but must be 'none' or one of avx512_bf16, avx512, avx2, arm_bf16, arm."),
    ({VARIABLE: " none "}, f"{VARIABLE} is 'none'."),
    ({"CXX": "/nonexistent"}, "no C++ compiler was found (/nonexistent; set CXX to use another one)."),
    ({"CXX": "", "PATH": "TMP"}, "no C++ compiler was found (g++ or clang++; set CXX to use another one)."),
    ({"CXX": "TMP/fails"}, "TMP/fails cannot compile them for BEST (x.cpp:1: error: no such thing)."),
    ({"CXX": "TMP/hangs"}, "TMP/hangs failed (Command '['TMP/hangs', '-std="),
    ({"TMPDIR": "/proc/none", "XDG_CACHE_HOME": "/proc"}, "they cannot be built or loaded ("),  # BUG: raises OSError
    ({"HOME": "", "XDG_CACHE_HOME": ""}, "they cannot be built or loaded ("),  # BUG: raises RuntimeError
])  # fmt: skip
def test_a_failure_is_logged_once_with_its_reason(
    variables: dict[str, str], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    script(tmp_path / "fails", "echo x.cpp:1: note; echo 'x.cpp:1: error: no such thing' >&2; exit 1")
    script(tmp_path / "hangs", '[ "$1" = --version ] || exec sleep 60')
    for name, value in variables.items():
        monkeypatch.setenv(name, value.replace("TMP", str(tmp_path)))
    monkeypatch.setattr(library, "COMPILE_TIMEOUT", 0.5)
    found = messages(caplog)[-1]
