"""Checks of the options of `generate()`, made before the prompt is processed.

*Refuse* means: raise `UnsupportedGenerationError`, which names the option, the reason and a fix. Nothing here has side
effects.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers import (
    DynamicCache,
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    PreTrainedModel,
    StaticCache,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.cache_utils import StaticLayer
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.utils import MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL

from hf_specdec.acceptance import rules
from hf_specdec.config import SpeculativeConfig
from hf_specdec.drafters.base import Drafter
from hf_specdec.errors import CacheCapacityError, InvalidConfigError, UnsupportedGenerationError
from hf_specdec.verification.cache import check_fits, seen_tokens
from hf_specdec.verification.graph_backends import GRAPH_BACKENDS
from hf_specdec.verification.masks import LengthBounds
from hf_specdec.verification.memory import CacheLayout
from hf_specdec.verification.model import CACHE_FIELD, cache_argument, execution_device, text_config
from hf_specdec.verification.target import PREPARED_INPUTS, REPEATED_INPUTS, TEXT_INPUTS
from hf_specdec.verification.trials import drops_cache

KEPT_INPUTS = frozenset({
    *PREPARED_INPUTS, *REPEATED_INPUTS, *TEXT_INPUTS, *MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL, "image_grid_thw",
    "video_grid_thw", "second_per_grid_ts",
})  # fmt: skip
"""Model inputs that speculation supports, because their values for generated tokens are known; any number, string or
bool is supported as well."""

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
"""transformers' processors that depend only on the text of one row and keep no state: rows may differ in length, and
prefixes may be evaluated and discarded."""

CHUNKS_CONTINUE_CACHES = Version(transformers.__version__) >= Version("5.23")
"""Whether transformers' chunked prefill can continue a cache that already holds part of the prompt."""

ROW_ARGUMENTS = frozenset({"adapter_names", "alora_offsets"})
"""Arguments that PEFT takes off before `generate()` and passes to layers by hooks, with one value for each row."""

KEPT_PREFIX_RULES = ("auto", "greedy", "rejection")
"""Acceptance rules that call stateful processors only with emitted text, once per token and in order."""


def rule_for(config: SpeculativeConfig, generation_config: GenerationConfig) -> rules.AcceptanceRule:
    """Return the acceptance rule of a call; refuse one that contradicts `do_sample`."""
    do_sample = bool(generation_config.do_sample)
    name = config.acceptance
    if name == "auto":
        name = "rejection" if do_sample else "greedy"
    if (do_sample and name == "greedy") or (not do_sample and name in ("rejection", "block")):
        raise UnsupportedGenerationError(
            f"acceptance={name!r} cannot be combined with do_sample={do_sample}.", 'Use acceptance="auto".'
        )
    if name == "typical":
        return functools.partial(rules.typical, threshold=config.posterior_threshold, alpha=config.posterior_alpha)
    if name == "nucleus":
        top_p = generation_config.top_p
        if top_p is None or top_p >= 1:
            return rules.nucleus
        # when sampling, the top-p warper has already removed all other tokens
        return functools.partial(rules.nucleus, top_p=1.0 if do_sample else top_p)
    return {"greedy": rules.greedy, "rejection": rules.rejection, "block": rules.block}[name]


def check_mode(mode: GenerationMode, config: GenerationConfig, mode_kwargs: dict[str, Any]) -> None:
    """Refuse unsupported generation modes and options."""
    if "synced_gpus" not in mode_kwargs:  # transformers passes a custom loop only the loop's own arguments
        raise UnsupportedGenerationError(
            "`custom_generate` replaces the decoding loop, so `speculative` would have no effect.",
            "Drop `custom_generate`, or pass speculative=None.",
        )
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        names = ("num_beams", "penalty_alpha", "prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp")
        values = {name: getattr(config, name, None) for name in names}
        given = [f"{name}={value!r}" for name, value in values.items() if value is True or value not in (None, 0, 1)]
        raise UnsupportedGenerationError(
            f"`speculative` supports greedy decoding and sampling, not {mode.value.replace('_', ' ')}.",
            f"Drop `speculative`, or {' and '.join(given) or 'the options that select this mode'}.",
        )
    chunk = config.prefill_chunk_size
    if chunk is not None and (not isinstance(chunk, int) or isinstance(chunk, bool) or chunk < 1):
        raise UnsupportedGenerationError(
            f"`prefill_chunk_size` must be an integer >= 1, got {chunk!r}.",
            "Use None to process the prompt at once.",
        )
    if config.use_cache is False:
        raise UnsupportedGenerationError("`speculative` needs the KV cache, got use_cache=False.", "Drop one of them.")
    if config.cache_implementation not in (None, "dynamic", "static"):
        raise UnsupportedGenerationError(
            f"`speculative` does not support cache_implementation={config.cache_implementation!r}.",
            'Drop it, or use "dynamic" or "static".',
        )
    if config.cache_implementation == "static":
        _check_attentions(config)


