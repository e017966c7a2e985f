"""The kernel of NVIDIA GPUs, called by name: what it is given, what parts of long caches give, when SDPA chooses.

Here `attend_packed` takes that kernel's way on the CPU, with attention written out in its place, which refuses what
torch's kernel_forward.h refuses.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import DynamicCache

import drafters
import zoo
from hf_specdec import SpeculativeGenerationMixin
from hf_specdec.heads import attention as heads_attention
from hf_specdec.heads.attention import attend_over
from hf_specdec.verification import tree_attention
from hf_specdec.verification.tree_attention import (
    HIDDEN_SCORE,
    AttentionContext,
    attend_packed,
    efficient_attention,
    exact_attention,
    num_parts,
    packed_mask,
    split_attention,
    split_mask,
)
from kernel_by_name import by_name, calls, draw, strict_kernel, tree_seen
from models import prompts

__all__ = ["by_name"]

DTYPES = [torch.float32, torch.bfloat16]
FAR = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("batch", "heads", "shared", "nodes"), [
    (1, 8, 2, 1), (1, 8, 2, 7), (1, 4, 4, 64), (1, 6, 1, 33), (3, 4, 2, 5), (2, 3, 3, 1),
])  # fmt: skip
@pytest.mark.parametrize(("keys", "splits"), [(2048, 8), (1031, 4), (1500, 16), (257, 2), (131, 7)])
@pytest.mark.parametrize("kind", ["full", "sliding", "hole"])
def test_parts_give_what_the_whole_gives(
    kind: str, keys: int, splits: int, batch: int, heads: int, shared: int, nodes: int, dtype: torch.dtype,
    by_name: None,
) -> None:  # fmt: skip
    query = draw(batch, shared, heads // shared * nodes, 16, dtype=dtype)
    cache = draw(2, batch, shared, keys + 9, 16, dtype=dtype, seed=1)
    key, value = cache[:, :, :, :keys].unbind()
    seen = tree_seen(kind, batch, nodes, keys)
    whole, parts = (packed_mask(seen, heads // shared, dtype, number) for number in (1, splits))
    wanted, _ = exact_attention(query.float(), key.float(), value.float(), whole, 0.3)
    assert whole is not None
    assert whole.shape == (batch, 1, heads // shared * nodes, keys)
    found = split_attention(query, key, value, parts, 0.3, splits, strict_kernel)
    assert found.dtype == dtype
    assert calls == [splits] * batch
    torch.testing.assert_close(found.float(), wanted.float(), atol=FAR[dtype], rtol=0)


@pytest.mark.parametrize(("keys", "splits"), [(2048, 8), (1031, 4)])
def test_parts_of_keys_that_are_all_seen(keys: int, splits: int, by_name: None) -> None:
    query, key, value = draw(1, 2, 3, 8), draw(1, 2, keys, 8, seed=1), draw(1, 2, keys, 8, seed=2)
    seen = torch.ones(1, 1, 1, keys, dtype=torch.bool)
    assert packed_mask(seen, 3, query.dtype, all_seen=True) is None
    mask = packed_mask(seen, 3, query.dtype, splits, all_seen=True)
    assert (mask is None) == (keys % splits == 0)  # otherwise keys that two parts share are hidden from one
    found = split_attention(query, key, value, mask, None, splits, strict_kernel)
    torch.testing.assert_close(found, exact_attention(query, key, value, None, None)[0])


@pytest.mark.parametrize("hidden", [HIDDEN_SCORE, -torch.inf])
def test_a_part_that_a_row_sees_nothing_of_counts_for_nothing(hidden: float) -> None:
    query, key, value = draw(1, 1, 2, 8), draw(1, 1, 64, 8, seed=1), draw(1, 1, 64, 8, seed=2)
    mask = torch.zeros(1, 1, 2, 64)
    mask[:, :, 0, :48], mask[:, :, 1, 16:] = hidden, hidden
    value[:, :, 48:] += 100
    found = split_attention(query, key, value, split_mask(mask, 4), None, 4, strict_kernel)
    assert found.isfinite().all()
    torch.testing.assert_close(found, exact_attention(query, key, value, mask, None)[0])


def test_keys_and_values_are_never_copied(by_name: None) -> None:
    """Nor a mask whose parts the kernel can read."""
    cache = draw(1, 2, 80, 8)
    places = []

    def note(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Any:
        places.append((key.untyped_storage().data_ptr(), query.stride(0)))
        return strict_kernel(query, key, value, mask, scale)

    mask = packed_mask(tree_seen("full", 1, 4, 70), 1, torch.float32, 4)
    split_attention(draw(1, 2, 4, 8, seed=1), cache[:, :, :70], cache[:, :, :70], mask, None, 4, note)
    assert places == [(cache.untyped_storage().data_ptr(), 0)]
    mask = draw(1, 1, 3, 64)
    assert split_mask(mask, 4).data_ptr() == mask.data_ptr()
    assert split_mask(mask[..., :56], 4).data_ptr() != mask.data_ptr()  # parts of 14 would begin at odd places


@pytest.mark.parametrize(("sizes", "wanted"), [
    ((1, 8, 128, 4096), 8), ((1, 8, 128, 1024), 1), ((1, 8, 128, 1025), 8), ((1, 8, 4, 8192), 16),
    ((1, 8, 4, 1025), 8), ((1, 32, 64, 4096), 4), ((1, 64, 64, 4096), 2), ((1, 128, 1, 4096), 1),
    ((4, 8, 32, 4096), 1), ((4, 8, 32, 4097), 16), ((8, 8, 128, 8192), 1), ((1, 1, 64, 1 << 17), 16),
])  # fmt: skip
def test_parts_fill_the_multiprocessors_and_no_more(sizes: tuple[int, int, int, int], wanted: int) -> None:
    assert num_parts(*sizes, processors=132) == wanted


# ------------------------------------------------------------------------------------------------- the way there


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "shared", "nodes", "keys"), [
    (8, 2, 5, 37), (4, 4, 3, 100), (8, 1, 1, 19), (8, 2, 5, 1501), (4, 4, 64, 2048), (8, 1, 1, 1300),
])  # fmt: skip
@pytest.mark.parametrize("whole", [False, True])
def test_a_layer_of_a_verify_forward(
    whole: bool, heads: int, shared: int, nodes: int, keys: int, dtype: torch.dtype, by_name: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    query = draw(1, nodes, heads, 16, dtype=dtype).transpose(1, 2)
    cache = draw(2, 1, shared, keys + 50, 16, dtype=dtype, seed=1)
    key, value = cache[:, :, :, :keys].unbind()
    seen = tree_seen("full", 1, nodes, keys)
    all_seen = frozenset(["full_attention"]) if whole and nodes == 1 else frozenset[str]()
    masks = {"full_attention": seen}
    found = AttentionContext(masks, all_seen).attend("full_attention", query, key, value, 0.3)
    assert calls[-1] == num_parts(1, shared, heads // shared * nodes, keys, 132)
    assert (calls[-1] > 1) == (keys > 1024)
    monkeypatch.setattr(tree_attention, "calls_kernel_directly", lambda _device: False)
    wanted = AttentionContext(masks, all_seen).attend("full_attention", query, key, value, 0.3)
    assert found.is_contiguous()
    torch.testing.assert_close(found, wanted, atol=FAR[dtype], rtol=0)


def test_masks_are_made_once_for_all_layers(by_name: None, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def note(mask: Tensor, splits: int) -> Tensor:
        made.append(splits)
        return split_mask(mask, splits)

    monkeypatch.setattr(tree_attention, "split_mask", note)
    forward = AttentionContext({"full_attention": tree_seen("full", 1, 4, 1100)})
    cache, query = draw(1, 2, 1100, 8), draw(1, 4, 4, 8)
    forward.attend("full_attention", query, cache, cache, None)
    tried = len(made) - 1  # the kernel is tried in parts before it is used
    for _ in range(3):
        forward.attend("full_attention", query, cache, cache, None)
    assert made[tried:] == [num_parts(1, 2, 8, 1100, 132)]


@pytest.mark.parametrize(("heads", "shared"), [(8, 2), (4, 4)])
@pytest.mark.parametrize("keys", [21, 1300])
def test_a_draft_layer_attends_the_same_way(
    keys: int, heads: int, shared: int, by_name: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = tree_seen("full", 2, 6, keys)
    query, old = draw(2, heads, 6, 8), draw(2, 2, shared, keys - 6, 8, seed=1)
    new = draw(2, 2, shared, 6, 8, seed=2)

    def run() -> Tensor:
        cache = DynamicCache()
        cache.update(*old, 0)
        return attend_over(cache, seen)(query, *new)

    found = run()
    assert calls
    monkeypatch.setattr(tree_attention, "calls_kernel_directly", lambda _device: False)
    torch.testing.assert_close(found, run(), atol=1e-5, rtol=0)
    assert found.transpose(1, 2).is_contiguous()  # what follows takes heads side by side: no further copy


def test_a_long_prompt_does_not_multiply_its_mask(by_name: None, monkeypatch: pytest.MonkeyPatch) -> None:
    width = heads_attention.MAX_PACKED_QUERIES + 8
    seen = tree_seen("full", 2, width, width) | torch.eye(width, dtype=torch.bool)
    query, new = draw(2, 4, width, 8), draw(2, 2, 2, width, 8, seed=2)
    rows: list[int] = []

    def note(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Any:
        assert mask is not None
        rows.append(mask.shape[2])
        return strict_kernel(query, key, value, mask, scale)

    monkeypatch.setattr(tree_attention, "efficient_attention", note)
    found = attend_over(DynamicCache(), seen)(query, *new)
    assert rows[-1] == width
    monkeypatch.setattr(tree_attention, "calls_kernel_directly", lambda _device: False)
    torch.testing.assert_close(found, attend_over(DynamicCache(), seen)(query, *new), atol=1e-5, rtol=0)


def test_elsewhere_verification_attends_as_ever() -> None:
    seen = tree_seen("hole", 2, 3, 21)
    query, key, value = draw(2, 4, 3, 8), draw(2, 2, 21, 8, seed=1), draw(2, 2, 21, 8, seed=2)
    mask = torch.zeros(seen.shape).masked_fill_(~seen, HIDDEN_SCORE).repeat(1, 1, 2, 1)
    packed = scaled_dot_product_attention(query.reshape(2, 2, 6, 8), key, value, attn_mask=mask, scale=0.3)
    forward = AttentionContext({"full_attention": seen})
    found = forward.attend("full_attention", query, key, value, 0.3)
    assert torch.equal(found, packed.view(2, 4, 3, 8).transpose(1, 2))
    again = forward.packed("full_attention", 2, query.dtype)
    assert again is not None
    assert torch.equal(again, mask)
    assert again.stride() == mask.stride()  # rows are padded for the kernel alone


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3_text", "deepseek_v3"])
@pytest.mark.parametrize("row", ["sometimes", "eagle3", "mtp"])
def test_answers_are_those_of_plain_generation(
    name: str, row: str, by_name: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole and in parts, for one row and for three."""
    monkeypatch.setattr(tree_attention, "LONG", 10)
    monkeypatch.setattr(tree_attention, "SHORTEST_PART", 6)
    model = SpeculativeGenerationMixin.attach(copy.deepcopy(zoo.build(name)))
    for batch in (1, 3):
        ids, mask = prompts(batch)
        options = {"attention_mask": mask, "max_new_tokens": 24, "do_sample": False}
        plain = model.generate(ids, **options)
        calls.clear()
        config = drafters.BY_NAME[row].add(model, plain[:, 21:])
        assert torch.equal(model.generate(ids, speculative=config, **options), plain)
        if name != "deepseek_v3":  # whose heads of 12 the kernel is not asked for; its draft layers have others
            assert max(calls) > batch


