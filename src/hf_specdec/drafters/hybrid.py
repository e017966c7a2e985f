"""Hybrid drafting: one tree of what several drafters would draft, cut where a further node no longer pays.

Sources that can be asked edge by edge (`CandidateSession`) cost next to nothing and are always heard; a head costs a
forward per level, and is asked where that has paid so far. Every edge is worth what edges of its class have been worth
(`calibration.py`); the tree takes the likeliest nodes (`candidates.py`) and is as wide as pays by the costs of a step
(`Budget.costs`), down to a plain step. All of it is counted whether or not a source's drafts were taken, so a text
that changes its nature brings back what had stopped paying.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from math import log
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.config import SpeculativeConfig
from hf_specdec.control.head_schedule import SMOOTHING, HeadSchedule, QueryStats
from hf_specdec.drafters.base import CandidateSession, DraftContext, Drafter, DraftSession, Needs
from hf_specdec.drafters.calibration import Calibration
from hf_specdec.drafters.candidates import (
    CachedCandidates,
    Candidates,
    Merged,
    StopRule,
    Width,
    best_width,
    merge,
)
from hf_specdec.drafters.foreign import limits_of, start_session
from hf_specdec.drafters.queries import Answer, Queries, Source
from hf_specdec.errors import InvalidConfigError
from hf_specdec.host_sync import read, upload
from hf_specdec.trees.draft import Budget, Draft
from hf_specdec.trees.tree import stack_trees
from hf_specdec.verification.step import Step, UnreadStep
from hf_specdec.verification.target import Target

MAX_NODES = 64
"""Of the merged tree, root included, where the config names no other number."""
HEARING = 0.05
"""Share of plain steps' time in which sources are heard while nothing they say pays."""
PATIENCE = 8
"""Plain steps in a row before which they do not rest."""
LONGEST_REST = 8
"""Steps after which they are heard again in any case."""
MAX_STEPS = 48
MAX_CHILDREN = 8
ASKED_NODES = 32
"""Nodes that a head is asked for; the merged tree takes the best of them."""

FIRST_DRAFTS = (10.0, 5.0)
"""Expected and accepted drafts with which a model begins: what no text has shown yet is half believed."""


class LearnedStats:
    """What merged drafting has learned with a model: kept across calls, the answers do not depend on it.

    Attributes:
        calibration: How often edges come true.
        asking: When to ask a source, by its name and the number of rows.
    """

    def __init__(self) -> None:
        self.calibration = Calibration()
        self.asking: dict[tuple[str, int], HeadSchedule] = {}
        self._came: dict[int, tuple[float, float]] = {}  # expected and accepted drafts, by the number of rows

    def state_dict(self) -> dict[str, Any]:
        """A copy of all of it."""
        return copy.deepcopy(vars(self))

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Know what a copy tells, for whoever shares this object; None is nothing."""
        vars(self).update(copy.deepcopy(state) if state is not None else vars(LearnedStats()))

    def trust(self, rows: int) -> float:
        """Of the tokens that trees of so many rows were expected to bring, the share that came."""
        expected, accepted = self._came.get(rows, FIRST_DRAFTS)
        return (accepted + 1) / (expected + 1)

    def count_step(self, rows: int, expected: float, accepted: int) -> None:
        """What a step's trees were expected to bring beyond a token per row, and what they brought."""
        before = self._came.get(rows, FIRST_DRAFTS)
        self._came[rows] = ((1 - SMOOTHING) * before[0] + expected, (1 - SMOOTHING) * before[1] + accepted)


