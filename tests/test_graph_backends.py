"""The CUDA graph backend without CUDA: recovery from failed captures, and operations that are refused."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_specdec.verification.graph_backends import (
    CapturableOnly,
    CudaGraphs,
    GraphBackend,
    NotCapturableError,
    groups_on_device,
)

DEVICE = torch.device("cuda", 0)


class Allocator:
    """torch's state during captures, with its bug: a capture that fails is not ended (pytorch#180395)."""

    def __init__(self, *, ends_itself: bool = False, stays_broken: bool = False) -> None:
        self.is_invalid = False
        self.capturing_to: Any = None
        self.stream: Any = "main"
        self.generators_capture = False
        self.pools = self.cleared = 0
        self.waits: list[str] = []  # of the host, for a stream or for the device
        self._ends_itself, self._stays_broken = ends_itself, stays_broken
        self._failed = False

    def new_pool(self) -> int:
        self.pools += 1
        return self.pools

    def end(self, device: int, pool: int) -> None:
        assert device == DEVICE.index
        if self.capturing_to != pool:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.capturing_to = None

    def begin(self, pool: int, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"
        assert not gc.isenabled()
        assert self.stream != "main"
        if self.capturing_to is not None or (self._failed and self._stays_broken):
            raise RuntimeError("already capturing")
        self.capturing_to, self.generators_capture, self.is_invalid = pool, True, False

    def finish(self) -> None:
        if not self.is_invalid:
            self.capturing_to, self.generators_capture = None, False
            return
        self._failed = True
        if self._ends_itself:
            self.capturing_to = None
        raise RuntimeError("operation failed due to a previous error during capture")

    @contextlib.contextmanager
    def use_stream(self, stream: Any) -> Iterator[None]:
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    def clear_workspaces(self) -> None:
        assert self.capturing_to is None
        self.cleared += 1


@pytest.fixture
def backend_for(monkeypatch: pytest.MonkeyPatch) -> Callable[[Allocator], CudaGraphs]:
    def make(allocator: Allocator) -> CudaGraphs:
        main = SimpleNamespace(synchronize=lambda: allocator.waits.append("stream"))
        graph = SimpleNamespace(replay=lambda: None, capture_begin=allocator.begin, capture_end=allocator.finish)
        fakes: dict[str, Any] = {
            "Stream": lambda _device: SimpleNamespace(), "graph_pool_handle": allocator.new_pool,
            "device": lambda _device: contextlib.nullcontext(), "stream": allocator.use_stream,
            "current_stream": lambda: main, "CUDAGraph": lambda: graph,
            "synchronize": lambda _device: allocator.waits.append("device"),
            "empty_cache": lambda: allocator.waits.append("device"),
        }  # fmt: skip
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", allocator.clear_workspaces, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", allocator.end, raising=False)
        monkeypatch.setattr(CudaGraphs, "_failed", [])
        monkeypatch.setattr(CudaGraphs, "_broken", set())
        return CudaGraphs(DEVICE)

    return make


def failing(allocator: Allocator, error: BaseException, *, invalidates: bool = True) -> Callable[[], None]:
    """A step that fails."""

    def run() -> None:
        allocator.is_invalid = invalidates
        raise error

    return run


@pytest.mark.parametrize(("invalidates", "ends_itself"), [(True, False), (True, True), (False, False)])
@pytest.mark.parametrize("error", [RuntimeError("unsupported"), torch.OutOfMemoryError("full"), KeyboardInterrupt()])
def test_a_capture_that_fails_is_ended_and_the_next_one_works(
    backend_for: Callable[[Allocator], CudaGraphs], error: BaseException, invalidates: bool, ends_itself: bool
) -> None:
    allocator = Allocator(ends_itself=ends_itself)
    backend = backend_for(allocator)
    for _ in range(2):
        with pytest.raises(type(error)) as raised:
            backend.capture(failing(allocator, error, invalidates=invalidates))
        assert raised.value is error
        assert (allocator.capturing_to, allocator.generators_capture, gc.isenabled()) == (None, False, True)
        assert allocator.stream == "main"
        backend.capture(lambda: None)()


def test_a_capture_disturbs_nobody_else(backend_for: Callable[[Allocator], CudaGraphs]) -> None:
    """The host waits for its own stream alone, no cache is emptied, and other people's workspaces stay."""
    allocator = Allocator()
    backend = backend_for(allocator)
    for _ in range(3):
        backend.capture(lambda: None)()
    assert set(allocator.waits) == {"stream"}
    assert (allocator.pools, allocator.cleared) == (1, 1)