def _check_attentions(config: GenerationConfig) -> None:
    """Refuse `output_attentions` with a static cache, for which transformers returns one column per cache slot.

    This package returns attentions only to tokens.

    Raises:
        UnsupportedGenerationError: Attentions are requested.
    """
    if config.return_dict_in_generate and config.output_attentions:
        raise UnsupportedGenerationError(
            "`speculative` does not support `output_attentions` with a static cache.", "Use a dynamic cache."
        )


def check_runner(config: SpeculativeConfig, model: PreTrainedModel) -> None:
    """Refuse `"cuda_graph"` on a device without device graphs, and `"kernels"` on a device that is not a CPU."""
    device = execution_device(model)
    if config.compile == "kernels" and device.type != "cpu":
        raise UnsupportedGenerationError(
            f"compile='kernels' runs on a CPU, but the model is on {device}.", 'Use compile="auto" or "inductor".'
        )
    if config.compile == "cuda_graph" and device.type not in GRAPH_BACKENDS:
        raise UnsupportedGenerationError(
            f"compile={config.compile!r} needs a GPU, but the model is on {device}.",
            'Move the model to a GPU, or use compile="kernels" or "auto".',
        )


def check_top_k(config: SpeculativeConfig, model: PreTrainedModel) -> None:
    """Check that the config's `top_k` (children per node) is at most the vocabulary size.

    Raises:
        InvalidConfigError: `top_k` exceeds the vocabulary size.
    """
    vocab_size = text_config(model).vocab_size
    if config.top_k is not None and config.top_k > vocab_size:
        raise InvalidConfigError(
            f"`top_k` {config.top_k} exceeds the vocabulary of {vocab_size} tokens.", "Use a smaller value."
        )


def check_draft_window(config: SpeculativeConfig, drafter: Drafter) -> None:
    """Raise `InvalidConfigError` if `draft_window` is set and no part of the drafter has a head that it applies to."""
    if config.draft_window is not None and not any(part.has_window for part in drafter.parts):
        parts = ", ".join(dict.fromkeys(part.method for part in drafter.parts))
        raise InvalidConfigError(
            f"`draft_window` applies to EAGLE, MTP and block heads, and {parts} has none; got "
            f"draft_window={config.draft_window}.",
            "Leave draft_window None, or use a method with such a head: eagle, mtp, dflash, or auto and hybrid with "
            "one of them loaded.",
        )


def check_inputs(model_kwargs: dict[str, Any], config: GenerationConfig) -> None:
    """Refuse model inputs whose values for generated tokens are unknown, and embeddings with a chunked prefill."""
    if config.prefill_chunk_size is not None and model_kwargs.get("inputs_embeds") is not None:
        raise UnsupportedGenerationError(
            "With `prefill_chunk_size`, transformers processes all of `inputs_embeds` again in every chunk.",
            "Drop one of them.",
        )
    unknown = sorted(
        name
        for name, value in model_kwargs.items()
        if name not in KEPT_INPUTS and value is not None and not isinstance(value, bool | int | float | str)
    )
    if unknown:
        raise UnsupportedGenerationError(
            f"`speculative` does not support the model inputs {', '.join(unknown)}.", "Drop them or `speculative`."
        )


def check_slots(needed: int, limit: int | None) -> None:
    """Check that prompt, answer and one tree fit in `max_cache_length`.

    Raises:
        CacheCapacityError: They do not.
    """
    if limit is not None and limit < needed:
        raise CacheCapacityError(
            f"Prompt, answer and tree need {needed} cache slots, max_cache_length is {limit}.",
            "Raise it or leave it None, or reduce the prompt or max_new_tokens.",
        )


