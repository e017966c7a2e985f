"""The EAGLE draft layer: one decoder layer that predicts the target's next hidden state from the current one.

Source: Li et al., "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty" (ICML 2024,
https://arxiv.org/abs/2401.15077); EAGLE-2 (https://arxiv.org/abs/2406.16858) uses the same weights.

`drafters/eagle.py` and `training/eagle_objective.py` call the same `forward`, which maps embeddings and hidden states
("features" in the paper) to hidden states. EAGLE-3 (`heads/eagle3.py`) has the same methods.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from hf_specdec.errors import InvalidConfigError
from hf_specdec.heads.attention import Attend, DraftAttention, attend_causally
from hf_specdec.heads.head import CheckedConfig, EagleFamilyHead, portable_name
from hf_specdec.heads.schema import EAGLE, ROPE, ROTARY, checked
from hf_specdec.transformers_private import model_name
from hf_specdec.validation import Rule, check_known


class EagleConfig(CheckedConfig, LlamaConfig):
    """Configuration of an EAGLE-1/2 head: a one-layer Llama configuration with additional fields.

    The fields of transformers' `LlamaConfig` (`hidden_size`, `intermediate_size`, `vocab_size`, ...) have its
    defaults; `for_target` sets them as in the target.

    Args:
        bias: Whether `fc` has a bias; True if a published config lacks the key.
        qkv_bias: Whether the query, key and value projections have a bias; `attention_bias` also covers the
            output projection.
        qk_norm: Whether queries and keys are normalized, as in Qwen3.
        layernorms: Whether there are norms of the embedding, before attention and before the lm_head (speculators'
            HASS heads).
        own_embedding: Whether the head has its own token embedding; otherwise it uses the target's.
        sliding_window: Number of positions that the layer attends to, the current one included; None for all.
        draft_vocab_size: Size Vd of the draft vocabulary, whose ids are in the buffer `d2t` (FR-Spec,
            https://arxiv.org/abs/2502.14856); None for the target's whole vocabulary.
        trained_length: Tokens of the longest text that the head was trained on, the default of
            `SpeculativeConfig.draft_window`; None if unknown.
        base_model_name_or_path: The target that this head was trained for.
        num_steps: Default draft depth; None for the drafter's default.
        top_k: Default number of children per expanded node.
        num_draft_tokens: Default number of nodes verified per step, root included.
        tree: `"dynamic"`, or a static tree as a list of paths of child ranks.
        recipe: Training settings, for the model card.
        tau: Measured tokens per target forward, by data set, for the model card.
        num_hidden_layers: Number of decoder layers; must be 1, except in EAGLE-3.
    """

    model_type = "hf_specdec_eagle"
    rules: ClassVar[Mapping[str, Rule]] = EAGLE

    bias: bool = True
    qkv_bias: bool = False
    qk_norm: bool = False
    layernorms: bool = False
    own_embedding: bool = False
    sliding_window: int | None = None
    draft_vocab_size: int | None = None
    trained_length: int | None = None
    base_model_name_or_path: str | None = None
    num_steps: int | None = None
    top_k: int | None = None
    num_draft_tokens: int | None = None
    tree: str | list[Any] = "dynamic"
    recipe: dict[str, Any] | None = None
    tau: dict[str, Any] | None = None
    num_hidden_layers: int = 1

    @classmethod
    def for_target(cls, target_config: Any, **overrides: Any) -> EagleConfig:
        """Return the config of a head with the sizes of the target's decoder layers, as in the paper.

        Args:
            target_config: Config of the target; its text part is used.
            **overrides: Fields that do not follow the target, e.g. `intermediate_size=2048`.

        Raises:
            InvalidConfigError: A field is unknown, a value is invalid, or a size is in neither the target's config
                (e.g. the number of attention heads of a state-space model) nor `overrides`.
        """
        general = {field.name for field in dataclasses.fields(PreTrainedConfig)}
        own = [field.name for field in dataclasses.fields(cls) if field.name not in general]
        check_known(cls.__name__, overrides, own)
        checked(overrides, cls.rules)
        text = target_config.get_text_config()
        shared = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
                  "max_position_embeddings", "rms_norm_eps")  # fmt: skip
        found = {name: _of_last_layer(text, name) for name in shared}
        fields = {name: value for name, value in found.items() if value is not None}
        fields = {**fields, "rope_parameters": _rotary_of(text), **overrides}
        if "hidden_size" in fields:  # models without this field (e.g. GPT-2) have this size
            fields.setdefault("intermediate_size", 4 * fields["hidden_size"])
        missing = [name for name in shared[:4] if name not in fields]
        if missing:
            raise InvalidConfigError(
                f"{type(text).__name__} has no {', '.join(missing)}, which a draft layer needs.",
                f"Pass {'it' if len(missing) == 1 else 'them'}: {cls.__name__}.for_target(config, {missing[0]}=...).",
            )
        for name in shared[:5]:
            if name in fields and (not isinstance(fields[name], int) or fields[name] < 1):
                raise InvalidConfigError(f"`{name}` must be an integer >= 1, got {fields[name]!r}.")
        # not the target's head_dim: EAGLE's published layout has no such field and assumes hidden_size / heads
        fields.setdefault("head_dim", fields["hidden_size"] // fields["num_attention_heads"])
        fields.setdefault("base_model_name_or_path", portable_name(model_name(target_config)))
        return cls(**{name: value for name, value in fields.items() if value is not None or name in overrides})


def _of_last_layer(text_config: Any, name: str) -> Any:
    """Return a field of a config, or its value for the last layer if layers differ; None if missing."""
    varying = getattr(text_config, "per_layer_attributes", None) or ()
    if name in varying:
        text_config = text_config.per_layer_config[text_config.num_hidden_layers - 1]
    value = getattr(text_config, name, None)
    return value[-1] if isinstance(value, list | tuple) and value else value


def _rotary_of(text_config: Any) -> dict[str, Any] | None:
    """Return the target's rotary settings; those of full attention if they differ by layer type.

    None if there are none, or if draft layers do not support them (e.g. partial rotation). Fields that draft layers
    do not have, such as `mrope_section`, are dropped.
    """
    settings = getattr(text_config, "rope_parameters", None) or {}
    nested = [value for value in settings.values() if isinstance(value, dict)]
    if nested:
        settings = settings.get("full_attention") or nested[0]
    settings = {name: value for name, value in settings.items() if name in ROTARY and value is not None}
    return settings if settings and ROPE.holds(settings) else None


def check_single_layer(config: EagleConfig) -> None:
    """Raise `InvalidConfigError` if a config asks for several layers; only EAGLE-3 heads can have them."""
    if config.num_hidden_layers != 1:
        raise InvalidConfigError(f"`num_hidden_layers` must be 1, got {config.num_hidden_layers}.")


def check_mask_token(config: Any) -> None:
    """Raise `InvalidConfigError` if a config's mask token has no embedding."""
    if not 0 <= config.mask_token_id < config.vocab_size:
        raise InvalidConfigError(
            f"`mask_token_id` {config.mask_token_id} is outside the vocabulary of {config.vocab_size} tokens."
        )


class EagleLayer(nn.Module):
    """A Llama decoder layer, in which the norm before attention is optional.

    Args:
        config: Sizes of the layer.
        norm_input: Whether to normalize the input of attention; False for the EAGLE-1/2 authors' checkpoints.
    """

    def __init__(self, config: EagleConfig, norm_input: bool) -> None:
        super().__init__()
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps) if norm_input else nn.Identity()
        self.self_attn = DraftAttention(config, config.hidden_size, bias=config.qkv_bias)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = LlamaMLP(config)

    def forward(self, hidden: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """Map `[B, T, D]` to `[B, T, D]`."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotary, attend)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class EagleHead(EagleFamilyHead):
    """An EAGLE-1/2 head: `f'[t+1] = layer(fc([embed(x[t+1]); f[t]]))`.

    f are the target's hidden states after its final norm. `lm_head(f'[t+1])`, with the target's lm_head, scores the
    token x[t+2]; the next level uses f' instead of f. With `layernorms`, the embedding, the layer's input and the
    input of the lm_head (but not of the next level) are normalized. Tensor names are those of the published
    checkpoints (`yuhuili/EAGLE-*`).

    Raises:
        InvalidConfigError: A size in the config is invalid, or `num_hidden_layers` is not 1.
    """

    config_class = EagleConfig
    _no_split_modules = ("EagleLayer",)

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config)
        check_single_layer(config)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.bias)
        self.layers = nn.ModuleList([EagleLayer(config, norm_input=config.layernorms)])
        if config.layernorms:
            self.embedding_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
            self.pre_lm_head_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self._add_common_parts()

    def forward(
        self, token_embeddings: Tensor, hidden: Tensor, position_ids: Tensor, attend: Attend = attend_causally
    ) -> Tensor:
        """See `EagleFamilyHead.forward`."""
        if self.config.layernorms:
            token_embeddings = self.embedding_layernorm(token_embeddings)
        mixed = self.fc(torch.cat([token_embeddings, hidden], dim=-1))
        return self.layers[0](mixed, self.rotary_emb(mixed, position_ids), attend)

    def score(self, hidden: Tensor, lm_head: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """See `FeatureHead.score`."""
        return super().score(self.pre_lm_head_layernorm(hidden) if self.config.layernorms else hidden, lm_head)
