"""Every row of the drafter matrix: the answer of plain generate, drafts within their budget, confidences of edges."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import drafters
import zoo
from drafters import Wandering
from hf_specdec import (
    DrafterMismatchError,
    InvalidConfigError,
    SpeculativeConfig,
    SpeculativeGenerationMixin,
    UnsupportedModelError,
)
from hf_specdec.drafters import registry
from hf_specdec.drafters.base import Drafter
from hf_specdec.drafters.experimental.last_logits import LastLogitsDrafter
from hf_specdec.drafters.experimental.lookahead import LookaheadDrafter
from hf_specdec.drafters.prompt_lookup import PromptLookupDrafter
from hf_specdec.drafters.registry import Method, drafter_of, methods, register_drafter
from hf_specdec.generation import head_loading
from hf_specdec.trees.draft import PLAIN_STEP, Budget, Draft
from models import prompts


@pytest.fixture(scope="module", params=["llama", "gemma3_text", "qwen3_next"])
def model(request: pytest.FixtureRequest) -> Any:
    """Full attention, sliding windows, a recurrent state (which verifies chains)."""
    return SpeculativeGenerationMixin.attach(copy.deepcopy(zoo.build(request.param)))


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("row", drafters.ROWS, ids=lambda row: row.name)
def test_any_budget_gives_the_plain_answer(
    model: Any, row: drafters.Row, batch_size: int, wandering: list[Wandering]
) -> None:
    """Sizes that change from step to step, plain steps between: sessions learn from steps they did not draft."""
    ids, mask = prompts(batch_size)
    options = {"attention_mask": mask, "max_new_tokens": 24, "do_sample": False}
    plain = model.generate(ids, **options)
    config = row.add(model, plain[:, ids.shape[1] :])
    assert torch.equal(plain, model.generate(ids, speculative=config, **options))
    (controller,) = wandering
    stats = model.last_speculation
    told = {"controller": "wandering", "steps": controller.count}
    assert {name: stats.control[name] for name in told} == told
    assert controller.count >= stats.num_target_forwards - 1 > 4
    drafted = 0
    for budget, step in controller.seen:
        tree, acceptance = step.draft.tree, step.acceptance
        tree.validate()
        assert max(acceptance.num_drafted) < budget.num_nodes
        assert int(tree.depths().max()) <= budget.num_steps
        assert list(acceptance.num_drafted) == tree.num_drafted.tolist()
        drafted += sum(acceptance.num_drafted)
        if step.draft.log_probs is not None:
            assert step.draft.log_probs.shape == tree.tokens.shape
            assert (step.draft.log_probs <= 1e-6).all()
            assert (step.draft.log_probs[:, 0] == 0).all()
    assert drafted > 0 or row.name == "prompt_lookup"


@pytest.mark.parametrize("row", drafters.ROWS, ids=lambda row: row.name)
def test_the_same_tokens_are_drawn(model: Any, row: drafters.Row, wandering: list[Wandering]) -> None:
    ids, mask = prompts(1)
    options = {"attention_mask": mask, "max_new_tokens": 24, "do_sample": True, "top_k": 8, "temperature": 0.7}

    def drawn(speculative: Any) -> Any:
        torch.manual_seed(3)
        return model.generate(ids, speculative=speculative, **options)

    plain = drawn(None)
    assert torch.equal(plain, drawn(row.add(model, plain[:, ids.shape[1] :])))


def confidences(model: Any, name: str, **fields: Any) -> tuple[Draft, Any]:
    """The first draft of a drafter that is asked for all it may draft, and the session."""
    found: list[Any] = []
    row = drafters.BY_NAME[name]
    config = {**row.add(model), **fields}
    drafter = model.drafters[row.method]
    start = drafter.start

    def spying(*args: Any) -> Any:
        session = start(*args)
        propose = session.propose

        def told(budget: Budget) -> Draft:
            draft = propose(budget)
            found.append(draft)
            return draft

        session.propose = told
        return session

    drafter.start = spying
    try:
        ids, mask = prompts(3)
        model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False, speculative=config)
    finally:
        del drafter.start
    return found[1], drafter


@pytest.mark.parametrize("name", ["eagle", "eagle_static", "eagle3"])
def test_confidences_of_eagle_are_those_of_the_edges(llama: Any, name: str) -> None:
    """Siblings of a dynamic tree come in the order of their confidence, and all of a node's are less than one."""
    draft, _ = confidences(llama, name)
    assert draft.log_probs is not None
    parents = draft.tree.parents.expand(draft.tree.tokens.shape)
    for row in range(3):
        for node in range(draft.tree.num_nodes):
            children = (parents[row] == node).nonzero()[:, 0]
            sure = draft.log_probs[row, children]
            assert sure.exp().sum() <= 1 + 1e-4
            assert torch.equal(sure, sure.sort(descending=True).values)


