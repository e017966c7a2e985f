"""Learn from real steps how long a step takes by its number of nodes, and time forwards for `warmup()` and trees."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from math import exp, inf, log, log2

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from hf_specdec.control.arms import ArmGains
from hf_specdec.control.constants import (
    CHEAP_TREES,
    COST_SMOOTHING,
    EXPECTED_NODE_COST,
    FIRST_STEPS,
    MAX_MEASURED_NODES,
    MAX_SURPRISE,
    MEASURED_CONTEXT,
    MEASURED_WIDTHS,
    MIN_MEASURED_WIDTH,
    MIN_TRIAL_WIDTH,
    QUICK_ROUNDS,
    RETRY_STEPS,
    STALE_STEPS,
    TIMED_ROUNDS,
)
from hf_specdec.heads.base import DraftHead
from hf_specdec.transformers_private import decode_optimizations
from hf_specdec.trees.tree import TokenTree
from hf_specdec.verification.memory import ANSWER_SLOTS
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
    reserve = None if runner is None else ANSWER_SLOTS  # a runner keeps this memory for later calls
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


def _widest(widest: int, rows: int) -> int:
    """Return the largest width with a cost."""
    return min(widest, max(MAX_MEASURED_NODES // rows, MIN_MEASURED_WIDTH))


def _widths(widest: int, rows: int) -> list[int]:
    """Return the widths whose costs are known or learned, ascending."""
    most = _widest(widest, rows)
    return [*(width for width in MEASURED_WIDTHS if width < most), most]


class StepCosts:
    """Seconds of a step by its width (nodes per row), learned from the times of real steps.

    Some widths have a factor by which real steps differ from the seconds given at first. A step corrects the factors
    of widths near its own and of those not used for a long time. Factors of widths that were never used are
    interpolated between those that were, and so are costs between the widths.

    Args:
        seconds: Seconds by number of nodes per row; the smallest is 1.
        is_measured: Whether they were measured. If not, only their ratios count, until a step of each width is seen.

    Attributes:
        arms: How drafting and plain decoding compare at this batch size and in this execution mode.
    """

    def __init__(self, seconds: Mapping[int, float], *, is_measured: bool = True) -> None:
        self.arms = ArmGains()
        self._given = dict(sorted(seconds.items()))
        self._factors = dict.fromkeys(self._given, 1.0)
        self._seen = dict.fromkeys(
            self._given, float(FIRST_STEPS) if is_measured else 0.0
        )  # steps of about this width
        self._unvisited = dict.fromkeys(self._given, 0.0)  # steps since a step of about this width

    @classmethod
    def expected(
        cls, device: torch.device, *, rows: int, widest: int, known: tuple[int, StepCosts] | None = None
    ) -> StepCosts:
        """Return costs of which only the expected ratios are known; runs no forward.

        Seconds are assumed to depend on the nodes of all rows together: as learned at another batch size, otherwise
        see `EXPECTED_NODE_COST`.

        Args:
            device: The target's device.
            rows: Batch size.
            widest: Nodes per row of the largest tree.
            known: Another batch size and its costs.
        """
        widths = _widths(widest, rows)
        if known is not None:
            others, costs = known
            table = _interpolated(costs._current())
            return cls({width: _at(table, width * rows / others) for width in widths}, is_measured=False)
        slope = EXPECTED_NODE_COST["cpu" if device.type == "cpu" else "accelerator"]
        return cls({width: 1 + slope * (rows * width - 1) for width in widths}, is_measured=False)

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
        widths, context = _widths(widest, rows), max(1, min(context, MEASURED_CONTEXT))
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

    @property
    def is_plain_known(self) -> bool:
        """Whether a plain step was timed."""
        return self._seen[1] > 0

    def covers(self, widest: int, rows: int) -> bool:
        """Whether there is a cost for the largest width needed with this batch size and trees up to `widest` nodes."""
        return self.max_width >= _widest(widest, rows)

    @property
    def max_width(self) -> int:
        """The largest width with a cost."""
        return max(self._given)

    @property
    def widest_trial(self) -> int:
        """Nodes per row of the widest tree to risk: twice as many as any step has had, if nodes cost time."""
        if self._given[self.max_width] < CHEAP_TREES * self._given[1]:
            return self.max_width
        seen = max((width for width, steps in self._seen.items() if steps), default=1)
        return min(self.max_width, max(MIN_TRIAL_WIDTH, 2 * seen))

    @property
    def plain(self) -> float:
        """Seconds of a step that drafts nothing (width 1)."""
        return self._current()[1]

    def plain_seconds(self, share: float) -> float:
        """Return the seconds of a plain step of a fraction of the rows, see `table`."""
        return self.plain if share == 1 else _at(_interpolated(self._current()), share)

    def table(self, share: float = 1.0) -> tuple[float, ...]:
        """Return the seconds of a step with 1, 2, ... nodes per row, up to `max_width`.

        Widths not used for a long time are assumed to be cheaper than known, see `RETRY_STEPS`.

        Args:
            share: Fraction of the rows that take part; seconds are assumed to depend on the total number of nodes.
        """
        whole = _interpolated(
            {width: seconds * exp(-self._unvisited[width] / RETRY_STEPS) for width, seconds in self._current().items()}
        )
        return whole if share == 1 else tuple(_at(whole, width * share) for width in range(1, len(whole) + 1))

    def observe(self, width: int, seconds: float, share: float = 1.0) -> None:
        """Correct the costs by the seconds that a real step took to verify, accept and commit.

        Ignored if the step is wider than `max_width`, or if so few rows took part that `width * share` rounds to 0.
        """
        width = round(width * share)
        if not 1 <= width <= self.max_width:
            return
        if not any(self._seen.values()):  # only ratios are known
            self._factors = dict.fromkeys(self._given, seconds / _interpolated(self._given)[width - 1])
        current = self._current()
        surprise = seconds / _interpolated(current)[width - 1]
        is_certain = surprise < 1 / MAX_SURPRISE  # other load makes no step faster, so the cost was wrong
        surprise = min(surprise, MAX_SURPRISE)
        for known, seen in self._seen.items():
            near = max(0.0, 1 - abs(log2(known / width)))  # 1 at the step's own width, 0 at half and double
            stale = 1 - exp(-self._unvisited[known] / STALE_STEPS)
            if near:  # this step gives it a factor, or corrects a cost that was capped
                self._factors[known] = current[known] / self._given[known]
            first = 0.0 if seen >= FIRST_STEPS else 1.0 if surprise < 1 else 1 / (2 + seen)
            weight = near * max(COST_SMOOTHING, stale, first, float(is_certain)) + (1 - near) * stale * COST_SMOOTHING
            self._factors[known] *= surprise**weight
            self._unvisited[known] = (1 - near) * (self._unvisited[known] + 1)
        for known in self._seen:
            self._seen[known] += max(0.0, 1 - abs(log2(known / width)))

    def _current(self) -> dict[int, float]:
        """Return the seconds by width, with the factors learned so far.

        A step costs at most as much per node as a narrower one: verifying the nodes in several steps would take no
        longer. A higher cost was measured beside other work.
        """
        found, least_per_node = dict[int, float](), inf
        for width, seconds in self._given.items():
            found[width] = min(seconds * self._factor(width), least_per_node * width)
            least_per_node = min(least_per_node, found[width] / width)
        return found

    def _factor(self, width: int) -> float:
        """Return the factor of a width; if no step has had it, between those of the nearest widths that steps had."""
        if self._seen[width]:
            return self._factors[width]
        below = max((known for known, seen in self._seen.items() if seen and known < width), default=None)
        above = min((known for known, seen in self._seen.items() if seen and known > width), default=None)
        if below is None or above is None:
            nearest = below or above
            return self._factors[nearest or width]
        part = log2(width / below) / log2(above / below)
        return exp((1 - part) * log(self._factors[below]) + part * log(self._factors[above]))


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
