"""Drafters from outside this package: what they return is checked before the target runs it.

A wrong guess never changes an answer, a malformed draft could. Shapes, types and devices are checked in every step.
Values are checked in every step on a CPU; on an accelerator, where that is a read of the device, in the first steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.config import SpeculativeConfig
from hf_specdec.drafters.base import CandidateSession, DraftContext, Drafter, DraftSession, Needs
from hf_specdec.drafters.candidates import Candidates
from hf_specdec.errors import DrafterMismatchError, SpeculativeDecodingError
from hf_specdec.host_sync import read
from hf_specdec.trees.draft import Budget, Draft
from hf_specdec.trees.tree import ROOT_PARENT, TokenTree
from hf_specdec.verification.model import num_embedded_tokens
from hf_specdec.verification.step import Step, UnreadStep
from hf_specdec.verification.target import Target

Result = TypeVar("Result")

CHECKED_STEPS = 2
"""Drafts of a call whose values are checked on an accelerator, and whose `draft_probs` are checked anywhere."""

WHAT_A_DRAFT_IS = (
    "A draft is a `Draft` of a `TokenTree`: token ids [B, N] (long) whose column 0 holds the last emitted tokens, "
    "parents [N] or [B, N] (long) that precede their children, N within the budget, all on the device of the roots. "
    "See docs/drafters.md."
)


def is_foreign(drafter: object) -> bool:
    """Whether a drafter's class is not of this package."""
    return not type(drafter).__module__.startswith("hf_specdec.")


def check_drafter(drafter: Any) -> None:
    """Check what a drafter says about itself.

    Raises:
        DrafterMismatchError: It is not a drafter, has no method name, or its needs are not `Needs`.
    """
    if not isinstance(drafter, Drafter):
        raise DrafterMismatchError(
            f"A drafter is an instance of hf_specdec.drafters.base.Drafter, got {type(drafter).__name__}."
        )
    if not is_foreign(drafter):
        return
    kind, method, needs = type(drafter).__name__, getattr(drafter, "method", None), drafter.needs
    if not isinstance(method, str) or not method:
        raise DrafterMismatchError(f"{kind}.method must be the name of a method, got {method!r}.")
    if type(drafter).__hash__ is None:
        raise DrafterMismatchError(f"{kind} has no hash.", "A dataclass has one with @dataclass(eq=False).")
    if not isinstance(drafter.parts, tuple) or not all(isinstance(part, Drafter) for part in drafter.parts):
        raise DrafterMismatchError(f"{kind}.parts must be a tuple of drafters, got {drafter.parts!r}.")
    if not (
        isinstance(needs, Needs)
        and isinstance(needs.feature_layers, tuple)
        and all(_is_int(layer) for layer in needs.feature_layers)
        and isinstance(needs.prompt_logits, bool)
    ):
        raise DrafterMismatchError(
            f"{kind}.needs must be a `Needs` of a tuple of layer numbers and a bool, got {needs!r}."
        )


def limits_of(drafter: Drafter, config: SpeculativeConfig, part: str | None = None) -> Budget:
    """The drafter's limits.

    Args:
        drafter: The drafter.
        config: What it is asked for.
        part: Its name if it is one of several merged ones.

    Raises:
        DrafterMismatchError: They are not a budget.
        InvalidConfigError: The drafter's own.
    """
    check_drafter(drafter)
    if not is_foreign(drafter):
        return drafter.limits(config)
    limits = _called(drafter, part, "limits", lambda: drafter.limits(config))
    if not (
        isinstance(limits, Budget)
        and all(map(_is_int, (limits.num_nodes, limits.num_steps, limits.top_k)))
        and min(limits.num_nodes, limits.num_steps + 1, limits.top_k) >= 1
    ):
        raise DrafterMismatchError(
            f"{_name(drafter, part)} has the limits {limits!r}.",
            "Limits are a `Budget` of integers: num_nodes >= 1, num_steps >= 0, top_k >= 1.",
        )
    return limits


