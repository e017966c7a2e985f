"""The MTP modules that a model's own checkpoint brings, as draft layers; transformers builds, loads and runs them.

Source: DeepSeek-AI, "DeepSeek-V3 Technical Report" (https://arxiv.org/abs/2412.19437), section 2.2; transformers'
`MtpModel` and `MTPCandidateGenerator` for what goes in: the target's last hidden states behind its final norm, and the
position of the token that is read, one more for every module.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel
from transformers.modeling_layers import MtpModel

from hf_specdec.errors import DrafterMismatchError, UnsupportedModelError
from hf_specdec.verification.features import LAST
from hf_specdec.verification.model import CACHE_FIELD, execution_device, text_config

INSTEAD = "Load an MTP module that was trained for it (model.load_drafter(...)), or choose another method."


@dataclass(frozen=True, slots=True)
class NativeMtpConfig:
    """What a drafter reads of a draft layer's configuration; a checkpoint says nothing of trees."""

    num_layers: int  # modules; the k-th foresees the token k places ahead of the next
    hidden_size: int
    vocab_size: int
    sliding_window: int | None
    num_steps: int | None  # as deep as there are modules, where there are several
    tree: str = "dynamic"
    top_k: None = None
    num_draft_tokens: None = None
    draft_vocab_size: None = None


