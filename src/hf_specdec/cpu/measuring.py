"""Check the kernel's products with a model's weights, and measure up to how many rows they are faster than torch's."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from hf_specdec.cpu import operations
from hf_specdec.cpu.operations import MAX_ROWS, can_multiply, limit_rows, rows_are_limited

logger = logging.getLogger(__name__)

MEASURED_ROWS = (16, 32, 64, MAX_ROWS)
"""Numbers of rows for which `measure_widest` times products."""
MEASURED_BYTES = 4 * 2**20, 32 * 2**20
"""Fewest and most bytes of weights that `measure_widest` uses: fewer would stay in the processor's caches."""

PROBE_ROWS = (1, 2, 7)
"""Rows of x in `product_error`: each tile size of the kernel is used."""
PROBE_COLUMNS = 64
"""First and last columns of a product that `product_error` compares."""
PRODUCT_TOLERANCE = {torch.bfloat16: 1e-2, torch.float32: 1e-4}
"""Maximum relative error of the kernel's products."""


def product_error(weight: Tensor) -> float:
    """Return the largest relative distance between products of the kernel and the same products in float32.

    Args:
        weight: `[N, K]`; its first and last rows are compared.
    """
    size = weight.shape[1]
    checked = torch.cat([weight[:PROBE_COLUMNS], weight[-PROBE_COLUMNS:]]).float()
    errors = []
    for rows in PROBE_ROWS:
        numbers = torch.arange(rows * size, dtype=torch.float32, device="cpu") * 0.7
        x = numbers.cos().view(rows, size).to(weight.dtype)
        found = operations.linear(x, [weight], [None]).float()
        found = torch.cat([found[:, :PROBE_COLUMNS], found[:, -PROBE_COLUMNS:]], dim=-1)
        expected = functional.linear(x.float(), checked)
        errors.append(float((found - expected).norm() / expected.norm().clamp(min=1e-6)))
    return max(errors)


def measure_widest(weights: Iterable[Tensor]) -> None:
    """Time the kernel's products and torch's with some weights, once per process and dtype.

    Products with more rows than the kernel wins with use torch's `linear` from then on: oneDNN is faster on processors
    with matrix units (AMX). Takes 0.1 to 0.3 s; skipped if the weights fit in the processor's caches.

    Args:
        weights: Weights `[N, K]` of one model.
    """
    chosen, size = list[Tensor](), 0
    for weight in weights:
        known = rows_are_limited(weight.dtype) or (chosen and chosen[0].dtype != weight.dtype)
        fits = size + weight.nbytes <= MEASURED_BYTES[1]  # an lm_head may be far larger
        if fits and not known and can_multiply(weight[:1], weight, None):
            chosen, size = [*chosen, weight], size + weight.nbytes
    if size < MEASURED_BYTES[0]:
        return
    dtype, won = chosen[0].dtype, MEASURED_ROWS[0] // 2
    for rows in MEASURED_ROWS:
        if _seconds(operations.linear, chosen, rows) > _seconds(operations.wide_linear, chosen, rows):
            break
        won = rows
    limit_rows(dtype, won)
    logger.info("The CPU kernels multiply up to %d rows of %s; torch multiplies more.", won, dtype)


def _seconds(multiply: Callable[..., Tensor], weights: Sequence[Tensor], rows: int) -> float:
    """Return the shortest of three times of the products of all weights with this number of rows."""
    inputs = {
        size: torch.ones(rows, size, dtype=weights[0].dtype, device="cpu") for size in {w.shape[1] for w in weights}
    }
    taken = []
    for _ in range(3):
        begin = time.perf_counter()
        for weight in weights:
            multiply(inputs[weight.shape[1]], [weight], [None])
        taken.append(time.perf_counter() - begin)
    return min(taken)
