"""Rewrite a traced forward so that products, RMSNorm, rotary embedding and gated products run as CPU kernels.

Products are recorded as the operation `linear` while tracing (`KernelProducts`). Afterwards `use_kernels` finds the
other patterns (`fusion/patterns.py`) among the traced operations. Operations that match none do not change.

`join_steps` then joins consecutive products and norms into chains, each of which is one call of the kernels. A call
takes about six microseconds, most of it Python and the start of threads, which adds up to a noticeable part of a small
model's forward. Between two attentions a decoder layer has six (the product after attention, RMSNorm, the gated
products, the product after them, the next layer's RMSNorm and its queries, keys and values); with chains two are left.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._python_dispatch import _disable_current_modes

from hf_specdec.cpu import operations
from hf_specdec.cpu.operations import (
    DTYPES,
    GELU_TANH,
    NO_ACTIVATION,
    SAME,
    SILU,
    can_multiply,
    define_operations,
    functions_for,
)
from hf_specdec.cpu.quantized import stored_weight
from hf_specdec.fusion.patterns import (
    Node,
    ReplaceProducts,
    find_gated_products,
    find_norm,
    find_products_of_one,
    find_rotary,
    find_rotated,
    form_of,
    is_call,
    is_product,
    replace_call,
    traced_value,
    views_as_reshapes,
)

aten, kernels = torch.ops.aten, torch.ops.hf_specdec_cpu
MAX_WEIGHTS = 4
"""Most weights of one step, as in steps.h."""
_ACTIVATIONS = {"silu": SILU, "gelu": GELU_TANH}
_PRODUCTS = {
    aten.mm, aten.bmm, aten.addmm, aten.baddbmm, aten.matmul, aten.linear, aten.convolution, aten._grouped_mm,
    aten.scaled_dot_product_attention, aten._scaled_dot_product_flash_attention_for_cpu,
}  # fmt: skip
"""torch's products, which choose their sums by the number of rows."""
_SCALAR_ENDS = {aten.silu, aten.gelu, aten.sigmoid, aten.softplus, aten.mish, aten.elu, aten.log_sigmoid_forward}
"""Operations that torch computes with another exponential function where a thread's numbers do not fill a vector."""


class KernelProducts(ReplaceProducts):
    """Mode in which the kernels compute `torch.nn.functional.linear`, if they support its inputs, without gradients.

    Args:
        recorded: Whether products are recorded as the traceable operation, for `use_kernels`.
    """

    def __init__(self, *, recorded: bool = False) -> None:
        define_operations()
        multiply: Callable[..., Any] = kernels.linear if recorded else operations.linear

        def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
            if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
                return None
            stored = None
            if type(weight) not in (Tensor, torch.nn.Parameter):
                with _disable_current_modes():  # a trace must not see how the parts of a weight are found
                    stored = stored_weight(weight)
            if stored is not None and can_multiply(x, stored.numbers, bias, stored.form):
                scales = None if stored.scale is None else [stored.scale]
                return multiply(x, [stored.numbers], [bias], NO_ACTIVATION, None, scales, stored.form)
            return multiply(x, [weight], [bias], NO_ACTIVATION) if can_multiply(x, weight, bias) else None

        super().__init__(product)


def use_kernels(graph: fx.GraphModule, attention: tuple[Any, Any] | None = None) -> int:
    """Replace patterns of a traced graph by kernels, in place; return the number of products that it runs.

    Its weights are inputs, see `lift_weights`. `attention` are two operations, see `_join_attention`; None if the
    graph has no attention that can be joined.
    """
    for node in list(graph.graph.nodes):
        if norm := find_norm(node, DTYPES):
            replace_call(norm.result, kernels.rms_norm.default, norm[1:])
        if rotary := find_rotary(node, DTYPES):
            replace_call(node, kernels.rotary.default, rotary)
        _match_gate(node)
    for node in list(graph.graph.nodes):
        _match_residual(node)
    graph.graph.eliminate_dead_code()
    _join_products(graph.graph)
    if attention is not None:
        for node in list(graph.graph.nodes):
            _join_attention(node, *attention)
    views_as_reshapes(graph.graph)  # parts of a joined product are not contiguous
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return sum(is_call(node, kernels.linear.default) for node in graph.graph.nodes)


