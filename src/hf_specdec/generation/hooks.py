"""`GenerationHooks`: the internal methods of transformers' `generate()` that speculation extends.

A call without `speculative` uses the originals. Below them: how a loaded model gets the mixin, and how the mixin's
methods document the parameters of those of transformers.
"""

from __future__ import annotations

import enum
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.streamers import BaseStreamer

from hf_specdec.drafters.base import unpadded
from hf_specdec.drafters.history import history_keys
from hf_specdec.errors import UnsupportedModelError
from hf_specdec.generation import checks
from hf_specdec.generation.call import Request, call_in, plan_call
from hf_specdec.generation.decode import decode
from hf_specdec.generation.state import STATE, SWAP, SpeculationState, answer_history, state_of
from hf_specdec.verification.cache import seen_tokens
from hf_specdec.verification.model import cache_argument
from hf_specdec.verification.probe import gate, inspect_target
from hf_specdec.verification.trials import IN_TRIAL

_Method = TypeVar("_Method", bound=Callable[..., Any])


class GenerationHooks:
    """Base class of the mixin: the five extended methods, which precede those of the model's class."""

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
            needed += checks.check_cache(cache, generation_config, max_cache_length, call.facts, rows)
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


# ------------------------------------------------------------------------------------------- attach, detach


def swap_in(model: Any, mixin: type) -> None:
    """Check that a model supports speculation, then give it the mixin and a `SpeculationState`."""
    state = SpeculationState()
    base: Any = type(model)
    gate(model)
    state.facts = [inspect_target(model)]
    try:
        model.__dict__[STATE] = state
        model.__class__ = speculative_class(mixin, base)
    except BaseException:  # including KeyboardInterrupt
        model.__class__ = base
        model.__dict__.pop(STATE, None)
        raise


def swap_out(model: Any, mixin: type) -> None:
    """Restore the model's class and remove its state."""
    name = type(model).__name__
    base: Any = type(model).__bases__[-1]
    if issubclass(base, mixin) or type(model) is not speculative_class(mixin, base):
        raise UnsupportedModelError(f"The mixin is a base class of {name}.", "Only attach() can be undone.")
    with SWAP:
        if state_of(model).is_running_elsewhere():
            raise UnsupportedModelError(f"Another thread is generating with this {name}.", "Wait for it, then detach.")
        model.__class__ = base
        model.__dict__.pop(STATE, None)


@functools.cache
def speculative_class(mixin: type, base: type) -> type:
    """Return the subclass of mixin and model class, created once per pair.

    It has the model class's name, module and docstring: transformers and pipelines read the class name.
    """
    return type(
        base.__name__,
        (mixin, base),
        {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__,
         "__reduce_ex__": _reduce},
    )  # fmt: skip


def _reduce(self: Any, protocol: int) -> tuple[Any, ...]:
    """Implement `__reduce_ex__` with mixin, model class and attributes: pickle cannot import a `speculative_class`."""
    return _new_attached, type(self).__bases__, self.__dict__


def _new_attached(mixin: type, base: type) -> Any:
    cls: Any = speculative_class(mixin, base)
    return cls.__new__(cls)


# ------------------------------------------------------------------------------------------- signatures


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
