"""Diagnose a model on this device: whether it can verify trees, how long a forward takes, which method is fastest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PreTrainedModel

from hf_specdec.bench.questions import Question
from hf_specdec.bench.summary import summarise
from hf_specdec.bench.timing import measure
from hf_specdec.control import costs
from hf_specdec.generation.model_programs import current_program
from hf_specdec.generation.state import current_facts
from hf_specdec.reporting.stats import EAGER
from hf_specdec.validation import Rule, require_integer

QUESTIONS = (
    Question("list", "prose", ("Give me five tips for sleeping better, with one sentence about each.",)),
    Question("sum", "reasoning", (
        "A train leaves at 9:40 and arrives at 12:15. It stops for 5 minutes at each of 4 stations. How long does it "
        "move? Think step by step.",
    )),
    Question("copy", "copying", (
        "Correct the spelling and repeat the whole text: The libary was build in 1890 by the town's first mayor. It "
        "had three rooms, a garden and a small tower, and every child of the town could lend two books a week. In "
        "the first winter the librarian counted nine hundred readers. The tower was closed after a storm in 1921.",
    )),
)  # fmt: skip
"""Questions of `diagnose`: the first answer repeats little, the second some phrases, the third copies the prompt."""

NEARLY = 0.95
"""Share of the best mean speed-up from which `"auto"` is recommended: it adapts to other texts, and three questions
do not show smaller differences."""

REPORTED_WIDTHS = (1, 2, 4, 8, 16, 32)
"""Numbers of tree nodes for which the verify forward is timed."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What a model can verify on this device, and how fast, as measured by `diagnose`."""

    supports_trees: bool  # otherwise only chains can be verified
    chain_only_reason: str  # empty if trees are supported
    uses_packed_attention: bool  # whether trees are verified without copying cached keys and values
    forward_seconds: Mapping[int, float]  # of an eager forward after 256 tokens, by number of nodes; batch size 1
    speed_up: Mapping[str, float]  # by method: ratio to plain decoding, mean over the questions
    worst: Mapping[str, float]  # by method: smallest speed-up of a question
    tau: Mapping[str, float]  # by method: tokens per target forward, mean over the questions
    forwards: Mapping[str, str] = field(default_factory=dict)  # by method, see `SpeculationStats.forwards`
    compiled_seconds: Mapping[int, float] = field(default_factory=dict)  # of `compiled`; empty without it

    @property
    def best(self) -> str:
        """Method with the highest mean speed-up, possibly `"plain"`; `"auto"` if it is at most 5% slower."""
        best = max(self.speed_up, key=lambda method: self.speed_up[method])
        if best != "plain" and self.speed_up.get("auto", 0.0) >= NEARLY * self.speed_up[best]:
            return "auto"
        return best

    @property
    def compiled(self) -> str:
        """How the compiled or captured forwards of the last such method run; empty if all methods ran eagerly."""
        return next((how for how in reversed([*self.forwards.values()]) if how not in ("", EAGER)), "")

    @property
    def gain_of_forwards(self) -> float:
        """How many times as fast a forward of one token is with `compiled`, thus without drafting; 1.0 without it."""
        return self.forward_seconds[1] / self.compiled_seconds[1] if self.compiled_seconds else 1.0


def diagnose(model: Any, tokenizer: Any, methods: Sequence[str], *, max_new_tokens: int = 64) -> Diagnosis:
    """Check what a model can verify, time its verify forward, and measure methods on three questions.

    Args:
        model: The target, with speculation attached and its drafters loaded.
        tokenizer: Its tokenizer.
        methods: Method names, as for `measure`; plain decoding is always measured.
        max_new_tokens: Length limit of each answer.
    """
    facts = current_facts(model)
    rows = list(measure(model, tokenizer, QUESTIONS, methods, max_new_tokens=max_new_tokens))
    overall = {row["method"]: row for row in summarise(rows) if row["category"] == "all"}
    eager = costs.time_forwards(model, REPORTED_WIDTHS, context=256, facts=facts)
    found = Diagnosis(
        facts.supports_trees, facts.chain_only_reason, facts.uses_packed_attention, eager,
        speed_up={method: row["speed_up_mean"] for method, row in overall.items()},
        worst={method: row["speed_up_worst"] for method, row in overall.items()},
        tau={method: row["tau"] for method, row in overall.items()},
        forwards={row.method: row.forwards or EAGER for row in rows},
    )  # fmt: skip
    mode: Any = found.compiled  # an `ExecutionMode`
    runner = current_program(model, facts, frozenset(), mode, requested=False) if mode else None
    if runner is None:
        return found
    compiled = costs.time_forwards(model, REPORTED_WIDTHS, context=256, facts=facts, runner=runner)
    return replace(found, compiled_seconds=compiled)


def verify_seconds(
    model: PreTrainedModel, sizes: Sequence[int], *, context: int = 256, rows: int = 1
) -> dict[int, float]:
    """Return the median seconds of one forward of the model, by the number of drafted nodes that it verifies.

    The forwards are those of generation, with the same cache and masks, neither compiled nor captured. The trees are
    binary, or chains if the model supports no trees. Time on an idle machine.

    Args:
        model: The model; speculation need not be attached.
        sizes: Numbers of nodes, the root included: 1 is a plain step.
        context: Tokens of the text before the tree.
        rows: Batch size.

    Returns:
        Seconds by number of nodes. A step with n nodes pays if it emits more than `seconds[n] / seconds[1]` tokens;
        drafting itself takes time as well.

    Raises:
        InvalidConfigError: `sizes` is empty, or a number is below 1.
        UnsupportedModelError: The model can verify neither trees nor chains.

    Example:
        ```python
        seconds = verify_seconds(model, [1, 4, 16])
        print(f"16 nodes pay above {seconds[16] / seconds[1]:.2f} tokens per step")
        ```
    """
    Rule("a sequence of at least one number", bool).check("sizes", list(sizes))
    for size in sizes:
        require_integer("sizes", size, 1)
    require_integer("context", context, 1)
    require_integer("rows", rows, 1)
    return costs.time_forwards(model, sizes, context, rows=rows)
