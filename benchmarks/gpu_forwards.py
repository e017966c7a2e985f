"""The first ten minutes on a GPU: its tests, transformers' compiled 8B, inductor, experts.

    python benchmarks/gpu_forwards.py --json forwards.jsonl
    python benchmarks/gpu_forwards.py --tiny --json rehearsal.jsonl

* `tests`: `pytest -m gpu`, every failure as a row.
* `static`: an 8B of random weights as transformers compiles it with a static cache, three calls of 128 tokens, the
  first with the compilation; then eagerly.
* `forms`: its verification of 1, 8 and 32 nodes after 512 tokens: eager, captured, and compiled by inductor, in turn.
* `experts`: four layers of the sizes of Qwen3-30B-A3B by the implementation of its experts, captured, in turn.
* `architectures`: captures of small models with experts, compared with plain `generate()`.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from gpu_kit import Kit, main
from transformers import AutoConfig, AutoModelForCausalLM

from hf_specdec import SpeculativeGenerationMixin
from hf_specdec.bench.machine import commit
from hf_specdec.bench.methods import COMPILED, call_options
from hf_specdec.control.costs import time_forwards
from hf_specdec.generation.model_programs import make_runner
from hf_specdec.verification import target
from hf_specdec.verification.probe import inspect_target
from hf_specdec.verification.runners import Runner

ROOT = Path(__file__).parents[1]
TESTS_SECONDS, COPIED_BYTES = 150, 2**31
WIDTHS, ROUNDS, UNTIMED = (1, 8, 32), 3, 3
"""Nodes; rounds in which the forms take turns; calls of each before, in which graphs are captured."""
EXPERTS = {
    "vocab_size": 32000, "hidden_size": 2048, "moe_intermediate_size": 768, "intermediate_size": 6144,
    "num_hidden_layers": 4, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
    "num_experts_per_tok": 8,
}  # fmt: skip
"""Four layers of Qwen3-30B-A3B."""
SMALL = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 16, "pad_token_id": 0, "num_experts": 8, "num_local_experts": 8,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "first_k_dense_replace": 1,
    "n_group": 1, "topk_group": 1, "kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16, "v_head_dim": 16,
}  # fmt: skip


def environment(kit: Kit) -> None:
    """Versions, the device, and the bytes that a copy within it reads and writes per second."""
    block = torch.empty(64 if kit.tiny else COPIED_BYTES, dtype=torch.uint8, device=kit.device)
    copies = [kit.seconds_of(block.clone) for _ in range(6)]
    device = "cpu" if kit.tiny else torch.cuda.get_device_name()
    versions = {name: version_of(name) for name in ("torch", "transformers", "triton", "accelerate")}
    kit.row(device=device, cuda=torch.version.cuda, python=sys.version.split()[0], **versions, commit=commit())
    kit.row(copy_bytes_per_second=2 * block.nbytes / min(copies))


def version_of(name: str) -> str | None:
    """Return the version of a package, None if it is not installed."""
    return metadata.version(name) if importlib.util.find_spec(name) else None


def tests(kit: Kit) -> None:
    """Run the suite's GPU tests."""
    files = sorted(str(path) for path in (ROOT / "tests").glob("*.py") if "mark.gpu" in path.read_text())
    more = ["--collect-only"] if kit.tiny else ["-n", "6"] if importlib.util.find_spec("xdist") else []
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "-q", "-rf", *more, *files]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=TESTS_SECONDS)
        output, status = done.stdout, done.returncode
    except subprocess.TimeoutExpired as stopped:
        output, status = (stopped.stdout or b"").decode(errors="replace"), None
    for line in output.splitlines():
        if line.startswith("FAILED"):
            kit.row(failed_test=line[:500])
    kit.row(exit_status=status, summary=output.splitlines()[-1:])


def static(kit: Kit) -> None:
    """Time plain decoding of the 8B, compiled by transformers and eager."""
    model, count = kit.llama(), 8 if kit.tiny else 128
    ids = torch.arange(16, device=kit.device)[None]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": count, "do_sample": False}
    compiled = call_options(COMPILED, None, model, ids.shape[1] + count)
    for name, how in (("static", compiled), ("static", compiled), ("static", compiled), ("eager", {})):
        seconds = kit.seconds_of(lambda how=how: model.generate(**inputs, **how))
        kit.row(form=name, call_seconds=seconds, ms_per_token=1000 * seconds / count)