class HybridDrafter(Drafter):
    """Merges the drafts of several drafters. Takes any model that its parts take.

    Config fields: `methods` names the parts (default: what is loaded, `prompt_lookup` and `token_recycling`),
    `num_draft_tokens` (default 64), `num_steps` (48) and `top_k` (8) bound the merged tree.

    Args:
        parts: Drafters by name.
        experience: What was learned before; None starts anew.
    """

    method = "hybrid"

    def __init__(self, parts: Mapping[str, Drafter], experience: LearnedStats | None = None) -> None:
        if not parts:
            raise InvalidConfigError("A hybrid drafter needs at least one part, got none.", "Name some in `methods`.")
        self._parts, self.experience = dict(parts), experience or LearnedStats()

    def __repr__(self) -> str:
        return f"HybridDrafter({', '.join(self._parts)})"

    @property
    def parts(self) -> tuple[Drafter, ...]:
        """The drafters that are merged."""
        return tuple(self._parts.values())

    def state_dict(self) -> Any:
        """See `Drafter.state_dict`."""
        return self.experience.state_dict(), {name: part.state_dict() for name, part in self._parts.items()}

    def load_state_dict(self, state: Any) -> None:
        """See `Drafter.load_state_dict`."""
        experience, learned = state or (None, dict.fromkeys(self._parts))
        self.experience.load_state_dict(experience)
        for name, part in self._parts.items():
            part.load_state_dict(learned[name])

    def with_parts(self, change: Callable[[Drafter], Drafter]) -> HybridDrafter:
        """The same drafter, its experience shared, with other forms of its parts."""
        return HybridDrafter({name: change(part) for name, part in self._parts.items()}, self.experience)

    @property
    def needs(self) -> Needs:  # type: ignore[override]
        """What any of the parts reads."""
        layers = dict.fromkeys(layer for part in self.parts for layer in part.needs.feature_layers)
        return Needs(tuple(layers), any(part.needs.prompt_logits for part in self.parts))

    def bind(self, model: PreTrainedModel) -> None:
        """Bind every part."""
        for part in self.parts:
            part.bind(model)

    def limits(self, config: SpeculativeConfig) -> Budget:
        """The merged tree at its largest."""
        if config.tree is not None:
            raise InvalidConfigError(
                f"The tree of {self.method!r} follows from its parts, got tree={config.tree!r}.",
                "Set num_draft_tokens, num_steps or top_k, or name one method.",
            )
        for name, part in self._parts.items():  # what one of them refuses is refused before any work
            limits_of(part, _part_config(part, name), name)
        num_nodes = config.num_draft_tokens or MAX_NODES
        num_steps = min(config.num_steps or MAX_STEPS, max(num_nodes - 1, 1))
        return Budget(num_nodes, num_steps, config.top_k or MAX_CHILDREN)

    def start(self, target: Target, context: DraftContext, config: SpeculativeConfig) -> DraftSession:
        """A session over sessions of the parts."""
        sources = []
        for name, part in self._parts.items():
            part_config = _part_config(part, name)
            session = start_session(part, target, context, part_config, name)
            sources.append(Source(name, session, limits_of(part, part_config, name)))
        return _HybridSession(sources, self.experience, context)


def _part_config(part: Drafter, name: str) -> SpeculativeConfig:
    """A part's own settings, with more candidates where it takes the number."""
    try:
        wide = SpeculativeConfig(part.method, num_draft_tokens=ASKED_NODES)
        limits_of(part, wide, name)
    except InvalidConfigError:  # its tree is given
        return SpeculativeConfig(part.method)
    return wide


