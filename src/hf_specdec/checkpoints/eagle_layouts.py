"""The published layouts of EAGLE heads (versions 1 to 3), both ways.

Sources: the repositories of EAGLE, SpecForge, ModelOpt, SGLang, NeMo Automodel, DeepSpec and speculators.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from hf_specdec.checkpoints.draft_layers import (
    PLAIN_THETA,
    VERIFIER,
    is_partly_rotated,
    layer_config,
    layer_fields,
    layer_numbers,
    speculators_layer,
)
from hf_specdec.checkpoints.layout import ROTARY_BUFFER, Layout, Shapes, Tensors, lookup
from hf_specdec.errors import CheckpointFormatError
from hf_specdec.heads.eagle import EagleHead
from hf_specdec.heads.eagle3 import PAPER_LAYERS, Eagle3Head
from hf_specdec.heads.readings import Ambiguity
from hf_specdec.heads.schema import MAX_VOCABULARY
from hf_specdec.records import Fields, shortened
from hf_specdec.verification.features import LAST

MAX_LAYERS = 64
"""Maximum number of hidden states that a head reads; published heads read three to five."""


# ----------------------------------------------------------------------------------------------- EAGLE-1 and 2


def _eagle_settings(layout: Layout, fields: Fields, known: Fields, shapes: Shapes) -> Fields:
    return {"bias": True, **layer_fields(layout, fields, shapes), **known}


def _rotary_refusals(head: EagleHead | Eagle3Head, alternative: str) -> Mapping[str, bool]:
    """Return the rotary settings and head sizes that EAGLE's code does not support, and whether each one applies."""
    config = head.config
    rope = config.rope_parameters
    kind, theta = rope.get("rope_type", "default"), rope.get("rope_theta", PLAIN_THETA)
    return {
        f"EAGLE's code supports only linear rotary scaling at rope_theta {PLAIN_THETA:g}, this head has {kind} at "
        f"{theta:g} ({alternative})": kind != "default" and (kind != "linear" or theta != PLAIN_THETA),
        f"EAGLE's code requires a rotary scaling factor of at least 1 ({alternative})": (rope.get("factor") or 1) < 1,
        f"EAGLE's code rotates all dimensions of a head ({alternative})": is_partly_rotated(config),
        f"EAGLE's code requires head_dim = hidden_size / num_attention_heads ({alternative})":
            config.head_dim != config.hidden_size // config.num_attention_heads,
    }  # fmt: skip


def _eagle_refusals(head: EagleHead) -> Mapping[str, bool]:
    config = head.config
    return {
        "the format has no draft vocabulary (engines read one from another file)": config.draft_vocab_size is not None,
        "the format has no layernorms": config.layernorms,
        "the format has no norms of queries and keys": config.qk_norm,
        "the format has no biases in the output projection and the MLP": config.attention_bias or config.mlp_bias,
        **_rotary_refusals(head, "vLLM and SGLang support it, but in no other format for EAGLE-1"),
        "the format has no sliding window": config.sliding_window is not None,
    }


def _for_eagles_code(fields: Fields) -> Fields:
    """Return fields for EAGLE's code, whose `rope_scaling` is None, or a type and a float factor above 1."""
    scaling = fields["rope_scaling"]
    if not scaling or scaling["factor"] == 1:
        scaling = None
    else:
        scaling = {"type": scaling["type"], "factor": float(scaling["factor"])}
    return {**fields, "rope_scaling": scaling, "architectures": ["LlamaForCausalLM"]}


def _eagle_readers(head: EagleHead | Eagle3Head) -> str:
    is_third = isinstance(head, Eagle3Head)
    settings = f'{{"method": "eagle{"3" if is_third else ""}", "model": HERE, "num_speculative_tokens": 4}}'
    sglang = " SGLang: `--speculative-algorithm EAGLE --speculative-draft-model-path HERE`."
    return (
        f"EAGLE's code: `EaModel.from_pretrained(base_model_path=TARGET, ea_model_path=HERE, use_eagle3={is_third})`. "
        f"vLLM: `--speculative-config '{settings}'`.{'' if is_third else sglang}"
    )


