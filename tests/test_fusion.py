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
from torch import Tensor, nn
from torch.nn import functional
from transformers import DynamicCache

import drafters
from fusing import attached, fusing, runners_of, verified
from hf_specdec.cpu.library import VARIABLE
from hf_specdec.fusion import fused, patterns
from hf_specdec.fusion.fused import FUSING_DEVICES, PRODUCT_ROWS, PRODUCT_TILES, can_fuse
from hf_specdec.heads.stages import captured_stages, stages_of
from hf_specdec.verification import programs
from hf_specdec.verification.graphs import CAPTURED_WIDTHS
from hf_specdec.verification.runners import CompiledForward, ModelForward
from models import prompts

TESTS = Path(__file__).parent


def of(norms: int, added: int, products: int = 2, gated: int = 0, rotated: int = 1, rotary: int = 0) -> Counter[str]:
    """What is put in for each layer."""
    counts = {"rms_norm": norms, "add_rms_norm": added, "products": products, "gated": gated}
    return Counter(counts | {"rotated_attention": rotated, "rotary": rotary})


FIRST, LAST = Counter({"rms_norm": 1}), Counter({"add_rms_norm": 1})
HALF, FULL = torch.bfloat16, torch.float32
PATTERNS: list[tuple[str, torch.dtype, Counter[str], Counter[str]]] = [
    ("llama", HALF, of(0, 2), FIRST),
    ("llama", FULL, of(0, 2), FIRST),
    ("qwen2", HALF, of(0, 2), FIRST),
    ("qwen3", torch.float16, of(2, 2), FIRST),
    ("gemma3_text", HALF, of(4, 2), FIRST),
    ("gemma3_text", FULL, of(4, 2), FIRST),
    ("qwen3_moe", HALF, of(2, 2, products=1, gated=1), FIRST),
    ("phi3", HALF, of(0, 2, products=0, gated=1, rotated=0, rotary=2), FIRST),
    ("glm", HALF, of(0, 2, products=1, gated=1, rotated=0), FIRST),
    ("olmo2", HALF, of(4, 0, rotated=0), LAST),
    ("phi", HALF, of(0, 0, products=1, rotated=0, rotary=2), Counter()),
    ("cohere", HALF, of(0, 0, rotated=0), Counter()),
]
"""Operations put in for each layer and besides: the first norm, or the last one, is not in a layer.

Others have another rotary embedding (of pairs, or in float32) or norm (LayerNorm), rotate a part of each head, or hold
gate and up, or queries, keys and values, in one weight.
"""


@pytest.mark.slow
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


@pytest.mark.slow
@torch.no_grad()
def test_norms_of_a_model_with_attention_of_its_own() -> None:
    """gpt-oss, which is not captured: traced without a cache, with its own attention, rotary embedding and gates."""
    model = attached("gpt_oss", HALF)
    ids = torch.arange(24).view(2, 12)

    def step(ids: Tensor) -> list[Tensor]:
        return [model(input_ids=ids, use_cache=False).logits]

    graph = programs._traced(step, [ids], record=patterns.ReplaceProducts(fused.record_linear))
    weights = patterns.lift_weights(graph)
    assert fused.fuse_operations(graph) == Counter({"rms_norm": 1, "add_rms_norm": 4, "products": 2})
    for given in (ids, torch.arange(15).view(3, 5)):
        assert torch.equal(graph.forward(given, *weights)[0], model(input_ids=given, use_cache=False).logits)


HEADS: dict[str, list[dict[str, int]]] = {
    "eagle": [{"add_rms_norm": 1, "rotary": 2, "products": 2}, {}],
    "eagle3": [{"rms_norm": 2, "add_rms_norm": 1, "rotary": 2, "products": 2}, {"rms_norm": 1}, {"rms_norm": 1}],
    "mtp": [{"rms_norm": 3, "add_rms_norm": 2, "rotary": 2, "products": 2}, {}],
    "dflash": [
        {"rms_norm": 5, "add_rms_norm": 4, "rotary": 4, "products": 4}, {},
        {"rms_norm": 3, "rotary": 2, "products": 1}],
}  # fmt: skip
"""What is put in for the layers of a head, for its scores, and for what it makes of features, if anything."""


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("name", HEADS)
def test_heads_are_fused_and_compute_the_same(name: str) -> None:
    model = attached("llama", HALF)
    drafters.BY_NAME[name].add(model)
    head = model.drafters[drafters.BY_NAME[name].method].head
    with fusing() as found:
        stages, own = captured_stages(head, model.lm_head), stages_of(head, model.lm_head)
        assert found == HEADS[name]
        hidden, positions = torch.randn(2, 2, 5, head.config.hidden_size).to(HALF), torch.arange(10).view(2, 5)
        inputs = (hidden[0], positions) if name == "dflash" else (*hidden, positions)
        mask = torch.ones(2, 1, 5, 5, dtype=torch.bool).tril()
        results = (one.read(*inputs, DynamicCache(), mask) for one in (stages, own))
        assert torch.equal(*results)
        assert torch.equal(stages.score(hidden[0]), own.score(hidden[0]))


