"""What `gpu.py` measures: an item each, which writes rows and compares figures with bars.

An item that this machine cannot run raises `NotMeasured` with the reason. Items import torch and the package when they
run, so that a broken installation is one item's failure.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
ARCHITECTURES = (
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi", "phi3", "olmo2", "starcoder2", "granite",
    "gpt_neox", "gpt2", "opt", "falcon", "stablelm", "cohere", "glm4", "smollm3", "qwen2_moe", "qwen3_moe",
    "mixtral", "deepseek_v3",
)  # fmt: skip
TINY = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
LLAMA_8B = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192,
}  # fmt: skip


class NotMeasured(Exception):
    """What this machine cannot show; the message says why."""


class Kit:
    """Where an item writes its rows.

    Args:
        item: Its name.
        options: Of the command line.
    """

    def __init__(self, item: str, options: argparse.Namespace) -> None:
        self._item, self._path, self.options = item, options.json, options

    def write(self, kind: str, **values: Any) -> None:
        """Append one JSON line; it is on disk when this returns."""
        with self._path.open("a") as file:
            file.write(json.dumps({"item": self._item, "kind": kind, **values}, default=str) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def row(self, **values: Any) -> None:
        """Write what was measured."""
        self.write("row", **values)

    def bar(self, name: str, value: float, *, at_most: float | None = None, at_least: float | None = None) -> None:
        """Compare a figure with a bar and write both."""
        passed = (at_most is None or value <= at_most) and (at_least is None or value >= at_least)
        wanted = f"at most {at_most:g}" if at_most is not None else f"at least {at_least:g}"
        self.write("bar", bar=name, value=value, wanted=wanted, passed=bool(passed))

    @property
    def device(self) -> Any:
        """The accelerator.

        Raises:
            NotMeasured: There is none, or its graphs cannot be captured here.
        """
        import torch

        wanted = torch.device(self.options.device)
        module = getattr(torch, wanted.type, None)
        if module is None or not module.is_available():
            raise NotMeasured(f"this machine has no {wanted.type} device (torch {torch.__version__})")
        return wanted

    def llama(self, **changes: Any) -> Any:
        """A Llama of random weights in bfloat16 on the device, of 8B's sizes unless `--sizes` says otherwise."""
        import torch
        from transformers import AutoModelForCausalLM, LlamaConfig

        sizes = {**LLAMA_8B, **self.options.sizes, **changes}
        torch.manual_seed(0)
        with torch.device(self.device):
            config = LlamaConfig(**sizes, tie_word_embeddings=False, dtype=torch.bfloat16)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        model.generation_config.eos_token_id = None
        return model


@dataclass(frozen=True, slots=True)
class Item:
    """One measurement, its time limit, and whether `--quick` runs it."""

    name: str
    measure: Callable[[Kit], None]
    seconds: float
    is_quick: bool = False

    def run(self, options: argparse.Namespace) -> int:
        """Measure in this process and write how it ended; the exit status."""
        kit, begin = Kit(self.name, options), time.perf_counter()
        ending: dict[str, Any] = {"status": "measured"}
        try:
            self.measure(kit)
        except NotMeasured as reason:
            ending = {"status": "not measured", "reason": str(reason)}
        except Exception as error:  # of any kind: it is one line of the report
            reason = f"{type(error).__name__}: {error}"
            ending = {"status": "failed", "reason": reason[:500], "output": traceback.format_exc()[-2000:]}
        kit.write("end", seconds=round(time.perf_counter() - begin, 1), **ending)
        return 0


# ----------------------------------------------------------------------------------------------- tools


def synchronize(device: Any) -> None:
    """Wait for the device."""
    import torch

    torch.get_device_module(device).synchronize(device)


def seconds_of(run: Callable[[], Any], device: Any, rounds: int) -> float:
    """The median of some runs, after two that are not timed."""
    taken = []
    for _ in range(rounds + 2):
        synchronize(device)
        begin = time.perf_counter()
        run()
        synchronize(device)
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken[2:])


def verify_often(model: Any, runner: Any, widths: Sequence[int], context: int, times: int) -> dict[int, Any]:
    """The logits of the last of several forwards over chains, by width."""
    import torch

    from hf_specdec.target.model import cache_argument, execution_device
    from hf_specdec.target.probe import inspect_target
    from hf_specdec.tree import TokenTree

    with torch.no_grad():
        facts, device = inspect_target(model), execution_device(model)
        target = facts.new_target(model, context + max(widths), max(widths), runner=runner)
        ids = torch.arange(3, 3 + context + max(widths), device=device)[None] % model.config.vocab_size
        inputs = {"attention_mask": torch.ones_like(ids[:, :context]), cache_argument(model): target.cache}
        target.prefill(ids[:, :context], model.generation_config, {**inputs, "use_cache": True})
        found = {}
        for width in widths:
            tree = TokenTree(ids[:, context : context + width], torch.arange(width, device=device) - 1)
            for _ in range(times):
                found[width] = target.verify(tree).logits
                target.rollback(width)
        target.close()
    return found


