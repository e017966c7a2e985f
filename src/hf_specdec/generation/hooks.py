"""`GenerationHooks`: the internal methods of transformers' `generate()` that speculation extends.

A call without `speculative` uses the originals.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.streamers import BaseStreamer

from hf_specdec.generation import decode, options, stored_default
from hf_specdec.generation.call import check_token_ids, prepare_call
from hf_specdec.generation.histories import check_names, remember_answers
from hf_specdec.generation.plan import Request, plan_call, plan_of, with_programs
from hf_specdec.generation.state import state_of
from hf_specdec.verification.cache import seen_tokens
from hf_specdec.verification.memory import ANSWER_SLOTS
from hf_specdec.verification.model import cache_argument
from hf_specdec.verification.trials import IN_TRIAL


class GenerationHooks:
    """Base class of the mixin: the five extended methods, which precede those of the model's class."""

    def _prepare_generation_config(
        self, generation_config: GenerationConfig | None, **kwargs: Any
    ) -> tuple[GenerationConfig, dict[str, Any]]:
        """Store `speculative=` or its default as a `Request` in this call's generation config; check a given cache."""
        given = "speculative" in kwargs
        speculative = kwargs.pop("speculative", None)
        prepared, model_kwargs = super()._prepare_generation_config(generation_config, **kwargs)  # type: ignore[misc]
        if not given:
            speculative = stored_default.stored_in(prepared, self.generation_config)  # type: ignore[attr-defined]
        if speculative is None or speculative is False or IN_TRIAL.get():
            prepared.speculative = None
        else:
            prepared.speculative = speculative if isinstance(speculative, Request) else Request(speculative)
        model: Any = self
        given = model_kwargs.get(cache_argument(model))
        if prepared.speculative is not None and given is not None:
            seen_tokens(given)  # checked this early because transformers reads it before preparing the cache
        return prepared, model_kwargs

    def _validate_generation_mode(
        self, generation_mode: GenerationMode, generation_config: GenerationConfig, generation_mode_kwargs: Any
    ) -> None:
        """Replace the `Request` by the call's `Plan`; check the options that do not depend on the prompt."""
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
        """Check that the prompt has token ids if the call's plan needs them."""
        super()._validate_generated_length(generation_config, input_ids_length, has_default_max_length)  # type: ignore[misc]
        plan = plan_of(generation_config)
        if plan is not None:
            check_token_ids(input_ids_length, plan.drafter, plan.config)

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], generation_mode: GenerationMode,
        batch_size: int, max_cache_length: int,
    ) -> bool | None:  # fmt: skip
        """Check inputs and size; add to the plan the compiled forwards and a `Target`.

        The target's cache can hold prompt, answer and one tree.
        """
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
        options.check_slots(needed, limit)
        options.check_chain(generation_config, plan.facts.chain_only_reason)
        check_names(plan.config, batch_size, rows)
        plan = with_programs(plan, model, generation_config.max_new_tokens or max_cache_length)
        reserve = ANSWER_SLOTS if limit is None else None
        wanted = {f"output_{output}": True for output, asked in plan.layer_outputs.items() if asked}
        target = plan.facts.new_target(model, limit or needed, reserve, wanted, plan.runner)
        if generation_config.cache_implementation == "static" and generation_config.return_dict_in_generate:
            super()._prepare_cache_for_generation(  # type: ignore[misc]
                generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
            )
            given = model_kwargs.get(name)  # an empty cache, to which the tokens are copied at the end
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
        """Run the speculative loop, or plain decoding if the call has no plan."""
        plan = plan_of(generation_config)
        if plan is None:
            return super()._sample(  # type: ignore[misc]
                input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer,
                **model_kwargs,
            )  # fmt: skip
        model: Any = self
        call, transcript = prepare_call(
            model, plan, input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer,
            model_kwargs,
        )  # fmt: skip
        output = decode.speculate(call, transcript)
        state_of(self).note_call(output.speculation, is_eager=plan.runner is None)
        remember_answers(model, call, transcript)
        return output if generation_config.return_dict_in_generate else output.sequences
