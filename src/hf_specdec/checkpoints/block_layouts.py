"""The published layouts of block heads (DFlash, DFlash2, LiLiCorr, Domino, JetSpec, DSpark), both ways.

Sources: z-lab/dflash (`dflash/model.py`), hao-ai-lab/JetSpec (`jetspec/models/draft_head.py`), deepseek-ai/DeepSpec
(`deepspec/modeling/dspark`), speculators 0.9 (`speculators/models/dflash` and `dspark`), vLLM (`qwen3_dflash.py`) for
fields of the config that change masks; transformers 5.24 (`muse_glimmer_assistant`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import torch

from hf_specdec.checkpoints.draft_layers import (
    VERIFIER,
    is_partly_rotated,
    layer_config,
    layer_fields,
    layer_numbers,
    speculators_fields,
)
from hf_specdec.checkpoints.layout import ROTARY_BUFFER, Layout, Shapes, Tensors, lookup
from hf_specdec.errors import CheckpointFormatError, listed
from hf_specdec.heads.dflash import FULL, SLIDING, DFlashHead
from hf_specdec.heads.schema import THIRD_PARTY_LAYER
from hf_specdec.records import Fields, shortened
from hf_specdec.verification.features import LAST

BLOCK_TENSORS = (
    r"layers\.\d{1,4}\.((input|post_attention)_layernorm\.weight|self_attn\.([qkvo]_proj\.(weight|bias)|"
    r"[qk]_norm\.weight)|mlp\.(gate|up|down)_proj\.(weight|bias))|"
    r"fc\.(weight|bias)|(hidden_norm|norm|embed_tokens|lm_head)\.weight|d2t|confidence_head\.proj\.(weight|bias)|"
    r"markov_head\.(markov_w[12]\.weight|(gate|joint)_proj\.(weight|bias)|prefix_gru\.weight_[ih]h_l0|"
    r"input_proj\.weight)|"
    r"layers\.\d{1,4}\.(attention|mlp)_conv\.(base_kernel|kernel_projection\.weight)|"
    r"candidate_selector\.((predecessor|successor)_codebook|hidden_projection\.weight)|lilicorr\.[\w.]{1,99}"
)
"""Names of the tensors of block heads; others are those of relatives that are not read."""

DFLASH_FIELDS = "target_layer_ids|mask_token|num_target_layers|causal|causal_head|use_swa|swa_window_size"
"""Fields of `dflash_config` that are read here or describe what other fields do; the rows have more."""


# ----------------------------------------------------------------------------------------------- reading


def _settings(layout: Layout, fields: Fields, known: Fields, shapes: Shapes) -> Fields:
    unknown = sorted(name for name in shapes if not re.fullmatch(BLOCK_TENSORS, name))
    if unknown:
        raise CheckpointFormatError(
            f"it has the unknown tensors {listed(unknown)}.", "Heads with these tensors are not supported."
        )
    nested, read = fields.get("dflash_config"), "|".join((*layout.fields.values(), *layout.expected, DFLASH_FIELDS))
    if layout.is_strict and isinstance(nested, dict):
        unread = sorted(nested.keys() - {path.rpartition(".")[2] for path in read.split("|")})
        if unread:
            raise CheckpointFormatError(f"its dflash_config has the unknown fields {listed(unread)}.")
    count = layer_numbers(shapes, 0)
    for name in ("fc.weight", "layers.0.self_attn.q_proj.weight"):
        if len(shapes.get(name, ())) != 2:
            raise CheckpointFormatError(f"{name} is missing, or not a matrix.")
    settings = {**layer_fields(layout, fields, shapes, windows=False), **known}
    if not layout.layer_config and fields.get("vocab_size") is None:
        settings["vocab_size"] = 0
    needed = {_LILICORR.name: LILICORR, _DOMINO.name: ("sample_from_anchor", "gru_hidden_dim", "markov_rank")}
    for name in ("block_size", "mask_token_id", *needed.get(layout.name, ())):
        if name not in settings:
            there = layout.fields.get(name, name).rpartition("|")[2].rpartition(".")[2]
            raise CheckpointFormatError(f"its config has no `{there}`.")
    layer = fields[layout.layer_config] if layout.layer_config else fields
    if layer.get("num_hidden_layers", count) != count:
        raise CheckpointFormatError(
            f"`num_hidden_layers` is {shortened(layer['num_hidden_layers'])}, but there are tensors of {count} layers."
        )
    if layout.layer_config:
        both_ways = _flag(fields, "sliding_window_non_causal")
        both_ways = layout.name == _SPECULATORS_DFLASH2.name if both_ways is None else both_ways
        directions = {"causal": False, "sliding_causal": not both_ways, "window_from_anchor": True}
    else:
        names = ("dflash_config.causal_head", "is_causal", "dflash_config.causal")  # JetSpec's; vLLM's, in its order
        given = [value for value in (_flag(fields, name) for name in names) if value is not None]
        directions = {"causal": given[0], "sliding_causal": given[0]} if given else {}
        if layout.is_strict:  # z-lab's default since its release 0.1
            directions = directions or {"causal": False, "sliding_causal": True}
    if settings.get("confidence_head", False) is False:  # speculators' default for the other field is true
        settings["confidence_with_markov"] = False
    return {
        **settings,
        "bias": "fc.bias" in shapes,
        "num_hidden_layers": count,
        "aux_hidden_state_layer_ids": _layer_ids(layout, fields, shapes, count),
        "own_lm_head": "lm_head.weight" in shapes,
        **directions,
        **_windows(layout, fields, layer, count),
    }


def _layer_ids(layout: Layout, fields: Fields, shapes: Shapes, num_layers: int) -> list[int] | None:
    """Return the numbers of the hidden states to read; None for those of the target's that its code computes."""
    size, width = shapes["fc.weight"]
    for path, (offset,) in layout.layer_ids:
        ids = lookup(fields, path)
        if ids is None:
            continue
        if not isinstance(ids, list) or not ids or not all(type(number) is int and number >= -1 for number in ids):
            raise CheckpointFormatError(f"`{path}` is {shortened(ids)}, expected a list of layer indices.")
        if len(ids) * size != width:
            raise CheckpointFormatError(f"fc.weight has {width} columns for {len(ids)} layers of size {size}.")
        # z-lab's code reads the last hidden state of transformers, which is after the final norm; JetSpec's does not
        last = fields.get("num_target_layers") if layout.name in (_ZLAB.name, _DFLASH2.name) else None
        return [LAST if number + offset == last else number + offset for number in ids]
    if num_layers * size != width or layout.layer_config:
        raise CheckpointFormatError(
            f"fc.weight has {width} columns, and the config does not name the target's layers."
        )
    return None


