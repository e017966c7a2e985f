"""Continuous batching and plain transformers ignore a stored default of `speculative`: said once, or refused."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation import ContinuousBatchingConfig

import zoo
from hf_specdec import SpeculativeGenerationMixin, UnsupportedGenerationError

PROMPTS = [[5, 6, 7, 5, 6, 7], [8, 9, 10, 11]]
pytestmark = pytest.mark.filterwarnings("ignore")


def small() -> ContinuousBatchingConfig:
    """The default cache would take most of the machine's memory."""
    return ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64)


def config(**fields: Any) -> GenerationConfig:
    return GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=zoo.END, pad_token_id=0, **fields)


@pytest.fixture
def model() -> Any:
    """Attached, with a stored default."""
    model = SpeculativeGenerationMixin.attach(copy.deepcopy(zoo.build("llama")))
    model.generation_config.speculative = "auto"
    return model


def batch(model: Any, **options: Any) -> list[list[int]]:
    found = model.generate_batch(PROMPTS, continuous_batching_config=small(), **options)
    return [output.generated_tokens for output in found.values()]


def one_by_one(model: Any, **options: Any) -> list[list[int]]:
    answers = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        mask = {"attention_mask": torch.ones_like(ids)}
        answers.append(model.generate(ids, generation_config=config(), **mask, **options)[0, len(prompt) :].tolist())
    return answers


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if "Continuous batching" in record.message]


@pytest.mark.slow
def test_a_batch_is_decoded_plainly_and_that_is_said_once(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    plain = one_by_one(model, speculative=None)
    with caplog.at_level(logging.WARNING, "hf_specdec"):
        assert batch(model, generation_config=config(speculative="auto")) == plain
        assert batch(model, generation_config=config(speculative={"method": "prompt_lookup"})) == plain
    assert told(caplog) == [
        "Continuous batching decodes without speculation: `speculative` of the generation config has no effect."
    ]
    assert model.last_speculation is None
    assert one_by_one(model) == plain
    assert model.last_speculation.method == "hybrid", "generate() still speculates afterwards"


def test_the_manager_of_a_server_says_it_too(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    """`transformers serve --continuous-batching` passes a copy of the model's config."""
    with caplog.at_level(logging.WARNING, "hf_specdec"):
        manager = model.init_continuous_batching(copy.deepcopy(model.generation_config), small())
    assert len(told(caplog)) == 1
    assert type(manager).__name__ == "ContinuousBatchingManager"


@pytest.mark.parametrize("argument", [{"speculative": "auto"}, {"assistant_model": object()}])
def test_asking_for_speculation_is_refused_before_any_work(
    model: Any, argument: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(model), "init_continuous_batching", None)  # would fail
    with pytest.raises(UnsupportedGenerationError, match=r"Continuous batching.*no effect.*use generate\(\)"):
        batch(model, generation_config=config(), **argument)


@pytest.mark.slow
@pytest.mark.parametrize("speculative", ["auto", {"method": "auto", "history": "per_prompt"}])
def test_plain_transformers_loads_and_ignores_a_stored_default(model: Any, speculative: Any, tmp_path: Path) -> None:
    """As `transformers serve` loads it, without this package; saved again, the default is still there."""
    plain = one_by_one(model, speculative=None)
    model.generation_config.speculative = speculative
    model.save_pretrained(tmp_path / "one")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "one")
    assert not isinstance(loaded, SpeculativeGenerationMixin)
    assert loaded.generation_config.speculative == speculative
    assert one_by_one(loaded) == plain
    assert batch(loaded, generation_config=config()) == plain
    loaded.save_pretrained(tmp_path / "two")
    again = SpeculativeGenerationMixin.attach(AutoModelForCausalLM.from_pretrained(tmp_path / "two"))
    assert one_by_one(again) == plain
    assert again.last_speculation.method == "hybrid"
