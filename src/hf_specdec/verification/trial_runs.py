"""Forwards that only test a model, and what they show: whether it computes exactly, and whether it is random."""

from __future__ import annotations

import inspect
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from hf_specdec.verification.model import cache_argument, execution_device, text_config

FAILURES = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError, RuntimeError, TypeError,
    ValueError,
)  # fmt: skip
"""Exceptions that a forward raises if it cannot run the probe's inputs."""


CACHED = "max_seq_len_cached"
"""End of the names of attributes with the text length for which a module has its rotary frequencies."""


def first_inputs(model: PreTrainedModel, mask: Tensor, cache: Cache | None) -> dict[str, Any]:
    """Return the inputs that `generate()` prepares for the first forward, from a mask `[B, P]` and a cache, if any."""
    inputs: dict[str, Any] = {"attention_mask": mask, "use_cache": cache is not None}
    if cache is not None:
        inputs[cache_argument(model)] = cache
    if "position_ids" in inspect.signature(model.forward).parameters:
        inputs["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    return inputs


def run_whole(model: PreTrainedModel, prompt: Tensor, mask: Tensor, tokens: Tensor) -> list[Tensor]:
    """Return, for each of the tokens `[B, T]`, the logits `[B, V]` after it, by one forward without a cache."""
    text = torch.cat([prompt, tokens], dim=-1)
    inputs = first_inputs(model, torch.cat([mask, torch.ones_like(tokens)], dim=-1), None)
    inputs = model.prepare_inputs_for_generation(text, is_first_iteration=True, **inputs)
    inputs.pop("logits_to_keep", None)  # some models set it to 1
    logits = model(**inputs, return_dict=True).logits[:, -tokens.shape[1] :].float()
    return list(logits.unbind(dim=1))


def uncompiled() -> AbstractContextManager[object]:
    """Run forwards wrapped by `torch.compile` eagerly in this block: trial inputs would use up its recompilations."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


@contextmanager
def reproducible(model: nn.Module) -> Iterator[None]:
    """Run the model uncompiled in this block, in evaluation mode if train mode makes it random or drops the cache.

    The modes of all modules, their dynamic rotary frequencies (which depend on the longest text so far) and the random
    number generators of CPU and model device are restored afterwards.
    """
    rotary = [
        (module, dict(module._buffers), {name: vars(module)[name] for name in vars(module) if name.endswith(CACHED)})
        for module in model.modules()
        if "dynamic" in str(getattr(module, "rope_type", ""))
    ]
    training = [vars(module) for module in model.modules() if module.training]
    device = execution_device(model)
    others = [] if device.type == "cpu" else [device]
    with uncompiled(), torch.random.fork_rng(others, device_type=device.type if others else "cpu"):
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


def multiplies_exactly(device: torch.device) -> bool:
    """Return whether a device multiplies float32 matrices in full precision; False if TF32 or the like is enabled."""
    matrix = torch.arange(64 * 64, dtype=torch.float32, device="cpu").cos().view(64, 64)
    exact, product = matrix.double() @ matrix.double(), (matrix.to(device) @ matrix.to(device)).cpu().double()
    return bool((product - exact).norm() < 1e-5 * exact.norm())


def is_random(model: PreTrainedModel) -> bool:
    """Return whether two forwards over the same tokens differ; False if one of them fails.

    If it is random, this changes the state of the random number generators.
    """
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
