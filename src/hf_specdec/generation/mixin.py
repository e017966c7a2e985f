"""`SpeculativeGenerationMixin`: hooks speculation into transformers' own `generate()`.

`generate()` prepares everything as always; four of its inner methods are extended, and a call without
`speculative` goes straight to the originals. Before: the user. After: `decode.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.streamers import BaseStreamer

from hf_specdec import decode
from hf_specdec.checkpoints.hub import load_head
from hf_specdec.config import SpeculativeConfig
from hf_specdec.drafters.base import Drafter
from hf_specdec.drafters.compatibility import try_drafter
from hf_specdec.drafters.registry import HEAD_DRAFTERS, NEEDS_HEAD, TRAINING_FREE, method_named
from hf_specdec.errors import (
    CacheCapacityError,
    DrafterMismatchError,
    InvalidConfigError,
    UnsupportedModelError,
)
from hf_specdec.generation import options
from hf_specdec.generation.state import STATE, SWAP, SpeculationState, current_facts, fit_again, register, state_of
from hf_specdec.heads.base import DraftHead
from hf_specdec.stats import SpeculationStats
from hf_specdec.target.cache import TreeCache
from hf_specdec.target.chain_cache import ChainCache
from hf_specdec.target.model import cache_argument, text_config
from hf_specdec.target.probe import inspect_target
from hf_specdec.transcript import Transcript

RESERVED_SLOTS = 1024
"""Slots that are allocated for an answer before it is known how long it will be."""


class SpeculativeGenerationMixin:
    """Adds `speculative=` to `generate()`, and the methods that load drafters.

    Use it on a loaded model, `SpeculativeGenerationMixin.attach(model)`, or as a base class before a transformers
    model class: `class SpecLlama(SpeculativeGenerationMixin, LlamaForCausalLM): ...`.
    """

    # ------------------------------------------------------------------------------------------- attach, detach

    @staticmethod
    def attach(model: Any) -> Any:
        """Make a loaded model speculative; the same object is returned, `isinstance` of its class and of the mixin.

        Args:
            model: A decoder-only transformers model, or a PEFT model around one. Attaching twice changes nothing.

        Raises:
            UnsupportedModelError: The model cannot verify a tree of tokens; it is left as it was.
        """
        if not isinstance(model, PreTrainedModel) and hasattr(model, "get_base_model"):
            SpeculativeGenerationMixin.attach(model.get_base_model())
            return model
        if isinstance(model, SpeculativeGenerationMixin):
            return model
        state = SpeculationState()
        base: Any = type(model)
        state.facts = [inspect_target(model)]
        try:  # whole or not at all, also where somebody interrupts it
            model.__dict__[STATE] = state
            model.__class__ = _speculative_class(base)
        except BaseException:
            model.__class__ = base
            model.__dict__.pop(STATE, None)
            raise
        return model

    @staticmethod
    def detach(model: Any) -> Any:
        """Undo `attach`: the model is exactly what it was; its drafters are forgotten.

        Raises:
            UnsupportedModelError: The mixin is a base class of the model's own class, or another thread is generating
                with the model.
        """
        if not isinstance(model, PreTrainedModel) and hasattr(model, "get_base_model"):
            SpeculativeGenerationMixin.detach(model.get_base_model())
            return model
        if isinstance(model, SpeculativeGenerationMixin):
            if type(model) is not _speculative_class(type(model).__mro__[2]):
                raise UnsupportedModelError(
                    f"{type(model).__name__} has the mixin as a base class of its own.", "Only attach() can be undone."
                )
            with SWAP:
                if state_of(model).is_running_elsewhere():
                    raise UnsupportedModelError(
                        f"Another thread is generating with this {type(model).__name__}.", "Detach it afterwards."
                    )
                model.__class__ = type(model).__mro__[2]
                model.__dict__.pop(STATE, None)
        return model

    @functools.wraps(GenerationMixin.generate)
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As in transformers; that it runs is noted down, for `detach`."""
        with SWAP:
            running = state_of(self).running() if isinstance(self, SpeculativeGenerationMixin) else None
        if running is None:  # detached between the call and here
            return type(self).generate(self, *args, **kwargs)
        with running:
            return super().generate(*args, **kwargs)  # type: ignore[misc]

    # ------------------------------------------------------------------------------------------- drafters

    @property
    def drafters(self) -> dict[str, Drafter]:
        """The registered drafters by name (a copy)."""
        return dict(state_of(self).drafters)

    @property
    def last_speculation(self) -> SpeculationStats | None:
        """Statistics of the last speculative `generate()` on this model."""
        return state_of(self).last

    def load_drafter(
        self, repo_or_path: str | Path | DraftHead, *, name: str | None = None, revision: str | None = None,
        token: str | bool | None = None, verify: bool | Sequence[Tensor] = False, **kwargs: Any,
    ) -> Drafter:  # fmt: skip
        """Load a head in any published layout, check it against this model and register it.

        Args:
            repo_or_path: A local directory, a Hub id, or a head that is loaded or made already.
            name: The name to call it by in `speculative=`; None is its method's name.
            revision: Branch, tag or commit on the Hub.
            token: Hub token.
            verify: Try it on a few prompts and warn where its first drafted token is accepted less than one time in
                ten: prompts of token ids `[1, P]`, or True for ones that this model makes up.
            **kwargs: Further arguments of `load_head`: `hot_tokens`, `subfolder`, `cache_dir`, ...; another is a
                `TypeError`.

        Raises:
            CheckpointFormatError: The files are no head.
            DrafterMismatchError: The head was made for another model.
            InvalidConfigError: Options of loading, with a head that is loaded.
        """
        if isinstance(repo_or_path, DraftHead):
            given = {**kwargs, **{k: v for k, v in (("revision", revision), ("token", token)) if v is not None}}
            if given:
                raise InvalidConfigError(
                    f"{', '.join(sorted(given))} tell how to load a head, and this {type(repo_or_path).__name__} is "
                    "loaded already.",
                    "Leave them out, or give its path or Hub id.",
                )
            head = repo_or_path
        else:
            head = load_head(repo_or_path, revision=revision, token=token, **kwargs)
        drafter = self.add_drafter(HEAD_DRAFTERS[type(head)](head), name)
        if verify is not False:
            last = state_of(self).last
            try_drafter(self, name or drafter.method, None if verify is True else verify)
            state_of(self).last = last
        return drafter

    def add_drafter(self, drafter: Drafter, name: str | None = None) -> Drafter:
        """Check a drafter against this model and register it.

        Args:
            drafter: Any drafter, your own included.
            name: The name to call it by; None is its method's name.

        Raises:
            DrafterMismatchError: It was made for another model, or is no drafter.
        """
        if not isinstance(drafter, Drafter):
            raise DrafterMismatchError(
                f"A drafter is an instance of hf_specdec.drafters.base.Drafter, got {type(drafter).__name__}."
            )
        register(self, drafter, name or drafter.method)
        return drafter

    def remove_drafter(self, name: str) -> Drafter:
        """Forget a drafter and return it.

        Raises:
            DrafterMismatchError: There is none of that name.
        """
        drafters = state_of(self).drafters
        if name not in drafters:
            raise DrafterMismatchError(f"There is no drafter {name!r}.", f"Registered: {sorted(drafters) or 'none'}.")
        state_of(self).fitted.pop(name)
        return drafters.pop(name)

    # ------------------------------------------------------------------------------------------- saving

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """Save as transformers does; a default stored as `generation_config.speculative` is kept.

        transformers drops what a model's own configuration does not know where `generation_config.json` says that it
        was made from it; with such a default it was not.
        """
        stored: Any = self.generation_config  # type: ignore[attr-defined]
        speculative = getattr(stored, "speculative", None)
        if speculative is None:
            return super().save_pretrained(*args, **kwargs)  # type: ignore[misc]
        made_from = stored._from_model_config
        stored._from_model_config, stored.speculative = False, SpeculativeConfig.storable(speculative)
        try:
            return super().save_pretrained(*args, **kwargs)  # type: ignore[misc]
        finally:
            stored._from_model_config, stored.speculative = made_from, speculative

    # ------------------------------------------------------------------------------------------- generate()'s hooks

    def _prepare_generation_config(
        self, generation_config: GenerationConfig | None, **kwargs: Any
    ) -> tuple[GenerationConfig, dict[str, Any]]:
        """Carry `speculative` on this call's own copy of the configuration; nobody else's is written to."""
        given = "speculative" in kwargs
        speculative = kwargs.pop("speculative", None)
        prepared, model_kwargs = super()._prepare_generation_config(generation_config, **kwargs)  # type: ignore[misc]
        if not given:
            speculative = getattr(prepared, "speculative", None)
            if speculative is None:
                speculative = getattr(self.generation_config, "speculative", None)  # type: ignore[attr-defined]
        prepared.speculative = None if speculative is False else speculative
        return prepared, model_kwargs

    def _validate_generation_mode(
        self, generation_mode: GenerationMode, generation_config: GenerationConfig, generation_mode_kwargs: Any
    ) -> None:
        """Refuse here, before any work, what speculation cannot keep."""
        super()._validate_generation_mode(generation_mode, generation_config, generation_mode_kwargs)  # type: ignore[misc]
        speculative = getattr(generation_config, "speculative", None)
        if speculative is None:
            return
        config = SpeculativeConfig.of(speculative)
        drafter = self._drafter_for(config)
        drafter.num_nodes(config)  # its own view of the fields
        options.check_mode(generation_mode, generation_config, generation_mode_kwargs)
        options.check_settings(config)
        options.rule_for(config, generation_config)
        options.check_training(self)
        options.check_adapter(self)
        fit_again(self, drafter, current_facts(self).fingerprint)
        generation_config.speculative = config

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], generation_mode: GenerationMode,
        batch_size: int, max_cache_length: int,
    ) -> bool | None:  # fmt: skip
        """Preallocate one static cache for the prompt, the answer and a tree."""
        if getattr(generation_config, "speculative", None) is None:
            return super()._prepare_cache_for_generation(  # type: ignore[misc]
                generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
            )
        options.check_inputs(model_kwargs, generation_config)
        config: SpeculativeConfig = generation_config.speculative
        given = model_kwargs.get(cache_argument(self))
        needed = max_cache_length + 1 + self._drafter_for(config).num_nodes(config)
        if given is not None:
            needed += options.check_cache(given, generation_config, max_cache_length)
        if config.max_cache_length is not None and config.max_cache_length < needed:
            raise CacheCapacityError(
                f"Prompt, answer and tree need {needed} cache slots, max_cache_length is {config.max_cache_length}.",
                "Raise it, or leave it None; or shorten the prompt or max_new_tokens.",
            )
        facts = current_facts(self)
        options.check_chain(generation_config, facts.no_branches)
        reserve = RESERVED_SLOTS if config.max_cache_length is None else None
        cache = facts.new_cache(text_config(self), config.max_cache_length or needed, reserve)
        if given is not None:
            cache.adopt(given)
        model_kwargs[cache_argument(self)] = cache
        return None

    def _sample(
        self, input_ids: Tensor, logits_processor: LogitsProcessorList, stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig, synced_gpus: bool = False, streamer: BaseStreamer | None = None,
        **model_kwargs: Any,
    ) -> Any:  # fmt: skip
        """Plain decoding, or the speculative loop."""
        config: SpeculativeConfig | None = getattr(generation_config, "speculative", None)
        if config is None:
            return super()._sample(  # type: ignore[misc]
                input_ids,
                logits_processor,
                stopping_criteria,
                generation_config,
                synced_gpus,
                streamer,
                **model_kwargs,
            )
        options.check_processors(logits_processor, config)
        options.check_device(input_ids, self)
        device = input_ids.device
        cache: TreeCache | ChainCache = model_kwargs[cache_argument(self)]
        options.check_prompt(input_ids, model_kwargs.get("inputs_embeds"), len(cache.lengths))
        options.check_synced(synced_gpus, cache)
        returns_dict = bool(generation_config.return_dict_in_generate)
        returns_cache = returns_dict or cache.is_adopted
        call = decode.Call(
            model=self,
            drafter=self._drafter_for(config),
            config=config,
            rule=options.rule_for(config, generation_config),
            input_ids=input_ids,
            generation_config=generation_config,
            model_kwargs=model_kwargs,
            streamer=streamer,
            has_unfinished=lambda finished: self._has_unfinished_sequences(  # type: ignore[attr-defined]
                finished, synced_gpus, device=device
            ),
            returns_cache=returns_cache,
            layer_outputs=options.layer_outputs(generation_config, in_chains=isinstance(cache, ChainCache)),
        )
        pad_token_id = generation_config._pad_token_tensor
        transcript = Transcript(
            input_ids,
            logits_processor,
            stopping_criteria,
            max_length=generation_config.max_length,
            do_sample=generation_config.do_sample,
            # levelling ragged rows at the end would be a forward that other ranks do not run
            in_step=isinstance(cache, ChainCache)
            or (synced_gpus and returns_cache)
            or options.in_step(generation_config, logits_processor, stopping_criteria),
            keep_scores=returns_dict and bool(generation_config.output_scores),
            keep_logits=returns_dict and bool(generation_config.output_logits),
            pad_token_id=0 if pad_token_id is None else int(pad_token_id),
        )
        output = decode.speculate(call, cache, transcript)
        state_of(self).last = output.speculation
        return output if returns_dict else output.sequences

    def _drafter_for(self, config: SpeculativeConfig) -> Drafter:
        """The drafter a config names: a registered one first, then a training-free method.

        Raises:
            InvalidConfigError: Unknown name.
            DrafterMismatchError: A method whose head is not loaded.
            UnsupportedGenerationError: A method of a later version.
        """
        registered = state_of(self).drafters
        methods = {drafter.method for drafter in registered.values()}
        name = method_named(config.method, {*registered, *methods})
        if name == "auto":
            name = next((method for method in NEEDS_HEAD if method in methods), "prompt_lookup")
        if name in registered:
            return registered[name]
        of_method = [drafter for drafter in registered.values() if drafter.method == name]
        if of_method:
            return of_method[0]
        if name in TRAINING_FREE:
            return TRAINING_FREE[name]()
        raise DrafterMismatchError(
            f"speculative={name!r} needs a head, and none is loaded on this model.",
            "Call model.load_drafter(path_or_hub_id) first.",
        )


# ----------------------------------------------------------------------------------------------- the class swap


@functools.cache
def _speculative_class(base: type) -> type:
    """The subclass that `attach` swaps in; it keeps the name that transformers and pipelines go by."""
    return type(
        base.__name__,
        (SpeculativeGenerationMixin, base),
        {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__,
         "__reduce_ex__": _reduce_attached},
    )  # fmt: skip


def _reduce_attached(self: Any, protocol: int) -> tuple[Any, ...]:
    """Pickle by base class: the swapped-in class has no importable name of its own."""
    return _new_attached, (type(self).__mro__[2],), self.__dict__


def _new_attached(base: type) -> Any:
    cls: Any = _speculative_class(base)
    return cls.__new__(cls)
