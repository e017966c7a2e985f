"""The published layouts of Medusa heads, both ways.

Sources: the repositories of Medusa (v0.1 to 1.0), Text Generation Inference, ModelOpt and vLLM.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import torch

from hf_specdec.checkpoints.layout import Layout, Shapes, Tensors
from hf_specdec.errors import CheckpointFormatError
from hf_specdec.heads.medusa import MedusaHeads
from hf_specdec.heads.schema import EAGLE3, checked
from hf_specdec.records import Fields

MEDUSA_HEADS = 5
"""Number of heads that Medusa's loader builds, whatever the config says."""

MAX_SHARED_HEADS = 16
"""Maximum number of Medusa heads that share one lm_head in the file; each gets a copy."""

VLLM_VOCABULARY = 32001
"""Vocabulary size of vLLM's Medusa heads if the config has none."""


def _settings(layout: Layout, fields: Fields, known: Fields, shapes: Shapes) -> Fields:
    """Return the config; the number of heads is counted, because it is wrong in published configs."""
    blocks = [name.split(".") for name in shapes if name.endswith(".linear.weight")]
    scores = [shape for name, shape in shapes.items() if re.fullmatch(r"heads\.\d+\.\d+\.weight", name)]
    block = shapes.get("heads.0.0.linear.weight")
    if not block:
        raise CheckpointFormatError("the residual block heads.0.0.linear is missing.")
    words = shapes.get("d2t")
    return {
        **known,
        "hidden_size": block[0],
        "vocab_size": scores[0][0] if scores and not words else known.get("vocab_size"),
        "medusa_num_heads": len({parts[1] for parts in blocks}),
        "medusa_num_layers": sum(parts[1] == "0" for parts in blocks),
        "shared_lm_head": not scores,
        "draft_vocab_size": words[0] if words else None,
    }


def _vllm_tensors(fields: Fields, tensors: Tensors) -> Tensors:
    """Return the tensors of vLLM's Medusa heads under our names.

    Source: `vllm/model_executor/models/medusa.py`. Linear layers may lack biases, heads may share one lm_head, and
    `token_map` holds the token ids of the draft vocabulary.
    """
    is_shared = fields.get("original_lm_head") is True
    rows_of = {name: rows for name, rows in tensors.items() if re.fullmatch(r"lm_heads\.\d+\.weight", name)}
    consumed = {"token_map", *(rows_of if is_shared else ()), *(("lm_head.weight",) if is_shared else ())}
    token_map = tensors.get("token_map")
    if fields.get("truncated_vocab_size") in (None, fields.get("vocab_size", VLLM_VOCABULARY)):
        token_map = None
    scale = checked({"logit_scale": fields.get("logit_scale")}, EAGLE3)["logit_scale"]
    found = dict(tensors)
    blocks = [name.split(".")[1:3] for name in tensors if re.fullmatch(r"heads\.\d+\.\d+\.linear\.weight", name)]
    for head, block in [] if fields.get("medusa_fc_bias") is True else blocks:
        weight = tensors[f"heads.{head}.{block}.linear.weight"]
        found.setdefault(f"heads.{head}.{block}.linear.bias", weight.new_zeros(weight.shape[:1]))
    heads = dict.fromkeys(head for head, _ in blocks)
    if is_shared and len(heads) > MAX_SHARED_HEADS:
        raise CheckpointFormatError(
            f"it has {len(heads)} heads with one lm_head, at most {MAX_SHARED_HEADS} are read."
        )
    for head in heads:
        name = f"lm_heads.{head}.weight"
        rows = tensors.get("lm_head.weight", rows_of.get("lm_heads.0.weight")) if is_shared else rows_of.get(name)
        if rows is None:
            continue
        if token_map is not None and len(rows) > len(token_map):
            rows = rows[token_map.clamp(0, len(rows) - 1)]
        found[f"heads.{head}.{sum(other == head for other, _ in blocks)}.weight"] = (
            rows.clone() if scale is None else rows * scale
        )
        consumed.add(name)
    if token_map is not None:
        found["d2t"] = token_map - torch.arange(len(token_map), device=token_map.device)
    return {name: tensor for name, tensor in found.items() if name not in consumed}


