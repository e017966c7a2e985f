"""Medusa-2: two stages, one model and its heads together."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import zoo
from hf_specdec import InvalidConfigError, MedusaConfig, MedusaHeads, SpeculativeGenerationMixin
from hf_specdec.drafters.medusa import MedusaDrafter
from hf_specdec.training import Conversation, Medusa2TrainingConfig, train_medusa2
from hf_specdec.training.feature_store import collate
from hf_specdec.training.medusa_objectives import Medusa2Objective
from hf_specdec.training.trainer import HeadTrainer
from trained import answered, arguments

pytest.importorskip("peft")


def fresh() -> Any:
    return copy.deepcopy(zoo.build("llama"))


def heads_for(model: Any, **fields: Any) -> MedusaHeads:
    heads = MedusaHeads(MedusaConfig.for_target(model.config, medusa_num_heads=2, **fields))
    heads.start_from(model.lm_head)
    return heads


def adapted(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", lora_dropout=0.0))


@pytest.mark.parametrize("schedule", ["constant", "sine"])
def test_the_loss_is_its_definition(schedule: Any) -> None:
    """KL to the model without the adapter on answers, and each head's cross entropy on the adapted features."""
    model: Any = fresh()
    heads, both = heads_for(model, shared_lm_head=False), adapted(model)
    with torch.no_grad():
        for name, parameter in both.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    ids = torch.randint(3, zoo.VOCAB_SIZE, (9,), generator=torch.Generator().manual_seed(2))
    mask = torch.tensor([0, 0, 1, 1, 1, 0, 1, 1, 1]).bool()
    objective = Medusa2Objective(
        heads, both, Medusa2TrainingConfig(head_weight=0.3, head_decay=0.5, schedule=schedule)
    )
    objective.progress = 0.4
    loss = objective(**collate([{"input_ids": ids, "loss_mask": mask}])).loss
    with both.disable_adapter():
        truth = both(ids[None]).logits[0].log_softmax(-1)
    out = both(ids[None], output_hidden_states=True)
    student, hidden = out.logits[0].log_softmax(-1), out.hidden_states[-1][0]
    places = [t for t in range(8) if mask[t + 1]]
    total = sum((truth[t].exp() * (truth[t] - student[t])).sum() for t in places) / len(places)
    weight = 0.3 * (1.0 if schedule == "constant" else float(torch.tensor(0.4 * torch.pi / 2).sin()))
    for head in range(2):
        losses = [
            -heads(hidden[t])[head].log_softmax(-1)[ids[t + 2 + head]] for t in range(7 - head) if mask[t + 2 + head]
        ]
        total = total + weight * 0.5 ** (head + 1) * sum(losses) / len(losses)
    torch.testing.assert_close(loss, total, atol=1e-5, rtol=1e-5)
    assert any(p.grad is not None for p in both.parameters()) is False
    loss.backward()
    assert all(p.grad is not None for n, p in both.named_parameters() if "lora_A" in n and "lm_head" not in n)
    assert model.lm_head.weight.grad is None


@pytest.mark.slow
def test_heads_learn_faster_and_checkpoints_hold_what_is_trained(tmp_path: Path) -> None:
    model: Any = fresh()
    heads, both = heads_for(model), adapted(model)
    objective = Medusa2Objective(heads, both, Medusa2TrainingConfig(learning_rate_multiplier=5.0))
    talks = [Conversation.of([5, 6, 7], [8, 9, 10, 11])] * 4
    options = arguments(
        tmp_path, 2, save_strategy="steps", save_steps=2, learning_rate=0.01, lr_scheduler_type="constant"
    )
    trainer = HeadTrainer(objective, model, talks, options)
    trainer.train()
    assert [group["lr"] for group in trainer.optimizer.param_groups] == [0.05, 0.01]
    assert len(trainer.optimizer.param_groups[0]["params"]) == len(list(heads.parameters()))
    with safe_open(tmp_path / "checkpoint-2" / "model.safetensors", "pt") as tensors:
        names = list(tensors.keys())
    assert all(name.startswith("head.") or "lora_" in name for name in names)
    assert any("lora_" in name for name in names)


@pytest.mark.slow
def test_two_stages_make_a_model_and_its_heads(sure_llama: Any, tmp_path: Path) -> None:
    """The merged model drafts its own answers well, and is still lossless on them; a resumed run ends the same."""
    model = sure_llama
    _, _, talks = answered(model, 4, 24)
    plain = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    results = []
    for stops in ([60], [30, 60]):
        for stop in stops:
            model = fresh()
            model.load_state_dict(plain)
            heads = heads_for(model)
            torch.manual_seed(1)
            folder = tmp_path / str(len(stops))
            options = {
                "save_strategy": "steps",
                "save_steps": 30,
                "lr_scheduler_type": "constant",
                "learning_rate": 1e-3,
            }
            both = train_medusa2(
                model, heads, talks, arguments(folder, stop, **options), Medusa2TrainingConfig(lora_rank=4),
                heads_arguments=arguments(folder / "heads", 30, **options), resume=stop != stops[0],
            )  # fmt: skip
        merged = both.merge_and_unload()
        results.append({**heads.state_dict(), **{f"base.{n}": t for n, t in merged.state_dict().items()}})
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])
    changed = [name for name, tensor in plain.items() if not torch.equal(tensor, results[0][f"base.{name}"])]
    assert changed
    assert all("proj" in name for name in changed)
    assert json.loads((tmp_path / "1" / "trainer_state.json").read_text())["global_step"] == 60
    speculative: Any = SpeculativeGenerationMixin.attach(merged)
    speculative.add_drafter(MedusaDrafter(heads))
    ids = torch.tensor([talks[0].input_ids[:8]])
    options = {"max_new_tokens": 20, "do_sample": False}
    assert torch.equal(
        speculative.generate(ids, **options), speculative.generate(ids, speculative="medusa", **options)
    )


def test_fsdp_is_refused_wherever_it_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, sharded = arguments(tmp_path, 1), arguments(tmp_path, 1)
    sharded.fsdp = ["full_shard"]
    for options, heads_options in ((sharded, None), (plain, sharded)):
        with pytest.raises(InvalidConfigError, match="not run under FSDP"):
            train_medusa2(fresh(), heads_for(fresh()), [], options, heads_arguments=heads_options)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")  # as `accelerate launch --use_fsdp` does
    with pytest.raises(InvalidConfigError, match="not run under FSDP"):
        train_medusa2(fresh(), heads_for(fresh()), [], plain)