def start_session(
    drafter: Drafter, target: Target, context: DraftContext, config: SpeculativeConfig, part: str | None = None
) -> DraftSession:
    """The drafter's session; behind a check if the drafter is not of this package.

    Args:
        drafter, part: See `limits_of`.
        target, context, config: See `Drafter.start`.

    Raises:
        DrafterMismatchError: It starts no session.
    """
    if not is_foreign(drafter):
        return drafter.start(target, context, config)
    session = _called(drafter, part, "start", lambda: drafter.start(target, context, config))
    if not isinstance(session, DraftSession):
        raise DrafterMismatchError(
            f"{_name(drafter, part)} started {session!r}.", "start() returns a hf_specdec.DraftSession."
        )
    checked = _CheckedCandidates if isinstance(session, CandidateSession) else _CheckedSession
    return checked(drafter, part, session, context.roots, target.model)


class _CheckedSession(DraftSession):
    """A session of a foreign drafter; every draft is checked on its way out."""

    def __init__(
        self, drafter: Drafter, part: str | None, session: DraftSession, roots: Tensor, model: PreTrainedModel
    ) -> None:
        self._drafter, self._part, self._session = drafter, part, session
        self._roots, self._vocab_size = roots, num_embedded_tokens(model)
        self._num_logits = getattr(model.get_output_embeddings(), "out_features", self._vocab_size)
        self._going = [True] * len(roots)  # rows that have not ended
        self._on_host, self._unchecked_steps = roots.device.type == "cpu", CHECKED_STEPS

    def propose(self, budget: Budget) -> Draft:
        draft = self._do("propose", lambda: self._session.propose(budget))
        fault = self._fault_of_shape(draft, budget) or self._fault_of_values(draft)
        if fault:
            raise DrafterMismatchError(f"{_name(self._drafter, self._part)} drafted {fault}.", WHAT_A_DRAFT_IS)
        return draft if self._on_host else self._without_unchecked(draft)

    def launch(self, step: UnreadStep, budget: Budget) -> Sequence[Tensor]:
        """Launch the session's own; its draft is checked by the next `propose`, which returns it."""
        self._do("launch", lambda: self._session.launch(step, budget))
        return ()

    def observe(self, step: Step) -> None:
        self._roots = step.acceptance.next_token
        self._going = [
            going and bool(tokens) for going, tokens in zip(self._going, step.acceptance.emitted, strict=True)
        ]
        self._do("observe", lambda: self._session.observe(step))

    def close(self) -> None:
        self._session.close()

    def report(self) -> dict[str, Any]:
        report = self._do("report", self._session.report)
        if not isinstance(report, dict):
            raise DrafterMismatchError(f"{_name(self._drafter, self._part)} reported {report!r}, not a dict.")
        return report

    def _do(self, what: str, function: Callable[[], Result]) -> Result:
        return _called(self._drafter, self._part, what, function)

    def _fault_of_shape(self, draft: Any, budget: Budget) -> str:
        """What is wrong with a draft that can be seen without its values; empty if nothing."""
        if not isinstance(draft, Draft) or not isinstance(draft.tree, TokenTree):
            return _shown(draft) if not isinstance(draft, Draft) else f"a Draft of {_shown(draft.tree)}"
        tree, rows = draft.tree, len(self._roots)
        size = self._size(tree.tokens)
        if not size or len(size) != 2 or size[0] != rows or not size[1] or tree.tokens.dtype != torch.long:
            return f"tokens {_shown(tree.tokens)} for {rows} rows on {self._roots.device}"
        nodes = size[1]
        if nodes > budget.num_nodes:
            return f"{nodes} nodes, the budget is {budget.num_nodes}"
        if self._size(tree.parents) not in ((nodes,), (1, nodes), size) or tree.parents.dtype != torch.long:
            return f"parents {_shown(tree.parents)} of {nodes} nodes in {rows} rows"
        for name, values, floating in (("log_probs", draft.log_probs, True), ("bucket", draft.bucket, False)):
            if values is not None and (self._size(values) != size or values.is_floating_point() != floating):
                return f"{name} {_shown(values)} of {nodes} nodes in {rows} rows"
        probs = tree.draft_probs
        if probs is not None and (self._size(probs) != (*size, self._num_logits) or not probs.is_floating_point()):
            return f"draft_probs {_shown(probs)} of {nodes} nodes in {rows} rows and {self._num_logits} logits"
        if draft.sources is not None and [len(row) for row in draft.sources] != [nodes] * rows:
            return f"sources that are not one name for each of {nodes} nodes in {rows} rows"
        return "" if tree.max_depth is None or _is_int(tree.max_depth) else f"a max_depth of {tree.max_depth!r}"

    def _size(self, values: Any) -> tuple[int, ...] | None:
        """A tensor's shape; None if it is none, or lies elsewhere."""
        return tuple(values.shape) if isinstance(values, Tensor) and values.device == self._roots.device else None

    def _fault_of_values(self, draft: Draft) -> str:
        """What is wrong with the values of a draft of the right shape, read in one transfer; empty if nothing."""
        first, self._unchecked_steps = self._unchecked_steps > 0, self._unchecked_steps - 1
        if not first and not self._on_host:
            return ""
        tree, columns = draft.tree, [self._roots[:, None]]
        columns += [tree.tokens, tree.parents.expand(tree.tokens.shape)]
        if draft.log_probs is not None:
            columns.append(draft.log_probs.isnan().long())
        if tree.draft_probs is not None and first:
            sums, negative = tree.draft_probs.float().sum(-1), (tree.draft_probs < 0).any(-1)
            columns.append((((sums - 1).abs() < 1e-2) | (sums == 0)).logical_and(~negative).logical_not().long())
        roots, tokens, parents, *wrong = read(*columns)
        for row, going in enumerate(self._going):
            if going and tokens[row][0] != roots[row][0]:
                return f"the root {tokens[row][0]} in row {row}, whose last emitted token is {roots[row][0]}"
            if not 0 <= min(tokens[row]) <= max(tokens[row]) < self._vocab_size:
                return f"the tokens {tokens[row]} in row {row}; the vocabulary has {self._vocab_size}"
            if fault := _fault_of_parents(parents[row], tree.max_depth):
                return f"{fault} in row {row}"
        if any(map(any, (row for part in wrong for row in part))):
            return "log_probs that are NaN, or draft_probs that are no probabilities"
        return ""

    def _without_unchecked(self, draft: Draft) -> Draft:
        """The draft with the roots that are known, and without a bound of its depth, which would be trusted."""
        tokens = torch.cat([self._roots[:, None], draft.tree.tokens[:, 1:]], dim=1)
        return replace(draft, tree=replace(draft.tree, tokens=tokens, max_depth=None))


