"""Map the tensors of a checkpoint to ours: names, dtypes and values, tensors left implicit, and draft vocabularies."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from hf_specdec.checkpoints.layouts import VLLM_VOCABULARY, Layout
from hf_specdec.errors import CheckpointFormatError, HeadTensorsError, listed
from hf_specdec.heads.eagle3 import Eagle3Config
from hf_specdec.heads.schema import EAGLE3, MAX_VOCABULARY, checked
from hf_specdec.records import Fields

Tensors = dict[str, Tensor]
Shapes = Mapping[str, tuple[int, ...]]

INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
VOCABULARIES = ("d2t", "token_map")
"""Names of the integer tensors, which define a draft vocabulary: offsets (`d2t`) or token ids (`token_map`)."""

MAX_SHARED_HEADS = 16
"""Maximum number of Medusa heads that share one lm_head in the file; each gets a copy."""

LARGEST_WEIGHT = torch.finfo(torch.float16).max
"""Maximum absolute value of a weight: a head is converted to its target's dtype, which may be float16."""


def names_of(layout: Layout, names: Iterable[str], where: str) -> tuple[dict[str, str], set[str]]:
    """Return the names in the files by our tensor names, and the names in the files that are not loaded.

    Raises:
        CheckpointFormatError: Two tensors of the files would be the same tensor of ours.
    """
    file_names: dict[str, str] = {}
    unread = set()
    for name in names:
        if any(re.fullmatch(pattern, name) for pattern in layout.unread):
            unread.add(name)
            continue
        ours = name
        for pattern, replacement in layout.renames:
            if re.fullmatch(pattern, name):
                ours = re.sub(pattern, replacement, name)
                break
        if ours in file_names:
            raise CheckpointFormatError(f"{where}: {file_names[ours]} and {name} both map to the tensor {ours}.")
        file_names[ours] = name
    for ours in list(file_names):
        renamed = _input_norm(ours)
        if renamed is not None and renamed not in file_names:
            file_names[renamed] = file_names.pop(ours)
    return file_names, unread


def _input_norm(name: str) -> str | None:
    """Return our name of the input norm of an EAGLE-3 layer after the first; None for other tensors.

    SGLang and TensorRT-LLM call it `hidden_norm`. Layers that also read the token embedding have a norm of each name.
    """
    match = re.fullmatch(r"layers\.([1-9]\d{0,3})\.hidden_norm\.weight", name)
    return f"layers.{match[1]}.input_layernorm.weight" if match else None


def check_shapes(head: nn.Module, shapes: Shapes, file_names: Mapping[str, str], where: str) -> None:
    """Check that the tensors of files are exactly those of a head.

    Args:
        head: The head; it may be on the meta device.
        shapes: Shapes of the tensors in the files, by our names.
        file_names: Names in the files, by our names.
        where: Name of the checkpoint, for the error message.

    Raises:
        HeadTensorsError: Tensors are missing, unknown, or have wrong shapes.
    """
    wanted = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}
    problems = {
        "missing tensors": sorted(name.removeprefix("module.") for name in wanted.keys() - shapes.keys()),
        "unknown tensors": sorted(file_names.get(name, name) for name in shapes.keys() - wanted.keys()),
        "wrong shapes": [
            f"{file_names.get(name, name)} {shapes[name]} instead of {wanted[name]}"
            for name in sorted(wanted.keys() & shapes.keys())
            if shapes[name] != wanted[name]
        ],
    }
    text = "; ".join(f"{kind}: {listed(names)}" for kind, names in problems.items() if names)
    if text:
        raise HeadTensorsError(f"{where}: the tensors do not match the config. {text}.")


def copy_checked(name: str, tensor: Tensor, where: str) -> Tensor:
    """Return a copy of a tensor after checking its dtype and values; integers become int64.

    Raises:
        CheckpointFormatError: The dtype is not supported, or a weight is not finite or too large for float16.
    """
    is_vocabulary = name in VOCABULARIES
    wanted = INTEGERS if is_vocabulary else FLOATS
    if tensor.dtype not in wanted:
        raise CheckpointFormatError(
            f"{where}: {name} is {tensor.dtype}, expected one of {', '.join(map(str, wanted))}.",
            "" if is_vocabulary else "Quantised heads are not supported, use the original weights.",
        )
    if is_vocabulary:
        return tensor.to(torch.long)
    largest = tensor.abs().max() if tensor.numel() else tensor.new_zeros(())
    if not bool(largest <= LARGEST_WEIGHT):  # false for NaN as well
        raise CheckpointFormatError(
            f"{where}: {name} has values that are not finite, or larger than {LARGEST_WEIGHT:g} (maximum of float16)."
        )
    return tensor.clone()


