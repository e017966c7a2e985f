"""What a step costs by its number of nodes, and whether drafting pays at all: learned from real steps.

`StepCosts.measure` times forwards for `warmup()`; `time_forwards` and `draft_seconds` time them to search a tree.
*Width*: nodes per row of a verified tree, root included. *Plain step*: a step of width 1, which drafts nothing.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from math import exp, inf, log, log2
from typing import Literal

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel

from hf_specdec.heads.head import DraftHead
from hf_specdec.trees.tree import TokenTree
from hf_specdec.verification.memory import ANSWER_SLOTS
from hf_specdec.verification.model import cache_argument, execution_device, lm_head_rows, text_config
from hf_specdec.verification.probe import TargetFacts, inspect_target
from hf_specdec.verification.runners import Runner

logger = logging.getLogger(__name__)

MEASURED_WIDTHS = (1, 2, 4, 8, 16, 32, 64)
"""Widths whose cost is learned or measured, up to the largest width needed, which is added; costs between them are
interpolated."""

MAX_MEASURED_NODES, MIN_MEASURED_WIDTH = 128, 4
"""Maximum nodes of all rows together in a step whose cost is known; widths up to the second number may exceed it."""

EXPECTED_NODE_COST = {"cpu": 0.06, "accelerator": 0.005}
"""Seconds of one more node relative to a plain step of one row, assumed until steps have been timed. CPUs took 0.04 to
0.1, the higher values for many nodes with the CPU kernels. GPUs take about as long for dozens of nodes as for one."""

MIN_TRIAL_WIDTH, CHEAP_TREES = 8, 1.5
"""Width up to which the first trees may grow; wider ones have at most twice the nodes of any step so far, because
neither their cost nor their source is known. Unlimited if the widest step is expected to take less than the second
number of plain steps."""

LONG_FORWARD = 0.2
"""Seconds of a forward that `warmup()` times once only."""

FIRST_STEPS = 3
"""Steps of a width that count more than later ones: those faster than expected fully, because noise only makes a step
slower, others up to half."""

COST_SMOOTHING = 0.2
"""Weight of a real step in the moving (geometric) average of the cost of its width; more if the width was unused for
long, see `StepCosts.observe`."""

MAX_SURPRISE = 2.0
"""Limit of the ratio of a step's time to its expected time; larger ratios come from other load and are clamped to it.
A step that takes less than 1 / `MAX_SURPRISE` of its expected time corrects the cost fully, because other load makes
no step faster. A stretch of steps counts as at least 1 / `MAX_SURPRISE` as fast as plain ones."""

STALE_STEPS = 50
"""A width that was unused for this many steps reacts to deviations at other widths with 63 % of `COST_SMOOTHING`: a
lasting change, such as other load or a faster clock, affects all widths."""

RETRY_STEPS = 300
"""A width that takes as long as k plain steps is assumed to cost 63 % less once it was unused for k times this many
steps, but not less than a narrower one: so it is tried again, and a bad measurement corrected. A width that is 10 %
slower than the best one is tried every 30 steps, one that takes twice as long every 400: under 0.5 % of the time."""


# ------------------------------------------------------------------------------------------- timing forwards


@torch.no_grad()
def time_forwards(
    model: PreTrainedModel, sizes: Sequence[int], context: int, facts: TargetFacts | None = None, *, rows: int = 1,
    rounds: int = 5, pick: Callable[[Sequence[float]], float] = statistics.median, enough: float = inf,
    runner: Runner | None = None,
) -> dict[int, float]:  # fmt: skip
    """Return the seconds of a verify forward by the number of nodes of its tree.

    The timed forward is that of generation, with the same cache and masks. The trees are binary, or chains if the
    model supports no trees.

    Args:
        model, facts: The target, and the result of the probe; None probes the model.
        sizes: Numbers of nodes, root included.
        context: Committed tokens before the tree, at least 1.
        rows: Batch size.
        rounds, pick: Timed forwards per size, after one warm-up, and what reduces their times to one number.
        enough: A size whose warm-up takes longer, in seconds, is not timed again.
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
    trees = {}
    for size in sizes:
        nodes = torch.arange(size, device=device)
        parents = (nodes - 1).div(2, rounding_mode="floor") if facts.supports_trees else nodes - 1
        trees[size] = TokenTree(ids[:, context : context + size], parents)
    return _seconds_by_size(
        lambda size: target.verify(trees[size]), sizes, device, target.rollback, rounds=rounds, pick=pick,
        enough=enough,
    )  # fmt: skip


