"""The MTP drafter: the module by its formula, drafts by a slow recomputation, native modules by transformers' own."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, Cache

import native_mtp
import zoo
from benchmark_script import code_block
from drafters import random_head, random_module
from hf_specdec import (
    CheckpointFormatError,
    DrafterMismatchError,
    HeadTensorsError,
    InvalidConfigError,
    MtpConfig,
    MtpHead,
    SpeculativeConfig,
    UnsupportedModelError,
    export_head,
    load_head,
)
from hf_specdec.checkpoints.hub import inspect_head
from hf_specdec.drafters.mtp import MtpDrafter, NativeMtpDrafter
from hf_specdec.drafters.registry import methods
from hf_specdec.generation.state import state_of
from hf_specdec.training import EagleTrainingConfig, capture_features, train_eagle
from hf_specdec.trees.draft import Budget, Draft
from hf_specdec.verification.cache import TreeCache
from reference import IDS, MASK, Recorder, SlowEagle, path_to_root, paths_of, slow_dynamic_tree
from trained import answered, arguments

pytestmark = pytest.mark.usefixtures("full_depth")


GREEDY = {"max_new_tokens": 20, "do_sample": False}
DRAWN = {"max_new_tokens": 20, "do_sample": True, "top_k": 8, "temperature": 0.7}


# ------------------------------------------------------------------------------------------------ a trained module


@pytest.mark.parametrize("fields", [{}, {"draft_vocab_size": 40}, {"sliding_window": 4, "qk_norm": True}], ids=str)
@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_drafts_equal_the_definition(name: str, fields: dict[str, Any], attach: Any) -> None:
    """Every chain and tree of a ragged, padded batch equals the one recomputed for its row alone."""
    model = attach(name)
    head = random_head(model, version="mtp", **fields)
    assert isinstance(head, MtpHead)
    for config, sizes in (({}, (3, 1, 4)), ({"top_k": 3, "num_draft_tokens": 10}, (3, 3, 10))):
        drafter = MtpDrafter(head)
        recorder = Recorder(drafter, IDS)
        model.add_drafter(drafter)
        options = {"attention_mask": MASK, "max_new_tokens": 8, "do_sample": False}
        plain = model.generate(IDS, **options)
        assert torch.equal(plain, model.generate(IDS, speculative={"method": "mtp", **config}, **options))
        assert len(recorder.trees) > 3
        for texts, tree in recorder.trees:
            tree.validate()
            for row in range(3):
                if len(texts[row]) < 22 - 4 * (row == 1) - 9 * (row == 2):
                    assert set(paths_of(tree, row)) == slow_dynamic_tree(SlowEagle(model, head, texts[row]), *sizes)


def test_a_chain_unless_a_tree_is_asked_for(llama: Any) -> None:
    drafter = MtpDrafter(random_module(llama))
    assert drafter.limits(SpeculativeConfig("mtp")) == Budget(num_nodes=4, num_steps=3, top_k=1)
    assert drafter.limits(SpeculativeConfig("mtp", num_steps=5)) == Budget(6, 5, 1)
    assert drafter.limits(SpeculativeConfig("mtp", top_k=2)) == Budget(11, 3, 2)
    assert drafter.limits(SpeculativeConfig("mtp", tree=((0,), (1,)))) == Budget(3, 1, 2)
    own = MtpDrafter(random_module(llama, num_steps=2, top_k=4, num_draft_tokens=9))
    assert own.limits(SpeculativeConfig("mtp")) == Budget(9, 2, 4)
    assert "MtpDrafter(MtpHead of this process)" in repr(own)


def test_kept_in_our_own_layout(llama: Any, tmp_path: Path) -> None:
    head = random_module(llama, qk_norm=True, draft_vocab_size=40, num_steps=2)
    export_head(head, tmp_path / "head")
    again = load_head(tmp_path / "head")
    assert type(again) is MtpHead
    assert (again.config.num_steps, again.config.layernorms, again.layout) == (2, True, "hf-specdec")
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in head.state_dict().items())
    assert not [name for name in again.state_dict() if "embed_tokens" in name or "lm_head" in name]
    drafter = llama.load_drafter(tmp_path / "head")
    assert type(drafter) is MtpDrafter
    assert list(llama.drafters) == ["mtp"]
    report = inspect_head(tmp_path / "head")
    assert (report.method, report.head, report.layers_read) == ("mtp", "MtpHead", [-1])
    card = (tmp_path / "head" / "README.md").read_text()
    assert "# MTP module for" in card
    assert 'speculative="mtp"' in card


def test_modules_that_do_not_fit(llama: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidConfigError, match="normalizes its inputs and its output, got layernorms=False"):
        random_module(llama, layernorms=False)
    with pytest.raises(DrafterMismatchError, match="hidden_size 64"):
        llama.load_drafter(MtpHead(MtpConfig.for_target(llama.config, hidden_size=64)))
    head = random_module(llama)
    del head.norm
    head.save_pretrained(tmp_path / "no norm")
    with pytest.raises(HeadTensorsError, match=r"missing tensors: norm\.weight"):
        load_head(tmp_path / "no norm")
    with pytest.raises(CheckpointFormatError, match="is for Eagle3Head, this is MtpHead"):
        export_head(random_module(llama), tmp_path / "out", format="eagle3")


@pytest.mark.slow
def test_a_module_learns_and_is_accepted(sure_llama: Any, tmp_path: Path) -> None:
    """A few sequences by heart, through three steps of one module."""
    prompts, answers, talks = answered(sure_llama, 4, 24)
    torch.manual_seed(0)
    head = MtpHead(MtpConfig.for_target(sure_llama.config))
    recipe = EagleTrainingConfig.for_head(head)
    assert (recipe.feature_weight, recipe.token_weight, recipe.aligned_steps, recipe.step_decay) == (0.0, 1.0, 3, 0.6)
    store = capture_features(sure_llama, talks, tmp_path / "store", layers=head.feature_layers)
    options = arguments(tmp_path / "run", 250, learning_rate=5e-3)
    assert train_eagle(sure_llama, head, store, options) is head
    sure_llama.load_drafter(head)
    again = sure_llama.generate(prompts, max_new_tokens=24, do_sample=False, speculative="mtp")
    assert torch.equal(again, answers)
    assert sure_llama.last_speculation.mean_accepted_length > 2.5


# ------------------------------------------------------------------------------------------------- native modules

NATIVE = [("deepseek_v3", 1), ("glm4_moe", 1), ("mellum", 1), ("deepseek_v3", 3), ("glm4_moe", 2)]


@pytest.fixture(scope="module", params=NATIVE, ids=lambda param: f"{param[0]}-{param[1]}")
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved with MTP modules that guess right now and then: they see the token, as the model mostly does."""
    name, count = request.param
    folder = tmp_path_factory.mktemp(f"{name}-{count}")
    if not hasattr(CONFIG_MAPPING[name](), "num_mtp_layers"):
        pytest.skip(f"this version of transformers runs no MTP modules of {name}")
    native_mtp.save(name, count, folder)
    return folder


