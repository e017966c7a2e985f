"""The cache against Python lists: what is committed, where it lies, how much it weighs."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig
from transformers.cache_utils import DynamicSlidingWindowLayer

from hf_specdec.errors import CacheCapacityError
from hf_specdec.verification import graphs, memory
from hf_specdec.verification.cache import TreeCache, measured_layout
from hf_specdec.verification.graphs import MOST_PADDED, KeptMemory
from hf_specdec.verification.memory import LayerLayout

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
        if step % 3 == 0:
            assert cache.get_seq_length() == max(cache.lengths) + nodes
            cache.rollback()
            append(cache, marks)
        paths = [sorted(rng.sample(range(nodes), rng.randint(0, nodes))) for _ in range(batch_size)]
        cache.commit(paths)
        assert cache.lengths_on(torch.device("cpu"), batch_size).tolist() == cache.lengths
        for row, path in enumerate(paths):
            texts[row] += [int(marks[row, node]) for node in path]
        assert cache.lengths == list(map(len, texts))
        assert cache.get_seq_length() == max(cache.lengths)
        for row in range(batch_size):
            assert committed(cache, row) == [texts[row]] * LAYERS


def test_one_buffer_for_all_layers_weighs_what_the_formula_says() -> None:
    cache = TreeCache(LAYOUT, capacity=32)
    append(cache, torch.zeros(2, 3))
    assert len(cache.buffers) == 1
    (buffer,) = cache.buffers
    assert buffer.keys.nbytes + buffer.values.nbytes == LAYERS * 2 * 32 * HEADS * (KEY_DIM + VALUE_DIM) * 4
    assert measured_layout(cache) == tuple(LAYOUT)
    cache = TreeCache([LAYOUT[0], None, LAYOUT[0]], capacity=32)  # a layer that holds nothing
    for index in (0, 2):
        cache.update(torch.zeros(1, HEADS, 3, KEY_DIM), torch.zeros(1, HEADS, 3, VALUE_DIM), index)
    assert measured_layout(cache) == (LAYOUT[0], None, LAYOUT[0])
    assert [len(buffer.shares) for buffer in cache.buffers] == [2]


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


def test_a_cache_that_grows_keeps_what_it_holds_and_moves_seldom() -> None:
    """The reserve or half of what there is ahead, in tiers of 64 slots, and no more than is needed in the end."""
    cache, text = TreeCache(LAYOUT, capacity=200, reserve=10), list[int]()
    for count, capacity in ((5, 64), (59, 64), (1, 128), (63, 128), (1, 200), (71, 200), (1, 320)):
        marks = torch.arange(len(text), len(text) + count)
        append(cache, marks[None])
        text += marks.tolist()
        cache.commit_all(1, count)
        assert cache.capacity == capacity
        assert committed(cache, 0) == [text] * LAYERS
    few = TreeCache(LAYOUT, capacity=20, reserve=10)
    append(few, torch.zeros(1, 3))
    assert few.capacity == 20
    long = TreeCache(LAYOUT, capacity=999, reserve=70)
    append(long, torch.zeros(1, 3))
    assert long.capacity == 128  # 3 + 70 slots and more


def test_slots_are_moved_only_from_where_a_path_has_a_gap() -> None:
    """And nothing at all is moved where all rows keep their first nodes."""
    cache, moves = TreeCache(LAYOUT, capacity=32), list[list[list[int]]]()
    append(cache, torch.zeros(2, 4))
    cache.commit_all(2, 4)
    buffer = cache.buffers[0]
    buffer.move = lambda sources, targets: moves.append([sources.tolist(), targets.tolist()])  # type: ignore[method-assign]
    append(cache, torch.zeros(2, 5))
    cache.commit([[0, 1, 2], [0]])
    assert moves == []
    append(cache, torch.zeros(2, 5))  # at slot 7: the second row has 5 tokens
    cache.commit([[0, 1], []])
    assert moves == []
    append(cache, torch.zeros(2, 5))  # at slot 9
    cache.commit([[0, 2], [1]])
    assert moves == [[[[9, 11], [10, 6]], [[9, 10], [5, 6]]]]
    assert cache.lengths == [11, 6]


def test_the_window_of_a_sliding_layer_is_adopted_at_its_place() -> None:
    layer = DynamicSlidingWindowLayer(sliding_window=4)
    given = DynamicCache()
    given.layers = [layer]
    states = torch.arange(6.0)[None, None, :, None]
    given.update(states.expand(2, HEADS, -1, KEY_DIM), -states.expand(2, HEADS, -1, VALUE_DIM), 0)
    cache = TreeCache(LAYOUT[:1], capacity=16)
    cache.adopt(given)
    assert cache.lengths == [6, 6]
    assert cache.get_seq_length() == 6
    kept = layer.keys.shape[2]
    assert kept < 6
    assert cache.layers[0].keys[1, 0, :6, 0].tolist() == [0] * (6 - kept) + list(range(6 - kept, 6))
    assert cache.layers[0].values[1, 1, :6, 0].tolist() == [0] * (6 - kept) + list(range(kept - 6, -6, -1))


def test_an_empty_cache_is_adopted_and_gets_what_was_committed() -> None:
    config = LlamaConfig(num_hidden_layers=LAYERS)
    for given in (DynamicCache(config=config), None):
        cache = TreeCache(LAYOUT, capacity=16)
        if given is not None:
            cache.adopt(given)
        assert cache.lengths == []
        append(cache, torch.tensor([[1, 2, 3]]))
        cache.commit_all(1, 3)
        append(cache, torch.tensor([[4, 5]]))  # not committed
        back = cache.hand_back(config)
        assert given is None or back is given
        assert back.layers[2].keys[0, 0, :, 0].tolist() == [2001, 2002, 2003]
        again = TreeCache(LAYOUT, capacity=16)
        again.adopt(back)
        append(again, torch.tensor([[6]]))
        again.commit_all(1, 1)
        assert committed(again, 0)[0] == [1, 2, 3, 6]
        again.hand_back(config)
        assert back.layers[1].keys[0, 0, :, 0].tolist() == [1001, 1002, 1003, 1006]


def test_kept_memory_survives_a_shortage(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is too large for the device leaves nothing of its size behind, and never half of a move."""
    store = memory.KeyValueStore((None,), 64, 8, is_persistent=True)
    keys = torch.ones(1, 2, 3, 4)
    share = store.allocate(None, keys, keys)
    share.keys[:, :, :3], share.values[:, :, :3] = keys, 2 * keys
    allocate, calls = memory._allocate, list[int]()

    def short(*args: Any, **options: Any) -> Tensor:
        calls.append(1)
        if len(calls) % 2 == 0:  # there is memory for the keys, and then none for the values
            raise CacheCapacityError("no memory")
        return allocate(*args, **options)

    moves = store.moves
    with monkeypatch.context() as patch:
        patch.setattr(memory, "_allocate", short)
        with pytest.raises(CacheCapacityError):
            store.make_room(3000)
    assert len(calls) == 4  # as much as is kept, and then as much as is needed
    assert store.moves > moves  # whoever knows addresses looks again: another buffer may have moved before
    assert store.buffers[0].keys[0].data_ptr() == share.keys.data_ptr()
    assert (share.values[:, :, :3] == 2).all()
    store.reopen(64, 8)
    moves = store.moves
    again = store.allocate(None, keys, keys)
    assert again is share
    assert store.moves == moves
    assert (again.keys == 0).all()
    other = store.allocate(None, keys.expand(3, -1, -1, -1), keys.expand(3, -1, -1, -1))
    assert len(other.keys) == 3
    assert store.moves == moves + 1
    assert not hasattr(share, "keys")  # nobody holds the memory of the other batch any more


