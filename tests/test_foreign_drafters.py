"""Drafters that return nonsense: named in an error that says what was expected, alone and merged with others."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import zoo
from hf_specdec.drafters import checked
from hf_specdec.drafters.base import Drafter, DraftSession, Needs
from hf_specdec.drafters.hybrid import HybridDrafter
from hf_specdec.drafters.prompt_lookup import PromptLookupDrafter
from hf_specdec.errors import DrafterMismatchError, InvalidConfigError
from hf_specdec.trees.draft import Budget, Draft
from hf_specdec.trees.tree import TokenTree

ROWS, NODES = 2, 5
PROMPTS = torch.randint(3, zoo.VOCAB_SIZE, (ROWS, 12), generator=torch.Generator().manual_seed(0))
OPTIONS: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False, "attention_mask": torch.ones_like(PROMPTS)}
HYBRID = {"method": "hybrid", "methods": ["prompt_lookup", "nonsense"], "adaptive": False, "num_draft_tokens": 12}


class NonsenseDrafter(Drafter):
    """Drafts the same tree below every root, changed by a function from one step on."""

    method = "nonsense"

    def __init__(self, change: Callable[[Draft], Any] = lambda draft: draft, first: int = 0) -> None:
        self.change, self.first = change, first

    def limits(self, config: Any) -> Any:
        return Budget(NODES, NODES - 1, NODES)

    def start(self, target: Any, context: Any, config: Any) -> Any:
        return NonsenseSession(self, context.roots)


class NonsenseSession(DraftSession):
    def __init__(self, drafter: NonsenseDrafter, roots: Tensor) -> None:
        self.drafter, self.roots, self.steps = drafter, roots, 0

    def propose(self, budget: Budget) -> Any:
        self.steps += 1
        tokens = torch.cat([self.roots[:, None], torch.tensor([[5, 6, 7, 8]] * ROWS)], dim=1)
        tree = TokenTree(tokens, torch.tensor([-1, 0, 0, 1, 3]), max_depth=3)
        draft = Draft(tree, log_probs=torch.full((ROWS, NODES), -0.5))
        return self.drafter.change(draft) if self.steps > self.drafter.first else draft

    def observe(self, step: Any) -> None:
        self.roots = step.acceptance.next_token


def of_tree(**fields: Callable[[TokenTree], Any]) -> Callable[[Draft], Draft]:
    """Change fields of the tree."""
    return lambda draft: replace(
        draft, tree=replace(draft.tree, **{name: make(draft.tree) for name, make in fields.items()})
    )


def of_draft(**fields: Any) -> Callable[[Draft], Draft]:
    return lambda draft: replace(draft, **fields)


def parents(*values: int) -> Callable[[Draft], Draft]:
    return of_tree(parents=lambda _tree: torch.tensor(values))


def tokens(change: Callable[[Tensor], Any]) -> Callable[[Draft], Draft]:
    return of_tree(tokens=lambda tree: change(tree.tokens))


def written(place: tuple[int, int], value: int) -> Callable[[Draft], Draft]:
    def change(values: Tensor) -> Tensor:
        values[place] = value
        return values

    return tokens(change)


def probs(make: Callable[[], Any]) -> Callable[[Draft], Draft]:
    return of_tree(draft_probs=lambda _tree: make())


UNIFORM = torch.full((ROWS, NODES, zoo.VOCAB_SIZE), 1 / zoo.VOCAB_SIZE)

DRAFTS: dict[str, tuple[Callable[[Draft], Any], str]] = {
    "none": (lambda _draft: None, "None"),
    "a list": (lambda draft: [draft], "list"),
    "a tree": (lambda draft: draft.tree, "TokenTree"),
    "a tuple of tensors": (lambda draft: (draft.tree.tokens, draft.tree.parents), "tuple"),
    "tokens only": (lambda draft: draft.tree.tokens, r"int64 \[2, 5\]"),
    "a draft of nothing": (of_draft(tree=None), "a Draft of None"),
    "a draft of tokens": (lambda draft: Draft(draft.tree.tokens), r"a Draft of int64 \[2, 5\]"),
    "too few rows": (tokens(lambda values: values[:1]), r"tokens int64 \[1, 5\] on cpu for 2 rows"),
    "too many rows": (tokens(lambda values: values.repeat(2, 1)), r"tokens int64 \[4, 5\]"),
    "no rows": (tokens(lambda values: values[:0]), r"tokens int64 \[0, 5\]"),
    "no nodes": (tokens(lambda values: values[:, :0]), r"tokens int64 \[2, 0\]"),
    "one dimension": (tokens(lambda values: values[0]), r"tokens int64 \[5\]"),
    "three dimensions": (tokens(lambda values: values[None]), r"tokens int64 \[1, 2, 5\]"),
    "tokens in a list": (tokens(Tensor.tolist), "tokens list"),
    "no tokens": (tokens(lambda _values: None), "tokens None"),
    "int32 tokens": (tokens(Tensor.int), r"tokens int32 \[2, 5\]"),
    "float tokens": (tokens(Tensor.float), r"tokens float32 \[2, 5\]"),
    "bool tokens": (tokens(Tensor.bool), "tokens bool"),
    "tokens elsewhere": (tokens(lambda values: values.to("meta")), r"\[2, 5\] on meta for 2 rows on cpu"),
    "more nodes than the budget": (
        lambda _draft: Draft(TokenTree(torch.zeros(ROWS, 9, dtype=torch.long), torch.arange(9) - 1)),
        "9 nodes, the budget is 5",
    ),
    "parents of other nodes": (parents(-1, 0, 0), r"parents int64 \[3\] on cpu of 5 nodes"),
    "parents of other rows": (of_tree(parents=lambda tree: tree.parents.expand(3, -1)), r"parents int64 \[3, 5\]"),
    "no parents": (of_tree(parents=lambda _tree: None), "parents None"),
    "int32 parents": (of_tree(parents=lambda tree: tree.parents.int()), "parents int32"),
    "float parents": (of_tree(parents=lambda tree: tree.parents.float()), "parents float32"),
    "parents in a list": (of_tree(parents=lambda tree: tree.parents.tolist()), "parents list"),
    "parents elsewhere": (of_tree(parents=lambda tree: tree.parents.to("meta")), r"parents int64 \[5\] on meta"),
    "a parent after its child": (parents(-1, 2, 0, 1, 3), "the parent 2 of node 1 in row 0"),
    "a node below itself": (parents(-1, 0, 2, 1, 3), "the parent 2 of node 2"),
    "a parent out of range": (parents(-1, 0, 0, 99, 3), "the parent 99 of node 3"),
    "a parent below -1": (parents(-1, 0, -7, 1, 3), "the parent -7 of node 2"),
    "a root with a parent": (parents(0, 0, 0, 1, 3), "the parent 0 of the root"),
    "a token out of the vocabulary": (written((1, 3), zoo.VOCAB_SIZE), "tokens .* in row 1; the vocabulary has 96"),
    "a negative token": (written((0, 2), -1), "tokens .* in row 0; the vocabulary has 96"),
    "an enormous token": (written((0, 4), 2**62), "the vocabulary has 96"),
    "another root": (
        tokens(lambda values: torch.cat([values[:, :1] % 90 + 1, values[:, 1:]], 1)),
        "the root .* row 0",
    ),
    "a depth bound too small": (of_tree(max_depth=lambda _tree: 1), "a max_depth of 1 for a depth of 3"),
    "a depth bound of none": (of_tree(max_depth=lambda _tree: 0), "a max_depth of 0 for a depth of 3"),
    "a depth bound that is none": (of_tree(max_depth=lambda _tree: "deep"), "a max_depth of 'deep'"),
    "NaN log_probs": (of_draft(log_probs=torch.full((ROWS, NODES), torch.nan)), "log_probs that are NaN"),
    "one NaN": (of_draft(log_probs=torch.tensor([[0.0] * 4 + [torch.nan]] * ROWS)), "log_probs that are NaN"),
    "log_probs of other nodes": (of_draft(log_probs=torch.zeros(ROWS, 2)), r"log_probs float32 \[2, 2\]"),
    "log_probs of one row": (of_draft(log_probs=torch.zeros(NODES)), r"log_probs float32 \[5\]"),
    "integer log_probs": (of_draft(log_probs=torch.zeros(ROWS, NODES).long()), "log_probs int64"),
    "log_probs in a list": (of_draft(log_probs=[[0.0] * NODES] * ROWS), "log_probs list"),
    "log_probs elsewhere": (of_draft(log_probs=torch.zeros(ROWS, NODES, device="meta")), "log_probs .* on meta"),
    "sources of one row": (of_draft(sources=(("a",) * NODES,)), "sources that are not one name"),
    "draft_probs of other nodes": (probs(lambda: UNIFORM[:, :2]), r"draft_probs float32 \[2, 2, 96\]"),
    "draft_probs of other tokens": (probs(lambda: UNIFORM[..., :7]), r"draft_probs float32 \[2, 5, 7\]"),
    "draft_probs of tokens": (probs(lambda: UNIFORM[..., 0]), r"draft_probs float32 \[2, 5\]"),
    "draft_probs in a list": (probs(UNIFORM.tolist), "draft_probs list"),
    "integer draft_probs": (probs(UNIFORM.long), "draft_probs int64"),
    "negative draft_probs": (probs(lambda: -UNIFORM), "draft_probs that are not probabilities"),
    "NaN draft_probs": (probs(lambda: UNIFORM * torch.nan), "draft_probs that are not probabilities"),
    "draft_probs that are logits": (probs(lambda: UNIFORM * 50), "draft_probs that are not probabilities"),
}


@pytest.mark.parametrize(
    ("kind", "first", "merged"),
    [
        *((kind, first, False) for kind, (_, fault) in DRAFTS.items() for first in (0, 2)
          if not first or "probab" not in fault),
        *((kind, 0, True) for kind in DRAFTS),
    ],
)  # fmt: skip
def test_a_malformed_draft_is_named(llama: Any, kind: str, first: int, merged: bool) -> None:
    change, expected = DRAFTS[kind]
    llama.add_drafter(NonsenseDrafter(change, first))
    name = r"The merged drafter 'nonsense'" if merged else r"The drafter 'nonsense'"
    with pytest.raises(DrafterMismatchError, match=rf"{name} \(NonsenseDrafter\) drafted .*{expected}") as caught:
        llama.generate(PROMPTS, speculative=HYBRID if merged else "nonsense", **OPTIONS)
    assert "parents [N] or [B, N] (long) that precede their children" in str(caught.value)
    assert not llama.model._forward_hooks


@pytest.mark.parametrize("speculative", ["nonsense", HYBRID, "auto"], ids=["alone", "hybrid", "auto"])
@pytest.mark.parametrize("rows", [1, ROWS])
def test_a_sound_draft_is_not_changed(llama: Any, speculative: Any, rows: int) -> None:
    """Optional fields, parents per row, and rows that have ended."""
    options = {**OPTIONS, "attention_mask": OPTIONS["attention_mask"][:rows], "eos_token_id": [5, 9, 11, 30, 31]}
    plain = llama.generate(PROMPTS[:rows], **options)

    def cut(draft: Draft) -> Draft:
        tree = TokenTree(draft.tree.tokens[:rows], draft.tree.parents.expand(rows, -1))
        return Draft(tree, log_probs=torch.zeros(rows, NODES))

    llama.add_drafter(NonsenseDrafter(cut))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NonsenseSession, "propose", _rows(rows, cut))
        assert torch.equal(plain, llama.generate(PROMPTS[:rows], speculative=speculative, **options))


def _rows(rows: int, change: Callable[[Draft], Draft]) -> Any:
    def propose(self: NonsenseSession, _budget: Budget) -> Draft:
        drafted = torch.tensor([[5, 6, 7, 8]] * rows)
        return change(Draft(TokenTree(torch.cat([self.roots[:, None], drafted], 1), torch.tensor([-1, 0, 0, 1, 3]))))

    return propose


class Failing(NonsenseSession):
    def propose(self, budget: Budget) -> Any:
        raise ZeroDivisionError("by nought")


class FailingLater(NonsenseSession):
    def observe(self, step: Any) -> None:
        raise KeyError("step")


@dataclass
class Unhashable(NonsenseDrafter):
    """A dataclass compares by value, so it has no hash."""

    change: Any = None
    first: int = 99


DRAFTERS: dict[str, tuple[dict[str, Any], str]] = {
    "no limits": ({"limits": lambda _self, _config: None}, "has invalid limits None"),
    "limits in a tuple": ({"limits": lambda _self, _config: (5, 4, 1)}, r"has invalid limits \(5, 4, 1\)"),
    "limits of floats": ({"limits": lambda _self, _config: Budget(5.0, 4, 1)}, "num_nodes=5.0"),  # type: ignore[arg-type]
    "limits of bools": ({"limits": lambda _self, _config: Budget(5, True, 1)}, "num_steps=True"),
    "limits of nothing": ({"limits": lambda _self, _config: Budget(0, 4, 1)}, "num_nodes=0"),
    "negative limits": ({"limits": lambda _self, _config: Budget(5, -1, 1)}, "num_steps=-1"),
    "no children": ({"limits": lambda _self, _config: Budget(5, 4, 0)}, "top_k=0"),
    "no session": ({"start": lambda *_: None}, "returned None"),
    "a class for a session": ({"start": lambda *_: NonsenseSession}, "returned <class"),
    "needs in a tuple": ({"needs": (-1,)}, r"needs must be a `Needs` .* got \(-1,\)"),
    "no needs": ({"needs": None}, "needs must be a `Needs`"),
    "needs one number": ({"needs": Needs(-1)}, "needs must be a `Needs`"),  # type: ignore[arg-type]
    "needs names": ({"needs": Needs(("last",))}, "needs must be a `Needs`"),  # type: ignore[arg-type]
    "needs logits of 7": ({"needs": Needs((), 7)}, "needs must be a `Needs`"),  # type: ignore[arg-type]
    "needs ids of 7": ({"needs": Needs(token_ids=7)}, "needs must be a `Needs`"),  # type: ignore[arg-type]
    "no parts": ({"parts": None}, "parts must be a tuple of drafters"),
    "parts by name": ({"parts": ("eagle",)}, "parts must be a tuple of drafters"),
    "a field for fields": ({"accepts": "tree"}, "accepts must be a tuple of names"),
    "no fields": ({"accepts": None}, "accepts must be a tuple of names"),
}


@pytest.mark.parametrize("merged", [False, True], ids=["alone", "merged"])
@pytest.mark.parametrize("kind", DRAFTERS)
def test_a_malformed_drafter_is_named(llama: Any, kind: str, merged: bool) -> None:
    attributes, expected = DRAFTERS[kind]
    drafter = type("NonsenseDrafter", (NonsenseDrafter,), attributes)()
    forwards: list[None] = []

    def use() -> None:
        llama.add_drafter(drafter, "nonsense")
        with llama.register_forward_pre_hook(lambda *_: forwards.append(None)):
            llama.generate(PROMPTS, speculative=HYBRID if merged else "nonsense", **OPTIONS)

    with pytest.raises(DrafterMismatchError, match=f"[Nn]onsense.*{expected}"):
        use()
    assert not forwards or "start" in attributes  # a session needs the prompt


def test_a_report_that_is_no_dict_is_named(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NonsenseSession, "report", lambda _self: None)
    llama.add_drafter(NonsenseDrafter())
    with pytest.raises(DrafterMismatchError, match="reported None, not a dict"):
        llama.generate(PROMPTS, speculative="nonsense", **OPTIONS)


@pytest.mark.parametrize("method", [None, "", 7])
def test_a_drafter_without_a_method_is_refused(llama: Any, method: Any) -> None:
    with pytest.raises(DrafterMismatchError, match="method must be the name"):
        llama.add_drafter(type("Nameless", (NonsenseDrafter,), {"method": method})(), "nonsense")
    assert not llama.drafters


def test_a_drafter_without_a_hash_is_refused(llama: Any) -> None:
    with pytest.raises(DrafterMismatchError, match="eq=False"):
        llama.add_drafter(Unhashable())
    llama.add_drafter(dataclasses.dataclass(eq=False)(type("Hashable", (NonsenseDrafter,), {}))())


@pytest.mark.parametrize("speculative", [HYBRID, {"method": "auto", "adaptive": False}], ids=["hybrid", "auto"])
@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ({"start": lambda self, _t, context, _c: Failing(self, context.roots)},
         "failed in propose with ZeroDivisionError: by nought"),
        ({"start": lambda self, _t, context, _c: FailingLater(self, context.roots)},
         "failed in observe with KeyError"),
        ({"start": lambda self: None}, "failed in start with TypeError"),
        ({"limits": lambda _self, _config: [][0]}, "failed in limits with IndexError"),
    ],
    ids=["propose", "observe", "start", "limits"],
)  # fmt: skip
def test_a_failing_part_is_named(llama: Any, attributes: dict[str, Any], expected: str, speculative: Any) -> None:
    llama.add_drafter(type("NonsenseDrafter", (NonsenseDrafter,), attributes)())
    with pytest.raises(DrafterMismatchError, match=f"merged drafter 'nonsense'.*{expected}") as caught:
        llama.generate(PROMPTS, speculative=speculative, **OPTIONS)
    assert isinstance(caught.value.__cause__, ZeroDivisionError | KeyError | TypeError | IndexError)


def test_a_drafter_s_own_errors_stay_as_they_are(llama: Any) -> None:
    def refuses(_self: Any, _config: Any) -> Budget:
        raise InvalidConfigError("Not that field.")

    alone = {"start": lambda self, _t, context, _c: Failing(self, context.roots)}
    llama.add_drafter(type("NonsenseDrafter", (NonsenseDrafter,), alone)())
    with pytest.raises(ZeroDivisionError, match="by nought"):
        llama.generate(PROMPTS, speculative="nonsense", **OPTIONS)
    llama.add_drafter(type("NonsenseDrafter", (NonsenseDrafter,), {"limits": refuses})())
    for speculative in ("nonsense", HYBRID):
        with pytest.raises(InvalidConfigError, match="Not that field"):
            llama.generate(PROMPTS, speculative=speculative, **OPTIONS)


def test_parts_that_are_no_drafters_are_refused(llama: Any) -> None:
    with pytest.raises(DrafterMismatchError, match="got NoneType"):
        llama.add_drafter(HybridDrafter({"lookup": PromptLookupDrafter(), "nothing": None}))  # type: ignore[dict-item]


def test_on_an_accelerator_later_drafts_are_not_read(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their roots are put in place and their depth bound is dropped instead: a wrong one cannot change an answer."""
    plain = llama.generate(PROMPTS, **OPTIONS)
    wrong = of_tree(tokens=lambda tree: tree.tokens * 0 + 3, max_depth=lambda _tree: 1)
    llama.add_drafter(NonsenseDrafter(wrong, first=checked.CHECKED_STEPS))
    start = checked._CheckedSession.__init__

    def elsewhere(self: Any, *arguments: Any) -> None:
        start(self, *arguments)
        self._on_host = False

    monkeypatch.setattr(checked._CheckedSession, "__init__", elsewhere)
    assert torch.equal(plain, llama.generate(PROMPTS, speculative="nonsense", **OPTIONS))


