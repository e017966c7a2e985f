"""The CPU kernels as functions of tensors, and as operations that torch can trace.

All functions take bfloat16 or float32 tensors and compute no gradients. Calling one costs about four microseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from hf_specdec.cpu.library import is_loaded, load_library, processor_features
from hf_specdec.errors import CacheCapacityError

DTYPES = {torch.bfloat16: "16", torch.float32: "32"}
"""Supported dtypes, and the suffix of their functions in the library."""
SAME, INT8, INT8_ROUNDED, GROUPED, PACKED = 0, 1, 2, 16, 128
"""Forms of weights, as in products.h: the dtype of x; int8 with a scale per row; the same, times x in int8; from here
on see `grouped_form`; and from here on blocks of one of `BLOCKS`, twice its place, plus 1 if x is rounded to int8."""


class Block(NamedTuple):
    """A kind of GGUF block."""

    numbers: int
    in_file: int  # bytes
    here: int  # bytes as packed.h lays them out


BLOCKS = {
    "Q4_0": Block(32, 18, 18), "Q5_0": Block(32, 22, 22), "Q8_0": Block(32, 34, 34), "Q4_K": Block(256, 144, 148),
    "Q6_K": Block(256, 210, 210),
}  # fmt: skip
"""Kinds of blocks, in the order of packed.h."""
NO_ACTIVATION, SILU, GELU_TANH = range(3)
"""Activations of the first of two products, whose outputs are then multiplied."""
HUGE_PAGE = 2 << 20
"""Bytes of one on x86. Larger packed weights lie in them: an Intel Xeon reads half as fast again (measured)."""
PROBE_ROWS = (1, 2, 7, 24)
"""Rows of x in `product_error`: each tile size of the kernel is used."""
PROBE_COLUMNS = 64
"""First and last columns of a product that `product_error` compares."""
PRODUCT_TOLERANCE = {torch.bfloat16: 1e-2, torch.float32: 1e-4}
"""Maximum relative error of the kernel's products."""
ROUNDED_TOLERANCE = 2e-2
"""The same where rows are rounded to int8."""

_Pointer, _Long, _Float = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_ARGUMENTS: dict[str, list[Any]] = {
    "multiply": [_Long, _Pointer, *[_Long] * 2, *[_Pointer] * 4, *[_Long] * 2, *[_Pointer] * 2, _Long],
    "unpack": [_Long, _Pointer, _Long, _Pointer, _Long, _Pointer, _Long],
    "normalize": [_Pointer, _Long, _Long, _Pointer, _Long, _Float, _Long, _Pointer, _Long],
    "run": [_Pointer, _Long, _Pointer, _Long, _Long],
    "rotate": [_Pointer, _Pointer, _Pointer, _Pointer, _Pointer, _Long, _Pointer],
    "attend": [*[_Pointer] * 9, _Long],
    "attend_joined": [*[_Pointer] * 4, _Long, *[_Pointer] * 5, _Long],
    "convolve": [*[_Pointer] * 9, _Long],
    "recur": [*[_Pointer] * 7, _Long],
    "best": [_Pointer, _Long, _Long, _Long, _Long, _Pointer, _Pointer, _Long],
    "grow": [*[_Pointer] * 12, _Long],
}
"""The library's functions, and the types of their arguments."""


class _AttentionSizes(ctypes.Structure):
    """`struct Attention` of attention.h."""

    _fields_ = (
        *((name, _Long) for name in ("batch", "heads", "shared", "nodes", "dim", "value_dim")),
        ("begin", _Long), ("cache_stride", _Long * 2), ("value_stride", _Long * 2), ("new_stride", _Long * 3),
        ("new_value_stride", _Long * 3), ("mask_stride", _Long * 2), ("form", _Long), ("scale", _Float),
    )  # fmt: skip


class _ConvolutionSizes(ctypes.Structure):
    """`struct Convolution` of recurrence.h."""

    _fields_ = (
        *((name, _Long) for name in ("rows", "channels", "nodes", "size", "kept", "silu", "trees", "path")),
        ("stride", _Long * 3), ("known_stride", _Long * 3),
    )  # fmt: skip


