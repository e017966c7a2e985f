"""A draft model: the plain answer, drafts that are the assistant's own words, sampled chains of exact distribution."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, T5Config, T5ForConditionalGeneration

import zoo
from assistants import CRITICAL, Spied, attached, chi_square, generate, of_four_tokens
from drafters import noisy
from hf_specdec import (
    DrafterMismatchError,
    SpeculativeGenerationMixin,
    UnsupportedGenerationError,
    UnsupportedModelError,
)
from hf_specdec.drafters import draft_model
from hf_specdec.drafters.draft_model import DraftModelDrafter
from hf_specdec.generation import call
from hf_specdec.trees.draft import Budget, Draft
from hf_specdec.verification.runners import CompiledForward
from models import prompts
from reference import path_to_root

pytestmark = pytest.mark.usefixtures("full_depth")

KINDS = ("llama", "gemma3_text", "gpt2", "qwen3_next")
"""Full attention, sliding windows, learned positions, a recurrent state."""
TREE = {"method": "draft_model", "top_k": 2, "num_steps": 3, "num_draft_tokens": 9}


def wanted_log_probs(assistant: Any, text: list[int], path: list[int]) -> Tensor:
    """`[len(path), V]` of the places where the path's tokens stand, in one forward without any cache."""
    with torch.no_grad():
        logits = assistant(input_ids=torch.tensor([[*text, *path]]), use_cache=False).logits[0]
    log_probs: Tensor = logits[len(text) - 1 : -1].log_softmax(-1)
    return log_probs


