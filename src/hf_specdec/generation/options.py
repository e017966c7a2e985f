"""Which options of `generate()` speculation keeps; what it cannot keep is refused here, before any work.

Nothing here changes anything.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    PreTrainedModel,
    StaticCache,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.utils import MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL

from hf_specdec.acceptance import rules
from hf_specdec.config import SpeculativeConfig
from hf_specdec.errors import CacheCapacityError, InvalidConfigError, UnsupportedGenerationError
from hf_specdec.verification.cache import check_fits, seen_tokens
from hf_specdec.verification.graph_backends import GRAPH_BACKENDS
from hf_specdec.verification.memory import CacheLayout
from hf_specdec.verification.model import CACHE_FIELD, execution_device, text_config
from hf_specdec.verification.probe import drops_cache
from hf_specdec.verification.target import PREPARED_INPUTS, REPEATED_INPUTS, TEXT_INPUTS

KEPT_INPUTS = frozenset({
    *PREPARED_INPUTS, *REPEATED_INPUTS, *TEXT_INPUTS, *MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL, "image_grid_thw",
    "video_grid_thw", "second_per_grid_ts",
})  # fmt: skip
"""Model inputs of which speculation knows what plain generate does with them after the prompt."""

ROWWISE_PROCESSORS = frozenset({
    "EpsilonLogitsWarper",
    "EtaLogitsWarper", "ExponentialDecayLengthPenalty", "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor", "InfNanRemoveLogitsProcessor", "LogitNormalization", "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor", "MinPLogitsWarper", "NoBadWordsLogitsProcessor",
    "NoRepeatNGramLogitsProcessor", "PrefixConstrainedLogitsProcessor", "RepetitionPenaltyLogitsProcessor",
    "SequenceBiasLogitsProcessor",
    "SuppressTokensAtBeginLogitsProcessor", "SuppressTokensLogitsProcessor", "TemperatureLogitsWarper",
    "TopHLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "TypicalLogitsWarper", "WatermarkLogitsProcessor",
})  # fmt: skip
"""transformers' processors that depend on a row's own text alone: rows may be at different lengths, and a prefix may
be tried that is not kept."""

CHUNKS_CONTINUE_CACHES = Version(transformers.__version__) >= Version("5.23")
"""Whether transformers' chunked prefill knows that a cache may hold a part of the prompt."""

ASKS_KEPT_PREFIXES = ("auto", "greedy", "rejection")
"""The acceptance rules that ask a processor about kept prefixes only, once each and in order."""


def rule_for(config: SpeculativeConfig, generation_config: GenerationConfig) -> rules.AcceptanceRule:
    """The acceptance rule of a call.

    Raises:
        UnsupportedGenerationError: A rule that contradicts `do_sample`.
    """
    do_sample = bool(generation_config.do_sample)
    name = config.acceptance
    if name == "auto":
        name = "rejection" if do_sample else "greedy"
    if (do_sample and name == "greedy") or (not do_sample and name in ("rejection", "block")):
        raise UnsupportedGenerationError(
            f"acceptance={name!r} and do_sample={do_sample} ask for different things.", 'Use acceptance="auto".'
        )
    if name == "typical":
        return functools.partial(rules.typical, threshold=config.posterior_threshold, alpha=config.posterior_alpha)
    if name == "nucleus":
        top_p = generation_config.top_p
        if top_p is None or top_p >= 1:
            return rules.nucleus
        # when sampling, the warpers have cut the nucleus out already
        return functools.partial(rules.nucleus, top_p=1.0 if do_sample else top_p)
    return {"greedy": rules.greedy, "rejection": rules.rejection, "block": rules.block}[name]


def check_mode(mode: GenerationMode, config: GenerationConfig, mode_kwargs: dict[str, Any]) -> None:
    """Refuse generation modes and options that speculation does not keep.

    Raises:
        UnsupportedGenerationError: Naming the option, why, and what to do.
    """
    if "synced_gpus" not in mode_kwargs:  # transformers hands a loop of the user's own nothing but its own arguments
        raise UnsupportedGenerationError(
            "`custom_generate` replaces the decoding loop, so `speculative` could not be kept.",
            "Drop `custom_generate`, or pass speculative=None.",
        )
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise UnsupportedGenerationError(
            f"`speculative` works with greedy decoding and sampling, not with {mode.value.replace('_', ' ')}.",
            "Drop `speculative`, or the options that choose that mode (num_beams, assistant_model, ...).",
        )
    chunk = config.prefill_chunk_size
    if chunk is not None and (not isinstance(chunk, int) or isinstance(chunk, bool) or chunk < 1):
        raise UnsupportedGenerationError(
            f"`prefill_chunk_size` must be an integer >= 1, got {chunk!r}.",
            "Leave it None to read the prompt at once.",
        )
    if mode_kwargs.get("assistant_model") is not None:
        raise UnsupportedGenerationError(
            "`assistant_model` goes with a `speculative` that the call itself is given.",
            'Pass speculative="draft_model" as well, or speculative=None for transformers\' own assisted generation.',
        )
    refused = {
        "use_cache": (config.use_cache is False, "it needs the key-value cache"),
        "cache_implementation": (
            config.cache_implementation not in (None, "dynamic", "static"), "it has a static cache of its own"
        ),
    }  # fmt: skip
    if config.cache_implementation == "static":
        _check_attentions(config)
    for name, (applies, why) in refused.items():
        if applies:
            raise UnsupportedGenerationError(
                f"`{name}={getattr(config, name)!r}` cannot be kept with `speculative`: {why}.", "Drop one of them."
            )