MAKERS: dict[str, Callable[..., Drafter]] = {
    "eagle": lambda model, **fields: drafters.EagleDrafter(drafters.random_head(model, **fields)),
    "dflash": lambda model, **fields: drafters.DFlashDrafter(drafters.random_block(model, **fields)),
    "medusa": lambda model, **fields: drafters.MedusaDrafter(drafters.random_heads(model, **fields)),
    "pard": lambda _model: drafters.PardDrafter(drafters.pard_assistant("llama")),
    "draft_model": lambda _model, name="llama", **fields: drafters.DraftModelDrafter(zoo.build(name), **fields),
    "last_logits": lambda _model: LastLogitsDrafter(),
    "lookahead": lambda _model, **fields: LookaheadDrafter(**fields),
    "token_recycling": lambda _model, **fields: drafters.TokenRecyclingDrafter(**fields),
}
CHOICES = [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 2)]
SHORT = {"num_steps": 3, "top_k": 2, "num_draft_tokens": 9}
CHAINS = (
    ({"num_steps": 3}, Budget(4, 3, 1)),
    ({"num_draft_tokens": 4, "num_steps": 7}, Budget(4, 3, 1)),
    ({"top_k": 2, "num_draft_tokens": 1}, PLAIN_STEP),
)
LIMITS: list[tuple[str, dict[str, Any], dict[str, Any], Budget | str]] = [
    ("eagle", {}, {"tree": drafters.CHOICES}, Budget(6, 3, 2)),
    ("eagle", {}, {"tree": "static", "num_draft_tokens": 5}, "num_draft_tokens=16, got num_draft_tokens=5"),
    ("eagle", {}, {"tree": [(0,)], "num_steps": 2}, "num_steps=1, got num_steps=2"),
    ("dflash", {}, {}, Budget(16, 4, 4)),
    ("dflash", {"sample_from_anchor": True}, {}, Budget(16, 5, 4)),
    ("dflash", {}, {"top_k": 1}, Budget(5, 4, 1)),
    ("dflash", {}, {"top_k": 2, "num_steps": 2}, Budget(7, 2, 2)),
    ("dflash", SHORT, {}, Budget(9, 3, 2)),
    ("dflash", SHORT, {"num_draft_tokens": 40}, Budget(15, 3, 2)),
    ("dflash", {"markov_rank": 4}, {"num_draft_tokens": 512, "top_k": 3}, Budget(1 + 3 + 3 * 9, 4, 3)),
    ("dflash", {}, {"tree": CHOICES}, Budget(7, 3, 3)),
    ("dflash", {}, {"num_steps": 5}, "A block of 5 slots drafts at most 4 tokens, got num_steps=5"),
    ("dflash", {"sample_from_anchor": True}, {"num_steps": 6}, "drafts at most 5 tokens, got num_steps=6"),
    ("dflash", {}, {"tree": [(0,) * depth for depth in range(1, 6)]}, "drafts at most 4 tokens, got num_steps=5"),
    ("dflash", {"block_size": 3}, {"tree": "static"}, "drafts at most 2 tokens"),
    ("dflash", {"num_steps": 9}, {}, "drafts at most 4 tokens, got num_steps=9"),
    ("dflash", {"draft_vocab_size": 40}, {"top_k": 41}, "exceeds the draft vocabulary of 40"),
    ("dflash", {}, {"tree": [(0,)], "num_steps": 2}, "num_steps=1, got num_steps=2"),
    ("medusa", {"medusa_num_heads": 2}, {"tree": "dynamic"}, "static tree"),
    ("medusa", {"medusa_num_heads": 2}, {"tree": [(0,), (0, 0), (0, 0, 0)]}, "depth 3, but there are only 2"),
    ("medusa", {"medusa_num_heads": 2}, {"tree": [(96,)]}, "rank 96"),
    ("medusa", {"medusa_num_heads": 2}, {"tree": [(0,)], "num_draft_tokens": 5}, "num_draft_tokens=2, got"),
    *(("pard", {}, fields, limits) for fields, limits in CHAINS),
    ("pard", {}, {}, Budget(9, 8, 1)),
    ("pard", {}, {"num_draft_tokens": 5}, Budget(5, 4, 1)),
    ("pard", {}, {"top_k": 4}, Budget(16, 8, 4)),
    ("pard", {}, {**SHORT, "tree": "dynamic", "num_draft_tokens": 50}, Budget(15, 3, 2)),
    *(("draft_model", {}, fields, limits) for fields, limits in CHAINS),
    ("draft_model", {}, {}, Budget(6, 5, 1)),
    ("draft_model", {}, {"num_draft_tokens": 9}, Budget(9, 8, 1)),
    ("draft_model", {}, {"top_k": 4}, Budget(16, 5, 4)),
    ("draft_model", {"name": "qwen3_next"}, {"top_k": 4}, Budget(16, 5, 4)),
    ("draft_model", {"name": "bloom"}, {"top_k": 4}, Budget(16, 5, 4).chain),  # verifies chains
    ("draft_model", {}, {"top_k": 4, "tree": "dynamic", "num_steps": 2, "num_draft_tokens": 50}, Budget(21, 2, 4)),
    ("draft_model", {}, {"top_k": 4, "num_draft_tokens": 3}, Budget(3, 2, 4)),
    ("draft_model", {"sample": True}, {"top_k": 1}, Budget(6, 5, 1)),
    ("draft_model", {"sample": True}, {"top_k": 2}, "draws a chain"),
    ("draft_model", {"sample": True}, {"tree": "dynamic"}, "draws a chain"),
    ("last_logits", {}, {}, Budget(5, 1, 4)),
    ("last_logits", {}, {"top_k": 7}, Budget(8, 1, 7)),
    ("last_logits", {}, {"num_draft_tokens": 4}, Budget(4, 1, 3)),
    ("last_logits", {}, {"num_draft_tokens": 12, "top_k": 2}, Budget(3, 1, 2)),
    ("last_logits", {}, {"num_draft_tokens": 3, "top_k": 7}, Budget(3, 1, 2)),
    ("lookahead", {"reads_prompt": False}, {"top_k": 2}, "A window needs at least 7 nodes, 3 steps and top_k 3"),
    ("lookahead", {"ngram": 1}, {}, "`ngram` must be"),
    ("token_recycling", {}, {"top_k": 9}, "exceeds the 8"),
]  # fmt: skip
"""A drafter with its settings, fields of a call, and the budget that they give or what is said of them."""


