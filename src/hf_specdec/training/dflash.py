"""Train a block head: many blocks of masks in one forward, each behind a token ("anchor") of an answer.

Sources: DFlash (https://github.com/z-lab/dflash) and speculators (https://github.com/vllm-project/speculators) for
anchors and slot weights; DSpark (https://github.com/deepseek-ai/DeepSpec, `deepspec/modeling/dspark/loss.py`) for the
losses.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, pad
from transformers import PreTrainedModel, TrainingArguments

from hf_specdec.errors import InvalidConfigError
from hf_specdec.heads.attention import AnchoredAttention
from hf_specdec.heads.dflash import DFlashHead
from hf_specdec.training.features import TrainingData, openings
from hf_specdec.training.measures import Counts, HeadLoss, Tally
from hf_specdec.training.recipes import Recipe
from hf_specdec.training.target_reader import TargetReader
from hf_specdec.training.trainer import Objective, fit
from hf_specdec.validation import check_type
from hf_specdec.verification.features import LAST


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

    def __post_init__(self) -> None:
        Recipe.__post_init__(self)  # `super()` fails in dataclasses with slots, which replace the class
        weights = self.text_weight, self.distance_weight, self.soft_weight, self.confidence_weight
        if min(weights) < 0 or self.anchors < 1 or self.slot_decay <= 0:
            raise InvalidConfigError(f"Loss weights must be >= 0, anchors >= 1 and slot_decay > 0, got {self}.")
        if not 0.0 <= self.growing <= 1.0:
            raise InvalidConfigError(f"`growing` must be a fraction of the run, 0 to 1, got {self.growing}.")

    def depth_at(self, progress: float, depth: int) -> int:
        """Return how many tokens a block drafts at a point of the run.

        Args:
            progress: Fraction of the run that is done.
            depth: Tokens that a whole block drafts.
        """
        return depth if progress >= self.growing else 1 + int((depth - 1) * progress / self.growing)


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
        arguments: transformers' training arguments (epochs, learning rate, precision, checkpoints, devices).
        config: Settings; None for the defaults.
        resume: Resume from the last checkpoint in `arguments.output_dir`, if there is one.
        held_out: Conversations or features to evaluate on before each checkpoint. If the arguments come from
            `head_arguments(..., held_out=True)`, the head gets the weights of the checkpoint with the highest tau.

    Returns:
        The head. Under FSDP, which shards the weights, a new head: with the gathered weights on the main process,
        untrained on the others.

    Raises:
        InvalidConfigError: A head with a sliding window, `growing` for a head that is not causal, token ids outside
            the target's vocabulary, no conversations, features that lack a layer, weights created in inference mode,
            FSDP in a single process, an output directory in use by another process, or a resumed run that had another
            head, settings or data.
        DrafterMismatchError: The head was made for another model.
        CheckpointFormatError: The checkpoint to resume from is damaged or holds other tensors than the head.

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
    length = objective.recipe.answer_tokens
    data, held_out = openings(data, length), None if held_out is None else openings(held_out, length)
    trained: DFlashHead = fit(objective, model, data, arguments, resume=resume, held_out=held_out)
    return trained


@dataclass(frozen=True, slots=True)
class _Blocks:
    """The blocks of a batch: A of each row, each behind an anchor. M tokens are drafted in all."""

    anchors: Tensor  # [B, A] index of each block's first token
    text: Tensor  # [B, A, D + 1] the token at the anchor, and the D tokens after it
    counted: Tensor  # [B, A, D] bool, which of these D are to be drafted; M are True

    @property
    def depths(self) -> Tensor:
        """`[M]` depth of each drafted token, counted from 0."""
        depths = torch.arange(self.counted.shape[2], device=self.counted.device)
        return depths.expand_as(self.counted)[self.counted]

    @property
    def following(self) -> Tensor:
        """`[M]` the text's token at the place of each drafted one."""
        return self.text[:, :, 1:][self.counted]


@dataclass(frozen=True, slots=True)
class _Truth:
    """The target's predictions at the P places whose tokens are drafted."""

    states: Tensor  # [P, D] hidden states after the final norm
    probs: Tensor  # [P, Vd] distributions over the draft vocabulary
    rows: Tensor  # [M] the place of each drafted token