def check_cache(
    cache: Any, config: GenerationConfig, max_cache_length: int, layout: CacheLayout | None, rows: int
) -> int:
    """Return the number of tokens in a cache that the user passed; refuse a cache that cannot be continued.

    Args:
        cache: The user's cache.
        config: Generation config of the call.
        max_cache_length: Slots that prompt and answer need: one less than their tokens, as the last is not cached.
        layout: Layout of the cache that the model fills; None if the model verifies chains only.
        rows: Batch size, after `num_return_sequences`.

    Raises:
        UnsupportedGenerationError: The cache does not match the model or the batch, or cannot be combined with other
            options of the call.
        CacheCapacityError: It is a static cache that is too small for prompt and answer.
    """
    if config.cache_implementation is not None:
        raise UnsupportedGenerationError(
            f"`{CACHE_FIELD}` cannot be combined with `cache_implementation={config.cache_implementation!r}`.",
            "Drop one of them.",
        )
    length = seen_tokens(cache)
    if layout is not None:
        check_fits(cache, layout, rows)
    if length and config.prefill_chunk_size is not None and not CHUNKS_CONTINUE_CACHES:
        raise UnsupportedGenerationError(
            f"In this version of transformers, `prefill_chunk_size` processes the tokens of `{CACHE_FIELD}` twice.",
            "Drop `prefill_chunk_size`, or update transformers to 5.23 or newer.",
        )
    if isinstance(cache, StaticCache):
        _check_attentions(config)
    # other static layers hold a window, or nothing
    slots = min((layer.max_cache_len for layer in cache.layers if type(layer) is StaticLayer), default=None)
    if slots is not None and slots < max_cache_length:
        raise CacheCapacityError(
            f"The cache passed as `{CACHE_FIELD}` has {slots} slots; prompt and answer need {max_cache_length}.",
            "Pass a larger one, or a DynamicCache.",
        )
    return length


def check_adapter(model: PreTrainedModel) -> None:
    """Refuse PEFT adapters that pass a learned prefix as a filled cache (prefix tuning, cartridges) or vary by row."""
    wrapper = getattr(model.prepare_inputs_for_generation, "__self__", None)  # the PEFT model, for prompt learning
    kind = getattr(getattr(wrapper, "active_peft_config", None), "peft_type", None)
    if kind in ("PREFIX_TUNING", "CARTRIDGE"):
        raise UnsupportedGenerationError(
            f"`speculative` does not support {str(kind.value).lower().replace('_', ' ')}, which fills the KV cache.",
            "Use LoRA or prompt tuning, or disable the adapter.",
        )
    by_row: set[str] = set()
    for hooks in [module._forward_pre_hooks for module in model.modules() if module._forward_pre_hooks]:
        for number, hook in list(hooks.items()):
            if isinstance(hook, functools.partial) and ROW_ARGUMENTS & hook.keywords.keys():
                by_row |= ROW_ARGUMENTS & hook.keywords.keys()
                del hooks[number]  # PEFT leaves them behind after an error, for all later calls
    if by_row:
        raise UnsupportedGenerationError(
            f"`speculative` does not support PEFT's `{'`, `'.join(sorted(by_row))}`: layers are set up for the rows of"
            " this call, and speculation's forwards have others.",
            "Call generate() once for each adapter, after set_adapter(), or omit `speculative`.",
        )


def check_bounds(model: PreTrainedModel, bounds: LengthBounds, num_tokens: int, max_length: int) -> None:
    """Refuse a text that grows to a length at which the model's plain `generate()` loses its cache for good.

    Phi-4-multimodal, and Phi-3 and Phi-MoE before transformers 5.23, drop it there without reading the text again.

    Args:
        model: The target.
        bounds: Bounds that the text may reach.
        num_tokens: Tokens of the prompt, or of the given cache.
        max_length: Maximum tokens of the text.
    """
    for end in sorted(bounds.switches):
        if num_tokens <= end < max_length:
            cache = _FilledCache(end)
            text = torch.zeros(1, end + 1, dtype=torch.long, device=execution_device(model))
            inputs = model.prepare_inputs_for_generation(
                text, next_sequence_length=1, attention_mask=torch.ones_like(text), use_cache=True,
                **{cache_argument(model): cache},
            )  # fmt: skip
            if inputs.get(cache_argument(model)) is not cache and inputs["input_ids"].shape[1] <= end:
                raise UnsupportedGenerationError(
                    f"In this version of transformers, plain generate() of {type(model).__name__} drops its cache "
                    f"once the text exceeds {end} tokens, and decodes without context from there.",
                    f"Choose max_new_tokens so that the text ends before, or pass a prompt of more than {end} tokens.",
                )