@pytest.mark.parametrize(("name", "settings", "fields", "wanted"), LIMITS)
def test_fields_give_a_budget_or_are_refused(
    name: str, settings: dict[str, Any], fields: dict[str, Any], wanted: Budget | str
) -> None:
    if isinstance(wanted, str):
        with pytest.raises(InvalidConfigError, match=wanted):
            MAKERS[name](zoo.build("llama"), **settings).limits(SpeculativeConfig(name, **fields))
        return
    assert MAKERS[name](zoo.build("llama"), **settings).limits(SpeculativeConfig(name, **fields)) == wanted


def test_fields_that_do_not_apply(llama: Any) -> None:
    """Of every row: the trees that `accepts` leaves out are refused before any work, and the way out is named."""
    trees = {"dynamic", "static", "choices"}
    accepted = {
        "eagle": trees, "eagle3": trees, "mtp": trees, "dflash": trees, "dspark": trees, "dflash2": trees,
        "lilicorr": trees, "domino": trees, "peagle": trees, "medusa": trees - {"dynamic"},
        "draft_model": {"dynamic"}, "pard": {"dynamic"}, "early_exit": {"dynamic"},
    }  # fmt: skip
    for row in drafters.ROWS:
        row.add(llama, torch.zeros(1, 1, dtype=torch.long))
    ids = torch.tensor([[5]])
    with llama.register_forward_pre_hook(lambda *_: pytest.fail("refused too late")):
        for method in {row.method for row in drafters.ROWS} - {"oracle"}:
            for tree in trees - accepted.get(method, set()):
                config = {"method": method, "tree": drafters.CHOICES if tree == "choices" else tree}
                with pytest.raises(InvalidConfigError, match="tree"):
                    llama.generate(ids, speculative=config)
        for fields in ({"num_steps": 2}, {"tree": "dynamic"}):
            with pytest.raises(InvalidConfigError, match=r"'last_logits' does not take .* It takes top_k, num_draft"):
                llama.generate(ids, speculative={"method": "last_logits", **fields})


