"""Block heads on the second device: drafts that a graph makes are those made operation by operation."""

from __future__ import annotations

from typing import Any

import pytest

import drafters
from graphs_on_simulated_device import (
    CAPTURED,
    assert_launches_alike,
    attached,
    device,  # noqa: F401
    generate,
    plain_llama,
)
from hf_specdec.drafters.dflash import DFlashDrafter
from simulated_device import reads

KINDS: dict[str, tuple[dict[str, Any], dict[str, Any], float]] = {
    "likeliest nodes": ({}, {"num_draft_tokens": 12}, 0.0),
    "all children": ({"all_children": True, "causal": True}, {"num_draft_tokens": 10, "top_k": 3}, 0.0),
    "static": ({}, {"tree": [[0], [1], [0, 0], [0, 2], [1, 0], [0, 0, 1], [1, 0, 0]]}, 0.0),
    "a Markov head": (
        {"markov_rank": 4, "markov_head_type": "rnn", "sample_from_anchor": True, "confidence_head": True},
        {"num_draft_tokens": 8, "top_k": 2}, 0.4,
    ),
    "a draft window": ({}, {"num_draft_tokens": 8, "draft_window": 8}, 0.0),
    "windows": (
        {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
        {"num_draft_tokens": 8}, 0.0,
    ),
    "a window from the anchor": (
        {"sliding_window": 6, "layer_types": ["full_attention", "sliding_attention"], "window_from_anchor": True},
        {"num_draft_tokens": 8}, 0.0,
    ),
}  # fmt: skip
"""Fields of the head and of the call, and the confidence threshold."""


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_drafts_what_is_drafted_by_hand(kind: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Node for node, with changing lengths, paths and memory; rows are padded to one length."""
    of_head, of_call, threshold = KINDS[kind]
    model = attached()
    model.add_drafter(DFlashDrafter(drafters.random_block(model, **of_head), threshold))
    assert_launches_alike(model, rows, {"method": "dflash", **of_call}, monkeypatch, num_drafts=40)


@pytest.mark.parametrize("name", ["eagle3", "dflash"])
def test_a_window_reads_nothing_from_the_device(name: str) -> None:
    """Neither its choice in the prompt nor the cuts of the cache, in a padded batch."""
    model = attached()
    config = {**drafters.BY_NAME[name].add(model), **CAPTURED, "draft_window": 8}
    plain = plain_llama(3, 24)
    for _ in range(3):
        reads.clear()
        found = generate(model, 3, config, max_new_tokens=24)
        assert [row[: 21 + 24] for row in plain] == found
        assert not [place for _, place in reads if "drafters/" in place or "window.py" in place]


def test_a_block_is_drafted_by_a_graph_if_the_host_decides_steps() -> None:
    """A processor that reads the text makes the host decide: nothing is launched before the read."""
    model, options = attached(), {"repetition_penalty": 1.3}
    config = {**drafters.BY_NAME["dflash"].add(model), **CAPTURED}
    plain = generate(model, 1, None, **options)
    for _ in range(4):
        assert generate(model, 1, config, **options) == plain
    ((_, drafter),) = model._speculation.compiled[model.drafters["dflash"]].values()
    assert drafter.program.graphs.drafts.captured_keys()
    assert not drafter.program.graphs.steps.captured_keys()
    sizes = {key[-1] for key in drafter.program.graphs.drafts.captured_keys()}
    assert sizes == {5}, "one size of block, that of training"
