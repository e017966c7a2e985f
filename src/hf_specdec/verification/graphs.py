"""Forwards as device graphs: recorded once per shape, then replayed without the host.

Small forwards on an accelerator wait for the host, which starts a thousand kernels one by one; a graph starts them at
once. A graph holds addresses, so a step is a function over buffers that stay where they are: tokens, positions, masks
and slots go in, logits and hidden states come out, and keys and values are appended to a cache whose memory is kept
from call to call. Nothing that a graph has made outside these buffers is ever read: graphs share memory, in any order.
Widths are rounded up to `WIDTHS`, lengths to buckets half as long again as the one before, and what is padded is
hidden by the mask. What records: `verification/graph_backends.py`.
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
from hf_specdec.verification.memory import CacheLayout, KeyValueStore, Share, persistent_tensors
from hf_specdec.verification.one_time import note_one_time_work

logger = logging.getLogger(__name__)

WIDTHS = (1, 2, 4, 8, 16, 32, 48, 64)
"""Nodes per row that graphs are made for; a tree is padded to the next one, a larger one runs without."""
MOST_PADDED = max(wider - width for width, wider in pairwise(WIDTHS)) - 1
"""Slots that a tree's padding may take behind it."""
PAYS_AFTER = 2
"""Times that a shape is run before it is recorded: most of a generation's steps are of a few shapes."""
TRIED_AGAIN = 500
"""Times that a shape is run before it is recorded after all, where there was no memory for it."""
GIVEN_UP_AFTER = 3
"""Shapes in a row that could not be recorded, after which no other one of the same step is tried."""
KEPT_SHAPES = 512
"""Shapes that are kept; the one that was used longest ago goes. Texts up to 8,192 tokens have 88 per batch size."""
REPLAYED_ALIKE = 0.02
"""Relative distance that the first replay may have from what was recorded."""


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
        refused: Its recording failed.
    """

    def __init__(self) -> None:
        self.times = 0
        self.replay: Callable[[], None] | None = None
        self.refused = False
        self.outputs: list[Tensor] = []  # shared by shapes whose results have the same sizes

    @abstractmethod
    def compute(self) -> Sequence[Tensor]:
        """What the step does with what its buffers hold."""

    def run(self) -> None:
        """What is recorded: compute, and copy what came out to where it stays."""
        found = self.compute()
        if not self.outputs:
            with persistent_tensors():
                self.outputs.extend(torch.empty_like(tensor) for tensor in found)
        for kept, tensor in zip(self.outputs, found, strict=True):
            kept.copy_(tensor)


class Captures:
    """Steps of many shapes, recorded where they come often enough.

    Args:
        backend: Of their device.
        what: They are, for the log.
    """

    def __init__(self, backend: GraphBackend, what: str) -> None:
        self._backend, self._what = backend, what
        self._shapes: dict[tuple[int, ...], Shape] = {}  # the latest last
        self._outputs: dict[tuple[int, ...], list[Tensor]] = {}  # by rows and width
        self._made_of = -1  # moves of their memory when they were made
        self._failures = 0  # in a row; `GIVEN_UP_AFTER` of them end all trying

    def recorded(self) -> list[tuple[int, ...]]:
        """The keys of the shapes that are graphs by now."""
        return [key for key, shape in self._shapes.items() if shape.replay is not None]

    def shape(self, key: tuple[int, ...], moves: int, make: Callable[[], Shape]) -> Shape:
        """The shape of a key, made where it is new; all are where their memory has moved."""
        if self._made_of != moves:
            self._shapes.clear()
            self._outputs.clear()
            self._made_of = moves
        shape = self._shapes.pop(key, None)
        if shape is None:
            note_one_time_work()
            shape = make()
        shape.outputs = self._outputs.setdefault(key[:2], [])
        self._shapes[key] = shape
        if len(self._shapes) > KEPT_SHAPES:
            gone = next(iter(self._shapes))
            del self._shapes[gone]
            if all(kept[:2] != gone[:2] for kept in self._shapes):
                del self._outputs[gone[:2]]
        return shape

    def run(self, shape: Shape) -> Sequence[Tensor]:
        """Replay a shape, or run it, and record it where it has come often enough; its outputs stay where they are."""
        shape.times += 1
        if shape.replay is not None:
            shape.replay()
            return shape.outputs
        shape.run()
        if shape.times > PAYS_AFTER and not shape.refused and self._failures < GIVEN_UP_AFTER:
            try:
                shape.replay = self._recorded(shape)
                self._failures = 0
            except Exception as error:  # of any kind: it comes out of a model's own code, or a driver
                self._note_failure(shape, error)
                shape.run()
        return shape.outputs

    def _note_failure(self, shape: Shape, error: Exception) -> None:
        """A shape without memory is tried later, one that failed never; of a step that no graph can hold, none is."""
        # what ends a recording says less than what went before it
        causes = [error, *([error.__context__] if error.__context__ else [])]
        if any(isinstance(cause, torch.OutOfMemoryError) for cause in causes):
            shape.times = -TRIED_AGAIN
            logger.info("%s is not recorded now: %s", self._what, error)
            return
        shape.refused = True
        self._failures = GIVEN_UP_AFTER if isinstance(error, NotCapturableError) else self._failures + 1
        told, name = causes[-1], type(causes[-1]).__name__
        rest = "It runs without." if self._failures >= GIVEN_UP_AFTER else "This shape of it runs without."
        logger.warning("%s cannot be recorded as a graph (%s: %s). %s", self._what, name, told, rest)

    def _recorded(self, shape: Shape) -> Callable[[], None]:
        note_one_time_work()
        with CapturableOnly():
            shape.run()
        replay = self._backend.record(shape.run)
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
