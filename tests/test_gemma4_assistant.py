"""Gemma 4 assistants: the drafts of transformers' own candidate generator at one row, here in batches and as trees."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, GenerationConfig
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

import drafters
import fuzz
import test_active_rows
import test_drafters
import zoo
from assistants import CRITICAL, SMALL, chi_square
from drafters import Wandering, assistants_of_gemma4, gemma4_assistant, noisy
from hf_specdec import (
    AutoSpeculativeModelForCausalLM,
    CheckpointFormatError,
    Drafter,
    DrafterMismatchError,
    InvalidConfigError,
    SpeculativeConfig,
    SpeculativeGenerationMixin,
    UnsupportedModelError,
    load_head,
)
from hf_specdec.drafters.gemma4_assistant import Gemma4AssistantDrafter, source_layers
from hf_specdec.transformers_private import set_attention_name
from hf_specdec.trees.draft import Budget
from hf_specdec.verification.model import CACHE_FIELD
from models import prompts
from reference import OracleDrafter, Recorder

STEPS, NEW_TOKENS = 4, 24
CHAIN = {"method": "draft_model", "top_k": 1, "num_steps": STEPS}
TREE = {"method": "draft_model", "top_k": 3, "num_steps": 3, "num_draft_tokens": 12}


def target_of(kind: str, num_shared: int, **fields: Any) -> Any:
    """A Gemma 4 of two sliding and two full layers, the last `num_shared` of which share the keys of the others."""
    layers = {"num_kv_shared_layers": num_shared, "layer_types": ["sliding_attention", "full_attention"] * 2}
    config = zoo.config_of(kind, {"global_head_dim": 16, **layers, **fields})
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    return SpeculativeGenerationMixin.attach(zoo.decisive(model))


@functools.cache
def built(kind: str, num_shared: int) -> Any:
    return target_of(kind, num_shared)


@pytest.fixture
def gemma() -> Any:
    """One that shares keys, with no drafters of another test."""
    model = SpeculativeGenerationMixin.detach(copy.deepcopy(built("gemma4_text", 2)))
    return SpeculativeGenerationMixin.attach(model)


def generate(model: Any, batch_size: int = 1, **options: Any) -> Tensor:
    ids, mask = prompts(batch_size)
    given = {"attention_mask": mask, "max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0, **options}
    answer: Tensor = model.generate(ids, **given)
    return answer


# ------------------------------------------------------------------------------------------ against transformers


class Beside(Drafter):
    """Drafts what an oracle drafts, so that tokens are accepted, after another drafter has drafted in vain."""

    method = "beside"

    def __init__(self, drafter: Any, oracle: OracleDrafter, config: dict[str, Any]) -> None:
        self.drafter, self.oracle, self.config, self.needs = drafter, oracle, config, drafter.needs

    def bind(self, model: Any) -> None:
        self.drafter.bind(model)

    def limits(self, config: SpeculativeConfig) -> Budget:
        return Budget(9, 9, 9)

    def start(self, target: Any, context: Any, config: SpeculativeConfig) -> Any:
        own = SpeculativeConfig.from_dict(self.config)
        unheard, session = self.drafter.start(target, context, own), self.oracle.start(target, context, config)
        propose, observe = session.propose, session.observe

        def both(budget: Budget) -> Any:
            unheard.propose(self.drafter.limits(own))
            return propose(budget)

        def hear(step: Any) -> None:
            unheard.observe(step)
            observe(step)

        session.propose, session.observe = both, hear  # type: ignore[method-assign]
        return session


@torch.no_grad()
def read_by_transformers(model: Any, text: list[int]) -> Any:
    """The outputs that transformers' generator reads, after a forward over all but the last token of one text."""
    for layer in source_layers(model.config).values():  # before 5.24, only layers whose keys are shared hand them out
        model.model.layers[layer].self_attn.store_full_length_kv = True
    ids = torch.tensor([text[:-1]])
    return model(input_ids=ids, use_cache=False, output_hidden_states=True, return_shared_kv_states=True)


