"""Forwards as device graphs: recorded once per shape, then replayed without the host.

Small forwards on an accelerator wait for the host, which starts a thousand kernels one by one; a graph starts them at
once. A graph holds addresses, so a step is a function over buffers that stay where they are: tokens, positions, masks
and slots go in, logits and hidden states come out, and keys and values are appended to a cache whose memory is kept
from call to call. Nothing that a graph has made outside these buffers is ever read: graphs share memory, in any order.
Widths are rounded up to `WIDTHS`, lengths to buckets half as long again as the one before, and what is padded is
hidden by the mask. The only file that knows what records. Called by: `target/graph_forward.py`, `heads/captured.py`.
"""

from __future__ import annotations

import logging
import threading
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from hf_specdec.target.cache import TreeCache, TreeLayer
from hf_specdec.target.memory import CacheLayout, KeyValueStore, Share

logger = logging.getLogger(__name__)

WIDTHS = (1, 2, 4, 8, 16, 32, 48, 64)
"""Nodes per row that graphs are made for; a tree is padded to the next one, a larger one runs without."""
MOST_PADDED = max(wider - width for width, wider in pairwise(WIDTHS)) - 1
"""Slots that a tree's padding may take behind it."""
SHORTEST_BUCKET = 256
"""Slots that the shortest graphs attend to."""
PAYS_AFTER = 2
"""Times that a shape is run before it is recorded: most of a generation's steps are of a few shapes."""
TRIED_AGAIN = 500
"""Times that a shape is run before it is recorded after all, where there was no memory for it."""
KEPT_SHAPES = 64
"""Shapes that are kept; the one that was used longest ago goes."""
REPLAYED_ALIKE = 0.02
"""Relative distance that the first replay may have from what was recorded."""


class Recorder(Protocol):
    """What a device's graphs are recorded with."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Record what a function does on the device, once; what it returns does it again, without the function.

        Args:
            run: Reads and writes the same memory whenever it is called.

        Raises:
            Exception: Of any kind, where it reads the device, copies from the host, or waits.
        """


class CudaRecorder:
    """CUDA graphs of one device, in one pool of memory and on one stream.

    A pool lives as long as a graph in it, so an empty one keeps it. Workspaces of matrix products are taken anew
    inside of it: those outside may be freed by anybody. Where recording fails all the same, torch's allocator takes
    this process to be recording for ever: nothing is recorded in it any more.

    Args:
        device: A CUDA device.
    """

    _underway = threading.Lock()  # torch records one graph at a time in a process
    _failed: ClassVar[list[Any]] = []  # graphs whose recording failed: the allocator may still know them

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._keeper: Any = None

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """See `Recorder`. Everything that is made once per stream (workspaces, handles) is made before."""
        with self._underway, torch.cuda.device(self._device):
            if self._failed:
                raise RuntimeError("an earlier recording in this process failed")
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


RECORDERS: dict[str, Callable[[torch.device], Recorder]] = {"cuda": CudaRecorder}
"""What records, by type of device."""


class _Alone(TorchDispatchMode):
    """Refuses what a graph cannot hold, before a device is asked to record it: a failed recording is never undone."""

    waiting = frozenset({
        "_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2", "unique_dim",
        "unique_consecutive", "bincount",
    })  # fmt: skip

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func._schema.name.removeprefix("aten::"), kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.dim()]
        kinds = {tensor.device.type for tensor in tensors}
        if name == "_to_copy" and kwargs.get("device") is not None:
            kinds.add(torch.device(kwargs["device"]).type)
        by_mask = name.startswith("index") and any(
            isinstance(leaf, Tensor) and leaf.dtype == torch.bool for leaf in tree_leaves(args[1])
        )
        if name in self.waiting or by_mask:
            raise RuntimeError(f"{name} waits for the device")
        if len(kinds) > 1:
            raise RuntimeError(f"{name} copies between {' and '.join(sorted(kinds))}")
        return func(*args, **kwargs)


def bucket_of(length: int) -> int:
    """The slots that a graph for so many attends to: 256, 384, 512, 768, 1024, 1536, ...

    Example: 512 for 512, 768 for 513.
    """
    size = SHORTEST_BUCKET
    while size < length:
        if size + size // 2 >= length:
            return size + size // 2
        size *= 2
    return size


class KeptMemory:
    """A cache's memory that stays from call to call: one cache at a time writes to it, others get another's."""

    def __init__(self) -> None:
        self._store: KeyValueStore | None = None
        self._lease: weakref.ref[TreeCache] | None = None  # the cache that writes to it
        self._leasing = threading.Lock()

    @property
    def moves(self) -> int:
        """How often it became another memory."""
        return -1 if self._store is None else self._store.moves

    def new_cache(self, layout: CacheLayout, capacity: int, reserve: int | None) -> TreeCache:
        """A cache over this memory; any other where it is in use, or may not grow."""
        with self._leasing:
            if reserve is None or (self._lease is not None and self._lease() is not None):
                return TreeCache(layout, capacity, reserve)
            capacity += MOST_PADDED
            if self._store is None:
                self._store = KeyValueStore(layout, capacity, reserve, clears=True)
            self._store.reopen(capacity, reserve)
            cache = TreeCache(layout, capacity, reserve, store=self._store)
            self._lease = weakref.ref(cache)
            return cache

    def owns(self, cache: Cache) -> bool:
        """Whether a cache writes to it."""
        return self._lease is not None and self._lease() is cache

    def release(self, cache: Cache) -> None:
        """A cache is not used any more, whoever still knows it."""
        with self._leasing:
            if self.owns(cache):
                self._lease = None


