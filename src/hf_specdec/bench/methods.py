"""Names of the benchmarked methods, and the arguments of `generate()` that select them.

`PEERS` are methods of transformers, plain decoding included; other names are values of `speculative=`, with or without
one of `SUFFIXES`. With a suffix, `plain` is this package's plain decoding.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from transformers import CompileConfig

from hf_specdec.config import PLAIN
from hf_specdec.errors import InvalidConfigError
from hf_specdec.transformers_private import compile_on_all_devices
from hf_specdec.validation import nearest

ASSISTED, COMPILED = "transformers_assisted", "plain_static_compiled"

PEERS: dict[str, dict[str, Any]] = {
    PLAIN: {},
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
    """Check the suffixes of method names, and that an assistant model is given for `transformers_assisted`.

    Other names are not checked here: an unknown one raises `InvalidConfigError` in `measure`, before it times any.

    Args:
        methods: Method names.
        assistant: Whether an assistant model is given.

    Raises:
        InvalidConfigError: A suffix is unknown or added to a method of transformers, or the assistant is missing.
    """
    for method in methods:
        base, mode = split_method(method)
        if base in PEERS and mode is not None and base != PLAIN:
            raise InvalidConfigError(
                f"{method}: {base} is a method of transformers, which `compile` does not change.", f"Give {base}."
            )
        if mode is None and "+" in method:
            suffix = method[method.index("+") :]
            near = nearest(suffix, SHOWN_SUFFIXES)
            meant = "" if near is None else f"Did you mean {near}? "
            raise InvalidConfigError(
                f"{method} has the unknown suffix {suffix}.", f"{meant}Suffixes: {', '.join(SHOWN_SUFFIXES)}."
            )
        if method == ASSISTED and not assistant:
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
    base, mode = split_method(method)
    is_drafter = mode is None and "+" in method and method in model.drafters
    if not is_drafter:
        check_methods([method], assistant=given is not None)
    if method not in PEERS:
        if given is None and mode is not None:
            given = {"method": base, "compile": mode}
        return {"speculative": method if given is None else given}
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
