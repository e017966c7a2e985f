"""Tiny random models of every class of transformers with a `generate()` that the causal-LM mapping does not build.

Vision and audio towers are built as well, as small as they allow: the walk of `models.py` gives them text only.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import GenerationMixin, PreTrainedModel

import zoo
from zoo import VOCAB_SIZE

SIZES: dict[str, Any] = {
    **{name: size for name, size in zoo.ANY_SIZES.items() if name not in ("is_decoder", "is_encoder_decoder")},
    "depth": 2, "num_heads": 4, "embed_dim": 32, "image_size": 16, "patch_size": 4, "out_hidden_size": 32,
    "decoder_hidden_size": 32, "projector_hidden_size": 32, "projection_intermediate_size": 32, "projection_dim": 32,
    "text_hidden_size": 32, "condition_dim": 32, "text_vocab_size": VOCAB_SIZE, "input_vocab_size": VOCAB_SIZE,
    "output_vocab_size": VOCAB_SIZE, "vision_vocab_size": VOCAB_SIZE, "t2u_vocab_size": VOCAB_SIZE,
    "char_vocab_size": VOCAB_SIZE, "unit_hifi_gan_vocab_size": VOCAB_SIZE,
}  # fmt: skip
"""Small values for every size that some configuration of a model or of its parts knows."""

UNSET = object()
"""A field that is not given."""


def _under(part: str, fields: dict[str, Any]) -> dict[str, Any]:
    return {f"{part}.{name}": value for name, value in fields.items()}


def _sections(*sizes: int) -> dict[str, Any]:
    """Multimodal rotary embedding whose sections fit heads of 8."""
    return {"text_config.rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(sizes)}}


_CLIP = {"model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 4, "image_size": 16, "patch_size": 4}  # fmt: skip
_BERT = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 4}  # fmt: skip
_BART = {"model_type": "bart", "vocab_size": VOCAB_SIZE, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
         "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64,
         "decoder_ffn_dim": 64}  # fmt: skip
_T5 = {"model_type": "t5", "vocab_size": VOCAB_SIZE, "d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 2,
       "num_heads": 4}  # fmt: skip
_ENCODEC = {"model_type": "encodec", "hidden_size": 32, "num_filters": 4, "codebook_size": 64, "codebook_dim": 32,
            "upsampling_ratios": [2, 2], "num_lstm_layers": 1}  # fmt: skip
_MIMI = {"upsample_groups": 32, "num_filters": 4}
_TOKENIZER = {"num_filters": 4, "depths": [1, 1], "downsampling_ratios": [2], "hidden_size": 32}
_PIXELS = {"base_channels": 32, "channel_multiplier": [1]}
_VOCODER = {"upsample_initial_channel": 64, "mel_dim": 16, "upsample_rates": [2, 2], "upsample_kernel_sizes": [4, 4],
            "resblock_kernel_sizes": [3], "resblock_dilation_sizes": [[1, 3, 5]]}  # fmt: skip
_DIT = {"enc_channels": [16, 16, 16, 16, 48], "enc_attention_channels": 16, "enc_se_channels": 16, "enc_emb_dim": 16,
        "enc_dim": 16, "num_embeds": 97, "mel_dim": 16, "num_hidden_layers": 2, "look_ahead_layers": [0],
        "look_backward_layers": [1]}  # fmt: skip
_CONFORMER = {"encoder_config.hidden_dim": 32, "encoder_config.output_dim": 16, "encoder_config.dim_head": 8,
              "has_lora_adapter": False}  # fmt: skip
_SEAMLESS = {"speech_encoder_intermediate_size": 64, "speech_encoder_layers": 2, "t2u_encoder_layers": 2,
             "t2u_decoder_layers": 2, "t2u_encoder_ffn_dim": 64, "t2u_decoder_ffn_dim": 64,
             "conv_depthwise_kernel_size": 3, "adaptor_kernel_size": 2, "feature_projection_input_dim": 16,
             "upsample_initial_channel": 32, "unit_embed_dim": 32, "lang_embed_dim": 16, "spkr_embed_dim": 16,
             "variance_predictor_embed_dim": 32, "variance_predictor_hidden_dim": 32,
             "variance_pred_hidden_dim": 32}  # fmt: skip
_ERNIE = {"text_config.moe_intermediate_size": [32, 32], "text_config.head_dim": 16, **_sections(3, 3, 2)}
_TALKER = {"text_config.shared_expert_intermediate_size": 32, "spatial_merge_size": 2}
_BLT = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4,
        "intermediate_size": 64, "vocab_size": VOCAB_SIZE}  # fmt: skip

OVERRIDES: dict[str, dict[str, Any]] = {
    "BarkModel": {"codec_config": _ENCODEC},
    "BltForCausalLM": {
        **_under("patcher_config", _BLT), **_under("encoder_config", {**_BLT, "hidden_size_global": 32}),
        **_under("decoder_config", {**_BLT, "hidden_size_global": 32}), **_under("global_config", _BLT),
        "encoder_hash_byte_group_vocab": 64,
    },
    "ChameleonForConditionalGeneration": {
        "vocabulary_map": {"<image>": 95, "IMGIMGBS": 94}, **_under("vq_config", {**_PIXELS, "resolution": 32}),
    },
    "CohereCompassForConditionalGeneration": _under("text_config", zoo.OVERRIDES["cohere_compass_text"]),
    "Cosmos3EdgeForConditionalGeneration": _sections(2, 1, 1),
    "CsmForConditionalGeneration": {
        **_under("codec_config", _MIMI), "depth_decoder_config.backbone_hidden_size": 32,
        "depth_decoder_config.vocab_size": VOCAB_SIZE,
    },
    "DeepseekOcr2ForConditionalGeneration": {"text_config.mlp_layer_types": ["dense", *["sparse"] * 3]},
    "DiaForConditionalGeneration": _under("decoder_config", {
        "cross_head_dim": 8, "cross_num_attention_heads": 4, "cross_num_key_value_heads": 4, "cross_hidden_size": 32,
    }),
    "Dots3NoteForConditionalGeneration": {
        **_under("text_config", {
            "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 16, "swa_kv_lora_rank": 16,
            "swa_head_dim": 8, "swa_qk_nope_head_dim": 4, "swa_v_head_dim": 8,
        }),
        **_under("vision_config", {"mlp_layer_types": ["dense"] * 4, "adapter_in_dim": 32, "adapter_out_dim": 32}),
        **_under("audio_config", {"adapter_input_size": 32, "adapter_out_dim": 32}),
    },
    "Emu3ForConditionalGeneration": {"vocabulary_map": {"<image>": 95}, **_under("vq_config", _PIXELS)},
    "Ernie4_5_VLMoeForConditionalGeneration": _ERNIE,
    "Ernie4_5_VL_MoeForConditionalGeneration": _ERNIE,
    "FastVlmForConditionalGeneration": {"vision_config": _CLIP},
    "Florence2ForConditionalGeneration": _under("vision_config", {
        "patch_size": [7, 3, 3, 3], "embed_dim": [16] * 4, "num_heads": [2] * 4, "num_groups": [2] * 4,
        "depths": [1] * 4, "projection_dim": 32,
    }),
    "FunAsrNanoForConditionalGeneration": {
        "adaptor_config.intermediate_size": 8, "audio_config.num_timestamp_prediction_layers": 1,
    },
    "Glm46VForConditionalGeneration": _sections(2, 1, 1),
    "Glm4vForConditionalGeneration": _sections(2, 1, 1),
    "Glm4vMoeForConditionalGeneration": _sections(1, 1, 0),
    "Glm5NextForConditionalGeneration": _under("text_config", {
        "num_key_value_heads": 4, "index_topk": 16, "qk_rope_head_dim": 0,
    }),
    "GlmImageForConditionalGeneration": _sections(2, 1, 1),
    "GlmOcrForConditionalGeneration": _sections(2, 1, 1),
    "Granite4VisionForConditionalGeneration": {
        "deepstack_layer_map": [[0, 0]], "spatial_target_layers": [1], "downsample_rate": "1/2",
        "vision_config.hidden_size": 64,
    },
    "GraniteSpeechForConditionalGeneration": _CONFORMER,
    "GraniteSpeechPlusForConditionalGeneration": _CONFORMER,
    "HunYuanVLForConditionalGeneration": _sections(1, 1, 1, 1),
    "JanusForConditionalGeneration": _under("vq_config", {
        **_PIXELS, "num_embeddings": 64, "latent_channels": 32, "projection_dim": 32, "image_token_embed_dim": 32,
    }),
    "KyutaiSpeechToTextForConditionalGeneration": {**_under("codec_config", _MIMI), "audio_pad_token_id": 95},
    "Llama4ForConditionalGeneration": _under("vision_config", {
        "projector_input_dim": 32, "projector_output_dim": 32, "vision_output_dim": 32,
    }),
    "Mistral4ForCausalLM": {"num_key_value_heads": 4},
    "MistralLarge4ForConditionalGeneration": {"text_config.num_key_value_heads": 4},
    "MllamaForConditionalGeneration": {"text_config.cross_attention_layers": [1, 3]},
    "Molmo2ForConditionalGeneration": {
        "vision_config.image_size": [16, 16], "adapter_config.vision_feature_layer": [3, 2],
        "adapter_config.image_size": UNSET,
    },
    "MoonshineStreamingForConditionalGeneration": {"num_key_value_heads": 2},
    "MoshiForConditionalGeneration": _under("audio_encoder_config", _MIMI),
    "MuseSparkForConditionalGeneration": _under("audio_config", {
        "hidden_sizes": [16, 16, 16, 32], "depths": [1, 1, 1, 1],
    }),
    "MusicgenForConditionalGeneration": {"text_encoder": _T5, "audio_encoder": _ENCODEC},
    "MusicgenMelodyForConditionalGeneration": {"text_encoder": _T5, "audio_encoder": _ENCODEC},
    "Nemotron3_5TranscribeForConditionalGeneration": {
        "audio_config.diarization_config.head_config.audio_hidden_size": 32,
        "word_timestamp_config.blank_token_id": 95,
    },
    "NemotronH_Omni_Reasoning_V3": {"vision_config.video_temporal_patch_size": 2},
    "PaddleOCRVLForConditionalGeneration": _sections(2, 1, 1),
    "PerceptionLMForConditionalGeneration": {"vision_config": {**_CLIP, "model_args": {"embed_dim": 32}}},
    "ProphetNetForConditionalGeneration": {"num_hidden_layers": UNSET},
    "Qwen2VLForConditionalGeneration": _sections(2, 1, 1),
    "Qwen2_5_VLForConditionalGeneration": _sections(2, 1, 1),
    "Qwen2_5OmniForConditionalGeneration": {
        **_under("token2wav_config.bigvgan_config", _VOCODER), **_under("token2wav_config.dit_config", _DIT),
    },
    "Qwen2_5OmniThinkerForConditionalGeneration": {**_sections(2, 1, 1), "vision_start_token_id": 200},
    "Qwen3ASRForConditionalGeneration": {"eos_token_id": 95},
    "Qwen3OmniMoeForConditionalGeneration": {
        **_under("talker_config", _TALKER), "code2wav_config.decoder_dim": 64,
    },
    "Qwen3OmniMoeTalkerForConditionalGeneration": _TALKER,
    "Qwen3OmniMoeThinkerForConditionalGeneration": {"vision_start_token_id": 200},
    "RagTokenForGeneration": {"question_encoder": {**_BERT, "model_type": "dpr"}, "generator": _BART},
    "SeamlessM4TForSpeechToSpeech": _SEAMLESS,
    "SeamlessM4TForSpeechToText": _SEAMLESS,
    "SeamlessM4TForTextToSpeech": _SEAMLESS,
    "SeamlessM4TForTextToText": _SEAMLESS,
    "SeamlessM4TModel": _SEAMLESS,
    "SeamlessM4TTextToUnitForConditionalGeneration": _SEAMLESS,
    "SeamlessM4Tv2ForSpeechToSpeech": _SEAMLESS,
    "SeamlessM4Tv2ForSpeechToText": _SEAMLESS,
    "SeamlessM4Tv2ForTextToSpeech": _SEAMLESS,
    "SeamlessM4Tv2ForTextToText": _SEAMLESS,
    "SeamlessM4Tv2Model": _SEAMLESS,
    "SeamlessM4Tv2TextToUnitForConditionalGeneration": _SEAMLESS,
    "VibeVoiceAsrForConditionalGeneration": {
        **_under("acoustic_tokenizer_encoder_config", _TOKENIZER),
        **_under("semantic_tokenizer_encoder_config", _TOKENIZER),
    },
    "VibeVoiceForConditionalGeneration": {
        "eos_token_id": 95, **_under("audio_config", _TOKENIZER), **_under("semantic_model_config", _TOKENIZER),
    },
}  # fmt: skip
"""By class, fields that the generic sizes do not satisfy; a dot leads into a part's configuration."""

