"""Medusa heads: from the target's hidden state at t, head k (counted from 0) predicts the token at t + 2 + k.

Source: Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads"
(https://arxiv.org/abs/2401.10774), section 2.1.1.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from hf_specdec.errors import InvalidConfigError
from hf_specdec.heads.head import CheckedConfig, DraftHead, portable_name
from hf_specdec.heads.schema import MEDUSA, checked
from hf_specdec.transformers_private import model_name
from hf_specdec.validation import Rule, check_known


class MedusaConfig(CheckedConfig, PreTrainedConfig):
    """Configuration of Medusa heads.

    Args:
        hidden_size: Hidden size D of the target.
        vocab_size: Vocabulary size V of the target; None (only if the lm_head is shared) until a target is known.
        medusa_num_heads: Number K of heads, which is the maximum depth of a tree.
        medusa_num_layers: Residual blocks per head; their weights are not tied.
        shared_lm_head: Whether the target's lm_head is used; otherwise every head has its own, without bias.
        draft_vocab_size: Size Vd of the draft vocabulary; None for the target's whole vocabulary.
        base_model_name_or_path: The target that these heads were trained for.
        num_draft_tokens: Default number of nodes verified per step, root included.
        tree: A list of paths of child ranks; None for the paper's tree.
        recipe: Training settings, for the model card.
        tau: Measured tokens per target forward, by data set, for the model card.
    """

    model_type = "hf_specdec_medusa"
    rules: ClassVar[Mapping[str, Rule]] = MEDUSA

    def __init__(
        self,
        hidden_size: int = 4096,
        vocab_size: int | None = 32000,
        medusa_num_heads: int = 4,
        medusa_num_layers: int = 1,
        shared_lm_head: bool = True,
        draft_vocab_size: int | None = None,
        base_model_name_or_path: str | None = None,
        num_draft_tokens: int | None = None,
        tree: list[Any] | None = None,
        recipe: dict[str, Any] | None = None,
        tau: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.hidden_size, self.vocab_size = hidden_size, vocab_size
        self.medusa_num_heads, self.medusa_num_layers = medusa_num_heads, medusa_num_layers
        self.shared_lm_head, self.draft_vocab_size = shared_lm_head, draft_vocab_size
        self.base_model_name_or_path = base_model_name_or_path
        self.num_draft_tokens, self.tree = num_draft_tokens, tree
        self.recipe, self.tau = recipe, tau
        super().__init__(**kwargs)

    @classmethod
    def for_target(cls, target_config: Any, **overrides: Any) -> MedusaConfig:
        """Return the config of heads for a target.

        Args:
            target_config: Config of the target; its text part is used.
            **overrides: Fields that do not follow the target.

        Raises:
            InvalidConfigError: A field is unknown or a value is invalid.
        """
        check_known(cls.__name__, overrides, list(inspect.signature(cls).parameters)[:-1])
        checked(overrides, cls.rules)
        text = target_config.get_text_config()
        fields = {
            "hidden_size": text.hidden_size,
            "vocab_size": text.vocab_size,
            "base_model_name_or_path": portable_name(model_name(target_config)),
        }
        return cls(**{**fields, **overrides})


class ResidualBlock(nn.Module):
    """A residual block `x + SiLU(W x + b)`; W and b are initialized to zero, so that the block is the identity."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map `[..., D]` to `[..., D]`."""
        return hidden + nn.functional.silu(self.linear(hidden))


class MedusaHeads(DraftHead):
    """K heads; head k (from 0) predicts x[t+2+k] from the target's hidden state at t after its final norm.

    Tensors: `heads.{k}.{l}.linear.weight [D, D]` and `.bias [D]` for residual block l; without a shared lm_head also
    `heads.{k}.{L}.weight [Vd, D]`, where L is the number of blocks.

    Raises:
        InvalidConfigError: A number of heads, blocks or tokens is invalid, or `vocab_size` is unknown but needed.
    """

    method = "medusa"
    config_class = MedusaConfig

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__(config)
        if min(config.medusa_num_heads, config.medusa_num_layers) < 1:
            raise InvalidConfigError(
                f"`medusa_num_heads` and `medusa_num_layers` must be at least 1, got {config.medusa_num_heads} and "
                f"{config.medusa_num_layers}."
            )
        self.shares_lm_head = config.shared_lm_head
        size = config.draft_vocab_size or config.vocab_size or 0
        if not size and not config.shared_lm_head:
            raise InvalidConfigError("`vocab_size` must be set if `shared_lm_head` is False.")
        heads = []
        for _ in range(config.medusa_num_heads):
            head = nn.ModuleList(ResidualBlock(config.hidden_size) for _ in range(config.medusa_num_layers))
            if not config.shared_lm_head:
                head.append(nn.Linear(config.hidden_size, size, bias=False))
            heads.append(head)
        self.heads = nn.ModuleList(heads)
        self._make_hot_tokens()
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Keep the constructors' initialization (identity blocks); `start_from` sets the lm_heads."""

    def start_from(self, lm_head: nn.Module) -> None:
        """Initialize the heads' lm_heads with the target's (its rows of the draft vocabulary); nothing if shared."""
        if not self.config.shared_lm_head:
            rows = self.rows_of(lm_head)
            for head in self.heads:
                list(head.children())[-1].load_state_dict({"weight": rows})

    def num_forwards(self, num_steps: int) -> int:
        """Return 1: all heads run in one forward."""
        return 1

    def draft_logits(self, features: Tensor, position: int, lm_head: nn.Module | None) -> Tensor:
        """See `DraftHead`; returns `[K, B, 1, Vd]`."""
        return self(features, lm_head)

    def forward(self, features: Tensor, lm_head: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Return the logits `[K, ..., Vd]` of every head, given hidden states of the target.

        Args:
            features: `[..., D]` hidden states.
            lm_head: The target's lm_head over the draft vocabulary, if it is shared.

        Raises:
            ValueError: The target's lm_head is shared, but `lm_head` is None.
        """
        logits = []
        for head in self.heads:
            parts, hidden = list(head.children()), features
            for block in parts[: self.config.medusa_num_layers]:
                hidden = block(hidden)
            score = lm_head if self.config.shared_lm_head else parts[-1]
            if score is None:
                raise ValueError("These heads share the target's lm_head: pass it.")
            logits.append(score(hidden))
        return torch.stack(logits)
