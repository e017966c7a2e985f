"""The published layouts of heads, as a table that `checkpoints/formats.py` interprets.

Sources: the repositories of Medusa, EAGLE, SpecForge, ModelOpt, SGLang, Text Generation Inference and speculators.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hf_specdec.heads.base import NATIVE_LAYOUT
from hf_specdec.heads.dflash import DFlashConfig
from hf_specdec.heads.eagle import EagleConfig
from hf_specdec.heads.eagle3 import Eagle3Config
from hf_specdec.heads.medusa import MedusaConfig
from hf_specdec.heads.mtp import MtpConfig
from hf_specdec.records import Fields

Names = frozenset[str]

ConfigClass = type[EagleConfig] | type[Eagle3Config] | type[MtpConfig] | type[MedusaConfig] | type[DFlashConfig]


@dataclass(frozen=True, slots=True)
class Layout:
    """A way to store a head: how it is recognised, and where its fields and tensors are."""

    name: str
    config_class: ConfigClass
    matches: Callable[[Fields, Names], bool]  # given config and tensor names
    writers: str  # programs that write it
    fields: Mapping[str, str] = field(default_factory=dict)  # our field: dotted path in config.json
    fixed: Mapping[str, Any] = field(default_factory=dict)  # our field: value for all heads of this layout
    expected: Mapping[str, Any] = field(default_factory=dict)  # dotted path: the only supported value
    renames: tuple[tuple[str, str], ...] = ()  # regular expression: our name; the first that matches is used
    unread: tuple[str, ...] = ()  # regular expressions of tensors that are not loaded
    layer_config: str = ""  # path of the draft layer's config; "" is the top level
    of_verifier: bool = False  # the layer config is that of the whole target; its first layer type is used
    layer_ids: tuple[tuple[str, tuple[int, ...]], ...] = ()  # paths of layer ids, with their possible offsets
    final_norm: tuple[bool, ...] = (False, True)  # see `Ambiguity`
    unsure_of_norm_output: bool = False  # `norm_output: true` may be wrong, see `heads/readings.py`


def lookup(fields: Fields, path: str, default: Any = None) -> Any:
    """Return the value at a dotted path of a config; of several paths, separated by "|", the first that exists.

    Example: `lookup({"medusa": {"n": 2}}, "medusa.n")` is 2.
    """
    for alternative in path.split("|"):
        found: Any = fields
        for part in alternative.split("."):
            if not isinstance(found, dict) or part not in found:
                break
            found = found[part]
        else:
            return found
    return default


def _named(pattern: str) -> Callable[[Fields, Names], bool]:
    return lambda fields, names: any(re.fullmatch(pattern, name) for name in names)


def _speculators(kind: str) -> Callable[[Fields, Names], bool]:
    return lambda fields, names: fields.get("speculators_model_type") == kind


def _native(kind: str) -> Callable[[Fields, Names], bool]:
    return lambda fields, names: fields.get("model_type") == kind


# ----------------------------------------------------------------------------------------------- draft layers

ROTARY = r"(.*\.)?rotary_emb\.inv_freq"
"""A buffer that old versions of transformers saved; it is computed from the config."""

EAGLE = Layout(
    "eagle",
    EagleConfig,
    lambda fields, names: (
        {"fc.weight", "layers.0.mlp.gate_proj.weight"} <= names and "layers.0.hidden_norm.weight" not in names
    ),
    "EAGLE (versions 1 and 2)",
    fields={"bias": "bias", "qkv_bias": "qkv_bias", "base_model_name_or_path": "base_model_name_or_path"},
    expected={"num_hidden_layers": 1},
    unread=(ROTARY,),
)
SPECULATORS_EAGLE = Layout(
    "speculators-eagle",
    EagleConfig,
    _speculators("eagle"),
    "speculators before 0.3 (EAGLE-1, HASS)",
    fields={
        "bias": "fusion_bias",
        "layernorms": "layernorms",
        "base_model_name_or_path": "speculators_config.verifier.name_or_path",
    },
    fixed={"bias": False, "layernorms": False},
    expected={"transformer_layer_config.num_hidden_layers": 1},
    renames=((r"fusion_fc\.(.*)", r"fc.\1"), (r"transformer\.(.*)", r"layers.0.\1")),
    unread=(ROTARY, r"lm_head\.weight"),
    layer_config="transformer_layer_config",
)
FIRST_LAYER = r"(model\.)?(midlayer|midlayer\.0|layers\.0)\.hidden_norm\.weight"
"""Name of a tensor that only EAGLE-3 heads have."""

EAGLE3 = Layout(
    "eagle3",
    Eagle3Config,
    _named(FIRST_LAYER),
    "EAGLE (version 3)",
    fields={
        "norm_before_residual": "norm_before_residual",
        "fc_norm": "fc_norm|use_aux_norm",
        "norm_before_fc": "eagle_config.norm_before_fc|norm_before_fc",
        "logit_scale": "logit_scale",
        "target_hidden_size": "target_hidden_size",
        "base_model_name_or_path": "base_model_name_or_path",
    },
    fixed={"norm_before_residual": False, "fc_norm": False, "norm_before_fc": False},
    expected={
        "eagle_config.use_aux_hidden_state": True,
        "eagle_config.use_input_layernorm_in_first_layer": True,
        "eagle_config.use_last_layernorm": True,
        "eagle_config.use_mtp_layernorm": False,
        "eagle_config.eh_proj_before_attn": False,
    },
    renames=(
        (r"(?:model\.)?(?:midlayer\.0|layers\.0)\.(.*)", r"midlayer.\1"),
        (r"(?:model\.)?midlayer\.(\d+\..*)", r"layers.\1"),
        *(
            (rf"(?:model\.)?aux_norm_{name}\.(.*)", rf"fc_norm.{i}.\1")
            for i, name in enumerate(("low", "mid", "high"))
        ),
        (r"model\.(.*)", r"\1"),
    ),
    unread=(ROTARY, r"(model\.)?t2d"),
    layer_ids=(
        ("eagle_config.eagle_aux_hidden_state_layer_ids", (1, 0)),
        ("eagle_aux_hidden_state_layer_ids", (0,)),
        ("target_layer_ids", (1,)),
    ),
    unsure_of_norm_output=True,
)
SPECULATORS_EAGLE3 = Layout(
    "speculators-eagle3",
    Eagle3Config,
    _speculators("eagle3"),
    "speculators (vLLM)",
    fields={
        **{name: name for name in ("norm_before_residual", "fc_norm", "norm_before_fc")},
        "base_model_name_or_path": "speculators_config.verifier.name_or_path",
    },
    fixed={"norm_before_residual": False, "fc_norm": False, "norm_before_fc": False},
    renames=((r"layers\.0\.(.*)", r"midlayer.\1"),),
    unread=(ROTARY, "t2d", r"verifier_lm_head\.weight", r"verifier_norm\.weight"),
    layer_config="transformer_layer_config",
    layer_ids=(("eagle_aux_hidden_state_layer_ids", (0,)),),
)  # fmt: skip

SPECULATORS_MTP = Layout(
    "speculators-mtp",
    MtpConfig,
    _speculators("mtp"),
    "speculators (vLLM), MTP",
    fields={"base_model_name_or_path": "speculators_config.verifier.name_or_path"},
    expected={"num_nextn_predict_layers": 1},
    renames=(
        (r"mtp_layers\.0\.token_layernorm\.(.*)", r"enorm.\1"),
        (r"mtp_layers\.0\.hidden_layernorm\.(.*)", r"hnorm.\1"),
        (r"mtp_layers\.0\.input_proj\.(.*)", r"eh_proj.\1"),
        (r"mtp_layers\.0\.final_layernorm\.(.*)", r"norm.\1"),
        (r"mtp_layers\.0\.(.*)", r"layers.0.\1"),
    ),
    unread=(ROTARY, r"lm_head\.weight", r"verifier_lm_head\.weight"),
    layer_config="transformer_layer_config",
    of_verifier=True,
)


def _eagle3_of(architecture: str) -> Callable[[Fields, Names], bool]:
    return lambda fields, names: EAGLE3.matches(fields, names) and fields.get("architectures") == [architecture]


_of_specforge = _eagle3_of("LlamaForCausalLMEagle3")


def _of_modelopt(fields: Fields, names: Names) -> bool:
    names_layers = lookup(fields, "eagle_config.use_aux_hidden_state") is not None
    return EAGLE3.matches(fields, names) and names_layers and "t2d" not in names


def _for_sglang(fields: Fields, names: Names) -> bool:
    return _of_specforge(fields, names) and "embed_tokens.weight" not in names


MODELOPT_EAGLE3 = replace(EAGLE3, name="modelopt-eagle3", matches=_of_modelopt, writers="ModelOpt",
                          unsure_of_norm_output=False)  # fmt: skip
SGLANG_EAGLE3 = replace(EAGLE3, name="sglang", matches=_for_sglang, writers="SpecForge's export for SGLang")
SPECFORGE_EAGLE3 = replace(EAGLE3, name="specforge", matches=_of_specforge, writers="SpecForge")
NEMO_EAGLE3 = replace(EAGLE3, name="nemo-eagle3", matches=_eagle3_of("LlamaEagle3DraftModel"),
                      writers="NeMo Automodel", unsure_of_norm_output=False)  # fmt: skip
DEEPSPEC_EAGLE3 = replace(
    EAGLE3,
    name="deepspec-eagle3",
    matches=_eagle3_of("Qwen3Eagle3Model"),
    writers="DeepSpec",
    unsure_of_norm_output=False,
)

# ----------------------------------------------------------------------------------------------- Medusa

MEDUSA_FIELDS = {"base_model_name_or_path": "base_model_name_or_path", "vocab_size": "vocab_size",
                 "hidden_size": "hidden_size"}  # fmt: skip

MEDUSA_V1 = Layout(
    "medusa",
    MedusaConfig,
    _named(r"\d+\.\d+\.weight"),
    "Medusa (v0.1, v1.3), Text Generation Inference",
    fields=MEDUSA_FIELDS,
    renames=((r"(\d+\..*)", r"heads.\1"),),
)
MEDUSA_V2 = replace(
    MEDUSA_V1,
    name="medusa-v2",
    matches=lambda fields, names: (
        bool(names) and all(re.fullmatch(r"\d+\.\d+\.linear\.(weight|bias)", n) for n in names)
    ),
    writers="Medusa (legacy version 2), Text Generation Inference",
)
MEDUSA_MODEL = replace(
    MEDUSA_V1,
    name="medusa-model",
    matches=_named(r"medusa_head\.\d+\..*"),
    writers="Medusa 1.0 (a whole model, its own base included)",
    renames=((r"medusa_head\.(\d+\..*)", r"heads.\1"),),
    unread=(r"(model|lm_head|transformer|language_model|gpt_neox|embed_out|backbone|visual)\..*",),
)
MODELOPT_MEDUSA = replace(
    MEDUSA_MODEL,
    name="modelopt-medusa",
    matches=_named(r"medusa_heads\.\d+\..*"),
    writers="ModelOpt (a whole model, its own base included)",
    renames=((r"medusa_heads\.(\d+\..*)", r"heads.\1"),),
)

VLLM_VOCABULARY = 32001
"""Vocabulary size of vLLM's Medusa heads if the config has none."""

