"""The CPU kernels of recurrent layers: like `recurrence.py`, with each node's bits, and in whole models."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import drafters
import zoo
from hf_specdec.cpu import library, operations
from hf_specdec.trees.tree import TokenTree
from hf_specdec.verification import recurrence
from hf_specdec.verification.recurrence import FORMS, Branches, Updates
from models import judged
from test_cpu_kernels import dtype

__all__ = ["dtype"]

TREES = {"one": (1, 1), "chain": (1, 48), "wide": (12, 20), "deep": (3, 64)}
"""Among how many nodes before it a node finds its parent (roots as well), and the number of nodes."""
SIZES = [(1, 4, 2, 128, 128), (2, 4, 1, 80, 20), (3, 2, 2, 8, 13)]
"""Rows, heads, groups, sizes of keys and values."""
CLOSE = {torch.float32: 5e-6, torch.bfloat16: 1e-2}
"""Largest error of an output relative to the largest output: bfloat16 is rounded once."""


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float32, device="cpu")


def random_tree(shape: str, rows: int) -> Branches:
    back, size = TREES[shape]
    parents = torch.full((rows, size), -1, device="cpu")
    for row, node in itertools.product(range(rows), range(1, size)):
        parents[row, node] = max(-1, node - int(torch.randint(1, back + 1, (), device="cpu")))
    return Branches.of(TokenTree(torch.zeros_like(parents), parents))


def to_root(branches: Branches, row: int, node: int) -> list[int]:
    path, parents = [node], branches.parents[row % len(branches.parents)].tolist()
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def random_path(branches: Branches, rows: int) -> Tensor:
    """The path to some node in each row, except that the second row keeps nothing."""
    size = branches.parents.shape[1]
    path = torch.full((rows, size), -1, device="cpu")
    for row in range(rows):
        nodes = to_root(branches, row, size - 1 - row)[: size - 2 * row] if size > 1 else [0]
        if row != 1:
            path[row, : len(nodes)] = torch.tensor(nodes, device="cpu")
    return path


def random_inputs(kind: str, sizes: tuple[int, ...], nodes: int, dtype: torch.dtype, decay: float) -> list[Any]:
    """Inputs as mixers make them: parts of larger tensors. One token in three repeats another."""
    rows, heads, groups, keys, values = sizes
    key, query = draw(rows, nodes, 2, groups, keys).mul(keys**-0.5).to(dtype).unbind(2)
    key[:, ::3] = key[:, :1].clone()
    step = draw(rows, nodes, heads, 2).to(dtype)[..., 0]
    if kind == "mamba1":
        wide = draw(rows, nodes, heads, 3).to(dtype).transpose(1, 2)
        rate = -decay * torch.rand(heads, keys, device="cpu")
        key, query = (part[:, :, 0].transpose(1, 2) for part in (key, query))
        return [
            wide[..., 0],
            wide[..., 1],
            rate,
            key,
            query,
            draw(heads).to(dtype),
            wide[..., 2],
            draw(heads).to(dtype),
        ]
    value = draw(rows, nodes, heads, values + 1).to(dtype)[..., 1:]
    if kind == "mamba2":
        rate = -decay * torch.rand(heads, device="cpu")
        return [value, step, rate, key, query, draw(heads).to(dtype), draw(heads).to(dtype)]
    shape = (rows, nodes, heads, keys) if kind == "kda" else (rows, nodes, heads)
    return [query, key, value, -decay * torch.rand(*shape, device="cpu"), step.sigmoid()]


def random_state(kind: str, sizes: tuple[int, ...]) -> Tensor:
    rows, heads, _, keys, values = sizes
    if kind == "mamba1":
        return draw(rows, heads, keys)[..., None]
    return draw(rows, heads, values, keys).transpose(-1, -2) if kind == "mamba2" else draw(rows, heads, keys, values)


def form_of(kind: str) -> str:
    return "delta_rule" if kind == "kda" else kind


def assert_close(found: Tensor, expected: Tensor, at_most: float = CLOSE[torch.float32]) -> None:
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    found, expected = found.double(), expected.double()
    assert float((found - expected).abs().max()) <= at_most * float(expected.abs().max())


@pytest.mark.parametrize("decay", [0.05, 40])
@pytest.mark.parametrize("shape", TREES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("kind", ["delta_rule", "kda", "mamba2", "mamba1"])
def test_states_and_outputs_are_those_of_torch(
    dtype: torch.dtype, kind: str, sizes: tuple[int, ...], shape: str, decay: float
) -> None:
    form, rows, nodes = form_of(kind), sizes[0], TREES[shape][1]
    found_state, inputs, entered = random_state(kind, sizes), random_inputs(kind, sizes, nodes, dtype, decay), None
    state = found_state.clone(memory_format=torch.preserve_format)
    for step in range(3):
        branches, flag = random_tree(shape, 1 if step == 2 else rows), step < 2 or kind.startswith("mamba")
        changed = random_inputs(kind, sizes, nodes, dtype, decay)
        if kind == "mamba1":
            changed[2] = inputs[2]  # the rate is a parameter
        assert operations.can_recur(form, changed, found_state)
        found, parts = operations.recur_tree(form, changed, flag, found_state, branches.parents, entered)
        if entered is not None:
            state.copy_(recurrence.advance(state, entered[1].first(rows), entered[0]))
        expected, updates = FORMS[form](changed, flag, state, branches, None)
        assert_close(found, expected, CLOSE[dtype])
        for one, other in zip(parts, (updates.decay, updates.keys, updates.values, updates.rate), strict=False):
            assert_close(one, other)
        assert_close(found_state, state)
        entered = random_path(branches, rows), Updates(*[_with_more(part, rows) for part in parts])


def _with_more(part: Tensor, rows: int) -> Tensor:
    """Kept memory has more rows and nodes than a tree; rates [H, Dk] are parameters."""
    if len(part) != rows or part.dim() < 3:
        return part
    more = part.new_full((rows + 1, part.shape[1], part.shape[2] + 3, *part.shape[3:]), torch.nan)
    more[:rows, :, : part.shape[2]] = part
    return more


@pytest.mark.parametrize("kind", ["delta_rule", "kda", "mamba2", "mamba1"])
def test_a_node_has_the_bits_that_it_has_alone(dtype: torch.dtype, kind: str) -> None:
    """Each path as a chain in one row, with one thread; states are those after an accepted path."""
    sizes, shape = (2, 3, 3, 36, 40), "wide"
    inputs, state, nodes = random_inputs(kind, sizes, 20, dtype, 1), random_state(kind, sizes), TREES[shape][1]
    first, branches = random_tree(shape, 2), random_tree(shape, 2)
    path, dim = torch.full((2, 20), -1, device="cpu"), 2 if kind == "mamba1" else 1
    path[:, :2] = torch.tensor([0, 1], device="cpu")
    _, parts = operations.recur_tree(form_of(kind), inputs, True, state, first.parents, None)
    before = state.clone(memory_format=torch.preserve_format)
    found, _ = operations.recur_tree(form_of(kind), inputs, True, state, branches.parents, (path, Updates(*parts)))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for row, node in itertools.product(range(2), range(nodes)):
        chosen = to_root(branches, row, node)
        given = [
            part if part.dim() < 3 else part[row : row + 1].index_select(dim, torch.tensor(chosen)) for part in inputs
        ]
        known = [part[row : row + 1] if part.dim() > 2 else part for part in parts]
        own = before[row : row + 1].clone(memory_format=torch.preserve_format)
        chain, entered = torch.arange(-1, len(chosen) - 1, device="cpu")[None], (path[row : row + 1], Updates(*known))
        alone, _ = operations.recur_tree(form_of(kind), given, True, own, chain, entered)
        assert torch.equal(alone.select(dim, -1)[0], found.select(dim, node)[row])
        assert torch.equal(own[0], state[row])
    torch.set_num_threads(threads)


@pytest.mark.parametrize("kept", [0, 1])
@pytest.mark.parametrize("size", [2, 3, 4, 7])
@pytest.mark.parametrize("shape", ["one", "wide"])
@pytest.mark.parametrize(("rows", "channels", "apart"), [(1, 40, False), (3, 33, False), (2, 128, True)])
def test_convolutions_are_those_of_torch(
    dtype: torch.dtype, rows: int, channels: int, apart: bool, shape: str, size: int, kept: int
) -> None:
    activation, nodes = "silu" if kept else None, TREES[shape][1]
    weight, bias = draw(channels, size).to(dtype), draw(channels).to(dtype) if rows < 3 else None
    found_window, entered = draw(rows, channels, size - kept).to(dtype), None
    window = found_window.clone()
    for step in range(3):
        branches = random_tree(shape, 1 if step == 2 else rows)
        inputs = draw(rows, channels, nodes) if apart else draw(rows, nodes, channels).transpose(1, 2)
        inputs = inputs.to(dtype)
        assert operations.can_convolve(inputs, found_window, weight, bias, activation)
        found = operations.convolve_tree(inputs, found_window, weight, bias, activation, branches.parents, entered)
        if entered is not None:
            window = recurrence.advance_window(window, entered[1][:rows], entered[0])
        expected = recurrence.convolve(inputs, window, weight, bias, activation, branches)
        assert torch.equal(found_window, window)
        assert_close(found, expected, CLOSE[dtype])
        for node in (0, nodes - 1):
            path = to_root(branches, 0, node)
            chain = torch.arange(-1, len(path) - 1, device="cpu")[None]
            given = inputs[:1, :, path], window[:1].contiguous(), weight, bias, activation, chain, None
            assert torch.equal(operations.convolve_tree(*given)[0, :, -1], found[0, :, node])
        entered = random_path(branches, rows), _with_more(inputs, rows)


def test_what_kernels_do_not_support_is_left_to_torch(dtype: torch.dtype) -> None:
    weight, window, inputs = draw(8, 4).to(dtype), draw(1, 8, 4).to(dtype), draw(1, 8, 3).to(dtype)
    bias, other = draw(8).to(dtype), torch.float32 if dtype == torch.bfloat16 else torch.bfloat16
    supported = inputs, window, weight, bias, "silu"
    assert operations.can_convolve(*supported)
    for place, instead in (
        (0, inputs.half()), (0, inputs.to("meta")), (1, window.to(other)), (1, window[..., :2]), (2, weight.t()),
        (2, weight.to(other)), (3, bias.to(other)), (4, "gelu"),
    ):  # fmt: skip
        assert not operations.can_convolve(*supported[:place], instead, *supported[place + 1 :])
    inputs, state = random_inputs("delta_rule", SIZES[1], 3, dtype, 1), random_state("delta_rule", SIZES[1])
    assert operations.can_recur("delta_rule", inputs, state)
    assert not operations.can_recur("delta_rule", inputs, state.bfloat16())
    assert not operations.can_recur("delta_rule", inputs, state.transpose(0, 1))
    for place in range(5):
        for instead in (inputs[place].double(), inputs[place].to("meta")):
            assert not operations.can_recur("delta_rule", [*inputs[:place], instead, *inputs[place + 1 :]], state)


NAMES = ("qwen3_next", "qwen3_5_text", "kimi_linear", "bamba", "falcon_h1", "lfm2", "mamba", "zamba")


@pytest.mark.parametrize("name", NAMES)
def test_models_give_the_ids_of_plain_generate(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library.load_library()
    counts = dict.fromkeys(("convolve_tree", "recur_tree"), 0)

    def counted(operation: str) -> Any:
        run = getattr(operations, operation)

        def call(*args: Any) -> Any:
            counts[operation] += 1
            return run(*args)

        return call

    for operation in counts:
        monkeypatch.setattr(operations, operation, counted(operation))
    assert judged(name, zoo.build(name), drafters.ROWS[:4]).outcome == "tree"
    assert (counts["convolve_tree"] > 0, counts["recur_tree"] > 0) == (True, name != "lfm2")