_EAGLE = Layout(
    name="eagle",
    head_class=EagleHead,
    writers="EAGLE (versions 1 and 2)",
    marked_by=(r"fc\.weight", r"layers\.0\.mlp\.gate_proj\.weight"),
    unmarked_by=(r"layers\.0\.hidden_norm\.weight",),
    settings_of=_eagle_settings,
    fields={"bias": "bias", "qkv_bias": "qkv_bias", "base_model_name_or_path": "base_model_name_or_path"},
    expected={"num_hidden_layers": 1},
    format="eagle",
    refusals=_eagle_refusals,
    config_of=lambda head: {
        **_for_eagles_code(layer_config(head)),
        "bias": head.config.bias,
        "qkv_bias": head.config.qkv_bias,
        "base_model_name_or_path": head.config.base_model_name_or_path,
    },
    readers=_eagle_readers,
)
_SPECULATORS_EAGLE = Layout(
    name="speculators-eagle",
    head_class=EagleHead,
    writers="speculators before 0.3 (EAGLE-1, HASS)",
    marks={"speculators_model_type": "eagle"},
    settings_of=_eagle_settings,
    fields={"bias": "fusion_bias", "layernorms": "layernorms", "base_model_name_or_path": VERIFIER},
    fixed={"bias": False, "layernorms": False},
    expected={"transformer_layer_config.num_hidden_layers": 1},
    renames=(("fusion_fc.", "fc."), ("transformer.", "layers.0.")),
    unread=(ROTARY_BUFFER, r"lm_head\.weight"),
    layer_config="transformer_layer_config",
)

# ----------------------------------------------------------------------------------------------- EAGLE-3, reading


