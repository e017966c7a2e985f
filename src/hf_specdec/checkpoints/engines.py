"""The layouts that `export_head` writes, as a table: configs, tensor names, and reasons why a head does not fit.

Files are written by `checkpoints/export.py`; layouts are read by `checkpoints/layouts.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_specdec.checkpoints.formats import Head
from hf_specdec.heads.eagle import EagleHead
from hf_specdec.heads.eagle3 import Eagle3Head
from hf_specdec.heads.medusa import MedusaHeads
from hf_specdec.heads.mtp import MtpHead

Fields = dict[str, Any]
Tensors = dict[str, Tensor]

SPECULATORS_VERSION = "0.9.0"
"""Version of speculators that the written layout follows."""


@dataclass(frozen=True, slots=True)
class Format:
    """A layout to write."""

    head_class: type[Head]
    refuse: Callable[[Any], Mapping[str, bool]]  # reasons against a head, and whether each applies
    config: Callable[[Any], Fields]
    tensors: Callable[[Any], Tensors]
    readers: Callable[[Any], str]  # for the card: programs that read it, and how to use them
    file_name: str = "model.safetensors"
    holds: tuple[str, ...] = ()  # fields of OWN_SETTINGS that it can store


# ----------------------------------------------------------------------------------------------- configurations


def _layer_config(head: EagleHead | Eagle3Head | MtpHead) -> Fields:
    """Return a one-layer Llama config with the keys of old and new transformers versions."""
    config = head.config
    rope = dict(config.rope_parameters)
    theta, kind = rope.pop("rope_theta", PLAIN_THETA), rope.pop("rope_type", "default")
    fields = {
        name: getattr(config, name)
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
                     "head_dim", "hidden_act", "rms_norm_eps", "max_position_embeddings", "attention_bias",
                     "mlp_bias", "initializer_range", "bos_token_id", "eos_token_id", "pad_token_id")
    }  # fmt: skip
    scaling = None if kind == "default" else {"type": kind, "rope_type": kind, **rope}
    return {**fields, "model_type": "llama", "num_hidden_layers": 1, "tie_word_embeddings": False,
            "rope_theta": theta, "rope_scaling": scaling, "use_cache": True}  # fmt: skip


def _for_eagles_code(fields: Fields) -> Fields:
    """Reduce `rope_scaling` to the two keys that EAGLE's config class requires."""
    scaling = fields["rope_scaling"]
    return {**fields, "rope_scaling": scaling and {"type": scaling["type"], "factor": scaling["factor"]}}


PLAIN_THETA = 10000.0
"""Rotary base that EAGLE's scaled classes use regardless of the config."""


def _eagle_config(head: EagleHead) -> Fields:
    own = {"bias": head.config.bias, "qkv_bias": head.config.qkv_bias, "architectures": ["LlamaForCausalLM"]}
    return {**_for_eagles_code(_layer_config(head)), **own, **_base(head)}


def _eagle3_config(head: Eagle3Head) -> Fields:
    config = head.config
    own: Fields = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
    }
    if config.target_hidden_size is not None:
        own["target_hidden_size"] = config.target_hidden_size
    if config.eagle_aux_hidden_state_layer_ids is not None:  # layer indices: hidden state i is the output of layer i-1
        outputs = [layer - 1 for layer in config.eagle_aux_hidden_state_layer_ids]
        own["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": outputs, "use_aux_hidden_state": True}
    return {**_layer_config(head), **own, **_base(head)}


def _official_config(head: Eagle3Head) -> Fields:
    return {**_for_eagles_code(_eagle3_config(head)), "architectures": ["LlamaForCausalLM"]}


def _sglang_config(head: Eagle3Head) -> Fields:
    return {**_eagle3_config(head), **({"fc_norm": True} if head.config.fc_norm else {})}


