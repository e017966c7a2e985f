"""The trainer: what it sees, what it optimises, and that a head learns what it is shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, TrainingArguments

import zoo
from hf_specdec import EagleConfig, EagleHead, InvalidConfigError, SpeculativeGenerationMixin
from hf_specdec.drafters.eagle import EagleDrafter
from hf_specdec.training import EagleTrainingConfig, capture_features, train_eagle
from hf_specdec.training.eagle import aligned_mask, collate_sequences, most_frequent_tokens


def arguments(folder: Path, steps: int) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=4, learning_rate=3e-3, use_cpu=True,
        save_strategy="no", report_to="none", disable_tqdm=True, logging_steps=1000, seed=0,
    )  # fmt: skip


def test_features_do_not_depend_on_the_batch() -> None:
    model = zoo.build("llama")
    conversations = [([5, 6, 7], [8, 9]), ([10, 11], [12, 13, 14, 15, 16]), ([20], [21, 22])]
    together = {tuple(s.input_ids.tolist()): s for s in capture_features(model, conversations, batch_size=3)}
    alone = [s for c in conversations for s in capture_features(model, [c])]
    assert len(together) == 3
    for sequence in alone:
        twin = together[tuple(sequence.input_ids.tolist())]
        assert twin.prompt_length == sequence.prompt_length
        torch.testing.assert_close(twin.features, sequence.features, atol=1e-5, rtol=1e-5)


def test_the_loss_covers_the_answer_and_nothing_else() -> None:
    rows = [
        {"input_ids": torch.arange(6), "features": torch.zeros(6, 2), "prompt_length": 2},
        {"input_ids": torch.arange(4), "features": torch.zeros(4, 2), "prompt_length": 1},
    ]
    batch = collate_sequences(rows)
    # entry t predicts the feature that scores x[t+2]: answers start at x[2] and x[1], whose own choice is the target's
    assert batch["loss_mask"].int().tolist() == [[0, 1, 1, 1, 0], [1, 1, 0, 0, 0]]
    assert batch["input_ids"].shape == (2, 6)


def test_hot_tokens_are_the_most_frequent_then_the_lowest() -> None:
    assert most_frequent_tokens([([1], [7, 7, 9])], 3).tolist() == [0, 7, 9]
    assert most_frequent_tokens([([1], [7, 7, 9, 9, 9, 4])], 2).tolist() == [7, 9]


def test_aligned_steps_see_what_drafting_sees() -> None:
    """Step j of training at entry t equals drafting j levels below entry t-j, computed for that entry alone."""
    torch.manual_seed(0)
    model = zoo.build("llama")
    head = EagleHead(EagleConfig.for_target(model.config)).eval()
    length, steps = 7, 3
    embeddings, features = torch.randn(1, length, 32), torch.randn(1, length, 32)
    positions = torch.arange(length)[None]
    cache, seen, trained = DynamicCache(), features, []
    with torch.no_grad():
        for step in range(steps):
            mask = aligned_mask(length, step, torch.device("cpu"))[None, None]
            trained.append(head(embeddings, seen, positions, mask, cache))
            seen = torch.cat([features[:, :1], trained[-1][:, :-1]], dim=1)
        for begin in range(length - steps):
            known = features[:, : begin + 1]
            for step in range(steps):
                width = known.shape[1]
                out = head(embeddings[:, :width], known, positions[:, :width])
                torch.testing.assert_close(out[:, -1], trained[step][:, begin + step], atol=1e-5, rtol=1e-5)
                known = torch.cat([known, out[:, -1:]], dim=1)
    assert aligned_mask(3, 1, torch.device("cpu")).int().tolist() == [
        [0, 0, 0, 1, 0, 0], [1, 0, 0, 0, 1, 0], [1, 1, 0, 0, 0, 1],
    ]  # fmt: skip


def test_an_overfitted_head_is_accepted_to_the_bottom_of_its_tree(tmp_path: Path) -> None:
    model: Any = SpeculativeGenerationMixin.attach(zoo.build("llama"))
    try:
        generator = torch.Generator().manual_seed(0)
        prompts = torch.randint(3, zoo.VOCAB_SIZE, (4, 8), generator=generator)
        answers = model.generate(prompts, max_new_tokens=24, do_sample=False)
        conversations = [(row[:8].tolist(), row[8:].tolist()) for row in answers]
        head = EagleHead(EagleConfig.for_target(model.config, num_steps=3, top_k=2, num_draft_tokens=8))
        loss = EagleTrainingConfig(noise=0.0, token_weight=1.0)
        train_eagle(model, head, list(capture_features(model, conversations)), arguments(tmp_path, 800), loss)
        model.add_drafter(EagleDrafter(head))
        again = model.generate(prompts, max_new_tokens=24, do_sample=False, speculative="eagle")
        assert torch.equal(again, answers)
        assert model.last_speculation.mean_accepted_length > 3.3
    finally:
        SpeculativeGenerationMixin.detach(model)


def test_training_resumes(tmp_path: Path) -> None:
    """Four steps at once and two steps, then two more from the checkpoint, give the same weights."""
    model = zoo.build("llama")
    sequences = list(capture_features(model, [([5, 6], [7, 8, 9, 10, 11]), ([12], [13, 14, 15, 16])] * 4))
    weights = []
    for stops in ([4], [2, 4]):
        for stop in stops:
            torch.manual_seed(0)
            head = EagleHead(EagleConfig.for_target(model.config))
            folder = tmp_path / str(len(stops))
            options = arguments(folder, stop)
            options.save_strategy, options.save_steps, options.lr_scheduler_type = "steps", 2, "constant"
            train_eagle(model, head, sequences, options, EagleTrainingConfig(noise=0.0), resume=stop != stops[0])
        weights.append(head.fc.weight.detach().clone())
    torch.testing.assert_close(weights[0], weights[1])


def test_meaningless_weights_are_refused() -> None:
    for fields in ({"noise": -1}, {"token_weight": -0.1}, {"aligned_steps": 0}):
        with pytest.raises(InvalidConfigError):
            EagleTrainingConfig(**fields)  # type: ignore[arg-type]
