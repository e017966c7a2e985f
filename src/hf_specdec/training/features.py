"""Run the frozen target once over tokenised answers and keep the features its head will see.

The tap is the one that inference uses (`target.FeatureTap`), so training and drafting see the same tensors.
Next stage: `training/eagle.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.target import FeatureTap


@dataclass(frozen=True, slots=True)
class TrainingSequence:
    """One prompt with its answer, and the target's features of both."""

    input_ids: Tensor  # [T] prompt and answer
    prompt_length: int  # the loss starts after it
    features: Tensor  # [T, D] post-final-norm hidden states, in the target's dtype


@torch.no_grad()
def capture_features(
    model: PreTrainedModel,
    conversations: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    batch_size: int = 8,
) -> Iterator[TrainingSequence]:
    """Yield every conversation with its features, longest first (batches of similar length waste no padding).

    Args:
        model: The target; its dtype is the dtype of the features.
        conversations: Pairs (prompt ids, answer ids).
        batch_size: Sequences per forward.

    Memory: `T * D * bytes(dtype)` for each sequence kept by the caller.
    """
    order = sorted(range(len(conversations)), key=lambda i: -sum(map(len, conversations[i])))
    for start in range(0, len(order), batch_size):
        chosen = [conversations[i] for i in order[start : start + batch_size]]
        rows = [torch.tensor([*prompt, *answer]) for prompt, answer in chosen]
        input_ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(model.device)
        lengths = torch.tensor([len(row) for row in rows], device=model.device)
        mask = torch.arange(input_ids.shape[1], device=model.device) < lengths[:, None]
        with FeatureTap(model) as tap:
            # right padding: position ids count from 0 in every row, the default of every model
            model(input_ids=input_ids, attention_mask=mask.long(), use_cache=False, logits_to_keep=1)
        for (prompt, _), row, features in zip(chosen, rows, tap.take(), strict=True):
            yield TrainingSequence(row, len(prompt), features[: len(row)].clone())
