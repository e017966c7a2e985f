"""Statistics of one speculative `generate()` call and records of its steps; filled by `generation/decode.py`."""

from __future__ import annotations

import html
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from hf_specdec.reporting.palette import PALETTE, Theme, drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Stage = Literal["prefill", "draft", "verify", "accept", "commit", "total"]

EAGER = "eager"
"""Value of `SpeculationStats.forwards` if the model's own modules ran."""


SHOWN_DEPTHS = 6
"""Depths of `acceptance_by_depth` that `repr` shows, so that it fits a screen: lookup accepts up to 50 tokens."""


SHOWN_BARS = 8
"""Depths of `acceptance_by_depth` that the table of notebooks shows."""


def shown_tau(tau: float) -> str:
    """Format tau with two decimals, or as a dash if it is 0 because no target forward was counted."""
    return f"{tau:.2f}" if tau else "-"


@dataclass(frozen=True, slots=True)
class TracedRow:
    """Record of one sequence of the batch in one step.

    All lists except `path` and `emitted` have one entry per tree node, the root first. `emitted[i]` follows node
    `path[i]`. A sequence that has ended emits nothing, or padding if all rows must emit equally many tokens.

    Args:
        tokens: Token ids of the nodes.
        parents: Index of the parent of each node; -1 for the root and for padding.
        draft_probs: Probability of each node given its parent, by the drafter; 1 for the root. None if unknown.
        target_probs: The same by the target, before logits processors; 1 for root and padding.
        choices: The target's most likely token after each node, before logits processors.
        sources: Name of the drafter that proposed each node; of no meaning for root and padding.
        path: The root, then the accepted nodes.
        emitted: Accepted drafted tokens, then the correction or bonus token unless the row ended before it.
    """

    tokens: list[int]
    parents: list[int]
    draft_probs: list[float] | None
    target_probs: list[float]
    choices: list[int]
    sources: list[str]
    path: list[int]
    emitted: list[int]

    @property
    def num_drafted(self) -> int:
        """Number of drafted nodes, without root and padding."""
        return sum(parent >= 0 for parent in self.parents)


@dataclass(frozen=True, slots=True)
class TracedStep:
    """Record of one decoding step, with its start and durations.

    Args:
        rows: One record per sequence of the batch.
        begin: Seconds from the start of the decoding loop, after the prefill, to the step.
        draft_seconds: Duration of drafting, without the time that the drafter takes after the step to observe it.
        verify_seconds: Duration of the target's forward.
        rest_seconds: Duration of accepting and committing.
    """

    rows: list[TracedRow]
    begin: float
    draft_seconds: float
    verify_seconds: float
    rest_seconds: float


