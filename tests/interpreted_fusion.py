"""The Triton kernels beside their references, run by `test_fusion.py`: interpreted on a CPU, compiled on a GPU.

The interpreter works on all kernels of a process or on none, and cuts numbers off when it converts to bfloat16, where
devices round to the nearest: here it rounds as they do.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from fusing import attached, fusing, runners_of, verified
from hf_specdec.fusion import fused, triton_kernels
from hf_specdec.fusion.fused import FUSED_DTYPES

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")  # to infinity, as meant


@pytest.fixture(autouse=True)
def rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    if GPU:
        return
    from triton.runtime import interpreter

    own = interpreter.InterpreterBuilder.cast_impl

    def cast(self: Any, given: Any, dtype: Any) -> Any:
        if given.dtype.scalar == interpreter.tl.float32 and dtype.scalar == interpreter.tl.bfloat16:
            rounded = torch.from_numpy(given.data.copy()).bfloat16().view(torch.int16).numpy()
            return interpreter.TensorHandle(rounded.view("uint16"), dtype.scalar)
        return own(self, given, dtype)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "cast_impl", cast)


@pytest.fixture(params=FUSED_DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    torch.manual_seed(0)
    number: torch.dtype = request.param
    return number


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to(DEVICE, dtype)


def assert_equal(found: Tensor, expected: Tensor) -> None:
    """Contiguous and equal; in float32 up to a few roundings, in half precision except for a rare near tie."""
    assert found.is_contiguous()
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    half = found.dtype != torch.float32
    torch.testing.assert_close(found, expected, **({"atol": 0.02, "rtol": 0.02} if half else {}))
    if half:
        assert ((found - expected).abs() > 1e-6).float().mean() < 0.005


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("size", [1, 37, 300])
def test_norms(dtype: torch.dtype, size: int, early: bool) -> None:
    heads, wide = numbers(2, 2, 3, size, dtype=dtype), numbers(4, 2 * size, dtype=dtype)
    inputs = heads[0], heads.transpose(1, 2), numbers(1, 2, 1, 1, 3, size, dtype=dtype), wide[:, ::2], wide[0, :size]
    for x, (weight, offset) in itertools.product(inputs, ((numbers(size), 0.0), (numbers(size, dtype=dtype), 1.0))):
        options = weight, 1e-5, early, offset
        assert_equal(triton_kernels.launch_rms_norm(x, *options), fused._norm(x, *options))
        residual = numbers(*x.shape, dtype=dtype)
        found = triton_kernels.launch_add_rms_norm(x, residual, *options)
        total, normal = fused._add_norm(x, residual, *options)
        assert torch.equal(found[0], total)
        assert_equal(found[1], normal)


@pytest.mark.parametrize(("heads", "shared", "size", "value_size"), [(4, 2, 10, 7), (3, 1, 64, 64), (2, 2, 2, 1)])
def test_rotary_embedding_and_append(dtype: torch.dtype, heads: int, shared: int, size: int, value_size: int) -> None:
    """Keys and values go to slots out of order; all other slots stay as they are."""
    joined = numbers(2, 5, heads + shared, size + 3, dtype=dtype)[..., 3:].transpose(1, 2)
    query, key = joined[:, :heads], joined[:, heads:]
    value, strided = numbers(2, shared, 5, value_size, dtype=dtype), numbers(2, heads, size, 5, dtype=dtype).mT
    slots = torch.tensor([3, 4, 9, 5, 11], device=DEVICE)
    for rows in (1, 2):
        tables = numbers(2, rows, 5, size, dtype=dtype)
        assert_equal(triton_kernels.launch_rotary(strided, *tables), fused._rotate(strided, *tables))
        memory = numbers(3, shared, 13, size, dtype=dtype)[1:], numbers(2, shared, 13, value_size, dtype=dtype)
        found, wanted = ([one.clone() for one in memory] for _ in range(2))
        rotated = triton_kernels.launch_rotate_and_append(query, key, value, *tables, *found, slots)
        assert_equal(rotated, fused._rotate_and_append(query, key, value, *tables, *wanted, slots))
        for one, other in zip(found, wanted, strict=True):
            assert_equal(one, other)


@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("size", [1, 37, 1500])
def test_gated_products(dtype: torch.dtype, size: int, activation: str) -> None:
    joined = numbers(2, 5, 2 * size, dtype=dtype) * 3
    pairs = (joined[..., :size], joined[..., size:]), (joined[..., ::2], joined[0, 0].expand(2, 5, -1)[..., 1::2])
    for gate, other in pairs:
        expected = fused._gate(gate, other, activation)
        assert_equal(triton_kernels.launch_gated(gate, other, activation), expected)


def test_gates_far_from_zero_are_closed_or_open(dtype: torch.dtype) -> None:
    gate = torch.tensor([[-3e4, -1e3, -90, -20, 0, 20, 90, 1e3, 3e4, torch.inf, torch.nan]], device=DEVICE).to(dtype)
    for activation in ("silu", "gelu"):
        found = triton_kernels.launch_gated(gate, torch.ones_like(gate), activation)
        expected = fused._gate(gate, torch.ones_like(gate), activation)
        torch.testing.assert_close(found, expected, equal_nan=True)


def test_nothing_is_launched_for_no_rows(dtype: torch.dtype) -> None:
    none, weight = numbers(0, 3, 8, dtype=dtype), numbers(8, dtype=dtype)
    assert triton_kernels.launch_rms_norm(none, weight, 1e-5, True, 0.0).shape == (0, 3, 8)
    assert triton_kernels.launch_gated(none, none, "silu").shape == (0, 3, 8)
    assert triton_kernels.launch_rotary(none[None], none, none).shape == (1, 0, 3, 8)


@pytest.mark.skipif(GPU, reason="on a GPU, test_gpu.py has forwards with these kernels")
@pytest.mark.parametrize(("name", "dtype"), [("llama", torch.float32), ("gemma3_text", torch.bfloat16)])
def test_a_forward_of_triton_kernels_is_the_models_own(name: str, dtype: torch.dtype) -> None:
    launched, library = Counter[str](), torch.library.Library("hf_specdec_fused", "IMPL")

    def launch(kind: str, *arguments: Any) -> Any:
        launched[kind] += 1
        return fused._launch(kind, *arguments)

    with fusing() as found:
        model = attached(name, dtype)
        own, chosen = runners_of(model)
        for kind in fused._OPERATIONS:
            library.impl(kind, functools.partial(launch, kind), "CPU")
        results = [verified(model, runner, 2, [-1, *range(9)]) for runner in (own, chosen)]
    appended = {"rotate_and_append": found[0].pop("rotated_attention")}
    assert launched == found[0] + Counter(appended)
    tolerance = 1e-5 if dtype == torch.float32 else 0.01
    for one, other in zip(*results, strict=True):
        assert float((one - other).norm() / one.norm()) < tolerance