# ------------------------------------------------------------------------------------------------- who chooses


@pytest.mark.parametrize(("device", "hip", "named"), [
    ("cuda", None, True), ("cuda:1", None, True), ("cuda", "6.4", False), ("cpu", None, False), ("mps", None, False),
    ("xpu", None, False), ("meta", None, False),
])  # fmt: skip
def test_only_nvidia_has_its_kernel_named(
    device: str, hip: str | None, named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    assert tree_attention.calls_kernel_directly(torch.device(device)) == named


def wrong(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Any:
    return lambda *given: change(*strict_kernel(*given))


def raising(*_given: Any) -> Any:
    raise RuntimeError("cutlassF: no kernel found to launch!")


@pytest.mark.parametrize(("kernel", "reason"), [
    (wrong(lambda output, sums: (output + 0.1, sums)), "error of the memory-efficient kernel is 1.0e-01"),
    (wrong(lambda output, sums: (output * torch.nan, sums)), "kernel is inf"),
    (wrong(lambda output, sums: (output, sums * 1.4427)), "error of the memory-efficient kernel"),
    (wrong(lambda output, sums: (output, torch.cat([sums, sums], -1))), "kernel fails"),
    (raising, "RuntimeError: cutlassF"),
])  # fmt: skip
def test_a_kernel_that_is_wrong_is_left_with_one_line_of_why(
    kernel: Any, reason: str, by_name: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tree_attention, "efficient_attention", kernel)
    query, cache = draw(1, 4, 3, 8), draw(1, 2, 20, 8)
    forward = AttentionContext({"full_attention": tree_seen("full", 1, 3, 20)})
    with caplog.at_level(logging.INFO, "hf_specdec.verification.tree_attention"):
        found = [forward.attend("full_attention", query, cache, cache, None) for _ in range(3)]
    (record,) = caplog.records
    assert reason in record.getMessage()
    monkeypatch.setattr(tree_attention, "calls_kernel_directly", lambda _device: False)
    assert torch.equal(found[0], forward.attend("full_attention", query, cache, cache, None))


def test_a_kernel_is_tried_once_for_each_size_and_dtype(by_name: None, caplog: pytest.LogCaptureFixture) -> None:
    tried, state = list[tuple[Any, ...]](), torch.get_rng_state()
    probe = tree_attention.probe_error
    with (
        pytest.MonkeyPatch.context() as patch,
        caplog.at_level(logging.INFO, "hf_specdec.verification.tree_attention"),
    ):
        patch.setattr(tree_attention, "probe_error", lambda *key: (tried.append(key[1:]), probe(*key))[1])
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            for dim in (8, 16, 8, 16):
                query, cache = draw(1, 2, 3, dim, dtype=dtype), draw(1, 2, 20, dim, dtype=dtype)
                attend_packed(query, cache, cache, lambda _parts: None, None)
    assert torch.equal(torch.get_rng_state(), state)
    kinds = (torch.float32, torch.bfloat16, torch.float16)
    assert tried == [(dtype, dim, dim) for dtype in kinds for dim in (8, 16)]
    assert [
        "the memory-efficient kernel does not support this dtype" in record.getMessage() for record in caplog.records
    ] == [True] * 2


def test_sdpa_chooses_for_what_the_kernel_does_not_take(by_name: None, monkeypatch: pytest.MonkeyPatch) -> None:
    query, cache = draw(1, 2, 3, 8), draw(1, 2, 24, 8)
    assert tree_attention.kernel_for(query, cache, cache) is strict_kernel
    turned = cache.transpose(2, 3).contiguous().transpose(2, 3)
    for given in (
        (query, cache[..., :6], cache), (query[..., :6], draw(1, 2, 24, 6), cache), (query, cache, turned),
        (query, cache.bfloat16(), cache),
    ):  # fmt: skip
        assert tree_attention.kernel_for(*given) is None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert tree_attention.kernel_for(query, cache, cache) is None
    monkeypatch.setattr(torch.backends.cuda, "mem_efficient_sdp_enabled", lambda: False)  # the user's choice
    assert tree_attention.kernel_for(query, cache, cache) is None


# ------------------------------------------------------------------------------------------------- torch's operation


@pytest.mark.parametrize("masked", [False, True])
def test_the_operation_gives_the_sizes_that_are_read(masked: bool) -> None:
    """On the meta device: there are no numbers, but the operation is the real one."""
    sizes = {"dtype": torch.bfloat16, "device": "meta"}
    query, key, value, mask = (
        torch.empty(shape, **sizes) for shape in ((3, 2, 40, 16), (3, 2, 55, 16), (3, 2, 55, 8), (3, 1, 1, 55))
    )
    output, sums = efficient_attention(query, key, value, mask if masked else None, 0.3)
    assert output.shape == (3, 2, 40, 8)
    assert sums.shape == (3, 2, 40)
    assert sums.dtype == torch.float32
    assert output.dtype == torch.bfloat16
