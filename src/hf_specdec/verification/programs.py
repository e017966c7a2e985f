"""Programs: traced functions that run as compiled code, or operation by operation with kernels.

A program reads the model's own weights, so weights that change in place need no new program. On a CPU its products run
as kernels (`cpu/`). Without those kernels, inductor compiles with constant weights, of which it makes a packed copy,
because its own products are slow otherwise. Programs to be captured on a GPU have fused small operations (`fusion/`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import PreTrainedModel

from hf_specdec.config import ExecutionMode
from hf_specdec.cpu.library import NoKernelsError, load_library, load_or_none, loads_at_once
from hf_specdec.cpu.operations import DTYPES, PRODUCT_TOLERANCE, product_error
from hf_specdec.cpu.rewrite import KernelProducts, call_functions, inexact_operations, join_steps, use_kernels
from hf_specdec.errors import CacheCapacityError, listed
from hf_specdec.fusion.fused import can_fuse, fuse_operations
from hf_specdec.fusion.patterns import lift_weights
from hf_specdec.verification.graph_backends import ACCELERATOR_OPTIONS
from hf_specdec.verification.memory import persistent_tensors

logger = logging.getLogger(__name__)

PACKING_OPTIONS: dict[str, Any] = {
    "freezing": True,  # weights become constants, packed for oneDNN; the model keeps its weights
    "cpp.enable_concat_linear": True,  # linear layers with the same input become one product
}
"""Inductor options on a CPU without kernels; they double the memory of the weights."""


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
    on_cpu = inputs[0].device.type == "cpu"
    if mode == "cuda_graph" and not can_fuse(inputs[0].device):
        raise CaptureError("its small operations cannot be fused, because Triton is not installed")
    if mode == "kernels":
        if not on_cpu:
            raise CaptureError(f"the CPU kernels cannot run on {inputs[0].device}")
        try:
            load_library()
        except NoKernelsError as error:
            raise CaptureError(f"the CPU kernels cannot be used: {error}") from error
    try:
        with persistent_tensors():
            if mode == "cuda_graph":
                graph = _traced(step, inputs, record=False)
                weights = lift_weights(graph)
                fused = fuse_operations(graph, attention and (attention.separate, attention.rotated))
                logger.debug("Fused operations of a program: %s.", dict(fused))
                return Program(graph.forward, tuple(weights), num_fused=fused.total())
            if not on_cpu or not has_kernels(inputs[0].device, torch.float32):
                graph = _traced(step, inputs, record=False)
                options = PACKING_OPTIONS if on_cpu else ACCELERATOR_OPTIONS
                compiled: Any = torch._inductor.compile(graph, _sizes(graph), options=options)
                return Program(compiled, copies_weights=on_cpu)
            graph = _traced(step, inputs, record=True)
            weights = lift_weights(graph)
            if use_kernels(graph, attention and (attention.separate, attention.joined)) == 0 and mode == "kernels":
                raise CaptureError("none of its products can use the CPU kernels")
            left = inexact_operations(graph)
            matrices = [weight for weight in weights if weight.dim() == 2]
            for weight in {(weight.shape, weight.dtype): weight for weight in matrices}.values():  # one of each shape
                if weight.dtype in DTYPES and weight.is_contiguous():
                    distance = product_error(weight)
                    if not distance <= PRODUCT_TOLERANCE[weight.dtype]:
                        shape = " x ".join(map(str, weight.shape))
                        raise CaptureError(
                            f"the CPU kernel's product with a weight of {shape} is wrong by {distance:.1e}"
                        )
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


def _traced(step: Callable[..., list[Tensor]], inputs: Sequence[Tensor], *, record: bool) -> fx.GraphModule:
    with KernelProducts(recorded=True) if record else nullcontext():
        graph: fx.GraphModule = make_fx(step, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*inputs)
    for node in graph.graph.nodes:
        node.type = None  # inductor's cache cannot store annotations that are strings
    return graph


def _sizes(graph: fx.GraphModule) -> list[Any]:
    return [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