class _FilledCache(DynamicCache):
    """An empty cache that reports a number of tokens."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__()
        self._num_tokens = num_tokens

    def __bool__(self) -> bool:
        return True

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._num_tokens


def check_training(model: PreTrainedModel) -> None:
    """Refuse gradient checkpointing in train mode, in which transformers disables the cache."""
    if drops_cache(model):
        raise UnsupportedGenerationError(
            "Gradient checkpointing in train mode disables the KV cache, which `speculative` needs.",
            "Call model.eval() or model.gradient_checkpointing_disable() before generating.",
        )


def check_device(input_ids: torch.Tensor, model: PreTrainedModel) -> None:
    """Refuse a prompt on another type of device than the model's inputs, such as the CPU instead of a GPU."""
    device = execution_device(model)
    if input_ids.device.type != device.type:
        raise UnsupportedGenerationError(
            f"The prompt is on {input_ids.device}, but the model needs its inputs on {device}.",
            f'Use input_ids.to("{device}").',
        )


def check_chain(config: GenerationConfig, chain_only_reason: str) -> None:
    """Refuse a static cache if the model verifies chains only (the reason is not empty): chains need a dynamic one."""
    if chain_only_reason and config.cache_implementation == "static":
        raise UnsupportedGenerationError(
            f"This model cannot verify trees ({chain_only_reason}), and chains need a dynamic cache.",
            'Drop cache_implementation="static".',
        )


def check_synced(synced_gpus: bool, needs_replay: bool) -> None:
    """Refuse `synced_gpus` if some steps need a second forward: ranks would run different numbers and deadlock."""
    if synced_gpus and needs_replay:
        raise UnsupportedGenerationError(
            "For a model with a recurrent state, `synced_gpus` cannot be combined with `speculative`: ranks would run "
            "different numbers of forwards.",
            "Drop one of them.",
        )


def check_prompt(input_ids: torch.Tensor, inputs_embeds: torch.Tensor | None) -> None:
    """Refuse a prompt that has neither tokens nor embeddings."""
    if input_ids.shape[1] == 0 and inputs_embeds is None:
        raise UnsupportedGenerationError("The prompt is empty.", "Pass at least one token, e.g. the BOS token.")


def layer_outputs(config: GenerationConfig, *, chains_only: bool = False) -> dict[str, bool]:
    """Return whether to collect "hidden_states" and "attentions", by name; refuse attentions if `chains_only`."""
    wanted = {
        name: bool(config.return_dict_in_generate and getattr(config, f"output_{name}"))
        for name in ("hidden_states", "attentions")
    }
    if chains_only and wanted["attentions"]:
        raise UnsupportedGenerationError(
            "`speculative` does not support `output_attentions` for a model that cannot verify trees.",
            "Drop one of them.",
        )
    return wanted


def in_lockstep(config: GenerationConfig, processors: LogitsProcessorList, criteria: StoppingCriteriaList) -> bool:
    """Return whether all rows of a batch must emit the same number of tokens per step.

    Required by processors and criteria that may depend on several rows (custom ones, guidance, time limits): they then
    get the same batches as in plain `generate()`. Also required by outputs with one `[B, ...]` tensor per token.
    """
    known_criteria: tuple[type, ...] = (EosTokenCriteria, MaxLengthCriteria)
    if any(isinstance(rule, EosTokenCriteria) for rule in criteria):
        known_criteria = (*known_criteria, StopStringCriteria)  # without EOS, finished rows continue to emit tokens
    return bool(
        not is_rowwise(processors)
        or any(type(rule) not in known_criteria for rule in criteria)
        or (config.return_dict_in_generate and (config.output_scores or config.output_logits))
        or any(layer_outputs(config).values())
    )


def is_rowwise(processors: Iterable[object]) -> bool:
    """Return whether every processor is one of `ROWWISE_PROCESSORS`, in transformers' own implementation."""
    return all(
        type(processor).__name__ in ROWWISE_PROCESSORS and type(processor).__module__.startswith("transformers.")
        for processor in processors
    )


def check_processors(processors: LogitsProcessorList, config: SpeculativeConfig) -> None:
    """Refuse processors that may be stateful (not rowwise) if the acceptance rule may discard evaluated prefixes."""
    if config.acceptance not in KEPT_PREFIX_RULES and not is_rowwise(processors):
        names = ", ".join(sorted(type(processor).__name__ for processor in processors if not is_rowwise([processor])))
        raise UnsupportedGenerationError(
            f"acceptance={config.acceptance!r} evaluates prefixes that may be discarded, which stateful logits "
            f"processors do not support: {names}.",
            'Use acceptance="auto", or drop them.',
        )
