"""Forwards that only test a model, and what they show.

Speculation replaces transformers' decoding loop, so models whose plain `generate()` runs another one are refused. The
answer of a short plain `generate()` is what the probe compares other forwards with.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, GenerationMixin, PreTrainedModel

from hf_specdec.cpu.operations import is_rounded
from hf_specdec.cpu.quantized import stored_weight
from hf_specdec.errors import UnsupportedModelError
from hf_specdec.verification.model import cache_argument, execution_device, text_config

REPLACED_HOOKS = {"_sample": "a decoding loop", "_prepare_cache_for_generation": "a cache"}
"""Methods of `GenerationMixin` that speculation replaces, and what each provides."""
FAILURES = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError, RuntimeError, TypeError,
    ValueError,
)  # fmt: skip
"""Exceptions that a forward raises if it cannot run the probe's inputs."""

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
    """A short plain `generate()` with a fixed answer, which other forwards are compared with."""

    prompt: Tensor  # [B, P]
    mask: Tensor  # [B, P]; the second half of the rows is padded on the left
    answer: Tensor  # [B, T]; one is the pad token, if there is one: some models skip it when they count positions
    logits: tuple[Tensor, ...]  # [B, V] after each token of the answer
    cache: Any  # holds prompt and answer


def refusal(model: Any, reason: str, hint: str = "Use plain generate() with this model.") -> UnsupportedModelError:
    """Return the error for a model that speculation does not support."""
    return UnsupportedModelError(f"{type(model).__name__} cannot verify drafted tokens: {reason}.", hint)


def why_not_transformers_loop(model: GenerationMixin) -> str:
    """Return why the model does not decode in transformers' own loop; empty if it does."""
    for name, provided in REPLACED_HOOKS.items():
        for cls in type(model).__mro__:
            if name in vars(cls) and not cls.__module__.startswith("hf_specdec.") and cls is not GenerationMixin:
                return f"its generate() has {provided} that is not transformers' ({cls.__name__}.{name})"
    return ""


