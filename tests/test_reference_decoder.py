"""`examples/reference.py`, which does slowly what the package does: the same trees, paths, tokens and draws."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LogitsProcessorList, MaxLengthCriteria, StoppingCriteriaList

import zoo
from benchmark_script import EXAMPLES, run_example, script
from hf_specdec import SpeculativeGenerationMixin
from hf_specdec.acceptance.rules import rejection
from hf_specdec.acceptance.transcript import Transcript
from hf_specdec.config import SpeculativeConfig
from hf_specdec.drafters.base import DraftContext, Drafter, DraftSession
from hf_specdec.trees.draft import Budget, Draft
from hf_specdec.trees.tree import TokenTree

reference: Any = script("reference", EXAMPLES)
PROMPT = [5, 6, 7, 8, 5, 6, 9, 5, 6, 7, 11, 5, 6]


class ReferenceDrafter(Drafter):
    """The reference's lookup as a drafter of the package."""

    method = "reference"

    def limits(self, config: SpeculativeConfig) -> Budget:
        return Budget(16, 5, 3)

    def start(self, target: Any, context: DraftContext, config: SpeculativeConfig) -> DraftSession:
        return ReferenceSession([*context.input_ids[0].tolist(), *context.roots.tolist()])


class ReferenceSession(DraftSession):
    def __init__(self, text: list[int]) -> None:
        self.text = text

    def propose(self, budget: Budget) -> Draft:
        tree = reference.draft_by_lookup(self.text)
        return Draft.from_rows([(tree.tokens, tree.parents)], torch.device("cpu"))

    def observe(self, step: Any) -> None:
        self.text += step.acceptance.emitted[0]


@pytest.fixture(scope="module")
def llama() -> Any:
    """A model that repeats itself, so that lookup is sometimes right."""
    model: Any = SpeculativeGenerationMixin.attach(zoo.shallow("llama", 2))
    model.add_drafter(ReferenceDrafter())
    return model


def test_greedy_steps_are_those_of_the_package(llama: Any) -> None:
    tokens, emitted = reference.generate(llama, PROMPT, 40, reference.draft_by_lookup)
    options: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None}
    for speculative in (None, "reference"):
        ids = llama.generate(torch.tensor([PROMPT]), speculative=speculative, **options)
        assert ids[0, len(PROMPT) :].tolist() == tokens
    (counts,) = llama.last_speculation.accepted_per_step
    assert counts[:-1] == emitted[1:-1]  # the last step is cut at the number of tokens
    assert max(emitted) > 1


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_verified_tree_has_the_logits_of_its_paths(llama: Any, temperature: float) -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        tree, cache = reference.draft_by_model(llama, PROMPT, 1.0, (3, 2)), DynamicCache()
        llama(torch.tensor([PROMPT[:-1]]), None, None, cache)
        logits = reference.verify(llama, tree, cache)
        for node in range(len(tree.tokens)):
            text = [*PROMPT[:-1], *(tree.tokens[index] for index in tree.path(node))]
            torch.testing.assert_close(logits[node], llama(torch.tensor([text])).logits[0, -1], atol=1e-4, rtol=1e-4)
        path, _ = reference.accept(tree, logits, temperature)
        reference.commit(cache, len(PROMPT) - 1, path)
        assert cache.get_seq_length() == len(PROMPT) - 1 + len(path)


def test_the_rule_draws_as_the_package_does() -> None:
    """Same seed, same path and token, for 200 trees of drawn children."""
    rng = random.Random(0)
    torch.manual_seed(0)
    for seed in range(200):
        tree = reference.Tree([0])
        for node in range(3):
            if node < len(tree.tokens):
                tree.draft_probs[node] = torch.rand(6).softmax(-1)
                for token in torch.multinomial(tree.draft_probs[node], rng.choice([1, 2, 3])).tolist():
                    tree.add(node, token)
        logits, probs = 2 * torch.randn(len(tree.tokens), 6), torch.full((1, len(tree.tokens), 6), 1 / 6)
        for node, row in tree.draft_probs.items():
            probs[0, node] = row
        text = Transcript(
            torch.zeros(1, 1, dtype=torch.long), LogitsProcessorList(),
            StoppingCriteriaList([MaxLengthCriteria(99)]), max_length=99, do_sample=True,
        )  # fmt: skip
        torch.manual_seed(seed)
        accepted = rejection(
            TokenTree(torch.tensor([tree.tokens]), torch.tensor(tree.parents), probs), logits[None], text
        )
        torch.manual_seed(seed)
        path, token = reference.accept(tree, logits, 1.0)
        assert (tuple(path), token) == (accepted.nodes[0], accepted.emitted[0][-1])


def test_guesses_that_were_not_drawn_leave_the_models_distribution() -> None:
    torch.manual_seed(0)
    tree, logits, counts = reference.Tree([0, 3, 5], [-1, 0, 0]), torch.randn(3, 6), torch.zeros(6)
    for _ in range(4000):
        path, token = reference.accept(tree, logits, 1.0)
        counts[tree.tokens[path[1]] if len(path) > 1 else token] += 1
    torch.testing.assert_close(counts / counts.sum(), logits[0].softmax(-1), atol=0.03, rtol=0)


def test_it_runs(saved: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run_example("reference", monkeypatch, saved, "w05 w06 w05 w06")
    assert "40 tokens in " in capsys.readouterr().out
