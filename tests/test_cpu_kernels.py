"""The CPU kernels: right on every instruction set of this processor, built once, refused clearly, found in graphs."""

from __future__ import annotations

import ast
import copy
import ctypes
import functools
import hashlib
import itertools
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import gelu, linear, silu

import exact_kernels
import zoo
from hf_specdec import SpeculativeGenerationMixin
from hf_specdec.cpu import library, operations, rewrite
from hf_specdec.cpu.growing import PackedMarkov
from hf_specdec.cpu.library import INSTRUCTION_SETS, VARIABLE, NoKernelsError, choose_instruction_set
from hf_specdec.cpu.operations import GELU_TANH, INT8, INT8_ROUNDED, NO_ACTIVATION, SILU, grouped_form
from hf_specdec.cpu.rewrite import KernelProducts, call_functions, join_steps, use_kernels
from hf_specdec.drafters.dflash import BlockOutputs, grow_block
from hf_specdec.fusion.patterns import lift_weights
from hf_specdec.generation import model_programs
from hf_specdec.heads.dflash import DFlashConfig, DFlashHead
from hf_specdec.heads.stages import stages_of
from hf_specdec.training.feature_store import target_features
from hf_specdec.trees.draft import Budget
from hf_specdec.trees.growth import growable
from hf_specdec.verification.programs import CaptureError, faster_products, make_program

FEATURES = library.processor_features()
AVAILABLE = [one.name for one in INSTRUCTION_SETS if one.machine == platform.machine() and one.features <= FEATURES]
SETS, DTYPES = (
    [(name, 3, False) for name in AVAILABLE] + [(name, 1, True) for name in AVAILABLE[:1]],
    [torch.bfloat16, torch.float32],
)
"""Instruction sets, threads, and whether instructions for pairs of bfloat16 are used if there are any."""
SOURCE, COMPILER = str(Path(library.__file__).parents[2]), {"PATH": os.environ["PATH"]}
GATES = {SILU: silu, GELU_TANH: lambda gate: gelu(gate, approximate="tanh")}


def forget() -> None:
    library._loaded.clear()
    operations.functions_for.cache_clear()


ON_EACH = [
    pytest.param(case, id=str(case), marks=[pytest.mark.slow] if case[0][0] != AVAILABLE[0] else [])
    for case in itertools.product(SETS, DTYPES)
]


