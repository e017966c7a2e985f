"""What a model and this device are to speculation: trees or chains, what a forward costs, which method pays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_specdec.bench.measuring import measure
from hf_specdec.bench.questions import Question
from hf_specdec.bench.report import summarise
from hf_specdec.control.costs import verify_seconds
from hf_specdec.generation.state import current_facts

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
"""One text that repeats nothing, one that repeats some, one that is copied."""

WIDTHS = (1, 2, 4, 8, 16, 32)
"""Nodes of a forward that is timed."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What was found; plain values."""

    supports_trees: bool  # whether the model verifies trees; else chains
    chain_only_reason: str  # why it does; empty for trees
    uses_packed_attention: bool  # whether its layers attend to trees without copies
    forward_seconds: Mapping[int, float]  # by number of tokens, one row
    speed_up: Mapping[str, float]  # by method, means over the questions, plain is 1
    worst: Mapping[str, float]  # the slowest question
    tau: Mapping[str, float]

    @property
    def best(self) -> str:
        """The method that was fastest on the mean; `"plain"` where none pays."""
        return max(self.speed_up, key=lambda method: self.speed_up[method])


def diagnose(model: Any, tokenizer: Any, methods: Sequence[str], *, max_new_tokens: int = 64) -> Diagnosis:
    """Probe, time and try.

    Args:
        model: An attached model, with a drafter or without.
        tokenizer: Its tokenizer.
        methods: Values of `speculative=` to try, beside plain.
        max_new_tokens: Of each answer.

    Raises:
        UnsupportedModelError: It verifies neither trees nor chains.
    """
    facts = current_facts(model)
    seconds = verify_seconds(model, WIDTHS, context=256, facts=facts)
    rows = list(measure(model, tokenizer, QUESTIONS, methods, max_new_tokens=max_new_tokens))
    overall = {row["method"]: row for row in summarise(rows) if row["category"] == "all"}
    return Diagnosis(
        facts.supports_trees, facts.chain_only_reason, facts.uses_packed_attention, seconds,
        speed_up={method: row["speed_up_mean"] for method, row in overall.items()},
        worst={method: row["speed_up_worst"] for method, row in overall.items()},
        tau={method: row["tau"] for method, row in overall.items()},
    )  # fmt: skip
