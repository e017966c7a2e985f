"""Attention without masks: what it sees is what masks show, its kernels compute it, a wrong kernel is not used.

The kernels run in Triton's interpreter, in a process of their own: it must be chosen before Triton is imported.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hf_specdec.cpu.library import VARIABLE
from hf_specdec.trees.tree import TokenTree
from hf_specdec.verification import device_attention
from hf_specdec.verification.device_attention import (
    DeviceContext,
    VisibleKeys,
    attend_exactly,
    attend_in_parts,
    kernel_error,
    needs_no_masks,
    visible_in_tree,
    words_of,
)
from hf_specdec.verification.masks import LayerKind, MaskLayout, bucket_masks
from hf_specdec.verification.memory import KeyValueBuffer
from hf_specdec.verification.tree_attention import KERNEL_TOLERANCE, attending, layer_attention

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
in_interpreter = pytest.mark.skipif(not INTERPRETED, reason="run by test_the_kernels_in_an_interpreter")
SIZE = 30
"""Slots of windows and chunks."""
KINDS: tuple[LayerKind, ...] = ("full", "sliding", "chunked")
FAR = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
CPU = torch.device("cpu")


def layout_of(kind: LayerKind) -> MaskLayout:
    return MaskLayout((("layer", kind, 0 if kind == "full" else SIZE),), additive=False)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tree_over(lengths: list[int], nodes: int, slots: int, seed: int = 0) -> tuple[Any, ...]:
    """Ancestors of random trees, one of them padded, and further arguments of `bucket_masks`; prompts have holes."""
    generator = torch.Generator().manual_seed(seed)
    above = (torch.rand(len(lengths), nodes, generator=generator) * torch.arange(nodes)).long()
    above[:, 0] = -1
    above[-1, nodes * 3 // 4 + 1 :] = -1
    committed, valid = torch.tensor(lengths), torch.rand(len(lengths), slots, generator=generator) > 0.2
    valid[:, 16:] = True
    left = valid.int().argmax(-1)
    ancestors = TokenTree(above, above).ancestor_mask()
    return ancestors, committed, committed.amax() + torch.arange(nodes), valid, left


def test_words() -> None:
    seen = torch.rand(3, 5, 64, generator=torch.Generator().manual_seed(1)) < 0.5
    seen[0, 0] = True
    assert words_of(seen)[0, 0] == -1
    assert torch.equal((words_of(seen)[..., None] >> torch.arange(64)) & 1 != 0, seen)
    assert words_of(torch.tensor([True, False, True])) == 5


@pytest.mark.parametrize("lengths", [[40], [70, 33, 41], [7, 20]])
@pytest.mark.parametrize("nodes", [1, 6, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_seen_is_what_masks_show(kind: LayerKind, nodes: int, lengths: list[int]) -> None:
    slots = 150
    given = tree_over(lengths, nodes, slots)
    mask = bucket_masks(layout_of(kind), *given)["layer"]
    query, key = draw(len(lengths), 4, nodes, 8), draw(len(lengths), 2, slots, 8, seed=1)
    value = draw(len(lengths), 2, slots, 6, seed=2)
    context = DeviceContext(visible_in_tree(layout_of(kind), *given))
    with attending(context):
        found, _ = layer_attention(torch.nn.Module(), query, key, value, context.masks["layer"], scaling=0.4)
    scores = query @ key.repeat_interleave(2, 1).transpose(-1, -2) * 0.4
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    wanted = (weights @ value.repeat_interleave(2, 1)).transpose(1, 2)
    assert found.is_contiguous()
    torch.testing.assert_close(found, wanted)
    with pytest.raises(RuntimeError, match="size"):  # whatever else uses the mask
        torch.nn.functional.scaled_dot_product_attention(
            query, key.repeat_interleave(2, 1), value.repeat_interleave(2, 1), attn_mask=context.masks["layer"]
        )


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter")
def test_the_kernels_in_an_interpreter() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        __file__,
        "-k",
        "kernels or correct_kernel",
    ]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    root = Path(__file__).parents[1]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert done.stdout.split()[0].count("s") == 1, "this test alone is skipped"


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernels as on a device; the interpreter multiplies bfloat16 as integers (Triton 3.9), which is mended."""
    from triton.language import bfloat16, float32
    from triton.runtime.interpreter import InterpreterBuilder

    multiply = InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        a, b = (self.cast_impl(side, float32) if side.dtype == bfloat16 else side for side in (a, b))
        return multiply(self, a, b, *others)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
    monkeypatch.setattr(device_attention, "calls_kernel_directly", lambda _device: True)
    monkeypatch.setattr(device_attention, "multiprocessors", lambda _device: 12)
    device_attention._works.cache_clear()
    yield
    device_attention._works.cache_clear()