@pytest.mark.slow
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


SWITCHED_OFF = {**os.environ, VARIABLE: "none"}
REASONS: dict[str, tuple[str, Any]] = {
    "none of its small operations can be fused": ("gpt2", None),
    "Triton is not installed": ("llama", (programs, "can_fuse", lambda _device: False)),
    "the Triton kernels cannot be used: HF_SPECDEC_KERNELS is 'none'": ("llama", (os, "environ", SWITCHED_OFF)),
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


TORCH, FIRST_TILE, WRONG, TOO_LARGE, LAST_TILE = range(-1, len(PRODUCT_TILES))
TIMES: dict[int, tuple[dict[int, float], int]] = {
    1: ({TORCH: 10.0, FIRST_TILE: 9.8, LAST_TILE: 9.75}, TORCH),  # less than 3 % faster
    8: ({TORCH: 10.0, FIRST_TILE: 9.6, LAST_TILE: 9.8}, FIRST_TILE),
    16: ({TORCH: 10.0, FIRST_TILE: 9.0, LAST_TILE: 8.0}, LAST_TILE),
    32: ({TORCH: 10.0, FIRST_TILE: 10.1, LAST_TILE: 20.0}, TORCH),
    64: ({TORCH: 10.0, FIRST_TILE: 10.0, LAST_TILE: 5.0}, LAST_TILE),
}
"""Times of the tiles that are right, and the choice, by rows."""


@torch.no_grad()
@pytest.mark.parametrize("bias", [False, True])
def test_tiles_of_joined_products_are_chosen_by_time_and_rows(bias: bool, monkeypatch: Any, caplog: Any) -> None:
    """Among those that are right and fit on the device; torch's products stay if they are about as fast."""
    layers = [nn.Linear(16, size, bias=bias) for size in (20, 5, 5, 7, 7, 20, 5, 5, 7, 7)]
    launched, asked = list[int](), list[set[int]]()

    def step(x: Tensor) -> list[Tensor]:
        found = list[Tensor]()
        for q, k, v, gate, up in (layers[:5], layers[5:]):
            found += [q(x), k(x), v(x), functional.silu(gate(x)) * up(x)]
        return found

    def launch(_name: str, x: Tensor, weights: Any, biases: Any, activation: str, tile: Any) -> list[Tensor]:
        launched.append(PRODUCT_TILES.index(tile))
        if launched[-1] == TOO_LARGE:
            raise RuntimeError("out of resource: shared memory")
        made = fused._products(x, weights, biases, "", ())
        made[-1][..., -1] += float(launched[-1] == WRONG)
        return [fused._gate(made[0], made[1], activation)] if activation else made

    def times(runs: Any) -> list[float]:
        timed = []
        for run in runs:
            launched.clear()
            run()
            timed.append(launched[0] if launched else TORCH)
            assert launched in ([], [timed[-1]] * 2), "those of both layers"
        known, _ = list(TIMES.values())[len(asked) % len(TIMES)]
        asked.append(set(timed))
        return [known[tile] for tile in timed]

    def joined(dtype: torch.dtype, timer: Any) -> tuple[Any, list[Tensor], list[list[int]]]:
        for layer in layers:
            layer.to(dtype)
        graph = programs._traced(
            step, [torch.randn(2, 7, 16, dtype=dtype)], record=patterns.ReplaceProducts(fused.record_linear)
        )
        weights = patterns.lift_weights(graph)
        assert fused.fuse_operations(graph) == {"products": 4}
        programs.choose_tiles(graph, weights, timer)
        tables = [
            node.args[-1] for node in graph.graph.nodes if node.target is torch.ops.hf_specdec_fused.products.default
        ]
        return graph, weights, tables

    monkeypatch.setattr(fused, "_launch", launch)
    monkeypatch.setattr(programs, "_CHOSEN", {})
    caplog.set_level(logging.DEBUG, "hf_specdec")
    graph, weights, tables = joined(FULL, times)
    choices = [choice for _, choice in TIMES.values()]
    assert tuple(TIMES) == PRODUCT_ROWS == CAPTURED_WIDTHS
    assert tables == [choices] * 4
    assert asked == [{TORCH, FIRST_TILE, LAST_TILE}] * 2 * len(TIMES)
    assert {weight.data_ptr() for weight in weights} == {
        one.data_ptr() for part in layers for one in part.parameters()
    }
    assert "8 rows x 20 + 5 + 5 of 16" in caplog.text
    for rows, widest in ((0, 1), (1, 1), (2, 8), (8, 8), (9, 16), (30, 32), (64, 64), (65, None)):
        launched.clear()
        x = torch.randn(1, rows, 16)
        torch.testing.assert_close(graph.forward(x, *weights), step(x))
        choice = TORCH if widest is None else TIMES[widest][1]
        assert launched == ([] if choice == TORCH else [choice] * 4), rows
    assert joined(FULL, None)[2] == tables, "chosen once in a process"
    assert joined(HALF, None)[2] == [[]] * 4
    assert "are not joined, because timing them failed: TypeError" in caplog.text
    assert joined(HALF, times)[2] == tables


triton_test = pytest.mark.skipif(not can_fuse(torch.device("cuda")), reason="Triton is not installed")


@pytest.mark.slow
@triton_test
def test_triton_kernels_are_their_references() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(TESTS / "interpreted_fusion.py")]
    interpreted = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=TESTS.parent, env=os.environ | interpreted, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