@pytest.fixture(scope="module", params=ON_EACH)
def dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    """A dtype, while all operations use the kernels of one instruction set with a number of threads."""
    (name, threads, paired), number = request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, name)
        forget()
        chosen, loaded = library.load_library()
        assert (chosen.name, Path(loaded._name).name.startswith(f"kernels-{name}-")) == (name, True)
        assert loaded.choose_pairs(paired) == (paired and name.endswith("bf16"))
        used = operations.functions_for(torch.float32).multiply, loaded.multiply_32
        assert len({ctypes.cast(one, ctypes.c_void_p).value for one in used}) == 1
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        yield number
        torch.set_num_threads(1)
    forget()


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing loaded, an empty cache, and a quick compiler: it copies the kernels that this machine has."""
    monkeypatch.delenv(VARIABLE, raising=False)
    forget()
    ready = library.library_path(library.load_library()[0], library.find_compiler(), library.cache_directory())
    script(tmp_path / "g++", f'while [ $# -gt 1 ]; do [ "$1" = -o ] && exec /bin/cp {ready} "$2"; shift; done')
    for name, value in {"PATH": tmp_path, "XDG_CACHE_HOME": tmp_path / "cache"}.items():
        monkeypatch.setenv(name, str(value))
    forget()
    yield
    forget()


def script(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def random(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, dtype=torch.float32, device="cpu") * scale).to(dtype)


def assert_right(found: Tensor, *exact: Tensor) -> None:
    """Within 1e-5 of one of the float64 results; in bfloat16 as near as its rounding, so never farther than torch."""
    excess = []
    for one in exact:
        slack = 1e-5 * (one.abs() + one.pow(2).mean().sqrt())
        rounding = 0 if found.dtype == torch.float32 else (one.to(found.dtype).double() - one).abs()
        excess.append((found.double() - one).abs() - rounding - slack)
    assert found.shape == exact[0].shape
    assert bool((torch.stack(excess).amin(0) <= 0).all())


def exact_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return linear(x.double(), weight.double(), None if bias is None else bias.double())


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 6, 7, 8, 13, 32, 75, 300])
def test_products_are_exact(dtype: torch.dtype, rows: int) -> None:
    sizes = (5, 8, 96, 3, 130)
    for k in (1, 33, 37, 64, 576):
        x, weights = random(rows, k, dtype=dtype), [random(n, k, dtype=dtype, scale=k**-0.5) for n in sizes]
        biases = [None if n in (3, 96) else random(n, dtype=dtype) for n in sizes]
        exact = list(map(exact_product, [x] * 5, weights, biases))
        assert_right(operations.linear(x, weights, biases), torch.cat(exact, -1))
        for weight, bias, one in zip(weights, biases, exact, strict=True):
            assert_right(operations.linear(x, [weight], [bias]), one)
            other, other_bias = random(len(weight), k, dtype=dtype, scale=k**-0.5), random(len(weight), dtype=dtype)
            second = exact_product(x, other, other_bias)
            for activation, gate in GATES.items():
                assert_right(operations.linear(x, [weight, other], [bias, other_bias], activation), gate(one) * second)
                assert_right(operations.linear(x, [other, weight], [other_bias, bias], activation), gate(second) * one)


def rounded(x: Tensor) -> Tensor:
    """Rows as torchao rounds them to int8, times their scales."""
    scale = (x.abs().amax(-1, keepdim=True) / 127.5).float().clamp(min=torch.finfo(torch.float32).eps)
    return (x * (1 / scale)).round().clamp(-128, 127).double() * scale.double()


@pytest.mark.parametrize("form", [INT8, INT8_ROUNDED])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 17, 300])
def test_products_with_weights_in_int8(dtype: torch.dtype, rows: int, form: int) -> None:
    """Right, and with the same bits for a row alone and among others, on any number of threads."""
    sizes = (5, 96, 130)
    for k in (1, 33, 64, 100, 576, 3000):
        numbers = [torch.randint(-128, 128, (n, k), dtype=torch.int8, device="cpu") for n in sizes]
        scales, biases = (
            [torch.rand(n, device="cpu") / 128 for n in sizes],
            [None, *(random(n, dtype=dtype) for n in sizes[1:])],
        )
        x, residual = random(rows, k, dtype=dtype), random(rows, sum(sizes), dtype=dtype)
        seen = rounded(x) if form == INT8_ROUNDED else x.double()
        wide = [part.double() * scale.double()[:, None] for part, scale in zip(numbers, scales, strict=True)]
        exact = [
            linear(seen, weight, None if bias is None else bias.double())
            for weight, bias in zip(wide, biases, strict=True)
        ]
        found = operations.linear(x, numbers, biases, NO_ACTIVATION, residual, scales, form)
        assert_right(found, torch.cat(exact, -1) + residual.double())
        gated = operations.linear(x, numbers[1:2] * 2, biases[1:2] * 2, SILU, None, scales[1:2] * 2, form)
        assert_right(gated, silu(exact[1]) * exact[1])
        threads = torch.get_num_threads()
        torch.set_num_threads(3 - threads % 2)
        alone = operations.linear(x[-1:], numbers, biases, NO_ACTIVATION, residual[-1:], scales, form)
        torch.set_num_threads(threads)
        assert torch.equal(alone, found[-1:])


def rounded_about_zero(x: Tensor) -> Tensor:
    """Rows as torchao rounds them to int8 for weights of 4 bits, each about a zero of its own, in the dtype of x."""
    least, most = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
    scale = ((most - least) / 255).clamp(min=torch.finfo(x.dtype).smallest_normal)
    zero = (-128 - (least / scale).round()).clamp(-128, 127)
    return ((((x * (1 / scale)).round() + zero).clamp(-128, 127) - zero) * scale).double()


@pytest.mark.parametrize("way", ["plain", "rounded", "halves"])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 17, 128, 300])
def test_products_with_weights_in_groups(dtype: torch.dtype, rows: int, way: str) -> None:
    """The same, in int8 and in 4 bits, two of them in a byte."""
    sizes = (6, 96, 130)
    for k, size in ((16, 16), (96, 32), (640, 128), (3072, 1024)):
        form, raw = (
            grouped_form(size, way == "rounded", way == "halves"),
            [torch.randint(-128, 128, (n, k)) for n in sizes],
        )
        numbers = [part.to(torch.int8) for part in raw]
        if way == "halves":
            raw = [part & 15 for part in raw]
            numbers = [(a | b << 4).to(torch.int8).view(2 * len(a), -1) for a, b in (part.chunk(2) for part in raw)]
        tables = [(torch.rand(n, k // size, 2) - 0.3) / 128 for n in sizes]
        wide = [
            (part.view(*table.shape[:2], size) * table[..., :1].double() + table[..., 1:]).flatten(1)
            for part, table in zip(raw, tables, strict=True)
        ]
        x, residual = random(rows, k, dtype=dtype), random(rows, sum(sizes), dtype=dtype)
        x[0] = x[0].abs()
        x[-1, : k // 2] = 0
        exact = [(rounded_about_zero(x) if way == "rounded" else x.double()) @ weight.T for weight in wide]
        assert max(map(operations.product_error, numbers, [dtype] * 3, tables, [form] * 3)) < (
            2e-2 if way == "rounded" or dtype == torch.bfloat16 else 1e-5
        )
        found = operations.linear(x, numbers, [None] * 3, NO_ACTIVATION, residual, tables, form)
        assert_right(found, torch.cat(exact, -1) + residual.double())
        gated = operations.linear(x, numbers[1:2] * 2, [None] * 2, SILU, None, tables[1:2] * 2, form)
        assert_right(gated, silu(exact[1]) * exact[1])
        threads = torch.get_num_threads()
        torch.set_num_threads(3 - threads % 2)
        alone = operations.linear(x[-1:], numbers, [None] * 3, NO_ACTIVATION, residual[-1:], tables, form)
        torch.set_num_threads(threads)
        assert torch.equal(alone, found[-1:])


@pytest.mark.parametrize("activation", GATES)
@pytest.mark.parametrize("sign", [-1, 1])
def test_gates_far_from_zero_are_closed_or_open(dtype: torch.dtype, activation: int, sign: int) -> None:

    values = [float("inf") if sign > 0 else 4e4, 1e4, 300, 200, 100, 90, 89, 88.5, 50, 20, 11, 10, 5]
    x, one = torch.tensor(values, dtype=dtype, device="cpu")[:, None] * sign, random(6, 1, dtype=dtype) * 0 + 1
    found = operations.linear(x, [one, one / 2], [None, None], activation)
    torch.testing.assert_close(found, (GATES[activation](x.double()) * x.double() / 2).expand(-1, 6).to(dtype))


def test_products_of_other_shapes(dtype: torch.dtype) -> None:
    weights, biases = [random(10, 20, dtype=dtype) for _ in range(2)], [random(10, dtype=dtype), None]
    whole, turned = random(4, 3, 40, dtype=dtype), random(4, 20, 3, dtype=dtype).mT
    for x in (whole[..., :20], whole[..., ::2], turned, whole.transpose(0, 1)[..., 20:], whole[0, 0, :20]):
        assert_right(operations.linear(x, weights[:1], biases[:1]), exact_product(x, weights[0], biases[0]))
    tie = torch.tensor([[1.0], [1 + 2**-7]], dtype=dtype, device="cpu"), whole[0, :1, :5].mT * 0 + 1  # of bfloat16
    assert torch.equal(operations.linear(*tie[:1], [tie[1]], [tie[1][:, 0] / 256]), linear(*tie, tie[1][:, 0] / 256))
    for x in (whole[:0, :, :20], whole[:, :0, :20]):  # none
        first, second = map(linear, [x, x], weights, biases)
        assert torch.equal(operations.linear(x, weights[:1], biases[:1]), first)
        assert torch.equal(operations.linear(x, weights, biases), torch.cat([first, second], -1))
        for activation, gate in GATES.items():
            assert torch.equal(operations.linear(x, weights, biases, activation), gate(first) * second)


def test_norms_are_exact(dtype: torch.dtype) -> None:
    for k in (1, 7, 33, 64, 130, 576):
        for weight in (random(k), random(k, dtype=dtype)):
            for x in (random(5, k, dtype=dtype), random(3, k, 2, dtype=dtype).mT, random(0, k, dtype=dtype)):
                normal = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 0.01).sqrt()
                assert_right(operations.rms_norm(x, weight, 0.01, False), normal * weight.double())
                exact = [(normal * (1 + nearly)).to(dtype).double() for nearly in (-1e-6, 1e-6)]  # near ties
                assert_right(operations.rms_norm(x, weight, 0.01, True), *(one * weight.double() for one in exact))


@pytest.mark.parametrize("dim", [2, 6, 10, 34, 64, 100])
def test_rotary_embeddings_are_exact(dtype: torch.dtype, dim: int) -> None:
    whole = random(2, 5, 3, 2 * dim, dtype=dtype)
    inputs = whole[..., :dim].transpose(1, 2), whole[..., ::2].transpose(1, 2), random(2, 3, 5, dim, dtype=dtype)
    for x in inputs:
        low, high = x.double().chunk(2, -1)
        for rows in (1, 2):
            cos, sin = random(rows, 5, dim, dtype=dtype), random(rows, dim, 5, dtype=dtype).mT
            turned = torch.cat([-high, low], -1) * sin.double()[:, None]
            assert_right(operations.rotary(x, cos, sin), x.double() * cos.double()[:, None] + turned)


def block_outputs(dtype: torch.dtype, kind: str, size: int, root: int = 7) -> BlockOutputs:
    """Outputs of three blocks, for the kernel; the same in any order of tests, because bf16 logits may tie."""
    torch.manual_seed(size + root)
    config = DFlashConfig(
        vocab_size=1100, draft_vocab_size=size, hidden_size=24, num_attention_heads=2, num_hidden_layers=1,
        markov_rank=5, markov_head_type=kind, sample_from_anchor=True, aux_hidden_state_layer_ids=[1],
    )  # fmt: skip
    head = DFlashHead(config).requires_grad_(False).to(dtype)
    for weight in head.markov_head.parameters():
        weight.copy_(random(*weight.shape, dtype=dtype))
    head.set_hot_token_ids(torch.randperm(1100, device="cpu")[:size].sort().values)
    slots, lm_head = random(3, 4, 24, dtype=dtype), nn.Linear(24, size, bias=False).requires_grad_(False).to(dtype)
    roots = torch.tensor([5, 1099, root], dtype=torch.long, device="cpu")

    stages = replace(stages_of(head, lm_head), markov=PackedMarkov.of(head.markov_head))
    return BlockOutputs(head, stages, roots, slots, torch.nn.Embedding(1, 1), slots[:, 0, :0])


@pytest.mark.parametrize("size", [40, 1000, 1003])
@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_trees_of_blocks_are_those_that_torch_grows(dtype: torch.dtype, kind: str, size: int) -> None:
    """Three rows with different roots and logits; narrow and wide trees, chains, and trees that stop early."""
    for number, budget in enumerate(
        (Budget(16, 4, 8), Budget(3, 4, 5), Budget(5, 4, 1), Budget(40, 2, 3), Budget(30, 4, 4, 0.2))
    ):
        outputs = block_outputs(dtype, kind, size, number)
        assert outputs.packed_markov is not None
        head = copy.deepcopy(outputs.head).float()
        exact = replace(outputs, head=head, stages=stages_of(head, None), slots=outputs.slots.float())
        vars(exact)["logits"] = outputs.logits.float()  # the same numbers, in float32
        by_kernel, by_torch = (grow_block(one, growable(budget)) for one in (outputs, exact))
        assert torch.equal(by_torch.tree.tokens, by_kernel.tree.tokens)
        assert torch.equal(by_torch.tree.parents, by_kernel.tree.parents)
        torch.testing.assert_close(by_kernel.log_probs, by_torch.log_probs, atol=1e-4, rtol=1e-4)


def test_trees_of_blocks_that_cannot_be_grown_are_errors(dtype: torch.dtype) -> None:
    wide = growable(Budget(16, 4, 8))
    with pytest.raises(IndexError, match="1100 tokens"):
        grow_block(block_outputs(dtype, "rnn", 40, root=1100), wide)
    outputs = block_outputs(dtype, "rnn", 40)
    beyond = torch.full((40,), 2**40, device="cpu")  # a chain reads only the embeddings of tokens that it drafts after
    outputs.head.d2t.copy_(beyond - torch.arange(40, device="cpu"))
    assert grow_block(outputs, growable(Budget(2, 1, 1))).tree.tokens[:, 1].tolist() == [2**40] * 3
    with pytest.raises(IndexError, match="1100 tokens"):
        grow_block(outputs, wide)
    for budget in (Budget(16, 5, 8), Budget(60, 4, 41)):
        with pytest.raises(ValueError, match="need more than 4 slots and 40 tokens"):
            grow_block(block_outputs(dtype, "rnn", 40), budget)
    outputs = block_outputs(dtype, "rnn", 40)
    outputs.slots.fill_(torch.nan)  # still a tree
    tree = grow_block(outputs, wide).tree
    assert tree.tokens.shape == (3, 16)
    assert (tree.parents < torch.arange(16, device="cpu")).all()


def attend_exactly(query: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scale: float) -> Tensor:
    """With zeros for rows that see nothing."""
    keys, values = (one.double().repeat_interleave(query.shape[1] // one.shape[1], 1) for one in (keys, values))
    scores = (query.double() @ keys.mT * scale).masked_fill(~seen, -float("inf"))
    return (scores.softmax(-1).nan_to_num(0.0) @ values).transpose(1, 2)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("dims", [(8, 8), (20, 21), (64, 80), (80, 64)])
@pytest.mark.parametrize("length", [1, 2, 127, 128, 129, 300])
def test_attention_is_exact_and_writes_only_its_slots(dtype: torch.dtype, heads: Any, dims: Any, length: int) -> None:
    nodes = min(length, 5)
    for kind in ("all", "rows", "shared", "strided"):
        query = random(2, nodes, heads[0], dims[0], dtype=dtype).transpose(1, 2)
        key = random(2, nodes, heads[1], dims[0] + 3, dtype=dtype)[..., 3:].transpose(1, 2)
        value = random(2, heads[1], nodes, dims[1], dtype=dtype)
        stored = [random(4, heads[1], length + 2, dim, dtype=dtype) for dim in dims]
        wanted = [one.clone() for one in stored]
        for one, new in zip(wanted, (key, value), strict=True):
            one[1:3, :, length - nodes : length] = new
        seen = torch.rand(2, 1, nodes, length, dtype=torch.float32, device="cpu") < 0.6
        seen[0, 0, 0, :128] = seen[1, 0, -1, 128:] = False  # nothing in a chunk, or nothing at all
        mask = {"all": None, "shared": seen[:1], "rows": seen, "strided": seen.mT.contiguous().mT}[kind]
        scale = 0.3 if kind == "all" else None
        found = operations.attend(query, key, value, stored[0][1:3], stored[1][1:3], length - nodes, mask, scale)
        assert all(map(torch.equal, stored, wanted))
        keys, values = (one[1:3, :, :length] for one in wanted)
        visible = torch.ones_like(seen) if mask is None else mask
        assert_right(found, attend_exactly(query, keys, values, visible, scale or dims[0] ** -0.5))


def test_a_token_has_the_bits_that_it_has_alone(dtype: torch.dtype) -> None:
    """In trees, prompts, batches, after padding and within windows; also products and norms, of up to 257 rows."""
    first = 1000 if dtype == torch.bfloat16 else 0
    differing, total, _ = exact_kernels.differences(24, first)
    assert differing == 0
    assert total > 600


@pytest.mark.parametrize("nodes", [1, 3, 21])
def test_attention_with_little_memory_is_the_same(dtype: torch.dtype, nodes: int) -> None:
    """Some key heads at a time, and some of their queries."""
    loaded, found = library.load_library()[1], []
    query, key, value = (random(2, heads, nodes, 24, dtype=dtype) for heads in (6, 2, 2))
    stored, mask = random(2, 2, 2, 700, 24, dtype=dtype), torch.rand(2, 1, nodes, 650, device="cpu") < 0.6
    usual = loaded.limit_scratch(1)
    for floats in (1, 6 * 26 * 3 * nodes, 6 * 26 * 12 * nodes, usual):
        loaded.limit_scratch(floats)
        found.append(operations.attend(query, key, value, *stored.clone(), 650 - nodes, mask, None))
    assert all(torch.equal(one, found[-1]) for one in found)
    assert usual == 2**22


FAILING_NEW = """#include <cstdlib>
#include <new>
static long left = -1;
extern "C" void fail_after(long count) { __atomic_store_n(&left, count, __ATOMIC_SEQ_CST); }
void *operator new(size_t size) {
    const long before = __atomic_load_n(&left, __ATOMIC_SEQ_CST);
    if (before == 0 || (before > 0 && __atomic_fetch_sub(&left, 1, __ATOMIC_SEQ_CST) <= 0)) throw std::bad_alloc();
    if (void *found = malloc(size)) return found;
    throw std::bad_alloc();
}
void operator delete(void *given) noexcept { free(given); }
void operator delete(void *given, size_t) noexcept { free(given); }
"""
NO_MEMORY = """import ctypes, torch
from types import SimpleNamespace
from hf_specdec.cpu import growing, operations, rewrite
from hf_specdec.errors import CacheCapacityError
fail_after, seen, left = ctypes.CDLL(None).fail_after, {}, [-1]
def failing(function):
    def call(*given):
        fail_after(left[0])  # the kernel's allocations, not torch's
        try:
            return function(*given)
        finally:
            fail_after(-1)
    return call
