"""How `verification/probe.py` tells rounding from a wrong forward in half precision."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import zoo
from hf_specdec import SpeculativeGenerationMixin
from hf_specdec.generation import model_programs
from hf_specdec.trees.tree import TokenTree
from hf_specdec.verification import probe, trials
from hf_specdec.verification.programs import CaptureError
from hf_specdec.verification.recurrence import Branches
from hf_specdec.verification.runners import ModelForward

PLAIN = torch.ones(6, 4)


def compared(distances: list[float], rounding: list[float]) -> str:
    """The message of `_compare` for logits at these relative distances; empty if it accepts them."""
    actual = PLAIN * (1 + torch.tensor(distances))[:, None]
    try:
        probe._compare(actual, PLAIN, torch.tensor(rounding), "at node 1", probe.ROUNDING_FACTOR)
    except probe._CannotVerifyError as error:
        return str(error)
    return ""


def test_a_text_that_is_sensitive_to_rounding_is_accepted() -> None:
    """With simulated kernel noise, SmolLM2's logits at one node move by 0.125, twice as much as its rounding error."""
    assert not compared([0.006, 0.15, 0.12, 0.005, 0.1, 0.12], [0.005, 0.07, 0.06, 0.004, 0.05, 0.06])


def test_a_small_change_of_a_text_with_little_rounding_is_refused() -> None:
    wrong = compared([0.006, 0.005, 0.004, 0.06, 0.05, 0.001], [0.005, 0.005, 0.004, 0.004, 0.003, 0.004])
    assert wrong == (
        "its logits at node 1 in a padded row differ from plain decoding's "
        "by 15.0 times the rounding error of its forward"
    )


def test_a_rounding_error_that_is_zero_by_chance_or_unusually_large_decides_nothing() -> None:
    assert not compared([0.008] * 6, [0.0] * 6)
    assert compared([0.7] * 6, [0.5] * 6)
    assert compared([float("nan")] * 6, [0.5] * 6)


def test_why_the_attention_is_not_used_is_kept() -> None:
    assert probe.inspect_target(zoo.build("llama")).unpacked_reason == ""
    reason = probe.inspect_target(zoo.build("falcon")).unpacked_reason
    assert reason == "its layers do not call transformers' attention function"


