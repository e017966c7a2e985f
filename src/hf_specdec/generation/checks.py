"""The refusals of a call, in one table for each stage of transformers' `generate()`.

All refusals come before any work and name the value, the reason and a way out. Behind these checks the arguments of a
call are only asserted. Nothing here has side effects, except that hooks left behind by PEFT are removed.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList, PreTrainedModel, StaticCache
from transformers.cache_utils import StaticLayer
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.utils import MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL

from hf_specdec.acceptance.processors import is_rowwise
from hf_specdec.config import COMBINED, PER_PROMPT, PLAIN, SpeculativeConfig
from hf_specdec.drafters.base import Drafter
from hf_specdec.drafters.checked import is_third_party
from hf_specdec.drafters.grammar_states import find_grammar
from hf_specdec.drafters.registry import GRAMMAR
from hf_specdec.errors import (
    CacheCapacityError,
    DrafterMismatchError,
    InvalidConfigError,
    SpeculativeDecodingError,
    UnsupportedGenerationError,
)
from hf_specdec.records import shortened
from hf_specdec.verification.cache import check_fits, seen_tokens
from hf_specdec.verification.graph_backends import GRAPH_BACKENDS
from hf_specdec.verification.model import CACHE_FIELD, cache_argument, execution_device, text_config
from hf_specdec.verification.probe import TargetFacts
from hf_specdec.verification.programs import supports_kernels
from hf_specdec.verification.target import PREPARED_INPUTS, REPEATED_INPUTS, TEXT_INPUTS, Target
from hf_specdec.verification.trials import drops_cache

KEPT_INPUTS = frozenset({
    *PREPARED_INPUTS, *REPEATED_INPUTS, *TEXT_INPUTS, *MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL, "image_grid_thw",
    "video_grid_thw", "second_per_grid_ts",
})  # fmt: skip
"""Model inputs that speculation supports, because their values for generated tokens are known; any number, string or
bool is supported as well."""

CHUNKS_CONTINUE_CACHES = Version(transformers.__version__) >= Version("5.23")
"""Whether transformers' chunked prefill can continue a cache that already holds part of the prompt."""

ROW_ARGUMENTS = frozenset({"adapter_names", "alora_offsets"})
"""Arguments that PEFT takes off before `generate()` and passes to layers by hooks, with one value for each row."""

KEPT_PREFIX_RULES = ("auto", "greedy", "rejection")
"""Acceptance rules that call stateful processors only with emitted text, once per token and in order."""

ASSISTED, PARD = "draft_model", "pard"
"""Names of the methods that draft with an assistant model, token by token and several tokens per forward."""

MODE_OPTIONS = ("num_beams", "penalty_alpha", "prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp")
"""Fields of a generation config that select a generation mode."""

_Row = tuple[Any, str, str] | tuple[Any, str, str, type[SpeculativeDecodingError]]
"""Whether a call is refused, the reason, the way out, and the error (default: `UnsupportedGenerationError`)."""


def _refuse(*table: _Row) -> None:
    for applies, reason, way_out, *error in table:
        if applies:
            raise (error[0] if error else UnsupportedGenerationError)(reason, way_out)


def check_arguments(prompt: Any) -> None:
    """Refuse a prompt that is text, a list, or a dict that was not unpacked: transformers fails without a reason."""
    if prompt is not None and not isinstance(prompt, Tensor):
        raise UnsupportedGenerationError(
            f"The prompt must be a tensor of token ids, got a {type(prompt).__name__}.",
            'Call generate(**tokenizer(text, return_tensors="pt"), ...).',
        )


def check_batch_arguments(arguments: dict[str, Any]) -> None:
    """Remove `speculative` and `assistant_model` from the arguments of `generate_batch()`; refuse them if set."""
    for name in ("speculative", "assistant_model"):
        if arguments.pop(name, None) not in (None, False):
            raise UnsupportedGenerationError(
                f"Continuous batching decodes without speculation, so `{name}` would have no effect.",
                f"Drop `{name}`, or use generate().",
            )


