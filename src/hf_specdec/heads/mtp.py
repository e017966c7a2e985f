"""MTP modules: one decoder layer on the target's last hidden state, with norms of both inputs.

Source: DeepSeek-AI, "DeepSeek-V3 Technical Report" (https://arxiv.org/abs/2412.19437), section 2.2, multi-token
prediction. One module is applied repeatedly to its own output, as in training by "FastMTP" (Cai et al.,
https://arxiv.org/abs/2509.18362) and in inference engines. `NativeMtp` are the target's own
modules, one or several, with its architecture.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel
from transformers.modeling_layers import MtpModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from hf_specdec.errors import DrafterMismatchError, InvalidConfigError, UnsupportedModelError
from hf_specdec.heads.attention import Attend, attend_causally
from hf_specdec.heads.eagle import EagleConfig, EagleLayer, check_single_layer
from hf_specdec.heads.head import EagleFamilyHead, lm_head_device
from hf_specdec.heads.schema import MTP
from hf_specdec.transformers_private import attention_name, unexpected_keys
from hf_specdec.validation import Rule
from hf_specdec.verification.cache import TreeCache
from hf_specdec.verification.device_attention import Mask
from hf_specdec.verification.features import LAST
from hf_specdec.verification.model import CACHE_FIELD, text_config


class MtpConfig(EagleConfig):
    """Configuration of an MTP module: the fields of `EagleConfig`, with these other defaults.

    Args:
        bias: Whether `eh_proj` has a bias; published modules have none.
        layernorms: Must be True.
    """

    model_type = "hf_specdec_mtp"
    rules: ClassVar[Mapping[str, Rule]] = MTP

    bias: bool = False
    layernorms: bool = True


class MtpHead(EagleFamilyHead):
    """An MTP module: `h'[t+1] = norm(layer(eh_proj([enorm(embed(x[t+1])); hnorm(h[t])])))`.

    h are the target's hidden states after its final norm. `lm_head(h'[t+1])`, with the target's lm_head, scores the
    token x[t+2]; the next level uses h' instead of h. Tensor names are those of DeepSeek's checkpoints.

    Raises:
        InvalidConfigError: A size is invalid, `num_hidden_layers` is not 1, or `layernorms` is False.
    """

    method = "mtp"
    config_class = MtpConfig
    _no_split_modules = ("EagleLayer",)

    def __init__(self, config: MtpConfig) -> None:
        super().__init__(config)
        check_single_layer(config)
        if not config.layernorms:
            raise InvalidConfigError(
                "An MTP module normalizes its inputs and its output, got layernorms=False.", "Use EagleHead instead."
            )
        size, eps = config.hidden_size, config.rms_norm_eps
        self.enorm = LlamaRMSNorm(size, eps)
        self.hnorm = LlamaRMSNorm(size, eps)
        self.eh_proj = nn.Linear(2 * size, size, bias=config.bias)
        self.layers = nn.ModuleList([EagleLayer(config, norm_input=True)])
        self.norm = LlamaRMSNorm(size, eps)
        self._add_common_parts()

    def forward(
        self, token_embeddings: Tensor, hidden: Tensor, position_ids: Tensor, attend: Attend = attend_causally
    ) -> Tensor:
        """See `EagleFamilyHead.forward`; the output is normalized."""
        mixed = self.eh_proj(torch.cat([self.enorm(token_embeddings), self.hnorm(hidden)], dim=-1))
        return self.norm(self.layers[0](mixed, self.rotary_emb(mixed, position_ids), attend))


ALTERNATIVES = "Load an MTP module that was trained for it (model.load_drafter(...)), or choose another method."


@dataclass(frozen=True, slots=True)
class NativeMtpConfig:
    """The fields of a draft layer's config that drafters use."""

    num_layers: int  # number of modules; module k (from 0) drafts x[t+2+k]
    hidden_size: int
    vocab_size: int
    sliding_window: int | None
    num_steps: int | None  # number of modules; None (the drafter's default) if there is only one, which is repeated
    tree: str = "dynamic"
    top_k: None = None
    num_draft_tokens: None = None
    draft_vocab_size: None = None


class NativeMtp:
    """The MTP modules in a model's own checkpoint, which transformers builds, loads and runs.

    The constructor reads the config only, `bind` loads the weights. The inputs are as in transformers' `MtpModel` and
    `MTPCandidateGenerator`: the target's hidden states after its final norm, and positions that increase by one per
    module.

    Args:
        model: The target, loaded from a checkpoint with MTP modules.
    """

    shares_lm_head = True
    hot_token_ids: Tensor | None = None
    feature_layers = (LAST,)
    needs_masks = True

    def __init__(self, model: PreTrainedModel) -> None:
        self.config, self.where = _config_of(model), model.config.name_or_path
        self._modules: Any = None

    @property
    def device(self) -> torch.device:
        """Device of the modules."""
        return self._modules.layers[0].eh_proj.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the modules' weights."""
        return self._modules.layers[0].eh_proj.weight.dtype

    def bind(self, model: PreTrainedModel) -> None:
        """Load the modules unless they are loaded; convert them to the model's dtype and its lm_head's device.

        They share the model's embedding and lm_head.
        """
        source = model.config.name_or_path
        if source != self.where or _config_of(model) != self.config:
            raise DrafterMismatchError(
                f"These MTP modules belong to {self.where}, but this model is {source or 'another one'}.",
                "Create new ones with MtpDrafter.native(model).",
            )
        device = lm_head_device(model, "its MTP modules")
        if self._modules is None:
            self._modules = _load(model, device)
        self._modules.tie_with_main_model(model)
        for name in ("layers", "shared_post_norm"):  # the rest (embedding, lm_head, rotary positions) is the model's
            part = getattr(self._modules, name, None)
            if part is not None:
                part.eval().requires_grad_(False).to(device)
                if self.dtype != model.dtype:
                    part.to(model.dtype)

    def new_cache(self, reserve: int) -> TreeCache:
        """See `EagleFamilyHead`; the cache has one layer per module."""
        return TreeCache([None] * self.config.num_layers, capacity=0, reserve=reserve)

    def embedding_for(self, model: PreTrainedModel) -> nn.Module:
        """Return the model's embedding, without the norm that some models include in it."""
        return self._modules.embed_tokens

    def fuse(self, features: Tensor) -> Tensor:
        """Return the target's features `[..., D]` unchanged."""
        return features

    def score(self, hidden: Tensor, lm_head: nn.Module | None) -> Tensor:
        """Return the logits `[..., V]` of the model's lm_head for `hidden` `[..., D]`."""
        assert lm_head is not None
        return lm_head(hidden)

    def read(
        self, token_embeddings: Tensor, hidden: Tensor, position_ids: Tensor, cache: Cache, mask: Mask | None
    ) -> Tensor:
        """Run the first module; see `read_layer` with `layer` 0."""
        return self.read_layer(0, token_embeddings, hidden, position_ids, cache, mask)

    def read_layer(
        self, layer: int, token_embeddings: Tensor, hidden: Tensor, position_ids: Tensor, cache: Cache,
        mask: Mask | None,
    ) -> Tensor:  # fmt: skip
        """Run module k = `layer`, which appends T entries to its layer of the cache.

        Args:
            layer: Index of the module, from 0.
            token_embeddings: `[B, T, D]` embeddings of x[t+1+k].
            hidden: `[B, T, D]` the target's hidden states of x[t], or the output of the previous module.
            position_ids: `[B, T]` positions t.
            cache: Cache with one layer per module.
            mask: As for `attend_over`, but no `VisibleKeys`.

        Returns:
            `[B, T, D]`, normalized; `lm_head(output)` scores x[t+2+k].
        """
        modules, length = self._modules, hidden.shape[1]
        if mask is None:
            mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=hidden.device).tril()
        assert isinstance(mask, Tensor)
        if attention_name(modules.config) == "eager":
            mask = torch.zeros_like(mask, dtype=hidden.dtype).masked_fill(~mask, torch.finfo(hidden.dtype).min)
        positions, rotary = position_ids + 1 + layer, None
        if modules.rotary_emb is not None:
            per_layer = getattr(modules, "has_per_layer_rope", False)  # not in transformers 5.17
            kind = {"layer_type": modules.config.layer_types[layer]} if per_layer else {}
            rotary = modules.rotary_emb(token_embeddings, position_ids=positions, **kind)
        output: Tensor = modules.layers[layer](
            token_embeddings,
            hidden,
            position_embeddings=rotary,
            attention_mask=mask,
            position_ids=positions,
            **{CACHE_FIELD: cache},
        )
        return modules.shared_post_norm(output) if modules.use_shared_post_norm else output


def _config_of(model: PreTrainedModel) -> NativeMtpConfig:
    """Return the config of a model's modules, without loading them."""
    text, name = text_config(model), type(model).__name__
    count = getattr(text, "num_mtp_layers", None)
    if not count:
        raise DrafterMismatchError(f"{name} has no MTP modules: its config's num_mtp_layers is {count}.", ALTERNATIVES)
    if not model.config.name_or_path:
        raise DrafterMismatchError(
            f"This {name} was not loaded from a checkpoint, so its MTP modules cannot be loaded.",
            f"Load it with from_pretrained(). {ALTERNATIVES}",
        )
    if attention_name(text) not in ("sdpa", "eager"):
        raise UnsupportedModelError(
            f"The MTP modules of {name} need attention masks; its attention {attention_name(text)!r} does not "
            "support them.",
            'Call model.set_attn_implementation("sdpa") first.',
        )
    try:
        types = getattr(model.config.get_mtp_config(), "layer_types", None) or ["full_attention"] * count
    except ValueError as error:
        raise UnsupportedModelError(
            f"transformers cannot build the MTP modules of {name}: {error}", ALTERNATIVES
        ) from error
    kinds = sorted(set(types[:count]))
    if kinds not in (["full_attention"], ["sliding_attention"]):
        raise UnsupportedModelError(
            f"All MTP modules of {name} must have full_attention or all sliding_attention; they have "
            f"{', '.join(kinds)}.",
            ALTERNATIVES,
        )
    return NativeMtpConfig(
        num_layers=count,
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        sliding_window=text.sliding_window if kinds == ["sliding_attention"] else None,
        num_steps=count if count > 1 else None,
    )


def _load(model: PreTrainedModel, device: torch.device) -> Any:
    """Return the modules with the weights of the model's checkpoint, on a device."""
    if not unexpected_keys(model):
        raise UnsupportedModelError(
            f"transformers does not know the names of the MTP tensors of {type(model).__name__}.", ALTERNATIVES
        )
    try:
        return MtpModel.from_pretrained(model, device_map={"": device})
    except Exception as error:  # transformers raises many types, for files, names and shapes
        reason = " ".join(str(error).split())[:400]
        raise DrafterMismatchError(
            f"The MTP modules of {type(model).__name__} cannot be loaded from {model.config.name_or_path}: {reason}",
            f"The checkpoint must have them as safetensors, with the names that transformers expects. {ALTERNATIVES}",
        ) from error
