"""The EAGLE draft layer: one decoder layer that predicts the target's next feature from the last one.

Source: Li et al., "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty" (ICML 2024,
https://arxiv.org/abs/2401.15077); EAGLE-2 (https://arxiv.org/abs/2406.16858) uses the same weights.

It knows neither trees nor the target: embeddings and features come in, features go out. The drafter
(`drafters/eagle.py`) grows trees with it, `training/eagle.py` trains it; both call the same `forward`. EAGLE-3 answers
to the same methods (`heads/eagle3.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

from hf_specdec.config import check_names
from hf_specdec.errors import InvalidConfigError
from hf_specdec.heads.attention import Attend, DraftAttention, attend_causally
from hf_specdec.heads.base import CheckedConfig, EagleFamilyHead, portable_name
from hf_specdec.heads.schema import EAGLE, ROPE, ROTARY, Rule, checked


class EagleConfig(CheckedConfig, LlamaConfig):
    """Configuration of an EAGLE-1/2 head: a one-layer Llama configuration and what is EAGLE's own.

    Args:
        bias: Whether `fc` has a bias. Published configs that lack the key have one.
        qkv_bias: Whether the query, key and value projections have a bias; `attention_bias` gives the output one too.
        qk_norm: Whether queries and keys are normed (draft layers of Qwen3).
        layernorms: Norms of the embedding, before attention and before the lm_head (speculators' HASS heads).
        own_embedding: The head brings token embeddings; else it reads the target's.
        sliding_window: Positions that the layer looks back, its own included; None is all.
        draft_vocab_size: Size Vd of the hot-token vocabulary; None drafts over the target's whole vocabulary.
            The ids are in the head's `d2t` buffer (FR-Spec, https://arxiv.org/abs/2502.14856).
        base_model_name_or_path: The target this head was trained for.
        num_steps: Default drafted depth; None leaves it to the drafter.
        top_k: Default branching per expanded node.
        num_draft_tokens: Default number of verified nodes per step, root included.
        tree: `"dynamic"` or a list of choice paths.
        recipe: How it was trained, for its model card.
        tau: Tokens per target forward that it reached, by what was measured, for its model card.
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
        """A head shaped like one decoder layer of the target (the paper's choice).

        Args:
            target_config: The target's configuration; its text part is read.
            **overrides: Fields of this class that shall differ, e.g. `intermediate_size`.

        Raises:
            InvalidConfigError: Fields that this class has not, values that mean nothing, or sizes that the target has
                not (a state-space model knows no attention heads) and that are not given.
        """
        general = {field.name for field in dataclasses.fields(PreTrainedConfig)}
        own = [field.name for field in dataclasses.fields(cls) if field.name not in general]
        check_names(cls.__name__, overrides, own)
        checked(overrides, cls.rules)
        text = target_config.get_text_config()
        shared = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
                  "max_position_embeddings", "rms_norm_eps")  # fmt: skip
        found = {name: _of_last_layer(text, name) for name in shared}
        fields = {name: value for name, value in found.items() if value is not None}
        fields = {**fields, "rope_parameters": _rotary_of(text), **overrides}
        if "hidden_size" in fields:  # what models that do not say it have
            fields.setdefault("intermediate_size", 4 * fields["hidden_size"])
        missing = [name for name in shared[:4] if name not in fields]
        if missing:
            raise InvalidConfigError(
                f"{type(text).__name__} has no {', '.join(missing)} that a draft layer could be shaped by.",
                f"Give {'it' if len(missing) == 1 else 'them'}: {cls.__name__}.for_target(config, {missing[0]}=...).",
            )
        for name in shared[:5]:
            if name in fields and (not isinstance(fields[name], int) or fields[name] < 1):
                raise InvalidConfigError(f"`{name}` must be an integer >= 1, got {fields[name]!r}.")
        # heads whose size is not hidden / heads cannot be stored in the published layout: EAGLE ignores head_dim
        fields.setdefault("head_dim", fields["hidden_size"] // fields["num_attention_heads"])
        fields.setdefault("base_model_name_or_path", portable_name(getattr(target_config, "_name_or_path", None)))
        return cls(**{name: value for name, value in fields.items() if value is not None or name in overrides})


def _of_last_layer(text_config: Any, name: str) -> Any:
    """A field of the configuration, of the last layer where layers differ; None where there is none."""
    varying = getattr(text_config, "per_layer_attributes", None) or ()
    if name in varying:
        text_config = text_config.per_layer_config[text_config.num_hidden_layers - 1]
    value = getattr(text_config, name, None)
    return value[-1] if isinstance(value, list | tuple) and value else value


def _rotary_of(text_config: Any) -> dict[str, Any] | None:
    """The target's rotary settings; of a hybrid target, which has some per kind of layer, those of full attention.

    None where it has none, or of a kind that depends on sizes of its own (sections of images, parts of a head).
    """
    settings = getattr(text_config, "rope_parameters", None) or {}
    nested = [value for value in settings.values() if isinstance(value, dict)]
    if nested:
        settings = settings.get("full_attention") or nested[0]
    settings = {name: value for name, value in settings.items() if name in ROTARY and value is not None}
    return settings if settings and ROPE.holds(settings) else None


class EagleLayer(nn.Module):
    """A Llama decoder layer, in EAGLE's own checkpoints without the input norm; tensor names are Llama's."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.input_layernorm = (
            LlamaRMSNorm(config.hidden_size, config.rms_norm_eps) if config.layernorms else nn.Identity()
        )
        self.self_attn = DraftAttention(config, config.hidden_size, bias=config.qkv_bias)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = LlamaMLP(config)

    def forward(self, hidden: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """`[B, T, D]` to `[B, T, D]`."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotary, attend)
        output: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


class EagleHead(EagleFamilyHead):
    """`f'[t+1] = layer(fc([embed(x[t+1]); f[t]]))`, with f the target's post-final-norm features.

    The embedding comes first in the concatenation, the layer has no input norm and its output is used raw:
    `lm_head(f'[t+1])`, with the target's own lm_head, scores the token x[t+2]. With `layernorms` there are norms at
    these three places; what goes one level deeper is the output before the last of them.

    Tensor names are those of the published checkpoints (`yuhuili/EAGLE-*`).
    """

    shares_lm_head = True
    config_class = EagleConfig
    _no_split_modules = ("EagleLayer",)

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.bias)
        self.layers = nn.ModuleList([EagleLayer(config)])
        if config.layernorms:
            self.embedding_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
            self.pre_lm_head_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self._make_embedding()
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self._make_hot_tokens()
        self.post_init()

    def forward(
        self,
        token_embeddings: Tensor,
        hidden: Tensor,
        position_ids: Tensor,
        attend: Attend = attend_causally,
    ) -> Tensor:
        """Predict the next features.

        Args:
            token_embeddings: `[B, T, D]` the target's embeddings of x[t+1].
            hidden: `[B, T, D]` what `fuse` made of the target's features f[t], or, below the first level, the
                head's own output there.
            position_ids: `[B, T]` the positions t of the features.
            attend: How the layer attends, see `heads/attention.py`.

        Returns:
            `[B, T, D]` predicted features f[t+1].
        """
        if self.config.layernorms:
            token_embeddings = self.embedding_layernorm(token_embeddings)
        mixed = self.fc(torch.cat([token_embeddings, hidden], dim=-1))
        output: Tensor = self.layers[0](mixed, self.rotary_emb(mixed, position_ids), attend)
        return output

    def score(self, hidden: Tensor, lm_head: Callable[[Tensor], Tensor] | None) -> Tensor:
        """Logits `[..., Vd]` of the tokens after `hidden [..., D]`.

        Args:
            hidden: The head's output.
            lm_head: The target's, over the draft vocabulary.
        """
        if lm_head is None:
            raise ValueError("this head shares the target's lm_head: pass it")
        logits: Tensor = lm_head(self.pre_lm_head_layernorm(hidden) if self.config.layernorms else hidden)
        return logits
