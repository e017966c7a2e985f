"""Early exit: the part against a model that really is shorter, the target's cache and modules left as they were."""

from __future__ import annotations

import copy
import functools
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, GenerationConfig, LlamaForCausalLM

import zoo
from hf_specdec import (
    DrafterMismatchError,
    InvalidConfigError,
    SpeculativeConfig,
    SpeculativeGenerationMixin,
    UnsupportedModelError,
)
from hf_specdec.drafters.base import DraftContext
from hf_specdec.drafters.experimental import early_exit
from hf_specdec.drafters.experimental.early_exit import (
    EarlyExitDrafter,
    GrowingTree,
    search_skipped_layers,
    skippable,
    without_layers,
)
from hf_specdec.trees.draft import Budget, Draft
from hf_specdec.verification.cache import TreeLayer
from hf_specdec.verification.model import CACHE_FIELD
from hf_specdec.verification.probe import inspect_target
from hf_specdec.verification.target import Target
from hf_specdec.verification.trials import first_inputs
from models import prompts

OPTIONS: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
TREE = {"method": "early_exit", "num_steps": 3, "top_k": 2}


@pytest.fixture(scope="module", params=["llama", "gemma3_text", "qwen3_next"])
def model(request: pytest.FixtureRequest) -> Any:
    """Full attention, sliding windows, a recurrent state (which verifies chains)."""
    return SpeculativeGenerationMixin.attach(copy.deepcopy(zoo.build(request.param)))


def llama_of(num_layers: int, useless: tuple[int, ...] = ()) -> Any:
    """A tiny Llama of any depth, some of whose layers do nothing."""
    config = copy.deepcopy(zoo.build("llama").config)
    config.num_hidden_layers, config.layer_types = num_layers, None
    torch.manual_seed(1)
    made: Any = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)
        for layer in useless:
            made.model.layers[layer].self_attn.o_proj.weight.zero_()
            made.model.layers[layer].mlp.down_proj.weight.zero_()
    made.generation_config.pad_token_id = 0
    return SpeculativeGenerationMixin.attach(made)


# ------------------------------------------------------------------------------------------------------ the answer