def compare(
    kind: LayerKind, heads: tuple[int, int], nodes: int, dims: tuple[int, int], dtype: torch.dtype,
    lengths: list[int], processors: int, softcap: float = 0.0, sinks: bool = False,
) -> None:  # fmt: skip
    """Compare with the exact attention; what a row must not read, and need not with a window, is no number."""
    (shared, groups), batch = heads, len(lengths)
    slots = max(lengths) + nodes + 17
    visible = visible_in_tree(layout_of(kind), *tree_over(lengths, nodes, slots))["layer"]
    query = draw(batch, nodes, shared * groups, dims[0], dtype=dtype).transpose(1, 2)
    key, value = (draw(batch, shared, slots, dim, seed=dim, dtype=dtype) for dim in dims)
    given = visible, dims[0] ** -0.5, softcap, draw(shared * groups, seed=5) if sinks else None
    wanted = attend_exactly(query.float(), key.float(), value.float(), *given)
    for row, length in enumerate(lengths):
        for states in (key, value):
            states[row, :, length : max(lengths)] = torch.nan
            states[row, :, max(lengths) + nodes :] = torch.nan
            if kind == "sliding":
                states[row, :, : max(length - SIZE + 1, 0)] = torch.nan
    found = attend_in_parts(query, key, value, *given, processors)
    assert found.dtype == dtype
    assert found.is_contiguous()
    torch.testing.assert_close(found.float(), wanted, atol=FAR[dtype], rtol=FAR[dtype])


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize(("capability", "dtype", "dims", "window", "chunk", "capped"), [
    (80, torch.bfloat16, (128, 128), 0, 0, False), (90, torch.bfloat16, (80, 80), 0, 64, False),
    (89, torch.float16, (256, 256), 64, 0, True), (80, torch.float32, (128, 128), 0, 0, False),
    (90, torch.bfloat16, (576, 512), 0, 0, False),
])  # fmt: skip
def test_the_kernel_compiles_for_gpus(
    capability: int, dtype: torch.dtype, dims: tuple[int, int], window: int, chunk: int, capped: bool,
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    """As it is launched, without a GPU; a block's shared memory fits in that of consumer cards."""
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    backends = pytest.importorskip("triton.backends.compiler")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    launches: list[tuple[Any, dict[str, Any]]] = []

    class Launched:
        def __getitem__(self, _grid: Any) -> Any:
            return lambda *args, **options: launches.append((args, options))

    recorded = SimpleNamespace(attend_to_parts=Launched(), merge_parts=Launched())
    monkeypatch.setattr(device_attention, "_kernels", lambda: recorded)
    visible = replace(
        visible_in_tree(layout_of("full"), *tree_over([200], 32, 300))["layer"], window=window, chunk=chunk
    )
    query, key, value = (draw(1, 2, 300, dim, dtype=dtype) for dim in (dims[0], *dims))
    attend_in_parts(query[:, :, :32], key, value, visible, 0.3, 30.0 if capped else 0.0, query[0, :, 0, 0], 132)
    monkeypatch.undo()
    from hf_specdec.verification import triton_attention

    for kernel, (args, options) in zip(
        (triton_attention.attend_to_parts, triton_attention.merge_parts), launches, strict=True
    ):
        names = kernel.arg_names
        kinds = {float: "fp32", int: "i32"}
        pointers = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int64: "i64",
                    torch.uint8: "u8"}  # fmt: skip
        given = {
            name: f"*{pointers[arg.dtype]}" if isinstance(arg, Tensor) else kinds[type(arg)]
            for name, arg in zip(names, args, strict=False)
        }
        constants = {name: options[name] for name in names if name in options}
        signature = {name: given.get(name, "constexpr") for name in names}
        source = triton.compiler.ASTSource(kernel, signature, {(names.index(n),): v for n, v in constants.items()})
        settings = {name: value for name, value in options.items() if name not in names}
        made = triton.compile(source, target=backends.GPUTarget("cuda", capability, 32), options=settings)
        assert made.metadata.shared <= 99 * 1024
        assert "mma" in made.asm["ptx"] or dtype == torch.float32 or kernel is triton_attention.merge_parts