def check_mode(mode: GenerationMode, config: GenerationConfig, mode_kwargs: dict[str, Any]) -> None:
    """Refuse generation modes and options of `generate()`, before anything is known of the drafter."""
    chunk = config.prefill_chunk_size
    values = {name: getattr(config, name, None) for name in MODE_OPTIONS}
    given = [f"{name}={value!r}" for name, value in values.items() if value is True or value not in (None, 0, 1)]
    _refuse(
        (
            "synced_gpus" not in mode_kwargs,  # transformers passes a custom loop only the loop's own arguments
            "`custom_generate` replaces the decoding loop, so `speculative` would have no effect.",
            "Drop `custom_generate`, or pass speculative=None.",
        ),
        (
            mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE),
            f"`speculative` supports greedy decoding and sampling, not {mode.value.replace('_', ' ')}.",
            f"Drop `speculative`, or {' and '.join(given) or 'the options that select this mode'}.",
        ),
        (
            chunk is not None and (not isinstance(chunk, int) or isinstance(chunk, bool) or chunk < 1),
            f"`prefill_chunk_size` must be an integer >= 1, got {chunk!r}.",
            "Use None to process the prompt at once.",
        ),
        (config.use_cache is False, "`speculative` needs the KV cache, got use_cache=False.", "Drop one of them."),
        (
            config.cache_implementation not in (None, "dynamic", "static"),
            f"`speculative` does not support cache_implementation={config.cache_implementation!r}.",
            'Drop it, or use "dynamic" or "static".',
        ),
        _static_attentions(config, config.cache_implementation == "static"),
        (
            mode_kwargs.get("assistant_model") is not None,  # the mixin takes it if `speculative` is an argument
            "`assistant_model` is ambiguous if `speculative` is only stored in the generation config.",
            'Also pass speculative="draft_model", or speculative=None for the assisted generation of transformers.',
        ),
        (
            mode_kwargs.get("assistant_tokenizer") is not None,
            "`assistant_tokenizer` is given without `assistant_model`.",
            "Pass both to this call, or drop it; a drafter that was added before has its own tokenizers.",
            InvalidConfigError,
        ),
    )


def _static_attentions(config: GenerationConfig, is_static: bool) -> _Row:
    """Transformers returns one column per slot of a static cache, this package only the columns of tokens."""
    return (
        is_static and config.return_dict_in_generate and config.output_attentions,
        "`speculative` does not support `output_attentions` with a static cache.",
        "Use a dynamic cache.",
    )


def check_assistant(model: Any, tokenizer: Any, assistant_tokenizer: Any, config: SpeculativeConfig) -> None:
    """Refuse an assistant that has no effect or is not loaded, and its tokenizer without that of the model."""
    _refuse(
        (
            config.method not in (ASSISTED, PARD, *COMBINED),
            f"`assistant_model` has no effect with speculative={config.method!r}.",
            f"Use speculative={ASSISTED!r}, {PARD!r}, 'hybrid' or 'auto', or drop it.",
        ),
        (
            not isinstance(model, nn.Module),
            f"`assistant_model` must be a loaded model, got {shortened(model)}.",
            "Load it: AutoModelForCausalLM.from_pretrained(...).",
        ),
        (
            config.methods and not {config.method, *config.methods} & {ASSISTED, PARD},
            f"`assistant_model` has no effect with methods={list(config.methods or ())}.",
            f"Add {ASSISTED!r} to them, or drop it.",
        ),
        (
            assistant_tokenizer is not None and tokenizer is None,
            "`assistant_tokenizer` is given, but `tokenizer`, that of the model itself, is not.",
            "Pass both, or neither if they are the same.",
            InvalidConfigError,
        ),
    )