@pytest.mark.parametrize("config", [{"method": "early_exit"}, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("settings", [{}, {"skipped_layers": (2,)}])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_the_plain_answer(model: Any, settings: Any, config: Any, batch_size: int) -> None:
    ids, mask = prompts(batch_size)
    model.add_drafter(EarlyExitDrafter(**settings))
    plain = model.generate(ids, attention_mask=mask, **OPTIONS)
    assert torch.equal(plain, model.generate(ids, attention_mask=mask, speculative=config, **OPTIONS))
    assert model.last_speculation.num_drafted_tokens > 0


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("settings", [{"exit_layer": 4}, {"skipped_layers": ()}], ids=str)
def test_with_all_layers_everything_is_accepted(model: Any, settings: Any, batch_size: int) -> None:
    ids, mask = prompts(batch_size)
    model.add_drafter(EarlyExitDrafter(**settings))
    options = {**OPTIONS, "attention_mask": mask, "max_new_tokens": 26}  # one of the prompt's, and five steps of five
    plain = model.generate(ids, **options)
    assert torch.equal(plain, model.generate(ids, speculative="early_exit", **options))
    assert model.last_speculation.mean_accepted_length == 5.0
    assert model.last_speculation.num_target_forwards == 5


def test_a_cache_that_was_handed_in() -> None:
    """What it holds is drafted from as well: all layers, all right."""
    model: Any = llama_of(4)
    model.add_drafter(EarlyExitDrafter(exit_layer=4))
    ids, mask = prompts(1)
    whole = model.generate(ids, attention_mask=mask, **{**OPTIONS, "max_new_tokens": 26})
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=ids[:, :12], **{CACHE_FIELD: cache}, use_cache=True)
    answer = model.generate(
        ids, attention_mask=mask, **{CACHE_FIELD: cache}, speculative="early_exit", max_new_tokens=26, do_sample=False
    )
    assert torch.equal(whole, answer)
    assert model.last_speculation.mean_accepted_length == 5.0


FIELDS: list[dict[str, int]] = [{"top_k": 4, "num_draft_tokens": 5}, {"top_k": 3}, {"num_draft_tokens": 2}]


@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_drafting_fits_the_cache(fields: dict[str, int]) -> None:
    """Where the cache has not a slot more than prompt, answer and tree need."""
    model: Any = llama_of(4)
    drafter = model.add_drafter(EarlyExitDrafter(exit_layer=2))
    config = SpeculativeConfig("early_exit", **fields)
    ids, mask = prompts(3)
    needed = ids.shape[1] + 24 + 1 + drafter.limits(config).num_nodes
    plain = model.generate(ids, attention_mask=mask, **OPTIONS)
    tight = {"method": "early_exit", **fields, "max_cache_length": needed}
    assert torch.equal(plain, model.generate(ids, attention_mask=mask, speculative=tight, **OPTIONS))


# ------------------------------------------------------------------------------------------------ what is drafted


def begun(model: Any, batch_size: int) -> tuple[Target, DraftContext]:
    """A generation after its prompt."""
    ids, mask = prompts(batch_size)
    target = inspect_target(model).new_target(model, capacity=64, reserve=0)
    with torch.no_grad():
        prefill = target.prefill(ids, GenerationConfig(), first_inputs(model, mask, target.cache))
    return target, DraftContext(ids, target.padding, prefill.logits[:, -1].argmax(-1))


def shortened(model: Any, num_layers: int) -> Any:
    """A model that really has no more layers."""
    short = copy.deepcopy(model)
    del short.model.layers[num_layers:]
    short.config.num_hidden_layers = num_layers
    return short


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_drafts_are_those_of_a_shorter_model(name: str, top_k: int, batch_size: int) -> None:
    """Every node has the confidence that a model of two layers has in it, on the text up to its parent."""
    model = copy.deepcopy(zoo.build(name))
    target, context = begun(model, batch_size)
    drafter = EarlyExitDrafter(exit_layer=2)
    drafter.bind(model)
    config = SpeculativeConfig("early_exit", num_steps=3, top_k=top_k)
    with torch.no_grad():
        draft = drafter.start(target, context, config).propose(drafter.limits(config))
    draft.tree.validate()
    assert draft.log_probs is not None
    assert draft.tree.num_nodes == 1 + 3 * top_k
    short, parents = shortened(model, 2), draft.tree.parents.expand(draft.tree.tokens.shape)
    for row in range(batch_size):
        padding = 0 if context.padding is None else int(context.padding.left[row])
        for node in range(1, draft.tree.num_nodes):
            path, above = list[int](), node
            while (above := int(parents[row, above])) >= 0:
                path.insert(0, int(draft.tree.tokens[row, above]))
            text = torch.tensor([[*context.input_ids[row, padding:].tolist(), *path]])
            with torch.no_grad():
                wanted = short(input_ids=text, use_cache=False).logits[0, -1].log_softmax(-1)
            token = draft.tree.tokens[row, node]
            torch.testing.assert_close(draft.log_probs[row, node], wanted[token], rtol=1e-4, atol=1e-4)
            if top_k == 1:
                assert token == wanted.argmax()


def test_kept_layers_are_run_on_the_target_s_own_entries() -> None:
    """A layer in the middle is left out: the layers behind it see the text as the whole model does."""
    model = llama_of(4, useless=(2,))
    target, context = begun(model, 1)
    drafter = EarlyExitDrafter(skipped_layers=(2,))
    drafter.bind(model)
    with torch.no_grad():
        drafted = drafter.start(target, context, SpeculativeConfig()).propose(Budget(5, 4, 1)).tree.tokens
    plain = model.generate(context.input_ids, max_new_tokens=5, do_sample=False)
    assert torch.equal(drafted, plain[:, -5:])


def test_more_nodes_are_not_run_than_are_kept() -> None:
    model: Any = llama_of(3)
    target, context = begun(model, 1)
    drafter = EarlyExitDrafter(exit_layer=1)
    drafter.bind(model)
    session = drafter.start(target, context, SpeculativeConfig())

    def proposed(budget: Budget) -> Draft:
        with torch.no_grad():
            draft = session.propose(budget)
        draft.tree.validate()
        assert draft.tree.num_nodes <= budget.num_nodes
        assert target.cache.layers[0].get_seq_length() == target.start  # forgotten
        return draft

    assert proposed(Budget(5, 4, 2)).tree.max_depth == 3
    assert proposed(Budget(3, 4, 2)).tree.max_depth == 2
    assert proposed(Budget(3, 4, 6)).tree.max_depth == 1
    assert proposed(Budget(1, 0, 1)).tree.num_nodes == 1


# ------------------------------------------------------------------------------------------------- left as it was


def photograph(model: nn.Module) -> list[Any]:
    """Modules by name and identity, what stands in them, hooks, and weights by identity."""
    return [
        (name, id(module), type(module), sorted(vars(module)), list(module._modules), list(module._forward_hooks),
         list(module._forward_pre_hooks), [id(parameter) for parameter in module._parameters.values()])
        for name, module in model.named_modules()
    ]  # fmt: skip


def test_the_model_is_left_as_it_was(model: Any) -> None:
    layers, before, keys = model.model.layers, photograph(model), list(model.state_dict())
    model.add_drafter(EarlyExitDrafter(exit_layer=2))
    ids, mask = prompts(3)
    model.generate(ids, attention_mask=mask, speculative=TREE, **OPTIONS)
    model.generate(ids, attention_mask=mask, speculative="early_exit", **OPTIONS)
    assert model.model.layers is layers
    assert list(model.state_dict()) == keys
    after = photograph(model)
    harmless = "_output_capturing_hooks_installed"
    for was, now in zip(before, after, strict=True):
        assert [*was[:3], [name for name in was[3] if name != harmless], *was[4:]] == [
            *now[:3], [name for name in now[3] if name != harmless], *now[4:]
        ]  # fmt: skip
    hidden = model.generate(
        ids, attention_mask=mask, return_dict_in_generate=True, output_hidden_states=True, **OPTIONS
    ).hidden_states
    assert len(hidden[1]) == 5  # the embedding and four layers, none twice


@pytest.mark.parametrize("name", ["llama", "qwen3_next", "falcon_alibi", "mistral"])
def test_an_interrupted_draft_is_forgotten(name: str) -> None:
    model = zoo.build(name)
    target, context = begun(model, 3)
    skipped = skippable(model, [2, 3])
    before = copy.deepcopy([
        {key: value for key, value in vars(layer).items() if key != "store"} for layer in target.cache.layers
    ]) if not target.supports_trees else []  # fmt: skip

    @torch.no_grad()
    def interrupted() -> None:
        with GrowingTree(target.with_model(without_layers(model, skipped))) as part:
            part.append(context.roots[:, None])
            part.append(context.roots[:, None], torch.zeros(3, 1, dtype=torch.long))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    if target.supports_trees:
        layers = [layer for layer in target.cache.layers if isinstance(layer, TreeLayer)]
        assert {layer.get_seq_length() for layer in layers} == {target.start}
    else:
        for was, layer in zip(before, target.cache.layers, strict=True):
            assert _equal(was, vars(layer))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    return bool(one == other)


@pytest.mark.slow
def test_threads_share_a_model() -> None:
    """One drafts with few layers and one with all, over one model, at the same time."""
    model: Any = llama_of(4)
    model.add_drafter(EarlyExitDrafter(exit_layer=1), "one")
    model.add_drafter(EarlyExitDrafter(exit_layer=4), "all")
    ids, mask = prompts(1)
    options = {**OPTIONS, "attention_mask": mask, "max_new_tokens": 26, "return_dict_in_generate": True}
    plain = model.generate(ids, **options).sequences

    def run(name: str) -> Any:
        return [model.generate(ids, speculative=name, **options) for _ in range(4)]

    with ThreadPoolExecutor(2) as pool:
        one, everything = pool.map(run, ["one", "all"])
    for output in [*one, *everything]:
        assert torch.equal(plain, output.sequences)
    assert {output.speculation.mean_accepted_length for output in everything} == {5.0}


def test_copies_of_the_model_bind_anew() -> None:
    model: Any = llama_of(4)
    model.add_drafter(EarlyExitDrafter(exit_layer=3))
    ids, _ = prompts(1)
    plain = model.generate(ids, speculative="early_exit", **OPTIONS)
    taus = {model.last_speculation.mean_accepted_length}
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(plain, other.generate(ids, speculative="early_exit", **OPTIONS))
        taus.add(other.last_speculation.mean_accepted_length)
        assert other.drafters["early_exit"].exit_layer == 3
    assert len(taus) == 1


def test_one_drafter_for_two_models() -> None:
    drafter = EarlyExitDrafter()
    deep, flat = llama_of(6), llama_of(3)
    ids, _ = prompts(1)
    for model in (deep, flat):
        model.add_drafter(drafter)
    assert [drafter.layers_to_skip(model) for model in (deep, flat)] == [(2, 3, 4, 5), (1, 2)]
    for model in (deep, flat):
        plain = model.generate(ids, **OPTIONS)
        assert torch.equal(plain, model.generate(ids, speculative="early_exit", **OPTIONS))


# ------------------------------------------------------------------------------------------------------ the search


def test_the_search_finds_layers_that_do_nothing() -> None:
    model: Any = llama_of(8, useless=(3, 5))
    texts = [prompts(1)[0], torch.arange(4, 16)]
    before = photograph(model)
    found = search_skipped_layers(model, texts, ratio=2 / 6, trials=4, new_tokens=12)
    assert found == (3, 5)
    assert photograph(model) == before
    model.add_drafter(EarlyExitDrafter(skipped_layers=found))
    model.generate(texts[0], speculative="early_exit", **{**OPTIONS, "max_new_tokens": 26})
    assert model.last_speculation.mean_accepted_length == 5.0


@pytest.mark.parametrize("seed", range(2))
def test_the_search_returns_the_best_that_it_tried(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = llama_of(8)
    with torch.no_grad():  # layers that matter a little each, so that sets of them differ by degrees
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.2)
            layer.mlp.down_proj.weight.mul_(0.2)
    text = prompts(1)[0]
    tried: list[tuple[int, ...]] = []

    def spy(target: Any, layers: Any) -> Any:
        tried.append(tuple(sorted(layers)))
        return without_layers(target, layers)

    monkeypatch.setattr(early_exit, "without_layers", spy)
    found = search_skipped_layers(model, [text], ratio=0.5, trials=12, new_tokens=24, seed=seed)
    assert search_skipped_layers(model, [text], ratio=0.5, trials=12, new_tokens=24, seed=seed) == found
    assert not {0, 7} & set(found)
    answer = model.generate(text, max_new_tokens=24, do_sample=False)
    with torch.no_grad():
        whole = model(input_ids=answer, use_cache=False).logits[0, 20:].argmax(-1)
        scores = {
            layers: float((without_layers(model, dict.fromkeys(layers))(input_ids=answer, use_cache=False)
                           .logits[0, 20:].argmax(-1) == whole).float().mean())
            for layers in tried if len(layers) == len(found)
        }  # fmt: skip
    assert len(set(scores.values())) > 2
    assert scores[found] == max(scores.values())


def test_the_search_leaves_alone_what_must_run() -> None:
    """A hybrid's first attention layer, by which transformers counts tokens, may be skipped: masks are our own."""
    model: Any = SpeculativeGenerationMixin.attach(copy.deepcopy(zoo.build("qwen3_next")))
    assert search_skipped_layers(model, [torch.arange(4, 10)], ratio=1, new_tokens=4) == (1, 2)
    try:
        git: Any = SpeculativeGenerationMixin.attach(copy.deepcopy(zoo.build("git")))
    except UnsupportedModelError as missing:  # in older transformers
        pytest.skip(f"git verifies nothing in this version of transformers: {missing}")
    with pytest.raises(UnsupportedModelError, match="they return NoneType"):
        search_skipped_layers(git, [torch.arange(4, 10)], new_tokens=4)


def test_what_the_search_refuses() -> None:
    model: Any = llama_of(4)
    with pytest.raises(InvalidConfigError, match="Expected prompts and a ratio"):
        search_skipped_layers(model, [])
    with pytest.raises(InvalidConfigError, match="got 1 prompts and 0"):
        search_skipped_layers(model, [torch.arange(4)], ratio=0)
    with pytest.raises(DrafterMismatchError, match="none of which can be skipped"):
        search_skipped_layers(llama_of(2), [torch.arange(4)])


# --------------------------------------------------------------------------------------------------------- refusals


def test_layers_that_there_are_not() -> None:
    model: Any = llama_of(4)
    with pytest.raises(DrafterMismatchError, match="has 4 layers, got exit_layer=5"):
        model.add_drafter(EarlyExitDrafter(exit_layer=5))
    with pytest.raises(DrafterMismatchError, match=r"layers 0 to 3, got \[2, 9\]"):
        model.add_drafter(EarlyExitDrafter(skipped_layers=(9, 2)))
    assert model.drafters == {}


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("git", {}, "they return NoneType"),
        ("longcat_flash", {}, r"no list of \d decoder layers"),
    ],
)
def test_models_that_do_not_run_without_layers(name: str, settings: Any, message: str) -> None:
    try:
        model: Any = SpeculativeGenerationMixin.attach(copy.deepcopy(zoo.build(name)))
    except (KeyError, UnsupportedModelError) as missing:  # in older transformers
        pytest.skip(f"{name} verifies nothing in this version of transformers: {missing}")
    with pytest.raises(UnsupportedModelError, match=message):
        model.add_drafter(EarlyExitDrafter(**settings))
    assert model.drafters == {}


def test_a_forward_that_was_replaced_is_not_gone_around() -> None:
    """It would run all layers: bound to the model it was put on."""
    model: Any = llama_of(4)
    model.model.forward = model.model.forward
    with pytest.raises(UnsupportedModelError, match="The forward of this LlamaModel was replaced"):
        model.add_drafter(EarlyExitDrafter())


def test_layers_that_are_reached_in_another_way() -> None:
    class Stubborn(LlamaForCausalLM):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            vars(self)["whole"] = self.model

        @functools.wraps(LlamaForCausalLM.forward)  # its signature
        def forward(self, *inputs: Any, **named: Any) -> Any:
            own, self.model = self.model, vars(self)["whole"]
            try:
                return super().forward(*inputs, **named)
            finally:
                self.model = own

    model: Any = SpeculativeGenerationMixin.attach(Stubborn(zoo.build("llama").config).eval())
    with pytest.raises(UnsupportedModelError, match="they still run"):
        model.add_drafter(EarlyExitDrafter())


def test_a_cache_that_is_not_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Target, "forget", lambda self: None)
    with pytest.raises(UnsupportedModelError, match=r"changes its cache|RuntimeError"):
        llama_of(4).add_drafter(EarlyExitDrafter())