class _CheckedCandidates(_CheckedSession, CandidateSession):
    """The same of a session that can be asked edge by edge; what it says of an edge is not checked."""

    _session: CandidateSession

    @property
    def candidates(self) -> Sequence[Candidates]:
        """The session's."""
        found = self._do("candidates", lambda: self._session.candidates)
        if len(found) != len(self._roots) or not all(isinstance(row, Candidates) for row in found):
            raise DrafterMismatchError(
                f"{_name(self._drafter, self._part)} has candidates {_shown(found)} for {len(self._roots)} rows."
            )
        return found


def _fault_of_parents(parents: Sequence[int], max_depth: int | None) -> str:
    """What is wrong with one row's parents."""
    if parents[0] != ROOT_PARENT:
        return f"the parent {parents[0]} of the root, which is {ROOT_PARENT}"
    depths = [0]
    for node, parent in enumerate(parents[1:], start=1):
        if not ROOT_PARENT <= parent < node:
            return f"the parent {parent} of node {node}"
        depths.append(0 if parent == ROOT_PARENT else depths[parent] + 1)
    return f"a max_depth of {max_depth} over {max(depths)} levels" if max(depths) > (max_depth or len(depths)) else ""


def _called(drafter: Drafter, part: str | None, what: str, function: Callable[[], Result]) -> Result:
    """What a foreign drafter returns; an exception of a part that is merged with others is given its name."""
    try:
        return function()
    except SpeculativeDecodingError:
        raise
    except Exception as error:
        if part is None:
            raise
        raise DrafterMismatchError(
            f"{_name(drafter, part)} failed in {what} with {type(error).__name__}: {error}.",
            "Repair it, or leave it out of `methods`.",
        ) from error


def _name(drafter: Drafter, part: str | None) -> str:
    kind = type(drafter).__name__
    return f"The drafter {drafter.method!r} ({kind})" if part is None else f"The merged drafter {part!r} ({kind})"


def _shown(value: Any) -> str:
    """A value in a message; of a tensor its type, shape and place."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)} on {value.device}"
    return "None" if value is None else type(value).__name__


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