@torch.no_grad()
def run_plainly(model: PreTrainedModel, num_texts: int, num_tokens: int) -> PlainRun:
    """Let the model's own `generate()` give fixed answers to short prompts; costs `num_tokens` + 1 forwards.

    Half of the prompts, of which there are twice `num_texts`, are padded.
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

    # `generate` of the model's class as it is without this package, and without wrappers of single objects
    classes = type(model).__mro__
    ours = [index for index, cls in enumerate(classes) if cls.__module__.startswith("hf_specdec.")]
    generate = next(vars(cls)["generate"] for cls in classes[max(ours, default=-1) + 1 :] if "generate" in vars(cls))
    options = {"max_length": width + 1, "prefix_allowed_tokens_fn": next_token, **PLAIN_OPTIONS}

    def run() -> Any:
        IN_TRIAL.set(True)  # in a separate context: nothing is left of it, wherever the trial is interrupted
        return generate(model, prompt, attention_mask=mask, **options)

    hook = model.register_forward_hook(note, with_kwargs=True)
    try:
        text = copy_context().run(run)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise refusal(
            model,
            f"its plain generate() fails on a text prompt with {type(error).__name__}: {reason}",
            "Speculation requires a plain generate() that continues text.",
        ) from error
    finally:
        hook.remove()
    if not logits:
        raise refusal(model, "its generate() runs another model's forward", "Attach that model instead.")
    if not isinstance(text, Tensor) or text.dim() != 2 or len(text) != rows or text.shape[1] <= PROMPT_LENGTH:
        got = f"a tensor {list(text.shape)}" if isinstance(text, Tensor) else type(text).__name__
        wanted = f"a prompt [{rows}, {PROMPT_LENGTH}], not one row of tokens each"
        raise refusal(model, f"its generate() returns {got} for {wanted}")
    if not torch.equal(text[:, :width].to(tokens.device), tokens):
        raise refusal(model, "its generate() does not return the prompt followed by new tokens")
    return PlainRun(prompt, mask, answer, tuple(logits[-num_tokens:]), caches[-1])


def ordinary_tokens(model: PreTrainedModel, count: int) -> Tensor:
    """Return ids `[count]` of text tokens, as far as possible without those in fields such as `image_token_id`."""
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


def first_inputs(model: PreTrainedModel, mask: Tensor, cache: Cache | None) -> dict[str, Any]:
    """Return the inputs that `generate()` prepares for the first forward, from a mask `[B, P]` and a cache, if any."""
    inputs: dict[str, Any] = {"attention_mask": mask, "use_cache": cache is not None}
    if cache is not None:
        inputs[cache_argument(model)] = cache
    if "position_ids" in inspect.signature(model.forward).parameters:
        inputs["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    return inputs


def run_whole(
    model: PreTrainedModel, prompt: Tensor, mask: Tensor, tokens: Tensor, *, nudges: bool = False
) -> list[Tensor]:
    """Return, for each of the tokens `[B, T]`, the logits `[B, V]` after it, by one forward without a cache.

    With `nudges`, half of the numbers that the embedding returns are larger by a unit in the last place.
    """
    embedding, thread = model.get_input_embeddings(), threading.get_ident()

    def nudge(_module: Any, _inputs: Any, found: Any) -> Any:
        if threading.get_ident() != thread or not isinstance(found, Tensor):
            return found
        factors = torch.ones_like(found)
        factors[..., ::2] += torch.finfo(found.dtype).eps
        return found * factors

    handle = embedding.register_forward_hook(nudge) if nudges and embedding is not None else None
    try:
        return _run_whole(model, prompt, mask, tokens)
    finally:
        if handle is not None:
            handle.remove()


def _run_whole(model: PreTrainedModel, prompt: Tensor, mask: Tensor, tokens: Tensor) -> list[Tensor]:
    text = torch.cat([prompt, tokens], dim=-1)
    inputs = first_inputs(model, torch.cat([mask, torch.ones_like(tokens)], dim=-1), None)
    inputs = model.prepare_inputs_for_generation(text, is_first_iteration=True, **inputs)
    inputs.pop("logits_to_keep", None)  # some models set it to 1
    logits = model(**inputs, return_dict=True).logits[:, -tokens.shape[1] :].float()
    return list(logits.unbind(dim=1))


@contextmanager
def reproducible(model: nn.Module) -> Iterator[None]:
    """Run the model uncompiled in this block, in evaluation mode if train mode makes it random or drops the cache.

    The modes of all modules, their dynamic rotary frequencies (which depend on the longest text so far) and the random
    number generators of CPU and model device are restored afterwards.
    """
    rotary = []
    for module in model.modules():
        if "dynamic" in str(getattr(module, "rope_type", "")):
            # text lengths for which it has its frequencies
            lengths = {name: value for name, value in vars(module).items() if name.endswith("max_seq_len_cached")}
            rotary.append((module, dict(module._buffers), lengths))
    training = [vars(module) for module in model.modules() if module.training]
    device = execution_device(model)
    others = [] if device.type == "cpu" else [device]
    # forwards wrapped by `torch.compile` run eagerly: trial inputs would use up their recompilations
    uncompiled = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    with uncompiled, torch.random.fork_rng(others, device_type=device.type if others else "cpu"):
        evaluate = bool(training) and (drops_cache(model) or is_random(model))
        try:
            try:
                _set_training(training, not evaluate)
                yield
            finally:
                _set_training(training, True)
        finally:  # in case an interrupt arrives at the line above
            _set_training(training, True)
            for module, buffers, lengths in rotary:
                module._buffers.update(buffers)
                vars(module).update(lengths)


def _set_training(modules: Sequence[dict[str, Any]], mode: bool) -> None:
    """Set `training` of all modules in one call to C code, so that an interrupt cannot leave it half done."""
    deque(map(dict.__setitem__, modules, repeat("training"), repeat(mode)), maxlen=0)


def drops_cache(model: nn.Module) -> bool:
    """Return whether layers use gradient checkpointing in train mode, for which transformers disables the cache."""
    return any(module.training and getattr(module, "gradient_checkpointing", False) for module in model.modules())


def float32_error(device: torch.device) -> float:
    """Return the relative error of a product of float32 matrices: about 1e-7, or 3e-4 if TF32 is enabled."""
    matrix = torch.arange(64 * 64, dtype=torch.float32, device="cpu").cos().view(64, 64)
    exact, product = matrix.double() @ matrix.double(), (matrix.to(device) @ matrix.to(device)).cpu().double()
    return float((product - exact).norm() / exact.norm())


def multiplies_exactly(device: torch.device) -> bool:
    """Return whether a device multiplies float32 matrices in full precision; False if TF32 or the like is enabled."""
    return float32_error(device) < 1e-5


def rounds_inputs(model: PreTrainedModel) -> bool:
    """Whether products round their inputs to integers, so that the smallest differences can become larger ones."""
    return any(is_rounded(stored.form) for stored in map(stored_weight, model.parameters()) if stored is not None)


def allowed_distance(dtype: torch.dtype, device: torch.device, exact: float, half: float) -> float:
    """Return the relative distance allowed between two forms of a forward, given those in full and half precision.

    In float32 with TF32 or the like it is between the two: a hundred times the error of a single product.
    """
    if dtype == torch.float32:
        return min(half, max(exact, 100 * float32_error(device)))
    return exact if dtype == torch.float64 else half


def is_random(model: PreTrainedModel) -> bool:
    """Return whether two forwards over the same tokens differ (which draws random numbers); False if one fails."""
    tokens = torch.arange(13, device=execution_device(model))[None] % text_config(model).vocab_size
    try:
        first, second = (run_whole(model, tokens, torch.ones_like(tokens), tokens[:, :1])[0] for _ in range(2))
        return not torch.equal(first, second)
    except FAILURES:  # the probe reports the failure
        return False


def enters_autocast(model: PreTrainedModel) -> bool:
    """Return whether the model's forward itself enters autocast, as a trainer with mixed precision makes it do.

    Only a replaced forward is run, with one token; False if that fails.
    """
    embedding, device = model.get_input_embeddings(), execution_device(model)
    if "forward" not in vars(model) or embedding is None or torch.is_autocast_enabled(device.type):
        return False
    seen: list[bool] = []
    handle = embedding.register_forward_pre_hook(lambda *_: seen.append(torch.is_autocast_enabled(device.type)))
    token = torch.zeros(1, 1, dtype=torch.long, device=device)
    try:
        run_whole(model, token[:, :0], token[:, :0], token)
    except FAILURES:  # the probe reports the failure
        return False
    finally:
        handle.remove()
    return any(seen)
