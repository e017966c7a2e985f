"""The methods that are transformers' own, which ours are measured against, and how each is asked for.

Knows no drafter: every other name is a value of `speculative=`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from transformers import CompileConfig

from hf_specdec.errors import InvalidConfigError

ASSISTED, COMPILED = "transformers_assisted", "plain_static_compiled"

PEERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "transformers_prompt_lookup": {"prompt_lookup_num_tokens": 10},
    ASSISTED: {},  # and the assistant
    COMPILED: {"cache_implementation": "static"},  # and how to compile
}
"""Methods that are transformers' own: the baseline and the peers. Arguments of `generate()` beside the prompt."""

COMPILE = "+compile"
"""Behind the name of a method of ours: the same with `compile="compile"`."""

FIRST_TRIES = 3
"""Calls of a method before it is timed, at most; there is another one as long as the last one compiled something."""


def check_methods(methods: Iterable[str], *, assistant: bool) -> None:
    """See that every method can be asked for.

    Args:
        methods: Their names; those that are not in `PEERS` are somebody else's to check.
        assistant: Whether there is an assistant model.

    Raises:
        InvalidConfigError: A method that drafts with an assistant, and there is none.
    """
    if ASSISTED in methods and not assistant:
        raise InvalidConfigError(
            f"The method {ASSISTED!r} needs an assistant model, and none is given.",
            "Give a smaller one with the same tokenizer: --assistant PATH_OR_HUB_ID.",
        )


def call_options(method: str, given: Any, model: Any, cache_length: int) -> dict[str, Any]:
    """What `generate()` is called with for a method, beside prompt, length and greedy choice.

    Args:
        method: A name of `PEERS`, or anything that `speculative=` takes.
        given: Beside its name: the assistant of `transformers_assisted`, the value for `speculative=` of ours; None is
            nothing.
        model: The model, for its device.
        cache_length: Slots of a static cache: one size for all calls, for another one would be compiled anew.

    Raises:
        InvalidConfigError: A method that drafts with an assistant, and there is none.
    """
    if method not in PEERS:
        if given is None and method.endswith(COMPILE):
            given = {"method": method.removesuffix(COMPILE), "compile": "compile"}
        return {"speculative": method if given is None else given}
    check_methods([method], assistant=given is not None)
    if method == ASSISTED:
        return {"assistant_model": given}
    if method == COMPILED:
        return {**PEERS[method], "max_cache_len": cache_length, "compile_config": _compile_config(model)}
    return PEERS[method]


def _compile_config(model: Any) -> CompileConfig:
    """As transformers compiles on accelerators; on the CPU, which it leaves out, in the mode that is not for GPUs."""
    config = CompileConfig(mode="default" if model.device.type == "cpu" else "reduce-overhead")
    config._compile_all_devices = True  # no field: transformers reads it, and keeps it from torch.compile
    return config


def check_compiled(method: str, model: Any) -> None:
    """After the first call: see that transformers has compiled what was to be compiled; it skips that with a warning.

    Args:
        method: Any method.
        model: The model.

    Raises:
        InvalidConfigError: The forward of this model runs uncompiled.
    """
    if method == COMPILED and "_compiled_call" not in vars(model):
        raise InvalidConfigError(
            f"transformers does not compile the forward of this {type(model).__name__}: its static cache, its "
            "quantisation or its placement on devices does not allow it.",
            f"Leave {COMPILED!r} out.",
        )


def compiled_graphs() -> int:
    """Graphs that this process has compiled so far; 0 where torch's compiler was never loaded."""
    counting = sys.modules.get("torch._dynamo.utils")
    return 0 if counting is None else counting.counters["stats"]["unique_graphs"]
