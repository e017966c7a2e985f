"""Hybrid drafting: merge the drafts of several drafters into one tree, whose size is chosen by its expected gain.

*Free sources* are drafters that list candidates at almost no cost (`DraftSession.has_candidates`); they are queried in
every step. All others are *heads*: a head costs one forward per level and is queried only if queries have paid in
similar situations (`control/policy.py`). The tree takes the likeliest nodes of all sources (`candidates.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import log
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.config import SpeculativeConfig
from hf_specdec.control.policy import LearnedStats, MergePolicy, Width
from hf_specdec.drafters.base import DraftContext, Drafter, DraftSession, Needs
from hf_specdec.drafters.candidates import CachedCandidates, Candidates, MergedTree, merge
from hf_specdec.drafters.checked import limits_of, start_session
from hf_specdec.drafters.queries import Answer, Queries, Source
from hf_specdec.errors import InvalidConfigError
from hf_specdec.host_sync import read, upload
from hf_specdec.trees.draft import Budget, Draft
from hf_specdec.verification.masks import Window
from hf_specdec.verification.step import Step
from hf_specdec.verification.target import Target

MAX_NODES = 64
"""Default maximum number of nodes in the merged tree, root included."""
MAX_STEPS = 48
"""Default maximum depth of the merged tree."""
MAX_CHILDREN = 8
"""Default maximum number of children per node."""
HEAD_NODES = 32
"""Nodes that a head drafts, root included; the merged tree takes the best of them."""


class HybridDrafter(Drafter):
    """Merges the drafts of several drafters, its parts. Works with any model that the parts work with.

    Config fields: `methods` names the parts (default: the loaded drafters, `prompt_lookup` and `token_recycling`),
    `num_draft_tokens` (default 64), `num_steps` (48) and `top_k` (8) limit the merged tree. `tree` is rejected.

    Args:
        parts: Drafters by name.
        learned: Statistics of earlier calls, updated by this drafter; None starts with empty ones.

    Raises:
        InvalidConfigError: `parts` is empty.
    """

    method = "hybrid"

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
        """Return the size of the largest merged tree, after checking the limits of every part.

        Raises:
            InvalidConfigError: `tree` is set, or a part rejects its configuration.
            DrafterMismatchError: A third-party part is invalid, see `checked.limits_of`.
        """
        if config.tree is not None:
            raise InvalidConfigError(
                f"The tree of {config.method!r} follows from its parts, got tree={config.tree!r}.",
                "Set num_draft_tokens, num_steps or top_k, or name one method.",
            )
        for name, part in self._parts.items():  # an invalid part is refused before any work
            limits_of(part, _part_config(part, name, config), name)
        num_nodes = config.num_draft_tokens or MAX_NODES
        num_steps = min(config.num_steps or MAX_STEPS, max(num_nodes - 1, 1))
        return Budget(num_nodes, num_steps, config.top_k or MAX_CHILDREN)

    def start(self, target: Target, context: DraftContext, config: SpeculativeConfig) -> DraftSession:
        """Start a session of every part, and return one that merges their drafts."""
        sources = []
        for name, part in self._parts.items():
            part_config = _part_config(part, name, config)
            session = start_session(part, target, context, part_config, name)
            sources.append(Source(name, session, limits_of(part, part_config, name)))
        return _HybridSession(sources, self.learned, context)


def _part_config(part: Drafter, name: str, config: SpeculativeConfig) -> SpeculativeConfig:
    """Return the config for a part, with the window if that applies to it.

    It allows `HEAD_NODES` nodes, or has the defaults if the part rejects `num_draft_tokens`.
    """
    default = SpeculativeConfig(part.method, draft_window=config.draft_window if part.has_window else None)
    try:
        wide = replace(default, num_draft_tokens=HEAD_NODES)
        limits_of(part, wide, name)
    except InvalidConfigError:  # its tree is fixed
        return default
    return wide


class _HybridSession(DraftSession):
    def __init__(self, sources: Sequence[Source], learned: LearnedStats, context: DraftContext) -> None:
        self._free = [source for source in sources if source.session.has_candidates]
        self._heads = [source for source in sources if not source.session.has_candidates]
        self._roots = context.roots
        self._active = list(range(len(context.roots)))  # rows that have not ended
        self._tokens = [root for (root,) in read(context.roots[:, None])[0]] if sources else []
        self._candidates: dict[str, Sequence[Candidates]] = {}  # of this step: by source, one per row
        self._launches = context.launches
        self._proposed = False  # whether this step was drafted, not decided to be plain by the controller
        self._queries = Queries(context.roots.device)
        on_cpu = context.roots.device.type == "cpu"
        self._learned = learned
        self._policy = MergePolicy(learned, context.step_costs, len(context.roots), reads_are_free=on_cpu)

    # ------------------------------------------------------------------------------------------- proposing

    def propose(self, budget: Budget) -> Draft:
        self._proposed = True
        if not self._policy.begin_step():
            return Draft.plain(self._roots)
        begin = time.perf_counter()
        self._candidates = {
            source.name: list(map(CachedCandidates, source.session.candidates)) for source in self._free
        }
        trees = self._merge(budget)
        free_seconds = time.perf_counter() - begin
        width = self._policy.choose_width(_path_probs(trees), budget.num_nodes)
        self._policy.expect(width)
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
            wider = self._policy.choose_width(_path_probs(trees), budget.num_nodes, head_seconds)
            if answer.usual:
                self._policy.note_query(answer.stats, width, wider)
            width = wider
        self._policy.finish_draft(_path_probs(trees), width, free_seconds)
        return self._draft(trees, width.num_nodes)

    def _merge(self, budget: Budget, head_seconds: float = 0.0) -> list[MergedTree]:
        """Return one merged tree per active row; a tree stops growing when more nodes cannot pay.

        Args:
            budget: Maximum size of each tree.
            head_seconds: Seconds of the heads' drafts in this step.
        """
        trusts = [self._learned.trust(name) for name in self._candidates]
        return [
            merge(
                self._tokens[row], [candidates[row] for candidates in self._candidates.values()],
                num_nodes=budget.num_nodes, num_steps=budget.num_steps, top_k=budget.top_k,
                trusts=trusts, stop_rule=self._policy.stop_rule(budget.num_nodes, head_seconds),
            )
            for row in self._active
        ]  # fmt: skip

    def _answer(self, head: Source, budget: Budget, without: Width) -> Answer | None:
        """Return a head's draft, launched with the last step or made now; None if a query is not expected to pay.

        Args:
            head: The head.
            budget: Budget of the merged tree.
            without: The best width of the merged tree without this head.
        """
        if self._launches and head.session.can_launch:
            return self._queries.launched(head)
        schedule = self._policy.schedule(head.name, min(head.limits.num_steps, budget.num_steps))
        stats = self._policy.choose_query(schedule, without, len(self._active))
        if stats is None:
            return None
        answer = self._queries.query(head, stats, budget, self._policy.min_level_probability(schedule, without))
        if answer.usual:
            schedule.time_levels(max(candidates.depth for candidates in answer.candidates), answer.seconds)
        return answer

    def launch(self, step: Step, budget: Budget) -> Sequence[Tensor]:
        """Launch drafts of the heads that are expected to pay; return their trees for the host to read."""
        tensors = list[Tensor]()
        for head in self._heads:
            if head.session.can_launch:
                schedule = self._policy.schedule(head.name, min(head.limits.num_steps, budget.num_steps))
                stats = self._policy.choose_launch(schedule, len(self._active))
                if stats is not None:
                    tensors += self._queries.launch(head, stats, budget, step)
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
        uploaded = upload(log_probs, torch.float32, self._roots.device)
        return replace(draft, log_probs=uploaded, sources=tuple(sources))

    # ------------------------------------------------------------------------------------------- learning

    def observe(self, step: Step) -> None:
        self._queries.receive(step.acceptance.launched or ())
        begin, emitted = time.perf_counter(), step.acceptance.emitted
        for row in self._active:
            self._count(row, emitted[row])
        for source in self._free:
            learn = source.session.observe if self._proposed else source.session.skim
            learn(step)
        self._proposed = False
        accepted = sum(max(count - 1, 0) for count in step.acceptance.counts)
        num_emitted = sum(map(len, emitted))
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
                children = source.after(place)
                if children:
                    self._learned.count(name, children, token)
                place = source.follow(place, token)
                if place is None:
                    break

    def close(self) -> None:
        """Close the sessions of the parts."""
        for source in (*self._free, *self._heads):
            source.session.close()

    def report(self) -> dict[str, Any]:
        """Return queries and seconds by head, the free sources, and how many drafts were expected and accepted."""
        return {
            "queries": {head.name: head.num_queries for head in self._heads},
            "query_seconds": {head.name: head.query_seconds for head in self._heads},
            "free_sources": [source.name for source in self._free],
            "expected_drafts": self._policy.expected_drafts, "accepted_drafts": self._policy.accepted_drafts,
        }  # fmt: skip


def _path_probs(trees: Sequence[MergedTree]) -> list[list[float]]:
    return [tree.path_probs for tree in trees]
