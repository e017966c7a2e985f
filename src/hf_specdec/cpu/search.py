"""Search logits for the likeliest tokens with the CPU kernel, which reads them once."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_specdec.cpu.library import is_loaded
from hf_specdec.cpu.operations import DTYPES, functions_for


def can_search(logits: Tensor) -> bool:
    """Whether `best_tokens` supports these logits; False if the kernels have not been loaded for something else."""
    return logits.device.type == "cpu" and logits.dtype in DTYPES and is_loaded() and not logits.requires_grad


def best_tokens(logits: Tensor, count: int, *, with_log_probs: bool = True) -> tuple[Tensor, Tensor]:
    """Return log-probabilities (at most 0, float32) and ids `[..., count]` of the likeliest tokens, best first.

    Of equal logits, the one with the lowest id comes first.

    Args:
        logits: `[..., V]`.
        count: Number of tokens, at most V.
        with_log_probs: Whether log-probabilities are needed; the first result is empty if not.
    """
    size = logits.shape[-1]
    rows = logits.reshape(-1, size)
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    log_probs = logits.new_empty((*logits.shape[:-1], count) if with_log_probs else 0, dtype=torch.float32)
    ids = logits.new_empty(*logits.shape[:-1], count, dtype=torch.long)
    functions_for(logits.dtype).best(
        rows.data_ptr(), len(rows), size, rows.stride(0), count, log_probs.data_ptr() if with_log_probs else None,
        ids.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return log_probs, ids
