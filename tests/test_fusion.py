"""Fused small operations: put in wherever a pattern is found, without changing a rounding step of the model.

Here, operations are their references and "graphs" are plain calls. `interpreted_fusion.py` has the Triton kernels,
`graphs_on_simulated_device.py` real captures.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from fusing import attached, fusing, runners_of, verified
from hf_specdec.fusion import fused, patterns
from hf_specdec.fusion.fused import FUSING_DEVICES, can_fuse
from hf_specdec.verification import programs
from hf_specdec.verification.runners import CompiledForward, ModelForward
from models import prompts

TESTS = Path(__file__).parent


def of(norms: int, added: int, gates: int, rotated: int = 1, rotary: int = 0) -> Counter[str]:
    """What is put in for each layer."""
    names = ("rms_norm", "add_rms_norm", "gated", "rotated_attention", "rotary")
    return Counter(dict(zip(names, (norms, added, gates, rotated, rotary), strict=True)))


FIRST, LAST = Counter({"rms_norm": 1}), Counter({"add_rms_norm": 1})
HALF, FULL = torch.bfloat16, torch.float32
PATTERNS: list[tuple[str, torch.dtype, Counter[str], Counter[str]]] = [
    ("llama", HALF, of(0, 2, 1), FIRST),
    ("llama", FULL, of(0, 2, 1), FIRST),
    ("qwen3", torch.float16, of(2, 2, 1), FIRST),
    ("gemma3_text", HALF, of(4, 2, 1), FIRST),
    ("gemma3_text", FULL, of(4, 2, 1), FIRST),
    ("qwen3_moe", HALF, of(2, 2, 1), FIRST),
    ("phi3", HALF, of(0, 2, 1, rotated=0, rotary=2), FIRST),
    ("glm", HALF, of(0, 2, 1, rotated=0), FIRST),
    ("olmo2", HALF, of(4, 0, 1, rotated=0), LAST),
    ("phi", HALF, of(0, 0, 0, rotated=0, rotary=2), Counter()),
    ("cohere", HALF, of(0, 0, 1, rotated=0), Counter()),
]
"""Operations put in for each layer and besides: the first norm, or the last one, is not in a layer.

Others have another rotary embedding (of pairs, or in float32) or norm (LayerNorm), or rotate a part of each head.
"""


@pytest.mark.parametrize(("name", "dtype", "of_layer", "besides"), PATTERNS, ids=lambda value: str(value))
def test_patterns_are_found_and_no_rounding_step_changes(
    name: str, dtype: torch.dtype, of_layer: Counter[str], besides: Counter[str]
) -> None:
    """Results are those of the model's own forward to the bit, for one node and for trees of any width."""
    with fusing() as found:
        model = attached(name, dtype)
        own, chosen = runners_of(model)
        assert type(chosen._inner) is CompiledForward
        assert found == [of_layer + of_layer + besides]
        for rows, parents in ((2, [-1, 0, 0, 1, 2, 2, 3]), (1, [-1]), (3, [-1, 0, 1])):
            results = (verified(model, runner, rows, parents) for runner in (own, chosen))
            for one, other in zip(*results, strict=True):
                assert torch.equal(one, other), (rows, parents)
        results = (verified(model, runner._inner, 2, [-1, 0, 0]) for runner in (own, chosen))  # a cache of its own
        assert all(map(torch.equal, *results))


@pytest.mark.parametrize("rows", [1, 3])
def test_answers_with_fused_operations_are_plain_ones(rows: int) -> None:
    ids, mask = prompts(rows)
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 20, "do_sample": False}
    with fusing() as found:
        model = attached("qwen3")
        plain = model.generate(ids, **options)
        for _ in range(3):
            lookup = {"method": "prompt_lookup", "compile": "cuda_graph"}
            assert torch.equal(model.generate(ids, speculative=lookup, **options), plain)
        assert model.last_speculation.forwards == "cuda_graph"
        assert len(found) == 1


REASONS: dict[str, tuple[str, Any]] = {
    "none of its small operations can be fused": ("gpt2", None),
    "Triton is not installed": ("llama", (programs, "can_fuse", lambda _device: False)),
    "it differs from the model's own forward by": (
        "llama", (fused, "find_norm", lambda *given: (norm := patterns.find_norm(*given)) and norm._replace(eps=9.0))),
    "a layer attends to keys that it has not appended": ("deepseek_v3", None),
}  # fmt: skip


@pytest.mark.parametrize("reason", REASONS)
def test_otherwise_the_models_own_forward_is_captured(reason: str, caplog: Any, monkeypatch: Any) -> None:
    name, change = REASONS[reason]
    if change is not None:
        monkeypatch.setattr(*change)
    with fusing(), caplog.at_level(logging.INFO, "hf_specdec"):
        model = attached(name)
        assert type(runners_of(model)[1]._inner) is ModelForward
        [line] = [one.getMessage() for one in caplog.records if "are not fused" in one.getMessage()]
        assert line.startswith(f"The small operations of {type(model).__name__} are not fused: ")
        assert reason in line


def test_nothing_is_traced_where_fusing_is_off() -> None:
    with fusing() as found:
        FUSING_DEVICES.clear()
        assert type(runners_of(attached("llama"))[1]._inner) is ModelForward
        FUSING_DEVICES.update({"cuda", "cpu"})
    assert not found


triton_test = pytest.mark.skipif(not can_fuse(torch.device("cuda")), reason="Triton is not installed")


@triton_test
def test_triton_kernels_are_their_references() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(TESTS / "interpreted_fusion.py")]
    interpreted = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=TESTS.parent, env=os.environ | interpreted, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


COMPILES = """
import sys, warnings
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from hf_specdec.fusion import triton_kernels as kernels

pointers = {
    kernels._norm_kernel: "x residual weight total result",
    kernels._rotary_kernel: "query key value cos sin rotated keys values",
    kernels._gate_kernel: "gate other result",
}
options = {
    kernels._norm_kernel: [{"ADDS": adds, "EARLY": not adds, "BLOCK": 4096} for adds in (False, True)],
    kernels._rotary_kernel: [{"APPENDS": appends, "HALF": 64, "VALUE": 128} for appends in (False, True)],
    kernels._gate_kernel: [{"SILU": silu, "BLOCK": 1024} for silu in (False, True)],
}
for capability, dtype in ((80, "fp16"), (90, "bf16")):
    for kernel, names in pointers.items():
        types = {name: f"*{dtype}" for name in names.split()} | {"slots": "*i64", "eps": "fp32", "offset": "fp32"}
        for constants in options[kernel]:
            signature = {name: "constexpr" if name in constants else types.get(name, "i32")
                         for name in kernel.arg_names}
            source = ASTSource(kernel, signature, {(kernel.arg_names.index(k),): v for k, v in constants.items()})
            made = triton.compile(source, GPUTarget("cuda", capability, 32), kernels.EXACT_STEPS)
            assert made.asm["cubin"]
            assert "fma.rn" not in made.asm["ptx"] or kernel is not kernels._rotary_kernel
print("compiled")
"""


@triton_test
@pytest.mark.slow
def test_triton_kernels_compile_for_gpus_that_are_not_here(tmp_path: Path) -> None:
    """For compute capabilities 8.0 and 9.0; in the rotary embedding no product is added unrounded."""
    own = {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", COMPILES], env=os.environ | own, capture_output=True, text=True)
    assert done.stdout == "compiled\n", done.stderr[-3000:]
