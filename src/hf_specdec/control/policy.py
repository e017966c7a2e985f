"""Decide in each step of merged drafting how wide the tree is, and which heads to query.

*Width*: nodes per row of a verified tree, root included. *Free sources* need no forward (such as prompt lookup) and
are queried in every drafted step; *heads* usually need one forward per level. *Trust*: the factor by
which a source's probabilities are multiplied. The *path probability* of a node, the product of the probabilities on
its path, is the probability that it is accepted. What is learned is kept across calls; it affects only the speed.
"""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from hf_specdec.trees.draft import Budget, StepCostFunction

# ------------------------------------------------------------------------------------------- how wide a tree is

MIN_BATCH_GAIN = 1.1
"""Minimum expected speed-up over a plain step for drafting with several rows, because estimates are uncertain."""


@dataclass(frozen=True, slots=True)
class Width:
    """A number of nodes per row, and what a step that verifies them is expected to yield and to take."""

    num_nodes: int  # root included
    tokens: float  # expected, summed over rows
    progress: float  # expected tokens, with more weight on rows that gain few, see `best_width`
    seconds: float  # of the step, drafting included

    @property
    def rate(self) -> float:
        """Expected progress per second."""
        return self.progress / self.seconds


class StopRule:
    """Rule that decides, while one row's tree grows, whether a larger tree could still be faster.

    Nodes are added in order of falling path probability. Growth stops once a larger tree would not be faster even if
    all further nodes were as likely as the next one. For the arguments see `best_width`.
    """

    def __init__(self, costs: Sequence[float], draft_seconds: float) -> None:
        self._seconds = [cost + draft_seconds for cost in costs]
        self._width, self._tokens = 1, 1.0
        self._best_rate = 1.0 / self._seconds[0]

    def add(self, probability: float) -> None:
        """Count one more node with this path probability."""
        self._width += 1
        self._tokens += probability
        self._best_rate = max(self._best_rate, self._tokens / self._seconds[self._width - 1])

    def may_pay(self, probability: float) -> bool:
        """Whether some larger tree beats the best one so far, if every further node has this path probability."""
        tokens = self._tokens
        for seconds in self._seconds[self._width :]:
            tokens += probability
            if tokens > self._best_rate * seconds:
                return True
        return False


def best_width(rows: Sequence[Sequence[float]], costs: Sequence[float], draft_seconds: float) -> Width:
    """Return the width with the most expected progress per second.

    For one row, progress is 1 + the sum of the drafted nodes' path probabilities; divided by the seconds, this is the
    goodput of TurboSpec (https://arxiv.org/abs/2406.14066), here optimised node by node. For several rows, progress is
    the number of rows times a power mean of their expected tokens that is close to the smallest: a batch ends with its
    slowest row. With several rows, drafting must be more than `MIN_BATCH_GAIN` times as fast as a plain step.

    Args:
        rows: Path probabilities of each active row's nodes, root first, in falling order. All rows are verified at one
            width.
        costs: Seconds of a step that verifies 1, 2, ... nodes per row.
        draft_seconds: Seconds of drafting.
    """
    count, expected = len(rows), [1.0] * len(rows)
    best = Width(1, float(count), float(count), costs[0] + draft_seconds)
    for width in range(2, 1 + min(len(costs), max(map(len, rows)))):
        for index, row in enumerate(rows):
            if len(row) >= width:
                expected[index] += row[width - 1]
        mean = (sum(tokens**-4 for tokens in expected) / count) ** (-1 / 4)
        wider = Width(width, sum(expected), count * mean, costs[width - 1] + draft_seconds)
        required = MIN_BATCH_GAIN if count > 1 and best.num_nodes == 1 else 1.0
        if wider.rate > required * best.rate:
            best = wider
    return best


# ------------------------------------------------------------------------------------------- when to query a head

HEAD_SMOOTHING = 0.05
"""Weight of the newest step in moving averages of gains and times (higher at first, see `QueryStats.learn`)."""