class _RecurrenceSizes(ctypes.Structure):
    """`struct Recurrence` of recurrence.h."""

    _fields_ = (
        *((name, _Long) for name in ("rows", "heads", "shared", "nodes", "key_dim", "value_dim")),
        *((name, _Long) for name in ("kind", "flag", "trees", "path", "known", "state_stride")),
        *((f"{name}_stride", _Long * 3) for name in ("query", "key", "value", "decay", "beta")),
        ("wide", _Long * 9),
    )


@functools.cache
def functions_for(dtype: torch.dtype) -> SimpleNamespace:
    """Return the library's functions in `_ARGUMENTS` for a dtype in `DTYPES`.

    They raise `MemoryError` if there is not enough memory, or `CacheCapacityError` if that is for attention.
    """
    library, found = load_library()[1], {}
    for name, types in _ARGUMENTS.items():
        function = getattr(library, f"{name}_{DTYPES[dtype]}")
        function.argtypes, function.restype = types, _Long
        function.errcheck = functools.partial(_check_status, name)
        found[name] = function
    return SimpleNamespace(**found)


def addresses(*tensors: Tensor | None) -> list[int | None]:
    """Return where tensors begin, for the library; None for None."""
    return [None if tensor is None else tensor.data_ptr() for tensor in tensors]


def _check_status(name: str, status: int, _function: Any, _arguments: Any) -> int:
    if status < 0 and name.startswith("attend"):
        raise CacheCapacityError(
            "Attention over the key-value cache needs more memory than there is.",
            "Use a shorter prompt, a smaller max_new_tokens or fewer rows.",
        )
    if status < 0:
        raise MemoryError("The CPU kernels need more memory than there is.")
    return status


# ----------------------------------------------------------------------------------------------- products


def can_multiply(x: Any, weight: Any, bias: Any, form: int = SAME) -> bool:
    """Whether `linear` supports these inputs: plain tensors on the CPU, of one dtype except for quantised weights."""
    tensors = [x, weight] if bias is None else [x, weight, bias]
    return (
        all(isinstance(tensor, Tensor) and tensor.device.type == "cpu" for tensor in tensors)
        and x.dtype in DTYPES
        and all(tensor.dtype == x.dtype for tensor in (x, *tensors[2:]))
        and weight.dtype == (x.dtype if form == SAME else torch.int8 if form < PACKED else torch.uint8)
        and type(weight) in (Tensor, torch.nn.Parameter)
        and weight.dim() == 2
        and weight.is_contiguous()
        and x.shape[-1] == row_size(weight, form)
        and (bias is None or (bias.is_contiguous() and bias.shape == weight.shape[:1]))
    )


def grouped_form(size: int, rounded: bool, halves: bool) -> int:
    """Return the form of weights with a scale and an offset for each group of numbers.

    Args:
        size: Numbers of a group, a power of 2 and at least 16.
        rounded: Whether x is rounded to int8 with a zero point per row, as torchao does it.
        halves: Whether int8 `[N, K / 2]` holds 4 bits of the first N / 2 rows, and in the upper bits of the others.
    """
    return 4 * (size.bit_length() - 1) + rounded + 2 * halves


def is_rounded(form: int) -> bool:
    """Whether weights of a form are multiplied with rows that are rounded to int8."""
    return form == INT8_ROUNDED or (form >= GROUPED and form % 2 == 1)


def _has_halves(form: int) -> bool:
    return GROUPED <= form < PACKED and form & 2 != 0