def _speculators_config(head: Eagle3Head) -> Fields:
    config = head.config
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "eagle_aux_hidden_state_layer_ids")
    return {
        **_of_speculators(head, "eagle3", "Eagle3Speculator"),
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "embed_requires_grad": False,
        **{name: getattr(config, name) for name in flags},
    }


def _mtp_config(head: MtpHead) -> Fields:
    return {**_of_speculators(head, "mtp", "MTPDraftModel"), "num_nextn_predict_layers": 1}


def _of_speculators(head: Eagle3Head | MtpHead, kind: str, architecture: str) -> Fields:
    """Return the fields that all speculators configs have."""
    config, layer = head.config, _layer_config(head)
    if config.qk_norm:
        layer = {**layer, "model_type": "qwen3"}
    if config.sliding_window is not None:
        layer = {**layer, "layer_types": ["sliding_attention"], "sliding_window": config.sliding_window,
                 "use_sliding_window": True, "max_window_layers": 0}  # fmt: skip
    proposal = {"proposal_type": "greedy", "speculative_tokens": config.num_steps or 3, "verifier_accept_k": 1,
                "accept_tolerance": 0.0}  # fmt: skip
    return {
        "architectures": [architecture],
        "speculators_model_type": kind,
        "speculators_version": SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": config.base_model_name_or_path, "architectures": []},
        },
        "transformer_layer_config": layer,
        "tie_word_embeddings": False,
    }


def _medusa_config(head: MedusaHeads) -> Fields:
    names = ("medusa_num_heads", "medusa_num_layers", "hidden_size", "vocab_size")
    fields = {name: getattr(head.config, name) for name in names}
    return {**fields, "version": "2" if head.config.shared_lm_head else "1", **_base(head)}


def _base(head: Head) -> Fields:
    return {"base_model_name_or_path": head.config.base_model_name_or_path}


# ----------------------------------------------------------------------------------------------- tensors


def _state(head: Head) -> Tensors:
    return dict(head.state_dict())


def _medusa_tensors(head: MedusaHeads) -> Tensors:
    return {name.removeprefix("heads."): tensor for name, tensor in _state(head).items()}


def _with_vocabulary(head: Eagle3Head) -> Tensors:
    """Return the tensors with `d2t` and `t2d`, also for a head that drafts over the whole vocabulary."""
    tensors, config = _state(head), head.config
    size = config.draft_vocab_size or config.vocab_size
    ids = head.hot_token_ids if head.hot_token_ids is not None else torch.arange(size, device="cpu")
    marked = torch.zeros(config.vocab_size, dtype=torch.bool, device="cpu")
    marked[ids.cpu()] = True
    return {**tensors, "d2t": ids - torch.arange(size, device=ids.device), "t2d": marked}


def _sglang_tensors(head: Eagle3Head) -> Tensors:
    return {name: tensor for name, tensor in _with_vocabulary(head).items() if not name.startswith("embed_tokens")}


def _speculators_tensors(head: Eagle3Head) -> Tensors:
    return {re.sub(r"^midlayer\.", "layers.0.", name): tensor for name, tensor in _with_vocabulary(head).items()}


def _mtp_tensors(head: MtpHead) -> Tensors:
    names = {"enorm": "token_layernorm", "hnorm": "hidden_layernorm", "eh_proj": "input_proj",
             "norm": "final_layernorm"}  # fmt: skip
    tensors = {}
    for name, tensor in _state(head).items():
        part, rest = name.split(".", 1)
        tensors[f"mtp_layers.0.{rest.removeprefix('0.') if part == 'layers' else f'{names[part]}.{rest}'}"] = tensor
    return tensors


# ----------------------------------------------------------------------------------------------- refusals


def _tied(head: MedusaHeads) -> bool:
    """Whether all residual blocks of a head are equal, for every head."""
    blocks = [list(parts.children())[: head.config.medusa_num_layers] for parts in head.heads]
    return all(
        torch.equal(tensor, other.state_dict()[name])
        for first, *others in blocks
        for other in others
        for name, tensor in first.state_dict().items()
    )