@pytest.mark.parametrize(("mode", "level"), [("cuda_graph", logging.WARNING), ("kernels", logging.INFO)])
def test_a_model_without_graphs_is_a_warning_even_if_nobody_asked_for_them(
    mode: Any, level: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise CaptureError("for a reason")

    monkeypatch.setattr(model_programs, "make_runner", refuse)
    model: Any = SpeculativeGenerationMixin.attach(copy.deepcopy(zoo.build("llama")))
    facts = probe.inspect_target(model)
    with caplog.at_level(logging.INFO, "hf_specdec"):
        assert model_programs.current_program(model, facts, frozenset(), mode, requested=False) is None
    (record,) = [record for record in caplog.records if "for a reason" in record.message]
    assert record.levelno == level


# ------------------------------------------------------------------------------------------------- wrong masks

RIGHT = TokenTree.ancestor_mask


def sibling_seen(tree: TokenTree) -> Tensor:
    """The mask of the probe's tree, but its third node sees its sibling."""
    mask = RIGHT(tree).clone()
    if mask.shape[-1] == 4:
        mask[:, 2, 1] = True
    return mask


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "glm4", "phi", "qwen3_moe"])
def test_a_wrong_mask_is_refused_in_half_precision(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = copy.deepcopy(zoo.build(name)).to(dtype)
    assert probe.inspect_target(model).uses_packed_attention
    monkeypatch.setattr(TokenTree, "ancestor_mask", sibling_seen)
    assert not probe.inspect_target(model).supports_trees


@pytest.mark.parametrize(("accepted", "packed", "asked"), [
    ({3}, True, [1, 3]), ({6}, True, [1, 3, 6]), (set(), False, [1, 3, 6, 1, 3, 1, 3]),
])  # fmt: skip
def test_a_refusal_of_packed_attention_is_checked_with_more_texts(
    accepted: set[int], packed: bool, asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts, original = list[int](), probe._probe

    def probed(target: Any, tried: Any, plain: Any, *others: Any) -> Any:
        counts.append(len(plain.prompt) // 2)
        if counts[-1] in accepted or counts == asked:
            return original(target, tried, plain, *others)
        raise probe._CannotVerifyError("by chance")

    monkeypatch.setattr(probe, "_probe", probed)
    facts = probe.inspect_target(copy.deepcopy(zoo.build("llama")).to(torch.bfloat16))
    assert (counts, facts.uses_packed_attention) == (asked, packed)


class Imprecise(ModelForward):
    """A captured forward whose logits are off by a relative error."""

    off = 0.0

    def __call__(self, *inputs: Any) -> Any:
        logits, states = super().__call__(*inputs)
        noise = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0))
        return logits + self.off * noise * logits.norm(dim=-1, keepdim=True) / logits.shape[-1] ** 0.5, states


@pytest.mark.parametrize(("error", "off", "accepted"), [
    (1e-7, 1e-3, False), (3e-4, 1e-3, True), (3e-4, 5e-2, False), (1e-2, 5e-2, True), (1e-1, 2e-1, False),
])  # fmt: skip
def test_the_tolerance_of_a_program_in_float32_is_that_of_its_products(
    error: float, off: float, accepted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = copy.deepcopy(zoo.build("llama"))
    facts = probe.inspect_target(model)
    monkeypatch.setattr(trials, "float32_error", lambda _device: error)
    monkeypatch.setattr(model_programs, "ModelForward", Imprecise)
    monkeypatch.setattr(Imprecise, "off", off)
    with nullcontext() if accepted else pytest.raises(CaptureError, match="it differs from the model's own forward"):
        model_programs.make_runner(model, facts, frozenset(), "cuda_graph")


# ------------------------------------------------------------------------------------- the small model, with noise


def with_noise(seed: int) -> Callable[..., Tensor]:
    """A linear layer whose outputs are off by one unit in the last place in 30 % of cases, as between two kernels."""
    linear, generator = torch.nn.functional.linear, torch.Generator().manual_seed(seed)

    def noisy(*args: Any) -> Tensor:
        exact = linear(*args)
        draw = torch.rand(exact.shape, generator=generator)
        return (exact.float() * (1 + ((draw < 0.15).float() - (draw > 0.85).float()) / 256)).to(exact.dtype)

    return noisy


@pytest.fixture
def small_bfloat16(small_model_path: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(small_model_path, dtype=torch.bfloat16)


@pytest.mark.slow
def test_kernel_noise_is_no_wrong_forward_and_hides_none(small_bfloat16: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(3):
        monkeypatch.setattr(torch.nn.functional, "linear", with_noise(seed))
        assert probe.inspect_target(small_bfloat16).unpacked_reason == "", seed
    monkeypatch.setattr(TokenTree, "ancestor_mask", sibling_seen)
    facts = probe.inspect_target(small_bfloat16)
    assert not facts.supports_trees
    assert "at node 2 of [-1, 0, 0, 1]" in facts.chain_only_reason


def test_a_nudge_shows_how_rounding_grows() -> None:
    """On most processors plain steps of this model and one forward over all tokens agree in every bit."""
    model = copy.deepcopy(zoo.build("qwen3_5_text")).to(torch.bfloat16)
    with torch.no_grad():
        run = trials.run_plainly(model, 3, 4)
        whole = trials.run_whole(model, run.prompt, run.mask, run.answer)
        nudged = trials.run_whole(model, run.prompt, run.mask, run.answer, nudges=True)
    moved = torch.stack([probe._distance(*pair) for pair in zip(nudged, whole, strict=True)])
    assert 1e-3 < float(moved.median()) < 5e-2
    assert not model.get_input_embeddings()._forward_hooks


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("qwen3_5_text", torch.float32),
        ("qwen3_5_text", torch.bfloat16),
        ("bamba", torch.float32),
        ("bamba", torch.bfloat16),
        ("lfm2", torch.float32),  # in bfloat16 its short convolutions weigh less than rounding
    ],
)
def test_a_node_that_continues_its_siblings_state_is_noticed(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "_kept_file", lambda *_: None)
    model, own = copy.deepcopy(zoo.build(name)).to(dtype), Branches.of
    assert probe.inspect_target(model).supports_trees

    def wrong(tree: TokenTree, known: int = 0) -> Branches:
        parents = tree.parents.clone()
        parents[..., 3:4] = torch.where(parents[..., 3:4] == 1, 2, parents[..., 3:4])
        return own(replace(tree, parents=parents), known)

    monkeypatch.setattr(Branches, "of", wrong)
    assert "its logits at node 3" in probe.inspect_target(model).chain_only_reason
