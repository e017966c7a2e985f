"""Types and ranges of all fields of a head's config, checked before anything is built from it.

Configs are untrusted: only the fields in these tables are passed to transformers. The limits are far above published
heads, and far below values that would exhaust memory or take hours. Types are strict: `"1"` is not a number, and 1 is
not a bool.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers.activations import ACT2FN

from hf_specdec.errors import InvalidConfigError
from hf_specdec.validation import (
    MAX_NODES,
    MAX_STEPS,
    MAX_TOP_K,
    TRUTH,
    Rule,
    check_values,
    integer,
    is_number,
    list_of,
    number,
    one_of,
    validate_choices,
)

MAX_VOCABULARY, MAX_WIDTH, MAX_HEADS = 2**24, 2**18, 2**12
MAX_POSITIONS = 2**31 - 1
MAX_PARTS = 128
"""Maximum number of Medusa heads, of blocks per head, of EAGLE-3 layers, and of feature layers."""
MAX_TEXT = 500
"""Maximum length of a text, in characters."""
MAX_FACTS = 100
"""Maximum number of entries in `recipe` and `tau`, and in a list in them."""

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
"""Types of rotary positions that draft layers support."""


TEXT = Rule(f"text of at most {MAX_TEXT} characters", lambda value: isinstance(value, str) and len(value) <= MAX_TEXT)
TOKEN = integer(0, MAX_VOCABULARY)
DTYPE = one_of("float32", "float64", "float16", "bfloat16")


def _is_tree(value: Any) -> bool:
    if value == "dynamic" or value is None:
        return True
    if not isinstance(value, list) or len(value) >= MAX_NODES:
        return False
    if not all(isinstance(path, list) and len(path) <= MAX_STEPS for path in value):
        return False
    try:
        return max(max(path) for path in validate_choices(value)) < MAX_TOP_K
    except InvalidConfigError:
        return False


TREE = Rule(
    f"'dynamic' or a list of fewer than {MAX_NODES} paths of ranks, at most {MAX_STEPS} deep, with ranks below "
    f"{MAX_TOP_K} and with every path's parent in the list",
    _is_tree,
)  # fmt: skip


def _are_facts(value: Any) -> bool:
    def plain(entry: Any) -> bool:
        return entry is None or isinstance(entry, bool) or is_number(entry) or TEXT.holds(entry)

    def holds(entry: Any) -> bool:
        return plain(entry) or (isinstance(entry, list) and len(entry) <= MAX_FACTS and all(map(plain, entry)))

    return isinstance(value, dict) and len(value) <= MAX_FACTS and all(map(TEXT.holds, value)) and all(
        map(holds, value.values())
    )  # fmt: skip


FACTS = Rule(f"an object with at most {MAX_FACTS} numbers, short texts or lists of them", _are_facts)

ROTARY: Mapping[str, Rule] = {
    "rope_type": one_of(*ROPE_TYPES),
    "type": one_of(*ROPE_TYPES),
    "rope_theta": number(1e-3, 1e12),
    "factor": number(1e-3, 1e6),
    "original_max_position_embeddings": integer(1, MAX_POSITIONS),
    "low_freq_factor": number(1e-3, 1e6),
    "high_freq_factor": number(1e-3, 1e6),
    "attention_factor": number(1e-3, 1e3),
    "beta_fast": number(1e-3, 1e6),
    "beta_slow": number(1e-3, 1e6),
    "mscale": number(0, 1e3),
    "mscale_all_dim": number(0, 1e3),
    "partial_rotary_factor": number(1e-3, 1),
    "truncate": TRUTH,
}
"""Rules of the fields in `rope_parameters` and `rope_scaling`; each field may be null."""


def _is_rotary(value: Any) -> bool:
    return isinstance(value, dict) and all(
        name in ROTARY and (entry is None or ROTARY[name].holds(entry)) for name, entry in value.items()
    )


ROPE = Rule(
    "an object with any of " + ", ".join(f"{name} ({rule.expected})" for name, rule in ROTARY.items()), _is_rotary
)

LAYER: Mapping[str, Rule] = {
    "vocab_size": integer(1, MAX_VOCABULARY),
    "hidden_size": integer(1, MAX_WIDTH),
    "intermediate_size": integer(1, 4 * MAX_WIDTH),
    "num_hidden_layers": integer(1, 1),
    "num_attention_heads": integer(1, MAX_HEADS),
    "num_key_value_heads": integer(1, MAX_HEADS),
    "head_dim": integer(2, MAX_WIDTH),
    "hidden_act": Rule("an activation of transformers", lambda value: isinstance(value, str) and value in ACT2FN),
    "max_position_embeddings": integer(1, MAX_POSITIONS),
    "initializer_range": number(0, 10),
    "rms_norm_eps": number(1e-15, 1),
    "attention_bias": TRUTH,
    "mlp_bias": TRUTH,
    "rope_parameters": ROPE,
}
"""Fields of a Llama config that define a draft layer."""

COMMON_FIELDS: Mapping[str, Rule] = {
    "base_model_name_or_path": TEXT,
    "recipe": FACTS,
    "tau": FACTS,
    "num_draft_tokens": integer(1, MAX_NODES),
    "tree": TREE,
    "dtype": DTYPE,
}
"""Fields that EAGLE, EAGLE-3, MTP and Medusa configs have in common."""

EAGLE: Mapping[str, Rule] = {
    **LAYER, **COMMON_FIELDS,
    "pad_token_id": TOKEN,
    "bos_token_id": TOKEN,
    "eos_token_id": Rule("a token id or a list", lambda value: TOKEN.holds(value) or list_of(TOKEN, 100).holds(value)),
    **dict.fromkeys(("bias", "qkv_bias", "qk_norm", "layernorms", "own_embedding"), TRUTH),
    "sliding_window": integer(1, MAX_POSITIONS),
    "trained_length": integer(1, MAX_POSITIONS),
    "draft_vocab_size": integer(1, MAX_VOCABULARY),
    "num_steps": integer(1, MAX_STEPS),
    "top_k": integer(1, MAX_TOP_K),
}  # fmt: skip

EAGLE3: Mapping[str, Rule] = {
    **EAGLE,
    "num_hidden_layers": integer(1, MAX_PARTS),
    "eagle_aux_hidden_state_layer_ids": list_of(integer(-1, 2**16), MAX_PARTS),
    "target_hidden_size": integer(1, MAX_WIDTH),
    "logit_scale": number(1e-6, 1e6),
    "mask_token_id": TOKEN,
    **dict.fromkeys(("norm_before_residual", "fc_norm", "norm_before_fc", "norm_output"), TRUTH),
    **dict.fromkeys(("own_lm_head", "tie_word_embeddings", "embedding_in_every_layer"), TRUTH),
}

DFLASH: Mapping[str, Rule] = {
    **{name: rule for name, rule in EAGLE.items() if name not in ("bias", "layernorms")},
    "vocab_size": integer(0, MAX_VOCABULARY),
    "num_hidden_layers": integer(1, MAX_PARTS),
    "num_target_layers": integer(1, 2**16),
    "block_size": integer(1, MAX_STEPS),
    "mask_token_id": TOKEN,
    "aux_hidden_state_layer_ids": list_of(integer(-1, 2**16), MAX_PARTS),
    "layer_types": list_of(one_of("full_attention", "sliding_attention"), MAX_PARTS),
    **dict.fromkeys(("input_embedding_scale", "logit_multiplier", "logit_softcap"), number(1e-6, 1e6)),
    "conv_kernel_size": integer(0, MAX_STEPS),
    "selector_top_k": integer(0, MAX_TOP_K),
    **dict.fromkeys(
        ("conv_group_size", "selector_rank", "lilicorr_hidden_size", "gru_hidden_dim"), integer(0, MAX_WIDTH)
    ),
    "lilicorr_candidate_topk": integer(0, MAX_TOP_K),
    "lilicorr_num_layers": integer(1, MAX_PARTS),
    "lilicorr_num_heads": integer(1, MAX_HEADS),
    "lilicorr_factor_dim": integer(1, MAX_WIDTH),
    "lilicorr_mlp_ratio": number(1e-2, 1e2),
    "lilicorr_vector_eps": number(1e-15, 1),
    "lilicorr_logit_scale": number(1e-6, 1e6),
    "markov_rank": integer(0, MAX_WIDTH),
    "markov_head_type": one_of("vanilla", "gated", "rnn", "domino"),
    **dict.fromkeys(("bias", "causal", "sliding_causal", "window_from_anchor", "sample_from_anchor"), TRUTH),
    **dict.fromkeys(("confidence_head", "confidence_with_markov", "own_lm_head", "all_children"), TRUTH),
}

MTP: Mapping[str, Rule] = {name: rule for name, rule in EAGLE.items() if name != "layernorms"}

LAYER_MTP: Mapping[str, Rule] = {
    **{name: rule for name, rule in LAYER.items() if name not in ("num_hidden_layers", "mlp_bias")},
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), integer(1, MAX_WIDTH)),
    **dict.fromkeys(("num_experts", "num_experts_per_tok"), integer(1, MAX_HEADS)),
    "decoder_sparse_step": integer(1, MAX_HEADS),
    "norm_topk_prob": TRUTH,
}
"""Fields of a Qwen3-Next or Qwen3.5 text config that define an MTP module."""

MEDUSA: Mapping[str, Rule] = {
    **COMMON_FIELDS,
    "hidden_size": integer(1, MAX_WIDTH),
    "vocab_size": integer(1, MAX_VOCABULARY),
    "medusa_num_heads": integer(1, MAX_PARTS),
    "medusa_num_layers": integer(1, MAX_PARTS),
    "shared_lm_head": TRUTH,
    "draft_vocab_size": integer(1, MAX_VOCABULARY),
}

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("residual_multiplier", "embedding_multiplier", "logits_scaling"), (None, 1)),
    **dict.fromkeys(("attention_multiplier", "query_pre_attn_scalar", "attn_logit_softcapping"), (None,)),
    **dict.fromkeys(("final_logit_softcapping", "attention_chunk_size", "quantization_config"), (None,)),
}
"""Fields of other models' configs that would change what a layer computes, and the values with which they do not."""