def check_config(
    config: SpeculativeConfig, drafter: Drafter, model: PreTrainedModel, generation_config: GenerationConfig
) -> None:
    """Refuse fields of the config that do not suit the drafter, the model or the call's sampling."""
    device, vocab_size = execution_device(model), text_config(model).vocab_size
    parts = ", ".join(dict.fromkeys(part.method for part in drafter.parts))
    do_sample = bool(generation_config.do_sample)
    _refuse(
        (
            config.draft_window is not None and not any(part.has_window for part in drafter.parts),
            f"`draft_window` applies to EAGLE, MTP and block heads, and {parts} has none; got "
            f"draft_window={config.draft_window}.",
            "Leave draft_window None, or use a method with such a head: eagle, mtp, dflash, or auto and hybrid with "
            "one of them loaded.",
            InvalidConfigError,
        ),
        (
            config.method == PLAIN and config.adaptive,
            f"`adaptive` chooses the size of trees, and {PLAIN!r} drafts none; got {config.adaptive!r}.",
            "Leave it None.",
            InvalidConfigError,
        ),
        (
            config.top_k is not None and config.top_k > vocab_size,
            f"`top_k` {config.top_k} exceeds the vocabulary of {vocab_size} tokens.",
            "Use a smaller value.",
            InvalidConfigError,
        ),
        (
            config.compile == "kernels" and device.type != "cpu",
            f"compile='kernels' runs on a CPU, but the model is on {device}.",
            'Use compile="auto" or "inductor".',
        ),
        (
            config.compile == "cuda_graph" and device.type not in GRAPH_BACKENDS,
            f"compile={config.compile!r} needs a GPU, but the model is on {device}.",
            'Move the model to a GPU, or use compile="kernels" or "auto".',
        ),
        (
            config.acceptance in (("greedy",) if do_sample else ("rejection", "block")),
            f"acceptance={config.acceptance!r} cannot be combined with do_sample={do_sample}.",
            'Use acceptance="auto".',
        ),
        (
            # drafts of third-party drafters are checked when they are verified
            config.acceptance == "block" and not drafter.samples and not is_third_party(drafter),
            f"acceptance='block' verifies sampled chains, and {drafter.method!r} does not sample its drafts.",
            'Use acceptance="auto", which is also lossless, or draft a chain with assistant_model= in a call that '
            "samples.",
        ),
        (
            drops_cache(model),
            "Gradient checkpointing in train mode disables the KV cache, which `speculative` needs.",
            "Call model.eval() or model.gradient_checkpointing_disable() before generating.",
        ),
    )
    _check_peft(model)


def check_exact(
    config: SpeculativeConfig, drafter: Drafter, model: PreTrainedModel, do_sample: bool, *, layers: bool,
    synced_gpus: bool,
) -> None:  # fmt: skip
    """Refuse exact calls that no program makes exact, or that would not run it; see docs/exactness.md.

    `layers`: whether the outputs of all layers are wanted.
    """
    device, dtype = execution_device(model), str(model.dtype).removeprefix("torch.")
    own = "exact=True needs this package's own forwards, which"
    _refuse(
        (
            config.compile in ("none", "inductor"),
            f"exact=True cannot be kept with compile={config.compile!r}, whose sums depend on the number of "
            "tokens in a forward.",
            'Use compile="auto", "kernels" on a CPU or "cuda_graph" on a GPU.',
            InvalidConfigError,
        ),
        (
            config.acceptance in ("block", "typical", "nucleus"),
            f"exact=True cannot be kept with acceptance={config.acceptance!r}, which gives other tokens than plain "
            "decoding.",
            'Use acceptance="auto".',
            InvalidConfigError,
        ),
        (
            device.type != "cpu" and device.type not in GRAPH_BACKENDS,
            f"{own} are CPU kernels or graphs, and there are none on {device}.",
            "Move the model to a CPU, or drop `exact`.",
        ),
        (
            device.type == "cpu" and not supports_kernels(device, model.dtype),
            f"{own} are CPU kernels, and there are none for {dtype}.",
            "Load the model with dtype=torch.bfloat16 or torch.float32, or drop `exact`.",
        ),
        (
            torch.is_autocast_enabled(device.type),
            f"{own} do not run under autocast.",
            "Call generate() outside of torch.autocast, or drop `exact`.",
        ),
        (
            layers,
            f"{own} do not return hidden states or attentions of all layers.",
            "Drop `output_hidden_states` and `output_attentions`, or `exact`.",
        ),
        (
            synced_gpus,
            "exact=True cannot be combined with `synced_gpus`: the weights are spread over processes.",
            "Drop one of them.",
        ),
        (
            do_sample and drafter.samples,
            f"exact=True cannot be kept with drafts of {drafter.method!r}, which are sampled with random numbers "
            "of the text.",
            "Make that drafter with sample=False, or pass assistant_model= in the call.",
        ),
    )


