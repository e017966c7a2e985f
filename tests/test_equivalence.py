"""Greedy ids equal plain generate's, token for token, in float32; tests/test_models.py walks all models."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zoo
from hf_specdec import SpeculativeGenerationMixin, UnsupportedModelError
from models import NEW_TOKENS, prompts
from reference import OracleDrafter, greedy_one_by_one


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt2"])
def test_plain_generate_itself_equals_decoding_without_a_cache(name: str) -> None:
    """Below the oracle: one token at a time, the whole text anew each time."""
    model = zoo.build(name)
    ids, mask = prompts(1)
    plain = model.generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False)
    assert greedy_one_by_one(model, ids[0].tolist(), NEW_TOKENS) == plain[0, 21:].tolist()


@pytest.mark.parametrize(
    ("name", "attention", "num_tokens", "gaps"),
    [
        *((name, "sdpa", NEW_TOKENS, True) for name in ("llama", "gemma3_text", "llama4_text")),
        *((name, form, NEW_TOKENS, False) for name in ("llama", "gemma3_text", "gpt2", "deepseek_v3")
          for form in ("sdpa", "eager")),
        *(("llama", "sdpa", num_tokens, False) for num_tokens in (1, 2, 5)),
    ],
)  # fmt: skip
def test_equal_to_plain_generate(name: str, attention: str, num_tokens: int, gaps: bool) -> None:
    """In both forms of attention, with padding in the middle of a prompt, and in very short answers."""
    model = zoo.build(name)
    before = model.config._attn_implementation
    model.set_attn_implementation(attention)
    SpeculativeGenerationMixin.attach(model)
    try:
        ids, mask = prompts(3)
        if gaps:
            mask[0, 5:8] = mask[2, 14] = 0
        options = {"attention_mask": mask, "max_new_tokens": num_tokens, "do_sample": False}
        plain = model.generate(ids, **options)
        model.add_drafter(OracleDrafter(plain[:, 21:], "sometimes", zoo.VOCAB_SIZE))
        for method in ("oracle", "prompt_lookup"):
            assert torch.equal(plain, model.generate(ids, speculative=method, **options))
    finally:
        SpeculativeGenerationMixin.detach(model)
        model.set_attn_implementation(before)


@pytest.mark.parametrize("name", ["openai-gpt", "recurrent_gemma", "cpmant", "prophetnet"])
def test_what_cannot_verify_drafts_is_refused_and_left_alone(name: str) -> None:
    model = zoo.build(name)
    before, keys = type(model), set(model.__dict__)
    with pytest.raises(UnsupportedModelError, match="cannot verify drafted tokens"):
        SpeculativeGenerationMixin.attach(model)
    assert type(model) is before
    assert set(model.__dict__) == keys
    assert not model.training


def test_rows_that_end_early(llama: Any) -> None:
    """An EOS at different places in each row, inside accepted runs."""
    ids, mask = prompts(3)
    options = {"attention_mask": mask, "max_new_tokens": NEW_TOKENS, "do_sample": False}
    free = llama.generate(ids, **options)
    for eos in ([int(free[0, 25]), int(free[1, 33])], int(free[2, 23])):
        plain = llama.generate(ids, eos_token_id=eos, **options)
        llama.add_drafter(OracleDrafter(free[:, 21:], "always", zoo.VOCAB_SIZE))
        assert torch.equal(plain, llama.generate(ids, speculative="oracle", eos_token_id=eos, **options))