THIRD_PARTY_LAYER: Mapping[str, Rule] = {
    **LAYER,
    "rope_theta": ROTARY["rope_theta"],
    "rope_scaling": ROPE,
    "partial_rotary_factor": ROTARY["partial_rotary_factor"],
    "layer_types": list_of(TEXT, 1),
    "sliding_window": integer(1, MAX_POSITIONS),
    "use_sliding_window": TRUTH,
}
"""Fields that are read from the layer configs of third-party heads."""


def checked(fields: Mapping[str, Any], rules: Mapping[str, Rule]) -> dict[str, Any]:
    """Return the fields that have a rule, after checking them; null is always allowed and other fields are dropped.

    Example: `checked({"bias": True, "attn_implementation": "org/kernel"}, EAGLE)` is `{"bias": True}`.
    """
    known = {name: value for name, value in fields.items() if name in rules}
    given = {name: value for name, value in known.items() if value is not None}
    check_values({name: _listed(value) for name, value in given.items()}, rules)
    heads, groups = given.get("num_attention_heads"), given.get("num_key_value_heads", 1)
    if heads is not None and heads % groups:  # one of them may be the target's, which `DraftAttention` checks
        raise InvalidConfigError(f"`num_key_value_heads` {groups} must divide `num_attention_heads` {heads}.")
    if given.get("head_dim", 2) % 2:
        raise InvalidConfigError(f"`head_dim` must be even, got {given['head_dim']}.")
    top_k, steps = given.get("top_k", 1), given.get("num_steps", 1)
    if top_k + (steps - 1) * top_k**2 > _MAX_CANDIDATES:
        raise InvalidConfigError(
            f"A tree of `num_steps` {steps} and `top_k` {top_k} has more than {_MAX_CANDIDATES} candidates."
        )
    return known


def _listed(value: Any) -> Any:
    """Return a value with lists instead of tuples, as in JSON."""
    return [_listed(entry) for entry in value] if isinstance(value, list | tuple) else value


_MAX_CANDIDATES = 2**20
"""Maximum number of candidates of one tree, before it is pruned to `num_draft_tokens`."""
