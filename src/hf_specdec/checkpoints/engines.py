"""The layouts that `export_head` writes, as a table: configs, tensor names, and reasons why a head does not fit.

Files are written by `checkpoints/export.py`; layouts are read by `checkpoints/layouts.py`. The layouts of block heads
are in `checkpoints/block_engines.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_specdec.checkpoints import export_refusals as refusals
from hf_specdec.checkpoints.export_refusals import PLAIN_THETA
from hf_specdec.checkpoints.formats import Head
from hf_specdec.heads.dflash import DFlashHead
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
    holds: tuple[str, ...] = ()  # fields of `export.OWN_SETTINGS` that it can store


# ----------------------------------------------------------------------------------------------- configurations


def layer_config(head: EagleHead | Eagle3Head | MtpHead | DFlashHead) -> Fields:
    """Return the Llama config of the draft layers, with rotary fields that old and new transformers versions read."""
    config = head.config
    rope = dict(config.rope_parameters)
    theta, kind = rope.pop("rope_theta", PLAIN_THETA), rope.pop("rope_type", "default")
    partial = rope.pop("partial_rotary_factor", None)
    fields = {
        name: getattr(config, name)
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
                     "head_dim", "hidden_act", "rms_norm_eps", "max_position_embeddings", "attention_bias",
                     "mlp_bias", "initializer_range", "bos_token_id", "eos_token_id", "pad_token_id")
    }  # fmt: skip
    scaling = None if kind == "default" else {"type": kind, "rope_type": kind, **rope}
    if partial not in (None, 1):
        fields["partial_rotary_factor"] = partial
    return {**fields, "model_type": "llama", "num_hidden_layers": config.num_hidden_layers,
            "tie_word_embeddings": False, "rope_theta": theta, "rope_scaling": scaling, "use_cache": True}  # fmt: skip


def _for_eagles_code(fields: Fields) -> Fields:
    """Reduce `rope_scaling` to what EAGLE's code accepts: None, or a type and a float factor above 1."""
    scaling = fields["rope_scaling"]
    if not scaling or scaling["factor"] == 1:
        return {**fields, "rope_scaling": None}
    return {**fields, "rope_scaling": {"type": scaling["type"], "factor": float(scaling["factor"])}}


MEDUSA_HEADS = 5
"""Number of heads that Medusa's loader builds, whatever the config says."""


def _eagle_config(head: EagleHead) -> Fields:
    own = {"bias": head.config.bias, "qkv_bias": head.config.qkv_bias, "architectures": ["LlamaForCausalLM"]}
    return {**_for_eagles_code(layer_config(head)), **own, **base_model(head)}


def _eagle3_config(head: Eagle3Head) -> Fields:
    config = head.config
    own: Fields = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
    }
    if config.target_hidden_size is not None:
        own["target_hidden_size"] = config.target_hidden_size
    if not config.own_lm_head:
        own["draft_vocab_size"] = config.draft_vocab_size
    return {**layer_config(head), **own, **base_model(head)}


def _official_config(head: Eagle3Head) -> Fields:
    return {**_for_eagles_code(_eagle3_config(head)), "architectures": ["LlamaForCausalLM"]}


def _sglang_config(head: Eagle3Head) -> Fields:
    flags = ("fc_norm", "norm_output", "norm_before_fc")
    fields = {**_eagle3_config(head), **{name: True for name in flags if getattr(head.config, name)}}
    nested: Fields = {"norm_before_fc": True} if head.config.norm_before_fc else {}  # TensorRT-LLM reads it there
    ids = head.config.eagle_aux_hidden_state_layer_ids
    if not refusals.are_paper_layers(ids):  # the paper's are SGLang's default
        nested["eagle_aux_hidden_state_layer_ids"] = [layer - 1 for layer in ids]
    return {**fields, "eagle_config": {**nested, "use_aux_hidden_state": True}} if nested else fields


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
    """Return the fields that the speculators configs of EAGLE-3 heads and MTP modules have in common."""
    config, layer = head.config, layer_config(head)
    if config.qk_norm:
        layer = {**layer, "model_type": "qwen3"}
    if config.sliding_window is not None:
        layer = {**layer, "layer_types": ["sliding_attention"] * config.num_hidden_layers,
                 "sliding_window": config.sliding_window, "use_sliding_window": True,
                 "max_window_layers": 0}  # fmt: skip
    return speculators_fields(head, kind, architecture, layer, config.num_steps or 3)


def speculators_fields(head: Head, kind: str, architecture: str, layer: Fields, num_tokens: int) -> Fields:
    """Return the fields that all speculators configs have in common.

    Args:
        head: The head.
        kind: Name of the method in speculators.
        architecture: Name of the class in speculators.
        layer: Config of the draft layers.
        num_tokens: Tokens to draft per step.
    """
    proposal = {"proposal_type": "greedy", "speculative_tokens": num_tokens, "verifier_accept_k": 1,
                "accept_tolerance": 0.0}  # fmt: skip
    return {
        "architectures": [architecture],
        "speculators_model_type": kind,
        "speculators_version": SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": head.config.base_model_name_or_path, "architectures": []},
        },
        "transformer_layer_config": layer,
        "tie_word_embeddings": False,
    }


