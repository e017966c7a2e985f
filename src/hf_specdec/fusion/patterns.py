"""Patterns in traced forwards: RMSNorm, rotary embedding, products to be joined or gated, rotated attention.

Patterns are found among the operations, so nothing depends on an architecture's classes. Each function here looks at
one node and returns what a backend needs to replace it: the CPU kernels (`cpu/rewrite.py`) or the fused operations of
GPUs (`fusion/fused.py`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.nn import functional
from torch.overrides import TorchFunctionMode

aten = torch.ops.aten
Node = Any
"""An `fx.Node`, or another argument of an operation: its arguments have too many types to name."""


class ReplaceProducts(TorchFunctionMode):
    """Mode in which another function computes `torch.nn.functional.linear`.

    Args:
        multiply: Returns the product of x, weight and bias; None for inputs that it does not support.
    """

    def __init__(self, multiply: Callable[[Tensor, Tensor, Tensor | None], Tensor | None]) -> None:
        super().__init__()
        self._multiply = multiply

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.linear:
            given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
            product = self._multiply(given["input"], given["weight"], given.get("bias"))
            if product is not None:
                return product
        return func(*args, **kwargs)


def lift_weights(graph: fx.GraphModule) -> list[Tensor]:
    """Turn the tensors that a graph holds into its last inputs, in place, and return them."""
    weights, placeholders = list[Tensor](), dict[str, fx.Node]()
    last = [node for node in graph.graph.nodes if node.op == "placeholder"][-1]
    for node in [node for node in graph.graph.nodes if node.op == "get_attr"]:
        name = str(node.target)
        if name not in placeholders:
            with graph.graph.inserting_after(last):
                last = placeholders[name] = graph.graph.placeholder(name.lstrip("_"))
            last.meta = dict(node.meta)
            weights.append(getattr(graph, name))
        node.replace_all_uses_with(placeholders[name])
        graph.graph.erase_node(node)
    for name in placeholders:
        delattr(graph, name)
    graph.recompile()
    return weights


def is_call(node: Node, *targets: Any) -> bool:
    """Whether a node calls one of these operations."""
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


def traced_value(node: Node) -> Any:
    """Return the traced result of a node; None if it is not a tensor."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, Tensor) else None


def traced_dtype(node: Node) -> torch.dtype | None:
    """Return the dtype of a node's result; None if it is not a tensor."""
    value = traced_value(node)
    return None if value is None else value.dtype


def replace_call(old: Node, target: Any, arguments: tuple[Any, ...]) -> fx.Node:
    """Let an operation take the place of a node, and return its node."""
    with old.graph.inserting_before(old):
        new: fx.Node = old.graph.call_function(target, arguments)
    new.meta = dict(old.meta)
    old.replace_all_uses_with(new)
    return new


def views_as_reshapes(graph: fx.Graph) -> None:
    """Replace views by reshapes, which also accept results that are not contiguous."""
    for node in graph.nodes:
        if node.target is aten.view.default:
            node.target = aten.reshape.default


def _only_user(node: Node) -> Node:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _other_factor(product: Node, factor: Node) -> Node:
    first, second = product.args[:2]
    return second if first is factor else first


class Norm(NamedTuple):
    """An RMSNorm; `early`: rounded to the dtype of x before the weight is multiplied (Llama), not after it (Gemma)."""

    result: Node
    x: Node
    weight: Node
    eps: float
    early: bool


def find_norm(rsqrt: Node, dtypes: Collection[torch.dtype]) -> Norm | None:
    """Return the RMSNorm around a node: `x * rsqrt(mean(x ** 2) + eps) * weight`, computed in float32.

    x is of one of these dtypes, the weight of that dtype or float32.
    """
    if not is_call(rsqrt, aten.rsqrt.default) or not is_call(rsqrt.args[0], aten.add.Tensor):
        return None
    mean, eps = rsqrt.args[0].args[:2]
    if not is_call(mean, aten.mean.dim) or list(mean.args[1]) != [-1] or mean.args[2:] != (True,) or mean.kwargs:
        return None
    if not isinstance(eps, float) or rsqrt.args[0].kwargs:
        return None
    square, scaled = mean.args[0], _only_user(rsqrt)
    if not is_call(square, aten.pow.Tensor_Scalar) or square.args[1] != 2 or not is_call(scaled, aten.mul.Tensor):
        return None
    wide = square.args[0]
    if _other_factor(scaled, rsqrt) is not wide or traced_dtype(wide) != torch.float32:
        return None
    x = wide.args[0] if is_call(wide, aten._to_copy.default) and traced_dtype(wide.args[0]) in dtypes else wide
    product, early = _only_user(scaled), False
    if is_call(product, aten._to_copy.default) and traced_dtype(product) == traced_dtype(x):
        scaled, product, early = product, _only_user(product), True
    if not is_call(product, aten.mul.Tensor):
        return None
    weight, result = _other_factor(product, scaled), product
    if traced_dtype(product) != traced_dtype(x):
        result = _only_user(product)
        if not is_call(result, aten._to_copy.default) or traced_dtype(result) != traced_dtype(x):
            return None
    known = traced_value(weight)
    fits = known is not None and known.shape == traced_value(x).shape[-1:]
    return Norm(result, x, weight, eps, early) if fits and known.dtype in (traced_dtype(x), torch.float32) else None


