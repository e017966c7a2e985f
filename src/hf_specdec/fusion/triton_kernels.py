"""The fused operations of `fusion/fused.py` as Triton kernels; see there for what each function returns.

All compute in float32 and round where the operations they replace do. Rows are those of the last dimension. Numbers of
rows and nodes are not specialised: one compiled kernel serves all widths (joined products: three, by their tiles).
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor
from triton import language as tl

EXACT_STEPS = {"enable_fp_fusion": False}
"""Compiler options: products are rounded before they are added, as they are by the operations replaced."""


@triton.jit(do_not_specialize=["middle", "inner"])
def _norm_kernel(
    x, residual, weight, total, result, middle, inner, size, x_outer, x_middle, x_inner, residual_outer,
    residual_middle, residual_inner, eps, offset, ADDS: tl.constexpr, EARLY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    i, j, k = row // inner // middle, row // inner % middle, row % inner
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    wide = tl.load(x + i * x_outer + j * x_middle + k * x_inner + columns, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        start = residual + i * residual_outer + j * residual_middle + k * residual_inner
        added = tl.load(start + columns, mask=inside, other=0.0).to(tl.float32)
        rounded = (wide + added).to(total.dtype.element_ty)
        tl.store(total + row * size + columns, rounded, mask=inside)
        wide = rounded.to(tl.float32)
    scaled = wide * tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)
    if EARLY:
        scaled = scaled.to(result.dtype.element_ty).to(tl.float32)
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32) + offset
    tl.store(result + row * size + columns, (scaled * scale).to(result.dtype.element_ty), mask=inside)


@triton.jit
def _rotate_half(source, target, cos, sin, half, HALF: tl.constexpr):
    """Rotate one head of one node."""
    columns = tl.arange(0, HALF)
    inside = columns < half
    dtype = target.dtype.element_ty
    first = tl.load(source + columns, mask=inside).to(tl.float32)
    second = tl.load(source + half + columns, mask=inside).to(tl.float32)
    first_cos = tl.load(cos + columns, mask=inside).to(tl.float32)
    second_cos = tl.load(cos + half + columns, mask=inside).to(tl.float32)
    first_sin = tl.load(sin + columns, mask=inside).to(tl.float32)
    second_sin = tl.load(sin + half + columns, mask=inside).to(tl.float32)
    low = (first * first_cos).to(dtype).to(tl.float32) + (-second * first_sin).to(dtype).to(tl.float32)
    top = (second * second_cos).to(dtype).to(tl.float32) + (first * second_sin).to(dtype).to(tl.float32)
    tl.store(target + columns, low.to(dtype), mask=inside)
    tl.store(target + half + columns, top.to(dtype), mask=inside)


@triton.jit(do_not_specialize=["nodes"])
def _rotary_kernel(
    query, key, value, cos, sin, rotated, keys, values, slots, nodes, heads, shared, half, value_size,
    query_row, query_head, query_node, key_row, key_head, key_node, value_row, value_head, value_node, table_row,
    table_node, keys_row, keys_head, keys_slot, values_row, values_head, values_slot,
    APPENDS: tl.constexpr, HALF: tl.constexpr, VALUE: tl.constexpr,
):  # fmt: skip
    """One program for each node and head: a query head, a key head or, behind these, a head of values."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    batch, node = row // nodes, row % nodes
    cos += batch * table_row + node * table_node
    sin += batch * table_row + node * table_node
    if head < heads:
        target = rotated + ((batch * heads + head) * nodes + node) * 2 * half
        source = query + batch * query_row + head * query_head + node * query_node
        _rotate_half(source, target, cos, sin, half, HALF)
    if APPENDS:
        slot = tl.load(slots + node)
        if (head >= heads) & (head < heads + shared):
            one = head - heads
            target = keys + batch * keys_row + one * keys_head + slot * keys_slot
            source = key + batch * key_row + one * key_head + node * key_node
            _rotate_half(source, target, cos, sin, half, HALF)
        if head >= heads + shared:
            one = head - heads - shared
            columns = tl.arange(0, VALUE)
            inside = columns < value_size
            source = value + batch * value_row + one * value_head + node * value_node
            target = values + batch * values_row + one * values_head + slot * values_slot
            tl.store(target + columns, tl.load(source + columns, mask=inside), mask=inside)


