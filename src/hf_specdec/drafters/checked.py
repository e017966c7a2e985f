"""Checks of drafters: fields of a config that apply to them, what third-party drafters return, whether they predict.

A wrong guess never changes the output, but a malformed draft could. Shapes, dtypes and devices are checked in every
step. Values are checked in every step on the CPU, but only in the first steps on an accelerator, where reading them is
slow.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.config import SpeculativeConfig
from hf_specdec.drafters.base import (
    TREE_FIELDS,
    Candidates,
    DraftContext,
    Drafter,
    DraftSession,
    DraftTarget,
    Needs,
)
from hf_specdec.errors import DrafterMismatchError, InvalidConfigError, SpeculativeDecodingError
from hf_specdec.host_sync import read
from hf_specdec.trees.draft import Budget, Draft
from hf_specdec.trees.tree import ROOT_PARENT, TokenTree
from hf_specdec.validation import is_integer
from hf_specdec.verification.model import num_embedded_tokens
from hf_specdec.verification.step import Step

_Result = TypeVar("_Result")

CHECKED_STEPS = 2
"""Number of first drafts of a session whose values are checked on an accelerator. On the CPU, the values of all drafts
are checked, but `draft_probs` only in these."""

DRAFT_FORMAT = (
    "A draft is a `Draft` of a `TokenTree`: token ids [B, N] (long) whose column 0 holds the last emitted tokens, "
    "parents [N] or [B, N] (long) that precede their children, N within the budget, all on the device of the roots. "
    "See docs/drafters.md."
)

TRIAL_PROMPTS, TRIAL_TOKENS = 4, 48
MIN_ACCEPTANCE = 0.1
"""Share of accepted first tokens below which a drafter costs more than it saves."""


def is_third_party(drafter: object) -> bool:
    """Return whether a drafter's class is defined outside this package."""
    return not type(drafter).__module__.startswith("hf_specdec.")


def check_drafter(drafter: Any) -> None:
    """Check that an object is a drafter, and the attributes of a third-party drafter."""
    if not isinstance(drafter, Drafter):
        is_class = isinstance(drafter, type)
        raise DrafterMismatchError(
            "A drafter must be an instance of hf_specdec.drafters.base.Drafter, got "
            + (f"the class {drafter.__name__}." if is_class else f"{type(drafter).__name__}."),
            f"Call it: {drafter.__name__}(...)." if is_class else "",
        )
    if not is_third_party(drafter):
        return
    kind, method, needs = type(drafter).__name__, getattr(drafter, "method", None), drafter.needs
    if not isinstance(method, str) or not method:
        raise DrafterMismatchError(f"{kind}.method must be the name of a method, got {method!r}.")
    if type(drafter).__hash__ is None:
        raise DrafterMismatchError(f"{kind} is not hashable.", "Declare dataclasses with @dataclass(eq=False).")
    if not isinstance(drafter.parts, tuple) or not all(isinstance(part, Drafter) for part in drafter.parts):
        raise DrafterMismatchError(f"{kind}.parts must be a tuple of drafters, got {drafter.parts!r}.")
    if isinstance(drafter.accepts, str) or not isinstance(drafter.accepts, Collection):
        raise DrafterMismatchError(
            f"{kind}.accepts must be a tuple of names of config fields, got {drafter.accepts!r}."
        )
    if not (
        isinstance(needs, Needs)
        and isinstance(needs.feature_layers, tuple)
        and all(map(is_integer, needs.feature_layers))
        and all(isinstance(value, bool) for value in (needs.prompt_logits, needs.step_costs, needs.token_ids))
    ):
        raise DrafterMismatchError(
            f"{kind}.needs must be a `Needs` of a tuple of layer numbers and three bools, got {needs!r}."
        )


