"""Train Medusa heads together with their target (Medusa-2): the target gives way a little, and stays itself.

Source: Medusa (https://arxiv.org/abs/2401.10774), sections 2.2.2 and 2.3.2: heads first, then both; LoRA on the
target, whose own distribution with the adapter switched off is the teacher. The target changes: heads of this kind
belong to the merged model, not to the original.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div
from transformers import PreTrainedModel, TrainingArguments

from hf_specdec.errors import InvalidConfigError
from hf_specdec.heads.medusa import MedusaHeads
from hf_specdec.training.conversations import Conversation
from hf_specdec.training.measures import HeadLoss, Tally
from hf_specdec.training.medusa import NO_LABEL, MedusaTrainingConfig, answers_ahead, draft_ids, train_medusa
from hf_specdec.training.recipes import STEEPEST, check_numbers
from hf_specdec.training.target_reader import TargetReader
from hf_specdec.training.trainer import Objective, fit
from hf_specdec.verification.features import LAST, FeatureTap


@dataclass(frozen=True, slots=True)
class Medusa2TrainingConfig:
    """The second stage: heads and an adapter of the target together. Defaults are the authors' (axolotl fork).

    Args:
        head_weight: Weight of the heads' losses beside the target's own.
        head_decay: Weight of each head relative to the one before, from the first on: `decay^(k+1)`.
        schedule: How `head_weight` goes over the run: `"constant"`, or `"sine"`, rising from 0 to its whole.
        learning_rate_multiplier: Of every parameter of the heads; the adapter has the Trainer's rate.
        lora_rank, lora_alpha, lora_dropout: The adapter, on all linear layers but lm_head.
    """

    head_weight: float = 0.2
    head_decay: float = 0.8
    schedule: Literal["constant", "sine"] = "constant"
    learning_rate_multiplier: float = 4.0
    lora_rank: int = 32
    lora_alpha: int = 16
    lora_dropout: float = 0.05

    def __post_init__(self) -> None:
        check_numbers(self, {"head_decay": STEEPEST})
        if min(self.head_weight, self.head_decay, self.learning_rate_multiplier, self.lora_rank) <= 0:
            raise InvalidConfigError(f"Weights, the multiplier and the rank must be > 0, got {self}.")
        if self.schedule not in ("constant", "sine"):
            raise InvalidConfigError(f"`schedule` must be 'constant' or 'sine', got {self.schedule!r}.")


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
    """Train `heads` in place and the target by an adapter.

    Args:
        model: The target; its own weights are not changed, an adapter is put around them.
        heads: In float32; trained before, or by `heads_arguments` now.
        conversations: The target's own answers.
        arguments: Of the second stage.
        config: Of the second stage.
        heads_arguments: Of the first stage, heads alone (Medusa-1); None leaves it out.
        resume: Continue each stage from its last checkpoint.

    Returns:
        The `peft.PeftModel`; `merge_and_unload()` makes it the model that the heads belong to.

    Raises:
        InvalidConfigError: The package `peft` is missing, or FSDP is asked for.
    """
    config = config or Medusa2TrainingConfig()
    try:
        from peft import LoraConfig, get_peft_model  # an optional dependency, used here alone
    except ImportError as error:
        raise InvalidConfigError("Medusa-2 needs the package peft.", "pip install 'hf-specdec[training]'.") from error
    if arguments.fsdp:
        raise InvalidConfigError(
            "Medusa-2 does not run under FSDP: adapter and heads could not be put together from their shards.",
            "Use DDP; the adapter and the heads are small.",
        )
    if heads_arguments is not None:
        stage_one = MedusaTrainingConfig(head_decay=config.head_decay)
        train_medusa(model, heads, conversations, heads_arguments, stage_one, resume=resume)
    adapter = LoraConfig(
        r=config.lora_rank, lora_alpha=config.lora_alpha, lora_dropout=config.lora_dropout,
        target_modules="all-linear", task_type="CAUSAL_LM",
    )  # fmt: skip
    adapted = get_peft_model(model, adapter)
    fit(Medusa2Objective(heads, adapted, config), model, conversations, arguments, resume=resume)
    return adapted.eval()


class Medusa2Objective(Objective):
    """KL of the target to itself without the adapter, plus the heads' cross entropies on what it now computes."""

    layers = ()  # it runs the target itself

    def __init__(self, heads: MedusaHeads, adapted: Any, config: Medusa2TrainingConfig) -> None:
        super().__init__(heads)
        self.adapted, self.recipe = adapted, config
        self.learning_rate_multiplier = config.learning_rate_multiplier
        base = adapted.get_base_model()
        self._target = TargetReader(base, heads.hot_token_ids)
        self._draft_ids = draft_ids(heads.hot_token_ids, heads.config.vocab_size)
        self._lm_head = self._target.logits if heads.shares_lm_head else None

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:  # type: ignore[override]
        """What is trained: heads and adapter, not the target."""
        trained = {name for name, parameter in self.named_parameters() if parameter.requires_grad}
        whole: dict[str, Tensor] = super().state_dict(*args, **kwargs)
        return {name: tensor for name, tensor in whole.items() if name in trained}

    def forward(
        self, input_ids: Tensor, loss_mask: Tensor, lengths: Tensor, features: Tensor | None = None, measure: int = 0
    ) -> HeadLoss:
        """See `Objective.forward`; `features` are not read."""
        recipe, num_heads = self.recipe, self.head.config.medusa_num_heads
        real = torch.arange(input_ids.shape[1], device=input_ids.device) < lengths[:, None]
        inputs = {"input_ids": input_ids, "attention_mask": real.long(), "use_cache": False}
        answered = loss_mask[:, 1:]
        with torch.no_grad(), self.adapted.disable_adapter():
            truth = self.adapted(**inputs).logits[:, :-1][answered].float().log_softmax(-1)
        with FeatureTap(self.adapted.get_base_model()) as tap:
            student = self.adapted(**inputs).logits[:, :-1][answered].float().log_softmax(-1)
        hidden = tap.take().of((LAST,))
        total = kl_div(student, truth, log_target=True, reduction="sum") / max(len(truth), 1)
        weight = recipe.head_weight * (1.0 if recipe.schedule == "constant" else math.sin(self.progress * math.pi / 2))
        known, later = answers_ahead(loss_mask, num_heads)
        places = known.any(-1)
        drafted = self.head(hidden[places].to(self.dtype), self._lm_head)
        known, later = known[places], later[places]
        following = input_ids[:, 1:][answered]
        tokens = self._draft_ids.to(input_ids.device)[following]
        said, tally = hidden[:, :-1][answered].detach(), Tally(known[:, 0], measure)
        for head, logits in enumerate(drafted):
            here = known[:, head]
            rows = later[here, head]
            loss = cross_entropy(logits[here].float(), tokens[rows], reduction="sum", ignore_index=NO_LABEL)
            total = total + weight * recipe.head_decay ** (head + 1) * loss / max(len(rows), 1)
            if measure:
                tally.add(here, *self._target.correct(logits[here], said[rows], following[rows], measure))
        return HeadLoss(total, tally.counts())
