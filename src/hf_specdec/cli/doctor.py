"""The commands `hf-specdec env` and `doctor`: versions, devices and features; the fastest method for a model."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import shutil
from dataclasses import asdict
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from hf_specdec.cli.parameters import (
    FORWARDS,
    METHOD_NAMES,
    HeadOption,
    Json,
    ModelArgument,
    NewTokens,
    Precision,
    RoundActivations,
    check_places,
)
from hf_specdec.cli.status import importing, say, working
from hf_specdec.generation.packaged import PACKAGE
from hf_specdec.reporting.stats import EAGER

PACKAGES = ("accelerate", "peft", "datasets", "safetensors", "huggingface-hub", "tokenizers", "gguf", "matplotlib",
            "openai")  # fmt: skip
"""Packages whose versions `hf-specdec env` prints, in addition to torch and transformers."""


def env(as_json: Json = False) -> None:
    """Show versions, devices and supported features, for a bug report."""
    with importing(shown=not as_json):
        import torch

        from hf_specdec.bench.machine import versions
        from hf_specdec.drafters.registry import methods as known_methods
        from hf_specdec.verification.graph_backends import GRAPH_BACKENDS

    has_accelerator = torch.accelerator.is_available()
    device = torch.accelerator.current_accelerator() if has_accelerator else torch.device("cpu")
    has_graphs = device is not None and device.type in GRAPH_BACKENDS
    instructions, reason = _kernels()
    found: dict[str, Any] = {
        **versions(device or torch.device("cpu")),
        **{name: _version(name) for name in PACKAGES},
        "accelerators": torch.accelerator.device_count() if has_accelerator else 0,
        'compile="kernels"': f"yes ({instructions})" if instructions else f"no: {reason}",
        'compile="inductor"': "yes" if _has_compiler() else "no C++ compiler (g++ or clang++) found",
        'compile="cuda_graph"': "yes" if has_graphs else "not on this device",
        "packaged model": "installed" if importlib.util.find_spec(PACKAGE) else "not installed",
        "methods": ", ".join(dict.fromkeys(("plain", *METHOD_NAMES, *known_methods()))),
    }
    typer.echo(json.dumps(found) if as_json else "\n".join(f"{name}: {value}" for name, value in found.items()))


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _kernels() -> tuple[str, str]:
    """Return the instruction set of the CPU kernels, which are built if they were not yet, or "" and why not."""
    from hf_specdec.cpu.library import NoKernelsError, load_library

    try:
        return load_library()[0].name, ""
    except NoKernelsError as error:
        return "", str(error)


def _has_compiler() -> bool:
    """Whether there is a C++ compiler for torch's inductor."""
    return any(map(shutil.which, ("g++", "clang++", "c++")))


def doctor(
    model: ModelArgument = None,
    drafter: HeadOption = None,
    max_new_tokens: NewTokens = 64,
    dtype: Precision = "auto",
    round_activations: RoundActivations = False,
    as_json: Json = False,
) -> None:
    """Check whether a model can verify several drafts in one forward, time its forwards, find the fastest method.

    Drafts that are verified in one forward are a tree. The methods are
    compared on three prompts; hf-specdec bench compares them on yours.
    Then it lists what to change, in order of gain.
    """
    check_places(model, drafter, round_activations=round_activations)
    with importing(shown=not as_json):
        from hf_specdec.bench import diagnosis
        from hf_specdec.cli.answers import dtype_of, head_for
        from hf_specdec.generation.loading import load_model

    head, source = head_for(["auto"], model, drafter, shown=not as_json)
    with working("Loading the model", shown=not as_json):
        lm, tokenizer = load_model(model, head, dtype, round_activations=round_activations)
    methods = ["prompt_lookup", *([] if head is None else [head.method]), "auto"]
    with working("Timing methods on three prompts and forwards: a minute for a 0.5B", shown=not as_json) as report:
        found = diagnosis.diagnose(lm, tokenizer, methods, max_new_tokens=max_new_tokens, report=report)
    if as_json:
        typer.echo(json.dumps({**asdict(found), "best": found.best, "dtype": dtype_of(lm), "head": source}))
        return
    chains = f"chains only, one draft at a time, because {found.chain_only_reason}"
    drafts = "trees, several drafts at once" if found.supports_trees else chains
    say(f"{type(lm).__name__}, weights in {dtype_of(lm)}: verifies {drafts}")
    say(f"head: {source or 'none'}")
    timed = {EAGER: found.forward_seconds}
    if found.compiled_seconds:
        timed[FORWARDS[found.compiled]] = found.compiled_seconds
    forwards = Table("tokens per forward", *(column for how in timed for column in (f"{how}, ms", "x one token")))
    for width in found.forward_seconds:
        cells = ((f"{1000 * seconds[width]:.1f}", f"{seconds[width] / seconds[1]:.2f}") for seconds in timed.values())
        forwards.add_row(str(width), *(text for pair in cells for text in pair))
    tried = Table("method", "x plain", "slowest prompt", "tau", "forwards")
    for method, ratio in found.speed_up.items():
        how = FORWARDS.get(found.forwards[method], found.forwards[method])
        tried.add_row(method, f"{ratio:.2f}", f"{found.worst[method]:.2f}", f"{found.tau[method]:.2f}", how)
    Console().print(forwards, tried)
    if found.compiled_seconds:
        say(
            f"Without drafting, a forward of one token is {found.gain_of_forwards:.2f}x as fast with "
            f"{FORWARDS[found.compiled]} as eagerly. Plain generate() runs eagerly, so that part of a speed-up does "
            "not come from drafting."
        )
    if found.best == "plain":
        say("No method is faster than plain decoding here; speculative='auto' then falls back to plain steps.")
    else:
        is_close = found.speed_up[found.best] < max(found.speed_up.values())
        why = ", within 5 % of the fastest, and it adapts to other texts" if is_close else ""
        say(f"{'Best' if is_close else 'Fastest'} here: speculative={found.best!r}{why}.")
    if found.advice:
        say("To make it faster, the largest known gain first:")
    for number, advice in enumerate(found.advice, 1):
        gain = f"{advice.gain:.2f}x, {advice.source}" if advice.gain else "gain not measured"
        say(f"{number}. {advice.problem} {advice.change} ({gain})")
    if not found.advice:
        say("No setting was found that would make it faster.")
    say(compile_hint(lm.device.type))
    for warning in found.warnings:
        say(warning, err=True)


def compile_hint(device: str) -> str:
    """Return what compiled modes there are on a type of device, and how to measure them."""
    from hf_specdec.verification.graph_backends import GRAPH_BACKENDS

    if device in GRAPH_BACKENDS:
        found, suffix = 'compile="cuda_graph" captures forwards as graphs', "cuda_graph"
    elif device == "cpu" and (instructions := _kernels()[0]):
        found, suffix = f'compile="kernels" runs forwards with CPU kernels ({instructions})', "kernels"
    elif device == "cpu" and _has_compiler():
        found, suffix = 'compile="inductor" compiles forwards with PyTorch', "inductor"
    else:
        reason = ", because no C++ compiler (g++ or clang++) is found" if device == "cpu" else ""
        return f"No compiled mode is available on this device{reason}; see docs/compile.md."
    return (
        f'Compiled mode: {found}. The default, compile="auto", chooses by itself. To measure a mode, append it '
        f"(--prompts FILE.jsonl takes your prompts):\n  hf-specdec bench --methods auto,auto+{suffix}"
    )