def test_kept_memory_serves_other_lengths_and_batches() -> None:
    """Prompts and answers of other lengths, and smaller batches, move nothing: each move drops every graph."""
    store = memory.KeyValueStore((None,), 244, 64, is_persistent=True)
    keys = torch.ones(3, 2, 100, 4)
    store.allocate(None, keys, keys)
    place, moves = store.buffers[0].keys.data_ptr(), store.moves
    assert store.capacity == memory.FIRST_KEPT_SLOTS
    for rows, needed in ((1, 436), (4, 580), (2, 2048), (3, 100)):
        store.reopen(needed, 64)
        share = store.allocate(None, keys[:1].expand(rows, -1, -1, -1), keys[:1].expand(rows, -1, -1, -1))
        store.make_room(needed)
        assert share.keys.shape == (rows, 2, 2048, 4)
        assert share.keys.data_ptr() == place
        assert store.buffers[0].keys.shape == (1, rows, 2, 2048, 4)
    assert store.moves == moves
    store.make_room(2049)
    assert (store.capacity, store.moves) == (4096, moves + 1)
    store.reopen(100, 64)
    five = keys[:1].expand(5, -1, -1, -1)
    assert len(store.allocate(None, five, five).keys) == 5
    assert store.moves == moves + 2
    assert [memory.kept_rows(rows) for rows in (1, 2, 3, 4, 5, 9, 16)] == [1, 2, 4, 4, 8, 16, 16]