def _windows(layout: Layout, fields: Fields, layer: Fields, num_layers: int) -> Fields:
    """Return the kind of attention of each layer and the sliding window; `layer` is the config of the layers."""
    types, window = layer.get("layer_types"), layer.get("sliding_window")
    if types is not None and not (isinstance(types, list) and all(kind in (FULL, SLIDING) for kind in types)):
        raise CheckpointFormatError(f"`layer_types` is {shortened(types)}, expected a list of {FULL} and {SLIDING}.")
    if _flag(layer, "use_sliding_window") is False:
        window = None
    window = lookup(fields, "dflash_config.swa_window_size", window)  # vLLM's name
    if _flag(fields, "dflash_config.use_swa") and SLIDING not in (types or []):
        types = [SLIDING] * num_layers
        if window is None:
            raise CheckpointFormatError("`use_swa` is true, but the config has no `swa_window_size`.")
    if window is None or types is None or SLIDING not in types:
        return {"layer_types": None, "sliding_window": None}
    THIRD_PARTY_LAYER["sliding_window"].check("sliding_window", window)
    if len(types) != num_layers:
        raise CheckpointFormatError(f"`layer_types` is {shortened(types)} for {num_layers} layers.")
    # transformers' bidirectional windows include the position at this distance
    return {"layer_types": types, "sliding_window": window + (layout.name == _MUSE_GLIMMER.name)}


