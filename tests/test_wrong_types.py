"""Arguments of another type than expected: what was expected, what came, what to do, before any work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from drafters import random_block, random_head
from hf_specdec import InvalidConfigError, UnsupportedGenerationError, training, viz
from hf_specdec.drafters.dflash import DFlashDrafter
from hf_specdec.drafters.draft_model import DraftModelDrafter
from hf_specdec.drafters.eagle import EagleDrafter
from hf_specdec.drafters.medusa import MedusaDrafter
from trained import TALKS, arguments


@pytest.mark.parametrize("make", [EagleDrafter, DFlashDrafter, MedusaDrafter, DraftModelDrafter])
def test_a_drafter_needs_what_is_loaded_not_its_name(make: Any) -> None:
    with pytest.raises(InvalidConfigError, match=r"must be of type .*, got str\. Load it: "):
        make("org/head")


def test_training_needs_its_own_heads_data_and_arguments(model: Any, tmp_path: Path) -> None:
    eagle, block, settings = (
        random_head(model, version=3, draft_vocab_size=50),
        random_block(model),
        arguments(tmp_path, 1),
    )
    for call, message in (
        (lambda: training.train_dflash(model, eagle, TALKS, settings), "type DFlashHead, got Eagle3Head. EAGLE"),
        (lambda: training.train_eagle(model, block, TALKS, settings), "got DFlashHead. Block heads: train_dflash"),
        (lambda: training.train_medusa(model, block, TALKS, settings), "type MedusaHeads, got DFlashHead"),
        (lambda: training.start_block_from_target(eagle, model), "For an EAGLE-3 head: start_from_target"),
        (lambda: training.start_first_layer(eagle, model), "For an EAGLE-3 head: start_from_target"),
        (lambda: training.start_from_target(block, model), "For a block head: start_block_from_target"),
        (lambda: training.train_eagle(model, eagle, "data", settings), "got a str. Use read_conversations"),
        (lambda: training.train_eagle(model, eagle, ["data"], settings), "got a list. Use read_conversations"),
        (lambda: training.train_eagle(model, eagle, TALKS, {"lr": 1}), "type TrainingArguments, got dict. head_arg"),
        (lambda: training.distill(model, None, "hello", tmp_path), r"got one text. Pass \[text\]"),
    ):  # fmt: skip
        with pytest.raises(InvalidConfigError, match=message):
            call()
    assert not list(tmp_path.iterdir())


def test_an_assistant_is_a_loaded_model_that_is_used(model: Any) -> None:
    ids = torch.tensor([[5, 6, 7]])
    with pytest.raises(UnsupportedGenerationError, match=r"must be a loaded model, got 'org/small'\. Load it: "):
        model.generate(ids, speculative="auto", assistant_model="org/small")
    merged = {"method": "hybrid", "methods": ["prompt_lookup"]}
    with pytest.raises(
        UnsupportedGenerationError, match=r"no effect with methods=\['prompt_lookup'\]. Add 'draft_model'"
    ):
        model.generate(ids, speculative=merged, assistant_model=zoo.build("llama"))


def test_options_of_loading_a_head(model: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidConfigError, match=r"`verify` must be of type bool or .*, got str"):
        model.load_drafter(tmp_path, verify="yes")
    random_head(model, version=3, draft_vocab_size=50).save_pretrained(tmp_path)
    with pytest.raises(InvalidConfigError, match="Did you mean 'name'"):
        model.load_drafter(tmp_path, nme="mine")


def test_costs_are_a_dict() -> None:
    with pytest.raises(ValueError, match="Seconds by name are needed"):
        viz.plot_costs([0.1])  # type: ignore[arg-type]


def test_training_flushes_denormals_and_restores_the_mode() -> None:
    def flushed() -> bool:
        return bool(torch.full((1,), 1e-40) * 0.5 == 0)

    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    for before in (True, False):
        torch.set_flush_denormal(before)
        with training.trainer.training_modes():
            assert flushed()
        assert flushed() == before
