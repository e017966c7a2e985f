"""Attention of a tree's nodes over a cache: one function for verification and drafting, and the kernel that it calls.

The queries of all heads that share keys become rows of one attention, so keys and values are read as they lie in the
cache. On NVIDIA GPUs the memory-efficient kernel is called by name. SDPA itself would prefer cuDNN's there, which
builds a plan for every number of keys and keeps them all (https://github.com/pytorch/pytorch/issues/191612), and is
wrong on Blackwell for fewer than 8 heads of keys (https://github.com/pytorch/pytorch/issues/193893). Packed rows fill
few multiprocessors, so long caches are split into parts that are attended to in parallel and merged.
Everywhere else `scaled_dot_product_attention` chooses the kernel. Besides `verification/graph_backends.py` this is the
only file that knows CUDA.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hf_specdec.verification.one_time import note_one_time_work

logger = logging.getLogger(__name__)

HIDDEN = -30000.0
"""Added to the score of a key that is not seen: its weight is exactly zero, and half precision can hold it."""
ALIGNMENT = 8
"""Elements that all strides and offsets of the kernel's inputs are multiples of: it loads 16 bytes at once.

`preprocess_mask` in torch's attention.cpp copies masks to that alignment in every call, `check_supported` in
kernel_forward.h refuses others."""
LONG = 1024
"""Keys per row of the batch up to which a cache is not split (estimated: merging costs four small kernels)."""
SHORTEST_PART = 128
"""Keys that a part has at least."""
MOST_PARTS = 16
"""Parts at most: merging reads the output of each."""
BLOCK_ROWS = 64
"""Query rows that one thread block of the kernel works on."""
TOLERANCE = {torch.float32: 2e-3, torch.float16: 1e-2, torch.bfloat16: 3e-2}
"""Largest error of the kernel on the numbers it is tried with, which lie between -1 and 1."""
PROBE_ROWS, PROBE_KEYS = 10, 161
"""Sizes of the trial: keys that no alignment divides, and one more than a multiple of 32, where the kernel has been
wrong (https://github.com/pytorch/pytorch/issues/191937)."""

Kernel = Callable[[Tensor, Tensor, Tensor, Tensor | None, float | None], tuple[Tensor, Tensor]]
"""Query `[B, H, M, D]`, key and value `[B, H, S, *]`, additive mask `[B or 1, 1, M or 1, S]` and scale to the output
`[B, H, M, Dv]` and the logarithm of each row's sum of exponentials `[B, H, M]`, in float32."""
Masks = Callable[[int], Tensor | None]
"""The additive mask for a number of parts, see `packed_mask`."""


def attend(query: Tensor, key: Tensor, value: Tensor, masks: Masks, scale: float | None) -> Tensor:
    """Attend with queries `[B, H, N, D]` to keys and values `[B, G, S, *]` that H / G heads share; `[B, N, H, Dv]`.

    Args:
        query, key, value: Of one layer.
        masks: For the rows of packed queries, see `packed_mask`.
        scale: Of the scores; None is one over the root of D.
    """
    batch, heads, nodes, dim = query.shape
    shared = key.shape[1]
    rows = heads // shared * nodes
    packed = query.reshape(batch, shared, rows, dim)
    kernel = kernel_for(packed, key, value)
    if kernel is None:
        output = scaled_dot_product_attention(packed, key, value, attn_mask=masks(1), scale=scale)
    else:
        parts = num_parts(batch, shared, rows, key.shape[2], multiprocessors(key.device))
        if parts == 1:
            output, _ = kernel(packed, key, value, masks(1), scale)
        else:
            output = split_attention(packed, key, value, masks(parts), scale, parts, kernel)
    unpacked = output.view(batch, shared, heads // shared, nodes, -1).permute(0, 3, 1, 2, 4)
    return unpacked.reshape(batch, nodes, heads, -1).contiguous()  # some layers take a view of it


def packed_mask(
    seen: Tensor, groups: int, dtype: torch.dtype, num_splits: int = 1, *, all_seen: bool = False
) -> Tensor | None:
    """Build the additive mask of packed queries.

    Args:
        seen: bool `[B, 1, N, S]`, True for keys that are seen.
        groups: Query heads per head of keys.
        dtype: Of the queries: some kernels read other numbers as garbage.
        num_splits: Parts that the keys are split into.
        all_seen: Whether every entry is True.

    Returns:
        `[B, 1, groups * N, S]`, and None if nothing is hidden; for several parts see `split_mask`.
    """
    keys, device = seen.shape[-1], seen.device
    if all_seen:
        step, length = part_sizes(keys, num_splits)
        if step == length:
            return None
        return split_mask(torch.zeros(1, 1, 1, keys, dtype=dtype, device=device), num_splits)
    added = torch.zeros(*seen.shape[:-1], _row_size(keys, device), dtype=dtype, device=device)
    added[..., :keys].masked_fill_(~seen, HIDDEN)
    packed = (added.repeat(1, 1, groups, 1) if groups > 1 else added)[..., :keys]
    return packed if num_splits == 1 else split_mask(packed, num_splits)


def _row_size(keys: int, device: torch.device) -> int:
    """Elements from one row of a mask to the next: where the kernel is called by name, every row is aligned."""
    return keys + (-keys % ALIGNMENT if names_kernel(device) else 0)


# ----------------------------------------------------------------------------------------------- choosing the kernel


def names_kernel(device: torch.device) -> bool:
    """Whether the kernel is called by name on a device, and not chosen by SDPA: on NVIDIA GPUs."""
    return device.type == "cuda" and torch.version.hip is None


def kernel_for(query: Tensor, key: Tensor, value: Tensor) -> Kernel | None:
    """The kernel for packed queries; None leaves the choice to SDPA."""
    device, dtype = query.device, query.dtype
    if not names_kernel(device):
        return None
    if not key.dtype == value.dtype == dtype or torch.is_autocast_enabled(device.type):
        return None  # SDPA casts under autocast
    if torch.compiler.is_compiling() or not torch.backends.cuda.mem_efficient_sdp_enabled():
        return None
    if not all(map(_is_aligned, (query, key, value))):
        return None
    return efficient_attention if works(device, dtype, key.shape[-1], value.shape[-1]) else None


def _is_aligned(tensor: Tensor) -> bool:
    *strides, last = tensor.stride()
    return last == 1 and not any(places % ALIGNMENT for places in (tensor.storage_offset(), *strides))


def efficient_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Torch's memory-efficient kernel, see `Kernel`; rows that see no key at all are zeros.

    It wants a mask of the queries' dtype and of all four sizes, of which any may have stride 0; keys and values must
    not (https://github.com/pytorch/pytorch/issues/191937). It pads the second output to a multiple of 32 rows.
    """
    rows = query.shape[2]
    if mask is not None:
        mask = mask.expand(*query.shape[:3], key.shape[2])
    found: Any = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, mask, compute_log_sumexp=True, dropout_p=0.0, is_causal=False, scale=scale
    )
    return found[0], found[1][..., :rows]


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Number of a GPU's multiprocessors; the device itself is not asked."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def works(device: torch.device, dtype: torch.dtype, key_dim: int, value_dim: int) -> bool:
    """Whether the kernel is right for heads of these sizes on a device; tried once, which waits for the device."""
    note_one_time_work()
    if dtype not in TOLERANCE:
        reason = "the kernel takes no such numbers"
    else:
        try:
            error = probe_error(device, dtype, key_dim, value_dim)
            reason = "" if error <= TOLERANCE[dtype] else f"the error of the memory-efficient kernel is {error:.1e}"
        except torch.OutOfMemoryError:
            raise
        except Exception as failure:  # of any kind: it comes out of a driver, or of another torch
            reason = f"the memory-efficient kernel fails ({type(failure).__name__}: {failure})"
    if reason:
        logger.info(
            "SDPA chooses the attention kernel for %s and heads of %d and %d on %s: %s.", dtype, key_dim, value_dim,
            device, reason,
        )  # fmt: skip
    return not reason


@torch.no_grad()
def probe_error(device: torch.device, dtype: torch.dtype, key_dim: int, value_dim: int) -> float:
    """Largest difference of the kernel, whole and in three parts, from attention in double precision on the host."""
    shapes = (1, 2, PROBE_ROWS, key_dim), (1, 2, PROBE_KEYS + 15, key_dim), (1, 2, PROBE_KEYS + 15, value_dim)
    query, keys, values = (_numbers(shape, place).to(dtype) for place, shape in enumerate(shapes))
    places = torch.arange(PROBE_ROWS * PROBE_KEYS, device="cpu").view(1, 1, PROBE_ROWS, PROBE_KEYS)
    seen = places % 3 > 0
    seen[:, :, 0, :-5] = False  # the first row sees only the last part
    there = [tensor.to(device) for tensor in (query, keys, values)]
    key, value = (tensor[:, :, :PROBE_KEYS] for tensor in there[1:])  # as views of a cache
    masks = functools.partial(packed_mask, seen.to(device), 1, dtype)
    whole, sums = efficient_attention(there[0], key, value, masks(), None)
    parts = split_attention(there[0], key, value, masks(3), None, 3, efficient_attention)
    wanted, wanted_sums = exact_attention(
        query.double(), keys[:, :, :PROBE_KEYS].double(), values[:, :, :PROBE_KEYS].double(),
        torch.zeros(seen.shape, dtype=torch.float64, device="cpu").masked_fill_(~seen, HIDDEN), None,
    )  # fmt: skip
    pairs = (whole, wanted), (parts, wanted), (sums, wanted_sums)
    return max(
        float((found.to("cpu", torch.float64) - right).abs().max().nan_to_num(torch.inf)) for found, right in pairs
    )


def _numbers(shape: tuple[int, ...], place: int) -> Tensor:
    """Numbers between -1 and 1 that do not touch the random number generator."""
    size = torch.Size(shape).numel()
    return (torch.arange(size, dtype=torch.float64, device="cpu") * 0.7 + place).cos().view(shape)


def exact_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Attention written out, as a `Kernel`: what others are compared with."""
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None:
        scores = scores + mask
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


# ----------------------------------------------------------------------------------------------- parts


def num_parts(batch: int, heads: int, rows: int, keys: int, processors: int) -> int:
    """Choose into how many parts the keys are split, from sizes alone: recording a graph must not read the device.

    Args:
        batch: Rows of the batch; with several parts, each row is one call of the kernel.
        heads: Of keys.
        rows: Packed queries.
        keys: Of the cache.
        processors: Multiprocessors of the device.

    Example: 8 heads, 128 rows (32 nodes of 4 heads each), 4,096 keys on 132 multiprocessors are 8 parts, 128 blocks.
    """
    blocks = heads * -(-rows // BLOCK_ROWS)
    if keys <= LONG * batch or 2 * batch * blocks > processors:
        return 1
    return min(processors // blocks, keys // SHORTEST_PART, MOST_PARTS)


def part_sizes(keys: int, num_splits: int) -> tuple[int, int]:
    """Return how far apart parts begin, and how many keys each has; the last part ends with the last key.

    All parts are equally long, so that one view holds them; each overlaps the next by the remainder of the division.

    Example: 2 and 4 for 8 keys in 3 parts: 0-3, 2-5, 4-7.
    """
    step = keys // num_splits
    return step, keys - (num_splits - 1) * step


def split_mask(mask: Tensor, num_splits: int) -> Tensor:
    """Cut an additive mask `[B, 1, M, S]` into parts `[B, n, M, L]`; the first of two parts hides keys that both have.

    Returns:
        A view if the kernel can read that; otherwise a copy, which is made once for all layers of a forward.
    """
    step, length = part_sizes(mask.shape[-1], num_splits)
    parts = mask.unfold(-1, length, step)[:, 0].transpose(1, 2)
    if step == length and step % ALIGNMENT == 0:
        return parts
    made = torch.zeros(*parts.shape[:-1], _row_size(length, mask.device), dtype=mask.dtype, device=mask.device)
    made = made[..., :length].copy_(parts)
    made[:, :-1, :, step:].fill_(HIDDEN)
    return made


def split_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None, num_splits: int,
    kernel: Kernel,
) -> Tensor:  # fmt: skip
    """Attend to parts of the keys in parallel, as rows of a batch, and merge what they give: `[B, H, M, Dv]`.

    Nothing of the keys and values is copied. A part is a view: the rows of a cache view `[B, H, :S, D]` lie `D` apart,
    its parts `step * D`, its heads as far apart as in the cache. The rows of the batch lie too far apart to be one
    dimension with the parts, so each is a call. The queries are expanded with stride 0.

    Args:
        query: `[B, H, M, D]`, packed.
        key: `[B, H, S, D]`.
        value: `[B, H, S, Dv]`.
        mask: Made by `packed_mask` for this number of parts.
        scale: Of the scores; None is one over the root of D.
        num_splits: Number of parts.
        kernel: For a row that sees no key of a part it must give finite numbers, and a sum near `HIDDEN` or lower.
    """
    keys, values = _parts(key, num_splits), _parts(value, num_splits)
    found = [
        kernel(
            query[row].expand(num_splits, -1, -1, -1), keys[row], values[row],
            None if mask is None else mask[row if len(mask) > 1 else 0][:, None], scale,
        )
        for row in range(len(query))
    ]  # fmt: skip
    outputs, sums = zip(*found, strict=True)
    return merge(torch.stack(outputs, 1), torch.stack(sums, 1))


def _parts(tensor: Tensor, num_splits: int) -> Tensor:
    """`[B, H, S, D]` as a view `[B, n, H, L, D]`."""
    step, length = part_sizes(tensor.shape[2], num_splits)
    return tensor.unfold(2, length, step).permute(0, 2, 1, 4, 3)


def merge(outputs: Tensor, sums: Tensor) -> Tensor:
    """Join the outputs `[n, ..., Dv]` of parts by the logarithms of their rows' sums `[n, ...]`, in float32."""
    weights = sums.softmax(0)  # every row sees a key of some part, so not all of them are minus infinity
    return (outputs * weights[..., None]).sum(0).to(outputs.dtype)