VLLM_MEDUSA = replace(
    MEDUSA_V1,
    name="vllm-medusa",
    matches=_named(r"(medusa_heads\.)?blocks\.\d+\.layers\.\d+\.weight"),
    writers="vLLM's converter of Medusa heads",
    fixed={"vocab_size": VLLM_VOCABULARY},
    renames=(
        (r"(?:medusa_heads\.)?blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)", r"heads.\1.\2.linear.\3"),
        (r"medusa_heads\.(.*)", r"\1"),
    ),
)

WHOLE_MODELS = ("medusa-model", "modelopt-medusa")
"""Layouts that include the target, which may be fine-tuned and must be used with the heads."""

# ----------------------------------------------------------------------------------------------- the tables

NATIVE = tuple(
    Layout(NATIVE_LAYOUT, config_class, _native(config_class.model_type), "hf-specdec")
    for config_class in (EagleConfig, Eagle3Config, MtpConfig, MedusaConfig, DFlashConfig)
)

LAYOUTS = (
    *NATIVE, SPECULATORS_EAGLE3, SPECULATORS_EAGLE, SPECULATORS_MTP, VLLM_MEDUSA, MODELOPT_MEDUSA,
    MEDUSA_MODEL, MEDUSA_V2,
    MEDUSA_V1, NEMO_EAGLE3, DEEPSPEC_EAGLE3, MODELOPT_EAGLE3, SGLANG_EAGLE3, SPECFORGE_EAGLE3, EAGLE3, EAGLE,
)  # fmt: skip
"""All layouts that can be read, except those of block heads; the first that matches is used."""


