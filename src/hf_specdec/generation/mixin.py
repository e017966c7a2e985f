"""`SpeculativeGenerationMixin`: adds speculative decoding to transformers' own `generate()`.

Four internal methods of `generate()` are extended; a call without `speculative` uses the originals.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.streamers import BaseStreamer

from hf_specdec.config import SpeculativeConfig
from hf_specdec.drafters.answer_history import AnswerHistory
from hf_specdec.drafters.base import Drafter
from hf_specdec.drafters.compatibility import try_drafter
from hf_specdec.errors import DrafterMismatchError, InvalidConfigError
from hf_specdec.generation import decode, options, stored_default
from hf_specdec.generation.assisted import Assistant
from hf_specdec.generation.call import prepare_call
from hf_specdec.generation.class_swap import swap_in, swap_out
from hf_specdec.generation.head_loading import head_drafter
from hf_specdec.generation.histories import answer_history, check_names, remember_answers
from hf_specdec.generation.model_programs import release_programs
from hf_specdec.generation.plan import (
    Request,
    plan_call,
    plan_of,
    warm_up,
    with_programs,
)
from hf_specdec.generation.signature import STORED_DEFAULT, extends
from hf_specdec.generation.state import SWAP, add_drafter, state_of
from hf_specdec.heads.base import DraftHead
from hf_specdec.reporting.stats import SpeculationStats
from hf_specdec.verification.adopted_cache import seen_tokens
from hf_specdec.verification.memory import RESERVED_SLOTS
from hf_specdec.verification.model import CACHE_FIELD, cache_argument


class SpeculativeGenerationMixin:
    """Mixin that adds `speculative=` to `generate()`, and methods to load drafters.

    Use it on a loaded model, `SpeculativeGenerationMixin.attach(model)`, or as the first base class of a transformers
    model class: `class SpecLlama(SpeculativeGenerationMixin, LlamaForCausalLM): ...`.
    """

    # ------------------------------------------------------------------------------------------- attach, detach

    @staticmethod
    def attach(model: Any) -> Any:
        """Add the mixin to a loaded model and return the same object. Attaching twice has no effect.

        Args:
            model: A decoder-only transformers model, or a PEFT model around one, whose base model gets the mixin.

        Raises:
            UnsupportedModelError: The model can verify neither trees nor chains, or its `generate()` is unsuitable.
        """
        if not isinstance(model, PreTrainedModel) and hasattr(model, "get_base_model"):
            SpeculativeGenerationMixin.attach(model.get_base_model())
            return model
        if isinstance(model, SpeculativeGenerationMixin):
            return model
        swap_in(model, SpeculativeGenerationMixin)
        return model

    @staticmethod
    def detach(model: Any) -> Any:
        """Undo `attach`, drop the model's drafters and return the model; no effect on a model without the mixin.

        Raises:
            UnsupportedModelError: The mixin is a base class of the model's class, or another thread is generating with
                the model.
        """
        if not isinstance(model, PreTrainedModel) and hasattr(model, "get_base_model"):
            SpeculativeGenerationMixin.detach(model.get_base_model())
            return model
        if isinstance(model, SpeculativeGenerationMixin):
            swap_out(model, SpeculativeGenerationMixin)
        return model

    @extends(GenerationMixin.generate)
    def generate(
        self, *args: Any,
        speculative: str | SpeculativeConfig | Mapping[str, Any] | Literal[False] | None = STORED_DEFAULT,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Generate token ids as transformers does; with `speculative`, in fewer forwards.

        In float32 greedy ids are those of plain `generate()`, and sampled tokens have the same distribution. In half
        precision the output may differ after a near-tie between two tokens.

        Args:
            *args: Arguments of transformers' `generate()`; the first are `inputs` and `generation_config`.
            speculative: Name of a method (`"auto"`, `"prompt_lookup"`, `"eagle"`, ...) or of a registered drafter; a
                `SpeculativeConfig`, or a dict of its fields, to set sizes as well. None or False: plain decoding. If
                the argument is missing: `generation_config.speculative`, if that is set.
            **kwargs: Further arguments of transformers' `generate()`, with the same meaning. With `speculative`, this
                package drafts with `assistant_model`, which may have another tokenizer if `tokenizer` and
                `assistant_tokenizer` are given. `cache` is `past_key_values`, its name before transformers 5.24.

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
        if kwargs.get("assistant_model") is not None and kwargs.get("speculative") not in (None, False):
            kwargs["speculative"] = Request(kwargs["speculative"], Assistant.taken_from(kwargs))
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
        """Earlier answers of calls with `history` set, which such calls draft from; see `AnswerHistory`."""
        model: Any = self
        return answer_history(model)

    def load_drafter(
        self, repo_or_path: str | Path | DraftHead, *, name: str | None = None, revision: str | None = None,
        token: str | bool | None = None, verify: bool | Sequence[Tensor] | None = None,
        reading: Mapping[str, Any] | None = None, **kwargs: Any,
    ) -> Drafter:  # fmt: skip
        """Load a head or a PARD assistant, check it against this model, register its drafter and return it.

        Files of some EAGLE-3 heads can be read in several ways (`heads/readings.py`). Such a head is tried in each
        way on texts that this model writes. This takes a few seconds, once per head and model: the result is stored.

        Args:
            repo_or_path: A local directory, a Hub id, or a loaded head.
            name: The head's name in `speculative=`; None uses the name of its method.
            revision: Branch, tag or commit on the Hub.
            token: Hub token.
            verify: Prompts of token ids `[1, P]` to test the head on, or True for prompts that this model generates; a
                warning is issued if fewer than one in ten first drafted tokens are accepted. None and False skip the
                test; False also reads an ambiguous head in the documented way, without trying others.
            reading: Fixes how an ambiguous head is read, for example `{"layer_offset": 0}`; see `Reading`.
            **kwargs: Further arguments of `load_head`: `hot_tokens`, `subfolder`, `cache_dir`, ...; for a PARD
                assistant, of `AutoModelForCausalLM.from_pretrained` (default: this model's dtype and device).

        Raises:
            CheckpointFormatError: The source is not a draft head, its layout is unknown, or a file is broken.
            DrafterMismatchError: The head was made for another model, or for this one with an adapter.
            InvalidConfigError: Loading options are invalid or given with a loaded head, or `reading` is invalid.
            UnsupportedModelError: The model gives no access to the hidden states that the head needs.
        """
        model: Any = self
        options = {"revision": revision, "token": token, **kwargs}
        drafter = self.add_drafter(head_drafter(model, repo_or_path, reading, verify is not False, options), name)
        if verify is not None and verify is not False:
            last = state_of(self).last
            try_drafter(self, name or drafter.method, None if verify is True else verify)
            state_of(self).last = last
        return drafter

    def add_drafter(self, drafter: Drafter, name: str | None = None) -> Drafter:
        """Check a drafter against this model, move and cast its weights to match, register it and return it.

        Args:
            drafter: Any drafter, including your own.
            name: Its name in `speculative=`; None uses the name of its method.

        Raises:
            DrafterMismatchError: It was made for another model, or is not a valid drafter.
            UnsupportedModelError: The model gives no access to the hidden states that it needs.
        """
        add_drafter(self, drafter, name)
        return drafter

    def remove_drafter(self, name: str) -> Drafter:
        """Remove a drafter and return it.

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
        """
        if batch_size < 1 or prompt_length < 1:
            raise InvalidConfigError(
                f"batch_size and prompt_length must be at least 1, got {batch_size} and {prompt_length}."
            )
        warm_up(self, speculative, rows=batch_size, context=prompt_length)

    def release_memory(self) -> None:
        """Release graphs, their KV memory and compiled programs; the next call creates what it needs again."""
        release_programs(self)

    # ------------------------------------------------------------------------------------------- the stored default

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """Save as transformers does, including a default set as `generation_config.speculative`."""
        with stored_default.storable(self.generation_config):  # type: ignore[attr-defined]
            return super().save_pretrained(*args, **kwargs)  # type: ignore[misc]

    @functools.wraps(GenerationMixin.generate_batch)
    def generate_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as transformers does, without speculation; refuse `speculative=` and `assistant_model=`."""
        stored_default.check_batch_arguments(kwargs)
        return super().generate_batch(*args, **kwargs)  # type: ignore[misc]

    @functools.wraps(GenerationMixin.init_continuous_batching)
    def init_continuous_batching(
        self, generation_config: GenerationConfig | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Create transformers' manager; log once that a default `speculative` has no effect."""
        stored_default.note_continuous_batching(self, generation_config)
        return super().init_continuous_batching(generation_config, *args, **kwargs)  # type: ignore[misc]

    # ------------------------------------------------------------------------------------------- generate()'s hooks

    def _prepare_generation_config(
        self, generation_config: GenerationConfig | None, **kwargs: Any
    ) -> tuple[GenerationConfig, dict[str, Any]]:
        """Store `speculative=` or its default as a `Request` in this call's generation config; check a given cache."""
        given = "speculative" in kwargs
        speculative = kwargs.pop("speculative", None)
        prepared, model_kwargs = super()._prepare_generation_config(generation_config, **kwargs)  # type: ignore[misc]
        if not given:
            speculative = stored_default.stored_in(prepared, self.generation_config)  # type: ignore[attr-defined]
        if speculative is None or speculative is False:
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
        """Replace the `Request` by the call's `Plan`; refuse unsupported options before any work."""
        super()._validate_generation_mode(generation_mode, generation_config, generation_mode_kwargs)  # type: ignore[misc]
        request: Request | None = getattr(generation_config, "speculative", None)
        if request is not None:
            model: Any = self
            generation_config.speculative = plan_call(
                model, request, generation_mode, generation_config, generation_mode_kwargs
            )

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], generation_mode: GenerationMode,
        batch_size: int, max_cache_length: int,
    ) -> bool | None:  # fmt: skip
        """Check inputs and size, and add to the plan a `Target` whose cache can hold prompt, answer and one tree."""
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