def _are_tied(head: MedusaHeads) -> bool:
    """Whether each Medusa head consists of equal residual blocks."""
    blocks = [list(parts.children())[: head.config.medusa_num_layers] for parts in head.heads]
    return all(
        torch.equal(tensor, other.state_dict()[name])
        for first, *others in blocks
        for other in others
        for name, tensor in first.state_dict().items()
    )


def _refusals(head: MedusaHeads) -> Mapping[str, bool]:
    config = head.config
    return {
        "Medusa's code repeats one residual block per head, but these heads have "
        f"{config.medusa_num_layers} different ones": not config.shared_lm_head and not _are_tied(head),
        "the format has no draft vocabulary (train with draft_vocab_size=None)": config.draft_vocab_size is not None,
        "with a shared lm_head, the format has one residual block per head": config.shared_lm_head
        and config.medusa_num_layers != 1,
    }


def _config(head: MedusaHeads) -> Fields:
    names = ("medusa_num_heads", "medusa_num_layers", "hidden_size", "vocab_size", "base_model_name_or_path")
    fields = {name: getattr(head.config, name) for name in names} | {"medusa_fc_bias": True}  # vLLM's name
    return {**fields, "version": "2" if head.config.shared_lm_head else "1"}


def _readers(head: MedusaHeads) -> str:
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


_V1 = Layout(
    name="medusa",
    head_class=MedusaHeads,
    writers="Medusa (v0.1, v1.3), Text Generation Inference",
    marked_by=(r"\d+\.\d+\.weight",),
    settings_of=_settings,
    fields={name: name for name in ("base_model_name_or_path", "vocab_size", "hidden_size")},
    unread=(),
    renames=(("", "heads."),),
    format="medusa",
    refusals=_refusals,
    config_of=_config,
    readers=_readers,
    file_name="medusa_lm_head.safetensors",
)
_V2 = replace(
    _V1,
    name="medusa-v2",
    writers="Medusa (legacy version 2), Text Generation Inference",
    marked_by=(r"\d+\.\d+\.linear\.(weight|bias)",),
    unmarked_by=(r"(?s:(?!\d+\.\d+\.linear\.(weight|bias)$).*)",),
    format="",
)
_WHOLE = replace(
    _V2,
    name="medusa-model",
    writers="Medusa 1.0 (a whole model, its own base included)",
    marked_by=(r"medusa_head\.\d+\..*",),
    unmarked_by=(),
    renames=(("medusa_head.", "heads."),),
    unread=(r"(model|lm_head|transformer|language_model|gpt_neox|embed_out|backbone|visual)\..*",),
)
_MODELOPT = replace(
    _WHOLE,
    name="modelopt-medusa",
    writers="ModelOpt (a whole model, its own base included)",
    marked_by=(r"medusa_heads\.\d+\..*",),
    renames=(("medusa_heads.", "heads."),),
)
_VLLM = replace(
    _V2,
    name="vllm-medusa",
    writers="vLLM's converter of Medusa heads",
    marked_by=(r"(medusa_heads\.)?blocks\.\d+\.layers\.\d+\.weight",),
    unmarked_by=(),
    fixed={"vocab_size": VLLM_VOCABULARY},
    aliases=(
        (r"(?:medusa_heads\.)?blocks\.(\d+)\.layers\.(\d+)\.(?=(weight|bias)$)", r"heads.\1.\2.linear."),
        (r"medusa_heads\.", ""),
    ),
    renames=(),
    complete=_vllm_tensors,
)

WHOLE_MODELS = (_WHOLE.name, _MODELOPT.name)
"""Layouts that include the target, which may be fine-tuned and must be used with the heads."""

MEDUSA_LAYOUTS = (_VLLM, _MODELOPT, _WHOLE, _V2, _V1)
"""All layouts of Medusa heads; the first that matches is used."""
