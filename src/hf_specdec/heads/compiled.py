"""A draft layer compiled by inductor: its `read`, `score` and `fuse`.

As in `verification/runners.py`, attention remains a single custom operation, so one compiled function serves all
lengths and widths.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel

from hf_specdec.config import ExecutionMode
from hf_specdec.heads.attention import Attend, attend_over
from hf_specdec.heads.base import EagleFamilyHead
from hf_specdec.heads.dflash import DFlashHead
from hf_specdec.heads.layer import BaseDraftLayer
from hf_specdec.verification.cache import TreeCache
from hf_specdec.verification.programs import CaptureError, Program, make_program

LAYER_EXAMPLE_SHAPE = (2, 7)
"""Batch size and number of entries of the example inputs for tracing."""
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4}
"""Maximum median of the relative distances between outputs of a head and of its compiled form, by dtype."""
HALF_TOLERANCE = 5e-2
"""The same for half precision, whose rounding errors are larger."""


class WrappedLayer(BaseDraftLayer):
    """Base of draft layers that run some operations of another layer in compiled or captured form.

    Args:
        layer: The other layer.
    """

    config: Any
    shares_lm_head: bool

    def __init__(self, layer: EagleFamilyHead | DFlashHead | WrappedLayer) -> None:
        self._layer = layer
        self.config, self.shares_lm_head = layer.config, layer.shares_lm_head

    @property
    def device(self) -> torch.device:
        """Device of the layer."""
        return self._layer.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return self._layer.dtype

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Numbers of the target's hidden states that the layer reads, see `Features`."""
        return self._layer.feature_layers

    @property
    def hot_token_ids(self) -> Tensor | None:
        """Target ids of the draft vocabulary `[Vd]`; None means the whole vocabulary."""
        return self._layer.hot_token_ids

    def embedding_for(self, model: PreTrainedModel) -> nn.Module:
        """See `DraftLayer`."""
        return self._layer.embedding_for(model)

    def new_cache(self, reserve: int) -> TreeCache:
        """See `DraftLayer`."""
        return self._layer.new_cache(reserve)


class CompiledDraftLayer(WrappedLayer):
    """A head with compiled `read`, `score` and `fuse`.

    Args:
        head: The head.
        read: Compiled function from embeddings, hidden states and positions of new entries to their features.
        score: Compiled function from features to logits.
        fuse: Compiled `head.fuse`; None if that returns its input.
    """

    def __init__(self, head: EagleFamilyHead, read: Program, score: Program, fuse: Program | None) -> None:
        super().__init__(head)
        self._head, self._read, self._score, self._fuse = head, read, score, fuse
        self.copies_weights = score.copies_weights

    @classmethod
    def of(cls, head: EagleFamilyHead, lm_head: nn.Module | None, mode: ExecutionMode) -> CompiledDraftLayer:
        """Trace and compile a head, which takes about ten seconds.

        Args:
            head: The head; it is not modified.
            lm_head: The target's lm_head, restricted to the draft vocabulary, if the head shares it.
            mode: See `make_program`.

        Raises:
            CaptureError: The head overrides `read`, reads values on the host or cannot be compiled, or its outputs
                differ when compiled.
        """
        if type(head).read is not EagleFamilyHead.read:
            raise CaptureError(f"{type(head).__name__} overrides `read`")
        operation = attention_operation()
        device, dtype = head.device, head.dtype
        # no random numbers: drawing them would change the results of a user's seed
        hidden = example_numbers(head.config.hidden_size).to(device, dtype)
        positions = torch.arange(LAYER_EXAMPLE_SHAPE[1], device=device).expand(LAYER_EXAMPLE_SHAPE).contiguous()
        features = example_numbers(head.target_hidden_size * len(head.feature_layers)).to(device, dtype)
        fuses = head.fuse(features) is not features
        compiled = cls(
            head,
            make_program(lambda e, h, p: [head(e, h, p, operation)], hidden, hidden.clone(), positions, mode=mode),
            make_program(lambda h: [head.score(h, lm_head)], hidden, mode=mode),
            make_program(lambda f: [head.fuse(f)], features, mode=mode) if fuses else None,
        )
        compiled._check(hidden, positions, features, lm_head)
        return compiled

    def _check(self, hidden: Tensor, positions: Tensor, features: Tensor, lm_head: nn.Module | None) -> None:
        """Raise `CaptureError` if the outputs differ from the head's by more than the tolerance of the dtype."""
        layers: tuple[Any, Any] = (self._head, self)
        size = LAYER_EXAMPLE_SHAPE[1]
        mask = torch.ones(size, size, dtype=torch.bool, device=hidden.device).tril()
        mask = mask.expand(len(hidden), 1, -1, -1)
        with torch.no_grad():
            for expected, actual in (
                [layer.read(hidden, hidden, positions, DynamicCache(), mask) for layer in layers],
                [layer.score(hidden[:, :3], lm_head) for layer in layers],
                [layer.fuse(features[:, :1]) for layer in layers],
            ):
                check_close(actual, expected)

    def fuse(self, features: Tensor) -> Tensor:
        """See `DraftLayer`."""
        return self._head.fuse(features) if self._fuse is None else self._fuse(features.contiguous())[0]

    def read(
        self, token_embeddings: Tensor, hidden: Tensor, position_ids: Tensor, cache: Cache, mask: Tensor | None
    ) -> Tensor:
        """See `EagleFamilyHead.read`; without a mask (a prompt), the head runs uncompiled."""
        if mask is None:
            return self._head.read(token_embeddings, hidden, position_ids, cache, None)
        with attention(attend_over(cache, mask)):
            return self._read(token_embeddings.contiguous(), hidden.contiguous(), position_ids.contiguous())[0]

    def score(self, hidden: Tensor, lm_head: nn.Module | None = None) -> Tensor:
        """See `DraftLayer`; ignores `lm_head` and uses the one passed to `of`."""
        return self._score(hidden.contiguous())[0]


