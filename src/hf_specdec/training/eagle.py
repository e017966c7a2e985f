"""Train an EAGLE-1/2 head: regress the next feature, and match the next token's distribution.

Source: Li et al., EAGLE (https://arxiv.org/abs/2401.15077), section 4.2 and the repository's `train/main.py`:
smooth-L1 on features, soft cross entropy on the logits of the frozen lm_head, uniform noise on the inputs.
The loop, checkpoints, schedules and precision are transformers' Trainer's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel, Trainer, TrainingArguments

from hf_specdec.errors import InvalidConfigError
from hf_specdec.heads.eagle import EagleHead
from hf_specdec.target import lm_head_rows
from hf_specdec.training.features import TrainingSequence


@dataclass(frozen=True, slots=True)
class EagleTrainingConfig:
    """Loss weights and noise of the EAGLE recipe.

    Args:
        feature_weight: Weight of the smooth-L1 loss on features.
        token_weight: Weight of the soft cross entropy on tokens (0.1 in the paper).
        noise: Width of the uniform noise added to the input features: `noise * U(-0.5, 0.5)`.
        aligned_steps: Forwards per batch: the first sees true features, each later one the predictions of the one
            before, as drafting does below its first level (HASS, https://arxiv.org/abs/2408.15766). 1 is the paper's.
        step_decay: Weight of each aligned step relative to the one before.
    """

    feature_weight: float = 1.0
    token_weight: float = 0.1
    noise: float = 0.2
    aligned_steps: int = 3
    step_decay: float = 0.8

    def __post_init__(self) -> None:
        if min(self.feature_weight, self.token_weight, self.noise, self.step_decay) < 0 or self.aligned_steps < 1:
            raise InvalidConfigError(f"Loss weights and noise must be >= 0 and aligned_steps >= 1, got {self}.")


def most_frequent_tokens(conversations: Sequence[tuple[Sequence[int], Sequence[int]]], size: int) -> Tensor:
    """The `size` most frequent tokens of the answers, ascending; ties and gaps go to the lowest ids.

    Low ids are the frequent ones in a BPE vocabulary, so they fill up what the data does not show.

    Example: answers [7, 7, 9] with size 3 give [0, 7, 9].
    """
    counts = Counter(token for _, answer in conversations for token in answer)
    ranked = sorted(counts, key=lambda token: (-counts[token], token))[:size]
    chosen = set(ranked)
    candidate = 0
    while len(chosen) < size:
        chosen.add(candidate)
        candidate += 1
    return torch.tensor(sorted(chosen))


def train_eagle(
    model: PreTrainedModel,
    head: EagleHead,
    sequences: Sequence[TrainingSequence],
    arguments: TrainingArguments,
    config: EagleTrainingConfig | None = None,
    *,
    resume: bool = False,
) -> EagleHead:
    """Train `head` in place on captured features and return it.

    Args:
        model: The frozen target; only its embedding and lm_head are read.
        head: The head to train, in float32.
        sequences: What `capture_features` yields.
        arguments: transformers' training arguments (epochs, learning rate, precision, checkpoints, devices).
        config: Loss weights and noise.
        resume: Continue from the last checkpoint in `arguments.output_dir`.
    """
    arguments.remove_unused_columns = False
    trainer = EagleTrainer(
        target=model,
        config=config or EagleTrainingConfig(),
        model=head,
        args=arguments,
        train_dataset=[
            {"input_ids": s.input_ids, "features": s.features, "prompt_length": s.prompt_length} for s in sequences
        ],
        data_collator=collate_sequences,
    )
    trainer.train(resume_from_checkpoint=resume)
    return head


def collate_sequences(rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Pad to the right and mark the features whose prediction is trained.

    Entry t sees (x[t+1], f[t]) and predicts f[t+1], which scores x[t+2]: with a prompt of length p and T tokens
    the loss runs over t = p-1 .. T-3 (the features of the last token score nothing that was answered).

    Returns:
        `input_ids [B, T]`, `features [B, T, D]`, `loss_mask [B, T-1]`.
    """
    pad = nn.utils.rnn.pad_sequence
    input_ids = pad([row["input_ids"] for row in rows], batch_first=True)
    entries = torch.arange(input_ids.shape[1] - 1)
    first = torch.tensor([row["prompt_length"] - 1 for row in rows])
    last = torch.tensor([len(row["input_ids"]) - 3 for row in rows])
    return {
        "input_ids": input_ids,
        "features": pad([row["features"] for row in rows], batch_first=True),
        "loss_mask": (entries >= first[:, None]) & (entries <= last[:, None]),
    }


class EagleTrainer(Trainer):
    """transformers' Trainer with the EAGLE loss; the target's embedding and lm_head stay outside the model."""

    def __init__(self, *, target: PreTrainedModel, config: EagleTrainingConfig, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.config = config
        self.embedding = target.get_input_embeddings()
        self.lm_head = lm_head_rows(target, kwargs["model"].hot_token_ids)

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Tensor], return_outputs: bool = False, **_: Any
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Sum over aligned steps of smooth-L1 between features f' and f and CE between lm_head(f') and lm_head(f).

        Step 0 sees the target's features. Step j sees, in place of f[t], the prediction that step j-1 made for it;
        its queries attend to what drafting at depth j+1 sees, see `aligned_mask`.
        """
        input_ids, mask = inputs["input_ids"], inputs["loss_mask"]
        features = inputs["features"].float()
        num_entries = mask.shape[1]
        with torch.no_grad():
            embeddings = self.embedding(input_ids[:, 1:]).float()
            noise = (torch.rand_like(features[:, :-1]) - 0.5) * self.config.noise
            wanted = features[:, 1:]
            target_logits = self._logits(wanted[mask])
            target_probs = target_logits.softmax(-1)
        positions = torch.arange(num_entries, device=mask.device).expand_as(mask)
        cache = DynamicCache()
        seen = features[:, :-1] + noise
        total = features.new_zeros(())
        metrics: dict[str, float] = {}
        for step in range(self.config.aligned_steps):
            visible = aligned_mask(num_entries, step, mask.device)[None, None].expand(len(mask), -1, -1, -1)
            predicted = model(embeddings, seen, positions, visible, cache)
            # entries whose drafting would start before the answer does are no example of this depth
            trained = mask & (positions >= mask.int().argmax(-1, keepdim=True) + step)
            logits = self._logits(predicted[trained])
            feature_loss = nn.functional.smooth_l1_loss(predicted[trained].float(), wanted[trained])
            token_loss = nn.functional.cross_entropy(logits, target_probs[trained[mask]])
            weight = self.config.step_decay**step
            total = total + weight * (
                self.config.feature_weight * feature_loss + self.config.token_weight * token_loss
            )
            seen = torch.cat([features[:, :1], predicted[:, :-1].float()], dim=1)
            if self.state.global_step % self.args.logging_steps == 0:
                agreement = logits.argmax(-1) == target_logits[trained[mask]].argmax(-1)
                metrics[f"top1_agreement_{step}"] = agreement.float().mean().item()
                metrics[f"feature_loss_{step}"] = feature_loss.item()
        if metrics:
            self.log(metrics)
        return (total, predicted) if return_outputs else total

    def _logits(self, features: Tensor) -> Tensor:
        dtype = next(self.lm_head.parameters()).dtype
        logits: Tensor = self.lm_head(features.to(dtype))
        return logits.float()


def aligned_mask(num_entries: int, step: int, device: torch.device) -> Tensor:
    """Which keys the queries of one aligned step see: `[T, (step + 1) * T]` bool.

    Keys are the entries of step 0 (true features), then those of step 1, and so on. Query t of step j sees the true
    entries up to t-j, entry t-j+i of every step i between, and itself.

    Example: 3 entries, step 1: rows 000|100, 100|010, 110|001.
    """
    entries = torch.arange(num_entries, device=device)
    behind = entries[:, None] - entries  # how far a key lies behind its query
    blocks = [behind >= step, *(behind == step - later for later in range(1, step + 1))]
    mask = torch.cat(blocks, dim=-1)
    return mask
