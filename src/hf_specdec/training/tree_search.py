"""Find the fastest static tree for a head on this device.

Medusa (https://arxiv.org/abs/2401.10774), section 2.3.3: measure how often the r-th best candidate at each depth is
correct, then repeatedly add the node that is most likely to be accepted. Unlike the paper, the number of nodes is also
chosen, by the measured cost of drafting and verifying trees of several sizes.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from hf_specdec.control.costs import draft_seconds, time_forwards
from hf_specdec.errors import InvalidConfigError
from hf_specdec.heads.dflash import DFlashHead
from hf_specdec.heads.head import DraftHead
from hf_specdec.heads.medusa import MedusaHeads
from hf_specdec.training.block_objective import DFlashObjective, DFlashTrainingConfig
from hf_specdec.training.data import check_tokens
from hf_specdec.training.eagle_objective import EagleObjective, EagleTrainingConfig
from hf_specdec.training.feature_store import FeatureStore, TrainingData, as_dataset, collate, with_features
from hf_specdec.training.medusa_objectives import MedusaObjective, MedusaTrainingConfig
from hf_specdec.training.objectives import Counts, Objective
from hf_specdec.training.trainer import training_modes
from hf_specdec.trees.growth import Accuracies, likeliest_choices, node_acceptance
from hf_specdec.validation import Choice
from hf_specdec.verification.model import text_config

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TreeSearch:
    """A static tree, with the measurements from which it was chosen.

    Args:
        choices: Drafted nodes, most likely first.
        accuracies: Measured share of correct candidates, by depth and rank.
        expected_tau: Expected tokens per target forward, by number of nodes, root included.
        verify_seconds: Measured seconds of a verify forward, by number of nodes; empty if the number was given.
        draft_seconds: Measured seconds of drafting this tree; 0 if the number was given.
    """

    choices: tuple[Choice, ...]
    accuracies: Accuracies
    expected_tau: Mapping[int, float]
    verify_seconds: Mapping[int, float]
    draft_seconds: float = 0.0

    @property
    def num_nodes(self) -> int:
        """Number of nodes, root included."""
        return len(self.choices) + 1

    @property
    def expected_speed_up(self) -> float | None:
        """Expected speed-up over plain decoding; None if nothing was timed because the number of nodes was given."""
        if not self.verify_seconds:
            return None
        step = self.verify_seconds[self.num_nodes] + self.draft_seconds
        return self.expected_tau[self.num_nodes] * self.verify_seconds[1] / step

    @property
    def acceptance(self) -> dict[Choice, float]:
        """Estimated probability that each drafted node is accepted, by its path from the root."""
        return {path: node_acceptance(path, self.accuracies) for path in self.choices}


def search_tree(model: PreTrainedModel, head: DraftHead, data: TrainingData, **sizes: Any) -> TreeSearch:
    """Find a tree with `find_tree` and set it in the head's config, which `head.save_pretrained` stores.

    Logs a warning if the tree is expected to be slower than plain decoding.

    Args:
        model, data: See `find_tree`.
        head: A trained head; its `config.tree` and `config.num_draft_tokens` are set.
        **sizes: `num_nodes`, `max_nodes`, `num_steps`, `top_k` and `context`, see `find_tree`.

    Raises:
        InvalidConfigError, DrafterMismatchError: See `find_tree`.
    """
    found = find_tree(model, head, data, **sizes)
    if found.expected_speed_up is not None and found.expected_speed_up < 1:
        logger.warning(
            "No tree of this head is faster than plain decoding here: the best one, with %d nodes, is expected to run "
            "at %.2f times its speed. The first drafted token is correct in %.0f %% of cases; train the head further.",
            found.num_nodes, found.expected_speed_up, 100 * found.accuracies[0][0],
        )  # fmt: skip
    head.config.tree = [list(path) for path in found.choices]
    head.config.num_draft_tokens = found.num_nodes
    return found


def find_tree(
    model: PreTrainedModel, head: DraftHead, data: TrainingData, *, num_nodes: int | None = None, max_nodes: int = 64,
    num_steps: int = 5, top_k: int = 10, context: int = 256,
) -> TreeSearch:  # fmt: skip
    """Find the static tree with the most expected tokens per second or, for a given size, per target forward.

    Args:
        model: The target.
        head: A trained head.
        data: Captured features or conversations, with answers of the target, preferably greedy ones.
        num_nodes: Size of the tree, root included, or less if too few candidates are ever correct; None chooses the
            fastest of several sizes on this device.
        max_nodes: Largest size to consider if `num_nodes` is None.
        num_steps: Maximum depth; for Medusa also at most the number of heads.
        top_k: Number of best candidates measured at each depth.
        context: Number of tokens in the KV cache when forwards are timed.

    Raises:
        InvalidConfigError: No answers in `data`, token ids outside the target's vocabulary, features without a needed
            layer, no correctly drafted token, invalid sizes, or a `top_k` above the draft vocabulary size.
        DrafterMismatchError: The head was made for another model.
    """
    if (num_nodes is not None and num_nodes < 2) or max_nodes < 2 or min(num_steps, top_k) < 1:
        raise InvalidConfigError(
            "A tree needs `num_nodes` and `max_nodes` of at least 2, `num_steps` and `top_k` of at least 1, got "
            f"num_nodes={num_nodes}, max_nodes={max_nodes}, num_steps={num_steps}, top_k={top_k}."
        )
    head.check_sizes(text_config(model))
    size = head.config.draft_vocab_size or head.config.vocab_size
    if top_k > size:
        raise InvalidConfigError(f"`top_k` {top_k} exceeds the draft vocabulary of {size} tokens.")
    if not isinstance(data, FeatureStore):
        check_tokens(data, int(text_config(model).vocab_size))
    accuracies = count_correct(model, head, data, num_steps=num_steps, top_k=top_k).accuracies
    grown = likeliest_choices(accuracies, num_nodes or max_nodes)
    if not grown:
        raise InvalidConfigError("This head drafted no correct token on this data.", "Train the head first.")
    gains = [node_acceptance(path, accuracies) for path in grown]
    expected = {size: 1.0 + sum(gains[: size - 1]) for size in range(1, len(grown) + 2)}
    seconds: dict[int, float] = {}
    drafting: dict[int, float] = {}
    if num_nodes is None:
        sizes = sorted({size for size in (2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128) if size <= len(grown) + 1})
        seconds = time_forwards(model, [1, *sizes], context)
        forward = draft_seconds(model, head, context)
        drafting = {size: forward * head.num_forwards(max(map(len, grown[: size - 1]))) for size in sizes}
        best = max(sizes, key=lambda size: expected[size] / (seconds[size] + drafting[size]))
        grown = grown[: best - 1]
    return TreeSearch(tuple(grown), accuracies, expected, seconds, drafting.get(len(grown) + 1, 0.0))


@training_modes()
@torch.no_grad()
def count_correct(
    model: PreTrainedModel, head: DraftHead, data: TrainingData, *, num_steps: int, top_k: int, batch_size: int = 8
) -> Counts:
    """Count how often the r-th best candidate is the target's greedy choice, and how far greedy chains are accepted.

    `num_steps` depths are counted; for Medusa at most the number of heads. Other arguments are those of `find_tree`.
    """
    objective: Objective
    if isinstance(head, MedusaHeads):
        objective = MedusaObjective(head, model, MedusaTrainingConfig())
    elif isinstance(head, DFlashHead):
        objective = DFlashObjective(head, model, DFlashTrainingConfig())
    else:
        objective = EagleObjective(
            head, model, EagleTrainingConfig(feature_weight=0.0, noise=0.0, aligned_steps=num_steps)
        )
    parameter = next(head.parameters())
    found: list[Tensor] = []
    for batch in DataLoader(as_dataset(data, objective.layers), batch_size=batch_size, collate_fn=collate):
        batch = with_features(batch, model, objective.layers)
        batch = {name: tensor.to(parameter.device) for name, tensor in batch.items()}
        with torch.autocast(parameter.device.type, enabled=parameter.dtype.itemsize < 4, dtype=parameter.dtype):
            counts = objective(**batch, measure=top_k).counts
        found.append(counts.packed().cpu())
    counted = Counts.of(torch.stack(found).sum(0)[:num_steps])
    if not bool(counted.counted.sum()):
        raise InvalidConfigError("The calibration data has no answers to draft.", "Use conversations with answers.")
    return counted
