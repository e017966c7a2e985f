"""Train a block head: many blocks of masks in one forward, each behind a token ("anchor") of an answer.

Sources: DFlash (https://github.com/z-lab/dflash) and speculators (https://github.com/vllm-project/speculators) for
anchors and slot weights; DSpark (https://github.com/deepseek-ai/DeepSpec, `deepspec/modeling/dspark/loss.py`) for the
losses.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, nll_loss, pad
from transformers import PreTrainedModel, TrainingArguments

from hf_specdec.errors import InvalidConfigError
from hf_specdec.heads.attention import AnchoredAttention
from hf_specdec.heads.dflash import DFlashHead
from hf_specdec.training.feature_store import TrainingData
from hf_specdec.training.objectives import HeadLoss, Objective, Recipe, Tally, grown
from hf_specdec.training.trainer import fit
from hf_specdec.validation import check_type


@dataclass(frozen=True, slots=True)
class DFlashTrainingConfig(Recipe):
    """Settings of `train_dflash`. The default weights of the losses are DSpark's.

    Args:
        anchors: Blocks per conversation and step, behind randomly chosen answer tokens.
        slot_decay: gamma; the d-th drafted token of a block, counted from 0, has the weight exp(-d / gamma).
        text_weight: Weight of the cross entropy on the text's token.
        distance_weight: Weight of the L1 distance to the target's distribution over the draft vocabulary, which is
            twice the probability that a sampled draft is rejected.
        soft_weight: Weight of the cross entropy on the target's distribution. It learns faster than the distance as
            long as the head knows little.
        confidence_weight: Weight of the confidence head's binary cross entropy, if there is such a head.
        growing: Fraction of the run, from its start, over which blocks grow from one drafted token to all of them.
            Short blocks are more numerous, so that a step has as many slots as later, if the answers are long enough.
            Only for causal heads, whose first slots do not depend on later ones; 0 for whole blocks throughout.
        answer_tokens: Train and measure on the first N tokens of each answer only; 0 for all. Long answers tend to
            repeat themselves, which is easy to predict; their beginnings are not.
    """

    anchors: int = 64
    slot_decay: float = 4.0
    text_weight: float = 0.1
    distance_weight: float = 0.9
    soft_weight: float = 0.0
    confidence_weight: float = 1.0
    growing: float = 0.0


def train_dflash(
    model: PreTrainedModel,
    head: DFlashHead,
    data: TrainingData,
    arguments: TrainingArguments,
    config: DFlashTrainingConfig | None = None,
    *,
    resume: bool = False,
    held_out: TrainingData | None = None,
) -> DFlashHead:
    """Train a block head in place; logs and checkpoints are in `arguments.output_dir`.

    Args:
        model: The frozen target; with captured features only its lm_head and embedding are used.
        head: The head; it is trained in float32.
        data: Features from `capture_features` with at least the layers `(*head.feature_layers, LAST)`, or
            conversations, whose features are computed in every step.
        arguments, resume, held_out: See `train_eagle`.
        config: Settings; None for the defaults.

    Returns:
        The head; under FSDP a new head, see `train_eagle`.

    Raises:
        InvalidConfigError: `growing` for a head that is not causal, or see `train_eagle`.
        DrafterMismatchError, CheckpointFormatError: See `train_eagle`.

    Example:
        ```python
        head = DFlashHead(DFlashConfig.for_target(model.config, mask_token_id=unused, causal=True))
        start_block_from_target(head, model)
        start_first_layer(head, model)
        head = train_dflash(model, head, conversations, head_arguments(Path("run"), {"num_train_epochs": 2}))
        ```
    """
    check_type("head", head, DFlashHead, "EAGLE heads: train_eagle. Medusa heads: train_medusa.")
    objective = DFlashObjective(head, model, config or DFlashTrainingConfig())
    return fit(objective, model, data, arguments, resume=resume, held_out=held_out)


@dataclass(frozen=True, slots=True)
class _Blocks:
    """The blocks of a batch: A of each row, each behind an anchor. M tokens are drafted in all."""

    anchors: Tensor  # [B, A] index of each block's first token
    text: Tensor  # [B, A, D + 1] the token at the anchor, and the D tokens after it
    counted: Tensor  # [B, A, D] bool, which of these D are to be drafted; M are True


class DFlashObjective(Objective):
    """Objective of block heads: the weighted mean of the losses of all drafted tokens of all blocks.

    A block behind anchor x[a] reads the features of x[0] to x[a-1] and the embeddings of x[a] and of masks. Its d-th
    drafted token, counted from 0, is compared with the target's distribution after x[a+d]. Tokens count as long as
    they and all before them are answer tokens. A Markov head reads the text's tokens.
    """

    def __init__(self, head: DFlashHead, target: PreTrainedModel, config: DFlashTrainingConfig) -> None:
        super().__init__(head, target, config)
        if head.config.conv_kernel_size or head.config.num_candidates or head.config.gru_hidden_dim:
            raise InvalidConfigError(
                "Block heads with convolutions, pairs of candidates or Domino's GRU cannot be trained here.",
                "Train them with their authors' code or speculators, and load the result.",
            )
        if config.growing and not head.config.causal:
            raise InvalidConfigError(
                "`growing` needs a causal head: in others, a slot's output depends on how many slots follow.",
                "Set growing to 0, or train a head with causal=True (--causal).",
            )

    def forward(
        self, input_ids: Tensor, loss_mask: Tensor, lengths: Tensor, features: Tensor, measure: int = 0
    ) -> HeadLoss:
        """See `Objective.forward`."""
        config, recipe = self.head.config, self.recipe
        own, last = self.split(features)
        blocks = self._blocks(input_ids, loss_mask)
        counted = blocks.counted
        depths = torch.arange(counted.shape[2], device=counted.device).expand_as(counted)[counted]  # [M]
        following = blocks.text[:, :, 1:][counted]  # [M] the text's token at the place of each drafted one
        slots = self._outputs(own, blocks)
        hidden = slots if config.sample_from_anchor else slots[:, :, 1:]
        logits = self.head.score(hidden[counted], self._target.logits).float()
        if config.markov_rank:
            state = self.head.start_state(blocks.text[:, :, 0], slots[:, :, 0])
            corrections = []
            for depth in range(hidden.shape[2]):
                correction, state = self.head.markov_head(blocks.text[:, :, depth], hidden[:, :, depth], state)
                corrections.append(correction)
            logits = logits + torch.stack(corrections, dim=2)[counted].float()
        states, rows = self._predicted(last, blocks)
        with torch.no_grad():
            probs = self._target.logits(states).softmax(-1)[rows]
        log_probs = logits.log_softmax(-1)
        losses = log_probs.new_zeros(len(log_probs))  # [M]
        if recipe.text_weight:
            labels = self._target.draft_ids(following)
            losses = losses + recipe.text_weight * nll_loss(log_probs, labels, reduction="none")
        if recipe.distance_weight:
            losses = losses + recipe.distance_weight * (log_probs.exp() - probs).abs().sum(-1)
        if recipe.soft_weight:
            losses = losses - recipe.soft_weight * (probs * log_probs).sum(-1)
        if config.confidence_head and recipe.confidence_weight:
            agreed = 1 - 0.5 * (logits.detach().softmax(-1) - probs).abs().sum(-1)
            confidence = self.head.confidence(hidden[counted], blocks.text[:, :, :-1][counted]).float()
            errors = binary_cross_entropy_with_logits(confidence, agreed.clamp(0, 1), reduction="none")
            losses = losses + recipe.confidence_weight * errors
        weights = torch.exp(-depths / recipe.slot_decay)
        # not a mean: it would be NaN in a batch without tokens to draft
        loss = (losses * weights).sum() / weights.sum().clamp(min=1e-6)
        tally = Tally(counted[:, :, 0], self._target, measure)
        for depth in range(counted.shape[2]):
            here = depths == depth
            tally.add(counted[:, :, depth], logits[here], states[rows[here]], following[here])
        return HeadLoss(loss, tally.counts())

    def _blocks(self, input_ids: Tensor, loss_mask: Tensor) -> _Blocks:
        """Choose anchors, and gather the tokens to draft behind them."""
        whole = self.head.config.max_depth
        depth = grown(whole, self.progress, self.recipe.growing) if self.training else whole
        anchors, known = self._anchors(loss_mask, self.recipe.anchors * whole // depth)
        places = (anchors[:, :, None] + torch.arange(depth + 1, device=anchors.device)).flatten(1)
        shape = *anchors.shape, depth + 1
        text = pad(input_ids, (0, depth)).gather(1, places).view(shape)
        answers = pad(loss_mask, (0, depth)).gather(1, places).view(shape)[:, :, 1:]
        return _Blocks(anchors, text, answers.int().cumprod(-1).bool() & known[:, :, None])

    def _anchors(self, loss_mask: Tensor, most: int) -> tuple[Tensor, Tensor]:
        """Choose anchors `[B, A]`, ascending, and return which of them are followed by a token to draft.

        In evaluation they are evenly spaced, so that the result does not depend on chance.
        """
        possible = loss_mask & pad(loss_mask[:, 1:], (0, 1))  # [B, T], so that a single token has a place, too
        count = min(most, possible.shape[1])
        if count > self.recipe.anchors:  # short blocks: more than there may be places for
            count = min(count, max(int(possible.sum(-1).max()), 1))
        if self.training:
            order = torch.rand(possible.shape, dtype=torch.float32, device=possible.device)
        else:
            ranks, sizes = possible.cumsum(-1) - 1, possible.sum(-1, keepdim=True).clamp(min=1)
            step = (sizes.float() / count).clamp(min=1.0)
            order = (ranks / step).frac()
        chosen = torch.where(possible, order, 2.0).topk(count, dim=-1, largest=False).indices.sort(dim=-1).values
        return chosen, possible.gather(1, chosen)

    def _outputs(self, features: Tensor, blocks: _Blocks) -> Tensor:
        """Return the head's outputs `[B, A, S, D]` for one block behind every anchor."""
        anchors, skipped = blocks.anchors, not self.head.config.sample_from_anchor
        size, (batch_size, count) = blocks.counted.shape[2] + skipped, anchors.shape
        positions = torch.arange(features.shape[1], device=anchors.device).expand(batch_size, -1)
        context = self.head.context_states(self.head.fuse(features), positions)
        tokens = torch.full(
            (batch_size, count, size), self.head.config.mask_token_id, dtype=torch.long, device=anchors.device
        )
        tokens[:, :, 0] = blocks.text[:, :, 0]
        slots = anchors[:, :, None] + torch.arange(size, device=anchors.device)
        embeddings = self._target.embed(tokens.flatten(1), features)
        attend = AnchoredAttention(context, anchors, size, self.head.config.causal)
        hidden: Tensor = self.head(embeddings, slots.flatten(1), attend)
        return hidden.unflatten(1, (count, size))

    def _predicted(self, states: Tensor, blocks: _Blocks) -> tuple[Tensor, Tensor]:
        """Find the places at which the target is compared: one per token, although several blocks predict the same.

        Given the target's states after the final norm `[B, T, D]`, returns those at these places `[P, D]`, and the
        place of each drafted token `[M]`.
        """
        depth = blocks.counted.shape[2]
        places = blocks.anchors[:, :, None] + torch.arange(depth, device=states.device)
        uses = torch.zeros(*states.shape[:2], dtype=torch.long, device=states.device)
        uses = pad(uses, (0, depth)).scatter_add(1, places.flatten(1), blocks.counted.flatten(1).long())
        needed = uses > 0
        rows = (needed.flatten().cumsum(0) - 1).view_as(needed).gather(1, places.flatten(1))
        return states[needed[:, : states.shape[1]]], rows.view_as(blocks.counted)[blocks.counted]
