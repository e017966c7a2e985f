"""The stages of a draft head: its own methods, or programs that are traced from them.

As in `verification/runners.py`, attention remains a single custom operation in a traced stage, so one program serves
all lengths and widths.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from hf_specdec.config import ExecutionMode
from hf_specdec.cpu.growing import PackedMarkov
from hf_specdec.fusion.fused import FUSING_DEVICES
from hf_specdec.heads.attention import Attend, attend_over
from hf_specdec.heads.dflash import DFlashHead
from hf_specdec.heads.head import EagleFamilyHead
from hf_specdec.verification.programs import CaptureError, make_program
from hf_specdec.verification.trials import allowed_distance

logger = logging.getLogger(__name__)

EXAMPLE_SHAPE = (2, 7)
"""Batch size and number of entries of the example inputs for tracing."""
EXACT_TOLERANCE, HALF_TOLERANCE = 1e-4, 5e-2
"""Maximum median of the relative distances between the results of a head and of its programs, in single or double
precision, and in half precision, whose rounding errors are larger."""


@dataclass(frozen=True, slots=True)
class Stages:
    """What a head computes while it drafts. B rows, T entries, D hidden size.

    Args:
        fuse: From the target's features `[B, T, layers * D]` to hidden states `[B, T, D]`; of a block head, from
            features and positions `[B, T]` to the list of keys and values of its layers, in turn.
        read: From embeddings, hidden states (not of a block head) and positions of new entries, the cache that they
            are appended to and their mask (see `attend_over`) to their outputs `[B, T, D]`.
        score: From outputs to logits.
        copies_weights: Whether the stages compute with copies of weights, see `Program`.
        markov: The weights of a block head's Markov head for the CPU kernel.
    """

    fuse: Callable[..., Any]
    read: Callable[..., Tensor]
    score: Callable[[Tensor], Tensor]
    copies_weights: bool = False
    markov: PackedMarkov | None = None


def stages_of(head: Any, lm_head: nn.Module | None) -> Stages:
    """Return the methods of an EAGLE head, MTP module or block head as stages; `lm_head` as for `score`."""

    def context(features: Tensor, positions: Tensor) -> list[Tensor]:
        return [states for pair in head.context_states(head.fuse(features), positions) for states in pair]

    fuse = context if isinstance(head, DFlashHead) else head.fuse
    return Stages(fuse, head.read, lambda hidden: head.score(hidden, lm_head))


def captured_stages(head: EagleFamilyHead | DFlashHead, lm_head: nn.Module | None) -> Stages:
    """Return the stages for graphs: on `FUSING_DEVICES` with fused operations if possible, otherwise the methods."""
    if head.device.type in FUSING_DEVICES:
        try:
            return traced_stages(head, lm_head, "cuda_graph")
        except Exception as error:  # heads and compilers raise various types
            logger.info("The small operations of the %s are not fused: %s.", type(head).__name__, error)
    return stages_of(head, lm_head)


def traced_stages(head: EagleFamilyHead | DFlashHead, lm_head: nn.Module | None, mode: ExecutionMode) -> Stages:
    """Trace the stages of a head, and compile them, which takes about ten seconds with inductor."""
    if type(head).read not in (EagleFamilyHead.read, DFlashHead.read):
        raise CaptureError(f"{type(head).__name__} overrides `read`")
    _define_draft_attention()
    operation = torch.ops.hf_specdec_draft.attend.default
    own, is_block = stages_of(head, lm_head), isinstance(head, DFlashHead)
    # no random numbers: drawing them would change the results of a user's seed
    hidden = _example_numbers(head.config.hidden_size).to(head.device, head.dtype)
    width = getattr(head, "target_hidden_size", head.config.hidden_size) * len(head.feature_layers)
    features = _example_numbers(width).to(head.device, head.dtype)
    positions = torch.arange(EXAMPLE_SHAPE[1], dtype=torch.long, device=head.device)
    positions = positions.expand(EXAMPLE_SHAPE).contiguous()
    of_fuse = (features, positions) if is_block else (features,)
    of_read = (hidden, positions) if is_block else (hidden, hidden.clone(), positions)

    reader = make_program(lambda *inputs: [head(*inputs, operation)], *of_read, mode=mode)
    scorer = make_program(lambda outputs: [own.score(outputs)], hidden, mode=mode)
    fuse = own.fuse
    if is_block:
        fuse = make_program(own.fuse, *of_fuse, mode=mode)
    elif own.fuse(features) is not features:
        fuser = make_program(lambda given: [own.fuse(given)], features, mode=mode)

        def fuse(given: Tensor) -> Tensor:
            return fuser(given)[0]

    def read(*inputs: Any) -> Tensor:
        *given, cache, mask = inputs
        if mask is None:  # a prompt
            return own.read(*inputs)
        token = _ATTEND.set(attend_over(cache, mask))
        try:
            return reader(*given)[0]
        finally:
            _ATTEND.reset(token)

    has_kernel = is_block and head.config.markov_rank and head.device.type == "cpu" and not head.config.gru_hidden_dim
    traced = Stages(
        fuse,
        read,
        lambda outputs: scorer(outputs)[0],
        copies_weights=scorer.copies_weights,
        markov=PackedMarkov.of(head.markov_head) if has_kernel else None,
    )
    mask = torch.ones(EXAMPLE_SHAPE[1], EXAMPLE_SHAPE[1], dtype=torch.bool, device=head.device).tril()
    mask = mask.expand(EXAMPLE_SHAPE[0], 1, -1, -1)
    with torch.no_grad():
        results = [
            [*(stages.fuse(*of_fuse) if is_block else [stages.fuse(*of_fuse)]),
             stages.read(*of_read, DynamicCache(), mask), stages.score(hidden[:, :3])]
            for stages in (own, traced)
        ]  # fmt: skip
    for expected, actual in zip(*results, strict=True):
        distance = (actual - expected).float().norm(dim=-1) / expected.float().norm(dim=-1).clamp(min=1e-6)
        tolerance = allowed_distance(expected.dtype, expected.device, EXACT_TOLERANCE, HALF_TOLERANCE)
        if not float(distance.median()) <= tolerance:
            raise CaptureError(f"its compiled outputs differ from its own by {float(distance.median()):.1e}")
    return traced


def _example_numbers(width: int) -> Tensor:
    """Return deterministic example inputs between -1 and 1, `[2, 7, width]`, without two equal rows."""
    indices = torch.arange(EXAMPLE_SHAPE[0] * EXAMPLE_SHAPE[1] * width, dtype=torch.float32, device="cpu")
    return (indices * 0.7).cos().view(*EXAMPLE_SHAPE, width)


_ATTEND: ContextVar[Attend | None] = ContextVar("draft_attend", default=None)
"""Attention function of the forward that is running, called by the custom operation."""


@functools.cache
def _define_draft_attention() -> torch.library.Library:
    """Define the custom operation, once per process; it exists as long as the returned library, which is cached."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        own = _ATTEND.get()
        assert own is not None
        return own(query, key, value).contiguous()

    library = torch.library.Library("hf_specdec_draft", "DEF")
    library.define("attend(Tensor query, Tensor key, Tensor value) -> Tensor")
    library.impl("attend", attend, "CompositeExplicitAutograd")
    library.impl("attend", lambda query, _key, _value: torch.empty_like(query).contiguous(), "Meta")
    return library