def test_kept_memory_is_as_small_as_it_must_be_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    allocate = memory._allocate

    def short(like: Tensor, num_layers: int, batch: int, capacity: int, *, is_persistent: bool) -> Tensor:
        if batch * capacity > 700:
            raise CacheCapacityError("no memory")
        return allocate(like, num_layers, batch, capacity, is_persistent=is_persistent)

    monkeypatch.setattr(memory, "_allocate", short)
    layouts = (memory.LayerLayout(2, 4, 4, torch.device("cpu")), memory.LayerLayout(1, 4, 4, torch.device("cpu")))
    store = memory.KeyValueStore(layouts, 200, 64, is_persistent=True)
    keys = torch.ones(3, 2, 100, 4)
    first = store.allocate(layouts[0], keys, keys)
    first.keys[:, :, :100] = keys
    second = store.allocate(layouts[1], keys[:, :1], keys[:, :1])
    assert first.keys.shape == (3, 2, 192, 4)
    assert second.keys.shape == (3, 1, 192, 4)
    assert bool((first.keys[:, :, :100] == 1).all())
    with pytest.raises(CacheCapacityError):
        store.make_room(400)


def kept_cache(kept: KeptMemory, capacity: int) -> TreeCache:
    """A cache over kept memory that holds a prompt of 20 tokens."""
    cache = kept.new_cache(tuple(LAYOUT), capacity, reserve=8)
    append(cache, torch.arange(20)[None])
    cache.commit_all(1, 20)
    return cache


def test_kept_memory_has_room_for_the_padding_of_the_last_tree() -> None:
    """The last tree of an answer is padded, too, behind the last slot that is needed: nothing is moved for it."""
    kept = KeptMemory()
    cache = kept_cache(kept, capacity=100)
    cache.store.make_room(100)
    moves = kept.moves
    cache.store.make_room(100 + MOST_PADDED)
    assert kept.moves == moves
    assert MOST_PADDED == 31  # 33 nodes are padded to 64


def test_kept_memory_shows_nothing_of_an_earlier_call() -> None:
    """What a mask hides is multiplied by zero all the same: NaN or infinity of another call would spoil a row."""
    kept = KeptMemory()
    for _ in range(2):
        cache = kept_cache(kept, capacity=64)
        for buffer in cache.buffers:
            for states in (buffer.keys, buffer.values):
                assert bool((states[:, :, :, 20:] == 0).all())
                states.fill_(torch.nan)
        kept.release(cache)


def test_the_shape_that_was_used_longest_ago_goes_and_its_results_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "KEPT_SHAPES", 2)
    kept, made = graphs.Graphed(None, "It"), []  # type: ignore[arg-type]

    def run(width: int, bucket: int, moves: int = 0) -> None:
        def ones(given: Tensor) -> list[Tensor]:
            made.append((width, bucket))
            return [given + 1]

        (result,) = kept((width, bucket), ones, graphs.Input(torch.zeros(1, 2), width), moves=moves)
        assert torch.equal(result, torch.ones(1, width))

    for width, bucket in ((4, 256), (8, 256), (4, 256), (4, 384)):  # the last in the place of the second
        run(width, bucket)
    assert list(kept._shapes) == [(4, 256), (4, 384)]
    assert list(kept._outputs) == [(torch.float32, 4)]
    run(4, 384, moves=1)  # memory has moved: nothing of it can be used
    assert list(kept._shapes) == [(4, 384)]
    assert kept._shapes[4, 384].times == 1
