"""Checks that a model's plain `generate()` continues text in transformers' own decoding loop, and what it computes.

Speculation replaces that loop, so models with another one are refused.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin, PreTrainedModel

from hf_specdec.errors import UnsupportedModelError
from hf_specdec.verification.model import cache_argument, execution_device, text_config

REPLACED_HOOKS = {"_sample": "a decoding loop", "_prepare_cache_for_generation": "a cache"}
"""Methods of `GenerationMixin` that speculation replaces, and what each provides."""

PROMPT_LENGTH = 6
"""Number of prompt tokens in `run_plainly`."""
PADDING = 2
"""Left padding of half of its rows, in tokens."""
IN_TRIAL: ContextVar[bool] = ContextVar("in_trial", default=False)
"""Whether `run_plainly` runs: `generate()` is then plain, also if the model's default is another one."""
NO_TOKEN = 2**31 - 1
"""A token id that no model emits; as EOS, it lets an answer never end early."""

PLAIN_OPTIONS: Mapping[str, Any] = {
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
    "eos_token_id": NO_TOKEN,
}
"""Options of `run_plainly`, which override the model's generation configuration."""


@dataclass(frozen=True, slots=True)
class PlainRun:
    """A short plain `generate()` with a fixed answer, which other forwards are compared with.

    Args:
        prompt, mask: `[B, P]`; the second half of the rows is padded on the left.
        answer: `[B, T]` tokens. One is the pad token, if there is one: some models skip it when they count positions.
        logits: `[B, V]` after each token of the answer.
        cache: The cache, which holds prompt and answer.
    """

    prompt: Tensor
    mask: Tensor
    answer: Tensor
    logits: tuple[Tensor, ...]
    cache: Any


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


def _own_generate(model: PreTrainedModel) -> Any:
    """Return `generate` of the model's class as it is without this package, and without wrappers of single objects."""
    classes = type(model).__mro__
    ours = [index for index, cls in enumerate(classes) if cls.__module__.startswith("hf_specdec.")]
    return next(vars(cls)["generate"] for cls in classes[max(ours, default=-1) + 1 :] if "generate" in vars(cls))


@torch.no_grad()
def run_plainly(model: PreTrainedModel, num_texts: int, num_tokens: int) -> PlainRun:
    """Let the model's own `generate()` give fixed answers to short prompts; costs `num_tokens` + 1 forwards.

    Args:
        model: Any model that passes `gate`, attached or not.
        num_texts: Prompts without padding, and prompts with padding.
        num_tokens: T, the length of the answers.

    Raises:
        UnsupportedModelError: `generate()` fails on a text prompt, does not return the prompt followed by new tokens,
            or runs another model.
    """
    rows, width = 2 * num_texts, PROMPT_LENGTH + num_tokens
    tokens = ordinary_tokens(model, rows * width).view(rows, width)
    prompt, answer = tokens.split([PROMPT_LENGTH, num_tokens], dim=-1)
    pad_token_id = getattr(text_config(model), "pad_token_id", None)
    if isinstance(pad_token_id, int) and 0 <= pad_token_id < text_config(model).vocab_size:
        answer[:, 1] = pad_token_id
    mask, forced = torch.ones_like(prompt), answer.tolist()
    mask[num_texts:, :PADDING] = 0
    logits, caches = list[Tensor](), list[Any]()
    thread = threading.get_ident()

    def note(_module: Any, _inputs: Any, named: dict[str, Any], outputs: Any) -> None:
        if threading.get_ident() == thread:
            logits.append(outputs.logits[:, -1].float())
            caches.append(named.get(cache_argument(model)))

    def next_token(row: int, text: Tensor) -> list[int]:
        return forced[row][len(text) - PROMPT_LENGTH :][:1] or [0]

    hook = model.register_forward_hook(note, with_kwargs=True)
    trial = IN_TRIAL.set(True)
    try:
        text = _own_generate(model)(
            model,
            prompt,
            attention_mask=mask,
            max_length=width + 1,
            prefix_allowed_tokens_fn=next_token,
            **PLAIN_OPTIONS,
        )
    except Exception as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise refusal(
            model,
            f"its plain generate() fails on a text prompt with {type(error).__name__}: {reason}",
            "Speculation requires a plain generate() that continues text.",
        ) from error
    finally:
        IN_TRIAL.reset(trial)
        hook.remove()
    if not logits:
        raise refusal(model, "its generate() runs another model's forward", "Attach that model instead.")
    if not isinstance(text, Tensor) or text.dim() != 2 or len(text) != rows or text.shape[1] <= PROMPT_LENGTH:
        got = f"a tensor {list(text.shape)}" if isinstance(text, Tensor) else type(text).__name__
        raise refusal(
            model, f"its generate() returns {got} for a prompt [{rows}, {PROMPT_LENGTH}], not one row of tokens each"
        )
    if not torch.equal(text[:, :width].to(tokens.device), tokens):
        raise refusal(model, "its generate() does not return the prompt followed by new tokens")
    return PlainRun(prompt, mask, answer, tuple(logits[-num_tokens:]), caches[-1])


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
