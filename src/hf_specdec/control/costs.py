"""Measure on this machine how long verify forwards take, by tree size, and how long one forward of a head takes."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from math import exp, log2

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from hf_specdec.control.arms import ArmGains
from hf_specdec.control.constants import (
    COST_SMOOTHING,
    MAX_MEASURED_NODES,
    MAX_SURPRISE,
    MEASURED_CONTEXT,
    MEASURED_WIDTHS,
    MIN_MEASURED_WIDTH,
    QUICK_ROUNDS,
    RETRY_STEPS,
    STALE_STEPS,
    TIMED_ROUNDS,
)
from hf_specdec.heads.base import DraftHead
from hf_specdec.transformers_private import decode_optimizations
from hf_specdec.trees.tree import TokenTree
from hf_specdec.verification.memory import RESERVED_SLOTS
from hf_specdec.verification.model import cache_argument, execution_device, lm_head_rows, text_config
from hf_specdec.verification.probe import TargetFacts, inspect_target
from hf_specdec.verification.runners import Runner

logger = logging.getLogger(__name__)

Pick = Callable[[Sequence[float]], float]


@torch.no_grad()
def verify_seconds(
    model: PreTrainedModel, sizes: Sequence[int], context: int, facts: TargetFacts | None = None, *, rows: int = 1,
    rounds: int = TIMED_ROUNDS, pick: Pick = statistics.median, runner: Runner | None = None,
) -> dict[int, float]:  # fmt: skip
    """Return the seconds of a verify forward by the number of nodes of its tree.

    The timed forward is that of generation, with the same cache and masks. The trees are binary, or chains if the
    model supports no trees.

    Args:
        model: The target.
        sizes: Numbers of nodes, root included.
        context: Committed tokens before the tree, at least 1.
        facts: The result of the probe; None probes the model.
        rows: Batch size.
        rounds: Timed forwards per size, after one warm-up.
        pick: Reduces the times of one size to one number, such as the median.
        runner: Compiled or captured forward; None: the model's own.
    """
    facts = facts or inspect_target(model)
    device, vocab_size = execution_device(model), int(text_config(model).vocab_size)
    draw = torch.Generator("cpu").manual_seed(0)
    ids = torch.randint(vocab_size, (rows, context + max(sizes)), generator=draw, device="cpu").to(device)
    reserve = None if runner is None else RESERVED_SLOTS  # a runner keeps this memory for later calls
    target = facts.new_target(model, context + max(sizes) + (reserve or 0), reserve, runner=runner)
    inputs = {"attention_mask": torch.ones_like(ids[:, :context]), cache_argument(model): target.cache}
    target.prefill(ids[:, :context], GenerationConfig(), {**inputs, "use_cache": True})
    trees = {size: _tree(ids[:, context : context + size], branches=facts.supports_trees) for size in sizes}

    def forward(size: int) -> None:
        target.verify(trees[size])

    with decode_optimizations(model):  # as generation runs it
        return _seconds_by_size(forward, sizes, device, undo=target.rollback, rounds=rounds, pick=pick)


def _tree(tokens: Tensor, *, branches: bool) -> TokenTree:
    """Arrange tokens `[B, N]` in a binary tree, or in a chain if `branches` is False."""
    nodes = torch.arange(tokens.shape[1], device=tokens.device)
    parents = (nodes - 1).div(2, rounding_mode="floor") if branches else nodes - 1
    return TokenTree(tokens, parents)


@torch.no_grad()
def draft_seconds(model: PreTrainedModel, head: DraftHead, position: int) -> float:
    """Return the median seconds of one forward of the head: one level of a tree, or all levels if it is Medusa's.

    Args:
        model: The target, whose lm_head the head may share.
        head: The head.
        position: Position id of the forward's only token.
    """
    parameter, size = next(head.parameters()), int(head.config.hidden_size)
    features = torch.zeros(1, 1, size, device=parameter.device, dtype=parameter.dtype)
    rows: nn.Module | None = lm_head_rows(model, head.hot_token_ids) if head.shares_lm_head else None

    def forward(_size: int) -> None:
        head.draft_logits(features, position, rows)

    return _seconds_by_size(forward, [1], parameter.device)[1]


def _seconds_by_size(
    forward: Callable[[int], None],
    sizes: Sequence[int],
    device: torch.device,
    undo: Callable[[int], None] = lambda _size: None,
    rounds: int = TIMED_ROUNDS,
    pick: Pick = statistics.median,
) -> dict[int, float]:
    """Return the seconds of a call by size. Each round times every size once, so that other load affects all of them.

    Args:
        forward: The timed function; gets the size.
        sizes: The sizes.
        device: Device to synchronise with.
        undo: Restores the state after each call, untimed; gets the size.
        rounds: Timed rounds, after one warm-up round.
        pick: Reduces the times of one size to one number.
    """
    taken: dict[int, list[float]] = {size: [] for size in sizes}
    for turn in range(rounds + 1):
        for size in sizes:
            begin = time.perf_counter()
            forward(size)
            if device.type != "cpu":
                torch.get_device_module(device).synchronize(device)
            if turn:
                taken[size].append(time.perf_counter() - begin)
            undo(size)
    return {size: pick(seconds) for size, seconds in taken.items()}


def _widest_measured(widest: int, rows: int) -> int:
    return min(widest, max(MAX_MEASURED_NODES // rows, MIN_MEASURED_WIDTH))


class StepCosts:
    """Seconds of a step by its width (nodes per row), measured once and corrected by the times of real steps.

    Every measured width has a factor by which real steps differ from the measurement. A step corrects the factors of
    measured widths near its own and of those not used for a long time; costs between measured widths are interpolated.

    Args:
        seconds: Measured seconds by number of nodes per row; the smallest is 1.

    Attributes:
        arms: How drafting and plain decoding compare at this batch size and in this execution mode.
    """

    def __init__(self, seconds: Mapping[int, float]) -> None:
        self.arms = ArmGains()
        self._measured = dict(sorted(seconds.items()))
        self._factors = dict.fromkeys(self._measured, 1.0)
        self._unvisited = dict.fromkeys(self._measured, 0.0)  # steps since a step of about this width

    @classmethod
    def measure(
        cls, model: PreTrainedModel, facts: TargetFacts, *, rows: int, widest: int, context: int,
        runner: Runner | None = None,
    ) -> StepCosts:  # fmt: skip
        """Time the verify forward at a few widths (see `verify_seconds`) and create the costs from it.

        Args:
            model: The target.
            facts: The result of the probe.
            rows: Batch size.
            widest: Nodes per row of the largest tree; fewer are timed for large batches, see `MAX_MEASURED_NODES`.
            context: Tokens of the prompt; at most `MEASURED_CONTEXT` are used.
            runner: Compiled or captured forward; None: the model's own.
        """
        most = _widest_measured(widest, rows)
        widths = [*(width for width in MEASURED_WIDTHS if width < most), most]
        context = max(1, min(context, MEASURED_CONTEXT))
        begin = time.perf_counter()
        seconds = verify_seconds(
            model, widths, context, facts, rows=rows, rounds=QUICK_ROUNDS, pick=min, runner=runner
        )
        measured = ", ".join(f"{width}: {1000 * value:.1f}" for width, value in seconds.items())
        logger.info(
            "A step of %s with batch size %d takes (milliseconds by nodes per row): %s. Measured once, in %.1f s.",
            type(model).__name__, rows, measured, time.perf_counter() - begin,
        )  # fmt: skip
        return cls(seconds)

    def covers(self, widest: int, rows: int) -> bool:
        """Whether `measure` would time no wider trees for this number of rows and largest width."""
        return self.max_width >= _widest_measured(widest, rows)

    @property
    def max_width(self) -> int:
        """The largest measured width."""
        return max(self._measured)

    @property
    def plain(self) -> float:
        """Seconds of a step that drafts nothing (width 1)."""
        return self._measured[1] * self._factors[1]

    def plain_seconds(self, share: float) -> float:
        """Return the seconds of a plain step of a fraction of the rows, see `table`."""
        if share == 1:
            return self.plain
        return _at(
            _interpolated({known: self._measured[known] * self._factors[known] for known in self._measured}), share
        )

    def table(self, share: float = 1.0) -> tuple[float, ...]:
        """Return the seconds of a step with 1, 2, ... nodes per row, up to `max_width`.

        Widths not used for a long time are assumed to be cheaper than measured, see `RETRY_STEPS`.

        Args:
            share: Fraction of the rows that take part; seconds are assumed to depend on the total number of nodes.
        """
        whole = _interpolated({
            width: seconds * self._factors[width] * exp(-self._unvisited[width] / RETRY_STEPS)
            for width, seconds in self._measured.items()
        })  # fmt: skip
        return whole if share == 1 else tuple(_at(whole, width * share) for width in range(1, len(whole) + 1))

    def observe(self, width: int, seconds: float, share: float = 1.0) -> None:
        """Correct the costs by the seconds that a real step took to verify, accept and commit.

        Ignored if the step is wider than `max_width`, or with few of the rows narrower than any measured one.
        """
        width = round(width * share)
        if not 1 <= width <= self.max_width:
            return
        expected = _interpolated({known: self._measured[known] * self._factors[known] for known in self._measured})
        surprise = min(max(seconds / expected[width - 1], 1 / MAX_SURPRISE), MAX_SURPRISE)
        for known in self._measured:
            near = max(0.0, 1 - abs(log2(known / width)))  # 1 at the step's own width, 0 at half and double
            stale = 1 - exp(-self._unvisited[known] / STALE_STEPS)
            weight = near * max(COST_SMOOTHING, stale) + (1 - near) * stale * COST_SMOOTHING
            self._factors[known] *= surprise**weight
            self._unvisited[known] = (1 - near) * (self._unvisited[known] + 1)


def _at(seconds: Sequence[float], width: float) -> float:
    """Return the seconds at a width between those of a table, or below 1, given those of widths 1, 2, ...

    Example: [4.0, 5.0] gives 4.5 at width 1.5, and 3.5 at 0.5.
    """
    if len(seconds) == 1:
        return seconds[0]
    low = min(max(int(width), 1), len(seconds) - 1)
    found = seconds[low - 1] + (seconds[low] - seconds[low - 1]) * (width - low)
    return max(found, seconds[0] / 2)


def _interpolated(seconds: Mapping[int, float]) -> tuple[float, ...]:
    """Interpolate linearly: return the seconds for 1, 2, ... nodes, given those of some widths (ascending, from 1).

    Example: {1: 1.0, 3: 2.0} gives (1.0, 1.5, 2.0).
    """
    widths, found = list(seconds), list[float]()
    for low, high in pairwise(widths):
        step = (seconds[high] - seconds[low]) / (high - low)
        found += [seconds[low] + step * index for index in range(high - low)]
    return (*found, seconds[widths[-1]])
