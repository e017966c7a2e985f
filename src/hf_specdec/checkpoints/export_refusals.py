"""Reasons why a head does not fit a layout that `export_head` writes.

Each `*_refusals` function returns all possible reasons as keys, and whether each applies to the head as values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hf_specdec.heads.eagle import EagleHead
from hf_specdec.heads.eagle3 import Eagle3Head
from hf_specdec.heads.medusa import MedusaHeads
from hf_specdec.heads.mtp import MtpHead
from hf_specdec.verification.features import LAST

PLAIN_THETA = 10000.0
"""Rotary base that EAGLE's classes for scaled rotary positions use, regardless of the config."""


def _tied(head: MedusaHeads) -> bool:
    """Whether each Medusa head consists of equal residual blocks."""
    blocks = [list(parts.children())[: head.config.medusa_num_layers] for parts in head.heads]
    return all(
        torch.equal(tensor, other.state_dict()[name])
        for first, *others in blocks
        for other in others
        for name, tensor in first.state_dict().items()
    )


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


def medusa_refusals(head: MedusaHeads) -> Mapping[str, bool]:
    """Return the possible reasons why Medusa's code cannot read heads, and whether each one applies."""
    config = head.config
    return {
        "Medusa's code repeats one residual block per head, but these heads have "
        f"{config.medusa_num_layers} different ones": not config.shared_lm_head and not _tied(head),
        "the format has no draft vocabulary (train with draft_vocab_size=None)": config.draft_vocab_size is not None,
        "with a shared lm_head, the format has one residual block per head": config.shared_lm_head
        and config.medusa_num_layers != 1,
    }


def eagle_refusals(head: EagleHead) -> Mapping[str, bool]:
    """Return the possible reasons why EAGLE's code (1 and 2) cannot read a head, and whether each one applies."""
    config = head.config
    return {
        "the format has no draft vocabulary (engines read one from another file)": config.draft_vocab_size is not None,
        "the format has no layernorms": config.layernorms,
        "the format has no norms of queries and keys": config.qk_norm,
        "the format has no biases in the output projection and the MLP": config.attention_bias or config.mlp_bias,
        **_rotary_refusals(head, "vLLM and SGLang support it, but in no other format for EAGLE-1"),
        "the format has no sliding window": config.sliding_window is not None,
    }


def _plain_layer_refusals(head: Eagle3Head) -> Mapping[str, bool]:
    config, ids = head.config, head.config.eagle_aux_hidden_state_layer_ids
    return {
        "the format has no `norm_before_residual` (speculators has it)": config.norm_before_residual,
        "no engine reads the last hidden state after the final norm": LAST in (ids or ()),
        "no engine reads the token embedding in layers after the first": config.embedding_in_every_layer,
        "the format has no biases and no norms of queries and keys": config.attention_bias or config.qkv_bias
        or config.mlp_bias or config.qk_norm or config.bias,
        "the format has no sliding window (speculators has one)": config.sliding_window is not None,
    }  # fmt: skip


def eagle3_refusals(head: Eagle3Head) -> Mapping[str, bool]:
    """Return the possible reasons why EAGLE's code (3) cannot read a head, and whether each one applies."""
    ids = head.config.eagle_aux_hidden_state_layer_ids
    paper = are_paper_layers(ids)
    return {
        **_plain_layer_refusals(head),
        **_rotary_refusals(head, "for vLLM use the format speculators, for SGLang sglang"),
        "the format has no `fc_norm` (sglang and speculators have it)": head.config.fc_norm,
        "the format has no `norm_before_fc` (sglang and speculators have it)": head.config.norm_before_fc,
        "the format has no `norm_output` (sglang and speculators have it)": head.config.norm_output,
        "the format has no `logit_scale`": head.config.logit_scale != 1,
        "the format has an lm_head, but this head uses the target's (sglang supports it)": not head.config.own_lm_head,
        "the format has one layer (sglang and speculators have several)": head.config.num_hidden_layers > 1,
        f"its heads must read the layers 2, L/2 and L-3, not {ids} (sglang and speculators read any)": not paper,
    }


def sglang_refusals(head: Eagle3Head) -> Mapping[str, bool]:
    """Return the possible reasons why SGLang cannot read a head, and whether each one applies."""
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


def speculators_refusals(head: Eagle3Head) -> Mapping[str, bool]:
    """Return the possible reasons why speculators cannot read a head, and whether each one applies."""
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


def mtp_refusals(head: MtpHead) -> Mapping[str, bool]:
    """Return the possible reasons why speculators cannot read an MTP module, and whether each one applies."""
    config = head.config
    return {
        "the format has no draft vocabulary": config.draft_vocab_size is not None,
        "the format uses the target's embedding, but this module has its own": config.own_embedding,
        "the format needs Qwen3's layer, with norms of queries and keys (train with qk_norm=True)": not config.qk_norm,
        "`input_proj` and the MLP have no bias": config.bias or config.mlp_bias,
        "biases of query, key and value require one of the output projection": config.qkv_bias
        and not config.attention_bias,
        "the format has no sliding window": config.sliding_window is not None,
        "the format rotates all dimensions of a head": is_partly_rotated(config),
    }


def are_paper_layers(ids: Sequence[int] | None) -> bool:
    """Whether layer ids are 2, L/2 and L-3 for some number of layers L; None stands for them."""
    return ids is None or (len(ids) == 3 and ids[0] == 2 and ids[1] == (ids[2] + 3) // 2)


def is_partly_rotated(config: Any) -> bool:
    """Whether only some dimensions of every attention head are rotated."""
    return config.rope_parameters.get("partial_rotary_factor", 1) not in (None, 1)
