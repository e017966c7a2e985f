"""Hybrid drafting: merge the drafts of several drafters into one tree, whose size is chosen by its expected gain.

*Free sources* are drafters that list candidates at almost no cost (`DraftSession.has_candidates`); they are queried in
every step. All others are *heads*: a head costs one forward per level and is queried only if queries have paid in
similar situations (`control/policy.py`). The tree takes the likeliest nodes of all sources (`candidates.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import log
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.acceptance.accepted import Stopwatch
from hf_specdec.config import AUTO, COMBINED, HYBRID, PLAIN, SpeculativeConfig
from hf_specdec.control.policy import HeadSchedule, LearnedStats, MergePolicy, Opening, QueryStats, Width
from hf_specdec.drafters.base import SIZES, Candidates, DraftContext, Drafter, DraftSession, DraftTarget, Needs
from hf_specdec.drafters.candidates import CachedCandidates, DraftedCandidates, MergedTree, merge_sources
from hf_specdec.drafters.checked import checked_limits, start_session
from hf_specdec.drafters.grammar_states import find_grammar
from hf_specdec.drafters.registry import FREE, GRAMMAR, HISTORY, RESERVED, method_named, methods
from hf_specdec.errors import DrafterMismatchError, InvalidConfigError
from hf_specdec.host_sync import read, upload
from hf_specdec.trees.draft import PLAIN_STEP, Budget, Draft
from hf_specdec.verification.features import Window
from hf_specdec.verification.memory import one_time_work, persistent_tensors
from hf_specdec.verification.step import Step

HEAD_NODES = 32
"""Nodes that a head drafts, root included; the merged tree takes the best of them."""
LOG_PROB_UNIT = 2.0**-20
"""Log-probabilities are sent to the host as integer multiples of this, in the same transfer as the tokens."""


class HybridDrafter(Drafter):
    """Merges the drafts of several drafters, its parts. Works with any model that the parts work with.

    Config fields: `methods` names the parts (default: the loaded drafters, `prompt_lookup`, `token_recycling` and
    `grammar`), `num_draft_tokens` (default 64), `num_steps` (48) and `top_k` (8) limit the merged tree. `tree` is
    rejected.

    Args:
        parts: Drafters by name.
        learned: Statistics of earlier calls, updated by this drafter; None starts with empty ones.

    Raises:
        InvalidConfigError: `parts` is empty.
    """

    method = HYBRID
    accepts = SIZES
    tree_from = "its parts: a tree belongs to a single method"
    defaults = Budget(64, 48, 8)

    def __init__(self, parts: Mapping[str, Drafter], learned: LearnedStats | None = None) -> None:
        if not parts:
            raise InvalidConfigError("A hybrid drafter needs at least one part, got none.", "Name some in `methods`.")
        self._parts, self.learned = dict(parts), learned or LearnedStats()

    def __repr__(self) -> str:
        return f"HybridDrafter({', '.join(self._parts)})"

    @property
    def parts(self) -> tuple[Drafter, ...]:
        """The merged drafters."""
        return tuple(self._parts.values())

    def with_parts(self, change: Callable[[Drafter], Drafter]) -> HybridDrafter:
        """Return a drafter of the changed parts that shares this drafter's statistics."""
        return HybridDrafter({name: change(part) for name, part in self._parts.items()}, self.learned)

    def state_dict(self) -> Any:
        """Return a copy of the statistics and of what the parts have learned."""
        return self.learned.state_dict(), {name: part.state_dict() for name, part in self._parts.items()}

    def load_state_dict(self, state: Any) -> None:
        """Restore the statistics and what the parts had learned; None resets both."""
        learned, of_parts = state or (None, dict.fromkeys(self._parts))
        self.learned.load_state_dict(learned)
        for name, part in self._parts.items():
            part.load_state_dict(of_parts[name])

    def fade(self) -> None:
        """Reduce the weight of the statistics."""
        self.learned.fade()

    @property
    def needs(self) -> Needs:  # type: ignore[override]
        """The needs of all parts, and step costs to choose the tree's width."""
        layers = dict.fromkeys(layer for part in self.parts for layer in part.needs.feature_layers)
        return Needs(
            tuple(layers),
            prompt_logits=any(part.needs.prompt_logits for part in self.parts),
            step_costs=True,
            token_ids=any(part.needs.token_ids for part in self.parts),
        )

    @property
    def has_window(self) -> bool:  # type: ignore[override]
        """Whether `draft_window` applies to any part."""
        return any(part.has_window for part in self.parts)

    def feature_window(self, config: SpeculativeConfig) -> Window | None:
        """Return the widest window of the parts that read features; None if one of them reads the whole prompt."""
        windows = [
            part.feature_window(_part_config(part, name, config))
            for name, part in self._parts.items()
            if part.needs.feature_layers
        ]
        known = [window.last for window in windows if window is not None]
        return Window(max(known)) if known and len(known) == len(windows) else None

    def bind(self, model: PreTrainedModel) -> None:
        """Bind every part."""
        for part in self.parts:
            part.bind(model)

    def limits(self, config: SpeculativeConfig) -> Budget:
        """Return the size of the largest merged tree, after checking the limits of every part."""
        for name, part in self._parts.items():  # an invalid part is refused before any work
            checked_limits(part, _part_config(part, name, config), name)
        limits = super().limits(config)
        return replace(limits, num_steps=min(limits.num_steps, max(limits.num_nodes - 1, 1)))

    def start(self, target: DraftTarget, context: DraftContext, config: SpeculativeConfig) -> DraftSession:
        """Start a session of every part, and return one that merges their drafts."""
        sources, deepest = [], self.limits(config).num_steps
        for name, part in self._parts.items():
            if part.method == GRAMMAR and find_grammar(context.processors) is None:
                continue
            part_config = _part_config(part, name, config)
            session = start_session(part, target, context, part_config, name)
            limits = checked_limits(part, part_config, name)
            sources.append(MergedSource(name, session, replace(limits, num_steps=min(limits.num_steps, deepest))))
        return _HybridSession(sources, self.learned, context, traces=config.trace)


