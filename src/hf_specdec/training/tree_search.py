"""Find the static tree that pays most for a head on this device.

Medusa (https://arxiv.org/abs/2401.10774), section 2.3.3: measure how often the r-th candidate of each depth is right,
then add the node that is likeliest to be accepted, again and again. Beyond the paper, the number of nodes is chosen,
too: a larger tree accepts more and costs more, and what it costs is measured.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from hf_specdec.config import Choice
from hf_specdec.control.costs import draft_seconds, verify_seconds
from hf_specdec.errors import InvalidConfigError
from hf_specdec.heads.base import DraftHead
from hf_specdec.heads.eagle import EagleHead
from hf_specdec.heads.eagle3 import Eagle3Head
from hf_specdec.heads.medusa import MedusaHeads
from hf_specdec.heads.mtp import MtpHead
from hf_specdec.training.conversations import check_tokens
from hf_specdec.training.eagle import EagleObjective, EagleTrainingConfig
from hf_specdec.training.features import FeatureStore, collate
from hf_specdec.training.measures import Counts
from hf_specdec.training.medusa import MedusaObjective, MedusaTrainingConfig
from hf_specdec.training.modes import training_modes
from hf_specdec.training.trainer import Objective, TrainingData, as_dataset, columns_of, with_features
from hf_specdec.trees.growth import Accuracies, likeliest_choices, node_acceptance
from hf_specdec.verification.model import text_config

logger = logging.getLogger(__name__)

OBJECTIVES: dict[type[DraftHead], Callable[[Any, PreTrainedModel, int], Objective]] = {
    MedusaHeads: lambda heads, model, _num_steps: MedusaObjective(heads, model, MedusaTrainingConfig()),
    EagleHead: lambda head, model, num_steps: EagleObjective(head, model, _measuring(num_steps)),
    Eagle3Head: lambda head, model, num_steps: EagleObjective(head, model, _measuring(num_steps)),
    MtpHead: lambda head, model, num_steps: EagleObjective(head, model, _measuring(num_steps)),
}
"""The objective that ranks a head's candidates, of as many depths as there are steps."""


def _measuring(num_steps: int) -> EagleTrainingConfig:
    return EagleTrainingConfig(feature_weight=0.0, noise=0.0, aligned_steps=num_steps)


@dataclass(frozen=True, slots=True)
class TreeSearch:
    """A searched tree, and why it is that one."""

    choices: tuple[Choice, ...]  # the drafted nodes, likeliest first
    accuracies: Accuracies
    expected_tau: Mapping[int, float]  # by number of nodes, root included
    verify_seconds: Mapping[int, float]  # measured, by number of nodes; empty where the number was given
    draft_seconds: float = 0.0  # measured, of this tree

    @property
    def num_nodes(self) -> int:
        """Nodes of the tree, root included."""
        return len(self.choices) + 1

    @property
    def expected_speed_up(self) -> float | None:
        """Over plain decoding, by what was measured; None where the number of nodes was given."""
        if not self.verify_seconds:
            return None
        step = self.verify_seconds[self.num_nodes] + self.draft_seconds
        return self.expected_tau[self.num_nodes] * self.verify_seconds[1] / step

    @property
    def acceptance(self) -> dict[Choice, float]:
        """Probability that each node is accepted."""
        return {path: node_acceptance(path, self.accuracies) for path in self.choices}


def search_tree(
    model: PreTrainedModel, head: DraftHead, data: TrainingData, *, num_nodes: int | None = None, max_nodes: int = 64,
    num_steps: int = 5, top_k: int = 10, context: int = 256,
) -> TreeSearch:  # fmt: skip
    """Find the tree (`find_tree`), and write it into the head's config (`head.save_pretrained` stores it).

    Args:
        model, data, num_nodes, max_nodes, num_steps, top_k, context: See `find_tree`.
        head: A trained head; its `config.tree` and `config.num_draft_tokens` are set.

    Raises:
        InvalidConfigError, DrafterMismatchError: As `find_tree` does.
    """
    found = find_tree(
        model, head, data, num_nodes=num_nodes, max_nodes=max_nodes, num_steps=num_steps, top_k=top_k, context=context
    )
    if found.expected_speed_up is not None and found.expected_speed_up < 1:
        logger.warning(
            "No tree of this head pays here: the best one, of %d nodes, is expected to run at %.2f of the speed of "
            "plain decoding. Its first guess is right in %.0f %% of the places; train it further.",
            found.num_nodes, found.expected_speed_up, 100 * found.accuracies[0][0],
        )  # fmt: skip
    head.config.tree = [list(path) for path in found.choices]
    head.config.num_draft_tokens = found.num_nodes
    return found