def tiny(name: str, device: Any) -> Any:
    """A model of an architecture at its smallest; sizes that its configuration does not know are left out."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    default = AutoConfig.for_model(name)
    known = {*default.to_dict(), *default.attribute_map}
    config = AutoConfig.for_model(name, **{key: value for key, value in TINY.items() if key in known})
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval().to(device)


def copy_bandwidth(device: Any) -> float:
    """Bytes per second read and written by a copy of 2 GiB within the device."""
    import torch

    block = torch.empty(2**31, dtype=torch.uint8, device=device)
    return 2 * block.nbytes / seconds_of(lambda: block.clone(), device, 5)


# ----------------------------------------------------------------------------------------------- items


def environment(kit: Kit) -> None:
    """Versions, the device, and how fast it copies."""
    import torch
    import transformers

    device = kit.device
    module = torch.get_device_module(device)
    kit.row(
        device=module.get_device_name(), capability=list(module.get_device_capability()), torch=torch.__version__,
        cuda=torch.version.cuda, cudnn=torch.backends.cudnn.version(), transformers=transformers.__version__,
        memory=module.get_device_properties(0).total_memory,
    )  # fmt: skip
    kit.row(copy_bytes_per_second=copy_bandwidth(device))


def capture(kit: Kit) -> None:
    """Captured forwards of many architectures against the same forward run eagerly, mixture-of-experts last."""
    import torch

    from hf_specdec.target.compiling import make_runner
    from hf_specdec.target.probe import inspect_target
    from hf_specdec.target.runners import CannotRecordError

    device = kit.device
    for name in ARCHITECTURES:
        begin, found = time.perf_counter(), {}
        try:
            model = tiny(name, device)
            with torch.no_grad():
                runner = make_runner(model, inspect_target(model), frozenset(), "cuda_graph")
            once, often = (verify_often(model, runner, (1, 8), 40, times) for times in (1, 6))
            found["distance"] = max(float((often[width] - once[width]).abs().max()) for width in once)
            found["captured"] = bool(runner.recorded())
        except CannotRecordError as error:
            found["refused"] = str(error)
        except Exception as error:  # a model that this version makes in another way is one row of the report
            found["failed"] = f"{type(error).__name__}: {str(error)[:300]}"
        kit.row(architecture=name, seconds=round(time.perf_counter() - begin, 2), **found)


def oracle(kit: Kit) -> None:
    """Milliseconds per step of a Llama of random weights, with a drafter that knows the answer."""
    import torch
    from oracle import OracleDrafter, make_sure

    from hf_specdec import SpeculativeGenerationMixin

    device, count = kit.device, 128
    model = SpeculativeGenerationMixin.attach(make_sure(kit.llama()))
    weights = sum(p.nbytes for p in model.parameters()) - model.get_input_embeddings().weight.nbytes
    kit.row(seconds_to_read_all_weights=2 * weights / copy_bandwidth(device))
    ids = torch.arange(5, 5 + 64, device=device)[None] % model.config.vocab_size
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def run(**how: Any) -> Any:
        return model.generate(**inputs, max_new_tokens=count, do_sample=False, **how)

    answers = run()[:, 64:]
    kit.row(method="plain", tokens_per_second=count / seconds_of(run, device, 3))
    for form in ("none", "cuda_graph"):
        for tau in (1.0, 3.0, 4.5):
            model.add_drafter(OracleDrafter(answers, tau))
            how = {"speculative": {"method": "oracle", "num_draft_tokens": 32, "compile": form}}
            seconds = seconds_of(lambda how=how: run(**how), device, 3)
            stats = model.last_speculation
            kit.row(
                method="oracle", form=form, wanted_tau=tau, tau=stats.mean_accepted_length,
                tokens_per_second=count / seconds, milliseconds_per_step=1000 * seconds / stats.num_target_forwards,
                answers_equal=bool(torch.equal(run(**how)[:, 64:], answers)),
            )  # fmt: skip


def memory(kit: Kit) -> None:
    """MiB that the device loses to the captured forwards of each width."""
    import torch

    from hf_specdec.target.compiling import make_runner
    from hf_specdec.target.graphs import WIDTHS
    from hf_specdec.target.probe import inspect_target

    device, model = kit.device, kit.llama(num_hidden_layers=4)
    module = torch.get_device_module(device)
    with torch.no_grad():
        runner = make_runner(model, inspect_target(model), frozenset(), "cuda_graph")
    for width in WIDTHS:
        module.empty_cache()
        before = module.mem_get_info(device)[0]
        verify_often(model, runner, (width,), 512, 6)
        module.empty_cache()
        kit.row(width=width, mebibytes=(before - module.mem_get_info(device)[0]) / 2**20)


def tests(kit: Kit) -> None:
    """The suite's GPU tests."""
    kit.device  # noqa: B018
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests"), *sys.path])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(ROOT / "tests" / "test_gpu.py")]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    lines = done.stdout.splitlines()
    kit.row(summary=lines[-1] if lines else "", failed=[line for line in lines if line.startswith("FAILED")])
    kit.bar("exit status of pytest", done.returncode, at_most=0)


ITEMS = (
    Item("environment", environment, 60, is_quick=True),
    Item("oracle", oracle, 240),
    Item("capture", capture, 180, is_quick=True),
    Item("memory", memory, 90),
    Item("tests", tests, 240, is_quick=True),
)
