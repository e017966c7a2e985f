"""The items of `gpu.py` with their bars (required values), and tools that items share.

An item writes rows and compares values with its bars. It raises `NotMeasured` with a reason if this machine cannot run
it. Items import torch and the package when they run, so that a broken installation fails items, not the script. Longer
items are in `gpu_attention.py` and `gpu_steps.py`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import math
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_rows import rows_of

ROOT = Path(__file__).parents[1]
ARCHITECTURES = (
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi", "phi3", "olmo2", "starcoder2", "granite",
    "gpt_neox", "gpt2", "opt", "falcon", "stablelm", "cohere", "glm4", "smollm3", "qwen2_moe", "qwen3_moe",
    "mixtral", "deepseek_v3",
)  # fmt: skip
TINY = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 64, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "kv_lora_rank": 32,
    "q_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
}  # fmt: skip
LLAMA_8B = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192,
}  # fmt: skip
COPIED_BYTES = 2**31
TESTS_PER_ROW = 20


class NotMeasured(Exception):
    """Raised if this machine cannot run an item; the message is the reason."""


class NoDevice(NotMeasured):
    """Raised if there is no accelerator of the given type; no other item can run either."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A value to measure, with its required bounds."""

    name: str
    at_most: float = math.inf
    at_least: float = -math.inf

    @property
    def wanted(self) -> str:
        """The bounds as text."""
        return f"at most {self.at_most:g}" if self.at_most < math.inf else f"at least {self.at_least:g}"


class Kit:
    """Writes an item's rows, and provides its device and models.

    Args:
        item: Name of the item.
        options: Command-line options.
        bars: The item's bars.
    """

    def __init__(self, item: str, options: argparse.Namespace, bars: Sequence[Bar] = ()) -> None:
        self._item, self._path, self.options = item, options.json, options
        self._bars = {bar.name: bar for bar in bars}

    def write(self, kind: str, **values: Any) -> None:
        """Append one JSON line and flush it to disk."""
        with self._path.open("a") as file:
            file.write(json.dumps({"item": self._item, "kind": kind, **values}, default=str) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def row(self, **values: Any) -> None:
        """Write a row of measurements."""
        self.write("row", **values)

    def rows(self) -> list[dict[str, Any]]:
        """Read the rows that the item has written so far, in all processes."""
        return [row for row in rows_of(self._path, self._item, 0) if row["kind"] == "row"]

    def bar(self, name: str, value: float | None, reason: str = "") -> None:
        """Compare a value with its bar and write both.

        Args:
            name: Name of one of the item's bars.
            value: The value, None if it could not be measured.
            reason: Why it could not be measured.
        """
        bar = self._bars[name]
        passed = None if value is None else bool(bar.at_least <= value <= bar.at_most)
        self.write("bar", bar=name, value=value, wanted=bar.wanted, passed=passed, reason="" if passed else reason)

    @property
    def device(self) -> Any:
        """The accelerator.

        Raises:
            NoDevice: This machine has none.
        """
        import torch

        wanted = torch.device(self.options.device)
        module = getattr(torch, wanted.type, None)
        if module is None or not module.is_available():
            raise NoDevice(f"this machine has no {wanted.type} device (torch {torch.__version__})")
        return wanted

    def llama(self, **changes: Any) -> Any:
        """Create a bfloat16 Llama with random weights on the device; 8B, unless `--sizes` is given."""
        import torch
        from transformers import AutoModelForCausalLM, LlamaConfig

        sizes = {**LLAMA_8B, **self.options.sizes, **changes}
        torch.manual_seed(0)
        with torch.device(self.device):
            config = LlamaConfig(**sizes, tie_word_embeddings=False, dtype=torch.bfloat16)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        model.generation_config.eos_token_id = None
        return model

    def sure_llama(self, **changes: Any) -> Any:
        """Create and attach the same Llama with clear choices (see `make_sure` in `oracle.py`)."""
        from oracle import make_sure

        from hf_specdec import SpeculativeGenerationMixin

        return SpeculativeGenerationMixin.attach(make_sure(self.llama(**changes)))


@dataclass(frozen=True, slots=True)
class Item:
    """A measurement with its time limit in seconds and its bars; `--quick` runs it if `is_quick`."""

    name: str
    measure: Callable[[Kit], None]
    seconds: float
    is_quick: bool = False
    bars: tuple[Bar, ...] = ()

    def run(self, options: argparse.Namespace) -> int:
        """Measure in this process, write the "end" row, and return the exit status."""
        kit, begin = Kit(self.name, options, self.bars), time.perf_counter()
        with _messages_in_rows(kit):
            if options.part is None:
                kit.write("end", **self._measured(kit, begin))
            else:  # the parent process writes the "end" row
                self.measure(kit)
        return 0

    def _measured(self, kit: Kit, begin: float) -> dict[str, Any]:
        ending: dict[str, Any] = {"status": "measured"}
        try:
            self.measure(kit)
        except NotMeasured as reason:
            ending = {"status": "not measured", "reason": str(reason), "no_device": isinstance(reason, NoDevice)}
        except Exception as error:  # any error becomes a line of the report
            reason = f"{type(error).__name__}: {error}"
            ending = {"status": "failed", "reason": reason[:500], "output": traceback.format_exc()[-2000:]}
        return {"seconds": round(time.perf_counter() - begin, 1), **ending}


@contextmanager
def _messages_in_rows(kit: Kit) -> Iterator[None]:
    """Write the package's messages into the report, e.g. why a forward was not captured."""
    logger, handler = logging.getLogger("hf_specdec"), logging.Handler(logging.INFO)
    handler.emit = lambda record: kit.write(
        record.levelname.lower(), part=kit.options.part, text=record.getMessage()[:500]
    )
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


# ----------------------------------------------------------------------------------------------- tools


def module_of(device: Any) -> Any:
    """Return torch's module for a device, e.g. `torch.cuda`."""
    import torch

    return torch.get_device_module(device)


def synchronize(device: Any) -> None:
    """Wait for the device."""
    module_of(device).synchronize(device)


def seconds_of(run: Callable[[], Any], device: Any, rounds: int, untimed: int = 2) -> float:
    """Return the median duration of some runs, after a few untimed ones."""
    taken = []
    for _ in range(rounds + untimed):
        synchronize(device)
        begin = time.perf_counter()
        run()
        synchronize(device)
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken[untimed:])