def chain_of_transformers(model: Any, assistant: Any, text: list[int]) -> list[int]:
    """What transformers' own generator drafts for one text."""
    ids, assistant.generation_config.num_assistant_tokens = torch.tensor([text]), STEPS
    inputs = {"attention_mask": torch.ones_like(ids)}
    given = {
        "assistant_model": assistant, "target_model_input_embeddings": model.get_input_embeddings(),
        "generation_config": GenerationConfig(max_length=1000), "input_ids": ids, "model_kwargs": inputs,
    }  # fmt: skip
    taken = inspect.signature(SinglePositionMultiTokenCandidateGenerator).parameters  # others in transformers 5.17
    generator = SinglePositionMultiTokenCandidateGenerator(**{name: given[name] for name in given if name in taken})
    last = len(text) - 2
    found, _ = generator.get_candidates(ids, inputs, read_by_transformers(model, text), False, last)
    chain: list[int] = found[0, len(text) :].tolist()
    return chain


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("is_sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize(("kind", "num_shared"), [("gemma4_text", 0), ("gemma4_text", 2), ("gemma4_unified_text", 0)])
def test_chains_are_those_of_transformers(kind: str, num_shared: int, is_sparse: bool, attention: str) -> None:
    """For each row of a padded batch that some leave: texts beyond the window, one to many accepted tokens."""
    model, (ids, mask) = copy.deepcopy(built(kind, num_shared)), prompts(test_active_rows.ROWS)
    assistant = gemma4_assistant(model, sparse=is_sparse, unified=kind == "gemma4_unified_text")
    set_attention_name(assistant.config.get_text_config(), attention)
    plain, options = test_active_rows.ends(model, ids, mask, 60)
    answers = plain[:, ids.shape[1] :]
    compared, chains = 0, set()
    for seed in range(3):
        drafter = Gemma4AssistantDrafter(assistant)
        recorder, oracle = Recorder(drafter, ids), OracleDrafter(answers, "sometimes", zoo.VOCAB_SIZE, seed)
        model.add_drafter(Beside(drafter, oracle, CHAIN))
        with test_active_rows.forwards(model) as seen:
            assert torch.equal(plain, model.generate(ids, speculative="beside", **options))
        assert seen[-1][1] < seen[-1][0]
        assert {count for row in model.last_speculation.accepted_per_step for count in row} >= {1, 2, 3}
        for texts, tree in recorder.trees:
            for row, text in enumerate(texts):
                if not {*options["eos_token_id"], 0}.intersection(text[int(mask[row].sum()) :]):  # not ended
                    chain = chain_of_transformers(model, assistant, text)
                    assert tree.tokens[row, 1:].tolist() == chain
                    compared += 1
                    chains.add(tuple(chain))
    assert compared >= 40
    assert len(chains) >= 15


@torch.no_grad()
def test_probabilities_of_a_tree_are_those_along_its_paths(gemma: Any) -> None:
    """Every node's is the assistant's own, when its forward reads the path token by token."""
    assistant, (ids, _) = gemma4_assistant(gemma), prompts(1)
    drafter = Gemma4AssistantDrafter(assistant)
    recorder = Recorder(drafter, ids)
    gemma.add_drafter(drafter)
    generate(gemma, speculative=TREE, max_new_tokens=6)
    embedding, has_branches = gemma.get_input_embeddings(), False
    for (texts, tree), draft in zip(recorder.trees, recorder.drafts, strict=True):
        outputs, text = read_by_transformers(gemma, texts[0]), torch.tensor(texts)
        position = torch.tensor([[len(texts[0]) - 1]])
        states, logits = {-1: outputs.hidden_states[-1][:, -1:]}, {}
        parents = tree.parents.expand(tree.tokens.shape)[0].tolist()
        has_branches |= len(set(parents)) < len(parents)
        for node, parent in enumerate(parents):
            found = assistant(
                inputs_embeds=torch.cat([embedding(tree.tokens[:, [node]]), states[parent]], dim=-1),
                attention_mask=torch.ones_like(text), position_ids=position,
                shared_kv_states=outputs.shared_kv_states, use_cache=False,
            )  # fmt: skip
            states[node], logits[node] = found.last_hidden_state, found.logits[0, 0].log_softmax(-1)
            if node:
                expected = logits[parent][tree.tokens[0, node]]
                torch.testing.assert_close(draft.log_probs[0, node], expected, atol=1e-4, rtol=1e-4)
    assert has_branches


def test_a_sparse_head_drafts_tokens_of_its_centroids_only(gemma: Any) -> None:
    """Four centroids of eight tokens each: no node has more children, and all have a probability."""
    drafter = Gemma4AssistantDrafter(gemma4_assistant(gemma, sparse=True))
    recorder = Recorder(drafter, prompts(1)[0])
    gemma.add_drafter(drafter)
    wide = {"method": "draft_model", "top_k": 60, "num_steps": 1, "num_draft_tokens": 61}
    assert torch.equal(generate(gemma), generate(gemma, speculative=wide))
    assert {draft.tree.num_nodes for draft in recorder.drafts} == {33}
    assert all(draft.log_probs.isfinite().all() for draft in recorder.drafts)


# ------------------------------------------------------------------------------------------ the usual checks


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gemma4_text", "gemma4_unified_text"])
@pytest.mark.parametrize("num_shared", [0, 2])
@pytest.mark.parametrize("is_sparse", [False, True], ids=["dense", "sparse"])
def test_answers_are_the_plain_ones(kind: str, num_shared: int, is_sparse: bool) -> None:
    model = built(kind, num_shared)
    assistant = gemma4_assistant(model, sparse=is_sparse, unified=kind == "gemma4_unified_text")
    merged = {"method": "hybrid", "methods": ["draft_model", "prompt_lookup"], "adaptive": False}
    for batch_size, config in itertools.product((1, 3), (CHAIN, TREE, "draft_model", "auto", merged)):
        plain = generate(model, batch_size)
        assert torch.equal(plain, generate(model, batch_size, assistant_model=assistant, speculative=config))
        assert "draft_model" in model.last_speculation.control.get("queries", {}) or config not in ("auto", merged)
        assert model.last_speculation.num_drafted_tokens > 0 or config == "auto"


@pytest.mark.parametrize("batch_size", [1, 3])
def test_any_budget(gemma: Any, batch_size: int, wandering: list[Wandering]) -> None:
    test_drafters.test_any_budget_gives_the_plain_answer(gemma, drafters.GEMMA4, batch_size, wandering)


def test_the_same_tokens_are_drawn(gemma: Any, wandering: list[Wandering]) -> None:
    test_drafters.test_the_same_tokens_are_drawn(gemma, drafters.GEMMA4, wandering)


@pytest.mark.slow
def test_rows_that_have_ended_leave(gemma: Any) -> None:
    test_active_rows.test_answers_stay_and_forwards_shrink(gemma, drafters.GEMMA4)


@pytest.mark.parametrize("rule", [{"acceptance": "typical", "posterior_threshold": 0.001}, {"acceptance": "nucleus"}])
def test_lossy_rules(gemma: Any, rule: dict[str, Any]) -> None:
    """They accept more than lossless ones do."""
    options = {"do_sample": True, "assistant_model": gemma4_assistant(gemma)}
    torch.manual_seed(0)
    answer = generate(gemma, 3, speculative={**TREE, **rule}, **options)
    lossy = gemma.last_speculation.mean_accepted_length
    assert generate(gemma, 3, speculative=TREE, **options).shape == answer.shape
    assert lossy > 1.3 * gemma.last_speculation.mean_accepted_length


@pytest.mark.slow
@pytest.mark.parametrize("acceptance", ["rejection", "block"])
def test_sampled_chains_keep_the_distribution(acceptance: str) -> None:
    """The answers of three tokens at temperature 0.8, counted."""
    model = target_of("gemma4_text", 2, vocab_size=SMALL, vocab_size_per_layer_input=SMALL)
    model.add_drafter(Gemma4AssistantDrafter(gemma4_assistant(model), sample=True))
    assert chi_square(model, acceptance) < CRITICAL


@pytest.mark.slow
def test_random_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fuzzed, see `fuzz.py`."""
    monkeypatch.setattr(fuzz, "BY_NAME", {drafters.GEMMA4.name: drafters.GEMMA4})
    monkeypatch.setattr(fuzz, "MODELS", ("gemma4_text",))
    monkeypatch.setattr(fuzz, "DRAFTERS", (drafters.GEMMA4.name,))
    for name, value in {"rtol": 1e-3, "atol": 1e-4}.items():  # this model's hidden states round more
        monkeypatch.setitem(fuzz.TOLERANCE, name, value)
    found = [fuzz.check(fuzz.case(number)) for number in range(30)]
    assert found.count("equal") > 15


def test_a_given_cache(gemma: Any) -> None:
    """Its sliding layers hold a window only; the next turn continues it."""
    (ids, _), assistant = prompts(1), gemma4_assistant(gemma)

    def turns(**options: Any) -> Tensor:
        cache = {CACHE_FIELD: DynamicCache(config=gemma.config)}
        first = gemma.generate(ids, **cache, max_new_tokens=12, do_sample=False)
        more = torch.cat([first, ids[:, :5]], dim=-1)
        second: Tensor = gemma.generate(more, **cache, max_new_tokens=12, do_sample=False, **options)
        return second

    assert torch.equal(turns(), turns(assistant_model=assistant, speculative=TREE))
    assert gemma.last_speculation.num_drafted_tokens > 0


# ------------------------------------------------------------------------------------------ loading and refusing


def test_loaded_from_a_directory(gemma: Any, tmp_path: Path) -> None:
    assistant = gemma4_assistant(gemma, sparse=True)
    assistant.save_pretrained(tmp_path / "assistant")
    built("gemma4_text", 2).save_pretrained(tmp_path / "target")
    with assistants_of_gemma4():
        drafter = gemma.load_drafter(tmp_path / "assistant")
        both = AutoSpeculativeModelForCausalLM.from_pretrained(
            tmp_path / "target", drafter=tmp_path / "assistant", dtype=torch.float32
        )
    assert list(gemma.drafters) == list(both.drafters) == ["draft_model"]
    state = drafter.assistant.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in assistant.state_dict().items())
    assert torch.equal(generate(gemma, 3), generate(both, 3, speculative="draft_model"))
    with pytest.raises(CheckpointFormatError, match=r"is a Gemma 4 assistant, a whole language model.*load_drafter"):
        load_head(tmp_path / "assistant")
    with pytest.raises(InvalidConfigError, match="is a Gemma 4 assistant, which has no `hot_tokens`"):
        gemma.load_drafter(tmp_path / "assistant", hot_tokens=torch.tensor([1]))
    (tmp_path / "assistant" / "config.json").write_text('{"model_type": "gemma4_assistant", "text_config": {"x": 1}}')
    with pytest.raises(CheckpointFormatError, match=r"Gemma 4 assistant .* cannot be loaded.*transformers 5.24"):
        gemma.load_drafter(tmp_path / "assistant")


def test_refused_by_name(gemma: Any) -> None:
    def refused(
        assistant: Any, message: str, error: type[Exception] = DrafterMismatchError, model: Any = None
    ) -> None:
        with pytest.raises(error, match=message):
            generate(gemma if model is None else model, assistant_model=assistant, speculative="draft_model")

    assistant = gemma4_assistant(gemma)
    llama = SpeculativeGenerationMixin.attach(copy.deepcopy(zoo.build("llama")))
    refused(assistant, "keys and values of a Gemma 4, and LlamaForCausalLM is none", model=llama)
    wide = target_of("gemma4_text", 2, hidden_size=64)
    refused(assistant, "needs a hidden size of 32, Gemma4ForCausalLM has 64", model=wide)
    longer = target_of("gemma4_text", 2, vocab_size=128, vocab_size_per_layer_input=128)
    refused(assistant, "needs a vocabulary of 96, Gemma4ForCausalLM has 128", model=longer)
    narrow = target_of("gemma4_text", 2, global_head_dim=32)
    refused(assistant, r"full_attention layers of 2 heads of 16 channels, \w+ has 2 heads of 32", model=narrow)
    fewer = target_of("gemma4_text", 2, num_key_value_heads=1)
    refused(assistant, r"sliding_attention layers of 2 heads of 8 channels, \w+ has 1 heads of 8", model=fewer)
    with pytest.raises(DrafterMismatchError, match=r"is not a Gemma 4 assistant.*DraftModelDrafter"):
        gemma.add_drafter(Gemma4AssistantDrafter(noisy("llama")))
    with pytest.raises(DrafterMismatchError, match="its target's tokenizer"):
        gemma.add_drafter(Gemma4AssistantDrafter(assistant, tokenizer=1, assistant_tokenizer=2))
    with pytest.raises(UnsupportedModelError, match="drops the keys and values"):
        Gemma4AssistantDrafter(assistant).start(SimpleNamespace(model=gemma, supports_trees=False), None, None)  # type: ignore[arg-type]
    set_attention_name(assistant.config.get_text_config(), "flash_attention_2")
    refused(assistant, "runs with flash_attention_2, which takes no masks", UnsupportedModelError)
    few = gemma4_assistant(gemma, sparse=True)
    few.masked_embedding.centroid_intermediate_top_k = 13
    refused(few, "scores 13 of 12 centroids of equal size, which 96 tokens cannot have")
    unread = gemma4_assistant(gemma, sparse=True)
    unread.masked_embedding.token_ordering.zero_()
    refused(unread, "`token_ordering` of Gemma4AssistantForCausalLM does not list every token once")