class Shape(ABC):
    """One shape of a step: the buffers that it reads and writes.

    Attributes:
        times: It was run.
        replay: What runs it without its Python.
    """

    def __init__(self) -> None:
        self.times = 0
        self.replay: Callable[[], None] | None = None
        self.outputs: list[Tensor] = []  # shared by shapes whose results have the same sizes

    @abstractmethod
    def compute(self) -> Sequence[Tensor]:
        """What the step does with what its buffers hold."""

    def run(self) -> None:
        """What is recorded: compute, and copy what came out to where it stays."""
        found = self.compute()
        if not self.outputs:
            with torch.inference_mode(False):
                self.outputs.extend(torch.empty_like(tensor) for tensor in found)
        for kept, tensor in zip(self.outputs, found, strict=True):
            kept.copy_(tensor)


class Recordings:
    """Steps of many shapes, recorded where they come often enough.

    Args:
        recorder: Of their device.
        what: They are, for the log.
    """

    def __init__(self, recorder: Recorder, what: str) -> None:
        self._recorder, self._what = recorder, what
        self._shapes: dict[tuple[int, ...], Shape] = {}  # the latest last
        self._outputs: dict[tuple[int, ...], list[Tensor]] = {}  # by rows and width
        self._made_of = -1  # moves of their memory when they were made
        self._fails = False

    def recorded(self) -> list[tuple[int, ...]]:
        """The keys of the shapes that are graphs by now."""
        return [key for key, shape in self._shapes.items() if shape.replay is not None]

    def shape(self, key: tuple[int, ...], moves: int, make: Callable[[], Shape]) -> Shape:
        """The shape of a key, made where it is new; all are where their memory has moved."""
        if self._made_of != moves:
            self._shapes.clear()
            self._made_of = moves
        shape = self._shapes.pop(key, None) or make()
        shape.outputs = self._outputs.setdefault(key[:2], [])
        self._shapes[key] = shape
        if len(self._shapes) > KEPT_SHAPES:
            self._shapes.pop(next(iter(self._shapes)))
        return shape

    def run(self, shape: Shape) -> Sequence[Tensor]:
        """Replay a shape, or run it, and record it where it has come often enough; its outputs stay where they are."""
        shape.times += 1
        if shape.replay is not None:
            shape.replay()
            return shape.outputs
        shape.run()
        if shape.times > PAYS_AFTER and not self._fails:
            try:
                shape.replay = self._recorded(shape)
            except torch.OutOfMemoryError as error:  # of the moment
                shape.times = -TRIED_AGAIN
                logger.info("%s is not recorded now: %s", self._what, error)
                shape.run()
            except Exception as error:  # of any kind: it comes out of a model's own code, or a driver
                self._fails = True
                cause = error.__context__ or error  # what ends a recording says less than what went before
                name = type(cause).__name__
                logger.warning("%s cannot be recorded as a graph (%s: %s). It runs without.", self._what, name, cause)
                shape.run()
        return shape.outputs

    def _recorded(self, shape: Shape) -> Callable[[], None]:
        with _Alone():
            shape.run()
        replay = self._recorder.record(shape.run)
        wanted = shape.outputs[0].to(torch.float32, copy=True)
        shape.outputs[0].zero_()
        replay()
        distance = (shape.outputs[0].float() - wanted).norm() / wanted.norm().clamp(min=1e-6)
        if not float(distance) <= REPLAYED_ALIKE:
            raise RuntimeError(f"its replay differs by {float(distance):.1e}")
        return replay


def width_for(num_nodes: int) -> int:
    """The width that so many nodes are padded to.

    Example: 16 for 9 to 16.
    """
    return next(width for width in WIDTHS if width >= num_nodes)


class BucketLayer(CacheLayerMixin):
    """A layer of the kept cache as a graph sees it: written to at slots that the device knows, read over a bucket.

    Args:
        layer: The cache's.
        slots: `[width]`, where the next nodes go.
        bucket: Slots that are attended to.
    """

    is_sliding = False
    is_initialized = True

    def __init__(self, layer: TreeLayer, slots: Tensor, bucket: int) -> None:
        self._share: Share | None = layer.share
        self._slots, self._bucket = slots, bucket

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write `[B, H, width, D]`; keys and values `[B, H, bucket, D]`."""
        assert self._share is not None, "a layer that had no keys of its own in the prompt has none later"
        keys, values = self._share.keys, self._share.values
        keys.index_copy_(2, self._slots, key_states)
        values.index_copy_(2, self._slots, value_states)
        return keys[:, :, : self._bucket], values[:, :, : self._bucket]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Never used: masks are given."""
        return self._bucket, 0

    def get_seq_length(self) -> Any:
        """The first of the slots, which only the device knows."""
        return self._slots[0]

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    def get_max_cache_shape(self) -> int:
        """The name transformers 5.17 has for `get_max_length`."""
        return -1
