"""Fuzz of the CPU kernels' bits: a node's attention, and a row's product, are those of the token alone.

As a script: `python tests/exact_kernels.py --cases 2000 --sets avx2 avx512`.
"""

from __future__ import annotations

import argparse
import os
import random as numbers
import subprocess
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from hf_specdec.cpu import library, operations

SIZES = (16, 20, 64, 72, 80, 96, 128)
"""Head sizes: whole steps of the kernels, and others."""


def parents_of(kind: str, nodes: int, dice: numbers.Random) -> list[int]:
    """Return the parents of a tree, each before its children."""
    if kind == "chain":
        return [*range(-1, nodes - 1)]
    lowest = {"wide": lambda node: 0, "deep": lambda node: max(0, node - 3)}.get(kind, lambda node: 0)
    highest = {"wide": lambda node: min(node, 4)}.get(kind, lambda node: node)
    return [-1, *(dice.randrange(lowest(node), max(highest(node), lowest(node) + 1)) for node in range(1, nodes))]


def paths_of(parents: Sequence[int]) -> list[list[int]]:
    """Return each node's ancestors and itself, in order."""
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), node])
    return paths


def differing_nodes(seed: int) -> tuple[int, int]:
    """Attend from a random tree in a random batch, and from each node's path alone, by one thread.

    Returns how many nodes differ, and how many there are.
    """
    dice = numbers.Random(seed)
    torch.manual_seed(seed)
    dtype = dice.choice([torch.bfloat16, torch.float32])
    shared, group = dice.randint(1, 3), dice.randint(1, 7)
    dim, value_dim = dice.choice(SIZES), dice.choice(SIZES)
    kind, rows = dice.choice(["chain", "wide", "deep", "random"]), dice.randint(1, 3)
    nodes = dice.randint(1, 70 if dice.random() < 0.1 else 32)
    near = [dice.choice([128, 256, 512]) + dice.randint(-3, 3) for _ in range(rows)]  # ends of chunks
    lengths = [dice.choice([one, dice.randint(1, 600)]) for one in near]
    left = [dice.choice([0, 0, dice.randint(0, length - 1)]) for length in lengths]
    window = dice.choice([None, None, dice.randint(3, 200)])
    start, parents = max(lengths), parents_of(kind, nodes, dice)
    paths = paths_of(parents)
    if dice.random() < 0.2 and kind == "chain":
        lengths = [start] * rows  # nodes follow the committed slots: a prompt, or a draft
        left = [min(one, start - 1) for one in left]

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape).to(dtype)

    query, key = random(rows, shared * group, nodes, dim), random(rows, shared, nodes, dim)
    value = random(rows, shared, nodes, value_dim)
    keys, values = random(rows, shared, start + nodes + 5, dim), random(rows, shared, start + nodes + 5, value_dim)
    mask = torch.zeros(rows, 1, nodes, start + nodes, dtype=torch.bool)
    order = torch.zeros(rows, 2 + nodes, dtype=torch.long)
    for row in range(rows):
        order[row] = torch.tensor([left[row], lengths[row], *(len(path) - 1 for path in paths)])
        for node, path in enumerate(paths):
            position = lengths[row] + len(path) - 1
            first = left[row] if window is None else max(left[row], position - window + 1)
            mask[row, 0, node, first : lengths[row]] = True
            for depth, one in enumerate(path):
                mask[row, 0, node, start + one] = lengths[row] + depth >= first
    given = keys.clone(), values.clone()
    is_chain = kind == "chain" and set(lengths) == {start}
    chain = is_chain and dice.random() < 0.7
    if chain:
        order = order[:, :1].contiguous()
    found = operations.attend(
        query, key, value, *given, start, None if chain and window is None else mask, None, order
    )  # fmt: skip
    differing, threads = 0, torch.get_num_threads()
    torch.set_num_threads(1)
    for row in range(rows):
        for node, path in enumerate(paths):
            size = lengths[row] - left[row] + len(path)  # the row alone, unpadded, one token
            alone = [torch.cat([old[row : row + 1, :, left[row] : lengths[row]], new[row : row + 1, :, path]], 2)
                     for old, new in ((keys, key), (values, value))]  # fmt: skip
            seen = torch.arange(size) > size - 1 - (window or size)
            one = operations.attend(
                query[row : row + 1, :, node : node + 1], alone[0][:, :, -1:].clone(), alone[1][:, :, -1:].clone(),
                *alone, size - 1, None if window is None else seen[None, None, None], None,
            )  # fmt: skip
            differing += not torch.equal(one[0, 0], found[row, node])
    torch.set_num_threads(threads)
    return differing, rows * nodes


def differing_products(seed: int) -> tuple[int, int]:
    """Multiply random rows; return how many rows differ from the product of the row alone, and how many there are."""
    dice = numbers.Random(seed)
    torch.manual_seed(seed)
    dtype, k = (
        dice.choice([torch.bfloat16, torch.float32]),
        dice.choice([1, 33, 64, 576, 1000, 1536, 2051, 4864]),
    )
    count, rows = dice.randint(1, 3), dice.choice([*range(1, 40), 64, 97, 130, 257])
    sizes, activation = [dice.choice([3, 8, 40, 64, 97, 200, 333]) for _ in range(count)], 0
    if dice.random() < 0.4:
        sizes, activation = sizes[:1] * 2, dice.choice([operations.SILU, operations.GELU_TANH])
    weights = [(torch.randn(size, k) / k**0.5).to(dtype) for size in sizes]
    biases = [torch.randn(size).to(dtype) if dice.random() < 0.5 else None for size in sizes]
    x = torch.randn(rows, k).to(dtype)
    total = sizes[0] if activation else sum(sizes)
    residual = torch.randn(rows, total).to(dtype) if not activation and dice.random() < 0.5 else None
    together = operations.linear(x, weights, biases, activation, residual)
    alone = [
        operations.linear(x[row], weights, biases, activation, None if residual is None else residual[row])
        for row in range(rows)
    ]
    norm = torch.randn(k).to(dtype)
    normed = operations.rms_norm(x, norm, 1e-5, True)
    alone_normed = [operations.rms_norm(one, norm, 1e-5, True) for one in x]
    differing = [
        not torch.equal(together[row], alone[row]) or not torch.equal(normed[row], alone_normed[row])
        for row in range(rows)
    ]
    return sum(differing), rows


def differences(cases: int, first: int = 0) -> tuple[int, int, int]:
    """Return differing rows and nodes, all of them, and cases in which one differs."""
    differing, total, wrong = 0, 0, 0
    for seed in range(first, first + cases):
        for check in (differing_nodes, differing_products) if seed % 4 == 0 else (differing_nodes,):
            found, count = check(seed)
            differing, total, wrong = differing + found, total + count, wrong + (found > 0)
    return differing, total, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--sets", nargs="*", default=[])
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    for name in options.sets:  # in a process of its own: a library is loaded once
        command = [sys.executable, __file__, "--cases", str(options.cases), "--threads", str(options.threads)]
        subprocess.run(command, env={**os.environ, library.VARIABLE: name}, check=True)
    if not options.sets:
        torch.set_num_threads(options.threads)
        differing, total, wrong = differences(options.cases)
        name = library.load_library()[0].name
        print(
            f"{name}: {options.cases} cases, {total} nodes and rows: {differing} differ, in {wrong} cases", flush=True
        )


if __name__ == "__main__":
    main()
