"""What a checkpoint is: a head in one of the published layouts, a kind that is named but not read, or an assistant.

Sources: the repositories of Medusa, EAGLE, SpecForge, ModelOpt, SGLang, Text Generation Inference and speculators;
PARD (https://github.com/AMD-AGI/PARD), whose assistants are language models that predict tokens at mask tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hf_specdec.checkpoints.block_layouts import BLOCK_LAYOUTS
from hf_specdec.checkpoints.draft_layers import VERIFIER
from hf_specdec.checkpoints.eagle_layouts import EAGLE_LAYOUTS, ambiguity_of, with_tied_lm_head
from hf_specdec.checkpoints.files import TensorFiles
from hf_specdec.checkpoints.layout import Layout, Names, lookup, read_by
from hf_specdec.checkpoints.medusa_layouts import MEDUSA_LAYOUTS, WHOLE_MODELS
from hf_specdec.checkpoints.mtp_layouts import MTP_LAYOUTS
from hf_specdec.config import AUTO
from hf_specdec.errors import CheckpointFormatError, listed
from hf_specdec.heads.dflash import DFlashHead
from hf_specdec.heads.eagle import EagleHead
from hf_specdec.heads.eagle3 import Eagle3Head
from hf_specdec.heads.head import NATIVE_LAYOUT
from hf_specdec.heads.layer_mtp import LayerMtpHead
from hf_specdec.heads.medusa import MedusaHeads
from hf_specdec.heads.mtp import MtpHead
from hf_specdec.records import Fields, shortened

Head = EagleHead | Eagle3Head | MtpHead | LayerMtpHead | MedusaHeads | DFlashHead

HEADS: tuple[type[Head], ...] = (EagleHead, Eagle3Head, MtpHead, MedusaHeads, DFlashHead)
"""Heads that can be stored in our own layout."""


_NATIVE = tuple(
    Layout(
        name=NATIVE_LAYOUT,
        head_class=head,
        writers="hf-specdec",
        marks={"model_type": head.config_class.model_type},
        unread=(),
        complete=with_tied_lm_head if head is Eagle3Head else None,
    )
    for head in HEADS
)

LAYOUTS = (*BLOCK_LAYOUTS, *_NATIVE, *MTP_LAYOUTS, *MEDUSA_LAYOUTS, *EAGLE_LAYOUTS)
"""All layouts that can be read; the first that matches is used."""


def read_head(fields: Fields, files: TensorFiles, where: str) -> Head:
    """Create a head from the config and the tensors of a checkpoint; `where` is its name for error messages.

    The head is on the CPU, in eval mode and in the smallest dtype that represents all tensors. `layout` is set, and
    `ambiguity` if the files of an EAGLE-3 head are from elsewhere.
    """
    layout = find_layout(fields, frozenset(files.shapes), where)
    head: Head = read_by(layout, fields, files, where)
    if isinstance(head, Eagle3Head) and layout.name != NATIVE_LAYOUT:
        head.ambiguity = ambiguity_of(layout, fields)
    if layout.name in WHOLE_MODELS:
        head.config.base_model_name_or_path = where
    return head


def find_layout(fields: Fields, names: Names, where: str) -> Layout:
    """Return the layout of a checkpoint, given its config, its tensors' names and its name for error messages."""
    known = f"Supported layouts: {', '.join(dict.fromkeys(layout.name for layout in LAYOUTS))}."
    kind = _unsupported(fields, names)
    if kind is not None:
        other = f"Use another head of its target (`hf-specdec find TARGET`), or none ({AUTO!r} needs none)."
        raise CheckpointFormatError(f"{where} is {kind}, which is not supported.", f"{other} {known}")
    if is_assistant_config(fields):
        raise assistant_refusal(fields, where)
    for layout in LAYOUTS:
        if layout.matches(fields, names):
            return layout
    # a whole causal LM has all layers that its config counts
    classes, count = fields.get("architectures"), fields.get("num_hidden_layers")
    named = [name for name in classes if str(name).endswith("ForCausalLM")] if isinstance(classes, list) else []
    layers = {found[1] for name in names if (found := re.match(r"(?:[a-z]\w*\.)+(\d+)\.", name))}
    if named and count == len(layers) and len(layers) > 1:
        raise CheckpointFormatError(
            f"{where} is a whole model ({shortened(named[0])}), not a head in a known layout.",
            "To draft with it, pass it as assistant_model= to generate(); or give a head.",
        )
    kinds = {key: fields[key] for key in ("model_type", "architectures", "speculators_model_type") if key in fields}
    raise CheckpointFormatError(
        f"{where} is not a head in a known layout: its config has {str(kinds)[:200]}, its tensors are "
        f"{listed(sorted(names))}.",
        known,
    )


