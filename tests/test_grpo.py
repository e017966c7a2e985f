"""TRL's `GRPOTrainer` on an attached model: rollouts with speculation, one probe per mode, and the example."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM

import zoo
from benchmark_script import run_example as run
from hf_specdec import SpeculativeGenerationMixin
from hf_specdec.generation.state import state_of

trl = pytest.importorskip("trl", reason="TRL is not installed: pip install 'hf-specdec[trl]'")
pytestmark = pytest.mark.filterwarnings("ignore")

SPECULATIVE = {"method": "auto", "history": "per_prompt"}
LORA = {"task_type": "CAUSAL_LM", "r": 4, "target_modules": ["q_proj", "up_proj"]}


def count_digits(completions: list[str], **_: Any) -> list[float]:
    return [float(text.count("1")) for text in completions]


def trainer_of(model: Any, folder: Path, lora: bool = False, **fields: Any) -> Any:
    """A trainer of three short steps with four rollouts each."""
    peft_config = pytest.importorskip("peft").LoraConfig(**LORA) if lora else None
    options = {"bf16": False, "max_steps": 3, "learning_rate": 1e-2, **fields}
    config = trl.GRPOConfig(
        output_dir=str(folder), per_device_train_batch_size=4, per_device_eval_batch_size=4, num_generations=4,
        gradient_accumulation_steps=1, max_completion_length=16, report_to=[], save_strategy="no", disable_tqdm=True,
        logging_steps=1, use_cpu=True, **options,
    )  # fmt: skip
    prompts = Dataset.from_dict({"prompt": [f"w0{i} w10 w11 w12 w10 w11" for i in range(6)]})
    return trl.GRPOTrainer(
        model, reward_funcs=count_digits, args=config, train_dataset=prompts, eval_dataset=prompts.select(range(1)),
        processing_class=zoo.chat_tokenizer(), peft_config=peft_config,
    )  # fmt: skip


def attached(folder: Path, **fields: Any) -> Any:
    """A tiny Llama that the trainer can load again as its reference."""
    copy.deepcopy(zoo.build("llama")).save_pretrained(folder / "model")
    model = SpeculativeGenerationMixin.attach(AutoModelForCausalLM.from_pretrained(folder / "model"))
    model.generation_config.eos_token_id = zoo.END
    for name, value in fields.items():
        setattr(model.generation_config, name, value)
    return model


def rollouts_of(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the last speculation was after each `generate()`."""
    seen: list[Any] = []
    generate = type(model).generate

    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        state_of(model).last = None
        ids = generate(self, *args, **kwargs)
        seen.append(model.last_speculation)
        return ids

    monkeypatch.setattr(type(model), "generate", recorded)
    return seen


def same_tokens(model: Any) -> bool:
    """Whether sampling one row gives the same tokens with and without speculation."""
    ids, found = torch.tensor([[5, 6, 7, 5, 6, 7]]), []
    for speculative in (None, SPECULATIVE):
        torch.manual_seed(3)
        options = {"do_sample": True, "max_new_tokens": 24, "pad_token_id": 0, "eos_token_id": None}
        found.append(model.generate(input_ids=ids, speculative=speculative, **options).tolist())
    return bool(found[0] == found[1])


@pytest.mark.slow
@pytest.mark.parametrize(("lora", "stored"), [(False, "model"), (True, "trainer")])
def test_rollouts_speculate_and_are_the_plain_ones(
    lora: bool, stored: str, tmp_path: Path, probes: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default is read from the model, and from `generation_kwargs`; checkpointing is on, as TRL has it."""
    model = attached(tmp_path, **({"speculative": SPECULATIVE} if stored == "model" else {}))
    before = model.get_input_embeddings().weight.detach().clone()
    fields: dict[str, Any] = {"generation_kwargs": {"speculative": SPECULATIVE}} if stored == "trainer" else {}
    trainer = trainer_of(model, tmp_path, lora, gradient_checkpointing=True, **fields)
    seen = rollouts_of(model, monkeypatch)
    probes.clear()
    trainer.train()
    assert [stats.method for stats in seen] == ["hybrid"] * 3
    assert len(probes) == 1
    assert torch.equal(before, model.get_input_embeddings().weight) == lora
    trained = trainer.model
    with trl.models.unwrap_model_for_generation(trainer.model_wrapped, trainer.accelerator) as unwrapped:
        assert same_tokens(unwrapped)
        if lora:
            with unwrapped.disable_adapter():
                assert same_tokens(unwrapped)
    assert same_tokens(trained.eval())
    trainer.save_model(str(tmp_path / "saved"))
    if not lora:
        again = SpeculativeGenerationMixin.attach(AutoModelForCausalLM.from_pretrained(tmp_path / "saved"))
        assert same_tokens(again)
        assert getattr(again.generation_config, "speculative", None) == (SPECULATIVE if stored == "model" else None)
    else:
        assert isinstance(trained.merge_and_unload(), SpeculativeGenerationMixin)
        assert same_tokens(model)


@pytest.mark.slow
def test_evaluation_and_a_reference_in_between(
    tmp_path: Path, probes: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = attached(tmp_path, speculative="auto")
    trainer = trainer_of(model, tmp_path, beta=0.1, eval_strategy="steps", eval_steps=1)
    seen = rollouts_of(model, monkeypatch)
    probes.clear()
    trainer.train()
    assert len(seen) > 3
    assert all(stats.method == "hybrid" for stats in seen)
    assert len(probes) == 2, "train and eval mode"


@pytest.mark.slow
def test_mixed_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default of GRPOConfig: float32 weights, and a forward that enters bf16 autocast."""
    model = attached(tmp_path, speculative="auto")
    trainer = trainer_of(model, tmp_path, bf16=True)
    seen = rollouts_of(model, monkeypatch)
    trainer.train()
    assert [stats.method for stats in seen] == ["hybrid"] * 3
    assert state_of(model).facts[0].uses_autocast


@pytest.mark.slow
def test_continuous_batching_rolls_out_plainly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, probes: list[Any]
) -> None:
    model = attached(tmp_path, speculative="auto")
    small = {"num_blocks": 32, "max_batch_tokens": 64}
    trainer = trainer_of(
        model, tmp_path, use_transformers_continuous_batching=True, transformers_continuous_batching_config=small,
        generation_kwargs={"speculative": "auto"},
    )  # fmt: skip
    trainer.train()
    assert caplog.text.count("Continuous batching decodes without speculation") == 1
    assert model.last_speculation is None


@pytest.mark.slow
@pytest.mark.parametrize("lora", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_example(
    lora: bool, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model", saved, "--steps", 2, "--max-new-tokens", 12, "--output", tmp_path / "run"]
    run("grpo_rollouts", monkeypatch, *arguments, *(["--lora"] if lora else []))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines if not line.startswith("{")] == [
        "rollout", "rollout", "same tokens for the same seed",
    ]  # fmt: skip
    assert lines[-1].endswith("True")
    assert sum("'reward'" in line for line in lines) == 2
