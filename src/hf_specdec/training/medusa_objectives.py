"""Train Medusa heads: on a frozen target (Medusa-1), or together with it (Medusa-2).

Source: Medusa (https://arxiv.org/abs/2401.10774). Medusa-1, section 2.2.1: cross entropy, the k-th head weighted by
0.8^k. By default the labels are the target's distributions instead of single tokens, which works better with little
data.

Medusa-2, sections 2.2.2 and 2.3.2: first the heads, then heads and a LoRA adapter of the target. The target with the
adapter disabled is the teacher, which keeps its answers close to the original. The trained heads are for the target
with the adapter merged into it, not for the original target.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import kl_div, pad
from transformers import PreTrainedModel, TrainingArguments

from hf_specdec.errors import InvalidConfigError
from hf_specdec.heads.medusa import MedusaHeads
from hf_specdec.training.data import Conversation
from hf_specdec.training.feature_store import TrainingData
from hf_specdec.training.objectives import (
    LIMITS,
    HeadLoss,
    Objective,
    Recipe,
    Tally,
    check_settings,
    mean_entropy,
)
from hf_specdec.training.run_setup import requests_fsdp
from hf_specdec.training.trainer import fit
from hf_specdec.validation import check_type
from hf_specdec.verification.features import LAST, FeatureTap


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


@dataclass(frozen=True, slots=True)
class Medusa2TrainingConfig:
    """Settings of the second stage, which trains heads and adapter. The defaults are those of the authors' code.

    Args:
        head_weight: Weight of the heads' losses relative to the loss of the adapter (a KL divergence).
        head_decay: The loss of head k (from 0) has the weight `head_decay^(k+1)`.
        schedule: `"constant"`, or `"sine"`: the weight rises from 0 to `head_weight` over the run, as a quarter sine.
        learning_rate_multiplier: Factor on the learning rate of the heads; the adapter uses the Trainer's.
        lora_rank, lora_alpha, lora_dropout: LoRA settings of the adapter, on all linear layers except lm_head.
    """

    head_weight: float = 0.2
    head_decay: float = 0.8
    schedule: Literal["constant", "sine"] = "constant"
    learning_rate_multiplier: float = 4.0
    lora_rank: int = 32
    lora_alpha: int = 16
    lora_dropout: float = 0.05

    def __post_init__(self) -> None:
        check_settings(self, LIMITS)
        if self.schedule not in ("constant", "sine"):
            raise InvalidConfigError(f"`schedule` must be 'constant' or 'sine', got {self.schedule!r}.")


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
        arguments, resume, held_out: See `train_eagle`.
        config: Settings; None for the defaults.

    Returns:
        The heads; under FSDP new heads, see `train_eagle`.

    Raises:
        InvalidConfigError, DrafterMismatchError, CheckpointFormatError: See `train_eagle`.
    """
    check_type("heads", heads, MedusaHeads, "EAGLE heads: train_eagle. Block heads: train_dflash.")
    objective = MedusaObjective(heads, model, config or MedusaTrainingConfig())
    return fit(objective, model, data, arguments, resume=resume, held_out=held_out)


def train_medusa2(
    model: PreTrainedModel,
    heads: MedusaHeads,
    conversations: list[Conversation],
    arguments: TrainingArguments,
    config: Medusa2TrainingConfig | None = None,
    *,
    heads_arguments: TrainingArguments | None = None,
    resume: bool = False,
) -> Any:
    """Train `heads` in place, together with a new LoRA adapter of the target.

    Args:
        model: The target; its weights do not change, but `peft` inserts the adapter's layers in place.
        heads: The heads; they are trained in float32, and already trained unless `heads_arguments` is given.
        conversations: Conversations with answers of the target.
        arguments: Training arguments of the second stage.
        config: Settings of the second stage.
        heads_arguments: Training arguments of the first stage, which trains the heads only (Medusa-1); None skips it.
        resume: Resume each stage from its last checkpoint, if there is one.

    Returns:
        The `peft.PeftModel` in eval mode; its `merge_and_unload()` returns the target that the heads were trained for.

    Raises:
        InvalidConfigError: The package `peft` is missing, FSDP is requested for either stage, or see `train_eagle`.
        DrafterMismatchError, CheckpointFormatError: See `train_eagle`.
    """
    config = config or Medusa2TrainingConfig()
    try:
        from peft import LoraConfig, get_peft_model  # optional dependency
    except ImportError as error:
        raise InvalidConfigError("Medusa-2 needs the package peft.", "pip install 'hf-specdec[training]'.") from error
    if any(requests_fsdp(stage) for stage in (arguments, heads_arguments) if stage is not None):
        raise InvalidConfigError(
            "Medusa-2 does not run under FSDP: adapter and heads cannot be gathered from their shards.",
            "Use DDP; the adapter and the heads are small.",
        )
    if heads_arguments is not None:
        stage_one = MedusaTrainingConfig(head_decay=config.head_decay)
        train_medusa(model, heads, conversations, heads_arguments, stage_one, resume=resume)
    adapter = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    adapted = get_peft_model(model, adapter)
    fit(Medusa2Objective(heads, adapted, config), model, conversations, arguments, resume=resume)
    return adapted.eval()