def check_close(actual: Tensor, expected: Tensor) -> None:
    """Raise `CaptureError` if the median relative distance of vectors exceeds the tolerance of their dtype."""
    distance = (actual - expected).float().norm(dim=-1) / expected.float().norm(dim=-1).clamp(min=1e-6)
    if not float(distance.median()) <= TOLERANCE.get(expected.dtype, HALF_TOLERANCE):
        raise CaptureError(f"its compiled outputs differ from its own by {float(distance.median()):.1e}")


def example_numbers(width: int) -> Tensor:
    """Return deterministic example inputs between -1 and 1, `[2, 7, width]`, without two equal rows."""
    indices = torch.arange(LAYER_EXAMPLE_SHAPE[0] * LAYER_EXAMPLE_SHAPE[1] * width, dtype=torch.float32, device="cpu")
    return (indices * 0.7).cos().view(*LAYER_EXAMPLE_SHAPE, width)


_ATTEND: ContextVar[Attend | None] = ContextVar("draft_attend", default=None)
"""Attention function of the forward that is running, called by the custom operation."""


@contextmanager
def attention(attend: Attend) -> Iterator[None]:
    """Context manager that sets the attention function of the compiled forwards that run inside it."""
    token = _ATTEND.set(attend)
    try:
        yield
    finally:
        _ATTEND.reset(token)


def attention_operation() -> Attend:
    """Return the custom operation that calls the attention function of the running forward."""
    _define_draft_attention()
    operation: Attend = torch.ops.hf_specdec_draft.attend.default
    return operation


def _attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    attend = _ATTEND.get()
    assert attend is not None
    return attend(query, key, value).contiguous()


@functools.cache
def _define_draft_attention() -> torch.library.Library:
    """Define the custom operation, once per process; it exists as long as the returned library, which is cached."""
    library = torch.library.Library("hf_specdec_draft", "DEF")
    library.define("attend(Tensor query, Tensor key, Tensor value) -> Tensor")
    library.impl("attend", _attend, "CompositeExplicitAutograd")
    library.impl("attend", lambda query, _key, _value: torch.empty_like(query).contiguous(), "Meta")
    return library