def inexact_operations(graph: fx.GraphModule) -> list[str]:
    """Return the names of operations in a graph from `use_kernels` whose results depend on the number of rows.

    These are torch's products, except those of single numbers (positions times frequencies), and `_SCALAR_ENDS`.
    """
    return sorted({
        str(node.target.name())
        for node in graph.graph.nodes
        if isinstance(node.target, torch._ops.OpOverload)
        and (
            node.target.overloadpacket in _SCALAR_ENDS
            or (node.target.overloadpacket in _PRODUCTS and not _multiplies_single_numbers(node))
        )
    })  # fmt: skip


def _multiplies_single_numbers(node: Node) -> bool:
    if node.target.overloadpacket not in (aten.mm, aten.bmm):
        return False
    return bool(statically_known_true(traced_value(node.args[0]).shape[-1] == 1))


def call_functions(graph: fx.GraphModule) -> None:
    """Call the kernels' Python functions instead of torch's operations, which saves the dispatch, in place."""
    functions: dict[Any, Callable[..., Any]] = {
        getattr(kernels, name).default: getattr(operations, name) for name in ("linear", "rms_norm", "rotary")
    }
    for node in graph.graph.nodes:
        node.target = functions.get(node.target, node.target)
    graph.recompile()


# ----------------------------------------------------------------------------------------------- patterns


def _match_gate(product: Node) -> None:
    """Replace `act(linear(x, W0)) * linear(x, W1)` by one call of the kernel `linear`."""
    if found := find_gated_products(product, kernels.linear.default):
        name, gate, other = found
        weights, biases = ([*gate.args[index], *other.args[index]] for index in (1, 2))
        further = (None, _scales_of(gate, other), gate.args[6]) if form_of(gate) else ()
        replace_call(product, kernels.linear.default, (gate.args[0], weights, biases, _ACTIVATIONS[name], *further))


def _scales_of(*products: Node) -> list[Node] | None:
    """Return the scales of the weights of products of one form, None if it has none."""
    return None if products[0].args[5] is None else [scale for product in products for scale in product.args[5]]


def _match_residual(total: Node) -> None:
    """Replace `residual + linear(x, W)` by one call of the kernel `linear`."""
    if not is_call(total, aten.add.Tensor) or total.kwargs:
        return
    for product, residual in (total.args[:2], total.args[1::-1]):
        if not is_product(product, kernels.linear.default) or len(product.users) != 1:
            continue
        if any(user is not product and is_product(user, kernels.linear.default) for user in product.args[0].users):
            continue  # products with one input are joined
        shape, added = traced_value(product), traced_value(residual)
        if added is None or product.args[3] != NO_ACTIVATION or added.dtype != shape.dtype:
            continue
        if added.dim() == shape.dim() and all(
            statically_known_true(a == b) for a, b in zip(added.shape, shape.shape, strict=True)
        ):
            replace_call(total, kernels.linear.default, (*product.args[:4], residual, *product.args[5:]))
            return


def _join_attention(node: Node, attention: Any, joined: Any) -> None:
    """Replace attention over parts of a joined product, rotated, by an operation that takes the product as it is.

    `attention` is the operation of queries, keys and values `[B, H or G, N, D]` and further arguments; `joined` that
    of the product `[B, N, (H + 2G) * D]`, cosines, sines, G, D and the same further arguments.
    """
    found = find_rotated(node, attention, kernels.rotary.default)
    if found is None:
        return
    given, tables, further = found
    parts: list[Any] = [_part_of_heads(part) for part in given]
    if None in parts:
        return
    (product, size, first, second), of_keys, of_values = parts
    if (of_keys[:2], of_values[:2]) != ((product, size), (product, size)) or first != 0:
        return
    if (of_keys[2], of_values[2]) != (second, of_keys[3]) or of_values[3] != traced_value(product).shape[-1]:
        return
    shared = (of_keys[3] - of_keys[2]) // size
    if of_values[3] - of_values[2] == shared * size:
        replace_call(node, joined, (product, *tables, shared, size, *further))


def _part_of_heads(node: Node) -> tuple[Node, int, int, int] | None:
    """Return product, head size, first and last column if a node is heads `[B, H, N, D]` of columns of a product."""
    if not is_call(node, aten.transpose.int) or tuple(node.args[1:]) != (1, 2):
        return None
    view = node.args[0]
    if not is_call(view, aten.view.default) or len(view.args[1]) != 4 or not is_call(view.args[0], aten.slice.Tensor):
        return None
    product, dimension, first, last = view.args[0].args
    size = traced_value(view).shape[-1]
    return (product, size, first, last) if dimension == -1 and is_call(product, kernels.linear.default) else None