def _rotary_refusals(head: EagleHead | Eagle3Head, alternative: str) -> Mapping[str, bool]:
    """Return reasons against rotary settings and head sizes that EAGLE's code does not support."""
    config = head.config
    rope = config.rope_parameters
    kind, theta = rope.get("rope_type", "default"), rope.get("rope_theta", PLAIN_THETA)
    return {
        f"EAGLE's code supports only linear rotary scaling at rope_theta {PLAIN_THETA:g}, this head has {kind} at "
        f"{theta:g} ({alternative})": kind != "default" and (kind != "linear" or theta != PLAIN_THETA),
        f"EAGLE's code requires head_dim = hidden_size / num_attention_heads ({alternative})":
            config.head_dim != config.hidden_size // config.num_attention_heads,
    }  # fmt: skip


def _medusa_refusals(head: MedusaHeads) -> Mapping[str, bool]:
    config = head.config
    return {
        "Medusa's code repeats one residual block per head, but these heads have "
        f"{config.medusa_num_layers} different ones": not config.shared_lm_head and not _tied(head),
        "the format has no draft vocabulary (train with draft_vocab_size=None)": config.draft_vocab_size is not None,
        "with a shared lm_head, the format has one residual block per head": config.shared_lm_head
        and config.medusa_num_layers != 1,
    }


def _eagle_refusals(head: EagleHead) -> Mapping[str, bool]:
    config = head.config
    return {
        "the format has no draft vocabulary (engines read one from another file)": config.draft_vocab_size is not None,
        "the format has no layernorms": config.layernorms,
        "the format has no norms of queries and keys": config.qk_norm,
        "the format has no biases in the output projection and the MLP": config.attention_bias or config.mlp_bias,
        **_rotary_refusals(head, "vLLM and SGLang support it; there is no other format for EAGLE-1"),
        "the format has no sliding window": config.sliding_window is not None,
    }


def _plain_layer_refusals(head: Eagle3Head) -> Mapping[str, bool]:
    config = head.config
    return {
        "the format has no `norm_before_residual` (speculators has it)": config.norm_before_residual,
        "the format has no `norm_before_fc` (speculators has it)": config.norm_before_fc,
        "the format has no `norm_output` (speculators has it)": config.norm_output,
        "the format has no biases and no norms of queries and keys": config.attention_bias or config.qkv_bias
        or config.mlp_bias or config.qk_norm or config.bias,
        "the format has no sliding window (speculators has one)": config.sliding_window is not None,
    }  # fmt: skip


