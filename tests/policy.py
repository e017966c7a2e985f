"""A world without a model: a text, sources that foresee as much of it as a scenario says, and a clock that they move.

Everything that decides how much is drafted is the product's own (`HybridDrafter`, `CostModelController`, `StepCosts`);
everything that costs time or knows the text is made up. A scenario runs calls and reads what every step did.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, log
from typing import Any

import pytest
import torch

from hf_specdec.acceptance.accepted import Accepted
from hf_specdec.config import SpeculativeConfig
from hf_specdec.control.controller import CostModelController
from hf_specdec.control.costs import StepCosts
from hf_specdec.drafters.base import Candidate, Candidates, CandidateSession, DraftContext, Drafter, DraftSession
from hf_specdec.drafters.hybrid import HybridDrafter
from hf_specdec.trees.draft import Budget, Draft
from hf_specdec.trees.tree import TokenTree
from hf_specdec.verification.memory import note_one_time_work, one_time_work
from hf_specdec.verification.step import Step, StepSeconds

WRONG = 10**6
"""Tokens from here on occur in no text."""
Accuracy = Callable[[int], float]
"""Probability that a source is right about a token, by the number of the step in which it is asked."""


Path = tuple[int, ...]


class Table(Candidates):
    """A source that knows the probability of every path."""

    start: Path = ()

    def __init__(self, edges: Mapping[Path, float]) -> None:
        self.edges = dict(edges)

    def after(self, place: Path) -> Sequence[Candidate]:
        below = [path for path in self.edges if path[:-1] == place and len(path) == len(place) + 1]
        return [Candidate(path[-1], self.edges[path]) for path in sorted(below, key=lambda p: -self.edges[p])]

    def follow(self, place: Path, token: int) -> Path | None:
        longer = (*place, token)
        return longer if any(path[: len(longer)] == longer for path in self.edges) else None


def token_at(row: int, position: int) -> int:
    """The text's token at a position of a row."""
    return 1 + (row * 7919 + position * 104729) % 50021


class Clock:
    """Time that passes only if a scenario says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)


@dataclass
class Call:
    """Where one call is: the sources see no more of it than drafters see of a real one."""

    positions: list[int]  # of each row's root
    steps: int = 0  # taken in the whole scenario


@dataclass
class Source:
    """How well a source foresees the text, and what it says of itself.

    Args:
        accuracy: That its next token is right.
        says: The probability that it gives each of its tokens.
        seconds: That a level of its draft takes; a source without any is free and is heard candidate by candidate.
        depth: Levels that it drafts at most.
    """

    accuracy: Accuracy
    says: float = 0.8
    seconds: float = 0.0
    depth: int = 6
    seed: int = 0
    look: float = 0.0  # seconds to list the candidates at one place, if it is free
    row_factors: Sequence[float] = ()  # of the accuracy, by row; empty: 1 for all
    asked: list[int] = field(default_factory=list)  # the steps in which it drafted
    records: Mapping[int, float] = field(default_factory=dict)  # seconds that the n-th draft takes once, by n from 1

    def is_right(self, name: str, row: int, position: int, step: int) -> bool:
        factor = self.row_factors[row] if self.row_factors else 1.0
        return random.Random(f"{self.seed} {name} {row} {position}").random() < factor * self.accuracy(step)


class _Foreseen(Candidates):
    """One row's continuation as a source sees it; a place is a position, and whether all before it was right."""

    def __init__(self, name: str, source: Source, row: int, position: int, step: int, clock: Clock) -> None:
        self._name, self._source, self._row, self._step, self._clock = name, source, row, step, clock
        self.start = (position, True)

    def after(self, place: tuple[int, bool]) -> Sequence[Candidate]:
        self._clock.now += self._source.look
        position, on_path = place
        right = on_path and self._source.is_right(self._name, self._row, position, self._step)
        token = token_at(self._row, position + 1) if right else WRONG + position
        return [Candidate(token, self._source.says)]

    def follow(self, place: tuple[int, bool], token: int) -> tuple[int, bool]:
        position, on_path = place
        return position + 1, on_path and token == token_at(self._row, position + 1)