def _join_products(graph: fx.Graph) -> None:
    """Compute products with the same input in one call, which starts the threads once."""
    for nodes in find_products_of_one(graph, kernels.linear.default):
        weights, biases = ([node.args[index][0] for node in nodes] for index in (1, 2))
        further = (None, _scales_of(*nodes), nodes[0].args[6]) if form_of(nodes[0]) else ()
        given = (nodes[0].args[0], weights, biases, NO_ACTIVATION, *further)
        with graph.inserting_before(nodes[0]):
            joined = graph.call_function(kernels.linear.default, given)
            joined.meta["val"] = torch.cat([traced_value(node) for node in nodes], dim=-1)
            begin = 0
            for node, weight in zip(nodes, weights, strict=True):
                end = begin + len(traced_value(weight))
                part = graph.call_function(aten.slice.Tensor, (joined, -1, begin, end))
                part.meta = dict(node.meta)
                node.replace_all_uses_with(part)
                begin = end


# ----------------------------------------------------------------------------------------------- chains

_Long, _Weights = ctypes.c_int64, ctypes.c_int64 * MAX_WEIGHTS


class _StepFields(ctypes.Structure):
    """`struct Step` of steps.h."""

    _fields_ = (
        ("count", _Long), ("k", _Long), ("x", _Long), ("y", _Long), ("residual", _Long), ("weights", _Weights),
        ("biases", _Weights), ("scales", _Weights), ("sizes", _Weights), ("activation", _Long), ("form", _Long),
        ("wide", _Long), ("early", _Long), ("eps", ctypes.c_float),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ChainStep:
    """A product or a norm of a chain. Places: those of the chain's inputs come first, then those of its steps."""

    x: int  # place
    weights: tuple[int, ...]  # places; a norm has one
    k: int  # numbers in a row of x
    size: int  # numbers in a row of the result
    biases: tuple[int | None, ...] = ()  # places
    sizes: tuple[int, ...] = ()  # rows of the weights; () for a norm
    activation: int = NO_ACTIVATION
    residual: int | None = None  # place
    is_wide: bool = False  # whether a norm's weight is float32 beside other inputs in bfloat16
    eps: float = 0.0
    early: bool = False
    scales: tuple[int, ...] = ()  # places of the scales of the weights, if these are in int8
    form: int = SAME

    def fields(self, place: int) -> _StepFields:
        """Return the step for the library; its result has this place."""
        weights = _Weights(*self.weights)
        biases = _Weights(*(-1 if bias is None else bias for bias in self.biases))
        residual = -1 if self.residual is None else self.residual
        places = self.x, place, residual, weights, biases, _Weights(*(self.scales or (-1,) * len(self.weights)))
        options = self.activation, self.form, self.is_wide, self.early, self.eps
        return _StepFields(len(self.sizes), self.k, *places, _Weights(*self.sizes), *options)


def make_chain(steps: Sequence[ChainStep], inputs: int, outputs: Sequence[int]) -> Callable[..., Any]:
    """Return a function of `inputs` tensors that runs steps for the same rows one after the other.

    Inputs with rows come before the weights. It returns the results of the steps with these indices: a tensor if there
    is one, otherwise a tuple.
    """
    count, kept = len(steps), tuple(outputs)
    array = (_StepFields * count)(*[step.fields(inputs + index) for index, step in enumerate(steps)])
    inner = [index for index in range(count) if index not in kept]
    begins = [sum(steps[before].size for before in inner[:number]) for number in range(len(inner))]
    scratch_size, sizes = sum(steps[index].size for index in inner), [steps[index].size for index in kept]
    order = [(inner + list(kept)).index(index) for index in range(count)]
    first, k, table = steps[0].x, steps[0].k, ctypes.c_void_p * (inputs + count)
    with_rows = 1 + max(place for step in steps for place in (step.x, step.residual or 0) if place < inputs)

    def chain(*tensors: Tensor) -> Any:
        x = tensors[first]
        rows = x.numel() // k
        read = [*(tensor.contiguous() for tensor in tensors[:with_rows]), *tensors[with_rows:]]
        lead = x.shape[:-1]
        made = [x.new_empty(*lead, size) for size in sizes]
        scratch = x.new_empty(rows * scratch_size)
        begin, wide = scratch.data_ptr(), rows * x.itemsize
        places = [begin + wide * offset for offset in begins] + [result.data_ptr() for result in made]
        addresses = [tensor.data_ptr() for tensor in read] + [places[index] for index in order]
        functions_for(x.dtype).run(array, count, table(*addresses), rows, torch.get_num_threads())
        return made[0] if len(made) == 1 else tuple(made)

    return chain


def join_steps(graph: fx.GraphModule) -> int:
    """Join consecutive products and norms of a graph from `use_kernels` into chains, in place; return their number."""
    runs, current = list[list[fx.Node]](), list[fx.Node]()
    for node in graph.graph.nodes:
        if _is_step(node) and (not current or _has_same_rows(node, current[0])):
            current.append(node)
        else:
            runs.append(current)
            current = [node] if _is_step(node) else []
    chains = [run for run in runs if len(run) > 1]
    for run in chains:
        _join(graph.graph, run)
    graph.recompile()
    return len(chains)


def _is_step(node: Any) -> bool:
    """Whether a node can be a step of a chain."""
    if node.op != "call_function":
        return False
    if node.target is kernels.rms_norm.default:
        weight = node.args[1]
        return bool(weight.op == "placeholder" and weight.meta["val"].is_contiguous())
    if node.target is not kernels.linear.default:
        return False
    weights, biases = node.args[1], node.args[2]
    used = [*weights, *(bias for bias in biases if bias is not None), *((form_of(node) and node.args[5]) or ())]
    return len(weights) <= MAX_WEIGHTS and all(one.op == "placeholder" for one in used)


def _has_same_rows(node: fx.Node, other: fx.Node) -> bool:
    """Whether two steps have as many rows, in the same dimensions, of the same dtype."""
    (*rows, _), (*others, _) = node.meta["val"].shape, other.meta["val"].shape
    same = node.meta["val"].dtype == other.meta["val"].dtype and len(rows) == len(others)
    return same and all(statically_known_true(a == b) for a, b in zip(rows, others, strict=True))


def _join(graph: fx.Graph, run: Sequence[fx.Node]) -> None:
    inside = set(run)
    used: list[fx.Node] = []  # inputs: those with rows first, then weights
    for node in run:
        with_rows = [node.args[0], *node.args[4:5]] if node.target is kernels.linear.default else [node.args[0]]
        used += [one for one in with_rows if isinstance(one, fx.Node) and one not in inside]
    used += [one for node in run for one in node.all_input_nodes if one not in inside]
    inputs = list(dict.fromkeys(used))
    places = {node: place for place, node in enumerate([*inputs, *run])}
    outputs = [index for index, node in enumerate(run) if any(user not in inside for user in node.users)]
    chain = make_chain([_step(node, places) for node in run], len(inputs), outputs)
    with graph.inserting_before(run[0]):
        joined = graph.call_function(chain, tuple(inputs))
        parts = [joined]
        if len(outputs) > 1:
            parts = [graph.call_function(getitem, (joined, number)) for number in range(len(outputs))]
    for part, index in zip(parts, outputs, strict=True):
        part.meta = dict(run[index].meta)
        run[index].replace_all_uses_with(part, delete_user_cb=lambda user: user not in inside)
    for node in reversed(run):
        graph.erase_node(node)


def _step(node: Any, places: dict[fx.Node, int]) -> ChainStep:
    x = node.args[0]
    size, k = int(node.meta["val"].shape[-1]), int(x.meta["val"].shape[-1])
    if node.target is kernels.rms_norm.default:
        weight, eps, early = node.args[1:]
        is_wide = weight.meta["val"].dtype == torch.float32
        return ChainStep(places[x], (places[weight],), k, size, is_wide=is_wide, eps=eps, early=early)
    weights, biases, activation = node.args[1:4]
    residual = next((places[one] for one in node.args[4:5] if one is not None), None)
    of_weights = tuple(places[weight] for weight in weights)
    scales, form = node.args[5:7] if form_of(node) else (None, SAME)
    of_biases = tuple(None if bias is None else places[bias] for bias in biases)
    sizes = tuple(len(weight.meta["val"]) for weight in weights)
    of_scales = tuple(places[one] for one in scales or ())
    return ChainStep(
        places[x], of_weights, k, size, of_biases, sizes, activation, residual, scales=of_scales, form=form
    )