class NativeMtp:
    """The MTP modules of one model.

    Only its configuration is looked at when this is made; the weights are loaded by `bind`.

    Args:
        model: The target, loaded from a checkpoint that has the modules.

    Raises:
        DrafterMismatchError: A model without such modules.
        UnsupportedModelError: Modules that are not plain attention layers, or that transformers cannot build.
    """

    shares_lm_head = True
    hot_token_ids: Tensor | None = None
    feature_layers = (LAST,)

    def __init__(self, model: PreTrainedModel) -> None:
        self.config, self.where = _config_of(model), model.config.name_or_path
        self._modules: Any = None

    @property
    def device(self) -> torch.device:
        """Where the modules run."""
        device: torch.device = self._first_parameter.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        """Of the modules' weights."""
        dtype: torch.dtype = self._first_parameter.dtype
        return dtype

    @property
    def _first_parameter(self) -> Any:
        return self._modules.layers[0].eh_proj.weight

    def bind(self, model: PreTrainedModel) -> None:
        """Load the modules where that has not been done, and put them next to the model's lm_head.

        Raises:
            DrafterMismatchError: Another model, no lm_head, or a checkpoint whose modules cannot be loaded.
            UnsupportedModelError: As for a new one.
        """
        where = model.config.name_or_path
        if where != self.where or _config_of(model) != self.config:
            raise DrafterMismatchError(
                f"These MTP modules are those of {self.where}, this model is {where or 'another'}.",
                "Make new ones: MtpDrafter.native(model).",
            )
        lm_head = model.get_output_embeddings()
        if lm_head is None:
            raise DrafterMismatchError(f"{type(model).__name__} has no lm_head for its MTP modules.")
        device = next((parameter.device for parameter in lm_head.parameters()), model.device)
        device = execution_device(model) if device.type == "meta" else device
        if self._modules is None:
            self._modules = _load(model, device)
        self._modules.tie_with_main_model(model)
        for name in ("layers", "shared_post_norm"):  # embedding, lm_head and rotary positions are the model's
            part = getattr(self._modules, name, None)
            if part is not None:
                part.eval().requires_grad_(False).to(device)
                if self.dtype != model.dtype:
                    part.to(model.dtype)

    def embedding_for(self, model: PreTrainedModel) -> nn.Module:
        """The model's, without a norm that some models have in it."""
        embedding: nn.Module = self._modules.embed_tokens
        return embedding

    def fuse(self, features: Tensor) -> Tensor:
        """The target's features `[..., D]`, as they are."""
        return features

    def score(self, hidden: Tensor, lm_head: nn.Module | None) -> Tensor:
        """Logits `[..., V]` by the model's lm_head."""
        assert lm_head is not None
        logits: Tensor = lm_head(hidden)
        return logits

    def read(
        self, token_embeddings: Tensor, hidden: Tensor, position_ids: Tensor, cache: Cache, mask: Tensor | None
    ) -> Tensor:
        """The first module, see `read_layer`."""
        return self.read_layer(0, token_embeddings, hidden, position_ids, cache, mask)

    def read_layer(
        self, layer: int, token_embeddings: Tensor, hidden: Tensor, position_ids: Tensor, cache: Cache,
        mask: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """One forward of module k = `layer` over T new entries, which are appended to its layer of the cache.

        Args:
            layer: Which module, from 0.
            token_embeddings: `[B, T, D]` of x[t+1+k].
            hidden: `[B, T, D]` the target's features of x[t], or the output of the module before.
            position_ids: `[B, T]` the positions t.
            cache: With a layer for every module.
            mask: `[B, 1, T, S]` bool, True where attention is allowed; None is plain causal, for an empty cache.

        Returns:
            `[B, T, D]`, normed; lm_head scores x[t+2+k] by it.
        """
        modules, length = self._modules, hidden.shape[1]
        if mask is None:
            mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=hidden.device).tril()
        if modules.config._attn_implementation == "eager":
            mask = torch.zeros_like(mask, dtype=hidden.dtype).masked_fill(~mask, torch.finfo(hidden.dtype).min)
        positions, rotary = position_ids + 1 + layer, None
        if modules.rotary_emb is not None:
            per_layer = getattr(modules, "has_per_layer_rope", False)  # unknown to transformers 5.17
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
    """What is known of a model's modules without loading them."""
    text, name = text_config(model), type(model).__name__
    count = getattr(text, "num_mtp_layers", None)
    if not count:
        raise DrafterMismatchError(f"{name} has no MTP modules: its config's num_mtp_layers is {count}.", INSTEAD)
    if not model.config.name_or_path:
        raise DrafterMismatchError(
            f"This {name} was not loaded from a checkpoint, in which its MTP modules could be.",
            f"Load it by from_pretrained(). {INSTEAD}",
        )
    if text._attn_implementation not in ("sdpa", "eager"):
        raise UnsupportedModelError(
            f"The MTP modules of {name} take masks, which its attention {text._attn_implementation!r} does not.",
            'Call model.set_attn_implementation("sdpa") first.',
        )
    try:
        types = getattr(model.config.get_mtp_config(), "layer_types", None) or ["full_attention"] * count
    except ValueError as error:
        raise UnsupportedModelError(
            f"transformers cannot build the MTP modules of {name}: {error}", INSTEAD
        ) from error
    kinds = sorted(set(types[:count]))
    if kinds not in (["full_attention"], ["sliding_attention"]):
        raise UnsupportedModelError(
            f"The MTP modules of {name} must all be of full_attention or all of sliding_attention, they are "
            f"{', '.join(kinds)}.",
            INSTEAD,
        )
    return NativeMtpConfig(
        num_layers=count,
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        sliding_window=text.sliding_window if kinds == ["sliding_attention"] else None,
        num_steps=count if count > 1 else None,
    )


def _load(model: PreTrainedModel, device: torch.device) -> Any:
    """The modules with the weights of the model's checkpoint, all of them."""
    if not getattr(model, "_keys_to_ignore_on_load_unexpected", None):
        raise UnsupportedModelError(f"transformers knows no names of MTP tensors for {type(model).__name__}.", INSTEAD)
    try:
        return MtpModel.from_pretrained(model, device_map={"": device})
    except Exception as error:  # files, names and shapes: transformers has a class for each
        reason = " ".join(str(error).split())[:400]
        raise DrafterMismatchError(
            f"The MTP modules of {type(model).__name__} cannot be loaded from {model.config.name_or_path}: {reason}",
            "The checkpoint must have them, as safetensors, under the names that transformers knows for this model. "
            + INSTEAD,
        ) from error
