"""The CUDA graph backend without CUDA: recovery from failed captures, and operations that are refused."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_specdec.verification.graph_backends import CapturableOnly, CudaGraphs, NotCapturableError, groups_on_device

DEVICE = torch.device("cuda", 0)


class Allocator:
    """torch's state during captures, with its bug: a capture that fails is not ended (pytorch#180395)."""

    def __init__(self, *, ends_itself: bool = False, stays_broken: bool = False) -> None:
        self.capturing_to: Any = None
        self.stream: Any = "main"
        self.generators_capture = False
        self.pools = self.cleared = 0
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

    @contextlib.contextmanager
    def capture(self, graph: Any, pool: int, stream: Any, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local"
        if self.capturing_to is not None or (self._failed and self._stays_broken):
            raise RuntimeError("already capturing")
        self.capturing_to, self.stream, self.generators_capture = pool, stream, True
        try:
            yield
        except BaseException:
            self._failed = True
            if self._ends_itself:
                self.capturing_to = None
            raise
        self.capturing_to, self.stream, self.generators_capture = None, "main", False

    def set_stream(self, stream: Any) -> None:
        self.stream = stream


@pytest.fixture
def backend_for(monkeypatch: pytest.MonkeyPatch) -> Callable[[Allocator], CudaGraphs]:
    def make(allocator: Allocator) -> CudaGraphs:
        stream = SimpleNamespace(wait_stream=lambda _other: None)
        main = SimpleNamespace(wait_stream=lambda _other: None)
        fakes: dict[str, Any] = {
            "Stream": lambda _device: stream, "graph_pool_handle": allocator.new_pool,
            "device": lambda _device: contextlib.nullcontext(), "stream": lambda _stream: contextlib.nullcontext(),
            "current_stream": lambda: main, "set_stream": allocator.set_stream, "graph": allocator.capture,
            "CUDAGraph": lambda: SimpleNamespace(replay=lambda: None), "synchronize": lambda _device: None,
        }  # fmt: skip
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", allocator.end, raising=False)
        monkeypatch.setattr(CudaGraphs, "_failed", [])
        monkeypatch.setattr(CudaGraphs, "_broken", set())
        return CudaGraphs(DEVICE)

    return make


def failing(error: BaseException, after: int) -> Callable[[], None]:
    """A step that fails after some runs; two runs precede the capture."""
    runs = iter(range(after + 1))

    def run() -> None:
        if next(runs, after) >= after:
            raise error

    return run


@pytest.mark.parametrize("ends_itself", [False, True])
@pytest.mark.parametrize("error", [RuntimeError("unsupported"), torch.OutOfMemoryError("full"), KeyboardInterrupt()])
def test_a_capture_that_fails_is_ended_and_the_next_one_works(
    backend_for: Callable[[Allocator], CudaGraphs], error: BaseException, ends_itself: bool
) -> None:
    allocator = Allocator(ends_itself=ends_itself)
    backend = backend_for(allocator)
    for _ in range(2):
        with pytest.raises(type(error)):
            backend.capture(failing(error, after=2))
        assert (allocator.capturing_to, allocator.generators_capture) == (None, False)
        assert allocator.stream != backend._stream
        backend.capture(lambda: None)()


def test_a_failure_before_the_capture_leaves_everything(backend_for: Callable[[Allocator], CudaGraphs]) -> None:
    allocator = Allocator()
    backend = backend_for(allocator)
    with pytest.raises(ValueError, match="eager"):
        backend.capture(failing(ValueError("eager"), after=0))
    backend.capture(lambda: None)()


def test_a_device_that_cannot_capture_any_more_is_left_alone(backend_for: Callable[[Allocator], CudaGraphs]) -> None:
    allocator = Allocator(stays_broken=True)
    backend = backend_for(allocator)
    with pytest.raises(RuntimeError, match="first"):
        backend.capture(failing(RuntimeError("first"), after=2))
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
