"""Attention of tree nodes over a key-value cache, without copies of keys and values, and the choice of its kernel.

transformers' `sdpa` repeats keys and values for every query head of a group, and converts a bool mask to an additive
one in every layer. Here the query heads that share keys are packed into the rows of one attention over the cache, and
the additive mask is built once per forward. `layer_attention` is registered with transformers in place of `sdpa`, and
calls that one except in our own forwards, which a context variable marks. So no model or configuration changes, and
forwards of other threads are not affected.

On NVIDIA GPUs the memory-efficient kernel is called directly. SDPA would prefer cuDNN's kernel, which builds and keeps
a plan for every number of keys (https://github.com/pytorch/pytorch/issues/191612) and is wrong on Blackwell for fewer
than 8 key heads (https://github.com/pytorch/pytorch/issues/193893). Packed rows occupy few multiprocessors, so long
caches are split into parts that are processed in parallel and merged. On a CPU, the package's own kernel appends and
attends (`append_and_attend`); elsewhere, `scaled_dot_product_attention` chooses the kernel.

Only this file and `verification/graph_backends.py` contain CUDA-specific code.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_specdec.cpu import operations
from hf_specdec.verification.cache import TreeCache, TreeLayer
from hf_specdec.verification.masks import RECURRENT_MASKS
from hf_specdec.verification.memory import note_one_time_work
from hf_specdec.verification.recurrence import Branches

logger = logging.getLogger(__name__)

REPLACED = "sdpa"
"""The only attention implementation that is replaced: its mask format and its rounding are known."""
UNSUPPORTED_ARGUMENTS = ("softcap", "s_aux", "position_bias")
"""Arguments that change the result of attention; a layer that passes one gets transformers' function."""
HIDDEN_SCORE = -30000.0
"""Added to the scores of hidden keys: makes their weights exactly zero and is representable in half precision."""
ALIGNMENT = 8
"""Strides and offsets of the kernel's inputs must be multiples of this many elements: it loads 16 bytes at once.

Otherwise `preprocess_mask` in torch's attention.cpp copies masks in every call, and `check_supported` in
kernel_forward.h refuses the other inputs."""
LONG = 1024
"""Caches of at most `LONG * B` keys per row are not split (B: batch size).

On an H100, a layer of an 8B model (one node) takes 34 us with 768 keys unsplit, and with 3,072 keys 15 us for the
parts and about 20 us for merging them (`benchmarks/results/gpu_h100.json`). Each batch row costs one more call."""
SHORTEST_PART = 128
"""Minimum number of keys in a part."""
MOST_PARTS = 16
"""Maximum number of parts, because merging reads the output of every part."""
BLOCK_ROWS = 64
"""Query rows per thread block of the kernel."""
KERNEL_TOLERANCE = {torch.float32: 2e-3, torch.float16: 1e-2, torch.bfloat16: 3e-2}
"""Maximum absolute error of the kernel in the trial run, whose inputs are between -1 and 1."""
PROBE_QUERIES, PROBE_KEYS = 10, 161
"""Sizes of the trial run. The number of keys is unaligned and one more than a multiple of 32, a case that torch got
wrong (https://github.com/pytorch/pytorch/issues/191937)."""

Kernel = Callable[[Tensor, Tensor, Tensor, Tensor | None, float | None], tuple[Tensor, Tensor]]
"""`kernel(query [B, H, M, D], key [B, H, S, D], value [B, H, S, Dv], additive mask [B or 1, 1, M or 1, S], scale)`.

Returns the output `[B, H, M, Dv]` and each row's log-sum-exp of the scores `[B, H, M]` in float32."""
_Attend = Callable[[str, Tensor, Tensor, Tensor, float | None], Tensor]  # see `AttentionContext.attend`