def _flag(fields: Fields, path: str) -> bool | None:
    """Return a field that must be true, false or missing."""
    value = lookup(fields, path)
    if not isinstance(value, bool | None):
        raise CheckpointFormatError(f"`{path}` is {shortened(value)}, expected true or false.")
    return value


# ----------------------------------------------------------------------------------------------- writing


def _block_refusals(head: DFlashHead) -> Mapping[str, bool]:
    """Return the reasons that hold for both layouts, and whether each one applies."""
    config, is_cut = head.config, head.config.draft_vocab_size is not None
    return {
        "the format has norms of queries and keys (train with qk_norm=True)": not config.qk_norm,
        "`fc` has no bias (train with bias=False)": config.bias,
        "the format has no convolutions, no pairs of candidates and no GRU (keep the published files)":
            bool(config.conv_kernel_size or config.num_candidates or config.gru_hidden_dim),
        "the MLP has no bias (train with mlp_bias=False)": config.mlp_bias,
        "biases of query, key and value require one of the output projection (train with attention_bias=True)":
            config.qkv_bias and not config.attention_bias,
        "the format rotates all dimensions of a head (train without partial_rotary_factor)": is_partly_rotated(config),
        "vLLM has no state after the final norm (train with other aux_hidden_state_layer_ids)":
            LAST in (config.aux_hidden_state_layer_ids or ()),
        "the layers that the head reads are not known (load it with model.load_drafter first)":
            config.aux_hidden_state_layer_ids is None,
        "the target's vocabulary is not known (load it with model.load_drafter first)": not config.vocab_size,
        "the format uses the target's embedding, but this head has its own (model.load_drafter drops one that equals "
        "the target's)": config.own_embedding,
        "over the whole vocabulary the format uses the target's lm_head, but this head has its own (train with "
        "own_lm_head=False or with a draft_vocab_size)": config.own_lm_head and not is_cut,
        "with a draft vocabulary the format has an lm_head, but this head uses the target's (pass the target, whose "
        "rows are copied: --model, in Python target=)": is_cut and not config.own_lm_head,
    }  # fmt: skip


def _types(head: DFlashHead) -> list[str]:
    return head.config.layer_types or [FULL] * head.config.num_hidden_layers


def _directions(head: DFlashHead) -> set[bool]:
    """Return whether the layers are causal within a block: one value if all have the same direction."""
    return {head.config.sliding_causal if kind == SLIDING else head.config.causal for kind in _types(head)}


def _dflash_refusals(head: DFlashHead) -> Mapping[str, bool]:
    config, ids = head.config, head.config.aux_hidden_state_layer_ids or ()
    return {
        **_block_refusals(head),
        "the format has no Markov head (speculators has one)": config.markov_rank > 0,
        "the format has no confidence head (speculators has one)": config.confidence_head,
        "the format has no `sample_from_anchor` (speculators has it)": config.sample_from_anchor,
        "its sliding windows count from every slot, those of this head from the root (speculators has them)":
            SLIDING in _types(head) and config.window_from_anchor,
        "its layers are all causal or all bidirectional (speculators has causal layers with a sliding window and "
        "bidirectional ones without)": len(_directions(head)) > 1,
        "DFlash's code reads the last layer after the final norm, this head before it (speculators reads it before)":
            config.num_target_layers in ids and _directions(head) == {False},
    }  # fmt: skip


def _speculators_refusals(head: DFlashHead) -> Mapping[str, bool]:
    types, config = _types(head), head.config
    return {
        **_block_refusals(head),
        "its layers with full attention are bidirectional, those of this head are causal (dflash has causal ones)":
            FULL in types and head.config.causal,
        "the format has no factors of embeddings and logits (dflash has them)":
            config.input_embedding_scale is not None or (config.logit_multiplier, config.logit_softcap) != (1, None),
        "its sliding windows count from the root, those of this head from every slot (dflash has them)":
            SLIDING in types and not head.config.window_from_anchor,
    }  # fmt: skip