def _part_config(part: Drafter, name: str, config: SpeculativeConfig) -> SpeculativeConfig:
    """Return the config for a part, with the window if that applies to it.

    It allows `HEAD_NODES` nodes, or has the defaults if the part rejects `num_draft_tokens`.
    """
    default = SpeculativeConfig(part.method, draft_window=config.draft_window if part.has_window else None)
    try:
        wide = replace(default, num_draft_tokens=HEAD_NODES)
        checked_limits(part, wide, name)
    except InvalidConfigError:  # its tree is fixed
        return default
    return wide


class PlainDrafter(Drafter):
    """Drafts nothing: plain decoding, by the forwards and the loop that drafts are verified with."""

    method = PLAIN
    accepts = ()
    tree_from = "plain decoding: it is the last token alone"
    defaults = PLAIN_STEP

    def start(self, target: DraftTarget, context: DraftContext, config: SpeculativeConfig) -> DraftSession:
        """Return a session that drafts nothing."""
        return _PlainSession(context.roots)


class _PlainSession(DraftSession):
    def __init__(self, roots: Tensor) -> None:
        self._roots = roots

    def propose(self, budget: Budget) -> Draft:
        return Draft.plain(self._roots)

    def observe(self, step: Step) -> None:
        self._roots = step.acceptance.next_token


