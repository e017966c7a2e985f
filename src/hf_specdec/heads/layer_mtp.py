"""An MTP module that is built from a transformers decoder layer: the `mtp.*` tensors of Qwen3-Next and Qwen3.5.

transformers drops these tensors when it loads the model. The module is one full-attention layer of the target's class,
with norms of both inputs and of the output. One module is applied repeatedly to its own output.

Sources: `qwen3_next_mtp.py` and `qwen3_5_mtp.py` of vLLM, which read the same tensors; speculators' type `mtp`, which
stores them under other names; DeepSeek-V3 (https://arxiv.org/abs/2412.19437), section 2.2.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, MODEL_MAPPING, Cache, DynamicCache, PreTrainedConfig
from transformers.modeling_layers import MtpLayer

from hf_specdec.errors import CheckpointFormatError, HeadTensorsError, InvalidConfigError
from hf_specdec.heads.attention import Attend
from hf_specdec.heads.head import EagleFamilyHead
from hf_specdec.transformers_private import set_attention_name
from hf_specdec.verification.device_attention import Mask
from hf_specdec.verification.model import CACHE_FIELD

LAYER_TYPES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Values of `model_type` of the text configs whose layers are supported."""


class LayerMtpConfig(PreTrainedConfig):
    """Configuration of a module: the text config of its target.

    Args:
        layer: The text config as a dictionary, with one of `LAYER_TYPES` as `model_type`.
        base_model_name_or_path: The target.
    """

    model_type = "hf_specdec_layer_mtp"
    tree = "dynamic"
    num_steps = top_k = num_draft_tokens = draft_vocab_size = sliding_window = recipe = tau = None
    num_hidden_layers, own_embedding = 1, False

    def __init__(
        self, layer: dict[str, Any] | None = None, base_model_name_or_path: str | None = None, **kwargs: Any
    ) -> None:
        self.layer = dict(layer or {})
        self.base_model_name_or_path = base_model_name_or_path
        self.hidden_size, self.vocab_size = self.layer.get("hidden_size"), self.layer.get("vocab_size")
        super().__init__(**kwargs)

    def layer_config(self) -> Any:
        """Return transformers' config of one full-attention layer."""
        kind = self.layer.get("model_type")
        if kind not in LAYER_TYPES:
            raise InvalidConfigError(
                f"MTP modules of {str(kind)[:80]!r} are not supported.", f"Supported: {', '.join(LAYER_TYPES)}."
            )
        dropped = ("model_type", "mtp_hidden_states_first")  # the second would make `MtpLayer` swap its inputs
        fields = {name: value for name, value in self.layer.items() if name not in dropped}
        config = CONFIG_MAPPING[kind](**{**fields, "num_hidden_layers": 1, "layer_types": ["full_attention"]})
        if hasattr(config, "mlp_only_layers"):
            config.mlp_only_layers = []
        set_attention_name(config, "sdpa")
        return config