@pytest.fixture
def native(checkpoint: Path) -> Iterator[Any]:
    yield from native_mtp.loaded(checkpoint)


def theirs(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], list[int], Tensor]]:
    """Every text that transformers drafted for, with its draft and how sure it was, in generate(use_mtp=True)."""
    from transformers.generation.candidate_generator import MTPCandidateGenerator

    drafts: list[tuple[list[int], list[int], Tensor]] = []
    candidates = MTPCandidateGenerator.get_candidates

    def spying(self: Any, input_ids: Tensor, **kwargs: Any) -> Any:
        found = candidates(self, input_ids, **kwargs)
        if found[1] is not None:
            sure = found[1][0].log_softmax(-1).max(-1).values
            drafts.append((input_ids[0].tolist(), found[0][0, input_ids.shape[1] :].tolist(), sure))
        return found

    monkeypatch.setattr(MTPCandidateGenerator, "get_candidates", spying)
    model.generate(IDS[:1], attention_mask=MASK[:1], use_mtp=True, **GREEDY)
    return drafts


def recorded(model: Any, ids: Tensor, mask: Tensor, options: dict[str, Any], **fields: Any) -> Recorder:
    """Speculate with the model's own modules, and keep what was drafted."""
    drafter = MtpDrafter.native(model)
    recorder = Recorder(drafter, ids)  # type: ignore[arg-type]
    model.add_drafter(drafter)
    model.generate(ids, attention_mask=mask, speculative={"method": "mtp", **fields}, **options)
    return recorder