HEAD_FIELDS = ("speculators_model_type", "medusa_num_heads", "medusa", "draft_vocab_size", "eagle_config",
               "dflash_config")  # fmt: skip
"""Config fields that only heads have."""

HEAD_ARCHITECTURES = (
    "LlamaForCausalLMEagle3", "LlamaForCausalLMEagle3Deep", "EAGLE3LlamaForCausalLM", "Eagle3LlamaForCausalLM",
    "LlamaEagle3DraftModel", "Qwen3Eagle3Model", "MedusaModel",
    "DFlashDraftModel", "Qwen3DFlashDraftModel", "Qwen3DSparkModel",
    "PEagleDraftModel", "PeagleLlamaForCausalLM", "LlamaForCausalLMPeagle",
    "MuseGlimmerAssistantModel",
)  # fmt: skip


def is_head_config(fields: Fields) -> bool:
    """Whether a config can only be a head's; False for EAGLE-1 and some EAGLE-3 heads, whose configs are a Llama's."""
    architectures, kind = fields.get("architectures"), fields.get("model_type")
    return (
        any(kind == head.config_class.model_type for head in HEADS)
        or any(key in fields for key in HEAD_FIELDS)
        or any(architectures == [name] for name in HEAD_ARCHITECTURES)
    )


def target_name(fields: Fields) -> Any:
    """Return the target that a head's config names, in any layout and unchecked; None if it names none.

    Also None for a Medusa config of a whole model: whether the checkpoint includes the target depends on its tensors
    (`WHOLE_MODELS`).
    """
    if "num_hidden_layers" in fields and any(key.startswith("medusa") for key in fields):
        return None
    found = (lookup(fields, path) for path in ("base_model_name_or_path", VERIFIER))
    return next((name for name in found if name is not None), None)


# ----------------------------------------------------------------------------------------------- kinds not read

SPECULATORS = ("eagle", "eagle3", "peagle", "mtp", "dflash", "dflash2", "dspark")
"""Values of `speculators_model_type` that are read."""

UNREAD_SPECULATORS = {
    "xpress": "an XPress drafter (speculators)",
    "mlp": "an MLP speculator (speculators)",
    "independent": "an independent draft model (speculators)",
}
UNREAD_ARCHITECTURES = {
    "MLPSpeculatorPreTrainedModel": "an MLP speculator",
}

DSPARK_LAYERS = {
    "": "DeepSeek-V4", "DeepseekV4": "DeepSeek-V4", "Gemma4": "Gemma 4", "K3": "Kimi-K3", "KimiK3": "Kimi-K3"
}  # fmt: skip
"""Models with whose layers DSpark drafters are made, by what precedes `DSpark` in the name of their class."""