def _check_attentions(config: GenerationConfig) -> None:
    """Over a static cache transformers' attentions are as wide as the cache; speculation's are as wide as the text."""
    if config.return_dict_in_generate and config.output_attentions:
        raise UnsupportedGenerationError(
            "`output_attentions` over a static cache cannot be kept with `speculative`.", "Use a dynamic cache."
        )


def check_runner(config: SpeculativeConfig, model: PreTrainedModel) -> None:
    """Refuse graphs on a device that has none.

    Raises:
        UnsupportedGenerationError: Naming the device.
    """
    device = execution_device(model)
    if config.compile == "cuda_graph" and device.type not in GRAPH_BACKENDS:
        raise UnsupportedGenerationError(
            f"compile={config.compile!r} needs a GPU, the model is on {device}.",
            'Move the model to one; or use "compile", or "auto", which takes what the device has.',
        )


def check_top_k(config: SpeculativeConfig, model: PreTrainedModel) -> None:
    """Refuse more children per node than there are tokens.

    Raises:
        InvalidConfigError: Naming both numbers.
    """
    vocab_size = text_config(model).vocab_size
    if config.top_k is not None and config.top_k > vocab_size:
        raise InvalidConfigError(
            f"`top_k` {config.top_k} exceeds the vocabulary of {vocab_size} tokens.", "Use a smaller one."
        )


def check_inputs(model_kwargs: dict[str, Any], config: GenerationConfig) -> None:
    """Refuse model inputs of which it is not known how they go on after the prompt.

    Raises:
        UnsupportedGenerationError: Naming the inputs.
    """
    if config.prefill_chunk_size is not None and model_kwargs.get("inputs_embeds") is not None:
        raise UnsupportedGenerationError(
            "transformers reads all of `inputs_embeds` again with every chunk of prefill_chunk_size.",
            "Drop one of them.",
        )
    strange = sorted(
        name
        for name, value in model_kwargs.items()
        if name not in KEPT_INPUTS and value is not None and not isinstance(value, bool | int | float | str)
    )
    if strange:
        raise UnsupportedGenerationError(
            f"The model inputs {', '.join(strange)} cannot be kept with `speculative`.", "Drop them or `speculative`."
        )


def check_cache(
    cache: Any, config: GenerationConfig, max_cache_length: int, layout: CacheLayout | None, rows: int
) -> int:
    """The tokens that a handed-in cache holds.

    Args:
        cache: What was handed in.
        config: Of this call.
        max_cache_length: Tokens of prompt and answer.
        layout: Of the cache that the model fills; None if it verifies chains.
        rows: Prompts, each as often as it is answered.

    Raises:
        UnsupportedGenerationError: It is not a cache that can be continued, or another one is asked for, too.
        CacheCapacityError: It is a static one, and too small for the answer.
    """
    if config.cache_implementation is not None:
        raise UnsupportedGenerationError(
            f"`cache_implementation={config.cache_implementation!r}` and `{CACHE_FIELD}` are two caches.",
            "Drop one.",
        )
    length = seen_tokens(cache)
    if layout is not None:
        check_fits(cache, layout, rows)
    if length and config.prefill_chunk_size is not None and not CHUNKS_CONTINUE_CACHES:
        raise UnsupportedGenerationError(
            "In this version of transformers prefill_chunk_size reads the tokens of a handed-in cache twice.",
            "Drop prefill_chunk_size, or update transformers to 5.23.",
        )
    if isinstance(cache, StaticCache):
        _check_attentions(config)
    slots = min(layer.max_cache_len for layer in cache.layers) if isinstance(cache, StaticCache) else None
    if slots is not None and slots < max_cache_length:
        raise CacheCapacityError(
            f"The cache handed in as `{CACHE_FIELD}` has {slots} slots, prompt and answer need {max_cache_length}.",
            "Make it larger, or use a DynamicCache.",
        )
    return length


def check_adapter(model: PreTrainedModel) -> None:
    """Refuse adapters that put a cache of their own in the place of speculation's.

    Raises:
        UnsupportedGenerationError: Prefix tuning (PEFT), which feeds its prefix as a filled cache.
    """
    wrapper = getattr(model.prepare_inputs_for_generation, "__self__", None)  # PEFT's, where prompts are learnt
    kind = getattr(getattr(wrapper, "active_peft_config", None), "peft_type", None)
    if kind in ("PREFIX_TUNING", "CARTRIDGE"):
        raise UnsupportedGenerationError(
            f"The adapter's {str(kind.value).lower().replace('_', ' ')} brings a cache of its own, so `speculative` "
            "cannot be kept.",
            "Use LoRA or prompt tuning, or disable the adapter.",
        )