def choose_drafter(
    config: SpeculativeConfig, model: PreTrainedModel, registered: Mapping[str, Drafter], made: dict[str, Drafter],
    learned: LearnedStats, history: Drafter | None = None,
) -> Drafter:  # fmt: skip
    """Return the drafter that a config names.

    Args:
        config: Its `method` names a registered drafter, a method, or several of them merged (`"auto"`, `"hybrid"`).
            `"auto"` with a `tree` uses the first loaded drafter alone, if any: a tree belongs to one drafter.
            `"plain"` drafts nothing.
        model: The target.
        registered: Drafters of the model by name.
        made: Drafters made earlier for methods without a head, by method; new ones are added.
        learned: Statistics of merged drafting with the model.
        history: Drafter of earlier answers, merged with the others; None if the config uses no history.
    """
    by_method: dict[str, Drafter] = {}
    for drafter in registered.values():
        by_method.setdefault(drafter.method, drafter)
    known = {**by_method, **registered}

    def single(name: str) -> Drafter:
        """Return the registered drafter of this name, else one of this method, else one made without a head."""
        name = method_named(name, known)
        if name in known:
            return known[name]
        row = methods()[name]
        if row.requires is not None:
            part = "a head" if row.heads else row.part
            raise DrafterMismatchError(
                f"speculative={name!r} needs {part}, and none is loaded for this model.", f"First {row.requires}."
            )
        if name not in made:
            with persistent_tensors():
                made[name] = row.make() if row.native is None else row.native(model)
        return made[name]

    name = method_named(config.method, known)
    if history is not None and (name in registered or config.tree is not None or HISTORY in registered):
        other = f"a drafter that is called {HISTORY!r}" if HISTORY in registered else f"a drafter called {name!r}"
        cause = f"tree={config.tree!r}" if config.tree is not None else other
        raise InvalidConfigError(f"`history` cannot be combined with {cause}.", "Drop one of them.")
    if name == PLAIN:
        return PlainDrafter()
    if name not in COMBINED or name in registered:
        return single(name)
    loaded = [own for own, drafter in registered.items() if not drafter.is_combined]
    if name == AUTO and config.tree is not None and loaded:  # a given tree belongs to one drafter
        return single(loaded[0])
    names = config.methods or dict.fromkeys((*loaded, *FREE))
    if any(part in RESERVED or (part in registered and registered[part].is_combined) for part in names):
        raise InvalidConfigError(
            f"`methods` must name single methods that draft, got {list(names)}.", "Leave merged ones and 'plain' out."
        )
    parts = {part: single(part) for part in names}
    return HybridDrafter(parts if history is None else {**parts, HISTORY: history}, learned)


@dataclass(slots=True)
class MergedSource:
    """One part of a hybrid drafter in one generation: its session, its limits, and its queries so far."""

    name: str
    session: DraftSession
    limits: Budget
    num_queries: int = 0
    query_seconds: float = 0.0
    opening: Opening | None = None  # until the first query, if what it takes is known

    def limits_within(self, budget: Budget, stats: QueryStats) -> Budget:
        """Return the budget of a query for a merged tree: a chain if that has `top_k` 1."""
        limits = self.limits.chain if budget.top_k == 1 else self.limits
        return replace(limits, num_steps=min(stats.num_steps, budget.num_steps))


class _Answer(NamedTuple):
    """A head's draft for one step, as candidates to merge."""

    stats: QueryStats  # statistics of the depth that was queried
    candidates: list[DraftedCandidates]  # per row
    seconds: float  # to draft it and read it; device time, without reading, if launched with the last step
    usual: bool  # whether its time is typical: not a first draft, and nothing was captured or compiled


