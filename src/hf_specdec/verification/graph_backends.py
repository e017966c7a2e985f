"""What records the work of a device as a graph, and the guard in front of it.

The only file that knows CUDA's graphs.
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

UNCAPTURED: dict[str, Any] = {"triton.cudagraphs": False}
"""Inductor's options for programs that are captured here, and not by inductor."""


class GraphBackend(Protocol):
    """What a device's graphs are recorded with."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Record what a function does on the device, once; what it returns does it again, without the function.

        Args:
            run: Reads and writes the same memory whenever it is called.

        Raises:
            Exception: Of any kind, where it reads the device, copies from the host, or waits.
        """


class CudaGraphs:
    """CUDA graphs of one device, in one pool of memory and on one stream.

    A pool lives as long as a graph in it, so an empty one keeps it. Workspaces of matrix products are taken anew
    inside of it: those outside may be freed by anybody.

    A recording that fails leaves torch's allocator and its random number generators in the middle of it
    (https://github.com/pytorch/pytorch/issues/180395); `_recover` ends it, and the next recording has a new pool.

    Args:
        device: A CUDA device.
    """

    _underway = threading.Lock()  # torch records one graph at a time in a process
    _failed: ClassVar[
        list[Any]
    ] = []  # graphs whose recording failed: before torch 2.12 their end may be the process's
    _broken: ClassVar[set[torch.device]] = set()  # devices on which nothing can be recorded after a failure

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._keeper: Any = None

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """See `GraphBackend`. Everything that is made once per stream (workspaces, handles) is made before."""
        with self._underway, torch.cuda.device(self._device):
            if self._device in self._broken:
                raise NotCapturableError("an earlier recording in this process failed and could not be ended")
            before = torch.cuda.current_stream()
            try:
                self._stream.wait_stream(before)
                with torch.cuda.stream(self._stream):
                    for _ in range(2):
                        run()
                before.wait_stream(self._stream)
                if self._keeper is None:
                    with warnings.catch_warnings(action="ignore"):  # it is empty, on purpose
                        self._keeper = self._captured(lambda: None)
                torch._C._cuda_clearCublasWorkspaces()
                try:
                    graph = self._captured(run)
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

    def _captured(self, run: Callable[[], None]) -> Any:
        graph = torch.cuda.CUDAGraph()
        try:
            # another thread of the user's may allocate meanwhile, which is none of this graph's business
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                run()
        except BaseException:
            self._failed.append(graph)
            raise
        return graph

    def _recover(self) -> None:
        """End a recording that failed, so that this process can allocate, draw random numbers and record again."""
        index = self._device.index if self._device.index is not None else torch.cuda.current_device()
        with contextlib.suppress(RuntimeError):  # torch has ended it itself
            torch._C._cuda_endAllocateToPool(index, self._pool)
        self._pool, self._keeper = torch.cuda.graph_pool_handle(), None
        try:
            torch.cuda.synchronize(self._device)
            with warnings.catch_warnings(action="ignore"):
                # the end of a recording that works resets the generators, which the failed one never reached
                self._keeper = self._captured(lambda: None)
        except Exception as error:  # of any kind: it comes out of a driver
            self._broken.add(self._device)
            logger.warning("No graphs are recorded on %s any more: %s", self._device, error)


GRAPH_BACKENDS: dict[str, Callable[[torch.device], GraphBackend]] = {"cuda": CudaGraphs}
"""What records, by type of device."""


class NotCapturableError(RuntimeError):
    """A step does what no graph can hold, in whatever shape it is run."""


class CapturableOnly(TorchDispatchMode):
    """Refuses what a graph cannot hold before a device is asked to record it."""

    waiting = frozenset({
        "_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2", "unique_dim",
        "unique_consecutive", "bincount",
    })  # fmt: skip
    copies = frozenset({"_to_copy", "copy_", "index_put_", "index_put", "_index_put_impl_"})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func._schema.name.removeprefix("aten::"), kwargs or {}
        # elsewhere than in a copy, a number in host memory is an argument of the kernel
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
            raise NotCapturableError("_grouped_mm reads the sizes of its groups on the host here")
        return func(*args, **kwargs)


def groups_on_device(tensor: Tensor) -> bool:
    """Whether torch has a kernel for products of groups whose sizes only the device knows, as mixtures of experts use.

    It is for bfloat16 on Hopper and Blackwell; elsewhere `_grouped_mm` loops over the groups on the host.
    """
    if tensor.device.type != "cuda" or tensor.dtype != torch.bfloat16:
        return False
    return torch.cuda.get_device_capability(tensor.device)[0] in (9, 10)