def _eagle3_refusals(head: Eagle3Head) -> Mapping[str, bool]:
    ids = head.config.eagle_aux_hidden_state_layer_ids
    paper = ids is None or (len(ids) == 3 and ids[0] == 2 and ids[1] == (ids[2] + 3) // 2)
    return {
        **_plain_layer_refusals(head),
        **_rotary_refusals(head, "for vLLM use the format speculators, for SGLang sglang"),
        "the format has no `fc_norm` (sglang and speculators have it)": head.config.fc_norm,
        f"its heads must read the layers 2, L/2 and L-3, not {ids} (sglang and speculators read any)": not paper,
    }


def _sglang_refusals(head: Eagle3Head) -> Mapping[str, bool]:
    ids = head.config.eagle_aux_hidden_state_layer_ids
    return {
        **_plain_layer_refusals(head),
        "the format uses the target's embedding, but this head has its own": head.config.own_embedding,
        "SGLang cannot read the embedding as a layer": bool(ids) and ids[0] == 0,
    }


def _speculators_refusals(head: Eagle3Head) -> Mapping[str, bool]:
    config = head.config
    return {
        "the target must have the hidden size of the head": config.target_hidden_size is not None,
        "`fc` has no bias": config.bias,
        "biases of query, key and value require one of the output projection": config.qkv_bias
        and not config.attention_bias,
        "norms of queries and keys require Qwen3's layer, whose MLP has no bias": config.qk_norm and config.mlp_bias,
        "sliding windows require Qwen3's layer, which has norms of queries and keys": config.sliding_window is not None
        and not config.qk_norm,
    }


def _mtp_refusals(head: MtpHead) -> Mapping[str, bool]:
    config = head.config
    return {
        "the format has no draft vocabulary": config.draft_vocab_size is not None,
        "the format uses the target's embedding, but this module has its own": config.own_embedding,
        "the format needs Qwen3's layer, with norms of queries and keys (train with qk_norm=True)": not config.qk_norm,
        "`input_proj` and the MLP have no bias": config.bias or config.mlp_bias,
        "biases of query, key and value require one of the output projection": config.qkv_bias
        and not config.attention_bias,
        "the format has no sliding window": config.sliding_window is not None,
    }


def _medusa_readers(head: MedusaHeads) -> str:
    loader = "medusa_model_legacy.py" if head.config.shared_lm_head else "medusa_model.py"
    return (
        f"`medusa_lm_head.pt` is for `medusa/model/{loader}` of Medusa's code; the other loader reads it without an "
        "error but drafts wrong tokens. `medusa_lm_head.safetensors` is for hf-specdec and Text Generation Inference "
        "(`--model-id` with the path of this directory)."
    )


def _eagle_readers(head: EagleHead) -> str:
    return (
        "EAGLE's code: `EaModel.from_pretrained(base_model_path=TARGET, ea_model_path=HERE, use_eagle3=False)`. vLLM: "
        '`--speculative-config \'{"method": "eagle", "model": HERE, "num_speculative_tokens": 4}\'`. SGLang: '
        "`--speculative-algorithm EAGLE --speculative-draft-model-path HERE`."
    )


def _eagle3_readers(head: Eagle3Head) -> str:
    return (
        "EAGLE's code: `EaModel.from_pretrained(base_model_path=TARGET, ea_model_path=HERE, use_eagle3=True)`. vLLM: "
        '`--speculative-config \'{"method": "eagle3", "model": HERE, "num_speculative_tokens": 4}\'`.'
    )


def _speculators_readers(head: Eagle3Head) -> str:
    settings = '{"method": "eagle3", "model": HERE, "num_speculative_tokens": 4}'
    return f"vLLM: `vllm serve HERE`, or with another target `vllm serve TARGET --speculative-config '{settings}'`."


def _mtp_readers(head: MtpHead) -> str:
    return "speculators: `MTPDraftModel.from_pretrained(HERE)`, with the target named in its config."


def _sglang_readers(head: Eagle3Head) -> str:
    return "SGLang: `--speculative-algorithm EAGLE3 --speculative-draft-model-path HERE`."


FORMATS: dict[str, Format] = {
    "medusa": Format(
        MedusaHeads, _medusa_refusals, _medusa_config, _medusa_tensors, _medusa_readers, "medusa_lm_head.safetensors"
    ),
    "eagle": Format(EagleHead, _eagle_refusals, _eagle_config, _state, _eagle_readers),
    "eagle3": Format(Eagle3Head, _eagle3_refusals, _official_config, _with_vocabulary, _eagle3_readers),
    "speculators": Format(
        Eagle3Head, _speculators_refusals, _speculators_config, _speculators_tensors, _speculators_readers,
        holds=("num_steps",),
    ),
    "speculators-mtp": Format(
        MtpHead, _mtp_refusals, _mtp_config, _mtp_tensors, _mtp_readers, holds=("num_steps",)
    ),
    "sglang": Format(Eagle3Head, _sglang_refusals, _sglang_config, _sglang_tensors, _sglang_readers),
}  # fmt: skip
"""The formats of `export_head`, except our own layout."""