def find_rotary(total: Node, dtypes: Collection[torch.dtype]) -> tuple[Node, Node, Node] | None:
    """Return x `[B, H, N, D]`, cosines and sines `[B or 1, N, D]` of a node `x * cos + cat(-x2, x1) * sin`.

    x1 and x2 are the halves of x, of one of these dtypes.
    """
    if not is_call(total, aten.add.Tensor) or not all(is_call(part, aten.mul.Tensor) for part in total.args[:2]):
        return None
    (x, cos), (turned, sin) = (part.args[:2] for part in total.args[:2])
    value = traced_value(x)
    if value is None or value.dim() != 4 or value.dtype not in dtypes or not _is_turned(turned, x, value.shape[-1]):
        return None
    for table in (cos, sin):  # [B, N, D], to which a dimension for the heads was added
        if not is_call(table, aten.unsqueeze.default) or table.args[1] != 1 or traced_dtype(table) != value.dtype:
            return None
        rows, *sizes = traced_value(table.args[0]).shape
        if len(sizes) != 2 or sizes != [value.shape[2], value.shape[3]] or rows not in (1, value.shape[0]):
            return None
    same = traced_value(cos.args[0]).shape == traced_value(sin.args[0]).shape
    return (x, cos.args[0], sin.args[0]) if same and not total.kwargs else None


def _is_turned(turned: Node, x: Node, size: int) -> bool:
    """Whether a node is `cat(-x2, x1)` of the halves of the last of four dimensions."""
    if not is_call(turned, aten.cat.default) or len(turned.args[0]) != 2 or size % 2:
        return False
    negative, low = turned.args[0]
    if not is_call(negative, aten.neg.default) or not is_call(low, aten.slice.Tensor):
        return False
    high = negative.args[0]
    return (
        is_call(high, aten.slice.Tensor)
        and (*low.args[:4],) == (x, 3, 0, size // 2)
        and (*high.args[:3],) == (x, 3, size // 2)
        and high.args[3] >= size
    )


def find_gates(product: Node) -> Iterator[tuple[Any, Node, Node]]:
    """Yield how a node may be `act(gate) * other`: "silu" or "gelu" (the one by tanh), the node of `act`, `other`."""
    if not is_call(product, aten.mul.Tensor):
        return
    for active, other in (product.args[:2], product.args[1::-1]):
        if is_call(active, aten.silu.default):
            yield "silu", active, other
        elif is_call(active, aten.gelu.default) and active.kwargs.get("approximate") == "tanh":
            yield "gelu", active, other


def is_product(node: Node, linear: Any) -> bool:
    """Whether a node is a product `linear(x, [weight], [bias], activation, ...)`, without a residual."""
    return is_call(node, linear) and len(node.args[1]) == 1 and node.args[4:5] in ((), (None,))


def form_of(product: Node) -> tuple[Any, ...]:
    """Return how a product's weights are stored: its last argument, if it has more than a residual."""
    return tuple(product.args[6:])


def find_gated_products(product: Node, linear: Any) -> tuple[str, Node, Node] | None:
    """Return activation and products of a node `act(linear(x, W0)) * linear(x, W1)`, if nothing else uses these."""
    for name, active, other in find_gates(product):
        gate = active.args[0]
        if not is_product(gate, linear) or not is_product(other, linear) or gate.args[0] is not other.args[0]:
            continue
        if form_of(gate) != form_of(other):
            continue
        used_once = len(gate.users) == len(other.users) == len(active.users) == 1
        if used_once and traced_value(gate.args[1][0]).shape == traced_value(other.args[1][0]).shape:
            return name, gate, other
    return None


def find_products_of_one(graph: fx.Graph, linear: Any) -> list[list[Node]]:
    """Return the products that have input and form in common with others; all weights are inputs."""
    members: dict[Any, list[Node]] = defaultdict(list)
    for node in graph.nodes:
        if is_product(node, linear) and all(
            weight.op == "placeholder" for weight in (*node.args[1], *filter(None, node.args[2]))
        ):
            members[node.args[0], form_of(node)].append(node)
    return [nodes for nodes in members.values() if len(nodes) > 1]


def find_rotated(node: Node, attention: Any, rotary: Any) -> tuple[list[Node], tuple[Node, ...], list[Node]] | None:
    """Return queries, keys and values before `rotary`, its tables, and further arguments of a node of `attention`."""
    if not is_call(node, attention):
        return None
    query, key, value, *further = node.args
    if not all(is_call(part, rotary) for part in (query, key)) or query.args[1:] != key.args[1:]:
        return None
    return [query.args[0], key.args[0], value], query.args[1:], further