own = operations.functions_for
functions = {number: own(number) for number in (torch.float32, torch.bfloat16)}
replaced = {
    number: SimpleNamespace(**{name: failing(call) for name, call in vars(one).items()})
    for number, one in functions.items()
}
for module in (growing, operations, rewrite):
    module.functions_for = replaced.__getitem__
steps = [rewrite.ChainStep(place, (1,), 33, 33, (None,), (33,)) for place in (0, 2)]
for number in functions:
    ones = lambda *shape: torch.ones(*shape, dtype=number)
    x, weight, joined = ones(5, 33), ones(40, 33), ones(1, 3, 8 * 8)
    keys = torch.zeros(2, 1, 2, 900, 8, dtype=number)
    wide = [torch.ones(shape) for shape in ((10, 15), (15, 9), (15,))]
    packed = growing.PackedMarkov("rnn", ones(700, 5), ones(5, 700), *wide)
    block = torch.zeros(2, dtype=torch.long), ones(2, 3, 9), ones(2, 3, 700), ones(2, 1, 5), None, (16, 3, 4), 0.0
    calls = {
        "grow": lambda: growing.grow_corrected(packed, *block)[0],
        "linear": lambda: operations.linear(x, [weight], [None]),
        "gated": lambda: operations.linear(ones(9, 1600), [ones(40, 1600)] * 2, [None, None], operations.SILU),
        "run": lambda: rewrite.make_chain(steps, 2, [1])(ones(9, 33), ones(33, 33)),
        "best": lambda: operations.best_tokens(ones(3, 5000), 4)[0],
        "joined": lambda: operations.attend_joined(joined, *ones(2, 1, 3, 8), 2, *keys, 800, None, None),
        "attend": lambda: operations.attend(*ones(3, 1, 2, 3, 8), *keys, 800, None, None),
    }
    for name, call in calls.items():
        for left[0] in range(500):
            try:
                result = call()
            except (MemoryError, CacheCapacityError) as error:
                seen.setdefault(name, set()).add(type(error).__name__)
                continue
            break
        else:
            raise AssertionError(name)
        left[0] = -1
        assert torch.equal(result, call()), name
