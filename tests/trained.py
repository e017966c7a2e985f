"""What tests of training share: conversations, training arguments, batches with features, rows of a distilled set."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainingArguments

import zoo
from hf_specdec.training import Conversation
from hf_specdec.training.data import read_rows
from hf_specdec.training.feature_store import collate, target_features

CLI = [sys.executable, "-W", "ignore", "-m", "hf_specdec"]
"""The command in a process of its own."""

TALKS = [
    Conversation.of([5, 6, 7], [8, 9]),
    Conversation.of([10, 11], [12, 13, 14, 15, 16]),
    Conversation.of([20], [21, 22]),
]

PROMPTS = [" ".join(f"w{3 + (7 * i + j) % 80:02}" for j in range(2 + i % 4)) for i in range(9)]
"""Texts for the tiny tokenizer."""


def arguments(folder: Path, steps: int, **more: Any) -> TrainingArguments:
    fields: dict[str, Any] = {
        "output_dir": str(folder), "max_steps": steps, "per_device_train_batch_size": 4, "learning_rate": 3e-3,
        "use_cpu": True, "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "logging_steps": 1000,
        "seed": 0,
    }  # fmt: skip
    return TrainingArguments(**{**fields, **more})


def answered(model: Any, count: int, width: int) -> tuple[Tensor, Tensor, list[Conversation]]:
    """Prompts, what the model makes of them, and both as conversations."""
    prompts = torch.randint(3, zoo.VOCAB_SIZE, (count, 8), generator=torch.Generator().manual_seed(0))
    answers = model.generate(prompts, max_new_tokens=width, do_sample=False)
    return prompts, answers, [Conversation.of(row[:8].tolist(), row[8:].tolist()) for row in answers]


def batch_of(model: Any, talks: list[Conversation], layers: tuple[int, ...]) -> dict[str, Tensor]:
    """A right-padded batch with features."""
    rows = [{"input_ids": torch.tensor(talk.input_ids), "loss_mask": torch.tensor(talk.loss_mask)} for talk in talks]
    batch = collate(rows)
    return {**batch, "features": target_features(model, batch["input_ids"], batch["lengths"], layers)}


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """The rows of a distilled data set, by their numbers."""
    return sorted((row for _, row in read_rows(folder)), key=lambda row: row["number"])