class _FreeSession(CandidateSession):
    def __init__(self, name: str, source: Source, call: Call, clock: Clock) -> None:
        self._name, self._source, self._call, self._clock = name, source, call, clock

    @property
    def candidates(self) -> Sequence[Candidates]:
        call = self._call
        return [
            _Foreseen(self._name, self._source, row, at, call.steps, self._clock)
            for row, at in enumerate(call.positions)
        ]

    def propose(self, budget: Budget) -> Draft:
        raise AssertionError("a free source is heard candidate by candidate")

    def observe(self, step: Step) -> None:
        pass


class _HeadSession(DraftSession):
    """Drafts a chain, level by level, and takes its time for each."""

    def __init__(self, name: str, source: Source, call: Call, clock: Clock) -> None:
        self._name, self._source, self._call, self._clock = name, source, call, clock

    def propose(self, budget: Budget) -> Draft:
        call, source = self._call, self._source
        source.asked.append(call.steps)
        levels, least = 1, budget.min_level_probability / len(call.positions)
        while levels < budget.num_steps and exp(log(source.says) * levels) >= least:
            levels += 1
        self._clock.now += levels * source.seconds
        if len(source.asked) in source.records:
            note_one_time_work()
            self._clock.now += source.records[len(source.asked)]
        rows = []
        for row, begin in enumerate(call.positions):
            tokens, on_path = [token_at(row, begin)], True
            for position in range(begin, begin + levels):
                on_path = on_path and source.is_right(self._name, row, position, call.steps)
                tokens.append(token_at(row, position + 1) if on_path else WRONG + position)
            rows.append(tokens)
        tree = TokenTree(torch.tensor(rows), torch.arange(-1, levels), max_depth=levels)
        return Draft(tree, torch.full(tree.tokens.shape, log(source.says)))

    def observe(self, step: Step) -> None:
        pass


class _Part(Drafter):
    __module__ = "hf_specdec.simulated"  # own drafters are not checked: no target here

    def __init__(self, name: str, source: Source, world: World) -> None:
        self.method, self._source, self._world = name, source, world

    def limits(self, config: SpeculativeConfig) -> Budget:
        return Budget(1 + self._source.depth, self._source.depth, 1)

    def start(self, target: Any, context: DraftContext, config: SpeculativeConfig) -> DraftSession:
        call = self._world.call
        assert call is not None
        if self._source.seconds:
            return _HeadSession(self.method, self._source, call, self._world.clock)
        return _FreeSession(self.method, self._source, call, self._world.clock)


@dataclass(frozen=True, slots=True)
class Taken:
    """One step, as the scenario saw it."""

    width: int  # nodes verified per row
    tokens: int  # emitted in all rows
    seconds: float
    asked: frozenset[str]  # the heads that drafted