def checked_limits(drafter: Drafter, config: SpeculativeConfig, part: str | None = None) -> Budget:
    """Return the drafter's limits under a config whose fields apply to it (`Drafter.accepts`).

    `part` is the name of the drafter if it is merged with others, for error messages.
    """
    check_drafter(drafter)
    for name in TREE_FIELDS:
        value = getattr(config, name)
        if value is not None and name not in drafter.accepts and f"{name}={value}" not in drafter.accepts:
            method = config.method if drafter.is_combined else drafter.method
            reason = f", because its tree follows from {drafter.tree_from}" if drafter.tree_from else ""
            raise InvalidConfigError(
                f"{method!r} does not take {name}={value!r}{reason}.",
                f"It takes {', '.join(drafter.accepts) or 'none of these fields'}.",
            )
    if not is_third_party(drafter):
        return drafter.limits(config)
    limits = _called(drafter, part, "limits", lambda: drafter.limits(config))
    if not (
        isinstance(limits, Budget)
        and all(map(is_integer, (limits.num_nodes, limits.num_steps, limits.top_k)))
        and min(limits.num_nodes, limits.num_steps + 1, limits.top_k) >= 1
    ):
        raise DrafterMismatchError(
            f"{_name(drafter, part)} has invalid limits {limits!r}.",
            "limits() must return a `Budget` of integers: num_nodes >= 1, num_steps >= 0, top_k >= 1.",
        )
    return limits


def start_session(
    drafter: Drafter, target: DraftTarget, context: DraftContext, config: SpeculativeConfig, part: str | None = None
) -> DraftSession:
    """Start a session of the drafter, wrapped in one that checks its drafts if the drafter is a third-party one."""
    if not is_third_party(drafter):
        return drafter.start(target, context, config)
    session = _called(drafter, part, "start", lambda: drafter.start(target, context, config))
    if not isinstance(session, DraftSession):
        raise DrafterMismatchError(
            f"{_name(drafter, part)} returned {session!r}.", "start() must return a hf_specdec.DraftSession."
        )
    return _CheckedSession(drafter, part, session, context.roots, target.model)


