"""Steps captured as device graphs, once per shape, and replayed with a single launch.

Small forwards on an accelerator are limited by the host, which launches about a thousand kernels one by one; a graph
launches them all at once. A graph contains addresses, so a step works on buffers that never move: a verify forward
reads tokens, parents and lengths, writes logits and hidden states, and appends to a cache whose memory later calls
reuse. Nothing else that a graph allocates may be read afterwards, because graphs share memory and are
replayed in any order. Widths are rounded up to `CAPTURED_WIDTHS` and lengths to buckets (`memory.bucket_of`); masks
hide the padding. Graphs are captured by `verification/graph_backends.py`.
"""

from __future__ import annotations

import logging
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from hf_specdec.verification.cache import TreeCache, TreeLayer
from hf_specdec.verification.graph_backends import CapturableOnly, GraphBackend, NotCapturableError
from hf_specdec.verification.memory import CacheLayout, KeyValueStore, Share, note_one_time_work, persistent_tensors

logger = logging.getLogger(__name__)

CAPTURED_WIDTHS = (1, 2, 4, 8, 16, 32, 48, 64)
"""Nodes per row of captured steps. A tree is padded to the next width; trees above the last run without a graph."""
MOST_PADDED = max(wider - width for width, wider in pairwise(CAPTURED_WIDTHS)) - 1
"""Maximum number of padding nodes of a tree, which also occupy cache slots."""
CAPTURE_AFTER = 2
"""Runs of a shape before it is captured, because shapes that occur only once or twice are not worth a capture."""
RETRY_AFTER = 500
"""Runs of a shape to wait, in addition to `CAPTURE_AFTER`, after its capture ran out of memory."""
MAX_FAILURES = 3
"""Consecutive failed captures after which a kind of step is no longer captured in any shape."""
KEPT_SHAPES = 512
"""Shapes kept per kind of step; the least recently used is dropped. Texts up to 8,192 tokens need 88 per batch
size."""
REPLAY_TOLERANCE = 0.02
"""Maximum relative distance between the first output of the first replay and of the run without a graph."""


class KeptMemory:
    """Cache memory that later calls reuse; only one cache at a time may use it."""

    def __init__(self) -> None:
        self._store: KeyValueStore | None = None
        self._lease: weakref.ref[TreeCache] | None = None  # the cache that uses the memory
        self._lock = threading.Lock()

    @property
    def moves(self) -> int:
        """Times that the memory was reallocated or freed, which invalidates all captures; -1 before any cache."""
        return -1 if self._store is None else self._store.moves

    def new_cache(self, layout: CacheLayout, capacity: int, reserve: int | None) -> TreeCache:
        """Return a cache that uses this memory, or a separate one if the memory is in use or `reserve` is None."""
        with self._lock:
            if reserve is None or (self._lease is not None and self._lease() is not None):
                return TreeCache(layout, capacity, reserve)
            capacity += MOST_PADDED
            if self._store is None:
                self._store = KeyValueStore(layout, capacity, reserve, is_persistent=True)
            self._store.reopen(capacity, reserve)
            cache = TreeCache(layout, capacity, reserve, store=self._store)
            self._lease = weakref.ref(cache)
            return cache

    def owns(self, cache: Cache) -> bool:
        """Whether a cache uses this memory."""
        return self._lease is not None and self._lease() is cache

    def release(self, cache: Cache) -> None:
        """Make the memory available again if `cache` uses it, even if that object is still referenced."""
        with self._lock:
            if self.owns(cache):
                self._lease = None


class CapturableStep(ABC):
    """Base class of a capturable step for inputs of one shape, with the buffers that it reads and writes.

    Attributes:
        times: Number of runs so far; negative after a capture ran out of memory, see `RETRY_AFTER`.
        replay: Function that replays the captured graph; None if the step is not captured.
        refused: Whether its capture failed and is not tried again.
        outputs: Result buffers, shared by shapes with the same batch size and width.
    """

    def __init__(self) -> None:
        self.times = 0
        self.replay: Callable[[], None] | None = None
        self.refused = False
        self.outputs: list[Tensor] = []

    @abstractmethod
    def compute(self) -> Sequence[Tensor]:
        """Return the step's results, computed from the buffers."""

    def run(self) -> None:
        """Compute the results and copy them into `outputs`; this is the function that is captured."""
        results = self.compute()
        if not self.outputs:
            with persistent_tensors():
                self.outputs.extend(torch.empty_like(tensor) for tensor in results)
        for output, tensor in zip(self.outputs, results, strict=True):
            output.copy_(tensor)