@torch.no_grad()
def draft_seconds(model: PreTrainedModel, head: DraftHead, position: int) -> float:
    """Return the median seconds of one forward of the head: one level of a tree, or all levels if it is Medusa's.

    The forward's only token has this position; the head may share the lm_head of the target `model`.
    """
    parameter, size = next(head.parameters()), int(head.config.hidden_size)
    features = torch.zeros(1, 1, size, device=parameter.device, dtype=parameter.dtype)
    rows: nn.Module | None = lm_head_rows(model, head.hot_token_ids) if head.shares_lm_head else None
    return _seconds_by_size(lambda _: head.draft_logits(features, position, rows), [1], parameter.device)[1]


def _seconds_by_size(
    forward: Callable[[int], object], sizes: Sequence[int], device: torch.device,
    undo: Callable[[int], None] = lambda _size: None, *, rounds: int = 5,
    pick: Callable[[Sequence[float]], float] = statistics.median, enough: float = inf,
) -> dict[int, float]:  # fmt: skip
    """Return the seconds of a call by size. Each round times every size once, so that other load affects all of them.

    `undo` restores the state after each call, untimed. One warm-up round comes first, which counts for those sizes
    that take longer than `enough` in it.
    """
    taken: dict[int, list[float]] = {size: [] for size in sizes}
    left = list(sizes)
    for turn in range(rounds + 1):
        for size in left.copy():
            begin = time.perf_counter()
            forward(size)
            if device.type != "cpu":
                torch.get_device_module(device).synchronize(device)
            seconds = time.perf_counter() - begin
            undo(size)
            if turn or seconds > enough:
                taken[size].append(seconds)
            if not turn and seconds > enough:
                left.remove(size)
    return {size: pick(seconds) for size, seconds in taken.items()}


# ------------------------------------------------------------------------------------------- costs