NOT_BUILT = {
    "Gemma3nForConditionalGeneration": "its vision tower needs timm; its text model is tested as gemma3n_text",
    "Gemma4AssistantForCausalLM": "it drafts for a Gemma 4 and does not run alone",
    "Gemma4UnifiedAssistantForCausalLM": "it drafts for a Gemma 4 and does not run alone",
}
"""Classes of which no tiny model can be built offline, and why."""


@functools.cache
def classes() -> dict[str, type[PreTrainedModel]]:
    """Every model class of transformers that has a `generate()`, by name, without those that the zoo builds."""
    walked = {name for kind, name in zoo.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if kind in zoo.NAMES}
    found: dict[str, type[PreTrainedModel]] = {}
    for package in pkgutil.iter_modules(transformers.models.__path__):
        for file in sorted((Path(transformers.models.__path__[0]) / package.name).glob("modeling_*.py")):
            try:
                module = importlib.import_module(f"transformers.models.{package.name}.{file.stem}")
            except ImportError:  # a codec that needs torchaudio, say
                continue
            for value in vars(module).values():
                if inspect.isclass(value) and issubclass(value, PreTrainedModel) and hasattr(value, "generate"):
                    found[value.__name__] = value
    return {name: found[name] for name in sorted(found) if name not in walked}