print({name: sorted(kinds) for name, kinds in seen.items()})
"""


@pytest.mark.slow
@pytest.mark.parametrize("threads", [pytest.param("1", marks=pytest.mark.slow), "2"])
def test_a_kernel_without_memory_is_an_error(tmp_path: Path, threads: str) -> None:
    """Every allocation of every call fails in turn, in whichever thread; a call that succeeds later is right."""
    (tmp_path / "new.cpp").write_text(FAILING_NEW)
    subprocess.run([*library.find_compiler(), "-shared", "-fPIC", "new.cpp", "-o", "new.so"], cwd=tmp_path, check=True)
    own = {"PYTHONPATH": SOURCE, "LD_PRELOAD": str(tmp_path / "new.so"), "OMP_NUM_THREADS": threads}
    command = [sys.executable, "-c", NO_MEMORY]
    done = subprocess.run(command, env={**os.environ, **own}, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr[-2000:]
    wanted = dict.fromkeys(("run", "grow", "linear", "gated", "best"), "MemoryError")
    wanted |= {"joined": "CacheCapacityError", "attend": "CacheCapacityError"}
    assert ast.literal_eval(done.stdout) == {name: [kind] for name, kind in wanted.items()}


@pytest.mark.parametrize("broken", ["query", "key", "value"])
def test_attention_shows_nan(dtype: torch.dtype, broken: str) -> None:

    given = {name: random(1, 2, 1, 8, dtype=dtype) for name in ("query", "key", "value")}
    given[broken][0, 0] = float("nan")
    keys, values = random(2, 1, 2, 9, 8, dtype=dtype)
    found = operations.attend(**given, keys=keys, values=values, begin=4, mask=None, scale=None)
    assert found.isnan().all(-1).tolist() == [[[True, False]]]


FAILURES: dict[str, Callable[[Any, Path], None]] = {
    f"{VARIABLE} is 'sse9', but must be 'none' or one of avx512_bf16, ":
        lambda patch, path: patch.setenv(VARIABLE, "sse9"),
    f"{VARIABLE} is 'none'.": lambda patch, path: patch.setenv(VARIABLE, " none "),
    "no C++ compiler was found (/nonexistent; set CXX to use another one).":
        lambda patch, path: patch.setenv("CXX", "/nonexistent"),
    "PATH/g++ cannot compile them for BEST (x.cpp:1: \ufffd error).":
        lambda patch, path: script(path / "g++", "printf 'x.cpp: note\nx.cpp:1: \\377 error\n'; exit 1"),
    "PATH/g++ failed (Command '['PATH/g++', '-std=": lambda patch, path: script(path / "g++", "exec /bin/sleep 60"),
    "PATH/g++ cannot compile them for BEST (exit status 3).": lambda patch, path: script(path / "g++", "exit 3"),
    "they cannot be built or loaded (/": lambda patch, path: script(
        path / "g++", 'while [ $# -gt 1 ]; do [ "$1" = -o ] && exec /bin/cp $0 "$2"; shift; done'),
    "they cannot be built or loaded ([": lambda patch, path: (
        patch.setenv("XDG_CACHE_HOME", "/proc/self"), patch.setattr(tempfile, "tempdir", "/proc/self")),
}  # fmt: skip


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What three loads log, without the announcement of a compilation."""
    with caplog.at_level(logging.INFO, "hf_specdec"):
        for _ in range(3):
            library.load_or_none()
    return [record.getMessage() for record in caplog.records if not record.getMessage().startswith("Compiling ")]


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("reason", FAILURES)
def test_a_failure_is_logged_once(reason: str, tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    FAILURES[reason](monkeypatch, tmp_path)
    monkeypatch.setattr(library, "COMPILE_TIMEOUT", 0.5)
    found = [line for line in messages(caplog) if not line.startswith("Compiled CPU kernels cannot be kept (")]
    assert len(found) == 1
    reason = reason.replace("PATH", str(tmp_path)).replace("BEST", AVAILABLE[0])
    assert found[0].startswith(f"CPU kernels are not used: {reason}")


@pytest.mark.usefixtures("fresh")
def test_without_a_compiler_a_library_of_another_user_is_named(tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    kept = kept_library(monkeypatch)
    monkeypatch.setenv("CXX", "/nonexistent")
    kept.chmod(0o777)
    [found] = messages(caplog)
    assert (
        "no C++ compiler was found (/nonexistent; set CXX to use another one), and other users can write to" in found
    )
    assert str(kept) in found


def kept_library(patch: pytest.MonkeyPatch) -> Path:
    """A whole library in the cache that this process has not mapped to memory."""
    library.load_library()
    [made] = library.cache_directory().glob("*.so")
    shutil.copytree(made.parent, made.parents[1] / "copy" / "hf-specdec")
    patch.setenv("XDG_CACHE_HOME", str(made.parents[1] / "copy"))
    forget()
    return made.parents[1] / "copy" / "hf-specdec" / made.name


FILE_STATES: dict[str, Callable[[Any, Path], Any]] = {
    "truncated": lambda patch, path: os.truncate(path, path.stat().st_size // 2),
    "one byte short": lambda patch, path: os.truncate(path, path.stat().st_size - 1),
    "empty": lambda patch, path: os.truncate(path, 0),
    "garbage": lambda patch, path: path.write_bytes(random(9999).numpy().tobytes()),
    "no functions": lambda patch, path: path.write_bytes(without_functions()),
    "a FIFO": lambda patch, path: (path.unlink(), os.mkfifo(path)),
    "a link": lambda patch, path: (path.rename(path.with_name("other")), path.symlink_to("other")),
    "of another user": lambda patch, path: os.chown(path, 12345, 12345),
    "open to others": lambda patch, path: path.chmod(0o777),
    "open to the group": lambda patch, path: path.chmod(0o770),
}
DIRECTORY_STATES: dict[str, Callable[[Any, Path], Any]] = {
    "a directory as library": lambda patch, path: (path.unlink(), path.mkdir()),
    "a file as parent": lambda patch, path: patch.setenv("XDG_CACHE_HOME", str(path)),
    "below /proc": lambda patch, path: patch.setenv("XDG_CACHE_HOME", "/proc/self"),
    "no home": lambda patch, path: (
        patch.delenv("XDG_CACHE_HOME"), patch.setattr(Path, "home", lambda: Path("~missing").expanduser())),
    "a linked directory": lambda patch, path: (
        path.parent.rename(path.parents[1] / "other"), path.parent.symlink_to("other")),
    "a loose link": lambda patch, path: (
        path.parent.rename(path.parents[1] / "other"), path.parent.symlink_to("nowhere")),
    "a directory of another user": lambda patch, path: patch.setattr(os, "geteuid", lambda: 12345),
    "a directory open to others": lambda patch, path: path.parent.chmod(0o777),
    "read only": lambda patch, path: (path.unlink(), patch.setattr(library, "clear_partials", refuse_writing(path))),
    "no space to write": lambda patch, path: (path.unlink(), patch.setattr(os, "fsync", fails_once(os.fsync))),
    "no space to compile": lambda patch, path: patch.setenv("CXX", full_compiler(path)),
}  # fmt: skip


def refuse_writing(path: Path) -> Callable[..., None]:
    """The effect of a read-only directory, in which root can write all the same."""

    def refuse(folder: Path, _prefix: str) -> None:
        if folder == path.parent:
            raise OSError(30, "Read-only file system", str(folder))

    return refuse


def full_compiler(path: Path) -> str:
    """A compiler for which there is no space beside a library."""
    ready = path.parents[3] / "g++"
    text = f'case "$*" in *{path.parent}*) echo "as: /x: No space left on device"; exit 1;; esac; exec {ready} "$@"'
    script(ready.with_name("cxx"), text)
    return str(ready.with_name("cxx"))


def fails_once(function: Callable[..., None]) -> Callable[..., None]:
    calls: list[int] = []

    def call(*arguments: Any) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise OSError(28, "No space left on device")
        function(*arguments)

    return call


@functools.cache
def without_functions() -> bytes:
    """A whole library, as the package seals it, that lacks its functions."""
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "made.so"
        subprocess.run(["/usr/bin/env", "cc", "-shared", "-x", "c", "/dev/null", "-o", made], check=True, env=COMPILER)
        return made.read_bytes() + hashlib.sha256(made.read_bytes()).digest()


def assert_kernels_multiply() -> None:
    x, weight = random(2, 9), random(5, 9)
    assert_right(operations.linear(x, [weight], [None]), exact_product(x, weight, None))


def as_root(states: Iterable[str]) -> list[Any]:
    """Of which some need root, who may give files away."""
    skip = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
    return [pytest.param(one, marks=[skip] if one == "of another user" else []) for one in states]


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("state", as_root(FILE_STATES))
def test_a_library_that_cannot_be_trusted_is_replaced(state: str, monkeypatch: Any, caplog: Any) -> None:
    path = kept_library(monkeypatch)
    FILE_STATES[state](monkeypatch, path)
    assert library.loads_at_once() == (state == "no functions")
    [found] = messages(caplog)
    assert found.startswith("The CPU kernels are compiled again: ")
    assert str(path) in found
    assert_kernels_multiply()
    forget()
    assert [one for one in path.parent.iterdir() if one.name != "other" and one.suffix in ("", ".so")] == [path]
    assert path.lstat().st_mode & 0o777 == path.parent.lstat().st_mode & 0o777 == 0o700
    later = path.parents[2] / "later"  # the dynamic linker knows the old file by its name
    monkeypatch.setenv("XDG_CACHE_HOME", str(path.parents[1].rename(later)))
    assert library.loads_at_once()
    assert messages(caplog) == [found]


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("state", DIRECTORY_STATES)
def test_kernels_that_cannot_be_kept_work(state: str, monkeypatch: Any, caplog: Any) -> None:
    path = kept_library(monkeypatch)
    DIRECTORY_STATES[state](monkeypatch, path)
    [found] = messages(caplog)
    assert found.startswith("Compiled CPU kernels cannot be kept (")
    assert found.endswith("); they are built for this process only.")
    assert "()" not in found
    assert library.load_library()[1]._name != str(path)
    assert_kernels_multiply()
    assert not list(path.parents[1].rglob(".build-*"))


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("state", as_root(["", "truncated", "no functions", "a FIFO", "of another user"]))
def test_without_a_compiler_only_a_library_that_can_be_trusted_is_loaded(
    state: str, tmp_path: Path, monkeypatch: Any, caplog: Any
) -> None:
    path = kept_library(monkeypatch)
    (tmp_path / "g++").unlink()
    if not state:
        assert library.load_library()[1]._name == str(path)
        return
    FILE_STATES[state](monkeypatch, path)
    [found] = messages(caplog)
    assert found.startswith("CPU kernels are not used: no C++ compiler was found")


@pytest.mark.usefixtures("fresh")
def test_answers_are_right_without_kernels(tmp_path: Path, caplog: Any) -> None:
    script(tmp_path / "g++", "kill -9 $$")
    model: Any = SpeculativeGenerationMixin.attach(copy.deepcopy(zoo.build("llama")))
    ids, options = torch.arange(9)[None], {"max_new_tokens": 6, "do_sample": False}
    plain = model.generate(ids, **options)
    for _ in range(2):
        assert torch.equal(model.generate(ids, speculative={"method": "auto", "compile": "kernels"}, **options), plain)
    [found, used] = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert found.startswith("CPU kernels are not used: ")
    assert "the CPU kernels cannot be used" in used


@pytest.mark.usefixtures("fresh")
def test_a_stopped_compiler_leaves_nothing(tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    """Neither its children nor their files; and leftovers of a process that died are removed."""
    directory = library.cache_directory()
    (directory / f".build-old.{2**22 + 1}.partial").mkdir()  # above the largest process id
    script(tmp_path / "g++", f"(echo $$ > $TMPDIR/cc1.s; exec /bin/sleep 60) & echo $! > {tmp_path}/child; wait")
    monkeypatch.setattr(library, "COMPILE_TIMEOUT", 0.5)
    [found] = messages(caplog)
    assert "timed out" in found
    child = int((tmp_path / "child").read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
    assert not list(directory.iterdir())


@pytest.mark.usefixtures("fresh")
def test_a_process_that_ends_stops_its_compiler(tmp_path: Path) -> None:
    script(tmp_path / "g++", f"echo $$ > {tmp_path}/child; /bin/sleep 60 & wait")
    code = (
        "import time, pathlib\nfrom hf_specdec.cpu import library\nassert not library.are_kernels_ready()\n"
        f"while not pathlib.Path('{tmp_path}/child').exists(): time.sleep(0.01)"
    )
    variables = {**os.environ, "PYTHONPATH": SOURCE}
    done = subprocess.run([sys.executable, "-c", code], env=variables, text=True, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    child = int((tmp_path / "child").read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
    assert not list(library.cache_directory().iterdir())


AVX2, AVX512 = (
    {"sse2", "avx2", "fma", "f16c"},
    {"sse2", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq"},
)


def test_the_best_instruction_set_is_chosen() -> None:
    for features, machine, most, wanted in (
        (AVX512 | {"avx512_bf16", "avx512_vnni"}, "x86_64", "", "avx512_bf16"), (AVX512, "x86_64", "", "avx512"),
        (AVX512, "x86_64", "avx2", "avx2"), (AVX2, "x86_64", "avx512", "avx2"),
        ({"asimd", "bf16"}, "aarch64", "", "arm_bf16"), ({"asimd"}, "aarch64", "", "arm"),
    ):  # fmt: skip
        assert choose_instruction_set(frozenset(features), machine, most).name == wanted
    with pytest.raises(
        NoKernelsError, match=r"\(riscv64\) supports none of the instruction sets avx512_bf16, .*, arm$"
    ):
        choose_instruction_set(frozenset({"asimd"}), "riscv64", "")
    with pytest.raises(NoKernelsError, match=r", or its features are not known$"):
        choose_instruction_set(frozenset(), "arm64", "")
    with pytest.raises(NoKernelsError, match=VARIABLE):
        choose_instruction_set(frozenset(AVX2), "x86_64", "arm")


BUILDS = """import ctypes; from hf_specdec.cpu import library
floats, number = ctypes.c_float * 4, ctypes.c_long
x, weight, y = floats(3, 4), floats(1, 1, 1, 1), floats()
normalize = library.load_library()[1].normalize_32
normalize(x, number(1), number(4), weight, number(1), ctypes.c_float(0), number(0), y, number(1))
print([round(value, 3) for value in y])"""
IMPORTS = "import hf_specdec.verification.programs, hf_specdec.cpu.library as one; print(one.is_loaded())"


@pytest.mark.slow
def test_processes_that_build_at_once_leave_one_library_and_an_import_none(tmp_path: Path) -> None:
    def run(code: str, cache: str) -> subprocess.Popen[str]:
        variables = {"XDG_CACHE_HOME": str(tmp_path / cache), "PATH": os.environ["PATH"], "PYTHONPATH": SOURCE}
        return subprocess.Popen([sys.executable, "-c", code], env=variables, text=True, stdout=-1)

    processes = [run(BUILDS, "one"), run(BUILDS, "one"), run(IMPORTS, "other")]
    assert [one.communicate()[0] for one in processes] == ["[1.2, 1.6, 0.0, 0.0]\n"] * 2 + ["False\n"]
    found = sorted((one.name.split("-")[1], one.suffix) for one in tmp_path.glob("*/*/*"))
    assert found == [(AVAILABLE[0], suffix) for suffix in (".json", ".lock", ".so")]
    assert not (tmp_path / "other").exists()


def norm(x: Tensor, weight: Tensor, early: bool = False, dim: int = -1, keepdim: bool = True) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(dim, keepdim=keepdim) + 1e-6)
    return weight * wide.to(x.dtype) if early else (wide * weight).to(x.dtype)


def turn(x: Tensor, tables: Tensor, kind: str = "halves") -> Tensor:
    low, high = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    parts = {"halves": (-high, low), "other sign": (high, -low), "same half": (-high, high)}
    pairs = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    turned = pairs if kind == "pairs" else torch.cat(parts[kind], -1)
    return x * tables.unsqueeze(1) + turned * (tables * 0.7).unsqueeze(1)


class Parts:
    """Modules and weights of a dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.a, self.b, self.c = (nn.Linear(8, 24, bias=one, dtype=dtype, device="cpu") for one in (True, False, True))
        self.half, self.w, self.table = random(24, 8).half(), random(8, dtype=dtype), random(10, 8, dtype=dtype)

    def heads(self, x: Tensor) -> Tensor:
        return self.a(x).view(*x.shape[:2], 3, 8).transpose(1, 2)


Step = Callable[[Parts, Tensor, Tensor], Tensor]
CASES: dict[str, tuple[list[str] | None, Step]] = {
    "Llama norm": (["rms_norm"], lambda p, x, i: norm(x, p.w, early=True)),
    "Gemma norm": (["rms_norm"], lambda p, x, i: norm(x, 1.0 + p.w.float())),
    "norm of another dimension": ([], lambda p, x, i: norm(x, p.w.float(), dim=-2)),
    "norm over rows": (None, lambda p, x, i: norm(p.a.weight[:8] * x[0, 0], p.w, keepdim=False)),
    "norm with a strided weight": (None, lambda p, x, i: norm(x, p.a.weight[:8, 0].float())),
    "rotary": (["1", "rotary"], lambda p, x, i: turn(p.heads(x), p.table[i])),
    "rotary, one table": (["1", "rotary"], lambda p, x, i: turn(p.heads(x), p.table[i[:1]])),
    "rotary of pairs": (["1"], lambda p, x, i: turn(p.heads(x), p.table[i], "pairs")),
    "rotary, other sign": (["1"], lambda p, x, i: turn(p.heads(x), p.table[i], "other sign")),
    "rotary, same half": (["1"], lambda p, x, i: turn(p.heads(x), p.table[i], "same half")),
    "rotary, heads last": (None, lambda p, x, i: turn(p.heads(x).transpose(1, 2), p.table[i[0]])),
    "rotary, one position": (None, lambda p, x, i: turn(p.heads(x), p.table[i[:, :1]])),
    "rotary, more tables": (None, lambda p, x, i: turn(p.heads(x[:1]), p.table[i])),
    "SiLU": (["2 gated"], lambda p, x, i: silu(p.a(x)) * p.b(x)),
    "tanh GELU": (["2 gated"], lambda p, x, i: p.b(x) * gelu(p.a(x), approximate="tanh")),
    "exact GELU": (["2"], lambda p, x, i: gelu(p.a(x)) * p.b(x)),
    "gate of two inputs": (["1", "1"], lambda p, x, i: silu(p.a(x)) * p.b(x + 1)),
    "gate used twice": (["2"], lambda p, x, i: (gate := silu(p.a(x))) * p.b(x) + gate),
    "residual": (["1 added"], lambda p, x, i: p.a(x) + p.table[:8].sum() * x.repeat(1, 1, 3)),
    "residual of another shape": (["1"], lambda p, x, i: p.a(x) + x[..., :1]),
    "residual times a number": (["1"], lambda p, x, i: torch.add(x.repeat(1, 1, 3), p.a(x), alpha=2)),
    "joined": (["3"], lambda p, x, i: p.a(x).mul_(2) + p.b(x).unflatten(-1, (3, 8)).mT.flatten(2) + p.c(x)),
    "joined and flattened": (None, lambda p, x, i: p.a(x).flatten(1) + p.b(x).flatten(1)),
    "computed weight": (["1 added"], lambda p, x, i: linear(x, p.a.weight * 2) + p.b(x)),
    "computed bias": (["1", "1"], lambda p, x, i: linear(x, p.a.weight, p.a.bias * 2) + p.b(x)),
    "bias of one number": (None, lambda p, x, i: linear(x, p.a.weight, p.w[:1])),
    "float16": ([], lambda p, x, i: linear(x.half(), p.half)),
}  # fmt: skip


@pytest.mark.parametrize("number", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_patterns_become_kernels_and_nothing_else_does(case: str, number: torch.dtype) -> None:
    (wanted, step), parts, positions = CASES[case], Parts(number), torch.arange(35, device="cpu").view(5, 7) % 10
    inputs = random(2, 5, 8, dtype=number), positions[:2, :5]
    with torch.no_grad():
        with KernelProducts(recorded=True):
            trace = make_fx(lambda *given: step(parts, *given), tracing_mode="symbolic", _allow_non_fake_inputs=True)
            graph = trace(*inputs)
        weights, count, found = lift_weights(graph), use_kernels(graph), []
        for node in (node for node in graph.graph.nodes if str(node.target).startswith("hf_specdec_cpu")):
            product = node.target == torch.ops.hf_specdec_cpu.linear.default
            kind = " added" * (len(node.args) > 4) if product and not node.args[3] else " gated"
            found.append(f"{len(node.args[1])}{kind}" if product else node.target._opname)
        assert count == sum(one[0].isdigit() for one in found)
        assert wanted is None or found == wanted
        tolerance = {"atol": 0.05, "rtol": 0.02} if number == torch.bfloat16 else {"atol": 1e-5, "rtol": 1e-5}
        for change in (lambda _graph: None, call_functions):
            change(graph)
            for given in (inputs, (random(4, 7, 8, dtype=number), positions[:4])):
                result, expected = graph.forward(*given, *weights), step(parts, *given)
                torch.testing.assert_close(result, expected, **tolerance)
                assert (
                    not case.endswith(" norm") or (result == expected).float().mean() > 0.9 or number != torch.bfloat16
                )


class Layer(nn.Module):
    """What stands between two attentions, with all that steps of a chain can have."""

    def __init__(self, number: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = {"o": (20, 24, True), "gate": (24, 36, True), "up": (24, 36, False), "down": (36, 24, False),
                 "q": (24, 40, True), "k": (24, 8, False), "v": (24, 8, True)}  # fmt: skip
        for name, (k, n, bias) in sizes.items():
            setattr(self, name, nn.Linear(k, n, bias, dtype=number, device="cpu"))
        self.first, self.second = random(24, dtype=number), random(24)

    def forward(self, attended: Tensor, residual: Tensor) -> list[Tensor]:
        x = residual + self.o(attended)
        y = norm(x, self.first, early=True)
        x = x + self.down(silu(self.gate(y)) * self.up(y))
        y = norm(x, self.second)
        return [x, self.q(y), self.k(y), self.v(y)]


@pytest.mark.parametrize("number", [torch.bfloat16, torch.float32], ids=str)
def test_steps_between_attentions_are_one_call_with_the_same_result(
    number: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, calls = Layer(number), list[int]()
    inputs = random(2, 5, 20, dtype=number), random(2, 5, 24, dtype=number)
    with torch.no_grad():
        with KernelProducts(recorded=True):
            graph = make_fx(layer, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*inputs)
        weights = lift_weights(graph)
        assert use_kernels(graph) == 4
        apart = copy.deepcopy(graph)
        assert join_steps(graph) == 1
        assert not any(str(node.target).startswith("hf_specdec_cpu") for node in graph.graph.nodes)
        own = operations.functions_for(number)
        counted = SimpleNamespace(run=lambda *arguments: (calls.append(arguments[3]), own.run(*arguments)))
        monkeypatch.setattr(rewrite, "functions_for", lambda _dtype: counted)
        for rows, columns in ((2, 5), (1, 1), (1, 3), (3, 29), (30, 30), (0, 4)):
            given = random(columns, rows, 20, dtype=number).transpose(0, 1), random(rows, columns, 24, dtype=number)
            found, expected = graph.forward(*given, *weights), apart.forward(*given, *weights)
            for one, other in zip(found, expected, strict=True):
                assert torch.equal(one, other), (rows, columns)
    assert calls == [10, 1, 3, 87, 900, 0]


def test_other_steps_are_not_joined() -> None:
    layer = nn.Linear(8, 8, dtype=torch.float32, device="cpu")
    steps = {
        "another operation between": (lambda x: layer(layer(x).tanh()), 0),
        "a computed weight": (lambda x: linear(layer(x), layer.weight * 2), 0),
        "other rows": (lambda x: layer(layer(x).flatten(0, 1)), 0),
        "one after the other": (lambda x: layer(layer(layer(x))), 1),
    }
    for name, (step, count) in steps.items():
        with torch.no_grad(), KernelProducts(recorded=True):
            graph = make_fx(step, tracing_mode="symbolic", _allow_non_fake_inputs=True)(random(2, 3, 8))
        weights = lift_weights(graph)
        use_kernels(graph)
        assert join_steps(graph) == count, name
        given = random(3, 5, 8)
        with torch.no_grad():
            torch.testing.assert_close(graph.forward(given, *weights), step(given), atol=1e-5, rtol=1e-5)


def test_threads_run_one_chain_at_once() -> None:
    layer = nn.Linear(64, 64, dtype=torch.float32, device="cpu")
    with torch.no_grad():
        program = make_program(lambda x: [layer(layer(layer(x)))], random(2, 64), mode="kernels")
        inputs = [random(one % 5 + 1, 64) for one in range(40)]
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda x: program(x)[0], inputs * 5))
        for x, result in zip(inputs * 5, found, strict=True):
            torch.testing.assert_close(result, layer(layer(layer(x))), atol=1e-5, rtol=1e-5)


def test_a_kernel_with_wrong_products_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = nn.Linear(20, 130, bias=False), random(2, 20)
    assert operations.product_error(layer.weight.detach(), torch.float32) < 1e-5
    right = operations.linear
    monkeypatch.setattr(operations, "linear", lambda *given: right(*given) * torch.linspace(1, 1.1, 130))
    with torch.no_grad(), pytest.raises(CaptureError, match=r"product with a weight of 130 x 20 is wrong by .*e-02"):
        make_program(lambda given: [layer(given)], x, mode="kernels")


@pytest.mark.slow
@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("how", ["later calls", "warmup"])
def test_auto_does_not_wait_for_a_compiler(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls go on without kernels until the compiler has finished; only `warmup()` waits."""
    (tmp_path / "g++").rename(tmp_path / "cxx")
    script(
        tmp_path / "g++", f'[ "$1" = --version ] || until [ -e {tmp_path}/go ]; do :; done; exec {tmp_path}/cxx "$@"'
    )
    monkeypatch.setattr(model_programs, "COMPILED_FROM_SECONDS", 0.0)
    monkeypatch.setattr(model_programs, "MAX_SHARE", 1e9)
    model: Any = SpeculativeGenerationMixin.attach(copy.deepcopy(zoo.build("llama")))
    ids = torch.arange(9)[None]
    options = {"max_new_tokens": 4, "do_sample": False, "speculative": "auto"}
    for _ in range(3):
        model.generate(ids, **options)
        assert not model._speculation.programs
        assert not library.is_loaded()
    (tmp_path / "go").touch()
    if how == "warmup":
        model.warmup("auto")
    for thread in library._running:
        thread.join()
    model.generate(ids, **options)
    assert library.is_loaded()
    assert model._speculation.programs
    assert library.are_kernels_ready()


@pytest.mark.usefixtures("fresh")
def test_compiled_kernels_are_loaded_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    library.load_library()
    forget()
    assert library.are_kernels_ready()
    monkeypatch.setenv(VARIABLE, "none")
    assert library.are_kernels_ready()  # it is known at once that there are none
    assert library.load_or_none() is None


@pytest.mark.usefixtures("fresh")
def test_a_compiler_may_have_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path / "wrapper", '[ "$1" = "a b" ] && shift && exec "$@"')
    monkeypatch.setenv("CXX", f"wrapper 'a b' {tmp_path / 'g++'}")
    assert library.load_library()[0].name == AVAILABLE[0]


@pytest.mark.parametrize("number", [torch.bfloat16, torch.float32], ids=str)
def test_joined_attention_is_rotary_and_attention(number: torch.dtype) -> None:
    """Queries of 4 heads, keys and values of 2, each of size 24, for 3 nodes after 130 slots."""
    joined, tables = random(2, 3, 8 * 24, dtype=number), random(2, 2, 3, 24, dtype=number)
    memory, mask = random(2, 2, 2, 140, 24, dtype=number), random(2, 1, 3, 133) > 0
    heads = joined.unflatten(-1, (8, 24)).transpose(1, 2)
    query, key = (operations.rotary(part, *tables) for part in (heads[:, :4], heads[:, 4:6]))
    wanted, found = memory.clone(), memory.clone()
    expected = operations.attend(query, key, heads[:, 6:], *wanted, 130, mask, 0.3)
    assert torch.equal(operations.attend_joined(joined, *tables, 2, *found, 130, mask, 0.3), expected)
    assert torch.equal(found, wanted)
    assert not torch.equal(found, memory)


@pytest.mark.skipif("avx2" not in AVAILABLE, reason="needs a processor with AVX2")
def test_products_are_faster_without_instructions_for_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """In prompts, captured features and a head's training; products with gradients are torch's."""
    model, x = zoo.build("llama").bfloat16(), random(2, 5, 32, dtype=torch.bfloat16)
    used: list[tuple[int, ...]] = []
    multiply = operations.linear
    monkeypatch.setattr(operations, "linear", lambda x, *rest: used.append(tuple(x.shape)) or multiply(x, *rest))
    for name, expected in (("avx2", 1), (AVAILABLE[0], 0 if AVAILABLE[0].endswith("bf16") else 1)):
        monkeypatch.setenv(VARIABLE, name)
        forget()
        library.load_library()
        weight = model.lm_head.weight
        with faster_products(model):
            found = linear(x, weight.detach())
            linear(x, weight)  # needs a gradient
            linear(x.float(), weight.detach().float())
        assert len(used) == expected * 2  # other dtypes of the same model as well
        assert_right(found, exact_product(x, weight.detach(), None))
        used.clear()
        input_ids = torch.arange(12, device="cpu").view(2, 6)
        target_features(model, input_ids, torch.tensor([6, 4], device="cpu"), [1])
        assert bool(used) == bool(expected)
        used.clear()
    assert isinstance(faster_products(model.float()), nullcontext)
    forget()


def test_other_weights_are_left_alone() -> None:
    x, weight = random(2, 8), random(24, 8)
    marked, bias = weight.as_subclass(type("Marked", (Tensor,), {})), weight[:, 0].clone()
    assert operations.can_multiply(x, weight, bias)
    for other in (marked, nn.Parameter(marked), weight.half(), weight.bfloat16(), weight.to("meta"), weight.mT, bias):
        assert not operations.can_multiply(x, other, None)
    assert not operations.can_multiply(x, weight, weight[:, 0])


@pytest.mark.usefixtures("fresh")
def test_programs_read_weights_in_place_or_say_why_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    parts, x = Parts(torch.float32), random(2, 5, 8)

    def step(x: Tensor) -> list[Tensor]:
        return [parts.a(norm(x, parts.w, early=True))]

    with torch.no_grad():
        program = make_program(step, x, mode="kernels")
        parts.a.weight.neg_()
        torch.testing.assert_close(program(x[:1])[0], step(x[:1])[0])
    with pytest.raises(CaptureError, match=r"^none of its products can use the CPU kernels$"):
        make_program(lambda x: [x + 1], x, mode="kernels")
    with pytest.raises(CaptureError, match=r"^the CPU kernels cannot run on meta$"):
        make_program(step, x.to("meta"), mode="kernels")
    monkeypatch.setenv(VARIABLE, "none")
    forget()
    with pytest.raises(CaptureError, match=f"^the CPU kernels cannot be used: {VARIABLE} is 'none'$"):
        make_program(step, x, mode="kernels")
