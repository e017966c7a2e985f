"""Triton kernels of `device_attention.py`, which imports this file when it uses them: Triton is optional.

`attend_to_parts` attends to parts of the keys, `merge_parts` merges the parts. Only the device knows how many keys a
row has, so the size of its parts is computed there; blocks of the grid beyond the last part exit at once. Scores are
logarithms to base 2. A tile has `BLOCK_M` rows (queries of all heads that share a key head) and `BLOCK_N` keys, with
`BLOCK_D` and `BLOCK_V` channels, of which `KEY_DIM` and `VALUE_DIM` exist.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def keys_of_row(lengths, left, batch, count, parts, BLOCK_N: tl.constexpr, SHORTEST: tl.constexpr,
                WINDOW: tl.constexpr, CHUNK: tl.constexpr, FIXED: tl.constexpr):  # fmt: skip
    """Return a row's length, padding, first slot that a query may see, blocks of keys, and blocks of each part.

    No query is before slot `length`, so the window and the chunk of that slot begin first; with FIXED, at the begin of
    a part of the shortest length, counted from slot 0.
    """
    length, start = tl.load(lengths + batch).to(tl.int32), tl.load(left + batch).to(tl.int32)
    begin = length * 0
    if WINDOW > 0:
        begin = tl.maximum(begin, length - WINDOW + 1)
    if CHUNK > 0:
        begin = tl.maximum(begin, start + (length - start) // CHUNK * CHUNK)
    if FIXED:
        begin = begin // (SHORTEST * BLOCK_N) * (SHORTEST * BLOCK_N)
    blocks = tl.cdiv(length - begin + count, BLOCK_N)
    return length, start, begin, blocks, tl.maximum(tl.cdiv(blocks, parts), SHORTEST)


@triton.jit(do_not_specialize=["heads", "groups", "nodes", "count", "parts"])
def attend_to_parts(
    query, key, value, lengths, first, places, words, valid, left, outputs, sums,
    query_batch, query_head, query_node, key_batch, key_head, key_slot, value_batch, value_head, value_slot,
    valid_batch, scale, softcap, heads, groups, nodes, count, parts,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, SHORTEST: tl.constexpr, WINDOW: tl.constexpr,
    CHUNK: tl.constexpr, FIXED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Write the output `[parts, B * G, M, Dv]` of each part, and the log-sum-exp `[parts, B * G, M]` of its scores."""
    tile, pair, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    batch, head = (pair // heads).to(tl.int64), (pair % heads).to(tl.int64)
    length, start, begin, blocks, per_part = keys_of_row(
        lengths, left, batch, count, parts, BLOCK_N, SHORTEST, WINDOW, CHUNK, FIXED
    )
    if part * per_part >= blocks:
        return
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    has_row = rows < groups * nodes
    node = rows % nodes
    place = tl.load(places + batch * nodes + node, mask=has_row, other=0).to(tl.int32)
    word = tl.load(words + batch * nodes + node, mask=has_row, other=0)
    channels, value_channels = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    query_rows = batch * query_batch + (head * groups + rows // nodes) * query_head + node * query_node
    queries = tl.load(
        query + query_rows[:, None] + channels[None, :],
        mask=has_row[:, None] & (channels < KEY_DIM)[None, :],
        other=0.0,
    )
    key += batch * key_batch + head * key_head
    value += batch * value_batch + head * value_head
    valid += batch * valid_batch
    free = tl.load(first).to(tl.int32)
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    output = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for block in range(part * per_part, tl.minimum((part + 1) * per_part, blocks)):
        # behind the committed entries of the row come those appended by this forward, wherever they are stored
        index = begin + block * BLOCK_N + tl.arange(0, BLOCK_N)
        exists, is_new = index < length + count, index >= length
        slot = tl.where(is_new, free + index - length, index)
        offset = slot.to(tl.int64)
        keys = tl.load(
            key + offset[None, :] * key_slot + channels[:, None],
            mask=exists[None, :] & (channels < KEY_DIM)[:, None], other=0.0,
        )  # fmt: skip
        scores = tl.dot(queries, keys, input_precision="ieee") * scale
        if CAPPED:
            small = tl.exp2(tl.abs(scores) * (-2.8853900817779268 / softcap))  # exp(-2|x|), which cannot overflow
            capped = softcap * (1 - small) / (1 + small)
            scores = tl.where(scores < 0, -capped, capped)
        is_token = tl.load(valid + offset, mask=exists & (index < length), other=0) != 0
        seen = is_token[None, :] & has_row[:, None]
        if WINDOW > 0:
            seen = seen & (place[:, None] - slot[None, :] < WINDOW)
        if CHUNK > 0:
            seen = seen & ((place[:, None] - start) // CHUNK == (slot[None, :] - start) // CHUNK)
        bit = (word[:, None] >> tl.where(is_new, index - length, 0)[None, :]) & 1
        seen = tl.where((is_new & exists)[None, :], bit != 0, seen)
        scores = tl.where(seen, scores * 1.4426950408889634, float("-inf"))
        above = tl.maximum(highest, tl.max(scores, 1))
        shift = tl.where(above == float("-inf"), 0.0, above)  # no key seen so far
        weights = tl.exp2(scores - shift[:, None])
        kept = tl.exp2(highest - shift)
        weight = weight * kept + tl.sum(weights, 1)
        values = tl.load(
            value + offset[:, None] * value_slot + value_channels[None, :],
            mask=exists[:, None] & (value_channels < VALUE_DIM)[None, :], other=0.0,
        )  # fmt: skip
        output = output * kept[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        highest = above
    target = (part * tl.num_programs(1) + pair).to(tl.int64) * (groups * nodes) + rows
    some = tl.where(weight > 0, weight, 1.0)
    tl.store(sums + target, highest + tl.log2(some), mask=has_row)
    tl.store(
        outputs + target[:, None] * VALUE_DIM + value_channels[None, :], output / some[:, None],
        mask=has_row[:, None] & (value_channels < VALUE_DIM)[None, :],
    )  # fmt: skip


@triton.jit(do_not_specialize=["heads", "groups", "nodes", "count", "parts"])
def merge_parts(
    outputs, sums, lengths, left, sinks, merged, heads, groups, nodes, count, parts,
    VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr,
    SHORTEST: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, FIXED: tl.constexpr, SUNK: tl.constexpr,
):  # fmt: skip
    """Write the attention `[B, N, H, Dv]` over all parts, weighted by their log-sum-exps; `sinks` `[H]` add weight."""
    tile, pair = tl.program_id(0), tl.program_id(1)
    batch, head = (pair // heads).to(tl.int64), pair % heads
    _, _, _, blocks, per_part = keys_of_row(
        lengths, left, batch, count, parts, BLOCK_N, SHORTEST, WINDOW, CHUNK, FIXED
    )
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    has_row = rows < groups * nodes
    channels = tl.arange(0, BLOCK_V)
    inside = has_row[:, None] & (channels < VALUE_DIM)[None, :]
    query_head = head * groups + rows // nodes
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    if SUNK:
        highest = tl.load(sinks + query_head, mask=has_row, other=0.0).to(tl.float32) * 1.4426950408889634
        weight += 1.0
    output = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for part in range(0, tl.cdiv(blocks, per_part)):
        source = (part * tl.num_programs(1) + pair).to(tl.int64) * (groups * nodes) + rows
        log_sum = tl.load(sums + source, mask=has_row, other=0.0)
        above = tl.maximum(highest, log_sum)
        shift = tl.where(above == float("-inf"), 0.0, above)
        kept, share = tl.exp2(highest - shift), tl.exp2(log_sum - shift)
        values = tl.load(outputs + source[:, None] * VALUE_DIM + channels[None, :], mask=inside, other=0.0)
        weight = weight * kept + share
        output = output * kept[:, None] + values * share[:, None]
        highest = above
    target = (batch * nodes + rows % nodes) * (heads * groups) + query_head
    output = output / tl.where(weight > 0, weight, 1.0)[:, None]
    tl.store(merged + target[:, None] * VALUE_DIM + channels[None, :], output.to(merged.dtype.element_ty), mask=inside)