class _CheckedSession(DraftSession):
    """A session that wraps the session of a third-party drafter and checks its drafts.

    `can_launch` is False, so `hybrid` does not launch these drafts before the host reads the previous step.
    """

    def __init__(
        self, drafter: Drafter, part: str | None, session: DraftSession, roots: Tensor, model: PreTrainedModel
    ) -> None:
        self._drafter, self._part, self._session = drafter, part, session
        self._roots, self._vocab_size = roots, num_embedded_tokens(model)
        self._num_logits = getattr(model.get_output_embeddings(), "out_features", self._vocab_size)
        self._active = [True] * len(roots)  # rows that have not ended
        self._on_host, self._steps_to_check = roots.device.type == "cpu", CHECKED_STEPS
        self.has_candidates = bool(session.has_candidates)

    def _do(self, what: str, function: Callable[[], _Result]) -> _Result:
        return _called(self._drafter, self._part, what, function)

    def _refuse(self, fault: str, remedy: str = "") -> DrafterMismatchError:
        return DrafterMismatchError(f"{_name(self._drafter, self._part)} {fault}.", remedy)

    @property
    def candidates(self) -> Sequence[Candidates]:
        """Candidates of the wrapped session; their tokens and probabilities are not checked."""
        found = self._do("candidates", lambda: self._session.candidates)
        if len(found) != len(self._roots) or not all(isinstance(row, Candidates) for row in found):
            raise self._refuse(f"has candidates {_shown(found)} for {len(self._roots)} rows")
        return found

    def propose(self, budget: Budget) -> Draft:
        draft = self._do("propose", lambda: self._session.propose(budget))
        fault = self._fault_of_shape(draft, budget) or self._fault_of_values(draft)
        if fault:
            raise self._refuse(f"drafted {fault}", DRAFT_FORMAT)
        if not self._on_host:  # if wrong, a root or a `max_depth` that was not checked could change the output
            tokens = torch.cat([self._roots[:, None], draft.tree.tokens[:, 1:]], dim=1)
            draft = replace(draft, tree=replace(draft.tree, tokens=tokens, max_depth=None))
        if draft.tree.depth_bound > budget.num_steps:  # it may be deeper than the row's last tokens, or than positions
            draft = replace(draft, tree=draft.tree.no_deeper(budget.num_steps))
        return draft

    def launch(self, step: Step, budget: Budget) -> Sequence[Tensor]:
        """Launch the wrapped session's draft, which `propose` checks, and return the tensors for the host to read."""
        tensors = self._do("launch", lambda: self._session.launch(step, budget))

        def can_be_read(values: Any) -> bool:
            size = self._size(values) or ()
            is_integer_kind = len(size) == 2 and not values.is_floating_point() and not values.is_complex()
            return is_integer_kind and size[0] == len(self._roots)

        if not isinstance(tensors, list | tuple) or not all(map(can_be_read, tensors)):
            found = ", ".join(map(_shown, tensors)) if isinstance(tensors, list | tuple) else _shown(tensors)
            wanted = f"integer tensors [{len(self._roots)}, *] on {self._roots.device}, or ()"
            raise self._refuse(f"launched {found}", f"launch() must return {wanted}.")
        return tensors

    def observe(self, step: Step) -> None:
        self._roots = step.acceptance.next_token
        self._active = [
            active and bool(tokens) for active, tokens in zip(self._active, step.acceptance.emitted, strict=True)
        ]
        self._do("observe", lambda: self._session.observe(step))

    def close(self) -> None:
        self._session.close()

    def report(self) -> dict[str, Any]:
        report = self._do("report", self._session.report)
        if not isinstance(report, dict):
            raise self._refuse(f"reported {report!r}, not a dict")
        return report

    def _fault_of_shape(self, draft: Any, budget: Budget) -> str:
        """Describe the first invalid type, dtype, device or size in a draft; return an empty string if none is."""
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
        log_probs = draft.log_probs
        if log_probs is not None and (self._size(log_probs) != size or not log_probs.is_floating_point()):
            return f"log_probs {_shown(log_probs)} of {nodes} nodes in {rows} rows"
        probs = tree.draft_probs
        if probs is not None and (self._size(probs) != (*size, self._num_logits) or not probs.is_floating_point()):
            return f"draft_probs {_shown(probs)} of {nodes} nodes in {rows} rows and {self._num_logits} logits"
        if draft.sources is not None and [len(row) for row in draft.sources] != [nodes] * rows:
            return f"sources that are not one name for each of {nodes} nodes in {rows} rows"
        return "" if tree.max_depth is None or is_integer(tree.max_depth) else f"a max_depth of {tree.max_depth!r}"

    def _size(self, values: Any) -> tuple[int, ...] | None:
        """Return the shape of a tensor on the roots' device; None for anything else."""
        return tuple(values.shape) if isinstance(values, Tensor) and values.device == self._roots.device else None

    def _fault_of_values(self, draft: Draft) -> str:
        """Describe the first invalid value in a draft of valid shapes; empty string if none or not checked."""
        first, self._steps_to_check = self._steps_to_check > 0, self._steps_to_check - 1
        if not first and not self._on_host:
            return ""
        tree = draft.tree
        columns = [self._roots[:, None], tree.tokens, tree.parents.expand(tree.tokens.shape)]
        if draft.log_probs is not None:
            columns.append(draft.log_probs.isnan().long())
        if tree.draft_probs is not None and first:
            sums, negative = tree.draft_probs.float().sum(-1), (tree.draft_probs < 0).any(-1)
            columns.append((((sums - 1).abs() < 1e-2) | (sums == 0)).logical_and(~negative).logical_not().long())
        roots, tokens, parents, *wrong = read(*columns)
        for row, active in enumerate(self._active):
            if active and tokens[row][0] != roots[row][0]:
                return f"the root {tokens[row][0]} in row {row}, whose last emitted token is {roots[row][0]}"
            if not 0 <= min(tokens[row]) <= max(tokens[row]) < self._vocab_size:
                return f"the tokens {tokens[row]} in row {row}; the vocabulary has {self._vocab_size}"
            if fault := _fault_of_parents(parents[row], tree.max_depth):
                return f"{fault} in row {row}"
        if any(map(any, (row for part in wrong for row in part))):
            return "log_probs that are NaN, or draft_probs that are not probabilities"
        return ""