LAUNCHED: dict[str, tuple[Any, str]] = {
    "nothing": (None, "None"),
    "a tensor": (torch.zeros(ROWS, 1).long(), r"int64 \[2, 1\]"),
    "lists": ([[[1], [2]]], "list"),
    "floats": ((torch.zeros(ROWS, 1),), r"float32 \[2, 1\]"),
    "rows only": ((torch.zeros(ROWS).long(),), r"int64 \[2\]"),
    "other rows": ((torch.zeros(ROWS, 1).long(), torch.zeros(3, 1).long()), r"int64 \[2, 1\] .*, int64 \[3, 1\]"),
    "elsewhere": ((torch.zeros(ROWS, 1, device="meta").long(),), r"int64 \[2, 1\] on meta"),
}


def launching(llama: Any, tensors: Any) -> DraftSession:
    class Launching(NonsenseSession):
        def launch(self, step: Any, budget: Budget) -> Any:
            return tensors

    drafter, roots = NonsenseDrafter(), torch.tensor([7] * ROWS)
    return checked._CheckedSession(drafter, None, Launching(drafter, roots), roots, llama)


def test_what_a_session_launches_is_read_by_the_host(llama: Any) -> None:
    step, budget = Any, Budget(NODES, NODES - 1, NODES)
    tensors = (torch.zeros(ROWS, 3).long(), torch.ones(ROWS, 1).bool())
    assert launching(llama, tensors).launch(step, budget) == tensors  # type: ignore[arg-type]
    assert launching(llama, ()).launch(step, budget) == ()  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", LAUNCHED)
def test_what_cannot_be_read_is_named(llama: Any, kind: str) -> None:
    tensors, expected = LAUNCHED[kind]
    with pytest.raises(DrafterMismatchError, match=rf"'nonsense' \(NonsenseDrafter\) launched {expected}"):
        launching(llama, tensors).launch(Any, Budget(NODES, NODES - 1, NODES))  # type: ignore[arg-type]
