"""What all training objectives share: settings, access to the frozen target, the loss of a step, and its measurement.

A head is measured depth by depth: its first drafted token, its second, and so on. Tau is the mean number of tokens per
target forward.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import accumulate
from operator import mul
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from transformers import PreTrainedModel

from hf_specdec.errors import InvalidConfigError
from hf_specdec.training.run_setup import check_number
from hf_specdec.validation import MAX_STEPS, check_known
from hf_specdec.verification.features import LAST
from hf_specdec.verification.model import lm_head_rows
from hf_specdec.verification.programs import faster_products

# ---------------------------------------------------------------------------------------------------------- settings

LIMITS = {
    "answer_tokens": (0, 2**31), "aligned_steps": (1, MAX_STEPS), "anchors": (1, 10**6), "growing": (0, 1),
    "step_decay": (0, 2), "head_decay": (0, 2), "lora_rank": (1, 10**6), "lora_dropout": (0, 1),
}  # fmt: skip
"""Smallest and largest value of settings. After the maximum of 64 steps, 2**64 is still a finite float32."""

NONZERO = ("head_decay", "slot_decay", "head_weight", "learning_rate_multiplier")
"""Settings that must be above 0."""

NO_LABEL = -100
"""Label of tokens outside the draft vocabulary, which cross entropy ignores."""

AnyRecipe = TypeVar("AnyRecipe", bound="Recipe")


@dataclass(frozen=True, slots=True)
class Recipe:
    """Base class for the settings of an objective; each documents `answer_tokens`."""

    answer_tokens: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        check_settings(self, LIMITS)

    def changed(self: AnyRecipe, /, **fields: Any) -> AnyRecipe:
        """Return a copy with new values of the given fields."""
        check_known(f"The recipe {type(self).__name__}", fields, list(asdict(self)))
        return replace(self, **fields)


def check_settings(
    settings: Any, limits: Mapping[str, tuple[int, int]], otherwise: tuple[int, int] = (0, 10**6)
) -> None:
    """Check that the numbers and booleans of a dataclass have the type of their defaults and are within limits."""
    for setting in fields(settings):
        name, kind = setting.name, type(setting.default)
        if kind in (bool, int, float):
            bounds = limits.get(name, otherwise)
            check_number(f"`{name}`", getattr(settings, name), {kind}, bounds, nonzero=name in NONZERO)


def grown(whole: int, progress: float, growing: float) -> int:
    """Return a number that grows from 1 to `whole` over the fraction `growing` of a run, done to `progress`."""
    return whole if progress >= growing else 1 + int((whole - 1) * progress / growing)


# ------------------------------------------------------------------------------------------------------- measurement


@dataclass(frozen=True, slots=True)
class Counts:
    """Numbers of correct drafted tokens at each of K depths, of a batch or summed over batches and processes."""

    right: Tensor  # [K, R] positions at which the r-th best drafted token is the target's greedy choice
    counted: Tensor  # [K] positions at which that was measured
    accepted: Tensor  # [K] those of `chains` whose best drafted token is the greedy choice here and at earlier depths
    chains: Tensor  # [K] measured positions at which the text is the greedy choice at all earlier depths

    @classmethod
    def of(cls, packed: Tensor) -> Counts:
        """Create the counts from a tensor `[K, 3 + R]` returned by `packed`, or from a sum of such tensors."""
        return cls(packed[:, 3:], packed[:, 0], packed[:, 1], packed[:, 2])

    def packed(self) -> Tensor:
        """Return the counts as one tensor `[K, 3 + R]`."""
        return torch.cat([torch.stack([self.counted, self.accepted, self.chains], dim=1), self.right], dim=1)

    @property
    def accuracies(self) -> tuple[tuple[float, ...], ...]:
        """By depth, the fractions of positions at which the r-th best drafted token is correct; 0 if none is known."""
        return tuple(map(tuple, (self.right.double() / self.counted[:, None].clamp(min=1)).tolist()))

    @property
    def acceptance(self) -> list[float]:
        """By depth, the fraction of `chains` whose best drafted tokens are all correct so far; 0 if there are none."""
        return (self.accepted.double() / self.chains.clamp(min=1)).tolist()


@dataclass(frozen=True, slots=True)
class HeadLoss:
    """Loss and counts of one batch."""

    loss: Tensor  # scalar, weighted sum of means over positions
    counts: Counts | None = None  # None if nothing was measured


class Tally:
    """Accumulator for the counts of one batch, which is measured depth by depth.

    `places` is a bool tensor with one element per position, whose values are not used. The `ranks` top drafted tokens
    (R) are compared with the target's greedy choice; 0 measures nothing.
    """

    def __init__(self, places: Tensor, target: TargetReader, ranks: int) -> None:
        self._right = torch.ones_like(places)  # all tokens drafted so far are correct
        self._greedy = torch.ones_like(places)  # the text so far is the target's greedy choice
        self._target, self._ranks = target, ranks
        self._rows: list[Tensor] = []

    @torch.no_grad()
    def add(self, known: Tensor, logits: Tensor, states: Tensor, following: Tensor) -> None:
        """Measure the next depth, at the M positions where `known`, shaped like `places`, is True.

        Given are the head's logits `[M, Vd]`, the states after the final norm `[M, D]` from which the target predicts
        the same tokens, and the text's tokens `[M]`: if the target chooses others, later depths are not in `chains`.
        """
        if not self._ranks:
            return
        chosen = self._target.choices(states)
        correct = self._target.token_ids(logits.topk(self._ranks, dim=-1).indices) == chosen[:, None]
        here = torch.zeros_like(known)
        self._right = self._right & here.masked_scatter(known, correct[:, 0])
        chains = known & self._greedy
        self._rows.append(torch.stack([known.sum(), (chains & self._right).sum(), chains.sum(), *correct.sum(0)]))
        self._greedy = chains & here.masked_scatter(known, following == chosen)

    def move_on(self) -> None:
        """Shift all chains one position to the right, for heads that continue at t a chain they drafted at t - 1."""
        self._right, self._greedy = (pad(places[:, :-1], (1, 0)) for places in (self._right, self._greedy))

    def counts(self) -> Counts | None:
        """Return the counts, or None if nothing was counted."""
        return Counts.of(torch.stack(self._rows)) if self._rows else None


def predicted_tau(accuracies: Sequence[float]) -> float:
    """Return the tau that greedy chains would have if their tokens were correct independently of each other.

    Args:
        accuracies: Fraction of correct tokens at each depth.

    Example: accuracies 0.5, 0.4 give 1 + 0.5 + 0.5 * 0.4 = 1.7.
    """
    return 1.0 + sum(accumulate(accuracies, mul))


# -------------------------------------------------------------------------------------------------------- objectives


class TargetReader:
    """Access to the frozen target's embedding and lm_head; not an `nn.Module`, so they are neither trained nor saved.

    The head may have a draft vocabulary and its own embedding.
    """

    def __init__(self, target: PreTrainedModel, head: Any) -> None:
        self._embedding = head.embedding_for(target) if hasattr(head, "embedding_for") else None
        self._hot_token_ids: Tensor | None = head.hot_token_ids
        self._rows = lm_head_rows(target, head.hot_token_ids)
        self._lm_head = target.get_output_embeddings()
        self._dtype, self._products = target.dtype, faster_products(target)

    def logits(self, features: Tensor) -> Tensor:
        """Return the float32 logits `[M, Vd]` over the draft vocabulary of hidden states `[M, D]`, differentiable."""
        with self._products:
            logits: Tensor = self._rows(features.to(self._dtype))
        return logits.float()

    @torch.no_grad()
    def embed(self, input_ids: Tensor, like: Tensor) -> Tensor:
        """Embed token ids `[B, T]` as `[B, T, D]`, with the device and dtype of `like`."""
        assert self._embedding is not None
        embeddings: Tensor = self._embedding(input_ids)
        return embeddings.to(like.device, like.dtype)

    def choices(self, features: Tensor) -> Tensor:
        """Return the greedy choices `[M]` from the target's full vocabulary after hidden states `[M, D]`."""
        return self._lm_head(features.to(self._dtype)).argmax(-1)

    def draft_ids(self, token_ids: Tensor) -> Tensor:
        """Return the ids of tokens in the draft vocabulary, or outside it `NO_LABEL`."""
        hot = self._hot_token_ids
        if hot is None:
            return token_ids
        hot = hot.to(token_ids.device)
        places = torch.searchsorted(hot, token_ids).clamp(max=len(hot) - 1)
        return torch.where(hot[places] == token_ids, places, NO_LABEL)

    def token_ids(self, draft_ids: Tensor) -> Tensor:
        """Return the target's ids of tokens of the draft vocabulary."""
        hot = self._hot_token_ids
        return draft_ids if hot is None else hot.to(draft_ids.device)[draft_ids]