def is_head_config(fields: Fields) -> bool:
    """Whether a config can only be a head's; False for EAGLE-1 and some EAGLE-3 heads, whose configs are a Llama's."""
    architectures, kind = fields.get("architectures"), fields.get("model_type")
    return (
        any(kind == layout.config_class.model_type for layout in NATIVE)
        or any(key in fields for key in HEAD_FIELDS)
        or any(architectures == [name] for name in HEAD_ARCHITECTURES)
    )


HEAD_FIELDS = ("speculators_model_type", "medusa_num_heads", "medusa", "draft_vocab_size", "eagle_config",
               "dflash_config")  # fmt: skip
"""Config fields that only heads have."""
HEAD_ARCHITECTURES = (
    "LlamaForCausalLMEagle3", "LlamaForCausalLMEagle3Deep", "EAGLE3LlamaForCausalLM", "Eagle3LlamaForCausalLM",
    "LlamaEagle3DraftModel", "Qwen3Eagle3Model", "MedusaModel",
    "DFlashDraftModel", "Qwen3DFlashDraftModel", "Qwen3DSparkModel",
)  # fmt: skip


TARGET_NAMES = ("base_model_name_or_path", "speculators_config.verifier.name_or_path")
"""Paths of the target's name in the configs of all layouts."""


def target_name(fields: Fields) -> Any:
    """Return the target that a head's config names, in any layout and unchecked; None if it names none.

    Also None for a Medusa config of a whole model: whether the checkpoint includes the target depends on its tensors
    (`WHOLE_MODELS`).
    """
    if "num_hidden_layers" in fields and any(key.startswith("medusa") for key in fields):
        return None
    found = (lookup(fields, path) for path in TARGET_NAMES)
    return next((name for name in found if name is not None), None)
