"""Checks that a model's plain `generate()` continues text in transformers' own decoding loop.

Speculation replaces that loop, so models with another one are refused before the probe.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin, PreTrainedModel

from hf_specdec.errors import UnsupportedModelError
from hf_specdec.verification.model import execution_device, text_config
from hf_specdec.verification.trial_runs import uncompiled

REPLACED_HOOKS = {"_sample": "a decoding loop", "_prepare_cache_for_generation": "a cache"}
"""Methods of `GenerationMixin` that speculation replaces, and what each provides."""

PROMPT_LENGTH = 13
"""Number of prompt tokens in `check_plain_generate`."""

PLAIN_OPTIONS: Mapping[str, Any] = {
    "max_length": PROMPT_LENGTH + 2,  # one token from the prefill, one from the cache
    "max_new_tokens": None,
    "min_length": 0,
    "min_new_tokens": None,
    "do_sample": False,
    "num_beams": 1,
    "num_return_sequences": 1,
    "return_dict_in_generate": False,
    "stop_strings": None,  # these two need a tokenizer
    "token_healing": False,
    "cache_implementation": None,
    "disable_compile": True,
}
"""Options of `check_plain_generate`, which override the model's generation configuration."""


def refusal(model: Any, reason: str, hint: str = "Use plain generate() with this model.") -> UnsupportedModelError:
    """Return the error for a model that speculation does not support."""
    return UnsupportedModelError(f"{type(model).__name__} cannot verify drafted tokens: {reason}.", hint)


def why_not_transformers_loop(model: GenerationMixin) -> str:
    """Return why the model does not decode in transformers' own loop; empty if it does."""
    for name, provided in REPLACED_HOOKS.items():
        owners = [
            cls
            for cls in type(model).__mro__
            if name in vars(cls) and not cls.__module__.startswith("hf_specdec.") and cls is not GenerationMixin
        ]
        if owners:
            return f"its generate() has {provided} that is not transformers' ({owners[0].__name__}.{name})"
    return ""


@torch.no_grad()
def check_plain_generate(model: PreTrainedModel) -> None:
    """Check that the model's own `generate()` continues a text prompt; costs two forwards of one row.

    Raises:
        UnsupportedModelError: `generate()` fails on a text prompt, does not return the prompt followed by new tokens,
            or runs another model.
    """
    prompt = ordinary_tokens(model, PROMPT_LENGTH)[None]
    forwards: list[None] = []
    hook = model.register_forward_pre_hook(lambda *_: forwards.append(None))
    try:
        generate: Any = model.generate
        with uncompiled():
            answer = generate(prompt, attention_mask=torch.ones_like(prompt), **PLAIN_OPTIONS)
    except Exception as error:
        text = str(error).strip().partition("\n")[0].rstrip(".")
        raise refusal(
            model,
            f"its plain generate() fails on a text prompt with {type(error).__name__}: {text}",
            "Speculation requires a plain generate() that continues text.",
        ) from error
    finally:
        hook.remove()
    if not forwards:
        raise refusal(model, "its generate() runs another model's forward", "Attach that model instead.")
    if not isinstance(answer, Tensor) or answer.dim() != 2 or answer.shape[1] <= PROMPT_LENGTH:
        got = f"a tensor {list(answer.shape)}" if isinstance(answer, Tensor) else type(answer).__name__
        raise refusal(model, f"its generate() returns {got} for a prompt [1, {PROMPT_LENGTH}], not one row of tokens")
    if not torch.equal(answer[:, :PROMPT_LENGTH].to(prompt.device), prompt):
        raise refusal(model, "its generate() does not return the prompt followed by new tokens")


def ordinary_tokens(model: PreTrainedModel, count: int) -> Tensor:
    """Return ids `[count]` of text tokens, as far as possible without special tokens.

    Special tokens (image, pad, ...) are those that the configuration names in fields such as `pad_token_id`.
    """
    special: set[int] = set()
    for config in (model.config, text_config(model)):
        for name, value in vars(config).items():
            if name.endswith(("_token_id", "_token_index", "_token_ids")):
                ids = value if isinstance(value, list | tuple) else [value]
                special.update(token for token in ids if isinstance(token, int))
    vocab_size = text_config(model).vocab_size
    spread = [index * 7 % vocab_size for index in range(3, 3 + 2 * count + 7 * len(special))]
    ordinary = [token for token in spread if token not in special] or spread
    return torch.tensor((ordinary * count)[:count], device=execution_device(model))