class _HybridSession(DraftSession):
    def __init__(
        self, sources: Sequence[MergedSource], learned: LearnedStats, context: DraftContext, *, traces: bool = False
    ) -> None:
        # only a trace shows the probabilities of drafts; on a CPU they cost nothing
        self._has_probabilities = traces or context.roots.device.type == "cpu"
        self._free = [source for source in sources if source.session.has_candidates]
        self._heads = [source for source in sources if not source.session.has_candidates]
        self._roots = context.roots
        self._active = list(range(len(context.roots)))  # rows that have not ended
        self._tokens = [root for (root,) in read(context.roots[:, None])[0]] if sources else []
        self._candidates: dict[str, Sequence[Candidates]] = {}  # of this step: by source, one per row
        self._launches = context.launches
        self._proposed = False  # whether this step was drafted, not decided to be plain by the controller
        # drafts launched in this step, not read yet, and those launched with the last step, by source
        self._unread: list[tuple[MergedSource, QueryStats, Draft, int, bool, Stopwatch]] = []
        self._launched: dict[str, _Answer] = {}
        on_cpu = context.roots.device.type == "cpu"
        self._prompt_tokens, self._tokens_left = context.input_ids.numel(), context.tokens_left
        self._learned = learned
        learned.begin_text()
        self._policy = MergePolicy(learned, context.step_costs, len(context.roots), reads_are_free=on_cpu)

    # ------------------------------------------------------------------------------------------- proposing

    def propose(self, budget: Budget) -> Draft:
        self._proposed = True
        self._policy.begin_step()
        begin = time.perf_counter()
        self._candidates = {
            source.name: list(map(CachedCandidates, source.session.candidates)) for source in self._free
        }
        trees = self._merge(budget)
        free_seconds = time.perf_counter() - begin
        width = self._policy.choose_width([tree.path_probs for tree in trees], budget.num_nodes)
        self._policy.without = width
        head_seconds = 0.0
        for head in self._heads:
            answer = self._answer(head, budget, width)
            if answer is None:
                continue
            self._candidates[head.name] = answer.candidates
            head.num_queries, begin = head.num_queries + 1, time.perf_counter()
            usual = answer.seconds if answer.usual else answer.stats.seconds
            trees = self._merge(budget, head_seconds + usual)
            seconds = answer.seconds + time.perf_counter() - begin
            head.query_seconds += seconds
            if not answer.usual:
                seconds = answer.stats.seconds if answer.stats.num_queries else 0.0
            head_seconds += seconds
            wider = self._policy.choose_width([tree.path_probs for tree in trees], budget.num_nodes, head_seconds)
            if answer.usual:
                self._policy.queries.append((answer.stats, width, wider))
            width = wider
        self._policy.finish_draft([tree.path_probs for tree in trees], width, free_seconds)
        return self._draft(trees, width.num_nodes)

    def _merge(self, budget: Budget, head_seconds: float = 0.0) -> list[MergedTree]:
        """Return one merged tree per active row; a tree stops growing when more nodes cannot pay."""
        trusts = [self._learned.trust(name) for name in self._candidates]
        return [
            merge_sources(
                self._tokens[row],
                [candidates[row] for candidates in self._candidates.values()],
                budget,
                trusts,
                self._policy.stop_rule(budget.num_nodes, head_seconds),
            )
            for row in self._active
        ]

    def _answer(self, head: MergedSource, budget: Budget, without: Width) -> _Answer | None:
        """Return a head's draft, launched with the last step or made now; None if a query is not expected to pay.

        `without` is the best width of the merged tree without this head.
        """
        if self._launches and head.session.can_launch:
            return self._launched.get(head.name)
        schedule = self._schedule(head)
        if not head.num_queries and head.opening is None and schedule.opening_seconds:
            head.opening = Opening(schedule.opening_seconds * self._prompt_tokens)
        stats = self._policy.choose_query(schedule, without, len(self._active), head.opening, self._tokens_left)
        if stats is None:
            return None
        limits = self._policy.within_levels(head.limits_within(budget, stats), schedule, without)
        begin, before = time.perf_counter(), one_time_work()
        draft = head.session.propose(limits)
        candidates = _candidates(draft, read(*_as_integers(draft)))
        usual = head.num_queries > 0 and one_time_work() == before  # the first draft reads the prompt
        answer = _Answer(stats, candidates, time.perf_counter() - begin, usual)
        levels = max(row.depth for row in candidates)
        if usual:
            schedule.time_levels(levels, answer.seconds)
        elif schedule.level_seconds and one_time_work() == before:  # a call's first draft, not that of the process
            schedule.time_opening(self._prompt_tokens, answer.seconds - (levels + 1) * schedule.level_seconds)
        head.opening = None
        return answer

    def _schedule(self, head: MergedSource) -> HeadSchedule:
        return self._policy.schedule(head.name, head.limits.num_steps, launches=head.session.can_launch)

    def launch(self, step: Step, budget: Budget) -> Sequence[Tensor]:
        tensors = list[Tensor]()
        for head in self._heads:
            if not head.session.can_launch:
                continue
            stats = self._policy.choose_query(self._schedule(head), self._policy.without, len(self._active))
            if stats is None:
                continue
            limits = head.limits_within(budget, stats)
            before = one_time_work()
            stopwatch = Stopwatch(self._roots.device)
            with stopwatch:
                head.session.launch(step, limits)
                draft = head.session.propose(limits)
            tree = _as_integers(draft)
            tensors += tree
            usual = head.num_queries > 0 and one_time_work() == before
            self._unread.append((head, stats, draft, len(tree), usual, stopwatch))
        return tensors

    def _draft(self, trees: Sequence[MergedTree], num_nodes: int) -> Draft:
        """Return the first `num_nodes` nodes of each active row's tree as a draft; ended rows have only a root."""
        widest = max((min(len(tree.tokens), num_nodes) for tree in trees), default=1)
        if widest == 1:
            return Draft.plain(self._roots)
        rows: list[tuple[list[int], list[int]]] = [([token], [-1]) for token in self._tokens]
        log_probs = [[0.0] * widest for _ in rows]
        sources: list[tuple[str, ...]] = [()] * len(rows)
        names = list(self._candidates)
        for row, tree in zip(self._active, trees, strict=True):
            rows[row] = tree.tokens[:num_nodes], tree.parents[:num_nodes]
            edges = [log(edge) for edge in tree.edge_probs[:num_nodes]]
            log_probs[row][: len(edges)] = edges
            sources[row] = tuple(names[source] for source in tree.sources[:num_nodes])
        draft = Draft.from_rows(rows, self._roots.device)
        uploaded = upload(log_probs, torch.float32, self._roots.device) if self._has_probabilities else None
        return replace(draft, log_probs=uploaded, sources=tuple(sources))

    # ------------------------------------------------------------------------------------------- learning

    def observe(self, step: Step) -> None:
        values, self._launched = iter(step.acceptance.launched or ()), {}
        for head, stats, draft, num_tensors, usual, stopwatch in self._unread:
            candidates = _candidates(draft, list(islice(values, num_tensors)))
            self._launched[head.name] = _Answer(stats, candidates, stopwatch.take(), usual)
        self._unread = []
        begin, emitted = time.perf_counter(), step.acceptance.emitted
        for row in self._active:
            self._count(row, emitted[row])
        for source in self._free:
            learn = source.session.observe if self._proposed else source.session.skim
            learn(step)
        self._proposed = False
        accepted = sum(max(count - 1, 0) for count in step.acceptance.counts)
        num_emitted = sum(map(len, emitted))
        self._tokens_left -= max(map(len, emitted))
        self._policy.observe(num_emitted, accepted, len(self._active), time.perf_counter() - begin)
        for head in self._heads:
            head.session.observe(step)
        self._candidates, self._roots = {}, step.acceptance.next_token
        self._active = [row for row in self._active if emitted[row]]
        for row in self._active:
            self._tokens[row] = emitted[row][-1]

    def _count(self, row: int, emitted: Sequence[int]) -> None:
        """Count for each source how many of the tokens that a row emitted were among its candidates."""
        for name, candidates in self._candidates.items():
            source = candidates[row]
            place = source.start
            for token in emitted:
                if place is None:
                    break
                children = source.after(place)
                if children:
                    self._learned.count(name, children, token)
                place = source.follow(place, token)

    def close(self) -> None:
        for source in (*self._free, *self._heads):
            source.session.close()

    def report(self) -> dict[str, Any]:
        return {
            "queries": {head.name: head.num_queries for head in self._heads},
            "query_seconds": {head.name: head.query_seconds for head in self._heads},
            "free_sources": [source.name for source in self._free],
            "expected_drafts": self._policy.expected_drafts, "accepted_drafts": self._policy.accepted_drafts,
        }  # fmt: skip


def _as_integers(draft: Draft) -> list[Tensor]:
    """Return tokens, parents and (if known) rounded log-probabilities as integers `[B, N]`, for one transfer."""
    tensors = [draft.tree.tokens, draft.tree.parents.expand(draft.tree.tokens.shape)]
    if draft.log_probs is not None:
        tensors.append((draft.log_probs.clamp(min=-100.0, max=0.0) / LOG_PROB_UNIT).round().long())
    return tensors


def _candidates(draft: Draft, lists: Sequence[list[list[int]]]) -> list[DraftedCandidates]:
    """Return each row's tree as candidates, from the values of `_as_integers` on the host."""
    tokens, parents, *others = lists
    log_probs = [[LOG_PROB_UNIT * units for units in row] for row in others[0]] if others else [None] * len(tokens)
    return [DraftedCandidates(*row) for row in zip(tokens, parents, log_probs, strict=True)]
