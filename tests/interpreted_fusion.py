"""The Triton kernels beside their references, run by `test_fusion.py`: interpreted on a CPU, compiled on a GPU.

The interpreter works on all kernels of a process or on none, and cuts numbers off when it converts to bfloat16, where
devices round to the nearest: here it rounds as they do. It also multiplies bfloat16 as integers (Triton 3.9).
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from fusing import RunsAgain, attached, fusing, runners_of, verified
from hf_specdec.fusion import fused, triton_kernels
from hf_specdec.fusion.fused import FUSED_DTYPES, PRODUCT_TILES
from hf_specdec.verification import programs

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")  # to infinity, as meant


@pytest.fixture(autouse=True)
def rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    if GPU:
        return
    from triton.runtime import interpreter

    own, multiply = interpreter.InterpreterBuilder.cast_impl, interpreter.InterpreterBuilder.create_dot

    def cast(self: Any, given: Any, dtype: Any) -> Any:
        if given.dtype.scalar == interpreter.tl.float32 and dtype.scalar == interpreter.tl.bfloat16:
            rounded = torch.from_numpy(given.data.copy()).bfloat16().view(torch.int16).numpy()
            return interpreter.TensorHandle(rounded.view("uint16"), dtype.scalar)
        return own(self, given, dtype)

    def dot(self: Any, a: Any, b: Any, *further: Any) -> Any:
        bfloat16, float32 = interpreter.tl.bfloat16, interpreter.tl.float32
        return multiply(self, *(own(self, x, float32) if x.dtype == bfloat16 else x for x in (a, b)), *further)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "cast_impl", cast)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


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
        assert ((found - expected).abs() > 1e-6).sum() <= max(0.005 * found.numel(), 3)


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


@pytest.mark.parametrize("rows", [1, 3, 8, 16, 17, 32, 50, 64])
@pytest.mark.parametrize(("sizes", "k"), [((37, 37), 70), ((48, 32, 32), 64), ((129, 1, 20), 300)], ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_joined_products(dtype: torch.dtype, sizes: tuple[int, ...], k: int, rows: int, biased: bool) -> None:
    """Tiles that end within a weight, and in the middle of its rows; products are those of float32, rounded once."""
    x = numbers(rows, k + 8, dtype=dtype)[:, :k]
    weights = [numbers(size, k, dtype=dtype) / k**0.5 for size in sizes]
    biases = [numbers(size, dtype=dtype) if biased else None for size in sizes]
    wide = [[None if one is None else one.float() for one in part] for part in (weights, biases)]
    expected = [one.to(dtype) for one in fused._products(x.float(), *wide, "", ())]
    for tile in PRODUCT_TILES[rows % 2 :: 2]:
        found = triton_kernels.launch_products(x, weights, biases, "", tile)
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)
        for activation in ("silu", "gelu") if sizes[0] == sizes[1] else ():
            [gated] = triton_kernels.launch_products(x, weights, biases, activation, tile)
            assert_equal(gated, fused._gate(*expected, activation))


def test_nothing_is_launched_for_no_rows(dtype: torch.dtype) -> None:
    none, weight = numbers(0, 3, 8, dtype=dtype), numbers(8, dtype=dtype)
    assert triton_kernels.launch_rms_norm(none, weight, 1e-5, True, 0.0).shape == (0, 3, 8)
    assert triton_kernels.launch_gated(none, none, "silu").shape == (0, 3, 8)
    assert triton_kernels.launch_rotary(none[None], none, none).shape == (1, 0, 3, 8)
    [product] = triton_kernels.launch_products(none, [weight[None]] * 2, [None] * 2, "silu", PRODUCT_TILES[0])
    assert product.shape == (0, 3, 1)


@pytest.mark.skipif(GPU, reason="on a GPU, test_gpu.py has forwards with these kernels")
@pytest.mark.parametrize(("name", "dtype"), [("llama", torch.float32), ("gemma3_text", torch.bfloat16)])
def test_a_forward_of_triton_kernels_is_the_models_own(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched, library = Counter[str](), torch.library.Library("hf_specdec_fused", "IMPL")

    joined, own_launch = list[list[int]](), fused._launch

    def launch(kind: str, *arguments: Any) -> Any:
        launched[kind] += 1
        if kind == "products":
            joined.append([weight.data_ptr() for weight in arguments[1]])
        return own_launch(kind, *arguments)

    monkeypatch.setattr(programs, "_CHOSEN", {})
    monkeypatch.setattr(programs, "calls_kernel_directly", lambda _device: True)
    monkeypatch.setattr(RunsAgain, "median_times", lambda _self, runs: [1.0, *(0.9 for _ in runs[1:])], raising=False)
    with fusing() as found:
        model = attached(name, dtype)
        own, chosen = runners_of(model)
        monkeypatch.setattr(fused, "_launch", launch)
        for kind in fused._OPERATIONS:
            library.impl(kind, functools.partial(launch, kind), "CPU")
        results = [verified(model, runner, 2, [-1, *range(9)]) for runner in (own, chosen)]
    of_layers = [
        [getattr(part, f"{name}_proj").weight.data_ptr() for name in names]
        for layer in model.model.layers
        for part, names in ((layer.self_attn, "qkv"), (layer.mlp, ("gate", "up")))
    ]
    assert joined == of_layers  # no copies
    counts = found[0] | Counter(rotate_and_append=found[0]["rotated_attention"])
    assert launched + Counter(rotated_attention=2) == counts
    tolerance = 1e-5 if dtype == torch.float32 else 0.01
    for one, other in zip(*results, strict=True):
        assert float((one - other).norm() / one.norm()) < tolerance