FASTER_SMOOTHING = 0.3
"""Minimum weight of a time below its moving average (higher, because noise and first calls only make times longer)."""

FIRST_TRIALS = 3
"""Number of queries of a head to each depth that are made at first to measure its gain and cost."""

FIRST_LEVELS = 3
"""Most levels that a head drafts, if it can stop at levels that do not pay, until a level's cost is known. With an
assistant model, which may draft 31 levels, answers of 64 tokens took twice as long without it."""

MIN_PAUSE, MAX_PAUSE = 8, 256
"""First pause and maximum pause, in steps, before a depth is tried again while another depth pays. Pauses double after
each trial. While no depth pays, `TRIAL_SHARE` determines the maximum."""

TRIAL_SHARE = 0.0125
"""Fraction of the time that trials may take while no depth pays; pauses need not be longer than that requires. With
1 % a head that became useful again was noticed after several hundred steps, with 3 % a useless head cost 4 %."""

STALE_WEIGHT = 0.4
"""Maximum weight that a pause gives the next query in the average gain: the text may have changed in the meantime."""

FADED_QUERIES = 4
"""Queries that count as made when the target's weights have changed, so that new ones get more weight. After a change
that makes a good head useless, it is left out after about 25 queries instead of 37; with a smaller number, a trainer's
usual small changes would make the gain of a good head uncertain in every call."""

SURE_STEPS = 8
"""Steps for which a call is assumed to go on at its start, when a head has yet to read the prompt: see `Opening`."""

PRIOR_GAIN = 1.5
"""Assumed gain of an unknown head, in accepted tokens per row and step, if none are expected from the free sources. If
even that would not pay, the first trials are skipped."""

SATURATED_TOKENS = 8.0
"""If at least this number of accepted tokens per row is expected from the free sources, an unknown head is assumed to
add none. Also the start of the last class of `_gain_class`, in tokens per row."""


