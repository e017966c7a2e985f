"""Heads that are recognised but not read, so that the error message can name them."""

from __future__ import annotations

from hf_specdec.checkpoints.layouts import Names, lookup
from hf_specdec.heads.schema import shown
from hf_specdec.records import Fields

SPECULATORS = ("eagle", "eagle3", "mtp", "dflash", "dspark")
"""Values of `speculators_model_type` that are read."""

SPECULATORS_TYPES = {
    "peagle": "a P-EAGLE head (speculators)",
    "dflash2": "a DFlash2 drafter (speculators)",
    "xpress": "an XPress drafter (speculators)",
    "mlp": "an MLP speculator (speculators)",
    "independent": "an independent draft model (speculators)",
}
ARCHITECTURES = {
    "PEagleDraftModel": "a P-EAGLE head",
    "PeagleLlamaForCausalLM": "a P-EAGLE head",
    "LlamaForCausalLMPeagle": "a P-EAGLE head",
    "MLPSpeculatorPreTrainedModel": "an MLP speculator",
    "Gemma4AssistantForCausalLM": "a Gemma 4 assistant, which attends to its target's keys and values",
    "Gemma4UnifiedAssistantForCausalLM": "a Gemma 4 assistant, which attends to its target's keys and values",
}
MLA_TENSORS = ("kv_a_proj_with_mqa", "kv_b_proj", "q_a_proj")
"""Tensors of multi-head latent attention."""


def unsupported_kind(fields: Fields, names: Names) -> str | None:
    """Return a description of an unsupported head, for an error message; None if no unsupported kind is recognised.

    Args:
        fields: Its config.
        names: Names of its tensors.
    """
    kind = fields.get("speculators_model_type")
    if kind is not None and kind not in SPECULATORS:
        known = SPECULATORS_TYPES.get(kind) if isinstance(kind, str) else None
        return known or f"a speculators checkpoint of the unknown type {shown(kind)}"
    architectures = fields.get("architectures")
    architecture = architectures[0] if isinstance(architectures, list) and architectures else None
    if isinstance(architecture, str) and architecture in ARCHITECTURES:
        return ARCHITECTURES[architecture]
    if fields.get("parallel_drafting") or any(name.endswith("mask_hidden") for name in names):
        return "a P-EAGLE head"
    if any(name.startswith("parallel_draft_heads.") for name in names):
        return "an EAGLE head with parallel Medusa heads (ModelOpt's parallel_draft_step)"
    if _is_eagle(names) and (
        fields.get("kv_lora_rank") or any(part in name for name in names for part in MLA_TENSORS)
    ):
        return "an EAGLE-3 head with multi-head latent attention (of a DeepSeek or Kimi target)"
    if _is_eagle(names) and lookup(fields, "eagle_config.use_aux_hidden_state") is False:
        return "an EAGLE-3 layer on the final hidden state, without fc (eagle_config.use_aux_hidden_state is false)"
    if fields.get("quantization_config"):
        return f"a quantised head ({_quantiser(fields)})"
    return None


def _is_eagle(names: Names) -> bool:
    return any(name.endswith((".hidden_norm.weight", "fc.weight")) for name in names)


def _quantiser(fields: Fields) -> str:
    config = fields["quantization_config"]
    method = config.get("quant_method") or config.get("quant_algo") if isinstance(config, dict) else None
    return f"quantization_config: {shown(method or 'unknown method')}"
