"""Backends that capture device graphs, and a check that a step can be captured.

This is the only file that uses CUDA graphs.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import warnings
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

logger = logging.getLogger(__name__)

ACCELERATOR_OPTIONS: dict[str, Any] = {"triton.cudagraphs": False}
"""Inductor options on devices other than CPUs: graphs are captured by this package, not by inductor."""


class GraphBackend(Protocol):
    """Interface of a device's graphs."""

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Capture the device operations of `run` and return a function that replays them.

        Args:
            run: Must read and write the same memory in every call.
        """


class CudaGraphs:
    """CUDA graphs of one device, which share one memory pool and one stream.

    An empty graph keeps the pool alive. cuBLAS workspaces are cleared before a capture, so that the graph allocates
    its workspaces in the pool; torch may free workspaces outside of it.

    A failed capture leaves torch's allocator and random number generators in capture mode
    (https://github.com/pytorch/pytorch/issues/180395). `_recover` ends it, and the next capture uses a new pool.

    Args:
        device: A CUDA device.
    """

    _lock = threading.Lock()  # torch captures one graph at a time per process
    # kept alive: before torch 2.12, destroying a graph whose capture failed may crash the process
    _failed: ClassVar[list[Any]] = []
    _broken: ClassVar[set[torch.device]] = set()  # devices on which recovery from a failed capture failed

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._keeper: Any = None  # an empty graph in the pool

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """See `GraphBackend`; calls `run` twice first, for allocations that are made once per stream."""
        with self._lock, torch.cuda.device(self._device):
            if self._device in self._broken:
                raise NotCapturableError("an earlier capture in this process failed and could not be ended")
            before = torch.cuda.current_stream()
            try:
                self._stream.wait_stream(before)
                with torch.cuda.stream(self._stream):
                    for _ in range(2):
                        run()
                before.wait_stream(self._stream)
                if self._keeper is None:
                    with warnings.catch_warnings(action="ignore"):  # torch warns about empty graphs
                        self._keeper = self._capture(lambda: None)
                torch._C._cuda_clearCublasWorkspaces()
                try:
                    graph = self._capture(run)
                finally:
                    torch._C._cuda_clearCublasWorkspaces()
            except BaseException:
                torch.cuda.set_stream(before)
                self._recover()
                raise
            finally:
                torch.cuda.set_stream(before)
        replay: Callable[[], None] = graph.replay
        return replay

    def _capture(self, run: Callable[[], None]) -> Any:
        graph = torch.cuda.CUDAGraph()
        try:
            # other threads may allocate meanwhile, which must not invalidate this capture
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                run()
        except BaseException:
            self._failed.append(graph)
            raise
        return graph

    def _recover(self) -> None:
        """End a failed capture, so that this process can allocate memory, draw random numbers and capture again."""
        index = self._device.index if self._device.index is not None else torch.cuda.current_device()
        with contextlib.suppress(RuntimeError):  # raised if torch has ended the capture
            torch._C._cuda_endAllocateToPool(index, self._pool)
        self._pool, self._keeper = torch.cuda.graph_pool_handle(), None
        try:
            torch.cuda.synchronize(self._device)
            with warnings.catch_warnings(action="ignore"):
                # a successful capture resets the random number generators
                self._keeper = self._capture(lambda: None)
        except Exception as error:  # drivers raise various types
            self._broken.add(self._device)
            logger.warning("Graphs can no longer be captured on %s: %s", self._device, error)


GRAPH_BACKENDS: dict[str, Callable[[torch.device], GraphBackend]] = {"cuda": CudaGraphs}
"""Graph backends by device type."""


class NotCapturableError(RuntimeError):
    """Raised when a step cannot be captured for any shape, because of an operation or of an earlier failure."""


class CapturableOnly(TorchDispatchMode):
    """Dispatch mode that raises `NotCapturableError` at operations that a graph cannot contain.

    Used before a capture, because a capture that fails on the device is hard to recover from.
    """

    # operations that read values or sizes from the device
    waiting = frozenset({
        "_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2", "unique_dim",
        "unique_consecutive", "bincount",
    })  # fmt: skip
    # operations that transfer host tensors of any size to the device
    copies = frozenset({"_to_copy", "copy_", "index_put_", "index_put", "_index_put_impl_"})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func._schema.name.removeprefix("aten::"), kwargs or {}
        # except in copies, a host scalar is passed as a kernel argument
        tensors = [
            leaf for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, Tensor) and (leaf.dim() or name in self.copies)
        ]  # fmt: skip
        kinds = {tensor.device.type for tensor in tensors}
        if name == "_to_copy" and kwargs.get("device") is not None:
            kinds.add(torch.device(kwargs["device"]).type)
        by_mask = name.startswith("index") and any(
            isinstance(leaf, Tensor) and leaf.dtype == torch.bool for leaf in tree_leaves(args[1])
        )
        counts = name == "repeat_interleave" and kwargs.get("output_size") is None
        if name in self.waiting or by_mask or counts:
            raise NotCapturableError(f"{name} waits for the device")
        if len(kinds) > 1:
            raise NotCapturableError(f"{name} copies between {' and '.join(sorted(kinds))}")
        if name == "lift_fresh" and kinds - {"cpu"}:
            raise NotCapturableError("torch.tensor copies from the host")
        if name == "_grouped_mm" and not groups_on_device(args[0]):
            raise NotCapturableError("_grouped_mm reads the sizes of its groups on the host for this device and dtype")
        return func(*args, **kwargs)


def groups_on_device(tensor: Tensor) -> bool:
    """Whether torch's grouped matrix product, used by mixtures of experts, reads the group sizes on the device.

    True for bfloat16 on GPUs of compute capability 9 or 10 (Hopper, data-centre Blackwell); elsewhere `_grouped_mm`
    loops over the groups on the host.
    """
    if tensor.device.type != "cuda" or tensor.dtype != torch.bfloat16:
        return False
    return torch.cuda.get_device_capability(tensor.device)[0] in (9, 10)
