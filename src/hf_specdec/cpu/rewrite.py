"""Rewrite a traced forward so that products, RMSNorm, rotary embedding and gated products run as CPU kernels.

Products are recorded as the operation `linear` while tracing (`RecordProducts`). Afterwards `use_kernels` finds the
other patterns among the traced operations, so nothing depends on an architecture's classes. Operations that match no
pattern do not change.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from hf_specdec.cpu import operations
from hf_specdec.cpu.operations import DTYPES, GELU_TANH, NO_ACTIVATION, SILU, can_multiply, define_operations

aten, kernels = torch.ops.aten, torch.ops.hf_specdec_cpu


class RecordProducts(TorchFunctionMode):
    """Mode that records `torch.nn.functional.linear` as the kernels' operation, if they support its inputs."""

    def __init__(self) -> None:
        super().__init__()
        define_operations()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.linear:
            given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
            x, weight, bias = given["input"], given["weight"], given.get("bias")
            if can_multiply(x, weight, bias):
                return kernels.linear(x, [weight], [bias], NO_ACTIVATION)
        return func(*args, **kwargs)


def use_kernels(graph: fx.GraphModule, attention: tuple[Any, Any] | None = None) -> int:
    """Replace patterns of a traced graph by kernels, in place; return the number of products that it runs.

    Args:
        graph: A traced graph whose weights are inputs, see `lift_weights`.
        attention: Two operations, see `_join_attention`; None if the graph has no attention that can be joined.
    """
    for node in list(graph.graph.nodes):
        _match_norm(node)
        _match_rotary(node)
        _match_gate(node)
    for node in list(graph.graph.nodes):
        _match_residual(node)
    graph.graph.eliminate_dead_code()
    _join_products(graph.graph)
    if attention is not None:
        for node in list(graph.graph.nodes):
            _join_attention(node, *attention)
    for node in graph.graph.nodes:
        if node.target is aten.view.default:
            node.target = aten.reshape.default  # parts of a joined product are not contiguous
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return sum(_is(node, kernels.linear.default) for node in graph.graph.nodes)


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


def call_functions(graph: fx.GraphModule) -> None:
    """Call the kernels' Python functions instead of torch's operations, which saves the dispatch, in place."""
    functions: dict[Any, Callable[..., Any]] = {
        getattr(kernels, name).default: getattr(operations, name) for name in ("linear", "rms_norm", "rotary")
    }
    for node in graph.graph.nodes:
        node.target = functions.get(node.target, node.target)
    graph.recompile()


# ----------------------------------------------------------------------------------------------- patterns

_Node = Any
"""An `fx.Node`, or another argument of an operation: its arguments have too many types to name."""


def _is(node: _Node, *targets: Any) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


