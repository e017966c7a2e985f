"""A draft layer as programs that inductor made of it: what it reads, what it makes of features, and its scores.

As in `verification/runners.py` attention stays one operation known by name, so that a program serves all lengths and
widths.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel

from hf_specdec.heads.attention import Attend, attend_over
from hf_specdec.heads.base import EagleFamilyHead
from hf_specdec.verification.runners import CaptureError, compile_operations

EXAMPLE_SHAPE = (2, 7)
"""Rows and entries of the forward that is recorded."""
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4}
"""Relative distance that is allowed between a layer and its program; half precision may round differently."""
ROUNDED = 5e-2

Operation = Callable[..., Sequence[Tensor]]


class LayerInOtherForm:
    """A draft layer some of whose forwards are run in another form; everything else is its own.

    Args:
        layer: The layer.
    """

    config: Any
    shares_lm_head: bool

    def __init__(self, layer: EagleFamilyHead | LayerInOtherForm) -> None:
        self._layer = layer
        self.config, self.shares_lm_head = layer.config, layer.shares_lm_head

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self._layer.device

    @property
    def dtype(self) -> torch.dtype:
        """Of its weights."""
        return self._layer.dtype

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The target's hidden states that it reads."""
        return self._layer.feature_layers

    @property
    def hot_token_ids(self) -> Tensor | None:
        """Target ids of its draft vocabulary `[Vd]`; None is all of V."""
        return self._layer.hot_token_ids

    def embedding_for(self, model: PreTrainedModel) -> nn.Module:
        """See `DraftLayer`."""
        return self._layer.embedding_for(model)


class CompiledDraftLayer(LayerInOtherForm):
    """A head that reads and scores by programs; everything else is the head's own.

    Args:
        head: The layer.
        read: Embeddings, hidden states and positions of new entries to their features.
        score: Features to logits.
        fuse: The target's features as the head reads them.
    """

    def __init__(self, head: EagleFamilyHead, read: Operation, score: Operation, fuse: Operation | None) -> None:
        super().__init__(head)
        self._head, self._read, self._score, self._fuse = head, read, score, fuse

    @classmethod
    def of(cls, head: EagleFamilyHead, lm_head: nn.Module | None) -> CompiledDraftLayer:
        """Record and compile; some ten seconds.

        Args:
            head: The layer; it is left as it is.
            lm_head: The target's, cut down to the draft vocabulary, where the head shares it.

        Raises:
            CaptureError: The head reads numbers on the host, or the program answers differently.
        """
        if type(head).read is not EagleFamilyHead.read:
            raise CaptureError(f"{type(head).__name__} reads in a way of its own")
        _define_operation()
        operation = torch.ops.hf_specdec_draft.attend.default
        device, dtype = head.device, head.dtype
        # made without random numbers: they are the user's, who may have set a seed
        hidden = _numbers(head.config.hidden_size).to(device, dtype)
        positions = torch.arange(EXAMPLE_SHAPE[1], device=device).expand(EXAMPLE_SHAPE).contiguous()
        given = _numbers(head.target_hidden_size * len(head.feature_layers)).to(device, dtype)
        fuses = head.fuse(given) is not given
        compiled = cls(
            head,
            compile_operations(lambda e, h, p: [head(e, h, p, operation)], hidden, hidden.clone(), positions),
            compile_operations(lambda h: [head.score(h, lm_head)], hidden),
            compile_operations(lambda f: [head.fuse(f)], given) if fuses else None,
        )
        compiled._check(hidden, positions, given, lm_head)
        return compiled

    def _check(self, hidden: Tensor, positions: Tensor, given: Tensor, lm_head: nn.Module | None) -> None:
        layers: tuple[Any, Any] = (self._head, self)
        size = EXAMPLE_SHAPE[1]
        mask = torch.ones(size, size, dtype=torch.bool, device=hidden.device).tril()
        mask = mask.expand(len(hidden), 1, -1, -1)
        with torch.no_grad():
            for plain, compiled in (
                [layer.read(hidden, hidden, positions, DynamicCache(), mask) for layer in layers],
                [layer.score(hidden[:, :3], lm_head) for layer in layers],
                [layer.fuse(given[:, :1]) for layer in layers],
            ):
                distance = (compiled - plain).float().norm(dim=-1) / plain.float().norm(dim=-1).clamp(min=1e-6)
                if not float(distance.median()) <= TOLERANCE.get(hidden.dtype, ROUNDED):
                    raise CaptureError(f"it differs from its own forward by {float(distance.median()):.1e}")

    def fuse(self, features: Tensor) -> Tensor:
        """See `DraftLayer`."""
        return self._head.fuse(features) if self._fuse is None else self._fuse(features.contiguous())[0]

    def read(
        self, token_embeddings: Tensor, hidden: Tensor, position_ids: Tensor, cache: Cache, mask: Tensor | None
    ) -> Tensor:
        """See `EagleFamilyHead.read`; a prompt without a mask is read by the head itself."""
        if mask is None:
            return self._head.read(token_embeddings, hidden, position_ids, cache, None)
        token = _ATTEND.set(attend_over(cache, mask))
        try:
            return self._read(token_embeddings.contiguous(), hidden.contiguous(), position_ids.contiguous())[0]
        finally:
            _ATTEND.reset(token)

    def score(self, hidden: Tensor, lm_head: nn.Module | None = None) -> Tensor:
        """See `DraftLayer`; the lm_head is the one that it was compiled with."""
        return self._score(hidden.contiguous())[0]


def _numbers(width: int) -> Tensor:
    """`[2, 7, width]`, between -1 and 1, no two alike in a row."""
    places = torch.arange(EXAMPLE_SHAPE[0] * EXAMPLE_SHAPE[1] * width, dtype=torch.float32, device="cpu")
    return (places * 0.7).cos().view(*EXAMPLE_SHAPE, width)


_ATTEND: ContextVar[Attend | None] = ContextVar("draft_attend", default=None)


def _attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    attend = _ATTEND.get()
    assert attend is not None
    return attend(query, key, value).contiguous()


@functools.cache
def _define_operation() -> torch.library.Library:
    """Once in a process; the operation exists as long as this object, which the cache of this function keeps."""
    library = torch.library.Library("hf_specdec_draft", "DEF")
    library.define("attend(Tensor query, Tensor key, Tensor value) -> Tensor")
    library.impl("attend", _attend, "CompositeExplicitAutograd")
    library.impl("attend", lambda query, _key, _value: torch.empty_like(query).contiguous(), "Meta")
    return library
