"""What a step costs on this machine, measured: a verify forward by the size of its tree, a forward of a head."""

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

from hf_specdec.heads.base import DraftHead
from hf_specdec.trees.tree import TokenTree
from hf_specdec.verification.memory import RESERVED_SLOTS
from hf_specdec.verification.model import cache_argument, execution_device, lm_head_rows, text_config
from hf_specdec.verification.probe import TargetFacts, inspect_target
from hf_specdec.verification.runners import Runner

logger = logging.getLogger(__name__)

Pick = Callable[[Sequence[float]], float]

TIMED_ROUNDS = 5
"""Forwards of each size that are timed."""

WIDTHS = (1, 2, 4, 8, 16, 32, 64)
"""Widths of which a step's cost is measured; those between lie on the line between."""
QUICK_ROUNDS = 3
"""Forwards of each width that are timed where somebody waits for an answer; the quickest counts, for what disturbs
so few takes time."""
COUNTED_CONTEXT = 512
"""The longest context behind which is measured; real steps correct it."""
NODES_OF_A_BATCH = 128
"""Nodes of all rows together beyond which a width is not tried, but for the first few."""
LEAST_WIDTH = 4

SMOOTHING = 0.2
"""Weight of a real step in the cost of its own width."""
SURPRISE = 2.0
"""No real step counts as slower or faster than expected by more than this factor: somebody else may have been busy."""
STALE_AFTER = 50
"""Steps without a visit after which a width's cost follows the surprises of other widths (by 63 %): what changes the
cost of one width for long, another load or a hotter processor, changes that of all."""
OPTIMISM = 300
"""Steps without a visit that make a width look cheaper by 63 %, so that it is tried again and a bad measurement is
corrected. A width 10 % too dear is tried every 30 steps, one of twice the price every 200: that wastes under 0.5 %."""


@torch.no_grad()
def verify_seconds(
    model: PreTrainedModel, sizes: Sequence[int], context: int, facts: TargetFacts | None = None, *, rows: int = 1,
    rounds: int = TIMED_ROUNDS, pick: Pick = statistics.median, runner: Runner | None = None,
) -> dict[int, float]:  # fmt: skip
    """Seconds of the forward that verifies a tree of so many nodes behind a context.

    It is the forward that generation runs, with its cache and its masks; a model without branches verifies chains.

    Args:
        model: The target.
        sizes: Numbers of nodes, roots included.
        context: Committed tokens.
        facts: What the probe found; None probes the model.
        rows: Of the batch.
        rounds: Forwards of each size that are timed, after one that is not.
        pick: Which of their times counts.
        runner: What runs it, see `TreeTarget`.
    """
    facts = facts or inspect_target(model)
    device, vocab_size = execution_device(model), int(text_config(model).vocab_size)
    draw = torch.Generator("cpu").manual_seed(0)
    ids = torch.randint(vocab_size, (rows, context + max(sizes)), generator=draw, device="cpu").to(device)
    reserve = None if runner is None else RESERVED_SLOTS  # a runner keeps this memory for the calls to come
    target = facts.new_target(model, context + max(sizes) + (reserve or 0), reserve, runner=runner)
    inputs = {"attention_mask": torch.ones_like(ids[:, :context]), cache_argument(model): target.cache}
    target.prefill(ids[:, :context], GenerationConfig(), {**inputs, "use_cache": True})
    trees = {size: _tree(ids[:, context : context + size], branches=facts.supports_trees) for size in sizes}

    def forward(size: int) -> None:
        target.verify(trees[size])

    with model._optimize_model_for_decode():  # as generation runs it
        return _seconds_by_size(forward, sizes, device, undo=target.rollback, rounds=rounds, pick=pick)


def _tree(tokens: Tensor, *, branches: bool) -> TokenTree:
    """A binary tree, or a chain."""
    nodes = torch.arange(tokens.shape[1], device=tokens.device)
    parents = (nodes - 1).div(2, rounding_mode="floor") if branches else nodes - 1
    return TokenTree(tokens, parents)


