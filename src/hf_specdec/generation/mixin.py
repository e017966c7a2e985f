"""`SpeculativeGenerationMixin`: hooks speculation into transformers' own `generate()`.

`generate()` prepares everything as always; four of its inner methods are extended, and a call without
`speculative` goes straight to the originals.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.streamers import BaseStreamer

from hf_specdec.acceptance.transcript import Transcript
from hf_specdec.checkpoints.hub import load_head
from hf_specdec.config import SpeculativeConfig
from hf_specdec.drafters.base import Drafter
from hf_specdec.drafters.compatibility import try_drafter
from hf_specdec.drafters.registry import drafter_of
from hf_specdec.errors import (
    CacheCapacityError,
    DrafterMismatchError,
    InvalidConfigError,
    UnsupportedModelError,
)
from hf_specdec.generation import decode, options
from hf_specdec.generation.plan import (
    WithAssistant,
    controller_of,
    plan_call,
    plan_of,
    runs_with_others,
    warm_up,
    with_programs,
)
from hf_specdec.generation.state import STATE, SWAP, SpeculationState, register, release_programs, state_of
from hf_specdec.heads.base import DraftHead
from hf_specdec.reporting.stats import SpeculationStats
from hf_specdec.verification.cache import seen_tokens
from hf_specdec.verification.memory import RESERVED_SLOTS
from hf_specdec.verification.model import CACHE_FIELD, cache_argument
from hf_specdec.verification.plain import check_plain_generate
from hf_specdec.verification.probe import gate, inspect_target, reproducible


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
        gate(model)
        with reproducible(model):
            check_plain_generate(model)
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
        """Same as transformers; registers the running call so that `detach` can refuse.

        `cache=` is taken with every supported version of transformers, which calls it `past_key_values` before 5.24.
        """
        if "cache" in kwargs:
            kwargs[CACHE_FIELD] = kwargs.pop("cache")
        if kwargs.get("assistant_model") is not None and kwargs.get("speculative") not in (None, False):
            kwargs["speculative"] = WithAssistant(kwargs["speculative"], kwargs.pop("assistant_model"))
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
            CheckpointFormatError: The files are not a head's.
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
        drafter = self.add_drafter(drafter_of(head), name)
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
            DrafterMismatchError: It was made for another model, or is not a drafter.
        """
        register(self, drafter, name)
        return drafter

    def remove_drafter(self, name: str) -> Drafter:
        """Forget a drafter and return it.

        Raises:
            DrafterMismatchError: There is none of that name.
        """
        drafters = state_of(self).drafters
        if name not in drafters:
            raise DrafterMismatchError(f"There is no drafter {name!r}.", f"Registered: {sorted(drafters) or 'none'}.")
        return drafters.pop(name)

    def warmup(self, speculative: Any = "auto", *, batch_size: int = 1, prompt_length: int = 512) -> None:
        """Do now what the first call of `generate()` with these settings would take its time for: compile, measure.

        Args:
            speculative: As in `generate()`; `{"method": "auto", "compile": "compile"}`, say.
            batch_size: Rows of the calls to come.
            prompt_length: Tokens of their prompts, about.

        Raises:
            InvalidConfigError, DrafterMismatchError, UnsupportedGenerationError: As in `generate()`.
        """
        if batch_size < 1 or prompt_length < 1:
            raise InvalidConfigError(
                f"batch_size and prompt_length are at least 1, got {batch_size}, {prompt_length}."
            )
        warm_up(self, speculative, rows=batch_size, context=prompt_length)

    def release_memory(self) -> None:
        """Let go of graphs, their key-value memory and compiled programs; the next call makes what it needs anew."""
        release_programs(self)

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
        model: Any = self
        given = model_kwargs.get(cache_argument(model))
        if prepared.speculative is not None and given is not None:
            seen_tokens(given)  # transformers reads it before it prepares a cache
        return prepared, model_kwargs

    def _validate_generation_mode(
        self, generation_mode: GenerationMode, generation_config: GenerationConfig, generation_mode_kwargs: Any
    ) -> None:
        """Refuse here, before any work, what speculation cannot keep."""
        super()._validate_generation_mode(generation_mode, generation_config, generation_mode_kwargs)  # type: ignore[misc]
        speculative = getattr(generation_config, "speculative", None)
        if speculative is not None:
            model: Any = self
            generation_config.speculative = plan_call(
                model, speculative, generation_mode, generation_config, generation_mode_kwargs
            )

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], generation_mode: GenerationMode,
        batch_size: int, max_cache_length: int,
    ) -> bool | None:  # fmt: skip
        """Make the target, with a cache for the prompt, the answer and a tree."""
        plan = plan_of(generation_config)
        if plan is None:
            return super()._prepare_cache_for_generation(  # type: ignore[misc]
                generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
            )
        options.check_inputs(model_kwargs, generation_config)
        model: Any = self
        name, limit = cache_argument(model), plan.config.max_cache_length
        given, rows = model_kwargs.get(name), batch_size * (generation_config.num_return_sequences or 1)
        needed = max_cache_length + 1 + plan.limits.num_nodes
        if given is not None:
            layout = plan.facts.cache_layout
            needed += options.check_cache(given, generation_config, max_cache_length, layout, rows)
        if limit is not None and limit < needed:
            raise CacheCapacityError(
                f"Prompt, answer and tree need {needed} cache slots, max_cache_length is {limit}.",
                "Raise it, or leave it None; or shorten the prompt or max_new_tokens.",
            )
        options.check_chain(generation_config, plan.facts.chain_only_reason)
        plan = with_programs(plan, model)
        if plan.runner is not None:  # costs are measured over the memory that this call will take
            controller_of(plan, model, rows, max_cache_length, synced_gpus=runs_with_others())
        reserve = RESERVED_SLOTS if limit is None else None
        wanted = {f"output_{output}": True for output, asked in plan.layer_outputs.items() if asked}
        target = plan.facts.new_target(model, limit or needed, reserve, wanted, plan.runner)
        if given is not None:
            target.adopt(given)
        model_kwargs[name] = target.cache
        generation_config.speculative = replace(plan, target=target)
        return None

    def _sample(
        self, input_ids: Tensor, logits_processor: LogitsProcessorList, stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig, synced_gpus: bool = False, streamer: BaseStreamer | None = None,
        **model_kwargs: Any,
    ) -> Any:  # fmt: skip
        """Plain decoding, or the speculative loop."""
        plan = plan_of(generation_config)
        if plan is None:
            return super()._sample(  # type: ignore[misc]
                input_ids,
                logits_processor,
                stopping_criteria,
                generation_config,
                synced_gpus,
                streamer,
                **model_kwargs,
            )
        model: Any = self
        assert plan.target is not None
        options.check_processors(logits_processor, plan.config)
        options.check_device(input_ids, model)
        options.check_prompt(input_ids, model_kwargs.get("inputs_embeds"))
        options.check_synced(synced_gpus, plan.target.needs_replay)
        device = input_ids.device
        returns_dict = bool(generation_config.return_dict_in_generate)
        returns_cache = returns_dict or plan.target.is_adopted
        pad_token_id = generation_config._pad_token_tensor
        transcript = Transcript(
            input_ids,
            logits_processor,
            stopping_criteria,
            max_length=generation_config.max_length,
            do_sample=generation_config.do_sample,
            # bringing ragged rows to one length at the end would be a forward that other ranks do not run
            lockstep=plan.target.lockstep
            or (synced_gpus and returns_cache)
            or options.in_lockstep(generation_config, logits_processor, stopping_criteria),
            keep_scores=returns_dict and bool(generation_config.output_scores),
            keep_logits=returns_dict and bool(generation_config.output_logits),
            pad_token_id=0 if pad_token_id is None else int(pad_token_id),
        )
        call = decode.Call(
            target=plan.target,
            drafter=plan.drafter,
            controller=controller_of(plan, model, input_ids.shape[0], input_ids.shape[1], synced_gpus=synced_gpus),
            rule=plan.rule,
            config=plan.config,
            input_ids=input_ids,
            generation_config=generation_config,
            model_kwargs=model_kwargs,
            streamer=streamer,
            has_unfinished=lambda finished: model._has_unfinished_sequences(finished, synced_gpus, device=device),
            returns_cache=returns_cache,
            layer_outputs=plan.layer_outputs,
        )
        output = decode.speculate(call, transcript)
        state_of(self).last = output.speculation
        return output if returns_dict else output.sequences


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