def block_of(form: int) -> Block:
    """Return the kind of block of a form from `PACKED` on."""
    return list(BLOCKS.values())[(form - PACKED) // 2]


def row_size(weight: Tensor, form: int) -> int:
    """Return K, how many numbers a row of a stored weight has."""
    if form < PACKED:
        return weight.shape[1] * (2 if _has_halves(form) else 1)
    return weight.shape[1] // block_of(form).here * block_of(form).numbers


def _zeros(rows: int, size: int) -> Tensor:
    """Return zeros, uint8 `[rows, size]`, in huge pages where the system has them: large weights are read faster."""
    if rows * size < HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(rows, size, dtype=torch.uint8, device="cpu")
    memory = mmap.mmap(-1, rows * size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # the system was built without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    begin = -whole.data_ptr() % HUGE_PAGE
    return whole[begin : begin + rows * size].view(rows, size)


def pack_blocks(form: int, blocks: Tensor) -> Tensor:
    """Return GGUF blocks, uint8 `[N, bytes of a row]`, as packed.h lays them out, `[N, bytes of a row here]`."""
    block = block_of(form)
    count = blocks.shape[1] // block.in_file
    packed = _zeros(len(blocks), count * block.here)
    function = load_library()[1].pack_blocks
    function.argtypes, function.restype = [_Long, _Pointer, _Long, _Long, _Pointer, _Long], _Long
    sizes = len(blocks), count * block.numbers
    function(form, blocks.data_ptr(), *sizes, packed.data_ptr(), torch.get_num_threads())
    return packed


def unpack(weight: Tensor, ids: Tensor, form: int, dtype: torch.dtype) -> Tensor:
    """Return rows `[*ids, K]` of blocks as packed.h lays them out, in bfloat16 or float32."""
    size, ids = row_size(weight, form), ids.long().contiguous()
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < len(weight):
        raise IndexError(f"Ids must be from 0 to {len(weight) - 1}; there are {int(ids.min())} to {int(ids.max())}.")
    rows = weight.new_empty(*ids.shape, size, dtype=dtype)
    functions_for(dtype).unpack(
        form, weight.data_ptr(), size, ids.data_ptr(), ids.numel(), rows.data_ptr(), torch.get_num_threads()
    )
    return rows


def linear(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], activation: int = NO_ACTIVATION,
    residual: Tensor | None = None, scales: Sequence[Tensor] | None = None, form: int = SAME,
) -> Tensor:  # fmt: skip
    """Return `[..., N]`: x times each weight, side by side, or two products `act(x W0^T + b0) * (x W1^T + b1)`.

    Args:
        x: `[..., K]`.
        weights, biases: `[N_i, K]`, contiguous, of the dtype of x, and `[N_i]` or None for each.
        activation: `NO_ACTIVATION`, or the activation of two products of equal size.
        residual: `[..., N]` added to the result; only without an activation.
        scales: Float32, contiguous: `[N_i]` of weights in int8, `[N_i, groups, 2]` with offsets of those in groups.
        form: How the weights are stored.
    """
    k = x.shape[-1]
    rows = x.numel() // k
    begins = tuple([(weight.data_ptr(), weight.shape[0]) for weight in weights])
    factors = (None,) * len(weights) if scales is None else tuple(addresses(*scales))
    *arrays, size = _arrays(begins, factors, tuple(addresses(*biases)), activation != NO_ACTIVATION)
    x, residual = x.contiguous(), None if residual is None else residual.contiguous()
    y = x.new_empty(*x.shape[:-1], size)
    if rows:
        functions_for(x.dtype).multiply(
            form, x.data_ptr(), rows, k, *arrays, activation, *addresses(residual, y), torch.get_num_threads()
        )
    return y


@functools.lru_cache(maxsize=4096)
def _arrays(
    weights: tuple[tuple[int, int], ...], scales: tuple[int | None, ...], biases: tuple[int | None, ...], gated: bool
) -> tuple[Any, ...]:
    """Return the C arrays for weights that share their input, their number, and the size of the output.

    Weights are given as address and number of rows, scales and biases as addresses.
    """
    count, sizes = len(weights), [size for _, size in weights]
    begins = (_Pointer * count)(*[address for address, _ in weights])
    size = sizes[0] if gated else sum(sizes)
    return begins, (_Pointer * count)(*scales), (_Pointer * count)(*biases), (_Long * count)(*sizes), count, size


def multiplies_slowly(dtype: torch.dtype) -> bool:
    """Whether torch's products of many rows are faster: in bfloat16 on processors with matrix units (AMX)."""
    return dtype == torch.bfloat16 and "amx_bf16" in processor_features()


def product_error(weight: Tensor, dtype: torch.dtype, scale: Tensor | None = None, form: int = SAME) -> float:
    """Return the largest relative distance of the kernel's products with some rows of a weight `[N, K]` from exact.

    x has the given dtype; `scale` and `form` are those of a quantised weight.
    """
    size, count = row_size(weight, form), len(weight)
    ends = torch.arange(count, device="cpu")
    ends = torch.cat([ends[:PROBE_COLUMNS], ends[-PROBE_COLUMNS:]])
    checked = unpack(weight, ends, form, torch.float32) if form >= PACKED else _numbers(weight, ends, form)
    if scale is not None:
        groups = scale.view(count, -1, 1 if form < GROUPED else 2)[ends]
        parts = checked.view(*groups.shape[:2], -1) * groups[..., :1]
        checked = (parts if form < GROUPED else parts + groups[..., 1:]).flatten(1)
    errors = []
    for rows in PROBE_ROWS:
        numbers = torch.arange(rows * size, dtype=torch.float32, device="cpu") * 0.7
        x = numbers.cos().view(rows, size).to(dtype)
        found = linear(x, [weight], [None], NO_ACTIVATION, None, None if scale is None else [scale], form).float()
        found = torch.cat([found[:, :PROBE_COLUMNS], found[:, -PROBE_COLUMNS:]], dim=-1)
        expected = functional.linear(x.float(), checked)
        errors.append(float((found - expected).norm() / expected.norm().clamp(min=1e-6)))
    return max(errors)


def _numbers(weight: Tensor, rows: Tensor, form: int) -> Tensor:
    """Return rows of a weight that is not in blocks, float32, without their scales."""
    if not _has_halves(form):
        return weight[rows].float()
    half = len(weight) // 2
    pairs = weight.view(half, -1)[rows % half]
    return torch.where(rows[:, None] < half, pairs & 15, pairs >> 4 & 15).float()


# ----------------------------------------------------------------------------------------------- norms, rotary, search


def rms_norm(x: Tensor, weight: Tensor, eps: float, early: bool) -> Tensor:
    """Return `x / sqrt(mean(x ** 2) + eps) * weight`, computed in float32.

    x is `[..., K]`, the weight `[K]` of its dtype or float32. With `early`, round to the dtype of x before multiplying
    with the weight, as Llama does; Gemma rounds afterwards.
    """
    x, weight, k = x.contiguous(), weight.contiguous(), x.shape[-1]
    y, is_wide = torch.empty_like(x), weight.dtype == torch.float32
    functions_for(x.dtype).normalize(
        x.data_ptr(), x.numel() // k, k, weight.data_ptr(), is_wide, eps, early, y.data_ptr(), torch.get_num_threads()
    )
    return y


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return `x * cos + rotate_half(x) * sin`, contiguous, for x `[B, H, N, D]` and tables `[B or 1, N, D]`."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    y = x.new_empty(x.shape)
    layout = (_Long * 4)(*x.shape), (_Long * 4)(*x.stride())
    functions_for(x.dtype).rotate(x.data_ptr(), *layout, *addresses(cos, sin), _batch_stride(cos), y.data_ptr())
    return y


def _batch_stride(shared: Tensor) -> int:
    return shared.stride(0) if shared.shape[0] > 1 else 0


def can_search(logits: Tensor) -> bool:
    """Whether `best_tokens` supports these logits; False if the kernels have not been loaded for something else."""
    return logits.device.type == "cpu" and logits.dtype in DTYPES and is_loaded() and not logits.requires_grad


def best_tokens(logits: Tensor, count: int, *, with_log_probs: bool = True) -> tuple[Tensor, Tensor]:
    """Return log-probabilities (at most 0, float32) and ids `[..., count]` of the likeliest of V tokens, best first.

    Of equal logits, the one with the lowest id comes first. Unless `with_log_probs`, the first result is empty.
    """
    size = logits.shape[-1]
    rows = logits.reshape(-1, size)
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    log_probs = logits.new_empty((*logits.shape[:-1], count) if with_log_probs else 0, dtype=torch.float32)
    ids = logits.new_empty(*logits.shape[:-1], count, dtype=torch.long)
    results = addresses(log_probs if with_log_probs else None, ids)
    functions_for(logits.dtype).best(
        rows.data_ptr(), len(rows), size, rows.stride(0), count, *results, torch.get_num_threads()
    )
    return log_probs, ids


# ----------------------------------------------------------------------------------------------- attention


def can_attend(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether `attend` supports these tensors, see there; False if the kernels have not been loaded."""
    tensors, dtype = (query, key, value), query.dtype
    return (
        dtype in DTYPES
        and is_loaded()
        and all(tensor.is_cpu and tensor.dtype == dtype and tensor.stride(-1) == 1 for tensor in tensors)
    )


def attend(
    query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, begin: int, mask: Tensor | None,
    scale: float | None, order: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Write new keys and values to a cache and attend to the cache; return `[B, N, H, Dv]`, contiguous.

    Args:
        query: `[B, H, N, D]`.
        key, value: `[B, G, N, *]` of the new nodes; G divides H.
        keys, values: `[B, G, capacity, *]`, slots contiguous.
        begin: Slot of the first new node.
        mask: bool `[B or 1, 1, N, begin + N]`, True for visible slots; None if all are visible that `order` allows.
        scale: Scale of the scores; None means `D ** -0.5`.
        order: Logical positions, in whose order sums run, long. `[B, 1]`: each row's first slot (after padding); the
            nodes are a chain after slot `begin - 1`. `[B, 2 + N]`: first slot, end of the committed slots, and depths
            of the nodes, a tree whose ancestors the mask has. None: nodes see what the mask says, in order of slots.
    """
    query, mask = query.contiguous(), _checked_mask(mask, query.shape[2], begin)
    shape = (*query.shape[:2], key.shape[1], *query.shape[2:], value.shape[3])
    strides = keys.stride()[:2], values.stride()[:2], key.stride()[:3], value.stride()[:3]
    y = query.new_empty(shape[0], shape[3], shape[1], shape[5])
    sizes = _attention_sizes(shape, begin, strides, _mask_strides(mask), _form_of(order), scale)
    tensors = addresses(query, key, value, keys, values, mask, order, y)
    functions_for(query.dtype).attend(sizes, *tensors, torch.get_num_threads())
    return y


def attend_joined(
    joined: Tensor, cos: Tensor, sin: Tensor, shared: int, keys: Tensor, values: Tensor, begin: int,
    mask: Tensor | None, scale: float | None, order: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Like `attend`, for queries, keys and values side by side, before rotary embedding.

    Args:
        joined: `[B, N, (H + 2G) * D]`.
        cos, sin: `[B or 1, N, D]`.
        shared: Number G of key heads.
        keys, values: `[B, G, capacity, D]`, slots contiguous.
        begin, mask, scale, order: See `attend`.
    """
    (batch, nodes, width), dim = joined.shape, keys.shape[3]
    heads, mask = width // dim - 2 * shared, _checked_mask(mask, nodes, begin)
    joined, cos, sin = joined.contiguous(), cos.contiguous(), sin.contiguous()
    shape = batch, heads, shared, nodes, dim, dim
    strides = keys.stride()[:2], values.stride()[:2], (0, 0, 0), (0, 0, 0)
    y = joined.new_empty(batch, nodes, heads, dim)
    sizes = _attention_sizes(shape, begin, strides, _mask_strides(mask), _form_of(order), scale)
    given, stored = addresses(joined, cos, sin), addresses(keys, values, mask, order, y)
    functions_for(joined.dtype).attend_joined(sizes, *given, _batch_stride(cos), *stored, torch.get_num_threads())
    return y


@functools.lru_cache(maxsize=64)
def _attention_sizes(
    shape: tuple[int, ...], begin: int, strides: tuple[Any, ...], mask_strides: tuple[int, int], form: int,
    scale: float | None,
) -> Any:  # fmt: skip
    """Return a pointer to `_AttentionSizes`, which most layers of a forward share; shapes as in its first fields."""
    scale = shape[4] ** -0.5 if scale is None else scale
    return ctypes.pointer(_AttentionSizes(*shape, begin, *strides, mask_strides, form, scale))


def _form_of(order: Tensor | None) -> int:
    """Return the `Form` of attention.h."""
    return 0 if order is None else 1 if order.shape[1] == 1 else 2


def _checked_mask(mask: Tensor | None, nodes: int, begin: int) -> Tensor | None:
    if mask is not None and mask.shape[1:] != (1, nodes, begin + nodes):
        raise ValueError(f"A mask for {nodes} nodes after {begin} slots was expected, got {list(mask.shape)}.")
    return mask if mask is None or mask.stride(-1) == 1 else mask.contiguous()


def _mask_strides(mask: Tensor | None) -> tuple[int, int]:
    return (0, 0) if mask is None else (_batch_stride(mask), mask.stride(2))


# ----------------------------------------------------------------------------------------------- recurrent layers


def can_convolve(inputs: Tensor, window: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> bool:
    """Whether `convolve_tree` supports these arguments; False if the kernels have not been loaded."""
    tensors = (inputs, window, weight) if bias is None else (inputs, window, weight, bias)
    return (
        inputs.dtype in DTYPES
        and is_loaded()
        and activation in (None, "silu", "swish")
        and all(tensor.is_cpu and tensor.dtype == inputs.dtype for tensor in tensors)
        and all(tensor.is_contiguous() for tensor in tensors[1:])
        and 0 <= weight.shape[1] - window.shape[2] <= 1
    )


def convolve_tree(
    inputs: Tensor, window: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, parents: Tensor,
    entered: tuple[Tensor, Tensor] | None,
) -> Tensor:  # fmt: skip
    """Return the causal convolution `[B, C, N]` of each node's path; channels are next to each other in memory.

    Args:
        inputs: `[B, C, N]`.
        window: `[B, C, K or K - 1]` committed inputs.
        weight, bias, activation: `[C, K]`, `[C]`, and None or "silu".
        parents: long `[1 or B, N]`.
        entered: Path `[B, P]` of nodes (-1 after its end), long, and inputs `[B or more, C, *]` of these nodes, which
            are first entered into the window.
    """
    path, known = entered or (None, None)
    (rows, channels, nodes), size = inputs.shape, weight.shape[1]
    y = inputs.new_empty(rows, nodes, channels)
    shape = rows, channels, nodes, size, window.shape[2], activation is not None, len(parents)
    length, strides = 0 if path is None else path.shape[1], (0, 0, 0) if known is None else known.stride()
    sizes = _sizes(_ConvolutionSizes, (*shape, length), inputs.stride(), strides)
    parents, path = parents.contiguous(), None if path is None else path.contiguous()
    tensors = addresses(parents, inputs, weight, bias, window, path, known, y)
    functions_for(inputs.dtype).convolve(sizes, *tensors, torch.get_num_threads())
    return y.transpose(1, 2)


def _arranged(kind: str, inputs: Sequence[Any], state: Tensor) -> list[Any]:
    """Return the tensors of `enum Input` of recurrence.h: query, key, value, decay, beta, rate, skip, bias, state."""
    if kind == "delta_rule":
        return [*inputs, None, None, None, state]
    value, decay, rate, key, query, skip, *gate, bias = inputs
    if kind == "mamba2":
        return [query, key, value, decay, None, rate, skip, bias, state.transpose(-1, -2)]
    by_node = [None if part is None else part.transpose(1, 2) for part in (query, key, value, decay, *gate)]
    return [*by_node, rate, skip, bias, state]


def can_recur(kind: str, inputs: Sequence[Tensor | None], state: Tensor) -> bool:
    """Whether `recur_tree` supports these arguments; False if the kernels have not been loaded."""
    tensors = [state, *(tensor for tensor in inputs if tensor is not None)]
    if not (is_loaded() and all(tensor.is_cpu and tensor.dtype in DTYPES for tensor in tensors)):
        return False
    query, key, value, decay, _, rate, skip, bias, state = _arranged(kind, inputs, state)
    is_plain = all(tensor is None or tensor.is_contiguous() for tensor in (rate, skip, bias))
    if kind == "mamba1":
        return is_plain and state[0].is_contiguous()
    rows = [query, key, value, *([decay] if decay.dim() == 4 else [])]
    return (
        is_plain
        and query.dtype == key.dtype == value.dtype
        and all(tensor.stride(-1) == 1 for tensor in rows)
        and state.dtype == torch.float32
        and state.is_contiguous()
    )


def recur_tree(
    kind: str, inputs: Sequence[Any], flag: bool, state: Tensor, parents: Tensor, entered: tuple[Tensor, Any] | None
) -> tuple[Tensor, list[Tensor]]:
    """Return the outputs of the nodes of a tree, and decays, keys, values and, for Mamba 1, rates of their `Updates`.

    Args:
        kind, inputs, flag, state: See `verification.recurrence.FORMS`.
        parents: long `[1 or B, N]`.
        entered: Path `[B, P]` of nodes (-1 after its end), long, and their `Updates`, of B or more rows, which are
            first entered into the state.
    """
    given, parents = _arranged(kind, inputs, state), parents.contiguous()
    query, key, value, decay, beta, rate, *_, state = given
    rows, nodes, heads = value.shape[:3]
    if kind == "mamba1":
        number, shared, key_dim, value_dim, y = 3, 1, key.shape[2], 1, value.new_empty(rows, heads, nodes)
    else:
        number = 2 if kind == "mamba2" else decay.dim() - 3
        (shared, key_dim), value_dim, y = key.shape[2:], value.shape[3], value.new_empty(value.shape)
    length, known_nodes, path, known = 0, 0, None, None
    if entered is not None:
        path, stash = entered[0].contiguous(), entered[1]
        parts = [part.contiguous() for part in (stash.decay, stash.keys, stash.values)]
        length, known_nodes, known = path.shape[1], parts[1].shape[2], (_Pointer * 3)(*addresses(*parts))
    shapes = (rows, heads, nodes, *decay.shape[3:]), (rows, shared, nodes, key_dim), (rows, heads, nodes, value_dim)
    updates = [state.new_empty(shape, dtype=torch.float32) for shape in shapes]
    numbers = rows, heads, shared, nodes, key_dim, value_dim, number, flag, len(parents), length, known_nodes
    strides = [(0, 0, 0) if part is None else part.stride()[:3] for part in (query, key, value, decay, beta)]
    wide = tuple([part is not None and part.dtype == torch.float32 for part in given])
    functions_for(value.dtype).recur(
        _sizes(_RecurrenceSizes, (*numbers, state.stride(0)), *strides, wide), parents.data_ptr(),
        (_Pointer * 9)(*addresses(*given)), *addresses(path), known, (_Pointer * 3)(*addresses(*updates)),
        y.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return y, [*updates, rate.float()] if kind == "mamba1" else updates


@functools.lru_cache(maxsize=64)
def _sizes(form: Any, numbers: tuple[int, ...], *arrays: tuple[int, ...]) -> Any:
    """Return a pointer to a structure that describes arguments, which most layers of a forward share."""
    return ctypes.pointer(form(*numbers, *arrays))


# ----------------------------------------------------------------------------------------------- traceable operations


def _shape_of_linear(
    x: Tensor, weights: Sequence[Tensor], _biases: Sequence[Tensor | None], activation: int, *_others: Any
) -> Tensor:
    size = len(weights[0]) if activation else sum(len(weight) for weight in weights)
    return x.new_empty(*x.shape[:-1], size)


@functools.cache
def define_operations() -> torch.library.Library:
    """Define the traceable operations, once per process; they exist as long as the returned library."""
    library = torch.library.Library("hf_specdec_cpu", "DEF")
    for schema, function, shape in (
        ("linear(Tensor x, Tensor[] weights, Tensor?[] biases, int activation, "
         "Tensor? residual=None, Tensor[]? scales=None, int form=0) -> Tensor", linear, _shape_of_linear),
        ("unpack(Tensor weight, Tensor ids, int form, ScalarType dtype) -> Tensor", unpack,
         lambda weight, ids, form, dtype: weight.new_empty(*ids.shape, row_size(weight, form), dtype=dtype)),
        ("rms_norm(Tensor x, Tensor weight, float eps, bool early) -> Tensor", rms_norm,
         lambda x, *_: torch.empty_like(x, memory_format=torch.contiguous_format)),
        ("rotary(Tensor x, Tensor cos, Tensor sin) -> Tensor", rotary, lambda x, *_: x.new_empty(x.shape)),
    ):  # fmt: skip
        name = schema.partition("(")[0]
        library.define(schema)
        library.impl(name, function, "CompositeExplicitAutograd")
        library.impl(name, shape, "Meta")
    return library