class _HybridSession(DraftSession):
    def __init__(self, sources: Sequence[Source], experience: LearnedStats, context: DraftContext) -> None:
        self._sources, self._experience = sources, experience
        self._roots = context.roots
        self._going = list(range(len(context.roots)))  # rows that have not ended
        self._tokens = [root for (root,) in read(context.roots[:, None])[0]] if sources else []
        self._heard: dict[str, list[Candidates]] = {}  # of the sources that were heard or asked in this step, by row
        self._plain_steps = 0  # in a row, in which all were heard
        self._resting = 0  # plain steps to come, in which nobody is heard
        self._free_seconds = 0.0  # of hearing and telling the free sources, a moving average
        self._launches = context.launches
        self._without: Width | None = None  # what this step expects without heads
        self._queries = Queries(context.roots.device)
        self._asked: list[
            tuple[QueryStats, Width, Width]
        ] = []  # whose worth this step will show: without it, and with it
        self._expected: float | None = None  # tokens of this step's tree beyond one per row, before trust
        self._expected_drafts, self._accepted_drafts = 0.0, 0

    # ------------------------------------------------------------------------------------------- proposing

    def propose(self, budget: Budget) -> Draft:
        if self._resting and budget.costs is not None:
            self._resting, self._expected = self._resting - 1, None
            return Draft.plain(self._roots)
        begin = time.perf_counter()
        trees = self._merge(budget, self._free_seconds)
        heard = time.perf_counter() - begin
        width = self._without = self._width(trees, budget, self._free_seconds)
        for source in self._sources:
            if source.is_free:
                continue
            answer = self._answer(source, budget, width)
            if answer is None:
                continue
            self._heard[source.name] = list(answer.found)
            source.asked, begin = source.asked + 1, time.perf_counter()
            spent, worth = width.seconds - self._cost(budget, width), answer.worth
            trees = self._merge(budget, spent + (answer.seconds if answer.usual else worth.seconds))
            seconds = answer.seconds + time.perf_counter() - begin
            source.seconds += seconds
            if not answer.usual:
                seconds = worth.seconds if worth.asked else 0.0
            wider = self._width(trees, budget, spent + seconds)
            if answer.usual:
                self._asked.append((worth, width, wider))
            width = wider
        self._free_seconds += SMOOTHING * (heard - self._free_seconds) if self._free_seconds else heard
        self._expected = sum(sum(tree.values[1 : width.num_nodes]) for tree in trees)
        self._plain_steps = self._plain_steps + 1 if width.num_nodes == 1 else 0
        if self._plain_steps > PATIENCE and budget.costs is not None:
            self._resting = min(int(self._free_seconds / (HEARING * budget.costs[0])), LONGEST_REST)
        return self._draft(trees, width.num_nodes)

    def _merge(self, budget: Budget, spent: float) -> list[Merged]:
        """The merged tree of every row that goes on; of a single one no further than can pay."""
        prospect = None
        if budget.costs is not None and len(self._going) == 1:
            prospect = StopRule(budget.costs[: budget.num_nodes], spent, self._experience.trust(len(self._tokens)))
        return [
            merge(
                self._tokens[row], self._candidates(row), self._experience.calibration.probability,
                num_nodes=budget.num_nodes, num_steps=budget.num_steps, top_k=budget.top_k, prospect=prospect,
            )
            for row in self._going
        ]  # fmt: skip

    def _candidates(self, row: int) -> list[Candidates]:
        for source in self._sources:
            if isinstance(source.session, CandidateSession) and source.name not in self._heard:
                self._heard[source.name] = list(map(CachedCandidates, source.session.candidates))
        return [heard[row] for heard in self._heard.values()]

    def _width(self, trees: Sequence[Merged], budget: Budget, spent: float) -> Width:
        if budget.costs is None:
            return Width(budget.num_nodes, float(len(trees)), float(len(trees)), 1.0)
        return best_width(trees, budget.costs[: budget.num_nodes], spent, self._experience.trust(len(self._tokens)))

    @staticmethod
    def _cost(budget: Budget, width: Width) -> float:
        return 0.0 if budget.costs is None else budget.costs[width.num_nodes - 1]

    def _asking(self, source: Source, budget: Budget) -> HeadSchedule:
        """What is known about asking a source for batches of this size."""
        key, num_steps = (source.name, len(self._tokens)), min(source.limits.num_steps, budget.num_steps)
        known = self._experience.asking.get(key)
        if known is None or known.options[-1].num_steps != num_steps:
            known = HeadSchedule(num_steps, stops_itself=self._roots.device.type == "cpu")
            others = [asking for (name, _), asking in self._experience.asking.items() if name == source.name]
            if others:
                known.inherit(others[-1])
            self._experience.asking[key] = known
        return known

    def launch(self, step: UnreadStep, budget: Budget) -> Sequence[Tensor]:
        """Let the heads that are expected to pay draft for the next step; their trees are read with this step.

        What the other sources will expect then is not known yet: what they expected in this step stands in for it.
        """
        wanted = list[Tensor]()
        if self._without is None or self._resting:
            return wanted
        for source in self._sources:
            if source.session.can_launch:
                worth = self._chosen(self._asking(source, budget), budget, self._without)
                if worth is not None:
                    wanted += self._queries.launch(source, worth, budget, step)
        return wanted

    def _answer(self, source: Source, budget: Budget, without: Width) -> Answer | None:
        """A head's draft for this step: launched in the last one, or made now if that is expected to pay."""
        if self._launches and source.session.can_launch:
            return self._queries.launched(source)
        asking = self._asking(source, budget)
        worth = self._chosen(asking, budget, without)
        if worth is None:
            return None
        stops = self._roots.device.type == "cpu" and budget.costs is not None
        answer = self._queries.ask(source, worth, budget, asking.level_seconds * without.rate if stops else 0.0)
        if answer.usual:
            asking.time_levels(max(candidates.depth for candidates in answer.found), answer.seconds)
        return answer

    def _chosen(self, asking: HeadSchedule, budget: Budget, without: Width) -> QueryStats | None:
        """The depth for which to query a head; None if querying is not expected to pay."""
        return asking.options[-1] if budget.costs is None else asking.choose(without, len(self._going))

    def _draft(self, trees: Sequence[Merged], num_nodes: int) -> Draft:
        """The first nodes of every tree; rows that have ended draft nothing."""
        if num_nodes == 1:
            return Draft.plain(self._roots)
        rows: list[tuple[list[int], list[int]]] = [([token], [-1]) for token in self._tokens]
        edges, heard = [[0.0] for _ in self._tokens], list(self._heard)
        sources: list[tuple[str, ...]] = [()] * len(rows)
        for row, tree in zip(self._going, trees, strict=True):
            rows[row] = tree.tokens[:num_nodes], tree.parents[:num_nodes]
            edges[row] = [log(edge) for edge in tree.edges[:num_nodes]]
            sources[row] = tuple(heard[source] for source in tree.sources[:num_nodes])
        width = max(map(len, edges))
        if width == 1:
            return Draft.plain(self._roots)
        padded = [row + [0.0] * (width - len(row)) for row in edges]
        told = upload(padded, torch.float32, self._roots.device)
        return Draft(stack_trees(rows, self._roots.device), told, sources=tuple(sources))

    # ------------------------------------------------------------------------------------------- learning

    def observe(self, step: Step) -> None:
        self._queries.receive(step.acceptance.launched or ())
        begin, emitted = time.perf_counter(), step.acceptance.emitted
        for row in self._going:
            self._replay(row, emitted[row])
        self._count(step)
        self._learn_worth(sum(map(len, emitted)), len(self._going))
        for source in self._sources:
            if source.is_free:
                source.session.observe(step)
        self._free_seconds += SMOOTHING * (time.perf_counter() - begin)
        for source in self._sources:
            if not source.is_free:
                source.session.observe(step)
        self._heard, self._roots = {}, step.acceptance.next_token
        self._going = [row for row in self._going if emitted[row]]
        for row in self._going:
            self._tokens[row] = emitted[row][-1]

    def _replay(self, row: int, emitted: Sequence[int]) -> None:
        """Count what every source would have drafted at each position that is now committed."""
        for source in self._candidates(row):
            place = source.start
            for token in emitted:
                for candidate in source.after(place):
                    self._experience.calibration.count(candidate.kind, candidate.token == token)
                place = source.follow(place, token)
                if place is None:
                    break

    def _learn_worth(self, came: int, rows: int) -> None:
        """What came beyond what was expected of the free sources is the asked ones' merit, by what they told."""
        if self._asked:
            before, after = self._asked[0][1].tokens, self._asked[-1][2].tokens
            for worth, without, with_it in self._asked:
                told = with_it.tokens - without.tokens
                share = told / (after - before) if after > before else 1 / len(self._asked)
                worth.learn(without, with_it, share * (came - before), rows)
        self._asked = []

    def _count(self, step: Step) -> None:
        accepted = sum(max(count - 1, 0) for count in step.acceptance.counts)
        if self._expected:
            self._expected_drafts += self._expected
            self._accepted_drafts += accepted
            self._experience.count_step(len(self._tokens), self._expected, accepted)
        self._expected = None

    def close(self) -> None:
        """Close the sessions of the parts."""
        for source in self._sources:
            source.session.close()

    def report(self) -> dict[str, Any]:
        """Who was asked and how often, what the trees were expected to bring, and what they brought."""
        return {
            "asked": {source.name: source.asked for source in self._sources if not source.is_free},
            "asking_seconds": {source.name: source.seconds for source in self._sources if not source.is_free},
            "heard": [source.name for source in self._sources if source.is_free],
            "expected_drafts": self._expected_drafts, "accepted_drafts": self._accepted_drafts,
        }  # fmt: skip
