"""The EAGLE-3 draft layer: reads low, middle and high features of the target, and has an lm_head of its own.

Source: Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test"
(https://arxiv.org/abs/2503.01840), and its repository where the two differ: the paper's figure joins embedding and
feature by a second linear layer, published weights have query, key and value read both side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

from hf_specdec.errors import DrafterMismatchError, InvalidConfigError
from hf_specdec.heads.attention import Attend, DraftAttention, attend_causally
from hf_specdec.heads.base import EagleFamilyHead
from hf_specdec.heads.eagle import EagleConfig
from hf_specdec.heads.schema import EAGLE3, Rule

PAPER_LAYERS = ("2", "L/2", "L-3")
"""The hidden states that a head reads whose config names none, of a target of L layers."""


class Eagle3Config(EagleConfig):
    """Configuration of an EAGLE-3 head: that of EAGLE, and what differs among published variants.

    Args:
        eagle_aux_hidden_state_layer_ids: Which of the target's hidden states are read, counted as transformers'
            `hidden_states` (0 is the embedding, i the output of layer i-1), ascending. None are the paper's three,
            2, L/2 and L-3 of a target of L layers, found when the head meets its target.
        target_hidden_size: Width of the target's features where it is not `hidden_size`; None is `hidden_size`.
        norm_before_residual: The residual around attention starts from the normed hidden (speculators), not the raw.
        fc_norm: One RMSNorm per captured feature before `fc` (EAGLE-3.1).
        norm_before_fc: One RMSNorm over all captured features before `fc` (speculators); not with `fc_norm`.
        norm_output: What is recycled to the next level is the normed output (speculators), not the raw.
    """

    model_type = "hf_specdec_eagle3"
    rules: ClassVar[Mapping[str, Rule]] = EAGLE3

    bias: bool = False
    eagle_aux_hidden_state_layer_ids: list[int] | None = None
    target_hidden_size: int | None = None
    norm_before_residual: bool = False
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_output: bool = False

    @classmethod
    def for_target(cls, target_config: Any, **overrides: Any) -> Eagle3Config:
        """A head shaped like one decoder layer of the target, reading the paper's three features.

        Args:
            target_config: The target's configuration; its text part is read.
            **overrides: Fields of this class that shall differ.
        """
        depth = getattr(target_config.get_text_config(), "num_hidden_layers", None)
        if depth is None and "eagle_aux_hidden_state_layer_ids" not in overrides:
            raise InvalidConfigError(
                f"{type(target_config).__name__} does not say how many layers the target has.",
                "Give eagle_aux_hidden_state_layer_ids.",
            )
        ids = paper_layers(depth or 0)
        return super().for_target(target_config, **{"eagle_aux_hidden_state_layer_ids": ids, **overrides})


def paper_layers(depth: int) -> list[int]:
    """The hidden states that the authors' code captures of a target of so many layers; fewer where it is tiny.

    Example: 32 layers give 2, 16, 29.
    """
    return sorted({min(2, depth - 1), depth // 2, max(depth - 3, 0)})


class Eagle3Layer(nn.Module):
    """A decoder layer whose attention reads the embedding and the hidden state side by side."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = LlamaRMSNorm(size, eps)
        self.hidden_norm = LlamaRMSNorm(size, eps)
        self.self_attn = DraftAttention(config, 2 * size, bias=config.qkv_bias)
        self.post_attention_layernorm = LlamaRMSNorm(size, eps)
        self.mlp = LlamaMLP(config)

    def forward(self, embeddings: Tensor, hidden: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """Two of `[B, T, D]` to `[B, T, D]`."""
        normed = self.hidden_norm(hidden)
        both = torch.cat([self.input_layernorm(embeddings), normed], dim=-1)
        hidden = (normed if self.norm_before_residual else hidden) + self.self_attn(both, rotary, attend)
        output: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


class Eagle3Head(EagleFamilyHead):
    """`g'[t+1] = midlayer([embed(x[t+1]); g[t]])`, with `g[t] = fc(features[t])` where the target has been.

    `lm_head(norm(g'[t+1]))` scores the token x[t+2]; g' itself takes the place of g one level deeper. Tensor names
    are those of the published checkpoints (`yuhuili/EAGLE3-*`).
    """

    shares_lm_head = False
    config_class = Eagle3Config
    _no_split_modules = ("Eagle3Layer",)

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config)
        ids = config.eagle_aux_hidden_state_layer_ids
        if ids is not None and (not ids or sorted(set(ids)) != list(ids) or ids[0] < 0):
            raise InvalidConfigError(
                f"An EAGLE-3 head needs ascending eagle_aux_hidden_state_layer_ids >= 0, got {ids}.",
                "Eagle3Config.for_target(model.config) fills them in.",
            )
        if config.fc_norm and config.norm_before_fc:
            raise InvalidConfigError("`fc_norm` and `norm_before_fc` exclude each other; both are set.")
        size, read = config.hidden_size, config.target_hidden_size or config.hidden_size
        if read != size and not config.own_embedding:
            raise InvalidConfigError(
                f"An EAGLE-3 head of hidden_size {size} for a target of {read} needs its own embedding.",
                "Set own_embedding=True.",
            )
        count = len(ids or PAPER_LAYERS)
        width = count * read
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(LlamaRMSNorm(read, config.rms_norm_eps) for _ in range(count))
        if config.norm_before_fc:
            self.input_norm = LlamaRMSNorm(width, config.rms_norm_eps)
        self.fc = nn.Linear(width, size, bias=config.bias)
        self.midlayer = Eagle3Layer(config)
        self.norm = LlamaRMSNorm(size, config.rms_norm_eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size or config.vocab_size, bias=False)
        self._make_embedding()
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self._make_hot_tokens()
        self.post_init()

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Which of the target's hidden states it reads."""
        if self.config.eagle_aux_hidden_state_layer_ids is None:
            raise InvalidConfigError(
                "This EAGLE-3 head does not say which layers it reads.",
                "Call head.resolve_feature_layers(target's depth).",
            )
        return tuple(self.config.eagle_aux_hidden_state_layer_ids)

    def resolve_feature_layers(self, depth: int) -> None:
        """Settle for the paper's layers of a target so deep, where the config names none.

        Raises:
            DrafterMismatchError: The target is not deep enough for three.
        """
        if self.config.eagle_aux_hidden_state_layer_ids is not None:
            return
        ids = paper_layers(depth)
        if len(ids) != len(PAPER_LAYERS):
            raise DrafterMismatchError(
                f"This EAGLE-3 head reads {len(PAPER_LAYERS)} layers and names none; a target of {depth} layers has "
                f"{ids} to offer.",
                "Set eagle_aux_hidden_state_layer_ids in its config.",
            )
        self.config.eagle_aux_hidden_state_layer_ids = ids

    def fuse(self, features: Tensor) -> Tensor:
        """Captured features `[..., layers * Dt]` of the target to hidden states `[..., D]` of this head."""
        if self.config.fc_norm:
            chunks = features.chunk(len(self.fc_norm), dim=-1)
            features = torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], dim=-1)
        if self.config.norm_before_fc:
            features = self.input_norm(features)
        hidden: Tensor = self.fc(features)
        return hidden

    def forward(
        self,
        token_embeddings: Tensor,
        hidden: Tensor,
        position_ids: Tensor,
        attend: Attend = attend_causally,
    ) -> Tensor:
        """Predict the next hidden states.

        Args:
            token_embeddings: `[B, T, D]` the target's embeddings of x[t+1].
            hidden: `[B, T, D]` what `fuse` made of the target's features of x[t], or, below the first level, the
                head's own output there.
            position_ids: `[B, T]` the positions t.
            attend: How the layer attends, see `heads/attention.py`.

        Returns:
            `[B, T, D]`.
        """
        output: Tensor = self.midlayer(token_embeddings, hidden, self.rotary_emb(hidden, position_ids), attend)
        return self.norm(output) if self.config.norm_output else output

    def score(self, hidden: Tensor, lm_head: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Logits `[..., Vd]` of the tokens after `hidden [..., D]`, by the head's own lm_head."""
        logits: Tensor = self.lm_head(hidden if self.config.norm_output else self.norm(hidden))
        return logits