def _value(node: _Node) -> Any:
    """Return the traced result of a node; None if it is not a tensor."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, Tensor) else None


def _dtype(node: _Node) -> torch.dtype | None:
    value = _value(node)
    return None if value is None else value.dtype


def _only_user(node: _Node) -> _Node:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _other_factor(product: _Node, factor: _Node) -> _Node:
    first, second = product.args[:2]
    return second if first is factor else first


def _replace(old: _Node, target: Any, arguments: tuple[Any, ...]) -> None:
    with old.graph.inserting_before(old):
        new = old.graph.call_function(target, arguments)
    new.meta = dict(old.meta)
    old.replace_all_uses_with(new)


def _match_norm(rsqrt: _Node) -> None:
    """Replace an RMSNorm that is computed in float32 and converted back to the dtype of x by the kernel `rms_norm`.

    The pattern is `x * rsqrt(mean(x ** 2) + eps) * weight`. The conversion back comes before the multiplication with
    the weight (Llama) or after it (Gemma).
    """
    if not _is(rsqrt, aten.rsqrt.default) or not _is(rsqrt.args[0], aten.add.Tensor):
        return
    mean, eps = rsqrt.args[0].args[:2]
    if not _is(mean, aten.mean.dim) or list(mean.args[1]) != [-1] or mean.args[2:] != (True,) or mean.kwargs:
        return
    if not isinstance(eps, float) or rsqrt.args[0].kwargs:
        return
    square, scaled = mean.args[0], _only_user(rsqrt)
    if not _is(square, aten.pow.Tensor_Scalar) or square.args[1] != 2 or not _is(scaled, aten.mul.Tensor):
        return
    wide = square.args[0]
    if _other_factor(scaled, rsqrt) is not wide or _dtype(wide) != torch.float32:
        return
    x = wide.args[0] if _is(wide, aten._to_copy.default) and _dtype(wide.args[0]) in DTYPES else wide
    product, early = _only_user(scaled), False
    if _is(product, aten._to_copy.default) and _dtype(product) == _dtype(x):
        scaled, product, early = product, _only_user(product), True
    if not _is(product, aten.mul.Tensor):
        return
    weight, result = _other_factor(product, scaled), product
    if _dtype(product) != _dtype(x):
        result = _only_user(product)
        if not _is(result, aten._to_copy.default) or _dtype(result) != _dtype(x):
            return
    known = _value(weight)
    if known is not None and known.shape == _value(x).shape[-1:] and known.dtype in (_dtype(x), torch.float32):
        _replace(result, kernels.rms_norm.default, (x, weight, eps, early))


def _match_rotary(total: _Node) -> None:
    """Replace `x * cos + cat(-x2, x1) * sin` by the kernel `rotary`; x1 and x2 are the halves of x `[B, H, N, D]`."""
    if not _is(total, aten.add.Tensor) or not all(_is(part, aten.mul.Tensor) for part in total.args[:2]):
        return
    (x, cos), (turned, sin) = (part.args[:2] for part in total.args[:2])
    value = _value(x)
    if value is None or value.dim() != 4 or value.dtype not in DTYPES or not _is_turned(turned, x, value.shape[-1]):
        return
    for table in (cos, sin):  # [B, N, D], to which a dimension for the heads was added
        if not _is(table, aten.unsqueeze.default) or table.args[1] != 1 or _dtype(table) != value.dtype:
            return
        rows, *sizes = _value(table.args[0]).shape
        if len(sizes) != 2 or sizes != [value.shape[2], value.shape[3]] or rows not in (1, value.shape[0]):
            return
    if _value(cos.args[0]).shape != _value(sin.args[0]).shape or total.kwargs:
        return
    _replace(total, kernels.rotary.default, (x, cos.args[0], sin.args[0]))


def _is_turned(turned: _Node, x: _Node, size: int) -> bool:
    """Whether a node is `cat(-x2, x1)` of the halves of the last of four dimensions."""
    if not _is(turned, aten.cat.default) or len(turned.args[0]) != 2 or size % 2:
        return False
    negative, low = turned.args[0]
    if not _is(negative, aten.neg.default) or not _is(low, aten.slice.Tensor):
        return False
    high = negative.args[0]
    return (
        _is(high, aten.slice.Tensor)
        and (*low.args[:4],) == (x, 3, 0, size // 2)
        and (*high.args[:3],) == (x, 3, size // 2)
        and high.args[3] >= size
    )


def _match_gate(product: _Node) -> None:
    """Replace `act(linear(x, W0)) * linear(x, W1)` by one call of the kernel `linear`."""
    if not _is(product, aten.mul.Tensor):
        return
    for active, other in (product.args[:2], product.args[1::-1]):
        if _is(active, aten.silu.default):
            activation = SILU
        elif _is(active, aten.gelu.default) and active.kwargs.get("approximate") == "tanh":
            activation = GELU_TANH
        else:
            continue
        gate = active.args[0]
        if not _is_product(gate) or not _is_product(other) or gate.args[0] is not other.args[0]:
            continue
        used_once = len(gate.users) == len(other.users) == len(active.users) == 1
        if used_once and _value(gate.args[1][0]).shape == _value(other.args[1][0]).shape:
            weights, biases = ([*gate.args[index], *other.args[index]] for index in (1, 2))
            _replace(product, kernels.linear.default, (gate.args[0], weights, biases, activation))
            return


def _match_residual(total: _Node) -> None:
    """Replace `residual + linear(x, W)` by one call of the kernel `linear`."""
    if not _is(total, aten.add.Tensor) or total.kwargs:
        return
    for product, residual in (total.args[:2], total.args[1::-1]):
        if not _is(product, kernels.linear.default) or len(product.args) != 4 or len(product.users) != 1:
            continue
        if any(user is not product and _is_product(user) for user in product.args[0].users):
            continue  # products with one input are joined
        shape, added = _value(product), _value(residual)
        if added is None or product.args[3] != NO_ACTIVATION or added.dtype != shape.dtype:
            continue
        if added.dim() == shape.dim() and all(
            statically_known_true(a == b) for a, b in zip(added.shape, shape.shape, strict=True)
        ):
            _replace(total, kernels.linear.default, (*product.args, residual))
            return


def _join_attention(node: _Node, attention: Any, joined: Any) -> None:
    """Replace attention over parts of a joined product, rotated, by an operation that takes the product as it is.

    `attention` is the operation of queries, keys and values `[B, H or G, N, D]` and further arguments; `joined` that
    of the product `[B, N, (H + 2G) * D]`, cosines, sines, G, D and the same further arguments.
    """
    if not _is(node, attention):
        return
    query, key, value, *further = node.args
    if not all(_is(part, kernels.rotary.default) for part in (query, key)) or query.args[1:] != key.args[1:]:
        return
    parts: list[Any] = [_part_of_heads(part) for part in (query.args[0], key.args[0], value)]
    if None in parts:
        return
    (product, size, first, second), of_keys, of_values = parts
    if (of_keys[:2], of_values[:2]) != ((product, size), (product, size)) or first != 0:
        return
    if (of_keys[2], of_values[2]) != (second, of_keys[3]) or of_values[3] != _value(product).shape[-1]:
        return
    shared = (of_keys[3] - of_keys[2]) // size
    if of_values[3] - of_values[2] == shared * size:
        _replace(node, joined, (product, *query.args[1:], shared, size, *further))


def _part_of_heads(node: _Node) -> tuple[_Node, int, int, int] | None:
    """Return product, head size, first and last column if a node is heads `[B, H, N, D]` of columns of a product."""
    if not _is(node, aten.transpose.int) or tuple(node.args[1:]) != (1, 2):
        return None
    view = node.args[0]
    if not _is(view, aten.view.default) or len(view.args[1]) != 4 or not _is(view.args[0], aten.slice.Tensor):
        return None
    product, dimension, first, last = view.args[0].args
    size = _value(view).shape[-1]
    return (product, size, first, last) if dimension == -1 and _is(product, kernels.linear.default) else None


def _is_product(node: _Node) -> bool:
    """Whether a node is a product with a single weight and without a residual."""
    return _is(node, kernels.linear.default) and len(node.args[1]) == 1 and len(node.args) == 4


def _join_products(graph: fx.Graph) -> None:
    """Compute products with the same input in one call, which starts the threads once; all weights are inputs."""
    members: dict[_Node, list[_Node]] = defaultdict(list)
    for node in filter(_is_product, graph.nodes):
        if all(weight.op == "placeholder" for weight in (*node.args[1], *filter(None, node.args[2]))):
            members[node.args[0]].append(node)
    for x, nodes in members.items():
        if len(nodes) < 2:
            continue
        weights, biases = ([node.args[index][0] for node in nodes] for index in (1, 2))
        with graph.inserting_before(nodes[0]):
            joined = graph.call_function(kernels.linear.default, (x, weights, biases, NO_ACTIVATION))
            joined.meta["val"] = torch.cat([_value(node) for node in nodes], dim=-1)
            begin = 0
            for node, weight in zip(nodes, weights, strict=True):
                end = begin + len(_value(weight))
                part = graph.call_function(aten.slice.Tensor, (joined, -1, begin, end))
                part.meta = dict(node.meta)
                node.replace_all_uses_with(part)
                begin = end