@in_interpreter
@pytest.mark.parametrize(("heads", "nodes", "dims", "dtype", "processors"), [
    ((2, 4), 1, (64, 64), torch.bfloat16, 40), ((1, 8), 7, (80, 80), torch.float16, 2),
    ((2, 2), 33, (96, 64), torch.float32, 8), ((1, 1), 64, (24, 24), torch.float32, 20),
    ((1, 3), 5, (576, 512), torch.bfloat16, 12), ((1, 2), 64, (128, 128), torch.float16, 1),
])  # fmt: skip
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("interpreter")
def test_kernels_of_every_kind_of_layer(
    kind: LayerKind, heads: tuple[int, int], nodes: int, dims: tuple[int, int], dtype: torch.dtype, processors: int
) -> None:
    compare(kind, heads, nodes, dims, dtype, [230, 139], processors)


@in_interpreter
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("softcap", "sinks"), [(1.5, False), (0.0, True), (1.5, True)])
@pytest.mark.usefixtures("interpreter")
def test_kernels_with_bounded_scores_and_sinks(kind: LayerKind, softcap: float, sinks: bool) -> None:
    compare(kind, (2, 2), 9, (16, 16), torch.float32, [200], 12, softcap, sinks)
    compare(kind, (1, 4), 9, (16, 16), torch.bfloat16, [60, 140], 12, softcap, sinks)


