"""Attention without copies: equal to transformers' own, active in our forwards alone, gone afterwards."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import zoo
from hf_specdec import SpeculativeGenerationMixin
from hf_specdec.cpu.library import load_or_none
from hf_specdec.errors import CacheCapacityError
from hf_specdec.generation import model_programs
from hf_specdec.verification import runners, tree_attention
from hf_specdec.verification.probe import inspect_target
from hf_specdec.verification.programs import CaptureError
from hf_specdec.verification.tree_attention import AttentionContext, attending, layer_attention
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
    token = tree_attention._CONTEXT.set(AttentionContext({"full_attention": mask}))
    try:
        got, _ = layer_attention(layer, query, key, value, mask, 0.0, 0.3)
    finally:
        tree_attention._CONTEXT.reset(token)
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
        token = tree_attention._CONTEXT.set(current)
        try:
            got, _ = layer_attention(layer, query, key, value, given, **options)
        finally:
            tree_attention._CONTEXT.reset(token)
        assert torch.equal(got, sdpa_attention_forward(layer, query, key, value, given, **options)[0])
    assert not called


@pytest.mark.parametrize(("name", "packs"), [("llama", True), ("gemma3_text", True), ("falcon", False)])
def test_a_model_that_calls_its_own_attention_keeps_it(name: str, packs: bool) -> None:
    model = copy.deepcopy(zoo.build(name))
    facts = inspect_target(model)
    assert facts.supports_trees
    assert facts.uses_packed_attention == packs
    model.set_attn_implementation("eager")
    assert not inspect_target(model).uses_packed_attention


def test_a_compiled_forward_never_sees_the_context() -> None:
    """One graph, without breaks, that is not compiled again inside of one of our forwards."""
    query, key, value, mask = layer_inputs(6, 2, 3, 7, torch.float32)
    layer, counter = Layer(3), torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(lambda *given: layer_attention(layer, *given)[0], backend=counter, fullgraph=True)
    wanted = sdpa_attention_forward(layer, query, key, value, mask)[0]
    assert torch.equal(compiled(query, key, value, mask), wanted)
    with attending(AttentionContext({"full_attention": mask})):
        assert torch.equal(compiled(query, key, value, mask), wanted)
    assert counter.frame_count == 1


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
    """A thread that generates plainly during our forward computes as always, and its fingerprint is the same."""
    model = SpeculativeGenerationMixin.attach(copy.deepcopy(zoo.build("llama")))
    ids, mask = prompts(1)
    options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    plain, inside = model.generate(ids, **options).tolist(), []
    run = TreeTarget._run

    def watch(self: TreeTarget, *args: Any) -> Any:
        with attending(AttentionContext({})):
            thread = threading.Thread(target=lambda: inside.append(model.generate(ids, **options).tolist()))
            thread.start()
            thread.join()
        return run(self, *args)

    monkeypatch.setattr(TreeTarget, "_run", watch)
    assert model.generate(ids, speculative="prompt_lookup", **options).tolist() == plain
    assert inside
    assert all(answer == plain for answer in inside)
    assert len(model._speculation.facts) == 1


@pytest.mark.slow
def test_a_generation_in_another_thread_does_not_disturb_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs in the middle of the traced forward, with forwards of its own that end before it."""
    if load_or_none() is None:
        pytest.skip("no CPU kernels for this machine")
    model: Any = SpeculativeGenerationMixin.attach(copy.deepcopy(zoo.build("llama")))
    ids, traced, answers = prompts(1)[0], runners.ModelForward.__call__, []
    options = {"max_new_tokens": 8, "do_sample": False}
    plain = model.generate(ids, **options).tolist()

    def generate() -> None:
        chosen = {"method": "prompt_lookup", "compile": "none"}
        answers.append(model.generate(ids, speculative=chosen, **options).tolist())

    def disturbed(
        self: Any, tokens: Tensor, positions: Tensor, forward: AttentionContext, *rest: Any, **more: Any
    ) -> Any:
        own = AttentionContext.kind

        def kind(self: AttentionContext, mask: Tensor | None) -> str | None:
            if self is forward and not answers:
                thread = threading.Thread(target=generate)
                thread.start()
                thread.join()
            return own(self, mask)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(AttentionContext, "kind", kind)
            return traced(self, tokens, positions, forward, *rest, **more)

    monkeypatch.setattr(runners.ModelForward, "__call__", disturbed)
    chosen = {"method": "prompt_lookup", "compile": "kernels"}
    assert model.generate(ids, speculative=chosen, **options).tolist() == plain
    assert answers == [plain]
    assert model._speculation.programs["kernels"].runner is not None


@pytest.mark.parametrize(("cause", "is_kept"), [
    (OSError(28, "No space left on device"), False), (MemoryError(), False), (CacheCapacityError("too long"), False),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory"), False), (RuntimeError("no such operation"), True),
])  # fmt: skip
def test_a_failure_that_is_not_the_models_own_is_not_kept(
    cause: Exception, is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = SpeculativeGenerationMixin.attach(copy.deepcopy(zoo.build("llama")))
    ids, calls = prompts(1)[0], []
    plain = model.generate(ids, max_new_tokens=4, do_sample=False)

    def fail(*_arguments: Any) -> None:
        calls.append(1)
        raise CaptureError("it cannot be traced") from cause

    monkeypatch.setattr(model_programs, "make_runner", fail)
    for _ in range(2):
        chosen = {"method": "prompt_lookup", "compile": "kernels"}
        answer = model.generate(ids, max_new_tokens=4, do_sample=False, speculative=chosen)
        assert torch.equal(answer, plain)
    assert len(calls) == (1 if is_kept else 2)