def find(name: str) -> Any:
    """A class by its name."""
    return getattr(transformers, name, None) or classes()[name]


def build(name: str) -> Any:
    """The tiny model of one class, float32, in eval mode; the same weights in every test."""
    model_class = find(name)
    if not issubclass(model_class, GenerationMixin):
        return model_class.__new__(model_class)  # refused by its class: nothing else is looked at
    torch.manual_seed(sum(map(ord, name)))
    config_class = model_class.config_class
    return zoo.decisive(model_class(config_class(**_changed(_fields_of(config_class), name))).eval())


def _fields_of(config_class: Any) -> dict[str, Any]:
    """Small values for the fields that a configuration class has, and for its parts."""
    default = config_class()
    fields = {name: size for name, size in SIZES.items() if name in dir(default) or name in vars(default)}
    kinds = list(dict.fromkeys(getattr(default, "layer_types", None) or ()))
    if kinds:
        fields["layer_types"] = (kinds * 4)[:4]
    for name, part in (getattr(config_class, "sub_configs", None) or {}).items():
        value = getattr(default, name, None)
        if value is not None:
            known = zoo.OVERRIDES.get(value.model_type, {})
            fields[name] = {**_fields_of(type(value)), **known, "model_type": value.model_type}
            for missing in zoo.WITHOUT.get(value.model_type, ()):
                fields[name].pop(missing, None)
        elif isinstance(part, type) and part.__name__ != "AutoConfig":
            fields[name] = _fields_of(part)
    return {name: value for name, value in fields.items() if zoo.settable(config_class, name)}


def _changed(fields: dict[str, Any], name: str) -> dict[str, Any]:
    for path, value in OVERRIDES.get(name, {}).items():
        *parts, last = path.split(".")
        place = fields
        for part in parts:
            place = place.setdefault(part, {})
        place.pop(last, None)
        if value is not UNSET:
            place[last] = value
    return fields
