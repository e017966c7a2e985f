"""Programs: traced functions that run as compiled code, or operation by operation with kernels.

A program reads the model's own weights, so weights that change in place need no new program. On a CPU its products run
as kernels (`cpu/`). Without those kernels, inductor compiles with constant weights, of which it makes a packed copy,
because its own products are slow otherwise. Programs to be captured on a GPU have fused small operations (`fusion/`),
and joined products if these are measured to be faster.
"""

from __future__ import annotations

import functools
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import PreTrainedModel

from hf_specdec.config import ExecutionMode
from hf_specdec.cpu.library import NoKernelsError, check_switch, load_library, load_or_none, loads_at_once
from hf_specdec.cpu.operations import (
    DTYPES,
    PRODUCT_TOLERANCE,
    ROUNDED_TOLERANCE,
    SAME,
    is_rounded,
    product_error,
)
from hf_specdec.cpu.rewrite import KernelProducts, call_functions, inexact_operations, join_steps, use_kernels
from hf_specdec.errors import CacheCapacityError, listed
from hf_specdec.fusion.fused import (
    PRODUCT_ROWS,
    PRODUCT_TILES,
    can_fuse,
    fuse_operations,
    fused,
    record_linear,
)
from hf_specdec.fusion.patterns import ReplaceProducts, form_of, is_call, lift_weights, traced_value
from hf_specdec.verification.graph_backends import ACCELERATOR_OPTIONS, GRAPH_BACKENDS
from hf_specdec.verification.memory import persistent_tensors
from hf_specdec.verification.tree_attention import calls_kernel_directly, is_correct, trial_numbers

logger = logging.getLogger(__name__)

PACKING_OPTIONS: dict[str, Any] = {
    "freezing": True,  # weights become constants, packed for oneDNN; the model keeps its weights
    "cpp.enable_concat_linear": True,  # linear layers with the same input become one product
}
"""Inductor options on a CPU without kernels; they double the memory of the weights."""
LEAST_GAIN = 0.03
"""Joined products must take less time than torch's own by this share."""
TIMED_LAYERS = 8
"""Layers whose products are timed, one after the other."""
EXACT_ROWS = 2048
"""Rows of a weight that are converted to float64 at a time, to check products."""
Timer = Callable[[Sequence[Callable[[], object]]], list[float]]


@dataclass(frozen=True, slots=True)
class Program:
    """A traced function, called with its inputs; returns what it returned."""

    run: Callable[..., Sequence[Tensor]]  # of the inputs and the weights
    weights: tuple[Tensor, ...] = ()
    copies_weights: bool = False
    num_fused: int = 0  # fused operations in it
    inexact: str = ""  # see `Runner`

    def __call__(self, *inputs: Tensor) -> Sequence[Tensor]:
        """Return the results for inputs of any size."""
        return self.run(*(tensor.contiguous() for tensor in inputs), *self.weights)


class CaptureError(Exception):
    """Raised when a forward cannot be compiled or captured, or gives other outputs than the model.

    The message is a clause such as "it has forward hooks".
    """

    @property
    def is_lasting(self) -> bool:
        """Whether another attempt would fail as well; False if memory or disk space did not suffice."""
        cause = self.__cause__
        lacking = isinstance(cause, OSError | MemoryError | torch.OutOfMemoryError | CacheCapacityError)
        return not lacking and "allocate memory" not in str(cause)  # torch's message on a CPU


class AttentionForms(NamedTuple):
    """An attention operation, and its forms for a joined product (`use_kernels`) and before rotary embedding."""

    separate: Any
    joined: Any
    rotated: Any


def supports_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether there are CPU kernels for this device and dtype, if this machine can use them."""
    return device.type == "cpu" and dtype in DTYPES


def has_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the CPU kernels support this device and dtype; compiles them if this is the first time."""
    return supports_kernels(device, dtype) and load_or_none() is not None


