"""The last eight minutes: train an EAGLE-3 head for SmolLM2-135M on the GPU, and compare it with the shipped one.

    python benchmarks/gpu_training.py --json training.jsonl
    python benchmarks/gpu_training.py --tiny --json rehearsal.jsonl

Three passes over `heads/data/answers.parquet`, 32 conversations per step. The head is written to `trained-head` beside
the JSON file; then both heads draft for 24 unseen prompts, in turn.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

from gpu_kit import Kit, main

from hf_specdec import Eagle3Config, Eagle3Head
from hf_specdec.drafters.eagle import EagleDrafter
from hf_specdec.training import (
    Conversation,
    EagleTrainingConfig,
    head_arguments,
    most_frequent_tokens,
    read_conversations,
    start_from_target,
    train_eagle,
)

ANSWERS = Path(__file__).parents[1] / "heads" / "data" / "answers.parquet"
DRAFT_VOCABULARY, PASSES, BATCH, LEARNING_RATE, LONGEST = 12288, 3, 32, 2e-3, 1024
QUESTIONS, NEW_TOKENS = 24, 128
NORMS = {"fc_norm": True, "norm_before_residual": True, "norm_output": True}
"""As in the shipped head."""


def train(kit: Kit) -> None:
    """Train a head, save it, and compare the accept lengths of both heads."""
    model, shipped = kit.smollm()
    if kit.tiny:
        answers = [Conversation(tuple(range(3, 40)), (False,) * 5 + (True,) * 32)] * 8
    else:
        answers = [each for each in read_conversations(ANSWERS) if len(each.input_ids) <= LONGEST]
    size = min(DRAFT_VOCABULARY, model.config.vocab_size // 2)
    layers = shipped.config.eagle_aux_hidden_state_layer_ids
    config = Eagle3Config.for_target(
        model.config, draft_vocab_size=size, eagle_aux_hidden_state_layer_ids=layers, **NORMS
    )
    head = Eagle3Head(config).to(kit.device)
    head.set_hot_token_ids(most_frequent_tokens(answers, size))
    start_from_target(head, model)
    output = kit.path.with_name("trained-head")
    arguments = head_arguments(
        output.with_name("training-run"), {}, num_train_epochs=PASSES, per_device_train_batch_size=BATCH,
        learning_rate=LEARNING_RATE, bf16=not kit.tiny, save_strategy="no", disable_tqdm=True, use_cpu=kit.tiny,
    )  # fmt: skip
    settings = EagleTrainingConfig(feature_weight=0.0, token_weight=1.0, noise=0.0, aligned_steps=3, growing=0.6)
    seconds = kit.seconds_of(lambda: train_eagle(model, head, answers, arguments, settings))
    head.save_pretrained(output)
    kit.row(conversations=len(answers), training_seconds=seconds, head=output)
    accept_lengths(kit, model, {"shipped": shipped, "trained": head.to(kit.device, kit.dtype).eval()})


def accept_lengths(kit: Kit, model: Any, heads: dict[str, Any]) -> None:
    """Write tau by question and head, and the means."""
    for name, head in heads.items():
        model.add_drafter(EagleDrafter(head), name)
    taus: dict[str, list[float]] = {name: [] for name in heads}
    for question, inputs in kit.prompts(2 if kit.tiny else QUESTIONS).items():
        for name in heads:
            model.generate(**inputs, max_new_tokens=12 if kit.tiny else NEW_TOKENS, do_sample=False, speculative=name)
            taus[name].append(model.last_speculation.mean_accepted_length)
        kit.row(question=question, tau={name: values[-1] for name, values in taus.items()})
    kit.row(questions=len(taus["trained"]), mean_tau={name: statistics.mean(values) for name, values in taus.items()})


PARTS = {"train": train}

if __name__ == "__main__":
    sys.exit(main(PARTS, __doc__))