# ------------------------------------------------------------------------------------------------- the registry


@pytest.fixture
def empty_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone after it."""
    monkeypatch.setattr(registry, "_METHODS", dict(methods()))


@pytest.mark.usefixtures("empty_slots")
def test_a_method_of_ones_own(llama: Any) -> None:
    made: list[Any] = []

    def make() -> Any:
        made.append(PromptLookupDrafter())
        return made[-1]

    register_drafter("mine", make, aliases=["my own"])
    ids, mask = prompts(1)
    options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    plain = llama.generate(ids, **options)
    for name in ("mine", "my own", {"method": "mine", "num_draft_tokens": 4}):
        assert torch.equal(plain, llama.generate(ids, speculative=name, **options))
    assert len(made) == 1  # kept with the model
    for name, aliases in (("mine", ()), ("other", ("ngram",)), ("auto", ())):
        with pytest.raises(InvalidConfigError, match="already"):
            register_drafter(name, make, aliases=aliases)
    taken = methods()["eagle"].heads
    with pytest.raises(InvalidConfigError, match="Another method drafts with"):
        register_drafter("eagle too", make, heads=taken)
    with pytest.raises(InvalidConfigError, match=r"got a PromptLookupDrafter\. Pass PromptLookupDrafter, or"):
        register_drafter("an instance", PromptLookupDrafter())  # type: ignore[arg-type]
    assert "an instance" not in methods()
    with pytest.raises(
        DrafterMismatchError, match=r"got the class PromptLookupDrafter. Call it: PromptLookupDrafter\("
    ):
        llama.add_drafter(PromptLookupDrafter)


def test_a_drafter_has_no_name_of_another_method(llama: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    taken, head = "There is already a method '{}'. Choose another name", drafters.random_head(llama)
    head.save_pretrained(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(head_loading, "assistant_config", lambda *_: pytest.fail("read before the name was checked"))
        for name in ("auto", "hybrid", "prompt_lookup", "ngram", "lookahead"):
            with pytest.raises(InvalidConfigError, match=taken.format(name)):
                llama.load_drafter(tmp_path, name=name)
    for name in ("auto", "hybrid", "eagle", "token_recycling"):
        with pytest.raises(InvalidConfigError, match=taken.format(name)):
            llama.add_drafter(PromptLookupDrafter(), name)
    with pytest.raises(InvalidConfigError, match=taken.format("medusa")):
        llama.load_drafter(head, name="medusa")
    assert not llama.drafters
    llama.add_drafter(PromptLookupDrafter(), "ngram")  # its own method's other name
    llama.load_drafter(head, name="eagle")
    assert list(llama.drafters) == ["ngram", "eagle"]
    with pytest.raises(InvalidConfigError, match=r"load_drafter has no option 'revison'\. Did you mean 'revision'"):
        llama.load_drafter(tmp_path, revison="main")


@pytest.mark.usefixtures("empty_slots")
def test_methods_of_installed_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    class Entry:
        name = "theirs"

        def __init__(self, loaded: Any) -> None:
            self.load = lambda: loaded

    registry._load_entry_points.cache_clear()
    monkeypatch.setattr(registry, "entry_points", lambda group: [Entry(Method("theirs", PromptLookupDrafter))])
    assert methods()["theirs"].requires is None
    assert methods()["eagle"].requires is not None
    registry._load_entry_points.cache_clear()
    monkeypatch.setattr(registry, "entry_points", lambda group: [Entry(PromptLookupDrafter)])
    with pytest.raises(InvalidConfigError, match="not a Method"):
        methods()
    registry._load_entry_points.cache_clear()


def test_a_head_that_no_method_drafts_with(llama: Any) -> None:
    class Stranger(drafters.EagleHead):
        pass

    with pytest.raises(DrafterMismatchError, match="No method drafts with a Stranger"):
        drafter_of(Stranger(drafters.EagleConfig.for_target(llama.config)))


def test_limits_and_budgets() -> None:
    assert Budget(32, 4, 2).within(Budget(8, 6, 6)) == Budget(8, 4, 2)
    assert PLAIN_STEP.is_plain
    assert PLAIN_STEP.chain == PLAIN_STEP
    plain = Draft.plain(torch.tensor([7, 8]))
    plain.tree.validate()
    assert plain.num_drafted.tolist() == [0, 0]


# ------------------------------------------------------------------------------------------ heads that do not fit


@pytest.mark.parametrize(
    ("name", "row", "error", "message"),
    [
        ("electra", "medusa", DrafterMismatchError, "lm_head of ElectraForCausalLM takes 128 inputs, this"),
        ("electra", "eagle3", DrafterMismatchError, "token embeddings of size 128, this head needs 32"),
        ("git", "eagle", UnsupportedModelError, r"needs hidden states of shape \(1, 2, 32\)"),
        ("hy_v4", "eagle3", UnsupportedModelError, r"by layer, \{1: \[\(1, 2, 4, 32\)\]"),  # four streams
        ("longcat_flash", "medusa", UnsupportedModelError, r"no list of \d decoder layers"),
    ],
)
def test_a_head_is_refused_when_it_is_loaded(name: str, row: str, error: type[Exception], message: str) -> None:
    try:
        model = SpeculativeGenerationMixin.attach(copy.deepcopy(zoo.build(name)))
    except (KeyError, UnsupportedModelError) as missing:  # in older transformers
        pytest.skip(f"{name} verifies nothing in this version of transformers: {missing}")
    with pytest.raises(error, match=message):
        drafters.BY_NAME[row].add(model)
    assert model.drafters == {}


@pytest.mark.slow
def test_a_head_takes_the_sizes_of_the_last_layer() -> None:
    """Of models whose layers differ: a list per field (Gemma 3n), or configurations per layer."""
    assert drafters.EagleConfig.for_target(zoo.build("gemma3n_text").config).intermediate_size == 64
    if "dots3_note_text" not in zoo.NAMES:
        pytest.skip("this version of transformers has no configurations per layer")
    varying = zoo.build("dots3_note_text").config
    last = varying.per_layer_config[varying.num_hidden_layers - 1]
    config = drafters.EagleConfig.for_target(varying, head_dim=8, num_key_value_heads=1)
    assert config.num_attention_heads == last.num_attention_heads