def in_turn(
    kit: Kit, forms: Mapping[str, Callable[[], dict[int, float]]], widths: tuple[int, ...], **about: Any
) -> None:
    """Write the milliseconds of every form by width: cold, then in rounds."""
    for number in range(-1, ROUNDS):
        for name, run in forms.items():
            if not kit.has_time:
                return
            for _ in range(UNTIMED if number < 0 else 0):
                run()
            seconds = run()
            kit.row(**about, form=name, round=number, ms={width: 1000 * seconds[width] for width in widths})


def forms(kit: Kit) -> None:
    """Time verification of the 8B by form."""
    model, context = kit.llama(), 16 if kit.tiny else 512
    read = sum(weight.nbytes for weight in model.parameters()) - model.get_input_embeddings().weight.nbytes
    kit.row(weight_bytes=read)
    runners: dict[str, Runner | None] = {"eager": None, "cuda_graph": None, "inductor": None}
    facts = inspect_target(model)
    for name in ("cuda_graph", "inductor"):
        runners[name], known = None, len(kit.captures)
        seconds = kit.seconds_of(
            lambda name=name: runners.update({name: make_runner(model, facts, frozenset(), name)})
        )
        kit.row(form=name, making_seconds=seconds, capture_seconds=kit.captures[known:])
    in_turn(kit, {
        name: lambda runner=runner: time_forwards(model, WIDTHS, context, facts, runner=runner)
        for name, runner in runners.items()
    }, WIDTHS)  # fmt: skip


def experts(kit: Kit) -> None:
    """Time captured verification with the experts' products grouped, and with gathered weights."""
    sizes = {**EXPERTS, **({"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 8} if kit.tiny else {})}
    torch.manual_seed(0)
    with torch.device(kit.device):
        config = AutoConfig.for_model("qwen3_moe", **sizes)
        model = SpeculativeGenerationMixin.attach(AutoModelForCausalLM.from_config(config, dtype=kit.dtype).eval())
    facts, context = inspect_target(model), 16 if kit.tiny else 512
    made = {name: make_runner(model, facts, frozenset(), "cuda_graph") for name in ("grouped_mm", "batched_mm")}

    def timed(name: str, limit: int) -> dict[int, float]:
        with mock.patch.object(target, "MAX_GATHERED_EXPERTS", limit):
            return time_forwards(model, (1, 2, 4, 8, 32), context, facts, runner=made[name])

    in_turn(kit, {
        "grouped_mm": lambda: timed("grouped_mm", 0), "batched_mm": lambda: timed("batched_mm", 10**9),
    }, (1, 2, 4, 8, 32), layers=config.num_hidden_layers)  # fmt: skip


def architectures(kit: Kit) -> None:
    """Capture small models with experts, and compare their answers with plain ones."""
    for name in ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3"):
        default = AutoConfig.for_model(name)
        known = {*default.to_dict(), *default.attribute_map}
        torch.manual_seed(0)
        config = AutoConfig.for_model(name, **{key: value for key, value in SMALL.items() if key in known})
        model = AutoModelForCausalLM.from_config(config, dtype=kit.dtype).eval().to(kit.device)
        model = SpeculativeGenerationMixin.attach(model)
        model.generation_config.eos_token_id = None
        ids = torch.arange(3, 43, device=kit.device)[None]
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 24, "do_sample": False}
        plain, before = model.generate(**inputs), len(kit.captures)
        found = model.generate(**inputs, speculative={"method": "token_recycling", "compile": "cuda_graph"})
        kit.row(
            architecture=name, equal=found.tolist() == plain.tolist(), forwards=model.last_speculation.forwards,
            captured=len(kit.captures) - before,
        )  # fmt: skip


PARTS = {
    "environment": environment, "tests": tests, "static": static, "forms": forms, "experts": experts,
    "architectures": architectures,
}  # fmt: skip

if __name__ == "__main__":
    sys.exit(main(PARTS, __doc__))
