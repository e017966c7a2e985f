"""Train an EAGLE head or an MTP module.

EAGLE-1/2 heads learn to predict the target's next feature and next token, other heads only the next token.

Sources: EAGLE (https://arxiv.org/abs/2401.15077), section 4.2: smooth-L1 on features, soft cross entropy on the
logits of the frozen lm_head, uniform noise on the inputs. EAGLE-3 (https://arxiv.org/abs/2503.01840): soft cross
entropy over the draft vocabulary, through several drafted steps (training-time test). FastMTP
(https://arxiv.org/abs/2509.18362): three steps of one module, each weighted 0.6 times the previous one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad, smooth_l1_loss
from transformers import PreTrainedModel, TrainingArguments

from hf_specdec.errors import InvalidConfigError
from hf_specdec.heads.attention import AlignedAttention
from hf_specdec.heads.eagle import EagleHead
from hf_specdec.heads.eagle3 import Eagle3Head
from hf_specdec.heads.mtp import MtpHead
from hf_specdec.training.feature_store import TrainingData
from hf_specdec.training.objectives import HeadLoss, Objective, Recipe, Tally, grown, mean_entropy
from hf_specdec.training.trainer import fit
from hf_specdec.validation import check_type

TrainedHead = EagleHead | Eagle3Head | MtpHead

MEASURED_STEPS = 5
"""Minimum number of aligned steps in evaluation, so that heads trained with fewer can be compared."""


@dataclass(frozen=True, slots=True)
class EagleTrainingConfig(Recipe):
    """Settings of `train_eagle`. The defaults are for EAGLE-1 and 2 heads; `for_head` returns those of every kind.

    Args:
        feature_weight: Weight of the smooth-L1 loss on features; must be 0 for EAGLE-3.
        token_weight: Weight of the soft cross entropy on tokens.
        noise: Width of the uniform noise added to the input features: `noise * U(-0.5, 0.5)`.
        aligned_steps: Forwards of the head per batch. The first reads the target's features, each later one the output
            of the previous one, as in drafting below the first level (HASS, https://arxiv.org/abs/2408.15766;
            EAGLE-3's training-time test). The EAGLE-1 paper uses 1, the EAGLE-3 paper 7.
        step_decay: Weight of each aligned step relative to the previous one.
        soft_tokens: Learn the target's distribution over the draft vocabulary; False: only its most likely token.
        growing: Fraction of the run, from its start, over which the number of aligned steps grows from 1 to
            `aligned_steps`; 0 uses all of them throughout. The first step is the cheapest and contributes most.
        answer_tokens: Train and measure on the first N tokens of each answer only; 0 for all. Long answers tend to
            repeat themselves, which is easy to predict; their beginnings are not.
    """

    feature_weight: float = 1.0
    token_weight: float = 0.1
    noise: float = 0.2
    aligned_steps: int = 3
    step_decay: float = 0.8
    soft_tokens: bool = True
    growing: float = 0.0

    @classmethod
    def for_head(cls, head: TrainedHead) -> EagleTrainingConfig:
        """Return the default settings for this kind of head: those below, and the defaults of this class.

        * EAGLE-1 and 2: `feature_weight` 1, `token_weight` 0.1, `noise` 0.2, `aligned_steps` 3, `step_decay` 0.8.
        * EAGLE-3: `feature_weight` 0, `token_weight` 1, `noise` 0, `aligned_steps` 4, `step_decay` 0.8.
        * MTP: `feature_weight` 0, `token_weight` 1, `noise` 0, `aligned_steps` 3, `step_decay` 0.6.

        Args:
            head: The head to train.
        """
        if isinstance(head, EagleHead):
            return cls()
        if isinstance(head, MtpHead):
            return cls(feature_weight=0.0, token_weight=1.0, noise=0.0, aligned_steps=3, step_decay=0.6)
        return cls(feature_weight=0.0, token_weight=1.0, noise=0.0, aligned_steps=4)


def train_eagle(
    model: PreTrainedModel,
    head: TrainedHead,
    data: TrainingData,
    arguments: TrainingArguments,
    config: EagleTrainingConfig | None = None,
    *,
    resume: bool = False,
    held_out: TrainingData | None = None,
) -> TrainedHead:
    """Train an EAGLE head or an MTP module in place; logs and checkpoints are in `arguments.output_dir`.

    Args:
        model: The frozen target; with captured features only its lm_head and, unless the head has its own, its
            embedding are used.
        head: The head; it is trained in float32.
        data: Features from `capture_features` with at least the layers `(*head.feature_layers, LAST)`, or
            conversations, whose features are computed in every step.
        arguments: transformers' training arguments (epochs, learning rate, precision, checkpoints, devices).
        config: Settings; None for `EagleTrainingConfig.for_head(head)`.
        resume: Resume from the last checkpoint in `arguments.output_dir`, if there is one.
        held_out: Conversations or features to evaluate on before each checkpoint. If the arguments come from
            `head_arguments(..., held_out=True)`, the head gets the weights of the checkpoint with the highest tau.

    Returns:
        The head. Under FSDP, which shards the weights, a new head: with the gathered weights on the main process,
        untrained on the others.

    Raises:
        InvalidConfigError: An EAGLE-3 head with nonzero `feature_weight`, a head with a sliding window, token ids
            outside the target's vocabulary, no conversations, features that lack a layer, weights created in inference
            mode, a frozen head, FSDP in a single process, an output directory in use by another process, or a resumed
            run that had another head, settings or data.
        DrafterMismatchError: The head was made for another model.
        CheckpointFormatError: The checkpoint to resume from is damaged or holds other tensors than the head.

    Example:
        ```python
        head = Eagle3Head(Eagle3Config.for_target(model.config, draft_vocab_size=8192))
        head.set_hot_token_ids(most_frequent_tokens(conversations, 8192))
        start_from_target(head, model)
        head = train_eagle(model, head, conversations, head_arguments(Path("run"), {"num_train_epochs": 2}))
        ```
    """
    check_type("head", head, (EagleHead, Eagle3Head, MtpHead), "Block heads: train_dflash. Medusa: train_medusa.")
    objective = EagleObjective(head, model, config or EagleTrainingConfig.for_head(head))
    return fit(objective, model, data, arguments, resume=resume, held_out=held_out)


class EagleObjective(Objective):
    """Objective of EAGLE heads and MTP modules: sum of the losses of all aligned steps j, weighted by `step_decay^j`.

    At position t the head reads the embedding of x[t+1] and the feature of x[t], and its output predicts x[t+2]. The
    feature is the target's at step 0, and the head's output of step j-1 at position t-1 at step j. A position is
    trained only if all tokens from x[t-j+1], the root of such a draft, to x[t+2] are answer tokens.
    """

    def __init__(self, head: TrainedHead, target: PreTrainedModel, config: EagleTrainingConfig) -> None:
        super().__init__(head, target, config)
        if getattr(head.config, "mask_token_id", None) is not None:
            raise InvalidConfigError(
                "This is a P-EAGLE head, which drafts in parallel; EAGLE's objective trains heads level by level.",
                "Train it with speculators, SpecForge or NeMo Automodel.",
            )
        if config.feature_weight and isinstance(head, Eagle3Head):
            raise InvalidConfigError(
                "An EAGLE-3 head predicts no features and needs feature_weight=0.",
                "Use EagleTrainingConfig.for_head(head).",
            )

    def forward(
        self, input_ids: Tensor, loss_mask: Tensor, lengths: Tensor, features: Tensor, measure: int = 0
    ) -> HeadLoss:
        """See `Objective.forward`."""
        recipe = self.recipe
        own, states = self.split(features)
        read, wanted = own[:, :-1], states[:, 1:]  # [B, T-1, D] the features to predict at each position
        embeddings = self._target.embed(input_ids[:, 1:], read)
        if self.training:
            with torch.no_grad():
                read = read + (torch.rand_like(read) - 0.5) * recipe.noise
        trained = pad(loss_mask[:, 1:-1] & loss_mask[:, 2:], (0, 1))  # [B, T-1] x[t+1] and x[t+2] are answers
        with torch.no_grad():
            scores = self._target.logits(wanted[trained])
            probs = scores.softmax(-1) if recipe.soft_tokens else one_hot(scores.argmax(-1), scores.shape[-1]).float()
        following = pad(input_ids[:, 2:], (0, 1))
        rows = torch.zeros_like(trained, dtype=torch.long)  # [B, T-1] row of `probs`
        rows[trained] = torch.arange(len(probs), device=rows.device)
        positions = torch.arange(read.shape[1], device=read.device).expand(len(read), -1)
        hidden, attend = self.head.fuse(read), AlignedAttention(self.head.config.num_hidden_layers)
        total, tally = features.new_zeros((), dtype=torch.float32), Tally(trained, self._target, measure)
        num_steps = max(recipe.aligned_steps, MEASURED_STEPS)
        if self.training:
            num_steps = grown(recipe.aligned_steps, self.progress, recipe.growing)
        for step in range(num_steps):
            output = self.head(embeddings, hidden, positions, attend)
            drafted = output[trained]
            logits = self.head.score(drafted, self._target.logits).float()
            loss = mean_entropy(logits, probs[rows[trained]], recipe.token_weight)
            if recipe.feature_weight:
                distance = smooth_l1_loss(drafted.float(), wanted[trained].float(), reduction="sum")
                loss = loss + recipe.feature_weight * distance / (max(len(drafted), 1) * states.shape[-1])
            if step < recipe.aligned_steps:
                total = total + recipe.step_decay**step * loss
            tally.add(trained, logits, wanted[trained], following[trained])
            tally.move_on()
            hidden = torch.cat([hidden[:, :1], output[:, :-1]], dim=1)
            trained = trained & pad(trained[:, :-1], (1, 0))
        return HeadLoss(total, tally.counts())