@dataclass(slots=True)
class SpeculationStats:
    """Token counts and durations of one speculative `generate()` call.

    Seconds are wall-clock times on the host, except those of drafts launched during acceptance, which are measured on
    the device. On an accelerator stages may overlap, because a stage's work may finish during a later stage; only
    `total_seconds` is exact there.

    Args:
        method: Name of the drafter that ran: `"hybrid"` for `speculative="auto"` if several sources were merged.
        num_target_forwards: Steps, with one verify forward each; the prefill is not counted.
        num_generated_tokens: Emitted tokens of all rows, including the first token of each, which the prefill emits.
        num_drafted_tokens: Verified nodes of all unfinished rows, without roots and padding.
        accepted_per_step: Per row, the number of tokens that each target forward emitted until the row ended:
            accepted drafted tokens and, unless the row ended before it, the correction or bonus token.
        control: How the tree size was chosen: name and decisions of the controller, and reports of the drafter.
        trace: Records of all steps if `SpeculativeConfig(trace=True)`, else empty.
        forwards: How the verify forwards ran: `"eager"` by the model's own modules, as in plain `generate()`; or
            `"kernels"`, `"inductor"` or `"cuda_graph"`, see `SpeculativeConfig.compile`.
        prefill_seconds: Seconds of reading the prompt.
        draft_seconds: Seconds of drafting.
        verify_seconds: Seconds of the target's forwards.
        accept_seconds: Seconds of choosing tokens.
        commit_seconds: Seconds of moving accepted keys and values.
        total_seconds: Time of prefill and decoding, without preparation (checks, compilation, cost measurements).
    """

    method: str = ""
    num_target_forwards: int = 0
    num_generated_tokens: int = 0
    num_drafted_tokens: int = 0
    accepted_per_step: list[list[int]] = field(default_factory=list)
    control: dict[str, Any] = field(default_factory=dict)
    trace: list[TracedStep] = field(default_factory=list, repr=False)
    forwards: str = EAGER
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    accept_seconds: float = 0.0
    commit_seconds: float = 0.0
    total_seconds: float = 0.0

    @contextmanager
    def time(self, stage: Stage) -> Iterator[None]:
        """Context manager that adds the wall-clock seconds of its block to a stage."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            name = f"{stage}_seconds"
            setattr(self, name, getattr(self, name) + time.perf_counter() - begin)

    def move_seconds(self, seconds: float, source: str, target: str) -> None:
        """Subtract seconds from the stage `source` and add them to the stage `target`."""
        for stage, change in ((source, -seconds), (target, seconds)):
            setattr(self, f"{stage}_seconds", getattr(self, f"{stage}_seconds") + change)

    @property
    def stage_seconds(self) -> tuple[float, float, float]:
        """Seconds spent so far on drafting, on verifying, and on accepting and committing together."""
        return self.draft_seconds, self.verify_seconds, self.accept_seconds + self.commit_seconds

    def add_step(self, emitted: Iterable[int], drafted: Iterable[int]) -> None:
        """Count one target forward, and the tokens that it emitted and verified.

        Args:
            emitted: Number of emitted tokens per row; 0 for rows that had ended before.
            drafted: Number of verified nodes per row, without root and padding.
        """
        self.num_target_forwards += 1
        for row, (count, nodes) in enumerate(zip(emitted, drafted, strict=True)):
            if count:
                self.accepted_per_step[row].append(count)
                self.num_drafted_tokens += nodes

    @property
    def mean_accepted_length(self) -> float:
        """Tau: mean number of tokens that a target forward emits per row.

        Includes the correction or bonus token, excludes the first token, which the prefill emits. 1.0 is plain
        decoding; 0.0 means that no forward ran. The EAGLE papers and Spec-Bench count in the same way.
        """
        steps = [length for row in self.accepted_per_step for length in row]
        return sum(steps) / len(steps) if steps else 0.0

    @property
    def tau(self) -> float:
        """The same as `mean_accepted_length`."""
        return self.mean_accepted_length

    @property
    def acceptance_by_depth(self) -> list[float]:
        """Share of target forwards that accepted at least 1, 2, ... drafted tokens; the shares sum to tau - 1.

        Empty if no drafted token was accepted. Example: `accepted_per_step` [[3, 1]] gives [0.5, 0.5].
        """
        steps = [length for row in self.accepted_per_step for length in row]
        return [sum(length > depth for length in steps) / len(steps) for depth in range(1, max(steps, default=1))]

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens of all rows per second of `total_seconds`; 0.0 before the call has ended."""
        return self.num_generated_tokens / self.total_seconds if self.total_seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return all fields and derived values as JSON-serialisable values."""
        derived = ("mean_accepted_length", "acceptance_by_depth", "tokens_per_second")
        return {**asdict(self), **{name: getattr(self, name) for name in derived}}

    def __repr__(self) -> str:
        shares = self.acceptance_by_depth
        depths = " ".join(f"{share:.2f}" for share in shares[:SHOWN_DEPTHS]) or "-"
        depths += " ..." if len(shares) > SHOWN_DEPTHS else ""
        return (
            f"SpeculationStats({self.method}: {self.num_generated_tokens} tokens in {self.num_target_forwards} target "
            f"forwards, tau {shown_tau(self.mean_accepted_length)}, {self.tokens_per_second:.1f} tokens/s; "
            f"acceptance by depth {depths}; draft {self.draft_seconds:.2f} s, verify {self.verify_seconds:.2f} s, "
            f"accept {self.accept_seconds:.2f} s of {self.total_seconds:.2f} s)"
        )

    def _repr_html_(self) -> str:
        """Return an HTML table for notebooks: counts, acceptance by depth, time per stage."""
        shares = self.acceptance_by_depth
        stages = {"prompt": self.prefill_seconds, "draft": self.draft_seconds, "verify": self.verify_seconds,
                  "accept and commit": self.accept_seconds + self.commit_seconds}  # fmt: skip
        whole = self.total_seconds or 1.0
        deep = "".join(_bar(f"{share:.0%}", share, PALETTE[0]) for share in shares[:SHOWN_BARS]) or "-"
        deep += "..." if len(shares) > SHOWN_BARS else ""
        spent = "".join(
            _bar(f"{name} {seconds:.2f} s", seconds / whole, PALETTE[number])
            for number, (name, seconds) in enumerate(stages.items())
        )
        rows = {
            "tokens": f"{self.num_generated_tokens} in {self.num_target_forwards} target forwards",
            "tau": shown_tau(self.mean_accepted_length),
            "tokens/s": f"{self.tokens_per_second:.1f}, {self.total_seconds:.2f} s in total",
            "accepted, by depth": deep,
            "time": spent,
        }
        cell = "text-align:left;vertical-align:top"
        body = "".join(
            f'<tr><th style="{cell}">{name}</th><td style="{cell}">{value}</td></tr>' for name, value in rows.items()
        )
        return f"<table><caption>{html.escape(self.method)}</caption>{body}</table>"

    def plot(self, *, theme: Theme = "light") -> Axes:
        """Plot a histogram of the tokens per target forward. Needs matplotlib (`pip install hf-specdec[notebooks]`).

        Args:
            theme: `"light"` or `"dark"`.

        Returns:
            The matplotlib axes.
        """
        steps = [length for row in self.accepted_per_step for length in row]
        with drawing(theme) as (pyplot, _):
            axes: Axes = pyplot.figure(figsize=(5, 3)).gca()
            axes.hist(steps, bins=[edge - 0.5 for edge in range(1, max(steps, default=1) + 2)], rwidth=0.9)
            axes.set_xlabel("tokens per target forward")
            axes.set_ylabel("forwards")
            axes.locator_params(axis="both", integer=True, min_n_ticks=1)
            axes.set_title(f"{self.method}: tau = {shown_tau(self.mean_accepted_length)}")
        return axes


def _bar(label: str, share: float, color: str) -> str:
    """Return a line of HTML: a bar, whose length is proportional to `share`, and a label."""
    bar = f"display:inline-block;height:0.7em;width:{max(share, 0.0) * 12:.2f}em;background:{color};margin-right:0.4em"
    return f'<div style="white-space:nowrap"><span style="{bar}"></span>{html.escape(label)}</div>'