def test_native_modules_draft_what_transformers_drafts(native: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same drafts for the same texts, step by step; the last token, which needs no draft, apart."""
    count = native.config.num_mtp_layers
    wanted = theirs(native, monkeypatch)
    recorder = recorded(native, IDS[:1], MASK[:1], GREEDY, num_steps=count)
    drafts = [(texts[0], tree.tokens[0, 1:].tolist()) for texts, tree in recorder.trees]
    assert len(drafts) >= 6
    assert drafts == [(text, tokens) for text, tokens, _ in wanted][: len(drafts)]
    assert len(wanted) - len(drafts) <= 1
    for draft, (_, _, sure) in zip(recorder.drafts, wanted, strict=False):
        assert draft.log_probs is not None
        torch.testing.assert_close(draft.log_probs[0, 1:], sure, atol=1e-4, rtol=0)
    accepted = {len(text) - len(before) - 1 for (before, _), (text, _) in pairwise(drafts)}
    assert {0, count} <= accepted  # and so what was drafted right goes on, what was wrong is forgotten


@pytest.mark.parametrize("options", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_native_modules_keep_the_plain_answer(native: Any, options: dict[str, Any]) -> None:
    """By the method's name alone; the modules are loaded once."""
    for ids, mask in ((IDS[:1], MASK[:1]), (IDS, MASK))[: 1 if options is DRAWN else 2]:
        answers = []
        for speculative in (None, "mtp"):
            torch.manual_seed(3)
            answers.append(native.generate(ids, attention_mask=mask, speculative=speculative, **options))
        assert torch.equal(*answers)
    assert native.drafters == {}
    drafter = state_of(native).made["mtp"]
    assert isinstance(drafter, NativeMtpDrafter)
    assert state_of(copy.deepcopy(native)).made == {}
    native.generate(IDS, attention_mask=MASK, speculative="mtp", **options)
    assert state_of(native).made["mtp"] is drafter
    assert all(parameter.requires_grad for parameter in native.parameters())  # the target's own are left alone


def test_native_modules_under_any_budget(native: Any, wandering: list[Any]) -> None:
    """Plain steps between, and drafts of every size: what was not drafted for is read later."""
    plain = native.generate(IDS, attention_mask=MASK, **GREEDY)
    assert torch.equal(plain, native.generate(IDS, attention_mask=MASK, speculative="mtp", **GREEDY))
    (controller,) = wandering
    assert {step.draft.tree.num_nodes for _, step in controller.seen} >= {1, 2, 3}


class SlowModules:
    """Native modules by definition: module k over a whole text without a cache, on what module k-1 made of it."""

    def __init__(self, model: Any, drafter: NativeMtpDrafter, text: list[int]) -> None:
        self.model, self.head, self.text, self.count = model, drafter.head, text, drafter.head.config.num_layers
        with torch.no_grad():
            inputs = torch.tensor([text[:-1]])
            self.features = model(inputs, use_cache=False, output_hidden_states=True).hidden_states[-1]

    def run(self, layer: int, tokens: list[int], hidden: Tensor) -> Tensor:
        cache: Cache = TreeCache([None] * self.count, capacity=0, reserve=64)
        embeddings = self.head.embedding_for(self.model)(torch.tensor([tokens]))
        length, mask = len(tokens), None
        if self.head.config.sliding_window is not None:
            behind = torch.arange(length)[:, None] - torch.arange(length)
            mask = ((behind >= 0) & (behind < self.head.config.sliding_window))[None, None]
        return self.head.read_layer(layer, embeddings, hidden, torch.arange(length)[None], cache, mask)

    @torch.no_grad()
    def best_children(self, path: list[int], k: int) -> list[tuple[float, int]]:
        tokens, hidden = [*self.text[1:], *path], self.features
        if self.count > 1:
            for layer in range(len(path) + 1):
                hidden = self.run(layer, tokens[layer:][: hidden.shape[1]], hidden)
        else:
            for length in range(len(self.text) - 1, len(tokens) + 1):
                made = self.run(0, tokens[:length], hidden)
                hidden = torch.cat([hidden, made[:, -1:]], dim=1)
        scores, ids = self.head.score(hidden[0, -1], self.model.lm_head).log_softmax(-1).topk(k)
        return list(zip(scores.tolist(), ids.tolist(), strict=True))


def assert_as_defined(slow: Any, draft: Draft, row: int, sizes: tuple[int, int, int]) -> None:
    """The nodes of one row, and how sure of each the drafter is."""
    tree, log_probs = draft.tree, draft.log_probs
    tree.validate()
    assert log_probs is not None
    assert set(paths_of(tree, row)) == slow_dynamic_tree(slow, *sizes)
    parents = tree.parents.expand(tree.tokens.shape)[row].tolist()
    for node in range(1, tree.num_nodes):
        path = [int(tree.tokens[row, place]) for place in path_to_root(parents, node)[1:]]
        (wanted,) = [score for score, token in slow.best_children(path[:-1], sizes[1]) if token == path[-1]]
        assert abs(float(log_probs[row, node]) - wanted) < 1e-4


@pytest.mark.slow
def test_native_drafts_equal_the_definition(native: Any) -> None:
    """In a ragged, padded batch, deeper than transformers drafts with one module, and as trees with one."""
    count = native.config.num_mtp_layers
    sizes = [(count, 1, count + 1)] if count > 1 else [(3, 1, 4), (3, 2, 8)]
    for steps, top_k, nodes in sizes:
        fields = {"num_steps": steps, "top_k": top_k, "num_draft_tokens": nodes}
        options = {"max_new_tokens": 14, "do_sample": False}
        recorder = recorded(native, IDS, MASK, options, **fields)
        drafter: Any = native.drafters["mtp"]
        assert len(recorder.trees) > 3
        for (texts, _), draft in zip(recorder.trees, recorder.drafts, strict=True):
            for row in range(3):
                if len(texts[row]) < 28 - 4 * (row == 1) - 9 * (row == 2):
                    slow = SlowModules(native, drafter, texts[row])
                    assert_as_defined(slow, draft, row, (steps, top_k, nodes))


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model with three modules."""
    folder = tmp_path_factory.mktemp("three")
    native_mtp.save("deepseek_v3", 3, folder)
    return next(native_mtp.loaded(folder))


@pytest.mark.slow
@pytest.mark.parametrize("strength", [1, 8])
def test_several_modules_attend_within_their_window(three: Any, strength: float) -> None:
    """The prompt, and what is read after it: each entry sees four, itself included, and not one more.

    Weak attention has long drafts accepted, so that more than four entries are read at once; strong attention makes
    what was seen in the prompt decide.
    """
    drafter = MtpDrafter.native(three)
    recorder = Recorder(drafter, IDS)  # type: ignore[arg-type]
    three.add_drafter(drafter)
    whole = drafter.head.config
    with torch.no_grad():
        for name, parameter in drafter.head._modules.layers.named_parameters():
            if "self_attn" in name and parameter.dim() > 1:
                parameter.mul_(strength)
    try:
        drafter.head.config = dataclasses.replace(whole, sliding_window=4)
        options = {"max_new_tokens": 14, "do_sample": False}
        plain = three.generate(IDS, attention_mask=MASK, **options)
        assert torch.equal(plain, three.generate(IDS, attention_mask=MASK, speculative="mtp", **options))
        assert len(recorder.trees) > 3
        for (texts, _), draft in zip(recorder.trees, recorder.drafts, strict=True):
            for row in range(3):
                if len(texts[row]) < 28 - 4 * (row == 1) - 9 * (row == 2):
                    assert_as_defined(SlowModules(three, drafter, texts[row]), draft, row, (3, 1, 4))
    finally:
        drafter.head.config = whole
        three.remove_drafter("mtp")


@pytest.mark.parametrize("length", [1, 2, 3])
def test_prompts_shorter_than_there_are_modules(three: Any, length: int) -> None:
    ids, mask = torch.tensor([[7, 8, 9], [0, 0, 9]])[:, 3 - length :], torch.tensor([[1, 1, 1], [0, 0, 1]])
    plain = three.generate(ids, attention_mask=mask[:, 3 - length :], **GREEDY)
    assert torch.equal(plain, three.generate(ids, attention_mask=mask[:, 3 - length :], speculative="mtp", **GREEDY))
    recorder = recorded(three, ids, mask[:, 3 - length :], {"max_new_tokens": 14, "do_sample": False})
    drafter: Any = three.remove_drafter("mtp")
    assert len(recorder.trees) > 3
    for (texts, _), draft in zip(recorder.trees, recorder.drafts, strict=True):
        for row in range(2):
            if len(texts[row]) < 14 + (length, 1)[row]:
                assert_as_defined(SlowModules(three, drafter, texts[row]), draft, row, (3, 1, 4))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"top_k": 2}, r"draft chains of at most 3 tokens, got num_steps=3, top_k=2\. Leave tree"),
        ({"num_steps": 4}, "num_steps=4, top_k=1"),
        ({"tree": [(0,), (1,)]}, "num_steps=1, top_k=2"),
    ],
)
def test_several_modules_draft_no_trees(three: Any, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidConfigError, match=message):
        three.generate(IDS, attention_mask=MASK, speculative={"method": "mtp", **fields}, **GREEDY)
    assert MtpDrafter.native(three).limits(SpeculativeConfig("mtp", num_steps=2)) == Budget(3, 2, 1)
    assert MtpDrafter.native(three).limits(SpeculativeConfig("mtp", tree=((0,),))) == Budget(2, 1, 1)


def test_the_example_of_the_docs(three: Any) -> None:
    page = (Path(__file__).parents[1] / "docs" / "methods" / "eagle.md").read_text()
    exec(code_block(page, "<!-- mtp -->"), {"model": three, "inputs": {"input_ids": IDS, "attention_mask": MASK}})
    assert three.last_speculation.method == three.remove_drafter("mtp").method


def test_a_loaded_module_is_taken_first(three: Any) -> None:
    three.load_drafter(random_module(three))
    three.generate(IDS, attention_mask=MASK, speculative={"method": "mtp", "top_k": 2}, **GREEDY)
    assert type(three.remove_drafter("mtp")) is MtpDrafter
    assert methods()["mtp"].requires is None


def test_eager_attention_takes_the_same_masks(three: Any) -> None:
    three.set_attn_implementation("eager")
    try:
        plain = three.generate(IDS, attention_mask=MASK, **GREEDY)
        assert torch.equal(plain, three.generate(IDS, attention_mask=MASK, speculative="mtp", **GREEDY))
        recorder = recorded(three, IDS[:1], MASK[:1], {"max_new_tokens": 6, "do_sample": False})
    finally:
        drafter: Any = three.remove_drafter("mtp")
        three.set_attn_implementation("sdpa")
    for (texts, _), draft in zip(recorder.trees, recorder.drafts, strict=True):
        assert_as_defined(SlowModules(three, drafter, texts[0]), draft, 0, (3, 1, 4))


# ----------------------------------------------------------------------------------------------------- refusals


def test_models_without_modules(llama: Any, three: Any, tmp_path: Path) -> None:
    with pytest.raises(
        DrafterMismatchError, match=r"no MTP modules: its config's num_mtp_layers is None.*load_drafter"
    ):
        llama.generate(IDS, attention_mask=MASK, speculative="mtp", **GREEDY)
    made: Any = zoo.build("deepseek_v3")  # its config tells of one
    with pytest.raises(DrafterMismatchError, match="was not loaded from a checkpoint"):
        MtpDrafter.native(made)
    made.save_pretrained(tmp_path / "bare")
    bare = next(native_mtp.loaded(tmp_path / "bare"))
    with pytest.raises(DrafterMismatchError, match=r"cannot be loaded from .*bare: .*weights are missing"):
        bare.generate(IDS, attention_mask=MASK, speculative="mtp", **GREEDY)
    bare._keys_to_ignore_on_load_unexpected = None
    with pytest.raises(UnsupportedModelError, match="does not know the names of the MTP tensors"):
        bare.add_drafter(MtpDrafter.native(bare))
    with pytest.raises(DrafterMismatchError, match=r"belong to .*three.*, but this model is .*bare"):
        bare.add_drafter(MtpDrafter.native(three))


def test_modules_of_a_kind_that_is_not_run(three: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(three.config, "_attn_implementation_internal", "flash_attention_2")
        with pytest.raises(UnsupportedModelError, match="'flash_attention_2' does not"):
            MtpDrafter.native(three)
    mixed = copy.deepcopy(three.config)
    mixed.layer_types = ["sliding_attention", "full_attention", "sliding_attention"]
    with monkeypatch.context() as patch:
        patch.setattr(type(three.config), "get_mtp_config", lambda self: mixed)
        with pytest.raises(UnsupportedModelError, match="they have full_attention, sliding_attention"):
            MtpDrafter.native(three)

    def ambiguous(self: Any) -> Any:
        raise ValueError("`layer_types` without `mtp_layer_types` is ambiguous")

    with monkeypatch.context() as patch:
        patch.setattr(type(three.config), "get_mtp_config", ambiguous)
        with pytest.raises(UnsupportedModelError, match=r"cannot build the MTP modules .* is ambiguous"):
            MtpDrafter.native(three)