def _check_peft(model: PreTrainedModel) -> None:
    """Refuse PEFT adapters that pass a learned prefix as a filled cache (prefix tuning, cartridges) or vary by row."""
    wrapper = getattr(model.prepare_inputs_for_generation, "__self__", None)  # the PEFT model, for prompt learning
    kind = getattr(getattr(wrapper, "active_peft_config", None), "peft_type", None)
    by_row: set[str] = set()
    for hooks in [module._forward_pre_hooks for module in model.modules() if module._forward_pre_hooks]:
        for number, hook in list(hooks.items()):
            if isinstance(hook, functools.partial) and ROW_ARGUMENTS & hook.keywords.keys():
                by_row |= ROW_ARGUMENTS & hook.keywords.keys()
                del hooks[number]  # PEFT leaves them behind after an error, for all later calls
    _refuse(
        (
            kind in ("PREFIX_TUNING", "CARTRIDGE"),
            f"`speculative` does not support {str(getattr(kind, 'value', '')).lower().replace('_', ' ')}, which fills "
            "the KV cache.",
            "Use LoRA or prompt tuning, or disable the adapter.",
        ),
        (
            by_row,
            f"`speculative` does not support PEFT's `{'`, `'.join(sorted(by_row))}`: layers are set up for the rows of"
            " this call, and speculation's forwards have others.",
            "Call generate() once for each adapter, after set_adapter(), or omit `speculative`.",
        ),
    )


def check_token_ids(width: int, drafter: Drafter, config: SpeculativeConfig) -> None:
    """Refuse a prompt without token ids (`width` 0) if a part of the drafter or one history per prompt reads them."""
    names = dict.fromkeys(part.method for part in drafter.parts if part.needs.token_ids)
    _refuse(
        (
            not width and names,
            f"Drafts of {', '.join(map(repr, names))} need the prompt's token ids, got none.",
            "Pass at least one token, e.g. the BOS token; with inputs_embeds pass input_ids as well, or use a method "
            'that needs none, such as "prompt_lookup".',
        ),
        (
            not width and config.history == PER_PROMPT,
            f"history={PER_PROMPT!r} finds a prompt's history by its token ids, got none.",
            "Pass input_ids, also with inputs_embeds, or give the history a name.",
        ),
    )


def check_inputs(
    config: SpeculativeConfig, generation_config: GenerationConfig, model_kwargs: dict[str, Any], facts: TargetFacts,
    num_prompts: int, num_rows: int, needed_slots: int,
) -> None:  # fmt: skip
    """Refuse model inputs with unknown values for generated tokens, and sizes that do not fit.

    There are several rows per prompt with `num_return_sequences`. Prompt, answer and one tree need `needed_slots`.
    """
    unknown = sorted(
        name
        for name, value in model_kwargs.items()
        if name not in KEPT_INPUTS and value is not None and not isinstance(value, bool | int | float | str)
    )
    others = sorted(name for name, value in model_kwargs.items() if value is not None and name not in PREPARED_INPUTS)
    positions = model_kwargs.get("position_ids")
    limit = config.max_cache_length
    names = config.history if isinstance(config.history, tuple) else ()
    _refuse(
        (
            generation_config.prefill_chunk_size is not None and model_kwargs.get("inputs_embeds") is not None,
            "With `prefill_chunk_size`, transformers processes all of `inputs_embeds` again in every chunk.",
            "Drop one of them.",
        ),
        (
            unknown,
            f"`speculative` does not support the model inputs {', '.join(unknown)}.",
            "Drop them or `speculative`.",
        ),
        (
            config.exact and model_kwargs.get("inputs_embeds") is not None,
            "exact=True needs forwards of this package, which read token ids, got `inputs_embeds`.",
            "Pass input_ids alone, or drop `exact`.",
        ),
        (
            config.exact and others,
            f"exact=True needs forwards of this package, which do not take the model inputs {', '.join(others)}.",
            "Drop them or `exact`.",
        ),
        (
            config.exact and positions is not None and positions.dim() > 2,
            "exact=True needs forwards of this package, which take one position per token; this model has several.",
            "Drop `exact`.",
        ),
        (
            limit is not None and limit < needed_slots,
            f"Prompt, answer and tree need {needed_slots} cache slots, max_cache_length is {limit}.",
            "Raise it or leave it None, or reduce the prompt or max_new_tokens.",
            CacheCapacityError,
        ),
        (
            facts.chain_only_reason and generation_config.cache_implementation == "static",
            f"This model cannot verify trees ({facts.chain_only_reason}), and chains need a dynamic cache.",
            'Drop cache_implementation="static".',
        ),
        (
            names and len(names) not in (num_prompts, num_rows),
            f"`history` has {len(names)} names, but there are {num_prompts} prompts.",
            "Give one name for each prompt.",
            InvalidConfigError,
        ),
    )


