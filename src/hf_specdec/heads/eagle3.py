"""The EAGLE-3 draft layer, which reads low, middle and high hidden states of the target and has its own lm_head.

Source: Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test"
(https://arxiv.org/abs/2503.01840). The published weights differ from the paper's figure: query, key and value read
the concatenation of embedding and hidden state, without a second linear layer.
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
"""Hidden states that a head reads if its config names none, for a target with L layers."""


class Eagle3Config(EagleConfig):
    """Configuration of an EAGLE-3 head: that of EAGLE, with the differences between published variants.

    Args:
        eagle_aux_hidden_state_layer_ids: Ascending indices of the target's `hidden_states` that are read (0 is the
            embedding, i the output of layer i-1); None for the paper's 2, L/2 and L-3, resolved when the head is
            loaded for a target with L layers.
        target_hidden_size: Hidden size of the target; None if it is `hidden_size`.
        norm_before_residual: Whether the residual around attention is the normalized hidden state (speculators).
        fc_norm: Whether each hidden state has an RMSNorm before `fc` (EAGLE-3.1).
        norm_before_fc: Whether one RMSNorm over all hidden states precedes `fc` (speculators); excludes `fc_norm`.
        norm_output: Whether the next level reads the normalized output (speculators).
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
        """Return the config of a head with the sizes of the target's decoder layers and the paper's feature layers.

        Args:
            target_config: Config of the target; its text part is used.
            **overrides: Fields that do not follow the target or the paper.

        Raises:
            InvalidConfigError: As for `EagleConfig.for_target`, or the target's number of layers is unknown.
        """
        depth = getattr(target_config.get_text_config(), "num_hidden_layers", None)
        if depth is None and "eagle_aux_hidden_state_layer_ids" not in overrides:
            raise InvalidConfigError(
                f"{type(target_config).__name__} has no num_hidden_layers.",
                "Pass eagle_aux_hidden_state_layer_ids.",
            )
        ids = paper_layers(depth or 0)
        return super().for_target(target_config, **{"eagle_aux_hidden_state_layer_ids": ids, **overrides})


def paper_layers(depth: int) -> list[int]:
    """Return the indices of the hidden states that the authors' code reads; fewer if `depth` layers are too few.

    Example: `paper_layers(32)` is `[2, 16, 29]`.
    """
    return sorted({min(2, depth - 1), depth // 2, max(depth - 3, 0)})


class Eagle3Layer(nn.Module):
    """A decoder layer whose attention reads the concatenation of embedding and hidden state."""

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
        """Map embeddings and hidden states `[B, T, D]` to hidden states `[B, T, D]`."""
        normed = self.hidden_norm(hidden)
        both = torch.cat([self.input_layernorm(embeddings), normed], dim=-1)
        hidden = (normed if self.norm_before_residual else hidden) + self.self_attn(both, rotary, attend)
        output: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


class Eagle3Head(EagleFamilyHead):
    """`g'[t+1] = midlayer([embed(x[t+1]); g[t]])`, with `g[t] = fc(features[t])` for verified tokens.

    `lm_head(norm(g'[t+1]))` scores the token x[t+2]; the next level uses g' instead of g. Tensor names are those of
    the published checkpoints (`yuhuili/EAGLE3-*`).
    """

    shares_lm_head = False
    config_class = Eagle3Config
    _no_split_modules = ("Eagle3Layer",)

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config)
        ids = config.eagle_aux_hidden_state_layer_ids
        if ids is not None and (not ids or sorted(set(ids)) != list(ids) or ids[0] < 0):
            raise InvalidConfigError(
                f"`eagle_aux_hidden_state_layer_ids` must be ascending indices >= 0, got {ids}.",
                "Eagle3Config.for_target(model.config) sets them.",
            )
        if config.fc_norm and config.norm_before_fc:
            raise InvalidConfigError("`fc_norm` and `norm_before_fc` exclude each other; both are set.")
        size, target_size = config.hidden_size, config.target_hidden_size or config.hidden_size
        if target_size != size and not config.own_embedding:
            raise InvalidConfigError(
                f"A head with hidden_size {size} for a target with hidden_size {target_size} needs its own embedding.",
                "Set own_embedding=True.",
            )
        count = len(ids or PAPER_LAYERS)
        width = count * target_size
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(LlamaRMSNorm(target_size, config.rms_norm_eps) for _ in range(count))
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
        """See `EagleFamilyHead`; raises `InvalidConfigError` while they are unknown."""
        if self.config.eagle_aux_hidden_state_layer_ids is None:
            raise InvalidConfigError(
                "The layers that this EAGLE-3 head reads are not known yet.",
                "Call head.resolve_feature_layers(num_hidden_layers of the target).",
            )
        return tuple(self.config.eagle_aux_hidden_state_layer_ids)

    def resolve_feature_layers(self, depth: int) -> None:
        """Use the paper's layers for a target with `depth` layers, if the config names none.

        Raises:
            DrafterMismatchError: The target has too few layers for three different ones.
        """
        if self.config.eagle_aux_hidden_state_layer_ids is not None:
            return
        ids = paper_layers(depth)
        if len(ids) != len(PAPER_LAYERS):
            raise DrafterMismatchError(
                f"This EAGLE-3 head's config names no layers, and a target with {depth} layers has too few for the "
                f"default of {len(PAPER_LAYERS)} different ones: {ids}.",
                "Set eagle_aux_hidden_state_layer_ids in its config.",
            )
        self.config.eagle_aux_hidden_state_layer_ids = ids

    def fuse(self, features: Tensor) -> Tensor:
        """Map the target's features `[..., layers * Dt]` to hidden states `[..., D]` of this head."""
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
            token_embeddings: `[B, T, D]` embeddings of x[t+1].
            hidden: `[B, T, D]` output of `fuse` for x[t], or the head's output for t below the first level.
            position_ids: `[B, T]` positions t.
            attend: Attention function, see `heads/attention.py`.

        Returns:
            `[B, T, D]`.
        """
        output: Tensor = self.midlayer(token_embeddings, hidden, self.rotary_emb(hidden, position_ids), attend)
        return self.norm(output) if self.config.norm_output else output

    def score(self, hidden: Tensor, lm_head: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Return the logits `[..., Vd]` for the head's output `[..., D]`; uses the head's own lm_head."""
        logits: Tensor = self.lm_head(hidden if self.config.norm_output else self.norm(hidden))
        return logits