@dataclass(slots=True)
class QueryStats:
    """Measured gain and cost of querying a head to one depth, and when to try this depth again.

    Its gain is the number of tokens that it adds to a step. If another source has found a long match in the prompt, a
    head adds little; so gains are averaged separately for each class of the tokens expected without the head.
    """

    num_steps: int
    gains: dict[int, tuple[int, float]] = field(default_factory=dict)  # by `_gain_class`: (queries, mean tokens a row)
    seconds: float = 0.0  # moving average of the time that a query adds to a step
    num_queries: int = 0
    waited: int = 0  # steps since the last query
    pause: int = MIN_PAUSE  # steps to wait before the next trial
    trials: int = FIRST_TRIALS  # number of first queries, made to measure gain and cost
    stale: int = 0  # steps from the previous query to the latest one

    def is_due(self, without: Width, rows: int, share: float, opening: float = 0.0) -> bool:
        """Whether to try this depth of a head although the best width `without` the head is expected to be faster.

        The first trials are made if a good head could pay. Later ones follow a pause: the cost may have been measured
        under other load, and the gain on another kind of text. `share` is the fraction of the time that trials may
        take, which limits the pause; 0: `MAX_PAUSE` limits it. `opening` are seconds of reading the prompt first.
        """
        if self.num_queries < self.trials and self.rate(without, rows, PRIOR_GAIN) > without.rate:
            return True
        longest = self.seconds / (share * without.seconds) if share else MAX_PAUSE
        return self.waited > min(self.pause, max(longest, MIN_PAUSE)) + opening / (TRIAL_SHARE * without.seconds)

    def fade(self) -> None:
        """Give new queries more weight against the known gains, and let them come earlier; keep the cost."""
        self.gains = {place: (min(queries, FADED_QUERIES), gain) for place, (queries, gain) in self.gains.items()}
        self.pause = max(MIN_PAUSE, self.pause // 2)

    def rate(self, without: Width, rows: int, gain: float | None = None) -> float:
        """Return the expected progress (see `Width`) per second of a step that queries the head to this depth."""
        gain = self._known(without.tokens / rows)[1] if gain is None else gain
        progress = without.progress * (without.tokens + rows * gain) / without.tokens
        return progress / (without.seconds + self.seconds)

    def _known(self, expected: float) -> tuple[int, float]:
        """Return queries and gain if so many tokens per row are expected without the head."""
        prior = PRIOR_GAIN * max(0.0, 1 - (expected - 1) / SATURATED_TOKENS)
        return self.gains.get(_gain_class(expected), (0, prior))

    def learn(self, without: Width, with_it: Width, gained: float, rows: int) -> None:
        """Update gain and cost after a query, given the best widths without and with the head's draft.

        `gained` are emitted tokens of all active rows beyond those expected without the head; may be negative.
        """
        expected = without.tokens / rows
        queries, gain = self._known(expected)
        stale = min(1 - (1 - HEAD_SMOOTHING) ** self.stale, STALE_WEIGHT)
        weight = max(HEAD_SMOOTHING, 1 / (queries + 2), stale)
        self.gains[_gain_class(expected)] = (queries + 1, gain + weight * (gained / rows - gain))
        self.num_queries += 1
        weight = max(HEAD_SMOOTHING, 1 / self.num_queries)
        self.seconds = _average_time(self.seconds, with_it.seconds - without.seconds, weight)


@dataclass(slots=True)
class Opening:
    """What a head's first draft in a call takes longer than others, because it reads the prompt.

    The length of an answer is not known before. A head that pays is queried once it would have saved these seconds in
    the steps so far (and in `SURE_STEPS` more), had it been queried from the start: at most as much time is then lost
    as could have been gained. It is not queried if it cannot save them in the tokens that may still be emitted.
    """

    seconds: float
    saved: float = 0.0  # by queries in the steps so far

    def pays(self, saving: float, steps_left: float) -> bool:
        """Count the seconds that a query would save in this step; return whether to begin."""
        self.saved += saving
        return min(self.saved + SURE_STEPS * saving, steps_left * saving) >= self.seconds


def _average_time(average: float, seconds: float, weight: float) -> float:
    """Return a moving average of times, updated by one measurement.

    A measurement below half the average replaces it: the average was inflated by other load.
    """
    if seconds < average / 2:
        return seconds
    return average + (max(weight, FASTER_SMOOTHING) if seconds < average else weight) * (seconds - average)


def _gain_class(expected: float) -> int:
    """Return the class of an expected number of tokens per row: 2 in [1.0, 1.5), 3 in [1.5, 2.0), ..., 16 from 8.0."""
    return int(2 * min(expected, SATURATED_TOKENS))


class HeadSchedule:
    """Schedule that decides in every step whether to query a head, and to which depth.

    The depth with the most expected progress per second is queried if that exceeds the rate without a query. Other
    depths are tried a few times at first, and again after pauses that double with each trial until the depth pays.

    Args:
        num_steps: The head's depth.
        full_depth_only: Whether the full depth is the only option, because the head stops at unlikely levels
            (`Budget.min_level_probability`) or because every depth is a graph; otherwise 1, 2, 4, ... levels are, too.
    """

    def __init__(self, num_steps: int, *, full_depth_only: bool = False) -> None:
        depths = {1 << power for power in range(num_steps.bit_length())} | {num_steps}
        self.options = [QueryStats(depth) for depth in ([num_steps] if full_depth_only else sorted(depths))]
        self.level_seconds = 0.0  # moving average of drafting one level; 0.0: not measured yet
        self.opening_seconds = 0.0  # per token of the prompt, moving average, see `Opening`; 0.0: not measured yet

    @property
    def deepest(self) -> QueryStats:
        """The statistics of the full depth."""
        return self.options[-1]

    def inherit(self, other: HeadSchedule) -> None:
        """Copy the gains learned at another batch size; costs are measured again, in one first trial per depth."""
        for option, known in zip(self.options, other.options, strict=False):
            if option.num_steps == known.num_steps:
                option.gains, option.trials = dict(known.gains), 1

    def fade(self) -> None:
        """Reduce the weight of the known gains, because the target's weights have changed."""
        for option in self.options:
            option.fade()

    def time_levels(self, levels: int, seconds: float) -> None:
        """Update the average time per level, given the seconds of a draft of this many levels."""
        per_level = seconds / max(levels, 1)
        known = self.level_seconds
        self.level_seconds = _average_time(known, per_level, HEAD_SMOOTHING) if known else per_level

    def time_opening(self, tokens: int, seconds: float) -> None:
        """Update the average time of reading a prompt, given its tokens and the seconds beyond those of one token."""
        if tokens > 1:
            per_token, known = max(seconds, 0.0) / tokens, self.opening_seconds
            self.opening_seconds = _average_time(known, per_token, FASTER_SMOOTHING) if known else per_token

    def choose(
        self, without: Width, rows: int, opening: Opening | None = None, tokens_left: float = inf
    ) -> QueryStats | None:
        """Choose the depth to query in this step (None: do not query), and update waiting times and pauses.

        Call at most once per step, with the best width without the head and the number of active rows. An `opening`
        is given if the head has yet to read the prompt of this call, and at most how many tokens a row may still emit.
        """
        for option in self.options:
            option.waited += 1
        best = max(self.options, key=lambda option: option.rate(without, rows))
        rate = best.rate(without, rows)
        paying = best if rate > without.rate else None
        if paying is not None and opening:
            steps_left = tokens_left / (rate * (without.seconds + paying.seconds) / rows)
            if not opening.pays(without.seconds * (1 - without.rate / rate), steps_left):
                return None
        # if some depth pays, trials can only find a better depth, so they are rare
        share = TRIAL_SHARE / len(self.options) if paying is None else 0.0
        others = (option for option in self.options if option is not paying)
        extra = opening.seconds if opening else 0.0
        due = next((option for option in others if option.is_due(without, rows, share, extra)), None)
        if due is not None and due.num_queries >= due.trials:
            due.pause *= 2
        chosen = due or paying
        if chosen is not None:
            chosen.stale, chosen.waited = chosen.waited, 0
            if chosen is paying:
                chosen.pause = MIN_PAUSE
        return chosen


# ------------------------------------------------------------------------------------------- trust in sources

INITIAL_TRUST, TRUST_WEIGHT = 1.0, 1.0
"""Trust in a source that was never observed, and the weight of this guess (in expected hits, see `LearnedStats`). For
one class of probabilities, the guess is the trust in the source's other classes, with the same weight."""

TRUST_CLASSES = (0.3, 0.6, 0.85)
"""Bounds of the classes of probabilities that have a trust each: long repetitions, to which prompt lookup gives 0.95
per token, may be wrong in a text whose short ones are right, and would waste many nodes each time."""

TRUST_MEMORY = 0.99
"""Fraction of a source's counts of hits and expected hits that is kept at each new position."""

TEXT_WEIGHT = 1.0
"""Weight of earlier texts, in expected hits, in the trust of this text."""

Trust = tuple[float, ...]
"""Factors for a source's probabilities, by class, see `trust_class`."""
UNKNOWN: Trust = (INITIAL_TRUST,) * (len(TRUST_CLASSES) + 1)
"""Trust in a source that was never observed."""


def trust_class(probability: float) -> int:
    """Return the index of a probability's class in a `Trust`."""
    return bisect_right(TRUST_CLASSES, probability)


class LearnedStats:
    """What merged drafting has learned: a schedule for each head, and how often each source is right.

    A *source* is one of the merged drafters. Its *hits* are the positions at which it proposed the emitted token. They
    are counted by class of the probability that the source gave the token.

    Attributes:
        schedules: Schedule of each head, by name and batch size.
    """

    def __init__(self) -> None:
        self.schedules: dict[tuple[str, int], HeadSchedule] = {}
        # by source: expected and actual hits of each class; old ones fade
        self._hits: dict[str, list[tuple[float, float]]] = {}
        self._of_text: dict[str, tuple[float, float]] = {}  # by source: hits expected with its usual trust, and actual

    def begin_text(self) -> None:
        """Forget how often the sources were right in the last call's text."""
        self._of_text = {}

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of everything learned."""
        return copy.deepcopy(vars(self))

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Restore a copy made by `state_dict`, in place; None resets."""
        vars(self).update(copy.deepcopy(state) if state is not None else vars(LearnedStats()))

    def fade(self) -> None:
        """Halve the weight of hits and reduce that of gains, because the target's weights have changed; costs stay."""
        self._hits = {
            name: [(expected / 2, hits / 2) for expected, hits in classes] for name, classes in self._hits.items()
        }
        for schedule in self.schedules.values():
            schedule.fade()

    def schedule(self, name: str, batch_size: int, num_steps: int, *, full_depth_only: bool) -> HeadSchedule:
        """Return the schedule of the head of this drafter, created if there is none for this batch size and depth.

        A new one starts with the gains of the head's schedule for another batch size or depth, if any.
        """
        known = self.schedules.get((name, batch_size))
        if known is None or known.deepest.num_steps != num_steps:
            known = HeadSchedule(num_steps, full_depth_only=full_depth_only)
            others = [schedule for (other, _), schedule in self.schedules.items() if other == name]
            if others:
                known.inherit(others[-1])
            self.schedules[name, batch_size] = known
        return known

    def trust(self, source: str) -> Trust:
        """Return the factors for a source's probabilities: its usual trust, less if it is right less often here."""
        expected, hits = self._of_text.get(source, (0.0, 0.0))
        here = min(1.0, (hits + TEXT_WEIGHT) / (expected + TEXT_WEIGHT))
        return tuple(here * factor for factor in self._usual_trust(source))

    def _usual_trust(self, source: str) -> Trust:
        """Return the ratios of a source's hits to its expected hits, smoothed."""
        classes = self._hits.get(source)
        if classes is None:
            return UNKNOWN

        def ratio(expected: float, hits: float, guess: float) -> float:
            return (hits + TRUST_WEIGHT * guess) / (expected + TRUST_WEIGHT)

        total, found = sum(expected for expected, _ in classes), sum(hits for _, hits in classes)
        return tuple(
            ratio(expected, hits, ratio(total - expected, found - hits, INITIAL_TRUST)) for expected, hits in classes
        )

    def count(self, source: str, candidates: Sequence[tuple[int, float]], emitted: int) -> None:
        """Count one emitted token at whose position a source had these candidates (tokens and probabilities)."""
        before = self._hits.get(source) or [(0.0, 0.0)] * len(UNKNOWN)
        classes = [(TRUST_MEMORY * expected, TRUST_MEMORY * hits) for expected, hits in before]
        expected_here, hits_here = self._of_text.get(source, (0.0, 0.0))
        usual = self._usual_trust(source)
        for token, probability in candidates:
            index = trust_class(probability)
            expected, hits = classes[index]
            classes[index] = expected + probability, hits + (token == emitted)
            expected_here, hits_here = expected_here + usual[index] * probability, hits_here + (token == emitted)
        self._hits[source], self._of_text[source] = classes, (expected_here, hits_here)


# ------------------------------------------------------------------------------------------- one generation


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
        without: The best width of this step without heads.
        queries: The queries of this step, each with the best widths before and after it; `observe` learns from them.
    """

    def __init__(
        self, learned: LearnedStats, step_costs: StepCostFunction | None, batch_size: int, *, reads_are_free: bool
    ) -> None:
        self._learned, self._step_costs, self._batch_size = learned, step_costs, batch_size
        self._stops_heads = reads_are_free
        self._costs: tuple[float, ...] = ()
        self._free_seconds = 0.0  # of querying and updating the free sources, a moving average
        self.without: Width | None = None
        self.queries: list[tuple[QueryStats, Width, Width]] = []
        self._expected: float | None = None  # drafts expected of this step
        self.expected_drafts, self.accepted_drafts = 0.0, 0

    def begin_step(self) -> None:
        """Update the costs before a step is drafted."""
        if self._step_costs is not None:
            self._costs = self._step_costs()

    def stop_rule(self, num_nodes: int, head_seconds: float = 0.0) -> StopRule | None:
        """Return the rule that stops the growth of a row's tree; None: grow to the budget, because costs are unknown.

        In a batch, a tree grows as far as would pay if all rows had one like it.
        """
        return StopRule(self._costs[:num_nodes], self._free_seconds + head_seconds) if self._costs else None

    def choose_width(self, rows: Sequence[Sequence[float]], num_nodes: int, head_seconds: float = 0.0) -> Width:
        """Return the best width up to `num_nodes`, see `best_width`; if costs are unknown, that number of nodes.

        `head_seconds` are those of the heads' drafts of this step.
        """
        if not self._costs:
            return Width(num_nodes, float(len(rows)), float(len(rows)), 1.0)
        return best_width(rows, self._costs[:num_nodes], self._free_seconds + head_seconds)

    def finish_draft(self, rows: Sequence[Sequence[float]], width: Width, free_seconds: float) -> None:
        """Note the path probabilities of the trees, the width that is verified, and the free sources' seconds."""
        known = self._free_seconds
        self._free_seconds = known + HEAD_SMOOTHING * (free_seconds - known) if known else free_seconds
        self._expected = sum(sum(row[1 : width.num_nodes]) for row in rows)

    def observe(self, num_emitted: int, num_accepted: int, active_rows: int, free_seconds: float) -> None:
        """Learn from the emitted and the accepted drafted tokens of all rows, and the free sources' seconds."""
        if self._expected is not None:
            self._free_seconds += HEAD_SMOOTHING * free_seconds
            self.expected_drafts += self._expected
            self.accepted_drafts += num_accepted if self._expected else 0
        self._expected = None
        if self.queries:
            # tokens beyond those expected from the free sources are credited to the heads by their expected gains
            before, after = self.queries[0][1].tokens, self.queries[-1][2].tokens
            for stats, without, with_it in self.queries:
                promised = with_it.tokens - without.tokens
                share = promised / (after - before) if after > before else 1 / len(self.queries)
                stats.learn(without, with_it, share * (num_emitted - before), active_rows)
        self.queries = []

    def schedule(self, name: str, num_steps: int, *, launches: bool) -> HeadSchedule:
        """Return the schedule of a head with this depth; `launches`: it drafts before the host reads the last step."""
        full_depth_only = self._stops_heads or launches
        return self._learned.schedule(name, self._batch_size, num_steps, full_depth_only=full_depth_only)

    def choose_query(
        self, schedule: HeadSchedule, without: Width | None, active_rows: int, opening: Opening | None = None,
        tokens_left: float = inf,
    ) -> QueryStats | None:  # fmt: skip
        """Return the statistics of the depth to query a head to; None: do not query it.

        Before the host has read a step, the best width without heads is not known for the next one: that of this step
        is used, and nothing is queried if it is not known either (None).
        """
        if without is None or self._step_costs is None:
            return None if without is None else schedule.deepest
        return schedule.choose(without, active_rows, opening, tokens_left)

    def within_levels(self, budget: Budget, schedule: HeadSchedule, without: Width) -> Budget:
        """Return a head's budget that ends a draft at levels that cost more than they gain.

        It does not change if reading the device is not free or costs are unknown. `without` is the best width of the
        step without the head.
        """
        if not self._stops_heads or not self._costs:
            return budget
        if not schedule.level_seconds:
            return replace(budget, num_steps=min(budget.num_steps, FIRST_LEVELS))
        return replace(budget, min_level_probability=schedule.level_seconds * without.rate)