def _layers_config(head: DFlashHead) -> Fields:
    """Return the Qwen3 config of the draft layers, with rotary fields that old and new transformers versions read."""
    config, types = head.config, _types(head)
    slides = SLIDING in types
    return {
        **layer_config(head),
        "model_type": "qwen3",
        "rope_parameters": dict(config.rope_parameters),
        "layer_types": types,
        "sliding_window": config.sliding_window if slides else None,
        "use_sliding_window": slides,
    }


def _dflash_config(head: DFlashHead) -> Fields:
    """Return the config in z-lab's layout.

    JetSpec reads `causal_head`, vLLM `causal`: without it, vLLM's layers with a sliding window are causal.
    """
    config = head.config
    layers = config.aux_hidden_state_layer_ids or []
    own: Fields = {"mask_token_id": config.mask_token_id, "target_layer_ids": [layer - 1 for layer in layers]}
    causal = _directions(head) == {True}
    if causal:
        own |= {"causal_head": True, "causal": True}
    elif SLIDING in _types(head):
        own["causal"] = False
    factors = {theirs: getattr(config, ours) for ours, theirs in FACTORS.items()}
    own |= {name: value for name, value in factors.items() if (name, value) != ("output_multiplier", 1) and value}
    if config.all_children != causal:  # JetSpec's trees are the reader's default for causal heads only
        own["all_children"] = config.all_children
    depth = {} if config.num_target_layers is None else {"num_target_layers": config.num_target_layers}
    words = {} if config.draft_vocab_size is None else {"draft_vocab_size": config.draft_vocab_size}
    return {
        **_layers_config(head),
        "architectures": ["DFlashDraftModel"],
        "block_size": config.block_size,
        "dflash_config": own,
        "base_model_name_or_path": config.base_model_name_or_path,
        **depth,
        **words,
    }


def _is_dspark(head: DFlashHead) -> bool:
    return head.config.markov_rank > 0 or head.config.confidence_head


def _speculators_config(head: DFlashHead) -> Fields:
    """Return the config in speculators' layout. The type is `dspark` if the head has a Markov or confidence head."""
    config = head.config
    kind, architecture = ("dspark", "DSparkDraftModel") if _is_dspark(head) else ("dflash", "DFlashDraftModel")
    own: Fields = {}
    if kind == "dspark":
        own = {
            "markov_rank": config.markov_rank,
            "markov_head_type": config.markov_head_type,
            "enable_confidence_head": config.confidence_head,
            "confidence_head_with_markov": config.confidence_with_markov,
        }
    return {
        **speculators_fields(head, kind, architecture, _layers_config(head), config.max_depth),
        **own,
        "aux_hidden_state_layer_ids": config.aux_hidden_state_layer_ids,
        "block_size": config.block_size,
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.sample_from_anchor,
        # speculators reads this for sliding layers only; vLLM 0.32 makes all layers causal if it is false
        "sliding_window_non_causal": not (SLIDING in _types(head) and config.sliding_causal),
        "target_hidden_size": None,
    }


def _with_mask(head: DFlashHead) -> Tensors:
    """Return the tensors; for a draft vocabulary also `t2d` `[V]`, the mask of its tokens."""
    tensors, ids = head.state_dict(), head.hot_token_ids
    if ids is None:
        return tensors
    mask = torch.zeros(head.config.vocab_size, dtype=torch.bool, device=ids.device)
    mask[ids] = True
    return {**tensors, "t2d": mask}


def _dflash_readers(head: DFlashHead) -> str:
    settings = f'{{"method": "dflash", "model": HERE, "num_speculative_tokens": {head.config.max_depth}}}'
    vllm = f"vLLM: `vllm serve TARGET --speculative-config '{settings}'`."
    if head.config.draft_vocab_size is not None:
        return f"{vllm} Other programs do not read the draft vocabulary and its lm_head."
    missing = " It needs `num_target_layers` in `config.json`: add the number of the target's layers."
    missing = missing if head.config.num_target_layers is None else ""
    if _directions(head) == {True}:
        return f"JetSpec's code: `DFlashDraftModel.from_pretrained(HERE)`.{missing} {vllm}"
    return (
        f"DFlash's code: `DFlashDraftModel.from_pretrained(HERE)`.{missing} {vllm} SGLang: "
        "`--speculative-algorithm DFLASH --speculative-draft-model-path HERE`."
    )


