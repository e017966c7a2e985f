"""Attention without copies: equal to transformers' own, active in our forwards alone, gone afterwards."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import zoo
from hf_specdec import SpeculativeGenerationMixin
from hf_specdec.verification import attention
from hf_specdec.verification.attention import NAME, AttentionContext, attending, implementation, tree_attention
from hf_specdec.verification.probe import inspect_target
from hf_specdec.verification.tree_target import TreeTarget
from models import prompts


def layer_inputs(heads: int, shared: int, nodes: int, keys: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(heads * nodes)
    shapes = (2, heads, nodes, 16), (2, shared, keys, 16), (2, shared, keys, 8)
    query, key, value = (torch.randn(shape, generator=draw).to(dtype) for shape in shapes)
    mask = torch.rand(2, 1, nodes, keys, generator=draw) < 0.6
    mask[..., -nodes:] |= torch.eye(nodes, dtype=torch.bool)
    return query, key, value, mask


class Layer(torch.nn.Module):
    def __init__(self, groups: int) -> None:
        super().__init__()
        self.num_key_value_groups, self.is_causal = groups, True


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "shared", "nodes"), [(6, 2, 5), (4, 4, 3), (8, 1, 1), (6, 3, 1)])
def test_packed_rows_equal_transformers_attention(heads: int, shared: int, nodes: int, dtype: torch.dtype) -> None:
    query, key, value, mask = layer_inputs(heads, shared, nodes, 11, dtype)
    layer = Layer(heads // shared)
    wanted, _ = sdpa_attention_forward(layer, query, key, value, mask, 0.0, 0.3)
    token = attention._CONTEXT.set(AttentionContext({"full_attention": mask}))
    try:
        got, _ = tree_attention(layer, query, key, value, mask, 0.0, 0.3)
    finally:
        attention._CONTEXT.reset(token)
    assert got.shape == wanted.shape
    assert got.is_contiguous()
    torch.testing.assert_close(got, wanted, atol=2e-2 if dtype == torch.bfloat16 else 1e-5, rtol=0)


def test_what_is_not_ours_gets_transformers_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a forward, with another mask, with dropout or a bias: the numbers are transformers' to the last bit."""
    query, key, value, mask = layer_inputs(6, 2, 3, 7, torch.float32)
    called: list[bool] = []
    monkeypatch.setattr(AttentionContext, "attend", lambda *_args: called.append(True))
    forward, layer = AttentionContext({"full_attention": mask}), Layer(3)
    bias = torch.randn(1, 6, 3, 7)
    for given, current, options in (
        (mask, None, {}),
        (mask.clone(), forward, {}),
        (mask, forward, {"position_bias": bias}),
    ):
        token = attention._CONTEXT.set(current)
        try:
            got, _ = tree_attention(layer, query, key, value, given, **options)
        finally:
            attention._CONTEXT.reset(token)
        assert torch.equal(got, sdpa_attention_forward(layer, query, key, value, given, **options)[0])
    assert not called


def test_the_name_is_gone_after_a_forward_and_after_a_failure() -> None:
    model = zoo.build("llama")
    seen: list[str] = []
    forward = AttentionContext({})
    with attending(model.config, forward):
        seen.append(model.config._attn_implementation)
        assert implementation(model.config) == "sdpa"
        with attending(model.config, forward):  # another thread's, say
            pass
    with pytest.raises(RuntimeError), attending(model.config, forward):
        raise RuntimeError
    assert seen == [NAME]
    assert model.config._attn_implementation == "sdpa"


def test_eager_attention_is_left_alone() -> None:
    model = copy.deepcopy(zoo.build("llama"))
    model.set_attn_implementation("eager")
    with attending(model.config, AttentionContext({})):
        assert model.config._attn_implementation == "eager"
    assert not inspect_target(model).uses_packed_attention


@pytest.mark.parametrize(("name", "packs"), [("llama", True), ("gemma3_text", True), ("falcon", False)])
def test_a_model_that_compares_the_name_keeps_its_own(name: str, packs: bool) -> None:
    facts = inspect_target(zoo.build(name))
    assert facts.supports_trees
    assert facts.uses_packed_attention == packs


def test_one_node_behind_a_whole_row_needs_no_mask(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    masks: list[Tensor | None] = []
    packed = AttentionContext.packed

    def watch(self: AttentionContext, *args: Any) -> Tensor | None:
        masks.append(packed(self, *args))
        return masks[-1]

    monkeypatch.setattr(AttentionContext, "packed", watch)
    ids, mask = prompts(3)
    llama.generate(ids[:1, -4:], max_new_tokens=2, do_sample=False, speculative="prompt_lookup")
    assert masks
    assert masks[-1] is None  # the last token needs no draft
    masks.clear()
    llama.generate(ids, attention_mask=mask, max_new_tokens=2, do_sample=False, speculative="prompt_lookup")
    assert masks
    assert all(mask is not None for mask in masks)


def test_plain_generation_beside_ours_sees_transformers_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that generates plainly while the name is there computes as always, and its fingerprint is the same."""
    model = SpeculativeGenerationMixin.attach(copy.deepcopy(zoo.build("llama")))
    ids, mask = prompts(1)
    options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    plain, inside = model.generate(ids, **options).tolist(), []
    run = TreeTarget._run

    def watch(self: TreeTarget, *args: Any) -> Any:
        with attending(model.config, AttentionContext({})):
            thread = threading.Thread(target=lambda: inside.append(model.generate(ids, **options).tolist()))
            thread.start()
            thread.join()
        return run(self, *args)

    monkeypatch.setattr(TreeTarget, "_run", watch)
    assert model.generate(ids, speculative="prompt_lookup", **options).tolist() == plain
    assert inside
    assert all(answer == plain for answer in inside)
    assert len(model._speculation.facts) == 1
