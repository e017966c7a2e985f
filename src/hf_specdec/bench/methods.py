"""Names of the benchmarked methods, and the arguments of `generate()` that select them.

`PEERS` are methods of transformers, plain decoding included; other names are values of `speculative=`, with or without
one of `SUFFIXES`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from transformers import CompileConfig

from hf_specdec.errors import InvalidConfigError
from hf_specdec.transformers_private import compile_on_all_devices

ASSISTED, COMPILED = "transformers_assisted", "plain_static_compiled"

PEERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "transformers_prompt_lookup": {"prompt_lookup_num_tokens": 10},
    ASSISTED: {},  # `call_options` adds the assistant
    COMPILED: {"cache_implementation": "static"},  # `call_options` adds the rest
}
"""Arguments of `generate()` that select plain decoding, the baseline, or another method of transformers."""

SHOWN_SUFFIXES = ("+kernels", "+inductor", "+cuda_graph", "+none")
"""Suffixes of method names that help and errors show; each adds its value of `compile`."""

SUFFIXES = {suffix: suffix[1:] for suffix in (*SHOWN_SUFFIXES, "+compile")}
"""All suffixes of method names, and the value of `compile` that each adds; `"compile"` is another name of inductor."""

MAX_WARM_UPS = 3
"""Maximum number of warm-up calls of a method; no further call follows one that compiles nothing."""


def check_methods(methods: Iterable[str], *, assistant: bool) -> None:
    """Check that an assistant model is given if `transformers_assisted` is among the methods.

    Other names are not checked here: an unknown one raises `InvalidConfigError` in `measure`, before it times any.

    Args:
        methods: Method names.
        assistant: Whether an assistant model is given.

    Raises:
        InvalidConfigError: The assistant model is missing.
    """
    if ASSISTED in methods and not assistant:
        raise InvalidConfigError(
            f"The method {ASSISTED!r} needs an assistant model, and none is given.",
            "Give a smaller one with the same tokenizer: --assistant PATH_OR_HUB_ID.",
        )


def split_method(name: str) -> tuple[str, str | None]:
    """Split a name into a value of `speculative=` and one of `compile=`, which is None without a suffix.

    Example: `"auto+kernels"` gives `"auto"` and `"kernels"`.
    """
    for suffix, mode in SUFFIXES.items():
        if name.endswith(suffix):
            return name.removesuffix(suffix), mode
    return name, None


def call_options(method: str, given: Any, model: Any, cache_length: int) -> dict[str, Any]:
    """Return the arguments of `generate()` that select a method.

    `given` is the assistant model of `transformers_assisted`, or a value of `speculative=` that replaces the name.
    `cache_length` are the slots of the static cache of `plain_static_compiled`: another number causes recompilation.
    """
    if method not in PEERS:
        name, mode = split_method(method)
        if mode is None and "+" in name and name not in model.drafters:
            raise InvalidConfigError(
                f"The method {name!r} has an unknown suffix: {name[name.rindex('+') :]!r}.",
                f"Suffixes: {', '.join(SHOWN_SUFFIXES)}. Methods of transformers: {', '.join(PEERS)}.",
            )
        if given is None and mode is not None:
            given = {"method": name, "compile": mode}
        return {"speculative": method if given is None else given}
    check_methods([method], assistant=given is not None)
    if method == ASSISTED:
        return {"assistant_model": given}
    if method == COMPILED:
        return {**PEERS[method], "max_cache_len": cache_length, "compile_config": _compile_config(model)}
    return PEERS[method]


def _compile_config(model: Any) -> CompileConfig:
    """Return the settings for transformers to compile the forward: device graphs, or torch's default mode on a CPU."""
    config = CompileConfig(mode="default" if model.device.type == "cpu" else "reduce-overhead")
    compile_on_all_devices(config)
    return config


def check_compiled(method: str, model: Any) -> None:
    """Check after a call that transformers has compiled the forward, which it may skip with only a warning."""
    if method == COMPILED and "_compiled_call" not in vars(model):
        raise InvalidConfigError(
            f"transformers does not compile the forward of this {type(model).__name__}: its static cache, its "
            "quantisation or its placement on devices does not allow it.",
            f"Leave out the method {COMPILED!r}.",
        )


def compiled_graphs() -> int:
    """Return the number of graphs that `torch.compile` has traced in this process; 0 if it has not been used."""
    counting = sys.modules.get("torch._dynamo.utils")
    return 0 if counting is None else counting.counters["stats"]["unique_graphs"]