class Objective(nn.Module, ABC):
    """Base class of training objectives: a module that contains a head and computes its loss.

    Args:
        head: The head to train; its own embedding, if it has one, is not trained.
        target: The frozen target.
        recipe: Settings of the objective, a dataclass.

    Attributes:
        layers: Indices of the target's hidden states that `forward` reads. The last is `LAST`, from which the labels
            are computed. Empty if the objective runs the target itself.
        learning_rate_multiplier: Factor on the learning rate of the head's parameters.
        progress: Fraction of the run that is done, 0 to 1; set by the trainer.

    Raises:
        InvalidConfigError: The head has a sliding window.
    """

    layers: tuple[int, ...]
    learning_rate_multiplier: float = 1.0
    progress: float = 0.0

    def __init__(self, head: nn.Module, target: PreTrainedModel, recipe: Any) -> None:
        super().__init__()
        self.head: Any = head
        self.recipe = recipe
        check_full_attention(head)
        own = tuple(getattr(head, "feature_layers", (LAST,)))
        self.layers = own if own[-1] == LAST else (*own, LAST)
        self._num_own = len(own)
        if getattr(self.head.config, "own_embedding", False):
            self.head.embed_tokens.requires_grad_(False)
        self._target = TargetReader(target, head)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the head's inputs: float32, or float64 for float64 weights."""
        return torch.promote_types(next(self.head.parameters()).dtype, torch.float32)

    def split(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return the features that the head reads, in its dtype, and the target's last ones `[..., D]`."""
        size = features.shape[-1] // len(self.layers)
        return features[..., : self._num_own * size].to(self.dtype), features[..., -size:]

    @abstractmethod
    def forward(
        self, input_ids: Tensor, loss_mask: Tensor, lengths: Tensor, features: Tensor, measure: int = 0
    ) -> HeadLoss:
        """Return the loss of right-padded conversations, with counts of correct drafted tokens if requested.

        Args:
            input_ids: `[B, T]`.
            loss_mask: `[B, T]` True at answers.
            lengths: `[B]` number of tokens without padding.
            features: `[B, T, layers * D]` hidden states of the target.
            measure: R, number of top drafted tokens to compare with the target's greedy choice; 0 measures nothing.
        """


def mean_entropy(logits: Tensor, labels: Tensor, weight: float) -> Tensor:
    """Return the weighted mean cross entropy of logits `[M, Vd]` with M labels or distributions; 0 if there are none.

    It is the sum, divided: a mean would be NaN in a batch without trained positions.
    """
    return weight * cross_entropy(logits.float(), labels, reduction="sum") / max(len(logits), 1)


def check_full_attention(head: Any) -> None:
    """Raise `InvalidConfigError` if a head has a sliding window, with which it cannot be trained."""
    windows = head.layer_windows if hasattr(head, "layer_windows") else [getattr(head.config, "sliding_window", None)]
    if any(window is not None for window in windows):
        raise InvalidConfigError(
            "Training attends to the whole context, but this head has a sliding window.",
            "Set sliding_window=None (for a block head, layer_types=None) in its config.",
        )
