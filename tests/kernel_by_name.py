"""Attention written out in place of the kernel of NVIDIA GPUs, which refuses what that one refuses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from hf_specdec.verification import tree_attention
from hf_specdec.verification.tree_attention import exact_attention

calls: list[int] = []
"""Rows of the batch in every call of the kernel: parts, where there are several."""


def aligned(tensor: Tensor) -> bool:
    return tensor.stride(-1) == 1 and not any(
        number % 8 for number in (tensor.storage_offset(), *tensor.stride()[:-1])
    )


def strict_kernel(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    """What the kernel computes: products in float32, zeros and minus infinity for a row that sees nothing."""
    assert all(map(aligned, (query, key, value)))
    assert query.dtype == key.dtype == value.dtype
    assert len(query) == len(key) == len(value)
    for tensor in (key, value):
        assert not any(size > 1 and step == 0 for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    if mask is not None:
        assert aligned(mask)
        assert mask.dtype == query.dtype
        mask = mask.expand(*query.shape[:3], key.shape[2]).float()
    calls.append(len(query))
    output, sums = exact_attention(query.float(), key.float(), value.float(), mask, scale)
    return output.nan_to_num(0.0).to(query.dtype), sums


@pytest.fixture
def by_name(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernel is called by name, on a device with 132 multiprocessors."""
    calls.clear()
    monkeypatch.setattr(tree_attention, "calls_kernel_directly", lambda _device: True)
    monkeypatch.setattr(tree_attention, "multiprocessors", lambda _device: 132)
    monkeypatch.setattr(tree_attention, "efficient_attention", strict_kernel)
    tree_attention.works.cache_clear()
    yield
    tree_attention.works.cache_clear()


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tree_seen(kind: str, batch: int, nodes: int, keys: int) -> Tensor:
    """Which keys the nodes of a chain see: all before it, a window of those, none of the middle, or all there are."""
    place, node = torch.arange(keys), torch.arange(nodes)[:, None] + keys - nodes
    seen = place <= node
    if kind == "sliding":
        seen = seen & (node - place < 60)
    if kind == "hole":
        seen = seen & ~((place > 3) & (place < keys - nodes - 5))
    seen = seen.expand(batch, 1, nodes, keys).clone()
    if kind != "sliding":
        seen[1:, :, :, : keys // 3] = False  # padding of further rows
    return seen
