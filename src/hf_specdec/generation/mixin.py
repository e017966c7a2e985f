"""`SpeculativeGenerationMixin`: adds speculative decoding to transformers' own `generate()`.

A call without `speculative` uses transformers' methods as they are. The mixin extends some of the internal ones that
`generate()` calls; they are the last of its methods here.
"""

from __future__ import annotations

import enum
import functools
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from torch import Tensor
from torch.nn import Module
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.streamers import BaseStreamer

from hf_specdec.config import SpeculativeConfig
from hf_specdec.cpu.library import release_threads
from hf_specdec.drafters.base import Drafter, unpadded
from hf_specdec.drafters.checked import try_drafter
from hf_specdec.drafters.history import AnswerHistory, history_keys
from hf_specdec.errors import DrafterMismatchError, InvalidConfigError, UnsupportedModelError
from hf_specdec.generation import checks
from hf_specdec.generation.call import Request, call_in, plan_call, warm_up
from hf_specdec.generation.decode import decode
from hf_specdec.generation.head_loading import head_drafter
from hf_specdec.generation.model_programs import release_programs
from hf_specdec.generation.state import STATE, SWAP, SpeculationState, add_drafter, answer_history, state_of
from hf_specdec.heads.head import DraftHead
from hf_specdec.reporting.stats import SpeculationStats
from hf_specdec.transformers_private import is_derived, set_derived
from hf_specdec.validation import check_type
from hf_specdec.verification.cache import seen_tokens
from hf_specdec.verification.model import CACHE_FIELD, cache_argument
from hf_specdec.verification.probe import inspect_target
from hf_specdec.verification.trials import IN_TRIAL

logger = logging.getLogger(__name__)

AnyModule = TypeVar("AnyModule", bound=Module)
_Method = TypeVar("_Method", bound=Callable[..., Any])


class _Unset(enum.Enum):
    """Type of `STORED_DEFAULT`, which no other value has."""

    STORED_DEFAULT = "generation_config.speculative"

    def __repr__(self) -> str:
        return "<generation_config.speculative>"


STORED_DEFAULT: Any = _Unset.STORED_DEFAULT
"""Default of `speculative=`: the value stored in the generation config, or None if there is none."""


def extends(original: Callable[..., Any]) -> Callable[[_Method], _Method]:
    """Decorator for a method that passes its arguments on: show the original's parameters in its signature, too.

    The method's own keyword-only parameters follow those of the original. Its docstring is kept.

    Example: `f(self, *args, new=None, **kwargs)` that extends `f(self, old, **kwargs)` has the signature
    `(self, old, *, new=None, **kwargs)`.
    """

    def decorate(method: _Method) -> _Method:
        own = inspect.signature(method).parameters.values()
        added = [parameter for parameter in own if parameter.kind is parameter.KEYWORD_ONLY]
        names = {parameter.name for parameter in added}
        given = [p for p in inspect.signature(original).parameters.values() if p.name not in names]
        rest = [parameter for parameter in given if parameter.kind is parameter.VAR_KEYWORD]
        kept = [parameter for parameter in given if parameter not in rest]
        documented = inspect.signature(original).replace(parameters=[*kept, *added, *rest])
        kept_names = [name for name in functools.WRAPPER_ASSIGNMENTS if name != "__doc__"]
        functools.update_wrapper(method, original, assigned=kept_names, updated=())
        method.__signature__ = documented  # type: ignore[attr-defined]
        return method

    return decorate