def check_training(model: PreTrainedModel) -> None:
    """Refuse a model that checkpoints gradients in train mode: its layers are given no cache there.

    Raises:
        UnsupportedGenerationError: Saying how to switch either off.
    """
    if drops_cache(model):
        raise UnsupportedGenerationError(
            "Gradient checkpointing in train mode takes the key-value cache away from the layers, and `speculative` "
            "needs it.",
            "Call model.eval() or model.gradient_checkpointing_disable() before generating.",
        )


def check_device(input_ids: torch.Tensor, model: PreTrainedModel) -> None:
    """Refuse a prompt that lies elsewhere than the model.

    Raises:
        UnsupportedGenerationError: Naming both devices.
    """
    device = execution_device(model)
    if input_ids.device.type != device.type:
        raise UnsupportedGenerationError(
            f"The prompt is on {input_ids.device}, the model takes its inputs on {device}.",
            f'Move it with input_ids.to("{device}").',
        )


def check_chain(config: GenerationConfig, chain_only_reason: str) -> None:
    """Refuse a static cache for a model that verifies chains, which it does over a dynamic one.

    Raises:
        UnsupportedGenerationError: Naming why the model takes no tree.
    """
    if chain_only_reason and config.cache_implementation == "static":
        raise UnsupportedGenerationError(
            f"This model takes no tree ({chain_only_reason}), so `speculative` runs over a dynamic cache, not "
            f"cache_implementation={config.cache_implementation!r}.",
            "Leave it out.",
        )


def check_synced(synced_gpus: bool, needs_replay: bool) -> None:
    """Refuse ranks in lockstep for models that run accepted tokens again: each rank at other times, all would wait.

    Raises:
        UnsupportedGenerationError: For a model with a recurrent state.
    """
    if synced_gpus and needs_replay:
        raise UnsupportedGenerationError(
            "`synced_gpus` cannot be kept with `speculative` by a model with a recurrent state: the ranks would run "
            "different numbers of forwards.",
            "Drop one of them.",
        )


def check_prompt(input_ids: torch.Tensor, inputs_embeds: torch.Tensor | None) -> None:
    """Refuse a prompt without tokens.

    Raises:
        UnsupportedGenerationError: Neither ids nor embeddings.
    """
    if input_ids.shape[1] == 0 and inputs_embeds is None:
        raise UnsupportedGenerationError("The prompt is empty.", "Give at least one token, e.g. the BOS token.")


def layer_outputs(config: GenerationConfig, *, chains_only: bool = False) -> dict[str, bool]:
    """Which outputs per layer are to be returned.

    Raises:
        UnsupportedGenerationError: Attentions of a model that verifies chains over transformers' own cache.
    """
    wanted = {
        name: bool(config.return_dict_in_generate and getattr(config, f"output_{name}"))
        for name in ("hidden_states", "attentions")
    }
    if chains_only and wanted["attentions"]:
        raise UnsupportedGenerationError(
            "`output_attentions` cannot be kept with `speculative` for a model that takes no tree.",
            "Drop one of them.",
        )
    return wanted


def in_lockstep(config: GenerationConfig, processors: LogitsProcessorList, criteria: StoppingCriteriaList) -> bool:
    """Whether the rows of a batch must go at one pace, so that everybody sees what plain generate shows them.

    Processors and criteria that are not known to look at one row at a time (anyone's own, guidance, time
    limits) are shown whole columns; outputs per token are whole columns, too.
    """
    known_criteria: tuple[type, ...] = (EosTokenCriteria, MaxLengthCriteria)
    if any(isinstance(rule, EosTokenCriteria) for rule in criteria):
        known_criteria = (*known_criteria, StopStringCriteria)  # without EOS a finished row goes on emitting tokens
    return bool(
        not is_rowwise(processors)
        or any(type(rule) not in known_criteria for rule in criteria)
        or (config.return_dict_in_generate and (config.output_scores or config.output_logits))
        or any(layer_outputs(config).values())
    )


def is_rowwise(processors: Iterable[object]) -> bool:
    """Whether every processor depends on a row's own text alone."""
    return all(
        type(processor).__name__ in ROWWISE_PROCESSORS and type(processor).__module__.startswith("transformers.")
        for processor in processors
    )


def check_processors(processors: LogitsProcessorList, config: SpeculativeConfig) -> None:
    """Refuse processors with a memory for rules that ask about prefixes which are then not kept.

    Raises:
        UnsupportedGenerationError: Naming them.
    """
    if config.acceptance not in ASKS_KEPT_PREFIXES and not is_rowwise(processors):
        names = ", ".join(sorted(type(processor).__name__ for processor in processors if not is_rowwise([processor])))
        raise UnsupportedGenerationError(
            f"acceptance={config.acceptance!r} tries prefixes that are not kept, which the logits processors {names} "
            "may not take well.",
            'Use acceptance="auto", or drop them.',
        )
