"""Sampling: the same tokens as plain generate for the same seed, and the same distribution on a whole model."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import zoo
from hf_specdec import SpeculativeGenerationMixin
from reference import OracleDrafter

IDS = torch.randint(3, zoo.VOCAB_SIZE, (1, 20), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7},
        {"temperature": 1.0, "top_p": 0.9, "top_k": 0},
        {"temperature": 1.3, "top_k": 20},
        {"temperature": 0.9, "min_p": 0.05, "repetition_penalty": 1.2, "eos_token_id": [5, 6, 7, 8, 9, 10]},
        {"typical_p": 0.8},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_the_same_seed_gives_plains_tokens(name: str, options: dict[str, Any]) -> None:
    model: Any = SpeculativeGenerationMixin.attach(zoo.build(name))
    try:
        accepted = 0.0
        for seed in range(6):
            torch.manual_seed(seed)
            plain = model.generate(IDS, max_new_tokens=24, do_sample=True, **options)
            state = torch.get_rng_state()
            for method in ("oracle", "prompt_lookup"):
                model.add_drafter(OracleDrafter(plain[:, 20:], "sometimes", zoo.VOCAB_SIZE, seed))
                torch.manual_seed(seed)
                speculative = model.generate(IDS, max_new_tokens=24, do_sample=True, speculative=method, **options)
                assert torch.equal(plain, speculative)
                # and what is drawn next is the same, too
                assert torch.equal(state, torch.get_rng_state())
                accepted += model.last_speculation.mean_accepted_length - 1
        assert accepted > 1
    finally:
        SpeculativeGenerationMixin.detach(model)


def test_a_whole_model_samples_its_exact_distribution() -> None:
    """Three tokens of a 5-word model through whole generations, against the product of its conditionals."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=5, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
                         num_attention_heads=2, num_key_value_heads=1, pad_token_id=0, eos_token_id=None)  # fmt: skip
    model: Any = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.dim() > 1 else 1)
    model.generation_config.eos_token_id = None
    SpeculativeGenerationMixin.attach(model)
    prompt = [1, 2, 3]
    texts = torch.tensor([[*prompt, a, b, c] for a in range(5) for b in range(5) for c in range(5)])
    with torch.no_grad():
        logits = model(input_ids=texts).logits.double() / 0.8
    log_probs = logits.log_softmax(-1)[:, 2:5].gather(-1, texts[:, 3:, None]).sum((1, 2))
    exact = {tuple(text[3:].tolist()): float(p) for text, p in zip(texts, log_probs.exp(), strict=True)}
    assert sum(exact.values()) == pytest.approx(1)
    # 40 prompts at once and drafts that are often right: rows go different ways through their trees
    rows, rounds = 40, 60
    likely = max(exact, key=exact.__getitem__)
    model.add_drafter(OracleDrafter(torch.tensor([likely] * rows), "sometimes", 5))
    counts: Counter[tuple[int, ...]] = Counter()
    torch.manual_seed(1)
    for _ in range(rounds):
        out = model.generate(torch.tensor([prompt] * rows), max_new_tokens=3, do_sample=True, temperature=0.8,
                             top_k=0, speculative="oracle")  # fmt: skip
        counts.update(tuple(row) for row in out[:, 3:].tolist())
    total = rows * rounds
    # pool what is too rare for chi-square
    common = {key: p for key, p in exact.items() if total * p >= 5}
    rest, seen = 1 - sum(common.values()), total - sum(counts[key] for key in common)
    chi_square = sum((counts[key] - total * p) ** 2 / (total * p) for key, p in common.items())
    chi_square += (seen - total * rest) ** 2 / (total * rest) if rest > 1e-9 else 0
    degrees = len(common)
    assert chi_square < degrees + 3.1 * (2 * degrees) ** 0.5 + 4, (chi_square, degrees)