class StepCosts:
    """Seconds of a step by its width (nodes per row), learned from the times of real steps.

    Some widths have a factor by which real steps differ from the seconds given at first. A step corrects the factors
    of widths near its own and of those not used for a long time. Factors of widths that were never used are
    interpolated between those that were, and so are costs between the widths, unless trees are padded to them.

    Args:
        seconds: Seconds by number of nodes per row; the smallest is 1.
        is_measured: Whether they were measured. If not, only their ratios count, until a step of each width is seen.
        is_padded: Whether a tree is padded to the next of these widths (`Runner.widths`) and costs what that does.

    Attributes:
        arms: How drafting and plain decoding compare at this batch size and in this execution mode.
    """

    def __init__(self, seconds: Mapping[int, float], *, is_measured: bool = True, is_padded: bool = False) -> None:
        self.arms, self._is_padded = ArmGains(), is_padded
        self._given = dict(sorted(seconds.items()))
        self._factors = dict.fromkeys(self._given, 1.0)
        self._seen = dict.fromkeys(self._given, float(FIRST_STEPS * is_measured))  # steps of about this width
        self._unvisited = dict.fromkeys(self._given, 0.0)  # steps since a step of about this width

    @classmethod
    def expected(
        cls, device: torch.device, *, rows: int, widest: int, known: tuple[int, StepCosts] | None = None,
        runner: Runner | None = None,
    ) -> StepCosts:  # fmt: skip
        """Return costs of which only the expected ratios are known; runs no forward.

        Seconds are assumed to depend on the nodes of all rows together: as `known` of another batch size, otherwise
        see `EXPECTED_NODE_COST`. `widest` is the number of nodes per row of the largest tree.
        """
        if known is not None:
            others, costs = known
            table = costs._by_width(costs._current())
            expected = {width: _at(table, width * rows / others) for width in _widths(widest, rows, runner)}
        else:
            slope = EXPECTED_NODE_COST["cpu" if device.type == "cpu" else "accelerator"]
            expected = {width: 1 + slope * (rows * width - 1) for width in _widths(widest, rows, runner)}
        return cls(expected, is_measured=False, is_padded=bool(runner and runner.widths))

    @classmethod
    def measure(
        cls, model: PreTrainedModel, facts: TargetFacts, *, rows: int, widest: int, context: int,
        runner: Runner | None = None,
    ) -> StepCosts:  # fmt: skip
        """Time the verify forward at a few widths (see `time_forwards`) and create the costs from it.

        At most 512 tokens of `context` are used, 128 on a CPU, because real steps correct longer contexts.
        """
        widths, begin = _widths(widest, rows, runner), time.perf_counter()
        context = min(context, 128 if execution_device(model).type == "cpu" else 512)  # a capture is of this length
        # the fastest of few, because noise only makes a forward slower; in a long one it is a small part
        seconds = time_forwards(
            model, widths, context, facts, rows=rows, rounds=2, pick=min, enough=LONG_FORWARD, runner=runner
        )
        measured = ", ".join(f"{width}: {1000 * value:.1f}" for width, value in seconds.items())
        logger.info(
            "A step of %s with batch size %d takes (milliseconds by nodes per row): %s. Measured once, in %.1f s.",
            type(model).__name__, rows, measured, time.perf_counter() - begin,
        )  # fmt: skip
        return cls(seconds, is_padded=bool(runner and runner.widths))

    @property
    def is_plain_known(self) -> bool:
        """Whether a plain step was timed."""
        return self._seen[1] > 0

    def covers(self, widest: int, rows: int) -> bool:
        """Whether there is a cost for the largest width needed with this batch size and trees up to `widest` nodes."""
        return self.max_width >= _most(widest, rows)

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
        return self.plain if share == 1 else _at(self._by_width(self._current()), share)

    def table(self, share: float = 1.0) -> tuple[float, ...]:
        """Return the seconds of a step with 1, 2, ... nodes per row, up to `max_width`; see also `RETRY_STEPS`.

        `share` is the fraction of the rows that take part; seconds are assumed to depend on the total number of nodes.
        """
        current, narrower, retried = self._current(), 0.0, {}
        for width, seconds in current.items():
            assumed = seconds * exp(-self._unvisited[width] * current[1] / (RETRY_STEPS * seconds))
            narrower = retried[width] = max(assumed, min(seconds, narrower))
        whole = self._by_width(retried)
        return whole if share == 1 else tuple(_at(whole, width * share) for width in range(1, len(whole) + 1))

    def observe(self, width: int, seconds: float, share: float = 1.0) -> None:
        """Correct the costs by the seconds that a real step took to verify, accept and commit.

        Ignored if the step is wider than `max_width`, or if so few rows took part that `width * share` rounds to 0.
        """
        width = round(width * share)
        if not 1 <= width <= self.max_width:
            return
        if self._is_padded:
            width = next(known for known in self._given if known >= width)
        if not any(self._seen.values()):  # only ratios are known
            self._factors = dict.fromkeys(self._given, seconds / self._by_width(self._given)[width - 1])
        current = self._current()
        surprise = seconds / self._by_width(current)[width - 1]
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

    def _by_width(self, seconds: Mapping[int, float]) -> tuple[float, ...]:
        """Return the seconds for 1, 2, ... nodes, given those of some widths, ascending from 1.

        Example: {1: 1.0, 3: 2.0} gives (1.0, 1.5, 2.0), or (1.0, 2.0, 2.0) if trees are padded.
        """
        widths, found = list(seconds), [seconds[1]]
        for low, high in pairwise(widths):
            step = 0.0 if self._is_padded else (seconds[high] - seconds[low]) / (high - low)
            found += [seconds[high] - step * (high - width) for width in range(low + 1, high + 1)]
        return tuple(found)

    def _current(self) -> dict[int, float]:
        """Return the seconds by width, with the factors learned so far.

        A width that no step has had gets a factor between those of the nearest widths that steps had. A step costs at
        most as much per node as a narrower one: verifying the nodes in several steps would take no longer. A higher
        cost was measured beside other work.
        """
        found, least_per_node = dict[int, float](), inf
        visited = [width for width, seen in self._seen.items() if seen]
        for width, seconds in self._given.items():
            below = max((known for known in visited if known <= width), default=None)
            above = min((known for known in visited if known >= width), default=None)
            nearest = below or above or width
            factor = self._factors[nearest]
            if below and above and below < above:
                part = log2(width / below) / log2(above / below)
                factor = exp((1 - part) * log(self._factors[below]) + part * log(self._factors[above]))
            found[width] = min(seconds * factor, least_per_node * width)
            least_per_node = min(least_per_node, found[width] / width)
        return found


