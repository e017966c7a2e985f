"""What tests of assistants share: a spy on every draft, and a model of four tokens whose answers can be enumerated."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import zoo
from hf_specdec import SpeculativeGenerationMixin
from hf_specdec.drafters.draft_model import DraftModelDrafter
from hf_specdec.trees.draft import Budget, Draft
from hf_specdec.verification.step import Step
from models import prompts

SMALL, ROWS, ROUNDS = 4, 1000, 10
CRITICAL = 103.4
"""Chi-square, 63 degrees of freedom (4 x 4 x 4 answers of three tokens), p = 0.001."""
NEW_TOKENS = 24


def attached(name: str) -> Any:
    return SpeculativeGenerationMixin.attach(copy.deepcopy(zoo.build(name)))


def generate(model: Any, batch_size: int = 1, **options: Any) -> Tensor:
    ids, mask = prompts(batch_size)
    answer: Tensor = model.generate(
        ids, **{"attention_mask": mask, "max_new_tokens": NEW_TOKENS, "do_sample": False, **options}
    )
    return answer


class Spied(DraftModelDrafter):
    """Keeps every draft with the texts of the rows it was made for, without padding; ended rows are None."""

    def __init__(self, assistant: Any, **options: Any) -> None:
        super().__init__(assistant, **options)
        self.seen: list[tuple[list[list[int] | None], Draft]] = []
        self.compiled_as: list[Spied] = []

    def with_program(self, make: Any) -> Spied:
        self.compiled_as.append(super().with_program(make))
        return self.compiled_as[-1]

    def start(self, target: Any, context: Any, config: Any) -> Any:
        session: Any = super().start(target, context, config)
        valid = torch.ones_like(context.input_ids) if context.padding is None else context.padding.valid
        texts = [ids[real.bool()].tolist() for ids, real in zip(context.input_ids, valid, strict=True)]
        ends = [len(text) + NEW_TOKENS for text in texts]
        for text, root in zip(texts, context.roots.tolist(), strict=True):
            text.append(root)
        propose, observe = session.propose, session.observe

        def told(budget: Budget) -> Draft:
            draft: Draft = propose(budget)
            going = [list(text) if len(text) < end else None for text, end in zip(texts, ends, strict=True)]
            self.seen.append((going, draft))
            return draft

        def heard(step: Step) -> None:
            for text, tokens in zip(texts, step.acceptance.emitted, strict=True):
                text.extend(tokens)
            observe(step)

        session.propose, session.observe = told, heard
        return session


def of_four_tokens(seed: int) -> Any:
    """A tiny Llama that knows four tokens and is fairly sure of what follows."""
    config = copy.deepcopy(zoo.build("llama").config)
    config.vocab_size, config.num_hidden_layers = SMALL, 1
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6)
        model.lm_head.weight.mul_(1.5)
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    return model


def chi_square(model: Any, acceptance: str) -> float:
    """Of all answers of three tokens, the first without and the others with speculation, at temperature 0.8."""
    prompt, counts = torch.tensor([[1, 3, 2]]), torch.zeros(SMALL**3, dtype=torch.double)
    answers = torch.tensor(list(itertools.product(range(SMALL), repeat=3)))
    with torch.no_grad():
        logits = model(input_ids=torch.cat([prompt.expand(len(answers), -1), answers], dim=-1)).logits[:, 2:-1]
    probs = (logits / 0.8).double().softmax(-1)
    expected = probs.gather(2, answers[:, :, None])[..., 0].prod(-1) * ROWS * ROUNDS
    assert expected.min() > 5, expected.min()
    torch.manual_seed(1)
    for _ in range(ROUNDS):
        drawn = model.generate(
            prompt.expand(ROWS, -1), attention_mask=torch.ones(ROWS, 3, dtype=torch.long), max_new_tokens=3,
            do_sample=True, temperature=0.8, top_k=0,
            speculative={"method": "draft_model", "num_steps": 2, "acceptance": acceptance},
        )[:, 3:]  # fmt: skip
        counts += torch.bincount(drawn @ torch.tensor([SMALL**2, SMALL, 1]), minlength=SMALL**3)
    assert model.last_speculation.num_drafted_tokens > 0
    return float(((counts - expected) ** 2 / expected).sum())