def in_one_dtype(tensors: Tensors) -> tuple[Tensors, torch.dtype]:
    """Return the tensors, with weights in the smallest dtype that represents all of them, and that dtype."""
    dtype = functools.reduce(torch.promote_types, (t.dtype for t in tensors.values() if t.is_floating_point()))
    return {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}, dtype


def completed(layout: Layout, fields: Fields, tensors: Tensors) -> Tensors:
    """Return the tensors with those that a layout leaves implicit, and with our names for vLLM's Medusa heads.

    Args:
        layout: The layout.
        fields: The checkpoint's config.
        tensors: The tensors by our names, on any device; on the meta device only shapes are computed.

    Raises:
        CheckpointFormatError: More than `MAX_SHARED_HEADS` heads share one lm_head.
        InvalidConfigError: `logit_scale` is invalid.
    """
    if layout.name == "vllm-medusa":
        return _vllm_medusa(fields, tensors)
    rows = tensors.get("embed_tokens.weight")
    tied = fields.get("tie_word_embeddings") is True and layout.config_class is Eagle3Config
    if not tied or rows is None or "lm_head.weight" in tensors:
        return tensors
    if "d2t" in tensors:
        rows = rows[(tensors["d2t"] + torch.arange(len(tensors["d2t"]), device=rows.device)).clamp(0, len(rows) - 1)]
    return {**tensors, "lm_head.weight": rows.clone()}


def _vllm_medusa(fields: Fields, tensors: Tensors) -> Tensors:
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


def in_vocabulary_order(tensors: Tensors, mask: Tensor | None, vocab_size: int | None, where: str) -> Tensors:
    """Sort the draft vocabulary by token id, and the rows of every lm_head with it.

    ModelOpt and NeMo sort it by frequency. A `d2t` of 0, 1, 2, ... holds ids instead of offsets if it covers the whole
    vocabulary, or if `t2d` selects exactly the first tokens (verl-SpeCo). Without `d2t` nothing is changed.

    Args:
        tensors: The tensors by our names.
        mask: `t2d` as stored, the mask of the target's tokens in the draft vocabulary; None if there is none.
        vocab_size: Number of the target's tokens; None if unknown.
        where: Name of the checkpoint, for error messages.

    Raises:
        CheckpointFormatError: Token ids are repeated or out of range, or `t2d` has an invalid dtype or selects other
            tokens.
    """
    if "d2t" not in tensors:
        return tensors
    offsets = tensors["d2t"]
    numbers = torch.arange(len(offsets), device=offsets.device)
    if mask is not None:
        if mask.dtype not in (torch.bool, *INTEGERS):
            raise CheckpointFormatError(f"{where}: t2d is {mask.dtype}, expected torch.bool.")
        mask = mask.flatten().bool()
    size = vocab_size or MAX_VOCABULARY
    first = None if mask is None else torch.arange(len(mask), device=offsets.device) < len(offsets)
    are_ids = len(offsets) == vocab_size or (mask is not None and first is not None and torch.equal(mask, first))
    ids = numbers if are_ids and torch.equal(offsets, numbers) else offsets + numbers
    ids, order = ids.sort()
    if bool((ids[1:] == ids[:-1]).any()) or int(ids[0]) < 0 or int(ids[-1]) >= size:
        raise CheckpointFormatError(f"{where}: d2t must yield distinct target ids from 0 to {size - 1}.")
    # buffers that were never set are ignored: t2d is all ones in SpecForge, zeros in AngelSlim, and d2t zeros
    is_unset = mask is not None and bool(mask.all() or not mask.any()) and not bool(offsets.any())
    is_whole = vocab_size is None or mask is None or len(mask) == vocab_size
    if mask is not None and not is_unset and not (is_whole and torch.equal(mask.nonzero().flatten(), ids)):
        raise CheckpointFormatError(f"{where}: t2d and d2t select different tokens.")
    sorted_rows = {
        name: tensor[order]
        for name, tensor in tensors.items()
        if name in ("lm_head.weight", "markov_head.markov_w2.weight") or re.fullmatch(r"heads\.\d+\.\d+\.weight", name)
    }
    return {**tensors, **sorted_rows, "d2t": ids - numbers}