def _unsupported(fields: Fields, names: Names) -> str | None:
    """Return a description of a head of a kind that is recognised but not read; None for others.

    First come relatives of DFlash whose layers or selection of tokens differ.
    """
    projector = lookup(fields, "dflash_config.projector_type")
    is_block = names & {"hidden_norm.weight", "model.hidden_norm.weight"}
    is_xpress = lookup(fields, "dflash_config.xpress_rank|xpress_rank") is not None
    if is_xpress or (is_block and any(name.endswith("mix_l") or "readout" in name for name in names)):
        return "an XPress drafter, which refines the block's logits in several passes"
    if projector not in (None, "dflash", "domino") and "dflash_config" in fields:
        return f"a DFlash drafter with the projector_type {shortened(projector)}"
    kind = fields.get("speculators_model_type")
    if kind is not None and kind not in SPECULATORS:
        known = UNREAD_SPECULATORS.get(kind) if isinstance(kind, str) else None
        return known or f"a speculators checkpoint of the unknown type {shortened(kind)}"
    architectures = fields.get("architectures")
    architecture = architectures[0] if isinstance(architectures, list) and architectures else None
    if isinstance(architecture, str) and architecture in UNREAD_ARCHITECTURES:
        return UNREAD_ARCHITECTURES[architecture]
    dspark = re.fullmatch(r"(\w{0,40})DSpark(Draft)?Model", str(architecture))
    if dspark is not None and kind is None and dspark[1] != "Qwen3":
        layers = DSPARK_LAYERS.get(dspark[1], dspark[1])
        return f"a DSpark drafter ({architecture}) with layers of {layers} or settings that are not DeepSpec's"
    if "efficient_lm_head_config" in fields or architecture == "LlamaForCausalLMEagle4":
        return "an EAGLE-4 head, whose factored lm_head has no implementation under a free licence"
    if any(name.startswith("parallel_draft_heads.") for name in names):
        return "an EAGLE head with parallel Medusa heads (ModelOpt's parallel_draft_step)"
    is_eagle = any(name.endswith((".hidden_norm.weight", "fc.weight")) for name in names)
    latent = re.compile("kv_a_proj_with_mqa|kv_b_proj|q_a_proj")  # tensors of multi-head latent attention
    is_latent = fields.get("kv_lora_rank") or any(map(latent.search, names))
    if is_eagle and is_latent:
        return "an EAGLE-3 head with multi-head latent attention (of a DeepSeek or Kimi target)"
    if is_eagle and lookup(fields, "eagle_config.use_aux_hidden_state") is False:
        return "an EAGLE-3 layer on the final hidden state, without fc (eagle_config.use_aux_hidden_state is false)"
    quantised = fields.get("quantization_config")
    if quantised:
        nested = quantised if isinstance(quantised, dict) else {}
        method = nested.get("quant_algo") or nested.get("quant_method") or "unknown method"
        return f"a quantised head (quantization_config: {shortened(method)})"
    return None


# ----------------------------------------------------------------------------------------------- assistants

SHARING_ASSISTANTS = ("gemma4_assistant", "gemma4_unified_assistant")
"""Values of `model_type` of assistants that attend to their target's keys and values."""
MASK_TOKEN_FIELDS = ("pard_token", "ptd_token_id")
"""Config fields with the id of the mask token: PARD's, and another name that vLLM reads."""

PARD_2 = (
    "a PARD-2 assistant, which reads hidden states of the target through the target_proj in its warp_model.bin, a "
    "pickle; this is not supported"
)
"""Description of a PARD-2 assistant for error messages."""
PARD_2_HINT = (
    'Use a PARD assistant, or assistant_model= with speculative="draft_model", which drafts token by token and needs '
    "no hidden states."
)
"""What to do instead of loading a PARD-2 assistant."""


def mask_token_in(fields: Mapping[str, Any]) -> Any:
    """Return the mask token that a config names, unchecked; None if it names none."""
    return next((fields[name] for name in MASK_TOKEN_FIELDS if fields.get(name) is not None), None)


def needs_features(fields: Mapping[str, Any]) -> bool:
    """Whether a config is that of a PARD-2 assistant, which reads hidden states of the target."""
    return fields.get("spd_type") == "pard2" or bool(fields.get("pard2"))


def drafts_in_parallel(fields: Mapping[str, Any]) -> bool:
    """Whether a causal language model with this config is a PARD assistant (not PARD-2)."""
    return mask_token_in(fields) is not None and not needs_features(fields)


def is_assistant_config(fields: Fields) -> bool:
    """Whether a `config.json` is that of a PARD, PARD-2 or Gemma 4 assistant, and not of a head with a mask token."""
    if fields.get("model_type") in SHARING_ASSISTANTS:
        return True
    architectures = fields.get("architectures")
    names = map(str, architectures) if isinstance(architectures, list) else ()
    if is_head_config(fields) or any(name in UNREAD_ARCHITECTURES for name in names):
        return False
    if fields.get("pard_token") is None and fields.get("parallel_drafting"):  # as in configs of P-EAGLE heads
        return False
    return mask_token_in(fields) is not None or needs_features(fields)


def assistant_kind(fields: Mapping[str, Any]) -> str:
    """Return what kind of assistant a config is of, for error messages."""
    return "Gemma 4 assistant" if fields.get("model_type") in SHARING_ASSISTANTS else "PARD assistant"


def assistant_refusal(fields: Mapping[str, Any], where: str) -> CheckpointFormatError:
    """Return the error for an assistant where a head is expected, given its config and name."""
    if needs_features(fields):
        return CheckpointFormatError(f"{where} is {PARD_2}.", PARD_2_HINT)
    return CheckpointFormatError(
        f"{where} is a {assistant_kind(fields)}, a whole language model and not a head.",
        "Load it with model.load_drafter(path_or_hub_id), or pass it to generate() as assistant_model=.",
    )
