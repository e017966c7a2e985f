"""Backends that capture device graphs, and a check that a step can be captured.

This is the only file that uses CUDA graphs.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_specdec.randomness import CAPTURING

logger = logging.getLogger(__name__)

ACCELERATOR_OPTIONS: dict[str, Any] = {"triton.cudagraphs": False}
"""Inductor options on devices other than CPUs: graphs are captured by this package, not by inductor."""


class GraphBackend(ABC):
    """Interface of a device's graphs, which share memory: only one of them may be captured or run at a time.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._module = device, torch.get_device_module(device)
        self._lock = threading.Lock()
        self._last: tuple[Any, Any] | None = None  # stream of the last `exclusive` block, and an event at its end

    @property
    def total_bytes(self) -> int:
        """Memory of the device."""
        return int(self._module.get_device_properties(self._device).total_memory)

    @contextmanager
    def exclusive(self) -> Iterator[Any]:
        """Enter a block that uses memory of the graphs; yields the current stream.

        Other threads wait for the block, and its work on the device for that of the block before, which another thread
        may have queued on another stream.
        """
        with self._lock:
            stream = self._module.current_stream(self._device)
            if self._last is not None and self._last[0] != stream:
                stream.wait_event(self._last[1])
            try:
                yield stream
            finally:
                event = self._module.Event() if self._last is None else self._last[1]
                event.record(stream)
                self._last = stream, event

    def capture(self, run: Callable[[], object]) -> Callable[[], None]:
        """Capture the device operations of `run` and return a function that replays them.

        Meanwhile, no other thread of this package draws random numbers, and nothing is garbage-collected: destroying
        another graph invalidates a capture (https://github.com/pytorch/pytorch/issues/161037).

        Args:
            run: Must read and write the same memory in every call. It must have run in this thread before, because
                what is made once per thread (handles of libraries, kernels) cannot be made in a capture.
        """
        with CAPTURING:
            collects = gc.isenabled()
            gc.disable()
            try:
                return self._capture(run)
            finally:
                if collects:
                    gc.enable()

    def median_times(self, runs: Sequence[Callable[[], object]], rounds: int = 9) -> list[float]:
        """Return how many milliseconds each function takes as a graph (see `capture`), by turns, with a cold cache."""
        replays = [self.capture(run) for run in runs]
        size = 2 * self._module.get_device_properties(self._device).L2_cache_size
        other = torch.empty(size, dtype=torch.uint8, device=self._device)
        pairs = [[[self._module.Event(enable_timing=True) for _ in range(2)] for _ in runs] for _ in range(rounds)]
        with self._module.device(self._device):
            for events in pairs:
                for replay, (begin, end) in zip(replays, events, strict=True):
                    other.zero_()
                    begin.record()
                    replay()
                    end.record()
            self._module.synchronize(self._device)
        return [median(begin.elapsed_time(end) for begin, end in of_run) for of_run in zip(*pairs, strict=True)]

    @abstractmethod
    def _capture(self, run: Callable[[], object]) -> Callable[[], None]: ...


class CudaGraphs(GraphBackend):
    """CUDA graphs of one device, which share one memory pool, kept alive by an empty graph, and one stream.

    Neither the device is synchronised nor torch's memory caches are emptied for a capture, as `torch.cuda.graph` does.

    torch keeps a cuBLAS workspace for each thread and stream. Graphs need theirs in the pool, because torch may free
    workspaces outside of it (inductor's graphs do this). Only captures use the stream, so they allocate its workspace.
    What an earlier user of the stream left (torch hands out 32 streams in turn) is cleared once per pool; clearing
    around every capture would also free the workspaces that other people's graphs hold.

    A failed capture leaves torch's allocator and random number generators in capture mode
    (https://github.com/pytorch/pytorch/issues/180395). `_recover` ends it, and the next capture uses a new pool.

    Args:
        device: A CUDA device.
    """

    # kept alive: before torch 2.12, destroying a graph whose capture failed may crash the process
    _failed: ClassVar[list[Any]] = []
    _broken: ClassVar[set[torch.device]] = set()  # devices on which recovery from a failed capture failed

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._stream = torch.cuda.Stream(device)
        self._pool: Any = None
        self._keeper: Any = None  # the empty graph

    def _capture(self, run: Callable[[], object]) -> Callable[[], None]:
        with torch.cuda.device(self._device):
            if self._device in self._broken:
                raise NotCapturableError("an earlier capture in this process failed and could not be ended")
            try:
                if self._keeper is None:
                    self._open_pool()
                replay: Callable[[], None] = self._record(run).replay
            except BaseException:
                self._recover()
                raise
        return replay

    def _open_pool(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        torch._C._cuda_clearCublasWorkspaces()
        with warnings.catch_warnings(action="ignore"):  # torch warns about empty graphs
            self._keeper = self._record(lambda: None)

    def _record(self, run: Callable[[], object]) -> Any:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.current_stream().synchronize()  # errors of earlier work are raised here, not in the capture
        try:
            with torch.cuda.stream(self._stream):
                # other threads may allocate meanwhile, which must not invalidate this capture
                graph.capture_begin(self._pool, capture_error_mode="thread_local")
                try:
                    run()
                except BaseException:
                    with contextlib.suppress(RuntimeError):  # less informative
                        graph.capture_end()
                    raise
                graph.capture_end()
        except BaseException:
            self._failed.append(graph)
            raise
        return graph

    def _recover(self) -> None:
        """End a failed capture, so that this process can allocate memory, draw random numbers and capture again."""
        index = self._device.index if self._device.index is not None else torch.cuda.current_device()
        with contextlib.suppress(RuntimeError):  # raised if torch has ended the capture
            torch._C._cuda_endAllocateToPool(index, self._pool)
        self._keeper = None
        try:
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()  # a capture that needs memory cannot do this
            self._open_pool()  # a successful capture resets the random number generators
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