class World:
    """A model of which only its times are known.

    Args:
        clock: The scenario's.
        sources: By name; kept, with what was learned of them, from call to call.
        seconds: What a verify forward takes: nodes per row, rows and the number of the step to seconds.
        measured: What the product believes that to be when a call begins: nodes to seconds; None is the truth, and an
            empty mapping means that no step was timed yet.
        records: Seconds that the forward of a step takes once more, to record a graph, by number of the step.
    """

    def __init__(
        self, clock: Clock, sources: Mapping[str, Source], seconds: Callable[[int, int, int], float],
        measured: Mapping[int, float] | None = None, records: Mapping[int, float] | None = None,
    ) -> None:  # fmt: skip
        self.clock, self.sources, self._seconds = clock, dict(sources), seconds
        self.drafter = HybridDrafter({name: _Part(name, source, self) for name, source in sources.items()})
        self._measured, self._costs = measured, dict[int, StepCosts]()
        self.records = records or {}
        self.call: Call | None = None
        self.steps = 0

    def costs(self, rows: int) -> StepCosts:
        """What the product knows of the costs of so many rows, kept from call to call."""
        if rows not in self._costs:
            truth = {width: self._seconds(width, rows, self.steps) for width in (1, 2, 4, 8, 16, 32)}
            if self._measured is not None and not self._measured:
                self._costs[rows] = StepCosts.expected(torch.device("cpu"), rows=rows, widest=32)
            else:
                self._costs[rows] = StepCosts(self._measured or truth)
        return self._costs[rows]

    def generate(self, steps: int, rows: int = 1, ends: Mapping[int, int] | None = None) -> list[Taken]:
        """One call.

        Args:
            steps: Steps that its longest row takes.
            rows: Of the batch.
            ends: Rows that end early, and after how many steps.
        """
        self.call = call = Call([0] * rows, self.steps)
        config = SpeculativeConfig("hybrid")
        roots = torch.tensor([token_at(row, 0) for row in range(rows)])
        controller = CostModelController(self.drafter.limits(config), self.costs(rows))
        context = DraftContext(roots[:, None], None, roots, step_costs=controller.step_costs)
        session = self.drafter.start(None, context, config)  # type: ignore[arg-type]
        taken = []
        for number in range(steps):
            going = [number < (ends or {}).get(row, steps) for row in range(rows)]
            before, noted = self.clock.now, one_time_work()
            asked = {name: len(source.asked) for name, source in self.sources.items()}
            budget = controller.next()
            draft = Draft.plain(roots) if budget.is_plain else session.propose(budget)
            drafted = self.clock.now - before
            width = draft.tree.num_nodes
            verified = self._seconds(width, rows, self.steps) + self.records.get(self.steps, 0.0)
            if self.steps in self.records:
                note_one_time_work()
            self.clock.now += verified
            seconds = StepSeconds(drafted, verified, 0.0, usual=one_time_work() == noted)
            step = Step(draft, None, self._accepted(draft.tree, going), seconds)  # type: ignore[arg-type]
            for row, tokens in enumerate(step.acceptance.emitted):
                call.positions[row] += len(tokens)
            session.observe(step)
            roots = step.acceptance.next_token
            controller.observe(step)
            self.steps += 1
            call.steps = self.steps
            heard = frozenset(name for name, source in self.sources.items() if len(source.asked) > asked[name])
            taken.append(Taken(width, sum(step.acceptance.counts), self.clock.now - before, heard))
        session.close()
        return taken

    def _accepted(self, tree: TokenTree, going: Sequence[bool]) -> Accepted:
        """The longest path of each row that goes on which the text agrees with."""
        assert self.call is not None
        tokens, parents = tree.tokens.tolist(), tree.parents.expand(tree.tokens.shape).tolist()
        paths, emitted = [], []
        for row, begin in enumerate(self.call.positions):
            path, node = [0], 0
            while node is not None:
                wanted = token_at(row, begin + len(path))
                node = next(
                    (n for n, parent in enumerate(parents[row]) if parent == node and tokens[row][n] == wanted), None
                )
                path += [] if node is None else [node]
            path = path if going[row] else []
            paths.append(path)
            emitted.append([token_at(row, begin + 1 + place) for place in range(len(path))])
        width = max(1, *map(len, paths))
        last = [tokens_of[-1] if tokens_of else tokens[row][0] for row, tokens_of in enumerate(emitted)]
        drafted = [sum(parent >= 0 for parent in row) for row in parents]
        return Accepted(
            torch.tensor([[*path, *[-1] * (width - len(path))] for path in paths]),
            torch.tensor([[*row, *[-1] * (width - len(row))] for row in emitted]),
            torch.tensor(last), tuple(map(tuple, paths)), tuple(map(tuple, emitted)), tuple(drafted),
        )  # fmt: skip


def speedup(taken: Sequence[Taken], plain_seconds: float, rows: int = 1) -> float:
    """How many times faster than plain decoding these steps were."""
    return sum(step.tokens for step in taken) / rows * plain_seconds / sum(step.seconds for step in taken)


def share_asked(taken: Sequence[Taken], name: str) -> float:
    """Share of the steps in which a head drafted."""
    return sum(name in step.asked for step in taken) / len(taken)