class Captures:
    """The steps of one kind, one for each shape of the inputs; those that run often enough are captured.

    Args:
        backend: Graph backend of the device.
        name: Name of the kind in log messages.
    """

    def __init__(self, backend: GraphBackend, name: str) -> None:
        self._backend, self._name = backend, name
        self._steps: dict[tuple[int, ...], CapturableStep] = {}  # by shape, least recently used first
        self._outputs: dict[tuple[int, ...], list[Tensor]] = {}  # by batch size and width
        self._moves = -1  # moves of the cache memory when the steps were created
        self._failures = 0  # consecutive failed captures

    def captured_keys(self) -> list[tuple[int, ...]]:
        """Return the keys of the captured shapes."""
        return [key for key, step in self._steps.items() if step.replay is not None]

    def step_for(self, key: tuple[int, ...], moves: int, make: Callable[[], CapturableStep]) -> CapturableStep:
        """Return the step for the shape with this key, created if necessary.

        Args:
            key: Batch size, width and whatever else distinguishes shapes of this kind of step.
            moves: `moves` of the cache memory that the steps write to; if it changed, all steps are dropped.
            make: Creates the step.
        """
        if self._moves != moves:
            self._steps.clear()
            self._outputs.clear()
            self._moves = moves
        step = self._steps.pop(key, None)
        if step is None:
            note_one_time_work()
            step = make()
        step.outputs = self._outputs.setdefault(key[:2], [])
        self._steps[key] = step
        if len(self._steps) > KEPT_SHAPES:
            oldest = next(iter(self._steps))
            del self._steps[oldest]
            if all(kept[:2] != oldest[:2] for kept in self._steps):
                del self._outputs[oldest[:2]]
        return step

    def run(self, step: CapturableStep) -> Sequence[Tensor]:
        """Run a step, by replaying its graph if it is captured, and return its outputs.

        A step is captured in its first run after `CAPTURE_AFTER` earlier ones. The next run of any step with the same
        batch size and width overwrites the outputs.
        """
        step.times += 1
        if step.replay is not None:
            step.replay()
            return step.outputs
        step.run()
        if step.times > CAPTURE_AFTER and not step.refused and self._failures < MAX_FAILURES:
            try:
                step.replay = self._capture(step)
                self._failures = 0
            except Exception as error:  # model code and drivers raise various types
                self._note_failure(step, error)
                step.run()
        return step.outputs

    def _note_failure(self, step: CapturableStep, error: Exception) -> None:
        """Log a failed capture and decide whether to retry: later if memory was full, otherwise not with this shape.

        No step of this kind is captured after a `NotCapturableError` or `MAX_FAILURES` consecutive failures.
        """
        # the exception from ending a capture hides the more informative one before it
        causes = [error, *([error.__context__] if error.__context__ else [])]
        if any(isinstance(cause, torch.OutOfMemoryError) for cause in causes):
            step.times = -RETRY_AFTER
            logger.info("%s is not captured yet, because memory is full: %s", self._name, error)
            return
        step.refused = True
        self._failures = MAX_FAILURES if isinstance(error, NotCapturableError) else self._failures + 1
        cause = causes[-1]
        scope = "It" if self._failures >= MAX_FAILURES else "This shape"
        reason = f"{type(cause).__name__}: {cause}"
        logger.warning("%s cannot be captured as a graph (%s). %s runs without a graph.", self._name, reason, scope)

    def _capture(self, step: CapturableStep) -> Callable[[], None]:
        note_one_time_work()
        with CapturableOnly():
            step.run()
        replay = self._backend.capture(step.run)
        expected = step.outputs[0].to(torch.float32, copy=True)
        step.outputs[0].zero_()
        replay()
        distance = (step.outputs[0].float() - expected).norm() / expected.norm().clamp(min=1e-6)
        if not float(distance) <= REPLAY_TOLERANCE:
            raise RuntimeError(f"its replay differs from the run without a graph by {float(distance):.1e}")
        return replay


def width_for(num_nodes: int) -> int:
    """Return the captured width that a tree of at most `CAPTURED_WIDTHS[-1]` nodes is padded to.

    Example: 16 for 9 to 16 nodes.
    """
    return next(width for width in CAPTURED_WIDTHS if width >= num_nodes)


class BucketLayer(CacheLayerMixin):
    """View of a cache layer inside a graph: writes to slots given on the device, reads a fixed number of slots.

    Args:
        layer: The cache layer.
        slots: `[width]` slots of the new nodes.
        bucket: Number of slots to attend to.
    """

    is_sliding = False
    is_initialized = True

    def __init__(self, layer: TreeLayer, slots: Tensor, bucket: int) -> None:
        self._share: Share | None = layer.share
        self._slots, self._bucket = slots, bucket

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the memory exists."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values `[B, H, width, D]`; return those of the bucket, `[B, H, bucket, D]`."""
        assert self._share is not None  # None only for layers that use the keys of another layer
        keys, values = self._share.keys, self._share.values
        keys.index_copy_(2, self._slots, key_states)
        values.index_copy_(2, self._slots, value_states)
        return keys[:, :, : self._bucket], values[:, :, : self._bucket]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return key length and offset of a mask; unused, because the masks are passed to the forward."""
        return self._bucket, 0

    def get_seq_length(self) -> Any:
        """Return the first slot, as a tensor on the device."""
        return self._slots[0]

    def get_max_length(self) -> int:
        """Return -1: no limit."""
        return -1

    def get_max_cache_shape(self) -> int:
        """Return -1; transformers 5.17 calls this instead of `get_max_length`."""
        return -1