class SpeculativeGenerationMixin:
    """Mixin that adds `speculative=` to `generate()`, and methods to load drafters.

    Use it on a loaded model, `SpeculativeGenerationMixin.attach(model)`, or as the first base class of a transformers
    model class: `class SpecLlama(SpeculativeGenerationMixin, LlamaForCausalLM): ...`.
    """

    # ------------------------------------------------------------------------------------------- attach, detach

    @staticmethod
    def attach(model: Module) -> AttachedModel:
        """Add the mixin to a loaded model. Attaching twice has no effect.

        Args:
            model: A decoder-only transformers model, or a PEFT model around one, whose base model gets the mixin.

        Returns:
            The same object, with the type `AttachedModel`: a transformers model with this mixin.

        Raises:
            UnsupportedModelError: The model can verify neither trees nor chains, or its `generate()` does not continue
                a text.

        Example:
            ```python
            model = SpeculativeGenerationMixin.attach(AutoModelForCausalLM.from_pretrained("org/model"))
            ids = model.generate(**inputs, speculative="auto")
            ```
        """
        attached: Any = model
        if not isinstance(model, PreTrainedModel) and callable(base_model := getattr(model, "get_base_model", None)):
            SpeculativeGenerationMixin.attach(base_model())
        elif not isinstance(model, SpeculativeGenerationMixin):
            base: Any = type(attached)
            state = SpeculationState()
            state.facts = [inspect_target(attached)]
            try:
                attached.__dict__[STATE] = state
                attached.__class__ = _speculative_class(base)
            except BaseException:  # including KeyboardInterrupt
                attached.__class__ = base
                attached.__dict__.pop(STATE, None)
                raise
            release_threads()
        return attached

    @staticmethod
    def detach(model: AnyModule) -> AnyModule:
        """Undo `attach` and drop the model's drafters; no effect on a model without the mixin.

        Args:
            model: The model, or a PEFT model around it.

        Returns:
            The same object.

        Raises:
            UnsupportedModelError: The mixin is a base class of the model's class, or another thread is generating with
                the model.
        """
        if not isinstance(model, PreTrainedModel) and callable(base_model := getattr(model, "get_base_model", None)):
            SpeculativeGenerationMixin.detach(base_model())
            return model
        if isinstance(model, SpeculativeGenerationMixin):
            name, base = type(model).__name__, type(model).__bases__[-1]
            if issubclass(base, SpeculativeGenerationMixin) or type(model) is not _speculative_class(base):
                raise UnsupportedModelError(f"The mixin is a base class of {name}.", "Only attach() can be undone.")
            with SWAP:
                if state_of(model).is_running_elsewhere():
                    raise UnsupportedModelError(
                        f"Another thread is generating with this {name}.", "Wait for it, then detach."
                    )
                model.__class__ = base
                model.__dict__.pop(STATE, None)
        return model

    @extends(GenerationMixin.generate)
    def generate(
        self, *args: Any,
        speculative: str | SpeculativeConfig | Mapping[str, Any] | Literal[False] | None = STORED_DEFAULT,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Generate token ids as transformers does; with `speculative`, in fewer forwards.

        In float32 greedy ids are those of plain `generate()`, and sampled tokens have the same distribution. In half
        precision the output may differ after a near-tie between two tokens: see docs/exactness.md.

        `inputs`, `generation_config` and all other arguments are those of transformers' `GenerationMixin.generate` and
        keep their meaning. With `speculative`, these are refused (reasons: docs/generate.md in the clone):

        * modes: beam search, contrastive search, `custom_generate`;
        * caches: `use_cache=False`; a `cache_implementation` or cache that is offloaded, quantised or hybrid; a filled
          static cache with sliding windows; attentions over a static cache; a cache or attentions with a model that
          verifies chains only;
        * inputs: `prefill_chunk_size` with `inputs_embeds`; no `input_ids` if EAGLE, MTP, an assistant or per-prompt
          history is used; other tensors; an empty prompt, or one on another device; an `assistant_model` that is
          unused or the model itself;
        * models: FlashAttention; PEFT prefix tuning, `adapter_names`, aLoRA; gradient checkpointing in training;
          `synced_gpus` if recurrent;
        * acceptance: `"greedy"` with `do_sample=True`; `"rejection"` and `"block"` without it; `"block"` with drafts
          that are not sampled; `"block"`, `"typical"`, `"nucleus"` with processors that are custom or read all rows;
        * forwards: `compile="kernels"` unless the model is on a CPU, `"cuda_graph"` unless it is on a GPU; whatever
          `exact=True` cannot keep.

        Args:
            speculative: Name of a method (`"auto"`, `"prompt_lookup"`, `"eagle"`, ...) or of a registered drafter; a
                `SpeculativeConfig`, or a dict of its fields, to set sizes as well. None or False: plain decoding. If
                the argument is missing: `generation_config.speculative`, if that is set.
            **kwargs: Further arguments of transformers' `generate()`. With `speculative`, this package drafts with
                `assistant_model`. `assistant_tokenizer` is its tokenizer, if that is not the model's; `tokenizer`, the
                model's, is then needed, too. `past_key_values` is called `cache` since transformers 5.24: both work.

        Returns:
            As in transformers: ids `[B, L]` of prompt and answer, or a `ModelOutput` with `return_dict_in_generate`,
            which also has the `SpeculationStats` of the call as `speculation`.

        Raises:
            InvalidConfigError: Unknown field or invalid value of `speculative`.
            DrafterMismatchError: No drafter has that name, its head or assistant is missing, or it does not fit.
            UnsupportedGenerationError: An option cannot be combined with `speculative` (beam search, ...).
            UnsupportedModelError: The model was changed and can no longer verify drafts.
            CacheCapacityError: Prompt, answer and tree do not fit in `max_cache_length` or in memory.

        Example:
            ```python
            ids = model.generate(**inputs, speculative="auto")
            ids = model.generate(**inputs, speculative={"method": "prompt_lookup", "num_draft_tokens": 8})
            ```
        """
        if speculative is not STORED_DEFAULT:
            kwargs["speculative"] = speculative
        if "cache" in kwargs:
            kwargs[CACHE_FIELD] = kwargs.pop("cache")
        if kwargs.get("speculative") not in (None, False):
            kwargs["speculative"] = Request.of(args, kwargs)
        with SWAP:
            running = state_of(self).running() if isinstance(self, SpeculativeGenerationMixin) else None
        if running is None:  # detached by another thread since the call began
            return type(self).generate(self, *args, **kwargs)
        with running:
            return super().generate(*args, **kwargs)  # type: ignore[misc]

    # ------------------------------------------------------------------------------------------- drafters

    @property
    def drafters(self) -> dict[str, Drafter]:
        """Copy of the registered drafters by name."""
        return dict(state_of(self).drafters)

    @property
    def last_speculation(self) -> SpeculationStats | None:
        """Statistics of the last speculative `generate()` on this model; None before the first."""
        return state_of(self).last

    @property
    def answer_history(self) -> AnswerHistory:
        """Earlier answers of calls with `history` set, which such calls draft from."""
        model: Any = self
        return answer_history(model)

    def load_drafter(
        self, repo_or_path: str | Path | DraftHead, *, name: str | None = None, revision: str | None = None,
        token: str | bool | None = None, verify: bool | Sequence[Tensor] | None = None,
        reading: Mapping[str, Any] | None = None, **kwargs: Any,
    ) -> Drafter:  # fmt: skip
        """Load a head, or a PARD or Gemma 4 assistant, check it against this model and register its drafter.

        Some EAGLE-3 files do not say which hidden states the head reads. Such a head is tried in every possible way on
        texts that this model writes. This takes a few seconds, once per head and model: the result is stored.

        Args:
            repo_or_path: A local directory, a Hub id, or a loaded head.
            name: The head's name in `speculative=`; None uses the name of its method. Names of other methods are
                refused.
            revision: Branch, tag or commit on the Hub.
            token: Hub token.
            verify: Prompts of token ids `[1, P]` to test the head on, or True for prompts that this model generates; a
                warning is issued if fewer than one in ten first drafted tokens are accepted. None and False skip the
                test; False also reads an ambiguous head in the documented way, without trying others.
            reading: Fixes how such a head is read; what is left open is tried. Fields: `norm_output` (the next draft
                step reads the head's normalised output), `layer_offset` (0 or 1, added to the stored layer ids),
                `final_norm` (the state after the last layer is read after the final norm).
            **kwargs: Further arguments of `load_head`: `hot_tokens`, `subfolder`, `cache_dir`, ...; for an
                assistant, of `AutoModelForCausalLM.from_pretrained` (default: this model's dtype and device).

        Returns:
            The drafter, which is also in `drafters`.

        Raises:
            CheckpointFormatError: The source is not a draft head, its layout is unknown, or a file is broken.
            DrafterMismatchError: The head was made for another model, or for this one with an adapter.
            InvalidConfigError: `name` is another method's; loading options are unknown, invalid or given with a loaded
                head; or `reading` is invalid.
            UnsupportedModelError: The model gives no access to the hidden states that the head needs.

        Example:
            ```python
            model.load_drafter("org/head")
            ids = model.generate(**inputs, speculative="auto")
            ```
        """
        model: Any = self
        check_type("verify", verify, (bool, NoneType, list, tuple), "Give True, or prompts of token ids `[1, P]`.")
        options = {"revision": revision, "token": token, **kwargs}
        drafter = head_drafter(model, repo_or_path, reading, verify is not False, options, name)
        self.add_drafter(drafter, name)
        if verify is not None and verify is not False:
            last = state_of(self).last
            try_drafter(self, name or drafter.method, None if verify is True else verify)
            state_of(self).last = last
        release_threads()
        return drafter

    def add_drafter(self, drafter: Drafter, name: str | None = None) -> Drafter:
        """Check a drafter against this model, move and cast its weights to match, and register it.

        Args:
            drafter: Any drafter, including your own.
            name: Its name in `speculative=`; None uses the name of its method. Names of other methods are refused.

        Returns:
            The same drafter.

        Raises:
            DrafterMismatchError: It was made for another model, or is not a valid drafter.
            InvalidConfigError: `name` is another method's.
            UnsupportedModelError: The model gives no access to the hidden states that it needs.
        """
        add_drafter(self, drafter, name)
        return drafter

    def remove_drafter(self, name: str) -> Drafter:
        """Remove a drafter.

        Args:
            name: Its name in `speculative=`.

        Returns:
            The drafter.

        Raises:
            DrafterMismatchError: There is no drafter of that name.
        """
        drafters = state_of(self).drafters
        if name not in drafters:
            raise DrafterMismatchError(f"There is no drafter {name!r}.", f"Registered: {sorted(drafters) or 'none'}.")
        return drafters.pop(name)

    def warmup(self, speculative: Any = "auto", *, batch_size: int = 1, prompt_length: int = 512) -> None:
        """Do the one-time work of the first `generate()` with these settings now: compile, capture, measure costs.

        Args:
            speculative: As in `generate()`, for example `{"method": "auto", "compile": "inductor"}`.
            batch_size: Batch size of later calls.
            prompt_length: Approximate prompt length of later calls, in tokens.

        Raises:
            InvalidConfigError: `batch_size` or `prompt_length` is below 1, or as in `generate()`.
            DrafterMismatchError, UnsupportedGenerationError, UnsupportedModelError: As in `generate()`.

        Example:
            ```python
            model.warmup("auto", prompt_length=2000)
            ```
        """
        if batch_size < 1 or prompt_length < 1:
            raise InvalidConfigError(
                f"batch_size and prompt_length must be at least 1, got {batch_size} and {prompt_length}."
            )
        warm_up(self, speculative, rows=batch_size, context=prompt_length)
        release_threads()

    def release_memory(self) -> None:
        """Release graphs, their KV memory and compiled programs; the next call creates what it needs again."""
        release_programs(self)

    # ------------------------------------------------------------------------------------------- the stored default

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """Save as transformers does, including a default set as `generation_config.speculative`."""
        config: Any = self.generation_config  # type: ignore[attr-defined]
        speculative, derived = getattr(config, "speculative", None), is_derived(config)
        if speculative is not None:
            config.speculative = SpeculativeConfig.storable(speculative)
            set_derived(config, False)  # transformers drops unknown fields of a config derived from the model's
        try:
            return super().save_pretrained(*args, **kwargs)  # type: ignore[misc]
        finally:
            if speculative is not None:
                config.speculative = speculative
                set_derived(config, derived)

    @extends(GenerationMixin.generate_batch)
    def generate_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Generate with transformers' continuous batching, without speculation.

        All arguments are those of transformers' `generate_batch()`; `speculative` and `assistant_model` are refused.

        Returns:
            As in transformers: a `GenerationOutput` by request id.

        Raises:
            UnsupportedGenerationError: `speculative` or `assistant_model` is given.
        """
        checks.check_batch_arguments(kwargs)
        return super().generate_batch(*args, **kwargs)  # type: ignore[misc]

    @extends(GenerationMixin.init_continuous_batching)
    def init_continuous_batching(
        self, generation_config: GenerationConfig | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Create transformers' manager of continuous batching, which decodes without speculation.

        A default `speculative` of the generation config has no effect there, which is logged once.

        Args:
            generation_config: Generation config; None uses the model's.
            *args: Further arguments of transformers' method.
            **kwargs: Further arguments of transformers' method.

        Returns:
            transformers' `ContinuousBatchingManager`.
        """
        used, state = generation_config or self.generation_config, state_of(self)  # type: ignore[attr-defined]
        if getattr(used, "speculative", None) not in (None, False) and not state.has_noted_batching:
            state.has_noted_batching = True
            logger.warning(
                "Continuous batching decodes without speculation: `speculative` of the generation config has no "
                "effect."
            )
        return super().init_continuous_batching(generation_config, *args, **kwargs)  # type: ignore[misc]

    # ------------------------------------------------------------------------------------------- what generate() calls

    def _prepare_generation_config(
        self, generation_config: GenerationConfig | None, **kwargs: Any
    ) -> tuple[GenerationConfig, dict[str, Any]]:
        """Store `speculative=` or its default as a `Request` in this call's generation config; check a given cache."""
        given = "speculative" in kwargs
        speculative = kwargs.pop("speculative", None)
        prepared, model_kwargs = super()._prepare_generation_config(generation_config, **kwargs)  # type: ignore[misc]
        model: Any = self
        if not given:
            stored = (getattr(config, "speculative", None) for config in (prepared, model.generation_config))
            speculative = next((value for value in stored if value is not None), None)
        if speculative is None or speculative is False or IN_TRIAL.get():
            prepared.speculative = None
            return prepared, model_kwargs
        prepared.speculative = speculative if isinstance(speculative, Request) else Request(speculative)
        cache = model_kwargs.get(cache_argument(model))
        if cache is not None:
            seen_tokens(cache)  # checked this early because transformers reads it before preparing the cache
        return prepared, model_kwargs

    def _validate_generation_mode(
        self, generation_mode: GenerationMode, generation_config: GenerationConfig, generation_mode_kwargs: Any
    ) -> None:
        """Replace the `Request` by the `Call`; check the options that do not depend on the prompt."""
        super()._validate_generation_mode(generation_mode, generation_config, generation_mode_kwargs)  # type: ignore[misc]
        request: Request | None = getattr(generation_config, "speculative", None)
        if request is not None:
            model: Any = self
            generation_config.speculative = plan_call(
                model, request, generation_mode, generation_config, generation_mode_kwargs
            )

    def _validate_generated_length(
        self, generation_config: GenerationConfig, input_ids_length: int, has_default_max_length: bool
    ) -> None:
        """Check that the prompt has token ids if the call needs them."""
        super()._validate_generated_length(generation_config, input_ids_length, has_default_max_length)  # type: ignore[misc]
        call = call_in(generation_config)
        if call is not None:
            checks.check_token_ids(input_ids_length, call.drafter, call.config)

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], generation_mode: GenerationMode,
        batch_size: int, max_cache_length: int,
    ) -> bool | None:  # fmt: skip
        """Check inputs and sizes; give the call its target, whose cache stands in for transformers' own."""
        call = call_in(generation_config)
        arguments = generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
        if call is None:
            return super()._prepare_cache_for_generation(*arguments)  # type: ignore[misc]
        name, rows = cache_argument(call.model), batch_size * (generation_config.num_return_sequences or 1)
        needed, cache = max_cache_length + 1 + call.limits.num_nodes, model_kwargs.get(name)
        if cache is not None:
            needed += checks.check_cache(
                cache, generation_config, max_cache_length, call.facts, rows, exact=call.config.exact
            )
        checks.check_inputs(call.config, generation_config, model_kwargs, call.facts, batch_size, rows, needed)
        call.set_target(needed, generation_config.max_new_tokens or max_cache_length)
        if generation_config.cache_implementation == "static" and generation_config.return_dict_in_generate:
            super()._prepare_cache_for_generation(*arguments)  # type: ignore[misc]
            cache = model_kwargs.get(name)  # an empty cache, to which the tokens are copied at the end
        if cache is not None:
            call.target.adopt(cache)
        model_kwargs[name] = call.target.cache
        return None

    def _sample(
        self, input_ids: Tensor, logits_processor: LogitsProcessorList, stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig, synced_gpus: bool = False, streamer: BaseStreamer | None = None,
        **model_kwargs: Any,
    ) -> Any:  # fmt: skip
        """Run the speculative loop, or plain decoding without a call; keep its statistics and answers."""
        call = call_in(generation_config)
        arguments = input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer
        if call is None:
            return super()._sample(*arguments, **model_kwargs)  # type: ignore[misc]
        call.set_text(*arguments, model_kwargs)
        output = decode(call, generation_config)
        state_of(self).note_call(output.speculation, is_eager=call.runner is None)
        if call.config.history is not None:
            padding, width = call.target.padding, input_ids.shape[1]
            prompts = unpadded(input_ids, None if padding is None else padding.last(width))
            history = answer_history(call.model)
            for row, key in enumerate(history_keys(call.config.history, prompts)):
                history.add(call.text.new_tokens[row][: call.text.num_generated[row]], key, prompts[row])
        return output if generation_config.return_dict_in_generate else output.sequences


@functools.cache
def _speculative_class(base: type) -> type:
    """Return the subclass of the mixin and a model class, created once per model class.

    It has the model class's name, module and docstring: transformers and pipelines read the class name.
    """
    fields = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    return type(base.__name__, (SpeculativeGenerationMixin, base), {**fields, "__reduce_ex__": _reduce})


def _reduce(self: Any, protocol: int) -> tuple[Any, ...]:
    """Implement `__reduce_ex__` with the model class and attributes: pickle cannot import a `_speculative_class`."""
    return _new_attached, (type(self).__bases__[-1],), self.__dict__


def _new_attached(base: type) -> Any:
    cls: Any = _speculative_class(base)
    return cls.__new__(cls)


if TYPE_CHECKING:
    from transformers.models.auto.modeling_auto import _BaseModelWithGenerate

    class AttachedModel(SpeculativeGenerationMixin, _BaseModelWithGenerate):
        """Type of an attached model, for editors and type checkers; it does not exist at run time."""