def _most(widest: int, rows: int) -> int:
    """Return the largest width whose cost is known or learned."""
    return min(widest, max(MAX_MEASURED_NODES // rows, MIN_MEASURED_WIDTH))


def _widths(widest: int, rows: int, runner: Runner | None) -> list[int]:
    """Return the widths whose costs are known or learned, ascending."""
    widths, most = (runner and runner.widths) or MEASURED_WIDTHS, _most(widest, rows)
    return [*(width for width in widths if width < most), most]


def _at(seconds: Sequence[float], width: float) -> float:
    """Return the seconds at a width between those of a table, or below 1, given those of widths 1, 2, ...

    Example: [4.0, 5.0] gives 4.5 at width 1.5, and 3.5 at 0.5.
    """
    if len(seconds) == 1:
        return seconds[0]
    low = min(max(int(width), 1), len(seconds) - 1)
    found = seconds[low - 1] + (seconds[low] - seconds[low - 1]) * (width - low)
    return max(found, seconds[0] / 2)


# ------------------------------------------------------------------------------------------- drafting or not

STRETCH_STEPS, MAX_PLAIN_STEPS = 8, 64
"""Steps of a stretch, after which drafting and plain decoding are compared; also the first pause of drafting. Pauses
double to the second number of steps while plain decoding wins: a stretch that takes 30 % longer then costs 3 %."""

ARM_SMOOTHING = 0.15
"""Minimum weight of the newest stretch in the average of an arm's gain (higher at first, see `ArmGains.learn`)."""

ARM_MARGIN = 0.03
"""Drafting continues if it loses less than this: text that repeats may begin at any time."""

Arm = Literal["drafting", "plain"]


class ArmGains:
    """What is known about drafting and plain decoding at one batch size and in one execution mode, kept across calls.

    *Gain*: tokens per second, relative to those of plain steps as the cost model expects them. The relation makes
    stretches comparable although texts grow and rows leave.

    Attributes:
        gains: Moving average of each arm's gain; at first, plain decoding has 1 and drafting is unknown.
        pause: Plain steps of the next stretch of plain decoding.
        plain_steps: Plain steps left until drafting is tried again; 0 during a stretch of drafting.
    """

    def __init__(self) -> None:
        self.gains: dict[Arm, float | None] = {"drafting": None, "plain": 1.0}
        self.pause, self.plain_steps = STRETCH_STEPS, 0
        self._stretches: dict[Arm, int] = {"drafting": 0, "plain": 1}

    def learn(self, arm: Arm, gain: float) -> None:
        """Add a stretch to the average gain of an arm: the arithmetic mean at first, then a moving average.

        Gains below 1 / `MAX_SURPRISE` count as that: other load has slowed the stretch down.
        """
        known, gain = self.gains[arm], max(gain, 1 / MAX_SURPRISE)
        self._stretches[arm] += 1
        weight = max(ARM_SMOOTHING, 1 / self._stretches[arm])
        self.gains[arm] = gain if known is None else known + weight * (gain - known)


class Arms:
    """The arm of each step of one generation: a two-armed bandit over the speed that each arm has really reached.

    What the cost model leaves out (querying, bookkeeping, other load) counts here. Steps are grouped into stretches of
    one arm. While plain decoding wins, drafting is tried again after pauses that double.

    Args:
        known: What earlier calls have learned; updated.
    """

    def __init__(self, known: ArmGains) -> None:
        self._known = known
        self._steps = 0  # of this stretch
        self._progress = self._seconds = 0.0  # of this stretch

    @property
    def arm(self) -> Arm:
        """The arm of the next step."""
        return "plain" if self._known.plain_steps else "drafting"

    def observe(self, tokens: float, seconds: float, plain_seconds: float) -> None:
        """Count a step of the current arm; at the end of a stretch, choose the next arm.

        `tokens` are those emitted per row that took part; the seconds are those of the step, drafting included, and
        those expected of a plain step of the same rows.
        """
        known, arm = self._known, self.arm
        self._progress += tokens * plain_seconds
        self._seconds += seconds
        self._steps += 1
        if arm == "plain":
            known.plain_steps = max(known.plain_steps - 1, 0)  # another thread may share what is known
            if known.plain_steps:
                return
            known.pause = min(2 * known.pause, MAX_PLAIN_STEPS)
        elif self._steps < STRETCH_STEPS:
            return
        if self._seconds:
            known.learn(arm, self._progress / self._seconds)
        self._steps, self._progress, self._seconds = 0, 0.0, 0.0
        if arm == "drafting":
            drafting, plain = known.gains["drafting"], known.gains["plain"]
            if drafting is not None and plain and drafting < (1 - ARM_MARGIN) * plain:
                known.plain_steps = known.pause
            else:
                known.pause = STRETCH_STEPS
