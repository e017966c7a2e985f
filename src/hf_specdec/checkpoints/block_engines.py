"""The layouts of block heads that `export_head` writes: configs, tensors, and reasons why a head does not fit.

Sources: z-lab/dflash (`dflash/model.py`), hao-ai-lab/JetSpec (`jetspec/models/draft_head.py`), vLLM
(`qwen3_dflash.py`), speculators 0.9 (`speculators/models/dflash` and `dspark`). Layouts are read by
`checkpoints/block_layouts.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hf_specdec.checkpoints.engines import Format, Tensors, base_model, layer_config, speculators_fields, state_of
from hf_specdec.checkpoints.export_refusals import is_partly_rotated
from hf_specdec.heads.dflash import FULL, SLIDING, DFlashHead
from hf_specdec.records import Fields
from hf_specdec.verification.features import LAST

# ----------------------------------------------------------------------------------------------- refusals


def _block_refusals(head: DFlashHead) -> Mapping[str, bool]:
    """Return the possible reasons why neither layout can hold a head, and whether each one applies."""
    config, is_cut = head.config, head.config.draft_vocab_size is not None
    return {
        "the format has norms of queries and keys (train with qk_norm=True)": not config.qk_norm,
        "`fc` has no bias (train with bias=False)": config.bias,
        "the MLP has no bias (train with mlp_bias=False)": config.mlp_bias,
        "biases of query, key and value require one of the output projection (train with attention_bias=True)":
            config.qkv_bias and not config.attention_bias,
        "the format rotates all dimensions of a head (train without partial_rotary_factor)": is_partly_rotated(config),
        "vLLM has no state after the final norm (train with other aux_hidden_state_layer_ids)":
            LAST in (config.aux_hidden_state_layer_ids or ()),
        "the layers that the head reads are not known (load it with model.load_drafter first)":
            config.aux_hidden_state_layer_ids is None,
        "the format uses the target's embedding, but this head has its own (model.load_drafter drops one that equals "
        "the target's)": config.own_embedding,
        "over the whole vocabulary the format uses the target's lm_head, but this head has its own (train with "
        "own_lm_head=False or with a draft_vocab_size)": config.own_lm_head and not is_cut,
        "with a draft vocabulary the format has an lm_head, but this head uses the target's (train with "
        "own_lm_head=True or draft_vocab_size=None)": is_cut and not config.own_lm_head,
    }  # fmt: skip


def _types(head: DFlashHead) -> list[str]:
    """Return the kind of attention of each layer."""
    return head.config.layer_types or [FULL] * head.config.num_hidden_layers


def _directions(head: DFlashHead) -> set[bool]:
    """Return whether the layers are causal within a block: one value if all have the same direction."""
    return {head.config.sliding_causal if kind == SLIDING else head.config.causal for kind in _types(head)}


def dflash_refusals(head: DFlashHead) -> Mapping[str, bool]:
    """Return the possible reasons why z-lab's layout cannot hold a head, and whether each one applies."""
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


def speculators_block_refusals(head: DFlashHead) -> Mapping[str, bool]:
    """Return the possible reasons why speculators' layout cannot hold a head, and whether each one applies."""
    types = _types(head)
    return {
        **_block_refusals(head),
        "its layers with full attention are bidirectional, those of this head are causal (dflash has causal ones)":
            FULL in types and head.config.causal,
        "its sliding windows count from the root, those of this head from every slot (dflash has them)":
            SLIDING in types and not head.config.window_from_anchor,
    }  # fmt: skip


# ----------------------------------------------------------------------------------------------- configurations


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
    if config.all_children != causal:  # JetSpec's trees are the reader's default for causal heads only
        own["all_children"] = config.all_children
    depth = {} if config.num_target_layers is None else {"num_target_layers": config.num_target_layers}
    words = {} if config.draft_vocab_size is None else {"draft_vocab_size": config.draft_vocab_size}
    return {
        **_layers_config(head),
        "architectures": ["DFlashDraftModel"],
        "block_size": config.block_size,
        "dflash_config": own,
        **depth,
        **words,
        **base_model(head),
    }


def _is_dspark(head: DFlashHead) -> bool:
    return head.config.markov_rank > 0 or head.config.confidence_head


def _speculators_config(head: DFlashHead) -> Fields:
    """Return the config in speculators' layout. The type is `dspark` if the head has a Markov or confidence head."""
    config = head.config
    kind, architecture = ("dspark", "DSparkDraftModel") if _is_dspark(head) else ("dflash", "DFlashDraftModel")
    fields = {
        **speculators_fields(head, kind, architecture, _layers_config(head), config.max_depth),
        "aux_hidden_state_layer_ids": config.aux_hidden_state_layer_ids,
        "block_size": config.block_size,
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.sample_from_anchor,
        # speculators reads this for sliding layers only; vLLM 0.32 makes all layers causal if it is false
        "sliding_window_non_causal": not (SLIDING in _types(head) and config.sliding_causal),
        "target_hidden_size": None,
    }
    if kind == "dflash":
        return fields
    return {
        **fields,
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov_head_type,
        "enable_confidence_head": config.confidence_head,
        "confidence_head_with_markov": config.confidence_with_markov,
    }


# ----------------------------------------------------------------------------------------------- tensors and readers


def _with_mask(head: DFlashHead) -> Tensors:
    """Return the tensors; for a draft vocabulary also `t2d` `[V]`, the mask of its tokens."""
    tensors, ids = state_of(head), head.hot_token_ids
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


BLOCK_FORMATS: dict[str, Format] = {
    "dflash": Format(
        DFlashHead, dflash_refusals, _dflash_config, state_of, _dflash_readers, holds=("all_children",)
    ),
    "speculators": Format(
        DFlashHead, speculators_block_refusals, _speculators_config, _with_mask, _speculators_readers
    ),
}  # fmt: skip
"""The formats of `export_head` for block heads, except our own layout."""