@torch.no_grad()
def draft_seconds(model: PreTrainedModel, head: DraftHead, position: int) -> float:
    """Median seconds of one forward of the head: a level of an EAGLE tree, or all Medusa heads."""
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
    """Sizes are interleaved over the rounds, so that a busy moment hits all of them; the first round is a warm-up.

    Args:
        forward: What is timed, by size.
        sizes: What to time.
        device: Where it runs.
        undo: What brings back the state before, untimed.
        rounds: Timed.
        pick: Which time counts.
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
    return min(widest, max(NODES_OF_A_BATCH // rows, LEAST_WIDTH))


class StepCosts:
    """Seconds of a step by its width, measured once and kept true by the times of real steps.

    Every measured width has a factor by which real steps differ from its measurement. A step corrects the factors of
    its own width, and of widths without a visit for long; between measured widths costs lie on a line.

    Args:
        seconds: Measured, by number of nodes per row; the smallest is 1.
    """

    def __init__(self, seconds: Mapping[int, float]) -> None:
        self._measured = dict(sorted(seconds.items()))
        self._factors = dict.fromkeys(self._measured, 1.0)
        self._unvisited = dict.fromkeys(self._measured, 0.0)  # steps since a step of about this width

    @classmethod
    def measure(
        cls, model: PreTrainedModel, facts: TargetFacts, *, rows: int, widest: int, context: int,
        runner: Runner | None = None,
    ) -> StepCosts:  # fmt: skip
        """Time the verify forward at a few widths, see `verify_seconds`.

        Args:
            model: The target.
            facts: What the probe found.
            rows: Of the batch.
            widest: Nodes of the largest tree.
            context: Tokens of the prompt.
            runner: What runs the forward.
        """
        most = _widest_measured(widest, rows)
        widths = [*(width for width in WIDTHS if width < most), most]
        context = max(1, min(context, COUNTED_CONTEXT))
        begin = time.perf_counter()
        seconds = verify_seconds(
            model, widths, context, facts, rows=rows, rounds=QUICK_ROUNDS, pick=min, runner=runner
        )
        told = ", ".join(f"{width}: {1000 * value:.1f}" for width, value in seconds.items())
        logger.info(
            "A step of %s over %d rows takes, by nodes per row, in milliseconds: %s (measured in %.1f s, once).",
            type(model).__name__, rows, told, time.perf_counter() - begin,
        )  # fmt: skip
        return cls(seconds)

    def covers(self, widest: int, rows: int) -> bool:
        """Whether trees of so many nodes are in the table, as far as they are measured at all."""
        return max(self._measured) >= _widest_measured(widest, rows)

    @property
    def plain(self) -> float:
        """Seconds of a plain step."""
        return self._measured[1] * self._factors[1]

    def table(self) -> tuple[float, ...]:
        """Seconds of a step over 1, 2, ... nodes per row, up to the widest that was measured.

        Widths that were not tried for long look cheaper than they were last, see `OPTIMISM`.
        """
        return _interpolated({
            width: seconds * self._factors[width] * exp(-self._unvisited[width] / OPTIMISM)
            for width, seconds in self._measured.items()
        })  # fmt: skip

    def observe(self, width: int, seconds: float) -> None:
        """Learn from a real step: what it took to verify, accept and commit."""
        if width > max(self._measured):
            return
        expected = _interpolated({known: self._measured[known] * self._factors[known] for known in self._measured})
        surprise = min(max(seconds / expected[width - 1], 1 / SURPRISE), SURPRISE)
        for known in self._measured:
            near = max(0.0, 1 - abs(log2(known / width)))  # 1 at the step's own width, 0 from twice or half of it on
            stale = 1 - exp(-self._unvisited[known] / STALE_AFTER)
            weight = near * max(SMOOTHING, stale) + (1 - near) * stale * SMOOTHING
            self._factors[known] *= surprise**weight
            self._unvisited[known] = (1 - near) * (self._unvisited[known] + 1)


def _interpolated(seconds: Mapping[int, float]) -> tuple[float, ...]:
    """Seconds for 1, 2, ... nodes from those of some widths in ascending order, the first of them 1.

    Example: {1: 1.0, 3: 2.0} gives (1.0, 1.5, 2.0).
    """
    widths, found = list(seconds), list[float]()
    for low, high in pairwise(widths):
        step = (seconds[high] - seconds[low]) / (high - low)
        found += [seconds[low] + step * index for index in range(high - low)]
    return (*found, seconds[widths[-1]])