def faster_products(model: PreTrainedModel) -> AbstractContextManager[Any]:
    """Return a context in which the kernels compute a model's products without gradients, where torch is far slower.

    That is in bfloat16 on processors without instructions for it: torch takes four to ten times as long. The kernels
    are not compiled for this: until they are, the context changes nothing.
    """
    if model.dtype != torch.bfloat16 or any(one.device.type != "cpu" for one in model.parameters()):
        return nullcontext()
    has_instructions = not loads_at_once() or load_or_none() is None or load_library()[0].name.endswith("bf16")
    return nullcontext() if has_instructions else KernelProducts()


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which autocast is off: programs are made for calls outside of it."""
    enabled = torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if enabled else nullcontext()


def make_program(
    step: Callable[..., list[Tensor]], *inputs: Tensor, mode: ExecutionMode, attention: AttentionForms | None = None
) -> Program:
    """Trace a function, by one call, and make a program of it, for inputs of any size.

    Dimensions of the example inputs that may vary independently need distinct sizes greater than 1.
    """
    device = inputs[0].device
    on_cpu = device.type == "cpu"
    if mode == "cuda_graph" and not can_fuse(device):
        raise CaptureError("its small operations cannot be fused, because Triton is not installed")
    if mode == "kernels" and not on_cpu:
        raise CaptureError(f"the CPU kernels cannot run on {device}")
    try:
        if mode == "kernels":
            load_library()
        elif mode == "cuda_graph":
            check_switch()
    except NoKernelsError as error:
        name = "CPU" if mode == "kernels" else "Triton"
        raise CaptureError(f"the {name} kernels cannot be used: {error}") from error
    try:
        with persistent_tensors():
            if mode == "cuda_graph":
                graph = _traced(step, inputs, record=ReplaceProducts(record_linear))
                weights = lift_weights(graph)
                found = fuse_operations(graph, attention and (attention.separate, attention.rotated))
                logger.debug("Fused operations of a program: %s.", dict(found))
                if calls_kernel_directly(device):
                    choose_tiles(graph, weights, GRAPH_BACKENDS[device.type](device).median_times)
                return Program(graph.forward, tuple(weights), num_fused=found.total())
            if not on_cpu or not has_kernels(device, torch.float32):
                graph = _traced(step, inputs)
                options = PACKING_OPTIONS if on_cpu else ACCELERATOR_OPTIONS
                compiled: Any = torch._inductor.compile(graph, _sizes(graph), options=options)
                return Program(compiled, copies_weights=on_cpu)
            graph = _traced(step, inputs, record=KernelProducts(recorded=True))
            weights = lift_weights(graph)
            if use_kernels(graph, attention and (attention.separate, attention.joined)) == 0 and mode == "kernels":
                raise CaptureError("none of its products can use the CPU kernels")
            left = inexact_operations(graph)
            check_products(graph, weights)
            if mode == "kernels":
                join_steps(graph)
                call_functions(graph)
                run: Any = graph.forward
            else:
                run = torch._inductor.compile(graph, _sizes(graph), options={})
    except CaptureError:
        raise
    except Exception as error:  # model code and compilers raise various types
        raise CaptureError(f"it cannot be traced ({type(error).__name__}: {error})") from error
    return Program(run, tuple(weights), inexact=f"torch computes {listed(left)} of it" if left else "")


def check_products(graph: fx.GraphModule, weights: Sequence[Tensor]) -> None:
    """Compare the kernels' products with exact ones, for one weight of each shape; `weights` are the last inputs.

    Raises:
        CaptureError: They are wrong on this machine.
    """
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    values = dict(zip(placeholders[len(placeholders) - len(weights) :], weights, strict=True))
    checked = set[Any]()
    for node in graph.graph.nodes:
        if not is_call(node, torch.ops.hf_specdec_cpu.linear.default):
            continue
        scales, form = node.args[5:7] if form_of(node) else (None, SAME)
        for weight, scale in zip(node.args[1], scales or [None] * len(node.args[1]), strict=True):
            dtype, given = traced_value(node).dtype, values.get(weight)
            if given is None or (key := (given.shape, dtype, form)) in checked:
                continue
            checked.add(key)
            distance = product_error(given, dtype, values.get(scale), form)
            if not distance <= (ROUNDED_TOLERANCE if is_rounded(form) else PRODUCT_TOLERANCE[dtype]):
                shape = " x ".join(map(str, given.shape))
                raise CaptureError(f"the CPU kernel's product with a weight of {shape} is wrong by {distance:.1e}")


_CHOSEN: dict[Any, list[int]] = {}  # tables of joined products by kind: all programs of a process have the same


def choose_tiles(graph: fx.GraphModule, weights: Sequence[Tensor], times: Timer) -> None:
    """Choose tiles for joined products, or torch's own products, for each number of rows, in place.

    Args:
        graph: A graph from `fuse_operations`.
        weights: Its last inputs.
        times: Returns how long each of some functions takes.
    """
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    values: dict[Any, Any] = dict(zip(placeholders[len(placeholders) - len(weights) :], weights, strict=True))
    values[None] = None  # no bias
    calls: dict[Any, list[Any]] = defaultdict(list)
    for node in graph.graph.nodes:
        if is_call(node, fused.products.default):
            _, matrices, biases, activation, _ = node.args
            if values.keys() >= {*matrices, *biases} and biases.count(None) in (0, len(biases)):
                layer = [[values[one] for one in part] for part in (matrices, biases)]
                shapes, first = tuple(weight.shape for weight in layer[0]), layer[0][0]
                calls[activation, shapes, biases[0] is None, first.dtype, first.device].append((node, layer))
    for kind, members in calls.items():
        if kind not in _CHOSEN:
            layers = [layer for _, layer in members[:TIMED_LAYERS]]
            try:
                _CHOSEN[kind] = [_fastest_tile(layers, kind[0], rows, times) for rows in PRODUCT_ROWS]
            except Exception as error:  # drivers and compilers raise various types; memory may not suffice
                reason = f"{type(error).__name__}: {error}"
                logger.info("Products with the same input are not joined, because timing them failed: %s.", reason)
                continue
        for node, _ in members:
            node.args = (*node.args[:-1], _CHOSEN[kind])
    graph.recompile()


def _fastest_tile(layers: Sequence[Any], activation: str, rows: int, times: Timer) -> int:
    """Return the index in `PRODUCT_TILES` of the fastest tiles that are right; -1 for torch's own products.

    `layers` are weights and biases of joined products of the same shapes.
    """
    weights, dtype, products = layers[0][0], layers[0][0][0].dtype, fused.products.default
    x = trial_numbers(rows, rows, weights[0].shape[1], dtype=dtype).to(weights[0].device)
    parts = []
    for begin in range(0, max(map(len, weights)), EXACT_ROWS):
        part = slice(begin, begin + EXACT_ROWS)
        wide = [[one if one is None else one[part].double() for one in given] for given in layers[0]]
        parts.append(products(x.double(), *wide, activation, []))
    exact = [torch.cat(part, -1) for part in zip(*parts, strict=True)]

    def run(tile: int) -> list[list[Tensor]]:
        return [products(x, *layer, activation, [tile] * len(PRODUCT_ROWS)) for layer in layers]

    def error(tile: int) -> float:
        pairs = zip(run(tile)[0], exact, strict=True)
        errors = [(found - right).abs().max() / right.abs().max() for found, right in pairs]
        return float(torch.stack(errors).nan_to_num(torch.inf).max())

    sizes = " + ".join(str(len(weight)) for weight in weights)
    kind = f"{activation or 'joined'} products in {dtype}, {rows} rows x {sizes} of {x.shape[1]}"
    names = {-1: "torch"} | {tile: f"tiles {shape}" for tile, shape in enumerate(PRODUCT_TILES)}
    trials = {tile: functools.partial(error, tile) for tile in names}
    usable = [tile for tile in names if is_correct(names[tile], trials[tile], dtype, kind, logging.DEBUG)]
    found = dict(zip(usable, times([functools.partial(run, tile) for tile in usable]), strict=True))
    best = min(found, key=lambda tile: found[tile] * (1 - LEAST_GAIN * (tile < 0)), default=-1)
    logger.debug("%s: %s; milliseconds: %s.", kind, names[best], {names[tile]: time for tile, time in found.items()})
    return best


def _traced(
    step: Callable[..., list[Tensor]], inputs: Sequence[Tensor], *, record: ReplaceProducts | None = None
) -> fx.GraphModule:
    with record or nullcontext():
        graph: fx.GraphModule = make_fx(step, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*inputs)
    for node in graph.graph.nodes:
        node.type = None  # inductor's cache cannot store annotations that are strings
    return graph


def _sizes(graph: fx.GraphModule) -> list[Any]:
    return [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
