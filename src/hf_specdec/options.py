"""Which options of `generate()` speculation keeps; what it cannot keep is refused here, before any work.

Before: `mixin.py`, which asks at each of transformers' hooks. Nothing here changes anything.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation.configuration_utils import GenerationMode

from hf_specdec.accept import RULES, AcceptanceRule
from hf_specdec.config import SpeculativeConfig
from hf_specdec.errors import UnsupportedGenerationError

PASSED_ON = frozenset({
    "attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep", "inputs_embeds",
    "output_attentions", "output_hidden_states", "tokenizer", "return_dict",
})  # fmt: skip
"""Model inputs that speculation keeps; anything else would have to grow with the answer."""

ROWWISE_PROCESSORS = frozenset({
    "EpsilonLogitsWarper",
    "EtaLogitsWarper", "ExponentialDecayLengthPenalty", "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor", "InfNanRemoveLogitsProcessor", "LogitNormalization", "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor", "MinPLogitsWarper", "NoBadWordsLogitsProcessor",
    "NoRepeatNGramLogitsProcessor", "RepetitionPenaltyLogitsProcessor", "SequenceBiasLogitsProcessor",
    "SuppressTokensAtBeginLogitsProcessor", "SuppressTokensLogitsProcessor", "TemperatureLogitsWarper",
    "TopHLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "TypicalLogitsWarper", "WatermarkLogitsProcessor",
})  # fmt: skip
"""transformers' processors that treat every row for itself, so that rows may be at different lengths."""


def rule_for(config: SpeculativeConfig, generation_config: GenerationConfig) -> AcceptanceRule:
    """The acceptance rule of a call.

    Raises:
        UnsupportedGenerationError: A rule of a later version, or one that contradicts `do_sample`.
    """
    do_sample = bool(generation_config.do_sample)
    name = config.acceptance
    if name == "auto":
        name = "rejection" if do_sample else "greedy"
    if name not in RULES:
        raise UnsupportedGenerationError(f"The acceptance rule {name!r} is not in this version.", 'Use "auto".')
    if (name == "greedy") == do_sample:
        raise UnsupportedGenerationError(
            f"acceptance={name!r} and do_sample={do_sample} ask for different things.", 'Use acceptance="auto".'
        )
    return RULES[name]


def check_mode(mode: GenerationMode, config: GenerationConfig, mode_kwargs: dict[str, Any]) -> None:
    """Refuse generation modes and options that speculation does not keep.

    Raises:
        UnsupportedGenerationError: Naming the option, why, and what to do.
    """
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise UnsupportedGenerationError(
            f"`speculative` works with greedy decoding and sampling, not with {mode.value.replace('_', ' ')}.",
            "Drop `speculative`, or the options that choose that mode (num_beams, assistant_model, ...).",
        )
    if mode_kwargs.get("assistant_model") is not None:
        raise UnsupportedGenerationError("`assistant_model` and `speculative` exclude each other.", "Drop one.")
    returns_dict = bool(config.return_dict_in_generate)
    refused = {
        "use_cache": (config.use_cache is False, "it needs the key-value cache"),
        "cache_implementation": (
            config.cache_implementation not in (None, "dynamic", "static"), "it has a static cache of its own"
        ),
        "output_attentions": (returns_dict and bool(config.output_attentions), "this version does not collect them"),
        "output_hidden_states": (
            returns_dict and bool(config.output_hidden_states), "this version does not collect them"
        ),
    }  # fmt: skip
    for name, (applies, why) in refused.items():
        if applies:
            raise UnsupportedGenerationError(
                f"`{name}={getattr(config, name)!r}` cannot be kept with `speculative`: {why}.", "Drop one of them."
            )


def check_settings(config: SpeculativeConfig) -> None:
    """Refuse fields of the contract that this version does not honour yet.

    Raises:
        UnsupportedGenerationError: A runner, or adaptive drafting.
    """
    if config.compile not in ("auto", "none"):
        raise UnsupportedGenerationError(f"compile={config.compile!r} is not in this version.", 'Use "auto".')
    if config.adaptive not in (None, False):
        raise UnsupportedGenerationError("`adaptive` is not in this version.", "Leave it None.")


def check_inputs(model_kwargs: dict[str, Any]) -> None:
    """Refuse model inputs that would have to grow with the answer, and handed-in caches.

    Raises:
        UnsupportedGenerationError: Naming the inputs.
    """
    if model_kwargs.get("past_key_values") is not None:
        raise UnsupportedGenerationError(
            "A cache handed in as `past_key_values` cannot be kept with `speculative` in this version.",
            "Leave it out: the prompt is read anew.",
        )
    strange = sorted(name for name, value in model_kwargs.items() if value is not None and name not in PASSED_ON)
    if strange:
        raise UnsupportedGenerationError(
            f"The model inputs {', '.join(strange)} cannot be kept with `speculative`.", "Drop them or `speculative`."
        )


def check_prompt(input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> None:
    """Refuse a prompt without tokens.

    Raises:
        UnsupportedGenerationError: Neither ids nor embeddings.
    """
    if input_ids.shape[1] == 0 and model_kwargs.get("inputs_embeds") is None:
        raise UnsupportedGenerationError("The prompt is empty.", "Give at least one token, e.g. the BOS token.")


def keeps_logits(generation_config: GenerationConfig, batch_size: int) -> bool:
    """Whether scores or logits of every token are to be returned.

    Raises:
        UnsupportedGenerationError: For several rows, which reach a token at different steps.
    """
    wanted = [name for name in ("output_scores", "output_logits") if getattr(generation_config, name)]
    if not generation_config.return_dict_in_generate or not wanted:
        return False
    if batch_size > 1:
        raise UnsupportedGenerationError(
            f"{' and '.join(wanted)} with `speculative` are kept at batch size 1, got {batch_size} rows.",
            "Generate the rows one by one, or drop one of them.",
        )
    return True


def check_processors(processors: LogitsProcessorList, batch_size: int) -> None:
    """Rows advance at different speeds, so a processor that couples rows or counts calls needs a batch of one."""
    if batch_size == 1:
        return
    coupled = [
        type(processor).__name__
        for processor in processors
        if type(processor).__name__ not in ROWWISE_PROCESSORS
        or not type(processor).__module__.startswith("transformers.")
    ]
    if coupled:
        raise UnsupportedGenerationError(
            f"The logits processors {', '.join(coupled)} may couple the rows of a batch; with `speculative` they are "
            "kept at batch size 1.",
            "Generate the rows one by one, or drop `speculative`.",
        )
