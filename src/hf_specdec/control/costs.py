"""What a step costs on this machine, measured: a verify forward by the size of its tree, a forward of a head.

Called by: `training/tree_search.py`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from hf_specdec.heads.base import DraftHead
from hf_specdec.target.model import cache_argument, execution_device, lm_head_rows, text_config
from hf_specdec.target.probe import TargetFacts, inspect_target
from hf_specdec.tree import TokenTree

TIMED_ROUNDS = 5
"""Forwards of each size that are timed."""


@torch.no_grad()
def verify_seconds(
    model: PreTrainedModel, sizes: Sequence[int], context: int, facts: TargetFacts | None = None
) -> dict[int, float]:
    """Median seconds of the forward that verifies a tree of so many nodes behind a context, one row.

    It is the forward that generation runs, with its cache and its masks; a model without branches verifies chains.

    Args:
        model: The target.
        sizes: Numbers of nodes, roots included.
        context: Committed tokens.
        facts: What the probe found; None probes the model.
    """
    facts = facts or inspect_target(model)
    device, vocab_size = execution_device(model), int(text_config(model).vocab_size)
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(vocab_size, (1, context + max(sizes)), generator=draw).to(device)
    target = facts.new_target(model, context + max(sizes), None)
    inputs = {"attention_mask": torch.ones_like(ids[:, :context]), cache_argument(model): target.cache}
    target.prefill(ids[:, :context], GenerationConfig(), {**inputs, "use_cache": True})
    trees = {size: _tree(ids[:, context : context + size], branches=facts.branches) for size in sizes}

    def forward(size: int) -> None:
        target.verify(trees[size])

    return _median_seconds(forward, sizes, device, undo=target.rollback)


def _tree(tokens: Tensor, *, branches: bool) -> TokenTree:
    """A binary tree, or a chain."""
    nodes = torch.arange(tokens.shape[1], device=tokens.device)
    parents = (nodes - 1).div(2, rounding_mode="floor") if branches else nodes - 1
    return TokenTree(tokens, parents)


@torch.no_grad()
def draft_seconds(model: PreTrainedModel, head: DraftHead, position: int) -> float:
    """Median seconds of one forward of the head: a level of an EAGLE tree, or all Medusa heads."""
    parameter, size = next(head.parameters()), int(head.config.hidden_size)
    features = torch.zeros(1, 1, size, device=parameter.device, dtype=parameter.dtype)
    rows: nn.Module | None = lm_head_rows(model, head.hot_token_ids) if head.shares_lm_head else None

    def forward(_size: int) -> None:
        head.draft_logits(features, position, rows)

    return _median_seconds(forward, [1], parameter.device)[1]


def _median_seconds(
    forward: Callable[[int], None],
    sizes: Sequence[int],
    device: torch.device,
    undo: Callable[[int], None] = lambda _size: None,
) -> dict[int, float]:
    """Sizes are interleaved over the rounds, so that a busy moment hits all of them; the first round is a warm-up.

    Args:
        forward: What is timed, by size.
        sizes: What to time.
        device: Where it runs.
        undo: What brings back the state before, untimed.
    """
    taken: dict[int, list[float]] = {size: [] for size in sizes}
    for turn in range(TIMED_ROUNDS + 1):
        for size in sizes:
            begin = time.perf_counter()
            forward(size)
            if device.type != "cpu":
                torch.get_device_module(device).synchronize(device)
            if turn:
                taken[size].append(time.perf_counter() - begin)
            undo(size)
    return {size: statistics.median(seconds) for size, seconds in taken.items()}