def free_mebibytes(device: Any) -> float:
    """Return the free memory of the device after emptying torch's cache of blocks."""
    module_of(device).empty_cache()
    return module_of(device).mem_get_info(device)[0] / 2**20


def copy_bandwidth(device: Any) -> float:
    """Measure the bytes read and written per second by a copy within the device."""
    import torch

    block = torch.empty(COPIED_BYTES, dtype=torch.uint8, device=device)
    return 2 * block.nbytes / seconds_of(lambda: block.clone(), device, 5)


def distance(found: Any, wanted: Any) -> float:
    """Return the distance of two tensors relative to the norm of the second."""
    return float((found.float() - wanted.float()).norm() / wanted.float().norm().clamp(min=1e-6))


def largest(values: Iterable[float]) -> float:
    """Return the largest number, or NaN if there is a NaN, so that no bar passes."""
    found = list(values)
    return math.nan if any(map(math.isnan, found)) else max(found)


@contextmanager
def prefilled(model: Any, runner: Any, widths: Sequence[int], context: int) -> Iterator[Callable[[int], Any]]:
    """Prefill a context, and yield a function that verifies a chain of N nodes after it and returns the logits.

    Args:
        model: The target.
        runner: Runner of the verify forward, None for the model itself.
        widths: Numbers of nodes that the function will be called with.
        context: Number of tokens.
    """
    import torch

    from hf_specdec.trees.tree import TokenTree
    from hf_specdec.verification.model import cache_argument, execution_device
    from hf_specdec.verification.probe import inspect_target

    with torch.no_grad():
        facts, device = inspect_target(model), execution_device(model)
        target = facts.new_target(model, context + max(widths), max(widths), runner=runner)
        ids = torch.arange(3, 3 + context + max(widths), device=device)[None] % model.config.vocab_size
        inputs = {"attention_mask": torch.ones_like(ids[:, :context]), cache_argument(model): target.cache}
        target.prefill(ids[:, :context], model.generation_config, {**inputs, "use_cache": True})
        trees = {
            width: TokenTree(ids[:, context : context + width], torch.arange(width, device=device) - 1)
            for width in widths
        }

        def verify(width: int) -> Any:
            logits = target.verify(trees[width]).logits
            target.rollback(width)
            return logits

        try:
            with model._optimize_model_for_decode():  # as `generate()` does
                yield verify
        finally:
            target.close()


def verify_often(model: Any, runner: Any, widths: Sequence[int], context: int, times: int) -> dict[int, Any]:
    """Return the logits of the last of several forwards over chains, by width."""
    with prefilled(model, runner, widths, context) as verify:
        return {width: [verify(width) for _ in range(times)][-1] for width in widths}


def captured_runner(model: Any, form: str = "cuda_graph") -> Any:
    """Create a compiled or captured verify forward of a model."""
    import torch

    from hf_specdec.generation.model_programs import make_runner
    from hf_specdec.verification.probe import inspect_target

    with torch.no_grad():
        return make_runner(model, inspect_target(model), frozenset(), form)