def _speculators_readers(head: DFlashHead) -> str:
    name = "DSparkDraftModel" if _is_dspark(head) else "DFlashDraftModel"
    return f"speculators: `{name}.from_pretrained(HERE)`; its config names the target. vLLM: `vllm serve HERE`."


# ----------------------------------------------------------------------------------------------- the rows

FACTORS = {"input_embedding_scale": "input_embedding_scale", "logit_multiplier": "output_multiplier",
           "logit_softcap": "final_logit_softcapping"}  # fmt: skip
"""Factors of embeddings and logits: our field, z-lab's."""
CONVOLUTIONS = ("conv_kernel_size", "conv_group_size")
LILICORR = tuple(f"lilicorr_{name}" for name in (
    "candidate_topk", "hidden_size", "num_layers", "num_heads", "mlp_ratio", "factor_dim", "vector_eps", "logit_scale",
))  # fmt: skip

_ZLAB = Layout(
    name="dflash",
    head_class=DFlashHead,
    writers="DFlash (z-lab), ModelOpt, NeMo Automodel",
    marks={"dflash_config": ...},
    settings_of=_settings,
    fields={
        "block_size": "block_size|dflash_config.block_size",
        "mask_token_id": "dflash_config.mask_token_id|mask_token_id",
        "all_children": "dflash_config.all_children",
        "num_target_layers": "num_target_layers",
        "base_model_name_or_path": "base_model_name_or_path",
        **{ours: f"dflash_config.{name}|{name}" for ours, name in FACTORS.items()},
    },
    expected={
        "is_neox_style": True,
        "dflash_config.attention_sink_bias": False,
        "add_swa_attention_sink_bias": False,
        "logit_scale": 1,
    },
    aliases=((r"(?:model\.)?(candidate_selector\.\w+_codebook)\.weight", r"\1"), (r"model\.", "")),
    unread=(ROTARY_BUFFER, "t2d"),
    layer_ids=(("dflash_config.target_layer_ids", (1,)), ("target_layer_ids", (1,))),
    format="dflash",
    refusals=_dflash_refusals,
    config_of=_dflash_config,
    readers=_dflash_readers,
    holds=("all_children",),
)
_JETSPEC = replace(
    _ZLAB,
    name="jetspec",
    writers="JetSpec",
    marks={"dflash_config.causal_head": ...},  # false, too
    fixed={"all_children": True},
    format="",
)
_DFLASH2 = replace(
    _ZLAB,
    name="dflash2",
    writers="DFlash2 (z-lab)",
    marks={"dflash_config.selector_rank": ...},
    fields={
        **{ours: path for ours, path in _ZLAB.fields.items() if ours != "all_children"},
        **{name: f"dflash_config.{name}" for name in CONVOLUTIONS},
        **{name: f"dflash_config.{name}" for name in ("selector_rank", "selector_top_k")},
    },
    fixed={"input_embedding_scale": 1.0},
    expected={**_ZLAB.expected, "use_gemma_norm": False, "rope_is_neox_style": True},
    format="",
    is_strict=True,
)
_LILICORR = replace(
    _DFLASH2,
    name="lilicorr",
    writers="LiLiCorr (for SGLang)",
    marks={"dflash_config.lilicorr_candidate_topk": ...},
    fields={
        **{ours: path for ours, path in _DFLASH2.fields.items() if not ours.startswith("selector_")},
        **{name: f"dflash_config.{name}" for name in LILICORR},
    },
    expected={**_DFLASH2.expected, "dflash_config.lilicorr_enabled": True},
)
_DOMINO = replace(
    _DFLASH2,
    name="domino",
    writers="Domino (for SGLang)",
    marks={"dflash_config.projector_type|projector_type": "domino"},
    fields={
        **_ZLAB.fields,
        "sample_from_anchor": "dflash_config.shift_label|shift_label",
        "gru_hidden_dim": "dflash_config.gru_hidden_dim|gru_hidden_dim",
        "markov_rank": "dflash_config.emb_dim|emb_dim",
    },
    fixed={"input_embedding_scale": 1.0, "markov_head_type": "domino"},
    expected={**_DFLASH2.expected, "dflash_config.pure_draft_prefix_len|pure_draft_prefix_len": 1,
              "dflash_config.projector_type|projector_type": "domino"},
    aliases=((r"(?:model\.)?prefix_gru\.", "markov_head.prefix_gru."),
             (r"(?:model\.)?embed_proj\.0\.", "markov_head.input_proj."),
             (r"(?:model\.)?embed_proj\.2\.", "markov_head.markov_w2."), (r"model\.", "")),
)  # fmt: skip
_MUSE_GLIMMER = Layout(
    name="muse-glimmer",
    head_class=DFlashHead,
    writers="transformers (Muse-Glimmer's assistant)",
    marks={"model_type": "muse_glimmer_assistant"},
    settings_of=_settings,
    fields={name: name for name in ("block_size", "mask_token_id", "base_model_name_or_path")},
    fixed={"input_embedding_scale": 1.0},
    renames=(("encoder.fc.", "fc."), ("encoder.output_norm_enc.", "hidden_norm.")),
    layer_ids=(("target_layer_ids", (1,)),),
)
_DEEPSPEC = Layout(
    name="deepspec",
    head_class=DFlashHead,
    writers="DeepSpec (DSpark, and DFlash trained with it)",
    marks={"architectures": ["Qwen3DSparkModel"]},
    settings_of=_settings,
    fields={
        **{name: name for name in ("block_size", "mask_token_id", "markov_rank", "markov_head_type",
                                   "num_target_layers", "base_model_name_or_path")},
        "confidence_head": "enable_confidence_head",
        "confidence_with_markov": "confidence_head_with_markov",
    },
    fixed={"sample_from_anchor": True},
    layer_ids=(("target_layer_ids", (1,)),),
)  # fmt: skip
_SPECULATORS_DFLASH = Layout(
    name="speculators-dflash",
    head_class=DFlashHead,
    writers="speculators (vLLM), DFlash",
    marks={"speculators_model_type": "dflash"},
    settings_of=_settings,
    fields={
        **{name: name for name in ("block_size", "mask_token_id", "sample_from_anchor")},
        "base_model_name_or_path": VERIFIER,
    },
    unread=(ROTARY_BUFFER, "t2d", r"verifier_lm_head\.weight", r"verifier_norm\.weight"),
    layer_config="transformer_layer_config",
    layer_ids=(("aux_hidden_state_layer_ids", (0,)),),
    format="speculators",
    refusals=_speculators_refusals,
    config_of=_speculators_config,
    tensors_of=_with_mask,
    readers=_speculators_readers,
)
_SPECULATORS_DSPARK = replace(
    _SPECULATORS_DFLASH,
    name="speculators-dspark",
    writers="speculators (vLLM), DSpark",
    marks={"speculators_model_type": "dspark"},
    fields={**_DEEPSPEC.fields, **_SPECULATORS_DFLASH.fields},
    fixed={"sample_from_anchor": True, "markov_rank": 256, "confidence_head": True, "confidence_with_markov": True},
    format="",  # written as the one above, with another type
)
_SPECULATORS_DFLASH2 = replace(
    _SPECULATORS_DFLASH,
    name="speculators-dflash2",
    writers="speculators (vLLM), DFlash2",
    marks={"speculators_model_type": "dflash2"},
    fields={**_SPECULATORS_DFLASH.fields,
            **{name: name for name in (*CONVOLUTIONS, "selector_rank", "selector_top_k")}},
    fixed={"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16},
    format="",
)  # fmt: skip

BLOCK_LAYOUTS = (
    _SPECULATORS_DFLASH, _SPECULATORS_DFLASH2, _SPECULATORS_DSPARK, _DEEPSPEC, _MUSE_GLIMMER, _DOMINO, _LILICORR,
    _DFLASH2, _JETSPEC, _ZLAB,
)  # fmt: skip
"""All layouts of block heads; the first that matches is used."""
