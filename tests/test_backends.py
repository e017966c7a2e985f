"""What differs between backends is found by asking them: generators, pinned memory, the order of ties in a sort."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_specdec.acceptance.transcript import generator_of
from hf_specdec.host_sync import can_pin, upload
from hf_specdec.trees import growth
from hf_specdec.trees.draft import Budget
from hf_specdec.trees.growth import Level, _best, _best_of_ties, grow_dynamic

# ------------------------------------------------------------------------------------------------- generators


@pytest.mark.parametrize(("name", "module", "found"), [
    ("cuda:1", SimpleNamespace(default_generators=["first", "second"]), "second"),
    ("xpu", SimpleNamespace(default_generators=["first", "second"], current_device=lambda: 1), "second"),
    ("mps", SimpleNamespace(_get_default_mps_generator=lambda: "the only"), "the only"),
    ("mps", SimpleNamespace(default_generators=(), _get_default_mps_generator=lambda: "the only"), "the only"),
    ("mps", SimpleNamespace(), None),
    ("cuda", SimpleNamespace(default_generators=()), None),  # no device has been used yet
    ("cpu", None, torch.default_generator),
])  # fmt: skip
def test_the_generator_of_a_backend(name: str, module: Any, found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda _device: module)
    assert generator_of(torch.device(name)) == found
    assert callable(torch.mps._get_default_mps_generator)


# ------------------------------------------------------------------------------------------------- pinned memory


@pytest.fixture
def tries(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Every try to pin memory, which works as long as the list is not empty, which it is at first."""
    works: list[bool] = [True]

    def pin(tensor: Tensor) -> Tensor:
        works.append(True)
        if works[0]:
            return tensor
        raise RuntimeError("Need to provide pin_memory allocator to use pin memory.")

    monkeypatch.setattr(Tensor, "pin_memory", pin)
    can_pin.cache_clear()
    yield works
    can_pin.cache_clear()


def test_whether_memory_can_be_pinned_is_tried_once_per_backend(tries: list[bool]) -> None:
    assert [can_pin("xpu"), can_pin("xpu"), can_pin("hpu")] == [True, True, True]
    assert len(tries) == 1 + 2
    tries[0] = False
    assert [can_pin("npu"), can_pin("npu"), can_pin("xpu")] == [False, False, True]
    assert len(tries) == 1 + 3


def test_memory_that_is_pinned_elsewhere_or_reused_at_once_is_not_used(
    tries: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert upload([3], torch.long, torch.device("cpu")).tolist() == [3]
    assert len(tries) == 1
    assert not can_pin("cpu")
    assert not can_pin("mps")
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor.to("meta"))  # MPS gave a tensor of the device
    assert not can_pin("xpu")


@pytest.mark.parametrize("works", [True, False])
def test_what_is_uploaded_waits_only_where_memory_cannot_be_pinned(
    works: bool, tries: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    tries[0] = works
    copies: list[dict[str, Any]] = []
    move = Tensor.to
    monkeypatch.setattr(Tensor, "to", lambda tensor, *args, **kwargs: (copies.append(kwargs), move(tensor, *args))[1])
    made = upload([[1, 2]], torch.long, torch.device("meta"))
    assert made.shape == (1, 2)
    assert copies == [{"non_blocking": True} if works else {}]


# ------------------------------------------------------------------------------------------------- ties


def draw_scores(generator: torch.Generator, batch: int, size: int, levels: int) -> Tensor:
    scores = -torch.randint(0, levels, (batch, size), generator=generator).float() / 4
    scores[torch.rand(batch, size, generator=generator) < 0.1] = -torch.inf
    return scores


@pytest.mark.parametrize("levels", [1, 2, 9, 1000])
def test_the_best_are_the_same_without_a_stable_sort(levels: int) -> None:
    generator = torch.Generator().manual_seed(levels)
    for size in range(1, 40):
        scores = draw_scores(generator, 3, size, levels)
        for count in {0, 1, size // 2, size}:
            wanted = scores.sort(dim=-1, descending=True, stable=True).indices[:, :count].sort(dim=-1).values
            assert torch.equal(_best(scores, count), wanted)
            assert torch.equal(_best_of_ties(scores, count), wanted)


def test_candidates_that_are_no_numbers_still_have_places() -> None:
    scores = torch.tensor([[torch.nan, -1.0, torch.nan, -2.0], [torch.nan] * 4])
    places = _best_of_ties(scores, 3)
    assert ((places >= 0) & (places < 4)).all()
    assert (places.diff() > 0).all()


def test_trees_are_the_same_where_a_sort_loses_the_order_of_ties(monkeypatch: pytest.MonkeyPatch) -> None:
    """The children of a sure node score as it does; a sort and a `topk` that prefer the last of equals."""

    def children(tokens: Tensor) -> Level:
        scores = torch.zeros(*tokens.shape, 3)
        scores[..., 2] = -1.0
        return Level(scores, scores, (tokens[..., None] * 3 + torch.arange(3)) % 97)

    def grown() -> list[Tensor]:
        roots = torch.tensor([1, 2])
        draft = grow_dynamic(
            roots, children(roots[:, None]), lambda tokens, *_: children(tokens), Budget(8, num_steps=4, top_k=3)
        )
        assert draft.log_probs is not None
        return [draft.tree.tokens, draft.tree.parents, draft.log_probs]

    wanted = grown()
    sort = Tensor.sort

    def unstable(tensor: Tensor, dim: int = -1, descending: bool = False, stable: bool = False) -> Any:
        values, places = sort(tensor.flip(dim), dim=dim, descending=descending, stable=True)
        return torch.return_types.sort((values, tensor.shape[dim] - 1 - places))

    monkeypatch.setattr(Tensor, "sort", unstable)
    assert not all(map(torch.equal, grown(), wanted))  # the test can fail
    monkeypatch.setattr(growth, "_best", _best_of_ties)
    assert all(map(torch.equal, grown(), wanted))
    for tokens, parents in zip(*grown()[:2], strict=True):
        assert all(parent < node for node, parent in enumerate(parents.tolist()))
        assert len(tokens) == 8