def find_tree(
    model: PreTrainedModel, head: DraftHead, data: TrainingData, *, num_nodes: int | None = None, max_nodes: int = 64,
    num_steps: int = 5, top_k: int = 10, context: int = 256,
) -> TreeSearch:  # fmt: skip
    """Measure, grow, choose.

    Args:
        model: The target.
        head: A trained head.
        data: Calibration: answers of the target, captured or not; greedy ones tell best.
        num_nodes: Size of the tree, root included; None chooses what is fastest on this device.
        max_nodes: Largest size to choose from.
        num_steps: Deepest level; Medusa has at most one per head.
        top_k: Candidates measured per node.
        context: Committed tokens while the verify forward is timed.

    Raises:
        InvalidConfigError: No answers in `data`, none that the head foresaw, or invalid sizes.
        DrafterMismatchError: The head was made for another model.
    """
    if (num_nodes is not None and num_nodes < 2) or max_nodes < 2 or min(num_steps, top_k) < 1:
        raise InvalidConfigError(
            f"A tree has 2 nodes or more, a depth and a width, got num_nodes={num_nodes}, max_nodes={max_nodes}, "
            f"num_steps={num_steps}, top_k={top_k}."
        )
    head.check_sizes(text_config(model))
    size = head.config.draft_vocab_size or head.config.vocab_size
    if top_k > size:
        raise InvalidConfigError(f"`top_k` {top_k} exceeds the draft vocabulary of {size} tokens.")
    if not isinstance(data, FeatureStore):
        check_tokens(data, int(text_config(model).vocab_size))
    accuracies = count_right(model, head, data, num_steps=num_steps, top_k=top_k).accuracies
    grown = likeliest_choices(accuracies, num_nodes or max_nodes)
    if not grown:
        raise InvalidConfigError("No candidate of this head was ever right on this data.", "Train the head first.")
    gains = [node_acceptance(path, accuracies) for path in grown]
    expected = {size: 1.0 + sum(gains[: size - 1]) for size in range(1, len(grown) + 2)}
    seconds: dict[int, float] = {}
    drafting: dict[int, float] = {}
    if num_nodes is None:
        sizes = sorted({size for size in (2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128) if size <= len(grown) + 1})
        seconds = verify_seconds(model, [1, *sizes], context)
        forward = draft_seconds(model, head, context)
        drafting = {size: forward * head.num_forwards(max(map(len, grown[: size - 1]))) for size in sizes}
        best = max(sizes, key=lambda size: expected[size] / (seconds[size] + drafting[size]))
        grown = grown[: best - 1]
    return TreeSearch(tuple(grown), accuracies, expected, seconds, drafting.get(len(grown) + 1, 0.0))


@training_modes()
@torch.no_grad()
def count_right(
    model: PreTrainedModel, head: DraftHead, data: TrainingData, *, num_steps: int, top_k: int, batch_size: int = 8
) -> Counts:
    """How often the r-th candidate of each depth is the target's greedy choice, and how far greedy chains get.

    Args:
        model: The target.
        head: The head.
        data: Answers of the target.
        num_steps: Depths; Medusa has at most one per head.
        top_k: Ranks.
        batch_size: Conversations per forward.

    Raises:
        InvalidConfigError: No place in `data` where drafting could happen.
    """
    objective = OBJECTIVES[type(head)](head, model, num_steps)
    parameter = next(head.parameters())
    columns = columns_of(data, objective.layers)
    found: list[Tensor] = []
    for batch in DataLoader(as_dataset(data), batch_size=batch_size, collate_fn=collate):
        batch = with_features(batch, model, objective.layers, columns)
        batch = {name: tensor.to(parameter.device) for name, tensor in batch.items()}
        with torch.autocast(parameter.device.type, enabled=parameter.dtype.itemsize < 4, dtype=parameter.dtype):
            counts = objective(**batch, measure=top_k).counts
        found.append(counts.packed().cpu())
    counted = Counts.of(torch.stack(found).sum(0)[:num_steps])
    if not bool(counted.counted.sum()):
        raise InvalidConfigError("The calibration data has no answers to draft.", "Give conversations with answers.")
    return counted