class DFlashObjective(Objective):
    """Objective of block heads: the weighted mean of the losses of all drafted tokens of all blocks.

    A block behind anchor x[a] reads the features of x[0] to x[a-1] and the embeddings of x[a] and of masks. Its d-th
    drafted token, counted from 0, is compared with the target's distribution after x[a+d]. Tokens count as long as
    they and all before them are answer tokens. A Markov head reads the text's tokens.

    Args:
        head: The head.
        target: The frozen target.
        config: Settings.

    Raises:
        InvalidConfigError: A head with a sliding window, or `growing` for a head that is not causal.
    """

    def __init__(self, head: DFlashHead, target: PreTrainedModel, config: DFlashTrainingConfig) -> None:
        super().__init__(head)
        check_full_attention(head)
        if config.growing and not head.config.causal:
            raise InvalidConfigError(
                "`growing` needs a causal head: in others, a slot's output depends on how many slots follow.",
                "Set growing to 0, or train a head with causal=True (--causal).",
            )
        own = tuple(head.feature_layers)
        self.layers = own if own[-1] == LAST else (*own, LAST)
        self.recipe = config
        self._width = len(own) * head.config.hidden_size
        if head.config.own_embedding:  # not trained
            head.embed_tokens.requires_grad_(False)
        self._target = TargetReader(target, head.hot_token_ids, head.embedding_for(target))

    def forward(
        self, input_ids: Tensor, loss_mask: Tensor, lengths: Tensor, features: Tensor, measure: int = 0
    ) -> HeadLoss:
        """See `Objective.forward`."""
        config = self.head.config
        blocks = self._blocks(input_ids, loss_mask)
        slots = self._outputs(features[..., : self._width].to(self.dtype), blocks)
        hidden = slots if config.sample_from_anchor else slots[:, :, 1:]
        logits = self.head.score(hidden[blocks.counted], self._target.logits).float()
        if config.markov_rank:
            logits = logits + self._corrections(blocks.text, slots, hidden)[blocks.counted].float()
        truth = self._truth(features[..., -config.hidden_size :], blocks)
        weights = torch.exp(-blocks.depths / self.recipe.slot_decay)
        losses = self._losses(logits, truth.probs[truth.rows], blocks.following)
        if config.confidence_head and self.recipe.confidence_weight:
            agreed = 1 - 0.5 * (logits.detach().softmax(-1) - truth.probs[truth.rows]).abs().sum(-1)
            confidence = self.head.confidence(hidden[blocks.counted], blocks.text[:, :, :-1][blocks.counted]).float()
            errors = binary_cross_entropy_with_logits(confidence, agreed.clamp(0, 1), reduction="none")
            losses = losses + self.recipe.confidence_weight * errors
        # not a mean: it would be NaN in a batch without tokens to draft
        loss = (losses * weights).sum() / weights.sum().clamp(min=1e-6)
        return HeadLoss(loss, self._measure(logits, blocks, truth, measure) if measure else None)

    def _blocks(self, input_ids: Tensor, loss_mask: Tensor) -> _Blocks:
        """Choose anchors, and gather the tokens to draft behind them."""
        whole = self.head.config.max_depth
        depth = self.recipe.depth_at(self.progress, whole) if self.training else whole
        anchors, known = self._anchors(loss_mask, self.recipe.anchors * whole // depth)
        places = (anchors[:, :, None] + torch.arange(depth + 1, device=anchors.device)).flatten(1)
        shape = *anchors.shape, depth + 1
        text = pad(input_ids, (0, depth)).gather(1, places).view(shape)
        answers = pad(loss_mask, (0, depth)).gather(1, places).view(shape)[:, :, 1:]
        return _Blocks(anchors, text, answers.int().cumprod(-1).bool() & known[:, :, None])

    def _truth(self, states: Tensor, blocks: _Blocks) -> _Truth:
        """Return the target's distributions: one per place, although several blocks predict the same token.

        Args:
            states: `[B, T, D]` the target's hidden states after the final norm.
            blocks: The blocks.
        """
        depth = blocks.counted.shape[2]
        places = blocks.anchors[:, :, None] + torch.arange(depth, device=states.device)
        uses = torch.zeros(*states.shape[:2], dtype=torch.long, device=states.device)
        uses = pad(uses, (0, depth)).scatter_add(1, places.flatten(1), blocks.counted.flatten(1).long())
        needed = uses > 0
        rows = (needed.flatten().cumsum(0) - 1).view_as(needed).gather(1, places.flatten(1))
        wanted = states[needed[:, : states.shape[1]]]
        with torch.no_grad():
            probs = self._target.logits(wanted).softmax(-1)
        return _Truth(wanted, probs, rows.view_as(blocks.counted)[blocks.counted])

    def _anchors(self, loss_mask: Tensor, most: int | None = None) -> tuple[Tensor, Tensor]:
        """Choose anchors `[B, A]`, ascending, and return which of them are followed by a token to draft.

        In evaluation they are evenly spaced, so that the result does not depend on chance.
        """
        possible = loss_mask & pad(loss_mask[:, 1:], (0, 1))  # [B, T], so that a single token has a place, too
        count = min(most or self.recipe.anchors, possible.shape[1])
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
        with torch.no_grad():
            embeddings = self._target.embed(tokens.flatten(1)).to(features.device, self.dtype)
        attend = AnchoredAttention(context, anchors, size, self.head.config.causal)
        hidden: Tensor = self.head(embeddings, slots.flatten(1), attend)
        return hidden.unflatten(1, (count, size))

    def _corrections(self, text: Tensor, slots: Tensor, hidden: Tensor) -> Tensor:
        """Return the Markov head's corrections `[B, A, D, Vd]`, given the text's tokens `[B, A, D + 1]`."""
        markov, state = self.head.markov_head, self.head.start_state(text[:, :, 0], slots[:, :, 0])
        corrections = []
        for depth in range(hidden.shape[2]):
            correction, state = markov(text[:, :, depth], hidden[:, :, depth], state)
            corrections.append(correction)
        return torch.stack(corrections, dim=2)

    def _losses(self, logits: Tensor, probs: Tensor, text: Tensor) -> Tensor:
        """Return the losses `[M]` of M drafted tokens.

        Args:
            logits: `[M, Vd]`.
            probs: `[M, Vd]` the target's distributions.
            text: `[M]` the text's tokens, as ids of the target.
        """
        recipe, hot = self.recipe, self.head.hot_token_ids
        log_probs = logits.log_softmax(-1)
        losses = log_probs.new_zeros(len(log_probs))
        if recipe.text_weight:
            draft_ids = text if hot is None else torch.searchsorted(hot, text).clamp(max=len(hot) - 1)
            of_text = -log_probs.gather(1, draft_ids[:, None])[:, 0]
            if hot is not None:  # tokens that the head cannot draft
                of_text = torch.where(hot[draft_ids] == text, of_text, 0.0)
            losses = losses + recipe.text_weight * of_text
        if recipe.distance_weight:
            losses = losses + recipe.distance_weight * (log_probs.exp() - probs).abs().sum(-1)
        if recipe.soft_weight:
            losses = losses - recipe.soft_weight * (probs * log_probs).sum(-1)
        return losses

    def _measure(self, logits: Tensor, blocks: _Blocks, truth: _Truth, ranks: int) -> Counts | None:
        """Count correct drafted tokens depth by depth."""
        tally = Tally(blocks.counted[:, :, 0])
        for depth in range(blocks.counted.shape[2]):
            here = blocks.depths == depth
            states, following = truth.states[truth.rows[here]], blocks.following[here]
            tally.add(blocks.counted[:, :, depth], *self._target.correct(logits[here], states, following, ranks))
        return tally.counts()


def check_full_attention(head: DFlashHead) -> None:
    """Raise `InvalidConfigError` if the head has a sliding window, with which it cannot be trained."""
    if any(window is not None for window in head.layer_windows):
        raise InvalidConfigError(
            "Training attends to the whole context, but this head has a sliding window.",
            "Set layer_types=None in its config.",
        )
