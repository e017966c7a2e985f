"""The tuned numbers of the policy that decides how much to draft, each with its meaning or the reason for its value.

*Width*: nodes per row of a verified tree, root included. *Plain step*: a step of width 1, which drafts nothing.
*Source*: a drafter whose drafts are merged with others. *Free sources* need no forward (such as prompt lookup);
*heads* need one per level. *Trust*: the factor by which a source's probabilities are multiplied.

Sensitivity was measured in the simulated scenarios of `tests/test_policy.py` (`benchmarks/policy_constants.py`; raw
rows in `benchmarks/results/policy_constants.json`). Halving or doubling a constant changes the mean speed-up by less
than 1 %, except `TRUST_MEMORY` (-22 % if nothing is ever forgotten, -9 % if half is forgotten at each position),
`RETRY_STEPS` (-4 % if halved), `INITIAL_TRUST` and `TRUST_WEIGHT` (-4 % if doubled), all of them because a source that
becomes useful is noticed later, and `HEAD_SMOOTHING` (-2 % if halved).
"""

from __future__ import annotations

# ------------------------------------------------------------------------------------------- cost of a step

MEASURED_WIDTHS = (1, 2, 4, 8, 16, 32, 64)
"""Widths (nodes per row) whose cost is learned or measured, up to the largest width needed, which is added; costs
between them are interpolated."""

EXPECTED_NODE_COST = {"cpu": 0.06, "accelerator": 0.005}
"""Seconds of one more node relative to a plain step of one row, assumed until steps have been timed. CPUs took 0.04 to
0.1, the higher values for many nodes with the CPU kernels. GPUs take about as long for dozens of nodes as for one."""

MIN_TRIAL_WIDTH, CHEAP_TREES = 8, 1.5
"""Width up to which the first trees may grow; wider ones have at most twice the nodes of any step so far, because
neither their cost nor their source is known. Unlimited if the widest step is expected to take less than the second
number of plain steps."""

FIRST_STEPS = 3
"""Steps of a width that count more than later ones: those faster than expected fully, because noise only makes a step
slower, others up to half."""

TIMED_ROUNDS = 5
"""Default number of timed forwards per tree size, used while no user waits (`search_tree`); the median is reported."""

QUICK_ROUNDS = 3
"""Timed forwards per width in `warmup()`; the fastest is used, because noise only makes a forward slower."""

MEASURED_CONTEXT = 512
"""Maximum context, in tokens, of the forwards timed for `StepCosts`; real steps correct it for longer contexts."""

MAX_MEASURED_NODES = 128
"""Maximum nodes of all rows together in a step whose cost `StepCosts` has; widths up to `MIN_MEASURED_WIDTH` may
exceed it."""

MIN_MEASURED_WIDTH = 4
"""Width up to which costs are known for every batch size."""

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
"""A width that was unused for this many steps is assumed to cost 63 % less, so that it is tried and a bad measurement
corrected. A width that is 10 % slower than the best one is tried every 30 steps, one that takes twice as long every
200; this wastes less than 0.5 %."""

# ------------------------------------------------------------------------------------------- drafting or not

STRETCH_STEPS = 8
"""Steps of a stretch, after which drafting and plain decoding are compared; also the first pause of drafting."""

RETRIAL_STEPS = 4
"""Steps of a stretch of drafting after it has lost."""

MAX_PLAIN_STEPS = 64
"""Longest pause of drafting, in steps, while plain decoding wins. A stretch of `RETRIAL_STEPS` that takes 30 % longer
for each token then costs 2 %."""

ARM_SMOOTHING = 0.15
"""Minimum weight of the newest stretch in the average of an arm's gain (higher at first, see `ArmGains.learn`)."""

ARM_MARGIN = 0.03
"""Drafting continues if it loses less than this: text that repeats may begin at any time."""

CLEAR_GAIN, PLAIN_TRIAL_STEPS = 1.15, 256
"""If drafting gains less than the first over plain decoding, a stretch of plain decoding is tried once per this many
steps, which costs at most 0.5 %."""

# ------------------------------------------------------------------------------------------- how wide a tree is

MIN_PATH_PROBABILITY = 0.01
"""Nodes with a lower estimated path probability are left out of a merged tree."""

SLOW_ROW_POWER = 4
"""Exponent p of `mean(tokens ** -p) ** (-1 / p)`, the mean of expected tokens over rows (1: harmonic). A high value
favours the rows with the fewest tokens, because a batch ends with its slowest row."""

MIN_BATCH_GAIN = 1.1
"""Minimum expected speed-up over a plain step for drafting with several rows, because estimates are uncertain."""


INITIAL_TRUST, TRUST_WEIGHT = 1.0, 1.0
"""Trust in a source that was never observed, and the weight of this guess (in expected hits, see `LearnedStats`). For
one class of probabilities, the guess is the trust in the source's other classes, with the same weight."""

TRUST_CLASSES = (0.3, 0.6, 0.85)
"""Bounds of the classes of probabilities that have a trust each: long repetitions, to which prompt lookup gives 0.95
per token, may be wrong in a text whose short ones are right, and would waste many nodes each time."""

TRUST_MEMORY = 0.99
"""Fraction of a source's counts of hits and expected hits that is kept at each new position."""

FADED_HITS = 0.5
"""Fraction of a source's counts that is kept when the target's weights change."""

# ------------------------------------------------------------------------------------------- free sources

IDLE_QUERY_SHARE = 0.05
"""Fraction of plain steps' time that may be spent on querying free sources while no draft pays."""

PAUSE_STEPS = 8
"""Querying pauses once more than this number of consecutive steps were plain; also the maximum length of a pause in
steps."""

# ------------------------------------------------------------------------------------------- draft heads

HEAD_SMOOTHING = 0.05
"""Weight of the newest step in moving averages of gains and times (higher at first, see `QueryStats.learn`)."""

FASTER_SMOOTHING = 0.3
"""Minimum weight of a time below its moving average (higher, because noise and first calls only make times longer)."""

FIRST_TRIALS = 3
"""Number of queries of a head to each depth that are made at first to measure its gain and cost."""

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

PRIOR_GAIN = 1.5
"""Assumed gain of an unknown head, in accepted tokens per row and step, if none are expected from the free sources. If
even that would not pay, the first trials are skipped."""

SATURATED_TOKENS = 8.0
"""If at least this number of accepted tokens per row is expected from the free sources, an unknown head is assumed to
add none. Also the start of the last class of `_gain_class`, in tokens per row."""
