"""What `hf-specdec env` and `doctor` show: versions, devices and features; the fastest method for a model."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import shutil
from dataclasses import asdict
from typing import Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from hf_specdec.bench.diagnosis import Diagnosis, diagnose
from hf_specdec.bench.machine import versions
from hf_specdec.cli.answers import dtype_of, head_for, source_of
from hf_specdec.cli.options import FORWARDS, METHOD_NAMES
from hf_specdec.cli.status import say, working
from hf_specdec.cpu.library import NoKernelsError, load_library
from hf_specdec.drafters.registry import methods as known_methods
from hf_specdec.generation.loading import load_model
from hf_specdec.generation.packaged import PACKAGE
from hf_specdec.reporting.stats import EAGER
from hf_specdec.verification.graph_backends import GRAPH_BACKENDS

PACKAGES = ("accelerate", "peft", "datasets", "safetensors", "huggingface-hub", "tokenizers", "gguf", "matplotlib",
            "openai")  # fmt: skip
"""Packages whose versions `hf-specdec env` prints, in addition to torch and transformers."""


def show_environment(*, as_json: bool) -> None:
    """Print versions, devices and supported features, as lines or as one JSON object."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    found: dict[str, Any] = {
        **versions(device or torch.device("cpu")),
        **{name: _version(name) for name in PACKAGES},
        "accelerators": torch.accelerator.device_count() if torch.accelerator.is_available() else 0,
        'compile="kernels"': _kernels_or_reason(),
        'compile="inductor"': "yes" if _compiler() else "no C++ compiler (g++ or clang++) found",
        'compile="cuda_graph"': "yes"
        if device is not None and device.type in GRAPH_BACKENDS
        else "not on this device",
        "packaged model": "installed" if importlib.util.find_spec(PACKAGE) else "not installed",
        "methods": ", ".join(dict.fromkeys(("plain", *METHOD_NAMES, *known_methods()))),
    }
    if as_json:
        typer.echo(json.dumps(found))
        return
    for name, value in found.items():
        typer.echo(f"{name}: {value}")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _kernels() -> str | NoKernelsError:
    """Return the instruction set of the CPU kernels, or why there are none; they are built if they were not yet."""
    try:
        return load_library()[0].name
    except NoKernelsError as error:
        return error


def _kernels_or_reason() -> str:
    kernels = _kernels()
    return f"no: {kernels}" if isinstance(kernels, NoKernelsError) else f"yes ({kernels})"


def _compiler() -> str | None:
    """Return the path of a C++ compiler for torch's inductor; None if none is found."""
    return next((place for name in ("g++", "clang++", "c++") if (place := shutil.which(name))), None)


def diagnose_model(model: str | None, drafter: str | None, dtype: str, *, max_new_tokens: int, as_json: bool) -> None:
    """Print whether a model can verify trees, milliseconds per forward, and the fastest method on three prompts.

    Args:
        model: Path or Hub id of the model; None is the packaged model.
        drafter: Path or Hub id of a head; None is the model's default head, if it has one.
        dtype: Dtype of the weights.
        max_new_tokens: Maximum number of tokens of each answer.
        as_json: Print one JSON object instead of text.
    """
    head = head_for(["auto"], model, drafter, shown=not as_json)
    with working("Loading the model", shown=not as_json):
        lm, tokenizer = load_model(model, head, dtype)
    methods = ["prompt_lookup", *([] if head is None else [head.method]), "auto"]
    with working("Timing forwards and methods on three prompts", shown=not as_json):
        found = diagnose(lm, tokenizer, methods, max_new_tokens=max_new_tokens)
    source = source_of(head, model, drafter)
    if as_json:
        typer.echo(json.dumps({**asdict(found), "best": found.best, "dtype": dtype_of(lm), "head": source}))
        return
    chains = f"chains only, one draft at a time, because {found.chain_only_reason}"
    drafts = "trees, several drafts at once" if found.supports_trees else chains
    say(f"{type(lm).__name__}, weights in {dtype_of(lm)}: verifies {drafts}")
    say(f"head: {source or 'none'}")
    tried = Table("method", "x plain", "slowest prompt", "tau", "forwards")
    for method, ratio in found.speed_up.items():
        how = FORWARDS.get(found.forwards[method], found.forwards[method])
        tried.add_row(method, f"{ratio:.2f}", f"{found.worst[method]:.2f}", f"{found.tau[method]:.2f}", how)
    console = Console()
    console.print(_forwards_table(found), tried)
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
    say(compile_hint(lm.device.type))


def _forwards_table(found: Diagnosis) -> Table:
    """Return a table of milliseconds per forward: eager ones and, if a method used them, compiled ones."""
    timed = {EAGER: found.forward_seconds}
    if found.compiled_seconds:
        timed[FORWARDS[found.compiled]] = found.compiled_seconds
    table = Table("tokens per forward", *(column for how in timed for column in (f"{how}, ms", "x one token")))
    for width in found.forward_seconds:
        table.add_row(str(width), *(
            text for seconds in timed.values()
            for text in (f"{1000 * seconds[width]:.1f}", f"{seconds[width] / seconds[1]:.2f}")
        ))  # fmt: skip
    return table


def compile_hint(device: str) -> str:
    """Return what compiled modes there are on a type of device, and how to measure them."""
    if device in GRAPH_BACKENDS:
        found, suffix = 'compile="cuda_graph" captures forwards as graphs', "cuda_graph"
    elif device == "cpu" and not isinstance(kernels := _kernels(), NoKernelsError):
        found, suffix = f'compile="kernels" runs forwards with CPU kernels ({kernels})', "kernels"
    elif device == "cpu" and _compiler() is not None:
        found, suffix = 'compile="inductor" compiles forwards with PyTorch', "inductor"
    else:
        reason = ", because no C++ compiler (g++ or clang++) is found" if device == "cpu" else ""
        return f"No compiled mode is available on this device{reason}; see docs/compile.md."
    return (
        f'Compiled mode: {found}. The default, compile="auto", chooses by itself. To measure a mode, append it '
        f"(--prompts FILE.jsonl takes your prompts):\n  hf-specdec bench --methods auto,auto+{suffix}"
    )
