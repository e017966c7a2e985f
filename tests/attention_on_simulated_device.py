"""Attention by the kernel that is called by name, captured and replayed; run by `test_simulated_device.py`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_specdec.verification import tree_attention
from hf_specdec.verification.graph_backends import CapturableOnly
from hf_specdec.verification.tree_attention import AttentionContext
from kernel_by_name import by_name, draw, tree_seen
from simulated_device import SIM, Graph, SimTensor, reads, simulation

__all__ = ["by_name"]


@pytest.mark.parametrize("keys", [300, 1536, 1537])
def test_it_can_be_captured_after_one_trial(keys: int, by_name: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial waits for the device once; then masks and parts follow from sizes alone."""
    first, then = (
        (draw(1, 4, 6, 8, seed=seed), draw(1, 2, keys, 8, seed=seed + 1), tree_seen(kind, 1, 6, keys))
        for seed, kind in ((0, "full"), (2, "hole"))
    )

    def attend(query: Tensor, cache: Tensor, seen: Tensor) -> Tensor:
        return AttentionContext({"full_attention": seen}).attend("full_attention", query, cache, cache, None)

    with simulation():
        buffers = [tensor.to(SIM) for tensor in first]
        attend(*buffers)
        assert reads
        reads.clear()
        with CapturableOnly():
            attend(*buffers)
        graph = Graph()
        with graph.capture():
            found = attend(*buffers)
        for buffer, tensor in zip(buffers, then, strict=True):
            buffer.copy_(tensor.to(SIM))
        graph.replay()
        assert not reads
    monkeypatch.setattr(tree_attention, "calls_kernel_directly", lambda _device: False)
    assert isinstance(found, SimTensor)
    torch.testing.assert_close(found.raw, attend(*then), atol=1e-5, rtol=0)