def _eagle3_settings(layout: Layout, fields: Fields, known: Fields, shapes: Shapes) -> Fields:
    settings = {**layer_fields(layout, fields, shapes), **known}
    ambiguity = ambiguity_of(layout, fields)
    ids = ambiguity.layer_ids
    count = len(ids) if ids else fields.get("num_aux_hidden_states") or len(PAPER_LAYERS)
    shape = shapes.get("fc.weight", (0, 0))
    if type(count) is not int or not 0 < count <= MAX_LAYERS:
        raise CheckpointFormatError(f"`num_aux_hidden_states` is {shortened(count)}, expected 1 to {MAX_LAYERS}.")
    if ids is None and count != len(PAPER_LAYERS):
        raise CheckpointFormatError(f"The head reads {count} layers of the target, and its config does not name them.")
    size = settings.get("target_hidden_size") or (shape[-1] // count)
    if len(shape) != 2 or size * count != shape[-1]:
        names = "the config names none, so there must be" if ids is None else "the config names"
        raise CheckpointFormatError(
            f"fc.weight has shape {tuple(shape)}, which does not fit the target's layers that the head reads: {names} "
            f"{count}" + (f" of size {size}." if settings.get("target_hidden_size") else ".")
        )
    is_parallel = fields.get("parallel_drafting") or "peagle" in str(fields.get("architectures")).lower()
    if is_parallel and "mask_hidden" not in shapes:
        raise CheckpointFormatError("The config describes a P-EAGLE head, but the tensor mask_hidden is missing.")
    rows = shapes.get("lm_head.weight", (0,))[0]
    if "d2t" not in shapes and rows not in (0, settings["vocab_size"]):
        raise CheckpointFormatError(
            f"lm_head has {rows} rows for {settings['vocab_size']} tokens, without a d2t to map them."
        )
    further = layer_numbers(shapes, 1)  # configs often have the target's number
    return {
        **settings,
        "eagle_aux_hidden_state_layer_ids": [max(number + ambiguity.layer_offsets[0], 0) for number in ids]
        if ids
        else None,
        "norm_output": ambiguity.norm_output[0],
        "target_hidden_size": None if size == shape[0] else size,
        "own_lm_head": rows > 0,
        "tie_word_embeddings": rows == 0 and fields.get("tie_word_embeddings") is True,
        "num_hidden_layers": 1 + further,
        "embedding_in_every_layer": further > 0
        and shapes.get("layers.1.self_attn.q_proj.weight", (0, 0))[-1] == 2 * shape[0],
    }


def _peagle_settings(layout: Layout, fields: Fields, known: Fields, shapes: Shapes) -> Fields:
    """Return the settings of a P-EAGLE head.

    SpecForge and NeMo train without a sliding window, SpecForge also without scaled rotary positions, whatever the
    config says, which may be a copy of the target's.
    """
    if "mask_token_id" not in known:
        raise CheckpointFormatError(
            "A P-EAGLE head needs the mask token that it was trained with, and its config names none.",
            "SpecForge does not store it: add `mask_token_id` to config.json.",
        )
    ignored = _UNTRAINED.get(layout.name, ())
    read = {name: value for name, value in fields.items() if name not in ignored}
    if "rope_parameters" in ignored:
        read["rope_theta"] = lookup(fields, "rope_parameters.rope_theta|rope_theta")
    return _eagle3_settings(layout, read, known, shapes)


def ambiguity_of(layout: Layout, fields: Fields) -> Ambiguity:
    """Return what the config leaves open about the layers that a head reads and about `norm_output`."""
    flags = [lookup(fields, path) for path in ("norm_output", "eagle_config.return_hidden_post_norm")]
    for flag in flags:
        if not isinstance(flag, bool | None):
            raise CheckpointFormatError(f"`norm_output` is {shortened(flag)}, expected true or false.")
    normed = (True, False) if flags[0] and layout.unsure_of_norm_output else (any(flags),)
    for path, offsets in layout.layer_ids:
        ids = lookup(fields, path)
        if ids is None:
            continue
        # with offset 1, -1 is the embedding
        valid = isinstance(ids, list) and all(type(n) is int and -1 <= n <= MAX_VOCABULARY for n in ids)
        if not valid or not 0 < len(ids) <= MAX_LAYERS:
            raise CheckpointFormatError(f"`{path}` is {str(ids)[:80]}, expected 1 to {MAX_LAYERS} layer indices.")
        if len(set(ids)) != len(ids):
            raise CheckpointFormatError(f"`{path}` is {str(ids)[:80]}, expected distinct layers.")
        return Ambiguity(tuple(sorted(ids)), offsets, normed)
    return Ambiguity(None, norm_output=normed)


def with_tied_lm_head(fields: Fields, tensors: Tensors) -> Tensors:
    """Return the tensors with the rows of the embedding as lm_head, if the config ties them."""
    rows = tensors.get("embed_tokens.weight")
    if fields.get("tie_word_embeddings") is not True or rows is None or "lm_head.weight" in tensors:
        return tensors
    if "d2t" in tensors:
        rows = rows[(tensors["d2t"] + torch.arange(len(tensors["d2t"]), device=rows.device)).clamp(0, len(rows) - 1)]
    return {**tensors, "lm_head.weight": rows.clone()}


# ----------------------------------------------------------------------------------------------- EAGLE-3, writing


def _plain_layer_refusals(head: Eagle3Head) -> Mapping[str, bool]:
    config, ids = head.config, head.config.eagle_aux_hidden_state_layer_ids
    return {
        "the format has no `norm_before_residual` (speculators has it)": config.norm_before_residual,
        "no engine reads the last hidden state after the final norm": LAST in (ids or ()),
        "no engine reads the token embedding in layers after the first": config.embedding_in_every_layer,
        "the format has no parallel drafting (speculators has it)": config.mask_token_id is not None,
        "the format has no biases and no norms of queries and keys": config.attention_bias or config.qkv_bias
        or config.mlp_bias or config.qk_norm or config.bias,
        "the format has no sliding window (speculators has one)": config.sliding_window is not None,
    }  # fmt: skip


def _eagle3_refusals(head: Eagle3Head) -> Mapping[str, bool]:
    ids = head.config.eagle_aux_hidden_state_layer_ids
    return {
        **_plain_layer_refusals(head),
        **_rotary_refusals(head, "for vLLM use the format speculators, for SGLang sglang"),
        "the format has no `fc_norm` (sglang and speculators have it)": head.config.fc_norm,
        "the format has no `norm_before_fc` (sglang and speculators have it)": head.config.norm_before_fc,
        "the format has no `norm_output` (sglang and speculators have it)": head.config.norm_output,
        "the format has no `logit_scale`": head.config.logit_scale != 1,
        "the format has an lm_head, but this head uses the target's (sglang supports it)": not head.config.own_lm_head,
        "the format has one layer (sglang and speculators have several)": head.config.num_hidden_layers > 1,
        f"its heads must read the layers 2, L/2 and L-3, not {ids} (sglang and speculators read any)":
            not _are_paper_layers(ids),
    }  # fmt: skip


def _sglang_refusals(head: Eagle3Head) -> Mapping[str, bool]:
    ids = head.config.eagle_aux_hidden_state_layer_ids
    return {
        **_plain_layer_refusals(head),
        "the format uses the target's embedding, but this head has its own": head.config.own_embedding,
        "SGLang cannot read the embedding as a layer": bool(ids) and ids[0] == 0,
        "SGLang has no draft vocabulary for a head that uses the target's lm_head": not head.config.own_lm_head
        and head.config.draft_vocab_size is not None,
        "SGLang rotates all dimensions of a head": is_partly_rotated(head.config),
        "SGLang has no `logit_scale`": head.config.logit_scale != 1,
    }


def _speculators_refusals(head: Eagle3Head) -> Mapping[str, bool]:
    config = head.config
    return {
        "the target must have the hidden size of the head": config.target_hidden_size is not None,
        "`fc` has no bias": config.bias,
        "the format has no `logit_scale`": config.logit_scale != 1,
        "the format has an lm_head, but this head uses the target's": not config.own_lm_head,
        "the format has no state after the final norm": LAST in (config.eagle_aux_hidden_state_layer_ids or ()),
        "layers after the first do not read the token embedding": config.embedding_in_every_layer,
        "the format rotates all dimensions of a head": is_partly_rotated(config),
        "biases of query, key and value require one of the output projection": config.qkv_bias
        and not config.attention_bias,
        "norms of queries and keys require Qwen3's layer, whose MLP has no bias": config.qk_norm and config.mlp_bias,
        "sliding windows require Qwen3's layer, which has norms of queries and keys": config.sliding_window is not None
        and not config.qk_norm,
    }


def _are_paper_layers(ids: Sequence[int] | None) -> bool:
    """Whether layer ids are 2, L/2 and L-3 for some number of layers L; None stands for them."""
    return ids is None or (len(ids) == 3 and ids[0] == 2 and ids[1] == (ids[2] + 3) // 2)


def _eagle3_config(head: Eagle3Head) -> Fields:
    config = head.config
    words = config.draft_vocab_size or (config.vocab_size if config.own_lm_head else None)
    own = {} if config.target_hidden_size is None else {"target_hidden_size": config.target_hidden_size}
    return {
        **layer_config(head),
        **own,
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": words,
        "base_model_name_or_path": config.base_model_name_or_path,
    }


def _sglang_config(head: Eagle3Head) -> Fields:
    flags = ("fc_norm", "norm_output", "norm_before_fc")
    fields = {**_eagle3_config(head), **{name: True for name in flags if getattr(head.config, name)}}
    nested: Fields = {"norm_before_fc": True} if head.config.norm_before_fc else {}  # TensorRT-LLM reads it there
    ids = head.config.eagle_aux_hidden_state_layer_ids
    if not _are_paper_layers(ids):  # the paper's are SGLang's default
        nested["eagle_aux_hidden_state_layer_ids"] = [layer - 1 for layer in ids]
    return {**fields, "eagle_config": {**nested, "use_aux_hidden_state": True}} if nested else fields


def _speculators_config(head: Eagle3Head) -> Fields:
    config = head.config
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "eagle_aux_hidden_state_layer_ids")
    kind, own = ("eagle3", "Eagle3Speculator"), {}
    if config.mask_token_id is not None:
        kind, own = ("peagle", "PEagleSpeculator"), {"mask_token_id": config.mask_token_id}
    return {
        **speculators_layer(head, *kind),
        **own,
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "embed_requires_grad": bool(own),
        **{name: getattr(config, name) for name in flags},
    }


def _with_vocabulary(head: Eagle3Head) -> Tensors:
    """Return the tensors with `d2t` and `t2d`, also for a head that drafts over the whole vocabulary."""
    config, ids = head.config, head.hot_token_ids
    size = config.draft_vocab_size or config.vocab_size
    ids = torch.arange(size, device="cpu") if ids is None else ids
    marked = torch.zeros(config.vocab_size, dtype=torch.bool, device="cpu")
    marked[ids.cpu()] = True
    return {**head.state_dict(), "d2t": ids - torch.arange(size, device=ids.device), "t2d": marked}


def _sglang_tensors(head: Eagle3Head) -> Tensors:
    """Return the tensors under SGLang's names, without the embedding.

    If there are several layers, the first is `layers.0`, and the input norm of the others is called `hidden_norm`.
    """
    stored = _with_vocabulary(head) if head.config.own_lm_head else head.state_dict()
    tensors = {name: tensor for name, tensor in stored.items() if not name.startswith("embed_tokens")}
    if head.config.num_hidden_layers == 1:
        return tensors
    names = {name: re.sub(r"^(layers\.\d+\.)input_layernorm\.", r"\1hidden_norm.", name) for name in tensors}
    return {re.sub(r"^midlayer\.", "layers.0.", names[name]): tensor for name, tensor in tensors.items()}


def _speculators_readers(head: Eagle3Head) -> str:
    more = "" if head.config.mask_token_id is None else ', "parallel_drafting": true'
    settings = f'{{"method": "eagle3", "model": HERE, "num_speculative_tokens": 4{more}}}'
    return f"vLLM: `vllm serve HERE`, or with another target `vllm serve TARGET --speculative-config '{settings}'`."


def _sglang_readers(head: Eagle3Head) -> str:
    text = "SGLang: `--speculative-algorithm EAGLE3 --speculative-draft-model-path HERE`."
    if _are_paper_layers(head.config.eagle_aux_hidden_state_layer_ids):
        return text
    return (
        f"{text} It adds 1 to the layer ids in `eagle_config`, except for gpt-oss targets (since July 2026) and for "
        "DeepSeek targets if the first id is not 1: add 1 to the ids in `config.json` for these."
    )


# ----------------------------------------------------------------------------------------------- EAGLE-3, the rows

_FLAGS = {"norm_before_residual": False, "fc_norm": False, "norm_before_fc": False}

_EAGLE3 = Layout(
    name="eagle3",
    head_class=Eagle3Head,
    writers="EAGLE (version 3)",
    marked_by=(r"(model\.)?(midlayer|midlayer\.0|layers\.0)\.hidden_norm\.weight",),  # only EAGLE-3 has it
    settings_of=_eagle3_settings,
    fields={
        "norm_before_residual": "norm_before_residual",
        "fc_norm": "fc_norm|use_aux_norm",
        "norm_before_fc": "eagle_config.norm_before_fc|norm_before_fc",
        "logit_scale": "logit_scale",
        "target_hidden_size": "target_hidden_size",
        "base_model_name_or_path": "base_model_name_or_path",
    },
    fixed=_FLAGS,
    expected={
        "eagle_config.use_aux_hidden_state": True,
        "eagle_config.use_input_layernorm_in_first_layer": True,
        "eagle_config.use_last_layernorm": True,
        "eagle_config.use_mtp_layernorm": False,
        "eagle_config.eh_proj_before_attn": False,
    },
    aliases=(
        (r"(model\.)?(midlayer\.0|layers\.0)\.", "midlayer."),
        (r"(model\.)?midlayer\.(?=\d+\.)", "layers."),
        (r"(model\.)?aux_norm_low\.", "fc_norm.0."),
        (r"(model\.)?aux_norm_mid\.", "fc_norm.1."),
        (r"(model\.)?aux_norm_high\.", "fc_norm.2."),
        (r"model\.", ""),
    ),
    unread=(ROTARY_BUFFER, r"(model\.)?t2d"),
    complete=with_tied_lm_head,
    layer_ids=(
        ("eagle_config.eagle_aux_hidden_state_layer_ids", (1, 0)),
        ("eagle_aux_hidden_state_layer_ids", (0,)),
        ("target_layer_ids", (1,)),
    ),
    unsure_of_norm_output=True,
    format="eagle3",
    refusals=_eagle3_refusals,
    config_of=lambda head: _for_eagles_code(_eagle3_config(head)),
    tensors_of=_with_vocabulary,
    readers=_eagle_readers,
)
_SPECULATORS_EAGLE3 = Layout(
    name="speculators-eagle3",
    head_class=Eagle3Head,
    writers="speculators (vLLM)",
    marks={"speculators_model_type": "eagle3"},
    settings_of=_eagle3_settings,
    fields={**{name: name for name in _FLAGS}, "base_model_name_or_path": VERIFIER},
    fixed=_FLAGS,
    renames=(("layers.0.", "midlayer."),),
    unread=(ROTARY_BUFFER, "t2d", r"verifier_lm_head\.weight", r"verifier_norm\.weight"),
    complete=with_tied_lm_head,
    layer_config="transformer_layer_config",
    layer_ids=(("eagle_aux_hidden_state_layer_ids", (0,)),),
    format="speculators",
    refusals=_speculators_refusals,
    config_of=_speculators_config,
    tensors_of=_with_vocabulary,
    readers=_speculators_readers,
    holds=("num_steps",),
)
_SPECULATORS_PEAGLE = replace(
    _SPECULATORS_EAGLE3,
    name="speculators-peagle",
    writers="speculators (vLLM), P-EAGLE",
    marks={"speculators_model_type": "peagle"},
    settings_of=_peagle_settings,
    fields={
        **_SPECULATORS_EAGLE3.fields,
        "mask_token_id": "mask_token_id",
        "num_steps": "speculators_config.proposal_methods.0.speculative_tokens",
    },
    format="",  # written as the one above, with another type
)


def _variant(name: str, writers: str, marks: Mapping[str, Any], **changes: Any) -> Layout:
    """Return a layout with the tensors of EAGLE's own, which another program writes with its own config."""
    changes = {"unsure_of_norm_output": False, "format": "", **changes}
    return replace(_EAGLE3, name=name, writers=writers, marks=marks, **changes)


_BY_SPECFORGE = {"architectures": ["LlamaForCausalLMEagle3"]}

_NEMO = _variant("nemo-eagle3", "NeMo Automodel", {"architectures": ["LlamaEagle3DraftModel"]})
_DEEPSPEC = _variant("deepspec-eagle3", "DeepSpec", {"architectures": ["Qwen3Eagle3Model"]})
_MODELOPT = _variant("modelopt-eagle3", "ModelOpt", {"eagle_config.use_aux_hidden_state": ...}, unmarked_by=("t2d",))
_SPECFORGE = _variant("specforge", "SpecForge", _BY_SPECFORGE, unsure_of_norm_output=True)
_SGLANG = _variant(
    "sglang",
    "SpecForge's export for SGLang",
    _BY_SPECFORGE,
    unmarked_by=(r"embed_tokens\.weight",),
    unsure_of_norm_output=True,
    format="sglang",
    refusals=_sglang_refusals,
    config_of=_sglang_config,
    tensors_of=_sglang_tensors,
    readers=_sglang_readers,
)
_PEAGLE = _variant(
    "peagle",
    "P-EAGLE, verl-SpeCo, and others that vLLM reads",
    {},
    marked_by=(r"(model\.)?mask_hidden",),
    settings_of=_peagle_settings,
    fields={
        **_EAGLE3.fields,
        "mask_token_id": "mask_token_id|pard_token|ptd_token_id",  # vLLM's order
        "num_steps": "num_depths",
    },
    fixed={**_FLAGS, "num_steps": 8},  # tokens that SpecForge, NeMo and speculators train a head to predict
)
_NEMO_PEAGLE = replace(_PEAGLE, name="nemo-peagle", writers="NeMo Automodel, P-EAGLE", marks=_NEMO.marks)
_SPECFORGE_PEAGLE = replace(
    _PEAGLE,
    name="specforge-peagle",
    writers="SpecForge, P-EAGLE",
    marks={"architectures": ["PEagleDraftModel"]},
)
_UNTRAINED = {
    _NEMO_PEAGLE.name: ("layer_types",),
    _SPECFORGE_PEAGLE.name: ("layer_types", "rope_parameters", "rope_scaling", "partial_rotary_factor"),
}
"""Fields of the config that the code of a writer does not read."""

EAGLE_LAYOUTS = (
    _SPECULATORS_EAGLE3, _SPECULATORS_PEAGLE, _SPECULATORS_EAGLE, _NEMO_PEAGLE, _SPECFORGE_PEAGLE, _PEAGLE, _NEMO,
    _DEEPSPEC, _MODELOPT, _SGLANG, _SPECFORGE, _EAGLE3, _EAGLE,
)  # fmt: skip
"""All layouts of EAGLE heads; the first that matches is used."""