# ------------------------------------------------------------------------------------------------- the answer


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize(
    ("target", "assistant", "mode"),
    [
        *((one, other, "none") for one in KINDS for other in KINDS if one == other or "llama" in (one, other)),
        *(("llama", other, "kernels") for other in ("llama", "gemma3_text", "qwen3_5_text")),
    ],
)
def test_the_plain_answer_from_drafts_in_the_assistants_words(
    target: str, assistant: str, mode: str, batch_size: int, wandering: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Budgets change from step to step, plain steps between; every edge has the assistant's own log-probability.

    With the CPU kernels the assistant is a program as well, which also reads new nodes of a growing tree alone.
    """
    model, helper = attached(target), noisy(assistant, noise=0.1)
    drafter = model.add_drafter(Spied(helper))
    plain, ran, run = generate(model, batch_size), list[tuple[Any, int]](), CompiledForward.__call__

    def noted(self: CompiledForward, tokens: Tensor, *given: Any, **options: Any) -> Any:
        ran.append((self, tokens.shape[1]))
        return run(self, tokens, *given, **options)

    monkeypatch.setattr(CompiledForward, "__call__", noted)
    assert torch.equal(plain, generate(model, batch_size, speculative={**TREE, "compile": mode}))
    if mode == "kernels":
        kept = drafter.compiled_as[-1].runner
        reads = (
            () if assistant == "qwen3_5_text" else (prompts(1)[0].shape[1],)
        )  # of recurrent layers, the model reads
        assert {nodes for runner, nodes in ran if runner is kept} >= {2, *reads}
    assert len(drafter.seen) > 4
    for texts, draft in drafter.seen[-4:]:
        parents = draft.tree.parents.tolist()
        for row, text in enumerate(texts):
            leaves = set(range(1, draft.tree.num_nodes)) - set(parents[row])
            for leaf in leaves if text is not None else ():
                path = path_to_root(parents[row], leaf)[1:]
                tokens = draft.tree.tokens[row, path]
                wanted = wanted_log_probs(helper, text or [], tokens.tolist())
                assert draft.log_probs is not None
                torch.testing.assert_close(
                    draft.log_probs[row, path], wanted.gather(1, tokens[:, None])[:, 0], atol=2e-4, rtol=1e-4
                )


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("name", KINDS)
def test_a_copy_of_the_target_is_always_right(name: str, batch_size: int) -> None:
    model = attached(name)
    model.add_drafter(DraftModelDrafter(copy.deepcopy(zoo.build(name))))
    for num_steps in (1, 5):
        tokens = 1 + 4 * (num_steps + 1)
        config = {"method": "draft_model", "num_steps": num_steps}
        plain = generate(model, batch_size, max_new_tokens=tokens)
        assert torch.equal(plain, generate(model, batch_size, max_new_tokens=tokens, speculative=config))
        assert model.last_speculation.mean_accepted_length == num_steps + 1
        assert model.last_speculation.num_target_forwards == 4


def test_a_forward_per_level_over_its_new_nodes_only() -> None:
    """The prompt, then the text that is new, then the best nodes of each level but the last."""
    for name, wanted in (("llama", [21, 1, 2, 2]), ("qwen3_next", [21, 1, 2, 2])):
        model, helper, widths = attached("llama"), noisy(name), list[int]()
        helper.register_forward_pre_hook(
            lambda _model, _args, inputs, widths=widths: widths.append(inputs["input_ids"].shape[1]), with_kwargs=True
        )
        model.add_drafter(DraftModelDrafter(helper))
        widths.clear()
        generate(model, max_new_tokens=3, speculative=TREE)
        assert widths[:4] == wanted


# ------------------------------------------------------------------------------------------------- sampled chains


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("target", ["llama", "qwen3_next"])
@pytest.mark.parametrize("assistant", ["llama", "gemma3_text", "qwen3_next"])
def test_a_chain_tells_what_it_was_drawn_from(assistant: str, target: str, batch_size: int) -> None:
    model, helper = attached(target), noisy(assistant, noise=0.1)
    drafter = model.add_drafter(Spied(helper, sample=True))
    plain = generate(model, batch_size)
    assert torch.equal(plain, generate(model, batch_size, speculative="draft_model"))  # argmax asks for no q
    torch.manual_seed(0)
    for acceptance in ("rejection", "block"):
        drafter.seen.clear()
        generate(model, batch_size, do_sample=True, speculative={"method": "draft_model", "acceptance": acceptance})
        for texts, draft in drafter.seen[:4]:
            draft.tree.validate()
            probs = draft.tree.draft_probs
            assert draft.tree.num_nodes == 6
            assert probs is not None
            assert draft.log_probs is not None
            assert (draft.log_probs[:, 0] == 0).all()
            told = probs[:, :-1].gather(2, draft.tree.tokens[:, 1:, None])[..., 0].log()
            torch.testing.assert_close(told, draft.log_probs[:, 1:])
            for row, text in enumerate(texts):
                if text is not None:
                    wanted = wanted_log_probs(helper, text, draft.tree.tokens[row, 1:].tolist()).exp()
                    torch.testing.assert_close(probs[row, :-1], wanted, atol=2e-4, rtol=1e-3)


class Liar(DraftModelDrafter):
    """Draws as always, and tells of each draw that it was a little flatter than it was."""

    def start(self, *arguments: Any) -> Any:
        session: Any = super().start(*arguments)
        propose = session.propose

        def lying(budget: Budget) -> Draft:
            draft: Draft = propose(budget)
            if draft.tree.draft_probs is None:
                return draft
            drawn = draft.tree.draft_probs
            flat = (drawn > 0).to(drawn)
            probs = 0.8 * drawn + 0.2 * flat / flat.sum(-1, keepdim=True).clamp(min=1)
            return replace(draft, tree=replace(draft.tree, draft_probs=probs))

        session.propose = lying
        return session


@pytest.mark.slow
@pytest.mark.parametrize("acceptance", ["rejection", pytest.param("block", marks=pytest.mark.slow)])
def test_the_exact_distribution_and_a_drafter_that_lies(acceptance: str) -> None:
    model: Any = SpeculativeGenerationMixin.attach(of_four_tokens(0))
    helper = of_four_tokens(1)
    model.add_drafter(DraftModelDrafter(helper, sample=True))
    assert chi_square(model, acceptance) < CRITICAL
    model.add_drafter(Liar(helper, sample=True))
    assert chi_square(model, acceptance) > CRITICAL


# ------------------------------------------------------------------------------------------------- fitting


def llama_of(vocab_size: int) -> Any:
    config = copy.deepcopy(zoo.build("llama").config)
    config.vocab_size, config.num_hidden_layers = vocab_size, 1
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@pytest.mark.parametrize("sample", [False, True])
def test_tokens_that_the_target_does_not_know_are_never_drafted(sample: bool) -> None:
    model, helper = attached("llama"), llama_of(zoo.VOCAB_SIZE + 32)
    with torch.no_grad():
        helper.lm_head.weight[zoo.VOCAB_SIZE :] *= 100
    drafter = model.add_drafter(Spied(helper, sample=sample))
    plain = generate(model, 3)
    assert torch.equal(plain, generate(model, 3, speculative="draft_model"))
    generate(model, 3, do_sample=True, speculative="draft_model")
    for _, draft in drafter.seen:
        assert int(draft.tree.tokens.max()) < zoo.VOCAB_SIZE
        assert draft.log_probs is not None
        assert (draft.log_probs <= 0).all()
        if sample:
            assert draft.tree.draft_probs is not None
            assert draft.tree.draft_probs.shape == (3, 6, zoo.VOCAB_SIZE)


def test_assistants_that_do_not_fit() -> None:
    model = attached("llama")
    with pytest.raises(DrafterMismatchError, match="the target itself"):
        model.add_drafter(DraftModelDrafter(model))
    large = SpeculativeGenerationMixin.attach(llama_of(1089))
    with pytest.raises(DrafterMismatchError, match=r"embeds 64 tokens, .* has 1089\. .*tokenizer= and assistant_"):
        large.add_drafter(DraftModelDrafter(llama_of(64)))
    encoder_decoder = T5ForConditionalGeneration(T5Config(vocab_size=96, d_model=16, d_kv=4, d_ff=16, num_layers=1))
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        model.add_drafter(DraftModelDrafter(encoder_decoder))
    with pytest.raises(UnsupportedModelError, match="not a transformers model"):
        model.add_drafter(DraftModelDrafter(torch.nn.Linear(2, 2)))  # type: ignore[arg-type]
    with pytest.raises(UnsupportedModelError, match="does not keep its past"):
        model.add_drafter(DraftModelDrafter(zoo.build("openai-gpt")))
    assert model.drafters == {}
    with pytest.raises(DrafterMismatchError, match=r"needs an assistant model, .* First pass assistant_model="):
        generate(model, speculative="draft_model")


def test_calls_that_it_cannot_draft_for() -> None:
    model, helper = attached("llama"), noisy("llama")
    model.add_drafter(DraftModelDrafter(helper))
    ids, mask = prompts(1)
    embedded = model.get_input_embeddings()(ids)
    with pytest.raises(UnsupportedGenerationError, match="'draft_model' need the prompt's token ids"):
        model.generate(inputs_embeds=embedded, attention_mask=mask, max_new_tokens=4, speculative="draft_model")
    helper.gradient_checkpointing_enable()
    helper.train()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(call.Call, "set_target", lambda *_: pytest.fail("refused too late"))
        for method in ("draft_model", "auto"):
            with pytest.raises(UnsupportedGenerationError, match=r"or gradient_checkpointing_disable\(\)"):
                generate(model, speculative=method)


def test_no_draft_is_longer_than_the_assistants_positions() -> None:
    """GPT-2 has a table of them: one more would be an error."""
    config = copy.deepcopy(zoo.build("gpt2").config)
    config.n_positions = 32
    for batch_size in (1, 3):
        model = attached("llama")
        drafter = model.add_drafter(Spied(AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()))
        plain = generate(model, batch_size)
        assert torch.equal(plain, generate(model, batch_size, speculative="draft_model"))
        sizes = [draft.tree.num_nodes for _, draft in drafter.seen]
        assert sizes[0] == 6
        assert sizes[-1] == 1
        # and up to there it drafts: a step emits one token or more, and 21 stand in the prompt
        emitted = [max(column) for column in zip(*model.last_speculation.accepted_per_step, strict=True)]
        longest = 22
        for size, count in zip(sizes, emitted, strict=False):
            assert (size > 1) == (longest + 4 <= 32), (batch_size, longest)
            longest += count
    with pytest.raises(IndexError):
        drafter.assistant(input_ids=torch.zeros(1, 33, dtype=torch.long))


# ------------------------------------------------------------------------------------------------- the assistant


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_the_assistant_is_left_as_it_was(name: str) -> None:
    model, helper = attached("llama"), noisy(name)
    held = [dict(module.__dict__) for module in helper.modules()]
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in helper.modules()]
    kind, weights = type(helper), {key: value.clone() for key, value in helper.state_dict().items()}
    model.add_drafter(DraftModelDrafter(helper))
    generate(model, 3, speculative="draft_model")
    assert type(helper) is kind
    assert [module.__dict__.keys() for module in helper.modules()] == [known.keys() for known in held]
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in helper.modules()] == hooks
    assert all(torch.equal(value, weights[key]) for key, value in helper.state_dict().items())


def test_it_is_probed_again_when_it_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    probed = []
    inspect = draft_model.inspect_target
    monkeypatch.setattr(draft_model, "inspect_target", lambda model: (probed.append(model), inspect(model))[1])
    model, helper = attached("llama"), noisy("llama")
    model.add_drafter(DraftModelDrafter(helper))
    for _ in range(2):
        generate(model, speculative="draft_model")
    assert len(probed) == 1
    helper.model.layers[0].mlp = copy.deepcopy(helper.model.layers[0].mlp)
    generate(model, speculative="draft_model")
    assert len(probed) == 2


@pytest.mark.slow
def test_copied_pickled_and_attached(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model takes its assistant along; an assistant may be speculative itself; caches move as texts grow."""
    monkeypatch.setattr(draft_model, "READER_SLOTS", 3)
    # not the shared model: hooks of transformers, which outputs of other tests leave on it, cannot be pickled
    model = SpeculativeGenerationMixin.attach(noisy("llama", noise=0.0))
    drafter = model.add_drafter(DraftModelDrafter(SpeculativeGenerationMixin.attach(noisy("gemma3_text"))))
    assert "Gemma3ForCausalLM" in repr(drafter)
    plain = generate(model, 3)
    for other in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(plain, generate(other, 3, speculative=TREE))
    assert pickle.loads(pickle.dumps(drafter))._facts is None


# ------------------------------------------------------------------------------------------ assistant_model=


def test_the_assistant_of_a_call() -> None:
    """`generate(assistant_model=...)` drafts with it, samples where the call does, and remembers what it probed."""
    model, assistant = SpeculativeGenerationMixin.attach(copy.deepcopy(zoo.build("llama"))), noisy("llama", 0.02)
    ids, mask = prompts(1)
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 16}
    plain = model.generate(ids, do_sample=False, **options)
    for speculative in ("draft_model", {"method": "draft_model", "top_k": 3}, "hybrid", "auto"):
        found = model.generate(ids, do_sample=False, speculative=speculative, assistant_model=assistant, **options)
        assert torch.equal(plain, found)
        stats = model.last_speculation
        if isinstance(speculative, str) and speculative != "draft_model":
            assert "draft_model" in stats.control["queries"]
    first = model.__dict__["_speculation"].made["draft_model"]
    model.generate(ids, do_sample=False, speculative="draft_model", assistant_model=assistant, **options)
    assert model.__dict__["_speculation"].made["draft_model"] is first
    model.generate(ids, do_sample=True, speculative="draft_model", assistant_model=assistant, **options)
    assert model.__dict__["_speculation"].made["draft_model"].sample
    assert model.drafters == {}
    with pytest.raises(DrafterMismatchError, match="needs an assistant model"):
        model.generate(ids, speculative="draft_model", **options)
    with pytest.raises(UnsupportedGenerationError, match="has no effect with speculative='prompt_lookup'"):
        model.generate(ids, speculative="prompt_lookup", assistant_model=assistant, **options)
    with pytest.raises(DrafterMismatchError, match="the target itself"):
        model.generate(ids, speculative="draft_model", assistant_model=model, **options)
    assisted = model.generate(ids, do_sample=False, assistant_model=assistant, **options)  # transformers' own
    assert torch.equal(plain, assisted)
