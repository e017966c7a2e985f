"""Train Medusa heads on a frozen target (Medusa-1).

Source: Medusa (https://arxiv.org/abs/2401.10774), section 2.2.1: cross entropy, the k-th head weighted by 0.8^k. By
default the labels are the target's distributions instead of single tokens, which works better with little data.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad
from transformers import PreTrainedModel, TrainingArguments

from hf_specdec.errors import InvalidConfigError
from hf_specdec.heads.medusa import MedusaHeads
from hf_specdec.training.features import TrainingData, openings
from hf_specdec.training.measures import HeadLoss, Tally
from hf_specdec.training.recipes import Recipe
from hf_specdec.training.target_reader import TargetReader
from hf_specdec.training.trainer import Objective, fit
from hf_specdec.validation import check_type


@dataclass(frozen=True, slots=True)
class MedusaTrainingConfig(Recipe):
    """Settings of `train_medusa`.

    Args:
        head_decay: Weight of each head relative to the previous one (0.8 in the paper).
        soft_labels: Learn the target's distribution over the draft vocabulary; False: the text's token (as in the
            paper).
        answer_tokens: Train and measure on the first N tokens of each answer only; 0 for all. Long answers tend to
            repeat themselves, which is easy to predict; their beginnings are not.
    """

    head_decay: float = 0.8
    soft_labels: bool = True

    def __post_init__(self) -> None:
        Recipe.__post_init__(self)  # `super()` fails in dataclasses with slots, which replace the class
        if self.head_decay <= 0:
            raise InvalidConfigError(f"`head_decay` must be > 0, got {self.head_decay}.")


def train_medusa(
    model: PreTrainedModel,
    heads: MedusaHeads,
    data: TrainingData,
    arguments: TrainingArguments,
    config: MedusaTrainingConfig | None = None,
    *,
    resume: bool = False,
    held_out: TrainingData | None = None,
) -> MedusaHeads:
    """Train Medusa heads in place (Medusa-1); logs and checkpoints are in `arguments.output_dir`.

    Args:
        model: The frozen target; with captured features only its lm_head is used.
        heads: The heads; they are trained in float32.
        data: Features from `capture_features`, or conversations, whose features are computed in every step.
        arguments: transformers' training arguments (epochs, learning rate, precision, checkpoints, devices).
        config: Settings; None for the defaults.
        resume: Resume from the last checkpoint in `arguments.output_dir`, if there is one.
        held_out: Conversations or features to evaluate on before each checkpoint. If the arguments come from
            `head_arguments(..., held_out=True)`, the heads get the weights of the checkpoint with the highest tau.

    Returns:
        The heads. Under FSDP, which shards the weights, new heads: with the gathered weights on the main process,
        untrained on the others.

    Raises:
        InvalidConfigError: Token ids outside the target's vocabulary, no conversations, features that lack a layer,
            weights created in inference mode, FSDP in a single process, an output directory in use by another process,
            or a resumed run that had other heads, settings or data.
        DrafterMismatchError: The heads were made for another model.
        CheckpointFormatError: The checkpoint to resume from is damaged or holds other tensors than the heads.
    """
    check_type("heads", heads, MedusaHeads, "EAGLE heads: train_eagle. Block heads: train_dflash.")
    objective = MedusaObjective(heads, model, config or MedusaTrainingConfig())
    length = objective.recipe.answer_tokens
    data, held_out = openings(data, length), None if held_out is None else openings(held_out, length)
    trained: MedusaHeads = fit(objective, model, data, arguments, resume=resume, held_out=held_out)
    return trained


class MedusaObjective(Objective):
    """Objective of Medusa-1: sum of the cross entropies of heads k = 0 to K-1, weighted by `head_decay^k`.

    Head k at position t predicts x[t+2+k] and is trained there if x[t+2+k] is an answer token. With token labels,
    answer tokens outside the draft vocabulary add no loss.
    """

    def __init__(self, heads: MedusaHeads, target: PreTrainedModel, config: MedusaTrainingConfig) -> None:
        super().__init__(heads)
        self.recipe = config
        self._target = TargetReader(target, heads.hot_token_ids)
        self._lm_head = self._target.logits if heads.shares_lm_head else None
        self._draft_ids = draft_ids(heads.hot_token_ids, heads.config.vocab_size)

    def forward(
        self, input_ids: Tensor, loss_mask: Tensor, lengths: Tensor, features: Tensor, measure: int = 0
    ) -> HeadLoss:
        """See `Objective.forward`."""
        num_heads = self.head.config.medusa_num_heads
        answers, later = answers_ahead(loss_mask, num_heads)
        places = answers.any(-1)
        logits = self.head(features[places].to(self.dtype), self._lm_head)  # [K, M, Vd]
        answers, later = answers[places], later[places]
        # features at t-1, from which the target predicts the answer tokens x[t]
        choosing = features[:, :-1][loss_mask[:, 1:]]
        with torch.no_grad():
            probs = self._target.logits(choosing).softmax(-1) if self.recipe.soft_labels else None
        following = input_ids[:, 1:][loss_mask[:, 1:]]
        tokens = self._draft_ids.to(input_ids.device)[following]
        total, tally = features.new_zeros((), dtype=torch.float32), Tally(answers[:, 0])
        for head, drafted in enumerate(logits):
            known = answers[:, head]
            rows = later[known, head]
            labels = tokens[rows] if probs is None else probs[rows]
            loss = cross_entropy(drafted[known].float(), labels, reduction="sum", ignore_index=NO_LABEL)
            total = total + self.recipe.head_decay**head * loss / max(len(rows), 1)
            if measure:
                tally.add(known, *self._target.correct(drafted[known], choosing[rows], following[rows], measure))
        return HeadLoss(total, tally.counts())


NO_LABEL = -100
"""Label of tokens outside the draft vocabulary, which cross entropy ignores."""


def draft_ids(hot_token_ids: Tensor | None, vocab_size: int) -> Tensor:
    """Return a tensor `[V]` that maps target ids to draft ids, or to `NO_LABEL` outside the draft vocabulary."""
    if hot_token_ids is None:
        return torch.arange(vocab_size, device="cpu")
    ids = torch.full((vocab_size,), NO_LABEL, dtype=torch.long, device=hot_token_ids.device)
    ids[hot_token_ids] = torch.arange(len(hot_token_ids), device=ids.device)
    return ids


def answers_ahead(loss_mask: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
    """Find the answer token that each head is trained to predict at each position.

    Args:
        loss_mask: `[B, T]` True at answers. The first token of a row is ignored: no feature precedes it.
        num_heads: K.

    Returns:
        `[B, T, K]` bool: whether x[t+2+k] is an answer token. `[B, T, K]` long: its index among the batch's answer
        tokens, or 0 if it is not one.

    Example: mask [[0, 1, 1, 1]], K = 2 gives [[[1, 1], [1, 0], [0, 0], [0, 0]]] and [[[1, 2], [2, 0], ...]].
    """
    counted = pad(loss_mask[:, 1:], (1, num_heads + 1))
    order = torch.zeros_like(counted, dtype=torch.long)
    order[counted] = torch.arange(int(counted.sum()), device=order.device)
    ahead = [slice(2 + head, 2 + head + loss_mask.shape[1]) for head in range(num_heads)]
    return torch.stack([counted[:, place] for place in ahead], -1), torch.stack([order[:, p] for p in ahead], -1)
