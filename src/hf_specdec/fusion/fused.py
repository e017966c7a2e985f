"""Fused small operations for GPUs: traceable operations, and their use in a traced forward (`fuse_operations`).

A forward over a few tokens is launched as a thousand small kernels, most of them parts of RMSNorm, rotary embedding
and gated products. Each operation here is one kernel, with the same rounding steps as the operations it replaces. On
NVIDIA and AMD GPUs it is a Triton kernel (`fusion/triton_kernels.py`, imported on first use), elsewhere plain torch,
which is also its reference. No operation computes gradients.

Products with the same input (queries, keys and values; gate and up) are joined: one kernel reads the weights at their
places. Torch's own may be faster, so each call has a table by number of rows, see `verification/programs.py`.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn import functional

from hf_specdec.fusion.patterns import (
    Node,
    Norm,
    aten,
    find_gated_products,
    find_gates,
    find_norm,
    find_products_of_one,
    find_rotary,
    find_rotated,
    is_call,
    replace_call,
    traced_dtype,
    traced_value,
    views_as_reshapes,
)

fused = torch.ops.hf_specdec_fused
FUSING_DEVICES = {"cuda"}
"""Device types on which forwards are traced and fused; a benchmark may empty the set to time the model's own."""
FUSED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MOST_JOINED = 3
"""Maximum number of products of one kernel."""
PRODUCT_ROWS = (1, 8, 16, 32, 64)
"""Rows of x for which the kernel of joined products is tried: those of a row of text. More are left to torch."""
PRODUCT_TILES = ((16, 512, 4, 4), (32, 256, 4, 4), (64, 128, 4, 4), (64, 256, 4, 4))
"""Tiles of that kernel: rows of a weight, bytes of each of them, warps, stages."""


def can_fuse(device: torch.device) -> bool:
    """Whether fused operations run on this device: on GPUs they need Triton, which comes with torch's wheels."""
    return device.type != "cuda" or find_spec("triton") is not None


def _norm(x: Tensor, weight: Tensor, eps: float, early: bool, offset: float) -> Tensor:
    """Return `x / sqrt(mean(x ** 2) + eps) * (weight + offset)`, contiguous; `early`: see `Norm`."""
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if early:
        scaled = scaled.to(x.dtype)
    return (scaled.float() * (weight.float() + offset)).to(x.dtype).contiguous()


