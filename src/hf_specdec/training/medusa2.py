"""Train Medusa heads together with their target (Medusa-2).

Source: Medusa (https://arxiv.org/abs/2401.10774), sections 2.2.2 and 2.3.2: first the heads, then heads and a LoRA
adapter of the target. The target with the adapter disabled is the teacher, which keeps its answers close to the
original. The trained heads are for the target with the adapter merged into it, not for the original target.
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
from hf_specdec.training.processes import requests_fsdp
from hf_specdec.training.recipes import MAX_DECAY, check_numbers
from hf_specdec.training.target_reader import TargetReader
from hf_specdec.training.trainer import Objective, fit
from hf_specdec.verification.features import LAST, FeatureTap


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
        check_numbers(self, {"head_decay": MAX_DECAY})
        if min(self.head_weight, self.head_decay, self.learning_rate_multiplier, self.lora_rank) <= 0:
            raise InvalidConfigError(
                f"`head_weight`, `head_decay`, `learning_rate_multiplier` and `lora_rank` must be > 0, got {self}."
            )
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
        InvalidConfigError: The package `peft` is missing, FSDP is requested for either stage, token ids outside the
            target's vocabulary, no conversations, weights created in inference mode, an output directory in use by
            another process, or a resumed run that had other heads, settings or data.
        DrafterMismatchError: The heads were made for another model.
        CheckpointFormatError: The checkpoint to resume from is damaged or holds other tensors than the heads.
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
        r=config.lora_rank, lora_alpha=config.lora_alpha, lora_dropout=config.lora_dropout,
        target_modules="all-linear", task_type="CAUSAL_LM",
    )  # fmt: skip
    adapted = get_peft_model(model, adapter)
    fit(Medusa2Objective(heads, adapted, config), model, conversations, arguments, resume=resume)
    return adapted.eval()


class Medusa2Objective(Objective):
    """Objective of Medusa-2: KL(original target || adapted target) at answers, plus the heads' losses."""

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
        """Return the trained tensors: heads and adapter, not the target."""
        trained = {name for name, parameter in self.named_parameters() if parameter.requires_grad}
        whole: dict[str, Tensor] = super().state_dict(*args, **kwargs)
        return {name: tensor for name, tensor in whole.items() if name in trained}

    def forward(
        self, input_ids: Tensor, loss_mask: Tensor, lengths: Tensor, features: Tensor | None = None, measure: int = 0
    ) -> HeadLoss:
        """See `Objective.forward`; `features` is ignored, because the target runs here, twice per batch."""
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
        choosing, tally = hidden[:, :-1][answered].detach(), Tally(known[:, 0])
        for head, logits in enumerate(drafted):
            here = known[:, head]
            rows = later[here, head]
            loss = cross_entropy(logits[here].float(), tokens[rows], reduction="sum", ignore_index=NO_LABEL)
            total = total + weight * recipe.head_decay ** (head + 1) * loss / max(len(rows), 1)
            if measure:
                tally.add(here, *self._target.correct(logits[here], choosing[rows], following[rows], measure))
        return HeadLoss(total, tally.counts())