COMPILES = """
import re, sys, warnings
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from hf_specdec.fusion import triton_kernels as kernels
from hf_specdec.fusion.fused import PRODUCT_ROWS, PRODUCT_TILES

pointers = {
    kernels._norm_kernel: "x residual weight total result",
    kernels._rotary_kernel: "query key value cos sin rotated keys values",
    kernels._gate_kernel: "gate other result",
    kernels._product_kernel: "x weight second_weight third_weight bias second_bias third_bias result second_result "
                             "third_result",
}
products = [
    {"BIASED": gated, "GATED": gated, "SILU": True, "BLOCK_M": max(rows, 16), "BLOCK_N": block,
     "BLOCK_K": length // 2, "num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
    for gated in (False, True) for rows in PRODUCT_ROWS[2:] for block, length, warps, stages in PRODUCT_TILES
]
options = {
    kernels._norm_kernel: [{"ADDS": adds, "EARLY": not adds, "BLOCK": 4096} for adds in (False, True)],
    kernels._rotary_kernel: [{"APPENDS": appends, "HALF": 64, "VALUE": 128} for appends in (False, True)],
    kernels._gate_kernel: [{"SILU": silu, "BLOCK": 1024} for silu in (False, True)],
    kernels._product_kernel: products,
}
for capability, dtype in ((80, "fp16"), (89, "bf16"), (90, "bf16")):
    for kernel, names in pointers.items():
        types = {name: f"*{dtype}" for name in names.split()} | {"slots": "*i64", "eps": "fp32", "offset": "fp32"}
        aligned = [*names.split(), "x_row", "k"] if kernel is kernels._product_kernel else []
        attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
        for given in options[kernel]:
            constants = {name: value for name, value in given.items() if name.isupper()}
            signature = {name: "constexpr" if name in constants else types.get(name, "i32")
                         for name in kernel.arg_names}
            values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
            source = ASTSource(kernel, signature, values, attributes)
            launch = {name: value for name, value in given.items() if name.islower()} or kernels.EXACT_STEPS
            made = triton.compile(source, GPUTarget("cuda", capability, 32), launch)
            assert made.asm["cubin"]
            if kernel is kernels._rotary_kernel:  # a bfloat16 product may be x * y - 0, a sum x * 1 + y or x * -1 + y
                units = set(re.findall(r"mov\\.b16 \\s*(%rs\\d+), 0x(?:8000|3F80|BF80);", made.asm["ptx"]))
                fused = re.findall(r"fma\\.rn\\S* \\s*(.*);", made.asm["ptx"])
                assert all(units & set(line.split(", ")[1:]) for line in fused)
            if kernel is kernels._product_kernel:
                assert "cp.async.cg.shared.global" in made.asm["ptx"], "16 bytes at a time"
                # on 8.9 (99 KB) a launch of the largest fails, and another tile is taken
                assert made.metadata.shared <= (227 if capability == 90 else 163) * 1024
print("compiled")
"""


@triton_test
@pytest.mark.slow
def test_triton_kernels_compile_for_gpus_that_are_not_here(tmp_path: Path) -> None:
    """For compute capabilities 8.0, 8.9 and 9.0; in the rotary embedding no product is added unrounded."""
    own = {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", COMPILES], env=os.environ | own, capture_output=True, text=True)
    assert done.stdout == "compiled\n", done.stderr[-3000:]
