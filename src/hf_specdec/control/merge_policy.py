"""Decide in each step of merged drafting how wide the tree is, which heads to query, and when to pause drafting.

*Width*: nodes per row, root included. *Free sources* need no forward (such as prompt lookup) and are queried in every
step unless drafting is paused; *heads* usually need one forward per level.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hf_specdec.control.constants import HEAD_SMOOTHING, IDLE_QUERY_SHARE, PAUSE_STEPS
from hf_specdec.control.head_schedule import HeadSchedule, QueryStats
from hf_specdec.control.learned_stats import LearnedStats
from hf_specdec.control.tree_width import StopRule, Width, best_width

StepCostFunction = Callable[[], tuple[float, ...]]
"""Function that returns the seconds of a step that verifies 1, 2, ... nodes per row, drafting excluded."""


class MergePolicy:
    """Policy that decides in each step of one generation how much to draft and which heads to query.

    Args:
        learned: Statistics of earlier calls; updated.
        step_costs: Returns the costs of a step. None: unknown; trees fill the budget, heads are queried to
            their full depth.
        batch_size: Rows of the batch.
        reads_are_free: Whether reading the device costs nothing (a CPU): a head then stops at levels that are too
            unlikely to pay.

    Attributes:
        expected_drafts, accepted_drafts: Expected and actual number of accepted drafted tokens so far.
    """

    def __init__(
        self, learned: LearnedStats, step_costs: StepCostFunction | None, batch_size: int, *, reads_are_free: bool
    ) -> None:
        self._learned, self._step_costs, self._batch_size = learned, step_costs, batch_size
        self._stops_heads = reads_are_free
        self._costs: tuple[float, ...] = ()
        self._plain_steps = 0  # consecutive
        self._paused_steps = 0  # still to come
        self._free_seconds = 0.0  # of querying and updating the free sources, a moving average
        self._without: Width | None = None  # the best width of this step without heads
        self._queries: list[tuple[QueryStats, Width, Width]] = []  # of this step, with the widths before and after
        self._expected: float | None = None  # drafts expected of this step
        self.expected_drafts, self.accepted_drafts = 0.0, 0

    # ------------------------------------------------------------------------------------------- one step

    def begin_step(self) -> bool:
        """Return whether to draft in this step; if so, update the costs, otherwise count down the current pause."""
        if self._step_costs is not None:
            if self._paused_steps:
                self._paused_steps, self._expected = self._paused_steps - 1, None
                return False
            self._costs = self._step_costs()
        return True

    def stop_rule(self, num_nodes: int, head_seconds: float = 0.0) -> StopRule | None:
        """Return the rule that stops the growth of a row's tree; None: grow to the budget, because costs are unknown.

        In a batch, a tree grows as far as would pay if all rows had one like it.
        """
        if not self._costs:
            return None
        return StopRule(self._costs[:num_nodes], self._free_seconds + head_seconds)

    def choose_width(self, rows: Sequence[Sequence[float]], num_nodes: int, head_seconds: float = 0.0) -> Width:
        """Return the best width; the largest, with placeholders for tokens and seconds, if costs are unknown.

        Args:
            rows: Path probabilities of the trees, see `best_width`.
            num_nodes: The largest width.
            head_seconds: Seconds of the heads' drafts of this step.
        """
        if not self._costs:
            return Width(num_nodes, float(len(rows)), float(len(rows)), 1.0)
        return best_width(rows, self._costs[:num_nodes], self._free_seconds + head_seconds)

    def finish_draft(self, rows: Sequence[Sequence[float]], width: Width, free_seconds: float) -> None:
        """Record the tree to verify; pause querying if more than `PAUSE_STEPS` consecutive steps were plain.

        The pause in steps, rounded down, limits the time of querying the free sources to `IDLE_QUERY_SHARE`; it is at
        most `PAUSE_STEPS`. There is none if costs are unknown.

        Args:
            rows: Path probabilities of the trees.
            width: The width that is verified.
            free_seconds: Seconds of querying the free sources.
        """
        known = self._free_seconds
        self._free_seconds = known + HEAD_SMOOTHING * (free_seconds - known) if known else free_seconds
        self._expected = sum(sum(row[1 : width.num_nodes]) for row in rows)
        self._plain_steps = self._plain_steps + 1 if width.num_nodes == 1 else 0
        if self._plain_steps > PAUSE_STEPS and self._costs:
            self._paused_steps = min(int(self._free_seconds / (IDLE_QUERY_SHARE * self._costs[0])), PAUSE_STEPS)

    def observe(self, num_emitted: int, num_accepted: int, active_rows: int, free_seconds: float) -> None:
        """Learn from the result of a step.

        Args:
            num_emitted, num_accepted: Emitted tokens and accepted drafted tokens of all rows.
            active_rows: Rows that took part.
            free_seconds: Seconds of updating the free sources.
        """
        if self._expected is not None:
            self._free_seconds += HEAD_SMOOTHING * free_seconds
        if self._expected:
            self.expected_drafts += self._expected
            self.accepted_drafts += num_accepted
        self._expected = None
        if self._queries:
            # tokens beyond those expected from the free sources are credited to the heads by their expected gains
            before, after = self._queries[0][1].tokens, self._queries[-1][2].tokens
            for stats, without, with_it in self._queries:
                promised = with_it.tokens - without.tokens
                share = promised / (after - before) if after > before else 1 / len(self._queries)
                stats.learn(without, with_it, share * (num_emitted - before), active_rows)
        self._queries = []

    # ------------------------------------------------------------------------------------------- heads

    def schedule(self, name: str, num_steps: int) -> HeadSchedule:
        """Return the schedule of a head with this depth."""
        return self._learned.schedule(name, self._batch_size, num_steps, stops_itself=self._stops_heads)

    def choose_query(self, schedule: HeadSchedule, without: Width, active_rows: int) -> QueryStats | None:
        """Return the statistics of the depth to query a head to; None: do not query it."""
        if self._step_costs is None:
            return schedule.deepest
        return schedule.choose(without, active_rows)

    def choose_launch(self, schedule: HeadSchedule, active_rows: int) -> QueryStats | None:
        """Apply `choose_query` for the next step, before the host has read the result of this step.

        The best width without heads is not known for the next step yet, so that of this step is used. Returns None if
        that is not known either, or if querying is paused.
        """
        if self._without is None or self._paused_steps:
            return None
        return self.choose_query(schedule, self._without, active_rows)

    def expect(self, without: Width) -> None:
        """Note the best width of this step without heads, for `choose_launch`."""
        self._without = without

    def min_level_probability(self, schedule: HeadSchedule, without: Width) -> float:
        """Return `Budget.min_level_probability` for a head: below it, another level costs more than it gains.

        0.0 (no minimum) if reading the device is not free or costs are unknown.
        """
        return schedule.level_seconds * without.rate if self._stops_heads and self._costs else 0.0

    def note_query(self, stats: QueryStats, before: Width, after: Width) -> None:
        """Note a query of this step, with the best widths before and after it; `observe` learns from it."""
        self._queries.append((stats, before, after))