def check_cache(
    cache: Any, config: GenerationConfig, max_cache_length: int, facts: TargetFacts, num_rows: int, *, exact: bool
) -> int:
    """Return the number of tokens in a cache that the user passed; refuse a cache that cannot be continued.

    `max_cache_length` are the slots that prompt and answer need: one less than their tokens, as the last is not
    cached. `num_rows` is the batch size, after `num_return_sequences`.
    """
    if config.cache_implementation is not None:
        raise UnsupportedGenerationError(
            f"`{CACHE_FIELD}` cannot be combined with `cache_implementation={config.cache_implementation!r}`.",
            "Drop one of them.",
        )
    length = seen_tokens(cache)
    if facts.cache_layout is not None:
        check_fits(cache, facts.cache_layout, facts.state_shapes, num_rows)
    # other static layers hold a window, or nothing
    slots = min((layer.max_cache_len for layer in cache.layers if type(layer) is StaticLayer), default=None)
    _refuse(
        (
            length and exact,
            f"exact=True cannot continue the {length} tokens of `{CACHE_FIELD}`, which other forwards may have read.",
            f"Drop `{CACHE_FIELD}`, so that the whole prompt is read, or `exact`.",
        ),
        (
            length and config.prefill_chunk_size is not None and not CHUNKS_CONTINUE_CACHES,
            f"In this version of transformers, `prefill_chunk_size` processes the tokens of `{CACHE_FIELD}` twice.",
            "Drop `prefill_chunk_size`, or update transformers to 5.23 or newer.",
        ),
        _static_attentions(config, isinstance(cache, StaticCache)),
        (
            slots is not None and slots < max_cache_length,
            f"The cache passed as `{CACHE_FIELD}` has {slots} slots; prompt and answer need {max_cache_length}.",
            "Pass a larger one, or a DynamicCache.",
            CacheCapacityError,
        ),
    )
    return length


def check_prompt(
    config: SpeculativeConfig, target: Target, input_ids: Tensor, inputs_embeds: Tensor | None,
    processors: LogitsProcessorList, max_length: int, *, synced_gpus: bool,
) -> None:  # fmt: skip
    """Refuse a prompt, or logits processors, with which the call cannot be decoded."""
    device = execution_device(target.model)
    stateful = ", ".join(sorted(type(one).__name__ for one in processors if not is_rowwise([one])))
    _refuse(
        (
            config.acceptance not in KEPT_PREFIX_RULES and stateful,
            f"acceptance={config.acceptance!r} evaluates prefixes that may be discarded, which stateful logits "
            f"processors do not support: {stateful}.",
            'Use acceptance="auto", or drop them.',
        ),
        (
            GRAMMAR in (config.method, *(config.methods or ())) and find_grammar(processors) is None,
            f"{GRAMMAR!r} drafts what the grammar of a logits processor forces, and this call has none of xgrammar "
            "(0.1.33 or newer) or outlines.",
            'Pass one as `logits_processor`, or use "auto", which needs none.',
            DrafterMismatchError,
        ),
        (
            input_ids.device.type != device.type,
            f"The prompt is on {input_ids.device}, but the model needs its inputs on {device}.",
            f'Use input_ids.to("{device}").',
        ),
        (
            config.exact and target.bounds.switches,
            f"exact=True is not supported for texts that reach {min(target.bounds.switches, default=0)} tokens, where "
            "this model's forward changes for all tokens.",
            "Reduce the prompt or max_new_tokens, or drop `exact`.",
        ),
        (
            input_ids.shape[1] == 0 and inputs_embeds is None,
            "The prompt is empty.",
            "Pass at least one token, e.g. the BOS token.",
        ),
        (
            synced_gpus and target.needs_replay,  # ranks would deadlock
            "For a model with a recurrent state, `synced_gpus` cannot be combined with `speculative`: ranks would run "
            "different numbers of forwards.",
            "Drop one of them.",
        ),
    )
    _check_bounds(target, target.start or input_ids.shape[1], max_length)


def _check_bounds(target: Target, num_tokens: int, max_length: int) -> None:
    """Refuse a text that grows to a length at which the model's plain `generate()` loses its cache for good.

    Phi-4-multimodal, and Phi-3 and Phi-MoE before transformers 5.23, drop it there without reading the text again. The
    text begins with `num_tokens` of the prompt, or of the given cache.
    """
    model = target.model
    for end in sorted(target.bounds.switches):
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
