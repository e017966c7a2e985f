"""The tuned numbers of the policy that decides how much to draft, each with the reason for its value.

Sensitivity was measured in the simulated scenarios of `tests/test_policy.py` (`benchmarks/policy_constants.py`; raw
rows in `benchmarks/results/policy_constants.json`). Halving or doubling a constant changes the mean speed-up by less
than 1 %, except `TRUST_MEMORY` (-22 % if nothing is ever forgotten, -6 % if half is forgotten at each position),
`HEAD_SMOOTHING` (-2 % if halved) and `TRIAL_SHARE` (-1 % if halved).
"""

from __future__ import annotations

# ------------------------------------------------------------------------------------------- cost of a step

MEASURED_WIDTHS = (1, 2, 4, 8, 16, 32, 64)
"""Nodes per row for which a step is timed; widths between them are interpolated."""

TIMED_ROUNDS = 5
"""Timed forwards per size in an offline measurement (`search_tree`); the median counts."""

QUICK_ROUNDS = 3
"""Timed forwards per width while a user waits; the fastest counts, because noise only makes a forward slower."""

MEASURED_CONTEXT = 512
"""Maximum context, in tokens, of the timed forwards; real steps correct the costs after longer ones."""

MAX_MEASURED_NODES = 128
"""Maximum nodes of all rows together that are timed; up to `MIN_MEASURED_WIDTH` nodes per row always are."""

MIN_MEASURED_WIDTH = 4
"""Nodes per row that are timed for every batch size."""

COST_SMOOTHING = 0.2
"""Weight of a real step in the cost of its width."""

MAX_SURPRISE = 2.0
"""Limit of the factor by which one step may change an expected cost: larger ones come from other load."""

STALE_STEPS = 50
"""A width that was unused for this many steps reacts to deviations at other widths with 63 % of `COST_SMOOTHING`: a
lasting change, such as other load or a faster clock, affects all widths."""

RETRY_STEPS = 300
"""A width that was unused for this many steps is assumed to cost 63 % less, so that it is tried and a bad measurement
corrected. A width that is 10 % too expensive is tried every 30 steps, one at twice the cost every 200; this wastes
less than 0.5 %."""

# ------------------------------------------------------------------------------------------- how wide a tree is

MIN_PATH_PROBABILITY = 0.01
"""Candidates with a lower path probability are dropped."""

SLOW_ROW_POWER = 4
"""Power of the mean of expected tokens over rows (1 is the harmonic mean): a batch ends with its slowest row."""

MIN_BATCH_GAIN = 1.1
"""Minimum expected speed-up over a plain step for drafting with several rows, whose estimates are uncertain."""


INITIAL_TRUST, TRUST_WEIGHT = 0.75, 1.0
"""Trust in a source that was never observed, and the weight of this guess in expected hits."""

TRUST_MEMORY = 0.99
"""Factor that a source's counts are multiplied by at each position, so that old ones fade."""

# ------------------------------------------------------------------------------------------- free sources

IDLE_QUERY_SHARE = 0.05
"""Fraction of plain steps' time that may be spent on querying free sources (those that need no forward, such as prompt
lookup) while no draft pays."""

PAUSE_STEPS = 8
"""Consecutive plain steps before querying pauses, and the longest pause in steps."""

# ------------------------------------------------------------------------------------------- draft heads

HEAD_SMOOTHING = 0.05
"""Weight of the newest step in moving averages of gains, times and trust."""

FASTER_SMOOTHING = 0.3
"""Weight of a time below the average (higher, because noise and first calls only make times longer)."""

FIRST_TRIALS = 3
"""Number of first queries of each depth of a head, made to measure its cost."""

MIN_PAUSE, MAX_PAUSE = 8, 256
"""Steps before a depth that does not pay is tried again; the pause doubles each time it still does not."""

TRIAL_SHARE = 0.0125
"""Fraction of the time that trials may take while no depth pays; it limits the doubling. With 1 % a head that became
useful again was noticed after several hundred steps, with 3 % a useless head cost 4 %."""

STALE_WEIGHT = 0.4
"""Largest weight of the first step after a pause, when the text may have changed."""

PRIOR_GAIN = 1.5
"""Tokens per row and step that a good head adds if nothing else is expected. If even that would not pay, the first
trials are skipped."""

SATURATED_TOKENS = 8.0
"""Expected tokens per row from which on a head is assumed to add none."""
