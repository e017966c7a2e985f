"""`SpeculativeGenerationMixin`: adds speculative decoding to transformers' own `generate()`."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from torch import Tensor
from torch.nn import Module
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel

from hf_specdec.config import SpeculativeConfig
from hf_specdec.drafters.base import Drafter
from hf_specdec.drafters.checked import try_drafter
from hf_specdec.drafters.history import AnswerHistory
from hf_specdec.errors import DrafterMismatchError, InvalidConfigError
from hf_specdec.generation.call import Request, warm_up
from hf_specdec.generation.checks import check_batch_arguments
from hf_specdec.generation.head_loading import head_drafter
from hf_specdec.generation.hooks import STORED_DEFAULT, GenerationHooks, extends, swap_in, swap_out
from hf_specdec.generation.model_programs import release_programs
from hf_specdec.generation.state import SWAP, add_drafter, answer_history, state_of
from hf_specdec.heads.head import DraftHead
from hf_specdec.reporting.stats import SpeculationStats
from hf_specdec.transformers_private import is_derived, set_derived
from hf_specdec.validation import check_type
from hf_specdec.verification.model import CACHE_FIELD

logger = logging.getLogger(__name__)

AnyModule = TypeVar("AnyModule", bound=Module)


class SpeculativeGenerationMixin(GenerationHooks):
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
            swap_in(model, SpeculativeGenerationMixin)
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
        * forwards: `compile="kernels"` unless the model is on a CPU, `"cuda_graph"` unless it is on a GPU.

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
        """Load a head or a PARD assistant, check it against this model and register its drafter.

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
            **kwargs: Further arguments of `load_head`: `hot_tokens`, `subfolder`, `cache_dir`, ...; for a PARD
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
        check_batch_arguments(kwargs)
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


if TYPE_CHECKING:
    from transformers.models.auto.modeling_auto import _BaseModelWithGenerate

    class AttachedModel(SpeculativeGenerationMixin, _BaseModelWithGenerate):
        """Type of an attached model, for editors and type checkers; it does not exist at run time."""