@in_interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("interpreter")
def test_kernels_that_split_keys_at_fixed_places_give_the_same_bits(
    kind: LayerKind, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node of a chain, and the step of plain decoding at its place, over memory of other sizes; padded alike.

    On some processors NumPy's matrix product rounds a row by its place in the matrix, which a GPU's does not.
    """
    multiply = np.matmul

    def in_float64(a: Any, b: Any, dtype: Any) -> Any:
        return multiply(a, b, dtype=np.float64).astype(dtype)

    monkeypatch.setattr(np, "matmul", in_float64)
    query, key, value = (draw(1, heads, 900, 16, seed=heads, dtype=dtype) for heads in (6, 2, 2))
    valid, left = torch.arange(900)[None] > 2, torch.tensor([3])
    chain, differ = torch.arange(8)[None] - 1, False

    def attend(parents: Tensor, length: int, slots: int, *, fixed: bool) -> Tensor:
        ancestors = TokenTree(parents, parents).ancestor_mask()
        places = torch.tensor([length]), length + torch.arange(8), valid[:, :slots], left
        visible = visible_in_tree(layout_of(kind), ancestors, *places, fixed=fixed)["layer"]
        queries = query[:, :, length : length + 8]
        return attend_in_parts(queries, key[:, :, :slots], value[:, :, :slots], visible, 0.25, 0.0, None, 12)[0]

    for length in (9, 60, 123, 250, 387):
        found = attend(chain, length, 400, fixed=True)
        others = attend(chain, length, 400, fixed=False)
        for node in range(8):
            plain, slots = torch.full((1, 8), -1), (400, 900)[node % 2]
            assert torch.equal(attend(plain, length + node, slots, fixed=True)[0], found[node]), (length, node)
            differ |= not torch.equal(attend(plain, length + node, slots, fixed=False)[0], others[node])
    assert differ or dtype == torch.bfloat16, "this test could not fail"


@in_interpreter
@pytest.mark.parametrize("length", [1, 15, 63, 64, 65, 127, 128, 129, 255, 256, 257])
@pytest.mark.usefixtures("interpreter")
def test_kernels_across_the_boundaries_of_tiles_and_parts(length: int) -> None:
    for nodes in (1, 2):
        compare("full", (1, 2), nodes, (16, 16), torch.float32, [length], 12)
        compare("sliding", (1, 2), nodes, (16, 16), torch.float32, [max(length - 60, 1), length], 12)


@in_interpreter
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("kind", KINDS)
def test_a_correct_kernel_is_used_and_a_wrong_one_is_not(
    kind: LayerKind, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = [KeyValueBuffer(1, 8, (draw(1, 2, 1, 16), draw(1, 2, 1, 24)), 1, is_persistent=True)]
    assert kernel_error(CPU, torch.float32, 16, 24, kind) < 1e-5
    assert needs_no_masks(memory, [kind])
    device_attention._works.cache_clear()
    with monkeypatch.context() as patch, caplog.at_level(logging.INFO):
        patch.setenv(VARIABLE, "none")
        assert not needs_no_masks(memory, [kind])
    assert f"{VARIABLE} is 'none'" in caplog.text
    device_attention._works.cache_clear()
    double = [KeyValueBuffer(1, 8, (draw(1, 2, 1, 16).double(),) * 2, 1, is_persistent=True)]
    with caplog.at_level(logging.INFO):
        assert not needs_no_masks(double, [kind])
    assert "does not support this dtype" in caplog.text
    device_attention._works.cache_clear()
    monkeypatch.setattr(VisibleKeys, "attend", lambda _keys, query, _key, value: value.new_zeros(2, 6, 4, 24))
    with caplog.at_level(logging.INFO):
        assert not needs_no_masks(memory, [kind])
    assert f"Graphs attend with masks in {kind} layers" in caplog.text
    assert "the error of the Triton kernel is" in caplog.text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or INTERPRETED, reason="needs a CUDA device")
@pytest.mark.parametrize("dims", [(64, 64), (80, 80), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("dtype", list(KERNEL_TOLERANCE))
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_is_correct_on_a_gpu(kind: LayerKind, dtype: torch.dtype, dims: tuple[int, int]) -> None:
    assert kernel_error(torch.device("cuda", 0), dtype, *dims, kind) <= KERNEL_TOLERANCE[dtype]


def test_no_kernel_without_a_device_for_it_or_without_triton(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = [KeyValueBuffer(1, 8, (draw(1, 2, 1, 16), draw(1, 2, 1, 24)), 1, is_persistent=True)]
    assert not needs_no_masks(memory, ["full"])
    monkeypatch.setattr(device_attention, "calls_kernel_directly", lambda _device: True)
    monkeypatch.setattr(device_attention, "multiprocessors", lambda _device: 12)
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "hf_specdec.verification.triton_attention", raising=False)
    for cached in (device_attention._works, device_attention._kernels):
        cached.cache_clear()
    with caplog.at_level(logging.INFO):
        assert not needs_no_masks(memory, ["full"])
    assert "ModuleNotFoundError" in caplog.text
    assert "triton" in caplog.text
    for cached in (device_attention._works, device_attention._kernels):
        cached.cache_clear()
