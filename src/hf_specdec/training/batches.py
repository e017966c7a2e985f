"""Datasets for the Trainer, the order in which it reads them, and the target's features for each batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from transformers import PreTrainedModel
from transformers.trainer_pt_utils import LengthGroupedSampler

from hf_specdec.errors import InvalidConfigError
from hf_specdec.training.conversations import Conversation
from hf_specdec.training.data import TOKEN_ID_LIMIT
from hf_specdec.training.features import FeatureStore, TrainingData, features_of


class ConversationDataset(Dataset[dict[str, Tensor]]):
    """Dataset of conversations without captured features.

    Items: `input_ids [T]` long and `loss_mask [T]` bool.
    """

    def __init__(self, conversations: Sequence[Conversation]) -> None:
        self._conversations = conversations
        self.lengths = [len(conversation.input_ids) for conversation in conversations]

    def __len__(self) -> int:
        return len(self._conversations)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        conversation = self._conversations[index]
        mask = torch.tensor(conversation.loss_mask, dtype=torch.bool, device="cpu")
        return {"input_ids": torch.tensor(conversation.input_ids, device="cpu"), "loss_mask": mask}


class SeededLengthSampler(LengthGroupedSampler):
    """Sampler that puts conversations of similar length in one batch, in a random order given by seed and epoch.

    A run resumed in a later epoch sees the same order as an uninterrupted one, unlike with transformers' sampler.

    Args:
        batch_size: Number of consecutive conversations that should have similar lengths.
        lengths: Number of tokens of each conversation.
        seed: Seed of the order in epoch 0; later epochs add their number.
    """

    def __init__(self, batch_size: int, lengths: list[int], seed: int) -> None:
        super().__init__(batch_size, lengths=lengths)
        self._seed, self._epoch = seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that determines the order; the Trainer calls this at the start of each epoch."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.generator = torch.Generator().manual_seed(self._seed + self._epoch)
        order: Iterator[int] = super().__iter__()
        return order


def as_dataset(data: TrainingData) -> FeatureStore | ConversationDataset:
    """Return `data` as a dataset with the attribute `lengths`: the number of tokens of each conversation."""
    return data if isinstance(data, FeatureStore) else ConversationDataset(data)


def with_features(
    batch: dict[str, Tensor], target: PreTrainedModel, layers: Sequence[int], columns: Tensor | None
) -> dict[str, Tensor]:
    """Return a batch with the features that an objective reads; if none were captured, run the target.

    Args:
        batch: Output of `collate`.
        target: The frozen target.
        layers: `Objective.layers`; empty if the objective runs the target itself.
        columns: Columns of the captured features to keep, from `columns_of`; None keeps all.

    Returns:
        A batch with `features [B, T, layers * D]`; without captured features and `layers`, the batch unchanged.
    """
    features = batch.get("features")
    if features is None and layers:
        features = features_of(target, batch["input_ids"], batch["lengths"], layers).to(batch["input_ids"].device)
    elif features is not None and columns is not None:
        features = features[..., columns.to(features.device)]
    return batch if features is None else {**batch, "features": features}


def columns_of(data: TrainingData, wanted: Sequence[int]) -> Tensor | None:
    """Find the columns of captured features that an objective reads.

    Args:
        data: Training data.
        wanted: `Objective.layers`.

    Returns:
        Indices into the last dimension of the features; None if nothing must be selected: the captured layers are the
        wanted ones in the same order, nothing was captured, or `wanted` is empty.

    Raises:
        InvalidConfigError: A layer was not captured, or the captured features cannot be read.
    """
    if not wanted or not isinstance(data, FeatureStore) or tuple(data.layers) == tuple(wanted):
        return None
    if any(layer not in data.layers for layer in wanted):
        raise InvalidConfigError(
            f"Features of the layers {list(data.layers)} were captured, but this head reads {list(wanted)}.",
            f"Capture them with layers={list(wanted)}.",
        )
    size = len(data[0]["features"][0]) // len(data.layers)
    return torch.cat([torch.arange(size, device="cpu") + size * data.layers.index(layer) for layer in wanted])


def collate(rows: Sequence[dict[str, Any]], vocab_size: int = TOKEN_ID_LIMIT) -> dict[str, Tensor]:
    """Batch items of a dataset with right padding, which `loss_mask` excludes.

    Args:
        rows: Items of a `FeatureStore` or `ConversationDataset`.
        vocab_size: Vocabulary size of the target.

    Returns:
        `input_ids [B, T]`, `loss_mask [B, T]`, `lengths [B]`, and `features [B, T, layers * D]` if captured.

    Raises:
        InvalidConfigError: A token id is negative or outside the target's vocabulary.
    """
    for ids in (row["input_ids"] for row in rows):
        if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < vocab_size):
            raise InvalidConfigError(
                f"A conversation has token ids from {int(ids.min())} to {int(ids.max())}, the target's vocabulary has "
                f"{vocab_size} tokens.",
                "Use data that was tokenised for this target.",
            )
    names = [name for name in ("input_ids", "loss_mask", "features") if name in rows[0]]
    batch: dict[str, Tensor] = {name: pad_sequence([row[name] for row in rows], batch_first=True) for name in names}
    return {**batch, "lengths": torch.tensor([len(row["input_ids"]) for row in rows], device="cpu")}