class RunsAndReplays(GraphBackend):
    """A replay is the function itself; the device's clock is in its hands."""

    def __init__(self, events: list[str], clock: list[float]) -> None:
        super().__init__(torch.device("cpu"))

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing
                self.at = torch.nan

            def record(self) -> None:
                self.at = clock[-1]

            def elapsed_time(self, end: Any) -> float:
                assert events[-1] == "synchronize"
                return float(end.at - self.at)

        self._module = SimpleNamespace(
            Event=Event, device=lambda _device: contextlib.nullcontext(),
            synchronize=lambda _device: events.append("synchronize"),
            get_device_properties=lambda _device: SimpleNamespace(L2_cache_size=512),
        )  # fmt: skip

    def _capture(self, run: Callable[[], object]) -> Callable[[], Any]:
        return run


def test_functions_are_timed_by_turns_each_with_a_cold_cache() -> None:
    """The median of nine rounds, of which a slow first one changes nothing."""
    events, clock = list[str](), [0.0]
    times = {"first": iter([90.0, *[3.0] * 4, *[5.0] * 4]), "second": iter([1.0] * 5 + [70.0] * 4)}

    def run(name: str) -> None:
        events.append(name)
        clock.append(clock[-1] + next(times[name]))

    class Overwrites(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.zero_.default:
                events.append(f"{args[0].nbytes} bytes")
                clock.append(clock[-1] + 1000)
            return func(*args, **(kwargs or {}))

    with Overwrites():
        found = RunsAndReplays(events, clock).median_times([partial(run, name) for name in times])
    assert found == [5.0, 1.0]
    assert events == ["1024 bytes", "first", "1024 bytes", "second"] * 9 + ["synchronize"]
    assert RunsAndReplays(events, clock).median_times([]) == []


def test_a_device_that_cannot_capture_any_more_is_left_alone(backend_for: Callable[[Allocator], CudaGraphs]) -> None:
    allocator = Allocator(stays_broken=True)
    backend = backend_for(allocator)
    with pytest.raises(RuntimeError, match="first"):
        backend.capture(failing(allocator, RuntimeError("first")))
    ran: list[int] = []
    with pytest.raises(NotCapturableError, match="could not be ended"):
        backend.capture(lambda: ran.append(1))
    assert not ran


HOST, VALUES = torch.ones((), device="cpu"), torch.arange(3)
META = torch.zeros(3, device="meta")
REFUSED: dict[str, Callable[[], Any]] = {
    "a number copied to the device": lambda: HOST.to("meta"),
    "a number copied into the device": lambda: META.clone().copy_(HOST),
    "a number written by index": lambda: META.clone().index_put_((VALUES.to("meta"),), HOST),
    "repeats that only the device knows": lambda: torch.repeat_interleave(VALUES),
    "a read": lambda: HOST.item(),
    "places of what is true": lambda: VALUES.nonzero(),
    "an index by a mask": lambda: VALUES[VALUES > 1],
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_graph_can_hold_is_refused(name: str) -> None:
    with pytest.raises(NotCapturableError), CapturableOnly():
        REFUSED[name]()


def test_what_a_graph_can_hold_is_not_refused() -> None:
    """Numbers on the host that are arguments of kernels, and repeats of a known total."""
    with CapturableOnly():
        assert (META * HOST).shape == (3,)
        assert len(torch.repeat_interleave(VALUES, output_size=3)) == 3


@pytest.mark.parametrize(("dtype", "capability", "expected"), [
    (torch.bfloat16, (9, 0), True), (torch.bfloat16, (10, 0), True), (torch.bfloat16, (8, 0), False),
    (torch.bfloat16, (12, 0), False), (torch.float16, (9, 0), False),
])  # fmt: skip
def test_mixtures_of_experts_are_captured_where_their_kernel_is(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, capability: tuple[int, int], expected: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    tensor: Any = SimpleNamespace(device=DEVICE, dtype=dtype)
    assert groups_on_device(tensor) is expected


def test_a_product_of_groups_on_the_host_is_refused() -> None:
    left, right = torch.ones(4, 8, dtype=torch.bfloat16), torch.ones(2, 8, 8, dtype=torch.bfloat16)
    ends = torch.tensor([2, 4], dtype=torch.int32)

    def product() -> Tensor:
        return torch._grouped_mm(left, right, offs=ends)

    assert product().shape == (4, 8)
    with pytest.raises(NotCapturableError, match="sizes of its groups"), CapturableOnly():
        product()