def _medusa_config(head: MedusaHeads) -> Fields:
    names = ("medusa_num_heads", "medusa_num_layers", "hidden_size", "vocab_size")
    fields = {name: getattr(head.config, name) for name in names} | {"medusa_fc_bias": True}  # vLLM's name
    return {**fields, "version": "2" if head.config.shared_lm_head else "1", **base_model(head)}


def base_model(head: Head) -> Fields:
    """Return the field that names the target."""
    return {"base_model_name_or_path": head.config.base_model_name_or_path}


# ----------------------------------------------------------------------------------------------- tensors


def state_of(head: Head) -> Tensors:
    """Return the head's tensors by our names."""
    return dict(head.state_dict())


def _medusa_tensors(head: MedusaHeads) -> Tensors:
    return {name.removeprefix("heads."): tensor for name, tensor in state_of(head).items()}


def _with_vocabulary(head: Eagle3Head) -> Tensors:
    """Return the tensors with `d2t` and `t2d`, also for a head that drafts over the whole vocabulary."""
    tensors, config = state_of(head), head.config
    size = config.draft_vocab_size or config.vocab_size
    ids = head.hot_token_ids if head.hot_token_ids is not None else torch.arange(size, device="cpu")
    marked = torch.zeros(config.vocab_size, dtype=torch.bool, device="cpu")
    marked[ids.cpu()] = True
    return {**tensors, "d2t": ids - torch.arange(size, device=ids.device), "t2d": marked}


def _sglang_tensors(head: Eagle3Head) -> Tensors:
    """Return the tensors under SGLang's names, without the embedding.

    If there are several layers, the first is `layers.0`, and the input norm of the others is called `hidden_norm`.
    """
    stored = _with_vocabulary(head) if head.config.own_lm_head else state_of(head)
    tensors = {name: tensor for name, tensor in stored.items() if not name.startswith("embed_tokens")}
    if head.config.num_hidden_layers == 1:
        return tensors
    names = {name: re.sub(r"^(layers\.\d+\.)input_layernorm\.", r"\1hidden_norm.", name) for name in tensors}
    return {re.sub(r"^midlayer\.", "layers.0.", names[name]): tensor for name, tensor in tensors.items()}


def _speculators_tensors(head: Eagle3Head) -> Tensors:
    return {re.sub(r"^midlayer\.", "layers.0.", name): tensor for name, tensor in _with_vocabulary(head).items()}


def _mtp_tensors(head: MtpHead) -> Tensors:
    names = {"enorm": "token_layernorm", "hnorm": "hidden_layernorm", "eh_proj": "input_proj",
             "norm": "final_layernorm"}  # fmt: skip
    tensors = {}
    for name, tensor in state_of(head).items():
        part, rest = name.split(".", 1)
        tensors[f"mtp_layers.0.{rest.removeprefix('0.') if part == 'layers' else f'{names[part]}.{rest}'}"] = tensor
    return tensors


def _medusa_readers(head: MedusaHeads) -> str:
    loader = "medusa_model_legacy.py" if head.config.shared_lm_head else "medusa_model.py"
    count = head.config.medusa_num_heads
    missing = (
        f"Medusa's code always builds {MEDUSA_HEADS} heads: with these {count}, change `medusa_num_heads` in its "
        "`MedusaConfig` first, or the others draft random tokens. "
    )
    files = (
        f"`medusa_lm_head.pt` is for `medusa/model/{loader}` of Medusa's code; the other loader reads it without an "
        "error but drafts wrong tokens. `medusa_lm_head.safetensors` is for hf-specdec and Text Generation Inference "
        "(`--model-id` with the path of this directory). "
    )
    settings = f'{{"method": "medusa", "model": HERE, "num_speculative_tokens": {count}}}'
    vllm = f"vLLM: `--speculative-config '{settings}'`."
    if head.config.shared_lm_head:
        vllm = "vLLM loads this directory without an error, but drafts wrong tokens from a shared lm_head."
    return (missing if count < MEDUSA_HEADS else "") + files + vllm


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
    text = "SGLang: `--speculative-algorithm EAGLE3 --speculative-draft-model-path HERE`."
    if refusals.are_paper_layers(head.config.eagle_aux_hidden_state_layer_ids):
        return text
    return (
        f"{text} It adds 1 to the layer ids in `eagle_config`, except for gpt-oss targets (since July 2026) and for "
        "DeepSeek targets if the first id is not 1: add 1 to the ids in `config.json` for these."
    )


FORMATS: dict[str, Format] = {
    "medusa": Format(
        MedusaHeads, refusals.medusa_refusals, _medusa_config, _medusa_tensors, _medusa_readers,
        "medusa_lm_head.safetensors",
    ),
    "eagle": Format(EagleHead, refusals.eagle_refusals, _eagle_config, state_of, _eagle_readers),
    "eagle3": Format(Eagle3Head, refusals.eagle3_refusals, _official_config, _with_vocabulary, _eagle3_readers),
    "speculators": Format(
        Eagle3Head, refusals.speculators_refusals, _speculators_config, _speculators_tensors, _speculators_readers,
        holds=("num_steps",),
    ),
    "speculators-mtp": Format(
        MtpHead, refusals.mtp_refusals, _mtp_config, _mtp_tensors, _mtp_readers, holds=("num_steps",)
    ),
    "sglang": Format(Eagle3Head, refusals.sglang_refusals, _sglang_config, _sglang_tensors, _sglang_readers),
}  # fmt: skip
"""The formats of `export_head`, except our own layout and those of block heads."""