def _add_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, early: bool, offset: float
) -> tuple[Tensor, Tensor]:
    """Return `x + residual`, and its RMSNorm."""
    total = (x + residual).contiguous()
    return total, _norm(total, weight, eps, early, offset)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return `x * cos + cat(-x2, x1) * sin`, contiguous, for x `[B, H, N, D]` and tables `[B or 1, N, D]`."""
    low, high = x.chunk(2, -1)
    return (x * cos.unsqueeze(1) + torch.cat([-high, low], -1) * sin.unsqueeze(1)).contiguous()


def _gate(gate: Tensor, other: Tensor, activation: str) -> Tensor:
    """Return `act(gate) * other`, contiguous; see `find_gates`."""
    active = functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")
    return (active * other).contiguous()


def _rotate_and_append(
    query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, slots: Tensor
) -> Tensor:
    """Rotate queries, which are returned, and keys; write keys and values `[B, G, N, *]` to these slots of a cache."""
    keys.index_copy_(2, slots, _rotate(key, cos, sin))
    values.index_copy_(2, slots, value)
    return _rotate(query, cos, sin)


def _products(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], activation: str, tiles: Sequence[int]
) -> list[Tensor]:
    """Return `x W^T + b` for each weight `[N, K]` and x `[..., K]`; with an activation, `_gate` of the two.

    `tiles` has an index of `PRODUCT_TILES` for each of `PRODUCT_ROWS`, or -1: torch's own products.
    """
    place = bisect_left(PRODUCT_ROWS, x.numel() // x.shape[-1])
    if place < len(tiles) and tiles[place] >= 0:
        launched: list[Tensor] = _launch("products", x, weights, biases, activation, PRODUCT_TILES[tiles[place]])
        return launched
    made = [functional.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
    return [fused.gated(*made, activation)] if activation else made


def _made_like(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


_OPERATIONS: dict[str, tuple[str, Callable[..., Any], Callable[..., Any]]] = {
    "rms_norm": (
        "(Tensor x, Tensor weight, float eps, bool early, float offset) -> Tensor", _norm, _made_like),
    "add_rms_norm": (
        "(Tensor x, Tensor residual, Tensor weight, float eps, bool early, float offset) -> (Tensor, Tensor)",
        _add_norm, lambda x, *_: (_made_like(x), _made_like(x))),
    "rotary": ("(Tensor x, Tensor cos, Tensor sin) -> Tensor", _rotate, _made_like),
    "gated": ("(Tensor gate, Tensor other, str activation) -> Tensor", _gate, _made_like),
    "rotate_and_append": (
        "(Tensor query, Tensor key, Tensor value, Tensor cos, Tensor sin, Tensor(a!) keys, Tensor(b!) values, "
        "Tensor slots) -> Tensor", _rotate_and_append, _made_like),
}  # fmt: skip
"""Schema, reference and shape of each operation; the Triton kernel is called by `launch_<name>`."""
_PRODUCTS: dict[str, tuple[str, Callable[..., Any], Callable[..., Any]]] = {
    "products": (
        "(Tensor x, Tensor[] weights, Tensor?[] biases, str activation, int[] tiles) -> Tensor[]", _products,
        lambda x, weights, _, activation, __: [
            x.new_empty(*x.shape[:-1], len(weight)) for weight in (weights[:1] if activation else weights)]),
    "linear": (
        "(Tensor x, Tensor[] weights, Tensor?[] biases, str activation) -> Tensor",
        lambda x, weights, biases, _: functional.linear(x, weights[0], biases[0]),
        lambda x, weights, *_: x.new_empty(*x.shape[:-1], len(weights[0]))),
}  # fmt: skip
"""Schema, function on all devices, and shape of joined products, and of `linear`, which only traces have."""


@functools.cache
def define_fused() -> torch.library.Library:
    """Define the operations, once per process; they exist as long as the returned library."""
    library = torch.library.Library("hf_specdec_fused", "DEF")
    for name, (schema, reference, shape) in (_OPERATIONS | _PRODUCTS).items():
        library.define(f"{name}{schema}")
        library.impl(name, reference, "CompositeExplicitAutograd")
        library.impl(name, shape, "Meta")
        if name in _OPERATIONS:
            library.impl(name, functools.partial(_launch, name), "CUDA")
    return library


def _launch(name: str, *arguments: Any) -> Any:
    from hf_specdec.fusion import triton_kernels

    return getattr(triton_kernels, f"launch_{name}")(*arguments)


# ----------------------------------------------------------------------------------------------- rewriting


def record_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """Return a product by the operation `linear`, if it could be joined with others; see `ReplaceProducts`."""
    define_fused()
    given = [x, weight] if bias is None else [x, weight, bias]
    plain = all(type(one) in (Tensor, nn.Parameter) and one.is_contiguous() for one in given[1:])
    fits = plain and weight.dim() == 2 and x.dtype in FUSED_DTYPES and all(one.dtype == x.dtype for one in given)
    return fused.linear(x, [weight], [bias], "") if fits else None


def fuse_operations(graph: fx.GraphModule, attention: tuple[Any, Any] | None = None) -> Counter[str]:
    """Replace patterns of a traced graph by fused operations, in place; return how often each was put in.

    Its weights are inputs, see `lift_weights`, and its products recorded by `record_linear`. `attention` are an
    operation of queries, keys and values, and one of these before rotary embedding, the tables and the same further
    arguments; None if the graph has none.
    """
    define_fused()
    for node in list(graph.graph.nodes):
        if norm := find_norm(node, FUSED_DTYPES):
            _fuse_norm(norm)
        if rotary := find_rotary(node, FUSED_DTYPES):
            replace_call(node, fused.rotary.default, rotary)
        if found := find_gated_products(node, fused.linear.default):
            name, *products = found
            _join(products, [node], name)
            continue
        for name, active, other in find_gates(node):
            if traced_dtype(active) in FUSED_DTYPES and _are_alike(active, other):
                replace_call(node, fused.gated.default, (active.args[0], other, name))
                break
    graph.graph.eliminate_dead_code()
    for together in find_products_of_one(graph.graph, fused.linear.default):
        for products in (together[begin : begin + MOST_JOINED] for begin in range(0, len(together), MOST_JOINED)):
            if len(products) > 1:
                _join(products, products, "")
    graph.graph.eliminate_dead_code()
    for node in graph.graph.nodes:
        if is_call(node, fused.linear.default):  # torch's own
            node.target, node.args = aten.linear.default, (node.args[0], *node.args[1], *node.args[2])
    names = {getattr(fused, name).default: name for name in (_OPERATIONS | _PRODUCTS)}
    if attention is not None:
        own, with_rotary = attention
        names[with_rotary] = "rotated_attention"
        for node in list(graph.graph.nodes):
            if rotated := find_rotated(node, own, fused.rotary.default):
                given, tables, further = rotated
                replace_call(node, with_rotary, (*given, *tables, *further))
    views_as_reshapes(graph.graph)  # fused operations return contiguous tensors where others keep the layout of x
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return Counter(names[node.target] for node in graph.graph.nodes if node.target in names)


def _are_alike(first: Node, second: Node) -> bool:
    """Whether two nodes are tensors of the same shape and dtype."""
    one, other = traced_value(first), traced_value(second)
    if one is None or other is None or one.dtype != other.dtype or one.dim() != other.dim():
        return False
    return all(statically_known_true(a == b) for a, b in zip(one.shape, other.shape, strict=True))


def _fuse_norm(norm: Norm) -> None:
    """Put in an RMSNorm, together with the addition before it if its weight is known by then."""
    weight, offset = norm.weight, 0.0
    if is_call(weight, aten.add.Tensor) and isinstance(weight.args[1], float | int) and not weight.kwargs:
        inner = weight.args[0]  # Gemma: 1 + weight
        if traced_dtype(weight) == torch.float32:
            weight, offset = inner.args[0] if is_call(inner, aten._to_copy.default) else inner, float(weight.args[1])
    options, total = (norm.eps, norm.early, offset), norm.x
    adds = is_call(total, aten.add.Tensor) and not total.kwargs and all(_are_alike(total, one) for one in total.args)
    if not adds or weight.op != "placeholder":
        replace_call(norm.result, fused.rms_norm.default, (norm.x, weight, *options))
        return
    _replace_by_parts((total, norm.result), fused.add_rms_norm.default, (*total.args, weight, *options))


def _join(products: Sequence[Node], results: Sequence[Node], activation: str) -> None:
    weights, biases = ([node.args[index][0] for node in products] for index in (1, 2))
    _replace_by_parts(results, fused.products.default, (products[0].args[0], weights, biases, activation, []))


def _replace_by_parts(nodes: Sequence[Node], target: Any, arguments: tuple[Any, ...]) -> None:
    """Let the results of an operation take the places of nodes; its arguments precede the first one."""
    graph = nodes[0].graph
    with graph.inserting_before(nodes[0]):
        made = graph.call_function(target, arguments)
        parts = [graph.call_function(getitem, (made, index)) for index in range(len(nodes))]
    for old, new in zip(nodes, parts, strict=True):
        new.meta = dict(old.meta)
        old.replace_all_uses_with(new)