@triton.jit
def _activate(x, SILU: tl.constexpr):
    # GELU: x / 2 * (1 + tanh(u)) is x * sigmoid(2 u)
    u = x if SILU else 1.5957691216057308 * (x + 0.044715 * x * x * x)
    return x / (1 + tl.exp(-u))


@triton.jit
def _gate_kernel(gate, other, result, size, gate_row, other_row, SILU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    x = tl.load(gate + row * gate_row + columns, mask=inside, other=0.0).to(tl.float32)
    active = _activate(x, SILU).to(result.dtype.element_ty).to(tl.float32)
    factor = tl.load(other + row * other_row + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(result + row * size + columns, (active * factor).to(result.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "size", "second_size", "third_size"])
def _product_kernel(
    x, weight, second_weight, third_weight, bias, second_bias, third_bias, result, second_result, third_result,
    rows, x_row, size, second_size, third_size, k, BIASED: tl.constexpr, GATED: tl.constexpr, SILU: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program for each tile of weight rows: of one of three weights, or of the first two, gate and up."""
    tile = tl.program_id(0)
    if not GATED:
        before = tl.cdiv(size, BLOCK_N)
        if tile >= before:
            tile -= before
            weight, bias, result, size = second_weight, second_bias, second_result, second_size
            before = tl.cdiv(second_size, BLOCK_N)
            if tile >= before:
                tile -= before
                weight, bias, result, size = third_weight, third_bias, third_result, third_size
    row, columns, inner = tl.arange(0, BLOCK_M), tile * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    has_row, has_column = row < rows, columns < size
    given = x + tl.where(has_row, row, 0)[:, None] * x_row + inner[None, :]
    offsets = tl.where(has_column, columns, 0).to(tl.int64)[None, :] * k + inner[:, None]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    other = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for begin in range(0, k, BLOCK_K):
        exists = inner < k - begin
        part = tl.load(given + begin, mask=exists[None, :], other=0.0)
        total = tl.dot(part, tl.load(weight + offsets + begin, mask=exists[:, None], other=0.0), total,
                       input_precision="ieee")  # fmt: skip
        if GATED:
            other = tl.dot(part, tl.load(second_weight + offsets + begin, mask=exists[:, None], other=0.0), other,
                           input_precision="ieee")  # fmt: skip
    if BIASED:
        total += tl.load(bias + columns, mask=has_column, other=0.0).to(tl.float32)[None, :]
    dtype = result.dtype.element_ty
    if GATED:
        if BIASED:
            other += tl.load(second_bias + columns, mask=has_column, other=0.0).to(tl.float32)[None, :]
        active = _activate(total.to(dtype).to(tl.float32), SILU).to(dtype).to(tl.float32)
        total = active * other.to(dtype).to(tl.float32)
    tl.store(result + row[:, None] * size + columns[None, :], total.to(dtype), mask=has_row[:, None] & has_column)


# ----------------------------------------------------------------------------------------------- launches


def launch_rms_norm(x: Tensor, weight: Tensor, eps: float, early: bool, offset: float) -> Tensor:
    """See `_norm` in `fusion/fused.py`."""
    return _normalize(x, None, weight, eps, early, offset)[1]


def launch_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, early: bool, offset: float
) -> tuple[Tensor, Tensor]:
    """See `_add_norm` in `fusion/fused.py`."""
    return _normalize(x, residual, weight, eps, early, offset)


def _normalize(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, early: bool, offset: float
) -> tuple[Tensor, Tensor]:
    size = x.shape[-1]
    result = torch.empty_like(x, memory_format=torch.contiguous_format)
    total = result if residual is None else torch.empty_like(result)
    given = _as_matrices(x)
    added = given if residual is None else _as_matrices(residual)
    block = triton.next_power_of_2(size)
    if x.numel():
        with torch.cuda.device_of(x):
            _norm_kernel[(x.numel() // size,)](
                given, added, weight.contiguous(), total, result, *given.shape[1:], *given.stride()[:3],
                *added.stride()[:3], eps, offset, ADDS=residual is not None, EARLY=early, BLOCK=block,
                num_warps=min(max(block // 512, 1), 16), **EXACT_STEPS,
            )  # fmt: skip
    return total, result


def _as_matrices(x: Tensor) -> Tensor:
    """Return `[I, J, K, size]` with the rows of x in their order; a view, unless rows are strided."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x.reshape(-1, *x.shape[-3:]) if x.dim() > 4 else x[(None,) * (4 - x.dim())]


def launch_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See `_rotate` in `fusion/fused.py`."""
    return _turn(x, None, cos, sin, None)


def launch_rotate_and_append(
    query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, slots: Tensor
) -> Tensor:
    """See `_rotate_and_append` in `fusion/fused.py`."""
    return _turn(query, (_unit(key), _unit(value)), cos, sin, (keys, values, slots))


def _turn(
    query: Tensor, new: tuple[Tensor, Tensor] | None, cos: Tensor, sin: Tensor,
    cache: tuple[Tensor, Tensor, Tensor] | None,
) -> Tensor:  # fmt: skip
    query, cos, sin = _unit(query), cos.contiguous(), sin.contiguous()
    rotated = torch.empty_like(query, memory_format=torch.contiguous_format)
    key, value = new or (query, query)
    keys, values, slots = cache or (rotated, rotated, rotated)
    batch, heads, nodes, size = query.shape
    shared, half = 0 if new is None else key.shape[1], size // 2
    if query.numel():
        with torch.cuda.device_of(query):
            _rotary_kernel[(batch * nodes, heads + 2 * shared)](
                query, key, value, cos, sin, rotated, keys, values, slots, nodes, heads, shared, half,
                value.shape[-1], *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
                cos.stride(0) if cos.shape[0] > 1 else 0, size, *keys.stride()[:3], *values.stride()[:3],
                APPENDS=new is not None, HALF=triton.next_power_of_2(half),
                VALUE=triton.next_power_of_2(value.shape[-1]), num_warps=1, **EXACT_STEPS,
            )  # fmt: skip
    return rotated


def _unit(x: Tensor) -> Tensor:
    """Return x with neighbouring numbers in its last dimension."""
    return x if x.stride(-1) == 1 else x.contiguous()


def launch_gated(gate: Tensor, other: Tensor, activation: str) -> Tensor:
    """See `_gate` in `fusion/fused.py`."""
    size = gate.shape[-1]
    result = torch.empty_like(gate, memory_format=torch.contiguous_format)
    gates, others = (_unit(one).reshape(-1, size) for one in (gate, other))
    block = min(triton.next_power_of_2(size), 1024)
    if gate.numel():
        with torch.cuda.device_of(gate):
            _gate_kernel[(len(gates), triton.cdiv(size, block))](
                gates, others, result, size, gates.stride(0), others.stride(0), SILU=activation == "silu",
                BLOCK=block, **EXACT_STEPS,
            )  # fmt: skip
    return result


def launch_products(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], activation: str, tile: tuple[int, ...]
) -> list[Tensor]:
    """See `_products` in `fusion/fused.py`; there is a bias for each weight or for none."""
    (block, length, warps, stages), k = tile, x.shape[-1]
    given, sizes, biased = _unit(x).reshape(-1, k), [len(weight) for weight in weights], biases[0] is not None
    results = [x.new_empty(*x.shape[:-1], size) for size in (sizes[:1] if activation else sizes)]
    pointers = [weights[index % len(weights)] for index in range(3)]
    added = [biases[index % len(biases)] for index in range(3)] if biased else pointers
    if x.numel():
        with torch.cuda.device_of(x):
            _product_kernel[(sum(triton.cdiv(one.shape[-1], block) for one in results),)](
                given, *pointers, *added, *(results[index % len(results)] for index in range(3)), len(given),
                given.stride(0), *[*sizes, 0][:3], k, BIASED=biased, GATED=bool(activation),
                SILU=activation == "silu", BLOCK_M=max(triton.next_power_of_2(len(given)), 16), BLOCK_N=block,
                BLOCK_K=length // x.itemsize, num_warps=warps, num_stages=stages, enable_fp_fusion=True,
            )  # fmt: skip
    return results