def _fault_of_parents(parents: Sequence[int], max_depth: int | None) -> str:
    """Describe an invalid parent in one row or a depth above `max_depth`; return an empty string if there is none."""
    if parents[0] != ROOT_PARENT:
        return f"the parent {parents[0]} of the root, which must be {ROOT_PARENT}"
    depths = [0]
    for node, parent in enumerate(parents[1:], start=1):
        if not ROOT_PARENT <= parent < node:
            return f"the parent {parent} of node {node}"
        depths.append(0 if parent == ROOT_PARENT else depths[parent] + 1)
    too_deep = max_depth is not None and max(depths) > max_depth
    return f"a max_depth of {max_depth} for a depth of {max(depths)}" if too_deep else ""


def _called(drafter: Drafter, part: str | None, what: str, function: Callable[[], _Result]) -> _Result:
    """Call a third-party drafter; if it is merged, turn errors except this package's into `DrafterMismatchError`."""
    try:
        return function()
    except SpeculativeDecodingError:
        raise
    except Exception as error:
        if part is None:
            raise
        raise DrafterMismatchError(
            f"{_name(drafter, part)} failed in {what} with {type(error).__name__}: {error}.",
            "Fix it, or remove it from `methods`.",
        ) from error


def _name(drafter: Drafter, part: str | None) -> str:
    kind = type(drafter).__name__
    return f"The drafter {drafter.method!r} ({kind})" if part is None else f"The merged drafter {part!r} ({kind})"


def _shown(value: Any) -> str:
    """Describe a value for a message: a tensor by dtype, shape and device, anything else by its type."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)} on {value.device}"
    return "None" if value is None else type(value).__name__


def try_drafter(model: Any, name: str, prompts: Sequence[Tensor] | None = None) -> float:
    """Test whether a drafter predicts a model's tokens at all, which matching tensor sizes do not prove.

    Measures how often the first token of a draft is accepted in greedy decoding, and warns if that is rare. Does not
    change the random state of the process.

    Args:
        model: An attached model.
        name: Name of a registered drafter that can draft the static tree `[(0,)]`.
        prompts: Token ids, each `[1, P]`; None samples `TRIAL_PROMPTS` prompts from the model.

    Returns:
        The share of steps in which the first token is accepted, 0.0 without any step.
    """
    drafted = accepted = 0
    for prompt in _sampled_prompts(model) if prompts is None else prompts:
        ids = prompt.to(model.device)
        output = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=TRIAL_TOKENS, do_sample=False,
            return_dict_in_generate=True, speculative={"method": name, "tree": [(0,)]},
        )  # fmt: skip
        taken = [length for row in output.speculation.accepted_per_step for length in row]
        drafted, accepted = drafted + len(taken), accepted + sum(length > 1 for length in taken)
    share = accepted / max(drafted, 1)
    if share < MIN_ACCEPTANCE:
        warnings.warn(
            f"The drafter {name!r} predicted {accepted} of {drafted} tokens of this model. It was probably made for "
            "another model or another version of it; speculation will not be faster.",
            stacklevel=3,
        )
    return share


def _sampled_prompts(model: Any) -> list[Tensor]:
    """Sample prompts with fixed seeds, starting from the model's BOS token (token 0 if it has none or several)."""
    first = model.generation_config.bos_token_id
    begin = torch.full((1, 1), first if isinstance(first, int) else 0, dtype=torch.long, device=model.device)
    devices = [] if model.device.type == "cpu" else [model.device]
    prompts = []
    with torch.random.fork_rng(devices, device_type=model.device.type if devices else "cpu"):
        for seed in range(TRIAL_PROMPTS):
            torch.manual_seed(seed)
            prompts.append(model.generate(
                input_ids=begin, attention_mask=torch.ones_like(begin), do_sample=True, speculative=None,
                max_new_tokens=TRIAL_TOKENS, min_new_tokens=TRIAL_TOKENS // 2,
            ))  # fmt: skip
    return prompts
