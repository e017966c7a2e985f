"""What only an accelerator shows; skipped with the reason where there is none."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import zoo
from hf_specdec import EagleConfig, EagleHead, SpeculativeGenerationMixin
from hf_specdec.drafters.eagle import EagleDrafter
from reference import OracleDrafter

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator, this machine has none"),
]


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "deepseek_v3", "gpt2"])
def test_equal_to_plain_generate_on_the_device(name: str) -> None:
    device = torch.accelerator.current_accelerator()
    model: Any = SpeculativeGenerationMixin.attach(copy.deepcopy(zoo.build(name)).to(device))
    ids = torch.randint(3, zoo.VOCAB_SIZE, (3, 20), generator=torch.Generator().manual_seed(0)).to(device)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    options = {"attention_mask": mask, "max_new_tokens": 24, "do_sample": False}
    plain = model.generate(ids, **options)
    model.add_drafter(OracleDrafter(plain[:, 20:], "sometimes", zoo.VOCAB_SIZE))
    torch.manual_seed(0)
    model.add_drafter(EagleDrafter(EagleHead(EagleConfig.for_target(model.config))))
    for method in ("oracle", "eagle", "prompt_lookup"):
        assert torch.equal(plain, model.generate(ids, speculative=method, **options))
