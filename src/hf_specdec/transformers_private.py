"""Every private name of transformers (including its Trainer) and of accelerate that this package uses.

`test_transformers_private.py` checks each name; `make bounds` and `make newest` run it with other versions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin, PreTrainedConfig, PreTrainedModel

EXTENDED_METHODS = (
    "_prepare_generation_config", "_validate_generation_mode", "_validate_generated_length",
    "_prepare_cache_for_generation", "_sample",
)  # fmt: skip
"""Methods of `GenerationMixin` that `generation/mixin.py` extends."""

TRAINER_METHODS = (
    "_prepare_inputs", "_get_train_sampler", "_load_from_checkpoint", "_load_optimizer_and_scheduler",
    "_load_rng_state", "_load_scaler",
)  # fmt: skip
"""Methods of `Trainer` that `training/trainer.py` calls or extends."""


# ------------------------------------------------------------------------------------------- generate()


def has_unfinished(model: PreTrainedModel, finished: bool, synced_gpus: bool, device: torch.device) -> bool:
    """Return whether decoding must continue, given whether all rows of this process are finished.

    With `synced_gpus`, it continues until the rows of all processes are finished.
    """
    return bool(model._has_unfinished_sequences(finished, synced_gpus, device=device))


def pad_token_id(config: GenerationConfig) -> int:
    """Return the pad token of a prepared generation config, 0 if it has none."""
    tensor = config._pad_token_tensor
    return 0 if tensor is None else int(tensor)


def is_derived(config: GenerationConfig) -> bool:
    """Whether transformers derived the generation config from the model's config; it then drops unknown fields."""
    return bool(config._from_model_config)


def set_derived(config: GenerationConfig, derived: bool) -> None:
    """Mark a generation config as derived from the model's config or not, see `is_derived`."""
    config._from_model_config = derived


class _WithForward:
    """A model as transformers' prefill uses it, with another forward."""

    def __init__(self, model: PreTrainedModel, forward: Callable[..., Any]) -> None:
        self._real_model, self._other_forward = model, forward

    def __call__(self, **inputs: Any) -> Any:
        return self._other_forward(**inputs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real_model, name)


def can_prefill_with(model: PreTrainedModel) -> bool:
    """Whether `prefill` can use another forward: not if the model has its own way to read a prompt."""
    return getattr(type(model), "_prefill", None) is GenerationMixin._prefill


def prefill(
    model: PreTrainedModel, prompt: torch.Tensor, config: GenerationConfig, kwargs: dict[str, Any],
    forward: Callable[..., Any] | None = None,
) -> Any:  # fmt: skip
    """Run the forward over the prompt, in chunks if the generation config says so, and return its outputs.

    With `forward`, call that instead of the model's, with the inputs that the model prepares.
    """
    if forward is None:
        return model._prefill(prompt, config, kwargs, is_first_iteration=True)
    reader: Any = _WithForward(model, forward)
    return GenerationMixin._prefill(reader, prompt, config, kwargs, is_first_iteration=True)


def compile_on_all_devices(config: Any) -> None:
    """Make transformers use a `CompileConfig` on devices on which it ignores it by default."""
    config._compile_all_devices = True


def updated_kwargs(
    model: PreTrainedModel, outputs: Any, kwargs: dict[str, Any], num_new_tokens: int = 1
) -> dict[str, Any]:
    """Return the keyword arguments of the next forward, given the outputs and arguments of this one."""
    return model._update_model_kwargs_for_generation(
        outputs, kwargs, is_encoder_decoder=False, num_new_tokens=num_new_tokens
    )


def allowed_tokens_of(processor: Any) -> Any:
    """Return the function with which a `PrefixConstrainedLogitsProcessor` lists the allowed next tokens."""
    return processor._prefix_allowed_tokens_fn


# ----------------------------------------------------------------------------------- models and configs


def supports_dynamic_cache(model: PreTrainedModel) -> bool:
    """Whether the model works with transformers' default `DynamicCache`."""
    return bool(model._supports_default_dynamic_cache())


def supports_logits_to_keep(model: PreTrainedModel) -> bool:
    """Whether the forward takes `logits_to_keep`."""
    return bool(model._supports_logits_to_keep())


def is_stateful(model: PreTrainedModel) -> bool:
    """Whether transformers marks the model as keeping a state that cannot be rolled back, such as Mamba."""
    return bool(getattr(model, "_is_stateful", False))


def unexpected_keys(model: PreTrainedModel) -> Any:
    """Return patterns of weight names that transformers ignores without a warning when loading; None if none."""
    return getattr(model, "_keys_to_ignore_on_load_unexpected", None)


def dispatch_hook(module: Any) -> Any:
    """Return accelerate's hook of a module, which loads offloaded weights or moves inputs; None if there is none."""
    return getattr(module, "_hf_hook", None)


def original_forward(module: Any) -> Any:
    """Return the forward that accelerate's hook replaced; None if there is none."""
    return getattr(module, "_old_forward", None)


def mark_output_hooks_installed(attributes: dict[str, Any]) -> None:
    """Set the flag in a module's `vars()` that keeps transformers from installing its hooks for hidden states."""
    attributes["_output_capturing_hooks_installed"] = True


def attention_name(config: PreTrainedConfig) -> str:
    """Return the name of the attention implementation, such as "sdpa"."""
    return config._attn_implementation


def set_attention_name(config: PreTrainedConfig, name: str) -> None:
    """Set the attention implementation without the checks of `set_attn_implementation`."""
    config._attn_implementation_internal = name


def experts_name(config: PreTrainedConfig) -> str | None:
    """Return the implementation of the experts' products, such as "grouped_mm"."""
    return getattr(config, "_experts_implementation", None)


def set_experts_name(config: PreTrainedConfig, name: str) -> None:
    """Set the implementation of the experts' products without the checks of `set_experts_implementation`."""
    config._experts_implementation_internal = name


def model_name(config: PreTrainedConfig) -> str:
    """Return the path or Hub id from which the model was loaded; empty if there is none."""
    return getattr(config, "_name_or_path", None) or ""


def commit_hash(config: PreTrainedConfig) -> str | None:
    """Return the commit on the Hub from which the config was read; None if unknown (always, since 5.23)."""
    return getattr(config, "_commit_hash", None)


def set_model_name(config: PreTrainedConfig, name: str) -> None:
    """Set the path or Hub id that `model_name` returns."""
    config._name_or_path = name