class MedusaObjective(Objective):
    """Objective of Medusa-1: sum of the cross entropies of heads k = 0 to K-1, weighted by `head_decay^k`.

    Head k at position t predicts x[t+2+k] and is trained there if x[t+2+k] is an answer token. With token labels,
    answer tokens outside the draft vocabulary add no loss.
    """

    def forward(
        self, input_ids: Tensor, loss_mask: Tensor, lengths: Tensor, features: Tensor, measure: int = 0
    ) -> HeadLoss:
        """See `Objective.forward`."""
        labels = None
        if self.recipe.soft_labels:
            with torch.no_grad():
                labels = self._target.logits(features[:, :-1][loss_mask[:, 1:]]).softmax(-1)
        total = features.new_zeros((), dtype=torch.float32)
        weights = [self.recipe.head_decay**number for number in range(self.head.config.medusa_num_heads)]
        return self._add_heads(total, input_ids, loss_mask, features, labels, weights, measure)

    def _add_heads(
        self, total: Tensor, input_ids: Tensor, loss_mask: Tensor, features: Tensor, labels: Tensor | None,
        weights: Sequence[float], measure: int,
    ) -> HeadLoss:  # fmt: skip
        """Add the heads' losses to `total`; without labels `[M, Vd]` of the M answer tokens, these are the labels."""
        answers, later = answers_ahead(loss_mask, len(weights))
        places = answers.any(-1)
        lm_head = self._target.logits if self.head.shares_lm_head else None
        logits = self.head(features[places].to(self.dtype), lm_head)  # [K, P, Vd]
        answers, later = answers[places], later[places]
        # features at t-1, from which the target predicts the answer tokens x[t]
        choosing, following = features[:, :-1][loss_mask[:, 1:]].detach(), input_ids[:, 1:][loss_mask[:, 1:]]
        if labels is None:
            labels = self._target.draft_ids(following)
        tally = Tally(answers[:, 0], self._target, measure)
        for number, (drafted, weight) in enumerate(zip(logits, weights, strict=True)):
            known = answers[:, number]
            rows = later[known, number]
            total = total + mean_entropy(drafted[known], labels[rows], weight)
            tally.add(known, drafted[known], choosing[rows], following[rows])
        return HeadLoss(total, tally.counts())


class Medusa2Objective(MedusaObjective):
    """Objective of Medusa-2: KL(original target || adapted target) at answers, plus the heads' losses."""

    def __init__(self, heads: MedusaHeads, adapted: Any, config: Medusa2TrainingConfig) -> None:
        super().__init__(heads, adapted.get_base_model(), config)
        self.layers = ()  # it runs the target itself
        self.adapted = adapted
        self.learning_rate_multiplier = config.learning_rate_multiplier

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:  # type: ignore[override]
        """Return the trained tensors: heads and adapter, not the target."""
        trained = {name for name, parameter in self.named_parameters() if parameter.requires_grad}
        whole: dict[str, Tensor] = super().state_dict(*args, **kwargs)
        return {name: tensor for name, tensor in whole.items() if name in trained}

    def forward(
        self, input_ids: Tensor, loss_mask: Tensor, lengths: Tensor, features: Tensor | None = None, measure: int = 0
    ) -> HeadLoss:
        """See `Objective.forward`; `features` is ignored, because the target runs here, twice per batch."""
        recipe = self.recipe
        real = torch.arange(input_ids.shape[1], device=input_ids.device) < lengths[:, None]
        inputs = {"input_ids": input_ids, "attention_mask": real.long(), "use_cache": False}
        answered = loss_mask[:, 1:]
        with torch.no_grad(), self.adapted.disable_adapter():
            truth = self.adapted(**inputs).logits[:, :-1][answered].float().log_softmax(-1)
        with FeatureTap(self.adapted.get_base_model()) as tap:
            student = self.adapted(**inputs).logits[:, :-1][answered].float().log_softmax(-1)
        total = kl_div(student, truth, log_target=True, reduction="sum") / max(len(truth), 1)
        weight = recipe.head_weight * (1.0 if recipe.schedule == "constant" else math.sin(self.progress * math.pi / 2))
        weights = [weight * recipe.head_decay ** (number + 1) for number in range(self.head.config.medusa_num_heads)]
        return self._add_heads(total, input_ids, loss_mask, tap.take().of((LAST,)), None, weights, measure)


def answers_ahead(loss_mask: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
    """Return whether x[t+2+k] is an answer token, bool `[B, T, K]`, and its index among the batch's, `[B, T, K]`.

    The index is 0 if it is not one. The first token of a row is ignored: no feature precedes it.

    Example: mask [[0, 1, 1, 1]], K = 2 gives [[[1, 1], [1, 0], [0, 0], [0, 0]]] and [[[1, 2], [2, 0], ...]].
    """
    counted = pad(loss_mask[:, 1:], (1, num_heads + 1))
    order = torch.zeros_like(counted, dtype=torch.long)
    order[counted] = torch.arange(int(counted.sum()), device=order.device)
    ahead = [slice(2 + head, 2 + head + loss_mask.shape[1]) for head in range(num_heads)]
    return torch.stack([counted[:, place] for place in ahead], -1), torch.stack([order[:, p] for p in ahead], -1)