def tiny(name: str, device: Any) -> Any:
    """Create a tiny model of an architecture; sizes that its config does not have are ignored."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    default = AutoConfig.for_model(name)
    known = {*default.to_dict(), *default.attribute_map}
    sizes = {**TINY, **({"num_key_value_heads": 4} if name == "deepseek_v3" else {})}  # required by latent attention
    config = AutoConfig.for_model(name, **{key: value for key, value in sizes.items() if key in known})
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval().to(device)


# ----------------------------------------------------------------------------------------------- items


def capture(kit: Kit) -> None:
    """Compare captured forwards of architectures with the same forward run eagerly."""
    from hf_specdec.verification.programs import CaptureError

    device, part = kit.device, getattr(kit.options, "part", None)
    for name in ARCHITECTURES if part is None else (part,):
        begin, found = time.perf_counter(), {}
        try:
            model = tiny(name, device)
            runner = captured_runner(model)
            once, often = (verify_often(model, runner, (1, 8), 40, times) for times in (1, 6))
            found["distance"] = largest(distance(often[width], once[width]) for width in once)
            found["captured"] = len(runner.captured_keys()) == len(once)
        except CaptureError as error:
            found["refused"] = str(error)
        except Exception as error:  # e.g. a model that this version of transformers cannot create: a row of the report
            found["failed"] = f"{type(error).__name__}: {str(error)[:300]}"
        kit.row(architecture=name, seconds=round(time.perf_counter() - begin, 2), **found)


def tests(kit: Kit) -> None:
    """Run the suite's GPU tests, and write failures at once."""
    kit.device  # noqa: B018
    if importlib.util.find_spec("pytest") is None:
        raise NotMeasured("pytest is not installed")
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests"), *sys.path])
    command = [sys.executable, "-m", "pytest", "-vv", "-p", "no:cacheprovider", str(ROOT / "tests" / "test_gpu.py")]
    if importlib.util.find_spec("xdist") is not None:
        command += ["-n", str(max(1, min(8, (os.cpu_count() or 1) // 2)))]
    count, lines = {"PASSED": 0, "FAILED": 0, "SKIPPED": 0, "ERROR": 0}, []
    with subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace",
    ) as process:  # fmt: skip
        for line in process.stdout or ():
            lines = [*lines[-40:], line.rstrip()]
            verdict = next((word for word in count if f" {word} " in f"{line.rstrip()} " and "::" in line), None)
            if verdict is None or "%]" not in line:  # not a test, or repeated in the summary
                continue
            count[verdict] += 1
            if verdict in ("FAILED", "ERROR"):
                kit.row(failed=line.strip()[:500])
            elif not sum(count.values()) % TESTS_PER_ROW:
                kit.row(so_far=dict(count))
    kit.row(summary=lines[-1] if lines else "", count=count, last=lines[-12:] if process.returncode else [])
    kit.bar("exit status of pytest", process.returncode)


def elsewhere(module: str, name: str) -> Callable[[Kit], None]:
    """Return an item function of another file, which is imported when the item runs."""
    return lambda kit: getattr(importlib.import_module(module), name)(kit)


ITEMS = (
    Item("environment", elsewhere("gpu_attention", "environment"), 40, is_quick=True),
    Item("attention", elsewhere("gpu_attention", "attention"), 60, bars=(
        Bar("growing key length, times a fixed one: the package's attention", at_most=1.2),
    )),
    Item("verify", elsewhere("gpu_attention", "verify"), 90, is_quick=True, bars=(
        Bar("distance of a replay from the eager forward, times that of SDPA's math kernel", at_most=1.5),
        Bar("captured verification, times the copy floor", at_most=2.2),
    )),
    Item("oracle", elsewhere("gpu_steps", "oracle"), 90, bars=(
        Bar("answers that differ from plain", at_most=0),
        Bar("milliseconds per captured step", at_most=8.5),
    )),
    Item("eagle", elsewhere("gpu_steps", "eagle"), 60, bars=(
        Bar("reads per step", at_most=1),
        Bar("idle share of the device", at_most=0.15),
    )),
    Item("auto", elsewhere("gpu_steps", "auto"), 60, bars=(
        Bar("steps from a capture to the next query of the head", at_most=20),
    )),
    Item("capture", elsewhere("gpu_attention", "capture_matrix"), 120, is_quick=True, bars=(
        Bar("architectures that are wrong, or fail", at_most=0),
        Bar("captures that work after one that failed", at_least=1),
    )),
    Item("calls", elsewhere("gpu_steps", "calls"), 60, bars=(Bar("shapes captured twice", at_most=0),)),
    Item("endurance", elsewhere("gpu_steps", "endurance"), 80, bars=(
        Bar("MiB that 100 calls keep", at_most=16),
        Bar("answers that differ from plain", at_most=0),
    )),
    Item("text", elsewhere("gpu_text", "text"), 170, bars=(
        Bar("auto, times plain", at_least=2.0),
        Bar("auto on its worst question, times plain", at_least=1.0),
        Bar("float32 answers that differ from plain", at_most=0),
    )),
    Item("tests", tests, 180, is_quick=True, bars=(Bar("exit status of pytest", at_most=0),)),
    Item("inductor", elsewhere("gpu_attention", "inductor"), 120),
    Item("static", elsewhere("gpu_text", "static"), 120),
)  # fmt: skip