class AttentionContext:
    """Masks shared by the attention layers of one forward.

    Args:
        masks: The masks passed to the model, by layer type: bool `[B, 1, N, S]`, True for visible keys.
        all_seen: Layer types whose mask is True everywhere.
        attend: Computes the attention instead, to trace a forward for compilation.
        order: Logical order of the nodes for the CPU kernels, see `operations.attend`.
        branches: The tree, if the model has recurrent layers.
    """

    def __init__(
        self, masks: Mapping[str, Tensor], all_seen: frozenset[str] = frozenset(), attend: _Attend | None = None,
        order: Tensor | None = None, branches: Branches | None = None,
    ) -> None:  # fmt: skip
        self.masks, self._all_seen, self.order, self.branches = masks, all_seen, order, branches
        self._replacement, self.is_asked = attend, False  # whether a layer has called transformers' attention function
        self.has_attended = False  # whether `attend` has computed anything
        self._packed: dict[tuple[str, int, torch.dtype, int], Tensor | None] = {}

    def argument(self) -> Any:
        """Return the masks as the model takes them: one, or by layer type; None if no layer attends."""
        if len(self.masks) < 2:
            return next(iter(self.masks.values()), None)
        return {**self.masks, **dict.fromkeys(RECURRENT_MASKS if self.branches is not None else ())}

    def kind(self, mask: Tensor | None) -> str | None:
        """Return the layer type that this mask object belongs to, or None if it is not one of `masks`."""
        self.is_asked = True
        return next((name for name, known in self.masks.items() if known is mask), None)

    def mask(self, kind: str) -> Tensor | None:
        """Return the bool mask `[B, 1, N, S]` of a layer type; None if all keys are visible."""
        return None if kind in self._all_seen else self.masks[kind]

    def packed(self, kind: str, groups: int, dtype: torch.dtype, num_splits: int = 1) -> Tensor | None:
        """Return the additive mask of a layer type, see `packed_mask`, built once per forward."""
        key = kind, groups, dtype, num_splits
        if key not in self._packed:
            self._packed[key] = packed_mask(self.masks[kind], *key[1:], all_seen=kind in self._all_seen)
        return self._packed[key]

    def attend(self, kind: str, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        """Attend in a layer of type `kind`, see `attend_packed`."""
        if self._replacement is not None:
            return self._replacement(kind, query, key, value, scaling)
        self.has_attended = True
        masks = functools.partial(self.packed, kind, query.shape[1] // key.shape[1], query.dtype)
        return attend_packed(query, key, value, masks, scaling)


_CONTEXT: ContextVar[AttentionContext | None] = ContextVar("attention_context", default=None)


def layer_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float = 0.0,
    scaling: float | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Compute a layer's attention `[B, N, H, Dv]` for queries `[B, H, N, D]`, with transformers' interface.

    Calls transformers' `sdpa` outside of `attending`, in code that torch.compile compiles, for masks that are not in
    the context, with dropout, and if one of `UNSUPPORTED_ARGUMENTS` is given.
    """
    context = None if torch.compiler.is_compiling() else _CONTEXT.get()
    kind = None if context is None else context.kind(attention_mask)
    unsupported = dropout or any(kwargs.get(name) is not None for name in UNSUPPORTED_ARGUMENTS)
    if context is None or kind is None or unsupported:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    return context.attend(kind, query, key, value, scaling), None


@functools.cache
def _register() -> None:
    """Register the attention function with transformers, once per process."""
    AttentionInterface.register(REPLACED, layer_attention)


@contextmanager
def attending(context: AttentionContext | None) -> Iterator[None]:
    """Use this attention in this thread, in models whose attention is `REPLACED`; None changes nothing."""
    if context is None:
        yield
        return
    _register()
    outer = _CONTEXT.get()
    try:  # an interrupt must not leave it set: plain forwards would attend to this one's nodes
        _CONTEXT.set(context)
        yield
    finally:
        _CONTEXT.set(outer)


# ----------------------------------------------------------------------------------------------- CPU kernel


def append_and_attend(
    cache: Cache, layer: int, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None,
    order: Tensor | None = None,
) -> Tensor | None:  # fmt: skip
    """Append to a layer of a cache and attend to it with the CPU kernel; return `[B, N, H, Dv]`.

    See `operations.attend` for the arguments. None, with the cache unchanged, if the kernel does not support these
    inputs or is not loaded.
    """
    if not isinstance(cache, TreeCache) or not operations.can_attend(query, key, value):
        return None
    entry = cache.layers[layer]
    if not kernel_can_use(entry, query.dtype):
        return None
    keys, values, begin = entry.reserve(key, value)
    return operations.attend(query, key, value, keys, values, begin, mask, scale, order)


def kernel_can_use(entry: TreeLayer, dtype: torch.dtype) -> bool:
    """Whether the kernel can use the memory of a layer; another dtype occurs under autocast."""
    return entry.window is None and (not entry.is_initialized or entry.keys.dtype == entry.values.dtype == dtype)


# ----------------------------------------------------------------------------------------------- packed queries


def attend_packed(
    query: Tensor, key: Tensor, value: Tensor, masks: Callable[[int], Tensor | None], scale: float | None
) -> Tensor:
    """Compute grouped-query attention of `[B, H, N, D]` to `[B, G, S, *]`; returns `[B, N, H, Dv]`, contiguous.

    `masks` returns the additive mask of the packed queries for a number of parts, see `packed_mask`.
    """
    batch, heads, nodes, dim = query.shape
    key_heads = key.shape[1]
    rows = heads // key_heads * nodes
    packed = query.reshape(batch, key_heads, rows, dim)  # queries of all heads that share a key head become rows
    kernel = kernel_for(packed, key, value)
    if kernel is None:
        output = scaled_dot_product_attention(packed, key, value, attn_mask=masks(1), scale=scale)
    else:
        parts = num_parts(batch, key_heads, rows, key.shape[2], multiprocessors(key.device))
        if parts == 1:
            output, _ = kernel(packed, key, value, masks(1), scale)
        else:
            output = split_attention(packed, key, value, masks(parts), scale, parts, kernel)
    unpacked = output.view(batch, key_heads, heads // key_heads, nodes, -1).permute(0, 3, 1, 2, 4)
    return unpacked.reshape(batch, nodes, heads, -1).contiguous()  # some layers call view() on it


def packed_mask(
    seen: Tensor, groups: int, dtype: torch.dtype, num_splits: int = 1, *, all_seen: bool = False
) -> Tensor | None:
    """Build the additive mask of packed queries: `[B, 1, groups * N, S]`, or for n parts as from `split_mask`.

    Args:
        seen: bool `[B, 1, N, S]`, True for visible keys.
        groups, num_splits: Query heads per key head, and number of parts that the keys are split into.
        dtype: Dtype of the queries; some kernels misread masks of another dtype.
        all_seen: Whether every entry of `seen` is True: then None, or `[1, n, 1, L]` for parts that overlap.
    """
    keys, device = seen.shape[-1], seen.device
    if all_seen:
        step, length = part_sizes(keys, num_splits)
        if step == length:
            return None
        return split_mask(torch.zeros(1, 1, 1, keys, dtype=dtype, device=device), num_splits)
    added = torch.zeros(*seen.shape[:-1], _row_size(keys, device), dtype=dtype, device=device)
    added[..., :keys].masked_fill_(~seen, HIDDEN_SCORE)
    packed = (added.repeat(1, 1, groups, 1) if groups > 1 else added)[..., :keys]
    return packed if num_splits == 1 else split_mask(packed, num_splits)


def _row_size(keys: int, device: torch.device) -> int:
    """Return the row stride of a mask in elements; rows are aligned if the kernel is called directly."""
    return keys + (-keys % ALIGNMENT if calls_kernel_directly(device) else 0)


# ----------------------------------------------------------------------------------------------- choosing the kernel


def calls_kernel_directly(device: torch.device) -> bool:
    """Whether the kernel is called directly on this device (NVIDIA GPUs) instead of being chosen by SDPA."""
    return device.type == "cuda" and torch.version.hip is None


def kernel_for(query: Tensor, key: Tensor, value: Tensor) -> Kernel | None:
    """Return the kernel for packed queries `[B, G, M, D]`, keys and values `[B, G, S, *]`; None to let SDPA choose."""
    device, dtype = query.device, query.dtype
    if not calls_kernel_directly(device):
        return None
    if not key.dtype == value.dtype == dtype or torch.is_autocast_enabled(device.type):
        return None  # SDPA casts under autocast
    if torch.compiler.is_compiling() or not torch.backends.cuda.mem_efficient_sdp_enabled():
        return None
    for tensor in (query, key, value):
        *strides, last = tensor.stride()
        if last != 1 or any(number % ALIGNMENT for number in (tensor.storage_offset(), *strides)):
            return None
    return efficient_attention if works(device, dtype, key.shape[-1], value.shape[-1]) else None


def efficient_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Run torch's memory-efficient kernel, see `Kernel`; outputs are finite even in rows that see no key.

    The mask must have the queries' dtype and four dimensions; it is expanded with stride 0. Keys and values must not
    have stride 0 (https://github.com/pytorch/pytorch/issues/191937). The kernel pads the second output to a multiple
    of 32 rows.
    """
    rows = query.shape[2]
    if mask is not None:
        mask = mask.expand(*query.shape[:3], key.shape[2])
    output: Any = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, mask, compute_log_sumexp=True, dropout_p=0.0, is_causal=False, scale=scale
    )
    return output[0], output[1][..., :rows]


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return a GPU's number of multiprocessors, without synchronizing."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def works(device: torch.device, dtype: torch.dtype, key_dim: int, value_dim: int) -> bool:
    """Whether the kernel computes correct results for these head sizes; tried once, see `is_correct`."""
    trial = functools.partial(probe_error, device, dtype, key_dim, value_dim)
    sizes = f"dtype {dtype} and head sizes {key_dim} and {value_dim} on {device}"
    return is_correct("the memory-efficient kernel", trial, dtype, f"SDPA chooses the attention kernel for {sizes}")


def is_correct(
    kernel: str, trial: Callable[[], float], dtype: torch.dtype, otherwise: str, level: int = logging.INFO
) -> bool:
    """Whether the error in a trial run, which synchronizes the device, is as small as the dtype allows.

    If not, the reason is logged, with what happens otherwise. If the trial run does not fit in memory, that is raised,
    and the next call tries again.
    """
    note_one_time_work()
    if dtype not in KERNEL_TOLERANCE:
        reason = f"{kernel} does not support this dtype"
    else:
        try:
            error = trial()
            wrong = not error <= KERNEL_TOLERANCE[dtype]  # NaN is wrong, too
            reason = f"the error of {kernel} is {error:.1e}" if wrong else ""
        except torch.OutOfMemoryError:
            raise
        except Exception as failure:  # drivers, compilers and other versions of torch raise various types
            reason = f"{kernel} fails ({type(failure).__name__}: {failure})"
    if reason:
        logger.log(level, "%s: %s.", otherwise, reason)
    return not reason


def trial_numbers(offset: int, *shape: int, dtype: torch.dtype) -> Tensor:
    """Return numbers between -1 and 1 on the host, without using the random number generator."""
    size = torch.Size(shape).numel()
    return (torch.arange(size, dtype=torch.float64, device="cpu") * 0.7 + offset).cos().view(shape).to(dtype)


@torch.no_grad()
def probe_error(device: torch.device, dtype: torch.dtype, key_dim: int, value_dim: int) -> float:
    """Return the largest absolute error of the kernel, unsplit and in three parts, against float64 on the host."""
    numbers = functools.partial(trial_numbers, dtype=dtype)
    query = numbers(0, 1, 2, PROBE_QUERIES, key_dim)
    keys, values = (numbers(offset, 1, 2, PROBE_KEYS + 15, dim) for offset, dim in ((1, key_dim), (2, value_dim)))
    indices = torch.arange(PROBE_QUERIES * PROBE_KEYS, device="cpu").view(1, 1, PROBE_QUERIES, PROBE_KEYS)
    seen = indices % 3 > 0
    seen[:, :, 0, :-5] = False  # the first row sees only keys of the last part
    mask = torch.zeros(seen.shape, dtype=torch.float64, device="cpu").masked_fill_(~seen, HIDDEN_SCORE)
    exact = query.double(), keys[:, :, :PROBE_KEYS].double(), values[:, :, :PROBE_KEYS].double()
    expected, expected_sums = exact_attention(*exact, mask, None)
    query, keys, values = (tensor.to(device) for tensor in (query, keys, values))
    key, value = keys[:, :, :PROBE_KEYS], values[:, :, :PROBE_KEYS]  # views, like those of a cache
    masks = functools.partial(packed_mask, seen.to(device), 1, dtype)
    whole, sums = efficient_attention(query, key, value, masks(), None)
    parts = split_attention(query, key, value, masks(3), None, 3, efficient_attention)
    pairs = (whole, expected), (parts, expected), (sums, expected_sums)
    return max(
        float((found.to("cpu", torch.float64) - wanted).abs().max().nan_to_num(torch.inf)) for found, wanted in pairs
    )


def exact_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Compute attention with plain matrix products, as the reference for the trial run; see `Kernel`."""
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None:
        scores = scores + mask
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


# ----------------------------------------------------------------------------------------------- parts


def num_parts(batch: int, heads: int, rows: int, keys: int, processors: int) -> int:
    """Choose the number of parts to split the keys into, from sizes alone: a capture must not read from the device.

    `rows` are packed queries per key head. With several parts, each row of the batch is a separate kernel call.

    Example: a batch of 1, 8 heads, 128 rows (32 nodes, 4 query heads per key head) and 4,096 keys on 132
    multiprocessors give 8 parts, which are 128 thread blocks.
    """
    blocks = heads * -(-rows // BLOCK_ROWS)
    if keys <= LONG * batch or 2 * batch * blocks > processors:
        return 1
    return min(processors // blocks, keys // SHORTEST_PART, MOST_PARTS)


def part_sizes(keys: int, num_splits: int) -> tuple[int, int]:
    """Return the distance between the starts of parts, and the number of keys in each part.

    Parts have equal lengths, so that one view contains them all; each overlaps the next by the remainder of
    `keys / num_splits`, and the last one ends with the last key.

    Example: 2 and 4 for 8 keys in 3 parts: 0-3, 2-5, 4-7.
    """
    step = keys // num_splits
    return step, keys - (num_splits - 1) * step


def split_mask(mask: Tensor, num_splits: int) -> Tensor:
    """Cut an additive mask `[B, 1, M, S]` into n parts `[B, n, M, L]`; show each key only in the last part it is in.

    The result is a view if parts do not overlap and are aligned, otherwise a copy, made once for all layers.
    """
    step, length = part_sizes(mask.shape[-1], num_splits)
    parts = mask.unfold(-1, length, step)[:, 0].transpose(1, 2)
    if step == length and step % ALIGNMENT == 0:
        return parts
    made = torch.zeros(*parts.shape[:-1], _row_size(length, mask.device), dtype=mask.dtype, device=mask.device)
    made = made[..., :length].copy_(parts)
    made[:, :-1, :, step:].fill_(HIDDEN_SCORE)
    return made


def split_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None, num_splits: int,
    kernel: Kernel,
) -> Tensor:  # fmt: skip
    """Attend to parts of the keys in parallel, as rows of a batch, and merge the outputs: `[B, H, M, Dv]`.

    Keys and values are not copied: parts are views that start `step * D` elements apart. Batch rows and parts cannot
    be combined into one dimension of a view, so each batch row is a separate kernel call. Queries are expanded with
    stride 0.

    The mask is that of `packed_mask` for this number of parts. The kernel, whose arguments the others are, must return
    finite outputs, and a log-sum-exp near `HIDDEN_SCORE`, for a row that sees no key of a part.
    """
    step, length = part_sizes(key.shape[2], num_splits)
    keys, values = (
        states.unfold(2, length, step).permute(0, 2, 1, 4, 3) for states in (key, value)
    )  # [B, n, H, L, *]
    outputs, sums = [], []
    for row in range(len(query)):
        queries = query[row].expand(num_splits, -1, -1, -1)
        row_mask = None if mask is None else mask[row if len(mask) > 1 else 0][:, None]
        output, log_sum = kernel(queries, keys[row], values[row], row_mask, scale)
        outputs.append(output)
        sums.append(log_sum)
    weights = torch.stack(sums, 1).softmax(0)  # float32; not NaN: every row sees a key in some part
    merged = (torch.stack(outputs, 1) * weights[..., None]).sum(0)
    return merged.to(query.dtype)
