"""The cache against Python lists: what is committed, where it lies, how much it weighs."""

from __future__ import annotations

import random

import pytest
import torch

from hf_specdec.errors import CacheCapacityError
from hf_specdec.target.cache import LayerLayout, TreeCache, measured_layout

LAYERS, HEADS, KEY_DIM, VALUE_DIM = 3, 2, 4, 6
LAYOUT = [LayerLayout(HEADS, KEY_DIM, VALUE_DIM, torch.device("cpu"))] * LAYERS


def append(cache: TreeCache, marks: torch.Tensor) -> None:
    """Append tokens `[B, T]` whose keys and values are their mark, plus the layer's number."""
    for layer in range(LAYERS):
        states = (marks.float() + 1000 * layer)[:, None, :, None]
        keys = states.expand(-1, HEADS, -1, KEY_DIM)
        cache.update(keys, -states.expand(-1, HEADS, -1, VALUE_DIM), layer)


def committed(cache: TreeCache, row: int) -> list[list[int]]:
    """The marks of a row in every layer, after checking that keys and values agree."""
    marks = []
    for index, layer in enumerate(cache.layers):
        keys = layer.keys[row, :, : cache.lengths[row]]
        values = layer.values[row, :, : cache.lengths[row]]
        assert (keys == keys[:1, :, :1]).all()
        assert (values == -keys[:1, :, :1]).all()
        marks.append([int(mark) - 1000 * index for mark in keys[0, :, 0]])
    return marks


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("layout", [LAYOUT, [None] * LAYERS], ids=["shared", "unknown"])
def test_commit_keeps_exactly_the_paths(batch_size: int, layout: list[LayerLayout | None]) -> None:
    rng = random.Random(batch_size)
    cache = TreeCache(layout, capacity=80)
    prompt = torch.arange(batch_size * 5).view(batch_size, 5)
    append(cache, prompt)
    cache.commit_all(batch_size, 0)
    texts = prompt.tolist()
    for step in range(12):
        nodes = rng.randint(1, 6)
        marks = 100 + 10 * step + torch.arange(nodes).expand(batch_size, -1)
        append(cache, marks)
        paths = [sorted(rng.sample(range(nodes), rng.randint(0, nodes))) for _ in range(batch_size)]
        width = max(1, *map(len, paths))
        cache.commit(torch.tensor([[*path, *[-1] * (width - len(path))] for path in paths]), paths)
        assert cache.lengths_on(torch.device("cpu"), batch_size).tolist() == cache.lengths
        for row, path in enumerate(paths):
            texts[row] += [int(marks[row, node]) for node in path]
        assert cache.lengths == list(map(len, texts))
        assert cache.get_seq_length() == max(cache.lengths)
        for row in range(batch_size):
            assert committed(cache, row) == [texts[row]] * LAYERS


def test_rollback_forgets_what_was_appended() -> None:
    cache = TreeCache(LAYOUT, capacity=16)
    append(cache, torch.tensor([[1, 2]]))
    cache.commit_all(1, 0)
    append(cache, torch.tensor([[3, 4]]))
    append(cache, torch.tensor([[5]]))
    assert cache.get_seq_length() == 5
    cache.rollback()
    assert cache.get_seq_length() == 2
    cache.reset()
    assert cache.get_seq_length() == 0


def test_one_buffer_for_all_layers_weighs_what_the_formula_says() -> None:
    cache = TreeCache(LAYOUT, capacity=32)
    append(cache, torch.zeros(2, 3))
    assert len(cache.buffers) == 1
    assert cache.num_bytes == LAYERS * 2 * 32 * HEADS * (KEY_DIM + VALUE_DIM) * 4
    assert measured_layout(cache) == tuple(LAYOUT)


def test_layers_that_hold_nothing_cost_nothing() -> None:
    cache = TreeCache([LAYOUT[0], None, LAYOUT[0]], capacity=32)
    for index in (0, 2):
        cache.update(torch.zeros(1, HEADS, 3, KEY_DIM), torch.zeros(1, HEADS, 3, VALUE_DIM), index)
    cache.commit_all(1, 0)
    assert measured_layout(cache)[1] is None
    assert cache.num_bytes == 2 * 32 * HEADS * (KEY_DIM + VALUE_DIM) * 4


def test_a_layer_that_does_not_fit_its_layout_gets_a_buffer_of_its_own() -> None:
    cache = TreeCache(LAYOUT, capacity=8)
    keys, _ = cache.update(torch.ones(1, HEADS, 3, 2 * KEY_DIM), torch.ones(1, HEADS, 3, VALUE_DIM), 0)
    assert keys.shape == (1, HEADS, 3, 2 * KEY_DIM)
    assert len(cache.buffers) == 1


def test_too_many_tokens_are_refused() -> None:
    cache = TreeCache(LAYOUT, capacity=4)
    append(cache, torch.zeros(1, 3))
    with pytest.raises(CacheCapacityError, match="4 slots, this forward needs 5"):
        append(cache, torch.zeros(1, 2))