class LayerMtpHead(EagleFamilyHead):
    """An MTP module: `h'[t+1] = post_norm(layer(eh_proj([enorm(embed(x[t+1])); hnorm(h[t])])))`, as in `MtpHead`.

    The target's last hidden states h are taken after its final norm. Norms and layer have the target's classes.
    """

    method = "mtp"
    config_class = LayerMtpConfig
    needs_masks = True

    def __init__(self, config: LayerMtpConfig) -> None:
        super().__init__(config)
        layer = config.layer_config()
        with torch.device("meta"):
            model: Any = MODEL_MAPPING[type(layer)](copy.deepcopy(layer))
        layer = model.config  # with the implementations of attention and experts that transformers chose
        self.module = MtpLayer(layer, type(model.layers[0]), type(model.norm), 0)
        self.rotary_emb = type(model.rotary_emb)(layer)
        self._rotary_class, self._layer_config = type(model.rotary_emb), layer
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Do nothing: the weights are loaded."""

    def reset_rotary(self) -> None:
        """Create the rotary embedding again on the CPU, after the head was created on the meta device and loaded.

        Its frequencies are not stored in checkpoints.
        """
        with torch.device("cpu"):
            self.rotary_emb = self._rotary_class(self._layer_config)

    def read(
        self, token_embeddings: Tensor, hidden: Tensor, position_ids: Tensor, cache: Cache, mask: Mask | None
    ) -> Tensor:
        """See `EagleFamilyHead.read`."""
        length = hidden.shape[1]
        if mask is None:
            mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=hidden.device).tril()
        # time, height and width, which are equal for text; transformers 5.17 adds the dimension outside this class
        axes = position_ids.expand(3, -1, -1) if hasattr(self.rotary_emb, "mrope_section") else position_ids
        return self.module(
            token_embeddings,
            hidden,
            position_embeddings=self.rotary_emb(token_embeddings, position_ids=axes),
            attention_mask=mask,
            position_ids=position_ids,
            **{CACHE_FIELD: cache},
        )

    def forward(
        self, token_embeddings: Tensor, hidden: Tensor, position_ids: Tensor, attend: Attend | None = None
    ) -> Tensor:
        """Predict the next hidden states of a whole text with causal attention; see `MtpHead.forward`."""
        if attend is not None:
            raise NotImplementedError("The attention of a transformers layer cannot be replaced: use `read`.")
        return self.read(token_embeddings, hidden, position_ids, DynamicCache(), None)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """Raise `CheckpointFormatError`: the module is stored in the checkpoint that it was read from."""
        raise CheckpointFormatError(
            "This MTP module cannot be saved: there is no layout for it alone.",
            f"Use the checkpoint that it was read from: {self.name_or_path or 'unknown'}.",
        )


TENSOR_NAMES = {
    "fc.": "eh_proj.",
    "pre_fc_norm_embedding.": "enorm.",
    "pre_fc_norm_hidden.": "hnorm.",
    "norm.": "post_norm.",
    "layers.0.": "mtp_block.",
}
"""Starts of tensor names of `MtpLayer`, by those in the target's checkpoint after the prefix `mtp.`."""

SPECULATORS_NAMES = {
    "input_proj.": "eh_proj.",
    "token_layernorm.": "enorm.",
    "hidden_layernorm.": "hnorm.",
    "final_layernorm.": "post_norm.",
    "": "mtp_block.",
}
"""Starts of tensor names of `MtpLayer`, by those of speculators after the prefix `mtp_layers.0.`."""


def renamed(name: str, names: dict[str, str]) -> str:
    """Return the name in `LayerMtpHead` of a tensor stored as `name` (without prefix); unchanged if not in `names`."""
    old = next((old for old in names if name.startswith(old)), None)
    return name if old is None else f"module.{names[old]}{name[len(old) :]}"


def experts_joined(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Join experts that are stored one by one into the two tensors of transformers' expert layers.

    Tensors without such experts are returned unchanged.

    Args:
        tensors: By name; `...experts.{e}.gate_proj.weight [I, H]`, `up_proj`, and `down_proj [H, I]` become
            `...experts.gate_up_proj [E, 2I, H]` and `...experts.down_proj [E, H, I]`.
    """
    prefix = next((name.split(".experts.")[0] + ".experts." for name in tensors if ".experts.0." in name), None)
    if prefix is None:
        return tensors
    count = len({name[len(prefix) :].split(".")[0] for name in tensors if name.startswith(prefix)})
    names = {part: [f"{prefix}{e}.{part}_proj.weight" for e in range(count)] for part in ("gate", "up", "down")}
    wanted = [name for part in names.values() for name in part]
    missing = [name for name in wanted if name not in tensors]
    if missing:
        raise HeadTensorsError(f"Experts are incomplete: {missing[0]} is missing, there are {count} experts.")
    others = sorted(name for name in tensors if name.startswith(prefix) and name not in wanted)
    if others:
        raise HeadTensorsError(f"Experts have unknown tensors: {others[0][:120]}.")
    if tensors[names["gate"][0]].shape != tensors[names["up"][0]].shape:
        raise HeadTensorsError(f"{names['gate'][0]} and {names['up'][0]} differ in shape.")
    for first, *others in names.values():
        odd = next((name for name in others if tensors[name].shape != tensors[first].shape), None)
        if odd is not None:
            sizes = [f"{name} has {tuple(tensors[name].shape)}" for name in (odd, first)]
            raise HeadTensorsError(f"Experts differ in shape: {', '.join(sizes)}.")
    joined = {name: tensor for name, tensor in tensors.items() if not name.startswith(prefix)}
    gate, up, down = (torch.stack([tensors[name] for name in names[part]]) for part in ("gate", "up", "down"))
    return {**joined, f"{prefix}gate_up_proj": torch.cat([gate, up], dim=1), f"{prefix}down_proj": down}
